"""What all experiments share.

story        an experiment: jobs, outcomes, findings
claims       how a claim is judged: an order, a limit, a direction
running      jobs over all cores; their outcomes are kept, and gone on with
pages        findings as lines of the terminal, as a page, as results.json, as Markdown
recipes      a job that many experiments have: a recipe, simulated
training     the one loop of small trainings; networks and images have what it trains, and on what
turns        lanes of a timing that take turns
ranks        ranks of a timing, on this machine or on hosts, and the lines that they write
hosts        network namespaces joined by cables
cut_models   models as the layers that stages are cut from
"""

"""What all experiments share.

story      an experiment: jobs, outcomes, findings
claims     how a claim is judged: an order, a limit, a direction
running    jobs over all cores; their outcomes are kept, and gone on with
pages      findings as lines of the terminal, as a page, as results.json, as Markdown
recipes    a job that many experiments have: a recipe, simulated
"""

"""Every table and figure of the five sources, the questions that came after, and what the parts cost in seconds.

    make reproduce ARGS="lgc-3"      a paper's figure, ours beside theirs
    make bench ARGS="links"          a question or a timing of our own
    python -m experiments            the list of both

    core/       what an experiment is: a story, its jobs and their outcomes, claims, pages
    papers/     the figures of each source
    questions/  what else was asked, of runs that are trained or simulated
    timings/    seconds, bytes and memory on this machine, against a peer or a limit
    results/    what came out, as it was printed

An experiment is a generator that yields its jobs, is sent their outcomes, and yields what follows from them. Nothing of
this is in the wheel.
"""

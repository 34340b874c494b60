"""A cluster on a virtual clock: real gradients, made-up time.

Nothing here reads the real clock. Time comes from delay and network models that depend on the seed alone;
the same seed gives the same run, bit for bit.

    cluster      who computes when: an event queue, delay and network models; yields the steps the strategy asked for
    learner      what the steps come to: gradients on demand, update, optimiser, evaluation
    simulation   the two together, round by round; leaves a trace
    timing       rounds of arrays instead of events, for clusters too large for a queue; equal to `cluster`, by test

Time does not depend on what a gradient holds, so the cluster deals in tasks and the learner computes only the gradients
that a step uses: what `fastest-k` throws away is never computed. All gradients of one version are one pass
(`workers.grouped`).
"""

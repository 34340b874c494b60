"""Pipelines on torch.distributed.pipelining: a model's pieces on the ranks of a row, micro-batches through them.

    pipeline   what users hold: step, predict, weights
    stepping   one batch through it, on all ranks together
    crew       the ranks: who is which stage of which replica, what they tell each other
    messages   how they write it down
    farewell   what they do when one fails or is lost
    rooms      process groups, made once
    batches    what comes in: checked, and cut into full micro-batches and the rest
    workshop   pieces for each size of micro-batch, and runners: a torch schedule over this rank's pieces
    stages     one piece under a torch schedule, which names itself in errors and writes down what it did
    innards    all that is used of torch's stages and is not documented
    splitting  which pieces' backward may be taken apart
    standins   weights that take no memory, for tracing
    holdings   which weights this rank holds, with whom, and their gradients after a step
    replicas   gradients between the replicas of a stage

What is decided before a process starts (plans, cuts, schedules as data) is in paceline.pipeline.
"""

"""Pipelines on torch.distributed.pipelining: a model's pieces on the ranks of a row, micro-batches through them.

    pipeline         the class that users hold: step, predict, weights
    ranks            who is which stage of which replica, how ranks agree before a step, how failures reach all of them
    batches          what comes in: checked, and cut into full micro-batches and the rest
    runners          pieces for each size of micro-batch, under torch's schedules
    stages           one piece under a torch schedule, which names itself in errors and records what it did
    torch_internals  all that is used of torch's stages and is not documented
    weights          which weights this rank holds, with whom; their states
    gradients        gradients after a step: between stages that share weights, and between replicas
    planning         one plan for all ranks
    job              one rank of a recipe with a pipeline

What is decided before a process starts (plans, cuts, schedules as data) is in paceline.pipeline.
"""

"""Batches by speed in a script: `paceline.Balance` around a model that DDP (or FSDP) trains.

    balance     what a script holds: settings, when ranks look at their times, the table of shares
    sampler     the batches of an epoch, each rank its own part of every step
    passes      one pass over the loader: which batch was handed out, which one is being trained
    hooks       hooks on the model: the weight of the gradient, and how long a batch took
    schedule    which shares hold for which step

The shares themselves are decided by `paceline.strategies.shares`, from numbers that all ranks have.
"""

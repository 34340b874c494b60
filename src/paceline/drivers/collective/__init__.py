"""On torch.distributed: what users start with torchrun. Only this package knows it, besides the pipeline.

Collectives run in the order in which they are started, which must be the same on every rank: nothing here starts one
from a callback, a thread, or a branch that one rank takes and another does not.
"""

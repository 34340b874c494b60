"""Averaging on torch.distributed: HPSGD, Local SGD, BMUF, DiLoCo, in a training script or as ranks of a recipe.

    averager      the classes of the public interface: `paceline.HPSGD(model, optimizer)` and the others
    preparation   what is averaged, how it travels, and what one rank alone can refuse
    loop          carries out what the averaging state (paceline.strategies.averaging) orders
    transport     what an average consists of, and how it is sent
    job           what a rank of a recipe does

The ranks' own process group, the model that they hold alike, and who is alive: drivers/ranks, which rounds share.

Where we differ from the paper: HPSGD (Y. Zhou et al., 2021) has two processes on each worker, one that trains and one
that averages, which share the model. Here it is one process, and the average is an asynchronous all-reduce, which the
backend's own thread carries out while training goes on. A second process, a thread of our own and the asynchronous
collective overlap equally well; the process costs 250 MB more on each worker, and the model must be copied between the
two.

Collectives run in the order in which they are started, which must be the same on every rank: every rank starts them on
its training thread, one after another. Nothing here starts one from another thread, when another collective completes
(a future's callback), or in a branch that one rank takes and another does not.
"""

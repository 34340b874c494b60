"""`paceline.watch(model)`: where the time of a script's steps goes, on every rank.

    watch     what a script calls: one Watch for each rank, which writes the rank's file of step times
    phases    hooks on the model, on backward passes and on optimisers become the phases of a step
    buckets   DDP's communication hook: when each bucket was ready, and when its mean was there
    lines     a thread makes lines of the steps that are over, and writes them
    links     messages between neighbouring ranks, timed: what their links carry
    folder    the one folder of all ranks: who takes it, who sees it, who goes on with it
    relay     lines of ranks on other machines, through the launch's store, into rank 0's folder

Nothing here changes what is trained: a watched run has the same bits as one that nobody watches.
"""

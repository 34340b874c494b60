"""Rounds on torch.distributed: LGC, fastest-k and full without a server, in a training script or as ranks of a recipe.

    synchronizer   the public interface: `paceline.LGCSync(model, optimizer, k=7)` and the others
    preparation    what one rank alone can refuse
    batches        epochs that end at the same round on all ranks; batches in blocks
    loop           a rank's side of the rounds: its threads and its waits
    decider        the strategy, on one rank: reports of the ranks in, notices to all of them out
    messages       reports and notices, and how they travel through the launch's store
    exchange       one rank's exchange thread: notice in, contribution, one all-reduce or a codec's exchange, update out
    outcomes       what became of each rank's gradients
    job            what a rank of a recipe does
    journal        the journal of a recipe's run, which rank 0 keeps

One round, of 4 ranks with K = 3; rank 0 also decides:

    training thread of      rank 0   #######> reports .............| apply | #####
    each rank               rank 1   ##########> reports ..........| apply | #####
                            rank 2   #########> reports ...........| apply | #####
                            rank 3   ##############################|## reports late, apply, #####
    deciding thread         rank 0             K-th report: step t |
    exchange thread         all                      notice, contribution, sum, update
                                                     \\___ rank 3 takes part with what it has, or zeros ___/

A slow *computation* is not waited for; a slow link, a stopped process, or a thread that holds Python's lock is: every
rank takes part in every sum (switching.py says what is done about the lock).
"""

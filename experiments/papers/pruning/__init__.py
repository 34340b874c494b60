"""J. Li et al., Data Fine-Pruning: its figures, formulas and tables.

    plateaus       pruning-1            test loss and accuracy over the epochs: a plateau after each change of the rate
    sample_losses  pruning-2            the losses of the same samples in two trainings
    schedules      pruning-3            an example of a schedule
                   pruning-formulas     how many epochs are pruned: formulas (3) and (4) beside the schedule itself
    tables         pruning-table-1      time with and without pruning
                   pruning-table-2      accuracy with and without pruning; the same runs
    overhead       pruning-overhead     what pruning itself costs in 200 epochs
    bad_samples    pruning-bad-samples  whether other trainings and networks prune the same samples (its future work)
    training       how large a training is, the policies, and what a job of them runs
    turns          a policy of our own that was tried, and is not in the library
    setting        the numbers and remarks that they share

The laboratory has LeNet, which is one of the paper's ten networks, on CIFAR-10 made smaller. The paper states neither
how many samples sit out (PruningNum) nor the tolerance: ours are in `training.fine_settings`.
"""

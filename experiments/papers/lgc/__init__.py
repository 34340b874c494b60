"""Live Gradient Compensation: its figures.

    example        lgc-1      three workers, three rounds: whose time is waited for
    skew           lgc-3      accuracy by skew (c classes a worker) and persistence (h rounds)
    time_and_loss  lgc-4      loss over rounds and over time
                   lgc-5      K = 5 to 10: the frontier of time and loss
    partial_work   lgc-6      stragglers that do r of 4 blocks, with and without linear scaling
    system_sizes   lgc-sizes  5 to 40 workers
    setting                   what they share: the paper's cluster as a recipe, the lanes, means over seeds

The laboratory has LeNet in place of VGG-11, a few epochs in place of 60, and the paper's cluster: ten workers, K = 7,
batches of 32 in 4 blocks, delays of 0.05 s plus an exponential of mean 0.02 s, held for h rounds. Digits are too easy:
there nearly every cell ends at the same accuracy. Late work is `complete`, as in the paper.
"""

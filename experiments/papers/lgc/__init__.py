"""Live Gradient Compensation: its figures.

The laboratory has LeNet in place of VGG-11, a few epochs in place of 60, and the paper's cluster: ten workers, K = 7,
batches of 32 in 4 blocks, delays of 0.05 s plus an exponential of mean 0.02 s, held for h rounds. Digits are too easy:
there nearly every cell ends at the same accuracy. Late work is `complete`, as in the paper.
"""

"""The tables and figures of LARS's paper: Y. You et al., Large Batch Training of Convolutional Networks.

    lars-table-1, -3    SGD, and LARS beside it, as the batch grows                    growing_batch
    lars-table-2        |w| / |gradient| of AlexNet's layers before the first step     initial_ratios
    lars-table-4        LARS with minimal and with extended augmentation               augmentation
    lars-table-5        more epochs at a large batch                                   more_epochs
    lars-table-6        GoogLeNet without normalisation: epochs and warm-up            googlenet
    lars-figure-1, -2   small and large batch over the epochs                          training_curves
    lars-figure-3       accuracy over the rate                                         rate_plateau
    lars-figure-4       accuracy over the epochs as the batch grows                    augmentation

All but table 2 are made of cells (`cells`): a training with a network, an optimiser, a batch and a rate (`run`).

The laboratory has a small CNN in place of AlexNet, Fashion-MNIST averaged to 14x14 pixels in place of ImageNet, 16,384
images and 64 epochs: 128 steps at a batch of 8,192, where the paper's runs have 15,600. Batches stand for each other:

    paper    512     4096    8192    16384, 32768
    ours     128     2048    8192    16384 (all images: one step an epoch)

Every rate is one run. The best rate is chosen on training images that no run trains on, and tables show the accuracy on
the test images; the paper chooses on what it shows.
"""

"""The numbers that the sources print, each with its place. Nothing else in this package is written down.

Figures of the papers are not in the texts that we have: where only a curve or a bar was printed, its heights are not
readable, and what the text says of them is what a claim can be held against.
"""

from __future__ import annotations

from types import MappingProxyType

# -- J. Xu, Live Gradient Compensation for Evading Stragglers in Distributed Learning ---------------------------------

LGC_FIGURE_1 = MappingProxyType(  # figure 1 and its caption: three workers, K = 2, seconds of each round
    {"full": (2.0, 2.0, 2.5), "lgc": (1.2, 1.5, 1.3)}
)
LGC_FIGURE_1_TOTALS = MappingProxyType({"full": 6.5, "lgc": 4.0})
LGC_FIGURE_3 = (  # section III-B; the bars are not readable
    "text: K-SGD diverges at one class a worker, loses most for two and three with lasting stragglers and little at "
    "h = 1; LGC is about as good as Full"
)
LGC_TIME_SAVED = 0.35  # section III-B, figure 4: up to about 35 %
LGC_FIGURE_4 = MappingProxyType(  # section III-B; the curves are not readable
    {"full": "lowest error, longest time", "fastest-k": "higher error", "lgc": "almost the same loss as Full"}
)
LGC_FIGURE_5 = (  # section III-C; the points and their labels are not readable
    "text: as K falls the accuracy of K-SGD degrades substantially and that of LGC slightly; the frontier of LGC "
    "significantly improves on that of K-SGD"
)
LGC_FIGURE_6 = "text: with linear scaling LGC can effectively utilize the partial work"  # section III-C; no number
LGC_SIZES = "text: different system sizes were evaluated; no result is given"  # section III-C
LGC_SETTING = MappingProxyType(  # sections III-A, III-B (cluster, delays, repeats) and III-C (blocks)
    {
        "workers": 10,
        "k": 7,
        "batch": 32,
        "blocks": 4,
        "epochs": 60,
        "lr": 0.1,
        "decay": 0.1,
        "decay_epoch": 30,
        "momentum": 0.9,
        "weight_decay": 0.0005,
        "warmup_epochs": 2,
        "shift_seconds": 0.05,
        "mean_seconds": 0.02,
        "repeats": 3,
    }
)

# -- J. Li et al., Data Fine-Pruning ----------------------------------------------------------------------------------

PRUNING_NETWORKS = (
    "LeNet", "VGG-13", "VGG-16", "VGG-19", "ResNet-18", "ResNet-34", "ResNet-50", "WRN-10", "WRN-16", "WRN-22",
)  # fmt: skip
PRUNING_TABLE_1 = MappingProxyType(  # seconds and per cent; `pruned` is without the overhead
    {
        "regular": (1220, 2028, 2554, 3110, 1277, 2047, 3931, 12240, 18480, 24780),
        "pruned": (1071.73, 1873.67, 2356.74, 2867.7, 1109.92, 1767.79, 3379.82, 10560, 15960, 21240),
        "overhead": (4.27, 4.33, 4.26, 4.30, 4.08, 4.21, 4.18, 4.12, 4.25, 4.32),
        "speedup": (11.80, 7.40, 7.56, 7.65, 12.76, 13.43, 13.92, 13.73, 13.81, 14.29),
    }
)
PRUNING_TABLE_2 = MappingProxyType(  # per cent, the mean of the best three epochs
    {
        "regular": (75.15, 93.92, 93.79, 93.35, 91.25, 92.86, 93.75, 92.13, 94.22, 95.08),
        "pruned": (74.72, 93.56, 93.44, 93.30, 91.16, 92.85, 93.46, 91.78, 94.20, 94.71),
    }
)
PRUNING_EPOCHS, PRUNING_RATE_CHANGES = 200, (60, 120, 160)
PRUNING_FIRST_INTERVAL = (1.5, 0.67)  # section 2.2, figure 1: ResNet-18's test loss before the first change of the rate

# -- Y. Zhou et al., HPSGD --------------------------------------------------------------------------------------------

HPSGD_FIGURE_5A = (  # section 4: (workers, over whom, gain in scale efficiency)
    (4, "local-sgd", 0.0),
    (4, "ssgd", 1.33),
    (16, "local-sgd", 0.75),
    (16, "ssgd", 2.50),
)
HPSGD_FIGURES = "the curves and bars of figures 4, 5b and 6 are not readable, and the text has no numbers of them"
HPSGD_SETTING = MappingProxyType({"lr": 0.01, "batch": 128, "period": 8, "epochs": 100})

# -- Y. You et al., Large Batch Training of Convolutional Networks ----------------------------------------------------

LARS_TABLE_1 = MappingProxyType(  # SGD: (batch, rate, top-1 accuracy in per cent)
    {
        "alexnet": (
            (512, 0.02, 58.8), (4096, 0.04, 53.0), (4096, 0.05, 53.1), (4096, 0.06, 51.6), (4096, 0.07, 0.1),
            (8192, 0.02, 29.8), (8192, 0.03, 44.8), (8192, 0.04, 43.1), (8192, 0.05, 0.1),
        ),
        "alexnet-bn": (
            (512, 0.02, 60.2), (4096, 0.16, 58.1), (4096, 0.18, 58.9), (4096, 0.21, 58.5), (4096, 0.30, 57.1),
            (8192, 0.23, 57.6), (8192, 0.30, 58.0), (8192, 0.32, 57.7), (8192, 0.41, 56.5),
        ),
    }
)  # fmt: skip
LARS_TABLE_1_WARMUP = MappingProxyType({"alexnet": 2.5, "alexnet-bn": 0})  # epochs; headings of table 1
# As printed: label, |w|, |gradient|, ratio. By their norms ".b" are the weights and ".w" the biases. The ratio of
# conv5.w is not the quotient of its norms, which is 800.
LARS_TABLE_2 = (
    ("conv1.b", 1.86, 0.22, 8.48), ("conv1.w", 0.098, 0.017, 5.76), ("conv2.b", 5.546, 0.165, 33.6),
    ("conv2.w", 0.16, 0.002, 83.5), ("conv3.b", 9.40, 0.135, 69.9), ("conv3.w", 0.196, 0.0015, 127),
    ("conv4.b", 8.15, 0.109, 74.6), ("conv4.w", 0.196, 0.0013, 148), ("conv5.b", 6.65, 0.09, 73.6),
    ("conv5.w", 0.16, 0.0002, 69), ("fc6.b", 30.7, 0.26, 117), ("fc6.w", 6.4, 0.005, 1345),
    ("fc7.b", 20.5, 0.30, 68), ("fc7.w", 6.4, 0.013, 489), ("fc8.b", 20.2, 0.22, 93), ("fc8.w", 0.316, 0.016, 19),
)  # fmt: skip
LARS_TABLE_3 = MappingProxyType(  # LARS: (batch, rate, accuracy)
    {
        "alexnet": ((512, 2, 58.7), (4096, 10, 58.5), (8192, 10, 58.2), (16384, 14, 55.0), (32768, 14, 46.9)),
        "alexnet-bn": ((512, 2, 60.2), (4096, 10, 60.4), (8192, 14, 60.1), (16384, 23, 59.3), (32768, 22, 57.8)),
    }
)
LARS_TABLE_3_WARMUP = MappingProxyType({"alexnet": 2, "alexnet-bn": 5})  # epochs; section 5
LARS_TABLE_4 = (  # ResNet-50: batch, rate, warm-up epochs (None: none), accuracy, with extended augmentation
    (256, 4, None, 73.8, 75.8),
    (1024, 9, 5, 73.3, 75.4),
    (8192, 30, 5, 73.5, 75.2),
    (16384, 33, 12, 72.9, 74.4),
    (32768, 40, 12, 72.5, 72.5),
)
LARS_TABLE_5 = MappingProxyType(
    {
        "epochs": (100, 125, 150, 175, 200),
        "alexnet, 16K": (55.0, 55.9, 56.7, 57.3, 58.2),
        "alexnet-bn, 32K": (57.8, 59.2, 59.5, 59.5, 59.9),
        "resnet50, 16K": (74.4, 74.1, 74.6, 74.8, 75.5),
    }
)
LARS_TABLE_6 = (  # GoogLeNet: batch, rate, epochs, warm-up epochs (None: none), accuracy; the first without LARS
    (256, 0.02, 100, None, 69.2),
    (256, 4, 100, 5, 70.3),
    (1024, 6, 100, 10, 69.7),
    (2048, 7, 150, 25, 71.1),
    (4096, 10, 200, 30, 69.9),
    (8192, 10, 250, 60, 69.0),
    (16384, 10, 350, 110, 67.2),
)
LARS_FIGURE_3_BATCH, LARS_FIGURE_3_RATES, LARS_FIGURE_3_ACCURACY = 16384, (13, 22), 59.3
LARS_TRUST = MappingProxyType({"1K": 0.0002, "4K": 0.005, "8K": 0.008})  # "optimal"; the tables have 0.001 throughout

# -- the lecture on scaling -------------------------------------------------------------------------------------------

LECTURE_TRENDS = (  # who, workers, batch, minutes, speed-up, top-1 accuracy in per cent
    ("He 2016", 8, 256, 1740, 1.0, 75.3),
    ("Goyal 2017", 256, 8192, 60, 29, 76.3),
    ("Akiba 2017", 1024, 32768, 15, 116, 74.9),
    ("You 2018", 2048, 32768, 14, 124, 74.9),
)
LECTURE_ONE_BIT = MappingProxyType({"vector": (0.1, 0.15, -0.2, 20.0, 15.3, -1.222), "upper": 8.8875, "lower": -0.711})

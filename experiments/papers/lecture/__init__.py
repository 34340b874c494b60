"""The examples, bounds and formulas of the lecture on scaling distributed training.

printed      the example vector of 1-bit SGD, and the table of ImageNet runs
quantising   quantised SGD with one level and with s levels: second moment and bits
tradeoff     iterations against bits
theorem      the bound on convex SGD
pipelines    the idle share of a pipeline, and layers onto devices
"""

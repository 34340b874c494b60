"""Every algorithm in its slowest, plainest form: the specification, and what the fast code is tested against.

strategies    full, fastest-k, lgc, async, and lars
averaging     local-sgd, bmuf, diloco, hpsgd
pruning       fine-pruning and InfoBatch
placement     a model's layers on devices, every cut tried
"""

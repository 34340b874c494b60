"""A cluster on a virtual clock: real gradients, made-up time.

Nothing here reads the real clock. Time comes from delay and network models that depend on the seed alone;
the same seed gives the same run, bit for bit.
"""

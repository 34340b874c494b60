"""Batch -> gradient: what a worker does between receiving a model and sending its gradient.

Nothing here knows when a round closes or how a gradient travels.
"""

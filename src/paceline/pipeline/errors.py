"""What a pipeline refuses, in words for the person who asked."""

from __future__ import annotations


class PipelineError(ValueError):
    """A model that cannot be cut, a batch that cannot be split, a rank that is not there.

    >>> raise PipelineError("stages must be between 1 and 512 (stages=0)")
    Traceback (most recent call last):
    paceline.pipeline.errors.PipelineError: stages must be between 1 and 512 (stages=0)
    """

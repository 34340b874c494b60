"""The one error of data that is missing, broken or hostile: a line a person can act on."""

from __future__ import annotations


class DatasetError(ValueError):
    """A data set's files are missing, cannot be fetched, or are not what they should be.

    >>> raise DatasetError("mnist is not in /data: put train-images-idx3-ubyte.gz there")
    Traceback (most recent call last):
    paceline.data.errors.DatasetError: mnist is not in /data: put train-images-idx3-ubyte.gz there
    """

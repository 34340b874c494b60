"""Normalisation by name: batch, group or none.

Batch normalisation makes a sample's output depend on the others of its batch, and carries running averages
that workers must agree on; group normalisation (Wu and He 2018) does neither.
"""

from __future__ import annotations

from torch import nn

MOST_GROUPS = 32
FEWEST_CHANNELS_PER_GROUP = 4


def norm_layer(norm: str, channels: int) -> nn.Module:
    """The layer that normalises `channels` maps in the way that `norm` names.

    >>> norm_layer("group", 24)
    GroupNorm(6, 24, ...)
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(group_count(channels), channels)
    return nn.Identity()


def group_count(channels: int) -> int:
    """The most groups, up to 32, that divide the channels and leave at least four in each, or one group.

    A group of one channel on a map of one pixel would always be normalised to zero: hence the four.

    >>> [group_count(channels) for channels in (512, 64, 24, 7, 3)]
    [32, 16, 6, 1, 1]
    """
    most = max(1, min(MOST_GROUPS, channels // FEWEST_CHANNELS_PER_GROUP))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)

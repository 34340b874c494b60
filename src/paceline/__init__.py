"""paceline: train at the pace of the pack, not of its slowest rider."""

__version__ = "0.1.0"

"""Ratios against peers and limits, each a command that prints a table. Nothing in `paceline` imports this.

python -m benchmarks                       the list
python -m benchmarks claims gradients      runs two of them
"""

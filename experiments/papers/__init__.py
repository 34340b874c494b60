"""The figures and tables of the five sources, ours beside theirs. What they print stands in `published` alone."""

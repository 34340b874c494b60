"""Hierarchical Parallel SGD (HPSGD): accuracy by samples, scale efficiency, and where the seconds go.

HPSGD is shown twice: as the paper has it (`rebase` off), and as it is here by default (on). Claims are held against
the first. Where seconds to an accuracy count, two settings are shown: the paper's rate of 0.01, and a rate five times
as high, with another network.

setting     the lanes that are compared, what they train, and a lane's run
reached     when a run reached an accuracy, and which comparisons the measurements allow
accuracy    hpsgd-4a, hpsgd-4b
scaling     hpsgd-5a
seconds     hpsgd-5b, hpsgd-6a, hpsgd-6b
analysis    hpsgd-analysis: section 3.2
"""

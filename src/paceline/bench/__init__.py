"""Benchmarks that users run on their own machine: how fast codecs are there, and what they cost a gradient.

Whatever is compared is measured in turns in one process, so that a busy machine slows all of it alike. Figures are
measured or computed here; none is written down.

    gradients.py -> codecs.py -> tables.py                        the terminal
                                 tables.py -> paceline.reports    report.html
"""

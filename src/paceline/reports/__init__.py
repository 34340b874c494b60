"""Traces in, tables and HTML pages out.

Nothing here trains, simulates or measures: every number and every picture comes from traces or measurements that were
written down, so a report can be made again years later. The same traces give the same page to the last byte, and a
page asks the network for nothing.

    traces -> results.py (groups, one per strategy; rows of means)
                -> table.py, shares.py                           the terminal's tables
                -> sentences.py, curves.py, timeline.py,
                   arrivals.py                  -> report.py     report.html
    page.py and chart.py are the shell and the figures of every page, also those of codecs, pipelines and pruning.
"""

from paceline.reports.report import report_html, write_report
from paceline.reports.table import results_table

__all__ = ["report_html", "results_table", "write_report"]


def __dir__() -> list[str]:
    return __all__

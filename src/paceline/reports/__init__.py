"""Traces in, tables and one HTML page out.

Nothing here trains, simulates or measures: every number and every picture comes from traces, so a report can
be made again, years later, from what was written down. The same traces give the same page to the last byte,
and the page asks the network for nothing.

    traces -> groups (one per strategy, seeds together) -> results (means)  -> table.py      the terminal
                                                        -> headline.py      \
                                                        -> curves.py         \
                                                        -> timeline.py        > page.py      report.html
                                                        -> arrivals.py       /
                                                        -> membership.py    /
"""

from paceline.reports.page import report_html, write_report
from paceline.reports.table import results_table

__all__ = ["report_html", "results_table", "write_report"]

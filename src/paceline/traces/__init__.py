"""What happened in a run, as plain values that can be written down, read back and drawn.

Nothing here computes a gradient or knows a driver: a trace says who did what when, and what came of it.
"""

from paceline.traces.records import Evaluation, Outcome, Pruned, Round, Summary, Trace, Work, summarise

__all__ = ["Evaluation", "Outcome", "Pruned", "Round", "Summary", "Trace", "Work", "summarise"]

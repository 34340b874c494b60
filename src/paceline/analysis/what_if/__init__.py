"""What would have helped a recorded run: it is played again by the simulator, then with one thing changed at a time.

measured_run     what the record tells of computing, messages and the server's own time
replayed_times   the run played again, and how far that is from the record
remedies         what could be changed
answer           the remedies, predicted and ranked, and the words for them
checking         a remedy run for real on this machine
"""

from __future__ import annotations

from paceline.analysis.what_if.answer import Answer, PredictedRemedy, Wanted, what_if
from paceline.analysis.what_if.measured_run import WhatIfError

__all__ = ["Answer", "PredictedRemedy", "Wanted", "WhatIfError", "what_if"]

"""Who is slow, since when and why, and what it costs: computed from what a run has recorded.

    recorded run -> timings.py (who was ready when, what each phase took) -> lateness.py (excess, chance, since when)
                 -> diagnosis.py (where the time went, who, which phase, host or link) -> words.py (in sentences)

Nothing here reads a clock or a file, or draws anything that is not the same every time.
"""

from paceline.diagnosis.diagnosis import (
    Diagnosis,
    LinkSpeed,
    Suspect,
    WorkerTime,
    behind_slow_links,
    diagnose,
    diagnose_timings,
)
from paceline.diagnosis.timings import Timings, timings_of
from paceline.diagnosis.words import evidence, verdict

__all__ = [
    "Diagnosis",
    "LinkSpeed",
    "Suspect",
    "Timings",
    "WorkerTime",
    "behind_slow_links",
    "diagnose",
    "diagnose_timings",
    "evidence",
    "timings_of",
    "verdict",
]

"""What is trained, on what, and how a step changes it: the part that all drivers share.

Nothing here reads a clock or a socket, or decides when a step is taken: a virtual clock, a cluster and a recorded run
take the same steps with this code, so that the same step gives the same bits wherever it is taken.
"""

from paceline.training.batches import Batches
from paceline.training.evaluation import measure
from paceline.training.pruned import PruningTotals, pruning_of
from paceline.training.senders import Senders, gradient_generator
from paceline.training.task import Training
from paceline.training.trainee import Trainee, all_finite, fingerprint

__all__ = [
    "Batches",
    "PruningTotals",
    "Senders",
    "Trainee",
    "Training",
    "all_finite",
    "fingerprint",
    "gradient_generator",
    "measure",
    "pruning_of",
]

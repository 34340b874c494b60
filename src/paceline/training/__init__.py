"""What is trained, on what, and how a step changes it: the part that all drivers share.

Nothing here reads a clock or a socket, or decides when a step is taken: a virtual clock, a cluster and a recorded run
take the same steps with this code, so that the same step gives the same bits wherever it is taken.
"""

from paceline.training.batches import Batches, BatchPlace
from paceline.training.pruned import PruningTotals, pruning_of
from paceline.training.train_state import TrainState, all_finite, fingerprint
from paceline.training.training import Measurement, Training, measure
from paceline.training.worker_codecs import WorkerCodecs, gradient_generator

__all__ = [
    "BatchPlace",
    "Batches",
    "Measurement",
    "PruningTotals",
    "TrainState",
    "Training",
    "WorkerCodecs",
    "all_finite",
    "fingerprint",
    "gradient_generator",
    "measure",
    "pruning_of",
]

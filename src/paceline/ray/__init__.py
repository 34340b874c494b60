"""paceline on Ray: a parameter server and workers as Ray's actors and tasks, and what scripts of TorchTrainer need.

    paceline.ray.train(recipe)                  training.py, what `paceline train --on ray` does
        connection                              a cluster of Ray's, and what it has
        run                                     one run, as its caller sees it: what is lost is started again
        server, worker                          what runs on the cluster's nodes
        mirror                                  the run's folder, copied to the caller while the run goes on

    paceline.ray.prepare_data_loader(loader)    torch_trainer.py, for scripts under ray.train.torch.TorchTrainer
    paceline.ray.report(metrics, *parts)

Ray is an extra (`pip install 'paceline[ray]'`). Inside this package `import ray` is Ray itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import lazy_names

if TYPE_CHECKING:
    from paceline.ray.connection import RayMissingError, RayResourcesError, RayTrainingError
    from paceline.ray.torch_trainer import DataLoaderError, prepare_data_loader, report
    from paceline.ray.training import train

_HOMES = {
    "train": "training",
    "RayTrainingError": "connection",
    "RayResourcesError": "connection",
    "RayMissingError": "connection",
    "prepare_data_loader": "torch_trainer",
    "report": "torch_trainer",
    "DataLoaderError": "torch_trainer",
}

__all__ = [
    "DataLoaderError",
    "RayMissingError",
    "RayResourcesError",
    "RayTrainingError",
    "prepare_data_loader",
    "report",
    "train",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__

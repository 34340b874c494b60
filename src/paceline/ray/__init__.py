"""paceline on Ray: a parameter server and workers as Ray's actors and tasks, and what scripts of TorchTrainer need.

    paceline.ray.train(recipe)                  training.py, what `paceline train --on ray` does
        connection                              a cluster of Ray's, and what it has
        run                                     one run, as its caller sees it: what is lost is started again
        server, worker                          what runs on the cluster's nodes
        mirror                                  the run's folder, copied to the caller while the run goes on

    paceline.ray.prepare_data_loader(loader)    torch_trainer.py, for scripts under ray.train.torch.TorchTrainer
    paceline.ray.report(figures, step)

Ray is an extra (`pip install 'paceline[ray]'`). Inside this package `import ray` is Ray itself.
"""

from __future__ import annotations

from paceline.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "train": "training",
        "RayTrainingError": "connection",
        "RayResourcesError": "connection",
        "RayMissingError": "connection",
        "prepare_data_loader": "torch_trainer",
        "report": "torch_trainer",
        "DataLoaderError": "torch_trainer",
    },
)

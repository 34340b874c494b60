"""What scripts under `ray.train.torch.TorchTrainer` need beside paceline as it is: loaders, and figures in reports.

Two functions of Ray's do not go with paceline's parts, and have a counterpart here.

    ray.train.torch.prepare_data_loader(loader)     makes a new DataLoader of the old one's batch_size, with a
                                                    DistributedSampler. Beside a batch sampler batch_size is None, so
                                                    the new loader takes single samples, and collates the parts of one
                                                    as if they were a batch: an error about shapes, or none. Pruning is
                                                    gone.
    paceline.ray.prepare_data_loader(loader)        leaves a pruning sampler where it is (it shards among ranks by
                                                    itself), and refuses any other batch sampler.

    ray.train.report(metrics)                       waits for all ranks. As the `log=` of a part it would make ranks
                                                    that average without waiting wait for each other, or for ever.
    paceline.ray.report(metrics, sync)              one report with the parts' figures in it, where all ranks report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import ray.train
import ray.train.torch
from torch.utils.data import BatchSampler, DataLoader

from paceline.data.batch_samplers import let_set_epoch_through
from paceline.data.pruning.sampler import PrunedBatches
from paceline.errors import PacelineError
from paceline.loggers import prefixed


class DataLoaderError(PacelineError, ValueError):
    """A loader that Ray would make another one of, in silence.

    >>> raise DataLoaderError("the loader has a batch sampler of its own (BucketSampler)")
    Traceback (most recent call last):
    paceline.ray.torch_trainer.DataLoaderError: the loader has a batch sampler of its own (BucketSampler)
    """


class HasFigures(Protocol):
    """A part of paceline: averaging, rounds, compression, pruning."""

    def figures(self) -> dict[str, float]:
        """Return what is worth logging by now."""


def prepare_data_loader(
    loader: DataLoader[Any], *, add_dist_sampler: bool = True, move_to_device: bool = True, auto_transfer: bool = True
) -> DataLoader[Any]:
    """Prepare a loader for the ranks of TorchTrainer, as Ray does, and keep a pruning sampler if it has one.

        pruning = paceline.InfoBatch(dataset, batch_size=128, epochs=20)
        loader = paceline.ray.prepare_data_loader(DataLoader(dataset, batch_sampler=pruning))

    Any other batch sampler is refused where there are several ranks, because Ray throws it away and takes single
    samples; with `add_dist_sampler=False` it stays, and shards by itself. Everything else is Ray's.
    """
    sampler = loader.batch_sampler
    if isinstance(sampler, PrunedBatches):
        add_dist_sampler = False
    elif (
        add_dist_sampler
        and loader.batch_size is None
        and sampler is not None
        and ray.train.get_context().get_world_size() > 1
    ):
        kind = type(sampler).__name__
        own = "one of torch's" if type(sampler) is BatchSampler else "one of your own"
        raise DataLoaderError(
            f"the loader has a batch sampler ({kind}, {own}), which Ray would throw away, and take single samples: "
            "give the DataLoader batch_size and shuffle instead, or shard in the sampler and give "
            "add_dist_sampler=False"
        )
    prepared: DataLoader[Any] = ray.train.torch.prepare_data_loader(
        loader, add_dist_sampler=add_dist_sampler, move_to_device=move_to_device, auto_transfer=auto_transfer
    )
    let_set_epoch_through(prepared)
    return prepared


def report(metrics: Mapping[str, Any], *parts: HasFigures, checkpoint: Any = None) -> None:
    """Report metrics to Ray, with the figures of parts of paceline as `paceline/sent_bytes` and so on.

        paceline.ray.report({"loss": loss}, sync, pruning, checkpoint=checkpoint)

    All ranks must call it, as often as each other: `ray.train.report` waits for all of them, so it belongs to the end
    of an epoch and not into a step. Ray keeps the metrics of rank 0.
    """
    found: dict[str, float] = {}
    for part in parts:
        if not callable(getattr(part, "figures", None)):
            raise ValueError(f"report takes parts of paceline after the metrics, and a {type(part).__name__} is none")
        figures = part.figures()
        if both := sorted(found.keys() & figures.keys()):
            raise ValueError(
                f"two of the parts have figures of one name ({both[0]}): report one of them, or put the other's "
                "figures() into the metrics by names of your own"
            )
        found |= figures
    ray.train.report({**prefixed(found), **metrics}, checkpoint=checkpoint)

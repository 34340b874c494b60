"""A loop of one's own with Accelerate: what `accelerator.prepare` does, without DistributedDataParallel.

    accelerator = accelerate.Accelerator()
    model, optimizer, loader = paceline.huggingface.prepare(accelerator, model, optimizer, loader)
    with paceline.HPSGD(model, optimizer) as sync:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_function(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        sync.flush()

With several processes `accelerator.prepare(model)` returns a DistributedDataParallel, which would average the gradients
of ranks that average already; paceline refuses such a model. `evaluation_mode=True` of accelerate's own
`prepare_model` leaves out just that: mixed precision, the device and torch.compile stay.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from accelerate import Accelerator

from paceline.huggingface.hooks import TrainerSetupError, check_whole


def prepare(accelerator: Any, *objects: Any) -> Any:
    """Return models, optimisers, loaders and schedulers as `accelerator.prepare` does, but no DistributedDataParallel.

    Give what is returned to `paceline.HPSGD`, `paceline.LGCSync` or one of their kind.

    >>> import torch
    >>> accelerator = Accelerator(cpu=True)
    >>> model = torch.nn.Linear(2, 1)
    >>> model, optimizer = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> type(model).__name__, type(optimizer).__name__
    ('Linear', 'AcceleratedOptimizer')
    """
    if not isinstance(accelerator, Accelerator):
        raise TrainerSetupError(f"accelerator must be an accelerate.Accelerator (it is a {type(accelerator).__name__})")
    check_whole(accelerator, "prepare()")
    own = vars(accelerator).get("prepare_model")  # one that somebody has put there, average() for one
    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
    try:
        return accelerator.prepare(*objects)
    finally:
        if own is None:
            del accelerator.prepare_model  # the class's own again
        else:
            accelerator.prepare_model = own

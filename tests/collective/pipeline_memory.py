"""A job: train what one device cannot hold in two stages that can, and count what each of them really holds."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

import paceline

SAMPLES, WIDTH = 64, 64


class Held:
    """A tensor that autograd keeps, for as long as it keeps it; counts the most bytes that were kept at once."""

    alive: ClassVar[dict[int, list[int]]] = {}  # storage: [how many keep it, bytes]
    own: ClassVar[set[int]] = set()
    most = 0

    def __init__(self, tensor):
        self.tensor, self.storage = tensor, tensor.untyped_storage().data_ptr()
        kept = Held.alive.setdefault(self.storage, [0, tensor.untyped_storage().nbytes()])
        kept[0] += 1
        total = sum(size for storage, (_, size) in Held.alive.items() if storage not in Held.own)
        Held.most = max(Held.most, total)

    def __del__(self):
        kept = Held.alive[self.storage]
        kept[0] -= 1
        if not kept[0]:
            del Held.alive[self.storage]


def model_of():
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if not tensor.is_meta)


def within_memory(ranks, plan_pipeline):
    """Each rank's true bytes in a pipeline of two stages whose devices could not hold the model alone."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(SAMPLES, WIDTH), torch.randint(0, 4, (SAMPLES,))
    limits = {"microbatches": 4, "repeats": 3, "schedule": "1f1b"}
    alone = plan_pipeline(model_of(), inputs, stages=1, **limits)
    limit = int(0.7 * alone.placement.device_bytes[0])
    try:
        plan_pipeline(model_of(), inputs, stages=1, memory_bytes=limit, **limits)
    except ValueError as error:
        refused = str(error)
    model = model_of()
    plan = plan_pipeline(model, inputs, stages=2, memory_bytes=limit, **limits)
    pipe = paceline.Pipeline(model, plan, free_others=True, process_group=ranks, timeout_seconds=20)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    Held.own = {tensor.untyped_storage().data_ptr() for tensor in pipe.parameters()}
    losses = []
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        for _ in range(5):
            losses.append(float(pipe.step(inputs, targets, nn.CrossEntropyLoss())))
            optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    held = bytes_of(model.parameters()) + bytes_of(gradients) + bytes_of(states)
    return {
        "alone": alone.placement.device_bytes[0],
        "limit": limit,
        "refused": refused,
        "planned": plan.placement.device_bytes[pipe.stage],
        "weights": held,
        "activations": Held.most,
        "losses": losses,
    }

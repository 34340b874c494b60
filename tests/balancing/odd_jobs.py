"""Scripts that do what scripts do, on two ranks: the gradient is that of the whole batch, or they are told why not."""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.distributed import RankGoneError
from paceline.errors import PacelineWarning
from tests.balancing.jobs import far, gradient_of, together
from tests.distributed.constructor_jobs import awake

SAMPLES, BATCH = 33, 8  # the rest is 1: the second rank gets none


@dataclasses.dataclass(slots=True)
class Slotted:
    scores: torch.Tensor


class Table(dict):
    pass


class Pair(tuple):
    pass


class Holder:
    def __init__(self, scores):
        self.scores = scores


def large(scores):
    return scores.repeat(1, 8000)  # beyond what is copied


KINDS = {
    "tensor": (lambda scores: scores, lambda held: held),
    "slots": (Slotted, lambda held: held.scores),
    "dict of its own": (lambda scores: Table(scores=scores), lambda held: held["scores"]),
    "tuple of its own": (lambda scores: Pair((scores, 1)), lambda held: held[0]),
    "object in an object": (lambda scores: Holder(Holder(scores)), lambda held: held.scores.scores),
    "in place": (lambda scores: scores, lambda held: held.div_(2.0)),
    "a column in place": (lambda scores: scores, lambda held: held.index_fill_(1, torch.tensor([0]), -5.0)),
    "large": (large, lambda held: held[:, :6].clone()),
    "large, in place": (large, lambda held: held.div_(2.0)[:, :6]),
    "hidden": (lambda scores: lambda: scores, lambda held: held()),
}


class Returning(nn.Module):
    def __init__(self, inner, kind):
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, inputs):
        return KINDS[self.kind][0](self.inner(inputs))


def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 6, (SAMPLES,), generator=generator), torch.arange(SAMPLES))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def balanced(kind="tensor", **settings):
    model = DistributedDataParallel(Returning(network(), kind))
    balance = paceline.Balance(model, batch_size=BATCH, period=None, shares=[3, 1], timeout_seconds=60, **settings)
    sampler = balance.sampler(data())
    return model, balance, sampler, DataLoader(data(), batch_sampler=sampler)


def told(run):
    """Return what a script came to, or the error that it got."""
    try:
        return {"found": run(), "error": ""}
    except (paceline.cluster.BalanceError, ValueError) as error:
        return {"found": None, "error": str(error)}


MADE = []


def made(*, timeout_seconds, ranks_there=3):
    """Make a Balance, and ask once how much the batches of all weigh; or say why not."""
    awake(f"made {timeout_seconds} {ranks_there}", ranks_there)
    try:
        MADE.append(paceline.Balance(network(), batch_size=BATCH, timeout_seconds=timeout_seconds))
        return MADE[-1].mean_of(3.0)
    except RankGoneError as error:
        return str(error)


def asked(*, ranks_there=1):
    """Ask all ranks how much their batches weigh."""
    awake("asked", ranks_there)
    try:
        return MADE[-1].mean_of(3.0)
    except RankGoneError as error:
        return str(error)


def asked_later(*, slow):
    """The same, where one rank comes late."""
    time.sleep(5.0 * (dist.get_rank() == slow))
    return asked()


def output(*, kind):
    """Train the first batch with a model that returns this kind of thing."""

    def run():
        model, balance, sampler, loader = balanced(kind)
        inputs, targets, numbers = next(iter(loader))
        cross_entropy(KINDS[kind][1](model(inputs)), targets).backward()
        whole, expected = together(numbers.tolist()), Returning(network(), kind)
        everything = data().tensors
        cross_entropy(KINDS[kind][1](expected(everything[0][whole])), everything[1][whole]).backward()
        done = sampler.state_dict()["done_samples"]
        balance.close()
        return [far(gradient_of(model), gradient_of(expected)), done]

    return told(run)


def script(*, name):
    return told(SCRIPTS[name])


def chained():
    model, _, _, loader = balanced()
    inputs, targets, _ = next(iter(loader))
    cross_entropy(model(model(inputs)), targets).backward()


def in_eval_mode():
    model, _, _, loader = balanced()
    for step, (inputs, targets, _) in enumerate(loader):
        model.train(step == 0)
        cross_entropy(model(inputs), targets).backward()


def evaluated_with_gradients():
    model, _, sampler, loader = balanced()
    for inputs, targets, _ in loader:
        model.train()
        cross_entropy(model(inputs), targets).backward()
        model.eval()
        model(inputs)  # nobody forbids it
    return sampler.state_dict()["epoch"]


def penalty():
    model, _, _, loader = balanced()
    inputs, _, _ = next(iter(loader))
    inputs.requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)


def groups_at_once():
    model, _, _, loader = balanced()
    batches = iter(loader)
    while group := list(itertools.islice(batches, 2)):
        for inputs, targets, _ in group:
            cross_entropy(model(inputs), targets).backward()


def ahead_across_epochs():
    model, _, _, loader = balanced()
    batches = itertools.chain.from_iterable(iter(loader) for _ in range(3))
    following = next(batches)
    for _ in range(8):
        (inputs, targets, _), following = following, next(batches)
        cross_entropy(model(inputs), targets).backward()


def only_one_rank_loads():
    model, balance, _, loader = balanced()
    if balance.rank == 0:
        balance.load_state_dict({"batch_size": BATCH, "shares": [4, 4]})
    for inputs, targets, _ in loader:
        cross_entropy(model(inputs), targets).backward()


def loads_in_mid_epoch():
    model, balance, _, loader = balanced()
    seen, sizes = [], []
    for step, (inputs, targets, numbers) in enumerate(itertools.chain(loader, loader)):
        cross_entropy(model(inputs), targets).backward()
        sizes.append(len(numbers))
        if step < 5:
            seen += numbers.tolist() if balance.rank_samples()[0] else []
        if step == 1:
            balance.load_state_dict({"batch_size": BATCH, "shares": [4, 4]})
    return [sorted(together(seen)) == list(range(SAMPLES)), sizes[4] != sizes[3], sizes[5]]


def sums_in_groups():
    model, balance, _, loader = balanced(reduction="sum")
    accumulate, expected = paceline.Accumulate(model, steps=5, reduction="sum"), network()
    for inputs, targets, _ in accumulate(loader):
        accumulate.backward(cross_entropy(model(inputs), targets, reduction="sum"))
    inputs, targets, _ = data().tensors
    cross_entropy(expected(inputs), targets, reduction="sum").backward()
    return far(gradient_of(model) * balance.ranks, gradient_of(expected))


def batches_from_elsewhere():
    model, balance, _, loader = balanced()
    for inputs, targets, _ in loader:
        cross_entropy(model(inputs), targets).backward()
    model.zero_grad()
    inputs, targets, _ = data().tensors
    expected, own = network(), torch.arange(8)[balance.rank :: 2]
    cross_entropy(model(inputs[own]), targets[own]).backward()
    cross_entropy(expected(inputs[:8]), targets[:8]).backward()
    return far(gradient_of(model), gradient_of(expected))


def weighs_in_a_group():
    model, balance, _, loader = balanced()
    accumulate = paceline.Accumulate(model, steps=2)
    for inputs, targets, _ in accumulate(loader):
        loss = cross_entropy(model(inputs), targets)
        balance.weigh(3)
        accumulate.backward(loss)


def prunes_alone():
    balanced()[1].sampler(paceline.InfoBatch(SAMPLES, batch_size=BATCH // 2, epochs=3, rank=0, world_size=1))


def of_a_plain_module():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        paceline.Balance(network(), batch_size=BATCH, timeout_seconds=60).close()
        balanced()[1].close()
    return [str(each.message)[:30] for each in warned if issubclass(each.category, PacelineWarning)]


SCRIPTS = {
    name: globals()[name]
    for name in (
        "chained", "in_eval_mode", "evaluated_with_gradients", "penalty", "groups_at_once", "ahead_across_epochs",
        "only_one_rank_loads", "loads_in_mid_epoch", "sums_in_groups", "batches_from_elsewhere", "weighs_in_a_group",
        "prunes_alone", "of_a_plain_module",
    )
}  # fmt: skip

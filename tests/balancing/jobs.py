"""What three processes can be told to do. Every job runs on all; what it returns goes through JSON."""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.drivers.balancing.schedule import BalanceError

SAMPLES, BATCH = 98, 24  # the last step has 2 samples, of which the third rank gets none


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 4, (SAMPLES,), generator=generator), torch.arange(SAMPLES))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def optimizer_of(kind, model):
    if kind == "lars":
        return paceline.LARS(model.parameters(), lr=0.1, momentum=0.9, trust_coefficient=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


class OwnLoss(nn.Module):
    """A model that computes its loss itself, and returns it beside its logits, as those of transformers do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs, targets):
        logits = self.inner(inputs)
        return {"loss": nn.functional.cross_entropy(logits, targets), "logits": logits}


def together(numbers):
    """Return what all ranks have, in one list."""
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, numbers)
    return [number for of_rank in everybody for number in of_rank]


def losses_of(model, dataset, chosen):
    return nn.functional.cross_entropy(model(dataset.tensors[0][chosen]), dataset.tensors[1][chosen], reduction="none")


def gradient_of(model):
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def far(ours, theirs):
    """How far two vectors are from each other, relative."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


# -- updates ---------------------------------------------------------------------------------------------------------


def update(*, shares, later=None, kind="sgd", how="plain", epochs=1, drop_last=False, workers=0):
    """Train on all ranks with these shares, and in one process on whole batches; return how far they are apart."""
    dataset, steps = data(), []
    model = DistributedDataParallel(OwnLoss(network()) if how == "own loss" else network())
    optimizer = optimizer_of(kind, model)
    balance = paceline.Balance(model, batch_size=BATCH, shares=shares, period=None)
    loader = DataLoader(dataset, batch_sampler=balance.sampler(dataset, drop_last=drop_last), num_workers=workers)
    for _ in range(epochs):
        for step, (inputs, targets, numbers) in enumerate(loader):
            if how == "own loss":
                model(inputs, targets)["loss"].backward()
            else:
                nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0 and later is not None:
                balance._schedule.change((balance._pass.number, balance._pass.place[1] + 1), later)
            steps.append(numbers.tolist() if balance.rank_samples()[0] else [])
    balance.close()
    return {"far": far(flat(model), alone(dataset, steps, kind)), "steps": len(steps), "sizes": [len(x) for x in steps]}


def alone(dataset, steps, kind):
    """Train one process on the batches of all ranks together."""
    model = network()
    optimizer = optimizer_of(kind, model)
    for step in steps:
        losses_of(model, dataset, sorted(together(step))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def accumulated(*, shares, parts, tokens=False, kind="sgd"):
    """Accumulate groups of parts of different sizes, the last of which is smaller; or weigh by tokens."""
    dataset, steps = data(), []
    model = DistributedDataParallel(network())
    optimizer = optimizer_of(kind, model)
    balance = paceline.Balance(model, batch_size=BATCH, shares=shares, period=None)
    loader = DataLoader(dataset, batch_sampler=balance.sampler(dataset))
    accumulate = paceline.Accumulate(model, steps=parts)
    counts = torch.arange(SAMPLES, dtype=torch.float64) % 5 + 1
    expected = network()
    reference = optimizer_of(kind, expected)
    group = []
    for inputs, targets, numbers in accumulate(loader):
        losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
        if tokens:
            held = counts[numbers]
            accumulate.backward((losses * held).sum() / held.sum(), samples=held.sum())
        else:
            accumulate.backward(losses.mean())
        group += numbers.tolist() if balance.rank_samples()[0] else []
        if accumulate.ready:
            optimizer.step()
            optimizer.zero_grad()
            whole = together(group)
            weights = counts[whole] if tokens else torch.ones(len(whole)).double()
            losses = nn.functional.cross_entropy(
                expected(dataset.tensors[0][whole]), dataset.tensors[1][whole], reduction="none"
            )
            ((losses * weights).sum() / weights.sum()).backward()
            reference.step()
            reference.zero_grad()
            steps.append(len(whole))
            group = []
    balance.close()
    return {"far": far(flat(model), flat(expected)), "steps": steps}


def by_hand(*, shares, parts):
    """Accumulate with no_sync, as a plain script does; each part is divided by their number."""
    dataset = data()
    model, expected = DistributedDataParallel(network()), network()
    balance = paceline.Balance(model, batch_size=BATCH, shares=shares, period=None)
    loader = DataLoader(dataset, batch_sampler=balance.sampler(dataset, drop_last=True))
    for step, (inputs, targets, numbers) in enumerate(loader):
        last = step % parts == parts - 1
        with contextlib.nullcontext() if last else model.no_sync():
            (nn.functional.cross_entropy(model(inputs), targets) / parts).backward()
        whole = together(numbers.tolist())
        (losses_of(expected, dataset, whole).mean() / parts).backward()
        if last:
            break
    balance.close()
    return far(gradient_of(model), gradient_of(expected))


def weighed_by_tokens(*, shares):
    """A loss that is a mean over tokens, in a plain loop: the script says how many."""
    dataset = data()
    model, expected = DistributedDataParallel(network()), network()
    balance = paceline.Balance(model, batch_size=BATCH, shares=shares, period=None)
    counts = torch.arange(SAMPLES, dtype=torch.float64) % 5 + 1
    inputs, targets, numbers = next(iter(DataLoader(dataset, batch_sampler=balance.sampler(dataset))))
    held = counts[numbers]
    losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
    balance.weigh(held.sum())
    ((losses * held).sum() / held.sum()).backward()
    whole = together(numbers.tolist())
    losses = nn.functional.cross_entropy(
        expected(dataset.tensors[0][whole]), dataset.tensors[1][whole], reduction="none"
    )
    ((losses * counts[whole]).sum() / counts[whole].sum()).backward()
    balance.close()
    return far(gradient_of(model), gradient_of(expected))


def pruned(*, shares, kind, epochs=6):
    """Prune on all ranks with these shares, and in one process; return how far they are apart, and who sat out."""
    dataset = data()
    inputs, targets = dataset.tensors[:2]

    def sampler(batch_size, **alone):
        if kind == "info-batch":
            return paceline.InfoBatch(SAMPLES, batch_size=batch_size, epochs=epochs, seed=3, **alone)
        return paceline.FinePruning(
            SAMPLES, batch_size=batch_size, window=3, starting_point=1, block=2, count=2, seed=3, **alone
        )

    model, expected = DistributedDataParallel(network()), network()
    pruning, reference = sampler(BATCH // dist.get_world_size()), sampler(BATCH, rank=0, world_size=1)
    optimizer, theirs = optimizer_of("sgd", model), optimizer_of("sgd", expected)
    balance = paceline.Balance(model, batch_size=BATCH, shares=shares, period=None)
    loader = DataLoader(dataset, batch_sampler=balance.sampler(pruning))
    for _ in range(epochs):
        for x, y, _ in loader:
            pruning.observe(nn.functional.cross_entropy(model(x), y, reduction="none").float()).double().backward()
            optimizer.step()
            optimizer.zero_grad()
        for batch in reference:
            losses = nn.functional.cross_entropy(expected(inputs[batch]), targets[batch], reduction="none")
            reference.observe(losses.float()).double().backward()
            theirs.step()
            theirs.zero_grad()
    balance.close()
    same = bool((pruning.times_pruned == reference.times_pruned).all())
    return {"far": far(flat(model), flat(expected)), "same": same, "pruned": int(pruning.times_pruned.sum())}


def compressed(*, shares, codec, steps=12):
    """Train with a codec that holds back; return what is lost of the weighed gradients: nothing but what is held."""
    dataset = data()
    model = DistributedDataParallel(network().float())
    memory = paceline.compress(model, codec)
    balance = paceline.Balance(model, batch_size=BATCH, shares=shares, period=None)
    loader = DataLoader(dataset, batch_sampler=balance.sampler(dataset))
    wanted = applied = 0
    for _, (inputs, targets, _) in zip(range(steps), endless(loader), strict=False):
        ours = network().float()
        ours.load_state_dict(model.module.state_dict())
        losses = nn.functional.cross_entropy(ours(inputs.float()), targets, reduction="sum")
        losses.backward()
        nn.functional.cross_entropy(model(inputs.float()), targets).backward()
        own, mean = balance.rank_samples()
        plain = gradient_of(ours) * bool(own) / mean
        dist.all_reduce(plain)
        wanted = wanted + plain / dist.get_world_size()
        applied = applied + gradient_of(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    held = {}
    for bucket in memory.state_dict()["buckets"]:
        sizes = [model.module.get_parameter(name).numel() for name in bucket["parameters"]]
        held |= dict(zip(bucket["parameters"], bucket["memory"]["residual"].split(sizes), strict=True))
    residual = torch.cat([held[name] for name, _ in model.module.named_parameters()])
    dist.all_reduce(residual)
    balance.close()
    return ((applied + residual / dist.get_world_size() - wanted).abs().max() / wanted.abs().max()).item()


def endless(loader):
    while True:
        yield from loader


def autocast(*, shares):
    """One step under bf16 autocast; return how far the gradient is from that of one process, relative."""
    dataset = data()
    model, expected = DistributedDataParallel(network().float()), network().float()
    balance = paceline.Balance(model, batch_size=BATCH, shares=shares, period=None)
    inputs, targets, numbers = next(iter(DataLoader(dataset, batch_sampler=balance.sampler(dataset))))
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs.float()), targets)
    loss.backward()
    whole = together(numbers.tolist())
    nn.functional.cross_entropy(expected(dataset.tensors[0][whole].float()), dataset.tensors[1][whole]).backward()
    balance.close()
    return far(gradient_of(model), gradient_of(expected))


# -- shares ----------------------------------------------------------------------------------------------------------


def by_speed(*, slow, batches, ahead, period=4, most=None):
    """Train with computation that takes time for each sample; return the shares, and who computed what."""
    return _by_speed([(slow, lambda balance, trained: trained >= batches)], ahead=ahead, period=period, most=most)


def slowing_down(*, factor, less, more, most_batches):
    """Let rank 0 be slower until its share is at most `less`, and fast until it is at least `more`."""
    return _by_speed(
        [
            ([1, 1, 1], lambda balance, trained: trained >= 20),
            ([factor, 1, 1], lambda balance, trained: balance.shares[0] <= less or trained >= most_batches),
            ([1, 1, 1], lambda balance, trained: balance.shares[0] >= more or trained >= 2 * most_batches),
        ],
        ahead=[0, 0, 0],
    )


def _by_speed(phases, *, ahead, period=4, most=None):
    """Train through phases of (how slow each rank is, what ends the phase, which is asked after whole epochs)."""
    rank = dist.get_rank()
    dataset = data()
    model = DistributedDataParallel(network())
    balance = paceline.Balance(model, batch_size=BATCH, period=period, most=most[rank] if most else None)
    loader = DataLoader(dataset, batch_sampler=balance.sampler(dataset), num_workers=ahead[rank])
    optimizer, epochs, trained, phases = optimizer_of("sgd", model), [], 0, list(phases)
    while phases:
        (slow, ended), epoch = phases[0], []
        for inputs, targets, numbers in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            time.sleep(0.002 * len(inputs) * slow[rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            epoch += numbers.tolist() if balance.rank_samples()[0] else []
            trained += 1
        epochs.append(epoch)
        if ended(balance, trained):
            del phases[0]
    each_once = all(sorted(together(epoch)) == list(range(SAMPLES)) for epoch in epochs)
    balance.close()
    parameters = flat(model)
    first = parameters.clone()
    dist.broadcast(first, 0)
    return {
        "changes": balance.changes,
        "shares": balance.shares,
        "each_once": each_once,
        "equal": bool((first == parameters).all()),
        "table": str(balance.table()),
        "figures": balance.figures(),
    }


# -- what goes wrong -------------------------------------------------------------------------------------------------


def beside_it():
    """Train what is inside of the DDP module that Balance was given; return the error."""
    model = DistributedDataParallel(network())
    balance = paceline.Balance(model, batch_size=BATCH)
    optimizer = optimizer_of("sgd", model)
    inputs, targets, _ = next(iter(DataLoader(data(), batch_sampler=balance.sampler(data()))))
    nn.functional.cross_entropy(model.module(inputs), targets).backward()
    try:
        optimizer.step()
    except BalanceError as error:
        return str(error)
    finally:
        balance.close()


def refused(*, settings, sampler=None):
    """Begin with settings that differ from rank to rank; return the error of this rank."""
    rank = dist.get_rank()
    model = DistributedDataParallel(network())
    ours = settings[rank]
    try:
        balance = paceline.Balance(model, **ours)
        loader = DataLoader(data(), batch_sampler=balance.sampler(data(), **(sampler or [{}] * 3)[rank]))
        for inputs, targets, _ in loader:
            nn.functional.cross_entropy(model(inputs), targets).backward()
            return "nothing"
    except (ValueError, BalanceError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(NameError, UnboundLocalError):
            balance.close()

"""What the ranks can be told to do. Every job runs on all of them; what it returns goes through JSON."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.drivers.watching import buckets
from paceline.drivers.watching import folder as folders
from paceline.drivers.watching.watch import watch
from paceline.traces.step_times import read_times, times_path

BUCKET_MB = 0.02


class Branching(nn.Module):
    """A model of several buckets; where `skips`, a layer has no gradient in some steps."""

    def __init__(self, skips=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third = nn.Linear(20, 90), nn.Linear(90, 90), nn.Linear(90, 5)
        self.extra, self.skips, self.calls = nn.Linear(90, 90), skips, 0

    def forward(self, inputs):
        hidden = torch.relu(self.first(inputs))
        self.calls += 1
        if not self.skips or self.calls % 2:
            hidden = hidden + self.extra(hidden)
        return {"logits": self.third(torch.relu(self.second(hidden))), "more": (hidden.detach(), 7)}


def ddp(module=None, **options):
    return DistributedDataParallel(Branching() if module is None else module, **{"bucket_cap_mb": BUCKET_MB} | options)


def batch(step, size=8):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(size, 20, generator=generator), torch.randint(0, 5, (size,), generator=generator)


def digest(model):
    state = b"".join(each.detach().contiguous().view(torch.uint8).numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(state).hexdigest()


def train(model, steps, *, set_to_none=True, accumulate=1, slow=None, sleep_seconds=0.0, first=0):
    """Train; at `slow`, a phase, this rank sleeps in each step but the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(first, first + steps):
        for part in range(accumulate):
            inputs, targets = batch(step * accumulate + part)
            if slow == "input" and step:
                time.sleep(sleep_seconds)
            with contextlib.nullcontext() if part == accumulate - 1 else model.no_sync():
                logits = model(inputs)["logits"]
                if slow == "forward" and step:
                    time.sleep(sleep_seconds)
                if slow == "backward" and step:
                    logits.register_hook(lambda gradient: time.sleep(sleep_seconds))
                F.cross_entropy(logits.float(), targets).backward()
        if slow == "optimiser" and step:
            time.sleep(sleep_seconds)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def seen(folder, rank=None):
    """What a rank's file says, as plain values."""
    times = read_times(times_path(Path(folder), "rank", dist.get_rank() if rank is None else rank))
    names = ("step", "steps", "seconds", "input_seconds", "forward_seconds", "backward_seconds", "wait_seconds")
    names += ("optimiser_seconds", "other_seconds", "started_seconds", "processor_seconds", "buckets")
    return {
        "sync": times.began.sync,
        "notes": times.began.notes,
        "workers": times.began.workers,
        "steps": [{name: getattr(each, name) for name in names} for each in times.steps],
        "sizes": [(each.step, each.bytes) for each in times.buckets],
        "links": [(each.to, each.bits_per_second, each.latency_seconds) for each in times.links],
        "ended": times.ended.reason if times.ended else None,
    }


# -- jobs ---------------------------------------------------------------------------------------------------------


def same_bits(folder):
    """Train models of all kinds with and without a watch; return the kinds, and of which the parameters differ."""
    kinds = {
        "plain": {},
        "views": {"gradient_as_bucket_view": True},
        "kept views": {"gradient_as_bucket_view": True, "set_to_none": False},
        "kept": {"set_to_none": False},
        "unused": {"find_unused_parameters": True, "skips": True},
        "unused, kept views": {
            "find_unused_parameters": True,
            "skips": True,
            "gradient_as_bucket_view": True,
            "set_to_none": False,
        },
        "static": {"static_graph": True},
        "accumulated": {"accumulate": 2},
        "accumulated views": {"accumulate": 2, "gradient_as_bucket_view": True},
        "bfloat16": {"dtype": "bfloat16"},
        "mixed dtypes": {"mixed": True},
    }
    differ = {}
    buckets.FIRST_STEPS = 2  # so that the buckets of some steps are timed, and of others not
    for name, options in kinds.items():
        found = [_trained(folder if watched else None, name, **options) for watched in (False, True)]
        if found[0] != found[1]:
            differ[name] = found
    buckets.FIRST_STEPS = 50
    return {"kinds": list(kinds), "differ": differ}


def _trained(folder, name, *, skips=False, set_to_none=True, accumulate=1, dtype=None, mixed=False, **options):
    module = Branching(skips)
    if dtype:
        module = nn.Sequential(_Cast(getattr(torch, dtype)), module.to(getattr(torch, dtype)))
    if mixed:
        module.third.to(torch.float64)
        module.third.register_forward_pre_hook(lambda layer, inputs: (inputs[0].double(),))
    model = ddp(module, **options)
    inside = contextlib.nullcontext()
    if folder is not None:
        inside = watch(model, out=Path(folder, name), probe_links=False)
    with inside:
        train(model, 4, set_to_none=set_to_none, accumulate=accumulate)
    train(model, 1, first=4)  # nobody watches any more, and the hook stays
    return digest(model)


class _Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs):
        return inputs.to(self.dtype)


def same_bits_in_join(folder):
    """Ranks with different numbers of batches; both ways to divide."""
    differ = {}
    for initial in (True, False):
        digests = []
        for watched in (False, True):
            model = ddp()
            where = Path(folder, f"join-{initial}")
            inside = watch(model, out=where, probe_links=False) if watched else contextlib.nullcontext()
            with inside, model.join(divide_by_initial_world_size=initial):
                train(model, 2 + dist.get_rank())
            digests.append(digest(model))
        if digests[0] != digests[1]:
            differ[initial] = digests
    return differ


def phases(folder, slow_rank=None, slow=None, sleep_seconds=0.0, steps=4, accumulate=1):
    model = ddp()
    with watch(model, out=folder, probe_links=False):
        late = dist.get_rank() == slow_rank
        train(model, steps, accumulate=accumulate, slow=slow if late else None, sleep_seconds=sleep_seconds)
    dist.barrier()
    return seen(folder)


def later_hooks(folder):
    """Hooks that come after the watch give what they give without it; hooks before it are left alone."""
    found = {}

    def powered(model):
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)

    hooks = {
        "compress": lambda model: paceline.compress(model, "qsgd"),
        "fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "power-sgd": powered,
        "builtin": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    }
    for name, register in hooks.items():
        digests = []
        for order in ("none", "after", "before"):
            # PowerSGD starts collectives in callbacks: with several buckets gloo sees them in different orders.
            model = ddp(bucket_cap_mb=25) if name == "power-sgd" else ddp()
            where = Path(folder, f"{name}-{order}")
            if order == "before":
                register(model)
            inside = watch(model, out=where, probe_links=False) if order != "none" else contextlib.nullcontext()
            with inside:
                if order != "before":
                    register(model)
                train(model, 5)
                try:
                    register(model)
                    refused = False
                except (RuntimeError, ValueError):
                    refused = True
            digests.append(digest(model))
            if order != "none":
                dist.barrier()
                times = seen(where)
                buckets = [len(each["buckets"]) for each in times["steps"]]
                found[f"{name} {order}"] = {"refused": refused, "buckets": buckets, "notes": times["notes"]}
        found[name] = len(set(digests)) == 1
    return found


def evaluations(folder, sleep_seconds):
    """Between two steps, evaluations that sleep: in eval mode, and without gradients."""
    model = ddp()
    with watch(model, out=folder, probe_links=False):
        train(model, 2)
        model.eval()
        with torch.no_grad():
            model(batch(0)[0])
            time.sleep(sleep_seconds)
        model.train()
        train(model, 2, first=2)
    return seen(folder)


def copies(folder):
    """A copy of a watched model, and one that was saved, are models that nobody watches."""
    module = Branching()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with watch(module, out=Path(folder, "plain"), probe_links=False) as watching:
        twin = copy.deepcopy(module)
        saved = io.BytesIO()
        torch.save(module, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        for each in (twin, loaded):
            each(batch(0)[0])["logits"].sum().backward()
        module(batch(0)[0])["logits"].sum().backward()
        optimizer.step()
        steps = watching.steps
    model = ddp()
    with watch(model, out=Path(folder, "ddp"), probe_links=False):
        other = copy.deepcopy(model)
        other.register_comm_hook(None, default_hooks.fp16_compress_hook)
        train(other, 1)
        train(model, 2)
    return {"steps": steps, "hooks": len(model._comm_hooks), "ddp": len(seen(Path(folder, "ddp"))["steps"])}


def sharded(folder):
    """Both kinds of FSDP: phases alone."""
    found = []
    for name in ("fully_shard", "fsdp"):
        module = Branching()
        if name == "fsdp":
            model = FullyShardedDataParallel(module, device_id=torch.device("cpu"))
        else:
            model = fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        with watch(model, out=Path(folder, name), probe_links=False):
            train(model, 3)
        found.append(seen(Path(folder, name)))
    return found


def compiled(folder):
    """torch.compile around DDP, and inside of it, before and after watch()."""
    found = {}
    for name in ("around", "inside", "after"):
        inner = Branching()
        plain = ddp(torch.compile(inner, backend="eager") if name == "inside" else inner, bucket_cap_mb=25)
        model = torch.compile(plain, backend="eager") if name == "around" else plain
        with watch(model, out=Path(folder, name), probe_links=False):
            train(torch.compile(model, backend="eager") if name == "after" else model, 3)
        times = seen(Path(folder, name))["steps"]
        found[name] = [(len(each["buckets"]), each["backward_seconds"] > 0) for each in times]
    return found


def links(folder):
    model = ddp()
    with watch(model, out=folder):
        train(model, 101)
    return seen(folder)


def remote(folder, others_folder, killed=None):
    """Rank 1 does not see rank 0's folder, as on another machine; `killed` stays in a loop until it is killed."""
    sees = folders.sees
    if dist.get_rank() == 1:
        folders.sees = lambda *place: False
        Path(others_folder).mkdir(exist_ok=True)
    model = ddp()
    watching = watch(model, out=folder, probe_links=False)
    folders.sees = sees  # for the jobs that follow
    train(model, 6)
    if dist.get_rank() == killed:
        while True:
            time.sleep(0.1)
    if killed is None:
        dist.barrier()
        watching.close()
    return {"own": str(watching.folder), "steps": len(seen(watching.folder)["steps"])}


def refused(folder, taken):
    """A folder that holds a run, or that only some ranks name."""
    errors = []
    for where in (taken, Path(folder, "a" if dist.get_rank() else "b")):
        try:
            watch(ddp(), out=where, probe_links=False)
        except ValueError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def buffers(folder):
    """Train a model with BatchNorm, whose last rank is slow in its optimiser; return the mean forward and wait."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    last = dist.get_rank() == dist.get_world_size() - 1
    with watch(model, out=folder, probe_links=False) as watching:
        for _ in range(6):
            model(torch.randn(8, 4)).sum().backward()
            if last:
                time.sleep(0.1)
            optimizer.step()
            optimizer.zero_grad()
        found = watching.figures()
    return {"forward": found["forward_seconds"], "wait": found["wait_seconds"], "own": "_sync_buffers" in vars(model)}


def other_options(folder):
    """One rank has other options; then the script makes a group of its own."""
    errors = []
    for name in ("probe_links", "buckets"):
        try:
            watch(ddp(), out=Path(folder, name), **{name: dist.get_rank() == 1})
        except ValueError as error:
            errors.append(str(error))
    ours = torch.ones(1)
    dist.all_reduce(ours, group=dist.new_group())
    return {"errors": errors, "sum": ours.item()}


def closed_again(folder):
    """Watch and close several times; count threads and sockets after each. (Rank 0 keeps its locks on folders.)"""
    model, found = ddp(), []
    for life in range(4):
        watch(model, out=Path(folder, str(life))).close()
        dist.barrier()
        links = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
        sockets = sum(os.readlink(link).startswith("socket:") for link in links if os.path.lexists(link))
        found.append([len(os.listdir("/proc/self/task")), sockets])
    return found[1:]


def sharded_optimiser(folder):
    """ZeroRedundancyOptimizer calls an optimiser inside its own step, with other parameters on each rank."""
    model = ddp(nn.Linear(20, 1, bias=False))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with watch(model, out=folder):
        for step in range(12):
            model(batch(step)[0]).sum().backward()
            optimizer.step()
    return seen(folder)

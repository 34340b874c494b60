"""What the two processes can be told to do. Every job runs on both; what it returns goes through JSON."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import logging
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs import QSGD, ErrorFeedback, OneBit, PowerSGD, Sparsifier, TopK, make_codec
from paceline.data import load_dataset
from paceline.drivers import ddp as ddp_module
from paceline.drivers.ddp import compress
from paceline.drivers.ranks import exchanging, heartbeats

CODECS = {
    "one-bit+ef": lambda: ErrorFeedback(OneBit()),
    "top-k+ef": lambda: ErrorFeedback(TopK(fraction=0.01)),
    "power-sgd+ef": lambda: ErrorFeedback(PowerSGD(rank=4)),
    "elias": lambda: QSGD(levels=1, lossless="elias"),
    "entropy": lambda: QSGD(levels=7, lossless="entropy"),
    "sparsifier": Sparsifier,
}
BUCKET_MB = 0.02  # so that there are several buckets


def codec_of(name):
    return CODECS[name]() if name in CODECS else make_codec(name)


@functools.cache
def digits():
    return load_dataset("digits").train


def small_cnn(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def ddp(model=None, **options):
    return DistributedDataParallel(model or small_cnn(), **{"bucket_cap_mb": BUCKET_MB} | options)


def batches(steps, size=16, seed=0):
    """This rank's batches: every rank its own half of the same shuffled samples."""
    data, order = digits(), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randperm(len(data), generator=order)[: 2 * size][dist.get_rank() :: 2]
        yield data.inputs[chosen], data.targets[chosen]


def run(model, steps, lr=0.05, seed=0):
    """Train; the learning rate falls to zero in a straight line."""
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, steps)
    for inputs, targets in batches(steps, seed=seed):
        optimiser.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimiser.step()
        schedule.step()


def digest(model):
    state = b"".join(tensor.detach().float().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(state).hexdigest()


def gradient(model):
    return torch.cat([p.grad.reshape(-1).float() for p in model.parameters() if p.grad is not None])


@torch.no_grad()
def loss_of(model):
    return F.cross_entropy(model.module(digits().inputs), digits().targets).item()


def hooked(codec, model=None, seed=0, **options):
    model = ddp(model, **options)
    return model, compress(model, codec_of(codec), seed=seed)


# -- jobs ---------------------------------------------------------------------------------------------------------


@functools.cache
def plainly_trained(steps, lr, seed):
    model = ddp(small_cnn(seed))
    run(model, steps, lr, seed=2 * seed + 1)
    return model.module


def train(codec, steps, lr, warm=0, seed=0):
    """Train plainly for `warm` steps, and then with the codec (None: DDP as it is)."""
    module = copy.deepcopy(plainly_trained(warm, lr, seed)) if warm else small_cnn(seed)
    model, compression = hooked(codec, module, seed=seed) if codec else (ddp(module), None)
    before = loss_of(model)
    run(model, steps, lr, seed=2 * seed)
    found = {"before": before, "loss": loss_of(model), "digest": digest(model)}
    if compression:
        found |= {"steps": compression.steps, "bytes": compression.payload_bytes, "shown": repr(compression)}
        found |= {"times": compression.gradient_bytes / compression.payload_bytes}
    return found


def short_runs(codecs, count, steps):
    """Runs of a few steps, one after the other, each with a new DDP, a new hook and buckets of another size."""
    digests = []
    for number in range(count):
        options = {"bucket_cap_mb": (0.005, 0.02, 0.1, 25)[number % 4], "gradient_as_bucket_view": bool(number & 4)}
        model, _ = hooked(codecs[number % len(codecs)], small_cnn(number), seed=number, **options)
        run(model, steps, seed=number)
        digests.append(digest(model))
    return digests


def kinds_of_models():
    """Gradients of identity and of DDP as it is, side by side: the largest difference over the largest gradient."""

    def both(backward, module=small_cnn, **options):
        plain, (ours, _) = ddp(module(), **options), hooked("identity", module(), **options)
        for _ in range(3):  # after the first, the buckets are others
            for model in (plain, ours):
                model.zero_grad()
                backward(model)
        ours_dtypes, theirs = {p.grad.dtype for p in ours.parameters() if p.grad is not None}, gradient(plain)
        assert ours_dtypes == {p.grad.dtype for p in plain.parameters() if p.grad is not None}
        return ((gradient(ours) - theirs).abs().max() / theirs.abs().max()).item()

    def one_batch(model, seed=0):
        (inputs, targets), dtype = next(iter(batches(1, seed=seed))), next(model.parameters()).dtype
        F.cross_entropy(model(inputs.to(dtype)), targets).backward()

    def accumulated(model):
        with model.no_sync():
            one_batch(model, seed=1)
        one_batch(model)

    def uneven(model):
        with model.join():
            for seed in range(1 + dist.get_rank()):
                one_batch(model, seed)

    return {
        "plain": both(one_batch),
        "bucket views": both(one_batch, gradient_as_bucket_view=True),
        "static graph": both(one_batch, static_graph=True),
        "accumulated": both(accumulated),
        "unused parameters": both(one_batch, half_used, find_unused_parameters=True),
        "bfloat16": both(one_batch, lambda: small_cnn().bfloat16()),
        "uneven inputs": both(uneven),
    }


def half_used():
    model = small_cnn()
    model.register_module("unused", HalfUsed())
    return nn.Sequential(model[:7], model.unused, model[7:9])


class HalfUsed(nn.Module):
    """A layer that takes part on one rank only, and one that never does."""

    def __init__(self):
        super().__init__()
        self.sometimes, self.never = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, inputs):
        return self.sometimes(inputs) if dist.get_rank() else inputs


def not_finite(codec, culprits, factor="nan"):
    """Three steps; in the second the culprits have a NaN. What each step raised, and whether the step could go on."""
    model, compression = hooked(codec)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    found, sizes = [], []
    for step, (inputs, targets) in enumerate(batches(3)):
        scale = float(factor) if step == 1 and dist.get_rank() in culprits else 1.0
        optimiser.zero_grad()
        try:
            (scale * F.cross_entropy(model(inputs), targets)).backward()
        except Exception as error:
            cause = None if error.__cause__ is None else str(error.__cause__)
            found.append([type(error).__name__, str(error), cause, bool(gradient(model).isnan().any())])
        else:
            optimiser.step()
            found.append(None)
        sizes.append([compression.bytes_per_step, compression.gradient_bytes / compression.payload_bytes])
    finite = bool(torch.isfinite(gradient(model)).all())
    return {"steps": found, "digest": digest(model), "finite": finite, "sizes": sizes, "shown": repr(compression)}


def scaled(codec, plan, culprits, steps=8, bad=3):
    """Train with a GradScaler; in one step the loss of the culprits is too large for float32 once it is scaled."""
    model = ddp()
    compression = compress(model, codec_of(codec), plan=plan, not_finite="pass") if codec else None
    optimiser, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", growth_interval=100)
    scales, digests, kept, all_nan, sizes = [], [], None, None, []
    for step, (inputs, targets) in enumerate(batches(steps)):
        before = memories(compression) if compression else None
        optimiser.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss * 1e36 if step == bad and dist.get_rank() in culprits else loss).backward()
        if step == bad:
            kept, all_nan = compression is None or same_memories(before, memories(compression)), gradient(model).isnan()
        scaler.step(optimiser)
        scaler.update()
        scales.append(scaler.get_scale())
        digests.append(digest(model))
        sizes.append(compression.bytes_per_step if compression else 0)
    return {
        "scales": scales,
        "digests": digests,
        "kept": kept,
        "all_nan": bool(all_nan.all()),
        "loss": loss_of(model),
        "sizes": sizes,
        "skipped": compression.skipped_steps if compression else None,
        "shown": repr(compression),
    }


def memories(compression):
    """Return what this rank's codecs remember, by names of parameters."""
    return {tuple(bucket["parameters"]): bucket["memory"] for bucket in compression.state_dict()["buckets"]}


def same_memories(first, second):
    return all(
        first[key].keys() == second[key].keys()
        and all(
            torch.equal(torch.as_tensor(first[key][name]), torch.as_tensor(second[key][name])) for name in first[key]
        )
        for key in first.keys() | second.keys()
    )


def lower_precision(codec):
    """Train in bfloat16 by autocast, without a scaler."""
    model, compression = hooked(codec)
    before, optimiser = loss_of(model), torch.optim.SGD(model.parameters(), lr=0.2)
    for inputs, targets in batches(40):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimiser.step()
    return {"before": before, "after": loss_of(model), "digest": digest(model), "skipped": compression.skipped_steps}


class Clumsy(QSGD):
    """Fails on rank 1, in a way nobody has thought of."""

    def encode(self, gradient, generator=None):
        if dist.get_rank() == 1:
            raise ZeroDivisionError("clumsy")
        return super().encode(gradient, generator)


def clumsy():
    model = ddp()
    compress(model, Clumsy())
    try:
        run(model, 1)
    except Exception as error:
        return [type(error).__name__, str(error), type(error.__cause__).__name__]
    return None


def nothing_is_lost(codec, steps):
    """The sum of what was applied and what is still held back, against the sum of the gradients.

    The parameters stand still, so that every gradient is the first one. After step 1 the buckets are others.
    """
    (inputs, targets), plain = next(iter(batches(1))), ddp()
    F.cross_entropy(plain(inputs), targets).backward()
    model, compression = hooked(codec)
    applied, layouts = torch.zeros_like(gradient(plain)), []
    for _ in range(steps):
        model.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        applied += gradient(model)
        layouts.append([bucket["parameters"] for bucket in compression.state_dict()["buckets"]])
    held = {}
    for bucket in compression.state_dict()["buckets"]:
        sizes = [compression.state_dict()["sizes"][name] for name in bucket["parameters"]]
        held |= dict(zip(bucket["parameters"], bucket["memory"]["residual"].split(sizes), strict=True))
    residual = torch.cat([held[name] for name, _ in model.module.named_parameters()])
    dist.all_reduce(residual)
    wanted = steps * gradient(plain)
    return {
        "lost": ((applied + residual / 2 - wanted).abs().max() / wanted.abs().max()).item(),
        "held": (residual.abs().max() / wanted.abs().max()).item(),
        "buckets": [len(layout) for layout in layouts],
        "changed": layouts[0] != layouts[1],
        "carried": len(compression.state_dict()["carried"]),
    }


def resumed(codec):
    """Eight steps at once, and four and four with a checkpoint between; the same buckets all the way."""
    options = {"find_unused_parameters": True}  # DDP leaves the buckets as they are then
    straight, compression = hooked(codec, **options)
    run_steps(straight, range(8))
    model, before = hooked(codec, **options)
    run_steps(model, range(4))
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "codecs": before.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, after = hooked(codec, seed=99, **options)
    model.module.load_state_dict(saved["model"])
    after.load_state_dict(saved["codecs"])
    run_steps(model, range(4, 8))
    errors = []
    for change in ({"rank": 7}, {"codec": "QSGD()"}, {"sizes": {"0.weight": 3}}, {"sizes": {"other": 3}}):
        errors.append(error_of(lambda change=change: after.load_state_dict(saved["codecs"] | change)))
    same = digest(model) == digest(straight) and after.payload_bytes == compression.payload_bytes
    damaged = {name: None for name in saved["codecs"] if name not in ("ranks", "rank", "codec")}
    damaged |= {"steps": -1, "carried": {"0.weight": torch.ones(3)}, "generator": torch.zeros(3, dtype=torch.uint8)}
    untouched = []
    for name, damage in damaged.items():
        before = repr(after.state_dict())
        error = error_of(lambda name=name, damage=damage: after.load_state_dict(saved["codecs"] | {name: damage}))
        untouched.append([name, error, repr(after.state_dict()) == before])
    return {"same": same, "digest": digest(model), "steps": after.steps, "errors": errors, "untouched": untouched}


def run_steps(model, numbers):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in numbers:
        inputs, targets = next(iter(batches(1, seed=number)))
        optimiser.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimiser.step()


def error_of(what):
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def misused():
    built_in, twice = ddp(), hooked("qsgd")[0]
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    ours = "qsgd" if dist.get_rank() else "one-bit"
    return {
        "no ddp": error_of(lambda: compress(small_cnn(), "qsgd")),
        "twice": error_of(lambda: compress(twice, "qsgd")),
        "built in": error_of(lambda: compress(built_in, "qsgd")),
        "unknown": error_of(lambda: compress(ddp(), "qsdg")),
        "none": error_of(lambda: compress(ddp(), None)),
        "class": error_of(lambda: compress(ddp(), QSGD)),
        "timeout": error_of(lambda: compress(ddp(), "qsgd", timeout_seconds=0)),
        "group": error_of(lambda: compress(ddp(), "qsgd", process_group=alone()[dist.get_rank()])),
        "unlike": error_of(lambda: compress(ddp(), ours)),
        "not finite": error_of(lambda: compress(ddp(), "qsgd", not_finite="skip")),
        "not finite on one": error_of(lambda: compress(ddp(), "qsgd", not_finite=("raise", "pass")[dist.get_rank()])),
    }


@functools.cache
def alone():
    """A group of each rank by itself."""
    return [dist.new_group([0]), dist.new_group([1])]


def groups():
    """A group of the caller's, and a model that lives on one rank: the other one does not come to its compress()."""
    given = ddp()
    compress(given, "qsgd", process_group=dist.new_group())
    run(given, 2)
    mine = alone()[dist.get_rank()]
    if dist.get_rank() == 0:
        single = DistributedDataParallel(small_cnn(), process_group=mine)
        compress(single, codec_of("entropy"))
        run(single, 2)
    return digest(given)


def silent(codec, timeout_seconds):
    """Rank 1 is alive, and does not come to the step. What rank 0 hears of it, and after how long."""
    model = ddp()
    KEPT.append(compress(model, codec_of(codec), timeout_seconds=timeout_seconds))
    if dist.get_rank() == 1:
        return None
    started = time.monotonic()
    return [error_of(lambda: run(model, 1)), time.monotonic() - started]


def types_of_floats():
    """With identity: whether gradients of each type are the mean of all ranks' to the last bit, and of several types.

    And what codecs that carry float32 make of doubles.
    """

    def layers(*dtypes):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(4, 4).to(dtype) for dtype in dtypes))

    def hooked_layers(*dtypes, codec="identity", **options):
        model = DistributedDataParallel(Through(layers(*dtypes)), bucket_cap_mb=1e-6)
        compress(model, codec, **options)
        return model

    class Through(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self):
            torch.manual_seed(dist.get_rank())
            x = torch.randn(5, 4)
            for layer in self.network:
                x = layer(x.to(layer.weight.dtype)).tanh()
            return x.sum()

    def means(model):
        for each in model.parameters():
            ours = each.grad.double()
            dist.all_reduce(ours)
            yield (ours / 2).to(each.dtype)

    found = {}
    half, double = torch.float16, torch.float64
    for dtypes in ([half], [torch.bfloat16], [torch.float32], [double], [double, torch.float32, torch.bfloat16]):
        plain, model = Through(layers(*dtypes)), hooked_layers(*dtypes)
        for _ in range(2):  # after the first step DDP makes its buckets anew
            for each in (plain, model):
                each.zero_grad()
                each().backward()
        wanted = list(means(plain))
        found[str(dtypes)] = all(map(torch.equal, wanted, (each.grad for each in model.parameters())))
    rounded = hooked_layers(double, torch.float32, codec="bfloat16", round_float64=True)
    rounded().backward()
    found["rounded"] = str(next(rounded.parameters()).grad.dtype)
    for codec, plan in (("qsgd", "auto"), ("bfloat16", "auto"), ("identity", "gather")):
        found[f"{codec} {plan}"] = error_of(
            lambda codec=codec, plan=plan: hooked_layers(torch.float32, double, codec=codec, plan=plan)
        )
    return found


def absent(timeout_seconds):
    """Rank 1 never calls compress; in the end only rank 0 refuses to."""
    model = ddp()
    alone = [error_of(lambda: compress(model, "qsgd", timeout_seconds=timeout_seconds))] if not dist.get_rank() else []
    dist.barrier()
    refusing = nn.Embedding(9, 2, sparse=not dist.get_rank())
    return [*alone, error_of(lambda: compress(DistributedDataParallel(refusing), "qsgd"))]


KEPT = []


def prepare(codec, timeout_seconds):
    """Two steps, and one more to come; before the second DDP makes its buckets anew, with a collective of its own."""
    KEPT.append(ddp())
    compress(KEPT[0], codec_of(codec), timeout_seconds=timeout_seconds)
    run(KEPT[0], 2)


def go_on():
    return error_of(lambda: run(KEPT[0], 1))


def sparse(sparse):
    """A table of 100 rows before a layer: what compress says of its gradient."""
    table = nn.Embedding(100, 8, sparse=sparse)
    model = DistributedDataParallel(nn.Sequential(table, nn.Flatten(), nn.Linear(32, 3)))
    told = error_of(lambda: compress(model, "qsgd levels=7"))
    model(torch.arange(20).view(5, 4)).sum().backward()
    return [told, str(table.weight.grad.layout)]


# -- an error, and another one on its way -------------------------------------------------------------------------


class InjectedError(Exception):
    """What the tested code did not expect."""


class Injection:
    """Fails one call of those that the files make once something has failed: one that has not been failed before."""

    def __init__(self, failed, modules=(ddp_module, exchanging)):
        self.armed, self.hit, self._failed, self._lock = False, "", failed, threading.Lock()
        self._files = [module.__file__ for module in modules]

    def __call__(self, frame, event, argument):
        if not self.armed or self.hit or event not in ("call", "c_call"):
            return
        caller = frame.f_back if event == "call" else frame
        if caller is None or caller.f_code.co_filename not in self._files:
            return
        called = argument.__name__ if event == "c_call" else frame.f_code.co_name
        call = f"{called} in {caller.f_code.co_name}"
        with self._lock:
            if call in self._failed or called == "__exit__" or self.hit:  # a lock that was not let go of
                return
            self._failed.add(call)
            self.hit = call
        raise InjectedError(call)


def fails_once(injection, first, call):
    """Return what stands in for a call that raises `first`, once; other calls may fail from then on."""

    def failing(*arguments):
        if not injection.armed:
            injection.armed = True
            raise first
        return call(*arguments)

    return failing


def failing_twice(first, culprit):
    """Step by step, until there is no call left to fail: an error of the culprit, and another in what follows from it.

    Return for each: what was failed, and what the steps raised from the one that fails on.
    """
    logging.getLogger("paceline.exchanges").disabled, begin = True, exchanging.start
    heartbeats.INTERVAL_SECONDS, exchanging.LOOK_SECONDS = 0.02, 0.02
    found, failed, ours = [], set(), dist.get_rank() == culprit
    while True:
        injection, model = Injection(failed), ddp(nn.Linear(3, 3))
        if ours:
            threading.setprofile(injection)
            sys.setprofile(injection)
        compression = compress(model, codec_of("qsgd"), timeout_seconds=10.0)
        steps = []
        for step in range(4):  # after the first DDP makes its buckets anew, with a collective of its own
            inputs = torch.ones(2, 3)
            if ours and step == 2 and first == "memory":
                decoding = compression._exchanges._workspace
                decoding.floats = fails_once(injection, MemoryError("no memory"), decoding.floats)
            if ours and step == 2 and first == "lost":
                exchanging.start = fails_once(injection, RuntimeError("Connection reset"), begin)
            if ours and step == 2 and first == "not finite":
                injection.armed, inputs = True, inputs * float("nan")
            model.zero_grad()
            steps.append(error_of(lambda model=model, inputs=inputs: model(inputs).sum().backward()))
            injection.armed, exchanging.start = False, begin  # what comes later is another way
        sys.setprofile(None)
        threading.setprofile(None)
        found.append([injection.hit, steps[2:]])
        more = torch.tensor([float(bool(injection.hit))])
        dist.all_reduce(more)
        if not more:
            return found

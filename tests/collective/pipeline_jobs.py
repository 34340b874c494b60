"""What ranks of a pipeline can be told to do. What a job returns goes through JSON."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import paceline
from paceline.distributed import RankGoneError
from paceline.drivers.pipelining.weights import tensors_of
from paceline.pipeline.graph import ModelGraph
from tests.collective.pipeline_memory import within_memory
from tests.collective.pipeline_models import MODELS, batches_of, data_of, model_of, pool

# -- one process -------------------------------------------------------------------------------------------------------


def alone(name, sizes, microbatch=None):
    """One process: losses, the first gradients, and the state at the end. With `microbatch`, parts in turn."""
    model = model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, first = [], None
    for inputs, targets in batches_of(name, sizes):
        optimizer.zero_grad()
        total = 0.0
        for begin in range(0, len(targets), microbatch or len(targets)):
            part = slice(begin, begin + (microbatch or len(targets)))
            output = model(*(each[part] for each in inputs))
            loss = functional.cross_entropy(output, targets[part]) * (len(targets[part]) / len(targets))
            loss.backward()
            total += loss.item()
        losses.append(total)
        first = first or {
            name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None
        }
        optimizer.step()
    return losses, first, model.state_dict()


reference = functools.cache(alone)


# -- pipelines ---------------------------------------------------------------------------------------------------------


@functools.cache
def pairs():
    """Ranks 0 and 1, ranks 2 and 3; all ranks must come here."""
    return [dist.new_group([0, 1]), dist.new_group([2, 3])]


@functools.cache
def graph_of(name, size):
    inputs, _ = data_of(name)
    return ModelGraph(model_of(name), tuple(each[:size] for each in inputs))


@functools.cache
def plan_of(name, schedule, stages, microbatches, size, evaluates=True):
    """A plan with cuts as even as the model allows."""
    graph = graph_of(name, size)
    chunks = 2 if schedule == "interleaved" else 1
    pieces = stages * chunks
    cuts = tuple(round(part * len(graph.layers) / pieces) for part in range(1, pieces))
    inputs, _ = data_of(name)
    return SimpleNamespace(
        schedule=schedule, stages=stages, chunks=chunks, microbatches=microbatches, cuts=cuts,
        batch_size=microbatches * size, shapes=tuple((size, *each.shape[1:]) for each in inputs),
        dtypes=tuple(each.dtype for each in inputs), fingerprint=graph.fingerprint, evaluates=evaluates,
    )  # fmt: skip


def pipeline_of(name, schedule, stages, *, world=4, microbatches=4, size=3, seed=0, timeout_seconds=20.0, **more):
    plan = plan_of(name, schedule, stages, microbatches, size)
    group = None if world == 4 else pairs()[dist.get_rank() // 2]
    return paceline.Pipeline(model_of(name, seed), plan, timeout_seconds=timeout_seconds, process_group=group, **more)


def ran(pipe, name, sizes, *, replicas=1, whole=True, **more):
    """Train; the losses and the first gradients. Only those who need something get it, unless `whole`."""
    optimizer = (
        torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9) if any(True for _ in pipe.parameters()) else None
    )
    losses, first = [], None
    for inputs, targets in batches_of(name, sizes):
        share = slice(pipe.replica * len(targets) // replicas, (pipe.replica + 1) * len(targets) // replicas)
        inputs, targets = tuple(each[share] for each in inputs), targets[share]
        given = inputs if len(inputs) > 1 else inputs[0]
        if not whole:
            given, targets = (
                (given if pipe.stage == 0 else None),
                (targets if pipe.stage == pipe.plan.stages - 1 else None),
            )
        losses.append(pipe.step(given, targets, functional.cross_entropy, **more).item())
        if first is None:
            first = {name: weight.grad.clone() for name, weight in pipe.named_parameters() if weight.grad is not None}
        if optimizer:
            optimizer.step()
    return losses, first


def far(ours, theirs):
    """The largest difference, of what this rank has; numbers of one process are of all ranks' size about 1."""
    return max((float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours), default=0.0)


def compared(pipe, found, expected):
    losses, first = found
    return {
        "losses": max(abs(ours - theirs) for ours, theirs in zip(losses, expected[0], strict=True)),
        "gradients": far(first, expected[1]),
        "weights": far(pipe.state_dict(), expected[2]),
        "names": sorted(pipe.state_dict()),
        "trained": sorted(first),
    }


def trained(name, schedule, stages, world, sizes, microbatches=4, size=3, by_microbatch=False, **more):
    """Train in a pipeline, and say how far it is from one process. Of two schedules each pair of ranks has one."""
    schedule = schedule if isinstance(schedule, str) else schedule[dist.get_rank() // 2]
    sizes = tuple(sizes)
    expected = reference(name, sizes, size if by_microbatch else None)
    with pipeline_of(name, schedule, stages, world=world, microbatches=microbatches, size=size, **more) as pipe:
        return compared(pipe, ran(pipe, name, sizes, whole=False), expected)


def names_of(name):
    """The names of a model's state, and of what is trained."""
    model = model_of(name)
    trained = [name for name, _ in model.named_parameters() if not name.startswith("unused")]
    return sorted(model.state_dict()), sorted(trained)


def replicated(codec, sizes, seeds=(0, 0), name="tied"):
    """Two replicas of two stages, on the two halves of every batch."""
    expected = reference(name, tuple(sizes))
    seed = seeds[dist.get_rank() // 2]
    with pipeline_of(name, "1f1b", 2, microbatches=2, codec=codec, seed=seed) as pipe:
        found = compared(pipe, ran(pipe, name, sizes, replicas=2), expected)
        state = {name: tensor.sum().item() for name, tensor in pipe.state_dict().items()}
        return found | {"state": state, "sent": pipe._gradients.sent_bytes}


def refused():
    """One bad batch after the other, and a good one at the end: what each rank is told, and how far it comes."""
    inputs, targets = data_of("mlp")
    inputs, targets, told = inputs[0][:12], targets[:12], []
    bad = [
        (inputs[:, :4], targets, functional.cross_entropy),
        (inputs.float(), targets, functional.cross_entropy),
        (inputs[:0], targets[:0], functional.cross_entropy),
        (inputs, targets[:11], functional.cross_entropy),
        ("inputs", targets, functional.cross_entropy),
        ((inputs, inputs), targets, functional.cross_entropy),
        (inputs, None, functional.cross_entropy),
        (inputs, targets, nn.CrossEntropyLoss(reduction="none")),
        (inputs, targets, functools.partial(functional.cross_entropy, reduction="none")),
        (inputs, targets, SimpleLoss(reduction=torch.ones(2))),
        (inputs, targets, None),
    ]
    other = {name: torch.full_like(tensor, 7.0) for name, tensor in model_of("mlp").state_dict().items()}
    last = list(other)[-1]
    states = [{}, other | {last: other[last].numpy()}, other | {last: None}, other | {last: other[last].to("meta")}]
    with pipeline_of("mlp", "1f1b", 4) as pipe:
        for each in bad:
            told.append(said(pipe.step, *each))
        with torch.no_grad():
            told.append(said(pipe.step, inputs, targets, functional.cross_entropy))
        told += [said(pipe.load_state_dict, state) for state in states]
        told.append(said(pipe.load_state_dict, 7 if dist.get_rank() == 1 else other))
        return {"told": told, **compared(pipe, ran(pipe, "mlp", [12] * 3), reference("mlp", (12,) * 3))}


class SimpleLoss:
    def __init__(self, reduction):
        self.reduction = reduction

    def __call__(self, output, target):
        return functional.cross_entropy(output, target)


def said(what, *args, **more):
    try:
        what(*args, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
    return ""


def refused_plans():
    """Plans that do not fit, or differ between ranks."""
    rank = dist.get_rank()
    plan, other = plan_of("mlp", "gpipe", 4, 4, 3), plan_of("mlp", "gpipe", 4, 2, 3)
    two, three = (SimpleNamespace(**{**vars(plan), "stages": stages}) for stages in (2, 3))
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh()).double() if rank == 1 else model_of("mlp")
    return [
        said(paceline.Pipeline, model_of("mlp"), three),
        said(paceline.Pipeline, model_of("mlp"), two if rank == 2 else plan),
        said(paceline.Pipeline, model_of("mlp"), other if rank == 2 else plan),
        said(paceline.Pipeline, model, plan),
        said(paceline.Pipeline, model_of("mlp"), plan, codec="qsgd" if rank == 3 else "identity"),
    ]


def refused_doubles():
    """Replicas whose gradients in float64 would be rounded; only some stages have a weight of their own in it."""
    return said(paceline.Pipeline, model_of("tied"), plan_of("tied", "1f1b", 2, 2, 3), codec="qsgd")


def refused_sizes():
    """Models that differ in nothing but the sizes of tensors, at once or with the first rest."""
    rank = dist.get_rank()
    inputs, targets = data_of("pool")
    told = [said(paceline.Pipeline, pool(1 if rank == 1 else 2).double(), plan_of("pool", "gpipe", 4, 4, 3))]
    with pipeline_of("pool", "gpipe", 4) as pipe:
        if rank == 1:
            pipe.model[1].kernel_size = pipe.model[1].stride = 1
        told.append(said(pipe.step, inputs[0][:13], targets[:13], functional.cross_entropy))
        loss = pipe.step(inputs[0][:12], targets[:12], functional.cross_entropy).item()
    return {"told": told, "loss": loss}


def turned(samples):
    """Predictions of models whose outputs have not one row for each sample."""
    inputs = data_of("rows")[0][0][:samples]
    with pipeline_of("rows", "1f1b", 2, world=2, size=4) as pipe, torch.no_grad():
        far = float((pipe.predict(inputs) - model_of("rows")(inputs)).abs().max())
    with pipeline_of("turned", "1f1b", 2, world=2, size=4) as pipe:  # 4 x 4: the samples could be either
        return {"far": far, "told": [said(pipe.predict, inputs), said(pipe.predict, inputs)]}


def failing(where):
    """The user's own code fails on one rank: what each rank is told, and that another pipeline works afterwards."""

    def no_number(output, target):
        return functional.cross_entropy(output, target, reduction="none")

    def bad(output, target):
        raise KeyError("no such class")

    inputs, targets = data_of("mlp")
    inputs, targets = inputs[0][:12], targets[:12]

    def detached(output, target):
        return functional.cross_entropy(output, target).detach()

    loss = {"loss": bad, "shape": no_number, "detached": detached}.get(where, functional.cross_entropy)
    with pipeline_of("mlp", "zero-bubble", 4, timeout_seconds=120.0) as pipe:
        if where == "layer" and dist.get_rank() == 1:
            runner = pipe._runners._runners[4, 3, True]
            runner._stages[0].submod.register_forward_pre_hook(lambda *_: raise_(LookupError("my layer fails")))
        began = time.monotonic()
        told = said(pipe.step, inputs, targets, loss)
        took = time.monotonic() - began
        again = said(pipe.step, inputs, targets, functional.cross_entropy)
    with pipeline_of("mlp", "zero-bubble", 4) as pipe:
        pipe.step(inputs, targets, functional.cross_entropy)
    return {"told": told, "took": took, "again": again}


def raise_(error):
    raise error


def predicted(name, schedule, samples):
    """Outputs of a pipeline in eval mode, in the midst of training, against those of the model."""
    with pipeline_of(name, schedule, 2, world=2, size=4) as pipe:
        sizes = (16,) * 3
        ran(pipe, name, sizes)
        inputs = data_of(name)[0]
        given = tuple(each[:samples] for each in inputs)
        first = pipe.predict(given if len(given) > 1 else given[0])
        whole = pipe.full_state_dict()
        ran(pipe, name, sizes)
        pipe.plan.evaluates = False
        found = {"sum": float(first.sum()), "refused": said(pipe.predict, given)}
        pipe.plan.evaluates = True
        if whole is not None:
            model = model_of(name)
            model.load_state_dict(whole)
            with torch.no_grad():
                found["far"] = float((model.eval()(*given) - first).abs().max())
        return found | {"modes": [module.training for module in pipe.model.modules()]}


def saved_again():
    """The whole state of a model whose weight has two names on a stage behind the first."""
    with pipeline_of("again", "gpipe", 2, world=2, size=4) as pipe:
        whole, ours = pipe.full_state_dict(), model_of("again").state_dict()
        return None if whole is None else {name: float((whole[name] - ours[name]).abs().max()) for name in whole}


def saved():
    """A whole state, taken up by a pipeline that began elsewhere, with another cut and only its own weights."""
    name = "tied"
    found = {}
    with pipeline_of(name, "1f1b", 4) as pipe:
        ran(pipe, name, (12,) * 3)
        whole = pipe.full_state_dict()
        found["whole"] = None if whole is None else sorted(whole)
        kept = {name: tensor.clone() for name, tensor in (whole or {}).items()}
        box = {name: kept.get(name, torch.empty_like(tensor)) for name, tensor in model_of(name).state_dict().items()}
        for tensor in box.values():
            dist.broadcast(tensor, 0)
    with pipeline_of(name, "gpipe", 4, seed=5, free_others=True) as pipe:
        pipe.load_state_dict(box)
        tensors = tensors_of(pipe.model)
        found["held"] = sorted(name for name, tensor in tensors.items() if tensor.device.type != "meta")
        found["far"] = far(pipe.state_dict(), box)
        sizes = (12, 12, 7, 12)
        losses, _ = ran(pipe, name, sizes)
        mine = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        pipe.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in mine.items()})
        pipe.load_state_dict(mine)
        found["own"] = far(pipe.state_dict(), mine)
        found["missing"] = said(pipe.load_state_dict, {name: box[name] for name in list(box)[1:]})
    model = model_of(name)
    model.load_state_dict(box)
    expected = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for inputs, targets in batches_of(name, sizes):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(*inputs), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found["losses"] = max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True))
    return found


def in_memory():
    """Two pairs of ranks do the same: what each rank of a pair holds; the plan is measured by one rank for all."""
    return within_memory(pairs()[dist.get_rank() // 2], paceline.plan_pipeline)


def planned_in_pairs():
    """Each pair of ranks plans for itself, twice."""
    pair, settings = pairs()[dist.get_rank() // 2], {"stages": 2, "microbatches": 4, "repeats": 3}
    inputs, _ = next(batches_of("mlp", (12,)))
    plans = [paceline.plan_pipeline(model_of("mlp"), inputs, **settings, process_group=pair) for _ in range(2)]
    return [repr(plan.profile) for plan in plans]


def recorded(schedule):
    with pipeline_of("mlp", schedule, 4) as pipe:
        ran(pipe, "mlp", (12,), record=True)
        spans = [tuple(span) for span in pipe.spans]
        ran(pipe, "mlp", (12,))
        return {"spans": spans, "off": len(pipe.spans)}


def accumulated():
    """Two steps into the same gradients, between two replicas and shared weights; a loss that is a sum."""
    inputs, targets = data_of("tied")
    half = slice(6 * (dist.get_rank() // 2), 6 * (dist.get_rank() // 2) + 6)
    loss = functools.partial(functional.cross_entropy, reduction="sum")
    with pipeline_of("tied", "1f1b", 2, microbatches=2) as pipe:
        for begin in (0, 12):
            batch = inputs[0][begin : begin + 12][half], targets[begin : begin + 12][half]
            pipe.step(*batch, loss, accumulate=begin > 0)
        ours = {name: weight.grad for name, weight in pipe.named_parameters() if weight.grad is not None}
        norm = pipe.grad_norm()
    model = model_of("tied")
    loss(model(inputs[0][:24]), targets[:24]).backward()
    theirs = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    whole = float(torch.stack([gradient.norm() for gradient in theirs.values()]).norm())
    return {"far": far(ours, theirs), "names": sorted(ours), "norm": norm / whole}


def small_rests():
    """BatchNorm cannot train on one sample: refused by all, and the pipeline goes on."""
    with pipeline_of("dropout", "gpipe", 2, world=2, microbatches=2, size=4) as pipe:
        inputs, targets = data_of("dropout")
        told = said(pipe.step, inputs[0][:9], targets[:9], functional.cross_entropy)
        loss = pipe.step(inputs[0][:8], targets[:8], functional.cross_entropy).item()
        counted = [int(value) for name, value in pipe.state_dict().items() if name.endswith("tracked")]
        runners = []
        for samples in (6, 7, 10, 14, 15, 18, 6):
            pipe.step(inputs[0][:samples], targets[:samples], functional.cross_entropy)
            runners.append(len(pipe._runners._runners))
        return {"told": told, "loss": loss, "counted": counted, "runners": max(runners)}


def until_killed(folder, steps=100_000):
    """Step until a rank is gone; leaves word of the first step."""
    inputs, targets = data_of("mlp")
    try:
        with pipeline_of("mlp", "1f1b", 4, timeout_seconds=120.0) as pipe:
            for step in range(steps):
                pipe.step(inputs[0][:12], targets[:12], functional.cross_entropy)
                if step == 3:
                    Path(folder, str(dist.get_rank())).touch()
                killed = time.monotonic()
    except (RankGoneError, paceline.PipelineError) as error:
        return {"told": str(error), "took": time.monotonic() - killed}
    return {"told": "", "took": 0.0}


for _name in MODELS:  # the first trace loads much: do it before this process becomes many
    graph_of(_name, 3)

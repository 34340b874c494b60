"""Trainers of ranks whose gradients travel encoded."""

from __future__ import annotations

import functools
import logging
import os

import torch

from paceline import PacelineError
from paceline.huggingface import compress
from tests.integrations.huggingface.tiny import Interface, Sentences, StopAt, Trainer, bits, make_args, make_model


def job(parts, **settings):
    """Run several parts one after the other in one launch: [name, settings] of each; return their answers."""
    return [globals()[name](**(settings | more)) for name, more in parts]


def make_trainer(folder=None, samples=64, width=16, layers=1, data=None, callbacks=(), **settings):
    model = make_model(width=width, layers=layers)
    data = data or Sentences(samples)
    return Trainer(model, make_args(folder, **settings), train_dataset=data, callbacks=list(callbacks))


def train(codec=None, folder=None, stop=None, resume=None, plan="auto", counted=False, **settings):
    """Train; return the bits that came of it, the log, and what was sent."""
    interface = Interface(first=8)  # by then the link has been probed
    callbacks = [StopAt(stop)] if stop else []
    trainer = make_trainer(folder, callbacks=[*callbacks, *([interface] if counted else [])], **settings)
    part = compress(trainer, codec, plan=plan) if codec else None
    trainer.train(resume_from_checkpoint=resume)
    compression = part.compression if part else None
    return {
        "bits": bits(trainer),
        "steps": trainer.state.global_step,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "log": trainer.state.log_history,
        "sent_bytes": compression.sent_bytes if compression else None,
        "compressed_steps": compression.steps if compression else None,
        "bytes_per_step": interface.bytes_per_step if counted else None,
        "unused": getattr(trainer.model_wrapped, "find_unused_parameters", None),
        "wrapped": type(trainer.model_wrapped).__name__,
        "repr": repr(part),
        "files": sorted(os.listdir(os.path.join(folder, sorted(os.listdir(folder))[0]))) if folder else [],
    }


def held_back(folder, step, codec, **settings):
    """Return the sum of what was held back, of each parameter: as a checkpoint has it, and as a resumed run has it.

    The resumed run is looked at when DDP has put all parameters into other buckets.
    """
    checkpoint = os.path.join(folder, f"checkpoint-{step}")
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    state = torch.load(os.path.join(checkpoint, f"paceline-compression-{rank}-of-{world}.pt"), weights_only=True)
    trainer = make_trainer(folder, max_steps=step, **settings)  # it takes no step
    part = compress(trainer, codec)
    trainer.train(resume_from_checkpoint=checkpoint)
    exchanges = part.compression._exchanges
    before = {}
    for bucket, exchange in list(exchanges._exchanges.items()):
        parts = torch.split(exchange.held(), [exchanges._sizes[name] for name in bucket])
        before |= {name: float(held.double().sum()) for name, held in zip(bucket, parts, strict=True)}
    shapes = {name: parameter.shape for name, parameter in trainer.model.named_parameters()}
    for name in shapes:  # a bucket of its own for each
        exchanges.exchange_of([name], [shapes[name]])
    after = {key[0]: float(each.held().double().sum()) for key, each in exchanges._exchanges.items()}
    return {"before": before, "after": after, "saved": len(state["buckets"])}


def refuse(what):
    """Return what is said of something that cannot be."""
    from accelerate.utils import DDPCommunicationHookType

    trainer = make_trainer()
    try:
        if what == "hook":
            trainer.accelerator.ddp_handler.comm_hook = DDPCommunicationHookType.FP16
            compress(trainer, "qsgd")
        elif what == "own wrapper":
            plain = trainer.accelerator.prepare_model
            trainer.accelerator.prepare_model = functools.partial(_wrapped, plain)
            compress(trainer, "qsgd")
            trainer.train()
        elif what == "twice":
            compress(trainer, "qsgd")
            compress(trainer, "qsgd")
        elif what == "averaging":
            trainer._paceline_parts = {"averaging": None}
            compress(trainer, "qsgd")
        elif what == "late":
            trainer.train()
            compress(trainer, "qsgd")
        elif what == "checkpoint of other ranks":
            trainer = make_trainer(what)
    except PacelineError as error:
        return str(error)
    return None


def _wrapped(plain, model, *more, **named):
    return torch.nn.parallel.DistributedDataParallel(model)


def accelerate_loop(codec):
    """A loop of one's own with Accelerate, whose model is a DistributedDataParallel."""
    import accelerate

    import paceline

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model(dropout=0.0)
    loader = torch.utils.data.DataLoader(Sentences(32), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    compression = paceline.compress(model, codec)
    losses = []
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = accelerator.gather(weights[None])
    return {"losses": losses, "steps": compression.steps, "equal": bool((everyone == everyone[0]).all())}


def one_rank(codec):
    """Train on one rank; return what the log said of it."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("paceline.huggingface").addHandler(handler)
    return train(codec) | {"lines": lines}

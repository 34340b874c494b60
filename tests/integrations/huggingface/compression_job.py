"""Trainers of ranks whose gradients travel encoded."""

from __future__ import annotations

import functools
import logging
import os

import torch
from transformers import TrainerCallback

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
        "payload_bytes": compression.payload_bytes if compression else None,
        "compressed_steps": compression.steps if compression else None,
        "bytes_per_step": interface.bytes_per_step if counted else None,
        "unused": getattr(trainer.model_wrapped, "find_unused_parameters", None),
        "wrapped": type(trainer.model_wrapped).__name__,
        "repr": repr(part),
        "files": sorted(os.listdir(os.path.join(folder, sorted(os.listdir(folder))[0]))) if folder else [],
    }


def conserved(folder, codec, **settings):
    """Resume, and let one gradient travel in DDP's first buckets; return by how much sums differ before and after.

    On all ranks together: what was held back + the ranks' gradients = what is held back then + what all have received.
    """
    look = Conservation()
    trainer = make_trainer(folder, callbacks=[look, StopAt(0)], **settings)
    look.part, look.batch = compress(trainer, codec), trainer.data_collator([Sentences(8, seed=7)[i] for i in range(4)])
    trainer.train(resume_from_checkpoint=True)
    return {"difference": look.difference, "held": look.held, "moved": look.moved}


class Conservation(TrainerCallback):
    """Looks at one backward pass before a resumed run takes its first step."""

    part = batch = None

    def on_train_begin(self, args, state, control, **others):
        exchanges, model = self.part.compression._exchanges, self.part._trainer.model_wrapped
        buckets, before = list(exchanges._exchanges), held_back(exchanges)
        model.eval()  # without dropout: both passes are of the same gradient
        with model.no_sync():
            model(**self.batch).loss.backward()
        local = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        model.zero_grad()
        model(**self.batch).loss.backward()
        received = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        model.zero_grad()
        names = [name for name, _ in model.module.named_parameters()]
        after = held_back(exchanges)
        kept = local + torch.cat([before[name] - after[name] for name in names])
        torch.distributed.all_reduce(kept)
        self.difference = float((kept - received * args.world_size).abs().max() / received.abs().max())
        self.held = float(sum(each.abs().sum() for each in before.values()))
        self.moved = list(exchanges._exchanges) != buckets


def held_back(exchanges):
    """Return what a rank holds back, by parameter."""
    held = dict(exchanges._carried)
    for bucket, exchange in exchanges._exchanges.items():
        held |= zip(bucket, torch.split(exchange.held(), [exchanges._sizes[name] for name in bucket]), strict=True)
    return {name: each.clone() for name, each in held.items()}


def refuse(what):
    """Return what is said of something that cannot be."""
    from accelerate import ParallelismConfig
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
            trainer.is_in_train = True
            compress(trainer, "qsgd")
        elif what == "fp16":
            trainer.accelerator.scaler = object()
            compress(trainer, "qsgd")
        elif what == "fsdp":
            trainer.is_fsdp_enabled = True
            compress(trainer, "qsgd")
        elif what == "tensor parallel":
            trainer.accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
            compress(trainer, "qsgd")
        elif what == "no trainer":
            compress(trainer.model, "qsgd")
        elif what == "codec":
            compress(trainer, "zip")
        elif what == "plan":
            compress(trainer, "top-k", plan="all-reduce")
        elif what == "timeout":
            compress(trainer, "qsgd", timeout_seconds=0)
    except (PacelineError, ValueError) as error:
        return str(error)
    finally:
        trainer.accelerator.state.parallelism_config = None
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


def one_rank(codec, alone=False):
    """Train on one rank, of torchrun's or without it; return what the log said of it."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if alone else ():
        del os.environ[name]
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("paceline.huggingface").addHandler(handler)
    return train(codec) | {"lines": lines}

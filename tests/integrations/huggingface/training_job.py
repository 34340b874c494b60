"""One rank that trains with Trainer, case after case; it returns of each what tests compare."""

from __future__ import annotations

import torch

from tests.integrations.huggingface import trainers
from tests.integrations.huggingface.trainers import Collectives, Tokens, arguments, digest, state_digest, with_sgd

COLLECTIVES = Collectives()


def job(cases):
    COLLECTIVES.install()
    return [train(**case) for case in cases]


def train(
    folder,
    average=None,
    rounds=None,
    training=None,
    samples=48,
    rate=0.2,
    momentum=0.9,
    model="gpt2",
    dropout=0.0,
    resume=None,
    slow=None,
    broken=None,
    skips=None,
    stops=None,
    gathers=False,
    iterable=False,
    own_optimizer=True,
    again=False,
    prune=None,
):
    import os
    import time

    from torch.nn.parallel import DistributedDataParallel
    from transformers import Trainer, TrainerCallback

    import paceline.huggingface

    rank = int(os.environ.get("RANK", 0))
    made = trainers.gpt2(dropout=dropout) if model == "gpt2" else getattr(trainers, model)()
    spans, evaluated, steps = [], [], []

    class Watcher(TrainerCallback):
        """Counts collectives from the end of a step to that of the next, where nothing is evaluated or saved."""

        met = None

        def on_train_begin(self, *_, **__):
            self.met = len(COLLECTIVES.seen)

        def on_step_end(self, args, state, control, **__):
            spans.append(len(COLLECTIVES.seen) - self.met)
            self.met = len(COLLECTIVES.seen)
            steps.append(state.global_step)
            control.should_training_stop |= stops == [rank, state.global_step]

        def on_evaluate(self, *_, **__):
            self.met = len(COLLECTIVES.seen)

        on_save = on_evaluate

    class Watched(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if slow and rank == slow[0]:
                time.sleep(slow[1])
            if skips == [rank, self.state.global_step]:  # as fp16's scaler does on the rank that overflows
                self.optimizer.step = lambda *_, **__: vars(self.optimizer).pop("step")
            if gathers:
                self.accelerator.gather(torch.ones(1))
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if broken and rank == broken[0] and self.state.global_step == broken[1]:
                if broken[2] == "raise":
                    raise RuntimeError("the dog ate this batch")
                broken[1] = -1
                return loss * float("nan")
            return loss

        def evaluation_loop(self, *args, **kwargs):
            evaluated.append([self.state.global_step, digest(self.model)])
            return super().evaluation_loop(*args, **kwargs)

    data = (trainers.Classes if model == "classifier" else Tokens)(samples)
    kind = Watched if prune is None else Trainer  # a compute_loss of one's own has no losses of samples
    trainer = kind(
        made,
        arguments(folder, **(training or {})),
        train_dataset=trainers.Stream(data) if iterable else data,
        eval_dataset=Tokens(16, seed=1),
        optimizers=(with_sgd(made, rate, momentum) if own_optimizer else None, None),
        callbacks=[Watcher()],
    )
    part = None
    if average is not None:
        part = paceline.huggingface.average(trainer, **average)
    if rounds is not None:
        part = paceline.huggingface.take_rounds(trainer, **rounds)
    if prune is not None:
        paceline.huggingface.prune(trainer, **prune)
    started = len(COLLECTIVES.seen)
    out = trainer.train(resume_from_checkpoint=resume)
    if again:
        out = trainer.train()
    optimizer = trainer.optimizer.optimizer
    return {
        "digest": digest(trainer.model),
        "optimizer": state_digest(optimizer),
        "ddp": isinstance(trainer.model_wrapped, DistributedDataParallel),
        "wrapped": type(trainer.model_wrapped).__name__,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "steps": steps,
        "train_loss": out.training_loss,
        "log": trainer.state.log_history,
        "figures": part.figures() if part else {},
        "sync": type(part.sync).__name__ if part else "",
        "evaluated": evaluated,
        "between": sum(spans),
        "collectives": len(COLLECTIVES.seen) - started,
        "best": trainer.state.best_model_checkpoint,
        "flos": trainer.state.total_flos,
        "rate": optimizer.param_groups[0]["lr"],
        "weights": [float(x) for p in trainer.model.parameters() for x in p.detach().reshape(-1)[:3]],
        "scheduler_steps": trainer.lr_scheduler.last_epoch,
    }

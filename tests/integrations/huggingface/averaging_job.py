"""One rank of Trainer with averaging, by settings; returns what a test compares."""

from __future__ import annotations

import torch

from tests.integrations.huggingface.trainers import Collectives, Tokens, arguments, digest, gpt2, state_digest, with_sgd


def job(
    folder,
    strategy="local-sgd",
    settings=None,
    training=None,
    samples=48,
    sgd=True,
    resume=None,
    model="gpt2",
    watch=False,
):
    from transformers import Trainer, TrainerCallback

    from paceline.huggingface import average
    from tests.integrations.huggingface import trainers

    made = gpt2() if model == "gpt2" else getattr(trainers, model)()
    args = arguments(folder, **(training or {}))
    counted = Collectives() if watch else None
    spans = []

    class Watcher(TrainerCallback):
        def on_step_begin(self, *_, **__):
            spans.append(len(counted.seen) if counted else 0)

        def on_step_end(self, *_, **__):
            spans.append(len(counted.seen) if counted else 0)

    optimizers = (with_sgd(made), None) if sgd else (None, None)
    trainer = Trainer(
        made, args, train_dataset=Tokens(samples), eval_dataset=Tokens(16, seed=1), optimizers=optimizers,
        callbacks=[Watcher()],
    )  # fmt: skip
    evaluated = []
    if strategy:
        averaging = average(trainer, strategy, **(settings or {}))
        inner = trainer.evaluation_loop

        def look(*args, **kwargs):
            evaluated.append([trainer.state.global_step, digest(trainer.model)])
            return inner(*args, **kwargs)

        trainer.evaluation_loop = look
    out = trainer.train(resume_from_checkpoint=resume)
    from torch.nn.parallel import DistributedDataParallel

    optimizer = trainer.optimizer.optimizer
    return {
        "digest": digest(trainer.model),
        "optimizer": state_digest(optimizer),
        "ddp": isinstance(trainer.model_wrapped, DistributedDataParallel),
        "steps": trainer.state.global_step,
        "train_loss": out.training_loss,
        "log": trainer.state.log_history,
        "figures": averaging.figures() if strategy else {},
        "sync": type(averaging.sync).__name__ if strategy else "",
        "evaluated": evaluated,
        "spans": spans,
        "rate": optimizer.param_groups[0]["lr"],
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "first": [float(x) for x in torch.cat([p.detach().reshape(-1)[:2] for p in trainer.model.parameters()])],
    }

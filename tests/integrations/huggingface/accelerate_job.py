"""One rank of a loop of one's own with Accelerate."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from tests.integrations.huggingface.trainers import Plain, Tokens, digest, state_digest


def job(kind, accumulation=1):
    from accelerate import Accelerator
    from torch.nn.parallel import DistributedDataParallel

    import paceline
    import paceline.huggingface

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.0 if kind in ("ddp", "local") else 0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=40)
    loader = torch.utils.data.DataLoader(Tokens(48), batch_size=4, shuffle=True)
    if kind in ("ddp", "refused"):
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    else:
        model, optimizer, loader, scheduler = paceline.huggingface.prepare(
            accelerator, model, optimizer, loader, scheduler
        )
    wrapped = isinstance(model, DistributedDataParallel)

    def passes():
        for batch in loader:
            with accelerator.accumulate(model):
                scores = model(batch["input_ids"], labels=batch["labels"])["logits"]
                accelerator.backward(cross_entropy(scores, batch["labels"][:, -1]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    if kind == "ddp":
        passes()
        steps = 0
    elif kind == "rounds":
        with paceline.LGCSync(model, optimizer, k=1, scheduler=scheduler) as sync:
            for batch in sync.epoch(loader):
                accelerator.backward(model(**batch)["loss"])
                sync.step()
            steps = sync.version
    else:
        averager = paceline.LocalSGD if kind == "local" else paceline.HPSGD
        settings = {"period": 1} if kind == "local" else {"codec": "qsgd"}
        with averager(model, optimizer, **settings) as sync:
            passes()
            sync.flush()
            steps = sync.steps
    plain = accelerator.unwrap_model(model)
    return {
        "ddp": wrapped,
        "digest": digest(plain),
        "optimizer": state_digest(optimizer),
        "steps": steps,
        "rate": optimizer.param_groups[0]["lr"],
        "weights": [float(x) for p in plain.parameters() for x in p.detach().reshape(-1)[:3]],
        "kind": type(optimizer).__name__,
    }

"""One rank that runs the page: its blocks in their order, each with the names that the text has for a reader's own."""

from __future__ import annotations

import os

import torch

from tests.docs.pages import blocks
from tests.integrations.huggingface.trainers import Tokens, gpt2

SHORTER = {
    "max_steps=1000": "max_steps=4, use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=4",
    "eval_steps=100": "eval_steps=2",
    "save_steps=100": "save_steps=2",
    "warmup_steps=100": "warmup_steps=1",
    '"warmup_steps": 100': '"warmup_steps": 1',
    "total_steps=1000": "total_steps=4",
    "Accelerator(": "Accelerator(cpu=True, ",
}
FRESH = ("args = ", "averaging = ", "trainer = Trainer", "large = ", "optimizer = ", "from accelerate")


def ours(code):
    """Whether a block is of these sections: codecs and pruning have tests of their own."""
    return any(code.lstrip().startswith(each) for each in FRESH) or "average(" in code or "take_rounds(" in code


def job(folder):
    os.chdir(folder)
    names = {"train_dataset": Tokens(32), "eval_dataset": Tokens(8, seed=1)}
    ran = []
    for code in filter(ours, blocks("huggingface.md")):
        for long, short in SHORTER.items():
            code = code.replace(long, short)
        names["model"] = gpt2()
        if code.startswith("averaging ="):
            given = {name: names[name] for name in ("train_dataset", "eval_dataset")}
            names["trainer"] = names["Trainer"](names["model"], names["args"], **given)
        if "prepare(" in code:
            names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
            names["scheduler"] = torch.optim.lr_scheduler.LinearLR(names["optimizer"])
            names["loader"] = torch.utils.data.DataLoader(names["train_dataset"], batch_size=4)
        exec(compile(code, "docs/huggingface.md", "exec"), names)
        ran.append(code.strip().splitlines()[0])
    return {
        "ran": ran,
        "averages": names["averaging"].figures()["averages"],
        "rounds": names["rounds"].figures()["rounds"],
        "steps": names["sync"].steps,
    }

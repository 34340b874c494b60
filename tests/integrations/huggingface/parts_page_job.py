"""One rank that runs the sections on codecs and pruning: every block, with the names that a reader has."""

from __future__ import annotations

import os
import re

import torch

import paceline.huggingface
from tests.docs.pages import DOCS, blocks
from tests.integrations.huggingface.tiny import Sentences, Trainer, make_args, make_model

SECTIONS = re.compile(r"^## (?:Codecs|Pruning)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)


def code_of_sections():
    """Return the blocks of the two sections, in their order."""
    text = "".join(SECTIONS.findall((DOCS / "huggingface.md").read_text(encoding="utf-8")))
    return [code for code in blocks("huggingface.md") if code in text]


def job(folder):
    """Run every block with a Trainer of its own; return what came of each."""
    os.chdir(folder)
    answers = []
    for code in code_of_sections():
        model, data = make_model(), Sentences(48)
        trainer = Trainer(model, make_args(num_train_epochs=4), train_dataset=data)
        names = {"paceline": paceline, "torch": torch, "trainer": trainer, "model": model, "train_dataset": data}
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        exec(compile(code.replace("Accelerator()", "Accelerator(cpu=True)"), "docs/huggingface.md", "exec"), names)
        part = names.get("pruning") or names["compression"]
        answers.append({"steps": trainer.state.global_step, "figures": part.figures()})
    return answers

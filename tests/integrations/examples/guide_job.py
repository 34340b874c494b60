"""One rank that tries the lines of the Trainer guide that its script does not have, each in a Trainer of its own."""

from __future__ import annotations

from transformers import Trainer

import paceline.huggingface
from tests.docs.pages import blocks
from tests.integrations.huggingface.tiny import Sentences, make_args, make_model


def lines():
    """Return the lines of the guide's block that has several parts."""
    (found,) = (block for block in blocks("guides/huggingface.md") if "take_rounds(" in block)
    return found.splitlines()


def job():
    answers = {}
    for line in lines():
        trainer = Trainer(make_model(), make_args(num_train_epochs=4), train_dataset=Sentences(32))
        part = eval(line, {"paceline": paceline, "trainer": trainer})  # noqa: S307 - our own page
        trainer.train()
        answers[line.split("(")[0].rpartition(".")[2]] = part.figures()
    return answers

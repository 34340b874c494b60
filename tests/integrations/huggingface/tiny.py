"""A small model, data that can be learned, and Trainers of both, for the jobs of these tests."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

WORDS, LENGTH, CLASSES = 24, 12, 3


class Sentences(torch.utils.data.Dataset):
    """Sentences of several lengths: each word is mostly the one before plus a step of the sentence's own."""

    def __init__(self, size, seed=0, labelled=False):
        generator = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(size):
            step = int(torch.randint(1, CLASSES + 1, (), generator=generator))
            start = int(torch.randint(1, WORDS, (), generator=generator))
            words = (start + step * torch.arange(LENGTH)) % (WORDS - 1) + 1
            length = int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=generator))
            noise = torch.randint(0, WORDS, (LENGTH,), generator=generator)
            words = torch.where(torch.rand(LENGTH, generator=generator) < 0.1, noise, words)
            inside = torch.arange(LENGTH) < length
            item = {"input_ids": torch.where(inside, words, 0), "attention_mask": inside.long()}
            item["labels"] = torch.tensor(step - 1) if labelled else torch.where(inside, words, -100)
            self.items.append(item)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return dict(self.items[index])


def make_model(head="causal-lm", width=16, dropout=0.1, seed=1, layers=1):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=2, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, num_labels=CLASSES, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config) if head == "causal-lm" else GPT2ForSequenceClassification(config)


def make_args(folder=None, **settings):
    settings = {
        "per_device_train_batch_size": 4, "num_train_epochs": 1, "logging_steps": 2, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "learning_rate": 0.01, "dataloader_pin_memory": False,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
    } | settings  # fmt: skip
    if folder is None:
        folder = tempfile.mkdtemp(prefix="paceline-trainer-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return TrainingArguments(folder, **settings)


class StopAt(TrainerCallback):
    """Ends training after so many steps, as Ctrl-C does, with everything saved that was."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **others):
        control.should_training_stop |= state.global_step >= self.step


class Interface(TrainerCallback):
    """Counts the bytes of the loopback interface between two steps."""

    def __init__(self, first):
        self.first, self.counts = first, {}

    def on_step_end(self, args, state, control, **others):
        line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "lo:" in line)
        self.counts[state.global_step] = int(line.split(":")[1].split()[8])  # sent, of this namespace

    @property
    def bytes_per_step(self):
        last = max(self.counts)
        return (self.counts[last] - self.counts[self.first]) / (last - self.first)


def fingerprint(*tensors):
    """The bits of tensors, as a short text."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


def bits(trainer):
    """The bits of the model and of the optimiser's memories."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    memories = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return [fingerprint(*trainer.model.parameters()), fingerprint(*memories)]


__all__ = ["Interface", "Sentences", "StopAt", "Trainer", "bits", "fingerprint", "make_args", "make_model"]

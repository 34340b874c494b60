"""Tiny language models and classifiers in Trainer: what the ranks of these tests run, and what they tell of it."""

from __future__ import annotations

import hashlib
import os

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset


class Tokens(Dataset):
    """Sequences of a chain in which most tokens follow from the one before."""

    def __init__(self, samples, seed=0, length=9, vocabulary=16):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(0, vocabulary, (samples, length), generator=generator)
        for place in range(1, length):
            follows = torch.rand(samples, generator=generator) < 0.8
            rows[:, place] = torch.where(follows, (3 * rows[:, place - 1] + 1) % vocabulary, rows[:, place])
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Classes(Tokens):
    """The same sequences, each of a class: that of its first token."""

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index][0] % 3}


def classifier():
    """A head that is told the number of items, and divides its loss by its own batch."""
    from transformers import GPT2ForSequenceClassification

    return GPT2ForSequenceClassification(gpt2(num_labels=3, pad_token_id=0).config)


def gpt2(seed=0, dropout=0.0, **config):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=16,
            n_positions=16,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            **rates,
            **config,
        )
    )


class Plain(torch.nn.Module):
    """A model whose loss is the mean over a batch's samples: cut into blocks, it has the same gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)

    def forward(self, input_ids, labels=None):
        scores = self.head(self.embedding(input_ids).mean(1))
        return {"loss": torch.nn.functional.cross_entropy(scores, labels[:, -1]), "logits": scores}


class Linear(torch.nn.Module):
    """A model that is none of transformers': no loss keywords, no config; BatchNorm, as vision models have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.norm = torch.nn.Embedding(16, 8), torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 16)

    def forward(self, input_ids, labels=None):
        hidden = self.norm(self.embedding(input_ids).mean(1))
        scores = self.head(hidden)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels[:, -1]), "logits": scores}


def arguments(folder, **settings):
    from transformers import TrainingArguments

    usual = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_train_batch_size": 4, "seed": 7,
        "learning_rate": 0.05, "optim": "adamw_torch", "logging_steps": 3, "save_strategy": "no", "max_steps": 6,
        "dataloader_pin_memory": False, "lr_scheduler_type": "linear",
    }  # fmt: skip
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        usual["ddp_backend"] = "gloo"
    return TrainingArguments(folder, **(usual | settings))


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(model):
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(raw(tensor))
    return found.hexdigest()[:16]


def state_digest(optimizer):
    found = hashlib.sha256()
    for parameter in sorted(optimizer.state_dict()["state"]):
        for name, value in sorted(optimizer.state_dict()["state"][parameter].items()):
            if isinstance(value, torch.Tensor):
                found.update(
                    name.encode() + value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                )
    return found.hexdigest()[:16]


def with_sgd(model, rate=0.2, momentum=0.9):
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


class Stream(IterableDataset):
    """The same samples, without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


class Collectives:
    """Counts the collectives of the script's own process group."""

    NAMES = ("all_gather", "all_reduce", "broadcast", "barrier", "all_gather_into_tensor", "gather", "reduce",
             "broadcast_object_list", "all_gather_object")  # fmt: skip

    def __init__(self):
        self.seen = []

    def install(self):
        for name in self.NAMES:
            self._count(name)

    def _count(self, name):
        inner = getattr(dist, name)

        def counted(*args, **kwargs):
            if kwargs.get("group") in (None, dist.group.WORLD):
                self.seen.append(name)
            return inner(*args, **kwargs)

        setattr(dist, name, counted)

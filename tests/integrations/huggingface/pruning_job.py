"""Trainers whose samples sit epochs out."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers.trainer as trainer_module
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

from paceline import PacelineError
from paceline.huggingface import checkpoints, compress, prune
from tests.integrations.huggingface.tiny import (
    LENGTH,
    WORDS,
    Sentences,
    StopAt,
    Trainer,
    bits,
    make_args,
    make_model,
)

INFO = {"policy": "info-batch", "ratio": 0.5, "delta": 0.875}
FINE = {"policy": "fine-pruning", "window": 4, "starting_point": 1, "block": 2, "count": 2, "prune": 0.25}


def job(parts, **settings):
    """Run several parts one after the other in one launch: [name, settings] of each; return their answers."""
    return [globals()[name](**(settings | more)) for name, more in parts]


class Numbered(torch.utils.data.Dataset):
    """Remembers which samples were fetched, in their order."""

    def __init__(self, data):
        self.data, self.fetched = data, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.fetched.append(int(index))
        return self.data[index]


class Epochs(TrainerCallback):
    """Remembers the steps of each epoch, what Trainer says of them, and the learning rates."""

    def __init__(self, data):
        self.data, self.steps, self.ends, self.fractions, self.rates, self.reported = data, [], [], [], [], []

    def on_train_begin(self, args, state, control, **others):
        self.data.fetched.clear()  # to group samples by length one has to look at all of them

    def on_step_end(self, args, state, control, optimizer, **others):
        self.fractions.append(state.epoch)
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.steps.append(state.global_step)

    def on_epoch_end(self, args, state, control, **others):
        self.ends.append(state.global_step)

    def on_log(self, args, state, control, logs, **others):
        self.reported.append(logs.get("paceline/pruned_share"))


class EndEpochAt(TrainerCallback):
    """Ends an epoch before its end."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **others):
        control.should_epoch_stop |= state.global_step == self.step


def train(
    policy=None, head="causal-lm", samples=48, folder=None, stop=None, resume=None, codec=None, end_epoch_at=None,
    evaluated=False, dropout=0.1, own_losses=False, own_trainer=False, **settings,
):  # fmt: skip
    """Train; return the bits that came of it, the epochs, and who sat out."""
    pruning_settings = {name: settings.pop(name) for name in list(settings) if name in {*INFO, *FINE}}
    data = Numbered(Sentences(samples, labelled=head != "causal-lm"))
    epochs = Epochs(data)
    callbacks = [epochs, *([StopAt(stop)] if stop else []), *([EndEpochAt(end_epoch_at)] if end_epoch_at else [])]
    args = make_args(folder, **{"num_train_epochs": 4} | settings)
    more = {"eval_dataset": Sentences(10, seed=5)} if evaluated else {}
    make = Weighted if own_trainer else Trainer
    trainer = make(make_model(head, dropout=dropout), args, train_dataset=data, callbacks=callbacks, **more)
    losses = _own_losses if own_losses else None
    part = prune(trainer, policy, losses=losses, **pruning_settings) if policy else None
    if codec:
        compress(trainer, codec)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "bits": bits(trainer),
        "global_step": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "ends": epochs.ends,
        "steps": epochs.steps,
        "fractions": epochs.fractions,
        "rates": epochs.rates,
        "rate_after": trainer.lr_scheduler.get_last_lr()[0],
        "losses": [line["loss"] for line in lines],
        "shares": [line.get("paceline/pruned_share") for line in lines],
        "reported": epochs.reported,
        "fetched": data.fetched,
        "epoch": part.sampler.epoch if part else None,
        "times": part.sampler.times_pruned.tolist() if part else None,
        "difficulty": np.nan_to_num(part.sampler.difficulty()).tolist() if part else None,
        "checkpoints": sorted(os.listdir(folder)) if folder else [],
        "warnings": [str(each.message) for each in caught if "epoch" in str(each.message)],
        "evaluations": [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line],
        "evaluated_plainly": Trainer(trainer.model, make_args(), **more).evaluate()["eval_loss"] if evaluated else None,
    }


class Normalised(torch.nn.Module):
    """A model with a BatchNorm, which refuses a batch of one sample; it keeps the sizes of its batches."""

    def __init__(self):
        super().__init__()
        self.layers, self.sizes = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)), []

    def forward(self, x, labels):
        self.sizes.append(len(x))
        return {"logits": self.layers(x).squeeze(1)}


def normalised(samples, epochs, policy):
    """Train a model with a BatchNorm; return the sizes of this rank's batches, and what the schedule was told."""
    numbers = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    data = [{"x": each, "labels": each.sum()} for each in numbers]
    trainer = Trainer(Normalised(), make_args(num_train_epochs=epochs, lr_scheduler_type="linear"), train_dataset=data)
    losses = lambda outputs, inputs: (outputs["logits"] - inputs["labels"]).square()  # noqa: E731
    part = prune(trainer, losses=losses, **policy)
    trainer.train()
    rate = trainer.lr_scheduler.get_last_lr()[0]
    return {"sizes": trainer.model.sizes, "rate_after": rate, "epoch": part.sampler.epoch}


class Labelled(list):
    """Samples with their classes as a list, as torchvision's data sets have them: 8 of 48 are of the rare one."""

    targets = (0,) * 40 + (1,) * 8


def protected(**policy):
    """Train on a rare class that is hard; return how often each class sat out, and in which epochs anybody does."""
    data = Labelled({"x": torch.ones(4), "labels": torch.tensor(float(kind))} for kind in Labelled.targets)
    trainer = Trainer(Normalised(), make_args(num_train_epochs=9), train_dataset=data)
    losses = lambda outputs, inputs: 0 * outputs["logits"] + 1 + 9 * inputs["labels"]  # noqa: E731
    part = prune(trainer, "fine-pruning", losses=losses, starting_point=1, block=1, count=1, prune=0.25, **policy)
    trainer.train()
    times = np.array(part.sampler.times_pruned)
    sat_out = [int(times[:40].sum()), int(times[40:].sum())]
    return {"sat_out": sat_out, "epochs": list(part.sampler.plan().pruned_epochs)}


def sampler_in_epochs():
    """Train by hand on the loader that Trainer hands out, in a loop that was written for a DistributedSampler."""
    trainer = Trainer(Normalised(), make_args(), train_dataset=[{"x": torch.ones(4), "labels": torch.ones(())}] * 48)
    part = prune(trainer, losses=lambda outputs, inputs: outputs["logits"])
    loader, met = trainer.get_train_dataloader(), []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        met.append(0)
        for batch in loader:
            met[-1] += len(batch["labels"])
            loader.batch_sampler.observe(batch["labels"])
    return {"met": met, "epoch": loader.batch_sampler.epoch, "other": part.sampler.epoch}


def rotate(folder, **settings):
    """Save three checkpoints and keep one; rank 1 writes late, and the last one not at all.

    Return the files of ranks that were there when old checkpoints were deleted, how often ranks met, and the error.
    """
    seen, meetings, late = {}, [], os.environ["RANK"] == "1"
    plain_rotate, plain_save, plain_gather = trainer_module.rotate_checkpoints, torch.save, checkpoints.gather_rows

    def see(*args, **named):
        newest = max(Path(folder).glob("checkpoint-*"), key=lambda each: int(each.name.split("-")[1]))
        seen[newest.name] = sorted(each.name for each in newest.glob("paceline-*"))
        return plain_rotate(*args, **named)

    def save(state, path, *args, **named):
        if late and "paceline-" in str(path):
            time.sleep(0.5)
            if "checkpoint-6" in str(path):
                raise OSError("no space is left for rank 1")
        plain_save(state, path, *args, **named)

    def gather(*args):
        meetings.append(1)
        return plain_gather(*args)

    trainer_module.rotate_checkpoints, torch.save, checkpoints.gather_rows = see, save, gather
    error = None
    try:
        train(folder=folder, save_strategy="steps", save_steps=2, save_total_limit=1, **settings)
    except (OSError, PacelineError) as raised:
        error = str(raised)
    finally:
        trainer_module.rotate_checkpoints, torch.save, checkpoints.gather_rows = plain_rotate, plain_save, plain_gather
    return {"seen": seen, "meetings": len(meetings), "error": error, "left": sorted(os.listdir(folder))}


def _own_losses(outputs, inputs):
    logits, labels = outputs["logits"][:, :-1], inputs["labels"][:, 1:]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return each.sum(1) / labels.ne(-100).sum(1)


class Weighted(Trainer):
    """A Trainer with a loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, **others):
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


class Routed(GPT2LMHeadModel):
    """A model that adds something to its loss, as mixtures of experts do."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **others):
        outputs = super().forward(input_ids, attention_mask=attention_mask, labels=labels, **others)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + 0.1
        return outputs


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from Sentences(8)


def refuse(what):
    """Return what is said of something that cannot be."""
    data, model, make, arguments = Sentences(16), make_model(), Trainer, {}
    settings, pruning_settings = {"num_train_epochs": 2}, {}
    if what == "iterable":
        data, settings = Endless(), {"max_steps": 3}
    elif what == "part of an epoch":
        settings = {"num_train_epochs": 1.5}
    elif what == "dispatched":
        settings |= {"accelerator_config": {"dispatch_batches": True}}
    elif what == "split":
        settings |= {"accelerator_config": {"split_batches": True}}
    elif what == "rebalanced":
        settings |= {"train_sampling_strategy": "batch_rebalance"}
    elif what == "out of order":
        settings |= {"dataloader_in_order": False}
    elif what == "compute_loss_func":
        arguments = {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum()}
    elif what == "compute_loss":
        make = Weighted
    elif what == "other loss":
        model = Routed(model.config)
    elif what == "policy":
        pruning_settings = {"policy": "magic"}
    elif what == "setting":
        pruning_settings = {"policy": "info-batch", "window": 3}
    elif what == "ratio":
        pruning_settings = {"ratio": 1.5}
    trainer = make(model, make_args(**settings), train_dataset=data, **arguments)
    if what in ("rounds", "twice"):
        trainer._paceline_parts = {"rounds" if what == "rounds" else "pruning": None}
    try:
        prune(trainer, **pruning_settings)
        trainer.train()
    except (PacelineError, ValueError) as error:
        return str(error)
    return None


def make_translator(head):
    """Make an encoder-decoder, which makes the inputs of its decoder from the labels that it is given."""
    torch.manual_seed(1)
    if head == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
                decoder_start_token_id=0, pad_token_id=0,
            )
        )  # fmt: skip
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=WORDS, max_position_embeddings=LENGTH, d_model=16, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0,
            pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1, forced_eos_token_id=None,
        )
    )  # fmt: skip


def heads(samples):
    """Return, of several heads and settings, how far training with nobody pruned is from training without prune()."""
    variants = {
        "sequence classification": {"head": "sequence-classification"},
        "several classes at once": {"head": "several-classes", "gradient_accumulation_steps": 2},
        "regression": {"head": "regression"},
        "label smoothing": {"label_smoothing_factor": 0.2},
        "bfloat16": {"bf16": True},
        "workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
        "accumulation": {"gradient_accumulation_steps": 4},
        "tokens of each rank": {"average_tokens_across_devices": False},
        "bart": {"head": "bart"},
        "t5": {"head": "t5", "gradient_accumulation_steps": 2},
    }
    return {name: _difference(samples=samples, **settings) for name, settings in variants.items()}


def _difference(head="causal-lm", *, samples, **settings):
    weights = []
    for pruned in (False, True):
        translated = head in ("bart", "t5")
        data = Sentences(samples, labelled=not translated and head != "causal-lm")
        model = make_translator(head) if translated else make_model(head, dropout=0.0)
        if translated:  # labels that are not the inputs: a decoder that reads the encoder's inputs learns another thing
            for item in data.items:
                item["labels"] = item["labels"].flip(0)
        elif head == "several-classes":
            model.config.problem_type = "multi_label_classification"
            for item in data.items:
                item["labels"] = torch.nn.functional.one_hot(item["labels"], 3).float()
        elif head == "regression":
            model.config.problem_type, model.config.num_labels, model.num_labels = "regression", 1, 1
            model.score = torch.nn.Linear(16, 1, bias=False)
            torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3), std=0.1)
            for item in data.items:
                item["labels"] = item["labels"].float()
        args = make_args(
            **{"num_train_epochs": 2, "train_sampling_strategy": "sequential", "max_grad_norm": 0.0, "optim": "sgd"},
            **settings,
        )
        trainer = Trainer(model, args, train_dataset=data)
        if pruned:
            prune(trainer, "info-batch", ratio=0.0)
        start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        trainer.train()
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach() - start)
    return float((weights[0] - weights[1]).norm() / weights[0].norm())

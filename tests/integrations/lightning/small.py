"""A small model and its data, the same on every run: what a rank trains on depends on its rank and its batch alone."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", module="lightning")
RANK = int(os.environ.get("RANK", "0"))


class Numbers(Dataset):
    """Samples that a linear model can learn; those of ranks differ."""

    def __init__(self, samples=64, features=16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(samples, features, generator=generator)
        self.targets = self.inputs @ torch.randn(features, 1, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Module(LightningModule):
    """A net of two layers, by momentum SGD; `seen` counts the batches that it was trained on."""

    def __init__(self, features=16, width=24, lr=0.005, momentum=0.9, norm=True):
        super().__init__()
        self.save_hyperparameters("features", "width", "lr", "momentum", "norm")
        torch.manual_seed(7 + RANK)  # ranks begin with different models: somebody must make them equal
        between = [torch.nn.BatchNorm1d(width)] if norm else []
        layers = torch.nn.Linear(features, width), *between, torch.nn.ReLU(), torch.nn.Linear(width, 1)
        self.net = torch.nn.Sequential(*layers)
        self.seen, self.digests, self.validated = 0, [], []

    def forward(self, inputs):
        return self.net(inputs)

    def loss(self, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self(inputs), targets)

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.validated.append(digest(self))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=self.hparams.momentum)


def digest(module):
    """Return the model's bits in a few letters."""
    found = hashlib.sha256()
    for tensor in module.state_dict().values():
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def loader(samples=64, batch_size=4, seed=0, shuffle=False, **options):
    return DataLoader(Numbers(samples, seed=seed), batch_size=batch_size, shuffle=shuffle, **options)


def own_loader(samples=32, batch_size=4):
    """Return a loader of this rank's own data, which Lightning must not split."""
    return loader(samples, batch_size, seed=100 + RANK)


def trainer(folder, world=2, **options):
    plain = {
        "accelerator": "cpu",
        "devices": world,
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 2,
    }
    return Trainer(**plain | options)

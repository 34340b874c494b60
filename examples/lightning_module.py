"""Lightning on ranks that do not wait for each other, or with DDP's gradients in fewer bytes: one argument more.

    python examples/lightning_module.py                     # ranks train alone, and average while they train
    python examples/lightning_module.py --part compress     # DDP, gradients encoded; --part none is plain DDP

Needs pip install 'paceline[lightning]'.
"""

import argparse
import csv

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import paceline.lightning


class Net(L.LightningModule):
    """A classifier; nothing in it knows of paceline."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.layers(inputs), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("accuracy", (self.layers(inputs).argmax(1) == targets).float().mean(), sync_dist=True)

    def on_validation_epoch_end(self):
        self.print(f"epoch {self.current_epoch}: test accuracy {self.trainer.callback_metrics['accuracy']:.3f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":  # Lightning starts this script once more, for the second rank
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=["averaging", "compress", "none"], default="averaging")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    digits, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = random_split(data, [1440, 357], generator=torch.Generator().manual_seed(0))
    strategy = paceline.lightning.Averaging("hpsgd") if options.part == "averaging" else "ddp"
    callbacks = [paceline.lightning.Compress("qsgd levels=7")] if options.part == "compress" else []
    settings = {"max_epochs": options.epochs, "logger": L.pytorch.loggers.CSVLogger("runs", name="lightning")}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = L.Trainer(devices=2, strategy=strategy, callbacks=callbacks, log_every_n_steps=5, **settings, **quiet)
    trainer.fit(Net(), DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64))
    if trainer.is_global_zero and options.part != "none":  # every logger gets our figures; this one writes a file
        with open(trainer.logger.experiment.metrics_file_path) as file:
            last = [row for row in csv.DictReader(file) if row["paceline/sent_bytes"]][-1]
        print(f"rank 0: {last['paceline/steps']} steps, {int(last['paceline/sent_bytes']) / 1e6:.2f} MB sent")

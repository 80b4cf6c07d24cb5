"""Quantities in a PyTorch Lightning training loop
================================================

Lightning calls ``backward`` for you, and that method is the place for ``with backpack(...)``.
After it, the quantities are there for the module's hooks: here a monitor logs them, and the
learning goes on as ever.
"""

# %%
# Lightning is no dependency of the library: ``pip install pytorch-lightning``.

import csv
import logging
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from backpack import backpack, extend
from backpack.extensions import BatchL2Grad, DiagGGNMC
from backpack.monitor import CSVWriter, Monitor, gradient_snr

try:
    import pytorch_lightning as pl
except ImportError:
    raise SystemExit(
        "This example needs PyTorch Lightning: pip install pytorch-lightning"
    ) from None

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)  # no report on the hardware

# %%
# The module
# ----------
#
# Model and loss are extended when they are made. ``backward`` runs the extensions, if the monitor
# is about to write. ``on_after_backward`` comes next, once the gradients are complete and before
# the optimiser uses them.


class Classifier(pl.LightningModule):
    """A network for digits that watches its gradients and its curvature."""

    def __init__(self, log_file):
        super().__init__()
        self.model = extend(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
        self.loss_function = extend(nn.CrossEntropyLoss())
        metrics = ["grad.norm", "diag_ggn_mc.sum", gradient_snr]
        self.monitor = Monitor(self.model, metrics, CSVWriter(log_file), every=5)

    def training_step(self, batch, batch_idx):
        X, y = batch
        return self.loss_function(self.model(X), y)

    def backward(self, loss):
        with backpack(*[BatchL2Grad(), DiagGGNMC()] if self.monitor.due else []):
            loss.backward()
        self.latest_loss = loss.detach()

    def on_after_backward(self):
        self.monitor.step(loss=self.latest_loss)

    def on_fit_end(self):
        self.monitor.close()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


# %%
# Training
# --------

pl.seed_everything(0, verbose=False)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)

with tempfile.TemporaryDirectory() as folder:
    log_file = Path(folder) / "log.csv"
    trainer = pl.Trainer(
        max_epochs=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(log_file), loader)
    with log_file.open(newline="") as file:
        rows = list(csv.DictReader(file))

# %%
# The file has a line for each number: the step, a tag, the value. Tags without a slash are those
# of all parameters together.

curves = {}
for row in rows:
    steps, values = curves.setdefault(row["tag"], ([], []))
    steps.append(int(row["step"]))
    values.append(float(row["value"]))
losses = curves["loss"][1]
assert curves["loss"][0] == list(range(0, 8 * len(loader), 5))
assert losses[-1] < losses[0] / 5

figure, grid = plt.subplots(2, 2, figsize=(9, 5), sharex=True, layout="constrained")
titles = {
    "loss": "Loss",
    "grad.norm": "Norm of the gradient",
    "diag_ggn_mc.sum": "Trace of the GGN",
    "gradient_snr": "Signal-to-noise ratio of the gradient",
}
for axes, (tag, title) in zip(grid.flat, titles.items(), strict=True):
    axes.plot(*curves[tag], color="#0072B2")
    axes.set_title(title, loc="left")
    axes.set_yscale("log")
    axes.grid(color="0.9")
for axes in grid[-1]:
    axes.set_xlabel("step")
plt.show()

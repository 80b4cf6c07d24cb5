"""Reference optimisers built on the extensions, with the interface of ``torch.optim``.

>>> import torch
>>> from backpack import backpack, extend
>>> from backpack.optim import KFAC
>>> model = extend(torch.nn.Linear(3, 2))
>>> lossfunc = extend(torch.nn.CrossEntropyLoss())
>>> optimizer = KFAC(model.parameters(), lr=0.1, damping=1e-2)
>>> loss = lossfunc(model(torch.rand(5, 3)), torch.tensor([0, 1, 1, 0, 1]))
>>> with backpack(*optimizer.extensions):
...     loss.backward()
>>> optimizer.step()
"""

from __future__ import annotations

from backpack.optim.checkpoints import load_checkpoint
from backpack.optim.diag_ggn import DiagGGN
from backpack.optim.dp_sgd import (
    DPSGD,
    AdaptiveClipping,
    DPOptimizer,
    PoissonBatches,
    collate_empty_too,
)
from backpack.optim.kfac import KFAC
from backpack.optim.privacy import (
    PrivacyAccountant,
    noise_multiplier_for,
    privacy_spent,
    renyi_divergence,
)
from backpack.optim.soap import SOAP

__all__ = [
    "DPSGD",
    "KFAC",
    "SOAP",
    "AdaptiveClipping",
    "DPOptimizer",
    "DiagGGN",
    "PoissonBatches",
    "PrivacyAccountant",
    "collate_empty_too",
    "load_checkpoint",
    "noise_multiplier_for",
    "privacy_spent",
    "renyi_divergence",
]

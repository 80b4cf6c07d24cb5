"""Networks that programs train: small, in float64, with samples first and a softmax last.

Each takes ``[N, ...]`` to ``[N, C]``. What a situation changes, it changes in their ``layers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backpack.custom_module.reduce_tuple import ReduceTuple

N, CLASSES = 3, 2


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, CLASSES)
    )


def wide_convolutions() -> nn.Module:
    """Gradients of the middle one take so long that its individual gradients may replace them."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.Sigmoid(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


def lstm() -> nn.Module:
    return nn.Sequential(
        nn.LSTM(2, 3, batch_first=True), ReduceTuple(0), nn.Flatten(), nn.Linear(12, CLASSES)
    )


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, CLASSES))


class Functions(nn.Module):
    """Functions between its layers, which have to be recorded or traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.second(x).relu())


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3), nn.Linear(3, CLASSES))
    model[2].weight = model[0].weight
    return model


def reused() -> nn.Module:
    layer, activation = nn.Linear(3, 3), nn.Sigmoid()
    return nn.Sequential(layer, activation, layer, activation, nn.Linear(3, CLASSES))


@dataclass(frozen=True)
class Network:
    """A network, the shape of a sample, and how it is extended."""

    name: str
    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    use_converter: Any = False
    curvature: bool = True  # whether it is small enough for it
    reorders: bool = False  # whether its gradients may be added up in another order

    def __call__(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double()

    def data(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return torch.rand(N, *self.sample, dtype=torch.float64), torch.randint(CLASSES, (N,))

    def __repr__(self) -> str:
        return self.name


NETWORKS = {
    network.name: network
    for network in (
        Network("convolutions", convolutions, (1, 6, 6)),
        Network("wide", wide_convolutions, (1, 17, 17), curvature=False, reorders=True),
        Network("lstm", lstm, (4, 2), reorders=True),
        Network("attention", attention, (3, 4)),
        Network("recorded", Functions, (3,), use_converter="record"),
        Network("traced", Functions, (3,), use_converter="trace"),
        Network("tied", tied, (3,)),
        Network("reused", reused, (3,)),
    )
}

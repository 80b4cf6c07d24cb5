"""Results of batches in files, so that an interrupted program goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backpack.linalg.order import signature
from backpack.utils.batches import tensors_of
from backpack.utils.files import load_tensors, save_tensors


class Shards:
    """Results of each batch in a file of its own, if there is a folder.

    They depend on the queries ``[Q, P]`` that training samples are compared with, and on options.
    """

    def __init__(self, folder: str | Path | None, queries: Tensor, options: str):
        """Look at the queries; read and write nothing."""
        self.folder = None if folder is None else Path(folder)
        self.signature, self.options = signature(queries.detach().flatten(1)), options
        self.number, self.device = 0, queries.device

    def _path(self) -> Path | None:
        return None if self.folder is None else self.folder / f"{self.number:06d}.safetensors"

    @staticmethod
    def _sign(data: Any) -> Tensor:
        return torch.cat([signature(x.detach().reshape(1, -1)) for x in tensors_of(data)])

    def read(self, *data: Any) -> tuple[float, dict[str, Tensor]] | None:
        """Return the results of the next batch, if they are there."""
        path = self._path()
        if path is None or not path.exists():
            return None
        tensors, metadata = load_tensors(path)
        of_data, of_queries = tensors.pop("_data"), tensors.pop("_queries")
        options = metadata["options"] == self.options
        for known, now, is_same, what in (
            (of_data, self._sign(data), True, "data"),
            (of_queries, self.signature, options, "queries, options or parameters"),
        ):
            is_same = is_same and known.shape == now.shape
            if not is_same or not torch.allclose(known.to(now), now, rtol=1e-3, atol=1e-3):
                raise ValueError(f"{path} is of other {what}. Use another folder, or remove it.")
        self.number += 1
        return float(metadata["weight"]), {n: t.to(self.device) for n, t in tensors.items()}

    def write(self, data: Any, weight: float, found: Mapping[str, Tensor]) -> None:
        """Keep the results of the next batch."""
        path = self._path()
        if path is not None:
            own = {**found, "_data": self._sign(data), "_queries": self.signature}
            save_tensors(path, own, {"weight": repr(weight), "options": self.options})
        self.number += 1

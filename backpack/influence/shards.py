"""Results of batches in files, so that an interrupted program goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backpack.distributed.agreement import digest
from backpack.linalg.order import rows_of, signature
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

    def read(self, *data: Any) -> tuple[float, dict[str, Tensor]] | None:
        """Return the results of the next batch, if they are there.

        Raises:
            ValueError: If they are those of something else.
        """
        path = self._path()
        if path is None or not path.exists():
            return None
        tensors, metadata = load_tensors(path)
        of_data = _is_same(tensors.pop("_data"), _rows(data))
        of_queries = _is_same(tensors.pop("_queries"), self.signature)
        for is_same, what in (
            (of_data and metadata.get("digest") == _digest(data), "data"),
            (of_queries and metadata["options"] == self.options, "queries, options or parameters"),
        ):
            if not is_same:
                raise ValueError(f"{path} is of other {what}. Use another folder, or remove it.")
        self.number += 1
        return float(metadata["weight"]), {n: t.to(self.device) for n, t in tensors.items()}

    def write(self, data: Any, weight: float, found: Mapping[str, Tensor]) -> None:
        """Keep the results of the next batch."""
        path = self._path()
        if path is not None:
            own = {**found, "_data": _rows(data), "_queries": self.signature}
            known = {"weight": repr(weight), "options": self.options, "digest": _digest(data)}
            save_tensors(path, own, known)
        self.number += 1


def _rows(data: Any) -> Tensor:
    """Return what tells the rows of all tensors from others, up to rounding: ``[R, 3]``."""
    return torch.cat([signature(rows_of(x.detach())) for x in tensors_of(data)])


def _digest(data: Any) -> str:
    """Return what tells labels, tokens and masks from others: they have no rounding."""
    whole = (x for x in tensors_of(data) if not (x.is_floating_point() or x.is_complex()))
    return " ".join(map(digest, whole))


def _is_same(known: Tensor, now: Tensor) -> bool:
    """Whether signatures ``[R, 3]`` are of the same rows, up to rounding and whatever the scale."""
    if known.shape != now.shape:
        return False
    known = known.to(now)
    of_unit_rows = torch.allclose(known[:, 2], now[:, 2], rtol=0, atol=1e-3)
    return of_unit_rows and torch.allclose(known[:, :2], now[:, :2], rtol=1e-3, atol=0)

"""Whether data are the same in each pass, and in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from backpack.utils.batches import tensors_of

ALWAYS_SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class SeenBatches:
    """What the first pass has seen of each batch, to compare later passes with."""

    def __init__(self) -> None:
        self._known: list[tuple[object, Tensor]] = []
        self._is_complete = False

    def is_same(self, number: int, sizes: object, values: Tensor, rtol: float, atol: float) -> bool:
        """Say whether a batch is what it was: equal sizes, close values; what is new is kept."""
        if number == len(self._known) and not self._is_complete:
            self._known.append((sizes, values))
        if number >= len(self._known):
            return False
        known, before = self._known[number]
        return known == sizes and torch.allclose(values, before, rtol, atol, equal_nan=True)

    def is_end(self, number: int) -> bool:
        """Say whether a pass ends where the first one did."""
        self._is_complete = True
        return number == len(self._known)


class SameInEachPass:
    """Data that are an error where a pass has other batches than the first, or another order.

    Compared are one number and the norm of some entries of each row of each tensor. Everything else
    is up to the data that are given.

    Args:
        what: Who needs the order, for messages.
        data: Batches.
        entries: How many entries of a row are looked at, about: more than that, and less than
            twice as many.
    """

    def __init__(self, what: str, data: Iterable[Any], entries: int = 4096):
        self.what, self.data, self.entries = what, data, entries
        self._seen = SeenBatches()

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            RuntimeError: If they are others than in the first pass.
        """
        number = 0
        for batch in self.data:
            leaves = [x for x in tensors_of(batch) if _has_rows(x)]
            shapes = [x.shape for x in leaves]
            each = [_compared(rows_of(x.detach()), self.entries) for x in leaves]
            values = torch.cat(each) if each else torch.empty(0)
            if not self._seen.is_same(number, shapes, values, 0.0, 1e-4):
                raise self._changed(f"batch {number} is another one")
            yield batch
            number += 1
        if not self._seen.is_end(number):
            raise self._changed(f"there are {number} batches, not as many as")

    def _changed(self, how: str) -> RuntimeError:
        return RuntimeError(
            f"{self.what} needs the same samples in the same order in each pass over the data, but "
            f"{how} than in the first pass. Do not shuffle (shuffle=False), nor change samples at "
            "random (augmentation)."
        )

    def __len__(self) -> int:
        """Return the number of batches, if the data know it."""
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        """Return what the data have there."""
        return self.data[index]  # type: ignore[index]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the data."""
        if name == "data" or name.startswith("__"):  # not there yet while it is unpickled
            raise AttributeError(name)
        return getattr(self.data, name)


def _has_rows(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested


def rows_of(x: Tensor) -> Tensor:
    """Return rows along the first axis, ``[R, P]``: one of a number."""
    count = x.shape[0] if x.dim() else 1
    return x.reshape(count, x.numel() // max(count, 1))


def _compared(rows: Tensor, entries: int) -> Tensor:
    """Return what rows ``[R, P]`` are compared by, of some entries: images have more."""
    _, norms, projected = signature(rows[:, :: max(1, rows.shape[1] // entries)]).T
    # of norms the logarithm: what counts is their ratio, whatever the unit of the data
    return torch.cat([norms.clamp(min=1e-300).log(), projected])


def signature(rows: Tensor) -> Tensor:
    """Return what tells rows ``[R, P]`` from others: size, length, a projection of unit rows."""
    wide = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    wide = wide.cpu().double()
    norms = wide.norm(dim=1)
    projected = wide @ _direction(wide.shape[1]) / norms.clamp(min=1e-300)
    return torch.stack([torch.full_like(norms, wide.shape[1]), norms, projected], 1)


@lru_cache(maxsize=16)
def _direction(size: int) -> Tensor:
    """Return a random vector, the same in each process: ``[size]``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, generator=generator, device=generator.device).double()


def check_not_shuffled(what: str, data: Iterable[Any], between_passes: bool = False) -> None:
    """Refuse a ``DataLoader`` that draws the order of the samples.

    With ``between_passes``, only one whose order is another in each pass: that of a
    ``DistributedSampler`` is not.

    Raises:
        ValueError: If its sampler is random.
    """
    if not isinstance(data, DataLoader):
        return
    found: list[Any] = [data.batch_sampler, data.sampler]
    while found:
        sampler = found.pop()
        spread = isinstance(sampler, DistributedSampler) and sampler.shuffle and not between_passes
        if spread or isinstance(sampler, ALWAYS_SHUFFLED):
            owner = "DistributedSampler" if spread else "DataLoader"
            raise ValueError(
                f"{what} by their place in the data, but {type(sampler).__name__} shuffles them: "
                f"the numbers would mean nothing. Pass a {owner}(..., shuffle=False)."
            )
        inner = getattr(sampler, "sampler", None)  # of a batch sampler
        found += [] if inner is None or inner is sampler else [inner]

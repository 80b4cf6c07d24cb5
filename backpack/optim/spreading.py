"""Work that several processes would do alike, spread over them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from backpack.distributed.data_group import DataGroup


class Spread:
    """Which processes decompose the factors of which parameters, and solve with them.

    Each parameter has one process that decomposes its factors, and sends the eigenvectors to the
    other *workers* of the parameter; each of these solves, and sends the result to a process of
    every other team. With W workers for each, all solve, and results are not sent; with one,
    eigenvectors are not sent, and each process holds those of its own parameters alone.

    Source: Pauloski, Huang, Huang, Venkataraman, Chard, Foster, Zhang, KAISA: an adaptive
    second-order optimizer framework for deep neural networks (SC 2021).

    Attributes:
        group: All W processes.
    """

    def __init__(self, group: ProcessGroup, fraction: float):
        """Divide the processes into teams: all of them have to do so.

        Args:
            group: The W processes.
            fraction: The part of them that solves for a parameter, from 1 / W to 1.

        Raises:
            ValueError: If the fraction of W is no number of processes that divides W.
        """
        size, rank = group.size(), group.rank()
        workers = round(fraction * size)
        if not workers or abs(workers - fraction * size) > 1e-6 or size % workers:
            possible = ", ".join(f"{k}/{size}" for k in range(1, size + 1) if size % k == 0)
            raise ValueError(
                f"worker_fraction of {size} processes is one of {possible}, so that teams are "
                f"equal, got {fraction}."
            )
        self.group = DataGroup(group)
        self._workers, self._rank = workers, rank
        ranks = distributed.get_process_group_ranks(group)
        first = rank - rank % workers
        self._team = _subgroup(group, ranks[first : first + workers])
        self._peers = _subgroup(group, ranks[rank % workers :: workers])
        self._owners: dict[Tensor, int] = {}
        self._loads = [0.0] * size

    def place(self, params: Sequence[Tensor]) -> None:
        """Decide which process decomposes the factors of parameters that are new: greedily."""
        new = [p for p in params if p not in self._owners]
        for p in sorted(new, key=_cost, reverse=True):
            owner = self._loads.index(min(self._loads))
            self._owners[p] = owner
            self._loads[owner] += _cost(p)

    @property
    def sends_results(self) -> bool:
        """Whether there are processes that do not solve."""
        return self._peers is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> Spread:
        """Copy what belongs to parameters; the processes stay the same."""
        other = copy(self)
        other._owners, other._loads = deepcopy(self._owners, memo), list(self._loads)
        return other

    def decomposes(self, p: Tensor) -> bool:
        """Whether this process decomposes the factors of a parameter."""
        return self._owners[p] == self._rank

    def solves(self, p: Tensor) -> bool:
        """Whether this process is a worker of a parameter."""
        return self._owners[p] // self._workers == self._rank // self._workers

    def share(
        self, p: Tensor, own: Sequence[Tensor] | None, like: Sequence[Tensor]
    ) -> list[Tensor]:
        """Send what belongs to the decomposition of a parameter (None elsewhere) to its workers."""
        if own is not None:
            flat = torch.cat([tensor.reshape(-1) for tensor in own])
        else:
            flat = like[0].new_empty(sum(tensor.numel() for tensor in like))
        if self._team is not None:
            source = self._owners[p] % self._workers
            distributed.broadcast(flat, group=self._team, group_src=source)
        pieces = flat.split([tensor.numel() for tensor in like])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]

    def spread(self, p: Tensor, direction: Tensor | None, like: Tensor) -> Tensor:
        """Send the result of the workers of a parameter (None elsewhere) to all."""
        found = torch.empty_like(like) if direction is None else direction.contiguous()
        if self._peers is not None:
            source = self._owners[p] // self._workers
            distributed.broadcast(found, group=self._peers, group_src=source)
        return found


def _cost(p: Any) -> float:
    """Return about how many operations eigendecompositions for a parameter take."""
    return sum(d**3 for d in (p.shape[0], prod(p.shape[1:])) if p.dim())


# Parts of groups, by their ranks: torch keeps a group until all are destroyed, so those that are
# there are used again.
_PARTS: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def _subgroup(group: ProcessGroup, ranks: Sequence[int]) -> Any:
    """Return the group of some processes, which call this at the same time; None for one alone."""
    if len(ranks) == 1:
        return None
    parts = _PARTS.setdefault(group, {})
    if tuple(ranks) not in parts:
        parts[tuple(ranks)] = distributed.new_group(
            list(ranks), backend=distributed.get_backend(group), use_local_synchronization=True
        )
    return parts[tuple(ranks)]

"""Reads the state of optimisers that ``torch.distributed.checkpoint`` has written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from backpack.distributed.checkpoints import like_entry, read_state
from backpack.distributed.shards import is_sharded
from backpack.optim.base import ExtensionOptimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader


# What optimisers, those of torch included, keep with the shape of a parameter.
LIKE_PARAMETERS = frozenset(
    {"exp_avg", "exp_avg_sq", "gradient", "max_exp_avg_sq", "momentum_buffer", "square_avg"}
)


def load_checkpoint(
    optimizer: Optimizer,
    checkpoint_id: str | PathLike[str] | None = None,
    key: str = "optimizer",
    storage_reader: StorageReader | None = None,
) -> None:
    """Load what ``checkpoint.save({key: optimizer.state_dict(), ...})`` has written.

    On any number of processes, sharded or not, whatever it was before: all of them have to call
    this, and each reads what it needs. ``torch.distributed.checkpoint.load`` reads into a state
    that is there already, and a new optimiser has none.

    Args:
        optimizer: One with the same parameters, in the same groups: of ``backpack.optim``, or of
            ``torch.optim``.
        checkpoint_id: The folder.
        key: Under which the state was saved.
        storage_reader: Reads from elsewhere, in the place of a folder.

    Raises:
        ValueError: If there is no such state, or it is of other parameters.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = read_state(key, checkpoint_id, storage_reader, partial(_place, optimizer, params))
    state["state"] = {int(number): values for number, values in state.get("state", {}).items()}
    optimizer.load_state_dict(state)


def _place(
    optimizer: Optimizer, params: Sequence[Tensor], name: str, way: Sequence[Any], entry: Any
) -> tuple[Any] | None:
    """Return where an entry of the state is read to; None if this process does not need it.

    ``way`` are the keys that lead to it, such as ``("state", "0", "gradient")``.

    Raises:
        ValueError: If it is that of another parameter.
    """
    if way[0] != "state" or len(way) < 3:
        return (like_entry(entry, torch.device("cpu")),)
    number, attribute = int(way[1]), way[2]
    if number >= len(params):
        raise ValueError(
            f"The checkpoint has {name}, but the optimiser has {len(params)} parameters."
        )
    p = params[number]
    if isinstance(optimizer, ExtensionOptimizer) and not optimizer.needs_state(p, attribute):
        return None
    is_like = attribute in (*getattr(optimizer, "like_parameters", ()), *LIKE_PARAMETERS)
    size = getattr(entry, "size", ())
    if len(size) and (is_like or (len(way) == 3 and size == p.shape)):
        if size != p.shape:
            raise ValueError(
                f"The checkpoint has {name} of shape {list(size)}, but the parameter has "
                f"{list(p.shape)}: give the same parameters, in the same order."
            )
        if is_sharded(p):
            return (torch.empty_like(p, dtype=entry.properties.dtype),)
    return (like_entry(entry, p.device),)

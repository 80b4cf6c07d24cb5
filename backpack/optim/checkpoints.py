"""Reads the state of optimisers that ``torch.distributed.checkpoint`` has written."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from backpack.distributed.shards import is_sharded

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
    from torch.distributed import checkpoint  # takes long to import

    if storage_reader is None:
        if checkpoint_id is None:
            raise ValueError("load_checkpoint needs a checkpoint_id (a folder) or storage_reader.")
        storage_reader = checkpoint.FileSystemReader(checkpoint_id)
    metadata = storage_reader.read_metadata()
    entries, ways = metadata.state_dict_metadata, metadata.planner_data or {}
    own = {name: way[1:] for name, way in ways.items() if way[0] == key}
    if not own:
        known = ", ".join(dict.fromkeys(str(way[0]) for way in ways.values()))
        raise ValueError(f"The checkpoint has no state {key!r}, but {known or 'nothing'}.")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found: dict[str, Any] = {}
    for name, way in own.items():
        place = _place(optimizer, params, name, way, entries[name])
        if place is not None:
            found[name] = place[0]
    checkpoint.load(found, storage_reader=storage_reader)
    state: dict[str, Any] = {}
    for name, value in found.items():
        node: dict[Any, Any] = state
        *above, last = own[name]
        for step in above:
            node = node.setdefault(step, {})
        node[last] = value
    state = _with_lists(state)
    state["state"] = {int(number): values for number, values in state.get("state", {}).items()}
    optimizer.load_state_dict(state)


def _place(
    optimizer: Optimizer, params: Sequence[Tensor], name: str, way: Sequence[Any], entry: Any
) -> tuple[Any] | None:
    """Return where an entry of the state is read to; None if this process does not need it.

    Args:
        optimizer: The optimiser.
        params: All of its parameters.
        name: The entry, for an error.
        way: The keys that lead to it, such as ``("state", "0", "gradient")``.
        entry: What the checkpoint says about it.

    Raises:
        ValueError: If it is that of another parameter.
    """
    if way[0] != "state" or len(way) < 3:
        return (_like(entry, torch.device("cpu")),)
    number, attribute = int(way[1]), way[2]
    if number >= len(params):
        raise ValueError(
            f"The checkpoint has {name}, but the optimiser has {len(params)} parameters."
        )
    p = params[number]
    if not getattr(optimizer, "needs_state", _needs_all)(p, attribute):
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
    return (_like(entry, p.device),)


def _like(entry: Any, device: torch.device) -> Tensor | None:
    """Return a tensor to read an entry to; None if it is something else."""
    if not hasattr(entry, "size"):
        return None
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def _needs_all(p: Tensor, attribute: str) -> bool:
    return True


def _with_lists(node: Any) -> Any:
    """Turn dictionaries whose keys are numbers into lists."""
    if not isinstance(node, dict):
        return node
    values = {key: _with_lists(value) for key, value in node.items()}
    is_list = values and all(isinstance(key, int) for key in values)
    return [values[i] for i in sorted(values)] if is_list else values

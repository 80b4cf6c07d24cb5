"""Reads states that ``torch.distributed.checkpoint`` has written, where there are none yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader

# Says where an entry is read to, None if it is not needed; from its name, the keys that lead to it,
# and what the checkpoint says about it.
Place = Callable[[str, Sequence[Any], Any], tuple[Any] | None]


def read_state(
    key: str,
    checkpoint_id: str | PathLike[str] | None,
    storage_reader: StorageReader | None,
    place: Place,
) -> dict[str, Any]:
    """Read what was saved under a key, in a folder or what a reader knows.

    Raises:
        ValueError: If nothing was saved under that key.
    """
    from torch.distributed import checkpoint  # takes long to import

    if storage_reader is None:
        if checkpoint_id is None:
            raise ValueError("Give a checkpoint_id (a folder), or a storage_reader.")
        storage_reader = checkpoint.FileSystemReader(checkpoint_id)
    metadata = storage_reader.read_metadata()
    entries, paths = metadata.state_dict_metadata, metadata.planner_data or {}
    own = {name: path[1:] for name, path in paths.items() if path[0] == key}
    if not own:
        known = ", ".join(dict.fromkeys(str(path[0]) for path in paths.values()))
        raise ValueError(f"The checkpoint has no state {key!r}, but {known or 'nothing'}.")
    found: dict[str, Any] = {}
    for name, path in own.items():
        target = place(name, path, entries[name])
        if target is not None:
            found[name] = target[0]
    checkpoint.load(found, storage_reader=storage_reader)
    state: dict[str, Any] = {}
    for name, value in found.items():
        node: dict[Any, Any] = state
        *above, last = own[name]
        for step in above:
            node = node.setdefault(step, {})
        node[last] = value
    return _with_lists(state)


def like_entry(entry: Any, device: torch.device) -> Tensor | None:
    """Return a tensor to read an entry to; None if it is something else."""
    if not hasattr(entry, "size"):
        return None
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def _with_lists(node: Any) -> Any:
    """Turn dictionaries whose keys are numbers into lists."""
    if not isinstance(node, dict):
        return node
    values = {key: _with_lists(value) for key, value in node.items()}
    is_list = values and all(isinstance(key, int) for key in values)
    return [values[i] for i in sorted(values)] if is_list else values

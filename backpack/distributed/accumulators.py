"""What ``accumulate=True`` has added up so far, to save it and to go on in another program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.engine import results
from backpack.core.engine.combining import are_several, options_of
from backpack.core.engine.extracted import OVER_PARTS
from backpack.core.engine.statistics import JOINED, Loaded, OfProducts
from backpack.distributed.checkpoints import like_entry, read_state
from backpack.distributed.shards import is_sharded, own_part, whole

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader

SAMPLES_APART = (
    "{} of {} has an axis of the samples of each process: on several processes, that cannot be "
    "saved or loaded. Leave its extension out of what accumulates."
)


def accumulated_state(model: Module) -> dict[str, Any]:
    """Return what ``backpack(..., accumulate=True)`` has added up so far, ready to be saved.

    With ``torch.save``, or as a part of what ``torch.distributed.checkpoint.save`` writes. What is
    sharded as its parameter is a ``DTensor``; all else is the same on all processes. Results are
    not changed. ``p.grad`` is no part of it.

    Args:
        model: The model.

    Returns:
        For each parameter that has some, by name: tensors and numbers, in dictionaries.

    Raises:
        NotImplementedError: For what cannot be saved: results with an axis of samples, and what a
            process has added up on its own (``no_sync()``, ``process_group=None``), if there are
            several; products with blocks; results of rules for one extension.
    """
    found: dict[str, Any] = {}
    names: dict[Parameter | None, str] = {p: name for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        states = {id(state): state for state in results.all_accumulated(p)}
        for state in states.values():
            of_exts = _exported(name, state, names)
            found.setdefault(name, {})["+".join(of_exts["savefields"])] = of_exts
    return found


def _exported(name: str, state: Any, names: Mapping[Parameter | None, str]) -> dict[str, Any]:
    """Return what extensions have accumulated at one parameter."""
    if isinstance(state, Loaded):
        return state.state
    joined, local = state.joined, state.local
    if local is not None and are_several():
        raise NotImplementedError(
            f"{name} has quantities that this process alone has accumulated (no_sync(), or "
            "process_group=None). Save after a backward pass that averages gradients."
        )
    total = local if joined is None else joined if local is None else joined.plus(local)
    savefields = [ext.savefield for ext in total.exts]
    if not isinstance(total, OfProducts):
        raise NotImplementedError(
            f"{', '.join(savefields)} of {name} cannot be saved while it accumulates: it is a "
            "product with a block, or made by a rule for this extension alone."
        )
    if are_several():
        _check_no_samples(name, total.values)
    partner = None if JOINED.isdisjoint(total.values) else total.products.partner
    return {
        "savefields": savefields,
        "options": options_of(total.exts),
        "partner": names.get(partner, ""),
        "values": dict(total.values),
        "numbers": {key or "samples": count for key, count in total.numbers.items()},
    }


def _check_no_samples(name: str, values: Mapping[str, Any]) -> None:
    for key in values:
        if OVER_PARTS[key].sample_axis is not None:
            raise NotImplementedError(SAMPLES_APART.format(key, name))


def load_accumulated_state(model: Module, state: Mapping[str, Any]) -> None:
    """Go on with what :func:`accumulated_state` has returned.

    The next backward pass in ``backpack(..., accumulate=True)`` adds to it, and has to be one with
    the same extensions. Results are there after that pass.

    Args:
        model: A model with the same parameters, sharded or not, on any number of processes; all
            call this with the same state.
        state: The state.

    Raises:
        ValueError: If the model has no parameter of a name, or one of another shape.
        NotImplementedError: If there are several processes, and a result has an axis of samples.
    """
    own = dict(model.named_parameters())
    for name in state:
        if name not in own:
            raise ValueError(f"The state has quantities of {name}, which the model has not.")
    for name, of_parameter in state.items():
        for of_exts in of_parameter.values():
            if are_several():
                _check_no_samples(name, of_exts["values"])
            values = {
                key: _placed(name, key, value, own[name])
                for key, value in of_exts["values"].items()
            }
            partner = own.get(of_exts["partner"])
            loaded = Loaded(name, {**of_exts, "values": values}, partner)
            for savefield in of_exts["savefields"]:
                results.start_accumulated(own[name], savefield, loaded)


def _placed(name: str, key: str, value: Any, p: Tensor) -> Any:
    """Return a value as the parameter is placed, if it has its shape."""
    if not _is_like(key, value, p):
        return value
    value = value.detach() if is_sharded(value) == is_sharded(p) else whole(value)
    if value.shape != p.shape:
        raise ValueError(
            f"The state has {key} of {name} of shape {list(value.shape)}, but the parameter has "
            f"{list(p.shape)}."
        )
    return own_part(value, p) if is_sharded(p) and not is_sharded(value) else value


def _is_like(key: str, value: Any, p: Tensor) -> bool:
    """Whether a value is summed over samples and has the shape of the parameter."""
    rule = OVER_PARTS[key]
    return rule.sample_axis is None and not rule.is_symmetric and isinstance(value, Tensor)


def load_accumulated_checkpoint(
    model: Module,
    checkpoint_id: str | PathLike[str] | None = None,
    key: str = "accumulated",
    storage_reader: StorageReader | None = None,
) -> None:
    """Load what ``checkpoint.save({key: accumulated_state(model), ...})`` has written.

    On any number of processes, sharded or not, whatever it was before: all of them have to call
    this.

    Args:
        model: As for :func:`load_accumulated_state`.
        checkpoint_id: The folder.
        key: Under which the state was saved.
        storage_reader: Reads from elsewhere, in the place of a folder.

    Raises:
        ValueError: If there is no such state, or as for :func:`load_accumulated_state`.
        NotImplementedError: The same.
    """
    own = dict(model.named_parameters())

    def place(name: str, path: Sequence[Any], entry: Any) -> tuple[Any]:
        p = own.get(path[0])
        if p is None or path[2] != "values":
            return (like_entry(entry, torch.device("cpu")),)
        rule = OVER_PARTS[path[3]]
        is_like = rule.sample_axis is None and not rule.is_symmetric
        if is_like and is_sharded(p) and getattr(entry, "size", None) == p.shape:
            return (torch.empty_like(p, dtype=entry.properties.dtype),)
        return (like_entry(entry, p.device),)

    load_accumulated_state(model, read_state(key, checkpoint_id, storage_reader, place))

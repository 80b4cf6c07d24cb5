"""Results are attributes of parameters: which ones, how to collect them, and how to remove them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor
from torch.nn import Module, Parameter


class Beside(NamedTuple):
    """The ``p.grad`` that a result belongs to: that of the time when the result was saved.

    Attributes:
        value: The result.
        grad: The gradient; None if there was none.
        version: Counts its changes in place.
    """

    value: ref[Tensor]
    grad: ref[Tensor] | None
    version: int


class Attributes(dict[str, Any]):
    """The attributes of a parameter (its ``__dict__``), with a note of which are results.

    PyTorch pickles all attributes of a parameter. Results are left out.

    Attributes:
        results: Names of results, in the order in which they were saved first, each with the
            gradient that it belongs to, if that was noted.
        accumulated: What the results are made of that accumulate over backward passes.
        processes: For how many processes the results were averaged, if for several.
    """

    __slots__ = ("accumulated", "processes", "results")

    def __init__(self, attributes: dict[str, Any]):
        """Take over attributes that are no results."""
        super().__init__(attributes)
        self.results: dict[str, Beside | None] = {}
        self.accumulated: dict[str, Any] = {}
        self.processes: dict[str, int] = {}

    def others(self) -> dict[str, Any]:
        """Return the attributes that are no results."""
        return {name: value for name, value in self.items() if name not in self.results}

    def __reduce__(self) -> Any:
        """Pickle the attributes without results, as if there were none."""
        return OrderedDict, (self.others(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attributes:
        """Copy everything."""
        result = Attributes(copy.deepcopy(dict(self), memo))
        result.results = self.results.copy()
        result.processes = self.processes.copy()
        return result


def save(p: Parameter, name: str, value: Any) -> None:
    """Make a result an attribute of a parameter."""
    if not isinstance(vars(p), Attributes):
        p.__dict__ = Attributes(vars(p))
    vars(p).results[name] = None  # type: ignore[attr-defined]
    vars(p).accumulated.pop(name, None)  # type: ignore[attr-defined]
    vars(p).processes.pop(name, None)  # type: ignore[attr-defined]
    setattr(p, name, value)


def note_processes(p: Parameter, name: str, count: int) -> None:
    """Note that a result belongs to a gradient that is averaged over several processes."""
    own = vars(p)
    if isinstance(own, Attributes) and name in own.results:
        own.processes[name] = count


def num_processes(p: Tensor, name: str) -> int:
    """Return for how many processes a result was averaged."""
    own = vars(p)
    return own.processes.get(name, 1) if isinstance(own, Attributes) else 1


def accumulate(p: Parameter, name: str, state: Any) -> None:
    """Note what a result is made of, to which the next backward pass may add."""
    own = vars(p)
    if isinstance(own, Attributes) and name in own.results:
        own.accumulated[name] = state


def accumulated(p: Parameter, name: str) -> Any:
    """Return what a result is made of, if it accumulates."""
    own = vars(p)
    return own.accumulated.get(name) if isinstance(own, Attributes) else None


def note_gradient(p: Parameter, name: str) -> None:
    """Note that a result belongs to the gradient that a parameter has now."""
    value, grad = getattr(p, name, None), p.grad
    if isinstance(value, Tensor) and isinstance(vars(p), Attributes):
        beside = (None, 0) if grad is None else (ref(grad), grad._version)
        vars(p).results[name] = Beside(ref(value), *beside)  # type: ignore[attr-defined]


def has_other_gradient(p: Parameter, name: str) -> bool:
    """Whether a parameter has another gradient than when a result was saved, if that was noted."""
    own = vars(p)
    beside = own.results.get(name) if isinstance(own, Attributes) else None
    if beside is None or beside.value() is not own.get(name):
        return False
    grad = p.grad
    if beside.grad is None or grad is None:
        return beside.grad is not grad
    return beside.grad() is not grad or beside.version != grad._version


def saved(p: Tensor) -> dict[str, Any]:
    """Return the results that a parameter has now."""
    own = vars(p)
    names = own.results if isinstance(own, Attributes) else ()
    return {name: own[name] for name in names if name in own}


def quantities(model: Module, *names: str) -> dict[str, Tensor]:
    """Collect the results of all parameters of a model, such as for ``safetensors``.

    Results that are functions, such as those of ``GGNMP``, or factors, are left out. So are
    parameters without the result.

    Args:
        model: Any module.
        *names: Savefields. Default: all that there are.

    Returns:
        Contiguous tensors without a graph. For one savefield, a tensor has the name of its
        parameter in ``model.named_parameters()`` (``"0.weight"``); for several, or all, with the
        savefield behind it (``"0.weight.grad_batch"``). Factors of a list are numbered:
        ``"0.weight.0"``, ``"0.weight.kfac.0"``.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If no parameter has results of one of the names.
    """
    if not isinstance(model, Module):
        raise TypeError(
            f"quantities expects a model, got {type(model).__name__}. For a single parameter, use "
            "backpack.results_of(p)."
        )
    found = {key: saved(p) for key, p in model.named_parameters()}
    known = dict.fromkeys(name for results in found.values() for name in results)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"No parameter of {type(model).__name__} has results named "
            f"{', '.join(map(str, unknown))}: there are {', '.join(known) or 'none'}. Call "
            "backward() inside `with backpack(...)` first, and give savefields, such as "
            "'grad_batch'."
        )
    tensors: dict[str, Tensor] = {}
    for key, results in found.items():
        for name in names or results:
            value = results.get(name)
            whole = key if len(names) == 1 else f"{key}.{name}"
            if isinstance(value, list | tuple):
                parts = {f"{whole}.{i}": part for i, part in enumerate(value)}
            else:
                parts = {whole: value}
            for label, part in parts.items():
                if isinstance(part, Tensor):
                    tensors[label] = part.detach().contiguous()
    return tensors


def clear(model: Module) -> None:
    """Remove the results from all parameters of a model.

    What forward passes have stored is kept: :func:`backpack.memory_cleanup` drops that.

    Args:
        model: Any module.
    """
    for p in model.parameters():
        own = vars(p)
        if isinstance(own, Attributes):
            p.__dict__ = own.others()

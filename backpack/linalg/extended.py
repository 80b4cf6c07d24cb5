"""Extends a model for a moment, and leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from threading import RLock
from typing import Any, Literal

from torch.nn import Module, Parameter

from backpack import extend
from backpack.convert.recording import is_recorded
from backpack.core.record.registry import derivatives_of
from backpack.custom_module.converted_module import ConvertedModule
from backpack.linalg.operators import LinearOperator

UseConverter = bool | Literal["trace", "record"]

# Where torch keeps the hooks of a module.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
# Attributes that extending a module sets, beside those that are called `_backpack…`.
OTHERS = ("_call_impl", "__prepare_scriptable__")


# One thread at a time computes with a model or a loss that was extended for a moment.
ALONE = RLock()
# Those that are extended now: by how many, and what they were before.
_uses: dict[Module, list[Any]] = {}


@contextmanager
def extended(module: Module, use_converter: UseConverter = "record") -> Iterator[Module]:
    """Extend a model or a loss as :func:`left_extended`, and let other threads wait."""
    with ALONE, left_extended(module, use_converter) as ready:
        yield ready


@contextmanager
def left_extended(module: Module, use_converter: UseConverter = "record") -> Iterator[Module]:
    """Yield what :func:`backpack.extend` makes of a model or a loss, and undo that in the end.

    A model that was extended with a converter stays as it is, and one that has a rule itself needs
    none. Other threads may extend it meanwhile: the last of all undoes it.
    """
    children = list(module.modules())
    with ALONE:
        for child in children:
            _uses.setdefault(child, [0, *_state(child)])[0] += 1
    try:
        with ALONE:
            known = isinstance(module, ConvertedModule) or is_recorded(module)
            how: Any = not known and derivatives_of(module) is None and use_converter
            ready = extend(module, use_converter=how)
        yield ready
    finally:
        with ALONE:
            for child in children:
                _uses[child][0] -= 1
                if not _uses[child][0]:
                    _restore(child, *_uses.pop(child)[1:])


def built(
    curvature: Any,
    model: Module,
    loss_function: Module,
    data: Iterable[Any],
    params: Iterable[Parameter],
    use_converter: UseConverter,
    progress: bool,
    process_group: Any,
) -> Any:
    """Build an operator of a class, or take one of a loss with the same reduction.

    Classes that do not extend the model need no ``use_converter``; if there is a ``process_group``,
    they have to take that.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is of another reduction, where it knows that, or does not sum over
            processes, and there are several.
    """
    if isinstance(curvature, LinearOperator):
        check_same_scale(curvature, loss_function)
        return curvature
    if not callable(curvature):
        raise TypeError(
            f"curvature is an operator or a class of them, such as KroneckerGGN, got {curvature!r}."
        )
    # False is the default of those who call; it leaves what partial(...) has chosen
    takes = use_converter and "use_converter" in signature(curvature).parameters
    options: dict[str, Any] = {"use_converter": use_converter} if takes else {}
    if "process_group" in signature(curvature).parameters:
        options["process_group"] = process_group
    elif process_group is not None:
        raise ValueError(
            f"{curvature!r} does not take a process_group, so that it would be the curvature of "
            "the data of one process. Give an operator that sums over the processes."
        )
    made = curvature(model, loss_function, data, params=params, progress=progress, **options)
    check_same_scale(made, loss_function)
    return made


def check_same_scale(curvature: Any, loss_function: Module) -> None:
    """Refuse an operator that is known to be of a loss with another reduction.

    Raises:
        ValueError: If it is.
    """
    known = getattr(curvature, "of_loss", None)
    own = getattr(loss_function, "reduction", None)
    if known is not None and known[1] != own:
        raise ValueError(
            f"{curvature!r} is the curvature of a loss with reduction={known[1]!r}, but "
            f"{type(loss_function).__name__} here has reduction={own!r}: the scale would be wrong. "
            "Build both with the same loss."
        )


def _is_ours(name: str) -> bool:
    return name.startswith("_backpack") or name in OTHERS


def _state(module: Module) -> tuple[dict[str, Any], dict[str, set[int]]]:
    """Return what may change: attributes, and which hooks there are."""
    own = vars(module)
    attributes = {name: value for name, value in own.items() if _is_ours(name)}
    return attributes, {name: set(own.get(name, ())) for name in HOOKS}


def _restore(module: Module, attributes: dict[str, Any], hooks: dict[str, set[int]]) -> None:
    own = vars(module)
    for name in [name for name in own if _is_ours(name) and name not in attributes]:
        del own[name]
    own.update(attributes)
    for name, known in hooks.items():
        for key in [key for key in own.get(name, ()) if key not in known]:
            del own[name][key]

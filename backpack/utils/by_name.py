"""Numbers that belong to parameters, given by the names of parameters and modules.

>>> from backpack.utils.by_name import by_parameter
>>> by_parameter({"": 1.0, "2": 3.0}, ["0.weight", "0.bias", "2.weight"], "damping")
[1.0, 1.0, 3.0]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ByName = float | Tensor | Mapping[str, float] | Sequence[float]
# values of weights: one for all of a parameter, or a tensor of its shape
ValuesByName = float | Tensor | Mapping[str, float | Tensor] | Sequence[float | Tensor]


def by_parameter(given: ByName, names: Sequence[str], what: str) -> list[float]:
    """Return a positive number for each parameter.

    Args:
        given: One for all; or one for each; or by the names of parameters and of modules, which
            stand for all parameters inside. The longest name counts, ``""`` is the whole model.
        names: Names of the parameters.
        what: Names the numbers in messages.

    Raises:
        ValueError: If one is missing or not positive, or a name is not that of a parameter or
            module.
    """
    return [positive(value, what) for value in _of_parameters(given, names, what)]


def tensor_by_parameter(given: ByName, names: Sequence[str], what: str, like: Tensor) -> Tensor:
    """Return :func:`by_parameter` as a tensor: a function of the tensors that are given.

    Returns:
        ``[number of parameters]``, of the precision and on the device of ``like``.

    Raises:
        ValueError: As for :func:`by_parameter`.
    """
    values = _of_parameters(given, names, what)
    numbers = like.new_tensor([positive(value, what) for value in values])
    if not any(isinstance(value, Tensor) and value.requires_grad for value in values):
        return numbers
    return torch.stack([torch.as_tensor(value).to(like).reshape(()) for value in values])


def values_by_parameter(
    given: ValuesByName, names: Sequence[str], what: str, params: Sequence[Tensor]
) -> list[float | Tensor]:
    """Return a number for each parameter, or a tensor of its shape.

    Args:
        given: As for :func:`by_parameter`, of either sign; an entry may be a tensor ``[*p]``.
        names: Names of the parameters.
        what: Names the values in messages.
        params: The parameters, whose precision and device tensors take.

    Raises:
        ValueError: If one is missing, not finite or of another shape, or a name is not that of a
            parameter or module.
    """
    found: list[float | Tensor] = []
    for name, p, value in zip(names, params, _of_parameters(given, names, what), strict=True):
        values = torch.as_tensor(value).detach().to(p)
        if values.dim() and values.shape != p.shape:
            raise ValueError(
                f"The {what} of {name!r} is a number, or a tensor of the parameter's shape "
                f"{list(p.shape)}, got one of shape {list(values.shape)}."
            )
        if not values.isfinite().all():
            raise ValueError(f"The {what} of {name!r} has entries that are not finite.")
        found.append(values.clone() if values.dim() else float(value))
    return found


def chosen_by_name(
    given: Tensor | Mapping[str, Tensor | bool] | None,
    names: Sequence[str],
    what: str,
    params: Sequence[Tensor],
) -> Tensor:
    """Return which weights are chosen, ``[P]``, on the device of the parameters.

    Args:
        given: None for all; a boolean vector ``[P]``; or by the names of parameters and modules,
            a boolean tensor of the parameter's shape or a boolean. What has no name is not chosen.
        names: Names of the parameters.
        what: Names the choice in messages.
        params: The parameters.

    Raises:
        ValueError: If it has other entries or shapes, nothing is chosen, or a name is not that of
            a parameter or module.
    """
    count = sum(p.numel() for p in params)
    if given is None:
        return torch.ones(count, dtype=torch.bool, device=params[0].device)
    if isinstance(given, Mapping):
        values = _of_parameters({"": False, **given}, names, what)
        shapes = [p.shape for p in params]
    else:
        values, names, shapes = [given], ["all parameters"], [torch.Size([count])]
    pieces = []
    for name, value, shape in zip(names, values, shapes, strict=True):
        mask = torch.as_tensor(value, device=params[0].device)
        fits = mask.shape == shape or isinstance(value, bool)
        if mask.dtype != torch.bool or not fits:
            raise ValueError(
                f"The {what} of {name} are a boolean tensor of shape {list(shape)}, got "
                f"{str(mask.dtype).removeprefix('torch.')} of shape {list(mask.shape)}."
            )
        pieces.append(mask.expand(shape).flatten())
    found = torch.cat(pieces)
    if not found.any():
        raise ValueError(f"The {what} are none: choose one at least.")
    return found


def _of_parameters(given: Any, names: Sequence[str], what: str) -> list[Any]:
    """Return what belongs to each parameter, as it was given; see :func:`by_parameter`."""
    if getattr(given, "ndim", 0):  # a tensor or an array
        return _of_parameters([*given], names, what)
    if isinstance(given, Mapping):
        owners = [[k for k in given if k in ("", n) or n.startswith(f"{k}.")] for n in names]
        strange = set(given).difference(*owners)
        missing = [n for n, found in zip(names, owners, strict=True) if not found]
        if strange or missing:
            raise ValueError(
                f"The {what} by name: {sorted(strange)} are no parameters or modules, and there is "
                f"none for {missing}. The parameters are {', '.join(names)}; '' stands for all."
            )
        values: list[Any] = [given[max(found, key=len)] for found in owners]
    else:
        values = [*given] if isinstance(given, Sequence) else [given] * len(names)
    if len(values) != len(names):
        raise ValueError(
            f"The {what} is one number, or one for each of {len(names)} parameters, got "
            f"{len(values)}."
        )
    return values


def positive(value: float | Tensor, what: str) -> float:
    """Return a number as it is.

    Raises:
        ValueError: If it is not positive, or a tensor of several.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"The {what} has to be one positive number, got a tensor of shape {list(value.shape)}."
        )
    number = float(value.detach() if isinstance(value, Tensor) else value)
    if not number > 0:
        raise ValueError(f"The {what} has to be positive, got {number:g}.")
    return number

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


def _of_parameters(given: ByName, names: Sequence[str], what: str) -> list[Any]:
    """Return what belongs to each parameter, as it was given; see :func:`by_parameter`."""
    if isinstance(given, Tensor) and given.dim():
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
        ValueError: If it is not positive.
    """
    number = float(value.detach() if isinstance(value, Tensor) else value)
    if not number > 0:
        raise ValueError(f"The {what} has to be positive, got {number:g}.")
    return number

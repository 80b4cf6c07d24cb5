"""Numbers that belong to parameters, given by the names of parameters and modules.

>>> from backpack.utils.by_name import by_parameter
>>> by_parameter({"": 1.0, "2": 3.0}, ["0.weight", "0.bias", "2.weight"], "damping")
[1.0, 1.0, 3.0]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    if isinstance(given, Tensor):
        given = given.tolist()
    if isinstance(given, Mapping):
        owners = [[k for k in given if k in ("", n) or n.startswith(f"{k}.")] for n in names]
        strange = set(given).difference(*owners)
        missing = [n for n, found in zip(names, owners, strict=True) if not found]
        if strange or missing:
            raise ValueError(
                f"The {what} by name: {sorted(strange)} are no parameters or modules, and there is "
                f"none for {missing}. The parameters are {', '.join(names)}; '' stands for all."
            )
        values = [given[max(found, key=len)] for found in owners]
    else:
        values = list(given) if isinstance(given, Sequence) else [given] * len(names)
    if len(values) != len(names):
        raise ValueError(
            f"The {what} is one number, or one for each of {len(names)} parameters, got "
            f"{len(values)}."
        )
    return [positive(value, what) for value in values]


def positive(value: float, what: str) -> float:
    """Return a number as it is.

    Raises:
        ValueError: If it is not positive.
    """
    if not value > 0:
        raise ValueError(f"The {what} has to be positive, got {value}.")
    return float(value)

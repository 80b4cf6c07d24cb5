"""What can be extracted of a parameter, by name, and how its values are put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd, inf
from typing import Any, NamedTuple

from torch import Tensor

from backpack.core.types import Extension


def add(one: Any, other: Any) -> Any:
    """Add two tensors, or two lists of tensors."""
    if isinstance(one, list):
        return [a + b for a, b in zip(one, other, strict=True)]
    return one + other


def max_factor_size(exts: Iterable[Extension]) -> float:
    """Return the size up to which some extension wants whole Kronecker factors."""
    sizes = [
        inf if ext.max_factor_size is None else ext.max_factor_size
        for ext in exts
        if ext.max_factor_size is not None or not KRONECKER.isdisjoint(ext.reads)
    ]
    return max(sizes, default=inf)


class Reduction(NamedTuple):
    """How values are put together: those of slices of columns and of samples, and of sources."""

    sample_axis: int | None = None  # where the samples are, None if they are summed
    column_axis: int | None = None  # where the columns are, None if they are summed
    degree: int = 2  # power of the columns that the values carry
    is_average: bool = False  # over samples, and no sum
    is_symmetric: bool = False  # a symmetric matrix, or a list of these

    def joined(self, one: Any, other: Any) -> Any:
        """Add the values of two sources of columns; merge rows if they have other numbers."""
        axis = self.sample_axis
        if axis is not None:
            fewest = gcd(one.shape[axis], other.shape[axis])
            one, other = (v.unflatten(axis, (fewest, -1)).sum(axis + 1) for v in (one, other))
        return add(one, other)


# Everything that can be extracted. Letters: V columns, N samples, *p the parameter's shape.
COLUMNS = "individual"
REDUCTIONS = {
    COLUMNS: Reduction(sample_axis=1, column_axis=0, degree=1),  # [V, N, *p]  Jᵀ s
    "gradient": Reduction(degree=1),  # [*p]  sum_vn Jᵀ s
    "batch_square": Reduction(sample_axis=0),  # [N, *p]  sum_v (Jᵀ s)²
    "square": Reduction(),  # [*p]  sum_vn (Jᵀ s)²
    "square_norm": Reduction(sample_axis=0),  # [N]  sum_v |Jᵀ s|²
    # [O, O]  sum_vn of the outer products of Kronecker rows
    "gram": Reduction(is_symmetric=True),
    "gram_expand": Reduction(is_symmetric=True),  # the same, with every position a row of its own
}
# What depends on the columns themselves, and not just on the matrix that they stand for.
OF_COLUMNS = frozenset(name for name, of in REDUCTIONS.items() if of.degree == 1)
# [N, T]  sum_v whether something arrives at a position: where the loss ignores targets
ARRIVED = "arrived"
REDUCTIONS[ARRIVED] = Reduction(sample_axis=0, degree=0)
GRAMS = {None: "gram", "expand": "gram_expand", "reduce": "gram"}


def _by_approximation(name: str) -> dict[str | None, str]:
    return {None: name, "expand": f"{name}_expand", "reduce": f"{name}_reduce"}


# What comes with a Gram matrix: the Kronecker factors of the inputs, by approximation.
INPUT_FACTORS = _by_approximation("input_factors")
# The same of weights that are joined with their bias.
JOINT_FACTORS = _by_approximation("joint_factors")
# What these are factors of: the approximation, and whether weight and bias are joined.
OF_INPUTS = {
    name: (approximation, joint)
    for joint, names in [(False, INPUT_FACTORS), (True, JOINT_FACTORS)]
    for approximation, name in names.items()
}
# Sums of squares in the eigenbasis of these factors.
EIGEN_SQUARES = _by_approximation("eigen_square")
# The same of weights that are joined with their bias.
JOINT_EIGEN_SQUARES = _by_approximation("joint_eigen_square")
# What factors the eigenbases are of.
IN_BASES = {
    names[approximation]: (gram, inputs[approximation])
    for names, inputs in [(EIGEN_SQUARES, INPUT_FACTORS), (JOINT_EIGEN_SQUARES, JOINT_FACTORS)]
    for approximation, gram in GRAMS.items()
}
# Bases of a parameter, by the name of the squares in them.
Bases = Mapping[str, Sequence[Tensor]]
REDUCTIONS |= dict.fromkeys(IN_BASES, Reduction())  # [d_1, d_2, …]  sum_vn (Qᵀ Jᵀ s)²
# The identity in place of a Gram matrix: what arrives does not matter.
IDENTITY = "identity"
# How values are put together for parts of a batch.
OVER_PARTS = REDUCTIONS | dict.fromkeys(
    [*OF_INPUTS, IDENTITY], Reduction(degree=0, is_average=True, is_symmetric=True)
)
# What no slices add up to: a factored form of [V, N, *p], see FactoredGrad.
UNSLICED = frozenset({"factored"})
# What Kronecker factors are made of, and what is made of them.
KRONECKER = frozenset({*GRAMS.values(), *OF_INPUTS, *IN_BASES, IDENTITY})
# What depends on which entries of a tensor belong to one sample.
OF_SAMPLES = frozenset(name for name, of in REDUCTIONS.items() if of.sample_axis is not None)
OF_SAMPLES |= {"factored", INPUT_FACTORS["reduce"], JOINT_FACTORS["reduce"]}
# What depends on how many samples there are: averages over them.
OF_COUNTS = frozenset({INPUT_FACTORS[None], JOINT_FACTORS[None]})
# What comes with other quantities, or is made for extensions of the library: no message offers it.
UNNAMED = KRONECKER - {GRAMS[None]} | {ARRIVED}


def names_of(exts: Sequence[Extension]) -> str:
    """List the names of extensions."""
    return ", ".join(type(ext).__name__ for ext in exts)


def fail(
    exts: Sequence[Extension], message: str, error: type[Exception] = NotImplementedError
) -> None:
    """Let extensions refuse the same, with one message for all of them."""
    if len(exts) > 1:
        exts[0].fail(message, error, exts[1:])
    elif exts:  # a class of yours may have a fail of its own, without others
        exts[0].fail(message, error)


def named(names: Iterable[str]) -> str:
    """List quantities for a message."""
    return ", ".join(sorted(set(names) - UNNAMED))

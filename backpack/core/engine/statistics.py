"""What results are made of, where a batch comes in parts: over processes, or backward passes.

Every quantity is a function of few statistics of the batch. How those of two parts combine follows
from :data:`~.extracted.OVER_PARTS`: they add up, are averages over samples, or have an axis of
samples. The result for the whole batch is then made of them as it is made for one part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.engine.extracted import JOINT_FACTORS, KRONECKER, OVER_PARTS, Reduction, add
from backpack.core.engine.products import Products
from backpack.core.types import Extension, Write

JOINED = frozenset(JOINT_FACTORS.values())
Map = Callable[[Tensor], Tensor]
# Applies a map on all processes, and sums what it returns.
SumOfProcesses = Callable[[Map, Tensor], Tensor]


class Name(NamedTuple):
    """What a parameter is called on all processes."""

    key: str  # tells it from others: its number in the wrapper, or its name in the sharded module
    shown: str  # in messages


class Statistics:
    """The statistics of a part of the batch that the results of some extensions are made of.

    Averages over samples are held as sums.
    """

    unit: Any = None  # what the parameter is sharded together with
    behind: str = ""  # what all processes have added up before, in words
    extract: Callable[[Write], None]  # saves the results

    def __init__(
        self,
        parameter: Parameter,
        exts: Sequence[Extension],
        values: Mapping[str, Any],
        rules: Mapping[str, Reduction] = OVER_PARTS,
    ):
        """Remember what they are for: extensions of one propagation."""
        self.parameter = parameter
        self.exts = tuple(exts)
        self.values = dict(values)
        self.rules = rules  # how those of a name are put together
        self.numbers: dict[str, int] = {}  # of samples (or positions), if results depend on that
        self.is_sharded = False  # whether processes have shards of what has the parameter's shape
        self.name = Name("", "")  # if there are several processes

    def own_samples(self, ext: Extension) -> int | None:
        """Return the number of samples on this process, if an extension reads a value of each."""
        read = [(self.rules[n].sample_axis, v) for n, v in self.values.items() if n in ext.reads]
        counts = (_listed(value)[0].shape[axis] for axis, value in read if axis is not None)
        return next(counts, None)

    def signature(self) -> str:
        """Name the statistics and the shapes of those that add up: the same on all processes."""
        shapes = [[list(v.shape) for v in _listed(self.values[name])] for name in self._added()]
        return f"{list(self.parameter.shape)} {', '.join(self.values)} {shapes}"

    def scale(self, factor: float) -> None:
        """Multiply the loss that they belong to with a factor."""
        # power of it that columns carry: curvature has two of them
        order = 0.5 if self.exts[0].expects_backpropagation_quantities() else 1
        for name, value in self.values.items():
            power = self.rules[name].degree * order
            if power:
                self.values[name] = _multiplied(value, factor**power)

    def _added(self) -> list[str]:
        return [name for name in self.values if self.rules[name].sample_axis is None]

    def _is_spread(self, name: str) -> bool:
        """Whether what adds up has the shape of a sharded parameter, or else becomes the same."""
        if not self.is_sharded or self.rules[name].is_symmetric:
            return False
        return getattr(self.values[name], "shape", None) == self.parameter.shape

    def sums(self) -> list[Tensor]:
        """Flatten what adds up and is the same then; of symmetric matrices, the upper triangle."""
        return [
            _packed(value, self.rules[name].is_symmetric)
            for name in self._added()
            if not self._is_spread(name)
            for value in _listed(self.values[name])
        ]

    def like_parameter(self) -> list[Tensor]:
        """Return what adds up and has the shape of a sharded parameter: not among the sums."""
        return [self.values[name] for name in filter(self._is_spread, self._added())]

    def set_like_parameter(self, shards: Iterator[Tensor]) -> None:
        """Replace that by the shards of this process."""
        for name in filter(self._is_spread, self._added()):
            self.values[name] = next(shards)

    def counts(self) -> list[int]:
        """Return the numbers of samples (or positions), which add up, if results depend on them."""
        return list(self.numbers.values()) if self._added() else []

    def set_totals(
        self, sums: Iterator[Tensor], counts: Iterator[int], together: SumOfProcesses
    ) -> None:
        """Replace :meth:`sums` and :meth:`counts` by those of all parts."""
        for name in self._added():
            if not self._is_spread(name):
                value, is_symmetric = self.values[name], self.rules[name].is_symmetric
                found = [_unpacked(next(sums), v, is_symmetric) for v in _listed(value)]
                self.values[name] = found if isinstance(value, list) else found[0]
        if self.counts():
            self.numbers = {name: next(counts) for name in self.numbers}

    def plus(self, other: Any) -> Any:
        """Return the statistics of two parts together: add what adds up, concatenate samples."""
        both = self.copy()
        for name, value in other.values.items():
            axis, parts = self.rules[name].sample_axis, [self.values[name], value]
            if axis is None:
                both.values[name] = add(*parts)
            else:
                both.values[name] = torch.cat(_with_equal_columns(*parts) if axis else parts, axis)
        both.numbers = {name: count + other.numbers[name] for name, count in self.numbers.items()}
        return both

    def copy(self) -> Any:
        """Return a copy which may be changed or used up, with the same tensors."""
        both = copy.copy(self)
        both.values, both.numbers = self.values.copy(), self.numbers.copy()
        return both


def _with_equal_columns(one: Tensor, other: Tensor) -> list[Tensor]:
    """Give the samples of a pass with fewer columns, as of a smaller output, columns of zeros."""
    most = max(len(one), len(other))
    return [torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])]) for x in (one, other)]


class OfProducts(Statistics):
    """Statistics that extensions extract of products."""

    def __init__(self, products: Products, exts: Sequence[Extension]):
        """Compute everything that the extensions read, and let go of where it comes from."""
        names = dict.fromkeys(name for ext in exts for name in ext.reads)
        averaged = {name: products.count_of(name) for name in names if OVER_PARTS[name].is_average}
        self.factors_are_of = "" if KRONECKER.isdisjoint(names) else products.factors_are_of
        super().__init__(products.parameter, exts, products.settle(names))
        self.unit, self.products = products.unit, products
        self.numbers = {"": products.num_samples, **averaged}
        for name, count in averaged.items():
            self.values[name] = _multiplied(self.values[name], count)

    def plus(self, other: OfProducts) -> OfProducts:
        """Add what adds up, concatenate samples; refuse Kronecker factors of different kinds."""
        kinds = self.factors_are_of, other.factors_are_of
        if kinds[0] != kinds[1]:
            names = ", ".join(map(repr, self.exts))
            raise ValueError(
                f"{names}: a parameter {list(self.parameter.shape)} is used in different ways by "
                "backward passes that accumulate, as a table of embeddings that is also the weight "
                f"of a layer. Its Kronecker factors are those of {kinds[0]} in one of them, and of "
                f"{kinds[1]} in another one. Add up the losses, and call backward() once."
            )
        if not JOINED.isdisjoint(self.values):
            partners = self.products.partner, other.products.partner
            _check_same_partner(self.products.parameter, *partners)
        return super().plus(other)

    def extract(self, write: Write) -> None:
        """Make the results, and drop the statistics."""
        for name, count in self.numbers.items():
            if name:
                self.values[name] = _multiplied(self.values[name], 1 / max(1, count))
        self.products.num_samples = self.numbers[""]
        self.products.set_values(self.values)
        self.values = {}
        self.products.write(self.exts, write)


class OfRule(Statistics):
    """The value that a user's rule has returned, if it is a sum over samples or of each."""

    def __init__(self, parameter: Parameter, ext: Extension, value: Any):
        shape = ext.shape
        if len(ext.needs) != 1 or not isinstance(value, Tensor) or shape is None:
            raise NotImplementedError(
                f"{ext!r}: the result of your own rule for a module cannot be combined over "
                "processes or backward passes, because it is not known how. Register derivatives "
                "(backpack.core.derivatives.register), or use "
                "backpack(..., process_group=None) and no accumulate=True."
            )
        axis = shape.index("N") if "N" in shape else None
        rule = Reduction(sample_axis=axis, degree=OVER_PARTS[ext.needs[0]].degree)
        super().__init__(parameter, (ext,), {ext.savefield: value}, {ext.savefield: rule})

    def extract(self, write: Write) -> None:
        """Write the value."""
        write(self.parameter, self.exts[0], [self.values[self.exts[0].savefield]])


class OfMaps(Statistics):
    """Products with curvature, which are computed when they are asked for."""

    def __init__(self, parameter: Parameter, ext: Extension, value: Map):
        super().__init__(parameter, (ext,), {})
        self.map = value

    def scale(self, factor: float) -> None:
        """Multiply the map."""
        own = self.map
        if factor != 1:
            self.map = lambda mat: own(mat) * factor

    def set_totals(
        self, sums: Iterator[Tensor], counts: Iterator[int], together: SumOfProcesses
    ) -> None:
        """Sum products over processes, when they are computed."""
        self.map = partial(together, self.map)

    def plus(self, other: OfMaps) -> OfMaps:
        """Add the maps."""
        both, one, two = self.copy(), self.map, other.map
        both.map = lambda mat: one(mat) + two(mat)
        return both

    def extract(self, write: Write) -> None:
        """Write the map."""
        write(self.parameter, self.exts[0], [self.map])


@dataclass(eq=False)
class Loaded:
    """What was accumulated in another program, until a backward pass shows how results are made."""

    name: str  # of the parameter
    # ``values`` and ``numbers`` of OfProducts, and ``options`` and ``savefields`` of extensions
    state: dict[str, Any]
    partner: Parameter | None  # the bias (or the weight) that has joined it

    def restored(self, part: Statistics) -> OfProducts:
        """Return the statistics, like those of a backward pass; refuse them if these are others."""
        values, numbers = self.state["values"], self.state["numbers"]
        if not isinstance(part, OfProducts) or values.keys() != part.values.keys():
            raise ValueError(f"{self.name} has other statistics than those that were loaded.")
        if not JOINED.isdisjoint(values):
            _check_same_partner(part.products.parameter, self.partner, part.products.partner)
        both = part.copy()
        for name, own in part.values.items():
            found, expected = _listed(values[name]), _listed(own)
            shapes = [[list(v.shape) for v in each] for each in (found, expected)]
            is_sum = OVER_PARTS[name].sample_axis is None
            if len(found) != len(expected) or (is_sum and shapes[0] != shapes[1]):
                raise ValueError(
                    f"{self.name}: {name} was loaded with shapes {shapes[0]}, but this backward "
                    f"pass has {shapes[1]}."
                )
            moved = [a.to(b.device, b.dtype) for a, b in zip(found, expected, strict=True)]
            both.values[name] = moved if isinstance(own, list) else moved[0]
        both.numbers = {name: numbers[name or "samples"] for name in part.numbers}
        return both


def of_value(parameter: Parameter, ext: Extension, value: Any) -> Statistics:
    """Return the statistics of a result that is not extracted of products."""
    is_map = not isinstance(value, Tensor) and callable(value)
    return (OfMaps if is_map else OfRule)(parameter, ext, value)


def _check_same_partner(p: Parameter, one: Parameter | None, other: Parameter | None) -> None:
    """Refuse sums of Kronecker factors of a weight with one bias and with another one."""
    if one is not other:
        shapes = [None if partner is None else list(partner.shape) for partner in (one, other)]
        raise NotImplementedError(
            f"joint_bias=True: a parameter {list(p.shape)} is shared by modules that "
            f"take part in different backward passes, and is joined there with {shapes[0]} and "
            f"with another one, {shapes[1]} (weight and bias have one pair of Kronecker factors). "
            "Use joint_bias=False, or one pass for each module."
        )


def _listed(value: Any) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


def _multiplied(value: Any, factor: float) -> Any:
    return [v * factor for v in value] if isinstance(value, list) else value * factor


def _packed(value: Tensor, is_symmetric: bool) -> Tensor:
    if not is_symmetric or value.dim() == 1:  # of a matrix, the diagonal alone
        return value.flatten()
    rows, columns = torch.triu_indices(*value.shape, device=value.device)
    return value[rows, columns]


def _unpacked(vector: Tensor, like: Tensor, is_symmetric: bool) -> Tensor:
    if not is_symmetric or like.dim() == 1:
        return vector.view_as(like)
    rows, columns = torch.triu_indices(*like.shape, device=like.device)
    matrix = torch.empty_like(like, dtype=vector.dtype)
    matrix[rows, columns] = vector
    matrix[columns, rows] = vector
    return matrix

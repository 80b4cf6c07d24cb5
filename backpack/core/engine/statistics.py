"""What results are made of, where a batch comes in parts: over processes, or backward passes.

Every quantity is a function of few statistics of the batch. How those of two parts combine follows
from :data:`~.extracted.OVER_PARTS`: they add up, are averages over samples, or have an axis of
samples. The result for the whole batch is then made of them as it is made for one part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.engine.extracted import JOINT_FACTORS, OVER_PARTS, Reduction, add
from backpack.core.engine.products import Products
from backpack.core.types import Extension, Save

JOINED = frozenset(JOINT_FACTORS.values())
# Sums a tensor over processes.
Total = Callable[[Tensor], Tensor]


class Name(NamedTuple):
    """What a parameter is called on all processes.

    Attributes:
        key: Tells it from others: its number in the wrapper, or its name in the sharded module.
        shown: Its name, for messages.
    """

    key: str
    shown: str


class Statistics:
    """The statistics of a part of the batch that the results of some extensions are made of.

    Attributes:
        parameter: Whose results they are.
        exts: The extensions, which have one propagation.
        is_sharded: Whether processes have shards of the parameter, and of what has its shape.
        unit: What the parameter is sharded together with.
        name: What the parameter is called on all processes, if there are several.
        signature: Describes the statistics: other processes need to have the same.
        scale: Multiplies the loss that they belong to with a factor.
        set_totals: Replaces :meth:`sums` and :meth:`counts` by those of all parts.
        plus: Returns the statistics of two parts together.
        extract: Saves the results.
    """

    signature: Callable[[], str]
    scale: Callable[[float], None]
    set_totals: Callable[[Iterator[Tensor], Iterator[int], Total], None]
    plus: Callable[[Any], Statistics]
    extract: Callable[[Save], None]

    def __init__(self, parameter: Parameter, exts: Sequence[Extension], unit: Any = None):
        """Remember what they are for."""
        self.parameter = parameter
        self.exts = tuple(exts)
        self.is_sharded = False
        self.unit = unit
        self.name = Name("", "")

    @property
    def order(self) -> float:
        """Power of the loss's factor that columns carry: curvature has two of them."""
        return 0.5 if self.exts[0].expects_backpropagation_quantities() else 1

    def sums(self) -> list[Tensor]:
        """Return what adds up over parts, as vectors."""
        return []

    def counts(self) -> list[int]:
        """Return the numbers of samples, which add up over parts, if results depend on them."""
        return []

    def own_samples(self, ext: Extension) -> int | None:
        """Return the number of samples on this process, if an extension reads a value of each."""
        del ext
        return None

    def like_parameter(self) -> list[Tensor]:
        """Return what adds up and has the shape of a sharded parameter: not among the sums."""
        return []

    def set_like_parameter(self, shards: Iterator[Tensor]) -> None:
        """Replace that by the shards of this process."""
        del shards  # nothing is replaced

    def copy(self) -> Any:
        """Return a copy which may be changed or used up."""
        return copy.copy(self)


class OfProducts(Statistics):
    """Statistics that extensions extract of products.

    Averages over samples are held as sums.
    """

    def __init__(self, products: Products, exts: Sequence[Extension]):
        """Compute everything that the extensions read, and let go of where it comes from."""
        super().__init__(products.parameter, exts, products.unit)
        names = dict.fromkeys(name for ext in exts for name in ext.reads)
        averaged = {name: products.count_of(name) for name in names if OVER_PARTS[name].is_average}
        self.numbers = {"": products.num_samples, **averaged}
        self.products, self.values = products, products.settle(names)
        for name, count in averaged.items():
            self.values[name] = _multiplied(self.values[name], count)

    def own_samples(self, ext: Extension) -> int | None:
        """Return the number of samples on this process, if an extension reads a value of each."""
        for name in ext.reads:
            axis = OVER_PARTS[name].sample_axis
            if axis is not None:
                return _listed(self.values[name])[0].shape[axis]
        return None

    def signature(self) -> str:
        """Name the statistics and the shapes of those that add up."""
        shapes = [[list(v.shape) for v in _listed(self.values[name])] for name, _ in self._added()]
        return f"{list(self.parameter.shape)} {', '.join(self.values)} {shapes}"

    def scale(self, factor: float) -> None:
        """Multiply what depends on the loss."""
        for name in self.values:
            power = OVER_PARTS[name].degree * self.order
            if power:
                self.values[name] = _multiplied(self.values[name], factor**power)

    def _added(self) -> Iterator[tuple[str, Reduction]]:
        for name in self.values:
            if OVER_PARTS[name].sample_axis is None:
                yield name, OVER_PARTS[name]

    def _summed(self) -> Iterator[tuple[str, Reduction]]:
        """List what adds up and is the same on all processes then."""
        for name, rule in self._added():
            if rule.is_symmetric or not self.is_sharded:
                yield name, rule

    def _spread(self) -> Iterator[str]:
        """List what adds up and has the shape of a sharded parameter."""
        for name, rule in self._added():
            if self.is_sharded and not rule.is_symmetric:
                yield name

    def sums(self) -> list[Tensor]:
        """Flatten what adds up; of symmetric matrices, the upper triangle."""
        return [
            _packed(value, rule.is_symmetric)
            for name, rule in self._summed()
            for value in _listed(self.values[name])
        ]

    def like_parameter(self) -> list[Tensor]:
        """Return what adds up and has the shape of a sharded parameter."""
        return [self.values[name] for name in self._spread()]

    def set_like_parameter(self, shards: Iterator[Tensor]) -> None:
        """Replace that by the shards of this process."""
        for name in self._spread():
            self.values[name] = next(shards)

    def counts(self) -> list[int]:
        """Return the numbers of samples (or positions)."""
        return list(self.numbers.values()) if any(True for _ in self._added()) else []

    def set_totals(self, sums: Iterator[Tensor], counts: Iterator[int], total: Total) -> None:
        """Replace what adds up."""
        for name, rule in self._summed():
            value = self.values[name]
            found = [_unpacked(next(sums), v, rule.is_symmetric) for v in _listed(value)]
            self.values[name] = found if isinstance(value, list) else found[0]
        if self.counts():
            self.numbers = {name: next(counts) for name in self.numbers}

    def plus(self, other: OfProducts) -> OfProducts:
        """Add what adds up, concatenate samples.

        Raises:
            NotImplementedError: If a weight has its Kronecker factors with two biases.
        """
        if not JOINED.isdisjoint(self.values):
            partners = self.products.partner, other.products.partner
            _check_same_partner(self.products.parameter, *partners)
        both = self.copy()
        for name, value in other.values.items():
            axis = OVER_PARTS[name].sample_axis
            if axis is None:
                both.values[name] = add(self.values[name], value)
            else:
                both.values[name] = torch.cat([self.values[name], value], axis)
        both.numbers = {name: count + other.numbers[name] for name, count in self.numbers.items()}
        return both

    def extract(self, save: Save) -> None:
        """Make the results, and drop the statistics."""
        for name, count in self.numbers.items():
            if name:
                self.values[name] = _multiplied(self.values[name], 1 / max(1, count))
        self.products.resume(self.values, self.numbers[""])
        self.values = {}
        self.products.extract(self.exts, save)

    def copy(self) -> OfProducts:
        """Copy all but the tensors."""
        both = super().copy()
        both.values, both.numbers = self.values.copy(), self.numbers.copy()
        return both


class OfRule(Statistics):
    """The value that a user's rule has returned, if it is a sum over samples or of each.

    Raises:
        NotImplementedError: If it is not known to be one.
    """

    def __init__(self, parameter: Parameter, ext: Extension, value: Any):
        """Check what it is."""
        super().__init__(parameter, (ext,))
        shape = ext.shape
        known = len(ext.needs) == 1 and isinstance(value, Tensor) and shape is not None
        if not known or shape is None:
            raise NotImplementedError(
                f"{ext!r}: the result of your own rule for a module cannot be combined over "
                "processes or backward passes, because it is not known how. Register derivatives "
                "(backpack.core.derivatives.register), or use "
                "backpack(..., process_group=None) and no accumulate=True."
            )
        self.value = value
        self.axis = shape.index("N") if "N" in shape else None
        self.degree = OVER_PARTS[ext.needs[0]].degree

    def signature(self) -> str:
        """Give the shape."""
        shapes = [list(value.shape) for value in self.sums()]
        return f"{list(self.parameter.shape)} {self.exts[0].savefield} {shapes}"

    def scale(self, factor: float) -> None:
        """Multiply the value."""
        self.value = self.value * factor ** (self.degree * self.order)

    @property
    def _is_spread(self) -> bool:
        """Whether the value is summed over samples and has the shape of a sharded parameter."""
        return self.is_sharded and self.axis is None and self.value.shape == self.parameter.shape

    def sums(self) -> list[Tensor]:
        """Return the value, if it is summed over samples."""
        return [self.value.flatten()] if self.axis is None and not self._is_spread else []

    def like_parameter(self) -> list[Tensor]:
        """Return the value, if it has the shape of a sharded parameter."""
        return [self.value] if self._is_spread else []

    def set_like_parameter(self, shards: Iterator[Tensor]) -> None:
        """Replace it by the shard of this process."""
        if self._is_spread:
            self.value = next(shards)

    def set_totals(self, sums: Iterator[Tensor], counts: Iterator[int], total: Total) -> None:
        """Replace the value, if it is summed over samples."""
        if self.axis is None and not self._is_spread:
            self.value = next(sums).view_as(self.value)

    def plus(self, other: OfRule) -> OfRule:
        """Add or concatenate."""
        both = self.copy()
        if self.axis is None:
            both.value = self.value + other.value
        else:
            both.value = torch.cat([self.value, other.value], self.axis)
        return both

    def extract(self, save: Save) -> None:
        """Save the value."""
        save(self.parameter, self.exts[0], self.value)


class SumOfMaps:
    """The sum of linear maps ``[V, *p] -> [V, *p]``, times a factor, and summed over processes."""

    def __init__(
        self, maps: Sequence[Callable[[Tensor], Tensor]], factor: float, total: Total | None
    ):
        """Remember what to apply; with ``total``, all processes have to, to the same vectors."""
        self.maps = tuple(maps)
        self.factor = factor
        self.total = total

    def __call__(self, mat: Tensor) -> Tensor:
        """Apply the sum to ``[V, *p]``, or ``[*p]``: same shape.

        Raises:
            ValueError: If the shape does not match.
            RuntimeError: If a parameter was changed since the backward pass.
        """
        first, *others = self.maps
        result = first(mat)
        for one in others:
            result = result + one(mat)
        if self.factor != 1:
            result = result * self.factor
        return result if self.total is None else self.total(result)


class OfMaps(Statistics):
    """Products with curvature, which are computed when they are asked for."""

    def __init__(self, parameter: Parameter, ext: Extension, value: Callable[[Tensor], Tensor]):
        """Start with one."""
        super().__init__(parameter, (ext,))
        self.maps = [value]
        self.factor = 1.0

    def signature(self) -> str:
        """Name the result."""
        return f"{list(self.parameter.shape)} {self.exts[0].savefield}"

    def scale(self, factor: float) -> None:
        """Multiply the map."""
        self.factor *= factor

    def set_totals(self, sums: Iterator[Tensor], counts: Iterator[int], total: Total) -> None:
        """Sum products over processes, when they are computed."""
        self.maps, self.factor = [SumOfMaps(self.maps, self.factor, total)], 1.0

    def plus(self, other: OfMaps) -> OfMaps:
        """Add the maps."""
        both = self.copy()
        both.maps, both.factor = [self._map(), other._map()], 1.0
        return both

    def _map(self) -> Callable[[Tensor], Tensor]:
        alone = len(self.maps) == 1 and self.factor == 1
        return self.maps[0] if alone else SumOfMaps(self.maps, self.factor, None)

    def extract(self, save: Save) -> None:
        """Save the map."""
        save(self.parameter, self.exts[0], self._map())


class Loaded:
    """What was accumulated in another program, until a backward pass shows how results are made.

    Attributes:
        name: Of the parameter.
        state: ``values`` and ``numbers`` of :class:`OfProducts`, and ``options`` and ``savefields``
            of the extensions.
        partner: The bias (or the weight) that has joined it.
    """

    def __init__(self, name: str, state: Mapping[str, Any], partner: Parameter | None):
        """Store it."""
        self.name = name
        self.partner = partner
        self.state: dict[str, Any] = dict(state)

    def restored(self, part: Statistics) -> OfProducts:
        """Return the statistics, which results are made of as of those of a backward pass.

        Raises:
            ValueError: If these are others.
            NotImplementedError: If a weight has its Kronecker factors with two biases.
        """
        values, numbers = self.state["values"], self.state["numbers"]
        is_alike = isinstance(part, OfProducts) and values.keys() == part.values.keys()
        if not isinstance(part, OfProducts) or not is_alike:
            raise ValueError(f"{self.name} has other statistics than those that were loaded.")
        if not JOINED.isdisjoint(values):
            _check_same_partner(part.products.parameter, self.partner, part.products.partner)
        both = part.copy()
        for name, own in part.values.items():
            axis, found = OVER_PARTS[name].sample_axis, _listed(values[name])
            pairs = zip(found, _listed(own), strict=False)
            if len(found) != len(_listed(own)) or any(
                a.shape != b.shape and axis is None for a, b in pairs
            ):
                shapes = [[list(v.shape) for v in each] for each in (found, _listed(own))]
                raise ValueError(
                    f"{self.name}: {name} was loaded with shapes {shapes[0]}, but this backward "
                    f"pass has {shapes[1]}."
                )
            moved = [a.to(b.device, b.dtype) for a, b in zip(found, _listed(own), strict=True)]
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


def _triangle(matrix: Tensor) -> Tensor:
    return torch.triu_indices(*matrix.shape, device=matrix.device)


def _packed(value: Tensor, is_symmetric: bool) -> Tensor:
    if not is_symmetric or value.dim() == 1:  # of a matrix, the diagonal alone
        return value.flatten()
    rows, columns = _triangle(value)
    return value[rows, columns]


def _unpacked(vector: Tensor, like: Tensor, is_symmetric: bool) -> Tensor:
    if not is_symmetric or like.dim() == 1:
        return vector.view_as(like)
    rows, columns = _triangle(like)
    matrix = torch.empty_like(like, dtype=vector.dtype)
    matrix[rows, columns] = vector
    matrix[columns, rows] = vector
    return matrix

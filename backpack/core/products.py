"""What can be extracted of a parameter from the columns that arrive at its modules' outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.basederivatives import BaseDerivatives, Rows
from backpack.core.factors import Factor
from backpack.core.tape import Call


class Use(NamedTuple):
    """One use of a parameter in a reached call, and the columns at the call's output."""

    call: Call
    name: str
    factor: Factor
    rows: Rows

    @property
    def derivatives(self) -> BaseDerivatives:
        """Derivatives of the module."""
        assert self.call.derivatives is not None
        return self.call.derivatives

    def apply(self, method: str, *arguments: Any, **keywords: Any) -> Tensor:
        """Call a method of the derivatives for this use."""
        with self.call.bound() as module:
            return getattr(self.derivatives, method)(
                self.name,
                module,
                None,
                self.call.g_out,
                self.factor.mat,
                *arguments,
                subsampling=self.rows,
                **keywords,
            )

    def input_factors(self) -> list[Tensor]:
        """Kronecker factors of the call's input, averages over independent samples."""
        with self.call.bound() as module:
            factors = self.derivatives.kronecker_input_factors(self.name, module, self.rows)
        rows_per_sample = self.factor.mat.shape[1] / max(self.factor.groups, 1)
        return [f * rows_per_sample for f in factors] if rows_per_sample != 1 else factors


def _cat(axis: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda one, other: torch.cat([one, other], axis)


def _add(one: Tensor, other: Tensor) -> Tensor:
    return one + other


def merge_groups(value: Tensor, axis: int, groups: int, adds_up: bool) -> Tensor:
    """Merge groups of samples along an axis: add them up, or give each its own columns (axis 0)."""
    value = value.unflatten(axis, (groups, -1))
    return value.sum(axis + 1) if adds_up else value.transpose(1, 2).flatten(0, 1)


class Reduction(NamedTuple):
    """How values are put together: those of slices of columns and of samples, and of sources.

    Attributes:
        columns: Over slices of columns, and over sources of columns.
        samples: Over slices of samples.
        sample_axis: Where the samples are, None if they are summed.
        adds_up: Whether samples that merge add up, else they get columns of their own.
    """

    columns: Callable[[Tensor, Tensor], Tensor]
    samples: Callable[[Tensor, Tensor], Tensor]
    sample_axis: int | None = None
    adds_up: bool = True

    def merged(self, *values: Tensor) -> list[Tensor]:
        """Merge samples where one source has more of them (positions) than another.

        Raises:
            ValueError: If the numbers of samples are not multiples.
        """
        axis = self.sample_axis
        if axis is None:
            return list(values)
        counts = [value.shape[axis] for value in values]
        if any(count % min(counts) for count in counts):
            raise ValueError(f"Losses with different numbers of samples: {counts}.")
        return [merge_groups(value, axis, min(counts), self.adds_up) for value in values]


# Everything that can be extracted. Letters: V columns, N samples, *p the parameter's shape.
REDUCTIONS = {
    "individual": Reduction(_cat(0), _cat(1), 1, adds_up=False),  # [V, N, *p]  Jᵀ s
    "gradient": Reduction(_add, _add),  # [*p]  sum_vn Jᵀ s
    "batch_square": Reduction(_add, _cat(0), 0),  # [N, *p]  sum_v (Jᵀ s)²
    "square": Reduction(_add, _add),  # [*p]  sum_vn (Jᵀ s)²
    "square_norm": Reduction(_add, _cat(0), 0),  # [N]  sum_v |Jᵀ s|²
    "gram": Reduction(_add, _add),  # [O, O]  sum_vn of the outer products of Kronecker rows
}


class Products:
    """The products of one parameter with columns, computed on demand and once.

    Uses of a reused or tied parameter are summed before anything nonlinear. With a single use,
    the derivatives' own reductions avoid the individual products unless someone wants those.

    Attributes:
        parameter: The parameter.
        uses: Its uses.
        wanted: All quantities that will be asked for: a cheaper one follows from a dearer one.
        terms: If the network mixes samples, the columns of this many terms of the loss travel
            separately, each through the whole batch: ``V = columns · terms``.
    """

    def __init__(
        self,
        parameter: Parameter,
        uses: list[Use],
        wanted: Collection[str] = (),
        terms: int | None = None,
    ):
        """Store what is given; compute nothing."""
        self.parameter = parameter
        self.uses = uses
        self.wanted = wanted
        self.terms = terms
        self._values: dict[str, Any] = {}
        self._taken: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        """Compute a quantity (or recall it)."""
        if name not in self._values:
            self._values[name] = getattr(self, f"_{name}")()
        return self._values[name]

    def take(self, name: str) -> Any:
        """Return a quantity as a tensor that nobody else holds."""
        value = self[name]
        if name in self._taken:
            return [v.clone() for v in value] if isinstance(value, list) else value.clone()
        self._taken.add(name)
        return value

    def set_value(self, name: str, value: Tensor) -> None:
        """Set a quantity that was put together from slices."""
        self._values[name] = value

    @property
    def num_samples(self) -> int:
        """Number of samples N that are looked at."""
        return min(use.factor.groups for use in self.uses)

    @property
    def direct(self) -> bool:
        """Whether the derivatives can reduce on their own: one use, every row a sample."""
        if len(self.uses) > 1 or self.terms is not None or "individual" in self._values:
            return False
        factor = self.uses[0].factor
        return factor.groups == factor.mat.shape[1] and "individual" not in self.wanted

    @property
    def _weights(self) -> Tensor | None:
        return self.uses[0].factor.weights

    def _align(self, values: list[tuple[Tensor, Use]]) -> Tensor:
        """Sum the uses' ``[V, groups, *]`` over the uses, after merging groups to the fewest."""
        fewest = min(use.factor.groups for _, use in values)
        return reduce(_add, [merge_groups(v, 1, fewest, use.factor.adds_up) for v, use in values])

    def _individual(self) -> Tensor:
        values = []
        for use in self.uses:
            rows, groups = use.factor.mat.shape[1], use.factor.groups
            if groups == 1 and rows > 1:
                value = use.apply("param_mjp", sum_batch=True).unsqueeze(1)
            else:
                value = use.apply("param_mjp", sum_batch=False)
                if groups != rows:
                    value = value.unflatten(1, (groups, -1)).sum(2)
            values.append((value, use))
        products = self._align(values)
        if self.terms is not None:
            products = products.reshape(-1, self.terms, *products.shape[2:])
        return products

    def _gradient(self) -> Tensor:
        if "individual" in self._values or "individual" in self.wanted:
            return self["individual"].sum((0, 1))
        sums = [use.apply("param_mjp", sum_batch=True).sum(0) for use in self.uses]
        return reduce(_add, sums)

    def _signed(self, squares: Tensor) -> Tensor:
        """Weigh ``[V, N, *p]`` with the weights."""
        weights = self._weights
        if weights is None:
            return squares
        return squares * weights.reshape(*weights.shape, *(1,) * (squares.dim() - 2))

    def _batch_square(self) -> Tensor:
        if self.direct:
            return self.uses[0].apply("param_mjp_batch_square", weights=self._weights)
        return self._signed(self["individual"].square()).sum(0)

    def _square(self) -> Tensor:
        if "batch_square" in self.wanted:
            return self["batch_square"].sum(0)
        if self.direct:
            return self.uses[0].apply("param_mjp_square_sum", weights=self._weights)
        return self._signed(self["individual"].square()).sum((0, 1))

    def _square_norm(self) -> Tensor:
        if "batch_square" in self.wanted:
            return self["batch_square"].flatten(1).sum(1)
        if self.direct:
            return self.uses[0].apply("param_mjp_square_norm")
        return self["individual"].square().flatten(2).sum((0, 2))

    def _gram(self) -> Tensor:
        """Sum the outer products of the Kronecker rows; positions and uses are summed before."""
        values = []
        for use in self.uses:
            value = use.apply("kronecker_rows")
            groups = use.factor.groups
            # A network that mixes samples has the factors of a Kronecker product treat the rows of
            # a column as samples; a full block sums them first, and is exact.
            as_samples = self.terms is not None and bool(self["input_factors"])
            if groups != value.shape[1] and not as_samples:
                value = value.unflatten(1, (groups, -1)).sum(2)
            values.append((value, use))
        rows = values[0][0] if len(values) == 1 else self._align(values)
        vectors = rows.flatten(0, 2)
        return vectors.T @ vectors / rows.shape[2]

    def _input_factors(self) -> list[Tensor]:
        """Sum the Kronecker factors of the inputs over the uses."""
        each = [use.input_factors() for use in self.uses]
        if self.terms is not None:  # undo: the rows are samples
            rows = self.uses[0].factor.mat.shape[1]
            each = [[f / rows for f in factors] for factors in each]
        return [reduce(_add, factors) for factors in zip(*each, strict=True)]

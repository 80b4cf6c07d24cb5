"""What can be extracted of a parameter from the columns that arrive at its modules' outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core import fast, memory
from backpack.core.derivatives import reductions
from backpack.core.derivatives.affine import input_factor, mean_square, with_one
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.engine import call_products, sources
from backpack.core.engine.extracted import (
    ARRIVED,
    GRAMS,
    IN_BASES,
    INPUT_FACTORS,
    JOINT_EIGEN_SQUARES,
    JOINT_FACTORS,
    OF_INPUTS,
    Bases,
    add,
    merge_groups,
)
from backpack.core.engine.factored import FactoredGrad
from backpack.core.engine.factors import Factor
from backpack.core.lazy import lazy
from backpack.core.record.context import Context, context_of
from backpack.core.record.layout import Owners
from backpack.core.record.module_state import describe
from backpack.core.record.shards import KNOWN, home, shard_of
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows
from backpack.core.types import Extension, Save
from backpack.utils.kroneckers import eigh_semidefinite

OWN_REDUCTIONS = fast.path(
    "own reductions", "Rules reduce individual products that nobody wants to see."
)
NORMS_OF_USES = fast.path(
    "norms of several uses", "Norms of a sum follow from norms and inner products of its terms."
)


@dataclass
class Use:
    """One use of a parameter in a reached call, and the columns at the call's outputs.

    Attributes:
        call: The call.
        name: The parameter's name there.
        factor: Columns at the first output that has any.
        rows: Rows of the call that the columns hold.
        mats: Columns at each output, None for zero. Default: that of the only output.
        c: What the rule sees of the call.
    """

    call: Visit
    name: str
    factor: Factor
    rows: Rows
    mats: Sequence[Tensor | None] = ()

    def of(self, name: str) -> Use:
        """Return the use of another parameter of the call, with the same columns."""
        use = Use(self.call, name, self.factor, self.rows, self.mats)
        use.c = self.c
        return use

    @property
    def derivatives(self) -> BaseDerivatives:
        """Derivatives of the module."""
        return self.call.derivatives

    @lazy
    def c(self) -> Context:
        """What the rule sees of the call."""
        return context_of(self.call, self.rows)

    @lazy
    def there(self) -> Tensor | None:
        """Which rows there are, ``[N, R/N]``; None for all, as where samples have equally many."""
        place = self.call.place_out(0)
        owners = None if place is None else place.owners
        if owners is None or owners.is_even or not owners.numbers:
            return None
        found = torch.zeros(owners.rows, dtype=torch.bool)
        found[owners.places] = True
        found = self.c.select(found).reshape(-1, owners.rows // owners.samples)
        return found.to(self.factor.mat.device) if found.any() else None

    def there_in(self, num_n: int) -> Tensor | None:
        """Return :attr:`there`, but of a network whose rows are N samples."""
        return None if self.there is None or len(self.there) != num_n else self.there

    @lazy
    def of_rows_there(self) -> Context:
        """What the rule sees of the rows that there are: none that was added to some samples."""
        if self.there is None:
            return self.c
        numbers = self.c.numbers(len(self.c.output))
        return self.c.at([numbers[i] for i in self.there.flatten().nonzero()[:, 0].tolist()])

    @property
    def has_kronecker_factors(self) -> bool:
        """Whether the derivatives know Kronecker factors, not just the block."""
        if self.call.is_of_copies:
            return False
        return self.derivatives.has_kronecker_factors(self.c, self.name)

    @property
    def of_all(self) -> dict[Parameter, list[Use]]:
        """The uses of all trained parameters of the call, with the same columns."""
        uses: dict[Parameter, list[Use]] = {}
        for name, p in self.call.trained.items():
            uses.setdefault(p, []).append(self.of(name))  # a module may have it under two names
        return uses

    def apply(self, method: str, *arguments: Any) -> Any:
        """Call a method of the derivatives for this use."""
        call, mats = self.call, self.mats or [self.factor.mat]
        if call.moves_no_columns and not call.views:  # as a rule: see call_products.param
            at_outputs = mats[0] if len(mats) == 1 else [*mats]
            return getattr(call.derivatives, method)(self.c, self.name, at_outputs, *arguments)
        return call_products.param(self.c, method, self.name, mats, *arguments)

    def input_factors(
        self, num_n: int, approximation: str | None, joint: bool = False, max_size: float = inf
    ) -> list[Tensor]:
        """Kronecker factors of the call's input (``joint``: and its bias), averages over N samples.

        Each has one or several rows of the call. Of factors that are larger than ``max_size``,
        there is the diagonal ``[I]`` alone.
        """
        call, rule = self.call, self.call.derivatives
        if call.is_unbatched and call.is_of_copies:  # the block stands for them
            return []
        there = None if call.samples_come_first else self.there_in(num_n)
        c = self.c if there is None else self.of_rows_there
        if joint:
            factors = [rule.kron_joint_input(c, approximation, max_size)]
        else:
            factors = rule.kron_inputs_up_to(c, self.name, approximation, max_size)
        count = self.factor.mat.shape[1] if there is None else int(there.sum())
        if approximation is None and count != num_n:
            return [f * (count / max(num_n, 1)) for f in factors]
        return factors

    def sums_of_inputs(self, num_n: int, joint: bool) -> tuple[Tensor, Tensor] | None:
        """Sum over its positions what a parameter is multiplied with in each of N samples.

        Returns:
            ``[N, G, I]`` for G groups that share the factor ``[I, I]``, and the number of positions
            of each sample, ``[N, 1, 1]``; None for a bias.
        """
        there = self.there_in(num_n)
        c, count = (self.c, num_n) if there is None else (self.of_rows_there, int(there.sum()))
        means = self.derivatives.kron_means(c, self.name, count)
        if means is None:
            return None
        sums = (with_one(means) if joint else means) * (self.num_positions() / count)
        numbers = sums.new_full((count, 1, 1), self.num_positions() / count)
        if there is None:
            return sums, numbers
        samples, zeros = there.nonzero()[:, 0], sums.new_zeros(num_n, 1, 1)
        of_all = zeros.expand(num_n, *sums.shape[1:]).index_add(0, samples, sums)
        return of_all, zeros.index_add(0, samples, numbers)

    def num_positions(self) -> int:
        """Return at how many positions of all samples the parameter is used."""
        call, num_rows = self.call, self.factor.mat.shape[1]
        num_rows = num_rows if self.there is None else int(self.there.sum())
        if not self.has_kronecker_factors:
            return num_rows
        inputs = self.derivatives.affine_inputs(self.of_rows_there, self.name)
        if inputs:  # of one part, since there are Kronecker factors
            return num_rows if inputs[0] is None else inputs[0].shape[:-1].numel()
        shapes = [call_products.shape_out(call, i, num_rows) for i in range(len(call.outputs))]
        zeros = [self.factor.mat.new_zeros(()).expand(1, *shape) for shape in shapes]
        return call_products.param(self.c, "kron_rows", self.name, zeros, "expand").shape[1]


# A parameter whose rule knows no Kronecker factors has its whole block up to this many entries.
# Beyond, it has one factor for each of its axes.
WHOLE_BLOCK_ENTRIES = 2**11


def axis_factors(marginals: Sequence[Tensor]) -> list[Tensor]:
    """Turn marginals into Kronecker factors of equal weight.

    ``M_k = sum over v, n of G_(k) G_(k)ᵀ`` (the unfolding of individual products G along axis k) is
    the partial trace of the block. If the block is a Kronecker product, it is
    ``M_1 ⊗ … ⊗ M_m / tr^(m-1)``, with ``tr`` the trace of the block; in any case, that has its
    trace. Both are ``[d_k, d_k]`` (or its diagonal) for each axis that is longer than 1.
    """
    count, first = len(marginals), marginals[0]
    trace = first.sum() if first.dim() == 1 else first.trace()
    scale = torch.where(trace > 0, trace.clamp(min=torch.finfo(trace.dtype).tiny), 1)
    return [m / scale ** ((count - 1) / count) for m in marginals]


class Products:
    """The products of one parameter with columns, computed on demand and once.

    Uses of a reused or tied parameter are summed before anything nonlinear. With a single use,
    the derivatives' own reductions avoid the individual products unless someone wants those.

    Attributes:
        parameter: The parameter.
        unit: What it is sharded together with, if it is.
        uses: Its uses.
        num_samples: Number of samples N that are looked at.
        wanted: All quantities that will be asked for: a cheaper one follows from a dearer one.
        terms: If the network mixes samples, the columns of this many terms of the loss travel
            separately, each through the whole batch: ``V = columns · terms``.
        bases: The bases of sums of squares, if they are not those of these products alone.
        max_factor_size: Of Kronecker factors that are larger there is the diagonal alone.
        counted: At which rows of all samples the loss counts a target, ``[N, R]``, and whose they
            are, if they were chosen. None for all of them.
    """

    def __init__(
        self,
        parameter: Parameter,
        uses: list[Use],
        wanted: Collection[str] = (),
        terms: int | None = None,
        bases: Bases | None = None,
        max_factor_size: float = inf,
        counted: tuple[Tensor, Owners | None] | None = None,
    ):
        """Store what is given; compute nothing."""
        self.parameter = parameter
        shard = shard_of(parameter) if KNOWN else None
        self.unit = None if shard is None else shard.group
        self.uses = uses
        self.wanted = wanted
        self.terms = terms
        self.bases = dict(bases or {})
        self.max_factor_size = max_factor_size
        self.counted = counted
        self._values: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._sources: Sequence[sources.Source] = []
        use, *others = uses
        call, mat, rule = use.call, use.factor.mat, use.call.derivatives
        self.num_samples = use.factor.groups
        for other in others:
            self.num_samples = min(self.num_samples, other.factor.groups)
        follows = rule is not None and rule.batch_axis is BatchAxis.FOLLOWED
        # whether the derivatives can reduce on their own: one use, every row a sample, in order
        self._reduces = (
            not others
            and terms is None
            and use.factor.groups == mat.shape[1]
            and not (call.is_unbatched and call.is_of_copies)
            and not (follows and call.scattered_rows())
        )
        self.input_first = rule is not None and rule.kronecker_input_first
        if "factored" in self.wanted:
            self._find_sources()

    def _find_sources(self) -> None:
        """Find what individual products are made of, unless that is more than they are."""
        count, columns = self.num_samples, len(self.uses[0].factor.mat)
        found = [
            self._source(use)
            for use in self.uses
            # where samples merge, each has columns of its own
            if use.factor.groups == count or use.factor.adds_up
        ]
        known = [one for one in found if one is not None]
        entries = sum(map(sources.entries_of, known))
        are_all = self.terms is None and len(known) == len(self.uses)
        if not are_all or entries >= columns * count * self.parameter.numel():
            self.wanted = {*self.wanted, "individual"}
        elif "individual" not in self.wanted:
            self._sources = known

    def _source(self, use: Use) -> sources.Source | None:
        """Return what individual gradients of a use are made of; None if they are made at once."""
        mats = use.mats or [use.factor.mat]
        return sources.source(use.c, use.name, mats, self.num_samples)

    def __getitem__(self, name: str) -> Any:
        """Compute a quantity (or take it from memory)."""
        values = self._values
        if name in values:
            return values[name]
        if not self.uses:
            raise LookupError(
                f"An extension reads {name!r}, which is not among its 'needs' (or 'reads'). Name "
                "all that 'extract' reads there."
            )
        is_alone = self._reduces and "individual" not in values
        if is_alone and name in reductions.NAMES and OWN_REDUCTIONS.is_on:
            wanted = {name} | reductions.NAMES.intersection(self.wanted) - values.keys()
            (use,) = self.uses
            values |= use.apply("reduced", wanted, use.factor.weights)
        if name not in values:
            if name in IN_BASES:
                values[name] = self._square_in_bases(name)
            elif name in OF_INPUTS:
                values[name] = self._of_inputs(*OF_INPUTS[name])
            else:
                values[name] = getattr(self, f"_{name}")()
        return values[name]

    @property
    def _is_direct(self) -> bool:
        """Whether the derivatives reduce on their own, as ``__getitem__`` asks without a call."""
        return self._reduces and "individual" not in self._values and OWN_REDUCTIONS.is_on

    def take(self, name: str) -> Any:
        """Return a quantity as a tensor that nobody else holds."""
        value = self[name]
        if name in self._taken:
            return [v.clone() for v in value] if isinstance(value, list) else value.clone()
        self._taken.add(name)
        return value

    def extract(self, exts: Sequence[Extension], save: Save) -> None:
        """Save what extensions make of the quantities, which are dropped before.

        So a value that is no view of something else is saved without a copy.
        """
        if save.is_waiting and save.defers(self, exts):
            return
        values = [
            ext.extract(self) if ext.overrides_extract else self.take(ext.needs[0]) for ext in exts
        ]
        self._values.clear()
        write = save.write
        for ext in exts:
            write(self.parameter, ext, values)

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Set quantities that were put together from slices."""
        self._values |= values

    def settle(self, names: Collection[str]) -> dict[str, Any]:
        """Return quantities, and forget where they come from."""
        values = {name: self[name] for name in names}
        if not set(JOINT_FACTORS.values()).isdisjoint(names):
            _ = self.partner, self._is_joined_bias  # before the uses are gone
        self._values.clear()
        self.uses = []
        return values

    def resume(self, values: Mapping[str, Any], num_samples: int) -> None:
        """Take up quantities after :meth:`settle`, of this number of samples."""
        self._values, self._taken = dict(values), set()
        self.num_samples = num_samples

    def count_of(self, name: str) -> int:
        """Return how many samples (or positions of them) a quantity is the average of."""
        approximation, _ = OF_INPUTS.get(name, (None, False))
        return self.weight_of_inputs(approximation)

    def weight_of_inputs(self, approximation: str | None) -> int:
        """Return of how many samples (positions) the factor of the inputs is the average."""
        if approximation != "expand" or self._without_factors is not None:
            return self.num_samples
        if self._has_positions_apart:
            rows = self._rows_that_count()
            return sum(map(len, rows)) if rows else self.num_samples
        return sum(use.num_positions() for use in self.uses)

    def _align(self, values: list[tuple[Tensor, Use]]) -> Tensor:
        """Sum the uses' ``[V, groups, *]`` over the uses, after merging groups to the fewest."""
        fewest = min(use.factor.groups for _, use in values)
        return reduce(add, [merge_groups(v, 1, fewest, use.factor.adds_up) for v, use in values])

    def _individual(self) -> Tensor:
        values = []
        for use in self.uses:
            rows, groups = use.factor.mat.shape[1], use.factor.groups
            if groups == 1 and rows > 1:
                value = use.apply("param_vjp_sum").unsqueeze(1)
            else:
                value = use.apply("param_vjp")
                if groups != rows:
                    value = value.unflatten(1, (groups, -1)).sum(2)
            values.append((value, use))
        products = self._align(values)
        if self.terms is not None:
            products = products.reshape(-1, self.terms, *products.shape[2:])
        return products

    def _factored(self) -> FactoredGrad:
        p, values = self.parameter, self._sources
        if values:
            columns, count = len(self.uses[0].factor.mat), self.num_samples
        else:
            columns, count = self["individual"].shape[:2]
            values = [sources.Dense(self["individual"].flatten(0, 1))]
        is_precise = p.dtype in reductions.PRECISE and "square_norm" in self.wanted
        known = is_precise and columns == 1 and (self._is_direct or not self._sources)
        norms = self["square_norm"] if known else None
        label = " + ".join(f"'{use.name}' of {describe(use.call.module)}" for use in self.uses)
        shape = (columns * count, *p.shape)
        return FactoredGrad(values, shape, p.dtype, label, norms, columns)

    def _gradient(self) -> Tensor:
        if "individual" in self._values or "individual" in self.wanted:
            return self["individual"].sum((0, 1))
        sums = [use.apply("param_vjp_sum").sum(0) for use in self.uses]
        return reduce(add, sums)

    def _batch_square(self) -> Tensor:
        return reductions.sum_of_squares(self["individual"], self.uses[0].factor.weights)

    def _square(self) -> Tensor:
        return self["batch_square"].sum(0)

    def _square_norm(self) -> Tensor:
        if "batch_square" in self.wanted:
            squares = self["batch_square"]
            return squares.reshape(len(squares), -1).sum(1)
        norms = self._square_norm_of_uses()
        if norms is not None:
            return norms
        squares = self["individual"].square()
        return squares.reshape(*squares.shape[:2], -1).sum((0, 2))

    def _square_norm_of_uses(self) -> Tensor | None:
        """Return the squared norms by Gram matrices of all uses; None if products are there, too.

        So a weight that an embedding shares with an output layer needs no ``[N, *p]``. Uses of
        other kinds may nearly cancel (two branches that are compared): they are added up.
        """
        if (
            not NORMS_OF_USES.is_on
            or len(self.uses) == 1
            or self.terms is not None
            or "individual" in {*self.wanted, *self._values}
            or any(len(u.factor.mat) > 1 or u.factor.weights is not None for u in self.uses)
        ):
            return None
        found = [self._source(use) for use in self.uses]
        known = [one for one in found if one is not None]
        if len(known) < len(found) or not any(isinstance(s, sources.Cotangents) for s in known):
            return None
        return sources.square_norms_of_sum(known)

    def kronecker_factors(
        self, approximation: str | None = None, first: str | None = None, joint: bool = False
    ) -> list[Tensor]:
        """Return the Kronecker factors, in the order of the parameter's axes.

        Args:
            approximation: How positions are treated.
            first: Name of the factor that carries the scale of the loss. Default: a Gram matrix.
            joint: Join a weight with its bias, which has none itself, then.
        """
        if joint and self._is_joined_bias:
            return []
        names = JOINT_FACTORS if joint else INPUT_FACTORS
        return self._factors(first or GRAMS[approximation], names[approximation], self.take)

    @lazy
    def _is_joined_bias(self) -> bool:
        """Whether this is a bias that has its factors together with the weight."""
        return self.is_joined and self.uses[0].name == "bias"

    def _factors(self, first: str, of_inputs: str, get: Callable[[str], Any]) -> list[Tensor]:
        gram = get(first)
        if isinstance(gram, list):
            return axis_factors(gram)
        inputs = get(of_inputs)
        return [*inputs, gram] if self.input_first else [gram, *inputs]

    def eigenbases(self, name: str) -> Sequence[Tensor]:
        """Return the eigenvectors of the Kronecker factors that squares are along.

        Results do not vary with them. A bias that is joined with its weight has none.
        """
        if name not in self.bases:
            with torch.no_grad():
                is_left_out = name in JOINT_EIGEN_SQUARES.values() and self._is_joined_bias
                factors = [] if is_left_out else self._factors(*IN_BASES[name], self.__getitem__)
                self.bases[name] = [eigh_semidefinite(f)[1] for f in factors]
        return self.bases[name]

    @lazy
    def is_joined(self) -> bool:
        """Whether this is a weight or a bias that have Kronecker factors together.

        Raises:
            NotImplementedError: If a weight has Kronecker factors and a bias that does not join it.
        """
        pair = {"weight", "bias"}
        joining = [
            u
            for u in self.uses
            if u.name in pair and pair <= u.call.trained.keys() and u.derivatives.joins_bias
            if not u.call.is_of_copies
        ]
        if joining and len(self.uses) == 1:
            return True
        use = joining[0] if joining else self.uses[0]
        biases = [name for name in use.call.trained if "bias" in name]
        if joining or (biases and use.name not in biases and self[INPUT_FACTORS[None]]):
            others = ["weight"] if use.name == "bias" else biases
            places = ", ".join(f"'{u.name}' of {describe(u.call.module)}" for u in self.uses)
            raise NotImplementedError(
                f"joint_bias=True: '{use.name}' of {describe(use.call.module)}, "
                f"{list(self.parameter.shape)}, has no Kronecker factors with {', '.join(others)} "
                f"(number of uses: {len(self.uses)}: {places}). Linear layers and convolutions "
                "whose weight and bias are used once have. Use joint_bias=False."
            )
        return False

    @lazy
    def partner(self) -> Parameter | None:
        """The bias of a weight (or the weight of a bias) that joins it; None if there is none."""
        if not self.is_joined:
            return None
        other = "weight" if self._is_joined_bias else "bias"
        return home(self.uses[0].call.trained[other])

    @lazy
    def swaps_axes(self) -> bool:
        """Whether the Kronecker factors are those of ``p.transpose(0, 1)``."""
        use, p = self.uses[0], self.parameter
        swaps = use.derivatives.kronecker_swaps_axes and p.dim() > 1
        return swaps and self._without_factors is None and use.has_kronecker_factors

    def _square_in_bases(self, name: str) -> Tensor:
        """Sum the squares along eigenvectors; none for a bias that is joined with its weight."""
        joint = name in JOINT_EIGEN_SQUARES.values() and self.is_joined
        if joint and self._is_joined_bias:
            return self.parameter.new_zeros(0)
        bases, use = self.eigenbases(name), self.uses[0]
        if self._is_direct:
            return use.apply("square_in_bases", bases, use.factor.weights, joint)
        products = self["individual"]
        if joint:
            bias = Products(use.call.trained["bias"], [use.of("bias")], terms=self.terms)
            products = use.derivatives.joined(products, bias["individual"])
        turned = reductions.in_bases(products, bases, self.swaps_axes)
        return reductions.of_products(turned, {"square"}, use.factor.weights)["square"]

    def _identity(self) -> Any:
        """Return the identity of the size of a Gram matrix."""
        p = self.parameter
        if self._without_factors == "_marginals":  # those of the identity
            return [self._eye(d) * (p.numel() / d) for d in p.shape if d > 1]
        inputs = self[INPUT_FACTORS[None]]
        return self._eye(p.numel() // prod(map(len, inputs)))

    def _eye(self, size: int) -> Tensor:
        """Return the identity ``[D, D]``, or its diagonal ``[D]``."""
        ones = torch.ones(size, dtype=self.parameter.dtype, device=self.parameter.device)
        return ones if size > self.max_factor_size else ones.diag()

    def _gram_of_rows(self, rows: Tensor, count: float) -> Tensor:
        """Sum outer products of rows, divided by a count: ``[R, D] -> [D, D]``, or ``[D]``."""
        if rows.shape[1] <= self.max_factor_size:
            return reductions.gram(rows, count)
        return mean_square(rows, [0], count)

    @property
    def _is_small(self) -> bool:
        """Whether the whole block may stand for the Kronecker factors."""
        p = self.parameter
        return p.numel() <= WHOLE_BLOCK_ENTRIES or sum([size > 1 for size in p.shape]) < 2

    @property
    def _without_factors(self) -> str | None:
        """Name what stands for the Kronecker factors if the rules of all uses know none in common.

        The block itself or, if that is too large, its marginals.
        """
        if self._is_small and len(self.uses) == 1:
            return None
        return self._instead_of_factors

    @lazy
    def _instead_of_factors(self) -> str | None:
        facts = {
            (
                u.has_kronecker_factors,
                u.derivatives.kronecker_input_first,
                u.derivatives.kronecker_swaps_axes,
            )
            for u in self.uses
        }
        (is_known, *_), *others = facts
        if self._is_small:
            return "_block" if others else None
        return None if is_known and not others else "_marginals"

    def _block(self) -> Tensor:
        """Sum the outer products of the individual products: the block itself."""
        vectors = self["individual"].flatten(0, 1).reshape(-1, self.parameter.numel())
        return self._gram_of_rows(vectors, 1)

    def _marginals(self) -> list[Tensor]:
        """Sum the outer products of the individual products' unfoldings along each axis."""
        stacked = self["individual"].flatten(0, 1)
        axes = [i for i, size in enumerate(stacked.shape) if i > 0 and size > 1]
        return [self._marginal(stacked, axis) for axis in axes]

    def _marginal(self, stacked: Tensor, axis: int) -> Tensor:
        """Return ``[D, D]``, or ``[D]``, for one axis of individual products ``[V·N, *p]``."""
        size = stacked.shape[axis]
        if size > self.max_factor_size:
            others = [i for i in range(stacked.dim() - 1) if i != axis - 1]
            return reduce(add, [mean_square(each, others, 1) for each in stacked])
        if axis == stacked.dim() - 1:
            rows = stacked.reshape(-1, size)
            return rows.mT @ rows
        unfolded = stacked.movedim(axis, 0).flatten(1)
        return unfolded @ unfolded.mT

    def _gram_expand(self) -> Any:
        return self._shared("gram_expand", self._sum_of_grams)

    def _sum_of_grams(self) -> Tensor:
        """Sum the outer products of the Kronecker rows, every position and use on its own."""
        each = [use.apply("kron_rows", "expand") for use in self.uses]
        grams = [self._gram_of_rows(rows.flatten(0, 2), rows.shape[2]) for rows in each]
        return reduce(add, grams)

    def _gram(self) -> Any:
        return self._shared("gram", self._gram_of_sums)

    def _gram_of_sums(self) -> Tensor:
        """Sum the outer products of the Kronecker rows; positions and uses are summed before."""
        values = []
        for use in self.uses:
            value = use.apply("kron_rows")
            groups = use.factor.groups
            # A network that mixes samples has the factors of a Kronecker product treat the rows of
            # a column as samples; a full block sums them first, and is exact.
            as_samples = self.terms is not None and bool(self["input_factors"])
            if groups != value.shape[1] and not as_samples:
                value = value.unflatten(1, (groups, -1)).sum(2)
            values.append((value, use))
        rows = values[0][0] if len(values) == 1 else self._align(values)  # [V, N, G, O]
        return self._gram_of_rows(rows.flatten(0, 2), rows.shape[2])

    def _shared(self, name: str, compute: Callable[[], Tensor]) -> Any:
        """Compute a Gram matrix, unless all parameters of a call have it in common and it is there.

        Without Kronecker factors, return what stands for them.
        """
        if self._without_factors is not None:
            return getattr(self, self._without_factors)()
        use, *others = self.uses
        rule: Any = use.call.derivatives
        in_common = rule.kronecker_rows_are_shared and self.terms is None
        shared = use.c.memo
        if others or not in_common or shared is None or use.call.is_unbatched:
            return compute()
        if name not in shared:
            shared[name] = compute()
        elif len(use.call.trained) == 2:  # nobody else will ask
            return shared.pop(name)
        value = shared[name]
        if value.nbytes < memory.LARGE or torch.is_grad_enabled():
            return value.clone()
        return memory.empty(value.shape, value).copy_(value)

    @lazy
    def _has_positions_apart(self) -> bool:
        """Whether positions may be left out of the factor of the inputs."""
        apart = all(u.derivatives.has_positions_apart for u in self.uses)
        known = all(u.has_kronecker_factors for u in self.uses)
        return apart and known and self.terms is None and self._without_factors is None

    def _rows_that_count(self) -> list[Tensor]:
        """Return what a parameter is multiplied with, ``[R, I]`` of each use; none for a bias.

        Rows are left out whose target the loss ignores, unless something arrives from others.
        """
        rows = []
        for use in self.uses:
            rule: Any = use.call.derivatives
            c = use.of_rows_there if self.counted is None else use.c
            (x,) = rule.affine_inputs(c, use.name)
            if x is not None:
                rows.append(x.reshape(-1, x.shape[-1]))
        if rows and self.counted is not None:
            counts = [len(x) // len(self[ARRIVED]) for x in rows]
            if sum(counts) != self[ARRIVED].shape[1]:  # losses that reach some of the uses each
                raise NotImplementedError(
                    f"approximation='expand': '{self.uses[0].name}' of "
                    f"{describe(self.uses[0].call.module)} is used {len(self.uses)} times, for "
                    "several losses that ignore targets. Use one loss for all of them, or "
                    "approximation=None."
                )
            masks = self[ARRIVED].split(counts, 1)
            triples = zip(self.uses, rows, masks, strict=True)
            rows = [x[self._counts(use, mask > 0)] for use, x, mask in triples]
        return rows

    def _counts(self, use: Use, arrived: Tensor) -> Tensor:
        """Tell which positions of a use count, ``[N, T] -> [N·T]``; refuse to guess."""
        assert self.counted is not None
        at, owners = self.counted
        at = at.reshape(len(arrived), -1).to(arrived.device)
        place = use.call.place_out(0)
        number = at.sum(1)
        if at.shape == arrived.shape and (owners is None or (place and place.owners == owners)):
            # Something else may arrive at what others look at; else, they are in another order.
            more, less = (arrived & ~at).sum(1), (at & ~arrived).sum(1)
            is_known, found = (more == 0) | (less == 0) | (more > less), arrived | at
        elif owners is not None:  # how many is known, not which
            is_known, found = (number == 0) | (number == arrived.sum(1)), arrived
        else:
            is_known, found = (number == 0) | at.all(1), arrived | at.any(1, keepdim=True)
        if not (is_known | arrived.all(1)).all():
            raise ValueError(
                f"approximation='expand': '{self.uses[0].name}' of "
                f"{describe(self.uses[0].call.module)} is used at {arrived.shape[1]} positions "
                f"of a sample, and the loss has {at.shape[1]} targets of it. It ignores "
                "some of them, and nothing arrives at some of the positions: whether they are "
                "those that it ignores is not known. Use approximation=None or 'reduce'."
            )
        found = found.flatten()
        if use.there is None:
            return found
        return found & use.there.flatten().repeat_interleave(len(found) // use.there.numel())

    def _arrived(self) -> Tensor:
        """Tell where something arrives, position by position of each sample and use."""
        if not self._has_positions_apart:
            return self.parameter.new_ones(self.num_samples, 1)
        each = []
        for use in self.uses:
            rows = use.apply("kron_rows", "expand")  # [V, N·T, 1, O]
            arrived = (rows != 0).flatten(2).any(2).sum(0).to(rows.dtype)
            each.append(arrived.unflatten(0, (self.num_samples, -1)))
        return torch.cat(each, 1)

    def _of_inputs(self, approximation: str | None, joint: bool) -> list[Tensor]:
        """Sum the Kronecker factors of the inputs over the uses (expand: average over positions).

        Of a network that mixes samples, the rows of a column are the samples.
        """
        joint = joint and self.is_joined
        if approximation == "expand" and self._has_positions_apart:
            rows = self._rows_that_count()
            rows = list(map(with_one, rows)) if joint else rows
            count = max(1, sum(map(len, rows)))
            return [reduce(add, [self._gram_of_rows(x, count) for x in rows])] if rows else []
        if self._without_factors is not None:
            return []
        first, *others = self.uses
        num_n = self.num_samples if self.terms is None else first.factor.mat.shape[1]
        size = self.max_factor_size
        if approximation == "reduce" and first.has_kronecker_factors:
            is_several = bool(others) or first.factor.mat.shape[1] > num_n
            if is_several or first.there_in(num_n) is not None:
                found = [use.sums_of_inputs(num_n, joint) for use in self.uses]
                known = [of_use for of_use in found if of_use is not None]
                if not known:
                    return []
                sums, numbers = (reduce(add, parts) for parts in zip(*known, strict=True))
                return [input_factor((sums / numbers.clamp(min=1)).flatten(0, 1), None, size)]
        each = [use.input_factors(num_n, approximation, joint, size) for use in self.uses]
        if not others:
            return each[0]
        if approximation == "expand":
            counts = [use.num_positions() for use in self.uses]
            parts = [count / sum(counts) for count in counts]
            each = [[f * part for f in one] for one, part in zip(each, parts, strict=True)]
        return [reduce(add, factors) for factors in zip(*each, strict=True)]


def extract(
    uses_of: Mapping[Parameter, list[Use]],
    exts: Sequence[Extension],
    wanted: Collection[str],
    save: Save,
    terms: int | None = None,
    bases: Mapping[Parameter, Bases] | None = None,
    *of_factors: Any,
    gradients: dict[Parameter, Tensor] | None = None,
    owed: Collection[Parameter] = (),
) -> None:
    """Save what extensions make of the products of parameters, one after the other.

    The gradients of those in ``owed``, which somebody else wants, go to ``gradients``.
    """
    for p, uses in uses_of.items():
        names = {*wanted, "gradient"} if p in owed else wanted
        own = None if bases is None else bases.get(p)
        products = Products(p, uses, names, terms, own, *of_factors)
        if gradients is not None and p in owed:
            gradients[p] = products["gradient"]
        products.extract(exts, save)

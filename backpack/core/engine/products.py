"""What can be extracted of a parameter from the columns that arrive at its modules' outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import inf, lcm, prod
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core import fast, memory
from backpack.core.derivatives import reductions
from backpack.core.derivatives.affine import with_one
from backpack.core.derivatives.reductions import gram
from backpack.core.engine import call_products, extracted, sources
from backpack.core.engine.blocks import WHOLE_BLOCK_ENTRIES, axis_factors, block, marginals
from backpack.core.engine.factored import FactoredGrad
from backpack.core.engine.factors import merge_groups
from backpack.core.engine.uses import (
    Use,
    arrived,
    factor_of_means,
    num_positions,
    rows_that_count,
    split_groups,
)
from backpack.core.lazy import lazy
from backpack.core.record.layout import Owners
from backpack.core.record.module_state import describe
from backpack.core.record.shards import KNOWN, home, shard_of
from backpack.core.types import Extension, Save, Write
from backpack.utils.kroneckers import eigh_semidefinite

OWN_REDUCTIONS = fast.path(
    "own reductions", "Rules reduce individual products that nobody wants to see."
)
NORMS_OF_USES = fast.path(
    "norms of several uses", "Norms of a sum follow from norms and inner products of its terms."
)


def _apply(use: Use, method: str, *arguments: Any) -> Any:
    """Call a method of the rule for a use of a parameter."""
    call, mats = use.call, use.mats
    if call.moves_no_columns and not call.views:  # as a rule: see call_products.param
        at_outputs = mats[0] if len(mats) == 1 else [*mats]
        return getattr(call.derivatives, method)(use.c, use.name, at_outputs, *arguments)
    return call_products.param(use.c, method, use.name, mats, *arguments)


@dataclass(eq=False)
class Products:
    """The products of one parameter with columns, computed on demand and once.

    Uses of a reused or tied parameter are summed before anything nonlinear. With a single use,
    the derivatives' own reductions avoid the individual products unless someone wants those.
    """

    parameter: Parameter
    uses: list[Use]
    # all that will be asked for: a cheaper quantity follows from a dearer one
    wanted: Collection[str] = ()
    # if the network mixes samples, the columns of this many terms of the loss travel separately,
    # each through the whole batch: V = columns · terms
    terms: int | None = None
    # of sums of squares, if they are not those of these products alone
    bases: extracted.Bases = field(default_factory=dict)
    # of Kronecker factors that are larger there is the diagonal alone
    max_factor_size: float = inf
    # at which rows of all samples the loss counts a target, [N, R], and whose they are, if they
    # were chosen; None for all of them
    counted: tuple[Tensor, Owners | None] | None = None
    # the uses that decide what the Kronecker factors are: those of all sources
    deciding: list[Use] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Find out who makes the products; compute nothing."""
        shard = shard_of(self.parameter) if KNOWN else None
        self.unit = None if shard is None else shard.group  # what it is sharded together with
        self.deciding = self.deciding or self.uses
        self._values: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._sources: Sequence[sources.Source] = []
        use, *others = self.uses
        call, mat, rule = use.call, use.factor.mat, use.call.derivatives
        self.num_samples = use.factor.groups  # that are looked at
        for other in others:
            self.num_samples = min(self.num_samples, other.factor.groups)
        # how many samples averages are of: if the network mixes them, the rows of a column
        self._averaged = self.num_samples
        if self.terms is not None:
            self._averaged = min(u.factor.mat.shape[1] for u in self.uses)
        follows = rule is not None and rule.follows_samples
        # whether the derivatives can reduce on their own: one use, every row a sample, in order
        self._reduces = (
            not others
            and self.terms is None
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
        # where samples merge, each has columns of its own
        fitting = [u for u in self.uses if u.factor.groups == count or u.factor.adds_up]
        known = self._known_sources(fitting)
        entries = sum(map(sources.entries_of, known))
        are_all = self.terms is None and len(known) == len(self.uses)
        if not are_all or entries >= columns * count * self.parameter.numel():
            self.wanted = {*self.wanted, "individual"}
        elif "individual" not in self.wanted:
            self._sources = known

    def _known_sources(self, uses: Sequence[Use]) -> list[sources.Source]:
        """Return what individual gradients of uses are made of, but for those made at once."""
        found = [sources.source(u.c, u.name, u.mats, self.num_samples) for u in uses]
        return [one for one in found if one is not None]

    def __getitem__(self, name: str) -> Any:
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
            values |= _apply(use, "reduced", wanted, use.factor.weights)
        if name not in values:
            if name in extracted.IN_BASES:
                values[name] = self._square_in_bases(name)
            elif name in extracted.OF_INPUTS:
                values[name] = self._of_inputs(*extracted.OF_INPUTS[name])
            elif name in extracted.GRAMS.values():
                values[name] = self._gram(name)
            elif name in reductions.NAMES and name != "individual":
                values |= self._reduced(name)
            else:
                values[name] = getattr(self, f"_{name}")()
        return values[name]

    @property
    def _is_direct(self) -> bool:
        """Whether the derivatives reduce on their own, as ``__getitem__`` asks without a call."""
        return self._reduces and "individual" not in self._values and OWN_REDUCTIONS.is_on

    @property
    def merged(self) -> int:
        """How many columns one of the source has become, see :class:`.factors.Factor`."""
        factor = self.uses[0].factor
        is_one = factor.adds_up or self.terms is not None
        return 1 if is_one else factor.merged * factor.groups // self.num_samples

    def take(self, name: str) -> Any:
        """Return a quantity as a tensor that nobody else holds."""
        value = self[name]
        if name in self._taken:
            return [v.clone() for v in value] if isinstance(value, list) else value.clone()
        self._taken.add(name)
        return value

    def extract(self, exts: Sequence[Extension], save: Save) -> None:
        """Write what extensions make of the quantities, unless other parts of the batch follow."""
        if not (save.is_waiting and save.defers(self, exts)):
            self.write(exts, save.write)

    def write(self, exts: Sequence[Extension], write: Write) -> None:
        """Write what extensions make of the quantities, which are dropped before.

        So a value that is no view of something else is saved without a copy.
        """
        values = [
            ext.extract(self) if ext.overrides_extract else self.take(ext.needs[0]) for ext in exts
        ]
        self._values.clear()
        self._taken.clear()
        for ext in exts:
            write(self.parameter, ext, values)

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Set quantities that were put together from slices."""
        self._values |= values

    def settle(self, names: Collection[str]) -> dict[str, Any]:
        """Return quantities, and forget where they come from."""
        values = {name: self.take(name) for name in names}
        if not set(extracted.JOINT_FACTORS.values()).isdisjoint(names):
            _ = self.partner, self._is_joined_bias  # before the uses are gone
        if not extracted.KRONECKER.isdisjoint(names):
            _ = self.swaps_axes
        self._values.clear()
        self._taken.clear()
        self.uses = self.deciding = []
        return values

    def count_of(self, name: str) -> int:
        """Return how many samples (or positions of them) a quantity is the average of."""
        approximation, _ = extracted.OF_INPUTS.get(name, (None, False))
        if approximation != "expand" or self._without_factors is not None:
            return self._averaged
        if self._has_positions_apart:
            rows = self._rows_that_count()
            return sum(map(len, rows)) if rows else self.num_samples
        return sum(map(num_positions, self.uses))

    def _of_samples(self, method: str, rows_are_samples: bool = False) -> Tensor:
        """Sum what rules return over the rows of a sample, and over uses: ``[V, N, *]``."""
        values, is_several = [], len(self.uses) > 1
        fewest = min([use.factor.groups for use in self.uses]) if is_several else 0
        for use in self.uses:
            groups = use.factor.groups
            if method == "param_vjp" and groups == 1 and use.factor.mat.shape[1] > 1:
                value = _apply(use, "param_vjp_sum").unsqueeze(1)
            else:
                value = _apply(use, method)
            if groups != value.shape[1] and not rows_are_samples:
                value = value.unflatten(1, (groups, -1)).sum(2)
            if is_several:  # which may have samples that others have merged
                if use.factor.adds_up:
                    value = value.unflatten(1, (fewest, -1)).sum(2)
                else:
                    value = merge_groups(value, fewest, use.factor.merged)
            values.append(value)
        if is_several and method == "kron_rows":  # [V, N, G, O]
            num_groups = lcm(*[value.shape[2] for value in values])
            values = [split_groups(value, num_groups) for value in values]
        return reduce(add, values)

    def _individual(self) -> Tensor:
        products = self._of_samples("param_vjp")
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

    def _reduced(self, name: str) -> dict[str, Tensor]:
        """Reduce the individual products, with all else that is wanted, unless it needs none."""
        has_products = "individual" in self._values or "individual" in self.wanted
        if name == "gradient" and not has_products:
            sums = [_apply(use, "param_vjp_sum").sum(0) for use in self.uses]
            return {name: reduce(add, sums)}
        if name == "square_norm" and not (has_products or "batch_square" in self.wanted):
            norms = self._square_norm_of_uses()
            if norms is not None:
                return {name: norms}
        products, weights = self["individual"], self.uses[0].factor.weights
        wanted = {name} | reductions.NAMES.intersection(self.wanted) - self._values.keys()
        return reductions.of_products(products, wanted, weights)

    def _square_norm_of_uses(self) -> Tensor | None:
        """Return the squared norms by Gram matrices of all uses; None if that is not possible.

        So a weight that an embedding shares with an output layer needs no ``[N, *p]``. Uses of
        other kinds may nearly cancel (two branches that are compared): they are added up.
        """
        if (
            not NORMS_OF_USES.is_on
            or len(self.uses) == 1
            or self.terms is not None
            or any(len(u.factor.mat) > 1 or u.factor.weights is not None for u in self.uses)
        ):
            return None
        known = self._known_sources(self.uses)
        are_all = len(known) == len(self.uses)
        if not (are_all and any(isinstance(one, sources.Cotangents) for one in known)):
            return None
        return sources.square_norms_of_sum(known)

    def kronecker_factors(
        self, approximation: str | None = None, first: str | None = None, joint: bool = False
    ) -> list[Tensor]:
        """Return the Kronecker factors, in the order of the parameter's axes.

        The ``first`` one (default: a Gram matrix) carries the scale of the loss, ``approximation``
        says how positions are treated, and ``joint`` joins a weight with its bias, which has none.
        """
        if joint and self._is_joined_bias:
            return []
        first = first or extracted.GRAMS[approximation]
        names = extracted.JOINT_FACTORS if joint else extracted.INPUT_FACTORS
        return self._factors(first, names[approximation], self.take)

    @lazy
    def _is_joined_bias(self) -> bool:
        """Whether this is a bias that has its factors together with the weight."""
        return self.is_joined and self.uses[0].name == "bias"

    def _factors(self, first: str, of_inputs: str, get: Callable[[str], Any]) -> list[Tensor]:
        scaled = get(first)
        if isinstance(scaled, list):
            return axis_factors(scaled)
        inputs = get(of_inputs)
        return [*inputs, scaled] if self.input_first else [scaled, *inputs]

    def eigenbases(self, name: str) -> Sequence[Tensor]:
        """Return the eigenvectors of Kronecker factors; none of a bias joined with its weight."""
        if name not in self.bases:
            with torch.no_grad():  # results do not vary with them
                joins = name in extracted.JOINT_EIGEN_SQUARES.values() and self._is_joined_bias
                names = extracted.IN_BASES[name]
                factors = [] if joins else self._factors(*names, self.__getitem__)
                self.bases = {**self.bases, name: [eigh_semidefinite(f)[1] for f in factors]}
        return self.bases[name]

    @lazy
    def is_joined(self) -> bool:
        """Whether a weight or bias has Kronecker factors with the other; refuse if only one has."""
        pair = {"weight", "bias"}
        joining = [
            u
            for u in self.uses
            if u.name in pair and pair <= u.call.trained.keys() and u.call.derivatives.joins_bias
            if not u.call.is_of_copies
        ]
        if joining and len(self.uses) == 1:
            return True
        use = joining[0] if joining else self.uses[0]
        biases = [name for name in use.call.trained if "bias" in name]
        if joining or (biases and use.name not in biases and self[extracted.INPUT_FACTORS[None]]):
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
        swaps = use.call.derivatives.kronecker_swaps_axes and p.dim() > 1
        return swaps and self._without_factors is None and use.has_kronecker_factors

    def _square_in_bases(self, name: str) -> Tensor:
        """Sum the squares along eigenvectors; none for a bias that is joined with its weight."""
        joint = name in extracted.JOINT_EIGEN_SQUARES.values() and self.is_joined
        if joint and self._is_joined_bias:
            return self.parameter.new_zeros(0)
        bases, use = self.eigenbases(name), self.uses[0]
        if self._is_direct:
            return _apply(use, "square_in_bases", bases, use.factor.weights, joint)
        products = self["individual"]
        if joint:
            bias = Products(use.call.trained["bias"], [use.of("bias")], terms=self.terms)
            products = use.call.derivatives.joined(products, bias["individual"])
        turned = reductions.in_bases(products, bases, self.swaps_axes)
        return reductions.of_products(turned, {"square"}, use.factor.weights)["square"]

    def _identity(self) -> Any:
        """Return the identity of the size of a Gram matrix."""
        p = self.parameter
        if self._without_factors is marginals:  # those of the identity
            return [self._eye(d) * (p.numel() / d) for d in p.shape if d > 1]
        size = prod(map(len, self[extracted.INPUT_FACTORS[None]]))
        return self._eye(p.numel() // size if size else p.shape[-1 if self.input_first else 0])

    def _eye(self, size: int) -> Tensor:
        """Return the identity ``[D, D]``, or its diagonal ``[D]``."""
        ones = torch.ones(size, dtype=self.parameter.dtype, device=self.parameter.device)
        return ones if size > self.max_factor_size else ones.diag()

    @property
    def _is_small(self) -> bool:
        """Whether the whole block may stand for the Kronecker factors."""
        p = self.parameter
        return p.numel() <= WHOLE_BLOCK_ENTRIES or sum([size > 1 for size in p.shape]) < 2

    @property
    def _without_factors(self) -> Callable[..., Any] | None:
        """What stands for the Kronecker factors if the rules of all uses know none in common.

        The block itself or, if that is too large, its marginals.
        """
        return None if self._is_small and len(self.deciding) == 1 else self._instead_of_factors

    @lazy
    def _instead_of_factors(self) -> Callable[..., Any] | None:
        (is_known, *_), *others = {use.kind_of_factors for use in self.deciding}
        if self._is_small:
            return block if others else None
        return None if is_known and not others else marginals

    @property
    def factors_are_of(self) -> str:
        """Say what the Kronecker factors of a weight are of."""
        first, p = self.deciding[0], self.parameter
        whole = self._without_factors is None and not first.has_kronecker_factors
        if whole or self._without_factors is block or sum([size > 1 for size in p.shape]) < 2:
            return "its whole block"
        if self._without_factors is not None:
            return "each axis, in the order of the axes"
        order = "inputs, outputs" if self.input_first else "outputs, inputs"
        return f"{order} of the transposed weight" if self.swaps_axes else order

    def _gram_of_rows(self, name: str) -> Tensor:
        """Sum the outer products of the Kronecker rows; positions and uses are summed before.

        For "expand", every position and use is a row on its own.
        """
        if name == extracted.GRAMS["expand"]:
            each = [_apply(use, "kron_rows", "expand") for use in self.uses]
            grams = [gram(x.flatten(0, 2), x.shape[2], self.max_factor_size) for x in each]
            return reduce(add, grams)
        # A network that mixes samples has the factors of a Kronecker product treat the rows of a
        # column as samples; a full block sums them first, and is exact.
        rows_are_samples = self.terms is not None and bool(self["input_factors"])
        rows = self._of_samples("kron_rows", rows_are_samples)  # [V, N, G, O]
        return gram(rows.flatten(0, 2), rows.shape[2], self.max_factor_size)

    def _gram(self, name: str) -> Any:
        """Return what a call's parameters have in common; without factors, what stands for them."""
        if self._without_factors is not None:
            return self._without_factors(self["individual"], self.max_factor_size)
        use, *others = self.uses
        rule: Any = use.call.derivatives
        in_common = rule.kronecker_rows_are_shared and self.terms is None
        shared = use.c.memo
        if others or not in_common or shared is None or use.call.is_unbatched:
            return self._gram_of_rows(name)
        if name not in shared:
            shared[name] = self._gram_of_rows(name)
        elif len(use.call.trained) == 2:  # nobody else will ask
            return shared.pop(name)
        value = shared[name]
        if value.nbytes < memory.LARGE or torch.is_grad_enabled():
            return value.clone()
        return memory.empty(value.shape, value).copy_(value)

    @lazy
    def _has_positions_apart(self) -> bool:
        """Whether positions may be left out of the factor of the inputs."""
        for use in self.uses:
            if not (use.call.derivatives.has_positions_apart and use.has_kronecker_factors):
                return False
        return self.terms is None and self._without_factors is None

    def _rows_that_count(self) -> list[Tensor]:
        return rows_that_count(self.uses, self.counted, lambda: self[extracted.ARRIVED])

    def _arrived(self) -> Tensor:
        if not self._has_positions_apart:
            return self.parameter.new_ones(self.num_samples, 1)
        return arrived(self.uses, self.num_samples)

    def _factors_of_input(self, use: Use, approximation: str | None, joint: bool) -> list[Tensor]:
        """Return the Kronecker factors of one use, averages over N samples; ``joint``: and bias."""
        call, rule, size = use.call, use.call.derivatives, self.max_factor_size
        num_n = self._averaged
        if call.is_unbatched and call.is_of_copies:  # the block stands for them
            return []
        there = None if call.samples_come_first else use.there_in(num_n)
        c = use.c if there is None else use.of_rows_there
        if joint:
            factors = [rule.kron_joint_input(c, approximation, size)]
        else:
            factors = rule.kron_inputs_up_to(c, use.name, approximation, size)
        count = use.factor.mat.shape[1] if there is None else int(there.sum())
        if approximation is None and count != num_n:
            return [f * (count / max(num_n, 1)) for f in factors]
        return factors

    def _of_inputs(self, approximation: str | None, joint: bool) -> list[Tensor]:
        """Sum the Kronecker factors of the inputs over uses (expand: average over positions)."""
        joint, size = joint and self.is_joined, self.max_factor_size
        if approximation == "expand" and self._has_positions_apart:
            rows = self._rows_that_count()
            rows = list(map(with_one, rows)) if joint else rows
            count = max(1, sum(map(len, rows)))
            return [reduce(add, [gram(x, count, size) for x in rows])] if rows else []
        if self._without_factors is not None:
            return []
        uses = self.uses
        if approximation:  # of no positions, means are no numbers, and the sum is zero
            uses = [use for use in self.uses if num_positions(use)]
            approximation, uses = (approximation, uses) if uses else (None, self.uses)
        (first, *others), num_n = uses, self._averaged
        if approximation == "reduce" and first.has_kronecker_factors:
            is_several = bool(others) or first.factor.mat.shape[1] > num_n
            if is_several or first.there_in(num_n) is not None:
                return factor_of_means(uses, num_n, joint, size)
        each = [self._factors_of_input(use, approximation, joint) for use in uses]
        if not others:
            return each[0]
        if approximation == "expand":
            counts = list(map(num_positions, uses))
            parts = [count / sum(counts) for count in counts]
            each = [[f * part for f in one] for one, part in zip(each, parts, strict=True)]
        return [reduce(add, factors) for factors in zip(*each, strict=True)]


def extract(
    uses_of: Mapping[Parameter, list[Use]],
    exts: Sequence[Extension],
    wanted: Collection[str],
    save: Save,
    terms: int | None = None,
    bases: Mapping[Parameter, extracted.Bases] | None = None,
    *of_factors: Any,
    gradients: dict[Parameter, Tensor] | None = None,
    owed: Collection[Parameter] = (),
) -> None:
    """Save what extensions make of products; ``gradients`` takes those that others are owed."""
    for p, uses in uses_of.items():
        names = {*wanted, "gradient"} if p in owed else wanted
        own = bases.get(p, {}) if bases else {}
        products = Products(p, uses, names, terms, own, *of_factors)
        if gradients is not None and p in owed:
            gradients[p] = products.take("gradient")  # p.grad, to which passes add in place
        if save.is_waiting:
            products.extract(exts, save)
        else:
            products.write(exts, save.write)

"""Individual gradients that are not multiplied out: ``g_n = sum_t s_nt x_ntᵀ`` kept as (s, x).

Letters: N samples, T positions of a sample, ``[O, I]`` a parameter, K weights, D directions. A
parameter may act at several positions, consist of parts, and be used several times; all of these
are sums, or put next to each other.

==================  =================  ===========================  ==============================
of one sample       memory             weighted sum, K weights      pairwise products with N samples
==================  =================  ===========================  ==============================
factored            ``T (O + I)``      ``K T O I``                  ``N T² (O + I)``
multiplied out      ``O I``            ``T O I + K O I``            ``T O I + N O I``
==================  =================  ===========================  ==============================

What is kept is the smaller one; what is done with factors is what takes fewer multiplications. For
norms that is the same question: ``T² (O + I)`` against ``T O I``.

The columns ``V_vn = J_nᵀ s_vn`` of a square root of the GGN are V gradients of each sample, which
have x in common: the rows of s are ``v N + n``, and x has its N rows once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from math import prod
from typing import Any, Protocol

import torch
from torch import Size, Tensor

from backpack.core.derivatives import affine, reductions
from backpack.core.engine import call_products
from backpack.core.record.context import Context
from backpack.core.record.module_state import placeholder

# Entries of the block of gradients that pairwise products keep while they pass all others by.
BLOCK_ENTRIES = 2**25
# A sum of gradients that is shorter than this part of its terms (squared) has lost digits.
CANCELLED = 1e-2
# Samples: all of a range, or chosen ones.
Samples = slice | Tensor


class Source(Protocol):
    """One use of a parameter, as far as individual gradients are concerned."""

    @property
    def entries(self) -> int:
        """Number of entries that are kept."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are kept; others may hold them as well."""

    def take(self, samples: Samples) -> Source:
        """Return the same source for some of the samples."""

    def to(self, device: torch.device) -> Source:
        """Return a copy on another device."""

    def dense(self) -> Tensor:
        """Return ``[N, *p]``."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return ``[K, *p]`` for weights ``[K, N]``."""

    def square_norms(self) -> Tensor | None:
        """Return ``[N]``; None if that takes the gradients themselves."""


def at_least_single(tensor: Tensor) -> Tensor:
    """Return a tensor in a precision in which squares of small entries are not zero."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass
class Dense:
    """Individual gradients themselves, ``[N, *p]``."""

    values: Tensor

    @property
    def entries(self) -> int:
        """Number of entries that are kept."""
        return self.values.numel()

    def tensors(self) -> list[Tensor]:
        """Return the gradients."""
        return [self.values]

    def take(self, samples: Samples) -> Dense:
        """Return the same factors of some of the samples."""
        return Dense(self.values[samples])

    def to(self, device: torch.device) -> Dense:
        """Return a copy on another device."""
        return Dense(self.values.to(device))

    def dense(self) -> Tensor:
        """Return ``[N, *p]``."""
        return self.values

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return ``[K, *p]``."""
        return torch.tensordot(weights.to(self.values.dtype), self.values, dims=1)

    def square_norms(self) -> Tensor:
        """Return ``[N]``."""
        values = at_least_single(self.values).unsqueeze(0)
        return reductions.of_products(values, {"square_norm"})["square_norm"]


class Pair:
    """A part ``[O, I]`` of a parameter: s ``[V·N, T, O]`` and x ``[N, T, I]``, or s ``[V·N, O]``.

    Below, N counts all V·N gradients, unless x is meant.

    Attributes:
        s: What arrives where the parameter is multiplied.
        x: What it is multiplied with; None for a bias, whose gradient is s.
    """

    def __init__(self, s: Tensor, x: Tensor | None):
        """Give everything an axis of positions."""
        if x is None:
            self.s, self.x = s if s.dim() == 2 else s.sum(1), None
        else:
            self.s = s.unsqueeze(1) if s.dim() == 2 else s
            self.x = x.unsqueeze(1) if x.dim() == 2 else x

    @property
    def shape(self) -> tuple[int, ...]:
        """``(O, I)``, or ``(O,)``."""
        return self.s.shape[-1:] if self.x is None else (self.s.shape[-1], self.x.shape[-1])

    @property
    def positions(self) -> int:
        """T."""
        return 1 if self.x is None else self.s.shape[1]

    @property
    def columns(self) -> int:
        """V."""
        return 1 if self.x is None else len(self.s) // max(1, len(self.x))

    @property
    def by_column(self) -> Tensor:
        """S as ``[V, N, T, O]``, of the V gradients that each row of x takes part in."""
        rows = len(self.s) if self.x is None else len(self.x)
        return self.s.reshape(-1, rows, *self.s.shape[1:])

    def take(self, samples: Samples) -> Pair:
        """Return the pair of some of the gradients."""
        s, x = self.s, self.x
        if x is None or len(x) == len(s):
            return Pair(s[samples], None if x is None else x[samples])
        rows = torch.arange(len(s), device=s.device)[samples]
        return Pair(s[rows], x[rows % len(x)])

    def joined(self, other: Pair) -> Pair:
        """Return the pair of the sum of both gradients: more positions."""
        if self.x is None or other.x is None:
            return Pair(self.s + other.s, None)
        return Pair(torch.cat([self.s, other.s], 1), torch.cat([self.x, other.x], 1))

    def dense(self) -> Tensor:
        """Return ``[N, O, I]``."""
        return affine.vjp(self.by_column, self.x).flatten(0, 1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return ``[K, O, I]``."""
        x, weights = self.x, weights.to(self.s.dtype)
        if x is None:
            return weights @ self.s
        s, num_k, num_t, (num_o, num_i) = self.by_column, len(weights), self.positions, self.shape
        num_v = len(s)
        if num_k * num_t * (num_v + num_i) > num_v * num_i * (num_t + num_k) + num_k * num_t:
            # multiplied out once for all weights
            spans = spans_of(s.shape[1], num_v * num_o * num_i)
            by_column = weights.unflatten(1, s.shape[:2])
            of_spans = [by_column[:, :, n].flatten(1) @ self._products(n) for n in spans]
            return reduce(torch.add, of_spans).unflatten(1, (num_o, num_i))
        if num_v > 1:  # sum over the columns of a sample, which have x in common
            by_sample = weights.unflatten(1, s.shape[:2]).permute(2, 0, 1)  # [N, K, V]
            sums = by_sample @ s.transpose(0, 1).flatten(2)
            return affine.vjp_sum(sums.transpose(0, 1).unflatten(2, s.shape[2:]), x)
        if num_k == 1 and num_i < num_o:  # scale what is smaller
            return affine.vjp_sum(s, x * weights.T.unsqueeze(2))
        spans = spans_of(num_k, s.numel())
        return _cat([affine.vjp_sum(self.s * weights[k, :, None, None], x) for k in spans])

    def _products(self, n: slice) -> Tensor:
        """Return the gradients that some rows of x take part in, ``[V·n, O·I]``."""
        assert self.x is not None
        return (self.by_column[:, n].mT @ self.x[n]).flatten(2).flatten(0, 1)

    def square_norms(self) -> Tensor:
        """Return ``[N]``."""
        s = at_least_single(self.by_column)
        x = None if self.x is None else at_least_single(self.x)
        each = [affine.reduced(v.unsqueeze(0), x, {"square_norm"}, None) for v in s]
        return _cat([of_column["square_norm"] for of_column in each])

    def gram(self, other: Pair) -> Tensor:
        """Return ``sum_tu (s_nt·s_mu) (x_nt·x_mu)``, ``[N, M]``."""
        if self.x is None or other.x is None:
            return self.s @ other.s.T
        s, others = self.by_column, other.s.flatten(0, 1)
        num_m, sizes = len(other.x), (-1, len(other.x), other.positions)
        products = s.new_empty(*s.shape[:2], len(other.s))
        for n in spans_of(s.shape[1], len(other.s) * self.positions * other.positions):
            of_x = self.x[n].flatten(0, 1) @ other.x.flatten(0, 1).T
            of_x = of_x.unflatten(1, (1, num_m, other.positions))
            for v, column in enumerate(s):
                of_both = (column[n].flatten(0, 1) @ others.T).unflatten(1, sizes) * of_x
                by_position = of_both.unflatten(0, (-1, self.positions))
                products[v, n] = by_position.sum((1, 4)).flatten(1)
        return products.flatten(0, 1)

    def dot(self, other: Pair) -> Tensor:
        """Return the diagonal of :meth:`gram`: inner products of equal samples, ``[N]``."""
        if self.x is None or other.x is None:
            return (self.s * other.s).sum(1)
        of_x = self.x @ other.x.mT
        return ((self.by_column @ other.by_column.mT) * of_x).sum((2, 3)).flatten()


def _cat(parts: list[Tensor], axis: int = 0) -> Tensor:
    """Concatenate, without a copy if there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def spans_of(count: int, entries: int) -> list[slice]:
    """Cut a count into spans, if each takes so many entries."""
    size = reductions.slice_size(entries)
    return [slice(i, min(i + size, count)) for i in range(0, max(count, 1), size)]


@dataclass
class Pairs:
    """The pairs of each part of a parameter.

    Attributes:
        parts: One for each part.
        assemble: Puts ``[*, O, I]`` of each part together: ``[*, *p]``.
        kind: Which pairs belong to parts at the same place.
    """

    parts: list[Pair]
    assemble: Callable[[list[Tensor]], Tensor]
    kind: tuple[Any, ...]

    @property
    def entries(self) -> int:
        """Number of entries that are kept."""
        return sum(t.numel() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all s and x."""
        return [t for part in self.parts for t in (part.s, part.x) if t is not None]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Pairs:
        parts = [Pair(change(a.s), None if a.x is None else change(a.x)) for a in self.parts]
        return Pairs(parts, self.assemble, self.kind)

    def take(self, samples: Samples) -> Pairs:
        """Return the same factors of some of the samples."""
        return Pairs([part.take(samples) for part in self.parts], self.assemble, self.kind)

    def to(self, device: torch.device) -> Pairs:
        """Return a copy on another device."""
        return self._each(lambda t: t.to(device))

    def joined(self, other: Pairs) -> Pairs:
        """Return the pairs of the sum of both gradients."""
        parts = [a.joined(b) for a, b in zip(self.parts, other.parts, strict=True)]
        return Pairs(parts, self.assemble, self.kind)

    def dense(self) -> Tensor:
        """Return ``[N, *p]``."""
        return self.assemble([part.dense() for part in self.parts])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return ``[K, *p]``."""
        return self.assemble([part.weighted_sum(weights) for part in self.parts])

    def square_norms(self) -> Tensor:
        """Return ``[N]``."""
        return reduce(torch.add, [part.square_norms() for part in self.parts])

    def gram_is_cheaper(self, other: Pairs, num_n: int, num_m: int) -> bool:
        """Whether inner products of pairs take fewer multiplications than those of gradients.

        Args:
            other: Those of the other gradients.
            num_n: Number of gradients.
            num_m: Number of partners that each has.
        """
        factored = dense = 0
        for a, b in zip(self.parts, other.parts, strict=True):
            positions = num_n * num_m * a.positions * b.positions
            factored += positions * (a.shape[0] + sum(a.shape[1:]) // (a.columns * b.columns))
            once = num_n * a.positions + num_m * b.positions + num_n * num_m
            dense += once * prod(a.shape)
        return factored <= dense

    def matches(self, other: Pairs, num_n: int) -> bool:
        """Whether gradient by gradient, inner products of pairs are possible, and cheaper."""
        parts = zip(self.parts, other.parts, strict=True)
        same = all(a.columns == b.columns for a, b in parts)
        return same and self.gram_is_cheaper(other, num_n, 1)

    def gram(self, other: Pairs) -> Tensor:
        """Return ``[N, M]``."""
        each = [a.gram(b) for a, b in zip(self.parts, other.parts, strict=True)]
        return reduce(torch.add, each)

    def dot(self, other: Pairs) -> Tensor:
        """Return ``[N]``."""
        return reduce(torch.add, [a.dot(b) for a, b in zip(self.parts, other.parts, strict=True)])


@dataclass
class Cotangents:
    """Cotangents of a call whose rule multiplies without pairs (patches, looked-up rows).

    Attributes:
        c: The call, of the rows that the cotangents have.
        name: Name of the parameter there.
        mats: ``[V, R, *out]`` for each output; below, N counts V gradients of each sample.
        num_samples: N; R is a multiple.
    """

    c: Context
    name: str
    mats: list[Tensor | None]
    num_samples: int

    def _known(self) -> list[Tensor]:
        return [mat for mat in self.mats if mat is not None]

    @property
    def _rows_per_sample(self) -> int:
        return self._known()[0].shape[1] // self.num_samples

    @property
    def entries(self) -> int:
        """Number of entries that are kept."""
        return sum(t.numel() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return the cotangents and the inputs."""
        return self._known() + [x for x in self.c.inputs if isinstance(x, Tensor)]

    def take(self, samples: Samples) -> Cotangents:
        """Return the same factors of some of the samples."""
        each = self._rows_per_sample
        device = self._known()[0].device
        count = len(self._known()[0]) * self.num_samples
        chosen = torch.arange(count, device=device)[samples]
        rows = (chosen.unsqueeze(1) * each + torch.arange(each, device=device)).flatten()
        mats = [None if mat is None else mat.flatten(0, 1)[rows][None] for mat in self.mats]
        numbers = (rows % self._known()[0].shape[1]).tolist()
        if self.c.rows is not None:
            known = self.c.rows
            assert not isinstance(known, slice)
            numbers = [known[i] for i in numbers]
        return Cotangents(self.c.at(numbers), self.name, mats, len(chosen))

    def to(self, device: torch.device) -> Source:
        """Return the gradients themselves on another device: the module stays where it is."""
        return self if self._known()[0].device == device else Dense(self.dense().to(device))

    def _param(self, method: str, mats: Sequence[Tensor | None], *arguments: Any) -> Any:
        return call_products.param(self.c, method, self.name, mats, *arguments)

    def dense(self) -> Tensor:
        """Return ``[N, *p]``."""
        each = self._param("param_vjp", self.mats)
        if each.shape[1] != self.num_samples:
            each = each.unflatten(1, (self.num_samples, -1)).sum(2)
        return each.flatten(0, 1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return ``[K, *p]``: the products are linear in the cotangents."""
        of_rows = weights.repeat_interleave(self._rows_per_sample, 1)

        def weighted(mat: Tensor | None, k: slice) -> Tensor | None:
            if mat is None:
                return None
            of_columns = of_rows[k].to(mat.dtype).unflatten(1, mat.shape[:2])
            if len(mat) == 1:
                return mat * of_columns.reshape(-1, mat.shape[1], *[1] * (mat.dim() - 2))
            return torch.einsum("kvr,vr...->kr...", of_columns, mat)

        spans = spans_of(len(weights), self.entries)
        sums = [
            self._param("param_vjp_sum", [weighted(mat, k) for mat in self.mats]) for k in spans
        ]
        return _cat(sums)

    def square_norms(self) -> Tensor | None:
        """Return ``[N]``; None if rows are merged first, or would lose digits."""
        is_precise = self._known()[0].dtype in reductions.PRECISE
        if self._rows_per_sample > 1 or not is_precise:
            return None
        each = [
            self._param(
                "reduced",
                [None if mat is None else mat[v, None] for mat in self.mats],
                {"square_norm"},
                None,
            )
            for v in range(len(self._known()[0]))
        ]
        return _cat([of_column["square_norm"] for of_column in each])

    def dot(self, other: Pairs) -> Tensor | None:
        """Return the inner products with pairs of equal samples, ``[N]``; None if not known."""
        rule: Any = self.c.call.derivatives
        is_matrix = other.assemble is _whole and not self.c.is_folded
        if self._rows_per_sample > 1 or not is_matrix or getattr(rule, "dot_product", None) is None:
            return None
        (pair,) = other.parts
        return self._param("dot_product", self.mats, pair.s, pair.x)


def square_norms_of_sum(sources: Sequence[Source]) -> Tensor | None:
    """Return the squared norms of sums: those of the terms, and twice their inner products.

    Args:
        sources: The terms, one for each use of a parameter.

    Returns:
        ``[N]``; None if that takes the gradients themselves, or terms nearly cancel.
    """
    norms: Tensor | None = None
    sizes: list[Tensor] = []
    terms = _joined(sources)
    for i, term in enumerate(terms):
        own = [term.square_norms(), *(_dot(term, other) for other in terms[:i])]
        sizes += [] if own[0] is None else [own[0]]
        for factor, value in zip([1, *[2] * i], own, strict=True):
            if value is None:
                return None
            norms = factor * value if norms is None else norms + factor * value
    if norms is None or (len(terms) > 1 and bool((norms < CANCELLED * sum(sizes)).any())):
        return None
    return norms


def _dot(one: Source, other: Source) -> Tensor | None:
    """Return the inner products of equal samples, ``[N]``; None if not known."""
    if isinstance(one, Pairs):
        one, other = other, one
    return one.dot(other) if isinstance(one, Cotangents) and isinstance(other, Pairs) else None


def _kept_call(c: Context, reads: bool) -> Context:
    """Return a context that outlives the pass; without what a rule does not read, if asked."""
    call = c.call.snapshot(torch.is_grad_enabled())
    rule = call.derivatives
    assert rule is not None
    inputs = [_kept(x) if isinstance(x, Tensor) else x for x in c.inputs] if reads else []
    outputs = [placeholder(y) for y in c.outputs]
    call.inputs, call.outputs, call.saved = tuple(inputs), tuple(outputs), dict(call.saved)
    call.g_out, call.g_samples = [], None
    kept = type(c)(call, inputs, outputs, c.rows, c.is_folded)
    kept.params = c.params
    kept.module = c.module
    return kept


def _kept(tensor: Tensor) -> Tensor:
    """Let go of the graph, unless results are to be differentiable. Counts the same changes."""
    return tensor if torch.is_grad_enabled() else tensor.detach()


def _whole(parts: list[Tensor]) -> Tensor:
    (whole,) = parts
    return whole


def source(
    c: Context, name: str, mats: Sequence[Tensor | None], num_samples: int
) -> Pairs | Cotangents | None:
    """Return what individual gradients can be made of later; None if they are made now.

    Args:
        c: The call, of the rows that the cotangents have.
        name: Name of the parameter there.
        mats: ``[V, R, *out]`` for each output.
        num_samples: N; the gradients of R / N rows are summed.
    """
    rule: Any = c.call.derivatives
    if c.call.is_of_copies:
        return None
    if rule.param_vjp_reads_inputs_alone(c.module, name):
        kept = [None if mat is None else _kept(mat) for mat in mats]
        return Cotangents(_kept_call(c, reads=True), name, kept, num_samples)
    if not rule.acts_affinely or hasattr(rule, f"{name}_vjp"):
        return None
    pairs = call_products.param(c, "affine", name, mats)
    if pairs is None:
        return None
    parts = []
    for s, x in pairs:
        rows = len(s) * num_samples
        s = _kept(s).flatten(0, 1)
        x = None if x is None else _kept(x)
        if len(s) != rows:  # rows of a sample are more positions
            s = _positions_of_samples(s, rows)
            x = None if x is None else _positions_of_samples(x, num_samples)
        parts.append(Pair(s, x))
    assemble: Callable[[list[Tensor]], Tensor] = _whole
    if not rule.has_one_part:
        alone = _kept_call(c, reads=False)

        def assemble(values: list[Tensor]) -> Tensor:
            return rule.assemble(alone, name, values)

    return Pairs(parts, assemble, (type(rule), name, *(part.shape for part in parts)))


def _positions_of_samples(rows: Tensor, num_samples: int) -> Tensor:
    by_sample = rows.unflatten(0, (num_samples, -1))
    return by_sample if rows.dim() == 2 else by_sample.flatten(1, 2)


class FactoredGrad:
    r"""Individual gradients ``g_n`` of a parameter, ``[N, *p]``, which are not multiplied out.

    A linear map at T positions of a sample has :math:`g_n = \sum_t s_{nt} x_{nt}^\top`. If
    ``T (O + I)`` entries are fewer than ``O I``, the factors are kept: views of what the forward
    and the backward pass have computed anyway. A convolution and an embedding keep their input and
    what has arrived at their output. All other parameters have the gradients themselves behind the
    same methods. Every method is exact, whatever is kept, and works in slices of bounded memory.

    The factors belong to others as well, and are not copied. If one of them was changed in place
    since (the next batch was written to the memory of the last one), every method is an error.
    Values have the scale of :class:`~backpack.extensions.BatchGrad`.

    The columns of a square root of the GGN, ``[V, N, *p]``, are V·N gradients in the order of
    these axes (``columns`` is V): :class:`~backpack.extensions.SqrtGGNExact` with
    ``factored=True``.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        shape: Sequence[int],
        dtype: torch.dtype,
        label: str = "a parameter",
        norms: Tensor | None = None,
        columns: int = 1,
    ):
        """Store what is given; users get instances from a backward pass, or from :meth:`of`.

        Args:
            sources: What adds up to the gradients.
            shape: ``[N, *p]``.
            dtype: Precision of results.
            label: Names the parameter in messages.
            norms: Squared norms, ``[N]``, if they are known.
            columns: V, if these are the columns of a square root: that many for each sample.
        """
        self._sources = _joined(sources)
        self.label = label
        self.columns = columns
        self._norms = norms
        self._read = [(t, _version(t)) for part in self._sources for t in part.tensors()]
        self.shape = Size(shape)
        self.dtype = dtype

    @classmethod
    def of(cls, gradients: Tensor | FactoredGrad) -> FactoredGrad:
        """Wrap gradients ``[N, *p]``, so that they have the methods of factored ones."""
        if isinstance(gradients, FactoredGrad):
            return gradients
        return cls([Dense(gradients)], gradients.shape, gradients.dtype)

    @property
    def device(self) -> torch.device:
        """Where the factors are."""
        return self._read[0][0].device

    @property
    def is_factored(self) -> bool:
        """Whether anything else than the gradients themselves is kept."""
        return not all(isinstance(part, Dense) for part in self._sources)

    @property
    def kept_entries(self) -> int:
        """Number of entries of what is kept; that of the gradients is ``shape.numel()``."""
        return sum(part.entries for part in self._sources)

    def __len__(self) -> int:
        """Return N."""
        return self.shape[0]

    def __repr__(self) -> str:
        """Show shape, precision and what is kept."""
        kinds = " + ".join(type(part).__name__.lower() for part in self._sources)
        return f"FactoredGrad({list(self.shape)}, {self.dtype}, {kinds} of {self.label})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FactoredGrad:
        """Return the object itself, which cannot be changed."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return what is kept; a copy begins anew to notice changes in place."""
        self._check()
        return {name: value for name, value in vars(self).items() if name != "_read"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what :meth:`__getstate__` has returned."""
        vars(self).update(state)
        self._read = [(t, _version(t)) for part in self._sources for t in part.tensors()]

    def _check(self) -> None:
        if any(_version(tensor) != version for tensor, version in self._read):
            raise RuntimeError(
                f"The individual gradients of {self.label}, {list(self.shape)}, are kept as "
                "factors, and one of these (a module's input, or the gradient at its output) was "
                "changed in place after the backward pass. Use them before, call dense() before, "
                "or do without factored=True."
            )

    def _of_shape(self, tensor: Tensor, *shapes: Sequence[int]) -> None:
        if not any(tensor.shape == Size(shape) for shape in shapes):
            raise ValueError(
                f"The individual gradients of {self.label} are {list(self.shape)}, which needs a "
                f"tensor of shape {' or '.join(str(list(s)) for s in shapes)}, got "
                f"{list(tensor.shape)}."
            )

    def _blocks(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield spans of samples and their gradients, ``[n, P]``."""
        count = len(self)
        size = size if self.is_factored else max(1, count)  # nothing is made, then
        for start in range(0, max(1, count), size):  # one at least, perhaps without samples
            span = slice(start, min(start + size, count))
            parts = [part.take(span).dense() for part in self._sources]
            yield span, reduce(torch.add, parts).reshape(span.stop - start, self.shape[1:].numel())

    @property
    def _block_size(self) -> int:
        return reductions.slice_size(self.shape[1:].numel())

    @property
    def _large_block_size(self) -> int:
        return max(1, BLOCK_ENTRIES // max(1, self.shape[1:].numel()))

    def __getitem__(self, index: Any) -> Any:
        """Return some samples, for a slice, a list of numbers or a mask; for a number its gradient.

        Returns:
            A :class:`FactoredGrad`; ``[*p]`` for a number.
        """
        if isinstance(index, tuple):
            raise IndexError(
                f"Factored individual gradients have an axis of samples alone, got {index}. Use "
                "dense() for entries."
            )
        if hasattr(index, "__index__") and not (isinstance(index, Tensor) and index.dim()):
            return self[[operator.index(index)]].dense()[0]
        samples: Samples = index
        if not isinstance(index, slice):
            samples = torch.as_tensor(index, device=self.device)
            if samples.dtype is not torch.bool and not samples.numel():
                samples = samples.long()
        elif index.step is not None and index.step < 0:
            samples = torch.arange(len(self), device=self.device)[list(range(len(self))[index])]
        self._check()
        norms = None if self._norms is None else self._norms[samples]
        count = len(torch.empty(len(self), device=self.device)[samples])
        shape = (count, *self.shape[1:])
        sources: list[Source] = [part.take(samples) for part in self._sources if count]
        if not count:
            sources = [Dense(torch.zeros(shape, dtype=self.dtype, device=self.device))]
        return FactoredGrad(sources, shape, self.dtype, self.label, norms)

    def to(self, device: torch.device | str) -> FactoredGrad:
        """Return a copy on another device; what has no pairs is multiplied out for that."""
        self._check()
        device = torch.device(device)
        sources = [part.to(device) for part in self._sources]
        norms = None if self._norms is None else self._norms.to(device)
        return FactoredGrad(sources, self.shape, self.dtype, self.label, norms, self.columns)

    def dense(self) -> Tensor:
        """Return the individual gradients, ``[N, *p]``, as a tensor of its own."""
        self._check()
        whole = reduce(torch.add, [part.dense() for part in self._sources]).to(self.dtype)
        return whole.clone() if any(_shares(whole, t) for t, _ in self._read) else whole

    def square_norms(self) -> Tensor:
        """Return the squared L2 norms, ``[N]``, at least in single precision."""
        self._check()
        if self._norms is None:
            norms = square_norms_of_sum(self._sources)
            if norms is None:
                blocks = [at_least_single(block) for _, block in self._blocks(self._block_size)]
                norms = _cat([(block * block).sum(1) for block in blocks])
            self._norms = norms
        return self._norms.clone()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return ``sum_n w_n g_n``.

        Args:
            weights: ``[N]``, or ``[K, N]`` for K sums.

        Returns:
            ``[*p]``, or ``[K, *p]``.

        Raises:
            ValueError: If the shape of the weights is another.
        """
        self._of_shape(weights, [len(self)], [*weights.shape[:1], len(self)])
        self._check()
        rows = (weights if weights.dim() > 1 else weights.unsqueeze(0)).to(self.device)
        sums = [part.weighted_sum(rows) for part in self._sources]
        whole = reduce(torch.add, sums).to(self.dtype)
        return whole.reshape([*weights.shape[:-1], *self.shape[1:]])

    def dot(self, other: FactoredGrad | Tensor) -> Tensor:
        """Return inner products, ``[N]``.

        Args:
            other: As many gradients; or ``[N, *p]``; or one direction ``[*p]`` for all.

        Raises:
            ValueError: If the shape is another.
        """
        if isinstance(other, Tensor):
            self._of_shape(other, self.shape[1:], self.shape)
            if other.shape == self.shape[1:]:
                return self.project(other.unsqueeze(0)).squeeze(1)
            other = FactoredGrad.of(other)
        self._same(other, self.shape)
        self._check()
        other._check()
        pairs = self._as_pairs(other)
        if pairs is not None and pairs[0].matches(pairs[1], len(self)):
            return pairs[0].dot(pairs[1]).to(self.dtype)
        size = self._block_size
        products = []
        for start in range(0, max(1, len(self)), size):
            span = slice(start, start + size)
            one, two = self[span].dense(), other[span].dense()
            products.append((one * two).reshape(len(one), self.shape[1:].numel()).sum(1))
        return _cat(products)

    def gram(self, other: FactoredGrad | None = None) -> Tensor:
        """Return the inner products of all pairs, ``[N, M]``.

        Args:
            other: M gradients of the same parameter, of another batch. Default: the same.

        Raises:
            ValueError: If the shape is another.
        """
        other = self if other is None else other
        self._same(other, [len(other), *self.shape[1:]])
        self._check()
        other._check()
        pairs = self._as_pairs(other)
        if pairs is not None and pairs[0].gram_is_cheaper(pairs[1], len(self), len(other)):
            return pairs[0].gram(pairs[1]).to(self.dtype)
        rows = []
        for span, block in self._blocks(self._large_block_size):
            if other is self and span == slice(0, len(self)):
                rows.append(block @ block.T)
            else:
                parts = [block @ partner.T for _, partner in other._blocks(self._block_size)]
                rows.append(_cat(parts, 1))
        return _cat(rows).to(self.dtype)

    def project(self, directions: Tensor) -> Tensor:
        """Return the inner products with directions, ``[N, D]``.

        Args:
            directions: ``[D, *p]``.

        Raises:
            ValueError: If the shape is another.
        """
        self._of_shape(directions, [*directions.shape[:1], *self.shape[1:]])
        self._check()
        rows = directions.reshape(len(directions), self.shape[1:].numel())
        # directions do not fit in a cache: as many gradients as these are, to read them rarely
        size = max(self._block_size, min(len(rows), self._large_block_size))
        blocks = self._blocks(size)
        return _cat([block @ rows.T.to(block) for _, block in blocks]).to(self.dtype)

    def project_along(self, directions: Callable[[], Iterator[Tensor]]) -> Tensor:
        """Return the inner products with directions that are made when they are needed.

        Args:
            directions: Returns an iterator over D directions ``[*p]``, the same at each call: they
                are made once for a block of samples.

        Returns:
            ``[N, D]``.
        """
        self._check()
        rows = []
        for _, block in self._blocks(self._large_block_size):
            found, products = directions(), []
            while chosen := list(islice(found, self._block_size)):
                stacked = torch.stack(chosen).reshape(len(chosen), -1)
                products.append(block @ stacked.T.to(block))
            rows.append(_cat(products, 1))
        return _cat(rows).to(self.dtype)

    def project_outer(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the inner products with the directions ``a_d b_dᵀ``.

        Args:
            a: ``[D, O]``, for the first axis of the parameter (1 if it has none).
            b: ``[D, I]``, for all others.

        Returns:
            ``[N, D]``.

        Raises:
            ValueError: If the shape is another.
        """
        num_o = self.shape[1] if len(self.shape) > 1 else 1
        num_i = self.shape[2:].numel()
        self._of_shape(a, [len(b), num_o])
        self._of_shape(b, [len(a), num_i])
        self._check()
        (first, *others) = self._sources
        if not others and isinstance(first, Pairs) and first.assemble is _whole:
            (pair,) = first.parts
            if pair.shape == (num_o, num_i) and pair.x is not None:
                of_both = (pair.by_column @ a.T.to(pair.s)) * (pair.x @ b.T.to(pair.s))
                return of_both.sum(2).flatten(0, 1).to(self.dtype)
        rows = []
        for _, block in self._blocks(self._block_size):
            by_row = block.reshape(-1, num_o, num_i) @ b.T.to(block)
            rows.append((by_row * a.T.to(block)).sum(1))
        return _cat(rows).to(self.dtype)

    def _same(self, other: FactoredGrad, shape: Sequence[int]) -> None:
        if other.shape != Size(shape):
            raise ValueError(
                f"The individual gradients of {self.label} are {list(self.shape)}, those of "
                f"{other.label} are {list(other.shape)}: they have no inner products. Compare the "
                "same parameter, and for dot() as many samples."
            )

    def _as_pairs(self, other: FactoredGrad) -> tuple[Pairs, Pairs] | None:
        """Return the pairs of both, if they are of the same kind."""
        if len(self._sources) > 1 or len(other._sources) > 1:
            return None
        one, two = self._sources[0], other._sources[0]
        if isinstance(one, Pairs) and isinstance(two, Pairs) and one.kind == two.kind:
            return one, two
        return None


def _joined(sources: Sequence[Source]) -> list[Source]:
    """Join sources of one kind into one: the gradients of several uses add up."""
    found: list[Source] = []
    for part in sources:
        for i, other in enumerate(found):
            both = isinstance(part, Pairs) and isinstance(other, Pairs)
            if both and part.kind == other.kind:  # type: ignore[attr-defined]
                found[i] = other.joined(part)  # type: ignore[attr-defined]
                break
        else:
            found.append(part)
    return found


def _version(tensor: Tensor) -> int | None:
    """Count the changes in place; those of torch.inference_mode are not counted."""
    return None if tensor.is_inference() else tensor._version


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()

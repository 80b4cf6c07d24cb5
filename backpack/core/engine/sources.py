"""What individual gradients that are not multiplied out are made of: a source for each use.

Letters: N samples, T positions of a sample, ``[O, I]`` a parameter, K weights. A parameter may act
at several positions, consist of parts, and be used several times: these are added, or put side by
side. The columns ``V_vn = J_nᵀ s_vn`` of a square root of the GGN are V gradients of each sample
with the same x: the rows of s are ``v N + n``, and x has its N rows once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor

from backpack.core.derivatives import affine, reductions
from backpack.core.derivatives.memoise import is_same
from backpack.core.derivatives.vectors import first_of
from backpack.core.engine import call_products
from backpack.core.record.context import Context
from backpack.core.record.module_state import placeholder
from backpack.core.values import at_least_single

# Samples: all of a range, or chosen ones.
Samples = slice | Tensor


@dataclass
class Dense:
    """Individual gradients themselves, ``[N, *p]``."""

    values: Tensor

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
    """

    def __init__(self, s: Tensor, x: Tensor | None):
        """Give what arrives, s, and what it is multiplied with, x, an axis of positions.

        For a bias, whose gradient is s, x is None.
        """
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

    def to(self, device: torch.device) -> Pair:
        """Return a copy on another device."""
        return Pair(self.s.to(device), None if self.x is None else self.x.to(device))

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
            spans = spans_of(s.shape[1], num_v * num_o * num_i, s.device)
            by_column = weights.unflatten(1, s.shape[:2])
            of_spans = [by_column[:, :, n].flatten(1) @ self._products(n) for n in spans]
            return reduce(torch.add, of_spans).unflatten(1, (num_o, num_i))
        if num_v > 1:  # sum over the columns of a sample, which have x in common
            by_sample = weights.unflatten(1, s.shape[:2]).permute(2, 0, 1)  # [N, K, V]
            sums = by_sample @ s.transpose(0, 1).flatten(2)
            return affine.vjp_sum(sums.transpose(0, 1).unflatten(2, s.shape[2:]), x)
        if num_k == 1 and num_i < num_o:  # scale what is smaller
            return affine.vjp_sum(s, x * weights.T.unsqueeze(2))
        spans = spans_of(num_k, s.numel(), s.device)
        return cat([affine.vjp_sum(self.s * weights[k, :, None, None], x) for k in spans])

    def _products(self, n: slice) -> Tensor:
        """Return the gradients that some rows of x take part in, ``[V·n, O·I]``."""
        assert self.x is not None
        return (self.by_column[:, n].mT @ self.x[n]).flatten(2).flatten(0, 1)

    def square_norms(self) -> Tensor:
        """Return ``[N]``."""
        s = at_least_single(self.by_column)
        x = None if self.x is None else at_least_single(self.x)
        each = [affine.reduced(v.unsqueeze(0), x, {"square_norm"}, None) for v in s]
        return cat([of_column["square_norm"] for of_column in each])

    def square_sizes(self) -> Tensor:
        """Return ``sum_t |s_t|² |x_t|²``, ``[N]``: the squared norms, if nothing cancels."""
        sizes = at_least_single(self.by_column).square().sum(-1)
        if self.x is None:
            return sizes.flatten()
        return (sizes * at_least_single(self.x).square().sum(-1)).sum(-1).flatten()

    def along(self, left: Tensor, right: Tensor) -> Pair:
        """Return the pair of ``Q_1ᵀ g Q_2``, at least in single precision; vectors: diagonals."""
        assert self.x is not None
        s, x = at_least_single(self.s), at_least_single(self.x)
        sides = [(s, left.to(s.dtype)), (x, right.to(x.dtype))]
        return Pair(*[y * q if q.dim() == 1 else y @ q for y, q in sides])

    def square_sums(self, weights: Tensor) -> Tensor:
        """Return weighted sums of squares, ``[N, K]`` for ``[K, O·I]``, at one position."""
        assert self.x is not None
        s, x = at_least_single(self.by_column)[:, :, 0], at_least_single(self.x)[:, 0]
        of_x = x.square() @ weights.unflatten(1, self.shape).mT  # [K, N, O]
        return torch.einsum("vno,kno->vnk", s.square(), of_x).flatten(0, 1)

    def gram(self, other: Pair) -> Tensor:
        """Return ``sum_tu (s_nt·s_mu) (x_nt·x_mu)``, ``[N, M]``."""
        if self.x is None or other.x is None:
            return self.s @ other.s.T
        s, others = self.by_column, other.s.flatten(0, 1)
        num_m, sizes = len(other.x), (-1, len(other.x), other.positions)
        products = s.new_empty(*s.shape[:2], len(other.s))
        entries = len(other.s) * self.positions * other.positions
        for n in spans_of(s.shape[1], entries, s.device):
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


def cat(parts: list[Tensor], axis: int = 0) -> Tensor:
    """Concatenate, without a copy if there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def spans_of(count: int, entries: int, device: torch.device) -> list[slice]:
    """Cut a count into spans, if each takes so many entries."""
    size = reductions.slice_size(entries, device)
    return [slice(i, min(i + size, count)) for i in range(0, max(count, 1), size)]


@dataclass
class Pairs:
    """The pairs of each part of a parameter."""

    parts: list[Pair]
    assemble: Callable[[list[Tensor]], Tensor]  # puts [*, O, I] of each part together: [*, *p]
    kind: tuple[Any, ...]  # which pairs belong to parts at the same place

    @property
    def matrix(self) -> Pair | None:
        """The only part, if it is the parameter itself."""
        return self.parts[0] if self.assemble is _whole else None

    def tensors(self) -> list[Tensor]:
        """Return all s and x."""
        return [t for part in self.parts for t in (part.s, part.x) if t is not None]

    def take(self, samples: Samples) -> Pairs:
        """Return the same factors of some of the samples."""
        return replace(self, parts=[part.take(samples) for part in self.parts])

    def to(self, device: torch.device) -> Pairs:
        """Return a copy on another device."""
        return replace(self, parts=[part.to(device) for part in self.parts])

    def joined(self, other: Pairs) -> Pairs:
        """Return the pairs of the sum of both gradients."""
        pairs = zip(self.parts, other.parts, strict=True)
        return replace(self, parts=[a.joined(b) for a, b in pairs])

    def dense(self) -> Tensor:
        """Return ``[N, *p]``."""
        return self.assemble([part.dense() for part in self.parts])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return ``[K, *p]``."""
        return self.assemble([part.weighted_sum(weights) for part in self.parts])

    def square_norms(self) -> Tensor:
        """Return ``[N]``."""
        return reduce(torch.add, [part.square_norms() for part in self.parts])

    def cancel(self, norms: Tensor) -> bool:
        """Whether positions of a gradient nearly cancel, whose squared norms are ``[N]``."""
        if all(part.positions == 1 for part in self.parts):
            return False
        sizes = reduce(torch.add, [part.square_sizes() for part in self.parts])
        return len(affine.lost_rows(norms, sizes, self.parts[0].s.dtype)) > 0

    def gram_is_cheaper(self, other: Pairs, num_n: int, num_m: int) -> bool:
        """Whether the inner products of N gradients with M partners each are cheaper as pairs."""
        factored = dense = 0
        for a, b in zip(self.parts, other.parts, strict=True):
            positions = num_n * num_m * a.positions * b.positions
            factored += positions * (a.shape[0] + sum(a.shape[1:]) // (a.columns * b.columns))
            once = num_n * a.positions + num_m * b.positions + num_n * num_m
            dense += once * prod(a.shape)
        return factored <= dense

    def has_columns_of(self, other: Pairs) -> bool:
        """Whether as many gradients of a sample share x."""
        return all(a.columns == b.columns for a, b in zip(self.parts, other.parts, strict=True))

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

    Below, N counts V gradients of each sample.
    """

    c: Context  # of the rows that the cotangents have
    name: str  # of the parameter there
    mats: list[Tensor | None]  # [V, R, *out] for each output
    num_samples: int  # N; R is a multiple

    @property
    def _first(self) -> Tensor:
        return first_of(self.mats)

    @property
    def _rows_per_sample(self) -> int:
        return self._first.shape[1] // self.num_samples

    def tensors(self) -> list[Tensor]:
        """Return the cotangents and the inputs."""
        return [t for t in (*self.mats, *self.c.inputs) if isinstance(t, Tensor)]

    def take(self, samples: Samples) -> Cotangents:
        """Return the same factors of some of the samples."""
        each, first = self._rows_per_sample, self._first
        chosen = torch.arange(len(first) * self.num_samples, device=first.device)[samples]
        rows = (chosen.unsqueeze(1) * each + torch.arange(each, device=first.device)).flatten()
        mats = [None if mat is None else mat.flatten(0, 1)[rows][None] for mat in self.mats]
        numbers = (rows % first.shape[1]).tolist()
        if self.c.rows is not None:
            known = self.c.rows
            assert not isinstance(known, slice)
            numbers = [known[i] for i in numbers]
        return Cotangents(self.c.at(numbers), self.name, mats, len(chosen))

    def to(self, device: torch.device) -> Cotangents | Dense:
        """Return the gradients themselves on another device: the module stays where it is."""
        return self if self._first.device == device else Dense(self.dense().to(device))

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
        if not len(weights):
            p = self.c.call.trained[self.name]
            return self._first.new_zeros(0, *p.shape)
        of_rows = weights.repeat_interleave(self._rows_per_sample, 1)

        def weighted(mat: Tensor | None, k: slice) -> Tensor | None:
            if mat is None:
                return None
            of_columns = of_rows[k].to(mat.dtype).unflatten(1, mat.shape[:2])
            if len(mat) == 1:
                return mat * of_columns.reshape(-1, mat.shape[1], *[1] * (mat.dim() - 2))
            return torch.einsum("kvr,vr...->kr...", of_columns, mat)

        spans = spans_of(len(weights), entries_of(self), weights.device)
        sums = [
            self._param("param_vjp_sum", [weighted(mat, k) for mat in self.mats]) for k in spans
        ]
        return cat(sums)

    def square_norms(self) -> Tensor | None:
        """Return ``[N]``; None if rows are merged first, or would lose digits."""
        if self._rows_per_sample > 1 or self._first.dtype not in reductions.PRECISE:
            return None
        norms = []
        for v in range(len(self._first)):
            of_column = [None if mat is None else mat[v, None] for mat in self.mats]
            norms.append(self._param("reduced", of_column, {"square_norm"}, None)["square_norm"])
        return cat(norms)

    def dot(self, other: Pairs) -> Tensor | None:
        """Return the inner products with pairs of equal samples, ``[N]``; None if not known."""
        pair, is_apart = other.matrix, not (self.c.is_folded or self._rows_per_sample > 1)
        is_known = getattr(self.c.call.derivatives, "dot_product", None) is not None
        if pair is None or not (is_apart and is_known):
            return None
        return self._param("dot_product", self.mats, pair.s, pair.x)


# One use of a parameter, as far as individual gradients are concerned.
Source = Dense | Pairs | Cotangents


def entries_of(source: Source) -> int:
    """Return the number of entries that are kept; others may hold them as well."""
    return sum(t.numel() for t in source.tensors())


def stacked(parts: Sequence[Source]) -> Source | None:
    """Return gradients of several outputs, one after the other; None if they have no such form."""
    dense = [part.values for part in parts if isinstance(part, Dense)]
    pairs = [part.matrix for part in parts if isinstance(part, Pairs)]
    known = [pair for pair in pairs if pair is not None]
    if len(dense) == len(parts):
        return Dense(torch.cat(dense))
    whole = parts[0]
    if len(known) < len(parts) or not isinstance(whole, Pairs):
        return None
    s, each = torch.cat([pair.s for pair in known]), [pair.x for pair in known]
    x = each[0]
    if not all(is_same(x, other) for other in each):
        x = torch.cat([other for other in each if other is not None])
    return replace(whole, parts=[Pair(s, x)])


def square_norms_of_sum(sources: Sequence[Source]) -> Tensor | None:
    """Return the squared norms ``[N]`` of sums: those of the terms, and twice their inner products.

    None if that takes the gradients themselves, or terms nearly cancel.
    """
    terms = joined(sources)
    sizes = [term.square_norms() for term in terms]
    products = [_dot(one, other) for one, other in combinations(terms, 2)]
    known = [value for value in (*sizes, *products, *products) if value is not None]
    if len(known) < len(sizes) + 2 * len(products):
        return None
    norms = reduce(torch.add, known)
    is_lost = len(terms) > 1 and bool((norms < affine.CANCELLED * sum(known[: len(terms)])).any())
    return None if is_lost else norms


def _dot(one: Source, other: Source) -> Tensor | None:
    """Return the inner products of equal samples, ``[N]``; None if not known."""
    if isinstance(one, Pairs):
        one, other = other, one
    return one.dot(other) if isinstance(one, Cotangents) and isinstance(other, Pairs) else None


def _kept_call(c: Context, reads: bool) -> Context:
    """Return a context that outlives the pass; without what a rule does not read, if asked."""
    call = c.call.snapshot(torch.is_grad_enabled())
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

    Arguments are those of :class:`Cotangents`; the gradients of R / N rows are summed.
    """
    rule: Any = c.call.derivatives
    if c.call.is_of_copies:
        return None
    if rule.param_vjp_reads_inputs_alone(c.module, name):
        kept = [None if mat is None else _kept(mat) for mat in mats]
        return Cotangents(_kept_call(c, reads=True), name, kept, num_samples)
    if not rule.acts_affinely or hasattr(rule, f"{name}_vjp"):
        return None
    pairs = call_products.param(c, "flat_pairs", name, mats)
    if pairs is None:
        return None
    parts = []
    for s, x in pairs:
        x = None if x is None else _of_samples(_kept(x), num_samples)
        parts.append(Pair(_of_samples(_kept(s).flatten(0, 1), len(s) * num_samples), x))
    assemble: Callable[[list[Tensor]], Tensor] = _whole
    if not rule.has_one_part:
        assemble = partial(rule.assemble, _kept_call(c, reads=False), name)
    return Pairs(parts, assemble, (type(rule), name, *(part.shape for part in parts)))


def _of_samples(rows: Tensor, count: int) -> Tensor:
    """Return the rows of each sample as more positions of it."""
    if len(rows) == count:
        return rows
    by_sample = rows.unflatten(0, (count, -1))
    return by_sample if rows.dim() == 2 else by_sample.flatten(1, 2)


def joined(sources: Sequence[Source]) -> list[Source]:
    """Join sources of one kind into one: the gradients of several uses add up."""
    found: dict[Any, Source] = {}
    for part in sources:
        kind = part.kind if isinstance(part, Pairs) else id(part)
        other = found.get(kind)
        if isinstance(part, Pairs) and isinstance(other, Pairs):
            part = other.joined(part)
        found[kind] = part
    return list(found.values())

"""Individual gradients that are not multiplied out: ``g_n = sum_t s_nt x_ntᵀ`` kept as (s, x).

With N samples, T positions of a sample, a parameter ``[O, I]``, and K weights:

==================  =================  ===========================  ==============================
of one sample       memory             weighted sum, K weights      pairwise products with N samples
==================  =================  ===========================  ==============================
factored            ``T (O + I)``      ``K T O I``                  ``N T² (O + I)``
multiplied out      ``O I``            ``T O I + K O I``            ``T O I + N O I``
==================  =================  ===========================  ==============================

What is kept is the smaller one; what is done with factors is what takes fewer multiplications. For
norms that is the same question: ``T² (O + I)`` against ``T O I``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce, wraps
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from torch import Size, Tensor

from backpack.core.derivatives import reductions
from backpack.core.engine.sources import (
    Dense,
    Pairs,
    Samples,
    Source,
    cat,
    entries_of,
    joined,
    square_norms_of_sum,
    stacked,
)
from backpack.core.record.layout import CPU
from backpack.core.record.weights import storage_of, version_of
from backpack.core.values import at_least_single
from backpack.utils.autocast import without_autocast
from backpack.utils.kroneckers import apply_kfac_mat_prod, transposed

# Entries of the block of gradients that pairwise products keep while they pass all others by.
BLOCK_ENTRIES = 2**25


Method = TypeVar("Method", bound=Callable[..., Any])


def _precisely(method: Method) -> Method:
    """Let a method compute in the precision of its tensors, also inside of autocast."""

    @wraps(method)
    def precise(*args: Any) -> Any:
        with without_autocast():
            return method(*args)

    return cast(Method, precise)


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
        self._sources = joined(sources)
        self.label = label
        self.columns = columns
        self._norms = norms
        self._read = [(t, version_of(t)) for part in self._sources for t in part.tensors()]
        self.shape = Size(shape)
        self.dtype = dtype

    @classmethod
    def of(cls, gradients: Tensor | FactoredGrad) -> FactoredGrad:
        """Wrap gradients ``[N, *p]``, so that they have the methods of factored ones."""
        if isinstance(gradients, FactoredGrad):
            return gradients
        return cls([Dense(gradients)], gradients.shape, gradients.dtype)

    @classmethod
    def stacked(cls, parts: Sequence[FactoredGrad]) -> list[FactoredGrad]:
        """Put gradients of several outputs of a batch one after the other, if they have a form."""
        kept = [part._sources for part in parts]
        whole = stacked([first for first, *_ in kept]) if max(map(len, kept)) == 1 else None
        if whole is None:
            return list(parts)
        first = parts[0]
        shape = (sum(map(len, parts)), *first.shape[1:])
        return [cls([whole], shape, first.dtype, first.label)]

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
        return sum(map(entries_of, self._sources))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
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
        self._read = [(t, version_of(t)) for part in self._sources for t in part.tensors()]

    def _check(self) -> None:
        if any(version_of(tensor) != version for tensor, version in self._read):
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
        return reductions.slice_size(self.shape[1:].numel(), self.device)

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
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return self[[operator.index(index)]].dense()[0]
        if isinstance(index, slice) and index.step is not None and index.step < 0:
            index = list(range(len(self))[index])
        samples: Samples = index
        if not isinstance(index, slice):
            samples = index if isinstance(index, Tensor) else torch.as_tensor(index, device=CPU)
            if samples.dim() != 1:
                raise IndexError(
                    "Samples of factored individual gradients are chosen along one axis, got an "
                    f"index of shape {list(samples.shape)}."
                )
            if samples.dtype is not torch.bool and not samples.numel():
                samples = samples.long()
            if samples.is_cpu:  # a GPU does not survive a number that is too large
                samples = torch.arange(len(self), device=CPU)[samples]
            samples = samples.to(self.device)
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
        shares = any(storage_of(whole) == storage_of(t) for t, _ in self._read)
        return whole.clone() if shares else whole

    def square_norms(self) -> Tensor:
        """Return the squared L2 norms, ``[N]``, at least in single precision."""
        self._check()
        if self._norms is None:
            norms = square_norms_of_sum(self._sources)
            if norms is None:
                blocks = [at_least_single(block) for _, block in self._blocks(self._block_size)]
                norms = cat([(block * block).sum(1) for block in blocks])
            self._norms = norms
        return self._norms.clone()

    @_precisely
    def square_sums(self, weights: Tensor, bases: Sequence[Tensor] = ()) -> Tensor:
        """Return weighted sums of the squares of ``(Q_1 ⊗ Q_2 ⊗ …)ᵀ g_n``, ``[N, K]``.

        Args:
            weights: ``[K, P]``
            bases: ``[d_1, d_1], [d_2, d_2], …``, or diagonals, for P rows. Default: the identity.
        """
        self._check()
        weights, bases = at_least_single(weights), [at_least_single(basis) for basis in bases]
        whole, (first, *others) = self, self._sources
        pair = first.matrix if isinstance(first, Pairs) and not others else None
        fits = pair is not None and pair.shape == (tuple(map(len, bases)) or pair.shape)
        if isinstance(first, Pairs) and pair is not None and pair.x is not None and fits:
            pair = pair.along(*bases) if bases else pair
            if pair.positions == 1:
                return pair.square_sums(weights)
            source = replace(first, parts=[pair])
            whole, bases = FactoredGrad([source], self.shape, self.dtype, self.label), []
        back, sums = list(map(transposed, bases)), []
        for _, block in whole._blocks(self._large_block_size):
            rows = at_least_single(block)
            rows = apply_kfac_mat_prod(back, rows.T).T if back else rows
            sums.append(rows.square() @ weights.T)
        return cat(sums)

    @_precisely
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return ``sum_n w_n g_n``: ``[*p]`` for weights ``[N]``, ``[K, *p]`` for ``[K, N]``.

        Raises:
            ValueError: If the shape of the weights is another.
        """
        self._of_shape(weights, [len(self)], [*weights.shape[:1], len(self)])
        self._check()
        rows = (weights if weights.dim() > 1 else weights.unsqueeze(0)).to(self.device)
        sums = [part.weighted_sum(rows) for part in self._sources]
        whole = reduce(torch.add, sums).to(self.dtype)
        return whole.reshape([*weights.shape[:-1], *self.shape[1:]])

    @_precisely
    def dot(self, other: FactoredGrad | Tensor) -> Tensor:
        """Return inner products ``[N]`` with N gradients, or ``[N, *p]``, or one ``[*p]`` for all.

        Raises:
            ValueError: If the shape is another.
        """
        if isinstance(other, Tensor):
            self._of_shape(other, self.shape[1:], self.shape)
            if other.shape == self.shape[1:]:
                return self.project(other.unsqueeze(0)).squeeze(1)
            other = FactoredGrad.of(other)
        self._check_both(other, self.shape)
        pairs = self._as_pairs(other, 1)
        if pairs and pairs[0].has_columns_of(pairs[1]):
            return pairs[0].dot(pairs[1]).to(self.dtype)
        size = self._block_size
        products = []
        for start in range(0, max(1, len(self)), size):
            span = slice(start, start + size)
            one, two = self[span].dense(), other[span].dense()
            products.append((one * two).reshape(len(one), self.shape[1:].numel()).sum(1))
        return cat(products)

    @_precisely
    def gram(self, other: FactoredGrad | None = None) -> Tensor:
        """Return the inner products ``[N, M]`` with M gradients of another batch. Default: its own.

        Raises:
            ValueError: If the shape is another.
        """
        other = self if other is None else other
        self._check_both(other, [len(other), *self.shape[1:]])
        pairs = self._as_pairs(other, len(other))
        if pairs:
            return pairs[0].gram(pairs[1]).to(self.dtype)
        rows = []
        for span, block in self._blocks(self._large_block_size):
            if other is self and span == slice(0, len(self)):
                rows.append(block @ block.T)
            else:
                parts = [block @ partner.T for _, partner in other._blocks(self._block_size)]
                rows.append(cat(parts, 1))
        return cat(rows).to(self.dtype)

    @_precisely
    def project(self, directions: Tensor) -> Tensor:
        """Return the inner products ``[N, D]`` with directions ``[D, *p]``.

        Raises:
            ValueError: If the shape is another.
        """
        self._of_shape(directions, [*directions.shape[:1], *self.shape[1:]])
        self._check()
        rows = directions.reshape(len(directions), self.shape[1:].numel())
        # directions do not fit in a cache: as many gradients as these are, to read them rarely
        size = max(self._block_size, min(len(rows), self._large_block_size))
        blocks = self._blocks(size)
        return cat([block @ rows.T.to(block) for _, block in blocks]).to(self.dtype)

    @_precisely
    def project_along(self, directions: Callable[[], Iterator[Tensor]]) -> Tensor:
        """Return the inner products ``[N, D]`` with directions ``[*p]`` that are made when needed.

        That is once for each block of samples; ``directions`` returns the same at each call.
        """
        self._check()
        rows = []
        for _, block in self._blocks(self._large_block_size):
            found, products = directions(), []
            while chosen := list(islice(found, self._block_size)):
                stacked = torch.stack(chosen).reshape(len(chosen), -1)
                products.append(block @ stacked.T.to(block))
            rows.append(cat(products, 1))
        return cat(rows).to(self.dtype)

    @_precisely
    def project_outer(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the inner products ``[N, D]`` with the directions ``a_d b_dᵀ``.

        a is ``[D, O]``, for the first axis of the parameter (1 if it has none), b ``[D, I]`` for
        all others.

        Raises:
            ValueError: If the shape is another.
        """
        num_o = self.shape[1] if len(self.shape) > 1 else 1
        num_i = self.shape[2:].numel()
        self._of_shape(a, [len(b), num_o])
        self._of_shape(b, [len(a), num_i])
        self._check()
        first, *others = self._sources
        pair = first.matrix if isinstance(first, Pairs) and not others else None
        if pair is not None and pair.shape == (num_o, num_i) and pair.x is not None:
            of_both = (pair.by_column @ a.T.to(pair.s)) * (pair.x @ b.T.to(pair.s))
            return of_both.sum(2).flatten(0, 1).to(self.dtype)
        rows = []
        for _, block in self._blocks(self._block_size):
            by_row = block.reshape(-1, num_o, num_i) @ b.T.to(block)
            rows.append((by_row * a.T.to(block)).sum(1))
        return cat(rows).to(self.dtype)

    def _check_both(self, other: FactoredGrad, shape: Sequence[int]) -> None:
        if other.shape != Size(shape):
            raise ValueError(
                f"The individual gradients of {self.label} are {list(self.shape)}, those of "
                f"{other.label} are {list(other.shape)}: they have no inner products. Compare the "
                "same parameter, and for dot() as many samples."
            )
        self._check()
        other._check()

    def _as_pairs(self, other: FactoredGrad, partners: int) -> tuple[Pairs, Pairs] | None:
        """Return the pairs of both, if inner products of them are possible, cheaper and precise."""
        (one, *more), (two, *others) = self._sources, other._sources
        if more or others or not (isinstance(one, Pairs) and isinstance(two, Pairs)):
            return None
        if one.kind != two.kind or not one.gram_is_cheaper(two, len(self), partners):
            return None
        # where positions nearly cancel in both, digits are lost; if in one, they are not
        lose = one.cancel(self.square_norms()) and two.cancel(other.square_norms())
        return None if lose else (one, two)

"""Reductions of individual products, in slices of samples: each is used up while it is cached.

``P = [V, N, *p]`` are the products ``J_pᵀ s`` of V columns s with each of N samples.

============  ==============  =========================================
individual    ``[V, N, *p]``  P
gradient      ``[*p]``        sum over v and n of P
batch_square  ``[N, *p]``     sum over v of P², weighted
square        ``[*p]``        sum over v and n of P², weighted
square_norm   ``[N]``         sum over v of the squared norms
============  ==============  =========================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from math import inf, prod

import torch
from torch import Tensor

from backpack.core import fast, memory
from backpack.core.values import at_least_single

CACHED_PRODUCTS = fast.path(
    "slices of products", "Individual products are used up while they are in the cache."
)
FEWER_POSITIONS = fast.path(
    "columns of positions", "Columns at few positions are replaced by one for each position."
)

# About how many entries a slice of P has: few enough that it stays in the cache of a CPU.
SLICE_ENTRIES = 2**21
# And elsewhere: enough that it takes longer to read them than to start an operation.
SLICE_ENTRIES_ELSEWHERE = 2**24
# How many it has where that does not matter: memory is bounded.
MOST_ENTRIES = 2**26
# Rows with more entries than this are added one by one: nothing is written in between.
LONG_ROW = 2**13
# From this many entries on, squares are not written before they are added up.
MANY_SQUARES = 2**16
# From here on, squares are added up by a matrix product, in one pass less.
MANY_COLUMNS = 2**5

# Precisions in which a sum may be rounded more than once.
PRECISE = (torch.float32, torch.float64)

NAMES = frozenset({"individual", "gradient", "batch_square", "square", "square_norm"})
PER_SAMPLE = frozenset({"batch_square", "square_norm"})
SUMS = frozenset({"gradient", "square"})

# Computes P for a slice of columns; may write it to a tensor that is given, in which the columns of
# a sample are next to each other, and return that.
Multiply = Callable[[slice, Tensor | None], Tensor]
# Prepares what all columns share, for a slice of samples.
Product = Callable[[slice], Multiply]


def in_bases(products: Tensor, bases: Sequence[Tensor], swaps: bool = False) -> Tensor:
    """Multiply products ``[V, N, *p]`` with ``(U_1 ⊗ U_2 ⊗ …)ᵀ``: ``[V, N, d_1, d_2, …]``.

    With ``swaps``, U_1 belongs to the second axis of the parameter.
    """
    if swaps:
        products = products.transpose(2, 3)
    turned = products.reshape(*products.shape[:2], *map(len, bases))
    for basis in bases:  # a step turns the first of the axes into the last
        turned = torch.tensordot(turned, basis.to(turned.dtype), dims=([2], [0]))
    return turned


def over_columns(values: Tensor) -> Tensor:
    """Sum ``[V, *]`` over V, as a view if there is one."""
    return values.squeeze(0) if len(values) == 1 else values.sum(0)


def mean_square(values: Tensor, axes: Sequence[int], count: float) -> Tensor:
    """Sum squares along some axes, divided by a count, at least in single precision."""
    wide = at_least_single(values)
    return (wide.square().sum(list(axes)) / count).to(values.dtype)


def gram(rows: Tensor, count: float, max_size: float = inf) -> Tensor:
    """Sum outer products of rows, divided by a count: ``[D, D]``; a diagonal ``[D]`` if larger."""
    if rows.shape[1] > max_size:
        return mean_square(rows, [0], count)
    unread, shape = rows.new_empty(1, 1), (rows.shape[1], rows.shape[1])
    is_large = prod(shape) * rows.element_size() >= memory.LARGE
    out = memory.empty(shape, rows) if is_large and not torch.is_grad_enabled() else None
    return torch.addmm(unread, rows.mT, rows, beta=0, alpha=1 / count, out=out)


def sum_of_squares(values: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the squares of ``[V, N, *]`` over V, with weights ``[V, N]``: ``[N, *]``."""
    if weights is None and len(values) == 1:
        first = values[0]
        return first * first
    if weights is not None and values.stride(1) == 0:  # all samples are alike
        return (weights.T @ values[:, 0, ..., None].flatten(1).square()).reshape(values.shape[1:])
    is_precise = values.is_cpu and values.dtype in PRECISE and not torch.is_grad_enabled()
    if is_precise and len(values) < MANY_COLUMNS and values[0].numel() >= LONG_ROW:
        total = torch.zeros_like(values[0])  # squares are not written before they are added up
        for v, column in enumerate(values):
            scaled = column
            if weights is not None:
                scaled = weights[v].reshape(-1, *(1,) * (column.dim() - 1)) * column
            total.addcmul_(scaled, column)
        return total
    if weights is None:
        return values.square().sum(0)
    if len(values) >= MANY_COLUMNS:  # one product for each sample
        squares = values.square().transpose(0, 1).unsqueeze(-1).flatten(2)
        return torch.bmm(weights.T.unsqueeze(1), squares).reshape(values.shape[1:])
    weights = weights.reshape(*weights.shape, *(1,) * (values.dim() - 2))
    return (weights * values * values).sum(0)


def of_products(
    products: Tensor, wanted: Set[str], weights: Tensor | None = None
) -> dict[str, Tensor]:
    """Reduce products that are there, ``[V, N, *p]``."""
    values = {}
    if "individual" in wanted:
        values["individual"] = products
    if "gradient" in wanted:
        values["gradient"] = products.sum((0, 1))
    if "square_norm" in wanted:
        flat = products.flatten(2) if products.dim() > 2 else products.unsqueeze(2)
        if flat.numel() < MANY_SQUARES:
            values["square_norm"] = flat.square().sum((0, 2))
        else:
            values["square_norm"] = torch.einsum("vnp,vnp->n", flat, flat)
    if "batch_square" in wanted or "square" in wanted:
        squares = sum_of_squares(products, weights)
        if "batch_square" in wanted:
            values["batch_square"] = squares
        if "square" in wanted:
            values["square"] = squares.sum(0)
    return values


def stacked_product(s: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply ``[V, *B, O, T]`` with ``[B, T, I]``: all columns of an entry b at once.

    (Broadcasting would copy x for each column.) The result may be written to a tensor, in which the
    columns of an entry b are next to each other.
    """
    if len(s) == 1 and out is None:
        return torch.bmm(s.flatten(0, -3), x).unsqueeze(0)
    stacked = s.movedim(0, -3).flatten(-3, -2).flatten(0, -3)
    if out is not None:
        torch.bmm(stacked, x, out=out.transpose(0, 1).flatten(1, 2))
        return out
    return (stacked @ x).unflatten(1, (len(s), -1)).transpose(0, 1)


def fewer_columns(s: Tensor, wanted: Set[str], weights: Tensor | None) -> Tensor:
    """Replace V columns at T positions by T with the same sums of squares, if that is cheaper.

    The products of row o with the inputs ``x_t`` are ``sum_t s_vt x_t``. Their sum of squares over
    v depends on ``S = [s_vt]`` only through ``SᵀS = RᵀR``, with R from a QR decomposition:
    ``[V, B, O, T] -> [T, B, O, T]``.
    """
    sees_columns = not wanted <= {"batch_square", "square", "square_norm"} or weights is not None
    is_dearer = torch.is_grad_enabled() or not s.is_cpu or not 0 < 4 * s.shape[3] <= len(s)
    if sees_columns or is_dearer or not FEWER_POSITIONS.is_on:
        return s
    stacked = at_least_single(s.permute(1, 2, 0, 3))
    return torch.linalg.qr(stacked, mode="r").R.to(s.dtype).permute(2, 0, 1, 3)


def slice_size(entries: float, device: torch.device) -> int:
    """Return how many samples (or columns) a slice has, if each takes so many entries."""
    limit = SLICE_ENTRIES if device.type == "cpu" else SLICE_ENTRIES_ELSEWHERE
    return max(1, int((limit if CACHED_PRODUCTS.is_on else MOST_ENTRIES) // max(1, entries)))


def _slices(count: int, size: int) -> list[slice]:
    if size >= count > 0:
        return [slice(0, count)]
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def in_slices(
    product: Product,
    shape: Sequence[int],
    entries: float,
    like: Tensor,
    wanted: Set[str],
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute products ``[V, N, *p]`` and reduce them, slice by slice, to what is wanted.

    A sample takes so many entries (infinitely many for one sample at a time); columns are split
    where one sample is too large already. Precision and device are those of ``like``.
    """
    num_v, num_n, *p = shape
    size = slice_size(entries, like.device)
    samples = _slices(num_n, size)
    if torch.is_grad_enabled():
        blocks = [product(span)(slice(0, num_v), None) for span in samples]
        return of_products(torch.cat(blocks, 1), wanted, weights)
    columns = _slices(num_v, slice_size(prod(p), like.device))
    # long rows are added one by one: their squares need not be written
    adds_rows = like.is_cpu and like.dtype in PRECISE and prod(p) >= LONG_ROW
    adds_rows = adds_rows and "square" in wanted and "batch_square" not in wanted
    if len(samples) == len(columns) == 1 and not adds_rows:
        return of_products(product(samples[0])(columns[0], None), wanted, weights)
    whole = memory.empty(shape, like) if "individual" in wanted else None
    precise = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
    sums = {name: memory.empty(p, precise).zero_() for name in wanted & SUMS}
    each: dict[str, list[Tensor]] = {name: [] for name in wanted & PER_SAMPLE}
    # slices are written to their place, or one after the other to the same memory in the cache
    place = whole if num_v == 1 else None
    rows = min(size, num_n) * columns[0].stop
    scratch = like.new_empty(rows if place is None else 0, *p)
    for span in samples:
        multiply = product(span)
        for part in columns:
            v, n = part.stop - part.start, span.stop - span.start
            if place is None:
                out = scratch[: n * v].unflatten(0, (n, v)).transpose(0, 1)
            else:
                out = place[:, span]
            block = multiply(part, out)
            if whole is not None and (place is None or block is not out):
                whole[part, span].copy_(block)
            of_part = None if weights is None else weights[part, span]
            for name, value in of_products(block, wanted & PER_SAMPLE, of_part).items():
                if part.start == 0:
                    each[name].append(value if len(columns) == 1 else value.to(precise.dtype))
                else:
                    each[name][-1].add_(value)
            _accumulate(sums, block, of_part)
    found = {name: torch.cat(values) for name, values in each.items()} | sums
    found = {name: value.to(like.dtype) for name, value in found.items()}
    return found if whole is None else {"individual": whole, **found}


def _accumulate(sums: Mapping[str, Tensor], block: Tensor, weights: Tensor | None) -> None:
    """Add products ``[V, N, *p]`` and their squares: one by one, unless they are short.

    Half precision is rounded once for a slice: a long sum would stay where it is.
    """
    is_short = block[0, 0].numel() < LONG_ROW or block.dtype not in PRECISE
    if is_short or not block.is_cpu:
        for name, value in of_products(block, sums.keys(), weights).items():
            sums[name].add_(value)
        return
    for i, column in enumerate(block):
        factors = [1.0] * len(column) if weights is None else weights[i].tolist()
        for row, factor in zip(column, factors, strict=True):
            if "gradient" in sums:
                sums["gradient"].add_(row)
            if "square" in sums and factor:
                sums["square"].addcmul_(row, row, value=factor)

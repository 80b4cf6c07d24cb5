"""Products with a weight and a bias that a module applies at several positions of a sample.

``y_nt = W x_nt + b`` at positions t: those of a linear layer with extra axes, the patches of a
convolution, the time steps of a recurrent layer. ``s`` is what arrives at y.

Letters: V columns, n (N) sample, t (T) position, o (O) output, i (I) input feature. Everywhere,
``x`` is ``[N, T, I]`` for the weight ``[O, I]``, and None for the bias ``[O]``. If there is one
position, x and s may come without the axis T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from backpack.core import fast, memory
from backpack.core.derivatives import reductions
from backpack.core.values import has_values

# A sum that is shorter than this part of its terms (squared) has lost digits.
CANCELLED = 1e-2
# Precision in which it has enough left all the same.
PRECISE_EPS = 1e-12
GRAM_NORMS = fast.path("norms by Gram matrices", "Norms of products need no products.")


def jvp(mat: Tensor, x: Tensor | None, num_n: int, num_t: int) -> Tensor:
    """Apply the Jacobian, ``y = mat x``: ``[V, O, I]`` or ``[V, O]`` to ``[V, N, T, O]``."""
    if x is None:
        return mat[:, None, None].expand(-1, num_n, num_t, -1)
    return (x.flatten(0, -2) @ mat.mT).unflatten(1, (num_n, num_t))


def jvp_of_output(t: Tensor, x: Tensor | None, y: Tensor) -> Tensor:
    """Apply the Jacobian of a module whose output y, ``[N, *, O]``, is the sum of ``W x``."""
    return jvp(t, x, len(y), y.shape[1:-1].numel()).reshape(len(t), *y.shape)


def vjp(s: Tensor, x: Tensor | None) -> Tensor:
    """Return ``sum_t s_t x_tᵀ`` (or ``sum_t s_t``) for each sample: ``[V, N, *p]``."""
    if s.dim() == 3:
        return s if x is None else _outer(s, x)
    if x is None:
        return s.sum(2)
    return memory.product(s.mT, x) if x.shape[1] == 1 else s.mT @ x


def vjp_sum(s: Tensor, x: Tensor | None) -> Tensor:
    """Sum :func:`vjp` over the samples: ``[V, *p]``."""
    if s.dim() == 3:
        return s.sum(1) if x is None else s.mT @ x
    if x is None:
        return s.sum((1, 2))
    if not s.is_contiguous():  # merge n and t as they are in memory: nothing is copied
        s, x = s.transpose(1, 2), x.transpose(0, 1)
    return s.flatten(1, 2).mT @ x.flatten(0, 1)


def reduced(
    s: Tensor,
    x: Tensor | None,
    wanted: Set[str],
    weights: Tensor | None,
    shared: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Reduce the individual products, see :mod:`backpack.core.derivatives.reductions`.

    ``s`` is ``[V, N, T, O]``; squares have weights ``[V, N]``. What is computed of ``s`` alone is
    added to ``shared``, for other parameters.
    """
    if s.dim() == 3:
        return of_rows(s, x, wanted, weights, shared)
    num_t, num_o = s.shape[2:]
    if num_t == 1:
        row = None if x is None else x.squeeze(1)
        return of_rows(s.squeeze(2), row, wanted, weights, shared)
    if x is None:
        known = {} if shared is None else shared
        known["sums"] = known["sums"].clone() if "sums" in known else s.sum(2)
        return reductions.of_products(known["sums"], wanted, weights)
    s = reductions.fewer_columns(s.mT, wanted, weights).mT
    values = {}
    sizes = len(s), num_o, num_t, x.shape[2]
    if wanted <= {"gradient", "square_norm"} and gram_is_cheaper(*sizes):
        if "gradient" in wanted:
            values["gradient"] = reductions.over_columns(vjp_sum(s, x))
        if "square_norm" in wanted:
            values["square_norm"] = square_norm(s, x, shared)
        return values

    return _in_slices(s, x, wanted, weights)


def _in_slices(
    s: Tensor,
    x: Tensor,
    wanted: Set[str],
    weights: Tensor | None = None,
    turn: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Multiply, turn the products, and reduce them: slices of samples after each other."""
    num_v, num_n, num_o, num_i = *s.shape[:2], s.shape[-1], x.shape[-1]

    def product(samples: slice) -> reductions.Multiply:
        part = x[samples]
        if turn is None:
            return lambda v, out: reductions.stacked_product(s[v, samples].mT, part, out)
        return lambda v, out: turn(s[v, samples].mT @ part)

    shape = (num_v, num_n, num_o, num_i)
    return reductions.in_slices(product, shape, num_v * num_o * num_i, s, wanted, weights)


def of_rows(
    s: Tensor,
    x: Tensor | None,
    wanted: Set[str],
    weights: Tensor | None,
    shared: dict[str, Any] | None,
) -> dict[str, Tensor]:
    """Do so without the axis T: squares of ``s xᵀ`` are ``s² x²ᵀ``."""
    known = {} if shared is None else shared
    values = {}
    if "individual" in wanted:
        values["individual"] = s if x is None else _outer(s, x)
    if "gradient" in wanted:
        values["gradient"] = _over_rows(reductions.over_columns(s), x)
    if "square_norm" in wanted:
        if "norms" not in known:
            known["norms"] = _square_norms(s)
        norms = known["norms"]
        own = norms.clone() if x is None else norms * _square_norms(x.unsqueeze(0))
        values["square_norm"] = own
    if "batch_square" in wanted or "square" in wanted:
        if "squares" not in known:
            known["squares"] = reductions.sum_of_squares(s, weights)
        squares, x_squares = known["squares"], None if x is None else x * x
        if "batch_square" in wanted:
            each = squares.clone() if x_squares is None else _outer(squares, x_squares)
            values["batch_square"] = each
        if "square" in wanted:
            values["square"] = _over_rows(squares, x_squares)
    return values


def _outer(s: Tensor, x: Tensor) -> Tensor:
    """Return ``s xᵀ`` of each sample, ``[*, N, O, I]``, as a result: what is scratch is ``*``."""
    return memory.product(s.unsqueeze(-1), x.unsqueeze(-2))


def _over_rows(s: Tensor, x: Tensor | None) -> Tensor:
    """Sum ``s xᵀ`` (or s) over samples: ``[*p]``."""
    return s.sum(0) if x is None else s.mT @ x


# torch.linalg.vector_norm adds up one after the other: longer rows would lose digits.
LONGEST_ROW = 2**12


def _square_norms(mat: Tensor) -> Tensor:
    """Sum squares over columns and entries: ``[V, N, D] -> [N]``."""
    is_short = len(mat) == 1 and mat.shape[-1] <= LONGEST_ROW
    # a norm has no second derivative at 0, and rounds twice
    if is_short and mat.dtype in reductions.PRECISE and not torch.is_grad_enabled():
        norms = torch.linalg.vector_norm(mat[0], dim=-1)
        return norms * norms
    return mat.square().sum((0, -1))


def gram_is_cheaper(num_v: int, num_o: int, num_t: int, num_i: int) -> bool:
    """Whether :func:`square_norm` takes fewer multiplications than the products themselves."""
    return GRAM_NORMS.is_on and num_t * (num_v * num_o + num_i) <= num_v * num_o * num_i


def square_norm(s: Tensor, x: Tensor, shared: dict[str, Any] | None = None) -> Tensor:
    """Squared norm of each sample's product, summed over V, by Gram matrices: ``[N]``.

    ``|sum_t s_t x_tᵀ|² = sum_{t,u} (s_t·s_u) (x_t·x_u)``. Samples of which positions nearly cancel
    are multiplied out: rounding would decide. For ``shared`` see :func:`reduced`.
    """
    known = {} if shared is None else shared
    if "products of positions" not in known:
        first, *others = (torch.bmm(of_v, of_v.mT) for of_v in s)
        known["products of positions"] = sum(others, start=first)
    of_s, of_x = known["products of positions"], torch.bmm(x, x.mT)
    norms = (of_s * of_x).sum((1, 2))
    sizes = (of_s.diagonal(0, 1, 2) * of_x.diagonal(0, 1, 2)).sum(1)  # sum_t |s_t|² |x_t|²
    rows = lost_rows(norms, sizes, norms.dtype)
    if not len(rows):
        return norms if torch.is_grad_enabled() else norms.clamp_(min=0)
    exact = _in_slices(s[:, rows], x[rows], {"square_norm"})
    return norms.index_copy(0, rows, exact["square_norm"])


def lost_rows(norms: Tensor, sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of samples whose squared norm ``[N]`` is far less than those of its terms.

    What is left of these, if computed in a precision, are rounding errors.
    """
    eps = torch.finfo(dtype).eps
    if eps < PRECISE_EPS or not has_values(norms) or is_fake(norms):
        return torch.empty(0, dtype=torch.long)
    return (norms < max(CANCELLED, 64 * eps) * sizes).nonzero()[:, 0]


def square_in_bases(
    s: Tensor, x: Tensor | None, bases: Sequence[Tensor], weights: Tensor | None
) -> Tensor:
    """Sum ``(U_1ᵀ (sum_t s_t x_tᵀ) U_2)²`` over columns and samples: ``[O, I]``, or ``[O]``.

    Turned are the factors, or, if there are more positions than a sample has products' rows, the
    products. There is no U_2 if x is None.
    """
    left, *others = (basis.to(s.dtype) for basis in bases)
    if x is None:
        rows = s if s.dim() == 3 else _over_positions(s)
        return reductions.of_products(rows @ left, {"square"}, weights)["square"]
    (right,) = others
    num_v, num_o, num_i = len(s), s.shape[-1], x.shape[-1]
    of_products = num_v * num_o * num_i * (num_o + num_i)
    if s.dim() == 3 or s.shape[2] * (num_v * num_o**2 + num_i**2) <= of_products:
        return reduced(s @ left, x @ right, {"square"}, weights)["square"]
    return _in_slices(s, x, {"square"}, weights, lambda p: left.mT @ p @ right)["square"]


def _over_positions(s: Tensor) -> Tensor:
    """Sum over the positions, without a copy if there is one: ``[V, N, T, O] -> [V, N, O]``."""
    return s.squeeze(2) if s.shape[2] == 1 else s.sum(2)


def position_rows(s: Tensor, approximation: str | None) -> Tensor:
    """Sum over the positions, or ("expand") treat them as samples: ``[V, N, T, O] -> [V, N', O]``.

    Source: Eschenhagen et al., Kronecker-factored approximate curvature for modern neural network
    architectures (NeurIPS 2023).
    """
    return s.flatten(1, 2) if approximation == "expand" else _over_positions(s)


def with_one(x: Tensor) -> Tensor:
    """Return ``[x; 1]``, what weight and bias together are multiplied with: ``[*, I + 1]``."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)


def input_factor(x: Tensor, approximation: str | None, max_size: float = inf) -> Tensor:
    """Return the Kronecker factor of inputs at several positions: ``[N, T, I] -> [I, I]``.

    ``(1/N) sum_nt x xᵀ``; ("expand") ``1/(N T) sum_nt x xᵀ``; ("reduce") ``1/(N T²) sum_n x̄ x̄ᵀ``
    with x̄ the sum over the positions. Source: as :func:`position_rows`. Of one larger than
    ``max_size`` the diagonal ``[I]`` alone.
    """
    x = x.unsqueeze(1) if x.dim() == 2 else x
    num_n, num_t = x.shape[:2]
    if approximation == "reduce":
        x = x.mean(1, keepdim=True)
    count = num_n * num_t if approximation == "expand" else num_n
    rows = (x if x.is_contiguous() else x.transpose(0, 1)).flatten(0, 1)
    return reductions.gram(rows, count, max_size)

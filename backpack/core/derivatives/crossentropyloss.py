"""Losses of a distribution over classes: softmax cross entropy, negative log likelihood.

``ℓ = c · sum_n w_n (-sum_k t_nk log p_nk)``, with ``p = softmax(f)`` or the prediction ``log p``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, NLLLoss

from backpack.core import fast
from backpack.core.derivatives.loss_hessian import SomeColumns
from backpack.core.derivatives.lossbase import BaseLossDerivatives, is_negative, not_convex
from backpack.core.derivatives.memoise import memoise
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.module_state import describe
from backpack.core.record.registry import register
from backpack.core.values import has_values

# What fast bodies of the cross entropy follow from.
SOFTMAX = ("hessian_root", "log_p", "p", "_scale")
# What the sum of its Hessians follows from.
OF_SUM = (*SOFTMAX, "need_convex", "check_call")


@register(CrossEntropyLoss)
class CrossEntropyLossDerivatives(BaseLossDerivatives):
    """Derivatives of ``torch.nn.CrossEntropyLoss``: the Hessian is ``a (diag(p) - p pᵀ)``.

    The prediction has shape ``[N, C, *d]``. The scale a, of shape ``[N, *d]``, collects the
    reduction, class weights, label smoothing, probabilities as targets and ``ignore_index``.
    """

    has_classes = True

    def log_p(self, c: Context) -> Tensor:
        """Return the logarithms of the predicted probabilities: ``[N, C, *d]``."""
        return c.x.log_softmax(1)

    def p(self, c: Context) -> Tensor:
        """Return the predicted probabilities: ``[N, C, *d]``."""
        return c.x.softmax(1)

    def _scale(self, c: Context) -> Tensor:
        """Return the factor a in front of ``diag(p) - p pᵀ``: ``[N, 1, *d]``. Asked before p."""
        x, y = c.input, _target(c.inputs)
        if x.dim() < 2:
            raise ValueError(
                f"{describe(c.module)}: the prediction needs a batch axis, got shape "
                f"{list(x.shape)}."
            )
        num_classes = x.shape[1]
        weight = c.params.get("weight")
        weight = None if weight is None else weight.to(x.dtype)
        smooth = getattr(c.module, "label_smoothing", 0.0)
        if y.is_floating_point():  # the target is a distribution over the classes
            target = (1 - smooth) * y + smooth / num_classes
            scale = (
                target.sum(1) if weight is None else torch.einsum("nc...,c->n...", target, weight)
            )
            total: Any = scale.numel()
        else:
            scale = own = kept = y != c.module.ignore_index
            if weight is not None:
                own = torch.where(kept, weight[y.where(kept, y.new_zeros(()))], 0.0)
                scale = (1 - smooth) * own + smooth / num_classes * weight.sum() * kept
            # without a target left, the derivatives are zero, though the loss is 0 / 0
            total = own.sum(dtype=x.dtype) + ~kept.any()
        scale = scale / total if c.module.reduction == "mean" else scale.to(x.dtype)
        return c.select(scale).unsqueeze(1)

    def divides_by_targets(self, call: Call) -> bool:
        """Return whether a mean is that over the weights, or the targets that are not ignored."""
        y, module = _target(call.inputs), call.module
        if module.reduction != "mean" or y.is_floating_point():
            return False
        return module.weight is not None or bool((y == module.ignore_index).any())

    def counted(self, c: Context) -> Tensor | None:
        """Return which targets are not ``ignore_index``: ``[N, *d]``; None for probabilities."""
        y = _target(c.inputs)
        if y.is_floating_point() or y.is_meta:
            return None
        return c.select(y != c.module.ignore_index)

    @staticmethod
    def _counts_samples(c: Context) -> bool:
        """Whether the scale is one number for all samples that are not ignored."""
        return c.params.get("weight") is None and not c.inputs[1].is_floating_point()

    def need_convex(self, c: Context) -> None:
        """Refuse negative weights and targets."""
        if not self._counts_samples(c) and is_negative(self._scale(c)):
            raise not_convex(c.module, "a weight or a target is negative")

    def hessian_root(self, c: Context) -> Tensor:
        """Return ``sqrt(a) (diag(sqrt(p)) - p sqrt(p)ᵀ)``: columns ``sqrt(a p_k) (e_k - p)``."""
        return _with_positions_apart(_columns(*self._roots(c)))

    def _roots(self, c: Context) -> tuple[Tensor, Tensor]:
        """Return ``sqrt(a p)`` and p, ``[N, C, *d]``."""
        scale, log_p = self._scale(c), self.log_p(c)
        # (log p / 2).exp(): the root of a p of zero has no derivative
        return scale.sqrt() * (log_p / 2).exp(), log_p.exp()

    @fast.body("Columns are made when they travel.", "hessian_root")
    def some_of_root(self, c: Context) -> SomeColumns | None:
        """Return what makes columns of :meth:`hessian_root` without positions."""
        if c.input.dim() > 2:
            return None
        roots, p = self._roots(c)
        return SomeColumns(p.shape[1], lambda part: _columns(roots[:, part], p, part.start))

    @fast.body("Columns are made when they travel.", "some_of_root", "signed_hessian_root")
    def some_of_signed_root(self, c: Context) -> SomeColumns | None:
        """Return the same, unless a scale is negative: also of other rows, for as many columns."""
        is_signed = not self._counts_samples(c) and is_negative(self._scale(c.at(None)))
        return None if is_signed else self.some_of_root(c)

    @fast.body("The sum of diag(p) - p pᵀ is one product.", *OF_SUM)
    def hessian_sum(self, c: Context) -> Tensor:
        """Return ``sum_n a_n (diag(p_n) - p_n p_nᵀ)``."""
        if c.input.dim() > 2:
            return super().hessian_sum(c)
        self.check_call(c)
        self.need_convex(c)
        scale, p = self._scale(c), self.p(c)
        mass = scale * p
        total = mass.mT @ -p
        total.diagonal().add_(mass.sum(0))
        return total

    @fast.body("That is what it is for.", "hessian_sum", *OF_SUM)
    def knows_hessian_sum(self, c: Context) -> bool:
        """Return whether there are no positions."""
        return c.input.dim() == 2

    @fast.body("The Cholesky factor has a column less.", *SOFTMAX)
    def thin_hessian_root(self, c: Context) -> Tensor:
        """Return the Cholesky factor, with a column less."""
        return self._cholesky(c, self._scale(c).sqrt())

    def _cholesky(self, c: Context, root_of_scale: Tensor) -> Tensor:
        """Return the Cholesky factor of ``diag(p) - p pᵀ`` (last class first), scaled.

        With the sums ``q_k = sum_{j <= k} p_j``, column ``k > 0`` is ``sqrt(p_k q_{k-1} / q_k)``
        times ``e_k - sum_{j < k} p_j / q_{k-1} e_j``; column 0 is zero. Source: Tanabe & Sagae, An
        exact Cholesky decomposition and the generalized inverse of the variance-covariance matrix
        of the multinomial distribution (1992).
        """
        given = self.p(c).movedim(1, -1)  # [N, *d, C]
        p = given.to(torch.promote_types(given.dtype, torch.float32))  # float16 would underflow
        q, tiny = p.cumsum(-1), torch.finfo(p.dtype).tiny
        exists = torch.minimum(p[..., 1:], q[..., :-1]) > 0  # else the column is zero, not 0 / 0
        p, q = p.clamp(min=tiny), q.clamp(min=tiny)
        before = q[..., :-1].sqrt()
        roots = (p / q)[..., 1:].sqrt() * (root_of_scale.movedim(1, -1) * exists)
        columns = ((roots / -before).unsqueeze(-1) * p.unsqueeze(-2)).tril()  # [N, *d, C - 1, C]
        columns.diagonal(1, -2, -1).copy_(roots * before)
        if p.shape[-1] == 1:  # one class: the Hessian is zero
            columns = (p - p).unsqueeze(-2)
        columns = columns.to(given.dtype).movedim(-2, 0).movedim(-1, 2)
        return _with_positions_apart(columns.contiguous())

    def sampled_hessian_root(self, c: Context, mc_samples: int) -> Tensor:
        """Return ``sqrt(a) (p - e_y)`` with y drawn from p."""
        c = c.at(None)
        self.need_convex(c)
        scale, p = self._scale(c), self.p(c)
        one_hot = p.new_zeros(mc_samples, *p.shape).scatter_(2, _drawn(p.detach(), mc_samples), 1)
        return scale.sqrt() * (p - one_hot)

    def signed_hessian_root(self, c: Context) -> tuple[Tensor, Tensor | None]:
        """Return the Cholesky factor, with the sign of the scale."""
        scale = self._scale(c)
        columns = self._cholesky(c, scale.abs().sqrt())
        if self._counts_samples(c) or not is_negative(scale):
            return columns, None
        sign = scale.sign().flatten(1).T  # [positions, N]
        return columns, sign.repeat_interleave(len(columns) // len(sign), 0)

    def hessian_product(self, c: Context, t: Tensor) -> Tensor:
        """Apply ``a (diag(p) - p pᵀ)``."""

        def compute() -> tuple[Tensor, Tensor]:
            return self._scale(c), self.p(c)

        if torch.is_grad_enabled():  # each product has a graph of its own
            scale, p = compute()
        else:
            tensors = (c.input, c.inputs[1], c.params.get("weight"))
            rows = tuple(c.rows) if isinstance(c.rows, list) else c.rows
            scale, p = memoise(c.saved, "p", tensors, (rows,), compute)
        product = p * t
        return scale * torch.addcmul(product, p, product.sum(2, keepdim=True), value=-1)


def _target(inputs: Sequence[Any]) -> Tensor:
    """Return the target; classes as int64: uint8 would be a mask, and -100 the class 156."""
    y: Tensor = inputs[1]
    return y if y.is_floating_point() else y.long()


def _drawn(p: Tensor, count: int) -> Tensor:
    """Draw classes with probabilities p by inversion: ``[N, C, *d] -> [count, N, 1, *d]``."""
    sums = p.to(torch.promote_types(p.dtype, torch.float32)).cumsum(1)
    uniform = torch.rand(count, len(p), 1, *p.shape[2:], dtype=sums.dtype, device=p.device)
    return (sums[:, :-1] <= uniform * sums[:, -1:]).sum(2, keepdim=True)


def _columns(roots: Tensor, p: Tensor, first: int = 0) -> Tensor:
    """Return ``sqrt(a p_k) (e_k - p)`` for classes from the first on: ``[V, N, C, *d]``."""
    columns = -roots.movedim(1, 0).unsqueeze(2) * p
    columns.diagonal(first, 0, 2).add_(roots.movedim(1, -1))
    return columns


def _with_positions_apart(columns: Tensor) -> Tensor:
    """Give each position columns, by position: ``[V, N, C, *d] -> [D·V, N, C, *d]``."""
    if columns.shape[3:].numel() == 1:
        return columns
    apart = torch.diag_embed(columns.flatten(3), dim1=0, dim2=4)  # [D, V, N, C, D]
    return apart.reshape(-1, *columns.shape[1:])


@register(NLLLoss)
class NLLLossDerivatives(CrossEntropyLossDerivatives):
    """Derivatives of ``torch.nn.NLLLoss``: the Hessian is zero, the GGN that of the softmax.

    The loss is linear in the log-probabilities ``x = log p`` that it reads, and a GGN with its
    Hessian would be zero. Instead, the matrix of the GGN is the Fisher information of the
    categorical distribution, the covariance of the gradient ``-e_y``: ``a (diag(p) - p pᵀ)``.
    The network ``LogSoftmax`` with this loss then has the GGN (and the Monte-Carlo quantities) of
    ``CrossEntropyLoss`` without it: ``Jᵀ (diag(p) - p pᵀ) J = diag(p) - p pᵀ`` for the Jacobian
    ``J = I - 1 pᵀ`` (Martens 2020, New insights and perspectives on the natural gradient method,
    section 9). Hessian quantities are those of the loss itself, and agree in both cases anyway.
    Scores that are no log-probabilities have no such distribution: their GGN is an error.
    """

    hessian_sum = CrossEntropyLossDerivatives.hessian_sum  # a factor has N C² entries

    def log_p(self, c: Context) -> Tensor:
        """Return the prediction: it is a logarithm of probabilities."""
        return c.x

    def p(self, c: Context) -> Tensor:
        """Return the probabilities, the exponentials of the prediction."""
        return self.log_p(c).exp()

    def need_convex(self, c: Context) -> None:
        """Refuse scores that are no log-probabilities, too."""
        super().need_convex(c)
        log_p, counts = self.log_p(c), self._scale(c) != 0
        error = (log_p.logsumexp(1, keepdim=True).abs() * counts).detach()
        # log(p + 1e-8), which is a habit, has to pass
        tolerance = max(c.call.rounding**0.5, 1e-5)
        if has_values(error) and bool((error > tolerance).any()):
            raise ValueError(
                f"{describe(c.module)} reads log-probabilities, but the exponentials of the "
                f"prediction do not sum to 1 (their sum has the logarithm {float(error.max()):g} "
                "in absolute value): put LogSoftmax before it, or use CrossEntropyLoss."
            )

    def ggn_product(self, c: Context, t: Tensor) -> Tensor:
        return super().hessian_product(c, t)

    def signed_hessian_root(self, c: Context) -> tuple[Tensor, Tensor | None]:
        """Return zero: the loss is linear in the log-probabilities."""
        return torch.zeros_like(c.x)[None], None

    def hessian_product(self, c: Context, t: Tensor) -> Tensor:
        """Return zero: the loss is linear in the log-probabilities."""
        return torch.zeros_like(t)

"""The contract of a loss's derivatives: factors of its Hessian with respect to the prediction.

Letters: the prediction has shape ``[N, *d]`` with D entries for a sample; a factor S of shape
``[V, N, *d]`` satisfies ``sum_v S_vn S_vnᵀ = ∇²_n``, the Hessian of the (reduced) loss with respect
to the prediction of sample n. If several inputs are predictions (:meth:`~BaseLossDerivatives.
predictions`), what is one tensor here becomes a tuple with one entry (or None) for each input.

For most losses the matrix of the GGN is that Hessian. ``hessian_root``, ``ggn_product`` and
``hessian_sum`` are about the GGN, which is positive semidefinite or an error;
``signed_hessian_root`` and ``hessian_product`` are about the Hessian, whatever its sign. The two
differ only where a rule says so (``NLLLossDerivatives``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.loss import _Loss

from backpack.context import disable
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.facts import always, never
from backpack.core.derivatives.interface import LossInterface
from backpack.core.derivatives.loss_hessian import SomeColumns, place_of_chosen
from backpack.core.derivatives.terms import num_terms
from backpack.core.record.context import Context
from backpack.core.record.module_state import cast, describe
from backpack.core.record.registry import derivatives_of
from backpack.core.record.visits import Visit
from backpack.core.values import has_values

# Columns at the prediction, or one entry (None for zero) for each input.
Columns = Tensor | tuple[Tensor | None, ...]


class BaseLossDerivatives(LossInterface, BaseDerivatives):
    """Derivatives of a loss ``ℓ(prediction, target)``, reduced to a scalar.

    A subclass implements ``hessian_root``, ``sampled_hessian_root`` and ``hessian_product``; if
    the loss need not be convex, also ``need_convex`` and ``signed_hessian_root``.
    """

    is_loss = True
    includes_children = True  # no rule knows parameters of a loss: trained ones are an error

    hessian_is_zero = never  # a loss is no affine function of its prediction, as a rule
    hessian_is_psd = always  # convex in the prediction
    #: Whether a prediction of a single axis is one sample's, with an entry for each class.
    has_classes = False

    def has_likelihood(self, module: Module) -> bool:
        """Return whether the loss is the negative log likelihood of a known distribution."""
        return True

    def predictions(self, c: Context) -> tuple[int, ...]:
        """Number the inputs that are predictions; the others are targets, weights or options."""
        return (0,)

    def counted(self, c: Context) -> Tensor | None:
        """Return which targets count, ``[N, *d]``; None if the loss can ignore none."""
        return None

    def couples_samples_unseen(self, call: Visit) -> bool | None:
        """Return whether what may be samples are the classes of one."""
        shape = call.shape_in[0]
        return self.has_classes and shape is not None and len(shape) == 1

    def couples_terms(self, c: Context) -> bool:
        """Return whether the loss is no sum over the samples: its Hessian has mixed terms."""
        return False

    # ------------------------------------------------------------------ the Hessian

    def hessian_root(self, c: Context) -> Any:
        """Exact factor S of a Hessian that :meth:`need_convex` does not refuse: ``[V, N, *d]``."""
        raise NotImplementedError(f"{type(self).__name__} has no sqrt_hessian (hessian_root).")

    def thin_hessian_root(self, c: Context) -> Any:
        """Exact factor with as few columns as are known, for what depends on ``S Sᵀ`` alone."""
        return self.hessian_root(c)

    def signed_hessian_root(self, c: Context) -> tuple[Any, Tensor | None]:
        """Exact signed factor of the Hessian, which need not be positive semidefinite.

        Returns:
            Columns s ``[V, N, *d]`` and weights w ``[V, N]`` (None for all 1) with
            ``sum_v w_vn s_vn s_vnᵀ = ∇²_n``.
        """
        return self.hessian_root(c), None

    def some_of_root(self, c: Context) -> SomeColumns | None:
        """Return what makes some columns of :meth:`hessian_root`; None: it makes all at once."""
        return None

    def some_of_signed_root(self, c: Context) -> SomeColumns | None:
        """Return what makes some columns of a factor of the Hessian whose weights are 1, or None.

        The factor need not be that of :meth:`signed_hessian_root`.
        """
        return None

    def sampled_hessian_root(self, c: Context, mc_samples: int) -> Any:
        """Gradients for targets drawn from the model's prediction, of all rows: ``[M, N, *d]``."""
        raise NotImplementedError(f"{type(self).__name__} has no sqrt_hessian_sampled.")

    def drawn_hessian_root(self, c: Context, mc_samples: int) -> Any:
        """Monte-Carlo factor of a likelihood, ``sampled_hessian_root / sqrt(M)`` of some rows."""
        if not self.has_likelihood(c.module):
            raise NotImplementedError(
                f"{describe(c.module)} is not the negative log likelihood of a distribution that "
                "targets could be drawn from, so it has no Monte-Carlo quantities. Use the exact "
                "ones: DiagGGNExact, BatchDiagGGNExact, SqrtGGNExact, GGNGram(), and of Kronecker "
                "factors KFLR, which is KFAC(fisher='exact'), or EKFAC(fisher='exact')."
            )
        sampled = self.sampled_hessian_root(c, mc_samples)
        if mc_samples > 1:
            sampled = sampled / sqrt(mc_samples)
        return c.select(sampled, 1)

    def gradient_root(self, c: Context) -> Tensor:
        """Gradient g of the loss, times the root of :func:`num_terms`: ``[1, N, *d]``.

        The sum of the outer products of the terms' gradients ``W g``, divided by W.
        """
        args, _ = c.call.arguments(self.as_called(c))
        place = c.call.place_in(0)
        axis = 0 if place is None else place.axis
        terms = num_terms(c.module, args[0], args[1:], lambda: axis)
        return c.select(self._gradient(c) * sqrt(terms)).unsqueeze(0)

    def hessian_product(self, c: Context, t: Any) -> Any:
        """Apply the Hessian: ``[V, N, *d] -> [V, N, *d]``."""
        raise NotImplementedError(f"{type(self).__name__} has no Hessian product.")

    def ggn_product(self, c: Context, t: Any) -> Any:
        """Apply ``S Sᵀ``: ``[V, N, *d] -> [V, N, *d]``."""
        return self.hessian_product(c, t)

    def hessian_sum(self, c: Context) -> Tensor:
        """Sum the Hessian with respect to a sample's prediction over samples: ``[D, D]``."""
        self.check_call(c)
        self.need_convex(c)
        factor = self.hessian_root(c).flatten(0, 1)
        rows = factor.reshape(len(factor), -1)
        return rows.T @ rows

    def knows_hessian_sum(self, c: Context) -> bool:
        """Return whether :meth:`hessian_sum` takes no factor."""
        return False

    def need_convex(self, c: Context) -> None:
        """Raise :func:`not_convex` if the Hessian is not positive semidefinite."""

    # Chosen rows: see loss_hessian.

    def sees_chosen_rows(self, module: Any) -> bool:
        """Return whether formulas are about the rows of a prediction as they are."""
        return True

    def seen(
        self, call: Visit, inputs: Sequence[Any], outputs: Sequence[Tensor]
    ) -> tuple[list[Any], list[Tensor]]:
        """Return inputs and output as they are, with chosen rows along the first axis."""
        place = place_of_chosen(call) if self.sees_chosen_rows(call.module) else None
        if place is None:
            return super().seen(call, inputs, outputs)
        if not place.axis:
            return list(inputs), list(outputs)
        tensors = [x for x in inputs if isinstance(x, Tensor) and x.dim()]
        if any(x.dim() != tensors[0].dim() for x in tensors):
            raise ValueError(
                f"{call!r} reads chosen rows of samples along axis {place.axis}. Move them to the "
                "first axis (x.movedim), that of the target as well."
            )
        by_id = {id(x): x.movedim(place.axis, 0) for x in tensors}
        return [by_id.get(id(x), x) for x in inputs], list(outputs)

    # A loss as a module: its Jacobian is the gradient with respect to the prediction.

    def as_called(self, c: Context) -> list[Any]:
        """Return the inputs of the call as they were, whose axes options such as weights fit."""
        inputs, precision = c.call.whole_inputs(), c.call.precision
        return [x if precision is None else cast(x, precision) for x in inputs]

    def _gradient(self, c: Context) -> Tensor:
        differentiable, inputs = torch.is_grad_enabled(), self.as_called(c)
        with torch.enable_grad():
            x = inputs[0] if differentiable else inputs[0].detach()
            x = x if x.requires_grad else x.requires_grad_()
            with disable():
                loss = self.evaluate(c, {}, x, *inputs[1:])
            gradient = torch.autograd.grad(loss.sum(), x, create_graph=differentiable)[0]
        if c.call.samples_come_first:
            return gradient
        return self.seen(c.call, [gradient, *inputs[1:]], c.call.outputs)[0][0]

    def jvp(self, c: Context, t: Any) -> Tensor:
        """Multiply with the gradient, and sum."""
        self.check_call(c)
        t = t if isinstance(t, Tensor) else t[0]
        return (t * c.select(self._gradient(c))).flatten(1).sum(1)

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        """Multiply the gradient."""
        self.check_call(c)
        gradient = c.select(self._gradient(c))
        return v.reshape(-1, *(1,) * gradient.dim()) * gradient

    def check_call(self, c: Context) -> None:
        """Refuse a call whose second derivatives are not defined."""
        if c.output.numel() != 1:
            reduction = getattr(c.module, "reduction", None)
            raise ValueError(
                f"Second-order quantities need a scalar loss, but the output of "
                f"{describe(c.module)} has shape {list(c.output.shape)} (reduction={reduction!r}). "
                "Use reduction='mean' or 'sum'."
            )
        if 0 in self.predictions(c) and c.input.dim() == 0:
            raise ValueError(
                f"{describe(c.module)}: the prediction needs a batch axis, but is a single number. "
                "Add one, x.unsqueeze(0)."
            )


def is_loss(module: Module) -> bool:
    """Return whether a module is a loss: one of torch's, or one with derivatives of a loss."""
    return isinstance(module, _Loss) or isinstance(derivatives_of(module), BaseLossDerivatives)


def is_nll(module: Module) -> bool:
    """Return whether a module is the negative log likelihood of a distribution to draw from."""
    rule = derivatives_of(module)
    return isinstance(rule, BaseLossDerivatives) and rule.has_likelihood(module)


def not_convex(module: Module, why: str) -> ValueError:
    """Return the error for a GGN quantity of a loss that is not convex in the prediction."""
    return ValueError(
        f"{describe(module)} is not convex in the prediction: {why}. The GGN has no square root "
        "then. Use Hessian quantities (DiagHessian, BatchDiagHessian, HMP) instead."
    )


def is_negative(tensor: Tensor) -> bool:
    """Return whether an entry is negative; no where there are no values."""
    if not has_values(tensor):
        return False
    return tensor.item() < 0 if tensor.numel() == 1 else bool((tensor < 0).any())


def some_of_identity(diagonal: Tensor) -> SomeColumns:
    """Return what makes columns of :func:`scaled_identity`."""
    flat = diagonal.flatten(1)

    def make(part: slice) -> Tensor:
        columns = flat.new_zeros(part.stop - part.start, *flat.shape)
        columns.diagonal(part.start, 0, 2).copy_(flat[:, part])
        return columns.reshape(-1, *diagonal.shape)

    return SomeColumns(flat.shape[1], make)


def scaled_identity(diagonal: Tensor) -> Tensor:
    """Return the columns of ``diag(diagonal)`` for each sample: ``[N, *d] -> [D, N, *d]``."""
    size = diagonal.shape[1:].numel()
    if not size:
        raise ValueError(
            f"A prediction of shape {list(diagonal.shape)} has no entries, so its loss has no "
            "curvature that could travel back."
        )
    return torch.diag_embed(diagonal.reshape(-1, size)).movedim(-1, 0).reshape(-1, *diagonal.shape)

"""The contract of a loss's derivatives: factors of its Hessian with respect to the prediction.

Letters: the prediction has shape ``[N, *d]`` with D entries for a sample; a factor S of shape
``[V, N, *d]`` satisfies ``sum_v S_vn S_vnᵀ = ∇²_n``, the Hessian of the (reduced) loss with respect
to the prediction of sample n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseDerivatives, Grads, Rows
from backpack.core.tape import bound, describe
from backpack.utils.subsampling import subsample


class BaseLossDerivatives(BaseDerivatives):
    """Derivatives of a loss ``ℓ(prediction, target)``, reduced to a scalar.

    A subclass implements ``_sqrt_hessian``, ``_sqrt_hessian_sampled`` and ``_hessian_mat_prod``.
    """

    def hessian_is_zero(self, module: Module) -> bool:
        """Return False."""
        return False

    def hessian_is_psd(self) -> bool:
        """Return True: convex in the prediction."""
        return True

    def sqrt_hessian(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Rows = None
    ) -> Tensor:
        """Exact factor of the loss Hessian.

        Args:
            module: Loss whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs (not used).
            subsampling: Rows of the batch. Default: all.

        Returns:
            ``[V, N, *d]``; carries the square root of the reduction's factor.

        Raises:
            ValueError: If the loss is not reduced to a scalar.
        """
        with bound(module):
            self._need_scalar(module)
            return self._sqrt_hessian(module, subsampling)

    def sqrt_hessian_sampled(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mc_samples: int = 1,
        subsampling: Rows = None,
    ) -> Tensor:
        """Monte-Carlo factor: gradients with targets drawn from the model's prediction.

        Args:
            module: Loss whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs (not used).
            mc_samples: Number of samples M.
            subsampling: Rows of the batch. The draws do not depend on it. Default: all.

        Returns:
            ``[M, N, *d]``, divided by ``sqrt(M)``; ``S Sᵀ`` has the Hessian as its expectation.

        Raises:
            ValueError: If the loss is not reduced to a scalar.
        """
        with bound(module):
            self._need_scalar(module)
            sampled = self._sqrt_hessian_sampled(module, mc_samples) / sqrt(mc_samples)
            return subsample(sampled, dim=1, subsampling=subsampling)

    def make_hessian_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads
    ) -> Callable[..., Tensor]:
        """Return the map ``[V, N, *d] -> [V, N, *d]`` that applies the loss Hessian.

        Its second argument, ``subsampling``, says which rows of the batch it is given.
        """

        def hessian_mat_prod(mat: Tensor, subsampling: Rows = None) -> Tensor:
            with bound(module) as m:
                self._need_scalar(module)
                mat, had_v = self._check(module, mat, m.input0.shape, 0, subsampling)
                result = self._hessian_mat_prod(module, mat, subsampling)
            return result if had_v else result.squeeze(0)

        return hessian_mat_prod

    def sum_hessian(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Rows = None
    ) -> Tensor:
        """Hessian with respect to a sample's prediction, summed over samples: ``[D, D]``."""
        factor = self.sqrt_hessian(module, g_inp, g_out, subsampling).flatten(2).flatten(0, 1)
        return factor.T @ factor

    def _sqrt_hessian(self, module: Any, subsampling: Rows) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no sqrt_hessian.")

    def _sqrt_hessian_sampled(self, module: Any, mc_samples: int) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no sqrt_hessian_sampled.")

    def _hessian_mat_prod(self, module: Any, mat: Tensor, subsampling: Rows) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no Hessian product.")

    # A loss as a module: its Jacobian is the gradient with respect to the prediction.

    def _gradient(self, module: Any) -> Tensor:
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            x = module.input0 if differentiable else module.input0.detach()
            x = x if x.requires_grad else x.requires_grad_()
            loss = module.forward(x, module.input1)
            return torch.autograd.grad(loss.sum(), x, create_graph=differentiable)[0]

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        self._need_scalar(module)
        mat = mat if isinstance(mat, Tensor) else mat[0]
        gradient = subsample(self._gradient(module), subsampling=subsampling)
        return (mat * gradient).flatten(1).sum(1)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        self._need_scalar(module)
        gradient = subsample(self._gradient(module), subsampling=subsampling)
        return mat.reshape(-1, *(1,) * gradient.dim()) * gradient

    def _need_scalar(self, module: Any) -> None:
        if module.output.dim() > 0:
            raise ValueError(
                f"Second-order quantities need a scalar loss, but the output of {describe(module)} "
                f"has shape {list(module.output.shape)} (reduction={module.reduction!r}). Use "
                "reduction='mean' or 'sum'."
            )


def scaled_identity(diagonal: Tensor) -> Tensor:
    """Return the columns of ``diag(diagonal)`` for each sample: ``[N, *d] -> [D, N, *d]``."""
    return (
        torch.diag_embed(diagonal.reshape(len(diagonal), -1))
        .movedim(-1, 0)
        .reshape(-1, *diagonal.shape)
    )


def same_shape(module: Module, shapes: Sequence[torch.Size]) -> None:
    """Refuse targets that broadcast: a sample's Hessian would not be its own.

    Raises:
        ValueError: If the shapes differ.
    """
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"{describe(module)}: prediction and target need one shape, got "
            f"{[list(shape) for shape in shapes]}."
        )

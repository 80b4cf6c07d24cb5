"""Adam in the eigenbasis of Kronecker factors of the gradient: SOAP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from backpack.core.values import at_least_single
from backpack.distributed.shards import own_part, whole
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.optim.base import (
    Closure,
    Group,
    check_betas,
    check_options,
    load_wide_state,
    refuse_model,
)
from backpack.utils.autocast import without_autocast
from backpack.utils.kroneckers import eigh_semidefinite


class SOAP(Optimizer):
    """Adam along the eigenvectors of Kronecker factors, which rotate slowly.

    Each axis k of a parameter has a factor ``L_k``, the moving average of ``G_(k) G_(k)ᵀ`` with the
    gradient G unfolded along that axis (Shampoo), and its eigenvectors ``U_k``. With
    ``Q = U_1 ⊗ U_2 ⊗ …``, the step is that of Adam for the rotated gradient ``Qᵀ g``:

    ``θ ← θ − α (Q (Qᵀ m / (√v + ε)) + η θ)``

    with moving averages m of the gradient and v of ``(Qᵀ g)²``, both without the bias from their
    start. Every ``bases_every`` steps the eigenvectors follow the factors by a step of orthogonal
    iteration, ``U_k ← qr(L_k U_k)``. Vectors are not rotated. As EKFAC, that is a diagonal in a
    Kronecker-factored eigenbasis; second moments are those of the gradient of the batch, so that no
    extension is needed, nor an extended model.

    Source: Vyas, Morwani, Zhao, Kwun, Shapira, Brandfonbrener, Janson, Kakade, SOAP: improving and
    stabilizing Shampoo using Adam (ICLR 2025). As there, the first gradient of a parameter that is
    rotated gives the first factors, and no step; other than there, every axis of a tensor has a
    factor of its own.

    Of a parameter that ``fully_shard`` has sharded, m and v are sharded, too. Factors and
    eigenvectors are on each process, which gathers g, m and v of one parameter at a time.

    Attributes:
        extensions: None, so that one training loop serves all optimisers of this package.
    """

    extensions: ClassVar[tuple[BackpropExtension, ...]] = ()

    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bases_every: int = 10,
        longest_axis: int = 2048,
    ):
        """Store the options, which may differ between groups.

        Args:
            params: Parameters, named parameters, or groups.
            lr: Step size α.
            betas: Forgetting factors of the averages of the gradient, and of factors and second
                moments.
            eps: ε, added to the root of the second moments.
            weight_decay: η, decoupled from the gradient as in AdamW.
            bases_every: Number of steps between two steps of the eigenvectors.
            longest_axis: Longer axes are not rotated.

        Raises:
            ValueError: If an option is out of range.
        """
        refuse_model(self, params)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bases_every": bases_every,
            "longest_axis": longest_axis,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters with options of its own.

        Args:
            param_group: ``{"params": ..., "lr": ..., ...}``; what is left out has its default.

        Raises:
            ValueError: If an option is out of range.
        """
        least = {"lr": 0, "eps": 0, "weight_decay": 0, "bases_every": 1, "longest_axis": 0}
        group = {**self.defaults, **param_group}
        check_options(group, least)
        check_betas(group)
        super().add_param_group(param_group)

    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Clears the gradients, computes the loss, calls ``backward()`` and returns the
                loss, as for any optimiser of torch.

        Returns:
            The value of the closure, None without one.

        Raises:
            RuntimeError: If a gradient is sparse or complex: then no parameter was updated.
            torch.linalg.LinAlgError: If the first gradient of a parameter, or its square, is not
                finite: then it still is to come, those of the parameters before it were used.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [(g, p, p.grad) for g in self.param_groups for p in g["params"]]
        for _, p, grad in trained:
            if grad is not None:
                self._check(p, grad)
        with torch.no_grad(), without_autocast():
            for group, p, grad in trained:
                if grad is not None:
                    self._update(group, p, grad)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` has returned, in the precision that steps are computed in.

        Args:
            state_dict: The state.
        """
        load_wide_state(self, partial(super().load_state_dict, state_dict))

    def _check(self, p: Tensor, grad: Tensor) -> None:
        if grad.is_sparse:
            raise RuntimeError(
                f"SOAP needs dense gradients, that of {list(p.shape)} is sparse. Set sparse=False "
                "in the embedding."
            )
        if grad.is_complex():
            raise RuntimeError(
                f"SOAP needs real parameters, that of {list(p.shape)} is complex. Make it real, "
                "and use torch.view_as_complex in forward."
            )

    def _update(self, group: Group, p: Tensor, grad: Tensor) -> None:
        grad = grad.to(_precision(grad))
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            axes = [k for k, size in enumerate(p.shape) if size > 1]
            rotates = len(axes) > 1  # a vector has no Kronecker structure
            axes = [k for k in axes if rotates and p.shape[k] <= group["longest_axis"]]
            state.update(step=0, axes=axes, average=torch.zeros_like(grad))
            state["squares"] = torch.zeros_like(grad)
            state["factors"] = [
                torch.zeros(p.shape[k], p.shape[k], dtype=grad.dtype, device=grad.device)
                for k in axes
            ]
        state["step"] += 1
        axes, factors, count = state["axes"], state["factors"], state["step"]

        def gathered(tensor: Tensor) -> Tensor:  # every process turns the whole of it
            return whole(tensor) if axes else tensor

        complete = gathered(grad)
        for k, factor in zip(axes, factors, strict=True):
            unfolded = complete.movedim(k, 0).reshape(len(factor), -1)
            factor.lerp_(unfolded @ unfolded.T, 1 - beta2)
        if count == 1:
            if not all(bool(x.isfinite().all()) for x in (whole(grad), *factors)):
                state.clear()  # the next gradient is the first
                raise torch.linalg.LinAlgError(
                    f"SOAP: the first gradient of {list(p.shape)}, or its square, is not finite. "
                    "Look for it in the loss, or skip this step."
                )
            # the largest first, as orthogonal iteration orders them
            state["bases"] = [eigh_semidefinite(factor)[1].flip(-1) for factor in factors]
            if axes:  # along the eigenvectors of one gradient, the others are rounding
                return
        elif (count - 1) % group["bases_every"] == 0:
            pairs = zip(factors, state["bases"], strict=True)
            state["bases"] = [_orthogonal(factor @ basis) for factor, basis in pairs]
        bases, average, squares = state["bases"], state["average"], state["squares"]
        count -= bool(axes)  # without the first
        average.lerp_(grad, 1 - beta1)
        turned = _turned(complete, axes, bases).square()
        squares.lerp_(own_part(turned, squares) if axes else turned, 1 - beta2)
        mean = _turned(gathered(average), axes, bases) / (1 - beta1**count)
        root = (gathered(squares) / (1 - beta2**count)).sqrt() + group["eps"]
        step = _turned(mean / root, axes, [basis.T for basis in bases])
        step = own_part(step.contiguous(), average) if axes else step
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * step)


def _precision(tensor: Tensor) -> torch.dtype:
    """Return the precision of what belongs to a tensor: small squares underflow in less."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _turned(tensor: Tensor, axes: Sequence[int], bases: Sequence[Tensor]) -> Tensor:
    """Multiply axes with transposed matrices."""
    for k, basis in zip(axes, bases, strict=True):
        tensor = torch.tensordot(tensor, basis, dims=([k], [0])).movedim(-1, k)
    return tensor


def _orthogonal(matrix: Tensor) -> Tensor:
    """Return orthogonal columns that span what the first columns of a matrix do."""
    wide = at_least_single(matrix)  # none in less
    basis, triangle = torch.linalg.qr(wide)
    signs = torch.where(triangle.diagonal() < 0, -1, 1)  # a basis that stays does not flip
    return (basis * signs).to(matrix.dtype).contiguous()  # as they are when they were loaded

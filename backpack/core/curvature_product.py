"""Products with a parameter's block of the GGN, the Hessian, or its positive part, matrix-free.

The R-operator (Pearlmutter 1994; Schraudolph 2002) on the reached calls: push the parameter's
tangent forward to the loss, apply the loss Hessian, pull the result back; on the way, the Hessian
adds the second derivative of every nonlinear module times the tangent at its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.basederivatives import Rows, row_numbers
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.plan import Plan
from backpack.core.sweep import loss_scale
from backpack.core.tape import Call, Origin, describe

# What to make of a module's (diagonal) second derivative; None leaves it out.
Modify = Callable[[Tensor], Tensor] | None


def identity(residual: Tensor) -> Tensor:
    """Keep the second derivative: the Hessian."""
    return residual


def clip(residual: Tensor) -> Tensor:
    """Keep its positive part."""
    return residual.clamp(min=0)


class CurvatureBlock:
    """The map ``[V, *p] -> [V, *p]`` that applies a parameter's diagonal block.

    Where a parameter is used several times, the Hessian includes the second derivatives with
    respect to one use and, through the module's input, another. They are indefinite, so the GGN and
    the positive-curvature Hessian leave them out.

    Args:
        plan: Reached calls that outlive the backward pass.
        parameter: The parameter p.
        modify: What to make of the modules' second derivatives: None for the GGN, ``identity`` for
            the Hessian, ``clip`` or ``torch.abs`` for the positive-curvature Hessian.
        subsampling: Samples whose curvature counts.
        differentiable: Whether products have a graph.
    """

    def __init__(
        self,
        plan: Plan,
        parameter: Parameter,
        modify: Modify,
        subsampling: Sequence[int] | None = None,
        differentiable: bool = False,
    ):
        """Remember the state of the parameters that the product depends on."""
        self.plan = plan
        self.parameter = parameter
        self.modify = modify
        self.subsampling = subsampling
        self.differentiable = differentiable
        # a module that mixes samples changes its buffers (running statistics) and reads none
        self.versions = {
            t: t._version
            for call in plan.calls
            for t in [*call.module.parameters(), *call.module.buffers()]
            if isinstance(t, Parameter) or not call.mixes_samples
        }

    def __call__(self, mat: Tensor) -> Tensor:
        """Apply the block.

        Args:
            mat: ``[V, *p]``, or ``[*p]``.

        Returns:
            Same shape.

        Raises:
            ValueError: If the shape does not match.
            RuntimeError: If a parameter was changed since the backward pass.
        """
        p = self.parameter
        if mat.shape[1:] == p.shape:
            return self.product(mat)
        if mat.shape == p.shape:
            return self.product(mat.unsqueeze(0)).squeeze(0)
        raise ValueError(
            f"Expected vectors of shape {['V', *p.shape]} (or without V), got {list(mat.shape)}."
        )

    def diagonal(self, per_sample: bool = False, entries_at_once: int = 32) -> Tensor:
        """Return the block's diagonal from products with the unit vectors.

        Args:
            per_sample: Return the diagonal of each sample's block.
            entries_at_once: Number of unit vectors in one product.

        Returns:
            ``[*p]``, or ``[N, *p]`` for each sample.
        """
        p = self.parameter
        parts = []
        for start in range(0, p.numel(), entries_at_once):
            size = min(entries_at_once, p.numel() - start)
            units = torch.zeros(size, p.numel(), dtype=p.dtype, device=p.device)
            units[range(size), range(start, start + size)] = 1
            product = self.product(units.reshape(size, *p.shape), per_sample)
            flat = product.flatten(2) if per_sample else product.flatten(1)
            parts.append(torch.stack([flat[v, ..., start + v] for v in range(size)], -1))
        diagonal = torch.cat(parts, -1)
        return diagonal.reshape(*diagonal.shape[:-1], *p.shape)

    def product(self, mat: Tensor, per_sample: bool = False) -> Tensor:
        """Apply the block to ``[V, *p]``; ``per_sample`` keeps samples apart: ``[V, N, *p]``."""
        if any(t._version != version for t, version in self.versions.items()):
            raise RuntimeError(
                "A parameter or buffer was changed in place (by an optimiser step?) after the "
                "backward pass that this product belongs to. Evaluate products before changing "
                "parameters."
            )
        samples = None if self.plan.mixing else self.subsampling
        with torch.set_grad_enabled(self.differentiable):
            tangents = self._push_forward(mat, samples)
            return self._pull_back(mat, tangents, samples, per_sample)

    def _push_forward(self, mat: Tensor, samples: Rows) -> dict[Call, list[Tensor | None]]:
        """Return the tangents at the inputs of every call that the parameter influences."""
        outputs: dict[Origin, Tensor] = {}
        tangents: dict[Call, list[Tensor | None]] = {}
        for call in self.plan.calls:
            inputs = [
                outputs[o].reshape(len(mat), *self._shape_in(call, i, samples))
                if o is not None and o in outputs
                else None
                for i, o in enumerate(call.origins_in)
            ]
            name = self._name_in(call)
            if name is None and all(t is None for t in inputs):
                continue
            tangents[call] = inputs
            if call in self.plan.losses:
                continue
            derivatives, rows = call.derivatives, self.plan.rows(call, samples)
            assert derivatives is not None
            tangent: Any = 0
            with call.bound() as module:
                if any(t is not None for t in inputs):
                    own: Any = inputs if len(inputs) > 1 else inputs[0]
                    tangent = derivatives.jac_mat_prod(
                        module,
                        None,
                        call.g_out,
                        own,
                        rows,  # type: ignore[arg-type]
                    )
                if name is not None:
                    tangent = tangent + derivatives.param_jac_mat_prod(
                        name, module, None, call.g_out, mat, rows
                    )
            if call.origins_out[0] is not None:
                outputs[call.origins_out[0]] = tangent
        return tangents

    def _pull_back(
        self,
        mat: Tensor,
        tangents: dict[Call, list[Tensor | None]],
        samples: Rows,
        per_sample: bool,
    ) -> Tensor:
        arrived: dict[Origin, Tensor] = {}
        result: Any = 0
        for call in reversed(list(tangents)):
            inputs, name = tangents[call], self._name_in(call)
            rows, derivatives = self.plan.rows(call, samples), call.derivatives
            assert derivatives is not None
            needed = any(t is not None for t in inputs)
            with call.bound() as module:
                if call in self.plan.losses:
                    backs: list[Any] = [self._loss_product(call, module, inputs[0], rows)]
                else:
                    out = call.origins_out[0]
                    cotangent = None if out is None else arrived.pop(out, None)
                    if cotangent is None:
                        cotangent = mat.new_zeros(len(mat), *self._shape_out(call, samples))
                    backs = [None] * len(inputs)
                    if needed:
                        back = derivatives.jac_t_mat_prod(module, None, call.g_out, cotangent, rows)
                        backs = list(back) if isinstance(back, tuple) else [back]
                    mixed = needed and name is not None and self._is_reused()
                    if not (mixed and self.modify is identity):
                        self._add_residual(call, module, inputs, backs, rows)
                    if name is not None:
                        product = derivatives.param_mjp(
                            name, module, None, call.g_out, cotangent, False, rows
                        )
                        if mixed and self.modify is identity:
                            product = product + self._mixed(call, module, mat, inputs, backs, rows)
                        result = result + self._by_sample(product, per_sample)
            for i, (tangent, back) in enumerate(zip(inputs, backs, strict=False)):
                o = call.origins_in[i]
                if tangent is None or back is None or o is None:
                    continue
                shape = self.plan.shape(self.plan.producers[o], samples)
                back = back.reshape(len(mat), *shape)
                arrived[o] = arrived[o] + back if o in arrived else back
        return result

    def _add_residual(
        self,
        call: Call,
        module: Any,
        inputs: list[Tensor | None],
        backs: list[Any],
        rows: Rows,
    ) -> None:
        """Add the second derivative of the module times the tangent at its input."""
        derivatives, (tangent, *_) = call.derivatives, inputs
        assert derivatives is not None
        if self.modify is None or tangent is None or derivatives.hessian_is_zero(module):
            return
        if self.modify is identity:
            residual = derivatives.residual_mat_prod(module, None, call.g_out, tangent, rows)
        else:
            diagonal = derivatives.hessian_diagonal(module, None, call.g_out, rows)
            residual = self.modify(diagonal) * tangent
        backs[0] = backs[0] + residual

    def _mixed(
        self,
        call: Call,
        module: Any,
        mat: Tensor,
        inputs: list[Tensor | None],
        backs: list[Any],
        rows: Rows,
    ) -> Tensor:
        """Second derivative with respect to the parameter and the input that it also influences."""
        name = self._name_in(call)
        assert name is not None and call.derivatives is not None
        if self.plan.mixing:
            raise NotImplementedError(
                f"Hessian products for the reused parameter '{name}' of {describe(module)} in a "
                "network that mixes samples (batch normalisation in training mode)."
            )
        d_inputs, d_params = call.derivatives.mixed_residual(
            module, call.g_out, inputs, {name: mat}, rows
        )
        for i, d_input in enumerate(d_inputs):
            backs[i] = backs[i] + d_input
        return d_params[name]

    def _loss_product(self, call: Call, module: Any, tangent: Any, rows: Rows) -> Tensor:
        derivatives = call.derivatives
        assert isinstance(derivatives, BaseLossDerivatives)
        product = derivatives.make_hessian_mat_prod(module, None, None)(tangent, rows)
        if self.plan.mixing and self.subsampling is not None:
            counted = torch.zeros_like(product)
            kept = list(row_numbers(product.shape[1], self.plan.rows(call, self.subsampling)))
            counted[:, kept] = product[:, kept]
            product = counted
        return product * loss_scale(call)

    def _by_sample(self, product: Tensor, per_sample: bool) -> Tensor:
        """Sum ``[V, R, *p]`` over the rows, or over the rows of each sample."""
        if not per_sample:
            return product.sum(1)
        base = len(row_numbers(self.plan.base, self.subsampling))
        return product.unflatten(1, (base, -1)).sum(2)

    def _is_reused(self) -> bool:
        return len(self.plan.uses[self.parameter]) > 1

    def _name_in(self, call: Call) -> str | None:
        return next((name for name, p in call.trained.items() if p is self.parameter), None)

    def _shape_in(self, call: Call, i: int, samples: Rows) -> Sequence[int]:
        shape = call.shape_in[i]
        assert shape is not None
        return [self._count(shape[0], call, samples), *shape[1:]]

    def _shape_out(self, call: Call, samples: Rows) -> Sequence[int]:
        shape = call.shape_out[0]
        return [self._count(shape[0], call, samples), *shape[1:]]

    def _count(self, rows: int, call: Call, samples: Rows) -> int:
        return len(row_numbers(rows, self.plan.rows(call, samples)))

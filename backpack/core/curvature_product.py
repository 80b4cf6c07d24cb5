"""Products with a parameter's block of the GGN, the Hessian, or its positive part, matrix-free.

The R-operator (Pearlmutter 1994; Schraudolph 2002) on the reached calls: push the parameter's
tangent forward to the loss, apply the loss Hessian, pull the result back; on the way, the Hessian
adds the second derivative of every nonlinear module times the tangent at its input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.context import without_autocast
from backpack.core import call_products
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

    Where a parameter is used several times, or enters its module nonlinearly, the Hessian includes
    second derivatives with respect to the parameter itself. They are indefinite, so the GGN and the
    positive-curvature Hessian leave them out.

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
        """Remember what the product depends on."""
        self.plan = plan
        self.parameter = parameter
        self.modify = modify
        self.subsampling = subsampling
        self.differentiable = differentiable
        self.versions = plan.versions

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
            flat = product.reshape(*product.shape[: 2 if per_sample else 1], -1)
            parts.append(torch.stack([flat[v, ..., start + v] for v in range(size)], -1))
        diagonal = torch.cat(parts, -1)
        return diagonal.reshape((*diagonal.shape[:-1], *p.shape))

    def product(self, mat: Tensor, per_sample: bool = False) -> Tensor:
        """Apply the block to ``[V, *p]``; ``per_sample`` keeps samples apart: ``[V, N, *p]``."""
        if any(t._version != version for t, version in self.versions.items()):
            raise RuntimeError(
                "A parameter or buffer was changed in place (by an optimiser step?) after the "
                "backward pass that this product belongs to. Evaluate products before changing "
                "parameters."
            )
        samples = None if self.plan.mixing else self.subsampling
        with torch.set_grad_enabled(self.differentiable), without_autocast():
            tangents = self._push_forward(mat, samples)
            return self._pull_back(mat, tangents, samples, per_sample).to(mat.dtype)

    def _push_forward(self, mat: Tensor, samples: Rows) -> dict[Call, list[Tensor | None]]:
        """Return the tangents at the inputs of every call that the parameter influences."""
        outputs: dict[Origin, Tensor] = {}
        tangents: dict[Call, list[Tensor | None]] = {}
        for call in self.plan.calls:
            inputs = [
                None
                if o is None or o not in outputs
                else self._at_input(call, i, outputs[o], samples)
                for i, o in enumerate(call.origins_in)
            ]
            name = self._name_in(call)
            if name is None and all(t is None for t in inputs):
                continue
            tangents[call] = inputs
            if call in self.plan.losses:
                continue
            rows = self.plan.rows(call, samples)
            parts = []
            if any(t is not None for t in inputs):
                parts.append(call_products.forward(call, inputs, rows))
            if name is not None:
                parts.append(call_products.param_forward(call, name, mat, rows))
            for origin, *terms in zip(call.origins_out, *parts, strict=True):
                if origin is not None:
                    outputs[origin] = reduce(operator.add, terms)
        return tangents

    def _at_input(self, call: Call, i: int, tangent: Tensor, samples: Rows) -> Tensor:
        """Bring a tangent at a producer's output to the shape of what it is the input of."""
        count, place, whole = self._count(call, samples), call.place_in(i), call.shape_in[i]
        if place is not None and whole:  # a function may have more rows than its input
            count = count * whole[place.axis] // self.plan.num_rows(call)
        shape = call_products.shape_in(call, i, count)
        if tangent.shape[1] < shape[0] and place is None:
            tangent = tangent[:, :1].expand(-1, shape[0], *tangent.shape[2:])  # no samples: equal
        return tangent.reshape(len(tangent), *shape)

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
            rows = self.plan.rows(call, samples)
            if call in self.plan.losses:
                backs: list[Any] = self._loss_product(call, inputs, rows)
            else:
                columns = [None if o is None else arrived.pop(o, None) for o in call.origins_out]
                backs = [None] * len(inputs)
                if any(t is not None for t in inputs) and any(c is not None for c in columns):
                    backs = call_products.transposed(call, columns, rows)
                if name is not None and any(c is not None for c in columns):
                    product = call_products.param(
                        call, "param_mjp", name, columns, rows, sum_batch=not per_sample
                    )
                    result = result + (self._of_samples(product) if per_sample else product)
                seconds, second = self._second(call, name, mat, inputs, rows)
                backs = [_sum(one, other) for one, other in zip(backs, seconds, strict=True)]
                if second is not None:
                    result = result + (self._of_samples(second) if per_sample else second.sum(1))
            for i, (tangent, back) in enumerate(zip(inputs, backs, strict=False)):
                o = call.origins_in[i]
                if tangent is None or back is None or o is None:
                    continue
                producer = self.plan.producers[o]
                shape = self.plan.shape(producer, samples)
                if producer.call.is_unbatched and back.shape[1] > shape[0]:
                    back = back.unflatten(1, (shape[0], -1)).sum(2)
                back = back.reshape(len(mat), *shape)
                arrived[o] = arrived[o] + back if o in arrived else back
        if isinstance(result, int):  # the loss does not depend on the parameter
            count = len(row_numbers(self.plan.base, self.subsampling))
            return mat.new_zeros(len(mat), *([count] if per_sample else []), *mat.shape[1:])
        return result

    def _second(
        self,
        call: Call,
        name: str | None,
        mat: Tensor,
        inputs: list[Tensor | None],
        rows: Rows,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Apply the module's second derivative to the tangents at its inputs (and parameter)."""
        derivatives = call.derivatives
        none: list[Tensor | None] = [None] * len(inputs)
        assert derivatives is not None
        if self.modify is None:
            return none, None
        needed = any(t is not None for t in inputs)
        with call.bound() as module:
            curved = not derivatives.hessian_is_zero(module)
            diagonal = curved and derivatives.hessian_is_diagonal(module)
            affine = derivatives.is_linear_in_params(module)
        if self.modify is not identity:
            if not (needed and curved):
                return none, None
            return self._modified(call, inputs, diagonal, rows), None
        if name is not None and ((needed and self._is_reused()) or not affine):
            if self.plan.mixing:
                raise NotImplementedError(
                    f"Hessian products for the parameter '{name}' of {describe(call.module)}, "
                    f"which "
                    "is reused or enters nonlinearly, in a network that mixes samples (batch "
                    "normalisation in training mode)."
                )
            backs, products = call_products.second(call, inputs, {name: mat}, rows)
            return backs, products[name]
        if needed and curved:
            return call_products.second(call, inputs, {}, rows)[0], None
        return none, None

    def _modified(
        self, call: Call, inputs: list[Tensor | None], diagonal: bool, rows: Rows
    ) -> list[Tensor | None]:
        """Apply the positive part (say) of the second derivative, for each sample."""
        assert self.modify is not None and call.derivatives is not None
        if diagonal:
            (tangent,) = inputs
            with call.bound() as module:
                grads = call_products.gradients(call)
                residual = call.derivatives.hessian_diagonal(module, None, grads, rows)
            return [None if tangent is None else self.modify(residual) * tangent]
        like = next(t for t in inputs if t is not None)
        count = like.shape[1]
        varying = [i for i, o in enumerate(call.origins_in) if o in self.plan.producers]
        shapes = {i: call_products.shape_in(call, i, count) for i in varying}
        sizes = [prod(shapes[i][1:]) for i in varying]

        def apart(columns: Tensor) -> list[Tensor | None]:  # [V, R, D] at each input
            parts: list[Tensor | None] = [None] * len(inputs)
            for i, part in zip(varying, columns.split(sizes, -1), strict=True):
                parts[i] = part.reshape(-1, *shapes[i])
            return parts

        def together(parts: Sequence[Tensor | None], num_v: int) -> Tensor:
            flat = [
                like.new_zeros(num_v, count, size) if part is None else part.flatten(2)
                for part, size in zip((parts[i] for i in varying), sizes, strict=True)
            ]
            return torch.cat(flat, -1)

        units = torch.eye(sum(sizes), dtype=like.dtype, device=like.device)
        columns = units.unsqueeze(1).expand(-1, count, -1)
        dense = together(call_products.second(call, apart(columns), {}, rows)[0], sum(sizes))
        values, vectors = torch.linalg.eigh(dense.movedim(0, -1))  # [R, D, D], one for each row
        positive = (vectors * self.modify(values).unsqueeze(1)) @ vectors.mT
        return apart(torch.einsum("ncd,vnd->vnc", positive, together(inputs, len(like))))

    def _loss_product(
        self, call: Call, tangents: list[Tensor | None], rows: Rows
    ) -> list[Tensor | None]:
        """Apply the Hessian of a loss, or the matrix of its GGN, to tangents at its inputs."""
        derivatives = call.derivatives
        assert isinstance(derivatives, BaseLossDerivatives)
        make = derivatives.make_ggn_mat_prod
        if self.modify is identity:
            make = derivatives.make_hessian_mat_prod
        with call.bound() as module:
            product = make(module, None, None)(tangents, rows)
        parts = [product] if isinstance(product, Tensor) else product
        return [None if part is None else self._counted(call, part) for part in parts]

    def _counted(self, call: Call, product: Tensor) -> Tensor:
        """Scale the product like the loss; where samples mix, leave out those that do not count."""
        if self.plan.mixing and self.subsampling is not None:
            counted = torch.zeros_like(product)
            kept = list(row_numbers(product.shape[1], self.plan.rows(call, self.subsampling)))
            counted[:, kept] = product[:, kept]
            product = counted
        return product * loss_scale(call)

    def _of_samples(self, product: Tensor) -> Tensor:
        """Sum ``[V, R, *p]`` over the rows of each sample."""
        base = len(row_numbers(self.plan.base, self.subsampling))
        return product.unflatten(1, (base, -1)).sum(2)

    def _is_reused(self) -> bool:
        return len(self.plan.uses[self.parameter]) > 1

    def _name_in(self, call: Call) -> str | None:
        return next((name for name, p in call.trained.items() if p is self.parameter), None)

    def _count(self, call: Call, samples: Rows) -> int:
        return len(row_numbers(self.plan.num_rows(call), self.plan.rows(call, samples)))


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other

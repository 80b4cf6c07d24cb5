"""Products with a parameter's block of the GGN, the Hessian, or its positive part, matrix-free.

The R-operator (Pearlmutter 1994; Schraudolph 2002) on the reached calls: push the parameter's
tangent forward to the loss, apply the loss Hessian, pull the result back; on the way, the Hessian
adds the second derivative of every nonlinear module times the tangent at its input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.loss_hessian import LossHessian
from backpack.core.engine import call_products
from backpack.core.engine.combining import gathered
from backpack.core.engine.intercept import not_intercepted
from backpack.core.engine.modified_losses import loss_scale
from backpack.core.engine.plan import Feed, Plan
from backpack.core.lazy import lazy
from backpack.core.record.calls import reading_parameters
from backpack.core.record.context import Context, context_of
from backpack.core.record.origins import Origin
from backpack.core.record.shards import shard_of
from backpack.core.record.visits import Visit
from backpack.core.record.weights import storage_of, tensors_of
from backpack.core.rows import row_numbers
from backpack.core.values import at_least_single
from backpack.utils.autocast import without_autocast

# How many unit vectors are multiplied at once, for a diagonal.
UNITS_AT_ONCE = 32
Subsampling = Sequence[int] | None
# What to make of the modules' second derivatives: None for the GGN, ``identity`` for the Hessian,
# ``clip`` or ``torch.abs`` for the positive-curvature Hessian.
Modify = Callable[[Tensor], Tensor] | None


def identity(residual: Tensor) -> Tensor:
    """Keep the second derivative: the Hessian."""
    return residual


def clip(residual: Tensor) -> Tensor:
    """Keep the positive part of the second derivative."""
    return residual.clamp(min=0)


class Reached(NamedTuple):
    """A call that the parameter influences."""

    c: Context  # at the rows that the vectors hold
    names: Sequence[str]  # of the parameter, if the call uses it: several where some are tied
    fed: list[Feed]  # the inputs that it influences
    inputs: list[Tensor | None]  # the tangents at all inputs, None for zero


@dataclass(eq=False, repr=False)
class CurvatureBlock:
    """The map ``[V, *p] -> [V, *p]`` that applies a parameter's diagonal block.

    Where a parameter is used several times, or enters its module nonlinearly, the Hessian includes
    second derivatives with respect to the parameter itself. They are indefinite, so the GGN and the
    positive-curvature Hessian leave them out.
    """

    plan: Plan  # reached calls that outlive the backward pass
    parameter: Parameter
    modify: Modify
    subsampling: Subsampling = None  # samples whose curvature counts
    differentiable: bool = False  # whether products have a graph

    def __post_init__(self) -> None:
        """Note what the reached calls have read, and which of them use the parameter."""
        self.read = self.plan.read
        self.names: dict[Visit, list[str]] = {}
        for call, name in self.plan.uses[self.parameter]:
            self.names.setdefault(call, []).append(name)

    def __repr__(self) -> str:
        matrices: dict[Modify, str] = {None: "GGN", identity: "Hessian"}
        of = matrices.get(self.modify, "positive-curvature Hessian")
        shape = ", ".join(map(str, ("V", *self.parameter.shape)))
        samples = "" if self.subsampling is None else f", samples {list(self.subsampling)}"
        return f"<product with a block of the {of}: [{shape}] -> [{shape}]{samples}>"

    def __call__(self, mat: Tensor) -> Tensor:
        """Apply the block to ``[V, *p]``, or ``[*p]``: same shape.

        Raises:
            ValueError: If the shape does not match.
            RuntimeError: If a parameter was changed since the backward pass.
        """
        with not_intercepted():
            is_changed = bool(self.read.changed(self.read.parameters, self._compared))
        if is_changed:
            raise RuntimeError(
                "A parameter or buffer was changed (by an optimiser step?) after the backward pass "
                "that this product belongs to. Evaluate products before changing parameters."
            )
        p = self.parameter
        if mat.shape == p.shape:  # first: what has no axes has none behind the first one, either
            return self.product(mat.unsqueeze(0)).squeeze(0)
        if mat.shape[1:] == p.shape:
            return self.product(mat) if len(mat) else torch.zeros_like(mat)
        raise ValueError(
            f"Expected vectors of shape {['V', *p.shape]} (or without V), got {list(mat.shape)}."
        )

    @lazy
    def _compared(self) -> set[Tensor]:
        """What the product reads itself, so that changes which nobody counts matter as well."""
        first = min(call.index for call in self.names)
        behind = [call for call in self.plan.calls if call.index >= first]
        reading = reading_parameters(behind, travels=True, is_shown=False)
        read = {t for call in reading for t in tensors_of(call.read)}
        # functions read parameters as inputs, which may be views of them
        stored = [t for call in behind for t in (*call.inputs, *call.outputs)]
        held = {storage_of(t) for t in stored if isinstance(t, Tensor)}
        for p in self.read.parameters:
            if shard_of(p) is not None or storage_of(p) in held:
                read.add(p)
        return read

    def diagonal(self, per_sample: bool = False) -> Tensor:
        """Return the block's diagonal ``[*p]``, or that of each sample's block ``[N, *p]``.

        It comes from products with the unit vectors, some at once.
        """
        p = self.parameter
        parts = []
        for start in range(0, p.numel(), UNITS_AT_ONCE):
            size = min(UNITS_AT_ONCE, p.numel() - start)
            units = torch.zeros(size, p.numel(), dtype=p.dtype, device=p.device)
            units[range(size), range(start, start + size)] = 1
            product = self.product(units.reshape(size, *p.shape), per_sample)
            flat = product.reshape(*product.shape[: 2 if per_sample else 1], -1)
            parts.append(torch.stack([flat[v, ..., start + v] for v in range(size)], -1))
        diagonal = torch.cat(parts, -1)
        return diagonal.reshape((*diagonal.shape[:-1], *p.shape))

    def product(self, mat: Tensor, per_sample: bool = False) -> Tensor:
        """Apply the block to ``[V, *p]``; ``per_sample`` keeps samples apart: ``[V, N, *p]``."""
        samples = None if self.plan.mixing else self.subsampling
        with (
            not_intercepted(),
            torch.set_grad_enabled(self.differentiable),
            without_autocast(),
            gathered(),
        ):
            reached = self._push_forward(mat, samples)
            return self._pull_back(mat, reached, per_sample).to(mat.dtype)

    def _push_forward(self, mat: Tensor, samples: Subsampling) -> list[Reached]:
        """Return the calls that the parameter influences, with the tangents at their inputs."""
        tangents: dict[Origin, Tensor] = {}
        reached: list[Reached] = []
        for call, rows, feeds in self.plan.passages(samples):
            names = self.names.get(call, ())
            fed = [feed for feed in feeds if feed.origin in tangents]
            if not names and not fed:
                continue
            inputs: list[Tensor | None] = [None] * len(call.origins_in)
            for feed in fed:
                tangent = tangents[feed.origin].to(call.inputs[feed.slot].device)
                inputs[feed.slot] = _at_input(feed, tangent)
            c = context_of(call, rows)
            reached.append(Reached(c, names, fed, inputs))
            if call in self.plan.losses:
                continue
            parts = [call_products.forward(c, inputs)] if fed else []
            parts += [call_products.param_forward(c, name, mat) for name in names]
            for origin, *terms in zip(call.origins_out, *parts, strict=True):
                if origin is not None:
                    tangents[origin] = reduce(operator.add, terms)
        return reached

    def _pull_back(self, mat: Tensor, reached: list[Reached], per_sample: bool) -> Tensor:
        """Apply the curvature of the losses (and modules), and return to the parameter."""
        cotangents: dict[Origin, Tensor] = {}
        found: list[Tensor] = []  # at the parameter
        samples = self.plan.samples_of[next(iter(self.names))]
        count = len(row_numbers(samples, self.subsampling))
        while reached:
            at = reached.pop()  # what is done is free
            c, call = at.c, at.c.call
            columns = [None if o is None else cotangents.pop(o, None) for o in call.origins_out]
            has_cotangent = any(c is not None for c in columns)
            backs: list[Any] = [None] * len(at.inputs)
            if call in self.plan.losses:
                backs = self._loss_product(c, at.inputs)
            elif at.fed and has_cotangent:
                backs = call_products.transposed(c, columns)
            method = "param_vjp" if per_sample else "param_vjp_sum"
            names = at.names if has_cotangent else ()
            products = [call_products.param(c, method, name, columns) for name in names]
            if self.modify is not None and call not in self.plan.losses:
                seconds, of_names = self._second(c, at, mat, per_sample)
                backs = list(map(_sum, backs, seconds))
                products += of_names.values()
            if per_sample:  # sum over the rows of each
                products = [p.unflatten(1, (count, -1)).sum(2) for p in products]
            found += products
            for feed in at.fed:
                back = backs[feed.slot]
                if back is not None:
                    back = _at_output(feed, back).to(self.plan.device(feed.origin))
                    before = cotangents.get(feed.origin)
                    cotangents[feed.origin] = back if before is None else before + back
        if not found:  # the loss does not depend on the parameter
            return mat.new_zeros(len(mat), *([count] if per_sample else []), *mat.shape[1:])
        return reduce(operator.add, found)

    def _second(
        self, c: Context, at: Reached, mat: Tensor, per_sample: bool
    ) -> tuple[Sequence[Tensor | None], dict[str, Tensor]]:
        """Apply the module's second derivative to the tangents at its inputs (and parameter)."""
        call, names, inputs = c.call, at.names, at.inputs
        bends_inputs = bool(at.fed) and call.derivatives.is_curved(call)
        if self.modify is not identity:
            return self._modified(c, inputs) if bends_inputs else [None] * len(inputs), {}
        is_used_elsewhere = at.fed and len(self.plan.uses[self.parameter]) > 1
        is_bent = len(names) > 1 or (bool(names) and call.derivatives.bends_params(call))
        params = dict.fromkeys(names, mat) if is_used_elsewhere or is_bent else {}
        if params or bends_inputs:
            return call_products.second(c, inputs, params, not per_sample)
        return [None] * len(inputs), {}

    def _modified(self, c: Context, inputs: list[Tensor | None]) -> list[Tensor | None]:
        """Apply the modified second derivative, such as its positive part, for each sample."""
        assert self.modify is not None
        if c.call.derivatives.hessian_is_diagonal(c.call.module):
            (tangent,) = inputs
            residual = call_products.second_diagonal(c)
            return [None if tangent is None else self.modify(residual) * tangent]
        like = next(t for t in inputs if t is not None)
        count = like.shape[1]
        varying = [i for i, o in enumerate(c.call.origins_in) if o in self.plan.producers]
        shapes = {i: call_products.shape_in(c.call, i, count) for i in varying}
        sizes = [prod(shapes[i][1:]) for i in varying]

        def split(columns: Tensor) -> list[Tensor | None]:  # [V, R, D] at each input
            parts: list[Tensor | None] = [None] * len(inputs)
            for i, part in zip(varying, columns.split(sizes, -1), strict=True):
                parts[i] = part.reshape(len(part), *shapes[i])
            return parts

        def joined(parts: Sequence[Tensor | None], num_v: int) -> Tensor:
            pairs = zip((parts[i] for i in varying), sizes, strict=True)
            flat = [
                like.new_zeros(num_v, count, n) if p is None else p.reshape(num_v, count, n)
                for p, n in pairs
            ]
            return torch.cat(flat, -1)

        units = torch.eye(sum(sizes), dtype=like.dtype, device=like.device)
        columns = units.unsqueeze(1).expand(-1, count, -1)
        dense = joined(call_products.second(c, split(columns), {})[0], sum(sizes))
        each = at_least_single(dense.movedim(0, -1))  # [R, D, D], one for each row
        values, vectors = torch.linalg.eigh(each)
        positive = ((vectors * self.modify(values).unsqueeze(1)) @ vectors.mT).to(dense)
        return split(torch.einsum("ncd,vnd->vnc", positive, joined(inputs, len(like))))

    def _loss_product(self, c: Context, tangents: list[Tensor | None]) -> list[Tensor | None]:
        """Apply the Hessian of a loss, or the matrix of its GGN, to tangents at its inputs."""
        hessian = LossHessian(c.call, c.rows)
        one = hessian.is_of_one_prediction
        found = hessian.product(tangents[0] if one else tangents, self.modify is not identity)
        parts = [found] if isinstance(found, Tensor) else found
        return [None if part is None else self._counted(c.call, part) for part in parts]

    def _counted(self, call: Visit, product: Tensor) -> Tensor:
        """Scale the product like the loss; where samples mix, leave out those that do not count."""
        if self.plan.mixing and self.subsampling is not None:
            rows = row_numbers(product.shape[1], self.plan.rows(call, self.subsampling))
            kept = torch.tensor([*rows], device=product.device)
            chosen = product.index_select(1, kept)  # which may be a sample several times
            product = torch.zeros_like(product).index_add(1, kept, chosen)
        return product * loss_scale(call)


def _at_input(feed: Feed, tangent: Tensor) -> Tensor:
    """Bring a tangent at a producer's output to the shape of what it is the input of."""
    rows, *rest = feed.shape
    if feed.is_copied and tangent.shape[1] < rows:
        tangent = tangent[:, :1].expand(-1, rows, *tangent.shape[2:])
    return tangent.reshape(len(tangent), rows, *rest)


def _at_output(feed: Feed, back: Tensor) -> Tensor:
    """Bring a product at an input to the shape of the producer's output."""
    rows, *rest = feed.shape_there
    if feed.is_gathered and back.shape[1] > rows:
        back = back.unflatten(1, (rows, -1)).sum(2)
    return back.reshape(len(back), rows, *rest)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other

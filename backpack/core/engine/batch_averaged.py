"""KFRA's propagation: one matrix for the whole batch, averaged over the samples at every module.

For a chain of modules this is ``M_in = E_n[J_nᵀ M_out J_n]``. In a graph with branches the matrix
has a block for every pair of tensors that are alive; where a module consumes one of the two, its
block meets the average Jacobian. A parameter is one more input of its module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import lcm, prod
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.loss_hessian import LossHessian
from backpack.core.engine import call_products
from backpack.core.engine.modified_losses import loss_scale
from backpack.core.engine.plan import Plan
from backpack.core.engine.sources import cat
from backpack.core.engine.uses import num_groups, split_groups, uses_without_columns
from backpack.core.record.context import SHARED, Context, context_of
from backpack.core.record.origins import Origin
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows, one_by_one, row_numbers

Node = Origin | Parameter
# Applies ``matᵀ J`` for the Jacobian with respect to one node at the given rows, averaged over
# them: ``[D_out, K] -> [K, D]``.
Jacobian = Callable[[Tensor, Rows], Tensor]


class BatchAveragedBackpropagation:
    """Carries the batch-averaged GGN of the loss back to the parameters."""

    def __init__(self, plan: Plan, subsampling: Sequence[int] | None):
        self.plan = plan
        self.subsampling = subsampling
        self.blocks: dict[tuple[Node, Node], Tensor] = {}
        self.groups: dict[Parameter, int] = {}
        mixing = [f"{call!r} mixes samples" for call in plan.calls if call.couples_samples]
        choosing = filter(_chooses, plan.calls)
        mixing += [f"{call!r} reads chosen rows of samples" for call in choosing]
        rows = {
            plan.num_rows(call): f"{call!r} has {plan.num_rows(call)} rows"
            for call in plan.calls
            if call.shape_out[0] or call in plan.losses
        }
        if mixing or len(rows) > 1:
            raise ValueError(
                "The batch-averaged matrix of KFRA needs modules that act on each sample alone and "
                f"keep the batch axis: {'; '.join(mixing[:1] or rows.values())}. Use KFAC or KFLR "
                "instead."
            )

        for p in plan.uses:
            uses = uses_without_columns(plan, p, subsampling) if len(plan.uses[p]) > 1 else []
            if p.dim() > 1 and len({use.kind_of_factors for use in uses}) > 1:
                raise ValueError(
                    "A parameter is used by modules whose Kronecker factors have a different "
                    f"order, or some of which have none ({', '.join(repr(u.call) for u in uses)}): "
                    "KFRA has no factors for it. Use KFAC or KFLR instead."
                )
            self.groups[p] = lcm(*map(num_groups, uses))

    def run(self) -> list[Parameter]:
        """Carry the matrix through all modules; return the parameters that it has reached."""
        for call in reversed(self.plan.calls):
            if call in self.plan.losses:
                self._start(call)
            else:
                self._through(call)
        return [p for p in self.plan.uses if (p, p) in self.blocks]

    def take_factor(self, p: Parameter) -> Tensor:
        """Return the first Kronecker factor (or the whole block) of a parameter, and forget it.

        It is the average of the blocks of groups that share it.
        """
        block, groups = self.blocks.pop((p, p)), self.groups[p]
        if groups == 1:
            return block
        blocks = block.reshape(groups, -1, groups, len(block) // groups)
        return blocks.diagonal(dim1=0, dim2=2).mean(-1)

    def _start(self, call: Visit) -> None:
        hessian, scale = LossHessian(call, self.subsampling), loss_scale(call)
        if hessian.is_of_one_prediction:
            prediction, total = call.origins_in[0], hessian.sum()
            if prediction in self.plan.producers:
                self._add(prediction, prediction, total * scale)
            return
        flat = [
            (origin, mat.reshape(mat.shape[0] * mat.shape[1], -1))
            for origin, mat in zip(call.origins_in, hessian.root(), strict=False)
            if mat is not None and origin in self.plan.producers
        ]
        for a, columns_a in flat:
            for b, columns_b in flat:
                self._add(a, b, columns_a.T @ columns_b * scale)

    def _add(self, a: Any, b: Any, matrix: Tensor) -> None:
        """Add to a block, which is where the tensor or parameter ``a`` is."""
        matrix = matrix.to(a.device if isinstance(a, Parameter) else self.plan.device(a))
        self.blocks[a, b] = self.blocks[a, b] + matrix if (a, b) in self.blocks else matrix

    def _through(self, call: Visit) -> None:
        outs = [o for o in call.origins_out if o is not None and (o, o) in self.blocks]
        if not outs:
            return
        own = cat([cat([self._block(a, b) for b in outs], 1) for a in outs])
        used_up = set(outs)
        others = {b for a, b in self.blocks if a in used_up and b not in used_up}
        across = {b: cat([self._block(a, b) for a in outs]) for b in others}
        self.blocks = {k: m for k, m in self.blocks.items() if used_up.isdisjoint(k)}
        slots = [i for i, o in enumerate(call.origins_out) if o in used_up]
        twins, c = self._twins(call), context_of(call)
        nodes = [(n, j) for n, j in self._nodes(c, slots) if n not in twins]
        derivatives = call.derivatives
        is_one = derivatives.has_one_jacobian(c) and (
            derivatives.kronecker_rows_are_constant or not call.trained
        )
        rows = one_by_one(self.plan.base, self.subsampling, 1 if is_one else None)
        for other, matrix in across.items():  # E[J]ᵀ M
            for node, jacobian in nodes:
                block = jacobian(matrix, self.subsampling).T
                self._add(node, other, block)
                self._add(other, node, block.T)
        inputs = [(node, j) for node, j in nodes if not isinstance(node, Parameter)]
        chain = len(inputs) == len(call.origins_in) == len(call.outputs) == 1
        # a parameter that is used again above or below has a block with the input
        chain = chain and self._is_alone(call)
        if chain and call.samples_come_first and not derivatives.follows_samples:
            ((node, _),) = inputs
            self._add(node, node, derivatives.batch_averaged(c.at(self.subsampling), own))
            nodes = [(n, j) for n, j in nodes if n is not node]
            inputs = []
        for a, jacobian_a in nodes:
            for b, jacobian_b in nodes:
                if self._is_needed(a, b, bool(inputs)):
                    terms = [jacobian_b(jacobian_a(own, row), row) for row in rows]
                    total = sum(terms[1:], terms[0])
                    self._add(a, b, total if len(terms) == 1 else total / len(terms))
        for twin, p in twins.items():
            self.blocks[twin, twin], self.groups[twin] = self.blocks[p, p], self.groups[p]

    def _twins(self, call: Visit) -> dict[Parameter, Parameter]:
        """Map each parameter to the first one of its call that has the same Kronecker factor."""
        derivatives, trained = call.derivatives, list(call.trained.values())
        shared = SHARED.is_on and derivatives is not None and derivatives.kronecker_rows_are_shared
        is_one = shared and not call.is_of_copies and self._is_alone(call) and trained
        return dict.fromkeys(trained[1:], trained[0]) if is_one else {}

    def _is_alone(self, call: Visit) -> bool:
        """Whether the parameters of a call are used in no other."""
        return all(len(self.plan.uses[p]) == 1 for p in call.trained.values())

    def _block(self, a: Node, b: Node) -> Tensor:
        """Return a block, which is zero if nothing was added to it."""
        if (a, b) in self.blocks:
            return self.blocks[a, b]
        rows, columns = self.blocks[a, a], self.blocks[b, b]
        return rows.new_zeros(len(rows), len(columns))

    def _is_needed(self, a: Node, b: Node, joint: bool) -> bool:
        """Whether somebody reads the block: a parameter's own, or one that will be carried on."""
        parameters = [node for node in (a, b) if isinstance(node, Parameter)]
        if a is b and parameters:
            return True
        if any(len(self.plan.uses[p]) == 1 for p in parameters):
            return False
        return joint or bool(parameters)

    def _nodes(self, c: Context, slots: list[int]) -> list[tuple[Node, Jacobian]]:
        """List what the matrix travels on to: inputs that a call computed, and parameters."""
        nodes: list[tuple[Node, Jacobian]] = [
            (origin, partial(self._to_input, c, slots, i))
            for i, origin in enumerate(c.call.origins_in)
            if origin is not None and origin in self.plan.producers
        ]
        trained = c.call.trained.items()
        return nodes + [(p, partial(self._to_param, c, slots, name)) for name, p in trained]

    def _columns(
        self, call: Visit, slots: list[int], mat: Tensor, rows: Rows
    ) -> list[Tensor | None]:
        """Stack the columns of ``[D_out, K]`` at the outputs in ``slots``, equal for all rows."""
        count = len(row_numbers(self.plan.base, rows))
        shapes = [call_products.shape_out(call, i, count) for i in slots]
        sizes = [prod(shape[1:]) for shape in shapes]
        parts = mat.T.split(sizes, 1) if len(slots) > 1 else (mat.T,)
        columns: list[Tensor | None] = [None] * len(call.outputs)
        for i, part, shape in zip(slots, parts, shapes, strict=True):
            columns[i] = part.reshape(len(part), 1, *shape[1:]).expand(-1, *shape)
        return columns

    def _to_input(self, c: Context, slots: list[int], i: int, mat: Tensor, rows: Rows) -> Tensor:
        columns = self._columns(c.call, slots, mat, rows)
        back = call_products.transposed(c.at(rows), columns)[i]
        if back is None:
            _, *shape = call_products.shape_in(c.call, i, 1)
            return mat.new_zeros(mat.shape[1], prod(shape))
        return _over_rows(back)

    def _to_param(self, c: Context, slots: list[int], name: str, mat: Tensor, rows: Rows) -> Tensor:
        columns = self._columns(c.call, slots, mat, rows)
        kronecker = call_products.param(c.at(rows), "kron_rows", name, columns)
        p = c.call.trained[name]
        if len(self.plan.uses[p]) == 1:
            self.groups[p] = kronecker.shape[2]
        return _over_rows(split_groups(kronecker, self.groups[p]))


def _chooses(call: Visit) -> bool:
    """Whether samples have different numbers of rows: rows do not average like samples."""
    layouts = () if call.samples_come_first else call.layouts_in + call.layouts_out
    return any(one is not None and one.owners and not one.owners.is_even for one in layouts)


def _over_rows(mat: Tensor) -> Tensor:
    """Average over the rows: ``[V, R, *] -> [V, D]``."""
    averaged = mat.squeeze(1) if mat.shape[1] == 1 else mat.mean(1)
    return averaged.unsqueeze(-1).flatten(1)

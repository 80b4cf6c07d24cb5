"""KFRA's propagation: one matrix for the whole batch, averaged over the samples at every module.

For a chain of modules this is ``M_in = E_n[J_nᵀ M_out J_n]``. In a graph with branches the matrix
has a block for every pair of tensors that are alive; where a module consumes one of the two, its
block meets the average Jacobian. A parameter is one more input of its module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.basederivatives import Rows, row_numbers
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.plan import Plan
from backpack.core.sweep import loss_scale
from backpack.core.tape import Call, Origin

Node = Origin | Parameter
# Applies ``matᵀ J`` for the Jacobian with respect to one node at the given rows, averaged over
# them: ``[D_out, K] -> [K, D]``.
Jacobian = Callable[[Tensor, Rows], Tensor]


class BatchAveragedSweep:
    """Carries the batch-averaged GGN of the loss back to the parameters.

    Args:
        plan: The reached calls.
        subsampling: Samples they look at.

    Raises:
        ValueError: If the network mixes samples or reshapes the batch axis.
    """

    def __init__(self, plan: Plan, subsampling: Sequence[int] | None):
        """Check that every module acts on each sample alone."""
        self.plan = plan
        self.subsampling = subsampling
        self.blocks: dict[tuple[Node, Node], Tensor] = {}
        self.groups: dict[Parameter, int] = {}
        rows = {plan.num_rows(call) for call in plan.calls if call.shape_out[0]}
        if plan.mixing or len(rows) > 1:
            raise ValueError(
                "The batch-averaged matrix of KFRA needs modules that act on each sample alone and "
                "keep the batch axis. Use KFAC or KFLR instead."
            )

    def run(self) -> dict[Parameter, Tensor]:
        """Return for each parameter the first Kronecker factor (or the whole block)."""
        for call in reversed(self.plan.calls):
            if call in self.plan.losses:
                self._start(call)
            else:
                self._through(call)
        return {p: self._factor(p) for p in self.plan.uses if (p, p) in self.blocks}

    def _factor(self, p: Parameter) -> Tensor:
        """Average the blocks of the groups that share a Kronecker factor."""
        groups = self.groups[p]
        return (
            self.blocks[p, p]
            .reshape(groups, -1, groups, self.blocks[p, p].shape[0] // groups)
            .diagonal(dim1=0, dim2=2)
            .mean(-1)
        )

    def _start(self, call: Call) -> None:
        origin = call.origins_in[0]
        assert isinstance(call.derivatives, BaseLossDerivatives)
        if origin in self.plan.producers:
            with call.bound() as module:
                matrix = call.derivatives.sum_hessian(module, None, None, self.subsampling)
            self._add(origin, origin, matrix * loss_scale(call))

    def _add(self, a: Any, b: Any, matrix: Tensor) -> None:
        self.blocks[a, b] = self.blocks[a, b] + matrix if (a, b) in self.blocks else matrix

    def _through(self, call: Call) -> None:
        out = call.origins_out[0]
        if out is None or (out, out) not in self.blocks:
            return
        own = self.blocks.pop((out, out))
        nodes = self._nodes(call)
        across = {b: m for (a, b), m in self.blocks.items() if a is out}
        self.blocks = {k: m for k, m in self.blocks.items() if out not in k}
        derivatives = call.derivatives
        assert derivatives is not None
        with call.bound() as module:
            rows = row_numbers(self.plan.base, self.subsampling)
            if derivatives.jacobian_is_constant(module) and (
                derivatives.kronecker_rows_are_constant or not call.trained
            ):
                rows = rows[:1]
            for other, matrix in across.items():  # E[J]ᵀ M
                for node, jacobian in nodes:
                    block = jacobian(matrix, self.subsampling).T
                    self._add(node, other, block)
                    self._add(other, node, block.T)
            inputs = [(node, j) for node, j in nodes if not isinstance(node, Parameter)]
            if len(inputs) == 1 and len(call.origins_in) == 1:
                ((node, _),) = inputs
                self._add(
                    node,
                    node,
                    derivatives.ea_jac_t_mat_jac_prod(module, None, None, own, self.subsampling),
                )
                inputs = []
            for a, jacobian_a in nodes:
                for b, jacobian_b in nodes:
                    if self._is_needed(a, b, inputs):
                        total: Any = 0
                        for n in rows:  # E[J_aᵀ M J_b]
                            total = total + jacobian_b(jacobian_a(own, [n]), [n])
                        self._add(a, b, total / len(rows))

    def _is_needed(self, a: Node, b: Node, inputs: list[Any]) -> bool:
        """Whether somebody reads the block: a parameter's own, or one that will be carried on."""
        if a is b and isinstance(a, Parameter):
            return True
        for node in (a, b):
            if isinstance(node, Parameter) and len(self.plan.uses[node]) == 1:
                return False
        both_inputs = not (isinstance(a, Parameter) or isinstance(b, Parameter))
        return bool(inputs) or not both_inputs

    def _nodes(self, call: Call) -> list[tuple[Node, Jacobian]]:
        """List what the matrix travels on to: inputs that a call computed, and parameters."""
        nodes: list[tuple[Node, Jacobian]] = [
            (origin, self._input_jacobian(call, i))
            for i, origin in enumerate(call.origins_in)
            if origin is not None and origin in self.plan.producers
        ]
        nodes += [(p, self._param_jacobian(call, name)) for name, p in call.trained.items()]
        return nodes

    def _input_jacobian(self, call: Call, i: int) -> Jacobian:
        def apply(mat: Tensor, rows: Rows) -> Tensor:
            assert call.derivatives is not None
            return call.derivatives.dense_jacobian_products(
                call.module, None, call.g_out, mat, rows
            )[i]

        return apply

    def _param_jacobian(self, call: Call, name: str) -> Jacobian:
        def apply(mat: Tensor, rows: Rows) -> Tensor:
            derivatives, shape = call.derivatives, call.shape_out[0][1:]
            assert derivatives is not None
            count = len(row_numbers(self.plan.base, rows))
            stacked = mat.T.reshape(-1, 1, *shape).expand(-1, count, *shape)
            kronecker = derivatives.kronecker_rows(
                name, call.module, None, call.g_out, stacked, rows
            )
            self.groups[call.trained[name]] = kronecker.shape[2]
            return kronecker.mean(1).flatten(1)

        return apply

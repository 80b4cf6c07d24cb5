"""Functions in traced models that are given the parameters of a layer, or weights of a loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from backpack.context import disable
from backpack.core.engine.backward_pass import BackwardPass
from backpack.core.record.compiler import may_leave_graph, set_compiler
from backpack.core.record.lookup import layer_of, row_of
from backpack.core.record.tape import record
from backpack.custom_module.function_module import FunctionModule
from backpack.custom_module.parameter_module import ParameterModule


class FunctionalLayer(Module):
    """Calls a function such as ``F.linear``, which is recorded as the layer with its parameters.

    Of an input that is no row for each sample, it is recorded as a function.
    """

    def __init__(self, function: FunctionModule, readers: Sequence[ParameterModule]):
        super().__init__()
        self.function, self.readers = function, ModuleList(readers)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Call the function: ``[N, *in]`` (and targets, weights) to ``[N, *out]`` (or a loss)."""
        if torch.compiler.is_dynamo_compiling():
            if may_leave_graph():
                torch._dynamo.skip_frame()
            return self._as_function(inputs)
        compiler = set_compiler(None)  # by a function of C: others would be compiled
        try:
            given = *inputs, *[reader.parameter for reader in self.readers]
            row = row_of(self.function.function)
            layer = layer_of(row, *self.function.arguments(*given))
            if row is None or layer is None:
                return self._as_function(inputs)
            vars(layer)["_backpack_name"] = vars(self).get("_backpack_name", self.function.name)
            with disable():  # a model around it may record functions
                y = self.function.forward(*given)
            inputs, passes = inputs[: len(row.inputs)], (BackwardPass.reached, BackwardPass.missed)
            seen = record(layer, inputs, {}, y, *passes)
            return y if seen is None else seen
        finally:
            set_compiler(compiler)

    def _as_function(self, inputs: Sequence[Tensor]) -> Tensor:
        return self.function(*inputs, *[reader() for reader in self.readers])

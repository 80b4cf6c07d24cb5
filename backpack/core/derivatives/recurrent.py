"""Recurrent layers: RNN, LSTM and GRU, and one step of each: RNNCell, LSTMCell and GRUCell.

All are the same :class:`~backpack.core.derivatives.recurrent_network.Network`, with another step;
that file has the formulas. A call runs the forward pass once more, to know the gates, and for each
``mat`` one backward recursion that all inputs, parameters and extensions share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import GRU, LSTM, RNN, GRUCell, LSTMCell, Module, Parameter, RNNCell

from backpack.core.derivatives import shared_weight
from backpack.core.derivatives.recall import is_same, recall
from backpack.core.derivatives.recurrent_cells import (
    GRUStep,
    LSTMStep,
    ReLUStep,
    Step,
    TanhStep,
    Weights,
)
from backpack.core.derivatives.recurrent_network import (
    Arrived,
    ManyArrived,
    Moved,
    Network,
    Trace,
    arrived_at,
    pull_back,
    pull_direction,
    pull_to_input,
    push_forward,
    read_by,
    run,
    trace,
)
from backpack.core.record.kernels import Substitute
from backpack.core.record.layout import Layout
from backpack.core.record.registry import register
from backpack.core.record.tape import Call, bound, describe, state_of
from backpack.core.rows import Rows, row_numbers
from backpack.core.types import Grads, Mats
from backpack.utils.subsampling import subsample

ELMAN_STEPS: dict[str, Step] = {"tanh": TanhStep(), "relu": ReLUStep()}
LSTM_STEP = LSTMStep()
GRU_STEP = GRUStep()


class RecurrentDerivatives(shared_weight.SharedWeightDerivatives):
    """Derivatives of recurrent modules; for formulas see :mod:`.recurrent_network`.

    A subclass says which step a module takes, and where its inputs and outputs have their time.
    """

    # ------------------------------------------------------------------ facts about the module

    def step(self, module: Any) -> Step:
        """Return the time step."""
        raise NotImplementedError

    def suffixes(self, module: Any) -> list[str]:
        """Return the end of the parameters' names for each k."""
        raise NotImplementedError

    def directions(self, module: Any) -> int:
        """Return the number of directions D."""
        return 1

    def inside(self, module: Any, tensor: Tensor, axis: int, is_state: bool) -> Tensor:
        """Bring a tensor to ``[T, N, *]``, a state to ``[L·D, N, *]``, after ``axis`` axes."""
        raise NotImplementedError

    def outside(self, module: Any, tensor: Tensor, axis: int, is_state: bool) -> Tensor:
        """Undo :meth:`inside`."""
        raise NotImplementedError

    def hessian_is_zero(self, module: Module) -> bool:
        """Return False."""
        return False

    def is_linear_in_params(self, module: Module) -> bool:
        """Return False: later steps depend on what the parameters did in earlier ones."""
        return False

    def _place(self, module: Module, param_str: str) -> tuple[str, int]:
        """Return which of the ``Weights`` a parameter is, and its k."""
        for k, suffix in enumerate(self.suffixes(module)):
            kind = param_str.removesuffix(suffix)
            if kind in Weights._fields:
                return kind, k
        raise KeyError(param_str)

    def param_names(self, module: Module) -> tuple[str, ...]:
        """Return the names of the parameters of all layers and directions."""
        names = [kind + suffix for suffix in self.suffixes(module) for kind in Weights._fields]
        return tuple([name for name in names if getattr(module, name, None) is not None])

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Keep what tells whether the call can be followed again."""
        return {"state": self._state(module)}

    def _state(self, module: Module) -> tuple[Any, ...]:
        return self.step(module), state_of([module._parameters, module._buffers])

    def _check_unchanged(self, module: Any) -> None:
        call = vars(module).get("_backpack_call")
        if call is None or call.precision is not None:  # not recorded, or its parameters are cast
            return
        if call.saved.get("state") != (self.step(module), call.state):
            raise RuntimeError(
                f"A parameter of {describe(module)} was changed after the forward pass, which is "
                "run again to know its gates. Change parameters after the backward pass."
            )

    def costly_gradients(self, call: Call, wanted: Set[str]) -> tuple[str, ...]:
        """Return all parameters, where no input requires a gradient: one kernel computes them."""
        return self._all_parameters(call) if _is_first(call) else ()

    def _all_parameters(self, call: Call) -> tuple[str, ...]:
        """Return the names of a call's parameters, if it is known what it did with all of them."""
        is_known = call.params.keys() <= set(self.param_names(call.module))
        is_unchanged = call.saved.get("state") == self._state(call.module)
        return tuple(call.params) if is_known and is_unchanged else ()

    def layouts(self, call: Call) -> list[Layout | None]:
        """Find where the samples are, see the base class.

        Raises:
            ValueError: If the input is packed or has no batch axis.
        """
        try:
            self._check_input(call.module, call.inputs)
        except NotImplementedError as error:
            raise ValueError(str(error)) from None
        return super().layouts(call)

    def network(self, module: Any, params: Mapping[str, Tensor] | None = None) -> Network:
        """Return the network with its parameters, some of them replaced by ``params``."""
        params = params or {}

        def value(name: str) -> Any:
            return params.get(name, getattr(module, name, None))

        weights = [
            Weights(*(value(kind + suffix) for kind in Weights._fields))
            for suffix in self.suffixes(module)
        ]
        return Network(self.step(module), self.directions(module), weights)

    # ------------------------------------------------------------------ arguments of the call

    def _inputs(self, module: Any) -> list[Any]:
        """Return the arguments of the call at hand, flattened."""
        given = vars(module)
        inputs: list[Any] = []
        while (name := f"input{len(inputs)}") in given:
            inputs.append(given[name])
        return inputs

    def _check_input(self, module: Any, inputs: Sequence[Any]) -> None:
        x, *others = inputs
        # those of a PackedSequence: data, batch_sizes and two permutations
        if others and isinstance(others[0], Tensor) and not others[0].is_floating_point():
            raise NotImplementedError(
                f"{describe(module)} was called with a PackedSequence, whose samples have no axis "
                "of their own. Call it with a padded batch (torch.nn.utils.rnn.pad_sequence) "
                "instead, and leave the outputs of the padding out of the loss."
            )
        if x.dim() != self.min_dims(module):
            raise ValueError(
                f"{describe(module)} was called without a batch axis: its input has the shape "
                f"{list(x.shape)}. Add one."
            )

    def _ordered(
        self, module: Any, network: Network, inputs: Sequence[Any]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the input ``[T, N, I]`` and the initial states, zeros if there are none.

        Raises:
            NotImplementedError: If the input is packed, or dropout is active between the layers.
            ValueError: If there is no batch axis.
        """
        self._check_input(module, inputs)
        if module.training and getattr(module, "dropout", 0) > 0 and module.num_layers > 1:
            raise NotImplementedError(
                f"{describe(module)} has dropout={module.dropout} between its layers, whose masks "
                "are not known. Use extend(model, use_converter=True), which splits the layers, or "
                "dropout=0, or eval()."
            )
        x, *given = inputs
        x = self.inside(module, x, 0, False)
        states = [self.inside(module, s, 0, True) for s in given if isinstance(s, Tensor)]
        shape = len(network.weights), x.shape[1]
        return x, states or [x.new_zeros(*shape, size) for size in network.state_sizes]

    def cotangents(self, module: Any, mat: Mats) -> tuple[Tensor | None, list[Tensor | None]]:
        """Split what arrives at the outputs: at all steps, ``[V, T, N, *]``, and at the states."""
        raise NotImplementedError

    def known_output(self, module: Any) -> Tensor | None:
        """Return the values at all steps that the call at hand has returned, ``[T, N, *]``."""
        return None

    def outputs(self, module: Any, results: Sequence[Tensor], axis: int) -> Any:
        """Make outputs, after ``axis`` axes, of values at all steps ``[T, N, *]`` and of states."""
        raise NotImplementedError

    def evaluate(self, module: Module, params: Mapping[str, Tensor], *inputs: Any) -> Any:
        """Return the output for other inputs and parameters: a plain loop over time.

        Args:
            module: Module whose call is at hand.
            params: Values that replace parameters.
            *inputs: Arguments of the call, flattened.
        """
        network = self.network(module, params)
        x, start = self._ordered(module, network, inputs)
        return self.outputs(module, run(network, x, start), 0)

    # ------------------------------------------------------------------ forward and backward, once

    def _traces(self, module: Any) -> list[Trace]:
        """Return the forward pass of the call at hand."""
        inputs = self._inputs(module)
        # what is known of the hidden states has no graph
        output = None if torch.is_grad_enabled() else self.known_output(module)

        def compute() -> list[Trace]:
            self._check_unchanged(module)
            network = self.network(module)
            x, start = self._ordered(module, network, inputs)
            return trace(network, x, start, output)

        weights = [p for of_k in self.network(module).weights for p in of_k]
        tensors = [*inputs, output, *weights]
        return recall(module._backpack_saved, "traces", tensors, (), compute)

    def _arrived(
        self, module: Any, mat: Mats, rows: Rows
    ) -> tuple[list[Trace], list[Arrived | ManyArrived]]:
        """Return the forward pass, and what arrives at the pre-activations from cotangents."""
        traces = self._traces(module)
        output, finals = self.cotangents(module, mat)

        def compute() -> list[Arrived | ManyArrived]:
            received = module._backpack_saved.get("received", ())
            if len(received) == len(traces) and rows is None and _is_gradient(module, mat):
                return [self.received(module, k) for k in range(len(traces))]
            slopes = [whole.of_samples(rows).slopes for whole in traces]
            return pull_back(self.network(module), slopes, output, finals)

        selected = None if rows is None else tuple(row_numbers(traces[0].x.shape[1], rows))
        # the traces tell whether an input or a parameter has changed
        tensors = [output, *finals, traces[0].before]
        return traces, recall(module._backpack_saved, "arrived", tensors, (selected,), compute)

    def received(self, module: Any, k: int) -> Arrived | ManyArrived:
        """Return what arrives from what a :class:`FusedLayer` has received."""
        received = module._backpack_saved["received"]
        if not isinstance(received[k], Arrived | ManyArrived):
            slopes = self._traces(module)[k].slopes
            received[k] = pull_direction(self.network(module), k, slopes, *received[k])
        arrived: Arrived | ManyArrived = received[k]
        return arrived

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Mats, subsampling: Rows
    ) -> Any:
        network = self.network(module)
        _, arrived = self._arrived(module, mat, subsampling)
        x = self.outside(module, pull_to_input(network, arrived, 0), 1, False)
        starts = (torch.stack(parts, 1) for parts in zip(*(a.start for a in arrived), strict=True))
        _, *others = self._inputs(module)
        if not others:
            return x
        return x, *(
            self.outside(module, next(starts), 1, True) if isinstance(s, Tensor) else None
            for s in others
        )

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Mats, subsampling: Rows
    ) -> Any:
        network = self.network(module)
        x, *others = [mat] if isinstance(mat, Tensor) else mat
        start = [None if s is None else self.inside(module, s, 1, True) for s in others]
        start += [None] * (network.step.num_states - len(start))
        x = None if x is None else self.inside(module, x, 1, False)
        return self._pushed(module, network, x, start[: network.step.num_states], None, subsampling)

    def _param_jac_mat_prod(
        self,
        param_str: str,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows,
    ) -> Any:
        network = self.network(module)
        moved = Moved(*self._place(module, param_str), mat)
        start = [None] * network.step.num_states
        return self._pushed(module, network, None, start, moved, subsampling)

    def _pushed(
        self,
        module: Any,
        network: Network,
        x: Tensor | None,
        start: Sequence[Tensor | None],
        moved: Moved | None,
        rows: Rows,
    ) -> Any:
        """Return the tangents of the outputs."""
        traces = [whole.of_samples(rows) for whole in self._traces(module)]
        output, finals = push_forward(network, traces, x, start, moved)
        assert output is not None
        shape = output.shape[0], output.shape[2]
        stacked = [
            torch.stack([output.new_zeros(*shape, size) if s is None else s for s in parts], 1)
            for parts, size in zip(zip(*finals, strict=True), network.state_sizes, strict=True)
        ]
        return self.outputs(module, [output, *stacked], 1)

    # ------------------------------------------------------------------ parameters

    def pairs(
        self, param_str: str, module: Any, mat: Mats, rows: Rows
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return what arrives at the products of a parameter, and what it is multiplied with."""
        with bound(module):
            mats, _ = self._check_output(module, mat, rows)
            kind, k = self._place(module, param_str)
            traces, arrived = self._arrived(module, mats, rows)
        s = arrived_at(kind, arrived[k]).transpose(1, 2)
        return [(s, _of_samples(read_by(kind, traces[k]), rows))]

    def reads(self, param_str: str, module: Any, rows: Rows) -> list[Tensor | None]:
        """Return what a parameter is multiplied with, ``[N, T, I]``; None for a bias."""
        with bound(module):
            kind, k = self._place(module, param_str)
            return [_of_samples(read_by(kind, self._traces(module)[k]), rows)]

    def shared_by(self, param_str: str, module: Any) -> dict[str, Any] | None:
        """Return what was computed for parameters on the same side of a layer and direction."""
        call = vars(module).get("_backpack_call")
        if call is None or call.shared is None:
            return None
        kind, k = self._place(module, param_str)
        side = kind.rpartition("_")[2]
        if side == "hh" and self.step(module).adds_sides:
            side = "ih"
        of_side: dict[str, Any] = call.shared.setdefault(f"{side}{k}", {})
        return of_side

    def _many(
        self, param_str: str, module: Any, mat: Mats, rows: Rows
    ) -> tuple[ManyArrived, Tensor, Tensor | None] | None:
        """Return what arrives if there are many columns, the slopes of the gates, and x."""
        mats, _ = self._check_output(module, mat, rows)
        kind, k = self._place(module, param_str)
        traces, each = self._arrived(module, mats, rows)
        arrived = each[k]
        if not isinstance(arrived, ManyArrived):
            return None
        x = _of_samples(read_by(kind, traces[k]), rows)
        return arrived, arrived.slopes.p if kind.endswith("_ih") else arrived.slopes.q, x

    def _param_mjp_reduced(
        self,
        param_str: str,
        module: Any,
        g_out: Grads,
        mat: Any,
        wanted: Set[str],
        subsampling: Rows,
        weights: Tensor | None,
    ) -> dict[str, Tensor]:
        values = {}
        many = None
        if wanted & {"batch_square", "square"} and "individual" not in wanted:
            many = self._many(param_str, module, mat, subsampling)
        if many is not None:
            arrived, slopes, x = many
            squares = arrived.squares(slopes, x, weights)  # of each sample
            if "batch_square" in wanted:
                values["batch_square"] = torch.stack(list(squares))
                squares = iter(values["batch_square"])
            if "square" in wanted:
                values["square"] = reduce(torch.add, squares)
        rest = wanted - values.keys()
        if rest:
            values |= super()._param_mjp_reduced(
                param_str, module, g_out, mat, rest, subsampling, weights
            )
        return values

    def kronecker_rows(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Mats,
        subsampling: Rows = None,
        approximation: str | None = None,
    ) -> Tensor:
        """Sum what arrives over time, or keep every step: ``[V, *out] -> [V, N', 1, O]``."""
        if approximation != "expand":
            with bound(module):
                many = self._many(param_str, module, mat, subsampling)
                if many is not None:
                    arrived, slopes, _ = many
                    return arrived.sums(slopes)
        ((s, _),) = self.pairs(param_str, module, mat, subsampling)
        return shared_weight.position_rows(s, approximation).unsqueeze(2)

    def kronecker_input_factors(
        self,
        param_str: str,
        module: Module,
        subsampling: Rows = None,
        approximation: str | None = None,
    ) -> list[Tensor]:
        """Return A of what a weight is multiplied with, see ``shared_weight``: ``[I, I]``."""
        (x,) = self.reads(param_str, module, subsampling)
        return [] if x is None else [shared_weight.input_factor(x, approximation)]


def _is_first(call: Call) -> bool:
    """Whether no input requires a gradient."""
    return not any(isinstance(x, Tensor) and x.requires_grad for x in call.inputs)


def _is_gradient(module: Any, mat: Mats) -> bool:
    """Whether columns are what autograd has brought to the outputs of the call at hand."""
    grads = [None if g is None else g.unsqueeze(0) for g in module._backpack_call.g_out]
    return all(map(is_same, mat, grads))


def _leaves(node: Any) -> set[Any]:
    """Return the leaves whose gradients a node computes."""
    return {getattr(parent, "variable", None) for parent, _ in node.next_functions}


def _of_samples(x: Tensor | None, rows: Rows) -> Tensor | None:
    """Bring ``[T, N, I]`` to ``[N', T, I]`` for some of the samples."""
    return None if x is None else subsample(x, 1, rows).transpose(0, 1)


class SequenceDerivatives(RecurrentDerivatives):
    """Derivatives of modules that take all time steps."""

    reads_output = True

    def suffixes(self, module: Any) -> list[str]:
        """Return ``_l0``, ``_l0_reverse``, ``_l1`` and so on."""
        directions = ["", "_reverse"][: self.directions(module)]
        return [f"_l{layer}{d}" for layer in range(module.num_layers) for d in directions]

    def directions(self, module: Any) -> int:
        """Return the number of directions D."""
        return 2 if module.bidirectional else 1

    def min_dims(self, module: Module) -> int:
        """Return 3: time, batch, features."""
        return 3

    def batch_axis_in(self, module: Any, i: int) -> int:
        """Return 1 (states, sequence) or 0 (sequence with ``batch_first``)."""
        return 0 if i == 0 and module.batch_first else 1

    def batch_axis_out(self, module: Any, i: int) -> int:
        """Return 1 (states, sequence) or 0 (sequence with ``batch_first``)."""
        return 0 if i == 0 and module.batch_first else 1

    def inside(self, module: Any, tensor: Tensor, axis: int, is_state: bool) -> Tensor:
        """Exchange time and batch axis if the batch comes first."""
        exchange = module.batch_first and not is_state
        return tensor.transpose(axis, axis + 1) if exchange else tensor

    def outside(self, module: Any, tensor: Tensor, axis: int, is_state: bool) -> Tensor:
        """Exchange them back."""
        return self.inside(module, tensor, axis, is_state)

    def cotangents(self, module: Any, mat: Mats) -> tuple[Tensor | None, list[Tensor | None]]:
        """Split what arrives at the outputs: at all steps, ``[V, T, N, *]``, and at the states."""
        output, *finals = mat
        return None if output is None else self.inside(module, output, 1, False), finals

    def known_output(self, module: Any) -> Tensor:
        """Return the output."""
        return self.inside(module, module.output[0], 0, False)

    def outputs(self, module: Any, results: Sequence[Tensor], axis: int) -> Any:
        """Return the values at all steps, and the states."""
        output, *finals = results
        return self.outside(module, output, axis, False), *finals


@register(RNN)
class RNNDerivatives(SequenceDerivatives):
    """Derivatives of ``torch.nn.RNN``."""

    def step(self, module: Any) -> Step:
        """Return the step for the module's nonlinearity."""
        return ELMAN_STEPS[module.nonlinearity]


@register(LSTM)
class LSTMDerivatives(SequenceDerivatives):
    """Derivatives of ``torch.nn.LSTM``."""

    def step(self, module: Any) -> Step:
        """Return the step."""
        return LSTM_STEP

    def costly_gradients(self, call: Call, wanted: Set[str]) -> tuple[str, ...]:
        """Return all parameters, also where kernels compute the gradient of an input with them.

        Unless norms alone are wanted: then a substitute is no faster.
        """
        output = call.outputs[0]
        has_kernels = output.is_cpu and output.dtype is torch.float32
        if has_kernels and not call.module.proj_size and wanted != {"square_norm"}:
            return self._all_parameters(call)
        return super().costly_gradients(call, wanted)

    def substitutes(
        self, call: Call, nodes: Sequence[Any], spared: Set[Parameter]
    ) -> Sequence[Substitute] | None:
        """Return one for the kernel of each direction of a layer."""
        weights = self.network(call.module).weights
        found = [
            FusedLayer(node, call, self, k)
            for node in nodes
            if type(node).__name__ == FusedLayer.name
            for k, own in enumerate(weights)
            if {p for p in own if p is not None and p.requires_grad} <= spared & _leaves(node)
        ]
        if sorted(layer.k for layer in found) == [*range(len(weights))]:
            return found
        return [] if _is_first(call) else None


class FusedLayer(Substitute):
    """Computes what oneDNN's kernel of a layer's direction would, but no parameter's gradient.

    Individual gradients need what arrives at the pre-activations anyway, and the gradient of the
    input is one product of that.

    Args:
        node: The kernel's node.
        call: Call of the LSTM.
        rule: Its rule.
        k: Which layer and direction.
    """

    name = "MkldnnRnnLayerBackward0"
    kernel = torch.ops.aten.mkldnn_rnn_layer_backward.default

    def __init__(self, node: Any, call: Call, rule: LSTMDerivatives, k: int):
        """Change nothing yet."""
        super().__init__(node, call)
        self.rule, self.k = rule, k

    def receive(self, grads: Sequence[Tensor | None]) -> None:
        """Take what has arrived at all steps, ``[T, N, H]``, and at the last states, ``[N, H]``."""
        output, *finals = grads
        if any(g is not None for g in grads):
            self.call.saved.setdefault("received", {})[self.k] = (
                None if output is None else output.unsqueeze(0),
                [None if g is None else g.reshape(1, -1, g.shape[-1]) for g in finals],
            )

    def compute(self, *args: Any) -> Sequence[Tensor | None]:
        """Return the gradients of the input, of four parameters (None) and of the first states."""
        if self.k not in self.call.saved.get("received", ()):
            return (None,) * 7
        with self.call.bound() as module:
            arrived = self.rule.received(module, self.k)
            weights = self.rule.network(module).weights[self.k]
        x = arrived.to_input(weights.weight_ih).squeeze(0)
        return x, None, None, None, None, *map(Tensor.reshape_as, arrived.start, args[5:7])

    def forget(self) -> None:
        """Forget what has arrived."""
        self.call.saved.pop("received", None)


@register(GRU)
class GRUDerivatives(SequenceDerivatives):
    """Derivatives of ``torch.nn.GRU``."""

    def step(self, module: Any) -> Step:
        """Return the step."""
        return GRU_STEP


class CellDerivatives(RecurrentDerivatives):
    """Derivatives of modules that take one time step: T = L = D = 1."""

    def suffixes(self, module: Any) -> list[str]:
        """Return one, empty."""
        return [""]

    def min_dims(self, module: Module) -> int:
        """Return 2: batch, features."""
        return 2

    def inside(self, module: Any, tensor: Tensor, axis: int, is_state: bool) -> Tensor:
        """Add the axis of the only step or layer."""
        return tensor.unsqueeze(axis)

    def outside(self, module: Any, tensor: Tensor, axis: int, is_state: bool) -> Tensor:
        """Remove it."""
        return tensor.squeeze(axis)

    def cotangents(self, module: Any, mat: Mats) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return what arrives at the states: they are the only outputs."""
        mats = [mat] if isinstance(mat, Tensor) else mat
        return None, [None if m is None else self.inside(module, m, 1, True) for m in mats]

    def outputs(self, module: Any, results: Sequence[Tensor], axis: int) -> Any:
        """Return the states."""
        _, *states = (self.outside(module, r, axis, True) for r in results)
        return tuple(states) if len(states) > 1 else states[0]


@register(RNNCell)
class RNNCellDerivatives(CellDerivatives):
    """Derivatives of ``torch.nn.RNNCell``."""

    def step(self, module: Any) -> Step:
        """Return the step for the module's nonlinearity."""
        return ELMAN_STEPS[module.nonlinearity]


@register(LSTMCell)
class LSTMCellDerivatives(CellDerivatives):
    """Derivatives of ``torch.nn.LSTMCell``."""

    def step(self, module: Any) -> Step:
        """Return the step."""
        return LSTM_STEP


@register(GRUCell)
class GRUCellDerivatives(CellDerivatives):
    """Derivatives of ``torch.nn.GRUCell``."""

    def step(self, module: Any) -> Step:
        """Return the step."""
        return GRU_STEP

"""Recurrent layers: RNN, LSTM and GRU, and one step of each: RNNCell, LSTMCell and GRUCell.

All are the same :class:`~backpack.core.derivatives.recurrent_network.Network`, with another step;
that file has the formulas. A call runs the forward pass once more, to know the gates, and for each
cotangent one backward recursion that all inputs, parameters and extensions share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import GRU, LSTM, RNN, GRUCell, LSTMCell, Module, Parameter, RNNCell

from backpack.core import fast
from backpack.core.derivatives import affine
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.facts import constant, never
from backpack.core.derivatives.memoise import is_same, memoise
from backpack.core.derivatives.recurrent_cells import (
    ELMAN_STEPS,
    GRUStep,
    LSTMStep,
    Step,
    Weights,
)
from backpack.core.derivatives.recurrent_network import (
    Cotangents,
    FactoredCotangents,
    Moved,
    Network,
    Trace,
    cotangents_at,
    pull_back,
    pull_direction,
    pull_to_input,
    push_forward,
    read_by,
    run,
    trace,
)
from backpack.core.derivatives.vectors import listed
from backpack.core.record.calls import Call
from backpack.core.record.context import Context, context_of
from backpack.core.record.kernels import KernelOverride
from backpack.core.record.layout import Layout
from backpack.core.record.module_state import describe
from backpack.core.record.registry import register
from backpack.core.record.visits import Visit
from backpack.core.record.weights import state_of_one, tensors_of
from backpack.core.types import Mats, Pairs

OWN_LSTM_KERNEL = fast.path(
    "own LSTM kernel", "What runs for an LSTM computes no gradient that nobody asks autograd for."
)


class RecurrentDerivatives(BaseDerivatives):
    """Derivatives of recurrent modules; for formulas see :mod:`.recurrent_network`.

    A subclass says which step a module takes, and where its inputs and outputs have their time.
    """

    own_step: ClassVar[Step | None] = None  # None if the module's nonlinearity tells it
    suffixes: Callable[[Any], list[str]]  # the end of the parameters' names for each k
    # brings a tensor to [T, N, *], a state to [L·D, N, *], after some axes; and back
    inside: Callable[[Any, Tensor, int, bool], Tensor]
    outside: Callable[[Any, Tensor, int, bool], Tensor]
    # splits what arrives at the outputs: at all steps, [V, T, N, *], and at the states
    cotangents: Callable[[Any, Mats], tuple[Tensor | None, list[Tensor | None]]]
    # makes outputs, after some axes, of values at all steps, [T, N, *], and of states
    outputs: Callable[[Any, Sequence[Tensor], int], Any]
    hessian_is_zero = never  # the gates are nonlinear
    directions = constant(1)  # their number D
    is_linear_in_params = never  # later steps depend on what the parameters did in earlier ones

    def step(self, module: Any) -> Step:
        """Return the time step."""
        return self.own_step or ELMAN_STEPS[module.nonlinearity]

    def _place(self, module: Module, name: str) -> tuple[str, int]:
        """Return which of the ``Weights`` a parameter is, and its k."""
        for k, suffix in enumerate(self.suffixes(module)):
            kind = name.removesuffix(suffix)
            if kind in Weights._fields:
                return kind, k
        raise KeyError(name)

    def param_names(self, module: Module) -> tuple[str, ...]:
        names = [kind + suffix for suffix in self.suffixes(module) for kind in Weights._fields]
        # not getattr, which would evaluate a parametrisation
        own, kind = {**vars(module), **module._parameters}, type(module)
        return tuple([n for n in names if own.get(n) is not None or hasattr(kind, n)])

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Keep what tells whether the call can be followed again."""
        return {"state": self._state(module)}

    def _state(self, module: Module) -> tuple[Any, ...]:
        own = tensors_of([module._parameters, module._buffers])
        return self.step(module), list(map(state_of_one, own))

    def _check_unchanged(self, c: Context) -> None:
        if c.call.precision is not None:  # its parameters are cast
            return
        if c.saved.get("state") != (self.step(c.module), c.call.state):
            raise RuntimeError(
                f"A parameter of {describe(c.module)} was changed after the forward pass, which is "
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

    def weights(self, module: Any, values: Mapping[str, Any]) -> list[Weights]:
        """Return the parameters for each k; those without a value are attributes of the module.

        Such as one that a hook computes before each call.
        """

        def value(name: str) -> Any:
            return values[name] if name in values else getattr(module, name, None)

        return [
            Weights(*(value(kind + suffix) for kind in Weights._fields))
            for suffix in self.suffixes(module)
        ]

    def network(self, c: Context, params: Mapping[str, Tensor] | None = None) -> Network:
        """Return the network with the parameters of the call, some replaced by ``params``."""
        values = c.params if params is None else {**c.params, **params}
        step, directions = self.step(c.module), self.directions(c.module)
        return Network(step, directions, self.weights(c.module, values))

    # ------------------------------------------------------------------ arguments of the call

    def _check_input(self, module: Any, inputs: Sequence[Any]) -> None:
        x, *others = inputs
        # those of a PackedSequence: data, batch_sizes and two permutations
        if others and isinstance(others[0], Tensor) and not others[0].is_floating_point():
            raise NotImplementedError(
                f"{describe(module)} was called with a PackedSequence, whose samples have no axis "
                "of their own. Use extend(model, use_converter='record') of a model that packs and "
                "unpacks the sequences in its forward, which records what is computed of them; or "
                "call it with a padded batch (torch.nn.utils.rnn.pad_sequence), and leave the "
                "outputs of the padding out of the loss."
            )
        if x.dim() != self.min_dims(module):
            raise ValueError(
                f"{describe(module)} was called without a batch axis: its input has the shape "
                f"{list(x.shape)}. Add one."
            )

    def _ordered(
        self, c: Context, network: Network, inputs: Sequence[Any]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the input ``[T, N, I]`` and the initial states, zeros if there are none."""
        module = c.module
        self._check_input(module, inputs)
        if c.call.training and getattr(module, "dropout", 0) > 0 and module.num_layers > 1:
            raise NotImplementedError(
                f"{describe(module)} has dropout={module.dropout} between its layers, whose masks "
                "are not known. Use extend(model, use_converter='trace'), which splits the layers, "
                "or dropout=0, or eval()."
            )
        x, *first = inputs
        x = self.inside(module, x, 0, False)
        states = [self.inside(module, s, 0, True) for s in first if isinstance(s, Tensor)]
        shape = len(network.weights), x.shape[1]
        return x, states or [x.new_zeros(*shape, size) for size in network.state_sizes]

    def known_output(self, c: Context) -> Tensor | None:
        """Return the values at all steps that the call at hand has returned, ``[T, N, *]``."""
        return None

    def evaluate(self, c: Context, params: Mapping[str, Tensor], *inputs: Any) -> Any:
        """Return the output for other inputs and parameters: a plain loop over time."""
        network = self.network(c, params)
        x, start = self._ordered(c, network, inputs)
        return self.outputs(c.module, run(network, x, start), 0)

    # ------------------------------------------------------------------ forward and backward, once

    def _traces(self, c: Context) -> list[Trace]:
        """Return the forward pass of the call at hand, of all samples."""
        network = self.network(c)
        # what is known of the hidden states has no graph
        output = None if torch.is_grad_enabled() else self.known_output(c)

        def compute() -> list[Trace]:
            self._check_unchanged(c)
            x, start = self._ordered(c, network, c.inputs)
            return trace(network, x, start, output)

        tensors = [*c.inputs, output, *(p for of_k in network.weights for p in of_k)]
        return memoise(c.saved, "traces", tensors, (), compute)

    def _at_gates(self, c: Context, v: Mats) -> tuple[list[Trace], list[Cotangents]]:
        """Return the forward pass, and what arrives at the pre-activations from cotangents."""
        traces = self._traces(c)
        output, finals = self.cotangents(c.module, v)

        def compute() -> list[Cotangents]:
            received = c.saved.get("received", ())
            if len(received) == len(traces) and c.rows is None and _is_gradient(c, v):
                return [self.received(c, k) for k in range(len(traces))]
            slopes = [whole.of_samples(c.rows).slopes for whole in traces]
            return pull_back(self.network(c), slopes, output, finals)

        selected = None if c.rows is None else tuple(c.numbers(traces[0].x.shape[1]))
        # the traces tell whether an input or a parameter has changed
        tensors = [output, *finals, traces[0].before]
        return traces, memoise(c.saved, "cotangents", tensors, (selected,), compute)

    def received(self, c: Context, k: int) -> Cotangents:
        """Return what arrives from what a :class:`FusedLayer` has received."""
        received: dict[int, Any] = c.saved["received"]
        if not isinstance(received[k], Cotangents):
            slopes = self._traces(c)[k].slopes
            received[k] = pull_direction(self.network(c), k, slopes, *received[k])
        return received[k]

    def vjp(self, c: Context, v: Mats) -> Any:
        network, module = self.network(c), c.module
        _, cotangents = self._at_gates(c, v)
        x = pull_to_input(network, cotangents[: network.directions], 0)
        x = self.outside(module, x, 1, False)
        starts = (
            torch.stack(parts, 1) for parts in zip(*(a.start for a in cotangents), strict=True)
        )
        _, *others = c.inputs
        if not others:
            return x
        return x, *(
            self.outside(module, next(starts), 1, True) if isinstance(s, Tensor) else None
            for s in others
        )

    def jvp(self, c: Context, t: Mats) -> Any:
        x, *others = (
            None if m is None else self.inside(c.module, m, 1, i > 0)
            for i, m in enumerate(listed(t))
        )
        return self._pushed(c, x, others, None)

    def param_jvp(self, c: Context, name: str, t: Tensor) -> Any:
        return self._pushed(c, None, [], Moved(*self._place(c.module, name), t))

    def _pushed(
        self, c: Context, x: Tensor | None, states: Sequence[Tensor | None], moved: Moved | None
    ) -> Any:
        """Return the tangents of the outputs."""
        network = self.network(c)
        start = [*states, None, None][: network.step.num_states]
        traces = [whole.of_samples(c.rows) for whole in self._traces(c)]
        output, finals = push_forward(network, traces, x, start, moved)
        assert output is not None
        shape = output.shape[0], output.shape[2]
        stacked = [
            torch.stack([output.new_zeros(*shape, size) if s is None else s for s in parts], 1)
            for parts, size in zip(zip(*finals, strict=True), network.state_sizes, strict=True)
        ]
        return self.outputs(c.module, [output, *stacked], 1)

    def affine(self, c: Context, name: str, v: Mats) -> Pairs:
        """Return what arrives at the products of a parameter, and what it is multiplied with."""
        kind, k = self._place(c.module, name)
        traces, cotangents = self._at_gates(c, v)
        s = cotangents_at(kind, cotangents[k]).transpose(1, 2)
        return [(s, _of_samples(c, read_by(kind, traces[k])))]

    def affine_inputs(self, c: Context, name: str) -> list[Tensor | None]:
        """Return what a parameter is multiplied with, ``[N, T, I]``; None for a bias."""
        kind, k = self._place(c.module, name)
        return [_of_samples(c, read_by(kind, self._traces(c)[k]))]

    def _memo(self, c: Context, name: str) -> dict[str, Any] | None:
        """Return what was computed for parameters on the same side of a layer and direction."""
        if c.memo is None:
            return None
        kind, k = self._place(c.module, name)
        side = kind.rpartition("_")[2]
        if side == "hh" and self.step(c.module).adds_sides:
            side = "ih"
        of_side: dict[str, Any] = c.memo.setdefault(f"{side}{k}", {})
        return of_side

    def _many(
        self, c: Context, name: str, v: Mats
    ) -> tuple[FactoredCotangents, Tensor, Tensor | None] | None:
        """Return what arrives if there are many columns, the slopes of the gates, and x."""
        kind, k = self._place(c.module, name)
        traces, each = self._at_gates(c, v)
        cotangents = each[k]
        if not isinstance(cotangents, FactoredCotangents):
            return None
        x = _of_samples(c, read_by(kind, traces[k]))
        return cotangents, cotangents.slopes.p if kind.endswith("_ih") else cotangents.slopes.q, x

    @fast.body("Squares of many columns are those of factors.", "affine", "param_vjp")
    def reduced(
        self, c: Context, name: str, v: Any, wanted: Set[str], weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Reduce the individual products, see the base class; squares of many columns factored."""
        values = {}
        sees_squares = wanted & {"batch_square", "square"} and "individual" not in wanted
        many = self._many(c, name, v) if sees_squares else None
        if many is not None:
            cotangents, slopes, x = many
            squares = cotangents.squares(slopes, x, weights)  # of each sample
            if "batch_square" in wanted:
                values["batch_square"] = torch.stack(list(squares))
                squares = iter(values["batch_square"])
            if "square" in wanted:
                values["square"] = reduce(torch.add, squares)
        rest = wanted - values.keys()
        if rest:
            ((s, x),) = self.affine(c, name, v)
            values |= affine.reduced(s, x, rest, weights, self._memo(c, name))
        return values

    def kron_rows(self, c: Context, name: str, v: Any, approximation: str | None = None) -> Tensor:
        """Sum what arrives over time, or keep every step: ``[V, *out] -> [V, N', 1, O]``."""
        many = None if approximation == "expand" else self._many(c, name, v)
        if many is not None:
            cotangents, slopes, _ = many
            return cotangents.sums(slopes)
        return super().kron_rows(c, name, v, approximation)


def _is_first(call: Call) -> bool:
    """Whether no input requires a gradient."""
    return not any(isinstance(x, Tensor) and x.requires_grad for x in call.inputs)


def _is_gradient(c: Context, v: Mats) -> bool:
    """Whether cotangents are what autograd has brought to the outputs of the call at hand."""
    grads = [None if g is None else g.unsqueeze(0) for g in c.call.g_out]
    return all(map(is_same, v, grads))


def _of_samples(c: Context, x: Tensor | None) -> Tensor | None:
    """Bring ``[T, N, I]`` to ``[N', T, I]`` for the selected samples."""
    return None if x is None else c.select(x, 1).transpose(0, 1)


@register(RNN)
class SequenceDerivatives(RecurrentDerivatives):
    """Derivatives of modules that take all time steps; without a step of its own, ``RNN``."""

    reads_output = True
    min_dims = constant(3)  # time, batch, features

    def suffixes(self, module: Any) -> list[str]:
        """Return ``_l0``, ``_l0_reverse``, ``_l1`` and so on."""
        directions = ["", "_reverse"][: self.directions(module)]
        return [f"_l{layer}{d}" for layer in range(module.num_layers) for d in directions]

    def directions(self, module: Any) -> int:
        return 2 if module.bidirectional else 1

    def batch_axis_in(self, module: Any, i: int) -> int:
        """Return 1 (states, sequence) or 0 (sequence with ``batch_first``)."""
        return 0 if i == 0 and module.batch_first else 1

    batch_axis_out = batch_axis_in

    def inside(self, module: Any, tensor: Tensor, axis: int, is_state: bool) -> Tensor:
        """Exchange time and batch axis if the batch comes first."""
        exchange = module.batch_first and not is_state
        return tensor.transpose(axis, axis + 1) if exchange else tensor

    outside = inside  # an exchange is its own inverse

    def cotangents(self, module: Any, v: Mats) -> tuple[Tensor | None, list[Tensor | None]]:
        """Split what arrives at the outputs: at all steps, ``[V, T, N, *]``, and at the states."""
        output, *finals = v
        return None if output is None else self.inside(module, output, 1, False), finals

    def known_output(self, c: Context) -> Tensor:
        return self.inside(c.module, c.output, 0, False)

    def outputs(self, module: Any, results: Sequence[Tensor], axis: int) -> Any:
        output, *finals = results
        return self.outside(module, output, axis, False), *finals


@register(LSTM)
class LSTMDerivatives(SequenceDerivatives):
    """Derivatives of ``torch.nn.LSTM``."""

    own_step = LSTMStep()

    def costly_gradients(self, call: Call, wanted: Set[str]) -> tuple[str, ...]:
        """Return all parameters, also where kernels compute the gradient of an input with them.

        Unless norms alone are wanted: then an override is no faster.
        """
        output = call.outputs[0]
        has_kernels = output.is_cpu and output.dtype is torch.float32
        if has_kernels and not call.module.proj_size and wanted != {"square_norm"}:
            return self._all_parameters(call)
        return super().costly_gradients(call, wanted)

    def kernel_overrides(
        self, visit: Visit, nodes: Sequence[Any], elided: Set[Parameter]
    ) -> Sequence[KernelOverride] | None:
        """Return one for the kernel of each direction of a layer."""
        weights = self.weights(visit.module, {})
        found = []
        for node in nodes if OWN_LSTM_KERNEL.is_on else []:
            if type(node).__name__ == FusedLayer.name:
                leaves = {getattr(parent, "variable", None) for parent, _ in node.next_functions}
                found += [
                    FusedLayer(node, visit, self, k)
                    for k, own in enumerate(weights)
                    if {p for p in own if p is not None and p.requires_grad} <= elided & leaves
                ]
        if sorted(layer.k for layer in found) == [*range(len(weights))]:
            return found
        return [] if _is_first(visit) else None


class FusedLayer(KernelOverride):
    """Computes what oneDNN's kernel of a layer's direction would, but no parameter's gradient.

    Individual gradients need what arrives at the pre-activations anyway, and the gradient of the
    input is one product of that. The index k says which layer and direction.
    """

    name = "MkldnnRnnLayerBackward0"
    kernel = torch.ops.aten.mkldnn_rnn_layer_backward.default

    def __init__(self, node: Any, visit: Visit, rule: LSTMDerivatives, k: int):
        super().__init__(node, visit)
        self.rule, self.k = rule, k

    def receive(self, grads: Sequence[Tensor | None]) -> None:
        """Take what has arrived at all steps, ``[T, N, H]``, and at the last states, ``[N, H]``."""
        output, *finals = grads
        if any(g is not None for g in grads):
            self.visit.saved.setdefault("received", {})[self.k] = (
                None if output is None else output.unsqueeze(0),
                [None if g is None else g.reshape(1, -1, g.shape[-1]) for g in finals],
            )

    def compute(self, *args: Any) -> Sequence[Tensor | None]:
        """Return the gradients of the input, of four parameters (None) and of the first states."""
        if self.k not in self.visit.saved.get("received", ()):
            return (None,) * 7
        c = context_of(self.visit)
        cotangents = self.rule.received(c, self.k)
        weights = self.rule.network(c).weights[self.k]
        x = cotangents.to_input(weights.weight_ih).squeeze(0)
        return x, None, None, None, None, *map(Tensor.reshape_as, cotangents.start, args[5:7])

    def clear(self) -> None:
        """Free the cotangents that were received for this layer."""
        self.visit.saved.pop("received", None)


@register(GRU)
class GRUDerivatives(SequenceDerivatives):
    """Derivatives of ``torch.nn.GRU``."""

    own_step = GRUStep()


@register(RNNCell)
class CellDerivatives(RecurrentDerivatives):
    """Derivatives of modules that take one step, as ``RNNCell``: T = L = D = 1."""

    min_dims = constant(2)  # batch, features

    def suffixes(self, module: Any) -> list[str]:
        """Return one empty suffix: a cell has one set of parameters."""
        return [""]

    def inside(self, module: Any, tensor: Tensor, axis: int, is_state: bool) -> Tensor:
        return tensor.unsqueeze(axis)

    def outside(self, module: Any, tensor: Tensor, axis: int, is_state: bool) -> Tensor:
        return tensor.squeeze(axis)

    def cotangents(self, module: Any, v: Mats) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return what arrives at the states: they are the only outputs."""
        each = listed(v)
        return None, [None if m is None else self.inside(module, m, 1, True) for m in each]

    def outputs(self, module: Any, results: Sequence[Tensor], axis: int) -> Any:
        _, *states = (self.outside(module, r, axis, True) for r in results)
        return tuple(states) if len(states) > 1 else states[0]


@register(LSTMCell)
class LSTMCellDerivatives(CellDerivatives):
    """Derivatives of ``torch.nn.LSTMCell``."""

    own_step = LSTMStep()


@register(GRUCell)
class GRUCellDerivatives(CellDerivatives):
    """Derivatives of ``torch.nn.GRUCell``."""

    own_step = GRUStep()

"""A recurrent network of layers × directions × time steps, and its derivatives.

Of one direction of a layer (in the backward direction, t-1 and t+1 change places):

========= =====================================================================================
forward   p_t = W_ih x_t + b_ih, q_t = W_hh h_{t-1} + b_hh

          (h̃_t, c_t) = step(p_t, q_t, h_{t-1}, c_{t-1})

          h_t = W_hr h̃_t with a projection, else h̃_t: the output y_t
tangent   ṗ_t = W_ih ẋ_t + Ẇ_ih x_t + ḃ_ih, q̇_t = W_hh ḣ_{t-1} + Ẇ_hh h_{t-1} + ḃ_hh

          ḣ_t = W_hr ∂h̃_t + Ẇ_hr h̃_t, with the step's tangent ∂h̃_t
cotangent h̄_t = ȳ_t + W_hhᵀ q̄_{t+1} + what step t+1 hands to h_t directly

          p̄_t, q̄_t and c̄_{t-1} from the step, for the cotangents W_hrᵀ h̄_t and c̄_t

          x̄_t = W_ihᵀ p̄_t; h̄_0 and c̄_0 are what is left after the first step
parameter W_ih: sum_t p̄_t x_tᵀ, W_hh: sum_t q̄_t h_{t-1}ᵀ, W_hr: sum_t h̄_t h̃_tᵀ,

          b_ih: sum_t p̄_t, b_hh: sum_t q̄_t
========= =====================================================================================

One recursion serves all parameters and inputs; everything that does not depend on the step before
or after is one matrix product over all time steps. The steps are in
:mod:`backpack.core.derivatives.recurrent_cells`.

Letters: T time steps, N samples, V columns, L layers, D directions, I input features, H hidden
features, P features of h (those of the projection if there is one, else H), G gates. Time comes
first: input ``[T, N, I]``, output ``[T, N, D·P]``, states h ``[L·D, N, P]`` and c ``[L·D, N, H]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from backpack.core.derivatives import shared_weight
from backpack.core.derivatives.basederivatives import Rows
from backpack.core.derivatives.recurrent_cells import State, Step
from backpack.utils.subsampling import subsample


class Weights(NamedTuple):
    """Parameters of one direction of a layer."""

    weight_ih: Tensor  # [G·H, I]
    weight_hh: Tensor  # [G·H, P]
    bias_ih: Tensor | None  # [G·H]
    bias_hh: Tensor | None  # [G·H]
    weight_hr: Tensor | None  # [P, H]


class Network(NamedTuple):
    """Layers × directions. Index ``k = layer · directions + direction`` counts both."""

    step: Step
    directions: int
    weights: list[Weights]

    @property
    def layers(self) -> range:
        """Numbers of the layers."""
        return range(len(self.weights) // self.directions)

    def of_layer(self, layer: int) -> list[tuple[int, bool]]:
        """Return the index k of each direction of a layer, and whether it goes backward."""
        return [(layer * self.directions + d, d == 1) for d in range(self.directions)]

    @property
    def state_sizes(self) -> list[int]:
        """Number of features of each state."""
        hidden_size = self.weights[0].weight_ih.shape[0] // self.step.num_gates
        return [self.weights[0].weight_hh.shape[1], hidden_size][: self.step.num_states]


class Unrolled(NamedTuple):
    """The time steps of one direction of a layer, in the order of time."""

    x: Tensor  # input, [T, N, I]
    before: list[State]  # states before each step, [N, P] and [N, H]
    hidden: list[Tensor]  # h̃_t, [N, H]
    values: list[State]  # what the step's slopes need, [N, H] each
    output: Tensor  # h_t, [T, N, P]
    last: State  # after the last step, [N, P] and [N, H]


class Trace(NamedTuple):
    """What the derivatives of one direction of a layer need of its forward pass."""

    x: Tensor  # [T, N, I]
    before: Tensor  # h_{t-1}, [T, N, P]
    hidden: Tensor | None  # h̃_t if there is a projection, [T, N, H]
    slopes: State  # [T, N, H] and [T, N, G·H]

    def of_samples(self, rows: Rows) -> Trace:
        """Select samples."""
        x, before, hidden, slopes = self
        return Trace(
            subsample(x, 1, rows),
            subsample(before, 1, rows),
            None if hidden is None else subsample(hidden, 1, rows),
            tuple(subsample(s, 1, rows) for s in slopes),
        )


class Arrived(NamedTuple):
    """What arrives at the pre-activations of one direction of a layer: cotangents."""

    p: Tensor  # [V, T, N, G·H]
    q: Tensor  # [V, T, N, G·H]
    projected: Tensor | None  # at W_hr h̃_t, [V, T, N, P]
    start: State  # at the initial states, [V, N, P] and [V, N, H]


def in_order(items: Sequence[Any], reverse: bool) -> Any:
    """Bring items from the order of time to that of the steps, or back."""
    return items[::-1] if reverse else items


def stack(items: Iterable[Sequence[Tensor]], axis: int = 0) -> State:
    """Stack tuples of tensors entry by entry."""
    return tuple(torch.stack(parts, axis) for parts in zip(*items, strict=True))


def step_by_step(tensors: Sequence[Tensor], axis: int = 0) -> list[State]:
    """Undo :func:`stack`."""
    return list(zip(*(tensor.unbind(axis) for tensor in tensors), strict=True))


class OverTime:
    """Collects what belongs to each step, ``[V, N, *]``, in any order.

    Without autograd it goes to its place at once, so that it is not in memory twice.
    """

    def __init__(self, num_t: int):
        """Collect nothing yet."""
        self._parts: list[Tensor | None] = [None] * num_t
        self._whole: Tensor | None = None

    def __setitem__(self, t: int, part: Tensor) -> None:
        """Set what belongs to step t."""
        if torch.is_grad_enabled():
            self._parts[t] = part
            return
        if self._whole is None:
            num_v, *shape = part.shape
            self._whole = part.new_empty(num_v, len(self._parts), *shape)
        self._whole[:, t] = part

    def stacked(self) -> Tensor | None:
        """Return ``[V, T, N, *]``; None if nothing was set."""
        parts = [part for part in self._parts if part is not None]
        return torch.stack(parts, 1) if parts else self._whole


def unroll(step: Step, w: Weights, x: Tensor, state: State, reverse: bool) -> Unrolled:
    """Take all steps of one direction of a layer."""
    before, hidden, values, outputs = [], [], [], []
    for p in in_order(linear(x, w.weight_ih, w.bias_ih).unbind(), reverse):
        before.append(state)
        q = linear(state[0], w.weight_hh, w.bias_hh)
        (h, *others), kept = step.advance(p, q, state)
        hidden.append(h)
        values.append(kept)
        state = (h if w.weight_hr is None else linear(h, w.weight_hr), *others)
        outputs.append(state[0])
    before, hidden = in_order(before, reverse), in_order(hidden, reverse)
    values, output = in_order(values, reverse), torch.stack(in_order(outputs, reverse))
    return Unrolled(x, before, hidden, values, output, state)


def run(network: Network, x: Tensor, start: Sequence[Tensor]) -> tuple[State, list[Unrolled]]:
    """Run the network, differentiably.

    Args:
        network: The network.
        x: ``[T, N, I]``.
        start: Initial states, ``[L·D, N, P]`` and ``[L·D, N, H]``.

    Returns:
        The output ``[T, N, D·P]`` and the final states; the steps for each k.
    """
    each: list[Unrolled] = []
    for layer in network.layers:
        for k, reverse in network.of_layer(layer):
            first = tuple(s[k] for s in start)
            each.append(unroll(network.step, network.weights[k], x, first, reverse))
        x = torch.cat([steps.output for steps in each[-network.directions :]], -1)
    return (x, *stack([steps.last for steps in each])), each


def trace(network: Network, x: Tensor, start: Sequence[Tensor]) -> list[Trace]:
    """Run the network and return what its derivatives need, for each k."""
    _, each = run(network, x, start)
    traces = []
    for w, steps in zip(network.weights, each, strict=True):
        before = stack(steps.before)
        slopes = network.step.slopes(stack(steps.values), before)
        hidden = None if w.weight_hr is None else torch.stack(steps.hidden)
        traces.append(Trace(steps.x, before[0], hidden, slopes))
    return traces


def pull_back(
    network: Network,
    slopes: Sequence[State],
    output: Tensor | None,
    finals: Sequence[Tensor | None],
) -> list[Arrived]:
    """Apply the transposed Jacobian as far as the pre-activations.

    Args:
        network: The network.
        slopes: Those of the samples that the cotangents hold, for each k.
        output: ``[V, T, N, D·P]``, None for zero.
        finals: Cotangents of the final states, ``[V, L·D, N, P]`` and ``[V, L·D, N, H]``, None for
            zero.

    Returns:
        What arrives, for each k.
    """
    like = next(m for m in (output, *finals) if m is not None)
    num_v, num_n = like.shape[0], like.shape[2]
    zeros = [like.new_zeros(num_v, num_n, size) for size in network.state_sizes]
    arrived: dict[int, Arrived] = {}
    for layer in reversed(network.layers):
        halves = (
            [None] * network.directions if output is None else output.chunk(network.directions, -1)
        )
        for (k, reverse), half in zip(network.of_layer(layer), halves, strict=True):
            last = tuple(z if m is None else m[:, k] for m, z in zip(finals, zeros, strict=True))
            arrived[k] = _pull_direction(
                network.step, network.weights[k], slopes[k], half, last, reverse
            )
        if layer > 0:
            output = pull_to_input(network, arrived, layer)
    return [arrived[k] for k in range(len(arrived))]


def _pull_direction(
    step: Step, w: Weights, slopes: State, output: Tensor | None, state: State, reverse: bool
) -> Arrived:
    each = step_by_step(slopes)
    outputs = [None] * len(each) if output is None else output.unbind(1)
    ps, qs, projected = (OverTime(len(each)) for _ in range(3))
    for t in in_order(range(len(each)), not reverse):
        h, *others = state
        if (y := outputs[t]) is not None:
            h = h + y
        if w.weight_hr is not None:
            projected[t] = h
            h = h @ w.weight_hr
        p, q, direct, rest = step.cotangent(each[t], (h, *others))
        ps[t] = p
        if q is not p:
            qs[t] = q
        h = q @ w.weight_hh
        state = (h if direct is None else h + direct, *rest)
    at_p, at_q = ps.stacked(), qs.stacked()
    assert at_p is not None
    return Arrived(at_p, at_p if at_q is None else at_q, projected.stacked(), state)


def pull_to_input(
    network: Network, arrived: Mapping[int, Arrived] | Sequence[Arrived], layer: int
) -> Tensor:
    """Return what arrives at the input of a layer, ``[V, T, N, I]``."""
    each = [arrived[k].p @ network.weights[k].weight_ih for k, _ in network.of_layer(layer)]
    return sum(each[1:], start=each[0])


class Moved(NamedTuple):
    """A tangent of one parameter."""

    kind: str  # a field of Weights
    k: int
    mat: Tensor  # [V, *p]


def push_forward(
    network: Network,
    traces: Sequence[Trace],
    x: Tensor | None,
    start: Sequence[Tensor | None],
    moved: Moved | None = None,
) -> tuple[Tensor | None, list[list[Tensor | None]]]:
    """Apply the Jacobian.

    Args:
        network: The network.
        traces: Of the samples that the tangents hold, for each k.
        x: Tangent of the input, ``[V, T, N, I]``, None for zero.
        start: Tangents of the initial states, ``[V, L·D, N, P]`` and ``[V, L·D, N, H]``, None for
            zero.
        moved: Tangent of a parameter.

    Returns:
        The tangent of the output ``[V, T, N, D·P]``, and for each k those of the final states,
        ``[V, N, P]`` and ``[V, N, H]``. None for zero.
    """
    finals: list[list[Tensor | None]] = []
    for layer in network.layers:
        outputs: list[Tensor | None] = []
        for k, reverse in network.of_layer(layer):
            first = [None if s is None else s[:, k] for s in start]
            own = moved if moved is not None and moved.k == k else None
            output, last = _push_direction(
                network.step, network.weights[k], traces[k], x, first, own, reverse
            )
            outputs.append(output)
            finals.append(last)
        known = [y for y in outputs if y is not None]
        filled = [torch.zeros_like(known[0]) if y is None else y for y in outputs if known]
        x = torch.cat(filled, -1) if known else None
    return x, finals


def _push_direction(
    step: Step,
    w: Weights,
    values: Trace,
    x: Tensor | None,
    first: Sequence[Tensor | None],
    moved: Moved | None,
    reverse: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    given = [m for m in (x, *first, None if moved is None else moved.mat) if m is not None]
    if not given:
        return None, [None] * step.num_states
    num_v, (num_t, num_n, num_p) = given[0].shape[0], values.before.shape
    num_gates_h = w.weight_hh.shape[0]
    zero = values.before.new_zeros(())
    # what does not depend on the steps before: [V, T, N, *]
    p = q = zero.expand(num_v, num_t, num_n, num_gates_h)
    projected = zero.expand(num_v, num_t, num_n, num_p)
    if x is not None:
        p = x @ w.weight_ih.T
    if moved is not None:
        read = read_by(moved.kind, values)
        from_moved = shared_weight.jac_mat_prod(moved.mat, read, num_t, num_n)  # T before N here
        if moved.kind == "weight_hr":
            projected = from_moved
        elif moved.kind.endswith("_ih"):
            p = p + from_moved
        else:
            q = from_moved
    sizes = [num_p, num_gates_h // step.num_gates][: step.num_states]
    state: State = tuple(
        zero.expand(num_v, num_n, size) if m is None else m
        for m, size in zip(first, sizes, strict=True)
    )
    outputs = []
    each = list(zip(step_by_step(values.slopes), step_by_step((p, q, projected), 1), strict=True))
    for slopes, (p_t, q_t, r_t) in in_order(each, reverse):
        h, *others = step.tangent(slopes, p_t, q_t + state[0] @ w.weight_hh.T, state)
        state = (h if w.weight_hr is None else h @ w.weight_hr.T + r_t, *others)
        outputs.append(state[0])
    return torch.stack(in_order(outputs, reverse), 1), list(state)


def read_by(kind: str, values: Trace) -> Tensor | None:
    """Return what a parameter is multiplied with, ``[T, N, *]``; None for a bias."""
    return {"weight_ih": values.x, "weight_hh": values.before, "weight_hr": values.hidden}.get(kind)


def arrived_at(kind: str, arrived: Arrived) -> Tensor:
    """Return what arrives where a parameter adds to, ``[V, T, N, *]``."""
    if kind == "weight_hr":
        assert arrived.projected is not None
        return arrived.projected
    return arrived.p if kind.endswith("_ih") else arrived.q

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

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from backpack.core import fast
from backpack.core.derivatives import affine
from backpack.core.derivatives.recurrent_cells import (
    Path,
    Slopes,
    State,
    Step,
    Weights,
    in_order,
    shifted,
)
from backpack.core.rows import Rows
from backpack.core.values import has_values
from backpack.utils.subsampling import subsample

# More columns than this may be factored: a matrix for each sample and step has to pay off.
MANY_COLUMNS = 64
FACTORED = fast.path(
    "factored recurrences", "Many columns of a recurrent layer travel without the slopes of gates."
)


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

    def of_directions(self, output: Tensor | None) -> Sequence[Tensor | None]:
        """Split what is at an output, ``[*, D·P]``, or None, into that of each direction."""
        return [None] * self.directions if output is None else output.chunk(self.directions, -1)

    @property
    def state_sizes(self) -> list[int]:
        """Number of features of each state."""
        hidden_size = self.weights[0].weight_ih.shape[0] // self.step.num_gates
        return [self.weights[0].weight_hh.shape[1], hidden_size][: self.step.num_states]


class Trace(NamedTuple):
    """What the derivatives of one direction of a layer need of its forward pass."""

    x: Tensor  # [T, N, I]
    before: Tensor  # h_{t-1}, [T, N, P]
    hidden: Tensor | None  # h̃_t if there is a projection, [T, N, H]
    slopes: Slopes

    def of_samples(self, rows: Rows) -> Trace:
        """Select samples."""
        if rows is None:
            return self

        def of(tensor: Tensor) -> Tensor:
            return subsample(tensor, 1, rows)

        x, before, hidden, (p, q, states) = self
        at_p = of(p)
        slopes = Slopes(at_p, at_p if q is p else of(q), tuple(map(of, states)))
        return Trace(of(x), of(before), None if hidden is None else of(hidden), slopes)


class GateCotangents(NamedTuple):
    """What arrives at the pre-activations of one direction of a layer: cotangents."""

    p: Tensor  # [V, T, N, G·H]
    q: Tensor  # [V, T, N, G·H]
    projected: Tensor | None  # at W_hr h̃_t, [V, T, N, P]
    start: State  # at the initial states, [V, N, P] and [V, N, H]

    def to_input(self, weight: Tensor) -> Tensor:
        """Return what arrives at the input of the layer, ``[V, T, N, I]``."""
        return self.p @ weight


class FactoredCotangents(NamedTuple):
    """The same for many columns, factored: gate k gets its slope times what arrived at one state.

    There are fewer states than gates, and the columns come last: what is computed of them
    (:meth:`squares`, the recursion) are matrix products over columns for each sample.
    """

    states: Tensor  # at the states, [N, S, H, T, V]
    spans: list[slice]  # for each step the columns that are not zero
    slopes: Slopes
    sources: tuple[int, ...]  # for each gate its state
    start: State  # at the initial states, [V, N, P] and [V, N, H]
    latest: list[tuple[Tensor | None, list[Tensor]]]  # weights and products of the last squares

    @property
    def p(self) -> Tensor:
        """As of :class:`GateCotangents`."""
        return self._at(self.slopes.p)

    @property
    def q(self) -> Tensor:
        """As of :class:`GateCotangents`."""
        return self._at(self.slopes.q)

    def _at(self, slopes: Tensor) -> Tensor:
        gates = self.states[:, list(self.sources)].flatten(1, 2)  # [N, G·H, T, V]
        return (gates * slopes.permute(1, 2, 0).unsqueeze(-1)).permute(3, 2, 0, 1)

    def sums(self, slopes: Tensor) -> Tensor:
        """Sum what arrives at pre-activations over time: ``[V, N, 1, G·H]``."""
        a = by_gate(slopes, len(self.sources)).permute(1, 2, 3, 0)  # [N, G, H, T]
        parts = [
            (a[:, k].unsqueeze(2) @ self.states[:, source]).squeeze(2)
            for k, source in enumerate(self.sources)
        ]
        return torch.cat(parts, 1).permute(2, 0, 1).unsqueeze(2)

    def to_input(self, weight: Tensor) -> Tensor:
        """Return what arrives at the input of the layer, ``[V, T, N, I]``."""
        num_n, _, _, num_t, num_v = self.states.shape
        back = weight.new_empty(num_n, weight.shape[1], num_t, num_v)
        for t, span in enumerate(self.spans):
            back[:, :, t, : span.start] = 0
            back[:, :, t, span.stop :] = 0
            m = transition(weight, self.slopes.p[t], self.sources)
            torch.bmm(m, self.states.flatten(1, 2)[:, :, t, span], out=back[:, :, t, span])
        return back.permute(3, 2, 0, 1)

    def squares(self, slopes: Tensor, x: Tensor | None, weights: Tensor | None) -> Iterator[Tensor]:
        """Yield each sample's squared products of a weight (a bias), summed over V: ``[*p]``.

        Of each entry, ``sum_v (sum_t a_t u_vt x_t)² = sum_{t,r} a_t a_r x_t x_r sum_v u_vt u_vr``,
        with the slopes a of the gates and the x ``[N, T, I]`` that a weight is multiplied with: the
        columns only matter for T² products of a state with itself.
        """
        for n, gram in enumerate(self._grams(weights)):  # [S, H, T, T]
            a = slopes[:, n].T  # [G·H, T]
            of_gates = gram[list(self.sources)].flatten(0, 1) * (a.unsqueeze(2) * a.unsqueeze(1))
            if x is None:
                yield of_gates.sum((1, 2))
            else:
                yield of_gates.flatten(1) @ (x[n].unsqueeze(1) * x[n]).flatten(0, 1)

    def _grams(self, weights: Tensor | None) -> list[Tensor]:
        """Return ``sum_v w_v u_vt u_vr`` of each sample's states: ``[S, H, T, T]``."""
        if not (self.latest and self.latest[0][0] is weights):
            self.latest.clear()  # its memory is free before the new products take some
            of_samples = [None] * len(self.states) if weights is None else weights.T
            pairs = zip(self.states, of_samples, strict=True)
            grams = [(u if w is None else u * w) @ u.mT for u, w in pairs]
            self.latest.append((weights, grams))
        return self.latest[0][1]


Cotangents = GateCotangents | FactoredCotangents


def by_gate(slopes: Tensor, num_gates: int) -> Tensor:
    """Split the last axis: ``[*, G·H] -> [*, G, H]``."""
    return slopes.unflatten(-1, (num_gates, -1))


def transition(weight: Tensor, slopes: Tensor, sources: Sequence[int]) -> Tensor:
    """Return for each sample the map of all states to what a weight is multiplied with.

    ``sum_k W_kᵀ diag(a_k)`` over the gates k of a state: for one step, ``[N, I, S·H]``.
    """
    a, w = by_gate(slopes, len(sources)), weight.unflatten(0, (len(sources), -1))
    each: list[Any] = [0] * (max(sources) + 1)
    for k, source in enumerate(sources):
        each[source] = each[source] + w[k].T * a[:, k].unsqueeze(1)
    return torch.cat(each, 2)


def reached(mat: Tensor, span: slice) -> slice:
    """Extend a span of columns so that ``[N, P, V]`` is zero in all others."""
    for first, part in (0, mat[..., : span.start]), (span.stop, mat[..., span.stop :]):
        if part.numel() and part.any():
            columns = (first + part.flatten(0, 1).any(0).nonzero()).flatten()
            own = slice(int(columns[0]), int(columns[-1]) + 1)
            is_new = span.start == span.stop
            span = own if is_new else slice(min(span.start, own.start), max(span.stop, own.stop))
    return span


class AtGates:
    """Collects what arrives at the pre-activations of each step, ``[V, N, G·H]``, in any order.

    Without autograd, it is written to its place in what all steps have.
    """

    def __init__(self, slopes: Tensor, like: Tensor):
        """Collect nothing yet; ``like`` is for V, precision and device."""
        self._slopes = slopes.unbind()
        self._parts: list[Any] = [None] * len(slopes)
        self._whole: Tensor | None = None
        if not torch.is_grad_enabled():
            self._whole = like.new_empty(len(slopes), len(like), *slopes.shape[1:])
            self._parts = list(self._whole.unbind())

    def put(self, t: int, arrived: Tensor) -> Tensor:
        """Multiply what arrived at the states of the gates of step t with the slopes."""
        self._parts[t] = torch.mul(arrived, self._slopes[t], out=self._parts[t])
        return self._parts[t]

    def stacked(self) -> Tensor:
        """Return ``[V, T, N, G·H]``."""
        whole = torch.stack(self._parts) if self._whole is None else self._whole
        return whole.transpose(0, 1)


def unroll(step: Step, w: Weights, x: Tensor, state: State, reverse: bool) -> tuple[Tensor, State]:
    """Take all steps of one direction of a layer: the outputs ``[T, N, P]``, and the last state."""
    outputs = []
    for p in in_order(w.p(x).unbind(), reverse):
        h, *others = step.advance(p, w.q(state[0]), state)
        state = (h if w.weight_hr is None else linear(h, w.weight_hr), *others)
        outputs.append(state[0])
    return torch.stack(in_order(outputs, reverse)), state


def run(network: Network, x: Tensor, start: Sequence[Tensor]) -> State:
    """Run the network, differentiably: the output, and the final states, see the table above."""
    finals: list[State] = []
    for layer in network.layers:
        outputs = []
        for k, reverse in network.of_layer(layer):
            first = tuple(s[k] for s in start)
            output, last = unroll(network.step, network.weights[k], x, first, reverse)
            outputs.append(output)
            finals.append(last)
        x = torch.cat(outputs, -1)
    return (x, *(torch.stack(states) for states in zip(*finals, strict=True)))


def trace(
    network: Network, x: Tensor, start: Sequence[Tensor], output: Tensor | None = None
) -> list[Trace]:
    """Return what the derivatives of the network need, for each k.

    The output of the network is given if it need not be differentiable.
    """
    traces = []
    for layer in network.layers:
        known = network.of_directions(output if layer == network.layers[-1] else None)
        outputs = []
        for (k, reverse), after in zip(network.of_layer(layer), known, strict=True):
            w, first = network.weights[k], tuple(s[k] for s in start)
            if after is None:
                after, _ = unroll(network.step, w, x, first, reverse)
            path = Path(x, shifted(after, first[0], reverse), after, first, reverse)
            slopes, hidden = network.step.slopes(w, path)
            traces.append(Trace(x, path.before, None if w.weight_hr is None else hidden, slopes))
            outputs.append(after)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return traces


def pull_back(
    network: Network,
    slopes: Sequence[Slopes],
    output: Tensor | None,
    finals: Sequence[Tensor | None],
) -> list[Cotangents]:
    """Apply the transposed Jacobian as far as the pre-activations, for each k.

    The slopes are those of the samples at hand. The output is ``[V, T, N, D·P]``, the final states
    are ``[V, L·D, N, P]`` and ``[V, L·D, N, H]``: None for zero.
    """
    cotangents: list[Cotangents] = []
    for layer in reversed(network.layers):
        each = zip(network.of_layer(layer), network.of_directions(output), strict=True)
        own = [
            pull_direction(
                network, k, slopes[k], arrived, [None if m is None else m[:, k] for m in finals]
            )
            for (k, _), arrived in each
        ]
        if layer > 0:
            output = pull_to_input(network, own, layer)
        cotangents = own + cotangents
    return cotangents


def pull_direction(
    network: Network, k: int, slopes: Slopes, output: Tensor | None, finals: Sequence[Tensor | None]
) -> Cotangents:
    """Do that for one k: with an output ``[V, T, N, P]``, and states without their first axis."""
    like = next(m for m in (output, *finals) if m is not None)
    shape = len(like), slopes.p.shape[1]
    state = tuple(
        like.new_zeros(*shape, size) if m is None else m
        for m, size in zip(finals, network.state_sizes, strict=True)
    )
    pull = _pull_many if prefers_factors(network, slopes, like) else _pull_each
    reverse = k % network.directions == 1
    return pull(network.step, network.weights[k], slopes, output, state, reverse)


def _pull_each(
    step: Step, w: Weights, slopes: Slopes, output: Tensor | None, state: State, reverse: bool
) -> GateCotangents:
    num_t = len(slopes.p)
    outputs = [None] * num_t if output is None else output.unbind(1)
    ps = AtGates(slopes.p, state[0])
    qs = ps if slopes.q is slopes.p else AtGates(slopes.q, state[0])
    between = list(zip(*(s.unbind() for s in slopes.states), strict=True)) or [()] * num_t
    projected: list[Tensor] = []
    steps = in_order(range(num_t), not reverse)
    first, *later = (outputs[t] for t in steps)  # what arrives at each h_t from above
    if first is not None:
        state = (state[0] + first, *state[1:])
    for t, y in zip(steps, [*later, None], strict=True):
        h, *others = state
        if w.weight_hr is not None:
            projected.append(h)
            h = h @ w.weight_hr
        state = step.gather(between[t], (h, *others))
        arrived = torch.cat([state[k] for k in step.sources], -1)
        q = ps.put(t, arrived)
        if qs is not ps:
            q = qs.put(t, arrived)
        direct, rest = step.hand_on(between[t], state)
        h = q @ w.weight_hh
        state = (sum((m for m in (y, direct) if m is not None), start=h), *rest)
    p = ps.stacked()
    return GateCotangents(
        p,
        p if qs is ps else qs.stacked(),
        torch.stack(in_order(projected, not reverse), 1) if projected else None,
        state,
    )


def prefers_factors(network: Network, slopes: Slopes, like: Tensor) -> bool:
    """Whether :class:`FactoredCotangents` takes fewer multiplications, as for many columns."""
    first, *_ = network.weights
    num_v, num_t, num_read = len(like), len(slopes.p), first.weight_hh.shape[1]
    num_read += first.weight_ih.shape[1]
    states_per_gate = len(set(network.step.sources)) / network.step.num_gates
    return (
        FACTORED.is_on
        and not torch.is_grad_enabled()
        and has_values(like)
        and first.weight_hr is None
        and num_v > MANY_COLUMNS
        and num_v * num_read > num_t * (num_v * states_per_gate + num_read)
    )


def _pull_many(
    step: Step, w: Weights, slopes: Slopes, output: Tensor | None, state: State, reverse: bool
) -> FactoredCotangents:
    num_t, (num_v, num_n, num_h) = len(slopes.p), state[0].shape
    state = tuple(s.permute(1, 2, 0).clone() for s in state)  # [N, H, V], changed in place
    span = slice(0, 0)
    for s in state:
        span = reached(s, span)
    states = slopes.p.new_empty(num_n, len(state), num_h, num_t, num_v)
    spans = [span] * num_t
    for t in in_order(range(num_t), not reverse):
        if output is not None:
            y = output[:, t].permute(1, 2, 0)
            span = reached(y, span)
            state[0][..., span] += y[..., span]
        spans[t] = span
        _, at_q, between = slopes.at(t)
        between = tuple(b.unsqueeze(-1) for b in between)
        of_span = step.gather(between, tuple(s[..., span] for s in state))
        here = states[:, :, :, t]
        here[..., : span.start] = 0
        here[..., span.stop :] = 0
        for i, part in enumerate(of_span):
            here[:, i, :, span] = part
        direct, rest = step.hand_on(between, of_span)
        m = transition(w.weight_hh, at_q, step.sources)
        h = torch.bmm(m, here[..., span].flatten(1, 2))
        for s, part in zip(state, (h if direct is None else h.add_(direct), *rest), strict=True):
            s[..., span] = part
    return FactoredCotangents(
        states, spans, slopes, step.sources, tuple(s.permute(2, 0, 1) for s in state), []
    )


def pull_to_input(network: Network, cotangents: Sequence[Cotangents], layer: int) -> Tensor:
    """Return what arrives at the input of a layer, ``[V, T, N, I]``, from its directions."""
    pairs = zip(cotangents, network.of_layer(layer), strict=True)
    first, *others = (own.to_input(network.weights[k].weight_ih) for own, (k, _) in pairs)
    return sum(others, start=first)


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
    """Apply the Jacobian. Tangents that are None are zero.

    Given are those of the input, ``[V, T, N, I]``, of the initial states, ``[V, L·D, N, P]`` and
    ``[V, L·D, N, H]``, and of a parameter. Returned are that of the output, ``[V, T, N, D·P]``, and
    for each k those of the final states, ``[V, N, P]`` and ``[V, N, H]``.
    """
    finals: list[list[Tensor | None]] = []
    for layer in network.layers:
        outputs: list[Tensor | None] = []
        for k, _ in network.of_layer(layer):
            first = [None if s is None else s[:, k] for s in start]
            own = moved if moved is not None and moved.k == k else None
            output, last = _push_direction(network, k, traces[k], x, first, own)
            outputs.append(output)
            finals.append(last)
        known = [y for y in outputs if y is not None]
        filled = [torch.zeros_like(known[0]) if y is None else y for y in outputs if known]
        x = torch.cat(filled, -1) if known else None
    return x, finals


def _push_direction(
    network: Network,
    k: int,
    values: Trace,
    x: Tensor | None,
    first: Sequence[Tensor | None],
    moved: Moved | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    step, w, reverse = network.step, network.weights[k], k % network.directions == 1
    tangents = [m for m in (x, *first, None if moved is None else moved.mat) if m is not None]
    if not tangents:
        return None, [None] * step.num_states
    num_v, (num_t, num_n, num_p) = tangents[0].shape[0], values.before.shape
    zero = values.before.new_zeros(())
    # what does not depend on the steps before: [V, T, N, *]
    p = q = zero.expand(num_v, num_t, num_n, len(w.weight_hh))
    projected = zero.expand(num_v, num_t, num_n, num_p)
    if x is not None:
        p = x @ w.weight_ih.T
    if moved is not None:
        read = read_by(moved.kind, values)
        from_moved = affine.jvp(moved.mat, read, num_t, num_n)  # T before N here
        if moved.kind == "weight_hr":
            projected = from_moved
        elif moved.kind.endswith("_ih"):
            p = p + from_moved
        else:
            q = from_moved
    state: State = tuple(
        zero.expand(num_v, num_n, size) if m is None else m
        for m, size in zip(first, network.state_sizes, strict=True)
    )
    outputs = []
    for t in in_order(range(num_t), reverse):
        q_t = q[:, t] + state[0] @ w.weight_hh.T
        h, *others = step.tangent(values.slopes.at(t), p[:, t], q_t, state)
        state = (h if w.weight_hr is None else h @ w.weight_hr.T + projected[:, t], *others)
        outputs.append(state[0])
    return torch.stack(in_order(outputs, reverse), 1), list(state)


def read_by(kind: str, values: Trace) -> Tensor | None:
    """Return what a parameter is multiplied with, ``[T, N, *]``; None for a bias."""
    return {"weight_ih": values.x, "weight_hh": values.before, "weight_hr": values.hidden}.get(kind)


def cotangents_at(kind: str, cotangents: Cotangents) -> Tensor:
    """Return what arrives where a parameter adds to, ``[V, T, N, *]``."""
    if kind == "weight_hr":
        assert isinstance(cotangents, GateCotangents) and cotangents.projected is not None
        return cotangents.projected
    return cotangents.p if kind.endswith("_ih") else cotangents.q

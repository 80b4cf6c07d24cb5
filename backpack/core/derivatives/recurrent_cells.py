"""One time step of a recurrent network, and its derivatives.

A step maps the input-side pre-activation ``p_t = W_ih x_t + b_ih``, the hidden-side one
``q_t = W_hh h_{t-1} + b_hh`` and the state before to the state after: h_t, for an LSTM also c_t.
Gates are stacked along the last axis in the order of ``torch.nn``.

Letters: H hidden features, P features of h (those of a projection, else H), G gates, σ the logistic
function, ⊙ the product of entries, ẋ a tangent of x, x̄ a cotangent (what arrives at x from later
steps and layers). States and gates are ``[N, H]``, pre-activations ``[N, G·H]``; tangents and
cotangents ``[V, N, H]`` and ``[V, N, G·H]``.

Tangents and cotangents multiply with the same slopes. Those depend on values alone, and the values
of a step on the states before it: once the states are known, as they are from the output, the gates
of all steps are a single matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

State = tuple[Tensor, ...]

# σ' and tanh' as functions of the value: grad · y (1 - y) and grad · (1 - y²)
through_sigmoid = torch.ops.aten.sigmoid_backward
through_tanh = torch.ops.aten.tanh_backward


class Weights(NamedTuple):
    """Parameters of one direction of a layer."""

    weight_ih: Tensor  # [G·H, I]
    weight_hh: Tensor  # [G·H, P]
    bias_ih: Tensor | None  # [G·H]
    bias_hh: Tensor | None  # [G·H]
    weight_hr: Tensor | None  # [P, H]

    def p(self, x: Tensor) -> Tensor:
        """Return the input-side pre-activation: ``[*, I] -> [*, G·H]``."""
        return linear(x, self.weight_ih, self.bias_ih)

    def q(self, h: Tensor) -> Tensor:
        """Return the hidden-side pre-activation: ``[*, P] -> [*, G·H]``."""
        return linear(h, self.weight_hh, self.bias_hh)


class Path(NamedTuple):
    """The time steps of one direction of a layer, in the order of time."""

    x: Tensor  # [T, N, I]
    before: Tensor  # h_{t-1}, [T, N, P]
    after: Tensor  # h_t, [T, N, P]
    start: State  # states before the first step, [N, P] and [N, H]
    reverse: bool  # whether the last is the first that is taken


class Slopes(NamedTuple):
    """Derivatives of the steps, or of one of them."""

    p: Tensor  # those of p, [T, N, G·H]
    q: Tensor  # those of q, [T, N, G·H] (the same tensor where they are equal)
    states: State  # those between the states, [T, N, H] each

    def at(self, t: int) -> Slopes:
        """Return those of a step."""
        p = self.p[t]
        q = p if self.q is self.p else self.q[t]
        return Slopes(p, q, tuple(s[t] for s in self.states))


def in_order(items: Any, reverse: bool) -> Any:
    """Bring items from the order of time to that of the steps, or back."""
    return items[::-1] if reverse else items


def shifted(after: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """Return the states before the steps, of those after them: ``[T, N, *]``."""
    first = start.unsqueeze(0)
    return torch.cat([after[1:], first] if reverse else [first, after[:-1]])


class Step:
    """The mathematics of one time step."""

    num_gates: ClassVar[int] = 1  # G
    num_states: ClassVar[int] = 1  # 1 for h, 2 for h and c
    sources: ClassVar[tuple[int, ...]] = (0,)  # for each gate the state whose cotangent arrives
    adds_sides: ClassVar[bool] = True  # it reads the sum of p and q alone: their slopes are equal
    # takes the step, from p, q and the state before to that after it (before a projection)
    advance: Callable[[Tensor, Tensor, State], State]
    # returns the slopes of all steps, and h_t before a projection, [T, N, H]
    slopes: Callable[[Weights, Path], tuple[Slopes, Tensor]]
    # applies the Jacobian of a step to tangents of p, q and the state
    tangent: Callable[[Slopes, Tensor, Tensor, State], State]

    def gather(self, slopes: Sequence[Tensor], state: State) -> State:
        """Let what arrives at the states after a step pass from one to the other.

        Gate k gets its slope times what is then at the state ``sources[k]``. The slopes are those
        of the step between the states.
        """
        return state

    def hand_on(self, slopes: Sequence[Tensor], state: State) -> tuple[Tensor | None, State]:
        """Return what arrives at the states before a step, at constant pre-activations.

        That is at h_{t-1} (None for zero), and at the other states, if at the states after the step
        is what :meth:`gather` has returned.
        """
        return None, ()


class ElmanStep(Step):
    """A plain recurrent step with activation φ.

    ========= =======================
    forward   h_t = φ(p_t + q_t)
    slope     a = φ'(p_t + q_t)
    tangent   ḣ_t = a ⊙ (ṗ_t + q̇_t)
    cotangent p̄_t = q̄_t = a ⊙ h̄_t
    ========= =======================
    """

    def __init__(self, phi: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]):
        self.phi = phi
        self.slope = slope

    def advance(self, p: Tensor, q: Tensor, state: State) -> State:
        return (self.phi(p + q),)

    def slopes(self, w: Weights, path: Path) -> tuple[Slopes, Tensor]:
        """Return a, and h_t."""
        a = self.slope(path.after)
        return Slopes(a, a, ()), path.after

    def tangent(self, slopes: Slopes, p: Tensor, q: Tensor, state: State) -> State:
        return (slopes.p * (p + q),)


ELMAN_STEPS: dict[str, Step] = {
    "tanh": ElmanStep(torch.tanh, lambda h: 1 - h.square()),
    "relu": ElmanStep(torch.relu, lambda h: (h > 0).to(h.dtype)),
}


class LSTMStep(Step):
    """A step of a long short-term memory. G = 4 gates in the order i, f, g, o.

    ========= ================================================================================
    forward   i = σ(p_i + q_i), f = σ(p_f + q_f), g = tanh(p_g + q_g), o = σ(p_o + q_o)

              c_t = f ⊙ c_{t-1} + i ⊙ g, h_t = o ⊙ tanh(c_t)
    slopes    a_i = ∂c_t/∂p_i = g i (1 - i), a_f = ∂c_t/∂p_f = c_{t-1} f (1 - f),
              a_g = ∂c_t/∂p_g = i (1 - g²), a_o = ∂h_t/∂p_o = tanh(c_t) o (1 - o)

              f = ∂c_t/∂c_{t-1}, b = ∂h_t/∂c_t = o (1 - tanh²(c_t))
    tangent   ċ_t = f ⊙ ċ_{t-1} + sum over k in i, f, g of a_k ⊙ (ṗ_k + q̇_k)

              ḣ_t = b ⊙ ċ_t + a_o ⊙ (ṗ_o + q̇_o)
    cotangent c̄_t += b ⊙ h̄_t

              p̄_k = q̄_k = a_k ⊙ c̄_t for k in i, f, g; p̄_o = q̄_o = a_o ⊙ h̄_t;
              c̄_{t-1} = f ⊙ c̄_t
    ========= ================================================================================

    The projection of a ``proj_size`` is not part of the step.
    """

    num_gates = 4
    num_states = 2
    sources = (1, 1, 1, 0)

    def advance(self, p: Tensor, q: Tensor, state: State) -> State:
        z_i, z_f, z_g, z_o = (p + q).chunk(4, -1)
        c = z_f.sigmoid() * state[1] + z_i.sigmoid() * z_g.tanh()
        return z_o.sigmoid() * c.tanh(), c

    def slopes(self, w: Weights, path: Path) -> tuple[Slopes, Tensor]:
        """Return a (four gates), f, b, and h_t."""
        z_i, z_f, z_g, z_o = (w.p(path.x) + w.q(path.before)).chunk(4, -1)
        i, f, g, o = z_i.sigmoid(), z_f.sigmoid(), z_g.tanh(), z_o.sigmoid()
        c = [path.start[1]]
        steps = list(zip((i * g).unbind(), f.unbind(), strict=True))
        for added, kept in in_order(steps, path.reverse):
            c.append(torch.addcmul(added, kept, c[-1]))
        states = torch.stack(in_order(c, path.reverse))
        before, after = in_order((states[:-1], states[1:]), path.reverse)
        tanh_c = after.tanh()
        a_i, a_f = through_sigmoid(g, i), through_sigmoid(before, f)
        a_g, a_o = through_tanh(i, g), through_sigmoid(tanh_c, o)
        a = torch.cat([a_i, a_f, a_g, a_o], -1)
        return Slopes(a, a, (f, through_tanh(o, tanh_c))), o * tanh_c

    def tangent(self, slopes: Slopes, p: Tensor, q: Tensor, state: State) -> State:
        a, _, (f, b) = slopes
        d_i, d_f, d_g, d_o = (a * (p + q)).chunk(4, -1)
        c = f * state[1] + d_i + d_f + d_g
        return b * c + d_o, c

    def gather(self, slopes: Sequence[Tensor], state: State) -> State:
        """Add what arrives at h_t to c_t."""
        (_, b), (h, c) = slopes, state
        return h, torch.addcmul(c, b, h)

    def hand_on(self, slopes: Sequence[Tensor], state: State) -> tuple[Tensor | None, State]:
        """Return what arrives at c_{t-1}."""
        (f, _), (_, c) = slopes, state
        return None, (f * c,)


class GRUStep(Step):
    """A step of a gated recurrent unit. G = 3 gates in the order r, z, n.

    ========= ==================================================================================
    forward   r = σ(p_r + q_r), z = σ(p_z + q_z), n = tanh(p_n + r ⊙ q_n)

              h_t = (1 - z) ⊙ n + z ⊙ h_{t-1}
    slopes    a = ∂h_t/∂p: a_n = (1 - z) (1 - n²), a_r = a_n q_n r (1 - r),
              a_z = (h_{t-1} - n) z (1 - z)

              b = ∂h_t/∂q: b_r = a_r, b_z = a_z, b_n = r a_n; z = ∂h_t/∂h_{t-1} at constant q_t
    tangent   ḣ_t = z ⊙ ḣ_{t-1} + sum over k in r, z, n of a_k ⊙ ṗ_k + b_k ⊙ q̇_k
    cotangent p̄_k = a_k ⊙ h̄_t, q̄_k = b_k ⊙ h̄_t; h̄_{t-1} = z ⊙ h̄_t
    ========= ==================================================================================
    """

    num_gates = 3
    sources = (0, 0, 0)
    adds_sides = False

    def advance(self, p: Tensor, q: Tensor, state: State) -> State:
        (p_r, p_z, p_n), (q_r, q_z, q_n) = p.chunk(3, -1), q.chunk(3, -1)
        r, z = (p_r + q_r).sigmoid(), (p_z + q_z).sigmoid()
        n = (p_n + r * q_n).tanh()
        return (n + z * (state[0] - n),)

    def slopes(self, w: Weights, path: Path) -> tuple[Slopes, Tensor]:
        """Return a and b (three gates each), z, and h_t."""
        p_r, p_z, p_n = w.p(path.x).chunk(3, -1)
        q_r, q_z, q_n = w.q(path.before).chunk(3, -1)
        r, z = (p_r + q_r).sigmoid(), (p_z + q_z).sigmoid()
        n = torch.addcmul(p_n, r, q_n).tanh()
        a_n = through_tanh(1 - z, n)
        a_r = through_sigmoid(a_n * q_n, r)
        a_z = through_sigmoid(path.before - n, z)
        a, b = torch.cat([a_r, a_z, a_n], -1), torch.cat([a_r, a_z, r * a_n], -1)
        return Slopes(a, b, (z,)), path.after

    def tangent(self, slopes: Slopes, p: Tensor, q: Tensor, state: State) -> State:
        a, b, (z,) = slopes
        d_r, d_z, d_n = (a * p + b * q).chunk(3, -1)
        return (z * state[0] + d_r + d_z + d_n,)

    def hand_on(self, slopes: Sequence[Tensor], state: State) -> tuple[Tensor | None, State]:
        """Return what arrives at h_{t-1} directly."""
        (z,), (h,) = slopes, state
        return z * h, ()

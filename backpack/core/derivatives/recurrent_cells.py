"""One time step of a recurrent network, and its derivatives.

A step maps the input-side pre-activation ``p_t = W_ih x_t + b_ih``, the hidden-side one
``q_t = W_hh h_{t-1} + b_hh`` and the state before to the state after: h_t, for an LSTM also c_t.
Gates are stacked along the last axis in the order of ``torch.nn``.

Letters: H hidden features, G gates, σ the logistic function, ⊙ the product of entries, ẋ a tangent
of x, x̄ a cotangent (what arrives at x from later steps and layers). States and gates are
``[N, H]``, pre-activations ``[N, G·H]``; tangents and cotangents ``[V, N, H]`` and
``[V, N, G·H]``.

Tangents and cotangents multiply with the same slopes. Those depend on values alone and are
computed for all time steps at once: ``[T, N, H]`` and ``[T, N, G·H]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

State = tuple[Tensor, ...]


class Step:
    """The mathematics of one time step.

    Attributes:
        num_gates: G.
        num_states: 1 for h, 2 for h and c.
    """

    num_gates: ClassVar[int] = 1
    num_states: ClassVar[int] = 1

    def advance(self, p: Tensor, q: Tensor, state: State) -> tuple[State, State]:
        """Take the step.

        Args:
            p: Input-side pre-activation, ``[N, G·H]``.
            q: Hidden-side pre-activation, ``[N, G·H]``.
            state: State before, ``[N, H]`` each.

        Returns:
            The state after, and the values that :meth:`slopes` needs, ``[N, H]`` each.
        """
        raise NotImplementedError

    def slopes(self, values: Sequence[Tensor], before: Sequence[Tensor]) -> State:
        """Return the slopes of all steps.

        Args:
            values: Those that :meth:`advance` returned, ``[T, N, H]`` each.
            before: States before the steps, ``[T, N, H]`` each.
        """
        raise NotImplementedError

    def tangent(self, slopes: State, p: Tensor, q: Tensor, state: State) -> State:
        """Apply the Jacobian of a step.

        Args:
            slopes: Those of the step.
            p: Tangent of the input-side pre-activation, ``[V, N, G·H]``.
            q: Tangent of the hidden-side pre-activation, ``[V, N, G·H]``.
            state: Tangents of the state before, ``[V, N, H]`` each.

        Returns:
            Tangents of the state after.
        """
        raise NotImplementedError

    def cotangent(self, slopes: State, state: State) -> tuple[Tensor, Tensor, Tensor | None, State]:
        """Apply the transposed Jacobian of a step.

        Args:
            slopes: Those of the step.
            state: Cotangents of the state after, ``[V, N, H]`` each.

        Returns:
            Cotangents of p, of q (the same tensor where they are equal), of h_{t-1} at constant q
            (None for zero), and of the other states before.
        """
        raise NotImplementedError


class ElmanStep(Step):
    """A plain recurrent step with activation φ.

    ========= =======================
    forward   h_t = φ(p_t + q_t)
    slope     a = φ'(p_t + q_t)
    tangent   ḣ_t = a ⊙ (ṗ_t + q̇_t)
    cotangent p̄_t = q̄_t = a ⊙ h̄_t
    ========= =======================
    """

    def tangent(self, slopes: State, p: Tensor, q: Tensor, state: State) -> State:
        """Apply the Jacobian of a step."""
        (a,) = slopes
        return (a * (p + q),)

    def cotangent(self, slopes: State, state: State) -> tuple[Tensor, Tensor, Tensor | None, State]:
        """Apply the transposed Jacobian of a step."""
        (a,), (h,) = slopes, state
        delta = a * h
        return delta, delta, None, ()


class TanhStep(ElmanStep):
    """φ = tanh, ``a = 1 - h_t²``."""

    def advance(self, p: Tensor, q: Tensor, state: State) -> tuple[State, State]:
        """Take the step."""
        h = torch.tanh(p + q)
        return (h,), (h,)

    def slopes(self, values: Sequence[Tensor], before: Sequence[Tensor]) -> State:
        """Return a."""
        (h,) = values
        return (1 - h.square(),)


class ReLUStep(ElmanStep):
    """φ = max(0, ·), ``a = 1 if h_t > 0 else 0``."""

    def advance(self, p: Tensor, q: Tensor, state: State) -> tuple[State, State]:
        """Take the step."""
        h = torch.relu(p + q)
        return (h,), (h,)

    def slopes(self, values: Sequence[Tensor], before: Sequence[Tensor]) -> State:
        """Return a."""
        (h,) = values
        return ((h > 0).to(h.dtype),)


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

    def advance(self, p: Tensor, q: Tensor, state: State) -> tuple[State, State]:
        """Take the step; the values are i, f, g, o, tanh(c_t)."""
        z_i, z_f, z_g, z_o = (p + q).chunk(4, -1)
        i, f, g, o = z_i.sigmoid(), z_f.sigmoid(), z_g.tanh(), z_o.sigmoid()
        c = f * state[1] + i * g
        tanh_c = c.tanh()
        return (o * tanh_c, c), (i, f, g, o, tanh_c)

    def slopes(self, values: Sequence[Tensor], before: Sequence[Tensor]) -> State:
        """Return a (four gates), f, b."""
        i, f, g, o, tanh_c = values
        a_i = g * i * (1 - i)
        a_f = before[1] * f * (1 - f)
        a_g = i * (1 - g.square())
        a_o = tanh_c * o * (1 - o)
        return torch.cat([a_i, a_f, a_g, a_o], -1), f, o * (1 - tanh_c.square())

    def tangent(self, slopes: State, p: Tensor, q: Tensor, state: State) -> State:
        """Apply the Jacobian of a step."""
        a, f, b = slopes
        d_i, d_f, d_g, d_o = (a * (p + q)).chunk(4, -1)
        c = f * state[1] + d_i + d_f + d_g
        return b * c + d_o, c

    def cotangent(self, slopes: State, state: State) -> tuple[Tensor, Tensor, Tensor | None, State]:
        """Apply the transposed Jacobian of a step."""
        a, f, b = slopes
        h, c = state
        c = torch.addcmul(c, b, h)
        delta = torch.cat([c, c, c, h], -1) * a
        return delta, delta, None, (f * c,)


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

    def advance(self, p: Tensor, q: Tensor, state: State) -> tuple[State, State]:
        """Take the step; the values are r, z, n, q_n."""
        (p_r, p_z, p_n), (q_r, q_z, q_n) = p.chunk(3, -1), q.chunk(3, -1)
        r, z = (p_r + q_r).sigmoid(), (p_z + q_z).sigmoid()
        n = (p_n + r * q_n).tanh()
        return (n + z * (state[0] - n),), (r, z, n, q_n)

    def slopes(self, values: Sequence[Tensor], before: Sequence[Tensor]) -> State:
        """Return a and b (three gates each), z."""
        r, z, n, q_n = values
        a_n = (1 - z) * (1 - n.square())
        a_r = a_n * q_n * r * (1 - r)
        a_z = (before[0] - n) * z * (1 - z)
        return torch.cat([a_r, a_z, a_n], -1), torch.cat([a_r, a_z, r * a_n], -1), z

    def tangent(self, slopes: State, p: Tensor, q: Tensor, state: State) -> State:
        """Apply the Jacobian of a step."""
        a, b, z = slopes
        d_r, d_z, d_n = (a * p + b * q).chunk(3, -1)
        return (z * state[0] + d_r + d_z + d_n,)

    def cotangent(self, slopes: State, state: State) -> tuple[Tensor, Tensor, Tensor | None, State]:
        """Apply the transposed Jacobian of a step."""
        (a, b, z), (h,) = slopes, state
        for_each_gate = torch.cat([h, h, h], -1)
        return for_each_gate * a, for_each_gate * b, z * h, ()

"""How much privacy the steps of :class:`backpack.optim.DPSGD` spend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from math import inf, log, log1p
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Phase = tuple[float, float, float]  # noise multiplier, sampling rate, number of steps
ORDERS = (*range(2, 64), *range(64, 513, 16))


@cache
def _log_binomials(order: int) -> Tensor:
    """Return the logarithms of (α over k) for all k, ``[α + 1]``."""
    number, logs = 1, [0.0]
    for k in range(order):
        number = number * (order - k) // (k + 1)  # (α over k + 1), without rounding
        logs.append(log(number))
    # whatever the default device is: it may be another one later, or have no double precision
    return torch.tensor(logs, dtype=torch.float64, device="cpu")


def renyi_divergence(order: int, noise_multiplier: float, sampling_rate: float = 1.0) -> float:
    """Bound the Rényi divergence of one step of DP-SGD from that without one of the samples.

    ``1/(α-1) log sum_k (α over k) (1-q)^(α-k) q^k exp((k² - k) / (2 σ²))``, which is ``α / (2 σ²)``
    if every batch has all samples (q = 1). Source: Mironov, Talwar, Zhang, Rényi differential
    privacy of the sampled Gaussian mechanism (2019), section 3.3.

    Args:
        order: Order α of the divergence, an integer of at least 2.
        noise_multiplier: σ, standard deviation of the noise in units of the largest gradient norm.
        sampling_rate: Probability q of each sample to be in a batch, independently of the others.

    Returns:
        The divergence, in nats. Infinity without noise.

    Raises:
        ValueError: If an argument is out of range.
    """
    if order != int(order) or order < 2:
        raise ValueError(f"order has to be an integer of at least 2, got {order}.")
    if not noise_multiplier >= 0 or not 0 <= sampling_rate <= 1:
        raise ValueError(
            "noise_multiplier has to be at least 0 and sampling_rate from 0 to 1, got "
            f"{noise_multiplier} and {sampling_rate}."
        )
    if sampling_rate == 0:
        return 0.0
    variance = noise_multiplier * noise_multiplier  # infinity, where a power would be an error
    if variance == 0:
        return inf
    if sampling_rate == 1:
        return order / (2 * variance)
    k = torch.arange(order + 1, dtype=torch.float64, device="cpu")
    logs = (
        _log_binomials(int(order))
        + (order - k) * log1p(-sampling_rate)
        + k * log(sampling_rate)
        + (k * k - k) / (2 * variance)
    )
    return logs.logsumexp(0).item() / (order - 1)


def privacy_spent(
    steps: int,
    noise_multiplier: float,
    sampling_rate: float,
    delta: float,
    orders: Iterable[int] = ORDERS,
) -> float:
    """Return ε such that steps of DP-SGD are (ε, δ)-differentially private.

    An upper bound on the smallest such ε: the divergences of the steps add up, each of the orders
    gives a bound, and the best is taken. Neighbours are data sets of which one has a sample more
    than the other. Sources: Mironov, Rényi differential privacy (CSF 2017); for the conversion,
    Canonne, Kamath, Steinke, The discrete Gaussian for differential privacy (NeurIPS 2020),
    proposition 12.

    Args:
        steps: Number of steps.
        noise_multiplier: σ, standard deviation of the noise in units of the largest gradient norm.
        sampling_rate: Probability of each sample to be in a batch, independently of the others:
            the expected batch size divided by the number of samples.
        delta: Probability δ that the guarantee does not hold; less than 1 / (number of samples).
        orders: Orders of the divergence to try, integers of at least 2.

    Returns:
        ε. Infinity without noise.

    Raises:
        ValueError: If an argument is out of range.
    """
    if isinstance(steps, Iterable) and not isinstance(steps, Tensor):
        raise ValueError(
            f"steps is one number, got {steps!r}. For phases of different noise, use "
            "PrivacyAccountant, which adds up what each of them spends."
        )
    return _spent([(noise_multiplier, sampling_rate, steps)], delta, orders)


def _spent(phases: Iterable[Phase], delta: float, orders: Iterable[int]) -> float:
    """Return ε of phases; see :func:`privacy_spent`."""
    taken = [(noise, rate, steps) for noise, rate, steps in phases if steps != 0]
    if not all(steps >= 0 for _, _, steps in taken) or not 0 < delta < 1:
        steps = sum(steps for _, _, steps in taken)
        raise ValueError(
            f"steps has to be at least 0 and delta between 0 and 1, got {steps} and {delta}."
        )
    if not taken:
        return 0.0
    tried = tuple(orders)
    if not tried:
        raise ValueError("orders has to have at least one integer of at least 2, got none.")
    epsilons = [
        sum(steps * renyi_divergence(order, noise, rate) for noise, rate, steps in taken)
        + log1p(-1 / order)
        - log(delta * order) / (order - 1)
        for order in tried
    ]
    return max(0.0, min(epsilons))


def noise_multiplier_for(
    epsilon: float,
    steps: int,
    sampling_rate: float,
    delta: float,
    orders: Iterable[int] = ORDERS,
) -> float:
    """Return the noise with which steps of DP-SGD are (ε, δ)-differentially private.

    The inverse of :func:`privacy_spent`, by bisection: more noise spends less. What is returned
    never spends more than ε there, and is at most 0.01 % above the least noise of which that holds.
    As ε is an upper bound, less noise might do.

    Args:
        epsilon: ε that may be spent.
        steps: Number of steps.
        sampling_rate: Probability of each sample to be in a batch, see :func:`privacy_spent`.
        delta: Probability δ that the guarantee does not hold; less than 1 / (number of samples).
        orders: Orders of the divergence to try, integers of at least 2.

    Returns:
        σ, standard deviation of the noise in units of the largest gradient norm. Zero if nothing
        is spent without noise (no steps).

    Raises:
        ValueError: If an argument is out of range, or no noise is enough for the orders.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon has to be larger than 0, got {epsilon}.")
    tried = tuple(orders)

    def spent(noise_multiplier: float) -> float:
        return privacy_spent(steps, noise_multiplier, sampling_rate, delta, tried)

    if spent(0.0) <= epsilon:
        return 0.0
    least = spent(inf)
    if least >= epsilon:
        raise ValueError(
            f"epsilon={epsilon} cannot be reached with delta={delta}: with any noise, orders up to "
            f"{max(tried)} show {least:.3g} at best. Try larger ones, such as "
            f"orders=range(2, {4 * max(tried)}, 32), or a larger epsilon or delta."
        )
    high = 1.0
    while spent(high) > epsilon:
        high *= 2
    while spent(high / 2) <= epsilon:
        high /= 2
    low = high / 2
    while high - low > 1e-4 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high


class PrivacyAccountant:
    """Adds up what the steps of private training spend, whatever their noise and sampling rate.

    Divergences of all steps add up, in any order, as for :func:`privacy_spent`, which is the same
    for steps that are all alike. Noise and sampling rates have to be chosen without a look at the
    data. A program that goes on later loads the ``state_dict``.

    >>> from backpack.optim import PrivacyAccountant
    >>> accountant = PrivacyAccountant()
    >>> accountant.record(noise_multiplier=1.0, sampling_rate=0.1, steps=30)
    >>> accountant.record(noise_multiplier=2.0, sampling_rate=0.05, steps=100)
    >>> print(f"{accountant.spent(delta=1e-4):.2f}")
    4.23
    """

    def __init__(self, orders: Iterable[int] = ORDERS):
        """Nothing is spent.

        Args:
            orders: Orders of the divergence to try, integers of at least 2.
        """
        self.orders = tuple(orders)
        self._phases: dict[tuple[float, float], float] = {}

    @property
    def steps(self) -> float:
        """How many steps were recorded."""
        return sum(self._phases.values())

    def record(self, noise_multiplier: float, sampling_rate: float, steps: float = 1) -> None:
        """Add steps.

        Args:
            noise_multiplier: σ, standard deviation of the noise in units of the largest gradient
                norm.
            sampling_rate: Probability of each sample to be in a batch, independently of the others.
            steps: How many.

        Raises:
            ValueError: If an argument is out of range.
        """
        renyi_divergence(2, noise_multiplier, sampling_rate)  # refuses what is out of range
        if not steps >= 0:
            raise ValueError(f"steps has to be at least 0, got {steps}.")
        phase = float(noise_multiplier), float(sampling_rate)
        self._phases[phase] = self._phases.get(phase, 0) + steps

    def watch(self, optimizer: Optimizer, sampling_rate: float) -> RemovableHandle:
        """Record each step that an optimiser takes from now on, with the noise that it has then.

        Args:
            optimizer: A :class:`DPSGD` or :class:`DPOptimizer`.
            sampling_rate: Probability of each sample to be in a batch, such as that of
                :class:`PoissonBatches`.

        Returns:
            A handle; ``remove()`` ends it.

        Raises:
            TypeError: If the optimiser is another one.
            ValueError: If the sampling rate is out of range.
        """
        if not hasattr(optimizer, "noise_multiplier"):
            raise TypeError(
                f"Steps of {type(optimizer).__name__} are not private: watch DPSGD, or the "
                "DPOptimizer around it."
            )
        renyi_divergence(2, optimizer.noise_multiplier, sampling_rate)

        def note(taken: Any, *_: Any) -> None:
            self.record(taken.noise_multiplier, sampling_rate)

        return optimizer.register_step_post_hook(note)

    def spent(self, delta: float) -> float:
        """Return ε such that all steps up to now are (ε, δ)-differentially private.

        Args:
            delta: Probability δ that the guarantee does not hold; less than 1 / (number of
                samples).

        Returns:
            ε, an upper bound. Infinity if a step was without noise.

        Raises:
            ValueError: If δ is out of range.
        """
        return _spent(
            [(*phase, steps) for phase, steps in self._phases.items()], delta, self.orders
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the steps, as ``{"phases": [[σ, sampling rate, steps], ...]}``."""
        return {"phases": [[*phase, steps] for phase, steps in self._phases.items()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned, in the place of what was recorded here.

        Args:
            state_dict: The steps.

        Raises:
            ValueError: If a number is out of range.
        """
        before, self._phases = self._phases, {}
        try:
            for phase in state_dict["phases"]:
                self.record(*phase)
        except (KeyError, TypeError, ValueError):
            self._phases = before
            raise

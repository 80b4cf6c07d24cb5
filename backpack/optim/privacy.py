"""How much privacy the steps of :class:`backpack.optim.DPSGD` spend."""

from __future__ import annotations

from collections.abc import Iterable
from math import comb, inf, log, log1p

import torch


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
    if noise_multiplier == 0:
        return inf
    if sampling_rate == 1:
        return order / (2 * noise_multiplier**2)
    logs = [
        log(comb(order, k))
        + (order - k) * log1p(-sampling_rate)
        + k * log(sampling_rate)
        + (k * k - k) / (2 * noise_multiplier**2)
        for k in range(order + 1)
    ]
    return torch.tensor(logs, dtype=torch.float64).logsumexp(0).item() / (order - 1)


def privacy_spent(
    steps: int,
    noise_multiplier: float,
    sampling_rate: float,
    delta: float,
    orders: Iterable[int] = (*range(2, 64), *range(64, 513, 16)),
) -> float:
    """Return ε such that steps of DP-SGD are (ε, δ)-differentially private.

    The divergences of the steps add up; the best of the orders is taken. Neighbours are data sets
    of which one has a sample more than the other. Sources: Mironov, Rényi differential privacy (CSF
    2017); for the conversion, Canonne, Kamath, Steinke, The discrete Gaussian for differential
    privacy (NeurIPS 2020), proposition 12.

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
    if steps < 0 or not 0 < delta < 1:
        raise ValueError(
            f"steps has to be at least 0 and delta between 0 and 1, got {steps} and {delta}."
        )
    if steps == 0:
        return 0.0
    epsilons = [
        steps * renyi_divergence(order, noise_multiplier, sampling_rate)
        + log1p(-1 / order)
        - log(delta * order) / (order - 1)
        for order in orders
    ]
    return max(0.0, min(epsilons))

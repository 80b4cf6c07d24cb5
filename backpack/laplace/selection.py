"""Precision of the prior and noise, chosen by the marginal likelihood."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, pi
from typing import Literal

import torch
from torch import Tensor

from backpack.laplace.predictive import Predictive
from backpack.utils.by_name import ByName, by_parameter, positive, tensor_by_parameter


class Laplace(Predictive):
    """A Laplace approximation of the posterior, with Kronecker, diagonal or other curvature.

    Source: MacKay, A practical Bayesian framework for backpropagation networks (Neural Computation
    1992); Daxberger et al., Laplace redux (NeurIPS 2021).

    Attributes:
        mean: The weights θ*, a vector. ``[P]``
        posterior: The covariance, ``(H / T + δ I)⁻¹``. ``[P, P]``
    """

    def log_marginal_likelihood(self, prior_precision: ByName | None = None) -> Tensor:
        """Return the log of the probability of the data, for any δ (default: the one that is set).

        ``log p(D) ≈ 1/T log p(D | θ*) + log p(θ*) + P/2 log 2π - 1/2 log det(H / T + δ I)``, a
        scalar, with the prior ``p(θ) = N(μ, δ⁻¹ I)``: a function of the tensors that are given,
        which autograd differentiates. P is the number of weights that are uncertain; others are
        constants.
        """
        value = self.prior_precision if prior_precision is None else prior_precision
        each = tensor_by_parameter(value, self._names, "prior precision", self.mean)
        delta = self._by_weight(each)
        constant = log(2 * pi) / 2 + log(self._noise) if self._is_normal else 0.0
        likelihood = (-self.loss - self._num_targets * constant) / self._temperature
        prior = delta.log().sum() - (delta * self._offset.square()).sum()
        return likelihood + (prior - self._damped(delta).logdet()) / 2

    def fit_prior_precision(
        self,
        lowest: float = 1e-4,
        highest: float = 1e4,
        per: Literal["model", "layer", "parameter"] = "model",
    ) -> float | dict[str, float]:
        """Set δ to the maximum of the marginal likelihood between two limits, and return it.

        Args:
            lowest: The smallest value.
            highest: The largest value.
            per: Fit one for the model, one for each layer, or one for each parameter: the
                likelihood is a sum over these.

        Returns:
            δ; by the names of the parameters, unless it is one for the model.

        Raises:
            ValueError: If the curvature has no block for each parameter, is not positive definite
                with the smallest value, or there is no such kind.
        """
        if per not in ("model", "layer", "parameter"):
            raise ValueError(f"per is 'model', 'layer' or 'parameter', got {per!r}.")
        layers = [n.rpartition(".")[0] for n in self._names]
        of = {"model": [""] * len(layers), "layer": layers, "parameter": self._names}[per]
        same = {name: torch.tensor([name == other for other in of]) for name in of}
        before = by_parameter(self.prior_precision, self._names, "prior precision")
        found = dict(zip(of, before, strict=True))  # stays where no weight is uncertain
        for name, own in same.items():
            mask = self._uncertain & (self._by_weight(own.to(self.mean.device)) > 0)
            if mask.any():
                found[name] = self._fitted(mask, lowest, highest)
        self.prior_precision = found[""] if per == "model" else [found[name] for name in of]
        return self.prior_precision

    def _fitted(self, weights: Tensor, lowest: float, highest: float) -> float:
        """Return the best precision of some weights, a mask ``[P]``."""
        data_term = self._data_term
        spectrum = data_term.spectrum[data_term.by_eigenvector(weights, "group")].double()
        squares = float(self._offset[weights].double().square().sum())
        self._need_positive(spectrum + lowest, lowest)  # else the likelihood has no bound

        def evidence(x: float) -> float:
            return len(spectrum) * x - exp(x) * squares - float((spectrum + exp(x)).log().sum())

        return exp(_maximum(evidence, log(lowest), log(highest)))

    def fit_noise(self, lowest: float = 1e-4, highest: float = 1e4) -> float:
        """Set the noise to the maximum of the marginal likelihood between two limits, return it.

        For the prior precision that is set: fit both in turns.

        Args:
            lowest: The smallest value.
            highest: The largest value.

        Returns:
            The standard deviation of the targets of ``MSELoss``.

        Raises:
            ValueError: If the loss is another, or with the largest precision of the targets, there
                is no normal distribution.
        """
        self._check_has_noise()
        positive(lowest, "smallest noise")
        spectrum = self._given.spectrum.double() / self._temperature
        each = by_parameter(self.prior_precision, self._names, "prior precision")
        by_weight = self._by_weight(self.mean.new_tensor(each))
        delta = self._given.by_eigenvector(by_weight).double()
        self._need_positive(spectrum / (2 * lowest**2) + delta, self.prior_precision)

        def evidence(x: float) -> float:  # times two; x is the logarithm of the noise
            precision = exp(-2 * x)
            fit = -2 * self._num_targets * x - precision * self._summed
            return fit / self._temperature - float((spectrum * precision / 2 + delta).log().sum())

        self.noise = exp(_maximum(evidence, log(lowest), log(highest)))
        return self.noise


def _maximum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function is largest between two limits, next to the best of a grid."""
    while high - low > 1e-7:
        grid = torch.linspace(low, high, 41, dtype=torch.float64).tolist()
        best = max(range(41), key=lambda i: function(grid[i]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 40)]
    return (low + high) / 2

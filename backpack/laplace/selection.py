"""Precision of the prior and noise, chosen by the marginal likelihood or on other data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import exp, inf, log, pi
from typing import Any, Literal

import torch
from torch import Tensor

from backpack.core.values import at_least_single
from backpack.laplace.predictive import Predictive
from backpack.linalg.objective import Objective, output_of, without_graph
from backpack.utils.by_name import ByName, by_parameter, positive, tensor_by_parameter


class Laplace(Predictive):
    """A Laplace approximation of the posterior, with Kronecker, diagonal or other curvature.

    Source: MacKay, A practical Bayesian framework for backpropagation networks (Neural Computation
    1992); Daxberger et al., Laplace redux (NeurIPS 2021).

    Attributes:
        mean: The weights θ*, a vector. ``[P]``
        posterior: The covariance, ``(H / T + δ I)⁻¹``. ``[P, P]``
        process_group: Over which processes data is spread. It is not saved: set it after loading
            what is pickled.
    """

    def log_marginal_likelihood(self, prior_precision: ByName | None = None) -> Tensor:
        """Return the log of the probability of the data, for any δ (default: the one that is set).

        ``log p(D) ≈ 1/T log p(D | θ*) + log p(θ*) + P/2 log 2π - 1/2 log det(H / T + δ I)``, a
        scalar, with the prior ``p(θ) = N(μ, δ⁻¹ I)``: a function of the tensors that are given,
        which autograd differentiates. P is the number of weights that are uncertain; others are
        constants.
        """
        value = self.prior_precision if prior_precision is None else prior_precision
        like = at_least_single(self.mean[:1])  # of sums over all weights
        delta = self._by_weight(tensor_by_parameter(value, self._names, "prior precision", like))
        constant = log(2 * pi) / 2 + log(self._noise) if self._is_normal else 0.0
        likelihood = (-self.loss - self._num_targets * constant) / self._temperature
        prior = delta.log().sum() - (delta * at_least_single(self._offset).square()).sum()
        return likelihood + (prior - self._damped(delta).logdet()) / 2

    def fit_prior_precision(
        self,
        lowest: float = 1e-4,
        highest: float = 1e4,
        per: Literal["model", "layer", "parameter"] = "model",
        validation: Iterable[Any] | None = None,
        method: Literal["probit", "bridge"] = "probit",
        num_values: int = 41,
    ) -> float | dict[str, float]:
        """Set δ to the maximum of the marginal likelihood between two limits, and return it.

        With other data, to the value of a grid for which the negative log likelihood of what is
        predicted for these is least.

        Args:
            lowest: The smallest value.
            highest: The largest value.
            per: Fit one for the model, one for each layer, or one for each parameter: the
                likelihood is a sum over these.
            validation: Batches ``(X, y)`` that were not trained on, read once. Their part of each
                process, if there is a ``process_group``. With these, δ is one for the model.
            method: What predicts them, see :meth:`predict`: those in closed form, whose loss draws
                do not blur. Of ``MSELoss``, each target is normal, with the variance of its output
                plus ``noise²``.
            num_values: Size of the grid, whose logarithms are equally spaced, limits included.

        Returns:
            δ; by the names of the parameters, unless it is one for the model.

        Raises:
            ValueError: If no number is between the limits, the curvature has no block for each
                parameter, is not positive definite with the smallest value, or there is no such
                kind; with other data if they have no finite likelihood, for another loss than those
                of :meth:`predict`, for the bridge of two classes, and as for :meth:`outputs`.
        """
        _check_limits(lowest, highest, "prior precision")
        if per not in ("model", "layer", "parameter"):
            raise ValueError(f"per is 'model', 'layer' or 'parameter', got {per!r}.")
        if validation is not None:
            if per != "model":
                raise ValueError(
                    f"With validation data, δ is one for the model, got per={per!r}: a grid of "
                    "several would have too many points. Leave validation out, and the marginal "
                    "likelihood fits them, or set prior_precision to a few dictionaries, one "
                    "after the other, and compare the loss of what predict() returns."
                )
            if num_values < 2:
                raise ValueError(f"num_values is at least 2, the limits, got {num_values}.")
            grid = torch.linspace(log(lowest), log(highest), num_values, dtype=torch.float64)
            values = grid.exp().tolist()
            losses = self._validation_losses(validation, values, method)
            self.prior_precision = values[int(losses.argmin())]
            return self.prior_precision
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

    def _validation_losses(self, data: Iterable[Any], values: list[float], method: str) -> Tensor:
        """Return the summed negative log likelihood of data, predicted with each δ."""
        if method not in ("probit", "bridge"):
            raise ValueError(
                f"With validation data, method is 'probit' or 'bridge', got {method!r}."
            )
        self._link()  # an error if there are no predictions
        posteriors = [self._posterior_of(value) for value in values]
        own = self._objective
        choice = own.progress, self.process_group
        objective = Objective(own.model, own.loss_function, data, own.params, *choice)
        totals = torch.zeros(len(values), dtype=torch.float64, device=self.mean.device)
        weights = 0.0
        with torch.no_grad(), objective.telling():
            for X, targets in objective:
                output = without_graph(partial(output_of, "Laplace", own.model, X))
                if weight := objective.weight(X, output, targets):
                    mean, variances = self._variances(X, posteriors, method)
                    given = output, targets, method
                    each = [self._loss_of(mean, one, *given) for one in variances.unbind(2)]
                    factor = 1.0 if self._is_normal else weight
                    totals += factor * torch.stack(each).to(totals)
                    weights += weight
        totals, weights = objective.total("validation of Laplace", [totals], weights)
        objective.norm(weights)  # an error if no target counts
        if not totals.isfinite().all():
            raise ValueError(
                "The negative log likelihood of the validation data is not finite, for "
                f"{int((~totals.isfinite()).sum())} of {len(values)} prior precisions."
            )
        return totals

    def _loss_of(
        self, mean: Tensor, variances: Tensor, output: Tensor, targets: Any, method: str
    ) -> Tensor:
        """Return the loss of a prediction, from mean and variances of the outputs of a batch."""
        logits = self._closed_form(mean, variances, method).reshape(output.shape)
        if method == "bridge" and mean.shape[1] == 2:
            raise ValueError(
                "What the Laplace bridge predicts for two classes does not depend on the prior "
                "precision, so that validation data cannot choose it. Use method='probit'."
            )
        if not self._is_normal:
            return self._objective.loss_function(logits, *targets)
        if targets[0].shape != output.shape:
            raise ValueError(
                f"The targets of MSELoss have shape {list(targets[0].shape)}, but the outputs "
                f"{list(output.shape)}: give both the same."
            )
        variance = variances.reshape(output.shape) + self._noise**2
        squares = (logits - targets[0]).square() / variance
        return (squares + (2 * pi * variance).log()).sum() / 2

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
            ValueError: If the loss is another, no number is between the limits, or with the largest
                precision of the targets, there is no normal distribution.
        """
        self._check_has_noise()
        _check_limits(lowest, highest, "noise")
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


def _check_limits(lowest: float, highest: float, what: str) -> None:
    """Refuse limits between which there is no positive number.

    Raises:
        ValueError: If there is none, or the largest one is not finite.
    """
    positive(lowest, f"smallest {what}")
    if not lowest <= highest < inf:
        raise ValueError(
            f"The largest {what} is a number from the smallest one, {lowest:g}, on, got "
            f"{highest:g}."
        )


def _maximum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function is largest between two limits, next to the best of a grid."""
    while high - low > 1e-7:
        grid = torch.linspace(low, high, 41, dtype=torch.float64).tolist()
        best = max(range(41), key=lambda i: function(grid[i]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 40)]
    return (low + high) / 2

r"""A normal distribution over the weights of a trained network, and what it predicts.

.. math:: p(\theta \mid D) \approx \mathcal N(\theta^*, (H + \delta I)^{-1})

H is the curvature of the negative log likelihood of the data, the *summed* loss: a mean is
multiplied with what it divides by. δ is the precision of a normal prior with mean zero, one for all
weights or one for each parameter or layer. Training has minimised the summed loss plus ``δ / 2
|θ|²``.

>>> import torch
>>> from torch import nn
>>> from backpack.laplace import Laplace
>>> model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
>>> data = [(torch.rand(8, 5), torch.randint(3, (8,))) for _ in range(3)]
>>> laplace = Laplace(model, nn.CrossEntropyLoss(), data, prior_precision=1.0)
>>> laplace.predict(torch.rand(2, 5)).shape
torch.Size([2, 3])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import exp, log, pi
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, Module, MSELoss, Parameter

from backpack import disable
from backpack.core.derivatives.terms import torch_loss
from backpack.distributed.data_group import ProcessGroupChoice, check_same
from backpack.linalg.approximations import KroneckerGGN
from backpack.linalg.extended import UseConverter, built
from backpack.linalg.ntk import output_covariances
from backpack.linalg.objective import (
    Objective,
    check_is_function_of_samples,
    check_read_again,
    chosen_parameters,
    is_same_state,
    output_of,
    state_of_weights,
)
from backpack.linalg.structured import SpectralOperator
from backpack.utils.by_name import ByName, by_parameter, positive, tensor_by_parameter
from backpack.utils.convert_parameters import parameter_list_to_vector, vector_to_parameter_list
from backpack.utils.functional import functional_call

__all__ = ["Laplace"]


class Laplace:
    """A Laplace approximation of the posterior, with Kronecker, diagonal or other curvature.

    Source: MacKay, A practical Bayesian framework for backpropagation networks (Neural Computation
    1992); Daxberger et al., Laplace redux (NeurIPS 2021).

    Attributes:
        mean: The weights θ*, a vector. ``[P]``
        curvature: H.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        data: Iterable[Any],
        curvature: Callable[..., SpectralOperator] | SpectralOperator = KroneckerGGN,
        prior_precision: ByName = 1.0,
        params: Iterable[Parameter] | Literal["all", "last"] = "all",
        noise: float = 1.0,
        use_converter: UseConverter = False,
        progress: bool = True,
        process_group: ProcessGroupChoice = "module",
    ):
        """Compute loss and curvature, in two passes over the data.

        Args:
            model: The trained model.
            loss_function: The negative log likelihood: ``CrossEntropyLoss``, ``BCEWithLogitsLoss``,
                or ``MSELoss``, which stands for normal noise.
            data: Batches ``(X, y)``.
            curvature: A class such as :class:`~backpack.linalg.KroneckerGGN` or
                :class:`~backpack.linalg.DiagonalGGN`, called with model, loss, data, ``params``,
                ``progress`` and, if it has that argument, ``use_converter``; or a structured
                operator of the same loss (with its reduction, which is checked where the operator
                knows it).
            prior_precision: δ, positive: one number, one for each parameter, or a dictionary by the
                names of parameters and modules (``""`` stands for all others).
            params: Parameters that are uncertain: ``"all"`` that are trainable, those of the
                ``"last"`` layer that is called, or some of the model's.
            noise: Standard deviation of the targets of ``MSELoss``.
            use_converter: As for :class:`~backpack.linalg.KroneckerGGN`.
            progress: The same.
            process_group: As for :class:`~backpack.linalg.GGN`: processes with a part of the data
                each. The posterior is that of all data, the same on all processes; predictions need
                no other process.

        Raises:
            ValueError: If a number is not positive, the curvature is not structured, does not fit
                or is that of another loss or reduction, or as for
                :class:`~backpack.linalg.MatrixFreeOperator`.
        """
        check_read_again("Laplace", data)
        chosen = chosen_parameters(model, data, params)
        objective = Objective(model, loss_function, data, chosen, progress, process_group)
        self._objective = objective
        self._use_converter, self._noise = use_converter, _as_noise(noise)
        self._is_normal = isinstance(loss_function, MSELoss)
        own = objective.params
        self.mean = parameter_list_to_vector(own).detach()
        self._others = state_of_weights(objective.model, own)
        options = (own, use_converter, progress, objective.process_group)
        given = built(curvature, objective.model, loss_function, data, *options)
        if not isinstance(given, SpectralOperator) or given.shape[0] != len(self.mean):
            raise ValueError(
                f"Laplace needs the curvature of {len(self.mean)} weights as a structured operator "
                f"of {len(self.mean)} rows, got {given!r}. Give KroneckerGGN, EKFAC or "
                "DiagonalGGN; a dense matrix is KroneckerOperator([[matrix]])."
            )
        known = given.of_loss and torch_loss(given.of_loss[0])  # of your own ones, nothing is known
        if known is not None and torch_loss(type(loss_function)) not in (None, known):
            raise ValueError(
                f"{given!r} is the curvature of {known.__name__}, but Laplace has "
                f"{type(loss_function).__name__}. Build both with the same loss."
            )
        self._summed, factor = self._summed_loss()
        self._given = SpectralOperator(factor * given.spectrum, given.bases, given.order)
        self._scale_by_noise()
        if objective.group is not None:
            check_same(objective.group, "curvature of Laplace", self.curvature.trace())
        self._names = objective.names
        self.prior_precision = prior_precision

    @property
    def prior_precision(self) -> float | dict[str, float]:
        """δ, the precision of the prior, or that of each parameter, by name.

        It may be set, as a whole: nothing has to be computed anew.
        """
        known = self._prior_precision
        return dict(known) if isinstance(known, dict) else known

    @prior_precision.setter
    def prior_precision(self, value: ByName) -> None:
        each = by_parameter(value, self._names, "prior precision")
        precision = self._damped(self._by_weight(self.mean.new_tensor(each)))
        self._need_positive(precision.spectrum, value)
        self.posterior = precision.inverse()
        is_one = isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.dim())
        self._prior_precision = each[0] if is_one else dict(zip(self._names, each, strict=True))

    @property
    def noise(self) -> float:
        """Standard deviation of the targets of ``MSELoss``.

        It may be set: curvature, posterior and likelihood follow, and nothing is computed anew.
        """
        return self._noise

    @noise.setter
    def noise(self, value: float) -> None:
        self._check_has_noise()
        before, self._noise = self._noise, _as_noise(value)
        self._scale_by_noise()
        try:
            self.prior_precision = self._prior_precision  # the posterior is that of both
        except ValueError:
            self._noise = before
            self._scale_by_noise()
            raise

    def _check_has_noise(self) -> None:
        if not self._is_normal:
            raise ValueError(
                f"{type(self._objective.loss_function).__name__} has no noise: it is the standard "
                "deviation of the targets of MSELoss alone."
            )

    def _need_positive(self, spectrum: Tensor, delta: ByName) -> None:
        """Refuse the eigenvalues of what is no precision of a normal distribution."""
        if not spectrum.min() > 0:
            raise ValueError(
                f"With a prior precision of {delta}, the curvature {self.curvature!r} is not "
                "positive definite: there is no normal distribution. Use more, or the GGN instead "
                "of the Hessian."
            )

    def _by_weight(self, each: Tensor) -> Tensor:
        """Repeat a number of each parameter for all of its weights, ``[P]``."""
        sizes = torch.tensor([p.numel() for p in self._objective.params], device=self.mean.device)
        return each.repeat_interleave(sizes)

    def _damped(self, delta: Tensor) -> SpectralOperator:
        return self.curvature.plus_diagonal(delta, "prior precision")

    def _summed_loss(self) -> tuple[float, float]:
        """Return the negative log likelihood, and its ratio to the loss as it is reduced."""
        objective, total, weights, count = self._objective, 0.0, 0.0, 0
        with torch.no_grad(), disable(), objective.telling():
            for X, targets in objective:
                output = output_of("Laplace", objective.model, X)
                self._is_one = output.dim() == 2  # prediction for each sample
                if weight := objective.weight(X, output, targets):
                    loss = objective.loss_function(output, *targets)
                    total, weights = total + weight * float(loss), weights + weight
                    count += output.numel()
        if objective.group is not None:
            own = torch.tensor([total, count], dtype=torch.float64, device=self.mean.device)
            sums, weights = objective.total("loss of Laplace", [own], weights)
            total, count = float(sums[0]), int(sums[1])
        self._num_targets = count
        return total, objective.norm(weights)

    def _scale_by_noise(self) -> None:
        """Compute loss and curvature of the likelihood, which has the noise of the targets."""
        scale = 1 / (2 * self._noise**2) if self._is_normal else 1.0
        own = self._given
        self.loss = scale * self._summed
        self.curvature = SpectralOperator(scale * own.spectrum, own.bases, own.order)

    # ------------------------------------------------------------------ the prior

    def log_marginal_likelihood(self, prior_precision: ByName | None = None) -> Tensor:
        """Return the log of the probability of the data, for any δ (default: the one that is set).

        ``log p(D) ≈ log p(D | θ*) + log p(θ*) + P/2 log 2π - 1/2 log det(H + δ I)``, a scalar: a
        function of the tensors that are given, which autograd differentiates.
        """
        value = self.prior_precision if prior_precision is None else prior_precision
        each = tensor_by_parameter(value, self._names, "prior precision", self.mean)
        delta = self._by_weight(each)
        constant = log(2 * pi) / 2 + log(self._noise) if self._is_normal else 0.0
        likelihood = -self.loss - self._num_targets * constant
        prior = delta.log().sum() - (delta * self.mean.square()).sum()
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
        masks = {name: self._by_weight(own.to(self.mean.device)) for name, own in same.items()}
        found = {name: self._fitted(mask, lowest, highest) for name, mask in masks.items()}
        self.prior_precision = found[""] if per == "model" else [found[name] for name in of]
        return self.prior_precision

    def _fitted(self, weights: Tensor, lowest: float, highest: float) -> float:
        """Return the best precision of some weights, a mask ``[P]``."""
        spectrum = self.curvature.spectrum[self.curvature.by_eigenvector(weights, "group")].double()
        squares = float(self.mean[weights].double().square().sum())
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
        spectrum = self._given.spectrum.double()
        each = by_parameter(self.prior_precision, self._names, "prior precision")
        by_weight = self._by_weight(self.mean.new_tensor(each))
        delta = self._given.by_eigenvector(by_weight).double()
        self._need_positive(spectrum / (2 * lowest**2) + delta, self.prior_precision)

        def evidence(x: float) -> float:  # times two; x is the logarithm of the noise
            precision = exp(-2 * x)
            fit = -2 * self._num_targets * x - precision * self._summed
            return fit - float((spectrum * precision / 2 + delta).log().sum())

        self.noise = exp(_maximum(evidence, log(lowest), log(highest)))
        return self.noise

    # ------------------------------------------------------------------ predictions

    def outputs(self, X: Any, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Return mean ``[N, C]`` and covariance ``[N, C, C]`` of outputs linearised in the weights.

        Args:
            X: N inputs, as the model takes them: a tensor, or a tuple or dictionary of tensors.
            joint: Whether to return the covariance of the outputs of all inputs, ``[N, C, N, C]``:
                that of the posterior of a Gaussian process, whose kernel is ``J Jᵀ / δ``. Takes
                ``N C P`` numbers.

        Raises:
            RuntimeError: If the weights of the model have changed.
            ValueError: If it is in training mode, and random then, or no function of a sample.

        Source: Immer, Korzepa, Bauer, Improving predictions of BNNs via linearization (AISTATS 21).
        """
        own = self._objective
        self._check_state(torch.equal(parameter_list_to_vector(own.params), self.mean))
        options = self.posterior, self._use_converter, joint
        return output_covariances(own.model, own.params, X, *options)

    def _check_state(self, has_mean: bool = True) -> None:
        """Refuse a model whose weights are others, or that is in training mode.

        Raises:
            RuntimeError: If they are.
            ValueError: If it is, and random then, or no function of a sample.
        """
        model, own = self._objective.model, self._objective.params
        check_is_function_of_samples(model)
        if not has_mean or not is_same_state(self._others, state_of_weights(model, own)):
            raise RuntimeError(
                "The weights of the model, or its buffers, are others than when Laplace was built, "
                "which has the curvature there. Load these again, or build a new one."
            )

    def sample_weights(self, num_samples: int, generator: Generator | None = None) -> Tensor:
        """Draw weights from the posterior, ``[S, P]``."""
        return self.mean + self.posterior.sample(num_samples, generator).T

    def sample_outputs(
        self,
        X: Any,
        num_samples: int,
        linearized: bool = True,
        generator: Generator | None = None,
        joint: bool = False,
    ) -> Tensor:
        """Draw outputs, ``[S, N, C]``.

        Args:
            X: N inputs, as for :meth:`outputs`.
            num_samples: How many, S.
            linearized: Draw from the distribution of :meth:`outputs`, input by input. Else run the
                model with weights that are drawn.
            generator: Source of random numbers.
            joint: Draw the linearised outputs of all inputs together: functions.
        """
        if linearized:
            mean, covariance = self.outputs(X, joint)
            shape = mean.shape
            if joint:
                mean, covariance = mean.flatten(), covariance.flatten(2).flatten(0, 1)
            wide = torch.promote_types(covariance.dtype, torch.float32)  # none in less
            values, vectors = torch.linalg.eigh(covariance.to(wide))  # may be singular
            root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
            noise = root.new_empty(num_samples, *mean.shape, 1).normal_(generator=generator)
            return (mean + (root @ noise).squeeze(-1).to(mean)).reshape(num_samples, *shape)
        self._check_state()  # weights that are drawn take the place of the mean
        model, params = self._objective.model, self._objective.params
        found = []
        for weights in self.sample_weights(num_samples, generator):
            pieces = vector_to_parameter_list(weights, params)
            state = dict(zip(self._names, pieces, strict=True))
            with torch.no_grad(), disable():
                output = functional_call(model, state, (X,))
                found.append(output.unsqueeze(-1).flatten(1))
        return torch.stack(found)

    def predict(
        self,
        X: Any,
        method: Literal["probit", "monte carlo", "sampling"] = "probit",
        num_samples: int = 100,
        generator: Generator | None = None,
    ) -> Tensor:
        """Predict, averaged over the posterior.

        Args:
            X: N inputs, as for :meth:`outputs`.
            method: ``"probit"`` averages softmax or sigmoid over the linearised outputs, with ``f /
                √(1 + π/8 var f)`` in the place of f (MacKay 1992), ``"monte carlo"`` over samples
                of these, ``"sampling"`` over the model with weights that are drawn.
            num_samples: Number of samples of the last two.
            generator: Source of random numbers, on the device of the model.

        Returns:
            Probabilities; for ``MSELoss`` the mean. ``[N, C]``. The variance of the mean is on the
            diagonal of the covariance of :meth:`outputs`, that of targets larger by ``noise²``.

        Raises:
            ValueError: If there is no such method, or the loss is another.
        """
        if method not in ("probit", "monte carlo", "sampling"):
            raise ValueError(f"method is 'probit', 'monte carlo' or 'sampling', got {method!r}.")
        link = self._link()
        if method != "probit":
            drawn = self.sample_outputs(X, num_samples, method == "monte carlo", generator)
            return link(drawn).mean(0)
        mean, covariance = self.outputs(X)
        if self._is_normal:
            return mean
        return link(mean / (1 + pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt())

    def _link(self) -> Callable[[Tensor], Tensor]:
        """Return what turns outputs ``[*, C]`` into a prediction."""
        loss_function = self._objective.loss_function
        if isinstance(loss_function, CrossEntropyLoss) and self._is_one:
            return lambda f: f.softmax(-1)
        if isinstance(loss_function, BCEWithLogitsLoss):
            return torch.sigmoid
        if self._is_normal:
            return lambda f: f
        raise ValueError(
            f"{type(loss_function).__name__} of this model says nothing of the probabilities of C "
            "classes for each sample: use outputs() or sample_outputs()."
        )


def _as_noise(value: float) -> float:
    """Return a noise as a number.

    Raises:
        ValueError: If it is not one positive number.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"The noise is one number for all targets, got a tensor of shape {list(value.shape)}. "
            "For several, divide each output and its targets by its own noise, and use noise=1."
        )
    return positive(float(value), "noise")


def _maximum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function is largest between two limits, next to the best of a grid."""
    while high - low > 1e-7:
        grid = torch.linspace(low, high, 41, dtype=torch.float64).tolist()
        best = max(range(41), key=lambda i: function(grid[i]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 40)]
    return (low + high) / 2

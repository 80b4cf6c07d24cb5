"""What is predicted, averaged over the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import log, pi
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss

from backpack.laplace.posterior import Posterior
from backpack.linalg.extended import ALONE
from backpack.linalg.ntk import output_covariances, output_variances
from backpack.linalg.objective import without_graph
from backpack.linalg.structured import SpectralOperator
from backpack.utils.convert_parameters import parameter_list_to_vector, vector_to_parameter_list
from backpack.utils.functional import functional_call


class Predictive(Posterior):
    """Outputs and predictions for uncertain weights."""

    def outputs(self, X: Any, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Return mean ``[N, C]`` and covariance ``[N, C, C]`` of outputs linearised in the weights.

        Args:
            X: N inputs, as the model takes them: a tensor, or a tuple or dictionary of tensors.
            joint: Whether to return the covariance of the outputs of all inputs, ``[N, C, N, C]``:
                that of the posterior of a Gaussian process, whose kernel is ``J Jᵀ / δ``. Takes
                ``N C P`` numbers.

        The Jacobian of a sample takes ``C P`` numbers. For many outputs, :meth:`predict` needs
        variances alone, and little memory.

        Raises:
            RuntimeError: If the weights of the model have changed.
            ValueError: If it is in training mode, and random then, or no function of a sample.

        Source: Immer, Korzepa, Bauer, Improving predictions of BNNs via linearization (AISTATS 21).
        """
        self._check_mean()
        own, posteriors = self._objective, [self.posterior]
        options = self._use_converter, joint
        mean, (covariance,) = output_covariances(own.model, own.params, X, posteriors, *options)
        return mean, covariance

    def _variances(
        self, X: Any, posteriors: Sequence[SpectralOperator], method: str
    ) -> tuple[Tensor, Tensor]:
        """Return mean ``[N, C]`` and what a closed form reads of each covariance, ``[N, D, K]``.

        These are the variances of the outputs; for the bridge, those of :func:`centred` ones.
        """
        self._check_bridge(method)
        self._check_mean()
        own, of = self._objective, centred if method == "bridge" else None
        return output_variances(own.model, own.params, X, posteriors, self._use_converter, of)

    def _check_mean(self) -> None:
        """Refuse a model whose weights are others, as :meth:`_check_state`."""
        self._check_state(torch.equal(parameter_list_to_vector(self._objective.params), self.mean))

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
            with ALONE:  # the model has the weights for a moment
                output = without_graph(partial(functional_call, model, state, (X,)))
                found.append(output.unsqueeze(-1).flatten(1))
        return torch.stack(found)

    def predict(
        self,
        X: Any,
        method: Literal["probit", "bridge", "monte carlo", "sampling"] = "probit",
        num_samples: int = 100,
        generator: Generator | None = None,
    ) -> Tensor:
        """Predict, averaged over the posterior.

        Args:
            X: N inputs, as for :meth:`outputs`.
            method: ``"probit"`` averages softmax or sigmoid over the linearised outputs, with ``f /
                √(1 + π/8 var f)`` in the place of f (MacKay 1992), ``"bridge"`` takes the mean of
                the Dirichlet distribution of :meth:`dirichlet`, ``"monte carlo"`` averages over
                samples of these outputs, ``"sampling"`` over the model with weights that are drawn.
            num_samples: Number of samples of the last two.
            generator: Source of random numbers, on the device of the model.

        Returns:
            Probabilities; for ``MSELoss`` the mean. ``[N, C]``. The variance of the mean is on the
            diagonal of the covariance of :meth:`outputs`, that of targets larger by ``noise²``.

        Raises:
            ValueError: If there is no such method, no sample, or the loss is another.
        """
        if method not in ("probit", "bridge", "monte carlo", "sampling"):
            raise ValueError(
                f"method is 'probit', 'bridge', 'monte carlo' or 'sampling', got {method!r}."
            )
        if num_samples < 1:
            raise ValueError(f"num_samples has to be at least 1, got {num_samples}.")
        link = self._link()
        if method in ("probit", "bridge"):
            return link(self._logits(X, method))
        drawn = self.sample_outputs(X, num_samples, method == "monte carlo", generator)
        return link(drawn).mean(0)

    def dirichlet(self, X: Any) -> Tensor:
        r"""Return the concentrations α of a Dirichlet distribution over probabilities, ``[N, C]``.

        The Laplace bridge. The linearised outputs f of ``CrossEntropyLoss`` are centred, ``f - mean
        f``, which leaves their softmax as it is. (The paper conditions them on a sum of zero, which
        changes its distribution.) Of their mean μ and covariance Σ,

        .. math:: \alpha_k = \frac{1}{\Sigma_{kk}}
            \left(1 - \frac{2}{C} + \frac{e^{\mu_k}}{C^2} \sum_l e^{-\mu_l}\right)

        In the logits, this Dirichlet has its mode at μ and the curvature of the normal distribution
        there, if there is one that has both. Its mean is ``α / sum α``, its variances shrink with
        ``sum α``. For two classes, the mean is the softmax of μ, whatever Σ is.

        Source: Hobbhahn, Kristiadi, Hennig, Fast predictive uncertainty for classification with
        Bayesian deep networks (UAI 2022); MacKay, Choice of basis for Laplace approximation (1998).

        Args:
            X: N inputs, as for :meth:`outputs`.

        Raises:
            ValueError: If the loss is another, there is one class, or an output has no variance.
        """
        self._link()
        return self._logits(X, "bridge").exp()

    def _logits(self, X: Any, method: str) -> Tensor:
        """Return what the link makes a prediction of, in closed form."""
        mean, variances = self._variances(X, [self.posterior], method)
        return self._closed_form(mean, variances.squeeze(2), method)

    def _closed_form(self, mean: Tensor, variances: Tensor, method: str) -> Tensor:
        """Return what the link makes a prediction of, from :meth:`_variances`."""
        if method == "bridge":
            return log_concentrations(mean, variances)
        return mean if self._is_normal else mean / (1 + pi / 8 * variances).sqrt()

    def _check_bridge(self, method: str) -> None:
        """Refuse the Laplace bridge for another loss than its own."""
        kind = self._objective.loss_function
        if method == "bridge" and not isinstance(kind, CrossEntropyLoss):
            raise ValueError(
                f"The Laplace bridge is for CrossEntropyLoss, got {type(kind).__name__}. Use "
                "'probit', 'monte carlo' or 'sampling'."
            )

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


def centred(logits: Tensor) -> Tensor:
    """Return logits without their mean, and that: ``[N, C] -> [N, C + 1]``."""
    mean = logits.mean(1, keepdim=True)
    return torch.cat([logits - mean, mean], 1)


def log_concentrations(mean: Tensor, variances: Tensor) -> Tensor:
    """Return the logarithms of the α of the Laplace bridge, see :meth:`Predictive.dirichlet`.

    Args:
        mean: Of logits. ``[N, C]``
        variances: Of :func:`centred` logits. ``[N, C + 1]``

    Returns:
        ``[N, C]``

    Raises:
        ValueError: If there is one class, or a logit has no variance, but for what all have in
            common.
    """
    count = mean.shape[1]
    wide = torch.promote_types(mean.dtype, torch.float32)
    mu, *_ = centred(mean.to(wide)).split(count, 1)
    variances, in_common = variances.to(wide).split([count, 1], 1)
    largest = (variances + in_common).amax(1, keepdim=True)
    round_off = 10 * torch.finfo(mean.dtype).eps * largest
    if count < 2 or (variances <= round_off).any():
        raise ValueError(
            "The Laplace bridge needs several classes, and logits whose variances are positive "
            f"without what all have in common, got {count} classes, and "
            f"{int((variances <= round_off).sum())} of {variances.numel()} variances that cannot "
            f"be told from zero in {mean.dtype}. Use 'probit', 'monte carlo' or 'sampling'."
        )
    of_others = mu + (-mu).logsumexp(1, keepdim=True) - 2 * log(count)
    constant = mu.new_tensor(1 - 2 / count).log()
    return (torch.logaddexp(constant, of_others) - variances.log()).to(mean.dtype)

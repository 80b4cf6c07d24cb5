"""What is predicted, averaged over the weights."""

from __future__ import annotations

from collections.abc import Callable
from math import pi
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss

from backpack import disable
from backpack.laplace.posterior import Posterior
from backpack.linalg.ntk import output_covariances
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

        Raises:
            RuntimeError: If the weights of the model have changed.
            ValueError: If it is in training mode, and random then, or no function of a sample.

        Source: Immer, Korzepa, Bauer, Improving predictions of BNNs via linearization (AISTATS 21).
        """
        own = self._objective
        self._check_state(torch.equal(parameter_list_to_vector(own.params), self.mean))
        options = self.posterior, self._use_converter, joint
        return output_covariances(own.model, own.params, X, *options)

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

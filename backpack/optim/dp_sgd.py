"""Stochastic gradient descent with differential privacy."""

from __future__ import annotations

from functools import reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor

from backpack.extensions import BatchGrad
from backpack.optim.base import Closure, ExtensionOptimizer


class DPSGD(ExtensionOptimizer):
    """Gradient descent with clipped individual gradients and Gaussian noise.

    ``g = 1/B (sum_n g_n / max(1, ‖g_n‖ / R) + N(0, σ² R² I))`` takes the place of the gradient. The
    norm of an individual gradient g_n is that over all parameters which have a gradient. B is the
    *expected* number of samples in a batch. For the guarantee, every batch takes each sample of the
    data independently with probability B / (number of samples), see
    :func:`backpack.optim.privacy_spent`; and nothing mixes the samples of a batch (batch
    normalisation does). A step is refused if the backward pass, which has to run in the context of
    ``extensions``, has found something that does, or that cannot be looked at: modules, frozen ones
    included; functions between modules, and of the data in a converted model; terms of a loss that
    is not extended. What leaves no trace is not seen: what was done to the data before the model,
    and by functions in a model that was not converted; modules that are not extended, or run in
    ``torch.no_grad()``; numbers that were taken out of the graph (``detach()``, ``item()``).

    Source: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, Deep learning with differential
    privacy (CCS 2016), algorithm 1.
    """

    at_least: ClassVar = {**ExtensionOptimizer.at_least, "momentum": 0}

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float,
        noise_multiplier: float,
        expected_batch_size: float,
        loss_reduction: Literal["mean", "sum"] = "mean",
        generator: Generator | None = None,
    ):
        """Store the options. Those up to ``weight_decay`` may differ between groups.

        Args:
            params: Parameters, named parameters, or groups.
            lr: Step size.
            momentum: Heavy-ball momentum: ``v ← momentum v + g``, ``θ ← θ − lr v``.
            weight_decay: η, adds ηθ to g, after the noise.
            max_grad_norm: R, largest norm of an individual gradient.
            noise_multiplier: σ, standard deviation of the noise in units of R.
            expected_batch_size: B, number of samples in a batch on average over batches.
            loss_reduction: That of the loss. With a mean, ``backward()`` divides individual
                gradients by the number of samples in the batch, which is undone before clipping.
                It has to be ``"sum"`` if a mean would divide by something that depends on other
                samples: with class weights or ``ignore_index``.
            generator: Draws the noise. Default: that of torch. Neither is made for cryptography.
                No part of ``state_dict``: a new one with the old seed draws the old noise again.

        Raises:
            ValueError: If an option is out of range.
        """
        if not max_grad_norm > 0 or not noise_multiplier >= 0 or not expected_batch_size > 0:
            raise ValueError(
                "max_grad_norm and expected_batch_size have to be larger than 0, noise_multiplier "
                f"at least 0, got {max_grad_norm}, {expected_batch_size} and {noise_multiplier}."
            )
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction is 'mean' or 'sum', got {loss_reduction!r}.")
        self.max_grad_norm = max_grad_norm
        self.noise_multiplier = noise_multiplier
        self.expected_batch_size = expected_batch_size
        self.loss_reduction = loss_reduction
        self.generator = generator
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, BatchGrad())
        self.extension.looks_at_loss = True

    def _update(self, closure: Closure | None, loss: Any) -> None:
        individual = {p: self._quantity(p) for _, p, _ in self._trained()}
        if not individual:
            return
        for p, grads in individual.items():
            mixing = getattr(grads, "_backpack_mixing", None)
            if mixing is not None:
                raise ValueError(
                    f"DPSGD: the individual gradients of {self._describe(p)} depend on other "
                    f"samples, because the network mixes them in {mixing}: the steps would not be "
                    "private. Use modules that treat samples alone, such as GroupNorm."
                )
            undecided = getattr(grads, "_backpack_undecided", None)
            if undecided is not None:
                raise ValueError(
                    f"DPSGD: whether the individual gradients of {self._describe(p)} depend on "
                    f"other samples cannot be told, because of {undecided}: the steps might not be "
                    "private. For a loss, use a module and extend(lossfunc); make functions in the "
                    "network modules, or use extend(model, use_converter=True)."
                )
        weights = self._weights(individual)
        for group, p, _ in self._trained():
            noise = torch.empty_like(p).normal_(generator=self.generator)
            noise *= self.noise_multiplier * self.max_grad_norm
            gradient = torch.tensordot(weights.to(p.dtype), individual[p], dims=1) + noise
            gradient /= self.expected_batch_size
            gradient.add_(p, alpha=group["weight_decay"])
            if group["momentum"]:
                velocity = self.state[p].get("velocity")
                if velocity is not None:
                    gradient.add_(velocity, alpha=group["momentum"])
                self.state[p]["velocity"] = gradient
            p.sub_(group["lr"] * gradient)

    def _weights(self, individual: dict[Tensor, Tensor]) -> Tensor:
        """Return the factors that undo the mean and clip, ``[N]``.

        Raises:
            ValueError: If the parameters have individual gradients of different numbers of samples.
        """
        counts = {self._describe(p): len(grads) for p, grads in individual.items()}
        num_samples, *others = set(counts.values())
        if others:
            raise ValueError(
                f"DPSGD: the parameters differ in their numbers of individual gradients: {counts}."
            )
        scale = num_samples if self.loss_reduction == "mean" else 1
        rows = [g.reshape(num_samples, p.numel()) for p, g in individual.items()]
        # in float16, squares of small entries are zero
        precision = reduce(torch.promote_types, (r.dtype for r in rows), torch.float32)
        norms = torch.stack([torch.linalg.vector_norm(r, dim=1, dtype=precision) for r in rows])
        norms = scale * torch.linalg.vector_norm(norms, dim=0)
        # a norm of zero is less than any bound: infinity becomes 1
        return scale * (self.max_grad_norm / norms).clamp(max=1)

"""Exact curvature matrices as matrix-free operators: each product is a pass over the data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import isclose, isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from backpack import backpack, disable
from backpack.core.derivatives.loss_hessian import LossHessian
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.derivatives.math_attention import math_attention
from backpack.core.record.alive import live_calls
from backpack.core.record.conversions import weight_of_norm
from backpack.core.record.data_notes import assigned
from backpack.core.record.generators import OwnGenerators
from backpack.core.record.origins import origin
from backpack.core.record.visits import Visit
from backpack.distributed.agreement import digest
from backpack.distributed.data_group import ProcessGroupChoice
from backpack.hessianfree.lop import vjp
from backpack.hessianfree.rop import pushforward
from backpack.hessianfree.twice import differentiable_gradients
from backpack.linalg.extended import extended
from backpack.linalg.objective import (
    Objective,
    check_has_batches,
    check_read_again,
    flattened,
    output_of,
)
from backpack.linalg.operators import LinearOperator
from backpack.linalg.order import SameInEachPass, SeenBatches

# Maps several vectors at once, [V, *shape] for each parameter (or for the output).
Product = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Batch(NamedTuple):
    """What one batch contributes.

    Attributes:
        loss: Its loss.
        weight: Its weight, see :meth:`Objective.weight`.
        product: Multiplies with the matrix of its loss.
    """

    loss: Tensor
    weight: float
    product: Product


class MatrixFreeOperator(LinearOperator):
    """A curvature matrix of the loss over a data set, known by its products.

    With ``reduction="sum"``, the loss over the data set is the sum of the losses of the batches;
    with ``"mean"`` it is the mean over all terms of all batches: batches count by their number of
    samples, or more precisely by what the mean divides by (with ``ignore_index``, positions or
    class weights: the number, or weight, of the targets that count). The matrix is thus the one of
    a single batch that holds all data, however they are cut, and their order does not matter.

    Products are exact, and those of the whole matrix, with the blocks of pairs of parameters. The
    model may be any that autograd can differentiate twice; it is not extended, and no gradient is
    touched. Each product runs through the data once, also if it is one with many vectors.

    On several processes that have a part of the data each (``DistributedSampler``), products are
    those of all data, the same on all: all have to multiply with the same vectors. Samples that a
    sampler repeats, so that all processes have as many, count twice.

    The operator is one matrix: dropout and batch normalisation in training mode are errors, and so
    are data or parameters that change between two products. Build a new operator after a step.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        data: Iterable[Any],
        params: Iterable[Parameter] | None = None,
        progress: bool = True,
        vectors_at_once: int = 8,
        process_group: ProcessGroupChoice = "module",
    ):
        """Store what is given; nothing is computed.

        Args:
            model: The model.
            loss_function: The loss, called as ``loss_function(model(X), y)``. A loss of your own
                needs an attribute ``reduction``, ``"mean"`` (over the samples) or ``"sum"``.
            data: Batches ``(X, y)``, or ``(X, y, ...)`` with further arguments of the loss: a
                ``DataLoader``, or a list. It is read once for each product.
            params: Parameters, in the order of the rows. Default: the trainable ones of the model.
            progress: Show a bar in a terminal for passes of more than a second (needs ``tqdm``).
            vectors_at_once: How many columns of a matrix are multiplied at once: a matter of time
                and memory. 1 if the backward pass of a module cannot be vectorised.
            process_group: Over which processes the data is spread: a group of
                ``torch.distributed``, or that of the ``DistributedDataParallel`` around the model
                (default). None: each process has all data, or an operator of its own.

        Raises:
            ValueError: If the data can be read only once, there are no trainable parameters, they
                are not the model's, or of several precisions or devices, the reduction is unknown,
                ``vectors_at_once`` is not positive, or a module in training mode is random or mixes
                samples.
            NotImplementedError: On several processes without a choice, or if parameters are
                sharded.
        """
        if vectors_at_once < 1:
            raise ValueError(f"vectors_at_once has to be at least 1, got {vectors_at_once}.")
        check_read_again(type(self).__name__, data)
        self._objective = Objective(model, loss_function, data, params, progress, process_group)
        self._vectors_at_once = vectors_at_once
        self._loss: float | None = None
        first, *_ = self._objective.params
        super().__init__(sum(p.numel() for p in self._objective.params), first.dtype, first.device)
        self.of_loss = self._objective.of_loss

    @abstractmethod
    def _batch(self, X: Any, targets: Sequence[Any]) -> Batch:
        """Run a batch forward, and return how to multiply with its matrix."""

    def _matmat(self, matrix: Tensor) -> Tensor:
        vectors = self._objective.vectors(matrix)
        weights = loss = 0.0
        own = self._objective.telling()  # an error here is one of all processes
        with own, torch.inference_mode(False), torch.enable_grad(), backpack(), math_attention():
            # many small terms are lost beside a large sum in low precision
            wide = torch.promote_types(self.dtype, torch.float32)
            product = torch.zeros_like(matrix.T, dtype=wide)  # [V, P]
            for X, targets in self._objective:
                batch = self._batch(X, targets)
                if batch.weight == 0:  # no target counts
                    continue
                weights += batch.weight
                loss += batch.weight * batch.loss.item()
                for start in range(0, len(product), self._vectors_at_once):
                    some = slice(start, start + self._vectors_at_once)
                    parts = batch.product([v[some] for v in vectors])
                    product[some].add_(flattened(parts), alpha=batch.weight)
        if self._objective.group is not None:
            what = f"product of {type(self).__name__} with vectors of digest {digest(matrix)}"
            local = torch.tensor(loss, dtype=torch.float64, device=product.device)
            product, all_losses, weights = self._objective.total(what, [product, local], weights)
            loss = float(all_losses)
        norm = self._objective.norm(weights)
        self._check_unchanged(loss / norm)
        return (product.T / norm).to(self.dtype)

    def _check_unchanged(self, loss: float) -> None:
        if isnan(loss):
            raise ValueError(
                f"{self!r} does not exist: the loss over the data is not a number. Look for "
                "entries that are not finite in parameters and data."
            )
        if self._loss is None:
            self._loss = loss
        eps = torch.finfo(self.dtype).eps
        if not isclose(loss, self._loss, rel_tol=eps**0.5, abs_tol=10 * eps):
            raise RuntimeError(
                f"{self!r} is not one matrix: the loss over the data was {self._loss:g} in an "
                f"earlier product, and is {loss:g} now. If the parameters have changed, build a "
                "new operator. If the model is random, call model.eval(). If the data are "
                "(augmented, or drop_last with shuffle), make them the same in each pass."
            )


class _WeightNormByFormula(TorchFunctionMode):
    """Normalises weights by a formula: the fused function's second derivative is wrong.

    Its backward pass takes the norms for constants (torch 2.6 to 2.14).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = weight_of_norm if func is torch._weight_norm else func
        return own(*args, **(kwargs or {}))


class Hessian(MatrixFreeOperator):
    """The Hessian of the loss over a data set.

    Products by double backward (Pearlmutter, "Fast exact multiplication by the Hessian", Neural
    Computation 1994). For batches, scale, arguments and errors see
    :class:`~backpack.linalg.MatrixFreeOperator`.
    """

    def _batch(self, X: Any, targets: Sequence[Any]) -> Batch:
        objective = self._objective
        with disable(), _WeightNormByFormula():
            output = output_of("Hessian", objective.model, X, objective.loss_function)
            loss = objective.loss_function(output, *targets)
        seed = torch.ones_like(loss, requires_grad=True)
        with differentiable_gradients([loss], objective.params):
            gradient = vjp((loss,), objective.params, (seed,), detach=False)

        def product(vectors: Sequence[Tensor]) -> Sequence[Tensor]:
            return vjp(gradient, objective.params, tuple(vectors), several=True)

        return Batch(loss, objective.weight(X, output, targets), product)


class JacobianOperator(MatrixFreeOperator):
    """``Jᵀ M J``: the Jacobian of the model's output, and a matrix M of the loss at the output.

    Products with J by double backward, then a backward pass (Schraudolph, "Fast curvature
    matrix-vector products for second-order gradient descent", Neural Computation 2002).
    """

    @abstractmethod
    def _at_output(
        self, X: Any, prediction: Tensor, targets: Sequence[Any], weight: float
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the loss, and the map ``[V, *out] -> [V, *out]`` that applies M."""

    def _batch(self, X: Any, targets: Sequence[Any]) -> Batch:
        objective = self._objective
        with disable():
            output = output_of(type(self).__name__, objective.model, X)
        weight = objective.weight(X, output, targets)
        loss, curvature = self._at_output(X, output.detach().requires_grad_(), targets, weight)
        tangents_of = pushforward((output,), objective.params)

        def product(vectors: Sequence[Tensor]) -> Sequence[Tensor]:
            (tangents,) = tangents_of(tuple(vectors), several=True)
            return vjp((output,), objective.params, (curvature(tangents),), several=True)

        return Batch(loss, weight, product)


def loss_and_hessian(
    loss_function: Module, prediction: Tensor, targets: Sequence[Any]
) -> tuple[Tensor, LossHessian]:
    """Return a loss, and its Hessian with respect to the prediction.

    Raises:
        ValueError: If it is no loss module, or within :func:`backpack.disable`.
    """
    if not disable.should_store_io():
        raise ValueError("The GGN reads what the loss stores: use it outside of disable().")
    with extended(loss_function, False):
        loss = loss_function(prediction, *targets)
    own = origin(loss)  # other threads may use the loss, too
    calls = [call for call in live_calls(loss_function) if own in call.origins_out]
    rule = calls[-1].derivatives if calls else None
    if not isinstance(rule, BaseLossDerivatives):
        raise ValueError(
            f"{type(loss_function).__name__} is no loss module: a module without children that "
            "returns a scalar."
        )
    return loss, LossHessian(Visit(calls[-1]))


class GGN(JacobianOperator):
    """The generalised Gauss-Newton matrix of the loss over a data set.

    ``G = Jᵀ H J`` with the Jacobian J of the model's output and the Hessian H of the loss with
    respect to it, which has to be positive semidefinite. It is the same as that of the extensions
    (:class:`~backpack.extensions.DiagGGNExact`, :class:`~backpack.extensions.GGNMP`): for
    ``NLLLoss``, H is the Fisher information. For batches, scale, arguments and errors see
    :class:`~backpack.linalg.MatrixFreeOperator`.
    """

    def _at_output(
        self, X: Any, prediction: Tensor, targets: Sequence[Any], weight: float
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        loss, hessian = loss_and_hessian(self._objective.loss_function, prediction, targets)

        def curvature(tangents: Tensor) -> Tensor:
            with torch.no_grad():
                product = hessian.product(tangents, of_ggn=True)
            return product if isinstance(product, Tensor) else product[0]

        return loss, curvature


class EmpiricalFisher(JacobianOperator):
    """The empirical Fisher information: the second moment of the samples' gradients.

    ``F = 1/W sum_n ∇ℓ_n ∇ℓ_nᵀ``, where ``ℓ_n`` is the sum of the terms of the loss that belong to
    sample n, the n-th entry along the axis of the output that has the samples (several entries of
    one that was assigned are an error), and W is the number (or weight) of all terms for
    ``reduction="mean"``, 1 for ``"sum"``. For one term for each sample
    (classification), that is the mean over the samples. If a sample has several terms (positions,
    outputs), its gradient is that of all of them. The scale is that of the GGN: with targets
    that are drawn from the model's likelihood, F has the expectation G, and the same W.
    Source: Kunstner, Balles, Hennig, Limitations of the empirical Fisher approximation for natural
    gradient descent (NeurIPS 2019). For batches, arguments and errors see
    :class:`~backpack.linalg.MatrixFreeOperator`.
    """

    fisher = "empirical"

    def _at_output(
        self, X: Any, prediction: Tensor, targets: Sequence[Any], weight: float
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        with disable():
            loss = self._objective.loss_function(prediction, *targets)
        # with the mean, each of the two gradients has the factor 1 / weight, F has it once
        (gradient,) = grad(loss, prediction)
        conjugate = gradient.conj()  # products of complex numbers are those of their two parts

        place = self._objective.place(X, prediction)
        numbers = () if place.owners is None else place.owners.numbers
        if len({*numbers}) < len(numbers) and assigned():
            raise NotImplementedError(
                f"EmpiricalFisher takes the {len(prediction)} rows of the output for samples, but "
                f"they belong to {place.samples} (assign_samples). Use "
                "KroneckerGGN(fisher='empirical'), or let the model return a row for each sample."
            )
        axis = 1 + place.axis

        def curvature(tangents: Tensor) -> Tensor:
            along = (
                (conjugate * tangents).real.movedim(axis, 1).unsqueeze(-1).flatten(2).sum(2)
            )  # [V, N]
            along = along.reshape(*along.shape, *(1,) * (gradient.dim() - 1)).movedim(1, axis)
            return weight * gradient * along

        return loss, curvature


class FisherMC(JacobianOperator):
    """The Fisher information, from targets that are drawn from the model's own prediction.

    ``F = Jᵀ (1/M sum_m s_m s_mᵀ) J`` with the gradients s of the negative log likelihood of the
    drawn targets: its expectation is the :class:`~backpack.linalg.GGN`, of the same scale, and that
    of ``DiagGGNMC`` and ``KFAC``. Targets are drawn anew in each product, from the same seed: it is
    one matrix, as long as the data come in the same batches and order. For batches, scale and
    errors see :class:`~backpack.linalg.MatrixFreeOperator`.

    Source: Kunstner, Balles, Hennig (NeurIPS 2019), equation 5.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        data: Iterable[Any],
        params: Iterable[Parameter] | None = None,
        mc_samples: int = 1,
        seed: int = 0,
        progress: bool = True,
        vectors_at_once: int = 8,
        process_group: ProcessGroupChoice = "module",
    ):
        """Store what is given; nothing is computed.

        Args:
            model: The model.
            loss_function: The loss: a negative log likelihood.
            data: Batches ``(X, y)``, the same in each pass.
            params: Parameters, in the order of the rows. Default: the trainable ones of the model.
            mc_samples: M, number of draws for each sample.
            seed: Draws the targets. The state of torch's random numbers is left alone.
            progress: Show a bar in a terminal for passes of more than a second (needs ``tqdm``).
            vectors_at_once: How many columns of a matrix are multiplied at once.
            process_group: As for :class:`~backpack.linalg.MatrixFreeOperator`. Each process draws
                its own targets.

        Raises:
            ValueError: As for :class:`~backpack.linalg.MatrixFreeOperator`, or without samples.
        """
        if mc_samples < 1:
            raise ValueError(f"mc_samples has to be at least 1, got {mc_samples}.")
        name = type(self).__name__
        check_read_again(name, data)
        check_has_batches(data)
        # the loss of a batch, below, is that of its samples in any order
        same = SameInEachPass(name, data, 64)
        super().__init__(
            model, loss_function, same, params, progress, vectors_at_once, process_group
        )
        self._mc_samples, self._seed = mc_samples, seed
        self._seen = SeenBatches()  # the loss of each
        self._number = 0

    def _matmat(self, matrix: Tensor) -> Tensor:
        self._number = 0
        return super()._matmat(matrix)

    def _at_output(
        self, X: Any, prediction: Tensor, targets: Sequence[Any], weight: float
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        loss, hessian = loss_and_hessian(self._objective.loss_function, prediction, targets)
        self._check_order(loss.item() if weight else 0.0)  # without targets it is no number
        group = self._objective.group
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        seed = (1_000_003 * self._seed + self._number) * size + rank
        self._number += 1
        if not len(prediction):  # an empty batch, for which nothing is drawn
            return loss, torch.zeros_like
        with OwnGenerators(seed % 2**63), torch.no_grad():
            drawn = hessian.drawn_root(self._mc_samples)  # [M, N, *out]

        def curvature(tangents: Tensor) -> Tensor:
            s, flat = (each.unsqueeze(-1).flatten(2) for each in (drawn, tangents))
            along = torch.einsum("mno,vno->mvn", s, flat)
            return torch.einsum("mno,mvn->vno", s, along).reshape(tangents.shape)

        return loss, curvature

    def _check_order(self, loss: float) -> None:
        """Refuse other batches: their targets would be others."""
        eps, value = torch.finfo(self.dtype).eps, torch.tensor(loss, dtype=torch.float64)
        if not self._seen.is_same(self._number, None, value, eps**0.5, 10 * eps):
            raise RuntimeError(
                f"{self!r} is not one matrix: batch {self._number} has another loss than in the "
                f"first product, {loss:g}. Targets are drawn batch by batch: pass the data in the "
                "same order each time (shuffle=False), and build a new operator if parameters have "
                "changed."
            )

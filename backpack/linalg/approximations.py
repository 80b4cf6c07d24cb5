"""Approximations of curvature matrices over a data set, from one pass over it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack import backpack
from backpack.core.engine.products import Products, add, axis_factors
from backpack.extensions import DiagGGNExact, DiagGGNMC, DiagHessian
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder.hbp import (
    HBP,
    Approximation,
    BackpropStrategy,
    Curvature,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack.linalg.extended import UseConverter, extended
from backpack.linalg.objective import Objective
from backpack.linalg.structured import DiagonalOperator, KroneckerOperator
from backpack.utils.convert_parameters import parameter_list_to_vector


class DiagonalGGN(DiagonalOperator):
    """The diagonal of the generalised Gauss-Newton matrix of the loss over a data set.

    Computed with :class:`~backpack.extensions.DiagGGNExact` or
    :class:`~backpack.extensions.DiagGGNMC` in one pass over the data, when it is built; a
    snapshot. Batches are put together as for :class:`~backpack.linalg.GGN`, of which the exact one
    is the diagonal. Model and loss are left as they were; no gradient is touched.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        data: Iterable[Any],
        params: Iterable[Parameter] | None = None,
        mc_samples: int | None = None,
        use_converter: UseConverter = False,
        progress: bool = True,
    ):
        """Compute the diagonal.

        Args:
            model: The model.
            loss_function: The loss, called as ``loss_function(model(X), y)``.
            data: Batches ``(X, y)``, or ``(X, y, ...)`` with further arguments of the loss.
            params: Parameters, in the order of the rows. Default: the trainable ones of the model.
            mc_samples: Number of Monte-Carlo samples; they follow ``torch.manual_seed``. Default:
                exact.
            use_converter: How functions in the forward are seen: recorded while it runs (default),
                or ``"trace"``, see :func:`backpack.extend`.
            progress: Show a bar in a terminal for passes of more than a second (needs ``tqdm``).

        Raises:
            ValueError: As for :class:`~backpack.linalg.GGN`.
        """
        ext = DiagGGNExact() if mc_samples is None else DiagGGNMC(mc_samples)
        super().__init__(
            _diagonal(ext, model, loss_function, data, params, use_converter, progress)
        )


class DiagonalHessian(DiagonalOperator):
    """The diagonal of the Hessian of the loss over a data set.

    Computed with :class:`~backpack.extensions.DiagHessian` in one pass over the data, when it is
    built; a snapshot. Batches are put together as for :class:`~backpack.linalg.Hessian`. Entries
    may be negative. Model and loss are left as they were; no gradient is touched.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        data: Iterable[Any],
        params: Iterable[Parameter] | None = None,
        use_converter: UseConverter = False,
        progress: bool = True,
    ):
        """Compute the diagonal; arguments and errors as for :class:`DiagonalGGN`."""
        super().__init__(
            _diagonal(DiagHessian(), model, loss_function, data, params, use_converter, progress)
        )


class KroneckerGGN(KroneckerOperator):
    """Kronecker-factored blocks of the generalised Gauss-Newton matrix over a data set.

    One block for each parameter, computed with :class:`~backpack.extensions.KFLR`,
    :class:`~backpack.extensions.KFAC` or :class:`~backpack.extensions.KFRA` in one pass over the
    data, when it is built; a snapshot. Factors of the inputs are averages over the samples of all
    batches, those with the scale of the loss are put together as for
    :class:`~backpack.linalg.GGN`: KFLR is the one of a single batch with all data (without batches
    of which no target counts). KFRA averages over each batch before it propagates, so it depends on
    how the data is cut. Model and loss are left as they were; no gradient is touched.

    Attributes:
        factors: For each parameter its Kronecker factors, as the extension orders them.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        data: Iterable[Any],
        params: Iterable[Parameter] | None = None,
        method: Literal["KFLR", "KFAC", "KFRA"] = "KFLR",
        mc_samples: int = 1,
        approximation: Approximation = None,
        use_converter: UseConverter = False,
        progress: bool = True,
    ):
        """Compute the factors.

        Args:
            model: The model.
            loss_function: The loss, called as ``loss_function(model(X), y)``.
            data: Batches ``(X, y)``, or ``(X, y, ...)`` with further arguments of the loss.
            params: Parameters, in the order of the rows. Default: the trainable ones of the model.
            method: ``"KFLR"`` propagates the exact factor of the loss, ``"KFAC"`` sampled
                gradients, ``"KFRA"`` a matrix averaged over the batch.
            mc_samples: Number of Monte-Carlo samples of KFAC; they follow ``torch.manual_seed``.
            approximation: For weights that are used at several positions: None, ``"expand"`` or
                ``"reduce"``, see :class:`~backpack.extensions.HBP`.
            use_converter: How functions in the forward are seen: recorded while it runs (default),
                or ``"trace"``, see :func:`backpack.extend`.
            progress: Show a bar in a terminal for passes of more than a second (needs ``tqdm``).

        Raises:
            ValueError: As for :class:`~backpack.linalg.GGN`, or if there is no such method.
        """
        if method not in _STRATEGIES:
            raise ValueError(f"method is one of {', '.join(_STRATEGIES)}, got {method!r}.")
        objective = _extended(model, loss_function, data, params, use_converter, progress)
        ext = _KroneckerSums(method, mc_samples, approximation)
        totals, norm = _totals(objective, ext)
        super().__init__(
            [ext.factors(p, sums, norm) for p, sums in zip(objective.params, totals, strict=True)]
        )


_STRATEGIES = {
    "KFLR": (LossHessianStrategy.EXACT, BackpropStrategy.SQRT),
    "KFAC": (LossHessianStrategy.SAMPLING, BackpropStrategy.SQRT),
    "KFRA": (LossHessianStrategy.AVERAGE, BackpropStrategy.BATCH_AVERAGE),
}


class _KroneckerSums(HBP):
    """Sums that the Kronecker factors are made of, and that add up over batches.

    Attributes:
        scaled: For each parameter, which factor carries the scale of the loss; the others are
            averages over the samples. None if there are marginals instead of factors.
        num_samples: For each parameter, the number of samples of all batches.
    """

    def __init__(self, method: str, mc_samples: int, approximation: Approximation):
        super().__init__(
            Curvature.GGN,
            *_STRATEGIES[method],
            ExpectationApproximation.BOTEV_MARTENS,
            mc_samples=mc_samples,
            approximation=approximation,
        )
        self.scaled: dict[Parameter, int | None] = {}
        self.num_samples: dict[Parameter, int] = {}

    def extract(self, products: Products) -> list[Tensor]:
        p = products.parameter
        self.num_samples[p] = self.num_samples.get(p, 0) + products.num_samples
        gram: Any = products[self.needs[0]]
        if isinstance(gram, list):
            self.scaled[p] = None
            return gram
        factors = super().extract(products)
        input_first = products.uses[0].derivatives.kronecker_input_first
        self.scaled[p] = scaled = len(factors) - 1 if input_first else 0
        return [
            factor if i == scaled else factor * products.num_samples
            for i, factor in enumerate(factors)
        ]

    def factors(self, p: Parameter, sums: Sequence[Tensor], norm: float) -> list[Tensor]:
        """Return the Kronecker factors of a parameter, for a loss that is divided by a norm."""
        if self.scaled[p] is None:
            return axis_factors([marginal / norm for marginal in sums])
        norms = [norm if i == self.scaled[p] else self.num_samples[p] for i in range(len(sums))]
        return [factor / n for factor, n in zip(sums, norms, strict=True)]


def _extended(
    model: Module,
    loss_function: Module,
    data: Iterable[Any],
    params: Iterable[Parameter] | None,
    use_converter: UseConverter,
    progress: bool,
) -> Objective:
    """Return the objective of a model and loss that are extended for passes over the data."""
    objective = Objective(model, loss_function, data, params, progress)
    objective.use_converter = use_converter
    return objective


def _diagonal(ext: BackpropExtension, *arguments: Any) -> Tensor:
    totals, norm = _totals(_extended(*arguments), ext)
    return parameter_list_to_vector(totals) / norm


def _totals(objective: Objective, ext: BackpropExtension) -> tuple[list[Any], float]:
    """Sum what an extension computes over the batches.

    Args:
        objective: Model, loss and data. Both are extended for the pass.
        ext: An extension that is linear in the loss.

    Returns:
        For each parameter the sum over the batches, for their losses times their weights, and what
        the sums are to be divided by.
    """
    totals: list[Any] = []
    weights = 0.0
    with (
        extended(objective.model, objective.use_converter or "record") as model,
        extended(objective.loss_function, False) as loss_of,
    ):
        for X, targets in objective:
            with torch.inference_mode(False), torch.enable_grad(), backpack(ext):
                output = model(X)
                loss = loss_of(output, *targets)
                weight = objective.weight(output, targets)
                if weight == 0:  # no target counts
                    continue
                values = _values(objective.params, ext, weight * loss)
            weights += weight
            totals = [add(t, v) for t, v in zip(totals, values, strict=True)] if totals else values
    return totals, objective.norm(weights)


def _values(params: Sequence[Parameter], ext: BackpropExtension, loss: Tensor) -> list[Any]:
    """Run a backward pass that leaves no trace at the parameters."""
    gradients = [p.grad for p in params]
    ext.savefield = "_backpack_linalg"
    for p in params:  # backward() would add to the tensors of the caller, in place
        p.grad = None
    try:
        loss.backward(inputs=list(params))
        values = [vars(p).pop(ext.savefield, None) for p in params]
    finally:
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
    unused = [list(p.shape) for p, v in zip(params, values, strict=True) if v is None]
    if unused:
        raise ValueError(
            f"The loss does not depend on the parameters of shapes {unused} through an extended "
            "module. Leave them out (params=...)."
        )
    return values

"""Approximations of curvature matrices over a data set, from one pass over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from math import isclose
from typing import Any, Literal

import torch
from torch import Size, Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from backpack import backpack, extensions
from backpack.core.engine.blocks import axis_factors
from backpack.core.engine.extracted import IDENTITY, INPUT_FACTORS, Bases, add
from backpack.core.engine.products import Products
from backpack.core.engine.propagations import InBases, LossFactor
from backpack.core.values import at_least_single
from backpack.distributed.data_group import DataGroup, ProcessGroupChoice
from backpack.extensions import DiagGGNExact, DiagGGNMC, DiagHessian
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.hbp import (
    HBP,
    MAX_FACTOR_SIZE,
    Approximation,
    BackpropStrategy,
    Curvature,
    ExpectationApproximation,
    Fisher,
    LossHessianStrategy,
    strategies,
)
from backpack.linalg.extended import ALONE, UseConverter, left_extended
from backpack.linalg.objective import (
    Objective,
    check_read_again,
    one_of_zeros,
    output_drawing_nothing,
)
from backpack.linalg.passes import values_of
from backpack.linalg.structured import (
    DiagonalOperator,
    EigenOperator,
    KroneckerOperator,
    entries_of,
    order_of,
)
from backpack.utils.batches import map_tensors, tensors_of
from backpack.utils.convert_parameters import parameter_list_to_vector
from backpack.utils.kroneckers import EigenKronecker, eigh_semidefinite


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
        process_group: ProcessGroupChoice = "module",
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
            process_group: As for :class:`~backpack.linalg.GGN`.

        Raises:
            ValueError: As for :class:`~backpack.linalg.GGN`.
        """
        objective = Objective(
            model, loss_function, data, params, progress, process_group, use_converter
        )
        ext = DiagGGNExact() if mc_samples is None else DiagGGNMC(mc_samples)
        super().__init__(_diagonal(objective, ext))
        self.of_loss = objective.of_loss


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
        process_group: ProcessGroupChoice = "module",
    ):
        """Compute the diagonal; arguments and errors as for :class:`DiagonalGGN`."""
        objective = Objective(
            model, loss_function, data, params, progress, process_group, use_converter
        )
        super().__init__(_diagonal(objective, DiagHessian()))
        self.of_loss = objective.of_loss


class KroneckerGGN(KroneckerOperator):
    """Kronecker-factored blocks of the generalised Gauss-Newton matrix over a data set.

    One block for each parameter, computed with :class:`~backpack.extensions.KFLR`,
    :class:`~backpack.extensions.KFAC` or :class:`~backpack.extensions.KFRA` in one pass over the
    data, when it is built; a snapshot. ``fisher`` chooses other matrices, see
    :class:`~backpack.extensions.KFAC`. Factors of the inputs are averages over the samples of all
    batches, those with the scale of the loss are put together as for
    :class:`~backpack.linalg.GGN`: KFLR is the one of a single batch with all data (without batches
    of which no target counts). KFRA averages over each batch before it propagates, so it depends on
    how the data is cut. Model and loss are left as they were; no gradient is touched.

    Attributes:
        factors: For each parameter (for a weight and its bias, with ``joint_bias``) its Kronecker
            factors, as the extension orders them: those of the weight of a transposed convolution
            belong to ``weight.transpose(0, 1)``.
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
        fisher: Fisher | None = None,
        joint_bias: bool = False,
        process_group: ProcessGroupChoice = "module",
        max_factor_size: int | None = MAX_FACTOR_SIZE,
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
            fisher: ``"exact"`` (as KFLR), ``"sampled"`` (as KFAC), ``"empirical"`` or ``"inputs"``,
                instead of a method.
            joint_bias: Whether a weight and its bias have one block, see
                :class:`~backpack.extensions.HBP`, if both are among the parameters. Not for KFRA.
            max_factor_size: Of factors with more rows there is the diagonal ``[D]`` alone, with a
                warning unless the size is chosen. None: of none. KFRA has whole ones by default,
                and no other sizes.
            process_group: As for :class:`~backpack.linalg.GGN`. ``"KFRA"`` averages over each batch
                of each process.

        Raises:
            ValueError: As for :class:`~backpack.linalg.GGN`, if there is no such method, or for
                KFRA with ``joint_bias`` or a size.
            NotImplementedError: If a layer cannot join its biases.
        """
        if method not in _STRATEGIES:
            raise ValueError(f"method is one of {', '.join(_STRATEGIES)}, got {method!r}.")
        chosen = _STRATEGIES[method] if fisher is None else strategies(fisher, mc_samples)
        objective = Objective(
            model, loss_function, data, params, progress, process_group, use_converter
        )
        if chosen == _STRATEGIES["KFRA"]:
            if joint_bias:
                raise ValueError(
                    "method='KFRA' has no factors for joint_bias=True. Use KFLR or KFAC."
                )
            if max_factor_size == MAX_FACTOR_SIZE:
                max_factor_size = None
        ext = _KroneckerSums(chosen, mc_samples, approximation, joint_bias, max_factor_size)
        totals, weights = _totals(objective, ext)
        own, norm = objective.params, objective.norm(weights)
        blocks = [ext.factors(p, sums, norm) for p, sums in zip(own, totals, strict=True) if sums]
        super().__init__(blocks, ext.order(own))
        self.of_loss = objective.of_loss
        self.fisher = fisher if fisher in ("empirical", "inputs") else None


class EKFAC(EigenOperator):
    """Kronecker-factored eigenvectors with corrected eigenvalues, over a data set.

    One block for each parameter, as for :class:`~backpack.extensions.EKFAC`, from two passes over
    the data when it is built; a snapshot. The first pass has the Kronecker factors, as for
    :class:`~backpack.linalg.KroneckerGGN`, the second one the second moments along their
    eigenvectors. Batches are put together as for :class:`~backpack.linalg.GGN`: the exact one
    is that of a single batch with all data, and its trace is that of the GGN. Sampled targets are
    drawn anew in the second pass. Model and loss are left as they were; no gradient is touched.

    Source: George, Laurent, Bouthillier, Ballas, Vincent, Fast approximate natural gradient descent
    in a Kronecker-factored eigenbasis (NeurIPS 2018).

    Attributes:
        blocks: For each parameter (for a weight and its bias, with ``joint_bias``) a
            :class:`~backpack.utils.kroneckers.EigenKronecker`.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        data: Iterable[Any],
        params: Iterable[Parameter] | None = None,
        fisher: Fisher = "exact",
        mc_samples: int = 1,
        approximation: Approximation = None,
        use_converter: UseConverter = False,
        progress: bool = False,
        process_group: ProcessGroupChoice = "module",
        joint_bias: bool = False,
    ):
        """Compute eigenvectors and eigenvalues.

        Args:
            model: The model.
            loss_function: The loss, called as ``loss_function(model(X), y)``.
            data: Batches ``(X, y)``, or ``(X, y, ...)`` with further arguments of the loss. They
                are gone through twice, in any order.
            params: Parameters, in the order of the rows. Default: the trainable ones of the model.
            fisher: ``"exact"``, ``"sampled"`` or ``"empirical"``, see
                :class:`~backpack.extensions.KFAC`.
            mc_samples: Number of Monte-Carlo samples; they follow ``torch.manual_seed``.
            approximation: How the factors treat weights that are used at several positions, see
                :class:`~backpack.extensions.HBP`.
            use_converter: For a model with functions in its forward, see :func:`backpack.extend`.
            progress: Show a bar for each pass (needs ``tqdm``).
            process_group: As for :class:`~backpack.linalg.GGN`.
            joint_bias: Whether a weight and its bias have one block, see
                :class:`~backpack.extensions.EKFAC`, if both are among the parameters.

        Raises:
            ValueError: As for :class:`~backpack.linalg.GGN`, if there is no such ``fisher``, or if
                the data is another one in the second pass, or can be gone through once alone.
            NotImplementedError: If a layer cannot join its biases.
        """
        check_read_again("EKFAC", data)
        options: Any = {"approximation": approximation, "joint_bias": joint_bias}
        template = extensions.EKFAC(mc_samples, fisher=fisher, **options)
        objective = Objective(
            model, loss_function, data, params, progress, process_group, use_converter
        )
        params = objective.params
        factors = _KroneckerSums(strategies(fisher, mc_samples), mc_samples, **options)
        totals, weights = _totals(objective, factors)
        norm = objective.norm(weights)
        bases = {
            p: [eigh_semidefinite(f, in_double=True)[1] for f in factors.factors(p, sums, norm)]
            for p, sums in zip(params, totals, strict=True)
        }
        if objective.group is not None:  # rounding may turn eigenvectors on other machines
            bases = {p: objective.group.of_first(own) for p, own in bases.items()}
        totals, again = _totals(objective, _EigenSquares(template, bases))
        if objective.reduction != "sum" and not isclose(weights, again):
            raise ValueError(
                f"The data has changed between the two passes of EKFAC: they count {weights:g} and "
                f"{again:g} terms of the loss. It has to be the same, in any order."
            )
        joined = factors.bias_of
        shapes = {p: Size(map(len, bases[p])) if p in joined else p.shape for p in params}
        blocks = [
            EigenKronecker(bases[p], (total / norm).to(p.dtype), shapes[p], factors.swaps_axes[p])
            for p, total in zip(params, totals, strict=True)
            if bases[p]
        ]
        super().__init__(blocks, factors.order(params))
        self.of_loss = objective.of_loss
        self.fisher = "empirical" if fisher == "empirical" else None


_STRATEGIES = {
    "KFLR": (LossHessianStrategy.EXACT, BackpropStrategy.SQRT),
    "KFAC": (LossHessianStrategy.SAMPLING, BackpropStrategy.SQRT),
    "KFRA": (LossHessianStrategy.AVERAGE, BackpropStrategy.BATCH_AVERAGE),
}


class _EigenSquares(SecondOrderBackpropExtension):
    """Sums of squares along eigenvectors that are known."""

    def __init__(self, template: extensions.EKFAC, bases: Mapping[Parameter, Sequence[Tensor]]):
        assert isinstance(template.propagation, LossFactor)
        _, squares = template.needs
        known: dict[Parameter, Bases] = {p: {squares: own} for p, own in bases.items()}
        self.propagation = InBases(template.propagation, known)
        self.needs = (squares,)  # type: ignore[misc]
        super().__init__("_backpack_linalg")


class _KroneckerSums(HBP):
    """Sums that the Kronecker factors are made of, and that add up over batches.

    Attributes:
        scaled: For each parameter, which factor carries the scale of the loss; the others are
            averages over the samples. None if there are marginals instead of factors.
        num_samples: For each parameter, the number of samples (or positions) of all batches.
        swaps_axes: For each parameter, whether the factors are those of ``p.transpose(0, 1)``.
        bias_of: For each weight that is joined with its bias, the bias.
    """

    def __init__(
        self,
        chosen: tuple[str, str],
        mc_samples: int,
        approximation: Approximation,
        joint_bias: bool = False,
        max_factor_size: int | None = None,
    ):
        super().__init__(
            Curvature.GGN,
            *chosen,
            ExpectationApproximation.BOTEV_MARTENS,
            mc_samples=mc_samples,
            approximation=approximation,
            joint_bias=joint_bias,
            max_factor_size=max_factor_size,
        )
        self.bias_of: dict[Parameter, Parameter] = {}
        self.input_first: dict[Parameter, bool] = {}
        self.scaled: dict[Parameter, int | None] = {}
        self.num_samples: dict[Parameter, int] = {}
        self.swaps_axes: dict[Parameter, bool] = {}

    @property
    def _title(self) -> str:
        return KroneckerGGN.__name__

    @property
    def _has_scale(self) -> bool:
        """Whether a factor carries the scale of the loss, which the identity does not."""
        return self.needs != (IDENTITY,)

    def extract(self, products: Products) -> list[Tensor]:
        p = products.parameter
        count = products.count_of(INPUT_FACTORS[self.approximation])
        self.num_samples[p] = self.num_samples.get(p, 0) + count
        self.swaps_axes[p] = products.swaps_axes
        gram: Any = products[self.needs[0]]
        if isinstance(gram, list):
            self.scaled[p] = None
            gram = self._limited(gram, p)
            return gram if self._has_scale else [eye * count for eye in gram]
        if self.joint_bias and products.is_joined:
            trained = products.uses[0].call.trained
            self.bias_of[trained["weight"]] = trained["bias"]
        factors = super().extract(products)
        self.input_first[p] = products.input_first
        scaled = len(factors) - 1 if products.input_first else 0
        self.scaled[p] = scaled if self._has_scale else -1
        return [
            factor if i == self.scaled[p] else factor * count for i, factor in enumerate(factors)
        ]

    def sum_counts(self, group: DataGroup, params: Sequence[Parameter]) -> None:
        """Count the samples of all processes."""
        own = torch.tensor([self.num_samples.get(p, 0) for p in params], device=params[0].device)
        (total,) = group.total("numbers of samples", [own])
        self.num_samples = dict(zip(params, total.tolist(), strict=True))

    def order(self, params: Sequence[Parameter]) -> Tensor | None:
        """Return the entries of parameters in the order of the blocks; None if it is the usual."""
        if not self.bias_of:
            return order_of([(p, self.swaps_axes[p]) for p in params])
        entries, numbers = dict(zip(params, entries_of(params), strict=True)), []
        joined = set(self.bias_of.values())
        for p in params:
            own, bias = entries[p], self.bias_of.get(p)
            if bias is not None:  # [I + 1, O], or [O, I + 1] with the axes of a kernel flattened
                axis = 0 if self.input_first[p] else 1
                own = torch.cat([own.flatten(1), entries[bias].unsqueeze(axis)], axis)
            elif self.swaps_axes[p]:
                own = own.transpose(0, 1)
            numbers += [] if p in joined else [own.flatten()]
        return torch.cat(numbers)

    def factors(self, p: Parameter, sums: Sequence[Tensor], norm: float) -> list[Tensor]:
        """Return the Kronecker factors of a parameter, for a loss that is divided by a norm."""
        count = max(1, self.num_samples[p])
        if self.scaled[p] is None:
            norm = norm if self._has_scale else count
            return axis_factors([(marginal / norm).to(p.dtype) for marginal in sums])
        norms = [norm if i == self.scaled[p] else count for i in range(len(sums))]
        return [(factor / n).to(p.dtype) for factor, n in zip(sums, norms, strict=True)]


def _diagonal(objective: Objective, ext: BackpropExtension) -> Tensor:
    totals, weights = _totals(objective, ext)
    return (parameter_list_to_vector(totals) / objective.norm(weights)).to(
        objective.params[0].dtype
    )


def _totals(objective: Objective, ext: BackpropExtension) -> tuple[list[Any], float]:
    """Sum what an extension computes over the batches.

    Args:
        objective: Model, loss and data. Both are extended for the pass.
        ext: An extension that is linear in the loss.

    Returns:
        For each parameter the sum over the batches (of all processes), for their losses times their
        weights, in at least single precision, and the sum of the weights.
    """
    with objective.telling():
        totals, weights = _own_totals(objective, ext)
    if objective.group is not None:
        flat, structure = tree_flatten(totals)
        *flat, weights = objective.total(
            f"sums of {type(ext).__name__.strip('_')} over the data", flat, weights
        )
        totals = tree_unflatten(flat, structure)
        if isinstance(ext, _KroneckerSums):
            ext.sum_counts(objective.group, objective.params)
    return totals, weights


def _own_totals(objective: Objective, ext: BackpropExtension) -> tuple[list[Any], float]:
    """Sum over the batches of this process; return the sum of their weights, too."""
    totals: list[Any] = []
    weights = 0.0
    with (
        left_extended(objective.model, objective.use_converter or "record") as model,
        left_extended(objective.loss_function, False) as loss_of,
    ):
        for X, targets in objective:
            weight, values = _of_batch(objective, ext, model, loss_of, X, targets)
            weights += weight
            if values:
                totals = list(map(add, totals, values)) if totals else values
        if not totals and objective.group is not None:
            # others need sums of the same shapes: those of a sample of zeros, times zero
            X, targets = map_tensors(one_of_zeros, (X, targets))
            _, values = _of_batch(objective, ext, model, loss_of, X, targets)
            totals = tree_map_only(Tensor, torch.zeros_like, values)
            if isinstance(ext, _KroneckerSums):
                ext.num_samples.clear()
    return totals, weights


def _of_batch(
    objective: Objective,
    ext: BackpropExtension,
    model: Module,
    loss_of: Any,
    X: Any,
    targets: Sequence[Any],
) -> tuple[float, list[Any]]:
    """Return the weight of a batch, and what an extension computes of its loss times that."""
    with ALONE, torch.inference_mode(False), torch.enable_grad(), backpack(ext, gradients=False):
        output = output_drawing_nothing("The curvature", model, X, objective.loss_function)
        if not any(len(x) for x in tensors_of(output) if x.dim()):
            return 0.0, []
        weight = objective.weight(X, output, targets, skips_zero=False)
        if not weight:  # without targets that count, a mean is 0 / 0, and a sum 0
            loss_of = copy(loss_of)
            loss_of.reduction = "sum"
        loss = (weight or 1) * loss_of(output, *targets)
        (values,) = values_of(objective.params, [ext], loss)
    # for a sum: many small ones are lost beside a large one in low precision
    return weight, tree_map_only(Tensor, at_least_single, values)

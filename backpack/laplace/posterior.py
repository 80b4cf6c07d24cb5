"""The normal distribution over the weights: curvature, prior and noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any, Literal, TypeVar

import torch
from torch import Generator, Tensor
from torch.nn import Module, MSELoss, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from backpack import disable
from backpack.core.derivatives.terms import torch_loss
from backpack.distributed.data_group import ProcessGroupChoice, check_same
from backpack.linalg.approximations import KroneckerGGN
from backpack.linalg.extended import UseConverter, built
from backpack.linalg.objective import (
    Objective,
    check_is_function_of_samples,
    check_read_again,
    chosen_parameters,
    is_same_state,
    output_of,
    state_of_weights,
    without_graph,
)
from backpack.linalg.operators import LinearOperator
from backpack.linalg.structured import SpectralOperator, of_chosen
from backpack.utils.by_name import (
    ByName,
    ValuesByName,
    by_parameter,
    chosen_by_name,
    positive,
    values_by_parameter,
)
from backpack.utils.convert_parameters import parameter_list_to_vector

T = TypeVar("T", bound="Posterior")
# What a state has of a posterior, beside what may be set.
SAVED = ("mean", "_uncertain", "_is_uncertain", "_others", "_summed", "_num_targets", "_is_one")


class Posterior:
    """A normal distribution over weights: the inverse of curvature and prior precision.

    Attributes:
        mean: The weights θ*, a vector. ``[P]``
        posterior: The covariance, ``(H / T + δ I)⁻¹``. ``[P, P]``
        process_group: Over which processes data is spread. It is not saved.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        data: Iterable[Any],
        curvature: Callable[..., LinearOperator] | LinearOperator = KroneckerGGN,
        prior_precision: ByName = 1.0,
        params: Iterable[Parameter] | Literal["all", "last"] = "all",
        noise: float = 1.0,
        use_converter: UseConverter = False,
        progress: bool = True,
        process_group: ProcessGroupChoice = "module",
        prior_mean: ValuesByName = 0.0,
        temperature: float = 1.0,
        weights: Tensor | Mapping[str, Tensor | bool] | None = None,
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
            prior_precision: δ, positive, next to the summed negative log likelihood: for a mean of
                N terms and the weight decay c, N c (of ``MSELoss``, whose terms are entries of the
                output, N c / (2 noise²)). One number, one for each parameter, or a dictionary by
                the names of parameters and modules (``""`` stands for all others).
            params: Parameters that are uncertain: ``"all"`` that are trainable, those of the
                ``"last"`` layer that is called, or some of the model's.
            noise: Standard deviation of the targets of ``MSELoss``.
            use_converter: As for :class:`~backpack.linalg.KroneckerGGN`.
            progress: The same.
            process_group: As for :class:`~backpack.linalg.GGN`: processes with a part of the data
                each. The posterior is that of all data, the same on all processes; predictions need
                no other process.
            prior_mean: μ, one number, one for each parameter, or a dictionary by names, as for
                ``prior_precision``. In place of a number there may be a tensor of the parameter's
                shape, such as the weights that a fine-tuned model has begun with.
            temperature: T, positive, which divides the log likelihood of the data, see
                :attr:`temperature`.
            weights: Which weights of ``params`` are uncertain, a sub-network: a boolean vector
                ``[P]``, such as that of :meth:`largest_variances`, or boolean tensors by the names
                of parameters (True or False for a whole one, also by the name of a module; what has
                no name is certain). Of k weights, the curvature is a dense matrix ``[k, k]``, from
                k products with that of ``curvature``, which may be any symmetric operator then:
                that of :class:`~backpack.linalg.GGN` is exact (Daxberger et al., Bayesian deep
                learning via subnetwork inference, ICML 2021). That of a diagonal stays one.
                Default: all.

        Raises:
            ValueError: If a number is not positive, the curvature is not structured, does not fit,
                is that of another loss or reduction, of inputs alone, or the empirical Fisher of
                ``MSELoss``, or as for :class:`~backpack.linalg.MatrixFreeOperator`.
        """
        check_read_again("Laplace", data)
        chosen = chosen_parameters(model, data, params)
        objective = Objective(model, loss_function, data, chosen, progress, process_group)
        self._objective, self.process_group = objective, objective.process_group
        self._use_converter, self._noise = use_converter, _as_noise(noise)
        self._temperature = positive(temperature, "temperature")
        self._is_normal = isinstance(loss_function, MSELoss)
        own, self._names = objective.params, objective.names
        self.mean = parameter_list_to_vector(own).detach()
        self._others = state_of_weights(objective.model, own)
        options = (own, use_converter, progress, objective.process_group)
        given = built(curvature, objective.model, loss_function, data, *options)
        self._uncertain = chosen_by_name(weights, self._names, "uncertain weights", own)
        kind = SpectralOperator if weights is None else LinearOperator
        fits = isinstance(given, kind) and given.is_symmetric
        if not fits or given.shape[0] != len(self.mean):
            raise ValueError(
                f"Laplace needs the curvature of {len(self.mean)} weights as a structured operator "
                f"of {len(self.mean)} rows, got {given!r}. Give KroneckerGGN, EKFAC or "
                "DiagonalGGN; a dense matrix is KroneckerOperator([[matrix]]). Of chosen weights "
                "(weights=...), any symmetric operator will do, such as GGN."
            )
        known = given.of_loss and torch_loss(given.of_loss[0])  # of your own ones, nothing is known
        if known is not None and torch_loss(type(loss_function)) not in (None, known):
            raise ValueError(
                f"{given!r} is the curvature of {known.__name__}, but Laplace has "
                f"{type(loss_function).__name__}. Build both with the same loss."
            )
        self._check_is_curvature(given)
        self._summed, factor = self._summed_loss()
        if weights is not None:
            given = of_chosen(given, self._uncertain)
        self._given = _multiple(factor, given)
        self._is_uncertain = given.by_eigenvector(self._uncertain)
        if objective.group is not None:
            check_same(objective.group, "curvature of Laplace", self.curvature.trace())
        self.prior_precision = prior_precision
        self.prior_mean = prior_mean
        # nothing needs them any more: neither memory nor files keep them
        objective.data, objective.group = (), None

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
        self.posterior = self._posterior_of(value)
        self._prior_precision: float | dict[str, float]
        self._prior_precision = (
            each[0] if _is_one(value) else dict(zip(self._names, each, strict=True))
        )

    def _posterior_of(self, value: ByName) -> SpectralOperator:
        """Return the covariance with some δ."""
        each = by_parameter(value, self._names, "prior precision")
        precision = self._damped(self._by_weight(self.mean.new_tensor(each)))
        self._need_positive(precision.spectrum, value)
        covariance = torch.where(self._is_uncertain, 1 / precision.spectrum, 0)
        return SpectralOperator(covariance, precision.bases, precision.order)

    @property
    def prior_mean(self) -> float | dict[str, float | Tensor]:
        """μ, the mean of the prior, or that of each parameter, by name.

        It may be set, as a whole: the marginal likelihood follows. The posterior has the mean θ*,
        the weights as they were trained, for any μ.
        """
        known = self._prior_mean
        return dict(known) if isinstance(known, dict) else known

    @prior_mean.setter
    def prior_mean(self, value: ValuesByName) -> None:
        params = self._objective.params
        each: list[Any] = values_by_parameter(value, self._names, "prior mean", params)
        pieces = [torch.as_tensor(v).to(p).expand_as(p) for v, p in zip(each, params, strict=True)]
        offset = self.mean - parameter_list_to_vector(pieces)
        self._offset = torch.where(self._uncertain, offset, 0)  # of θ* from μ
        self._prior_mean: float | dict[str, Any]
        self._prior_mean = each[0] if _is_one(value) else dict(zip(self._names, each, strict=True))

    @property
    def noise(self) -> float:
        """Standard deviation of the targets of ``MSELoss``.

        It may be set: curvature, posterior and likelihood follow, and nothing is computed anew.
        """
        return self._noise

    @noise.setter
    def noise(self, value: float) -> None:
        self._check_has_noise()
        self._change("_noise", _as_noise(value))

    @property
    def temperature(self) -> float:
        """T, which divides the log likelihood, whole, wherever it stands; never the prior.

        In the posterior ``p(D | θ)^(1/T) p(θ)``, that is loss and curvature, ``H / T + δ I``; in
        the marginal likelihood, which is that of ``p(D | θ)^(1/T)``, also the constant of normal
        noise. :attr:`loss`, :attr:`curvature` and ``noise`` stay those of ``T = 1``. Less than 1 is
        a cold posterior, more sure than Bayes; it may be set, and nothing is computed anew.

        Source: Daxberger et al., Laplace redux (NeurIPS 2021); Wenzel et al., How good is the Bayes
        posterior in deep neural networks really? (ICML 2020), who divide the log prior as well:
        that is a prior precision of ``δ / T`` here.
        """
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._change("_temperature", positive(value, "temperature"))

    def _change(self, name: str, value: float) -> None:
        """Set an attribute, and the posterior anew, or leave all as it was."""
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            self.prior_precision = self._prior_precision
        except ValueError:
            setattr(self, name, before)
            raise

    @property
    def loss(self) -> float:
        """The summed negative log likelihood of the data, but for a constant of ``noise``."""
        return self._scale * self._summed

    @property
    def curvature(self) -> SpectralOperator:
        """H, the curvature of :attr:`loss`."""
        return _multiple(self._scale, self._given)

    @property
    def _scale(self) -> float:
        """What the noise of the targets makes of the summed loss."""
        return 1 / (2 * self._noise**2) if self._is_normal else 1.0

    @property
    def _data_term(self) -> SpectralOperator:
        """What the data adds to the precision of the prior."""
        return _multiple(self._scale / self._temperature, self._given)

    def _check_has_noise(self) -> None:
        if not self._is_normal:
            raise ValueError(
                f"{type(self._objective.loss_function).__name__} has no noise: it is the standard "
                "deviation of the targets of MSELoss alone."
            )

    def _check_is_curvature(self, given: LinearOperator) -> None:
        """Refuse what is not in proportion to the loss, which its sum and the noise multiply.

        Raises:
            ValueError: If it is known to be that.
        """
        if given.fisher == "inputs":
            raise ValueError(
                f"{given!r} has factors of the inputs alone (fisher='inputs'), which are no "
                "curvature of the loss. Use another fisher."
            )
        if given.fisher == "empirical" and self._is_normal:
            raise ValueError(
                f"{given!r} is an empirical Fisher matrix, which is quadratic in the gradients of "
                "MSELoss, so that with a noise it is none of the likelihood. Use the GGN: "
                "KroneckerGGN, EKFAC or DiagonalGGN with another fisher."
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
        """Repeat a number of each parameter for its weights, 1 for those that are certain: ``[P]``.

        The logarithm of a precision of 1 is nothing, in the prior and in the determinant.
        """
        sizes = torch.tensor([p.numel() for p in self._objective.params], device=self.mean.device)
        return torch.where(self._uncertain, each.repeat_interleave(sizes), 1)

    def _damped(self, delta: Tensor) -> SpectralOperator:
        return self._data_term.plus_diagonal(delta, "prior precision")

    def _summed_loss(self) -> tuple[float, float]:
        """Return the negative log likelihood, and its ratio to the loss as it is reduced."""
        objective, total, weights, count = self._objective, 0.0, 0.0, 0
        with torch.no_grad(), disable(), objective.telling():
            for X, targets in objective:
                output = without_graph(partial(output_of, "Laplace", objective.model, X))
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

    def largest_variances(self, count: int) -> Tensor:
        """Return which weights have the largest marginal variances, ``[P]``: a sub-network.

        These are the ``weights`` of another Laplace approximation, whose curvature is dense, if
        this one has a diagonal of ``params``. Of all sub-networks of that size, its posterior is
        the closest one in Wasserstein distance if weights are independent. The variance of weights
        on which no output depends is that of the prior, which none exceeds: leave them out.

        Source: Daxberger, Nalisnick, Allingham, Antorán, Hernández-Lobato, Bayesian deep learning
        via subnetwork inference (ICML 2021).

        Args:
            count: How many.

        Raises:
            ValueError: If there are fewer that are uncertain, or none is asked for.
        """
        known = int(self._uncertain.sum())
        if not 0 < count <= known:
            raise ValueError(f"count is a number from 1 to {known} uncertain weights, got {count}.")
        variances = torch.where(self._uncertain, self.posterior.diagonal(), -1)
        chosen = torch.zeros_like(self._uncertain)
        chosen[variances.topk(count).indices] = True
        return chosen

    def sample_weights(self, num_samples: int, generator: Generator | None = None) -> Tensor:
        """Draw weights from the posterior, ``[S, P]``."""
        return self.mean + self.posterior.sample(num_samples, generator).T

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers and names, from which :meth:`from_state_dict` makes the same.

        ``torch.load(..., weights_only=True)`` reads what ``torch.save`` writes of it. It has
        neither the model, whose ``state_dict()`` is saved besides, nor the loss, nor the data.

        Its tensors are those of the posterior, as in torch: what writes on them changes both. Fits
        and settings put others in their place there, and leave a state as it was.
        """
        kind = type(self._objective.loss_function)
        return {
            **{name.strip("_"): getattr(self, name) for name in SAVED},
            "names": list(self._names),
            "spectrum": self._given.spectrum,
            "bases": [list(block) for block in self._given.bases],
            "order": self._given.order,
            "loss_function": (torch_loss(kind) or kind).__name__,
            "loss_options": _options(self._objective.loss_function),
            "prior_precision": self.prior_precision,
            "prior_mean": self.prior_mean,
            "noise": self.noise,
            "temperature": self.temperature,
        }

    @classmethod
    def from_state_dict(
        cls: type[T],
        model: Module,
        loss_function: Module,
        state: Mapping[str, Any],
        use_converter: UseConverter = False,
        process_group: ProcessGroupChoice = "module",
    ) -> T:
        """Make what has been saved, without the data.

        Args:
            model: The model, with the weights that it had. Predictions check that.
            loss_function: The loss, with the options that it had (``weight``, ``ignore_index``,
                ``label_smoothing``, …). Its ``reduction`` may be another one.
            state: What :meth:`state_dict` has returned.
            use_converter: As when it was built.
            process_group: The same.

        Raises:
            ValueError: If the state lacks something, or is that of another loss or model.
        """
        saved = {name.strip("_"): name for name in SAVED}
        settings = ("prior_precision", "prior_mean", "noise", "temperature")
        needed = {*saved, *settings, "names", "spectrum", "bases", "order", "loss_function"}
        if missing := needed.difference(state):
            raise ValueError(
                f"The state of Laplace lacks {sorted(missing)}. Give what state_dict() returns."
            )
        kind = type(loss_function)
        if (own := (torch_loss(kind) or kind).__name__) != state["loss_function"]:
            raise ValueError(
                f"The state is that of {state['loss_function']}, but the loss is {own}."
            )
        options = state.get("loss_options", {})  # which older states do not have
        for name, value in _options(loss_function).items():
            if name in options and not _is_same_option(was := options[name], value):
                raise ValueError(
                    f"The state is that of {own} with {name}={was}, but this one has "
                    f"{name}={value}, which is another likelihood. Give the loss the options that "
                    "it had."
                )
        made = cls.__new__(cls)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        known = dict(inner.named_parameters())
        params = [known[name] for name in state["names"] if name in known]
        count, has = len(state["mean"]), sum(p.numel() for p in params)
        same = len(params) == len(state["names"]) and has == count
        if not same or len(state_of_weights(inner, params)) != len(state["others"]):
            raise ValueError(
                f"The state is that of another model: {count} weights of {state['names']}, of which"
                f" this one has {has}, and {len(state['others']) // 2} other parameters and "
                f"buffers. It has the parameters {list(known)}."
            )
        made._objective = Objective(model, loss_function, (), params, True, process_group)
        made.process_group = made._objective.process_group
        made._objective.group = None
        made._use_converter, made._is_normal = use_converter, isinstance(loss_function, MSELoss)
        made._names, device = list(state["names"]), params[0].device
        moved: dict[str, Any] = tree_map_only(Tensor, lambda x: x.to(device), dict(state))
        for name, attribute in saved.items():
            setattr(made, attribute, moved[name])
        made._given = SpectralOperator(*(moved[key] for key in ("spectrum", "bases", "order")))
        made._noise, made._temperature = moved["noise"], moved["temperature"]
        made.prior_precision, made.prior_mean = moved["prior_precision"], moved["prior_mean"]
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Leave the processes out, which belong to the program that runs."""
        group = None if self.process_group is None else "module"
        return {**vars(self), "process_group": group}

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        """Copy all but the processes, over which a copy sums as well."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(deepcopy(self.__getstate__(), memo))
        made.process_group = self.process_group
        return made

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


def _multiple(factor: float, operator: SpectralOperator) -> SpectralOperator:
    return SpectralOperator(factor * operator.spectrum, operator.bases, operator.order)


def _is_one(value: Any) -> bool:
    """Whether something given by name is one number for all."""
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.dim())


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


def _options(loss_function: Module) -> dict[str, Any]:
    """Return the options of a loss of torch that make it another likelihood.

    How it is reduced is none: the curvature is that of the sum.
    """
    kind = torch_loss(type(loss_function))
    names = () if kind is None else signature(kind).parameters
    reductions = ("reduction", "reduce", "size_average")
    options = {n: getattr(loss_function, n, None) for n in names if n not in reductions}
    kinds = (bool, int, float, str, Tensor, type(None))  # functions cannot be compared, or saved
    return {name: value for name, value in options.items() if isinstance(value, kinds)}


def _is_same_option(one: Any, other: Any) -> bool:
    """Whether two options of a loss are equal, wherever they are and in any precision."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        floating = [x.dtype for x in (one, other) if x.is_floating_point()]
        rough = max((torch.finfo(dtype).eps for dtype in floating), default=0.0)
        one, other = one.double().cpu(), other.double().cpu()
        return one.shape == other.shape and torch.allclose(one, other, rough, 0)
    are_plain = not (isinstance(one, Tensor) or isinstance(other, Tensor))
    return are_plain and one == other

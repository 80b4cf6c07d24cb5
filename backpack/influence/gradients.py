"""Attribution by gradients alone: along checkpoints, or on random projections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.values import at_least_single
from backpack.distributed.data_group import ProcessGroupChoice
from backpack.extensions import BatchL2Grad, ProjectedGrad
from backpack.influence.attribution import Attribution, By, Directions, Measure, with_samples
from backpack.linalg.extended import UseConverter
from backpack.linalg.objective import flattened
from backpack.linalg.order import check_not_shuffled
from backpack.utils.autocast import without_autocast


class TracIn(Attribution):
    """Influence along the way of training: inner products of gradients, summed over checkpoints.

    ``s_qn = sum_c η_c ∇ℓ_q(θ_c)ᵀ ∇ℓ_n(θ_c)``: how much steps along the gradient of sample n have
    lowered the loss of query q. The model is left with its own parameters.

    Source: Pruthi, Liu, Kale, Sundararajan, Estimating training data influence by tracing gradient
    descent (NeurIPS 2020), TracInCP.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        train_data: Iterable[Any],
        checkpoints: Sequence[Mapping[str, Tensor] | str | Path],
        learning_rates: Sequence[float] | None = None,
        projection: ProjectedGrad | None = None,
        params: Iterable[Parameter] | None = None,
        measure: Measure | None = None,
        use_converter: UseConverter = False,
        progress: bool = True,
        process_group: ProcessGroupChoice = "module",
    ):
        """Store what is given; nothing is computed.

        Args:
            model: The model.
            loss_function: The loss, called as ``loss_function(model(X), y)``.
            train_data: Batches ``(X, y)``, in the same order in each pass.
            checkpoints: State dictionaries, or files that ``torch.load`` reads as such.
            learning_rates: η of each. Default: 1.
            projection: Compare gradients along random directions, such as ``ProjectedGrad(256)``.
            params: Parameters to look at. Default: the trainable ones of the model.
            measure: As for :class:`~backpack.influence.Influence`.
            use_converter: The same.
            progress: The same.
            process_group: The same.

        Raises:
            ValueError: If a ``DataLoader`` shuffles, there is no checkpoint, not one learning rate
                for each, or the projection is of some samples alone.
        """
        options = (params, measure, use_converter, progress, process_group)
        super().__init__(model, loss_function, train_data, *options)
        if isinstance(checkpoints, Mapping):
            raise ValueError("TracIn needs a list of state dictionaries, got one: give [state].")
        self._checkpoints = list(checkpoints)
        count = len(self._checkpoints)
        self._rates = [1.0] * count if learning_rates is None else [*learning_rates]
        if not self._checkpoints or len(self._rates) != count:
            raise ValueError(
                f"Needs checkpoints, and a learning rate for each: got {len(self._checkpoints)} "
                f"and {len(self._rates)}."
            )
        self._projection = projection and _within(projection, self._objective.model)

    def _norm(self, weights: float) -> float:
        return 1.0

    def _each_batch(
        self, queries: Any, folder: str | Path | None
    ) -> Iterator[tuple[float, dict[str, Tensor]]]:
        if not isinstance(queries, (tuple, list)):
            check_not_shuffled("TracIn numbers queries", queries)
            queries = list(queries)  # read for each checkpoint: the same ones
        totals: list[tuple[float, dict[str, Tensor]]] = []
        for c, (checkpoint, rate) in enumerate(zip(self._checkpoints, self._rates, strict=True)):
            with self._at(checkpoint):
                own = self._of_process(folder)
                below = None if own is None else own / f"checkpoint{c:03d}"
                for i, (weight, found) in enumerate(self._at_checkpoint(queries, below)):
                    scaled = {name: rate * values for name, values in found.items()}
                    if not c:
                        totals.append((weight, scaled))
                    else:
                        before = totals[i][1]
                        totals[i] = weight, {n: before[n] + v for n, v in scaled.items()}
        yield from totals

    def _at_checkpoint(
        self, queries: Any, folder: Path | None
    ) -> Iterator[tuple[float, dict[str, Tensor]]]:
        of_queries, projection = self._of_queries(queries), self._projection
        flat = self._checked(flattened(of_queries))
        shards = self._shards(folder, flat, f"projection {projection}")
        if projection is None:
            along = [Directions(gradient, None) for gradient in of_queries]
            yield from self._kept(shards, partial(self._products, along))
        else:
            projected = self._of_queries(queries, projection)
            products = partial(self._projected_products, projection, projected)
            yield from self._kept(shards, products)

    def _projected_products(
        self, projection: ProjectedGrad, queries: Sequence[Tensor], X: Any, targets: Sequence[Any]
    ) -> tuple[float, list[Tensor]]:
        weight, rows = self._values(projection, X, targets, False)
        return weight, [q @ n.T for q, n in zip(queries, rows, strict=True)]

    def self_scores(self) -> Tensor:
        """Compute the influence of each training sample on its own loss, ``[N]``.

        ``sum_c η_c |∇ℓ_n(θ_c)|²``, high where a sample is hard to learn: an outlier, or a wrong
        label. Along a projection, if there is one.
        """
        ext = self._projection or BatchL2Grad()
        total: Tensor | None = None
        for checkpoint, rate in zip(self._checkpoints, self._rates, strict=True):
            found = []
            with self._at(checkpoint), self._objective.telling():
                for X, targets, counts in with_samples(self._objective):
                    squares = self._values(ext, X, targets, False)[1]
                    if self._projection is not None:
                        squares = [rows.square().sum(1) for rows in squares]
                    found.append(torch.stack(squares).sum(0)[: None if counts else 0])
            scores = rate * torch.cat(found)
            total = scores if total is None else total + scores
        assert total is not None  # there is a checkpoint
        return self._gathered([total])[0]

    @contextmanager
    def _at(self, checkpoint: Mapping[str, Tensor] | str | Path) -> Iterator[None]:
        """Give the model other parameters for a moment.

        Raises:
            ValueError: If the checkpoint is not that of the model.
        """
        model = self._objective.model
        # what is no tensor is the extra state of a module
        own = {
            name: x.clone() if isinstance(x, Tensor) else deepcopy(x)
            for name, x in model.state_dict().items()
        }
        state: Any = checkpoint
        if isinstance(checkpoint, (str, Path)):
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        if not isinstance(state, Mapping) or not set(own).issubset(state):
            _refuse_checkpoint(checkpoint, state, own)
        try:
            model.load_state_dict(state)
            yield
        finally:
            model.load_state_dict(own)


def _refuse_checkpoint(checkpoint: object, state: Any, own: Mapping[str, Tensor]) -> NoReturn:
    """Tell what a checkpoint is, in the place of a state dictionary of the model.

    Raises:
        ValueError: In any case.
    """
    where = f"the file {checkpoint}" if isinstance(checkpoint, (str, Path)) else "a checkpoint"
    entries: Mapping[Any, Any] = state if isinstance(state, Mapping) else {}
    inside = [k for k, v in entries.items() if isinstance(v, Mapping) and set(own).issubset(v)]
    has = f"the entries {', '.join(map(str, [*entries][:5]))}" if entries else type(state).__name__
    missing = ", ".join([name for name in own if name not in entries][:5])
    give = f"Give what is in its entry {inside[0]!r}." if inside else "Give model.state_dict()."
    raise ValueError(
        f"TracIn needs state dictionaries of the model, but {where} has {has}, without {missing}. "
        f"{give}"
    )


class ProjectedInfluence(Attribution):
    """Influence functions on random projections of the gradients.

    With the features ``φ_n``, the projected gradients of all parameters together, and the empirical
    Fisher information ``F = 1/W sum_n φ_n φ_nᵀ`` of these: ``s_qn = 1/W φ_qᵀ (F + λ I)⁻¹ φ_n``.
    Features of the training samples, ``[N, D]``, are computed once and kept.

    Source: Park, Georgiev, Ilyas, Leclerc, Madry, TRAK: attributing model behavior at scale (ICML
    2023), for one model and without its weights of the samples.

    Attributes:
        features: Those of the samples of this process. ``[N, D]``
        damping: λ.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        train_data: Iterable[Any],
        projection: ProjectedGrad | None = None,
        damping: float = 1e-3,
        params: Iterable[Parameter] | None = None,
        measure: Measure | None = None,
        use_converter: UseConverter = False,
        progress: bool = True,
        process_group: ProcessGroupChoice = "module",
    ):
        """Compute the features, in a pass over the data.

        Args:
            model: The trained model.
            loss_function: The loss, called as ``loss_function(model(X), y)``.
            train_data: Batches ``(X, y)``, not shuffled: samples are known by their place.
            projection: Along which directions. Default: ``ProjectedGrad(256)``.
            damping: λ, positive.
            params: Parameters to look at. Default: the trainable ones of the model.
            measure: As for :class:`~backpack.influence.Influence`.
            use_converter: The same.
            progress: The same.
            process_group: The same.

        Raises:
            ValueError: If a ``DataLoader`` shuffles, the damping is not positive, or the projection
                is of some samples alone.
        """
        options = (params, measure, use_converter, progress, process_group)
        super().__init__(model, loss_function, train_data, *options)
        if not damping > 0:
            raise ValueError(f"The damping has to be positive, got {damping}.")
        self._projection = _within(projection or ProjectedGrad(256), self._objective.model)
        self.damping = damping
        rows, self._weight = [], 0.0
        with self._objective.telling():
            for X, targets, counts in with_samples(self._objective):
                weight, found = self._values(self._projection, X, targets, False)
                self._weight += weight * counts
                rows.append(torch.stack(found).sum(0)[: None if counts else 0])
        self.features = torch.cat(rows)
        # there are often fewer samples than directions: rounding of F must not exceed λ
        is_double = self.features.device.type != "mps"
        wide = self.features.double() if is_double else at_least_single(self.features)
        with without_autocast():
            F, weight = self._objective.total(
                "features of ProjectedInfluence", [wide.T @ wide], self._weight
            )
        self._number_of_terms = self._objective.norm(weight)
        self._information = F / self._number_of_terms
        self._factored: tuple[float, Tensor] | None = None

    def _each_batch(
        self, queries: Any, folder: str | Path | None
    ) -> Iterator[tuple[float, dict[str, Tensor]]]:
        if folder is not None:
            raise ValueError("Features are kept: there is nothing to write to a folder.")
        self._check_weights()
        of_queries = torch.stack(self._of_queries(queries, self._projection)).sum(0)
        with without_autocast():
            scores = self._checked(of_queries) @ self._solved(self.features).T
        yield self._weight, {"": scores}

    def scores(self, queries: Any, by: By = "model", folder: str | Path | None = None) -> Any:
        """Compute ``[Q, N]`` as :meth:`~backpack.influence.Influence.scores`; not by parameters."""
        if by != "model":
            raise ValueError("Features are those of all parameters together: use by='model'.")
        return super().scores(queries, by, folder)

    def _solved(self, rows: Tensor) -> Tensor:
        known, F = self._factored, self._information
        if known is None or known[0] != self.damping:
            eye = torch.eye(len(F), dtype=F.dtype, device=F.device)
            known = float(self.damping), torch.linalg.cholesky(F + self.damping * eye)
            self._factored = known
        root = known[1]
        return torch.cholesky_solve(rows.T.to(root), root).T.to(rows)

    def self_scores(self) -> Tensor:
        """Compute the influence of each training sample on its own loss, ``[N]``."""
        own = (self.features * self._solved(self.features)).sum(1)
        return self._gathered([own])[0] / self._number_of_terms


def _within(projection: ProjectedGrad, model: Module) -> ProjectedGrad:
    """Return a projection with the names of a model's parameters; refuse one of some samples.

    The others would have no number.

    Raises:
        ValueError: If it is one.
        TypeError: If it is no projection.
    """
    if not isinstance(projection, ProjectedGrad):
        raise TypeError(f"projection is such as ProjectedGrad(256), got {projection!r}.")
    if projection.get_subsampling() is not None:
        raise ValueError(
            f"{projection!r} looks at some samples of each batch alone, but all are numbered. "
            "Leave subsampling out, and give the data that you want to compare."
        )
    return projection.within(model)

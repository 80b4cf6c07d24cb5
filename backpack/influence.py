r"""Which training samples move a prediction.

Scores are the change of a query's loss that is expected if a sample is left out of the training
data: the sample is helpful where it is positive, harmful where it is negative.

.. math:: s_{qn} = \frac{1}{W} \nabla\ell_q^\top (H + \lambda I)^{-1} \nabla\ell_n

H is the curvature of the loss over the training data, :math:`\ell_n` the sum of the terms of the
loss that belong to sample n, and W what the mean divides by (1 for a sum): scores do not depend on
how the loss is reduced. λ has the scale of the loss; it belongs to H if training had that weight
decay.

>>> import torch
>>> from torch import nn
>>> from backpack.influence import Influence
>>> model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
>>> data = [(torch.rand(8, 5), torch.randint(3, (8,))) for _ in range(3)]
>>> influence = Influence(model, nn.CrossEntropyLoss(), data, damping=0.1)
>>> influence.scores((torch.rand(2, 5), torch.tensor([0, 2]))).shape
torch.Size([2, 24])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from backpack import backpack
from backpack.core.engine.factored import FactoredGrad
from backpack.extensions import BatchGrad, ProjectedGrad
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from backpack.linalg.approximations import KroneckerGGN
from backpack.linalg.extended import UseConverter, built, extended
from backpack.linalg.objective import Objective
from backpack.linalg.operators import LinearOperator
from backpack.linalg.structured import SpectralOperator
from backpack.utils.files import load_tensors, save_tensors

__all__ = ["Influence", "ProjectedInfluence", "TracIn"]

By = Literal["model", "module", "parameter"]
# Of the loss of a query, in the place of the loss function: a sum over the queries.
Measure = Callable[..., Tensor]
# Entries of dense gradients that are kept at once.
BLOCK_ENTRIES = 2**25


class _Attribution:
    """What all kinds share: gradients of samples and queries, and passes over the data."""

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        train_data: Iterable[Any],
        params: Iterable[Parameter] | None,
        measure: Measure | None,
        use_converter: UseConverter,
        progress: bool,
    ):
        if isinstance(train_data, Iterator):
            raise ValueError(
                "The data is an iterator, which can be read only once, but it is read several "
                "times: pass a DataLoader (shuffle=False) or a list."
            )
        self._objective = Objective(model, loss_function, train_data, params, progress)
        self._measure = measure
        self._use_converter = use_converter
        names = {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}
        self.names = [names[id(p)] for p in self._objective.params]

    def scores(self, queries: Any, by: By = "model", folder: str | Path | None = None) -> Any:
        """Compute the influence of all training samples on queries.

        Args:
            queries: A batch ``(X, y)``, or several of them: Q queries.
            by: ``"module"`` and ``"parameter"`` say what each of these contributes.
            folder: Where the results of each batch are written. What is there already is read
                instead of computed: an interrupted program goes on where it was.

        Returns:
            ``[Q, N]``, samples in the order of the data; or a dictionary of these, by name.

        Raises:
            ValueError: If the folder belongs to other queries, data or options.
        """
        parts: dict[str, list[Tensor]] = {}
        weights = 0.0
        for weight, found in self._each_batch(queries, folder):
            weights += weight
            for name, values in _grouped(found, by).items():
                parts.setdefault(name, []).append(values)
        norm = self._norm(weights)
        scores = {name: torch.cat(values, 1) / norm for name, values in parts.items()}
        return scores[""] if by == "model" else scores

    def top(
        self, k: int, queries: Any, harmful: bool = False, folder: str | Path | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find the samples of the largest influence; others are not kept.

        Args:
            k: How many, for each query.
            queries: As for :meth:`scores`, or scores ``[Q, N]``.
            harmful: Find the most negative ones instead.
            folder: As for :meth:`scores`.

        Returns:
            Scores and numbers of the samples, the largest (or most negative) first: ``[Q, k]``
            each.

        Raises:
            ValueError: If there are less than k samples.
        """
        sign = -1.0 if harmful else 1.0
        best: tuple[Tensor, Tensor] | None = None
        norm, start, weights = 1.0, 0, 0.0
        if isinstance(queries, Tensor):
            batches: Iterable[tuple[float, dict[str, Tensor]]] = [(0.0, {"": queries})]
        else:
            batches = self._each_batch(queries, folder)
        for weight, found in batches:
            weights += weight
            values = sign * _grouped(found, "model")[""]
            numbers = torch.arange(start, start + values.shape[1], device=values.device)
            start += values.shape[1]
            numbers = numbers.expand_as(values)
            if best is not None:
                values, numbers = torch.cat([best[0], values], 1), torch.cat([best[1], numbers], 1)
            values, places = values.topk(min(k, values.shape[1]), dim=1)
            best = values, numbers.gather(1, places)
        if best is None or best[0].shape[1] < k:
            raise ValueError(f"There are less than {k} samples: {start}.")
        norm = 1.0 if isinstance(queries, Tensor) else self._norm(weights)
        return sign * best[0] / norm, best[1]

    def _norm(self, weights: float) -> float:
        """Return what sums over terms are divided by."""
        return self._objective.norm(weights)

    def _each_batch(
        self, queries: Any, folder: str | Path | None
    ) -> Iterator[tuple[float, dict[str, Tensor]]]:
        """Yield for each batch its weight, and by parameter ``[Q, n]``."""
        raise NotImplementedError

    def _values(
        self, ext: FirstOrderBackpropExtension, X: Any, targets: Sequence[Any], is_query: bool
    ) -> tuple[float, list[Any]]:
        """Return a batch's weight, and for each parameter what an extension makes of ``∇ℓ_n``."""
        objective = self._objective
        gradients = [p.grad for p in objective.params]
        ext.savefield = "_backpack_influence"
        with (
            extended(objective.model, self._use_converter or "record") as model,
            extended(objective.loss_function, False) as loss_function,
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            try:
                with backpack(ext):
                    output = model(X)
                    if is_query and self._measure is not None:
                        weight, loss = 1.0, self._measure(output, *targets)
                    else:
                        weight = objective.weight(output, targets)
                        loss = loss_function(output, *targets)
                        # a sum of the terms; if no target counts, of nothing
                        loss = weight * loss if weight else 0.0 * output.sum()
                    loss.backward(inputs=list(objective.params))
            finally:
                values = [vars(p).pop(ext.savefield, None) for p in objective.params]
                for p, gradient in zip(objective.params, gradients, strict=True):
                    p.grad = gradient
        unused = [n for n, value in zip(self.names, values, strict=True) if value is None]
        if unused:
            raise ValueError(
                f"The loss does not depend on {', '.join(unused)} through an extended module. "
                "Leave them out (params=...)."
            )
        return weight, values

    def _gradients(
        self, X: Any, targets: Sequence[Any], is_query: bool = False
    ) -> tuple[float, list[FactoredGrad]]:
        weight, values = self._values(BatchGrad(factored=True), X, targets, is_query)
        return weight, [FactoredGrad.of(value) for value in values]

    def _of_queries(self, queries: Any) -> list[Tensor]:
        """Return the gradients of all queries, for each parameter ``[Q, *p]``."""
        found = [
            [gradient.dense() for gradient in self._gradients(X, targets, is_query=True)[1]]
            for X, targets in self._read(queries)
        ]
        return [torch.cat(pieces) for pieces in zip(*found, strict=True)]

    def _read(self, queries: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Yield the batches of queries, on the device of the parameters."""
        is_one = isinstance(queries, tuple) and not isinstance(queries[0], (tuple, list))
        batches = [queries] if is_one else queries
        own = self._objective
        yield from Objective(own.model, own.loss_function, batches, own.params, False)


class Influence(_Attribution):
    """Influence functions: a Newton step away from a sample.

    Curvature is a snapshot of the model as it is when this is built. Gradients of samples are kept
    as factors where that is smaller; those of queries as they are, or at low rank.

    Source: Koh, Liang, Understanding black-box predictions via influence functions (ICML 2017);
    with Kronecker factors Grosse et al., Studying large language model generalization with
    influence functions (arXiv 2308.03296, 2023).

    Attributes:
        curvature: The operator H; None for the identity.
        damping: λ.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        train_data: Iterable[Any],
        curvature: Callable[..., LinearOperator]
        | LinearOperator
        | Literal["identity"] = KroneckerGGN,
        damping: float | None = None,
        params: Iterable[Parameter] | None = None,
        measure: Measure | None = None,
        query_rank: int | None = None,
        tolerance: float = 1e-6,
        use_converter: UseConverter = False,
        progress: bool = True,
    ):
        """Compute the curvature, in a pass over the data.

        Args:
            model: The trained model.
            loss_function: The loss, called as ``loss_function(model(X), y)``.
            train_data: Batches ``(X, y)``, in the same order in each pass.
            curvature: A class such as :class:`~backpack.linalg.KroneckerGGN` or
                :class:`~backpack.linalg.DiagonalGGN`, called with model, loss, data, ``params``,
                ``progress`` and, if it has that argument, ``use_converter``; or an operator. One
                without an inverse
                (:class:`~backpack.linalg.GGN`) is solved with conjugate gradients. ``"identity"``:
                inner products of gradients, without damping.
            damping: λ. Default: a tenth of the mean eigenvalue of a structured operator.
            params: Parameters that may move. Default: the trainable ones of the model.
            measure: What is looked at in the place of a query's loss: called as ``measure(model(X),
                y)``, returns a sum over the queries.
            query_rank: Keep for each query and weight ``[O, ...]`` so many singular vectors of the
                preconditioned gradient. Default: all of it.
            tolerance: Relative residual of conjugate gradients.
            use_converter: How functions in the forward are seen: recorded while it runs (default),
                or ``"trace"``, see :func:`backpack.extend`.
            progress: Show a bar in a terminal for passes of more than a second (needs ``tqdm``).

        Raises:
            ValueError: If damping is missing or negative, the operator has another size, or as for
                :class:`~backpack.linalg.MatrixFreeOperator`.
        """
        super().__init__(model, loss_function, train_data, params, measure, use_converter, progress)
        if query_rank is not None and query_rank < 1:
            raise ValueError(f"query_rank has to be at least 1, got {query_rank}.")
        self._query_rank, self._tolerance = query_rank, tolerance
        own = self._objective.params
        self.curvature: LinearOperator | None = None
        if isinstance(curvature, LinearOperator):
            self.curvature = curvature
        elif curvature != "identity":
            options = (own, use_converter, progress)
            self.curvature = built(curvature, model, loss_function, train_data, *options)
        size = sum(p.numel() for p in own)
        if self.curvature is not None and self.curvature.shape != (size, size):
            raise ValueError(
                f"The parameters have {size} entries, which {self.curvature!r} does not fit."
            )
        self.damping = self._chosen(damping)

    def _chosen(self, damping: float | None) -> float:
        if self.curvature is None:
            return 0.0
        if damping is None:
            if not isinstance(self.curvature, SpectralOperator):
                raise ValueError(f"{self.curvature!r} needs a damping.")
            damping = float(self.curvature.trace()) / self.curvature.shape[0] / 10
        if damping < 0:
            raise ValueError(f"The damping has to be at least 0, got {damping}.")
        return damping

    def precondition(self, vectors: Tensor) -> Tensor:
        """Return ``(H + λ I)⁻¹ V``, ``[P, V] -> [P, V]``."""
        if self.curvature is None:
            return vectors
        if isinstance(self.curvature, SpectralOperator):
            return self._inverse() @ vectors
        return self.curvature.solve(vectors, self.damping, self._tolerance)

    def _inverse(self) -> SpectralOperator:
        known: tuple[float, SpectralOperator] | None = vars(self).get("_inverted")
        if known is None or known[0] != self.damping:
            known = self.damping, self.curvature.inverse(self.damping)  # type: ignore[union-attr]
            self._inverted = known
        return known[1]

    def _each_batch(
        self, queries: Any, folder: str | Path | None
    ) -> Iterator[tuple[float, dict[str, Tensor]]]:
        gradients = self._of_queries(queries)
        flat = torch.cat([g.reshape(len(g), -1) for g in gradients], 1)
        directions = self.precondition(flat.T).T  # [Q, P]
        shards = _Shards(folder, directions, f"damping {self.damping}, rank {self._query_rank}")
        pieces = directions.split([p.numel() for p in self._objective.params], 1)
        along = [
            _Directions(piece.reshape(-1, *p.shape), self._query_rank)
            for piece, p in zip(pieces, self._objective.params, strict=True)
        ]
        for X, targets in self._objective:
            found = shards.read(X, targets)
            if found is None:
                weight, of_samples = self._gradients(X, targets)
                products = [d.products(g).T for d, g in zip(along, of_samples, strict=True)]
                found = weight, dict(zip(self.names, products, strict=True))
                shards.write((X, targets), *found)
            yield found

    def self_scores(self) -> Tensor:
        """Compute the influence of each training sample on its own loss, ``[N]``.

        High where a sample is learned by heart: an outlier, or a wrong label.
        """
        found, weights = [], 0.0
        step = max(1, BLOCK_ENTRIES // sum(p.numel() for p in self._objective.params))
        for X, targets in self._objective:
            weight, gradients = self._gradients(X, targets)
            weights += weight
            for start in range(0, len(gradients[0]), step):
                some = slice(start, start + step)
                dense = [gradient[some].dense() for gradient in gradients]
                g = torch.cat([part.reshape(len(part), -1) for part in dense], 1)
                found.append((g * self.precondition(g.T).T).sum(1))
        return torch.cat(found) / self._norm(weights)

    def save(self, path: str | Path) -> None:
        """Write curvature and damping to a file: of ``safetensors``, if that is installed.

        Raises:
            ValueError: If the curvature is matrix-free.
        """
        tensors: dict[str, Tensor] = {}
        if isinstance(self.curvature, SpectralOperator):
            tensors["spectrum"] = self.curvature.spectrum
            order = getattr(self.curvature, "order", None)
            if order is not None:
                tensors["order"] = order
            for i, block in enumerate(self.curvature.bases):
                tensors.update({f"bases.{i}.{j}": basis for j, basis in enumerate(block)})
        elif self.curvature is not None:
            raise ValueError(f"{self.curvature!r} is matrix-free: there are no factors to save.")
        save_tensors(path, tensors, {"damping": repr(self.damping), **self._shapes()})

    def _shapes(self) -> dict[str, str]:
        own = self._objective.params
        shapes = [f"{n} {list(p.shape)}" for n, p in zip(self.names, own, strict=True)]
        return {"parameters": "; ".join(shapes)}

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Module,
        loss_function: Module,
        train_data: Iterable[Any],
        params: Iterable[Parameter] | None = None,
        **options: Any,
    ) -> Influence:
        """Read curvature and damping from a file, in the place of a pass over the data.

        Args:
            path: What :meth:`save` has written.
            model: The model, with the same parameters.
            loss_function: The loss.
            train_data: Batches ``(X, y)``.
            params: The same parameters.
            **options: Further options of the class, such as ``measure``.

        Raises:
            ValueError: If the parameters are others.
        """
        tensors, metadata = load_tensors(path)
        made = cls(model, loss_function, train_data, "identity", None, params, **options)
        if made._shapes()["parameters"] != metadata["parameters"]:
            raise ValueError(
                f"{path} is of other parameters: {metadata['parameters']}. These are "
                f"{made._shapes()['parameters']}."
            )
        device = made._objective.params[0].device
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        if "spectrum" in tensors:
            made.curvature = _spectral(tensors)
        made.damping = float(metadata["damping"])
        return made


class TracIn(_Attribution):
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
            measure: As for :class:`Influence`.
            use_converter: The same.
            progress: The same.

        Raises:
            ValueError: If there is no checkpoint, or not one learning rate for each.
        """
        super().__init__(model, loss_function, train_data, params, measure, use_converter, progress)
        self._checkpoints = list(checkpoints)
        self._rates = [1.0] * len(checkpoints) if learning_rates is None else [*learning_rates]
        if not checkpoints or len(self._rates) != len(self._checkpoints):
            raise ValueError(
                f"Needs checkpoints, and a learning rate for each: got {len(self._checkpoints)} "
                f"and {len(self._rates)}."
            )
        self._projection = projection

    def _norm(self, weights: float) -> float:
        return 1.0

    def _each_batch(
        self, queries: Any, folder: str | Path | None
    ) -> Iterator[tuple[float, dict[str, Tensor]]]:
        totals: list[tuple[float, dict[str, Tensor]]] = []
        for c, (checkpoint, rate) in enumerate(zip(self._checkpoints, self._rates, strict=True)):
            with self._at(checkpoint):
                below = None if folder is None else Path(folder) / f"checkpoint{c:03d}"
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
        of_queries = self._of_queries(queries)
        flat = torch.cat([g.reshape(len(g), -1) for g in of_queries], 1)
        shards = _Shards(folder, flat, f"projection {self._projection}")
        along = [_Directions(gradient, None) for gradient in of_queries]
        if self._projection is not None:
            batches = list(self._read(queries))
            found = [self._values(self._projection, *batch, True)[1] for batch in batches]
            projected = [torch.cat(pieces) for pieces in zip(*found, strict=True)]
        for X, targets in self._objective:
            known = shards.read(X, targets)
            if known is None:
                if self._projection is None:
                    weight, of_samples = self._gradients(X, targets)
                    products = [d.products(g).T for d, g in zip(along, of_samples, strict=True)]
                else:
                    weight, rows = self._values(self._projection, X, targets, False)
                    products = [q @ n.T for q, n in zip(projected, rows, strict=True)]
                known = weight, dict(zip(self.names, products, strict=True))
                shards.write((X, targets), *known)
            yield known

    @contextmanager
    def _at(self, checkpoint: Mapping[str, Tensor] | str | Path) -> Iterator[None]:
        """Give the model other parameters for a moment."""
        model = self._objective.model
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state: Any = checkpoint
        if isinstance(checkpoint, (str, Path)):
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        try:
            model.load_state_dict(state)
            yield
        finally:
            model.load_state_dict(own)


class ProjectedInfluence(_Attribution):
    """Influence functions on random projections of the gradients.

    With the features ``φ_n``, the projected gradients of all parameters together, and the empirical
    Fisher information ``F = 1/W sum_n φ_n φ_nᵀ`` of these: ``s_qn = 1/W φ_qᵀ (F + λ I)⁻¹ φ_n``.
    Features of the training samples, ``[N, D]``, are computed once and kept.

    Source: Park, Georgiev, Ilyas, Leclerc, Madry, TRAK: attributing model behavior at scale (ICML
    2023), for one model and without its weights of the samples.

    Attributes:
        features: ``[N, D]``.
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
    ):
        """Compute the features, in a pass over the data.

        Args:
            model: The trained model.
            loss_function: The loss, called as ``loss_function(model(X), y)``.
            train_data: Batches ``(X, y)``.
            projection: Along which directions. Default: ``ProjectedGrad(256)``.
            damping: λ, positive.
            params: Parameters to look at. Default: the trainable ones of the model.
            measure: As for :class:`Influence`.
            use_converter: The same.
            progress: The same.

        Raises:
            ValueError: If the damping is not positive.
        """
        super().__init__(model, loss_function, train_data, params, measure, use_converter, progress)
        if not damping > 0:
            raise ValueError(f"The damping has to be positive, got {damping}.")
        self._projection = ProjectedGrad(256) if projection is None else projection
        self.damping = damping
        rows, weights = [], []
        for X, targets in self._objective:
            weight, found = self._values(self._projection, X, targets, False)
            weights.append(weight)
            rows.append(torch.stack(found).sum(0))
        self.features = torch.cat(rows)
        self._weight = self._norm(sum(weights))
        F = self.features.T @ self.features / self._weight
        eye = torch.eye(len(F), dtype=F.dtype, device=F.device)
        self._root = torch.linalg.cholesky(F + damping * eye)

    def _each_batch(
        self, queries: Any, folder: str | Path | None
    ) -> Iterator[tuple[float, dict[str, Tensor]]]:
        if folder is not None:
            raise ValueError("Features are kept: there is nothing to write to a folder.")
        found = [self._values(self._projection, *batch, True)[1] for batch in self._read(queries)]
        of_queries = torch.cat([torch.stack(values).sum(0) for values in found])
        yield self._weight, {"": of_queries @ self._solved(self.features).T}

    def scores(self, queries: Any, by: By = "model", folder: str | Path | None = None) -> Any:
        """Compute ``[Q, N]`` as :meth:`Influence.scores`; not by parameters."""
        if by != "model":
            raise ValueError("Features are those of all parameters together: use by='model'.")
        return super().scores(queries, by, folder)

    def _solved(self, rows: Tensor) -> Tensor:
        return torch.cholesky_solve(rows.T, self._root).T

    def self_scores(self) -> Tensor:
        """Compute the influence of each training sample on its own loss, ``[N]``."""
        return (self.features * self._solved(self.features)).sum(1) / self._weight


class _Directions:
    """Directions ``[Q, *p]`` of a parameter: as they are, or sums of outer products."""

    def __init__(self, directions: Tensor, rank: int | None):
        self.dense: Tensor | None = directions
        if rank is None or directions.dim() < 3 or rank >= min(directions.flatten(2).shape[1:]):
            return
        left, values, right = torch.linalg.svd(directions.flatten(2), full_matrices=False)
        self.dense, self.rank = None, rank
        self.a = (left * values.unsqueeze(1)).mT[:, :rank].flatten(0, 1)  # [Q·r, O]
        self.b = right[:, :rank].flatten(0, 1)  # [Q·r, I]

    def products(self, gradients: FactoredGrad) -> Tensor:
        """Return the inner products with N gradients, ``[N, Q]``."""
        if self.dense is not None:
            return gradients.project(self.dense)
        return gradients.project_outer(self.a, self.b).unflatten(1, (-1, self.rank)).sum(2)


def _signature(rows: Tensor) -> Tensor:
    """Return what tells rows from others: size, length, and a projection of what it is divided by.

    Args:
        rows: ``[R, P]``

    Returns:
        ``[R, 3]``
    """
    wide = rows.double().cpu()
    direction = torch.randn(wide.shape[1], generator=torch.Generator().manual_seed(0)).double()
    norms = wide.norm(dim=1)
    projected = wide @ direction / norms.clamp(min=1e-300)
    return torch.stack([torch.full_like(norms, wide.shape[1]), norms, projected], 1)


class _Shards:
    """Results of each batch in a file of its own, if there is a folder.

    Args:
        folder: Where.
        queries: ``[Q, P]``, what training samples are compared with.
        options: What the results depend on, besides.
    """

    def __init__(self, folder: str | Path | None, queries: Tensor, options: str):
        self.folder = None if folder is None else Path(folder)
        self.signature, self.options = _signature(queries.detach().flatten(1)), options
        self.number, self.device = 0, queries.device

    def _path(self) -> Path | None:
        return None if self.folder is None else self.folder / f"{self.number:06d}.safetensors"

    @staticmethod
    def _sign(data: Any) -> Tensor:
        leaves = [x for x in tree_leaves(data) if isinstance(x, Tensor)]
        return torch.cat([_signature(x.detach().reshape(1, -1)) for x in leaves])

    def read(self, *data: Any) -> tuple[float, dict[str, Tensor]] | None:
        """Return the results of the next batch, if they are there."""
        path = self._path()
        if path is None or not path.exists():
            return None
        tensors, metadata = load_tensors(path)
        of_data, of_queries = tensors.pop("_data"), tensors.pop("_queries")
        options = metadata["options"] == self.options
        for known, now, is_same, what in (
            (of_data, self._sign(data), True, "data"),
            (of_queries, self.signature, options, "queries, options or parameters"),
        ):
            is_same = is_same and known.shape == now.shape
            if not is_same or not torch.allclose(known.to(now), now, rtol=1e-3, atol=1e-3):
                raise ValueError(f"{path} is of other {what}. Use another folder, or remove it.")
        self.number += 1
        return float(metadata["weight"]), {n: t.to(self.device) for n, t in tensors.items()}

    def write(self, data: Any, weight: float, found: Mapping[str, Tensor]) -> None:
        """Keep the results of the next batch."""
        path = self._path()
        if path is not None:
            own = {**found, "_data": self._sign(data), "_queries": self.signature}
            save_tensors(path, own, {"weight": repr(weight), "options": self.options})
        self.number += 1


def _grouped(found: Mapping[str, Tensor], by: By) -> dict[str, Tensor]:
    """Add up what parameters contribute: of the whole model under the name ``""``."""
    if by not in ("model", "module", "parameter"):
        raise ValueError(f"by is 'model', 'module' or 'parameter', got {by!r}.")
    groups: dict[str, Tensor] = {}
    for name, values in found.items():
        group = {"model": "", "module": name.rpartition(".")[0], "parameter": name}[by]
        groups[group] = groups[group] + values if group in groups else values
    return groups


def _spectral(tensors: Mapping[str, Tensor]) -> SpectralOperator:
    """Put an operator together from eigenvalues and eigenvectors."""
    blocks: dict[int, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("bases."):
            _, i, j = name.split(".")
            blocks.setdefault(int(i), {})[int(j)] = tensor
    bases = [[block[j] for j in sorted(block)] for _, block in sorted(blocks.items())]
    options = {"order": tensors["order"]} if "order" in tensors else {}
    return SpectralOperator(tensors["spectrum"], bases, **options)

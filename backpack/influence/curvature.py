"""Influence functions: a Newton step away from a sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.distributed.data_group import ProcessGroupChoice
from backpack.influence.attribution import Attribution, By, Directions, Measure, with_samples
from backpack.influence.positions import PositionProducts
from backpack.linalg.approximations import KroneckerGGN
from backpack.linalg.extended import UseConverter, built
from backpack.linalg.objective import flattened
from backpack.linalg.operators import LinearOperator
from backpack.linalg.structured import SpectralOperator
from backpack.utils.files import load_tensors, save_tensors

# Entries of dense gradients that are kept at once.
BLOCK_ENTRIES = 2**25


class Influence(Attribution):
    """Influence functions: a Newton step away from a sample.

    Scores are the change of a query's loss that is expected if a training sample is left out:
    positive where the sample helps, negative where it does harm. With a ``measure``, they are the
    change of that. Structured curvature is a snapshot of the model as it is when this is built:
    other weights are an error later. Gradients of samples are kept as factors where that is
    smaller; those of queries as they are, or at low rank.

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
        process_group: ProcessGroupChoice = "module",
    ):
        """Compute the curvature, in a pass over the data.

        Args:
            model: The trained model.
            loss_function: The loss, called as ``loss_function(model(X), y)``.
            train_data: Batches ``(X, y)``, in the same order in each pass.
            curvature: A class such as :class:`~backpack.linalg.KroneckerGGN` or
                :class:`~backpack.linalg.DiagonalGGN`, called with model, loss, data, ``params``,
                ``progress`` and, if it has that argument, ``use_converter``; or an operator, of
                a loss with the same reduction. One without an inverse
                (:class:`~backpack.linalg.GGN`) is solved with conjugate gradients. ``"identity"``:
                inner products of gradients, without damping.
            damping: λ. Default: a tenth of the mean eigenvalue of a structured operator.
            params: Parameters that may move. Default: the trainable ones of the model.
            measure: What is looked at in the place of a query's loss: called as ``measure(model(X),
                y)``, returns a sum over the queries (a mean is an error).
            query_rank: Keep for each query and weight ``[O, ...]`` so many singular vectors of the
                preconditioned gradient. Default: all of it.
            tolerance: Relative residual of conjugate gradients.
            use_converter: How functions in the forward are seen: recorded while it runs (default),
                or ``"trace"``, see :func:`backpack.extend`.
            progress: Show a bar in a terminal for passes of more than a second (needs ``tqdm``).
            process_group: As for :class:`~backpack.linalg.GGN`: processes with a part of the
                training data each. All have to call methods together, with the same queries;
                results are those of all data, the same on all.

        Raises:
            RuntimeError: If batches differ between passes: then samples have no numbers.
            ValueError: If a ``DataLoader`` shuffles, damping is missing or negative, the operator
                has another size or is known to be of another reduction, or as for
                :class:`~backpack.linalg.MatrixFreeOperator`.
        """
        options = (params, measure, use_converter, progress, process_group)
        super().__init__(model, loss_function, train_data, *options)
        if query_rank is not None and query_rank < 1:
            raise ValueError(f"query_rank has to be at least 1, got {query_rank}.")
        self._query_rank, self._tolerance = query_rank, tolerance
        own = self._objective.params
        self.curvature: LinearOperator | None = None
        if isinstance(curvature, LinearOperator) or curvature != "identity":
            inner, choice = self._objective.model, self._objective.process_group
            how = (own, use_converter, progress, choice)
            self.curvature = built(curvature, inner, loss_function, self._objective.data, *how)
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
                raise ValueError(
                    f"{self.curvature!r} needs a damping, Influence(..., damping=...): the default "
                    "is a tenth of the mean eigenvalue, which structured curvature alone knows."
                )
            damping = float(self.curvature.trace()) / self.curvature.shape[0] / 10
        if damping < 0:
            raise ValueError(f"The damping has to be at least 0, got {damping}.")
        return float(damping)

    def precondition(self, vectors: Tensor) -> Tensor:
        """Return ``(H + λ I)⁻¹ V``, ``[P, V] -> [P, V]``."""
        if self.curvature is None:
            return vectors
        if isinstance(self.curvature, SpectralOperator):
            return self._inverse() @ vectors
        return self.curvature.solve(vectors, self.damping, self._tolerance)

    def _inverse(self) -> SpectralOperator:
        damping, curvature, inverse = vars(self).get("_inverted", (None, None, None))
        if damping != self.damping or curvature is not self.curvature:
            inverse = self.curvature.inverse(self.damping)  # type: ignore[union-attr]
            self._inverted = self.damping, self.curvature, inverse
        return inverse

    def token_scores(self, queries: Any, by: By = "model", folder: str | Path | None = None) -> Any:
        """Compute what each position (token) of the training samples contributes to their scores.

        A layer at T positions has as many terms in its gradient, which reach it from all that
        follows: in a language model, the term of a token has the loss of later tokens that look at
        it as well. Where positions do not meet, it is the influence of the token's own loss.

        The positions of a layer are numbered as its output has them, along the last axis first:
        with the output ``[N, T1, T2, O]`` (or ``[N·T1, T2, O]``, or ``[N, T1·T2, O]``), position
        ``(t1, t2)`` is ``t1 · T2 + t2``, and ``scores.unflatten(2, (T1, T2))`` has both axes again.
        Layers are added up position by position. With axes of other sizes (``[N, T2, T1, O]``, or
        windows ``[N·W, T, O]``) that is an error. A model that changes the order and keeps the
        sizes in between (``flip``, ``roll``, the transpose of a square, as many windows as a
        window has rows) is not noticed: look at its layers with ``by="parameter"``.

        Args:
            queries: As for :meth:`scores`.
            by: The same. Layers that are added up need the same positions.
            folder: The same, not the same folder.

        Returns:
            ``[Q, N, T]``, which sums over T to :meth:`scores`; zero at the end of each axis of
            positions for samples from batches with fewer. Or a dictionary of these, by name.

        Raises:
            NotImplementedError: If a parameter belongs to another layer than ``Linear``,
                ``Embedding``, ``LayerNorm`` and ``RMSNorm``: leave it out (``params=``).
            ValueError: If positions differ, or as for :meth:`scores`.
        """
        return self._joined(self._each_batch(queries, folder, by_token=True), by)

    def _each_batch(
        self, queries: Any, folder: str | Path | None, by_token: bool = False
    ) -> Iterator[tuple[float, dict[str, Tensor]]]:
        if isinstance(self.curvature, SpectralOperator):
            self._check_weights()
        flat = self._checked(flattened(self._of_queries(queries)))  # [Q, P]
        # with an operator of one process, these would be others on each
        directions = self._checked(self.precondition(flat.T).T)
        options = f"damping {self.damping}, rank {self._query_rank}"
        own_folder = self._of_process(folder)
        shards = self._shards(own_folder, directions, options + ", by token" * by_token)
        own = self._objective
        along = [Directions(each, self._query_rank) for each in own.vectors(directions.T)]
        if by_token:
            ext = PositionProducts({p: d.whole() for p, d in zip(own.params, along, strict=True)})
            yield from self._kept(shards, partial(self._values, ext, is_query=False))
        else:
            yield from self._kept(shards, partial(self._products, along))

    def self_scores(self) -> Tensor:
        """Compute the influence of each training sample on its own loss, ``[N]``.

        High where a sample is memorised: an outlier, or a wrong label.

        Raises:
            NotImplementedError: On several processes with a matrix-free curvature.
        """
        known = self.curvature is None or isinstance(self.curvature, SpectralOperator)
        if self._objective.group is not None and not known:
            raise NotImplementedError(
                f"self_scores() on several processes needs a curvature with an inverse: with "
                f"{self.curvature!r}, all would have to solve for the same vectors at the same "
                "time, but each has samples of its own. Use KroneckerGGN."
            )
        found, weights = [], 0.0
        step = max(1, BLOCK_ENTRIES // sum(p.numel() for p in self._objective.params))
        with self._objective.telling():
            if isinstance(self.curvature, SpectralOperator):
                self._check_weights()
            for X, targets, counts in with_samples(self._objective):
                weight, gradients = self._gradients(X, targets)
                weights += weight * counts
                for start in range(0, len(gradients[0]), step):
                    some = slice(start, start + step)
                    g = flattened(gradient[some].dense() for gradient in gradients)
                    found.append((g * self.precondition(g.T).T).sum(1)[: None if counts else 0])
        norm = self._norm(weights)
        return self._gathered([torch.cat(found)])[0] / norm

    def save(self, path: str | Path) -> None:
        """Write curvature and damping to a file: of ``safetensors``, if that is installed.

        Of several processes, the first one writes.

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
        if not self._objective.rank:
            known = {"damping": repr(float(self.damping)), "weights": json.dumps(self._weights)}
            known["reduction"] = str(self._objective.reduction)
            save_tensors(path, tensors, {**known, **self._shapes()})

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
            ValueError: If the parameters are others, or the loss has another reduction.
        """
        tensors, metadata = load_tensors(path)
        made = cls(model, loss_function, train_data, "identity", None, params, **options)
        if made._shapes()["parameters"] != metadata["parameters"]:
            raise ValueError(
                f"{path} is of other parameters: {metadata['parameters']}. These are "
                f"{made._shapes()['parameters']}."
            )
        own = str(made._objective.reduction)
        known = metadata.get("reduction", own)
        if "spectrum" in tensors and known != own:
            raise ValueError(
                f"{path} has the curvature of a loss with reduction={known!r}, but "
                f"{type(loss_function).__name__} here has reduction={own!r}: the scale would be "
                "wrong. Load it with the loss that it was saved with."
            )
        device = made._objective.params[0].device
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        if "spectrum" in tensors:
            made.curvature = _spectral(tensors)
        made.damping = float(metadata["damping"])
        if "weights" in metadata:
            made._weights = json.loads(metadata["weights"])
        return made


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

"""Eigenvalues and eigenvectors of the GGN of a batch, from inner products of its columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack import backpack
from backpack.core.engine.factored import FactoredGrad
from backpack.core.values import at_least_single
from backpack.extensions import BatchGrad, SqrtGGNExact, SqrtGGNMC
from backpack.linalg.extended import UseConverter, extended
from backpack.linalg.objective import Objective, output_of
from backpack.linalg.operators import LinearOperator
from backpack.linalg.passes import values_of
from backpack.utils.autocast import without_autocast

Per = Literal["model", "parameter"] | Sequence[Sequence[Parameter]]


@dataclass
class _Part:
    """What is known of one parameter.

    Attributes:
        entries: Where it is in vectors.
        root: Columns ``V_vn``, V·N of them.
        gradients: Individual gradients.
        samples: N of the block; a parameter may have several rows for each.
    """

    entries: slice
    root: FactoredGrad
    gradients: FactoredGrad
    samples: int = 0

    @property
    def rows(self) -> int:
        """Number of rows that are told apart here, a multiple of N."""
        return len(self.root) // self.root.columns

    def summed(self, products: Tensor) -> Tensor:
        """Sum what belongs to the rows of a sample: to ``[V·N, *]``."""
        by_row = products.unflatten(0, (self.root.columns, self.samples, -1))
        return by_row.sum(2).flatten(0, 1)

    def gram(self) -> Tensor:
        """Return the inner products of the columns, ``[V·N, V·N]``."""
        return self.summed(self.summed(self.root.gram()).T)

    def combined(self, weights: Tensor) -> Tensor:
        """Return weighted sums of the columns, ``[K, V·N]`` to ``[K, P]``."""
        of_rows = weights.repeat_interleave(self.rows // self.samples, 1)
        return self.root.weighted_sum(of_rows).reshape(len(weights), self.root.shape[1:].numel())

    def along(self, directions: Tensor) -> Tensor:
        """Return inner products of the columns with directions, ``[P, D]`` to ``[V·N, D]``."""
        stacked = directions[self.entries].T.reshape(directions.shape[1], *self.root.shape[1:])
        return self.summed(self.root.project(stacked))


class _Block:
    """The GGN of some parameters: ``W Wᵀ`` with the columns of W.

    Attributes:
        parts: The parameters.
        eigenvalues: Those other than zero, ascending. ``[R]``
        weights: What eigenvectors are made of: ``E = W weights``. ``[V·N, R]``
        shares: Which share a sample has in an eigenvalue. ``[N, R]``
    """

    def __init__(self, parts: Sequence[_Part]):
        """Decompose ``Wᵀ W``."""
        self.parts = parts
        samples = min(part.rows for part in parts)
        shapes = {(part.root.columns, part.rows) for part in parts}
        if len({v for v, _ in shapes}) > 1 or any(rows % samples for _, rows in shapes):
            raise ValueError(
                "GGNSpectrum: samples merge between the layers: parameters see [columns, samples] "
                f"{sorted(map(list, shapes))}, which have no joint Gram matrix. Use "
                "per='parameter' or mc_samples, choose params, or let the loss see a sample's "
                "positions as one row, such as [N, C, T] for CrossEntropyLoss."
            )
        for part in parts:
            part.samples = samples
        gram = reduce(torch.add, [part.gram() for part in parts])
        wide = at_least_single(gram)  # none in less
        values, u = torch.linalg.eigh(wide)
        eps = max(len(values) * torch.finfo(wide.dtype).eps, torch.finfo(gram.dtype).eps)
        is_known = values > eps * values[-1:]
        values, u = values[is_known], u[:, is_known]
        self.eigenvalues = values.to(gram)
        self.weights = (u / values.sqrt()).to(gram)
        columns = parts[0].root.columns
        self.shares = u.square().unflatten(0, (columns, samples)).sum(0).to(gram)

    def product(self, matrix: Tensor) -> list[tuple[slice, Tensor]]:
        """Return the rows of ``W Wᵀ matrix``, ``[P, D]``, by parameter."""
        along = reduce(torch.add, [part.along(matrix) for part in self.parts])
        return [(part.entries, part.combined(along.T).T) for part in self.parts]

    def slopes(self, chosen: Tensor) -> Tensor:
        """Return ``g_nᵀ e_k``, ``[N, K]``."""
        each = []
        for part in self.parts:  # rows of a sample may be several
            products = part.summed(part.root.gram(part.gradients))
            each.append(products.unflatten(1, (part.samples, -1)).sum(2))
        with without_autocast():
            return reduce(torch.add, each).T @ self.weights[:, chosen]


class GGNSpectrum(LinearOperator):
    r"""The GGN of a batch with its eigenvalues, eigenvectors, and what the loss does along them.

    The matrix is :math:`W W^\top` with a column for each output c and sample n,
    :math:`W_{cn} = J_n^\top s_{nc}`. It has the eigenvalues of the smaller
    :math:`W^\top W = U Λ U^\top`, and the eigenvectors :math:`E = W U Λ^{-1/2}`. W is kept as
    factors where these are smaller, see :class:`~backpack.core.engine.factored.FactoredGrad`. Along
    an eigenvector, each sample has a slope :math:`γ_{nk} = g_n^\top e_k`, a curvature
    :math:`λ_{nk} = \sum_c (W_{cn}^\top e_k)^2`, and Newton's step is known:
    :math:`-\sum_k γ_k / (λ_k + δ) \, e_k`.

    One backward pass when it is built; a snapshot. Model and loss are left as they were; no
    gradient is touched, but the batch is not to be written over. What is zero beyond rounding is no
    eigenvalue: there are at most C·N.

    Scale: nothing is rescaled. With a mean, slopes and curvatures of a sample carry 1/N; they sum
    to those of the batch.

    Source: Dangel, Tatzel, Hennig, ViViT: curvature access through the generalized Gauss-Newton's
    low-rank structure (TMLR 2022), sections 2 and 3.

    Attributes:
        eigenvalues: All that are not zero, ascending. ``[R]``
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        batch: Sequence[Any],
        params: Iterable[Parameter] | None = None,
        per: Per = "model",
        mc_samples: int | None = None,
        subsampling: Sequence[int] | None = None,
        use_converter: UseConverter = False,
    ):
        """Compute columns and gradients, and decompose their Gram matrix.

        Args:
            model: The model. It has to treat samples alone.
            loss_function: The loss, called as ``loss_function(model(X), y)``.
            batch: ``(X, y)``, or ``(X, y, ...)`` with further arguments of the loss; a list of one
                such batch, as other operators take it, is that batch.
            params: Parameters, in the order of the rows. Default: the trainable ones of the model.
            per: Which blocks of the matrix are kept: all of it (``"model"``), that of each
                parameter (``"parameter"``), or those of groups, sequences of parameters.
            mc_samples: Number M of Monte-Carlo samples in place of the outputs; they follow
                ``torch.manual_seed``. Default: exact.
            subsampling: Indices of the samples to look at. Default: all.
            use_converter: How functions in the forward are seen: recorded while it runs (default),
                or ``"trace"``, see :func:`backpack.extend`.

        Raises:
            ValueError: As for :class:`~backpack.linalg.GGN`, if there are several batches, groups
                are not the parameters each once, or samples merge between layers that share a
                block.
            NotImplementedError: If the loss is the sum of several.
        """
        objective = Objective(model, loss_function, [_one_batch(batch)], params, progress=False)
        self.params = objective.params
        ((X, targets),) = objective
        root: SqrtGGNExact | SqrtGGNMC = SqrtGGNExact(subsampling, factored=True)
        if mc_samples is not None:
            root = SqrtGGNMC(mc_samples, subsampling, factored=True)
        exts = [root, BatchGrad(subsampling, factored=True)]
        with (
            extended(model, use_converter or "record") as ready,
            extended(loss_function, False) as loss_of,
            torch.inference_mode(False),
            torch.enable_grad(),
            backpack(*exts, gradients=False),
        ):
            loss = loss_of(output_of("GGNSpectrum", ready, X, loss_function), *targets)
            roots, gradients = values_of(self.params, exts, loss)
        first, *_ = self.params
        ends = [0, *accumulate(p.numel() for p in self.params)]
        super().__init__(ends[-1], first.dtype, first.device)
        self.of_loss = objective.of_loss
        spans = [slice(*ab) for ab in pairwise(ends)]
        parts = {
            p: _Part(span, FactoredGrad.of(r), FactoredGrad.of(g))
            for p, span, r, g in zip(self.params, spans, roots, gradients, strict=True)
        }
        self._blocks = [_Block([parts[p] for p in group]) for group in _groups(self.params, per)]
        values = torch.cat([block.eigenvalues for block in self._blocks])
        self._order = values.argsort()
        self.eigenvalues = values[self._order]

    def _leading(self, k: int | None) -> Iterator[tuple[_Block, Tensor, Tensor]]:
        """Yield blocks, their numbers of eigenpairs among the k largest, and the places of these.

        Raises:
            ValueError: If there are fewer than k.
        """
        count = len(self.eigenvalues)
        k = count if k is None else k
        if not min(1, count) <= k <= count:
            raise ValueError(
                f"{self!r} has {count} eigenvalues other than zero: k must be between 1 and "
                f"{count}, got {k}."
            )
        leading, start = self._order[count - k :], 0
        for block in self._blocks:
            local = leading - start
            places = ((local >= 0) & (local < len(block.eigenvalues))).nonzero().squeeze(1)
            if len(places):
                yield block, local[places], places
            start += len(block.eigenvalues)

    def eigh(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the largest eigenvalues with their eigenvectors.

        Args:
            k: Number of eigenpairs. Default: all that are not zero, which takes the memory of C·N
                gradients.

        Returns:
            Eigenvalues in ascending order ``[k]``, and eigenvectors in the columns of ``[P, k]``.

        Raises:
            ValueError: If there are fewer than k.
        """
        values = self.eigenvalues if k is None else self.eigenvalues[-k:]
        vectors = values.new_zeros(self.shape[0], len(values))
        for block, chosen, places in self._leading(k):
            for part in block.parts:
                vectors[part.entries, places] = part.combined(block.weights[:, chosen].T).T
        return values.clone(), vectors

    def slopes(self, k: int | None = None) -> Tensor:
        """Return the slope of each sample's loss along the k leading eigenvectors, ``[N, k]``.

        Their sum over the samples is the slope of the loss; the sign is that of an eigenvector.
        """
        found = [(places, block.slopes(chosen)) for block, chosen, places in self._leading(k)]
        return self._placed(found)

    def curvatures(self, k: int | None = None) -> Tensor:
        """Return the curvature of each sample along the k leading eigenvectors, ``[N, k]``.

        That is ``e_kᵀ G_n e_k`` with the sample's own GGN: their sum over the samples is λ.
        """
        found = [
            (places, block.eigenvalues[chosen] * block.shares[:, chosen])
            for block, chosen, places in self._leading(k)
        ]
        return self._placed(found)

    def newton_step(self, k: int | None = None, damping: float | Tensor = 0.0) -> Tensor:
        """Return the damped Newton step in the space of the k leading eigenvectors, ``[P]``.

        Args:
            k: Number of eigenvectors. Default: all that have curvature.
            damping: δ, a number, or one for each of them, ``[k]``, in ascending order of λ.

        Returns:
            What is to be added to the parameters: ``-sum_k γ_k / (λ_k + δ_k) e_k``.

        Raises:
            ValueError: If there are fewer than k, or the dampings do not fit.
        """
        count = len(self.eigenvalues) if k is None else k
        delta = torch.as_tensor(damping, dtype=self.dtype, device=self.device)
        if delta.shape not in (torch.Size([]), torch.Size([count])):
            raise ValueError(
                f"{self!r}: damping is a number or [{count}], one for each eigenvector, got "
                f"{list(delta.shape)}."
            )
        delta, step = delta.expand(count), delta.new_zeros(self.shape[0])
        for block, chosen, places in self._leading(k):
            length = -block.slopes(chosen).sum(0) / (block.eigenvalues[chosen] + delta[places])
            with without_autocast():
                weights = (block.weights[:, chosen] @ length).unsqueeze(0)
            for part in block.parts:
                step[part.entries] = part.combined(weights).squeeze(0)
        return step

    def _placed(self, found: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Put columns of several blocks at their places.

        Raises:
            ValueError: If blocks have different numbers of samples.
        """
        counts = {len(columns) for _, columns in found}
        if len(counts) > 1:
            raise ValueError(
                f"GGNSpectrum: the blocks tell {sorted(counts)} samples apart. Choose params, or "
                "let the loss see a sample's positions as one row."
            )
        if not found:
            return self._blocks[0].shares[:, :0]
        order = torch.cat([places for places, _ in found]).argsort()
        return torch.cat([columns for _, columns in found], 1)[:, order]

    def trace(self) -> Tensor:
        """Return the trace, a scalar."""
        return self.eigenvalues.sum()

    def _matmat(self, matrix: Tensor) -> Tensor:
        product = torch.empty_like(matrix)
        for block in self._blocks:
            for entries, rows in block.product(matrix):
                product[entries] = rows
        return product


def _one_batch(given: Iterable[Any]) -> tuple[Any, ...]:
    """Return a batch that is given as it is, or as data that has no other.

    Raises:
        ValueError: If there are several batches.
    """
    batch = tuple(given)
    parts = [x for x in batch if isinstance(x, (tuple, list)) and len(x) > 1]
    if len(parts) == len(batch) == 1:
        return tuple(parts[0])
    # several inputs and several targets make a batch of two tuples, too
    if len(parts) == len(batch) and (len(batch) > 2 or not isinstance(given, tuple)):
        raise ValueError(
            f"GGNSpectrum needs one batch (X, y), got {len(batch)} of them. Concatenate them, or "
            "use GGN(...).eigsh(k) for all of the data."
        )
    return batch


def _groups(params: Sequence[Parameter], per: Per) -> Sequence[Sequence[Parameter]]:
    """Return the parameters of each block.

    Raises:
        ValueError: If they are not all parameters, each once.
    """
    if per == "model":
        return [params]
    if per == "parameter":
        return [[p] for p in params]
    per = per if isinstance(per, str) else [list(group) for group in per]
    if (
        isinstance(per, str)
        or not all(per)
        or sorted(id(p) for g in per for p in g) != sorted(map(id, params))
    ):
        raise ValueError(
            "GGNSpectrum: per is 'model', 'parameter', or groups that have each of params once, "
            f"got {per if isinstance(per, str) else [len(group) for group in per]!r}."
        )
    return per

"""The neural tangent kernel of a model, of two batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack import backpack
from backpack.core.engine.factored import FactoredGrad
from backpack.extensions import BatchGrad
from backpack.linalg.extended import UseConverter, extended
from backpack.linalg.objective import flattened, output_of, places_of, without_graph
from backpack.linalg.operators import LinearOperator
from backpack.linalg.passes import values_of
from backpack.linalg.structured import SpectralOperator
from backpack.utils.autocast import without_autocast
from backpack.utils.batches import samples_of

BLOCK_ENTRIES = 2**25  # of Jacobians that are kept at once
Gradients = Sequence[FactoredGrad]  # those of an output, ``[N, *p]`` for each parameter


class NTK:
    """Inner products of the Jacobians of a model at two batches, ``Θ_nm = J(x_n) J(x_m)ᵀ``.

    With N and M samples of C outputs. Jacobians with respect to parameters that act at few
    positions are not formed, see :class:`~backpack.core.engine.factored.FactoredGrad`. The model is
    left as it was, and has to treat samples alone. What is random in it, such as dropout while it
    is trained, is drawn for each batch: call ``eval()`` for the kernel of one function.

    Source: Jacot, Gabriel, Hongler, Neural tangent kernel (NeurIPS 2018).
    """

    def __init__(
        self,
        model: Module,
        X1: Tensor,
        X2: Tensor | None = None,
        params: Iterable[Parameter] | None = None,
        use_converter: UseConverter = False,
        only_traced: bool = False,
    ):
        """Compute a backward pass for each output and batch.

        Args:
            model: Maps ``[N, *in]`` to ``[N, *out]``.
            X1: N samples.
            X2: M samples. Default: the same.
            params: Parameters that vary. Default: those of the model that require a gradient.
            use_converter: How functions in the forward are seen: recorded while it runs (default),
                or ``"trace"``, see :func:`backpack.extend`.
            only_traced: Whether :meth:`traced` is all that is asked for. Then nothing is kept of an
                output when the next one comes: for many outputs, whose Jacobians do not fit.

        Raises:
            ValueError: If there are none, one does not require a gradient, the output does not
                depend on one, or has the samples along another axis than the first.
        """
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.params = trainable if params is None else list(params)
        frozen = [list(p.shape) for p in self.params if not p.requires_grad]
        if frozen:
            raise ValueError(
                f"NTK: parameters of shapes {frozen} in params do not require a gradient. Set "
                "p.requires_grad_(True), or leave them out. Without params=, it is of all that do."
            )
        if not self.params:
            raise ValueError("NTK: no parameter requires a gradient.")
        self._traced: Tensor | None = None
        with extended(model, use_converter or "record") as ready:
            rows = factored_jacobian(ready, self.params, X1)
            columns = None if X2 is None else factored_jacobian(ready, self.params, X2)
            if only_traced:
                self._traced = _traced(rows, columns)
                return
            self._rows = list(rows)
            self._columns = self._rows if columns is None else list(columns)

    def traced(self) -> Tensor:
        """Return the sum over equal outputs, ``[N, M]``.

        Raises:
            ValueError: If the other samples have other outputs.
        """
        if self._traced is not None:
            return self._traced.clone()
        return _traced(self._rows, self._columns)

    def per_output(self) -> Tensor:
        """Return a block for each pair of samples, ``[N, M, C, D]`` for C and D outputs.

        Raises:
            ValueError: If it was built with ``only_traced=True``.
        """
        if self._traced is not None:
            raise ValueError(
                "NTK was built with only_traced=True, and has the sum over equal outputs alone: "
                "traced(). For blocks, leave that out."
            )
        each = [[_gram(row, column) for column in self._columns] for row in self._rows]
        return torch.stack([torch.stack(row, -1) for row in each], -2)

    def to_dense(self) -> Tensor:
        """Return the matrix for all samples and outputs, ``[N·C, M·D]``."""
        return self.per_output().transpose(1, 2).flatten(2).flatten(0, 1)


def _gram(rows: Gradients, columns: Gradients) -> Tensor:
    """Return the inner products ``[N, M]`` of the gradients of two outputs."""
    grams = [one.gram(other) for one, other in zip(rows, columns, strict=True)]
    return sum(grams[1:], start=grams[0])


def _traced(rows: Iterable[Gradients], columns: Iterable[Gradients] | None) -> Tensor:
    """Return the sum of the inner products of equal outputs, ``[N, M]``.

    Raises:
        ValueError: If there are more of one than of the other.
    """
    total: Any = None
    num_rows = num_columns = 0
    pairs = zip_longest(rows, columns) if columns is not None else ((row, row) for row in rows)
    for row, column in pairs:
        num_rows += row is not None
        num_columns += column is not None
        if row is not None and column is not None:
            gram = _gram(row, column)
            total = gram if total is None else total + gram
    if num_rows != num_columns:
        raise ValueError(
            f"NTK: samples with {num_rows} outputs, and others with {num_columns}, have no equal "
            "ones to sum over. Use to_dense()."
        )
    return total


def output_covariances(
    model: Module,
    params: Sequence[Parameter],
    X: Any,
    covariances: Sequence[LinearOperator],
    use_converter: UseConverter = False,
    joint: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Return outputs, and ``J_n Σ J_nᵀ``: their covariance if linearised in the parameters.

    Args:
        model: ``[N, *in] -> [N, *out]`` with C entries for each sample. It is left as it was.
        params: Parameters.
        X: N samples: a tensor, or a tuple or dictionary of tensors.
        covariances: Some Σ, ``[P, P]`` each, at least one. The Jacobian is computed once.
        use_converter: As for :class:`NTK`.
        joint: Whether outputs of different samples are asked for as well.

    Returns:
        ``[N, C]``, and ``[N, C, C]`` for each Σ; ``[N, C, N, C]`` of all samples together.

    Raises:
        ValueError: If the output does not depend on one of the parameters, or samples of a large
            input that is no tensor cannot be told apart.
    """
    mean = without_graph(lambda: output_of("The covariance of outputs", model, X))
    mean = mean.unsqueeze(-1).flatten(1)
    count, num_outputs = mean.shape
    width = covariances[0].shape[0]
    step = max(1, BLOCK_ENTRIES // (num_outputs * width))
    rows = [mean.new_empty(0, num_outputs, width)]
    found = [[mean.new_empty(0, num_outputs, num_outputs)] for _ in covariances]
    with extended(model, use_converter or "record") as ready:
        for inputs, size in _in_parts(X, count, step):
            jacobian = factored_jacobian(ready, params, inputs, size)
            each = [flattened(g.dense() for g in gradients) for gradients in jacobian]
            J = torch.stack(each, 1)  # [n, C, P]
            if joint:
                rows.append(J)
                continue
            for own, covariance in zip(found, covariances, strict=True):
                with without_autocast():
                    turned = (covariance @ J.flatten(0, 1).T).T.reshape(J.shape)
                    own.append(J @ turned.mT)
    if not joint:
        return mean, [torch.cat(own) for own in found]
    J = torch.cat(rows).flatten(0, 1)  # [N·C, P]
    shape = count, num_outputs, count, num_outputs
    with without_autocast():
        return mean, [(J @ (covariance @ J.T)).reshape(shape) for covariance in covariances]


def output_variances(
    model: Module,
    params: Sequence[Parameter],
    X: Any,
    covariances: Sequence[SpectralOperator],
    use_converter: UseConverter = False,
    of: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs, and the diagonals of their covariances alone.

    Unlike for :func:`output_covariances`, what is kept does not grow with the number of outputs.

    Args:
        model: As there.
        params: As there.
        X: As there.
        covariances: As there; all with the eigenvectors of the first.
        use_converter: As there.
        of: What the variances are of, a function of the outputs of each sample, ``[N, C] -> [N,
            D]``. Default: they themselves.

    Returns:
        ``[N, C]`` and, for each Σ, ``[N, D]``: ``[N, D, K]``.

    Raises:
        ValueError: As there.
    """
    mean = without_graph(lambda: output_of("The variance of outputs", model, X))
    mean = mean.unsqueeze(-1).flatten(1)
    num_outputs = (mean if of is None else of(mean)).shape[1]
    found = [mean.new_empty(0, num_outputs, len(covariances))]
    step = max(1, BLOCK_ENTRIES // covariances[0].shape[0])
    with extended(model, use_converter or "record") as ready:
        for inputs, size in _in_parts(X, len(mean), step):
            jacobian = factored_jacobian(ready, params, inputs, size, of)
            each = [_variances(some, covariances) for some in _in_blocks(jacobian)]
            found.append(torch.cat(each).unflatten(0, (num_outputs, size)).transpose(0, 1))
    return mean, torch.cat(found)


def _in_parts(X: Any, count: int, step: int) -> Iterator[tuple[Any, int]]:
    """Yield some samples after the other, and how many they are."""
    for start in range(0, count, step):
        some = slice(start, min(start + step, count))
        # all at once as they are: what has as many rows as samples may be something else
        yield X if step >= count else samples_of(X, count, some), some.stop - some.start


def _in_blocks(jacobian: Iterable[Gradients]) -> Iterator[list[Gradients]]:
    """Yield the gradients of as many outputs as may be kept at once."""
    some: list[Gradients] = []
    kept = 0
    for gradients in jacobian:
        some.append(gradients)
        kept += sum(g.kept_entries for g in gradients)
        if kept >= BLOCK_ENTRIES:
            yield some
            some, kept = [], 0
    if some:
        yield some


def _variances(some: Sequence[Gradients], covariances: Sequence[SpectralOperator]) -> Tensor:
    """Return ``diag(J Σ Jᵀ)`` of some outputs, one after the other: ``[D·N, K]``."""
    first = covariances[0]
    spectra = torch.stack([covariance.spectrum for covariance in covariances])
    sizes = [g.shape[1:].numel() for g in some[0]]
    blocks = first.bases or [[] for _ in sizes]
    own = [prod(map(len, block)) for block in first.bases] or sizes
    if first.order is None and own == sizes:  # a block for each parameter
        parts = zip(zip(*some, strict=True), spectra.split(sizes, 1), blocks, strict=True)
        each = [
            torch.cat([g.square_sums(weights, block) for g in FactoredGrad.stacked(of_each)])
            for of_each, weights, block in parts
        ]
        return sum(each[1:], start=each[0]).to(first.dtype)
    found, step = [], max(1, BLOCK_ENTRIES // (len(some[0][0]) * sum(sizes)))
    for start in range(0, len(some), step):
        J = [flattened(g.dense() for g in gradients) for gradients in some[start : start + step]]
        with without_autocast():
            found.append(first.in_eigenbasis(torch.cat(J).T).square().T @ spectra.T)
    return torch.cat(found)


def factored_jacobian(
    model: Module,
    params: Sequence[Parameter],
    X: Any,
    count: int | None = None,
    of: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[list[FactoredGrad]]:
    """Yield the gradients of each output of an extended model, for each parameter.

    Nothing is left at these. ``count`` is how many samples there should be, if they were picked,
    and ``of`` makes other outputs of these, see :func:`output_variances`.

    Raises:
        ValueError: If the output does not depend on one of them, or has other samples, several rows
            of a sample, or the samples along another axis than the first.
    """
    ext = BatchGrad(factored=True)
    with torch.inference_mode(False), torch.enable_grad():
        output = output_of("The Jacobian", model, X)
        flat = output.unsqueeze(-1).flatten(1)
        outputs = flat if of is None else of(flat)
    if count is not None and len(output) != count:
        raise ValueError(
            f"The model has {len(output)} outputs for the {count} samples that fit at once: tensors"
            " of the input need the samples along their first axis. Give at most so many samples."
        )
    axes = {place.axis for place in places_of(output)} - {0}
    if axes:
        raise ValueError(
            f"The model returns an output of shape {list(output.shape)} with the samples along "
            f"axis {max(axes)}: a row of the Jacobian would be that of a sum of outputs. Let it "
            "return the samples along its first axis, such as output.transpose(0, 1)."
        )
    if not len(output):
        yield from [[FactoredGrad.of(p.new_zeros(0, *p.shape)) for p in params] for _ in outputs.mT]
        return
    for c in range(outputs.shape[1]):
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            backpack(ext, retain_graph=True, gradients=False),
        ):
            (values,) = values_of(params, [ext], outputs[:, c].sum(), "output", retain_graph=True)
        gradients = [FactoredGrad.of(value) for value in values]
        samples = len(gradients[0])
        if samples != len(output):
            raise ValueError(
                f"The model returns {len(output)} rows of outputs for {samples} samples: a row of "
                "the Jacobian would be that of a sum of outputs. Let it return the outputs of "
                f"each sample together, [{samples}, ...], such as [N, T, C] in the place of "
                "[N·T, C]: all that follows the first axis are outputs of a sample."
            )
        yield gradients

"""The neural tangent kernel of a model, of two batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from backpack.utils.autocast import without_autocast
from backpack.utils.batches import samples_of

BLOCK_ENTRIES = 2**25  # of Jacobians that are kept at once


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
    ):
        """Compute a backward pass for each output and batch.

        Args:
            model: Maps ``[N, *in]`` to ``[N, *out]``.
            X1: N samples.
            X2: M samples. Default: the same.
            params: Parameters that vary. Default: those of the model that require a gradient.
            use_converter: How functions in the forward are seen: recorded while it runs (default),
                or ``"trace"``, see :func:`backpack.extend`.

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
        with extended(model, use_converter or "record") as ready:
            self._rows = factored_jacobian(ready, self.params, X1)
            self._columns = self._rows if X2 is None else factored_jacobian(ready, self.params, X2)

    def _product(self, c: int, d: int) -> Tensor:
        pairs = zip(self._rows[c], self._columns[d], strict=True)
        grams = [one.gram(other) for one, other in pairs]
        return sum(grams[1:], start=grams[0])

    def traced(self) -> Tensor:
        """Return the sum over equal outputs, ``[N, M]``.

        Raises:
            ValueError: If the other samples have other outputs.
        """
        if len(self._rows) != len(self._columns):
            raise ValueError(
                f"NTK: samples with {len(self._rows)} outputs, and others with "
                f"{len(self._columns)}, have no equal ones to sum over. Use to_dense()."
            )
        each = [self._product(c, c) for c in range(len(self._rows))]
        return sum(each[1:], start=each[0])

    def per_output(self) -> Tensor:
        """Return a block for each pair of samples, ``[N, M, C, D]`` for C and D outputs."""
        rows, columns = range(len(self._rows)), range(len(self._columns))
        return torch.stack(
            [torch.stack([self._product(c, d) for d in columns], -1) for c in rows], -2
        )

    def to_dense(self) -> Tensor:
        """Return the matrix for all samples and outputs, ``[N·C, M·D]``."""
        return self.per_output().transpose(1, 2).flatten(2).flatten(0, 1)


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
        for start in range(0, count, step):
            some = slice(start, min(start + step, count))
            # all at once as they are: what has as many rows as samples may be something else
            inputs = X if step >= count else samples_of(X, count, some)
            jacobian = factored_jacobian(ready, params, inputs, some.stop - some.start)
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


def factored_jacobian(
    model: Module, params: Sequence[Parameter], X: Any, count: int | None = None
) -> list[list[FactoredGrad]]:
    """Return the gradients of each output of an extended model, for each parameter.

    Nothing is left at these. ``count`` is how many samples there should be, if they were picked.

    Raises:
        ValueError: If the output does not depend on one of them, or has other samples, several rows
            of a sample, or the samples along another axis than the first.
    """
    found, ext = [], BatchGrad(factored=True)
    with torch.inference_mode(False), torch.enable_grad():
        output = output_of("The Jacobian", model, X)
        outputs = output.unsqueeze(-1).flatten(1).unbind(1)
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
        return [[FactoredGrad.of(p.new_zeros(0, *p.shape)) for p in params] for _ in outputs]
    for output in outputs:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            backpack(ext, retain_graph=True, gradients=False),
        ):
            (values,) = values_of(params, [ext], output.sum(), "output", retain_graph=True)
        found.append([FactoredGrad.of(value) for value in values])
        samples = len(found[-1][0])
        if samples != len(output):
            raise ValueError(
                f"The model returns {len(output)} rows of outputs for {samples} samples: a row of "
                "the Jacobian would be that of a sum of outputs. Let it return the outputs of "
                f"each sample together, [{samples}, ...], such as [N, T, C] in the place of "
                "[N·T, C]: all that follows the first axis are outputs of a sample."
            )
    return found

"""The neural tangent kernel of a model, of two batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack import backpack, extend
from backpack.core.engine.factored import FactoredGrad
from backpack.extensions import BatchGrad
from backpack.linalg.approximations import UseConverter


class NTK:
    """Inner products of the Jacobians of a model at two batches, ``Θ_nm = J(x_n) J(x_m)ᵀ``.

    With N and M samples of C outputs. Jacobians with respect to parameters that act at few
    positions are not formed, see :class:`~backpack.core.engine.factored.FactoredGrad`. The model is
    extended, and has to treat samples alone.

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
            use_converter: See :func:`backpack.extend`.

        Raises:
            ValueError: If there are none, or the output does not depend on one of them.
        """
        extended = extend(model, use_converter=use_converter)
        given = model.parameters() if params is None else params
        self.params = [p for p in given if p.requires_grad]
        if not self.params:
            raise ValueError("NTK: no parameter requires a gradient.")
        self._rows = self._jacobians(extended, X1)
        self._columns = self._rows if X2 is None else self._jacobians(extended, X2)

    def _jacobians(self, model: Module, X: Tensor) -> list[list[FactoredGrad]]:
        """Return the gradients of each output, for each parameter."""
        found, gradients = [], [p.grad for p in self.params]
        ext = BatchGrad(factored=True)
        ext.savefield = "_backpack_linalg"
        with torch.inference_mode(False), torch.enable_grad():
            outputs = model(X).flatten(1).unbind(1)
        try:
            for output in outputs:
                with torch.enable_grad(), backpack(ext, retain_graph=True):
                    output.sum().backward(inputs=self.params, retain_graph=True)
                values = [vars(p).pop(ext.savefield, None) for p in self.params]
                pairs = zip(self.params, values, strict=True)
                unused = [list(p.shape) for p, value in pairs if value is None]
                if unused:
                    raise ValueError(
                        f"NTK: the output does not depend on the parameters of shapes {unused} "
                        "through an extended module. Leave them out (params=...), or use "
                        "use_converter=True if functions read them."
                    )
                found.append([FactoredGrad.of(value) for value in values])
        finally:
            for p, gradient in zip(self.params, gradients, strict=True):
                p.grad = gradient
        return found

    def _product(self, c: int, d: int) -> Tensor:
        pairs = zip(self._rows[c], self._columns[d], strict=True)
        grams = [one.gram(other) for one, other in pairs]
        return sum(grams[1:], start=grams[0])

    def traced(self) -> Tensor:
        """Return the sum over equal outputs, ``[N, M]``."""
        each = [self._product(c, c) for c in range(len(self._rows))]
        return sum(each[1:], start=each[0])

    def per_output(self) -> Tensor:
        """Return a block for each pair of samples, ``[N, M, C, C]``."""
        outputs = range(len(self._rows))
        return torch.stack(
            [torch.stack([self._product(c, d) for d in outputs], -1) for c in outputs], -2
        )

    def to_dense(self) -> Tensor:
        """Return the matrix for all samples and outputs, ``[N·C, M·C]``."""
        return self.per_output().transpose(1, 2).flatten(2).flatten(0, 1)

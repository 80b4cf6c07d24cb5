"""The Jacobian of a model's output over a data set, as an operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack import backpack, disable
from backpack.core.derivatives.math_attention import math_attention
from backpack.hessianfree.lop import vjp
from backpack.hessianfree.rop import pushforward
from backpack.linalg.objective import (
    Objective,
    check_has_batches,
    check_read_again,
    flattened,
    real_output_of,
    without_graph,
)
from backpack.linalg.operators import LinearOperator
from backpack.linalg.order import SameInEachPass, SeenBatches, check_not_shuffled


class _NoLoss(Module):
    """Stands for the loss, which a Jacobian does not have."""

    reduction = "sum"


class _Inputs:
    """Batches whose targets are left away, if there are any."""

    def __init__(self, data: Iterable[Any]):
        self.data = data

    def __iter__(self) -> Iterator[tuple[Any, None]]:
        for batch in self.data:
            yield (batch[0] if isinstance(batch, (tuple, list)) else batch), None


class Jacobian(LinearOperator):
    """Derivatives of all outputs with respect to the parameters, ``[M, P]``.

    A row belongs to an entry of the model's output: sample by sample, in the order of the data, and
    row-major for each sample. ``J.T`` is the transposed, ``J.T @ J`` the GGN of
    ``MSELoss(reduction="sum")`` but for a factor of 2, and ``J @ J.T`` the neural tangent kernel.

    Products are exact, and read the data once. The model may be any that autograd can
    differentiate twice; it is not extended. It has to be in evaluation mode if it has dropout or
    batch normalisation, and data and parameters must not change between two products.

    Source: of products with J Pearlmutter (1994) and Townsend (2017), see
    :func:`backpack.hessianfree.rop.R_op`.
    """

    is_symmetric = False

    def __init__(
        self,
        model: Module,
        data: Iterable[Any],
        params: Iterable[Parameter] | None = None,
        progress: bool = True,
        vectors_at_once: int = 8,
    ):
        """Run forward once, to count the outputs.

        Args:
            model: Maps inputs to a tensor.
            data: Batches of inputs X, or tuples ``(X, ...)`` of which the first entry counts, in
                the same order in each pass.
            params: Parameters, in the order of the columns. Default: the trainable ones of the
                model.
            progress: Show a bar in a terminal for passes of more than a second (needs ``tqdm``).
            vectors_at_once: How many vectors are multiplied at once.

        Raises:
            ValueError: If the data can be read only once, a ``DataLoader`` shuffles, or as for
                :class:`~backpack.linalg.MatrixFreeOperator`.
        """
        if vectors_at_once < 1:
            raise ValueError(f"vectors_at_once has to be at least 1, got {vectors_at_once}.")
        check_read_again(type(self).__name__, data)
        check_has_batches(data)
        check_not_shuffled("A Jacobian numbers its rows", data, between_passes=True)
        # the norm of the outputs, below, is that of the rows in any order
        inputs = SameInEachPass(type(self).__name__, _Inputs(data), 64)
        self._objective = Objective(model, _NoLoss(), inputs, params, progress)
        self._vectors_at_once = vectors_at_once
        self._seen = SeenBatches()  # entries and norm of the output
        first, *_ = self._objective.params
        rows = batches = 0
        for batches, (X, _) in enumerate(self._objective, 1):
            output = without_graph(partial(self._output, X))
            self._is_same(batches - 1, output, first.dtype)
            rows += output.numel()
        self._seen.is_end(batches)
        columns = sum(p.numel() for p in self._objective.params)
        super().__init__((rows, columns), first.dtype, first.device)

    def _output(self, X: Any) -> Tensor:
        return real_output_of(type(self).__name__, self._objective.model, X)

    def _is_same(self, number: int, output: Tensor, dtype: torch.dtype) -> bool:
        eps, norm = torch.finfo(dtype).eps, output.detach().norm().cpu().double()
        return self._seen.is_same(number, output.numel(), norm, eps**0.5, 10 * eps)

    def _outputs(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows and the output of each batch."""
        start = 0
        with torch.inference_mode(False), torch.enable_grad(), backpack(), math_attention():
            for i, (X, _) in enumerate(self._objective):
                with disable():
                    output = self._output(X)
                count = output.numel()
                if not self._is_same(i, output, self.dtype):
                    raise RuntimeError(
                        f"{self!r} is not one matrix: batch {i} has other outputs than when it was "
                        "built. Pass the data in the same order each time (shuffle=False), call "
                        "model.eval(), and build a new operator if parameters have changed."
                    )
                yield slice(start, start + count), output
                start += count

    def _spans(self, count: int) -> list[slice]:
        step = self._vectors_at_once
        return [slice(i, min(i + step, count)) for i in range(0, count, step)]

    def _matmat(self, matrix: Tensor) -> Tensor:
        params, vectors = self._objective.params, self._objective.vectors(matrix)
        with torch.inference_mode(False):
            product = matrix.new_zeros(self.shape[0], matrix.shape[1])
        for rows, output in self._outputs():
            product_of = pushforward((output,), params)
            for some in self._spans(matrix.shape[1]):
                (image,) = product_of(tuple(v[some] for v in vectors), several=True)
                product[rows, some] = image.reshape(len(image), -1).T
        return product

    def _rmatmat(self, matrix: Tensor) -> Tensor:
        params = self._objective.params
        with torch.inference_mode(False):
            # many small terms are lost beside a large sum in low precision
            wide = torch.promote_types(self.dtype, torch.float32)
            product = matrix.new_zeros(matrix.shape[1], self.shape[1], dtype=wide)  # [V, P]
        for rows, output in self._outputs():
            for some in self._spans(matrix.shape[1]):
                w = matrix[rows, some].T
                w = w.reshape(len(w), *output.shape)
                product[some] += flattened(vjp((output,), params, (w,), several=True))
        return product.T.to(self.dtype)

"""Reordering of axes as a module."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module


class Permute(Module):
    """Reorder the axes of a tensor, like :meth:`torch.Tensor.permute` or ``transpose``."""

    __constants__ = ("dims", "init_transpose")

    def __init__(self, *dims: int, init_transpose: bool = False):
        """Store the order of the axes.

        Args:
            *dims: Axes of the input in the order in which the output has them, one by one. Negative
                ones count from the end.
            init_transpose: Exchange the two axes in ``dims`` instead, whatever the number of axes
                of the input.

        Raises:
            ValueError: If ``init_transpose`` is set and ``dims`` are not two, or one is no integer.
        """
        super().__init__()
        if not all(hasattr(dim, "__index__") for dim in dims):  # also integers of numpy
            raise ValueError(f"Permute takes the axes one by one, as integers, got {dims}.")
        if init_transpose and len(dims) != 2:
            raise ValueError(f"A transpose exchanges two axes, got dims {dims}.")
        self.dims = dims
        self.init_transpose = init_transpose

    def permutation(self, ndim: int) -> tuple[int, ...]:
        """Return the axes of an input with so many, in the order in which the output has them.

        Raises:
            ValueError: If ``dims`` do not fit the number of axes.
        """
        axes = list(range(ndim))
        order = [dim + ndim if dim < 0 else dim for dim in self.dims]
        if self.init_transpose and all(dim in axes for dim in order):
            first, second = order
            order = axes.copy()
            order[first], order[second] = second, first
        if sorted(order) != axes:
            raise ValueError(f"{self} does not fit an input with {ndim} axes.")
        return tuple(order)

    def forward(self, input: Tensor) -> Tensor:
        """Return a view of the input with its axes reordered.

        Raises:
            ValueError: If the order does not fit the input's number of axes.
        """
        return input.permute(self.permutation(input.dim()))

    def extra_repr(self) -> str:
        """Return the arguments for the module's representation."""
        dims = ", ".join(map(str, self.dims))
        return f"{dims}, init_transpose=True" if self.init_transpose else dims

"""Modules for computation graphs that branch and merge."""

from __future__ import annotations

import operator
from functools import reduce

import torch
from torch import Tensor
from torch.nn import Module


class SumModule(Module):
    """Sum of any number of tensors."""

    # whether the last input has been multiplied with a negative number, in the place of ``-``
    _subtracts = False

    @classmethod
    def of_difference(cls) -> SumModule:
        """Return a sum that stands for a difference: of the first input and the negative second."""
        module = cls()
        module._subtracts = True
        return module

    def forward(self, *inputs: Tensor) -> Tensor:
        """Add the inputs up, ``[N, *]`` each.

        Raises:
            ValueError: If there is no input.
            RuntimeError: If unsigned integers were subtracted from something else: their negative
                is no negative number.
        """
        if not inputs:
            raise ValueError("SumModule needs at least one input.")
        result = reduce(operator.add, inputs)
        if self._subtracts and isinstance(inputs[-1], Tensor):
            dtype = inputs[-1].dtype
            if not dtype.is_signed and dtype not in (torch.bool, result.dtype):
                raise RuntimeError(
                    f"A tensor of {dtype} is subtracted from one of another type. A converted "
                    "model adds the negative of what is subtracted, and unsigned integers have "
                    "none: convert it before, x - y.to(x.dtype)."
                )
        return result


class Parallel(Module):
    """Feed the input to several branches, and merge their outputs.

    The children are called ``branch0``, ``branch1``, ..., and ``merge``.
    """

    def __init__(self, *branches: Module, merge_module: Module | None = None):
        """Store the branches and how to merge them.

        Args:
            *branches: Modules that all receive the same input, at least one.
            merge_module: Module that maps the branches' outputs to the output. Default:
                :class:`SumModule`.

        Raises:
            ValueError: If there is no branch.
        """
        super().__init__()
        if not branches:
            raise ValueError("Parallel needs at least one branch.")
        self._branch_names = [f"branch{i}" for i in range(len(branches))]
        for name, branch in zip(self._branch_names, branches, strict=True):
            self.add_module(name, branch)
        self.merge = SumModule() if merge_module is None else merge_module

    def forward(self, input: Tensor) -> Tensor:
        """Evaluate all branches at the input ``[N, *]``, and merge the results."""
        return self.merge(*(getattr(self, name)(input) for name in self._branch_names))

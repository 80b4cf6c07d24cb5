"""Modules for computation graphs that branch and merge."""

from __future__ import annotations

import operator
from functools import reduce

from torch import Tensor
from torch.nn import Module


class SumModule(Module):
    """Sum of any number of tensors."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Add the inputs up, ``[N, *]`` each.

        Raises:
            ValueError: If there is no input.
        """
        if not inputs:
            raise ValueError("SumModule needs at least one input.")
        return reduce(operator.add, inputs)


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

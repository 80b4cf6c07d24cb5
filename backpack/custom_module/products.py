"""Products as a module."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

from torch import Tensor
from torch.nn import Module


class MulModule(Module):
    """Elementwise product of any number of tensors (with broadcasting) and numbers."""

    def forward(self, *inputs: Any) -> Tensor:
        """Multiply the inputs: ``[N, *]``, or what broadcasts to it.

        Raises:
            ValueError: If there is no input.
        """
        if not inputs:
            raise ValueError("MulModule needs at least one input.")
        return reduce(operator.mul, inputs)

"""Random projections of individual gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Literal
from zlib import crc32

import torch
from torch import Generator, Tensor
from torch.nn import Module, Parameter

from backpack.context import CTX
from backpack.core.engine.products import Products
from backpack.core.record.shards import home
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension


class ProjectedGrad(FirstOrderBackpropExtension):
    r"""Individual gradients along random directions, saved in ``grad_projected``.

    .. math:: \frac{1}{\sqrt{D}} \left(r_d^\top g_n\right)_{n, d}

    Inner products of two rows are those of the gradients in expectation. The directions depend on
    the seed, and on name and shape of the parameter in the model that was extended, not on the
    batch, the modules that use it, or ``use_converter``: rows of different backward passes may be
    compared, and those of all parameters added up. Extend the model as a whole: layers that are
    extended one by one have no names that tell their parameters apart.

    :Shape: ``[N, dim]``
    :Scale: That of the gradients: with a mean it carries 1/N.
    :Cost: The individual gradients in slices, and a product with ``[dim, *p]``, which is never
        formed as a whole. With ``outer=True``, ``dim T (O + I)`` multiplications for each sample.
    :Source: Johnson, Lindenstrauss (1984); for attribution Park et al., TRAK: attributing model
        behavior at scale (ICML 2023); of outer products Choe et al., What is your data worth to
        GPT? (arXiv 2405.13954, 2024).
    """

    needs = ("factored",)
    shape = ("N", "D")
    _model: Module | None = None  # in which parameters have their names

    def __init__(
        self,
        dim: int = 64,
        seed: int = 0,
        distribution: Literal["rademacher", "normal"] = "rademacher",
        outer: bool = False,
        subsampling: Sequence[int] | None = None,
    ):
        """Store the options.

        Args:
            dim: D, number of directions.
            seed: Draws the directions.
            distribution: Signs (``"rademacher"``), or normal numbers. Both have variance 1.
            outer: Let a direction be ``a bᵀ``, a for the first axis of the parameter and b for all
                others: less to draw and to multiply, and a larger variance.
            subsampling: Indices of the samples of the batch to look at. Default: all.

        Raises:
            ValueError: If an option is out of range.
        """
        if dim < 1:
            raise ValueError(f"dim has to be at least 1, got {dim}.")
        if distribution not in ("rademacher", "normal"):
            raise ValueError(f"distribution is 'rademacher' or 'normal', got {distribution!r}.")
        self.dim = dim
        self.seed = seed
        self.distribution = distribution
        self.outer = outer
        super().__init__("grad_projected", subsampling=subsampling)

    def within(self, model: Module) -> ProjectedGrad:
        """Return a copy with the directions of a model, whatever is extended around it."""
        other = copy(self)
        other._model = model
        return other

    def extract(self, products: Products) -> Tensor:
        """Return ``[N, D]``."""
        gradients = products["factored"]
        models = _whole_models() if self._model is None else [self._model]
        own = _name(products.parameter, models) or gradients.label
        name = f"{self.seed} {own} {list(gradients.shape[1:])}"
        number = crc32(name.encode())
        first, *others = gradients.shape[1:] or (1,)
        scale = self.dim**-0.5
        if self.outer:
            sizes = (first, torch.Size(others).numel())
            a, b = (torch.stack([*self._draw(number + i, [n])]) for i, n in enumerate(sizes))
            return gradients.project_outer(a, b) * scale
        return gradients.project_along(lambda: self._draw(number, gradients.shape[1:])) * scale

    def _draw(self, number: int, shape: Sequence[int]) -> Iterator[Tensor]:
        """Draw D directions, on the CPU and in one precision: they are the same everywhere."""
        generator = Generator().manual_seed(number)
        for _ in range(self.dim):
            entries = torch.empty(shape, dtype=torch.float32)
            if self.distribution == "normal":
                yield entries.normal_(generator=generator)
            else:
                yield entries.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)


def _whole_models() -> Iterator[Module]:
    """List the models that were extended, and live, without their parts."""
    return (model for model in CTX.extended() if not vars(model).get("_backpack_name"))


def _name(p: Parameter, models: Iterable[Module]) -> str:
    """Return the name of a parameter in the first model that has it."""
    own = home(p)
    names = (n for model in models for n, other in model.named_parameters() if other is own)
    return next(names, "")

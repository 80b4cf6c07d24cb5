"""Sums of clipped individual gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.engine.factored import FactoredGrad
from backpack.core.engine.products import Products
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension

Groups = Sequence[Sequence[Parameter]]
Per = Literal["model", "parameter"] | Groups | Callable[[list[Parameter]], Groups]


class ClippedGrad(FirstOrderBackpropExtension):
    r"""Sum of clipped individual gradients, saved in ``grad_clipped``.

    .. math:: \sum_{n=1}^N w_n \min\left(1, \frac{R}{\lVert g_n \rVert}\right) g_n

    With ``stability=γ``, they are normalised, by factors :math:`R / (\lVert g_n \rVert + γ)`.
    The norm is that over all parameters of a group, by default of the model; it is saved in
    ``clip_norms`` of each parameter, ``[N]`` before clipping. Both are there when ``backward()``
    returns: the norms need all layers, so that extension hooks do not see them.

    :Shape: ``[*p]``
    :Scale: That of ``p.grad``, with a mean g_n carries 1/N. So does the norm, unless
        ``loss_reduction="mean"`` compares the gradients of the samples' own losses, ``N g_n``.
    :Cost: Squared norms, as :class:`BatchL2Grad`, and one more product for each layer. There is no
        second backward pass, and no ``[N, *p]`` but where that is smaller than what makes it.
    :Source: Abadi et al., Deep learning with differential privacy (CCS 2016); norms before the
        sum: Li, Tramèr, Liang, Hashimoto, Large language models can be strong differentially
        private learners (ICLR 2022); one pass: Bu, Wang, Zha, Karypis, Differentially private
        optimization on large model at small cost (ICML 2023). For ``stability``: Bu, Wang, Zha,
        Karypis, Automatic clipping: differentially private deep learning made easier and stronger
        (NeurIPS 2023).

    Attributes:
        shares_norm: Whether the bound is one for all groups together: each has ``R / √K`` of K.
        leaves_out_infinite: Whether a sample adds nothing if its norm is not finite, where it would
            make the sum NaN. To see whether there is one, a GPU is waited for.
        latest_norm: What ``max_norm`` was in the latest backward pass.
        passes: How many backward passes there were, of which the latest has left its sums.
    """

    needs = ("factored", "square_norm")
    shape = ("*p",)

    def __init__(
        self,
        max_norm: float = 1.0,
        per: Per = "model",
        weights: Tensor | None = None,
        loss_reduction: Literal["mean", "sum"] = "sum",
        subsampling: Sequence[int] | None = None,
        stability: float | None = None,
    ):
        """Store the options; they may be changed between backward passes.

        Args:
            max_norm: R, largest norm after clipping.
            per: What the norm is taken over: all parameters (``"model"``), each alone
                (``"parameter"``), or groups: sequences of parameters, or a function that is called
                with the parameters that have individual gradients and returns such groups. A
                parameter in none of them has no result.
            weights: w, a factor for each sample, ``[N]``. Default: 1.
            loss_reduction: ``"mean"`` if the loss is one over the batch and R bounds ``N g_n``.
            subsampling: Indices of the samples of the batch to look at. Default: all.
            stability: γ, to normalise gradients; small next to their norms. Default: clip them.

        Raises:
            ValueError: If an option is out of range, or a parameter is in two groups.
        """
        if isinstance(max_norm, (list, tuple)):
            raise ValueError(
                f"max_norm is one number, got {max_norm!r}: groups that are given with per=... "
                "have the same bound."
            )
        if stability is not None and not stability > 0:
            raise ValueError(f"stability has to be larger than 0, or None, got {stability}.")
        if not max_norm > 0:
            raise ValueError(f"max_norm has to be larger than 0, got {max_norm}.")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction is 'mean' or 'sum', got {loss_reduction!r}.")
        if loss_reduction == "mean" and subsampling is not None:
            raise ValueError(
                "loss_reduction='mean' multiplies by the number of samples in the batch, which "
                "is not known with subsampling: divide max_norm by it, and use 'sum'."
            )
        if isinstance(per, str) and per not in ("model", "parameter"):
            raise ValueError(f"per is 'model', 'parameter' or groups of parameters, got {per!r}.")
        if not isinstance(per, str) and not callable(per):
            per = _checked([list(group) for group in per])
        self.max_norm = max_norm
        self.per = per
        self.weights = weights
        self.loss_reduction = loss_reduction
        self.stability = stability
        self.shares_norm = False
        self.leaves_out_infinite = False
        self.latest_norm = float(max_norm)
        self.passes = 0
        super().__init__("grad_clipped", subsampling=subsampling)

    def extract(self, products: Products) -> FactoredGrad:
        """Return what is needed until all norms are known."""
        return products["factored"]

    def finish(
        self, collected: MutableMapping[Parameter, Any]
    ) -> Iterator[tuple[Parameter, str, Tensor]]:
        """Clip and sum; what is not needed any more is freed on the way."""
        self.latest_norm = self.max_norm
        self.passes += 1
        groups = self._groups(list(collected))
        bound = self.max_norm / max(1, len(groups)) ** 0.5 if self.shares_norm else self.max_norm
        for group in groups:
            members = {p: FactoredGrad.of(collected.pop(p)) for p in group if p in collected}
            if not members:
                continue
            squares = _joint_squares(list(members.values()))
            if self.loss_reduction == "mean":
                squares = squares * len(squares) ** 2
            norms = squares.sqrt()
            # of zero, a root has no derivative: what is not clipped does not depend on it
            if self.stability is None:
                factors = (squares / bound / bound).clamp(min=1).rsqrt()
            else:
                lengths = torch.where(squares > 0, squares, 1).sqrt().where(squares > 0, 0)
                factors = bound / (lengths + self.stability)
            if self.weights is not None:
                if self.weights.shape != norms.shape:
                    raise ValueError(
                        f"ClippedGrad: the weights are {list(self.weights.shape)}, but there are "
                        f"{len(norms)} samples: give one for each, [N]."
                    )
                factors = factors * self.weights.to(factors)
            if self.leaves_out_infinite and not (is_finite := squares.isfinite()).all():
                members = {p: gradients[is_finite] for p, gradients in members.items()}
                factors = factors[is_finite]
            while members:
                p, gradients = members.popitem()
                yield p, self.savefield, gradients.weighted_sum(factors)
                yield p, "clip_norms", norms.to(gradients.device)

    def _groups(self, parameters: list[Parameter]) -> Groups:
        if self.per == "model":
            return [parameters]
        if self.per == "parameter":
            return [[p] for p in parameters]
        return _checked(self.per(parameters)) if callable(self.per) else self.per


def _checked(groups: Groups) -> Groups:
    """Refuse groups that overlap: a gradient would be clipped twice."""
    ids = list(map(id, chain.from_iterable(groups)))
    if len(set(ids)) < len(ids):
        shapes = [list(p.shape) for p in chain.from_iterable(groups) if ids.count(id(p)) > 1]
        raise ValueError(
            f"ClippedGrad: a parameter of shape {shapes[0]} is in two groups (or twice in one). "
            "Each belongs to one."
        )
    return groups


def _joint_squares(gradients: Sequence[FactoredGrad]) -> Tensor:
    """Return the squared norm of each sample's gradient over several parameters.

    Args:
        gradients: Those of each parameter, ``[N, *p]``.

    Returns:
        ``[N]``, at least in single precision.

    Raises:
        ValueError: If the numbers of samples differ.
    """
    shapes = {len(g): list(g.shape) for g in gradients}
    if len(shapes) > 1:
        raise ValueError(
            "Parameters with individual gradients of different numbers of samples have no joint "
            f"norms: {', '.join(map(str, shapes.values()))}. If functions in the forward pass "
            "choose or move rows (of experts, of tokens), use extend(model, use_converter=True); "
            "else clip them in groups of their own (per=...), or use one backward pass for each "
            "batch."
        )
    squares = [g.square_norms() for g in gradients]
    precision = reduce(torch.promote_types, (s.dtype for s in squares))
    device = squares[0].device
    total: Any = sum(s.to(device, precision) for s in squares)
    return total

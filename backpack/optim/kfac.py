"""Kronecker factors of the generalised Gauss-Newton matrix as a preconditioner."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from backpack import extensions
from backpack.context import CTX
from backpack.core.engine.products import (
    EIGEN_SQUARES,
    GRAMS,
    JOINT_EIGEN_SQUARES,
    Bases,
    Products,
)
from backpack.core.engine.propagations import InBases, LossFactor
from backpack.core.record.registry import derivatives_of
from backpack.distributed.shards import own_part, whole
from backpack.extensions import HBP
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.hbp import MAX_FACTOR_SIZE
from backpack.optim.base import Group
from backpack.optim.preconditioned import PreconditionedOptimizer, Trained
from backpack.utils.kroneckers import (
    apply_kfac_mat_prod,
    eigh_semidefinite,
    factored_damping,
    transposed,
)


class AveragedEKFAC(SecondOrderBackpropExtension):
    """Kronecker factors, and second moments along eigenvectors that do not change with each batch.

    The value is a list: the factors, and the sums of squares along the eigenvectors of a parameter,
    or of those factors if it has none yet.
    """

    def __init__(self, factors: HBP):
        """Do what an extension for Kronecker factors does.

        Raises:
            ValueError: If nothing travels back that there are second moments of.
        """
        if not isinstance(factors.propagation, LossFactor):
            raise ValueError(
                f"KFAC with ekfac=True needs second moments of what travels back, but "
                f"{factors!r} has none. Use KFAC() or KFLR() of backpack.extensions."
            )
        if isinstance(factors.max_factor_size, int) and factors.max_factor_size < MAX_FACTOR_SIZE:
            raise ValueError(
                f"KFAC with ekfac=True has whole factors, but {factors!r} has diagonals of those "
                f"with more than {factors.max_factor_size} rows. Leave max_factor_size out."
            )
        self.inner = self.propagation = factors.propagation
        self.approximation, self.joint_bias = factors.approximation, factors.joint_bias
        squares = JOINT_EIGEN_SQUARES if self.joint_bias else EIGEN_SQUARES
        self.needs = (  # type: ignore[misc]
            GRAMS[self.approximation],
            squares[self.approximation],
        )
        super().__init__("_backpack_ekfac", subsampling=factors.get_subsampling())

    def along(self, bases: Mapping[Any, Sequence[Tensor]]) -> AveragedEKFAC:
        """Return the extension for some eigenvectors."""
        known: dict[Any, Bases] = {p: {self.needs[1]: own} for p, own in bases.items()}
        other = copy(self)
        other.propagation = InBases(self.inner, known) if known else self.inner
        return other

    def extract(self, products: Products) -> list[Tensor]:
        """Return the factors, and the sums of squares; nothing of a bias that is joined."""
        if products.swaps_axes:
            raise NotImplementedError(
                f"KFAC with ekfac=True has no transposed convolutions (a weight "
                f"{list(products.parameter.shape)}). Leave them out, for another optimiser."
            )
        squares = products[self.needs[1]]
        factors = products.kronecker_factors(self.approximation, joint=self.joint_bias)
        return [*factors, squares] if factors else []


class KFAC(PreconditionedOptimizer):
    """Gradient descent preconditioned with Kronecker factors of the GGN's blocks.

    ``θ ← θ − ν α (A ⊗ B ⊗ … + (λ + η) I)⁻¹ m`` for each parameter, with exponential moving averages
    of the gradient (m) and of the factors, all without the bias from their start. Any list of
    factors will do: two for the weight of a layer, one for a bias or another small parameter, one
    for each axis of a large one.

    With ``ekfac=True``, ``A ⊗ B ⊗ …`` is replaced by ``Q diag(s) Qᵀ``, with the eigenvectors
    ``Q = U_A ⊗ U_B ⊗ …`` of the averaged factors and a moving average s of the second moments along
    them. When the eigenvectors change to ``Q'``, s becomes the diagonal of the same matrix there,
    ``(Q'ᵀ Q)² s`` with entrywise squares.

    Sources: Martens, Grosse, Optimizing neural networks with Kronecker-factored approximate
    curvature (ICML 2015); for other factors, Botev, Ritter, Barber, Practical Gauss-Newton
    optimisation for deep learning (ICML 2017); for the bound, Ba, Grosse, Martens, Distributed
    second-order optimization using Kronecker-factored approximations (ICLR 2017); for ``ekfac``,
    George, Laurent, Bouthillier, Ballas, Vincent, Fast approximate natural gradient descent in a
    Kronecker-factored eigenbasis (NeurIPS 2018).
    """

    at_least: ClassVar = {**PreconditionedOptimizer.at_least, "inverse_every": 1}

    def __init__(
        self,
        params: Any,
        lr: float = 0.2,
        damping: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        curvature_every: int = 1,
        inverse_every: int = 10,
        factored: bool = True,
        *,
        extension: HBP | None = None,
        kl_clip: float | None = 0.03,
        adapt_damping_every: int | None = None,
        ekfac: bool = False,
    ):
        """Store the options. Those up to ``factored`` may differ between groups.

        Args:
            params: Parameters, named parameters, or groups.
            lr: Step size α.
            damping: λ, in units of the curvature.
            betas: Forgetting factors of the averages of gradient (the momentum) and factors.
            weight_decay: η, adds η/2 ‖θ‖² to the objective: ηθ to its gradient, η to its curvature.
            curvature_every: Number of steps between updates of the factors. In between,
                ``extensions`` is empty.
            inverse_every: Number of steps between eigendecompositions of the factors. In each of
                the first that many steps there is one, as the averages change fast then.
            factored: Damp each factor, see :func:`~backpack.utils.kroneckers.factored_damping`,
                instead of their product.
            extension: ``KFAC()`` (default), ``KFLR()`` or ``KFRA()`` of ``backpack.extensions``.
                With ``joint_bias=True``, a weight and its bias, which have to be in one group, have
                one solution.
            kl_clip: Bound κ for ``δᵀ(C + (λ + η) I)δ``, with δ the whole step, which is scaled down
                if it is longer. None: no bound.
            adapt_damping_every: Number of steps after which the closure runs a second time, to
                compare the gain with what the quadratic model promised: λ falls if it was more than
                3/4 of that, grows if it was less than 1/4. None: λ stays.
            ekfac: Average the second moments along the eigenvectors, instead of multiplying the
                eigenvalues of the factors. The damping is then added to them, whatever
                ``factored`` says.

        Raises:
            ValueError: If an option is out of range, or the extension has nothing to take second
                moments of.
        """
        extension = extensions.KFAC() if extension is None else extension
        if not isinstance(extension, HBP):
            raise ValueError(
                f"KFAC takes an instance of KFAC, KFLR, KFRA or HBP of backpack.extensions, got "
                f"{extension!r}."
            )
        defaults = {
            "lr": lr,
            "damping": damping,
            "betas": betas,
            "weight_decay": weight_decay,
            "curvature_every": curvature_every,
            "inverse_every": inverse_every,
            "factored": factored,
        }
        self.ekfac = ekfac
        own = AveragedEKFAC(extension) if ekfac else extension
        super().__init__(params, defaults, own, kl_clip, adapt_damping_every)

    @property
    def extensions(self) -> tuple[BackpropExtension, ...]:
        """The extension, if the next step updates the curvature; else nothing."""
        found = super().extensions
        if not found or not isinstance(self.extension, AveragedEKFAC):
            return found
        known = {p: state.get("eigenvectors") for p, state in self.state.items()}
        of_all = {p: bases for p, bases in known.items() if bases is not None}
        return (self.extension.along(of_all),)

    def _directions(self, trained: Sequence[Trained]) -> list[Tensor]:
        joined = {one.p: one for one in trained if not one.state["curvature"]}
        bias_of: dict[Any, Trained] = {}
        for weight, bias in _weights_of(joined):
            bias_of[weight] = joined[bias]
        groups = {one.p: one.group for one in trained}
        alone = joined.keys() - {b.p for w, b in bias_of.items() if groups.get(w) is b.group}
        if alone:
            raise ValueError(
                f"{self._describe(alone.pop())} is joined with a weight (joint_bias=True) that has "
                "no gradient or is not in the same group. Put both in one group, or use "
                "joint_bias=False."
            )
        found: dict[Any, Tensor] = {}
        for group, p, state, _ in trained:
            shift = group["damping"] + group["weight_decay"]
            if p in bias_of:
                other = bias_of[p]
                found[p], found[other.p] = self._solve_joint(group, state, other.state, shift)
            elif p not in joined:
                found[p] = self._solve(group, p, state, shift)
        return [found[one.p] for one in trained]

    def _solve_joint(
        self, group: Group, state: dict[str, Any], of_bias: dict[str, Any], shift: float
    ) -> tuple[Tensor, Tensor]:
        """Return the directions of a weight and its bias, ``[O, *]`` and ``[O]``."""
        weight, bias = whole(state["gradient"]), whole(of_bias["gradient"])
        axis = int(len(state["curvature"][0]) == len(weight))  # else the input's factor is first
        rows = weight.flatten(1)
        gradient = torch.cat([rows, bias.unsqueeze(axis)], axis)
        direction = self._solved(group, state, shift, gradient)
        of_bias["eigenvectors"] = []
        own, last = direction.split([rows.shape[axis], 1], axis)
        of_weight = own_part(own.reshape(weight.shape), state["gradient"])
        return of_weight, own_part(last.reshape(bias.shape), of_bias["gradient"])

    def _solve(self, group: Group, p: Tensor, state: dict[str, Any], shift: float) -> Tensor:
        gradient = whole(state["gradient"])
        if "swaps_axes" not in state:
            state["swaps_axes"] = _swaps_axes(p)
        if state["swaps_axes"]:
            gradient = gradient.transpose(0, 1)
        direction = self._solved(group, state, shift, gradient)
        if state["swaps_axes"]:
            direction = direction.transpose(0, 1).contiguous()
        return own_part(direction, state["gradient"])

    def _solved(
        self, group: Group, state: dict[str, Any], shift: float, gradient: Tensor
    ) -> Tensor:
        """Solve for a gradient with its axes in the order of the factors."""
        age, interval = state["step"] - 1, group["inverse_every"]
        factors = state["curvature"][:-1] if self.ekfac else state["curvature"]
        if age < interval or age % interval == 0:  # at the start, the averages change fast
            before = state.get("eigenvectors")
            decompositions = [eigh_semidefinite(factor) for factor in factors]
            state["eigenvalues"] = [values for values, _ in decompositions]
            state["eigenvectors"] = [vectors for _, vectors in decompositions]
            if self.ekfac and before is not None:
                turns = zip(state["eigenvectors"], before, strict=True)
                squares = [(new.T @ old).square() for new, old in turns]
                moments = state["curvature"][-1]
                turned = apply_kfac_mat_prod(squares, moments.flatten()).view_as(moments)
                state["curvature"] = [*factors, turned]

        eigenvalues = state["eigenvalues"]
        if self.ekfac:
            damped = state["curvature"][-1].flatten() + shift
        elif group["factored"]:
            dampings = factored_damping(eigenvalues, shift)
            damped = reduce(torch.kron, [e + s for e, s in zip(eigenvalues, dampings, strict=True)])
        else:
            damped = reduce(torch.kron, eigenvalues) + shift
        turned_back = [transposed(q) for q in state["eigenvectors"]]
        rotated = apply_kfac_mat_prod(turned_back, gradient.flatten())
        direction = apply_kfac_mat_prod(state["eigenvectors"], rotated / damped)
        return direction.reshape(gradient.shape)


def _weights_of(biases: Collection[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the weights of the layers that some biases belong to, each with its bias."""
    for module in CTX.extended() if biases else ():
        weight, bias = map(module._parameters.get, ("weight", "bias"))
        if weight is not None and bias is not None and bias in biases:
            yield weight, bias


def _swaps_axes(p: Tensor) -> bool:
    """Whether the Kronecker factors are those of ``p.transpose(0, 1)``: of transposed layers alone.

    A weight that they share with others has its block, or its marginals, in the order of its axes.
    """
    owners = [m for m in CTX.extended() if any(p is own for own in m._parameters.values())]
    swap = [getattr(derivatives_of(m), "kronecker_swaps_axes", False) for m in owners]
    return p.dim() > 1 and bool(swap) and all(swap)

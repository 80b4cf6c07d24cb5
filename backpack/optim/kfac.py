"""Kronecker factors of the generalised Gauss-Newton matrix as a preconditioner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import reduce
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from backpack import extensions
from backpack.context import CTX
from backpack.core.engine import results
from backpack.core.engine.extracted import EIGEN_SQUARES, GRAMS, JOINT_EIGEN_SQUARES, Bases
from backpack.core.engine.products import Products
from backpack.core.engine.propagations import InBases, LossFactor
from backpack.core.engine.results import Factors
from backpack.core.record.module_state import describe
from backpack.core.record.registry import derivatives_of
from backpack.distributed import check_group
from backpack.distributed.data_group import telling
from backpack.distributed.shards import own_part, whole
from backpack.extensions import HBP
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.hbp import MAX_FACTOR_SIZE
from backpack.optim.base import Closure, Group
from backpack.optim.preconditioned import PreconditionedOptimizer, Trained
from backpack.optim.spreading import Spread
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
        if factors.max_factor_size not in (None, MAX_FACTOR_SIZE):
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
        squares = products[self.needs[1]]
        factors = products.kronecker_factors(self.approximation, joint=self.joint_bias)
        return Factors([*factors, squares] if factors else [], products, self.joint_bias)


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
        process_group: ProcessGroup | None = None,
        worker_fraction: float = 1.0,
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
            process_group: Processes over which the gradients are averaged, to spread the
                decompositions over. Default: each does all. Steps are the same.
            worker_fraction: The part of these that holds the eigenvectors of a parameter and solves
                with them. 1: all do, and eigenvectors are sent when they change. 1 / (number of
                processes): one does, and its result is sent in each step, which takes the least
                memory. In between, the one within a team and the other between teams.

        Raises:
            ValueError: If an option is out of range, or the extension has nothing to take second
                moments of, or ``ekfac`` is to be spread over processes.
        """
        check_group(process_group)
        if isinstance(process_group, str) or (process_group is not None and ekfac):
            raise ValueError(
                "process_group is a group of torch.distributed, such as group.WORLD, or None; with "
                f"ekfac=True, whose moments need all eigenvectors, it is None. Got {process_group}."
            )
        self._spread = None if process_group is None else Spread(process_group, worker_fraction)
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
        self._joined: dict[Tensor, Tensor] = {}  # weights, with their bias
        own = AveragedEKFAC(extension) if ekfac else extension
        extension.tells_order = True
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

    def needs_state(self, p: Tensor, attribute: str) -> bool:
        """Whether this process needs a part of a parameter's state: eigenvectors for workers."""
        if self._spread is None or attribute not in ("eigenvalues", "eigenvectors"):
            return True
        self._spread.place([q for group in self.param_groups for q in group["params"]])
        return self._spread.solves(p)

    def _update(self, closure: Closure | None, loss: Any) -> None:
        with telling(None if self._spread is None else self._spread.group):
            super()._update(closure, loss)

    def _directions(self, trained: Sequence[Trained]) -> list[Tensor]:
        systems, spread = self._systems(trained), self._spread
        due = [one for one in systems if one.is_decomposed]
        if spread is not None:
            spread.place([p for group in self.param_groups for p in group["params"]])
        self._check_decomposed(systems)
        if spread is None:
            for one in due:
                self._decompose(one.state)
        else:
            self._decompose_together(spread, systems, due)
        found: dict[Tensor, Tensor] = {}
        for one in systems:
            gradient, solution = one.gradient(), None
            if spread is None or spread.solves(one.p):
                solution = self._solution(one, gradient)
            if spread is not None:
                solution = spread.spread(one.p, solution, gradient)
            assert solution is not None
            found |= one.directions(solution)
        return [found[one.p] for one in trained]

    def _systems(self, trained: Sequence[Trained]) -> list[System]:
        """List what is solved for: a weight together with its bias, if they are joined."""
        joined = {one.p: one for one in trained if not one.state["curvature"]}
        bias_of = self._bias_of(trained, joined) if joined else {}
        groups = {one.p: one.group for one in trained}
        alone = joined.keys() - {b.p for w, b in bias_of.items() if groups.get(w) is b.group}
        if alone:
            raise ValueError(
                f"{self._describe(alone.pop())} is joined with a weight (joint_bias=True) that has "
                "no gradient or is not in the same group. Put both in one group, or use "
                "joint_bias=False."
            )
        found = []
        for one in trained:
            if one.p in bias_of:
                bias = bias_of[one.p].p
                if self._joined.setdefault(one.p, bias) is not bias:
                    raise NotImplementedError(
                        f"{self._describe(one.p)} is joined (joint_bias=True) with "
                        f"{self._describe(bias)} now, and with another bias in a step before: its "
                        "Kronecker factors are averages of both. Use joint_bias=False."
                    )
                bias_of[one.p].state["eigenvectors"] = []  # it has none itself
                found.append(System(one.group, one.p, one.state, bias_of[one.p]))
            elif one.p not in joined:
                self._check_alone(one)
                if "swaps_axes" not in one.state:
                    told = results.noted(one.p, self.extension.savefield).swaps_axes
                    guess = _swaps_axes(one.p, one.state["curvature"]) if told is None else told
                    one.state["swaps_axes"] = guess
                found.append(System(one.group, one.p, one.state))
        return found

    def _bias_of(
        self, trained: Sequence[Trained], joined: Mapping[Tensor, Trained]
    ) -> dict[Tensor, Trained]:
        """Find the weight of each bias that is joined with one.

        A backward pass has noted it, but in a state that was loaded since. Then, several extended
        modules may have the bias, or the weight, of which one took part in the backward pass. A
        weight with factors of its own, or without a gradient, has joined none.

        Raises:
            NotImplementedError: If there are several possibilities.
        """
        alone = {one.p for one in trained if self._is_alone(one)}
        found: dict[Tensor, Trained] = {}
        options: dict[Tensor, dict[Tensor, str]] = {}
        for own_bias, trained_bias in joined.items():
            known = results.noted(own_bias, self.extension.savefield).partner
            partner = None if known is None else known()
            if partner is not None and partner.grad is not None:
                found[partner] = trained_bias
            else:
                options[own_bias] = {}
        for module in CTX.extended():
            weight, bias = map(module._parameters.get, ("weight", "bias"))
            if bias is None or bias not in options or weight is None:
                continue
            if weight in alone or weight in found or weight.grad is None:
                continue
            options[bias].setdefault(weight, describe(module))
        while options:
            own = min(options, key=lambda b: len(options[b]))
            weights = options.pop(own)
            if len(weights) > 1:
                raise NotImplementedError(
                    f"{self._describe(own)} is joined with a weight (joint_bias=True), but it "
                    f"belongs to several modules ({', '.join(weights.values())}), and it is not "
                    "known with which one. Use joint_bias=False, or a bias for each module."
                )
            for one in weights:
                found[one] = joined[own]
                for others in options.values():
                    others.pop(one, None)
        return found

    def _factors(self, state: dict[str, Any]) -> list[Tensor]:
        """Return the averages of the Kronecker factors of a parameter."""
        curvature: list[Tensor] = state["curvature"]
        return curvature[:-1] if self.ekfac else curvature

    def _is_alone(self, one: Trained) -> bool:
        """Whether a parameter has its Kronecker factors without another one."""
        factors = self._factors(one.state)
        return bool(factors) and prod(map(len, factors)) == one.p.numel()

    def _check_alone(self, one: Trained) -> None:
        """Refuse a weight without the bias that it has its Kronecker factors with."""
        if not self._is_alone(one):
            sizes = [len(factor) for factor in self._factors(one.state)]
            raise ValueError(
                f"{self._describe(one.p)}, {list(one.p.shape)}, has Kronecker factors of sizes "
                f"{sizes} together with a bias (joint_bias=True) that has no gradient, or is not "
                "in the optimiser. Train both, or use joint_bias=False."
            )

    def _check_decomposed(self, systems: Sequence[System]) -> None:
        """Refuse a state that lacks the eigenvectors which this process solves with."""
        for one in systems:
            solves = self._spread is None or self._spread.solves(one.p)
            if solves and not (one.is_decomposed or "eigenvectors" in one.state):
                raise RuntimeError(
                    f"KFAC has no eigenvectors of {self._describe(one.p)}: its state is that of a "
                    "process that was no worker of it. Save and load states of several processes "
                    "with torch.distributed.checkpoint, see backpack.optim.load_checkpoint."
                )

    def _decompose_together(
        self, spread: Spread, systems: Sequence[System], due: Sequence[System]
    ) -> None:
        """Decompose what is this process's, and take the rest that it solves with from others."""
        for one in due:
            if spread.decomposes(one.p):
                self._decompose(one.state)
        if due or spread.sends_results:
            shapes = [list(one.p.shape) for one in systems]
            spread.group.agree(f"step of KFAC: {len(due)} decompositions, directions of {shapes}")
        for one in due:
            if spread.solves(one.p):
                _share(spread, one.p, one.state)

    def _decompose(self, state: dict[str, Any]) -> None:
        """Replace the eigenvectors of a parameter by those of its averaged factors."""
        factors, before = self._factors(state), state.get("eigenvectors")
        decompositions = [eigh_semidefinite(factor) for factor in factors]
        state["eigenvalues"] = [values for values, _ in decompositions]
        state["eigenvectors"] = [vectors for _, vectors in decompositions]
        if self.ekfac and before is not None:
            turns = zip(state["eigenvectors"], before, strict=True)
            squares = [(new.T @ old).square() for new, old in turns]
            moments = state["curvature"][-1]
            turned = apply_kfac_mat_prod(squares, moments.flatten()).view_as(moments)
            state["curvature"] = [*factors, turned]

    def _solution(self, system: System, gradient: Tensor) -> Tensor:
        """Solve for the average of the gradient."""
        group, state = system.group, system.state
        shift, eigenvalues = group["damping"] + group["weight_decay"], state["eigenvalues"]
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


class System:
    """What is solved for together: a parameter, or a weight and its bias.

    Attributes:
        is_decomposed: Whether the step at hand decomposes factors: at the start, averages change
            fast.
    """

    def __init__(self, group: Group, p: Tensor, state: dict[str, Any], bias: Trained | None = None):
        self.group, self.p, self.state, self.bias = group, p, state, bias
        age, interval = state["step"] - 1, group["inverse_every"]
        self.is_decomposed = age < interval or age % interval == 0
        # if the first factor is the input's, the bias is a row
        self._axis = int(len(state["curvature"][0]) == len(p)) if bias is not None else 0

    def gradient(self) -> Tensor:
        """Return the average of the gradient, with its axes in the order of the factors."""
        own = whole(self.state["gradient"])
        if self.bias is not None:
            of_bias = whole(self.bias.state["gradient"]).unsqueeze(self._axis)
            return torch.cat([own.flatten(1), of_bias], self._axis)
        return own.transpose(0, 1) if self.state["swaps_axes"] else own

    def directions(self, solution: Tensor) -> dict[Tensor, Tensor]:
        """Return what belongs to each parameter, with its shape and placed like it."""
        like = self.state["gradient"]
        if self.bias is None:
            if self.state["swaps_axes"]:
                solution = solution.transpose(0, 1).contiguous()
            return {self.p: own_part(solution, like)}
        of_bias = self.bias.state["gradient"]
        own, last = solution.split([solution.shape[self._axis] - 1, 1], self._axis)
        return {
            self.p: own_part(own.reshape(like.shape), like),
            self.bias.p: own_part(last.reshape(of_bias.shape), of_bias),
        }


def _share(spread: Spread, p: Tensor, state: dict[str, Any]) -> None:
    """Give the eigenvalues and eigenvectors of a parameter to all that solve with them."""
    factors = state["curvature"]
    like = [*(factor.diagonal() if factor.dim() == 2 else factor for factor in factors), *factors]
    own = None
    if spread.decomposes(p):
        own = [*state["eigenvalues"], *state["eigenvectors"]]
    found = spread.share(p, own, like)
    state["eigenvalues"], state["eigenvectors"] = found[: len(factors)], found[len(factors) :]


def _swaps_axes(p: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether Kronecker factors are those of ``p.transpose(0, 1)``, if no backward pass told.

    Those of transposed layers alone are. A weight that they share with others, or that is used
    where there are no samples, has its block, or its marginals, in the order of its axes.
    """
    sizes = [*map(len, factors[:2])]
    if p.dim() < 2 or not p.numel() or sizes != [p.shape[1], p.numel() // p.shape[1]]:
        return False
    owners = [m for m in CTX.extended() if any(p is own for own in m._parameters.values())]
    swap = [getattr(derivatives_of(m), "kronecker_swaps_axes", False) for m in owners]
    return bool(swap) and all(swap)

"""Steps that are preconditioned with a moving average of the curvature."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from backpack.core.engine.checks import check_one_process
from backpack.core.engine.results import contain_used, note_step, noted
from backpack.core.values import at_least_single
from backpack.distributed.shards import whole
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.optim.base import (
    Closure,
    ExtensionOptimizer,
    Group,
    check_betas,
    load_wide_state,
)
from backpack.utils.autocast import without_autocast
from backpack.utils.warning import warn

# How fast the damping changes, and within which ratios of gains it does not. Source: Martens,
# Grosse, Optimizing neural networks with Kronecker-factored approximate curvature (ICML 2015),
# section 6.5.
ADAPTATION = 19 / 20
TRUSTED = (1 / 4, 3 / 4)


def updated_average(average: Tensor | None, value: Tensor, beta: float, count: int) -> Tensor:
    """Return an exponential moving average that has no bias from its start, with a new value.

    ``(1 - β) sum_s β^(t-s) v_s / (1 - β^t)`` equals ``v_1`` for t = 1, and moves by the fraction
    ``(1 - β) / (1 - β^t)`` of its distance to ``v_t``. It is at least in single precision, in which
    small changes count, and small eigenvalues are more than rounding.

    Args:
        average: The average of the values before; None for the first one.
        value: The new value.
        beta: Forgetting factor β in [0, 1).
        count: Number of values t, the new one included.
    """
    value = at_least_single(value)
    if average is None:
        return value.clone()
    if average.shape != value.shape:
        raise ValueError(
            f"An average of shape {list(average.shape)} gets a value of shape {list(value.shape)}: "
            "other parameters are trained than before (joint_bias=True joins a weight with its "
            "bias while both are). Make a new optimiser."
        )
    return average.lerp(value, (1 - beta) / (1 - beta**count))


class Trained(NamedTuple):
    """A parameter in a step, with its group, its averages, and the gradient of the loss."""

    group: Group
    p: Tensor
    state: dict[str, Any]
    grad: Tensor


def _product(one: Tensor, other: Tensor) -> float:
    """Return the inner product of two tensors, which may be sharded alike."""
    return float(whole((at_least_single(one) * at_least_single(other)).sum()))


class PreconditionedOptimizer(ExtensionOptimizer):
    """θ ← θ − ν α (C + (λ + η) I)⁻¹ m, with averages C of the curvature and m of the gradient.

    A subclass says what the curvature C is, and how to solve with it. α is the step size (``lr``)
    and λ the ``damping``. The objective is the loss plus a penalty η/2 ‖θ‖² (``weight_decay``) with
    gradient ηθ and curvature η. ``betas`` are the forgetting factors of m and C.

    A step that an error stops before it has all updates, such as that of a missing quantity or of a
    decomposition, leaves weights and averages as they were.
    """

    at_least: ClassVar = {**ExtensionOptimizer.at_least, "curvature_every": 1}
    more_than: ClassVar = {"damping": 0}
    _has_told = False  # of gradients, or curvature, that were added to those of the step before

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        extension: BackpropExtension,
        kl_clip: float | None,
        adapt_damping_every: int | None,
    ):
        if kl_clip is not None and not kl_clip > 0:
            raise ValueError(f"kl_clip has to be larger than 0, or None, got {kl_clip}.")
        every = adapt_damping_every
        if every is not None and not (every >= 1 and every % 1 == 0):
            raise ValueError(
                "adapt_damping_every has to be a whole number of steps, at least 1, or None, "
                f"got {every}."
            )
        chosen = extension.get_subsampling()
        if chosen is not None:
            warn(
                f"{type(self).__name__}: {type(extension).__name__} looks at {len(chosen)} of the "
                "N samples of a batch (subsampling), and its results are the part that these have "
                f"in the curvature of the whole batch, about {len(chosen)}/N of it. Make damping "
                "as much smaller, and the steps will be as much larger: lr, too."
            )
        self.kl_clip = kl_clip
        self.adapt_damping_every = adapt_damping_every
        super().__init__(params, defaults, extension)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters with options of its own.

        Args:
            param_group: ``{"params": ..., "lr": ..., ...}``; what is left out has its default.

        Raises:
            ValueError: If an option is out of range.
        """
        check_betas({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` has returned, in the precision of the averages.

        Args:
            state_dict: The state.
        """
        load_wide_state(self, partial(super().load_state_dict, state_dict))

    @property
    def works_on_processes(self) -> bool:
        """Return True, if the quantity is that of all: that is found out in the step."""
        return True

    @property
    def extensions(self) -> tuple[BackpropExtension, ...]:
        """The extension, if the next step updates the curvature; else nothing."""
        due = any(
            self._is_due(group, self.state.get(p, {}))
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad
        )
        return (self.extension,) if due else ()

    @staticmethod
    def _is_due(group: Group, state: dict[str, Any]) -> bool:
        return state.get("step", 0) % group["curvature_every"] == 0

    def _update(self, closure: Closure | None, loss: Any) -> None:
        interval = self.adapt_damping_every
        self._check_processes()
        if interval is not None and closure is None:
            raise ValueError(
                "adapt_damping_every compares losses before and after the step: give step() a "
                "closure."
            )
        if interval is not None and loss is None:
            raise ValueError("adapt_damping_every: the closure has to return the loss.")
        before = 0.0 if interval is None else self._objective(loss)

        slope, square = 0.0, 0.0
        trained: list[Trained] = []
        used = dict(self._used)
        try:
            for group, p, grad in self._trained():
                grad = at_least_single(grad)
                state = dict(self.state.get(p, {}))  # becomes that of the optimiser in the end
                self._average(group, p, state, grad.add(p, alpha=group["weight_decay"]))
                trained.append(Trained(group, p, state, grad))
            if not trained:
                self._refuse_without_gradients()
            self._tell_if_added()  # of new curvature: what was used before is refused
            with without_autocast():
                directions = self._directions(trained)
            if interval is not None or self.kl_clip is not None:
                for (group, p, state, grad), direction in zip(trained, directions, strict=True):
                    # the step δ = -α (C + (λ + η) I)⁻¹ m has the slope gᵀδ and the square of its
                    # length δᵀ(C + (λ + η) I)δ = α² mᵀ(C + (λ + η) I)⁻¹ m
                    gradient = grad.add(p, alpha=group["weight_decay"])
                    slope -= group["lr"] * _product(gradient, direction)
                    square += group["lr"] ** 2 * _product(state["gradient"], direction)
        except BaseException:
            self._used = used  # what was read may be read again
            raise

        scale = 1.0
        if self.kl_clip is not None and square > self.kl_clip:
            scale = (self.kl_clip / square) ** 0.5
        self.state.update({one.p: one.state for one in trained})
        pairs = zip(trained, directions, strict=True)
        steps = [scale * one.group["lr"] * direction for one, direction in pairs]
        for one, step in zip(trained, steps, strict=True):
            one.p.sub_(step)
            note_step(one.p, self.extension.savefield)

        if interval is not None and closure is not None and self._count() % interval == 0:
            torch.clear_autocast_cache()  # of the parameters as they were
            with torch.enable_grad():
                loss = closure()
            gain = before - self._objective(loss)
            self._adapt_damping(gain, -scale * slope - scale**2 * square / 2, interval)

    def _refuse_without_gradients(self) -> None:
        """Refuse a step after a backward pass that has left curvature, but no gradient.

        Raises:
            RuntimeError: If there was one.
        """
        for group in self.param_groups:
            for p in group["params"]:
                value = getattr(p, self.extension.savefield, None)
                tensor = next(iter(value), None) if isinstance(value, list) else value
                used = self._used.get(p)
                if tensor is not None and (used is None or used() is not tensor):
                    raise RuntimeError(
                        f"{type(self).__name__}: {self._describe(p)} has a new "
                        f"{self.extension.savefield}, but no parameter has a gradient. Leave "
                        "gradients=False out of backpack(...), and do not clear gradients between "
                        "backward() and the step."
                    )

    def _check_processes(self) -> None:
        """Refuse a step that would be another one on each process.

        Raises:
            NotImplementedError: If the curvature, or a loss that is read, is that of one of them.
        """
        name, what = self.extension.savefield, type(self).__name__
        if self.adapt_damping_every is not None:
            check_one_process(f"{what} with adapt_damping_every", "Use a fixed damping.")
        for group, p, _ in self._trained():
            new = self._is_due(group, self.state.get(p, {})) and hasattr(p, name)
            if new and noted(p, name).averaged is None:
                check_one_process(
                    what, "Put the model into a DistributedDataParallel, or use fully_shard()."
                )

    def _tell_if_added(self) -> None:
        """Warn once if either gradients or curvature contain those of the step before."""
        if self._has_told:
            return
        name = self.extension.savefield
        for group, p, _ in self._trained():
            gradient, curvature = contain_used(p, name)
            if gradient == curvature or not self._is_due(group, self.state.get(p, {})):
                continue
            self._has_told = True
            if gradient:
                why = (
                    f"the gradient of {self._describe(p)} was added to that of the step before, "
                    "because zero_grad() was not called. It is that of several batches, the "
                    "curvature that of the last one. Call optimizer.zero_grad() before backward()."
                )
            else:
                why = (
                    f"the {name} of {self._describe(p)} was added to that of the step before "
                    "(accumulate=True), because backpack.clear(model) was not called. It is that "
                    "of several batches, the gradient that of the last one. Call "
                    "backpack.clear(model) where you call zero_grad()."
                )
            warn(f"{type(self).__name__}: {why}")
            return

    def _average(self, group: Group, p: Tensor, state: dict[str, Any], gradient: Tensor) -> None:
        """Update the averages of the gradient and, if it is its turn, of the curvature."""
        due = self._is_due(group, state)
        value = self._quantity(p) if due else []
        values = value if isinstance(value, list) else [value]
        if not state:
            state.update(step=0, curvatures=0, gradient=None, curvature=[None] * len(values))
        if due and len(values) != len(state["curvature"]):
            raise ValueError(
                f"{self._describe(p)} has averages of {len(state['curvature'])} matrices, and gets "
                f"{len(values)}: they are those of an optimiser with other options, or other "
                "parameters are trained than before. Make a new optimiser."
            )
        beta, beta_curvature = group["betas"]
        state["step"] += 1
        state["gradient"] = updated_average(state["gradient"], gradient, beta, state["step"])
        if due:
            state["curvatures"] += 1
            state["curvature"] = [
                updated_average(average, v, beta_curvature, state["curvatures"])
                for average, v in zip(state["curvature"], values, strict=True)
            ]

    def _directions(self, trained: Sequence[Trained]) -> list[Tensor]:
        """Return ``(C + (λ + η) I)⁻¹ m`` for each parameter, ``[*p]``."""
        raise NotImplementedError

    def _count(self) -> int:
        """Return the number of steps."""
        return max((state["step"] for state in self.state.values() if state), default=0)

    def _objective(self, loss: Any) -> float:
        """Add η/2 ‖θ‖², of every group with a weight decay η, to a loss."""
        penalties = (
            group["weight_decay"] / 2 * float(at_least_single(p).square().sum())
            for group in self.param_groups
            if group["weight_decay"]
            for p in group["params"]
        )
        return float(torch.as_tensor(loss).detach()) + sum(penalties)

    def _adapt_damping(self, gain: float, predicted: float, steps: int) -> None:
        """Raise the damping if the quadratic model promised too much, lower it if it was right."""
        low, high = TRUSTED
        ratio = gain / predicted if predicted > 0 else 0.0
        factor = ADAPTATION**steps
        for group in self.param_groups:
            if ratio > high:
                group["damping"] *= factor
            elif not ratio >= low:  # a loss that is NaN counts as no gain
                group["damping"] /= factor

"""Optimisers with differential privacy: clipped and noisy gradients for any of ``torch.optim``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import exp, inf
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, Sampler, default_collate

from backpack.core.engine.loss_terms import LossReduction
from backpack.distributed import check_group
from backpack.distributed.data_group import DataGroup, telling
from backpack.extensions import ClippedGrad
from backpack.optim.base import (
    Closure,
    ExtensionOptimizer,
    check_options,
    refuse_model,
    state_behind_hooks,
)
from backpack.optim.other_samples import Program
from backpack.utils.batches import map_tensors

PerGroup = Literal["model", "parameter"] | Iterable[Iterable[Parameter]]


class AdaptiveClipping:
    """A bound that follows a quantile of the norms, by private counts of samples below it.

    After each step ``R ← R exp(-η (b - γ))``, with b the noisy fraction of samples whose norm is at
    most R. Counting takes a part of the privacy, so that the gradients get more noise, and steps
    spend together what ``noise_multiplier`` says.

    Source: Andrew, Thakkar, McMahan, Ramaswamy, Differentially private learning with adaptive
    clipping (NeurIPS 2021), algorithm 1 and theorem 1.
    """

    def __init__(self, quantile: float = 0.5, rate: float = 0.2, count_noise: float = 10.0):
        """Store the options.

        Args:
            quantile: γ, fraction of samples that are not clipped.
            rate: η, step size for the logarithm of R.
            count_noise: Standard deviation of the noise of the count; the source suggests 1/20 of
                the expected number of samples.

        Raises:
            ValueError: If an option is out of range.
        """
        if not 0 <= quantile <= 1 or not rate > 0 or not count_noise > 0:
            raise ValueError(
                "quantile has to be from 0 to 1, rate and count_noise larger than 0, got "
                f"{quantile}, {rate} and {count_noise}."
            )
        self.quantile = quantile
        self.rate = rate
        self.count_noise = count_noise

    def noise_of_gradients(self, noise_multiplier: float) -> float:
        """Return the noise multiplier of the gradients, so that both together spend the given one.

        ``1/σ² = 1/σ_g² + 1/(2 σ_b)²``: a count of ±1/2 changes by 1/2.

        Raises:
            ValueError: If the count alone would spend more.
        """
        rest = (2 * self.count_noise) ** 2 - noise_multiplier**2
        if rest <= 0:
            raise ValueError(
                f"Counts with noise {self.count_noise} spend more privacy than noise_multiplier "
                f"{noise_multiplier} allows: count_noise has to be larger than half of that."
            )
        return noise_multiplier * 2 * self.count_noise / rest**0.5


class DPOptimizer(ExtensionOptimizer):
    """Any optimiser of ``torch.optim`` with private gradients: clipped, summed, with noise.

    ``g = 1/B (sum_n g_n / max(1, ‖g_n‖ / R) + N(0, σ² R² I))`` takes the place of ``p.grad``, then
    the optimiser behind does its step. The norm of an individual gradient g_n is that over all
    parameters of the optimiser. B is the *expected* number of samples in a batch. For the
    guarantee, every batch takes each sample of the data independently with probability B / (number
    of samples), see :class:`PoissonBatches` and :func:`backpack.optim.privacy_spent`; and nothing
    mixes the samples of a batch (batch normalisation does). A step is refused if the backward pass,
    which has to run in the context of ``extensions``, has found something that does, or that cannot
    be looked at: modules, frozen ones included; functions between modules, and of the data in a
    converted model; terms of a loss that is not extended.

    Let the forward pass and the loss run inside of the context, too, as in a closure. In the first
    backward pass, and each whose number is a power of two, their functions run again for batches in
    which some samples have the data of others. A gradient that is no sum over the samples is
    refused, whatever has mixed them (a threshold, a count, what was detached, a number, mixup), and
    so are buffers and other tensors that a batch changes (running statistics). Memory and time are
    those of these passes alone. Not seen is what ran outside of the context (do not normalise data
    by statistics of the batch; losses are refused there, those of torch and extended ones warn), a
    branch that is the same for all these batches, hooks of modules, or of the loss, that change
    gradients, other threads, memory that is read by its address (``data_ptr``), rows of an earlier
    batch that are taken for those of this one, and what has no effect in these passes. Let a loader
    whose samples have as many entries as there are samples run outside: these would be taken for
    samples. A sample is a row of what the model is called with, unless
    :func:`~backpack.assign_samples` has said that it has several. If a loss reads
    several forward passes, row n of each has to be of the same sample. A sample whose gradient is
    not finite adds nothing.

    A parameter that takes no part in a backward pass gets no noise, and stays: which ones these are
    must not depend on the data, as in a network that routes samples to layers. There, let each
    layer take part, with a term of zero for instance.

    On several processes with samples of their own (``process_group``), the clipped sums of all are
    added up, with the noise that the first process draws: the step is that of one process with all
    samples, and the same on all. The model is no ``DistributedDataParallel`` then, or averages
    nothing: ``backpack(*optimizer.extensions, process_group=None)``. All processes do every step, a
    process without samples by :meth:`step_without_samples`.

    Options of groups, schedulers and ``state_dict`` are those of the optimiser behind.

    Source: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, Deep learning with differential
    privacy (CCS 2016), algorithm 1.
    """

    at_least: ClassVar[dict[str, float]] = {}
    on_processes: ClassVar = "Give process_group=torch.distributed.group.WORLD."
    averaged_over = None  # sums are added up here

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        max_grad_norm: float,
        noise_multiplier: float,
        expected_batch_size: float,
        loss_reduction: Literal["mean", "sum"] = "mean",
        generator: Generator | None = None,
        adaptive: AdaptiveClipping | None = None,
        process_group: ProcessGroup | None = None,
        per: PerGroup = "model",
        stability: float | None = None,
    ):
        """Store the options.

        Args:
            optimizer: Does the update. Its step reads ``p.grad`` and takes no closure.
            max_grad_norm: R, largest norm of an individual gradient.
            noise_multiplier: σ, standard deviation of the noise in units of R.
            expected_batch_size: B, number of samples in a batch on average over batches; on several
                processes, of all of them.
            loss_reduction: That of the loss. With a mean, ``backward()`` divides individual
                gradients by the number of samples in the batch, which is undone before clipping.
                It has to be ``"sum"`` if a mean would divide by something that depends on other
                samples: with class weights or ``ignore_index``. Another one than that of a
                loss of torch on which ``backward()`` is called is refused in the step; what becomes
                of the value before ``backward()``, such as ``loss / 4``, is yours to know.
            generator: Draws the noise. Default: that of torch. Neither is made for cryptography.
                No part of ``state_dict``: a new one with the old seed draws the old noise again.
            adaptive: Let R follow a quantile of the norms. Default: R stays.
            process_group: Processes of ``torch.distributed`` that have samples of their own, with
                the same weights. Default: this process has all; several are an error.
            per: What is clipped together: all parameters (``"model"``), each alone
                (``"parameter"``), or groups, such as ``[layer.parameters() for layer in model]``.
                Each of K groups has the bound ``R / √K``, so that R bounds a sample's gradient, and
                noise and accounting stay as they are.
            stability: γ, small next to norms of gradients: they are normalised, to ``R g / (‖g‖ +
                γ)``, instead of clipped. Default: clip.

        Raises:
            ValueError: If an option is out of range.
            TypeError: If there is no optimiser, or one of this package, whose quantities of the
                data would not be private, or ``adaptive`` is something else.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{type(self).__name__} takes an optimiser, such as "
                f"torch.optim.Adam(model.parameters()), got {optimizer!r}."
            )
        if isinstance(optimizer, ExtensionOptimizer):
            raise TypeError(
                f"{type(self).__name__} makes gradients private, but "
                f"{type(optimizer).__name__} reads {optimizer.extension.savefield} of the data as "
                "well. Use an optimiser that reads p.grad alone, such as torch.optim.Adam."
            )
        check_group(process_group)
        if isinstance(process_group, str):
            raise ValueError(
                "process_group is a group of torch.distributed, such as group.WORLD, or None, got "
                f"{process_group!r}: the step adds up sums itself."
            )
        if isinstance(max_grad_norm, (list, tuple)):
            raise ValueError(
                f"max_grad_norm is one number, got {max_grad_norm!r}. To clip layers alone, give "
                "per='parameter', or groups of parameters."
            )
        if not max_grad_norm > 0 or not noise_multiplier >= 0 or not expected_batch_size > 0:
            raise ValueError(
                "max_grad_norm and expected_batch_size have to be larger than 0, noise_multiplier "
                f"at least 0, got {max_grad_norm}, {expected_batch_size} and {noise_multiplier}."
            )
        _check_finite(max_grad_norm, "max_grad_norm")
        _check_finite(noise_multiplier, "noise_multiplier")
        if not isinstance(adaptive, AdaptiveClipping | None):
            raise TypeError(f"adaptive is such as AdaptiveClipping(), or None, got {adaptive!r}.")
        if adaptive is not None:
            adaptive.noise_of_gradients(noise_multiplier)
        if adaptive is not None and (per != "model" or stability is not None):
            raise ValueError(
                "adaptive= follows the norms over all parameters that are clipped: it goes with "
                "per='model', and without stability."
            )
        self._per = self._checked_groups(optimizer, per)
        self.optimizer = optimizer
        self.noise_multiplier = noise_multiplier
        self.expected_batch_size = expected_batch_size
        self.generator = generator
        self.adaptive = adaptive
        self._group = None if process_group is None else DataGroup(process_group)
        self._sums: dict[Tensor, Tensor] = {}
        self._bound = 0.0  # the largest with which something in the sums was clipped
        self._is_empty = False  # whether the step is one without samples
        # which parameters needed a gradient in the latest step with samples, and which took part
        self._latest: tuple[list[bool], list[int]] = ([], [])
        self._below = 0.0  # samples below the bound, those above counted as -1/2, others as 1/2
        extension = ClippedGrad(
            max_grad_norm, self._members, loss_reduction=loss_reduction, stability=stability
        )
        extension.shares_norm = True
        extension.looks_at_loss, extension.program = True, Program()
        extension.leaves_out_infinite = True
        super().__init__(optimizer.param_groups, optimizer.defaults, extension)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    @property
    def works_on_processes(self) -> bool:
        """Whether sums are those of all processes of a group."""
        return self._group is not None

    @property
    def max_grad_norm(self) -> float:
        """R, largest norm of an individual gradient."""
        return self.extension.max_norm  # type: ignore[attr-defined]

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if not value > 0:
            raise ValueError(f"max_grad_norm has to be larger than 0, got {value}.")
        _check_finite(value, "max_grad_norm")
        self.extension.max_norm = value  # type: ignore[attr-defined]

    def _members(self, found: list[Parameter]) -> list[list[Parameter]]:
        """Return the parameters that are clipped together, of those that are trained here."""
        everything = [p for group in self.param_groups for p in group["params"]]
        if self._per == "model":
            return [everything]
        if self._per == "parameter":
            each = [[p] for p in everything]
        else:
            each = [*self._per]  # type: ignore[list-item]
            known = set(map(id, chain.from_iterable(each)))
            each += [[p] for p in everything if id(p) not in known]  # of groups that came later
        # what takes no part is the same for all samples, see the class
        return [group for group in each if any(p.requires_grad for p in group)]

    def _checked_groups(self, optimizer: Optimizer, per: PerGroup) -> str | list[list[Parameter]]:
        """Refuse what is no choice of groups, or leaves a parameter of the optimiser out.

        Raises:
            ValueError: If it is or does, or a parameter is in two groups.
        """
        if isinstance(per, str):
            if per not in ("model", "parameter"):
                raise ValueError(f"per is 'model', 'parameter' or groups, got {per!r}.")
            return per
        groups = [list(group) for group in per]
        ids = list(map(id, chain.from_iterable(groups)))
        own = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if len(set(ids)) < len(ids) or set(ids) != set(own):
            raise ValueError(
                f"per has {len(groups)} groups of {len(ids)} parameters, but the optimiser has "
                f"{len(own)}: each of these has to be in one group, and no other."
            )
        return groups

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the clipped gradients of the last backward pass to those of the next step.

        A batch may so be computed in parts, each with a backward pass in the context of
        ``extensions``; ``step`` takes the last one by itself. Clipped sums simply add up. If a
        batch is given up after some parts, call ``step()`` for these: else they belong to the next
        batch, in which a sample may be once more, and add more than R.

        Raises:
            RuntimeError: If a parameter has a gradient, but no clipped one that is new, or there
                were several backward passes, of which one alone has left its sums: then the parts
                before are dropped.
            ValueError: If samples were mixed, or nobody can tell, or the loss has another reduction
                than ``loss_reduction``. The parts before are dropped.
        """
        passes, self.extension.passes = self.extension.passes, 0  # type: ignore[attr-defined]
        found = {p: self._quantity(p) for _, p, _ in self._trained()}
        if passes and not found:
            raise RuntimeError(
                f"{type(self).__name__}: a backward pass has left clipped gradients, but no p.grad "
                "says which parameters it has trained. Leave gradients=False out of backpack(...), "
                "and do not clear gradients between backward() and the step."
            )
        try:
            norms: list[Tensor] = [p.clip_norms for p in found]  # type: ignore[attr-defined]
            why = self.extension.program.dependence([*found], norms)
            for p, clipped in found.items():
                self._refuse_mixed(p, clipped)
            self._refuse_dependent(why)
            if passes > 1:
                raise RuntimeError(
                    f"{type(self).__name__}: {passes} backward passes since the last step, but the "
                    "clipped gradients of the last one alone are there. Call accumulate() after "
                    "each to add them up, or zero_grad() to drop those before."
                )
        except Exception:
            # no step takes this batch: a sample may be in the next one again, and would count twice
            self._sums, self._below, self._bound = {}, 0.0, 0.0
            raise
        self._bound = max(self._bound, self.extension.latest_norm)  # type: ignore[attr-defined]
        is_mean = self.extension.loss_reduction == "mean"  # type: ignore[attr-defined]
        for p, clipped in found.items():
            total = clipped * len(p.clip_norms) if is_mean else clipped  # type: ignore[attr-defined]
            self._sums[p] = self._sums[p] + total if p in self._sums else total
        for own in norms[:1]:  # the norms are those of all parameters together
            self._below += float((own <= self.max_grad_norm).sum()) - len(own) / 2
        self.extension.program.clear()  # this is no part of the next pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and let no step use what was clipped before.

        A backward pass outside of the context of ``extensions`` would else be one whose step takes
        the clipped gradients of another batch.

        Args:
            set_to_none: Whether to set them to None, instead of zero.
        """
        super().zero_grad(set_to_none)
        self.extension.passes = 0  # type: ignore[attr-defined]
        for group in self.param_groups:
            for p in group["params"]:
                self._use(p)

    def step_without_samples(self) -> None:
        """Do the step of an empty batch, of noise alone, for the parameters of the step before.

        Batches that take each sample with some probability may be empty, and ``backward()`` refuses
        those. To leave out the step would tell that. So would noise for a parameter that gets none
        in other steps: where there was no step before, or others were frozen, all that need a
        gradient get it, so freeze those that take no part. ``state_dict`` tells nothing of the step
        before: after a resume there was none.
        """
        self._is_empty = True
        try:
            self.step()
        finally:
            self._is_empty = False

    def _is_new(self, p: Tensor) -> bool:
        """Whether a parameter has a gradient, and what belongs to it was not used yet."""
        used = self._used.get(p)
        value = getattr(p, self.extension.savefield, None)
        return p.grad is not None and (used is None or used() is not value)

    def _run(self, closure: Closure) -> Any:
        with telling(self._group):
            return super()._run(closure)

    def _take_sums(self, members: Sequence[Tensor]) -> tuple[dict[Tensor, Tensor], float]:
        """Return the clipped sums of the batch, and the count; an error drops the batch.

        Raises:
            RuntimeError: If there are other processes, and nothing is new here.
        """
        with telling(self._group):
            if not self._is_empty and (not self._sums or any(map(self._is_new, members))):
                self.accumulate()
            if not (self._sums or self._is_empty or self._group is None):
                raise RuntimeError(
                    f"{type(self).__name__}: no backward pass since the last step. Other processes "
                    "wait for this one: call step_without_samples() for an empty batch."
                )
            sums, below = self._sums, self._below
            self._sums, self._below = {}, 0.0
        return sums, below

    def _update(self, closure: Closure | None, loss: Any) -> None:
        if self.param_groups is not self.optimizer.param_groups:
            raise RuntimeError(
                f"{type(self).__name__}: the optimiser behind has other groups of parameters than "
                "this one, because its state was loaded. Load a state by load_state_dict() of "
                f"{type(self).__name__}, which takes that of the optimiser behind as well."
            )
        members = [p for group in self.param_groups for p in group["params"]]
        for p in members:
            if p.requires_grad:  # complex noise has half of the variance in each part
                self._refuse_complex(p)
        sums, below = self._take_sums(members)
        like = members[0]
        has = torch.tensor([p in sums for p in members], dtype=torch.int64, device=like.device)
        what = f"step of {type(self).__name__}"
        if self._group is not None:  # some may have had no sample, or not have used a layer
            (has,) = self._group.total(what, [has])
        needs = [p.requires_grad for p in members]
        if not has.any() and self._is_empty:  # nobody has samples
            has = has.new_tensor(self._latest[1] if self._latest[0] == needs else needs)
        elif has.any():
            self._latest = (needs, has.tolist())
        trained = [p for p, is_trained in zip(members, has.tolist(), strict=True) if is_trained]
        if not trained:
            return
        for p in set(members) - set(trained):
            p.grad = None  # of an earlier pass, in a step without samples
        noisy = [sums.get(p, torch.zeros_like(p)) for p in trained]
        count = torch.full((1,), below, dtype=torch.float64, device=like.device)
        if self._group is None or self._group.is_first:  # noise is added once
            noisy = [total + self._noise(total) for total in noisy]
            if self.adaptive is not None:
                noise = torch.empty(1, device=like.device).normal_(generator=self.generator)
                count += self.adaptive.count_noise * noise
        self._bound = 0.0
        self.extension.passes = 0  # type: ignore[attr-defined]
        if self._group is not None:
            *noisy, count = self._group.total(what, [*noisy, count])
        for p, total in zip(trained, noisy, strict=True):
            p.grad = total / self.expected_batch_size
        if self.adaptive is not None:
            fraction = 0.5 + float(count) / self.expected_batch_size
            distance = fraction - self.adaptive.quantile
            self.max_grad_norm *= exp(-self.adaptive.rate * distance)
        self.optimizer.step()
        self.extension.program.clear()

    def _noise(self, like: Tensor) -> Tensor:
        """Draw the noise of a sum of clipped gradients."""
        noise_multiplier = self.noise_multiplier
        if self.adaptive is not None:
            noise_multiplier = self.adaptive.noise_of_gradients(noise_multiplier)
        noise = torch.empty_like(like).normal_(generator=self.generator)
        return noise.mul_(noise_multiplier * (self._bound or self.max_grad_norm))

    def _refuse_dependent(self, why: str | None) -> None:
        if why is not None:
            raise ValueError(
                f"{type(self).__name__}: the individual gradients may depend on other samples, "
                f"because of {why}: the steps would not be private. Each term of the loss, and "
                "each row in the model, has to depend on one sample, also where no gradient passes "
                "(thresholds and counts of the batch, what was detached, item()). A constant with "
                "as many rows as there are samples belongs into a buffer of the model; a loader "
                "whose samples have as many entries as there are samples, outside of the context."
            )

    def _refuse_mixed(self, p: Tensor, clipped: Tensor) -> None:
        name = type(self).__name__
        mixing = getattr(clipped, "_backpack_mixing", None)
        if mixing is not None:
            raise ValueError(
                f"{name}: the individual gradients of {self._describe(p)} depend on other "
                f"samples, because the network mixes them in {mixing}: the steps would not be "
                "private. Use modules that treat samples alone, such as GroupNorm; targets of the "
                "shape of the predictions; reduction='sum' (and loss_reduction='sum' here) for a "
                "loss with class weights or ignored targets."
            )
        undecided = getattr(clipped, "_backpack_undecided", None)
        if undecided is not None:
            raise ValueError(
                f"{name}: whether the individual gradients of {self._describe(p)} depend on "
                f"other samples cannot be told, because of {undecided}: the steps might not be "
                "private. For a loss, use a module and extend(lossfunc); make functions in the "
                "network modules, or use extend(model, use_converter=True); checkpoint with "
                "use_reentrant=False."
            )

        self._refuse_other_reduction(p, getattr(clipped, "_backpack_reduction", None))

    def _refuse_other_reduction(self, p: Tensor, reduction: LossReduction | None) -> None:
        """Refuse a loss whose individual gradients have another scale, if that is certain."""
        stated = self.extension.loss_reduction  # type: ignore[attr-defined]
        samples = len(p.clip_norms)  # type: ignore[attr-defined]
        if reduction is None or reduction.name == stated or samples == 1:
            return
        rows = reduction.shape[:-1] or reduction.shape
        if any(size % samples == 0 for size in rows):  # else they are rows of something else
            raise ValueError(
                f"{type(self).__name__}: backward() was called on a {reduction.name} "
                f"(reduction={reduction.name!r}) of {reduction.loss}, but loss_reduction is "
                f"{stated!r}. What each sample adds would depend on the size of the batch, and the "
                f"steps would not be private. Use loss_reduction={reduction.name!r}, or another "
                "reduction of the loss."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return that of the optimiser behind, and the bound."""
        return {**super().state_dict(), "max_grad_norm": self.max_grad_norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned.

        Args:
            state_dict: The state; may be that of the optimiser behind alone.
        """
        state = state_behind_hooks(self, partial(super().load_state_dict, state_dict))
        self.optimizer.load_state_dict(state)  # which may keep another precision
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.max_grad_norm = state.get("max_grad_norm", self.max_grad_norm)


def _check_finite(value: float, name: str) -> None:
    """Refuse infinite noise, and an infinite bound, whose noise is NaN even without any.

    Raises:
        ValueError: If it is infinite.
    """
    if value == inf:
        raise ValueError(
            f"{name} has to be finite, got {value}: the noise has a standard deviation of "
            "noise_multiplier times max_grad_norm. To clip nothing, give a bound that no gradient "
            "reaches."
        )


class DPSGD(DPOptimizer):
    """Gradient descent with clipped individual gradients and Gaussian noise.

    :class:`DPOptimizer` around ``torch.optim.SGD``: see there for what it does, and for what is
    refused.
    """

    at_least: ClassVar = {**ExtensionOptimizer.at_least, "momentum": 0}

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float,
        noise_multiplier: float,
        expected_batch_size: float,
        loss_reduction: Literal["mean", "sum"] = "mean",
        generator: Generator | None = None,
        adaptive: AdaptiveClipping | None = None,
        process_group: ProcessGroup | None = None,
        per: PerGroup = "model",
        stability: float | None = None,
    ):
        """Store the options. Those up to ``weight_decay`` may differ between groups.

        Args:
            params: Parameters, named parameters, or groups.
            lr: Step size.
            momentum: Heavy-ball momentum: ``v ← momentum v + g``, ``θ ← θ − lr v``.
            weight_decay: η, adds ηθ to g, after the noise.
            max_grad_norm: R, largest norm of an individual gradient.
            noise_multiplier: σ, standard deviation of the noise in units of R.
            expected_batch_size: B, number of samples in a batch on average over batches.
            loss_reduction: That of the loss, see :class:`DPOptimizer`.
            generator: Draws the noise, see :class:`DPOptimizer`.
            adaptive: Let R follow a quantile of the norms. Default: R stays.
            process_group: Processes with samples of their own, see :class:`DPOptimizer`.
            per: What is clipped together, see :class:`DPOptimizer`.
            stability: γ, to normalise gradients, see :class:`DPOptimizer`. Default: clip.

        Raises:
            ValueError: If an option is out of range.
        """
        given: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        check_options(given, self.at_least)
        refuse_model(self, params)
        super().__init__(
            SGD(params, **given),
            max_grad_norm=max_grad_norm,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            adaptive=adaptive,
            process_group=process_group,
            per=per,
            stability=stability,
        )


class PoissonBatches(Sampler[list[int]]):
    """Batches that take each sample independently with the same probability.

    A ``batch_sampler`` for ``torch.utils.data.DataLoader``. Their sizes differ, and a batch may be
    empty: use :meth:`DPOptimizer.step_without_samples` for it, and :func:`collate_empty_too` for
    the ``DataLoader``.
    """

    def __init__(
        self,
        num_samples: int,
        expected_batch_size: float,
        steps: int | None = None,
        generator: Generator | None = None,
    ):
        """Store the options.

        Args:
            num_samples: Number of samples in the data.
            expected_batch_size: B; the probability is B / ``num_samples``.
            steps: Number of batches. Default: as many as take ``num_samples`` on average.
            generator: Draws the samples. Default: that of torch.

        Raises:
            ValueError: If a batch would have more samples than there are on average, or none.
        """
        if not 0 < expected_batch_size <= num_samples:
            raise ValueError(
                "expected_batch_size has to be larger than 0 and at most num_samples, got "
                f"{expected_batch_size} and {num_samples}."
            )
        self.num_samples = num_samples
        self.sampling_rate = expected_batch_size / num_samples
        self.steps = round(1 / self.sampling_rate) if steps is None else steps
        self.generator = generator

    def __len__(self) -> int:
        """Return the number of batches."""
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        """Draw the batches."""
        device = None if self.generator is None else self.generator.device
        for _ in range(self.steps):
            # in double precision: multiples of 2^-24 would draw small rates too often
            drawn = torch.rand(
                self.num_samples, generator=self.generator, device=device, dtype=torch.float64
            )
            yield (drawn < self.sampling_rate).nonzero().flatten().tolist()


def collate_empty_too(
    data: Dataset[Any], collate_fn: Callable[[list[Any]], Any] = default_collate
) -> Callable[[list[Any]], Any]:
    """Return a ``collate_fn`` for a ``DataLoader`` whose batches may be empty.

    An empty batch has the tensors of the others, without rows: it is made of the first sample.

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from backpack.optim import PoissonBatches, collate_empty_too
    >>> data = TensorDataset(torch.rand(50, 3), torch.arange(50))
    >>> batches = PoissonBatches(len(data), 0.001, steps=1)
    >>> [(X, y)] = DataLoader(data, batch_sampler=batches, collate_fn=collate_empty_too(data))
    >>> X.shape[1:], y.shape[1:]
    (torch.Size([3]), torch.Size([]))

    Args:
        data: The data set. Its first sample is read for each empty batch.
        collate_fn: Makes a batch of a list of samples: tensors, in tuples, lists or dictionaries.
    """
    return partial(_collated, data, collate_fn)


def _collated(
    data: Dataset[Any], collate_fn: Callable[[list[Any]], Any], samples: list[Any]
) -> Any:
    if samples:
        return collate_fn(samples)
    return map_tensors(lambda x: x[:0] if x.dim() else x, collate_fn([data[0]]))

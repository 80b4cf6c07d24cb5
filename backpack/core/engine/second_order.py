"""Second order: what a backward pass lets travel through its calls once all are reached."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from backpack.core import memory
from backpack.core.engine import checks
from backpack.core.engine.changed_gradients import CHANGED, find_changed, look_around_hooks
from backpack.core.engine.combining import Combining
from backpack.core.engine.extracted import OF_COUNTS, OF_SAMPLES, fail, names_of
from backpack.core.engine.findings import OTHER_ROWS
from backpack.core.engine.first_order import unsupported_reasons
from backpack.core.engine.modified_losses import check_losses
from backpack.core.engine.plan import Plan, set_apart
from backpack.core.engine.propagations import UserRules
from backpack.core.engine.read_back import ReadBack
from backpack.core.engine.sample_flow import SampleFlow
from backpack.core.engine.separate_samples import separate_samples
from backpack.core.lazy import lazy
from backpack.core.record import alive
from backpack.core.record.origins import has_parameters
from backpack.core.record.visits import Visit
from backpack.core.types import Extension
from backpack.utils.autocast import autocast_dtypes
from backpack.utils.warning import warn

NESTED = (
    "modules were reached by a backward pass inside of another one, in which there is no loss. If "
    "that is torch.utils.checkpoint, use it with use_reentrant=False."
)


class SecondOrder:
    """The second-order extensions of a backward pass: they run when it is over."""

    def __init__(self, exts: Sequence[Extension], save: Combining) -> None:
        self.exts, self._save = exts, save
        self._reads_gradients = any(map(_reads_gradients, exts))
        self._changed: dict[str, None] = {}  # what has or reads gradients that hooks have changed
        self.looking: list[RemovableHandle] = []  # hooks that are removed at the end
        # in which gradients are computed, if autocast is on around backward()
        is_cast = self._reads_gradients and torch._C._is_any_autocast_enabled()
        self._precisions = autocast_dtypes() if is_cast else set[torch.dtype]()
        self._read_back: ReadBack | None = None  # what reads functions that nobody has recorded

    def read_back(self, visit: Visit, i: int) -> None:
        """Read the functions that have computed an input of a call from the graph."""
        self._read_back = self._read_back or ReadBack(self.looking)
        self._read_back.read(visit, i)

    def is_read_later(self, grad: Tensor) -> bool:
        """Whether a large gradient is that of a loss, or second-order quantities read it."""
        return grad.dim() == 0 or self._reads_gradients or self._has_copies

    @lazy
    def _has_copies(self) -> bool:
        """Whether a tensor has no samples."""
        return any(call.is_unbatched for call in alive.all_live_calls())

    def look_around(self, tensor: Tensor, reader: Visit) -> None:
        """Look whether hooks change the gradient of a tensor that a call reads."""
        self.looking += look_around_hooks(tensor, f"{reader!r} reads", self._changed)

    def run(
        self,
        calls: Sequence[Visit],
        roots: Sequence[Any],
        is_nested: bool,
        sample_flow: SampleFlow | None,
    ) -> None:
        """Let everything travel that the extensions name, through the reached calls.

        ``roots`` is what ``backward()`` was called on, as far as it is known; ``sample_flow`` knows
        which parameters belong to layers (None if all are told already).
        """
        exts = self.exts
        has_rules = any(ext.rules for ext in exts)
        has_results = has_rules or any(call.trained for call in calls)
        has_loss = not has_results and any(call.is_loss for call in calls)
        if not has_results and (
            any(call.params for call in calls)
            or not (has_loss or has_parameters(self._save.nodes))  # all are frozen
        ):
            # such as for the gradient of an output with respect to data; or functions read others
            if sample_flow is not None and has_loss:
                plan = Plan(calls)
                plan.find_gap()
                self._tell_uncalled_layers(plan, sample_flow)
            return
        if has_rules:
            set_apart(calls, exts)
        functions = self._read_back.take_part() if self._read_back else []
        plan = Plan([*calls, *functions])
        if not (plan.calls or has_results):  # at most what only reshapes, of a model not extended
            return
        are_constant_multiples = check_losses(plan, roots, exts)
        self._check_support(plan, is_nested)
        if not plan.calls:  # nothing but calls without a rule, of which a warning has told
            return
        if self._reads_gradients and are_constant_multiples and plan.losses:
            for call in find_changed(plan, functions, self._precisions):
                self._changed[f"{call!r} has returned"] = None
        if self._changed:
            warn(CHANGED.format(names_of(exts), checks.listed([*self._changed])))
        if sample_flow is not None:
            self._tell_uncalled_layers(plan, sample_flow)
            if not sample_flow.layers:  # else first order has looked at them
                _tell_other_rows(sample_flow, plan, exts)
        separate_samples(plan)
        for (propagation, subsampling, _), members in _grouped(exts):
            for ext in members:
                propagation.check(ext)
            if subsampling is not None:
                plan.check_subsampling(subsampling, members)
            is_holding = not self._save.accumulates and memory.reuse(plan.uses, members)
            propagation.run(plan, members, subsampling, self._save)
            if is_holding:
                memory.clear()

    def _check_support(self, plan: Plan, is_nested: bool) -> None:
        """Let every extension object to what it does not know before anything is written."""
        gap = plan.find_gap()
        unreached = plan.find_unreached() if gap is None else None
        looked_at = [call for call in plan.everything if call.trained or call in plan.calls]
        unsupported = unsupported_reasons(looked_at)
        if unreached is not None:
            nested = is_nested and not plan.losses
            reason = NESTED if nested else plan.why_unreached(unreached)
            fail([ext for ext in self.exts if ext.needs], reason, ValueError)
        for call, reason in unsupported.items():
            fail([ext for ext in self.exts if ext.rule_for(call.module) is None], reason)
        if gap is not None:
            fail(self.exts, gap, ValueError)
        if gap or unreached or unsupported:  # a warning alone: what follows may be incomplete
            for p in plan.uses:
                self._save.leave_out(p, self.exts)

    def _tell_uncalled_layers(self, plan: Plan, sample_flow: SampleFlow) -> None:
        """Warn of parameters that functions have read, and no call: nothing is computed."""
        for p, call in plan.read_by_functions.items():
            if p.grad is not None and _is_accumulated(p) and sample_flow.uses.is_of_layer(p):
                warn(
                    f"{names_of(self.exts)}: a parameter of shape {list(p.shape)} has no result. "
                    "No module that was called has it, and a function has read it whose result "
                    f"{call!r} reads. {plan.advice(call)}"
                )


def _is_accumulated(p: Tensor) -> bool:
    """Whether the backward pass, which is almost over, gives a parameter a gradient."""
    with torch.enable_grad():
        view: Any = p.view_as(p).grad_fn
    try:
        return torch._C._will_engine_execute_node(view.next_functions[0][0])
    except RuntimeError:  # torch.autograd.grad, which gives none
        return False


def _reads_gradients(ext: Extension) -> bool:
    return bool(ext.rules) or ext.propagation is None or ext.propagation.reads_gradients


def _tell_other_rows(flow: SampleFlow, plan: Plan, exts: Sequence[Extension]) -> None:
    """Warn of results of samples that are not those of the batch, if first order has not.

    Several rows of a layer that belong to one sample are taken so if a module behind tells that.
    """
    of_samples = [e for e in exts if e.get_subsampling() is not None or _reads(e, OF_SAMPLES)]
    of_counts = [ext for ext in exts if ext in of_samples or _reads(ext, OF_COUNTS)]
    if not of_counts:
        return
    for call in plan.calls:
        if call.is_loss or call.is_followed or call.is_unbatched:
            continue
        if call.trained:
            flow.note_samples(call, plan.samples_of[call])
        for i, mark in enumerate(call.origins_in if of_samples else ()):
            if mark is None:
                flow.check_data(call, i)
    flow.compare_sizes()
    found = flow.found
    if found.sizes:
        names = checks.listed([*reversed(found.sizes)])
        warn(f"{names_of(of_counts)}: some samples are others. {OTHER_ROWS.format(names)}")
    elif found.functions:
        warn(
            f"{names_of(of_samples)}: some samples are others. A layer takes the rows of its input "
            f"for the samples of the batch, which {checks.listed(found.functions)} have moved. Use "
            "extend(model, use_converter=True), which follows the samples.",
        )


def _reads(ext: Extension, names: Collection[str]) -> bool:
    """Whether an extension is made of some of these quantities."""
    return not {*ext.needs, *ext.reads}.isdisjoint(names)


def _grouped(exts: Sequence[Extension]) -> list[tuple[Any, list[Extension]]]:
    """Group extensions for which the same travels, of the same samples."""
    groups: list[tuple[Any, list[Extension]]] = []  # keys need not be hashable
    for ext in exts:
        own = ext.propagation or UserRules(), ext.get_subsampling(), id(ext) if ext.rules else None
        for other, members in groups:
            if other == own:
                members.append(ext)
                break
        else:
            groups.append((own, [ext]))
    return groups

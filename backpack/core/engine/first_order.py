"""First order: what extensions make of the gradients that a backward pass has at its calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from backpack.context import Configuration
from backpack.core import memory
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.engine.combining import Combining
from backpack.core.engine.extracted import fail
from backpack.core.engine.factored import FactoredGrad
from backpack.core.engine.factors import Factor
from backpack.core.engine.plan import Plan
from backpack.core.engine.products import extract
from backpack.core.engine.results import Writer, note_gradient
from backpack.core.engine.separate_samples import separate_samples
from backpack.core.engine.trained import Trained
from backpack.core.engine.user_rules import run_rule
from backpack.core.engine.uses import Use, aligned
from backpack.core.record.context import context_of
from backpack.core.record.module_state import describe
from backpack.core.record.visits import Visit, compute_in_one_precision
from backpack.core.rows import Rows
from backpack.core.types import Extension
from backpack.utils.subsampling import subsample

IN_PARTS = (
    "{} uses a parameter of shape {} that is used by another backward pass, too, inside of which "
    "(or around which) this one runs: results would be those of a part of its uses. If that is "
    "torch.utils.checkpoint, use it with use_reentrant=False."
)

# A parameter, its uses (calls, and its names there), and the extensions that want something of it.
Work = tuple[Parameter, list[tuple[Visit, str]], list[Extension]]


class FirstOrder:
    """The first-order extensions of a backward pass: all that they need is the gradient at a call.

    Attributes:
        exts: The extensions.
        whole_batch: Whether all of them look at all samples.
        has_rules: Whether one has rules for modules.
        of_gradients: Those whose result belongs to the gradient, by savefield.
    """

    def __init__(self, configuration: Configuration, save: Combining, trained: Trained) -> None:
        self._save, self._trained = save, trained
        self._count = len(configuration.exts)
        self.exts = configuration.first_order
        self.whole_batch, self.has_rules = True, False
        self.of_gradients: dict[str, Extension] = {}
        self._wanted: set[str] = set()
        for ext in self.exts:
            self._wanted.update(ext.needs)
            if ext.rules or not ext.needs:
                self.has_rules = True
            if ext.belongs_to_gradient:
                self.of_gradients[ext.savefield] = ext
            if ext.get_subsampling() is not None:
                self.whole_batch = False

    def run_alone(self, call: Visit) -> None:
        """Run first order at a call that needs no other."""
        if not (call.is_container or call.is_transparent):
            compute_in_one_precision([call])
        exts = self.exts
        if self.has_rules or unsupported_reason(call, call.trained) is not None:
            uses: dict[Parameter, list[tuple[Visit, str]]] = {}
            for name, p in call.trained.items():
                uses.setdefault(p, []).append((call, name))
            self._run_at([call], uses, exts)
        elif call.trained:
            self._extract(_gradient_use(call, None, folds=True).of_all, exts)

    def run(self, plan: Plan) -> None:
        """Run at calls whose parameters or samples belong to others as well."""
        if not self.exts:
            return
        separate_samples(plan)
        waiting = list(self.exts)
        while waiting:
            subsampling = waiting[0].get_subsampling()
            exts = [ext for ext in waiting if ext.get_subsampling() == subsampling]
            waiting = [ext for ext in waiting if ext not in exts]
            if subsampling is not None:
                plan.check_subsampling(subsampling, exts)
            self._run_at(plan.users, plan.uses, exts, plan, subsampling)

    def _run_at(
        self,
        calls: Sequence[Visit],
        uses_of: Mapping[Parameter, list[tuple[Visit, str]]],
        exts: Sequence[Extension],
        plan: Plan | None = None,
        subsampling: Sequence[int] | None = None,
    ) -> None:
        """Extract what is wanted of the parameters that calls use, for some of the samples."""
        for ext in exts:
            if ext.rules or not ext.needs:
                self._run_rules(ext, calls, uses_of)
        work: list[Work] = []
        rows: dict[Visit, Rows] = {}
        refused: dict[tuple[Visit, tuple[Extension, ...]], list[str]] = {}
        for p, uses in uses_of.items():
            known = [ext for ext in exts if ext.needs and not _has_rule(ext, uses)]
            unsupported = _unsupported_use(uses) if known else None
            if unsupported is not None:
                refusing, name = unsupported
                refused.setdefault((refusing, tuple(known)), []).append(name)
                self._save.leave_out(p, known)
            elif known:
                work.append((p, uses, known))
                if plan is not None:
                    plan.check_one_batch(p)
                    rows |= {call: plan.rows(call, subsampling) for call, _ in uses}
        for (refusing, alike), names in refused.items():
            fail(alike, unsupported_reason(refusing, names) or "")
        for call, of_call in groupby(work, key=_only_call):
            gradients: dict[Visit, Use] = {}
            if call is not None:
                gradients[call] = _gradient_use(
                    call, rows.get(call), folds=True, samples=subsampling
                )
            for p, uses, known in of_call:
                for other, _ in uses:
                    if other not in gradients:
                        gradients[other] = _gradient_use(other, rows.get(other))
                found = [gradients[other].of(name) for other, name in uses]
                if plan is not None and len(found) > 1:
                    found = aligned(plan, found)
                self._extract({p: found}, known)
            if call is not None and len(exts) == self._count:  # nobody else will ask
                call.clear_results()

    def _run_rules(
        self,
        ext: Extension,
        calls: Sequence[Visit],
        uses_of: Mapping[Parameter, list[tuple[Visit, str]]],
    ) -> None:
        for call in calls:
            rule = ext.rule_for(call.module)
            if rule is None:
                if call.trained and not ext.needs:
                    ext.fail(no_rule(call))
                continue
            if any(len(uses_of[p]) > 1 for p in call.trained.values()):
                raise NotImplementedError(
                    f"{ext.savefield}: the rule for {call!r} cannot be used, because a parameter "
                    "of the module is used several times. Register derivatives instead "
                    "(backpack.core.derivatives.register)."
                )
            run_rule(ext, rule, context_of(call, whole=True), None, self._save)

    def _extract(self, uses_of: Mapping[Parameter, list[Use]], exts: Sequence[Extension]) -> None:
        is_holding = not self._save.accumulates and memory.reuse(uses_of, exts)
        wanted = self._wanted
        if exts is not self.exts:
            wanted = {name for ext in exts for name in ext.needs}
        gradients, owed = self._trained.gradients, self._trained.owed
        extract(uses_of, exts, wanted, self._save, gradients=gradients, owed=owed)
        if is_holding:
            memory.clear()

    def refuse_parts(self, call: Visit, others: Collection[Parameter]) -> None:
        """Refuse parameters of a call that passes inside of, or around, this one use as well."""
        for p in call.trained.values():
            if p in others:
                fail(self.exts, IN_PARTS.format(describe(call.module), list(p.shape)))

    def mark(self, results: Writer, marks: Mapping[str, Any]) -> None:
        """Note at results what belongs to them, such as the gradient that autograd accumulates."""
        accumulated = self._trained.accumulated
        for p, savefield, value in results:
            if isinstance(value, Tensor | FactoredGrad):
                vars(value).update(marks)
                if p in accumulated:
                    vars(value)["_backpack_accumulated"] = accumulated[p]
            if savefield in self.of_gradients and p.is_leaf:
                note_gradient(p, savefield)
                ext = self.of_gradients[savefield]
                if isinstance(value, Tensor) and ext.get_subsampling() is not None:
                    vars(value)["_backpack_subsampled"] = True


def _only_call(work: Work) -> Visit | None:
    """Return the call that alone uses a parameter, and once."""
    _, uses, _ = work
    return uses[0][0] if len(uses) == 1 else None


def _gradient_use(call: Visit, rows: Rows, folds: bool = False, samples: Rows = None) -> Use:
    """Return the gradient at some rows of a call as its only column, for any of its parameters.

    ``folds``: rows of a sample have an axis of their own, in those of ``samples``.
    """
    c = context_of(call, folds=folds, shares=folds)
    c.reads_entries = not call.shards or call.reads_parameters(travels=False, is_shown=False)
    if c.is_folded:
        rows = samples
    grads = call.gradients(c.is_folded)
    if rows is not None:
        memo, c = c.memo, c.at(rows)
        c.memo = memo
        grads = [None if grad is None else subsample(grad, subsampling=rows) for grad in grads]
    mats = [None if grad is None else grad.unsqueeze(0) for grad in grads]
    first = mats[0] if mats[0] is not None else next(mat for mat in mats if mat is not None)
    whole = c.is_folded or call.rows_are_samples
    groups = first.shape[1] // (1 if whole else call.rows_per_sample)
    # gradients of merged rows add up: there is one loss
    use = Use(call, "", Factor(first, groups, adds_up=True), rows, mats)
    use.c = c
    return use


def _has_rule(ext: Extension, uses: Sequence[tuple[Visit, str]]) -> bool:
    return bool(ext.rules) and any(ext.rule_for(call.module) is not None for call, _ in uses)


def unsupported_reasons(calls: Iterable[Visit]) -> dict[Visit, str]:
    """Explain for each call without derivatives, or without those for what it trains, why."""
    reasons = ((call, unsupported_reason(call, call.trained)) for call in calls)
    return {call: reason for call, reason in reasons if reason is not None}


def _unsupported_use(uses: Sequence[tuple[Visit, str]]) -> tuple[Visit, str] | None:
    """Return the first use of a parameter for which there are no derivatives."""
    return next((use for use in uses if unsupported_reason(use[0], [use[1]]) is not None), None)


def unsupported_reason(call: Visit, names: Collection[str]) -> str | None:
    """Explain why there are no derivatives of a call, or none for parameters; None if there are."""
    if call.derivatives is None:
        return no_rule(call, *names)
    known = call.derivatives.param_names(call.module) if names else ()
    if not set(names).issubset(known):
        with call.as_it_was():  # it may have tied some since
            known = call.derivatives.param_names(call.called)
    if not set(names).issubset(known):
        return no_rule(call, *[name for name in names if name not in known])
    if type(call.derivatives).unsupported_reason is BaseDerivatives.unsupported_reason:
        return None
    return call.derivatives.unsupported_reason(context_of(call, check=False))


def no_rule(call: Visit, *names: str) -> str:
    """Explain that a module (or a parameter of it) is not supported, and what to do."""
    what = f"the parameters {', '.join(names)} of {call!r}" if names else repr(call)
    convert = "Use extend(model, use_converter=True), or register"
    advice = convert if call.is_container else "Register"
    return (
        f"there is no rule for {what}. {advice} derivatives for {type(call.module).__qualname__} "
        "(backpack.core.derivatives.register), or a rule for this extension alone "
        "(set_module_extension)."
    )

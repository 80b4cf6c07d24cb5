"""One backward pass: which calls it reaches, and what the active extensions make of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar
from warnings import warn

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.context import CTX, Configuration, disable, without_autocast
from backpack.core import call_products, memory, spared_gradients, tape
from backpack.core.derivatives.basederivatives import BaseDerivatives, Rows
from backpack.core.factors import Factor
from backpack.core.plan import Plan
from backpack.core.products import Products, Use
from backpack.core.propagations import UserRules
from backpack.core.sweep import call_gradients, separate_samples
from backpack.core.tape import (
    CLASSES_WITH_RULES,
    Call,
    describe,
    is_used,
    origin,
    parameter_behind,
    stand_in,
    upstream,
)
from backpack.core.watch import WatchBackward
from backpack.utils.subsampling import subsample

if TYPE_CHECKING:
    from backpack.extensions.backprop_extension import BackpropExtension

# Autograd nodes that scale, add or reshape: what a loss may pass through before backward().
LINEAR_NODES = (
    "Add",
    "Sub",
    "Neg",
    "Sum",
    "Mean",
    "Stack",
    "Cat",
    "View",
    "Reshape",
    "Unsafe",
    "Squeeze",
    "Unsqueeze",
    "Expand",
    "Clone",
    "ToCopy",
    "Select",
    "Unbind",
    "Alias",
    "Permute",
    "T",
)


# A parameter, its uses (calls, and its names there), and the extensions that want something of it.
Work = tuple[Parameter, list[tuple[Call, str]], list["BackpropExtension"]]

NESTED = (
    "modules were reached by a backward pass inside of another one, in which there is no loss. If "
    "that is torch.utils.checkpoint, use it with use_reentrant=False."
)


class BackwardPass:
    """Collects the calls that one ``backward()`` reaches, and runs the extensions on them.

    First-order extensions run at once, with the gradient at hand, unless a parameter may be used
    elsewhere too. Everything else runs when the backward pass is over.
    """

    _running: ClassVar[dict[int, BackwardPass]] = {}

    def __init__(self) -> None:
        """Read the active configuration."""
        self.configuration = CTX.configuration
        self.exts = self.configuration.exts
        self.first_order: list[BackpropExtension] = []
        self.second_order: list[BackpropExtension] = []
        self.whole_batch = True  # of first order
        self.has_rules = False  # of modules, for a first-order extension
        for ext in self.exts:
            if ext.expects_backpropagation_quantities():
                self.second_order.append(ext)
            else:
                self.first_order.append(ext)
                self.has_rules |= bool(ext.rules) or not ext.needs
                self.whole_batch &= ext.get_subsampling() is None
        self.reached_calls: dict[Call, None] = {}
        self.calls: list[Call] = []  # those that are not done yet
        self.deferred: list[Call] = []
        # ids of the values, which would outlive what an extension hook drops
        self.written: list[tuple[Parameter, str, int]] = []
        self.parameters: list[dict[str, Parameter]] = []  # of the calls that were reached
        self.untrained: set[Parameter] = set()  # left out by backward(inputs=...)
        self.roots = WatchBackward.roots
        # torch.utils.checkpoint(use_reentrant=True) runs one backward pass inside of another
        self.is_nested = bool(BackwardPass._running)
        self.owed: set[Parameter] = set()  # those of the spared ones that were reached
        self.gradients: dict[Parameter, Tensor] = {}  # of those, until they are accumulated
        # what first order has read is not needed again: see _keeps
        self.reads_gradients = any(map(_reads_gradients, self.second_order))
        self.has_copies: bool | None = None  # whether a tensor has no samples, once that is asked
        self.restricted = True  # whether autograd can tell which parameters it accumulates into

    # ------------------------------------------------------------------ life cycle

    @classmethod
    def reached(cls, call: Call, slot: int, grad: Tensor | None) -> None:
        """Take note that a backward pass has the gradient of one of a call's outputs."""
        if grad is None or not disable.should_store_io():
            return
        configuration = CTX.configuration
        if not (configuration.exts or configuration.extension_hook):
            if grad.numel() >= tape.LARGE:
                call.follow_autograd()
            return
        task = torch._C._current_graph_task_id()
        current = cls._running.get(task)
        if current is None:
            current = cls._running[task] = cls()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: cls._finish(task))
        current._undone_on_error(task, current._reach, call, slot, grad)

    @classmethod
    def completed(cls, call: Call) -> None:
        """Take note that all gradients of a call's outputs are there."""
        task = torch._C._current_graph_task_id()
        current = cls._running.get(task)
        if current is not None:
            current._undone_on_error(task, current._complete, call)

    @classmethod
    def _finish(cls, task: int) -> None:
        current = cls._running[task]
        current._undone_on_error(task, current._run)
        del cls._running[task]

    @classmethod
    def abandon(cls, configuration: Configuration) -> None:
        """Forget backward passes of a context that an error has stopped, and what they wrote."""
        for task, current in list(cls._running.items()):
            if current.configuration is configuration:
                current._undo()
                del cls._running[task]

    def _undone_on_error(self, task: int, work: Callable[..., None], *arguments: Any) -> None:
        try:
            with without_autocast():
                work(*arguments)
        except BaseException:
            self._undo()
            memory.forget()
            BackwardPass._running.pop(task, None)
            raise

    def _undo(self) -> None:
        for p, savefield, identity in self.written:
            if id(getattr(p, savefield, None)) == identity:
                delattr(p, savefield)
        for call in self.calls:
            call.g_out = [None] * len(call.g_out)

    # ------------------------------------------------------------------ during the backward pass

    def _reach(self, call: Call, slot: int, grad: Tensor) -> None:
        if call not in self.reached_calls:
            call.check_released()
            call.check_batched()
            if call.module._parameters:
                call.check_parameters(trained_only=not self.second_order)
            if call.params:
                self._find_trained(call)
                if call.derivatives is not None:
                    self.parameters.append(call.params)
            self.reached_calls[call] = None
            self.calls.append(call)
        call.g_out[slot] = grad if self.first_order or self._keeps(grad) else stand_in(grad)
        if self.first_order:
            if call.reads_functions:
                self._check_foreign_uses(call)
            self._check_mixing(call)
        elif self.second_order:
            return
        if len(call.outputs) == 1 and self._is_independent(call):
            self._finish_alone(call)
            if self.second_order and not self._keeps(grad):
                call.g_out[slot] = stand_in(grad)
        else:
            self.deferred.append(call)

    def _complete(self, call: Call) -> None:
        if call in self.deferred and self._is_independent(call):
            # it is there once for each output that was reached
            self.deferred = [other for other in self.deferred if other is not call]
            self._finish_alone(call)

    def _finish_alone(self, call: Call) -> None:
        """Do what is left to do at a call whose first order needs no other."""
        if self.first_order and (call.trained or type(call.module) in CLASSES_WITH_RULES):
            self._run_alone(call)
        self._accumulate(call)
        if not self.second_order:
            self._done(call)
            self.calls.remove(call)

    def _keeps(self, grad: Tensor) -> bool:
        """Whether a gradient is that of a loss, or small, or second-order quantities read it."""
        if grad.dim() == 0 or grad.numel() < tape.LARGE or self.reads_gradients:
            return True
        if self.has_copies is None:
            self.has_copies = any(call.is_unbatched for call in tape.all_live_calls())
        return self.has_copies

    def _accumulate(self, call: Call) -> None:
        """Accumulate the gradients that autograd leaves out."""
        if not self.owed:
            return
        for name, p in call.trained.items():
            if p not in self.owed:
                continue
            if p not in self.gradients:  # no extension has found it on the way
                grads = call_products.gradients(call)
                mats = [None if g is None else g.unsqueeze(0) for g in grads]
                product = call_products.param(call, "param_mjp", name, mats, None, sum_batch=True)
                self.gradients[p] = product.squeeze(0)
            spared_gradients.accumulate(p, self.gradients.pop(p))
            self.owed.discard(p)
            WatchBackward.spared.discard(p)

    def _is_independent(self, call: Call) -> bool:
        """Whether first-order quantities need no other call: known parameters and samples."""
        places = call.places
        shared = places.is_unbatched or places.without  # samples are told apart later
        return not shared and self.whole_batch and call.uses_each_parameter_alone()

    def _check_mixing(self, call: Call) -> None:
        """Warn of modules without parameters that mix samples, where others have gradients."""
        rule = call.derivatives
        if not call.params and rule and rule.mixes_in_secret(call):
            warn(
                f"{describe(call.module)} mixes the samples of a batch: individual gradients of "
                "modules before it are those of the loss as a whole with respect to one sample's "
                "output.",
                stacklevel=2,
            )

    def _check_foreign_uses(self, call: Call) -> None:
        """Notice parameters of extended modules that a function above the call uses as well."""
        for x, mark in zip(call.inputs, call.origins_in, strict=True):
            leaves: Sequence[Tensor]
            if mark is None:  # perhaps a parameter itself, as an argument
                leaves = [p for p in [parameter_behind(x)] if p is not None]
            elif mark.is_output:
                continue
            else:
                _, leaves = upstream(x, lambda m: m.is_output)
            for leaf in leaves:
                reached = any(leaf is p for params in self.parameters for p in params.values())
                if reached or is_used(leaf):
                    for ext in self.first_order:
                        ext.fail(
                            f"a parameter of shape {list(leaf.shape)} that belongs to an extended "
                            f"module is also used by a function whose result {call!r} reads. That "
                            "use is not counted."
                        )

    def _find_trained(self, call: Call) -> None:
        with torch.enable_grad():
            call.trained = {name: p for name, p in call.params.items() if self._is_trained(p)}
        if len(call.trained) < len(call.params):
            self.untrained.update(p for name, p in call.params.items() if name not in call.trained)

    def _is_trained(self, p: Parameter) -> bool:
        """Whether ``p`` gets a gradient, from autograd or from here."""
        if self._is_accumulated(p):
            return True
        if WatchBackward.spared and p.requires_grad and p in WatchBackward.spared:
            self.owed.add(p)
        return bool(self.owed) and p in self.owed

    def _is_accumulated(self, p: Parameter) -> bool:
        """Whether this backward pass computes the gradient of ``p`` (see ``backward(inputs=)``)."""
        if not p.requires_grad:
            return False
        if not self.restricted:
            return True
        view: Any = p.view_as(p).grad_fn  # in grad mode
        try:
            return torch._C._will_engine_execute_node(view.next_functions[0][0])
        except RuntimeError:  # torch.autograd.grad does not say
            self.restricted = False
            return True

    # ------------------------------------------------------------------ after the backward pass

    def _run(self) -> None:
        if self.deferred:
            self._run_first_order(Plan(self.reached_calls, dict.fromkeys(self.deferred)))
        for call in self.deferred:
            self._accumulate(call)
        if self.second_order:
            self._run_second_order()
        for call in sorted(self.calls, key=attrgetter("index"), reverse=True):
            self._done(call)

    def _done(self, call: Call) -> None:
        hook = self.configuration.extension_hook
        if hook is not None:
            with call.bound(check=False, whole=True) as module:
                hook(module)
        if self.configuration.retain_graph:
            call.forget()
        else:
            call.release()

    def _save(self, p: Parameter, ext: BackpropExtension, value: Any) -> None:
        if self.untrained and p in self.untrained:
            return
        if isinstance(value, Tensor):
            if value.dtype != p.dtype:
                value = value.to(p.dtype)
            if value._base is not None and not value.requires_grad:
                value = value.detach()  # without its base, which memory.recycle would count
        elif isinstance(value, list):
            value = [factor.to(p.dtype) for factor in value]
        if self.configuration.debug:
            print(f"[backpack] {ext.savefield}: {list(getattr(value, 'shape', []))}")
        self.written.append((p, ext.savefield, id(value)))
        setattr(p, ext.savefield, value)

    # ------------------------------------------------------------------ first order

    def _run_alone(self, call: Call) -> None:
        """Run first order at a call that needs no other."""
        if not (call.is_container or call.is_transparent):
            call.compute_in_one_precision()
        exts = self.first_order
        if self.has_rules or refusal(call, call.trained) is not None:
            self._run_at([call], {p: [(call, name)] for name, p in call.trained.items()}, exts)
        elif call.trained:
            with call.bound(), call.sharing():
                gradient = _gradient_use(call, None)
                for name, p in call.trained.items():
                    self._extract(p, [gradient.of(name)], exts)

    def _run_first_order(self, plan: Plan) -> None:
        if not self.first_order:
            return
        separate_samples(plan)
        for subsampling, exts in _grouped(self.first_order, lambda ext: ext.get_subsampling()):
            plan.check_subsampling(subsampling, exts)
            self._run_at(plan.users, plan.uses, exts, plan, subsampling)

    def _run_at(
        self,
        calls: Sequence[Call],
        uses_of: Mapping[Parameter, list[tuple[Call, str]]],
        exts: Sequence[BackpropExtension],
        plan: Plan | None = None,
        subsampling: Sequence[int] | None = None,
    ) -> None:
        """Extract what is wanted of the parameters that calls use, for some of the samples."""
        for ext in exts:
            if ext.rules or not ext.needs:
                self._run_rules(ext, calls, uses_of)
        work: list[Work] = []
        rows: dict[Call, Rows] = {}
        for p, uses in uses_of.items():
            known = [ext for ext in exts if ext.needs and not _has_rule(ext, uses)]
            if known and self._is_supported(known, uses):
                work.append((p, uses, known))
                if plan is not None:
                    plan.check_one_batch(p)
                    rows |= {call: plan.rows(call, subsampling) for call, _ in uses}
        for call, of_call in groupby(work, key=_only_call):
            if call is None:
                self._extract_all(of_call, rows)
            else:
                with call.bound(), call.sharing():
                    self._extract_all(of_call, rows)
                if len(exts) == len(self.exts):  # nobody else will ask
                    call.forget_results()

    def _extract_all(self, work: Iterable[Work], rows: Mapping[Call, Rows]) -> None:
        gradients: dict[Call, Use] = {}
        for p, uses, exts in work:
            for call, _ in uses:
                if call not in gradients:
                    gradients[call] = _gradient_use(call, rows.get(call))
            self._extract(p, [gradients[call].of(name) for call, name in uses], exts)

    def _run_rules(
        self,
        ext: BackpropExtension,
        calls: Sequence[Call],
        uses_of: Mapping[Parameter, list[tuple[Call, str]]],
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
            with call.bound(whole=True) as module:
                rule.run(ext, module, *call_gradients(call), None, self._save)

    def _is_supported(
        self, exts: Sequence[BackpropExtension], uses: Sequence[tuple[Call, str]]
    ) -> bool:
        for call, name in uses:
            reason = refusal(call, [name])
            if reason is not None:
                for ext in exts:
                    ext.fail(reason)
                return False
        return True

    def _extract(self, p: Parameter, uses: list[Use], exts: Sequence[BackpropExtension]) -> None:
        memory.recycle(p, exts)
        wanted = {name for ext in exts for name in ext.needs}
        is_owed = bool(self.owed) and p in self.owed
        if is_owed:
            wanted.add("gradient")
        products = Products(p, uses, wanted)
        for use in uses:
            if use.call.mixes_samples:
                warn(
                    f"{describe(use.call.module)} mixes the samples of a batch: its individual "
                    "gradients are those of the loss as a whole with respect to one sample's "
                    "output. Use eval() for gradients of individual samples.",
                    stacklevel=2,
                )
        for ext in exts:
            self._save(p, ext, ext.extract(products))
        if is_owed:
            self.gradients[p] = products.take("gradient")
        memory.forget()

    # ------------------------------------------------------------------ second order

    def _run_second_order(self) -> None:
        plan = Plan(self.calls)
        with ExitStack() as stack:
            for loss in plan.losses:  # everything asks them something
                stack.enter_context(loss.bound())
            self._run_propagations(plan)

    def _run_propagations(self, plan: Plan) -> None:
        self._check_losses(plan)
        self._check_support(plan)
        separate_samples(plan)
        groups = _grouped(
            self.second_order,
            lambda ext: (
                ext.propagation or UserRules(),
                ext.get_subsampling(),
                id(ext) if ext.rules else None,
            ),
        )
        for (propagation, subsampling, _), exts in groups:
            for ext in exts:
                propagation.check(ext)
            plan.check_subsampling(subsampling, exts)
            for p in plan.uses:
                memory.recycle(p, exts)
            propagation.run(plan, exts, subsampling, self._save)
            memory.forget()

    def _check_support(self, plan: Plan) -> None:
        """Let every extension object to what it does not know before anything is written."""
        for ext in self.second_order:
            if plan.gap is None and plan.unreached is not None and ext.needs:
                nested = self.is_nested and not plan.losses
                ext.fail(NESTED if nested else plan.why_unreached(plan.unreached), ValueError)
            for call in plan.everything:
                if ext.rule_for(call.module) is not None:
                    continue
                reason = refusal(call, call.trained) if call.trained or call in plan.calls else None
                if reason is not None:
                    ext.fail(reason)
            if plan.gap is not None:
                ext.fail(plan.gap, ValueError)

    def _check_losses(self, plan: Plan) -> None:
        """Warn if ``backward()`` was called on something else than constants times the losses."""
        for call in plan.losses:
            if call.shape_out[0] != ():
                raise ValueError(
                    "Second-order quantities need a scalar loss, but the output of "
                    f"{call!r} is not. Use reduction='mean' or 'sum'."
                )
        for call in plan.losses:
            fed_by = [plan.producers.get(o) for o in call.origins_in if o is not None]
            if any(producer and producer.call in plan.after_loss for producer in fed_by):
                raise ValueError(f"{call!r} has the value of another extended loss as its input.")
        if self.roots is None or not plan.losses:
            return
        losses = {o for call in plan.losses for o in call.origins_out}
        for root in self.roots:
            change = _nonlinear_node(root, losses)
            if change is not None:
                names = ", ".join(describe(call.module) for call in plan.losses)
                warn(
                    f"backward() was called on a loss that was modified after {names} ({change}): "
                    "second-order quantities are those of the extended losses alone, multiplied "
                    "with the derivative of the modified loss.",
                    UserWarning,
                    stacklevel=2,
                )


def _reads_gradients(ext: BackpropExtension) -> bool:
    return bool(ext.rules) or ext.propagation is None or ext.propagation.reads_gradients()


def _only_call(work: Work) -> Call | None:
    """Return the call that alone uses a parameter, and once."""
    _, uses, _ = work
    return uses[0][0] if len(uses) == 1 else None


def _gradient_use(call: Call, rows: Rows) -> Use:
    """Return the gradient at a call as its only column, for any of its parameters."""
    mats = [
        None if grad is None else subsample(grad, subsampling=rows).unsqueeze(0)
        for grad in call_products.gradients(call)
    ]
    first = next(mat for mat in mats if mat is not None)
    # gradients of merged rows add up: there is one loss
    return Use(call, "", Factor(first, first.shape[1], adds_up=True), rows, mats)


def _has_rule(ext: BackpropExtension, uses: Sequence[tuple[Call, str]]) -> bool:
    return bool(ext.rules) and any(ext.rule_for(call.module) is not None for call, _ in uses)


def _grouped(exts: Sequence[BackpropExtension], key: Any) -> list[tuple[Any, list[Any]]]:
    """Group extensions with equal keys (which need not be hashable)."""
    groups: list[tuple[Any, list[Any]]] = []
    for ext in exts:
        own = key(ext)
        for other, members in groups:
            if other == own:
                members.append(ext)
                break
        else:
            groups.append((own, [ext]))
    return groups


def refusal(call: Call, names: Collection[str]) -> str | None:
    """Explain why there are no derivatives of a call, or none for parameters; None if there are."""
    if call.derivatives is None:
        return no_rule(call, *names)
    unknown = set(names).difference(call.derivatives.param_names(call.module))
    if unknown:
        with call.bound(check=False) as module:  # which may have tied some since
            unknown.difference_update(call.derivatives.param_names(module))
    if unknown:
        return no_rule(call, *[name for name in names if name in unknown])
    if type(call.derivatives).refusal is BaseDerivatives.refusal:
        return None
    with call.bound(check=False) as module:
        return call.derivatives.refusal(module)


def no_rule(call: Call, *names: str) -> str:
    """Explain that a module (or a parameter of it) is not supported, and what to do."""
    what = f"the parameters {', '.join(names)} of {call!r}" if names else repr(call)
    return (
        f"there is no rule for {what}. Register derivatives for {type(call.module).__qualname__} "
        "(backpack.core.derivatives.register), or a rule for this extension alone "
        "(set_module_extension)."
    )


def _nonlinear_node(root: Tensor, losses: set[Any]) -> str | None:
    """Find an operation between the losses and ``root`` that is not a sum of constant multiples."""
    if origin(root) in losses or root.grad_fn is None:
        return None
    stack, seen = [(root.grad_fn, root.output_nr)], set()
    while stack:
        node, slot = stack.pop()
        marks: Any = node.metadata
        if node in seen or marks.get(("backpack", slot)) in losses:
            continue
        seen.add(node)
        parents = [(parent, nr) for parent, nr in node.next_functions if parent is not None]
        name = node.name().removesuffix("Backward0").removesuffix("Backward1")
        product = name in ("Mul", "Div") and len(parents) == 1
        if name == "Div":  # a constant divided by the loss is no multiple of it
            product = product and node.next_functions[0][0] is not None
        if not (product or name in LINEAR_NODES or name.startswith("View")):
            return node.name()
        stack += parents
    return None

"""What can be propagated. Extensions with equal propagations share one pass and its products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.loss_hessian import LossHessian, SomeColumns
from backpack.core.derivatives.lossbase import Columns, is_negative
from backpack.core.derivatives.vectors import first_of
from backpack.core.engine import call_products
from backpack.core.engine.backpropagation import Backpropagation, LossSource, Source
from backpack.core.engine.batch_averaged import BatchAveragedBackpropagation
from backpack.core.engine.curvature_product import CurvatureBlock, Modify, clip, identity
from backpack.core.engine.diagonals import ResidualSource
from backpack.core.engine.extracted import (
    IDENTITY,
    OF_SAMPLES,
    REDUCTIONS,
    UNSLICED,
    Bases,
    fail,
    max_factor_size,
    named,
    names_of,
)
from backpack.core.engine.factors import columns_apart
from backpack.core.engine.modified_losses import loss_scale, root_of_scale
from backpack.core.engine.plan import Plan, Producer
from backpack.core.engine.products import Products
from backpack.core.engine.user_rules import (
    call_gradients,
    check_passed_on,
    run_rule,
    saves_once,
)
from backpack.core.engine.uses import uses_without_columns
from backpack.core.record.context import context_of
from backpack.core.record.origins import Origin
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows, row_numbers
from backpack.core.types import Extension, Save
from backpack.utils.subsampling import subsample

# Multiplications of a column from which on it pays to save one.
MANY_COLUMNS = 2**22
MIXED_HESSIAN = (
    "a sample has no Hessian of its own in a network that mixes samples (batch normalisation in "
    "training mode). {}, or use eval()."
)
Extensions = Sequence[Extension]
Subsampling = Sequence[int] | None


class Propagation:
    """What travels back from the loss. Subclasses are values: equal ones are shared.

    Attributes:
        offers: Names of what can be extracted.
        adds_up: Whether that of a batch follows from that of its parts.
        takes_rules: Whether rules of users may take part: columns travel, which they can carry.
        reads_gradients: Whether it depends on gradients other than those of the losses.
    """

    offers: ClassVar[frozenset[str]] = frozenset(REDUCTIONS)
    adds_up: ClassVar[bool] = True
    takes_rules: ClassVar[bool] = True
    reads_gradients: bool = True

    def check(self, ext: Extension) -> None:
        """Refuse an extension that needs what the propagation does not offer."""
        others = set(ext.needs) - self.offers
        if others:
            raise ValueError(
                f"{ext!r} needs {', '.join(sorted(others))}, which {type(self).__name__} does not "
                f"offer. It offers {named(self.offers) or 'nothing for extensions of your own'}."
            )
        if ext.rules and not self.takes_rules:
            raise NotImplementedError(
                f"{ext!r} cannot use a rule of your own for "
                f"{', '.join(cls.__name__ for cls in ext.rules)}. Register derivatives instead "
                "(backpack.core.derivatives.register): every extension then works."
            )

    def run(self, plan: Plan, exts: Extensions, subsampling: Subsampling, save: Save) -> None:
        """Propagate over the reached calls and save what the extensions extract."""
        raise NotImplementedError


# What tensors receive.
Passed = list[tuple[Origin | None, Any]]
Emission = Callable[[Rows], tuple[Columns, Tensor | None]]


def user_loss_rule(call: Visit, exts: Extensions) -> Emission | None:
    """Return the factor that a user registered for this loss, if there is one."""
    for ext in filter(attrgetter("rules"), exts):
        rule = ext.rule_for(call.module)
        if rule is not None:

            def factor(rows: Rows, ext: Any = ext, rule: Any = rule) -> Any:
                with context_of(call, whole=True).shown() as module:
                    back = rule.backpropagate(ext, module, *call_gradients(call), None)
                parts = tuple(back) if isinstance(back, (list, tuple)) else (back,)
                check_passed_on(ext, rule, call, parts, rows)
                return parts if len(parts) > 1 else parts[0], None

            return factor
    return None


class LossFactor(Propagation):
    """A factor S of a matrix at the prediction, ``[V, N, *out]`` at every module."""

    offers = Propagation.offers | UNSLICED
    reads_gradients = False  # first derivatives carry the factor, which depends on the prediction
    # whether columns are gradients, which add up where rows merge: also of targets that are drawn
    of_gradients: ClassVar[bool] = False
    is_exact: ClassVar[bool] = False  # whether S Sᵀ is the Hessian of the loss
    # makes the columns of a loss
    emission: Callable[[Visit, Backpropagation], Emission]

    @staticmethod
    def some_columns(call: Visit, rows: Rows) -> SomeColumns | None:
        """Return what makes some columns of an exact factor, if the loss knows it."""
        return LossHessian(call, rows).some_columns()

    def run(
        self,
        plan: Plan,
        exts: Extensions,
        subsampling: Subsampling,
        save: Save,
        bases: Mapping[Parameter, Bases] | None = None,
    ) -> None:
        """Backpropagate ``JᵀS`` from every loss."""
        backpropagation = Backpropagation(plan, exts, subsampling, save, bases=bases)
        savefields, sources = backpropagation.extraction.savefields, []
        # parameters that a loss does not depend on would lack its columns
        if len(plan.losses) > 1 and backpropagation.extraction.is_unsliced:
            raise NotImplementedError(
                f"{savefields}: the loss is the sum of {len(plan.losses)} losses, whose "
                "columns are not kept together as factors. Use SqrtGGNExact() or SqrtGGNMC() "
                "without factored=True, or one backward pass for each loss."
            )
        for call in plan.losses:
            scale, rule = root_of_scale(call, savefields), user_loss_rule(call, exts)
            if rule is None:
                rule = self.emission(call, backpropagation)
                some = partial(self.some_columns, call) if self.is_exact else None
                sources.append(LossSource(call, rule, self.of_gradients, scale, some))
            else:
                sources.append(LossSource(call, rule, self.of_gradients))
        backpropagation.run(sources)


@dataclass(frozen=True)
class ExactFactor(LossFactor):
    """The exact factor S of the loss Hessian, ``[C, N, *out]`` at every module."""

    is_exact = True

    def emission(self, call: Visit, backpropagation: Backpropagation) -> Emission:
        """Make columns when they start."""
        # if nobody sees the columns, and one less saves more than it takes to find the others
        plan, shows = backpropagation.plan, backpropagation.extraction.shows_columns
        thin = not (backpropagation.rules or shows) and plan.base * plan.size >= MANY_COLUMNS
        return lambda rows: (LossHessian(call, rows).root(thin), None)


@dataclass(frozen=True)
class SampledFactor(LossFactor):
    """A Monte-Carlo factor S of the loss Hessian, ``[M, N, *out]`` at every module."""

    of_gradients = True
    mc_samples: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.mc_samples, int) or self.mc_samples < 1:
            raise ValueError(f"mc_samples is a positive number, got {self.mc_samples!r}.")

    def emission(self, call: Visit, backpropagation: Backpropagation) -> Emission:
        """Draw for the whole batch."""
        try:
            drawn = LossHessian(call).drawn_root(self.mc_samples)
        except NotImplementedError as error:  # there is nothing to draw from
            raise NotImplementedError(f"{names_of(backpropagation.exts)}: {error}") from error
        return lambda rows: (subsample(drawn, 1, rows), None)


@dataclass(frozen=True)
class EmpiricalFactor(LossFactor):
    """The gradients at the targets, times the root of what the mean divides by: ``[1, N, *out]``.

    ``W g gᵀ`` is the outer product of ``W g``, the gradient of a term of the loss, divided by W.
    """

    of_gradients = True

    def emission(self, call: Visit, backpropagation: Backpropagation) -> Emission:
        """Return the gradients at the prediction."""
        hessian = LossHessian(call)
        if not hessian.is_of_one_prediction:
            raise NotImplementedError(
                f"{backpropagation.extraction.savefields}: several inputs of {call!r} are "
                "predictions, so that a sample has no gradient at one of them. Use fisher='exact'."
            )
        root = hessian.gradient_root()
        return lambda rows: (subsample(root, 1, rows), None)


@dataclass(frozen=True, eq=False)
class InBases(Propagation):
    """Another propagation, with bases of parameters that are known before. Equal to itself alone.

    Attributes:
        inner: What travels.
        bases: For each parameter its bases, by approximation; others have those of the batch.
    """

    reads_gradients = False
    inner: LossFactor
    bases: Mapping[Parameter, Bases]

    def run(self, plan: Plan, exts: Extensions, subsampling: Subsampling, save: Save) -> None:
        """Backpropagate ``JᵀS``."""
        self.inner.run(plan, exts, subsampling, save, self.bases)


@dataclass(frozen=True)
class InputsAlone(Propagation):
    """Nothing travels: what arrives at an output is replaced by the identity."""

    offers = frozenset({IDENTITY})
    takes_rules = False
    reads_gradients = False

    def run(self, plan: Plan, exts: Extensions, subsampling: Subsampling, save: Save) -> None:
        """Save what follows from the inputs."""
        is_of_samples = any(not OF_SAMPLES.isdisjoint(ext.reads) for ext in exts)
        for p in plan.uses:
            if is_of_samples:
                plan.check_one_batch(p)
            uses = uses_without_columns(plan, p, subsampling)
            for use in uses if plan.base else ():
                samples = len(row_numbers(plan.samples_of[use.call], subsampling))
                if samples and use.factor.groups % samples == 0:  # the rows belong to so many
                    use.factor = replace(use.factor, groups=samples)
            products = Products(p, uses, self.offers, max_factor_size=max_factor_size(exts))
            products.extract(exts, save)


def is_curved(call: Visit) -> bool:
    """Whether the output of a call is no (piecewise) affine function of its input."""
    return any(shape.numel() for shape in call.shape_out) and call.derivatives.is_curved(call)


def couples_terms(call: Visit) -> bool:
    """Whether a loss is no sum over the samples."""
    return call.derivatives.couples_terms(context_of(call))


def refuse_coupled(plan: Plan, ext: Extension) -> None:
    """Refuse the Hessian of single samples if a loss is no sum over the samples."""
    for call in plan.losses:
        if couples_terms(call):
            raise NotImplementedError(
                f"{ext.savefield}: samples have no Hessian of their own, because {call!r} is no "
                "sum over the samples. Use DiagHessian or HMP without subsampling."
            )


@dataclass(frozen=True)
class HessianFactors(Propagation):
    """Signed factors of the Hessian.

    The Hessian is the GGN of the loss plus a signed GGN for every nonlinear module, whose second
    derivative (weighted with the gradient) stands in for the loss Hessian.
    """

    offers = frozenset({"square", "batch_square"})
    takes_rules = False

    def run(self, plan: Plan, exts: Extensions, subsampling: Subsampling, save: Save) -> None:
        """Backpropagate from the loss and from every nonlinear module."""
        joint = plan.mixing or any(couples_terms(call) for call in plan.losses)
        reused = {p: None for p, uses in plan.uses.items() if len(uses) > 1 or joint}
        before = [c for c in reversed(plan.calls) if c not in plan.after_loss]
        known = [c for c in before if c.derivatives is not None]
        curved = set(filter(is_curved, known))
        reused |= dict.fromkeys(self._below_dense(known, curved))
        self._by_products(plan, list(reused), exts, subsampling, save)
        if len(reused) == len(plan.uses):
            return

        backpropagation = Backpropagation(plan, exts, subsampling, save, left_out=reused)
        sources: list[Source] = [self._loss_source(call) for call in plan.losses]
        for call in known:
            if call in curved and call.derivatives.hessian_is_diagonal(call.module):
                sources.append(ResidualSource(call))
        backpropagation.run(sources)

    @staticmethod
    def _below_dense(calls: Sequence[Visit], curved: set[Visit]) -> list[Parameter]:
        """List parameters that enter nonlinearly, or feed a module of dense second derivative.

        Calls are those before the losses, the last one first.
        """
        found: list[Parameter] = []
        above: set[Any] = set()
        for call in calls:
            derivatives = call.derivatives
            below = not above.isdisjoint(call.origins_out)
            if below or derivatives.bends_params(call):
                found += call.trained.values()
            dense = call in curved and not derivatives.hessian_is_diagonal(call.module)
            if below or dense:
                above.update(o for o in call.origins_in if o is not None)
        return found

    @staticmethod
    def _loss_source(call: Visit) -> Source:
        scale = loss_scale(call)

        def some(rows: Rows) -> SomeColumns | None:
            return LossHessian(call, rows).some_columns(signed=True)

        def factor(rows: Rows) -> tuple[Columns, Tensor | None]:
            columns, weights = LossHessian(call, rows).signed_root()
            if is_negative(scale):
                mat = first_of(columns)
                weights = mat.new_full(mat.shape[:2], -1) if weights is None else -weights
            return columns, weights

        root = scale.abs().sqrt()
        return LossSource(call, factor, scale=root, some=None if is_negative(scale) else some)

    @staticmethod
    def _by_products(
        plan: Plan, parameters: list[Any], exts: Extensions, subsampling: Subsampling, save: Save
    ) -> None:
        """Make diagonals of products with unit vectors, where columns do not suffice.

        So for second derivatives with respect to two uses of one parameter, and where samples mix.
        """
        for p in parameters:
            block = CurvatureBlock(plan, p, identity, subsampling, torch.is_grad_enabled())
            for ext in exts:
                per_sample = "batch_square" in ext.needs
                if per_sample or subsampling is not None:
                    refuse_coupled(plan, ext)
                    if plan.mixing:
                        ext.fail(MIXED_HESSIAN.format("Use DiagHessian without subsampling"))
                        continue
                if per_sample:
                    plan.check_one_batch(p)
                products = Products(p, uses_without_columns(plan, p, subsampling), ext.needs)
                products.set_values({n: block.diagonal(n == "batch_square") for n in ext.needs})
                products.extract([ext], save)


@dataclass(frozen=True)
class BatchAveraged(Propagation):
    """One matrix for the whole batch, averaged over the samples after every module."""

    offers = frozenset({"gram"})
    adds_up = False
    takes_rules = False
    reads_gradients = False

    def run(self, plan: Plan, exts: Extensions, subsampling: Subsampling, save: Save) -> None:
        """Backpropagate ``E[Jᵀ M J]``."""
        backpropagation = BatchAveragedBackpropagation(plan, subsampling)
        for call in plan.losses:
            root_of_scale(call, ", ".join(ext.savefield for ext in exts))
        for p in backpropagation.run():
            products = Products(p, uses_without_columns(plan, p, subsampling), ("gram",))
            products.set_values({"gram": backpropagation.take_factor(p)})
            products.extract(exts, save)


@dataclass(frozen=True)
class Blocks(Propagation):
    """Nothing is propagated now: products with curvature blocks are evaluated on demand."""

    offers = frozenset({"product"})
    takes_rules = False
    modify: Modify

    @property
    def reads_gradients(self) -> bool:  # type: ignore[override]
        """Whether second derivatives of modules take part."""
        return self.modify is not None

    def run(self, plan: Plan, exts: Extensions, subsampling: Subsampling, save: Save) -> None:
        """Save for each parameter the product with its block."""
        for call in plan.calls:
            if self.modify in (None, identity) or not call.couples_samples or not is_curved(call):
                continue
            fail(
                exts,
                f"the second derivative of {call!r} is one for all samples, whose positive "
                "part is not computed. Use eval() if this is batch normalisation.",
            )
        if self.modify is not None and subsampling is not None and plan.mixing:
            fail(exts, MIXED_HESSIAN.format("Leave out subsampling"))
            return
        for call in plan.losses:  # an error now rather than at the first product
            rows = plan.rows(call, None if plan.mixing else subsampling)
            hessian = LossHessian(call, rows)
            if self.modify is not identity:
                hessian.need_convex()
        if self.modify is identity and subsampling is not None:
            for ext in exts:
                refuse_coupled(plan, ext)
        create_graph = torch.is_grad_enabled()
        kept = plan.snapshot(create_graph)
        for p in kept.uses:
            for ext in exts:
                save(p, ext, CurvatureBlock(kept, p, self.modify, subsampling, create_graph))


class UserRules(Propagation):
    """Whatever the user-written module extensions of one extension propagate.

    A tensor ``[V, N, *out]`` (N samples, or those of the subsampling) travels like the columns of
    other extensions: rules see it with the shape of their module's output, and several losses have
    columns of their own. Anything else reaches the next rule as it is.
    """

    def run(self, plan: Plan, exts: Extensions, subsampling: Subsampling, save: Save) -> None:
        """Run the rules from the losses to the inputs; sums over branches are the extension's."""
        (ext,) = exts
        ext.saved_quantities.clear()
        try:
            _RunOfRules(plan, ext, subsampling, saves_once(plan, save)).run()
        finally:
            ext.saved_quantities.clear()


@dataclass(frozen=True)
class _RunOfRules:
    plan: Plan
    ext: Extension
    subsampling: Subsampling
    save: Callable[[Parameter, Extension, Any], None]

    def run(self) -> None:
        started, calls = [], self.plan.calls[::-1]
        for call in filter(self.plan.after_loss.__contains__, calls):
            values = self._passed_on(call)
            if call in self.plan.losses:
                started.append(values)
            else:
                self._arrive(values)
        for values in self._apart(started):
            self._arrive(values)
        for call in calls:
            if call not in self.plan.after_loss:
                self._arrive(self._passed_on(call))

    def _arrive(self, values: Passed) -> None:
        ext = self.ext
        for origin, value in values:
            ext.saved_quantities.save_quantity(
                origin, value, ext.accumulate_backpropagated_quantities
            )

    def _passed_on(self, call: Visit) -> Passed:
        """Return what the tensors that a call has read receive."""
        ext, producers = self.ext, self.plan.producers
        quantity, rule = self._arrived(call), ext.rule_for(call.module)
        backs: tuple[Any, ...] = ()
        if rule is not None:
            c = context_of(call, whole=True)
            back = run_rule(ext, rule, c, quantity, self.save, self.plan.base)
            backs = back if isinstance(back, tuple) and len(call.origins_in) > 1 else (back,)
        elif call.repeats is not None:
            backs = (*[None] * call.repeats, quantity)
        else:
            ext.fail(
                f"there is no rule for {call!r}. Register one with "
                f"set_module_extension({type(call.module).__name__}, …)."
            )
        return [
            (origin, self._at_producer(call, i, producers[origin], value))
            for i, (origin, value) in enumerate(zip(call.origins_in, backs, strict=False))
            if origin in producers and value is not None
        ]

    def _apart(self, started: list[Passed]) -> list[Passed]:
        """Give each of several losses columns of its own, if it is columns that they start with."""
        started = list(filter(None, started))
        are_columns = all(
            _are_columns(value, self.plan.shape(self.plan.producers[origin], self.subsampling))
            for values in started
            for origin, value in values
        )
        if len(started) < 2 or not are_columns:
            return started
        apart = columns_apart([[value for _, value in values] for values in started])
        return [
            [(origin, mat) for (origin, _), mat in zip(values, mats, strict=True)]
            for values, mats in zip(started, apart, strict=True)
        ]

    def _arrived(self, call: Visit) -> Any:
        """Take what arrived at a call: for several outputs, unless the first alone, a tuple."""
        found: list[Any] = []
        for slot, origin in enumerate(call.origins_out):
            value: Any = None
            if origin is not None:
                value = self.ext.saved_quantities.retrieve_quantity(origin)
            if _are_columns(value, self.plan.shape(Producer(call, slot), self.subsampling)):
                c = context_of(call, self.plan.rows(call, self.subsampling), whole=True)
                value = call_products.shown(c, slot, value)
            found.append(value)
        return found[0] if all(value is None for value in found[1:]) else tuple(found)

    def _at_producer(self, call: Visit, i: int, producer: Producer, value: Any) -> Any:
        """Give columns at input ``i`` of a call the shape of the output that is its input."""
        rows = self.plan.rows(call, self.subsampling)
        if not call.moves_no_columns and isinstance(value, Tensor):
            count = len(row_numbers(self.plan.num_rows(call), rows))
            own = call_products.shape_in(call, i, count)
            if value.dim() == 1 + len(own) and value.shape[1:].numel() == prod(own):
                value = call_products.read_back(context_of(call, rows), i, value)
        shape = self.plan.shape(producer, self.subsampling)
        return value.reshape(-1, *shape) if _are_columns(value, shape) else value


def _are_columns(value: Any, shape: Sequence[int]) -> bool:
    """Whether something is ``[V, N, *]`` with the entries of a canonical shape ``[N, *]``."""
    if not isinstance(value, Tensor) or value.dim() < 2 or not shape:
        return False
    return value.shape[1] == shape[0] and value.shape[1:].numel() == prod(shape)


POSITIVE_PART: dict[str, Callable[[Tensor], Tensor]] = {"clip": clip, "abs": torch.abs}

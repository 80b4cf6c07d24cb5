"""Leaf modules that nobody has written derivatives for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Size, Tensor
from torch.nn import Module

from backpack.context import disable
from backpack.core.derivatives.automatic import with_gradients
from backpack.core.derivatives.conditions import once
from backpack.core.derivatives.evaluation import Evaluation, alone, quietly
from backpack.core.derivatives.facts import always
from backpack.core.derivatives.function_derivatives import FunctionDerivatives
from backpack.core.record.calls import Call
from backpack.core.record.context import Context, context_of
from backpack.core.record.generators import evaluated_alike, evaluated_apart
from backpack.core.record.layout import Layout, unbatched
from backpack.core.record.module_state import describe
from backpack.core.record.origins import flatten_outputs
from backpack.core.record.registry import FALLBACKS
from backpack.core.record.visits import Visit
from backpack.utils.warning import warn


class UnknownModuleDerivatives(FunctionDerivatives):
    """Any leaf, with one warning for its class.

    What it computes may depend on its state, so nothing is taken for granted: before the
    derivatives of a call are used, it is evaluated again, and for one sample alone.
    """

    _may_change_attributes = True
    is_curved = always  # whether the function is affine may depend on the state of the module
    _warned: ClassVar[WeakSet[type[Module]]] = WeakSet()

    def evaluate(self, c: Context, params: Mapping[str, Tensor], *inputs: Any) -> Any:
        """Return the output for other inputs and parameters, of which derivatives may be a part."""
        with torch.enable_grad():
            return super().evaluate(c, params, *with_gradients(inputs, c.saved["needed"]))

    def layouts(self, call: Call) -> list[Layout | None]:
        """Find where the samples are in the outputs: in the same place, else by trying."""
        call.note("affine", False)
        call.set_layouts_in(
            layout if layout is not None or not shape else self._of_rows(call, shape)
            for layout, shape in zip(call.layouts_in, call.shape_in, strict=True)
        )
        batched = [layout for layout in call.layouts_in if layout is not None and layout.is_batched]
        if not batched:
            return [unbatched() for _ in call.shape_out]
        main, facts = batched[0], {layout.facts for layout in batched}
        if len(facts) > 1 or not _is_in_place(call, main) or self._moves_samples(call, main):
            try:
                layouts = super().layouts(call)
            except (RuntimeError, TypeError, IndexError, AssertionError) as error:
                raise ValueError(
                    f"{call!r}: where the samples of the batch are in the output cannot be found "
                    f"out ({error}). Register derivatives (backpack.core.derivatives.register)."
                ) from error
            call.note("one_row", all(map(_fits, layouts, call.shape_out)))
            return layouts
        for layout in batched[1:]:
            main.unify(layout)
        return [main if shape else None for shape in call.shape_out]

    def _moves_samples(self, call: Call, main: Layout) -> bool:
        """Whether one sample alone tells that an output has the samples along another axis."""
        if main.samples == 1 or all(shape.count(main.samples) < 2 for shape in call.shape_out):
            return False
        key = ("moves", call.shape_in, call.training, main.facts)
        return bool(once(call, key, partial(self._is_first_elsewhere, call)))

    def _is_first_elsewhere(self, call: Call) -> bool:
        """Whether the outputs of the first sample alone have its axis, at one of them elsewhere."""
        if not all(map(_fits, call.layouts_in, call.shape_in)):  # a row is no sample
            return False
        places = [call.place_in(i) for i in range(len(call.inputs))]
        pairs = [*zip(call.inputs, places, strict=True)]
        first = [x if place is None else x.narrow(place.axis, 0, 1) for x, place in pairs]
        axis = next(place.axis for place in places if place is not None)
        c = Context(Visit(call), call.inputs, call.outputs)
        try:
            with alone(), torch.no_grad(), disable(), quietly():
                found = evaluated_alike(lambda: flatten_outputs(self.evaluate(c, {}, *first)))
        except Exception:  # it cannot do with one
            return False
        if len(found) != len(call.shape_out):
            return False
        shapes = map(attrgetter("shape"), found)
        axes = [_narrowed_axis(*both) for both in zip(shapes, call.shape_out, strict=True)]
        return None not in axes and axes != [axis] * len(axes)

    @staticmethod
    def _of_rows(call: Call, shape: Size) -> Layout | None:
        """Let data, numbers or indices, have its samples first if there are as many."""
        known = next((one.samples for one in call.layouts_in if one and one.is_batched), shape[0])
        return Layout.of_axis(shape, 0, assumed=True) if shape[0] == known else None

    def couples_samples_unseen(self, call: Visit) -> bool | None:
        """Return whether samples are mixed; found out once for each state of a module and shape."""
        key = ("mixes", call.shape_in, call.training)
        return once(call, key, partial(self._meet, call))

    def _meet(self, call: Visit) -> bool | None:
        evaluation = self._evaluation(context_of(call, check=False))

        def twice() -> list[list[Tensor]]:  # from the state that the call has left
            return [evaluation.outputs({}, evaluation.inputs) for _ in range(2)]

        try:
            with alone(), torch.no_grad():
                (one, other), is_random = evaluated_apart(twice)
                is_known = not is_random and evaluation.agree(one, other)
                return is_known and not evaluation.is_independent()
        except Exception:  # nobody asks for its derivatives
            return None

    def unsupported_reason(self, c: Context) -> str | None:
        saved, module = c.saved, c.module
        reason = super().unsupported_reason(c)
        if reason is not None:
            return reason
        reached = zip(c.call.shape_out, c.call.g_out, strict=True)
        numbers = [not shape for shape, grad in reached if grad is not None]
        if any(numbers) and not all(numbers) and not c.call.is_followed:
            return (
                f"{describe(module)} returns a number beside what has samples, and the loss "
                "depends on it: what each sample has to do with it is not known. Use "
                "extend(model, use_converter=True), or return one number for each sample."
            )
        if not saved.get("one_row", True):
            return (
                f"{describe(module)} returns several rows for each sample. Reshape outside of the "
                "module, or register derivatives (backpack.core.derivatives.register)."
            )
        if "independent" not in saved:
            evaluation = self._evaluation(c)
            saved["independent"] = not evaluation.has_samples or evaluation.is_independent()
        if saved["independent"]:
            return None
        return (
            f"{describe(module)} mixes the samples of the batch, so its derivatives cannot be "
            "computed automatically. Use eval() if that helps, or register derivatives that say so "
            "(backpack.core.derivatives.register, couples_samples)."
        )

    def evaluation(self, c: Context) -> Evaluation:
        """Return how to evaluate the call at hand again, with a warning."""
        evaluation, module = super().evaluation(c), c.module
        if type(module) not in self._warned:
            self._warned.add(type(module))
            warn(
                f"No rule for {describe(module)}: its derivatives are computed automatically, "
                "which is right, but slow. How to register a faster one: see 'Write a rule' in the "
                "documentation.",
            )
        return evaluation


FALLBACKS["module"] = UnknownModuleDerivatives()


def _narrowed_axis(shape: Size, whole: Size) -> int | None:
    """Return the axis of which a tensor has an entry where another has several, if it is one."""
    if len(shape) != len(whole):
        return None
    axes = [i for i, (one, several) in enumerate(zip(shape, whole, strict=True)) if one != several]
    return axes[0] if len(axes) == 1 and shape[axes[0]] == 1 else None


def _is_in_place(call: Call, main: Layout) -> bool:
    """Whether all outputs have one row for each sample, along the axis of the inputs."""
    shapes_in = [
        shape
        for shape, layout in zip(call.shape_in, call.layouts_in, strict=True)
        if shape and layout is not None and layout.is_batched
    ]
    places = [main.place(shape) for shape in (*shapes_in, *filter(None, call.shape_out))]
    axes = {None if place is None else place.axis for place in places}
    return len(axes) == 1 and all(_fits(main, shape) for shape in call.shape_out)


def _fits(layout: Layout | None, shape: Size | None) -> bool:
    """Whether a tensor has one row for each sample (or no samples at all)."""
    if layout is None or not layout.is_batched or not shape:
        return True
    place = layout.place(shape)
    return place is not None and shape[place.axis] == layout.samples

"""Where a rule expects the samples of its tensors, and where they are in the outputs of a call."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import prod
from typing import Any, ClassVar

from torch import Size, Tensor
from torch.nn import Module

from backpack.core import fast
from backpack.core.derivatives.interface import Interface
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.data_flow import assumption_behind, may_be_samples
from backpack.core.record.layout import Layout, unbatched
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows, row_numbers

USUAL_LAYOUT = fast.path(
    "usual layout", "Samples that are the first axis of all tensors are not looked for."
)


def from_first(axis: int, dims: int) -> int:
    """Count an axis from the first one: what a rule says may count from the last."""
    return axis + dims if axis < 0 else axis


class BatchAxis(Enum):
    """What a rule says about the batch axis of its module's tensors."""

    FIXED = "at batch_axis_in and batch_axis_out"
    LEADING = "any axis but the last trailing_axes: they are all alike to the module"
    FOLLOWED = "wherever the tensors have it: the rule finds out where it goes"


class SampleAxes(Interface):
    """The part of a rule that is about samples: see :class:`BaseDerivatives` for the others."""

    batch_axis: ClassVar[BatchAxis] = BatchAxis.FIXED  # where the rule expects the samples
    follows_samples: ClassVar[bool] = False
    has_samples_first: ClassVar[bool] = True
    has_usual_layouts: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        """Note what follows from the methods that a subclass overrides."""
        super().__init_subclass__(**options)
        cls.follows_samples = cls.batch_axis is BatchAxis.FOLLOWED
        # whether the samples are along the first axis of all that it sees, and all that it returns
        cls.has_samples_first = (
            not cls.follows_samples
            and cls.batch_axis_in is SampleAxes.batch_axis_in
            and cls.batch_axis_out is SampleAxes.batch_axis_out
        )
        cls.has_usual_layouts = (
            cls.has_samples_first
            and cls.layouts is SampleAxes.layouts
            and cls._layout_out is SampleAxes._layout_out
        )

    @staticmethod
    def shape_of_rows(shape: Size, axis: int, rows: Rows) -> Size:
        """Return the shape of a selection of rows along an axis."""
        if rows is None or not shape:
            return shape
        return Size([*shape[:axis], len(row_numbers(shape[axis], rows)), *shape[axis + 1 :]])

    def shapes_out(self, c: Context) -> list[Size]:
        """Return the shapes of the outputs, of the rows at hand."""
        outputs = enumerate(c.outputs)
        return [self.shape_of_rows(y.shape, self.axis_out(c, i), c.rows) for i, y in outputs]

    def keeps_rows(self, call: Call) -> bool:
        """Return whether each row of an output is computed from the row at its place alone."""
        return True

    def folds_rows(self, module: Module) -> bool:
        """Return whether rows of a sample may as well be along an axis behind that of the batch."""
        return self.batch_axis is BatchAxis.LEADING

    def batch_axis_in(self, module: Module, i: int) -> int:
        """Return the batch axis of input ``i`` as the rule sees it; -1 for the last one."""
        return 0

    def batch_axis_out(self, module: Module, i: int) -> int:
        """Return the batch axis of output ``i`` as the rule sees it; -1 for the last one."""
        return 0

    def axis_of(self, module: Module, i: int, x: Tensor) -> int | None:
        """Return the batch axis of x, which is input ``i``; None if it is the same for all."""
        return from_first(self.batch_axis_in(module, i), x.dim())

    def axes_in(self, c: Context) -> list[int | None]:
        """Return the batch axis of each input as the rule sees it; None if it has no samples."""
        return [
            self.axis_of(c.module, i, x) if isinstance(x, Tensor) and x.dim() > 0 else None
            for i, x in enumerate(c.inputs)
        ]

    def axes_out(self, c: Context) -> list[int | None]:
        """Return the batch axis of each output as the rule sees it; None if it has no samples."""
        axes = (self.batch_axis_out(c.module, i) for i in range(len(c.outputs)))
        return [from_first(axis, y.dim()) for axis, y in zip(axes, c.outputs, strict=True)]

    def axis_in(self, c: Context, i: int) -> int:
        """Return the batch axis of input ``i`` in the call at hand; 0 if it has no samples."""
        return self.axes_in(c)[i] or 0

    def axis_out(self, c: Context, i: int) -> int:
        """Return the batch axis of output ``i`` in the call at hand; 0 if it has no samples."""
        return self.axes_out(c)[i] or 0

    def has_sample_tangents(self, call: Call, i: int) -> bool:
        """Return whether input ``i`` has no samples, but its tangents have: ``[V, N, *in]``."""
        return self.follows_samples and i in call.unbatched_inputs

    def trailing_axes(self, module: Module) -> int:
        """Return how many of the last axes are not like the others (``BatchAxis.LEADING``)."""
        return 1

    def usual_layout(self, call: Call) -> Layout | None:
        """Return where the samples are if they are the rows of all tensors, and known to be.

        That is the usual case of a module with one output; for all others see :meth:`layouts`.
        """
        if not (USUAL_LAYOUT.is_on and self.has_usual_layouts):
            return None
        if len(call.shape_out) > 1 or True in call.computed:
            return None
        if len(call.layouts_in) != 1 and (not call.layouts_in or any(call.layouts_in[1:])):
            return None
        shape, out, main = call.shape_in[0], call.shape_out[0], call.layouts_in[0]
        leading = self.batch_axis is BatchAxis.LEADING
        if main is None:  # data
            return Layout(1, out[0], leading, len(out)) if out else None
        if shape is None or not main.has_rows(shape) or (out and out[0] != shape[0]):
            return None
        if not leading:
            main.confirm()
        elif len(shape) <= self.trailing_axes(call.module):
            return None
        return main

    def layouts(self, call: Call) -> list[Layout | None]:
        """Find where the samples are in the outputs, and correct what was assumed of the inputs.

        Raises:
            ValueError: If the samples are not where the module needs them.
        """
        module, leading = call.module, self.batch_axis is BatchAxis.LEADING
        self._check_partners(call)
        self._merge_one_sample(call)
        for i, layout in enumerate(() if leading else call.layouts_in):
            if layout is None and call.computed[i] and self.batch_axis_in(module, i):
                raise ValueError(
                    f"{call!r} reads a tensor that a function has computed. Make the function a "
                    "module, or use extend(model, use_converter=True)."
                )
        # data first: where a module corrects it, constants get rows of as many samples
        for of_constants in (False, True) if leading else (False, True, None, True):
            if of_constants is None:
                self._correct_tables(call)
                continue
            for i, layout in enumerate(call.layouts_in):
                shape = call.shape_in[i]
                if layout is None or shape is None or not layout.is_batched:
                    continue
                if layout.is_constant != of_constants:
                    continue
                if leading:
                    self._check_leading(call, layout, shape)
                else:
                    self._check_fixed(call, i, layout, shape)
        # a number is a loss, unless it is made of numbers that have no samples (parameters)
        tensors = zip(call.layouts_in, call.shape_in, strict=True)
        batched = [bool(shape) or one.is_batched for one, shape in tensors if one is not None]
        of_numbers = bool(batched) and not any(batched)
        return [
            self._layout_out(call, i, shape) if shape or of_numbers else None
            for i, shape in enumerate(call.shape_out)
        ]

    def _merge_one_sample(self, call: Call) -> None:
        """Let all rows be those of the only sample, unless it has an axis that all tensors share.

        ``[T, 1]`` may have the sample along the last axis, or T rows of it with one feature.
        """
        batched = [one for one in call.layouts_in if one is not None and one.is_batched]
        if not batched or batched[0].samples != 1 or batched[0].before == 1 or batched[0].owners:
            return
        main, leading = batched[0], self.batch_axis is BatchAxis.LEADING
        if main.may_be_corrected or main.is_constant or not (leading or self.has_samples_first):
            return
        shapes = [shape for shape in call.shape_in + call.shape_out if shape]
        places = [main.place(shape) for shape in shapes]
        kinds = {place and (place.axis, place.outer, place.is_split) for place in places}
        fewest = min(map(len, shapes))
        axes = fewest - self.trailing_axes(call.module) if leading else 1
        if len(kinds) > 1 or places[0] is None or places[0].axis >= axes:
            whole = Layout(1, 1)
            call.set_layouts_in([whole if one in batched else one for one in call.layouts_in])

    def _check_partners(self, call: Call) -> None:
        """Refuse inputs whose samples come in different orders: they would meet others."""
        known = [one for one in call.layouts_in if one is not None and one.is_batched]
        orders = {one.owners for one in known if not one.is_constant}
        if len(orders) > 1:
            raise ValueError(
                f"{call!r} combines different samples of the batch: those of its inputs come in "
                "different orders, because a function before has rearranged or chosen some. "
                f"Extensions need modules that act on each sample alone.{assumption_behind(known)}"
            )

    def _correct_tables(self, call: Call) -> None:
        """Let data that was taken for a table have its samples where the module needs them.

        Such as sequences ``[T, N, *]``; or ``[N, T, *]`` if another tensor has samples.
        """
        for i, (layout, shape) in enumerate(zip(call.layouts_in, call.shape_in, strict=True)):
            if layout is None or layout.is_batched or not (layout.assumed and shape):
                continue
            has_partner = any(one is not None and one.is_batched for one in call.layouts_in)
            axis = self.axis_of(call.module, i, call.inputs[i])
            is_known = layout.may_be_corrected or not has_partner
            # else it is read row by row, and that matters where parameters are above
            if axis is None or not (axis or has_partner):
                continue
            if (is_known or call.origins_in[i]) and may_be_samples(shape[axis]):
                self._correct(call, layout, shape, axis)

    @staticmethod
    def _correct(call: Call, layout: Layout, shape: Size, axis: int) -> None:
        try:
            layout.correct(shape, axis)
        except ValueError as error:
            raise ValueError(f"{call!r}: {error}.") from None

    def _check_leading(self, call: Call, layout: Layout, shape: Size) -> None:
        """Refuse samples along one of the last axes of an input, whose entries are combined."""
        place, trailing = layout.place(shape), self.trailing_axes(call.module)
        if place is None or len(shape) <= trailing:  # may be corrected, or have no samples
            wrong = not layout.assumed
        else:
            wrong = place.axis >= len(shape) - trailing
        if wrong and layout.is_constant:
            layout.take_back(shape, range(len(shape) - trailing))
        elif wrong:
            last = "the last axis" if trailing == 1 else f"one of the last {trailing} axes"
            raise ValueError(
                f"{call!r} mixes the samples of the batch: they are along {last} of its input, "
                "and the module combines entries there. Give it an input whose batch axis comes "
                "before."
            )

    def fits_layouts(self, call: Call) -> bool:
        """Return whether samples that a later module has corrected are along one of the axes."""
        if self.batch_axis is not BatchAxis.LEADING:  # confirmed, or found out from the layouts
            return True
        for layout, shape in zip(call.layouts_in, call.shape_in, strict=True):
            if layout is None or not shape or not layout.is_batched or layout.assumed:
                continue
            place = layout.place(shape)
            if place is None or place.axis >= len(shape) - self.trailing_axes(call.module):
                return False
        return True

    def _check_fixed(self, call: Call, i: int, layout: Layout, shape: Size) -> None:
        """Correct or confirm an assumption about an input; refuse samples along another axis."""
        place = layout.place(shape)
        axis = from_first(self.batch_axis_in(call.module, i), len(shape))
        if place is not None and place.axis == axis and place.is_split:
            raise ValueError(
                f"{call!r} needs the samples of the batch alone along axis {axis} of input "
                f"{i}, but another axis is merged with them. Move that axis to the front, "
                "where it may be merged (batch_first=True in recurrent layers and attention)."
            )
        is_elsewhere = place is None or place.axis != axis
        if is_elsewhere and layout.is_constant:
            layout.take_back(shape, [axis])
            return
        if is_elsewhere and layout.samples == 1 == shape[axis]:  # along any axis of one entry
            layouts = [*call.layouts_in]
            layouts[i] = Layout.of_axis(shape, axis)
            call.set_layouts_in(layouts)
        elif is_elsewhere:
            if not layout.assumed or (place is not None and axis == 0 and shape[0] == 1):
                found = "nowhere" if place is None else f"along axis {place.axis}"
                raise ValueError(
                    f"{call!r} needs the samples of the batch along axis {axis} of input {i}, "
                    f"but they are {found}. Give the layer its input transposed, or the network "
                    "data with the batch axis first (and recurrent layers and attention "
                    "batch_first=True)."
                )
            self._correct(call, layout, shape, axis)
        layout.confirm()

    def _layout_out(self, call: Call, i: int, shape: Size) -> Layout:
        """Find where the samples are in an output, from where they are in the inputs."""
        inputs = [*zip(call.layouts_in, call.shape_in, strict=True)]
        main, own = inputs[0] if inputs else (None, None)
        if main is not None and (main.is_constant or not main.is_batched):
            known = [(one, s) for one, s in inputs if one and one.is_batched]
            main, own = min(known, key=lambda x: x[0].is_constant, default=inputs[0])
        if main is not None and not main.is_batched:
            return main if main.assumed else unbatched()  # a later module may know better
        if self.batch_axis is BatchAxis.LEADING:
            return main or Layout.of_axis(shape, 0, assumed=True)
        axis = self.batch_axis_out(call.module, i)
        place = None if main is None else main.place(own or ())
        if main is None or place is None:
            return Layout.of_axis(shape, axis)
        before = prod(shape[:axis]) * place.outer
        if before == main.before:
            return main
        sources = (main,) if main.is_constant else ()  # which may be taken back
        return Layout(before, place.samples, False, 0, sources, place.owners, main.is_constant)

    def seen(
        self, call: Visit, inputs: Sequence[Any], outputs: Sequence[Tensor]
    ) -> tuple[list[Any], list[Tensor]]:
        """Return inputs and outputs with the samples where the rule expects them."""
        module, leading = call.module, self.batch_axis is BatchAxis.LEADING
        main = next((layout for layout in call.layouts_in + call.layouts_out if layout), None)

        def view(x: Tensor, layout: Layout | None, axis: int | None) -> Tensor:
            if axis is None or (layout is None and x.dim() == 0):
                return x
            if layout is None and leading:  # data: like the others
                layout = main
            if layout is None or not (layout.is_batched or call.is_unbatched):
                # each sample reads its own row: the one at the same place as those of the others
                rows = None if leading else call.scattered_rows()
                if rows is None or x.shape[axis] % rows[1]:
                    return x
                place, length = rows
                x = x.movedim(axis, 0).unflatten(0, (length, -1))
                return place.to_canonical(x).flatten(0, 1).movedim(0, axis)
            if not layout.is_batched:
                if call.is_of_copies:
                    return x
                return x.unsqueeze(axis).expand(*x.shape[:axis], call.copies, *x.shape[axis:])
            own = layout.place(x.shape)
            return x if own is None else own.to_canonical(x).movedim(0, axis)

        xs = [
            view(x, layout, self.axis_of(module, i, x)) if isinstance(x, Tensor) else x
            for i, (x, layout) in enumerate(zip(inputs, call.layouts_in, strict=True))
        ]
        ys = [
            view(y, layout, from_first(self.batch_axis_out(module, i), y.dim()))
            for i, (y, layout) in enumerate(zip(outputs, call.layouts_out, strict=True))
        ]
        return xs, ys

    def seen_gradients(self, call: Visit, folded: bool) -> Sequence[Tensor | None]:
        """Return the gradients at a call's outputs with the samples where the rule expects them."""
        if self.follows_samples or call.is_of_copies:
            return call.g_out
        axes = (self.batch_axis_out(call.module, i) for i in range(len(call.outputs)))
        grads = call.gradients(folded)
        return [
            g if g is None or not axis else g.movedim(0, axis)
            for g, axis in zip(grads, axes, strict=True)
        ]

"""A module call as its rule sees it: tensors, and where the samples are in them.

That is found out again when a later module has corrected a layout (see :class:`Layout`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Size, Tensor
from torch.utils._pytree import tree_unflatten

from backpack.context import STATE
from backpack.core.record.data_notes import (
    UNFILLED,
    has_numbers,
    has_other_rows,
    note,
    noted,
    rows_of_constant,
)
from backpack.core.record.layout import Layout, Place, of_all, unbatched
from backpack.core.record.module_state import ModuleState, describe, works_in_place
from backpack.core.record.origins import Origin, is_foreign_function, parameter_behind, upstream
from backpack.core.types import Rule

_LAYOUT = operator.attrgetter("layout")
# What was taken for a table, and may be data of the samples: that they meet in it, nothing shows.
TABLE = (
    "data that has other rows than the samples (assign_samples says whose they are, "
    "register_buffer that it is a constant)"
)
# What to do about functions of tensors that have no samples, or not along the first axis.
UNCONVERTED = "Make the function a module, or use extend(model, use_converter=True)."
TOTALS = (
    "{} reads a number that was computed from all samples of the batch, so their results depend "
    "on each other. Compute it for each sample (dim=...), or detach() it if it is meant to be "
    "constant."
)
UNSEEN = (
    "Converters do not follow complex numbers, scripted functions, derivatives and torch.func, nor "
    "a torch.autograd.Function that is recorded or in a parametrisation ('trace' follows others). "
    "Let one module without children do all of that which reads data as well, between real "
    "tensors, with use_converter='record' or none."
)


class PlacedCall(ModuleState):
    """One call of a module, with the place of the samples in its inputs and outputs."""

    derivatives: Any  # the rule of the module; None for a container
    is_loss = False  # whether it is the rule of a loss
    inputs: tuple[Any, ...]  # in the order of the signature, flattened; attached to their graph
    outputs: tuple[Tensor, ...]  # flattened and detached
    shape_in: tuple[Size | None, ...]  # None for what is no tensor
    shape_out: tuple[Size, ...]
    structure: Any  # how the arguments were nested; None if they were not
    origins_in: tuple[Origin | None, ...]  # None where nothing can travel further back
    origins_out: tuple[Origin | None, ...]
    is_container: bool  # it has children, and no rule
    is_transparent: bool  # the output has the entries of the input: nothing to differentiate
    computed: list[bool]  # inputs that functions have computed from what recorded calls returned

    layouts_in: tuple[Layout | None, ...]  # None for data and for what is no tensor
    layouts_out: tuple[Layout | None, ...]  # None for a loss, and if it is not known
    relied_on: tuple[Any, ...] = ()  # known of the inputs when the rule found those of the outputs
    misplaced: str | None = None  # what is wrong with the place of the batch axis, if anything
    awaits_functions = False  # to read those that have computed an input may correct that
    mixed_data: str | None = None  # what has mixed samples of an input without a gradient
    couples_samples: bool  # the rule says that the output of a sample depends on others
    rows_are_samples: bool  # it is known of all tensors
    samples_come_first: bool  # in all tensors, and the rule sees them so
    moves_no_columns: bool  # the rule expects the samples of columns there, too
    is_unbatched: bool  # the output has no samples: it depends on parameters alone
    unbatched_inputs: tuple[int, ...]  # those without samples, in a call that has some

    # ------------------------------------------------------------------ finding the samples

    def _note_samples(self, leaves: Sequence[Any], layouts_in: list[Layout | None]) -> None:
        """Find where the samples are; ``layouts_in``: known of what recorded calls returned."""
        rule = self.derivatives
        may_couple = rule is not None and rule.couples_samples != rule.samples_are_apart
        self.couples_samples = may_couple and rule.couples_samples(self.module)
        self.computed = [False] * len(leaves)
        for i, layout in enumerate(layouts_in):
            if layout is None and isinstance(leaves[i], Tensor):
                layouts_in[i] = self._layout_in(i, leaves[i], self.origins_in[i])
        self.layouts_in = tuple(layouts_in)
        self._find_layouts_out()
        if self.mixed_data is TABLE and not self.is_unbatched:
            self.mixed_data = None

    def place_again(self, find: Callable[[Tensor], Layout | None]) -> bool:
        """Find the samples once more, where ``find`` tells them in what functions have computed."""
        pairs = zip(self.inputs, self.origins_in, strict=True)
        behind = {mark: x for x, mark in pairs if mark is not None and not mark.is_output}
        for mark, x in behind.items():
            mark.layout = mark.layout or find(x)
            if mark.layout is None:
                return False
        self.misplaced, self.awaits_functions, self.relied_on = None, False, ()
        for mark in (o for o in self.origins_out if o is not None):
            mark.lost = None
        self._note_samples(self.inputs, [None if o is None else o.layout for o in self.origins_in])
        return True

    def _layout_in(self, i: int, x: Tensor, mark: Origin | None) -> Layout | None:
        """Find the samples in an input of no recorded call; None if that is for this one to say."""
        if mark is None:
            known = noted(x)
            if known is not None:
                if known.lost is TABLE:
                    self.mixed_data = TABLE
                elif known.lost and has_numbers(x):  # indices may be what they are
                    self.misplaced = f"{self!r} reads {known.lost}"
                return rows_of_constant(x) if known.is_constant and not known.samples else known
            if x.requires_grad and parameter_behind(x) is not None:
                return unbatched()
            if not (STATE.get().recorders and has_other_rows(x)):
                return None
            self.mixed_data = TABLE
            return unbatched()
        is_foreign = is_foreign_function(x.grad_fn)
        known = noted(x) if is_foreign else None
        if known is not None and (known.is_batched or known.lost not in (None, UNFILLED)):
            # a recorded model has followed what its forward does; kernels are not seen
            if known.lost:
                self.misplaced = f"{self!r} reads {known.lost}"
            mark.layout = known
            return known
        above, _ = upstream(x, lambda m: m.layout is not None or m.lost is not None)
        lost = next((m.lost for m in above if m.lost is not None), None)
        if lost is not None:
            self.misplaced = lost
            return None
        self.computed[i] = bool(above)
        counts = {m.layout.samples for m in above if m.layout is not None and m.layout.is_batched}
        is_recorded = bool(STATE.get().recorders)
        if is_foreign and is_recorded and counts and x.dim() and counts != {len(x)}:
            function = x.grad_fn.name()  # type: ignore[union-attr]
            self.misplaced = (
                f"{self!r} reads a tensor of shape {list(x.shape)} that a torch.autograd.Function "
                f"({function}) has computed from one of {min(counts)} samples in a way that cannot "
                "be followed. Write its forward with functions of torch, or make it a module and "
                "register derivatives for that (backpack.core.derivatives.register)."
            )
        elsewhere = [m for m in above if m.layout is not None and not m.layout.samples_come_first]
        if elsewhere and not mark.is_output:  # else it is one number of all samples
            is_converted = is_recorded or "_backpack_converted" in vars(self.module)
            self.misplaced = (
                f"{self!r} reads a tensor of shape {list(x.shape)} that a function has computed "
                "from one whose batch axis is not the first (or that has none). "
                f"{UNSEEN if is_converted else UNCONVERTED}"
            )
            self.awaits_functions = not is_converted
        return None

    def _find_layouts_out(self) -> None:
        """Find where the samples are in the outputs, and note that at the places in the graph."""
        rule, shapes = self.derivatives, self.shape_out
        self.rows_are_samples = False
        self.layouts_out = (None,) * len(shapes)
        if self.is_transparent:  # such as the choice of one tensor of several
            self.layouts_out = tuple(map(_LAYOUT, self.origins_out))
        elif self.misplaced is not None:
            pass  # nor can anybody say it of what is computed of the outputs
        elif None in self.layouts_in and any(self.origins_in) and self._combines_totals():
            marked = zip(self.origins_in, self.shape_in, strict=True)
            self._note_totals([shape for mark, shape in marked if mark is not None])
            self.relied_on = tuple(map(_facts, self.layouts_in))
        elif rule is None:
            known = next((layout for layout in self.layouts_in if layout is not None), None)
            made = [getattr(mark, "layout", None) or known for mark in self.origins_out]
            self.layouts_out = tuple(
                [
                    (layout or Layout.of_axis(s, 0, assumed=True)) if s else None
                    for layout, s in zip(made, shapes, strict=True)
                ]
            )
        elif (usual := rule.usual_layout(self)) is not None:
            self.rows_are_samples = self.samples_come_first = self.moves_no_columns = True
            self.is_unbatched, self.unbatched_inputs = False, ()
            self.layouts_out = (usual,) if shapes[0] else (None,)
        else:
            self._ask_for_layouts_out(rule)
        if not self.rows_are_samples:
            self.find_places()
        for mark, layout in zip(self.origins_out, self.layouts_out, strict=True):
            if mark is not None and not self.is_transparent:
                if not mark.is_output:
                    mark.is_output, mark.by_container = True, self.is_container
                    mark.of_loss = self.is_loss
                mark.layout = mark.layout or layout
                mark.lost = mark.lost or self.misplaced

    def _ask_for_layouts_out(self, rule: Rule) -> None:
        """Let the rule find where the samples are in the outputs, from what is known so far."""
        self.find_places()
        totals: list[Size | None] = []
        for mark, layout, shape in zip(
            self.origins_in, self.layouts_in, self.shape_in, strict=True
        ):
            if mark is not None and mark.is_output and (layout is None or layout.is_of_all):
                totals.append(shape)
        if totals:
            self._note_totals(totals)
            if self.misplaced is not None:
                return
        try:
            self.layouts_out = tuple(rule.layouts(self))
            if None in self.layouts_out and self._take_back_constants():
                self.layouts_out = tuple(rule.layouts(self))
        except ValueError as error:
            self.misplaced = self.misplaced or str(error)
            return
        if totals:
            self.layouts_out = tuple([one and of_all() for one in self.layouts_out])
        if rule.depends_on_layouts or len(self.layouts_in) > 1:
            # what a rule has found out from layouts that are corrected later is void
            self.relied_on = tuple(map(_facts, self.layouts_in))

    def _take_back_constants(self) -> bool:
        """Whether all that is summed up are rows of constants: rather those of a table, then."""
        for x, layout in zip(self.inputs, self.layouts_in, strict=True):
            if isinstance(x, Tensor) and (layout is None or _has_samples(layout)):
                return False
        return self._take_back_rows()

    def _take_back_rows(self) -> bool:
        """Let constants have no samples, such as weights of losses; whether any had a row each."""
        rows = [one for one in self.layouts_in if one is not None and one.is_batched]
        constants = [one for one in rows if one.is_constant]
        for layout in constants:
            layout.mark_unbatched()
        return bool(constants)

    def _note_totals(self, totals: Sequence[Size | None]) -> None:
        """Let what meets totals of these shapes have no samples; say so if they are mixed there."""
        takes_rows = self.is_loss or bool(self.params)  # for samples
        has_rows = takes_rows and any(shape and shape[0] > 1 for shape in totals)
        if has_rows or any(map(_has_samples, self.layouts_in)):
            self.misplaced = TOTALS.format(repr(self))
        else:
            self._take_back_rows()

    def _combines_totals(self) -> bool:
        """Whether the inputs are made of losses, and of what no gradient flows through."""
        followed = False
        for x, mark, layout in zip(self.inputs, self.origins_in, self.layouts_in, strict=True):
            if mark is not None:
                followed = mark.is_output and layout is None
                if not followed:
                    return False
            elif isinstance(x, Tensor) and (x.requires_grad or _has_samples(layout)):
                return False
        return followed and not self.is_loss

    def layouts_of_data(self) -> Sequence[Layout | None]:
        """Find the samples in the outputs of a call without gradients; a ValueError if lost."""
        if self.derivatives is None:
            raise ValueError("it is no leaf of the network")
        usual = self.derivatives.usual_layout(self)
        return (usual,) if usual is not None else self.derivatives.layouts(self)

    def find_places(self) -> None:
        """Find out where the samples are, from the layouts as they are now."""
        rule, layouts_in, layouts_out = self.derivatives, self.layouts_in, self.layouts_out
        self.rows_are_samples = self.is_transparent and self._only_reshapes_rows()
        if self.rows_are_samples:
            self.samples_come_first = self.moves_no_columns = True
            self.is_unbatched, self.unbatched_inputs = False, ()
            return
        self.samples_come_first = (
            not (rule is not None and rule.follows_samples)
            and all(map(_is_first, layouts_in, self.shape_in))
            and all(map(_is_first, layouts_out, self.shape_out))
        )
        self.moves_no_columns = (
            self.samples_come_first and rule is not None and rule.has_samples_first
        )
        self.is_unbatched = 0 in [one.samples for one in layouts_out if one is not None]
        without = [i for i, one in enumerate(layouts_in) if one is not None and not one.samples]
        self.unbatched_inputs = () if self.is_unbatched else tuple(without)

    def _only_reshapes_rows(self) -> bool:
        """Whether the entries of the only input stay where they are in its rows, the samples."""
        if len(self.shape_in) > 1 or len(self.shape_out) > 1:
            return False
        (layout,), (shape_in,), (shape,) = self.layouts_in, self.shape_in, self.shape_out
        if layout is None or layout is not self.layouts_out[0] or not (shape_in and shape):
            return False
        if shape[0] != shape_in[0] or not layout.has_rows(shape_in):
            return False
        rule = self.derivatives
        return rule is not None and rule.has_samples_first

    def set_layouts_in(self, layouts: Iterable[Layout | None]) -> None:
        """Note where the samples are in the inputs."""
        self.layouts_in = tuple(layouts)
        self.find_places()

    def note_correction(self) -> None:
        """Find out where the samples are, now that a later module has corrected it."""
        is_corrected = tuple(map(_facts, self.layouts_in)) != self.relied_on
        if is_corrected and not any(one is not None and one.samples for one in self.layouts_in):
            for one in self.layouts_out:  # of the parts of a constant, all have none then
                if one is not None and one.is_constant and one.samples:
                    one.mark_unbatched()
        elif is_corrected:
            self._take_back_moved()
        self.find_places()
        rule = self.derivatives
        if self.misplaced is None and rule is not None and not rule.fits_layouts(self):
            self.misplaced = self._says_corrected()

    def find_rows(self) -> None:
        """Look for rows of samples in constants again, now that there are more or fewer."""
        if self.is_transparent or self.misplaced is not None or self.derivatives is None:
            return
        layouts = [*self.layouts_in]
        for x, one in zip(self.inputs, layouts, strict=True):
            if _has_samples(one) or (isinstance(x, Tensor) and (one is None or one.is_of_all)):
                return  # no constants alone: data, or totals
        for i, (x, mark) in enumerate(zip(self.inputs, self.origins_in, strict=True)):
            known = noted(x) if mark is None and layouts[i] is not None else None
            if known is not None and known.is_constant:
                of_none = unbatched()
                of_none.is_constant = True
                note(x, of_none)
                layouts[i] = rows_of_constant(x)
        self.set_layouts_in(layouts)
        try:
            found = self.derivatives.layouts(self)
        except ValueError as error:
            self.misplaced = str(error)
            return
        for known, new in zip(self.layouts_out, found, strict=True):
            if known is not None and new is not None and known is not new:
                known.follow(new)
        self.relied_on = tuple(map(_facts, self.layouts_in))
        self.find_places()

    def _take_back_moved(self) -> None:
        """Let constants be those of a table if samples have read them along another axis.

        So are all of them where the output has turned out to have no samples.
        """
        is_of_samples = any(map(_has_samples, self.layouts_in))
        has_rows = is_of_samples or any(one is None or one.samples for one in self.layouts_out)
        for one, known in zip(self.layouts_in, self.relied_on, strict=False):
            if one is None or not (one.is_constant and one.samples):
                continue
            if not has_rows or (is_of_samples and _facts(one) != known):
                one.mark_unbatched()

    def _says_corrected(self) -> str:
        return (
            f"{self!r}: the samples of the batch were assumed to be along the first axis of the "
            "network's data, but a later module needs them elsewhere. Give the network data with "
            "the batch axis first, and recurrent layers and attention batch_first=True; if the "
            "samples are along another axis, let a recurrent module come before functions."
        )

    def _layouts_hold(self) -> bool:
        """Whether what the rule has found out still holds, if a later module corrected it."""
        if self.is_transparent:
            return True
        facts = tuple(map(_facts, self.layouts_in))
        if facts == self.relied_on:
            return True
        expected = tuple(map(_facts, self.layouts_out))
        self.relied_on = facts
        try:
            return tuple(map(_facts, self.derivatives.layouts(self))) == expected
        except ValueError:
            return False
        finally:
            self.find_places()  # the rule may have changed the layouts of the inputs

    # ------------------------------------------------------------------ what others ask

    @property
    def is_of_copies(self) -> bool:
        """Whether there are no samples, and the rule works on one tensor in the place of all."""
        rule = self.derivatives
        return self.is_unbatched and rule is not None and not rule.folds_rows(self.module)

    def place_in(self, i: int) -> Place | None:
        """Find the batch axis of an input; None if it has none."""
        return self._place(self.layouts_in[i], self.shape_in[i])

    def place_out(self, i: int) -> Place | None:
        """Find the batch axis of an output; None if it has none."""
        return self._place(self.layouts_out[i], self.shape_out[i])

    def _place(self, layout: Layout | None, shape: Size | None) -> Place | None:
        if shape is None or layout is None:
            return None
        place = layout.place(shape)
        if place is None and layout.is_batched:
            raise ValueError(
                f"{self!r}: a tensor of shape {list(shape)} has no axis for the {layout.samples} "
                "samples of the batch. Keep the batch axis as it is."
            )
        return place

    def scattered_rows(self) -> tuple[Place, int] | None:
        """Return where samples are along an axis that inputs share, as the first one, and its size.

        None if they are in order.
        """
        for i, shape in enumerate(self.shape_in):
            place = self.place_in(i)
            if place is not None and shape is not None:
                first = place._replace(axis=0)
                return (first, shape[place.axis]) if first.is_scattered else None
        return None

    @property
    def num_rows(self) -> int:
        """Number of rows of the output, 0 if it has none."""
        shape = self.shape_out[0]
        if self.rows_are_samples:
            return shape[0]
        place = self.place_out(0) if shape else None
        return 0 if place is None else place.rows(shape)

    @property
    def rows_per_sample(self) -> int:
        """Number of rows that each sample has: more than 1 where a reshape has merged axes."""
        if self.rows_are_samples or not self.shape_out[0]:
            return 1
        place = self.place_out(0)
        return 1 if place is None else place.rows_per_sample(self.shape_out[0])

    @property
    def couples_rows(self) -> bool:
        """Whether rows of a sample may meet in the call, or are others at its inputs."""
        if self.rows_are_samples:
            return False
        layouts, rule = self.layouts_in + self.layouts_out, self.derivatives
        is_scattered = any(one is not None and one.owners is not None for one in layouts)
        return is_scattered or (rule is not None and not rule.keeps_rows(self))

    @property
    def is_foldable(self) -> bool:
        """Whether a sample has several rows, which the rule may see along an axis of their own."""
        if self.rows_are_samples or self.derivatives is None:
            return False
        return self.rows_per_sample > 1 and self.derivatives.folds_rows(self.module)

    def fold(self, x: Any) -> Any:
        """Give the rows of each sample an axis of their own, ``[R, *] -> [N, R/N, *]``."""
        if isinstance(x, Tensor) and x.dim() and len(x) == self.num_rows:
            return x.unflatten(0, (-1, self.rows_per_sample))
        return x

    def check_released(self) -> None:
        """Refuse to work with tensors that are gone: a RuntimeError."""
        if not self.outputs:
            raise RuntimeError(
                f"What the forward pass stored for {describe(self.module)} is gone: a backward "
                "pass released it, or memory_cleanup did. To run several backward passes through "
                "one forward pass, use backward(retain_graph=True) for all but the last, also for "
                "those without extensions (if they have create_graph=True, backpack(..., "
                "retain_graph=True) as well), and memory_cleanup behind them."
            )

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call with other values for the leaves: some to overwrite."""
        if works_in_place(self.module):
            leaves = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        if self.structure is None:
            return tuple(leaves), {}
        args, keywords = tree_unflatten(list(leaves), self.structure)
        return args, keywords

    def __repr__(self) -> str:
        shapes = [list(s) for s in self.shape_in if s is not None]
        outs = [list(s) for s in self.shape_out]
        return f"{describe(self.module)} (inputs {shapes}, outputs {outs})"


def _is_first(layout: Layout | None, shape: Size | None) -> bool:
    return layout is None or shape is None or layout.is_first(shape)


def _has_samples(layout: Layout | None) -> bool:
    return layout is not None and layout.is_batched and not layout.is_constant


def _facts(layout: Layout | None) -> tuple[Any, ...] | None:
    return None if layout is None else layout.facts

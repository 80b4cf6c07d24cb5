"""Derivatives of functions by autograd, which find out themselves where the samples are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import Module

from backpack.context import disable
from backpack.core.derivatives import by_autograd
from backpack.core.derivatives.automatic import AutomaticDerivatives
from backpack.core.derivatives.by_autograd import moves_entries
from backpack.core.derivatives.conditions import Conditions
from backpack.core.derivatives.evaluation import drawn, generator_at, is_real
from backpack.core.derivatives.following import Following, treatment_by
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.data_flow import (
    NODES_OF_GRAPHS,
    assumption_behind,
    is_all_data,
    is_of_inputs,
    of_tables,
    tensors_in,
)
from backpack.core.record.data_notes import before_repeated, number_of_samples, view_of
from backpack.core.record.generators import evaluated_alike
from backpack.core.record.kinds import CASTS, ENTRIES
from backpack.core.record.layout import Layout, unbatched
from backpack.core.record.module_state import cast
from backpack.core.record.origins import flatten_outputs
from backpack.core.record.registry import register
from backpack.core.record.visits import Visit
from backpack.core.types import Changes, OfInputs, OfParams

UNKNOWN: Final = object()
# Functions that choose rows by numbers, or add them up.
BY_INDICES = (
    *("gather", "getitem", "index_add", "index_copy", "index_put", "index_select"),
    *("scatter", "scatter_add", "scatter_reduce"),
)
# Functions of sequences, which may have the samples along the second axis.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@register(
    *(nn.LPPool1d, nn.LPPool2d, nn.LPPool3d, nn.LocalResponseNorm),
    *(nn.CosineSimilarity, nn.PairwiseDistance),
)
class FunctionDerivatives(AutomaticDerivatives):
    """Functions whose tensors may have their samples along any axis, or have none.

    Where the samples are in the output is found out, see
    :mod:`backpack.core.derivatives.following`, and by trying at random values whether the function
    is affine. The answers depend on the shapes alone, as a rule, and are kept.
    """

    batch_axis = BatchAxis.FOLLOWED
    depends_on_layouts = True
    # the answer for a key, and what it depends on besides that
    _known: ClassVar[WeakKeyDictionary[Module, dict[Any, tuple[Any, Conditions | None]]]] = (
        WeakKeyDictionary()
    )

    def hvp_unbatched(self, c: Context, inputs: OfInputs, params: OfParams) -> Changes:
        evaluation, tangents = self.evaluation(c), dict[Any, Tensor](params)
        for i, (t, x) in enumerate(zip(inputs, evaluation.inputs, strict=True)):
            if t is not None:
                tangents[i] = t
            elif params and is_real(x):  # parameters vary with all inputs
                tangents[i] = x.new_zeros(len(next(iter(params.values()))), *x.shape)
        found = by_autograd.transposed_products(evaluation, c.grad_out, tangents, None)
        return [found.get(i) for i in range(len(inputs))], {name: found[name] for name in params}

    def is_deterministic(self, module: Module) -> bool:
        """Return whether it is known to read its inputs alone, and to give the same again."""
        return False

    def unsupported_reason(self, c: Context) -> str | None:
        return None if self.is_deterministic(c.module) else super().unsupported_reason(c)

    def evaluate(self, c: Context, params: Mapping[str, Tensor], *inputs: Any) -> Any:
        """Return the output for other inputs and parameters, which it may change in place."""
        if treatment_by(c.module) is None:
            inputs = tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs)
        return super().evaluate(c, params, *inputs)

    def is_curved(self, call: Visit) -> bool:
        """Return whether the function is not affine, at random values or at those of the call."""
        if not call.saved["affine"]:
            return True
        if self.hessian_is_zero(call.module) or moves_entries(call.module):
            return False
        try:
            return self._bends(call, "hessian_is_zero", of_params=False)
        except NotImplementedError:  # torch has no second derivative, such as of grid_sample
            key = "affine at its values"
            if key not in call.saved:
                evaluate = self._following(call, 0).evaluate
                call.saved[key] = self._is_affine(call, evaluate, call.whole_inputs())
            return not call.saved[key]

    def axes_in(self, c: Context) -> list[int | None]:
        places = map(c.call.place_in, range(len(c.inputs)))
        return [None if place is None else place.axis for place in places]

    def axes_out(self, c: Context) -> list[int | None]:
        places = map(c.call.place_out, range(len(c.outputs)))
        return [None if place is None else place.axis for place in places]

    def seen(
        self, call: Call, inputs: Sequence[Any], outputs: Sequence[Tensor]
    ) -> tuple[list[Any], list[Tensor]]:
        return list(inputs), list(outputs)

    # ------------------------------------------------------------------ where the samples are

    def keeps_rows(self, call: Call) -> bool:
        """Return whether the function is one of each entry, and all rows are in one place."""
        tensors = [*zip(call.layouts_in, call.shape_in, strict=True)]
        tensors += zip(call.layouts_out, call.shape_out, strict=True)
        batched = [one for one in tensors if one[0] is not None and one[0].is_batched]
        places = {(one.facts, shape) for one, shape in batched if one is not None}
        return len(places) == 1 and treatment_by(call.module) in (CASTS, ENTRIES)

    def layouts(self, call: Call) -> list[Layout | None]:
        """Find where the samples are in the outputs by trying; an error if they are combined."""
        if None in call.layouts_in:
            self._assume_rows(call, of_indices=False)
            has_none = not any(one is not None and one.is_batched for one in call.layouts_in)
            if has_none and not call.relied_on:  # asked again, masks and indices stay as they are
                self._assume_rows(call, of_indices=True)
        call.note("affine", False)
        found = self._tried(call)
        if found is None and self._give_rows(call):
            found = self._tried(call)
        while found is None:
            self._mark_one_unbatched(call)
            found = self._tried(call)
        affine, layouts = found
        call.note("affine", affine)
        return layouts

    @staticmethod
    def _assume_rows(call: Call, of_indices: bool) -> None:
        """Let data (else indices) have its samples first, until a later module knows better."""
        call.set_layouts_in(
            Layout.of_axis(shape, 0, assumed=True)
            if layout is None and shape and (of_indices or x.is_floating_point())
            else layout
            for layout, x, shape in zip(call.layouts_in, call.inputs, call.shape_in, strict=True)
        )

    @staticmethod
    def _give_rows(call: Call) -> bool:
        """Give constants that samples fill, such as torch.zeros(N, …), a row for each sample."""
        samples = {one.samples for one in call.layouts_in if one is not None and one.is_batched}
        layouts = [*call.layouts_in]
        for i, (layout, shape) in enumerate(zip(call.layouts_in, call.shape_in, strict=True)):
            is_constant = layout is not None and layout.is_constant and not layout.is_batched
            if is_constant and shape and {shape[0]} == samples:
                layouts[i] = Layout(1, shape[0], True, len(shape), is_constant=True)
        differ = layouts != [*call.layouts_in]
        call.set_layouts_in(layouts)
        return differ

    @staticmethod
    def _reads_rows_of_layers(call: Call) -> bool:
        """Whether rows are read that a layer has made of constants, one for each sample."""
        return any(
            layout is not None and layout.is_constant and layout.samples > 1 and mark is not None
            for layout, mark in zip(call.layouts_in, call.origins_in, strict=True)
        )

    @staticmethod
    def _mark_one_unbatched(call: Call) -> None:
        """Take back one assumption: of what has fewer axes, or a single entry along the first."""
        batched = [
            (len(shape or ()), layout.dims, layout.samples > 1, layout)
            for layout, shape in zip(call.layouts_in, call.shape_in, strict=True)
            if layout is not None and layout.is_batched
        ]
        for layout, shape in zip(call.layouts_in, call.shape_in, strict=True):
            if layout is not None and layout.is_batched and layout.is_constant:
                place = None if shape is None else layout.place(shape)
                later = () if place is None else range(place.axis + 1, len(shape or ()) - 1)
                layout.take_back(shape or (), later)
                return
        doubtful = [x for x in batched if x[-1].assumed and not is_all_data(x[-1])]
        others = len({id(layout.root) for *_, layout in batched}) > 1
        doubtful.sort(key=lambda entry: (entry[2], entry[0], entry[1], is_of_inputs(entry[-1])))
        ranks = [entry[:3] for entry in batched]
        if not doubtful or not others or (len(set(ranks)) == 1 and len(doubtful) == len(batched)):
            raise ValueError(
                f"{call!r} combines different samples of the batch, or changes the batch axis in "
                "a way that cannot be followed. Extensions need functions that act on each sample "
                f"alone.{assumption_behind(layout for *_, layout in batched)}{_advice(call)}"
            )
        taken_back = doubtful[0][-1]
        if taken_back.samples > 1 and is_of_inputs(taken_back):  # perhaps a target that broadcasts
            call.mixed_data = (
                f"{call!r}, where an argument of the model has the same rows for all samples (if "
                "it is a table, let it have an axis of one entry in front, x[None])"
            )
        taken_back.mark_unbatched()

    def _tried(self, call: Call) -> tuple[bool, list[Layout | None]] | None:
        """Return whether the function is affine, and the layouts of the outputs if it has them."""
        facts = [None if one is None else one.facts for one in call.layouts_in]
        answers, key = self._known.setdefault(call.module, {}), self._key(call, facts)
        found, conditions = answers.get(key, (UNKNOWN, None))
        if conditions is not None and not conditions.hold(call):
            found = UNKNOWN
        batched = [one for one in call.layouts_in if one is not None and one.is_batched]
        if found is UNKNOWN:
            counts = {layout.samples for layout in batched}
            if len(counts) > 1:
                return None
            following = self._following(call, counts.pop() if counts else 0)
            found = self._found(call, following)
            conditions = following.conditions()
            if conditions is not None:
                is_bound = conditions.values or conditions.state  # else it always holds
                answers[key] = found, conditions if is_bound else None
        if found is None:
            return None
        affine, places = found
        if not batched:
            return affine, [self._of_no_samples(call, i) for i in range(len(call.shape_out))]
        first = batched[0]
        if all(one is first for one in batched) and all(place == first.facts for place in places):
            return affine, [first for _ in places]
        is_constant = all(layout.is_constant for layout in batched)
        batched = [layout for layout in batched if is_constant or not layout.is_constant]
        for layout in batched[1:]:
            batched[0].unify(layout)
        assumed = all(layout.assumed for layout in batched)
        layouts: list[Layout | None] = []
        for place in places:
            same = [one for one in batched if place == one.facts]
            if place is None or same:
                layouts.append(same[0] if place is not None else None)
            elif not place[1]:
                of_none = unbatched()
                of_none.is_constant = call.index < 0  # data that depends on no sample
                layouts.append(of_none)
            else:
                before, count, owners, *marks = place
                if owners is not None and self._reads_rows_of_layers(call):
                    return None  # samples have chosen some: they are those of a table, then
                is_fixed = bool(marks)  # the entries are a constant
                # constants may be taken back, also those that a module has corrected
                sources = batched if (assumed or is_constant) and not is_fixed else ()
                known = assumed or is_fixed, batched[0].dims, sources
                layouts.append(Layout(before, count, *known, owners, is_constant or is_fixed))
        return affine, layouts

    def _of_no_samples(self, call: Call, i: int) -> Layout:
        """Describe what is computed of tensors without samples alone."""
        is_of_entries = treatment_by(call.module) == ENTRIES
        of_data = of_tables(call.inputs, call.layouts_in, call.shape_out[i], is_of_entries)
        return self._repeated(call, i) or of_data or unbatched()

    def _repeated(self, call: Call, i: int) -> Layout | None:
        """Let what is repeated for all samples, such as learned queries, have a row for each.

        At random values, too, the entries of all of them are the same then.
        """
        samples, shape = number_of_samples(), call.shape_out[i]
        axes = shape[:-1] or shape  # the last one of several is that of features
        may_repeat = samples > 1 and any(size and size % samples == 0 for size in axes)
        if not (may_repeat and moves_entries(call.module)):
            return None
        leaves = [*call.inputs]
        # copies in a list are one tensor, or views of it
        keys = {k: view_of(x) for k, x in enumerate(leaves) if is_real(x)}
        different = {key: leaves[k] for k, key in keys.items()}
        if sum(x.numel() for x in different.values()) >= shape.numel():
            return None  # such as a weight that is transposed: nothing is drawn for it
        generator = generator_at(call.inputs)
        values = {key: drawn(x.shape, generator).to(x.device) for key, x in different.items()}
        for k, key in keys.items():
            leaves[k] = values[key]
        before = before_repeated(self._following(call, 0).evaluate(leaves)[i], axes, samples)
        if before is None:
            return None
        return Layout(before, samples, True, len(shape), is_constant=True)

    @staticmethod
    def _key(call: Call, facts: Sequence[Any]) -> Any:
        """Return what the answer depends on, unless it depends on values of tensors as well."""
        others: tuple[Any, ...] = ()
        if None in call.shape_in:
            others = tuple([x if isinstance(x, (int, float, str)) else None for x in call.inputs])
        return (
            call.shape_in,
            call.training,
            call.index < 0,
            bool(call.saved.get("needed")),
            others,
            *[getattr(x, "dtype", None) for x in call.inputs],
            *facts,
        )

    def _following(self, call: Call, count: int) -> Following:
        generator = generator_at(call.inputs)
        # parameters, too: at their values now (such as zero), less may depend on less
        params = {
            name: (2 * drawn(p.shape, generator)).to(p)
            for name, p in self.own(call.module).items()
            if p is not None
        }

        c = Context(Visit(call), call.inputs, call.outputs)
        collect = tensors_in if call.index < 0 else flatten_outputs  # data: of any precision

        def evaluate(leaves: Sequence[Any], dtype: Any = None) -> list[Tensor]:
            own = params
            if dtype is not None:
                own = {name: p.to(dtype) for name, p in params.items()}
                leaves = [cast(x, dtype) for x in leaves]
            with torch.no_grad(), disable():
                return list(evaluated_alike(lambda: collect(self.evaluate(c, own, *leaves))))

        return Following(call, evaluate, call.shape_out, count)

    def _found(self, call: Call, following: Following) -> Any:
        if any(isinstance(x, Tensor) and (x.is_meta or is_fake(x)) for x in call.inputs):
            raise ValueError(
                f"{call!r}: a tensor has no values (it is on the meta device, or a FakeTensor), so "
                "what the function does cannot be found out. Use tensors with values."
            )
        affine = bool(call.saved.get("needed")) and self._is_affine(call, following.evaluate)
        if not following.samples:
            return affine, [unbatched().facts for _ in call.shape_out]
        try:
            places = following.places()
        except Exception as error:
            raise ValueError(
                f"{call!r}: where the samples of the batch are in the output cannot be found out "
                f"({error}). Make it a module with derivatives "
                "(backpack.core.derivatives.register)."
            ) from error
        return None if places is None else (affine, places)

    @staticmethod
    def _is_affine(call: Call, evaluate: Any, values: Sequence[Any] | None = None) -> bool:
        """Whether ``f(x + y) = f(x) + f(y) - f(0)`` at random points, or at values and others."""
        generator = generator_at(call.inputs)
        pairs = enumerate(zip(call.inputs, call.layouts_in, strict=True))
        known = {i: x for i, (x, layout) in pairs if layout is not None and is_real(x)}

        def draw() -> dict[int, Tensor]:
            return {i: (2 * drawn(x.shape, generator)).to(x.device) for i, x in known.items()}

        one, other = draw(), draw()
        if values is not None:
            one = {i: values[i].detach().to(x.dtype) for i, x in one.items()}
        both = {i: one[i] + other[i] for i in one}
        zero = {i: torch.zeros_like(x) for i, x in one.items()}
        try:
            found = [
                evaluate([at.get(i, x) for i, x in enumerate(call.inputs)], torch.float64)
                for at in (both, one, other, zero)
            ]
        except Exception:  # it is not defined everywhere
            return False
        return all(
            z.is_floating_point()
            and bool(torch.isfinite(z).all())
            and torch.allclose(b - z, (x - z) + (y - z), rtol=1e-9, atol=1e-9)
            for b, x, y, z in zip(*found, strict=True)
        )


def _advice(call: Call) -> str:
    """Return what to do about rows of graphs, or about what a loop has computed of one sample."""
    advice, tensors = "", [x for x in call.inputs if isinstance(x, Tensor) and x.dim()]
    has_indices = any(x.dtype in (torch.int64, torch.int32) for x in tensors)
    if has_indices and getattr(call.module, "name", None) in BY_INDICES:
        advice = f" {NODES_OF_GRAPHS}"
    if getattr(call.module, "name", None) in RECURRENT:
        advice = (
            " If the sequence comes first, backpack.assign_samples(x, numbers), with numbers in "
            "the shape of x, says which sample each entry belongs to; or use batch_first=True."
        )
    read = [len(shape) for shape in call.shape_in if shape is not None]
    if len(read) < 2 or max(read) >= min(map(len, call.shape_out)):
        return advice
    return advice + (
        " Where a loop calls a module for one sample at a time, keep the axis of the batch: "
        "torch.cat([layer(row.unsqueeze(0)) for row in x]), or layer(x) at once."
    )

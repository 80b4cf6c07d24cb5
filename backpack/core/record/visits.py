"""A call in one backward pass: what the pass finds out and changes is here, and dies with it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import reduce
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.record import shards
from backpack.core.record.calls import LIVE, RELEASED, Call, saved_by
from backpack.core.record.layout import Layout
from backpack.core.record.module_state import NOTHING, cast, describe, placeholder
from backpack.core.record.origins import Origin, flatten_outputs
from backpack.core.record.registry import derivatives_of, fallback
from backpack.core.record.weights import Kept, version_of


class Visit(Call):
    """A copy of a call for one backward pass, which works on nothing else."""

    call: Call | None  # None for what outlives the backward pass
    g_out: list[Tensor | None]  # gradients at the outputs, once the pass has reached them
    g_samples: list[Tensor | None] | None = None  # [N, *out], for a call without samples
    trained: dict[str, Parameter]  # those of `params` that the pass gives a gradient
    precision: torch.dtype | None = None  # to compute in, if the network is of several
    copies = 1  # how many samples share the call, if it depends on parameters alone
    saved: dict[str, Any]  # what the derivatives keep, and what they memoise in this pass
    kept: dict[str, Any]  # what they keep for all backward passes: that of the call

    def __init__(self, call: Call):
        vars(self).update(vars(call))
        self.call = call
        self.g_out = [None] * len(call.shape_out)
        self.trained = call.params
        self.kept = call.saved
        self.saved = self.kept.copy()

    @classmethod
    def of(cls, call: Call, trained_only: bool) -> Visit:
        """Begin with a call, and check it; see :meth:`checked`."""
        return cls(call).checked(trained_only)

    def checked(self, trained_only: bool) -> Visit:
        """Refuse a call without quantities; ``trained_only``: frozen parameters do not matter."""
        if not self.outputs:
            self.check_released()
        names, values = self.options
        now = map(vars(self.module).get, names, repeat(NOTHING))
        if any(map(operator.is_not, now, values)) and self.has_other_options:
            self.module = self.with_options()
        self._check_batched()
        if self.module._parameters:
            self._check_parameters(trained_only)
        return self

    def _check_batched(self) -> None:
        """Refuse input without a batch axis, or whose samples are not known."""
        shape, rule = self.shape_out[0], self.derivatives
        if shape and not shape[0] and not self.num_rows:
            raise ValueError(f"{self!r} was called with an empty batch. Skip empty batches.")
        if self.misplaced is not None:
            raise ValueError(self.misplaced)
        if rule is None:
            return
        if rule.depends_on_layouts and not self._layouts_hold():
            raise ValueError(self._says_corrected())
        if len(shape) < rule.min_dims(self.module) and (self.is_of_copies or not self.is_unbatched):
            raise ValueError(f"{self!r} was called without a batch axis. Add one, x.unsqueeze(0).")

    def _check_parameters(self, trained_only: bool) -> None:
        """Refuse parameters that are not dense tensors of real floating-point numbers."""
        for name, p in self.read[0].items():
            if p is None or (trained_only and name not in self.params):
                continue
            if p.is_quantized or p.layout is not torch.strided:
                kind = "quantised" if p.is_quantized else f"sparse ({p.layout})"
                raise NotImplementedError(
                    f"The parameter '{name}' of {describe(self.module)} is {kind}. Extensions need "
                    "dense floating-point parameters: convert it (to_dense(), dequantize())."
                )
            if p.is_complex():
                raise NotImplementedError(
                    f"The parameter '{name}' of {describe(self.module)} is complex. Extensions "
                    "need real ones: let the parameter be torch.view_as_real(…) of it, and use "
                    "torch.view_as_complex in a module that takes and returns real tensors, with "
                    "use_converter='record' or none."
                )

    # ------------------------------------------------------------------ what a rule sees

    @property
    def rounding(self) -> float:
        """Machine epsilon of the roughest precision."""
        return max(torch.finfo(dtype).eps for dtype in dtypes_of([self]))

    def tensors(self, reads_entries: bool = True) -> Mapping[str, Any]:
        """As of the call, in the precision of this pass."""
        found = super().tensors(reads_entries)
        if self.precision is None:
            return found
        return {name: cast(t, self.precision) for name, t in found.items()}

    def seen(self, whole: bool, folded: bool) -> tuple[Sequence[Any], Sequence[Tensor]]:
        """Return inputs and outputs as the derivatives see them: samples where they expect them.

        ``whole``: with those that were not kept; ``folded``: rows of a sample have their own axis.
        """
        differentiable = torch.is_grad_enabled()
        inputs: Sequence[Any] = self.whole_inputs() if whole or differentiable else self.inputs
        outputs: Sequence[Tensor] = self.outputs
        if whole:
            outputs = [y.detach() for y in self.whole_outputs()]
        if differentiable and getattr(self.derivatives, "needs_output", False):
            # the stored output has no graph; differentiate through a fresh one
            outputs = flatten_outputs(self.forward(inputs))
        if self.precision is not None:
            inputs = [cast(x, self.precision) for x in inputs]
            outputs = [cast(y, self.precision) for y in outputs]
        if not self.samples_come_first and self.derivatives is not None:
            inputs, outputs = self.derivatives.seen(self, inputs, outputs)
        if folded:
            inputs, outputs = list(map(self.fold, inputs)), list(map(self.fold, outputs))
        return inputs, outputs

    def gradients(self, folded: bool = False) -> Sequence[Tensor | None]:
        """Return gradients with respect to the outputs in canonical form; see :meth:`seen`."""
        if self.g_samples is not None:
            return self.g_samples
        if self.moves_no_columns and not folded:
            return self.g_out
        grads = [
            g if g is None or place is None else place.to_canonical(g)
            for g, place in ((g, self.place_out(i)) for i, g in enumerate(self.g_out))
        ]
        return list(map(self.fold, grads)) if folded else grads

    def without_views(self) -> list[tuple[Any, ...]]:
        """Return inputs and outputs without what is a view of a parameter that is not there."""
        stored: list[tuple[Any, ...]] = [self.inputs, self.outputs]
        if all(shard.is_there for shard in self.views):
            return stored
        return [
            tuple([placeholder(x) if shards.shards_in([x]) else x for x in some]) for some in stored
        ]

    # ------------------------------------------------------------------ what the pass changes

    def note(self, name: str, value: Any) -> None:
        """Keep something for the rule, in all backward passes."""
        self.saved[name] = self.kept[name] = value

    def see_parameters_before(self, changed: Mapping[Tensor, Kept]) -> None:
        """Let the derivatives see parameters as they were, in further backward passes, too."""
        super().see_parameters_before(changed)
        if self.call is not None:
            self.call.kept_values = self.kept_values

    def set_apart(self) -> Origin:
        """Give the output of a transparent call an identity of its own, for rules of users."""
        (behind,) = self.origins_out
        mark = Origin()
        self.repeats, self.is_transparent = self.origins_in.index(behind), False
        self.origins_out = (mark,)
        self._find_layouts_out()
        return mark

    def read_instead(self, behind: Origin, mark: Origin) -> None:
        """Note that an input is the output of a call that was set apart."""
        self.origins_in = tuple(mark if o is behind else o for o in self.origins_in)
        if self.is_transparent:
            self.origins_out = tuple(mark if o is behind else o for o in self.origins_out)

    def read_functions(self, marks: Mapping[int, Origin]) -> None:
        """Note which functions have computed inputs, where that was found out after the call.

        A loss is told where the samples are (a ValueError if they cannot be there). What any other
        call has taken for that must be right, because others rely on it: else it does not know the
        functions.
        """
        layouts = list(self.layouts_in)
        for i, mark in marks.items():
            layouts[i] = mark.layout
        if self.is_loss:
            self.layouts_in = tuple(layouts)
            self._find_layouts_out()
            if self.misplaced is not None:
                raise ValueError(self.misplaced)
        elif all(self._has_assumed(i, layouts[i]) for i in marks):
            self.set_layouts_in(layouts)
        else:
            return
        self.origins_in = tuple([marks.get(i, o) for i, o in enumerate(self.origins_in)])

    def _has_assumed(self, i: int, layout: Layout | None) -> bool:
        """Whether the samples of an input are where the call has taken them to be."""
        known = self.layouts_in[i]
        expected = [known] if known is not None else self.layouts_out
        facts = [one.facts for one in expected if one is not None]
        return layout is not None and layout.facts in facts

    def become_function(self) -> None:
        """Take the automatic derivatives of any leaf for those of a loss, or raise a ValueError."""
        rule = fallback(self.module, self.outputs)
        assert rule is not None
        self.derivatives, self.is_loss = rule, rule.is_loss
        self.kept = saved_by(rule, self.module, self.inputs, self.outputs)
        self.saved = self.kept.copy()
        self._ask_for_layouts_out(rule)
        self.find_places()
        if self.misplaced is not None:
            raise ValueError(self.misplaced)

    def as_layer(self, layer: Module, i: int, x: Tensor) -> Visit | None:
        """Return the call of a layer, with the parameters that the function reads, if it is one.

        Its input is that of number ``i`` of the function, with the entries ``x``.
        """
        rule, mark, layout = derivatives_of(layer), self.origins_in[i], self.layouts_in[i]
        if rule is None or layout is None or not layout.is_batched or i in self.producers:
            return None
        other = copy(self)
        other._note_module(layer, rule.own(layer))
        other.derivatives, other.is_loss, other.trained = rule, rule.is_loss, other.params
        other.inputs, other.structure, other.computed = (x,), None, [self.computed[i]]
        other.origins_in, other.shape_in, other.layouts_in = (mark,), (x.shape,), (layout,)
        other.versions = (version_of(x), *self.versions[len(self.inputs) :])
        other.producers, other.kept, other.saved = {}, {}, {}
        if self.computed_with is not None:
            other.computed_with = other.state
        other._find_layouts_out()
        facts = [[y and y.facts for y in call.layouts_out] for call in (self, other)]
        return other if other.misplaced is None and facts[0] == facts[1] else None

    # ------------------------------------------------------------------ its end

    def snapshot(self, create_graph: bool) -> Visit:
        """Return a copy that outlives the pass, for later products: with what our derivatives read.

        With ``create_graph``: with all inputs, and their graph.
        """
        clone = copy(self)
        clone.call, clone.module, clone.producers = None, clone.with_options(), {}
        if create_graph:
            clone.inputs = self.whole_inputs()
        else:
            clone.inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in self.inputs)
        return clone

    def clear_results(self) -> None:
        """Drop what the rule has memoised."""
        self.saved = self.kept.copy()

    def clear(self) -> None:
        """Drop what the backward pass has found out."""
        self.clear_results()
        self.g_out, self.g_samples = [None] * len(self.g_out), None


def dtypes_of(calls: Iterable[Call]) -> set[torch.dtype]:
    """Return the precisions of what calls have read and returned."""
    return {
        t.dtype
        for call in calls
        for t in (*call.inputs, *call.outputs, *call.params.values())
        if isinstance(t, Tensor) and t.is_floating_point()
    }


def compute_in_one_precision(visits: Sequence[Visit]) -> None:
    """Compute in the highest precision of what calls have read and returned, as under autocast."""
    dtypes = dtypes_of(visits)
    if len(dtypes) > 1:
        precision = reduce(torch.promote_types, dtypes)
        for visit in visits:
            visit.precision = precision
            visit.g_out = [cast(g, precision) for g in visit.g_out]


def release(visits: Iterable[Visit], keeps_tensors: bool = False) -> None:
    """Drop what a backward pass has stored, and what the forward pass has, unless kept."""
    for visit in visits:
        if keeps_tensors:
            visit.clear()
        else:
            vars(visit).update(RELEASED, saved={}, kept={}, g_out=[], g_samples=None)
            if visit.call is not None:  # released here: a call less for each module
                vars(visit.call).update(RELEASED)
                LIVE.pop(visit.index, None)

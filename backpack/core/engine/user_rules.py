"""How rules of users are run: what they are shown, and what they have to return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.context import disable
from backpack.core.engine import call_products
from backpack.core.engine.plan import Plan
from backpack.core.lazy import lazy
from backpack.core.record.context import Context, context_of
from backpack.core.record.origins import flatten_outputs
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows, row_numbers
from backpack.core.types import Extension, Save

# Takes columns at each input of a call.
Deliver = Callable[[Iterable[Tensor | None]], None]


def sample_counts(
    call: Visit, subsampling: Sequence[int] | None, samples: int | None = None
) -> set[int]:
    """Return how many samples (or rows) a user's rule may find in a call; empty if unknown.

    All calls may agree on a number of ``samples``.
    """
    rows, samples = Plan.num_rows(call), samples or Plan.num_samples(call)
    if subsampling is not None:
        taken = len(subsampling)
        return {taken, taken * rows // samples} if samples else {taken}
    if not (samples and rows):
        return set()
    layout, shape = call.layouts_out[0], call.shape_out[0]
    # the rule may know better where the samples are, if that is only assumed
    apart = len(shape) > 2 and layout is not None and layout.assumed and not call.is_unbatched
    return {samples, rows, shape[1]} if apart else {samples, rows}


def saves_once(plan: Plan, save: Save) -> Callable[[Parameter, Extension, Any], None]:
    """Refuse what a user's rule returns for one of several uses of a parameter; save the rest."""

    def save_once(p: Parameter, ext: Extension, value: Any) -> None:
        if len(plan.uses.get(p, ())) > 1:
            raise NotImplementedError(
                f"{ext.savefield}: a rule of your own cannot serve a parameter that is used "
                "several times. Register derivatives instead "
                "(backpack.core.derivatives.register)."
            )
        save(p, ext, value)

    return save_once


def check_passed_on(
    ext: Extension, rule: Any, call: Visit, parts: Sequence[Any], rows: Rows
) -> None:
    """Refuse what a user's rule passes on to the inputs of a call, if it has other shapes."""
    if all(part is None for part in parts):
        raise ValueError(
            f"{ext.savefield}: 'backpropagate' of the rule {type(rule).__name__} for {call!r} "
            "passes nothing on (None): the parameters below would have no quantity. Return "
            "['V', *input] for each input; zeros if it has no influence."
        )
    for i, part in enumerate(parts):
        if part is not None and not (
            isinstance(part, Tensor) and _is_at_input(call, i, part.shape[1:], rows)
        ):
            raise ValueError(what_is_passed_on(ext, rule, call, parts))


def what_is_passed_on(ext: Extension, rule: Any, call: Visit, parts: Sequence[Any]) -> str:
    """Say what a user's rule passes on, and what is expected."""
    shapes = [list(m.shape) if isinstance(m, Tensor) else type(m).__name__ for m in parts]
    return (
        f"{ext.savefield}: the rule of {type(rule).__name__} for {call!r} passes on {shapes}. "
        "Expected is a tensor ['V', *input] for each input, with the samples of the extension."
    )


def _is_at_input(call: Visit, i: int, got: Sequence[int], rows: Rows) -> bool:
    """Whether columns fit an input: its shape, flattened behind the samples, or only reshaped."""
    shape = call.shape_in[i] if i < len(call.shape_in) else None
    place = call.place_in(i) if shape else None
    if shape is None or place is None or place.axis or place.is_scattered:
        return True  # what follows finds out
    total = Plan.num_rows(call)
    count = shape[0] * len(row_numbers(total, rows)) // total
    if list(got) in ([count, *shape[1:]], [count, shape[1:].numel()]):
        return True
    return call.is_transparent and bool(got) and got[0] == count


def call_gradients(call: Visit) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return ``g_inp`` and ``g_out`` for user-written rules."""
    return InputGradients(call), tuple(call.g_out)  # type: ignore[return-value]


def run_rule(
    ext: Extension, rule: Any, c: Context, arrived: Any, save: Any, samples: int | None = None
) -> Any:
    """Let a rule save, and return what it passes on; all calls may agree on ``samples``."""
    call, counts = c.call, sample_counts(c.call, ext.get_subsampling(), samples)
    with c.shown() as module:
        gradients = call_gradients(call)
        goes_on = any(map(call.is_differentiated, range(len(call.inputs))))
        return rule.run(ext, module, *gradients, arrived, save, goes_on, counts)


class InputGradients(Sequence[Any]):
    """Gradients with respect to the inputs of a call, computed when somebody looks at them."""

    def __init__(self, call: Visit):
        self._call = call

    def __len__(self) -> int:
        return len(self._call.inputs)

    def __getitem__(self, i: Any) -> Any:
        """Return the gradient with respect to input ``i``, None if it needs none."""
        return self._gradients[i]

    @lazy
    def _gradients(self) -> tuple[Any, ...]:
        call = self._call
        needed = [i for i, o in enumerate(call.origins_in) if o is not None]
        if not needed:
            return (None,) * len(self)
        grad = call.g_out[0]
        known = call.derivatives is not None and call.samples_come_first and len(call.outputs) == 1
        if known and call.shape_out[0] and grad is not None:
            grads = call_products.transposed(context_of(call), [grad.unsqueeze(0)])
            return tuple(
                g.squeeze(0) if g is not None and i in needed else None for i, g in enumerate(grads)
            )
        with torch.enable_grad(), disable():
            xs = [x.detach() if isinstance(x, Tensor) else x for x in call.whole_inputs()]
            for i in needed:
                xs[i].requires_grad_()
            outputs = flatten_outputs(call.forward(xs))
            pairs = [(y, g) for y, g in zip(outputs, call.g_out, strict=True) if g is not None]
            ys, gs = zip(*pairs, strict=True)
            found = torch.autograd.grad(ys, [xs[i] for i in needed], gs, allow_unused=True)
        by_index = dict(zip(needed, found, strict=True))
        return tuple(by_index.get(i) for i in range(len(xs)))


class ColumnRules:
    """Rules of users where columns travel: they save something, and carry on what they return."""

    def __init__(self, plan: Plan, exts: Sequence[Extension], save: Save):
        """Remember where what they save goes."""
        self._plan, self._exts, self._save = plan, exts, saves_once(plan, save)

    def through(
        self, call: Visit, mats: Sequence[Tensor | None], samples: Rows, deliver: Deliver
    ) -> bool:
        """Run the rule for a call, and ``deliver`` the columns at its inputs; False if none."""
        for ext in self._exts:
            rule = ext.rule_for(call.module)
            if rule is not None:
                break
        else:
            return False
        c = context_of(call, self._plan.rows(call, samples), whole=True)
        shown = [None if m is None else call_products.shown(c, i, m) for i, m in enumerate(mats)]
        arrived = shown[0] if all(mat is None for mat in shown[1:]) else tuple(shown)
        back = run_rule(ext, rule, c, arrived, self._save, self._plan.base)
        if call not in self._plan.going_on:
            return True
        parts = back if isinstance(back, tuple) else (back,)
        check_passed_on(ext, rule, call, parts, c.rows)
        try:
            deliver(
                None if part is None else call_products.read_back(c, i, part)
                for i, part in enumerate(parts)
            )
        except (ValueError, RuntimeError, IndexError) as error:
            raise ValueError(f"{what_is_passed_on(ext, rule, call, parts)} ({error})") from error
        return True

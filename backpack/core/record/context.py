"""What a rule sees of one call, and how code of users sees it through the module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core import fast
from backpack.core.lazy import lazy
from backpack.core.record.alive import live_calls
from backpack.core.record.module_state import NOTHING, copied, describe, put
from backpack.core.record.shards import need
from backpack.core.record.visits import Visit
from backpack.core.record.weights import VERSION
from backpack.core.rows import Rows, row_numbers
from backpack.utils.subsampling import subsample

SHARED = fast.path(
    "shared by parameters", "What parameters of a call have in common is computed once."
)
# Attributes that modules have while they show a call to code of users.
SHOWN = "_backpack_context"
# What a context has in common with that of other rows or inputs, as far as it is known.
COPIED = ("module", "counts_chosen_rows", "reads_entries", "params", "grad_out")


class Restriction(NamedTuple):
    """Tensors of a call at the rows of a context, for methods of users that are not told these."""

    numbers: Sequence[int]  # of the rows
    size: int  # how many rows the whole batch has
    inputs: Sequence[Any]
    outputs: Sequence[Tensor]
    grads: Sequence[Tensor | None]  # of the outputs
    axes: Sequence[int]  # of the rows in these gradients

    def rows_of(self, rows: Rows) -> Rows:
        """Return the numbers of rows that such a method asks for: it counts those it sees."""
        return [self.numbers[n] for n in row_numbers(len(self.numbers), rows)]

    def whole(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients at the rows as those of the whole batch, zero elsewhere."""
        found: list[Tensor | None] = []
        for g, axis in zip(grads, self.axes, strict=False):
            if g is not None and g.dim() > axis:
                shape = [*g.shape[:axis], self.size, *g.shape[axis + 1 :]]
                index = torch.tensor(self.numbers, device=g.device)
                g = g.new_zeros(shape).index_copy(axis, index, g)
            found.append(g)
        return found


class Context:
    """One call as its rule sees it: samples where the rule expects them, in one precision.

    Attributes:
        call: The call, in a backward pass.
        module: Its module, for hyperparameters.
        inputs: Arguments, flattened: ``[N, *in]`` if they have samples.
        outputs: What it returned, flattened: ``[N, *out]``.
        rows: Rows of the batch that cotangents and tangents hold; None for all.
        is_folded: Whether the rows of each sample have an axis of their own.
        counts_chosen_rows: Whether the rows are those of a loss that reads chosen ones, as it reads
            them; see :mod:`backpack.core.derivatives.loss_hessian`.
        memo: What parameters share of the cotangents at hand; None for nothing.
        reads_entries: Whether entries of parameters are read, and not their shapes alone.
        restriction: What code of users is shown instead of all rows; None for all.
    """

    restriction: Restriction | None = None

    def __init__(
        self,
        call: Visit,
        inputs: Sequence[Any],
        outputs: Sequence[Tensor],
        rows: Rows = None,
        is_folded: bool = False,
    ):
        self.call = call
        self.module: Any = call.module
        self.inputs = inputs
        self.outputs = outputs
        self.rows = rows
        self.is_folded = is_folded
        self.counts_chosen_rows = False
        self.memo: dict[str, Any] | None = None
        self.reads_entries = True
        if rows is None and inputs and outputs:  # what is read most, without a call
            self.x = self.input = inputs[0]
            self.y = self.output = outputs[0]

    def at(self, rows: Rows) -> Context:
        """Return the context of other rows."""
        return self if rows is self.rows else self._copy(self.inputs, rows)

    def reading(self, *inputs: Any) -> Context:
        """Return the context with other inputs."""
        return self._copy(inputs, self.rows)

    def counting(self, rows: Rows) -> Context:
        """Return the context of rows that are counted as a loss reads them."""
        other = self._copy(self.inputs, rows)
        other.counts_chosen_rows = True
        return other

    def _copy(self, inputs: Sequence[Any], rows: Rows) -> Context:
        other = type(self)(self.call, inputs, self.outputs, rows, self.is_folded)
        own, known = vars(other), vars(self)
        for name in COPIED:
            if name in known:
                own[name] = known[name]
        return other

    def restricted(self, axes_in: Sequence[int | None], axes_out: Sequence[int | None]) -> Context:
        """Return a context that shows tensors at the rows at hand, which are along these axes."""
        count = len(self.outputs)
        tensors = [*self.outputs, *self.inputs]
        axes = [*axes_out, *axes_in]
        pairs = zip(tensors, axes, strict=True)
        size = next((x.shape[a] for x, a in pairs if a is not None and x.dim() > a), 0)

        def select(x: Any, axis: int | None) -> Any:  # what has no samples may have other sizes
            has_rows = axis is not None and x is not None and x.shape[axis : axis + 1] == (size,)
            return self.select(x, axis or 0) if has_rows else x

        selected = list(map(select, tensors, axes))
        grads = zip(self.grad_out, self.outputs, axes_out, strict=False)
        # of samples, at a tensor without them, these come first
        axes_of_grads = [0 if g is None or g.dim() > y.dim() else a or 0 for g, y, a in grads]
        other = self._copy(self.inputs, self.rows)
        other.restriction = Restriction(
            self.numbers(size),
            size,
            selected[count:],
            tuple(selected[:count]),
            list(map(select, self.grad_out, axes_of_grads)),
            axes_of_grads,
        )
        return other

    def inside(self, module: Module, prefix: str, inputs: Sequence[Any]) -> Context:
        """Return the context of a child whose call this one stands for, with other inputs."""
        other = self._copy(inputs, self.rows)
        names = [name for name in self.params if name.startswith(prefix)]
        other.module = module
        other.params = {name.removeprefix(prefix): self.params[name] for name in names}
        return other

    @lazy
    def params(self) -> Mapping[str, Any]:
        """Parameters and buffers that the call has read, those of children by qualified names."""
        return self.call.tensors(self.reads_entries)

    @lazy
    def grad_out(self) -> Sequence[Tensor | None]:
        """Gradients of the loss with respect to the outputs: ``[N, *out]``, None for zero."""
        call, rule = self.call, self.call.derivatives
        if rule is None or (call.moves_no_columns and not self.is_folded):
            return call.g_out
        return rule.seen_gradients(call, self.is_folded)

    @property
    def evaluated(self) -> Any:
        """What is called to evaluate the call again, inside of ``call.as_it_was()``."""
        return self.call.evaluated if self.module is self.call.module else self.module

    @property
    def saved(self) -> dict[str, Any]:
        """What the rule has kept from the forward pass, and what it memoises."""
        return self.call.saved

    @lazy
    def input(self) -> Any:
        """The first input, of all samples."""
        return self.inputs[0]

    @lazy
    def output(self) -> Tensor:
        """The first output, of all samples."""
        return self.outputs[0]

    @lazy
    def x(self) -> Any:
        """The first input, of the selected rows: ``[N, *in]``, or N where the rule expects it."""
        rule = self.call.derivatives
        axis = 0 if rule is None or rule.has_samples_first else rule.axis_in(self, 0)
        return self.select(self.inputs[0], axis)

    @lazy
    def y(self) -> Tensor:
        """The first output, of the selected rows: ``[N, *out]``, or N where the rule expects it."""
        rule = self.call.derivatives
        axis = 0 if rule is None or rule.has_samples_first else rule.axis_out(self, 0)
        return self.select(self.outputs[0], axis)

    def select(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """Return the selected rows of a tensor."""
        return tensor if self.rows is None else subsample(tensor, axis, self.rows)

    def numbers(self, size: int) -> Sequence[int]:
        """Return the numbers of the selected rows of a whole batch of this size."""
        return row_numbers(size, self.rows)

    @property
    def takes_one(self) -> bool:
        """Whether the only tensor among the inputs is the first: others are options."""
        return [i for i, x in enumerate(self.inputs) if isinstance(x, Tensor)] == [0]

    @contextmanager
    def shown(self, for_users: bool = False) -> Iterator[Any]:
        """Show the call to code of users: the module has its ``input0, input1, …`` and ``output``.

        And parameters, buffers, mode and options of the call. If another thread works with it, a
        copy has all that. ``for_users``: parameters that the backward pass has changed stay so.
        """
        call, thread, is_own = self.call, get_ident(), self.module is self.call.module
        module = call.called if is_own else self.module
        own, of_rows = vars(module), self.restriction
        outputs = self.outputs if of_rows is None else of_rows.outputs
        inputs = self.inputs if of_rows is None else of_rows.inputs
        # who shows a call is noted where it is shown: at the module, in one step for all threads
        is_first = "_backpack_thread" not in own
        if own.setdefault("_backpack_thread", thread) != thread:
            is_first, module = False, copied(module)
            own = vars(module)
        output: Any = outputs[0] if len(outputs) == 1 else outputs
        attributes: dict[str, Any] = {"output": output, SHOWN: self}
        if own["training"] is not call.training:
            attributes["training"] = call.training
        if is_own and call.module is not module:  # it has other options by now
            constants = getattr(type(module), "__constants__", ())
            for name, was in zip(*call.options, strict=True):
                # a hook may count in other attributes
                if was is not NOTHING and (name in constants or not for_users):
                    attributes.setdefault(name, was)
        for i, x in enumerate(inputs):
            attributes[f"input{i}"] = x
        for child in own["_modules"]:  # a child may be called "output"
            attributes.pop(child, None)
        tensors: Sequence[Any] = ()
        replaced = {name: own[name] for name in attributes.keys() & own.keys()}
        try:
            if is_own:
                tensors = call.swap_tensors(module, call.precision, for_users)
            own.update(attributes)
            yield module
        finally:
            put(tensors)
            for name in attributes.keys() - replaced.keys():
                own.pop(name, None)
            own.update(replaced)
            if is_first:  # other threads may have the module
                own.pop("_backpack_thread", None)


class OfShards(Context):
    """The context of a call whose parameters are sharded: they are gathered when they are read."""

    @property
    def params(self) -> Mapping[str, Any]:  # type: ignore[override]
        """As of others."""
        own = vars(self)
        if "params" not in own:
            own["params"] = self.call.tensors(self.reads_entries)
        elif self.reads_entries:
            need(self.call.shards)
        return own["params"]

    @params.setter
    def params(self, found: Mapping[str, Any]) -> None:
        vars(self)["params"] = found


def context_of(
    call: Visit,
    rows: Rows = None,
    check: bool = True,
    whole: bool = False,
    folds: bool = False,
    shares: bool = False,
) -> Context:
    """Return what the rule of a call sees.

    Args:
        call: The call.
        rows: Rows of the batch that cotangents and tangents hold. Default: all.
        check: Refuse tensors that were changed in place.
        whole: For code of users, which may read what our rules do not.
        folds: Give the rows of a sample an axis of their own, if there are several.
        shares: Memoise what parameters compute alike of the cotangents at hand.

    Raises:
        RuntimeError: If the call was released or a stored tensor was changed in place.
    """
    if not call.outputs:
        call.check_released()
    if check:
        try:
            is_unchanged = tuple(map(VERSION, call.inputs + call.outputs)) == call.versions
        except (AttributeError, RuntimeError):  # not all are tensors
            is_unchanged = False
        if not is_unchanged:
            call.check_unchanged()
    if call.views:
        need(call.views)
    kind = OfShards if call.shards else Context
    as_stored = call.rows_are_samples and call.precision is None and not whole
    if as_stored and not torch.is_grad_enabled():
        c = kind(call, call.inputs, call.outputs, rows)
        if len(call.read) == 2 and not (call.kept_values or call.shards):
            c.params = call.read[0] | call.read[1] if call.read[1] else call.read[0]
    else:
        is_folded = folds and call.is_foldable
        c = kind(call, *call.seen(whole, is_folded), rows, is_folded)
    if shares and SHARED.is_on and len(call.trained) > 1:
        c.memo = {}
    return c


def at_hand(module: Module, grads: Sequence[Tensor | None] | None, rows: Rows) -> Context:
    """Return the call that a module shows, else its latest recorded one (or a RuntimeError).

    With the gradients at its outputs, if they are known, and rows of the batch.
    """
    shown = vars(module).get(SHOWN)
    if shown is not None:
        of_rows = shown.restriction
        if of_rows is not None:
            rows, grads = of_rows.rows_of(rows), grads and of_rows.whole(grads)
        found = shown._copy(shown.inputs, rows)
    else:
        calls = live_calls(module)
        if not calls:
            raise RuntimeError(
                f"No forward pass of {describe(module)} is recorded: extend() it, call it with "
                "something that requires a gradient, and keep the output. A backward pass frees "
                "what was recorded, unless it retains the graph."
            )
        visit = Visit(calls[-1])
        visit.g_out[: len(grads or ())] = grads or ()  # curvature is looked for where there is one
        visit.saved = visit.kept  # what is memoised is there for whoever asks next
        found = context_of(visit, rows)
    if grads is not None:
        found.grad_out = list(grads)
    return found

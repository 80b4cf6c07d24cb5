"""What a model is called with, to be compared with what its layers read.

A model that was not converted says nothing of the functions in its ``forward``, and data has no
graph. But where a layer takes the rows of its input for the samples, and those have another number
than the samples of the model, or other places in memory, the functions before it have moved them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack.context import STATE
from backpack.core.record.compiler import in_transform, is_traced
from backpack.core.record.data_flow import take_mixing
from backpack.core.record.data_notes import OF_DATA, assigned_place, has_numbers
from backpack.core.record.layout import Place
from backpack.core.record.origins import flatten_outputs
from backpack.core.record.registry import derivatives_of, is_leaf
from backpack.core.record.tape import GRAD_FN, listen

# Attribute of a model whose inputs are compared with those of its layers.
MARK = "_backpack_model"


class Strided:
    """Where the entries of a tensor are, without keeping it."""

    __slots__ = ("axis", "memory", "samples", "start", "steps")

    def __init__(self, x: Tensor, place: Place | None = None):
        """Look at a tensor, of which a program may have said where the samples are."""
        item = x.element_size()
        self.axis = None if place is None or place.is_scattered else place.axis
        self.samples = 0 if place is None else place.samples  # which may have several rows
        self.start = x.data_ptr()
        self.memory = self.start - item * int(x.storage_offset())  # begins there, for all views
        # sizes, and bytes between entries, along each axis
        self.steps = [*zip(x.shape, map(item.__mul__, x.stride()), strict=True)]

    def places(self, axes: Iterable[int]) -> list[tuple[int, int]]:
        """Return sizes, and bytes between entries, along axes that may have the samples."""
        axes = axes if self.axis is None else (self.axis,)
        return [self.steps[i] for i in axes if i < len(self.steps)]

    def is_slice_of(self, whole: Strided) -> bool:
        """Whether each axis has entries of that axis of another tensor, such as ``x[:, ::2]``."""
        rest = self.start - whole.start
        pairs = [*zip(self.steps, whole.steps, strict=False)]
        for (n, step), (m, other) in sorted(pairs, key=lambda pair: -pair[1][1]):
            first, rest = divmod(rest, other) if m > 1 and other else (0, rest)
            each, between = divmod(step, other) if other else (0, step)
            is_repeated = n > 1 and not each and other != 0  # one entry, for all
            is_beyond = first < 0 or first + (n - 1) * each >= m or n > m
            if is_beyond or is_repeated or (n > 1 and between):
                return False
        return rest == 0 and len(self.steps) == len(whole.steps)

    @property
    def has_outer_rows(self) -> bool:
        """Whether no other axis of the size of the first one has larger steps."""
        if self.axis:
            return False
        size, step = self.steps[0]
        return size < 2 or all(n != size or other <= step for n, other in self.steps)


@dataclass(eq=False)
class Given:
    """One call of a model that consists of layers."""

    module: Module
    # arguments, and entries of dictionaries: their first axis has the samples, unless a program has
    # said that another one has them
    tensors: list[Strided]
    mixing: list[str]  # its modules that have mixed samples where no gradient passes

    def sizes(self, axes: set[int]) -> set[int]:
        """Return how many samples there may be, if they are along one of some axes."""
        return {x.samples or size for x in self.tensors for size, _ in x.places(axes)}

    def is_moved(self, x: Tensor, axis: int, is_computed: bool) -> bool:
        """Whether memory tells that the samples of a tensor are not where a layer takes them.

        No layer has computed it: it is data, or a function of data, and functions of single entries
        keep the order of the axes in memory, as views do. Arguments of the model have their samples
        along the first axis, or along this one. ``is_computed``: it may be made of those.
        """
        read, axes, is_argument = Strided(x), {0, axis}, False
        place = read.steps[axis]
        for known in self.tensors:
            if known.memory == read.memory:
                is_argument = True
                if place in known.places(axes):
                    return False
                if known.axis in (None, axis) and read.is_slice_of(known):
                    return False
        rows = {size for known in self.tensors for size, _ in known.places(axes)}
        if place[0] < 2 or place[0] not in rows:  # known by that
            return False
        is_expanded = not (place[1] or is_argument)  # for all samples
        if is_expanded and (not has_numbers(x) or self._holds(read)):  # positions, or a constant
            return False
        if is_argument or not is_computed or axis or read.has_outer_rows:
            return is_argument
        return all(known.has_outer_rows for known in self.tensors)

    def _holds(self, read: Strided) -> bool:
        """Whether what is read is a view of a buffer."""
        buffers = (x for x in self.module.buffers() if x.layout is torch.strided)
        return any(Strided(x).memory == read.memory for x in buffers)


def mark_model(module: Module, is_one: bool = True) -> None:
    """Let the inputs of a module be compared with those of its layers, if it has layers."""
    if is_one and not is_leaf(module) and derivatives_of(module) is None:
        vars(module)[MARK] = True
    else:
        vars(module).pop(MARK, None)


def is_model(module: Module) -> bool:
    """Return whether the inputs of a module are compared with those of its layers."""
    return MARK in vars(module)


def note_given(
    module: Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Any,
    entered: Callable[[Given, Any], None],
) -> None:
    """Let backward passes through a model know what it was called with.

    ``entered`` is called when one has the gradient of an output, with that.
    """
    if STATE.get().disabled or not torch.is_grad_enabled():
        return
    if in_transform() is not None or is_traced():
        return
    tensors = []
    for value in (*args, *kwargs.values()):
        for x in value.values() if isinstance(value, Mapping) else (value,):
            if type(x) is Tensor and x.dim() and x.layout is torch.strided and not x.is_nested:
                tensors.append(Strided(x, assigned_place(x) if id(x) in OF_DATA else None))
    is_one = isinstance(output, Tensor) and output.is_floating_point()
    outputs = list(filter(GRAD_FN, (output,) if is_one else flatten_outputs(output)))
    if tensors and outputs:
        listener = partial(entered, Given(module, tensors, take_mixing(module.modules())))
        for y in outputs:
            listen(y, listener)

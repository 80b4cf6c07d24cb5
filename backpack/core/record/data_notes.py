"""Where the samples are in tensors that no graph leads to, and what has mixed them.

A tensor with a graph has its layout at its place in the graph (``origins``). Of any other one it is
noted here: what a model was called with for that call alone, all else as long as the tensor lives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from threading import local
from types import FrameType
from typing import Any
from weakref import ref

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import Module, Parameter

from backpack.core.record.layout import Layout, Place, unbatched
from backpack.core.record.origins import Origin, origin
from backpack.core.record.weights import COUNTER
from backpack.core.values import has_values

# Why the samples are not known in memory that no function of torch has filled.
UNFILLED = "a tensor that torch.empty_like (or new_empty) has made and something unknown filled"

# What a tensor was when it was noted, where the samples are, and the tensor.
Note = tuple[Any, Layout, ref[Tensor]]
# Where the samples are in tensors that no graph leads to: the layout goes with the tensor.
OF_DATA: dict[int, Note] = {}


@dataclass(eq=False)
class Inputs:
    """What one call of a model was given: where the samples are holds for that call alone."""

    module: ref[Module]
    number: int  # among the calls of all modules
    whole: int  # number of the call of the model that this is a part of, or its own
    # where the samples are, by the id of the tensor; identities of those with a graph that say it
    notes: dict[int, Note] = field(default_factory=dict)
    marks: list[Origin] = field(default_factory=list)
    known: list[Layout] = field(default_factory=list)  # of inputs that others say it of
    samples: int = 0  # their number
    counted: int = 0  # their number, once a module has known better
    others: set[int] = field(default_factory=set)  # what else may be that: sizes of first axes
    doubtful: set[int] = field(default_factory=set)  # those that an output of the samples tells
    choice: str = ""  # what was taken for the samples, in words
    rows: set[int] = field(default_factory=set)  # ids of parameters with a row for each sample

    def given(self) -> list[tuple[Tensor | None, Layout]]:
        """List where the samples are in what it was given; None for tensors with a graph."""
        found = [(x(), layout) for _, layout, x in self.notes.values()]
        others = self.known + [mark.layout for mark in self.marks if mark.layout is not None]
        return found + [(None, layout) for layout in others]

    def layouts(self) -> list[Layout]:
        """List where the samples are in what it was given."""
        return [layout for _, layout in self.given()]

    def note(self, tensor: Tensor, layout: Layout, mark: Origin | None = None) -> None:
        """Remember where the samples are, until the call ends, at the mark of a tensor with one."""
        if mark is None:
            self.notes[id(tensor)] = memory_of(tensor), layout, ref(tensor)
        else:
            mark.layout = layout
            self.marks.append(mark)


class _Calls(local):
    """The calls of models that run in a thread, innermost last."""

    def __init__(self) -> None:
        self.running: list[Inputs] = []


CALLS = _Calls()


def begin_call(module: Module) -> tuple[Inputs, bool]:
    """Return the notes of a call that begins, and whether it is of a part of a model that runs."""
    if CALLS.running:
        _clear_interrupted(module)
    owners = filter(None, (inputs.module() for inputs in CALLS.running))
    is_part = any(module is part for owner in owners for part in owner.modules())
    number = next(COUNTER)
    inputs = Inputs(ref(module), number, CALLS.running[-1].whole if is_part else number)
    CALLS.running.append(inputs)
    return inputs, is_part


def _clear_interrupted(module: Module) -> None:
    """Forget calls that an interrupt has ended: torch calls no hooks then.

    A call before of the module that is called now is over.
    """
    called: list[Module] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is Module._wrapped_call_impl.__code__:
            called.append(frame.f_locals["self"])
        frame = frame.f_back
    CALLS.running = [
        inputs
        for inputs in CALLS.running
        if (own := inputs.module()) is not module and any(own is one for one in called)
    ]


def end_call(module: Module) -> Inputs | None:
    """Forget what was noted of the inputs of a call, and of those that an interrupt has ended."""
    names = [inputs.module() for inputs in CALLS.running]
    if module not in names:
        return None
    start = names.index(module)
    ended, CALLS.running[start:] = CALLS.running[start], []
    return ended


def running() -> list[Inputs]:
    """Return what is noted of the calls of models that run in this thread, the innermost last."""
    return CALLS.running


def number_of_samples() -> int:
    """Return how many samples the model that runs was called with, as far as that is known."""
    inputs = CALLS.running[-1] if CALLS.running else None
    return 0 if inputs is None else inputs.counted or inputs.samples


def recounted() -> bool:
    """Note how many samples a correction tells of; return whether that is another number."""
    if CALLS.running:
        inputs = CALLS.running[-1]
        for one in inputs.layouts():
            if one.is_batched and not (one.assumed or one.is_constant):
                known, inputs.counted = number_of_samples(), one.samples
                return known != one.samples
    return False


def rows_of_constant(x: Tensor) -> Layout | None:
    """Give a constant, such as the first tokens torch.zeros(N), a row for each of the samples.

    They are along the first axis that has as many entries, ``[T, N]`` for sequences, or merged with
    others. That is taken back where they turn out to be along another axis, or nowhere in it.
    """
    samples, shape = number_of_samples(), x.shape
    axes = shape[:-1] if len(shape) > 1 and has_numbers(x) else shape  # others are features
    if samples > 1:
        before: int | None = None
        is_vector = len(shape) == 1 and has_numbers(x)  # of features, unless there are as many
        if samples in axes:
            before = shape[: axes.index(samples)].numel()
        elif has_values(x) and not (is_vector or is_fake(x) or assigned()):
            # where samples are assigned, rows may be in any order
            before = before_repeated(x, axes, samples)
        if before is not None:
            note(x, Layout(before, samples, True, len(shape), is_constant=True))
    return noted(x)


def before_repeated(x: Tensor, axes: Sequence[int], samples: int) -> int | None:
    """Return how many entries are before an axis of samples along which all entries are the same.

    It may be merged with others to one of the first ``axes``. None if there is no such axis.
    """
    numbers = [
        prod(axes[:axis]) * outer
        for axis, size in sorted(enumerate(axes), key=lambda each: each[1] != samples)
        if size and size % samples == 0
        for outer in (1, size // samples)
    ]
    for before in numbers:
        rows = x.reshape(before, samples, -1)
        if bool((rows == rows[:, :1]).all()):
            return before
    return None


def has_other_rows(data: Tensor) -> bool:
    """Whether data has not as many rows as the model that runs has samples."""
    samples = CALLS.running[0].samples if CALLS.running else 0
    return data.dim() > 0 and len(data) != samples > 0


def memory_of(tensor: Tensor) -> Any:
    """Return what changes if a tensor gets other entries as a whole: shape and memory."""
    try:
        return tensor.shape, tensor.data_ptr()
    except RuntimeError:  # nested, sparse, without memory, or of a transform of torch.func
        return None


def view_of(tensor: Tensor) -> Any:
    """Return what a tensor and others that view the same entries in the same way have in common."""
    return memory_of(tensor) or id(tensor), tensor.stride()


def _notes_with(tensor: Tensor) -> dict[int, Note]:
    """Return the notes of the innermost call that was given a tensor, else those of all data."""
    key = id(tensor)
    for inputs in reversed(CALLS.running):
        found = inputs.notes.get(key)
        if found is not None and found[2]() is tensor:
            return inputs.notes
    return OF_DATA


def note(tensor: Tensor, layout: Layout | None) -> None:
    """Remember where the samples of a tensor without a graph are; None: no longer known."""
    key, notes = id(tensor), _notes_with(tensor)
    if layout is None:
        notes.pop(key, None)
    elif notes is OF_DATA:
        notes[key] = memory_of(tensor), layout, ref(tensor, lambda _: notes.pop(key, None))
    else:
        notes[key] = memory_of(tensor), layout, ref(tensor)


# Functions that have mixed the samples of data: the name goes with the tensor.
MIXED_DATA: dict[int, tuple[ref[Tensor], str]] = {}


def has_numbers(x: Tensor) -> bool:
    """Whether something has real or complex entries, which are no indices and no mask."""
    return x.is_floating_point() or x.is_complex()


def note_mixed(tensor: Tensor, by: str) -> None:
    """Remember that each entry of a tensor without a graph may depend on several samples."""
    key, notes = id(tensor), MIXED_DATA  # which outlives its name where Python ends
    notes[key] = ref(tensor, lambda _: notes.pop(key, None)), by


def mixed_by(tensors: Iterable[Any]) -> str | None:
    """Return what :func:`note_mixed` was told of one of some tensors."""
    for x in tensors:
        found = MIXED_DATA.get(id(x))
        if found is not None and found[0]() is x:
            return found[1]
    return None


def noted(tensor: Tensor) -> Layout | None:
    """Return what :func:`note` was told, unless the tensor got another shape or memory since."""
    notes = _notes_with(tensor) if CALLS.running else OF_DATA
    found = notes.get(id(tensor))
    if found is None or found[2]() is not tensor or found[0] != memory_of(tensor):
        return None
    return found[1]


def assigned() -> list[Layout]:
    """List where the samples are in the data that a program has said so of."""
    notes = [OF_DATA, *(inputs.notes for inputs in CALLS.running)]
    return [layout for each in notes for _, layout, _ in [*each.values()] if layout.is_assigned]


def assigned_place(x: Tensor) -> Place | None:
    """Return where the samples are, if a program has said so."""
    known = noted(x)
    return known.place(x.shape) if known is not None and known.is_assigned else None


def moved(x: Tensor, device: Any) -> Tensor:
    """Return a tensor on a device, with what a program has said of its samples."""
    there, known = x.to(device), noted(x)
    if there is not x and known is not None and known.is_assigned:
        note(there, known)
    return there


def layout_of(x: Any) -> Layout | None:
    """Return where the samples of a tensor are, if that is known."""
    if not isinstance(x, Tensor):
        return None
    mark = None if x.grad_fn is None else origin(x)
    if mark is not None and mark.layout is not None:
        return mark.layout
    found = noted(x)
    if found is not None or type(x) is Tensor:
        return found
    return unbatched() if isinstance(x, Parameter) else None

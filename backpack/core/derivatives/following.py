"""Where the samples of a function's inputs are in its outputs.

Each entry of an input has the number of its sample (:meth:`Layout.numbers`). A function that moves
entries moves their numbers as well; one of each entry leaves them where they are. For any other,
the entries of some samples are changed and the function is evaluated again. If the samples that are
changed are those with a 1 at place b of their number in binary, then those with a 0, for each b, an
output entry spells the number of the only sample that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from backpack.core.derivatives.conditions import Conditions, state_of
from backpack.core.derivatives.evaluation import drawn, generator_at, is_real
from backpack.core.record.alive import all_live_calls
from backpack.core.record.calls import Call
from backpack.core.record.data_flow import tensors_in
from backpack.core.record.data_notes import assigned, has_numbers
from backpack.core.record.kinds import CASTS, CONSTANT, ENTRIES, MEMORY, MOVES, RESHAPES
from backpack.core.record.layout import CPU, Layout, Owners
from backpack.core.record.lookup import treatment
from backpack.custom_module.branching import SumModule
from backpack.custom_module.function_module import FunctionModule, Slot
from backpack.custom_module.permute import Permute
from backpack.custom_module.products import MulModule
from backpack.custom_module.slicing import Slicing

# What stands for the number of a sample where an entry depends on none, or on several.
NONE, SEVERAL = -1, -2

# Up to this many entries of inputs are kept, to see whether they are the same once more.
MOST_VALUES = 2**14
# Evaluates the function with other arguments; all tensors that it returns.
Evaluate = Callable[[Sequence[Any]], list[Tensor]]


def treatment_by(module: Module) -> str | None:
    """Return what a module does with the entries of its inputs, if that is known."""
    if isinstance(module, FunctionModule):
        return treatment(module.function)
    if isinstance(module, Permute | Slicing):
        return MOVES
    return ENTRIES if isinstance(module, SumModule | MulModule) else None


@dataclass(eq=False)
class Following:
    """What one call of a function does with samples."""

    call: Call
    evaluate: Evaluate
    shapes: Sequence[Size]  # of what it returns
    samples: int  # their number
    relies_on_values: bool = False  # whether masks or indices as they are gave the answer

    def __post_init__(self) -> None:
        """Look up what the function does with entries, and which inputs have samples."""
        self.treatment = treatment_by(self.call.module)
        pairs = enumerate(self.call.layouts_in)
        self.batched = {i: one for i, one in pairs if one is not None and one.is_batched}
        if self.treatment == CASTS:  # others only say what type
            self.batched = {i: one for i, one in self.batched.items() if i == 0}

    def conditions(self) -> Conditions | None:
        """Return what the answer depends on besides shapes; None if that is more than can be told.

        A function, or a module whose treatment of entries is known, has no state of its own.
        """
        call, moves = self.call, self.treatment in (MOVES, RESHAPES)
        owners = [layout.owners for layout in call.layouts_in if layout is not None]
        if self.treatment == MEMORY or any(owners):  # it depends on strides, or on the order
            return None
        values = {i: x.detach() for i, x in enumerate(call.inputs) if isinstance(x, Tensor)}
        varied = {*self._varied}
        free = self._value_inputs() if moves else varied  # others may give another answer
        depends = (moves or self.treatment is None) and not free.issuperset(values)
        if self.treatment == ENTRIES:  # a power of 1 is affine, one of 2 is not
            numbers = [x.dtype for x in values.values() if not x.is_floating_point()]
            depends = any(dtype is not torch.bool for dtype in numbers)
        depends |= self.relies_on_values
        state = state_of(call.module) if depends or self.treatment is None else []
        kept = {
            i: x
            for i, x in values.items()
            if depends and not (x.is_floating_point() and i in varied & free)
        }
        if state is None or sum(x.numel() for x in kept.values()) > MOST_VALUES:
            return None
        return Conditions({i: x.clone() for i, x in kept.items()}, state)

    def places(self) -> list[tuple[Any, ...] | None] | None:
        """Find the layout of each output, as :attr:`Layout.facts`; None if samples are combined.

        None for an output of no dimension (unless it is data that depends on no sample). Data that
        is the same for all samples has a fourth entry.
        """
        reshaped = self._reshaped() if self.treatment == RESHAPES else None
        if reshaped is not None:
            return [reshaped if shape else None for shape in self.shapes]
        viewed = self._viewed() if self.treatment == MOVES else None
        if viewed is not None:
            return viewed
        if self._is_of_entries:
            aligned = [self._aligned(shape) for shape in self.shapes]
            if None not in aligned:
                return aligned
        if self.samples == 1:
            return [self._single(shape) if shape else None for shape in self.shapes]
        numbers = self.numbers()
        if numbers is None:
            return None
        befores = [one.before for one in self.batched.values()]
        found: list[tuple[Any, ...] | None] = []
        for each in numbers:
            if not each.dim():
                of_none = self.call.index < 0 and int(each) == NONE
                found.append((1, 0, None) if of_none else None)
                continue
            completed = None if _contain([each], SEVERAL) else self._completed(each)
            if completed is None:
                return None
            each = completed
            # what is the same for all samples has a row for each, if the axis for that is there
            is_constant = each.numel() > 0 and not bool((each > NONE).any())
            kept = (one for i, one in self.batched.items() if self._keeps_axis(i, each.shape))
            layout = next(kept, None) if is_constant else None
            if layout is not None and self.call.index < 0:
                found.append((*layout.facts, True))
                continue
            chosen = any(one.owners is not None for one in self.batched.values())
            if self.call.index < 0:  # rows of zeros may be of any sample, unless each has one
                rows_of_samples = {tuple(range(self.samples))}
                chosen &= len(each) == self.samples
                chosen = chosen and _owners_of(len(each), assigned()) <= rows_of_samples
            if is_constant and layout is None and chosen and not len(each) % self.samples:
                found.append((1, self.samples, None, True))  # none of the rows was chosen
                continue
            layout = layout or Layout.of_numbers(each, self.samples, befores)
            layout = layout or self._before_a_rest(each)
            if layout is None:
                return None
            found.append(layout.facts)
        return found

    def _completed(self, numbers: Tensor) -> Tensor | None:
        """Let rows that depend on no sample be of that which a program has assigned to such rows.

        Nodes that receive no message have rows of zeros, as many as there are nodes. None if that
        may be rows of something else: other samples of as many rows agree with what is known.
        """
        if self.treatment == CONSTANT or not _contain([numbers], NONE):
            return numbers
        known = _owners_of(len(numbers), assigned())
        rows = numbers.unsqueeze(-1).flatten(1).amax(1)
        if not known or not _contain([rows], NONE):
            return numbers
        for call in all_live_calls():
            known |= _owners_of(len(rows), (*call.layouts_in, *call.layouts_out))
        if len(rows) == self.samples:
            known.add(tuple(range(self.samples)))
        # whose rows are those of the same samples, where rows depend on one
        each = map(rows.new_tensor, known)
        fitting = [own for own in each if bool(((rows == own) | (rows == NONE)).all())]
        if len(fitting) > 1:
            return None
        for own in fitting:
            own = own.reshape(-1, *(1,) * (numbers.dim() - 1))
            numbers = torch.where(numbers == NONE, own, numbers)
        return numbers

    def _before_a_rest(self, numbers: Tensor) -> Layout | None:
        """Describe padded rows of the samples in their order, if some that depend on none follow.

        Such as the last one of ``zeros(N * T + 1, F).index_put((places,), h)``, for what has no
        place. It counts as a row of the last sample.
        """
        per_sample, rest = divmod(len(numbers), self.samples)
        padded, behind = numbers.split([len(numbers) - rest, rest])
        layout = Layout.of_numbers(padded, self.samples, [1])
        if layout is None or not layout.samples_come_first or bool((behind > NONE).any()):
            return None
        own = torch.arange(self.samples, device=CPU).repeat_interleave(per_sample).tolist()
        if not _owners_of(len(own), assigned()) <= {tuple(own)}:  # perhaps nodes, without messages
            return None
        owners = Owners((*own, *[self.samples - 1] * rest), self.samples)
        return Layout(1, self.samples, owners=owners)

    def _keeps_axis(self, i: int, shape: Size) -> bool:
        """Whether a tensor has as many rows for samples as an input, along the same axis."""
        place, there = self.call.place_in(i), self.batched[i].place(shape)
        if place is None or there is None:
            return False
        if (there.axis, there.samples, there.owners) != (place.axis, place.samples, place.owners):
            return False
        if place.owners is None or self.treatment != CONSTANT:
            return True
        leaves = list(self.call.inputs)  # zeros of as many rows by chance are those of others
        leaves[i] = leaves[i].narrow(place.axis, 0, 0)
        return all(y.numel() == 0 for y in self.evaluate(leaves))

    def _single(self, shape: Size) -> tuple[Any, ...]:
        """Guess where the only sample is: an axis of one entry, where the input has its own."""
        befores = [one.before for one in self.call.layouts_in if one is not None]
        if 0 in shape:
            own = Layout.of_numbers(torch.empty(shape, device=CPU), 1, befores)
            assert own is not None
            return own.facts
        for axis, size in enumerate(shape):
            if size == 1 and shape[:axis].numel() in befores:
                return shape[:axis].numel(), 1, None
        places = [(self.call.inputs[i], self.call.place_in(i)) for i in self.batched]
        has_axis = any(place and x.shape[place.axis] == 1 for x, place in places)
        if has_axis and 1 in shape:  # it was moved
            return shape[: shape.index(1)].numel(), 1, None
        return 1, 1, None  # all rows are its own

    def numbers(self) -> list[Tensor] | None:
        """Number the sample that each entry of each output depends on; None if that is unknown."""
        if self._is_of_entries:
            return [self._of_entries(shape) for shape in self.shapes]
        if self.treatment == CONSTANT and len(tensors_in(self.call.inputs)) == 1:
            return [torch.full(shape, NONE, device=CPU) for shape in self.shapes]
        if self.treatment in (MOVES, RESHAPES):
            moved = self._moved()
            if moved is not None:
                return moved
        return self._in_memory() if self.treatment == MEMORY else self._tried()

    # ------------------------------------------------------------------ functions of each entry

    @property
    def _is_of_entries(self) -> bool:
        shapes = [shape for shape in self.call.shape_in if shape is not None]
        if self.treatment == CASTS:
            return shapes[:1] == [*self.shapes]
        if self.treatment != ENTRIES:
            return False
        try:
            return {torch.broadcast_shapes(*shapes)} == set(self.shapes)
        except RuntimeError:
            return False

    def _aligned(self, shape: Size) -> tuple[Any, ...] | None:
        """Return the layout of all inputs, if it is the same counted from the last axis."""
        found = set()
        for i, layout in self.batched.items():
            own = self.call.inputs[i].shape
            place = layout.place(own)
            if place is None or place.owners is not None:
                return None
            found.add((place.axis - len(own), place.outer, own[place.axis]))
        if len(found) != 1:
            return None
        axis, outer, length = found.pop()
        return (shape[:axis].numel() * outer, self.samples, None) if shape[axis] == length else None

    def _of_entries(self, shape: Size) -> Tensor:
        result = torch.full(shape, NONE, device=CPU)
        for i, layout in self.batched.items():
            numbers = layout.numbers(self.call.inputs[i].shape)
            own = torch.tensor(SEVERAL, device=CPU) if numbers is None else numbers
            result = _joined(result, own.expand(shape))
        return result

    # ------------------------------------------------------------------ functions that move entries

    def _value_inputs(self) -> set[int]:
        """Number the inputs whose entries are moved; others say where to."""
        module = self.call.module
        if not isinstance(module, FunctionModule):
            return {0}
        first = next(iter((*module.args, *module.kwargs.values())), None)
        arguments, _ = self.call.arguments(range(len(self.call.inputs)))
        slots = [slot for slot in tree_leaves(first) if isinstance(slot, Slot)]
        return {i for slot in slots for i in tree_leaves(arguments[slot.index])}

    def _reshaped(self) -> tuple[Any, ...] | None:
        """Return the layout of what is reshaped: it is that of all its forms."""
        (i,) = self._value_inputs()
        layout = self.batched.get(i)
        if layout is None or layout.owners is not None:
            return None
        sizes = [shape.numel() for shape in self.shapes]
        return layout.facts if [self.call.inputs[i].numel()] == sizes else None

    def _viewed(self) -> list[tuple[Any, ...] | None] | None:
        """Return the layouts of views: the stride of an axis tells where that of the samples is."""
        tensors = {i for i, x in enumerate(self.call.inputs) if isinstance(x, Tensor)}
        if len(tensors) > 1 or tensors != self._value_inputs():
            return None
        (i,) = tensors
        place, shape = self.call.place_in(i), self.call.inputs[i].shape
        if place is None or place.is_scattered or shape[place.axis] < 2:
            return None
        rows = torch.arange(shape[place.axis], dtype=torch.float32, device=CPU)
        leaves = list(self.call.inputs)
        leaves[i] = rows.view(-1, *[1] * (len(shape) - place.axis - 1)).expand(shape)
        found: list[tuple[Any, ...] | None] = []
        for y in self.evaluate(leaves):
            axes = [a for a, length in enumerate(y.shape) if length > 1 and y.stride(a)]
            if y.data_ptr() != rows.data_ptr() or [y.shape[a] for a in axes] != [len(rows)]:
                return None
            found.append((y.shape[: axes[0]].numel(), self.samples, None))
        return found

    def _moved(self) -> list[Tensor] | None:
        values, leaves = self._value_inputs(), list(self.call.inputs)
        for i in values:
            x, layout = leaves[i], self.batched.get(i)
            if isinstance(x, Tensor):
                numbers = layout.numbers(x.shape) if layout else torch.tensor(NONE, device=CPU)
                if numbers is None:
                    return None
                leaves[i] = torch.empty_like(x, dtype=torch.float32).copy_(numbers)
        try:
            moved = [y.round().long().cpu() for y in self.evaluate(leaves)]
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        # samples may say which entries of what has none are chosen
        by_others = not values.issuperset(self.batched)
        return self._chosen(moved) if by_others and _contain(moved, NONE) else moved

    def _chosen(self, moved: Sequence[Tensor]) -> list[Tensor] | None:
        """Let what a mask has chosen of no sample belong to that of the mask: ``x[mask]``.

        None if something else has chosen it.
        """
        module, layout = self.call.module, self.batched.get(1)
        if not isinstance(module, FunctionModule) or module.function is not getitem:
            return None
        if layout is None or len(self.call.inputs) > 2:
            return None
        (x, mask), index = self.call.inputs, module.args[1]
        first = index[0] if isinstance(index, tuple) else index
        if first != Slot(1) or mask.dtype != torch.bool:
            return None
        own = layout.numbers(mask.shape)
        if own is None:
            return None
        of_mask = own.expand(mask.shape).reshape(*mask.shape, *(1,) * (x.dim() - mask.dim()))
        by_mask = torch.empty_like(x, dtype=torch.float32).copy_(of_mask)
        (chosen,) = self.evaluate([by_mask, mask])
        return [torch.where(one == NONE, chosen.long().cpu(), one) for one in moved]

    def _in_memory(self) -> list[Tensor] | None:
        """Number what is read of the memory of the first input; what is beyond that is unknown."""
        x, layout = self.call.inputs[0], self.call.layouts_in[0]
        numbers = layout.numbers(x.shape) if layout else None
        if numbers is None:
            return None
        size, geometry = x.untyped_storage().nbytes() // x.element_size(), (x.shape, x.stride())
        places = torch.arange(size, device=CPU).as_strided(*geometry, x.storage_offset())
        memory = torch.full((size,), SEVERAL, dtype=torch.float32, device=CPU)
        memory[places] = numbers.expand(x.shape).float()
        own = memory.as_strided(*geometry, x.storage_offset())
        read = self.evaluate([own, *self.call.inputs[1:]])
        return [y.long() for y in read]

    # ------------------------------------------------------------------ any other

    @property
    def _varied(self) -> list[int]:
        """Number the inputs that other values may replace: others may be indices.

        Indices that are the same for all samples stay what they are, where samples have rows in any
        order. Private functions of torch do not check those, and would write anywhere in memory.
        """
        function = getattr(self.call.module, "function", None)
        name = getattr(function, "__name__", "")
        checks = not name.startswith("_") or name.startswith("__")  # an operator, such as __and__
        pairs = enumerate(zip(self.call.inputs, self.call.layouts_in, strict=True))
        return [
            i
            for i, (x, layout) in pairs
            if layout is not None
            and (is_real(x) or (checks and layout.is_batched and isinstance(x, Tensor)))
            and (is_real(x) or layout.owners is None or not layout.is_constant)
        ]

    def _tried(self) -> list[Tensor] | None:
        floating = [i for i in self._varied if self.call.inputs[i].is_floating_point()]
        found, is_defined = None, False
        # drawn masks and indices may choose too many entries: then they are what they are
        for varied in {tuple(self._varied): None, tuple(floating): None}:
            try:
                found = self._located(self._drawn(varied))
            except Exception:
                continue
            is_defined = True
            self.relies_on_values = len(varied) < len(self._varied)
            if found is not None and not _contain(found, SEVERAL):
                break
        # drawn entries may be out of the function's domain: its own arguments are not
        self.relies_on_values |= not is_defined and len(floating) < len(self._varied)
        return found if is_defined else self._located([self._exchanged()])

    def _drawn(self, varied: Sequence[int]) -> list[list[dict[int, Tensor]]]:
        """Draw two values of some inputs, of any sign and positive."""
        generator = generator_at(self.call.inputs)
        points = []
        for positive in (False, True):
            pairs = {i: _draw(self.call.inputs[i], generator, positive) for i in varied}
            points.append([{i: pair[k] for i, pair in pairs.items()} for k in range(2)])
        return points

    def _exchanged(self) -> list[dict[int, Tensor]]:
        """Return the inputs as they are, and with the entries of each sample of another one."""
        own = {i: self.call.inputs[i].detach() for i in self._varied}
        result = dict(own)
        for i in own.keys() & self.batched:
            x, layout, place = own[i], self.batched[i], self.call.place_in(i)
            if layout.owners is None:
                result[i] = x.reshape(layout.before, layout.samples, -1).roll(1, 1).view(x.shape)
            elif place is not None:
                result[i] = x.roll(1, place.axis)
        return [own, result]

    def _are_varied(self, one: Mapping[int, Tensor], other: Mapping[int, Tensor]) -> bool:
        """Whether all that has samples is replaced by something else."""
        return all(
            i in one and (not one[i].numel() or not torch.equal(one[i], other[i]))
            for i, layout in self.batched.items()
            if not layout.is_constant
        )

    def _located(self, points: Sequence[Sequence[Mapping[int, Tensor]]]) -> list[Tensor] | None:
        numbers = {}
        for i, x in points[0][0].items():
            layout = self.call.layouts_in[i]
            found = None if layout is None else layout.numbers(x.shape)
            if found is None:
                return None
            numbers[i] = found.to(x.device)
        shapes: list[Size] = []
        result = torch.full((), NONE, device=CPU)  # of all outputs, flattened
        for one, other in points:
            before = self._outputs(one)
            shapes = shapes or [y.shape for y in before]
            changed = several = torch.zeros((), dtype=torch.bool, device=CPU)
            spelled = torch.zeros((), dtype=torch.long, device=CPU)
            for b in range(max(1, (self.samples - 1).bit_length())):
                by_bit = []
                for bit in (0, 1):
                    values = {
                        i: torch.where((n >= 0) & ((n >> b) % 2 == bit), other[i], one[i])
                        for i, n in numbers.items()
                    }
                    after = self._outputs(values)
                    if not [y.shape for y in before] == [y.shape for y in after] == shapes:
                        return None
                    differ = [_differs(*pair).flatten() for pair in zip(before, after, strict=True)]
                    by_bit.append(torch.cat(differ))
                zeros, ones = by_bit
                spelled = spelled + (ones.long() << b)
                several = several | (zeros & ones) | ((zeros | ones) != changed if b else False)
                changed = changed | zeros | ones
            new = torch.where(several, SEVERAL, torch.where(changed, spelled, NONE))
            result = _joined(result, new)
        # what depends on nothing that was varied may depend on what was not
        is_certain = all(self._are_varied(one, other) for one, other in points)
        if not is_certain and _contain([result], NONE):
            return None
        each = result.split([shape.numel() for shape in shapes])
        return [x.view(shape) for x, shape in zip(each, shapes, strict=True)]

    def _outputs(self, values: Mapping[int, Tensor]) -> list[Tensor]:
        return self.evaluate([values.get(i, x) for i, x in enumerate(self.call.inputs)])


def _owners_of(rows: int, layouts: Iterable[Layout | None]) -> set[tuple[int, ...]]:
    """List the samples of so many rows, where they are in any order along the first axis."""
    each = {id(one.owners): one.owners for one in layouts if one is not None and one.before == 1}
    return {own.numbers for own in each.values() if own is not None and len(own.numbers) == rows}


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Number the sample of entries that depend on both of these: ``SEVERAL`` if they differ."""
    differ = (one != NONE) & (other != NONE) & (one != other)
    return torch.where(differ, SEVERAL, torch.where(other == NONE, one, other))


def _contain(numbers: Sequence[Tensor], number: int) -> bool:
    return any(bool((each == number).any()) for each in numbers)


def _draw(x: Tensor, generator: torch.Generator, positive: bool) -> tuple[Tensor, Tensor]:
    """Draw two tensors of the kind of another one, whose entries all differ if they can."""
    if has_numbers(x):
        parts = (2,) if x.is_complex() else ()
        normal = 2 * drawn((2, *x.shape, *parts), generator)
        normal = normal.abs() + 0.5 if positive else normal
        one, other = (torch.view_as_complex(normal) if parts else normal).to(x)
        return one, other
    low, high = (0, 1) if x.dtype == torch.bool or not x.numel() else (int(x.min()), int(x.max()))
    if low == high > 0:  # perhaps the last index
        low -= 1
    count = max(high - low, 1) + 1
    place: Any = {"generator": generator, "device": generator.device}
    values = torch.randint(count, x.shape, **place)
    shift = torch.randint(1, count, x.shape, **place)
    return (low + values).to(x), (low + (values + shift) % count).to(x)


def _differs(one: Tensor, other: Tensor) -> Tensor:
    differs = one != other
    if one.is_floating_point():
        differs &= ~(one.isnan() & other.isnan())
    return differs.cpu()

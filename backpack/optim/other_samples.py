"""Whether the gradient of a batch is a sum over its samples: functions run again for others.

A backward pass sees no values that have left the graph: thresholds, counts, weights, numbers that
depend on the samples of the batch. The functions of the program run again here for batches in which
some samples have the data of others. For a gradient that is a sum over the samples,
``g(A from X, rest from Y) + g(A from Y, rest from X) = g(X) + g(Y)``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves, tree_map

from backpack.context import CTX, disable
from backpack.convert.tracing import place_of_call
from backpack.core.derivatives.evaluation import alone
from backpack.core.engine.loss_terms import is_usual
from backpack.core.record.data_notes import assigned_place, noted
from backpack.core.record.generators import OwnGenerators
from backpack.core.record.module_state import describe
from backpack.core.record.origins import WRAPPERS, BackpackOutput, is_foreign_function, origin
from backpack.core.values import at_least_single
from backpack.utils.autocast import without_autocast
from backpack.utils.warning import warn

NUMBERS = (bool, int, float, complex, str)

# Along which axis of so many entries data has samples, and whether integers do. The next one counts
# where data has several such axes, or none in front, or functions cannot run for the choice before.
CHOICES = ((0, True), (1, True), (1, False))

OUTSIDE = (
    "functions that ran outside of the context (let them run inside), or that torch does not show "
    "(let the loss be a module, and extend it)"
)

NOT_LOOKED_AT = (
    "Private training: the forward pass has run outside of the context of the optimiser's "
    "extensions, where nobody sees whether samples depend on others without a gradient (thresholds "
    "and statistics of the batch, what was detached, item()). Let the model and the loss run "
    "inside of `with backpack(*optimiser.extensions):`."
)

UNEVEN = (
    "Private training: samples have different numbers of rows (assign_samples), so that functions "
    "of these cannot run again for other samples: nobody sees whether samples depend on others "
    "without a gradient (thresholds and statistics of the batch, what was detached, item())."
)
BEFORE_LOSS = (
    "numbers taken before the loss was computed ({}; those of a log are taken between the loss and "
    "step(), or outside of the context)"
)
OF_EARLIER = "a tensor of shape {} that an earlier batch has computed"
OF_TWO = (
    " (in a batch of two samples, a constant with an axis of two entries is taken for data, such "
    "as weights of classes and means of features: let it be a buffer of an extended module, or "
    "extend the loss)"
)


UNKNOWN_ORDER = (
    "a tensor of shape {}: data with as many rows belong to samples in several orders, and whose "
    "its rows are is not known (say so with assign_samples, None for those of no sample)"
)


class _UnknownError(Exception):
    """What a function reads is of unknown samples, whatever is taken for their axis."""


# Methods that name a precision, and what they are here: rounding must not hide what is small.
WIDE: dict[Any, Any] = {Tensor.half: Tensor.float, Tensor.bfloat16: Tensor.float}
# Functions whose result says nothing of data, whatever its shape: numbers alone make it, and it is
# the same each time. Others may draw numbers for each sample, or read a list of labels.
CONSTANT: Any = {torch.arange, torch.eye, torch.fft.fftfreq, torch.fft.rfftfreq}
CONSTANT |= {torch.linspace, torch.logspace, torch.hamming_window, torch.hann_window}
# Methods that give away the memory of a tensor, of which nobody sees who reads it.
OF_MEMORY: Any = (Tensor.untyped_storage, Tensor.storage, Tensor._typed_storage, Tensor.__dlpack__)


class Seen(NamedTuple):
    """A function that has run, and whether gradients were enabled, and a module has called it."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    result: Any
    has_gradients: bool
    is_inside: bool
    place: str = ""  # where the program has called it, if it has returned no tensor


class Program:
    """The functions that run before the backward passes of an optimiser.

    They are kept for the backward passes whose number is a power of two: until one is over.
    """

    def __init__(self) -> None:
        self.passes = 1
        # of the latest pass with more than two samples that nothing was found in
        self.cleared: list[tuple[str, list[torch.Size]]] = []
        # what the latest pass that was looked at has computed of samples: others may not need it
        self.earlier: list[ref[Tensor]] = []
        # autograd's number of the next node when the context was entered, and left
        self.entered = 0
        self.left: int | None = -1  # None inside
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out references to tensors of a pass, which a copy does not have."""
        return {**vars(self), "earlier": [], "left": -1}

    def enter(self) -> None:
        """Note that what runs from now on runs inside of the context: of one that goes on, or new.

        A pass may have several, one inside of another, or next to each other.
        """
        number = torch.autograd._get_sequence_nr()
        if self.left is not None and self.left != number:
            self.entered = number
        self.left = None

    def leave(self) -> None:
        """Note that the context is left."""
        self.left = torch.autograd._get_sequence_nr()

    def clear(self) -> None:
        """Forget what has run."""
        self.seen: list[Seen] = []
        # what backward() was called on, and with which gradients: of some, or all, there is none
        self.roots: tuple[Any, ...] = ()
        self.weights: tuple[Tensor | None, ...] = ()
        if self.left is not None:
            self.left = -1  # the next context is one of another pass

    @property
    def _is_due(self) -> bool:
        return self.passes & (self.passes - 1) == 0

    def note(self, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Keep a function that the program has called, if the pass at hand is to be looked at.

        Returns:
            The result; an iterator over tensors that are known.
        """
        caller = sys._getframe(2)
        if self._is_due and caller.f_code is BackpackOutput.forward.__code__:
            self.seen.append(Seen(Tensor.view_as, (args[0], args[0]), {}, result, True, False))
        if not self._is_due or _is_called_by("backpack.core", caller):
            return result
        modes = torch.is_grad_enabled(), _is_called_by(Module.__module__, caller)
        # containers that may grow, such as the list of features of a DenseNet, as they are now
        args, kwargs, known = tree_map(lambda x: x, (args, kwargs, result))
        if function is not Tensor.__iter__:
            place = "" if isinstance(result, Tensor) else place_of_call()
            self.seen.append(Seen(function, args, kwargs, known, *modes, place))
            return result
        parts = args[0].unbind(0)
        self.seen.append(Seen(Tensor.unbind, (*args, 0), {}, parts, *modes))
        return iter(parts)

    def dependence(self, params: Sequence[Parameter], norms: Sequence[Tensor]) -> str | None:
        """Say why the gradient of the latest pass is no sum over the samples; None if it is one.

        Also None if this pass is not looked at, or what it was called on was computed elsewhere.

        Args:
            params: The parameters.
            norms: Those of the individual gradients at each of them, ``[N]``. Data of samples for
                which they are not finite tell nothing, and are left out.
        """
        seen, is_due = self.seen, self._is_due
        roots = [*zip_longest(self.roots, self.weights)]
        self.clear()
        samples = len(norms[0]) if norms else 0
        if not samples:
            return None
        finite = torch.ones(samples, dtype=torch.bool)
        if is_due:
            same = [own.to(norms[0].device) for own in norms if len(own) == samples]
            finite = torch.stack(same).isfinite().all(0).cpu()
            if not finite.any():
                return None  # nothing is added, and the next pass is looked at
        self.passes += 1
        if samples < 2 or not (is_due and roots):
            return None
        last = 0  # what ran later, as for a log, has no part in it
        for root, weights in roots:
            made = _makers(seen, root)
            mark = origin(root)
            if not made:
                is_told = mark is not None and mark.of_loss  # by its rule
                is_known = is_told or (isinstance(root, Tensor) and is_usual(root.grad_fn))
                is_known = is_known and weights is None
                if is_known:
                    warn(NOT_LOOKED_AT)
                return None if is_known else OUTSIDE
            last = max(last, *made, *_makers(seen, weights))
        seen = [one for one in seen[: last + 1] if _has_values(one)]
        weighed = [_weighed(seen, *pair) for pair in roots]
        with torch._C.DisableTorchFunction():
            if any(_reads_output_before(one, self.entered) for one in seen):
                warn(NOT_LOOKED_AT)
            shapes = [(repr(one.function), [x.shape for x in _tensors(one)]) for one in seen]
            owners = _Owners(seen, samples)
        constants = self._constants(seen, shapes) if samples == 2 else set()
        earlier = {id(known()) for known in self.earlier}
        why, depends = _dependence(seen, weighed, params, finite, constants, earlier, owners)
        results = [x for one in seen for x in _results(one)]
        self.earlier = [ref(x) for x in results if id(x) in depends]
        if why is None and samples > 2:
            self.cleared = shapes
        return why

    def _constants(
        self, seen: Sequence[Seen], shapes: Sequence[tuple[str, list[torch.Size]]]
    ) -> set[int] | None:
        """Return which tensors had the same shape for another number of samples.

        None if the same functions were not cleared for one. Data have an axis of samples, so that
        their shape is another one: of two samples alone, nobody could tell class weights from data.
        """
        counts = [(function, len(of)) for function, of in shapes]
        if counts != [(function, len(of)) for function, of in self.cleared]:
            return None
        same: set[int] = set()
        other: set[int] = set()
        for one, (_, here), (_, there) in zip(seen, shapes, self.cleared, strict=True):
            for x, shape, known in zip(_tensors(one), here, there, strict=True):
                (same if shape == known else other).add(id(x))
        return same - other


def _dependence(
    seen: Sequence[Seen],
    roots: Sequence[Tensor],
    params: Sequence[Parameter],
    finite: Tensor,
    constants: set[int] | None,
    earlier: set[int],
    owners: _Owners,
) -> tuple[str | None, set[int]]:
    """Say what depends on other samples in functions, and list the results that depend on any."""
    why, is_known = None, False
    depends: set[int] = set()
    with torch._C.DisableTorchFunction(), disable(), alone(), without_autocast():
        for place, takes_integers in CHOICES:
            choice = (place, takes_integers)
            batch = _Batch(seen, roots, params, finite, choice, constants, earlier, owners)
            try:
                why = batch.dependence()
                depends = batch.depends | {*batch.stale}
                if why is None or place or not batch.is_ambiguous:
                    break
                is_known = True
            except _UnknownError as error:
                return str(error), depends
            except Exception as error:
                if is_known:
                    break
                why = f"functions that cannot run again for other samples ({error})"
    return why, depends


class _Batch:
    """What has run for a batch of samples, ``finite`` or not; see CHOICES for where these are."""

    def __init__(
        self,
        seen: Sequence[Seen],
        roots: Sequence[Tensor],
        params: Sequence[Parameter],
        finite: Tensor,
        choice: tuple[int, bool],
        constants: set[int] | None,
        earlier: set[int],
        owners: _Owners,
    ):
        self.earlier, self.owners = earlier, owners
        self.stale: dict[int, list[int]] = {}  # what follows from a tensor of that shape of these
        self.seen, self.roots, self.params = seen, roots, params
        self.samples, self.choice, self.is_ambiguous = len(finite), choice, False
        # a sample that is not finite is replaced by the first that is
        numbers = torch.arange(len(finite))
        self.numbers = numbers.where(finite, numbers[finite][0])
        self.constants, self.is_doubtful = constants or set(), constants is None
        self.why: str | None = None
        self.before: tuple[list[Any], dict[tuple[str, int], Tensor]] | None = None
        results = [x for one in seen for x in _results(one)]
        self.made: dict[Any, Tensor] = {(x.grad_fn, x.output_nr): x for x in results}

    def dependence(self) -> str | None:
        """Say what depends on other samples; None if nothing does."""
        numbers = torch.arange(self.samples)
        here = self.gradients(numbers)
        splits = _splits(self.samples)
        # all of them first: where functions cannot run for one, the data are others
        others = {int(other[0]): other for other, _ in splits}
        there = {n: self.gradients(other) for n, other in others.items()}
        for other, is_kept in splits:
            mixed = [self.gradients(numbers.where(kept, other)) for kept in (is_kept, ~is_kept)]
            if self.why is None and not _add_up(here, there[int(other[0])], *mixed):
                self.why = f"functions that read {', '.join(map(str, self.shapes))}"
            if self.why is not None:
                return f"{self.why}{OF_TWO if self.is_doubtful else ''}"
        return None

    def gradients(self, order: Tensor) -> list[Tensor]:
        """Return the gradient for samples with these numbers; compare what else was computed."""
        self.order = self.numbers[order]
        self.values: dict[int, Tensor] = {}
        self.leaves: list[Tensor] = []
        self.shapes: list[list[int]] = []
        self.state: dict[tuple[str, int], Tensor] = {}  # what it is called, and which one it is
        self.depends: set[int] = set()
        numbers: list[Any] = []
        for module in CTX.extended():
            for x in chain(module._parameters.values(), module._buffers.values()):
                if x is not None:
                    self.values[id(x)] = _copy(x)
        for p in self.params:
            self.values[id(p)] = self._leaf(p)
        with OwnGenerators():
            for one in self.seen:
                self._run(one, numbers)
            with torch.enable_grad():
                total = torch.stack([self.values[id(root)].sum() for root in self.roots]).sum()
            for root in filter(self.stale.__contains__, map(id, self.roots)):
                self.why = OF_EARLIER.format(self.stale[root])
            found = torch.autograd.grad(total, self.leaves, materialize_grads=True)
        for module in CTX.extended():
            for name, x in module._buffers.items():
                if x is not None and id(x) in self.values:
                    self.state[f"{name} of {describe(module)}", id(x)] = self.values[id(x)]
        taken, state = self.before = self.before or (numbers, self.state)
        for (name, known), (_, new) in zip(taken, numbers, strict=True):
            if known != new:
                self.why = BEFORE_LOSS.format(name)
        for key, kept in state.items():
            if not _are_same(kept, self.state.get(key, kept)):  # others may be gone by now
                self.why = f"{key[0]} that the batch has changed: a later one may read it"
        return list(found)

    def _run(self, seen: Seen, numbers: list[Any]) -> None:
        function, args, kwargs, result, has_gradients, is_inside, place = seen
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = tree_leaves(result)
        if not tensors:
            lists = [x for x in args if isinstance(x, list) or type(x).__module__ == "numpy"]
            listed = any(len(x) == self.samples for x in lists)
            for x in (x for x in results if isinstance(x, Tensor)):
                is_data = x.is_floating_point() or listed  # else such as the numbers of rows
                is_data = is_data and function not in CONSTANT
                if not (is_data and self._has_samples(x)):
                    self.values[id(x)] = _copy(x)
            return
        new = [x for x in tensors if id(x) not in self.values and not self._is_passed_on(x)]
        if any(map(_is_unseen, new)):
            raise _UnknownError(OUTSIDE)
        if len(new) == len(tensors) and self._is_choice_of_rows(seen):
            return  # what was chosen is data of the samples, whatever the sizes of the others
        unknown = [x for x in new if not self._has_samples(x)]
        self.stale.update({id(x): [*x.shape] for x in unknown if id(x) in self.earlier})
        for shape in [self.stale[id(x)] for x in tensors if id(x) in self.stale]:
            self.stale.update({id(x): shape for x in _results(seen)})
            if is_inside and any(isinstance(x, (float, str)) for x in results):  # else a log
                self.why = OF_EARLIER.format(shape)
        depends = any(id(x) in self.depends for x in tensors)
        if unknown and not depends and not any(x.requires_grad for x in tensors):
            return  # data from which those of the samples may be taken
        for x in unknown:
            self.values[id(x)] = self._leaf(x)
            self.state[f"a tensor of shape {[*x.shape]}", id(x)] = self.values[id(x)]
        if depends and function in OF_MEMORY:
            self.why = f"memory that may be read ({function.__name__})"
        given, options = tree_map(self._value, (args, kwargs))
        name = f"{function.__name__} at {place}"
        with torch.set_grad_enabled(has_gradients):
            again = WIDE.get(function, function)(*given, **options)
        for x, y in zip(results, tree_leaves(again), strict=True):
            if isinstance(x, Tensor) and isinstance(y, Tensor):  # not so for p.grad
                if not is_foreign_function(x.grad_fn):  # a Function has run what was inside of it
                    self.values[id(x)] = y
            elif depends and type(y).__module__ == "numpy":
                numbers.append((name, repr(y.tolist())))
            elif depends and isinstance(y, NUMBERS) and function is not Tensor.data_ptr:
                numbers.append((name, repr(y)))  # NaN is the same as NaN
        if depends:
            changed = [x for x in results if isinstance(x, Tensor)] or tensors[:1]
            self.depends.update(map(id, changed))

    def _value(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.values[id(x)]
        is_low = isinstance(x, torch.dtype) and x in (torch.float16, torch.bfloat16)
        return torch.float32 if is_low else x

    def _is_choice_of_rows(self, seen: Seen) -> bool:
        """Whether so many rows as there are samples are taken from others, which have other axes.

        It mixes nothing: an axis of another meaning may have as many entries as there are samples.
        """
        x, result = seen.args[0], seen.result
        return (
            seen.function is Tensor.__getitem__
            and isinstance(result, Tensor)
            and not x.requires_grad
            and 0 < x.dim() == result.dim()
            and len(x) != self.samples == len(result)
            and x.shape[1:] == result.shape[1:]
        )

    def _is_passed_on(self, x: Tensor) -> bool:
        """Whether a tensor is one that has values, behind the hooks of a module."""
        edge = None
        if type(x.grad_fn).__name__ in WRAPPERS:
            edge = x.grad_fn.next_functions[x.output_nr]  # type: ignore[union-attr]
        source = self.made.get(edge)
        if source is None or id(source) not in self.values:
            return False
        self.values[id(x)] = self.values[id(source)]
        if id(source) in self.depends:
            self.depends.add(id(x))
        return True

    def _leaf(self, x: Tensor) -> Tensor:
        """Copy a tensor that nothing here has computed; its gradient is one of those compared."""
        leaf = _copy(x)
        if x.requires_grad:
            self.leaves.append(leaf.requires_grad_())
        return leaf

    def _has_samples(self, x: Tensor) -> bool:
        """Give a tensor with an axis of samples their data."""
        place, takes_integers = self.choice
        known, said = noted(x), assigned_place(x)
        each = [] if known is not None and known.is_assigned else range(x.dim())
        each = each if said is None else [said.axis]
        axes = [i for i in each if self.owners.are_known(x, i)]
        is_data = not isinstance(x, Parameter) and (x.is_floating_point() or takes_integers)
        is_data = is_data and id(x) not in self.constants
        if not axes or not is_data:
            return False
        if len(axes) > 1 or axes[0]:
            self.is_ambiguous = True
            if place and len(x) == 1:
                return False
        axis = axes[min(place, len(axes) - 1)]
        if self.owners.are_told_by(x):
            return False
        table = self.owners.rows(x, axis)
        order = torch.empty(table.numel(), dtype=torch.long)
        order[table.flatten()] = table[self.order].flatten()
        with torch.enable_grad():
            self.values[id(x)] = self._leaf(x).index_select(axis, order.to(x.device))
        self.depends.add(id(x))
        self.shapes.append([*x.shape])
        return True


def _weighed(seen: list[Seen], root: Tensor, weights: Tensor | None) -> Tensor:
    """Return what has the gradient of ``root.backward(weights)``, made by a further function."""
    if weights is None:
        return root
    with torch.no_grad(), torch._C.DisableTorchFunction():
        product = root * weights
    seen.append(Seen(_times_constant, (root, weights), {}, product, True, False))
    return product


def _times_constant(root: Tensor, weights: Tensor) -> Tensor:
    return root * weights.detach()


class _Owners:
    """Which sample each row of data belongs to: its own, unless a program has said so.

    Samples with different numbers of rows cannot have the data of each other, which is told.
    """

    def __init__(self, seen: Sequence[Seen], samples: int):
        self.samples = samples
        self.told: dict[int, Tensor] = {}  # numbers of samples, [R], by the id of data
        self.orders: dict[int, list[Tensor]] = {}  # those that differ, by R
        for x in (x for one in seen for x in _tensors(one)):
            place = assigned_place(x)
            if place is None or place.samples != samples or id(x) in self.told:
                continue
            rows = x.shape[place.axis]
            if place.owners is not None:
                numbers = torch.tensor(place.owners.numbers)
            else:
                numbers = torch.arange(samples).repeat_interleave(rows // samples // place.outer)
                numbers = numbers.repeat(place.outer)
            self.told[id(x)] = numbers
            orders = self.orders.setdefault(rows, [])
            if not any(numbers.equal(known) for known in orders):
                orders.append(numbers)
        if not all(map(self._is_even, self.told.values())):
            warn(UNEVEN)

    def _is_even(self, numbers: Tensor) -> bool:
        return len({*numbers.bincount(minlength=self.samples).tolist()}) == 1

    def _those_of_others(self, rows: int) -> list[Tensor]:
        """Return the orders in which data of so many rows may be that nothing was said of."""
        orders = [numbers for numbers in self.orders.get(rows, []) if self._is_even(numbers)]
        return [torch.arange(rows)] if rows == self.samples and len(orders) != 1 else orders

    def are_known(self, x: Tensor, axis: int) -> bool:
        """Whether data may have the samples of others along an axis."""
        numbers = self.told.get(id(x))
        if numbers is not None:
            return self._is_even(numbers)
        return bool(self._those_of_others(x.shape[axis]))

    def are_told_by(self, x: Tensor) -> bool:
        """Whether the entries are the numbers of samples that have several rows."""
        if x.dim() != 1 or x.is_floating_point() or len(x) == self.samples:
            return False
        there = x.cpu()
        return any(bool((there == numbers).all()) for numbers in self.orders.get(len(x), []))

    def rows(self, x: Tensor, axis: int) -> Tensor:
        """Return which rows belong to each sample: ``[N, k]`` of N·k."""
        numbers = self.told.get(id(x))
        if numbers is None:
            numbers, *others = self._those_of_others(x.shape[axis])
            if others:
                raise _UnknownError(UNKNOWN_ORDER.format([*x.shape]))
        return numbers.argsort(stable=True).reshape(self.samples, -1)


def _copy(x: Tensor) -> Tensor:
    """Copy a tensor, in at least single precision."""
    return (at_least_single(x.detach()) if x.is_floating_point() else x.detach()).clone()


def _splits(samples: int) -> list[tuple[Tensor, Tensor]]:
    """Return whose data the other batch has, and which samples keep theirs: ``[N], [N]``.

    The other batch is one sample N times, of which counts and thresholds differ most. It tells
    nothing of the sample itself: every two samples are apart in a split whose other batch is a
    third one. Two samples have no third one, and change places.
    """
    numbers = torch.arange(samples)
    if samples == 2:
        return [(numbers.flip(0), numbers == 0)]
    first, last, middle = (torch.full_like(numbers, n) for n in (0, samples - 1, 1))
    bits = range((samples - 1).bit_length())
    found = [((first, last)[k % 2], (numbers >> k) & 1 == 1) for k in bits]
    ends = [(last, numbers == first), (first, numbers == last), (middle, numbers == first)]
    return found + ends


def _are_same(x: Tensor, y: Tensor) -> bool:
    """Whether all entries are the same, of which some may be NaN."""
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


def _results(seen: Seen) -> list[Tensor]:
    return [x for x in tree_leaves(seen.result) if isinstance(x, Tensor)]


def _makers(seen: Sequence[Seen], x: Any) -> list[int]:
    """Number the functions that have returned a tensor, or written on it."""
    return [i for i, one in enumerate(seen) if any(x is y for y in _results(one))]


def _tensors(seen: Seen) -> list[Tensor]:
    leaves = tree_leaves((seen.args, seen.kwargs, seen.result))
    return [x for x in leaves if isinstance(x, Tensor)]


def _is_unseen(x: Tensor) -> bool:
    """Whether a function has made a tensor that is none of a module that recorded what it does."""
    mark = origin(x)
    return mark is not None and not (mark.is_output or is_foreign_function(x.grad_fn))


def _reads_output_before(seen: Seen, entered: int) -> bool:
    """Whether gradients pass through a function to a module that ran outside of the context."""
    passes = seen.has_gradients and seen.function is not Tensor.detach  # else it is data
    return passes and any(_is_output_before(x, entered) for x in _tensors(seen))


def _is_output_before(x: Tensor, entered: int) -> bool:
    """Whether a recorded module has returned a tensor before autograd had made so many nodes."""
    if x.grad_fn is None or x.grad_fn._sequence_nr() >= entered:
        return False
    mark = origin(x)
    return mark is not None and mark.is_output


def _has_values(seen: Seen) -> bool:
    """Whether a function has computed anything, not only shapes for a compiler."""
    own = {type(x).__torch_dispatch__ for x in _tensors(seen)}
    return own <= {Tensor.__torch_dispatch__}


def _add_up(*gradients: Sequence[Tensor]) -> bool:
    """Whether ``x + y = a + b``, up to rounding, of four gradients, for all tensors together."""
    each = [(x, y, a, b, a + b - x - y) for x, y, a, b in zip(*gradients, strict=True)]
    norms = [[float(at_least_single(g).norm()) for g in own] for own in each]
    *sizes, difference = torch.tensor(norms, dtype=torch.float64).norm(dim=0).tolist()
    rounding = max(torch.finfo(g.dtype).eps for g in gradients[0])
    # sums over finite samples are finite, unless a sample is divided by what others decide
    return difference <= rounding**0.6 * max(sizes)


def _is_called_by(package: str, frame: Any) -> bool:
    """Whether a frame, or one that has called it, runs code of a package."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
    return frame is not None

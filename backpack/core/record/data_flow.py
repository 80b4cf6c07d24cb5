"""Where the samples are in what no parameter has touched yet, and what mixes them there.

The sample axis comes in with the inputs of the outermost module, and follows data through modules.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Size, Tensor
from torch.nn import Module, Parameter
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from backpack.context import disable
from backpack.core.record.alive import all_live_calls
from backpack.core.record.calls import Call, positional
from backpack.core.record.compiler import is_traced
from backpack.core.record.data_notes import (
    Inputs,
    begin_call,
    end_call,
    has_numbers,
    layout_of,
    mixed_by,
    note,
    note_mixed,
    noted,
    recounted,
    running,
    view_of,
)
from backpack.core.record.kinds import ENTRIES, MOVES
from backpack.core.record.layout import Layout, unbatched
from backpack.core.record.lookup import treatment
from backpack.core.record.module_state import describe
from backpack.core.record.origins import flatten_outputs, origin
from backpack.core.record.placed_call import TABLE
from backpack.core.record.registry import derivatives_of
from backpack.core.record.weights import COUNTER, TENSORS
from backpack.custom_module.function_module import FunctionModule
from backpack.custom_module.parameter_module import ParameterModule

# Modules that stand for a function: what they compute from nothing has no samples.
FUNCTIONS = (FunctionModule, ParameterModule)
# Functions that write all entries of a tensor several times, one behind the other.
REPEATS = {"repeat", "tile"}
# What does so with several copies of a tensor.
JOINS = {"cat", "concat", "concatenate", "stack"}
# What makes nested and sparse tensors dense.
FILLING_UP = {"to_dense", "to_padded_tensor"}
OnMiss = Callable[[str, Iterable[Parameter]], None]
FORM = operator.attrgetter("layout", "is_nested")
DENSE = frozenset({(torch.strided, False)})
IS_CONSTANT = operator.attrgetter("is_constant")
# Number of axes of data that may be sequences, [T, N, *].
SEQUENCE = 3
# Key in the metadata of nodes of calls that are not recorded, which backward passes tell.
MISSED = "backpack missed"
NO_SAMPLES = (
    "Give what has no samples, such as a table, an axis of one entry in front (x[None]), make it a "
    "buffer of the model, or say that it has none: backpack.assign_samples(x, None)."
)
SAY_SO = "If data has its samples along another axis, backpack.assign_samples(x, numbers) says so."
NODES_OF_GRAPHS = (
    "If rows are the nodes of several graphs, each graph is a sample: backpack.assign_samples(x, "
    "graph) says which one each row belongs to, before the model that extend(model, "
    "use_converter=True) has returned is called."
)
OTHER_DATA = (
    " Of data that is no argument of the model, the first axis was taken for that of the samples. "
    "Let it be a buffer (register_buffer) if it is a constant, else an argument."
)


def note_inputs(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_part: bool = False
) -> None:
    """Note where the samples are in what a model is called with: along the first axis.

    Of tensors whose first axes differ, some have the samples, others none. A module that knows
    better corrects that. All of it holds for this call (:func:`clear_inputs`): what another model
    has found out of the same data says nothing here. In a part of a model that is followed
    (``is_part``), what is known of its tensors holds.
    """
    if is_traced() or not (torch.is_grad_enabled() and disable.should_store_io()):
        return
    inputs, is_child = begin_call(module)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    with_axes = [x for x in tensors if not x.is_nested and x.dim()]
    count = numbered = 0
    for packed in (*args, *kwargs.values()):
        if type(packed) is PackedSequence:
            count = _note_packed(inputs, packed)
            with_axes = [x for x in with_axes if x is not packed.data and x is not packed[1]]
    for x in [*with_axes]:
        known = None if x.requires_grad else noted(x)
        if known is not None and not known.assumed:  # a program has said it
            with_axes = [other for other in with_axes if other is not x]
            numbered = max(numbered, known.samples)
    inputs.samples = count = count or numbered or _number_of_samples(with_axes)
    inputs.others = {len(x) for x in with_axes} - {count, 1}
    inputs.rows = {id(x) for x in with_axes if isinstance(x, Parameter) and len(x) == count}
    if count == 1:
        inputs.doubtful = _doubtful(with_axes)
    elif _may_be_one(count, with_axes):
        inputs.doubtful = {count}
        inputs.others.add(count)
    if inputs.others:
        inputs.choice = (
            f"{describe(module)} was called with tensors of shapes "
            f"{[list(x.shape) for x in with_axes]}, and {count} was taken for the number of samples"
        )
    for x in with_axes:
        mark, known = origin(x), layout_of(x)
        is_told = is_part or is_child or (known is not None and mark is None and not known.assumed)
        if (mark is not None and mark.is_output) or (known is not None and is_told):
            inputs.known += filter(None, [known])
            continue
        has_samples = len(x) == count
        if numbered and x.dim() > 1 and not x.is_floating_point():
            has_samples = False  # such as two rows of numbers of nodes, those that edges connect
        layout = Layout(1, len(x) if has_samples else 0, True, x.dim())
        if numbered and not has_samples and len(x) > 1 and x.is_floating_point():
            layout.lost = TABLE
        inputs.note(x, layout, mark)
    if inputs.known:  # such as sequences from another model, whose samples are not their rows
        recounted()


def _note_packed(inputs: Inputs, packed: PackedSequence) -> int:
    """Note which sample each row of a packed sequence belongs to; return how many there are.

    Its rows are those of the first step, then of the second one. Steps are no samples.
    """
    sizes, order = packed.batch_sizes.tolist(), packed.sorted_indices
    order = torch.arange(sizes[0]) if order is None else order.cpu()
    numbers = torch.cat([order[:size] for size in sizes])
    x, mark = packed.data, origin(packed.data)
    layout = _layout_of_rows(x, numbers, sizes[0])
    assert layout is not None
    inputs.note(packed.batch_sizes, unbatched())
    if mark is None or not mark.is_output:
        inputs.note(x, layout, mark)
    return sizes[0]


def _layout_of_rows(x: Tensor, numbers: Tensor, samples: int) -> Layout | None:
    """Describe a tensor whose rows, or entries, belong to samples of these numbers."""
    if numbers.shape != x.shape:
        numbers = numbers.view(-1, *[1] * (x.dim() - 1)).expand(x.shape)
    return Layout.of_numbers(numbers, samples)


def assign_samples(tensor: Tensor, numbers: Tensor | None, samples: int | None = None) -> Tensor:
    """Say which sample each row of data belongs to, such as each node of a batch of graphs.

    A model may then be called with it, or read it. That holds as long as the tensor has the same
    shape and memory.

    Args:
        tensor: Data that requires no gradient, ``[R, *]``.
        numbers: Number of the sample of each row, ``[R]``, or of each entry, in the shape of the
            tensor; -1 for padding, which counts as rows of the last sample: leave it out of the
            loss. None: no entry belongs to a sample.
        samples: N, if the last samples may have no row. Default: the largest number + 1.

    Returns:
        The tensor.

    Raises:
        ValueError: If the tensor requires a gradient, the numbers are no integers below N in one of
            these shapes, or the samples are in no order that can be followed.
        TypeError: If the numbers are no tensor.
    """
    if tensor.requires_grad:
        raise ValueError("assign_samples is for data: detach() a tensor that requires a gradient.")
    if numbers is None:
        of_none = unbatched()
        of_none.is_assigned = True
        note(tensor, of_none)
        return tensor
    if not isinstance(numbers, Tensor):
        raise TypeError(
            f"assign_samples: the numbers are a tensor, got {type(numbers).__name__}: "
            "torch.tensor(numbers)."
        )
    is_integer = not (numbers.is_floating_point() or numbers.is_complex())
    if not is_integer or numbers.shape not in (tensor.shape, tensor.shape[:1]) or not tensor.dim():
        raise ValueError(
            f"assign_samples: the numbers are {numbers.dtype} of shape {list(numbers.shape)}. Give "
            f"integers, one for each row, {list(tensor.shape[:1])}, or entry, {list(tensor.shape)}."
        )
    numbers = numbers.detach().cpu()
    largest = int(numbers.max()) if numbers.numel() else -1
    count = largest + 1 if samples is None else samples
    if not count > largest:
        raise ValueError(f"assign_samples: the largest number is {largest}, of {count} samples.")
    numbers = numbers.where(numbers >= 0, count - 1)
    layout = _layout_of_rows(tensor, numbers, count)
    if layout is None:
        raise ValueError(
            "assign_samples: entries that one axis has in common belong to several samples. Let "
            "the samples be along one axis."
        )
    layout.is_assigned = True
    note(tensor, layout)
    return tensor


def _number_of_samples(tensors: Sequence[Tensor]) -> int:
    """Choose the size of a first axis: that of most tensors, or one that is no other's inner axis.

    A table of positions ``[T, H]`` belongs to ``[N, T, H]``, whichever comes first.
    """
    sizes = [len(x) for x in tensors]
    if len(set(sizes)) < 2:
        return next(iter(sizes), 0)
    # of other axes of tensors with so many rows
    inner = {n: {s for x in tensors if len(x) == n for s in x.shape[1:]} for n in sizes}

    def is_inner(n: int) -> bool:
        """Whether n is a size inside of other tensors, as that of a mask is."""
        for m in inner:
            if n not in inner[m] or m in inner[n]:
                continue
            is_usual = n == sizes[0] and sizes.count(n) > sizes.count(m)
            if not is_usual and (m > 1 or _are_tables(n, tensors)):
                return True
        return False

    found = [n for n in inner if not is_inner(n)] or [*inner]
    several = [n for n in found if n > 1] or found
    return max(several, key=sizes.count, default=0)


def _are_tables(n: int, tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of n rows are tables for those of one row: the larger ones are the data.

    Else one row is the table, such as a mask, or as what has the other axes of the data. Tokens
    are data if they come first.
    """
    first, of_n = tensors[0], [x for x in tensors if len(x) == n]
    of_one = [x for x in tensors if len(x) == 1 and x.dtype != torch.bool]
    are_tokens = first.dim() > 1 and len(first) == n and not has_numbers(first)
    if are_tokens or {x.shape[1:] for x in of_n if x.dim() > 2} & {x.shape[1:] for x in of_one}:
        return False
    depth, depth_of_n = (max((x.dim() for x in own), default=0) for own in (of_one, of_n))
    return depth > depth_of_n or (depth == depth_of_n and len(first) == 1)


def _doubtful(tensors: Sequence[Tensor]) -> set[int]:
    """List what else may be the number of samples where one row was taken for them.

    An output of as many rows tells, unless those are rows of the sample, which comes first:
    ``[1, T, H]``, or tokens ``[1, T]``, of which masks and tables have a row for each.
    """
    first = tensors[0]
    are_tokens = first.dim() == 2 and not has_numbers(first) and first.dtype != torch.bool
    has_rows = len(first) == 1 and (are_tokens or first.dim() > 2)
    of_sample, depth = first.shape[1] if has_rows else 1, first.dim() + are_tokens

    def is_unlike(x: Tensor) -> bool:
        if len(x) != of_sample or x.dim() >= depth:
            return True
        return are_tokens and not has_numbers(x) and x.dtype != torch.bool  # perhaps the tokens

    return {len(x) for x in tensors if x.dim() > 1 and is_unlike(x)} - {1}


def _may_be_one(count: int, tensors: Sequence[Tensor]) -> bool:
    """Whether what comes first is the only sample as well: ``[1, T, H]`` beside ``[T, T, H]``."""
    first = tensors[0] if tensors else None
    if first is None or len(first) != 1 or first.dim() < SEQUENCE or first.shape[1] != count:
        return False
    return any(len(x) == count and x.shape[1:] == first.shape[1:] for x in tensors)


def clear_inputs(module: Module, output: Any) -> None:
    """Note that a call of a model has ended (no output: it was stopped); check its samples."""
    inputs = end_call(module)
    if inputs is None:
        return
    for known in inputs.marks:
        known.layout = None
    for y in flatten_outputs(output) if inputs.others else ():
        layout, mark = layout_of(y), origin(y)
        if layout is None or mark is None or not y.dim() or len(y) not in inputs.others:
            continue
        is_known = layout.is_first(y.shape) or not layout.assumed
        if layout.is_batched and is_known and len(y) not in inputs.doubtful:
            continue
        has_none = "does not have them along its first axis"
        is_open = "has as many rows as the tensor of one row may have of one sample"
        why = is_open if len(y) == inputs.samples else has_none
        mark.lost = f"{inputs.choice}, but an output of shape {list(y.shape)} {why}. {NO_SAMPLES}"
        for call in all_live_calls():
            if mark in call.origins_out:
                call.misplaced = mark.lost


def is_all_data(layout: Layout) -> bool:
    """Whether nothing that the model at hand was called with has samples if this has none."""
    known = running()[-1].layouts() if running() else ()
    batched = [one for one in known if one.is_batched and not one.is_constant]
    return bool(batched) and all(one.root in layout.ancestors for one in batched)


def may_be_samples(count: int) -> bool:
    """Whether a model that runs may have so many samples, as far as its inputs tell.

    Those of sequences may be along the second axis.
    """
    for inputs in running():
        for x, layout in inputs.given():
            if not layout.is_batched:
                continue
            is_sequence = x is None or x.dim() + (not has_numbers(x)) >= SEQUENCE
            may_differ = layout.assumed and is_sequence
            if layout.samples == count or (may_differ and (x is None or x.shape[1] == count)):
                return True
    return not running()


def is_of_inputs(layout: Layout) -> bool:
    """Whether this says where the samples are in what a model that runs was called with."""
    return any(one.root is layout.root for i in running() for one in i.layouts())


def assumption_behind(layouts: Iterable[Layout]) -> str:
    """Tell which assumption says where samples are, for an error that might be due to it."""
    layouts = [*layouts]
    known: set[Layout] = set().union(*(layout.ancestors for layout in layouts))
    for inputs in running():
        given = [one for one in inputs.layouts() if known & one.ancestors]
        if given and inputs.others:
            return f" {inputs.choice}. If that is wrong: {NO_SAMPLES}"
        if any(one.dims == SEQUENCE for one in given):
            return f" {SAY_SO}"
    for call in all_live_calls():
        read = zip(call.inputs, call.layouts_in, strict=True)
        if any(one is not None and known & one.ancestors for one in call.layouts_out):
            if any(isinstance(x, Tensor) and one is None for x, one in read):
                return (
                    f" They were taken to be along the first axis of the data that {call!r} reads, "
                    "which is no argument of the model. Let it be one."
                )
            break
    roots = {one.root for inputs in running() for one in inputs.layouts()}
    is_other = any(one.assumed and roots.isdisjoint(one.ancestors) for one in layouts)
    return OTHER_DATA if roots and is_other else ""


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """List the tensors in a structure."""
    if isinstance(value, Tensor):
        return (value,)
    if type(value) is tuple and TENSORS.issuperset(map(type, value)):
        return value
    return tuple([x for x in tree_leaves(value) if isinstance(x, Tensor)])


# Modules that have mixed samples where no gradient passes, and when; until a backward pass knows.
# One for all threads, since a backward pass may run in another one than the forward pass: to tell
# too much of private training is safe, to forget something is not.
_mixing: WeakKeyDictionary[Module, int] = WeakKeyDictionary()


def take_mixing(modules: Iterable[Module] | None = None, before: int | None = None) -> list[str]:
    """Tell once which modules (default: all) have mixed samples where no gradient passes.

    None counts from the call of the number ``before`` on.
    """
    if not _mixing:
        return []
    found = [
        module
        for module in (list(_mixing) if modules is None else modules)
        if module in _mixing and (before is None or _mixing[module] < before)
    ]
    for module in found:
        del _mixing[module]
    return list(map(describe, found))


def _follow_mixing(module: Module, tensors: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    """Note that samples were mixed where no gradient passes: individual ones do not show it."""
    by, rule = mixed_by(tensors), derivatives_of(module)
    if rule is not None:
        if rule.couples_samples(module):
            by = describe(module)
            _mixing[module] = next(COUNTER)
        elif _mixing:
            _mixing.pop(module, None)
    if by is not None:
        for y in outputs:
            note_mixed(y, by)


def follow_data(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Note where the samples are in what a module has computed that no gradient flows through."""
    outputs, tensors = tensors_in(output), tensors_in((args, kwargs) if kwargs else args)
    if not all(map(is_dense, outputs)):
        return
    _follow_mixing(module, tensors, outputs)
    known = list(map(layout_of, tensors))
    if known and not any(known):
        return
    is_function = isinstance(module, FUNCTIONS)
    # a rule passes on what a later module may know better
    passes_on = not is_function and any(one is not None and one.assumed for one in known)
    if not (passes_on or any(one is not None and one.is_batched for one in known)):
        if None not in known and (tensors or is_function):
            note_unbatched(outputs, tensors, known, getattr(module, "function", None))
        return
    call = Call.of_data(module, *positional(module, args, kwargs), tuple(outputs))
    try:
        layouts = list(call.layouts_of_data())
    except Exception as error:
        message = (
            f"a tensor of shape {list(outputs[0].shape) if outputs else []}, in which the samples "
            f"of the batch could not be followed through {call!r}: {error}"
        )
        layouts = []
        for y in outputs:
            of_none = unbatched(message)
            # what reads the rows that were looked up at such indices may know better
            of_none.assumed = not has_numbers(y)
            layouts.append(of_none)
            # of masks and lengths, one of several samples is rare
            if any(map(has_numbers, (y, *tensors))):
                note_mixed(y, f"a function of the data ({describe(module)})")
    differ = any(x is not None and x.samples > 1 and not x.is_constant for x in known)
    for y, layout in zip(outputs, layouts, strict=True):
        note(y, layout or unbatched())
        is_total = layout is None and has_numbers(y) and differ
        if is_total or call.mixed_data is not None:
            note_mixed(y, call.mixed_data or f"a function of the data ({describe(module)})")


def note_unbatched(
    outputs: Iterable[Tensor],
    tensors: Sequence[Tensor],
    known: Sequence[Layout | None],
    function: Any = None,
) -> None:
    """Note that tensors have no samples, as those of these layouts that they are computed from.

    What is computed of no tensors, or of such results alone, and rows that are repeated may turn
    out to have a row for each sample: positions, token types, states that recurrences start from.
    """
    what = treatment(function)
    is_constant = all(map(IS_CONSTANT, known))
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    lost = [(x, one.lost) for x, one in zip(tensors, known, strict=True) if one and one.lost]
    for y in outputs:
        by_index = what == MOVES and has_numbers(y)
        layout = unbatched(next((why for x, why in lost if has_numbers(x) or not by_index), None))
        is_of_copies = name in JOINS and len(y) > 1 and _are_copies(tensors)
        if name in REPEATS or is_of_copies:
            alike = y.dim() > tensors[0].dim() or tensors[0].shape[:1] == (1,)
        else:  # as expand leaves them
            alike = FORM(y) in DENSE and y.shape[:1] > (1,) and y.stride(0) == 0
        layout.is_constant = is_constant or alike
        if not (layout.is_constant or layout.lost):
            layout = of_tables(tensors, known, y.shape, what == ENTRIES) or layout
        note(y, layout)


def _are_copies(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are one, or views of the same entries."""
    return all(map(is_dense, tensors)) and len(set(map(view_of, tensors))) == 1


def of_tables(
    tensors: Iterable[Any], known: Sequence[Layout | None], shape: Size, is_of_entries: bool
) -> Layout | None:
    """Describe what is computed of data that was taken for tables: a later module may know better.

    Such as of sequences ``[T, N, *]`` beside others of another length. What is found out of the
    only one is known of a function of each entry, too; for others there is an error then.
    """
    pairs = zip(tensors, known, strict=True)
    doubtful = [
        (x, one)
        for x, one in pairs
        if one is not None and one.assumed and x.dim() + (not has_numbers(x)) >= SEQUENCE
    ]
    if not doubtful:
        return None
    (x, only), *others = doubtful
    if is_of_entries and not others and x.shape == shape:
        return only
    return Layout(1, 0, True, len(shape), [one for _, one in doubtful])


def dense_advice(x: Tensor) -> str:
    """Tell what to do about a tensor that is nested or sparse."""
    if x.is_nested:
        return (
            "has nested tensors, whose samples have shapes of their own. Give it "
            "x.to_padded_tensor(0.0), and leave the padding out of the loss."
        )
    return f"has a tensor of layout {x.layout}. Give it a dense one: x.to_dense()."


def is_dense(x: Tensor) -> bool:
    """Whether a tensor is neither nested nor sparse."""
    return FORM(x) in DENSE


def follow_not_dense(function: str, x: Tensor, y: Tensor) -> None:
    """Note where the samples are in a tensor y that a function has made of a nested or sparse x."""
    mark = origin(y)
    if not is_dense(y) or (mark is not None and mark.is_output):
        return
    if function in FILLING_UP:  # the samples stay where they are
        layout = layout_of(x) or Layout.of_axis(y.shape, 0, assumed=True)
    else:
        what = f"a tensor of shape {list(y.shape)} that {function} has computed"
        layout = unbatched(f"{what}, which {dense_advice(x)}")
    if mark is None:
        note(y, layout)
    elif layout.lost:
        mark.lost = layout.lost
    else:
        mark.layout = layout


def note_miss(
    module: Module,
    args: Iterable[Any],
    outputs: Sequence[Tensor],
    why: str,
    missed: OnMiss,
    names: Sequence[str] = (),
) -> None:
    """Let a backward pass that comes through a call which is not recorded know that."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    own = {name: p for name, p in trained.items() if not names or name in names}
    if not own:
        return
    shapes = ", ".join(
        "nested" if x.is_nested else str(list(x.shape)) for x in args if isinstance(x, Tensor)
    )
    message = (
        f"the parameters {', '.join(own)} of {describe(module)} (inputs {shapes}) have no "
        f"quantities of this use: the module {why}"
    )
    left_out = [p for p in own.values() if isinstance(p, Parameter)]  # no tensors of a transform
    for out in outputs:
        while torch._C._functorch.is_functorch_wrapped_tensor(out):  # of the transform itself
            out = torch._C._functorch.get_unwrapped(out)
        node: Any = out.grad_fn
        if node is not None:
            node.metadata[MISSED] = True
            node.register_prehook(lambda grads: missed(message, left_out))

"""Functions in any ``forward``, recorded while it runs: no tracing, no rewriting.

A :class:`torch.overrides.TorchFunctionMode` sees every function of tensors outside of leaf modules.
It runs the function, and records a call of the module that the converter's table names in its
place, like any other call.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from threading import Lock
from types import MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, overrides
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from backpack.context import STATE, disable
from backpack.convert.tracing import place_of_call
from backpack.core.engine.backward_pass import BackwardPass
from backpack.core.engine.hooks import extend_one
from backpack.core.engine.intercept import not_intercepted
from backpack.core.record import data_flow, data_notes, kinds, lookup
from backpack.core.record.alive import preserve
from backpack.core.record.compiler import may_leave_graph, set_compiler
from backpack.core.record.conversions import Apply
from backpack.core.record.data_notes import layout_of, note, running
from backpack.core.record.functions import Row
from backpack.core.record.in_place import former_of
from backpack.core.record.layout import Layout, unbatched
from backpack.core.record.lookup import Function
from backpack.core.record.origins import origin, own_node
from backpack.core.record.tape import record
from backpack.core.record.weights import TENSORS, storage_of
from backpack.custom_module.function_module import Slot, map_leaves
from backpack.custom_module.parameter_module import ParameterModule

# Options that are equal if they look alike, and those of them that are equal if they compare so.
PLAIN = (
    *(int, float, complex, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
EXACT = frozenset(PLAIN) - {float, complex} | {bool}
# Attributes of tensors that lead out of the graph.
DETACHED = {"data", "grad"}
# Functions of the graph, or of tangents, behind what they are given.
DERIVATIVES = (Tensor.backward, torch._unpack_dual)
# Functions that read a tensor and leave the entries of another one to be filled.
UNINITIALISED = {"empty_like", "new_empty", "new_empty_strided"}
# Functions that fill all of a tensor.
FILLING = lookup.FILLS - {"fill_diagonal_"}
# Functions that write entries of a tensor, whatever was there.
WRITING = {"__setitem__", "copy_", "index_copy_", "index_put_", "masked_scatter_", "scatter_"}
# What a view that changes no entry may do with them.
FORMS = (kinds.MEMORY, kinds.MOVES, kinds.RESHAPES)
# Of the modules for functions, the last ones made are kept: options may change in every run.
MAX_APPLICATIONS = 512
# Tensors of lazy modules that were not called yet.
LAZY = {UninitializedBuffer, UninitializedParameter}
# Tells the transform of ``torch.func`` that tensors belong to, which hooks cannot follow.
in_transform = torch._C._functorch.peek_interpreter_stack


class Functions:
    """The modules that stand for the functions of one model, made when they are first needed."""

    def __init__(self) -> None:
        self.applications: dict[Any, Apply] = {}
        self.readers: dict[int, ParameterModule] = {}
        self.lock = Lock()  # several threads may run the model

    def keep(self, key: Any, what: Apply) -> None:
        """Note a new one; of too many, drop the oldest."""
        with self.lock:
            self.applications[key] = what
            if len(self.applications) > MAX_APPLICATIONS:
                del self.applications[next(iter(self.applications))]

    def reader(self, p: Tensor, owner: Module, name: str, prefix: str) -> ParameterModule:
        """Return the module that reads ``owner.name``, which is ``p`` now: one for each place."""
        with self.lock:
            for key, reader in self.readers.items():
                if reader.owner is owner and reader.name == name:
                    del self.readers[key]  # of a parameter that was there before
                    break
            else:
                reader = ParameterModule(owner, name)
                extend_one(reader, f"{prefix}.{name}" if prefix else name)
            self.readers[id(p)] = reader
            return reader

    def forget_others(self, owners: set[int]) -> None:
        """Drop what reads modules that are no part of the model any more, which it would keep."""
        with self.lock:
            for key, reader in list(self.readers.items()):
                if id(reader.owner) not in owners:
                    del self.readers[key]

    def __reduce__(self) -> Any:
        """Copy and pickle as an empty table."""
        return Functions, ()


class Recorder(TorchFunctionMode):
    """Records the functions of one run of a model's ``forward``."""

    def __init__(self, root: Module):
        super().__init__()
        self.root = root
        self.functions: Functions = vars(root)["_backpack_functions"]
        self.silent = 0  # how many leaf modules are running: their functions belong to them
        self.is_away = False  # from the stack of modes, for as long as they run
        self.entered: list[Module] = []  # these modules
        self.opened: list[Module] = []  # those of them whose functions are recorded instead
        self.has_changes = False  # in place: views of what has changed may be read later
        self.has_derivatives = False  # of functions, which are not recorded
        # of the leaf without a rule that is running: counts of changes of what it reads, and the
        # generators of random numbers when it began
        self.versions: list[int] = []
        self.generators: tuple[Any, ...] = ()
        self.views: dict[int, Tensor] = {}  # of parameters
        self.compiler: Any = None  # before and after: compiled functions would not be seen
        self.others = not_intercepted()  # our other mode would look at each function as well

    def pause(self) -> None:
        """Note that a leaf module begins: functions that no mode sees cost nothing."""
        self.silent += 1
        if self.silent == 1 and overrides._get_current_function_mode() is self:
            overrides._pop_mode()
            self.is_away = True

    def resume(self) -> None:
        """Note that a leaf module has ended, or that its functions are recorded after all."""
        self.silent -= 1
        if self.is_away and not self.silent:
            self.is_away = False
            overrides._push_mode(self)

    def leave(self) -> None:
        """Take it from the stack of modes, where an interrupt has left others above it, too."""
        if not any(mode is self for mode in overrides._get_current_function_mode_stack()):
            return  # the interrupt came before it was there
        above = []
        while (mode := overrides._pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            overrides._push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, as a module if a gradient flows through it."""
        if torch.compiler.is_dynamo_compiling():
            if may_leave_graph():
                torch._dynamo.skip_frame()
            return func(*args, **(kwargs or {}))
        compiler = set_compiler(None)
        try:
            if gives_value(func):
                return func(*args, **(kwargs or {}))
            return self._record(func, args, kwargs or {})
        finally:
            set_compiler(compiler)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.silent or STATE.get().disabled or in_transform():
            self.has_derivatives |= in_transform() is not None
            return func(*args, **kwargs)
        if func in DERIVATIVES or getattr(func, "__module__", None) == "torch.autograd":
            self.has_derivatives = True
            with disable():  # this is no backward pass for extensions
                return func(*args, **kwargs)
        if args and type(args[0]) in LAZY:  # the module is about to make its tensors
            return func(*args, **kwargs)
        tensors = tensors_among((*args, *kwargs.values()) if kwargs else args)
        if not data_flow.DENSE.issuperset(map(data_flow.FORM, tensors)):
            return self._pass_by(func, args, kwargs, tensors)
        if not (torch.is_grad_enabled() and any(map(REQUIRES_GRAD, tensors))):
            return self._follow(func, args, kwargs, tensors)
        if self.has_changes:
            self.note_views(tensors)
        function = resolve(func)
        if function is None:
            return self._follow_source(func(*args, **kwargs), args)
        if function.row is not None and function.row.layer is not None:
            layer = lookup.layer_of(function.row, args, kwargs)
            if layer is not None:
                return self._note(*_named(layer, function, args, kwargs), func(*args, **kwargs))
        if any(map(REQUIRES_GRAD, filter(IS_LEAF, tensors))):
            args, kwargs = self.read_parameters(args, kwargs)
        may_change = bool(kwargs) or _position_of_inplace(func) is not None
        if function.in_place or (may_change and _changes_input(func, args, kwargs)):
            return self._in_place(func, function, args, kwargs)
        result, is_view = None, function.row is not None and function.row.is_view
        if is_view:
            result = func(*args, **kwargs)
            mark = origin(result)
            if (args and result is args[0]) or (mark is not None and mark.is_output):
                return result  # the same entries
        # "inplace" is False, and modules need not know it
        options = {k: x for k, x in kwargs.items() if k != "inplace"} if kwargs else kwargs
        what, inputs = self._application(function, args, options)
        if what.is_nested:
            return self._run(what, inputs)
        if not is_view:
            result = _apart(func(*args, **kwargs), tensors)
        return self._note(what, inputs, result)

    def _note(self, what: Apply, tensors: Sequence[Tensor], result: Any) -> Any:
        """Record what was computed, as a call of the module that stands for the function."""
        takes_all = what.takes_tensors and len(what.inputs) == len(tensors)
        inputs = tuple(tensors if takes_all else self._inputs(what, tensors))
        module, reached, missed = what.module, BackwardPass.reached, BackwardPass.missed
        seen = record(module, inputs, {}, result, reached, missed, is_function=True)
        return result if seen is None else seen

    def _pass_by(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """Run a function of nested or sparse tensors as it is."""
        result = func(*args, **kwargs)
        names = {id(p): name for name, p in self.root.named_parameters() if p.requires_grad}
        read = [names[id(x)] for x in tensors if id(x) in names]
        what = getattr(func, "__name__", "a function")
        not_dense = next(x for x in tensors if not data_flow.is_dense(x))
        for y in tree_leaves(result):
            if isinstance(y, Tensor) and not any(x is y for x in tensors):
                if read:
                    why = f"calls {what}, which {data_flow.dense_advice(not_dense)}"
                    data_flow.note_miss(self.root, tensors, [y], why, BackwardPass.missed, read)
                data_flow.follow_not_dense(what, not_dense, y)
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """Run a function that no gradient flows through, and follow the samples."""
        if not args and "tensor" in kwargs:  # torch.nn.init.normal_(tensor=x)
            args, kwargs = (kwargs["tensor"],), {k: x for k, x in kwargs.items() if k != "tensor"}
        if getattr(func, "__name__", "") in FILLING:
            filled = layout_of(args[0])
            if filled is not None and filled.lost == data_notes.UNFILLED:
                note(args[0], unbatched())
        known = [layout_of(x) for x in tensors]
        if not any(layout is not None and layout.is_batched for layout in known):
            result = func(*args, **kwargs)
            if data_notes.MIXED_DATA and (by := data_notes.mixed_by(tensors)) is not None:
                for y in data_flow.tensors_in(result) or tensors[:1]:  # x[i] = y returns nothing
                    data_notes.note_mixed(y, by)
            if None not in known:
                data_flow.note_unbatched(data_flow.tensors_in(result), tensors, known, func)
            return result
        if getattr(func, "__name__", "") in UNINITIALISED:
            result = func(*args, **kwargs)
            note(result, unbatched(data_notes.UNFILLED))
            return result
        function = resolve(func)
        if function is None:
            return self._follow_source(func(*args, **kwargs), args)
        changes = function.in_place or _changes_input(func, args, kwargs)
        changed = args[0] if changes else None
        former = None if changed is None else former_of(changed)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) and changed is None and not tree_leaves(result):
            return result
        options = {key: value for key, value in kwargs.items() if key not in ("inplace", "out")}
        before = args if former is None else (former, *args[1:])
        self.silent += 1
        try:
            layer = lookup.layer_of(function.row, before, options)
            if layer is None:
                what, inputs = self._application(function, before, options, at_once=True)
            else:
                what, inputs = _named(layer, function, before, options)
            outputs = result if changed is None else changed
            data_flow.follow_data(what.module, tuple(self._inputs(what, inputs)), {}, outputs)
            if changed is not None:
                _follow_base(changed)
        finally:
            self.silent -= 1
        return result

    @staticmethod
    def _follow_source(result: Any, args: Any) -> Any:
        """Note that a result such as ``x.data`` has its samples where its source has them."""
        both = args and isinstance(result, Tensor) and isinstance(args[0], Tensor)
        if both and result.shape == args[0].shape:
            note(result, layout_of(args[0]))
        return result

    def _in_place(self, func: Any, function: Function, args: Any, kwargs: Any) -> Any:
        """Change the first argument, and record the change as a function of its former value.

        That of a view is recorded as a change of what it is a view of.
        """
        if not args:  # torch.relu_(input=x)
            args, kwargs = (kwargs["input"],), {k: x for k, x in kwargs.items() if k != "input"}
        x, *others = args
        row = function.row  # of unsqueeze_ and the like: no entry changes, nor does the base
        is_form = row is not None and row.is_view and row.treatment in FORMS
        base = x if is_form or x._base is None else x._base
        geometry = None if base is x else lookup.geometry_of(x)
        if geometry and not base.requires_grad and layout_of(base) is None and _is_whole(x):
            note(base, layout_of(x))
        if getattr(func, "__name__", "") in WRITING:
            _begin_to_fill(base)
        before, layout = former_of(base), layout_of(x)
        given, options = _formers(base, (others, kwargs))
        preserve(base, before)
        result = func(*args, **kwargs)
        options.pop("inplace", None)
        if function.target in lookup.DRAWS and not tensors_among((*given, *options.values())):
            drawn = x.detach().clone()  # numbers that depend on no tensor
            note(drawn, layout)
            function, given, options = lookup.COPY, [drawn], {}
        if geometry is None:
            self._note_change(function, (before, *given), options, x)
        else:
            arguments = function.target, before, geometry, *given
            self._note_change(Function(lookup.change_view, None), arguments, options, base)
            self._note_change(Function(lookup.part_of, None), (base, geometry), {}, x)
        return result

    def note_views(self, tensors: Iterable[Tensor]) -> None:
        """Record views again if what they are views of has changed: torch has a new node, too."""
        for x in tensors:
            base = x._base
            if base is None or type(x.grad_fn).__name__ != "AsStridedBackward0":
                continue
            mark = origin(x)
            if mark is not None and not mark.is_output:
                part = Function(lookup.part_of, None)
                self._note_change(part, (base, lookup.geometry_of(x)), {}, x)

    def _note_change(self, function: Function, args: Any, kwargs: Any, output: Tensor) -> None:
        """Record what was computed already."""
        self.has_changes = True
        self._note(*self._application(function, args, kwargs, at_once=True), output)

    # ------------------------------------------------------------------ parameters

    def read_parameters(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace the parameters among arguments by what modules return that read them."""
        self.silent += 1
        try:
            return tree_map(self._read, (tuple(args), dict(kwargs)))
        finally:
            self.silent -= 1

    def _read(self, x: Any) -> Any:
        """Read a parameter through a module, once in each run."""
        if not (isinstance(x, Tensor) and x.is_leaf and x.requires_grad):
            return x
        if id(x) not in self.views:
            reader = self.functions.readers.get(id(x))
            # the attribute may be gone: what prunes a weight gives it back under its own name
            if reader is None or getattr(reader.owner, reader.name, None) is not x:
                reader = self._new_reader(x)
            self.views[id(x)] = x if reader is None else reader()  # it may be data
        return self.views[id(x)]

    def _new_reader(self, x: Tensor) -> ParameterModule | None:
        owners = dict(self.root.named_modules())
        for prefix, owner in owners.items():
            for name, p in owner._parameters.items():
                if p is x:
                    self.functions.forget_others(set(map(id, owners.values())))
                    return self.functions.reader(x, owner, name, prefix)
        if not isinstance(x, Parameter) or any(id(x) in inputs.rows for inputs in running()):
            return None
        holder = Module()  # such as in a list, or of another model
        holder.value = x
        reader = ParameterModule(holder, "value")
        extend_one(reader, f"parameter {list(x.shape)}")
        return reader

    # ------------------------------------------------------------------ functions as modules

    def _application(
        self, function: Function, args: Any, kwargs: Any, at_once: bool = False
    ) -> tuple[Apply, list[Any]]:
        """Return the module for a call (the same if all options are), and its tensors.

        With ``at_once`` it has to be one module: what it returns is computed already.
        """
        tensors: list[Tensor] = []
        try:
            options = [_form(x, tensors) for x in args]
            if kwargs:
                options += [*kwargs, *[_form(x, tensors) for x in kwargs.values()]]
            key = (function.target, at_once, *options)
        except TypeError:  # an option that looks like another one need not be equal
            key = None
            map_leaves(lambda x: _form(x, tensors) if isinstance(x, Tensor) else x, (args, kwargs))
        what = None if key is None else self.functions.applications.get(key)
        if what is None:
            what = lookup.application(function, args, kwargs, tensors, at_once)
            self._extend_all(what, f"{lookup.name_of(function)} at {place_of_call()}")
            if key is not None:
                self.functions.keep(key, what)
        return what, tensors

    def _extend_all(self, what: Apply, name: str) -> None:
        extend_one(what.module, name)
        for x in what.inputs:
            if isinstance(x, Apply):
                self._extend_all(x, name)

    def _run(self, what: Apply, tensors: Sequence[Tensor]) -> Any:
        self.silent += 1
        try:
            return what.module(*self._inputs(what, tensors))
        finally:
            self.silent -= 1

    def _inputs(self, what: Apply, tensors: Sequence[Tensor]) -> list[Any]:
        return [
            tensors[x.index]
            if type(x) is Slot
            else self._run(x, tensors)
            if isinstance(x, Apply)
            else x
            for x in what.inputs
        ]


def _begin_to_fill(x: Tensor) -> None:
    """Note that entries of memory that nobody has filled are as those of ``torch.empty``."""
    known = layout_of(x)
    if known is not None and known.lost == data_notes.UNFILLED:
        data_flow.note_unbatched((x,), (), (), torch.empty)


def _named(layer: Module, function: Function, args: Any, kwargs: Any) -> tuple[Apply, list[Tensor]]:
    """Name the layer that a function is, and return it with its inputs."""
    vars(layer)["_backpack_name"] = f"{lookup.name_of(function)} at {place_of_call()}"
    names = ("input",) if function.row is None else function.row.inputs
    inputs = [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names)]
    return Apply(layer, tuple(map(Slot, range(len(names))))), inputs


REQUIRES_GRAD, IS_LEAF = map(operator.attrgetter, ("requires_grad", "is_leaf"))


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """List the tensors in arguments of a function."""
    found: list[Tensor] = []
    for x in values:
        kind = type(x)
        if kind in TENSORS:
            found.append(x)
        elif kind is tuple or kind is list:
            found += tensors_among(x)
        elif kind not in EXACT and kind not in (float, slice):
            found += [y for y in tree_leaves(x) if isinstance(y, Tensor)]
    return found


def _form(value: Any, tensors: list[Tensor]) -> Any:
    """Describe an argument by what is equal for equal ones, and can be hashed; list its tensors.

    Raises:
        TypeError: If there is something else than numbers and the like in it.
    """
    kind = type(value)
    if kind in EXACT:
        return kind, value
    if kind in TENSORS or isinstance(value, Tensor):
        for i, tensor in enumerate(tensors):
            if tensor is value:
                return i
        tensors.append(value)
        return len(tensors) - 1
    if isinstance(value, (tuple, list)):
        return kind, *[_form(x, tensors) for x in value]
    if isinstance(value, slice):
        return kind, *[_form(x, tensors) for x in (value.start, value.stop, value.step)]
    if isinstance(value, PLAIN):
        return kind, repr(value)
    if kind is MethodDescriptorType or value in lookup.FUNCTIONS:  # which changes a view
        return kind, value
    raise TypeError(f"{kind.__name__} is no plain option")


@cache
def gives_value(func: Any) -> bool:
    """Whether a function returns no tensor, but a number, a shape or the like."""
    if getattr(func, "__name__", "") == "__get__":
        return getattr(func.__self__, "__name__", "") in kinds.ATTRIBUTES_VALUE
    function = resolve(func)
    return function is not None and function.row is not None and function.row.result == kinds.VALUE


@cache
def resolve(func: Any) -> Function | None:
    """Return the function without a side effect on its arguments, and its row in the table.

    None for what no gradient flows through; ``func`` is what ``__torch_function__`` is given.
    """
    if func in lookup.FUNCTIONS:
        return lookup.FUNCTIONS[func]
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = getattr(func.__self__, "__name__", "")  # a property may have none
        known = attribute in kinds.ATTRIBUTES_TENSOR - DETACHED
        return Function(func, Row(attribute, is_view=True)) if known else None
    if name in ("__set__", "__delete__"):  # an attribute: of the tensor itself, no view of it
        return None
    method = lookup.method_of(name)
    if method.on_clone or not isinstance(method.target, str):
        return method
    return replace(method, target=getattr(Tensor, method.target) if method.in_place else func)


def _apart(result: Any, arguments: Sequence[Tensor]) -> Any:
    """Let a result that is a view of what the function has computed be no view: it may change."""
    base = result._base if isinstance(result, Tensor) else None
    if base is None or any(base is x or base is x._base for x in arguments):
        return result
    return result if origin(base) is origin(result) else own_node(result)


def _formers(changing: Tensor, arguments: Any) -> Any:
    """Copy tensors that share the memory of one that will change: their history gets the change."""
    storage = storage_of(changing)

    def former(x: Any) -> Any:
        has_memory = isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested
        return former_of(x) if has_memory and storage_of(x) == storage else x

    return map_leaves(former, arguments)


def _is_whole(view: Tensor) -> bool:
    """Whether a tensor is a view of all entries of its base in their order, as of a layer."""
    base: Any = view._base
    return view.numel() == base.numel() and view.is_contiguous() and base.is_contiguous()


def _follow_base(view: Tensor) -> None:
    """Note where the samples are in a tensor after a view of it has changed."""
    base, now = view._base, layout_of(view)
    if base is None or now is None:
        return
    if _is_whole(view):
        note(base, now)
        return
    known = layout_of(base)
    samples = now.samples if known is None else known.samples or now.samples
    found: Layout | None = None
    before = None if known is None else known.numbers(base.shape)
    after = now.numbers(view.shape)
    if before is not None and after is not None and samples:
        numbers = torch.empty_like(base, dtype=torch.long).copy_(before)
        offset = view.storage_offset() - base.storage_offset()
        numbers.as_strided(view.shape, view.stride(), offset).copy_(after)
        found = Layout.of_numbers(numbers, samples)
    lost = (
        f"a tensor of shape {list(base.shape)}, of which a view was changed in place in a way in "
        "which the samples of the batch cannot be followed"
    )
    note(base, found or unbatched(lost))


@cache
def _position_of_inplace(func: Any) -> int | None:
    try:
        return list(inspect.signature(func).parameters).index("inplace")
    except (ValueError, TypeError):
        return None


def _changes_input(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function such as ``F.relu`` was asked to work in place."""
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    position = _position_of_inplace(func)
    return position is not None and len(args) > position and bool(args[position])

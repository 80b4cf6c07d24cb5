"""BackPACK: packing more into the backward pass.

>>> import torch
>>> from backpack import backpack, extend
>>> from backpack.extensions import BatchGrad
>>> model = extend(torch.nn.Linear(3, 2))
>>> lossfunc = extend(torch.nn.CrossEntropyLoss())
>>> loss = lossfunc(model(torch.rand(5, 3)), torch.tensor([0, 1, 1, 0, 1]))
>>> with backpack(BatchGrad()):
...     loss.backward()
>>> model.weight.grad_batch.shape
torch.Size([5, 2, 3])
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch.nn import DataParallel, Module

from backpack.context import (
    CTX,
    OUTSIDE,
    STATE,
    Configuration,
    ExtensionHook,
    Scope,
    active,
    configure,
    default_device,
    disable,
)
from backpack.convert.graph import convert_module_to_backpack
from backpack.convert.recording import is_open, is_recorded, record_functions
from backpack.convert.tracing import ConversionError
from backpack.core.engine import checks
from backpack.core.engine.backward_pass import BackwardPass
from backpack.core.engine.combining import Combining
from backpack.core.engine.hooks import extend_one, follow_inputs
from backpack.core.engine.intercept import InterceptBackward
from backpack.core.record import alive, calls, shards, tape, weights
from backpack.core.record.compiler import may_leave_graph, set_compiler
from backpack.core.record.data_flow import assign_samples
from backpack.core.record.given import is_model, mark_model
from backpack.core.record.registry import derivatives_of
from backpack.custom_module.converted_module import ConvertedModule
from backpack.distributed import agree, check_group, reduce, tell
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.results import clear, quantities, results_of, summary
from backpack.utils.options import ShowsOptions
from backpack.utils.warning import warn

__version__ = "1.8.0.dev0"

__all__ = [
    "CTX",
    "assign_samples",
    "backpack",
    "clear",
    "disable",
    "extend",
    "memory_cleanup",
    "quantities",
    "results_of",
    "summary",
]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T", bound=Module)

Combining.reduce = staticmethod(reduce)
Combining.tell = staticmethod(tell)
Combining.agree = staticmethod(agree)


def _instead(given: object) -> str:
    """Name what was given in place of an extension, and say what to give."""
    name = type(given).__name__
    if isinstance(given, type) and issubclass(given, BackpropExtension):
        return f"the class {given.__name__}. Did you mean {given.__name__}()?"
    if isinstance(given, list | tuple):
        return f"{given!r}. Give them one by one: backpack(*extensions)."
    if hasattr(given, "extensions"):
        return f"{name}. Give the extensions that it needs: backpack(*optimizer.extensions)."
    if isinstance(given, Module):
        return f"{name}. Give what is to be computed, such as backpack(BatchGrad())."
    return f"{given!r}. Give objects from backpack.extensions, such as backpack(BatchGrad())."


def _instead_of_module(given: object) -> str:
    """Name what was given in place of a module, and say what to give."""
    if isinstance(given, type) and issubclass(given, Module):
        return f"the class {given.__name__}. Make an instance: extend({given.__name__}())."
    hint = "Give the model itself; it has its parameters."
    if callable(given):
        hint = "Give a module: for F.cross_entropy, torch.nn.CrossEntropyLoss()."
    return f"{getattr(given, '__name__', '')} ({type(given).__name__}). {hint}".lstrip()


def _is_loss(call: calls.Call | None) -> bool:
    return call is not None and call.is_loss


class backpack(ShowsOptions):
    """Context manager: ``backward()`` inside also runs these extensions.

    Args:
        *exts: Instances of extensions.
        extension_hook: Called with each module after all extensions have run for a call of it,
            before what the call stored is released: on leaves and losses, not on pure containers.
        debug: Print what is recorded and computed.
        retain_graph: Keep what the forward pass stored, for further backward passes. It is kept
            as well in ``backward(retain_graph=True)``, unless results have a graph
            (``create_graph=True``).
        sum_individual_gradients: Let ``p.grad`` be the sum of individual gradients, where those are
            computed and autograd would take long for it: faster, and equal up to rounding errors.
            :doc:`/good_to_know` says what takes part.
        gradients: Whether ``p.grad`` is wanted. False: that of the parameters of extended modules
            stays as it is, and autograd does not compute it where it can do without. Not for
            ``backward(create_graph=True)``.
        process_group: Over which processes quantities are averaged, as ``p.grad`` is: see
            :doc:`/several_processes`. ``"module"``: those of the ``DistributedDataParallel`` that
            the model is in, if it averages gradients. A group of ``torch.distributed``: that one.
            None: no others.
        accumulate: Add to the results of earlier passes of such contexts, as ``p.grad`` does, until
            ``backpack.clear(model)`` or a context without it: results are those of the sum of the
            losses.
        progress: Show a bar in a terminal for what travels back in slices for more than a second,
            such as a column for each class of many (needs ``tqdm``).

    Raises:
        ValueError: If an argument is not an instance of an extension, two that differ have the
            same savefield, or ``process_group`` is none of these.
        TypeError: If ``extension_hook`` cannot be called.
        NotImplementedError: If an extension has several ``needs``, but no ``extract``.
    """

    _is_unused = False

    def __init__(
        self,
        *exts: BackpropExtension,
        extension_hook: ExtensionHook | None = None,
        debug: bool = False,
        retain_graph: bool = False,
        sum_individual_gradients: bool = False,
        gradients: bool = True,
        process_group: ProcessGroup | Literal["module"] | None = "module",
        accumulate: bool = False,
        progress: bool = False,
    ):
        for ext in exts:
            if isinstance(ext, BackpropExtension):
                continue
            raise ValueError(f"backpack expects instances of extensions, got {_instead(ext)}")
        checks.check_extensions(exts)
        check_group(process_group)
        if extension_hook is not None and not callable(extension_hook):
            raise TypeError(
                f"extension_hook is a function that is called with modules, got {extension_hook!r}."
            )
        self.exts = exts
        self.debug = debug
        self.extension_hook = extension_hook
        self.retain_graph = retain_graph
        self.process_group = process_group
        self.accumulate = accumulate
        self.progress = progress
        self._sum_individual_gradients = sum_individual_gradients
        self._gradients = gradients
        self._is_unused = bool(exts)
        self._entered: dict[Scope, Configuration] = {}  # by threads and tasks, and not left yet

    def __del__(self) -> None:
        """Warn if nobody has entered the context."""
        if self._is_unused and not sys.is_finalizing():
            names = ", ".join(type(ext).__name__ for ext in self.exts)
            warn(
                f"backpack({names}) was made, but never entered: its extensions have not run. "
                "Call backward() inside `with backpack(...):`.",
            )

    def __enter__(self) -> backpack:
        """Activate the extensions, whose work a compiled function does not compile."""
        if torch.compiler.is_dynamo_compiling() and may_leave_graph():
            torch._dynamo.skip_frame()
        self._is_unused = False
        scope = Scope(
            CTX.configuration,
            latest=alive.latest(),
            seen_elsewhere=OUTSIDE.task,
            start=next(weights.COUNTER),
            compiler=set_compiler(None),
            device=default_device(),
        )
        configuration = Configuration(
            self.exts,
            self.debug,
            self.extension_hook,
            self.retain_graph,
            self._sum_individual_gradients,
            self._gradients,
            self.process_group,
            self.accumulate,
            scope.outer.slice_bytes,
            self.progress,
            scope=scope,
        )
        # a mode notices what backward() is called on: first-order extensions ask that of losses
        # that are not extended (if one is, short steps do not pay for a mode)
        elides = self._sum_individual_gradients or not self._gradients
        # perhaps extend() was forgotten
        is_suspicious = bool(self.exts) and checks.is_suspicious(scope)
        is_to_leave = torch.is_inference_mode_enabled()  # that mode, for backward()
        looks = any(ext.looks_at_loss for ext in self.exts) or not _is_loss(alive.last_call())
        configure(configuration)
        is_asked = is_suspicious or is_to_leave or configuration.second_order
        if elides or is_asked or (looks and self.exts):
            program = next((ext.program for ext in self.exts if ext.program is not None), None)
            scope.interceptor = InterceptBackward(BackwardPass.completed, elides, program)
            scope.interceptor.__enter__()
        self._entered[scope] = configuration
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        """Restore the outer state. Contexts that others have entered inside stay active.

        Raises:
            RuntimeError: If it is not known which of several times that it was entered is over.
        """
        inner: Configuration | None = STATE.get().configuration
        while inner is not None and inner.scope not in self._entered:
            inner = None if inner.scope is None else inner.scope.outer
        if inner is None:  # such as a generator that was closed in another thread
            if len(self._entered) != 1:
                raise RuntimeError(
                    "A context of backpack(...) is left, but this thread (or task of asyncio) has "
                    "not entered it. Leave it where it was entered, once: use `with "
                    "backpack(...):`."
                )
            (inner,) = self._entered.values()
        scope: Any = inner.scope
        self._entered.pop(scope)
        scope.was_left = True
        if scope.interceptor is not None:
            scope.interceptor.__exit__(kind, *exception)
        configure(CTX.configuration)
        checks.note_passes(inner, active(scope.outer))
        checks.note_latest(inner)
        try:
            if kind is None:
                checks.warn_of_nothing(inner)
        finally:  # warnings may be errors
            if scope.compiler is not None:
                set_compiler(scope.compiler)


@overload
def extend(
    module: T, debug: bool = False, use_converter: Literal[False, "record"] = False
) -> T: ...


@overload
def extend(
    module: Module, debug: bool = False, use_converter: bool | Literal["trace", "record"] = False
) -> Module: ...


def extend(
    module: Module,
    debug: bool = False,
    use_converter: bool | Literal["trace", "record"] = False,
) -> Module:
    """Prepare a module (and its children) for extensions of the backward pass.

    Args:
        module: Model or loss.
        debug: Print what is done.
        use_converter: What to do about functions in the ``forward``. ``"trace"`` rewrites them into
            modules with ``torch.fx``, see
            :func:`backpack.custom_module.graph_utils.convert_module_to_backpack`. ``"record"``
            leaves the model as it is and notes the functions of each forward pass while it runs,
            see ``backpack.convert.recording``: for models that cannot be traced. ``True``
            is the first if that is possible, else the second.

    Returns:
        The module itself, or if it was traced a ``torch.fx.GraphModule`` with its parameters.
        Calling ``extend`` again changes nothing.

    Raises:
        TypeError: If ``module`` is not a module, or several are given.
        ValueError: If ``use_converter`` is something else, or ``"trace"`` and ``fully_shard`` has
            sharded the model.
        NotImplementedError: For ``torch.nn.DataParallel``.
        backpack.custom_module.graph_utils.ConversionError: If the forward pass cannot be traced.
    """
    if not isinstance(module, Module):
        raise TypeError(f"extend expects a torch.nn.Module, got {_instead_of_module(module)}")
    if isinstance(debug, Module):
        raise TypeError(
            f"extend prepares one module, got {type(module).__name__} and {type(debug).__name__}. "
            "Call it for each: extend(model), extend(loss_function)."
        )
    if use_converter not in (True, False, "trace", "record"):
        raise ValueError(
            f"use_converter is True, False, 'trace' or 'record', but not {use_converter!r}."
        )
    if any(isinstance(child, DataParallel) for child in module.modules()):
        raise NotImplementedError(tape.NO_REPLICAS)
    if use_converter in (True, "trace") and shards.is_sharded(module):
        if use_converter == "trace":
            raise ValueError(shards.TRACE_FIRST)
        use_converter = "record"
    if use_converter in (True, "trace") and not is_recorded(module):
        try:
            module = convert_module_to_backpack(module, debug)
        except ConversionError as error:
            if use_converter == "trace":
                raise
            if debug:
                print(f"[backpack] recording {type(module).__name__}, because: {error}")
            use_converter = "record"
    parts = list(_parts(module, "", set()))
    _, model = parts[0]
    is_part = getattr(model, "_backpack_extend", False) and not is_model(model)
    for name, child in parts:
        if not getattr(child, "_backpack_extend", False):
            extend_one(child, name, debug)
        mark_model(child, False)
        if is_open(child):  # perhaps since a parametrisation was registered
            record_functions(child)
        if use_converter:
            vars(child)["_backpack_converted"] = "record" if use_converter == "record" else "trace"
    if use_converter == "record":
        record_functions(module)
    elif isinstance(module, ConvertedModule):
        follow_inputs(module)
    elif not is_part:
        mark_model(model)
    return module


def _parts(module: Module, name: str, seen: set[Module]) -> Iterator[tuple[str, Module]]:
    """Name a module and those below it, unless their calls are part of what its rule describes."""
    if module in seen:
        return
    seen.add(module)
    if type(module).__name__ == "OptimizedModule":  # of torch.compile: has what it compiles
        yield from _parts(module._modules["_orig_mod"], name, seen)  # type: ignore[arg-type]
        return
    yield name, module
    rule = derivatives_of(module)
    if rule is None or not (rule.includes_children and rule.calls_children):
        for key, child in module.named_children():
            yield from _parts(child, f"{name}.{key}" if name else key, seen)


def memory_cleanup(module: Module) -> None:
    """Drop what forward passes of a module (and its children) have stored.

    Args:
        module: Any module, extended or not.
    """
    for child in module.modules():
        for call in alive.live_calls(child):
            call.release()

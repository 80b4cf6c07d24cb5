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

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal

from torch.nn import DataParallel, Module

from backpack.context import CTX, Configuration, ExtensionHook, disable
from backpack.core import spared_gradients, tape
from backpack.core.backward_pass import BackwardPass
from backpack.core.hooks import extend_one
from backpack.core.recording import is_open, is_recorded, record_functions
from backpack.core.registry import derivatives_of
from backpack.core.watch import WatchBackward
from backpack.custom_module.graph_utils import ConversionError, convert_module_to_backpack
from backpack.extensions.backprop_extension import BackpropExtension

__all__ = ["CTX", "backpack", "disable", "extend", "memory_cleanup"]


class backpack:
    """Context manager: ``backward()`` inside also runs these extensions.

    Args:
        *exts: Instances of extensions.
        extension_hook: Called with each module after all extensions have run for a call of it,
            before what the call stored is released: on leaves and losses, not on pure containers.
        debug: Print what is recorded and computed.
        retain_graph: Keep what the forward pass stored, for further backward passes.

    Raises:
        ValueError: If an argument is not an instance of an extension.
    """

    def __init__(
        self,
        *exts: BackpropExtension,
        extension_hook: ExtensionHook | None = None,
        debug: bool = False,
        retain_graph: bool = False,
    ):
        """Check the extensions."""
        for ext in exts:
            if isinstance(ext, BackpropExtension):
                continue
            hint = (
                f" Did you mean {ext.__name__}()? backpack expects instances, not classes."
                if isinstance(ext, type) and issubclass(ext, BackpropExtension)
                else ""
            )
            raise ValueError(f"backpack expects instances of extensions, got {ext!r}.{hint}")
        self._configuration = Configuration(tuple(exts), debug, extension_hook, retain_graph)
        self._outer: list[tuple[Configuration, AbstractContextManager[Any]]] = []
        self.exts = self._configuration.exts
        self.debug = debug
        self.extension_hook = extension_hook
        self.retain_graph = retain_graph

    def __enter__(self) -> backpack:
        """Activate the extensions."""
        # first-order extensions do not ask what backward() was called on, and short steps do not
        # pay for a mode
        second_order = any(ext.expects_backpropagation_quantities() for ext in self.exts)
        is_watched = second_order or spared_gradients.costly(self.exts)
        watch: AbstractContextManager[Any] = (
            WatchBackward(BackwardPass.completed) if is_watched else nullcontext()
        )
        self._outer.append((CTX.configuration, watch))
        CTX.configuration = self._configuration
        watch.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the outer state."""
        outer, watch = self._outer.pop()
        watch.__exit__(kind, value, trace)
        CTX.configuration = outer
        BackwardPass.abandon(self._configuration)


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
            see :mod:`backpack.core.recording`: for models that cannot be traced. ``True``
            is the first if that is possible, else the second.

    Returns:
        The module itself, or if it was traced a ``torch.fx.GraphModule`` with its parameters.
        Calling ``extend`` again changes nothing.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If ``use_converter`` is something else.
        NotImplementedError: For ``torch.nn.DataParallel``.
        backpack.custom_module.graph_utils.ConversionError: If the forward pass cannot be traced.
    """
    if not isinstance(module, Module):
        raise TypeError(f"extend expects a torch.nn.Module, got {type(module).__name__}.")
    if use_converter not in (True, False, "trace", "record"):
        raise ValueError(
            f"use_converter is True, False, 'trace' or 'record', but not {use_converter!r}."
        )
    if any(isinstance(child, DataParallel) for child in module.modules()):
        raise NotImplementedError(tape.NO_REPLICAS)
    if use_converter in (True, "trace") and not is_recorded(module):
        try:
            module = convert_module_to_backpack(module, debug)
        except ConversionError as error:
            if use_converter == "trace":
                raise
            if debug:
                print(f"[backpack] recording {type(module).__name__}, because: {error}")
            use_converter = "record"
    for name, child in _parts(module, "", set()):
        if not getattr(child, "_backpack_extend", False):
            extend_one(child, name, debug)
            if is_open(child):
                record_functions(child)
    if use_converter == "record":
        record_functions(module)
    return module


def _parts(module: Module, name: str, seen: set[Module]) -> Iterator[tuple[str, Module]]:
    """Name a module and those below it, unless they are part of what its derivatives describe."""
    if module in seen:
        return
    seen.add(module)
    yield name, module
    rule = derivatives_of(module)
    if rule is None or not rule.includes_children:
        for key, child in module.named_children():
            yield from _parts(child, f"{name}.{key}" if name else key, seen)


def memory_cleanup(module: Module) -> None:
    """Drop what forward passes of a module (and its children) have stored.

    Args:
        module: Any module, extended or not.
    """
    for child in module.modules():
        for call in tape.live_calls(child):
            call.release()

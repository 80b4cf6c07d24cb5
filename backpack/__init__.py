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

from types import TracebackType

from torch.nn import Module

from backpack.context import CTX, Configuration, ExtensionHook, disable
from backpack.core import tape
from backpack.core.backward_pass import BackwardPass, WatchBackward
from backpack.custom_module.graph_utils import convert_module_to_backpack
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
        self._outer: list[tuple[Configuration, WatchBackward]] = []
        self.exts = self._configuration.exts
        self.debug = debug
        self.extension_hook = extension_hook
        self.retain_graph = retain_graph

    def __enter__(self) -> backpack:
        """Activate the extensions."""
        watch = WatchBackward()
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


def extend(module: Module, debug: bool = False, use_converter: bool = False) -> Module:
    """Prepare a module (and its children) for extensions of the backward pass.

    Args:
        module: Model or loss.
        debug: Print what is done.
        use_converter: Rewrite functions in the ``forward`` into modules with ``torch.fx``, see
            :func:`backpack.custom_module.graph_utils.convert_module_to_backpack`.

    Returns:
        The module itself, or with the converter a ``torch.fx.GraphModule`` with its parameters.
        Calling ``extend`` again changes nothing.

    Raises:
        TypeError: If ``module`` is not a module.
        backpack.custom_module.graph_utils.ConversionError: If the forward pass cannot be converted.
    """
    if not isinstance(module, Module):
        raise TypeError(f"extend expects a torch.nn.Module, got {type(module).__name__}.")
    if use_converter:
        module = convert_module_to_backpack(module, debug)
    for name, child in module.named_modules():
        if not getattr(child, "_backpack_extend", False):
            _extend_one(child, name, debug)
    return module


def _extend_one(module: Module, name: str, debug: bool) -> None:
    if debug:
        print(f"[backpack] extending {name or 'the module'} ({type(module).__name__})")
    if getattr(module, "inplace", False) is True:
        # an in-place change would destroy the input that the derivatives need
        module.inplace = False  # type: ignore[assignment]
        if debug:
            print(f"[backpack] switched off inplace of {name or type(module).__name__}")
    for key, hook in list(module._forward_hooks.items()):
        if hook is _record:  # a program has reset the flag
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
    handle = module.register_forward_hook(_record, prepend=True, with_kwargs=True)
    CTX.add_hook_handle(handle, module)
    vars(module)["_backpack_name"] = name
    module._backpack_extend = True  # type: ignore[assignment]


def _record(module: Module, args: tuple, kwargs: dict, output: object) -> object:
    return tape.record(module, args, kwargs, output, BackwardPass.reached)


def memory_cleanup(module: Module) -> None:
    """Drop what forward passes of a module (and its children) have stored.

    Args:
        module: Any module, extended or not.
    """
    for child in module.modules():
        for call in tape.live_calls(child):
            call.release()

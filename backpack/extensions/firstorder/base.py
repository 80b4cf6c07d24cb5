"""Base classes of first-order extensions."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Module

from backpack.extensions.backprop_extension import FAIL_WARN, BackpropExtension
from backpack.extensions.module_extension import ModuleExtension


class FirstOrderBackpropExtension(BackpropExtension):
    """An extension that reads the gradient alone: nothing else travels back."""

    def __init__(
        self,
        savefield: str,
        module_exts: dict[type[Module], ModuleExtension] | None = None,
        fail_mode: str = FAIL_WARN,
        subsampling: Sequence[int] | None = None,
    ):
        """Store the options, see :class:`BackpropExtension`; unknown modules only warn."""
        super().__init__(savefield, module_exts, fail_mode, subsampling)

    def expects_backpropagation_quantities(self) -> bool:
        """Return False: the gradient travels back anyway."""
        return False


class FirstOrderModuleExtension(ModuleExtension):
    """A rule of a first-order extension for one module class: a method for each parameter."""

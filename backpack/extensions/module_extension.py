"""Rules that users write for one extension and one module class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Module, Parameter

if TYPE_CHECKING:
    from backpack.extensions.backprop_extension import BackpropExtension

Save = Callable[[Parameter, "BackpropExtension", Any], None]


class ModuleExtension:
    """What one extension does at modules of one class.

    A subclass has a method for each name in ``params``, ``def weight(self, ext, module, g_inp,
    g_out, bpQuantities)``, whose value is saved in the parameter's savefield. While it runs,
    ``module.input0, module.input1, …`` and ``module.output`` are the tensors of the call at hand.
    """

    def __init__(self, params: Sequence[str] | None = None):
        """Check that there is a method for each parameter.

        Args:
            params: Names of the parameters.

        Raises:
            NotImplementedError: If a method is missing.
        """
        self._params = list(params or [])
        for name in self._params:
            if not callable(getattr(self, name, None)):
                raise NotImplementedError(
                    f"{type(self).__name__} needs a method '{name}(self, ext, module, g_inp, g_out,"
                    f" bpQuantities)' for the parameter '{name}'."
                )

    def backpropagate(
        self,
        ext: BackpropExtension,
        module: Module,
        g_inp: Sequence[Any],
        g_out: Sequence[Any],
        bpQuantities: Any,
    ) -> Any:
        """Return what is passed on to the module's inputs. Default: nothing.

        Args:
            ext: The extension.
            module: The module.
            g_inp: Gradients with respect to the inputs.
            g_out: Gradients with respect to the outputs.
            bpQuantities: What arrived at the output; None at a loss.

        Returns:
            What its inputs receive: one value, or a tuple with one for each input.
        """
        return None

    def check_hyperparameters_module_extension(
        self,
        ext: BackpropExtension,
        module: Module,
        g_inp: Sequence[Any],
        g_out: Sequence[Any],
        bpQuantities: Any,
    ) -> None:
        """Raise if the module's hyperparameters are not supported. Default: they are."""

    def run(
        self,
        ext: BackpropExtension,
        module: Module,
        g_inp: Sequence[Any],
        g_out: Sequence[Any],
        bpQuantities: Any,
        save: Save,
    ) -> Any:
        """Save the value of each parameter's method, and return what to pass on."""
        self.check_hyperparameters_module_extension(ext, module, g_inp, g_out, bpQuantities)
        for name in self._params:
            p = getattr(module, name, None)
            if p is not None and p.requires_grad:
                save(p, ext, getattr(self, name)(ext, module, g_inp, g_out, bpQuantities))
        if ext.expects_backpropagation_quantities():
            return self.backpropagate(ext, module, g_inp, g_out, bpQuantities)
        return None

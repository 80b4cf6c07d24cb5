"""Rules that users write for one extension and one module class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.record.tape import describe
from backpack.core.types import Save


class ModuleExtension:
    """What one extension does at modules of one class.

    A subclass has a method for each name in ``params``, ``def weight(self, ext, module, g_inp,
    g_out, bpQuantities)``, whose value is saved in the parameter's savefield. While it runs,
    ``module.input0, module.input1, …`` and ``module.output`` are the tensors of the call at hand.

    Attributes:
        is_jacobian: Whether it does nothing but apply the transposed Jacobian.
    """

    is_jacobian: bool = False

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
        ext: Any,
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
        ext: Any,
        module: Module,
        g_inp: Sequence[Any],
        g_out: Sequence[Any],
        bpQuantities: Any,
    ) -> None:
        """Raise if the module's hyperparameters are not supported. Default: they are."""

    def run(
        self,
        ext: Any,
        module: Module,
        g_inp: Sequence[Any],
        g_out: Sequence[Any],
        bpQuantities: Any,
        save: Save,
        goes_on: bool = True,
    ) -> Any:
        """Save the value of each parameter's method, and return what to pass on.

        Args:
            ext: The extension.
            module: The module.
            g_inp: Gradients with respect to the inputs.
            g_out: Gradients with respect to the outputs.
            bpQuantities: What arrived at the output.
            save: Called with each parameter, the extension and the value.
            goes_on: Whether an input needs a gradient: else nothing is passed on.
        """
        self.check_hyperparameters_module_extension(ext, module, g_inp, g_out, bpQuantities)
        for name in self._params:
            p = getattr(module, name, None)
            if p is not None and p.requires_grad:
                value = getattr(self, name)(ext, module, g_inp, g_out, bpQuantities)
                self._check_shape(name, p, value, ext, module)
                save(p, ext, value)
        if goes_on and ext.expects_backpropagation_quantities():
            return self.backpropagate(ext, module, g_inp, g_out, bpQuantities)
        return None

    def _check_shape(self, name: str, p: Parameter, value: Any, ext: Any, module: Module) -> None:
        """Refuse a value that is not what the extension saves at other modules."""
        if ext.shape is None or not isinstance(value, Tensor):
            return
        own = list(p.shape) if "*p" in ext.shape else []
        letters = [letter for letter in ext.shape if letter != "*p"]
        sizes = list(value.shape)
        fits = len(sizes) == len(letters) + len(own) and sizes[len(letters) :] == own
        if fits and "N" in letters:
            fits = self._has_samples(sizes[letters.index("N")], ext, module)
        if not fits:
            raise ValueError(
                f"{type(self).__name__}.{name} at {describe(module)}: {type(ext).__name__} saves "
                f"{[*letters, *own]} in {ext.savefield!r} (N samples), got {sizes}."
            )

    @staticmethod
    def _has_samples(count: int, ext: Any, module: Any) -> bool:
        """Whether there may be so many samples: an axis of the output, or a factor of the first."""
        subsampling = ext.get_subsampling()
        if subsampling is not None:
            return count == len(subsampling)
        output = module.output if isinstance(module.output, Tensor) else module.output[0]
        first = output.shape[0] if output.dim() else 1
        return count in output.shape or (count > 1 and first % count == 0)

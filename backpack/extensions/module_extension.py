"""Rules that users write for one extension and one module class."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.record.module_state import describe
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
        counts: Collection[int] = (),
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
            counts: How many samples there are, or rows where a sample has several. Default: any.
        """
        self.check_hyperparameters_module_extension(ext, module, g_inp, g_out, bpQuantities)
        for name in self._params:
            p = getattr(module, name, None)
            if p is not None and p.requires_grad:
                value = getattr(self, name)(ext, module, g_inp, g_out, bpQuantities)
                self._check_value(name, p, value, ext, module, counts)
                save(p, ext, value)
        if goes_on and ext.expects_backpropagation_quantities():
            return self.backpropagate(ext, module, g_inp, g_out, bpQuantities)
        return None

    def _check_value(
        self,
        name: str,
        p: Parameter,
        value: Any,
        ext: Any,
        module: Module,
        counts: Collection[int],
    ) -> None:
        """Refuse a value that is not what the extension saves at other modules."""
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if ext.shape is not None:
            own = list(p.shape) if "*p" in ext.shape else []
            letters = [letter for letter in ext.shape if letter != "*p"]
            numbers = " or ".join(map(str, sorted(counts))) or "samples"
            expected = f"a tensor {[*letters, *own]}" + f" (N = {numbers})" * ("N" in letters)
            fits = isinstance(value, Tensor) and value.dim() == len(letters) + len(own)
            fits = fits and list(value.shape[len(letters) :]) == own
            if fits and counts and "N" in letters:
                fits = value.shape[letters.index("N")] in counts
        elif ext.saves_matrices:
            expected = "a list of square matrices"
            fits = isinstance(value, list) and len(value) > 0 and all(map(_is_square, value))
        else:
            return
        if not fits:
            hint = " Is its 'return' missing?" if value is None else ""
            raise ValueError(
                f"{type(self).__name__}.{name} at {describe(module)}: {type(ext).__name__} saves "
                f"{expected} in {ext.savefield!r}, got {found}.{hint}"
            )


def _is_square(matrix: Any) -> bool:
    return isinstance(matrix, Tensor) and matrix.dim() == 2 and matrix.shape[0] == matrix.shape[1]

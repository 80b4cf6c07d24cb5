"""What a rule says of its module, or of a call of it, without computing products.

Each fact has a default that is right where a rule does not say so, or leaves it to others to find
out. What is about samples is in :mod:`~backpack.core.derivatives.sample_axes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.derivatives.sample_axes import SampleAxes
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.kernels import KernelOverride
from backpack.core.record.visits import Visit


def always(*of: Any, **named: Any) -> bool:
    """Return True: a fact about all modules that a rule is for, and all their calls."""
    return True


def never(*of: Any, **named: Any) -> bool:
    """Return False: a fact about none of the modules that a rule is for, nor their calls."""
    return False


def constant(count: int) -> Callable[..., int]:
    """Make a method that returns a number: that of all modules that a rule is for."""
    return lambda rule, module: count


class Facts(SampleAxes):
    """The part of a rule that says what its module is like."""

    params: ClassVar[tuple[str, ...]] = ()  #: Names of the parameters.
    #: Whether what children of the module compute belongs to its call.
    includes_children: ClassVar[bool] = False
    #: Whether the module calls the children that the rule includes; else others may call them.
    calls_children: ClassVar[bool] = True
    is_loss: ClassVar[bool] = False  #: Whether the module is a loss.
    #: Whether what the rule found out about a call holds for its layouts only.
    depends_on_layouts: ClassVar[bool] = False
    #: Whether a formula reads ``module.output`` (beyond its shape), and has a derivative by it.
    needs_output: ClassVar[bool] = False
    #: Whether a formula reads ``module.output``; its derivative may be zero.
    reads_output: ClassVar[bool] = False
    #: Whether a formula reads entries of the inputs, not just their shapes.
    reads_input: ClassVar[bool] = True
    #: Whether ``kron_rows`` is the same map for all samples.
    kronecker_rows_are_constant: ClassVar[bool] = False
    #: Whether the input's Kronecker factor belongs to the first axis.
    kronecker_input_first: ClassVar[bool] = False
    #: Whether Kronecker factors are those of ``weight.transpose(0, 1)``.
    kronecker_swaps_axes: ClassVar[bool] = False
    #: Whether each position of ``affine`` is a row of the input: ``approximation="expand"`` then
    #: leaves those out of A whose target the loss ignores.
    has_positions_apart: ClassVar[bool] = False
    #: Whether weight and bias have Kronecker factors together.
    joins_bias: ClassVar[bool] = False
    #: Whether all parameters have the same Kronecker rows.
    kronecker_rows_are_shared: ClassVar[bool] = False
    #: Whether what ``saved`` keeps is found without computing anything.
    keeps_facts_alone: ClassVar[bool] = False
    #: Whether each entry of every ``J_p`` is 0, 1 or one of the input, which may be squared first.
    squares_with_input: ClassVar[bool] = False
    # What follows from the methods that a rule has of its own: ``saved``, ``assemble`` (a parameter
    # is what is multiplied), ``affine`` (rather than ``param_vjp``), ``hessian_is_zero``, …
    keeps_something: ClassVar[bool] = False
    has_one_part: ClassVar[bool] = True
    acts_affinely: ClassVar[bool] = False
    tells_curvature: ClassVar[bool] = False
    tells_linearity: ClassVar[bool] = False

    def hessian_is_zero(self, module: Module) -> bool:
        """Return whether the output is a (piecewise) affine function of the input.

        False: :meth:`is_curved` finds out for each call.
        """
        return False

    def hessian_is_diagonal(self, module: Module) -> bool:
        """Return whether output entry i depends on input entry i alone."""
        return self.hessian_is_zero(module)

    def hessian_is_psd(self) -> bool:
        """Return whether the second derivative is positive semidefinite for every ``g_out``."""
        return False

    def couples_samples(self, module: Module) -> bool:
        """Return whether a sample's output depends on other samples."""
        return False

    # what no class has replaced, perhaps after its definition, is not called
    samples_are_apart = couples_samples

    def unsupported_reason(self, c: Context) -> str | None:
        """Say why the derivatives of the call at hand cannot be computed; None if they can."""
        return None

    def couples_samples_unseen(self, call: Visit) -> bool | None:
        """Return whether a call mixes samples all the same; None if that cannot be found out."""
        return False

    def divides_by_targets(self, call: Visit) -> bool | None:
        """Return whether a loss divides by a number that all targets decide; None if unknown."""
        return False

    def param_names(self, module: Module) -> tuple[str, ...]:
        """Return the names of the parameters that the rule knows."""
        return self.params

    def own(self, module: Any) -> Mapping[str, Parameter | None]:
        """Return the parameters by name: those of children, too, if the rule includes them."""
        if self.includes_children and module._modules:
            return dict(module.named_parameters())
        return module._parameters

    def costly_gradients(self, call: Call, wanted: Set[str]) -> tuple[str, ...]:
        """Return parameters whose gradient can be elided where ``wanted`` is extracted."""
        return ()

    def kernel_overrides(
        self, visit: Visit, nodes: Sequence[Any], elided: Set[Parameter]
    ) -> Sequence[KernelOverride] | None:
        """Return what takes the place of kernels, so that they compute no parameter's gradient.

        ``nodes`` have all that are between the call's outputs and inputs. None if none of the
        parameters whose gradients autograd need not compute is to be elided.
        """
        return []

    def repeats_output(self, call: Call) -> bool:
        """Return whether calling ``forward`` again repeats the output, which need not be kept."""
        return False

    def reads_inputs(self, call: Call) -> bool:
        """Return whether a formula reads entries of a call's inputs."""
        return self.reads_input

    def autograd_stores(self, call: Call) -> bool:
        """Return whether autograd has stored tensors of a call; large ones are freed with them.

        Default: those of a layer whose output is repeated, if weight or input have a gradient.
        """
        repeats = self.repeats_output(call)
        return repeats and ("weight" in call.params or call.origins_in[0] is not None)

    def param_vjp_reads_inputs_alone(self, module: Module, name: str) -> bool:
        """Return whether products of a parameter may be formed after parameters have changed."""
        return False

    def reaches_one_output(self, call: Call) -> bool:
        """Return whether an entry of a parameter reaches one entry of a sample's output alone."""
        return False

    def is_linear_in_params(self, module: Module) -> bool:
        """Return whether the output is an affine function of each parameter.

        False: :meth:`bends_params` finds out for each call.
        """
        return False

    def min_dims(self, module: Module) -> int:
        """Return how many axes an output has at least, the batch axis included."""
        return 0

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Return what must be kept from the forward pass, for ``c.saved``."""
        return {}

    def parameter(self, c: Context, name: str) -> Tensor:
        """Return a parameter of the call by the name that :meth:`own` gives it."""
        return c.params[name]

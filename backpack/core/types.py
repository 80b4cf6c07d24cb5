"""What the rooms of the core know of each other, without importing each other.

An extension is what the engine asks :class:`Extension`; derivatives of a module are what the record
of a call asks :class:`Rule`, and the engine :class:`~.derivatives.basederivatives.BaseDerivatives`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.nn import Module, Parameter

Grads = Sequence[Tensor | None] | None
# One tensor, or one (None for zero) for each of a module's several inputs or outputs.
Mats = Tensor | Sequence[Tensor | None]
# Tangents of inputs, ``[V, *in]`` each (None for zero), and of parameters, ``[V, *p]``, by name.
OfInputs = Sequence[Tensor | None]
OfParams = Mapping[str, Tensor]
# What a second derivative makes of them.
Changes = tuple[list[Tensor | None], dict[str, Tensor]]
# Cotangents s and inputs x whose products ``s xᵀ`` are those of a parameter (x is None for a bias).
Pairs = list[tuple[Tensor, Tensor | None]]


class Extension(Protocol):
    """What the engine asks an extension: see ``backpack.extensions.backprop_extension``."""

    savefield: str
    rules: Any  # those that users have registered, by module class
    saved_quantities: Any
    looks_at_loss: bool

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of what is extracted of every parameter."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all that ``extract`` reads: what it needs, and what comes with that."""

    @property
    def max_factor_size(self) -> int | None:
        """Of Kronecker factors that are larger the diagonal will do; None if it never does."""

    @property
    def result_dtype(self) -> Any:
        """Precision of results; None for that of the parameter."""

    @property
    def shape(self) -> tuple[str, ...] | None:
        """Shape of a result, ``"*p"`` for that of the parameter."""

    @property
    def propagation(self) -> Any:
        """What travels back through the network; None for the gradient."""

    @property
    def belongs_to_gradient(self) -> bool:
        """Whether a result is used together with ``p.grad`` of the same pass."""

    @property
    def overrides_extract(self) -> bool:
        """Whether it says itself what it makes of what it needs."""

    @property
    def collects(self) -> bool:
        """Whether it makes results of what all parameters have."""

    def expects_backpropagation_quantities(self) -> bool:
        """Return whether something travels back from the loss besides the gradient."""

    def get_subsampling(self) -> list[int] | None:
        """Return the numbers of the samples to look at; None for all."""

    def rule_for(self, module: Module) -> Any:
        """Return the rule that a user registered for a module, or None."""

    def extract(self, products: Any) -> Any:
        """Turn what was extracted of a parameter into the value to save."""

    def finish(
        self, collected: MutableMapping[Parameter, Any]
    ) -> Iterable[tuple[Parameter, str, Any]]:
        """Make results of what was extracted of all parameters."""

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Merge what arrives at a tensor over several branches."""

    def fail(self, message: str, error: type[Exception] = ...) -> None:
        """Raise, warn or do nothing, as the user wants it."""


class Rule(Protocol):
    """What the record of a call asks derivatives: see ``core.derivatives.basederivatives``."""

    needs_output: ClassVar[bool]
    reads_output: ClassVar[bool]
    keeps_something: ClassVar[bool]
    keeps_facts_alone: ClassVar[bool]
    has_samples_first: ClassVar[bool]
    depends_on_layouts: ClassVar[bool]
    includes_children: ClassVar[bool]

    @property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters."""

    def own(self, module: Any) -> Mapping[str, Parameter | None]:
        """Return the module's own parameters by name."""

    def param_names(self, module: Any) -> Sequence[str]:
        """Return the names of the parameters that the rule knows."""

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Return what must be kept from the forward pass."""

    def couples_samples(self, module: Module) -> bool:
        """Return whether a sample's output depends on other samples."""

    def is_linear_in_params(self, module: Module) -> bool:
        """Return whether the output is an affine function of each parameter."""

    def min_dims(self, module: Module) -> int:
        """Return how many axes an output has at least, the batch axis included."""

    def reads_inputs(self, call: Any) -> bool:
        """Return whether a formula reads entries of a call's inputs."""

    def repeats_output(self, call: Any) -> bool:
        """Return whether calling ``forward`` again in the same mode gives the same output."""

    def autograd_stores(self, call: Any) -> bool:
        """Return whether autograd has stored tensors of a call, which a backward pass frees."""

    def keeps_rows(self, call: Any) -> bool:
        """Return whether each row of an output is computed from the row at its place alone."""

    def folds_rows(self, module: Module) -> bool:
        """Return whether rows of a sample may as well be along an axis behind that of the batch."""

    def sees_samples_first(self, module: Module) -> bool:
        """Return whether the rule sees the tensors as they are, if their samples come first."""

    def usual_layout(self, call: Any) -> Any:
        """Return where the samples are if they are the rows of all tensors, and known to be."""

    def layouts(self, call: Any) -> Sequence[Any]:
        """Find where the samples are in the outputs, and correct what was assumed of the inputs."""

    def fits_layouts(self, call: Any) -> bool:
        """Whether samples that a later module has corrected are where the rule can have them."""

    def seen(
        self, call: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]
    ) -> tuple[list[Any], list[Tensor]]:
        """Return inputs and outputs with the samples where the rule expects them."""

    def seen_gradients(self, call: Any, folded: bool) -> Sequence[Tensor | None]:
        """Return the gradients at a call's outputs with the samples where the rule expects them."""


class Save(Protocol):
    """Takes results, or what they will be made of."""

    @property
    def is_waiting(self) -> bool:
        """Whether there are results that cannot be written at once."""

    @property
    def write(self) -> Callable[[Parameter, Extension, Any], None]:
        """Saves a result that is complete."""

    def __call__(self, p: Parameter, ext: Extension, value: Any) -> None:
        """Take the result of an extension at a parameter."""

    def defers(self, products: Any, exts: Sequence[Extension]) -> bool:
        """Take products, of which results will be made later, or return False."""

"""The base class of all extensions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from types import GetSetDescriptorType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.engine.products import Products
from backpack.core.engine.propagations import Propagation
from backpack.core.record import tape
from backpack.core.record.registry import class_derivatives, kind_of
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.saved_quantities import SavedQuantities
from backpack.utils.options import ShowsOptions
from backpack.utils.warning import warn

FAIL_ERROR = "ERROR"
FAIL_WARN = "WARNING"
FAIL_SILENT = "SILENT"


class BackpropExtension(ShowsOptions):
    """Computes a quantity for every parameter during a backward pass.

    An extension reads as *what is propagated × what is extracted*: ``propagation`` travels from the
    loss back through the network (None: the gradient), ``needs`` names what is extracted of every
    parameter, and ``extract`` turns that into the value to save. An extension without ``needs``
    works through module extensions alone, one for each module class.

    Attributes:
        propagation: What travels back; extensions with equal ones share it.
        needs: Names of the extracted quantities, see ``backpack.core.engine.extracted.REDUCTIONS``.
        savefield: Attribute of the parameter that holds the result.
        shape: Shape of the result, with ``"*p"`` for that of the parameter and letters for sizes
            (``"N"`` for the number of samples); None if it is no tensor, or any will do.
        saves_matrices: Whether the result is a list of square matrices.
        max_factor_size: Of Kronecker factors that are larger the diagonal will do; None if it never
            does.
        result_dtype: Precision of the results; None for that of the parameter.
        belongs_to_gradient: Whether the result is used together with ``p.grad`` of the same pass.
        looks_at_loss: Whether it matters what is computed beside an extended loss, or behind it.
        is_of_operator: Whether the result is that of a whole loss: a part of it is an error.
        program: Is told of the functions that run in the context, if there is one.
        overrides_extract: Whether a subclass says what it makes of its ``needs``.
        collects: Whether it makes results of what all parameters have, see :meth:`finish`.
    """

    propagation: Propagation | None = None
    needs: ClassVar[tuple[str, ...]] = ()
    shape: ClassVar[tuple[str, ...] | None] = None
    saves_matrices: ClassVar[bool] = False
    max_factor_size: int | None = None
    result_dtype: torch.dtype | None = None
    belongs_to_gradient: ClassVar[bool] = False
    looks_at_loss: bool = False
    is_of_operator: bool = False
    program: Any = None
    overrides_extract: ClassVar[bool] = False
    collects: ClassVar[bool] = False
    # the optimiser that is made of this extension, and is easily taken for it
    _optimiser: ClassVar[str] = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Say where the optimiser is, if that was meant.

        Raises:
            TypeError: If there is a learning rate, but no such option; or a model or parameters, of
                which no extension of the library takes any.
        """
        if not (args or kwargs):  # as a rule
            return super().__new__(cls)
        known = cls.__signature__.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        is_own = cls.__module__.partition(".")[0] == "backpack"
        is_given_model = is_own and bool(args) and _is_model(args[0])
        unknown = {"lr", "params"} & (kwargs.keys() - known.keys()) if not takes_any else set()
        if cls._optimiser and (unknown or is_given_model):
            raise TypeError(
                f"{cls.__name__} of backpack.extensions is no optimiser: it takes no parameters "
                f"and no lr. The optimiser is backpack.optim.{cls._optimiser}."
            )
        if is_given_model:
            raise TypeError(
                f"{cls.__name__} takes no model and no parameters: it is computed for those of "
                f"extended modules. Call extend(model), and backward() inside `with "
                f"backpack({cls.__name__}(...)):`."
            )
        return super().__new__(cls, *args, **kwargs)

    def __init_subclass__(cls, **options: Any) -> None:
        """Note what follows from the methods that a subclass overrides."""
        super().__init_subclass__(**options)
        cls.overrides_extract = cls.extract is not BackpropExtension.extract
        cls.collects = cls.finish is not BackpropExtension.finish

    def __init__(
        self,
        savefield: str,
        module_exts: dict[type[Module], ModuleExtension] | None = None,
        fail_mode: str = FAIL_ERROR,
        subsampling: Sequence[int] | None = None,
    ):
        """Store the options.

        Args:
            savefield: Attribute of the parameter that will hold the result.
            module_exts: Rules by module class, beyond the registered derivatives.
            fail_mode: What to do about a module without a rule: ``"ERROR"``, ``"WARNING"`` or
                ``"SILENT"``.
            subsampling: Indices of the samples to look at. Default: all.

        Raises:
            ValueError: If ``fail_mode`` or ``subsampling`` is none of these, or ``savefield``
                is what tensors have anyway, such as ``"grad"``.
            TypeError: If ``savefield`` is no text, or ``subsampling`` no list of indices, such as
                a mask.
        """
        if not isinstance(savefield, str):
            raise TypeError(f"savefield is the name of an attribute, got {savefield!r}.")
        if isinstance(getattr(Parameter, savefield, None), GetSetDescriptorType):
            raise ValueError(f"savefield: {savefield!r} is an attribute of all tensors.")
        if fail_mode not in (FAIL_ERROR, FAIL_WARN, FAIL_SILENT):
            raise ValueError(
                f"fail_mode is {FAIL_ERROR!r}, {FAIL_WARN!r} or {FAIL_SILENT!r}, got {fail_mode!r}."
            )
        indices = None if subsampling is None else _listed(subsampling)
        if indices is not None and not indices:
            raise ValueError("subsampling needs at least one sample, got an empty list.")
        self.savefield = savefield
        self.rules: dict[type[Module], ModuleExtension] = dict(module_exts or {})
        for module_cls in self.rules:
            tape.note_rule(module_cls)
        self._fail_mode = fail_mode
        self._subsampling = indices
        self.saved_quantities = SavedQuantities()

    def set_module_extension(
        self, module_cls: type[Module], module_ext: ModuleExtension, overwrite: bool = False
    ) -> None:
        """Register a rule of this extension for a module class.

        Args:
            module_cls: Class of the module.
            module_ext: The rule.
            overwrite: Replace what is there, a rule or built-in support.

        Raises:
            ValueError: If there is support already and ``overwrite`` is not set.
        """
        built_in = bool(self.needs) and class_derivatives(module_cls) is not None
        if (module_cls in self.rules or built_in) and not overwrite:
            raise ValueError(
                f"{type(self).__name__} already supports {module_cls.__name__}. "
                "Use overwrite=True to replace that."
            )
        self.rules[module_cls] = module_ext
        tape.note_rule(module_cls)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all that ``extract`` reads, what it needs and what comes with that."""
        return self.needs

    def rule_for(self, module: Module) -> ModuleExtension | None:
        """Return the rule that a user registered for a module, or None."""
        return self.rules.get(kind_of(module)) if self.rules else None

    def get_subsampling(self) -> list[int] | None:
        """Return the indices of the samples to look at; None for all."""
        return self._subsampling

    def expects_backpropagation_quantities(self) -> bool:
        """Return whether something travels back from the loss besides the gradient."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say whether something travels back besides the "
            "gradient: derive it from FirstOrderBackpropExtension or SecondOrderBackpropExtension."
        )

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Merge what arrives at a tensor over several branches. Default: the sum."""
        return existing + other

    def extract(self, products: Products) -> Any:
        """Turn what was extracted of a parameter into the value to save. Default: the first.

        Change nothing of it in place: it may be what the backward pass goes on with.
        """
        return products.take(self.needs[0])

    def finish(
        self, collected: MutableMapping[Parameter, Any]
    ) -> Iterable[tuple[Parameter, str, Any]]:
        """Make results of what :meth:`extract` has returned for all parameters.

        If a subclass has this method, nothing is saved before. It runs once for each backward pass.

        Args:
            collected: The value of each parameter; what is taken out is freed.

        Returns:
            A parameter, an attribute's name and its value for each result.
        """
        return [(p, self.savefield, value) for p, value in collected.items()]

    def fail(
        self,
        message: str,
        error: type[Exception] = NotImplementedError,
        others: Sequence[BackpropExtension] = (),
    ) -> None:
        """Raise, warn or do nothing, as ``fail_mode`` says, together with other extensions."""
        for mode in (FAIL_WARN, FAIL_ERROR):
            exts = [ext for ext in (self, *others) if ext._fail_mode == mode]
            names = [f"{type(ext).__name__} (savefield {ext.savefield!r})" for ext in exts]
            if names and mode == FAIL_ERROR:
                raise error(f"{', '.join(names)}: {message}")
            if names:
                warn(f"{', '.join(names)}: {message}")


class ChoosesSamples(BackpropExtension):
    """An extension whose one option are the samples to look at: a subclass has a ``savefield``."""

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Choose the samples.

        Args:
            subsampling: Indices of the samples of the batch to look at. Default: all.
        """
        super().__init__(self.savefield, subsampling=subsampling)


def _is_model(value: Any) -> bool:
    """Whether something is what an optimiser takes: a model, its parameters, or groups of them."""
    if isinstance(value, Sequence) and value:
        value = value[0]
        return isinstance(value, Parameter | dict)
    return isinstance(value, Module | Parameter | Iterator)


def checked_dtype(dtype: torch.dtype | None, factored: bool) -> torch.dtype | None:
    """Return the precision of results.

    Args:
        dtype: That precision; None for that of the parameters.
        factored: Whether the results are factors instead.

    Raises:
        TypeError: If it is no precision.
        ValueError: If it has no fractions, or belongs to factors.
    """
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is a precision such as torch.bfloat16, or None, got {dtype!r}.")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype is a precision such as torch.bfloat16, got {dtype}.")
    if factored:
        raise ValueError(f"factored=True saves factors as they are. Leave out dtype={dtype}.")
    return dtype


def _listed(subsampling: Any) -> list[int]:
    """Return a sequence of indices as a list; whether those of a list fit is seen later."""
    given = subsampling
    if hasattr(given, "__array__") and not isinstance(given, Tensor):  # of NumPy
        given = torch.as_tensor(given)
    if isinstance(given, Tensor):
        is_whole = not (
            given.is_floating_point() or given.is_complex() or given.dtype is torch.bool
        )
        if given.dim() == 1 and is_whole:
            return given.tolist()
        got = f"a tensor of shape {list(given.shape)} and type {given.dtype}"
    elif isinstance(given, list | tuple | range):
        return list(given)
    else:
        got = repr(given)
    advice = ""
    if isinstance(given, Tensor) and given.dtype is torch.bool:
        advice = " Of a mask, give the indices: mask.nonzero().flatten()."
    elif isinstance(given, int):
        advice = f" For a single sample, give [{given!r}]."
    raise TypeError(
        "subsampling is a list of sample indices (or a tuple, or a tensor of integers with one "
        f"axis), or None for all samples, got {got}.{advice}"
    )

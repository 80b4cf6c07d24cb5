"""What a backward pass has left at the parameters: with types, as a table, as a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.engine.factored import FactoredGrad
from backpack.core.engine.results import Attributes, put_in_place, saved
from backpack.core.record.shards import stored
from backpack.core.values import at_least_single
from backpack.custom_module.parameter_module import ParameterModule
from backpack.utils.kroneckers import EigenKronecker


class Results:
    """The results of one parameter, as attributes that have types: see :func:`results_of`.

    Savefields of extensions of your own are there, too, as ``Any``.
    """

    grad_batch: Tensor
    batch_l2: Tensor
    sum_grad_squared: Tensor
    variance: Tensor
    grad_clipped: Tensor
    grad_gram: Tensor
    grad_projected: Tensor
    diag_ggn_exact: Tensor
    diag_ggn_mc: Tensor
    diag_ggn_exact_batch: Tensor
    diag_ggn_mc_batch: Tensor
    diag_h: Tensor
    diag_h_batch: Tensor
    sqrt_ggn_exact: Tensor
    sqrt_ggn_mc: Tensor
    ggn_gram: Tensor
    ekfac: EigenKronecker
    kfac: list[Tensor]
    kflr: list[Tensor]
    kfra: list[Tensor]
    hbp: list[Tensor]
    ggnmp: Callable[[Tensor], Tensor]
    hmp: Callable[[Tensor], Tensor]
    pchmp: Callable[[Tensor], Tensor]

    def __init__(self, parameter: Tensor):
        self._parameter = parameter

    def __getattr__(self, name: str) -> Any:
        """Return a result.

        Raises:
            AttributeError: If the parameter does not have it.
        """
        if name == "_parameter":  # not there yet while a copy is made
            raise AttributeError(name)
        there = saved(self._parameter)
        if name in there:
            return there[name]
        raise AttributeError(
            f"A parameter of shape {list(self._parameter.shape)} has no {name}: there are "
            f"{', '.join(there) or 'no results'}. Call backward() inside `with backpack(...)`, "
            "with the extension that saves it."
        )

    def __dir__(self) -> list[str]:
        """List the results, for completion."""
        return [*saved(self._parameter)]


class MoveResults:
    """An ``extension_hook`` that moves results to another device as soon as a parameter is done.

    What is computed of one parameter makes room for that of the next. First-order quantities come
    one by one while gradients flow back, if nothing of second order is active, no result waits for
    other processes or passes, and samples need not be told apart first (parameters that several
    modules use, or functions read). All others are there when the hook runs for the first time.

    >>> import torch
    >>> from backpack import backpack, extend, results
    >>> from backpack.extensions import BatchGrad
    >>> model, lossfunc = extend(torch.nn.Linear(3, 2)), extend(torch.nn.MSELoss())
    >>> with backpack(BatchGrad(), extension_hook=results.MoveResults("cpu")):
    ...     lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2)).backward()
    >>> model.weight.grad_batch.device
    device(type='cpu')

    Tensors move, in lists, too, :class:`~backpack.utils.kroneckers.EigenKronecker` and factored
    gradients; functions stay. What belongs to a result (its gradient, that samples were mixed)
    stays with it, and an error later in the backward pass takes it back wherever it is.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        """Choose the device.

        Args:
            device: Where results go.
        """
        self.device = torch.device(device)

    def __call__(self, module: Module) -> None:
        """Move the results of a module's parameters, and of the one that a function reads."""
        read = [module.parameter] if isinstance(module, ParameterModule) else []
        for p in (*read, *module.parameters()):
            for name, value in saved(p).items():
                put_in_place(p, name, self._moved(value))

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor | FactoredGrad):
            return value.to(self.device)
        if isinstance(value, list):
            return list(map(self._moved, value))
        if isinstance(value, EigenKronecker):
            bases, values = self._moved(value.bases), self._moved(value.eigenvalues)
            return replace(value, bases=bases, eigenvalues=values)
        return value


def results_of(parameter: Tensor) -> Results:
    """Return the results of a parameter, for type checkers.

    ``p.grad_batch`` is an attribute that :class:`torch.nn.Parameter` does not have: a type checker
    complains. ``results_of(p).grad_batch`` is the same tensor, and known to be one.

    Args:
        parameter: Any parameter.

    Returns:
        An object with the savefields as attributes.

    Raises:
        TypeError: If it is no parameter.
    """
    if not isinstance(parameter, Tensor):
        raise TypeError(
            f"results_of expects a parameter, got {type(parameter).__name__}. Those of a model are "
            "backpack.quantities(model)."
        )
    return Results(parameter)


class Row(NamedTuple):
    """One line of a summary.

    The name of the parameter in ``model.named_parameters()``; the attribute that holds the quantity
    (factors of a list are numbered: ``"kfac[0]"``); its shape, bytes of memory and 2-norm. Shape
    and norm of a function are None, and so is the norm on the device ``meta``. Of what is sharded,
    they are those of this process's part.
    """

    parameter: str
    quantity: str
    shape: tuple[int, ...] | None
    bytes: int
    norm: float | None


@dataclass(frozen=True)
class Summary:
    """A table of what parameters hold, for terminals (``print``) and notebooks.

    Attributes:
        rows: Its lines.
    """

    rows: tuple[Row, ...]

    HEADER = ("parameter", "quantity", "shape", "bytes", "norm")
    NOTHING = "nothing yet: call backward() inside of `with backpack(...)`"

    def _cells(self) -> Iterator[tuple[str, ...]]:
        """Write every line as text, the name of a parameter once, and the sum."""
        before = ""
        for row in self.rows:
            name, before = "" if row.parameter == before else row.parameter, row.parameter
            shape = "function" if row.shape is None else str(list(row.shape))
            norm = "" if row.norm is None else f"{row.norm:.3g}"
            yield name, row.quantity, shape, f"{row.bytes:,}", norm
        yield "all", "", "", f"{sum(row.bytes for row in self.rows):,}", ""

    def __str__(self) -> str:
        """Write aligned columns."""
        if not self.rows:
            return self.NOTHING
        lines = [self.HEADER, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = (
            (*map(str.ljust, line[:3], widths), *map(str.rjust, line[3:], widths[3:]))
            for line in lines
        )
        return "\n".join("  ".join(line).rstrip() for line in padded)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Write a table, which notebooks show."""
        if not self.rows:
            return f"<p>{escape(self.NOTHING)}</p>"
        lines = [("th", self.HEADER), *(("td", cells) for cells in self._cells())]
        rows = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) for tag, cells in lines)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def summary(model: Module) -> Summary:
    """Tabulate what every parameter of a model holds: its gradient, and results.

    >>> import torch
    >>> from backpack import backpack, extend, summary
    >>> from backpack.extensions import KFAC, BatchGrad
    >>> model, lossfunc = extend(torch.nn.Linear(3, 2)), extend(torch.nn.MSELoss())
    >>> with backpack(BatchGrad(), KFAC()):
    ...     lossfunc(model(torch.zeros(5, 3)), torch.zeros(5, 2)).backward()
    >>> print(summary(model))  # doctest: +SKIP
    parameter  quantity    shape      bytes   norm
    weight     grad        [2, 3]        24      0
               grad_batch  [5, 2, 3]    120      0
               kfac[0]     [2, 2]        16  0.646
               kfac[1]     [3, 3]        36      0
    bias       grad        [2]            8  0.648
               grad_batch  [5, 2]        40   0.29
               kfac[0]     [2, 2]        16  0.646
    all                                 260

    Args:
        model: Any module.

    Returns:
        The table; its ``rows`` are tuples.

    Raises:
        TypeError: If ``model`` is not a module.
    """
    _check_is_model("summary", model)
    rows = []
    for name, p in model.named_parameters():
        held = {"grad": p.grad, **saved(p)}
        for quantity, value in held.items():
            if value is None:
                continue
            parts = {quantity: value}
            if isinstance(value, list | tuple):
                parts = {f"{quantity}[{i}]": part for i, part in enumerate(value)}
            elif isinstance(value, EigenKronecker):
                parts = {f"{quantity}.bases[{i}]": part for i, part in enumerate(value.bases)}
                parts[f"{quantity}.eigenvalues"] = value.eigenvalues
            rows += [_row(name, label, part) for label, part in parts.items()]
    return Summary(tuple(rows))


def _check_is_model(function: str, given: Any) -> None:
    """Refuse what is no module."""
    if not isinstance(given, Module):
        raise TypeError(
            f"{function} expects a model, got {type(given).__name__}. For a single parameter, use "
            "backpack.results_of(p)."
        )


@torch.no_grad()
def _row(parameter: str, quantity: str, value: Any) -> Row:
    """Describe a tensor, factored gradients (with the memory of what is kept), or a function.

    Of what is sharded, the part of this process: the others may not ask.
    """
    if isinstance(value, FactoredGrad):
        size, squares = value.kept_entries * value.dtype.itemsize, value.square_norms()
        return Row(parameter, quantity, tuple(value.shape), size, float(squares.sum().sqrt()))
    if not isinstance(value, Tensor):
        return Row(parameter, quantity, None, 0, None)
    value = stored(value)
    entries = value.coalesce().values() if value.is_sparse else value
    size = entries.numel() * entries.element_size()
    wide = at_least_single(entries)
    norm = None if entries.is_meta else float(torch.linalg.vector_norm(wide))
    return Row(parameter, quantity, tuple(value.shape), size, norm)


def quantities(model: Module, *names: str) -> dict[str, Tensor]:
    """Collect the results of all parameters of a model, such as for ``safetensors``.

    Results that are functions, such as those of ``GGNMP``, or factors, are left out. So are
    parameters without the result.

    Args:
        model: Any module.
        *names: Savefields. Default: all that there are.

    Returns:
        Contiguous tensors without a graph. For one savefield, a tensor has the name of its
        parameter in ``model.named_parameters()`` (``"0.weight"``); for several, or all, with the
        savefield behind it (``"0.weight.grad_batch"``). Factors of a list are numbered:
        ``"0.weight.0"``, ``"0.weight.kfac.0"``.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If no parameter has results of one of the names.
    """
    _check_is_model("quantities", model)
    found = {key: saved(p) for key, p in model.named_parameters()}
    known = dict.fromkeys(name for results in found.values() for name in results)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"No parameter of {type(model).__name__} has results named "
            f"{', '.join(map(str, unknown))}: there are {', '.join(known) or 'none'}. Call "
            "backward() inside `with backpack(...)` first, and give savefields, such as "
            "'grad_batch'."
        )
    tensors: dict[str, Tensor] = {}
    for key, results in found.items():
        for name in names or results:
            value = results.get(name)
            whole = key if len(names) == 1 else f"{key}.{name}"
            if isinstance(value, list | tuple):
                parts = {f"{whole}.{i}": part for i, part in enumerate(value)}
            else:
                parts = {whole: value}
            for label, part in parts.items():
                if isinstance(part, Tensor):
                    tensors[label] = part.detach().contiguous()
    return tensors


def clear(model: Module) -> None:
    """Remove the results from all parameters of a model.

    What forward passes have stored is kept: :func:`backpack.memory_cleanup` drops that.

    Args:
        model: Any module.

    Raises:
        TypeError: If ``model`` is not a module.
    """
    _check_is_model("clear", model)
    for p in model.parameters():
        own = vars(p)
        if isinstance(own, Attributes):
            p.__dict__ = own.cleared()

"""Which module works with which extension, read off the registered derivatives.

``python -m backpack.support`` prints it; ``--summary`` makes it short, ``--markdown`` a table for
a web page, and ``--write README.md`` puts the short table into a file.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from enum import Enum
from itertools import chain, groupby
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

import torch
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from backpack import _parts, extensions
from backpack.convert.recording import OPEN, is_open
from backpack.core.derivatives import (
    REGISTRY,
    AutomaticDerivatives,
    AutomaticLossDerivatives,
    BaseDerivatives,
    BaseLossDerivatives,
    CTCLossDerivatives,
    EmbeddingBagDerivatives,
    EmbeddingDerivatives,
    FunctionDerivatives,
    ParameterModuleDerivatives,
    RefusedDerivatives,
    UnknownModuleDerivatives,
    WeightedLossDerivatives,
)
from backpack.core.engine.propagations import (
    BatchAveraged,
    Blocks,
    HessianFactors,
    SampledFactor,
    identity,
)
from backpack.core.record.registry import FALLBACKS, LISTS, derivatives_of, is_leaf, own_parameters
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder import hbp


class Support(str, Enum):
    """What an extension finds in the derivatives of a module."""

    CLOSED_FORM = "closed form"
    AUTOMATIC = "automatic"
    RECORDED = "recorded"
    NOT_NEEDED = "not needed"
    UNDEFINED = "undefined"
    MISSING = "missing"


EXPLANATIONS = {
    Support.CLOSED_FORM: "the derivatives of the module are written down",
    Support.AUTOMATIC: "the module is differentiated by autograd; samples must be independent",
    Support.RECORDED: "consists of modules and functions, which are recorded while it runs",
    Support.NOT_NEEDED: "no parameters, and the gradient is that of autograd: any module will do",
    Support.UNDEFINED: "does not exist: the module mixes the samples of a batch, the loss is no "
    "negative log likelihood that targets could be drawn from, or torch has no derivative",
    Support.MISSING: "the registered derivatives lack what the extension calls",
}
SYMBOLS = dict(zip(Support, "+~*.-?", strict=True))

# Marks of the place of the summary in a file.
BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"

Matrix = dict[type[Module], dict[type[BackpropExtension], Support]]


class AnyOtherModule(Module):
    """Stands for every leaf without a registration, such as a layer of a user."""


class AnyOtherLoss(Module):
    """Stands for every such leaf that returns a scalar."""


def _rows() -> dict[type[Module], BaseDerivatives | None]:
    """Return the derivatives of every row of the matrix; None for what is recorded."""
    others: dict[Any, Any] = {AnyOtherModule: FALLBACKS["module"], AnyOtherLoss: FALLBACKS["loss"]}
    known: dict[Any, Any] = REGISTRY
    return {**dict.fromkeys(OPEN), **others, **known}


def all_extensions() -> list[BackpropExtension]:
    """Return an instance of every extension, those of first order first."""
    classes = [getattr(extensions, name) for name in extensions.__all__]
    strategies = hbp.LossHessianStrategy.EXACT, hbp.BackpropStrategy.SQRT
    ggn = hbp.Curvature.GGN, *strategies, hbp.ExpectationApproximation.BOTEV_MARTENS
    instances = [cls(*ggn) if cls is hbp.HBP else cls() for cls in classes]
    return sorted(
        instances, key=lambda ext: (ext.expects_backpropagation_quantities(), type(ext).__module__)
    )


def support_matrix(mixing: bool = False) -> Matrix:
    """Tell for every module and every extension whether they work together.

    Args:
        mixing: Ask about networks that mix the samples of a batch, which batch normalisation does
            unless it uses running statistics.

    Returns:
        ``matrix[module class][extension class]``; modules of one family are neighbours, those with
        parameters come first, what has no rule behind them, and losses last.
    """
    exts, rows = all_extensions(), _rows()
    return {
        module_class: {type(ext): _cell(rows[module_class], ext, mixing) for ext in exts}
        for module_class in sorted(rows, key=_family)
    }


def _family(module_class: type[Module]) -> tuple[bool, bool, bool, str, bool, bool]:
    """Sort and group by kind and by the file of the derivatives; losses by what they have."""
    derivatives = _rows()[module_class]
    if derivatives is None:
        return False, False, True, "", False, False
    is_loss = isinstance(derivatives, BaseLossDerivatives)
    by_file = not is_loss or isinstance(derivatives, CTCLossDerivatives)  # not like other losses
    file = type(derivatives).__module__ if by_file else ""
    parameters = not is_loss and _has_parameters(derivatives)
    automatic, likelihood = _is_automatic(derivatives), _is_likelihood(derivatives)
    has_no_rule = parameters and isinstance(
        derivatives, UnknownModuleDerivatives | RefusedDerivatives
    )
    return is_loss, not parameters, has_no_rule, file, automatic, not likelihood


def _is_passive(module: Module) -> bool:
    """Whether a container is one of torch's that are not called, or has nothing to call."""
    if "forward" in vars(module):
        return False
    if type(module).forward is Sequential.forward:
        return not module._modules
    return isinstance(module, ModuleList | ModuleDict) and type(module).forward is Module.forward


def _has_parameters(derivatives: BaseDerivatives) -> bool:
    """Whether modules may have parameters; a function has none of its own."""
    if isinstance(derivatives, FunctionDerivatives):
        return isinstance(derivatives, UnknownModuleDerivatives)
    return bool(derivatives.params) or _implements(derivatives, "param_names")


def _is_likelihood(derivatives: BaseDerivatives) -> bool:
    """Whether targets can be drawn, if that is a loss; a weighted one is like that without."""
    if not isinstance(derivatives, BaseLossDerivatives):
        return True
    is_weighted = isinstance(derivatives, WeightedLossDerivatives)
    return is_weighted or derivatives.has_likelihood(Module())


def _is_automatic(derivatives: BaseDerivatives) -> bool:
    """Whether there is no formula, not even that the function is affine."""
    if isinstance(derivatives, AutomaticLossDerivatives | UnknownModuleDerivatives):
        return True
    if not isinstance(derivatives, AutomaticDerivatives):
        return False
    classes = type(derivatives).__mro__
    below = classes[: classes.index(AutomaticDerivatives)]
    return not any("hessian_is_zero" in vars(c) for c in below if c is not FunctionDerivatives)


def _cell(derivatives: BaseDerivatives | None, ext: BackpropExtension, mixing: bool) -> Support:
    if derivatives is None:
        return Support.RECORDED
    if isinstance(derivatives, RefusedDerivatives):
        return Support.UNDEFINED
    if isinstance(derivatives, CTCLossDerivatives) and ext.expects_backpropagation_quantities():
        return Support.UNDEFINED
    if isinstance(ext.propagation, SampledFactor) and not _is_likelihood(derivatives):
        return Support.UNDEFINED
    if not ext.expects_backpropagation_quantities() and not _has_parameters(derivatives):
        return Support.NOT_NEEDED
    if mixing and _needs_independent_samples(ext):
        return Support.UNDEFINED
    if _is_automatic(derivatives):
        return Support.AUTOMATIC
    is_loss = isinstance(derivatives, BaseLossDerivatives)
    needed = _needed_of_loss(ext) if is_loss else _needed_of_module(derivatives, ext)
    complete = all(any(_implements(derivatives, name) for name in names) for names in needed)
    return Support.CLOSED_FORM if complete else Support.MISSING


def _needs_independent_samples(ext: BackpropExtension) -> bool:
    """Whether the quantity is defined sample by sample, or entry by entry of an activation."""
    propagation = ext.propagation
    if isinstance(propagation, Blocks):
        return propagation.modify not in (None, identity)
    if isinstance(propagation, HessianFactors):
        return "batch_square" in ext.needs
    return isinstance(propagation, BatchAveraged)


def _needed_of_module(derivatives: BaseDerivatives, ext: BackpropExtension) -> list[list[str]]:
    """List the methods that an extension calls, with alternatives."""
    propagation = ext.propagation
    # where the names of the parameters depend on the module, one method is for all of them
    params = ["param"] if _implements(derivatives, "param_names") else list(derivatives.params)
    needed = [[f"{name}_vjp", "param_vjp", "affine"] for name in params]
    # gradients do not go on to integers (but to the weights of a bag), nor if there is no input
    is_first = isinstance(derivatives, EmbeddingDerivatives | ParameterModuleDerivatives)
    if propagation is not None and (
        not is_first or isinstance(derivatives, EmbeddingBagDerivatives)
    ):
        needed += [["vjp"]]
    curvature = ("hessian_is_zero", "hessian_is_diagonal")
    hessian = isinstance(propagation, HessianFactors) or getattr(propagation, "modify", None)
    if hessian and all(_implements(derivatives, name) for name in curvature):
        needed += [["hessian_diag"]]
    return needed


def _needed_of_loss(ext: BackpropExtension) -> list[list[str]]:
    if isinstance(ext.propagation, Blocks):
        return [["hessian_product"]]
    sampled = isinstance(ext.propagation, SampledFactor)
    return [["sampled_hessian_root" if sampled else "hessian_root"]]


def _implements(derivatives: BaseDerivatives, name: str) -> bool:
    """Whether a class below the abstract ones has the method."""
    abstract = (
        BaseLossDerivatives if isinstance(derivatives, BaseLossDerivatives) else BaseDerivatives
    )
    below = type(derivatives).__mro__[: type(derivatives).__mro__.index(abstract)]
    return any(name in vars(cls) for cls in below)


# --- Text -----------------------------------------------------------------------------------------


def report(markdown: bool = False, summary: bool = False) -> str:
    """Write the support matrix as text.

    Args:
        markdown: Write a table in markdown instead of plain text for 80 columns.
        summary: A row for each family of modules instead of one for each module.

    Returns:
        The text, with explanations below.
    """
    matrix = support_matrix()
    families = [list(members) for _, members in groupby(matrix, _family)]
    lines = (_summary if summary else _full)(matrix, families, markdown)
    # some symbols would begin a list in markdown
    symbol = "" if summary else "`{}` " if markdown else "{} "
    notes = _explained((row.values() for row in matrix.values()), symbol)
    if any(map(_couples_samples, matrix)):
        notes.append(_footnote())
    notes = [f"- {note}" if markdown else fill(note, 80) for note in notes]
    return "\n".join([*lines, "", *notes])


def _explained(rows: Iterable[Iterable[Support]], symbol: str) -> list[str]:
    """Say what the cells of some rows mean, behind their symbols in some form."""
    cells = set(chain.from_iterable(rows))
    explained = ((cell, text) for cell, text in EXPLANATIONS.items() if cell in cells)
    return [f"{symbol.format(SYMBOLS[c])}{c.value}: {text}." for c, text in explained]


def write_summary(file: Path) -> None:
    """Replace what is between the marks of a file by the summary in markdown.

    Args:
        file: A text in UTF-8 that has each mark once, in a line of its own. The rest stays.

    Raises:
        ValueError: If it does not have the marks.
    """
    text = file.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in before + after:
        raise ValueError(f"{file} needs a line {BEGIN}, and below it a line {END}, once.")
    section = report(markdown=True, summary=True)
    file.write_text(f"{before}{begin}{section}\n{end}{after}", encoding="utf-8")


def report_of(model: Module) -> str:
    """Write what every extension finds in the modules of a model, as text for 80 columns.

    Args:
        model: Any module. It is not run: functions in its forward passes are not looked at.

    Returns:
        A row for each class of modules, with explanations below, and where modules without a rule
        are.
    """
    exts = all_extensions()
    rows: dict[tuple[str, tuple[Support, ...]], list[str]] = {}
    remarks, mixes = [], []
    for name, module in _parts(model, "", set()):
        derivatives = _of_instance(module)
        if isinstance(module, torch.jit.ScriptModule):
            remarks.append(
                f"{name or 'The model'} ({type(module).__name__}) was made by torch.jit and cannot "
                "be extended: extend the module that it was made from."
            )
            continue
        if isinstance(module, LISTS):  # what they hold is that of the module around them
            continue
        own = [key for key, p in own_parameters(module).items() if p is not None]
        is_called = derivatives is not None or is_open(module)
        if is_called and not (_is_passive(module) and not own):
            mixing = derivatives is not None and derivatives.couples_samples(module)
            if mixing:
                mixes.append(f"{name or 'the model'} ({type(module).__name__})")
            cells = tuple(_cell(derivatives, ext, mixing) for ext in exts)
            rows.setdefault((type(module).__name__, cells), []).append(name or "the model")
        elif own:
            remarks.append(
                f"{name or 'The model'} ({type(module).__name__}) uses parameters of its own in "
                f"functions ({', '.join(own)}): call extend(model, use_converter=True)."
            )
    table = [
        [f"{name} x{len(places)}", *(SYMBOLS[cell] for cell in cells)]
        for (name, cells), places in rows.items()
    ]
    notes = _explained((cells for _, cells in rows), "{} ")
    automatic = [
        f"{', '.join(places)} ({name})"
        for (name, cells), places in rows.items()
        if Support.AUTOMATIC in cells
    ]
    if automatic:
        notes.append(f"Automatic, where a rule would be faster: {'; '.join(automatic)}.")
    if mixes:
        notes.append(
            f"As it is now, the model mixes the samples of a batch in {', '.join(mixes)}: "
            "first-order extensions warn. Call eval(), or use modules such as GroupNorm."
        )
    lines = _plain_table([type(ext).__name__ for ext in exts], [table])
    return "\n".join([*lines, "", *(fill(note, 80) for note in [*notes, *remarks])])


def _of_instance(module: Module) -> Any:
    """Return the derivatives of a module; None if it is a container, or if it is recorded."""
    if is_open(module):
        return None
    registered = derivatives_of(module)
    return FALLBACKS["module"] if registered is None and is_leaf(module) else registered


def _couples_samples(module_class: type[Module]) -> bool:
    """Whether modules of this class can mix the samples of a batch."""
    derivatives = _rows()[module_class]
    return derivatives is not None and _implements(derivatives, "couples_samples")


def _footnote() -> str:
    rows = [row for m, row in support_matrix(mixing=True).items() if _couples_samples(m)]
    names = {e.__name__: 0 for row in rows for e, c in row.items() if c is Support.UNDEFINED}
    return (
        "¹ With running statistics (`eval()`). With the statistics of the batch, which mix its "
        f"samples, first-order extensions warn, and {', '.join(names)} raise an error."
    )


def _full(matrix: Matrix, families: list[list[type[Module]]], markdown: bool) -> list[str]:
    exts = [ext.__name__ for ext in next(iter(matrix.values()))]
    rows = [
        [[_name(m), *(SYMBOLS[cell] for cell in matrix[m].values())] for m in members]
        for members in families
    ]
    if markdown:
        return _markdown_table(["", *exts], [row for family in rows for row in family])
    return _plain_table(exts, rows)


def _plain_table(exts: list[str], families: list[list[list[str]]]) -> list[str]:
    """Write numbered extensions, and below them rows of a name and symbols, for 80 columns."""
    width = 80 - 3 * len(exts)  # of the names
    columns = wrap("  ".join(f"{i}\N{NO-BREAK SPACE}{name}" for i, name in enumerate(exts, 1)), 80)
    lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in columns]
    for family in [[["", *map(str, range(1, len(exts) + 1))]], *families]:
        lines.append("")
        for name, *cells in family:
            wide = len(name) > width  # a line of its own
            lines += [name] * wide
            lines.append(f"{'' if wide else name:<{width}}" + "".join(f"{c:>3}" for c in cells))
    return lines


def _summary(matrix: Matrix, families: list[list[type[Module]]], markdown: bool) -> list[str]:
    first = {type(e) for e in all_extensions() if not e.expects_backpropagation_quantities()}
    rows = []
    for members in families:
        verdicts = []
        for of_first_order in (True, False):
            found: dict[Support, dict[str, int]] = {}  # in order, each extension once
            for m in members:
                for ext, cell in matrix[m].items():
                    if (ext in first) == of_first_order:
                        found.setdefault(cell, {})[ext.__name__] = 0
            gaps = (Support.UNDEFINED, Support.MISSING)
            verdicts.append(
                ", ".join(
                    f"{cell.value} for {', '.join(exts)}" if cell in gaps else cell.value
                    for cell, exts in found.items()
                )
            )
        rows.append((_shortened(map(_name, members)), verdicts))
    if markdown:
        return _markdown_table(
            ["modules", "first-order extensions", "second-order extensions"],
            [[", ".join(f"`{n}`".replace("¹`", "` ¹") for n in names), *v] for names, v in rows],
        )
    lines = []
    for names, (one, two) in rows:
        lines += [fill(", ".join(names), 80), f"    first order: {one}"]
        lines.append(fill(f"    second order: {two}", 80, subsequent_indent="    "))
    return lines


def _name(module_class: type[Module]) -> str:
    if module_class in (AnyOtherModule, AnyOtherLoss):
        return "any other loss" if module_class is AnyOtherLoss else "any other module"
    return module_class.__name__ + "¹" * _couples_samples(module_class)


def _shortened(names: Iterable[str]) -> list[str]:
    """Write ``Conv1d, Conv2d`` as ``Conv1d/2d``."""
    joined = ", ".join(names)
    for _ in range(2):
        joined = re.sub(r"\b(\w+)(\dd(?:/\dd)*)¹?, \1(\dd¹?)(?=,|$)", r"\1\2/\3", joined)
    return joined.split(", ")


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows]]


def main() -> None:
    """Print the support matrix."""
    parser = argparse.ArgumentParser(prog="python -m backpack.support", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="tables in markdown")
    parser.add_argument("--summary", action="store_true", help="a row for each family of modules")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help=f"write the short table in markdown between {BEGIN} and {END} of a file",
    )
    options = parser.parse_args()
    if options.write is None:
        print(report(options.markdown, options.summary))
        return
    try:
        write_summary(options.write)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

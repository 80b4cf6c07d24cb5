"""What is public, and the check that all of it is documented: without, the build fails."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc, isclass, isfunction
from types import ModuleType
from typing import TYPE_CHECKING, Any

import backpack
from backpack.core import derivatives

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

# Everything else is public, unless its name starts with an underscore.
INTERNAL = (
    "backpack.convert",
    "backpack.core",
    "backpack.distributed",
    "backpack.hessianfree.graph",
    "backpack.hessianfree.twice",
    "backpack.influence.",  # what the packages export is public
    "backpack.laplace.",
    "backpack.linalg.",
    "backpack.optim.",
    "backpack.utils.autocast",
    "backpack.utils.batches",
    "backpack.utils.by_name",
    "backpack.utils.files",
    "backpack.utils.functional",
    "backpack.utils.hooks",
    "backpack.utils.options",
    "backpack.utils.progress",
    "backpack.utils.warning",
    "backpack.__main__",
    *(f"backpack.custom_module.{name}" for name in ("converted_module", "recurrent_pass")),
)
# What rules are made of, in `backpack.core.derivatives`.
FOR_RULES = (
    "BaseDerivatives",
    "BaseLossDerivatives",
    "ElementwiseDerivatives",
    "ElementwiseLossDerivatives",
    "check_rule",
    "register",
)


def public_modules() -> Iterator[ModuleType]:
    """Find all modules that are not internal."""
    yield backpack
    for info in pkgutil.walk_packages(backpack.__path__, "backpack."):
        hidden = any(part.startswith("_") for part in info.name.split("."))
        if not hidden and not info.name.startswith(INTERNAL):
            yield import_module(info.name)


def public_symbols() -> dict[str, Any]:
    """Return classes and functions by a name under which they can be imported.

    That are those in ``__all__``, or else those without an underscore that a module defines.
    """
    found: dict[str, Any] = {
        f"{derivatives.__name__}.{name}": getattr(derivatives, name) for name in FOR_RULES
    }
    for module in public_modules():
        here = [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        for name in getattr(module, "__all__", [n for n in here if not n.startswith("_")]):
            value = getattr(module, name)
            if isclass(value) or isfunction(value):
                found[f"{module.__name__}.{name}"] = value
    return found


def resolve(name: str) -> Any:
    """Return the object of a qualified name, None if there is none."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for part in parts[i:]:
            value = getattr(value, part, None)
        return value
    return None


def missing(documented: set[str]) -> list[str]:
    """List public symbols that are not among the documented names, or have no docstring."""
    known = {id(resolve(name)) for name in documented}
    return [
        name
        for name, value in public_symbols().items()
        if id(value) not in known or not getdoc(value)
    ]


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn (an error with ``-W``) about what is missing."""
    from sphinx.util import logging

    for name in missing(set(env.domaindata["py"]["objects"])):
        logging.getLogger(__name__).warning(
            "%s is public, but no page documents it. Add it to a page in docs_src/rtd "
            "(.. automodule:: or .. autoclass::), or to INTERNAL in _ext/public_api.py.",
            name,
        )


def without_summary(
    app: Sphinx, what: str, name: str, value: Any, _: Any, lines: list[str]
) -> None:
    """Show the arguments of a class below its docstring without the first line of ``__init__``."""
    of_init = (getdoc(value.__init__) or "").splitlines() if what == "class" else []
    if (
        of_init
        and lines
        and lines[0] == of_init[0]
        and lines[0] != (getdoc(value) or "").split("\n")[0]
    ):
        del lines[0]


def setup(app: Sphinx) -> dict[str, Any]:
    """Run the check once all pages have been read."""
    app.connect("autodoc-process-docstring", without_summary, priority=100)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}

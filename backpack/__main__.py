"""``python -m backpack``: versions and devices; with ``support``, what works with a model."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

import backpack
from backpack import support


def versions() -> str:
    """Return the versions of what matters, and the devices that torch sees."""
    lines = {
        "backpack": f"{backpack.__version__} in {Path(backpack.__file__).parent}",
        "torch": torch.__version__,
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "devices": ", ".join(_devices()),
    }
    return "\n".join(f"{name:<9}{text}" for name, text in lines.items())


def _devices() -> list[str]:
    names = [f"cpu ({torch.get_num_threads()} threads)"]
    names += [
        f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())
    ]
    return names + ["mps"] * torch.backends.mps.is_available()


def load(name: str) -> Module:
    """Return the model that ``module:factory`` names, such as ``torchvision.models:resnet18``.

    Args:
        name: An importable module (that of a file in the working directory, too), and a function
            without arguments in it that returns the model, or the model itself.

    Raises:
        ImportError: If there is no such module.
        AttributeError: If there is no such function in it.
        ValueError: If that is something else, or needs arguments.
    """
    path, _, factory = name.partition(":")
    if not path or path.startswith("."):
        raise ValueError(f"{name!r} names no module")
    if not factory:
        raise ValueError(f"{name!r} names a module alone")
    sys.path.insert(0, "")
    try:
        made: Any = attrgetter(factory)(import_module(path))
    finally:
        sys.path.pop(0)
    if isinstance(made, Module):
        return made
    if not callable(made):
        raise ValueError(f"{name} is no function, but a {type(made).__name__}")
    missing = _needed(made)
    if missing:
        raise ValueError(f"{name} needs the arguments {', '.join(missing)}")
    model = made()
    if not isinstance(model, Module):
        raise ValueError(f"{name} returns no torch.nn.Module, but a {type(model).__name__}")
    return model


def _needed(factory: Callable[..., Any]) -> list[str]:
    """Return the names of arguments that have to be given."""
    try:
        parameters = signature(factory).parameters.values()
    except (TypeError, ValueError):  # nothing is known of some functions of C
        return []
    optional = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m backpack", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="support")
    about = "which modules have rules, for every extension"
    support_of = commands.add_parser("support", help=about, description=about)
    support_of.add_argument(
        "model", nargs="?", metavar="module:factory", help="default: all modules of torch"
    )
    options = parser.parse_args()
    if options.command is None:
        print(versions())
    elif options.model is None:
        print(support.report())
    else:
        try:
            model = load(options.model)
        except (ImportError, AttributeError, ValueError) as error:
            support_of.error(
                f"{error}. Give module:factory, an importable module and a function in it that "
                "returns the model, without arguments."
            )
        print(support.report_of(model))


if __name__ == "__main__":
    main()

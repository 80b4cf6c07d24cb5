"""``python -m backpack``: versions and devices; with ``support``, what works with a model."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import import_module
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
        ValueError: If that is something else.
    """
    path, _, factory = name.partition(":")
    sys.path.insert(0, "")
    try:
        made: Any = attrgetter(factory)(import_module(path))
    finally:
        sys.path.pop(0)
    model = made if isinstance(made, Module) else made()
    if not isinstance(model, Module):
        raise ValueError(f"{name} is no torch.nn.Module, but {type(model).__name__}.")
    return model


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
            support_of.error(f"{error}. Give an importable module and a function in it.")
        print(support.report_of(model))


if __name__ == "__main__":
    main()

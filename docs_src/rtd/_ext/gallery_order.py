"""The order of the examples: a folder of the gallery for each group."""

from __future__ import annotations

import shutil
import textwrap
import warnings
from pathlib import Path
from typing import Any

import torch

# group -> scripts of docs_src/examples, in the order in which they are shown
GROUPS = {
    "First steps": ("all_extensions", "demo_digits"),
    "Gradients of samples": (
        "individual_gradients",
        "batched_jacobians",
        "gradient_of_variance",
        "signal_to_noise",
        "differential_privacy",
    ),
    "Curvature": (
        *("ggn_spectrum", "ggn_directions", "spectral_density", "ntk"),
        *("trace_estimation", "newton_cg"),
        *("ekfac", "pruning", "laplace", "influence"),
    ),
    "Optimisers": ("optimiser_diag_ggn", "optimiser_kfac", "distributed_training"),
    "Networks": ("resnet", "transformer", "wide_resnet", "character_rnn"),
    "Own modules": ("custom_module_first_order", "custom_module_second_order"),
    "In your program": (
        "subsampling",
        "extension_hook",
        "retain_graph",
        "logging_quantities",
        "training_dashboard",
        "lightning_training",
    ),
}
ORDER = [name for names in GROUPS.values() for name in names]


class Position:
    """Sort key of a script."""

    def __init__(self, src_dir: str):
        """Accept the folder, which does not matter."""

    def __call__(self, filename: str) -> int:
        """Return the position in the list."""
        return ORDER.index(Path(filename).stem)


def reset(gallery_conf: Any, filename: str) -> None:
    """Undo what a program has set in the process, which others run in as well."""
    torch.set_default_dtype(torch.float32)
    warnings.formatwarning = without_place
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")  # of Lightning by torch


def without_place(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Write a warning in lines that a page has room for, without files of whoever builds it."""
    return textwrap.fill(f"{category.__name__}: {message}", 90) + "\n"


def sort_into_groups(examples: Path, target: Path) -> None:
    """Copy the scripts into one folder for each group."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "GALLERY_HEADER.rst").write_text(HEADER, encoding="utf-8")
    for i, (title, names) in enumerate(GROUPS.items(), 1):
        folder = target / f"{i}_{title.lower().replace(' ', '_')}"
        folder.mkdir()
        header = f"{title}\n{'-' * len(title)}\n"
        (folder / "GALLERY_HEADER.rst").write_text(header, encoding="utf-8")
        for name in names:
            shutil.copy2(examples / f"{name}.py", folder)


HEADER = """\
Examples
========

Programs to start from. Each runs on data that comes with a package, ends with a picture or a table,
and checks what it claims.
"""

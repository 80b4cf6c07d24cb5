"""Tensors in files: of ``safetensors`` if that is installed, else of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_METADATA = "metadata"


def save_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors and strings by name to a file, which is there as a whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    own = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    try:
        from safetensors.torch import save_file
    except ImportError:
        torch.save({"tensors": own, _METADATA: dict(metadata)}, unfinished)
    else:
        save_file(own, unfinished, dict(metadata))
    unfinished.replace(path)


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what :func:`save_tensors` has written, with either library: tensors on the CPU, strings.

    Raises:
        ImportError: If the file is of ``safetensors``, which is not installed.
    """
    with open(path, "rb") as file:  # whatever its name says
        if file.read(4) == b"PK\3\4":  # the other library begins with the length of its header
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
            return content["tensors"], content[_METADATA]
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            f"{path} was written with safetensors. Install it: `pip install safetensors`."
        ) from error
    with safe_open(path, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return tensors, opened.metadata() or {}

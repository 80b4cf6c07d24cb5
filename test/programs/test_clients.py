"""Published libraries that build on this interface compute with this version what they did before.

Each is installed in a directory of its own, with version 1.7.1 in another, and run with both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from apart import run

import backpack

OURS = Path(backpack.__file__).parent.parent
BEFORE = ("backpack-for-pytorch==1.7.1", "einops", "unfoldNd")
# What each needs besides what the tests need. Their own requirements would bring another torch.
CLIENTS = {
    "laplace": (
        *("laplace-torch==0.3", "asdfghjkl==0.1a4", "curvlinops-for-pytorch==3.0.1"),
        *("einops", "unfoldNd", "einconv", "linear_operator", "jaxtyping", "wadler-lindig"),
        "opt-einsum",
    ),
    "vivit": ("vivit-for-pytorch==1.0.0", "einops"),
    "cockpit": (
        *("cockpit-for-pytorch==1.0.2", "json_tricks", "pandas", "seaborn", "python-dateutil"),
        *("six", "tzdata", "pytz", "einops", "setuptools<81"),
    ),
}


def install(packages: tuple[str, ...], target: Path) -> None:
    """Install packages in a directory, as they are."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run([*command, str(target), *packages], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {packages[0]} here: {done.stderr[-300:]}")


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_library_runs_unchanged(client: str, tmp_path: Path) -> None:
    install(CLIENTS[client], tmp_path / "client")
    install(BEFORE, tmp_path / "before")
    found = []
    for version in (OURS, tmp_path / "before"):
        path = os.pathsep.join(map(str, (version, tmp_path / "client")))
        program, file = Path(__file__).with_name("clients.py"), tmp_path / "numbers.pt"
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        output = run(sys.executable, program, client, file, env=environment, cwd=tmp_path)
        assert Path(output.split()[-1]).is_relative_to(version)
        found.append(torch.load(file))
    ours, theirs = found
    assert ours.keys() == theirs.keys() and ours
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-7, atol=1e-9, msg=name)

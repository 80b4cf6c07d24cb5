"""The peers, each in a directory of its own, with the environment's torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmark" / ".peers"


@dataclass(frozen=True)
class Peer:
    """A library that is measured.

    Args:
        title: Its name in tables.
        packages: What is installed for it. Their dependencies are not: torch, numpy, scipy and tqdm
            are those of the environment.
    """

    title: str
    packages: tuple[str, ...] = ()


UPSTREAM = ("backpack-for-pytorch==1.7.1", "einops", "unfoldNd")
PEER = {
    "backpack": Peer("this library"),
    "upstream": Peer("backpack 1.7.1", UPSTREAM),
    "vmap": Peer("torch.func vmap"),
    "loop": Peer("for-loop"),
    "opacus": Peer("opacus 1.6.0", ("opacus==1.6.0", "opt-einsum")),
    "curvlinops": Peer(
        "curvlinops 3.0.1",
        (
            "curvlinops-for-pytorch==3.0.1",
            *UPSTREAM,
            *("einconv", "linear_operator", "jaxtyping", "wadler-lindig", "opt-einsum"),
        ),
    ),
}


# what they are compared with in benchmark.families
FAMILY_PEER = {
    "kronfluence": Peer(
        "kronfluence 1.0.1",
        (
            "kronfluence==1.0.1",
            *("accelerate", "safetensors", "einops", "einconv", "opt-einsum", "psutil"),
            *("packaging", "pyyaml", "huggingface_hub"),
        ),
    ),
    "nngeometry": Peer("nngeometry 0.4", ("nngeometry==0.4",)),
    "dattri-llm": Peer("dattri-llm 0.1.0", ("dattri-llm==0.1.0",)),
    "laplace": Peer(
        "laplace-torch 0.3",
        ("laplace-torch==0.3", "asdfghjkl==0.1a4", *PEER["curvlinops"].packages),
    ),
}
EVERY_PEER = PEER | FAMILY_PEER


def directory(library: str) -> Path:
    """Return where a library is imported from."""
    return PEERS / library if EVERY_PEER[library].packages else ROOT


def install(library: str) -> str | None:
    """Install a peer unless it is there; return why it is absent, if it is."""
    packages, target = EVERY_PEER[library].packages, directory(library)
    stamp = target / "packages.txt"
    if not packages or (stamp.exists() and stamp.read_text().split() == [*packages]):
        return None
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    done = subprocess.run(
        [*command, "--target", str(target), *packages], capture_output=True, text=True
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return f"could not be installed: {(lines or ['ERROR: pip failed'])[-1][7:]}"
    stamp.write_text("\n".join(packages))
    return None

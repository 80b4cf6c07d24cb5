"""What is built from the sources, and that it works where nothing but torch is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from configparser import ConfigParser
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
from apart import run

import backpack

ROOT = Path(__file__).parents[1]
# what is built, and what git ignores in it
SOURCES = [
    "backpack",
    "test",
    "benchmark",
    "docs_src",
    "*.md",
    "*.cff",
    "*.toml",
    "setup.*",
    "LICENSE",
    "MANIFEST.in",
    "makefile",
]
GENERATED = shutil.ignore_patterns("__pycache__", ".peers", "_build", "gallery", "generated")
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""


# What takes long to import, or is not torch's: whoever needs it imports it then.
HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.onnx",
    "torch.utils.tensorboard",
    "functorch",
    "backpack.linalg",
    "backpack.monitor",
    "backpack.optim",
    "backpack.support",
)
IMPORT = """
import sys
import torch
before = set(sys.modules)
import backpack, backpack.extensions, backpack.core.derivatives
print(*(set(sys.modules) - before))
"""


def test_import_brings_nothing_heavy() -> None:
    """What torch has not imported is ours, of Python itself, or small."""
    names = run(sys.executable, "-c", IMPORT, cwd=ROOT).split()
    assert "backpack.core.engine.backpropagation" in names
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert packages <= {"backpack", "torch"}
    assert not [name for name in names if name.startswith(HEAVY)]


def test_torch_is_enough() -> None:
    """PyTorch does not install NumPy."""
    script = """
import sys

class Finder:
    def find_spec(self, name, *others):
        if name.partition(".")[0] in ("numpy", "scipy", "tqdm", "tabulate", "matplotlib"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Finder())

import torch
from torch import nn
from backpack import backpack, extend
from backpack.extensions import BatchGrad, DiagGGNExact, KFAC

class Noise(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x)

lossfunc = extend(nn.MSELoss())
for route in (False, "trace", "record"):
    noise = [] if route != "record" else [Noise()]
    model = extend(nn.Sequential(nn.Linear(3, 2), *noise, nn.ReLU()), use_converter=route)
    with backpack(BatchGrad(), DiagGGNExact(), KFAC()):
        lossfunc(model(torch.rand(4, 3)), torch.rand(4, 2)).backward()
    print(*(list(p.grad_batch.shape) for p in model.parameters()))
"""
    assert run(sys.executable, "-c", script) == "[4, 2, 3] [4, 2]\n" * 3


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution from a copy of the sources, without the network."""
    copy = tmp_path_factory.mktemp("sources")
    for path in (path for pattern in SOURCES for path in ROOT.glob(pattern)):
        if path.is_dir():
            shutil.copytree(path, copy / path.name, ignore=GENERATED)
        else:
            shutil.copy(path, copy)
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", BUILD, "build_sdist", out, cwd=copy)
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from what is in the source distribution, as an index's users do."""
    unpacked, out = tmp_path_factory.mktemp("unpacked"), tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (folder,) = unpacked.iterdir()
    run(sys.executable, "-c", BUILD, "build_wheel", out, cwd=folder)
    (archive_path,) = out.iterdir()
    return archive_path


def modules() -> set[str]:
    """List the files of the package, relative to the root."""
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "backpack").rglob("*.py")}


@pytest.mark.slow
def test_sdist_is_complete(sdist: Path) -> None:
    """It has the package, the tests with all that they import, the examples, and who to cite."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "test").glob("*.py")}
    scripts = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "docs_src" / "examples").glob("*.py")
    }
    files = {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "makefile"}
    assert modules() | tests | scripts | files | {"backpack/py.typed"} <= names
    assert not [name for name in names if name.endswith(".pyc")]


@pytest.mark.slow
def test_wheel_is_the_package_alone(wheel: Path) -> None:
    """It has every module, the marker of its types, and torch as its only dependency."""
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(metadata_name))
    info = metadata_name.partition("/")[0]
    package = {name for name in names if not name.startswith(f"{info}/")}
    assert package == modules() | {"backpack/py.typed"}
    assert f"{info}/licenses/LICENSE" in names

    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert metadata["Version"] == backpack.__version__
    requirements = metadata.get_all("Requires-Dist", [])
    assert [r for r in requirements if "extra ==" not in r] == ["torch>=2.6"]
    # an index has no files beside the description
    description = str(metadata.get_payload())
    assert "per-sample gradients" in description
    targets = re.findall(r"\]\(([^)]*)\)|^\[\w+\]: (.*)$", description, re.M)
    assert all("".join(target).startswith("https://") for target in targets)
    assert not re.search(r"\]\[\w+\]", description)
    assert set(config["options.extras_require"]) == set(metadata.get_all("Provides-Extra", []))


@pytest.mark.slow
def test_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment that sees the installed torch, the package is that of the wheel."""
    environment = tmp_path / "venv"
    venv.create(environment)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    # also what is on the path of modules already, such as an editable install of this repository
    run(*pip, "install", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=tmp_path)
    (site,) = environment.glob("lib/python*/site-packages")
    # after its own folder, and without what an editable install would add
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-I", "-c", "import backpack; print(backpack.__file__)", cwd=tmp_path)
    assert Path(where.strip()) == site / "backpack" / "__init__.py"
    report = run(python, "-I", "-m", "backpack.support", "--summary", cwd=tmp_path)
    assert "Conv1d" in report
    assert "closed form" in report
    run(python, "-I", "-c", "from backpack.monitor import Monitor", cwd=tmp_path)


PROGRAM = """\
import torch
from torch import nn

from backpack import backpack, extend, results_of
from backpack.extensions import BatchGrad

class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def name(self) -> str:
        return "model"

model = extend(Model())
reveal_type(model)
reveal_type(extend(nn.MSELoss()))
reveal_type(extend(Model(), use_converter="record"))
reveal_type(extend(Model(), use_converter=True))
reveal_type(model.name())
with backpack(BatchGrad()):
    model.layer(torch.rand(5, 3)).sum().backward()
reveal_type(results_of(model.layer.weight).grad_batch)
reveal_type(results_of(model.layer.weight).kfac)
reveal_type(results_of(model.layer.weight).of_my_own)
extend(3)
"""


@pytest.mark.slow
def test_type_checkers_see_an_editable_install(sdist: Path, tmp_path: Path) -> None:
    """In an environment of its own, as a program that uses the library would be checked."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sources", filter="data")
    (folder,) = (tmp_path / "sources").iterdir()
    environment = tmp_path / "venv"
    venv.create(environment)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    metadata = folder / "metadata"
    metadata.mkdir()
    build = BUILD.replace("(sys.argv[2])", "(sys.argv[2], metadata_directory=None)")
    run(sys.executable, "-c", build, "build_editable", metadata, cwd=folder)
    (wheel,) = metadata.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", python)
    # also what is on the path of modules already, such as an editable install of this repository
    run(*pip, "install", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=tmp_path)
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
    # else the package would be found from the installed library, which torch.pth leads to
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", python, program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    revealed = re.findall(r'Revealed type is "([^"]*)"', done.stdout)
    assert [name.removeprefix("builtins.") for name in revealed] == [
        "program.Model",
        "torch.nn.modules.loss.MSELoss",
        "program.Model",
        "torch.nn.modules.module.Module",
        "str",
        "torch._tensor.Tensor",
        "list[torch._tensor.Tensor]",
        "Any",
    ], done.stdout
    (error,) = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert 'No overload variant of "extend"' in error

"""What is built from the sources, and that it works where nothing but torch is installed."""

from __future__ import annotations

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


def run(*command: object, cwd: Path) -> str:
    """Run a program; return what it prints, and fail with what it prints on errors."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    assert metadata["Version"] == config["metadata"]["version"]
    requirements = metadata.get_all("Requires-Dist", [])
    assert [r for r in requirements if "extra ==" not in r] == ["torch>=2.11"]
    assert set(config["options.extras_require"]) == set(metadata.get_all("Provides-Extra", []))


@pytest.mark.slow
def test_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment that sees the installed torch, the package is that of the wheel."""
    environment = tmp_path / "venv"
    venv.create(environment)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = environment.glob("lib/python*/site-packages")
    # after its own folder, and without what an editable install would add
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-I", "-c", "import backpack; print(backpack.__file__)", cwd=tmp_path)
    assert Path(where.strip()) == site / "backpack" / "__init__.py"
    report = run(python, "-I", "-m", "backpack.support", "--summary", cwd=tmp_path)
    assert "Conv1d" in report
    assert "closed form" in report
    run(python, "-I", "-c", "from backpack.monitor import Monitor", cwd=tmp_path)

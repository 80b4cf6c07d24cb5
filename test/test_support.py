"""The support matrix: it has no gaps, it is printed, and it claims nothing that does not run."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from apart import run
from cases import CASES, Case, select
from torch import Tensor, nn

from backpack import backpack, extend, extensions, support
from backpack.__main__ import main
from backpack.core.derivatives import (
    REGISTRY,
    BaseDerivatives,
    BaseLossDerivatives,
    RefusedDerivatives,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.support import BEGIN, END, Support, all_extensions, report_of, support_matrix
from backpack.utils.kroneckers import EigenKronecker

ROOT = Path(__file__).parents[1]

# Issue 2, section 3. `names("Conv", 3)` are Conv1d, Conv2d and Conv3d.


def names(stem: str, dimensions: int = 3) -> list[str]:
    return [f"{stem}{d}d" for d in range(1, dimensions + 1)]


PROMISED = [
    *["Linear", *names("Conv"), *names("ConvTranspose"), *names("BatchNorm")],
    *[*names("MaxPool"), *names("AvgPool"), *names("AdaptiveAvgPool"), *names("AdaptiveMaxPool")],
    *["ReLU", "LeakyReLU", "ELU", "SELU", "Sigmoid", "Tanh", "LogSigmoid"],
    *["Dropout", *names("Dropout"), "AlphaDropout", "FeatureAlphaDropout"],
    *["Flatten", "Unflatten", "Identity", *names("ZeroPad"), *names("ConstantPad")],
    *["MSELoss", "CrossEntropyLoss", "BCEWithLogitsLoss"],
]
REGISTERED = [cls for cls in REGISTRY if cls.__module__.startswith(("torch.", "backpack."))]
# those that test/cases.py has; all losses are in test_losses.py
IN_CASES = [
    cls
    for cls in REGISTERED
    if (not isinstance(REGISTRY[cls], BaseLossDerivatives) or cls.__name__ in PROMISED)
    and not isinstance(REGISTRY[cls], RefusedDerivatives)
]
AVOIDED = ["rows", "unknown", "frozen", "mixing", "dag"]  # if there is another case


def contains(case: Case, cls: type[nn.Module]) -> bool:
    problem = case.build()
    return any(type(m) is cls for part in (problem.model, problem.loss) for m in part.modules())


def find_case(cls: type[nn.Module]) -> Case:
    """Return a simple case with the module; one that is named after it, where there is one."""
    candidates = sorted(
        CASES,
        key=lambda case: (
            not case.name.startswith(f"{cls.__name__}("),
            not case.tags.isdisjoint(AVOIDED),
            not case.train,
        ),
    )
    for case in candidates:
        if contains(case, cls):
            return case
    pytest.fail(f"test/cases.py has no case with {cls.__name__}.")


def run_one(case: Case, ext: BackpropExtension) -> None:
    """Run one extension; it has to save something sensible for every parameter."""
    problem = case.build()
    model, lossfunc = extend(problem.model), extend(problem.loss)
    torch.manual_seed(0)
    loss = lossfunc(model(problem.X), problem.y)
    with backpack(ext):
        loss.backward()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert parameters
    for p in parameters:
        value: Any = getattr(p, ext.savefield)
        if callable(value):
            value = value(torch.ones(1, *p.shape, dtype=p.dtype))
        if isinstance(value, EigenKronecker):
            value = [*value.bases, value.eigenvalues]
        for tensor in value if isinstance(value, list) else [value]:
            assert tensor.isfinite().all()


@pytest.mark.parametrize("name", PROMISED)
def test_no_gaps(name: str) -> None:
    row = support_matrix()[getattr(nn, name)]
    assert {ext.__name__ for ext in row} == {*extensions.__all__}
    assert set(row.values()) <= {Support.CLOSED_FORM, Support.NOT_NEEDED}


@pytest.mark.slow
@pytest.mark.parametrize("cls", IN_CASES, ids=lambda cls: cls.__name__)
def test_what_the_matrix_claims_runs(cls: type[nn.Module]) -> None:
    case, row = find_case(cls), support_matrix()[cls]
    assert "mixing" not in case.tags
    for ext in all_extensions():
        assert row[type(ext)] in (Support.CLOSED_FORM, Support.AUTOMATIC, Support.NOT_NEEDED)
        run_one(case, ext)


@pytest.mark.parametrize("ext", all_extensions(), ids=lambda ext: type(ext).__name__)
@pytest.mark.parametrize("case", select("mixing", "module")[:4], ids=str)
def test_what_is_undefined_raises(case: Case, ext: BackpropExtension) -> None:
    """Batch normalisation in training mode, as the footnote says."""
    row = support_matrix(mixing=True)[nn.BatchNorm1d]
    expected: Any = nullcontext()
    if row[type(ext)] is Support.UNDEFINED:
        expected = pytest.raises((NotImplementedError, ValueError))
    elif not ext.expects_backpropagation_quantities():
        expected = pytest.warns(UserWarning, match="mixes the samples")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with expected:
            run_one(case, ext)


def test_incomplete_derivatives_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(nn.Linear):
        pass

    class HalfDerivatives(BaseDerivatives):
        """Without a product that goes on, and without a second derivative that is diagonal."""

        params = ("weight", "bias")

        def hessian_is_zero(self, module: nn.Module) -> bool:
            return False

        def hessian_is_diagonal(self, module: nn.Module) -> bool:
            return True

        def vjp(self, *args: Any) -> Any: ...
        def weight_vjp(self, *args: Any) -> Any: ...
        def bias_vjp(self, *args: Any) -> Any: ...

    def missing(rule: type[BaseDerivatives]) -> set[type]:
        monkeypatch.setitem(REGISTRY, Half, rule())
        return {e for e, cell in support_matrix()[Half].items() if cell is Support.MISSING}

    hessians = {extensions.DiagHessian, extensions.BatchDiagHessian}
    assert missing(HalfDerivatives) == {*hessians, extensions.HMP, extensions.PCHMP}

    class OldForm(BaseDerivatives):
        """Without one of the parameters, in the form of earlier versions."""

        params = ("weight", "bias")

        def _jac_t_mat_prod(self, *args: Any) -> Any: ...
        def _weight_jac_t_mat_prod(self, *args: Any) -> Any: ...

    assert missing(OldForm) == {type(ext) for ext in all_extensions()}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Scale(), nn.Linear(3, 3))
        self.token = nn.Parameter(torch.ones(3))
        self.encoder = nn.TransformerEncoderLayer(4, 2)


def test_report_of_a_model() -> None:
    report, evaluated = report_of(Net()), report_of(Net().eval())
    # a long name has a line of its own
    table, other = (re.sub(r"( x\d+)\n +", r"\1 ", r.split("\n\n")[2]) for r in (report, evaluated))
    lines = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    count = len(extensions.__all__)
    assert lines["Linear"] == ["x4", *["+"] * count]
    assert lines["Scale"] == ["x1", *["~"] * count]
    assert lines["TransformerEncoderLayer"] == ["x1", *["*"] * count]
    assert set(lines["BatchNorm1d"]) == {"x1", "+", "-"}
    assert set(other.split("BatchNorm1d x1")[1].splitlines()[0]) == {" ", "+"}
    assert "would be faster: body.2 (Scale)." in report
    assert "mixes the samples of a batch in body.1 (BatchNorm1d)" in " ".join(report.split())
    assert "body.1" not in evaluated
    assert "The model (Net) uses parameters of its own in functions (token)" in report
    assert max(map(len, report.splitlines())) <= 80


def test_report_of_one_module() -> None:
    assert "Linear x1" in report_of(nn.Linear(2, 2))


def test_command_of_the_package() -> None:
    versions = command(module="backpack")
    for name in ("backpack", "torch", "Python", "devices", torch.__version__):
        assert name in versions
    assert "Identity x1" in command("support", "torch.nn:Identity", module="backpack")
    assert command("support", module="backpack") == command()
    done = subprocess.run(
        [sys.executable, "-m", "backpack", "support", "torch.nn:nothing"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "has no attribute 'nothing'. Give module:factory" in done.stderr


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("torch", "'torch' names a module alone."),
        ("torch:", "'torch:' names a module alone."),
        (":Identity", "':Identity' names no module."),
        (".nn:Identity", "'.nn:Identity' names no module."),
        ("no_such_module:model", "No module named 'no_such_module'."),
        ("torch:nn", "torch:nn is no function, but a module."),
        ("torch.nn:Linear", "torch.nn:Linear needs the arguments in_features, out_features."),
        ("builtins:list", "builtins:list returns no torch.nn.Module, but a list."),
    ],
)
def test_command_for_what_makes_no_model(
    name: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["backpack", "support", name])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{problem} Give module:factory, an importable module and a function in it" in told


@cache
def command(*options: str, module: str = "backpack.support") -> str:
    """Run in a process of its own: tests register modules too."""
    return run(sys.executable, "-m", module, *options, cwd=ROOT)


def test_command_prints_every_registered_class() -> None:
    plain, markdown, summary = command(), command("--markdown"), command("--summary")
    assert max(map(len, plain.splitlines())) <= 80
    for cls in REGISTERED:
        assert any(
            line.split()[:1] == [cls.__name__] for line in plain.replace("¹", "").split("\n")
        )
        assert f"| {cls.__name__}" in markdown
    for name in ("Linear", "Conv1d/2d/3d", "MSELoss"):
        assert name in summary
    for name in extensions.__all__:
        assert name in plain
        assert f"| {name} |" in markdown


@pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyLoss"),
    reason="the README was written with a newer version of torch, which has more modules",
)
def test_readme_is_up_to_date(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    copy = tmp_path / "README.md"
    copy.write_text(readme, encoding="utf-8")
    command("--write", str(copy))
    assert copy.read_text(encoding="utf-8") == readme, (
        "Run `python -m backpack.support --write README.md`."
    )


def test_command_writes_between_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"Äbove\n{BEGIN}\nold\n{END}\nbelow\n", encoding="utf-8")
    command("--write", str(file))
    section = command("--markdown", "--summary")
    assert file.read_text(encoding="utf-8") == f"Äbove\n{BEGIN}\n{section}{END}\nbelow\n"


@pytest.mark.parametrize(
    "text", ["", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", 2 * f"{BEGIN}\n{END}\n", f"{BEGIN} {END}"]
)
def test_command_refuses_a_file_without_the_marks(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.md"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["support", "--write", str(file)])
    with pytest.raises(SystemExit):
        support.main()
    assert "needs a line" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "part", [nn.Sequential(), nn.ModuleList(), nn.ParameterList([torch.ones(3)])], ids=type
)
def test_report_leaves_out_what_is_not_called(part: nn.Module) -> None:
    """A residual connection without layers is ``nn.Sequential()``; lists hold what others call."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.part = nn.Linear(3, 3), part

    report = report_of(Holder())
    assert f"{type(part).__name__} x" not in report and "Linear x1" in report
    assert "would be faster" not in report
    assert ("functions (part.0)" in report) == bool(list(part.parameters()))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_report_of_a_scripted_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 2)))
    report = " ".join(report_of(model).split())
    assert "1 (RecursiveScriptModule) was made by torch.jit and cannot be extended" in report
    assert "RecursiveScriptModule x" not in report and "Linear x1" in report


class OwnSequence(nn.Sequential):
    """A container of torch with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, 3]."""
        return x


def test_report_of_containers_with_a_forward_of_their_own() -> None:
    text = report_of(
        nn.Sequential(OwnSequence(), nn.Sequential(), nn.ModuleList([nn.Linear(2, 2)]))
    )
    assert "OwnSequence x1" in text and "Linear x1" in text
    assert "\nSequential x1" not in text and "ModuleList" not in text

"""Logged quantities: their values, where they are written, and what is said if they are missing."""

from __future__ import annotations

import copy
import csv
import math
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, monitor
from backpack.extensions import GGNMP, KFAC, BatchGrad, BatchL2Grad, Variance
from backpack.monitor import CSVWriter, Monitor, gradient_snr, plot_histograms

matplotlib.use("Agg")
N = 6


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())


def backward(model: nn.Module, *extensions: Any) -> Tensor:
    """Compute quantities of a random batch and return its loss."""
    X, y = torch.randn(N, 3, dtype=torch.float64), torch.randint(2, (N,))
    model.zero_grad()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(*extensions):
        loss.backward()
    return loss


def read(path: Path) -> dict[tuple[int, str], float]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    values = {(int(row["step"]), row["tag"]): float(row["value"]) for row in rows}
    assert len(values) == len(rows)  # nothing is written twice
    return values


def test_csv_has_the_values(model: Any, tmp_path: Path) -> None:
    """All reductions of each parameter and of all of them, to the last digit."""
    path = tmp_path / "folder" / "log.csv"
    metrics = ["grad.norm", "variance.mean", "variance.sum", "grad.min", "grad.max", "grad.q5"]
    expected = {}
    with Monitor(model, metrics, CSVWriter(path)) as monitor:
        for step in range(3):
            loss = backward(model, Variance())
            monitor.step(loss=loss)
            expected[step, "loss"] = loss.item()
            gradients = {f"/{name}": p.grad.flatten() for name, p in model.named_parameters()}
            variances = {f"/{name}": p.variance.flatten() for name, p in model.named_parameters()}
            for values in (gradients, variances):
                values[""] = torch.cat(list(values.values()))
            for name, grad in gradients.items():
                expected[step, f"grad.norm{name}"] = grad.square().sum().sqrt().item()
                expected[step, f"grad.min{name}"] = grad.sort().values[0].item()
                expected[step, f"grad.max{name}"] = grad.sort().values[-1].item()
                expected[step, f"grad.q5{name}"] = grad.quantile(0.05).item()
            for name, variance in variances.items():
                total = sum(variance.tolist())
                expected[step, f"variance.sum{name}"] = total
                expected[step, f"variance.mean{name}"] = total / len(variance)
            assert read(path) == pytest.approx(expected, rel=1e-13)  # lines are there at once


def test_every_so_many_steps(model: Any, tmp_path: Path) -> None:
    """Extensions are needed in those steps only; another run goes on with the file."""
    path = tmp_path / "log.csv"
    for append in (False, True):
        with Monitor(model, ["variance.mean"], CSVWriter(path, append), every=3) as monitor:
            monitor.steps = 7 * append
            for _ in range(7):
                backward(model, *[Variance()] * monitor.due)
                monitor.step()
                for p in model.parameters():
                    vars(p).pop("variance", None)
        assert monitor.steps == 7 * append + 7
    assert {step for step, _ in read(path)} == {0, 3, 6, 9, 12}
    assert path.read_text().count("step,tag,value") == 1


def test_histograms_in_a_csv(model: Any, tmp_path: Path) -> None:
    """An attribute alone is written as percentiles."""
    with Monitor(model, ["grad"], CSVWriter(tmp_path / "log.csv")) as monitor:
        backward(model)
        monitor.step()
    values = read(tmp_path / "log.csv")
    assert len(values) == 5 * 5
    weight = model[0].weight.grad.flatten()
    for percent in (0, 25, 50, 75, 100):
        expected = weight.quantile(percent / 100).item()
        assert values[0, f"grad/0.weight/q{percent}"] == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_snr(model: Any, tmp_path: Path, reduction: str) -> None:
    """The ratio is that of the individual gradients, whatever their scale."""
    X, y = torch.randn(N, 3, dtype=torch.float64), torch.randint(2, (N,))
    with backpack(BatchGrad(), BatchL2Grad()):
        extend(nn.CrossEntropyLoss(reduction=reduction))(model(X), y).backward()
    with Monitor(model, [gradient_snr], CSVWriter(tmp_path / "log.csv")) as monitor:
        monitor.step()
    values = read(tmp_path / "log.csv")

    def ratio(gradients: Tensor) -> float:
        mean = gradients.mean(0)
        return (mean.square().sum() / (gradients - mean).square().sum(1).mean()).item()

    gradients = {name: p.grad_batch.flatten(1) for name, p in model.named_parameters()}
    for name, gradient in gradients.items():
        assert values[0, f"gradient_snr/{name}"] == pytest.approx(ratio(gradient), rel=1e-9)
    together = ratio(torch.cat(list(gradients.values()), dim=1))
    assert values[0, "gradient_snr"] == pytest.approx(together, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradient_snr_in_half_precision(dtype: torch.dtype) -> None:
    """A sum of many squares is larger than half precision holds."""
    torch.manual_seed(0)
    model: nn.Module = extend(nn.Linear(10, 5).to(dtype))
    X, y = torch.randn(200, 10).to(dtype), (2 * torch.randn(200, 5) + 1).to(dtype)
    with backpack(BatchL2Grad()):
        extend(nn.MSELoss(reduction="sum"))(model(X), y).backward()
    twin = copy.deepcopy(model).double()
    losses = (twin(X.double()) - y.double()).square().sum(1)
    each = [
        torch.autograd.grad(loss, list(twin.parameters()), retain_graph=True) for loss in losses
    ]
    gradients = torch.stack([torch.cat([g.flatten() for g in own]) for own in each])
    mean = gradients.mean(0)
    expected = mean.square().sum() / (gradients - mean).square().sum(1).mean()
    torch.testing.assert_close(
        gradient_snr(model.parameters()).double(), expected, rtol=2e-2, atol=0
    )


@pytest.mark.parametrize("count", [1, 4])
def test_gradient_snr_without_noise(count: int) -> None:
    """Samples that are all alike have a large ratio, or an infinite one, but no negative one."""
    loss_function = extend(nn.CrossEntropyLoss())
    for seed in range(20):
        torch.manual_seed(seed)
        net = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
        X, y = torch.randn(1, 3).expand(count, 3), torch.zeros(count, dtype=torch.long)
        with backpack(BatchL2Grad()):
            loss_function(net(X), y).backward()
        assert gradient_snr(list(net.parameters())) > 1e5


def test_gradient_snr_of_some_samples(model: Any) -> None:
    """The gradient is that of all of them."""
    backward(model, BatchL2Grad(subsampling=[0, 1]))
    with pytest.raises(ValueError, match="computed with subsampling"):
        gradient_snr(list(model.parameters()))


def test_own_metric(model: Any, tmp_path: Path) -> None:
    """A function of parameters gives a number or a histogram; frozen parameters are left out."""

    def trace(params: Any) -> Tensor:
        return sum(p.kfac[0].trace() for p in params)

    def norms(params: Any) -> Tensor:
        return torch.stack([p.norm() for p in params])

    def count(params: Any) -> int:
        return sum(p.numel() for p in params)

    model[0].weight.requires_grad_(False)
    with Monitor(model, [trace, norms, count], CSVWriter(tmp_path / "log.csv")) as monitor:
        backward(model, KFAC())
        monitor.step()
    values = read(tmp_path / "log.csv")
    traces = [p.kfac[0].trace().item() for p in model.parameters() if p.requires_grad]
    assert len(traces) == 3
    assert values[0, "trace"] == pytest.approx(sum(traces), rel=1e-12)
    assert values[0, "trace/2.bias"] == pytest.approx(traces[-1], rel=1e-12)
    assert (0, "trace/0.weight") not in values
    assert values[0, "count"] == 4 + 8 + 2
    assert values[0, "norms/q100"] == max(p.norm() for p in list(model.parameters())[1:])


def test_tensorboard(model: Any, tmp_path: Path) -> None:
    """The files of TensorBoard have the same numbers, and a histogram of all entries."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    with Monitor(model, ["grad.norm", "grad"], writer) as monitor:
        norms = []
        for _ in range(2):
            loss = backward(model)
            monitor.step(loss=loss)
            norms.append(model[0].weight.grad.norm().item())
    events = EventAccumulator(str(tmp_path)).Reload()
    names = [f"/{name}" for name, _ in model.named_parameters()]
    assert set(events.Tags()["scalars"]) == {"loss", "grad.norm", *(f"grad.norm{n}" for n in names)}
    assert set(events.Tags()["histograms"]) == {"grad", *(f"grad{n}" for n in names)}
    logged = [(e.step, e.value) for e in events.Scalars("grad.norm/0.weight")]
    assert logged == [(i, pytest.approx(norm, rel=1e-6)) for i, norm in enumerate(norms)]
    assert events.Histograms("grad")[0].histogram_value.num == 4 * 3 + 4 + 2 * 4 + 2


def test_errors_say_what_to_do(model: Any, tmp_path: Path) -> None:
    """Unknown reductions are found at once; missing attributes name the extension to use."""
    writer = CSVWriter(tmp_path / "log.csv")
    with pytest.raises(ValueError, match=r"grad\.media.*mean.*q0 to q100"):
        Monitor(model, ["grad.media"], writer)
    with pytest.raises(ValueError, match="two metrics with the name grad"):
        Monitor(model, ["grad", "grad"], writer)
    with pytest.raises(ValueError, match=r"1 .* or more, but not 0"):
        Monitor(model, ["grad.norm"], writer, every=0)
    with pytest.raises(ValueError, match=r"a whole number, .* but not 1\.5"):
        Monitor(model, ["grad.norm"], writer, every=1.5)  # type: ignore[arg-type]
    Monitor(model, ["grad.norm"], writer, every=math.inf)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"CSVWriter\(path\) .*got 'log.csv'"):
        Monitor(model, ["grad.norm"], "log.csv")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a function of parameters, got 3"):
        Monitor(model, ["grad.norm", 3], writer)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="Tanh has no parameter"):
        Monitor(model[1], ["grad.norm"], writer)

    with pytest.raises(AttributeError, match=r"0\.weight .* grad\. Call backward\(\) first"):
        Monitor(model, ["grad.norm"], writer).step()
    backward(model, GGNMP())
    for metric in ("variance.mean", lambda params: params[0].variance):
        with pytest.raises(AttributeError, match=r"0\.weight .*`with backpack\(Variance\(\)\)`"):
            Monitor(model, [metric], writer).step()
    with pytest.raises(TypeError, match=r"ggnmp .* no tensor"):
        Monitor(model, ["ggnmp.norm"], writer).step()
    backward(model)
    monitor = Monitor(model, [gradient_snr, "grad.norm"], writer)
    for name in ("gradient_snr", "grad.norm", "grad.norm/0.weight"):
        with pytest.raises(ValueError, match=f"given {name}, but there are metrics with that name"):
            monitor.step(**{name: 1.0, "loss": 2.0})
    with pytest.raises(AttributeError, match="'object' object has no attribute 'x'"):
        Monitor(model, [lambda params: object().x], writer).step()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"None of the parameters .*BatchL2Grad"):
        plot_histograms(model, "batch_l2")


@pytest.mark.parametrize("log", [False, True])
def test_plot_histograms(model: Any, log: bool) -> None:
    """A panel for each parameter that has the attribute, with all its entries."""
    backward(model)
    model[2].bias.grad = None
    model[0].bias.grad[1] = 0
    figure = plot_histograms(model, "grad", bins=7, log=log)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    titles = [axes.get_title(loc="left") for axes in panels]
    assert titles == ["0.weight", "0.bias (25% zero)" if log else "0.bias", "2.weight"]
    counts = [sum(bar.get_height() for bar in axes.patches) for axes in panels]
    assert counts == [12, 3 if log else 4, 8]
    plt.close(figure)


class Collected:
    """A writer that keeps nothing."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def add_scalar(self, *_: Any) -> None:
        if self.error is not None:
            raise self.error

    add_histogram = add_scalar

    def close(self) -> None:
        pass


def test_gradients_of_any_kind(tmp_path: Path) -> None:
    """Sums and norms of half precision that are too large for it, and sparse gradients."""
    model = nn.Embedding(300, 300, sparse=True).half()
    model.weight.grad = torch.full((300, 300), 300.0).half()
    with Monitor(model, ["grad.norm", "grad.sum"], CSVWriter(tmp_path / "log.csv")) as monitor:
        found = monitor.step()
        assert float(found["grad.norm"]) == pytest.approx(300 * 300, rel=1e-3)
        assert float(found["grad.sum"]) == pytest.approx(300 * 300 * 300, rel=1e-3)
        model.weight.grad = None
        model(torch.tensor([2, 2, 5])).float().sum().backward()
        assert model.weight.grad is not None and model.weight.grad.is_sparse
        found = monitor.step()
        assert float(found["grad.norm"]) == pytest.approx((300 * (2**2 + 1)) ** 0.5)


def test_parameters_without_entries_are_left_out(tmp_path: Path) -> None:
    model = nn.ParameterDict({"none": torch.zeros(0), "two": torch.tensor([1.0, 3.0])})
    sum(p.square().sum() for p in model.values()).backward()
    metrics = ["grad", "grad.min", "grad.mean", "grad.q50"]
    with Monitor(model, metrics, CSVWriter(tmp_path / "log.csv")) as monitor:
        found = monitor.step()
    assert [found[name].tolist() for name in metrics] == [[2, 6], 2, 4, 4]
    assert not any(tag.endswith("none") for tag in found)


def test_histograms_are_copies(model: Any) -> None:
    def entries(params: Any) -> Tensor:
        return params[0].grad.flatten()

    monitor = Monitor(model, [entries], Collected())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    found = monitor.step()
    model.zero_grad(set_to_none=False)
    assert found and all((value == 1).all() for value in found.values())


def test_a_step_that_cannot_be_written_counts(model: Any) -> None:
    def norm(params: Any) -> Tensor:
        return params[0].norm()

    monitor = Monitor(model, [norm], Collected(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        monitor.step()
    assert monitor.steps == 1


def test_quantities_of_an_earlier_step_are_told() -> None:
    model, loss = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    monitor = Monitor(model, ["variance.mean", "grad.norm"], Collected(), every=2)

    def step(*exts: Any) -> None:
        with backpack(*exts):
            loss(model(torch.rand(4, 3)), torch.rand(4, 2)).backward()
        monitor.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(Variance())
        step()
        step(Variance())
        step(Variance())
    with pytest.warns(UserWarning, match="variance is that of an earlier step") as caught:
        for _ in range(3):
            step(*[Variance()] if not monitor.due else [])
    assert {w.filename for w in caught} == {__file__}


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    """Percentiles of infinite and missing values are where they belong in the order."""
    inf, nan = math.inf, math.nan
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.tensor([[inf, 2.0], [1.0, inf]])
    layer.bias.grad = torch.tensor([0.0, nan])
    metrics = ["grad.q0", "grad.q50", "grad.q75", "grad.q100", "grad"]
    with Monitor(layer, metrics, CSVWriter(tmp_path / "log.csv")) as monitor:
        found = monitor.step()
    expected = {"q0": 1.0, "q50": inf, "q75": inf, "q100": inf}
    assert {name: found[f"grad.{name}/weight"].item() for name in expected} == expected
    assert all(math.isnan(found[f"grad.{name}{of}"]) for name in expected for of in ("/bias", ""))
    values = read(tmp_path / "log.csv")
    percentiles = [values[0, f"grad/weight/q{q}"] for q in (0, 25, 50, 75, 100)]
    assert percentiles == [1, 1.75, inf, inf, inf]
    figure = plot_histograms(layer, "grad")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["weight (2 not finite)", "bias (1 not finite)"]
    assert [sum(bar.get_height() for bar in axes.patches) for axes in figure.axes] == [2, 1]
    plt.close(figure)


@pytest.mark.parametrize(
    "values, expected",
    [
        (torch.tensor([3, 1, 2]), [1, 1.5, 2, 2.5, 3]),
        (torch.tensor([True, False]), [0, 0.25, 0.5, 0.75, 1]),
        (torch.tensor([[4.0, 1.0], [2.0, 3.0]]), [1, 1.75, 2.5, 3.25, 4]),
        (torch.zeros(0), [math.nan] * 5),
    ],
    ids=["counts", "flags", "matrix", "nothing"],
)
def test_histograms_of_any_values(values: Tensor, expected: list[float], tmp_path: Path) -> None:
    """What a function returns may be counts, a matrix, or empty."""
    CSVWriter(tmp_path / "log.csv").add_histogram("it", values, 0)
    found = read(tmp_path / "log.csv")
    assert [found[0, f"it/q{q}"] for q in (0, 25, 50, 75, 100)] == pytest.approx(
        expected, nan_ok=True
    )


def test_parameters_are_those_of_the_step(model: Any, tmp_path: Path) -> None:
    """Layers may be frozen, set free or replaced while a monitor is open."""
    model[0].requires_grad_(False)
    with Monitor(model, "grad.norm", CSVWriter(tmp_path / "log.csv")) as monitor:
        backward(model)
        assert {*monitor.step()} == {"grad.norm/2.weight", "grad.norm/2.bias", "grad.norm"}
        model[0].requires_grad_(True)
        model[2].bias.requires_grad_(False)
        model[2].weight = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))
        backward(model)
        found = monitor.step()
        trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        norms = {f"grad.norm/{n}": gradient.norm() for n, gradient in trained.items()}
        norms["grad.norm"] = torch.stack([*norms.values()]).norm()
        torch.testing.assert_close(found, norms)
        model.requires_grad_(False)  # as in turns with another network
        assert {*monitor.step(loss=1.0)} == {*norms, "loss"}


def test_one_metric_and_a_generator(model: Any, tmp_path: Path) -> None:
    """A name or a function in place of a list, and ``model.parameters()`` as it is."""
    backward(model, BatchL2Grad())
    for metric, tag in (("grad.norm", "grad.norm"), (gradient_snr, "gradient_snr")):
        with Monitor(model, metric, CSVWriter(tmp_path / "log.csv")) as monitor:
            found = monitor.step()
        assert len(found) == 5 and tag in found
    assert gradient_snr(model.parameters()) == found["gradient_snr"]


def test_percentiles_are_between_the_entries() -> None:
    """And do not fall: of equal ones, they are all the same."""
    equal = torch.full((37,), 0.1)
    assert {monitor._percentile(equal, q).item() for q in range(101)} == {equal[0].item()}
    some = torch.cat([torch.arange(8.0), torch.full((18,), torch.inf)])
    assert monitor._percentile(some, 28) == 7  # the position is a whole number

"""What the large scripts of ``docs_src/examples`` print, compare and learn; the site runs all."""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import KFAC, BatchGrad, DiagGGNMC, Variance

EXAMPLES = Path(__file__).parents[1] / "docs_src" / "examples"
QUANTITIES = {
    "grad_batch": BatchGrad(),
    "variance": Variance(),
    "diag_ggn_mc": DiagGGNMC(mc_samples=2),
    "kfac": KFAC(mc_samples=1),
}


SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_is_a_page(script: Path) -> None:
    """The docstring starts with a title, as sphinx-gallery wants it."""
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    assert docstring is not None
    title, line, blank, *_ = docstring.splitlines()
    assert line == "=" * len(line)
    assert len(line) >= len(title)
    assert not blank


def load(name: str) -> ModuleType:
    """Import an example by its path."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def quantities(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, list[Any]]:
    """Compute gradients and all quantities, with one seed for dropout and drawn labels."""
    torch.manual_seed(1)
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    with backpack(*QUANTITIES.values()):
        loss.backward()
    return {name: [getattr(p, name) for p in model.parameters()] for name in ("grad", *QUANTITIES)}


def assert_same_quantities(first: nn.Module, second: nn.Module, x: Tensor, y: Tensor) -> None:
    """Compare all quantities of two extended modules, parameter by parameter."""
    expected = quantities(first, x, y)
    for name, values in quantities(second, x, y).items():
        assert_close(values, expected[name], rtol=1e-10, atol=1e-14)


def is_picture(path: Path) -> bool:
    """Return whether a file is a picture with something on it."""
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Restore the number of threads, which some examples set."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# --- Character-level language model ---------------------------------------------------------------

rnn: Any = load("character_rnn")
RNN_WIDTH = 24


@pytest.fixture(scope="module")
def rnn_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run the whole program, small; returns its result and its folder."""
    out = tmp_path_factory.mktemp("character_rnn")
    sizes = {"steps": 40, "width": RNN_WIDTH, "batch_size": 8, "length": 12, "sample_length": 30}
    return rnn.main(out, **sizes), out


def test_rnn_nodes(rnn_run: Any) -> None:
    """The converted graph has the documented names, and calls modules only."""
    nodes = list(rnn_run[0].model.graph.nodes)
    assert [node.op for node in nodes] == ["placeholder", *["call_module"] * 10, "output"]
    assert [node.target for node in nodes[1:-1]] == [
        "embedding",
        "dropout0",
        "lstm.lstm_0",
        "lstm.reduce_tuple_0",
        "lstm.dropout_0",
        "lstm.lstm_1",
        "reduce_tuple0",
        "dropout1",
        "dense",
        "permute0",
    ]


def test_rnn_diagonal_is_that_of_autograd(rnn_run: Any) -> None:
    """Entries of all parameters agree with plain autograd of the ordinary module."""
    comparisons = rnn_run[0].comparisons
    plain = rnn.CharacterRNN(5, 4)
    assert [c.name for c in comparisons] == [name for name, _ in plain.named_parameters()]
    for comparison in comparisons:
        assert len(comparison.by_autograd) == 3
        assert comparison.by_autograd.min() > 0
        for diagonal in (comparison.by_hand, comparison.converted):
            assert_close(diagonal, comparison.by_autograd, rtol=1e-9, atol=1e-15)
        assert comparison.error < 1e-9


def test_rnn_learns(rnn_run: Any) -> None:
    """Both optimisers start at guessing, and lower the loss by 0.9, by 0.6 on other text."""
    assert len(rnn_run[0].runs) == 2
    guessing = math.log(len(rnn.load_text().alphabet))
    for run in rnn_run[0].runs:
        assert run.steps[0] == 0
        assert run.steps[-1] == 40
        for losses, gain in ((run.train_loss, 0.9), (run.test_loss, 0.6)):
            assert len(losses) == len(run.steps)
            assert abs(losses[0] - guessing) < 0.2
            assert losses[-1] < losses[0] - gain


def test_rnn_writes(rnn_run: Any) -> None:
    """There are a sample of text and a picture."""
    result, out = rnn_run
    assert result.sample.startswith("The data set ")
    assert len(result.sample) == len("The data set ") + 30
    assert is_picture(out / "character_rnn.png")


@pytest.mark.parametrize("training", [False, True])
def test_rnn_by_hand_equals_converted(training: bool) -> None:
    """All quantities are the same, with the same dropout if there is one."""
    by_hand = rnn.make_by_hand(7, 5).double().train(training)
    converted = rnn.make_converted(7, 5).double().train(training)
    with torch.no_grad():
        for ours, theirs in zip(by_hand.parameters(), converted.parameters(), strict=True):
            ours.copy_(theirs)
    x, y = torch.randint(7, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    assert_same_quantities(extend(by_hand), converted, x, y)


def test_rnn_state_dict_is_that_of_the_ordinary_module() -> None:
    """Weights of one fit the other, and give the same scores."""
    plain, converted = rnn.CharacterRNN(7, 5).eval(), rnn.make_converted(7, 5).eval()
    converted.load_state_dict(plain.state_dict())
    x = torch.arange(6).reshape(2, 3)
    assert_close(converted(x), plain(x))
    assert converted(x).shape == (2, 7, 3)


def test_rnn_text() -> None:
    """Labels are one character further on, and training text and the rest have no piece in common.

    The losses of the frequencies are the entropy, and above it on the other text.
    """
    text = rnn.load_text()
    generator = torch.Generator().manual_seed(0)
    x, y = rnn.draw(text.train, 5, 9, generator)
    assert x.shape == y.shape == (5, 9)
    assert torch.equal(x[:, 1:], y[:, :-1])

    counts = torch.bincount(text.train).double()
    probabilities = counts[counts > 0] / counts.sum()
    entropy = -(probabilities * probabilities.log()).sum().item()
    assert abs(rnn.frequency_loss(text, text.train) - entropy) < 1e-2
    assert rnn.frequency_loss(text, text.test) > entropy


def test_rnn_optimizer() -> None:
    """The step is the averaged gradient over the averaged, damped curvature."""
    p: Any = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = rnn.DampedDiagGGN([p], lr=0.5, damping=0.1, betas=(0.5, 0.8))
    grads, diagonals = torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.tensor([[0.4, 0.1], [2, 3]])
    expected = p.detach().clone()
    means = [
        (grads[0], diagonals[0]),
        (grads[0] / 3 + grads[1] * 2 / 3, (0.8 * diagonals[0] + diagonals[1]) / 1.8),
    ]
    for grad, diagonal, (mean_grad, mean_diagonal) in zip(grads, diagonals, means, strict=True):
        p.grad, p.diag_ggn_mc = grad, diagonal
        optimizer.step()
        expected -= 0.5 * mean_grad / (mean_diagonal + 0.1)
        assert_close(p.detach(), expected)


# --- Wide ResNet ----------------------------------------------------------------------------------

resnet: Any = load("wide_resnet")
WIDTHS = (2, 4, 6, 8)


@pytest.fixture(scope="module")
def resnet_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run the whole program, narrow and in double precision; returns its result and its folder."""
    out = tmp_path_factory.mktemp("wide_resnet")
    return resnet.main(out, widths=WIDTHS, steps=25, batch_size=16, dtype=torch.float64), out


def test_resnet_depth_and_width() -> None:
    """At its full size it has sixteen convolutions, and the published number of parameters."""
    model = resnet.WideResNet()
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 16
    assert {m.out_channels for m in convolutions} == {16, 64, 128, 256}
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 2.7


def test_resnet_nodes(resnet_run: Any) -> None:
    """Functions became modules: a sum for each block, with two inputs, and activations."""
    nodes = list(resnet_run[0].model.graph.nodes)
    assert [n.op for n in nodes] == ["placeholder", *["call_module"] * (len(nodes) - 2), "output"]
    targets = [node.target for node in nodes]
    assert [t for t in targets if t.startswith("sum")] == [f"sum{i}" for i in range(6)]
    assert [t for t in targets if t.startswith("relu")] == [f"relu{i}" for i in range(13)]
    for node in nodes:
        assert len(node.all_input_nodes) == {"x": 0}.get(node.target, 1 + ("sum" in node.target))


def test_resnet_quantities_agree(resnet_run: Any) -> None:
    """By hand, converted and autograd agree."""
    result = resnet_run[0]
    assert set(result.errors) == set(QUANTITIES)
    assert max(result.errors.values()) < 1e-10
    assert set(result.exact_errors) == {"by hand", "converted"}
    assert max(result.exact_errors.values()) < 1e-9


def test_resnet_learns(resnet_run: Any) -> None:
    """The loss goes down by a quarter at least, and signals are positive numbers."""
    result, out = resnet_run
    first, last = sum(result.losses[:4]) / 4, sum(result.losses[-4:]) / 4
    assert last < 0.75 * first
    for signals in (result.before, result.after):
        assert len(signals) == 17
        assert all(0 < signal.ratio < math.inf for signal in signals)
    assert is_picture(out / "wide_resnet.png")


def resnet_problem() -> tuple[nn.Module, dict[str, Any], Tensor, Tensor]:
    """Make the ordinary network, both extended ones, and a batch."""
    torch.manual_seed(0)
    x, y = resnet.draw(resnet.load_photographs(), 4, torch.Generator().manual_seed(0))
    plain = resnet.WideResNet(WIDTHS).double()
    resnet.estimate_statistics(plain, x.double())
    return plain, resnet.make_extended(plain, WIDTHS), x.double(), y


def test_resnet_by_hand_equals_converted() -> None:
    """Scores and all quantities are the same."""
    plain, models, x, y = resnet_problem()
    for model in models.values():
        assert_close(model(x), plain(x))
    assert_same_quantities(models["by hand"], models["converted"], x, y)


def test_resnet_signal_to_noise() -> None:
    """The ratio is that of the samples' gradients, one by one."""
    plain, models, x, y = resnet_problem()
    signals = resnet.signal_to_noise(models["converted"], x, y)
    weights = [plain.get_parameter(f"{name}.weight") for name, _ in signals]
    losses = cross_entropy(plain(x), y, reduction="none")
    gradients = [torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses]
    for signal, samples in zip(signals, zip(*gradients, strict=True), strict=True):
        stacked = torch.stack(samples)
        signal_part = stacked.mean(0).square().sum()
        noise = stacked.var(0, correction=0).sum()
        assert signal.ratio == pytest.approx((signal_part / noise).item(), rel=1e-8)


# --- Digits ---------------------------------------------------------------------------------------

digits: Any = load("demo_digits")


def test_digits_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one seed, curvature leads to a smaller test loss than SGD and Adam."""
    monkeypatch.setattr(digits, "SEEDS", 1)
    data = digits.load_data()
    curves = digits.compare(data)
    assert {values.shape for values in curves.values()} == {(1, digits.EPOCHS, 2)}
    loss = {name: values[0, -1, 0].item() for name, values in curves.items()}
    assert loss["KFAC"] < min(loss["SGD with momentum"], loss["Adam"])
    for tuned in digits.TUNED:  # the best of the grid
        assert all(tuned.best[name] in values for name, values in tuned.grid.items())
    assert digits.quantities_table(data).row_count == 6

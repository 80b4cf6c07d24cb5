"""Every class of ``torch.nn``: tested with every extension, or on a list that says why not."""

from __future__ import annotations

import inspect
from typing import Any

import oracle
import pytest
import torch
from cases import CASES
from test_losses import TABLE as LOSSES
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from backpack import backpack, extend, extensions
from backpack.convert.recording import OPEN
from backpack.core.derivatives import REGISTRY
from backpack.support import Support, support_matrix

CLASSES = {
    name: cls
    for name, cls in vars(nn).items()
    if inspect.isclass(cls) and issubclass(cls, nn.Module)
}
NOT_CALLED = "has no forward pass of its own"
LAZY = "becomes the class without 'Lazy' in its first call; see test_precision.py"
# What is not tested like the others, and why.
EXCEPTIONS = {
    **dict.fromkeys(["Container", "Module", "ModuleDict", "ParameterDict"], NOT_CALLED),
    **dict.fromkeys(["ParameterList", "RNNBase", "RNNCellBase"], NOT_CALLED),
    **{name: LAZY for name in CLASSES if name.startswith("Lazy")},
    "AdaptiveLogSoftmaxWithLoss": "sends each sample through other layers, depending on its target",
    "CTCLoss": "torch has no second derivative of it",
    "CrossMapLRN2d": "its backward pass in torch is not the derivative of its forward pass; use "
    "LocalResponseNorm",
    "DataParallel": "runs copies of the model",
    "LinearCrossEntropyLoss": "a loss with parameters: tested below",
    "NLLLoss2d": "another name of NLLLoss",
}


def _tested() -> set[type[nn.Module]]:
    """Find the classes in the models and losses of the database."""
    found: set[type[nn.Module]] = set(LOSSES)
    for case in CASES:
        model, loss, *_ = case.build()
        found |= {type(module) for part in (model, loss) for module in part.modules()}
    return found


@pytest.fixture(scope="module")
def tested() -> set[type[nn.Module]]:
    return _tested()


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_tested_or_listed(name: str, tested: set[type[nn.Module]]) -> None:
    """If this fails for a new class of torch: add a case to cases.py, or an exception above."""
    assert (CLASSES[name] in tested) != (name in EXCEPTIONS)


def test_the_exceptions_exist() -> None:
    older = {"LinearCrossEntropyLoss"}  # which older versions do not have
    assert set(EXCEPTIONS) - older <= set(CLASSES)


CONTAINERS = {"ModuleList", "Sequential"}


@pytest.mark.parametrize("name", [n for n in CLASSES if n not in {*EXCEPTIONS, *CONTAINERS}])
def test_every_class_has_a_row_without_gaps(name: str) -> None:
    """In the support matrix; what is undefined is so for every extension of that kind."""
    row = support_matrix()[CLASSES[name]]
    cells = {ext.__name__: cell for ext, cell in row.items()}
    assert Support.MISSING not in cells.values()
    undefined = {ext for ext, cell in cells.items() if cell is Support.UNDEFINED}
    monte_carlo = {"DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC", "KFAC", "EKFAC"}
    assert undefined in (set(), monte_carlo)
    assert not undefined or issubclass(CLASSES[name], _Loss)


def test_containers_need_no_rule() -> None:
    """What has no row is a container; all rows of torch are classes that it has."""
    rows = [cls for cls in (*REGISTRY, *OPEN) if cls.__module__.startswith("torch.nn")]
    assert all(CLASSES[cls.__name__] is cls for cls in rows)
    assert nn.Sequential not in rows


# ------------------------------------------------------------------ a loss with parameters

SETTINGS: list[dict[str, Any]] = [
    {},
    {"bias": True, "label_smoothing": 0.1},
    {"bias": True, "out_features": (2,), "reduction": "sum"},
    {"ignore_index": 1},
]


class Scores(nn.Module):
    """What the cross entropy is computed of."""

    def __init__(self, body: nn.Module, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body, self.layer, self.shape = body, layer, shape

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.body(x)).reshape(len(x), *self.shape)


@pytest.mark.skipif("LinearCrossEntropyLoss" not in CLASSES, reason="not in older versions")
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_linear_cross_entropy(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
    loss: Any = CLASSES["LinearCrossEntropyLoss"](4, 3, **options).double()
    shape = options.get("out_features", ())
    X, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(3, (5, *shape))
    reference = Scores(body, loss.linear, (3, *shape))
    plain = {k: v for k, v in options.items() if k not in ("bias", "out_features")}
    expected = {
        function: function(reference, nn.CrossEntropyLoss(**plain), X, y)
        for function in (oracle.batch_grad, oracle.ggn_diag, oracle.hessian_diag)
    }
    blocks = oracle.hessian_blocks(reference, nn.CrossEntropyLoss(**plain), X, y)

    value = extend(loss)(extend(body)(X), y)
    torch.testing.assert_close(value, nn.CrossEntropyLoss(**plain)(reference(X), y))
    exts = [extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()]
    with backpack(*exts, extensions.HMP(), extensions.KFAC(), extensions.Variance()):
        value.backward()
    params = [*body.parameters(), *loss.parameters()]
    for ext, truth in zip(exts, expected.values(), strict=True):
        for p, answer in zip(params, truth, strict=True):
            torch.testing.assert_close(getattr(p, ext.savefield), answer)
    for p, block in zip(params, blocks, strict=True):
        units = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
        torch.testing.assert_close(p.hmp(units).reshape(block.shape), block)
        assert p.kfac and p.variance.shape == p.shape


@pytest.mark.skipif("LinearCrossEntropyLoss" not in CLASSES, reason="not in older versions")
@pytest.mark.parametrize("options", [{}, {"bias": True, "ignore_index": 1, "reduction": "sum"}])
def test_linear_cross_entropy_with_weights_of_classes(options: dict[str, Any]) -> None:
    """First order; second order says that the loss is to be a module of its own."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
    weight = torch.rand(3, dtype=torch.float64)
    loss: Any = CLASSES["LinearCrossEntropyLoss"](4, 3, weight=weight, **options).double()
    X, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(3, (5,))
    plain = {k: v for k, v in options.items() if k != "bias"}
    function = nn.CrossEntropyLoss(weight=weight, **plain)
    expected = oracle.batch_grad(Scores(body, loss.linear, (3,)), function, X, y)
    body, loss = extend(body), extend(loss)
    with backpack(extensions.BatchGrad()):
        loss(body(X), y).backward()
    params = [*body.parameters(), *loss.parameters()]
    for p, answer in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad_batch, answer)
    with pytest.raises(ValueError, match="supported loss"), backpack(extensions.DiagGGNExact()):
        loss(body(X), y).backward()


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("ext", [extensions.DiagGGNExact, extensions.DiagHessian, extensions.HMP])
def test_cross_map_normalisation_says_what_to_use(ext: Any) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.CrossMapLRN2d(2), nn.Flatten(), nn.Linear(16, 2))
    loss = extend(nn.CrossEntropyLoss())(
        extend(model)(torch.randn(3, 1, 2, 2)), torch.ones(3).long()
    )
    with backpack(ext()), pytest.raises(NotImplementedError, match="LocalResponseNorm"):
        loss.backward()


def test_adaptive_softmax_says_what_to_do() -> None:
    model, loss = extend(nn.Linear(3, 4)), extend(nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2, 4], 2.0))
    X, y = torch.randn(5, 3), torch.tensor([0, 1, 3, 5, 2])
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match="log_prob"):
        loss(model(X), y).loss.backward()
    assert hasattr(model.weight, "grad_batch")
    assert not hasattr(loss.head.weight, "grad_batch")
    with (
        backpack(extensions.DiagGGNExact()),
        pytest.raises((ValueError, NotImplementedError), match="AdaptiveLogSoftmaxWithLoss"),
    ):
        loss(model(X), y).loss.backward()

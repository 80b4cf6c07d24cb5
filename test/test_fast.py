"""Without fast paths, all of them or one, every quantity is what it is with them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import oracle
import pytest
import torch
from cases import CASES, Case, network
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.core import fast, memory
from backpack.core.derivatives import patches, recurrent_network, reductions
from backpack.core.derivatives.basederivatives import FACTS, BaseDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.crossentropyloss import (
    CrossEntropyLossDerivatives,
)
from backpack.core.derivatives.elementwise import (
    ElementwiseDerivatives,
    ReLUDerivatives,
    SigmoidDerivatives,
)
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.derivatives.normalization import LayerNormDerivatives
from backpack.core.engine import elided_gradients, propagations
from backpack.core.engine.slices import slice_bytes
from backpack.core.record import calls
from backpack.core.record.context import Context
from backpack.core.record.registry import _CACHE, REGISTRY, register
from backpack.custom_module.attention import ScaledDotProductAttention
from backpack.custom_module.function_module import FunctionModule, Slot
from backpack.custom_module.permute import Permute
from backpack.custom_module.products import MulModule
from backpack.custom_module.slicing import Slicing
from backpack.utils.kroneckers import EigenKronecker
from benchmark.noticed import noticed

TOLERANCE = {"rtol": 1e-8, "atol": 1e-12}
ORACLE = {"rtol": 1e-7, "atol": 1e-10}

# Small, and each takes fast paths that the others do not.
NAMES = (
    "Linear(4,3)-2x4",
    "Conv1d(2,3,3)-2x6",
    "Conv2d(4,2,2,stride=2,padding=1,groups=2)-4x3x4",
    "ConvTranspose1d(4,6,2,groups=2)-4x2",
    "BatchNorm1d(2)-2x3-eval",
    "MaxPool2d(2)-2x4x4",
    "ReLU()-2x3",
    "ConstantPad1d((1,2),0.5)-2x3",
    "Pad((1,2),value=0.5)-2x3",
    "Upsample(scale_factor=2)-2x3",
    "LayerNorm(3)-2x3",
    "GroupNorm(2,4)-4x2",
    "GLU(1)-4x2",
    "Softmax(dim=-1)-2x3",
    "LogSoftmax(dim=1)-4",
    "PReLU(2)-2x3",
    "UnknownLayer(3)-2x3-first",
    "CrossEntropyLoss(reduction=mean,weight=tensor)-3",
    "BCEWithLogitsLoss(reduction=mean)-3",
    "sigmoid-mlp",
    "autoencoder",
    "reused-linear",
    "tied-conv",
    "rows",
    "embedding",
    "embedding-bag-mean",
    "tied-embedding-padding",
    "lstm-2-layers",
    "attention-of-heads",
)


class Twice(nn.Module):
    """A layer of several inputs, twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(3, 4), layer

    def forward(self, x: Tensor) -> Tensor:
        """[N, *, 3] -> [N, *, 4]."""
        h = self.first(x)
        for _ in range(2):
            h = self.layer(h, h) if isinstance(self.layer, nn.Bilinear) else self.attend(h)
        return h

    def attend(self, h: Tensor) -> Tensor:
        """[N, T, 4] -> [N, T, 4]."""
        return self.layer(h, h, h, need_weights=False)[0]


class SelfAttention(nn.Module):
    """Attention as a function, with a projection that is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.attend = nn.Linear(4, 4), ScaledDotProductAttention()

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, 4] -> [N, T, 4]."""
        return self.attend(*(self.project(x) for _ in range(3)))


class Functions(nn.Module):
    """Functions of tensors that broadcast, and of their axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 3)
        self.apart, self.flatten = nn.Unflatten(1, (2, 4)), nn.Flatten()
        self.turn = Permute(0, 2, 1)
        self.one, self.mul = Slicing((slice(None), slice(None), slice(1))), MulModule()
        self.matmul = FunctionModule(torch.matmul, (Slot(0), Slot(1)))
        self.cut = Slicing((slice(None), slice(None, 2)))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        h = self.apart(self.first(x))
        h = self.mul(h, self.one(h))
        return self.last(self.flatten(self.cut(self.matmul(self.turn(h), h))))


def _chain(name: str, *layers: Callable[[], nn.Module], shape: tuple[int, ...] = (3,)) -> Case:
    return network(name, lambda: nn.Sequential(*(make() for make in layers)), shape)


def _twice(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what makes a layer that is used twice."""

    def layers() -> nn.Module:
        layer = make()
        return nn.Sequential(layer, nn.Tanh(), layer)

    return layers


def _in() -> nn.Module:
    return nn.Linear(3, 4)


def _out() -> nn.Module:
    return nn.Linear(4, 3)


MORE = [
    network(
        "nll",
        lambda: nn.Sequential(_in(), nn.Sigmoid(), _out(), nn.LogSoftmax(1)),
        (3,),
        nn.NLLLoss,
    ),
    _chain("reused-prelu", _in, _twice(nn.PReLU), _out),
    _chain("reused-norm", _in, _twice(lambda: nn.LayerNorm(4)), _out),
    _chain("reused-bilinear", lambda: Twice(nn.Bilinear(4, 4, 4)), _out),
    _chain(
        "reused-attention",
        lambda: Twice(nn.MultiheadAttention(4, 2, batch_first=True)),
        nn.Flatten,
        lambda: nn.Linear(8, 3),
        shape=(2, 3),
    ),
    _chain(
        "reused-function",
        lambda: nn.Linear(3, 8),
        lambda: nn.Unflatten(1, (2, 4)),
        SelfAttention,
        nn.Flatten,
        lambda: nn.Linear(8, 3),
    ),
    _chain(
        "more-classes-than-positions",
        lambda: nn.Conv1d(1, 4, 2),
        nn.Tanh,
        nn.Flatten,
        lambda: nn.Linear(8, 12),
        shape=(1, 3),
    ),
    network("functions", Functions, (3,)),
    network(
        "loss-of-rows",
        lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), _out(), nn.Flatten(0, 1)),
        (6, 5),
    ),
]
SHORT = [case for case in CASES if case.name in NAMES] + MORE
# All networks, every third module.
MANY = [case for i, case in enumerate(CASES) if "network" in case.tags or i % 3 == 0]
# Of those that take a path, this many are run without it.
MOST = 2

Values = list[dict[str, Any]]  # of each parameter, by savefield
# What is computed in one backward pass: alone, a quantity takes paths that it does not with others.
GROUPS: tuple[Callable[[], list[Any]], ...] = (
    lambda: [extensions.BatchGrad()],
    lambda: [extensions.BatchL2Grad()],
    lambda: [extensions.SumGradSquared(), extensions.Variance()],
    lambda: [extensions.DiagGGNExact(), extensions.BatchDiagGGNExact()],
    lambda: [extensions.KFLR()],
    lambda: [extensions.EKFAC(fisher="exact")],
    lambda: [extensions.SqrtGGNExact()],
    lambda: [extensions.DiagHessian(), extensions.BatchDiagHessian()],
    lambda: [extensions.DiagHessian()],
    lambda: [extensions.KFAC(mc_samples=2), extensions.DiagGGNMC(mc_samples=2)],
    lambda: [extensions.GGNMP(), extensions.HMP()],
    lambda: [extensions.KFRA()],
)


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the fast paths of large networks; forget what the tests register."""
    monkeypatch.setattr(propagations, "MANY_COLUMNS", 0)
    monkeypatch.setattr(recurrent_network, "MANY_COLUMNS", 0)
    monkeypatch.setattr(patches, "WORTHWHILE", 0)
    monkeypatch.setattr(elided_gradients, "WORTHWHILE", 0)
    monkeypatch.setattr(reductions, "SLICE_ENTRIES", 64)
    monkeypatch.setattr(calls, "LARGE", 1)
    monkeypatch.setattr(memory, "LARGE", 1)
    monkeypatch.setattr(memory, "HOLDS_HUGE_PAGES", 1)
    registered = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(registered)
    _CACHE.clear()


def quantities(model: nn.Module, loss: nn.Module, *batch: Tensor) -> Values:
    """Compute all quantities, and the gradient where it is the sum of individual gradients."""
    found: Values = [{} for _ in oracle.trainable(model)]
    extend(model)
    extend(loss)

    def backward(exts: list[Any], *what: str, **options: Any) -> None:
        model.zero_grad()
        torch.manual_seed(1)
        value = loss(model(batch[0]), *batch[1:])
        with backpack(*exts, **options):
            value.backward()
        for p, values in zip(oracle.trainable(model), found, strict=True):
            values["grad"] = p.grad
            for ext in exts:
                values["+".join([*what, *map(str, options), ext.savefield])] = _value(p, ext)

    for exts in GROUPS:
        try:
            backward(exts())
        except (NotImplementedError, ValueError) as error:  # KFRA needs a chain, for one
            found[0][str(exts()[0])] = type(error)
    backward([extensions.BatchGrad()])  # memory is used again
    with patch.object(propagations, "MANY_COLUMNS", sys.maxsize):
        backward([extensions.DiagHessian()])
    for ext in (
        extensions.BatchDiagGGNExact(),
        extensions.BatchDiagHessian(),
        extensions.HBP("GGN", "EXACT", "SQRT", "BOTEV_MARTENS"),
    ):
        try:
            with slice_bytes(64):  # a few columns of a sample
                backward([ext], "slices")
        except (NotImplementedError, ValueError) as error:  # samples may be mixed
            found[0][f"slices {ext}"] = type(error)
    backward([extensions.BatchGrad()], sum_individual_gradients=True)
    return found


def _value(p: nn.Parameter, ext: Any) -> Any:
    value = vars(p)[ext.savefield]
    if isinstance(value, EigenKronecker):  # eigenvectors that are not unique may be others
        return value.eigenvalues.sum()
    if callable(value):
        generator = torch.Generator().manual_seed(2)
        value = value(torch.rand(2, *p.shape, generator=generator, dtype=torch.float64).to(p))
    return copy.deepcopy(value)


@cache
def with_all(case: Case) -> tuple[Values, set[str]]:
    """Return the values with all fast paths, and the paths that were taken (or might have been)."""
    with noticed() as names:
        return quantities(*case.build()), names


def check(case: Case, *names: str) -> None:
    """Compare with what is computed without paths (all, if none is named)."""
    truth, _ = with_all(case)
    with fast.disabled(*names):
        found = quantities(*case.build())
    for mine, other in zip(found, truth, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, type):
                assert mine[name] is value
                continue
            torch.testing.assert_close(
                mine[name], value, **TOLERANCE, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


# ------------------------------------------------------------------ the registry


def test_every_path_has_a_name_and_a_sentence() -> None:
    assert len(fast.PATHS) > 40
    for name, path in fast.PATHS.items():
        assert path.name == name and path.is_on
        assert path.what[0].isupper() and path.what.endswith(".")
    sources = [path.function for path in fast.PATHS.values() if isinstance(path, fast.Body)]
    assert all(function.fast[1] for function in sources)  # each follows from something
    with pytest.raises(ValueError, match="already"):
        fast.path("reused memory", "Something else.")


def test_a_body_follows_from_methods_that_are_there() -> None:
    """Another name would never be overridden: subclasses would keep what is wrong for them."""
    fast_jvp = fast.body("A misprint.", "vjp", "afine")(lambda self, c, t: t)
    with pytest.raises(ValueError, match=r"Misprint\.jvp follows from afine, .* no such method"):
        type("Misprint", (BaseDerivatives,), {"jvp": fast_jvp})
    assert "Misprint.jvp" not in fast.PATHS


def test_disabled_is_restored_after_an_error() -> None:
    body = vars(ElementwiseDerivatives)["batch_averaged"]
    with pytest.raises(RuntimeError), fast.disabled():
        assert "batch_averaged" not in vars(ElementwiseDerivatives)
        with fast.disabled("ElementwiseDerivatives.batch_averaged"):
            pass
        assert not any(path.is_on for path in fast.PATHS.values())
        raise RuntimeError
    assert vars(ElementwiseDerivatives)["batch_averaged"] is body
    assert all(path.is_on for path in fast.PATHS.values())
    with pytest.raises(KeyError), fast.disabled("nothing"):
        pass


# ------------------------------------------------------------------ without


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_without_any(case: Case) -> None:
    check(case)


# Those of the library: other tests make some of their own.
OURS = frozenset(fast.PATHS)
# Not taken by float64, or by a network that is stored here: see below.
ELSEWHERE = {"own LSTM kernel"}


def test_every_path_is_taken() -> None:  # most values are there from the test above
    taken = set().union(*(with_all(case)[1] for case in SHORT))
    assert sorted(OURS - taken - ELSEWHERE) == [], "add a case to NAMES or MORE"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OURS - ELSEWHERE))
def test_without_one(name: str) -> None:
    for case in [case for case in SHORT if name in with_all(case)[1]][:MOST]:
        check(case, name)


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=str)
def test_many_cases_without_any(case: Case) -> None:
    check(case)


def test_own_lstm_kernel() -> None:
    """The kernel that it takes the place of is one of float32."""

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        model, head = nn.LSTM(3, 4, 2, batch_first=True), nn.Linear(4, 2)
        x, y = torch.rand(5, 6, 3), torch.randint(2, (5,))
        value = extend(nn.CrossEntropyLoss())(extend(head)(extend(model)(x)[0][:, -1]), y)
        with backpack(extensions.BatchGrad(), sum_individual_gradients=True):
            value.backward()
        return [g for p in model.parameters() for g in (p.grad, p.grad_batch)]

    with_it = gradients()
    with fast.disabled("own LSTM kernel"):
        without = gradients()
    torch.testing.assert_close(with_it, without)


# ------------------------------------------------------------------ exact types


class SameLinear(nn.Linear):
    """A layer of a user."""


class SameDerivatives(LinearDerivatives):
    """Nothing else."""


def test_an_empty_subclass_is_its_base() -> None:
    own = {name: value for name, value in vars(SameDerivatives).items() if callable(value)}
    assert not own
    facts = [name for names in FACTS for name in names]
    for name in (*facts, "batch_averaged", "acts_affinely"):
        assert getattr(SameDerivatives, name) is getattr(LinearDerivatives, name)
    register(SameLinear)(SameDerivatives)
    case = next(case for case in SHORT if case.name == "sigmoid-mlp")
    model, *rest = case.build()
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.__class__ = SameLinear
    for mine, truth in zip(quantities(model, *rest), with_all(case)[0], strict=True):
        torch.testing.assert_close(mine, truth, **TOLERANCE)


class Doubled(nn.Linear):
    """``y = x (2W)ᵀ + b``."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, 2 * self.weight, self.bias)


class DoubledDerivatives(LinearDerivatives):
    """Says so in the fewest words."""

    def jvp(self, c: Context, t: Tensor) -> Tensor:
        return 2 * super().jvp(c, t)

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        return 2 * super().vjp(c, v)

    def affine(self, c: Context, name: str, v: Any) -> list[tuple[Tensor, Tensor | None]]:
        return [(s if x is None else 2 * s, x) for s, x in super().affine(c, name, v)]

    def param_jvp(self, c: Context, name: str, t: Tensor) -> Tensor:
        return (2 if name == "weight" else 1) * super().param_jvp(c, name, t)


def by_hand(base: Any) -> Any:
    """Return a rule that says so in the form of the interface, with products of the weight."""

    class ByHand(base):
        def _jac_mat_prod(self, *args: Any) -> Tensor:
            return 2 * super()._jac_mat_prod(*args)

        def _jac_t_mat_prod(self, *args: Any) -> Tensor:
            return 2 * super()._jac_t_mat_prod(*args)

        def _weight_jac_mat_prod(self, *args: Any) -> Tensor:
            return 2 * super()._weight_jac_mat_prod(*args)

        def _weight_jac_t_mat_prod(self, *args: Any) -> Tensor:
            return 2 * super()._weight_jac_t_mat_prod(*args)

    return ByHand


class DoubledConv(nn.Conv1d):
    """The same for a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, 2 * self.weight, self.bias)


class DoubledConvDerivatives(ConvNDDerivatives):
    """The methods of the base call what is overridden here, and these call them."""

    def jvp(self, c: Context, t: Tensor) -> Tensor:
        return 2 * super().jvp(c, t)

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        return 2 * super().vjp(c, v)

    def weight_jvp(self, c: Context, t: Tensor) -> Tensor:
        return 2 * super().weight_jvp(c, t)

    def weight_vjp(self, c: Context, v: Tensor) -> Tensor:
        return 2 * super().weight_vjp(c, v)


class DoubledNorm(nn.LayerNorm):
    """Twice a layer normalisation."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledNormDerivatives(LayerNormDerivatives):
    """Says nothing of the second derivative."""

    def jvp(self, c: Context, t: Tensor) -> Tensor:
        return 2 * super().jvp(c, t)

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        return 2 * super().vjp(c, v)

    def weight_jvp(self, c: Context, t: Tensor) -> Tensor:
        return 2 * super().weight_jvp(c, t)

    def weight_vjp(self, c: Context, v: Tensor) -> Tensor:
        return 2 * super().weight_vjp(c, v)

    def bias_jvp(self, c: Context, t: Tensor) -> Tensor:
        return 2 * super().bias_jvp(c, t)

    def bias_vjp(self, c: Context, v: Tensor) -> Tensor:
        return 2 * super().bias_vjp(c, v)


class Steeper(nn.ReLU):
    """Twice a ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class SteeperDerivatives(ReLUDerivatives):
    """Has another slope."""

    def df(self, c: Context) -> Tensor:
        return 2 * super().df(c)


OTHERS: dict[str, tuple[type[nn.Module], Any, Callable[[], nn.Sequential]]] = {
    "linear": (
        Doubled,
        DoubledDerivatives,
        lambda: nn.Sequential(Doubled(3, 4), nn.Sigmoid(), Doubled(4, 3)),
    ),
    "linear by hand": (
        Doubled,
        by_hand(LinearDerivatives),
        lambda: nn.Sequential(Doubled(3, 4), nn.Sigmoid(), Doubled(4, 3)),
    ),
    "conv": (
        DoubledConv,
        DoubledConvDerivatives,
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 3)), DoubledConv(1, 2, 2), nn.Sigmoid(), nn.Flatten()
        ).append(nn.Linear(4, 3)),
    ),
    "conv by hand": (
        DoubledConv,
        by_hand(ConvNDDerivatives),
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 3)), DoubledConv(1, 2, 2), nn.Sigmoid(), nn.Flatten()
        ).append(nn.Linear(4, 3)),
    ),
    "norm": (
        DoubledNorm,
        DoubledNormDerivatives,
        lambda: nn.Sequential(nn.Linear(3, 4), DoubledNorm(4), nn.Linear(4, 3)),
    ),
    "relu": (
        Steeper,
        SteeperDerivatives,
        lambda: nn.Sequential(nn.Linear(3, 4), Steeper(), nn.Linear(4, 3)),
    ),
}


@pytest.mark.parametrize("reused", [False, True], ids=["once", "reused"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_subclass_with_other_mathematics(name: str, reused: bool, double_precision: None) -> None:
    """It inherits no shortcut of what it overrides; with a reused layer, products are summed."""
    kind, rule, build = OTHERS[name]
    register(kind)(rule)
    model, loss = build(), nn.CrossEntropyLoss()
    if reused:
        layer = nn.Linear(3, 3)
        model.insert(0, layer).insert(1, nn.Tanh()).insert(0, layer)
    X, y = torch.rand(4, 3), torch.randint(3, (4,))
    plain = copy.deepcopy(model)
    found = quantities(model, loss, X, y)
    truth = {
        "grad_batch": oracle.batch_grad,
        "batch_l2": oracle.batch_l2,
        "sum_grad_squared": oracle.sum_grad_squared,
        "variance": oracle.variance,
        "diag_ggn_exact": oracle.ggn_diag,
        "diag_ggn_exact_batch": oracle.batch_ggn_diag,
        "diag_h": oracle.hessian_diag,
        "diag_h_batch": oracle.batch_hessian_diag,
    }
    for field, function in truth.items():
        mine = [values[field] for values in found]
        others = list(function(plain, nn.CrossEntropyLoss(), X, y))
        torch.testing.assert_close(mine, others, **ORACLE)
    blocks = oracle.ggn_blocks(plain, nn.CrossEntropyLoss(), X, y)
    for values, block in zip(found, blocks, strict=True):
        if len(values["kflr"]) == 1:  # no Kronecker product, or that of a bias
            torch.testing.assert_close(values["kflr"][0], block, **ORACLE)


def test_kronecker_factors_follow_from_the_pairs(double_precision: None) -> None:
    """With ``2W`` as the weight, each column at a weight is twice as long."""
    register(Doubled)(DoubledDerivatives)
    model = OTHERS["linear"][2]()
    plain = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3))
    for layer, other in zip(model[::2], plain[::2], strict=True):
        other.weight.data, other.bias.data = 2 * layer.weight.data, layer.bias.data.clone()
    batch = torch.rand(4, 3), torch.randint(3, (4,))
    values = quantities(model, nn.CrossEntropyLoss(), *batch)
    others = quantities(plain, nn.CrossEntropyLoss(), *batch)
    for mine, other in zip(values, others, strict=True):
        for field in ("kflr", "kfra", "kfac"):
            first, *rest = other[field]
            scaled = [4 * first if rest else first, *rest]
            torch.testing.assert_close(mine[field], scaled, **ORACLE)


def test_a_rule_of_a_parameter_is_asked(double_precision: None) -> None:
    """A rule that overrides the product itself, whatever the pairs say."""

    class Negative(LinearDerivatives):
        def param_vjp(self, c: Context, name: str, v: Any) -> Tensor:
            return -super().param_vjp(c, name, v)

    register(SameLinear)(Negative)
    batch = torch.rand(4, 3), torch.randint(2, (4,))
    model = nn.Sequential(SameLinear(3, 2))
    plain = copy.deepcopy(model)
    for values, each in zip(
        quantities(model, nn.CrossEntropyLoss(), *batch),
        oracle.batch_grad(plain, nn.CrossEntropyLoss(), *batch),
        strict=True,
    ):
        torch.testing.assert_close(values["grad_batch"], -each, **ORACLE)


def test_a_class_defined_while_paths_are_disabled() -> None:
    with fast.disabled():

        class Late(ElementwiseDerivatives):
            def vjp(self, c: Context, v: Tensor) -> Tensor:
                return 2 * super().vjp(c, v)

    assert Late.batch_averaged is BaseDerivatives.batch_averaged
    assert SigmoidDerivatives.batch_averaged is ElementwiseDerivatives.batch_averaged
    assert "hessian_sum" in vars(CrossEntropyLossDerivatives)


def test_a_rule_with_other_probabilities_knows_no_sum_of_hessians() -> None:
    """Else the layer before such a loss would have it of all columns at once."""

    class Sharper(CrossEntropyLossDerivatives):
        def log_p(self, c: Context) -> Tensor:
            return (2 * c.x).log_softmax(1)

    assert Sharper.hessian_sum is BaseLossDerivatives.hessian_sum
    assert Sharper.knows_hessian_sum is BaseLossDerivatives.knows_hessian_sum


@pytest.mark.parametrize("columns", [1, 3, 40])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_squares_of_long_columns_are_added_up(
    columns: int, weighted: bool, side_by_side: bool
) -> None:
    """One by one, with nothing written in between, also where those of a sample are neighbours."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, columns, 5, 500) if side_by_side else (columns, 4, 5, 500)
    values = torch.rand(shape, generator=generator, dtype=torch.float64)
    if side_by_side:
        values = values.transpose(0, 1)
    weights = torch.rand(columns, 4, generator=generator, dtype=torch.float64) if weighted else None
    assert values[0].numel() >= reductions.LONG_ROW
    scales = 1 if weights is None else weights[:, :, None, None]
    expected = (scales * values**2).sum(0)
    torch.testing.assert_close(reductions.sum_of_squares(values, weights), expected)

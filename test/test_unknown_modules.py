"""Leaves without a rule: what is right, and what is refused because it could be wrong."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from threading import Event, Thread
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.engine.backpropagation import slice_bytes

N = 4
TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}
TRUTHS = {
    extensions.BatchGrad: oracle.batch_grad,
    extensions.Variance: oracle.variance,
    extensions.DiagGGNExact: oracle.ggn_diag,
    extensions.BatchDiagHessian: oracle.batch_hessian_diag,
}


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Leaf(nn.Module):
    """A function of ``[N, 4]`` and two parameters, as a leaf."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.w, self.v = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def around(leaf: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), leaf, nn.Tanh(), nn.Linear(4, 3))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 3), torch.randint(3, (N,))


def run(model: nn.Module, X: Tensor, y: Tensor, *exts: Any) -> None:
    loss = extend(nn.CrossEntropyLoss())(extend(model)(X), y)
    with backpack(*exts):
        loss.backward()


# ------------------------------------------------------------------ what is right

RIGHT = {
    "no-sample-axis-in-parameters": lambda m, x: (x * m.w).sin() @ m.v,
    "nonlinear-in-parameters": lambda m, x: x * m.w.exp() + m.v.det(),
    "loop-over-samples": lambda m, x: torch.stack([row @ m.v * m.w for row in x]),
    "control-flow": lambda m, x: x @ m.v if m.training else x * m.w,
    "zero-parameter": lambda m, x: x + 0 * m.w * x,
    "own-kernel": lambda m, x: F.prelu(x, m.w) + F.layer_norm(x, (4,), m.w),
    "unused-parameter": lambda m, x: x * m.w,
}


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("size", [1, N], ids=["one", "batch"])
@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str, size: int) -> None:
    model, (X, y) = around(Leaf(RIGHT[name])), data()
    X, y = X[:size], y[:size]
    reference = copy.deepcopy(model)
    run(model, X, y, *(ext() for ext in TRUTHS), extensions.HMP())
    for ext, truth in TRUTHS.items():
        expected = truth(reference, nn.CrossEntropyLoss(), X, y)
        for (key, p), value in zip(model.named_parameters(), expected, strict=True):
            if p.grad is not None:
                torch.testing.assert_close(
                    getattr(p, ext().savefield), value, **TOLERANCE, msg=lambda m, k=key: k + m
                )
    blocks = oracle.hessian_blocks(reference, nn.CrossEntropyLoss(), X, y)
    for p, block in zip(model.parameters(), blocks, strict=True):
        if p.grad is not None:
            units = torch.eye(p.numel()).reshape(-1, *p.shape)
            torch.testing.assert_close(p.hmp(units).reshape(block.shape), block, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("ext", [extensions.BatchGrad, extensions.DiagGGNExact])
def test_all_parameters_take_as_many_evaluations_as_one(ext: Any) -> None:
    """Their products are computed at once, and are right whichever of them are trained."""
    counts, (X, y) = [], data()

    def product(m: Any, x: Tensor) -> Tensor:
        counts[-1] += 1
        return (x @ m.v).sin() * m.w

    for trained in (("w",), ("v",), ("w", "v")):
        model, _ = around(Leaf(product)), counts.append(0)
        for name, p in model[1].named_parameters():
            p.requires_grad_(name in trained)
        expected = TRUTHS[ext](copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)
        counts[-1] = 0
        run(model, X, y, ext())
        used = [p for p in model.parameters() if p.requires_grad]
        for p, value in zip(used, expected, strict=True):
            torch.testing.assert_close(getattr(p, ext().savefield), value, **TOLERANCE)
    assert len(set(counts)) == 1, counts


def test_tensors_without_memory() -> None:
    """On the meta device, shapes are known, and no sample is found to depend on others."""
    model, (X, y) = around(Leaf(RIGHT["own-kernel"])).to("meta"), data()
    run(model, X.to("meta"), y.to("meta"), extensions.BatchGrad(), extensions.DiagGGNExact())
    for p in model.parameters():
        assert p.grad is None or p.grad_batch.shape == (N, *p.diag_ggn_exact.shape)


CUMULATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "alone": lambda x, sums: sums,
    "some-of-it": lambda x, sums: torch.cat([sums[:, 2:], x[:, :2]], 1),
    "masked": lambda x, sums: sums * (x > 0) + x,
}


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("name", CUMULATIVE)
def test_cumulative_sums_of_exponentials(name: str) -> None:
    """The gradient that torch has for them is not differentiable where none arrives."""
    use = CUMULATIVE[name]
    model = around(Leaf(lambda m, x: use(x, (x * m.w).logcumsumexp(1))))
    reference, (X, y) = copy.deepcopy(model), data()
    reference[1].function = lambda m, x: use(x, (x * m.w).exp().cumsum(1).log())
    run(model, X, y, extensions.DiagHessian(), extensions.HMP(), extensions.GGNMP())
    diagonals = oracle.hessian_diag(reference, nn.CrossEntropyLoss(), X, y)
    hessians = oracle.hessian_blocks(reference, nn.CrossEntropyLoss(), X, y)
    ggns = oracle.ggn_blocks(reference, nn.CrossEntropyLoss(), X, y)
    for p, diagonal, hessian, ggn in zip(
        model.parameters(), diagonals, hessians, ggns, strict=True
    ):
        if p.grad is None:
            continue
        units = torch.eye(p.numel()).reshape(-1, *p.shape)
        torch.testing.assert_close(p.diag_h, diagonal, **TOLERANCE)
        torch.testing.assert_close(p.hmp(units).reshape(hessian.shape), hessian, **TOLERANCE)
        torch.testing.assert_close(p.ggnmp(units).reshape(ggn.shape), ggn, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:No rule for")
def test_shapes_without_values() -> None:
    """On the meta device, where whether a module is curved cannot be seen."""
    exts = extensions.DiagHessian(), extensions.BatchDiagHessian(), extensions.HMP()
    with torch.device("meta"):
        model = around(Leaf(RIGHT["no-sample-axis-in-parameters"]))
        run(model, *data(), *exts)
    for p in model.parameters():
        assert p.diag_h.shape == p.shape and p.diag_h_batch.shape == (N, *p.shape)


def test_buffers_and_inputs_do_not_change() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(4))
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x * self.w

    leaf = Counting()
    run(around(leaf), *data(), extensions.BatchGrad(), extensions.DiagHessian())
    assert leaf.calls == 1
    assert leaf.w.grad_batch.shape == (N, 4)


# ------------------------------------------------------------------ what is refused


def cached(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "cache"):
        m.cache = m.w.exp()
    return x * m.cache


class Borrowing(nn.Module):
    """Reads a parameter of another module, which is not a child."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other, self.w = (other,), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.other[0].weight @ self.other[0].weight.T * self.w


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mean": (lambda: Leaf(lambda m, x: (x - x.mean(0)) * m.w), "mixes the samples"),
    "causal": (lambda: Leaf(lambda m, x: (x * m.w).cumsum(0)), "mixes the samples"),
    "swapped": (lambda: Leaf(lambda m, x: x[[0, 2, 1, 3]] * m.w), "mixes the samples"),
    "graph": (
        lambda: Leaf(lambda m, x: torch.ones(N, N).tril() @ (x * m.w)),
        "mixes the samples",
    ),
    "random": (lambda: Leaf(lambda m, x: x * m.w + torch.randn_like(x)), "random"),
    "cache": (lambda: Leaf(cached), "other than through its arguments"),
    "borrowed": (lambda: Borrowing(nn.Linear(4, 4)), "other than through its arguments"),
    "in-place": (lambda: Leaf(lambda m, x: x.mul_(2) * m.w), r"evaluated again.*inplace = True"),
    "rows": (
        lambda: Leaf(lambda m, x: torch.cat([x * m.w, x], 1).reshape(-1, 4)),
        "several rows",
    ),
}


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-3), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("largest", [None, 0, 2])
def test_any_mixing_is_found(dtype: torch.dtype, share: float, largest: int | None) -> None:
    """Also little of it, and that of one sample which determines the others."""
    leaf = Leaf(lambda m, x: (x - share * x.mean(0)) * m.w)
    X, y = torch.randn(N, 4), torch.randint(4, (N,))
    if largest is not None:
        leaf, X[largest] = Leaf(lambda m, x: x / x.abs().max() * m.w), 5.0
    model = nn.Sequential(leaf, nn.Tanh()).to(dtype)
    with pytest.raises(NotImplementedError, match="mixes the samples"):
        run(model, X.to(dtype), y, extensions.DiagGGNExact())


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, reason = REFUSED[name]
    model, (X, y) = nn.Sequential(nn.Linear(3, 4), make()), data()
    y = y.repeat_interleave(2) if name == "rows" else y
    if name == "cache":
        model(X)  # as it was
    with pytest.raises(NotImplementedError, match=reason):
        run(model, X, y, extensions.DiagGGNExact())
    if name != "cache":  # whose graph is gone
        with pytest.warns(UserWarning, match=reason):
            run(model, X, y, extensions.BatchGrad())
        assert not hasattr(model[1].w, "grad_batch")


class Roll(nn.Module):
    """Mixes samples, and has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 0)


def test_mixing_between_layers_warns_in_first_order() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Roll(), nn.Linear(4, 3))
    with pytest.warns(UserWarning, match="mixes the samples"):
        run(model, *data(), extensions.BatchGrad())


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda p: p,
    "view": lambda p: p.view(1, -1),
    "unsqueezed": lambda p: p.unsqueeze(0),
    "cast": lambda p: p.float(),
    "function": lambda p: 2 * p,
}


class Scale(nn.Module):
    """Reads a weight that is no parameter of its own."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight


class Lending(nn.Module):
    """Gives a parameter of one layer to another module."""

    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(3, 4), nn.Linear(4, 3), Scale()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.scale(self.one(x), self.form(self.one.bias)))


@pytest.mark.filterwarnings("ignore:No rule for")
class Centred(nn.Module):
    """A layer or a loss that mixes the samples as long as an attribute says so."""

    def __init__(self, then: Any = None) -> None:
        super().__init__()
        self.then, self.centres = then, False

    def forward(self, x: Tensor, *targets: Tensor) -> Tensor:
        x = x - x.mean(0) if self.centres else 2 * x
        return self.then(x, *targets) if targets else x


@pytest.mark.parametrize("is_loss", [False, True])
def test_mixing_that_depends_on_an_attribute(is_loss: bool) -> None:
    """What was found out holds as long as the attributes are the same."""
    centred = Centred(F.cross_entropy) if is_loss else Centred()
    model = extend(nn.Sequential(nn.Linear(4, 3), nn.Tanh() if is_loss else centred))
    lossfunc, y = extend(centred if is_loss else nn.CrossEntropyLoss()), torch.tensor([0, 1, 2])
    for centred.centres in (False, True, False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with backpack(extensions.BatchGrad()):
                lossfunc(model(torch.rand(3, 4)), y).backward()
        told = any("mixes the samples of a batch" in str(w.message) for w in caught)
        assert told == centred.centres


@pytest.mark.parametrize("form", FORMS)
def test_parameter_as_an_argument(form: str) -> None:
    """It is noticed; where functions are recorded, it is right."""
    with pytest.warns(UserWarning, match="That use is not counted"):
        run(Lending(FORMS[form]), *data(), extensions.BatchGrad())
    with pytest.raises((ValueError, NotImplementedError)):
        run(Lending(FORMS[form]), *data(), extensions.DiagGGNExact())
    model, reference, (X, y) = Lending(FORMS[form]), Lending(FORMS[form]), data()
    reference.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not counted")
        run(extend(model, use_converter="record"), X, y, *(ext() for ext in TRUTHS))
    for ext, truth in TRUTHS.items():
        expected = truth(reference, nn.CrossEntropyLoss(), X, y)
        for p, value in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(getattr(p, ext().savefield), value)


class Table(nn.Module):
    """Reads the weights of a layer that is never called."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.one, self.table, self.two = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return self.two(self.one(F.linear(x, self.table.weight, self.table.bias)))
        return self.two(F.linear(self.one(x), self.table.weight, self.table.bias))


class ProductOfFactors(torch.autograd.Function):
    """Of two parameters, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return g @ b.T, a.T @ g


def test_what_a_recorded_model_does_not_see_is_named() -> None:
    """It was told to use the converter, which it does."""

    class Factored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 3))
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(F.linear(x, ProductOfFactors.apply(self.a, self.b)).tanh())

    model = extend(Factored(), use_converter="record")
    with pytest.warns(UserWarning, match="not counted. Converters do not follow .*autograd.Fun"):
        run(model, *data(), extensions.BatchGrad())
    assert not hasattr(model.a, "grad_batch")


@pytest.mark.parametrize("first", [True, False])
def test_layer_that_is_not_called(first: bool) -> None:
    """Its weights are read by a function: that is said, and right if functions are recorded."""
    model = Table(first)
    with pytest.warns(UserWarning, match="That use is not counted. Use extend.model, use_conv"):
        run(model, *data(), extensions.BatchGrad())
    assert model.table.weight.grad is not None
    reference, (X, y) = Table(first), data()
    model = extend(copy.deepcopy(reference), use_converter=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not counted")
        run(model, X, y, extensions.BatchGrad())
    expected = oracle.batch_grad(reference, nn.CrossEntropyLoss(), X, y)
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch, value, **TOLERANCE)


@pytest.mark.parametrize("ext", [extensions.DiagGGNExact, extensions.DiagHessian, extensions.KFLR])
def test_layer_that_is_not_called_for_second_order(ext: Any) -> None:
    """Before the first call nothing breaks the chain: what is missing is said."""
    model = Table(first=True)
    match = rf"{ext.__name__}: a parameter of shape \[3(, 3)?\] has no result.*use_converter=True"
    with pytest.warns(UserWarning, match=match):
        run(model, *data(), ext())
    assert not hasattr(model.table.weight, ext().savefield)
    assert hasattr(model.one.weight, ext().savefield)

    recorded = extend(copy.deepcopy(model), use_converter=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no result")
        run(recorded, *data(), ext())
    assert hasattr(recorded.get_parameter("table.weight"), ext().savefield)


class Sampling(nn.Module):
    """Bayesian layers of some libraries: a part that nobody calls has copies of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.sampler = nn.Parameter(torch.rand(3, 3)), nn.Module()
        self.sampler.mean = nn.Parameter(self.mean)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.sampler.mean + 0.1)


@pytest.mark.parametrize("to_data", [False, True])
def test_parameters_that_functions_alone_read_beside_a_container(to_data: bool) -> None:
    """They have no second-order results, which is said if they get a gradient."""
    model, lossfunc, (X, y) = extend(Sampling()), extend(nn.CrossEntropyLoss()), data()
    lossfunc(model(X), y).backward()
    loss = lossfunc(model(X.requires_grad_()), y)
    match = r"DiagGGNExact: a parameter of shape \[3, 3\] has no result.*use_converter=True"
    with warnings.catch_warnings(), backpack(extensions.DiagGGNExact()):
        warnings.simplefilter("error")
        with nullcontext() if to_data else pytest.warns(UserWarning, match=match):
            loss.backward(inputs=[X] if to_data else None)


@pytest.mark.parametrize("frozen", [True, False])
def test_layer_that_is_not_called_and_gets_no_gradient(frozen: bool) -> None:
    model, lossfunc = extend(Table(first=True)), extend(nn.CrossEntropyLoss())
    model.table.requires_grad_(not frozen)
    X, y = data()
    loss = lossfunc(model(X), y)
    with warnings.catch_warnings(), backpack(extensions.DiagGGNExact()):
        warnings.simplefilter("error")
        loss.backward(inputs=None if frozen else list(model.two.parameters()))
    assert model.two.weight.diag_ggn_exact.shape == (3, 3)


def test_what_is_evaluated_again_leaves_no_trace() -> None:
    """Neither in attributes, nor in collections, nor in random numbers."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.calls, self.log = nn.Parameter(torch.rand(4)), 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.log.append(len(x))
            self.last = (x * self.w).sigmoid()
            return self.last

    leaf = Stateful()
    run(around(leaf), *data(), extensions.BatchGrad(), extensions.DiagHessian())
    assert (leaf.calls, leaf.log, leaf.last.shape) == (1, [N], (N, 4))

    model, (X, y) = around(Leaf(lambda m, x: x * m.w + torch.randn_like(x))), data()
    loss = extend(nn.CrossEntropyLoss())(extend(model)(X), y)
    before = torch.get_rng_state(), random.getstate()
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match="random"):
        loss.backward()
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: torch.rand(()).item()])
def test_a_draw_that_comes_out_as_before_is_still_random(draw: Any, seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    leaf = Leaf(lambda m, x: x + (x * m.w).tanh() * (draw() < 0.7))
    with pytest.raises(NotImplementedError, match="random"):
        run(around(leaf), *data(), extensions.DiagGGNExact())


def test_the_answer_is_that_of_the_module() -> None:
    """Not of its class."""

    class Any_(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x)

    for function, mixes in ((lambda x: 2 * x, False), (lambda x: x - x.mean(0), True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(around(Any_(function)), *data(), extensions.BatchGrad())
        assert any("mixes the samples" in str(w.message) for w in caught) == mixes


class Listed(nn.Module):
    """Parameters in a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.rand(4), torch.rand(4)])
        self.shifts = nn.ParameterDict({"b": torch.randn(4)})

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scales[0]).tanh() * self.scales[1] + self.shifts["b"]


class Holding(Listed):
    """The same, in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer(x))


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("route", [False, "trace", "record"])
@pytest.mark.parametrize("cls", [Listed, Holding])
def test_lists_of_parameters(cls: Any, route: Any) -> None:
    model, (X, y) = around(cls()), data()
    reference = copy.deepcopy(model)
    if cls is Holding and not route:
        with pytest.warns(UserWarning, match=r"scales\.0"):
            run(model, X, y, extensions.BatchGrad())
        with pytest.raises((NotImplementedError, ValueError)):
            run(model, X, y, extensions.DiagGGNExact())
        return
    model = extend(model, use_converter=route)
    run(model, X, y, *(ext() for ext in TRUTHS))
    for ext, truth in TRUTHS.items():
        expected = dict(
            zip(
                [n for n, _ in reference.named_parameters()],
                truth(reference, nn.CrossEntropyLoss(), X, y),
                strict=True,
            )
        )
        for name, p in model.named_parameters():
            torch.testing.assert_close(getattr(p, ext().savefield), expected[name], **TOLERANCE)


# ------------------------------------------------------------------ functions

ROUTES = ["trace", "record"]


class Net(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.function = nn.Linear(3, 4), nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.function(self.one(x)))


PARTLY_DEFINED = {
    "cholesky": lambda h: torch.linalg.cholesky(h.unsqueeze(2) * h.unsqueeze(1) + torch.eye(4)).sum(
        2
    ),
    "gaussian": lambda h: F.gaussian_nll_loss(h, h.detach() * 0, h.exp(), reduction="none"),
    "inverse": lambda h: torch.linalg.inv(h.unsqueeze(2) * h.unsqueeze(1) + torch.eye(4)).sum(2),
}


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", PARTLY_DEFINED)
def test_functions_that_are_not_defined_everywhere(name: str, route: Any) -> None:
    model, (X, y) = Net(PARTLY_DEFINED[name]), data()
    reference = copy.deepcopy(model)
    model = extend(model, use_converter=route)
    run(model, X, y, *(ext() for ext in TRUTHS))
    for ext, truth in TRUTHS.items():
        expected = truth(reference, nn.CrossEntropyLoss(), X, y)
        for p, value in zip(oracle.trainable(model), expected, strict=True):
            torch.testing.assert_close(getattr(p, ext().savefield), value, **TOLERANCE)


@pytest.mark.parametrize("route", ROUTES)
def test_functions_of_the_row_number(route: Any) -> None:
    """A triangle of the batch: a row's place decides what becomes of it."""
    model, (X, y) = Net(lambda h: h.tril() + h), data()
    reference = copy.deepcopy(model)
    expected = oracle.batch_ggn_diag(reference, nn.CrossEntropyLoss(), X, y)
    model = extend(model, use_converter=route)
    for limit, rows in ((2**28, None), (64, None), (2**28, [2, 0])):
        with slice_bytes(limit):
            run(model, X, y, extensions.BatchDiagGGNExact(subsampling=rows))
        for p, value in zip(oracle.trainable(model), expected, strict=True):
            value = value if rows is None else value[rows]
            torch.testing.assert_close(p.diag_ggn_exact_batch, value, **TOLERANCE)


@pytest.mark.parametrize("route", ROUTES)
def test_a_number_from_all_samples(route: Any) -> None:
    model = extend(Net(lambda h: h / h.norm()), use_converter=route)
    with pytest.raises(ValueError, match="computed from all samples"):
        run(model, *data(), extensions.DiagGGNExact())


def test_precision_changes_between_model_and_loss() -> None:
    model, (X, y) = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).float(), data()
    reference = copy.deepcopy(model).double()
    f = extend(model)(X.float())
    with backpack(extensions.DiagGGNExact(), extensions.HMP(), extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(f.double(), y).backward()
    problem = reference, nn.CrossEntropyLoss(), X.float().double(), y
    for p, value, block in zip(
        model.parameters(), oracle.ggn_diag(*problem), oracle.hessian_blocks(*problem), strict=True
    ):
        assert p.diag_ggn_exact.dtype == torch.float32
        torch.testing.assert_close(p.diag_ggn_exact.double(), value, rtol=1e-4, atol=1e-6)
        units = torch.eye(p.numel(), dtype=torch.float32).reshape(-1, *p.shape)
        product = p.hmp(units).reshape(block.shape).double()
        torch.testing.assert_close(product, block, rtol=1e-4, atol=1e-6)


class Standardised(nn.Module):
    """Mixes the samples; one alone has no standard deviation."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0)


def test_trials_show_no_warnings_of_torch() -> None:
    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(around(Standardised()), *data(), extensions.BatchGrad())
    (own,) = caught
    assert "mixes the samples" in str(own.message)
    assert warnings.filters == filters


@pytest.mark.parametrize("field", ["grad_batch", "diag_ggn_exact", "diag_h"])
def test_a_compiled_function_inside(field: str) -> None:
    """The compiler knows no ``vmap`` around a function that it has not compiled yet."""
    exts = {
        "grad_batch": extensions.BatchGrad,
        "diag_ggn_exact": extensions.DiagGGNExact,
        "diag_h": extensions.DiagHessian,
    }

    def function(x: Tensor) -> Tensor:
        return x.sin() * 2

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    torch.manual_seed(0)
    X, y = data()
    model = around(Leaf(lambda m, x: function(x * m.w) @ m.v))
    other = copy.deepcopy(model)
    other[1].function = lambda m, x: compiled(x * m.w) @ m.v
    for net in (model, other):
        run(net, X, y, exts[field]())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(getattr(q, field), getattr(p, field))


NORMS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (4,), w, b),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "softmax": lambda x, w, b: F.softmax(x * w, -1) + b,
}


@pytest.mark.filterwarnings("ignore:No rule", "ignore:Using backward")
@pytest.mark.parametrize("norm", NORMS)
def test_derivatives_of_individual_gradients(norm: str) -> None:
    """torch's rules for many samples at once may be wrong in what is differentiated again."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            return NORMS[norm](x, self.w, self.b)

    model = nn.Sequential(nn.Linear(3, 4), Norm(), nn.Tanh(), nn.Linear(4, 2))
    X, y = torch.randn(N, 3), torch.randn(N, 2)
    each = [
        torch.autograd.grad(F.mse_loss(model(x), t) / N, model[1].w, create_graph=True)[0]
        for x, t in zip(X.split(1), y.split(1), strict=True)
    ]
    expected = torch.autograd.grad(torch.stack(each).square().sum(), [*model[0].parameters()])
    extend(model)
    with backpack(extensions.BatchGrad()):
        extend(nn.MSELoss())(model(X), y).backward(create_graph=True)
    found = torch.autograd.grad(model[1].w.grad_batch.square().sum(), [*model[0].parameters()])
    torch.testing.assert_close(found, expected, **TOLERANCE)


class Slope(nn.Module):
    """Reads its parameter for negative numbers alone."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((1,), 0.3))
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        h = F.prelu(x, self.slope)
        for child in self.children():
            h = child(h)
        return h


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("negative", [[], [1]])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_samples_without_a_gradient_tell_nothing_of_others(
    is_leaf: bool, negative: list[int]
) -> None:
    """Torch has a wrong batching rule of ``prelu``: samples without a gradient do not show it."""
    X, y, lossfunc = torch.rand(3, 4), torch.tensor([0, 2, 1]), nn.CrossEntropyLoss()
    X[negative] *= -1
    head = nn.Linear(4, 3)
    model = nn.Sequential(Slope(), head) if is_leaf else Slope(head=head)
    truths = [f(model, lossfunc, X, y) for f in (oracle.batch_grad, oracle.batch_ggn_diag)]
    extend(model, use_converter=False if is_leaf else "record")
    run(model, X, y, extensions.BatchGrad(), extensions.BatchDiagGGNExact())
    for p, each, diagonal in zip(model.parameters(), *truths, strict=True):
        torch.testing.assert_close(p.grad_batch, each)
        torch.testing.assert_close(p.diag_ggn_exact_batch, diagonal)


class Rows(nn.Module):
    """Returns several rows for each sample, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.count = nn.Parameter(torch.randn(4)), 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        return (x.reshape(-1, 2) * self.w[:2]).sin()


def test_rows_of_samples_are_recorded_without_a_trace() -> None:
    """The first call runs twice: its state, and hooks, do not notice."""
    model = nn.Sequential(nn.Linear(3, 4), Rows(), nn.Unflatten(0, (-1, 2)), nn.Flatten())
    reference, (X, y), hooked = copy.deepcopy(model), data(), []
    model[1].register_forward_hook(lambda *_: hooked.append(None))
    recorded = extend(model, use_converter="record")
    expected = oracle.batch_grad(reference, nn.CrossEntropyLoss(), X, y)[2]
    for calls in (1, 2):
        loss = extend(nn.CrossEntropyLoss())(recorded(X), y)
        with backpack(extensions.BatchGrad()):
            loss.backward()
        assert model[1].count == float(model[1].calls) == len(hooked) == calls
        torch.testing.assert_close(model[1].w.grad_batch, expected, **TOLERANCE)


def test_rows_of_changed_data_are_computed_once() -> None:
    """What a module does to its input is not done twice."""

    class Doubled(Rows):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rows, self.head = nn.Linear(3, 4), Doubled(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x).sigmoid().clone()
            return self.rows(h).reshape(len(h), 4)[:, :3] + self.head(h)

    model, (X, y) = Model(), data()
    recorded = extend(copy.deepcopy(model), use_converter="record")
    for one in (model, recorded):
        nn.CrossEntropyLoss()(one(X), y).backward()
    for p, q in zip(model.parameters(), recorded.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_rows_of_samples_in_several_threads() -> None:
    """A thread that runs a module while another one finds out about its rows records all, too."""
    entered, found = Event(), Event()

    class Waiting(Rows):
        def forward(self, x: Tensor) -> Tensor:
            next(waits, int)()
            return super().forward(x)

    def first() -> None:
        other.start()
        entered.wait(60)

    def second() -> None:
        entered.set()
        found.wait(60)

    def passes() -> None:
        loss = extend(nn.CrossEntropyLoss())(recorded(X), y)
        with backpack(extensions.BatchGrad()):
            loss.backward()

    model = nn.Sequential(nn.Linear(3, 4), Waiting(), nn.Unflatten(0, (-1, 2)), nn.Flatten())
    waits, (X, y) = iter([first, second]), data()
    recorded, other = extend(copy.deepcopy(model), use_converter="record"), Thread(target=passes)
    recorded(X)
    found.set()
    other.join()
    expected = oracle.batch_grad(model, nn.CrossEntropyLoss(), X, y)
    for p, value in zip(recorded.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch, value, **TOLERANCE)


class OwnNorm(nn.LayerNorm):
    """Layer normalisation without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias)


class NormOfWholeBatches(OwnNorm):
    """The same, which refuses to be called with fewer samples."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 4:
            raise ValueError("whole batches only")
        return super().forward(x)


@pytest.mark.parametrize("kind", [OwnNorm, NormOfWholeBatches])
def test_kernel_without_a_gradient_of_the_bias_alone(
    kind: type[OwnNorm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kernels of GPUs have none for many rows: they are asked for that of the weight, too."""
    refused, grad = [], torch.autograd.grad

    def refusing(ys: Any, xs: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(xs, Tensor) and [x.shape for x in xs] == [(8,)]:
            refused.append(xs)
            raise RuntimeError("returned an invalid gradient at index 2")
        return grad(ys, xs, *args, **options)

    model, X = nn.Sequential(nn.Linear(3, 8), kind(8), nn.Linear(8, 2)), torch.rand(4, 5, 3)
    model, X, found = model.double(), X.double(), []
    for is_whole in (True, False):
        monkeypatch.setattr(torch.autograd, "grad", grad if is_whole else refusing)
        extended = extend(copy.deepcopy(model))
        torch.manual_seed(0)
        with backpack(extensions.Variance(), extensions.DiagGGNMC(), extensions.KFAC()):
            extend(nn.MSELoss())(extended(X), torch.zeros(4, 5, 2).double()).backward()
        found.append([(*p.kfac, p.variance) for p in extended.parameters()])
    assert refused
    torch.testing.assert_close(*found)


class OfAllRows(nn.Module):
    """Branches on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 4] -> [N, 3]."""
        h = x @ self.weight
        return h * h if x.sum() > 0 else h


@pytest.mark.parametrize("route", [False, "record"])
def test_samples_that_alone_are_what_others_are_not(route: Any) -> None:
    """The first one alone may be what it is in the batch, where another one is not."""
    told = 0
    for seed in range(10):
        torch.manual_seed(seed)
        model, X = extend(OfAllRows().double(), use_converter=route), torch.randn(3, 4).double()
        loss = extend(nn.CrossEntropyLoss())(model(X), torch.tensor([0, 1, 2]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with backpack(extensions.BatchGrad()):
                loss.backward()
        if hasattr(model.weight, "grad_batch"):
            torch.testing.assert_close(model.weight.grad_batch.sum(0), model.weight.grad)
        told += not hasattr(model.weight, "grad_batch")
    assert told < 10


class OfSomeRows(nn.Module):
    """Branches on whether the batch has a large entry; else all do what is the first branch."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.weight, self.branches = nn.Parameter(torch.rand(3)), branches

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        is_other = self.branches and float(x.max()) < 1
        return self.weight * (x**3 if is_other else (2 * x + x**2))


@pytest.mark.parametrize(
    "name", ["BatchGrad", "DiagGGNExact", "SqrtGGNExact", "BatchDiagHessian", "DiagHessian"]
)
def test_samples_that_alone_take_another_branch(name: str) -> None:
    """The first and the last one alone do not, but others, to which a slice is restricted, do."""
    X = torch.rand(6, 3).double()
    X[[0, -1]] += 1
    found = []
    for branches in (True, False):
        torch.manual_seed(1)
        model = extend(nn.Sequential(OfSomeRows(branches), nn.Linear(3, 2)).double())
        ext = getattr(extensions, name)(subsampling=[2, 3])
        loss = extend(nn.CrossEntropyLoss())(model(X), torch.arange(6) % 2)
        with warnings.catch_warnings(), backpack(ext):
            warnings.simplefilter("ignore")
            loss.backward()
        found.append(getattr(model[0].weight, ext.savefield))
    torch.testing.assert_close(*found)


class Split(nn.Module):
    """Heads come first, as layers of rearranging libraries are told to do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, 4)).permute(2, 0, 1, 3)


class Merge(nn.Module):
    """Undoes that."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(1, 2, 0, 3).flatten(2)


@pytest.mark.parametrize("route", [False, "trace", "record"])
@pytest.mark.parametrize("heads", [N - 1, N])
def test_samples_that_a_module_moves_among_as_many_heads(heads: int, route: Any) -> None:
    """Where the samples are is asked, not guessed from the number of entries."""
    layers = nn.Linear(3, 4 * heads), Split(), nn.Tanh(), nn.Linear(4, 4), Merge(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(8 * heads, 3))
    X, y = torch.randn(N, 2, 3), torch.randint(3, (N,))
    plain = copy.deepcopy(model)
    model = extend(model, use_converter=route)
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(*[ext() for ext in TRUTHS]):
        loss.backward()
    for ext, truth in TRUTHS.items():
        found = truth(plain, nn.CrossEntropyLoss(), X, y)
        for p, expected in zip(model.parameters(), found, strict=True):
            torch.testing.assert_close(getattr(p, ext().savefield), expected, **TOLERANCE)


class Compared(nn.Module):
    """Compares all samples with each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


@pytest.mark.parametrize("route", [False, "record"])
def test_samples_that_are_compared_with_each_other(route: Any) -> None:
    """One sample alone has an output with two short axes: that is no move, but a mixture."""
    model = extend(nn.Sequential(nn.Linear(3, 4), Compared()), use_converter=route)
    loss = extend(nn.CrossEntropyLoss())(model(torch.randn(N, 3)), torch.arange(N))
    warned = pytest.warns(UserWarning, match=r"mixes the samples of a batch, in '1' \(Compared\)")
    with warned, backpack(extensions.BatchGrad()):
        loss.backward(retain_graph=True)
    refused = pytest.raises(NotImplementedError, match=r"'1' \(Compared\) mixes the samples")
    with refused, backpack(extensions.DiagGGNExact()):
        loss.backward()


class Attending(nn.Module):
    """Reads queries, keys and values along an axis in front of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.last, self.split = nn.Linear(3, 12), nn.Linear(4, 3), Split()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.project(x))
        return self.last(F.scaled_dot_product_attention(q, k, v).mean(1))


@pytest.mark.parametrize("samples", [2, 3])
def test_as_many_samples_as_queries_keys_and_values(samples: int) -> None:
    model, X, y = Attending(), torch.randn(samples, 5, 3), torch.randint(3, (samples,))
    truth = oracle.batch_grad(copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)
    model = extend(model, use_converter="record")
    with warnings.catch_warnings(), backpack(extensions.BatchGrad()):
        warnings.simplefilter("error")
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    for p, expected in zip(model.parameters(), truth, strict=True):
        torch.testing.assert_close(p.grad_batch, expected, **TOLERANCE)

"""Functions, parameters and attention as modules: their contract, tested with the engine.

What each quantity is for networks of them is tested in test_quantities.py, too.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import oracle
import pytest
import torch
from cases import Case, Holder, Problem, network, select
from test_quantities import TOLERANCE, products, run
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.derivatives import vmapped
from backpack.core.engine.slices import slice_bytes
from backpack.custom_module.branching import SumModule
from backpack.custom_module.function_module import FunctionModule, Slot
from backpack.custom_module.parameter_module import ParameterModule
from backpack.custom_module.products import MulModule

ONE, TWO = Slot(0), Slot(1)


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, **TOLERANCE)


def agrees(case: Case) -> None:
    """Compare a network of functions with the oracle."""
    exts = [
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.BatchDiagGGNExact(),
        extensions.HMP(),
    ]
    params = run(case.build(), *exts)
    truths = [
        function(*case.reference())
        for function in (oracle.batch_grad, oracle.batch_ggn_diag, oracle.hessian_blocks)
    ]
    for p, product, grads, ggn, block in zip(params, products(params, "hmp"), *truths, strict=True):
        close(p.grad_batch, grads)
        close(p.batch_l2, grads.square().flatten(1).sum(1))
        close(p.diag_ggn_exact_batch, ggn)
        close(product, block)


# --------------------------------------------------------------------------------------
# Functions
# --------------------------------------------------------------------------------------


class Between(nn.Module):
    """Functions of one tensor, ``[N, 2, 2]``, between two layers."""

    def __init__(self, *functions: nn.Module) -> None:
        super().__init__()
        self.stem, self.apart = nn.Linear(3, 4), nn.Unflatten(1, (2, 2))
        self.functions, self.flatten = nn.ModuleList(functions), nn.Flatten()
        x = torch.zeros(3, 2, 2)
        for function in functions:
            x = function(x)
        self.head = nn.Linear(x[0].numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        x = self.apart(self.stem(x))
        for function in self.functions:
            x = function(x)
        return self.head(self.flatten(x))


def function(*args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: FunctionModule(args[0], args[1:], kwargs)


exchange, sine = function(torch.transpose, ONE, 0, 1), function(torch.sin, ONE)
FUNCTIONS: dict[str, list[Callable[[], nn.Module]]] = {
    "cumsum": [function(torch.cumsum, ONE, 1)],
    "softmax": [function(F.softmax, ONE, dim=1)],
    "norm": [function(torch.linalg.vector_norm, ONE, dim=-1)],
    "a method": [function("amax", ONE, dim=1, keepdim=True)],
    "index": [function(operator.getitem, ONE, (slice(None), 1, None)), sine],
    "twice in one call": [function(torch.matmul, ONE, ONE)],
    "a number": [function(operator.truediv, 2.0, ONE)],
    "samples last": [function("permute", ONE, 1, 2, 0), sine, function("permute", ONE, 2, 0, 1)],
    "samples second": [exchange, sine, exchange],
    "merged": [function("flatten", ONE, 0, 1), sine, function("reshape", ONE, -1, 4)],
    "merged behind": [
        exchange,
        function("flatten", ONE, 0, 1),
        sine,
        function("unflatten", ONE, 0, (2, -1)),
        exchange,
    ],
    "affine": [function(torch.roll, ONE, 1, 2), function(F.pad, ONE, (1, 0))],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_one_tensor(name: str) -> None:
    agrees(network(name, lambda: Between(*(make() for make in FUNCTIONS[name])), (3,)))


class Gated(nn.Module):
    """A gate for all entries, which is a function of a single number."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.number = function, nn.Parameter(torch.rand(()))
        self.stem, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        return self.head(self.stem(x).tanh() * self.function(self.number))


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, F.softplus, torch.exp])
def test_gates_that_are_numbers(function: Any) -> None:
    case = network("gated", lambda: Gated(function), (3,))
    model, lossfunc, X, y = case.build()
    converted = extend(model, use_converter=True)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()):
        extend(lossfunc)(converted(X), y).backward()
    for name, truth in (
        ("grad_batch", oracle.batch_grad),
        ("diag_ggn_exact", oracle.ggn_diag),
        ("diag_h", oracle.hessian_diag),
    ):
        for p, expected in zip(model.parameters(), truth(*case.reference()), strict=True):
            close(getattr(p, name), expected)


class Combined(nn.Module):
    """A function of two tensors."""

    def __init__(self, combine: nn.Module, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.stems = nn.ModuleList([nn.Linear(3, torch.Size(shape).numel()) for shape in shapes])
        self.apart = nn.ModuleList([nn.Unflatten(1, shape) for shape in shapes])
        self.combine, self.flatten = combine, nn.Flatten()
        out = combine(*(torch.zeros(3, *shape) for shape in shapes))
        self.head = nn.Linear(out[0].numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        parts = [apart(stem(x)) for stem, apart in zip(self.stems, self.apart, strict=True)]
        return self.head(self.flatten(self.combine(*parts)))


COMBINED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "matmul": (function(torch.matmul, ONE, TWO), (2, 1), (1, 2)),
    "outer": (function(torch.einsum, "ni,nj->nij", ONE, TWO), (2,), (3,)),
    "mul": (MulModule, (2,), (2,)),
    "mul-broadcast": (MulModule, (2, 1), (1, 2)),
    "sum-broadcast": (SumModule, (2, 2), (1, 2)),
    "stack": (function(torch.stack, [ONE, TWO], dim=1), (2,), (2,)),
    "bilinear": (function(torch.addcmul, ONE, ONE, TWO, value=0.3), (2,), (2,)),
    "where": (function(torch.maximum, ONE, TWO), (3,), (3,)),
}


@pytest.mark.parametrize("name", COMBINED)
def test_functions_of_two_tensors(name: str) -> None:
    make, *shapes = COMBINED[name]
    agrees(network(name, lambda: Combined(make(), *shapes), (3,)))


@pytest.mark.parametrize("shape", [(), (2,), (4, 1), (4, 2), (1, 4, 2)], ids=str)
@pytest.mark.parametrize("samples_first", [True, False])
def test_factors_without_samples(shape: tuple[int, ...], samples_first: bool) -> None:
    """Products with parameters, of some samples, and in slices."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factor = nn.Linear(3, 2), nn.Parameter(torch.rand(shape))

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x if samples_first else x.transpose(0, 1))
            factor = self.factor
            if not samples_first and factor.dim() > 1:  # positions come first
                factor = factor.reshape(4, 1, -1)
            h = h * factor * h[..., :1]
            h = h if samples_first else h.transpose(0, 1)
            return (h @ h.transpose(1, 2) @ (h * 2.5)).flatten(1)

    torch.manual_seed(0)
    net, lossfunc, X = Net().double(), nn.CrossEntropyLoss(), torch.rand(3, 4, 3).double()
    y = torch.tensor([0, 5, 2])
    truth = oracle.batch_ggn_diag(net, lossfunc, X, y)
    net, lossfunc = extend(net, use_converter=True), extend(lossfunc)
    for samples, limit in itertools.product([None, [2, 0]], [2**20, 64]):
        loss = lossfunc(net(X), y)
        with slice_bytes(limit), backpack(extensions.BatchDiagGGNExact(subsampling=samples)):
            loss.backward()
        expected = truth if samples is None else [t[samples] for t in truth]
        close([p.diag_ggn_exact_batch for p in net.parameters()], expected)


@pytest.mark.parametrize(
    "make",
    [
        function(torch.cumsum, ONE, 0),
        function("mean", ONE, dim=0, keepdim=True),
        function(F.normalize, ONE, dim=0),
    ],
)
def test_functions_that_mix_samples(make: Callable[[], nn.Module]) -> None:
    problem = network("mixing", lambda: Between(make()), (3,)).build()
    with pytest.raises(ValueError, match="different samples of the batch"):
        run(problem, extensions.DiagGGNExact())


def test_functions_that_are_random() -> None:
    make = function(F.dropout, ONE, 0.5, training=True)
    problem = network("random", lambda: Between(make()), (3,)).build()
    with pytest.raises(NotImplementedError, match=r"when it is evaluated again.*register"):
        run(problem, extensions.DiagGGNExact())


# Functions that look affine at random values, and their data.
CURVED: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "labels": (
        lambda h, d: F.cosine_embedding_loss(h, d[:, :4], d[:, 4], reduction="none"),
        torch.cat([torch.rand(3, 4), torch.tensor([[1.0], [-1.0], [1.0]])], 1),
    ),
    "masked": (lambda h, d: torch.masked.logaddexp(h, d, other_mask=d > 0.5), torch.rand(3, 4)),
}


@pytest.mark.parametrize("name", CURVED)
def test_curvature_at_the_values_of_the_call(name: str) -> None:
    """A function that is affine at random values has the Hessian of where it is."""
    function, data = CURVED[name]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.linear(x[:, :3]), x[:, 3:])

    torch.manual_seed(0)
    net = Net().double()
    X = torch.cat([torch.rand(3, 3), data], 1).double()
    y = torch.rand_like(net(X).detach())
    lossfunc = nn.MSELoss()
    expected = oracle.hessian_diag(net, lossfunc, X, y)
    net, lossfunc = extend(net, use_converter=True), extend(lossfunc)
    with backpack(extensions.DiagHessian()):
        lossfunc(net(X), y).backward()
    close([p.diag_h for p in net.parameters()], expected)


def test_vectors_and_samples_that_a_batching_rule_confuses() -> None:
    """A rule of torch (of ``as_strided_scatter``) is wrong for the first of several vectors."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.source = nn.Linear(3, 3), nn.Parameter(torch.rand(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_strided_scatter(self.linear(x), self.source, (2, 2), (2, 1), 0)

    torch.manual_seed(0)
    X, y = torch.rand(3, 3).double(), torch.rand(3, 3).double()
    net, lossfunc = Net().double(), nn.MSELoss()
    expected = oracle.ggn_diag(net, lossfunc, X, y)
    net, lossfunc = extend(net, use_converter=True), extend(lossfunc)
    with backpack(extensions.DiagGGNExact()):
        lossfunc(net(X), y).backward()
    close({n: p.diag_ggn_exact for n, p in net.named_parameters()}["source"], expected[0])


@pytest.mark.parametrize("converter", [True, "record"])
def test_running_statistics_change_once(converter: Any) -> None:
    """Derivatives evaluate a function again, which changes its arguments in place."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 8)
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("var", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x).unflatten(1, (2, 4))
            return F.instance_norm(x, self.mean, self.var, use_input_stats=True).flatten(1)

    torch.manual_seed(0)
    net = Net().double()
    plain, X, y = copy.deepcopy(net), torch.rand(3, 3).double(), torch.rand(3, 8).double()
    expected = oracle.hessian_diag(plain, nn.MSELoss(), X, y)
    net, lossfunc = extend(net, use_converter=converter), extend(nn.MSELoss())
    with backpack(extensions.DiagHessian(), extensions.DiagGGNExact()):
        lossfunc(net(X), y).backward()
    close([p.diag_h for p in net.parameters()], expected)
    close([*net.buffers()], [plain.mean, plain.var])


# --------------------------------------------------------------------------------------
# Positive curvature
# --------------------------------------------------------------------------------------


def test_positive_curvature_of_a_convex_function() -> None:
    """Where all second derivatives are positive, it is the Hessian."""

    class Convex(nn.Module):
        """Squares, and weights and a loss whose gradients are positive."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)
            self.square, self.log = function("square", ONE)(), function(torch.logsumexp, ONE, 1)()
            self.last = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            """[N, 3] -> [N, 1]."""
            x = self.square(self.second(self.square(self.first(x))))
            return self.last(self.log(x).unsqueeze(1))

    torch.manual_seed(0)
    model = Convex().double()
    for linear in (model.second, model.last):
        linear.weight.data.abs_()
        linear.bias.data.abs_()
    X = torch.randn(3, 3, dtype=torch.float64)
    y = model(X).detach() - 1
    exts = [
        extensions.HMP(),
        extensions.PCHMP("clipped", modify="clip"),
        extensions.PCHMP("absolute", modify="abs"),
    ]
    params = run(Problem(model, nn.MSELoss(), X, y), *exts)
    close(products(params, "clipped"), products(params, "hmp"))
    close(products(params, "absolute"), products(params, "hmp"))


class Both(nn.Module):
    """Two linear layers side by side."""

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        for name, value in zip("abcd", (p for m in layers for p in m.parameters()), strict=True):
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        """[N, I] -> [N, O + O]."""
        return torch.cat([F.linear(x, self.a, self.b), F.linear(x, self.c, self.d)], 1)


class Apply(nn.Module):
    """Apply a function of the two halves."""

    def __init__(self, combine: nn.Module) -> None:
        super().__init__()
        self.combine = (combine,)

    def forward(self, x: Tensor) -> Tensor:
        """[N, O + O] -> [N, *]."""
        return self.combine[0](*x.chunk(2, 1)).flatten(1)


@pytest.mark.parametrize("modify", ["clip", "abs"])
@pytest.mark.parametrize("name", ["mul", "outer", "bilinear"])
def test_positive_curvature_of_several_inputs(name: str, modify: str) -> None:
    """The second derivative is one matrix for all inputs; its positive part is, too."""
    make, (size,), _ = COMBINED[name]
    case = network(name, lambda: Combined(make(), (size,), (size,)), (3,))
    model, loss, X, y = case.build()
    chain = nn.Sequential(Both(*model.stems), Apply(model.combine), model.head)
    expected = oracle.pch_blocks(chain, loss, X, y, modify)
    params = run(Problem(model, loss, X, y), extensions.PCHMP(modify=modify))
    close(products(params, "pchmp"), expected)


# --------------------------------------------------------------------------------------
# Parameters
# --------------------------------------------------------------------------------------


class Reading(nn.Module):
    """Everything that can be read: a parameter twice, that of a Linear, a buffer."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.shared, self.buffer = Holder(3), nn.Module()
        self.shared.requires_grad_(not frozen)
        self.buffer.register_buffer("value", torch.randn(3))
        self.read, self.again = self.shared.reader(), self.shared.reader()
        self.constant = ParameterModule(self.buffer, "value")
        self.weight = ParameterModule(self.stem, "weight")
        self.linear, self.tanh = FunctionModule(F.linear, (ONE, TWO)), nn.Tanh()
        self.sum, self.mul = SumModule(), MulModule()

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        x = self.tanh(self.sum(self.stem(x), self.read(), self.constant()))
        x = self.linear(self.mul(x, self.again()), self.tanh(self.weight()))
        return self.head(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_are_read_several_times(frozen: bool) -> None:
    agrees(network("reading", lambda: Reading(frozen), (3,)))


class Scores(nn.Module):
    """Log-potentials of labels, as in a conditional random field: an entry of a vector for each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(3, 3), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """[N, 2, 3], [N, 2] -> []."""
        h = self.linear(x)
        score = self.first[labels[:, 0]] + h[:, 0].gather(1, labels[:, :1]).squeeze(1)
        return (torch.logsumexp(self.first + h[:, 0], 1) - score).mean()


@pytest.mark.parametrize("converter", [True, "record"])
def test_one_entry_of_a_parameter_for_each_sample(converter: Any) -> None:
    torch.manual_seed(0)
    model, x, labels = Scores().double(), torch.rand(4, 2, 3).double(), torch.arange(8) % 3
    data = x, labels.reshape(4, 2)
    params = list(model.parameters())
    losses = [model(*[t[n : n + 1] for t in data]) / 4 for n in range(4)]
    expected = zip(*[torch.autograd.grad(loss, params) for loss in losses], strict=True)
    with backpack(extensions.BatchGrad()):
        extend(model, use_converter=converter)(*data).backward()
    close([p.grad_batch for p in params], list(map(torch.stack, expected)))


def test_factor_of_a_parameter_is_its_block() -> None:
    """Also where it is the weight of a layer, which alone would have two factors."""
    case = network("reading", lambda: Reading(False), (3,))
    params = run(case.build(), extensions.KFLR())
    for p, block in zip(params, oracle.ggn_blocks(*case.reference()), strict=True):
        if len(p.kflr) == 1:
            close(p.kflr, [block])
    assert [len(p.kflr) for p in params] == [1, 1, 2, 1, 1]


# --------------------------------------------------------------------------------------
# Attention
# --------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Two queries attend to three keys and values, from layers of their own."""

    def __init__(self, call: dict[str, Any], both: bool, **options: Any) -> None:
        super().__init__()
        self.call, self.both = call, both
        self.queries, self.keys = nn.Linear(2, 2), nn.Linear(2, options.get("kdim", 2), bias=False)
        self.values = nn.Linear(2, options.get("vdim", 2), bias=False)
        self.attention = nn.MultiheadAttention(2, 2, batch_first=True, **options)
        self.flatten, self.head, self.of_weights = nn.Flatten(), nn.Linear(4, 3), nn.Linear(6, 3)
        self.sum = SumModule()

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 2] -> [N, 3]."""
        parts = self.queries(x[:, :2]), self.keys(x), self.values(x)
        attended, weights = self.attention(*parts, **self.call)
        scores = self.head(self.flatten(attended))
        return self.sum(scores, self.of_weights(self.flatten(weights))) if self.both else scores


CAUSAL = torch.tensor([[False, True, True], [False, False, True]])
PADDING = torch.tensor([[False] * 3, [False, False, True], [False, True, False]])
ATTENTION: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "weights": ({}, True, {}),
    "no weights": ({"need_weights": False}, False, {}),
    "sizes": ({}, False, {"kdim": 1, "vdim": 3, "bias": False}),
    "mask": ({"attn_mask": CAUSAL}, True, {}),
    "mask of numbers": (
        {"attn_mask": torch.tensor([[0.5, -1.0, 0.0], [2.0, 0.0, 1.0]]), "need_weights": False},
        False,
        {},
    ),
    "padding": ({"key_padding_mask": PADDING, "need_weights": False}, False, {}),
    "masks": ({"key_padding_mask": PADDING, "attn_mask": CAUSAL}, False, {}),
    "bias of keys": ({"need_weights": False}, False, {"add_bias_kv": True, "add_zero_attn": True}),
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_attention(name: str) -> None:
    call, both, options = ATTENTION[name]

    def model() -> nn.Module:
        result = Attending(call, both, **options)
        result.of_weights.requires_grad_(both)
        return result

    agrees(network(name, model, (3, 2)))


def test_attention_with_dropout_in_evaluation_mode() -> None:
    def model() -> nn.Module:
        result = Attending({}, False, dropout=0.5)
        result.of_weights.requires_grad_(False)
        return result

    agrees(network("dropout", model, (3, 2), train=False))


# --------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", select("unknown"), ids=str)
def test_samples_are_treated_in_chunks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time or all at once: the same."""
    monkeypatch.setattr(vmapped, "CHUNK_ENTRIES", 1)
    agrees(case)


def test_powers_by_integers_are_told_apart() -> None:
    """A power of 1 is affine, one of 3 is not, though both tensors look alike."""

    class Powers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            one, three = torch.ones(3, dtype=torch.long), torch.full((3,), 3)
            return torch.pow(h, one) + torch.pow(h, three)

    torch.manual_seed(0)
    model, loss = Powers(), nn.MSELoss()
    batch = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    expected = oracle.hessian_diag(copy.deepcopy(model), loss, *batch)
    recorded = extend(model, use_converter="record")
    with backpack(extensions.DiagHessian()):
        extend(loss)(recorded(batch[0]), batch[1]).backward()
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_h, value)


class Bent(torch.autograd.Function):
    """Quadratic for large numbers; autograd differentiates it once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x.abs() < 100, x, x * x / 100)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.where(x.abs() < 100, torch.ones_like(x), x / 50)


@torch.fx.wrap
def bent(x: Tensor) -> Tensor:
    return Bent.apply(x)


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("scale", [1, 1000])
def test_functions_that_are_affine_for_small_numbers_alone(scale: float) -> None:
    """Without a second derivative of torch, an error where the data reach what is curved."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return bent(self.linear(x))

    torch.manual_seed(0)
    model, X = extend(Model(), use_converter=True), scale * torch.rand(5, 3)
    loss = extend(nn.MSELoss())(model(X), torch.rand(5, 3))
    curved = pytest.raises(RuntimeError, match=r"'bent0' .*once_differentiable")
    with curved if scale > 1 else nullcontext(), backpack(extensions.DiagHessian()):
        loss.backward()
    if scale == 1:
        plain = nn.Sequential(model.linear)
        expected = oracle.hessian_diag(copy.deepcopy(plain), nn.MSELoss(), X, torch.rand(5, 3))
        for p, value in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.diag_h, value)


class BentWithoutGraph(Bent):
    """As well, but its backward pass has no graph."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with torch.no_grad():
            return grad * 2


class OfFunction(nn.Module):
    """A function alone."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """[N, *] -> [N, *]."""
        return self.function.apply(x)


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("function", [Bent, BentWithoutGraph])
def test_products_with_functions_that_are_once_differentiable(function: Any) -> None:
    """Autograd multiplies with the Jacobian by a second derivative: products were zero."""
    model = extend(nn.Sequential(nn.Linear(3, 3), OfFunction(function), nn.Linear(3, 2)))
    loss = extend(nn.MSELoss())(model(torch.rand(5, 3)), torch.rand(5, 2))
    with backpack(extensions.GGNMP()):
        loss.backward()
    weight = model[0].weight
    with pytest.raises(NotImplementedError, match=rf"'1' .* function {function.__name__} cannot"):
        weight.ggnmp(torch.rand(1, *weight.shape))


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("extension", [extensions.DiagHessian, extensions.HMP])
def test_functions_without_a_second_derivative_are_named(
    extension: type[extensions.DiagHessian | extensions.HMP],
) -> None:
    """The error is torch's, with the function and what to do."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.multi_margin_loss(self.linear(x), torch.arange(4), p=2, reduction="none")

    model = extend(Model(), use_converter=True)
    loss = extend(nn.MSELoss())(model(torch.rand(4, 3)), torch.rand(4))
    told = r"'multi_margin_loss0' .* cannot be differentiated twice .*Use first-order quantities"
    with pytest.raises(NotImplementedError, match=told):
        with backpack(extension()):
            loss.backward()
        for p in model.parameters():
            p.hmp(torch.rand(1, *p.shape))

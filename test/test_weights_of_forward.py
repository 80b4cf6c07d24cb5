"""Quantities are those of the forward pass, whatever happens to weights and options since."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend, extensions, memory_cleanup
from backpack.core.record.alive import all_live_calls
from backpack.custom_module.pad import Pad
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)

EXTENSIONS = [
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.SumGradSquared,
    extensions.Variance,
    extensions.DiagGGNExact,
    extensions.DiagGGNMC,
    extensions.BatchDiagGGNExact,
    extensions.BatchDiagGGNMC,
    extensions.SqrtGGNExact,
    extensions.SqrtGGNMC,
    extensions.DiagHessian,
    extensions.BatchDiagHessian,
    extensions.KFAC,
    extensions.KFLR,
    extensions.KFRA,
    extensions.GGNMP,
    extensions.HMP,
    extensions.PCHMP,
]
PRODUCTS = (extensions.GGNMP, extensions.HMP, extensions.PCHMP)


class Recurrent(nn.Module):
    """A recurrent layer between two others."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layer = kind(4, 4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x))[0])


class Scaled(nn.Module):
    """Parameters that functions read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.a, self.b, self.c = (nn.Parameter(torch.rand(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) * (self.a * self.b) + self.c))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(
        nn.Linear(3, 4), nn.Sigmoid(), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 3, 2), nn.Sigmoid(), nn.Conv1d(3, 2, 2), nn.Flatten()
    ),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True),
    "unknown": lambda: nn.Sequential(nn.Linear(3, 4), Unknown(), nn.Linear(4, 2)),
}
SHAPES = {NETWORKS["lstm"]: (5, 6, 3), NETWORKS["gru"]: (5, 6, 3), NETWORKS["attention"]: (5, 6, 4)}


class Unknown(nn.Module):
    """A module that the library does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.rand(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.one * self.other * x)


def step(p: nn.Parameter) -> None:
    torch.optim.SGD([p], lr=0.5).step()


@torch.no_grad()
def add(p: nn.Parameter) -> None:
    p.add_(p.grad, alpha=-0.5)


def behind_autograd(p: nn.Parameter) -> None:
    p.data.add_(p.grad, alpha=-0.5)


def replaced(p: nn.Parameter) -> None:
    p.data = p.data - 0.5 * p.grad


CHANGES = [step, add, behind_autograd, replaced]
Attach = Callable[[nn.Module], None]


def run(
    new: Callable[[], nn.Module], attach: Attach, ext: BackpropExtension, use_converter: Any = False
) -> list[Any]:
    """Return the quantities of all parameters; of products, those with given vectors."""
    torch.manual_seed(0)
    model = extend(new().double(), use_converter=use_converter)
    lossfunc = extend(nn.MSELoss())
    attach(model)
    X = torch.rand(*SHAPES.get(new, (5, 3)), dtype=torch.float64)
    output = model(X)
    loss = lossfunc(output, torch.rand_like(output))
    vectors = [torch.rand(2, *p.shape, dtype=p.dtype) for p in model.parameters()]
    torch.manual_seed(2)
    with backpack(ext):
        loss.backward()
    values = [getattr(p, ext.savefield) for p in model.parameters()]
    return [
        value(v) if isinstance(ext, PRODUCTS) else value
        for value, v in zip(values, vectors, strict=True)
    ]


def after_accumulation(change: Callable[[nn.Parameter], None]) -> Attach:
    def attach(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(change)

    return attach


def nothing(model: nn.Module) -> None:
    pass


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", EXTENSIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_optimiser_steps_between_the_layers(
    name: str, kind: type[BackpropExtension], change: Callable[[nn.Parameter], None]
) -> None:
    """Every quantity is what it is without them."""
    new = NETWORKS[name]
    try:
        expected = run(new, nothing, kind())
    except NotImplementedError:
        pytest.skip("not supported by this extension")
    torch.testing.assert_close(run(new, after_accumulation(change), kind()), expected)


OPTIONS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "negative_slope": (nn.LeakyReLU, 3.0),
    "alpha": (nn.ELU, 3.0),
    "eps": (lambda: nn.LayerNorm(4), 2.0),
    "num_groups": (lambda: nn.GroupNorm(2, 4), 4),
    "padding_mode": (lambda: around(nn.Conv1d(1, 1, 3, padding=1)), "circular"),
    "stride": (lambda: around(nn.ConvTranspose1d(1, 1, 1)), (2,)),
    "count_include_pad": (lambda: around(nn.AvgPool1d(3, 1, 1)), False),
    "pad": (lambda: Pad((1, -1)), (-1, 1)),
    "factors": (lambda: Factors(), torch.full((4,), 3.0, dtype=torch.float64)),
    "power": (lambda: Factors(), 3.0),
    "frequency": (lambda: Wave(), 3.0),
    "count": (lambda: Slotted(), 3),
}


class Wave(nn.Module):
    """Its class names no constants, and it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.frequency, self.count = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return (self.frequency * x).sin()


class Factors(nn.Module):
    """Has a tensor among its constants, and one that its class has until it gets its own."""

    __constants__ = ("factors", "power")
    power = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.factors * x.abs() ** self.power


class Slotted(Wave):
    """Keeps an attribute in a slot."""

    __slots__ = ("power",)

    def __init__(self) -> None:
        super().__init__()
        self.power = 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** self.power


def around(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4)), layer, nn.Flatten())


@pytest.mark.parametrize("kind", EXTENSIONS)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_between_the_passes(option: str, kind: type[BackpropExtension]) -> None:
    """Every quantity is that of the options that a module had in the forward pass."""
    new, value = OPTIONS[option]

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, option):
                module.register_forward_hook(lambda m, *_: setattr(m, option, value))

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), new(), nn.Linear(4, 2))

    torch.testing.assert_close(run(network, change, kind()), run(network, nothing, kind()))


class Terms(nn.Module):
    """Has its options in a sequence, which may change in place."""

    def __init__(self, factors: Any) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.factors
        return one * x + two * x.sin()


def change_factors(new: Any, layer: nn.Module, *_: Any) -> None:
    factors: Any = layer.factors
    if isinstance(factors, list):
        factors[:] = new
    else:
        layer.factors = new


@pytest.mark.parametrize("kind", [extensions.BatchGrad, extensions.DiagHessian, extensions.HMP])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((1.0, 2.0), (3.0, 4.0)),
        (torch.Size([1, 2]), torch.Size([3, 4])),
        ([1.0, 2.0], [3.0, 4.0]),
    ],
    ids=["tuple", "size", "list"],
)
def test_sequences_of_options_between_the_calls(
    old: Any, new: Any, kind: type[BackpropExtension]
) -> None:
    """Each call of a module has those that it had then."""

    def network(*layers: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), layers[0], nn.Linear(4, 4), layers[1])

    def of_one() -> nn.Module:
        layer = Terms(deepcopy(old))
        return network(layer, layer)

    def attach(model: nn.Module) -> None:
        layer: Any = model[1]
        layer.register_forward_hook(partial(change_factors, new))

    expected = run(lambda: network(Terms(old), Terms(new)), nothing, kind())
    torch.testing.assert_close(run(of_one, attach, kind()), expected)


def test_options_of_a_loss_between_the_passes() -> None:
    torch.manual_seed(0)
    model, lossfunc = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(torch.rand(5, 4)), torch.tensor([0, 1, 2, 1, 0]))
    values = []
    for _ in range(2):
        with backpack(extensions.DiagGGNExact(), extensions.GGNMP()):
            loss.backward(retain_graph=True)
        values.append(model.bias.diag_ggn_exact)
        lossfunc.reduction, lossfunc.ignore_index = "sum", 1
        values.append(model.bias.ggnmp(torch.eye(3)).diag())
    for value in values[1:]:
        torch.testing.assert_close(value, values[0])


@pytest.mark.parametrize(
    ("loss_class", "option"), [(nn.SmoothL1Loss, "beta"), (nn.HuberLoss, "delta")]
)
def test_options_that_the_class_of_a_loss_does_not_name(
    loss_class: type[nn.Module], option: str
) -> None:
    torch.manual_seed(0)
    model, x, y = extend(nn.Linear(4, 3)), torch.rand(5, 4), torch.rand(5, 3)
    values = []
    for changes in (False, True):
        lossfunc: Any = extend(loss_class())
        loss = lossfunc(model(x), y)
        if changes:
            setattr(lossfunc, option, 1e-3)
        with backpack(extensions.DiagGGNExact()):
            loss.backward()
        values.append(model.weight.diag_ggn_exact)
    torch.testing.assert_close(*values)


def test_options_of_a_class_whose_constructor_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backpack.core.record.module_state._OPTIONS", {})
    monkeypatch.setattr(nn.HuberLoss, "__init__", partialmethod(nn.HuberLoss.__init__))
    test_options_that_the_class_of_a_loss_does_not_name(nn.HuberLoss, "delta")


@pytest.mark.filterwarnings("ignore:No rule for")
def test_what_an_extension_hook_counts_at_a_module() -> None:
    """It is no option of a call that comes later in the backward pass."""
    torch.manual_seed(0)
    wave, lossfunc = Wave(), extend(nn.MSELoss())
    model = extend(nn.Sequential(nn.Linear(4, 3), wave, wave))
    loss = lossfunc(model(torch.rand(5, 4)), torch.rand(5, 3))

    def hook(module: nn.Module) -> None:
        if isinstance(module, Wave):
            module.count += 1

    with backpack(extensions.BatchGrad(), extension_hook=hook):
        loss.backward()
    assert wave.count == 4


def test_an_extension_hook_gets_the_module_that_was_called() -> None:
    """With the options of its call; and its copy leaves nothing behind."""
    layers = [nn.Linear(4, 3), nn.LeakyReLU(0.5), nn.Linear(3, 3), nn.CrossEntropyLoss()]
    *inner, lossfunc = [extend(layer) for layer in layers]
    loss = lossfunc(nn.Sequential(*inner)(torch.rand(5, 4)), torch.tensor([0, 1, 2, 1, 0]))
    inner[1].negative_slope, lossfunc.reduction = 0.1, "sum"
    shown = []

    def hook(module: nn.Module) -> None:
        shown.append(module)
        assert getattr(module, "negative_slope", 0.5) == 0.5
        assert getattr(module, "reduction", "mean") == "mean"

    with backpack(extensions.DiagGGNExact(), extension_hook=hook):
        loss.backward(retain_graph=True)
    assert {*map(id, shown)} == {*map(id, layers)}
    assert inner[1].negative_slope == 0.1 and lossfunc.reduction == "sum"
    for layer in layers:
        memory_cleanup(layer)
    assert not all_live_calls()


class Dilated(nn.Module):
    """One convolution, with another dilation in each of its calls; or one for each."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.first, other, self.last = nn.Conv1d(1, 2, 2), nn.Conv1d(1, 2, 2), nn.Linear(6, 2)
        self.second = self.first if shares else other
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        both = []
        for layer, dilation in ((self.first, 1), (self.second, 2)):
            layer.dilation = (dilation,)
            both.append(layer(x.unsqueeze(1)).flatten(1))
        return self.last(torch.cat(both, 1))


@pytest.mark.parametrize("kind", [kind for kind in EXTENSIONS if kind is not extensions.KFRA])
def test_options_that_each_call_has_for_itself(kind: type[BackpropExtension]) -> None:
    values = [run(partial(Dilated, shares), nothing, kind(), "record") for shares in (True, False)]
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("converter", ["trace", "record"])
@pytest.mark.parametrize("kind", [kind for kind in EXTENSIONS if kind is not extensions.KFRA])
def test_parameters_of_functions(
    kind: type[BackpropExtension], converter: str, change: Callable[[nn.Parameter], None]
) -> None:
    """Modules without parameters read them, too (KFRA knows none with several inputs)."""
    expected = run(Scaled, nothing, kind(), converter)
    torch.testing.assert_close(run(Scaled, after_accumulation(change), kind(), converter), expected)


def all_at_once(model: nn.Module) -> None:
    """A hook of the last layer changes all parameters."""

    def change(_: Any) -> None:
        for p in model.parameters():
            p.data.mul_(0.5)

    [*model.parameters()][-1].register_post_accumulate_grad_hook(change)


def of_activations(model: nn.Module) -> None:
    def attach(module: nn.Module, inputs: Any, output: Any) -> None:
        def change(grad: Tensor) -> None:
            for p in model[5].parameters():
                p.data.mul_(0.5)

        output.register_hook(change)

    model[2].register_forward_hook(attach)


def of_modules(model: nn.Module) -> None:
    def change(module: nn.Module, *gradients: Any) -> None:
        with torch.no_grad():
            for p in model[5].parameters():
                p.mul_(0.5)

    model[4].register_full_backward_hook(change)


def of_nodes(model: nn.Module) -> None:
    def attach(module: nn.Module, inputs: Any, output: Any) -> None:
        def change(*gradients: Any) -> None:
            for p in model[5].parameters():
                p.data.mul_(0.5)

        output.grad_fn.register_hook(change)

    model[2].register_forward_hook(attach)


@pytest.mark.parametrize("kind", EXTENSIONS)
def test_hooks_of_modules(kind: type[BackpropExtension]) -> None:
    """Not only those of parameters."""
    new = NETWORKS["mlp"]
    torch.testing.assert_close(run(new, of_modules, kind()), run(new, nothing, kind()))


@pytest.mark.parametrize("attach", [of_activations, of_nodes])
@pytest.mark.parametrize("kind", EXTENSIONS)
def test_hooks_that_cannot_be_foreseen(kind: type[BackpropExtension], attach: Attach) -> None:
    """They are noticed where it matters."""
    new = NETWORKS["mlp"]
    if not kind().expects_backpropagation_quantities():
        torch.testing.assert_close(run(new, attach, kind()), run(new, nothing, kind()))
        return
    with pytest.raises(RuntimeError, match=r"'5' \(Linear\).* was changed during the backward"):
        run(new, attach, kind())


@pytest.mark.parametrize("kind", [extensions.DiagGGNExact, extensions.KFLR, extensions.HMP])
def test_layers_below_the_hook(kind: type[BackpropExtension]) -> None:
    """A change before the backward pass has come to them, which autograd does not notice.

    What arrives from the loss is not that of the forward pass, either, but of no importance here.
    """
    new = NETWORKS["convolutions"]
    torch.testing.assert_close(run(new, all_at_once, kind())[-1:], run(new, nothing, kind())[-1:])


def test_results_belong_to_the_parameters() -> None:
    """Hooks and rules of users find them there, and parameters as they are now."""
    seen = []

    def hook(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            seen.append((p, p.diag_ggn_exact, p.detach().clone()))

    torch.manual_seed(0)
    model, lossfunc = extend(NETWORKS["mlp"]()), extend(nn.MSELoss())
    after_accumulation(step)(model)
    loss = lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2))
    with backpack(extensions.DiagGGNExact(), extension_hook=hook):
        loss.backward()
    assert {p for p, _, _ in seen} == {*model.parameters()}
    for p, value, then in seen:
        assert p.diag_ggn_exact is value
        assert torch.equal(p, then)


def test_rules_of_users() -> None:
    """They read the weights of the forward pass; their results are saved where they belong."""

    class Rule(FirstOrderModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["weight_ih_l0"])

        def weight_ih_l0(self, ext: Any, module: Any, *_: Any) -> Tensor:
            return module.weight_ih_l0.detach().clone()

    torch.manual_seed(0)
    model, lossfunc = extend(nn.LSTM(3, 4, batch_first=True)), extend(nn.MSELoss())
    before = model.weight_ih_l0.detach().clone()
    after_accumulation(step)(model)
    output = model(torch.rand(5, 6, 3))[0]
    loss = lossfunc(output, torch.rand_like(output))
    with backpack(FirstOrderBackpropExtension("read", {nn.LSTM: Rule()})):
        loss.backward()
    assert torch.equal(model.weight_ih_l0.read, before)
    assert not torch.equal(model.weight_ih_l0, before)


def test_graphs_that_are_kept() -> None:
    """A second pass has the weights of the forward pass as well, where autograd can go on."""
    model, lossfunc = extend(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))), extend(nn.MSELoss())
    after_accumulation(behind_autograd)(model)
    loss = lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2))
    found = []
    for _ in range(2):
        with backpack(extensions.DiagGGNExact(), retain_graph=True):
            loss.backward(retain_graph=True)
        found.append([p.diag_ggn_exact for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_checkpoints() -> None:
    """Calls that are made during the backward pass."""

    def found(attach: Attach) -> list[Tensor]:
        torch.manual_seed(0)
        model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
        lossfunc = extend(nn.MSELoss())
        attach(model)
        x = torch.rand(5, 3, dtype=torch.float64)
        output = checkpoint(model[1:], model[0](x), use_reentrant=False)
        loss = lossfunc(output, torch.rand_like(output))
        with backpack(extensions.DiagGGNExact()):
            loss.backward()
        return [p.diag_ggn_exact for p in model.parameters()]

    torch.testing.assert_close(found(after_accumulation(step)), found(nothing))


def test_what_cannot_be_known_is_an_error() -> None:
    """Frozen parameters are not copied, and differentiable quantities need those of the graph."""

    def change(model: nn.Sequential) -> None:
        with torch.no_grad():
            model[2].weight.mul_(0.5)

    for is_frozen in (True, False):
        model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        lossfunc = extend(nn.MSELoss())
        model[2].weight.requires_grad_(not is_frozen)
        model[2].bias.register_post_accumulate_grad_hook(lambda _, m=model: change(m))
        loss = lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2))
        message = r"'2' \(Linear\), of shape \[2, 4\], was changed during the backward pass"
        with backpack(extensions.DiagGGNExact()), pytest.raises(RuntimeError, match=message):
            loss.backward(create_graph=not is_frozen)
        assert not hasattr(model[0].weight, "diag_ggn_exact")
        model.zero_grad()  # gradients with a graph keep it, and it keeps them


@pytest.mark.parametrize("kind", PRODUCTS, ids=lambda ext: ext.__name__)
@pytest.mark.parametrize("change", ["in place", "data", "other data"])
def test_products_of_parameters_that_have_changed(kind: Any, change: str) -> None:
    """They are evaluated after the backward pass, with the parameters as they are then."""
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    loss = extend(nn.MSELoss())(model(torch.rand(5, 3)), torch.rand(5, 2))
    with backpack(kind()):
        loss.backward()
    p = model[2].weight
    product = getattr(model[0].bias, kind().savefield)
    product(torch.rand(2, 4))
    if change == "in place":
        with torch.no_grad():
            p.mul_(0.5)
    elif change == "data":
        p.data.mul_(0.5)
    else:
        p.data = p.data * 0.5
    with pytest.raises(RuntimeError, match=r"was changed .* after the backward pass"):
        product(torch.rand(2, 4))


def test_products_read_weights_behind_the_parameter_alone() -> None:
    """A change that nobody counts leaves the product of a later layer as it was."""
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    loss = extend(nn.MSELoss())(model(torch.rand(5, 3)), torch.rand(5, 2))
    with backpack(extensions.HMP()):
        loss.backward()
    product, vectors = model[2].weight.hmp, torch.rand(2, 2, 4)
    before = product(vectors)
    model[0].weight.data.mul_(0.5)
    torch.testing.assert_close(product(vectors), before, rtol=0, atol=0)
    model[2].weight.data.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"was changed .* after the backward pass"):
        model[0].weight.hmp(torch.rand(2, 4, 3))


class ReadsDirectly(nn.Module):
    """Functions read its parameters, some of them several times, or computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.b = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.rand(4))
        self.w, self.v = nn.Parameter(torch.rand(4, 3)), nn.Parameter(torch.rand(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(nn.functional.linear(x, self.w) * self.q.exp()) * self.q + self.b
        return nn.functional.linear(torch.sigmoid(h), self.v * 1.0)


@pytest.mark.parametrize("how", ["trace", "record"])
@pytest.mark.parametrize("kind", [extensions.GGNMP, extensions.HMP], ids=lambda k: k.__name__)
def test_products_notice_parameters_that_functions_read(kind: Any, how: Any) -> None:
    """Whichever is changed behind autograd's back: products are those of before, or refused."""
    torch.manual_seed(0)
    model = extend(ReadsDirectly().double(), use_converter=how)
    X, y = torch.rand(5, 3).double(), torch.rand(5, 2).double()
    loss = extend(nn.MSELoss())(model(X), y)
    with backpack(kind()):
        loss.backward()
    refused = set()
    for name, p in model.named_parameters():
        product, vectors = getattr(p, kind().savefield), torch.rand(2, *p.shape).double()
        before = product(vectors)
        for other, q in model.named_parameters():
            old = q.detach().clone()
            q.data.mul_(0.5)
            try:
                torch.testing.assert_close(product(vectors), before, rtol=0, atol=0)
            except RuntimeError:
                refused.add((name, other))
            q.data.copy_(old)
    assert {("q", "q"), ("w", "q")} <= refused


def columns_swapped(p: Tensor) -> None:
    p.data.copy_(p.data.flip(1).clone())


def signs_changed(p: Tensor) -> None:
    p.data[0].neg_()


NORM_KEEPING = pytest.mark.parametrize("change", [columns_swapped, signs_changed])


@NORM_KEEPING
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_changes_that_keep_the_norm(change: Callable[[Tensor], None], frozen: bool) -> None:
    """Of a weight without hooks, by a hook of an activation, behind autograd's back."""
    model = extend(NETWORKS["mlp"]())
    last = model[5].weight.requires_grad_(not frozen)
    hidden = model[:4](torch.rand(5, 3))
    hidden.register_hook(lambda grad: change(last))
    loss = extend(nn.MSELoss())(model[4:](hidden), torch.rand(5, 2))
    with (
        pytest.raises(RuntimeError, match=r"'5' \(Linear\), of shape \[2, 4\], was changed during"),
        backpack(extensions.DiagGGNExact()),
    ):
        loss.backward()


@NORM_KEEPING
@pytest.mark.parametrize("ext", PRODUCTS)
def test_products_after_changes_that_keep_the_norm(
    change: Callable[[Tensor], None], ext: Any
) -> None:
    model = extend(NETWORKS["mlp"]())
    loss = extend(nn.MSELoss())(model(torch.rand(5, 3)), torch.rand(5, 2))
    with backpack(ext("product")):
        loss.backward()
    product, vectors = model[0].weight.product, torch.rand(1, 4, 3)
    before = product(vectors)
    torch.testing.assert_close(product(vectors), before)
    change(model[5].weight)
    with pytest.raises(RuntimeError, match=r"was changed .* after the backward pass"):
        product(vectors)


@pytest.mark.parametrize("second", [False, True], ids=["one pass", "second pass"])
@pytest.mark.parametrize("ext", [extensions.DiagGGNExact, extensions.DiagHessian, extensions.KFLR])
def test_other_memory_between_the_passes(ext: Any, second: bool) -> None:
    """Autograd still has the weights of the forward pass, and so has first order."""
    model = extend(NETWORKS["mlp"]())
    loss = extend(nn.MSELoss())(model(torch.rand(5, 3)), torch.rand(5, 2))
    if second:
        with backpack(ext(), retain_graph=True):
            loss.backward(retain_graph=True)
        model.zero_grad()
    for p in model.parameters():
        p.data = p.data * 0.5
    with (
        pytest.raises(RuntimeError, match=r"'5' \(Linear\) was given other memory"),
        backpack(ext()),
    ):
        loss.backward()


def test_other_memory_between_the_passes_in_first_order() -> None:
    model = extend(NETWORKS["convolutions"]())
    loss = extend(nn.MSELoss())(model(torch.rand(5, 3)), torch.rand(5, 2))
    for p in model.parameters():
        p.data = p.data * 0.5
    with backpack(extensions.BatchGrad()):
        loss.backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@pytest.mark.parametrize("change", ["transposed", "antisymmetric", "swapped"])
def test_changes_of_a_large_square_weight(change: str) -> None:
    """They are noticed when a product reads the weight, though no version tells."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(4, 150), nn.Linear(150, 150), nn.Linear(150, 3)))
    loss = extend(nn.CrossEntropyLoss())(model(torch.rand(5, 4)), torch.randint(3, (5,)))
    with backpack(extensions.GGNMP()):
        loss.backward()
    p, weight = model[0].weight, model[1].weight
    other = torch.randn(150, 150)
    changed = {
        "transposed": weight.detach().T.clone(),
        "antisymmetric": weight.detach() + other - other.T,
        "swapped": weight.detach().roll(1, 0),
    }
    p.ggnmp(torch.rand(1, *p.shape))
    weight.data.copy_(changed[change])
    with pytest.raises(RuntimeError, match="changed"):
        p.ggnmp(torch.rand(1, *p.shape))

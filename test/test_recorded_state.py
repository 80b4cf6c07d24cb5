"""What a call is was decided in the forward pass, and is not mistaken for what changes later."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import proxy

import oracle
import pytest
import torch
from cases import CASES, Case, Problem
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune

from backpack import CTX, backpack, extend, memory_cleanup
from backpack.core.engine import elided_gradients
from backpack.core.record import alive, calls
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.permute import Permute
from backpack.extensions import (
    GGNMP,
    HMP,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagHessian,
    Variance,
)
from backpack.extensions.firstorder.base import FirstOrderModuleExtension

NEVER = 2**60


def quantities(model: nn.Module) -> list[Tensor]:
    return [t for p in model.parameters() for t in (p.grad_batch, p.diag_ggn_exact)]


def test_an_input_that_changes_afterwards() -> None:
    """Where it came from is known, though another node of the graph has computed it since."""
    torch.manual_seed(0)
    first, act, last = extend(nn.Linear(4, 4)), extend(nn.ReLU()), extend(nn.Linear(4, 3))
    x = first(torch.rand(6, 4))
    y = last(act(x))
    x.add_(nn.Parameter(torch.rand(4)))  # nobody reads what it was before
    (made,), (read,) = map(alive.live_calls, (first, act))
    assert read.origins_in == made.origins_out
    with backpack(BatchGrad()):
        y.sum().backward()
    torch.testing.assert_close(first.weight.grad_batch.sum(0), first.weight.grad)


class Turning(nn.Module):
    """A module of no known class: it turns its input in training, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = True

    def forward(self, x: Tensor) -> Tensor:
        """[N, M, C] -> [M, N, C], or [N, M, C]."""
        turned = x.cumsum(2)
        return turned.transpose(0, 1) if self.training and self.turns else turned


def test_what_stands_for_a_module_with_other_options_is_not_extended() -> None:
    """Also if it is called as one: others would take it for a part of the model."""
    module = extend(Turning())
    x = torch.rand(2, 3, 4, requires_grad=True)
    y = module(x)
    module.turns = False
    (call,) = alive.live_calls(module)
    stands = call.with_options()
    assert stands(x).shape == y.shape != module(x).shape
    assert stands is not module and stands not in CTX.extended()


@pytest.mark.parametrize("change", ["mode", "attribute", "nothing"])
@pytest.mark.filterwarnings("ignore:No rule for")
def test_a_module_that_changes_afterwards(change: str) -> None:
    """Where its samples were is not where they would be now."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(5, 4), Turning(), nn.Linear(4, 2)))
    output = model(torch.rand(4, 6, 5))
    if change == "mode":
        model.eval()
    elif change == "attribute":
        model.get_submodule("1").turns = False
    with backpack(BatchGrad()):
        output.sum().backward()
    assert len(model.get_submodule("2").weight.grad_batch) == 4


class Holding(nn.Linear):
    """Its attribute is a method of itself, and an option changes after each call."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.kinds, self.calls = {"sine": self.turned}, 0

    def turned(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T).sin() + self.bias

    def forward(self, x: Tensor) -> Tensor:
        """[N, 4] -> [N, 3]."""
        self.calls += 1
        return self.kinds["sine"](x)


def _of_sine(layer: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x.sin(), layer.weight, layer.bias)


class _Replacement:
    def __init__(self, layer: nn.Linear):
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return _of_sine(self.layer, x)


def _of_child(parent: nn.ModuleList) -> Any:
    return lambda x: _of_sine(parent[0], x)


LAYERS: list[nn.Linear] = []


def _of_layers(x: Tensor) -> Tensor:
    return _of_sine(LAYERS[0], x)


def _known_elsewhere(layer: nn.Linear, _: Any) -> Any:
    LAYERS[:] = [layer]
    return _of_layers


REPLACED: dict[str, Any] = {
    "by one that calls the former": lambda layer, old: lambda x: old(x.sin()),
    "by a partial one": lambda layer, old: partial(_of_sine, layer),
    "by one with a default": lambda layer, old: lambda x, *, own=layer: _of_sine(own, x),
    "by an object": lambda layer, old: _Replacement(layer),
    "by one that reads the parent": lambda layer, old: _of_child(nn.ModuleList([layer])),
    "by one that reads a list": _known_elsewhere,
    "by one with a proxy": lambda layer, old: partial(_of_sine, proxy(layer)),
}


@pytest.mark.parametrize("which", [None, *REPLACED])
@pytest.mark.filterwarnings("ignore:No rule for")
def test_a_module_whose_attributes_hold_it(which: str | None) -> None:
    """A copy with the options of the call would read the parameters of the module itself."""
    torch.manual_seed(0)
    layer = Holding() if which is None else nn.Linear(4, 3)
    if which is not None:
        vars(layer)["forward"] = REPLACED[which](layer, layer.forward)
    model, lossfunc = extend(nn.Sequential(layer).double()), extend(nn.CrossEntropyLoss())
    x, y = torch.rand(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    for is_called_again in (False, True):
        loss = lossfunc(model(x), y)
        if is_called_again:
            model(x)
        calls = vars(layer).get("calls")
        with backpack(DiagGGNExact(), GGNMP()):
            loss.backward()
        for p in model.parameters():
            units = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
            diagonal = p.ggnmp(units).flatten(1).diag().reshape(p.shape)
            torch.testing.assert_close(diagonal, p.diag_ggn_exact)
            assert diagonal.min() > 0
        assert vars(layer).get("calls") == calls


@pytest.mark.parametrize("holds_itself", [False, True])
def test_a_known_layer_with_other_options(holds_itself: bool) -> None:
    """Whatever its attributes hold, its formulas read the options of the call."""

    def diagonal(changes: bool) -> Tensor:
        torch.manual_seed(0)
        model = extend(nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.1), nn.Linear(3, 2)))
        activation: Any = model[1]
        if holds_itself:
            activation.own = activation.extra_repr
        loss = extend(nn.MSELoss())(model(torch.randn(5, 4)), torch.rand(5, 2))
        if changes:
            activation.negative_slope = 0.9
        with backpack(DiagGGNExact()):
            loss.backward()
        return model[0].weight.diag_ggn_exact

    torch.testing.assert_close(diagonal(changes=True), diagonal(changes=False))


def test_products_of_the_attributes_of_their_call() -> None:
    """Also of those that are tensors or functions, and were replaced since."""
    layer: Any = nn.Linear(4, 3)
    layer.kind, layer.scale, layer.powers = torch.sin, torch.tensor(2.0), [2]
    layer.forward = lambda x: (
        layer.kind(nn.functional.linear(x, layer.weight)) * layer.scale ** layer.powers[0]
    )
    model, lossfunc = extend(nn.Sequential(layer)), extend(nn.CrossEntropyLoss())
    with backpack(HMP()):
        lossfunc(model(torch.rand(6, 4)), torch.zeros(6, dtype=torch.long)).backward()
    v = torch.rand(2, *layer.weight.shape)
    expected = layer.weight.hmp(v)
    layer.kind, layer.scale, layer.powers[0] = torch.cos, torch.tensor(5.0), 3
    assert expected.abs().max() > 0
    torch.testing.assert_close(layer.weight.hmp(v), expected)
    assert layer.kind is torch.cos and layer.powers == [3]


class _PowerLoss(nn.Module):
    """A loss with a method among its attributes, which a copy has of the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.powers, self.kind = 1.0, [2], self.of_powers

    def of_powers(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scale * (x - y).abs().pow(self.powers[0]).sum(1).mean()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[N, C], [N, C] -> []."""
        return self.kind(x, y)


@pytest.mark.parametrize("when", ["before the backward pass", "before the products"])
@pytest.mark.filterwarnings("ignore:No rule for")
def test_products_of_a_loss_whose_copy_reads_it(when: str) -> None:
    def products(when: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = extend(nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2)))
        lossfunc = extend(_PowerLoss())
        loss = lossfunc(model(torch.rand(5, 4)), torch.rand(5, 2))
        if when == "before the backward pass":
            lossfunc.scale, lossfunc.powers[0] = 5.0, 3
        with backpack(HMP(), GGNMP(), DiagGGNExact()):
            loss.backward()
        if when == "before the products":
            lossfunc.scale, lossfunc.powers[0] = 5.0, 3
        units = torch.eye(12).view(12, 3, 4)
        weight = model[0].weight
        return [weight.hmp(units), weight.ggnmp(units), weight.diag_ggn_exact]

    expected = products("never")
    torch.testing.assert_close(products(when), expected)
    torch.testing.assert_close(expected[1].flatten(1).diag().view(3, 4), expected[2])


class _Scaled(nn.Module):
    """An activation without parameters, with a method of it among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 1.0
        self.kind = self.of_sine

    def of_sine(self, x: Tensor) -> Tensor:
        return (self.scale * x).sin()

    def forward(self, x: Tensor) -> Tensor:
        """[N, *] -> [N, *]."""
        return self.kind(x)


@pytest.mark.parametrize("others", [(3.0,), (None, 2.0), (torch.rand(7), 1.0)])
@pytest.mark.filterwarnings("ignore:No rule for")
def test_products_between_changes_of_what_a_copy_reads(others: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), _Scaled(), nn.Linear(3, 2)).double()
    activation: Any = model[1]
    model, lossfunc = extend(model), extend(nn.MSELoss())
    x, y = torch.rand(5, 4, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    with backpack(HMP(), GGNMP(), DiagGGNExact()):
        lossfunc(model(x), y).backward()
    weight = model[0].weight
    units = torch.eye(12, dtype=x.dtype).view(12, 3, 4)
    expected = weight.hmp(units), weight.ggnmp(units)
    truth = oracle.hessian_diag(model, lossfunc, x, y)[0]
    torch.testing.assert_close(expected[0].flatten(1).diag().view(3, 4), truth)
    for other in others:
        activation.scale = other
        torch.testing.assert_close((weight.hmp(units), weight.ggnmp(units)), expected)
    activation.scale = 1.0
    with backpack(HMP()):
        loss = lossfunc(model(x), y)
        del activation.scale
        loss.backward()
    torch.testing.assert_close(weight.hmp(units), expected[0])


@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2)])
def test_sums_of_samples_in_different_places(
    axes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same shapes do not mean the same samples: an error, or nothing that is needed was dropped."""

    def outcome(large: int) -> tuple[str, list[Tensor]]:
        monkeypatch.setattr(calls, "LARGE", large)
        torch.manual_seed(0)
        branches = Parallel(nn.Linear(4, 4), Permute(*axes), merge_module=SumModule())
        model = extend(nn.Sequential(nn.Linear(4, 4), branches, nn.Flatten(), nn.Linear(12, 2)))
        loss = extend(nn.MSELoss())(model(torch.rand(3, 3, 4)), torch.rand(3, 2))
        try:
            with backpack(BatchGrad(), DiagGGNExact()):
                loss.backward()
        except ValueError as error:
            return str(error), []
        return "", quantities(model)

    thrifty, whole = outcome(0), outcome(NEVER)
    assert thrifty[0] == whole[0]
    torch.testing.assert_close(thrifty[1], whole[1])


def test_graphs_in_any_order() -> None:
    """Other graphs that are alive stay as they are."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)))
    lossfunc, x, y = extend(nn.CrossEntropyLoss()), torch.rand(6, 4), torch.randint(3, (6,))
    losses = {n: lossfunc(model(x[:n]), y[:n]) for n in (2, 6, 4)}
    for n in (6, 4, 2):
        with backpack(BatchGrad(), DiagGGNExact()):
            losses[n].backward()
        assert [len(p.grad_batch) for p in model.parameters()] == [n] * 4


def test_what_stays_after_a_cleanup() -> None:
    """The calls of other modules still know where their samples are."""
    torch.manual_seed(0)
    encoder = extend(nn.LSTM(3, 4))  # time first
    head, lossfunc = extend(nn.Linear(4, 2)), extend(nn.MSELoss())
    loss = lossfunc(head(encoder(torch.rand(5, 6, 3))[0]), torch.rand(5, 6, 2))
    memory_cleanup(encoder)
    with backpack(BatchGrad()):
        loss.backward(inputs=list(head.parameters()))
    assert [len(p.grad_batch) for p in head.parameters()] == [6, 6]


def test_a_part_that_another_pass_has_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the graph has its quantities."""
    monkeypatch.setattr(calls, "LARGE", 0)
    torch.manual_seed(0)
    body, head, other = (extend(nn.Linear(4, 4)) for _ in range(3))
    features = body(torch.rand(6, 4))
    loss = extend(nn.MSELoss())(head(features), torch.rand(6, 4))
    other(features).sum().backward()
    with backpack(BatchGrad()):
        loss.backward(inputs=list(head.parameters()))
    assert [len(p.grad_batch) for p in head.parameters()] == [6, 6]


def test_a_graph_that_is_kept_after_a_plain_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in nobody's way."""
    monkeypatch.setattr(calls, "LARGE", 0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            """[N, 4] -> [N, 4]."""
            return x + self.layer(x)

    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(4, 4), Residual()), use_converter=True)
    kept = model(torch.rand(6, 4)).sum()
    kept.backward()
    with backpack(BatchGrad()):
        model(torch.rand(6, 4)).sum().backward()
    assert {len(p.grad_batch) for p in model.parameters()} == {6}
    memory_cleanup(model)


def test_autocast_in_the_forward_pass_alone() -> None:
    """A function of tensors of two precisions is tried as it was called."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weight = nn.Linear(5, 4), nn.Parameter(torch.rand(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            """[N, 5] -> [N, 3]."""
            return self.layer(x).tanh() @ self.weight

    torch.manual_seed(0)
    model, lossfunc = extend(Product(), use_converter=True), extend(nn.CrossEntropyLoss())
    with torch.autocast("cpu", torch.bfloat16):
        loss = lossfunc(model(torch.rand(6, 5)), torch.randint(3, (6,)))
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad, rtol=0.05, atol=0.01)


# ---------------------------------------------------------------------- parameters


def of_given(
    problem: Problem, given: Mapping[str, Tensor] | None, *exts: Any
) -> list[dict[str, Any]]:
    """Return the quantities of a model's own parameters, or of others that it is called with."""
    model, lossfunc = extend(problem.model), extend(problem.loss)
    torch.manual_seed(1)
    output = model(problem.X) if given is None else functional_call(model, given, (problem.X,))
    loss = lossfunc(output, problem.y)
    with backpack(*exts, sum_individual_gradients=True):
        loss.backward()
    own = dict(model.named_parameters()) if given is None else given
    found = []
    for p in own.values():
        if p.requires_grad:
            values = {ext.savefield: getattr(p, ext.savefield) for ext in exts}
            if "ggnmp" in values:
                values["ggnmp"] = values["ggnmp"](torch.ones_like(p).unsqueeze(0))
            found.append(values)
    return found


@pytest.mark.parametrize(
    "exts",
    [[BatchGrad(), BatchL2Grad(), Variance()], [DiagGGNExact(), DiagHessian(), GGNMP()]],
    ids=["first", "second"],
)
@pytest.mark.parametrize("case", [c for c in CASES if "mixing" not in c.tags], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_functional_call(case: Case, exts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantities are those of the parameters and buffers that took part, and saved there."""
    monkeypatch.setattr(calls, "LARGE", 0)
    monkeypatch.setattr(elided_gradients, "WORTHWHILE", 0)
    problem, other = case.build(), case.build()
    given = {**dict(other.model.named_parameters()), **dict(other.model.named_buffers())}
    changed = other._replace(model=copy.deepcopy(other.model))
    with torch.no_grad():
        for t in (*changed.model.parameters(), *changed.model.buffers()):
            t += 0.1 if t.is_floating_point() else 0
    found = of_given(changed, given, *exts)
    expected = of_given(problem, None, *exts)
    assert len(found) == len(expected) > 0
    torch.testing.assert_close(found, expected)


def test_two_functional_calls_in_one_loss() -> None:
    """Each has parameters of its own."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    lossfunc = extend(nn.CrossEntropyLoss())
    x, y = torch.rand(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    several = [
        {n: nn.Parameter(torch.randn_like(p)) for n, p in model.named_parameters()}
        for _ in range(2)
    ]
    loss = sum(lossfunc(functional_call(model, given, (x,)), y) for given in several)
    with backpack(DiagGGNExact()):
        loss.backward()
    for given in several:
        model.load_state_dict(given)
        with backpack(DiagGGNExact()):
            lossfunc(model(x), y).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(given[name].diag_ggn_exact, p.diag_ggn_exact)


class Scaled(nn.Module):
    """Functions read a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = (
            nn.Linear(4, 5),
            nn.Parameter(torch.rand(5)),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * self.scale)


@pytest.mark.parametrize("route", [True, "record"])
def test_leaves_are_parameters(route: Any) -> None:
    """A plain tensor that requires a gradient has results where a function reads it, too."""
    torch.manual_seed(0)
    plain, lossfunc = Scaled().double(), extend(nn.CrossEntropyLoss())
    model = extend(copy.deepcopy(plain), use_converter=route)
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    x, y = torch.rand(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    x.requires_grad_()  # no parameter
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(functional_call(model, given, (x,)), y).backward()
    expected = oracle.ggn_diag(plain, nn.CrossEntropyLoss(), x.detach(), y)
    for t, diagonal in zip(given.values(), expected, strict=True):
        torch.testing.assert_close(t.grad_batch.sum(0), t.grad)
        torch.testing.assert_close(t.diag_ggn_exact, diagonal)
    assert not hasattr(x, "grad_batch")


@pytest.mark.parametrize("route", [False, True, "record"])
@pytest.mark.parametrize("ext", [BatchL2Grad, DiagGGNExact])
def test_a_call_with_parameters_that_are_computed(ext: Any, route: Any) -> None:
    """What the layers have of the call alone would be wrong."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model, lossfunc = extend(model, use_converter=route), extend(nn.CrossEntropyLoss())
    x, y = torch.rand(6, 4), torch.randint(3, (6,))
    given = {name: 2 * p for name, p in model.named_parameters()}
    loss = lossfunc(model(x), y) + lossfunc(functional_call(model, given, (x,)), y)
    if ext is DiagGGNExact:
        expected: Any = pytest.raises(ValueError, match="is also used by a function")
    else:
        expected = pytest.warns(UserWarning, match="of shapes .* are also used by a function")
    with expected as told, backpack(ext()):
        loss.backward()
    if ext is BatchL2Grad:
        assert not any("not a leaf" in str(w.message) for w in told)


def replace(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(2 * layer.weight.detach())


def freeze(layer: nn.Module) -> None:
    weight = 2 * layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)


def reorder(layer: nn.Module) -> None:
    weight = layer.weight
    del layer.weight
    layer.weight = weight


def delete_buffer(layer: nn.Module) -> None:
    del layer.cache


def hide(layer: nn.Module) -> None:
    prune.random_unstructured(layer, "weight", 0.5)


def parametrise(layer: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(layer)


class Unknown(nn.Linear):
    """A module without a rule: its forward runs again."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() @ self.weight.T


def diagonal_after(
    change: Callable[[nn.Module], None] | None, layer: type[nn.Module] = nn.Linear
) -> Tensor:
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), layer(5, 3)))
    last = model.get_submodule("2")
    last.register_buffer("cache", torch.ones(2))
    loss = extend(nn.CrossEntropyLoss())(model(torch.rand(6, 4)), torch.randint(3, (6,)))
    if change is not None:
        change(last)
    before = [*last.named_parameters(), *last.named_buffers()]
    with backpack(DiagGGNExact()):
        loss.backward()
    after = [*last.named_parameters(), *last.named_buffers()]
    assert [(name, id(t)) for name, t in before] == [(name, id(t)) for name, t in after]
    return model.get_submodule("0").weight.diag_ggn_exact


@pytest.mark.parametrize("change", [replace, freeze, reorder, delete_buffer, hide, parametrise])
def test_modules_that_change_after_the_forward_pass(change: Callable[[nn.Module], None]) -> None:
    """Curvature is that of what they were, and they stay as they are now."""
    torch.testing.assert_close(diagonal_after(change), diagonal_after(None))


def test_modules_that_cannot_be_what_they_were() -> None:
    """Their attributes are computed from others now, and their forward reads attributes."""
    with pytest.raises(RuntimeError, match=r"'2' \(.*\) has changed since the forward pass"):
        diagonal_after(parametrise, Unknown)


def test_children_without_calls_of_their_own() -> None:
    """Attention has a projection as a child, which is not called."""
    torch.manual_seed(0)
    attention = extend(nn.MultiheadAttention(4, 2, batch_first=True).double())
    x = torch.rand(6, 3, 4, dtype=torch.float64)
    names = [*dict(attention.named_parameters())]

    def gradients(given: Mapping[str, Tensor] | None) -> list[Tensor]:
        y = attention(x, x, x) if given is None else functional_call(attention, given, (x, x, x))
        with backpack(BatchGrad()):
            y[0].square().sum().backward()
        own = dict(attention.named_parameters()) if given is None else given
        return [own[name].grad_batch for name in names]

    given = {n: nn.Parameter(torch.randn_like(p)) for n, p in attention.named_parameters()}
    found = gradients(given)
    attention.load_state_dict(given)
    torch.testing.assert_close(found, gradients(None))


def test_a_rule_for_a_container_sees_what_its_children_had() -> None:
    """And not what they have by now."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            """[N, 4] -> [N, 3]."""
            return self.layer(x) * self.scale

    seen = []

    class Rule(FirstOrderModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["scale"])

        def scale(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
            """Return individual gradients."""
            seen.append((module.layer.weight, module.scale))
            return g_out[0] * module.layer(module.input0)

    own = BatchGrad()
    own.set_module_extension(Scaled, Rule())
    torch.manual_seed(0)
    model = extend(Scaled())
    given = {n: nn.Parameter(torch.randn_like(p)) for n, p in model.named_parameters()}
    with backpack(own):
        functional_call(model, given, (torch.rand(6, 4),)).square().sum().backward()
    ((weight, scale),) = seen
    assert weight is given["layer.weight"] and scale is given["scale"]
    torch.testing.assert_close(given["scale"].grad_batch.sum(0), given["scale"].grad)


def test_what_an_extension_hook_registers_stays() -> None:
    """The module has it after a functional call as well."""
    torch.manual_seed(0)
    model = extend(nn.Linear(4, 3))
    given = {n: nn.Parameter(torch.randn_like(p)) for n, p in model.named_parameters()}

    def note(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.register_buffer("noted", module.weight.detach().clone())

    with backpack(BatchGrad(), extension_hook=note):
        functional_call(model, given, (torch.rand(6, 4),)).sum().backward()
    torch.testing.assert_close(model.noted, given["weight"].detach())


@pytest.mark.parametrize("create_graph", [False, True])
def test_outputs_of_several_precisions_are_computed_again(
    create_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the precision in which they were computed."""

    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """[N, C] -> [N, C]."""
            return x.double()

    monkeypatch.setattr(calls, "LARGE", 0)
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), nn.ReLU(), Double(), nn.Linear(5, 3).double()
    model = extend(nn.Sequential(*layers))
    seen = []
    with backpack(DiagGGNExact(), extension_hook=lambda module: seen.append(module.output.dtype)):
        loss = extend(nn.CrossEntropyLoss())(model(torch.rand(6, 4)), torch.randint(3, (6,)))
        loss.backward(create_graph=create_graph)
    assert len(seen) == 5 and set(seen) == {torch.float64}
    model.zero_grad()  # a cycle


class State(nn.Module):
    """Keeps what it returns, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.register_buffer("state", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 4] -> [N, 4]."""
        self.state = torch.tanh(x @ self.weight)
        return self.state


@pytest.mark.filterwarnings("ignore:No rule for")
def test_a_module_that_keeps_its_output_in_a_buffer() -> None:
    """Its calls end with their graphs."""
    gc.collect()  # what other tests have left
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(4, 4), State(), nn.Linear(4, 2)))
    counts = []
    for _ in range(3):
        with backpack(BatchGrad()):
            model(torch.rand(6, 4)).sum().backward()
        weight = model.get_submodule("1").weight
        torch.testing.assert_close(weight.grad_batch.sum(0), weight.grad)
        model.zero_grad()
        model(torch.rand(6, 4))  # without a backward pass
        counts.append(len(alive.all_live_calls()))
    assert counts[0] == counts[-1]
    model.get_submodule("1").state = None  # a cycle: its graph, the call, the module
    assert not alive.all_live_calls()


def test_readers_of_given_parameters_do_not_add_up() -> None:
    """There is one for each place."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            """[N, 4] -> [N, 4]."""
            return x * self.scale

    model = extend(Scaled(), use_converter="record")
    x = torch.rand(6, 4)
    several = [{"scale": nn.Parameter(torch.rand(4))} for _ in range(3)]
    for given in several:
        with backpack(BatchGrad()):
            functional_call(model, given, (x,)).sum().backward()
        torch.testing.assert_close(given["scale"].grad_batch, x)
    assert len(vars(model)["_backpack_functions"].readers) == 1


@pytest.mark.parametrize("make", ["trace", "script"])
@pytest.mark.parametrize("route", [False, "record", True])
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_what_torch_jit_has_made_has_no_quantities(make: str, route: Any) -> None:
    """It runs and has gradients, and the modules behind it do not mind."""
    torch.manual_seed(0)
    x, y = torch.rand(6, 4), torch.randint(2, (6,))
    layer = nn.Linear(4, 4)
    made = torch.jit.trace(layer, x) if make == "trace" else torch.jit.script(layer)
    with pytest.warns(match=r"^'0' \(.*\) was made by torch\.jit"):
        model = extend(nn.Sequential(made, nn.Linear(4, 2)), use_converter=route)
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(BatchGrad(), extension_hook=lambda module: None):
        lossfunc(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())
    last = model.get_submodule("1").weight
    torch.testing.assert_close(last.grad_batch.sum(0), last.grad)
    assert not any(hasattr(p, "grad_batch") for p in made.parameters())
    with backpack(DiagGGNExact()):
        lossfunc(model(x), y).backward()
    assert last.diag_ggn_exact.shape == last.shape
    with pytest.warns(match=r"was made by torch\.jit"):
        extend(made, use_converter=route)


@pytest.mark.filterwarnings("ignore:No rule for")
def test_parameters_that_are_tied_since() -> None:
    """Names of parameters are those of the forward pass."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            """[N, 4] -> [N, 4]."""
            return x * self.a + x.square() * self.b

    torch.manual_seed(0)
    model, x = extend(Pair()), torch.rand(6, 4)
    a, b = model.a, model.b
    loss = model(x).sum()
    model.b = a
    with backpack(BatchGrad()):
        loss.backward()
    torch.testing.assert_close([a.grad_batch, b.grad_batch], [x, x.square()])

"""Modules with ``inplace=True`` change their input, as without the library, whatever reads it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn

from backpack import CTX, backpack, extend, extensions
from backpack.core.derivatives.function_derivatives import FunctionDerivatives
from backpack.core.record.alive import live_calls
from backpack.custom_module.graph_utils import ConversionError
from backpack.custom_module.permute import Permute

N = 5
ROUTES = (False, "record", "trace")
Middle = Callable[[Any, Tensor], Tensor]
FORWARDS: dict[str, Middle] = {}
# What second order follows with recorded functions alone (the graph does not tell what a view was
# before it changed), and what cannot be traced.
JOINED, VIEWED = set[str](), set[str]()


pytestmark = pytest.mark.usefixtures("double_precision")


class Net(nn.Module):
    """Two layers with an activation in place between them."""

    def __init__(self, act: nn.Module, middle: Middle) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(3, 4), act, nn.Linear(4, 2)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.middle(self, self.one(x)))


class Scaled(nn.Module):
    """A module without a rule that works in place if it is told to."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.inplace, self.scale = inplace, nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.sigmoid() * self.scale
        return x.copy_(y) if self.inplace else y


def forward(*groups: set[str]) -> Callable[[Middle], Middle]:
    def add(function: Middle) -> Middle:
        FORWARDS[function.__name__] = function
        for group in groups:
            group.add(function.__name__)
        return function

    return add


@forward()
def returned(net: Net, h: Tensor) -> Tensor:
    return net.act(h)


@forward()
def by_keyword(net: Net, h: Tensor) -> Tensor:
    return net.act(input=h)


@forward()
def changed(net: Net, h: Tensor) -> Tensor:
    net.act(h)
    return h


@forward()
def copied(net: Net, h: Tensor) -> Tensor:
    before = h.clone()
    net.act(h)
    return before


@forward()
def both(net: Net, h: Tensor) -> Tensor:
    return net.act(h) + h


@forward()
def both_and_copied(net: Net, h: Tensor) -> Tensor:
    before = h.clone()
    return net.act(h) * before + h


@forward(JOINED, VIEWED)
def part(net: Net, h: Tensor) -> Tensor:
    net.act(h[:, 1:])
    return h


@forward(JOINED, VIEWED)
def part_and_all(net: Net, h: Tensor) -> Tensor:
    y = net.act(h[:, 1:])
    return torch.cat([h[:, :2], y[:, 1:]], 1)


@forward()
def reshaped(net: Net, h: Tensor) -> Tensor:
    return net.act(h.view(-1, 2, 2)).view(-1, 4)


@forward(JOINED, VIEWED)
def reshaped_and_all(net: Net, h: Tensor) -> Tensor:
    net.act(h.view(-1, 2, 2))
    return h


@forward(VIEWED)
def viewed_before(net: Net, h: Tensor) -> Tensor:
    first = h[:, :2]
    net.act(h)
    return torch.cat([first, h[:, 2:]], 1)


@forward()
def of_a_sum(net: Net, h: Tensor) -> Tensor:
    x = h + 0.5
    net.act(x)
    return x * h


class Shift(nn.Module):
    """A module without a rule, whose derivatives read its input and compare its output."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Block(nn.Module):
    """A container with a parameter, and with an attribute that its activation has as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inplace, self.act, self.shift = True, nn.SiLU(inplace=True), Shift()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(self.act(x) * self.scale)


class AddsGate(nn.Module):
    """A module without a rule that changes one of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inplace = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y.sigmoid())


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": lambda: nn.ReLU(inplace=True),
    "LeakyReLU": lambda: nn.LeakyReLU(0.3, inplace=True),
    "ELU": lambda: nn.ELU(0.7, inplace=True),
    "SiLU": lambda: nn.SiLU(inplace=True),
    "Hardtanh": lambda: nn.Hardtanh(-0.6, 0.4, inplace=True),
    "Threshold": lambda: nn.Threshold(0.1, 0.3, inplace=True),
    "Dropout": lambda: nn.Dropout(0.4, inplace=True).eval(),
}


def values(model: nn.Module, field: str) -> list[Any]:
    return [getattr(p, field) for p in oracle.trainable(model)]


def agree(model: nn.Module, plain: nn.Module, route: Any, X: Tensor, *fields: str) -> None:
    """Compare outputs, what the data become, gradients and quantities with a plain copy."""
    y, lossfunc = torch.randint(2, (N,)), nn.CrossEntropyLoss()
    model.zero_grad()
    mine, own, its = extend(model, use_converter=route), X.clone(), X.clone()
    exts = {
        "grad_batch": extensions.BatchGrad(),
        "diag_ggn_exact": extensions.DiagGGNExact(),
        "diag_h": extensions.DiagHessian(),
    }
    output, expected = mine(own), plain(its)
    assert torch.equal(output, expected) and (route == "trace" or torch.equal(own, its))
    lossfunc(expected, y).backward()
    with backpack(*(exts[field] for field in fields)):
        extend(nn.CrossEntropyLoss())(output, y).backward()
    truth = {
        "grad": lambda *args: [p.grad for p in plain.parameters()],
        "grad_batch": oracle.batch_grad,
        "diag_ggn_exact": oracle.ggn_diag,
        "diag_h": oracle.hessian_diag,
    }
    for field in ("grad", *fields):
        expected = truth[field](plain, lossfunc, X.clone(), y)
        torch.testing.assert_close(values(mine, field), expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("activation", [*ACTIVATIONS])
@pytest.mark.parametrize("name", [*FORWARDS])
def test_as_without_the_library(name: str, activation: str, route: Any) -> None:
    model = Net(ACTIVATIONS[activation](), FORWARDS[name])
    plain = copy.deepcopy(model)
    if route == "trace" and name in VIEWED:
        with pytest.raises(ConversionError, match="in place that shares its memory"):
            extend(model, use_converter=route)
        return
    fields = ["grad_batch"]
    if route or name not in JOINED:
        fields += ["diag_ggn_exact", "diag_h"]
    agree(model, plain, route, torch.randn(N, 3), *fields)


@pytest.mark.parametrize("name", sorted(JOINED))
def test_second_order_refuses_functions_that_it_does_not_see(name: str) -> None:
    model = extend(Net(nn.ReLU(inplace=True), FORWARDS[name]))
    loss = extend(nn.CrossEntropyLoss())(model(torch.randn(N, 3)), torch.randint(2, (N,)))
    with backpack(extensions.DiagGGNExact()), pytest.raises(ValueError, match="use_converter=True"):
        loss.backward()


@pytest.mark.parametrize("route", [False, "record"])
@pytest.mark.parametrize("name", ["returned", "changed"])
def test_module_without_a_rule(name: str, route: Any) -> None:
    model = Net(Scaled(), FORWARDS[name])
    agree(model, copy.deepcopy(model), route, torch.randn(N, 3), "grad_batch", "diag_ggn_exact")


@pytest.mark.parametrize("route", [False, "record"])
def test_chain_of_modules_in_place(route: Any) -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.SiLU(inplace=True), nn.Hardtanh(-0.2, 0.4, inplace=True), Scaled()
    )
    model.append(nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    fields = "grad_batch", "diag_ggn_exact", "diag_h"
    agree(model, plain, route, torch.randn(N, 3), *fields)


@pytest.mark.parametrize("route", [False, "record"])
def test_data_change_as_well(route: Any) -> None:
    model = nn.Sequential(nn.LeakyReLU(0.3, inplace=True), nn.Linear(3, 2))
    fields = "grad_batch", "diag_ggn_exact", "diag_h"
    agree(model, copy.deepcopy(model), route, torch.randn(N, 3), *fields)


def test_dropout() -> None:
    model = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.4, inplace=True), nn.Linear(40, 2))
    plain, X, y = copy.deepcopy(model), torch.randn(N, 3), torch.randint(2, (N,))
    extend(model)
    torch.manual_seed(3)
    output = model(X)
    torch.manual_seed(3)
    assert torch.equal(output, plain(X))
    with backpack(extensions.SumGradSquared(), extensions.DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(output, y).backward()
    torch.manual_seed(3)
    rows = plain[1](plain[0](X))
    grads = []
    for n in range(N):
        loss = nn.functional.cross_entropy(plain[2](rows[n]), y[n]) / N
        grads.append(torch.autograd.grad(loss, plain[0].weight, retain_graph=True)[0])
    torch.testing.assert_close(model[0].weight.sum_grad_squared, sum(g**2 for g in grads))


def test_hooks_that_run_before_ours_see_one_change() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.3, inplace=True), nn.Linear(4, 2))
    plain, seen = copy.deepcopy(model), []
    extend(model)
    model[1].register_forward_hook(
        lambda *args: seen.append(args[2].detach().clone()), prepend=True
    )
    agree(model, plain, False, torch.randn(N, 3), "grad_batch", "diag_ggn_exact")
    assert len(seen) == 1


def test_set_after_extend() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.3), nn.Linear(4, 2)))
    model[1].inplace = True
    for is_first in (True, False):
        loss = extend(nn.CrossEntropyLoss())(model(torch.randn(N, 3)), torch.randint(2, (N,)))
        refused = pytest.raises(ValueError, match="not a module") if is_first else nullcontext()
        with backpack(extensions.DiagGGNExact()), refused:
            loss.backward()
    agree(model, copy.deepcopy(model), False, torch.randn(N, 3), "diag_ggn_exact")


def test_parameters_of_a_module_that_works_in_place_after_extend() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Scaled(inplace=False), nn.Linear(4, 2))
    extend(model)[1].inplace = True
    loss = extend(nn.CrossEntropyLoss())(model(torch.randn(N, 3)), torch.randint(2, (N,)))
    told = r"'1' \(Scaled\).*in place, which it did not when it was extended.*next forward pass"
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match=told):
        loss.backward()
    agree(model, copy.deepcopy(model), False, torch.randn(N, 3), "grad_batch")


def test_without_hooks_nothing_is_copied() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)))
    clone, kept = copy.deepcopy(model), []
    for one in (model, clone):
        one(torch.randn(N, 3))
    CTX.remove_hooks()

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(vars(args[0]))

    for one in (model, clone):
        one[1].register_forward_hook(keep)
        one(torch.randn(N, 3))
    assert kept == [{}, {}]


@pytest.mark.parametrize("route", ROUTES)
def test_number_that_stands_for_true(route: Any) -> None:
    number: Any = 1
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(number), nn.Linear(4, 2))
    agree(model, copy.deepcopy(model), route, torch.randn(N, 3), "grad_batch", "diag_ggn_exact")


@pytest.mark.parametrize("looks", [True, False])
def test_hooks_before_the_module_that_were_registered_after_extend(looks: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SiLU(inplace=True), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    for net in (extend(model), plain):
        net[1].register_forward_pre_hook(lambda _, args: None if looks else (args[0].add_(1),))
    agree(model, plain, False, torch.randn(N, 3), "grad_batch", "diag_ggn_exact")
    loss = extend(nn.CrossEntropyLoss())(model(torch.randn(N, 3)), torch.randint(2, (N,)))
    # from the second time on, what the module overwrites is copied behind the change by the hook
    refused = nullcontext() if looks else pytest.raises(ValueError, match="not a module")
    with backpack(extensions.DiagGGNExact()), refused:
        loss.backward()


def test_hook_that_replaces_the_input_and_was_registered_after_extend() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SiLU(inplace=True), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    for net in (extend(model), plain):
        net[1].register_forward_pre_hook(lambda _, args: (args[0].clone(),))
    model(torch.randn(N, 3))
    agree(model, plain, False, torch.randn(N, 3), "grad_batch", "diag_ggn_exact", "diag_h")


def test_container_of_modules_that_work_in_place() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.block, self.act = nn.Linear(3, 4), Block(), nn.SiLU(inplace=True)
            self.two = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.act(self.block(self.one(x))))

    model, X, y = Outer(), torch.randn(N, 3), torch.randint(2, (N,))
    plain = copy.deepcopy(model)
    agree(copy.deepcopy(model), plain, "record", X, "grad_batch", "diag_ggn_exact", "diag_h")
    loss = extend(nn.CrossEntropyLoss())(extend(model)(X), y)
    told = r"no rule for the parameters scale of 'block' \(Block\)"
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match=told) as caught:
        loss.backward()
    assert not any("evaluated again" in str(warning.message) for warning in caught)
    for p, expected in zip(
        model.parameters(), oracle.batch_grad(plain, nn.CrossEntropyLoss(), X, y), strict=True
    ):
        if p is not model.block.scale:
            torch.testing.assert_close(p.grad_batch, expected)


def test_parameter_as_an_argument_of_a_recorded_module_that_works_in_place() -> None:
    model = Net(AddsGate(), lambda net, h: net.act(h, net.gate))
    model.gate = nn.Parameter(torch.randn(1, 4))
    fields = "grad_batch", "diag_ggn_exact", "diag_h"
    agree(model, copy.deepcopy(model), "record", torch.randn(N, 3), *fields)


def test_function_that_changes_the_output_of_a_module_without_a_rule() -> None:
    model = Net(Shift(), lambda net, h: net.act(h).add_(h))
    agree(copy.deepcopy(model), copy.deepcopy(model), "record", torch.randn(N, 3), "grad_batch")
    loss = extend(nn.CrossEntropyLoss())(extend(model)(torch.randn(N, 3)), torch.randint(2, (N,)))
    told = r"What 'act' \(Shift\) has returned was changed in place afterwards"
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match=told):
        loss.backward()


@pytest.mark.parametrize("packs", [False, True])
def test_what_autograd_has_copied_is_not_kept_twice(packs: bool) -> None:
    model, seen = nn.Sequential(nn.Linear(3, 4), nn.SiLU(inplace=True), nn.Linear(4, 2)), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: seen.append(x) or x)
    agree(model, copy.deepcopy(model), False, torch.randn(N, 3), "grad_batch", "diag_ggn_exact")
    with hooks if packs else nullcontext():
        output = model(torch.randn(N, 3))
    (linear,), (activation,) = live_calls(model[0]), live_calls(model[1])
    assert not seen  # hooks of the user are called in backward passes alone
    if not packs:
        copied = output.grad_fn.next_functions[1][0]._saved_self
        assert activation.inputs[0].data_ptr() == linear.outputs[0].data_ptr() == copied.data_ptr()


def drawn_over_part(net: Net, h: Tensor) -> Tensor:
    z = h.clone()
    z[:, 1:].normal_()
    return net.act(z) * h


DRAWN: dict[str, Middle] = {
    "signs": lambda net, h: net.act(h) * h.clone().uniform_(-1, 1).sign(),
    "all": lambda net, h: net.act(h).normal_(1.0, std=0.5),
    "samples last": lambda net, h: net.act(h) * h.t().clone().bernoulli_(0.5).t(),
    "part": drawn_over_part,
    "memory that nobody has filled": lambda net, h: net.act(h) + torch.empty_like(h).exponential_(),
}


@pytest.mark.parametrize("route", ["record", True])
@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_in_the_place_of_others(name: str, route: Any) -> None:
    """They do not depend on what they overwrite: signs of Flipout layers are drawn like that."""
    plain, lossfunc = Net(nn.Softplus(), DRAWN[name]), nn.CrossEntropyLoss()
    model = extend(copy.deepcopy(plain), use_converter=route)
    X, y = torch.rand(N, 3), torch.randint(2, (N,))
    torch.manual_seed(1)
    expected = plain(X)
    torch.manual_seed(1)
    output = model(X)
    assert torch.equal(output, expected)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()):
        extend(lossfunc)(output, y).backward()
    truths = {
        "grad": oracle.grad,
        "grad_batch": oracle.batch_grad_of_one_pass,
        "diag_ggn_exact": oracle.ggn_diag,
        "diag_h": oracle.hessian_diag,
    }
    for field, truth in truths.items():
        torch.manual_seed(1)
        for p, known in zip(model.parameters(), truth(plain, lossfunc, X, y), strict=True):
            torch.testing.assert_close(getattr(p, field), known)


class Heads(nn.Module):
    """Each head writes the rows that belong to it, into memory that nobody has filled."""

    def __init__(self, memory: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.memory = memory
        self.first, self.heads = nn.Linear(3, 4), nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor, owner: Tensor) -> Tensor:
        h, out = self.first(x).tanh(), self.memory(x)
        for i, head in enumerate(self.heads):
            out[owner == i] = head(h[owner == i])
        return out


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "new_empty": lambda x: x.new_empty(len(x), 2),
    "empty_like": lambda x: torch.empty_like(x[:, :2]),
    "columns of it": lambda x: x.new_empty(len(x), 3)[:, 1:],
}


@pytest.mark.parametrize("route", ["record", True])
@pytest.mark.parametrize("owner", [[0, 1, 2, 1], [2, 2, 0, 0], [2, 2, 2, 2]], ids=str)
@pytest.mark.parametrize("memory", MEMORY)
def test_rows_are_written_to_memory_that_nobody_has_filled(
    memory: str, owner: list[int], route: Any
) -> None:
    """It was said that something unknown had filled it."""
    plain, lossfunc = Heads(MEMORY[memory]).double(), nn.CrossEntropyLoss()
    model = extend(copy.deepcopy(plain), use_converter=route)
    X, heads = torch.rand(len(owner), 3).double(), torch.tensor(owner)
    y = torch.tensor([0, 1, 1, 0])
    with backpack(extensions.BatchGrad(), extensions.DiagHessian()):
        extend(lossfunc)(model(X, heads), y).backward()
    output = plain(X, heads)
    used = [name for name, p in model.named_parameters() if p.grad is not None]
    params, parameters = dict(plain.named_parameters()), dict(model.named_parameters())
    for name in used:
        p = params[name]
        for n, each in enumerate(lossfunc(output[n : n + 1], y[n : n + 1]) for n in range(len(y))):
            (grad,) = torch.autograd.grad(each / len(y), p, retain_graph=True)
            torch.testing.assert_close(parameters[name].grad_batch[n], grad)
        (grad,) = torch.autograd.grad(lossfunc(output, y), p, create_graph=True)
        rows = [torch.autograd.grad(g, p, retain_graph=True)[0] for g in grad.flatten()]
        hessian = torch.stack(rows).reshape(p.numel(), p.numel())
        torch.testing.assert_close(parameters[name].diag_h, hessian.diagonal().reshape(p.shape))


@pytest.mark.parametrize("change", [nn.LeakyReLU(inplace=True), nn.SiLU(inplace=True)])
def test_what_a_change_of_a_view_does_is_found_out_once(
    change: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What instance normalisation returns is a view: each step evaluated its change many times."""
    layers = nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, affine=True), change, nn.Flatten()
    model, lossfunc = extend(nn.Sequential(*layers), use_converter="record"), extend(nn.MSELoss())
    X, y = torch.rand(N, 1, 5, 5), torch.rand(N, 18)

    def step() -> None:
        with backpack(extensions.BatchGrad()):
            lossfunc(model(X), y).backward()

    step()
    monkeypatch.setattr(FunctionDerivatives, "_found", None)
    step()


class TurnsBack(nn.Module):
    """Normalisation of the last axis, as of channels, and an activation of what is turned back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.act = nn.LayerNorm(4), nn.Identity(), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(self.norm(x.transpose(1, -1)).transpose(1, -1)))


@pytest.mark.parametrize("route", ["trace", "record"])
def test_changes_of_what_was_turned(route: Any) -> None:
    """A traced model had no curvature: the gradient goes past the node of the view."""
    layers = nn.Conv2d(1, 4, 3), TurnsBack(), nn.Flatten(), nn.Linear(36, 2)
    model, X = nn.Sequential(*layers), torch.rand(N, 1, 5, 5)
    agree(model, copy.deepcopy(model), route, X, "grad_batch", "diag_ggn_exact", "diag_h")


def test_advice_about_changes_of_what_was_turned() -> None:
    layers = nn.Linear(3, 4), Permute(0, 2, 1), nn.ReLU(inplace=True), nn.Flatten()
    model, lossfunc = extend(nn.Sequential(*layers)), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(N, 2, 3)), torch.rand(N, 8))
    words = "a view of it was changed in place"
    with pytest.raises(ValueError, match=words), backpack(extensions.DiagGGNExact()):
        loss.backward()

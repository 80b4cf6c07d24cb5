"""Rules of users for modules that only reshape, what reaches rules, and when they are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.core.derivatives.conv2d import Conv2DDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.lstm import LSTMDerivatives
from backpack.core.record import tape
from backpack.custom_module.branching import SumModule
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.extensions import BatchGrad, DiagGGNExact, SqrtGGNExact
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.hbp import LossHessianStrategy
from backpack.extensions.secondorder.sqrt_ggn.activations import SqrtGGNTanh
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule
from backpack.extensions.secondorder.sqrt_ggn.custom_module import SqrtGGNSumModule
from backpack.extensions.secondorder.sqrt_ggn.flatten import SqrtGGNFlatten
from backpack.extensions.secondorder.sqrt_ggn.losses import SqrtGGNMSELoss

N = 4


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Compute in float64, and forget the classes that earlier extensions had rules for."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    before = set(tape._ruled)
    tape._ruled.clear()
    yield
    tape._ruled.clear()  # those of the test
    tape._ruled.update(before)
    torch.set_default_dtype(torch.float32)


class Reshaping(ModuleExtension):
    """Passes columns on with the shape of the input, and notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[int]]] = []

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Tensor
    ) -> Tensor:
        rows = N if ext.get_subsampling() is None else len(ext.get_subsampling())
        assert list(bpQuantities.shape[1:]) == [rows, *module.output.shape[1:]]
        assert g_out[0].shape == module.output.shape
        self.seen.append((type(module).__name__, list(bpQuantities.shape)))
        return bpQuantities.reshape(-1, rows, *module.input0.shape[1:])


class Columns(SecondOrderBackpropExtension):
    """Square root of the GGN, with a rule of its own for everything that only reshapes."""

    def __init__(self, *reshapes: type[nn.Module], subsampling: list[int] | None = None) -> None:
        rules: dict[type[nn.Module], ModuleExtension] = {
            nn.MSELoss: SqrtGGNMSELoss(),
            nn.Tanh: SqrtGGNTanh(),
            SumModule: SqrtGGNSumModule(),
            nn.Linear: SqrtGGNBaseModule(LinearDerivatives(), ["weight", "bias"]),
            nn.Conv2d: SqrtGGNBaseModule(Conv2DDerivatives(), ["weight", "bias"]),
            nn.LSTM: SqrtGGNBaseModule(LSTMDerivatives(), ["weight_ih_l0", "bias_hh_l0"]),
        }
        self.reshaping = Reshaping()
        rules |= dict.fromkeys(reshapes, self.reshaping)
        super().__init__("columns", module_exts=rules, subsampling=subsampling)

    def get_loss_hessian_strategy(self) -> str:
        return LossHessianStrategy.EXACT


ALL = (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout)


def network() -> nn.Sequential:
    layers = [
        nn.Linear(3, 8),
        nn.Identity(),
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 2, 1),
        nn.Dropout(0.5),
        nn.Identity(),
        nn.Flatten(),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8, 2),
    ]
    return extend(nn.Sequential(*layers)).eval()


def check(model: nn.Module) -> None:
    for p in model.parameters():
        if hasattr(p, "columns"):
            torch.testing.assert_close(p.columns, p.sqrt_ggn_exact)


@pytest.mark.parametrize("subsampling", [None, [2, 0]], ids=str)
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_rules_for_reshapes_run(is_first: bool, subsampling: list[int] | None) -> None:
    """In order, each once, with the shapes of their modules; made before or after the forward."""
    early = Columns(*ALL, subsampling=subsampling) if is_first else None
    model, loss = network(), extend(nn.MSELoss())
    X, y = torch.randn(N, 3), torch.randn(N, 2)
    for _ in range(2):
        value = loss(model(X), y)
        ext = early or Columns(*ALL, subsampling=subsampling)
        ext.reshaping.seen.clear()
        with backpack(ext, SqrtGGNExact(subsampling=subsampling)):
            value.backward()
        check(model)
        names = [name for name, _ in ext.reshaping.seen]
        expected = "Flatten Flatten Identity Dropout Unflatten Identity"
        assert " ".join(names) == expected


def test_extensions_without_such_rules_pass_them_over() -> None:
    """Also once another extension has rules for them."""
    model, loss = network(), extend(nn.MSELoss())
    X, y = torch.randn(N, 3), torch.randn(N, 2)
    for others in ((), (Columns(*ALL),)):
        if others:
            others[0].savefield = "others"
        with backpack(Columns(), SqrtGGNExact(), DiagGGNExact(), *others):
            loss(model(X), y).backward()
        check(model)
        for p in model.parameters():
            torch.testing.assert_close(p.diag_ggn_exact, p.sqrt_ggn_exact.square().sum((0, 1)))
    torch.testing.assert_close(model[0].weight.others, model[0].weight.columns)


def test_built_in_extension_with_such_a_rule() -> None:
    model, loss, rule = network(), extend(nn.MSELoss()), Reshaping()
    ext = DiagGGNExact()
    for cls in ALL:
        ext.set_module_extension(cls, rule, overwrite=True)
    for _ in range(2):
        with backpack(ext, SqrtGGNExact()):
            loss(model(torch.randn(N, 3)), torch.randn(N, 2)).backward()
        for p in model.parameters():
            torch.testing.assert_close(p.diag_ggn_exact, p.sqrt_ggn_exact.square().sum((0, 1)))
    assert len(rule.seen) == 12


class Shortcut(nn.Module):
    """A residual network, whose shortcut is an ``Identity`` called before the other branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.short, self.inner = nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3)
        self.add, self.last = SumModule(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        short = self.short(x)
        return self.last(self.add(self.inner(x), short))


class Doubling(ModuleExtension):
    """No Jacobian of the module: it matters what it is given."""

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Tensor
    ) -> Tensor:
        return 2 * bpQuantities


def test_what_reaches_a_shortcut() -> None:
    model, loss = extend(Shortcut()), extend(nn.MSELoss())
    X, y = torch.randn(N, 3), torch.randn(N, 2)
    value = loss(model(X), y)
    ext = Columns()
    ext.set_module_extension(nn.Identity, Doubling())
    with (
        backpack(ext),
        pytest.raises(ValueError, match=r"'short' \(Identity\).*before the forward"),
    ):
        value.backward()
    assert not any("columns" in vars(p) for p in model.parameters())
    with backpack(ext, SqrtGGNExact()):
        loss(model(X), y).backward()
    S = model.last.bias.sqrt_ggn_exact @ model.last.weight  # at the sum
    expected = S @ model.inner.weight + 2 * S
    torch.testing.assert_close(model.first.bias.columns, expected)


def test_a_jacobian_of_a_shortcut_may_be_passed_over() -> None:
    """The extension is made after the forward pass, as programs do."""
    model, loss = extend(Shortcut()), extend(nn.MSELoss())
    for _ in range(2):
        value, ext = loss(model(torch.randn(N, 3)), torch.randn(N, 2)), Columns()
        ext.set_module_extension(nn.Identity, SqrtGGNFlatten())
        with backpack(ext, SqrtGGNExact()):
            value.backward()
        check(model)


class Start(ModuleExtension):
    """Starts with anything."""

    def __init__(self, quantity: Any) -> None:
        super().__init__()
        self.quantity = quantity

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Any:
        return self.quantity


class Note(ModuleExtension):
    """Notes what arrives, and passes it on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[nn.Module, Any]] = []

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Any:
        self.seen.append((module, bpQuantities))
        return bpQuantities


QUANTITIES = {
    "number": torch.tensor(2.0),
    "for each sample": torch.rand(N),
    "without columns": torch.rand(N, 8),
    "matrix of the features": torch.rand(8, 8),
    "list": [torch.rand(2, N, 8), torch.rand(N, 8)],
    "dictionary": {"a": torch.rand(2, N, 8), "b": 3},
    "string": "anything",
}


class Anything(BackpropExtension):
    def __init__(self, quantity: Any) -> None:
        self.note = Note()
        rules = dict.fromkeys((nn.Linear, nn.Conv2d, nn.Tanh, *ALL), self.note)
        super().__init__("nothing", {nn.MSELoss: Start(quantity), **rules})

    def expects_backpropagation_quantities(self) -> bool:
        return True


@pytest.mark.parametrize("batch", [N, 1])
@pytest.mark.parametrize("name", QUANTITIES)
def test_quantities_that_are_no_columns_arrive_as_they_are(name: str, batch: int) -> None:
    model, loss = network(), extend(nn.MSELoss())
    for _ in range(2):
        ext = Anything(QUANTITIES[name])
        with backpack(ext):
            loss(model(torch.randn(batch, 3)), torch.randn(batch, 2)).backward()
        assert [module for module, _ in ext.note.seen] == list(reversed(model))[:-1]
        assert all(quantity is QUANTITIES[name] for _, quantity in ext.note.seen)


def test_nothing_is_passed_on_where_no_input_needs_a_gradient() -> None:
    class NoInput(SqrtGGNBaseModule):
        def backpropagate(self, *args: Any) -> Any:
            calls.append(args[1])
            return super().backpropagate(*args)

    calls: list[nn.Module] = []
    ext = Columns(*ALL)
    ext.set_module_extension(
        nn.Linear, NoInput(LinearDerivatives(), ["weight", "bias"]), overwrite=True
    )
    builtin = DiagGGNExact()
    builtin.set_module_extension(nn.Linear, NoInput(LinearDerivatives()), overwrite=True)
    model, loss = network(), extend(nn.MSELoss())
    for active in (ext, builtin):
        for X, expected in [
            (torch.randn(N, 3), [model[-1]]),
            (torch.randn(N, 3, requires_grad=True), [model[-1], model[0]]),
        ]:
            calls.clear()
            with backpack(active):
                loss(model(X), torch.randn(N, 2)).backward()
            assert calls == expected


@pytest.mark.parametrize("exts", [(), (BatchGrad,), (DiagGGNExact,), (Columns,)], ids=str)
def test_hooks_come_in_backward_order(exts: tuple[Any, ...]) -> None:
    model, loss = network(), extend(nn.MSELoss())
    for _ in range(2):
        seen: list[nn.Module] = []
        value = loss(model(torch.randn(N, 3)), torch.randn(N, 2))
        with backpack(*[ext() for ext in exts], extension_hook=seen.append):
            value.backward()
        assert seen == [loss, *reversed(model)]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("subsampling", [None, [2, 0]], ids=str)
def test_columns_have_the_shape_of_the_output(
    batch_first: bool, subsampling: list[int] | None
) -> None:
    """Wherever the module has its samples."""
    lstm, pick = nn.LSTM(3, 2, batch_first=batch_first), ReduceTuple()
    model, loss = extend(nn.Sequential(lstm, pick, nn.Tanh())), extend(nn.MSELoss())
    shape = (N, 3, 3) if batch_first else (3, N, 3)
    for _ in range(2):
        value = loss(model(torch.randn(shape)), torch.randn(*shape[:2], 2))
        with backpack(Columns(subsampling=subsampling), SqrtGGNExact(subsampling=subsampling)):
            value.backward()
        assert hasattr(lstm.weight_ih_l0, "columns")
        check(model)


@pytest.mark.parametrize("subsampling", [None, [2, 0]], ids=str)
def test_positions_that_are_the_rows_of_the_loss_are_refused(subsampling: list[int] | None) -> None:
    """The vectors of a column would mix those of several positions of a sample."""
    model, loss = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    value = loss(model(torch.randn(N, 5, 3)).view(-1, 2), torch.randn(N * 5, 2))
    ext = Columns(subsampling=subsampling)
    with backpack(ext), pytest.raises(ValueError, match=r"Linear.*\['V', \d, 5, 2\].*got"):
        value.backward()
    assert not hasattr(model.weight, "columns")


def reshaping(name: str) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Return a network in which rows merge, or merge and split again, its loss and a batch."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)]
    x, y = torch.rand(N, 6, 5), torch.randint(3, (N, 6))
    match name:
        case "merged at the loss":
            return nn.Sequential(*layers, nn.Flatten(0, 1)), nn.CrossEntropyLoss(), x, y.flatten()
        case "merged for a layer":
            first, *rest = layers
            layers = [first, nn.Flatten(0, 1), *rest, nn.Unflatten(0, (N, 6)), nn.Flatten(1)]
            return nn.Sequential(*layers), nn.MSELoss(), x, torch.rand(N, 18)
    layers = [nn.Flatten(), nn.Identity(), nn.Linear(30, 3)]
    return nn.Sequential(nn.Linear(5, 5), *layers), nn.CrossEntropyLoss(), x, y[:, 0]


@pytest.mark.parametrize("name", ["merged at the loss", "merged for a layer", "flattened"])
@pytest.mark.parametrize("known", [True, False], ids=["rule before", "rule after"])
def test_quantities_are_those_without_a_rule(name: str, known: bool) -> None:
    """An extension with a rule for a reshape exists, and is not used."""

    def quantities(has_rule: bool) -> list[dict[str, Any]]:
        def note() -> None:
            for kind in (nn.Flatten, nn.Unflatten, nn.Identity) if has_rule else ():
                tape.note_rule(kind)

        model, loss, x, y = reshaping(name)
        model, loss = extend(model), extend(loss)
        found: list[dict[str, Any]] = [{} for _ in model.parameters()]
        for exts in (
            [BatchGrad(), extensions.Variance()],
            [DiagGGNExact(), extensions.BatchDiagGGNExact(), SqrtGGNExact()],
            [extensions.DiagGGNMC(mc_samples=2), extensions.KFAC(mc_samples=2)],
            [extensions.KFLR()],
            [extensions.DiagHessian(), extensions.BatchDiagHessian()],
            [extensions.GGNMP(), extensions.HMP()],
        ):
            if known:
                note()
            value = loss(model(x), y)
            note()
            torch.manual_seed(1)
            with backpack(*exts):
                value.backward()
            for p, values in zip(model.parameters(), found, strict=True):
                for ext in exts:
                    value = vars(p)[ext.savefield]
                    values[ext.savefield] = value(p[None]) if callable(value) else value
        return found

    truth = quantities(has_rule=False)
    assert not tape._ruled
    for mine, other in zip(quantities(has_rule=True), truth, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


class Recurrent(nn.Module):
    """A module that only passes on, in front of a recurrent layer with the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.lstm = nn.Linear(2, 3), nn.Identity(), nn.LSTM(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.same(self.first(x)))[0]


def test_a_rule_for_a_reshape_confirms_no_assumption() -> None:
    """That the samples come first, which the recurrent layer corrects."""
    model, loss = extend(Recurrent(), use_converter=True), extend(nn.MSELoss())
    x, y = torch.rand(5, N, 2), torch.rand(5, N, 2)
    found = []
    for has_rule in (False, True):
        if has_rule:
            BatchGrad().set_module_extension(nn.Identity, Reshaping(), overwrite=True)
        with backpack(BatchGrad()):
            loss(model(x), y).backward()
        found.append([p.grad_batch for p in model.parameters()])
    for mine, other in zip(*found, strict=True):
        assert len(mine) == N
        torch.testing.assert_close(mine, other)

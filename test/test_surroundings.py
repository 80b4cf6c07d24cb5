"""Other people's hooks, functions and habits around an extended model."""

from __future__ import annotations

import copy
import gc
import importlib.util
import subprocess
import sys
import warnings
from typing import Any, ClassVar

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.record.calls import LIVE
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.optim import PoissonBatches

EXTS = [extensions.BatchGrad(), extensions.DiagGGNExact()]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def reference(model: nn.Module, X: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    model, lossfunc = extend(copy.deepcopy(model)), extend(nn.CrossEntropyLoss())
    with backpack(*EXTS):
        lossfunc(model(X), y).backward()
    return [{ext.savefield: getattr(p, ext.savefield) for ext in EXTS} for p in model.parameters()]


def agree(model: nn.Module, expected: list[dict[str, Tensor]]) -> None:
    for p, values in zip(model.parameters(), expected, strict=True):
        for field, value in values.items():
            torch.testing.assert_close(getattr(p, field), value)


def problem() -> tuple[nn.Sequential, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    return model, torch.rand(5, 3), torch.randint(2, (5,))


def test_full_backward_hooks_of_somebody_else() -> None:
    model, X, y = problem()
    expected, seen = reference(model, X, y), []
    for module in model:
        module.register_full_backward_hook(lambda m, g_inp, g_out: seen.append(m))
    lossfunc = extend(nn.CrossEntropyLoss())
    extend(model)
    with backpack(*EXTS):
        lossfunc(model(X), y).backward()
    agree(model, expected)
    assert len(seen) == 3


def test_forward_hook_that_changes_the_output() -> None:
    model, X, y = nn.Linear(3, 2), torch.rand(5, 3), torch.randint(2, (5,))
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    extend(model)
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    torch.testing.assert_close(model.weight.grad_batch.sum(0), model.weight.grad)


def test_dropout_leaves_the_gradients_of_others_alone() -> None:
    drop, x = extend(nn.Dropout(0.5)), torch.rand(4, 3, requires_grad=True)
    h, seen = 2 * x, []
    h.retain_grad()
    h.register_hook(seen.append)
    out = drop(h)
    assert h.grad is None and not seen
    out.sum().backward()
    torch.testing.assert_close(h.grad, torch.where(out == 0, 0.0, 2.0))


@pytest.mark.parametrize("ext", EXTS, ids=repr)
def test_parameter_used_by_a_function_as_well(ext: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(3, 3), nn.Sigmoid()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.act(F.linear(x, self.linear.weight)))

    model = extend(Model())
    loss = extend(nn.CrossEntropyLoss())(model(torch.rand(5, 3)), torch.randint(3, (5,)))
    with backpack(ext):
        if ext.expects_backpropagation_quantities():
            with pytest.raises(ValueError, match=r"weight.*also used by a function"):
                loss.backward()
        else:
            with pytest.warns(UserWarning, match="also used by a function"):
                loss.backward()


@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize("converter", [False, "trace", "record"])
def test_layers_that_replace_others(index: int, converter: Any) -> None:
    """They have quantities, or that is told."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2))
    model, lossfunc = extend(net, use_converter=converter), extend(nn.MSELoss())
    old: Any = model.get_submodule(str(index))
    new = nn.Linear(old.in_features, old.out_features)
    model._modules[str(index)] = new

    def step() -> None:
        with backpack(extensions.BatchGrad()):
            lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2)).backward()

    if converter == "record":
        step()
    else:
        with pytest.warns(UserWarning, match=r"(was|is) not extended"):
            step()
        assert not hasattr(new.weight, "grad_batch")
        new.zero_grad()
        extend(new)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step()
    torch.testing.assert_close(new.weight.grad_batch.sum(0), new.weight.grad)


def test_parameters_that_unseen_functions_read_are_told() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            weight = torch.func.vmap(torch.sigmoid)(self.last.weight)
            return self.first(x) @ weight.T

    model, lossfunc = extend(Model(), use_converter="record"), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2))
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match=r"\[2, 4\].*function"):
        loss.backward()


class LowRank(nn.Module):
    """A layer that was extended, and new ones beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 1, bias=False)
        self.up = nn.Linear(1, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + self.up(self.down(x))
        return result


REPLACEMENTS = {
    "adapters": (LowRank, True),
    "frozen": (lambda layer: nn.Linear(4, 2).requires_grad_(False), False),
    "without parameters": (lambda layer: nn.AdaptiveAvgPool1d(2), False),
    "compiled": (lambda layer: torch.compile(layer, backend="eager"), False),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_only_new_parameters_that_are_trained_are_told(name: str) -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), use_converter="trace")
    replaced, is_told = REPLACEMENTS[name]
    model._modules["1"] = replaced(model.get_submodule("1"))
    with warnings.catch_warnings(record=True) as caught, backpack(extensions.BatchGrad()):
        warnings.simplefilter("always")
        extend(nn.MSELoss())(model(torch.rand(5, 3)), torch.rand(5, 2)).backward()
    told = [w for w in caught if "1 of Sequential was replaced" in str(w.message)]
    assert len(told) == is_told
    for p in model.parameters():
        if p.requires_grad and not is_told:
            torch.testing.assert_close(vars(p)["grad_batch"].sum(0), p.grad)


def test_layers_that_functions_read_before_the_loss() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.heads = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 2)] * 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("nh,ohk->nk", self.stem(x), self.weights())

        def weights(self) -> Tensor:
            return torch.stack([head.weight.T for head in self.heads])

    model, lossfunc = extend(Model()), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2))
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match=r"\[2, 4\].*function"):
        loss.backward()


class TiedHead(nn.Module):
    """A container with a parameter of its own, whose last function reads the weight of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.act = nn.Embedding(6, 3), nn.Sigmoid()
        self.positions = nn.Parameter(torch.rand(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.act(self.words(x) + self.positions), self.words.weight)


@pytest.mark.parametrize("ends", ["loss", "function", "layer"])
def test_parameter_used_by_a_function_in_a_container_with_parameters(ends: str) -> None:
    """That is told, though the output is that of the container."""
    model, X, y = extend(TiedHead()), torch.randint(6, (5,)), torch.randint(3, (5,))
    loss = F.cross_entropy if ends == "function" else extend(nn.CrossEntropyLoss())
    last = extend(nn.Linear(6, 3)) if ends == "layer" else nn.Identity()
    told = "functions beside" if ends == "function" else "also used by a function"
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match=told):
        loss(last(model(X)), y).backward()


class Chosen(nn.Module):
    """The output of a layer goes through a module that reads what a function computes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.choice, self.last = nn.Linear(3, 4), Choice(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.choice(h, 2 * h))


class Choice(nn.Module):
    """Returns the first of two tensors."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one


def test_parameter_of_the_layer_whose_output_is_chosen(recwarn: Any) -> None:
    """The layer is no other function that uses it."""
    model, X, y = extend(Chosen()), torch.rand(5, 3), torch.randint(2, (5,))
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    assert not recwarn.list
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


class Tokens(nn.Module):
    """Functions between modules, a recurrent layer and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(6, 4), nn.Parameter(torch.rand(3, 4))
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.recurrent(self.words(x) + self.positions)
        h = h + self.attention(h, h, h, need_weights=False)[0].cumsum(1)
        return self.last(h[:, -1] * h.flip(1).sum(1))


@pytest.mark.parametrize("converter", ["trace", "record"])
def test_default_device_is_another_one(converter: Any) -> None:
    """As that of a GPU, where no generator of the CPU can draw."""
    exts = [*EXTS, extensions.DiagHessian(), extensions.KFAC(), extensions.HMP()]
    models = [extend(Tokens(), use_converter=converter) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    X, y = torch.randint(6, (5, 3)), torch.randint(2, (5,))
    lossfunc, found = extend(nn.CrossEntropyLoss()), []
    # what was found out with one device is not to be taken from memory with the other
    for model, device in zip(models, ("meta", "cpu"), strict=True):
        torch.manual_seed(1)
        with torch.device(device), backpack(*exts):
            lossfunc(model(X), y).backward()
            products = [p.hmp(torch.ones(1, *p.shape, device="cpu")) for p in model.parameters()]
        found.append([[getattr(p, e.savefield) for e in exts[:-1]] for p in model.parameters()])
        found[-1] += products
    torch.testing.assert_close(*found)


class LooksAtDevice(nn.Linear):
    """Makes a tensor of its own, as ``torch.arange(len(x))`` does."""

    factors: ClassVar = {"meta": 2.0, "cpu": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.factors[torch.empty(0).device.type] * super().forward(x)


class LossThatLooksAtDevice(nn.Module):
    factors: ClassVar = LooksAtDevice.factors

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.factors[torch.empty(0).device.type] * (x - y).square().sum()


@pytest.mark.parametrize("kind", [LooksAtDevice, LossThatLooksAtDevice])
def test_modules_without_a_rule_make_tensors(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are evaluated again in the backward pass, in which torch forgets the default device."""
    is_loss = kind is LossThatLooksAtDevice
    model = nn.Sequential(nn.Linear(3, 2) if is_loss else LooksAtDevice(3, 2), nn.Tanh())
    lossfunc = LossThatLooksAtDevice() if is_loss else nn.MSELoss(reduction="sum")
    X, y = torch.rand(4, 3), torch.rand(4, 2)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "factors", {"cpu": 2.0})
        truth = [f(model, lossfunc, X, y) for f in (oracle.batch_grad, oracle.hessian_diag)]
    extend(model)
    with torch.device("meta"):
        loss = extend(lossfunc)(model(X), y)
        with backpack(extensions.BatchGrad(), extensions.DiagHessian()):
            loss.backward()
    for p, grads, diagonal in zip(model.parameters(), *truth, strict=True):
        torch.testing.assert_close(p.grad_batch, grads)
        torch.testing.assert_close(p.diag_h, diagonal)


def test_default_device_of_random_batches() -> None:
    generator = torch.Generator()
    with torch.device("meta"):
        batches = list(PoissonBatches(10, 5, generator=generator))
    assert len(batches) == 2


def test_loss_of_a_loss() -> None:
    model, X, y = problem()
    extend(model)
    inner, outer = extend(nn.CrossEntropyLoss()), extend(nn.MSELoss())
    loss = outer(inner(model(X), y), torch.zeros(()))
    with backpack(extensions.HMP()), pytest.raises(ValueError, match="another extended loss"):
        loss.backward()


def test_results_survive_a_failed_pass_in_the_same_context() -> None:
    model, X, y = problem()
    expected = reference(model, X, y)
    extend(model)
    lossfunc = extend(nn.CrossEntropyLoss())

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("user code")

    with backpack(*EXTS):
        bad = lossfunc(model[2](Fails.apply(model[1](model[0](X)))), y)
        with pytest.raises(KeyError):
            bad.backward()
        lossfunc(model(X), y).backward()
    agree(model, expected)


def test_skipped_default_arguments() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(
            self, x: Tensor, a: Any = None, b: Tensor | None = None, *, c: float = 1.0
        ) -> Tensor:
            return c * x * self.weight + (0 if a is None else 10 * a) + (0 if b is None else b)

    seen = []

    class Rule(extensions.firstorder.base.FirstOrderModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["weight"])

        def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Any:
            seen.append(g_inp[0])
            return g_out[0] * module.input0

    front, shift = extend(nn.Linear(3, 3)), extend(Shift())
    x = front(torch.rand(4, 3))
    x.retain_grad()
    ext = extensions.BatchGrad()
    ext.set_module_extension(Shift, Rule())
    with backpack(ext):
        shift(x, b=torch.ones(3), c=2.0).square().sum().backward()
    torch.testing.assert_close(seen[0], x.grad)


def test_modules_that_return_their_input_do_not_leak() -> None:
    gc.collect()
    before = len(LIVE)
    pick, front = extend(ReduceTuple(0)), extend(nn.Linear(3, 3))
    for _ in range(5):
        pick((front(torch.rand(2, 3)), None))
    assert len(LIVE) == before


def test_output_that_does_not_require_grad_of_several() -> None:
    pool, front = extend(nn.MaxPool1d(2, return_indices=True)), extend(nn.Conv1d(1, 2, 3))
    values, _ = pool(front(torch.rand(3, 1, 8)))
    lossfunc = extend(nn.MSELoss())
    with backpack(*EXTS):
        lossfunc(values, torch.zeros_like(values)).backward()
    torch.testing.assert_close(front.weight.grad_batch.sum(0), front.weight.grad)
    assert front.weight.diag_ggn_exact.shape == front.weight.shape


def test_unused_output() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x.chunk(2, 1)

    calls, front = [], extend(nn.Linear(3, 4))
    halves = extend(Halves())
    with backpack(extensions.BatchGrad(), extension_hook=calls.append):
        halves(front(torch.rand(5, 3)))[1].sum().backward()
    assert len(calls) == 2 and set(calls) == {halves, front}
    torch.testing.assert_close(front.weight.grad_batch.sum(0), front.weight.grad)


def test_parameter_frozen_between_the_passes() -> None:
    model, X, y = problem()
    extend(model)
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    model[2].bias.requires_grad_(False)
    with backpack(*EXTS):
        loss.backward()
    assert not hasattr(model[2].bias, "grad_batch")
    assert hasattr(model[2].weight, "diag_ggn_exact")


def test_mode_changed_between_the_passes() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double())
    X, y = torch.rand(5, 3).double(), torch.randint(2, (5,))
    lossfunc = extend(nn.CrossEntropyLoss())
    results = []
    for switch in (False, True):
        loss = lossfunc(model(X), y)
        model.train(not switch)
        with backpack(extensions.DiagGGNExact()):
            loss.backward()
        model.train()
        results.append([p.diag_ggn_exact for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1])


def test_products_refuse_changed_buffers() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))).eval()
    X, y = torch.rand(5, 3), torch.randint(4, (5,))
    with backpack(extensions.GGNMP()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    vector = torch.rand(4)
    model[0].bias.ggnmp(vector)
    with torch.no_grad():
        model.train()(X)
    with pytest.raises(RuntimeError, match="buffer was changed"):
        model[0].bias.ggnmp(vector)


def test_hook_without_extensions() -> None:
    model, X, y = problem()
    extend(model)
    seen: list[nn.Module] = []
    with backpack(extension_hook=seen.append):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    assert [type(m).__name__ for m in seen] == ["CrossEntropyLoss", "Linear", "Sigmoid", "Linear"]


def test_one_context_entered_twice() -> None:
    from backpack import CTX

    context = backpack(extensions.BatchGrad())
    with context, context:
        assert CTX.is_extension_active(extensions.BatchGrad)
    assert not CTX.is_extension_active(extensions.BatchGrad)


def test_child_called_output() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.output = nn.Parameter(torch.ones(())), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(self.scale * x)

    model, kinds = extend(Model()), []
    with (
        backpack(extensions.BatchGrad(), extension_hook=lambda m: kinds.append(type(m))),
        pytest.warns(UserWarning, match="scale"),
    ):
        model(torch.rand(4, 3)).sum().backward()
    assert isinstance(model.output, nn.Linear) and nn.Linear in kinds and Model in kinds


def test_user_rules_sum_over_losses() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class Rule(extensions.module_extension.ModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["weight"])

        def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Any:
            return (bpQuantities * module.input0).square().sum((0, 1))

        def backpropagate(
            self,
            ext: Any,
            module: Any,
            g_inp: Any,
            g_out: Any,
            bpQuantities: Any,
        ) -> Any:
            return bpQuantities * module.weight

    scale, X, y = extend(Scale()), torch.rand(4, 2), torch.rand(4, 2)
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    ext = extensions.DiagGGNExact()
    ext.set_module_extension(Scale, Rule())
    out = scale(X)
    with backpack(ext):
        (lossfunc(out, y) + lossfunc(out, -y)).backward()
    torch.testing.assert_close(scale.weight.diag_ggn_exact, 4 * X.square().sum(0))
    ext = extensions.DiagHessian()
    ext.set_module_extension(Scale, Rule())
    with backpack(ext), pytest.raises(NotImplementedError, match="Register derivatives"):
        lossfunc(scale(X), y).backward()


TWO_DEVICES = """
import torch
from torch import nn
import torch._lazy.ts_backend
from backpack import backpack, extend
from backpack.extensions import BatchDiagHessian, BatchGrad, DiagGGNExact, DiagHessian

torch._lazy.ts_backend.init()
torch.manual_seed(0)
first, act, last = nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)
X, y = torch.randn(5, 3), torch.randn(5, 2)
found = []
for device in ("cpu", "lazy"):
    last.to(device)
    first, act, last, lossfunc = map(extend, (first, act, last, nn.MSELoss()))
    exts = [BatchGrad(), DiagGGNExact(), DiagHessian(), BatchDiagHessian()]
    loss = lossfunc(last(act(first(X).to(device))), y.to(device))
    with backpack(*exts):
        loss.backward()
    parameters = [*first.parameters(), *last.parameters()]
    found.append([getattr(p, ext.savefield).cpu() for p in parameters for ext in exts])
for one, other in zip(*found, strict=True):
    torch.testing.assert_close(one, other)
print("same")
"""


def test_model_on_two_devices() -> None:
    """Torch's lazy tensors are a second device that every machine has."""
    if importlib.util.find_spec("torch._lazy.ts_backend") is None:
        pytest.skip("this torch has no second device on a CPU")
    command = [sys.executable, "-c", TWO_DEVICES]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.strip().endswith("same"), result.stderr

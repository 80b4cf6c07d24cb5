"""Large tensors that no derivative reads are not kept, and are there for those who ask for them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.core.derivatives import register
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.engine.second_order import SecondOrder
from backpack.core.record import alive, calls
from backpack.core.record.visits import Visit
from backpack.custom_module.branching import SumModule
from backpack.extensions import BatchGrad, DiagGGNExact, DiagHessian, Variance
from backpack.extensions.firstorder.base import FirstOrderModuleExtension

QUANTITIES = (
    *("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNMC", "BatchDiagGGNMC"),
    *("SqrtGGNMC", "KFAC", "DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR", "KFRA"),
    *("DiagHessian", "BatchDiagHessian", "GGNMP", "HMP", "PCHMP"),
)
NEVER = 2**60


@pytest.fixture(autouse=True)
def thrifty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tensor count as large."""
    monkeypatch.setattr(calls, "LARGE", 0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return (
        nn.Sequential(
            *(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(12, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh()),
            nn.Linear(4, 3),
        )
        .double()
        .eval()
    )


class Residual(nn.Module):
    """Adds to its input; functions are made modules by the converter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of two sums, one of which is that of three tensors."""
        y = x + self.first(x)
        return self.act(y) + self.second(self.act(y) + y + x)


def residual_network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(50, 4), Residual(), nn.Tanh(), Residual(), nn.Linear(4, 3)]
    return extend(nn.Sequential(*layers).double().eval(), use_converter=True)


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.rand(5, 2, 5, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])


def extended() -> tuple[nn.Sequential, nn.Module]:
    model, lossfunc = network(), nn.CrossEntropyLoss()
    extend(model), extend(lossfunc)
    return model, lossfunc


def calls_of(model: nn.Module) -> list[calls.Call]:
    parts = set(model.modules())
    found = [call for call in alive.all_live_calls() if call.module in parts]
    return sorted(found, key=lambda call: call.index)


def values(name: str, residual: bool) -> list[Any]:
    model: nn.Module
    model, lossfunc = extended()
    if residual:
        model = residual_network()
    x, y = data()
    ext = getattr(extensions, name)()
    torch.manual_seed(2)
    loss = lossfunc(model(x), y)
    with backpack(ext):
        loss.backward()
    found = [getattr(p, ext.savefield) for p in model.parameters()]
    if name in ("GGNMP", "HMP", "PCHMP"):
        vectors = [torch.randn(2, *p.shape, dtype=p.dtype) for p in model.parameters()]
        return [product(v) for product, v in zip(found, vectors, strict=True)]
    return found


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", QUANTITIES)
def test_quantities_do_not_change(
    name: str, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without what is not kept."""
    thrifty = values(name, residual)
    monkeypatch.setattr(calls, "LARGE", NEVER)
    torch.testing.assert_close(thrifty, values(name, residual))


def gradient_is_kept(call: Visit) -> bool:
    return all(g is None or g.isfinite().all() for g in call.g_out)


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["DiagGGNExact", "KFAC", "KFRA", "GGNMP"], False),
        (["Variance", "SqrtGGNMC"], False),
        (["KFAC", "DiagHessian"], True),
        (["PCHMP"], True),
        (["HMP"], True),
    ],
)
def test_gradients_are_kept_for_second_derivatives(
    names: list[str], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GGN does not depend on those of activations, only on those of the losses."""
    model, lossfunc = extended()
    x, y = data()
    found: dict[nn.Module, bool] = {}
    run = SecondOrder.run

    def look(self: SecondOrder, calls: Sequence[Any], *arguments: Any) -> None:
        found.update({call.module: gradient_is_kept(call) for call in calls})
        run(self, calls, *arguments)

    monkeypatch.setattr(SecondOrder, "run", look)
    loss = lossfunc(model(x), y)
    with backpack(*(getattr(extensions, name)() for name in names)):
        loss.backward()
    assert found == dict.fromkeys(model, kept) | {lossfunc: True}


def test_few_calls_compute_a_tensor_again() -> None:
    """In a long chain of sums, some keep what they read."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(8))).double()
    model = extend(model, use_converter=True)
    x = torch.rand(5, 4, dtype=torch.float64)
    y = model(x)
    found = calls_of(model)
    depths = [call.recompute_depth for call in found]
    assert max(depths) == calls.MAX_DEPTH
    expected, seen = y.detach().clone(), []
    last = found[-1]
    torch.testing.assert_close(last.whole_outputs()[0], expected)
    with backpack(extension_hook=lambda m: seen.append(m.output.isfinite().all())):
        y.sum().backward()
    assert len(seen) == len(depths) and all(seen)


def test_what_sums_keep() -> None:
    """Neither what they add nor the result."""
    model, lossfunc = residual_network(), extend(nn.CrossEntropyLoss())
    x, y = data()
    loss = lossfunc(model(x), y)
    assert loss.requires_grad
    sums = [c for c in calls_of(model) if type(c.module) is SumModule]
    first = sums[0]
    assert len(sums) == 8
    assert not first.inputs[0].isfinite().any() and not first.outputs[0].isfinite().any()
    hidden = model.get_submodule("1")(x.flatten(1))
    torch.testing.assert_close(first.whole_inputs()[0], hidden)
    torch.testing.assert_close(
        first.whole_outputs()[0], hidden + model.get_submodule("2.first")(hidden)
    )


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("quantity", [DiagGGNExact, DiagHessian, Variance])
def test_quantities_have_a_graph(
    quantity: Any, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their derivatives flow through what was not kept."""
    found = []
    for limit in (0, NEVER):
        monkeypatch.setattr(calls, "LARGE", limit)
        model: nn.Module
        model, lossfunc = extended()
        if residual:
            model = residual_network()
        x, y = data()
        loss = lossfunc(model(x), y)
        with backpack(quantity()):
            loss.backward(create_graph=True)
        total = sum(getattr(p, quantity().savefield).square().sum() for p in model.parameters())
        parameters = list(model.parameters())
        found.append(torch.autograd.grad(total, parameters, allow_unused=True))
        assert found[-1][0].abs().max() > 0
        for p in parameters:
            p.grad = None
    torch.testing.assert_close(*found)


def outputs_of(model: nn.Sequential, look: Callable[[Tensor], Any]) -> list[Any]:
    """Look at the output of each layer."""
    found: list[Any] = []
    for layer in model:
        layer.register_forward_hook(lambda _, __, out: found.append(look(out)))
    return found


def test_what_dies_with_the_forward_pass() -> None:
    """Outputs of layers that activations read; autograd does not keep them either."""
    model, lossfunc = extended()
    kept = outputs_of(model, weakref.ref)
    x, y = data()
    loss = lossfunc(model(x), y)
    assert loss.requires_grad
    dead = {i for i, tensor in enumerate(kept) if tensor() is None}
    assert {0, 3, 6, 8} <= dead
    for call in alive.live_calls(model[0]) + alive.live_calls(model[6]):
        assert call.outputs[0].untyped_storage().nbytes() == 8


@pytest.mark.parametrize("exts", [(), (BatchGrad(),), (DiagGGNExact(),)], ids=str)
def test_extension_hooks_see_everything(exts: Any) -> None:
    """The tensors of the call at hand, computed again where they were not kept."""
    model, lossfunc = extended()
    outputs = outputs_of(model, Tensor.detach)
    x, y = data()
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def hook(module: Any) -> None:
        seen[module] = module.input0.detach().clone(), module.output.clone()

    loss = lossfunc(model(x), y)
    with backpack(*exts, extension_hook=hook):
        loss.backward()
    for layer, before, after in zip(model, [x, *outputs], outputs, strict=False):
        torch.testing.assert_close(seen[layer], (before, after))


class OfAConvolution(FirstOrderModuleExtension):
    """Reads what our own rules do not."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__(["weight"])
        self.seen = seen

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        self.seen += [module.input0, module.output]
        return module.weight.expand(len(module.input0), *module.weight.shape)


def test_rules_of_users_see_everything() -> None:
    """A rule for one module and one extension."""
    model, lossfunc = extended()
    outputs = outputs_of(model, Tensor.detach)
    x, y = data()
    seen: list[Tensor] = []
    ext = BatchGrad()
    ext.set_module_extension(nn.Conv2d, OfAConvolution(seen), overwrite=True)
    loss = lossfunc(model(x), y)
    with backpack(ext):
        loss.backward()
    torch.testing.assert_close(seen, [outputs[1], outputs[2], x, outputs[0]])


class Doubled(nn.Module):
    """A layer of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4).double())
        self.bias = nn.Parameter(torch.zeros(4).double())

    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, self.weight, self.bias)


class DoubledDerivatives(LinearDerivatives):
    """Reads the output, without saying so."""

    def _weight_jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Tensor, sum_batch: bool, subsampling: Any
    ) -> Tensor:
        assert module.output.isfinite().all()
        rule = super()
        return 2 * rule._weight_jac_t_mat_prod(module, g_inp, g_out, mat, sum_batch, subsampling)


def test_derivatives_of_users_keep_everything() -> None:
    """Also those that inherit from ours."""
    register(Doubled)(DoubledDerivatives)
    model = extend(nn.Sequential(nn.Linear(3, 4), Doubled(), nn.ReLU(), nn.Linear(4, 2)).double())
    lossfunc = extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(torch.rand(5, 3, dtype=torch.float64)), torch.tensor([0, 1, 0, 1, 0]))
    (call,) = alive.live_calls(model[1])
    assert call.outputs[0].isfinite().all()
    with backpack(Variance()):
        loss.backward()


def test_mode_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of batch normalisation stay what they are, if the mode changes later."""
    found = []
    for limit in (0, NEVER):
        monkeypatch.setattr(calls, "LARGE", limit)
        model, lossfunc = extended()
        model[3].running_mean.uniform_(-1, 1)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        outputs = outputs_of(model, Tensor.detach)
        x, y = data()
        loss = lossfunc(model(x), y)
        model.train()
        seen: list[Tensor] = []
        with backpack(DiagGGNExact(), extension_hook=lambda m, seen=seen: seen.append(m.output)):
            loss.backward(create_graph=True)
        torch.testing.assert_close(seen[:0:-1], outputs)
        total = sum(p.diag_ggn_exact.square().sum() for p in model.parameters())
        found.append(torch.autograd.grad(total, model[0].weight))
        torch.testing.assert_close(dict(model.state_dict()), state)
        assert model[3].training
        model.zero_grad()
    torch.testing.assert_close(*found)


def doubled(model: nn.Sequential) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


def swapped(model: nn.Sequential) -> None:
    for p in model.parameters():
        p.data = 2 * p.data


@pytest.mark.parametrize("change", [doubled, swapped])
def test_a_changed_parameter_is_an_error(change: Callable[[nn.Sequential], None]) -> None:
    """What was not kept can no longer be computed."""
    model, lossfunc = extended()
    x, y = data()
    loss = lossfunc(model(x), y)
    with (
        pytest.raises(RuntimeError, match=r"of '10' \(Linear\) was changed after"),
        backpack(DiagGGNExact(), extension_hook=lambda _: change(model)),
    ):
        loss.backward()


def test_autocast_keeps_everything() -> None:
    """Computed again, it would have another precision."""
    model, lossfunc = extended()
    model.float()
    x, y = data()
    with torch.autocast("cpu", torch.bfloat16):
        loss = lossfunc(model(x.float()), y)
    assert all(call.outputs[0].isfinite().all() for call in calls_of(model))
    with backpack(Variance()):
        loss.backward()


def test_plain_backward_pass_frees_what_autograd_frees() -> None:
    """Unless the graph is retained."""
    model, lossfunc = extended()
    x, y = data()
    loss = lossfunc(model(x), y)
    loss.backward(retain_graph=True)
    assert len(alive.live_calls(model[0])) == 1
    with backpack(BatchGrad(), retain_graph=True):
        loss.backward(retain_graph=True)
    loss.backward()
    assert not alive.live_calls(model[0])
    with pytest.raises(RuntimeError), backpack(BatchGrad()):
        loss.backward()


def test_small_tensors_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the limit, nothing is computed again."""
    monkeypatch.setattr(calls, "LARGE", NEVER)
    model, lossfunc = extended()
    x, y = data()
    loss = lossfunc(model(x), y)
    assert not any(call.producers for call in calls_of(model))
    loss.backward()
    assert len(alive.live_calls(model[0])) == 1


def test_what_autograd_does_not_free_is_kept() -> None:
    """A layer that autograd stores nothing for can be shared by several backward passes."""
    shared = extend(nn.Sequential(nn.Flatten(), nn.Linear(18, 4))).double()
    shared[1].weight.requires_grad_(False)
    heads = [extend(nn.Linear(4, 3)).double() for _ in range(2)]
    lossfunc = extend(nn.CrossEntropyLoss())
    _, y = data()
    hidden = shared(torch.rand(5, 2, 3, 3, dtype=torch.float64))
    lossfunc(heads[0](hidden), y).backward()
    loss = lossfunc(heads[1](hidden), y)
    with backpack(BatchGrad()):
        loss.backward()
    torch.testing.assert_close(shared[1].bias.grad_batch.shape, torch.Size([5, 4]))


def test_a_record_that_is_gone() -> None:
    """The error says who may have freed it."""
    model = extend(nn.Linear(4, 3))
    model(torch.rand(5, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="unless it retains the graph"):
        LinearDerivatives().jac_t_mat_prod(model, None, None, torch.ones(2, 5, 3))


@pytest.mark.parametrize("same", [nn.Identity, nn.Flatten, SumModule])
@pytest.mark.parametrize("exts", [(), (BatchGrad(),), (DiagGGNExact(),)], ids=str)
def test_modules_that_return_their_input(same: Callable[[], nn.Module], exts: Any) -> None:
    """Their node is that of the layer before, which may be done first."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(3, 4), same(), nn.ReLU(), nn.Linear(4, 3)).double())
    outputs = outputs_of(model, Tensor.detach)
    x = torch.rand(5, 3, dtype=torch.float64)
    seen: dict[nn.Module, Tensor] = {}
    loss = extend(nn.CrossEntropyLoss())(model(x), torch.tensor([0, 1, 2, 1, 0]))
    with backpack(*exts, extension_hook=lambda m: seen.update({m: m.output.clone()})):
        loss.backward()
    for layer, output in zip(model, outputs, strict=True):
        torch.testing.assert_close(seen[layer], output)
    gc.disable()
    try:
        extend(nn.CrossEntropyLoss())(model(x), torch.tensor([0, 1, 2, 1, 0]))
        assert not alive.live_calls(model[1])  # dies with the graph
    finally:
        gc.enable()


def test_a_plain_backward_pass_leaves_what_autograd_leaves() -> None:
    """Autograd stores nothing for a reshape: the graph above it can be used again."""
    shared = extend(nn.Flatten())
    heads = [nn.Linear(18, 1).double(), extend(nn.Linear(18, 3).double())]
    x = torch.rand(5, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    hidden = shared(x)
    heads[0](hidden).sum().backward()
    loss = extend(nn.CrossEntropyLoss())(heads[1](hidden), torch.tensor([0, 1, 2, 1, 0]))
    seen: list[Tensor] = []
    with backpack(BatchGrad(), extension_hook=lambda m: seen.append(m.input0)):
        loss.backward()
    torch.testing.assert_close(seen[-1], x)


def test_an_input_that_was_changed_is_an_error() -> None:
    """The output that was not kept can no longer be computed."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.sum, self.last = nn.Linear(4, 4), SumModule(), nn.Linear(4, 3)
            self.embedding = nn.Embedding(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            other = self.embedding(torch.arange(5))
            y = self.last(self.sum(self.first(x), other))
            other += 1
            return y

    model = extend(Changing())
    for hook, error in ((None, nullcontext()), (id, pytest.raises(RuntimeError, match="in place"))):
        loss = extend(nn.CrossEntropyLoss())(model(torch.rand(5, 4)), torch.tensor([0, 1, 2, 1, 0]))
        with error, backpack(BatchGrad(), extension_hook=hook):
            loss.backward()


@pytest.mark.parametrize("name", ["GGNMP", "HMP"])
def test_each_product_has_a_graph_of_its_own(name: str) -> None:
    """What a block remembers between products has none, lest it be differentiated twice."""
    layer = nn.Linear(4, 3)
    layer.weight.requires_grad_(False)
    ext = getattr(extensions, name)()
    loss = extend(nn.CrossEntropyLoss())(
        extend(nn.Sequential(layer))(torch.rand(5, 4)), torch.tensor([0, 1, 2, 1, 0])
    )
    with backpack(ext):
        loss.backward(create_graph=True)
    vector = torch.rand(2, 3)
    found = [
        torch.autograd.grad(getattr(layer.bias, ext.savefield)(vector).sum(), layer.bias)
        for _ in range(2)
    ]
    torch.testing.assert_close(*found)


def test_sparse_parameters_have_no_address() -> None:
    """A layer that extensions refuse can be used without them."""
    model = extend(nn.Linear(4, 4, bias=False))
    model.weight = nn.Parameter(model.weight.detach().to_sparse())
    model(torch.rand(5, 4)).sum().backward()
    assert model.weight.grad is not None


class Wrapper(Tensor):
    """Has its entries in another tensor, and cannot compare them, as quantised weights."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        new = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        new.inner = inner
        return new

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.equal.default:
            raise NotImplementedError
        inner = [x.inner if isinstance(x, Wrapper) else x for x in args]
        result = function(*inner, **(kwargs or {}))
        return cls(result) if function is torch.ops.aten.detach.default else result


def test_parameters_without_memory_of_their_own() -> None:
    torch.manual_seed(0)
    model, X, y = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), *torch.rand(2, 5, 4)
    found = []
    for kind in (Tensor.clone, Wrapper):
        model[2].weight = nn.Parameter(kind(model[2].weight.detach()), requires_grad=False)
        loss = extend(nn.MSELoss())(extend(model)(X), y[:, :3])
        with backpack(DiagGGNExact(), extensions.HMP()):
            loss.backward()
        p = model[0].weight
        found.append((p.diag_ggn_exact, p.hmp(torch.ones(1, 4, 4))))
    torch.testing.assert_close(*found)

"""The engine: hooks, contexts, what is recorded, shared, released; as a stranger would use it."""

from __future__ import annotations

import copy
import io
import itertools
import math
import re
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import oracle
import pytest
import torch
from seen import seen
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import backpack as package
from backpack import CTX, backpack, disable, extend, extensions, memory_cleanup
from backpack.context import CTX as CONTEXT_CTX
from backpack.core.derivatives import register
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.loss_hessian import LossHessian
from backpack.core.engine import backpropagation, propagations
from backpack.core.engine.backpropagation import LossSource, slice_bytes
from backpack.core.engine.factors import Factor
from backpack.core.engine.products import Products
from backpack.core.record import alive
from backpack.core.record.context import Context
from backpack.core.record.registry import REGISTRY
from backpack.custom_module.branching import Parallel, SumModule

TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}
N = 4


pytestmark = pytest.mark.usefixtures("double_precision")


def mlp(activation: type[nn.Module] = nn.Sigmoid) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 2))


def data(features: int = 3, classes: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(N, features), torch.randint(classes, (N,))


def values(model: nn.Module, field: str) -> list[Any]:
    return [getattr(p, field) for p in oracle.trainable(model)]


def check(model: nn.Module, field: str, expected: list[Tensor]) -> None:
    assert len(expected) > 0
    for mine, truth in zip(values(model, field), expected, strict=True):
        torch.testing.assert_close(mine, truth, **TOLERANCE)


def check_all(model: nn.Module, plain: nn.Module, lossfunc: nn.Module, *batch: Tensor) -> None:
    """Check one quantity of each kind of propagation against the oracle on ``plain``."""
    check(model, "grad_batch", oracle.batch_grad(plain, lossfunc, *batch))
    check(model, "diag_ggn_exact", oracle.ggn_diag(plain, lossfunc, *batch))
    check(model, "diag_h", oracle.hessian_diag(plain, lossfunc, *batch))


def some() -> list[Any]:
    """Return one extension of each kind of propagation."""
    return [extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()]


def run(model: nn.Module, *exts: Any, batch: tuple[Tensor, Tensor], **options: Any) -> None:
    lossfunc = extend(nn.CrossEntropyLoss())
    loss = lossfunc(extend(model)(batch[0]), batch[1])
    with backpack(*exts, **options):
        loss.backward()


# ------------------------------------------------------------------ extend


def test_extend_returns_the_module_and_sets_the_flag() -> None:
    model = mlp()
    assert extend(model) is model
    assert all(m._backpack_extend is True for m in model.modules())


def record_counts(model: nn.Module, X: Tensor) -> tuple[Tensor, list[int]]:
    out = model(X)
    return out, [len(alive.live_calls(m)) for m in model]


def test_extend_twice_records_once() -> None:
    model = extend(extend(mlp()))
    extend(model[0])
    out, counts = record_counts(model, torch.rand(N, 3))
    assert counts == [1, 1, 1]
    assert out.requires_grad


def test_extend_again_after_the_flag_was_reset() -> None:
    model = extend(mlp())
    for m in model.modules():
        m._backpack_extend = False
    extend(model)
    _out, counts = record_counts(model, torch.rand(N, 3))
    assert counts == [1, 1, 1]
    batch = data()
    run(model, *some(), batch=batch)
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)


def test_reset_flag_leaves_other_hooks_alone() -> None:
    model, seen = nn.Linear(3, 2), []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    extend(model)
    model._backpack_extend = False
    extend(model)
    model(torch.rand(N, 3))
    assert seen == ["forward"]


def test_extend_new_child_of_an_extended_model() -> None:
    model = extend(mlp())
    model.append(nn.Linear(2, 2))
    run(model, extensions.BatchGrad(), batch=data())
    assert model[3].weight.grad_batch.shape == (N, 2, 2)


def test_debug_prints(capsys: pytest.CaptureFixture) -> None:
    model = extend(mlp(), debug=True)
    shown = capsys.readouterr().out
    assert "Linear" in shown and "Sigmoid" in shown
    X, y = data()
    lossfunc = extend(nn.CrossEntropyLoss())
    lossfunc(model(X), y).backward()
    assert capsys.readouterr().out == ""
    with backpack(extensions.BatchGrad(), debug=True):
        lossfunc(model(X), y).backward()
    shown = capsys.readouterr().out
    assert "grad_batch" in shown and "Linear" in shown


def test_values_and_gradients_do_not_change() -> None:
    plain = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2))
    model, X = extend(copy.deepcopy(plain)), torch.rand(N, 1, 3, 3, requires_grad=True)
    Z, y = X.detach().clone().requires_grad_(), torch.randint(2, (N,))
    nn.CrossEntropyLoss()(plain(Z), y).backward()
    run(model, *some(), batch=(X, y))
    assert torch.equal(X.grad, Z.grad)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


# ------------------------------------------------------------------ CTX and contexts


def test_ctx_setters_and_getters() -> None:
    assert CTX is CONTEXT_CTX is package.CTX
    ext, hook = extensions.BatchGrad(), print
    with backpack():
        CTX.set_active_exts([ext])
        CTX.set_debug(True)
        CTX.set_extension_hook(hook)
        CTX.set_retain_graph(True)
        assert tuple(CTX.get_active_exts()) == (ext,)
        assert CTX.get_debug() is True
        assert CTX.get_extension_hook() is hook
        assert CTX.get_retain_graph() is True
        assert CTX.is_extension_active(extensions.BatchGrad)
        assert CTX.is_extension_active(extensions.KFAC, extensions.BatchGrad)
        assert not CTX.is_extension_active(extensions.Variance, extensions.KFAC)
        assert not CTX.is_extension_active()
    assert tuple(CTX.get_active_exts()) == ()
    assert CTX.get_debug() is False
    assert CTX.get_extension_hook() is None
    assert CTX.get_retain_graph() is False


def test_ctx_set_active_exts_runs_them() -> None:
    model, (X, y) = extend(mlp()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    CTX.set_active_exts((extensions.BatchGrad(),))
    try:
        loss.backward()
    finally:
        CTX.set_active_exts(())
    check(model, "grad_batch", oracle.batch_grad(copy.deepcopy(model), nn.CrossEntropyLoss(), X, y))


def test_context_reads_its_options() -> None:
    ext, hook = extensions.BatchGrad(), print
    context = backpack(ext, extension_hook=hook, debug=True, retain_graph=True)
    assert tuple(context.exts) == (ext,)
    assert (context.debug, context.extension_hook, context.retain_graph) == (True, hook, True)
    assert tuple(CTX.get_active_exts()) == ()  # nothing is active before it is entered
    with context:
        assert CTX.get_debug() is True


def test_nested_contexts_restore() -> None:
    outer, inner = extensions.BatchGrad(), extensions.Variance()
    model, (X, y) = extend(mlp()), data()
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(outer, debug=False, retain_graph=True):
        with backpack(inner):
            assert tuple(CTX.get_active_exts()) == (inner,)
            assert CTX.get_retain_graph() is False
            lossfunc(model(X), y).backward()
        assert tuple(CTX.get_active_exts()) == (outer,)
        assert CTX.get_retain_graph() is True
        assert not hasattr(model[0].weight, "grad_batch")
        lossfunc(model(X), y).backward()
        assert hasattr(model[0].weight, "grad_batch")
    assert tuple(CTX.get_active_exts()) == ()


def test_context_restores_after_an_exception() -> None:
    with pytest.raises(KeyError), backpack(extensions.BatchGrad(), debug=True):
        raise KeyError
    assert tuple(CTX.get_active_exts()) == () and CTX.get_debug() is False


def test_context_can_be_entered_again() -> None:
    model, batch = extend(mlp()), data()
    lossfunc, context = extend(nn.CrossEntropyLoss()), backpack(extensions.BatchGrad())
    for _ in range(2):
        with context:
            lossfunc(model(batch[0]), batch[1]).backward()
        assert model[0].weight.grad_batch.shape == (N, 4, 3)
        del model[0].weight.grad_batch


def test_no_extension_leaves_nothing() -> None:
    model = extend(mlp())
    run(model, batch=data())
    for p in model.parameters():
        assert vars(p) == {}
    for m in model.modules():
        assert not {"input0", "output"} & set(vars(m))


def test_remove_hooks_then_extend() -> None:
    model, batch = extend(mlp()), data()
    other = nn.Linear(3, 2)
    calls: list[str] = []
    CTX.add_hook_handle(other.register_forward_hook(lambda *_: calls.append("x")))
    CTX.remove_hooks()
    other(batch[0])
    assert calls == []
    _out, counts = record_counts(model, batch[0])
    assert counts == [0, 0, 0]
    assert not any(m._forward_hooks for m in model.modules())
    extend(model)
    run(model, *some(), batch=batch)
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)


def test_remove_hooks_reaches_copies() -> None:
    model = copy.deepcopy(extend(mlp()))
    X, _ = data()
    extend(model)
    CTX.remove_hooks()
    extend(model)
    _out, counts = record_counts(model, X)
    assert counts == [1, 1, 1]


# ------------------------------------------------------------------ disable, memory_cleanup


def test_disable() -> None:
    model = extend(mlp())
    X, _ = data()
    assert disable.should_store_io()
    with disable():
        assert not disable.should_store_io()
        with disable():
            assert not disable.should_store_io()
        assert not disable.should_store_io()
        _out, counts = record_counts(model, X)
        assert counts == [0, 0, 0]
    assert disable.should_store_io()
    _out, counts = record_counts(model, X)
    assert counts == [1, 1, 1]


def test_disable_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), disable():
        raise KeyError
    assert disable.should_store_io()


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_stored_without_gradients(grad_mode: Callable[[], Any]) -> None:
    model = extend(mlp())
    with grad_mode():
        _out, counts = record_counts(model, torch.rand(N, 3))
    assert counts == [0, 0, 0]


def test_memory_cleanup() -> None:
    model, (X, y) = extend(nn.Sequential(mlp(), nn.Flatten())), data()
    lossfunc = extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(X), y)
    memory_cleanup(model)
    assert all(not alive.live_calls(m) for m in model.modules())
    assert len(alive.live_calls(lossfunc)) == 1
    with backpack(extensions.BatchGrad()), pytest.raises(RuntimeError, match="memory_cleanup"):
        loss.backward()
    run(model, *some(), batch=(X, y))
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)


def test_memory_cleanup_on_any_module() -> None:
    for module in (mlp(), nn.ReLU(), nn.ModuleList([nn.Linear(1, 1)]), extend(mlp()), nn.Module()):
        memory_cleanup(module)
        memory_cleanup(module)


def test_memory_cleanup_then_plain_backward() -> None:
    model, (X, y) = extend(mlp()), data()
    loss = F.cross_entropy(model(X), y)
    memory_cleanup(model)
    loss.backward()
    assert model[0].weight.grad is not None


# ------------------------------------------------------------------ extension_hook


class WithOwnParameter(nn.Module):
    """A custom container with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(3))
        self.inner = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.shift)


class CustomContainer(nn.Module):
    """A custom container without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


HOOK_EXTS = [
    [extensions.BatchGrad()],
    [extensions.DiagGGNExact()],
    [extensions.BatchGrad(), extensions.KFLR(), extensions.DiagHessian()],
]


@pytest.mark.parametrize("exts", HOOK_EXTS, ids=len)
def test_extension_hook(exts: list[Any]) -> None:
    model = extend(nn.Sequential(CustomContainer(), nn.Sequential(nn.Linear(4, 2), nn.Tanh())))
    lossfunc, (X, y) = extend(nn.CrossEntropyLoss()), data()
    seen: list[nn.Module] = []

    def hook(module: nn.Module) -> None:
        seen.append(module)
        for p in module.parameters(recurse=False):
            assert all(hasattr(p, ext.savefield) for ext in exts)
        inputs = [module.input0, module.input1] if module is lossfunc else [module.input0]
        torch.testing.assert_close(module.output, module.forward(*inputs))

    with backpack(*exts, extension_hook=hook):
        lossfunc(model(X), y).backward()
    first, relu = model[0].layers
    assert seen == [lossfunc, model[1][1], model[1][0], relu, first]
    assert not any("input0" in vars(m) for m in seen)


def test_extension_hook_on_containers_with_own_parameters() -> None:
    model = extend(nn.Sequential(WithOwnParameter(), nn.Linear(4, 2)))
    seen: list[nn.Module] = []
    with pytest.warns(UserWarning, match="WithOwnParameter"):
        run(model, extensions.BatchGrad(), batch=data(), extension_hook=seen.append)
    assert len(seen) == 4 and seen[1] is model[1]
    assert set(seen[2:]) == {model[0], model[0].inner}


@pytest.mark.parametrize("ext", [extensions.BatchGrad(), extensions.DiagGGNExact()])
def test_extension_hook_once_per_call(ext: Any) -> None:
    linear = nn.Linear(3, 3)
    model = nn.Sequential(linear, nn.Tanh(), linear, nn.Tanh(), linear)
    seen: Counter[str] = Counter()
    batch = torch.rand(N, 3), torch.randint(3, (N,))
    run(model, ext, batch=batch, extension_hook=lambda m: seen.update([type(m).__name__]))
    assert seen == {"Linear": 3, "Tanh": 2, "CrossEntropyLoss": 1}


@pytest.mark.parametrize("field", ["grad_batch", "diag_ggn_exact"])
def test_extension_hook_may_delete_and_compress(field: str) -> None:
    model, sums = extend(mlp()), {}

    def hook(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            sums[p] = getattr(p, field).sum()
            delattr(p, field)
        if isinstance(module, nn.Linear):
            del module.input0, module.output

    exts = [extensions.BatchGrad(), extensions.DiagGGNExact()]
    batch = data()
    run(model, *exts, batch=batch, extension_hook=hook)
    assert set(sums) == set(model.parameters())
    assert not any(hasattr(p, field) for p in model.parameters())
    run(model, *exts, batch=batch)
    for p in model.parameters():
        torch.testing.assert_close(sums[p], getattr(p, field).sum())


def test_extension_hook_without_extensions_is_harmless() -> None:
    run(mlp(), batch=data(), extension_hook=lambda module: None)


def test_extension_hook_only_with_its_context() -> None:
    model, seen = extend(mlp()), []
    run(model, extensions.BatchGrad(), batch=data(), extension_hook=seen.append)
    count = len(seen)
    run(model, extensions.BatchGrad(), batch=data())
    assert len(seen) == count == 4


# ------------------------------------------------------------------ retain_graph


@pytest.mark.parametrize("by", ["context and backward", "backward"])
def test_retain_graph(by: str) -> None:
    model, lossfunc, (X, y) = extend(mlp()), extend(nn.CrossEntropyLoss()), data()
    loss = lossfunc(model(X), y)
    for factor in (1.0, 2.0, 1.0):
        with backpack(*some(), retain_graph=by != "backward"):
            (factor * loss).backward(retain_graph=True)
        scaled = lambda f, t, c=factor: c * nn.CrossEntropyLoss()(f, t)  # noqa: E731
        check_all(model, copy.deepcopy(model), scaled, X, y)
    with backpack(*some()):
        loss.backward()
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)
    assert all(not alive.live_calls(m) for m in [*model.modules(), lossfunc])


def test_retain_graph_with_other_extensions() -> None:
    model, (X, y) = extend(mlp()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(extensions.BatchGrad(), retain_graph=True):
        loss.backward(retain_graph=True)
    with backpack(extensions.DiagHessian(), retain_graph=True):
        loss.backward(retain_graph=True)
    with backpack(extensions.DiagGGNExact()):
        loss.backward()
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)


@pytest.mark.parametrize("ext", [extensions.BatchGrad(), extensions.KFLR()])
def test_released_calls_say_what_to_do(ext: Any) -> None:
    model, (X, y) = extend(mlp()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(ext):
        loss.backward(retain_graph=True)
        memory_cleanup(model)
        with pytest.raises(RuntimeError, match=r"memory_cleanup.*retain_graph=True"):
            loss.backward()


def test_calls_that_an_extension_hook_cleans_up() -> None:
    """They stay released, whatever is retained."""
    model, (X, y) = extend(mlp()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(extensions.BatchGrad(), extension_hook=memory_cleanup, retain_graph=True):
        loss.backward(retain_graph=True)
    check(model, "grad_batch", oracle.batch_grad(model, nn.CrossEntropyLoss(), X, y))
    with backpack(extensions.BatchGrad()), pytest.raises(RuntimeError, match="memory_cleanup did"):
        loss.backward()


def test_precision_is_that_of_a_backward_pass() -> None:
    """Second order computes all in the highest one, first order where it is."""
    model, (X, y) = extend(mlp().float()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X.float()).double(), y)
    with backpack(extensions.DiagGGNExact()):
        loss.backward(retain_graph=True)
    with backpack(extensions.Variance(), extensions.BatchGrad()):
        loss.backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad / 2, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(p.variance, p.grad_batch.var(0, False), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("order", ["first", "second"])
def test_penalty_of_the_gradient_of_data(order: str) -> None:
    """A pass for data alone keeps its graph, and the calls in it."""
    exts = [extensions.BatchGrad()] if order == "first" else some()
    model, (X, y) = extend(mlp()), data()
    plain, X = copy.deepcopy(model), X.requires_grad_()
    output = model(X)
    with backpack(*exts):
        (gradient,) = torch.autograd.grad(output.sum(), X, create_graph=True)
        loss = extend(nn.CrossEntropyLoss())(output, y)
        loss.backward(retain_graph=True)
    gradient.square().sum().backward()
    (expected,) = torch.autograd.grad(plain(X).sum(), X)
    torch.testing.assert_close(gradient, expected)
    check(model, "grad_batch", oracle.batch_grad(plain, nn.CrossEntropyLoss(), X.detach(), y))


TERMS = {
    "weight decay": lambda model, h, X: 0.1 * model[0].weight.square().sum(),
    "a norm": lambda model, h, X: model[2].bias.norm(),
    "a layer": lambda model, h, X: nn.functional.linear(h, model[2].weight).square().sum(),
    "a gradient": lambda model, h, X: (
        torch.autograd.grad(h.sum(), X, create_graph=True)[0].square().sum()
    ),
}


@pytest.mark.parametrize("term", TERMS)
def test_terms_of_parameters_are_in_no_quantity(term: str) -> None:
    """That is told: they are in the gradient."""
    model, (X, y) = extend(mlp()), data()
    h = model[:2](X.requires_grad_())
    loss = extend(nn.CrossEntropyLoss())(model[2](h), y)
    with (
        backpack(extensions.BatchGrad()),
        pytest.warns(UserWarning, match="BatchGrad: functions beside .* as a penalty does"),
    ):
        (loss + TERMS[term](model, h, X)).backward()
    if term in ("weight decay", "a norm"):
        check(model, "grad_batch", oracle.batch_grad(model, nn.CrossEntropyLoss(), X.detach(), y))


@pytest.mark.parametrize("converter", ["trace", "record"])
def test_weights_of_losses_are_in_no_quantity(converter: Any) -> None:
    """A container of the model has them, and its forward pass does not read them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.log_variance = mlp(), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model, (X, y) = extend(Model(), use_converter=converter), data()
    with (
        backpack(extensions.BatchGrad()),
        pytest.warns(UserWarning, match=r"functions beside .* of shapes \[\] \(NegBackward0\)"),
    ):
        precision = model.log_variance.neg().exp()
        (precision * extend(nn.CrossEntropyLoss())(model(X), y) + model.log_variance).backward()
    check(model.net, "grad_batch", oracle.batch_grad(model.net, nn.CrossEntropyLoss(), X, y))


def test_terms_of_other_parameters_are_nothing_to_tell(recwarn: Any) -> None:
    model, (X, y) = extend(mlp()), data()
    scale = nn.Parameter(torch.ones(()))
    with backpack(extensions.BatchGrad()):
        (scale * extend(nn.CrossEntropyLoss())(model(X), y) + scale.square()).backward()
    assert not recwarn.list
    check(model, "grad_batch", oracle.batch_grad(model, nn.CrossEntropyLoss(), X, y))


def test_terms_of_parameters_without_gradients_are_nothing_to_tell(recwarn: Any) -> None:
    model, (X, y) = extend(mlp()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(extensions.BatchGrad()):
        (loss + model[2].weight.square().sum()).backward(inputs=[model[0].weight])
    assert not recwarn.list


@pytest.mark.parametrize("ext", [extensions.BatchGrad, extensions.DiagHessian])
def test_gradients_that_a_hook_sets_to_zero(ext: Any) -> None:
    """What arrives at a function of a weight alone is the gradient of that weight."""

    def set_to_zero(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.zero_()

    found = []
    for is_hooked in (False, True):
        torch.manual_seed(0)
        first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        model = extend(nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2)), use_converter=True)
        for p in model.parameters() if is_hooked else ():
            p.register_post_accumulate_grad_hook(set_to_zero)
        X, y = torch.rand(N, 3), torch.arange(N) % 2
        loss = extend(nn.CrossEntropyLoss())(model(X), y)
        with backpack(ext()):
            loss.backward()
        found.append(values(model, ext().savefield))
    torch.testing.assert_close(*found)


def test_plain_backward_does_not_release() -> None:
    model, (X, y) = extend(mlp()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    loss.backward(retain_graph=True)
    with backpack(*some()):
        loss.backward()
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)


# ------------------------------------------------------------------ inputs=, autograd.grad


RESTRICTED: dict[str, Callable[[Tensor, list[Any]], None]] = {
    "method": lambda loss, inputs: loss.backward(inputs=inputs),
    "method, by position": lambda loss, inputs: loss.backward(None, None, False, inputs),
    "function": lambda loss, inputs: torch.autograd.backward(loss, inputs=inputs),
    "function, by position": lambda loss, inputs: torch.autograd.backward(
        loss, None, None, False, None, inputs
    ),
}


@pytest.mark.parametrize("exts", HOOK_EXTS, ids=len)
@pytest.mark.parametrize("how", RESTRICTED)
def test_backward_inputs_restricts(how: str, exts: list[Any]) -> None:
    model, (X, y) = extend(mlp()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(*exts):
        RESTRICTED[how](loss, [model[0].bias, model[2].weight])
    whole = copy.deepcopy(model)
    run(whole, *exts, batch=(X, y))
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        wanted = name in ("0.bias", "2.weight")
        assert (p.grad is not None) == wanted
        for ext in exts:
            assert hasattr(p, ext.savefield) == wanted, name
            if wanted:
                torch.testing.assert_close(getattr(p, ext.savefield), getattr(q, ext.savefield))


def test_backward_inputs_then_everything() -> None:
    model, (X, y) = extend(mlp()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(*some(), retain_graph=True):
        loss.backward(inputs=[model[0].weight], retain_graph=True)
        loss.backward(retain_graph=True)
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)


def test_backward_inputs_forgets_all_uses() -> None:
    model, batch = extend(mlp()), data()
    before = alive.all_live_calls()
    loss = extend(nn.CrossEntropyLoss())(model(batch[0]), batch[1])
    with backpack(extensions.BatchGrad()):
        loss.backward(inputs=[model[0].weight])
    del loss
    assert alive.all_live_calls() == before


def test_backward_inputs_of_the_data_alone() -> None:
    model, (X, y) = extend(mlp()), data()
    X.requires_grad_()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(*some()):
        loss.backward(inputs=[X])
    assert X.grad is not None
    assert not any(vars(p) for p in model.parameters())


@pytest.mark.parametrize("exts", HOOK_EXTS, ids=len)
def test_autograd_grad_in_the_context(exts: list[Any]) -> None:
    model, (X, y) = extend(mlp()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(*exts):
        grads = torch.autograd.grad(loss, list(model.parameters()))
    for p, g in zip(model.parameters(), grads, strict=True):
        assert p.grad is None
        if hasattr(p, "grad_batch"):
            torch.testing.assert_close(p.grad_batch.sum(0), g)
    whole = copy.deepcopy(model)
    run(whole, *exts, batch=(X, y))
    for ext in exts:
        for mine, truth in zip(
            values(model, ext.savefield), values(whole, ext.savefield), strict=True
        ):
            torch.testing.assert_close(mine, truth)


def test_backward_functions_of_torch() -> None:
    model, (X, y) = extend(mlp()), data()
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(*some()):
        torch.autograd.backward(lossfunc(model(X), y))
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)
    with backpack(*some()):
        lossfunc(model(X), y).backward(gradient=torch.tensor(3.0))
    triple = lambda f, t: 3 * nn.CrossEntropyLoss()(f, t)  # noqa: E731
    check_all(model, copy.deepcopy(model), triple, X, y)


# ------------------------------------------------------------------ create_graph


def smooth_networks() -> dict[str, tuple[nn.Module, nn.Module, Tensor, Tensor]]:
    def images() -> Tensor:
        return torch.randn(N, 1, 5, 5)

    norm = nn.BatchNorm2d(2)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return {
        "conv, sigmoid, pooling": (
            nn.Sequential(
                nn.Conv2d(1, 2, 2),
                nn.Sigmoid(),
                nn.AvgPool2d(2),
                nn.Flatten(),
                nn.Linear(8, 2),
            ),
            nn.CrossEntropyLoss(),
            images(),
            torch.randint(2, (N,)),
        ),
        "conv, batchnorm, tanh, maxpool": (
            nn.Sequential(
                nn.Conv2d(1, 2, 2, bias=False),
                norm,
                nn.Tanh(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(8, 2),
            ).eval(),
            nn.MSELoss(),
            images(),
            torch.randn(N, 2),
        ),
        "elu, logsigmoid": (
            nn.Sequential(
                nn.Linear(3, 4), nn.ELU(), nn.Linear(4, 3), nn.LogSigmoid(), nn.Linear(3, 2)
            ),
            nn.BCEWithLogitsLoss(reduction="sum"),
            torch.randn(N, 3),
            torch.rand(N, 2),
        ),
        "reused": (
            nn.Sequential(*[nn.Linear(3, 3), nn.Tanh()] * 2),
            nn.MSELoss(),
            torch.randn(N, 3),
            torch.randn(N, 3),
        ),
    }


def _diagonals(blocks: list[Tensor]) -> list[Tensor]:
    return [block.diagonal() for block in blocks]


def _product(mp: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
    return mp(torch.eye(p.numel()).reshape(-1, *p.shape)).flatten(1)


DIFFERENTIABLE: dict[str, tuple[Any, Callable, Callable]] = {
    # extension, the oracle's value, what to make of the savefield
    "grad_batch": (extensions.BatchGrad, oracle.batch_grad, lambda v, p: v),
    "batch_l2": (extensions.BatchL2Grad, oracle.batch_l2, lambda v, p: v),
    "sum_grad_squared": (extensions.SumGradSquared, oracle.sum_grad_squared, lambda v, p: v),
    "variance": (extensions.Variance, oracle.variance, lambda v, p: v),
    "diag_ggn_exact": (extensions.DiagGGNExact, oracle.ggn_diag, lambda v, p: v),
    "diag_ggn_exact_batch": (extensions.BatchDiagGGNExact, oracle.batch_ggn_diag, lambda v, p: v),
    "sqrt_ggn_exact": (
        extensions.SqrtGGNExact,
        oracle.ggn_blocks,
        lambda v, p: torch.einsum("vnp,vnq->pq", v.flatten(2), v.flatten(2)),
    ),
    "kflr": (
        extensions.KFLR,
        lambda *problem: [f[0] for f in oracle.kflr(*problem)],
        lambda v, p: v[0],
    ),
    "diag_h": (extensions.DiagHessian, oracle.hessian_diag, lambda v, p: v),
    "diag_h_batch": (extensions.BatchDiagHessian, oracle.batch_hessian_diag, lambda v, p: v),
    "ggnmp": (extensions.GGNMP, oracle.ggn_blocks, _product),
    "hmp": (extensions.HMP, oracle.hessian_blocks, _product),
}


@pytest.mark.parametrize("field", DIFFERENTIABLE)
@pytest.mark.parametrize("network", ["conv, sigmoid, pooling", "conv, batchnorm, tanh, maxpool",
                                     "elu, logsigmoid", "reused"])  # fmt: skip
def test_create_graph(network: str, field: str) -> None:
    """Derivative of a random projection of the quantity, against the oracle's differences."""
    model, lossfunc, X, y = smooth_networks()[network]
    make, truth, read = DIFFERENTIABLE[field]
    plain = copy.deepcopy(model)
    weights = [torch.randn_like(value) for value in truth(plain, lossfunc, X, y)]
    step, eps = [torch.randn_like(p) for p in model.parameters()], 1e-4

    def projected(scale: float) -> Tensor:
        with torch.no_grad():
            for p, q, s in zip(plain.parameters(), model.parameters(), step, strict=True):
                p.copy_(q + scale * s)
        quantities = truth(plain, lossfunc, X, y)
        return sum((w * v).sum() for w, v in zip(weights, quantities, strict=True))

    far = (projected(2 * eps) - projected(-2 * eps)) / (4 * eps)
    near = (projected(eps) - projected(-eps)) / (2 * eps)
    expected = (4 * near - far) / 3  # error O(eps^4)

    extend(model)
    loss = extend(lossfunc)(model(X), y)
    with backpack(make()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph")
        loss.backward(create_graph=True)
    params = list(model.parameters())
    quantities = [read(getattr(p, field), p) for p in params]
    total = sum((w * v).sum() for w, v in zip(weights, quantities, strict=True))
    torch.testing.assert_close(total, projected(0.0), **TOLERANCE)
    grads = torch.autograd.grad(total, params, materialize_grads=True)
    derivative = sum((g * s).sum() for g, s in zip(grads, step, strict=True))
    torch.testing.assert_close(derivative, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("ext", [extensions.DiagGGNExact, extensions.KFLR, extensions.GGNMP])
@pytest.mark.parametrize("lossfunc", [nn.CrossEntropyLoss, nn.BCEWithLogitsLoss])
def test_create_graph_of_a_saturated_prediction(lossfunc: Any, ext: Any) -> None:
    """A probability that underflows to zero: its square root has no finite derivative."""
    model = extend(nn.Linear(3, 2))
    X, y = 1e3 * torch.ones(N, 3), torch.rand(N, 2).softmax(1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 3))
    loss = extend(lossfunc())(model(X), y)
    with backpack(ext()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph")
        loss.backward(create_graph=True)
    value = getattr(model.weight, ext().savefield)
    value = value(torch.ones(1, 2, 3)) if callable(value) else value
    total = value[0].sum() if isinstance(value, list) else value.sum()
    for g in torch.autograd.grad(total, list(model.parameters())):
        assert g.isfinite().all()


def test_train_on_the_variance() -> None:
    """Differentiate the gradient's variance against double autograd, sample by sample."""
    model, (X, y) = extend(mlp()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(extensions.Variance()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss.backward(create_graph=True)
    params = list(model.parameters())
    mine = torch.autograd.grad(sum(p.variance.sum() for p in params), params)
    each = [
        torch.autograd.grad(F.cross_entropy(model(x[None]), t[None]) / N, params, create_graph=True)
        for x, t in zip(X, y, strict=True)
    ]
    variances = [torch.stack(g).var(0, unbiased=False).sum() for g in zip(*each, strict=True)]
    truth = torch.autograd.grad(sum(variances), params)
    for a, b in zip(mine, truth, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


def test_without_create_graph_results_have_no_graph() -> None:
    model = extend(mlp())
    exts = [extensions.Variance(), extensions.KFLR(), *some(), extensions.HMP()]
    run(model, *exts, batch=data())
    for p in model.parameters():
        for ext in exts[:-1]:
            value = getattr(p, ext.savefield)
            for tensor in value if isinstance(value, list) else [value]:
                assert not tensor.requires_grad
        assert not p.hmp(torch.rand(1, *p.shape)).requires_grad


@pytest.mark.parametrize("exts", HOOK_EXTS, ids=len)
def test_inactive_hooks_under_double_backward(exts: list[Any]) -> None:
    plain, (X, y) = mlp(nn.Tanh), data()
    model, lossfunc = extend(copy.deepcopy(plain)), extend(nn.CrossEntropyLoss())

    def penalty(net: nn.Module, criterion: nn.Module, x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(criterion(net(x), y), x, create_graph=True)
        return g.square().sum()

    X1, X2 = X.clone().requires_grad_(), X.clone().requires_grad_()
    penalty(plain, nn.CrossEntropyLoss(), X1).backward()
    penalty(model, lossfunc, X2).backward()
    assert torch.equal(X1.grad, X2.grad)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
        assert not vars(q)
    run(model, *exts, batch=(X, y))


# ------------------------------------------------------------------ parts of models


@pytest.mark.parametrize("exts", HOOK_EXTS, ids=len)
def test_last_layer_and_loss_alone(exts: list[Any]) -> None:
    model, (X, y) = mlp(), data()
    extend(model[2])
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(*exts):
        loss.backward()
    whole = copy.deepcopy(model)
    run(whole, *exts, batch=(X, y))
    for p, q in zip(model[2].parameters(), whole[2].parameters(), strict=True):
        for ext in exts:
            torch.testing.assert_close(getattr(p, ext.savefield), getattr(q, ext.savefield))
    for p in model[0].parameters():
        assert p.grad is not None and not vars(p)


class WithFunctions(nn.Module):
    """A model with functions between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)) + 1)


@pytest.mark.parametrize("only_parametrised", [True, False])
def test_first_order_through_functions(only_parametrised: bool) -> None:
    model, (X, y) = WithFunctions(), data()
    if only_parametrised:
        extend(model.first)
        extend(model.second)
    else:
        extend(model)
    with backpack(extensions.BatchGrad(), extensions.Variance()), warnings.catch_warnings():
        warnings.simplefilter("error")
        F.cross_entropy(model(X), y).backward()
    plain = copy.deepcopy(model)
    check(model, "grad_batch", oracle.batch_grad(plain, nn.CrossEntropyLoss(), X, y))
    check(model, "variance", oracle.variance(plain, nn.CrossEntropyLoss(), X, y))


def test_first_order_without_an_extended_loss() -> None:
    model, (X, y) = extend(mlp()), data()
    with backpack(extensions.BatchGrad()):
        F.cross_entropy(model(X), y).backward()
    check(model, "grad_batch", oracle.batch_grad(copy.deepcopy(model), nn.CrossEntropyLoss(), X, y))


@pytest.mark.parametrize("lossfunc", [nn.MSELoss, nn.BCEWithLogitsLoss])
def test_unreduced_loss_summed_by_hand(lossfunc: Callable[..., nn.Module]) -> None:
    model, X, y = extend(mlp()), torch.randn(N, 3), torch.rand(N, 2)
    with backpack(extensions.BatchGrad(), extensions.BatchL2Grad()):
        extend(lossfunc(reduction="none"))(model(X), y).sum().backward()
    plain, summed = copy.deepcopy(model), lossfunc(reduction="sum")
    check(model, "grad_batch", oracle.batch_grad(plain, summed, X, y))
    check(model, "batch_l2", oracle.batch_l2(plain, summed, X, y))


def test_unreduced_cross_entropy_summed_by_hand() -> None:
    model, (X, y) = extend(mlp()), data()
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss(reduction="none"))(model(X), y).sum().backward()
    expected = oracle.batch_grad(copy.deepcopy(model), nn.CrossEntropyLoss(reduction="sum"), X, y)
    check(model, "grad_batch", expected)


def test_container_with_own_parameters_warns_for_first_order() -> None:
    model, (X, y) = extend(nn.Sequential(WithOwnParameter(), nn.Linear(4, 2))), data()
    with pytest.warns(UserWarning, match="WithOwnParameter"):
        run(model, extensions.BatchGrad(), extensions.Variance(), batch=(X, y))
    expected = oracle.batch_grad(copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)
    for p, truth in zip(model.parameters(), expected, strict=True):
        if p is model[0].shift:
            assert not hasattr(p, "grad_batch") and not hasattr(p, "variance")
        else:
            torch.testing.assert_close(p.grad_batch, truth)


def test_container_with_own_parameters_is_an_error_for_second_order() -> None:
    model = extend(nn.Sequential(WithOwnParameter(), nn.Linear(4, 2)))
    with pytest.raises(NotImplementedError, match="WithOwnParameter"):
        run(model, extensions.DiagGGNExact(), batch=data())
    assert not any(vars(p) for p in model.parameters())


@pytest.mark.parametrize("ext", [extensions.DiagGGNExact(), extensions.HMP()], ids=repr)
def test_functions_of_a_container_with_frozen_parameters_beside_a_branch(ext: Any) -> None:
    """What reaches the loss through modules alone is not all that does."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.scale = nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.inner(x) + 1) * self.scale

    model = extend(nn.Sequential(nn.Linear(3, 2), Parallel(nn.Identity(), Scaled())))
    with pytest.raises(ValueError, match=r"(?s)through an operation that is not a module.*Relu"):
        run(model, ext, batch=data())


def test_frozen_parameters() -> None:
    model, (X, y) = mlp(), data()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    run(model, *some(), batch=(X, y))
    for p in (model[0].weight, model[2].bias):
        assert p.grad is None and not vars(p)
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)


def test_frozen_after_the_forward_pass_of_another_batch() -> None:
    model, batch = extend(mlp()), data()
    run(model, *some(), batch=batch)
    for p in model[0].parameters():
        p.requires_grad_(False)
        vars(p).clear()
    run(model, *some(), batch=batch)
    assert not any(vars(p) for p in model[0].parameters())
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)


def test_data_that_requires_grad() -> None:
    model, (X, y) = mlp(), data()
    X.requires_grad_()
    run(model, *some(), batch=(X, y))
    assert X.grad is not None
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)


@pytest.mark.parametrize("first", [nn.Identity(), nn.Flatten(), nn.Dropout().eval()], ids=str)
def test_first_module_returns_the_data_itself(first: nn.Module) -> None:
    """Its output is a leaf that outlives the graph: what hangs on it must not."""
    model, (X, y) = extend(nn.Sequential(first, nn.Linear(3, 2))), data()
    X.requires_grad_()
    for _ in range(3):
        run(model, *some(), batch=(X, y))
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)
    assert not alive.live_calls(first)
    assert not X._backward_hooks


def test_weight_norm() -> None:
    """The weight is computed from two parameters, which get the quantities."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    reference, batch = copy.deepcopy(model), data()
    run(model, extensions.BatchGrad(), extensions.DiagGGNExact(), batch=batch)
    assert any("original0" in name for name, _ in model.named_parameters())
    for field, truth in {
        "grad_batch": oracle.batch_grad,
        "diag_ggn_exact": oracle.ggn_diag,
    }.items():
        expected = truth(reference, nn.CrossEntropyLoss(), *batch)
        for p, value in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(getattr(p, field), value)


class PaddedLinear(nn.Linear):
    """A layer with a module in it, which is a container to the library."""

    def __init__(self, *features: int) -> None:
        super().__init__(*features)
        self.before = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x))


def test_weight_norm_of_layers_with_a_module_in_them() -> None:
    """Unconverted, all of them are named, with what to do; none of them has a wrong result."""
    layers = map(nn.utils.parametrizations.weight_norm, (PaddedLinear(3, 4), PaddedLinear(4, 2)))
    model, batch = nn.Sequential(*layers), data()
    expected = oracle.batch_grad(copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)
    recorded = extend(copy.deepcopy(model), use_converter="record")
    with pytest.warns(UserWarning, match=r"no rule for .* Use .*use_converter=True") as caught:
        run(model, extensions.BatchGrad(), batch=batch)
    found = [re.search(r"the parameters (.+?) of '", str(warning.message)) for warning in caught]
    named = [name for each in found if each is not None for name in each[1].split(", ")]
    assert sorted(named) == sorted(2 * ["bias", "original0", "original1"])
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())
    run(recorded, extensions.BatchGrad(), batch=batch)
    for p, value in zip(recorded.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch, value)


# ------------------------------------------------------------------ several models, copies, pickles


def test_two_models() -> None:
    one, two = extend(mlp()), extend(mlp(nn.Tanh))
    first, second = data(), data()
    lossfunc = extend(nn.CrossEntropyLoss())
    loss1, loss2 = lossfunc(one(first[0]), first[1]), lossfunc(two(second[0]), second[1])
    with backpack(*some()):
        loss1.backward()
    assert not any(vars(p) for p in two.parameters())
    with backpack(*some()):
        loss2.backward()
    check_all(one, copy.deepcopy(one), nn.CrossEntropyLoss(), *first)
    check_all(two, copy.deepcopy(two), nn.CrossEntropyLoss(), *second)


def test_two_losses_in_one_context() -> None:
    one, two = extend(mlp()), extend(mlp())
    first, second = data(), data()
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(*some()):
        lossfunc(one(first[0]), first[1]).backward()
        lossfunc(two(second[0]), second[1]).backward()
    check_all(one, copy.deepcopy(one), nn.CrossEntropyLoss(), *first)
    check_all(two, copy.deepcopy(two), nn.CrossEntropyLoss(), *second)


@pytest.mark.parametrize("after", ["extend", "forward", "backward"])
def test_deepcopy_of_an_extended_model(after: str) -> None:
    model, batch = extend(mlp()), data()
    if after != "extend":
        loss = extend(nn.CrossEntropyLoss())(model(batch[0]), batch[1])
    if after == "backward":
        with backpack(*some(), extensions.GGNMP()):
            loss.backward()
    clone = copy.deepcopy(model)
    assert not any(alive.live_calls(m) for m in clone.modules())
    with torch.no_grad():
        for p in clone.parameters():
            p.mul_(2)
    loss2 = extend(nn.CrossEntropyLoss())(clone(batch[0]), batch[1])
    with backpack(*some()):
        loss2.backward()
    check_all(clone, copy.deepcopy(clone), nn.CrossEntropyLoss(), *batch)
    if after == "forward":
        assert not any(vars(p) for p in model.parameters())
        with backpack(*some()):
            loss.backward()
    if after != "extend":
        check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)


@pytest.mark.parametrize("used", [False, True])
def test_pickle_of_an_extended_model(used: bool) -> None:
    model, batch = extend(mlp()), data()
    if used:
        run(model, *some(), extensions.KFLR(), extensions.HMP(), batch=batch)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    run(loaded, *some(), batch=batch)
    check_all(loaded, copy.deepcopy(loaded), nn.CrossEntropyLoss(), *batch)
    _out, counts = record_counts(loaded, batch[0])
    assert counts == [1, 1, 1]


def test_state_dict_is_untouched() -> None:
    model = extend(mlp())
    keys = list(model.state_dict())
    run(model, *some(), batch=data())
    assert list(model.state_dict()) == keys == list(mlp().state_dict())


# ------------------------------------------------------------------ reuse, several losses


def test_module_reuse() -> None:
    linear = nn.Linear(3, 3)
    model = nn.Sequential(linear, nn.Tanh(), linear, nn.Sigmoid(), linear)
    batch = torch.randn(N, 3), torch.randint(3, (N,))
    run(model, *some(), batch=batch)
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)


def test_forward_pass_nobody_uses() -> None:
    """A validation pass whose output is still alive must not be counted."""
    model, batch = extend(mlp()), data()
    output = model(torch.rand(7, 3))
    run(model, *some(), batch=batch)
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)
    assert output.requires_grad


def test_two_batches_one_backward() -> None:
    """The calls of the same modules on two batches, in one sum of losses."""
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss(reduction="sum"))
    (X1, y1), (X2, y2) = data(), data()
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        (lossfunc(model(X1), y1) + lossfunc(model(X2), y2)).backward()
    plain, summed = copy.deepcopy(model), nn.CrossEntropyLoss(reduction="sum")
    for field, truth in (("diag_ggn_exact", oracle.ggn_diag), ("grad_batch", oracle.batch_grad)):
        one, two = truth(plain, summed, X1, y1), truth(plain, summed, X2, y2)
        check(model, field, [a + b for a, b in zip(one, two, strict=True)])


def test_several_losses() -> None:
    model, X = extend(mlp()), torch.randn(N, 3)
    y, t = torch.randint(2, (N,)), torch.randn(N, 2)
    f = model(X)
    with backpack(*some()), warnings.catch_warnings():
        warnings.simplefilter("error")
        (extend(nn.CrossEntropyLoss())(f, y) + 0.5 * extend(nn.MSELoss())(f, t)).backward()
    both = lambda f, t: F.cross_entropy(f, y) + 0.5 * F.mse_loss(f, t)  # noqa: E731
    check_all(model, copy.deepcopy(model), both, X, t)


def test_checkpointing() -> None:
    """Recomputation runs the forward hooks again, in the middle of the backward pass."""
    model, (X, y) = extend(mlp()), data()
    loss = extend(nn.CrossEntropyLoss())(checkpoint(model, X, use_reentrant=False), y)
    with backpack(*some()):
        loss.backward()
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dropout", [nn.Dropout, nn.AlphaDropout, nn.RReLU])
def test_random_modules(dropout: Callable[[], nn.Module], inside: bool) -> None:
    """The forward pass may run inside of the context, too."""
    model, (X, y) = nn.Sequential(nn.Linear(3, 4), nn.Flatten(), dropout(), nn.Linear(4, 2)), data()
    plain = copy.deepcopy(model)
    lossfunc = extend(nn.CrossEntropyLoss())
    extend(model)
    for _ in range(2):
        with backpack(*(some() if inside else [])):
            torch.manual_seed(1)
            loss = lossfunc(model(X), y)
            with backpack(*some()):
                loss.backward()
    for field, truth in (
        ("grad_batch", oracle.batch_grad),
        ("diag_ggn_exact", oracle.ggn_diag),
        ("diag_h", oracle.hessian_diag),
    ):
        torch.manual_seed(1)
        check(model, field, truth(plain, nn.CrossEntropyLoss(), X, y))


@pytest.mark.parametrize("dropout", [nn.Dropout, nn.AlphaDropout, nn.RReLU])
def test_recording_fires_no_hooks_of_others(dropout: Callable[[], nn.Module]) -> None:
    seen: list[Tensor] = []
    first, last = extend(nn.Linear(3, 3)), extend(dropout())
    h = first(torch.rand(N, 3))
    h.register_hook(seen.append)
    h.retain_grad()
    out = last(h)
    assert not seen and h.grad is None
    out.sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], h.grad)


@pytest.mark.parametrize(
    "register",
    [
        lambda h: h.register_hook(lambda g: 2 * g),
        lambda h: h.grad_fn.register_prehook(lambda grads: (2 * grads[0],)),
    ],
    ids=["tensor", "node"],
)
@pytest.mark.parametrize("shape", [(N, 3), (N, 2, 3)])
@pytest.mark.parametrize("exts", [[], [extensions.Variance()]], ids=["alone", "elided"])
def test_hooks_of_outputs_change_individual_gradients(
    register: Callable[[Any], Any], shape: tuple[int, ...], exts: list[Any]
) -> None:
    """Whoever registers them after the forward pass; twice, with a graph that is kept."""
    first, last = extend(nn.Linear(3, 4)), extend(nn.Linear(4, 2))
    found = []
    for hooked in (False, True):
        h = first(torch.ones(shape))
        loss = last(h.sin()).square().sum()
        if hooked:
            register(h)
        for _ in range(2):
            for p in first.parameters():
                p.grad = None
            with backpack(extensions.BatchGrad(), *exts):
                loss.backward(retain_graph=True)
            sums = [p.grad_batch.sum(0) for p in first.parameters()]
            torch.testing.assert_close(sums, [p.grad for p in first.parameters()])
            found.append(sums)
    torch.testing.assert_close(found[2], [2 * t for t in found[0]])
    torch.testing.assert_close(found[3], found[2])


# ------------------------------------------------------------------ between modules


RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda h: h.view(h.shape[0], 4),
    "view_as": lambda h: h.view_as(torch.empty(h.shape[0], 4)),
    "reshape": lambda h: h.reshape(-1, 4),
    "flatten": lambda h: h.flatten(1),
    "unflatten": lambda h: h.unflatten(1, (2, -1)).flatten(1),
    "unsqueeze, squeeze": lambda h: h.unsqueeze(1).squeeze(1).flatten(1),
    "squeeze all": lambda h: h.unsqueeze(-1).squeeze().flatten(1),
    "squeeze of several axes": lambda h: h[None, ..., None].squeeze((0, -1)).flatten(1),
    "none index": lambda h: h[:, None].flatten(1),
    "contiguous": lambda h: h.contiguous().flatten(1),
    "clone": lambda h: h.clone().flatten(1),
    "torch.flatten": lambda h: torch.flatten(h, start_dim=1),
    "two": lambda h: h.view(-1).view(-1, 1, 4).view(-1, 4),
}


class Reshaped(nn.Module):
    """A convolution and a linear layer with a reshape in between."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.conv, self.act, self.linear = nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Linear(4, 2)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.act(RESHAPES[self.name](self.conv(x))))


# torch 2.6 has a node for the slice of all samples in `h[:, None]`
OLD = () if hasattr(torch.autograd.graph, "contextvars") else ("none index",)


@pytest.mark.parametrize("name", [name for name in RESHAPES if name not in OLD])
def test_reshape_between_modules(name: str) -> None:
    model, X, y = Reshaped(name), torch.randn(N, 1, 3), torch.randint(2, (N,))
    run(model, *some(), extensions.HMP(), batch=(X, y))
    plain = copy.deepcopy(model)
    check_all(model, plain, nn.CrossEntropyLoss(), X, y)
    for p, block in zip(
        model.parameters(), oracle.hessian_blocks(plain, nn.CrossEntropyLoss(), X, y), strict=True
    ):
        torch.testing.assert_close(_product(p.hmp, p), block, **TOLERANCE)


class Keywords(nn.Module):
    """A model that calls its modules with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)

    def forward(self, *, x: Tensor) -> Tensor:
        return self.second(input=self.act(input=self.first(input=x)))


def test_keyword_arguments() -> None:
    model, (X, y) = extend(Keywords()), data()
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(*some()):
        lossfunc(target=y, input=model(x=X)).backward()
    plain = copy.deepcopy(model)
    wrapped = nn.Sequential(plain.first, plain.act, plain.second)
    check_all(model, wrapped, nn.CrossEntropyLoss(), X, y)


# ------------------------------------------------------------------ sharing


class Counts:
    """Counts calls of methods of all registered derivatives, by class and method."""

    METHODS = ("vjp", "reduced", "hessian_root", "drawn_hessian_root")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        for cls in {type(d) for d in REGISTRY.values()}:
            for method in self.METHODS:
                if hasattr(cls, method):
                    monkeypatch.setattr(cls, method, self._counted(getattr(cls, method), method))

    def _counted(self, original: Callable, method: str) -> Callable:
        def wrapper(derivatives: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[f"{type(derivatives).__name__}.{method}"] += 1
            return original(derivatives, *args, **kwargs)

        return wrapper

    def of(self, model: nn.Module, *exts: Any) -> dict[str, int]:
        self.counts.clear()
        run(model, *exts, batch=data())
        return dict(self.counts)


def test_extensions_share_one_propagation(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, model = Counts(monkeypatch), mlp()
    alone = counts.of(model, extensions.SqrtGGNExact())
    assert alone["LinearDerivatives.vjp"] == 1
    assert alone["SigmoidDerivatives.vjp"] == 1
    assert alone["LinearDerivatives.reduced"] == 4
    together = counts.of(
        model,
        extensions.DiagGGNExact(),
        extensions.KFLR(),
        extensions.SqrtGGNExact(),
        extensions.BatchDiagGGNExact(),
    )
    assert together["LinearDerivatives.vjp"] == 1
    assert together["SigmoidDerivatives.vjp"] == 1
    assert (
        together["CrossEntropyLossDerivatives.hessian_root"]
        == (alone["CrossEntropyLossDerivatives.hessian_root"])
    )
    assert together["LinearDerivatives.reduced"] == 4


def test_diagonals_take_no_columns_to_the_layer_they_arrive_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backpropagation.ResidualSource, "columns", None)
    exts = [extensions.DiagHessian(), extensions.BatchDiagHessian()]
    image = (torch.randn(N, 2, 5, 4), torch.randint(2, (N,)))
    conv = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(18, 2))
    for model, batch in ((mlp(), data()), (conv, image)):
        plain, lossfunc = copy.deepcopy(model), nn.CrossEntropyLoss()
        run(model, *exts, batch=batch)
        check(model, "diag_h", oracle.hessian_diag(plain, lossfunc, *batch))
        check(model, "diag_h_batch", oracle.batch_hessian_diag(plain, lossfunc, *batch))
        run(model, exts[1], batch=batch)
        check(model, "diag_h_batch", oracle.batch_hessian_diag(plain, lossfunc, *batch))


def test_diagonal_at_a_layer_without_entries() -> None:
    model = nn.Sequential(nn.Linear(0, 3, bias=False), nn.Sigmoid(), nn.Linear(3, 2))
    run(model, extensions.BatchDiagHessian(), batch=(torch.zeros(N, 0), torch.randint(2, (N,))))
    assert model[0].weight.diag_h_batch.shape == (N, 3, 0)


class Narrow(nn.Module):
    """A layer, and another one without outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(3, 2), nn.Linear(3, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.empty(x).sum(1, keepdim=True)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.Softmax(1)], ids=repr)
@pytest.mark.parametrize(
    "extension",
    [extensions.DiagGGNExact, extensions.DiagHessian, extensions.KFLR, extensions.KFRA],
    ids=lambda e: e.__name__,
)
def test_layer_without_outputs_in_the_middle(activation: nn.Module, extension: Any) -> None:
    """A bias behind it has the quantity of the loss, and the layer has an empty one."""
    model = nn.Sequential(nn.Linear(3, 0), activation, nn.utils.skip_init(nn.Linear, 0, 2))
    torch.nn.init.zeros_(model[2].bias)
    ext, hessian = extension(), torch.eye(2) / 2 - 0.25
    run(model, ext, batch=data())
    found = [getattr(p, ext.savefield) for p in model.parameters()]
    first, *_, last = [one if isinstance(one, Tensor) else one[0] for one in found]
    assert not first.numel()
    torch.testing.assert_close(last, hessian.diag() if last.dim() == 1 else hessian)


def test_layer_without_outputs() -> None:
    """The other one has the quantities that it has alone."""
    batch, v = data(), torch.randn(1, 2, 3)
    for converter in (False, True):
        model = extend(Narrow(), use_converter=converter)
        alone = copy.deepcopy(model.layer)
        exts: list[Any] = [extensions.BatchGrad()]
        exts += [extensions.GGNMP(), extensions.KFRA(), extensions.EKFAC()] if converter else []
        for network in (model, alone):
            torch.manual_seed(0)
            run(network, *exts, batch=batch)
        p, q, empty = model.layer.weight, alone.weight, model.empty.weight
        assert empty.grad_batch.shape == (N, 0, 3)
        torch.testing.assert_close(p.grad_batch, q.grad_batch)
        if converter:
            assert empty.ggnmp(torch.zeros(1, 0, 3)).shape == (1, 0, 3)
            torch.testing.assert_close(p.ggnmp(v), q.ggnmp(v))
            torch.testing.assert_close(p.kfra, q.kfra)
            torch.testing.assert_close(p.ekfac.dense(), q.ekfac.dense())


class Twice(nn.Linear):
    """A layer of a user, the derivative of which is no entry of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class TwiceDerivatives(LinearDerivatives):
    """Inherits everything else."""

    def _jac_t_mat_prod(self, *args: Any) -> Tensor:
        return 2 * super()._jac_t_mat_prod(*args)

    def affine(self, *args: Any) -> list[tuple[Tensor, Tensor | None]]:
        return [(2 * s, x) for s, x in super().affine(*args)]


def test_diagonal_at_a_rule_that_derives_from_another() -> None:
    register(Twice)(TwiceDerivatives)
    model = nn.Sequential(Twice(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    plain, batch = copy.deepcopy(model), data()
    run(model, extensions.DiagHessian(), batch=batch)
    check(model, "diag_h", oracle.hessian_diag(plain, nn.CrossEntropyLoss(), *batch))


class TwiceFactors(TwiceDerivatives):
    """Has Kronecker rows of its own, too."""

    def kronecker_rows(self, *args: Any, **options: Any) -> Tensor:
        return 2 * super().kronecker_rows(*args, **options)


class Thrice(nn.Conv1d):
    """Three times the bias."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return F.conv1d(x, self.weight) + 3 * self.bias.unsqueeze(1)


class ThriceDerivatives(ConvNDDerivatives):
    """Says so of the bias."""

    def _bias_jac_t_mat_prod(self, *args: Any) -> Tensor:
        return 3 * super()._bias_jac_t_mat_prod(*args)


class Sharper(nn.CrossEntropyLoss):
    """At half the temperature."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(2 * x, y)


class SharperDerivatives(CrossEntropyLossDerivatives):
    """Half the temperature for the exact factor, and factors of before there were thin ones."""

    def p(self, *args: Any) -> Tensor:
        return self.log_p(*args).exp()

    def log_p(self, c: Any) -> Tensor:
        return (2 * c.x).log_softmax(1)

    def _sqrt_hessian(self, *args: Any) -> Tensor:
        return 2 * super()._sqrt_hessian(*args)

    def _thin_factor(self, *args: Any) -> Tensor:
        return 2 * super()._thin_factor(*args)

    def _hessian_factor(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        columns, weights = super()._hessian_factor(*args)
        return 2 * columns, weights


def test_what_derives_from_a_rule_is_asked() -> None:
    """Shortcuts of this library's rules know nothing of what a user's rule changes."""
    register(Twice)(TwiceFactors)
    register(Thrice)(ThriceDerivatives)
    register(Sharper)(SharperDerivatives)
    layers = [nn.Unflatten(1, (1, 3)), Thrice(1, 2, 2), nn.Flatten(), Twice(4, 2)]
    model, (X, y) = nn.Sequential(*layers), data()
    plain, loss = copy.deepcopy(model), extend(Sharper())
    value = loss(extend(model)(X), y)
    exts = [extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()]
    with backpack(*exts, extensions.KFRA(), extensions.KFLR()):
        value.backward()
    check(model, "grad_batch", oracle.batch_grad(plain, Sharper(), X, y))
    check(model, "diag_ggn_exact", oracle.ggn_diag(plain, Sharper(), X, y))
    check(model, "diag_h", oracle.ggn_diag(plain, Sharper(), X, y))  # nothing else is curved
    for p in model[3].parameters():  # the last layer
        torch.testing.assert_close(p.kfra, p.kflr)


def test_kfra_of_a_layer_of_parameters() -> None:
    """Its rows are no samples."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.data, self.positions = nn.Linear(4, 4), nn.Linear(2, 4)
            self.embedding = nn.Parameter(torch.randn(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.data(x) + self.positions(self.embedding)

    net = nn.Sequential(Positions(), nn.Flatten(), nn.Linear(12, 3))
    model, loss = extend(net, use_converter=True), extend(nn.CrossEntropyLoss())
    with backpack(extensions.KFRA()):
        loss(model(torch.randn(6, 3, 4)), torch.randint(3, (6,))).backward()
    shapes = [[list(f.shape) for f in p.kfra] for p in net[0].positions.parameters()]
    assert shapes == [[[4, 4], [2, 2]], [[4, 4]]]


def test_unknown_parameter_on_batches_of_two_sizes() -> None:
    """What nobody extracts anything of, is no error; others have what they have."""

    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    shared, loss = Unknown(), extend(nn.CrossEntropyLoss())
    shared.layer.requires_grad_(False)
    heads = [extend(nn.Linear(4, 2)) for _ in range(2)]
    extend(shared)
    ext = extensions.BatchGrad()
    with pytest.warns(UserWarning, match="no rule"), backpack(ext):
        sum(
            loss(head(shared(torch.randn(n, 3))), torch.randint(2, (n,)))
            for head, n in zip(heads, (6, 4), strict=True)
        ).backward()
    assert [len(head.weight.grad_batch) for head in heads] == [6, 4]


def test_extensions_share_monte_carlo_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, model = Counts(monkeypatch), mlp()
    exts = [
        extensions.KFAC(mc_samples=2),
        extensions.DiagGGNMC(mc_samples=2),
        extensions.SqrtGGNMC(mc_samples=2),
    ]
    together = counts.of(model, *exts)
    assert together["LinearDerivatives.vjp"] == 1
    assert together["CrossEntropyLossDerivatives.drawn_hessian_root"] == 1
    for p in model.parameters():
        torch.testing.assert_close(p.diag_ggn_mc, p.sqrt_ggn_mc.square().sum((0, 1)))
    different = counts.of(model, extensions.KFAC(mc_samples=1), extensions.DiagGGNMC(mc_samples=2))
    assert different["LinearDerivatives.vjp"] == 2


def test_first_order_shares_individual_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch).of(
        mlp(),
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.SumGradSquared(),
        extensions.Variance(),
    )
    assert counts == {"LinearDerivatives.reduced": 4}


@pytest.mark.parametrize(
    "model",
    [
        lambda: mlp(),
        lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), mlp4()),
    ],
    ids=["linear", "convolution"],
)
def test_results_have_memory_of_their_own(model: Callable[[], nn.Module]) -> None:
    """What parameters of a module share is computed once, but whoever changes one changes one."""
    exts = [
        *(extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.SumGradSquared()),
        *(extensions.DiagGGNExact(), extensions.BatchDiagGGNExact(), extensions.DiagHessian()),
        *(extensions.KFAC(), extensions.KFLR(), extensions.KFRA()),
    ]
    net = model()
    run(net, *exts, batch=data())
    owners: dict[int, str] = {}
    for (name, p), ext in itertools.product(net.named_parameters(), exts):
        value = getattr(p, ext.savefield)
        for tensor in value if isinstance(value, list) else [value]:
            mine, key = f"{ext.savefield} of {name}", tensor.untyped_storage().data_ptr()
            assert owners.setdefault(key, mine) == mine


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (extensions.BatchL2Grad, "square_norm"),
        (extensions.BatchDiagGGNExact, "batch_square"),
        (extensions.KFLR, "gram"),
    ],
)
@pytest.mark.parametrize("first", ["weight", "bias"])
def test_extensions_may_change_what_they_take(
    base: type[extensions.BackpropExtension], name: str, first: str
) -> None:
    class Doubled(base):  # type: ignore[misc, valid-type]
        def extract(self, products: Products) -> Tensor:
            return products.take(name).mul_(2)

    model = mlp()
    for layer in (model[0], model[2]):  # in which order they ask
        for each in ("weight", "bias"):
            if each != first:
                layer._parameters[each] = layer._parameters.pop(each)
    X, y = data()
    run(model, base(), batch=(X, y))
    field = base().savefield
    plain = [p[0] if isinstance(p, list) else p for p in values(model, field)]
    run(model, Doubled(), batch=(X, y))
    torch.testing.assert_close(values(model, field), [2 * value for value in plain])


def mlp4() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def test_different_subsampling_is_not_shared() -> None:
    model, (X, y) = mlp(), data()
    run(
        model,
        extensions.DiagGGNExact(subsampling=[1]),
        extensions.BatchDiagGGNExact(),
        batch=(X, y),
    )
    for p in model.parameters():
        torch.testing.assert_close(p.diag_ggn_exact, p.diag_ggn_exact_batch[1])
    check(
        model,
        "diag_ggn_exact_batch",
        oracle.batch_ggn_diag(copy.deepcopy(model), nn.CrossEntropyLoss(), X, y),
    )


# ------------------------------------------------------------------ results


def test_savefields_are_overwritten() -> None:
    model, exts = extend(mlp()), [*some(), extensions.KFLR()]
    run(model, *exts, batch=data())
    old = [{e.savefield: getattr(p, e.savefield) for e in exts} for p in model.parameters()]
    kept = copy.deepcopy(old)
    batch = data()
    run(model, *exts, batch=batch)
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)
    for one, other in zip(old, kept, strict=True):
        for field in one:
            assert torch.equal(one[field][0], other[field][0])  # the old results did not change


def test_results_may_be_changed_in_place() -> None:
    model, batch = mlp(), data()
    exts = [*some(), extensions.SumGradSquared(), extensions.Variance(), extensions.KFLR()]
    run(model, *exts, batch=batch)
    for p in model.parameters():
        others = [p.grad.clone(), p.detach().clone(), p.variance.clone(), p.diag_h.clone()]
        for value in (p.grad_batch, p.diag_ggn_exact, p.sum_grad_squared, *p.kflr):
            value.fill_(7.0)
        for now, before in zip([p.grad, p, p.variance, p.diag_h], others, strict=True):
            assert torch.equal(now, before)


def test_batch_of_one_is_not_an_alias() -> None:
    model = nn.Linear(3, 2)
    run(model, extensions.BatchGrad(), batch=(torch.rand(1, 3), torch.tensor([1])))
    model.bias.grad_batch.fill_(7.0)
    model.weight.grad_batch.fill_(7.0)
    assert not (model.bias.grad == 7).any() and not (model.weight.grad == 7).any()


def test_gradient_accumulates_as_ever() -> None:
    model, batch = extend(mlp()), data()
    run(model, *some(), batch=batch)
    once = [p.grad.clone() for p in model.parameters()]
    run(model, *some(), batch=batch)
    for p, g in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)
        torch.testing.assert_close(p.grad_batch.sum(0), g)


# ------------------------------------------------------------------ precision, layout, shapes


@pytest.mark.parametrize(
    "activation",
    [nn.LeakyReLU, nn.ELU, nn.SELU, nn.LogSigmoid, nn.Sigmoid, nn.Tanh, nn.ReLU],
    ids=lambda c: c.__name__,
)
def test_double_model_under_default_float(activation: Callable[..., nn.Module]) -> None:
    torch.set_default_dtype(torch.float32)
    model = mlp(activation).double()
    X, y = torch.randn(N, 3).double(), torch.randint(2, (N,))
    exts = [*some(), extensions.KFLR(), extensions.KFRA(), extensions.SqrtGGNExact()]
    run(model, *exts, extensions.DiagGGNMC(), extensions.HMP(), batch=(X, y))
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)
    for p in model.parameters():
        for factor in (*p.kflr, *p.kfra, p.sqrt_ggn_exact, p.diag_ggn_mc):
            assert factor.dtype == torch.float64
        assert p.hmp(torch.rand_like(p)[None]).dtype == torch.float64


@pytest.mark.parametrize("lossfunc", [nn.MSELoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss])
def test_bfloat16(lossfunc: Callable[[], nn.Module]) -> None:
    model, X, y = mlp(), torch.randn(N, 3), torch.rand(N, 2).softmax(1)
    rough = copy.deepcopy(model).bfloat16()
    exts = [*some(), extensions.KFLR(), extensions.DiagGGNMC(), extensions.Variance()]
    for net, dtype in ((model, torch.float64), (rough, torch.bfloat16)):
        loss = extend(lossfunc())(extend(net)(X.to(dtype)), y.to(dtype))
        with backpack(*exts):
            loss.backward()
    for p, q in zip(model.parameters(), rough.parameters(), strict=True):
        assert q.diag_ggn_mc.dtype == q.kflr[0].dtype == torch.bfloat16
        for field in ("grad_batch", "diag_ggn_exact"):
            exact, approximate = getattr(p, field), getattr(q, field)
            assert approximate.dtype == torch.bfloat16
            assert (exact - approximate.double()).norm() <= 0.05 * exact.norm()  # 8 bits


def test_sums_over_slices_in_bfloat16() -> None:
    """Those of matrices for each axis, too, go on growing where a slice is small beside them."""

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(50, 50))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    torch.manual_seed(0)
    model = nn.Sequential(Scaling(), nn.Flatten(), nn.Linear(2500, 1))
    nn.init.ones_(model[2].weight)
    rough, X, y, found = (
        copy.deepcopy(model).bfloat16(),
        torch.ones(600, 50, 50),
        torch.zeros(600, 1),
        [],
    )
    for net, dtype in ((model, torch.float64), (rough, torch.bfloat16)):
        loss = extend(nn.MSELoss(reduction="sum"))(extend(net)(X.to(dtype)), y.to(dtype))
        with backpack(extensions.KFLR()), slice_bytes(1):
            loss.backward()
        found.append([factor.double() for factor in net[0].weight.kflr])
    for exact, approximate in zip(*found, strict=True):
        assert (exact - approximate).norm() <= 0.02 * exact.norm()


def test_inputs_that_are_not_contiguous() -> None:
    model, X, y = mlp(), torch.randn(3, 2 * N).t()[::2], torch.randint(2, (N,))
    assert not X.is_contiguous()
    run(model, *some(), batch=(X, y))
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)


def test_expanded_input() -> None:
    model, X, y = mlp(), torch.randn(1, 3).expand(N, 3), torch.randint(2, (N,))
    run(model, *some(), batch=(X, y))
    check_all(model, copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)


@pytest.mark.parametrize("weights_too", [False, True])
def test_channels_last(weights_too: bool) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 2, 2), nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2)
    )
    X, y = torch.randn(N, 3, 5, 5).to(memory_format=torch.channels_last), torch.randint(2, (N,))
    if weights_too:
        model.to(memory_format=torch.channels_last)
    run(model, *some(), extensions.KFLR(), batch=(X, y))
    plain = copy.deepcopy(model)
    check_all(model, plain, nn.CrossEntropyLoss(), X, y)
    for p, factors in zip(
        model.parameters(), oracle.kflr(plain, nn.CrossEntropyLoss(), X, y), strict=True
    ):
        for mine, truth in zip(p.kflr, factors, strict=True):
            torch.testing.assert_close(mine, truth, **TOLERANCE)


def test_batch_of_one() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2))
    X, y = torch.randn(1, 1, 3, 3), torch.randint(2, (1,))
    run(model, *some(), extensions.Variance(), batch=(X, y))
    plain = copy.deepcopy(model)
    check_all(model, plain, nn.CrossEntropyLoss(), X, y)
    for p in model.parameters():
        torch.testing.assert_close(p.variance, torch.zeros_like(p), atol=1e-15, rtol=0)


@pytest.mark.parametrize("axes", [(5,), (2, 5)])
def test_linear_with_extra_axes(axes: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    X, y = torch.randn(N, *axes, 3), torch.randn(N, *axes, 2)
    loss = extend(nn.MSELoss())(extend(model)(X), y)
    with backpack(*some(), extensions.BatchL2Grad()):
        loss.backward()
    plain = copy.deepcopy(model)
    check_all(model, plain, nn.MSELoss(), X, y)
    check(model, "batch_l2", oracle.batch_l2(plain, nn.MSELoss(), X, y))


# ------------------------------------------------------------------ fewer columns


@pytest.mark.parametrize("shape", [(4, 5), (4, 1), (3, 4, 2), (2, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}, {"reduction": "sum"}], ids=str)
def test_thin_factor(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """The loss Hessian from one column less, also where probabilities vanish."""
    lossfunc = extend(nn.CrossEntropyLoss(**options))
    x = torch.randn(shape, dtype=torch.float64)
    x[0, :-1] -= 1e4  # p is 0 for these classes, to machine precision
    x.requires_grad_()
    y = torch.randint(shape[1], (shape[0], *shape[2:]))
    loss = lossfunc(x, y)
    hessian = LossHessian(seen(lossfunc).call)
    whole, thin = hessian.root(), hessian.root(thin=True)
    positions = math.prod(shape[2:])
    assert len(whole) == shape[1] * positions
    assert len(thin) == max(1, shape[1] - 1) * positions
    products = [torch.einsum("vnc,vnd->ncd", s.flatten(2), s.flatten(2)) for s in (thin, whole)]
    torch.testing.assert_close(*products, **TOLERANCE)
    assert torch.isfinite(torch.autograd.grad(thin.square().sum(), x)[0]).all()
    del loss


@pytest.mark.parametrize("name", ["DiagGGNExact", "BatchDiagGGNExact", "KFLR"])
def test_many_columns_use_thin_factors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One column less gives the same; in short backpropagation it would not pay."""
    columns: list[int] = []
    original = LossSource.num_columns

    def counted(source: LossSource, rows: Any) -> int:
        columns.append(original(source, rows))
        return columns[-1]

    monkeypatch.setattr(LossSource, "num_columns", counted)
    found = []
    for limit in (0, 2**60):
        monkeypatch.setattr(propagations, "MANY_COLUMNS", limit)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 4)).double()
        loss = extend(nn.CrossEntropyLoss())(
            extend(model)(torch.randn(3, 5).double()), torch.arange(3)
        )
        ext = getattr(extensions, name)()
        with backpack(ext):
            loss.backward()
        found.append([getattr(p, ext.savefield) for p in model.parameters()])
    assert columns == [3, 4]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_parameters_that_share_squares(frozen: str) -> None:
    """Weight and bias have what each has alone, in first and in second order."""
    names = ["BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "BatchDiagGGNExact"]
    exts = [*(getattr(extensions, name)() for name in names), extensions.DiagHessian()]

    def run(part: str | None) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 4)).double()
        for p_name, p in model.named_parameters():
            p.requires_grad_(part is None or part not in p_name)
        X = torch.randn(3, 5).double()
        loss = extend(nn.CrossEntropyLoss())(extend(model)(X), torch.arange(3))
        with backpack(*exts):
            loss.backward()
        return model

    alone, together = run(frozen), run(None)
    for own, p in zip(alone.parameters(), together.parameters(), strict=True):
        for ext in exts if own.requires_grad else ():
            torch.testing.assert_close(getattr(own, ext.savefield), getattr(p, ext.savefield))
            assert getattr(p, ext.savefield)._base is None


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many columns were replaced by fewer ones, each time."""
    numbers: list[int] = []
    original = Factor.reduced

    def counted(factor: Factor) -> Factor:
        numbers.append(len(factor.mat))
        return original(factor)

    monkeypatch.setattr(Factor, "reduced", counted)
    return numbers


def test_wide_factors_become_narrow(reduced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """More columns than a sample has entries are replaced, unless somebody wants the columns."""
    monkeypatch.setattr(backpropagation, "SLOWER", 0)
    monkeypatch.setattr(propagations, "MANY_COLUMNS", 0)
    layers = [nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 2), nn.Sigmoid(), nn.Linear(2, 9)]
    model, batch = nn.Sequential(*layers).double(), (torch.randn(4, 5).double(), torch.arange(4))
    narrow = [
        extensions.DiagGGNExact(),
        extensions.BatchDiagGGNExact(),
        extensions.KFLR(),
        extensions.KFLR(approximation="expand"),
    ]
    for ext in narrow:
        reduced.clear()
        run(model, ext, batch=batch)
        assert reduced == [8]
        found = values(model, ext.savefield)
        run(model, ext, extensions.SqrtGGNExact(), batch=batch)
        assert reduced == [8]  # the columns are wanted
        torch.testing.assert_close(found, values(model, ext.savefield), **TOLERANCE)


@pytest.mark.parametrize(("width", "pays"), [(2, False), (64, True)])
def test_narrow_factors_have_to_pay(width: int, pays: bool, reduced: list[int]) -> None:
    """The triangles of a bottleneck take longer than what they save in a small network."""
    layers = [nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, 2), nn.Tanh(), nn.Linear(2, 40)).double()
    batch, ext = (torch.randn(3, 5).double(), torch.arange(3)), extensions.DiagGGNExact()
    run(model, ext, batch=batch)
    assert bool(reduced) is pays
    found = values(model, ext.savefield)
    run(model, ext, extensions.SqrtGGNExact(), batch=batch)
    torch.testing.assert_close(found, values(model, ext.savefield), **TOLERANCE)


def test_wide_factors_become_narrow_before_they_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that are split can not be replaced, and are many."""
    travelling: list[int] = []
    wide: list[weakref.ref[Factor]] = []
    original, reduced = ConvNDDerivatives.vjp, Factor.reduced

    def counted(self: Any, c: Context, v: Tensor) -> Tensor:
        travelling.append(len(v))
        assert all(ref() is None for ref in wide)  # what was replaced is freed
        return original(self, c, v)

    def noted(factor: Factor) -> Factor:
        wide.append(weakref.ref(factor))
        return reduced(factor)

    monkeypatch.setattr(backpropagation, "SLOWER", 0)
    monkeypatch.setattr(ConvNDDerivatives, "vjp", counted)
    monkeypatch.setattr(Factor, "reduced", noted)
    monkeypatch.setattr(propagations, "MANY_COLUMNS", 0)
    convolutions = [nn.Conv2d(1, 2, 1), nn.Sigmoid(), nn.Conv2d(2, 2, 1)]
    layers = [*convolutions, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(2, 9)]
    model = nn.Sequential(*layers).double()
    batch, ext = (torch.randn(3, 1, 4, 4).double(), torch.arange(3)), extensions.DiagGGNExact()
    run(model, extensions.SqrtGGNExact(), batch=batch)
    truth = [root.square().sum((0, 1)) for root in values(model, "sqrt_ggn_exact")]
    travelling.clear()
    # room for the 8 columns of a sample at the loss (72 bytes each), not in front of the pooling
    with slice_bytes(1024):
        run(model, ext, batch=batch)
    assert travelling == [2, 2, 2]
    assert len(wide) == 3
    torch.testing.assert_close(values(model, ext.savefield), truth, **TOLERANCE)


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar tells how far a long pass is, if it is asked for, and tqdm is installed."""
    shown: dict[str, int] = {}

    class Bars:
        @staticmethod
        def tqdm(items: Any, desc: str, **options: Any) -> Any:
            assert options == {"leave": False, "delay": 1, "disable": None}
            shown[desc] = len(items)
            return items

    monkeypatch.setitem(sys.modules, "tqdm", Bars)
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(3, 2), nn.Sigmoid(), nn.Linear(2, 4))).double()
    lossfunc, X, y = extend(nn.CrossEntropyLoss()), torch.randn(6, 3).double(), torch.arange(6) % 4

    def diagonals(**options: Any) -> list[Tensor]:
        with slice_bytes(1), backpack(extensions.DiagHessian(), **options):
            lossfunc(model(X), y).backward()
        return [p.diag_h for p in model.parameters()]

    expected = diagonals()
    assert not shown
    torch.testing.assert_close(diagonals(progress=True), expected)
    # the loss and the sigmoid; of the latter a slice for each sample's only column or more
    assert shown["diag_h: sources"] == 2
    assert shown["diag_h: slices"] >= 6
    shown.clear()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    torch.testing.assert_close(diagonals(progress=True), expected)


@pytest.mark.parametrize("limit", [1, 200, 3000])
def test_slices_of_samples_and_columns(limit: int) -> None:
    """Whatever the size of a slice, the result is that of everything at once."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 3)]
    model, batch = (
        nn.Sequential(*layers).double(),
        (torch.randn(5, 1, 4, 4).double(), torch.arange(5) % 3),
    )
    exts = [
        extensions.SqrtGGNExact(),
        extensions.DiagGGNExact(subsampling=[0, 3, 4]),
        extensions.BatchDiagGGNExact(),
        extensions.KFLR(),
        extensions.DiagHessian(),
        extensions.BatchDiagHessian(),
    ]
    found = []
    for size in (2**40, limit):
        with slice_bytes(size):
            run(model, *exts, batch=batch)
        found.append([values(model, ext.savefield) for ext in exts])
    torch.testing.assert_close(*found, **TOLERANCE)


@pytest.mark.parametrize("limit", [64, 200, None])
@pytest.mark.parametrize("negative", range(3))
def test_slices_of_hessians_whose_losses_have_signs(negative: int, limit: int | None) -> None:
    """Whatever the sign of the first sample's weight, all samples have as many columns."""
    weight = torch.tensor([2.0, 1.0, 3.0, 1.0]) * torch.tensor(
        [-1 if i == negative else 1 for i in range(4)]
    )
    lossfunc = nn.CrossEntropyLoss(weight, reduction="sum")
    model, X, y = (
        nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 4)),
        torch.randn(N, 3),
        torch.arange(N),
    )
    expected = oracle.hessian_diag(model, lossfunc, X, y)
    with slice_bytes(limit), backpack(extensions.DiagHessian(), extensions.BatchDiagHessian()):
        extend(lossfunc)(extend(model)(X), y).backward()
    check(model, "diag_h", expected)
    torch.testing.assert_close(
        [v.sum(0) for v in values(model, "diag_h_batch")], expected, **TOLERANCE
    )


@pytest.mark.parametrize("limit", [64, None])
@pytest.mark.parametrize(
    ("shape", "lossfunc"),
    [
        ((-1, 3), nn.MSELoss()),
        ((-1, 3), nn.CrossEntropyLoss()),
        ((-1,), nn.BCEWithLogitsLoss()),
        ((N, 2, 3), nn.MSELoss()),
        ((N, 3, 2), nn.CrossEntropyLoss()),
    ],
    ids=str,
)
def test_slices_of_losses_that_read_a_view(
    shape: tuple[int, ...], lossfunc: nn.Module, limit: int | None
) -> None:
    """The factor of the layer before is of its rows, and not of those of the loss."""
    model, X = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 6)), torch.randn(N, 3)
    f = model(X).detach()
    is_class = isinstance(lossfunc, nn.CrossEntropyLoss)
    y = f.view(shape).argmin(1) if is_class else torch.rand_like(f.view(shape))
    H = torch.autograd.functional.hessian(lambda f: lossfunc(f.view(shape), y), f)
    expected = torch.einsum("npnq->pq", H)
    with slice_bytes(limit), backpack(extensions.KFLR()):
        extend(lossfunc)(extend(model)(X).view(shape), y).backward()
    torch.testing.assert_close(model[2].weight.kflr[0], expected, **TOLERANCE)
    torch.testing.assert_close(model[2].bias.kflr[0], expected, **TOLERANCE)


def test_averaged_hessian_of_predictions_with_one_axis() -> None:
    model, X, y = nn.Sequential(nn.Linear(3, 1)), torch.randn(N, 3), torch.rand(N)
    with backpack(extensions.KFRA()):
        extend(nn.BCEWithLogitsLoss())(extend(model)(X).squeeze(-1), y).backward()
    p = model(X).sigmoid()
    torch.testing.assert_close(model[0].bias.kfra[0], (p - p.square()).mean(0)[None], **TOLERANCE)


def test_kronecker_factors_of_two_losses_in_slices() -> None:
    """A slice has a gram of its own, also of a parameter whose other use is elsewhere."""
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    batches, found = [data(), data()], []
    for size in (2**40, 1):
        exts = [extensions.KFLR(), extensions.KFLR(approximation="expand")]
        exts[1].savefield = "expanded"
        loss = sum(lossfunc(model(X), y) for X, y in batches)
        with slice_bytes(size), backpack(*exts):
            loss.backward()
        found.append([values(model, ext.savefield) for ext in exts])
    torch.testing.assert_close(*found, **TOLERANCE)


class WithUnused(nn.Linear):
    """A linear layer with a parameter that the forward pass does not use."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.unused = nn.Parameter(torch.rand(2))


def container_with_unused() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_parameter("unused", nn.Parameter(torch.rand(2)))
    return model


@pytest.mark.parametrize("make", [WithUnused, container_with_unused])
@pytest.mark.parametrize("exts", HOOK_EXTS, ids=len)
def test_unused_parameters_have_no_quantities(
    make: Callable[[], nn.Module], exts: list[Any]
) -> None:
    model = make()
    run(model, *exts, batch=data())
    for name, p in model.named_parameters():
        assert all(hasattr(p, ext.savefield) == (name != "unused") for ext in exts)


def test_error_of_an_extension_leaves_the_module_alone() -> None:
    class Failing(extensions.DiagGGNExact):
        def extract(self, products: Any) -> Tensor:
            raise ZeroDivisionError

    model = mlp()
    before = [set(vars(m)) for m in extend(model).modules()]
    with pytest.raises(ZeroDivisionError):
        run(model, Failing(), batch=data())
    assert [set(vars(m)) for m in model.modules()] == before


@pytest.mark.parametrize("exts", HOOK_EXTS, ids=len)
def test_hooks_run_without_autocast(exts: list[Any]) -> None:
    """What a hook makes of the quantities has their precision."""
    model, (X, y), found = extend(mlp()), data(), []
    loss = extend(nn.CrossEntropyLoss())(model(X), y)

    def hook(module: nn.Module) -> None:
        found.append(torch.is_autocast_enabled("cpu"))

    with torch.autocast("cpu"), backpack(*exts, extension_hook=hook):
        loss.backward()
    assert found and not any(found)


def test_extension_hook_alone_needs_nothing_of_a_call() -> None:
    """Without extensions, nothing is computed: a changed input does not matter, as in torch."""
    layer = extend(nn.Linear(3, 2))
    layer.weight.requires_grad_(False)
    x = torch.rand(4, 3)
    loss = layer(x).sum()
    x.mul_(2)
    seen: list[nn.Module] = []
    with backpack(extension_hook=seen.append):
        loss.backward()
    assert seen == [layer]


class Halved(nn.Module):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x /= 2
        return x


def test_output_with_three_axes_that_changes_in_place() -> None:
    """It is a view of a product: gradients go past the node of the view."""
    model = nn.Sequential(nn.Linear(3, 3), Halved(), nn.Flatten(), nn.Linear(6, 2))
    X, y = torch.randn(N, 2, 3), torch.randint(2, (N,))
    expected = oracle.batch_grad(copy.deepcopy(model), F.cross_entropy, X, y)
    extend(model)
    with backpack(extensions.BatchGrad()):
        F.cross_entropy(model(X), y).backward()
    for mine, truth in zip(values(model, "grad_batch"), expected, strict=True):
        torch.testing.assert_close(mine, truth, **TOLERANCE)


class Bent(nn.Module):
    """A parameter that enters nonlinearly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight.exp()).tanh()


@pytest.mark.parametrize("slices", [2**24, 1])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.BatchNorm1d(4), Bent])
@pytest.mark.filterwarnings("ignore:No rule")
def test_hessian_of_reused_parameters_in_a_network_that_mixes_samples(
    make: Callable[[], nn.Module], slices: int
) -> None:
    torch.manual_seed(0)
    twice, norm = make(), nn.BatchNorm1d(4)
    layers = nn.Linear(3, 4), twice, norm, nn.Tanh(), twice, nn.BatchNorm1d(4), nn.Linear(4, 2)
    model, lossfunc = nn.Sequential(*layers).double(), nn.CrossEntropyLoss()
    X, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))
    blocks = oracle.hessian_blocks(copy.deepcopy(model), lossfunc, X, y)
    with slice_bytes(slices), backpack(extensions.HMP(), extensions.DiagHessian()):
        extend(lossfunc)(extend(model)(X), y).backward()
    for p, block in zip(model.parameters(), blocks, strict=True):
        eye = torch.eye(len(block), dtype=block.dtype).reshape(-1, *p.shape)
        torch.testing.assert_close(p.hmp(eye).flatten(1), block)
        torch.testing.assert_close(p.diag_h.flatten(), block.diagonal())


def test_hessian_of_some_samples_of_a_network_that_mixes_them_is_refused() -> None:
    """The gradients that second derivatives are multiplied with are those of the whole batch."""
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)
    model, lossfunc = extend(nn.Sequential(*layers)), extend(nn.CrossEntropyLoss())
    X, y = torch.rand(6, 3), torch.randint(2, (6,))
    expected = pytest.raises(NotImplementedError, match="Use DiagHessian without subsampling")
    with expected, backpack(extensions.DiagHessian(subsampling=[0, 2])):
        lossfunc(model(X), y).backward()


def _doubles(grad: Tensor) -> None:
    grad.mul_(2)


@pytest.mark.parametrize(
    ("hook", "changes"),
    [
        (lambda grad: 2 * grad, True),
        (_doubles, True),
        (lambda grad: None, False),
        (Tensor.clone, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("is_retained", [False, True])
def test_hooks_of_tensors(
    hook: Callable[[Tensor], Tensor | None] | None, changes: bool, is_retained: bool
) -> None:
    """Second order does not go through hooks that change gradients, and says so."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if hook is not None:
                h.register_hook(hook)
            return self.last(torch.tanh(h) + h)

    model, lossfunc = extend(Network(), use_converter=True), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2))
    for retained in (True, False) if is_retained else (False,):
        with backpack(extensions.DiagGGNExact()):
            said = pytest.warns(UserWarning, match=r"gradient of what .* reads")
            with said if changes else nullcontext():
                loss.backward(retain_graph=retained)
    if changes:
        loss = lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2))
        with backpack(extensions.BatchGrad()):
            model.zero_grad()
            loss.backward()
        for p in model.parameters():
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@pytest.mark.parametrize("features", [4, 2**13])  # of which the record keeps no copy
@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("on", ["output", "view"])
def test_hooks_of_tensors_that_are_viewed(on: str, is_changed: bool, features: int) -> None:
    """The gradient of one of several views is not that of the output."""
    first, last, beside = nn.Linear(3, features), nn.Linear(features, 2), nn.Linear(features, 2)
    model, lossfunc = map(extend, (nn.ModuleList([first, nn.ReLU(), last, beside]), nn.MSELoss()))
    model.append(extend(SumModule()))
    h = first(torch.rand(9, 3))
    view = h.view(-1, features)
    (h if on == "output" else view).register_hook(lambda g: 2 * g if is_changed else None)
    z = model[4](last(model[1](view)), beside(h.view(9, features)))
    expected = pytest.warns(UserWarning, match="changed the gradient of what")
    with expected if is_changed else nullcontext(), backpack(extensions.DiagGGNMC()):
        lossfunc(z, torch.rand(9, 2)).backward()
    assert len((h if on == "output" else view)._backward_hooks) == 1


@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("overwrites", [False, True])
def test_hooks_of_tensors_that_nobody_has_at_hand(overwrites: bool, is_changed: bool) -> None:
    """Where a Hessian reads gradients, they are compared with what the calls behind have sent.

    What is viewed twice, or overwritten, is no tensor that a call has read.
    """
    model, lossfunc = extend(nn.Linear(3, 4)), extend(nn.CrossEntropyLoss())
    h = model(torch.rand(6, 3) if overwrites else torch.rand(6, 1, 3))
    h.register_hook(lambda g: 2 * g if is_changed else None)
    h = extend(nn.ELU(inplace=True))(h) if overwrites else h.view(6, 4)
    loss = lossfunc(h, torch.randint(4, (6,)))
    expected = pytest.warns(UserWarning, match="gradient of what .*Linear.* has returned")
    with expected if is_changed else nullcontext(), backpack(extensions.DiagHessian()):
        loss.backward()


@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("before", ["view", "cancelling"])
def test_hooks_of_tensors_without_samples(before: str, is_changed: bool) -> None:
    """Autograd has summed the gradient of a table over the samples that read a view of it."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Parameter(torch.rand(4, 3)), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            table = self.table * 2
            table.register_hook(lambda g: 2 * g if is_changed else None)
            x = x + table[None]
            # a softmax does not change if all entries do: what the gradients sum up to is rounding
            return self.last(x).mean(1) if before == "view" else x.mean(2).softmax(1)

    model = extend(Positions(), use_converter="record")
    lossfunc = extend(nn.CrossEntropyLoss())
    z = model(torch.rand(6, 4, 3))
    loss = lossfunc(z, torch.randint(z.shape[1], (6,)))
    warned = pytest.warns(UserWarning, match="gradient of what .*ScaleModule.* has returned")
    # the gradient of each sample would be needed behind the hook, which sees their sum
    refused = pytest.raises(ValueError, match="cannot be told apart")
    expected = (warned, refused) if is_changed else (nullcontext(), nullcontext())
    with expected[0], expected[1], backpack(extensions.DiagHessian()):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("scale", [1e-5, 1e-7, 2.0**64])
def test_gradients_out_of_range_are_not_changed_ones(
    scale: float, autocasts: bool, dtype: torch.dtype
) -> None:
    """What overflows or underflows comes out otherwise in autograd than in rules: no hook did it.

    A gradient scaler tries with large scales first.
    """
    layers = [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)]
    model, lossfunc = extend(nn.Sequential(*layers).to(dtype)), extend(nn.CrossEntropyLoss())
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocasts):
        loss = lossfunc(model(torch.randn(4, 2, 6, 6, dtype=dtype)), torch.arange(4) % 3)
    with warnings.catch_warnings(), backpack(extensions.DiagHessian()):
        warnings.simplefilter("error")
        (scale * loss).backward()


@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("name", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("features", [4, 2**13])
def test_backward_hooks_of_modules(features: int, name: str, is_changed: bool) -> None:
    """As those of tensors: second order does not go through them, and says so."""

    def hook(module: nn.Module, *grads: Any) -> Any:
        return (2 * grads[0][0],) if is_changed else None

    model = nn.Sequential(nn.Linear(3, features), nn.Tanh(), nn.Linear(features, 2))
    getattr(model[1], name)(hook)
    lossfunc = extend(nn.MSELoss())
    loss = lossfunc(extend(model)(torch.rand(9, 3)), torch.rand(9, 2))
    expected = pytest.warns(UserWarning, match="changed the gradient of what")
    for _ in range(2):
        with expected if is_changed else nullcontext(), backpack(extensions.DiagGGNMC()):
            loss.backward(retain_graph=True)

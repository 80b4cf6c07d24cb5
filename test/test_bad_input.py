"""Bad input gets a clear error (or warning), and leaves nothing half-written."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import CTX, backpack, disable, extend, extensions, quantities
from backpack.context import STATE, Configuration
from backpack.core.engine.backward_pass import BackwardPass
from backpack.core.record.registry import REGISTRY
from backpack.custom_module.branching import SumModule
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.optim import DPSGD

N = 4
FIRST = [extensions.BatchGrad, extensions.BatchL2Grad, extensions.SumGradSquared]
FIRST += [extensions.Variance]
SECOND = [
    extensions.DiagGGNExact,
    extensions.BatchDiagGGNExact,
    extensions.SqrtGGNExact,
    extensions.DiagGGNMC,
    extensions.BatchDiagGGNMC,
    extensions.SqrtGGNMC,
    extensions.KFAC,
    extensions.KFLR,
    extensions.KFRA,
    extensions.DiagHessian,
    extensions.BatchDiagHessian,
    extensions.GGNMP,
    extensions.HMP,
    extensions.PCHMP,
]
ALL = FIRST + SECOND


def each(exts: list[Any]) -> Any:
    return pytest.mark.parametrize("ext", exts, ids=lambda ext: ext.__name__)


pytestmark = pytest.mark.usefixtures("double_precision")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 3), torch.randint(2, (N,))


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return extend(nn.CrossEntropyLoss())(extend(model)(batch[0]), batch[1])


def assert_clean(*models: nn.Module) -> None:
    """Check that a failed backward pass left no traces, and that a good one works."""
    for model in models:
        assert not any(vars(p) for p in model.parameters())
        assert not any({"input0", "output"} & set(vars(m)) for m in model.modules())
    assert CTX.configuration == Configuration()
    assert not BackwardPass._running and STATE.get().entry is None
    assert disable.should_store_io()
    check_works(mlp())


def check_works(model: nn.Module) -> None:
    batch = data()
    for p in model.parameters():
        p.grad = None
    loss = forward(model, batch)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()):
        loss.backward()
    problem = copy.deepcopy(model), nn.CrossEntropyLoss(), *batch
    for field, truth in (
        ("grad_batch", oracle.batch_grad(*problem)),
        ("diag_ggn_exact", oracle.ggn_diag(*problem)),
        ("diag_h", oracle.hessian_diag(*problem)),
        ("grad", oracle.grad(*problem)),
    ):
        for p, value in zip(oracle.trainable(model), truth, strict=True):
            torch.testing.assert_close(getattr(p, field), value)


# ------------------------------------------------------------------ arguments


@each(ALL)
def test_class_instead_of_instance(ext: Any) -> None:
    with pytest.raises(ValueError, match=rf"instances.*{ext.__name__}\(\)"):
        backpack(ext)
    with pytest.raises(ValueError, match=rf"{ext.__name__}\(\)"):
        backpack(extensions.BatchGrad(), ext)


def test_message_about_a_class_is_short() -> None:
    with pytest.raises(ValueError) as caught:
        backpack(extensions.BatchGrad)  # type: ignore[arg-type]
    told = "backpack expects instances of extensions, got the class BatchGrad. Did you mean "
    assert str(caught.value) == told + "BatchGrad()?"


@pytest.mark.parametrize(
    ("name", "optimiser"),
    [
        ("KFAC", r"KFAC"),
        ("EKFAC", r"KFAC\(\.\.\., ekfac=True\)"),
        ("DiagGGNExact", "DiagGGN"),
        ("DiagGGNMC", "DiagGGN"),
    ],
)
def test_extension_in_the_place_of_an_optimiser(name: str, optimiser: str) -> None:
    model = mlp()
    with pytest.raises(
        TypeError, match=rf"{name} of .*optimiser is backpack\.optim\.{optimiser}\.$"
    ):
        getattr(extensions, name)(model.parameters(), lr=0.1)


@pytest.mark.parametrize("thing", [1, "BatchGrad", None, nn.Linear(1, 1), [extensions.BatchGrad()]])
def test_something_else_instead_of_an_extension(thing: Any) -> None:
    with pytest.raises(ValueError, match="instances"):
        backpack(thing)
    assert_clean()


def test_something_else_instead_of_a_hook() -> None:
    with pytest.raises(TypeError, match="a function that is called with modules, got 3"):
        backpack(extensions.BatchGrad(), extension_hook=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("thing", [nn.Linear, F.relu, torch.rand(1), None])
def test_extend_something_else(thing: Any) -> None:
    with pytest.raises(TypeError, match="Module"):
        extend(thing)


def test_extend_model_and_loss_at_once() -> None:
    model = mlp()
    with pytest.raises(TypeError, match=r"Sequential and MSELoss.*extend\(model\), extend\("):
        extend(*[model, nn.MSELoss()])
    assert not hasattr(model, "_backpack_extend")


def test_second_module_extension() -> None:
    ext = extensions.BatchGrad()
    with pytest.raises(ValueError, match=r"Linear.*overwrite"):
        ext.set_module_extension(nn.Linear, ModuleExtension())
    ext.set_module_extension(Unknown, ModuleExtension())
    with pytest.raises(ValueError, match=r"Unknown.*overwrite"):
        ext.set_module_extension(Unknown, ModuleExtension())


@pytest.mark.parametrize("mc_samples", [0, -1, 1.5])
@each([extensions.DiagGGNMC, extensions.SqrtGGNMC, extensions.KFAC])
def test_number_of_monte_carlo_samples(ext: Any, mc_samples: Any) -> None:
    model = mlp()
    with pytest.raises((ValueError, TypeError), match="mc_samples"):
        run_with(model, ext, mc_samples=mc_samples)
    assert_clean(model)


def run_with(model: nn.Module, ext: Any, **options: Any) -> None:
    with backpack(ext(**options)):
        forward(model, data()).backward()


# ------------------------------------------------------------------ subsampling


@pytest.mark.parametrize(
    "indices", [[N], [0, 17], [-N - 1], [0.5], ["a"], [True, False, True, True]], ids=str
)
@each(ALL)
def test_subsampling_that_does_not_fit(ext: Any, indices: list[Any]) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=rf"{ext().savefield}.*subsampling"):
        run_with(model, ext, subsampling=indices)
    assert_clean(model)


@each(ALL)
def test_empty_subsampling(ext: Any) -> None:
    with pytest.raises(ValueError, match="subsampling"):
        ext(subsampling=[])


def test_one_of_several_subsamplings_does_not_fit() -> None:
    model = mlp()
    loss = forward(model, data())
    exts = [extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.KFLR(subsampling=[9])]
    with pytest.raises(ValueError, match="kflr"), backpack(*exts):
        loss.backward()
    assert_clean(model)


def test_negative_and_repeated_indices_are_python_indices() -> None:
    model, batch = mlp(), data()
    with backpack(
        extensions.BatchGrad(subsampling=[-1, 1, 1]), extensions.DiagGGNExact(subsampling=[-1])
    ):
        forward(model, batch).backward()
    problem = copy.deepcopy(model), nn.CrossEntropyLoss(), *batch
    for p, grads, diagonals in zip(
        model.parameters(),
        oracle.batch_grad(*problem),
        oracle.batch_ggn_diag(*problem),
        strict=True,
    ):
        torch.testing.assert_close(p.grad_batch, grads[[-1, 1, 1]])
        torch.testing.assert_close(p.diag_ggn_exact, diagonals[-1])


class WholeBatch(nn.Module):
    """A module that refuses some of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 4
        return torch.tanh(x * self.scale)


@pytest.mark.filterwarnings("ignore:.*differentiated automatically")
@pytest.mark.parametrize("name", ["DiagHessian", "GGNMP", "HMP"])
def test_repeated_samples_of_a_module_that_needs_all(name: str) -> None:
    model, ext = extend(nn.Sequential(WholeBatch(), nn.Linear(3, 2))), getattr(extensions, name)
    lossfunc = extend(nn.CrossEntropyLoss())

    def compute(samples: list[int]) -> None:
        loss = lossfunc(model(torch.rand(4, 3)), torch.tensor([0, 1, 0, 1]))
        with backpack(ext(subsampling=samples)):
            loss.backward()
        value = getattr(model[0].scale, ext().savefield)
        if callable(value):  # a product, which is evaluated now
            value(torch.ones(3))

    compute([1])
    with pytest.raises(ValueError, match=r"'0' .WholeBatch.*Name each of them once"):
        compute([1, 1])


# ------------------------------------------------------------------ unsupported modules


class Unknown(nn.Module):
    """A leaf that nobody has derivatives for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    """A model with a module of a given kind deep inside."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Sequential(middle))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Noise(nn.Module):
    """Returns something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + torch.randn_like(x)


class Centered(nn.Module):
    """Mixes the samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(0))


# what cannot be differentiated automatically, and a word of the reason
REFUSED = [(Noise, "random"), (Centered, "mixes the samples")]


@pytest.mark.parametrize(("cls", "reason"), REFUSED, ids=["random", "mixing"])
@each(FIRST)
def test_refused_module_warns_for_first_order(ext: Any, cls: Any, reason: str) -> None:
    model = Net(cls())
    loss = forward(model, data())
    with backpack(ext()), pytest.warns(UserWarning) as caught:
        loss.backward()
    (message,) = {str(w.message) for w in caught}
    check_names_the_module(message, ext, cls, reason)
    assert not vars(model.encoder[1][0].weight)
    assert hasattr(model.encoder[0].weight, ext().savefield)


def check_names_the_module(message: str, ext: Any, cls: Any, reason: str) -> None:
    for part in ("encoder.1.0", cls.__name__, ext.__name__, ext().savefield, reason, "register"):
        assert part in message


@pytest.mark.parametrize(("cls", "reason"), REFUSED, ids=["random", "mixing"])
@each(SECOND)
def test_refused_module_is_an_error_for_second_order(ext: Any, cls: Any, reason: str) -> None:
    model = Net(cls())
    loss = forward(model, data())
    with backpack(ext()), pytest.raises(NotImplementedError) as caught:
        loss.backward()
    check_names_the_module(str(caught.value), ext, cls, reason)
    assert_clean(model)


def test_one_warning_for_a_class_of_unknown_modules() -> None:
    class Fresh(Unknown):
        pass

    model = Net(nn.Sequential(Fresh(), Fresh()))
    for expected in (1, 0):
        model.zero_grad()
        loss = forward(model, data())
        with backpack(extensions.BatchGrad()), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss.backward()
        assert len(caught) == expected
    p = model.encoder[1][0][0].weight
    torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


def test_one_warning_for_all_extensions_and_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.scale, self.shift = nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale + self.shift

    loss = extend(nn.CrossEntropyLoss())(extend(Scaled())(torch.rand(4, 3)), torch.tensor([0] * 4))
    exts = extensions.BatchGrad(), extensions.Variance(), extensions.BatchL2Grad()
    with warnings.catch_warnings(record=True) as caught, backpack(*exts):
        warnings.simplefilter("always")
        loss.backward()
    (message,) = [str(w.message) for w in caught]
    assert all(f"{type(ext).__name__} (savefield" in message for ext in exts)
    assert "no rule for the parameters scale, shift of Scaled" in message


def test_extensions_that_fail_in_different_ways() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(1)

    model, (warning, silent, error) = extend(Scaled(3, 2)), (extensions.BatchGrad() for _ in "123")
    for ext, mode in zip((warning, silent, error), ("WARNING", "SILENT", "ERROR"), strict=True):
        ext.__init__()
        ext._fail_mode, ext.savefield = mode, mode.lower()
    with (
        backpack(warning, silent, error),
        pytest.warns(UserWarning, match=r"^BatchGrad \(savefield 'warning'\): "),
        pytest.raises(NotImplementedError, match=r"^BatchGrad \(savefield 'error'\): "),
    ):
        extend(nn.CrossEntropyLoss())(model(torch.rand(4, 3)), torch.tensor([0] * 4)).backward()


@pytest.mark.parametrize("converter", [True, "record"])
@pytest.mark.parametrize("ext", [extensions.BatchGrad, extensions.DiagGGNExact])
def test_penalty_inside_of_a_converted_model(converter: Any, ext: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.layer.weight.square().sum()

    output, penalty = extend(Model(), use_converter=converter)(torch.rand(4, 3))
    loss = extend(nn.CrossEntropyLoss())(output, torch.tensor([0] * 4)) + 0.1 * penalty
    told = r"sum.*has no samples.*penalty.*weight_decay"
    with (
        warnings.catch_warnings(),
        backpack(ext()),
        pytest.raises(ValueError, match=told),
    ):
        warnings.simplefilter("ignore")
        loss.backward()


@pytest.mark.parametrize("converter", [True, "record"])
def test_a_penalty_outside_of_a_converted_model_works_as_advised(converter: Any) -> None:
    X, y = torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
    model = extend(nn.Sequential(nn.Linear(3, 2)), use_converter=converter)
    weight, found = model.get_parameter("0.weight"), []
    for factor in (0.0, 0.1):
        loss = extend(nn.CrossEntropyLoss())(model(X), y)
        with warnings.catch_warnings(), backpack(extensions.BatchGrad(), extensions.DiagHessian()):
            warnings.simplefilter("ignore" if factor else "error")
            (loss + 0.5 * factor * weight.square().sum() if factor else loss).backward()
        found.append((weight.grad_batch.clone(), weight.diag_h.clone(), weight.grad.clone()))
        weight.grad = None
    (own, diagonal, grad), others = found
    torch.testing.assert_close(others, (own, diagonal, grad + 0.1 * weight.detach()))


def test_unsupported_frozen_module_does_not_matter_for_first_order() -> None:
    model = Net(Noise())
    model.encoder[1][0].weight.requires_grad_(False)
    loss = forward(model, data())
    with backpack(extensions.BatchGrad()), warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
    assert hasattr(model.encoder[0].weight, "grad_batch")


# ------------------------------------------------------------------ losses


@each(SECOND)
def test_loss_that_is_not_scalar(ext: Any) -> None:
    model, (X, y) = mlp(), data()
    loss = extend(nn.CrossEntropyLoss(reduction="none"))(extend(model)(X), y)
    with backpack(ext()), pytest.raises(ValueError, match=r"scalar loss.*reduction.*WeightedLoss"):
        loss.sum().backward()
    assert_clean(model)


@each(SECOND)
def test_loss_that_is_not_extended(ext: Any) -> None:
    model = mlp()
    loss = nn.HuberLoss()(extend(model)(data()[0]), torch.rand(N, 2))
    with backpack(ext()), pytest.raises(ValueError, match="supported loss"):
        loss.backward()
    assert_clean(model)


@each(SECOND)
def test_no_loss_module(ext: Any) -> None:
    model, (X, y) = mlp(), data()
    loss = F.cross_entropy(extend(model)(X), y)
    with backpack(ext()), pytest.raises(ValueError, match="supported loss"):
        loss.backward()
    assert_clean(model)


@each(SECOND)
def test_backward_of_a_model_without_a_loss(ext: Any) -> None:
    model = mlp()
    with backpack(ext()), pytest.raises(ValueError, match="supported loss"):
        extend(model)(data()[0]).sum().backward()
    assert_clean(model)


MODIFIED: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda loss: loss**2,
    "exp": lambda loss: loss.exp(),
    "times itself": lambda loss: loss * loss,
    "constant / loss": lambda loss: torch.tensor(2.0) / loss,
    "number / loss": lambda loss: 2 / loss,
    "constant / (2 loss)": lambda loss: torch.tensor(2.0).div(2 * loss),
    "sqrt of a sum": lambda loss: (1 + loss).sqrt(),
    "maximum": lambda loss: torch.maximum(loss, torch.zeros_like(loss)),
    "product of a stack": lambda loss: torch.stack([loss, loss]).prod(),
}


@pytest.mark.parametrize("name", MODIFIED)
def test_modified_loss_warns(name: str) -> None:
    model = mlp()
    loss = MODIFIED[name](forward(model, data()))
    with backpack(extensions.DiagGGNExact()), pytest.warns(UserWarning, match="CrossEntropyLoss"):
        try:
            loss.backward()
        except ValueError as error:  # decreasing in the loss: no square root
            assert "negative" in str(error)


@pytest.mark.parametrize("function", [None, lambda loss: 3 * loss, lambda loss: loss.exp()])
def test_gradient_edges_as_roots(function: Any, recwarn: pytest.WarningsRecorder) -> None:
    """They say what the loss has become as tensors do."""
    model, batch = mlp(), data()
    loss = forward(model, batch)
    loss = loss if function is None else function(loss)
    edge = torch.autograd.graph.get_gradient_edge(loss)
    with backpack(extensions.DiagGGNExact()):
        torch.autograd.backward([edge], [torch.ones(())], inputs=list(model.parameters()))
    changed = [w for w in recwarn if "modified after CrossEntropyLoss (ExpBackward0)" in str(w)]
    assert len(changed) == len(recwarn) == int(loss.grad_fn.name() == "ExpBackward0")
    known = model[0].weight.diag_ggn_exact.clone()
    with backpack(extensions.DiagGGNExact()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = forward(model, batch)
        (again if function is None else function(again)).backward()
    torch.testing.assert_close(known, model[0].weight.diag_ggn_exact)


@each(SECOND)
def test_warnings_of_a_container_without_a_rule(ext: Any) -> None:
    """Nothing else was reached: it is told, and no result is there."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.part = nn.Parameter(torch.rand(2, 3)), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T

    model, quantity = extend(Root()), ext()
    quantity._fail_mode = "WARNING"
    with backpack(quantity), pytest.warns(UserWarning, match=quantity.savefield):
        model(torch.rand(N, 3)).sum().backward()
    assert_clean(model)


def test_regularised_loss_warns() -> None:
    model = mlp()
    loss = forward(model, data()) + 0.1 * model[0].weight.square().sum()
    with backpack(extensions.DiagHessian()), pytest.warns(UserWarning, match="modified"):
        loss.backward()


LEARNED_WEIGHTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "of variances": lambda w, a, b: a / (2 * w[0].exp() ** 2) + (-w[1]).exp() * b + w.sum(),
    "of a softmax": lambda w, a, b: (w.softmax(0) * torch.stack([a, b])).sum(),
}


@pytest.mark.parametrize("name", LEARNED_WEIGHTS)
def test_learned_weights_of_losses_are_constant_factors(name: str) -> None:
    """No layer has them: second derivatives with respect to a weight of a layer are exact."""
    model, (X, y), targets = mlp(), data(), torch.rand(N, 2)
    extend(model)
    weights = torch.randn(2, requires_grad=True)
    results: list[list[Tensor]] = []
    for given in (weights, weights.detach()):
        output = model(X)
        one = extend(nn.CrossEntropyLoss())(output, y)
        other = extend(nn.MSELoss())(output, targets)
        exts = extensions.DiagGGNExact(), extensions.DiagHessian()
        with warnings.catch_warnings(), backpack(*exts):
            warnings.simplefilter("error")
            LEARNED_WEIGHTS[name](given, one, other).backward()
        results.append([x for p in model.parameters() for x in (p.diag_ggn_exact, p.diag_h)])
    assert weights.grad is not None
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
        assert found.abs().max() > 0


def test_factors_that_a_network_has_a_part_in_warn() -> None:
    factors: list[Callable[[nn.Module, Tensor], Tensor]] = [
        lambda model, output: model[0].weight.sum().exp(),
        lambda model, output: output.mean().exp(),
    ]
    for factor in factors:
        model, (X, y) = extend(mlp()), data()
        output = model(X)
        loss = extend(nn.CrossEntropyLoss())(output, y) * factor(model, output)
        with (
            backpack(extensions.DiagHessian()),
            pytest.warns(UserWarning, match="modified"),
        ):
            try:
                loss.backward()
            except ValueError as error:
                assert "not through the extended loss" in str(error)


@pytest.mark.parametrize("change", ["penalty", "factor"])
def test_penalties_of_computed_parameters_warn(change: str) -> None:
    """Parameters that a function has made are no leaves: what reads them is no constant, either."""
    model, (X, y) = extend(mlp()), data()
    own = {name: (0.5 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    weights = {name: 2 * p for name, p in own.items()}
    loss = extend(nn.CrossEntropyLoss())(torch.func.functional_call(model, weights, (X,)), y)
    read = weights["0.weight"].square().sum()
    modified = {"penalty": loss + read, "factor": loss * read.exp()}[change]
    with (
        backpack(extensions.DiagHessian()),
        pytest.warns(UserWarning, match="modified after CrossEntropyLoss"),
    ):
        modified.backward()
    assert weights["0.weight"].diag_h.shape == weights["0.weight"].shape


def test_uses_by_functions_are_told_of_once_for_each_of_them() -> None:
    model = extend(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    x = torch.rand(5, 1, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = extend(nn.MSELoss())(slope, torch.rand(5, 1))
    with warnings.catch_warnings(record=True) as caught, backpack(extensions.BatchGrad()):
        warnings.simplefilter("always")
        loss.backward()
    (message,) = [str(w.message) for w in caught if "also used by" in str(w.message)]
    assert "parameters of shapes [" in message and "[4, 1]" in message and "[1, 4]" in message
    assert "let a module without children" in message and "backpack.linalg" in message
    with pytest.warns(UserWarning, match=r"as a penalty does.*let a module without children"):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with backpack(extensions.BatchGrad()):
            slope.square().mean().backward()


class WithSlope(nn.Module):
    """A network of coordinates plus its derivative, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 1)), nn.Parameter(torch.randn(4))
        self.v = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = nn.functional.linear(nn.functional.linear(x, self.w, self.b).tanh(), self.v)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + slope


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("converter", [False, True, "record"], ids=str)
def test_derivatives_that_one_module_computes(converter: Any) -> None:
    """What the warning says to do is right."""
    model, X, y = nn.Sequential(WithSlope()), torch.rand(5, 1), torch.rand(5, 1)
    plain = copy.deepcopy(model)
    extended = extend(model, use_converter=converter)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(nn.MSELoss())(extended(X), y).backward()
    out = plain(X)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        rows = torch.stack([torch.autograd.grad(o, q, retain_graph=True)[0] for o in out.flatten()])
        slopes = (2 * (out - y).detach() / 5).reshape(5, *[1] * q.dim())
        torch.testing.assert_close(p.grad_batch, slopes * rows)
        torch.testing.assert_close(p.diag_ggn_exact, 2 / 5 * rows.square().sum(0))


def test_modified_loss_mixes_samples_for_first_order() -> None:
    """The gradients of samples have the value of the whole loss as a factor: that is told."""
    model, batch = mlp(), data()
    loss = forward(model, batch) ** 2
    with backpack(extensions.BatchGrad()), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.warns(UserWarning, match=r"mixes the samples .* \(PowBackward0\)"):
            loss.backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


UNMODIFIED: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "plain": (1, lambda loss: loss),
    "constant factor": (3, lambda loss: 3 * loss),
    "tensor factor": (3, lambda loss: loss * torch.tensor(3.0)),
    "quotient": (0.25, lambda loss: loss / 4),
    "quotient by a tensor": (0.25, lambda loss: loss / torch.tensor(4.0)),
    "constant summand": (1, lambda loss: loss + 5),
    "difference": (1, lambda loss: 7 * loss - 6 * loss),
    "minus minus": (1, lambda loss: -torch.neg(loss)),
    "itself twice": (2, lambda loss: loss + loss),
    "sum": (2, lambda loss: sum([loss, loss])),
    "stack, sum": (2, lambda loss: torch.stack([loss, loss]).sum()),
    "stack, mean": (1, lambda loss: torch.stack([loss, loss]).mean()),
    "cat": (2, lambda loss: torch.cat([loss[None], loss.view(1)]).sum()),
    "reshape": (1, lambda loss: loss.reshape(1).squeeze()),
    "expand": (3, lambda loss: loss.expand(3).sum()),
    "other precision": (2, lambda loss: (loss.float() * 2).double()),
    "clone": (1, lambda loss: loss.clone()),
    "in place": (3, lambda loss: loss.clone().mul_(3).add_(1)),
    "lerp from zero": (0.5, lambda loss: torch.lerp(torch.zeros_like(loss), loss, 0.5)),
    "lerp of both": (2, lambda loss: torch.lerp(loss, 3 * loss, torch.tensor(0.5).double())),
    "addcmul": (3, lambda loss: torch.addcmul(loss, loss, torch.tensor(2.0).double())),
    "addcdiv": (1.5, lambda loss: torch.addcdiv(loss, loss, torch.tensor(2.0).double())),
}


@pytest.mark.parametrize("name", UNMODIFIED)
def test_constant_factors_and_sums_do_not_warn(name: str) -> None:
    (factor, change), model, batch = UNMODIFIED[name], mlp(), data()
    loss = change(forward(model, batch))
    with backpack(extensions.DiagGGNExact()), warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
    expected = oracle.ggn_diag(copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact, factor * value)


@each([extensions.DiagGGNExact, extensions.SqrtGGNExact, extensions.KFAC, extensions.KFRA])
def test_negative_factor_has_no_square_root(ext: Any) -> None:
    model = mlp()
    loss = -forward(model, data())
    with backpack(ext()), pytest.raises(ValueError, match="negative"):
        loss.backward()
    assert_clean(model)


@each([extensions.DiagGGNExact, extensions.KFLR, extensions.GGNMP, extensions.HMP])
def test_target_that_depends_on_the_model(ext: Any) -> None:
    """The loss Hessian is that of the prediction alone; the target's part would be lost."""
    encoder, decoder, X = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(N, 3)
    extend(encoder), extend(decoder)
    h = encoder(X)
    loss = extend(nn.MSELoss())(decoder(h), h)
    with backpack(ext()), pytest.raises(ValueError, match="MSELoss"):
        loss.backward()
    assert_clean(encoder, decoder)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("exts", ["BatchL2Grad", "DiagGGNExact", "BatchGrad DiagGGNExact KFAC"])
@pytest.mark.parametrize("where", ["between the layers", "at the end"])
def test_an_error_leaves_no_results_of_the_pass_before(
    where: str, exts: str, accumulate: bool
) -> None:
    """Nobody takes them for its own; what accumulates is as it was."""
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    X, y = data()
    chosen = [getattr(extensions, name)() for name in exts.split()]

    def stop(_: Tensor) -> None:
        raise KeyError("stopped")

    def run(stops: bool) -> None:
        hidden = model[0](X)
        if stops:
            stopped = hidden if where == "between the layers" else model[0].bias
            stopped.register_hook(stop)
        with backpack(*chosen, accumulate=accumulate):
            lossfunc(model[1:](hidden), y).backward()

    run(stops=False)
    before = quantities(model)
    with pytest.raises(KeyError, match="stopped"):
        run(stops=True)
    torch.testing.assert_close(quantities(model), before if accumulate else {})


def test_detached_target_is_fine() -> None:
    encoder, decoder, X = extend(nn.Linear(3, 3)), extend(nn.Linear(3, 3)), torch.randn(N, 3)
    h = encoder(X)
    target = h.detach()
    with backpack(extensions.DiagGGNExact()):
        extend(nn.MSELoss())(decoder(h), target).backward()
    model = nn.Sequential(copy.deepcopy(encoder), copy.deepcopy(decoder))
    for p, value in zip(
        [*encoder.parameters(), *decoder.parameters()],
        oracle.ggn_diag(model, nn.MSELoss(), X, target),
        strict=True,
    ):
        torch.testing.assert_close(p.diag_ggn_exact, value)


# ------------------------------------------------------------------ between modules


class Doubled(torch.autograd.Function):
    """A function of a program."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return 2 * h

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * g


# What the graph does not tell: constants that were added, what was overwritten, unknown functions.
BREAKS: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda h: F.relu(h + 1),
    "in place": lambda h: h.mul_(2),
    "in-place function": lambda h: F.relu_(h),
    "in-place item": lambda h: h.index_fill_(1, torch.tensor([0]), 0.0),
    "own function": Doubled.apply,
    "drawn": lambda h: F.rrelu(h, training=True),
    "two": lambda h: F.softplus(F.relu(h + 1).view(-1)).view(-1, 4),
}


class Broken(nn.Module):
    """A model with something between its modules that is not a module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.front, self.back, self.name = nn.Linear(3, 4), nn.Linear(4, 2), name

    def forward(self, x: Tensor) -> Tensor:
        return self.back(BREAKS[self.name](self.front(x)))


@pytest.mark.parametrize("name", BREAKS)
def test_quantity_that_does_not_arrive(name: str) -> None:
    model = Broken(name)
    loss = forward(model, data())
    with backpack(extensions.DiagGGNExact()), pytest.raises(ValueError) as caught:
        loss.backward()
    for part in ("'front' (Linear)", "'back' (Linear)", "use_converter=True", "DiagGGNExact"):
        assert part in str(caught.value)
    assert_clean(model)


@each(SECOND)
def test_function_in_forward_for_every_extension(ext: Any) -> None:
    model = Broken("constant")
    loss = forward(model, data())
    with backpack(ext()), pytest.raises(ValueError, match=r"front.*back.*use_converter"):
        loss.backward()
    assert_clean(model)


@pytest.mark.parametrize("name", [n for n in BREAKS if n not in ("in-place item", "drawn")])
def test_first_order_does_not_mind(name: str) -> None:
    model, batch = Broken(name), data()
    loss = forward(model, batch)
    with backpack(extensions.BatchGrad()):
        loss.backward()
    expected = oracle.batch_grad(copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch, value)


class Skip(nn.Module):
    """A skip connection around a module: with a function, or as a module."""

    def __init__(self, add: nn.Module | None) -> None:
        super().__init__()
        self.front, self.middle, self.back = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        m = self.middle(h)
        return self.back(F.relu(h + m + 1) if self.add is None else self.add(h, m))


def test_skip_connection_by_a_function() -> None:
    model = Skip(None)
    loss = forward(model, data())
    with backpack(extensions.DiagGGNExact()), pytest.raises(ValueError, match=r"middle.*back"):
        loss.backward()
    assert_clean(model)
    check_works(Skip(SumModule()))


class Leaks(nn.Module):
    """A model whose second output path ends in a function after the last module."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        return F.relu(self.back(h) + h[:, :2] + 1)


def test_function_between_model_and_loss() -> None:
    model = Leaks()
    loss = forward(model, data())
    with backpack(extensions.KFLR()), pytest.raises(ValueError, match=r"CrossEntropyLoss"):
        loss.backward()
    assert_clean(model)


def test_path_that_avoids_the_loss() -> None:
    model, side, batch = mlp(), extend(nn.Linear(3, 1)), data()
    loss = forward(model, batch) + side(batch[0]).sum()
    with (
        backpack(extensions.DiagGGNExact()),
        pytest.raises(ValueError, match=r"Linear.*not through.*CrossEntropyLoss"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        loss.backward()
    assert_clean(model, side)


@pytest.mark.parametrize(
    ("what", "ext"),
    [
        ("data", extensions.BatchGrad()),
        ("data", extensions.DiagGGNExact()),
        ("activation", extensions.DiagGGNExact()),  # BatchGrad needs nothing of a sigmoid
        ("output", extensions.BatchGrad()),
        ("output", extensions.DiagGGNExact()),
    ],
    ids=repr,
)
def test_tensor_changed_in_place_after_a_module_read_it(what: str, ext: Any) -> None:
    front, act, back, (X, y) = nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2), data()
    for module in (front, act, back):
        extend(module)
    h = front(X)
    a = act(h)
    loss = extend(nn.CrossEntropyLoss())(back(a), y)
    with torch.no_grad():
        {"data": X, "activation": h, "output": a}[what].add_(1)
    with backpack(ext), pytest.raises(RuntimeError, match=r"in place|inplace"):
        loss.backward()
    assert_clean(front, act, back)


def test_in_place_change_that_no_rule_reads_is_harmless() -> None:
    front, act, back, (X, y) = nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2), data()
    for module in (front, act, back):
        extend(module)
    h = front(X)
    loss = extend(nn.CrossEntropyLoss())(back(act(h)), y)
    with torch.no_grad():
        h.add_(1)
    with backpack(extensions.BatchGrad()):
        loss.backward()
    for p in (*front.parameters(), *back.parameters()):
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


def test_in_place_change_names_the_module() -> None:
    model, (X, y) = mlp(), data()
    loss = forward(model, (X, y))
    X.zero_()
    with backpack(extensions.BatchGrad()), pytest.raises(RuntimeError, match=r"'0' \(Linear\)"):
        loss.backward()
    assert_clean(model)


def test_targets_changed_in_place() -> None:
    model, (X, y) = mlp(), data()
    loss = forward(model, (X, y))
    y.zero_()
    with backpack(extensions.DiagGGNExact()), pytest.raises(RuntimeError, match=r"in ?place"):
        loss.backward()
    assert_clean(model)


# ------------------------------------------------------------------ parameters


class SparseLinear(nn.Linear):
    """A linear layer whose weight is stored sparsely."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weight = nn.Parameter(self.weight.detach().to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to_dense(), self.bias)


class WithQuantised(nn.Module):
    """A leaf with a quantised weight, which is never trained."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight = torch.quantize_per_tensor(torch.rand(4).float(), 0.1, 0, torch.qint8)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.dequantize()


def sparse_weight() -> nn.Module:
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(linear.weight.detach().to_sparse())
    return linear


ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse": (sparse_weight, "sparse_coo"),
    "sparse in a subclass": (lambda: SparseLinear(4, 4), "sparse_coo"),
    "quantised": (WithQuantised, "quanti"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about sparse tensors
@each([extensions.DiagGGNExact, extensions.KFRA, extensions.HMP])
def test_sparse_and_quantised_parameters(ext: Any, name: str) -> None:
    make, layout = ODD[name]
    model = Net(make())
    loss = forward(model, data())
    with backpack(ext()), pytest.raises(NotImplementedError) as caught:
        loss.backward()
    for part in ("encoder.1.0", "weight", layout):
        assert part in str(caught.value)
    assert_clean(model)


@pytest.mark.parametrize("name", ["sparse", "sparse in a subclass"])
@each(FIRST)
def test_sparse_parameters_for_first_order(ext: Any, name: str) -> None:
    test_sparse_and_quantised_parameters(ext, name)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ODD)
def test_frozen_sparse_and_quantised_parameters_for_first_order(name: str) -> None:
    """Nothing is computed for them: a frozen backbone may have any format."""
    model = Net(ODD[name][0]()).requires_grad_(False)
    model.encoder[0].requires_grad_(True)
    loss = forward(model, data())
    with backpack(extensions.BatchGrad()):
        loss.backward()
    for p in model.encoder[0].parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_parameters_without_extensions_are_fine() -> None:
    model = Net(sparse_weight())
    forward(model, data()).backward()
    assert model.head.weight.grad is not None


# ------------------------------------------------------------------ complex numbers


class ComplexWeight(nn.Module):
    """Real data in, real results out, and a complex parameter in between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


class ComplexOutput(nn.Module):
    """A real weight, whose results are complex (and real, where asked for)."""

    def __init__(self, with_real: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.with_real = with_real

    def forward(self, x: Tensor) -> Any:
        x = x @ self.weight
        return (x, torch.fft.fft(x)) if self.with_real else torch.fft.fft(x)


class Magnitudes(nn.Module):
    """A network whose first layer hands complex numbers on."""

    def __init__(self, with_real: bool) -> None:
        super().__init__()
        self.first, self.head = ComplexOutput(with_real), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        return self.head(out[0] + out[1].abs() if isinstance(out, tuple) else out.abs())


@each([*FIRST, extensions.DiagGGNExact, extensions.DiagHessian, extensions.KFAC, extensions.HMP])
def test_complex_parameters(ext: Any) -> None:
    """Squares and norms of complex gradients are not those of numbers: nothing is written."""
    model = Net(ComplexWeight())
    loss = forward(model, data())
    with backpack(ext()), pytest.raises(NotImplementedError) as caught:
        loss.backward()
    for part in ("encoder.1.0", "weight", "complex", "view_as_real", "module that takes"):
        assert part in str(caught.value)
    assert_clean(model)


class RealWeight(nn.Module):
    """The same with a real parameter, as the error advises."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ torch.view_as_complex(self.weight)).abs()


@pytest.mark.parametrize("route", [False, "record"])
@pytest.mark.filterwarnings("ignore:No rule")
def test_complex_parameters_as_real_ones(route: Any) -> None:
    model, lossfunc = nn.Sequential(RealWeight(), nn.Linear(4, 2).double()), nn.CrossEntropyLoss()
    X, y = torch.rand(N, 4, dtype=torch.float64), torch.randint(2, (N,))
    expected = oracle.ggn_diag(copy.deepcopy(model), lossfunc, X, y)
    with backpack(extensions.DiagGGNExact()):
        extend(lossfunc)(extend(model, use_converter=route)(X), y).backward()
    found = [p.diag_ggn_exact for p in model.parameters()]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("with_real", [False, True])
@each(FIRST)
def test_complex_outputs_of_layers_with_parameters(ext: Any, with_real: bool) -> None:
    model = extend(Magnitudes(with_real))
    loss = model(torch.rand(N, 4)).square().sum()
    with pytest.warns(match="weight of 'first'.*complex.*view_as_real"), backpack(ext()):
        loss.backward()
    assert not hasattr(model.first.weight, ext().savefield)
    assert hasattr(model.head.weight, ext().savefield)


@pytest.mark.parametrize("with_real", [False, True])
def test_complex_outputs_for_second_order(with_real: bool) -> None:
    model, lossfunc = extend(Magnitudes(with_real)), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(N, 4)), torch.rand(N, 2))
    match = "weight of 'first'.*complex.*view_as_real"
    with backpack(extensions.KFAC()), pytest.raises(NotImplementedError, match=match):
        loss.backward()


class Spectrum(nn.Module):
    """Functions that go through complex numbers, behind a layer or before all of them."""

    def __init__(self, of_data: bool, centred: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(8, 2)
        self.of_data, self.centred = of_data, centred

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(x if self.of_data else self.first(x))
        z = z - z.mean(0) if self.centred else z
        return self.head(torch.view_as_real(torch.fft.ifft(z.conj() * z)).flatten(1))


SPECTRA = pytest.mark.parametrize("route", ["trace", "record"])


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("of_data", [False, True], ids=["of a layer", "of data"])
@SPECTRA
def test_functions_of_complex_numbers(route: str, of_data: bool) -> None:
    """The samples are followed; derivatives are not those of real numbers."""
    model, lossfunc = Spectrum(of_data).double(), nn.MSELoss()
    X, y = torch.rand(N, 4, dtype=torch.float64), torch.rand(N, 2, dtype=torch.float64)
    extended = extend(copy.deepcopy(model), use_converter=route)
    individual = oracle.batch_grad(model, lossfunc, X, y)
    with backpack(extensions.BatchGrad()):
        extend(lossfunc)(extended(X), y).backward()
    used = dict(extended.named_parameters())
    for (name, _), truth in zip(model.named_parameters(), individual, strict=True):
        if name.startswith("head") or not of_data:
            torch.testing.assert_close(used[name].grad_batch, truth)
    told: Any = pytest.raises(ValueError, match="Converters do not follow complex numbers")
    with nullcontext() if of_data else told, backpack(extensions.DiagGGNExact()):
        extend(lossfunc)(extended(X), y).backward()
    if of_data:
        diagonals = oracle.ggn_diag(model, lossfunc, X, y)
        torch.testing.assert_close(used["head.weight"].diag_ggn_exact, diagonals[2])


@pytest.mark.filterwarnings("ignore:No rule for")
@SPECTRA
def test_complex_numbers_of_all_samples_are_noticed(route: str) -> None:
    model, lossfunc = extend(Spectrum(True, centred=True), use_converter=route), nn.MSELoss()
    parameters = [*model.head.parameters()]
    optimiser = DPSGD(
        parameters, 1.0, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=N
    )
    with backpack(*optimiser.extensions):
        extend(lossfunc)(model(torch.rand(N, 4)), torch.rand(N, 2)).backward()
    with pytest.raises(ValueError, match="mixes them in a function of the data"):
        optimiser.step()


# ------------------------------------------------------------------ nested and sparse data

ROUTES = [False, "trace", "record"]


def nested(layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=layout)


ODD_DATA: dict[str, tuple[Callable[[], Tensor], str]] = {
    "jagged": (lambda: nested(torch.jagged), "nested tensors.*to_padded_tensor"),
    "strided": (nested, "nested tensors.*to_padded_tensor"),
    "sparse": (lambda: torch.rand(N, 3).to_sparse(), r"torch.sparse_coo.*to_dense\(\)"),
}
ODD_MODELS: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: nn.Linear(3, 2),
    "layers": lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)),
}


def total(y: Tensor) -> Tensor:
    return sum((x.square().sum() for x in y.unbind()), torch.zeros(()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("name", ODD_MODELS)
@pytest.mark.parametrize("kind", ODD_DATA)
def test_nested_and_sparse_data(kind: str, name: str, route: Any) -> None:
    """Without extensions, all is as it was; with them, the module and the remedy are named."""
    plain, (make, remedy) = ODD_MODELS[name](), ODD_DATA[kind]
    model, x = extend(copy.deepcopy(plain), use_converter=route), make()
    total(plain(x)).backward()
    total(model(x)).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    with (
        pytest.warns(UserWarning, match=rf"grad_batch.*weight, bias of .*Linear.*{remedy}"),
        backpack(extensions.BatchGrad()),
    ):
        total(model(x)).backward()


class Within(nn.Module):
    """Makes its data dense."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:No rule for function")
@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("kind", ODD_DATA)
def test_nested_and_sparse_data_that_the_model_makes_dense(kind: str, route: Any) -> None:
    x = ODD_DATA[kind][0]()
    fill = (lambda x: x.to_dense()) if kind == "sparse" else (lambda x: x.to_padded_tensor(0.0))
    model = extend(Within(fill), use_converter=route)
    with backpack(extensions.BatchGrad()):
        total(model(x)).backward()
    reference = nn.Linear(3, 2)
    reference.load_state_dict(model.get_submodule("head").state_dict())
    expected = oracle.batch_grad(reference, lambda y, _: total(y), fill(x), None)
    for p, truth in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch, truth)


@pytest.mark.filterwarnings("ignore:No rule for function")
@pytest.mark.parametrize("route", ROUTES[1:])
def test_rows_of_nested_data_are_no_samples(route: str) -> None:
    model = extend(Within(lambda x: x.values()), use_converter=route)
    loss = total(model(nested(torch.jagged)))
    problem = "'head'.*reads a tensor of shape .*values has computed, which has nested tensors"
    with pytest.raises(ValueError, match=problem), backpack(extensions.BatchGrad()):
        loss.backward()


# ------------------------------------------------------------------ shapes in public products


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(3, 2), (N, 3)),
    "Linear with more axes": (lambda: nn.Linear(3, 2), (N, 5, 3)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 2), (N, 2, 4, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 3, 2), (N, 2, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3).eval(), (N, 3)),
    "Sigmoid": (nn.Sigmoid, (N, 3)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), (N, 1, 4, 4)),
    "AvgPool1d": (lambda: nn.AvgPool1d(2), (N, 1, 4)),
    "Flatten": (nn.Flatten, (N, 2, 4)),
    "ZeroPad2d": (lambda: nn.ZeroPad2d(1), (N, 1, 2, 2)),
    "Dropout": (nn.Dropout, (N, 3)),
}


def called(name: str) -> tuple[Any, Any, Tensor, Tensor]:
    make, shape = MODULES[name]
    module, x = extend(make()), torch.rand(shape, requires_grad=True)
    return REGISTRY[type(module)], module, x, module(x)


def wrong_shapes(shape: torch.Size) -> list[torch.Size]:
    return [
        torch.Size([5, *shape[:-1], shape[-1] + 1]),
        torch.Size([5, shape[0] + 1, *shape[1:]]),
        torch.Size([2, 5, *shape]),
        torch.Size(shape[1:]),
        torch.Size([]),
        torch.Size([*shape, 1]),
    ]


def check_message(message: str, wrong: torch.Size, right: torch.Size) -> None:
    assert str(list(wrong)) in message, message
    assert str(list(right))[1:-1] in message, message


@pytest.mark.parametrize("name", MODULES)
def test_wrong_shapes_of_jacobian_products(name: str) -> None:
    derivatives, module, x, out = called(name)
    for method, right in (
        ("jac_mat_prod", x.shape),
        ("jac_t_mat_prod", out.shape),
        ("residual_mat_prod", x.shape),
    ):
        product = getattr(derivatives, method)
        grads = None, (torch.ones_like(out),)
        for wrong in wrong_shapes(right):
            with pytest.raises(ValueError) as caught:
                product(module, *grads, torch.rand(wrong))
            check_message(str(caught.value), wrong, right)
            assert type(module).__name__ in str(caught.value)
        assert product(module, *grads, torch.rand(5, *right)).shape[0] == 5
        without_v = product(module, *grads, torch.rand(right))
        assert without_v.dim() == product(module, *grads, torch.rand(1, *right)).dim() - 1
        with pytest.raises(ValueError) as caught:  # the rows must be those of the subsampling
            product(module, *grads, torch.rand(5, *right), subsampling=[0, 1])
        check_message(str(caught.value), torch.Size([5, *right]), torch.Size([2, *right[1:]]))


@pytest.mark.parametrize("name", [n for n in MODULES if REGISTRY[type(called(n)[1])].params])
def test_wrong_shapes_of_parameter_products(name: str) -> None:
    derivatives, module, _x, out = called(name)
    for param in ("weight", "bias"):
        p = getattr(module, param)
        for wrong in wrong_shapes(out.shape):
            for product in (
                lambda mat, param=param: derivatives.param_mjp(param, module, None, None, mat),
                lambda mat, param=param: getattr(derivatives, f"{param}_jac_t_mat_prod")(
                    module, None, None, mat
                ),
            ):
                with pytest.raises(ValueError) as caught:
                    product(torch.rand(wrong))
                check_message(str(caught.value), wrong, out.shape)
        for wrong in [s for s in wrong_shapes(p.shape) if s[1:] != p.shape]:
            with pytest.raises(ValueError) as caught:
                getattr(derivatives, f"{param}_jac_mat_prod")(module, None, None, torch.rand(wrong))
            check_message(str(caught.value), wrong, p.shape)
    with pytest.raises(ValueError, match="'gamma'"):
        derivatives.param_mjp("gamma", module, None, None, torch.rand(5, *out.shape))


def test_product_with_a_parameter_that_is_not_there() -> None:
    module = extend(nn.Linear(3, 2, bias=False))
    out = module(torch.rand(N, 3))
    derivatives = REGISTRY[nn.Linear]
    with pytest.raises(ValueError, match="'bias'"):
        derivatives.param_mjp("bias", module, None, None, torch.rand(1, *out.shape))
    with pytest.raises(ValueError, match="'bias'"):
        derivatives.bias_jac_mat_prod(module, None, None, torch.rand(1, 2))


@pytest.mark.parametrize("name", MODULES)
def test_wrong_shapes_of_averaged_products(name: str) -> None:
    derivatives, module, x, out = called(name)
    D = out.shape[1:].numel()
    for wrong in ([D], [D, D + 1], [D + 1, D + 1], [1, D, D]):
        with pytest.raises(ValueError) as caught:
            derivatives.ea_jac_t_mat_jac_prod(module, None, None, torch.rand(wrong))
        check_message(str(caught.value), torch.Size(wrong), torch.Size([D, D]))
    D_in = x.shape[1:].numel()
    assert derivatives.ea_jac_t_mat_jac_prod(module, None, None, torch.eye(D)).shape == (D_in, D_in)


@pytest.mark.parametrize("lossfunc", [nn.MSELoss, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss])
def test_wrong_shapes_of_loss_products(lossfunc: Any) -> None:
    module, x = extend(lossfunc()), torch.rand(N, 2, requires_grad=True)
    out = module(x, torch.rand(N, 2))
    product = REGISTRY[lossfunc].make_hessian_mat_prod(module, None, None)
    for wrong in wrong_shapes(x.shape):
        with pytest.raises(ValueError) as caught:
            product(torch.rand(wrong))
        check_message(str(caught.value), wrong, x.shape)
    assert product(torch.rand(5, N, 2)).shape == (5, N, 2)
    assert product(torch.rand(N, 2)).shape == (N, 2)
    assert out.requires_grad


def test_second_derivatives_need_the_gradient() -> None:
    _derivatives, module, x, out = called("Sigmoid")
    with pytest.raises(ValueError, match="g_out"):
        REGISTRY[nn.Sigmoid].residual_mat_prod(module, None, None, torch.rand(5, *x.shape))
    assert out.requires_grad


def test_derivatives_without_a_forward_pass() -> None:
    module = extend(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match=r"forward pass.*Linear"):
        REGISTRY[nn.Linear].jac_t_mat_prod(module, None, None, torch.rand(1, N, 2))


@each([extensions.GGNMP, extensions.HMP, extensions.PCHMP])
def test_wrong_shapes_of_curvature_products(ext: Any) -> None:
    model = mlp()
    loss = forward(model, data())
    with backpack(ext(savefield="product")):
        loss.backward()
    for p in model.parameters():
        for wrong in [s for s in wrong_shapes(p.shape) if s[1:] != p.shape]:
            with pytest.raises(ValueError) as caught:
                p.product(torch.rand(wrong))
            check_message(str(caught.value), wrong, p.shape)
        assert p.product(torch.rand(5, *p.shape)).shape == (5, *p.shape)
        assert p.product(torch.rand(p.shape)).shape == p.shape


@each([extensions.GGNMP, extensions.HMP, extensions.PCHMP])
def test_curvature_product_after_an_optimiser_step(ext: Any) -> None:
    model = mlp()
    loss = forward(model, data())
    with backpack(ext(savefield="product")):
        loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"was changed .* after the backward pass"):
        model[0].weight.product(torch.rand(1, 4, 3))


def test_modify_of_the_positive_curvature_hessian() -> None:
    with pytest.raises(ValueError, match=r"clip.*abs.*'square'"):
        extensions.PCHMP(modify="square")


def test_unknown_member_of_the_kronecker_family() -> None:
    with pytest.raises(ValueError, match="NOTHING"):
        extensions.HBP("GGN", "NOTHING", "SQRT", "BOTEV_MARTENS")


# ------------------------------------------------------------------ exceptions in user code


class Oops(Exception):
    """Raised by user code."""


@pytest.mark.parametrize("at", [nn.CrossEntropyLoss, nn.Sigmoid, nn.Linear])
@pytest.mark.parametrize(
    "exts",
    [
        [extensions.BatchGrad()],
        [extensions.DiagGGNExact()],
        [extensions.BatchGrad(), extensions.KFLR(), extensions.HMP()],
    ],
    ids=len,
)
def test_exception_in_the_extension_hook(exts: list[Any], at: Any) -> None:
    model = mlp()

    def hook(module: nn.Module) -> None:
        if isinstance(module, at):
            raise Oops

    loss = forward(model, data())
    with pytest.raises(Oops), backpack(*exts, extension_hook=hook):
        loss.backward()
    assert_clean(model)
    check_works(model)


class Failing(ModuleExtension):
    """A rule that fails."""

    def __init__(self, method: str) -> None:
        super().__init__(["weight"] if method == "weight" else [])
        self.method = method

    def weight(self, *args: Any) -> None:
        raise Oops

    def backpropagate(self, *args: Any) -> None:
        raise Oops


@each([extensions.BatchGrad, extensions.DiagGGNExact, extensions.SqrtGGNExact, extensions.KFAC])
@pytest.mark.parametrize("method", ["weight", "backpropagate"])
def test_exception_in_a_rule(method: str, ext: Any) -> None:
    model, failing = Net(Unknown()), ext()
    failing.set_module_extension(Unknown, Failing(method))
    others = [extensions.Variance()]
    loss = forward(model, data())
    if method == "backpropagate" and not failing.expects_backpropagation_quantities():
        with backpack(failing):
            loss.backward()  # a first-order rule passes nothing on
        return
    with pytest.raises(Oops), warnings.catch_warnings(), backpack(*others, failing):
        warnings.simplefilter("ignore")
        loss.backward()
    assert_clean(model)


def test_exception_in_extract() -> None:
    class Extract(extensions.DiagGGNExact):
        count = 0

        def extract(self, products: Any) -> Any:
            Extract.count += 1
            if Extract.count == 3:
                raise Oops
            return super().extract(products)

    model = mlp()
    loss = forward(model, data())
    with pytest.raises(Oops), backpack(extensions.BatchGrad(), Extract()):
        loss.backward()
    assert_clean(model)
    check_works(model)


@pytest.mark.parametrize("ext", [extensions.BatchGrad(), extensions.DiagGGNExact()], ids=repr)
def test_exception_of_somebody_else(ext: Any) -> None:
    """A hook of the program fails in the middle of the backward pass."""
    model, (X, y) = mlp(), data()

    def fail(grad: Tensor) -> None:
        raise Oops

    extend(model)
    h = model[0](X)
    h.register_hook(fail)
    loss = extend(nn.CrossEntropyLoss())(model[2](model[1](h)), y)
    with pytest.raises(Oops), backpack(ext):
        loss.backward()
    assert_clean(model)
    check_works(model)


def test_exception_is_caught_by_a_hook() -> None:
    """What the backward pass around the one that has failed has written stays."""
    model, (X, y) = mlp(), data()
    reached: list[Tensor] = []

    def stop(grad: Tensor) -> None:
        reached.append(grad)
        if len(reached) == 2:
            raise Oops

    def again(grad: Tensor) -> None:
        with pytest.raises(Oops):
            losses.pop().backward(retain_graph=True)

    extend(model)
    h = model[0](X)
    h.register_hook(again)
    a = model[1](h)
    a.register_hook(stop)
    losses = 2 * [extend(nn.CrossEntropyLoss())(model[2](a), y)]
    with backpack(extensions.BatchGrad()):
        losses.pop().backward(retain_graph=True)
    for p in model.parameters():
        assert p.grad_batch.shape == (len(X), *p.shape)


def test_exception_is_caught_inside_the_context() -> None:
    """Another backward pass in the same context is not disturbed."""
    model, batch = mlp(), data()
    fail = [True]

    def hook(module: nn.Module) -> None:
        if fail[0] and isinstance(module, nn.Sigmoid):
            raise Oops

    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact(), extension_hook=hook):
        with pytest.raises(Oops):
            forward(model, data()).backward()
        assert not any(vars(p) for p in model.parameters())
        fail[0] = False
        for p in model.parameters():
            p.grad = None
        forward(model, batch).backward()
    for p, value in zip(
        model.parameters(),
        oracle.batch_grad(copy.deepcopy(model), nn.CrossEntropyLoss(), *batch),
        strict=True,
    ):
        torch.testing.assert_close(p.grad_batch, value)


def test_retry_after_an_error_with_the_graph_retained() -> None:
    model, batch = mlp(), data()
    loss = forward(model, batch)
    with pytest.raises(ValueError), backpack(extensions.KFLR(subsampling=[99]), retain_graph=True):
        loss.backward(retain_graph=True)
    with backpack(extensions.BatchGrad()):
        loss.backward()
    expected = oracle.batch_grad(copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch, value)


def test_error_in_the_inner_context_restores_the_outer() -> None:
    model, outer = mlp(), extensions.BatchGrad()
    with backpack(outer):
        with pytest.raises(ValueError), backpack(extensions.DiagGGNExact()):
            F.cross_entropy(extend(model)(data()[0]), data()[1]).backward()
        assert tuple(CTX.get_active_exts()) == (outer,)
        forward(model, data()).backward()
    assert all(hasattr(p, "grad_batch") for p in model.parameters())


def test_extension_without_a_kind() -> None:
    """An extension that subclasses the base must say what travels back."""
    model = mlp()
    with pytest.raises(NotImplementedError), backpack(BackpropExtension("x")):
        forward(model, data()).backward()
    assert_clean(model)


@pytest.mark.parametrize(
    "module, shape",
    [
        (nn.PixelShuffle(2), (4, 2, 2)),
        (nn.PixelUnshuffle(2), (1, 4, 4)),
        (nn.Fold((3, 3), 2), (8, 4)),
        (nn.Unfold(2), (4, 3, 3)),
        (nn.ZeroPad2d((1, 1, 1, 0)), (4, 4)),
        (nn.ConstantPad1d((0, 2), 1.0), (4,)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("ext", [extensions.BatchGrad, extensions.DiagGGNExact])
def test_spatial_modules_without_a_batch_axis(module: nn.Module, shape: Any, ext: Any) -> None:
    model = extend(nn.Sequential(nn.PReLU(), module, nn.Flatten(0)))
    prediction = model(torch.randn(shape))
    loss = extend(nn.MSELoss())(prediction, torch.zeros_like(prediction))
    name = type(module).__name__
    match = rf"'1' \({name}\).* without a batch axis"
    with pytest.raises(ValueError, match=match), backpack(ext()):
        loss.backward()


def test_convolution_of_a_parameter_without_a_batch_axis() -> None:
    class Filtered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.signal, self.conv = nn.Parameter(torch.randn(1, 6)), nn.Conv1d(1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.conv(self.signal).flatten()

    model, loss = extend(Filtered(), use_converter=True), extend(nn.MSELoss())
    match = r"'conv' \(Conv1d\).* without a batch axis"
    with pytest.raises(ValueError, match=match), backpack(extensions.BatchGrad()):
        loss(model(torch.rand(N, 8)), torch.zeros(N, 8)).backward()

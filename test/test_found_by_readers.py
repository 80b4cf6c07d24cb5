"""Programs in which readers of the code found something wrong, or a strange error."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from backpack import assign_samples, backpack, extend, extensions
from backpack.core.derivatives import check_rule
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.record.layout import Layout
from backpack.core.record.registry import derivatives_of
from backpack.custom_module.graph_utils import ConversionError
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.hbp import LossHessianStrategy
from backpack.extensions.secondorder.sqrt_ggn.activations import SqrtGGNTanh
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule
from backpack.extensions.secondorder.sqrt_ggn.losses import SqrtGGNCrossEntropyLoss, SqrtGGNMSELoss
from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import vjp
from backpack.influence import Influence, ProjectedInfluence, TracIn
from backpack.laplace import Laplace
from backpack.linalg import (
    EKFAC,
    GGN,
    NTK,
    DiagonalGGN,
    DiagonalOperator,
    EigenOperator,
    EmpiricalFisher,
    FisherMC,
    GGNSpectrum,
    Hessian,
    Jacobian,
    KroneckerGGN,
    curvature,
    logdet,
    spectral_density,
)
from backpack.optim import DPSGD, KFAC, SOAP, collate_empty_too
from backpack.utils.subsampling import subsample

N = 4
TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}


@pytest.fixture(autouse=True)
def float64() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 3), torch.randint(2, (N,))


# ------------------------------------------------------------------ the engine


class Unused(nn.Module):
    """Is in no network."""


class Doubled(nn.Module):
    """Has a rule of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class DoubledRule(ModuleExtension):
    """Twice the columns."""

    def backpropagate(
        self, ext: Any, module: nn.Module, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Any:
        return 2 * bpQuantities


@pytest.mark.parametrize("name", ["DiagGGNExact", "KFLR", "SqrtGGNExact", "BatchDiagGGNExact"])
def test_rules_of_users_where_samples_mix(name: str) -> None:
    """One that is not used changes nothing; one that is cannot see the columns of a sample."""
    model, (X, y), found = normalised(), batch(), []
    for kind in (None, Unused, Doubled):
        ext = getattr(extensions, name)()
        own = copy.deepcopy(model)
        if kind is not None:
            ext.set_module_extension(kind, DoubledRule())
        if kind is Doubled:
            own.insert(3, Doubled())
        loss = extend(nn.CrossEntropyLoss())(extend(own)(X), y)
        if kind is Doubled:
            with backpack(ext), pytest.raises(NotImplementedError, match=r"Doubled.*mixes"):
                loss.backward()
            continue
        with backpack(ext):
            loss.backward()
        found.append([getattr(p, ext.savefield) for p in own.parameters()])
    assert_close(*found)


class Scaled(nn.Module):
    """Has a parameter, and rules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScaledRoot(ModuleExtension):
    """Saves a square root of the GGN."""

    def __init__(self) -> None:
        super().__init__(["weight"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Any:
        return bpQuantities * module.input0

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Any:
        return bpQuantities * module.weight


class ScaledFactors(ScaledRoot):
    """Saves Kronecker factors."""

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Any:
        root = super().weight(ext, module, g_inp, g_out, bpQuantities).flatten(0, 1)
        return [root.T @ root]


class RootOfLinear(SqrtGGNBaseModule):
    """Saves a square root of the GGN."""

    def __init__(self) -> None:
        super().__init__(LinearDerivatives(), ["weight", "bias"])


class OwnRoot(SecondOrderBackpropExtension):
    """An extension that is made of parts of the library."""

    def __init__(self) -> None:
        rules: dict[Any, Any] = {nn.Linear: RootOfLinear(), Scaled: ScaledRoot()}
        rules |= {nn.Tanh: SqrtGGNTanh(), nn.MSELoss: SqrtGGNMSELoss()}
        super().__init__("own_root", rules | {nn.CrossEntropyLoss: SqrtGGNCrossEntropyLoss()})

    def get_loss_hessian_strategy(self) -> str:
        return LossHessianStrategy.EXACT


class Heads(nn.Module):
    """Two predictions, of which one is the other one's input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*mlp(), Scaled())
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        classes = self.body(x)
        return classes, self.head(classes)


@pytest.mark.parametrize("kind", ["SqrtGGNExact", "KFLR", "own"])
@pytest.mark.parametrize("has_heads", [False, True])
def test_rules_of_users_with_two_losses(kind: str, has_heads: bool) -> None:
    """Columns of one loss meet none of the other: a square of their sum has cross terms."""
    model, (X, y) = Heads(), batch()
    extend(model)
    one, other = extend(nn.CrossEntropyLoss()), extend(nn.MSELoss())
    ext = OwnRoot() if kind == "own" else getattr(extensions, kind)()
    if kind != "own":
        ext.set_module_extension(Scaled, ScaledFactors() if kind == "KFLR" else ScaledRoot())
    classes, values = model(X)
    values = values if has_heads else classes
    with backpack(ext, extensions.GGNMP()):
        (one(classes, y) + 3 * other(values, torch.zeros_like(values))).backward()
    for p in model.parameters() if has_heads else model.body.parameters():
        truth = p.ggnmp(torch.eye(p.numel()).reshape(-1, *p.shape)).flatten(1)
        if kind != "KFLR":
            root = getattr(p, ext.savefield).flatten(2).flatten(0, 1)
            assert_close(root.T @ root, truth)
        elif p.dim() == 1:
            assert_close(p.kflr, [truth])


def test_subsampling_where_samples_mix() -> None:
    """A sample may be chosen twice, and has no Hessian of its own."""
    model, (X, y) = extend(normalised()), batch()
    lossfunc, some = extend(nn.CrossEntropyLoss()), [0, 0, 2]
    with backpack(extensions.GGNMP(subsampling=some), extensions.DiagGGNExact(subsampling=some)):
        lossfunc(model(X), y).backward()
    for p in model.parameters():
        units = torch.eye(p.numel()).view(-1, *p.shape)
        diagonal = p.ggnmp(units).flatten(1).diagonal().view_as(p)
        assert_close(diagonal, p.diag_ggn_exact, **TOLERANCE)
    loss = lossfunc(model(X), y)
    with (
        backpack(extensions.HMP(subsampling=some)),
        pytest.raises(NotImplementedError, match="no Hessian"),
    ):
        loss.backward()


@pytest.mark.parametrize("approximation", [None, "expand", "reduce"])
def test_factors_of_some_samples_where_they_mix(approximation: Any) -> None:
    """Those of a weight that is used twice, too."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(self.layer(x)).tanh())

    model, X = extend(Twice(), use_converter=True), torch.randn(N, 3)
    ext = extensions.KFLR([2, 0, 2], approximation=approximation)
    with backpack(ext):
        extend(nn.MSELoss())(model(X), torch.zeros(N, 3)).backward()
    inputs = [X, model.norm(model.layer(X)).tanh().detach()]
    chosen = [x[[2, 0, 2]] for x in inputs]
    if approximation == "reduce":
        mean = sum(chosen) / 2
        truth = mean.T @ mean / 3
    else:
        truth = sum(x.T @ x for x in chosen) / (6 if approximation == "expand" else 3)
    assert_close(model.layer.weight.kflr[1], truth, **TOLERANCE)


@pytest.mark.parametrize("sizes", [(4, 2), (3, 5)])
def test_towers_with_batches_of_other_sizes(sizes: tuple[int, int]) -> None:
    """Each has its samples, also where one size divides the other."""
    towers = [nn.Sequential(nn.Linear(3, 3), nn.Softmax(1), nn.Linear(3, 2)) for _ in sizes]
    data = [(torch.randn(n, 3), torch.randn(n, 2)) for n in sizes]
    lossfunc = extend(nn.MSELoss())
    exts = extensions.KFAC(fisher="inputs"), extensions.BatchDiagHessian()
    with backpack(*exts):
        pairs = zip(towers, data, strict=True)
        sum(lossfunc(extend(t)(X), y) for t, (X, y) in pairs).backward()
    for tower, (X, y) in zip(towers, data, strict=True):
        assert_close(tower[0].weight.kfac[1], X.T @ X / len(X), **TOLERANCE)
        truths = oracle.batch_hessian_diag(copy.deepcopy(tower), nn.MSELoss(), X, y)
        for p, truth in zip(tower.parameters(), truths, strict=True):
            assert_close(p.diag_h_batch, truth, **TOLERANCE)


@pytest.mark.parametrize("sizes", [(4, 6), (31, 32)])
def test_factors_of_a_weight_on_batches_of_other_sizes(sizes: tuple[int, int]) -> None:
    """A sum over all samples, divided by one of the sizes."""
    model, lossfunc = extend(mlp()), extend(nn.MSELoss())
    data = [(torch.randn(n, 3), torch.randn(n, 2)) for n in sizes]
    with backpack(extensions.KFLR()):
        sum(lossfunc(model(X), y) for X, y in data).backward()
    total = sum(X.T @ X for X, _ in data)
    assert_close(total / model[0].weight.kflr[1], torch.full((3, 3), float(min(sizes))))


class ByTwosAndThrees(nn.Module):
    """A layer that reads rows of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(3, 6), nn.Linear(2, 2)
        self.wide = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return self.wide(h.view(-1, 3)), self.layer(h.view(-1, 2))


def test_losses_of_rows_by_twos_and_by_threes() -> None:
    model, X, lossfunc = extend(ByTwosAndThrees()), torch.randn(N, 3), extend(nn.MSELoss())
    outputs = model(X)
    exts = extensions.DiagGGNExact(), extensions.BatchDiagGGNExact(), extensions.BatchGrad()
    with backpack(*exts, extensions.SqrtGGNExact()):
        sum(lossfunc(y, torch.zeros_like(y)) for y in outputs).backward()
    for p in model.first.parameters():
        truth = 0.0
        for y in model(X):
            (J,) = oracle._jacobian(y, [p])
            truth = truth + 2 / y.numel() * J.square().sum(0).view_as(p)
        assert_close(p.diag_ggn_exact, truth, **TOLERANCE)
        assert_close(p.diag_ggn_exact_batch.sum(0), truth, **TOLERANCE)
        assert_close(p.sqrt_ggn_exact.square().sum((0, 1)), truth, **TOLERANCE)
        assert_close(p.grad_batch.sum(0), p.grad, **TOLERANCE)


def test_convolutions_on_batches_of_other_sizes() -> None:
    towers = [nn.Sequential(nn.Conv1d(1, 2, 2), nn.Sigmoid(), nn.Flatten()) for _ in "12"]
    data, lossfunc = [torch.randn(n, 1, 4) for n in (3, 5)], extend(nn.MSELoss())
    with backpack(extensions.BatchDiagHessian()):
        pairs = zip(towers, data, strict=True)
        sum(lossfunc(extend(t)(X), torch.zeros(len(X), 6)) for t, X in pairs).backward()
    for tower, X in zip(towers, data, strict=True):
        truths = oracle.batch_hessian_diag(tower, nn.MSELoss(), X, torch.zeros(len(X), 6))
        for p, truth in zip(tower.parameters(), truths, strict=True):
            assert_close(p.diag_h_batch, truth, **TOLERANCE)


@pytest.mark.parametrize("place", ["last layer", "model", "before"])
def test_hooks_of_modules_around_a_loss_that_is_not_extended(place: str) -> None:
    model, (X, y) = extend(mlp()), batch()
    hooked = model if place == "model" else model[2]
    if place == "before":
        hooked.register_full_backward_pre_hook(lambda module, grads: None)
    else:
        hooked.register_full_backward_hook(lambda module, inputs, outputs: None)
    with backpack(extensions.BatchGrad(), extensions.Variance()):
        F.cross_entropy(model(X), y).backward()
    for p in model.parameters():
        assert_close(p.grad_batch.sum(0), p.grad, **TOLERANCE)


def test_extensions_with_tensors_among_their_options() -> None:
    one, other = (extensions.ClippedGrad(1.0, weights=torch.rand(N)) for _ in "12")
    with pytest.raises(ValueError, match="one savefield"):
        backpack(one, other)


def test_linear_combinations_of_losses_by_a_matrix(recwarn: Any) -> None:
    model, (X, y), lossfunc = extend(mlp()), batch(), extend(nn.CrossEntropyLoss())
    losses = torch.stack([lossfunc(model(X), y), lossfunc(model(2 * X), y)])
    with backpack(extensions.DiagGGNExact()):
        (losses @ torch.rand(2, 1)).sum().backward()
    assert not [w for w in recwarn if "modified" in str(w.message)]


def test_samples_of_a_large_output_that_is_computed_again() -> None:
    """Whether a module acts on samples alone does not depend on what was kept."""

    class Tied(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(size, 3), nn.Linear(3, size, bias=False)
            self.layer, self.head.weight = nn.Linear(3, 3), self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.table(x)).tanh())

    for size in (63, 64):  # one output is kept, the other one is not
        model, lossfunc = extend(Tied(size)), extend(nn.CrossEntropyLoss(reduction="sum"))
        X, y = torch.randint(size, (16, 64)), torch.randint(size, (16 * 64,))
        with backpack(extensions.HMP(subsampling=[2, 0, 2])):
            lossfunc(model(X).reshape(-1, size), y).backward()
        p = model.table.weight
        assert p.hmp(torch.rand(1, *p.shape)).isfinite().all()


@pytest.mark.parametrize("distance", [1e-3, 3e-4])
def test_bound_of_gradients_that_nearly_cancel(distance: float) -> None:
    """Norms of sums that are much shorter than their terms are those of the products."""

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return h[:, 0] - h[:, 1]

    X = torch.randn(3, 1, 64) + distance * torch.randn(3, 2, 64)
    model, y = Difference().float(), torch.full((3, 64), 1e4)
    exts = extensions.ClippedGrad(1.0), extensions.BatchL2Grad(), extensions.BatchGrad()
    extended, lossfunc = extend(model, use_converter=True), extend(nn.MSELoss(reduction="sum"))
    with backpack(*exts[:2]):
        lossfunc(extended(X.float()), y.float()).backward()
    norms = extended.layer.weight.batch_l2
    with backpack(exts[2]):
        lossfunc(extended(X.float()), y.float()).backward()
    truth = extended.layer.weight.grad_batch.double().flatten(1).square().sum(1)
    assert_close(norms.double(), truth, rtol=1e-4, atol=0.0)


# ------------------------------------------------------------------ rules


class Average(nn.Module):
    """Keeps averages: as a frozen parameter, an attribute, and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.own, self._hist = torch.zeros(()), [0.0]
        self.log: dict[str, list[float]] = {"means": []}
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean()
        with torch.no_grad():
            self.frozen.mul_(0.9).add_(0.1 * mean)
            self.own.mul_(0.9).add_(0.1 * mean)
        self._hist.append(float(mean))
        self.log["means"].append(float(mean))
        torch.rand(1, generator=self.generator)
        return x.sin()


def test_what_a_module_without_a_rule_changes() -> None:
    """It is that of one forward pass, however often the library evaluates the module."""
    model, (X, y) = nn.Sequential(nn.Linear(3, 3), Average(), nn.Linear(3, 2)), batch()
    plain = copy.deepcopy(model)
    plain(X)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(extend(model)(X), y).backward()
    mine, other = model[1], plain[1]
    assert_close((mine.frozen, mine.own), (other.frozen, other.own))
    assert (mine._hist, mine.log) == (other._hist, other.log)
    assert torch.equal(mine.generator.get_state(), other.generator.get_state())


def test_leaves_that_share_memory_in_attention() -> None:
    """A query that requires a gradient is no key, with whose memory it is."""
    attention, found = nn.MultiheadAttention(4, 2, batch_first=True), []
    q, direction = torch.randn(2, 3, 4), None
    for is_copied in (False, True):
        leaf = q.clone().requires_grad_()
        key = leaf.detach().clone() if is_copied else leaf.detach()
        output = extend(attention)(leaf, key, key, need_weights=False)[0]
        with backpack(extensions.BatchGrad()):
            output.square().sum().backward(create_graph=True)
        each = attention.in_proj_weight.grad_batch
        direction = torch.randn_like(each) if direction is None else direction
        found.append(torch.autograd.grad((each * direction).sum(), leaf)[0])
    assert_close(*found, **TOLERANCE)


def test_losses_of_several_predictions_behind_functions() -> None:
    class Evidence(nn.Module):
        def forward(self, r: Tensor, x: Tensor, mu: Tensor, logs: Tensor) -> Tensor:
            return (r - x).square().sum() / N + (mu.square() + logs.exp() - logs).sum() / N

    nets, X = [nn.Linear(3, 4) for _ in range(3)], torch.randn(N, 3)

    def total(loss: nn.Module, r: Tensor, mu: Tensor, logs: Tensor) -> Tensor:
        return loss(r.view(N, 2, 2).sigmoid(), torch.zeros(N, 2, 2), mu, logs)

    with backpack(extensions.DiagHessian()):
        total(extend(Evidence()), *[extend(net)(X) for net in nets]).backward()
    for i, net in enumerate(nets):

        def function(weight: Tensor, i: int = i) -> Tensor:
            outputs = [net(X) for net in nets]
            outputs[i] = X @ weight.T + nets[i].bias
            return total(Evidence(), *outputs)

        hessian = torch.autograd.functional.hessian(function, net.weight.detach())
        truth = hessian.reshape(12, 12).diagonal().view_as(net.weight)
        assert_close(net.weight.diag_h, truth, **TOLERANCE)


def test_check_rule_with_samples_along_another_axis() -> None:
    check_rule(nn.GRU(2, 3), torch.randn(5, 3, 2))
    check_rule(nn.GRU(2, 3), torch.randn(1, 3, 2))


@pytest.mark.parametrize(
    ("module", "inputs", "words"),
    [
        (nn.PReLU(2), (torch.rand(4, 5, 2),), r"PReLU.*\[\[4, 5, 2\]\], which has failed"),
        (nn.MultiMarginLoss(), (torch.rand(4, 3, 2), torch.ones(4, 2).long()), r"\[4, 3, 2\], \[4"),
        (nn.MultiMarginLoss(reduction="none"), (torch.rand(4, 3), torch.arange(4) % 3), "scalar"),
    ],
    ids=["axis of channels", "axes of predictions", "reduction"],
)
def test_calls_that_no_rule_is_about(module: nn.Module, inputs: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_rule(module, *inputs)


# ------------------------------------------------------------------ conversion


class Whole(nn.Module):
    """Runs a function."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.w, self.function = nn.Parameter(torch.rand(4)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.lin(x)))


def change_behind_einsum(m: Any, h: Tensor) -> Tensor:
    torch.einsum("ni->in", h).add_(1)
    return h.sigmoid()


def change_by_name(m: Any, h: Tensor) -> Tensor:
    torch.relu_(input=h)
    return h.sin()


def experts(m: Any, h: Tensor) -> Tensor:
    out, none = torch.zeros_like(h), h[:, 0] > 1e6
    out[~none] = h[~none].sin()
    out[none] = h[none] * m.w + m.w
    return out


def new_axes(m: Any, h: Tensor) -> Tensor:
    h = h[:, :4]
    h.unsqueeze_(1)
    return h.squeeze(1).sigmoid()


@pytest.mark.parametrize("function", [change_behind_einsum, change_by_name, experts, new_axes])
@pytest.mark.parametrize("converter", ["trace", "record"])
def test_functions_that_change_or_choose(converter: str, function: Any) -> None:
    model, (X, y) = Whole(function), batch()
    plain, told = copy.deepcopy(model), None
    try:
        extended = extend(model, use_converter=converter)
    except ConversionError as error:
        told = str(error)
    if converter == "trace" and function is change_behind_einsum:
        assert told is not None and "changes a tensor in place that shares its memory" in told
        return
    assert told is None
    loss = extend(nn.CrossEntropyLoss())(extended(X), y)
    truth = oracle.batch_grad(plain, nn.CrossEntropyLoss(), X, y)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    assert_close(loss, nn.CrossEntropyLoss()(plain(X), y))
    diagonals = oracle.ggn_diag(plain, nn.CrossEntropyLoss(), X, y)
    names = [name for name, p in plain.named_parameters() if p.requires_grad]
    params = dict(extended.named_parameters())
    for name, each, diagonal in zip(names, truth, diagonals, strict=True):
        if name != "w" or function is experts:
            assert_close(params[name].grad_batch, each, **TOLERANCE)
            assert_close(params[name].diag_ggn_exact, diagonal, **TOLERANCE)


def test_changes_of_what_einsum_has_computed() -> None:
    """A product has its own memory, and methods that forward does not call are not looked at."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def fit(self) -> bool:
            return self.training is True

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            y = torch.einsum("ni,ni->ni", h, x)
            y += 1
            return y + h

    model, X = Model(), torch.randn(N, 3)
    assert_close(extend(copy.deepcopy(model), use_converter="trace")(X), model(X))


def test_mode_compared_by_identity_in_a_method() -> None:
    class Model(nn.Linear):
        def act(self, h: Tensor) -> Tensor:
            return h.sin() if self.training is True else h.cos()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(F.linear(x, self.weight))

    with pytest.raises(ConversionError, match="by identity"):
        extend(nn.Sequential(Model(3, 3)), use_converter="trace")


def test_a_hook_that_raises_before_a_recorded_leaf() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.bad = nn.Linear(3, 2), nn.Linear(3, 3)
            self.w = nn.Parameter(torch.rand(2))

        def forward(self, x: Tensor) -> Tensor:
            with suppress(KeyError):
                x = self.bad(x)
            return self.lin(x) * self.w

    def fails(module: nn.Module, args: Any) -> None:
        raise KeyError

    model, (X, y) = Model(), batch()
    model.bad.register_forward_pre_hook(fails)
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(extend(model, use_converter="record")(X), y).backward()
    assert_close(model.w.grad_batch.sum(0), model.w.grad)


# ------------------------------------------------------------------ operators


def test_hooks_of_users_do_not_see_passes_of_the_library() -> None:
    """An optimiser that steps in the backward pass is not called, and gradients are not changed."""
    model, lossfunc, data = mlp(), nn.CrossEntropyLoss(), [batch(), batch()]
    truth = DiagonalGGN(model, lossfunc, data, progress=False).diagonal()
    of_ggn = GGN(model, lossfunc, data, progress=False).to_dense()
    before, called = copy.deepcopy(model.state_dict()), []

    def step(p: Tensor) -> None:
        called.append(p)
        p.grad = None

    for p in model.parameters():
        p.grad = torch.ones_like(p)
        p.register_post_accumulate_grad_hook(step)
        p.register_hook(lambda grad: 2 * grad)
    assert_close(DiagonalGGN(model, lossfunc, data, progress=False).diagonal(), truth)
    assert_close(GGN(model, lossfunc, data, progress=False).to_dense(), of_ggn)
    KroneckerGGN(model, lossfunc, data, progress=False)
    EKFAC(model, lossfunc, data, progress=False)
    GGNSpectrum(model, lossfunc, data[0])
    NTK(model, data[0][0]).traced()
    Influence(model, lossfunc, data, damping=1e-2, progress=False).scores(data)
    assert not called
    assert_close(model.state_dict(), before)
    assert all((p.grad == 1).all() for p in model.parameters())
    with backpack(extensions.BatchGrad(), gradients=False):
        extend(lossfunc)(extend(model)(data[0][0]), data[0][1]).backward()
    assert not called


def test_products_in_inference_mode() -> None:
    model, (X, y) = mlp(), batch()
    loss, params = nn.CrossEntropyLoss()(model(X), y), [*model.parameters()]
    vectors = [torch.rand_like(p) for p in params]
    expected = hessian_vector_product(loss, params, vectors)
    with torch.inference_mode():
        assert_close(hessian_vector_product(loss, params, vectors), expected)


@pytest.mark.parametrize("is_outside", [True, False])
def test_backward_passes_in_inference_mode(is_outside: bool) -> None:
    """Plain autograd computes gradients there, too."""
    model, (X, y) = mlp(), batch()
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    params = [*model.parameters()]
    alone = [
        torch.autograd.grad(lossfunc(model(x[None]), t[None]), params)
        for x, t in zip(X, y, strict=True)
    ]
    loss = extend(lossfunc)(extend(model)(X), y)
    exts = extensions.BatchGrad(), extensions.DiagHessian()
    modes = [torch.inference_mode(), backpack(*exts)]
    with modes[not is_outside], modes[is_outside]:
        loss.backward()
    with torch.no_grad():
        for p, *rows in zip(params, *alone, strict=True):
            assert_close(p.grad, sum(rows))
            assert_close(p.grad_batch, torch.stack(rows))
            p.grad.zero_()  # what comes next may change it
    for p in params:
        gradient = torch.autograd.grad(lossfunc(model(X), y), p, create_graph=True)[0].flatten()
        second = [torch.autograd.grad(g, p, retain_graph=True)[0].flatten() for g in gradient]
        assert_close(p.diag_h.flatten(), torch.stack(second).diagonal())


def test_gradients_of_a_layer_that_sees_no_positions() -> None:
    """Those of a layer at positions of which there are none are zero, as in plain autograd."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers without entries are not initialised
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(0, 3))
    exts = extensions.DiagGGNExact(), extensions.BatchDiagGGNExact(), extensions.DiagHessian()
    with backpack(*exts, extensions.SumGradSquared()):
        loss = extend(nn.CrossEntropyLoss())(
            extend(model)(torch.rand(N, 0, 3)), torch.arange(N) % 3
        )
        loss.backward()
    for p in model[0].parameters():
        assert not p.grad.any() and not p.diag_ggn_exact.any() and not p.diag_h.any()
        assert_close(p.diag_ggn_exact_batch, torch.zeros(N, *p.shape))
    diagonal = torch.softmax(model(torch.rand(N, 0, 3)), 1)
    assert_close(model[3].bias.diag_ggn_exact, (diagonal - diagonal.square()).mean(0))


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("lossfunc", [nn.MSELoss(), nn.L1Loss(reduction="sum")])
def test_predictions_without_entries(lossfunc: nn.Module) -> None:
    """They ended in an error of Python or torch about zero."""
    model = extend(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 0)))
    loss = extend(lossfunc)(model(torch.rand(N, 3)), torch.rand(N, 0))
    with backpack(extensions.BatchGrad(), extensions.HMP(), retain_graph=True):
        loss.backward(retain_graph=True)
    for p in model[0].parameters():
        vectors = torch.ones(2, *p.shape)
        assert_close(p.hmp(vectors), 0 * vectors)
        assert_close(p.grad_batch, torch.zeros(N, *p.shape))
    with (
        backpack(extensions.DiagGGNExact()),
        pytest.raises(ValueError, match=rf"shape \[{N}, 0\] has no entries"),
    ):
        loss.backward()


@pytest.mark.parametrize("is_outside", [True, False])
def test_first_order_in_inference_mode(is_outside: bool) -> None:
    """It was an AttributeError from the second step on."""
    model, (X, y) = extend(mlp()), batch()
    lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
    loss = lossfunc(model(X), y)
    with backpack(extensions.BatchGrad()):
        loss.backward()
    expected = [p.grad_batch for p in model.parameters()]
    model.zero_grad()
    loss = lossfunc(model(X), y)
    modes = [torch.inference_mode(), backpack(extensions.BatchGrad())]
    with modes[not is_outside], modes[is_outside]:
        if is_outside:
            loss.backward()
            assert_close([p.grad_batch for p in model.parameters()], expected)
        else:
            with pytest.raises(RuntimeError, match="enter the context"):
                loss.backward()


def test_blocks_of_a_generator() -> None:
    model, (X, y) = extend(mlp()), batch()
    with backpack(extensions.EKFAC()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    blocks = [p.ekfac for p in model.parameters()]
    assert_close(EigenOperator(iter(blocks)).to_dense(), EigenOperator(blocks).to_dense())


@pytest.mark.parametrize("scale", [1e-12, 1e-18])
@pytest.mark.parametrize("which", ["LA", "SA"])
def test_eigenvalues_of_small_matrices(scale: float, which: str) -> None:
    """The accuracy is relative to them."""
    basis, _ = torch.linalg.qr(torch.randn(30, 30))
    matrix = (basis * torch.arange(1.0, 31)) @ basis.T

    class Dense(DiagonalOperator):
        def _matmat(self, vectors: Tensor) -> Tensor:
            return scale * (matrix.float() @ vectors)

    values, _ = Dense(torch.ones(30, dtype=torch.float32)).eigsh(5, which)
    expected = torch.arange(26.0, 31) if which == "LA" else torch.arange(1.0, 6)
    assert_close(values.double() / scale, expected, rtol=1e-3, atol=0.0)


def test_counts_of_many_eigenvalues() -> None:
    density = spectral_density(DiagonalOperator(torch.rand(6_000_000, dtype=torch.float32)))
    counted = density.counts(torch.tensor([-1.0, 2.0]))
    assert_close(counted.value.double(), torch.tensor([6e6]), rtol=1e-6, atol=0.0)


def test_determinants_in_half_precision() -> None:
    size = 100_000
    operator = DiagonalOperator(torch.full((size,), 1.01, dtype=torch.float16))
    true = size * float(torch.tensor(1.01, dtype=torch.float16).double().log())
    assert abs(float(logdet(operator).value) - true) < 1e-2 * true


def test_tangent_kernels_of_samples_with_other_outputs() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    one, other = torch.randn(2, 3, 3), torch.randn(4, 5, 3)

    def jacobian(x: Tensor) -> Tensor:
        rows = model(x).flatten()
        return torch.cat(oracle._jacobian(rows, [*model.parameters()]), 1)

    kernel = NTK(model, one, other)
    assert_close(kernel.to_dense(), jacobian(one) @ jacobian(other).T)
    with pytest.raises(ValueError, match="6 outputs, and others with 10"):
        kernel.traced()


def test_data_that_have_no_batches() -> None:
    with pytest.raises(ValueError, match="TensorDataset has a sample in each item"):
        Jacobian(mlp(), TensorDataset(*batch()))


def test_fisher_of_empty_batches_and_large_seeds() -> None:
    model, data = mlp(), [(torch.randn(N, 3), torch.randn(N, 2))]
    v = torch.rand(sum(p.numel() for p in model.parameters()), 1)
    expected = FisherMC(model, nn.MSELoss(), data, seed=2**62, progress=False) @ v
    empty = torch.randn(0, 3), torch.randn(0, 2)
    with_empty = FisherMC(model, nn.MSELoss(), [*data, empty], seed=2**62, progress=False)
    assert_close(with_empty @ v, expected)


def test_slopes_where_rows_of_samples_merge() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh().view(-1, 4))

    model, X, y = Rows(), torch.randn(2 * N, 3), torch.randint(2, (N,))
    spectrum = GGNSpectrum(model, nn.CrossEntropyLoss(), (X, y))
    losses = nn.CrossEntropyLoss(reduction="none")(model(X), y) / N
    grads = torch.cat(oracle._jacobian(losses, [*model.parameters()]), 1)
    _, vectors = spectrum.eigh()
    assert_close(spectrum.slopes(), grads @ vectors, **TOLERANCE)


@pytest.mark.parametrize("curvature", [GGN, DiagonalGGN, KroneckerGGN])
def test_threads_that_share_a_loss(curvature: Any) -> None:
    lossfunc = nn.CrossEntropyLoss()
    models, data = [mlp() for _ in range(4)], [[batch()] for _ in range(4)]
    size = sum(p.numel() for p in models[0].parameters())
    v = torch.rand(size, 1)

    def product(i: int) -> Tensor:
        return curvature(models[i], lossfunc, data[i], progress=False) @ v

    expected = [product(i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert_close(list(pool.map(product, range(4))), expected)
    assert not hasattr(lossfunc, "_backpack_extend")


@pytest.mark.parametrize("operator", [GGN, Hessian, EmpiricalFisher, FisherMC])
def test_operators_of_embeddings_with_sparse_gradients(operator: Any) -> None:
    X, y, found = torch.randint(7, (N, 2)), torch.randint(2, (N,)), []
    weights = torch.randn(7, 3)
    for is_sparse in (False, True):
        table = nn.Embedding(7, 3, sparse=is_sparse, _weight=weights)
        model, lossfunc = nn.Sequential(table, nn.Flatten(), nn.Tanh()), nn.CrossEntropyLoss()
        matrix = operator(model, lossfunc, [(X, y % 6)])
        output = model(X)
        vectors = torch.eye(21).reshape(-1, 7, 3)
        args = lossfunc(output, y % 6), output, model
        products = [ggn_vector_product(*args, [v])[0].flatten() for v in vectors]
        J = Jacobian(model, [(X, y)])
        found.append([matrix @ torch.eye(21), matrix @ weights.flatten(), J.T @ J.to_dense()])
        found[-1] += products
    assert_close(*found)


class LooksAtGradient(torch.autograd.Function):
    """A square whose backward pass takes a branch, which no vectorised gradients can."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad if grad.abs().max() > 0 else 0 * x * grad


class FailsOnce(torch.autograd.Function):
    """The identity, whose first backward pass is refused by its author."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        FailsOnce.calls += 1
        if FailsOnce.calls == 1:
            raise RuntimeError("The author of this function does not want that.")
        return grad


def test_errors_of_functions_reach_those_who_multiply_several_vectors() -> None:
    """They were taken for functions that cannot be vectorised, and these called again."""
    x = torch.rand(4).requires_grad_()
    y = FailsOnce.apply(x)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="The author of this function") as told:
        vjp((y,), (x,), (torch.rand(3, 4),), several=True)
    assert FailsOnce.calls == 1
    assert told.value.__context__ is None


class TellsOfNumpy(torch.autograd.Function):
    """Twice its input, whose backward pass has words of its own for what torch refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        try:
            return torch.from_numpy(2 * grad.numpy())
        except RuntimeError as error:
            raise RuntimeError("This function needs plain tensors.") from error


def test_functions_that_tell_of_what_cannot_be_vectorised() -> None:
    x, vectors = torch.rand(4).requires_grad_(), torch.rand(3, 4)
    y = TellsOfNumpy.apply(x)  # type: ignore[no-untyped-call]
    (products,) = vjp((y,), (x,), (vectors,), several=True)
    assert torch.equal(products, 2 * vectors)


@pytest.mark.parametrize("is_debugged", [False, True])
def test_products_with_several_vectors_that_cannot_be_vectorised(is_debugged: bool) -> None:
    """Functions that look at gradients, and anomaly detection, which does: one after the other."""
    weight, X, y = torch.randn(3, 4).double(), torch.randn(N, 4).double(), torch.randint(3, (N,))
    lossfunc, square = nn.CrossEntropyLoss(), torch.square if is_debugged else LooksAtGradient.apply

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return square(super().forward(x))  # type: ignore[no-untyped-call]

    model = Model(4, 3, bias=False).double()
    model.weight.data.copy_(weight)

    def output(w: Tensor) -> Tensor:
        return (X @ w.reshape(3, 4).T).square()

    J = torch.autograd.functional.jacobian(output, weight.flatten())
    f = output(weight.flatten())
    H = torch.autograd.functional.hessian(lambda f: lossfunc(f, y), f).flatten(0, 1).flatten(1)
    G = J.flatten(0, 1).T @ H @ J.flatten(0, 1)
    whole = torch.autograd.functional.hessian(lambda w: lossfunc(output(w), y), weight.flatten())
    eye = torch.eye(12).double()
    with torch.autograd.set_detect_anomaly(is_debugged):
        assert_close(GGN(model, lossfunc, [(X, y)]) @ eye, G)
        assert_close(Hessian(model, lossfunc, [(X, y)]) @ eye, whole)
        assert (GGN(model, lossfunc, [(X, y)]) @ eye[:, :0]).shape == (12, 0)
        jacobian = Jacobian(model, [X])
        assert_close(jacobian @ eye, J.flatten(0, 1))
        assert_close(jacobian.T @ torch.eye(3 * N).double(), J.flatten(0, 1).T)


def test_several_vectors_of_a_graph_that_is_not_kept() -> None:
    """The attempt to multiply them at once had let go of a part of it."""
    x = torch.randn(3).double().requires_grad_()
    y = LooksAtGradient.apply(x.exp()).sin()  # type: ignore[no-untyped-call]
    eye = torch.eye(3).double()
    (product,) = vjp((y,), (x,), (eye,), retain_graph=False, several=True)
    assert_close(product, (2 * (2 * x).exp() * (2 * x).exp().cos()).diag().detach())


@pytest.mark.parametrize(("size", "k"), [(1, 1), (4, 4), (4, 1.5)])
def test_a_number_of_eigenpairs_that_there_are_not(size: int, k: Any) -> None:
    with pytest.raises(ValueError, match=rf"DiagonalOperator.*less than P, got {k}"):
        DiagonalOperator(torch.ones(size)).eigsh(k)


class WithoutOutputs(nn.Module):
    """Has a layer whose weight and bias have no entries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(3, 2), nn.Linear(2, 0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return torch.cat([h, self.empty(h)], 1)


@pytest.mark.parametrize("options", [{}, {"joint_bias": True}, {"approximation": "expand"}])
@pytest.mark.parametrize("operator", [KroneckerGGN, EKFAC])
def test_operators_of_parameters_without_entries(operator: Any, options: dict[str, Any]) -> None:
    model, data = WithoutOutputs(), [batch()]
    found, expected = (
        operator(each, nn.CrossEntropyLoss(), data, fisher="exact", **options)
        for each in (model, model.layer)
    )
    assert_close(found.to_dense(), expected.to_dense())
    vector = torch.randn(8)
    for one, other in [(found, expected), (found.plus_diagonal(torch.ones(8)), expected.damped(1))]:
        assert_close(one.solve(vector, 0.1), other.solve(vector, 0.1))


def test_eigenvalues_of_parameters_without_entries() -> None:
    model, (X, y) = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2)), batch()
    extend(model)
    with backpack(extensions.EKFAC(), extensions.KFAC(fisher="inputs")):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    for p in model.parameters():
        assert p.ekfac.eigenvalues.shape == p.shape
        assert_close(p.ekfac.solve(torch.zeros(5, *p.shape), 0.1), torch.zeros(5, *p.shape))
        assert len(p.kfac[0]) == len(p)


# ------------------------------------------------------------------ Laplace and influence


class LowRank(nn.Module):
    """A weight and a product of small matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(2, 1)), nn.Parameter(torch.rand(1, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


@pytest.mark.parametrize("kind", ["token", "norm", "low rank", "behind"])
def test_parameters_of_the_last_layer(kind: str) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.body, self.head = nn.Parameter(torch.rand(3)), nn.Linear(3, 3), None
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x + self.token).tanh())

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.weight = nn.Linear(3, 3), nn.Parameter(torch.rand(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).tanh() @ self.weight

    model: Any = {"token": Root, "behind": Behind}.get(kind, mlp)()
    head = model.head if kind == "token" else model if kind == "behind" else model[2]
    if kind == "norm":
        parametrizations.weight_norm(head)
    if kind == "low rank":
        parametrize.register_parametrization(head, "weight", LowRank())
    own = [model.weight] if kind == "behind" else list(head.parameters())
    posterior = Laplace(model, nn.CrossEntropyLoss(), [batch()], params="last", progress=False)
    assert set(map(id, posterior._objective.params)) == set(map(id, own))


def test_projected_influence_in_single_precision() -> None:
    """There are fewer samples than directions: rounding must not exceed the damping."""
    model, data = mlp(), [(torch.randn(N, 3), 30 * torch.randn(N, 2))]
    projection, found = extensions.ProjectedGrad(64), []
    for dtype in (torch.float64, torch.float32):
        own = copy.deepcopy(model).to(dtype)
        batches = [tuple(x.to(dtype) for x in pair) for pair in data]
        influence = ProjectedInfluence(own, nn.MSELoss(), batches, projection, progress=False)
        found.append(influence.scores(batches).double())
        influence.damping = 10.0
        other = ProjectedInfluence(own, nn.MSELoss(), batches, projection, 10.0, progress=False)
        assert_close(influence.scores(batches), other.scores(batches))
    assert (found[0] - found[1]).norm() < 1e-3 * found[0].norm()


def test_a_damping_of_numpy_is_saved(tmp_path: Path) -> None:
    model, data, lossfunc = mlp(), [batch()], nn.CrossEntropyLoss()
    influence = Influence(model, lossfunc, data, damping=np.logspace(-2, 0, 3)[1], progress=False)
    influence.save(tmp_path / "curvature")
    loaded = Influence.load(tmp_path / "curvature", model, lossfunc, data, progress=False)
    assert_close(loaded.scores(data), influence.scores(data))


def test_factored_gradients_of_layers_with_parts_are_pickled() -> None:
    layer = extend(nn.Bilinear(3, 3, 4))
    with backpack(extensions.BatchGrad(factored=True)):
        layer(torch.randn(N, 3), torch.randn(N, 3)).sum().backward()
    g: Any = layer.weight.grad_batch
    assert_close(pickle.loads(pickle.dumps(g)).dense(), g.dense())


def test_factored_gradients_in_autocast() -> None:
    model = extend(nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 2)).float())
    X = torch.randn(N, 30, dtype=torch.float32)
    with backpack(extensions.BatchGrad(factored=True)):
        model(X).sum().backward()
    g: Any = model[0].weight.grad_batch
    w = torch.rand(N, dtype=torch.float32)
    expected = g.gram(), g.weighted_sum(w), g.dot(g)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close((g.gram(), g.weighted_sum(w), g.dot(g)), expected)


# ------------------------------------------------------------------ optimisers


def private(params: Any, **options: Any) -> DPSGD:
    return DPSGD(
        params,
        **{
            "lr": 0.1,
            "max_grad_norm": 1.0,
            "noise_multiplier": 1.0,
            "expected_batch_size": N,
            **options,
        },
    )


class Transposed(nn.Module):
    """A transposed convolution as a function."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.kernel = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(x, self.kernel).flatten(1)


@pytest.mark.parametrize("ekfac", [False, True])
@pytest.mark.parametrize("converter", ["trace", "record"])
def test_kfac_of_transposed_kernels_in_functions(converter: str, ekfac: bool) -> None:
    layer, X, steps = nn.ConvTranspose1d(3, 3, 2, bias=False), torch.randn(N, 3, 4), []
    for model, conversion in (
        (nn.Sequential(copy.deepcopy(layer), nn.Flatten()), False),
        (Transposed(layer.weight.detach()), converter),
    ):
        (p,) = model.parameters()
        extended = extend(model, use_converter=conversion)
        optimiser = KFAC(
            [p],
            lr=1.0,
            damping=0.1,
            betas=(0, 0),
            kl_clip=None,
            extension=extensions.KFLR(),
            ekfac=ekfac,
        )
        with backpack(*optimiser.extensions):
            extend(nn.MSELoss())(extended(X), torch.zeros(N, 15)).backward()
        optimiser.step()
        steps.append(p.detach())
    assert_close(*steps)


def test_kfac_of_weights_whose_biases_have_other_modules() -> None:
    """A backward pass knows which weight a bias is joined with; names of attributes do not."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.linear(x, self.a.weight, self.b.bias).tanh()
            return F.linear(h, self.b.weight, self.a.bias)

    crossed, X, found = Crossed(), torch.randn(N, 3), []
    straight = nn.Sequential(copy.deepcopy(crossed.a), nn.Tanh(), copy.deepcopy(crossed.b))
    straight[0].bias.data, straight[2].bias.data = (
        crossed.b.bias.data.clone(),
        crossed.a.bias.data.clone(),
    )
    for model, converter in ((straight, False), (crossed, "record")):
        extended = extend(model, use_converter=converter)
        optimiser = KFAC(model.parameters(), extension=extensions.KFLR(joint_bias=True))
        with backpack(*optimiser.extensions):
            extend(nn.MSELoss())(extended(X), torch.zeros(N, 3)).backward()
        optimiser.step()
        found.append(extended(X).detach())
    assert_close(*found)


def test_steps_without_gradients_are_told() -> None:
    model, (X, y), lossfunc = extend(mlp()), batch(), extend(nn.CrossEntropyLoss())
    for optimiser in (private(model.parameters()), KFAC(model.parameters())):
        with backpack(*optimiser.extensions, gradients=False):
            lossfunc(model(X), y).backward()
        with pytest.raises(RuntimeError, match="gradients=False"):
            optimiser.step()
        optimiser.zero_grad()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_sample_that_is_not_finite_hides_no_other(value: float) -> None:
    model, (X, _), lossfunc = extend(mlp()), batch(), extend(nn.CrossEntropyLoss())
    optimiser = private(model.parameters())
    X[1, 0], y = value, torch.tensor([0, 1, 1, 0])
    with backpack(*optimiser.extensions):
        (lossfunc(model(X), y) * y.double().mean()).backward()
    with pytest.raises(ValueError, match="functions that read"):
        optimiser.step()


def test_numbers_of_a_batch_with_a_sample_that_is_not_finite() -> None:
    model, (X, y), lossfunc = extend(mlp()), batch(), extend(nn.CrossEntropyLoss())
    X[1, 0] = float("nan")
    optimiser = private(model.parameters())
    with backpack(*optimiser.extensions):
        lossfunc(model(X) * X.nan_to_num().mean().item(), y).backward()
    with pytest.raises(
        ValueError, match=rf"numbers taken before.*\(item at {Path(__file__).name}:"
    ):
        optimiser.step()


def test_private_steps_of_two_models_with_batches_of_their_own() -> None:
    models = [extend(mlp()), extend(mlp())]
    params = [p for model in models for p in model.parameters()]
    optimiser = private(params, per="parameter")
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(*optimiser.extensions):
        sum(
            lossfunc(model(torch.randn(n, 3)), torch.randint(2, (n,)))
            for model, n in zip(models, (6, 4), strict=True)
        ).backward()
    optimiser.step()


def test_an_error_after_the_backward_pass_of_a_private_step() -> None:
    """What the pass has read is looked at all the same."""
    model, (X, y), lossfunc = extend(mlp()), batch(), extend(nn.CrossEntropyLoss())
    optimiser = private(model.parameters())
    with suppress(KeyError), backpack(*optimiser.extensions):
        (lossfunc(model(X), y) * X.mean()).backward()
        raise KeyError
    with pytest.raises(ValueError, match="functions that read"):
        optimiser.step()


def test_the_extension_of_an_optimiser_beside_another_one() -> None:
    model, (X, y) = extend(mlp()), batch()
    optimiser = KFAC(model.parameters())
    with backpack(extensions.KFAC(), *optimiser.extensions):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    optimiser.step()


def test_private_steps_of_models_that_name_a_precision_in_autocast() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3, dtype=torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x.bfloat16())
            weights = torch.softmax(h, 1, dtype=torch.float32).to(h.dtype)
            return weights @ h.new_ones(3, 2)

    model, (X, y) = extend(Model(), use_converter="record"), batch()
    optimiser = private(model.parameters())
    with torch.autocast("cpu", torch.bfloat16), backpack(*optimiser.extensions):
        loss = extend(nn.CrossEntropyLoss())(model(X.float()), y)
        loss.backward()
    optimiser.step()


def test_a_forward_pass_that_fails_keeps_nothing() -> None:
    model, (X, _) = extend(mlp()), batch()
    optimiser = private(model.parameters())
    with pytest.raises(KeyError), backpack(*optimiser.extensions):
        model(X)
        raise KeyError
    assert not optimiser.extension.program.seen


def test_states_that_hooks_change_or_that_others_load() -> None:
    model = mlp()
    soap = SOAP(model.parameters())
    for _ in range(2):
        model(torch.randn(N, 3)).sum().backward()
        soap.step()

    def later(optimiser: Any, state: Any) -> Any:
        return {**state, "state": {k: {**v, "step": 99} for k, v in state["state"].items()}}

    soap.register_load_state_dict_pre_hook(later)
    soap.load_state_dict(soap.state_dict())
    assert {state["step"] for state in soap.state.values()} == {99}
    wrapper = private(model.parameters(), max_grad_norm=0.5)
    wrapper.register_load_state_dict_pre_hook(lambda _, state: {**state, "max_grad_norm": 7.0})
    wrapper.load_state_dict(wrapper.state_dict())
    assert wrapper.max_grad_norm == 7.0
    wrapper.optimizer.load_state_dict(wrapper.optimizer.state_dict())
    with pytest.raises(RuntimeError, match="other groups of parameters"):
        wrapper.step()


def test_masks_of_tensors_and_batches_with_numbers() -> None:
    with pytest.raises(ValueError, match="integer indices"):
        subsample(torch.arange(3), 0, list(torch.tensor([True, False, True])))
    data = TensorDataset(torch.rand(3, 2))

    def collate(samples: list[Any]) -> Any:
        return torch.stack([x for (x,) in samples]), torch.tensor(float(len(samples)))

    X, _ = collate_empty_too(data, collate)([])
    assert X.shape == (0, 2)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "array": lambda m: m.array.__iadd__(1),
    "array in a dictionary": lambda m: m.nested["array"].__iadd__(1),
    "tensor in lists": lambda m: m.nested["lists"][0][0].add_(1),
    "tensor in a tuple": lambda m: m.pair[0].add_(1),
    "list in a tuple": lambda m: m.pair[1].append(1),
    "bytes": lambda m: m.bytes.append(1),
    "generator of NumPy": lambda m: m.generator.random(),
    "older generator of NumPy": lambda m: m.generators[0].rand(),
    "generator of Python": lambda m: m.generators[1].random(),
    "generator of torch": lambda m: torch.rand(1, generator=m.generators[2]),
    "number": lambda m: setattr(m, "number", m.number + 1),
}


class Stateful(nn.Module):
    """A module without a rule that changes what it has in each forward pass."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight, self.change, self.number = nn.Parameter(torch.rand(3)), change, 0
        self.array, self.bytes = np.zeros(2), bytearray()
        self.nested = {"array": np.zeros(2), "lists": [[torch.zeros(2)]]}
        self.pair = torch.zeros(2), [0]
        self.generator = np.random.default_rng(0)
        self.generators = [np.random.RandomState(0), random.Random(0), torch.Generator()]

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return (self.weight * x).sin()

    def state(self) -> str:
        of_numpy, of_python, of_torch = self.generators
        states = (
            *(self.array, self.bytes, self.nested, self.pair, self.number, of_torch.get_state()),
            *(self.generator.bit_generator.state, of_numpy.get_state(), of_python.getstate()),
        )
        return str(states)


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_state_of_modules_without_a_rule_changes_once(change: str, has_hook: bool) -> None:
    """As in plain PyTorch, also where hooks of all modules are called."""
    X, calls = torch.rand(N, 3), []
    plain = Stateful(CHANGES[change])
    model = copy.deepcopy(plain)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(0))
    if not has_hook:
        handle.remove()
    for _ in range(2):
        F.mse_loss(plain(X), X).backward()
    count = len(calls)
    extend(model)
    exts = (extensions.BatchGrad(), extensions.DiagHessian())
    with backpack(*exts):
        for _ in range(2):
            extend(nn.MSELoss())(model(X), X).backward()
    handle.remove()
    assert len(calls) == (count + 4 if has_hook else 0)  # the losses are modules
    assert model.state() == plain.state()


@pytest.mark.parametrize("layer", [nn.LSTM, nn.TransformerEncoderLayer], ids=lambda x: x.__name__)
@pytest.mark.parametrize("function", ["transpose", "view"])
def test_views_of_data_before_a_layer_with_the_sequence_first(layer: Any, function: str) -> None:
    """``view`` brings steps of other samples into a column."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = layer(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1) if function == "transpose" else x.view(3, N, 4)
            h = self.layer(x)
            return self.head((h[0] if isinstance(h, tuple) else h)[-1])

    loss = extend(nn.CrossEntropyLoss())(extend(Model())(torch.rand(N, 3, 4)), torch.arange(N) % 2)
    with warnings.catch_warnings(record=True) as caught, backpack(extensions.BatchGrad()):
        warnings.simplefilter("always")
        loss.backward()
    told = [str(w.message) for w in caught]
    assert any("functions of the data before" in message for message in told) == (
        function == "view"
    )


@pytest.mark.parametrize(
    ("choose", "is_moved"),
    [
        (lambda x: x[:, :2], False),
        (lambda x: x[:, ::2], False),
        (lambda x: x[:, 1::2, ::2], False),
        (lambda x: x[:, 2:], False),
        (lambda x: x.view(N, 2, 6), True),
        (lambda x: x.flatten(0, 1)[1:7].view(3, 2, 6), True),
        (lambda x: x.flatten(0, 1)[2:6].view(2, 2, 6), True),
    ],
)
def test_as_many_samples_as_steps_are_chosen(
    choose: Callable[[Tensor], Tensor], is_moved: bool
) -> None:
    """``x[:, ::2]`` leaves the samples where they are; a view of such a shape does not."""

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](choose(x))[0]

    X = torch.rand(2, N, 6)
    model = extend(Model(nn.LSTM(choose(X).shape[2], 4)))
    with warnings.catch_warnings(record=True) as caught, backpack(extensions.BatchGrad()):
        warnings.simplefilter("always")
        model(X).sum().backward()
    assert any("functions of the data before" in str(w.message) for w in caught) == is_moved


def along_the_second_axis(length: int) -> Tensor:
    """Return data whose samples a program has said to be along the second axis."""
    X = torch.rand(length, N, 3)
    return assign_samples(X, torch.arange(N)[:, None].expand_as(X))


@pytest.mark.parametrize("length", [3, N])
@pytest.mark.parametrize("is_moved", [False, True])
def test_assigned_samples_along_the_second_axis_of_data(length: int, is_moved: bool) -> None:
    """They are followed without a converter: nothing to warn of."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            if is_moved:
                return self.head(self.layer(x.transpose(0, 1))).mean(1)
            return self.head(self.layer(x)).mean(0)

    X, y, plain = along_the_second_axis(length), torch.arange(N) % 2, Model()
    model = extend(copy.deepcopy(plain))
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))(model(X), y)
    with warnings.catch_warnings(), backpack(extensions.BatchGrad()):
        warnings.simplefilter("error")
        loss.backward()
    for n, term in enumerate(F.cross_entropy(plain(X), y, reduction="none")):
        own = torch.autograd.grad(term, [*plain.parameters()], retain_graph=True)
        assert_close([p.grad_batch[n] for p in model.parameters()], [*own], **TOLERANCE)


@pytest.mark.parametrize("axis", [0, 1])
def test_private_steps_of_data_with_assigned_samples(axis: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x - x.mean(axis, keepdim=True))[0][-1])

    model = extend(Model())
    optimiser, y = private(model.parameters()), torch.arange(N) % 2
    with backpack(*optimiser.extensions):
        extend(nn.CrossEntropyLoss())(model(along_the_second_axis(2)), y).backward()
    with pytest.raises(ValueError, match="functions that read") if axis else nullcontext():
        optimiser.step()


@pytest.mark.parametrize(
    "function",
    [
        lambda h, mode: [h.sin(), h.cos()][mode],
        lambda h, mode: h * {True: 2.0, False: 3.0}[mode],
        lambda h, mode: h * range(2, 4)[mode],
        lambda h, mode: h * sum([2.0, 3.0][mode:]),
        lambda h, mode: h * (1 + torch.ones(3) * mode),
    ],
    ids=["list", "dictionary", "range", "slice", "constant"],
)
def test_training_modes_as_indices_and_keys_in_traced_models(function: Any) -> None:
    """A mode that was decided while tracing is told once it is another one."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.training)

    model = extend(Model(), use_converter="trace")
    with pytest.warns(UserWarning, match="branches on its training mode"):
        model.eval()


@pytest.mark.parametrize(
    "function",
    [
        lambda mode, other: 2.0 if mode == other else 1.0,
        lambda mode, other: 2.0 if mode != other else 1.0,
        lambda mode, other: mode + other,
        lambda mode, other: 2.0 if mode in (other,) else 1.0,
        lambda mode, other: len({mode, other}),
        lambda mode, other: 2.0 if isinstance(mode, bool) else 1.0,
    ],
    ids=["==", "!=", "+", "in", "set", "isinstance"],
)
def test_two_training_modes_in_traced_models(function: Any) -> None:
    """Modes are compared, and have the class of a mode."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return x * function(self.training, self.part.training)

    X = torch.rand(N, 3)
    assert_close(extend(Model(), use_converter="trace")(X), Model()(X))


def test_weights_that_a_module_without_a_rule_clips() -> None:
    """Changes of `data` count as changes in place where samples are computed at once."""

    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.5, 0.5)
            return torch.tanh(x @ self.weight)

    model, lossfunc = nn.Sequential(nn.Linear(3, 3), Clipped()).double(), nn.MSELoss()
    X, y = torch.rand(N, 3).double(), torch.rand(N, 3).double()
    expected = oracle.batch_grad(model, lossfunc, X, y)
    with backpack(extensions.BatchGrad()):
        extend(lossfunc)(extend(model)(X), y).backward()
    for p, gradients in zip(model.parameters(), expected, strict=True):
        assert_close(p.grad_batch, gradients)


def test_scalar_parameter_before_a_bottleneck_without_a_rule() -> None:
    """Fewer columns may be worth it: what the layers before it take is estimated."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * self.scale

    layers = nn.Linear(40, 2), Scale(), nn.Linear(2, 10)
    model, lossfunc = nn.Sequential(*layers).double(), nn.CrossEntropyLoss()
    X, y = torch.rand(N, 40).double(), torch.arange(N)
    expected = oracle.ggn_diag(model, lossfunc, X, y)
    with backpack(extensions.DiagGGNExact()):
        extend(lossfunc)(extend(model)(X), y).backward()
    for p, diagonal in zip(model.parameters(), expected, strict=True):
        assert_close(p.diag_ggn_exact, diagonal)


def test_hooks_of_compiled_modules_without_a_rule_are_called_once() -> None:
    model, X, calls = Stateful(lambda m: None), torch.rand(N, 3), []
    model.register_forward_hook(lambda *_: calls.append(0))
    extend(model).compile(backend="eager")
    with backpack(extensions.BatchGrad()):
        extend(nn.MSELoss())(model(X), X).backward()
    assert_close(model.weight.grad_batch.sum(0), model.weight.grad)
    assert len(calls) == 1


# ------------------------------------------------------------------ loops and threads


class InAThread:
    """Batches that another thread makes, which uses operators of the same model itself."""

    def __init__(self, batches: list[Any], use: Callable[[Any], Any]) -> None:
        self.batches, self.use = batches, use

    def __iter__(self) -> Any:
        pool = ThreadPoolExecutor(1)
        for own in self.batches:
            pool.submit(self.use, own).result(60)
            yield own
        pool.shutdown()


@pytest.mark.parametrize("kind", [GGN, FisherMC, DiagonalGGN, KroneckerGGN, EKFAC])
def test_operators_over_data_that_another_thread_computes(kind: Any) -> None:
    """They take their turns, whoever is done first, and leave the model as it was."""
    model, lossfunc = mlp(), nn.CrossEntropyLoss()
    before = [dict(vars(module)) for module in (*model, lossfunc)]
    batches = [batch() for _ in range(3)]
    expected = kind(model, lossfunc, batches).to_dense()

    def use(own: Any) -> None:
        for other in (GGN, DiagonalGGN):
            other(model, lossfunc, [own]).to_dense()
        Influence(model, lossfunc, [own], curvature=DiagonalGGN, damping=1.0).scores(own)

    assert_close(kind(model, lossfunc, InAThread(batches, use)).to_dense(), expected)
    assert [dict(vars(module)) for module in (*model, lossfunc)] == before


def test_an_operator_that_is_done_while_another_thread_goes_on() -> None:
    model, lossfunc = mlp(), nn.CrossEntropyLoss()
    before = [dict(vars(module)) for module in (*model, lossfunc)]
    batches, others = ([batch() for _ in range(2)] for _ in range(2))
    expected, of_others = (DiagonalGGN(model, lossfunc, d).to_dense() for d in (batches, others))
    begun, done = threading.Event(), threading.Event()

    def waiting() -> Any:
        yield others[0]
        begun.set()
        assert done.wait(60)
        yield others[1]

    def first() -> Any:
        yield batches[0]
        assert begun.wait(60)
        yield batches[1]

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: DiagonalGGN(model, lossfunc, waiting()).to_dense())
        assert_close(DiagonalGGN(model, lossfunc, first()).to_dense(), expected)
        done.set()
        assert_close(other.result(60), of_others)
    assert [dict(vars(module)) for module in (*model, lossfunc)] == before


def test_losses_that_threads_share_tell_their_calls_apart(monkeypatch: Any) -> None:
    """Another thread calls the loss before a product has found its own call."""
    model, lossfunc, (X, y) = mlp(), extend(nn.CrossEntropyLoss()), batch()
    operator = GGN(model, lossfunc, [(X, y)])
    expected, found = operator.to_dense(), curvature.live_calls

    def later(module: nn.Module) -> Any:
        with ThreadPoolExecutor(1) as pool:
            keeps.append(pool.submit(lossfunc, 9 * torch.randn(N, 2, requires_grad=True), y))
            keeps[-1].result()
        return found(module)

    keeps: list[Any] = []
    monkeypatch.setattr(curvature, "live_calls", later)
    assert_close(operator.to_dense(), expected)


class OfItself(nn.Module):
    """Holds itself, has no rule, and lets other threads run while it does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.compute = 1.0, self.sine

    def sine(self, x: Tensor) -> Tensor:
        scale = self.scale
        time.sleep(1e-3)
        return scale * torch.sin(x * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("scales", [(1.0, 2.0), (1.0, 1.0)])
def test_threads_that_evaluate_a_module_that_holds_itself(scales: tuple[float, ...]) -> None:
    shared, (X, y) = OfItself(), batch()
    models = [extend(nn.Sequential(nn.Linear(3, 4), shared, nn.Linear(4, 2))) for _ in range(2)]
    own = copy.deepcopy(models)
    losses = []
    for each in (models, own):
        for scale, model in zip(scales, each, strict=True):
            model[1].scale = scale
            losses.append(extend(nn.CrossEntropyLoss())(model(X), y))
    shared.scale = 7.0

    def backward(loss: Tensor) -> None:
        with backpack(extensions.DiagGGNExact()):
            loss.backward()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(backward, losses[:2]))
    list(map(backward, losses[2:]))
    for model, other in zip(models, own, strict=True):
        assert_close(diagonals(model), diagonals(other))


@pytest.mark.filterwarnings("ignore:No rule for")
def test_a_loss_without_a_rule_that_a_thread_calls_while_another_evaluates_it() -> None:
    """Only the evaluation does without hooks."""
    waiting: list[Callable[[], Tensor]] = []
    found: list[Tensor] = []

    class Loss(nn.Module):
        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            with ThreadPoolExecutor(1) as pool:
                while waiting:
                    found.append(pool.submit(waiting.pop()).result())
            return (f - y).square().mean()

    lossfunc, X, y = extend(Loss()), torch.rand(N, 3), torch.rand(N, 2)
    model, other = extend(nn.Linear(3, 2)), extend(nn.Linear(3, 2))
    loss = lossfunc(model(X), y)
    waiting.append(lambda: lossfunc(other(X), y))
    with backpack(extensions.DiagGGNExact()):
        loss.backward()
        found[0].backward()
    assert_close(diagonals(other), diagonals(model))  # the output has no part in it


def diagonals(model: nn.Module) -> list[Any]:
    return [p.diag_ggn_exact for p in model.parameters()]


# ------------------------------------------------------------------ private training


class ScaledByBatch(nn.Module):
    """Multiplies features by what ``scale`` makes of them, and keeps what it returns."""

    def __init__(self, scale: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.layer, self.last, self.scale, self.memory = (
            nn.Linear(3, 4),
            nn.Linear(4, 2),
            scale,
            None,
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        factor, self.memory = self.scale(h, self.memory)
        return self.last(torch.tanh(h) * factor)


def private_steps(
    model: nn.Module, dtype: torch.dtype, autocast: bool = False, use_converter: Any = False
) -> None:
    model, lossfunc = extend(model, use_converter=use_converter), extend(nn.CrossEntropyLoss())
    optimiser = private(model.parameters())
    for _ in range(2):
        X, y = batch()
        with (
            backpack(*optimiser.extensions),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            lossfunc(model(X.to(dtype)), y).backward()
        optimiser.step()


OF_BATCHES: dict[str, Callable[[Tensor, Any], Any]] = {
    "text": lambda h, _: (float(f"{h.std():.4f}"), None),
    "repr": lambda h, _: (len(repr(h.detach() > 0).replace("False", "")) / 99, None),
    "number": lambda h, _: (h.std().item(), None),
    "array": lambda h, _: (float(h.detach().float().numpy().std()), None),
    "random": lambda h, _: (F.dropout(h).std().item(), None),
    "little": lambda h, _: (1 + 0.03 * h.detach().std(), None),
    "storage": lambda h, _: (h.untyped_storage()[3] / 99, None),
    "dlpack": lambda h, _: (float(np.from_dlpack(h.detach().float()).std()), None),
    "kept": lambda h, memory: (1 if memory is None else memory, h.detach().std()),
    "kept, a number": lambda h, memory: (1 if memory is None else memory.item(), h.detach().std()),
    "kept text": lambda h, memory: (1 if memory is None else float(memory), f"{h.std():.4f}"),
    "kept in a list": lambda h, memory: (
        1 if memory is None else torch.stack(memory).mean(),
        [*(memory or ()), h.detach().std()],
    ),
}
PRECISIONS = {
    "float32": (torch.float32, torch.float32, False),
    "bfloat16": (torch.bfloat16, torch.bfloat16, False),
    "autocast": (torch.float32, torch.float32, True),
    "autocast, data in bfloat16": (torch.float32, torch.bfloat16, True),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("way", OF_BATCHES)
def test_ways_in_which_a_batch_decides(way: str, precision: str) -> None:
    dtype, of_data, autocast = PRECISIONS[precision]
    with pytest.raises(ValueError, match="may depend on other samples"):
        private_steps(ScaledByBatch(OF_BATCHES[way]).to(dtype), of_data, autocast)


class Dense(nn.Module):
    """Its list of features grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList([nn.Linear(3, 2), nn.Linear(5, 2)]), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(torch.tanh(layer(torch.cat(features, 1))))
        return self.last(torch.cat(features, 1))


def test_private_training_of_models_whose_lists_grow() -> None:
    private_steps(Dense(), torch.float64)


def filled(h: Tensor, _: Any) -> tuple[Tensor, None]:
    factor = torch.zeros_like(h)
    factor[:, 1:] = h[:, :-1]
    factor[:, 1:] += h[:, 1:]
    return factor, None


@pytest.mark.parametrize("use_converter", [False, "record"])
def test_private_training_of_models_that_fill_tensors(use_converter: Any) -> None:
    private_steps(ScaledByBatch(filled), torch.float64, use_converter=use_converter)


def test_losses_of_earlier_batches_are_logged_in_private_training() -> None:
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.CrossEntropyLoss())
    optimiser = private(model.parameters())
    total, log = torch.zeros(()), []
    with backpack(*optimiser.extensions):
        for _ in range(4):
            X, y = batch()
            X = X / 2
            loss = lossfunc(model(X), y)
            loss.backward()
            optimiser.step()
            total += loss.detach() * len(X)
            log.append(f"{loss.item()} {loss} {total / 2}")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_in_private_training(precision: str) -> None:
    dtype, of_data, autocast = PRECISIONS[precision]
    private_steps(ScaledByBatch(lambda h, _: (h.sigmoid(), None)).to(dtype), of_data, autocast)


def test_a_loader_whose_samples_have_as_many_entries_as_there_are_samples() -> None:
    """Their entries are taken for samples: the error says where it has to run."""
    model, lossfunc = extend(nn.Linear(N, 2)), extend(nn.CrossEntropyLoss())
    data = TensorDataset(torch.randn(3 * N, N), torch.randint(2, (3 * N,)))
    optimiser, loader = private(model.parameters()), DataLoader(data, N)
    with backpack(*optimiser.extensions):
        X, y = next(iter(loader))
        lossfunc(model(X), y).backward()
    with pytest.raises(ValueError, match="a loader whose samples have as many entries"):
        optimiser.step()
    for X, y in loader:
        with backpack(*optimiser.extensions):
            lossfunc(model(X), y).backward()
        optimiser.step()


class Changing(nn.Linear):
    """A layer without a rule that changes its parameters in each forward pass."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__(N, N)
        self.change, self.average = change, torch.ones(N)

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return F.linear(x, self.weight, self.bias)


def decay(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.9)


def decay_data(layer: Any) -> None:
    layer.weight.data.mul_(0.9)


def constrain(layer: Any) -> None:
    layer.weight.data = torch.renorm(layer.weight.data, p=2, dim=0, maxnorm=0.5)


def average(layer: Any) -> None:
    layer.average.data.mul_(0.9)


@pytest.mark.parametrize("change", [decay, decay_data, constrain, average])
@pytest.mark.parametrize("samples", [N, N + 1])
@pytest.mark.parametrize("is_open", [False, True], ids=["no context", "BatchGrad"])
@pytest.mark.parametrize("converter", [False, "record"])
@pytest.mark.filterwarnings("ignore:No rule", "ignore:BatchGrad")
def test_layers_that_change_their_parameters_do_so_once(
    change: Any, samples: int, is_open: bool, converter: Any
) -> None:
    plain = nn.Sequential(nn.Linear(3, N), Changing(change), nn.Tanh(), nn.Linear(N, 2))
    X, y = torch.randn(samples, 3), torch.arange(samples) % 2
    model = extend(copy.deepcopy(plain), use_converter=converter)
    for _ in range(2):
        F.cross_entropy(plain(X), y).backward()
        with backpack(*[extensions.BatchGrad()] * is_open):
            extend(nn.CrossEntropyLoss())(model(X), y).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)
        assert_close(own.grad, other.grad, **TOLERANCE)
    assert torch.equal(model.get_submodule("1").average, plain[1].average)


@pytest.mark.parametrize("samples", [N, N + 1])
def test_quantities_of_layers_that_constrain_their_weights(samples: int) -> None:
    """Once more changes nothing, but the memory: derivatives are those of the weights in use."""
    model = extend(nn.Sequential(nn.Linear(3, N), Changing(constrain), nn.Linear(N, 2)))
    X, y = torch.randn(samples, 3), torch.arange(samples) % 2
    assert_quantities(model, X, y)


def assert_quantities(model: nn.Module, X: Tensor, y: Tensor) -> None:
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        lossfunc(model(X), y).backward()
    plain, params = copy.deepcopy(model), [*model.parameters()]
    each, exact = (
        f(plain, nn.CrossEntropyLoss(), X, y) for f in (oracle.batch_grad, oracle.ggn_diag)
    )
    assert_close([p.grad_batch for p in params], each, **TOLERANCE)
    assert_close([p.diag_ggn_exact for p in params], exact, **TOLERANCE)


@pytest.mark.parametrize("samples", [N, N + 1])
def test_hooks_of_saved_tensors_see_layers_without_a_rule_once(samples: int) -> None:
    plain, saved = Changing(lambda layer: None), list[list[Tensor]]()
    model, X = extend(copy.deepcopy(plain)), torch.randn(samples, N, requires_grad=True)
    for layer in (plain, model):
        saved.append([])
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x: saved[-1].append(x) or x, lambda x: x
        )
        with hooks:
            layer(X)
        checkpoint(layer, X, use_reentrant=False).sum().backward()
    assert len(saved[0]) == len(saved[1])


class Chosen(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ (1 * self.weight).T + self.bias


@pytest.mark.parametrize("chosen", [[1, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
def test_layers_without_a_rule_of_some_samples(chosen: list[int]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer, self.last = nn.Linear(3, 4), Chosen(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h, mask = self.first(x).sin(), x[:, 0] > 0
            h[mask] = self.layer(h[mask])
            return self.last(h.tanh())

    X, y = batch()
    X[:, 0] = torch.tensor(chosen) - 0.5
    assert_quantities(extend(Model(), use_converter="record"), X, y)


def without_autocast(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.autocast("cpu", enabled=False):
        return m.b(h.to(x.dtype))


def with_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return m.b(m.a(x))


def not_in_inference(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return m.b(m.a(x))


def told_of_modes(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) if torch.is_grad_enabled() else m.a(x) + 1
    return m.b(h * 2 if torch.is_autocast_enabled("cpu") else h)


def seeded_apart(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.randn_like(x)
    return m.b(m.a(x + noise))


def seeded_as_before(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return m.b(m.a(x + torch.randn_like(x)))


def caught(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    try:
        if torch.isnan(h).any():
            h = torch.nan_to_num(h)
    except Exception:
        h = h * 0
    return m.b(h)


def suppressed(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with suppress(Exception):
        h = h * float(x.shape[0])
    return m.b(h)


class Traced(nn.Module):
    """Computes a function of itself and its input."""

    function: Callable[[Any, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class AsksByMatch(Traced):
    def forward(self, x: Tensor) -> Tensor:
        match x:
            case Tensor():
                return self.b(self.a(x))
        return x


class AsksByType(Traced):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if type(x) is torch.Tensor else x


@pytest.mark.parametrize(
    "what",
    [
        *(without_autocast, with_gradients, not_in_inference, told_of_modes, seeded_apart),
        *(seeded_as_before, caught, suppressed, AsksByMatch, AsksByType),
    ],
)
def test_what_tracing_would_lose_is_recorded(what: Any) -> None:
    """It is refused, without a trace in torch; use_converter=True records it, for all modes."""
    kind = what if isinstance(what, type) else type("Model", (Traced,), {"function": what})
    plain, state = kind().float(), torch.get_rng_state()
    with pytest.raises(ConversionError, match=r"line \d+|isinstance\(x, Tensor\)"):
        extend(copy.deepcopy(plain), use_converter="trace")
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    model, x = extend(copy.deepcopy(plain), use_converter=True), torch.rand(N, 3).float()
    for mode in (nullcontext(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        outputs = []
        for each in (plain, model):
            torch.manual_seed(0)
            with mode:
                outputs.append(each(x))
        assert_close(outputs[1], outputs[0])
        assert outputs[1].requires_grad == outputs[0].requires_grad


def test_modes_of_constants_and_of_other_threads_while_a_model_is_traced() -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        torch.enable_grad().__enter__()
        found.extend((torch.is_grad_enabled(), torch.rand(2, device="meta")))

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = torch.ones(3).cumsum(0)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(elsewhere).result()
        return m.b(m.a(x * factor))

    plain = type("Model", (Traced,), {"function": forward})()
    model, x = extend(copy.deepcopy(plain), use_converter="trace"), torch.rand(N, 3)
    assert found[0] and type(found[1]) is Tensor
    assert_close(model(x), plain(x))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("bernoulli_", [0.5]), ("normal_", [0.0, 0.1]), ("uniform_", []), ("random_", [1, 5])),
        *(("exponential_", []), ("geometric_", [0.5]), ("cauchy_", []), ("log_normal_", [])),
        *(("init.normal_", []), ("init.uniform_", [])),
    ],
)
def test_noise_that_is_drawn_into_memory_of_the_size_of_the_data(
    name: str, options: Any, size: int
) -> None:
    owner: Any = nn.init if name.startswith("init.") else Tensor
    fill = getattr(owner, name.removeprefix("init."))

    def forward(m: Any, x: Tensor) -> Tensor:
        m.noise = fill(x.new_empty((len(x), size)), *options)
        return m.b(m.a(x) * m.noise)

    model = extend(type("Model", (Traced,), {"function": forward})(), use_converter="record")
    X, y = batch()
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    with backpack(extensions.BatchGrad()):
        extend(lossfunc)(model(X), y).backward()
    for n in range(N):
        loss = lossfunc(model.b((model.a(X) * model.noise)[[n]]), y[[n]])
        expected = torch.autograd.grad(loss, [*model.parameters()])
        for p, g in zip(model.parameters(), expected, strict=True):
            assert_close(p.grad_batch[n], g)


class Slopes(nn.Module):
    """A function plus its derivative, by a module with parameters or by a layer inside of it."""

    def __init__(self, is_leaf: bool) -> None:
        super().__init__()
        layer = nn.Linear(1, 3)
        self.weight, self.bias = layer.weight, layer.bias
        self.layer = None if is_leaf else layer

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        h = F.linear(x, self.weight, self.bias) if self.layer is None else self.layer(x)
        (slope,) = torch.autograd.grad(h.sin().sum(), x, create_graph=True)
        return h.cos() + slope


def test_jacobians_of_models_that_differentiate() -> None:
    X = torch.rand(N, 1, dtype=torch.float64)
    for model in Slopes(True).double(), Slopes(False).double():
        ps, outputs = [*model.parameters()], model(X).flatten()
        rows = [torch.autograd.grad(y, ps, retain_graph=True) for y in outputs]
        truth = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        assert_close(Jacobian(model, [X]).to_dense(), truth)


@pytest.mark.filterwarnings("ignore:No rule for")
def test_laplace_of_models_that_differentiate() -> None:
    model, X = nn.Sequential(Slopes(True).double()), torch.rand(N, 1, dtype=torch.float64)
    batch = X, torch.rand(N, 3, dtype=torch.float64)
    laplace = Laplace(model, nn.MSELoss(), [batch], DiagonalGGN)
    assert_close(torch.tensor(laplace.loss), 1.5 * N * nn.MSELoss()(model(X), batch[1]).detach())
    J = Jacobian(model, [X]).to_dense().reshape(N, 3, -1)
    mean, covariance = laplace.outputs(X)
    assert_close(mean, model(X).detach())
    assert_close(covariance, J @ laplace.posterior.to_dense() @ J.mT)
    (output,) = laplace.sample_outputs(X, 1, False, torch.Generator().manual_seed(0))
    (weights,) = laplace.sample_weights(1, torch.Generator().manual_seed(0))
    nn.utils.vector_to_parameters(weights, model.parameters())
    assert_close(output, model(X).detach())
    nn.utils.vector_to_parameters(laplace.mean, model.parameters())
    assert laplace.fit_prior_precision(validation=[batch]) > 0


@pytest.mark.parametrize("kind", [NTK, ProjectedInfluence])
def test_uses_that_are_not_counted_are_errors_of_what_is_computed(kind: Any) -> None:
    """There was a warning, and another kernel or other scores."""
    model, X = Slopes(False), torch.rand(N, 1)
    data = (X,) if kind is NTK else (nn.MSELoss(), [(X, torch.rand(N, 3))])
    with pytest.raises(NotImplementedError, match="That use is not counted"):
        made = kind(model, *data)
        made.scores(data[1])


@pytest.mark.parametrize("kind", [GGN, Hessian, Jacobian])
def test_bags_have_no_second_derivative(kind: Any) -> None:
    """The error of torch named a function that no program calls."""
    model = nn.Sequential(nn.EmbeddingBag(5, 3))
    batch = torch.randint(5, (N, 2)), torch.rand(N, 3)
    operator = kind(model, *[[batch]] if kind is Jacobian else [nn.MSELoss(), [batch]])
    with pytest.raises(NotImplementedError, match=r"nn\.Embedding and a sum or mean.*DiagonalGGN"):
        operator @ torch.ones(15)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("optimiser", [private, KFAC, SOAP])
def test_optimisers_of_sparse_gradients_say_what_to_do(kind: Any, optimiser: Any) -> None:
    layers = [kind(5, 3, sparse=True), *[nn.Flatten()] * (kind is nn.Embedding)]
    model, data = extend(nn.Sequential(*layers)), torch.randint(5, (N, 1))
    made = optimiser(model.parameters())
    with backpack(*getattr(made, "extensions", ())):
        extend(nn.MSELoss())(model(data), torch.rand(N, 3)).backward()
    with pytest.raises(RuntimeError, match=r"is sparse\. Set sparse=False in the embedding"):
        made.step()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_kernels_and_influence_of_sparse_gradients(kind: Any) -> None:
    layers = [kind(5, 3, sparse=True), *[nn.Flatten()] * (kind is nn.Embedding), nn.Linear(3, 2)]
    model = nn.Sequential(*layers).double()
    X, y, loss = torch.randint(5, (N, 1)), torch.arange(N) % 2, nn.CrossEntropyLoss()
    ps = [*model.parameters()]

    def rows(outputs: Tensor) -> Tensor:
        each = [torch.autograd.grad(one, ps, retain_graph=True) for one in outputs]
        return torch.stack([torch.cat([g.to_dense().flatten() for g in row]) for row in each])

    J = rows(model(X).flatten())
    assert_close(NTK(model, X).to_dense(), J @ J.T)
    G = rows(F.cross_entropy(model(X), y, reduction="none"))
    tracin = TracIn(model, loss, [(X, y)], [model.state_dict()], [0.1])
    assert_close(tracin.scores([(X, y)]), 0.1 * G @ G.T)


class Carrying(nn.Module):
    """Keeps the state of the step before in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)
        self.state = torch.zeros(N, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x) + self.b(self.state))
        self.state = h.detach()
        return h


def test_states_that_are_carried_on_keep_nothing_of_former_steps() -> None:
    """Where their samples are is described alike; all descriptions of all steps were kept."""
    model, lossfunc = extend(Carrying(), use_converter="record"), extend(nn.CrossEntropyLoss())
    counts = []
    for _ in range(6):
        with backpack(extensions.BatchGrad()):
            lossfunc(model(torch.rand(N, 3)), torch.arange(N)).backward()
        gc.collect()
        counts.append(sum(type(one) is Layout for one in gc.get_objects()))
    assert counts[-1] == counts[1]


class Slotted(nn.Module):
    """Has parameters, an attribute in a slot, and one elsewhere."""

    __slots__ = ("power",)

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.power, self.factor = nn.Parameter(torch.rand(4) + 1), 2, 3.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.weight) ** self.power * self.factor


SINCE: dict[str, Callable[[Any], Any]] = {
    "slot": lambda layer: setattr(layer, "power", 3),
    "forward": lambda layer: setattr(layer, "forward", torch.exp),
    "parameter": lambda layer: setattr(layer, "other", nn.Parameter(torch.rand(2))),
    "buffer": lambda layer: layer.register_buffer("other", torch.rand(2)),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 1),
}


@pytest.mark.parametrize("change", SINCE)
@pytest.mark.filterwarnings("ignore:No rule for")
def test_products_of_modules_that_change_behind_the_backward_pass(change: str) -> None:
    """They are of the module of the forward pass: there were other numbers, or errors."""
    layer = Slotted()
    model = extend(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2)))
    with backpack(extensions.HMP()):
        extend(nn.CrossEntropyLoss())(model(torch.rand(N, 3)), torch.arange(N) % 2).backward()
    each: list[Any] = [model[0].weight, layer.weight]
    vectors, products = [torch.rand(2, *p.shape) for p in each], [p.hmp for p in each]
    expected = [product(v) for product, v in zip(products, vectors, strict=True)]
    SINCE[change](layer)
    attributes, names = list(vars(layer).items()), [*layer._parameters, *layer._buffers]
    for product, v, value in zip(products, vectors, expected, strict=True):
        assert_close(product(v), value)
    assert dict(attributes).items() <= vars(layer).items()
    assert [*layer._parameters, *layer._buffers] == names
    assert layer.power == (3 if change == "slot" else 2)


def test_hooks_that_write_to_a_list_of_a_loss_that_threads_share() -> None:
    """The module that a second thread shows had another list."""
    lossfunc, both = extend(nn.CrossEntropyLoss()), threading.Barrier(2, timeout=30)
    lossfunc.noted = noted = []

    def hook(module: Any) -> None:
        if type(module) is nn.CrossEntropyLoss:
            both.wait()
            module.noted.append(threading.get_ident())
            both.wait()

    def step(model: nn.Module) -> None:
        loss = lossfunc(model(torch.rand(N, 3)), torch.arange(N))
        with backpack(extensions.BatchGrad(), extension_hook=hook):
            loss.backward()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(step, [extend(nn.Linear(3, N)) for _ in range(2)]))
    assert len(set(noted)) == 2


def test_threads_take_turns_where_hooks_let_a_module_run_again() -> None:
    """The layer kept what calls it without hooks: it was not recorded, and could not be pickled."""
    layer, X, interval = extend(nn.Linear(3, 2)), torch.rand(N, 3), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(layer, [X] * 400))
    finally:
        hook.remove()
        sys.setswitchinterval(interval)
    copied = pickle.loads(pickle.dumps(layer))
    with backpack(extensions.BatchGrad()):
        copied(X).sum().backward()
    assert copied.weight.grad_batch.shape == (N, 2, 3)


@pytest.mark.parametrize("n", range(2, 8))
def test_one_row_of_a_small_batch_in_which_samples_meet(n: int) -> None:
    """Of six rows, the fifth was not looked at: there was no warning."""
    for row in range(n):
        y = extend(nn.Linear(3, 2))(torch.rand(n, 3))
        z = y + F.one_hot(torch.tensor(row), n)[:, None] * y.roll(1, 0)
        with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match="mixes the samples"):
            extend(nn.MSELoss())(z, torch.rand(n, 2)).backward()


@pytest.mark.parametrize("kind", [nn.Bilinear, nn.PReLU, nn.Upsample])
def test_rules_that_moved_to_their_families_are_where_they_were(kind: Any) -> None:
    name = kind.__name__
    rule = getattr(import_module(f"backpack.core.derivatives.{name.lower()}"), f"{name}Derivatives")
    assert rule is type(derivatives_of(kind(2, 2, 2) if kind is nn.Bilinear else kind()))


class WithNumber(nn.Module):
    """Returns a number, such as a penalty, beside what has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * self.weight).sin(), self.weight.square().sum()


class ByNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.layer = WithNumber(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, number = self.part(x)
        return self.layer(y) * number


def test_modules_that_return_a_number_beside_samples() -> None:
    """First order ended in an IndexError of torch."""
    X, y = torch.rand(N, 3), torch.arange(N) % 2
    model = extend(ByNumber())
    with (
        backpack(extensions.BatchGrad()),
        pytest.warns(UserWarning, match=r"'part' .* returns a number"),
    ):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    assert not hasattr(model.part.weight, "grad_batch")
    model = extend(ByNumber(), use_converter=True)
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    assert_close(model.part.weight.grad_batch.sum(0), model.part.weight.grad)


def test_parameters_that_a_module_gets_after_the_forward_pass() -> None:
    """They were a KeyError."""
    model = extend(nn.Sequential(ByNumber().part))
    y, _ = model(torch.rand(N, 3))
    loss = y.sum()
    model[0].new = nn.Parameter(torch.rand(2))
    with backpack(extensions.BatchGrad()):
        loss.backward()
    assert_close(model[0].weight.grad_batch.sum(0), model[0].weight.grad)


def tied_convolutions(*names: str) -> nn.Sequential:
    """A convolution, and a transposed one that shares parameters with it."""
    first, second = nn.Conv1d(2, 2, 2).double(), nn.ConvTranspose1d(2, 2, 2).double()
    for name in names:
        setattr(second, name, getattr(first, name))
    return nn.Sequential(first, nn.Tanh(), second, nn.Flatten())


def test_a_bias_that_a_convolution_shares_with_a_transposed_one() -> None:
    """The axes of their weights made it no bias: there was its block for "expand"."""
    model, X = tied_convolutions("bias"), torch.rand(N, 2, 3).double()
    loss = nn.MSELoss(reduction="sum")
    with backpack(extensions.KFLR(approximation="expand"), extensions.KFRA()):
        extend(loss)(extend(model)(X), torch.rand(N, 6).double()).backward()
    first, act, second, flat = copy.deepcopy(model)
    outputs = [first(X)]
    outputs.append(second(act(outputs[0])))
    f, B = flat(outputs[1]), 0
    for c in range(6):
        for arrived in torch.autograd.grad(2**0.5 * f[:, c].sum(), outputs, retain_graph=True):
            rows = arrived.transpose(1, 2).flatten(0, 1)
            B = B + rows.T @ rows
    assert_close(model[0].bias.kflr, [B])


class ScaledByWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * self.layer.weight.sum()


@pytest.mark.parametrize(
    ("model", "X"),
    [
        (tied_convolutions("weight"), torch.rand(2, 2, 3).double()),
        (ScaledByWeight(), torch.rand(2, 3)),
    ],
    ids=["other axes", "no factors"],
)
def test_kfra_of_weights_whose_uses_have_no_factors_in_common(model: Any, X: Tensor) -> None:
    """It had one factor of the wrong size, or tensors of different sizes."""
    output = extend(model, use_converter=True)(X)
    with backpack(extensions.KFRA()), pytest.raises(ValueError, match=r"order, or .* have none"):
        extend(nn.CrossEntropyLoss())(output, torch.tensor([0, 1])).backward()


class TwoGroupings(nn.Module):
    """A weight that two convolutions of other groups share."""

    def __init__(self, first: nn.Module, second: nn.Module, size: int):
        super().__init__()
        self.first, self.second = first, second
        second.weight = first.weight
        self.head = nn.Linear(size, 3)

    def both(self, x: Tensor) -> list[Tensor]:
        """Return what the two make of their channels."""
        parts = x.split([self.first.in_channels, self.second.in_channels], 1)
        return [self.first(parts[0]), self.second(parts[1])]

    def forward(self, x: Tensor) -> Tensor:
        """[N, *] -> [N, 3]."""
        first, second = self.both(x)
        return self.head(torch.cat([first.flatten(1), second.flatten(1)], 1).tanh())


@pytest.mark.parametrize("groups", [(1, 2), (2, 1), (2, 4), (2, 3)])
def test_a_weight_of_transposed_convolutions_of_other_groups(groups: tuple[int, int]) -> None:
    """It was an error of torch. Each input channel has what arrives at its group, in both."""
    channels = 6 if 3 in groups else 4
    layers = [nn.ConvTranspose1d(channels, 2 * g, 2, groups=g, bias=False) for g in groups]
    model = TwoGroupings(*layers, 8 * sum(groups))
    X, y, loss = torch.rand(N, 2 * channels, 3), torch.rand(N, 3), nn.MSELoss(reduction="sum")
    with backpack(extensions.KFLR(), extensions.KFRA()):
        tied = extend(copy.deepcopy(model), use_converter=True)
        extend(loss)(tied(X), y).backward()

    def arrived(cotangents: Tensor) -> Tensor:
        """Sum over positions, and over both: ``[V, N, D] -> [V, N, I, O]``."""
        rows = 0
        sizes = [8 * g for g in groups]
        for g, part in zip(groups, cotangents.split(sizes, 2), strict=True):
            of_group = part.reshape(*part.shape[:2], g, 2, 4).sum(4)
            rows = rows + of_group[:, :, [i * g // channels for i in range(channels)]]
        return rows

    parts = torch.cat([part.flatten(1) for part in model.both(X)], 1).detach()
    slope, head = 1 - parts.tanh() ** 2, model.head.weight.detach()
    rows = arrived(2**0.5 * head.unsqueeze(1) * slope)
    expected = einsum("vnio,vnip->op", rows, rows) / channels
    assert_close(tied.first.weight.kflr[0], expected)
    M = 2 * N * head.T @ head * (slope.T @ slope) / N
    rows = arrived(torch.eye(len(M)).unsqueeze(1))[:, 0]
    assert_close(tied.first.weight.kfra[0], einsum("aio,ab,bip->op", rows, M, rows) / channels)


def test_reduced_factors_of_convolutions_of_other_groups() -> None:
    """It was an error of torch. Each output channel has the mean of what both read for it."""
    layers = [nn.Conv1d(2 * g, 4, 2, groups=g, bias=False) for g in (2, 4)]
    model, X = TwoGroupings(*layers, 16), torch.rand(N, 12, 3)
    patches = [
        F.unfold(x.unsqueeze(3), (2, 1)).unflatten(1, (g, 4))
        for g, x in ((2, X[:, :4]), (4, X[:, 4:]))
    ]
    means = sum(x.mean(3)[:, [o * x.shape[1] // 4 for o in range(4)]] for x in patches) / 2
    with backpack(extensions.KFLR(approximation="reduce")):
        output = extend(model, use_converter=True)(X)
        extend(nn.MSELoss())(output, torch.zeros(N, 3)).backward()
    expected = einsum("noi,noj->ij", means, means) / (4 * N)
    assert_close(model.first.weight.kflr[1], expected)


class FramesFirst(nn.Module):
    """A layer that sees all frames of all samples as rows, those of a frame next to each other."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.scale, self.layer = nn.Linear(1, 1), layer

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, *] -> [N, *]."""
        frames = self.scale(x.unsqueeze(-1)).squeeze(-1).transpose(0, 1)
        y = self.layer(frames.reshape(-1, *frames.shape[2:]))
        return y.reshape(*frames.shape[:2], *y.shape[1:]).mean(0).flatten(1)


class Flipped(nn.Module):
    """A function of the rows of samples, which are split behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 2] -> [N, 2]."""
        rows = self.first(x).reshape(-1, 2).softmax(1)
        return self.last(rows.reshape(len(x), 3, 2).flatten(1))


ONE_SAMPLE: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "one output": lambda: (FramesFirst(nn.Linear(2, 1)), (3, 2)),
    "one input": lambda: (FramesFirst(nn.Linear(1, 2)), (3, 1)),
    "one channel": lambda: (FramesFirst(nn.Conv1d(1, 2, 2)), (3, 1, 4)),
    "one channel out": lambda: (FramesFirst(nn.ConvTranspose1d(2, 1, 2)), (3, 2, 4)),
    "rows": lambda: (Flipped(), (3, 2)),
}


@pytest.mark.parametrize("name", ONE_SAMPLE)
@pytest.mark.parametrize("samples", [1, 2])
def test_rows_of_a_single_sample(name: str, samples: int) -> None:
    """Its axis was taken for another one of one entry: wrong gradients of each, or errors."""
    model, shape = ONE_SAMPLE[name]()
    model, X = model.double(), torch.rand(samples, *shape).double()
    y, loss = torch.zeros_like(model(X)), nn.MSELoss()
    each = oracle.batch_grad(copy.deepcopy(model), loss, X, y)
    diagonals = oracle.ggn_diag(copy.deepcopy(model), loss, X, y)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(loss)(extend(model, use_converter=True)(X), y).backward()
    for p, grads, diagonal in zip(model.parameters(), each, diagonals, strict=True):
        assert_close(p.grad_batch, grads)
        assert_close(p.diag_ggn_exact, diagonal)


class ChoosesOfTable(nn.Module):
    """Each sample takes those rows of a table that its own data choose."""

    def __init__(self, is_parameter: bool, form: str) -> None:
        super().__init__()
        self.form, table = form, nn.Parameter(torch.rand(6, 3), requires_grad=is_parameter)
        self.first, self.each, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        if is_parameter:
            self.table = table
        else:
            self.register_buffer("table", table.data)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 2]."""
        mask = (x.detach()[:, :1] * torch.arange(6)).sin() > 0.2 if self.form != "none" else x > 9
        table = self.table[: mask.shape[1]].expand(*mask.shape, 3)
        numbers = torch.arange(len(x)).unsqueeze(1).expand_as(mask)[mask]
        if self.form == "other order":
            rows = table.transpose(0, 1)[mask.T]
        else:
            rows = table[mask, :] if self.form == "slice" else table[mask]
        h = self.first(x).tanh()
        return self.last(h.index_add(0, numbers, self.each(rows).tanh()))


@pytest.mark.parametrize("converter", ["record", True])
@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize("form", ["mask", "slice", "none"])
def test_rows_of_a_table_that_masks_of_samples_choose(
    form: str, is_parameter: bool, converter: Any
) -> None:
    """They were taken for rows that mix samples; if there was none, it was an error of torch."""
    plain, X, y = (
        ChoosesOfTable(is_parameter, form),
        3 * torch.rand(N, 3),
        torch.tensor([0, 1, 1, 0]),
    )
    model, loss = extend(copy.deepcopy(plain), use_converter=converter), nn.CrossEntropyLoss()
    optimiser = DPSGD(
        model.parameters(),
        **{"lr": 1.0, "max_grad_norm": 0.1, "noise_multiplier": 0.0, "expected_batch_size": N},
    )
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact(), *optimiser.extensions):
        extend(loss)(model(X), y).backward()
    each = oracle.batch_grad(plain, loss, X, y)
    diagonals = oracle.ggn_diag(plain, loss, X, y)
    for p, grads, diagonal in zip(model.parameters(), each, diagonals, strict=True):
        assert_close(p.grad_batch, grads)
        assert_close(p.diag_ggn_exact, diagonal)
    optimiser.step()
    norms = sum(g.flatten(1).square().sum(1) for g in each).sqrt() * N
    for p, before, grads in zip(model.parameters(), plain.parameters(), each, strict=True):
        clipped = torch.einsum("n...,n->...", grads, (0.1 / norms).clamp(max=1))
        assert_close(p, before - clipped)


def test_rows_of_a_table_in_another_order_than_their_samples() -> None:
    model = extend(ChoosesOfTable(True, "other order"), use_converter=True)
    loss = extend(nn.CrossEntropyLoss())(model(3 * torch.rand(N, 3)), torch.tensor([0, 1, 1, 0]))
    with backpack(extensions.BatchGrad()), pytest.raises(ValueError, match="different samples"):
        loss.backward()


class Masked(nn.Module):
    """Multiplies a weight with a tensor that is no buffer."""

    def __init__(self, mask: Tensor):
        super().__init__()
        self.mask = mask

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def masked(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Masked(torch.rand_like(layer.weight)))


class ChosenEntries(Masked):
    """Chooses entries of a weight by a tensor that is no buffer, which has the others."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.where(self.mask > 0.5, weight, self.mask)


def chosen(layer: nn.Module) -> None:
    parametrize.register_parametrization(
        layer, "weight", ChosenEntries(torch.rand_like(layer.weight))
    )


def pruned_with_frozen_bias(layer: nn.Module) -> None:
    prune.random_unstructured(layer, "weight", 2)
    layer.bias.requires_grad_(False)


@pytest.mark.parametrize("change", [masked, chosen, pruned_with_frozen_bias])
@pytest.mark.parametrize("converter", [False, True, "record"])
@pytest.mark.parametrize("samples", [1, 2, 4])
def test_constants_of_layers_are_no_samples(change: Any, converter: Any, samples: int) -> None:
    """They were taken for those if they had as many rows, or more than one: an error."""
    model, X = mlp(), torch.randn(samples, 3)
    change(model[0])
    change(model[2])
    y, loss = torch.randint(2, (samples,)), nn.CrossEntropyLoss()
    each = oracle.batch_grad(model, loss, X, y)
    diagonals = oracle.ggn_diag(model, loss, X, y)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(loss)(extend(model, use_converter=converter)(X), y).backward()
    trained = (p for p in model.parameters() if p.requires_grad)
    for p, grads, diagonal in zip(trained, each, diagonals, strict=True):
        assert_close(p.grad_batch, grads)
        assert_close(p.diag_ggn_exact, diagonal)


def normalised_weight(layer: Any) -> None:
    parametrizations.weight_norm(layer)


def noisy(layer: Any) -> None:
    layer.noise = 0.1


class MaybeRandom(nn.Module):
    """Has no rule, and may be random."""

    noise = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        return x * self.scale + (self.noise * torch.randn(3) if self.noise else 0.0)


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [("2", normalised_weight, "computes its weight"), ("1", noisy, "is it random")],
)
def test_what_is_refused_has_no_result_of_the_step_before(
    name: str, change: Any, message: str
) -> None:
    """There was a warning, and individual gradients of the step before beside the new gradient."""
    model = extend(nn.Sequential(nn.Linear(3, 3), MaybeRandom(), nn.Linear(3, 2)))
    loss, (X, y) = extend(nn.CrossEntropyLoss()), batch()
    layer = model.get_submodule(name)
    before = [*layer.parameters()]
    with backpack(extensions.BatchGrad()):
        loss(model(X), y).backward()
    assert all(hasattr(p, "grad_batch") for p in before)
    change(layer)
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match=message):
        loss(model(X), y).backward()
    others = [p for p in model.parameters() if all(p is not own for own in layer.parameters())]
    assert not any(hasattr(p, "grad_batch") for p in layer.parameters())
    assert others and all(hasattr(p, "grad_batch") for p in others)


class AddsLowRank(nn.Module):
    """Adds a trained matrix of low rank to a frozen weight, and may normalise the sum."""

    def __init__(self, axis: int | None):
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(3), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(3, 1)), nn.Parameter(torch.randn(1, 3))
        self.head, self.axis = nn.Linear(3, 2), axis

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 2]."""
        weight = self.frozen + self.a @ self.b
        if self.axis is not None:
            weight = (weight * self.scale).softmax(self.axis)
        return self.head(F.linear(x, weight).tanh())


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("converter", [True, "record"])
@pytest.mark.parametrize("samples", [1, 3, 4])
def test_frozen_parameters_in_functions_are_constants(
    axis: int | None, converter: Any, samples: int
) -> None:
    """They were taken for data where a model is recorded: an error, and no private training."""
    model, X, y = AddsLowRank(axis), torch.randn(samples, 3), torch.randint(2, (samples,))
    truth = oracle.batch_grad(model, nn.CrossEntropyLoss(), X, y)
    model, loss = extend(model, use_converter=converter), extend(nn.CrossEntropyLoss())
    trained = [p for p in model.parameters() if p.requires_grad]
    with backpack(extensions.BatchGrad()):
        loss(model(X), y).backward()
    for p, grads in zip(trained, truth, strict=True):
        assert_close(p.grad_batch, grads)
    optimizer = DPSGD(
        trained, 0.1, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=samples
    )
    with backpack(*optimizer.extensions):
        loss(model(X), y).backward()
    optimizer.step()


class WithTensor(nn.Module):
    """Has a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.randn(3))
        self.tensor = torch.rand(3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        return self.layer(x) * (self.tensor * self.scale).softmax(0)


def test_error_of_a_constant_that_is_taken_for_data() -> None:
    """It named a function that combines samples, where one is a function of parameters alone."""
    model, loss = extend(WithTensor(), use_converter="record"), extend(nn.CrossEntropyLoss())
    X, y = torch.randn(3, 3), torch.tensor([0, 1, 2])
    with backpack(extensions.BatchGrad()), pytest.raises(ValueError, match="register_buffer"):
        loss(model(X), y).backward()
    model.register_buffer("tensor", vars(model).pop("tensor"))
    with backpack(extensions.BatchGrad()):
        loss(model(X), y).backward()


class SequenceFirst(nn.Module):
    """A layer of sequences that computes one of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.LSTM(2, 3), "weight_hh_l0")
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[T, N, 2] -> [N, 2]."""
        return self.head(self.layer(x)[0][-1])


@pytest.mark.parametrize("converter", [False, True, "record"])
def test_advice_for_sequences_first(converter: Any) -> None:
    """What to do where a layer that computes its weight has the samples along the second axis."""
    model, plain = SequenceFirst(), SequenceFirst()
    plain.load_state_dict(model.state_dict())
    model, loss = extend(model, use_converter=converter), extend(nn.CrossEntropyLoss())
    X, y = torch.randn(5, N, 2), torch.randint(2, (N,))
    with backpack(extensions.BatchGrad()), pytest.raises(ValueError, match="assign_samples"):
        loss(model(X), y).backward()
    assign_samples(X, torch.arange(N)[:, None].expand(5, N, 2))
    with backpack(extensions.BatchGrad()):
        loss(model(X), y).backward()
    for p, grads in zip(
        model.parameters(), oracle.batch_grad(plain, nn.CrossEntropyLoss(), X, y), strict=True
    ):
        assert_close(p.grad_batch, grads)


class Exchanged(nn.Module):
    """A product of parameters, with its axes in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.rand(2, 1)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 2] -> [N, 2]."""
        h = torch.einsum("nsi,io->nos", x, self.weight)
        return self.last(h.transpose(0, 2).movedim(2, 0).flatten(1))


@pytest.mark.parametrize("samples", [1, 2])
def test_a_single_sample_is_mixed_with_no_other(samples: int) -> None:
    """Behind an axis of one entry that was taken for its own, warnings said that it is."""
    output = extend(Exchanged(), use_converter="record")(torch.rand(samples, 3, 2))
    exts = extensions.Variance(), extensions.BatchDiagGGNExact()
    with warnings.catch_warnings(), backpack(*exts):
        warnings.simplefilter("error")
        extend(nn.CrossEntropyLoss())(output, torch.zeros(samples, dtype=torch.long)).backward()


class ByLabel(nn.Module):
    """Reads entries of the first layer in a way that depends on a label or a shape."""

    def __init__(self, how: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.how, self.table = how, nn.Parameter(torch.rand(3, 3))
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 4] -> [N, 2]."""
        return self.last(self.how(self.first(x[:, :3]).tanh(), x[:, 3].long(), self.table))


@pytest.mark.parametrize(
    "how",
    [
        lambda h, labels, table: h + table[labels],
        lambda h, labels, table: h * torch.zeros_like(h).scatter(1, labels.unsqueeze(1), 1.0),
        lambda h, labels, table: (
            h * table.mean() + table.gather(0, labels.unsqueeze(1).expand(-1, 3))
        ),
    ],
    ids=["index", "scatter", "gather"],
)
@pytest.mark.parametrize("route", ["trace", "record"])
@pytest.mark.parametrize("label", [0, 2])
def test_samples_that_all_have_the_last_label(how: Any, route: Any, label: int) -> None:
    """Other indices that were tried in place of theirs were out of range: an error."""
    X = torch.cat([torch.rand(2, 3), torch.full((2, 1), float(label))], 1).double()
    assert_first_and_second_order(ByLabel(how).double(), route, X)


@pytest.mark.parametrize(
    "how",
    [
        lambda h, labels, table: (h.unsqueeze(1) * torch.ones(3, 3).tril().to(h)).sum(1),
        lambda h, labels, table: (h.unsqueeze(1) * torch.ones(3, 3).tril().type_as(h)).sum(1),
        lambda h, labels, table: (h.unsqueeze(1) * table.to(h)).sum(1),
    ],
    ids=["to", "type_as", "parameter"],
)
@pytest.mark.parametrize("route", ["trace", "record"])
def test_tables_of_the_type_of_samples(how: Any, route: Any) -> None:
    """As many rows as there are samples were taken for those of the tensor that has the type."""
    assert_first_and_second_order(ByLabel(how).double(), route, torch.rand(3, 4).double())


def assert_first_and_second_order(model: nn.Module, route: Any, X: Tensor) -> None:
    """Compare individual gradients and both diagonals with those of plain autograd."""
    y, loss = torch.zeros_like(model(X)), nn.MSELoss()
    each = oracle.batch_grad(copy.deepcopy(model), loss, X, y)
    ggn = oracle.ggn_diag(copy.deepcopy(model), loss, X, y)
    hessian = oracle.hessian_diag(copy.deepcopy(model), loss, X, y)
    exts = extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()
    with backpack(*exts):
        extend(loss)(extend(model, use_converter=route)(X), y).backward()
    for p, *expected in zip(model.parameters(), each, ggn, hessian, strict=True):
        if p.grad is not None:
            assert_close([p.grad_batch, p.diag_ggn_exact, p.diag_h], expected)


class MaskedTokens(nn.Module):
    """Attention with a mask, or weights, that are the same for all samples: ``[1, T, T]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """[N, T] -> [N, 3]."""
        h = self.embedding(tokens)
        return self.last(F.scaled_dot_product_attention(h, h, h, attn_mask=mask).mean(1))


@pytest.mark.parametrize("kind", ["mask", "weights"])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_mask_of_one_row_is_no_sample(kind: str, samples: int) -> None:
    """It was taken for one where there are as many samples as tokens: sums of gradients."""
    model, tokens = MaskedTokens().double(), torch.randint(5, (samples, 3))
    mask = torch.ones(1, 3, 3).tril()
    mask = mask.bool() if kind == "mask" else mask.double()
    y, loss = torch.zeros(samples, 3).double(), nn.MSELoss()
    plain = copy.deepcopy(model)
    each = oracle.batch_grad(Called(plain, mask), loss, tokens, y)
    converted = extend(model, use_converter=True)
    with backpack(extensions.BatchGrad()):
        extend(loss)(converted(tokens, mask), y).backward()
    for p, grads in zip(model.parameters(), each, strict=True):
        assert_close(p.grad_batch, grads)


class Weighted(nn.Module):
    """Reads a table, or a scale, that is the same for all samples."""

    def __init__(self, table_first: bool) -> None:
        super().__init__()
        self.table_first, self.layer = table_first, nn.Linear(3, 3)

    def forward(self, *both: Tensor) -> Tensor:
        """[N, 3] or [N, T, 3] -> [N, 3]."""
        table, x = both if self.table_first else both[::-1]
        h = self.layer(x).tanh() * (table if x.dim() == table.dim() else table[0])
        return h.mean(1) if h.dim() > 2 else h


@pytest.mark.parametrize("table_first", [False, True])
@pytest.mark.parametrize(
    ("shape", "table", "is_clear"),
    [((3, 2, 3), (1, 2, 3), True), ((3, 3), (1, 1, 3), False)],
    ids=str,
)
def test_a_table_of_one_row_is_no_sample(
    shape: tuple[int, ...], table: tuple[int, ...], is_clear: bool, table_first: bool
) -> None:
    """Or it is not clear, and an error says what to do: it was silently the only sample."""
    model, x, one = (
        Weighted(table_first).double(),
        torch.rand(shape).double(),
        torch.rand(table).double(),
    )
    y, loss = torch.zeros(len(x), 3).double(), nn.MSELoss()
    both = (one, x) if table_first else (x, one)
    plain = copy.deepcopy(model)
    each = torch.autograd.functional.jacobian(
        lambda w: (
            torch.func.functional_call(plain, {"layer.weight": w}, both).square().mean(1) / len(x)
        ),
        plain.layer.weight,
    )
    converted = extend(model, use_converter="record")
    if not is_clear:
        with backpack(extensions.BatchGrad()), pytest.raises(ValueError, match=r"assign_samples\("):
            extend(loss)(converted(*both), y).backward()
        assign_samples(one, None)
    with backpack(extensions.BatchGrad()):
        extend(loss)(converted(*both), y).backward()
    assert_close(model.layer.weight.grad_batch, each)


class Called(nn.Module):
    """A model that is called with another argument as well."""

    def __init__(self, model: nn.Module, *others: Tensor):
        super().__init__()
        self.model, self.others = model, others

    def forward(self, x: Tensor) -> Any:
        return self.model(x, *self.others)


class Steps(nn.Module):
    """A recurrent network of its own, which has the steps along the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.RNNCell(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[T, N, 2] -> [N, 2]."""
        h = torch.zeros(x.shape[1], 3)
        for step in x:
            h = self.cell(step, h) + self.cell(step.flip(1), h)
        return self.last(h)


def test_an_error_tells_how_to_say_where_the_samples_are() -> None:
    """It spoke of samples that are combined, where data has them along another axis."""
    model, x = extend(Steps(), use_converter="record"), torch.rand(4, 3, 2)
    loss = extend(nn.MSELoss())
    with backpack(extensions.BatchGrad()), pytest.raises(ValueError, match=r"assign_samples\(x"):
        loss(model(x), torch.zeros(3, 2)).backward()
    assign_samples(x, torch.arange(3)[:, None].expand_as(x))
    with backpack(extensions.BatchGrad()):
        loss(model(x), torch.zeros(3, 2)).backward()
    assert model.last.weight.grad_batch.shape == (3, 2, 3)


class EachToken(nn.Module):
    """Attention over the tokens of one text; an output for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """[1, T] -> [T, 3]."""
        h = self.embedding(tokens)
        return self.last(F.scaled_dot_product_attention(h, h, h, attn_mask=mask)).view(-1, 3)


@pytest.mark.parametrize("converter", [True, "record"])
@pytest.mark.parametrize("kind", ["mask", "weights"])
def test_tokens_of_one_text_with_a_mask_of_as_many_rows(kind: str, converter: Any) -> None:
    tokens, mask = torch.randint(5, (1, 6)), torch.ones(6, 6).tril()
    mask = mask.bool() if kind == "mask" else mask
    model, loss, y = EachToken(), nn.CrossEntropyLoss(), torch.randint(3, (6,))
    grads = torch.autograd.grad(loss(model(tokens, mask), y), [*model.parameters()])
    with backpack(extensions.BatchGrad()):
        extend(loss)(extend(model, use_converter=converter)(tokens, mask), y).backward()
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert_close(p.grad_batch, grad.unsqueeze(0))


class OfNodes(nn.Module):
    """Reads one graph, or a batch and a table: the shapes do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """[1, T, 4] and [T, T, 4] -> [T, 3]."""
        return self.last((self.first(nodes).unsqueeze(2) * edges).sum(2).tanh()).view(-1, 3)


@pytest.mark.parametrize("converter", [True, "record"])
def test_nodes_of_one_graph_that_might_be_a_table(converter: Any) -> None:
    """They were silently taken for a table of positions, and edges for the samples."""
    model = extend(OfNodes(), use_converter=converter)
    loss = model(torch.rand(1, 5, 4), torch.rand(5, 5, 4)).square().sum()
    message = "as many rows as the tensor of one row"
    with pytest.raises(ValueError, match=message), backpack(extensions.BatchGrad()):
        loss.backward()


def test_one_sample_that_is_read_for_all() -> None:
    """It mixes samples, though it is a view of the data: a warning."""

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x[:1].expand(len(x), -1))

    output = extend(Model(nn.Linear(3, 2)))(torch.rand(N, 3))
    with pytest.warns(UserWarning, match="mixes the samples"), backpack(extensions.BatchGrad()):
        output.sum().backward()


class Sine(torch.autograd.Function):
    """A function that nobody can read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("quantity", [extensions.DiagGGNExact, extensions.KFLR])
def test_what_curvature_a_warning_refuses_has_none_of_the_step_before(quantity: Any) -> None:
    model, loss = mlp(), extend(nn.CrossEntropyLoss())
    X, y, ext = torch.rand(N, 3), torch.randint(2, (N,)), quantity()
    ext._fail_mode = "WARNING"
    extend(model)
    with backpack(ext):
        loss(model(X), y).backward()
    hidden: Any = Sine.apply(model[:-1](X))
    with pytest.warns(UserWarning, match="not a module"), backpack(ext):
        loss(model[-1](hidden), y).backward()
    assert not hasattr(model[0].weight, ext.savefield)
    assert hasattr(model[-1].weight, ext.savefield)


@pytest.mark.parametrize("route", [False, True, "record"], ids=str)
def test_gradients_of_data_while_parameters_are_frozen(route: Any) -> None:
    """Such as Langevin steps: second order wanted a loss, though nothing was to be computed."""
    model, loss = extend(mlp(), use_converter=route), nn.CrossEntropyLoss()
    X, y = batch()
    with backpack(extensions.DiagGGNExact(), extensions.DiagHessian()):
        model.requires_grad_(False)
        moved = X.requires_grad_()
        (slope,) = torch.autograd.grad(model(moved).square().sum(), moved)
        model.requires_grad_(True)
        moved = (X - 0.1 * slope).detach()
        extend(loss)(model(moved), y).backward()
    plain = copy.deepcopy(model)
    ggn, hessian = (find(plain, loss, moved, y) for find in (oracle.ggn_diag, oracle.hessian_diag))
    for p, *expected in zip(model.parameters(), ggn, hessian, strict=True):
        assert_close([p.diag_ggn_exact, p.diag_h], expected)


class ByPass(torch.autograd.Function):
    """A network whose backward pass is inside of that of a function, as in an adjoint method."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, network: nn.Module) -> Tensor:
        ctx.network = network
        ctx.save_for_backward(x)
        return network(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.network(x).backward(grad)
        return x.grad, None


class PassInside(nn.Module):
    """Some layers have a backward pass inside of another one."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor], layers: slice) -> None:
        super().__init__()
        self.net, self.way, self.layers = mlp(), way, layers

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 2]."""
        start, stop, _ = self.layers.indices(len(self.net))
        return self.net[stop:](self.way(self.net[self.layers], self.net[:start](x)))


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "checkpoint": lambda network, x: checkpoint(network, x, use_reentrant=True),
    "function": lambda network, x: ByPass.apply(x, network),
}


@pytest.mark.parametrize("layers", [slice(0, 2), slice(1, 3), slice(0, 3)], ids=str)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_joint_norms_of_passes_inside_of_others(
    way: Callable[[nn.Module, Tensor], Tensor], layers: slice
) -> None:
    """Each pass clipped its own part, by the norms of that alone."""
    model, loss, (X, y) = PassInside(way, layers), nn.CrossEntropyLoss(reduction="sum"), batch()
    each = oracle.batch_grad(copy.deepcopy(model.net), loss, X, y)
    value = extend(loss)(extend(model)(X.requires_grad_()), y)
    if layers != slice(0, 3):
        with (
            backpack(extensions.ClippedGrad(0.1)),
            pytest.raises(ValueError, match="together"),
        ):
            value.backward()
        assert not any(hasattr(p, "grad_clipped") for p in model.parameters())
        return
    with backpack(extensions.ClippedGrad(0.1)):
        value.backward()
    norms = torch.stack([g.flatten(1).square().sum(1) for g in each]).sum(0).sqrt()
    for p, grads in zip(model.parameters(), each, strict=True):
        assert_close(p.clip_norms, norms)
        assert_close(p.grad_clipped, einsum("n,n...->...", (0.1 / norms).clamp(max=1), grads))


class ActNorm(nn.Module):
    """Returns the logarithm of its determinant, which depends on no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x + self.shift) * self.scale.exp(), self.scale.sum()


class Turn(nn.Module):
    """Does as well, in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight.T, torch.linalg.slogdet(self.weight)[1]


class Flow(nn.Module):
    """Normalises data: returns the negative logarithm of each sample's density."""

    def __init__(self, total: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.total, self.layer = total, nn.Linear(3, 3)
        self.steps = nn.ModuleList([ActNorm(), Turn(), ActNorm()])

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 1]."""
        z, volume = self.layer(x).tanh(), self.total(x)
        for step in self.steps:
            z, change = step(z)
            volume = volume + change
        return (0.5 * z.square().sum(1) - volume).unsqueeze(1)


TOTALS: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda x: 0,
    "zeros": lambda x: torch.zeros(x.shape[0]),
    "new": lambda x: x.new_zeros(x.shape[0]),
}


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("samples", [1, 3, 4])
@pytest.mark.parametrize("total", TOTALS.values(), ids=TOTALS)
@pytest.mark.parametrize("route", [True, "record"], ids=str)
def test_determinants_that_modules_of_a_flow_return(
    route: Any, total: Callable[[Tensor], Any], samples: int
) -> None:
    """Where they were recorded, it ended in an IndexError of torch, or was refused as a mixture."""
    assert_first_and_second_order(Flow(total), route, torch.randn(samples, 3))


SPREADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "vector": lambda total, x: total * torch.tensor([1.0, 2.0]),
    "expand": lambda total, x: total.expand(x.shape[0], 2),
    "zeros": lambda total, x: torch.zeros(x.shape[0], 1) + total,
    "stack": lambda total, x: torch.stack([total, total]),
    "axes": lambda total, x: total[None, None],
    "cat": lambda total, x: torch.cat([total.view(1, 1)] * x.shape[0]),
    "layer": lambda total, x: F.linear(total.view(1, 1), torch.ones(2, 1)),
}


class AddsTotal(nn.Module):
    """Adds a number of all samples to what each has, after functions of that number."""

    def __init__(self, spread: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.spread = mlp(), spread

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 2]."""
        h = self.net(x)
        return h + self.spread(h.square().sum(), x)


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("route", [True, "record"], ids=str)
def test_numbers_of_all_samples_that_get_axes(
    route: Any, spread: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """They were silently taken for numbers of none: gradients of samples were those of mixtures."""
    model, (X, y) = extend(AddsTotal(spread), use_converter=route), batch()
    loss = nn.CrossEntropyLoss()(model(X[:3]), y[:3])
    with (
        backpack(extensions.BatchGrad()),
        pytest.raises(ValueError, match="computed from all samples"),
    ):
        loss.backward()


ROWS_OF_TOTALS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "ones": lambda m, x: torch.ones(x.shape[0], 3) * m.layer(x).mean(),
    "inverse": lambda m, x: torch.ones(x.shape[0], 3) / m.layer(x).norm(),
    "expand": lambda m, x: m.layer(x).mean().expand(x.shape[0], 3),
    "layer": lambda m, x: m.layer(m.layer(x).mean().expand(x.shape[0], 3)),
}


class OfRows(nn.Module):
    """Predicts what a function makes of its layer."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        return self.function(self, x)


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("function", ROWS_OF_TOTALS.values(), ids=ROWS_OF_TOTALS)
@pytest.mark.parametrize("route", [True, "record"], ids=str)
def test_totals_in_the_place_of_samples(
    route: Any, function: Callable[[Any, Tensor], Tensor]
) -> None:
    """Individual gradients were those of mixtures, without a word, and those of one sample are."""
    for samples in (4, 1):
        model, X = extend(OfRows(function), use_converter=route), torch.randn(samples, 3)
        loss = extend(nn.MSELoss())(model(X), torch.randn(samples, 3))
        with backpack(extensions.BatchGrad()):
            if samples > 1:
                with pytest.raises(ValueError, match="computed from all samples"):
                    loss.backward()
            else:
                loss.backward()
                for p in model.parameters():
                    assert_close(p.grad_batch[0], p.grad)


TASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stack": lambda one, other: torch.stack([one, 0.5 * other]).sum(),
    "weights": lambda one, other: (torch.stack([one, other]) * torch.tensor([1.0, 0.5])).sum(),
    "product": lambda one, other: torch.stack([one, other]) @ torch.tensor([1.0, 0.5]),
    "cat": lambda one, other: torch.cat([one.view(1), 0.5 * other.view(1)]).sum(),
}


class OfTasks(nn.Module):
    """Returns the sum of two losses."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.combine = mlp(), combine

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[N, 3], [N] -> []."""
        z = self.net(x)
        return self.combine(F.cross_entropy(z, y), F.mse_loss(z, torch.ones_like(z)))


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("combine", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("route", [True, "record"], ids=str)
def test_losses_of_tasks_that_a_model_stacks(
    route: Any, combine: Callable[[Tensor, Tensor], Tensor], samples: int
) -> None:
    """They were refused for having no samples, or (cat) for a shape that nothing can follow."""
    model, (X, y) = OfTasks(combine), batch()
    X, y, plain = X[:samples], y[:samples], copy.deepcopy(model.net)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) + 0.5 * F.mse_loss(z, torch.ones_like(z))

    truths = (oracle.batch_grad, oracle.ggn_diag, oracle.hessian_diag)
    known = [find(plain, loss, X, y) for find in truths]
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()):
        extend(model, use_converter=route)(X, y).backward()
    for p, *expected in zip(model.net.parameters(), *known, strict=True):
        assert_close([p.grad_batch, p.diag_ggn_exact, p.diag_h], expected)


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("route", [True, "record"], ids=str)
def test_functions_of_stacked_losses_mix_samples(route: Any) -> None:
    """They are no sums of terms that depend on one sample each."""
    model, (X, y) = OfTasks(lambda *losses: torch.stack(losses).logsumexp(0)), batch()
    loss = extend(model, use_converter=route)(X, y)
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match="mixes the samples"):
        loss.backward()


class OfTwoSequences(nn.Module):
    """A decoder of sequences ``[S, N, 3]`` and ``[T, N, 3]``, with something before and behind."""

    def __init__(self, before: Callable[[Tensor], Tensor], behind: Callable[[Tensor], Tensor]):
        super().__init__()
        self.before, self.behind = before, behind
        self.one, self.other = nn.Linear(3, 4), nn.Linear(3, 4)
        self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[S, N, 3] and [T, N, 3] -> [T, N, 2]."""
        x = self.behind(self.one(self.before(x)))
        y = self.behind(self.other(self.before(y)))
        return self.head(self.attention(y, x, x, need_weights=False)[0])


class FromStates(nn.Module):
    """A recurrent layer that is given states: of more tensors than the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 4), nn.Linear(3, 4)
        self.lstm, self.head = nn.LSTM(4, 4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        """[N, T, 3], [L, N, 3] and [L, N, 4] -> [N, T, 2]."""
        return self.head(self.lstm(self.one(x), (self.other(h), c))[0])


def _check_input_factors(model: Any, converter: Any, *inputs: Tensor, scale: float = 1) -> None:
    """Compare the input factors of two layers: whose input is ``[T, N, 3]``, or ``[N, T, 3]``."""
    model, loss = extend(model, use_converter=converter), extend(nn.MSELoss())
    for approximation in (None, "reduce"):
        with backpack(extensions.KFLR(approximation=approximation)):
            y = model(*inputs)
            loss(y, torch.zeros_like(y)).backward()
        for layer, x in ((model.one, inputs[0]), (model.other, inputs[1])):
            rows = scale * (x if len(x) == N else x.transpose(0, 1))
            rows = rows.mean(1, keepdim=True) if approximation else rows
            assert_close(layer.weight.kflr[1], einsum("nti,ntj->ij", rows, rows) / N)


@pytest.mark.parametrize("lengths", [(5, 3), (3, 5), (1, 3), (5, N + 2)])
@pytest.mark.parametrize(
    "behind", [nn.Identity(), nn.Tanh(), torch.tanh], ids=["layer", "Tanh", "tanh"]
)
@pytest.mark.parametrize("before", [lambda x: x, lambda x: 2 * x], ids=["data", "scaled"])
@pytest.mark.parametrize("converter", [True, "record"])
def test_sequences_first_of_different_lengths(
    converter: Any, before: Any, behind: Any, lengths: tuple[int, int]
) -> None:
    """One was taken for a table that all samples read: its layer had N times the factor."""
    inputs = [torch.randn(length, N, 3) for length in lengths]
    model, scale = OfTwoSequences(before, behind), before(1.0)
    _check_input_factors(model, converter, *inputs, scale=scale)


def test_sequences_beside_states_with_the_layers_first() -> None:
    """The sequences were taken for a table, since two states have as many rows."""
    states = torch.randn(2, N, 3), torch.randn(2, N, 4)
    _check_input_factors(FromStates(), "record", torch.randn(N, 5, 3), *states)


def test_sequences_that_are_moved_before_a_layer_that_has_them_first() -> None:
    """Where the samples were before is not found out afterwards."""
    model = extend(OfTwoSequences(lambda x: x.flip(0), nn.Identity()), use_converter="record")
    y = model(torch.randn(5, N, 3), torch.randn(3, N, 3))
    with (
        backpack(extensions.KFLR()),
        pytest.raises(ValueError, match="the data of the network has its samples along the first"),
    ):
        extend(nn.MSELoss())(y, torch.zeros_like(y)).backward()


def test_padding_of_sequences_first() -> None:
    """A function has made a mask of it: nobody asks where the samples were before."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 4)
            self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0)

        def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
            return self.layer(self.one(x), src_key_padding_mask=is_padding)

    x, is_padding = torch.randn(5, N, 3), torch.arange(5) >= torch.tensor([[5], [3], [4], [1]])
    plain, loss = Encoder(), nn.MSELoss(reduction="sum")
    model = extend(copy.deepcopy(plain), use_converter="record")
    with backpack(extensions.BatchGrad(), extensions.KFLR()):
        y = model(x, is_padding)
        extend(copy.deepcopy(loss))(y, torch.zeros_like(y)).backward()
    for n in range(N):
        y = plain(x[:, n : n + 1], is_padding[n : n + 1])
        grads = torch.autograd.grad(loss(y, torch.zeros_like(y)), [*plain.parameters()])
        assert_close([p.grad_batch[n] for p in model.parameters()], [*grads])
    assert_close(model.one.weight.kflr[1], einsum("tni,tnj->ij", x, x) / N)


class OfTables(nn.Module):
    """Tables that a layer makes of ones, with as many rows, by chance, as there are samples."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.read, self.layer, self.encode = read, nn.Linear(3, 4), nn.Linear(2, 4)
        self.columns, self.rows = (
            nn.MultiheadAttention(4, 2, batch_first=first) for first in (False, True)
        )
        self.recurrent = nn.GRU(2, 4)

    def table(self, *shape: int) -> Tensor:
        return self.encode(torch.ones(*shape, 2))

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, 3] -> [N, 4]."""
        return self.read(self, self.layer(x))


def _by_both(m: Any, x: Tensor) -> Tensor:
    q, first = m.table(N, N), x.transpose(0, 1)
    by_rows = m.rows(q, x, x, need_weights=False)[0].mean(1)
    return by_rows + m.columns(q, first, first, need_weights=False)[0].mean(0)


def _by_rows_and_columns(m: Any, x: Tensor) -> Tensor:
    q, x = m.table(N, N), x.mean(1)
    return (x[:, None] * q).tanh().mean(1) + (x * q).mean(0)


TABLES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "moved": lambda m, x: (
        (x.mean(1, True) * m.table(N, N).flip(0).transpose(0, 1).flatten(0, 1)).tanh().mean(1)
    ),
    "rows and columns": _by_rows_and_columns,
    "attention": _by_both,
    "states": lambda m, x: (
        (x.mean(1, True) * m.recurrent(torch.ones(3, N, 2))[1][0]).tanh().mean(1)
    ),
}


@pytest.mark.parametrize("converter", [True, "record"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_constants_that_functions_move(name: str, converter: Any) -> None:
    """An axis of N entries was taken for the samples, and what was made of it still had them."""
    plain, x = OfTables(TABLES[name]), torch.randn(N, 3, 3)
    model = extend(copy.deepcopy(plain), use_converter=converter)
    with backpack(extensions.BatchGrad()):
        y = model(x)
        extend(nn.MSELoss(reduction="sum"))(y, torch.zeros_like(y)).backward()
    params = dict(plain.named_parameters())
    for n, of_sample in enumerate(plain(x).square().sum(1)):
        grads = torch.autograd.grad(
            of_sample, params.values(), retain_graph=True, allow_unused=True
        )
        for own, grad in zip(params, grads, strict=True):
            if grad is not None:
                assert_close(model.get_parameter(own).grad_batch[n], grad)


class ShiftedTargets(nn.Module):
    """A decoder of sequences ``[S, N, 2]`` and tokens ``[T, N]`` behind one that starts them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(2, 3), nn.GRU(3, 3)
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[S, N, 2] and [T, N] -> [N, T, 2]."""
        y = torch.cat([y.new_zeros(1, y.shape[1]), y[:-1]])
        return self.head(self.decoder(self.table(y), self.encoder(x)[1])[0]).transpose(0, 1)


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("converter", [True, "record"])
def test_shifted_targets_that_come_first_are_no_table(converter: Any, samples: int) -> None:
    """The tokens could not be followed: their factor was as many times too large as samples."""
    X, y = torch.randn(samples, samples, 2), torch.randint(5, (3, samples))
    model = extend(ShiftedTargets(), use_converter=converter)
    with backpack(extensions.KFLR()):
        z = model(X, y)
        extend(nn.MSELoss())(z, torch.zeros_like(z)).backward()
    tokens = torch.cat([torch.zeros(1, samples).long(), y[:-1]])
    counts = tokens.flatten().bincount(minlength=5).to(X.dtype)
    assert_close(model.get_parameter("table.weight").kflr[0], (counts / samples).diag())


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_a_use_without_positions_leaves_the_others(approximation: Any) -> None:
    """Such as of the tokens before the first one: the input factor was not a number."""
    model = extend(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)))
    X = torch.tensor([[0, 1], [1, 4], [1, 1]])
    with backpack(extensions.KFLR(approximation=approximation)):
        y = model[1](torch.cat([model[0](X), model[0](X[:, :0])], 1))
        extend(nn.MSELoss())(y, torch.zeros_like(y)).backward()
    rows = nn.functional.one_hot(X, 5).to(y.dtype)
    rows = rows.mean(1, keepdim=True) if approximation == "reduce" else rows / 2**0.5
    factor = model[0].get_parameter("weight").kflr[0]
    assert_close(factor, einsum("nti,ntj->ij", rows, rows) / 3)


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("kind", [extensions.KFLR, extensions.EKFAC, KroneckerGGN])
def test_the_only_use_of_a_weight_has_no_positions(kind: Any, approximation: Any) -> None:
    """Its factors were not numbers, or an error."""
    table, layer, rest = nn.Embedding(5, 3), nn.Linear(2, 3), nn.Linear(3, 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer, self.rest = table, layer, rest

        def forward(self, x: Tensor) -> Tensor:
            parts = x, self.layer(x[:, :0, :2]), self.table(torch.zeros(len(x), 0).long())
            return self.rest(torch.cat(parts, 1))

    model, X, y = Model(), torch.rand(N, 2, 3), torch.rand(N, 2, 2)
    if kind is KroneckerGGN:
        operator = KroneckerGGN(model, nn.MSELoss(), [(X, y)], approximation=approximation)
        blocks = dict(zip(dict(model.named_parameters()), operator.factors, strict=True))
    else:
        loss = extend(nn.MSELoss())(extend(model, use_converter="record")(X), y)
        with backpack(ext := kind(approximation=approximation)):
            loss.backward()
        blocks = {name: getattr(p, ext.savefield) for name, p in model.named_parameters()}
    for name, block in blocks.items():
        known = [block.eigenvalues] if kind is extensions.EKFAC else block
        for factor in known:
            assert factor.isfinite().all()
            assert factor.any() == name.startswith("rest")


@pytest.mark.parametrize("is_extended", [False, True])
def test_learned_weights_of_losses(is_extended: bool) -> None:
    """Losses with learned variances (Kendall et al.): the module that combines them is no loss."""

    class Combined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_variances = nn.Parameter(torch.rand(2))

        def forward(self, *losses: Tensor) -> Tensor:
            s = self.log_variances
            return ((-s).exp() * torch.stack(losses) + s).sum()

    model, combined, X = mlp(), Combined(), torch.rand(N, 3)
    losses = [nn.MSELoss(), nn.CrossEntropyLoss()]
    targets = [torch.zeros_like(model(X)), torch.zeros(N).long()]
    pairs = list(zip(losses, targets, strict=True))
    diagonals = [oracle.ggn_diag(model, loss, X, target)[0] for loss, target in pairs]
    weights = (-combined.log_variances).exp().tolist()
    y = extend(model)(X)
    values = [extend(loss)(y, target) for loss, target in pairs]
    total = (extend(combined) if is_extended else combined)(*values)
    with warnings.catch_warnings(), backpack(extensions.DiagGGNExact()):
        warnings.simplefilter("error")
        if is_extended:
            with pytest.raises(ValueError, match=r"outside of extended modules.*learned"):
                total.backward()
            return
        total.backward()
    first, *_ = model.parameters()
    assert_close(first.diag_ggn_exact, weights[0] * diagonals[0] + weights[1] * diagonals[1])


class CallsOutProjection(nn.Module):
    """Attention of one's own, with the parameters of ``nn.MultiheadAttention``."""

    def __init__(self, calls_both: bool) -> None:
        super().__init__()
        self.attention, self.calls_both = nn.MultiheadAttention(4, 2, batch_first=True), calls_both

    def forward(self, x: Tensor) -> Tensor:
        attention = self.attention
        if self.calls_both:
            heads = attention(x, x, x, need_weights=False)[0].tanh()
        else:
            qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
            q, k, v = qkv.unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
            heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return attention.out_proj(heads)


@pytest.mark.parametrize("calls_both", [False, True])
@pytest.mark.parametrize("converter", ["trace", "record"])
def test_a_child_of_attention_that_the_model_calls(converter: Any, calls_both: bool) -> None:
    """Parameters of ``out_proj`` had no quantities, or those of the use in attention alone."""
    model, lossfunc = CallsOutProjection(calls_both), nn.MSELoss()
    X, y = torch.rand(N, 3, 4), torch.rand(N, 3, 4)
    truths = oracle.batch_grad(model, lossfunc, X, y), oracle.ggn_diag(model, lossfunc, X, y)
    names = [name for name, _ in model.named_parameters()]
    model = extend(model, use_converter=converter)
    with warnings.catch_warnings(), backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        warnings.simplefilter("error")
        extend(lossfunc)(model(X), y).backward()
    params = dict(model.named_parameters())
    for name, gradients, diagonal in zip(names, *truths, strict=True):
        assert_close(params[name].grad_batch, gradients)
        assert_close(params[name].diag_ggn_exact, diagonal)


class PadsNodes(nn.Module):
    """Attention within each graph: its nodes are padded, and one more row is for what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.key, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, graph: Tensor, graphs: int) -> Tensor:
        h, counts = self.layer(x), graph.bincount(minlength=graphs)
        most = int(counts.max())
        positions = torch.arange(len(x)) - (counts.cumsum(0) - counts)[graph]
        rows, is_node = h.new_full((graphs * most + 1, 4), 0.0), torch.zeros(graphs * most + 1)
        rows[graph * most + positions] = h
        is_node[graph * most + positions] = 1
        h, mask = rows[:-1].view(graphs, most, 4), is_node[:-1].view(graphs, 1, most)
        scores = (h @ self.key(h).transpose(1, 2)).masked_fill(mask == 0, -torch.inf)
        return self.last((scores.softmax(-1) @ h).tanh().mul(mask.transpose(1, 2)).sum(1))


@pytest.mark.parametrize("sizes", [(2, 4, 3), (1, 5), (3, 3, 3), (4,)])
def test_nodes_of_graphs_that_are_padded(sizes: tuple[int, ...]) -> None:
    """As ``to_dense_batch`` does: the row that belongs to no graph was an error."""
    count = len(sizes)
    model, lossfunc, y = PadsNodes(), nn.MSELoss(), torch.rand(count, 2)
    x, graph = torch.rand(sum(sizes), 3), torch.arange(count).repeat_interleave(torch.tensor(sizes))
    params, gradients, diagonals = [*model.parameters()], [], []
    for one, target in zip(x.split(sizes), y, strict=True):
        f = model(one, torch.zeros(len(one)).long(), 1)[0]
        value = (f - target).square().sum() / y.numel()
        gradients.append(torch.autograd.grad(value, params, retain_graph=True))
        rows = [torch.autograd.grad(each, params, retain_graph=True) for each in f]
        both = zip(*rows, strict=True)
        diagonals.append([2 / y.numel() * sum(g.square() for g in each) for each in both])
    extend(model, use_converter="record")
    assign_samples(x, graph)
    with backpack(extensions.BatchGrad(), extensions.BatchDiagGGNExact()):
        extend(lossfunc)(model(x, graph, count), y).backward()
    for i, p in enumerate(params):
        assert_close(p.grad_batch, torch.stack([each[i] for each in gradients]))
        assert_close(p.diag_ggn_exact_batch, torch.stack([each[i] for each in diagonals]))


def test_rows_of_nodes_and_a_rest_that_are_not_padded() -> None:
    """A node without messages is not of the graph that padding would give it."""

    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, to: Tensor) -> Tensor:
            h = self.layer(x)
            h = torch.zeros(7, 4).index_add(0, to, h[to])
            return self.last(h[:-1])

    model, x = extend(Messages(), use_converter="record"), torch.rand(6, 3)
    assign_samples(x, torch.tensor([0, 1, 1, 1, 2, 2]))
    loss = extend(nn.MSELoss())(model(x, torch.tensor([0, 2, 3, 4, 5])), torch.zeros(6, 2))
    with pytest.raises(ValueError, match="combines different"), backpack(extensions.BatchGrad()):
        loss.backward()


class ChangesAttention(nn.Module):
    def __init__(self, change: Callable[[Tensor, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, **options), nn.Linear(4, 2)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.attention(x, x, x, need_weights=False)
        self.change(h, x)
        return self.last(h.tanh())


@pytest.mark.parametrize("change", [Tensor.add_, lambda h, x: h[:, 0].mul_(2), Tensor.mul_])
@pytest.mark.parametrize("converter", [False, "record"])
def test_changes_in_place_of_what_attention_returns(converter: Any, change: Any) -> None:
    """It is a view of rows in another order: the gradient went past what the layer had returned."""
    model, lossfunc = ChangesAttention(change, batch_first=True), nn.MSELoss()
    X, y = torch.rand(N, 3, 4), torch.rand(N, 3, 2)
    truths = oracle.batch_grad(model, lossfunc, X, y), oracle.ggn_diag(model, lossfunc, X, y)
    exts: list[Any] = [extensions.BatchGrad()]
    exts += [extensions.DiagGGNExact()] if converter else []
    extend(model, use_converter=converter)
    with warnings.catch_warnings(), backpack(*exts):
        warnings.simplefilter("error")
        extend(lossfunc)(model(X), y).backward()
    for p, gradients, diagonal in zip(model.parameters(), *truths, strict=True):
        assert_close(p.grad_batch, gradients)
        assert_close(p.grad, gradients.sum(0))
        if converter:
            assert_close(p.diag_ggn_exact, diagonal)


# ------------------------------------------------------------------ adapters and masks


def check_samples(model: nn.Module, *data: Tensor) -> None:
    """Compare individual gradients and the diagonal of the GGN with plain autograd."""
    count = len(data[0])
    y = torch.randint(3, (count,))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients: list[tuple[Tensor, ...]] = []
    columns: list[tuple[Tensor, ...]] = []
    for n in range(count):
        z = model(*(x[n : n + 1] for x in data))
        options: Any = {"retain_graph": True, "materialize_grads": True}
        loss = F.cross_entropy(z, y[n : n + 1])
        gradients.append(torch.autograd.grad(loss, [*named.values()], **options))
        p = z[0].softmax(0).detach()
        for c in range(3):
            column = z[0, c] * p[c].sqrt() - z[0] @ p * p[c].sqrt()
            columns.append(torch.autograd.grad(column, [*named.values()], **options))
    recorded = extend(model, use_converter="record")
    with warnings.catch_warnings(), backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        warnings.simplefilter("error")
        extend(nn.CrossEntropyLoss(reduction="sum"))(recorded(*data), y).backward()
    for parameter, *each in zip(named.values(), *gradients, strict=True):
        assert_close(parameter.grad_batch, torch.stack(each))
    for parameter, *each in zip(named.values(), *columns, strict=True):
        assert_close(parameter.diag_ggn_exact, torch.stack(each).square().sum(0))


class RelativePositions(nn.Module):
    """Attention with a learned bias for each distance, where a causal mask lets it."""

    def __init__(self, expands: bool) -> None:
        super().__init__()
        self.tokens, self.biases = nn.Embedding(7, 4), nn.Embedding(4, 2)
        self.last, self.expands = nn.Linear(4, 3), expands

    def forward(self, tokens: Tensor) -> Tensor:
        count, length = tokens.shape
        places = torch.arange(length)
        biases = self.biases((places[:, None] - places).abs()).permute(2, 0, 1).unsqueeze(0)
        mask = places[None, None, None, :] <= places[None, None, :, None]
        if self.expands:
            mask = mask.expand(count, -1, length, length)
        bias = torch.where(mask, biases, -1e9)
        x = self.tokens(tokens).view(count, length, 2, 2).transpose(1, 2)
        y = F.scaled_dot_product_attention(x, x, x, attn_mask=bias)
        return self.last(y.transpose(1, 2).reshape(count, length, 4).mean(1))


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_biases_of_positions_behind_a_mask(samples: int, length: int, expands: bool) -> None:
    """As many positions as samples (and as heads) were an error."""
    check_samples(RelativePositions(expands), torch.randint(7, (samples, length)))


class Adapted(nn.Module):
    """A frozen layer whose result is changed in place, for some samples."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 4), requires_grad=trained)
        self.b = nn.Parameter(torch.randn(4, 2), requires_grad=trained)
        self.rank = nn.Parameter(torch.tensor([2.0]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y += x @ self.a.T @ self.b.T / (self.rank + 1e-5)
        return y


class AdaptedAttention(nn.Module):
    """Queries have adapters, keys have none; all that is read is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4).requires_grad_(False)
        self.places = nn.Embedding(3, 4).requires_grad_(False)
        self.q, self.k = Adapted(), nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        count, length = tokens.shape
        x = self.tokens(tokens) + self.places(torch.arange(length)[None])
        q, k = (layer(x).view(count, length, 2, 2).transpose(1, 2) for layer in (self.q, self.k))
        chosen = None if bool(mask.all()) else mask[:, None, None]
        y = F.scaled_dot_product_attention(q, k, q, chosen)
        return self.last(y.transpose(1, 2).reshape(count, length, 4).mean(1))


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_what_a_frozen_layer_returns_is_changed_in_place(samples: int) -> None:
    """Of one sample, its positions were taken for samples: an error."""
    mask = torch.ones(samples, 3, dtype=torch.bool)
    check_samples(AdaptedAttention(), torch.randint(7, (samples, 3)), mask)


def test_what_changes_a_view_is_made_once() -> None:
    """Each step found out anew where the samples are: up to sixteen times the plain pass."""
    model = extend(Adapted(), use_converter="record")
    kept = vars(model)["_backpack_functions"].applications
    known = []
    for _ in range(2):
        model(torch.rand(2, 3, 4))
        known.append([id(made.module) for made in kept.values()])
    assert known[0] == known[1]
    assert any(made.module.name == "change_view" for made in kept.values())


class ManyAdapters(nn.Module):
    """Each sample has its own adapter, by the order of the samples: the first ones are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).requires_grad_(False)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.trained, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        for n in range(len(x)):
            adapter = self.frozen if float(x[n, 0, 0]) < 0 else self.trained
            y[[n]] += adapter(x[[n]])
        return self.last(y.tanh().mean(1))


@pytest.mark.parametrize("signs", [(-1, 1), (-1, 1, -1), (1, -1), (-1, -1, 1, 1)], ids=str)
def test_rows_that_a_frozen_layer_returns_are_changed_in_place(signs: tuple[int, ...]) -> None:
    """Such as of samples with other adapters, the first of which is frozen: it was an error."""
    X = torch.rand(len(signs), 2, 4) * torch.tensor(signs)[:, None, None]
    check_samples(ManyAdapters(), X)


class ParametrisedWhileCalled(nn.Module):
    """A frozen layer that has a weight with an adapter for as long as it is called."""

    class Added(nn.Module):
        """Holds what is added, which is no parameter."""

        def __init__(self, change: Tensor) -> None:
            super().__init__()
            self.change = change

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.change

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added = self.Added(2 * self.b.weight @ self.a.weight)
        parametrize.register_parametrization(self.layer, "weight", added)
        try:
            with parametrize.cached():
                y = self.layer(x)
        finally:
            parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)
        return self.last(y.tanh())


@pytest.mark.parametrize("samples", [1, 3, 4])
def test_layers_that_are_parametrised_while_they_are_called(samples: int) -> None:
    """With what functions of parameters have computed: an error said that it led nowhere."""
    check_samples(ParametrisedWhileCalled(), torch.rand(samples, 4))


class FewEntries(nn.Module):
    """A change of a frozen weight that has few entries, whose places are plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)
        self.entries = nn.Parameter(torch.randn(5))
        self.places = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 3, 2, 2]])

    def forward(self, x: Tensor) -> Tensor:
        change = torch.zeros(4, 4)
        change[self.places[0], self.places[1]] = self.entries
        return self.last((self.layer(x) + F.linear(x, change)).tanh())


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_places_that_are_plain_tensors(samples: int) -> None:
    """Beside a single sample, they were taken for data: an error."""
    check_samples(FewEntries(), torch.rand(samples, 4))


@pytest.mark.parametrize("is_padded", [False, True])
def test_questions_about_a_batch_name_their_place(is_padded: bool) -> None:
    """Such as whether a mask has any padding, which another batch may have not."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x if mask.all() else x.masked_fill(~mask, 0))

    model, (X, y), lossfunc = Masked(), batch(), extend(nn.CrossEntropyLoss())
    mask = torch.ones(N, 3, dtype=torch.bool)
    mask[1, 2] = not is_padded
    optimiser = private(model.parameters())
    extend(model, use_converter="record")
    with backpack(*optimiser.extensions):
        lossfunc(model(X, mask), y).backward()
    if not is_padded:
        optimiser.step()
        return
    with pytest.raises(ValueError, match=rf"\(__bool__ at {Path(__file__).name}:"):
        optimiser.step()

"""Functions that nobody has recorded: second-order quantities read them from the autograd graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend, extensions
from backpack.core.engine.paths import is_unpacked

N, T, C = 3, 5, 4

# Else a checkpoint may hold what nodes have stored: it is not looked at.
TELLS = is_unpacked(torch.ones(1, requires_grad=True).exp().grad_fn)
pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.skipif(not TELLS, reason="PyTorch does not tell whether hooks hold tensors"),
]


def quantities_agree(
    model: nn.Module, extended: nn.Module, lossfunc: nn.Module, X: Tensor, y: Tensor
) -> None:
    """Compare with autograd: of the whole batch, and of two samples."""
    truths: list[tuple[Any, list[Tensor]]] = [
        (extensions.DiagGGNExact, oracle.ggn_diag(model, lossfunc, X, y)),
        (extensions.BatchDiagGGNExact, oracle.batch_ggn_diag(model, lossfunc, X, y)),
        (extensions.DiagHessian, oracle.hessian_diag(model, lossfunc, X, y)),
        (extensions.BatchDiagHessian, oracle.batch_hessian_diag(model, lossfunc, X, y)),
    ]
    with backpack(*[ext() for ext, _ in truths]):
        extend(copy.deepcopy(lossfunc))(extended(X), y).backward()
    for ext, truth in truths:
        for p, expected in zip(extended.parameters(), truth, strict=True):
            torch.testing.assert_close(getattr(p, ext().savefield), expected)
    chosen = [2, 0]
    with backpack(extensions.BatchDiagGGNExact(subsampling=chosen)):
        extend(copy.deepcopy(lossfunc))(extended(X), y).backward()
    for p, expected in zip(extended.parameters(), truths[1][1], strict=True):
        torch.testing.assert_close(p.diag_ggn_exact_batch, expected[chosen])


# --- Between the model and its loss ---------------------------------------------------------------


class Positions(nn.Module):
    """Returns scores of classes for each position, ``[N, T, C]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, C)
        self.activation = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


class OfPositions(nn.Module):
    """The same model, with what comes between it and the loss."""

    def __init__(self, model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.model(x))


WEIGHTS = torch.linspace(0.5, 1.5, N, dtype=torch.float64)
MASK = torch.tensor([[True, True, False, True, True]] * N)
EVEN = torch.arange(N) % 2 == 0
BEFORE_LOSS: dict[str, Callable[[Tensor], Tensor]] = {
    "classes first": lambda z: z.transpose(1, 2),
    "last position": lambda z: z[:, -1],
    "mean of positions": lambda z: z.mean(1),
    "scaled": lambda z: z[:, 0] * 0.5 + 1,
    "log_softmax": lambda z: F.log_softmax(z, -1).movedim(-1, 1),
    "gathered": lambda z: z.gather(1, torch.arange(N).view(N, 1, 1).expand(N, 1, C)).squeeze(1),
    "of each sample": lambda z: z[:, 1] * WEIGHTS[:, None],
    "of each class": lambda z: z[:, 1] * torch.arange(1, C + 1),
    "chosen classes": lambda z: torch.where(z[:, 1] > 0, z[:, 1], z[:, 1].exp()),
    "masked": lambda z: z.masked_fill(~MASK[..., None], 0.0).sum(1),
    "concatenated": lambda z: torch.cat([z[:, 0], z[:, 1].sin()], -1),
    # as many positions as samples, and nothing changes if they are in the opposite order
    "masked positions": lambda z: z[:, :N].masked_fill(EVEN[:, None], 0.0).sum(1),
    "as often as samples": lambda z: (z[:, :N] * EVEN[:, None]).sum(1).exp(),
    "one position of each": lambda z: z[torch.arange(N), torch.ones(N, dtype=torch.long)],
}


@pytest.mark.parametrize("converter", [False, True, "record"], ids=str)
@pytest.mark.parametrize("name", BEFORE_LOSS)
def test_between_model_and_loss(name: str, converter: Any) -> None:
    function = BEFORE_LOSS[name]
    model, X = Positions(), torch.rand(N, T, 3)
    whole, extended = OfPositions(copy.deepcopy(model), function), extend(model, False, converter)
    shape = function(model(X)).shape
    y = torch.randint(C, (shape[0], *shape[2:]))
    quantities_agree(whole, OfPositions(extended, function), nn.CrossEntropyLoss(), X, y)


def test_next_token() -> None:
    """Scores of all but the last token, and the tokens behind them, in one row each."""
    model, X = Positions(), torch.rand(N, T, 3)
    y = torch.randint(C, (N, T))
    truth = copy.deepcopy(model)

    def rows(z: Tensor) -> Tensor:
        return z[:, :-1].contiguous().view(-1, C)

    extended, lossfunc = extend(model, use_converter="record"), extend(nn.CrossEntropyLoss())
    exts = extensions.DiagGGNExact(), extensions.DiagHessian(), extensions.BatchDiagGGNExact()
    with backpack(*exts, extensions.KFLR()):
        lossfunc(rows(extended(X)), y[:, 1:].flatten()).backward()

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    plain = OfPositions(truth, lambda z: z[:, :-1].transpose(1, 2))
    args = plain, nn.CrossEntropyLoss(), X, y[:, 1:]
    for savefield, truths in {
        "diag_ggn_exact": oracle.ggn_diag(*args),
        "diag_ggn_exact_batch": oracle.batch_ggn_diag(*args),
        "diag_h": oracle.hessian_diag(*args),
    }.items():
        for p, expected in zip(model.parameters(), truths, strict=True):
            torch.testing.assert_close(getattr(p, savefield), expected)
    torch.testing.assert_close(loss(truth(X)[:, :-1], y[:, 1:]), loss(model(X)[:, :-1], y[:, 1:]))


# --- Between modules ------------------------------------------------------------------------------


def plane(h: Tensor) -> Tensor:
    return h.view(-1, 1, 2, 2)


IN_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "F.relu": F.relu,
    "method": lambda h: h.tanh(),
    "sum with itself": lambda h: h + h,
    "constant factor": lambda h: 2 * h,
    "transpose": lambda h: h.transpose(0, 1).transpose(0, 1),
    "slice": lambda h: torch.cat([h[:, 2:], h[:, :2]], 1),
    "not extended": nn.Sigmoid(),
    "residual": lambda h: h + h.detach(),
    "two": lambda h: F.softplus(h.view(-1)).view(-1, 4),
    "many": lambda h: reduce(lambda h, _: h + torch.tanh(h), range(60), h),  # 2⁶⁰ ways
    "softmax": lambda h: F.softmax(h, 1) * h.norm(dim=1, keepdim=True),
    "options": lambda h: F.elu(F.leaky_relu(h, 0.3), 0.7).clamp(-0.5, 0.9),
    "products": lambda h: (h.unsqueeze(2) @ h.unsqueeze(1)).sum(-1) / (1 + h**2),
    "split": lambda h: torch.cat([part.cos() for part in h.split([1, 3], -1)][::-1], -1),
    "SELU": F.selu,
    "variance": lambda h: h.var(1, keepdim=True) * h.flip(1).cumsum(1),
    "added": lambda h: torch.tanh(h + 1) + 2 / (1 + torch.exp(h - 1)) + (1 - h).sigmoid(),
    "masked scores": lambda h: h.masked_fill(torch.arange(4) > 2, -torch.inf).softmax(-1),
    "scores with bias": lambda h: F.softmax(h / 2 + torch.arange(4), -1),
    "scores with mask": lambda h: F.log_softmax(h + WEIGHTS[:, None] * torch.arange(4), -1),
    "sorted": lambda h: h.sort(1, descending=True)[0] * h.topk(2, 1)[0].sum(1, keepdim=True),
    "layer_norm": lambda h: F.layer_norm(h, (4,), torch.arange(4.0), eps=1e-3),
    "rms_norm": lambda h: F.rms_norm(h, (4,)),
    "power of a number": lambda h: 2**h,
    "nearest": lambda h: F.interpolate(h.view(-1, 2, 2), scale_factor=2).sum(1).sin(),
    "bilinear": lambda h: F.interpolate(plane(h), (3, 4), mode="bilinear").sum((1, 2)).sin(),
    "corners": lambda h: F.interpolate(
        h.view(-1, 1, 1, 2, 2), (2, 3, 4), mode="trilinear", align_corners=True
    ).sum((1, 2, 3)),
    # sizes are rounded: their ratios are other factors
    "bicubic": lambda h: F.interpolate(plane(h), None, (1.7, 2.3), "bicubic").sum((1, 2)).exp(),
}


class WithFunction(nn.Module):
    """A function between two layers, around which a connection goes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.front, self.middle, self.back = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        return self.back(h + self.middle(self.function(h)))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss(reduction="sum")], ids=str)
@pytest.mark.parametrize("name", IN_FORWARD)
def test_in_forward(name: str, loss: nn.Module) -> None:
    """Functions need no converter where the graph tells what they are."""
    model, X = WithFunction(IN_FORWARD[name]), torch.randn(N, 3)
    y = torch.rand(N, 2) if isinstance(loss, nn.MSELoss) else torch.randint(2, (N,))
    quantities_agree(copy.deepcopy(model), extend(model), loss, X, y)


EXTENSIONS = [
    extensions.DiagGGNExact,
    extensions.BatchDiagGGNExact,
    extensions.SqrtGGNExact,
    extensions.KFLR,
    extensions.DiagHessian,
    extensions.BatchDiagHessian,
    extensions.GGNMP,
    extensions.HMP,
    extensions.PCHMP,
]


@pytest.mark.parametrize("ext", EXTENSIONS, ids=lambda ext: ext.__name__)
def test_as_with_modules(ext: Any) -> None:
    """Every extension finds what it finds where modules stand for the functions."""
    plain, X, y = WithFunction(torch.tanh), torch.randn(N, 3), torch.randint(2, (N,))
    found = []
    for converter in (False, True):
        model = extend(copy.deepcopy(plain), use_converter=converter)
        with backpack(ext()):
            extend(nn.CrossEntropyLoss())(model(X), y).backward()
        results = [getattr(p, ext().savefield) for p in model.parameters()]
        if callable(results[0]):
            results = [
                f(torch.ones(1, *p.shape)) for f, p in zip(results, model.parameters(), strict=True)
            ]
        found.append(results)
    torch.testing.assert_close(*found)


def test_residual_connections_from_data() -> None:
    """What was added to data is known of what the next layer reads, wherever else that is read."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + F.silu(layer(x)) / 2
            return x + 1

    model, X, y = Residual(), torch.randn(N, 3), torch.randint(3, (N,))
    quantities_agree(copy.deepcopy(model), extend(model), nn.CrossEntropyLoss(), X, y)


def test_beside_another_graph() -> None:
    """Calls of other models may have read parameters."""
    token = nn.Parameter(torch.rand(3))
    beside = extend(nn.Linear(3, 4))(token.view(1, 3))
    model, X, y = Positions(), torch.rand(N, T, 3), torch.randint(C, (N,))
    whole, extended = (OfPositions(m, lambda z: z[:, 0].exp()) for m in (model, extend(model)))
    quantities_agree(copy.deepcopy(whole), extended, nn.CrossEntropyLoss(), X, y)
    assert beside.requires_grad


def test_values_that_are_known() -> None:
    """A softmax tells its argument up to a shift, a layer that reads it as well tells it all."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.back = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.front(x) + torch.arange(4)
            return self.back(scores) + scores.log_softmax(-1)[:, :2]

    model, X, y = Both(), torch.randn(N, 3), torch.randint(2, (N,))
    quantities_agree(copy.deepcopy(model), extend(model), nn.CrossEntropyLoss(), X, y)


def test_vmap_in_a_recorded_model() -> None:
    """What a converter does not follow leaves a graph all the same."""
    model = WithFunction(torch.vmap(lambda row: row.sin() * row.sum()))
    X, y = torch.randn(N, 3), torch.randint(2, (N,))
    args = copy.deepcopy(model), extend(model, use_converter="record"), nn.CrossEntropyLoss(), X, y
    quantities_agree(*args)


def test_frozen_parameter_of_a_container() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(2, 2), nn.Parameter(torch.rand(2))
            self.scale.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).tanh() * self.scale

    model = nn.Sequential(nn.Linear(3, 2), Scaled(), nn.Linear(2, 2))
    truth, X, y = copy.deepcopy(model), torch.randn(N, 3), torch.randint(2, (N,))
    with backpack(extensions.DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(extend(model)(X), y).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    for p, expected in zip(
        trained, oracle.ggn_diag(truth, nn.CrossEntropyLoss(), X, y), strict=True
    ):
        torch.testing.assert_close(p.diag_ggn_exact, expected)


class Scaled(nn.Module):
    """A container whose own parameter a function reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(C, C), nn.Parameter(torch.rand(C))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize("ext", [extensions.DiagGGNExact, extensions.DiagHessian, extensions.KFAC])
def test_functions_before_a_container_with_parameters(ext: Any) -> None:
    """Such a container has no derivatives, and says so."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scaled, self.last = nn.Linear(C, C), Scaled(), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.scaled((2 * self.first(x)).tanh()))

    model, lossfunc = extend(Network()), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(N, C)), torch.rand(N, C))
    message = f"{ext.__name__}.* no rule for the parameters scale of 'scaled' .Scaled. .*converter"
    with pytest.raises(NotImplementedError, match=message), backpack(ext()):
        loss.backward()


def test_several_passes() -> None:
    """Each backward pass of one graph reads the functions again."""
    model, X, y = WithFunction(torch.tanh), torch.randn(N, 3), torch.randint(2, (N,))
    truth = oracle.ggn_diag(copy.deepcopy(model), nn.CrossEntropyLoss(), X, y)
    loss = extend(nn.CrossEntropyLoss())(extend(model)(X), y)
    for keeps in (True, False):
        with backpack(extensions.DiagGGNExact()):
            loss.backward(retain_graph=keeps)
        for p, expected in zip(model.parameters(), truth, strict=True):
            torch.testing.assert_close(p.diag_ggn_exact, expected)
            del p.diag_ggn_exact


def test_gradients_stay_what_they_are() -> None:
    """What autograd computes does not change, nor the state of the generator."""
    plain, X, y = WithFunction(F.gelu), torch.randn(N, 3), torch.randint(2, (N,))
    nn.CrossEntropyLoss()(plain(X), y).backward()
    model = extend(copy.deepcopy(plain))
    model.zero_grad()
    state = torch.get_rng_state()
    with backpack(extensions.DiagGGNExact(), extensions.DiagHessian()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    assert torch.equal(torch.get_rng_state(), state)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


MISREAD: dict[str, Callable[[Tensor], Tensor]] = {
    "filled": lambda z: z.masked_fill(MASK[..., None], 0.3).sum(1).tanh() + 1,
    "chosen": lambda z: torch.where(MASK[..., None], 0.3, z).sum(1).exp() + 1,
    "padded": lambda z: F.pad(z, (1, 1), value=2.0).unfold(2, 2, 2).prod(-1).sum(1) + 1,
    "rounded": lambda z: z[:, 0] * z[:, 1].round(decimals=1) + 1,
    "large": lambda z: (
        (z.masked_fill(MASK[..., None], 0.3).sum(1) ** 2)
        .clamp_min(-1)
        .where(torch.arange(C) > 0, torch.tensor(-1e300))
    ),
}


@pytest.mark.parametrize("name", MISREAD)
def test_what_is_misunderstood_is_refused(name: str) -> None:
    """A last constant, or a large one, does not hide that a function was given something else."""
    scores = MISREAD[name](extend(Positions())(torch.randn(N, T, 3)))
    loss = extend(nn.CrossEntropyLoss())(scores, torch.randint(C, (N,)))
    with (
        backpack(extensions.DiagGGNExact()),
        pytest.raises(ValueError, match="an operation that is not a module"),
    ):
        loss.backward()


def test_checkpoint_is_refused() -> None:
    """What a checkpoint holds is not asked for before the backward pass needs it."""
    scores = extend(Positions())(torch.randn(N, T, 3))[:, 0]
    scores = checkpoint(lambda z: z * z.exp() * torch.arange(C), scores, use_reentrant=False)
    loss = extend(nn.CrossEntropyLoss())(scores, torch.randint(C, (N,)))
    with (
        backpack(extensions.DiagGGNExact()),
        pytest.raises(ValueError, match="an operation that is not a module"),
    ):
        loss.backward()


@pytest.mark.parametrize("name", ["products", "added", "layer_norm"])
def test_quantities_can_be_differentiated(name: str) -> None:
    """With ``create_graph=True``, as those of a converted model."""
    plain, X, y = WithFunction(IN_FORWARD[name]), torch.randn(N, 3), torch.randint(2, (N,))
    found = []
    for converter in (False, True):
        model = extend(copy.deepcopy(plain), use_converter=converter)
        data = X.clone().requires_grad_()
        with backpack(extensions.DiagGGNExact()):
            extend(nn.CrossEntropyLoss())(model(data), y).backward(create_graph=True)
        trace = reduce(torch.add, [p.diag_ggn_exact.sum() for p in model.parameters()])
        found.append(torch.autograd.grad(trace, [data, *model.parameters()]))
    torch.testing.assert_close(*found)


def test_graph_behind_random_modules() -> None:
    """What was drawn would not be drawn again."""
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Dropout()))
    loss = extend(nn.CrossEntropyLoss())(model(torch.randn(N, 3)).exp(), torch.randint(4, (N,)))
    with (
        backpack(extensions.DiagGGNExact()),
        pytest.raises(ValueError, match="an operation that is not a module"),
    ):
        loss.backward(create_graph=True)
    model.zero_grad()  # gradients with a graph let it live


def test_hooks_of_all_modules_see_those_of_the_program_alone() -> None:
    model, X, y = WithFunction(torch.tanh), torch.randn(N, 3), torch.randint(2, (N,))
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    loss = extend(nn.CrossEntropyLoss())(extend(model)(X), y)
    called = len(seen)
    with backpack(extensions.DiagGGNExact()):
        loss.backward()
    handle.remove()
    assert len(seen) == called and hasattr(model.front.weight, "diag_ggn_exact")


@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("on", ["output of the model", "between functions"])
def test_hooks_that_change_gradients_between_functions(on: str, is_changed: bool) -> None:
    """The functions have no tensor at hand whose hooks could be looked at."""
    model = extend(nn.Linear(3, 4))
    h = model(torch.rand(N, T, 3))
    z = h.sigmoid()
    (z if on == "between functions" else h).register_hook(lambda g: 2 * g if is_changed else None)
    loss = extend(nn.CrossEntropyLoss())(2 * z.flatten(0, 1), torch.randint(4, (N * T,)))
    del h, z
    match = "gradient of what .* has returned"
    expected = pytest.warns(UserWarning, match=match) if is_changed else nullcontext()
    with expected, backpack(extensions.DiagHessian()):
        loss.backward()


# --- Of tensors whose samples are not first -------------------------------------------------------

STEPS_FIRST: dict[str, tuple[Callable[[Any], Tensor], int]] = {
    "last step": (lambda out: out[0][-1], C),
    "mean": (lambda out: out[0].mean(0), C),
    "largest": (lambda out: out[0].max(0).values, C),
    "last state": (lambda out: out[1][0][-1].tanh(), C),
    "states of both layers": (lambda out: out[1][0].transpose(0, 1).flatten(1), 2 * C),
    "all steps": (lambda out: out[0].transpose(0, 1).flatten(1), T * C),
    "output and state": (lambda out: torch.cat([out[0][0], out[1][1][-1].exp()], 1), 2 * C),
}


class StepsFirst(nn.Module):
    """A recurrent network of [T, N, *], whose steps a function reduces between layers."""

    def __init__(self, reduce: Callable[[Any], Tensor], features: int) -> None:
        super().__init__()
        self.recurrent, self.reduce = nn.LSTM(3, C, 2), reduce
        self.first, self.last = nn.Linear(features, C), nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, 3] -> [N, 3]."""
        h = self.reduce(self.recurrent(x.transpose(0, 1)))
        return self.last(self.first(h).relu())


@pytest.mark.parametrize("samples", [N, T, 1])
@pytest.mark.parametrize("name", STEPS_FIRST)
def test_steps_first(name: str, samples: int) -> None:
    """First order does not need to know the functions, but where the samples are behind them."""
    model, lossfunc = StepsFirst(*STEPS_FIRST[name]), nn.CrossEntropyLoss()
    X, y = torch.randn(samples, T, 3), torch.randint(3, (samples,))
    truth = oracle.batch_grad(model, lossfunc, X, y)
    extended = extend(copy.deepcopy(model))
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(extended(X), y).backward()
    torch.testing.assert_close([p.grad_batch for p in extended.parameters()], truth)
    if samples == N:
        quantities_agree(model, extended, lossfunc, X, y)


def test_steps_first_behind_what_cannot_be_read() -> None:
    model = extend(StepsFirst(lambda out: F.relu(out[0][-1] + 1), C))
    loss = extend(nn.CrossEntropyLoss())(model(torch.randn(N, T, 3)), torch.randint(3, (N,)))
    with (
        backpack(extensions.BatchGrad()),
        pytest.raises(ValueError, match=r"'first' .* batch axis is not the first .*use_converter"),
    ):
        loss.backward()

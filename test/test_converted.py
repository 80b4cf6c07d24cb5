"""Converted models: every quantity against plain autograd on the model as the user wrote it."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.record.registry import REGISTRY
from backpack.custom_module.graph_utils import ConversionError

N = 3
TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}


class Residual(nn.Module):
    """Residual blocks with functions, in-place changes and a reused activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 3, padding=1)
        self.bn = nn.BatchNorm2d(2)
        self.conv2 = nn.Conv2d(2, 2, 3, padding=1)
        self.shortcut = nn.Conv2d(1, 2, 1, bias=False)
        self.act = nn.Sigmoid()
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.bn(self.conv1(x)))
        out = self.conv2(out)
        out += self.shortcut(x)
        out = F.max_pool2d(self.act(out), 2)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(out, 1), start_dim=1))


class Attention(nn.Module):
    """One head of attention in functions, a class token, positions and a layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 3)
        self.token = nn.Parameter(torch.randn(1, 1, 3))
        self.position = nn.Parameter(torch.randn(1, 4, 3))
        self.norm = nn.LayerNorm(3)
        self.qkv = nn.Linear(3, 9)
        self.scale = nn.Parameter(torch.rand(3))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = torch.cat([self.token.expand(n, -1, -1), self.embed(x)], dim=1) + self.position
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = F.softmax(q @ k.transpose(-2, -1) / 3**0.5, dim=-1)
        x = x + self.scale * (weights @ v)
        return self.head(x[:, 0])


class Language(nn.Module):
    """The documented recurrent example."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(5, 3)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(3, 2, num_layers=2, batch_first=batch_first, dropout=0.2)
        self.dense = nn.Linear(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.dropout(self.embedding(x))
        x, _ = self.lstm(x)
        x = self.dense(self.dropout(x))
        return x.permute(0, 2, 1) if self.batch_first else x.permute(1, 2, 0)


class LastState(nn.Module):
    """A classifier on the last hidden states of both directions of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 2, num_layers=2, bidirectional=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, h = self.gru(x.transpose(0, 1))
        return self.head(torch.cat((h[-2], h[-1]), dim=1))


class Cells(nn.Module):
    """A cell in a loop over time, its state starting from a parameter."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.start = nn.Parameter(torch.randn(2))
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start.expand(x.shape[0], -1)
        is_lstm = isinstance(self.cell, nn.LSTMCell)
        state = (h, h * 2) if is_lstm else h
        for t in range(3):
            state = self.cell(x[:, t], state)
        return self.head(state[0] if is_lstm else state)


class Mixture(nn.Module):
    """Products of activations, several outputs, a parameter that enters nonlinearly, a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.randn(4))
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.second = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).split(2, dim=1)
        y = self.second(a.tanh() * torch.exp(b)) * torch.softmax(self.gain, 0)
        y = torch.stack([y, y.relu() - 2 * y], dim=1).mean(1)
        return torch.einsum("ni,ci->nc", y, self.weight) + F.linear(x, self.weight)


def unknown(x: Tensor) -> Tensor:
    """A function that the converter does not know."""
    return x * x.sigmoid()


torch.fx.wrap("unknown")


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(unknown(self.first(x)))


class Tables(nn.Module):
    """A table without samples, which a layer is applied to twice: its own weights vary as well."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(4, 2)), layer
        self.first, self.second, self.act = nn.Linear(2, 2), nn.Linear(2, 3), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        twice = [self.table] * (2 if isinstance(self.layer, nn.Bilinear) else 1)
        table = self.layer(*[self.act(self.layer(*twice))] * len(twice))
        return self.second(self.act(self.first(x) * table)).mean(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual": (Residual, lambda: torch.randn(N, 1, 4, 4)),
    "attention": (Attention, lambda: torch.randn(N, 3, 2)),
    "language": (Language, lambda: torch.randint(5, (N, 4))),
    "language-sequence-first": (lambda: Language(False), lambda: torch.randint(5, (N, 4))),
    "last-state": (LastState, lambda: torch.randn(N, 3, 2)),
    "lstm-cell": (lambda: Cells(nn.LSTMCell(2, 2)), lambda: torch.randn(N, 3, 2)),
    "gru-cell": (lambda: Cells(nn.GRUCell(2, 2)), lambda: torch.randn(N, 3, 2)),
    "rnn-cell": (lambda: Cells(nn.RNNCell(2, 2)), lambda: torch.randn(N, 3, 2)),
    "mixture": (Mixture, lambda: torch.randn(N, 4)),
    "unknown": (Unknown, lambda: torch.randn(N, 4)),
    "table-norm": (lambda: Tables(nn.GroupNorm(1, 2)), lambda: torch.randn(N, 4, 2)),
    "table-bilinear": (lambda: Tables(nn.Bilinear(2, 2, 2)), lambda: torch.randn(N, 4, 2)),
    "table-slopes": (lambda: Tables(nn.PReLU(2)), lambda: torch.randn(N, 4, 2)),
}
FIELDS: dict[str, Callable[..., Any]] = {
    "grad_batch": oracle.batch_grad,
    "batch_l2": oracle.batch_l2,
    "sum_grad_squared": oracle.sum_grad_squared,
    "variance": oracle.variance,
    "diag_ggn_exact": oracle.ggn_diag,
    "diag_ggn_exact_batch": oracle.batch_ggn_diag,
    "diag_h": oracle.hessian_diag,
    "diag_h_batch": oracle.batch_hessian_diag,
}
BLOCKS = {"ggnmp": oracle.ggn_blocks, "hmp": oracle.hessian_blocks}


def extensions_() -> list[Any]:
    return [
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.SumGradSquared(),
        extensions.Variance(),
        extensions.DiagGGNExact(),
        extensions.BatchDiagGGNExact(),
        extensions.SqrtGGNExact(),
        extensions.DiagHessian(),
        extensions.BatchDiagHessian(),
        extensions.KFLR(),
        extensions.KFRA(),
        extensions.KFAC(approximation="expand"),
        extensions.GGNMP(),
        extensions.HMP(),
        extensions.PCHMP(),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_quantities(name: str) -> None:
    make, data = MODELS[name]
    torch.manual_seed(0)
    model, X = make().double().eval(), data()
    X = X.double() if X.is_floating_point() else X
    y = torch.randint(3, model(X)[:, 0].shape)
    original = copy.deepcopy(model)

    with warnings.catch_warnings():
        if name != "unknown":
            warnings.simplefilter("error")
        converted = extend(model, use_converter=True)
    lossfunc = extend(nn.CrossEntropyLoss())
    loss = lossfunc(converted(X), y)
    exts = extensions_()
    if name == "mixture":  # tied between a linear map of two kinds: no common factors
        exts = [e for e in exts if not isinstance(e, extensions.KFRA)]
    with backpack(*exts):
        loss.backward()

    params = oracle.trainable(model)
    problem = (original, nn.CrossEntropyLoss(), X, y)
    for field, function in FIELDS.items():
        for p, value in zip(params, function(*problem), strict=True):
            torch.testing.assert_close(getattr(p, field), value, **TOLERANCE)
    for field, function in BLOCKS.items():
        for p, block in zip(params, function(*problem), strict=True):
            units = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
            mine = getattr(p, field)(units).flatten(1)
            torch.testing.assert_close(mine, block, **TOLERANCE)
    for p in params:
        root = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)
        if len(p.kflr) == 1:
            torch.testing.assert_close(p.kflr[0], root.T @ root, **TOLERANCE)
        assert torch.Size([len(f) for f in p.kflr]).numel() == p.numel()
        vector = torch.randn(1, *p.shape, dtype=p.dtype)
        assert (p.pchmp(vector) * vector).sum() >= -1e-12


def test_an_optimiser_made_before_still_works() -> None:
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    converted, lossfunc = extend(model, use_converter=True), extend(nn.CrossEntropyLoss())
    X, y = torch.randn(8, 3, 2), torch.randint(3, (8,))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = lossfunc(converted(X), y)
        with backpack(extensions.DiagGGNMC()):
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(model(X), converted(X))


def test_extending_again_changes_nothing() -> None:
    model = extend(Residual(), use_converter=True)
    assert extend(model, use_converter=True) is model
    assert extend(model) is model


class Block(nn.Module):
    """A layer, and a parameter that functions read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.layer(x)


class Blocks(nn.Module):
    """Containers of all kinds, whose children alone are in the graph; and a layer that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        self.tied = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.tied(self.head(x))
        return x @ self.tied.weight


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a block is replaced": ("blocks.0", lambda m: setattr(m.blocks, "0", Block())),
    "the blocks are": ("blocks", lambda m: setattr(m, "blocks", nn.ModuleList([Block(), Block()]))),
    "one more block": ("blocks", lambda m: m.blocks.append(Block())),
    "one more layer": ("head", lambda m: m.head.append(nn.Linear(3, 3))),
    "the head is wrapped": ("head", lambda m: setattr(m, "head", nn.Sequential(m.head))),
    "a layer that functions read": ("tied", lambda m: setattr(m, "tied", nn.Linear(3, 3))),
}


@pytest.mark.parametrize(
    "copied", [lambda m: m, copy.deepcopy, copy.copy], ids=["", "deep", "copy"]
)
@pytest.mark.parametrize("what", CHANGES)
def test_changes_that_the_graph_does_not_follow(what: str, copied: Callable[[Any], Any]) -> None:
    """They are errors: the graph would compute something else than the changed model."""
    name, change = CHANGES[what]
    converted = copied(extend(Blocks(), use_converter="trace"))
    X = torch.rand(N, 4)
    converted(X)
    change(converted)
    with pytest.raises(RuntimeError, match=rf"{name} of Blocks was replaced.*\"record\""):
        converted(X)


def test_changes_that_the_graph_follows() -> None:
    """Other layers, other hooks of layers, and modules that the forward pass does not call."""
    plain, converted = Blocks(), extend(Blocks(), use_converter="trace")
    converted.load_state_dict(plain.state_dict())
    layer = nn.Linear(4, 3)
    for model in (plain, converted):
        model.head[0] = layer
        model.tied.register_forward_hook(lambda m, args, out: 2 * out)
        model.tied.weight = nn.Parameter(torch.ones(3, 3))
        model.other = nn.Sequential(nn.Linear(3, 3))
    X = torch.rand(N, 4)
    torch.testing.assert_close(converted(X), plain(X))


def test_hooks_that_the_graph_does_not_call() -> None:
    """There is one warning: they may just look at something."""
    converted = extend(Blocks(), use_converter="trace")
    converted.blocks[1].register_forward_hook(lambda m, args, out: 2 * out)
    X = torch.rand(N, 4)
    with pytest.warns(UserWarning, match=r"hooks of blocks\.1 of Blocks.*\"record\""):
        converted(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted(X)


class Asking(nn.Module):
    """Its functions depend on its mode, in some way."""

    def __init__(self, how: Callable[[nn.Module], float]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        return self.layer(x) * self.how(self)


class Identical(Asking):
    """What no flag can tell."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        return self.layer(x) * (2 if self.training is True else 3)


@pytest.mark.parametrize(
    "how",
    [
        lambda m: 2 + m.training,
        lambda m: 3 - m.training,
        lambda m: 1 + float(m.training),
        lambda m: 1 + (m.training | False),
        lambda m: 2 if m.training != False else 3,  # noqa: E712
        lambda m: 2 if f"{m.training}" == "True" else 3,
        lambda m: {"True": 2, "False": 3}[str(m.training)],
        lambda m: 2 + int(m.training),
        lambda m: 2 if m.training > 0 else 3,
        lambda m: 2 if m.training <= False else 3,
        lambda m: 2 + divmod(m.training, 1)[0],
        lambda m: 3 - (m.training << 1),
    ],
    ids=[
        *("2 +", "3 -", "float", "|", "!=", "format", "str"),
        *("int", ">", "<=", "divmod", "<<"),
    ],
)
def test_mode_in_a_number(how: Any) -> None:
    model, x = nn.Sequential(Asking(how)), torch.rand(4, 3)
    converted = extend(copy.deepcopy(model), use_converter="trace")
    assert torch.equal(converted(x), model(x))
    with pytest.warns(UserWarning, match="branches on its training mode"):
        converted.eval()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "compute",
    [
        lambda x, mode: x + mode,
        lambda x, mode: mode + x,
        lambda x, mode: x * mode,
        lambda x, mode: mode * x,
        lambda x, mode: x / (1 + x.square() * mode),
        lambda x, mode: x**mode,
        lambda x, mode: torch.add(x, mode, alpha=2),
        lambda x, mode: x.clone().add_(mode),
    ],
)
def test_mode_as_an_operand(compute: Any) -> None:
    """The converted model follows the mode, with quantities of either."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(compute(self.layer(x).sigmoid(), self.training))

    model, x = Model(), torch.rand(4, 3)
    converted = extend(copy.deepcopy(model), use_converter="trace")
    for mode in (True, False, True):
        assert torch.equal(converted.train(mode)(x), model.train(mode)(x))
        with backpack(extensions.BatchGrad()):
            extend(nn.MSELoss())(converted(x), torch.zeros(4, 2)).backward()
        for p in converted.parameters():
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
            p.grad = None


class Scaled(nn.Module):
    """Reads numbers and flags of its own, of its class, and of its child."""

    power = 1

    def __init__(self, is_outer: bool = True) -> None:
        super().__init__()
        self.inner = Scaled(False) if is_outer else nn.Linear(3, 3)
        self.temperature, self.slopes, self.skip, self.unread = 2.0, [1.0, 2.0], None, 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) / self.temperature * self.slopes[1]
        return y**self.power if self.skip is None else x


@pytest.mark.parametrize("part", ["", "inner"])
@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 1.0), ("slopes", [1.0, 3.0]), ("skip", True), ("power", 2)]
)
def test_numbers_that_change_after_the_conversion(part: str, name: str, value: Any) -> None:
    """The graph has those of the conversion, and went on with them without a word."""
    x = torch.rand(4, 3)
    for copied in (lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        model = copied(extend(Scaled(), use_converter="trace"))
        owner, output = model.get_submodule(part), model(x)
        owner.unread = 1
        owner.slopes, before = list(owner.slopes), getattr(owner, name, 1)
        assert torch.equal(model(x), output)
        setattr(owner, name, value)
        with pytest.raises(RuntimeError, match=rf"'{name}' of Scaled was .*does not follow"):
            model(x)
        setattr(owner, name, before)
        assert torch.equal(model(x), output)
    recorded = extend(Scaled(), use_converter="record")
    setattr(recorded.get_submodule(part), name, value)
    recorded(x)


def test_mode_that_is_compared_by_identity() -> None:
    model, x = nn.Sequential(Identical(float)), torch.rand(4, 3)
    with pytest.raises(ConversionError, match=r"Identical .*by identity \(self.training is True\)"):
        extend(copy.deepcopy(model), use_converter="trace")
    recorded = extend(copy.deepcopy(model), use_converter=True)
    for mode in (True, False):
        assert torch.equal(recorded.train(mode)(x), model.train(mode)(x))


def test_mode_compared_by_identity_in_what_has_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called as it is."""

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.inner = Identical(float)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training is True else x

    monkeypatch.setitem(REGISTRY, Layer, REGISTRY[nn.Linear])
    model, x = nn.Sequential(nn.Linear(3, 3), Layer()), torch.rand(4, 3)
    converted = extend(copy.deepcopy(model), use_converter="trace")
    for mode in (True, False):
        assert torch.equal(converted.train(mode)(x), model.train(mode)(x))
    model[0] = model[1].inner  # the same one
    with pytest.raises(ConversionError, match=r"by identity"):
        extend(model, use_converter="trace")


@pytest.mark.parametrize("how", ["argument", "branch"])
def test_mode_of_a_part(how: str) -> None:
    """A part in another mode than the model, such as a frozen backbone: the graph has one mode."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            if how == "argument":
                return F.dropout(h, 0.5, self.training)
            return 2 * h if self.training else h

    model, x = nn.Sequential(Part(), nn.BatchNorm1d(3)), torch.rand(4, 3)
    converted = extend(copy.deepcopy(model), use_converter="trace")
    converted.get_submodule("1").eval()  # is called, and has its own mode
    converted(x)
    for net in (converted, copy.deepcopy(converted)):
        net.get_submodule("0").eval()
        with pytest.raises(RuntimeError, match=r"^0 of Sequential has training=False.*\"record\""):
            net(x)
        net.get_submodule("0").train()
        net(x)
    model[0].eval()
    if how == "argument":
        with pytest.raises(ConversionError, match="0 of Sequential depends on its training mode"):
            extend(copy.deepcopy(model), use_converter="trace")
    else:  # its own branch is in the graph
        converted = extend(copy.deepcopy(model), use_converter="trace")
        original = copy.deepcopy(model)
        assert torch.equal(converted(x), original(x))
        with pytest.warns(UserWarning, match="branches on its training mode"):
            converted.eval()
        assert torch.equal(converted(x), original.eval()(x))
    recorded = extend(copy.deepcopy(model), use_converter=True)
    assert torch.equal(recorded(x), model(x))

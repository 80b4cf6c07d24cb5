"""Functions that are given parameters, such as ``F.linear(x, self.weight)``, are layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend, extensions
from backpack.custom_module.parameter_module import ParameterModule
from backpack.custom_module.transposed_linear import TransposedLinear
from backpack.extensions.firstorder.base import FirstOrderModuleExtension

N, POSITIONS, CLASSES = 4, 5, 3


pytestmark = pytest.mark.usefixtures("double_precision")


class Functional(nn.Module):
    """The function of a layer, given the same parameters."""

    def __init__(self, layer: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        for name, p in layer.named_parameters():
            self.register_parameter(name, p)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        """[N, *in] -> [N, *out]."""
        return self.call(x, **{name: getattr(self, name) for name in self._parameters})


# A layer, the shape of its input, and the call of a function of the same parameters.
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], Callable[..., Tensor]]] = {
    "linear": (nn.Linear(6, 2), (6,), F.linear),
    "linear of positions": (nn.Linear(6, 2), (POSITIONS, 6), F.linear),
    "linear without bias": (
        nn.Linear(6, 2, bias=False),
        (6,),
        lambda x, weight: F.linear(weight=weight, input=x),
    ),
    "product": (
        TransposedLinear(6, 2, bias=False),
        (6,),
        lambda x, weight: x @ weight,
    ),
    "product of positions": (
        TransposedLinear(6, 2, bias=False),
        (POSITIONS, 6),
        lambda x, weight: torch.matmul(x, other=weight),
    ),
    "mm": (
        TransposedLinear(6, 2, bias=False),
        (6,),
        lambda x, weight: x.mm(mat2=weight),
    ),
    "product with the transposed": (
        nn.Linear(6, 2, bias=False),
        (6,),
        lambda x, weight: x @ weight.T,
    ),
    "product of positions with the transposed": (
        nn.Linear(6, 2, bias=False),
        (POSITIONS, 6),
        lambda x, weight: x.matmul(weight.transpose(-1, 0)),
    ),
    "mm with the transposed": (
        nn.Linear(6, 2, bias=False),
        (6,),
        lambda x, weight: torch.mm(x, weight.t()),
    ),
    "mm with exchanged axes": (
        nn.Linear(6, 2, bias=False),
        (6,),
        lambda x, weight: x.mm(weight.swapaxes(0, 1)),
    ),
    "product with permuted axes": (
        nn.Linear(6, 2, bias=False),
        (POSITIONS, 6),
        lambda x, weight: torch.matmul(x, weight.permute(1, 0)),
    ),
    "product with the transposed, twice": (
        TransposedLinear(6, 2, bias=False),
        (POSITIONS, 6),
        lambda x, weight: torch.matmul(x, other=weight.mT.T),
    ),
    "linear with the transposed": (
        TransposedLinear(6, 2),
        (POSITIONS, 6),
        lambda x, weight, bias: F.linear(x, weight.mT, bias),
    ),
    "addmm": (
        TransposedLinear(6, 2),
        (6,),
        lambda x, weight, bias: torch.addmm(bias, x, weight),
    ),
    "addmm with the transposed": (
        nn.Linear(6, 2),
        (6,),
        lambda x, weight, bias: bias.addmm(x, weight.T),
    ),
    "einsum": (
        TransposedLinear(6, 2, bias=False),
        (POSITIONS, 6),
        lambda x, weight: torch.einsum("bsd, df -> bsf", x, weight),
    ),
    "einsum of other axes": (
        nn.Linear(6, 2, bias=False),
        (POSITIONS, 6),
        lambda x, weight: torch.einsum("oi,...i->...o", weight, x),
    ),
    "einsum with the transposed": (
        nn.Linear(6, 2, bias=False),
        (6,),
        lambda x, weight: torch.einsum("ni,io->no", [x, weight.T]),
    ),
    "conv1d": (
        nn.Conv1d(2, 4, 3, 2, 1, 1, 2),
        (2, 7),
        lambda x, weight, bias: F.conv1d(x, weight, bias, 2, 1, 1, 2),
    ),
    "conv2d": (
        nn.Conv2d(2, 3, (3, 2), padding=(1, 0)),
        (2, 4, 4),
        lambda x, weight, bias: F.conv2d(x, weight, bias, padding=[1, 0]),
    ),
    "conv2d of the same size": (
        nn.Conv2d(2, 3, 3, padding="same", bias=False),
        (2, 4, 4),
        lambda x, weight: F.conv2d(x, weight, padding="same"),
    ),
    "conv3d": (nn.Conv3d(1, 2, 2), (1, 3, 3, 3), F.conv3d),
    "conv_transpose1d": (
        nn.ConvTranspose1d(2, 4, 3, 2, 1, 1, 2, dilation=2),
        (2, 5),
        lambda x, weight, bias: F.conv_transpose1d(x, weight, bias, 2, 1, 1, 2, 2),
    ),
    "conv_transpose2d": (nn.ConvTranspose2d(2, 3, 2), (2, 3, 3), F.conv_transpose2d),
    "conv_transpose3d": (nn.ConvTranspose3d(1, 2, 2), (1, 2, 2, 2), F.conv_transpose3d),
    "prelu": (nn.PReLU(3), (3,), F.prelu),
    "layer_norm": (
        nn.LayerNorm(6, eps=0.1),
        (POSITIONS, 6),
        lambda x, weight, bias: F.layer_norm(x, (6,), weight, bias, 0.1),
    ),
    "rms_norm": (nn.RMSNorm(6), (6,), lambda x, weight: F.rms_norm(x, (6,), weight)),
    "group_norm": (
        nn.GroupNorm(2, 4),
        (4, 5),
        lambda x, weight, bias: F.group_norm(x, 2, weight, bias),
    ),
}
EXTENSIONS = (
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.DiagHessian,
    extensions.KFLR,
    extensions.SqrtGGNExact,
)


def quantities(model: nn.Module, X: Tensor, y: Tensor) -> list[list[Any]]:
    """Compute some quantities of each parameter."""
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(*[ext() for ext in EXTENSIONS]):
        loss.backward()
    params = list(model.parameters())
    return [[p.grad, *[getattr(p, ext().savefield) for ext in EXTENSIONS]] for p in params]


@pytest.mark.parametrize("route", ["trace", "record"])
@pytest.mark.parametrize("name", LAYERS)
def test_as_the_layer(name: str, route: Any) -> None:
    """Also where the function is called by a module without children, behind another one."""
    layer, shape, call = LAYERS[name]
    layer = copy.deepcopy(layer).double()
    for p in layer.parameters():
        nn.init.normal_(p)
    X, y = torch.randn(N, *shape), torch.randint(2, (N,))
    before, after = nn.Linear(shape[-1], shape[-1]), nn.Sequential(nn.Tanh(), nn.Flatten())
    model = nn.Sequential(before, Functional(copy.deepcopy(layer), call), copy.deepcopy(after))
    state, plain = list(model.state_dict()), nn.Sequential(copy.deepcopy(before), layer, after)
    model, plain = extend(model, use_converter=route), extend(plain)
    truth = quantities(plain, X, y)
    for _ in range(2):
        torch.testing.assert_close(quantities(model, X, y), truth)
        model.zero_grad()
    assert list(model.state_dict()) == state
    torch.testing.assert_close(quantities(copy.deepcopy(model), X, y), truth)


@pytest.mark.parametrize("route", ["trace", "record"])
def test_rows_of_a_table(route: Any) -> None:
    """Numbers below zero count from the end."""
    table = nn.Embedding(5, 3)
    tokens, y = torch.randint(5, (N, POSITIONS)), torch.randint(CLASSES, (N,))
    call = Functional(copy.deepcopy(table), lambda x, weight: weight[x])
    plain, model = (nn.Sequential(one, nn.Flatten(), nn.Tanh()) for one in (table, call))
    truth = quantities(extend(plain), tokens, y)
    model = extend(model, use_converter=route)
    torch.testing.assert_close(quantities(model, tokens, y), truth)
    model.zero_grad()
    torch.testing.assert_close(quantities(model, (tokens - 5).int(), y), truth)


@pytest.mark.parametrize("route", ["trace", "record"])
@pytest.mark.parametrize("padding_idx", [None, -1])
def test_embedding(padding_idx: int | None, route: Any) -> None:
    table = nn.Embedding(5, 3, padding_idx)
    tokens, y = torch.randint(5, (N, POSITIONS)), torch.randint(CLASSES, (N,))
    call = Functional(copy.deepcopy(table), lambda x, weight: F.embedding(x, weight, padding_idx))
    plain, model = (nn.Sequential(one, nn.Flatten(), nn.Tanh()) for one in (table, call))
    truth = quantities(extend(plain), tokens, y)
    torch.testing.assert_close(quantities(extend(model, use_converter=route), tokens, y), truth)


def _twice(h: Tensor, view: Tensor) -> Tensor:
    return (h @ view).sin() @ view


def _and_more(h: Tensor, view: Tensor) -> Tensor:
    return (h @ view).sin() + view.exp().sum(0)


# What is given to a function, but is no parameter of a layer, or no input with samples, or is read
# several times.
OTHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "computed": lambda net, h: F.linear(h, 2 * net.square, net.bias),
    "transposed": lambda net, h: F.linear(h, net.square.T),
    "a part": lambda net, h: F.linear(h, net.square[:2]),
    "buffer": lambda net, h: F.linear(h, net.square, net.constant[0]),
    "of a buffer": lambda net, h: h + F.linear(net.constant, net.square, net.bias).sum(0),
    "of a parameter": lambda net, h: h * F.linear(net.square, net.square, net.bias).mean(0),
    "of a buffer with as many rows": lambda net, h: h + F.linear(net.constant, net.square)[0],
    "one vector": lambda net, h: h + F.linear(net.bias, net.square),
    "twice": lambda net, h: F.linear(F.linear(h, net.square, net.bias).sin(), net.square, net.bias),
    "product with a vector": lambda net, h: h * (h @ net.bias)[:, None],
    "product from the left": lambda net, h: (net.square @ h.T).T,
    "product with a computed weight": lambda net, h: h @ net.square.T.exp(),
    "product of parameters": lambda net, h: h * (net.square @ net.square).mean(0),
    "product of a buffer": lambda net, h: h + (net.constant @ net.square).sum(0) * net.bias,
    "products, twice": lambda net, h: (h @ net.square + net.bias).sin().matmul(net.square),
    "product with the transposed, and more": lambda net, h: h @ net.square.T + net.square.exp()[0],
    "product with a view that others read": lambda net, h: _and_more(h, net.square.T),
    "product with the transposed, twice": lambda net, h: (h @ net.square.T).sin() @ net.square,
    "product with a view, twice": lambda net, h: _twice(h, net.square.T),
    "product with a part of the transposed": lambda net, h: h @ net.square.T[:, :2],
    "product with a reshaped one": lambda net, h: h @ net.square.view(9).view(3, 3).T,
    "product with a copy": lambda net, h: h @ net.square.T.contiguous(),
    "product with turned rows": lambda net, h: h @ net.square.T.flip(0),
    "a vector with the transposed": lambda net, h: h + net.bias @ net.square.T,
    "rows with the transposed": lambda net, h: torch.stack([h[n] @ net.square.T for n in range(N)]),
    "the transposed of what it is multiplied with": lambda net, h: (
        h * (net.square @ net.square.T).mean(0)
    ),
    "steps before samples": lambda net, h: (torch.stack([h, h.sin()]) @ net.square.T).mean(0),
    "einsum of steps before samples": lambda net, h: torch.einsum(
        "tnd,fd->tnf", torch.stack([h, h.sin()], 1).transpose(0, 1), net.square
    ).sum(0),
    "scaled addmm": lambda net, h: torch.addmm(net.bias, h, net.square, beta=2, alpha=0.5),
    "addmm of data": lambda net, h: torch.addmm(h.sin(), h, net.square.T),
    "addmm with one number": lambda net, h: torch.addmm(net.bias[:1], h, net.square),
    "addmm, and more": lambda net, h: torch.addmm(net.bias, h, net.square) * net.bias,
    "einsum of a diagonal": lambda net, h: torch.einsum("nd,dd->nd", h, net.square),
    "einsum of one feature": lambda net, h: torch.einsum("nd,df->nf", h[:, :1], net.square),
    "einsum without a sum": lambda net, h: torch.einsum("nd,df->ndf", h, net.square).sum(1),
    "einsum with other axes first": lambda net, h: torch.einsum("nd,df->fn", h, net.square).T,
    "einsum of three": lambda net, h: torch.einsum("nd,df,f->nf", h, net.square, net.bias),
    "rows of the same numbers": lambda net, h: h * net.square[torch.tensor([0, 2, 2, 1])],
    "rows of a mask": lambda net, h: (
        h @ net.square[torch.tensor([True, False, True])].T @ net.square[:2]
    ),
    "first rows": lambda net, h: h + net.square[:1] * net.square[2],
    "rows of the transposed": lambda net, h: h * net.square.T[(h > 0).long()[:, 0]],
    "numbers of a vector": lambda net, h: h * net.bias[(h > 0).long()[:, 0]].exp()[:, None],
    "rows of a reshaped one": lambda net, h: h * net.square.view(9, 1)[(h > 0).long()[:, 0]],
    "rows, and more": lambda net, h: net.square[(h > 0).long()[:, 0]] @ net.square.T * h,
    "of another layer": lambda net, h: F.linear(h, net.linear.weight) * net.bias,
}


class Net(nn.Module):
    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(3, 3), call
        self.square, self.bias = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))
        self.register_buffer("constant", torch.randn(N, 3))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, classes]."""
        return self.call(self, self.linear(x).tanh())


@pytest.mark.parametrize("route", ["trace", "record"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_layer(name: str, route: Any) -> None:
    net, lossfunc = Net(OTHERS[name]), nn.CrossEntropyLoss()
    X, y = torch.randn(N, 3), torch.randint(2, (N,))
    used = [p.requires_grad_(p.grad is not None) for p in _with_gradients(net, X, y)]
    used = [p for p in used if p.requires_grad]
    truths = {
        extensions.BatchGrad: oracle.batch_grad(net, lossfunc, X, y),
        extensions.BatchDiagGGNExact: oracle.batch_ggn_diag(net, lossfunc, X, y),
        extensions.DiagHessian: oracle.hessian_diag(net, lossfunc, X, y),
    }
    net, lossfunc = extend(net, use_converter=route), extend(lossfunc)
    with backpack(*[ext() for ext in truths]):
        lossfunc(net(X), y).backward()
    found = [p for p in net.parameters() if p.requires_grad]
    assert len(found) == len(used)
    for ext, truth in truths.items():
        torch.testing.assert_close([getattr(p, ext().savefield) for p in found], truth)


def _with_gradients(net: nn.Module, X: Tensor, y: Tensor) -> list[nn.Parameter]:
    nn.CrossEntropyLoss()(net(X), y).backward()
    return list(net.parameters())


class Tied(nn.Module):
    """Scores of tokens by the table that embeds them, perhaps as ``nn.Linear`` computes them."""

    def __init__(self, is_layer: bool) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(CLASSES, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES, bias=False)
        self.head.weight = self.table.weight
        self.is_layer = is_layer

    def forward(self, x: Tensor) -> Tensor:
        """[N, T] -> [N, C, T]."""
        h = self.linear(self.table(x)).tanh()
        y = self.head(h) if self.is_layer else h @ self.table.weight.T
        return y.transpose(1, 2)


@pytest.mark.parametrize("route", ["trace", "record"])
def test_a_head_that_is_tied_to_an_embedding(route: Any) -> None:
    """All as with a layer, also where hooks change the weight on the way, and bit for bit."""
    plain, net = Tied(True), Tied(False)
    net.load_state_dict(plain.state_dict())
    alone = copy.deepcopy(net)
    models = [extend(one, use_converter=route) for one in (net, plain)]
    tokens = torch.randint(CLASSES, (N, POSITIONS))
    found, truth = [quantities(model, tokens, tokens) for model in models]
    torch.testing.assert_close(found, truth)
    nn.CrossEntropyLoss()(alone(tokens), tokens).backward()
    for p, own in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, own.grad)

    def step(p: Tensor) -> None:
        with torch.no_grad():
            p.mul_(0.5)

    for model in models:
        model.zero_grad()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
    found, same = [quantities(model, tokens, tokens) for model in models]
    torch.testing.assert_close(found, same)
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("route", ["trace", "record"])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_of_functions(frozen: str, route: Any) -> None:
    layer = nn.Linear(3, 2)
    model = Functional(copy.deepcopy(layer), lambda x, weight, bias: F.linear(x, weight.T.T, bias))
    models = [nn.Sequential(nn.Linear(3, 3), one, nn.Tanh()) for one in (layer, model)]
    models[1].load_state_dict(models[0].state_dict())
    X, y = torch.randn(N, 3), torch.randint(2, (N,))
    found = []
    for one in models:
        one[1].get_parameter(frozen).requires_grad_(False)
        one, lossfunc = extend(one, use_converter=route), extend(nn.CrossEntropyLoss())
        with backpack(extensions.KFLR(), extensions.BatchGrad()):
            lossfunc(one(X), y).backward()
        trained = [p for p in one.parameters() if p.requires_grad]
        found.append([(p.kflr, p.grad_batch) for p in trained])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("ext", [extensions.BatchGrad, extensions.KFLR])
@pytest.mark.parametrize("is_first", [True, False])
def test_hooks_on_a_view(is_first: bool, ext: Any) -> None:
    """What they change is no gradient of a layer, be they there before it or since."""

    class Hooked(nn.Module):
        def __init__(self, hook: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(3, 3), nn.Parameter(torch.randn(2, 3))
            self.hook = hook

        def forward(self, x: Tensor) -> Tensor:
            """[N, 3] -> [N, 2]."""
            view = self.weight.T
            if is_first:
                view.register_hook(self.hook)
            y = self.first(x).tanh() @ view
            if not is_first:
                view.register_hook(self.hook)
            return y

    X, y, lossfunc = torch.randn(N, 3), torch.randint(2, (N,)), extend(nn.CrossEntropyLoss())
    seen: list[Tensor] = []
    model = extend(Hooked(seen.append), use_converter="record")
    with backpack(ext()):
        lossfunc(model(X), y).backward()
    assert torch.equal(*seen, model.weight.grad.T)
    plain = extend(nn.Sequential(model.first, nn.Tanh(), nn.Linear(3, 2, bias=False)))
    plain[2].weight = nn.Parameter(model.weight.detach())
    with backpack(ext()):
        lossfunc(plain(X), y).backward()
    found = [getattr(p, ext().savefield) for p in (model.weight, plain[2].weight)]
    torch.testing.assert_close(*found)
    model = extend(Hooked(lambda g: 2 * g), use_converter="record")
    loss = lossfunc(model(X), y)
    with backpack(ext()), pytest.raises(ValueError, match="has no samples"):
        loss.backward()


@pytest.mark.parametrize("is_hooked", [True, False])
def test_hooks_on_a_view_under_autocast(is_hooked: bool) -> None:
    """Rounding hides what they change: sums of individual gradients were a tenth of p.grad."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(3, 3), nn.Parameter(torch.randn(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            """[N, 3] -> [N, 2]."""
            view = self.weight.T
            if is_hooked:
                view.register_hook(lambda g: 10 * g)
            return self.first(x).tanh() @ view

    model = extend(Product().float(), use_converter="record")
    X, y = torch.randn(N, 3, dtype=torch.float32), torch.randint(2, (N,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(extensions.BatchGrad(), extensions.KFLR()):
        if is_hooked:
            with pytest.raises(ValueError, match="has no samples"):
                loss.backward()
            return
        loss.backward()
    assert [*map(len, model.weight.kflr)] == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 10.0])
@pytest.mark.parametrize("of_view", [True, False])
def test_hooks_on_what_functions_read(dtype: torch.dtype, factor: float, of_view: bool) -> None:
    """In half precisions, sums of individual gradients were a half of p.grad, without a word."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(7, 4))

        def forward(self, x: Tensor) -> Tensor:
            """[N, 4] -> [N, 7], or [N, 4]."""
            read = self.weight.T if of_view else 2 * self.weight
            read.register_hook(lambda g: factor * g)
            h = self.first(x).tanh()
            return h @ read if of_view else h + read[:5].sum(0)

    model = extend(Shifted().to(dtype), use_converter="record")
    loss = extend(nn.CrossEntropyLoss())(
        model(torch.randn(64, 4, dtype=dtype)), torch.randint(4, (64,))
    )
    with backpack(extensions.BatchGrad()):
        if factor != 1:
            with pytest.raises(ValueError, match="has no samples"):
                loss.backward()
            return
        loss.backward()
    total = model.weight.grad_batch.double().sum(0)
    torch.testing.assert_close(total, model.weight.grad.double(), rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("route", ["trace", "record"])
def test_terms_that_cancel(route: Any) -> None:
    """The sum of individual gradients is their rounding, as at the end of training."""
    layer, X, left = nn.Linear(3, 2, bias=False), torch.randn(32, 5, 3), torch.randn(32, 5, 2)
    rows = X.flatten(0, 1)
    left -= (rows @ torch.linalg.pinv(rows) @ left.flatten(0, 1)).view_as(left)
    # in another order than that of the samples
    call = Functional(layer, lambda x, weight: (x.transpose(0, 1) @ weight.T).transpose(0, 1))
    model, lossfunc = extend(call, use_converter=route), extend(nn.MSELoss())
    with backpack(extensions.KFLR()):
        lossfunc(model(X), layer(X).detach() + left).backward()
    assert layer.weight.grad.abs().max() < 1e-14
    assert [*map(len, layer.weight.kflr)] == [2, 3]


class Total(FirstOrderModuleExtension):
    """The gradient that arrives at what reads a parameter, in the place of individual ones."""

    def __init__(self) -> None:
        super().__init__(params=["parameter"])

    def parameter(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> Tensor:
        """Return it for each sample: [N, *p]."""
        return g_out[0].expand(N, *g_out[0].shape)


@pytest.mark.parametrize("route", ["trace", "record"])
def test_rules_for_functions(route: Any) -> None:
    """Rules of one extension see functions and what reads parameters as they are recorded."""
    net = Functional(nn.Linear(3, 2, bias=False), lambda x, weight: x.sin() @ weight.T)
    model, ext = extend(net, use_converter=route), extensions.BatchGrad()
    ext.set_module_extension(ParameterModule, Total(), overwrite=True)
    with backpack(ext):
        extend(nn.MSELoss())(model(torch.randn(N, 3)), torch.randn(N, 2)).backward()
    assert torch.equal(net.weight.grad_batch, net.weight.grad.expand(N, 2, 3))


class Tripled(torch.autograd.Function):
    """A view whose derivative is another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the same entries."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return three times the gradient."""
        return 3 * grad


def test_a_view_with_a_derivative_of_its_own() -> None:
    """Also where the gradient is zero, which would not show it."""
    net = Net(lambda net, h: h @ Tripled.apply(net.square.T))
    X = torch.randn(N, 3)
    y = net(X).detach()
    net.bias.requires_grad_(False)
    truth = oracle.ggn_diag(net, nn.MSELoss(), X, y)
    with pytest.warns(match="No rule for function"):
        model = extend(net, use_converter="trace")
    lossfunc = extend(nn.MSELoss())
    with backpack(extensions.DiagGGNExact()):
        lossfunc(model(X), y).backward()
    found = [p.diag_ggn_exact for p in net.parameters() if p.requires_grad]
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("route", ["trace", "record"])
def test_parameters_that_are_replaced(route: Any) -> None:
    """The layer has the parameters of the call."""
    net = Net(lambda net, h: F.linear(h, net.square, net.bias))
    model, lossfunc = extend(net, use_converter=route), extend(nn.CrossEntropyLoss())
    X, y = torch.randn(N, 3), torch.randint(CLASSES, (N,))
    for _ in range(2):
        model.square = nn.Parameter(torch.randn(3, 3))
        with backpack(extensions.BatchGrad()):
            lossfunc(model(X), y).backward()
        torch.testing.assert_close(model.square.grad_batch.sum(0), model.square.grad)
        model.zero_grad()


def test_parameters_that_a_model_is_called_with() -> None:
    """With a row for each sample, they are data."""

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(self.linear(x).tanh(), weight)

    model, lossfunc = extend(Called(), use_converter="record"), extend(nn.CrossEntropyLoss())
    weight = nn.Parameter(torch.randn(N, 3))
    with backpack(extensions.BatchGrad()):
        lossfunc(model(torch.randn(N, 3), weight), torch.randint(CLASSES, (N,))).backward()
    torch.testing.assert_close(model.linear.weight.grad_batch.sum(0), model.linear.weight.grad)
    assert not hasattr(weight, "grad_batch")


@pytest.mark.parametrize("converter", [True, "record"])
def test_a_slope_without_axes(converter: Any) -> None:
    """``F.prelu`` takes a number, which ``nn.PReLU`` does not make: results have its shape."""
    slope = nn.Parameter(torch.tensor(0.3))
    model = nn.Sequential(nn.Linear(4, CLASSES), Functional(nn.Module(), F.prelu))
    model[1].weight = slope
    X, y = torch.randn(N, 4), torch.arange(N) % CLASSES
    of_each = torch.func.vmap(
        torch.func.grad(lambda a, h, y: F.cross_entropy(torch.where(h > 0, h, a * h), y) / N),
        in_dims=(None, 0, 0),
    )(slope.detach(), model[0](X).detach(), y)
    model, lossfunc = extend(model, use_converter=converter), extend(nn.CrossEntropyLoss())
    with backpack(extensions.BatchGrad(), extensions.HMP(), extensions.DiagHessian()):
        lossfunc(model(X), y).backward()
    assert torch.allclose(slope.grad_batch, of_each)
    assert torch.allclose(slope.hmp(torch.ones(1)), slope.diag_h.reshape(1))


@pytest.mark.parametrize("outer", [True, "record"])
@pytest.mark.parametrize("inner", [True, "record"])
def test_a_converted_model_inside_of_another_one(inner: Any, outer: Any) -> None:
    """Both look at the function, which is one call of the layer all the same."""
    layer = nn.Linear(4, CLASSES)
    model = extend(nn.Sequential(Functional(layer, F.linear), nn.Tanh()), use_converter=inner)
    whole, lossfunc = extend(nn.Sequential(model), use_converter=outer), nn.CrossEntropyLoss()
    X, y = torch.randn(N, 4), torch.arange(N) % CLASSES
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(lossfunc)(whole(X), y).backward()
    found = layer.weight.grad_batch, layer.weight.diag_ggn_exact
    plain = extend(nn.Sequential(layer, nn.Tanh()))
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        lossfunc(plain(X), y).backward()
    assert torch.allclose(found[0], layer.weight.grad_batch)
    assert torch.allclose(found[1], layer.weight.diag_ggn_exact)


def test_layers_that_a_checkpoint_calls() -> None:
    """Its functions run twice in the first call, which the checkpoint does not count."""
    layer = nn.Linear(4, CLASSES)
    own = Functional(layer, F.linear)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.own = nn.Linear(4, 4), own

        def forward(self, x: Tensor) -> Any:
            """[N, 4] -> [N, C]."""
            return checkpoint(lambda x: self.own(x.sin()).exp(), self.first(x), use_reentrant=False)

    model = extend(Checkpointed(), use_converter="record")
    X, y = torch.randn(N, 4), torch.arange(N) % CLASSES
    for _ in range(2):
        model.zero_grad()
        with backpack(extensions.BatchGrad()):
            extend(nn.CrossEntropyLoss())(model(X), y).backward()
        for p in model.parameters():
            assert torch.allclose(p.grad_batch.sum(0), p.grad)
    plain = nn.CrossEntropyLoss()(layer(model.first(X).sin()).exp(), y)
    assert torch.allclose(torch.autograd.grad(plain, layer.weight)[0], layer.weight.grad)


@pytest.mark.parametrize("converter", [True, "record"])
def test_layers_of_compiled_models(converter: Any) -> None:
    """The compiler leaves its graph where a function is recorded, as at modules."""
    layers = nn.Linear(4, 4), nn.Linear(4, CLASSES)
    model = nn.Sequential(*[Functional(layer, F.linear) for layer in layers])
    model = extend(model, use_converter=converter)
    X, loss = torch.randn(N, 4), extend(nn.CrossEntropyLoss())
    found = []
    for run in (model, torch.compile(model, backend="eager")):
        with backpack(extensions.DiagGGNExact(), extensions.BatchGrad()):
            loss(run(X), torch.arange(N) % CLASSES).backward()
        found.append([q for p in model.parameters() for q in (p.diag_ggn_exact, p.grad_batch)])
    assert all(map(torch.allclose, *found))


@pytest.mark.parametrize("route", ["trace", "record"])
def test_a_class_that_computes_something_else_by_now(
    route: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions are what they are."""
    model = nn.Sequential(Functional(nn.Linear(3, CLASSES), F.linear), nn.Tanh())
    X, y = torch.randn(N, 3), torch.randint(CLASSES, (N,))
    truth, expected = oracle.batch_grad(model, nn.CrossEntropyLoss(), X, y), model(X)
    model, lossfunc = extend(model, use_converter=route), extend(nn.CrossEntropyLoss())
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 0 * x)
    output = model(X)
    with backpack(extensions.BatchGrad()):
        lossfunc(output, y).backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close([p.grad_batch for p in model.parameters()], truth)


class Loss(nn.Module):
    """A model that returns its loss, whose weights are buffers."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(4, CLASSES), call
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[N, 4], [N] or [N, C] -> []."""
        return self.call(self.layer(x), y, self.weights)


def _weighted_nll(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(h, dim=1), y, w)


LABELS = torch.eye(CLASSES).repeat(2, 1)[:N]
# The call of a loss, and the loss that it is.
WEIGHTED: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], nn.Module]]] = {
    "cross entropy": (
        lambda h, y, w: F.cross_entropy(h, y, w),
        lambda w: nn.CrossEntropyLoss(weight=w),
    ),
    "cross entropy by names": (
        lambda h, y, w: F.cross_entropy(
            weight=w, target=y, input=h, label_smoothing=0.1, ignore_index=1, reduction="sum"
        ),
        lambda w: nn.CrossEntropyLoss(w, label_smoothing=0.1, ignore_index=1, reduction="sum"),
    ),
    "computed weights": (
        lambda h, y, w: F.cross_entropy(h, y, weight=w / w.sum()),
        lambda w: nn.CrossEntropyLoss(weight=w / w.sum()),
    ),
    "negative log-likelihood": (_weighted_nll, lambda w: nn.CrossEntropyLoss(weight=w)),
    "binary": (
        lambda h, y, w: F.binary_cross_entropy_with_logits(h, y, weight=w, pos_weight=w + 1),
        lambda w: nn.BCEWithLogitsLoss(weight=w, pos_weight=w + 1),
    ),
    "binary of a constant": (
        lambda h, y, w: F.binary_cross_entropy_with_logits(
            h, y, pos_weight=torch.tensor([2.0, 1.0, 3.0])
        ),
        lambda w: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 1.0, 3.0])),
    ),
    "binary of weights by labels": (
        lambda h, y, w: F.binary_cross_entropy_with_logits(h, y, weight=y, pos_weight=w),
        lambda w: nn.BCEWithLogitsLoss(weight=LABELS, pos_weight=w),
    ),
    "binary of probabilities": (
        lambda h, y, w: F.binary_cross_entropy(h.sigmoid(), y, w),
        lambda w: nn.BCEWithLogitsLoss(weight=w),
    ),
}


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("converter", ["trace", "record"])
def test_losses_with_weights(name: str, converter: str) -> None:
    torch.manual_seed(0)
    call, make = WEIGHTED[name]
    plain = Loss(call)
    labels = torch.randint(CLASSES, (N,))
    x, y = torch.rand(N, 4), LABELS.double() if "binary" in name else labels
    model = extend(copy.deepcopy(plain), use_converter=converter)
    lossfunc = make(plain.weights)
    loss = model(x, y)
    assert torch.equal(loss, plain(x, y))
    with backpack(extensions.DiagHessian(), extensions.HMP(), extensions.SqrtGGNExact()):
        loss.backward()
    expected = oracle.hessian_diag(plain.layer, lossfunc, x, y)
    for p, truth in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_h, truth)
        units = torch.eye(p.numel()).view(-1, *p.shape)
        torch.testing.assert_close(p.hmp(units).flatten(1).diag().view(p.shape), truth)
        # the predictions are linear in the parameters, and the losses of their logits convex
        if not name.endswith(("likelihood", "probabilities")):
            torch.testing.assert_close(p.sqrt_ggn_exact.square().sum((0, 1)), truth)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("converter", ["trace", "record"])
def test_weights_of_a_loss_that_a_call_may_leave_out(converter: str, is_given: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, CLASSES)

        def forward(self, x: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
            return F.cross_entropy(self.layer(x), y, weight=w)

    torch.manual_seed(0)
    plain, x, y = Model(), torch.rand(N, 4), torch.randint(CLASSES, (N,))
    model, w = extend(copy.deepcopy(plain), use_converter=converter), torch.rand(CLASSES)
    for given in (w if is_given else None, None if is_given else w):
        with backpack(extensions.DiagHessian()):
            model(x, y, *([] if given is None else [given])).backward()
        truth = oracle.hessian_diag(plain.layer, nn.CrossEntropyLoss(given), x, y)
        torch.testing.assert_close([p.diag_h for p in model.parameters()], truth)


# Weights or targets that are parameters, and a target that is the prediction.
TRAINED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "weights": lambda m, h, y: F.cross_entropy(h, LABELS.double(), weight=m.weights),
    "targets": lambda m, h, y: F.binary_cross_entropy_with_logits(h, m.targets, pos_weight=y[0]),
    "prediction": lambda m, h, y: F.binary_cross_entropy_with_logits(h, h, y, pos_weight=y[0] + 1),
}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("converter", ["trace", "record"])
def test_trained_weights_and_targets_of_a_loss(name: str, converter: str) -> None:
    """The Hessian at the prediction is not all there is."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, CLASSES)
            self.weights = nn.Parameter(torch.rand(CLASSES))
            self.targets = nn.Parameter(torch.rand(N, CLASSES))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return TRAINED[name](self, self.layer(x), y)

    torch.manual_seed(0)
    plain, x, y = Model(), torch.rand(N, 4), LABELS.double()
    model = extend(copy.deepcopy(plain), use_converter=converter)
    plain(x, y).backward()
    model(x, y).backward()
    for p, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (other.grad is None)
        torch.testing.assert_close(p.grad, other.grad)
    loss = model(x, y)
    with pytest.raises((ValueError, NotImplementedError)), backpack(extensions.DiagHessian()):
        loss.backward()

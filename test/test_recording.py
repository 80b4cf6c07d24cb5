"""Functions in any ``forward``, recorded while it runs: quantities against plain autograd."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.nn import qat
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from backpack import CTX, backpack, disable, extend, extensions
from backpack.context import STATE
from backpack.convert import recorder
from backpack.convert.recording import is_recorded
from backpack.core.derivatives import AutomaticDerivatives
from backpack.core.engine import hooks
from backpack.core.record import alive
from backpack.custom_module.graph_utils import ConversionError
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.optim import DPSGD

N, WIDTH, CLASSES = 3, 6, 3
TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}
ROUTES = ["record", True]


# ------------------------------------------------------------------ what is compared

TRUTHS: dict[str, tuple[Callable[[], Any], Callable[..., list]]] = {
    "grad_batch": (extensions.BatchGrad, oracle.batch_grad),
    "variance": (extensions.Variance, oracle.variance),
    "diag_ggn_exact": (extensions.DiagGGNExact, oracle.ggn_diag),
    "diag_h": (extensions.DiagHessian, oracle.hessian_diag),
    "hmp": (extensions.HMP, oracle.hessian_blocks),
    "kflr": (extensions.KFLR, oracle.kflr),
}


FIRST = ["grad_batch", "variance"]


@pytest.fixture(autouse=True)
def differentiable_attention() -> Iterator[None]:
    """The oracle needs a second derivative of attention."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def value(p: Any, field: str) -> list[Tensor]:
    """Return a quantity as a list of tensors: the products as a matrix, the factors one by one."""
    quantity = getattr(p, field)
    if field == "hmp":
        units = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
        return [quantity(units).reshape(p.numel(), p.numel())]
    return quantity if field == "kflr" else [quantity]


def check(
    model: nn.Module,
    X: Tensor,
    y: Tensor,
    reference: nn.Module | None = None,
    fields: Any = tuple(TRUTHS),
    lossfunc: nn.Module | None = None,
    **options: Any,
) -> nn.Module:
    """Compare the quantities of a model with those of a copy that was never extended."""
    reference = copy.deepcopy(model) if reference is None else reference
    lossfunc = lossfunc or nn.CrossEntropyLoss()
    expected = {field: TRUTHS[field][1](reference, lossfunc, X, y) for field in fields}
    model = extend(model, **options)
    out = model(X)
    torch.testing.assert_close(out, reference(X))
    with backpack(*(TRUTHS[field][0]() for field in fields)):
        extend(copy.deepcopy(lossfunc))(out, y).backward()
    compare(model, expected)
    return model


def compare(model: nn.Module, expected: dict[str, list]) -> None:
    """Compare what a backward pass has left with the truth."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for field, truths in expected.items():
        for (name, p), truth in zip(named, truths, strict=True):
            mine, other = value(p, field), truth if isinstance(truth, list) else [truth]
            assert len(mine) == len(other), f"{field} of {name}"
            for a, b in zip(mine, other, strict=True):
                torch.testing.assert_close(
                    a, b, **TOLERANCE, msg=lambda m, w=f"{field} of {name}": f"{w}: {m}"
                )


# ------------------------------------------------------------------ forwards


class Net(nn.Module):
    """Two linear layers, and between them whatever a test case computes."""

    def __init__(self, middle: Callable[[Net, Tensor], Tensor], shapes: dict[str, tuple]) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(0.5 * torch.randn(shape)))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("buffer", torch.randn(WIDTH))
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self, self.first(x)).reshape(len(x), WIDTH))


Middle = Callable[[Net, Tensor], Tensor]
FORWARDS: dict[str, tuple[Middle, dict[str, tuple]]] = {}


def forward(**shapes: tuple) -> Callable[[Middle], Middle]:
    """Decorator: what happens between the layers ([N, 6] -> [N, 6]), with parameters of its own."""

    def add(middle: Middle) -> Middle:
        FORWARDS[middle.__name__] = (middle, shapes)
        return middle

    return add


def net(name: str, seed: int = 0) -> tuple[Net, Tensor, Tensor]:
    """Build one of the forwards, and data for it, in float64."""
    torch.manual_seed(seed)
    model = Net(*FORWARDS[name]).double()
    return model, torch.randn(N, 4, dtype=torch.float64), torch.arange(N) % CLASSES


# control flow and Python


@forward()
def control_flow_on_data(net: Net, h: Tensor) -> Tensor:
    return h.sin() if h.sum() > 100 else h.tanh() * 2


@forward()
def loop_until_small(net: Net, h: Tensor) -> Tensor:
    while h.abs().max() > 0.5:
        h = h * 0.7
    return h.exp()


@forward()
def numbers_from_data(net: Net, h: Tensor) -> Tensor:
    return h.sigmoid() * float(h.shape[0]) + len(h) / h.size(1)


@forward()
def kwargs_and_containers(net: Net, h: Tensor) -> Tensor:
    def inner(*, left: Tensor, **others: Tensor) -> dict[str, Any]:
        return {"a": [left.sin()], "b": (others["right"].cos(), None)}

    found = inner(left=h, right=h * 2)
    return found["a"][0] * found["b"][0]


# parameters and constants


@forward(bias=(WIDTH,))
def bias(net: Any, h: Tensor) -> Tensor:
    return (h + net.bias).sigmoid()


@forward(scale=())
def scalar_parameter(net: Any, h: Tensor) -> Tensor:
    return net.scale.exp() * h.tanh()


@forward(weight=(WIDTH, WIDTH), bias=(WIDTH,))
def functional_linear(net: Any, h: Tensor) -> Tensor:
    return F.linear(h.sigmoid(), net.weight * 1.0, net.bias).tanh()  # else it is a layer


@forward(weight=(WIDTH, WIDTH), bias=(WIDTH,))
def addmm(net: Any, h: Tensor) -> Tensor:
    return torch.addmm(net.bias, h.sigmoid(), net.weight * 1.0).sin()  # else it is a layer


@forward(token=(1, 1, 3), position=(3, 3))
def class_token_and_positions(net: Any, h: Tensor) -> Tensor:
    x = torch.cat([net.token.expand(len(h), -1, -1), h.view(-1, 2, 3)], 1) + net.position
    return (x.softmax(-1) @ x.transpose(1, 2))[:, :2].sin()


@forward(table=(5, 2))
def table_of_biases(net: Any, h: Tensor) -> Tensor:
    distances = (torch.arange(3)[:, None] - torch.arange(3)[None, :]) + 2  # [3, 3]
    scores = h.view(-1, 3, 2)
    scores = scores @ scores.mT + net.table[distances].sum(-1)
    return scores.softmax(-1) @ h.view(-1, 3, 2)


@forward(bias=(WIDTH,))
def parameter_used_twice(net: Any, h: Tensor) -> Tensor:
    return (h * net.bias).tanh() + net.bias.exp()


@forward(bias=(2, 3))
def computed_parameter(net: Any, h: Tensor) -> Tensor:
    return h.tanh() * (net.bias.softmax(0) * 3).flatten() + net.bias.t().reshape(-1)


@forward()
def buffers_and_constants(net: Any, h: Tensor) -> Tensor:
    ramp = torch.arange(WIDTH, dtype=h.dtype).sin() + net.buffer
    return h.sigmoid() * ramp + torch.ones_like(h) * torch.linspace(0, 1, WIDTH, dtype=h.dtype)


@forward()
def mask_from_data(net: Any, h: Tensor) -> Tensor:
    mask = h.detach() > 0
    return torch.where(mask, h.sin(), h.cos()).masked_fill(h.detach() > 1, 0.5) * mask.sum(1, True)


@forward()
def mask_of_attention(net: Any, h: Tensor) -> Tensor:
    x = h.view(-1, 3, 2)
    mask = torch.arange(3)[None] < 1 + torch.arange(len(h))[:, None]  # [N, T]
    scores = (x @ x.mT).masked_fill(~mask[:, None], -torch.inf)
    return F.softmax(scores, dim=-1) @ x


@forward()
def causal_attention(net: Any, h: Tensor) -> Tensor:
    x = h.view(-1, 1, 3, 2)
    mask = torch.full((3, 3), -torch.inf, dtype=h.dtype).triu(1)
    causal = F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True)
    return causal + F.scaled_dot_product_attention(x.sin(), x, x, attn_mask=mask)


# in place


@forward()
def in_place_methods(net: Any, h: Tensor) -> Tensor:
    h = h * 1.5
    h.add_(0.3).mul_(h.detach().sign()).clamp_(-0.9, 0.9)
    return h.sin_()


@forward()
def in_place_operators(net: Any, h: Tensor) -> Tensor:
    x = h * 2
    x += h
    x *= 2
    x -= h.sin()
    x /= 3
    return x


@forward()
def in_place_after_use(net: Any, h: Tensor) -> Tensor:
    x = h * 2
    y = x.view(-1, 2, 3).permute(0, 2, 1).mean(2)  # needs no entries of x for its gradient
    x += 1
    return torch.cat([x[:, :3] * y, x[:, 3:].sin()], 1)


@forward()
def in_place_after_product(net: Any, h: Tensor) -> Tensor:
    x, y = h * 2, h.sin()
    z = torch.addcmul(y, x, y)
    x = x + z.sigmoid()
    x.mul_(z)
    return x


@forward()
def in_place_on_parts(net: Any, h: Tensor) -> Tensor:
    x = h.sin()
    x[:, :2] += 3
    x[:, :2].add_(x[:, 2:4])
    x[:, 4] = x[:, 5]
    x.add_(x)
    return x.cos()


@forward()
def in_place_on_what_is_viewed(net: Any, h: Tensor) -> Tensor:
    x = h * 2
    part = x[:, :3]
    x.add_(1)
    return torch.cat([part.cos(), x[:, 3:]], 1)


@forward()
def in_place_products_of_parts(net: Any, h: Tensor) -> Tensor:
    x = h * 1.5
    x[:, :2] *= h[:, 2:4]
    x[:, 1:3].mul_(h[:, :2]).add_(1)
    x[:, 4:] /= 1 + h[:, :2] ** 2
    return x


@forward()
def set_items(net: Any, h: Tensor) -> Tensor:
    x = h.sin()
    x[:, 0] = h[:, 1] ** 2
    x[:, 2:4] = 1.0
    x[:, [4, 5]] = h[:, [0, 1]].exp()
    return x


@forward()
def filled_buffer(net: Any, h: Tensor) -> Tensor:
    x = torch.zeros(len(h), 2, 3, dtype=h.dtype)
    x[:, 0] = h[:, :3].tanh()
    x[:, 1] = h[:, 3:].sin()
    return x


@forward()
def masked_in_place(net: Any, h: Tensor) -> Tensor:
    x = h * 3
    x.masked_fill_(h.detach() < -0.5, 0.25)
    x[h.detach() > 0.8] = 0.1
    return x * h


@forward()
def in_place_activations(net: Any, h: Tensor) -> Tensor:
    x = F.relu(h + 0.1, inplace=True)
    return F.elu(x - 1, 1.0, True) + F.leaky_relu_(h * 2, 0.1)


# views and shapes


@forward()
def views(net: Any, h: Tensor) -> Tensor:
    x = h.view(-1, 2, 3).permute(0, 2, 1).contiguous().sin()
    x = x.reshape(len(h), -1).unsqueeze(1).transpose(1, 2).squeeze(-1)
    return x.unflatten(1, (3, 2)).movedim(1, 2).flatten(1).tanh()


@forward()
def several_outputs(net: Any, h: Tensor) -> Tensor:
    a, b = h.split((2, 4), 1)
    c, d = b.chunk(2, dim=-1)
    e = torch.stack(h.unbind(1)[:2], 1)
    return torch.cat([a.sin() * c, d.exp() * e, a * c * e], 1)


@forward()
def statistics(net: Any, h: Tensor) -> Tensor:
    variance, mean = torch.var_mean(h, dim=1, keepdim=True)
    top = h.max(dim=1)
    values, _ = h.sort(1)
    largest, _ = h.topk(2, dim=1)
    return (
        (h - mean) / (variance + 0.1).sqrt() * top.values[:, None] + values + largest.sum(1, True)
    )


@forward()
def names_of_results(net: Any, h: Tensor) -> Tensor:
    found = torch.max(h, dim=1, keepdim=True)
    return h.gather(1, found.indices) * h.cos() + found[0]


@forward()
def products(net: Any, h: Tensor) -> Tensor:
    x = h.view(-1, 2, 3)
    a = torch.einsum("nij,nkj->nik", x, x.sin())
    b = torch.bmm(a, x) + torch.matmul(a, x.cos())
    return torch.einsum("nij,jk->nik", b, torch.ones(3, 3, dtype=h.dtype).triu())


@forward()
def joins(net: Any, h: Tensor) -> Tensor:
    x = torch.stack([h, h.sin(), h * 2], dim=1).mean(1)
    return torch.cat((x[:, ::2], x[:, 1::2].tanh()), dim=-1).roll(1, 1).flip(1)


@forward()
def expanded(net: Any, h: Tensor) -> Tensor:
    x = h[:, :2, None].expand(-1, -1, 3).sin()
    return x.reshape(len(h), 6) * h.mean(1, keepdim=True).expand_as(h).repeat(1, 1)


@forward(scale=(3,))
def positions_before_samples(net: Any, h: Tensor) -> Tensor:
    x = h.view(-1, 2, 3).transpose(0, 1).reshape(-1, 3)  # all first positions, all second ones
    return (x * net.scale).sin().view(2, -1, 3).transpose(0, 1)


@forward(scale=(3,))
def samples_before_positions(net: Any, h: Tensor) -> Tensor:
    return (h.view(-1, 3) * net.scale).sin().view(-1, 6)


@forward(scale=(WIDTH,))
def repeated_batch(net: Any, h: Tensor) -> Tensor:
    return (torch.cat([h, h.sin()]) * net.scale).exp().view(2, -1, WIDTH).mean(0)


@forward(scale=(WIDTH,))
def repeated_samples(net: Any, h: Tensor) -> Tensor:
    return (h.repeat_interleave(2, 0) * net.scale).sin().view(-1, 2, WIDTH).prod(1)


@forward()
def the_same_tensor(net: Any, h: Tensor) -> Tensor:
    x = h.to(torch.float64).contiguous().double().type_as(h).requires_grad_(True)
    return x.sin().to(h.device).cpu().reshape(len(h), 6).view(6 * len(h)).view(-1, 6)


@forward()
def reflected_operators(net: Any, h: Tensor) -> Tensor:
    return (1 - h) * (2.0 / (2 + h**2)) + 0.5 * h - (-h).abs() + 1.5**h


@forward()
def clones(net: Any, h: Tensor) -> Tensor:
    x = h.clone()
    x.sin_()
    return x * h


def outputs_that_change(net: Any, h: Tensor) -> Tensor:
    x = net.last(h.unsqueeze(1) * torch.ones(2, 1))
    x /= 2
    positions = net.last(net.table.unsqueeze(0)).view(1, CLASSES, 2).permute(0, 2, 1)
    positions *= 3
    return x + positions.sin()


# parts without a gradient


@forward()
def no_gradient(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().amax(1, keepdim=True)
        scale += 1
    return (h / scale).sin() + h.detach().cos() * h


@forward()
def straight_through(net: Any, h: Tensor) -> Tensor:
    return (h.round() - h).detach() + h.tanh()


@forward()
def checkpointed(net: Net, h: Tensor) -> Tensor:
    return checkpoint(lambda x: x.sin().exp(), h, use_reentrant=False)


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name: str, route: Any) -> None:
    model, X, y = net(name)
    # where it can be traced, the other route is tested with the converter
    fields = TRUTHS if route == "record" else ["grad_batch", "diag_ggn_exact"]
    check(model, X, y, fields=fields, use_converter=route)


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_outputs_that_change_in_place(route: Any) -> None:
    """Those of linear layers are views of a product with two axes."""
    torch.manual_seed(0)
    model, (X, y) = Net(outputs_that_change, {"table": (2, WIDTH)}).double(), data()
    check(model, X, y, fields=["grad_batch", "diag_ggn_exact", "hmp"], use_converter=route)


def test_no_gradient_through_modules() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            with torch.no_grad():
                scale = self.last(h.sin()).sum(1, keepdim=True)
            return self.last(h.tanh() * scale)

    # the call without a gradient has no part in the Kronecker factors
    fields = [field for field in TRUTHS if field != "kflr"]
    check(Scaled().double(), *data(), fields=fields, use_converter="record")


# ------------------------------------------------------------------ what forward takes and returns


def data(*shape: int) -> tuple[Tensor, Tensor]:
    X = torch.randn(N, *(shape or (4,)), dtype=torch.float64)
    return X, torch.arange(N) % CLASSES


@dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Container(nn.Module):
    """Takes keywords, and returns its logits in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 5), nn.Linear(5, CLASSES)
        self.kind = kind

    def forward(self, *, x: Tensor, scale: Any = None, **others: Any) -> Any:
        h = self.embed(x).sin() * (1.0 if scale is None else scale)
        f = self.head(h) + others.get("offset", 0.0)
        kinds: dict[str, Callable[[], Any]] = {
            "dict": lambda: {"logits": f, "hidden": [h]},
            "tuple": lambda: (f, (h, None)),
            "dataclass": lambda: Result(logits=f, hidden=(h,)),
        }
        return kinds[self.kind]()


def logits(output: Any) -> Tensor:
    """Find the logits in what a model returned."""
    if isinstance(output, dict):
        return output["logits"]
    return output[0] if isinstance(output, tuple) else output.logits


class Called(nn.Module):
    """Calls a model as its users do, for the oracle."""

    def __init__(self, model: nn.Module, **keywords: Any) -> None:
        super().__init__()
        self.model = model
        self.keywords = keywords

    def forward(self, x: Tensor) -> Tensor:
        return logits(self.model(x=x, **self.keywords))


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataclass"])
def test_keywords_and_containers(kind: str) -> None:
    X, y = data()
    keywords = {"scale": torch.rand(N, 1).double(), "offset": 0.5, "unused": None}
    model = Container(kind).double()
    reference = Called(copy.deepcopy(model), **keywords)
    fields = [field for field in TRUTHS if field != "hmp"]
    expected = {field: TRUTHS[field][1](reference, F.cross_entropy, X, y) for field in fields}
    assert extend(model, use_converter="record") is model
    with backpack(*(TRUTHS[field][0]() for field in fields)):
        extend(nn.CrossEntropyLoss())(logits(model(x=X, **keywords)), y).backward()
    compare(model, expected)


# ------------------------------------------------------------------ structure of the model


class Tied(nn.Module):
    """The last layer's weight is the transposed first one, and enters a function."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 3)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.encode(x).tanh(), self.encode.weight.t(), self.bias)


class Language(nn.Module):
    """The embedding is the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.position = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        return self.head(h.cumsum(1).tanh()).transpose(1, 2)


class Recursive(nn.Module):
    """One block, called several times, in another model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)

    def deeper(self, h: Tensor, depth: int) -> Tensor:
        return h if depth == 0 else h + self.deeper(self.block(h).sin(), depth - 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.deeper(self.embed(x), 3))


class OwnModuleOfParameters(nn.Module):
    """Modules are called with parameters, or with nothing."""

    class Table(nn.Module):
        """Positions of a lookup in its own parameter."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 4))

        def forward(self) -> Tensor:
            return self.weight[torch.arange(4) % 2].sum(0).sin()

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4))
        self.act, self.table = nn.Tanh(), self.Table()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x * self.act(self.token) + self.table()).exp())


class Encoder(nn.Module):
    """A transformer of torch inside of a model with functions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
        return self.head(self.encoder(h)[:, 0].sin())


STRUCTURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tied": (Tied, (4,)),
    "language": (Language, (3,)),
    "recursive": (Recursive, (4,)),
    "own_module_of_parameters": (OwnModuleOfParameters, (4,)),
    "encoder": (Encoder, (2, 2)),
}
# Kronecker factors of attention, and of weights that functions read, follow other conventions.
NO_FACTORS = {"tied", "language", "own_module_of_parameters", "encoder"}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure(name: str) -> None:
    torch.manual_seed(0)
    make, shape = STRUCTURES[name]
    model = make().double()
    X, y = data(*shape)
    if name == "language":
        X, y = torch.randint(5, (N, 3)), torch.randint(5, (N, 3))
    fields = [f for f in TRUTHS if f != "kflr" or name not in NO_FACTORS]
    check(model, X, y, fields=fields, use_converter="record")


# ------------------------------------------------------------------ open modules, as they are


class Transformed(nn.Module):
    """A module of torch between layers."""

    def __init__(self, module: nn.Module, masks: dict[str, Tensor]) -> None:
        super().__init__()
        self.embed, self.module, self.head = nn.Linear(2, 4), module, nn.Linear(4, CLASSES)
        self.memory = None if isinstance(module, ENCODERS) else nn.Linear(2, 4)
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        memory = () if self.memory is None else (self.memory(x),)
        return self.head(self.module(self.embed(x), *memory, **self.masks))


ENCODERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
CAUSAL = torch.full((3, 3), -torch.inf, dtype=torch.float64).triu(1)
PADDING = torch.arange(3) >= torch.tensor([[3], [2], [3]])
SIZES = {"d_model": 4, "nhead": 2, "dim_feedforward": 5, "dropout": 0.0}
TRANSFORMERS: dict[str, tuple[Callable[..., nn.Module], dict[str, Tensor]]] = {
    "encoder_layer": (
        partial(nn.TransformerEncoderLayer, **SIZES),
        {"src_mask": CAUSAL, "src_key_padding_mask": PADDING},
    ),
    "encoder": (
        lambda **options: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**SIZES, **options), 2, enable_nested_tensor=False
        ),
        {"mask": CAUSAL, "src_key_padding_mask": PADDING},
    ),
    "decoder_layer": (
        partial(nn.TransformerDecoderLayer, **SIZES),
        {"tgt_mask": CAUSAL, "memory_key_padding_mask": PADDING},
    ),
    "decoder": (
        lambda **options: nn.TransformerDecoder(
            nn.TransformerDecoderLayer(**SIZES, **options), 1, norm=nn.LayerNorm(4)
        ),
        {"tgt_mask": CAUSAL, "tgt_key_padding_mask": PADDING},
    ),
    "transformer": (
        partial(nn.Transformer, num_encoder_layers=1, num_decoder_layers=1, **SIZES),
        {"tgt_mask": CAUSAL, "src_key_padding_mask": PADDING},
    ),
}


# norm_first, batch_first, masked, training: each pair of values of any two
OPTIONS = [
    (False, False, False, True),
    (False, True, True, False),
    (True, False, True, True),
    (True, True, False, True),
    (True, False, False, False),
]


@pytest.mark.parametrize(("norm_first", "batch_first", "masked", "training"), OPTIONS)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_of_torch(
    name: str, norm_first: bool, batch_first: bool, masked: bool, training: bool
) -> None:
    """Without the converter: their functions are recorded as a matter of course."""
    torch.manual_seed(0)
    make, masks = TRANSFORMERS[name]
    activation = "gelu" if masked else "relu"
    module = make(norm_first=norm_first, batch_first=batch_first, activation=activation)
    model: nn.Module = Transformed(module, masks if masked else {})
    to, back = ((0, 1, 2), (0, 2, 1)) if batch_first else ((1, 0, 2), (1, 2, 0))
    model = nn.Sequential(Permute(*to), model, Permute(*back)).double().train(training)
    X, y = torch.randn(N, 3, 2, dtype=torch.float64), torch.randint(CLASSES, (N, 3))
    # how attention's factors are defined is tested with attention
    fields = ["grad_batch", "variance", "diag_ggn_exact", *(["diag_h"] if training else [])]
    check(model, X, y, fields=fields)


# ------------------------------------------------------------------ computed parameters


def normalised(module: nn.Module, name: str = "weight") -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module, name)


def pruned(module: nn.Module) -> nn.Module:
    prune.l1_unstructured(module, "weight", amount=0.4)
    return prune.random_unstructured(module, "bias", amount=1)


class Coupled(nn.Module):
    """A parametrisation of the user's own."""

    def forward(self, W: Tensor) -> Tensor:
        return W * (2 + W.transpose(0, 1).sin())


def coupled(module: nn.Module) -> nn.Module:
    return nn.utils.parametrize.register_parametrization(module, "weight", Coupled())


PARAMETRISATIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], set[str]]] = {
    "weight_norm": (
        parametrizations.weight_norm,
        {"parametrizations.weight.original0", "parametrizations.weight.original1"},
    ),
    "weight_norm_of_axis": (
        partial(parametrizations.weight_norm, dim=1),
        {"parametrizations.weight.original0", "parametrizations.weight.original1"},
    ),
    "spectral_norm": (parametrizations.spectral_norm, {"parametrizations.weight.original"}),
    "orthogonal": (parametrizations.orthogonal, {"parametrizations.weight.original"}),
    "cayley": (
        partial(parametrizations.orthogonal, orthogonal_map="cayley"),
        {"parametrizations.weight.original"},
    ),
    "coupled": (coupled, {"parametrizations.weight.original"}),
    "old_weight_norm": (normalised, {"weight_g", "weight_v"}),
    "old_spectral_norm": (nn.utils.spectral_norm, {"weight_orig"}),
    "prune": (pruned, {"weight_orig", "bias_orig"}),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("layer", ["linear", "conv"])
@pytest.mark.parametrize("name", PARAMETRISATIONS)
def test_parametrisations(name: str, layer: str, training: bool) -> None:
    """Without the converter: the parameters behind the computed one have exact quantities."""
    change, names = PARAMETRISATIONS[name]

    def build() -> nn.Module:
        torch.manual_seed(0)
        module = change(
            nn.Linear(4, 4) if layer == "linear" else nn.Conv1d(2, 2, 2, padding="same")
        )
        assert names <= {key for key, _ in module.named_parameters()}
        inner = [module] if layer == "linear" else [nn.Unflatten(1, (2, 2)), module, nn.Flatten()]
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *inner, nn.Tanh(), nn.Linear(4, CLASSES))
        return model.double().train(training)

    model, reference = extend(build()), build()
    X, y = data()
    for field in ["grad_batch", "variance", "diag_ggn_exact", "diag_h", "hmp"]:
        ext, truth = TRUTHS[field]
        # a forward pass in training mode may change the state, as a step of a power iteration does
        reference.load_state_dict(model.state_dict())
        out = model(X)
        with backpack(ext()):
            extend(nn.CrossEntropyLoss())(out, y).backward()
        with oracle.exact_weight_norm():
            expected = truth(reference, F.cross_entropy, X, y)
        compare(model, {field: expected})


class OwnLayer(nn.Module):
    """A layer that torch does not have; a parametrisation makes its class one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * self.scale, self.weight)


@pytest.mark.filterwarnings("ignore:No rule for function")  # the exponential of a matrix
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("route", [True, "record"])
@pytest.mark.parametrize(
    "name", ["weight_norm", "weight_norm_of_axis", "spectral_norm", "orthogonal", "coupled"]
)
def test_parametrisations_of_own_layers(name: str, route: Any, training: bool) -> None:
    change, names = PARAMETRISATIONS[name]
    torch.manual_seed(0)
    module = change(OwnLayer())
    assert names <= {key for key, _ in module.named_parameters()}
    layers = nn.Linear(4, 4), nn.Tanh(), module, nn.Tanh(), nn.Linear(4, CLASSES)
    reference = nn.Sequential(*layers).double().train(training)
    model, (X, y) = extend(copy.deepcopy(reference), use_converter=route), data()
    for field in ["grad_batch", "diag_ggn_exact", "diag_h"]:
        ext, truth = TRUTHS[field]
        reference.load_state_dict(model.state_dict())
        out = model(X)
        with warnings.catch_warnings(), backpack(ext()):
            warnings.filterwarnings("error", message=".*use_converter=True")
            extend(nn.CrossEntropyLoss())(out, y).backward()
        with oracle.exact_weight_norm():
            expected = truth(reference, F.cross_entropy, X, y)
        compare(model, {field: expected})


OF_RECURRENT = {
    "weight_norm": lambda m: parametrizations.weight_norm(m, "weight_hh_l0"),
    "coupled": lambda m: nn.utils.parametrize.register_parametrization(m, "bias_hh_l0", Sine()),
    "old_weight_norm": lambda m: normalised(m, "weight_ih_l0"),
    "prune": lambda m: prune.random_unstructured(m, "weight_hh_l0", amount=0.4),
}


class Sine(nn.Module):
    def forward(self, p: Tensor) -> Tensor:
        return p.sin()


@pytest.mark.parametrize("route", [False, True, "record"])
@pytest.mark.parametrize("name", OF_RECURRENT)
def test_parametrisations_of_recurrent_layers(name: str, route: bool | str) -> None:
    """They have parameters for each layer, under names of their own."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        recurrent = OF_RECURRENT[name](nn.GRU(2, 3, num_layers=2, batch_first=True))
        layers = [nn.Unflatten(1, (2, 2)), recurrent, ReduceTuple(0), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(6, CLASSES)).double()

    X, y = data()
    for field in ["grad_batch", "diag_ggn_exact", "diag_h"]:
        ext, truth = TRUTHS[field]
        torch.manual_seed(1)  # pruning draws
        model = extend(build(), use_converter=route)
        out = model(X)
        with backpack(ext()):
            extend(nn.CrossEntropyLoss())(out, y).backward()
        with oracle.exact_weight_norm():
            torch.manual_seed(1)
            expected = truth(build(), F.cross_entropy, X, y)
        compare(model, {field: expected})


class Computed(nn.Module):
    """Calls a layer with weights that it computes, with one of them by a hypernetwork."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.code, self.hyper = nn.Parameter(torch.randn(2)), nn.Linear(2, WIDTH)
        self.scale, self.is_tied = nn.Parameter(torch.randn(WIDTH, 1)), is_tied

    def forward(self, x: Tensor) -> Tensor:
        given = {"weight": self.layer.weight * self.scale, "bias": self.hyper(self.code)}
        z = torch.func.functional_call(self.layer, given, (x,)).tanh()
        return self.last(z + self.layer(x) if self.is_tied else z)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_layers_that_are_called_with_computed_weights(is_tied: bool, route: Any) -> None:
    torch.manual_seed(0)
    model = Computed(is_tied).double()
    model.layer.bias.requires_grad_(is_tied)
    fields = [field for field in TRUTHS if field != "kflr"]
    check(model, *data(), fields=fields, use_converter=route)


class Magnitude(nn.Module):
    """A leaf that scales what other modules compute, and reads their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, base: nn.Module, *, adapter: nn.Module) -> Tensor:
        norm = torch.linalg.norm(base.weight + adapter.weight, dim=1)
        return self.weight / norm * (base(x) + adapter(x))


class Adapted(nn.Module):
    """Weights in polar coordinates, by a leaf that is called with modules."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH, bias=False)
        self.magnitude, self.last = Magnitude(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.magnitude(x, self.base, adapter=self.adapter).tanh())


def test_leaves_that_are_called_with_modules() -> None:
    torch.manual_seed(0)
    fields = [field for field in TRUTHS if field != "kflr"]
    check(Adapted().double(), *data(), fields=fields, use_converter="record")


class Parameters(nn.Module):
    """Parameters that are compared one by one, as those of a tensordict: that is no truth value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = nn.Module.__hash__


def test_a_single_layer_keeps_its_rule() -> None:
    """Its weight has two Kronecker factors, which the function that it calls has not."""
    factors = []
    for route in (False, True, "record"):
        torch.manual_seed(0)
        layer, loss = extend(nn.Linear(4, 3), use_converter=route), extend(nn.MSELoss())
        with backpack(extensions.KFLR()):
            loss(layer(torch.rand(5, 4)), torch.rand(5, 3)).backward()
        factors.append([p.kflr for p in layer.parameters()])
    assert [len(kflr) for kflr in factors[0]] == [2, 1]
    torch.testing.assert_close(factors[1], factors[0])
    torch.testing.assert_close(factors[2], factors[0])


@pytest.mark.filterwarnings("ignore:.*reduce_range", "ignore:.*deprecated")
@pytest.mark.parametrize("route", [True, "record"])
def test_layers_of_quantisation_aware_training(route: Any) -> None:
    """They are called with rounded weights, whose derivative is one."""
    fake = quantization.default_fake_quant
    layer = qat.Linear(4, 3, qconfig=quantization.QConfig(activation=fake, weight=fake))
    X, y, lossfunc = torch.rand(5, 4), torch.rand(5, 3), extend(nn.MSELoss())
    layer(X)
    layer.apply(quantization.disable_observer)
    plain = copy.deepcopy(layer)
    same = extend(nn.Linear(4, 3))
    same.load_state_dict({"weight": layer.weight_fake_quant(layer.weight), "bias": layer.bias})
    model = extend(nn.Sequential(layer), use_converter=route)
    torch.testing.assert_close(model(X), plain(X))
    for one in (model, same):
        loss = lossfunc(one(X), y)
        with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward()
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(p.grad_batch, q.grad_batch)
        torch.testing.assert_close(p.diag_ggn_exact, q.diag_ggn_exact)


def test_modules_that_hold_parameters_are_not_compared() -> None:
    torch.manual_seed(0)
    net = Net(lambda m, h: (h * m.parameters_of_net.scale).tanh(), {})
    net.parameters_of_net = Parameters()
    fields = [field for field in TRUTHS if field != "kflr"]
    check(net.double(), *data(), fields=fields, use_converter="record")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("rows", [[2, 0], [1], [True, False, True]], ids=str)
def test_losses_of_some_samples(rows: list, route: Any) -> None:
    """Parameters that functions read have gradients of all samples, zero for the others."""
    torch.manual_seed(0)
    model = Net(lambda m, h: (h * m.scale).tanh(), {"scale": (WIDTH,)}).double()
    (X, y), reference = data(), copy.deepcopy(model)
    index = torch.tensor(rows)

    def lossfunc(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output[index], y[index])

    expected = {field: TRUTHS[field][1](reference, lossfunc, X, y) for field in FIRST}
    model = extend(model, use_converter=route)
    with backpack(*(TRUTHS[field][0]() for field in FIRST)):
        extend(nn.CrossEntropyLoss())(model(X)[index], y[index]).backward()
    compare(model, expected)


def test_a_recurrent_layer_that_is_parametrised_after_extend() -> None:
    model = extend(nn.Sequential(nn.GRU(2, 3), ReduceTuple(0), nn.Linear(3, 2)))
    parametrizations.weight_norm(model[0], "weight_hh_l0")
    loss = extend(nn.MSELoss())(model(torch.rand(1, 4, 2)), torch.rand(1, 4, 2))
    message = pytest.raises(NotImplementedError, match=r"extend\(model\) once more")
    with message, backpack(extensions.DiagGGNExact()):
        loss.backward()


@pytest.mark.parametrize("route", [False, "record"])
def test_a_mask_is_removed_after_a_pass(route: bool | str) -> None:
    """Pruning gives the parameter back to the weight: the same tensor under another name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    prune.l1_unstructured(model[0], "weight", amount=0.4)
    extend(model, use_converter=route)
    X, y = data()
    for removed in [False, True]:
        if removed:
            prune.remove(model[0], "weight")
        for field in ["grad_batch", "diag_h"]:
            ext, truth = TRUTHS[field]
            expected = truth(model, F.cross_entropy, X, y)
            out = model(X)
            with backpack(ext()):
                extend(nn.CrossEntropyLoss())(out, y).backward()
            compare(model, {field: expected})


# ------------------------------------------------------------------ life with the recording


class Small(nn.Module):
    """A model that needs recording."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, CLASSES)
        self.scale = nn.Parameter(torch.rand(5))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h.sin() * self.scale if x.shape[0] else h
        if self.fails:
            raise KeyError("no")
        return self.last(h)


def small() -> tuple[Small, Tensor, Tensor]:
    torch.manual_seed(0)
    return (Small().double(), *data())


def is_right(
    model: nn.Module, X: Tensor, y: Tensor, fields: Any = ("grad_batch", "diag_h")
) -> None:
    """Check an extended model against a fresh one with the same parameters."""
    reference = Small().double()
    reference.load_state_dict(model.state_dict())
    expected = {f: TRUTHS[f][1](reference, F.cross_entropy, X, y) for f in fields}
    with backpack(*(TRUTHS[f][0]() for f in fields)):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    compare(model, expected)


def recorded(model: nn.Module) -> nn.Module:
    return extend(model, use_converter="record")


def test_model_is_left_alone() -> None:
    model, X, _ = small()
    names = [name for name, _ in model.named_modules()]
    state, forward_, output = model.state_dict(), type(model).forward, model(X)
    assert recorded(model) is model
    assert torch.equal(model(X), output)
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == list(state)
    assert type(model).forward is forward_
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy],
    ids=["deepcopy", "pickle", "copy"],
)
@pytest.mark.parametrize("used", [True, False], ids=["used", ""])
def test_copies(copied: Callable, used: bool) -> None:
    model, X, y = small()
    recorded(model)
    if used:
        model(X)
    other = copied(model)
    is_right(extend(other, use_converter="record"), X, y)
    is_right(model, X, y)
    is_right(other, X, y)


def test_extend_twice_and_again() -> None:
    model, X, y = small()
    recorded(recorded(model))
    assert is_recorded(model)
    is_right(model, X, y)
    calls = []
    with backpack(extensions.BatchGrad(), extension_hook=lambda m: calls.append(m)):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    assert len({id(m) for m in calls}) == len(calls)  # each call once
    CTX.remove_hooks()
    assert not is_recorded(model)
    recorded(model)
    is_right(model, X, y)


def test_exception_in_forward() -> None:
    model, X, y = small()
    recorded(model)
    model.fails = True
    modes = torch.overrides._get_current_function_mode_stack()
    for _ in range(2):
        with pytest.raises(KeyError):
            model(X)
        assert torch.overrides._get_current_function_mode_stack() == modes
    model.fails = False
    is_right(model, X, y)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("place", ["root", "leaf", "nested"])
@pytest.mark.parametrize(
    "copied",
    [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy],
    ids=["", "deepcopy", "pickle", "copy"],
)
def test_interrupted_forward(copied: Callable, place: str, interrupt: type[BaseException]) -> None:
    """Torch calls no hooks of a module then; nothing may be left on its stack of modes."""
    model, X, y = small()
    model = copied(recorded(model))

    def stop(*_: Any) -> None:
        raise interrupt

    outer: nn.Module = nn.Sequential(recorded(model)) if place == "nested" else model
    hook = (model.last if place == "leaf" else model.first).register_forward_hook(stop)
    modes = torch.overrides._get_current_function_mode_stack()
    for _ in range(2):
        # what the interrupt passes on its way takes its own mode from the stack
        with pytest.raises(interrupt), torch.device("cpu"):
            recorded(outer)(X)
        assert torch.overrides._get_current_function_mode_stack() == modes
        assert not STATE.get().recorders
    hook.remove()
    is_right(model, X, y)


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("name", ["first", "last"])
def test_what_hooks_of_leaves_do_is_recorded(name: str, extended: bool) -> None:
    """Also where they were there before: our hooks come first, and they keep their order."""
    model, X, y = small()
    model = extend(model) if extended else model
    for prepend in (False, False, True):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda m, args, out: out + out.sin() ** 2, prepend=prepend)
        module.register_forward_hook(lambda m, args, out: 2 * out)
    reference, _, _ = small()
    for hook in model.get_submodule(name)._forward_hooks.values():
        if hook is not hooks._record:
            reference.get_submodule(name).register_forward_hook(hook)
    fields = TRUTHS.keys() - {"kflr"}  # whose truth has hooks as well
    check(model, X, y, reference, fields, use_converter="record")


@pytest.mark.parametrize("use_converter", [None, False, True, "record"])
def test_new_layers_are_recorded_once(use_converter: Any) -> None:
    """A layer that is extended alone, or with the model that is recorded already."""
    model, X, y = small()
    recorded(model)
    model.last = nn.Linear(5, CLASSES).double()
    if use_converter is None:
        extend(model.last)
    else:
        assert extend(model, use_converter=use_converter) is model
    is_right(model, X, y, TRUTHS)


class Learner(Small):
    """Computes its loss with what it is given."""

    def forward(self, x: Tensor, y: Tensor, lossfunc: nn.Module) -> Tensor:
        return lossfunc(super().forward(x), y)


def test_losses_that_a_model_is_called_with_are_recorded_once() -> None:
    torch.manual_seed(0)
    model, (X, y) = recorded(Learner().double()), data()
    reference = Small().double()
    reference.load_state_dict(model.state_dict())
    fields = ("grad_batch", "diag_ggn_exact", "diag_h", "kflr")
    expected = {f: TRUTHS[f][1](reference, F.cross_entropy, X, y) for f in fields}
    with backpack(*(TRUTHS[f][0]() for f in fields)):
        model(X, y, extend(nn.CrossEntropyLoss())).backward()
    compare(model, expected)


def test_classes_are_as_they_were() -> None:
    """Only the model itself is called in another way, and not without hooks."""
    before = {cls: dict(vars(cls)) for cls in (Small, nn.Sequential, nn.Linear, nn.Module)}
    model = recorded(nn.Sequential(Small().double()))
    X, _ = data()
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)]
    for one in copies:
        one(X)
    assert {cls: dict(vars(cls)) for cls in before} == before
    assert "_call_impl" not in vars(nn.Sequential(nn.Linear(3, 2)))
    CTX.remove_hooks()
    assert "_call_impl" not in vars(model)


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("is_gone", [True, False])
def test_shallow_copies_are_called_themselves(used: bool, is_gone: bool) -> None:
    """Not the model that they were copied from."""
    model, X, y = small()
    recorded(model)
    if used:
        model(X)
    other = copy.copy(model)
    other._modules = {name: copy.deepcopy(m) for name, m in model._modules.items()}
    with torch.no_grad():
        other.last.weight += 1
    expected = oracle.batch_grad(copy.deepcopy(other), nn.CrossEntropyLoss(reduction="sum"), X, y)
    if is_gone:
        del model
        gc.collect()
        other = pickle.loads(pickle.dumps(other))
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss(reduction="sum"))(other(X), y).backward()
    compare(other, {"grad_batch": expected})


def test_models_are_freed_at_once() -> None:
    """Nothing that is put on them refers to them."""
    gc.collect()
    gc.disable()
    try:
        model = recorded(nn.Sequential(Small().double()))
        living = weakref.ref(model)
        del model
        assert living() is None
    finally:
        gc.enable()


class Failing(nn.Module):
    """A leaf that raises."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no")


class Caught(Small):
    """Survives an exception in a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = Failing()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        try:
            h = self.failing(h)
        except KeyError:
            h = h.sin() * self.scale
        return self.last(h)


def test_exception_in_a_leaf() -> None:
    torch.manual_seed(0)
    model = Caught().double()
    X, y = data()
    expected = {"diag_h": oracle.hessian_diag(model, F.cross_entropy, X, y)}
    recorded(model)
    for _ in range(2):
        with backpack(extensions.DiagHessian()):
            extend(nn.CrossEntropyLoss())(model(X), y).backward()
        compare(model, expected)


def test_two_models_interleaved() -> None:
    model, X, y = small()
    other = Small().double()
    expected = {m: oracle.hessian_diag(m, F.cross_entropy, X, y) for m in (model, other)}
    recorded(model), recorded(other)
    f, g = model(X), other(X)
    lossfunc = extend(nn.CrossEntropyLoss())
    for m, out in ((model, f), (other, g)):
        with backpack(extensions.DiagHessian()):
            lossfunc(out, y).backward()
        compare(m, {"diag_h": expected[m]})


def test_one_model_feeds_another() -> None:
    model, X, y = small()
    head = nn.Sequential(nn.Linear(CLASSES, CLASSES).double(), nn.Tanh())
    both = nn.Sequential(copy.deepcopy(model), copy.deepcopy(head))
    expected = {"diag_h": oracle.hessian_diag(both, F.cross_entropy, X, y)}
    recorded(model), recorded(head)
    with backpack(extensions.DiagHessian()):
        extend(nn.CrossEntropyLoss())(head(model(X)), y).backward()
    compare(nn.Sequential(model, head), expected)


def test_several_forward_passes() -> None:
    model, X, y = small()
    recorded(model)
    with torch.no_grad():
        quiet = model(X)
    assert not quiet.requires_grad
    with disable():
        model(X)
    model(2 * X)  # never used
    kept = model(3 * X)
    is_right(model, X, y)
    kept.sum().backward()
    is_right(model, X, y)


def test_retain_graph() -> None:
    model, X, y = small()
    expected = oracle.hessian_diag(model, F.cross_entropy, X, y)
    loss = extend(nn.CrossEntropyLoss())(recorded(model)(X), y)
    for factor in (1, 2):
        with backpack(extensions.DiagHessian(), retain_graph=True):
            (factor * loss).backward(retain_graph=True)
        compare(model, {"diag_h": [factor * e for e in expected]})


def test_functions_after_the_model() -> None:
    model, X, y = small()
    reference = copy.deepcopy(model)
    expected = oracle.batch_grad(reference, nn.CrossEntropyLoss(reduction="sum"), X, y)
    recorded(model)
    with backpack(extensions.BatchGrad()):
        (extend(nn.CrossEntropyLoss(reduction="none"))(model(X), y).sum() * 2).backward()
    compare(model, {"grad_batch": [2 * e for e in expected]})


def test_create_graph() -> None:
    def penalty(quantities: list[Tensor]) -> Tensor:
        return sum(((q**2).sum() for q in quantities), torch.zeros(()))

    model, X, y = small()
    reference = copy.deepcopy(model)
    per_sample = []
    for n in range(N):
        loss = F.cross_entropy(reference(X[n : n + 1]), y[n : n + 1]) / N
        per_sample.append(
            torch.autograd.grad(loss, list(reference.parameters()), create_graph=True)
        )
    stacked = [torch.stack(grads) for grads in zip(*per_sample, strict=True)]
    expected = torch.autograd.grad(penalty(stacked), list(reference.parameters()))
    recorded(model)
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward(create_graph=True)
    mine = torch.autograd.grad(
        penalty([p.grad_batch for p in model.parameters()]), list(model.parameters())
    )
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


SUBSAMPLED = [
    *("in_place_operators", "class_token_and_positions", "products", "repeated_samples"),
    *("positions_before_samples", "samples_before_positions", "repeated_batch"),
]


@pytest.mark.parametrize("name", SUBSAMPLED)
def test_subsampling(name: str) -> None:
    model, X, y = net(name)
    expected = oracle.batch_grad(copy.deepcopy(model), F.cross_entropy, X, y)
    recorded(model)
    with backpack(extensions.BatchGrad(subsampling=[2, 0])):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    compare(model, {"grad_batch": [e[[2, 0]] for e in expected]})


@pytest.mark.parametrize("name", ["in_place_after_use", "statistics", "class_token_and_positions"])
def test_nothing_grows(name: str) -> None:
    model, X, y = net(name)
    recorded(model)
    lossfunc = extend(nn.CrossEntropyLoss())
    exts = extensions.BatchGrad(), extensions.DiagGGNExact()

    def tensors_after(steps: int) -> int:
        for _ in range(steps):
            model.zero_grad()
            with backpack(*exts):
                lossfunc(model(X), y).backward()
            model(X)  # without a backward pass
        gc.collect()
        return sum(isinstance(x, Tensor) for x in gc.get_objects())

    assert tensors_after(3) == tensors_after(20)
    assert not any(alive.live_calls(m) for m in model.modules())


def test_what_reads_and_changes_one_memory_does_not_own_its_future() -> None:
    """A cycle through autograd's graph would never be collected."""
    model, X, _ = net("in_place_on_parts")
    recorded(model)(X)  # without a backward pass
    gc.collect()
    assert not any(alive.live_calls(m) for m in model.modules())


class Changing(Small):
    """Its options are new in every forward pass, if it is asked to."""

    step, change = 0, True

    def forward(self, x: Tensor) -> Tensor:
        self.step += self.change
        return self.last(self.first(x).sin() * self.scale * (1 + 0.01 * self.step))


def test_options_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the modules for functions, a number is kept; those in a living graph are usable."""
    monkeypatch.setattr(recorder, "MAX_APPLICATIONS", 4)
    torch.manual_seed(0)
    model, (X, y) = Changing().double(), data()
    reference = copy.deepcopy(model)
    reference.step, reference.change = 1, False
    expected = oracle.hessian_diag(reference, F.cross_entropy, X, y)
    recorded(model)
    first = model(X)
    extended = []
    for _ in range(3):
        for _ in range(5):
            model(X)
        gc.collect()
        extended.append(len(CTX._extended))
    assert len(vars(model)["_backpack_functions"].applications) == 4
    assert len(set(extended)) == 1
    with backpack(extensions.DiagHessian()):
        extend(nn.CrossEntropyLoss())(first, y).backward()
    compare(model, {"diag_h": expected})


# ------------------------------------------------------------------ what cannot be followed


class Double(torch.autograd.Function):
    """What only the user knows the derivative of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


def a_function_of_the_user(net: Net, h: Tensor) -> Tensor:
    return Double.apply(h).sin()


class Doubled(nn.Linear):
    """A layer whose weight a function of the user has computed."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Double.apply(self.weight), self.bias)


def test_functions_of_the_user_that_read_weights() -> None:
    """The error says what is not followed, and that a layer which reads data may do it."""
    torch.manual_seed(0)
    model, (X, y) = nn.Sequential(Doubled(4, 4), nn.Tanh(), nn.Linear(4, CLASSES)), data()
    outside = Net(lambda m, h: F.linear(h, Double.apply(m.table.exp())), {"table": (WIDTH, WIDTH)})
    outside = extend(outside.double(), use_converter="record")
    loss = extend(nn.CrossEntropyLoss())(outside(X), y)
    message = r"autograd\.Function that is recorded.*one module without children.*reads data"
    with backpack(extensions.BatchGrad()), pytest.raises(ValueError, match=message):
        loss.backward()
    with pytest.warns(UserWarning, match="No rule"):
        check(model.double(), X, y, fields=FIRST, use_converter="record")


class Swap(torch.autograd.Function):
    """Moves the samples from one axis to another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.transpose(0, 1)


class Kernel(torch.autograd.Function):
    """Fills memory, as kernels do that are no functions of torch; it may swap axes, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, swaps: bool) -> Tensor:
        ctx.swaps = swaps
        x = x.transpose(0, 1) if swaps else x
        y = torch.empty_like(x)
        y.numpy()[...] = 2 * x.detach().numpy()
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return (2 * g.transpose(0, 1) if ctx.swaps else 2 * g), None


def moved_there_and_back(net: Net, h: Tensor) -> Tensor:
    rows = Swap.apply(h.unsqueeze(1) * torch.ones(2, 1))
    return Swap.apply(net.last(rows).sin())


def a_kernel_of_the_user(net: Net, h: Tensor) -> Tensor:
    return Kernel.apply(h, False).sin()


def scripted(net: Net, h: Tensor) -> Tensor:
    return torch.jit.script(torch_cube)(h)


def torch_cube(x: Tensor) -> Tensor:
    return x * x * x


def pulled_back(net: Net, h: Tensor) -> Tensor:
    return torch.func.vjp(torch.tanh, h)[1](h.sin())[0]


def pushed_forward(net: Net, h: Tensor) -> Tensor:
    return torch.func.jvp(torch.tanh, (h,), (h.sin(),))[1]


def gradients_of_rows(net: Net, h: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: (row * row).tanh().sum()))(h)


GAPS = [
    *(a_function_of_the_user, moved_there_and_back, a_kernel_of_the_user),
    *(scripted, pulled_back, pushed_forward, gradients_of_rows),
]


class Gate(nn.Module):
    """A module whose scripted function torch does not show to others."""

    def forward(self, h: Tensor) -> Tensor:
        return torch.jit.script(torch_cube)(h)


class Gated(nn.Module):
    def __init__(self, as_module: bool) -> None:
        super().__init__()
        self.first, self.last, self.gate = nn.Linear(3, 4), nn.Linear(4, 2), Gate()
        self.as_module = as_module

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.transpose(0, 1))
        return self.last((self.gate(h) if self.as_module else torch.jit.script(torch_cube)(h))[-1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("as_module", [False, True])
def test_what_to_do_about_scripted_functions(as_module: bool) -> None:
    """The error names them, and what it tells to do works."""
    plain, X, y = Gated(as_module), torch.rand(5, 6, 3), torch.rand(5, 2)
    model, lossfunc = extend(copy.deepcopy(plain), use_converter="record"), nn.MSELoss()
    told = pytest.raises(ValueError, match=r"scripted functions.* Let one module without children")
    with nullcontext() if as_module else told, backpack(extensions.BatchGrad()):
        extend(lossfunc)(model(X), y).backward()
    if as_module:
        for p, truth in zip(
            model.parameters(), oracle.batch_grad(plain, nn.MSELoss(), X, y), strict=True
        ):
            torch.testing.assert_close(p.grad_batch, truth)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("middle", GAPS, ids=lambda m: m.__name__)
def test_gaps(middle: Middle) -> None:
    """Second order is an error; the gradients of each sample are right all the same."""
    torch.manual_seed(0)
    model, (X, y) = Net(middle, {}).double(), data()
    expected = oracle.batch_grad(copy.deepcopy(model), F.cross_entropy, X, y)
    recorded(model)
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    compare(model, {"grad_batch": expected})
    with (
        pytest.raises(ValueError, match="through an operation that is not a module"),
        backpack(extensions.DiagGGNExact()),
    ):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()


def test_functions_of_the_user_that_move_samples_unseen() -> None:
    def middle(net: Net, h: Tensor) -> Tensor:
        rows = Kernel.apply(h.unsqueeze(1) * torch.ones(2, 1), True)
        return Kernel.apply(net.last(rows).sin(), True)

    model, (X, y) = recorded(Net(middle, {}).double()), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    problem = r"'last' \(Linear\).*\(KernelBackward\) has computed from one of 3 samples"
    with pytest.raises(ValueError, match=problem), backpack(extensions.BatchGrad()):
        loss.backward()


class Force(nn.Module):
    """The (negative) gradient of an energy, with or without a function that follows."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.scale = nn.Parameter(torch.rand(4))
        self.create_graph = create_graph

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = (self.first(x) * self.scale).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=self.create_graph)
        return self.last((self.first(x) * self.scale).sin() * force)


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_in_forward(inside: bool) -> None:
    """Without a graph of its own, a gradient is a constant; else it is an error to rely on it."""
    X, y = data()
    model = Force(create_graph=False).double()
    fields = ("grad_batch", "diag_ggn_exact")
    expected = {f: TRUTHS[f][1](copy.deepcopy(model), F.cross_entropy, X, y) for f in fields}
    recorded(model)
    lossfunc = extend(nn.CrossEntropyLoss())
    out = model(X)
    with backpack(*(TRUTHS[f][0]() for f in fields)):
        lossfunc(model(X) if inside else out, y).backward()
    compare(model, expected)

    model = Force(create_graph=True).double()
    reference = copy.deepcopy(model)
    torch.testing.assert_close(recorded(model)(X), reference(X))
    with (
        pytest.raises(ValueError, match=r"that a function has computed.*without children"),
        backpack(extensions.BatchGrad()),
    ):
        lossfunc(model(X), y).backward()


class Tangent(nn.Module):
    """A layer, and how it changes along a direction."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            change = forward_ad.make_dual(x, torch.ones_like(x))
            return torch.add(*forward_ad.unpack_dual(self.layer(change).tanh()))


class Residual(nn.Module):
    """The residual of a differential equation: derivatives of a network, which is no child."""

    def __init__(self, derivative: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4) / 2)
        self.derivative = derivative

    def forward(self, x: Tensor) -> Tensor:
        return self.derivative(lambda x: F.linear(x, self.weight).tanh().square().sum(-1), x)


def by_autograd(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(network(x).sum(), x, create_graph=True)[0]


def by_func(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(network))(x)


def by_tangents(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        value, slope = forward_ad.unpack_dual(network(forward_ad.make_dual(x, x.detach().cos())))
        return torch.stack([value, slope, value * slope, slope], 1)


DERIVATIVES = [by_autograd, by_func, by_tangents]


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("route", ROUTES)
def test_derivatives_in_a_module_without_children(
    derivative: Callable[..., Tensor], route: Any
) -> None:
    """It is taken as a whole, also where the model could be traced."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Residual(derivative), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x).sin())

    torch.manual_seed(0)
    fields = ("grad_batch", "diag_ggn_exact", "diag_h", "hmp")
    check(Net().double(), *data(), fields=fields, use_converter=route)


class Slope(nn.Module):
    """Derivatives with respect to what it is called with."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if y is None:
            return torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)[0]
        rows = torch.arange(len(x))
        (slope,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        return (slope.logsumexp(1) - x[rows, y]).mean()


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("options", [{}, {"use_converter": True}], ids=["modules", "converted"])
def test_derivatives_with_respect_to_an_input(options: dict[str, Any]) -> None:
    """Of a module, and of a loss: here that is convex, log-sum-exp of exponentials."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), Slope(), nn.Linear(5, CLASSES)).double()
    fields = ("grad_batch", "diag_ggn_exact", "diag_h", "hmp")
    check(model, *data(), fields=fields, lossfunc=Slope(), **options)


@pytest.mark.parametrize("samples", [1, N])
@pytest.mark.parametrize("route", ROUTES)
def test_tangents_in_forward(route: Any, samples: int) -> None:
    """What they depend on is in no quantity, which is said, of one sample as well."""
    X, y = data()
    model = extend(nn.Sequential(nn.Linear(4, 4), Tangent()).double(), use_converter=route)
    lossfunc = extend(nn.CrossEntropyLoss())
    with (
        pytest.warns(UserWarning, match="also used by a function"),
        backpack(extensions.BatchGrad()),
    ):
        lossfunc(model(X[:samples]), y[:samples]).backward()
    with pytest.raises(ValueError, match="without children"), backpack(extensions.DiagGGNExact()):
        lossfunc(model(X[:samples]), y[:samples]).backward()


MIXING: dict[str, Middle] = {
    "mean": lambda net, h: h - h.mean(0),
    "products": lambda net, h: h @ h.T @ h,
    "cumulative": lambda net, h: h.cumsum(0),
}


@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_samples(name: str) -> None:
    torch.manual_seed(0)
    model, (X, y) = Net(MIXING[name], {}).double(), data()
    recorded(model)
    with (
        pytest.raises(ValueError, match=r"combines different samples|batch axis is not the first"),
        backpack(extensions.DiagGGNExact()),
    ):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()


class NormAct(nn.BatchNorm2d):
    """Calls the function of its class, and an activation: the layer of most models of timm."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        state, mode = (self.running_mean, self.running_var), bool(self.training)
        return self.act(F.batch_norm(x, *state, self.weight, self.bias, training=mode))


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_batch_normalisation_as_a_function(route: Any, training: bool, frozen: int) -> None:
    """It has the quantities of the layer, also in training mode, where it mixes samples."""
    X, y, found = torch.rand(N, 1, 6, 6, dtype=torch.float64), torch.arange(N) % CLASSES, []
    for norm in (NormAct, lambda size: nn.Sequential(nn.BatchNorm2d(size), nn.Tanh())):
        torch.manual_seed(0)
        first, second = (nn.Conv2d(1, 2, 3), norm(2)), (nn.Conv2d(2, 2, 3), norm(2))
        model = nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(8, CLASSES)).double()
        model[:frozen].requires_grad_(False)
        model = extend(model.train(training), use_converter=route)
        with backpack(*(TRUTHS[f][0]() for f in ("diag_ggn_exact", "diag_h", "kflr"))):
            extend(nn.CrossEntropyLoss())(model(X), y).backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        states = [x for name, x in model.named_buffers() if "running" in name]
        found.append([[p.diag_ggn_exact, p.diag_h, *p.kflr] for p in trained] + [states])
    torch.testing.assert_close(*found)


class ChannelNorm(nn.Module):
    """Normalises channels by a function, behind a layer; or with the layer that it is."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.conv, self.norm, self.form = nn.Conv2d(1, 2, 3), nn.LayerNorm(2, 0.1), form

    def forward(self, x: Tensor) -> Tensor:
        x, norm = self.conv(x).permute(0, 2, 3, 1), self.norm
        if self.form is nn.LayerNorm:
            x = norm(x)
        else:  # the one of torch takes an option more
            options = () if self.form is F.layer_norm else (True,)
            x = self.form(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps, *options)
        return x.permute(0, 3, 1, 2)


@pytest.mark.parametrize("route", ROUTES)
def test_layer_normalisation_as_a_function(route: Any) -> None:
    """It has the quantities of the layer, behind an axis that is not the last."""
    X, y, found = torch.rand(N, 1, 6, 6, dtype=torch.float64), torch.arange(N) % CLASSES, []
    for form in (F.layer_norm, nn.LayerNorm, torch.layer_norm):
        torch.manual_seed(0)
        model = nn.Sequential(ChannelNorm(form), nn.Flatten(), nn.Linear(32, CLASSES))
        model = extend(model.double(), use_converter=route)
        fields = "grad_batch", "diag_ggn_exact", "diag_h", "kflr"
        with backpack(*(TRUTHS[field][0]() for field in fields)):
            extend(nn.CrossEntropyLoss())(model(X), y).backward()
        parameters = [*model.parameters()]
        found.append([[p.grad_batch, p.diag_ggn_exact, p.diag_h, *p.kflr] for p in parameters])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[2], found[1])


@pytest.mark.parametrize("route", ROUTES)
def test_standardised_weights(route: Any) -> None:
    """Statistics of a tensor without samples mix none."""

    class Standardised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = F.batch_norm(self.weight[None], None, None, training=True)
            return F.linear(x, weight[0], self.bias)

    torch.manual_seed(0)
    X, y = torch.rand(N, 4, dtype=torch.float64), torch.arange(N) % CLASSES
    parts = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Sequential(Standardised(5, CLASSES))
    model = nn.Sequential(*parts).double()
    model[1][0].inner = nn.Identity()  # a container, whose functions are recorded
    fields = ("grad_batch", "diag_ggn_exact")
    expected = {f: TRUTHS[f][1](copy.deepcopy(model), F.cross_entropy, X, y) for f in fields}
    model = extend(model, use_converter=route)
    with warnings.catch_warnings(), backpack(*(TRUTHS[f][0]() for f in fields)):
        warnings.simplefilter("error")
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    compare(model, expected)


def test_random_functions() -> None:
    torch.manual_seed(0)
    model, (X, y) = Net(lambda net, h: F.dropout(h, 0.5) * torch.rand_like(h), {}).double(), data()
    torch.manual_seed(1)
    expected = oracle.ggn_diag(model, F.cross_entropy, X, y)
    recorded(model)
    torch.manual_seed(1)
    with backpack(extensions.DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    compare(model, {"diag_ggn_exact": expected})

    model.middle = lambda net, h: torch._standard_gamma(h.exp())
    with (
        pytest.raises(NotImplementedError, match=r"standard_gamma .* when it is evaluated again"),
        backpack(extensions.DiagGGNExact()),
    ):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()


def changing(module: nn.Module, args: Any, output: Any = None) -> Any:
    """Change what a module returns, or what it is called with."""
    return (args[0].sin() * 2,) if output is None else output.sin() + output


@pytest.mark.parametrize("prepend", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("part", ["0", "1", "2", "2.1"])
def test_hooks_that_compute(part: str, when: str, prepend: bool) -> None:
    if when == "after" and prepend:
        part = "2"  # a leaf's own output has to be seen first, and is: see test_surroundings
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), inner, nn.Linear(WIDTH, 3)).double()
    plain = copy.deepcopy(model)
    plain.get_submodule(part).register_forward_hook(changing)
    if when == "after":
        extend(model, use_converter="record")
    model.get_submodule(part).register_forward_hook(changing, prepend=prepend)
    if when == "before":
        plain[1].register_forward_pre_hook(changing)
        model[1].register_forward_pre_hook(changing, prepend=prepend)
    fields = ["grad_batch", "diag_ggn_exact", "hmp"]
    check(model, *data(), plain, fields=fields, use_converter="record")


class DropPath(nn.Module):
    """Drops samples, as timm's."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty((len(x), *[1] * (x.dim() - 1))).bernoulli_(0.6)
        return x * kept.div_(0.6)


class Noise(nn.Module):
    """Adds noise that it scales, as much in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + torch.randn_like(x) * self.scale


class Sampled(nn.Module):
    """Draws from a Gaussian with the parameters that it reads."""

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = x.chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return torch.cat([drawn, log_variance], 1)


class Masked(nn.Module):
    """Draws with the generators of Python and of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1) < 0.5 + 0.2 * random.random())


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "gumbel": lambda h: F.gumbel_softmax(h, 0.7),
    "gumbel, hard": lambda h: F.gumbel_softmax(h, tau=2.0, hard=True, dim=1),
    "slopes": lambda h: F.rrelu(h, 0.1, 0.9, training=True),
    "slopes of torch": lambda h: torch.rrelu(h, 0.1, 0.9, True),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()),
    "bernoulli, straight through": lambda h: h.sigmoid().bernoulli() + h.sigmoid() - 0.5,
    "poisson": lambda h: h * torch.poisson(h.exp()),
    "poisson of data": lambda h: h + torch.poisson(h.detach().exp()),
    "gamma of data": lambda h: h * torch._standard_gamma(h.detach().exp()),
    "normal": lambda h: torch.distributions.Normal(h, h.exp()).rsample(),
    "concrete": lambda h: torch.distributions.RelaxedBernoulli(
        h.new_tensor(0.5), None, h
    ).rsample(),
}


@pytest.mark.parametrize("name", DRAWING)
def test_functions_that_draw(name: str) -> None:
    torch.manual_seed(0)
    model = oracle.Seeded(Net(lambda net, h: DRAWING[name](h), {}).double())
    plain, (X, y) = copy.deepcopy(model), data()
    fields = ["diag_ggn_exact", "diag_h", "hmp"]
    check(model, X, y, plain, fields, use_converter="record")
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    truth = oracle.batch_grad_of_one_pass(plain, F.cross_entropy, X, y)
    compare(model, {"grad_batch": truth})


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("leaf", [DropPath, Noise, Sampled, Masked])
def test_leaves_that_draw(leaf: Callable[[], nn.Module], train: bool) -> None:
    """They are found when they draw, and run once more with the same numbers."""
    torch.manual_seed(0)
    between = leaf()
    model = oracle.Seeded(Net(lambda net, h: net.between(h).tanh() + h, {}))
    model.model.between = between
    model.double().train(not train)
    check(model, *data(), fields=["diag_ggn_exact", "hmp"], use_converter="record")
    model.train(train)
    plain = copy.deepcopy(model)
    CTX.remove_hooks()
    check(model, *data(), plain, fields=["diag_ggn_exact", "hmp"], use_converter="record")


# ------------------------------------------------------------------ random forwards


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    torch.tanh,
    F.gelu,
    F.silu,
    lambda x: x.sigmoid() * 2,
    lambda x: x**2 - 1,
    lambda x: (x * x + 1).log(),
    lambda x: x.clone().mul_(0.5).add_(1),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x / (1 + x.abs().sum(-1, keepdim=True)),
    lambda x: x.softmax(-1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x.masked_fill(x.detach() > 1, 0.3),
    lambda x: x.flip(-1).cumsum(-1),
    lambda x: 1 - x,
    lambda x: torch.cat([x[..., 1:].cos(), x[..., :1]], -1),
    lambda x: torch.stack(x.unbind(-1)[::-1], -1),
    lambda x: x.clamp(-1, 1.5),
    lambda x: F.leaky_relu(x, 0.2, inplace=False),
    lambda x: x.max(-1, keepdim=True).values * x,
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    operator.add,
    operator.mul,
    lambda x, y: x - 2 * y,
    lambda x, y: x.clone().sub_(y),
    lambda x, y: torch.maximum(x, y),
    lambda x, y: torch.where(x.detach() > 0, x, y.sin()),
    lambda x, y: x * y.sum(-1, keepdim=True),
    lambda x, y: torch.lerp(x, y, 0.3),
    lambda x, y: torch.addcmul(x, x, y, value=0.5),
    lambda x, y: torch.atan2(x, y * y + 1),
]
RESHAPES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.view(-1, 2, 3).transpose(1, 2).reshape(-1, WIDTH),
    lambda x: x.unflatten(1, (3, 2)).permute(0, 2, 1).flatten(1),
    lambda x: (
        torch.einsum("nij,njk->nik", x.view(-1, 2, 3), x.view(-1, 3, 2).sin())
        .flatten(1)
        .repeat(1, 2)[:, :WIDTH]
    ),
    lambda x: (x.view(-1, 3, 2) @ x.view(-1, 3, 2).mT).sum(1).repeat(1, 2),
    lambda x: torch.cat(x.split([2, 4], 1)[::-1], 1),
]


class Random(nn.Module):
    """Linear layers, and random functions between them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = random.Random(seed)
        self.layers = nn.ModuleList([nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        choices = [(UNARY, False), (UNARY, False), (BINARY, True), (RESHAPES, False)]
        self.plan = [
            [
                (generator.choice(functions), of_two)  # type: ignore[arg-type]
                for functions, of_two in generator.choices(choices, k=count)
            ]
            for count in (3, generator.randint(2, 5))
        ]

    def forward(self, x: Tensor) -> Tensor:
        before = x[:, :1] * self.scale
        for layer, plan in zip(self.layers, self.plan, strict=True):
            x = layer(x)
            for function, of_two in plan:
                x, before = function(*((x, before) if of_two else (x,))), x
        return self.head(x * self.scale)


SEEDS = range(12)


@pytest.mark.parametrize("route", ["record", "trace"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_forward(seed: int, route: Any) -> None:
    torch.manual_seed(seed)
    model, (X, y) = Random(seed).double(), data()
    fields = ["grad_batch", "diag_ggn_exact", *(["diag_h"] if seed % 3 else ["hmp"])]
    check(model, X, y, fields=fields, use_converter=route)


def test_a_part_of_a_recorded_model_alone() -> None:
    """Nothing records its functions, so its own parameters are reported as without a rule."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    model = extend(nn.Sequential(Part()), use_converter="record")
    X, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(extensions.BatchGrad()):
        lossfunc(model(X), y).backward()
    assert model[0].scale.grad_batch.shape == (4, 3)
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match="scale"):
        lossfunc(model[0](X), y).backward()


class Shifted(nn.Module):
    """Adds a parameter to ``[N, T, H]``, which the sum expands."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 2)
        self.shift = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.shift + self.first(x))).flatten(1)


@pytest.mark.parametrize("rows", [None, [2, 0]], ids=["all", "some"])
@pytest.mark.parametrize(
    "shape", [(), (5,), (1,), (3, 5), (3, 1), (1, 3, 5), (1, 1, 1), (4, 3, 5), (4, 1, 5), (4, 1, 1)]
)
def test_sums_that_expand(
    shape: tuple[int, ...], rows: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In closed form: autograd would evaluate the sum again, in every step."""
    model, lossfunc = Shifted(shape).double(), nn.MSELoss()
    X, y = torch.randn(4, 3, 5).double(), torch.randn(4, 6).double()
    expected = oracle.batch_grad(copy.deepcopy(model), lossfunc, X, y)
    blocks = oracle.ggn_blocks(copy.deepcopy(model), lossfunc, X, y)
    monkeypatch.setattr(AutomaticDerivatives, "vjp", None)
    recorded(model)
    exts = extensions.BatchGrad(subsampling=rows), extensions.SqrtGGNExact(subsampling=rows)
    with backpack(*exts):
        extend(lossfunc)(model(X), y).backward()
    for p, gradients, block in zip(model.parameters(), expected, blocks, strict=True):
        kept = gradients if rows is None else gradients[rows]
        torch.testing.assert_close(p.grad_batch, kept, **TOLERANCE)
        if rows is None:
            S = p.sqrt_ggn_exact.reshape(-1, p.numel())
            torch.testing.assert_close(S.T @ S, block, **TOLERANCE)


class Modes(nn.Module):
    """Enters a mode of its own in the middle."""

    def __init__(self, mode: torch.overrides.TorchFunctionMode) -> None:
        super().__init__()
        self.first, self.last, self.mode = nn.Linear(5, 4), nn.Linear(4, 3), mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode:
            x = self.first(x) * 2
        return torch.sin(self.last(x.cos()))


def test_modes_of_users_see_what_leaves_call() -> None:
    seen = []

    class Log(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f)
            return f(*args, **(kwargs or {}))

    X, y = torch.randn(6, 5).double(), torch.randint(3, (6,))
    model = Modes(Log()).double()
    expected = oracle.batch_grad(copy.deepcopy(model), F.cross_entropy, X, y)
    recorded(model)
    seen.clear()
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    compare(model, {"grad_batch": expected})
    assert F.linear in seen and Tensor.mul in seen
    seen.clear()
    with Log():
        model(X)
    assert seen.count(F.linear) == 3 and torch.sin in seen


def test_functions_are_those_of_the_user() -> None:
    """Bit by bit: one that a module stands for is not computed by another function."""

    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) / 3

    model, X = Divided(), torch.randn(64, 5)
    expected = model(X)
    assert not torch.equal(expected, model.layer(X) * (1 / 3))
    assert torch.equal(recorded(model)(X), expected)


def test_generators_of_users_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.manual_seed`` is one of devices that have not been used yet, too."""
    model, X, y = net("products")
    recorded(model)
    monkeypatch.delattr(torch, "manual_seed")
    before = torch.get_rng_state()
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_properties_without_a_name() -> None:
    """Some attributes of tensors are properties in Python: they are read as without recording."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            with pytest.raises(AttributeError, match="non-CUDA tensor"):
                _ = y.__cuda_array_interface__
            return y * 2

    model, X, y = Asks().double(), torch.randn(6, 5).double(), torch.randint(3, (6,))
    expected = oracle.batch_grad(copy.deepcopy(model), F.cross_entropy, X, y)
    recorded(model)
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    compare(model, {"grad_batch": expected})


class BesideTable(nn.Module):
    """A layer, and a row of a table that all samples have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.table.expand(len(x), -1, -1)[:, -1]


def test_samples_counted_from_the_end() -> None:
    model, loss = extend(BesideTable(), use_converter="record"), extend(nn.MSELoss())
    X, y = torch.rand(4, 4), torch.rand(4, 4)
    found = []
    for rows in ([-1, 0], [3, 0]):
        exts = extensions.BatchGrad(rows), extensions.BatchDiagGGNExact(rows)
        with backpack(*exts):
            loss(model(X), y).backward()
        found.append([(p.grad_batch, p.diag_ggn_exact_batch) for p in model.parameters()])
    torch.testing.assert_close(*found)


class Hidden(nn.Module):
    """A function that is not recorded reads a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = (
            nn.Linear(3, 4),
            nn.Parameter(torch.rand(4)),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * torch.func.vmap(torch.sin)(self.scale))


@pytest.mark.parametrize("route", [True, "record"])
@pytest.mark.parametrize(
    ("ext", "told"),
    [(extensions.BatchGrad, "That use is"), (extensions.DiagGGNExact, "has no result")],
)
def test_parameters_of_the_model_that_hidden_functions_read_are_told(
    ext: Any, told: str, route: Any
) -> None:
    model, lossfunc = extend(Hidden(), use_converter=route), extend(nn.CrossEntropyLoss())
    match = rf"a parameter of shape \[4\].* {told}"
    with pytest.warns(UserWarning, match=match), backpack(ext()):
        lossfunc(model(torch.rand(5, 3)), torch.randint(2, (5,))).backward()
    assert not hasattr(model.scale, ext().savefield)


class Lists(nn.Module):
    """Has layers and parameters in Python lists, where torch does not find them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.hidden = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
        self.scales = [nn.Parameter(torch.rand(4, dtype=torch.float64))]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for layer in self.hidden:
            x = layer(x).tanh()
        return self.last(x * self.scales[0])


@pytest.mark.parametrize("route", [True, "record"])
def test_parameters_in_python_lists(route: Any) -> None:
    torch.manual_seed(0)
    model, loss = Lists().double(), nn.CrossEntropyLoss()
    X, y = torch.rand(5, 3, dtype=torch.float64), torch.randint(2, (5,))
    params = [*model.hidden[0].parameters(), *model.hidden[1].parameters(), *model.scales]
    output = model(X)
    J = [torch.autograd.grad(e, params, retain_graph=True) for e in output.flatten()]
    H = torch.func.hessian(lambda f: loss(f, y))(output.detach()).reshape(10, 10)
    gradients = [
        torch.autograd.grad(loss(model(X[n:][:1]), y[n:][:1]) / 5, params) for n in range(5)
    ]
    extended = extend(model, use_converter=route)
    for _ in range(2):
        with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            extend(loss)(extended(X), y).backward()
    for i, p in enumerate(params):
        rows = torch.stack([row[i] for row in J]).flatten(1)
        torch.testing.assert_close(p.diag_ggn_exact.flatten(), (rows * (H @ rows)).sum(0))
        torch.testing.assert_close(p.grad_batch, torch.stack([each[i] for each in gradients]))


class TwoArguments(nn.Module):
    """Adds its arguments, one of which may be a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, d: Tensor) -> Tensor:
        return self.layer((x + d).tanh())


@pytest.mark.parametrize("shape", [(5, 3), (3,), (1, 3)], ids=str)
def test_parameters_as_arguments(shape: tuple[int, ...]) -> None:
    """With one row for each sample it is data, else a parameter."""
    torch.manual_seed(0)
    model, lossfunc = TwoArguments().double(), nn.CrossEntropyLoss()
    X, y = torch.rand(5, 3, dtype=torch.float64), torch.randint(2, (5,))
    d = nn.Parameter(torch.rand(shape, dtype=torch.float64))
    params, rows = [*model.parameters(), d], d if len(shape) > 1 else d.unsqueeze(0)
    each = [
        torch.autograd.grad(lossfunc(model(X[[n]], rows[n % len(rows)][None]), y[[n]]) / 5, params)
        for n in range(5)
    ]
    with backpack(extensions.BatchGrad()):
        extend(lossfunc)(extend(model, use_converter="record")(X, d), y).backward()
    for i, p in enumerate(model.parameters()):
        torch.testing.assert_close(p.grad_batch, torch.stack([grads[i] for grads in each]))
    assert hasattr(d, "grad_batch") == (shape != (5, 3))
    if shape != (5, 3):
        torch.testing.assert_close(d.grad_batch, torch.stack([grads[-1] for grads in each]))


@pytest.mark.parametrize("ext", [extensions.BatchGrad, extensions.DiagGGNExact])
def test_data_that_are_a_parameter(ext: Any) -> None:
    """What the error advises works."""
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), use_converter=True)
    lossfunc = extend(nn.CrossEntropyLoss())
    x, y = nn.Parameter(torch.rand(5, 3)), torch.randint(2, (5,))
    match = r"parameter as its input.*If it is data, give x.detach\(\).requires_grad_\(\)"
    with pytest.raises(ValueError, match=match), backpack(ext()):
        lossfunc(model(x), y).backward()
    with backpack(ext()):
        lossfunc(model(x.detach().requires_grad_()), y).backward()
    assert getattr(model.get_parameter("1.weight"), ext().savefield).shape[-2:] == (2, 4)


class Checkpointed(nn.Module):
    """A layer is computed again in the backward pass."""

    def __init__(self, use_reentrant: bool, is_function: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.use_reentrant = use_reentrant
        self.function: Any = torch.sin if is_function else self.middle

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(checkpoint(self.function, x, use_reentrant=self.use_reentrant))


def test_checkpoints_that_are_reentrant() -> None:
    """What the errors advise works."""
    lossfunc, y = extend(nn.CrossEntropyLoss()), torch.randint(2, (5,))
    options = {"lr": 0.1, "max_grad_norm": 1.0, "noise_multiplier": 0.0, "expected_batch_size": 5}
    for use_reentrant in (True, False):
        told = partial(pytest.raises, ValueError, match="use_reentrant=False")
        expected: Any = told if use_reentrant else nullcontext
        for is_function in (True, False):
            model = extend(Checkpointed(use_reentrant, is_function), use_converter="record")
            with expected(), backpack(extensions.DiagGGNExact()):
                lossfunc(model(torch.rand(5, 3)), y).backward()
        optimizer = DPSGD([*model.first.parameters(), *model.last.parameters()], **options)
        with expected(), backpack(*optimizer.extensions):
            lossfunc(model(torch.rand(5, 3)), y).backward()
        if not use_reentrant:
            optimizer.step()


class WithWeight(Checkpointed):
    """A function with a parameter is computed again, in the place of a layer."""

    def __init__(self, of_layer: bool) -> None:
        super().__init__(use_reentrant=True, is_function=True)
        self.weight = self.middle.weight if of_layer else nn.Parameter(torch.rand(4, 4))
        self.function = self.product

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@pytest.mark.parametrize("of_layer", [False, True])
@pytest.mark.parametrize("route", [False, "record"])
def test_parameters_of_functions_in_reentrant_checkpoints(route: Any, of_layer: bool) -> None:
    """They have no individual gradients, which is told in each step."""
    model, lossfunc = extend(WithWeight(of_layer), use_converter=route), nn.CrossEntropyLoss()
    for _ in range(2):
        told = pytest.warns(UserWarning, match=r"\[4, 4\] have no result.*use_reentrant=False")
        with told, backpack(extensions.BatchGrad()):
            lossfunc(model(torch.rand(5, 3)), torch.randint(2, (5,))).backward()
    assert not hasattr(model.weight, "grad_batch")


class WithWeightOfLayer(WithWeight):
    """The layer whose weight the function reads is called, too: before, behind, or not at all."""

    def __init__(self, places: str) -> None:
        super().__init__(of_layer=True)
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        called = {
            "first": self.first,
            "layer": self.middle,
            "last": self.last,
            "function": partial(checkpoint, self.function, use_reentrant=True),
        }
        for place in self.places.split():
            x = called[place](x)
        return x


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("route", [False, "record"])
@pytest.mark.parametrize(
    "places",
    [
        "first layer function last",
        "first function layer last",
        "first layer function",
        "first function",
        "function layer last",
        "function last",
    ],
)
def test_uses_inside_of_reentrant_checkpoints_are_missed(
    places: str, route: Any, extended: bool
) -> None:
    """What a module computes of the same parameter elsewhere is a part of it, which is told."""
    model, lossfunc = extend(WithWeightOfLayer(places), use_converter=route), nn.CrossEntropyLoss()
    lossfunc = extend(lossfunc) if extended else lossfunc
    x = torch.rand(5, 4 if places.startswith("function") else 3, requires_grad=True)
    told = pytest.warns(UserWarning, match=r"\[4, 4\] have no result, or that of a part of")
    with told, backpack(extensions.BatchGrad()):
        lossfunc(model(x), torch.randint(2, (5,))).backward()


@pytest.mark.parametrize("is_part", [False, True])
def test_exported_models_are_recorded(is_part: bool) -> None:
    """Traced ones lost what a hook needs that checks their inputs: an AttributeError."""
    layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)
    plain, (X, y) = nn.Sequential(*layers).double(), data()
    exported = torch.export.export(plain, (X,)).module()
    if is_part:
        exported, plain = nn.Sequential(exported, nn.Tanh()), nn.Sequential(plain, nn.Tanh())
    with pytest.raises(ConversionError, match=r"torch\.export.*use_converter='record'"):
        extend(exported, use_converter="trace")
    fields = ["grad_batch", "diag_ggn_exact", "diag_h", "kflr"]
    check(exported, X, y, plain, fields, use_converter=True)

"""Attention: formulas against automatic derivatives, networks of it against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
from seen import seen
from test_quantities import TOLERANCE, products
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack import backpack, extend, extensions
from backpack.core.derivatives import MultiheadAttentionDerivatives, derivatives_of, reductions
from backpack.core.derivatives import ScaledDotProductAttentionDerivatives as FunctionRule
from backpack.core.record.context import Context
from backpack.core.record.origins import flatten_outputs
from backpack.custom_module.attention import ScaledDotProductAttention
from backpack.utils.subsampling import subsample

N, H, L, S, E, V = 3, 2, 2, 3, 4, 2
ROWS: list[Any] = [None, slice(1, None)]
OPTIONS = {"dtype": torch.float64, "requires_grad": True}


class AutomaticLayer(MultiheadAttentionDerivatives):
    """The rule without its formulas."""

    def has_formula(self, c: Context) -> bool:
        """Return False."""
        return False


class AutomaticFunction(FunctionRule):
    """The rule without its formulas."""

    def has_formula(self, c: Context) -> bool:
        """Return False."""
        return False


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, **TOLERANCE)


def columns(*tensors: Tensor, axes: Sequence[int | None], rows: Any) -> list[Tensor]:
    """Draw ``[V, *]`` for the selected samples."""
    drawn = [torch.randn(V, *t.shape, dtype=t.dtype) for t in tensors]
    return [
        t if axis is None else subsample(t, axis + 1, rows)
        for t, axis in zip(drawn, axes, strict=True)
    ]


# --------------------------------------------------------------------------------------
# The layer
# --------------------------------------------------------------------------------------

CAUSAL = torch.ones(L, S).triu(1).bool()
PADDING = torch.tensor([[False] * 3, [False, False, True], [False, True, False]])
NUMBERS = torch.tensor([[0.5, -1.0, 0.0], [2.0, 0.0, 1.0]], dtype=torch.float64)
EACH = torch.arange(N * H * L * S).reshape(N * H, L, S).remainder(5) == 1
NO = {"need_weights": False}
# options of the layer, and of the call
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, NO),
    "weights": ({}, {}),
    "weights of heads": ({}, {"average_attn_weights": False}),
    "time first": ({"batch_first": False}, {}),
    "without bias": ({"bias": False}, NO),
    "sizes": ({"kdim": 5, "vdim": 3}, {}),
    "sizes, without bias": ({"kdim": 5, "bias": False}, NO),
    "bias of keys": ({"add_bias_kv": True}, {}),
    "zero": ({"add_zero_attn": True, "batch_first": False}, NO),
    "both": ({"add_bias_kv": True, "add_zero_attn": True, "kdim": 2}, {"attn_mask": NUMBERS}),
    "mask": ({}, {"attn_mask": CAUSAL}),
    "mask of numbers": ({}, {"attn_mask": NUMBERS, **NO}),
    "mask for each": ({"add_zero_attn": True}, {"attn_mask": EACH, **NO}),
    "padding": ({"batch_first": False}, {"key_padding_mask": PADDING, **NO}),
    "masks": ({"add_bias_kv": True}, {"key_padding_mask": PADDING, "attn_mask": EACH}),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, **NO}),
    "causal, bias": ({"add_bias_kv": True}, {"attn_mask": CAUSAL, "is_causal": True, **NO}),
}


def attend(options: dict[str, Any], call: dict[str, Any]) -> tuple[Any, tuple[Tensor, ...]]:
    """Return an extended layer after a call, and what it returned."""
    torch.manual_seed(0)
    layer: Any = nn.MultiheadAttention(E, H, **{"batch_first": True, **options}).double()
    layer.requires_grad_()
    for p in layer.parameters():
        p.data = torch.randn_like(p)
    shapes = (N, L, E), (N, S, layer.kdim), (N, S, layer.vdim)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    inputs = [x if layer.batch_first else x.transpose(0, 1) for x in inputs]
    extend(layer)
    outputs = flatten_outputs(layer(*(x.requires_grad_() for x in inputs), **call))
    return layer, outputs


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, [2, 0]) for name in LAYERS), *(("plain", rows) for rows in ROWS)]
)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_layer(name: str, rows: Any) -> None:
    """Every product is the automatic one, also of several inputs and parameters at once."""
    layer, outputs = attend(*LAYERS[name])
    rule: Any = derivatives_of(layer)
    automatic: Any = AutomaticLayer()
    c = seen(layer)
    assert rule.has_formula(c)
    inputs, others = c.inputs[:3], len(c.inputs) - 3
    axes_in = [rule.batch_axis_in(layer, i) for i in range(3)]
    axes_out = [rule.batch_axis_out(layer, i) for i in range(len(outputs))]
    at_inputs = [*columns(*inputs, axes=axes_in, rows=rows), *[None] * others]
    at_outputs = columns(*outputs, axes=axes_out, rows=rows)
    g_out = [torch.randn_like(y) for y in outputs]
    params = {n: torch.randn(V, *p.shape).double() for n, p in layer.named_parameters()}
    some = [None, *at_inputs[1:]]

    def same(method: str, *args: Any, **keywords: Any) -> None:
        mine, other = (
            getattr(r, method)(*args, **keywords, subsampling=rows) for r in (rule, automatic)
        )
        close(mine, other)

    def same_mixed(*args: Any) -> None:
        mine, other = (r.mixed_hvp(seen(layer, rows, g_out), *args) for r in (rule, automatic))
        close(mine, other)

    same("jac_t_mat_prod", layer, None, None, at_outputs)
    same("jac_mat_prod", layer, None, None, at_inputs)
    same("jac_mat_prod", layer, None, None, some)
    same("residual_mat_prod", layer, None, g_out, at_inputs)
    same_mixed(at_inputs, params)
    same_mixed([None] * len(at_inputs), params)
    count = at_outputs[0].shape[1 + axes_out[0]]
    signs = torch.randn(V, count, dtype=torch.float64)
    for p, mat in params.items():
        for sum_batch in (True, False):
            same_mixed(some, {p: mat}, sum_batch)
        same("param_jac_mat_prod", p, layer, None, None, mat)
        for sum_batch in (True, False):
            same("param_mjp", p, layer, None, None, at_outputs, sum_batch=sum_batch)
        for wanted in (reductions.NAMES, {"square_norm"}):
            arguments = (p, layer, None, None, at_outputs, wanted)
            same("param_mjp_reduced", *arguments, weights=signs)
        if len(outputs) > 1:  # what the output is used for does not matter
            same("param_mjp", p, layer, None, None, [None, at_outputs[1]])
            same("param_mjp", p, layer, None, None, [at_outputs[0], None])


# --------------------------------------------------------------------------------------
# The function
# --------------------------------------------------------------------------------------

OF_KEYS = torch.tensor([[True, True, False], [True, False, True], [True] * 3])
NOTHING = torch.tensor([[True, False, True], [False] * 3])
# options, leading axes of queries and of keys (and the axis of the samples), the mask
FUNCTIONS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...], int, Any]] = {
    "plain": ({}, (N, H), (N, H), 0, None),
    "one head": ({"scale": 0.3}, (N,), (N,), 0, None),
    "samples second": ({}, (H, N), (H, N), 1, None),
    "causal": ({"is_causal": True}, (N, H), (N, H), 0, None),
    "mask": ({}, (N, H), (N, H), 0, NUMBERS),
    "mask of bool": ({"scale": 2.0}, (N, H), (N, H), 0, ~CAUSAL),
    "mask of samples": ({}, (N, H), (N, H), 0, OF_KEYS[:, None, None]),
    "mask of samples, second": ({}, (H, N), (H, N), 1, OF_KEYS[:, None]),
    "mask of everything": ({}, (N, H), (N, H), 0, ~EACH.reshape(N, H, L, S)),
    "nothing": ({}, (N, H), (N, H), 0, NOTHING),
    "groups": ({"enable_gqa": True}, (N, 4), (N, 2), 0, NUMBERS),
    "groups of one": ({"enable_gqa": True}, (N, 2), (N, 2), 0, None),
}


class Called(nn.Module):
    """Attention between a layer and its flattened output: ``[N, I] -> [N, O]``."""

    def __init__(self, function: Callable[..., Tensor], q: Any, k: Any, axis: int) -> None:
        super().__init__()
        q, k = list(q), list(k)
        self.function, self.axis = function, axis
        self.shapes = [*q, L, E], [*k, S, E], [*k, S, 2]
        for shape in self.shapes:
            shape.insert(0, shape.pop(axis))
        self.sizes = [torch.Size(shape[1:]).numel() for shape in self.shapes]
        self.layers = nn.ModuleList([nn.Linear(2, size) for size in self.sizes])
        self.head = nn.Linear(torch.Size(q).numel() // N * L * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 2] -> [N, 3]."""
        parts = [
            layer(x).reshape(shape).movedim(0, self.axis)
            for layer, shape in zip(self.layers, self.shapes, strict=True)
        ]
        return self.head(self.function(*parts).movedim(self.axis, 0).flatten(1))


def called(name: str, dropout: float = 0.0) -> nn.Module:
    options, q, k, axis, mask = FUNCTIONS[name]

    def function(*parts: Tensor) -> Tensor:
        given = mask.to(parts[0]) if mask is NUMBERS else mask
        return F.scaled_dot_product_attention(*parts, given, dropout, **options)

    return Called(function, q, k, axis)


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, [2, 0]) for name in FUNCTIONS), *(("plain", r) for r in ROWS)]
)
def test_function(name: str, rows: Any) -> None:
    """Every product is the automatic one, also of several inputs at once."""
    torch.manual_seed(0)
    model = extend(called(name).double(), use_converter=True)
    loss = model(torch.randn(N, 2, dtype=torch.float64)).sum()
    module: Any = next(m for m in model.modules() if isinstance(m, ScaledDotProductAttention))
    rule: Any = derivatives_of(module)
    automatic: Any = AutomaticFunction()
    c = seen(module)
    assert rule.has_formula(c)
    (axis,) = rule.axes_out(c)
    inputs, others, output = c.inputs[:3], [None] * (len(c.inputs) > 3), c.output
    assert axis == FUNCTIONS[name][3]
    assert module not in FunctionRule._known  # found without trying
    axes = [axis] * 3
    at_inputs = [*columns(*inputs, axes=axes, rows=rows), *others]
    (at_output,) = columns(output, axes=[axis], rows=rows)

    def same(method: str, *args: Any) -> None:
        mine, other = (getattr(r, method)(*args, subsampling=rows) for r in (rule, automatic))
        close(mine, other)

    g_out = [torch.randn_like(output)]
    same("jac_t_mat_prod", module, None, None, at_output)
    for given in (at_inputs, [None, *at_inputs[1:]], [*at_inputs[:2], None, *others]):
        same("jac_mat_prod", module, None, None, given)
        same("residual_mat_prod", module, None, g_out, given)
    del loss


# --------------------------------------------------------------------------------------
# Networks, against the oracle
# --------------------------------------------------------------------------------------


class Network(nn.Module):
    """A layer whose query, key and value come from one, two or three layers: ``[N, S, 3]``."""

    def __init__(
        self, kind: str, options: dict[str, Any], call: dict[str, Any], mean: bool = True
    ) -> None:
        super().__init__()
        self.kind, self.call, self.mean = kind, call, mean
        self.attention = nn.MultiheadAttention(E, H, **{"batch_first": True, **options})
        sizes = [E, self.attention.kdim, self.attention.vdim]
        count = {"self": 1, "memory": 2, "cross": 3}[kind]
        self.stems = nn.ModuleList([nn.Linear(3, size) for size in sizes[:count]])
        self.head, self.of_weights = nn.Linear(E, 3), nn.Linear(E, 3)
        self.of_weights.requires_grad_(call.get("need_weights", True))

    def forward(self, x: Tensor) -> Tensor:
        """[N, S, 3] -> [N, 3]."""
        first = self.attention.batch_first
        parts = [stem(x) for stem in self.stems]
        parts[0] = parts[0] if self.kind == "self" else parts[0][:, :L]
        query, key, value = [*parts, parts[-1], parts[-1]][:3]
        if not first:
            query = query.transpose(0, 1)
            key = query if self.kind == "self" else key.transpose(0, 1)
            shared = {"self": query, "memory": key}
            value = shared[self.kind] if self.kind in shared else value.transpose(0, 1)
        attended, weights = self.attention(query, key, value, **self.call)
        scores = self.head(attended if first else attended.transpose(0, 1)).mean(1)
        if not self.call.get("need_weights", True):
            return scores
        return scores + self.of_weights(weights.square().mean(1)[:, :1].expand(-1, E))


SQUARE = torch.ones(S, S).triu(1).bool()
NETWORKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "self": ("self", {}, NO),
    "self, weights": ("self", {}, {}),
    "self, time first": ("self", {"batch_first": False}, NO),
    "self, causal": ("self", {}, {"attn_mask": SQUARE, "is_causal": True, **NO}),
    "self, padding": ("self", {"add_zero_attn": True}, {"key_padding_mask": PADDING, **NO}),
    "self, sizes": ("self", {"vdim": E, "add_bias_kv": True}, NO),
    "memory": ("memory", {"add_bias_kv": True}, NO),
    "cross": ("cross", {}, {"attn_mask": CAUSAL}),
    "cross, time first": ("cross", {"batch_first": False, "bias": False}, {}),
    "cross, sizes": ("cross", {"kdim": 5, "vdim": 2}, {"attn_mask": EACH, **NO}),
}


def problem(
    model: Callable[[], nn.Module], *shape: int
) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = model().double()
    for p in net.parameters():
        p.data = torch.randn_like(p) * 0.7
    return net, nn.CrossEntropyLoss(), torch.randn(N, *shape).double(), torch.tensor([0, 2, 1])


def saved(parts: Any, *exts: Any, **options: Any) -> list[Any]:
    """Run a backward pass; return the parameters of the model."""
    model, lossfunc, X, y = parts
    net, lossfunc = extend(model, use_converter=True), extend(lossfunc)
    torch.manual_seed(1)
    loss = lossfunc(net(X), y)
    with backpack(*exts):
        loss.backward(**options)
    return oracle.trainable(net)


def reference(parts: Any) -> Any:
    model, *others = parts
    return oracle.twin(model), *others


def agrees(
    build: Callable[[], Any], batch_grad: Callable[..., list[Tensor]] = oracle.batch_grad
) -> None:
    """Compare with the oracle what uses each of the products."""
    functions = (batch_grad, oracle.ggn_blocks, oracle.hessian_blocks)
    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels cannot be differentiated twice
        grads, ggns, hessians = (function(*reference(build())) for function in functions)
    fields = [extensions.BatchGrad(), extensions.DiagHessian(), extensions.HMP()]
    params = saved(build(), *fields, extensions.GGNMP())
    assert len(params) == len(grads)
    for p, grad, hessian in zip(params, grads, hessians, strict=True):
        close(p.grad_batch, grad)
        close(p.diag_h, hessian.diagonal().reshape(p.shape))
    close(products(params, "hmp"), hessians)
    close(products(params, "ggnmp"), ggns)
    # without individual gradients: reductions of the rule
    params = saved(
        build(), extensions.BatchL2Grad(), extensions.Variance(), extensions.DiagGGNExact()
    )
    for p, grad, ggn in zip(params, grads, ggns, strict=True):
        close(p.batch_l2, grad.square().flatten(1).sum(1))
        close(p.variance, grad.square().mean(0) - grad.mean(0).square())
        close(p.diag_ggn_exact, ggn.diagonal().reshape(p.shape))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_network(name: str) -> None:
    agrees(lambda: problem(lambda: Network(*NETWORKS[name]), S, 3))


@pytest.mark.parametrize("name", ["samples second", "causal", "mask of samples", "groups"])
def test_network_of_functions(name: str) -> None:
    agrees(lambda: problem(lambda: called(name), 2))


class Linears(nn.Module):
    """The layer without masks, with a Linear for each weight that has one input."""

    def __init__(self, layer: nn.MultiheadAttention, kind: str) -> None:
        super().__init__()
        self.batch_first, self.heads = True, layer.num_heads
        self.originals = nn.ParameterList(layer.parameters())  # in their order
        self.bias = nn.ParameterList([layer.in_proj_bias])
        weights = [] if kind == "memory" or kind == "cross" else [layer.in_proj_weight]
        if layer.in_proj_weight is None:
            weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
        self.maps, self.last = nn.ModuleList(map(linear, weights)), linear(layer.out_proj.weight)
        self.last.bias = layer.out_proj.bias

    def forward(self, *inputs: Tensor, **call: Any) -> tuple[Tensor, None]:
        """As torch's."""
        if len(self.maps) == 1:
            parts = self.maps[0](inputs[0]).chunk(3, -1)
        elif len(self.maps) == 3:
            parts = [linear(x) for linear, x in zip(self.maps, inputs, strict=True)]
        else:
            weights = self.originals[0].chunk(3)
            parts = [x @ weight.T for x, weight in zip(inputs, weights, strict=True)]
        q, k, v = (
            (x + b).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x, b in zip(parts, self.bias[0].chunk(3), strict=True)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.last((weights @ v).transpose(1, 2).flatten(2)), None


def linear(weight: Any) -> nn.Linear:
    """Return a Linear with this weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = weight
    return layer


@pytest.mark.parametrize(
    ("kind", "options"),
    [("self", {}), ("memory", {}), ("cross", {}), ("memory", {"kdim": 5}), ("cross", {"vdim": 2})],
)
def test_kronecker_factors(kind: str, options: dict[str, Any]) -> None:
    """A weight with one input has the factors of a Linear; everything else has its block."""
    if kind == "memory" and options:
        options = {"kdim": 5, "vdim": 5}

    def build() -> Any:
        return problem(lambda: Network(kind, options, NO), S, 3)

    model, *others = build()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    model.attention = Linears(model.attention, kind)
    expected = oracle.kflr(model, *others)
    mine = dict(zip(names, (p.kflr for p in saved(build(), extensions.KFLR())), strict=True))
    close(list(mine.values()), expected)
    assert len(mine["attention.out_proj.weight"]) == 2
    if options:
        assert len(mine["attention.k_proj_weight"]) == 2
    else:
        assert len(mine["attention.in_proj_weight"]) == (2 if kind == "self" else 1)


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_kronecker_approximations(approximation: str) -> None:
    """Of self-attention, as of the Linear layers that it consists of."""
    model, *others = problem(lambda: Network("self", {}, NO), S, 3)
    mine = saved((model, *others), extensions.KFLR(approximation=approximation))
    factors = [p.kflr for p in mine]
    model, *others = problem(lambda: Network("self", {}, NO), S, 3)
    model.attention = Linears(model.attention, "self")
    weights = [model.attention.maps[0].weight, model.attention.last.weight]
    parameters = oracle.trainable(model)
    saved((model, *others), extensions.KFLR(approximation=approximation))
    for weight in weights:
        i = next(i for i, p in enumerate(parameters) if p is weight)
        close(factors[i], weight.kflr)


class OnePosition(nn.Module):
    """What a network does with a single position: nothing else to attend to."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        (self.stem,), layer = network.stems, network.attention
        self.packed, self.last = linear(layer.in_proj_weight), layer.out_proj
        self.packed.bias, self.head = layer.in_proj_bias, network.head

    def forward(self, x: Tensor) -> Tensor:
        """[N, 1, 3] -> [N, 3]."""
        return self.head(self.last(self.packed(self.stem(x[:, 0]))[:, 2 * E :]))


def test_kronecker_factors_of_one_position() -> None:
    """They are those of Linear layers."""

    def build() -> Any:
        return problem(lambda: Network("self", {}, NO), 1, 3)

    model, *others = build()
    plain = extend(OnePosition(model), use_converter=True)
    saved((plain, *others), extensions.KFLR())
    names = dict(model.named_parameters())
    mine, *others = build()
    saved((mine, *others), extensions.KFLR())
    for name, p in mine.named_parameters():
        if p.requires_grad:
            close(p.kflr, names[name].kflr)


def test_monte_carlo() -> None:
    exts = [extensions.DiagGGNMC(3), extensions.SqrtGGNMC(3), extensions.KFAC(3)]
    params = saved(problem(lambda: Network("self", {}, NO), S, 3), *exts)
    for p in params:
        close(p.diag_ggn_mc, p.sqrt_ggn_mc.square().sum((0, 1)))
        sizes = [len(factor) for factor in p.kfac]
        assert sizes == (list(p.shape) if p.dim() == 2 else [p.numel()])


# --------------------------------------------------------------------------------------
# Other calls
# --------------------------------------------------------------------------------------


class LearnedMask(Called):
    """The mask is a parameter."""

    def __init__(self) -> None:
        super().__init__(F.scaled_dot_product_attention, (N, H), (N, H), 0)
        self.mask = nn.Parameter(torch.zeros(L, S))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 2] -> [N, 3]."""
        self.function = lambda *parts: F.scaled_dot_product_attention(*parts, self.mask)
        return super().forward(x)


class LearnedQuery(nn.Module):
    """The query is a parameter without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.stem = nn.Parameter(torch.zeros(L, E)), nn.Linear(3, E)
        self.head = nn.Linear(E, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, S, 3] -> [N, 3]."""
        h = self.stem(x)
        return self.head(F.scaled_dot_product_attention(self.query, h, h)).mean(1)


class Groups(Called):
    """Heads of values have other groups than those of keys."""

    def __init__(self) -> None:
        super().__init__(self.attend, (N, 4), (N, 2), 0)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v[:, :1], enable_gqa=True)


def test_groups_of_keys_and_of_values() -> None:
    agrees(lambda: problem(Groups, 2))


class Tied(Network):
    """Two weights of the layer are one."""

    def __init__(self) -> None:
        super().__init__("self", {}, NO)
        layer = self.attention
        layer._qkv_same_embed_dim = False
        layer.in_proj_weight = None
        layer.q_proj_weight = layer.k_proj_weight = nn.Parameter(torch.randn(E, E))
        layer.v_proj_weight = nn.Parameter(torch.randn(E, E))


@pytest.mark.parametrize(
    ("model", "shape"), [(LearnedMask, (2,)), (LearnedQuery, (S, 3)), (Tied, (S, 3))]
)
def test_without_formula(model: Any, shape: tuple[int, ...]) -> None:
    agrees(lambda: problem(model, *shape))


class Windows(nn.Module):
    """Windows (or heads) of a sample are next to each other along the batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 3 * H * L * 2), nn.Linear(H * L * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        q, k, v = self.stem(x).reshape(N * H, L, 6).chunk(3, -1)
        mask = torch.arange(N * H * L * L).reshape(N * H, L, L) % 3 != 1
        return self.head(F.scaled_dot_product_attention(q, k, v, mask).reshape(N, -1))


def test_samples_side_by_side() -> None:
    agrees(lambda: problem(Windows, 3))
    exts = [extensions.BatchGrad([2, 0]), extensions.DiagGGNExact()]
    parts = problem(Windows, 3)
    for p, grad in zip(saved(parts, *exts), oracle.batch_grad(*problem(Windows, 3)), strict=True):
        close(p.grad_batch, grad[[2, 0]])


class Mixed(nn.Module):
    """Attention between samples."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, E), nn.Linear(E, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        h = self.stem(x)[None]
        return self.head(F.scaled_dot_product_attention(h, h, h)[0])


def test_samples_are_mixed() -> None:
    with pytest.raises(ValueError, match="combines different samples"):
        saved(problem(Mixed, 3), extensions.DiagGGNExact())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    for build in (
        lambda: problem(lambda: Network("self", {}, {"attn_mask": SQUARE, **NO}), S, 3),
        lambda: problem(lambda: called("causal"), 2),
    ):
        model, lossfunc, X, y = build()
        for p in saved((model.to(dtype), lossfunc, X.to(dtype), y), extensions.DiagGGNExact()):
            assert p.diag_ggn_exact.dtype == dtype
            assert p.diag_ggn_exact.isfinite().all()


def test_learned_mask_of_a_layer() -> None:
    parts = problem(lambda: Network("self", {}, {}), S, 3)
    parts[0].call = {"attn_mask": torch.zeros(S, S, dtype=torch.float64, requires_grad=True)}
    model, lossfunc = extend(parts[0]), extend(parts[1])
    loss = lossfunc(model(parts[2]), parts[3])
    with pytest.raises(ValueError, match="mask requires a gradient"), backpack(extensions.KFLR()):
        loss.backward()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_dropout_of_a_layer(name: str) -> None:
    kind, options, call = NETWORKS[name]

    def network() -> nn.Module:
        return oracle.Seeded(Network(kind, {"dropout": 0.4, **options}, call))

    agrees(lambda: problem(network, S, 3), oracle.batch_grad_of_one_pass)
    parts = problem(network, S, 3)
    parts[0].eval()
    output = parts[0](parts[2])
    assert torch.equal(output, extend(parts[0], use_converter=True)(parts[2]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dropout_of_a_function(name: str) -> None:
    agrees(
        lambda: problem(lambda: oracle.Seeded(called(name, 0.4)), 2), oracle.batch_grad_of_one_pass
    )


@pytest.mark.parametrize("route", ["record", "trace"])
@pytest.mark.parametrize("layer", [True, False])
def test_dropout_with_either_converter(layer: bool, route: str) -> None:
    def build() -> Any:
        if layer:
            network = Network("memory", {"dropout": 0.4}, NO)
            return problem(lambda: oracle.Seeded(network), S, 3)
        parts = problem(lambda: oracle.Seeded(called("causal", 0.4)), 2)
        parts[0].eval()  # the function drops in any mode
        return parts

    truth = oracle.batch_grad_of_one_pass(*build())
    model, lossfunc, X, y = build()
    model.model = extend(model.model, use_converter=route)
    with backpack(extensions.BatchGrad()):
        extend(lossfunc)(model(X), y).backward()
    close([p.grad_batch for p in oracle.trainable(model)], truth)


def test_dropout_of_all_weights() -> None:
    def network() -> nn.Module:
        return oracle.Seeded(Network("self", {"dropout": 1.0}, NO))

    agrees(lambda: problem(network, S, 3), oracle.batch_grad_of_one_pass)


def test_dropout_is_refused_where_it_is_not_known() -> None:
    """Such as that of values without a gradient, of which autograd keeps no weights."""

    def build(train: bool) -> Any:
        parts = problem(lambda: Network("cross", {"kdim": 5, "vdim": 2, "dropout": 0.4}, NO), S, 3)
        model: Any = parts[0].train(train)
        model.stems[2].requires_grad_(False)
        for name, p in model.attention.named_parameters():
            p.requires_grad_(name in ("q_proj_weight", "k_proj_weight", "out_proj.weight"))
        return parts

    with pytest.raises(NotImplementedError, match=r"dropout=0.4.*values need.*eval\(\)"):
        saved(build(True), extensions.DiagGGNExact())
    with pytest.warns(UserWarning, match=r"dropout=0.4.*values need.*eval\(\)"):
        saved(build(True), extensions.BatchGrad())
    agrees(lambda: build(False))


def test_subsampling() -> None:
    for build in (
        lambda: problem(lambda: Network("self", {}, {"key_padding_mask": PADDING, **NO}), S, 3),
        lambda: problem(lambda: called("mask of samples"), 2),
    ):
        grads = oracle.batch_grad(*reference(build()))
        ggns = oracle.batch_ggn_diag(*reference(build()))
        exts = [extensions.BatchGrad([2, 0]), extensions.BatchDiagGGNExact(subsampling=[2, 0])]
        for p, grad, ggn in zip(saved(build(), *exts), grads, ggns, strict=True):
            close(p.grad_batch, grad[[2, 0]])
            close(p.diag_ggn_exact_batch, ggn[[2, 0]])


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("layer", [True, False])
def test_results_are_differentiable(layer: bool) -> None:
    """Differentiate the squares of individual gradients and of the GGN's factors."""

    def build() -> Any:
        if layer:
            return problem(lambda: Network("self", {}, NO), S, 3)
        return problem(lambda: called("mask"), 2)

    exts = extensions.BatchGrad(), extensions.DiagGGNExact()
    with sdpa_kernel(SDPBackend.MATH):
        params = saved(build(), *exts, create_graph=True)
    mine = sum(p.grad_batch.pow(3).sum() + p.diag_ggn_exact.square().sum() for p in params)
    model, lossfunc, X, y = reference(build())
    truth, outputs = oracle.trainable(model), model(X)
    p, total = outputs.softmax(1), torch.zeros(())
    diagonals = [torch.zeros_like(p) for p in truth]
    for n in range(N):
        loss = lossfunc(outputs[n : n + 1], y[n : n + 1]) / N
        grads = torch.autograd.grad(loss, truth, create_graph=True)
        total = total + sum(g.pow(3).sum() for g in grads)
        factor = (p[n].sqrt().diag() - p[n].outer(p[n].sqrt())) / N**0.5
        for v in factor.unbind(1):
            grads = torch.autograd.grad(outputs[n], truth, v, create_graph=True)
            diagonals = [d + g.square() for d, g in zip(diagonals, grads, strict=True)]
    total = total + sum(d.square().sum() for d in diagonals)
    close(torch.autograd.grad(mine, params), torch.autograd.grad(total, truth))


def test_conversion() -> None:
    """Attention becomes a module; options that are not known leave a function."""

    class Net(nn.Module):
        """Calls attention."""

        def __init__(self, options: dict[str, Any]) -> None:
            super().__init__()
            self.options, self.stem = options, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            """[N, L, 4] -> [N, L, 4]."""
            h = self.stem(x)
            options = {k: f(self, h) for k, f in self.options.items()}
            return F.scaled_dot_product_attention(h, h, h, **options)

    def is_module(**options: Callable[[Any, Tensor], Any]) -> bool:
        x, net = torch.randn(N, L, 4), Net(options).eval()
        converted = extend(net, use_converter=True)
        close(converted(x), net(x))
        return any(isinstance(m, ScaledDotProductAttention) for m in converted.modules())

    assert is_module()
    assert is_module(attn_mask=lambda m, h: None, scale=lambda m, h: 0.5)
    assert is_module(is_causal=lambda m, h: True, dropout_p=lambda m, h: 0.0)
    assert is_module(attn_mask=lambda m, h: h[:, :, :L])
    assert not is_module(dropout_p=lambda m, h: m.training)
    assert not is_module(scale=lambda m, h: h.shape[-1] ** -0.5)

"""The contract of the derivatives, for every registered class, against plain autograd."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from cases import Case, select
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from seen import seen
from torch import Tensor, einsum, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from backpack import extend
from backpack.core.derivatives import (
    REGISTRY,
    AutomaticDerivatives,
    BaseDerivatives,
    BaseLossDerivatives,
    affine,
    convnd,
    derivatives_of,
    patches,
    reductions,
)
from backpack.core.derivatives.convnd import weight_jac_t_save_memory
from backpack.core.derivatives.linear_maps import map_rows
from backpack.core.derivatives.loss_hessian import LossHessian
from backpack.core.derivatives.patches import Geometry
from backpack.core.record.context import Context
from backpack.custom_module.attention import ScaledDotProductAttention
from backpack.custom_module.branching import SumModule
from backpack.custom_module.function_module import FunctionModule
from backpack.custom_module.parameter_module import ParameterModule
from backpack.custom_module.products import MulModule
from backpack.utils.subsampling import subsample

V = 2
ROWS: list[Any] = [None, [2, 0], [-1], slice(1, None)]
TOLERANCE = {"rtol": 1e-8, "atol": 1e-11}

# Several inputs or outputs, integer inputs, no samples: the contract is tested with the engine.
TESTED_ELSEWHERE: dict[type[nn.Module], str] = {
    **dict.fromkeys([nn.RNN, nn.LSTM, nn.GRU], "test_recurrent.py"),
    **dict.fromkeys([nn.RNNCell, nn.LSTMCell, nn.GRUCell], "test_recurrent.py"),
    **dict.fromkeys([nn.Embedding, nn.EmbeddingBag], "test_embedding.py"),
    **dict.fromkeys([FunctionModule, MulModule, ParameterModule], "test_functions.py"),
    **dict.fromkeys([nn.MultiheadAttention, ScaledDotProductAttention], "test_attention.py"),
    nn.Bilinear: "test_closed_forms.py",
    **dict.fromkeys([nn.CosineSimilarity, nn.PairwiseDistance], "test_quantities.py"),
    # indices are among their inputs
    **dict.fromkeys([nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d], "test_quantities.py"),
    **{
        cls: "test_losses.py"
        for cls, rule in REGISTRY.items()
        if isinstance(rule, BaseLossDerivatives)
    },
    **dict.fromkeys([nn.AdaptiveLogSoftmaxWithLoss, nn.CrossMapLRN2d], "test_torch_nn.py"),
}


class Probe(NamedTuple):
    """A module and the inputs of one call of it."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]


def _probes(case: Case) -> Iterator[Probe]:
    """Yield the calls of registered modules; of the one under test, if there is one."""
    calls: list[tuple[nn.Module, tuple[Tensor, ...]]] = []
    model, _, X, _ = case.build()
    handles = [
        m.register_forward_pre_hook(
            lambda m, args: calls.append((m, tuple(x.detach().clone() for x in args)))
        )
        for m in model.modules()
        if type(m) in REGISTRY
        and type(m) not in TESTED_ELSEWHERE
        and not getattr(m, "return_indices", False)
        and ("module" not in case.tags or case.name.startswith(f"{type(m).__name__}("))
    ]
    model(X)
    for handle in handles:
        handle.remove()
    for module, inputs in calls:
        shapes = "_".join("x".join(map(str, x.shape)) for x in inputs)
        name = f"{module}-{shapes}{'' if module.training else '-eval'}".replace(" ", "")
        own = copy.deepcopy(module)
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(own, key, nn.Parameter(p.detach().clone()))  # in networks, some are tied
        yield Probe(name, own.requires_grad_(), inputs)


# where the samples are along the first axis of everything
PLAIN = [
    case
    for case in select(without="sequence recurrent embedding")
    if not case.tags >= {"function", "network"}
]
PROBES = list({p.name: p for case in PLAIN for p in _probes(case)}.values())
WITH_PARAMS = [p for p in PROBES if any(True for _ in p.module.parameters())]
LOSSES = select("loss")

each_probe = pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
each_with_params = pytest.mark.parametrize("probe", WITH_PARAMS, ids=lambda p: p.name)
each_loss = pytest.mark.parametrize("case", LOSSES, ids=str)


class Call:
    """A module called with inputs that require a gradient; holds what the truth needs."""

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor], target: Tensor | None = None):
        self.module = extend(copy.deepcopy(module))
        self.xs = [x.clone().requires_grad_().clone() for x in inputs]  # not leaves
        torch.manual_seed(0)
        inputs = [x.clone() for x in self.xs]  # the module may change them
        self.recorded = self.module(*inputs, *(() if target is None else (target,)))
        if hasattr(self.module, "inplace"):
            self.module.inplace = False  # the truth calls it again
        self.out = elementary(self.module, self.xs, self.recorded)
        self.derivatives: Any = derivatives_of(self.module)
        self.g_out = (torch.randn_like(self.out),)
        self.params = dict(self.module.named_parameters(recurse=False))
        self.mixing = self.derivatives.couples_samples(self.module)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the derivatives, applied to this call."""
        method = getattr(self.derivatives, name)
        return lambda *args, **keywords: method(self.module, None, self.g_out, *args, **keywords)

    def param(self, method: str, name: str, *args: Any, **keywords: Any) -> Any:
        """Call a method that takes the name of a parameter first."""
        function = getattr(self.derivatives, method)
        return function(name, self.module, None, self.g_out, *args, **keywords)

    def of_param(self, name: str, method: str) -> Callable[..., Any]:
        """Return the method whose name begins with that of a parameter: weight_jac_mat_prod."""
        return getattr(self, f"{name}_{method}")

    def reduced(self, name: str, s: Tensor, *args: Any, generic: bool = False) -> Any:
        """Reduce individual products as extensions do, or with the generic body."""
        owner = BaseDerivatives if generic else type(self.derivatives)
        wanted, rows, weights = args
        return owner.reduced(self.derivatives, self.seen(rows), name, s, wanted, weights)

    def seen(self, rows: Any = None) -> Context:
        """Return what the rule sees."""
        return seen(self.module, rows, self.g_out)

    def kron_rows(self, name: str, s: Tensor, rows: Any = None) -> Any:
        """Call the method as extensions do."""
        return self.derivatives.kron_rows(self.seen(rows), name, s)

    def phi(self) -> Tensor:
        """Return ``<out, g_out>``, whose second derivative modules are asked for."""
        return (self.out * self.g_out[0]).sum()

    def blocks(self) -> Tensor:
        """Jacobian of each sample, ``[N, D_out, D_in]``."""
        J = jacobian(self.out, self.xs[0]).reshape(*per_sample(self.out), *per_sample(self.xs[0]))
        return torch.stack([J[n, :, n] for n in range(len(J))])


def elementary(module: Any, xs: Sequence[Tensor], out: Tensor) -> Tensor:
    """Return ``out``, computed such that autograd has its third derivatives."""
    if isinstance(module, nn.Hardsigmoid):
        return (xs[0] / 6 + 0.5).clamp(0, 1)
    if isinstance(module, nn.LayerNorm):
        (x,) = xs
        last = [*range(-len(module.normalized_shape), 0)]
        var, mean = torch.var_mean(x, last, correction=0, keepdim=True)
        y = (x - mean) / (var + module.eps).sqrt()
        y = y if module.weight is None else y * module.weight
        y = y if module.bias is None else y + module.bias
        close(y, out)
        return y
    if not isinstance(module, _NormBase):
        return out
    (x,) = xs
    axes = [*([0] if isinstance(module, _BatchNorm) else []), *range(2, x.dim())]

    def spread(values: Tensor) -> Tensor:
        return values.reshape(1, -1, *(1,) * (x.dim() - 2))

    if module.training or module.running_mean is None:
        var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    else:
        var, mean = spread(module.running_var), spread(module.running_mean)
    y = (x - mean) / (var + module.eps).sqrt()
    y = y if module.weight is None else y * spread(module.weight) + spread(module.bias)
    close(y, out)
    return y


def start(probe: Probe) -> Call:
    """Call the module of a probe."""
    return Call(probe.module, probe.inputs)


def start_loss(case: Case) -> Call:
    """Call the loss of a case on its model's output."""
    model, lossfunc, X, y = case.build()
    return Call(lossfunc, [model(X).detach()], y)


def per_sample(x: Tensor) -> tuple[int, int]:
    """Return N and the number of entries of a sample."""
    return x.shape[0], x[0].numel()


def gradient(y: Tensor, xs: Sequence[Tensor], v: Tensor | None = None, **keywords: Any) -> Any:
    """Return ``vᵀ dy/dx`` for each x, zeros where y does not depend on x."""
    if not y.requires_grad:
        return tuple(torch.zeros_like(x) for x in xs)
    options = {"retain_graph": True, "materialize_grads": True, **keywords}
    return torch.autograd.grad(y, xs, v, **options)


def jacobian(y: Tensor, x: Tensor) -> Tensor:
    """Return dy/dx row by row: ``[numel(y), numel(x)]``."""
    rows = [gradient(entry, [x])[0].flatten() for entry in y.flatten().unbind()]
    return torch.stack(rows)


def hessian(y: Tensor, x: Tensor) -> Tensor:
    """Return ``d²y/dx²``: ``[numel(x), numel(x)]``."""
    return jacobian(gradient(y, [x], create_graph=True)[0], x)


def tangent(ys: Sequence[Tensor], xs: Sequence[Tensor], ts: Sequence[Tensor]) -> Any:
    """Return ``dy/dx t`` for each y, summed over the xs, by differentiating twice."""
    us = [torch.zeros_like(y).requires_grad_() for y in ys]
    pulled = sum((gradient(y, xs, u, create_graph=True) for y, u in zip(ys, us, strict=True)), ())
    total = sum((p * t).sum() for p, t in zip(pulled, [*ts] * len(ys), strict=True))
    return gradient(total, us, create_graph=True)


def embed(mat: Tensor, rows: Any, shape: Sequence[int]) -> Tensor:
    """Put ``[V, rows, *]`` into zeros of ``[V, *shape]``."""
    if rows is None:
        return mat
    full = mat.new_zeros(mat.shape[0], *shape)
    full[:, rows] = mat
    return full


def random_mat(like: Tensor, rows: Any = None, v: int = V) -> Tensor:
    """Return ``[V, rows, *]``."""
    return torch.randn(v, *subsample(like, subsampling=rows).shape, dtype=like.dtype)


def close(one: Any, other: Tensor) -> None:
    """As assert_close, which takes four times as long to find that there is nothing to say."""
    is_like = isinstance(one, Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)
    if not (is_like and torch.allclose(one, other, **TOLERANCE)):
        torch.testing.assert_close(one, other, **TOLERANCE)


def test_every_registered_class_is_tested() -> None:
    """A new module needs a case (in cases.py)."""
    tested = {type(p.module) for p in PROBES} | {type(c.loss()) for c in LOSSES}
    tested |= TESTED_ELSEWHERE.keys()
    ours = {cls for cls in REGISTRY if cls.__module__.startswith(("torch.", "backpack."))}
    assert tested >= ours, sorted(cls.__name__ for cls in ours - tested)


# --------------------------------------------------------------------------------------
# Facts
# --------------------------------------------------------------------------------------


@each_probe
def test_facts(probe: Probe) -> None:
    call = start(probe)
    derivatives, module = call.derivatives, call.module
    assert {*call.params} <= {*derivatives.params}

    x = call.xs[0]
    J = jacobian(call.out, x).reshape(*per_sample(call.out), *per_sample(x))
    mixed = any(J[n, :, m].abs().max() > 1e-12 for n in range(3) for m in range(3) if n != m)
    assert call.mixing == mixed
    if derivatives.jacobian_is_constant(call.seen()):
        blocks = call.blocks()
        close(blocks, blocks[:1].expand_as(blocks))

    H = hessian(call.phi(), x)
    off_diagonal = H - H.diagonal().diag()
    is_zero = bool(H.abs().max() < 1e-12)
    if not isinstance(derivatives, AutomaticDerivatives) or derivatives.hessian_is_zero(module):
        assert derivatives.hessian_is_zero(module) == is_zero
        assert derivatives.hessian_is_diagonal(module) == bool(off_diagonal.abs().max() < 1e-12)
    if derivatives.hessian_is_psd():
        assert torch.linalg.eigvalsh(H).min() > -1e-12


# --------------------------------------------------------------------------------------
# Jacobians with respect to the inputs
# --------------------------------------------------------------------------------------


@each_probe
def test_input_jacobians(probe: Probe) -> None:
    call = start(probe)
    jacobians = [jacobian(call.out, x) for x in call.xs]
    several = len(call.xs) > 1
    for rows in [None] if call.mixing else ROWS:
        us = [random_mat(x, rows) for x in call.xs]
        s = random_mat(call.out, rows)
        pushed = call.jac_mat_prod(us if several else us[0], subsampling=rows)
        result = call.jac_t_mat_prod(s, subsampling=rows)
        pulled = result if several else (result,)

        expected = sum(
            embed(u, rows, x.shape).flatten(1) @ J.T
            for u, x, J in zip(us, call.xs, jacobians, strict=True)
        ).reshape(V, *call.out.shape)
        close(pushed, subsample(expected, 1, rows))
        full = embed(s, rows, call.out.shape).flatten(1)
        for p, J, x in zip(pulled, jacobians, call.xs, strict=True):
            close(p, subsample((full @ J).reshape(V, *x.shape), 1, rows))

        inner = sum((u * p).sum() for u, p in zip(us, pulled, strict=True))
        close((pushed * s).sum(), inner)

        without_v = [u[0] for u in us]
        close(call.jac_mat_prod(without_v if several else without_v[0], rows), pushed[0])
        result = call.jac_t_mat_prod(s[0], rows)
        for one, stacked in zip(result if several else (result,), pulled, strict=True):
            close(one, stacked[0])


def test_several_inputs_some_without_a_tangent() -> None:
    (probe, *_) = [p for p in PROBES if len(p.inputs) > 2]
    call = start(probe)
    tangents = [None, random_mat(call.xs[1]), *[None] * (len(call.xs) - 2)]
    close(call.jac_mat_prod(tangents), tangents[1])


def test_sum_of_a_single_input() -> None:
    x = torch.rand(3, 2, dtype=torch.float64)
    call = Call(SumModule(), [x])
    u = random_mat(x)
    close(call.jac_mat_prod(u), u)
    close(call.jac_mat_prod([u]), u)
    close(call.jac_t_mat_prod(u)[0], u)


@each_probe
def test_averaged_products(probe: Probe) -> None:
    call = start(probe)
    if len(call.xs) > 1 or call.mixing:
        return
    J = call.blocks()
    mat = torch.randn(J.shape[1], J.shape[1], dtype=J.dtype)
    for rows in ROWS:
        part = subsample(J, subsampling=rows)
        expected = einsum("nai,ab,nbj->ij", part, mat, part) / len(part)
        close(call.ea_jac_t_mat_jac_prod(mat, subsampling=rows), expected)


# --------------------------------------------------------------------------------------
# Jacobians with respect to the parameters
# --------------------------------------------------------------------------------------


def param_jacobians(call: Call) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield each parameter's name and Jacobian ``[N, D_out, P]``."""
    for name, p in call.params.items():
        yield name, p, jacobian(call.out, p).reshape(*per_sample(call.out), -1)


@each_with_params
def test_param_jacobians(probe: Probe) -> None:
    call = start(probe)
    for name, p, J in param_jacobians(call):
        for rows in ROWS:
            part = subsample(J, subsampling=rows)
            s = random_mat(call.out, rows)
            each = einsum("vno,nop->vnp", s.flatten(2), part).reshape(V, -1, *p.shape)
            close(call.param("param_mjp", name, s, False, rows), each)
            close(call.param("param_mjp", name, s, subsampling=rows), each.sum(1))
            close(call.param("param_mjp", name, s[0], False, rows), each[0])
            close(call.of_param(name, "jac_t_mat_prod")(s, False, rows), each)

            u = torch.randn(V, *p.shape, dtype=p.dtype)
            pushed = einsum("nop,vp->vno", part, u.flatten(1)).reshape(s.shape)
            close(call.param("param_jac_mat_prod", name, u, rows), pushed)
            product = call.of_param(name, "jac_mat_prod")
            close(product(u, subsampling=rows), pushed)
            close(product(u[0], subsampling=rows), pushed[0])


REDUCTIONS = {
    "individual": lambda each, squares: each,
    "gradient": lambda each, squares: each.sum((0, 1)),
    "batch_square": lambda each, squares: squares.sum(0),
    "square": lambda each, squares: squares.sum((0, 1)),
}


@each_probe
def test_any_memory_order(probe: Probe) -> None:
    """The columns of a sample may be next to each other: the products are the same."""
    call = start(probe)
    s, t = random_mat(call.out), random_mat(call.xs[0])
    by_sample = [mat.transpose(0, 1).contiguous().transpose(0, 1) for mat in (s, t)]
    with torch.no_grad():
        if len(call.xs) == 1:
            close(call.jac_t_mat_prod(by_sample[0]), call.jac_t_mat_prod(s))
            close(call.jac_mat_prod(by_sample[1]), call.jac_mat_prod(t))
        for name in call.params:
            found = call.reduced(name, by_sample[0], reductions.NAMES, None, None)
            for key, value in call.reduced(name, s, reductions.NAMES, None, None).items():
                close(found[key], value)


def test_rows_are_not_copied() -> None:
    """The order of the columns in memory is kept."""
    mat = torch.randn(4, V, 2)
    for one in (mat, mat.transpose(0, 1)):
        assert map_rows(lambda rows: rows, one).data_ptr() == mat.data_ptr()
        assert map_rows(lambda rows: 2 * rows, one).stride() == one.stride()


@pytest.mark.slow
@each_with_params
@pytest.mark.parametrize("v", [1, 5, 33])
def test_reductions(probe: Probe, v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone and all together, with and without gradients, in slices or at once."""
    call = start(probe)
    for name, p, J in param_jacobians(call):
        for rows in ROWS if v == 5 else ROWS[:1]:
            s = random_mat(call.out, rows, v)
            each = einsum("vno,nop->vnp", s.flatten(2), subsample(J, subsampling=rows))
            each = each.reshape(*each.shape[:2], *p.shape)
            signs = torch.randn(s.shape[:2]).sign().to(s.dtype)
            for weights in (None, signs):
                squares = each.square()
                if weights is not None:
                    squares = einsum("vn...,vn->vn...", squares, weights)
                truths = {key: rule(each, squares) for key, rule in REDUCTIONS.items()}
                norms = each.square().flatten(2).sum((0, 2))
                truths["square_norm"] = norms.to(each.dtype)
                assert truths.keys() == reductions.NAMES
                together = [{key} for key in truths] + [set(truths), {"square_norm", "gradient"}]
                at_once, sizes = 2**21, (p.numel() * v, 2 * p.numel(), 1)
                slices = [(at_once, 2**13), (at_once, 1), *((size, size) for size in sizes)]
                for entries, row in slices if v == 5 else slices[:2] + slices[-1:]:
                    monkeypatch.setattr(reductions, "SLICE_ENTRIES", entries)
                    monkeypatch.setattr(reductions, "LONG_ROW", min(row, 2**13))
                    monkeypatch.setattr(convnd, "patches_are_cheaper", lambda *_, n=entries: n > 1)
                    # nothing else is in slices
                    kinds = (False, True) if (entries, row) == slices[0] else (False,)
                    for wanted, generic, graph in product(together, kinds, kinds):
                        with torch.set_grad_enabled(graph):
                            found = call.reduced(name, s, wanted, rows, weights, generic=generic)
                        assert found.keys() == wanted
                        for key, value in found.items():
                            close(value, truths[key])


@each_with_params
def test_kronecker_rows(probe: Probe) -> None:
    """The map is linear, acts on each sample alone, and in the same way if it says so."""
    call = start(probe)
    for name in call.params:
        s = random_mat(call.out)
        whole = call.kron_rows(name, s)
        for rows in ROWS[1:]:
            part = call.kron_rows(name, subsample(s, 1, rows), rows)
            close(part, subsample(whole, 1, rows))
        total = call.kron_rows(name, s[:1] + 2 * s[1:])
        close(total, whole[:1] + 2 * whole[1:])
        if call.derivatives.kronecker_rows_are_constant:
            same = call.kron_rows(name, s[:, :1].expand_as(s))
            close(same, same[:, :1].expand_as(same))


CONVOLUTIONS = [p for p in WITH_PARAMS if type(p.module).__name__.startswith("Conv")]


@pytest.mark.parametrize("probe", CONVOLUTIONS, ids=lambda p: p.name)
def test_save_memory(probe: Probe) -> None:
    call = start(probe)
    for rows in ROWS:
        s = random_mat(call.out, rows)
        for sum_batch in (True, False):
            with weight_jac_t_save_memory(False):
                fast = call.weight_jac_t_mat_prod(s, sum_batch, rows)
            with weight_jac_t_save_memory():
                small = call.weight_jac_t_mat_prod(s, sum_batch, rows)
                with weight_jac_t_save_memory(False):
                    assert not weight_jac_t_save_memory.active
                assert weight_jac_t_save_memory.active
            assert not weight_jac_t_save_memory.active
            close(small, fast)


@pytest.mark.parametrize("probe", CONVOLUTIONS, ids=lambda p: p.name)
def test_slices_of_one_convolution(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that one convolution multiplies have the products that they have alone."""
    call = start(probe)
    s = random_mat(call.out)
    alone = torch.cat(
        [call.weight_jac_t_mat_prod(s[:, n : n + 1], False, [n]) for n in range(s.shape[1])], 1
    )
    monkeypatch.setattr(convnd, "patches_are_cheaper", lambda *_: False)
    monkeypatch.setattr(convnd, "FEW_ENTRIES", 1)
    entries = max(len(s) * call.params["weight"].numel(), call.xs[0][0].numel(), s[:, 0].numel())
    for samples in (1, 2, s.shape[1]):  # of a slice
        monkeypatch.setattr(reductions, "SLICE_ENTRIES", samples * entries)
        with torch.no_grad():
            found = call.reduced("weight", s, {"individual", "square"}, None, None, generic=False)
        close(found["individual"], alone)
        close(found["square"], alone.square().sum((0, 1)))


def test_save_memory_entered_twice() -> None:
    context = weight_jac_t_save_memory()
    with context:
        with context:
            pass
        assert weight_jac_t_save_memory.active
    assert not weight_jac_t_save_memory.active


BUILT = {"stride": 2, "dilation": 2, "padding": 1}


@pytest.mark.parametrize(
    ("make", "options", "changed", "same"),
    [
        (nn.Conv2d, {}, {"stride": 2, "dilation": (2,), "padding": [1]}, BUILT),
        (nn.ConvTranspose2d, {}, {"stride": 2, "dilation": [2], "padding": (1,)}, BUILT),
        # what `forward` pads is decided when the module is built
        (nn.Conv2d, {"padding": 1, "padding_mode": "circular"}, {"padding": 2}, {}),
        (nn.Conv2d, {"padding": "same", "padding_mode": "reflect"}, {"padding": 0}, {}),
        # the kernel has the size of the weight
        (nn.Conv2d, {"groups": 2}, {"kernel_size": (1, 1)}, {}),
        (nn.ConvTranspose2d, {}, {"kernel_size": (1, 1)}, {}),
    ],
    ids=str,
)
def test_settings_of_convolutions_that_change(
    make: Any, options: dict[str, Any], changed: dict[str, Any], same: dict[str, Any]
) -> None:
    """One number is that of all axes, as in torch: products are those of one that is built so."""
    found = []
    for module in (make(2, 4, 3, **options), make(2, 4, 3, **(options | same))):
        torch.manual_seed(0)
        module.reset_parameters()
        if not found:
            vars(module).update(changed)
        x = torch.rand(3, 2, 6, 7, requires_grad=True)
        y, rule = extend(module)(x), derivatives_of(module)
        v = torch.rand(2, *y.shape)
        with weight_jac_t_save_memory():
            small = rule.param_mjp("weight", module, None, None, v, sum_batch=False)
        c = seen(module)
        products = rule.param_mjp("weight", module, None, None, v, sum_batch=False)
        back, factors = rule.jac_t_mat_prod(module, None, None, v), rule.kron_inputs(c, "weight")
        found.append(
            [y, products, small, back, rule.jac_mat_prod(module, None, None, back), *factors]
        )
    for one, other in zip(*found, strict=True):
        close(one, other)


# --------------------------------------------------------------------------------------
# Second derivatives
# --------------------------------------------------------------------------------------


@each_probe
def test_second_derivative(probe: Probe) -> None:
    call = start(probe)
    x = call.xs[0]
    if len(call.xs) > 1:
        assert call.derivatives.hessian_is_zero(call.module)
        return
    H = hessian(call.phi(), x)
    for rows in [None] if call.mixing else ROWS:
        u = random_mat(x, rows)
        expected = (embed(u, rows, x.shape).flatten(1) @ H).reshape(V, *x.shape)
        product = call.residual_mat_prod(u, subsampling=rows)
        close(product, subsample(expected, 1, rows))
        close(call.residual_mat_prod(u[0], subsampling=rows), product[0])
        if call.derivatives.hessian_is_diagonal(call.module):
            diagonal = subsample(H.diagonal().reshape(x.shape), subsampling=rows)
            close(call.hessian_diagonal(subsampling=rows), diagonal)


@pytest.mark.parametrize(
    "probe", [p for p in WITH_PARAMS if not start(p).mixing], ids=lambda p: p.name
)
def test_mixed_hvp(probe: Probe) -> None:
    call = start(probe)
    (x,), (g,), ps = call.xs, call.g_out, [*call.params.values()]
    wrt = [x, *ps]
    # second derivatives of <out, g_out>, and of each sample's part of it
    (slope,) = gradient(call.phi(), [x], create_graph=True)
    H_x = [jacobian(slope, t).reshape(*x.shape, -1) for t in wrt]
    slopes = [gradient((call.out[n] * g[n]).sum(), ps, create_graph=True) for n in range(len(x))]
    H_ps = [
        [torch.stack([jacobian(row[i], t).reshape(*p.shape, -1) for row in slopes]) for t in wrt]
        for i, p in enumerate(ps)
    ]

    def directional(hessians: list[Tensor], ts: list[Tensor], rows: Any) -> Tensor:
        change = sum(
            einsum("...t,vt->v...", H, t.flatten(1)) for H, t in zip(hessians, ts, strict=True)
        )
        return subsample(change, 1, rows)

    for rows in ROWS:
        c, mixed_hvp = call.seen(rows), call.derivatives.mixed_hvp
        tx = random_mat(x, rows)
        tps = {name: torch.randn(V, *p.shape, dtype=p.dtype) for name, p in call.params.items()}
        for ts_given, full in ([tx], embed(tx, rows, x.shape)), ([None], torch.zeros(V, *x.shape)):
            (d_input,), d_params = mixed_hvp(c, ts_given, tps)
            ts = [full.to(x.dtype), *tps.values()]
            close(d_input, directional(H_x, ts, rows))
            (same_input,), totals = mixed_hvp(c, ts_given, tps, True)
            close(same_input, d_input)
            for H_p, name in zip(H_ps, tps, strict=True):
                close(d_params[name], directional(H_p, ts, rows))
                close(totals[name], directional(H_p, ts, rows).sum(1))


# --------------------------------------------------------------------------------------
# Differentiability: with grad enabled, products have the derivatives that autograd's have
# --------------------------------------------------------------------------------------


def same_derivatives(call: Call, mine: Tensor, truth: Tensor, *others: Tensor) -> None:
    """Compare values, and gradients with respect to inputs, parameters and others."""
    close(mine, truth)
    weights = torch.randn_like(truth)
    wrt = [*call.xs, *call.params.values(), *others]
    expected = gradient(truth, wrt, weights)
    for one, other in zip(gradient(mine, wrt, weights), expected, strict=True):
        close(one, other)


@each_probe
def test_products_are_differentiable(probe: Probe) -> None:
    call = start(probe)
    s = random_mat(call.out, v=1).requires_grad_()
    us = [random_mat(x, v=1).requires_grad_() for x in call.xs]
    several = len(us) > 1

    pulled = call.jac_t_mat_prod(s)
    for mine, x in zip(pulled if several else [pulled], call.xs, strict=True):
        truth = gradient(call.out, [x], s[0], create_graph=True)[0]
        same_derivatives(call, mine[0], truth, s)

    (truth,) = tangent([call.out], call.xs, [u[0] for u in us])
    mine = call.jac_mat_prod(us if several else us[0])
    same_derivatives(call, mine[0], truth, *us)

    if several:
        return
    (x,), (u,) = call.xs, us
    slope = gradient(call.phi(), [x], create_graph=True)[0]
    truth = gradient((slope * u[0]).sum(), [x], create_graph=True)[0]
    same_derivatives(call, call.residual_mat_prod(u)[0], truth, u)
    if call.derivatives.hessian_is_diagonal(call.module):
        (truth,) = gradient(slope.sum(), [x], create_graph=True)
        same_derivatives(call, call.hessian_diagonal(), truth)


@each_with_params
def test_param_products_are_differentiable(probe: Probe) -> None:
    call = start(probe)
    for name, p in call.params.items():
        s = random_mat(call.out).requires_grad_()
        u = torch.randn(1, *p.shape, dtype=p.dtype).requires_grad_()
        (truth,) = tangent([call.out], [p], [u[0]])
        mine = call.param("param_jac_mat_prod", name, u)
        same_derivatives(call, mine[0], truth, u)

        each = torch.stack(
            [
                torch.stack(
                    [
                        gradient(o, [p], t, create_graph=True)[0]
                        for o, t in zip(call.out, v, strict=True)
                    ]
                )
                for v in s
            ]
        )
        same_derivatives(call, call.param("param_mjp", name, s), each.sum(1), s)
        same_derivatives(call, call.param("param_mjp", name, s, False), each, s)
        truths = {key: rule(each, each.square()) for key, rule in REDUCTIONS.items()}
        truths["square_norm"] = each.square().flatten(2).sum((0, 2))
        for key, truth in truths.items():
            same_derivatives(call, call.reduced(name, s, {key}, None, None)[key], truth, s)
        with weight_jac_t_save_memory():
            same_derivatives(call, call.param("param_mjp", name, s, False), each, s)


# --------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------


def loss_hessian(call: Call) -> Tensor:
    """Return each sample's Hessian ``[N, D, D]``; different samples are independent."""
    (f,) = call.xs
    H = hessian(call.out, f).reshape(*per_sample(f), *per_sample(f))
    blocks = torch.stack([H[n, :, n] for n in range(len(H))])
    close(H.pow(2).sum(), blocks.pow(2).sum())
    return blocks


@each_loss
def test_exact_factor(case: Case) -> None:
    call = start_loss(case)
    H = loss_hessian(call)
    assert call.derivatives.hessian_is_psd()
    assert not call.derivatives.hessian_is_zero(call.module)
    for rows in ROWS:
        S = call.sqrt_hessian(subsampling=rows)
        part = subsample(H, subsampling=rows)
        assert S.shape[1:] == subsample(call.xs[0], subsampling=rows).shape
        flat = S.flatten(2)
        close(einsum("vna,vnb->nab", flat, flat), part)
        thin = LossHessian(call.seen().call, rows).root(thin=True).flatten(2)
        assert len(thin) <= len(S)
        close(einsum("vna,vnb->nab", thin, thin), part)
        close(call.sum_hessian(subsampling=rows), part.sum(0))

        u = random_mat(call.xs[0], rows)
        expected = einsum("nab,vnb->vna", part, u.flatten(2)).reshape(u.shape)
        product = call.make_hessian_mat_prod()
        close(product(u, rows), expected)
        close(product(u[0], subsampling=rows), expected[0])


@each_loss
def test_sampled_factor(case: Case) -> None:
    call, num = start_loss(case), 10_000
    H = loss_hessian(call)
    torch.manual_seed(0)
    S = call.sqrt_hessian_sampled(mc_samples=num)
    assert S.shape == (num, *call.xs[0].shape)
    flat = S.detach().flatten(2) * math.sqrt(num)
    outer = einsum("mna,mnb->mnab", flat, flat)
    error = (outer.mean(0) - H).abs()
    assert (error <= 5 * outer.std(0) / math.sqrt(num) + 1e-12).all()

    for rows in ROWS[1:]:
        torch.manual_seed(0)
        part = call.sqrt_hessian_sampled(mc_samples=num, subsampling=rows)
        assert torch.equal(part, subsample(S, 1, rows))


@pytest.mark.parametrize("case", select("loss", without="mse"), ids=str)
def test_samples_are_gradients(case: Case) -> None:
    """Of the negative log likelihood of labels that are drawn, up to a factor for each sample."""
    call = start_loss(case)
    f = call.xs[0].detach()
    S = call.sqrt_hessian_sampled(mc_samples=4).detach() * 2
    if "bce" in case.tags:
        p = f.sigmoid()
        curvature = loss_hessian(call).diagonal(dim1=1, dim2=2).reshape(f.shape)
        label = p - S / (curvature / p / (1 - p)).sqrt()
        close(label, label.round())
        assert label.round().unique().tolist() == [0, 1]
    else:  # p - e_k: the sum over the classes is zero, and all but one are a multiple of p
        close(S.sum(2), torch.zeros_like(S.sum(2)))
        multiples = (S / f.softmax(1)).sort(2).values
        close(multiples[:, :, 1], multiples[:, :, 2])


@each_loss
def test_loss_as_a_module(case: Case) -> None:
    call = start_loss(case)
    (f,) = call.xs
    (g,) = gradient(call.out, [f])
    for rows in ROWS:
        u = random_mat(f, rows)
        part = subsample(g, subsampling=rows)
        close(call.jac_mat_prod(u, subsampling=rows), (u * part).flatten(1).sum(1))
        close(call.jac_mat_prod(u[0], subsampling=rows), (u[0] * part).sum())
        s = torch.randn(V, dtype=f.dtype)
        close(call.jac_t_mat_prod(s, subsampling=rows), einsum("v,n...->vn...", s, part))
        close(call.jac_t_mat_prod(s[0], subsampling=rows), s[0] * part)


@each_loss
def test_losses_are_differentiable(case: Case) -> None:
    call = start_loss(case)
    (f,) = call.xs
    H = hessian_graph(call)
    S = call.sqrt_hessian().flatten(2)
    outer = einsum("vna,vnb->nab", S, S)
    same_derivatives(call, outer, H)
    u = random_mat(f, v=1).requires_grad_()
    truth = einsum("nab,nb->na", H, u[0].flatten(1)).reshape(f.shape)
    same_derivatives(call, call.make_hessian_mat_prod()(u)[0], truth, u)
    (truth,) = gradient(call.out, [f], create_graph=True)
    same_derivatives(call, call.jac_t_mat_prod(torch.ones_like(call.out)), truth)

    draws = []
    for shift in (0.0, 1e-6):  # the same samples, slightly different predictions
        moved = Call(call.module, [f.detach() + shift], case.build().y)
        torch.manual_seed(3)
        draws.append((moved.xs[0], moved.sqrt_hessian_sampled(mc_samples=2), moved))
    (x, S, _), (_, other, _) = draws
    (slope,) = tangent([S], [x], [torch.ones_like(x)])
    torch.testing.assert_close((other - S) / 1e-6, slope, rtol=1e-4, atol=1e-5)


def hessian_graph(call: Call) -> Tensor:
    """Return each sample's Hessian ``[N, D, D]`` with a graph."""
    (f,) = call.xs
    (g,) = gradient(call.out, [f], create_graph=True)
    size = per_sample(f)[1]
    rows = [gradient(g.flatten(1)[:, i].sum(), [f], create_graph=True)[0] for i in range(size)]
    return torch.stack([row.flatten(1) for row in rows], 1)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.BCEWithLogitsLoss])
def test_saturated_predictions(loss: type[nn.Module]) -> None:
    """Probabilities of exactly 0 and 1 have finite derivatives."""
    f = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 1e4]], dtype=torch.float64)
    call = Call(loss(), [f], torch.full_like(f, 1 / 3))
    for S in (call.sqrt_hessian(), call.sqrt_hessian_sampled(mc_samples=3)):
        assert S.isfinite().all()
        assert gradient(S.square().sum(), call.xs)[0].isfinite().all()


@pytest.mark.parametrize("loss", [nn.MSELoss, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss])
@pytest.mark.parametrize(
    "method", ["sqrt_hessian", "sqrt_hessian_sampled", "sum_hessian", "make_hessian_mat_prod"]
)
def test_loss_without_reduction(loss: type[nn.Module], method: str) -> None:
    f = torch.rand(3, 2, dtype=torch.float64)
    call = Call(loss(reduction="none"), [f], torch.rand_like(f))
    with pytest.raises(ValueError, match="scalar"):
        result = getattr(call, method)()
        result(f)


@pytest.mark.parametrize("loss", [nn.MSELoss, nn.BCEWithLogitsLoss])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_broadcast(loss: type[nn.Module]) -> None:
    f = torch.rand(3, 3, dtype=torch.float64)
    if loss is nn.MSELoss:
        call = Call(loss(), [f], torch.rand(3, 1, dtype=f.dtype))
        with pytest.raises(ValueError, match=r"\[3, 3\], \[3, 1\]"):
            call.sqrt_hessian()
    else:
        with pytest.raises(ValueError, match="size"):
            Call(loss(), [f], torch.rand(3, 1, dtype=f.dtype))


# --------------------------------------------------------------------------------------
# Bad input
# --------------------------------------------------------------------------------------

ONE_EACH = list({type(p.module): p for p in PROBES}.values())


@pytest.mark.parametrize("probe", ONE_EACH, ids=lambda p: type(p.module).__name__)
def test_wrong_shapes_are_named(probe: Probe) -> None:
    call = start(probe)

    def refuses(method: Callable[..., Any], right: Sequence[int], *wrongs: Tensor) -> None:
        for wrong in wrongs:
            with pytest.raises(ValueError) as error:
                method(wrong)
            for shape in (right, wrong.shape):
                assert ", ".join(map(str, shape)) in str(error.value)

    def wrong(x: Tensor) -> tuple[Tensor, ...]:
        longer = torch.zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)
        return longer, longer.unsqueeze(0), x[:-1].detach(), x.detach().expand(2, 2, *x.shape)

    out = call.out
    refuses(call.jac_t_mat_prod, out.shape, *wrong(out))
    dim = out[0].numel()
    refuses(call.ea_jac_t_mat_jac_prod, (dim, dim), torch.zeros(dim + 1, dim), torch.zeros(dim))
    if len(call.xs) == 1:
        x = call.xs[0]
        refuses(call.jac_mat_prod, x.shape, *wrong(x))
        refuses(call.residual_mat_prod, x.shape, *wrong(x))
    for name, p in call.params.items():
        refuses(lambda mat, name=name: call.param("param_mjp", name, mat), out.shape, *wrong(out))
        longer, *_, deeper = wrong(p)
        refuses(call.of_param(name, "jac_mat_prod"), p.shape, longer, deeper)
    with pytest.raises(ValueError, match="no parameter 'nonsense'"):
        call.param("param_mjp", "nonsense", out)
    with pytest.raises(ValueError, match="no parameter 'nonsense'"):
        call.param("param_jac_mat_prod", "nonsense", out)
    with pytest.raises(ValueError, match="g_out"):
        call.derivatives.hessian_diagonal(call.module, None, None)


@pytest.mark.parametrize("case", LOSSES[:1] + LOSSES[3:4] + LOSSES[-1:], ids=str)
def test_wrong_shapes_at_losses(case: Case) -> None:
    call = start_loss(case)
    assert isinstance(call.derivatives, BaseLossDerivatives)
    shape = call.xs[0].shape
    with pytest.raises(ValueError, match=", ".join(map(str, shape))):
        call.make_hessian_mat_prod()(torch.zeros(*shape, 2))


@pytest.mark.parametrize("probe", [p for p in PROBES if start(p).mixing], ids=lambda p: p.name)
def test_part_of_a_mixed_batch_is_refused(probe: Probe) -> None:
    """The Jacobian acts on the batch as a whole; a part of it would be silently wrong."""
    call = start(probe)
    x = call.xs[0]
    for method in (call.jac_mat_prod, call.jac_t_mat_prod, call.residual_mat_prod):
        for rows in ROWS[1:]:
            with pytest.raises(ValueError, match="batch"):
                method(random_mat(x, rows), subsampling=rows)
    with pytest.raises(ValueError, match="batch"):
        call.ea_jac_t_mat_jac_prod(torch.eye(x[0].numel(), dtype=x.dtype))


def test_without_a_forward_pass() -> None:
    module = extend(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="No forward pass"):
        derivatives_of(module).jac_t_mat_prod(module, None, None, torch.zeros(1, 4, 2))


class Axis(NamedTuple):
    """One axis of a convolution."""

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def positions(self) -> int:
        """How often the kernel fits in."""
        reach = self.dilation * (self.kernel - 1)
        return (self.before + self.size + self.after - reach - 1) // self.stride + 1


SIZES = {"size": (1, 7), "kernel": (1, 4), "stride": (1, 3), "dilation": (1, 2)}
MARGINS = {"before": (0, 3), "after": (0, 3)}
AXES = st.builds(Axis, **{name: st.integers(*ends) for name, ends in (SIZES | MARGINS).items()})


@pytest.mark.slow
@given(axes=st.lists(AXES, min_size=1, max_size=3), channels=st.integers(1, 2))
@settings(max_examples=100, deadline=None)
def test_patch_gram(axes: list[Axis], channels: int) -> None:
    """The blocks that follow from each other are those of the unfolded input, in every slice."""
    sizes, kernel, stride, dilation, before, after = map(list, zip(*axes, strict=True))
    positions = [axis.positions for axis in axes]
    assume(min(positions) > 0)
    torch.manual_seed(0)
    x = torch.randn(40, channels, *sizes, dtype=torch.float64, requires_grad=True)
    widths = [w for pair in zip(before[::-1], after[::-1], strict=True) for w in pair]
    padded = nn.functional.pad(x, widths)
    moves = Geometry(kernel, stride, dilation, before, after, 1, "constant")
    unfolded = patches.patches(padded, moves, positions)
    unfolded = unfolded.reshape(len(x), channels * math.prod(kernel), -1)
    truth = einsum("nit,njt->ij", unfolded, unfolded)
    weights = torch.randn_like(truth)
    for worthwhile in (0, math.inf):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patches, "WORTHWHILE", worthwhile)
            patch.setattr(patches, "INPUT_ENTRIES", 16 * x[0].numel())
            patch.setattr(patches, "PATCH_ENTRIES", 16 * unfolded[0].numel())
            found = patches.patch_gram(x, moves, positions)
        close(found, truth)
        close(*(torch.autograd.grad(a, x, weights, retain_graph=True)[0] for a in (found, truth)))


@pytest.mark.parametrize("pool", [nn.MaxPool1d(2), nn.MaxPool2d(2, 1), nn.MaxPool3d(2)], ids=str)
def test_pooling_keeps_the_indices_of_autograd(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positions of the maxima are not searched for again, and are the same."""
    dims = int(type(pool).__name__[-2])
    module = extend(pool)
    x = torch.randn(2, 3, *[4] * dims, requires_grad=True)
    out = module(x)
    rule: Any = derivatives_of(module)
    mat = torch.randn_like(out)
    c = seen(module)
    assert torch.equal(c.saved["selected"].flatten(2), rule.indices(c).flatten(2))
    monkeypatch.setattr(rule, "indices", None)
    found = rule.jac_t_mat_prod(module, None, None, mat)
    close(found, torch.autograd.grad(out, x, mat)[0])


def test_norms_are_never_negative() -> None:
    """Where the terms of a Gram product cancel, nothing but rounding is left."""
    s = torch.randn(1, 2000, 6, 5, dtype=torch.float32)
    s = s - s.mean(2, keepdim=True)
    x = torch.rand(2000, 1, 4, dtype=torch.float32).expand(-1, 6, -1)
    with torch.no_grad():
        norms = affine.square_norm(s, x)
    assert (norms >= 0).all() and (norms < 1e-4).all()


def test_norms_of_rows() -> None:
    """Long rows are as precise as short ones, and there are second derivatives at zero."""
    for length in (3, affine.LONGEST_ROW, 2**20):
        mat = torch.rand(1, 2, length, dtype=torch.float32)
        truth = mat.double().square().sum((0, 2))
        with torch.no_grad():
            found = affine._square_norms(mat).double()
        torch.testing.assert_close(found, truth, rtol=2e-6, atol=0)
    zero = torch.zeros(1, 1, 1, 3, requires_grad=True)
    with torch.enable_grad():
        (slope,) = gradient(affine._square_norms(zero).sum(), [zero], create_graph=True)
        (curvature,) = gradient(slope.sum(), [zero])
    close(curvature, torch.full_like(zero, 2.0))


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)],
    ids=lambda m: type(m).__name__,
)
def test_products_of_a_norm_with_no_vector(module: nn.Module) -> None:
    """Nothing comes back, with the shape of the parameter."""
    shape = (3, 4) if isinstance(module, nn.BatchNorm1d) else (3, 4, 4, 4)
    with torch.enable_grad():
        out = extend(module)(torch.rand(shape, requires_grad=True))
    rule: Any = derivatives_of(module)
    mat = torch.rand(0, *out.shape)
    for name, p in module.named_parameters():
        assert rule.param_mjp(name, module, None, None, mat).shape == (0, *p.shape)
        each = rule.param_mjp(name, module, None, None, mat, sum_batch=False)
        assert each.shape == (0, 3, *p.shape)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("columns", [2, 40])
@pytest.mark.parametrize("alike", [False, True])
def test_weighted_squares(alike: bool, columns: int, shape: tuple[int, ...]) -> None:
    """Also of a parameter without axes, and where all samples have the same products."""
    values, weights = torch.randn(columns, 1 if alike else 5, *shape), torch.randn(columns, 5)
    values = values.expand(-1, 5, *shape)
    expected = torch.einsum("vn,vn...->n...", weights, values**2)
    torch.testing.assert_close(reductions.sum_of_squares(values, weights), expected)

"""Closed forms of normalisation, softmax, gates, PReLU and Bilinear, against the automatic rules.

Where a formula replaces autograd, both have to agree: products with first and second derivatives,
with respect to inputs and parameters, of all samples and of some, and their own derivatives.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from seen import seen
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.derivatives import (
    AutomaticDerivatives,
    FunctionDerivatives,
    derivatives_of,
    reductions,
)
from backpack.core.derivatives import vectors as vectors_of_rules
from backpack.core.record import registry
from backpack.core.record.context import Context
from backpack.custom_module.function_module import FunctionModule, Slot
from backpack.custom_module.permute import Permute
from backpack.extensions.module_extension import ModuleExtension
from backpack.utils.subsampling import subsample

N, V = 4, 3
ROWS: list[Any] = [None, [2, 0], [-1], slice(1, None)]
TOLERANCE = {"rtol": 1e-8, "atol": 1e-11}


class Probe(NamedTuple):
    """A module, the shapes of a sample's inputs, and the rule to compare with."""

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    automatic: type[AutomaticDerivatives] = AutomaticDerivatives


def instance_norm(cls: type[nn.Module], channels: int, **options: Any) -> nn.Module:
    """Return a module with running statistics that are no zeros and ones."""
    module: Any = cls(channels, track_running_stats=True, **options)
    with torch.no_grad():
        module.running_mean.uniform_(-1, 1)
        module.running_var.uniform_(0.5, 2)
    return module


PROBES: dict[str, Probe] = {
    "layer-norm": Probe(lambda: nn.LayerNorm((2, 3)), ((2, 2, 3),)),
    "layer-norm-plain": Probe(lambda: nn.LayerNorm(5, elementwise_affine=False), ((5,),)),
    "rms-norm": Probe(lambda: nn.RMSNorm(4), ((3, 4),)),
    "rms-norm-plain": Probe(lambda: nn.RMSNorm(4, 0.1, elementwise_affine=False), ((4,),)),
    "rms-norm-axes": Probe(lambda: nn.RMSNorm((2, 3), eps=0.1), ((2, 2, 3),)),
    "group-norm": Probe(lambda: nn.GroupNorm(2, 4, eps=0.1), ((4, 3),)),
    "group-norm-one": Probe(lambda: nn.GroupNorm(1, 3), ((3,),)),
    "group-norm-2d": Probe(lambda: nn.GroupNorm(2, 4), ((4, 1, 2),)),
    "group-norm-plain": Probe(lambda: nn.GroupNorm(2, 4, affine=False), ((4, 2),)),
    "instance-norm-1d": Probe(lambda: nn.InstanceNorm1d(2, affine=True), ((2, 4),)),
    "instance-norm-2d": Probe(lambda: nn.InstanceNorm2d(2, affine=True), ((2, 3, 2),)),
    "instance-norm-3d": Probe(lambda: nn.InstanceNorm3d(2), ((2, 2, 1, 2),)),
    "instance-norm-eval": Probe(
        lambda: instance_norm(nn.InstanceNorm1d, 2, affine=True).eval(), ((2, 3),)
    ),
    "instance-norm-eval-plain": Probe(
        lambda: instance_norm(nn.InstanceNorm2d, 2).eval(), ((2, 2, 2),)
    ),
    "prelu": Probe(nn.PReLU, ((2, 3),)),
    "prelu-channels": Probe(lambda: nn.PReLU(3), ((3, 2, 2),)),
    "prelu-features": Probe(lambda: nn.PReLU(3), ((3,),)),
    "glu": Probe(lambda: nn.GLU(1), ((4, 2),), FunctionDerivatives),
    "glu-last": Probe(nn.GLU, ((3, 4),), FunctionDerivatives),
    "softmax": Probe(lambda: nn.Softmax(-1), ((2, 3),), FunctionDerivatives),
    "softmax-positive": Probe(lambda: nn.Softmax(2), ((2, 3, 2),), FunctionDerivatives),
    "softmax-2d": Probe(nn.Softmax2d, ((3, 2, 1),), FunctionDerivatives),
    "softmin": Probe(lambda: nn.Softmin(1), ((3, 2),), FunctionDerivatives),
    "log-softmax": Probe(lambda: nn.LogSoftmax(1), ((4, 2),), FunctionDerivatives),
    "bilinear": Probe(lambda: nn.Bilinear(2, 3, 4), ((2,), (3,))),
    "bilinear-positions": Probe(lambda: nn.Bilinear(2, 3, 2, bias=False), ((2, 2, 2), (2, 2, 3))),
}
each_probe = pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)


class Call:
    """A call of a module with its closed form, or with another rule."""

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor], rule: Any = None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rule is not None:
                patch.setitem(registry.REGISTRY, type(module), rule())
                patch.setattr(registry, "_CACHE", {})
            self.module: Any = extend(copy.deepcopy(module))
            self.xs = [x.clone().requires_grad_().clone() for x in inputs]
            self.out = self.module(*self.xs)
            self.rule: Any = derivatives_of(self.module)
        torch.manual_seed(1)
        self.g_out = (torch.randn_like(self.out),)
        self.params = dict(self.module.named_parameters())

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the rule."""
        return getattr(self.rule, method)(self.module, None, self.g_out, *args, **options)

    def param(self, method: str, name: str, *args: Any, **options: Any) -> Any:
        """Call a method that takes the name of a parameter first."""
        function = getattr(self.rule, method)
        return function(name, self.module, None, self.g_out, *args, **options)

    def seen(self, rows: Any) -> Context:
        """Return what the rule sees."""
        return seen(self.module, rows, self.g_out)


def pair(probe: Probe, rule: Any = None, dtype: torch.dtype = torch.float64) -> tuple[Call, Call]:
    """Call a module twice: with its closed form, and with the automatic rule (or another)."""
    torch.manual_seed(0)
    module = probe.make().to(dtype)
    for p in module.parameters():
        nn.init.uniform_(p, -1, 2)
    inputs = [torch.randn(N, *shape).to(dtype) for shape in probe.shapes]
    mine, other = Call(module, inputs), Call(module, inputs, rule or probe.automatic)
    assert type(mine.rule) not in (AutomaticDerivatives, FunctionDerivatives)
    assert type(other.rule) is (rule or probe.automatic)
    return mine, other


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, **TOLERANCE)


def draw(like: Tensor, rows: Any = None) -> Tensor:
    return torch.randn(V, *subsample(like, subsampling=rows).shape, dtype=like.dtype)


def one(xs: Sequence[Any]) -> Any:
    """Return the only entry, or all."""
    return xs[0] if len(xs) == 1 else list(xs)


# --------------------------------------------------------------------------------------
# Against the automatic rule
# --------------------------------------------------------------------------------------


@each_probe
def test_inputs(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors_of_rules, "ENTRIES_ON_CPU", 1)
    mine, automatic = pair(probe)
    for rows in ROWS:
        us, s = one([draw(x, rows) for x in mine.xs]), draw(mine.out, rows)
        for method, mat in (
            ("jac_mat_prod", us),
            ("jac_t_mat_prod", s),
            ("residual_mat_prod", us),
        ):
            results = [call.call(method, mat, subsampling=rows) for call in (mine, automatic)]
            close(*map(list, results) if isinstance(mat, list) else results)
            if method == "residual_mat_prod" and mine.rule.hessian_is_zero(mine.module):
                assert not results[0].any()


@each_probe
def test_parameters(probe: Probe) -> None:
    mine, automatic = pair(probe)
    for name, p in mine.params.items():
        assert mine.rule.is_linear_in_params(mine.module)
        for rows in ROWS:
            s, u = draw(mine.out, rows), torch.randn(V, *p.shape, dtype=p.dtype)
            weights = torch.randn(s.shape[:2]).sign().to(s.dtype)
            for method, *args in (
                ("param_mjp", s, True, rows),
                ("param_mjp", s, False, rows),
                ("param_jac_mat_prod", u, rows),
                ("param_mjp_reduced", s, ["square_norm"], rows),
                ("param_mjp_reduced", s, reductions.NAMES, rows),
                ("param_mjp_reduced", s, reductions.NAMES, rows, weights),
            ):
                close(mine.param(method, name, *args), automatic.param(method, name, *args))
            close(*(call.rule.kron_rows(call.seen(rows), name, s) for call in (mine, automatic)))


@each_probe
def test_mixed_second_derivatives(probe: Probe) -> None:
    mine, automatic = pair(probe)
    for rows in ROWS:
        ts = [draw(x, rows) for x in mine.xs]
        ps = {name: torch.randn(V, *p.shape, dtype=p.dtype) for name, p in mine.params.items()}
        for inputs in (ts, [None] * len(ts)):
            for names in ([], *([name] for name in ps), list(ps)):
                params = {name: ps[name] for name in names}
                if inputs is ts or params:
                    pairs = [(call.rule, call.seen(rows)) for call in (mine, automatic)]
                    close(*(rule.mixed_hvp(c, inputs, params) for rule, c in pairs))


class Elementary(AutomaticDerivatives):
    """Normalisation by elementary operations: some kernels of torch have no third derivative."""

    def evaluate(self, c: Context, params: Any, *inputs: Any) -> Any:
        """Return the output."""
        (x,), module = inputs, c.module
        p = {**dict(module.named_parameters()), **params}
        ones = (1,) * (x.dim() - 2)
        if isinstance(module, nn.LayerNorm):
            x, ones = x.flatten(-len(module.normalized_shape)), ()
        axes = (-1,) if isinstance(module, nn.LayerNorm) else tuple(range(2, x.dim()))
        var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        y = (x - mean) / (var + module.eps).sqrt()
        for name, combine in (("weight", torch.mul), ("bias", torch.add)):
            if name in p:
                y = combine(y, p[name].reshape(-1, *ones))
        return y.reshape(inputs[0].shape)


@each_probe
def test_products_are_differentiable(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors_of_rules, "ENTRIES_ON_CPU", 1)
    module = probe.make()
    is_kernel = isinstance(module, nn.LayerNorm | nn.modules.instancenorm._InstanceNorm)
    calls = pair(probe, Elementary if is_kernel and module.training else None)
    us, s = one([draw(x) for x in calls[0].xs]), draw(calls[0].out)
    products: list[tuple[str, Any]] = [("jac_mat_prod", us), ("jac_t_mat_prod", s)]
    if not calls[0].rule.hessian_is_zero(calls[0].module):
        products.append(("residual_mat_prod", us))
    for method, mat in products:
        slopes = []
        for call in calls:
            result = call.call(method, mat)
            result = result if isinstance(result, tuple | list) else [result]
            total = sum((part * part.detach().cos()).sum() for part in result)
            wrt = [*call.xs, *call.params.values()]
            total = total + 0 * sum(x.sum() for x in wrt)  # depends on all, if only formally
            slopes.append(torch.autograd.grad(total, wrt, retain_graph=True))
        close(*slopes)


@each_probe
def test_low_precision(probe: Probe) -> None:
    """bfloat16 gives what float64 gives at the same values, up to rounding."""
    low, _ = pair(probe, dtype=torch.bfloat16)
    wide = Call(copy.deepcopy(low.module).double(), [x.detach().double() for x in low.xs])
    us, s = one([draw(x) for x in low.xs]), draw(low.out)
    wide.g_out = (low.g_out[0].double(),)
    for method, mat in (("jac_mat_prod", us), ("jac_t_mat_prod", s), ("residual_mat_prod", us)):
        double = [m.double() for m in mat] if isinstance(mat, list) else mat.double()
        result, truth = low.call(method, mat), wide.call(method, double)
        several = isinstance(result, tuple | list)
        pairs = zip(result if several else [result], truth if several else [truth], strict=True)
        for value, exact in pairs:
            assert value.dtype == torch.bfloat16
            atol = 0.05 * float(exact.detach().abs().max()) + 1e-9
            torch.testing.assert_close(value.double(), exact, rtol=0, atol=atol)


# --------------------------------------------------------------------------------------
# In networks, against plain autograd
# --------------------------------------------------------------------------------------


class Network(nn.Module):
    """Modules between two linear layers: ``[N, 3] -> [N, 3]``."""

    def __init__(self, shape: tuple[int, ...], *modules: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, torch.Size(shape).numel()), nn.Unflatten(1, shape))
        self.body.extend([*modules, nn.Flatten()])
        out = self.body(torch.randn(2, 3))
        self.body.append(nn.Tanh()).append(nn.Linear(out.shape[1], 3))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        return self.body(x)


class Products(nn.Module):
    """Bilinear layers of two branches, of one tensor with itself, and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 3)
        self.bilinear, self.square = nn.Bilinear(2, 3, 2), nn.Bilinear(2, 2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        left, right = self.left(x), self.right(x)
        twice = self.bilinear(self.bilinear(left, right), right)
        return self.square(twice, twice)


def second(*modules: nn.Module) -> list[nn.Module]:
    """Let modules see the samples along axis 1."""
    return [Permute(1, 0, 2), *modules, Permute(1, 0, 2)]


def merged(*modules: nn.Module) -> list[nn.Module]:
    """Let modules see the samples behind another axis, merged with it."""
    merge = FunctionModule(torch.flatten, (Slot(0), 0, 1), {})
    return second(merge, *modules, nn.Unflatten(0, (2, -1)))


def twice(module: nn.Module) -> list[nn.Module]:
    """Use a module twice."""
    return [module, nn.Tanh(), module]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "layer-norm": lambda: Network((2, 3), nn.LayerNorm(3)),
    "layer-norm-second": lambda: Network((2, 3), *second(nn.LayerNorm(3))),
    "rms-norm": lambda: Network((2, 3), nn.RMSNorm(3)),
    "rms-norm-second": lambda: Network((2, 3), *second(nn.RMSNorm((3,), 0.1))),
    "rms-norm-twice": lambda: Network((2, 3), *twice(nn.RMSNorm(3))),
    "group-norm": lambda: Network((4, 2), nn.GroupNorm(2, 4)),
    "group-norm-twice": lambda: Network((4, 2), *twice(nn.GroupNorm(2, 4))),
    "instance-norm": lambda: Network((2, 3), nn.InstanceNorm1d(2, affine=True)),
    "instance-norm-train": lambda: Network((2, 3), instance_norm(nn.InstanceNorm1d, 2)),
    "instance-norm-eval": lambda: Network(
        (2, 3), instance_norm(nn.InstanceNorm1d, 2, affine=True).eval()
    ),
    "prelu": lambda: Network((2, 3), nn.PReLU()),
    "prelu-second": lambda: Network((2, 3), *second(nn.PReLU())),
    "prelu-channels": lambda: Network((2, 3), nn.PReLU(2)),
    "prelu-twice": lambda: Network((2, 3), *twice(nn.PReLU(2))),
    "glu": lambda: Network((4, 2), nn.GLU(1)),
    "glu-second": lambda: Network((2, 4), *second(nn.GLU())),
    "softmax": lambda: Network((2, 2, 2), nn.Softmax(2)),
    "softmax-second": lambda: Network((2, 3), *second(nn.Softmax(0))),
    "softmax-last": lambda: Network((2, 3), Permute(2, 1, 0), nn.Softmax(0), Permute(2, 1, 0)),
    "softmax-merged": lambda: Network((2, 3), *merged(nn.Softmax(-1))),
    "glu-merged": lambda: Network((2, 4), *merged(nn.GLU())),
    "softmax-2d": lambda: Network((3, 2, 1), nn.Softmax2d()),
    "softmin": lambda: Network((2, 3), *second(nn.Softmin(-1))),
    "log-softmax": lambda: Network((2, 3), *second(nn.LogSoftmax(2))),
    "bilinear": Products,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    agrees(NETWORKS[name])


def agrees(make: Callable[[], nn.Module], **options: Any) -> nn.Module:
    """Compare a network ``[N, 3] -> [N, 3]`` with the oracle; return it as extended."""
    torch.manual_seed(0)
    model, lossfunc = make().double(), nn.CrossEntropyLoss()
    for p in model.parameters():
        if p.dim() == 1:
            nn.init.uniform_(p, 0.3, 1.2)
    X, y = torch.randn(N, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 0])
    truths = [
        function(copy.deepcopy(model), lossfunc, X, y)
        for function in (
            oracle.batch_grad,
            oracle.ggn_diag,
            oracle.hessian_diag,
            oracle.hessian_blocks,
            oracle.kflr,
        )
    ]
    exts = (
        extensions.BatchGrad(),
        extensions.DiagGGNExact(),
        extensions.DiagHessian(),
        extensions.HMP(),
        extensions.KFLR(),
    )
    model, lossfunc = extend(model, **options), extend(lossfunc)
    with backpack(*exts):
        lossfunc(model(X), y).backward()
    for p, *expected in zip(oracle.trainable(model), *truths, strict=True):
        units = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
        block = p.hmp(units).reshape(-1, p.numel())
        found = [p.grad_batch, p.diag_ggn_exact, p.diag_h, block, p.kflr]
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)
    return model


class Functional(nn.Module):
    """Normalisation by functions, of data and of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        x = F.layer_norm(self.stem(x), (4,), eps=0.1)
        x = F.rms_norm(x + 1, (4,)) * F.rms_norm(self.scale, [4], eps=0.2)
        return self.head(F.rms_norm(x, (4,), self.scale).tanh())


def test_functions_become_modules() -> None:
    model = agrees(Functional, use_converter=True)
    kinds = [type(m).__name__ for m in model.children()]
    assert kinds.count("LayerNorm") == 1
    assert kinds.count("RMSNorm") == 2


def test_slopes_of_channels_need_samples_first() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (2, 3)), *second(nn.PReLU(N))[:2])
    out = extend(model)(torch.randn(N, 3))
    with backpack(extensions.BatchGrad()), pytest.raises(ValueError, match=r"PReLU.*along axis 0"):
        out.sum().backward()


def test_softmax_over_samples() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 2), nn.Softmax(0)))
    lossfunc = extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(torch.randn(N, 3)), torch.zeros(N, dtype=torch.long))
    with backpack(extensions.DiagGGNExact()), pytest.raises(ValueError, match="samples"):
        loss.backward()


@pytest.mark.parametrize(("dims", "axis"), [(1, 0), (2, 1), (3, 0), (4, 1)])
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_implicit_axis(dims: int, axis: int) -> None:
    rule: Any = derivatives_of(nn.Softmax())
    x = torch.randn(*range(2, 2 + dims), requires_grad=True)
    module = extend(nn.Softmax())
    out = module(x)
    found = rule.axis(seen(module))
    torch.testing.assert_close(out, x.softmax(found))
    assert found + dims == axis


# --------------------------------------------------------------------------------------
# Interpolation
# --------------------------------------------------------------------------------------

UPSAMPLING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nearest-1d": (lambda: nn.Upsample(scale_factor=2.5), (2, 3)),
    "nearest-2d": (lambda: nn.Upsample(size=(3, 5)), (2, 2, 3)),
    "nearest-3d": (lambda: nn.Upsample(scale_factor=(1, 2, 1.5)), (1, 2, 2, 3)),
    "nearest-exact-1d": (lambda: nn.Upsample(scale_factor=1.7, mode="nearest-exact"), (2, 4)),
    "nearest-exact-2d": (lambda: nn.Upsample(size=5, mode="nearest-exact"), (2, 2, 3)),
    "nearest-exact-3d": (lambda: nn.Upsample(size=3, mode="nearest-exact"), (1, 2, 2, 1)),
    "linear": (lambda: nn.Upsample(scale_factor=1.7, mode="linear"), (2, 4)),
    "bilinear": (lambda: nn.Upsample(scale_factor=1.6, mode="bilinear"), (2, 4, 3)),
    "bilinear-ratio": (
        lambda: nn.Upsample(scale_factor=1.6, mode="bilinear", recompute_scale_factor=True),
        (2, 4, 3),
    ),
    "bilinear-aligned": (lambda: nn.UpsamplingBilinear2d(size=(5, 4)), (2, 3, 3)),
    "bicubic": (lambda: nn.Upsample(size=(5, 4), mode="bicubic"), (1, 3, 3)),
    "trilinear": (lambda: nn.Upsample(scale_factor=1.5, mode="trilinear"), (1, 2, 4, 2)),
    "area": (lambda: nn.Upsample(scale_factor=0.5, mode="area"), (2, 4, 4)),
    "nearest": (lambda: nn.UpsamplingNearest2d(scale_factor=2), (2, 1, 2)),
}


@pytest.mark.parametrize("name", UPSAMPLING)
def test_upsampling(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors_of_rules, "ENTRIES_ON_CPU", 1)
    make, shape = UPSAMPLING[name]
    mine, automatic = pair(Probe(make, (shape,)))
    for rows in ROWS:
        u, s = draw(mine.xs[0], rows), draw(mine.out, rows)
        for method, mat in (("jac_mat_prod", u), ("jac_t_mat_prod", s)):
            mat.requires_grad_()
            results = [call.call(method, mat, subsampling=rows) for call in (mine, automatic)]
            close(*results)
            slopes = [torch.autograd.grad(r.square().sum(), mat)[0] for r in results]
            close(*slopes)


@pytest.mark.parametrize("name", ["softmax-merged", "glu-merged"])
def test_rules_of_others_for_what_only_reshapes(name: str) -> None:
    """A rule that some extension has for a class changes nothing for those that have none."""
    others = extensions.BatchGrad()
    for cls in (nn.Flatten, nn.Unflatten):
        others.set_module_extension(cls, ModuleExtension(), overwrite=True)
    agrees(NETWORKS[name])

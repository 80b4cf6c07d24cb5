"""What users write: module extensions, whole extensions, derivatives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import oracle
import pytest
import torch
from seen import seen
from torch import Tensor, einsum, nn

from backpack import backpack, extend, extensions
from backpack.core.derivatives import check_rule, derivatives_of
from backpack.core.derivatives.automatic import AutomaticDerivatives
from backpack.core.derivatives.basederivatives import (
    BaseDerivatives,
    BaseLossDerivatives,
    BaseParameterDerivatives,
)
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.elementwise import ElementwiseDerivatives, SigmoidDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.engine.backpropagation import Backpropagation, LossSource
from backpack.core.engine.propagations import (
    BatchAveraged,
    Blocks,
    ExactFactor,
    HessianFactors,
    Propagation,
)
from backpack.core.record.context import Context, context_of
from backpack.core.record.registry import _CACHE, REGISTRY, class_derivatives, register
from backpack.custom_module.permute import Permute
from backpack.extensions.backprop_extension import (
    FAIL_ERROR,
    FAIL_SILENT,
    FAIL_WARN,
    BackpropExtension,
)
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.saved_quantities import SavedQuantities
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.utils.subsampling import subsample

TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}
N = 4


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Build everything in float64, and forget what the tests register."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    registered = dict(REGISTRY)
    yield
    torch.set_default_dtype(torch.float32)
    REGISTRY.clear()
    REGISTRY.update(registered)
    _CACHE.clear()


class Scale(nn.Module):
    """The user's module: ``y = weight * x`` with one weight for each feature."""

    def __init__(self, features: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class ScaleBatchGrad(FirstOrderModuleExtension):
    """Individual gradients of ``Scale``."""

    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        assert bpQuantities is None
        return subsample(module.input0 * g_out[0], subsampling=ext.get_subsampling())


def scaled_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), Scale(), nn.Sigmoid(), nn.Linear(3, 2))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 3), torch.randint(2, (N,))


def run(model: nn.Module, *exts: Any, batch: tuple[Tensor, Tensor], **options: Any) -> list:
    loss = extend(nn.CrossEntropyLoss())(extend(model)(batch[0]), batch[1])
    with backpack(*exts, **options):
        loss.backward()
    return oracle.trainable(model)


def truth(function: Any, model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    return function(copy.deepcopy(model), nn.CrossEntropyLoss(), *batch)


def check(params: list, field: str, expected: list[Tensor]) -> None:
    for p, value in zip(params, expected, strict=True):
        torch.testing.assert_close(getattr(p, field), value, **TOLERANCE)


# ------------------------------------------------------------------ one rule, first order


def test_first_order_rule() -> None:
    model, batch = scaled_model(), data()
    ext = extensions.BatchGrad()
    ext.set_module_extension(Scale, ScaleBatchGrad())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = run(model, ext, batch=batch)
    check(params, "grad_batch", truth(oracle.batch_grad, model, batch))


def test_first_order_rule_next_to_other_extensions() -> None:
    """The rule belongs to one instance; another extension does without."""
    model, batch = scaled_model(), data()
    ext = extensions.BatchGrad()
    ext.set_module_extension(Scale, ScaleBatchGrad())
    params = run(model, ext, extensions.Variance(), batch=batch)
    check(params, "grad_batch", truth(oracle.batch_grad, model, batch))
    check(params, "variance", truth(oracle.variance, model, batch))


def test_first_order_rule_with_subsampling() -> None:
    model, batch = scaled_model(), data()
    ext = extensions.BatchGrad(subsampling=[2, 0])
    ext.set_module_extension(Scale, ScaleBatchGrad())
    assert ext.get_subsampling() == [2, 0]
    expected = [g[[2, 0]] for g in truth(oracle.batch_grad, model, batch)]
    check(run(model, ext, batch=batch), "grad_batch", expected)


def test_rule_sees_the_call_at_hand() -> None:
    """Two calls of modules of one class: each rule run has its own tensors."""
    model, batch = nn.Sequential(Scale(), nn.Tanh(), Scale(), nn.Linear(3, 2)), data()
    ext = extensions.BatchGrad()
    ext.set_module_extension(Scale, ScaleBatchGrad())
    params = run(model, ext, batch=batch)
    check(params, "grad_batch", truth(oracle.batch_grad, model, batch))
    assert not any({"input0", "output"} & set(vars(m)) for m in model)


def test_rule_for_a_module_that_is_called_twice_is_refused() -> None:
    scale = Scale()
    model, batch = nn.Sequential(scale, nn.Tanh(), scale, nn.Linear(3, 2)), data()
    ext = extensions.BatchGrad()
    ext.set_module_extension(Scale, ScaleBatchGrad())
    with pytest.raises(NotImplementedError, match="several times"):
        run(model, ext, batch=batch)
    assert not any(vars(p) for p in model.parameters())


def test_rule_leaves_frozen_parameters_alone() -> None:
    model, batch = scaled_model(), data()
    model[1].weight.requires_grad_(False)
    ext = extensions.BatchGrad()
    ext.set_module_extension(Scale, ScaleBatchGrad())
    run(model, ext, batch=batch)
    assert not vars(model[1].weight)


def test_rule_obeys_backward_inputs() -> None:
    model, batch = scaled_model(), data()
    ext = extensions.BatchGrad()
    ext.set_module_extension(Scale, ScaleBatchGrad())
    loss = extend(nn.CrossEntropyLoss())(extend(model)(batch[0]), batch[1])
    with backpack(ext):
        loss.backward(inputs=[model[0].weight])
    assert hasattr(model[0].weight, "grad_batch")
    assert not vars(model[1].weight)


def test_overwrite_replaces_built_in_support() -> None:
    class Constant(FirstOrderModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["weight", "bias"])

        def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bp: Any) -> Tensor:
            return torch.full((N, 2, 3), 1.0)

        def bias(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bp: Any) -> Tensor:
            return torch.full((N, 2), 2.0)

    ext, model = extensions.BatchGrad(), nn.Linear(3, 2)
    with pytest.raises(ValueError, match="overwrite=True"):
        ext.set_module_extension(nn.Linear, Constant())
    ext.set_module_extension(nn.Linear, Constant(), overwrite=True)
    run(model, ext, batch=data())
    assert (model.weight.grad_batch == 1).all()
    assert (model.bias.grad_batch == 2).all()


@pytest.mark.parametrize(
    "ext", [extensions.BatchGrad, extensions.DiagGGNExact, extensions.KFAC, extensions.KFRA]
)
def test_second_registration_is_refused(ext: Any) -> None:
    instance = ext()
    instance.set_module_extension(Scale, ModuleExtension())
    with pytest.raises(ValueError, match=r"Scale.*overwrite=True"):
        instance.set_module_extension(Scale, ModuleExtension())
    instance.set_module_extension(Scale, ModuleExtension(), overwrite=True)
    with pytest.raises(ValueError, match=r"Sigmoid.*overwrite=True"):
        instance.set_module_extension(nn.Sigmoid, ModuleExtension())
    ext().set_module_extension(Scale, ModuleExtension())  # another instance knows nothing of it


def test_parameter_without_a_method() -> None:
    class Forgetful(ModuleExtension):
        def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> int:
            return 0

    Forgetful(params=["weight"])
    Forgetful()
    with pytest.raises(NotImplementedError, match=r"Forgetful.*bias"):
        Forgetful(params=["weight", "bias"])


def test_check_hyperparameters() -> None:
    class Picky(ScaleBatchGrad):
        def check_hyperparameters_module_extension(
            self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
        ) -> None:
            raise NotImplementedError("three features are too many")

    ext, model = extensions.BatchGrad(), scaled_model()
    ext.set_module_extension(Scale, Picky())
    with pytest.raises(NotImplementedError, match="too many"):
        run(model, ext, batch=data())
    assert not any(vars(p) for p in model.parameters())


class GradientsSeen(FirstOrderModuleExtension):
    """Remembers what a rule is given."""

    def __init__(self) -> None:
        super().__init__(params=[])
        self.seen: dict[nn.Module, tuple[Any, Any]] = {}

    def check_hyperparameters_module_extension(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> None:
        self.seen[module] = tuple(g_inp), tuple(g_out)


@pytest.mark.parametrize(
    "middle", [nn.Tanh(), nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 3)], ids=str
)
def test_rules_are_given_the_gradients(middle: nn.Module) -> None:
    model, batch = nn.Sequential(nn.Linear(3, 3), middle, nn.Linear(3, 2)).double(), data()
    rule, ext = GradientsSeen(), FirstOrderBackpropExtension("none")
    ext.set_module_extension(type(middle), rule)
    h = extend(model)[0](batch[0])
    h.retain_grad()
    out = middle(h)
    out.retain_grad()
    state = copy.deepcopy(middle.state_dict())
    loss = nn.CrossEntropyLoss()(model[2](out), batch[1])
    with backpack(ext), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss.backward()
    g_inp, g_out = rule.seen[middle]
    torch.testing.assert_close(g_out[0], out.grad)
    torch.testing.assert_close(g_inp[0], h.grad)
    for name, value in middle.state_dict().items():  # reading gradients changes no buffer
        assert torch.equal(value, state[name])


# ------------------------------------------------------------------ one rule, second order


class ScaleDerivatives(BaseDerivatives):
    """Derivatives of ``Scale``."""

    params = ("weight",)

    def _jac_mat_prod(self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any) -> Any:
        return mat * module.weight

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any
    ) -> Any:
        return mat * module.weight

    def _weight_jac_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any
    ) -> Any:
        return einsum("vi,ni->vni", mat, subsample(module.input0, subsampling=subsampling))

    def _weight_jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Any, sum_batch: bool, subsampling: Any
    ) -> Any:
        product = mat * subsample(module.input0, subsampling=subsampling)
        return product.sum(1) if sum_batch else product


class ScaleDiagGGN(MatToJacMat):
    """The diagonal of the GGN at ``Scale``."""

    def __init__(self, per_sample: bool = False) -> None:
        super().__init__(ScaleDerivatives(), params=["weight"])
        self.per_sample = per_sample

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        squares = (bpQuantities * module.input0).square().sum(0)
        return squares if self.per_sample else squares.sum(0)


def test_second_order_rule() -> None:
    model, batch = scaled_model(), data()
    ext = extensions.DiagGGNExact()
    ext.set_module_extension(Scale, ScaleDiagGGN())
    params = run(model, ext, batch=batch)
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, model, batch))


class Bent(Scale):
    """``y = weight x³``: its second derivative is diagonal."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x**3


class BentDerivativesFor171(BaseParameterDerivatives):
    """In the form of release 1.7.1: few methods know of ``subsampling``, and none is in a list."""

    def hessian_is_zero(self, module: Any) -> bool:
        return False

    def hessian_is_diagonal(self, module: Any) -> bool:
        return True

    def hessian_diagonal(self, module: Any, g_in: Any, g_out: Any) -> Any:
        return 6 * module.input0 * module.weight * g_out[0]

    def _residual_mat_prod(self, module: Any, g_inp: Any, g_out: Any, mat: Any) -> Any:
        return mat * self.hessian_diagonal(module, g_inp, g_out)

    def _jac_mat_prod(self, module: Any, g_inp: Any, g_out: Any, mat: Any) -> Any:
        return mat * 3 * module.input0**2 * module.weight

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any = None
    ) -> Any:
        return mat * 3 * subsample(module.input0, subsampling=subsampling) ** 2 * module.weight

    def _weight_jac_mat_prod(self, module: Any, g_inp: Any, g_out: Any, mat: Any) -> Any:
        return mat.unsqueeze(1) * module.input0**3

    def _weight_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Any,
        g_out: Any,
        mat: Any,
        sum_batch: bool = True,
        subsampling: Any = None,
    ) -> Any:
        product = mat * subsample(module.input0, subsampling=subsampling) ** 3
        return product.sum(1) if sum_batch else product


class BentProducts(MatToJacMat):
    """Squares what such derivatives return."""

    def __init__(self) -> None:
        super().__init__(BentDerivativesFor171(), params=["weight"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        products = self.derivatives.param_mjp(
            "weight", module, g_inp, g_out, bpQuantities, sum_batch=False
        )
        return products.square().sum((0, 1))


def bent_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), Bent(), nn.Sigmoid(), nn.Linear(3, 2))


def test_derivatives_for_the_last_release() -> None:
    """In a module extension, and registered for every extension."""
    model, batch = bent_model(), data()
    ext = extensions.DiagGGNExact()
    ext.set_module_extension(Bent, BentProducts())
    expected = truth(oracle.ggn_diag, model, batch)
    check(run(model, ext, batch=batch), "diag_ggn_exact", expected)
    register(Bent)(BentDerivativesFor171)
    check_rule(Bent(), batch[0])
    check(run(model, extensions.DiagGGNExact(), batch=batch), "diag_ggn_exact", expected)


@pytest.mark.parametrize("rows", [None, [3, 1]])
def test_products_of_derivatives_for_the_last_release(rows: list[int] | None) -> None:
    """Methods that are not told the rows see the tensors of these rows alone."""
    register(Bent)(BentDerivativesFor171)
    model, (X, y) = bent_model(), data()
    p, loss, units = model[0].weight, nn.CrossEntropyLoss(reduction="sum"), torch.eye(9)
    chosen = slice(None) if rows is None else rows
    value = loss(model(X[chosen]), y[chosen])
    (gradient,) = torch.autograd.grad(value, p, create_graph=True)
    second = [torch.autograd.grad(g, p, retain_graph=True)[0] for g in gradient.flatten()]
    hessian = torch.stack(second).reshape(9, 9)
    ggn = oracle.ggn_diag(copy.deepcopy(model), loss, X[chosen], y[chosen])[0].flatten()
    extend(model)
    with backpack(extensions.GGNMP(subsampling=rows), extensions.DiagHessian(subsampling=rows)):
        extend(loss)(model(X), y).backward()
    torch.testing.assert_close(p.diag_h.flatten(), hessian.diagonal(), **TOLERANCE)
    block = p.ggnmp(units.reshape(9, 3, 3)).reshape(9, 9)
    torch.testing.assert_close(block.diagonal(), ggn, **TOLERANCE)
    if rows is None:
        with backpack(extensions.HMP()):
            extend(loss)(model(X), y).backward()
        block = p.hmp(units.reshape(9, 3, 3)).reshape(9, 9)
        torch.testing.assert_close(block, hessian, **TOLERANCE)


class Quartic(nn.Module):
    """``mean_n sum_i (x_ni - y_ni)⁴``."""

    reduction = "mean"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x - y) ** 4).sum(1).mean()


class QuarticDerivativesFor171(BaseLossDerivatives):
    """In the form of release 1.7.1: methods are given gradients, some know of ``subsampling``."""

    def hessian_is_psd(self) -> bool:  # type: ignore[override]  # as 1.7.1 had it
        return True

    def _second(self, module: Any) -> Tensor:
        return 12 / N * (module.input0 - module.input1) ** 2

    def _sqrt_hessian(self, module: Any, g_inp: Any, g_out: Any, subsampling: Any = None) -> Tensor:
        second = subsample(self._second(module), subsampling=subsampling)
        return torch.diag_embed(second.sqrt()).movedim(-1, 0)

    def _sqrt_hessian_sampled(
        self, module: Any, g_inp: Any, g_out: Any, mc_samples: int = 1, subsampling: Any = None
    ) -> Tensor:
        root = subsample(self._second(module), subsampling=subsampling).sqrt()
        signs = torch.randint(2, (mc_samples, *root.shape)).to(root) * 2 - 1
        return root * signs / mc_samples**0.5

    def _make_hessian_mat_prod(self, module: Any, g_inp: Any, g_out: Any) -> Any:
        second = self._second(module)
        return lambda mat: mat * second

    def _sum_hessian(self, module: Any, g_inp: Any, g_out: Any) -> Tensor:
        return self._second(module).sum(0).diag()


@pytest.mark.parametrize("rows", [None, [3, 1]])
def test_loss_for_the_last_release(rows: list[int] | None) -> None:
    """Its rule serves every extension; for some samples only where it can be asked for them."""
    register(Quartic)(QuarticDerivativesFor171)
    model, X, y = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), *torch.rand(2, N, 3)
    p, chosen = model[0].weight, slice(None) if rows is None else rows
    y = y[:, :1]
    f = model(X[chosen])
    loss = ((f - y[chosen]) ** 4).sum() / N
    (gradient,) = torch.autograd.grad(loss, p, create_graph=True)
    hessian = torch.stack(
        [torch.autograd.grad(g, p, retain_graph=True)[0].flatten() for g in gradient.flatten()]
    )
    jacobian = torch.stack(
        [torch.autograd.grad(one, p, retain_graph=True)[0].flatten() for one in f.flatten()]
    )
    second = 12 / N * (f - y[chosen]).detach() ** 2
    ggn = jacobian.T @ (second * jacobian)

    def run_with(*names: str) -> None:
        exts = [getattr(extensions, name)(subsampling=rows) for name in names]
        with backpack(*exts):
            extend(Quartic())(extend(model)(X), y).backward()

    run_with("DiagGGNExact", "DiagGGNMC", "DiagHessian")
    torch.testing.assert_close(p.diag_ggn_exact.flatten(), ggn.diagonal(), **TOLERANCE)
    torch.testing.assert_close(p.diag_ggn_mc.flatten(), ggn.diagonal(), **TOLERANCE)
    torch.testing.assert_close(p.diag_h.flatten(), hessian.diagonal(), **TOLERANCE)
    if rows is not None:
        for name in ("GGNMP", "HMP", "KFRA"):
            with pytest.raises(NotImplementedError, match="has no argument 'subsampling'"):
                run_with(name)
                getattr(p, name.lower())(torch.rand(2, 3))
        return
    run_with("GGNMP", "HMP", "KFRA")
    units = torch.eye(6)
    block = p.ggnmp(units.reshape(6, 2, 3)).reshape(6, 6)
    torch.testing.assert_close(block, ggn, **TOLERANCE)
    block = p.hmp(units.reshape(6, 2, 3)).reshape(6, 6)
    torch.testing.assert_close(block, hessian, **TOLERANCE)
    torch.testing.assert_close(model[2].bias.kfra[0], second.sum(0).diag(), **TOLERANCE)


class Twice(nn.Linear):
    """A linear layer whose output is doubled."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class TwiceDerivatives(LinearDerivatives):
    """In the form of 1.7.1, with the products of the base class, which are told no rows."""

    def _jac_t_mat_prod(self, module: Any, g_inp: Any, g_out: Any, mat: Any) -> Any:
        return 2 * super()._jac_t_mat_prod(module, g_inp, g_out, mat)

    def _weight_jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Any, sum_batch: bool = True
    ) -> Any:
        return 2 * super()._weight_jac_t_mat_prod(module, g_inp, g_out, mat, sum_batch)

    def _bias_jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Any, sum_batch: bool = True
    ) -> Any:
        each = [  # in a loop over the samples it sees
            super(TwiceDerivatives, self)._bias_jac_t_mat_prod(
                module, g_inp, g_out, mat[:, n : n + 1], sum_batch=False, subsampling=[n]
            )
            for n in range(len(module.input0))
        ]
        product = 2 * torch.cat(each, 1)
        return product.sum(1) if sum_batch else product


class Cube(nn.Module):
    """``y = x³``; a child has the name of what is shown to rules."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x**3)


class CubeDerivatives(ElementwiseDerivatives):
    """Activations had derivatives in this form."""

    def df(self, module: Any, g_inp: Any, g_out: Any, subsampling: Any = None) -> Any:
        return 3 * subsample(module.input0, subsampling=subsampling) ** 2

    def d2f(self, module: Any, g_inp: Any, g_out: Any) -> Any:
        return 6 * module.input0

    def hessian_diagonal(self, module: Any, g_inp: Any, g_out: Any) -> Any:
        return super().hessian_diagonal(module, g_inp, g_out)


class Blend(Scale):
    """``y = weight * x * factors``, which have no samples."""

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        return self.weight * x * factors


class BlendDerivatives(BaseParameterDerivatives):
    """One method is told no rows, the other takes all that it is given."""

    def _jac_t_mat_prod(self, module: Any, g_inp: Any, g_out: Any, mat: Any) -> Any:
        return mat * module.weight * module.input1, None

    def _weight_jac_t_mat_prod(self, module: Any, *arguments: Any) -> Any:
        *_, mat, sum_batch, rows = arguments
        product = mat * subsample(module.input0, subsampling=rows) * module.input1
        return product.sum(1) if sum_batch else product


class Blended(nn.Module):
    """Reads factors of the shape that is given."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.first, self.blend, self.last = nn.Linear(3, 3), Blend(), nn.Linear(3, 2)
        self.register_buffer("factors", torch.rand(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blend(self.first(x), self.factors))


@pytest.mark.parametrize("rows", [None, [3, 1], [3, 2, 1, 0], [2]], ids=str)
@pytest.mark.parametrize("kind", ["inherited", "activation", "number", "factors", "one row"])
def test_methods_that_are_not_told_the_rows(kind: str, rows: list[int] | None) -> None:
    """What they inherit is about the rows that they see; what has no samples is shown whole."""
    layers = {"inherited": Twice(3, 3), "activation": Cube()}
    shapes: dict[str, tuple[int, ...]] = {"number": (), "factors": (3,), "one row": (1, 3)}
    model: nn.Module = Blended(*shapes[kind]) if kind in shapes else nn.Sequential()
    if kind in layers:
        model = nn.Sequential(nn.Linear(3, 3), layers[kind], nn.Sigmoid(), nn.Linear(3, 2))
    register(Twice)(TwiceDerivatives)
    register(Cube)(CubeDerivatives)
    register(Blend)(BlendDerivatives)
    (X, y), loss = data(), nn.CrossEntropyLoss(reduction="sum")
    chosen = slice(None) if rows is None else rows
    batch = X[chosen], y[chosen]
    ggn = oracle.ggn_diag(copy.deepcopy(model), loss, *batch)
    hessian = oracle.hessian_diag(copy.deepcopy(model), loss, *batch)
    exts = [extensions.DiagGGNExact(subsampling=rows), extensions.DiagHessian(subsampling=rows)]
    for ext, expected in zip(exts, (ggn, hessian), strict=True):
        with backpack(ext):
            extend(loss)(extend(model)(X), y).backward()
        check(oracle.trainable(model), ext.savefield, expected)
    shown = {"input0", "input1", "output"}
    assert not any(shown & set(vars(m)) for m in model.modules())


class CubeOfChild(Cube):
    """``y = tanh(x³)``, of which a child computes the last function."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Tanh()


class Passing(nn.Identity):
    """Returns its input."""


class CubeOfChildDerivatives(ElementwiseDerivatives):
    def df(self, c: Any) -> Any:
        return (1 - (c.x**3).tanh() ** 2) * 3 * c.x**2

    def d2f(self, c: Any) -> Any:
        y = (c.x**3).tanh()
        return (1 - y**2) * (6 * c.x - 18 * y * c.x**4)


@pytest.mark.parametrize("child", ["curved", "with a rule"])
def test_parts_of_a_module_with_a_rule_have_no_curvature_of_their_own(child: str) -> None:
    """It was added to that of the module, which includes it."""
    module = Cube() if child == "with a rule" else CubeOfChild()
    register(Cube)(CubeDerivatives)
    register(CubeOfChild)(CubeOfChildDerivatives)
    if child == "with a rule":  # of some extension, which need not take part
        module.output = Passing()
        extensions.BatchGrad().set_module_extension(Passing, ScaleBatchGrad(), overwrite=True)
    model = nn.Sequential(nn.Linear(3, 3), module, nn.Sigmoid(), nn.Linear(3, 2))
    batch, exts = data(), [extensions.DiagHessian(), extensions.BatchDiagHessian()]
    blocks = truth(oracle.hessian_blocks, model, batch)
    each = truth(oracle.batch_hessian_diag, model, batch)
    params = run(model, *exts, extensions.HMP(), batch=batch)
    check(params, "diag_h_batch", each)
    check(params, "diag_h", [diagonal.sum(0) for diagonal in each])
    for p, block in zip(params, blocks, strict=True):
        units = torch.eye(p.numel()).reshape(-1, *p.shape)
        torch.testing.assert_close(p.hmp(units).flatten(1), block, **TOLERANCE)


class WithMemory(nn.Module):
    """Returns what it has read as well, as the cells of recurrent networks do."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(x + h), x * h, h


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)
        self.step = WithMemory()

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        out, product, h = self.step(z, self.act(z))
        out, other, h = self.step(out, h)
        return self.last(out + product * other + h)


def test_what_returns_an_input_has_not_computed_it() -> None:
    """What has is no part of it: its curvature was left out."""
    model, batch = Remembering(), data()
    expected = truth(oracle.hessian_diag, model, batch)
    check(run(model, extensions.DiagHessian(), batch=batch), "diag_h", expected)


class SquareThenLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x**2)


class SquareThenLayerDerivatives(BaseDerivatives):
    def vjp(self, c: Any, v: Any) -> Any:
        return (v @ c.params["layer.weight"]) * 2 * c.x


def test_a_part_with_parameters_that_returns_the_output_is_refused() -> None:
    """Nothing arrived at its parameters, which had no results, without a word."""
    register(SquareThenLayer)(SquareThenLayerDerivatives)
    model = nn.Sequential(nn.Linear(3, 3), SquareThenLayer(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"is a part of '1' .SquareThenLayer.*includes_children"):
        run(model, extensions.DiagGGNExact(), batch=data())


class DoubledLoss(nn.CrossEntropyLoss):
    pass


class DoubledDerivatives(CrossEntropyLossDerivatives):
    def make_hessian_mat_prod(self, module: Any, g_inp: Any, g_out: Any) -> Any:
        product = super().make_hessian_mat_prod(module, g_inp, g_out)
        return lambda mat: 2 * product(mat)


def test_product_of_a_loss_that_calls_the_one_of_its_base_class() -> None:
    """The one of the base class does not come back to it."""
    register(DoubledLoss)(DoubledDerivatives)
    model, (X, y), products = nn.Linear(3, 3), data(), []
    for lossfunc in (DoubledLoss(), nn.CrossEntropyLoss()):
        loss = extend(lossfunc)(extend(model)(X), y)
        with backpack(extensions.GGNMP()):
            loss.backward()
        products.append(model.weight.ggnmp(model.weight.detach()))
    torch.testing.assert_close(products[0], 2 * products[1], **TOLERANCE)


class DoubledRoots(CrossEntropyLossDerivatives):
    """Calls those of its base class as in release 1.7.1."""

    def _sqrt_hessian(self, module: Any, g_inp: Any, g_out: Any, subsampling: Any = None) -> Any:
        return 2 * super()._sqrt_hessian(module, g_inp, g_out, subsampling)

    def _sqrt_hessian_sampled(
        self, module: Any, g_inp: Any, g_out: Any, mc_samples: int = 1, subsampling: Any = None
    ) -> Any:
        return 2 * super()._sqrt_hessian_sampled(module, g_inp, g_out, mc_samples, subsampling)


@pytest.mark.parametrize("rows", [None, [3, 1], [3, 1, 0, 2]])
def test_roots_of_a_loss_that_call_those_of_its_base_class(rows: list[int] | None) -> None:
    """They are given the gradients, and the rows behind them."""
    register(DoubledLoss)(DoubledRoots)
    model, (X, y), results = nn.Linear(3, 3), data(), []
    for lossfunc in (DoubledLoss(), nn.CrossEntropyLoss()):
        loss = extend(lossfunc)(extend(model)(X), y)
        torch.manual_seed(0)
        exts = extensions.SqrtGGNExact(subsampling=rows), extensions.SqrtGGNMC(2, subsampling=rows)
        with backpack(*exts):
            loss.backward()
        results.append((model.weight.sqrt_ggn_exact.clone(), model.weight.sqrt_ggn_mc.clone()))
    for doubled, usual in zip(*results, strict=True):
        torch.testing.assert_close(doubled, 2 * usual, **TOLERANCE)


def test_second_order_rule_next_to_a_built_in_extension() -> None:
    """Both extensions propagate the same; one of them alone has the rule."""
    model, batch = scaled_model(), data()
    one, other = extensions.DiagGGNExact(), extensions.BatchDiagGGNExact()
    one.set_module_extension(Scale, ScaleDiagGGN())
    params = run(model, one, other, batch=batch)
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, model, batch))
    check(params, "diag_ggn_exact_batch", truth(oracle.batch_ggn_diag, model, batch))
    other.set_module_extension(Scale, ScaleDiagGGN(per_sample=True))
    params = run(model, one, other, batch=batch)
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, model, batch))
    check(params, "diag_ggn_exact_batch", truth(oracle.batch_ggn_diag, model, batch))


class Cubed(nn.Module):
    """A user's module without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3


class CubedRule(ModuleExtension):
    """Passes columns on by hand."""

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Tensor:
        return bpQuantities * 3 * module.input0**2


class CubedByView(CubedRule):
    """Merges columns and samples as tensors in one piece allow."""

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Tensor:
        rows = bpQuantities.view(-1, *module.output.shape[1:])
        return super().backpropagate(ext, module, g_inp, g_out, rows.view_as(bpQuantities))


def test_columns_for_a_rule_are_in_one_piece() -> None:
    """Also in front of a pooling module, which leaves them in another order."""
    layers = [nn.Conv2d(1, 2, 2), Cubed(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3)]
    model, batch = nn.Sequential(*layers), (torch.rand(N, 1, 3, 3), torch.arange(N) % 3)
    ext = extensions.DiagGGNExact()
    ext.set_module_extension(Cubed, CubedByView())
    params = run(model, ext, batch=batch)
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, model, batch))


@pytest.mark.parametrize("field", ["diag_ggn_exact", "sqrt_ggn_exact", "kflr", "diag_ggn_mc"])
def test_second_order_rule_without_parameters(field: str) -> None:
    make = {
        "diag_ggn_exact": extensions.DiagGGNExact,
        "sqrt_ggn_exact": extensions.SqrtGGNExact,
        "kflr": extensions.KFLR,
        "diag_ggn_mc": extensions.DiagGGNMC,
    }[field]
    model, batch = nn.Sequential(nn.Linear(3, 3), Cubed(), nn.Linear(3, 2)), data()
    ext = make()
    ext.set_module_extension(Cubed, CubedRule())
    torch.manual_seed(1)
    params = run(model, ext, batch=batch)
    if field == "diag_ggn_exact":
        check(params, field, truth(oracle.ggn_diag, model, batch))
    elif field == "sqrt_ggn_exact":
        for p, block in zip(params, truth(oracle.ggn_blocks, model, batch), strict=True):
            flat = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)
            torch.testing.assert_close(flat.T @ flat, block, **TOLERANCE)
    elif field == "kflr":
        for p, factors in zip(params, truth(oracle.kflr, model, batch), strict=True):
            torch.testing.assert_close(p.kflr, factors, **TOLERANCE)
    else:
        found = [p.diag_ggn_mc.clone() for p in params]
        register(Cubed)(CubedDerivatives)
        torch.manual_seed(1)
        for p, value in zip(run(model, make(), batch=batch), found, strict=True):
            torch.testing.assert_close(p.diag_ggn_mc, value)


class CubedDerivatives(BaseDerivatives):
    """Derivatives of ``Cubed``."""

    def hessian_is_zero(self, module: Any) -> bool:
        return False

    def hessian_is_diagonal(self, module: Any) -> bool:
        return True

    def _jac_mat_prod(self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any) -> Any:
        return mat * 3 * subsample(module.input0, subsampling=subsampling) ** 2

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any
    ) -> Any:
        return mat * 3 * subsample(module.input0, subsampling=subsampling) ** 2

    def _hessian_diagonal(self, module: Any, g_inp: Any, g_out: Any, subsampling: Any) -> Any:
        x, g = (subsample(t, subsampling=subsampling) for t in (module.input0, g_out[0]))
        return 6 * x * g


# ------------------------------------------------------------------ a whole extension


class UserDiagGGN(SecondOrderBackpropExtension):
    """A complete second-order extension: its own quantity, rules and accumulation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            "user_ggn",
            module_exts={
                nn.CrossEntropyLoss: LossRule(),
                nn.Sigmoid: MatToJacMat(SigmoidDerivatives()),
                nn.Linear: LinearRule(),
            },
            **options,
        )
        self.merged = 0

    def accumulate_backpropagated_quantities(self, existing: Tensor, other: Tensor) -> Tensor:
        self.merged += 1
        return existing + other


class LossRule(ModuleExtension):
    """Starts with the factor of the loss Hessian."""

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Tensor:
        assert bpQuantities is None
        return CrossEntropyLossDerivatives().sqrt_hessian(module, g_inp, g_out)


class LinearRule(MatToJacMat):
    """Squares products with the parameters' Jacobians."""

    def __init__(self) -> None:
        super().__init__(LinearDerivatives(), params=["weight", "bias"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        return einsum("vno,ni->oi", bpQuantities**2, module.input0**2)

    def bias(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        return (bpQuantities**2).sum((0, 1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))


def test_whole_extension() -> None:
    model, batch, ext = mlp(), data(), UserDiagGGN()
    params = run(model, ext, extensions.DiagGGNExact(), batch=batch)
    check(params, "user_ggn", truth(oracle.ggn_diag, model, batch))
    check(params, "user_ggn", [p.diag_ggn_exact for p in params])
    assert ext.merged == 0


@pytest.mark.parametrize("is_tied", [True, False])
def test_whole_extension_refuses_a_parameter_that_is_used_twice(is_tied: bool) -> None:
    first = nn.Linear(3, 3)
    second = nn.Linear(3, 3) if is_tied else first
    second.weight = first.weight
    model = nn.Sequential(first, nn.Sigmoid(), second)
    with pytest.raises(NotImplementedError, match="several times"):
        run(model, UserDiagGGN(), batch=data())
    assert not any(vars(p) for p in model.parameters())


class Branches(nn.Module):
    """One tensor with two consumers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 4)
        self.last, self.add = nn.Linear(4, 2), Add()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.add(self.left(h), self.right(h)))


class Add(nn.Module):
    """A module with two inputs."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one + 2 * other


class AddRule(ModuleExtension):
    """Gives each input its part."""

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> tuple[Tensor, Tensor]:
        assert module.input0.shape == module.input1.shape
        return bpQuantities, 2 * bpQuantities


def test_whole_extension_over_branches() -> None:
    model, batch, ext = Branches(), data(), UserDiagGGN()
    ext.set_module_extension(Add, AddRule())
    params = run(model, ext, batch=batch)
    check(params, "user_ggn", truth(oracle.ggn_diag, model, batch))
    assert ext.merged == 1


def test_whole_extension_runs_again() -> None:
    model, ext = mlp(), UserDiagGGN()
    for _ in range(2):
        batch = data()
        check(run(model, ext, batch=batch), "user_ggn", truth(oracle.ggn_diag, model, batch))


def test_whole_extension_lacks_a_rule() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(NotImplementedError, match=r"UserDiagGGN.*Tanh"):
        run(model, UserDiagGGN(), batch=data())
    assert not any(vars(p) for p in model.parameters())


class Images(nn.Module):
    """A model with a reshape that is not a module's."""

    def __init__(self, reshape: nn.Module) -> None:
        super().__init__()
        self.first, self.reshape, self.last = nn.Linear(3, 4), reshape, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.reshape(self.first(x).view(-1, 2, 2)))


class ListRule(MatToJacMat):
    """Sums over the tensors in a list."""

    def __init__(self) -> None:
        super().__init__(LinearDerivatives(), params=["weight"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        return sum(einsum("vno,ni->oi", mat**2, module.input0**2) for mat in bpQuantities)


class ListLossRule(ModuleExtension):
    """Starts with a list of factors."""

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> list[Tensor]:
        return list(CrossEntropyLossDerivatives().sqrt_hessian(module, g_inp, g_out).split(1))


def test_whole_extension_with_lists_through_reshapes() -> None:
    model, batch = Images(nn.Flatten()), data()
    rules = {nn.CrossEntropyLoss: ListLossRule(), nn.Linear: ListRule()}
    params = run(model, SecondOrderBackpropExtension("listed", module_exts=rules), batch=batch)
    expected = truth(oracle.ggn_diag, model, batch)
    for p, value in zip(params, expected, strict=True):
        if p.dim() == 2:
            torch.testing.assert_close(p.listed, value, **TOLERANCE)


def test_whole_first_order_extension() -> None:
    class Norms(FirstOrderBackpropExtension):
        def __init__(self) -> None:
            super().__init__("norm", module_exts={nn.Linear: NormRule()}, fail_mode=FAIL_ERROR)

    class NormRule(FirstOrderModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["bias"])

        def bias(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
            return g_out[0].norm(dim=1)

    model, batch = mlp(), data()
    run(model, Norms(), batch=batch)
    expected = truth(oracle.batch_l2, model, batch)
    torch.testing.assert_close(model[0].bias.norm ** 2, expected[1])
    torch.testing.assert_close(model[2].bias.norm ** 2, expected[3])
    assert not vars(model[0].weight)


# ------------------------------------------------------------------ one class, all extensions


def test_registered_derivatives_serve_every_extension() -> None:
    register(Scale)(ScaleDerivatives)
    register(Cubed)(CubedDerivatives)
    model = nn.Sequential(nn.Linear(3, 3), Scale(), Cubed(), nn.Linear(3, 2))
    batch = data()
    tensors = {
        extensions.BatchGrad(): oracle.batch_grad,
        extensions.BatchL2Grad(): oracle.batch_l2,
        extensions.SumGradSquared(): oracle.sum_grad_squared,
        extensions.Variance(): oracle.variance,
        extensions.DiagGGNExact(): oracle.ggn_diag,
        extensions.BatchDiagGGNExact(): oracle.batch_ggn_diag,
        extensions.DiagHessian(): oracle.hessian_diag,
        extensions.BatchDiagHessian(): oracle.batch_hessian_diag,
    }
    lists = {extensions.KFLR(): oracle.kflr, extensions.KFRA(): oracle.kfra}
    blocks = {
        extensions.GGNMP(): oracle.ggn_blocks,
        extensions.HMP(): oracle.hessian_blocks,
        extensions.PCHMP(modify="abs"): lambda *a: oracle.pch_blocks(*a, modify="abs"),
    }
    sampled = [
        extensions.DiagGGNMC(mc_samples=3),
        extensions.BatchDiagGGNMC(mc_samples=3),
        extensions.SqrtGGNMC(mc_samples=3),
        extensions.KFAC(mc_samples=3),
    ]
    roots = extensions.SqrtGGNExact()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = run(model, *tensors, *lists, *blocks, *sampled, roots, batch=batch)
    for ext, function in tensors.items():
        check(params, ext.savefield, truth(function, model, batch))
    for ext, function in lists.items():
        for p, factors in zip(params, truth(function, model, batch), strict=True):
            torch.testing.assert_close(getattr(p, ext.savefield), factors, **TOLERANCE)
    for ext, function in blocks.items():
        for p, block in zip(params, truth(function, model, batch), strict=True):
            units = torch.eye(p.numel()).reshape(-1, *p.shape)
            product = getattr(p, ext.savefield)(units).flatten(1)
            torch.testing.assert_close(product, block, **TOLERANCE)
    for p, block in zip(params, truth(oracle.ggn_blocks, model, batch), strict=True):
        flat = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)
        torch.testing.assert_close(flat.T @ flat, block, **TOLERANCE)
        squares = p.sqrt_ggn_mc.square()
        torch.testing.assert_close(p.diag_ggn_mc, squares.sum((0, 1)))
        torch.testing.assert_close(p.diag_ggn_mc_batch, squares.sum(0))
        if len(p.kfac) == 1:
            flat = p.sqrt_ggn_mc.flatten(2).flatten(0, 1)
            torch.testing.assert_close(p.kfac[0], flat.T @ flat)


CURVED = ("hessian_is_zero", "hessian_is_diagonal")
SWAPPED = {
    "_jac_mat_prod": ["GGNMP", "HMP", "PCHMP"],
    "_jac_t_mat_prod": ["DiagGGNExact", "DiagHessian", "HMP"],
    "_weight_jac_mat_prod": ["GGNMP", "HMP", "PCHMP"],
    "_weight_jac_t_mat_prod": ["BatchGrad", "DiagGGNExact", "DiagHessian"],
    "_hessian_diagonal": ["DiagHessian", "BatchDiagHessian", "HMP", "PCHMP"],
    "hessian_diagonal": ["DiagHessian", "BatchDiagHessian", "HMP", "PCHMP"],
    "_residual_mat_prod": ["HMP"],
}


@pytest.mark.parametrize(
    "method, name, kind",
    [
        (method, name, kind)
        for method, names in SWAPPED.items()
        for name in names
        for kind in ("swapped", "None", "missing")
        if kind != "missing" or "jac_t" in method  # there are bodies for the others
    ],
)
def test_what_derivatives_return_has_a_shape(method: str, name: str, kind: str) -> None:
    """Its last axes swapped (as many entries), or a forgotten return; or no such method."""

    class Both(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x**3

    class Right(BaseDerivatives):
        params = ("weight",)
        hessian_is_zero = CubedDerivatives.hessian_is_zero
        hessian_is_diagonal = CubedDerivatives.hessian_is_diagonal

        def _jac_mat_prod(
            self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any
        ) -> Any:
            return mat * 3 * subsample(module.input0, subsampling=subsampling) ** 2 * module.weight

        _jac_t_mat_prod = _jac_mat_prod

        def _weight_jac_mat_prod(
            self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any
        ) -> Any:
            return mat.unsqueeze(1) * subsample(module.input0, subsampling=subsampling) ** 3

        def _weight_jac_t_mat_prod(
            self, module: Any, g_inp: Any, g_out: Any, mat: Any, sum_batch: bool, subsampling: Any
        ) -> Any:
            product = mat * subsample(module.input0, subsampling=subsampling) ** 3
            return product.sum(1) if sum_batch else product

        def _hessian_diagonal(self, module: Any, g_inp: Any, g_out: Any, subsampling: Any) -> Any:
            x, g = (subsample(t, subsampling=subsampling) for t in (module.input0, g_out[0]))
            return 6 * x * g * module.weight

    def wrong(self: Any, *args: Any, **options: Any) -> Any:
        found = getattr(Right, method)(self, *args, **options)
        return found.transpose(-1, -2) if kind == "swapped" else None

    kept = {
        name: value for name, value in vars(Right).items() if name in SWAPPED and name != method
    }
    kept |= {name: vars(Right)[name] for name in ("params", *CURVED)}
    base, own = (Right, {method: wrong}) if kind != "missing" else (BaseDerivatives, kept)
    register(Both)(type("Wrong", (base,), own))
    model, loss = extend(nn.Sequential(nn.Linear(3, 3), Both(), nn.Linear(3, 2))), nn.MSELoss()
    ext = getattr(extensions, name)()
    message = rf"Wrong\.{method} at '1' \(Both\).*shape \[.*{N}, 3\], got (\[.*\]|None)"
    if kind == "missing":
        message = (
            rf"Wrong needs a method '\w+' \(or '{method}'\) for .*'1' \(Both\).*'Write a rule'"
        )
    with pytest.raises((ValueError, NotImplementedError), match=message):
        with backpack(ext):
            extend(loss)(model(torch.rand(N, 3)), torch.rand(N, 2)).backward()
        for p in model.parameters():
            getattr(p, ext.savefield)(torch.rand(2, *p.shape))


class Mixed(nn.Module):
    """A module of two inputs and two outputs."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x - y


class MixedDerivatives(BaseDerivatives):
    """Returns lists, as it is given lists."""

    def _jac_mat_prod(self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any) -> Any:
        x, y = mat
        known = x if x is not None else y
        x, y = (torch.zeros_like(known) if m is None else m for m in (x, y))
        return [x + y, x - y]

    _jac_t_mat_prod = _jac_mat_prod


class OneOfTwo(MixedDerivatives):
    """Forgets an output."""

    def _jac_mat_prod(self, *args: Any) -> Any:
        return super()._jac_mat_prod(*args)[0]


class TwoPaths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mixed = nn.Linear(3, 3), nn.Linear(3, 3), Mixed()
        self.add, self.last = Add(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.add(*self.mixed(self.a(x), self.b(x))))


def test_derivatives_of_several_inputs_and_outputs_may_return_lists() -> None:
    register(Mixed)(MixedDerivatives)
    model, batch = TwoPaths(), data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Add is differentiated automatically
        params = run(model, extensions.DiagGGNExact(), extensions.GGNMP(), batch=batch)
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, model, batch))
    for p, block in zip(params, truth(oracle.ggn_blocks, model, batch), strict=True):
        units = torch.eye(p.numel()).reshape(-1, *p.shape)
        torch.testing.assert_close(p.ggnmp(units).flatten(1), block, **TOLERANCE)
    register(Mixed)(OneOfTwo)
    model = TwoPaths()
    with warnings.catch_warnings(), pytest.raises(ValueError, match="each of 2 outputs, got 1"):
        warnings.simplefilter("ignore")
        run(model, extensions.GGNMP(), batch=batch)
        model.a.weight.ggnmp(torch.rand(1, 3, 3))  # type: ignore[operator]


class SecondAxis(CubedDerivatives):
    """The samples are along the second axis."""

    def batch_axis_in(self, module: Any, i: int) -> int:
        return 1

    batch_axis_out = batch_axis_in

    def _jac_mat_prod(self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any) -> Any:
        return mat * 3 * subsample(module.input0, 1, subsampling) ** 2

    _jac_t_mat_prod = _jac_mat_prod

    def _hessian_diagonal(self, module: Any, g_inp: Any, g_out: Any, subsampling: Any) -> Any:
        x, g = (subsample(t, 1, subsampling) for t in (module.input0, g_out[0]))
        return 6 * x * g


@pytest.mark.parametrize("length", [N, N - 1])  # with N, shapes do not tell the axes apart
def test_second_derivative_with_samples_along_the_second_axis(length: int) -> None:
    layers = [nn.Linear(3, 3), Permute(1, 0, 2), Cubed(), Permute(1, 0, 2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(3 * length, 2))
    batch = torch.randn(N, length, 3), torch.randint(2, (N,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no rule
        params = run(model, extensions.PCHMP(), batch=batch)
    expected = [p.pchmp for p in params]
    register(Cubed)(SecondAxis)
    params = run(model, extensions.DiagHessian(), extensions.PCHMP(), batch=batch)
    check(params, "diag_h", truth(oracle.hessian_diag, model, batch))
    for p, product in zip(params, expected, strict=True):
        units = torch.eye(p.numel()).reshape(-1, *p.shape)
        torch.testing.assert_close(p.pchmp(units), product(units), **TOLERANCE)


class Columns(nn.Module):
    """``y = (W x)² + b``, with the samples last: ``[I, *, N] -> [O, *, N]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.reshape(-1, *(1,) * (x.dim() - 1))
        return einsum("oi,i...->o...", self.weight, x).square() + bias


class ColumnsDerivatives(BaseDerivatives):
    params = ("weight", "bias")

    def batch_axis_in(self, module: Any, i: int) -> int:
        return -1

    batch_axis_out = batch_axis_in

    def inside(self, c: Context, v: Tensor) -> Tensor:
        """Return the cotangents of ``W x``: ``[V, O, *, N]``."""
        return 2 * v * einsum("oi,i...->o...", c.params["weight"], c.x)

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        return einsum("oi,vo...->vi...", c.params["weight"], self.inside(c, v))

    def affine(self, c: Context, name: str, v: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        s, x = (self.inside(c, v), c.x) if name == "weight" else (v, None)
        last = s.movedim(-1, 1).movedim(2, -1)
        return [(last, x if x is None else x.movedim(-1, 0).movedim(1, -1))]

    def hessian_is_zero(self, module: Any) -> bool:
        return False


@pytest.mark.parametrize("positions", [(), (3,)])
@pytest.mark.parametrize("features", [2, N + 1])  # as many entries along the first axis, or fewer
def test_rule_with_samples_along_the_last_axis(positions: tuple[int, ...], features: int) -> None:
    register(Columns)(ColumnsDerivatives)
    check_rule(Columns(features, 3), torch.randn(features, *positions, N))
    turned = [*range(2 + len(positions))][::-1]  # there and back
    model = nn.Sequential(
        *(nn.Linear(4, features), nn.Tanh(), Permute(*turned), Columns(features, 3)),
        *(nn.Sigmoid(), Permute(*turned), nn.Flatten(), nn.Linear(3 * prod(positions), 2)),
    )
    batch, rows = (torch.randn(N, *positions, 4), torch.randint(2, (N,))), [3, 0]
    grads = truth(oracle.batch_grad, model, batch)
    params = run(model, extensions.BatchGrad(), extensions.DiagGGNExact(), batch=batch)
    check(params, "grad_batch", grads)
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, model, batch))
    exts = extensions.BatchGrad(rows), extensions.BatchDiagHessian(rows), extensions.DiagHessian()
    params = run(model, *exts, batch=batch)
    check(params, "grad_batch", [g[rows] for g in grads])
    check(params, "diag_h", truth(oracle.hessian_diag, model, batch))
    of_rows = [d[rows] for d in truth(oracle.batch_hessian_diag, model, batch)]
    check(params, "diag_h_batch", of_rows)


def test_a_later_registration_replaces_the_earlier() -> None:
    class Wrong(ScaleDerivatives):
        def _weight_jac_t_mat_prod(self, *args: Any) -> Any:
            return torch.zeros(1)

    model, batch = scaled_model(), data()
    register(Scale)(Wrong)
    register(Scale)(ScaleDerivatives)
    check(
        run(model, extensions.BatchGrad(), batch=batch),
        "grad_batch",
        truth(oracle.batch_grad, model, batch),
    )


def test_registering_after_the_forward_pass_of_another_batch() -> None:
    model, batch = scaled_model(), data()
    for _ in range(2):
        params = run(model, extensions.BatchGrad(), batch=batch)
        check(params, "grad_batch", truth(oracle.batch_grad, model, batch))
        register(Scale)(ScaleDerivatives)


class RenamedLinear(nn.Linear):
    """A subclass with the same mathematics."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.note = "a subclass"

    def extra_repr(self) -> str:
        return self.note

    def helper(self) -> int:
        return 1


class ShiftedLinear(nn.Linear):
    """A subclass with other mathematics."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input**2)


class CalledDifferently(nn.Linear):
    """A subclass that changes what a call does."""

    def __call__(self, input: Tensor) -> Tensor:
        return super().__call__(input) ** 2


class CausalConv(nn.Conv1d):
    """A subclass that overrides a helper of forward."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Any) -> Tensor:
        return super()._conv_forward(input.flip(2), weight, bias)


class LinearOfSines(nn.Linear):
    """``y = sin(x) Wᵀ + b``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.sin())


class Products:
    """What a rule of it changes."""

    def jvp(self, c: Any, t: Tensor) -> Any:
        return t * c.x.cos() @ c.params["weight"].T

    def vjp(self, c: Any, v: Tensor) -> Any:
        return v @ c.params["weight"] * c.x.cos()


class EarlierProducts:
    """The same in the form of earlier versions."""

    def _jac_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Tensor, subsampling: Any
    ) -> Tensor:
        return mat * subsample(module.input0, subsampling=subsampling).cos() @ module.weight.T

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Tensor, subsampling: Any
    ) -> Tensor:
        return mat @ module.weight * subsample(module.input0, subsampling=subsampling).cos()


@pytest.mark.parametrize("products", [Products, EarlierProducts])
def test_methods_that_are_mixed_into_a_rule(products: type) -> None:
    """What the rule says of its methods (such as that they are linear) is not said of these."""

    class OfSines(LinearDerivatives):
        def affine_inputs(self, c: Any, name: str) -> list[Tensor | None]:
            return [x if x is None else x.sin() for x in super().affine_inputs(c, name)]

    register(LinearOfSines)(type("Rule", (products, OfSines), {}))
    model = nn.Sequential(nn.Linear(3, 3), LinearOfSines(3, 3), nn.Sigmoid(), nn.Linear(3, 2))
    batch = data()
    params = run(model, extensions.DiagGGNExact(), extensions.DiagHessian(), batch=batch)
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, model, batch))
    check(params, "diag_h", truth(oracle.hessian_diag, model, batch))


class DerivativesOfSines(Products, LinearDerivatives):
    """Says what is multiplied together, and nothing else of parameters."""

    def affine(self, c: Any, name: str, v: Any) -> Any:
        ((s, x),) = super().affine(c, name, v)
        return [(s, x if x is None else x.sin())]


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_rule_with_another_affine_has_other_inputs(shape: tuple[int, ...]) -> None:
    """All that follows from those of its base class is made anew."""
    register(LinearOfSines)(DerivativesOfSines)
    check_rule(LinearOfSines(3, 3), torch.randn(N, *shape))
    model = nn.Sequential(LinearOfSines(3, 3), nn.Flatten(), nn.Sigmoid(), nn.LazyLinear(2))
    batch = torch.randn(N, *shape), torch.randint(2, (N,))
    model(batch[0])
    exts = extensions.KFLR(), extensions.KFLR(approximation="expand"), extensions.GGNMP()
    exts[1].savefield = "kflr_expand"
    params = run(model, *exts, batch=batch)
    plain = nn.Sequential(nn.Linear(3, 3), *copy.deepcopy(model[1:]))
    plain.load_state_dict(model.state_dict())
    of_sines = batch[0].sin(), batch[1]
    for p, q in zip(params, run(plain, *exts, batch=of_sines), strict=True):
        for field in ("kflr", "kflr_expand"):
            torch.testing.assert_close(getattr(p, field), getattr(q, field), **TOLERANCE)
        vectors = torch.rand(2, *p.shape)
        torch.testing.assert_close(p.ggnmp(vectors), q.ggnmp(vectors), **TOLERANCE)


class Summing(LinearDerivatives):
    """Calls what earlier versions had, with the default of the sum over samples."""

    def _weight_jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Tensor, sum_batch: bool, subsampling: Any
    ) -> Tensor:
        own: Any = super()._weight_jac_t_mat_prod
        if sum_batch:
            return own(module, g_inp, g_out, mat, subsampling=subsampling)
        return own(module, g_inp, g_out, mat, sum_batch=False, subsampling=subsampling)


def test_the_sum_over_samples_is_the_default() -> None:
    class Layer(nn.Linear):
        pass

    register(Layer)(Summing)
    model, batch = nn.Sequential(Layer(3, 3), nn.Tanh(), nn.Linear(3, 2)), data()
    params = run(model, extensions.BatchGrad(), extensions.DiagGGNExact(), batch=batch)
    check(params, "grad_batch", truth(oracle.batch_grad, model, batch))
    layer, output = model[0], model(batch[0])  # which keeps the record of its calls
    assert output.shape == (N, 2)
    products = Summing().param_mjp("weight", layer, None, None, torch.ones(1, N, 3))
    assert products.shape == (1, 3, 3)
    own = LinearDerivatives()._weight_jac_t_mat_prod(layer, None, None, torch.ones(1, N, 3))  # type: ignore[attr-defined]
    torch.testing.assert_close(own, products)


class Doubling(nn.Module):
    """Doubles in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class Modal(nn.Module):
    """A layer whose child depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mode = nn.Linear(3, 2), Doubling()

    def forward(self, x: Tensor) -> Tensor:
        return self.mode(self.layer(x))


@pytest.mark.parametrize("mode", [True, False])
def test_modes_of_children_are_those_of_the_call(mode: bool) -> None:
    """If they are evaluated with the module, which has a rule."""
    register(Modal)(AutomaticDerivatives)
    model, batch = nn.Sequential(Modal()).train(mode), data()
    expected = [truth(f, model, batch) for f in (oracle.batch_grad, oracle.ggn_diag)]
    loss = extend(nn.CrossEntropyLoss())(extend(model)(batch[0]), batch[1])
    model.train(not mode)
    model[0].training = mode
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    assert model[0].mode.training is not mode
    check(oracle.trainable(model), "grad_batch", expected[0])
    check(oracle.trainable(model), "diag_ggn_exact", expected[1])


@pytest.mark.parametrize("form", [Products, EarlierProducts])
def test_methods_of_a_rule_come_before_those_that_are_mixed_in(form: type) -> None:
    def wrong(self: Any, *arguments: Any, **named: Any) -> Tensor:
        raise AssertionError("not of the most derived class")

    names = "jvp", "jac_mat_prod", "_jac_mat_prod", "vjp", "jac_t_mat_prod", "_jac_t_mat_prod"
    own = {name: value for name, value in vars(form).items() if callable(value)}
    for mixed in names:
        mixin = type("Mixin", (), {mixed: wrong})
        register(LinearOfSines)(type("Rule", (mixin, LinearDerivatives), dict(own)))
        module = extend(LinearOfSines(3, 3))
        x = torch.rand(4, 3, requires_grad=True)
        output, rule, mat = module(x), derivatives_of(module), torch.rand(2, 4, 3)
        slope = x.cos()
        torch.testing.assert_close(rule.vjp(seen(module), mat), mat @ module.weight * slope)
        torch.testing.assert_close(rule.jvp(seen(module), mat), mat * slope @ module.weight.T)
        del output


def test_subclass_with_the_same_mathematics_inherits() -> None:
    model, batch = nn.Sequential(RenamedLinear(3, 3), nn.Sigmoid(), nn.Linear(3, 2)), data()
    params = run(model, extensions.BatchGrad(), extensions.DiagHessian(), batch=batch)
    check(params, "grad_batch", truth(oracle.batch_grad, model, batch))
    check(params, "diag_h", truth(oracle.hessian_diag, model, batch))


@pytest.mark.parametrize("cls", [ShiftedLinear, CausalConv], ids=lambda c: c.__name__)
def test_subclass_with_other_mathematics_does_not_inherit(cls: type[nn.Module]) -> None:
    if cls is CausalConv:
        model = nn.Sequential(nn.Unflatten(1, (1, 3)), CausalConv(1, 2, 2), nn.Flatten())
        model.append(nn.Linear(4, 2))
    else:
        model = nn.Sequential(cls(3, 3), nn.Sigmoid(), nn.Linear(3, 2))
    assert class_derivatives(cls) is None
    batch = data()
    params = run(model, extensions.BatchGrad(), extensions.DiagGGNExact(), batch=batch)
    check(params, "grad_batch", truth(oracle.batch_grad, model, batch))
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, model, batch))


class Squared(nn.Linear):
    """What a patched Linear computes."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) ** 2


def test_patched_forward_does_not_inherit() -> None:
    model, batch = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), data()
    original = model[0].forward
    model[0].forward = lambda x: original(x) ** 2
    params = run(model, extensions.BatchGrad(), extensions.DiagGGNExact(), batch=batch)
    reference = nn.Sequential(Squared(3, 3), nn.Linear(3, 2))
    reference.load_state_dict(model.state_dict())
    check(params, "grad_batch", truth(oracle.batch_grad, reference, batch))
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, reference, batch))


def test_patched_helper_does_not_inherit() -> None:
    """As in programs that let images wrap around."""
    model, batch = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2)), data()
    model.extend([nn.Flatten(), nn.Linear(4, 2)])
    reference = nn.Sequential(model[0], CausalConv(1, 2, 2), *model[2:])
    reference.load_state_dict(model.state_dict())
    helper = model[1]._conv_forward
    model[1]._conv_forward = lambda x, *args: helper(x.flip(2), *args)
    params = run(model, extensions.BatchGrad(), extensions.DiagGGNExact(), batch=batch)
    check(params, "grad_batch", truth(oracle.batch_grad, reference, batch))
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, reference, batch))


def test_subclass_that_is_called_differently() -> None:
    assert class_derivatives(CalledDifferently) is None
    assert class_derivatives(RenamedLinear) is class_derivatives(nn.Linear) is not None


# ------------------------------------------------------------------ saved quantities, fail modes


def test_saved_quantities() -> None:
    saved = SavedQuantities()
    a, b = object(), object()
    assert saved.retrieve_quantity(a) is None
    saved.save_quantity(a, 1, lambda x, y: x - y)
    saved.save_quantity(a, 3, lambda x, y: x - y)
    saved.save_quantity(b, 5, lambda x, y: x - y)
    assert a in saved and b in saved
    assert saved.retrieve_quantity(a, delete_old=False) == -2
    assert saved.retrieve_quantity(a, delete_old=True) == -2
    assert a not in saved and saved.retrieve_quantity(a) is None
    saved.clear()
    assert b not in saved


def test_saved_quantities_are_empty_afterwards() -> None:
    ext = UserDiagGGN()
    run(mlp(), ext, batch=data())
    assert not ext.saved_quantities._saved
    model = nn.Sequential(nn.Tanh(), mlp())  # the rule is missing where nothing is left to do
    with pytest.raises(NotImplementedError):
        run(nn.Sequential(nn.Linear(3, 3), model), ext, batch=data())
    assert not ext.saved_quantities._saved


def test_default_accumulation_is_the_sum() -> None:
    ext = SecondOrderBackpropExtension("x")
    assert ext.accumulate_backpropagated_quantities(2, 3) == 5
    assert ext.expects_backpropagation_quantities() is True
    assert FirstOrderBackpropExtension("x").expects_backpropagation_quantities() is False


def test_defaults_of_the_fail_mode() -> None:
    assert (FAIL_ERROR, FAIL_WARN, FAIL_SILENT) == ("ERROR", "WARNING", "SILENT")
    batch = data()
    with pytest.warns(UserWarning, match="Scale"):
        run(scaled_model(), FirstOrderBackpropExtension("x", module_exts={}), batch=batch)
    with pytest.raises(NotImplementedError):
        run(scaled_model(), SecondOrderBackpropExtension("x", module_exts={}), batch=batch)
    with pytest.raises(ValueError, match=r"fail_mode.*LOUD"):
        BackpropExtension("x", fail_mode="LOUD")


@pytest.mark.parametrize("base", [FirstOrderBackpropExtension, SecondOrderBackpropExtension])
@pytest.mark.parametrize("fail_mode", [FAIL_ERROR, FAIL_WARN, FAIL_SILENT])
def test_fail_modes(base: Any, fail_mode: str, recwarn: pytest.WarningsRecorder) -> None:
    model = scaled_model()
    ext = base("x", module_exts={nn.CrossEntropyLoss: LossRule()}, fail_mode=fail_mode)
    if fail_mode == FAIL_ERROR:
        with pytest.raises(NotImplementedError, match=r"Linear|Scale"):
            run(model, ext, batch=data())
    else:
        run(model, ext, batch=data())
    found = [str(w.message) for w in recwarn if "set_module_extension" in str(w.message)]
    assert bool(found) == (fail_mode == FAIL_WARN)
    assert not any(hasattr(p, "x") for p in model.parameters())


class SilentBatchGrad(extensions.BatchGrad):
    """A built-in extension in another mode."""

    def __init__(self, fail_mode: str) -> None:
        FirstOrderBackpropExtension.__init__(self, "grad_batch", fail_mode=fail_mode)


class Noisy(Scale):
    """Random, so there are no automatic derivatives."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + torch.randn_like(x)


def test_fail_modes_of_a_built_in_extension(recwarn: pytest.WarningsRecorder) -> None:
    model, batch = nn.Sequential(nn.Linear(3, 3), Noisy(), nn.Linear(3, 2)), data()
    run(model, SilentBatchGrad(FAIL_SILENT), batch=batch)
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]
    assert hasattr(model[0].weight, "grad_batch") and not hasattr(model[1].weight, "grad_batch")
    with pytest.raises(NotImplementedError, match="Noisy"):
        run(model, SilentBatchGrad(FAIL_ERROR), batch=batch)


class Own(SecondOrderBackpropExtension):
    """What is extracted, times two, of what is propagated."""

    def __init__(self, propagation: Propagation, *needs: str) -> None:
        super().__init__("own")
        self.propagation, self.needs = propagation, needs  # type: ignore[misc]

    def extract(self, products: Any) -> Any:
        return 2 * products[self.needs[0]]


@pytest.mark.parametrize(
    "propagation, need",
    [
        (HessianFactors(), "square_norm"),
        (BatchAveraged(), "square"),
        (Blocks(None), "square"),
        (ExactFactor(), "product"),
    ],
)
def test_what_a_propagation_does_not_offer(propagation: Propagation, need: str) -> None:
    """Signs of columns, say, are not in their norms."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=rf"{need}.*{type(propagation).__name__} does not offer"):
        run(model, Own(propagation, need), batch=data())


def test_a_sum_over_columns_is_that_of_the_factor() -> None:
    """Fewer columns stand for the same matrix, but not for the same sum."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 12)
    model, batch = nn.Sequential(*layers).double(), (torch.rand(9, 4).double(), torch.arange(9))
    roots = run(model, extensions.SqrtGGNExact(), batch=batch)
    whole = [2 * p.sqrt_ggn_exact.sum((0, 1)) for p in roots]
    check(run(model, Own(ExactFactor(), "gradient"), batch=batch), "own", whole)


@dataclass(frozen=True)
class TwiceLogits(Propagation):
    """Gradients of squared logits, of each row or of all rows of a sample."""

    of_samples: bool
    reads_gradients = False

    def run(self, plan: Any, exts: Any, subsampling: Any, save: Any) -> None:
        def columns(rows: Any) -> tuple[Tensor, None]:
            return 2 * context_of(loss, rows).x.unsqueeze(0), None

        (loss,) = plan.losses
        source = LossSource(loss, columns, adds_up=self.of_samples)
        Backpropagation(plan, exts, subsampling, save).run([source])


@pytest.mark.parametrize("of_samples", [True, False])
def test_columns_of_a_loss_of_positions_add_up_if_they_are_gradients(of_samples: bool) -> None:
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Flatten(0, 1)  # [N·T, C]
    model, X = nn.Sequential(*layers), torch.randn(N, 2, 3)
    params = run(
        model, Own(TwiceLogits(of_samples), "square_norm"), batch=(X, torch.randint(2, (2 * N,)))
    )
    for p in params:
        logits = model(X).unflatten(0, (N, 2)).square().sum(2)  # [N, T]
        terms = logits.sum(1, keepdim=True) if of_samples else logits
        norms = [
            sum(torch.autograd.grad(t, p, retain_graph=True)[0].square().sum() for t in row)
            for row in terms
        ]
        torch.testing.assert_close(p.own, 2 * torch.stack(norms), **TOLERANCE)


def test_own_extension_of_a_tied_parameter() -> None:
    """The diagonal of the Hessian comes from products there; ``extract`` has the last word."""
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Sigmoid(), layer, nn.Linear(3, 2))
    for need, ext, name in (
        ("square", extensions.DiagHessian(), "diag_h"),
        ("batch_square", extensions.BatchDiagHessian(), "diag_h_batch"),
    ):
        batch = data()
        run(model, Own(HessianFactors(), need), ext, batch=batch)
        for p in model.parameters():
            torch.testing.assert_close(p.own, 2 * getattr(p, name))  # type: ignore[attr-defined]


def test_register_is_given_modules_alone() -> None:
    with pytest.raises(TypeError, match=r"classes of modules.*write @register\(MyModule\)"):
        register(Scale, ScaleDerivatives())  # type: ignore[arg-type]


def test_what_a_rule_passes_on_has_a_shape() -> None:
    class Wrong(ModuleExtension):
        def backpropagate(self, *args: Any) -> Tensor:
            return torch.zeros(2, N, 5)

    ext = extensions.DiagGGNExact()
    ext.set_module_extension(nn.Tanh, Wrong(), overwrite=True)
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    loss = extend(nn.CrossEntropyLoss())(model(torch.rand(N, 3)), torch.randint(2, (N,)))
    message = rf"rule of Wrong for '1' \(Tanh\).*passes on \[\[2, {N}, 5\]\]"
    with backpack(ext), pytest.raises(ValueError, match=message):
        loss.backward()


class Returns(ModuleExtension):
    """Makes something of individual gradients, or of what arrived, and passes that on."""

    def __init__(self, make: Any, params: Sequence[str] = ("weight",)) -> None:
        super().__init__(params)
        self.make = make

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Any:
        return self.make(module.input0 * g_out[0])

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Any:
        return self.make(bpQuantities)


WRONG: dict[str, Any] = {
    "None": lambda g: None,
    "list": lambda g: [g],
    "str": lambda g: "x",
    "int": lambda g: 3,
    "shape": lambda g: g[..., :1],
    "other axis": lambda g: g.square().sum(0),
    "no samples": lambda g: g.T @ g,
}


@pytest.mark.parametrize("subsampling", [None, [2, 0]], ids=str)
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", ["BatchGrad", "BatchL2Grad", "SumGradSquared", "KFLR"])
def test_what_a_rule_saves(name: str, kind: str, subsampling: list[int] | None) -> None:
    """With as many samples as an output has entries, "other axis" could not be told apart."""
    ext = getattr(extensions, name)(subsampling=subsampling)
    if name == "SumGradSquared" and kind == "other axis":
        kind = "no samples"  # the sum over the samples is what it saves
    make = (lambda g: []) if (name, kind) == ("KFLR", "list") else WRONG[kind]

    class Rule(Returns):
        def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bp: Any) -> Any:
            return bp * module.weight

    ext.set_module_extension(Scale, Rule(make))
    model = scaled_model()
    message = rf"Rule\.weight at '1' \(Scale\): {name} saves a .* in '{ext.savefield}', got "
    with pytest.raises(ValueError, match=message):
        run(model, ext, batch=data())
    assert not vars(model[1].weight)


@pytest.mark.parametrize("first", [True, False], ids=["batch first", "sequence first"])
def test_a_rule_knows_the_samples_of_its_module(first: bool) -> None:
    """Of a sequence: one for each sample, or for each row; where a loss has confirmed the axis."""
    time, model = 5, nn.Sequential(nn.Linear(3, 3), Scale(), nn.Flatten(), nn.Linear(15, 2))
    X, y = torch.randn(N, time, 3), torch.randint(2, (N,))
    axis = 1 if first else 0
    for wrong in (False, True):
        ext = extensions.BatchGrad()
        rule = Returns(lambda g, wrong=wrong: g.sum(1 - axis if wrong else axis))
        ext.set_module_extension(Scale, rule)
        if first and not wrong:
            run(model, ext, batch=(X, y))
            torch.testing.assert_close(model[1].weight.grad_batch.sum(0), model[1].weight.grad)
        elif first:
            with pytest.raises(ValueError, match=rf"N = {N}\) in 'grad_batch', got \[{time}, 3\]"):
                run(model, ext, batch=(X, y))
        else:  # nobody has said where the samples are
            scale = extend(Scale())
            out = scale(X.transpose(0, 1))
            with backpack(ext), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out[-1].sum().backward()
            assert scale.weight.grad_batch.shape == (time if wrong else N, 3)  # type: ignore[union-attr]


PASSED_ON: dict[str, Any] = WRONG | {
    "swapped": lambda mat: mat.transpose(1, 2),
    "columns second": lambda mat: mat.transpose(0, 1),
    "no samples": lambda mat: mat.sum(1),
    "all None": lambda mat: (None,),
}


@pytest.mark.parametrize("place", [Cubed, nn.CrossEntropyLoss])
@pytest.mark.parametrize("kind", PASSED_ON)
@pytest.mark.parametrize("name", ["DiagGGNExact", "KFLR"])
def test_what_a_rule_passes_on(name: str, kind: str, place: Any) -> None:
    """To rules of the library: columns at the inputs, in their shape."""
    if place is not Cubed and kind == "list":
        kind = "str"  # a loss may return a list with one entry for each input
    make = PASSED_ON[kind]

    class Loss(LossRule):
        def backpropagate(self, *args: Any) -> Any:
            return make(super().backpropagate(*args))

    ext = getattr(extensions, name)()
    rule = Returns(make, ()) if place is Cubed else Loss()
    ext.set_module_extension(place, rule, overwrite=True)
    model = nn.Sequential(nn.Linear(3, 3), Cubed(), nn.Linear(3, 3))
    batch = torch.randn(N, 3), torch.randint(3, (N,))
    where = r"'1' \(Cubed\)" if place is Cubed else "CrossEntropyLoss"
    message = rf"{ext.savefield}: .*rule.*{type(rule).__name__} for {where} .*passes (on|nothing)"
    with pytest.raises(ValueError, match=message):
        run(model, ext, batch=batch)


def test_a_first_module_passes_nothing_on() -> None:
    """Though its input, which no module has computed, needs a gradient."""
    model, batch = nn.Sequential(Scale(), nn.Linear(3, 2)), data()

    class Last(ScaleDiagGGN):
        def backpropagate(self, *args: Any) -> None:
            return None

    ext = extensions.DiagGGNExact()
    ext.set_module_extension(Scale, Last())
    params = run(model, ext, batch=(batch[0].requires_grad_(), batch[1]))
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, model, (batch[0].detach(), batch[1])))


class Adapter(nn.Module):
    """y = W x + B A x, with a layer of its own as a child."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3, bias=False)
        self.A, self.B = nn.Parameter(torch.rand(2, 3)), nn.Parameter(torch.rand(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.A.T @ self.B.T


class AdapterDerivatives(BaseDerivatives):
    """In the short form."""

    params: Any = ("A", "B")
    includes_children = True

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        return v @ c.params["base.weight"] + v @ c.params["B"] @ c.params["A"]

    def affine(self, c: Context, name: str, v: Any) -> Any:
        if name == "base.weight":
            return [(v, c.x)]
        return [(v @ c.params["B"], c.x)] if name == "A" else [(v, c.x @ c.params["A"].T)]


class WholeAdapterDerivatives(AdapterDerivatives):
    """Knows the weight of the child, too."""

    params = ("A", "B", "base.weight")


@pytest.mark.parametrize("knows_child", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_rules_of_modules_with_children(is_frozen: bool, knows_child: bool) -> None:
    """A trained child that the rule includes, but does not know, is told."""
    register(Adapter)(WholeAdapterDerivatives if knows_child else AdapterDerivatives)
    model, batch = nn.Sequential(nn.Linear(3, 3), Adapter(), nn.Linear(3, 2)), data()
    model[1].base.requires_grad_(not is_frozen)  # type: ignore[operator, union-attr]
    exts = extensions.BatchGrad(), extensions.DiagGGNExact()
    if not (is_frozen or knows_child):
        with pytest.raises(AssertionError, match=r"params lacks \['base.weight'\]"):
            check_rule(Adapter(), batch[0])
        with pytest.raises(NotImplementedError, match=r"no rule for .*base\.weight of '1'"):
            run(model, *exts, batch=batch)
        return
    check_rule(model[1], batch[0])
    params = [p for p in run(model, *exts, batch=batch) if p.requires_grad]
    for p in params:
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
    check(params, "diag_ggn_exact", truth(oracle.ggn_diag, model, batch))


class Coarse(nn.Module):
    """Pooling that torch does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x, 2)


def test_rule_of_pooling_for_another_module() -> None:
    """Which of its axes are in space is not known: its samples come first."""
    register(Coarse)(type("Rule", (type(derivatives_of(nn.AvgPool2d(2))),), {}))
    check_rule(Coarse(), torch.rand(3, 2, 4, 4))


class Powers(nn.Module):
    """Cubes, whose rule does not say that they are curved."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3


class PowersDerivatives(BaseDerivatives):
    """The least that a rule may be."""

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        return v * 3 * c.x.square()


def test_public_second_derivative_of_a_rule_that_does_not_tell() -> None:
    register(Powers)(PowersDerivatives)
    module, x = extend(Powers().double()), torch.rand(4, 3).double().requires_grad_()
    y, mat = module(x), torch.rand(2, 4, 3).double()
    found = derivatives_of(module).residual_mat_prod(module, None, (torch.ones_like(y),), mat)
    torch.testing.assert_close(found, 6 * x * mat)

"""Names that programs import: derivatives, and module extensions for a user's own extension."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from apart import run
from torch import Tensor, nn

from backpack import backpack, extend
from backpack.core.derivatives import derivatives_of
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.extensions import HBP, KFRA, SqrtGGNExact, SqrtGGNMC
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.hbp import (
    BackpropStrategy,
    Curvature,
    ExpectationApproximation,
    LossHessianStrategy,
)

N = 4


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Compute in float64."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def module_case(module: nn.Module, *shape: int) -> tuple[nn.Module, tuple[int, ...]]:
    return module, (N, *shape)


# For each name the module that the derivatives are tried on, and the shape of its input.
DERIVATIVES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "avgpool1d.AvgPool1DDerivatives": module_case(nn.AvgPool1d(2), 2, 4),
    "avgpool2d.AvgPool2DDerivatives": module_case(nn.AvgPool2d(2), 2, 4, 4),
    "avgpool3d.AvgPool3DDerivatives": module_case(nn.AvgPool3d(2), 1, 2, 2, 4),
    "conv1d.Conv1DDerivatives": module_case(nn.Conv1d(2, 3, 2), 2, 4),
    "conv2d.Conv2DDerivatives": module_case(nn.Conv2d(2, 3, 2), 2, 3, 3),
    "conv3d.Conv3DDerivatives": module_case(nn.Conv3d(1, 2, 2), 1, 2, 3, 2),
    "conv_transpose1d.ConvTranspose1DDerivatives": module_case(nn.ConvTranspose1d(2, 3, 2), 2, 3),
    "conv_transpose2d.ConvTranspose2DDerivatives": module_case(
        nn.ConvTranspose2d(2, 3, 2), 2, 2, 2
    ),
    "conv_transpose3d.ConvTranspose3DDerivatives": module_case(
        nn.ConvTranspose3d(1, 2, 2), 1, 2, 1, 2
    ),
    "dropout.DropoutDerivatives": module_case(nn.Dropout(0.4), 6),
    "elu.ELUDerivatives": module_case(nn.ELU(0.5), 3),
    "embedding.EmbeddingDerivatives": (nn.Embedding(5, 3), (N, 2)),
    "flatten.FlattenDerivatives": module_case(nn.Flatten(), 2, 3),
    "leakyrelu.LeakyReLUDerivatives": module_case(nn.LeakyReLU(0.1), 3),
    "linear.LinearDerivatives": module_case(nn.Linear(3, 2), 5, 3),
    "logsigmoid.LogSigmoidDerivatives": module_case(nn.LogSigmoid(), 3),
    "lstm.LSTMDerivatives": (nn.LSTM(3, 2, batch_first=True), (N, 4, 3)),
    "maxpool1d.MaxPool1DDerivatives": module_case(nn.MaxPool1d(2), 2, 4),
    "maxpool2d.MaxPool2DDerivatives": module_case(nn.MaxPool2d(2), 2, 4, 4),
    "maxpool3d.MaxPool3DDerivatives": module_case(nn.MaxPool3d(2), 1, 2, 2, 4),
    "pad.PadDerivatives": module_case(Pad((1, 2), value=0.5), 3),
    "permute.PermuteDerivatives": module_case(Permute(0, 2, 1), 2, 3),
    "relu.ReLUDerivatives": module_case(nn.ReLU(), 3),
    "rnn.RNNDerivatives": (nn.RNN(3, 2, batch_first=True), (N, 4, 3)),
    "scale_module.ScaleModuleDerivatives": module_case(ScaleModule(0.3), 3),
    "selu.SELUDerivatives": module_case(nn.SELU(), 3),
    "sigmoid.SigmoidDerivatives": module_case(nn.Sigmoid(), 3),
    "slicing.SlicingDerivatives": module_case(Slicing((slice(None), slice(1, 3))), 4),
    "sum_module.SumModuleDerivatives": module_case(SumModule(), 3),
    "tanh.TanhDerivatives": module_case(nn.Tanh(), 3),
    "zeropad2d.ZeroPad2dDerivatives": module_case(nn.ZeroPad2d(1), 2, 2, 2),
}


def first(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) else values


def imported(package: str, name: str) -> Any:
    file, attribute = name.rsplit(".", 1)
    return getattr(import_module(f"{package}.{file}"), attribute)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_products_with_jacobians(name: str) -> None:
    """The alias, made without arguments, against autograd and against the registry."""
    original, shape = DERIVATIVES[name]
    rule = imported("backpack.core.derivatives", name)()
    module = extend(copy.deepcopy(original).double())
    assert type(rule) is type(derivatives_of(module))
    is_embedding = isinstance(module, nn.Embedding)
    x = torch.randint(5, shape) if is_embedding else torch.randn(shape, requires_grad=True)
    others = [torch.randn(shape)] if isinstance(module, SumModule) else []
    out = first(module(x, *others))
    mat = torch.randn(2, *out.shape)
    if not is_embedding:
        grads = [torch.autograd.grad(out, [x], m, retain_graph=True)[0] for m in mat]
        expected = torch.stack(grads)
        found = first(rule.jac_t_mat_prod(module, None, None, mat))
        torch.testing.assert_close(found, expected)
        without_v = first(rule.jac_t_mat_prod(module, None, None, mat[0]))
        torch.testing.assert_close(without_v, expected[0])
        rows = [2, 0]
        found = first(rule.jac_t_mat_prod(module, None, None, mat[:, rows], subsampling=rows))
        torch.testing.assert_close(found, expected[:, rows])
        v = torch.randn(2, *shape)
        tangents = [v, *(None for _ in others)] if others else v
        forth = first(rule.jac_mat_prod(module, None, None, tangents))
        torch.testing.assert_close((forth * mat).sum(), (v * expected).sum())
    for param, p in module.named_parameters():
        total = torch.stack([torch.autograd.grad(out, [p], m, retain_graph=True)[0] for m in mat])
        each = rule.param_mjp(param, module, None, None, mat, sum_batch=False)
        assert each.shape == (2, N, *p.shape)
        torch.testing.assert_close(each.sum(1), total)
        torch.testing.assert_close(rule.param_mjp(param, module, None, None, mat), total)


def test_derivatives_of_the_logistic_loss() -> None:
    rule = imported("backpack.core.derivatives", "bcewithlogitsloss.BCELossWithLogitsDerivatives")()
    loss = extend(nn.BCEWithLogitsLoss())
    x, y = torch.randn(N, 1, requires_grad=True), torch.rand(N, 1).round()
    keep = loss(x, y)
    factor = rule.sqrt_hessian(loss, None, None)
    p = x.detach().sigmoid()
    torch.testing.assert_close((factor**2).sum(0), p * (1 - p) / N)
    assert rule.sqrt_hessian_sampled(loss, None, None, mc_samples=3).shape == (3, N, 1)
    assert keep.requires_grad


def test_additional_dimensions_of_a_linear_layer() -> None:
    rule = imported("backpack.core.derivatives", "linear.LinearDerivatives")()
    for dims in [(), (5,), (5, 2)]:
        layer = extend(nn.Linear(3, 2))
        keep = layer(torch.randn(N, *dims, 3))
        assert tuple(rule._get_additional_dims(layer)) == dims
        assert keep.requires_grad


def test_names_are_there_in_a_fresh_process() -> None:
    """Whatever is imported first; and as ordinary modules are."""
    names = [f"backpack.core.derivatives.{name}" for name in DERIVATIVES]
    names += [f"{PACKAGE}.{name}" for name in MODULE_EXTENSIONS]
    program = "import importlib, importlib.util\n"
    for name in names:
        module, attribute = name.rsplit(".", 1)
        program += f"from {module} import {attribute}\n"
        program += f"assert importlib.util.find_spec({module!r}) is not None\n"
    run(sys.executable, "-c", program)


def test_other_names() -> None:
    from backpack.extensions.curvature import Curvature as by_its_own_module
    from backpack.utils.module_classification import is_loss, is_nll

    assert by_its_own_module is Curvature
    assert LossHessianStrategy.SUM == LossHessianStrategy.AVERAGE
    assert is_loss(nn.MSELoss()) and is_loss(nn.CosineEmbeddingLoss())
    assert not is_loss(nn.Linear(1, 1)) and not is_loss(nn.Sequential())
    likelihoods = [nn.MSELoss(), nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.NLLLoss()]
    assert all(is_nll(loss) for loss in likelihoods)
    assert not any(is_nll(m) for m in [nn.MultiMarginLoss(), nn.SmoothL1Loss(), nn.Linear(1, 1)])
    summed = HBP(
        by_its_own_module.GGN,
        LossHessianStrategy.SUM,
        BackpropStrategy.BATCH_AVERAGE,
        ExpectationApproximation.BOTEV_MARTENS,
    )
    assert summed.propagation == KFRA().propagation


# ------------------------------------------------------------------ module extensions

PACKAGE = "backpack.extensions.secondorder.sqrt_ggn"
MODULE_EXTENSIONS: dict[str, Any] = {
    "activations.SqrtGGNReLU": nn.ReLU,
    "activations.SqrtGGNSigmoid": nn.Sigmoid,
    "activations.SqrtGGNTanh": nn.Tanh,
    "activations.SqrtGGNELU": nn.ELU,
    "activations.SqrtGGNSELU": nn.SELU,
    "activations.SqrtGGNLeakyReLU": nn.LeakyReLU,
    "activations.SqrtGGNLogSigmoid": nn.LogSigmoid,
    "custom_module.SqrtGGNScaleModule": ScaleModule,
    "custom_module.SqrtGGNSumModule": SumModule,
    "dropout.SqrtGGNDropout": nn.Dropout,
    "flatten.SqrtGGNFlatten": nn.Flatten,
    "losses.SqrtGGNMSELoss": nn.MSELoss,
    "losses.SqrtGGNCrossEntropyLoss": nn.CrossEntropyLoss,
    "pad.SqrtGGNPad": Pad,
    "padding.SqrtGGNZeroPad2d": nn.ZeroPad2d,
    "pooling.SqrtGGNMaxPool1d": nn.MaxPool1d,
    "pooling.SqrtGGNMaxPool2d": nn.MaxPool2d,
    "pooling.SqrtGGNMaxPool3d": nn.MaxPool3d,
    "pooling.SqrtGGNAvgPool1d": nn.AvgPool1d,
    "pooling.SqrtGGNAvgPool2d": nn.AvgPool2d,
    "pooling.SqrtGGNAvgPool3d": nn.AvgPool3d,
    "slicing.SqrtGGNSlicing": Slicing,
}
PARAMETRISED = {
    nn.Linear: "linear.LinearDerivatives",
    nn.Conv1d: "conv1d.Conv1DDerivatives",
    nn.Conv2d: "conv2d.Conv2DDerivatives",
    nn.Conv3d: "conv3d.Conv3DDerivatives",
}


class UserSqrtGGN(SecondOrderBackpropExtension):
    """A user's own square root of the GGN, made of module extensions."""

    def __init__(self, mc_samples: int = 0, subsampling: list[int] | None = None) -> None:
        base = import_module(f"{PACKAGE}.base").SqrtGGNBaseModule
        rules = {cls: imported(PACKAGE, name)() for name, cls in MODULE_EXTENSIONS.items()}
        for cls, name in PARAMETRISED.items():
            rule = imported("backpack.core.derivatives", name)()
            rules[cls] = base(rule, params=["bias", "weight"])
        super().__init__("user_sqrt_ggn", module_exts=rules, subsampling=subsampling)
        self.mc_samples = mc_samples

    def get_loss_hessian_strategy(self) -> str:
        return LossHessianStrategy.SAMPLING if self.mc_samples else LossHessianStrategy.EXACT

    def get_num_mc_samples(self) -> int:
        return self.mc_samples


class Residual(nn.Module):
    """Branches with modules for what is not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.inner = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1)
        self.act, self.scale, self.add = nn.LeakyReLU(), ScaleModule(0.5), SumModule()
        self.pad, self.cut = Pad((1, 0)), Slicing((slice(None), slice(0, 2), slice(1, 3)))
        self.flat, self.drop, self.out = nn.Flatten(), nn.Dropout(0.3), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv(x))
        x = self.add(self.inner(x), self.scale(x))
        return self.out(self.drop(self.flat(self.cut(self.pad(x)))))


def convolutional(pool: type[nn.Module], conv: Any, act: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(
        conv(1, 2, 2), act, pool(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(features, 3)
    )


NETWORKS: dict[str, Any] = {
    "relu": lambda: (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), (3,)),
    "elu, positions": lambda: (
        nn.Sequential(nn.Linear(3, 4), nn.ELU(), nn.Flatten(), nn.Linear(8, 3)),
        (2, 3),
    ),
    "max 1d": lambda: (convolutional(nn.MaxPool1d, nn.Conv1d, nn.Tanh(), 4), (1, 5)),
    "avg 1d": lambda: (convolutional(nn.AvgPool1d, nn.Conv1d, nn.Sigmoid(), 4), (1, 5)),
    "max 2d": lambda: (convolutional(nn.MaxPool2d, nn.Conv2d, nn.SELU(), 8), (1, 5, 5)),
    "avg 2d": lambda: (convolutional(nn.AvgPool2d, nn.Conv2d, nn.LogSigmoid(), 8), (1, 5, 5)),
    "max 3d": lambda: (convolutional(nn.MaxPool3d, nn.Conv3d, nn.ReLU(), 4), (1, 3, 3, 5)),
    "avg 3d": lambda: (convolutional(nn.AvgPool3d, nn.Conv3d, nn.Tanh(), 4), (1, 3, 3, 5)),
    "zero padding": lambda: (
        nn.Sequential(
            nn.ZeroPad2d(1), nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
        ),
        (1, 2, 2),
    ),
    "residual": lambda: (Residual(), (2, 4, 5)),
}


@pytest.mark.parametrize("subsampling", [None, [2, 0], [1]], ids=str)
@pytest.mark.parametrize("mc_samples", [0, 3], ids=["exact", "mc"])
@pytest.mark.parametrize("loss", [nn.MSELoss, nn.CrossEntropyLoss])
@pytest.mark.parametrize("network", NETWORKS)
def test_user_extension_of_module_extensions(
    network: str, loss: type[nn.Module], mc_samples: int, subsampling: list[int] | None
) -> None:
    model, shape = NETWORKS[network]()
    model, lossfunc, X = extend(model), extend(loss(reduction="sum")), torch.randn(N, *shape)
    y = torch.randn(N, 3) if loss is nn.MSELoss else torch.randint(3, (N,))
    value, theirs = lossfunc(model(X), y), UserSqrtGGN(mc_samples, subsampling)
    ours = SqrtGGNMC(mc_samples, subsampling) if mc_samples else SqrtGGNExact(subsampling)
    for ext in (ours, theirs):
        torch.manual_seed(1)
        with backpack(ext, retain_graph=True):
            (0.3 * value).backward(retain_graph=True)
    for p in model.parameters():
        expected = getattr(p, ours.savefield)
        assert expected.shape[1] == (N if subsampling is None else len(subsampling))
        torch.testing.assert_close(p.user_sqrt_ggn, expected)


def test_module_extensions_can_be_pickled_and_copied() -> None:
    ext = pickle.loads(pickle.dumps(copy.deepcopy(UserSqrtGGN())))
    model, lossfunc = extend(nn.Sequential(nn.Linear(3, 2), nn.ReLU())), extend(nn.MSELoss())
    with backpack(ext, SqrtGGNExact()):
        lossfunc(model(torch.randn(N, 3)), torch.randn(N, 2)).backward()
    torch.testing.assert_close(model[0].weight.user_sqrt_ggn, model[0].weight.sqrt_ggn_exact)


def test_the_loss_asks_for_a_strategy_it_knows() -> None:
    class Averaged(UserSqrtGGN):
        def get_loss_hessian_strategy(self) -> str:
            return LossHessianStrategy.AVERAGE

    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(N, 3)), torch.randn(N, 2))
    with backpack(Averaged()), pytest.raises(ValueError, match=r"MSELoss.*EXACT.*'AVERAGE'"):
        loss.backward()
    assert not hasattr(model.weight, "user_sqrt_ggn")


def test_a_negative_loss_has_no_factor() -> None:
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(N, 3)), torch.randn(N, 2))
    with backpack(UserSqrtGGN()), pytest.raises(ValueError, match="negative"):
        (-loss).backward()


def test_a_subclass_may_have_another_method_for_a_parameter() -> None:
    base = import_module(f"{PACKAGE}.base").SqrtGGNBaseModule
    rule = imported("backpack.core.derivatives", "linear.LinearDerivatives")

    class Norms(base):
        def __init__(self) -> None:
            super().__init__(rule(), params=["weight", "bias"])

        def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Any:
            return bpQuantities.square().sum()

    ext: BackpropExtension = UserSqrtGGN()
    ext.set_module_extension(nn.Linear, Norms(), overwrite=True)
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss(reduction="sum"))
    with backpack(ext):
        lossfunc(model(torch.randn(N, 3)), torch.randn(N, 2)).backward()
    torch.testing.assert_close(model.weight.user_sqrt_ggn, torch.tensor(2.0 * 2 * N))
    assert model.bias.user_sqrt_ggn.shape == (2, N, 2)

"""A client library of Gram matrices: spectra and Newton steps of the GGN in the space of samples.

Everything is written from the interface: an extension with rules of its own for each layer, and a
hook that computes with what is saved and frees it, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, einsum, nn

from backpack import backpack, extend
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.conv1d import Conv1DDerivatives
from backpack.core.derivatives.conv2d import Conv2DDerivatives
from backpack.core.derivatives.conv_transpose2d import ConvTranspose2DDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.permute import PermuteDerivatives
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.extensions import BatchGrad, DiagGGNExact, SqrtGGNExact, SqrtGGNMC
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.hbp import LossHessianStrategy
from backpack.extensions.secondorder.sqrt_ggn import (
    activations,
    custom_module,
    dropout,
    flatten,
    losses,
    pad,
    padding,
    pooling,
    slicing,
)
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule

N, C = 5, 3


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Compute in float64."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------ the library


class GramModule(SqrtGGNBaseModule):
    """Saves the function of the factor that the extension wants, with the factor passed on."""

    def __init__(self, derivatives: Any, params: Sequence[str]) -> None:
        for name in params:
            setattr(self, name, self._parameter(name))
        super().__init__(derivatives, list(params))

    def _parameter(self, name: str) -> Any:
        def products(ext: Any, module: Any, g_inp: Any, g_out: Any, factor: Tensor) -> Any:
            rows = ext.get_subsampling()
            V = self.derivatives.param_mjp(
                name, module, g_inp, g_out, factor, sum_batch=False, subsampling=rows
            )
            return {"V": V, "gram": einsum("cn...,dm...->cndm", V, V)}

        return products


class Gram(SecondOrderBackpropExtension):
    """Products of a parameter's Jacobian with the factor, and their Gram matrix."""

    def __init__(self, mc_samples: int = 0, subsampling: list[int] | None = None) -> None:
        self.mc_samples = mc_samples
        super().__init__(
            "gram",
            subsampling=subsampling,
            module_exts={
                nn.CrossEntropyLoss: losses.SqrtGGNCrossEntropyLoss(),
                nn.MSELoss: losses.SqrtGGNMSELoss(),
                nn.Linear: GramModule(LinearDerivatives(), ["weight", "bias"]),
                nn.Conv1d: GramModule(Conv1DDerivatives(), ["weight", "bias"]),
                nn.Conv2d: GramModule(Conv2DDerivatives(), ["weight", "bias"]),
                nn.ConvTranspose2d: GramModule(ConvTranspose2DDerivatives(), ["weight", "bias"]),
                nn.BatchNorm2d: GramModule(BatchNormNdDerivatives(), ["weight", "bias"]),
                nn.Embedding: GramModule(EmbeddingDerivatives(), ["weight"]),
                nn.ReLU: activations.SqrtGGNReLU(),
                nn.Tanh: activations.SqrtGGNTanh(),
                nn.Sigmoid: activations.SqrtGGNSigmoid(),
                nn.Dropout: dropout.SqrtGGNDropout(),
                nn.Flatten: flatten.SqrtGGNFlatten(),
                nn.Identity: flatten.SqrtGGNFlatten(),
                nn.MaxPool2d: pooling.SqrtGGNMaxPool2d(),
                nn.AvgPool2d: pooling.SqrtGGNAvgPool2d(),
                nn.ZeroPad2d: padding.SqrtGGNZeroPad2d(),
                Pad: pad.SqrtGGNPad(),
                Slicing: slicing.SqrtGGNSlicing(),
                ScaleModule: custom_module.SqrtGGNScaleModule(),
                SumModule: custom_module.SqrtGGNSumModule(),
                Permute: SqrtGGNBaseModule(PermuteDerivatives()),
            },
        )

    def get_loss_hessian_strategy(self) -> str:
        return LossHessianStrategy.SAMPLING if self.mc_samples else LossHessianStrategy.EXACT

    def get_num_mc_samples(self) -> int:
        return self.mc_samples


class GramComputation:
    """Sums Gram matrices over parameters while the backward pass runs, and frees what they need."""

    def __init__(self, mc_samples: int = 0, subsampling: list[int] | None = None) -> None:
        self.mc_samples, self.subsampling = mc_samples, subsampling
        self.total: Tensor | None = None
        self.modules: list[nn.Module] = []

    def extension(self) -> Gram:
        return Gram(self.mc_samples, self.subsampling)

    def hook(self, module: nn.Module) -> None:
        self.modules.append(module)
        for p in module.parameters(recurse=False):
            if p.requires_grad:
                gram = p.gram.pop("gram")
                self.total = gram if self.total is None else self.total + gram
                del p.gram

    def matrix(self) -> Tensor:
        assert self.total is not None
        return self.total.flatten(2).flatten(0, 1)


# ------------------------------------------------------------------ what it is used on


class Block(nn.Module):
    """A residual block, scaled."""

    def __init__(self, channels: int, down: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.act, self.conv2 = nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.short = nn.Conv2d(channels, channels, 1) if down else nn.Identity()
        self.scale, self.add, self.out = ScaleModule(0.5), SumModule(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        short = self.short(x)
        x = self.conv2(self.act(self.bn1(self.conv1(x))))
        return self.out(self.add(self.scale(x), short))


def resnet() -> tuple[nn.Module, Tensor]:
    body = nn.Sequential(Block(2, down=True), nn.Sequential(Block(2, down=False), nn.AvgPool2d(2)))
    cut = Slicing((slice(None), slice(None), slice(0, 4), slice(1, 5)))
    stem = nn.Sequential(nn.Conv2d(1, 2, 2), Pad((1, 1), value=0.3), cut)
    head = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(8, C))
    return nn.Sequential(stem, body, head).eval(), torch.randn(N, 1, 5, 5)


def decoder() -> tuple[nn.Module, Tensor]:
    layers = [nn.ZeroPad2d(1), nn.Conv2d(1, 2, 2), nn.Tanh(), nn.ConvTranspose2d(2, 2, 2)]
    layers += [nn.MaxPool2d(2), nn.Identity(), nn.Flatten(), nn.Linear(8, C)]
    return nn.Sequential(*layers), torch.randn(N, 1, 3, 3)


def branches() -> tuple[nn.Module, Tensor]:
    parallel = Parallel(nn.Linear(4, 4), nn.Identity(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    return nn.Sequential(nn.Linear(3, 4), parallel, nn.Sigmoid(), nn.Linear(4, C)), torch.randn(
        N, 3
    )


def text() -> tuple[nn.Module, Tensor]:
    layers = [nn.Embedding(7, 4), Permute(0, 2, 1), nn.Conv1d(4, 3, 2), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(9, C)), torch.randint(7, (N, 4))


def frozen() -> tuple[nn.Module, Tensor]:
    model, X = resnet()
    for p in model[1][0].parameters():
        p.requires_grad_(False)
    return model, X


NETWORKS = {f.__name__: f for f in (resnet, decoder, branches, text, frozen)}
LOSSES = {
    "mse": (nn.MSELoss, lambda: torch.randn(N, C)),
    "ce": (nn.CrossEntropyLoss, lambda: torch.randint(C, (N,))),
}


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def factor(lossfunc: nn.Module, f: Tensor, y: Tensor) -> Tensor:
    """Return the interface's factor of the loss Hessian, ``[C, N, C]``."""
    if isinstance(lossfunc, nn.MSELoss):
        return (2 / f.numel()) ** 0.5 * torch.eye(C).unsqueeze(1).expand(C, len(f), C)
    p = f.softmax(1)
    S = torch.diag_embed(p.sqrt()) - p.unsqueeze(2) * p.sqrt().unsqueeze(1)
    return S.permute(2, 0, 1) / len(f) ** 0.5


def true_products(model: nn.Module, lossfunc: nn.Module, X: Tensor, y: Tensor) -> Tensor:
    """Return the transposed Jacobian times the factor, all parameters behind another: [C, N, P]."""
    f = model(X)
    S = factor(lossfunc, f.detach(), y)
    rows = []
    for c in range(C):
        for n in range(len(X)):
            grads = torch.autograd.grad(f[n], parameters(model), S[c, n], retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).reshape(C, len(X), -1)


@pytest.mark.parametrize("is_late", [False, True], ids=["made before", "made after"])
@pytest.mark.parametrize("subsampling", [None, [3, 0]], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_gram_matrix(network: str, loss: str, subsampling: list[int] | None, is_late: bool) -> None:
    model, X = NETWORKS[network]()
    lossfunc, y = LOSSES[loss][0](), LOSSES[loss][1]()
    V = true_products(model, lossfunc, X, y)
    V = (V if subsampling is None else V[:, subsampling]).flatten(0, 1)
    extend(model), extend(lossfunc)
    for _ in range(2):
        library = GramComputation(subsampling=subsampling)
        ext = None if is_late else library.extension()
        value = lossfunc(model(X), y)
        with backpack(ext or library.extension(), extension_hook=library.hook):
            value.backward()
        torch.testing.assert_close(library.matrix(), V @ V.T)
        assert not any("gram" in vars(p) for p in model.parameters())
        leaves = [m for m in model.modules() if not list(m.children())]
        leaves = [m for m in leaves if not isinstance(m, nn.ZeroPad2d)]  # no gradient reaches it
        assert set(library.modules) == {lossfunc, *leaves}
        assert len(library.modules) == len(leaves) + 1


@pytest.mark.parametrize("subsampling", [None, [4, 1, 2]], ids=str)
@pytest.mark.parametrize("network", NETWORKS)
def test_sampled_gram_matrix(network: str, subsampling: list[int] | None) -> None:
    """As the library's own extension draws."""
    model, X = NETWORKS[network]()
    lossfunc, y = extend(nn.CrossEntropyLoss()), LOSSES["ce"][1]()
    extend(model)
    library = GramComputation(2, subsampling)
    torch.manual_seed(3)
    with backpack(library.extension(), extension_hook=library.hook):
        lossfunc(model(X), y).backward()
    torch.manual_seed(3)
    with backpack(SqrtGGNMC(2, subsampling)):
        lossfunc(model(X), y).backward()
    V = torch.cat([p.sqrt_ggn_mc.flatten(2) for p in parameters(model)], 2).flatten(0, 1)
    torch.testing.assert_close(library.matrix(), V @ V.T)


@pytest.mark.parametrize("network", NETWORKS)
def test_directional_derivatives(network: str) -> None:
    """First and second derivatives along the leading eigenvectors, of other samples than these."""
    model, X = NETWORKS[network]()
    lossfunc, y = nn.MSELoss(), LOSSES["mse"][1]()
    V = true_products(model, lossfunc, X, y)
    grads = [
        torch.autograd.grad(lossfunc(model(X[n : n + 1]), y[n : n + 1]) / N, parameters(model))
        for n in range(N)
    ]
    G = torch.stack([torch.cat([g.flatten() for g in each]) for each in grads])
    extend(model), extend(lossfunc)
    curvature, gradients, others = [0, 2], [1, 4, 3], [3, 1]
    ext, ggn = Gram(subsampling=curvature), SqrtGGNExact(subsampling=others)
    gram, VG, U = [], [], []

    def hook(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            if p.requires_grad:
                P = p.gram.pop("V").flatten(2).flatten(0, 1)
                gram.append(P @ P.T)
                VG.append(P @ p.grad_batch.flatten(1).T)
                U.append(P @ p.sqrt_ggn_exact.flatten(2).flatten(0, 1).T)
                del p.gram, p.grad_batch, p.sqrt_ggn_exact

    with backpack(ext, ggn, BatchGrad(subsampling=gradients), extension_hook=hook):
        lossfunc(model(X), y).backward()
    P = V[:, curvature].flatten(0, 1)
    torch.testing.assert_close(sum(gram), P @ P.T)
    torch.testing.assert_close(sum(VG), P @ G[gradients].T)
    torch.testing.assert_close(sum(U), P @ V[:, others].flatten(0, 1).T)


def test_newton_steps() -> None:
    """Training with damped steps in the space of samples, next to quantities of the library."""
    model, X = resnet()
    lossfunc, y = extend(nn.CrossEntropyLoss()), LOSSES["ce"][1]()
    extend(model)
    history = []
    for _ in range(8):
        with backpack(Gram(), DiagGGNExact()):
            loss = lossfunc(model(X), y)
            loss.backward()
        history.append(loss.item())
        params = parameters(model)
        V = torch.cat([p.gram["V"].flatten(2) for p in params], 2).flatten(0, 1)
        diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in params])
        torch.testing.assert_close(V.square().sum(0), diagonal)
        g, damping = torch.cat([p.grad.flatten() for p in params]), 0.1
        inner = torch.linalg.solve(V @ V.T + damping * torch.eye(len(V)), V @ g)
        step = (g - V.T @ inner) / damping  # of the Woodbury identity
        with torch.no_grad():
            for p, d in zip(params, step.split([p.numel() for p in params]), strict=True):
                p -= d.view_as(p)
                p.grad = None
    assert history[-1] < 0.2 * history[0]

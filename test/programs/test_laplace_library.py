"""A client library of Laplace approximations: Jacobians, and curvature summed over a data set."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, disable, extend, memory_cleanup
from backpack.context import CTX
from backpack.extensions import KFAC, KFLR, BatchGrad, DiagGGNExact, DiagGGNMC, SumGradSquared
from backpack.utils.kroneckers import kfacs_to_mat

N, C, BATCH = 7, 3, 3


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Compute in float64."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------ the library


class Backend:
    """Curvature of a model with a likelihood, by this library.

    The loss is summed; the curvature of the squared error is that of half of it.
    """

    def __init__(self, model: nn.Module, likelihood: str, last_layer: nn.Module | None = None):
        self.model, self.layer = model, last_layer or model
        is_regression = likelihood == "regression"
        loss = nn.MSELoss if is_regression else nn.CrossEntropyLoss
        self.lossfunc, self.factor = loss(reduction="sum"), 0.5 if is_regression else 1.0
        extend(self.layer)
        extend(self.lossfunc)

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for p in self.layer.parameters() if p.requires_grad]

    def jacobians(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Jacobians ``[N, C, P]`` and the outputs, one backward pass for each output."""
        rows = []
        f = self.model(x)
        for i in range(f.shape[-1]):
            self.model.zero_grad()
            last = i == f.shape[-1] - 1
            with backpack(BatchGrad(), retain_graph=not last):
                f[:, i].sum().backward(retain_graph=not last)
            rows.append(torch.cat([p.grad_batch.flatten(1) for p in self.params], 1))
            for p in self.params:
                del p.grad_batch
        self.model.zero_grad()
        CTX.remove_hooks()
        extend(self.layer)
        extend(self.lossfunc)
        return torch.stack(rows, 1), f.detach()

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        f = self.model(x)
        loss = self.lossfunc(f, y)
        with backpack(BatchGrad(), SumGradSquared()):
            loss.backward()
        Gs = torch.cat([p.grad_batch.flatten(1) for p in self.params], 1)
        squares = torch.cat([p.sum_grad_squared.flatten() for p in self.params])
        torch.testing.assert_close(Gs.square().sum(0), squares)
        return self.factor * Gs, self.factor * loss.detach()

    def diag(self, x: Tensor, y: Tensor, mc_samples: int = 0) -> Tensor:
        ext = DiagGGNMC(mc_samples) if mc_samples else DiagGGNExact()
        with backpack(ext):
            self.lossfunc(self.model(x), y).backward()
        return self.factor * torch.cat([getattr(p, ext.savefield).flatten() for p in self.params])

    def kron(self, x: Tensor, y: Tensor, stochastic: bool = False) -> list[list[Tensor]]:
        """Return factors; the sum over the data set of the first, the mean of the second."""
        ext = KFAC() if stochastic else KFLR()
        with backpack(ext):
            self.lossfunc(self.model(x), y).backward()
        return [[f.clone() for f in getattr(p, ext.savefield)] for p in self.params]


def loop(
    backend: Backend, data: list[tuple[Tensor, Tensor]], what: Callable[..., Tensor]
) -> Tensor:
    """Sum over a data set, as a fit does."""
    total = None
    for x, y in data:
        backend.model.zero_grad()
        value = what(x, y)
        total = value if total is None else total + value
    assert total is not None
    return total


# ------------------------------------------------------------------ what it is used on


class Features(nn.Module):
    """A feature extractor with functions, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 2), nn.Linear(8, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv(x)).flatten(1) * 0.5)


def cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, C)]
    return nn.Sequential(*layers).eval()


def normalised() -> nn.Module:
    layers = [nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, C)]
    model = nn.Sequential(*layers)
    model(torch.randn(8, 1, 3, 3))
    return model.eval()


def batches(likelihood: str) -> list[tuple[Tensor, Tensor]]:
    X = torch.randn(N, 1, 3, 3)
    y = torch.randn(N, C) if likelihood == "regression" else torch.randint(C, (N,))
    return list(zip(X.split(BATCH), y.split(BATCH), strict=True))


def true_jacobians(backend: Backend, x: Tensor) -> Tensor:
    model = copy.deepcopy(backend.model)
    layer = model.fc if backend.layer is not backend.model else model
    params = [p for p in layer.parameters() if p.requires_grad]
    f = model(x)
    rows = [torch.autograd.grad(e, params, retain_graph=True) for e in f.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in r]) for r in rows]).reshape(*f.shape, -1)


def output_hessians(likelihood: str, f: Tensor) -> Tensor:
    if likelihood == "regression":
        return torch.eye(C).expand(len(f), C, C)
    p = f.softmax(1)
    return torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)


MODELS: dict[str, Callable[[str], Backend]] = {
    "all": lambda likelihood: Backend(cnn(), likelihood),
    "batch normalisation": lambda likelihood: Backend(normalised(), likelihood),
    "last layer": lambda likelihood: (lambda m: Backend(m, likelihood, m.fc))(Features()),
}


@pytest.fixture(params=["regression", "classification"])
def likelihood(request: Any) -> str:
    return request.param


@pytest.fixture(params=list(MODELS))
def backend(request: Any, likelihood: str) -> Backend:
    return MODELS[request.param](likelihood)


def test_jacobians(backend: Backend, likelihood: str) -> None:
    (x, _), *_ = batches(likelihood)
    for _ in range(2):  # the second time after hooks were removed and set again
        Js, f = backend.jacobians(x)
        torch.testing.assert_close(Js, true_jacobians(backend, x))
        torch.testing.assert_close(f, backend.model(x))
    assert all(p.grad is None for p in backend.model.parameters())


def test_gradients(backend: Backend, likelihood: str) -> None:
    (x, y), *_ = batches(likelihood)
    Gs, loss = backend.gradients(x, y)
    total = torch.cat([p.grad.flatten() for p in backend.params])
    torch.testing.assert_close(Gs.sum(0), backend.factor * total)
    f = backend.model(x).detach()
    residual = f - y if likelihood == "regression" else f.softmax(1) - torch.eye(C)[y]
    torch.testing.assert_close(Gs, torch.einsum("ncp,nc->np", true_jacobians(backend, x), residual))
    torch.testing.assert_close(loss, backend.factor * backend.lossfunc(f, y))


def test_diagonal_of_a_data_set(backend: Backend, likelihood: str) -> None:
    data = batches(likelihood)
    found = loop(backend, data, backend.diag)
    expected = sum(
        torch.einsum(
            "ncp,ncd,ndp->p",
            true_jacobians(backend, x),
            output_hessians(likelihood, backend.model(x).detach()),
            true_jacobians(backend, x),
        )
        for x, _ in data
    )
    torch.testing.assert_close(found, expected)
    sampled = loop(backend, data, lambda x, y: backend.diag(x, y, mc_samples=2000))
    torch.testing.assert_close(sampled, expected, rtol=0.2, atol=0.2 * expected.max().item())


def test_kronecker_factors_of_the_last_layer(likelihood: str) -> None:
    """The factors of the weight of a single sample are the exact block; of a bias always."""
    backend = MODELS["last layer"](likelihood)
    (x, y), *_ = batches(likelihood)
    J, H = true_jacobians(backend, x), output_hessians(likelihood, backend.model(x).detach())
    for n in range(len(x)):
        weight, bias = backend.kron(x[n : n + 1], y[n : n + 1])
        block = backend.factor * kfacs_to_mat(weight)
        size = len(block)
        W = J[n, :, :size]
        torch.testing.assert_close(block, W.T @ H[n] @ W)
        torch.testing.assert_close(backend.factor * bias[0], H[n])
    torch.testing.assert_close(backend.factor * backend.kron(x, y)[1][0], H.sum(0))
    assert [len(f) for f in backend.kron(x, y, stochastic=True)] == [2, 1]


def test_a_fit_leaves_the_model_as_it_was(backend: Backend, likelihood: str) -> None:
    """Parameters, buffers, modes; what is extended can be copied, evaluated and trained on."""
    before = copy.deepcopy(backend.model.state_dict())
    data = batches(likelihood)
    loop(backend, data, backend.diag)
    for context in (disable(), torch.no_grad(), nullcontext()):
        with context:
            backend.model(data[0][0])
    memory_cleanup(backend.model)
    for name, value in backend.model.state_dict().items():
        assert torch.equal(value, before[name])
    model = copy.deepcopy(backend.model)
    twin = Backend(model, likelihood, None if backend.layer is backend.model else model.fc)
    torch.testing.assert_close(
        loop(twin, data, twin.diag)[-C:], loop(backend, data, backend.diag)[-C:]
    )


def test_marginal_likelihood_training(likelihood: str) -> None:
    """Curvature every few epochs between ordinary steps: neither disturbs the other."""
    model = cnn()
    plain, backend, data = copy.deepcopy(model), Backend(model, likelihood), batches(likelihood)
    plain_loss = type(backend.lossfunc)(reduction="sum")
    one, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain))
    for epoch in range(4):
        for x, y in data:
            for net, optimiser, lossfunc in (
                (model, one, backend.lossfunc),
                (plain, other, plain_loss),
            ):
                optimiser.zero_grad()
                lossfunc(net(x), y).backward()
                optimiser.step()
        if epoch % 2:
            diagonal = loop(backend, data, backend.diag)
            fresh = Backend(copy.deepcopy(plain), likelihood)
            torch.testing.assert_close(diagonal, loop(fresh, data, fresh.diag))
            optimiser.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)

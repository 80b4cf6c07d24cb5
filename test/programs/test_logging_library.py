"""A client library that logs training: many quantities in one pass, computed and freed in hooks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, disable, extend
from backpack.custom_module.branching import SumModule
from backpack.extensions import BatchGrad, BatchL2Grad, DiagGGNExact, DiagHessian, SumGradSquared

N, C = 6, 3
SAVEFIELDS = ("grad_batch", "batch_l2", "sum_grad_squared", "diag_ggn_exact", "diag_h")


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Compute in float64."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------ the library


class Logger:
    """Asks for quantities at some of the steps, and keeps numbers alone.

    Hooks compute for each parameter; what was saved is freed at once, so that no more than one
    layer's individual gradients are in memory.
    """

    def __init__(self, params: list[nn.Parameter], every: dict[str, int]) -> None:
        self.params, self.every = {id(p): i for i, p in enumerate(params)}, every
        self.log: list[dict[str, Any]] = []
        self.parts: dict[str, dict[int, Tensor]] = {}
        self.most = 0

    def extensions(self, step: int) -> list[Any]:
        due = [name for name, number in self.every.items() if step % number == 0]
        wanted: dict[str, list[Any]] = {
            "centred norms": [BatchGrad()],
            "norm test": [BatchL2Grad(), SumGradSquared()],
            "curvature": [DiagGGNExact()],
            "hessian trace": [DiagHessian()],
        }
        return [ext for name in due for ext in wanted[name]]

    def track(self, step: int) -> Any:
        self.parts = {}
        exts = self.extensions(step)
        return backpack(*exts, extension_hook=self.hook if exts else None)

    def hook(self, module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            if id(p) not in self.params:
                continue
            self._count()
            if hasattr(p, "grad_batch"):
                p.grad_batch -= p.grad_batch.mean(0)  # in place
                self._put("centred norms", p, p.grad_batch.flatten(1).square().sum(1))
            if hasattr(p, "batch_l2"):
                self._put("norms", p, p.batch_l2.clone())
                self._put("squares", p, p.sum_grad_squared.sum())
            if hasattr(p, "diag_ggn_exact"):
                self._put("curvature", p, p.diag_ggn_exact.sum())
            if hasattr(p, "diag_h"):
                self._put("hessian trace", p, p.diag_h.sum())
            for name in SAVEFIELDS:
                vars(p).pop(name, None)

    def _count(self) -> None:
        self.most = max(self.most, sum("grad_batch" in vars(p) for p in self.all))

    @property
    def all(self) -> list[nn.Parameter]:
        found = [o for o in gc.get_objects() if type(o) is nn.Parameter and id(o) in self.params]
        return found

    def _put(self, what: str, p: nn.Parameter, value: Tensor) -> None:
        assert id(p) not in self.parts.setdefault(what, {}), f"{what} came twice"
        self.parts[what][id(p)] = value

    def flush(self, loss: Tensor) -> None:
        self.log.append(
            {"loss": loss.item(), **{k: sum(v.values()) for k, v in self.parts.items()}}
        )


# ------------------------------------------------------------------ what it is used on


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.short = nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Identity()
        self.add = SumModule()

    def forward(self, x: Tensor) -> Tensor:
        short = self.short(x)
        return self.add(self.act(self.conv(x)), short)


def resnet() -> nn.Module:
    layers = [nn.Conv2d(1, 2, 2), nn.ReLU(), Residual(), nn.Sequential(Residual(), nn.AvgPool2d(2))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, C))


def mlp() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(25, 4), nn.Sigmoid(), nn.Identity(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, C))


def partly_frozen() -> nn.Module:
    model = resnet()
    model[2].conv.weight.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {f.__name__: f for f in (resnet, mlp, partly_frozen)}


def truth(model: nn.Module, lossfunc: nn.Module, X: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Compute what the logger keeps by plain autograd, for all parameters of a model together."""
    params = [p for p in model.parameters() if p.requires_grad]
    f = model(X)
    losses = nn.functional.cross_entropy(f, y, reduction="none") / N
    rows = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    G = torch.stack([torch.cat([g.flatten() for g in r]) for r in rows])
    p = f.softmax(1).detach()
    H = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) / N
    J = [torch.autograd.grad(e, params, retain_graph=True) for e in f.flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in r]) for r in J]).reshape(N, C, -1)
    grads = torch.autograd.grad(losses.sum(), params, create_graph=True)
    trace = torch.tensor(0.0)
    for g, q in zip(grads, params, strict=True):
        for i, e in enumerate(g.flatten()):
            if e.requires_grad:
                second = torch.autograd.grad(e, [q], retain_graph=True, allow_unused=True)[0]
                trace += 0.0 if second is None else second.flatten()[i]
    return {
        "centred norms": (G - G.mean(0)).square().sum(1),
        "norms": G.square().sum(1),
        "squares": G.square().sum(),
        "curvature": torch.einsum("ncp,ncd,ndp->", J, H, J),
        "hessian trace": trace,
    }


def train(model: nn.Module, lossfunc: nn.Module, step: Any) -> None:
    torch.manual_seed(1)
    optimiser = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    for number in range(6):
        X, y = torch.randn(N, 1, 5, 5), torch.randint(C, (N,))
        optimiser.zero_grad()
        step(number, X, y)
        optimiser.step()


@pytest.mark.parametrize("name", MODELS)
def test_training_with_a_logger(name: str) -> None:
    """The numbers are right at every step, and the training is that without the logger."""
    model = MODELS[name]().eval()
    plain, plain_loss = copy.deepcopy(model), nn.CrossEntropyLoss()
    train(plain, plain_loss, lambda number, X, y: plain_loss(plain(X), y).backward())

    extend(model)
    lossfunc = extend(nn.CrossEntropyLoss())
    params = [p for p in model.parameters() if p.requires_grad]
    every = {"centred norms": 1, "norm test": 2, "curvature": 3, "hessian trace": 3}
    logger = Logger(params, every)

    def step(number: int, X: Tensor, y: Tensor) -> None:
        with disable():
            lossfunc(model(X), y)  # an evaluation in between stores nothing
        expected = truth(copy.deepcopy(model), lossfunc, X, y)
        with logger.track(number):
            loss = lossfunc(model(X), y)
            loss.backward()
        logger.flush(loss)
        found = {k: v for k, v in logger.log[-1].items() if k != "loss"}
        assert ("norms" in found) == (number % 2 == 0)
        for what, value in found.items():
            torch.testing.assert_close(value, expected[what])

    train(model, lossfunc, step)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert not set(SAVEFIELDS) & set(vars(p))
    assert [len(row) for row in logger.log] == [6, 2, 4, 4, 4, 2]


def test_at_most_one_layer_is_in_memory() -> None:
    """With first order alone, hooks run while the backward pass does."""
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    logger = Logger(list(model.parameters()), {"centred norms": 1})
    with logger.track(0):
        lossfunc(model(torch.randn(N, 1, 5, 5)), torch.randint(C, (N,))).backward()
    assert logger.most == 2  # weight and bias of a layer


def test_a_logger_of_every_call() -> None:
    """Each module is there once, in backward order, whatever is due."""
    model, lossfunc = extend(resnet()), extend(nn.CrossEntropyLoss())
    leaves = [m for m in model.modules() if not list(m.children())]
    X, y = torch.randn(N, 1, 5, 5), torch.randint(C, (N,))
    # the shortcut is called in front of the convolution
    order = [m for m in leaves if not isinstance(m, nn.Identity)]
    for block in (model[2], model[3][0]):
        order.insert(order.index(block.conv), block.short)
    for exts in ([], [BatchGrad()], [DiagGGNExact()], [BatchGrad(), DiagHessian()]):
        seen: list[nn.Module] = []
        with backpack(*exts, extension_hook=seen.append):
            lossfunc(model(X), y).backward()
        assert sorted(map(id, seen)) == sorted(map(id, [lossfunc, *leaves]))
        if exts and exts[-1].expects_backpropagation_quantities():
            assert seen == [lossfunc, *reversed(order)]

"""Every function for which torch has example arguments, between a layer and a loss.

The examples are those that torch tests its own derivatives with (``op_db``): other shapes, options
and special cases than we would think of. A quantity is right, or refused with a clear error.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from backpack import backpack, extend, extensions
from backpack.core.engine.backpropagation import slice_bytes

PARTS = 8
EXAMPLES = 4  # of each function
LARGEST = 150  # entries of an example
# What is random under a seed of its own, which a traced model does not set again.
SEEDED = "dropout", "rrelu", "scaled_dot_product_attention", "bernoulli", "normal", "multinomial"


class Around(nn.Module):
    """A linear layer, whose outputs vary the first argument of a function a little.

    Arguments with a row, or a number, for each sample are data, others are buffers or parameters.
    """

    def __init__(self, function: Callable[..., Any], x: Tensor, arguments: Any, are_trained: bool):
        super().__init__()
        self.layer = nn.Linear(3, math.prod(x.shape[1:]))
        self.function, self.shape = function, x.shape
        self.leaves, self.spec = tree_flatten(arguments)
        data = [x]
        for i, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                continue
            if leaf.dtype == x.dtype and leaf.shape in (x.shape, x.shape[:1]):
                data.append(leaf)
            elif are_trained and leaf.dtype == x.dtype and leaf.numel():
                self.register_parameter(f"argument{i}", nn.Parameter(leaf.detach().clone()))
            else:
                self.register_buffer(f"argument{i}", leaf.detach())
        self.shapes = [d.shape for d in data]
        rows = [torch.rand(len(x), 3), *[d.detach().reshape(len(x), -1) for d in data]]
        self.sizes = [row.shape[1] for row in rows]
        self.data = torch.cat(rows, 1)

    def forward(self, X: Tensor) -> Tensor:
        z, *rows = X.split(self.sizes, 1)
        data = [row.reshape(shape) for row, shape in zip(rows, self.shapes, strict=True)]
        x, *others = data
        h = x + 0.05 * self.layer(z).reshape(self.shape)
        leaves = []
        for i, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                leaves.append(leaf)
            elif hasattr(self, f"argument{i}"):
                leaves.append(getattr(self, f"argument{i}"))
            else:
                leaves.append(others.pop(0))
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(h, *args, **kwargs)


def gradients_of_rows(model: Around, lossfunc: Any, X: Tensor, y: Tensor) -> list[Tensor]:
    """Gradient that each row of the layer adds, wherever functions have moved its entries."""
    rows: list[Tensor] = []
    hook = model.layer.register_forward_hook(lambda _, __, out: rows.append(out))
    loss = lossfunc(model(X), y)
    hook.remove()
    (g,) = torch.autograd.grad(loss, rows)
    return [torch.einsum("no,ni->noi", g, X[:, :3]), g]


QUANTITIES: dict[Any, Callable[..., list[Tensor]]] = {
    extensions.BatchGrad: gradients_of_rows,
    extensions.DiagGGNExact: oracle.ggn_diag,
    extensions.DiagHessian: oracle.hessian_diag,
}


def examples(op: Any, are_trained: bool) -> Iterator[Around]:
    """Make models of examples that have samples, and a derivative everywhere."""
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        x = sample.input
        fits = isinstance(x, Tensor) and x.dtype == torch.float64 and x.layout == torch.strided
        if fits and x.dim() and len(x) > 1 and x.numel() <= LARGEST:
            yield Around(op.op, x, (sample.args, sample.kwargs), are_trained)


def output_of(model: Around) -> Tensor | None:
    """Compute what the model returns; None if that is nothing for a loss."""
    try:
        out = model(model.data)
    except (RuntimeError, ValueError):  # an example of an error
        return None
    if not isinstance(out, Tensor) or not (out.dim() and out.numel() and out.requires_grad):
        return None
    is_usual = (
        out.dtype == torch.float64
        and out.layout == torch.strided
        and out.numel() <= LARGEST
        and bool(out.isfinite().all())
    )
    return out if is_usual else None


def outcome(model: Around, target: Tensor, extension: Any, converter: bool = True) -> str:
    """Compare one quantity; ``"right"``, ``"refused"``, ``"undefined"`` or what is wrong."""
    lossfunc = nn.MSELoss(reduction="sum")
    try:
        expected = QUANTITIES[extension](model, lossfunc, model.data, target)
    except (RuntimeError, NotImplementedError):  # torch has no second derivative
        return "undefined"
    if not all(bool(e.isfinite().all()) for e in expected):
        return "undefined"
    try:
        extended = extend(model, use_converter=converter)
        with backpack(extension()):
            extend(lossfunc)(extended(model.data), target).backward()
    except (ValueError, NotImplementedError):
        return "refused"
    except Exception as error:  # neither right nor refused: the test fails, and shows it
        return f"{type(error).__name__}: {error}"
    for p, e in zip(extended.parameters(), expected, strict=True):
        f = getattr(p, extension().savefield, None)
        if f is None and p.grad is None:  # only its shape is read
            f = torch.zeros_like(e)
        if f is None or f.shape != e.shape or not torch.allclose(f, e, rtol=1e-6, atol=1e-8):
            return f"{f} is not {e}"
    return "right"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("are_trained", [False, True], ids=["fixed", "trained"])
@pytest.mark.parametrize("part", range(PARTS))
def test_right_or_refused(part: int, are_trained: bool) -> None:
    """Quantities of a layer, and of arguments, agree with autograd, whatever the function."""
    from torch.testing._internal.common_methods_invocations import op_db

    counts: Counter[str] = Counter()
    wrong = []
    for op in op_db[part::PARTS]:
        if not (op.supports_autograd and op.supports_dtype(torch.float64, "cpu")):
            continue
        if any(word in op.name for word in SEEDED):
            continue
        torch.manual_seed(0)
        for model in islice(examples(op, are_trained), EXAMPLES):
            model = model.double()
            out = output_of(model)
            if out is None or are_trained > (len(list(model.parameters())) > 2):
                continue
            target = torch.rand_like(out).detach()
            for extension in QUANTITIES:
                if extension is extensions.BatchGrad and are_trained:
                    continue  # of the layer alone
                result = outcome(model, target, extension)
                counts[result if result in ("right", "refused", "undefined") else "wrong"] += 1
                if result not in ("right", "refused", "undefined"):
                    leaves = [x.shape if isinstance(x, Tensor) else x for x in model.leaves]
                    what = extension.__name__, op.name, model.shape, leaves, result
                    wrong.append(" ".join(map(str, what)))
    assert not wrong, "\n".join(wrong)
    assert counts["right"] > counts["refused"], counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_right_or_refused_without_a_converter() -> None:
    """What second-order quantities read from the graph of a function is right."""
    from torch.testing._internal.common_methods_invocations import op_db

    counts: Counter[str] = Counter()
    for op in op_db:
        if not (op.supports_autograd and op.supports_dtype(torch.float64, "cpu")):
            continue
        torch.manual_seed(0)
        for model in islice(examples(op, False), 1):
            model = model.double()
            out = output_of(model)
            if out is None:
                continue
            target = torch.rand_like(out).detach()
            for extension in (extensions.DiagGGNExact, extensions.DiagHessian):
                result = outcome(model, target, extension, converter=False)
                assert result in ("right", "refused", "undefined"), (op.name, extension, result)
                counts[result] += 1
    assert counts["right"] > 100, counts


# --- Chains ---------------------------------------------------------------------------------------

CHAINS = 96
# Functions [N, 3, 4] -> [N, 3, 4] of a model and an activation. Those of ``changed`` change a copy.
STEPS: list[Callable[[Any, Tensor], Tensor]] = [
    lambda m, h: h.sin() * h,
    lambda m, h: F.gelu(h) + h,
    lambda m, h: torch.where(h > 0, h, m.gain * h),
    lambda m, h: h * m.gain.exp(),
    lambda m, h: torch.lerp(h, h.cos(), torch.sigmoid(m.gain)),
    lambda m, h: m.layer(h) + m.layer(h**2),
    lambda m, h: F.linear(h, m.layer.weight / 2, m.layer.bias),
    lambda m, h: h @ m.layer.weight,
    lambda m, h: h * m.layer.weight.norm(),
    lambda m, h: m.layer(h.transpose(0, 1)).tanh().transpose(0, 1),
    lambda m, h: m.layer(h.reshape(-1, 4)).tanh().reshape(h.shape),
    lambda m, h: m.layer(h.repeat_interleave(2, 0)).sin().unflatten(0, (-1, 2)).sum(1),
    lambda m, h: m.layer(torch.cat([h, h.cos()])).tanh().unflatten(0, (2, -1)).sum(0),
    lambda m, h: m.layer(h[h > -9].view(h.shape)),
    lambda m, h: h[torch.arange(3) < torch.full((len(h), 1), 3)].sin().view(h.shape),
    lambda m, h: h.flip(0).tanh().flip(0),
    lambda m, h: (h @ h.mT).softmax(-1) @ h,
    lambda m, h: F.scaled_dot_product_attention(h, h.sin(), h, is_causal=True),
    lambda m, h: torch.einsum("nij,nkj->nik", h, h.tanh()) @ h,
    lambda m, h: torch.linalg.solve(h @ h.mT + torch.eye(3, dtype=h.dtype), h),
    lambda m, h: torch.cdist(h, h.sin() + 2) @ h,
    lambda m, h: F.layer_norm(h, h.shape[1:]),
    lambda m, h: F.normalize(h, dim=1) + h.std(-1, keepdim=True),
    lambda m, h: h - h.logsumexp((1, 2), keepdim=True),
    lambda m, h: h.cumsum(1).flip(-1),
    lambda m, h: h.sort(-1).values * h.amax(1, keepdim=True),
    lambda m, h: h.gather(1, h.argsort(1)) * h,
    lambda m, h: h.topk(2, -1).values.repeat(1, 1, 2),
    lambda m, h: torch.cat([h[:, 1:].tanh(), h[:, :1]], 1),
    lambda m, h: torch.stack(
        [a * b for a, b in zip(h.unbind(1), h.flip(1).unbind(1), strict=True)], 1
    ),
    lambda m, h: torch.cat([m.token.expand(len(h), 1, -1), h[:, :2]], 1),
    lambda m, h: F.mse_loss(h, h.flip(1), reduction="none") + h,
    lambda m, h: changed(h, lambda x: x[:, :2].mul_(h[:, 1:])),
    lambda m, h: changed(h, lambda x: x[..., 0].add_(h[..., 1]).div_(1 + h[..., 2] ** 2)),
    lambda m, h: changed(h, lambda x: x[:, 1:].copy_(h[:, :2].sin())),
    lambda m, h: changed(h, lambda x: x.tanh_()),
]


def changed(h: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """Return a copy of an activation after a change in place."""
    copied = h.clone(memory_format=torch.contiguous_format)
    change(copied)
    return copied


class Chain(nn.Module):
    """Layers and functions, with a connection that skips some."""

    def __init__(self, steps: Sequence[Callable[[Any, Tensor], Tensor]]):
        super().__init__()
        self.steps = steps
        self.layer, self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(12, 2)
        self.gain, self.token = nn.Parameter(torch.tensor(0.6)), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        start = h = self.first(x)
        for step in self.steps:
            h = step(self, h)
        return self.head((self.layer(h) + start).tanh().flatten(1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("converter", [True, "record", False])
@pytest.mark.parametrize("chosen", [None, [2, 0]], ids=str)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(reduction="sum")], ids=str)
def test_chains(loss: nn.Module, chosen: list[int] | None, converter: Any) -> None:
    """Quantities of all samples or some, in slices of samples, agree with autograd.

    Without a converter, they may be refused; individual gradients are those of rows.
    """
    drawn, right = random.Random(f"{loss} {chosen} {converter}"), 0
    rows = chosen or slice(None)
    for _ in range(CHAINS // 8):
        numbers = drawn.sample(range(len(STEPS)), 3 if converter else 1)
        torch.manual_seed(0)
        model = Chain([STEPS[n] for n in numbers]).double()
        for p in (model.gain, model.token):
            p.requires_grad_(bool(converter))
        X = torch.randn(3, 3, 4, dtype=torch.float64)
        y = torch.rand(3, 2).double() if isinstance(loss, nn.MSELoss) else torch.tensor([1, 0, 1])
        with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
            truths = [
                (extensions.BatchDiagGGNExact, oracle.batch_ggn_diag(model, loss, X, y)),
                (extensions.BatchDiagHessian, oracle.batch_hessian_diag(model, loss, X, y)),
            ]
        if converter:
            truths.append((extensions.BatchGrad, oracle.batch_grad(model, loss, X, y)))
        extended = extend(model, use_converter=converter)
        try:
            with slice_bytes(2**8), backpack(*[extension(chosen) for extension, _ in truths]):
                extend(loss)(extended(X), y).backward()
        except ValueError:
            if converter:
                raise
            continue
        trained = [p for p in extended.parameters() if p.requires_grad]
        for extension, truth in truths:
            for p, expected in zip(trained, truth, strict=True):
                if p.grad is not None:
                    found, wanted = getattr(p, extension().savefield), expected[rows]
                    what = extension.__name__, numbers, found - wanted
                    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-8), what
        right += 1
    assert right > CHAINS // 32

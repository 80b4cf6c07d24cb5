"""Mixed precision, devices, and what else torch does to a model: it works, or says what to do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import oracle
import pytest
import torch
from cases import Case, Problem, select
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend, extensions
from backpack.core.derivatives import REGISTRY, reductions
from backpack.core.engine.backpropagation import slice_bytes

N = 4
TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}
ORACLES = {
    extensions.BatchGrad: oracle.batch_grad,
    extensions.Variance: oracle.variance,
    extensions.DiagGGNExact: oracle.ggn_diag,
    extensions.DiagHessian: oracle.hessian_diag,
}
PRODUCTS = {extensions.HMP: oracle.hessian_blocks, extensions.GGNMP: oracle.ggn_blocks}
EVERY = [cls for cls in map(extensions.__dict__.get, extensions.__all__) if cls.__name__ != "HBP"]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 3), torch.randint(2, (N,))


def agrees(
    model: nn.Module,
    reference: nn.Module,
    run: Callable[[Tensor], Tensor] | None = None,
    batch: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Compare an extended model with a plain one that has the same parameters."""
    X, y = batch or data()
    loss = extend(nn.CrossEntropyLoss())((run or model)(X), y)
    with backpack(*(ext() for ext in (*ORACLES, *PRODUCTS))):
        loss.backward()
    params = oracle.trainable(model)
    with oracle.exact_weight_norm():
        expected = {
            ext: truth(reference, nn.CrossEntropyLoss(), X, y)
            for ext, truth in (ORACLES | PRODUCTS).items()
        }
    for ext in ORACLES:
        for p, value in zip(params, expected[ext], strict=True):
            torch.testing.assert_close(getattr(p, ext().savefield), value, **TOLERANCE)
    for ext in PRODUCTS:
        for p, block in zip(params, expected[ext], strict=True):
            units = torch.eye(p.numel()).reshape(-1, *p.shape)
            product = getattr(p, ext().savefield)(units).reshape(p.numel(), -1)
            torch.testing.assert_close(product, block, **TOLERANCE)


# ------------------------------------------------------------------ autocast, mixed precisions

AUTOCAST = [
    case
    for case in select("network", without="mixing random rows dag unknown")
    if case.name
    in {
        *("transformer", "attention", "lstm-projected", "embedding-bag-mean"),
        *("two-consumers", "residual", "attention-by-functions", "class-token", "frozen-some"),
        *("split", "gru-cell", "tied-embedding", "tagger"),
    }
]


def in_autocast(case: Case, dtype: torch.dtype | None, *exts: Any, scale: float = 1.0) -> list:
    model, lossfunc, X, y = case.build(dtype=torch.float32)
    extend(model), extend(lossfunc)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = lossfunc(model(X), y)
    with backpack(*exts):
        (scale * loss).backward()
    return oracle.trainable(model)


def has_kernels(case: Case) -> bool:
    """Whether torch runs the model on this processor: not all have an LSTM in bfloat16."""
    model, _, X, _ = case.build(dtype=torch.float32)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(X)
    except RuntimeError as error:
        return "primitive descriptor" not in str(error)
    return True


def test_the_cases_exist() -> None:
    assert len(AUTOCAST) == 12


@pytest.mark.parametrize("case", AUTOCAST, ids=str)
def test_autocast(case: Case) -> None:
    """Within 0.1 of float32 (bfloat16 has 8 bits), and in the precision of the parameters."""
    if not has_kernels(case):
        pytest.skip("this processor has no kernel of torch for the plain model in bfloat16")
    exts = [
        extensions.BatchGrad,
        extensions.BatchL2Grad,
        extensions.Variance,
        extensions.DiagGGNExact,
        extensions.SqrtGGNExact,
        extensions.DiagHessian,
    ]
    make = [*exts, extensions.KFLR, extensions.KFAC, extensions.HMP, extensions.DiagGGNMC]
    rough = in_autocast(case, torch.bfloat16, *(ext() for ext in make))
    exact = in_autocast(case, None, *(ext() for ext in make))
    for ext in exts:
        one = torch.cat([getattr(p, ext().savefield).flatten() for p in exact])
        other = torch.cat([getattr(p, ext().savefield).flatten() for p in rough])
        assert other.dtype == torch.float32
        assert (one - other).norm() <= 0.1 * one.norm(), ext.__name__
    for p, q in zip(rough, exact, strict=True):
        for factors in (p.kflr, p.kfac):
            assert all(factor.dtype == torch.float32 for factor in factors)
        assert [f.shape for f in p.kflr] == [f.shape for f in q.kflr]
        vector = torch.randn(2, *p.shape)
        assert p.hmp(vector).dtype == torch.float32
    one = torch.cat([p.hmp(torch.ones_like(p)).flatten() for p in exact])
    other = torch.cat([p.hmp(torch.ones_like(p)).flatten() for p in rough])
    assert (one - other).norm() <= 0.1 * one.norm()


def test_backward_inside_autocast_is_the_same() -> None:
    model, (X, y) = mlp(), data()
    extend(model)
    lossfunc = extend(nn.CrossEntropyLoss())
    results = []
    for inside in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = lossfunc(model(X), y)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside),
            backpack(extensions.DiagGGNExact(), extensions.BatchGrad(), extensions.HMP()),
        ):
            loss.backward()
            products = [p.hmp(torch.ones_like(p)) for p in model.parameters()]
        results.append([*(p.diag_ggn_exact for p in model.parameters()), *products])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_alone_inside_autocast_changes_no_gradients(dtype: torch.dtype) -> None:
    """What autograd rounds there was taken for the work of a hook."""
    torch.manual_seed(0)  # of others, no ReLU passes anything
    model = extend(
        nn.Sequential(
            *(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16, 3)),
        )
    )
    X, y = torch.rand(5, 6), torch.arange(5) % 3
    for is_doubled in (False, True):
        loss = extend(nn.CrossEntropyLoss())(model(X), y)
        if is_doubled:
            model[2].register_full_backward_hook(lambda _, grads, __: (2 * grads[0],))
            loss = extend(nn.CrossEntropyLoss())(model(X), y)
        with (
            torch.autocast("cpu", dtype=dtype),
            backpack(extensions.DiagHessian()),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            loss.backward()
        assert any("a hook" in str(w.message) for w in caught) == is_doubled


def test_gradient_scaler() -> None:
    """Float16 with a scaled loss: gradients and curvature carry the scale, like ``.grad``."""
    model, (X, y) = extend(mlp()), data()
    lossfunc = extend(nn.CrossEntropyLoss())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(scaled: bool) -> list[Tensor]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = lossfunc(model(X), y)
        with backpack(extensions.DiagGGNExact(), extensions.BatchGrad()), warnings.catch_warnings():
            warnings.simplefilter("error")
            (scaler.scale(loss) if scaled else loss).backward()
        for p in model.parameters():
            torch.testing.assert_close(
                p.grad_batch.sum(0), p.grad, rtol=5e-2, atol=5e-2 * p.grad.abs().max().item()
            )
        return [p.diag_ggn_exact for p in model.parameters()]

    for scaled, plain in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(scaled, 1024 * plain, rtol=2e-2, atol=1e-3 * scaled.max().item())
    scaler.scale(lossfunc(model(X), y)).backward()
    scaler.step(optimizer)
    scaler.update()


def test_default_epsilon_is_that_of_the_module() -> None:
    """Not that of the precision in which derivatives are computed."""
    X, y = (t[:, :2] if t.dim() > 1 else t for t in data())
    results = []
    for eps in (None, torch.finfo(torch.float32).eps):
        model = extend(nn.Sequential(nn.Linear(2, 4, bias=False), nn.RMSNorm(4, eps=eps)))
        nn.init.constant_(model[0].weight, 1e-4)
        loss = extend(nn.CrossEntropyLoss())(model(X).double(), y)
        with backpack(extensions.DiagGGNExact(), extensions.DiagHessian()):
            loss.backward()
        results += [[v for p in model.parameters() for v in (p.diag_ggn_exact, p.diag_h)]]
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("first", [torch.float64, torch.bfloat16])
def test_parameters_of_different_precisions(first: torch.dtype) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.tanh, self.two = nn.Linear(3, 4).to(first), nn.Tanh(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.tanh(self.one(x.to(first))).to(torch.float32))

    torch.manual_seed(0)
    model = Cast()
    exact, (X, y) = copy.deepcopy(model).double(), data()
    exact.two.double()
    reference = nn.Sequential(exact.one, nn.Tanh(), exact.two)
    model = extend(model, use_converter=True)
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(*(ext() for ext in ORACLES), extensions.KFLR()):
        loss.backward()
    X = X.to(first).double()
    for ext, truth in ORACLES.items():
        expected = truth(reference, nn.CrossEntropyLoss(), X, y)
        for p, value in zip(oracle.trainable(model), expected, strict=True):
            found = getattr(p, ext().savefield)
            assert found.dtype == p.dtype
            bound = 0.1 if first == torch.bfloat16 else 1e-5
            assert (found.double() - value).norm() <= bound * value.norm() + 1e-12
    assert model.one.weight.kflr[0].dtype == first


def test_a_number_that_a_function_of_lower_precision_reads(double_precision: None) -> None:
    """Its gradients of samples add up to that of all: large ones cancel, which leaves rounding."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
            self.numbers = nn.Parameter(torch.randn(2))

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.numbers.unbind()
            h = self.layer(x).float()
            h = torch.cat([h, 1e-4 * h.sin() - h], 1) * one
            return self.head(h.double().reshape(len(x), 2, 3)).sum(1) * other

    torch.manual_seed(0)
    model, X, y = Scaled(), torch.randn(N, 3), torch.randint(2, (N,))
    converted = extend(copy.deepcopy(model), use_converter="record")
    loss = extend(nn.CrossEntropyLoss())(converted(X), y)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    problem = (model, nn.CrossEntropyLoss(), X, y)
    expected = dict(zip(dict(model.named_parameters()), oracle.batch_grad(*problem), strict=True))
    diagonal = dict(zip(dict(model.named_parameters()), oracle.ggn_diag(*problem), strict=True))
    close = {"rtol": 1e-4, "atol": 1e-8}
    torch.testing.assert_close(converted.numbers.grad_batch, expected["numbers"], **close)
    torch.testing.assert_close(converted.numbers.diag_ggn_exact, diagonal["numbers"], **close)


# ------------------------------------------------------------------ checkpoints


class Checkpointed(nn.Module):
    """Recomputes its middle in the backward pass."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return self.last(self.middle(self.middle(x)))
        for _ in range(2):
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("converter", [False, "record"])
def test_checkpoint(converter: Any, double_precision: None) -> None:
    model, reference = Checkpointed(False), Checkpointed(None)
    reference.load_state_dict(model.state_dict())
    agrees(extend(model, use_converter=converter), reference)


def test_reentrant_checkpoint(double_precision: None) -> None:
    model, reference = Checkpointed(True), Checkpointed(None)
    reference.load_state_dict(model.state_dict())
    extend(model)
    X, y = data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with (
        backpack(extensions.DiagGGNExact()),
        pytest.raises(ValueError, match="use_reentrant=False"),
    ):
        loss.backward()


# ------------------------------------------------------------------ modules that change


@pytest.mark.parametrize("when", ["before", "after"])
def test_lazy_modules(when: str, double_precision: None) -> None:
    """Extended before or after the call that creates their parameters."""
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    X, y = data()
    if when == "before":
        extend(model)
    model(X)
    extend(model)
    agrees(model, copy.deepcopy(model), batch=(X, y))


@pytest.mark.parametrize("converter", [False, True, "record"])
def test_lazy_modules_that_look_at_their_tensors(converter: Any, double_precision: None) -> None:
    """Recorded ones could not be called: their tensors have no shape yet."""
    (X, y), lossfunc = data(), nn.CrossEntropyLoss()
    model = nn.Sequential(
        *(nn.Unflatten(1, (1, -1)), nn.LazyConv1d(2, 2), nn.LazyBatchNorm1d().eval()),
        *(nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)),
    )
    loss = extend(lossfunc)(extend(model, use_converter=converter)(X), y)
    with backpack(extensions.DiagGGNExact()):
        loss.backward()
    expected = oracle.ggn_diag(copy.deepcopy(model), lossfunc, X, y)
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact, value)


def test_lazy_modules_in_their_first_call(double_precision: None) -> None:
    model, (X, y) = extend(nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))), data()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    for p, expected in zip(
        model.parameters(),
        oracle.ggn_diag(copy.deepcopy(model), nn.CrossEntropyLoss(), X, y),
        strict=True,
    ):
        torch.testing.assert_close(p.diag_ggn_exact, expected, **TOLERANCE)
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


LAZY = [cls for name, cls in vars(nn).items() if name.startswith("Lazy")]


@pytest.mark.parametrize("cls", LAZY, ids=lambda c: c.__name__)
def test_lazy_modules_become_supported_ones(cls: Any) -> None:
    assert cls.cls_to_become in REGISTRY


REPARAMETRISED = {
    "weight_norm": lambda m: parametrizations.weight_norm(m),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m),
    "orthogonal": lambda m: parametrizations.orthogonal(m),
    "pruned": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "pruned-structured": lambda m: prune.ln_structured(m, "weight", 0.5, n=2, dim=0),
}


@pytest.mark.parametrize("name", REPARAMETRISED)
def test_parametrisations(name: str, double_precision: None) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        model = mlp()
        REPARAMETRISED[name](model[2])
        return model.eval()

    model, reference = make(), make()
    reference.load_state_dict(model.state_dict())
    agrees(extend(model), reference)


@pytest.mark.parametrize("order", ["extend-compile", "compile-extend", "in-place"])
def test_compile(order: str, double_precision: None) -> None:
    """The backend that runs the graphs as they are: what is tested is how they are cut."""
    torch._dynamo.reset()
    model = mlp()
    reference = copy.deepcopy(model)
    if order == "in-place":
        model.compile(backend="aot_eager")
        agrees(extend(model), reference)
    elif order == "extend-compile":
        agrees(model, reference, torch.compile(extend(model), backend="aot_eager"))
    else:
        agrees(model, reference, extend(torch.compile(model, backend="aot_eager")))


def test_data_parallel() -> None:
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
        extend(nn.Sequential(nn.DataParallel(mlp())))
    replica = extend(mlp())
    replica[0]._is_replica = True  # what DataParallel makes for each device
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        replica(data()[0])


@pytest.mark.parametrize("frozen", ["bias", "weight", "first layer"])
def test_frozen_in_part(frozen: str, double_precision: None) -> None:
    model = mlp()
    for name, p in model.named_parameters():
        p.requires_grad_(not (name.startswith("0.") if frozen == "first layer" else frozen in name))
    agrees(extend(model), copy.deepcopy(model))


# ------------------------------------------------------------------ devices

LOSSES: list[tuple[Any, Callable[[], Tensor]]] = [
    (nn.CrossEntropyLoss, lambda: torch.randint(2, (N,))),
    (nn.MSELoss, lambda: torch.randn(N, 2)),
    (nn.BCEWithLogitsLoss, lambda: torch.rand(N, 2)),
    (nn.SmoothL1Loss, lambda: torch.rand(N, 2)),
    (nn.PoissonNLLLoss, lambda: torch.rand(N, 2)),
]


MONTE_CARLO = {"EKFAC", "KFAC", "DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC"}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 2),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 4),
        nn.LayerNorm(4),
        nn.PReLU(),
        nn.Linear(4, 2),
    )


def shapes(value: Any, p: nn.Parameter) -> Any:
    if callable(value):
        value = value(torch.zeros(2, *p.shape, device=p.device))
    return [v.shape for v in value] if isinstance(value, list) else value.shape


@pytest.mark.parametrize("loss", LOSSES, ids=lambda pair: pair[0].__name__)
@pytest.mark.parametrize("ext", EVERY, ids=lambda ext: ext.__name__)
def test_no_value_is_needed_for_a_shape(ext: Any, loss: Any) -> None:
    """On the meta device tensors have no values: code that reads them there is an error."""
    lossfunc, target = loss
    if lossfunc is nn.SmoothL1Loss and ext.__name__ in MONTE_CARLO:
        pytest.skip("SmoothL1Loss is no likelihood: there is nothing to draw from")
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = extend(network())
            X, y = torch.randn(N, 1, 3, 3), target()
        loss = extend(lossfunc())(model(X), y)
        with backpack(ext()):
            loss.backward()
        for p in model.parameters():
            value = getattr(p, ext().savefield)
            if isinstance(value, Tensor):
                assert value.device == p.device
        found.append([shapes(getattr(p, ext().savefield), p) for p in model.parameters()])
    assert found[0] == found[1]


@pytest.mark.parametrize("modify", ["clip", "abs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_positive_curvature_of_a_softmax(dtype: torch.dtype, modify: str) -> None:
    """Torch has no eigenvalues in these precisions."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 2)).to(dtype)
    X, y, v = torch.rand(N, 3, dtype=dtype), torch.rand(N, 2, dtype=dtype), torch.rand(4, 3)
    first, _, last = copy.deepcopy(model).double()
    loss = extend(nn.MSELoss(reduction="sum"))(extend(model)(X), y)
    with backpack(extensions.PCHMP(modify=modify)):
        loss.backward()
    found = model[0].weight.pchmp(v.to(dtype)[None])
    assert found.dtype == dtype

    expected = torch.zeros(4, 3, dtype=torch.float64)
    for x, target in zip(X.double(), y.double(), strict=True):
        z = first(x).detach()
        grad = 2 * last.weight.T @ (last(z.softmax(0)) - target)
        J = torch.autograd.functional.jacobian(lambda z: z.softmax(0), z)
        bent = torch.autograd.functional.hessian(lambda z, g=grad: z.softmax(0) @ g, z)
        values, vectors = torch.linalg.eigh(bent)
        values = values.abs() if modify == "abs" else values.clamp(min=0)
        curvature = 2 * (last.weight @ J).T @ (last.weight @ J) + vectors * values @ vectors.T
        expected += torch.outer(curvature @ (v.double() @ x), x)
    error = (found[0].double() - expected).abs().max()
    assert error < 8 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("ext", [extensions.GGNMP, extensions.HMP, extensions.PCHMP])
def test_products_without_values(ext: Any) -> None:
    """Whether a function is affine cannot be seen on the meta device; of a sum it is known."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return h + self.other(h.sigmoid())

    with torch.device("meta"):
        model = extend(Skips(), use_converter=True)
        loss = extend(nn.CrossEntropyLoss())(model(torch.rand(N, 3)), torch.randint(3, (N,)))
        with backpack(ext()):
            loss.backward()
        for p in model.parameters():
            assert getattr(p, ext().savefield)(torch.rand(2, *p.shape)).shape == (2, *p.shape)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", select("network", without="random mixing"), ids=str)
def test_gpu(case: Case) -> None:
    """Values on the GPU are those on the CPU."""
    exts = [*ORACLES, extensions.KFLR, extensions.GGNMP]

    def run(problem: Problem) -> list:
        loss = extend(problem.loss)(extend(problem.model)(problem.X), problem.y)
        with backpack(*(ext() for ext in exts)):
            loss.backward()
        return oracle.trainable(problem.model)

    for p, q in zip(*(run(case.build(device=device)) for device in ("cpu", "cuda")), strict=True):
        for ext in ORACLES:
            name = ext().savefield
            torch.testing.assert_close(getattr(q, name).cpu(), getattr(p, name), **TOLERANCE)
        for one, other in zip(p.kflr, q.kflr, strict=True):
            torch.testing.assert_close(other.cpu(), one, **TOLERANCE)
        vector = torch.randn(2, *p.shape, dtype=p.dtype, device="cpu")
        torch.testing.assert_close(q.ggnmp(vector.cuda()).cpu(), p.ggnmp(vector), **TOLERANCE)


class TwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)).to(self.last.weight.device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("converter", [False, "trace", "record"])
def test_model_on_two_devices(converter: Any) -> None:
    """What is propagated follows the data, in both directions."""
    exts = [*ORACLES, extensions.KFLR, extensions.KFRA, *PRODUCTS, extensions.PCHMP]
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        with torch.device("cpu"):
            model, X, y = TwoDevices().double(), *data()
        model.last.to(device)
        model = extend(model, use_converter=converter)
        loss = extend(nn.CrossEntropyLoss())(model(X.double()), y.to(device))
        with backpack(*(ext() for ext in exts)):
            loss.backward()
        for p in model.parameters():
            values = [getattr(p, ext().savefield) for ext in exts]
            found.append([v(torch.ones_like(p)) if callable(v) else v for v in values])
    for one, other in zip(found[:4], found[4:], strict=True):
        torch.testing.assert_close(other, one, check_device=False, **TOLERANCE)


class Count(TorchDispatchMode):
    """Counts what is dispatched to a device."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


# KFRA averages matrices of single samples; the others look at numbers of samples
SAMPLE_BY_SAMPLE = {"KFRA", "GradGram", "GGNGram", "ProjectedGrad"}


@pytest.mark.parametrize("ext", [ext for ext in EVERY if ext.__name__ not in SAMPLE_BY_SAMPLE])
def test_operations_on_an_accelerator(ext: Any) -> None:
    """They grow less than the batch: there, small ones take longer to start than to run."""
    counts = []
    for samples in (32, 128):
        with torch.device("meta"):
            model = nn.Sequential(
                *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
                *(nn.Conv2d(64, 96, 3), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
                *(nn.Flatten(), nn.Linear(384, 32), nn.Sigmoid(), nn.Linear(32, 10)),
            )
            X, y = torch.rand(samples, 3, 20, 20), torch.randint(10, (samples,))
        loss = extend(nn.CrossEntropyLoss())(extend(model)(X), y)
        with backpack(ext()), Count() as count:
            loss.backward()
        counts.append(count.number)
    assert counts[1] < 2 * counts[0]


@pytest.mark.parametrize(("columns", "samples"), [(1, 1024), (1024, 2)])
def test_sums_over_slices_do_not_get_stuck(
    monkeypatch: pytest.MonkeyPatch, columns: int, samples: int
) -> None:
    """In bfloat16, 256 + 1 is 256."""
    monkeypatch.setattr(reductions, "SLICE_ENTRIES", 1)

    def product(rows: slice) -> reductions.Multiply:
        return lambda part, out: torch.ones(
            part.stop - part.start, rows.stop - rows.start, 4, dtype=torch.bfloat16
        )

    like = torch.empty(0, dtype=torch.bfloat16)
    wanted = {"gradient", "square", "square_norm", "batch_square"}
    with torch.no_grad():
        found = reductions.in_slices(product, (columns, samples, 4), 4, like, wanted)
    assert all(value.dtype == like.dtype for value in found.values())
    assert torch.equal(found["square"], torch.full((4,), columns * samples).to(like))
    assert torch.equal(found["gradient"], found["square"])
    assert torch.equal(found["batch_square"], torch.full((samples, 4), columns).to(like))
    assert torch.equal(found["square_norm"], torch.full((samples,), 4 * columns).to(like))


def test_sums_over_slices_of_the_engine_do_not_get_stuck() -> None:
    X, y = torch.randn(400, 3, dtype=torch.bfloat16), torch.randint(3, (400,))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).bfloat16()
    found: list[list[Tensor]] = []
    for limit in (None, 1):
        one, loss = extend(copy.deepcopy(model)), extend(nn.CrossEntropyLoss(reduction="sum"))
        value = loss(one(X), y) + loss(one(X), y)
        exts = extensions.DiagGGNExact(), extensions.KFLR(), extensions.BatchDiagGGNExact()
        with slice_bytes(limit) if limit else nullcontext(), backpack(*exts):
            value.backward()
        params: list[Any] = list(one.parameters())
        found.append(
            [t for p in params for t in (p.diag_ggn_exact, *p.kflr, p.diag_ggn_exact_batch)]
        )
    for whole, sliced in zip(*found, strict=True):
        assert sliced.dtype == torch.bfloat16
        torch.testing.assert_close(sliced, whole, rtol=0.05, atol=0.02 * float(whole.abs().max()))


CAPTURED = [
    extensions.BatchGrad,
    extensions.Variance,
    extensions.DiagGGNExact,
    extensions.BatchDiagGGNExact,
    extensions.SqrtGGNExact,
    extensions.KFLR,
    extensions.KFRA,
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("extension", CAPTURED)
def test_captured_in_a_graph(extension: Any) -> None:
    """A CUDA graph replays with other data what nothing has to wait for."""
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))
    plain = nn.Sequential(*layers).double().cuda()
    X, y = torch.rand(6, 3, 8, 8).double().cuda(), torch.randint(5, (6,)).cuda()
    loss = extend(nn.CrossEntropyLoss())

    def results(model: nn.Module) -> list[Any]:
        model.zero_grad()
        with backpack(extension()):
            loss(model(X), y).backward()
        return [getattr(p, extension().savefield) for p in model.parameters()]

    model, side = extend(copy.deepcopy(plain)), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            results(model)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(model)
    X.copy_(torch.rand_like(X))
    graph.replay()
    torch.testing.assert_close(found, results(extend(plain)), **TOLERANCE)


class OwnNorm(nn.LayerNorm):
    """A module without a rule, whose bias alone autograd of some versions cannot differentiate."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (96,), self.weight, self.bias)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layer_norm_of_many_rows() -> None:
    """A kernel for many rows has no gradient of the bias where that of the weight is unasked."""
    found = []
    for norm in (OwnNorm(96), nn.LayerNorm(96)):
        torch.manual_seed(0)
        model = extend(nn.Sequential(nn.Linear(3, 96), norm, nn.Linear(96, 2)).cuda())
        X = torch.rand(64, 3136, 3, device="cuda")
        loss = extend(nn.MSELoss())(model(X), torch.zeros(64, 3136, 2, device="cuda"))
        with backpack(extensions.Variance(), extensions.DiagGGNExact()):
            loss.backward()
        found.append([(p.variance, p.diag_ggn_exact) for p in norm.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("samples", [1, 8])
def test_variance_is_not_negative(dtype: torch.dtype, samples: int) -> None:
    """Of equal samples, it is a difference of equal numbers, and users take its root."""
    torch.manual_seed(0)
    model = extend(mlp().to(dtype))
    X = torch.randn(1, 3, dtype=dtype).expand(samples, 3)
    loss = extend(nn.CrossEntropyLoss())(model(X), torch.zeros(samples, dtype=torch.long))
    with backpack(extensions.Variance()):
        loss.backward(create_graph=True)
    variances = [p.variance for p in model.parameters()]
    assert all((v >= 0).all() for v in variances)
    # its gradient is that of its formula, which is zero here
    for gradient in torch.autograd.grad(sum(v.sum() for v in variances), list(model.parameters())):
        assert gradient.abs().max() < 10 * torch.finfo(dtype).eps

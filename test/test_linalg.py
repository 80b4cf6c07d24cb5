"""Curvature operators over batches of unequal size against dense matrices of the whole data set."""

from __future__ import annotations

import builtins
import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn.functional import dropout
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

from backpack import backpack, disable, extend
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.stochastic_depth import StochasticDepth
from backpack.custom_module.weighted_loss import WeightedLoss
from backpack.extensions import KFAC, KFLR, KFRA, BatchGrad, DiagGGNExact, DiagGGNMC
from backpack.hessianfree.rop import R_op
from backpack.influence import Influence, ProjectedInfluence, TracIn
from backpack.laplace import Laplace
from backpack.linalg import (
    EKFAC,
    GGN,
    NTK,
    DiagonalGGN,
    DiagonalHessian,
    DiagonalOperator,
    EmpiricalFisher,
    FisherMC,
    GGNSpectrum,
    Hessian,
    InverseOperator,
    Jacobian,
    KroneckerGGN,
    KroneckerOperator,
    LinearOperator,
    SpectralOperator,
    logdet,
)
from backpack.utils.convert_parameters import parameter_list_to_vector, vector_to_parameter_list
from backpack.utils.kroneckers import kfacs_to_mat

N = 7
SIZES = (4, 1, 2)  # of the batches


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Compute in double precision."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


# --------------------------------------------------------------------------------------
# Problems
# --------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A model, a loss, and the whole data set as a single batch."""

    model: nn.Module
    loss_function: nn.Module
    whole: tuple[Tensor, ...]
    use_converter: bool = False

    @property
    def data(self) -> list[tuple[Tensor, ...]]:
        """The data set in batches of unequal size."""
        return list(zip(*(tensor.split(SIZES) for tensor in self.whole), strict=True))


class Residual(nn.Module):
    """A model with functions in its forward, and an output for each of three positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + x.tanh()).transpose(1, 2)  # [N, C, T]


class Tail(nn.Module):
    """A loss of one's own: the mean over samples of a strictly convex function."""

    reduction = "mean"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y).cosh().sum(1).mean()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    )


def inputs(*shape: int) -> Tensor:
    return torch.randn(N, *shape)


def labels(*shape: int) -> Tensor:
    return torch.randint(3, (N, *shape))


def with_ignored() -> Problem:
    """Targets at positions, some of which do not count: none at all in one of the batches."""
    y = labels(3)
    y[0, 1] = y[4] = -100
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]), label_smoothing=0.1)
    return Problem(Residual(), loss, (inputs(3, 2), y), use_converter=True)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "mlp": lambda: Problem(mlp(), nn.CrossEntropyLoss(), (inputs(3), labels())),
    "mlp-sum": lambda: Problem(mlp(), nn.CrossEntropyLoss(reduction="sum"), (inputs(3), labels())),
    "cnn": lambda: Problem(cnn(), nn.CrossEntropyLoss(), (inputs(1, 5, 5), labels())),
    "mse": lambda: Problem(mlp(), nn.MSELoss(), (inputs(3), inputs(3))),
    "mse-sum": lambda: Problem(mlp(), nn.MSELoss(reduction="sum"), (inputs(3), inputs(3))),
    "ignored": with_ignored,
    "nll": lambda: Problem(
        nn.Sequential(mlp(), nn.LogSoftmax(1)), nn.NLLLoss(), (inputs(3), labels())
    ),
    "multilabel": lambda: Problem(
        mlp(), nn.MultiLabelSoftMarginLoss(), (inputs(3), (inputs(3) > 0).double())
    ),
    "weighted": lambda: Problem(
        mlp(),
        WeightedLoss(nn.MSELoss(reduction="none")),
        (inputs(3), inputs(3), torch.rand(N)),
    ),
    "own": lambda: Problem(mlp(), Tail(), (inputs(3), inputs(3))),
}


@pytest.fixture(params=PROBLEMS)
def problem(request: pytest.FixtureRequest) -> Problem:
    """Each of the problems."""
    return PROBLEMS[request.param]()


# --------------------------------------------------------------------------------------
# The truth
# --------------------------------------------------------------------------------------


def function(model: nn.Module, X: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The output as a function of the vector of parameters, and that vector."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def output(vector: Tensor) -> Tensor:
        pieces = vector_to_parameter_list(vector, params.values())
        with disable():
            return functional_call(model, dict(zip(params, pieces, strict=True)), (X,))

    return output, parameter_list_to_vector(params.values())


def dense_hessian(problem: Problem) -> Tensor:
    X, *targets = problem.whole
    output, at = function(problem.model, X)
    return hessian(lambda vector: problem.loss_function.forward(output(vector), *targets), at)


def dense_ggn(problem: Problem) -> Tensor:
    model, loss_function = problem.model, problem.loss_function
    if isinstance(loss_function, nn.NLLLoss):  # the Fisher information is that of cross entropy
        model, loss_function = model[0], nn.CrossEntropyLoss()  # type: ignore[index]
    X, *targets = problem.whole
    output, at = function(model, X)
    J = jacobian(output, at).flatten(0, -2)
    H = hessian(lambda f: loss_function.forward(f, *targets), output(at))
    return J.T @ H.reshape(len(J), len(J)) @ J


def dense_fisher(problem: Problem) -> Tensor:
    """``sum_n ∇ℓ_n ∇ℓ_nᵀ / W``, from the individual gradients ``∇ℓ_n / W`` of the whole batch."""
    X, *targets = problem.whole
    loss_function = problem.loss_function
    output, at = function(problem.model, X)
    f = output(at)
    g = jacobian(lambda f: loss_function.forward(f, *targets), f)
    J = jacobian(output, at)
    gradients = torch.einsum("nc,ncp->np", g.reshape(N, -1), J.reshape(N, -1, J.shape[-1]))
    W: Any = N
    if loss_function.reduction == "sum":
        W = 1
    elif isinstance(loss_function, (nn.MSELoss, WeightedLoss)):
        W = f.numel()
    elif problem.use_converter:  # the one with weights of the classes
        W = sum(loss_function.weight[k] for k in targets[0].flatten() if k >= 0)  # type: ignore
    return W * gradients.T @ gradients


TRUTH: dict[type[LinearOperator], Callable[[Problem], Tensor]] = {
    GGN: dense_ggn,
    Hessian: dense_hessian,
    EmpiricalFisher: dense_fisher,
    DiagonalGGN: lambda problem: dense_ggn(problem).diagonal().diag(),
    DiagonalHessian: lambda problem: dense_hessian(problem).diagonal().diag(),
}


def build(kind: Any, problem: Problem, **options: Any) -> Any:
    return kind(problem.model, problem.loss_function, problem.data, **options)


# --------------------------------------------------------------------------------------
# Products
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRUTH)
def test_matrix(kind: Any, problem: Problem) -> None:
    """Operators are the matrix of the whole data set, also for vectors and matrices."""
    truth = TRUTH[kind](problem)
    operator = build(kind, problem)
    assert operator.shape == truth.shape
    assert_close(operator.to_dense(), truth)
    assert operator.T is operator
    matrix = torch.randn(len(truth), 11)
    assert_close(operator @ matrix, truth @ matrix)
    assert_close(operator @ matrix[:, 0], truth @ matrix[:, 0])
    assert (operator @ matrix[:, :0]).shape == (len(truth), 0)
    assert_close(operator.damped(0.3) @ matrix, truth @ matrix + 0.3 * matrix)


@pytest.mark.parametrize("kind", [GGN, Hessian, EmpiricalFisher])
def test_one_number_for_each_sample(kind: Any) -> None:
    """The output may have no other axis than that of the samples."""
    model = nn.Sequential(mlp(), nn.Linear(3, 1), nn.Flatten(0))
    whole = (inputs(3), torch.rand(N).round())
    problem = Problem(model, nn.BCEWithLogitsLoss(), whole)
    assert_close(build(kind, problem).to_dense(), TRUTH[kind](problem))


class Scaled(nn.Module):
    """A parameter without axes, and one number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.layer(x).tanh()).squeeze(1)


def test_parameter_without_axes() -> None:
    problem = Problem(Scaled(), nn.BCEWithLogitsLoss(), (inputs(3), torch.rand(N).round()))
    for kind in (GGN, Hessian, EmpiricalFisher, DiagonalGGN):
        assert_close(build(kind, problem).to_dense(), TRUTH[kind](problem))
    corrected, ggn = build(EKFAC, problem), TRUTH[GGN](problem)
    assert_close(corrected.to_dense()[0, 0], ggn[0, 0])
    assert_close(corrected.trace(), ggn.trace())
    output, at = function(problem.model, problem.whole[0])
    J = jacobian(output, at)
    operator = Jacobian(problem.model, problem.data)
    assert_close(operator.to_dense(), J)
    assert_close(operator.T.to_dense(), J.T)
    assert_close(NTK(problem.model, problem.whole[0]).to_dense(), J @ J.T)
    laplace = Laplace(problem.model, problem.loss_function, problem.data, DiagonalGGN)
    mean, covariance = laplace.outputs(problem.whole[0])
    assert_close(mean.squeeze(1), output(at))
    expected = (J @ torch.linalg.inv(N * TRUTH[DiagonalGGN](problem) + torch.eye(5)) * J).sum(1)
    assert_close(covariance.flatten(), expected)


@pytest.mark.parametrize("vectors_at_once", [1, 3])
def test_vectors_at_once(vectors_at_once: int) -> None:
    problem = PROBLEMS["cnn"]()
    for kind in (GGN, Hessian):
        operator = build(kind, problem, vectors_at_once=vectors_at_once)
        assert_close(operator.to_dense(), TRUTH[kind](problem))


def test_parameters() -> None:
    """Rows and columns follow the parameters that are asked for, in their order."""
    problem = PROBLEMS["mlp"]()
    first, last = problem.model[0].weight, problem.model[2].bias  # type: ignore[index]
    rows = torch.cat([torch.arange(16 + 12, 16 + 15), torch.arange(12)])
    for kind in TRUTH:
        operator = build(kind, problem, params=[last, first])
        assert_close(operator.to_dense(), TRUTH[kind](problem)[rows][:, rows])
    factors = build(KroneckerGGN, problem, params=[last, first]).factors
    everything = build(KroneckerGGN, problem).factors
    assert_close(factors, [everything[3], everything[0]])
    problem.model[0].requires_grad_(False)  # type: ignore[index]
    assert GGN(*problem[:2], problem.data).shape == (15, 15)


def test_parameter_that_nothing_depends_on() -> None:
    problem = PROBLEMS["mlp"]()
    problem.model.unused = nn.Linear(2, 1)
    problem.model.forward = lambda x: nn.Sequential.forward(problem.model[:3], x)  # type: ignore
    truth = dense_hessian(problem)
    for V in (1, 3):
        eye = torch.eye(len(truth))[:, -V - 3 :][:, :V]
        assert_close(build(Hessian, problem) @ eye, truth @ eye)
    with pytest.raises(ValueError, match=r"does not depend .*\[\[1, 2\], \[1\]\]"):
        build(DiagonalGGN, problem)


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.Embedding(5, 4), nn.LSTM(4, 3, batch_first=True)),
        lambda: nn.Sequential(
            nn.Embedding(5, 4), nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        ),
    ],
    ids=["lstm", "transformer"],
)
def test_models_of_several_kinds(model: Callable[[], nn.Module]) -> None:
    """Vectorised products go through recurrent layers and attention."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model()

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            return (x[0] if isinstance(x, tuple) else x)[:, -1]

    whole = (torch.randint(5, (N, 3)), labels())
    problem = Problem(Last(), nn.CrossEntropyLoss(), whole)
    for kind in (GGN, Hessian):
        operator = build(kind, problem)
        matrix = torch.randn(operator.shape[0], 3)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            expected = TRUTH[kind](problem) @ matrix
        assert_close(operator @ matrix, expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("normalise", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_hessian_of_normalised_weights(normalise: Callable[[nn.Module], nn.Module]) -> None:
    """The second derivative of torch's function takes the norms for constants."""
    model = nn.Sequential(normalise(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 3))
    problem = Problem(model, nn.MSELoss(), (inputs(3), inputs(3)))
    with oracle.exact_weight_norm():
        truth = dense_hessian(problem)
    assert_close(build(Hessian, problem).to_dense(), truth)


def test_jacobian_of_cumulative_sums_of_exponentials() -> None:
    """What torch has as their gradient has no derivative where it is zero."""

    class Sums(nn.Module):
        def __init__(self, sums: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.layer, self.sums = nn.Linear(3, 4), sums

        def forward(self, x: Tensor) -> Tensor:
            return self.sums(self.layer(x))

    model = Sums(lambda x: x.logcumsumexp(1))
    plain = Sums(lambda x: x.exp().cumsum(1).log())
    plain.load_state_dict(model.state_dict())
    X, y = inputs(3), inputs(4)
    truth = dense_ggn(Problem(plain, nn.MSELoss(), (X, y)))
    assert_close(build(GGN, Problem(model, nn.MSELoss(), (X, y))).to_dense(), truth)
    output, at = function(plain, X)
    assert_close(Jacobian(model, [X]).to_dense(), jacobian(output, at).flatten(0, 1))
    v = [torch.randn_like(p) for p in model.parameters()]
    expected = R_op(plain(X), plain.parameters(), v)
    assert_close(R_op(model(X), model.parameters(), v), expected)


class Solver(torch.autograd.Function):
    """Its backward pass computes a product of its own, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return a linear map."""
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Solve something, without a graph."""
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            return grad @ weight.T, x.T @ grad


class Solved(nn.Module):
    """A layer, and what an adjoint method differentiates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.rand(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return Solver.apply(self.layer(x), self.weight)


def test_backward_passes_that_cannot_be_differentiated() -> None:
    """A product with the Jacobian differentiates the gradient: it was zero, or without a part."""
    model, data = Solved(), [(torch.rand(5, 4), torch.arange(5) % 3)]
    loss = nn.CrossEntropyLoss()
    operators = Jacobian(model, data), GGN(model, loss, data), Hessian(model, loss, data)
    for operator in operators:
        with pytest.raises(RuntimeError, match="backward pass of the function Solver"):
            operator @ torch.ones(operator.shape[1])
    output = model(data[0][0])
    J = torch.stack(
        [
            parameter_list_to_vector(
                torch.autograd.grad(y, [*model.parameters()], retain_graph=True)
            )
            for y in output.flatten()
        ]
    )
    u = torch.rand(len(J))
    assert_close(operators[0].T @ u, J.T @ u)
    parameters = [*model.parameters()]
    with pytest.raises(RuntimeError, match="backward pass of the function Solver"):
        R_op(output, parameters, [torch.ones_like(p) for p in parameters])


class Watched(nn.Module):
    """A layer whose gradient a hook scales without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.register_hook(torch.no_grad()(lambda grad: 2 * grad))
        return y


def test_hooks_that_cannot_be_differentiated() -> None:
    """No function is to blame: the products tell."""
    model, X = Watched(), torch.rand(5, 4)
    for operator in Jacobian(model, [X]), GGN(model, nn.MSELoss(), [(X, torch.rand(5, 3))]):
        with pytest.raises(RuntimeError, match="not a linear function"):
            operator @ torch.ones(operator.shape[1])


def test_backward_passes_that_cannot_be_differentiated_before_softmax() -> None:
    """The gradient of a sum that is constant tells nothing: products were zero."""
    model, X = nn.Sequential(Solved(), nn.Softmax(1)), torch.rand(5, 4)
    for operator in Jacobian(model, [X]), GGN(model, nn.MSELoss(), [(X, torch.rand(5, 3))]):
        with pytest.raises(RuntimeError, match="backward pass of the function Solver"):
            operator @ torch.ones(operator.shape[1])


class Attends(nn.Module):
    """Attention, which no bias of the keys changes."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x @ self.keys(x).mT).softmax(-1) @ x).mean(1)


class Normalised(nn.Module):
    """A convolution, whose bias a normalisation takes away."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.norm, self.head = nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.keys(x)).relu().flatten(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [Attends, Normalised])
def test_derivatives_that_are_zero_up_to_rounding(
    kind: type[Attends | Normalised], dtype: torch.dtype
) -> None:
    """Products were refused: one rounding error is not the other."""
    for seed in range(5):
        torch.manual_seed(seed)
        model, X, y = kind().to(dtype), torch.randn(5, 3, 4, dtype=dtype), torch.arange(5) % 2
        bias = [model.keys.bias]
        for operator in (
            Jacobian(model, [X], bias),
            GGN(model, nn.CrossEntropyLoss(), [(X, y)], bias),
            EmpiricalFisher(model, nn.CrossEntropyLoss(), [(X, y)], bias),
        ):
            assert operator.to_dense().abs().max() < 1e-4
        parameters = [*model.parameters()]
        v = [torch.ones_like(p) if p is bias[0] else torch.zeros_like(p) for p in parameters]
        assert R_op(model(X), parameters, v)[0].abs().max() < 1e-4


class Coarse(nn.Module):
    """A part in low precision between parts in double precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last, self.dtype = nn.Linear(3, 8), nn.Linear(8, 2), dtype
        self.middle = nn.Linear(8, 8).to(dtype).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.first(x).tanh().to(self.dtype)).tanh()
        return self.last(h.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_parts_in_low_precision_round(dtype: torch.dtype) -> None:
    """The two products that ought to be one are compared as precisely as they are computed."""
    for seed in range(10):
        torch.manual_seed(seed)
        model, X, y = Coarse(dtype), torch.rand(6, 3), torch.randint(2, (6,))
        exact = copy.deepcopy(model).double()
        exact.dtype = torch.float64
        G, of_exact = (GGN(m, nn.CrossEntropyLoss(), [(X, y)]).to_dense() for m in (model, exact))
        assert (G - of_exact).norm() < 0.02 * of_exact.norm()


def test_nothing_is_left_behind() -> None:
    """Gradients, quantities and the mode of autograd stay what they were, wherever it happens."""
    problem = PROBLEMS["cnn"]()
    extend(problem.model)
    gradients = [torch.randn_like(p) for p in problem.model.parameters()]
    copies = [g.clone() for g in gradients]
    for p, g in zip(problem.model.parameters(), gradients, strict=True):
        p.grad, p.diag_ggn_exact, p.kflr = g, g, g  # type: ignore[attr-defined]
    attributes = {p: dict(vars(p)) for p in problem.model.parameters()}
    with backpack(BatchGrad()), torch.no_grad():
        for kind in (*TRUTH, KroneckerGGN):
            build(kind, problem).to_dense()
    for p, g in zip(problem.model.parameters(), gradients, strict=True):
        assert p.grad is g
        assert vars(p) == attributes[p]
    assert all(map(torch.equal, gradients, copies))


@pytest.mark.parametrize("kind", TRUTH)
def test_inference_mode(kind: Any) -> None:
    """It has no derivatives, so that operators leave it."""
    problem = PROBLEMS["mlp"]()
    truth = TRUTH[kind](problem)
    with torch.inference_mode():
        assert_close(build(kind, problem).to_dense(), truth)
        jacobian = Jacobian(problem.model, problem.data)
        assert_close(jacobian.T.to_dense(), jacobian.to_dense().T)


def test_ggn_needs_what_the_loss_stores() -> None:
    """Nothing is stored within ``disable()``: a call from before must not take its place."""
    problem = PROBLEMS["mlp"]()
    X, y = problem.whole
    before = extend(problem.loss_function)(problem.model(X), y)
    with disable(), pytest.raises(ValueError, match=r"outside of disable\(\)"):
        build(GGN, problem).to_dense()
    assert before.requires_grad


def test_float32() -> None:
    problem = PROBLEMS["mlp"]()
    truth = dense_ggn(problem).float()
    X, y = problem.whole
    single = Problem(problem.model.float(), nn.CrossEntropyLoss(), (X.float(), y))
    operator = build(GGN, single)
    assert operator.dtype == torch.float32
    assert_close(operator.to_dense(), truth)
    values, vectors = operator.eigsh(2)
    assert values.dtype == vectors.dtype == torch.float32
    assert_close(values, torch.linalg.eigvalsh(truth)[-2:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [GGN, DiagonalGGN, KroneckerGGN, EKFAC, "jacobian"])
def test_many_batches_in_low_precision(kind: Any) -> None:
    """Their sum is in more: beside a large one, small terms would be lost."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    X, y = torch.randn(1, 3, dtype=torch.bfloat16), torch.rand(1, 2, dtype=torch.bfloat16)

    def product(count: int) -> Tensor:
        if kind == "jacobian":
            J = Jacobian(model, [X] * count).T
            return J @ torch.ones(J.shape[1], dtype=J.dtype) / count
        operator = kind(model, nn.MSELoss(), [(X, y)] * count)
        return operator @ torch.ones(8, dtype=operator.dtype)

    of_many = product(600)
    assert of_many.dtype == torch.bfloat16
    assert_close(of_many, product(1), rtol=0.02, atol=1e-3)


def test_low_precision_uses_scipy_in_float32() -> None:
    operator = DiagonalOperator(torch.ones(3, dtype=torch.bfloat16))
    assert operator.to_scipy().dtype == "float32"
    assert operator.solve(torch.ones(3, dtype=torch.bfloat16), 1.0).dtype == torch.bfloat16


# --------------------------------------------------------------------------------------
# scipy
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRUTH)
def test_scipy(kind: Any) -> None:
    problem = PROBLEMS["mlp"]()
    truth = TRUTH[kind](problem)
    operator = build(kind, problem)
    array = torch.randn(len(truth), 2).numpy()
    scipy_operator = operator.to_scipy()
    assert isinstance(scipy_operator, ScipyOperator)
    assert scipy_operator.shape == truth.shape
    assert scipy_operator.dtype == "float64"
    expected = truth @ torch.as_tensor(array)
    assert_close(torch.as_tensor(scipy_operator @ array), expected)
    assert_close(torch.as_tensor(scipy_operator.T @ array[:, 0]), expected[:, 0])
    assert_close(torch.as_tensor(scipy_operator.H.matmat(array)), expected)


@pytest.mark.parametrize("which", ["LA", "SA", "LM", "BE"])
def test_eigsh(which: str) -> None:
    problem = PROBLEMS["mlp"]()
    truth = dense_hessian(problem)
    values, vectors = build(Hessian, problem).eigsh(4, which)
    every = torch.linalg.eigvalsh(truth)
    chosen = {
        "LA": every[-4:],
        "SA": every[:4],
        "LM": every[every.abs().argsort()[-4:]].sort().values,
        "BE": torch.cat([every[:2], every[-2:]]),
    }
    assert_close(values, chosen[which])
    assert_close(truth @ vectors, vectors * values, rtol=1e-6, atol=1e-8)
    assert_close(vectors.T @ vectors, torch.eye(4))


def of_spectrum(values: Tensor) -> Tensor:
    """Return a symmetric matrix with these eigenvalues."""
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values)))
    matrix = basis * values @ basis.T
    return (matrix + matrix.T) / 2


@pytest.mark.parametrize("which", ["LA", "SA", "LM", "BE"])
@pytest.mark.parametrize("rank", [0, 17, 25, 40])
@pytest.mark.parametrize("sign", [1, -1])
def test_eigsh_of_singular_matrices(which: str, rank: int, sign: int) -> None:
    """An eigenvalue is found as often as it has eigenvectors, and to the accuracy of the norm."""
    size = 50
    every = sign * torch.cat([torch.logspace(-4, 0, rank), torch.zeros(size - rank)])
    every = every.sort().values
    operator = Counting(of_spectrum(every))
    for k in (1, 4, 15):
        values, vectors = operator.eigsh(k, which)
        high = {"LA": k, "SA": 0, "LM": k if sign > 0 else 0, "BE": (k + 1) // 2}[which]
        chosen = torch.cat([every[: k - high], every[size - high :]])
        assert_close(values, chosen, rtol=0, atol=1e-12)
        assert_close(operator @ vectors, vectors * values, rtol=0, atol=1e-12)
        assert_close(vectors.T @ vectors, torch.eye(k), rtol=0, atol=1e-12)


def test_eigsh_of_other_ends() -> None:
    operator = Counting(of_spectrum(torch.linspace(-1, 1, 30)))
    with pytest.raises(ValueError, match=r"got 'SM'.*A @ A, which has the eigenvectors"):
        operator.eigsh(1, "SM")
    squares, _ = (operator @ operator).eigsh(2, "SA")
    assert_close(squares, torch.full((2,), (1 / 29) ** 2))


@pytest.mark.parametrize("which", ["LA", "SA", "LM", "BE"])
def test_eigsh_of_what_is_not_finite(which: str) -> None:
    matrix = of_spectrum(torch.linspace(0, 1, 30))
    matrix[3, 4] = matrix[4, 3] = torch.inf
    with pytest.raises(ValueError, match="entries that are not finite"):
        Counting(matrix).eigsh(2, which)


def test_eigsh_of_ggn_smallest() -> None:
    """It has fewer columns than parameters: most eigenvalues are zero."""
    model = nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 3))
    G = GGN(model, nn.CrossEntropyLoss(), [(torch.randn(8, 20), torch.randint(3, (8,)))])
    assert_close(G.eigsh(4, "SA")[0], torch.zeros(4), rtol=0, atol=1e-13)


def test_solve() -> None:
    problem = PROBLEMS["mlp"]()
    truth = dense_ggn(problem)
    rhs = torch.randn(len(truth))
    operator = build(GGN, problem)
    solution = operator.solve(rhs, damping=0.1, tolerance=1e-12)
    assert_close(solution, torch.linalg.solve(truth + 0.1 * torch.eye(len(truth)), rhs))
    # one step from zero is along the right-hand side
    step = operator.solve(rhs, damping=0.1, max_iterations=1)
    assert_close(step, rhs * (rhs @ rhs) / (rhs @ (truth @ rhs + 0.1 * rhs)))
    ill_conditioned = DiagonalOperator(torch.logspace(-16, 0, 20))
    with pytest.raises(RuntimeError, match=r"residual .* positive definite"):
        ill_conditioned.solve(torch.ones(20), tolerance=0.0)


class Counting(LinearOperator):
    """A dense matrix that counts the vectors it is multiplied with."""

    def __init__(self, matrix: Tensor):
        super().__init__((matrix.shape[0], matrix.shape[1]), matrix.dtype, matrix.device)
        self.matrix, self.vectors = matrix, 0
        self.is_symmetric = matrix.shape[0] == matrix.shape[1] and torch.equal(matrix, matrix.T)

    def _matmat(self, matrix: Tensor) -> Tensor:
        self.vectors += matrix.shape[1]
        return self.matrix @ matrix

    def _rmatmat(self, matrix: Tensor) -> Tensor:
        return self.matrix.T @ matrix


def test_solve_with_several_right_hand_sides() -> None:
    """Each column has its own steps, as if it were alone, and leaves when it has converged."""
    problem = PROBLEMS["mlp"]()
    truth = dense_ggn(problem)
    damped = truth + 0.01 * torch.eye(len(truth))
    easy = torch.linalg.eigh(damped).eigenvectors[:, -1]
    rhs = torch.stack([torch.randn(len(truth)), easy, torch.zeros(len(truth))], 1)
    operator = Counting((truth + truth.T) / 2)
    found = operator.solve_with_report(rhs, 0.01, tolerance=1e-10)
    assert found.converged
    assert_close(found.solution, torch.linalg.solve(damped, rhs))
    assert found.iterations[1:].tolist() == [1, 0]
    assert operator.vectors == found.iterations.sum()
    errors = (damped @ found.solution - rhs).norm(dim=0)[:2] / rhs.norm(dim=0)[:2]
    assert (errors < 1e-9).all()
    alone = operator.solve_with_report(rhs[:, 0], 0.01, tolerance=1e-10)
    assert_close(alone.solution, found.solution[:, 0])
    assert alone.iterations == found.iterations[0]
    few = operator.solve_with_report(rhs, 0.01, max_iterations=2)
    assert not few.converged and few.iterations.tolist() == [2, 1, 0]
    expected = (damped @ few.solution - rhs).norm(dim=0)[:2] / rhs.norm(dim=0)[:2]
    assert_close(few.residuals[:2], expected, rtol=1e-6, atol=1e-12)


def test_preconditioned_solve() -> None:
    problem = PROBLEMS["cnn"]()
    operator = build(GGN, problem)
    rhs = torch.randn(operator.shape[0], 2)
    plain = operator.solve_with_report(rhs, 1e-4, 1e-8)
    for near in (build(KroneckerGGN, problem), build(DiagonalGGN, problem)):
        found = operator.solve_with_report(rhs, 1e-4, 1e-8, preconditioner=near)
        assert_close(found.solution, plain.solution, rtol=1e-4, atol=1e-4)
    # one that is right needs one iteration, and its first step is the solution
    exact = KroneckerOperator([[dense_ggn(problem)]])
    found = operator.solve_with_report(rhs, 1e-4, 1e-6, preconditioner=exact)
    assert found.iterations.tolist() == [1, 1]
    skewed = Counting(torch.diag(torch.logspace(0, 6, 31)) + 0.1)
    rough = DiagonalOperator(torch.logspace(0, 6, 31))
    ones = torch.ones(31)
    with_it = skewed.solve_with_report(ones, 0.0, 1e-8, preconditioner=rough)
    without_it = skewed.solve_with_report(ones, 0.0, 1e-8)
    assert_close(skewed.matrix @ with_it.solution, ones)
    assert with_it.iterations.sum() * 3 < without_it.iterations.sum()
    negative = DiagonalOperator(torch.linspace(-1, 1, 31))
    with pytest.raises(ValueError, match=r"preconditioner .* not positive definite"):
        skewed.solve(ones, preconditioner=negative)


def test_preconditioners_without_an_inverse() -> None:
    matrix = Counting(torch.eye(3))
    for wrong in (matrix, torch.eye(3), 2.0):
        refusal = rf"with a damped inverse, such as .*, got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=refusal):
            matrix.solve(torch.ones(3), preconditioner=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=refusal):
            InverseOperator(matrix, preconditioner=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("exponent", [-30, -23, 19, 30])
def test_solve_whatever_the_length_of_the_right_hand_side(exponent: int) -> None:
    """In single precision, the squares of these are zero or infinite."""
    entries = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float32)
    operator, rhs = Counting(entries.diag()), torch.full_like(entries, 10.0**exponent)
    both = torch.stack([rhs, torch.ones_like(rhs)], 1)
    found = operator.solve_with_report(both)
    assert found.converged
    assert_close(found.solution / both, 1 / entries.unsqueeze(1).expand(3, 2))


def test_loss_that_is_no_number() -> None:
    """It has not changed, but is nothing to differentiate."""
    model, loss_function, (X, y), _ = PROBLEMS["mlp"]()
    X[0] = torch.nan
    with pytest.raises(ValueError, match=r"GGN.* the loss over the data is not a number"):
        GGN(model, loss_function, [(X, y)]) @ torch.ones(31)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_solve_of_what_is_not_finite(value: float) -> None:
    """It has no solution, not even zero."""
    matrix, rhs = torch.eye(3), torch.ones(3, 2)
    rhs[1, 1] = value
    with pytest.raises(ValueError, match=r"right-hand side of Counting.* not finite"):
        Counting(matrix).solve(rhs, max_iterations=5)
    matrix[1, 1] = value
    operator = Counting(matrix)
    operator.is_symmetric = True
    with pytest.raises(ValueError, match=r"product with Counting.* not finite"):
        operator.solve(torch.ones(3), max_iterations=5)


def test_solve_in_half_precision() -> None:
    """Products of small vectors fit, and those of unit vectors do not: they are not scaled."""
    operator = Counting(torch.full((300, 300), 300.0, dtype=torch.float16))
    rhs = torch.full((300,), 0.01, dtype=torch.float16)
    found = operator.solve(rhs, damping=1.0, max_iterations=2)
    assert_close(found.double(), torch.full((300,), 0.01 / 90001), rtol=0, atol=1e-6)


def test_solve_notices_negative_curvature() -> None:
    indefinite = Counting(torch.diag(torch.tensor([1.0, 2.0, -4.0])))
    with pytest.raises(RuntimeError, match="negative curvature"):
        indefinite.solve(torch.ones(3))
    singular = Counting(torch.diag(torch.tensor([1.0, 2.0, 0.0])))
    assert_close(singular.solve(torch.tensor([1.0, 1.0, 0.0])), torch.tensor([1.0, 0.5, 0.0]))
    unsolved = singular.solve_with_report(torch.ones(3))
    assert not unsolved.converged and unsolved.solution.isfinite().all()
    with pytest.raises(ValueError, match="not known to be symmetric"):
        Counting(torch.randn(3, 3)).solve(torch.ones(3))
    with pytest.raises(ValueError, match="not known to be symmetric"):
        Counting(torch.randn(3, 3)).eigsh(1)


# --------------------------------------------------------------------------------------
# Sums, products, parts
# --------------------------------------------------------------------------------------


def test_algebra() -> None:
    A, B, C = torch.randn(4, 4), torch.randn(4, 4), torch.randn(3, 4)
    A = A + A.T
    a, b, c = Counting(A), Counting(B), Counting(C)
    cases: list[tuple[LinearOperator, Tensor, bool]] = [
        (a + b, A + B, False),
        (a + 2 * a - a / 4, A + 2 * A - A / 4, True),
        (-a, -A, True),
        (a * np.float32(2) + a / np.int64(4), 2 * A + A / 4, True),
        (c @ a, C @ A, False),
        (c @ b.T, C @ B.T, False),
        (c.T @ c, C.T @ C, True),
        (c @ c.T, C @ C.T, True),
        (a @ a, A @ A, True),
        (b.damped(0.5), B + 0.5 * torch.eye(4), False),
        (c.T.T, C, False),
        (a.submatrix([3, 0]), A[[3, 0]][:, [3, 0]], True),
        (a.submatrix(slice(1, 3)), A[1:3, 1:3], True),
        (c.submatrix([2, 0], slice(1, 4)), C[[2, 0], 1:4], False),
        (a.submatrix(torch.tensor([True, False, True, False]), [1, 1]), A[::2][:, [1, 1]], False),
        (3.0 * (a + b).T @ c.T, 3 * (A + B).T @ C.T, False),
    ]
    for operator, truth, is_symmetric in cases:
        assert operator.shape == tuple(truth.shape)
        assert operator.is_symmetric == is_symmetric
        assert_close(operator.to_dense(), truth)
        assert_close(operator.T.to_dense(), truth.T)
        scipy = operator.to_scipy()
        v = torch.randn(len(truth))
        assert_close(torch.as_tensor(scipy.T @ v.numpy()), truth.T @ v)
    with pytest.raises(ValueError, match="cannot be added"):
        a + c
    with pytest.raises(ValueError, match="cannot be multiplied"):
        a @ c
    with pytest.raises(TypeError, match="damped"):
        a + 1.0  # type: ignore[operator]
    with pytest.raises(TypeError, match="A @ B"):
        a * A  # type: ignore[operator]
    with pytest.raises(ValueError, match="which columns"):
        c.submatrix([0])
    with pytest.raises(ValueError, match="There are 4 rows"):
        a.submatrix([4])
    with pytest.raises(ValueError, match=r"numbers or a mask: use long\(\) or bool\(\)"):
        a.submatrix(torch.tensor([1, 0, 1, 0], dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"a slice or a list, got shape \[\]"):
        a.submatrix(torch.tensor(3))
    with pytest.raises(ValueError, match="one precision"):
        a + Counting(A.float())
    with pytest.raises(ValueError, match="not square"):
        c.damped(1.0)


@pytest.mark.parametrize("kind", [GGN, DiagonalGGN, KroneckerGGN])
def test_algebra_of_curvature(kind: Any) -> None:
    problem = PROBLEMS["cnn"]()
    operator = build(kind, problem)
    dense = operator.to_dense()
    last = torch.arange(len(dense))[-27:]
    mixed = (0.5 * operator + build(Hessian, problem)).submatrix(last)
    truth = (0.5 * dense + dense_hessian(problem))[-27:, -27:]
    assert_close(mixed.to_dense(), truth)


# --------------------------------------------------------------------------------------
# Jacobians, sampled Fisher information
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "cnn", "ignored"])
@pytest.mark.parametrize("at_once", [1, 3])
def test_jacobian(name: str, at_once: int) -> None:
    problem = PROBLEMS[name]()
    output, at = function(problem.model, problem.whole[0])
    truth = jacobian(output, at).flatten(0, -2)
    J = Jacobian(problem.model, problem.data, vectors_at_once=at_once)
    assert J.shape == truth.shape
    assert_close(J.to_dense(), truth)
    assert_close(J.T.to_dense(), truth.T)
    assert_close((J.T @ J).to_dense(), truth.T @ truth)
    assert_close((J @ J.T).to_dense(), truth @ truth.T)
    inputs_alone = Jacobian(problem.model, [X for X, *_ in problem.data])
    assert_close(inputs_alone @ at, truth @ at)
    some = list(problem.model.parameters())[1:2]
    start = next(problem.model.parameters()).numel()
    part = Jacobian(problem.model, problem.data, some)
    assert_close(part.to_dense(), truth[:, start : start + some[0].numel()])


def test_jacobian_gives_ggn_and_kernel() -> None:
    problem = PROBLEMS["mse-sum"]()
    J = Jacobian(problem.model, problem.data)
    assert_close((2 * (J.T @ J)).to_dense(), build(GGN, problem).to_dense())
    kernel = NTK(problem.model, problem.whole[0]).to_dense()
    assert_close((J @ J.T).to_dense(), kernel)


def test_jacobian_and_kernel_of_batches_without_samples() -> None:
    problem = PROBLEMS["mlp"]()
    X, *_ = problem.whole
    whole, parts = Jacobian(problem.model, [X]), Jacobian(problem.model, [X[:0], X])
    assert_close(parts.to_dense(), whole.to_dense())
    assert_close(parts.T.to_dense(), whole.T.to_dense())
    assert NTK(problem.model, X[:0], X).to_dense().shape == (0, whole.shape[0])
    assert NTK(problem.model, X[:0]).traced().shape == (0, 0)


def test_jacobian_notices_changes() -> None:
    problem = PROBLEMS["mlp"]()
    data = problem.data
    J = Jacobian(problem.model, data)
    v = torch.ones(31)
    J @ v
    data.reverse()
    with pytest.raises(RuntimeError, match=r"batch 0 .*shuffle=False"):
        J @ v
    with pytest.raises(ValueError, match="iterator"):
        Jacobian(problem.model, iter(data))
    problem.model.append(nn.Dropout(0.5))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"model\.eval"):
        Jacobian(problem.model, data)


@pytest.mark.parametrize("give", [lambda X: X, lambda X: {"X": X}])
def test_a_batch_is_not_several(give: Any) -> None:
    """The rows of one would be batches, and what a model averages over another axis."""
    X = torch.rand(4, 3, 2)
    with pytest.raises(ValueError, match=r"batches, but got one .*data=\[X\]"):
        Jacobian(nn.Linear(2, 1), give(X))
    with pytest.raises(ValueError, match=r"batches, but got one .*data=\[\(X, y\)\]"):
        GGN(nn.Linear(2, 1), nn.MSELoss(), give(X))


class Reordered:
    """A batch whose samples have another order in each pass."""

    def __init__(self, whole: tuple[Tensor, ...]):
        self.whole, self.generator = whole, torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = torch.randperm(N, generator=self.generator)
        yield tuple(x[order] for x in self.whole)


def test_another_order_within_a_batch_is_noticed() -> None:
    """There are as many outputs, of the same norm, and the loss is the same, too."""
    model, loss_function, whole, _ = PROBLEMS["mlp"]()
    with pytest.raises(RuntimeError, match=r"Jacobian needs the same samples .*batch 0"):
        Jacobian(model, Reordered(whole)) @ torch.ones(31)
    shuffled = DataLoader(TensorDataset(*whole), batch_size=N, shuffle=True)
    with pytest.raises(ValueError, match=r"Jacobian numbers its rows .*shuffle=False"):
        Jacobian(model, shuffled)
    for data in (Reordered(whole), shuffled):
        fisher = FisherMC(model, loss_function, data)
        fisher @ torch.ones(31)
        with pytest.raises(RuntimeError, match=r"FisherMC needs the same samples .*batch 0"):
            fisher @ torch.ones(31)
    with pytest.raises(ValueError, match=r"DataLoader\(dataset"):
        FisherMC(model, loss_function, TensorDataset(*whole))


def test_another_order_of_small_numbers_is_noticed() -> None:
    """Whatever the unit of the data, by the ratio of their sizes."""
    whole = (1e-5 * torch.arange(1.0, N + 1).unsqueeze(1), torch.zeros(N, 1))
    with pytest.raises(RuntimeError, match="same samples in the same order"):
        Jacobian(nn.Linear(1, 1), Reordered(whole)) @ torch.ones(2)


def test_an_order_that_is_drawn_once() -> None:
    """That of ``DistributedSampler`` is the same in each pass until the next epoch."""
    model, _, whole, _ = PROBLEMS["mlp"]()
    own = TensorDataset(*whole)
    sampler = DistributedSampler(own, num_replicas=1, rank=0, shuffle=True)
    jacobian = Jacobian(model, DataLoader(own, batch_size=N, sampler=sampler))
    v = torch.ones(31)
    assert_close(jacobian @ v, jacobian @ v)
    sampler.set_epoch(1)
    with pytest.raises(RuntimeError, match="same samples in the same order"):
        jacobian @ v


@pytest.mark.parametrize("name", ["mlp", "mlp-sum", "cnn", "mse", "ignored", "weighted"])
def test_sampled_fisher(name: str) -> None:
    """One symmetric matrix of low rank for a seed; the mean over seeds is the GGN."""
    problem = PROBLEMS[name]()
    truth = dense_ggn(problem)
    operator = build(FisherMC, problem, mc_samples=2, seed=3)
    state = torch.get_rng_state()
    dense = operator.to_dense()
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(operator @ torch.eye(len(truth))[:, :3], dense[:, :3])
    assert_close(dense, dense.T)
    values = torch.linalg.eigvalsh(dense)
    assert values.min() > -1e-10 * values.max()
    assert not torch.allclose(build(FisherMC, problem, mc_samples=2, seed=4).to_dense(), dense)
    draws = [build(FisherMC, problem, mc_samples=500, seed=i).to_dense() for i in range(4)]
    many = torch.stack(draws)
    spread = many.std(0) / 2 + 1e-3 * truth.abs().max()
    assert ((many.mean(0) - truth).abs() < 8 * spread).all()
    assert (many.mean(0) - truth).norm() < 0.1 * truth.norm()


def test_sampled_fisher_is_that_of_the_extension() -> None:
    """With the same draws, its diagonal is that of ``DiagGGNMC``."""
    problem = PROBLEMS["mlp"]()
    X, y = problem.whole
    operator = FisherMC(problem.model, problem.loss_function, [(X, y)], mc_samples=3, seed=0)
    diagonal = operator.to_dense().diagonal()
    model, loss_function = extend(problem.model), extend(problem.loss_function)
    torch.manual_seed(0)
    with backpack(DiagGGNMC(mc_samples=3)):
        loss_function(model(X), y).backward()
    expected = parameter_list_to_vector(p.diag_ggn_mc for p in model.parameters())  # type: ignore
    assert_close(diagonal, expected)


def test_sampled_fisher_needs_the_order() -> None:
    problem = PROBLEMS["mlp"]()
    data = problem.data
    operator = FisherMC(*problem[:2], data)
    operator @ torch.ones(31)
    data.reverse()
    with pytest.raises(RuntimeError, match="shuffle=False"):
        operator @ torch.ones(31)
    with pytest.raises(ValueError, match="mc_samples"):
        FisherMC(*problem[:2], data, mc_samples=0)
    with pytest.raises(NotImplementedError, match="negative log likelihood"):
        FisherMC(problem.model, Tail(), PROBLEMS["own"]().data) @ torch.ones(31)


@pytest.mark.parametrize("columns", [1, 3])
def test_losses_without_a_second_derivative(columns: int) -> None:
    """Those of torch that it differentiates once: the error says what does without."""
    model, loss = nn.Linear(4, 3), nn.MultiMarginLoss()
    operator = Hessian(model, loss, [(torch.rand(5, 4), torch.arange(5) % 3)])
    refused = "multi_margin_loss_backward is not implemented. Products .* GGNMP and HMP"
    with pytest.raises(NotImplementedError, match=refused):
        operator @ torch.ones(15, columns)


# --------------------------------------------------------------------------------------
# Models with functions in the forward
# --------------------------------------------------------------------------------------


class LastState(nn.Module):
    """A recurrent model that picks the last state by indexing, with an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.activation = nn.ReLU(inplace=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(self.embedding(x))
        return self.head(self.activation(out[:, -1] + 1.0))


def recurrent() -> Problem:
    return Problem(LastState(), nn.CrossEntropyLoss(), (torch.randint(5, (N, 3)), labels()))


@pytest.mark.parametrize("use_converter", [False, True, "record", "trace"])
def test_plain_model_with_functions(use_converter: Any) -> None:
    problem = recurrent()
    diagonal = build(DiagonalGGN, problem, use_converter=use_converter).diagonal()
    assert_close(diagonal, dense_ggn(problem).diagonal())
    head = list(problem.model.head.parameters())  # type: ignore[union-attr]
    K = build(KroneckerGGN, problem, use_converter=use_converter, params=head)
    assert_close(K.factors[1][0], dense_ggn(problem)[-3:, -3:])
    kernel = NTK(problem.model, problem.whole[0], use_converter=use_converter).to_dense()
    output, at = function(problem.model, problem.whole[0])
    J = jacobian(output, at).flatten(0, -2)
    assert_close(kernel, J @ J.T)


def look(module: nn.Module) -> list[Any]:
    """All attributes of all modules: those of the same value are the same object."""
    return [
        {
            name: list(value.items()) if isinstance(value, dict) else value
            for name, value in vars(child).items()
        }
        for child in module.modules()
    ]


@pytest.mark.parametrize("before", ["plain", "extended", "recorded", "hooked"])
@pytest.mark.parametrize("name", ["mlp", "recurrent"])
def test_model_is_left_as_it_was(name: str, before: str) -> None:
    problem = recurrent() if name == "recurrent" else PROBLEMS[name]()
    model, loss_function = problem.model, problem.loss_function
    seen: list[int] = []
    if before == "extended":
        extend(model), extend(loss_function)
    if before == "recorded":
        extend(model, use_converter="record")
    if before == "hooked":
        model.register_forward_hook(lambda *_: seen.append(1))
        model.register_forward_pre_hook(lambda *_: seen.append(2))
    states = look(model), look(loss_function)
    for kind in (*TRUTH, KroneckerGGN, FisherMC):
        build(kind, problem) @ torch.ones(sum(p.numel() for p in model.parameters()))
    NTK(model, problem.whole[0])
    Jacobian(model, problem.data) @ torch.ones(sum(p.numel() for p in model.parameters()))
    assert (look(model), look(loss_function)) == states
    if before == "hooked":
        seen.clear()
        model(problem.whole[0])
        assert seen == [2, 1]

    def broken() -> Iterator[Any]:
        yield problem.data[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        DiagonalGGN(model, loss_function, broken())
    assert (look(model), look(loss_function)) == states
    copy.deepcopy(model)(problem.whole[0])
    if before == "extended" and name == "mlp":
        with backpack(DiagGGNExact()):
            loss_function(model(problem.whole[0]), problem.whole[1]).backward()
        found = parameter_list_to_vector(p.diag_ggn_exact for p in model.parameters())  # type: ignore
        assert_close(found, dense_ggn(problem).diagonal())


# --------------------------------------------------------------------------------------
# Kronecker and diagonal operators
# --------------------------------------------------------------------------------------


def spd(size: int) -> Tensor:
    root = torch.randn(size, size)
    return root @ root.T


def kronecker() -> tuple[KroneckerOperator, Tensor]:
    """Blocks with one, two and three factors, and the dense matrix."""
    factors = [[spd(3)], [spd(2), spd(4)], [spd(2), spd(2), spd(3)]]
    return KroneckerOperator(factors), torch.block_diag(*map(kfacs_to_mat, factors))


def diagonal() -> tuple[DiagonalOperator, Tensor]:
    entries = torch.rand(9) + 0.1
    return DiagonalOperator(entries), entries.diag()


def inverse() -> tuple[LinearOperator, Tensor]:
    operator, dense = kronecker()
    return operator.inverse(0.5), torch.linalg.inv(dense + 0.5 * torch.eye(len(dense)))


@pytest.mark.parametrize("make", [kronecker, diagonal, inverse])
def test_spectral(make: Callable[[], tuple[Any, Tensor]]) -> None:
    operator, dense = make()
    eye = torch.eye(len(dense))
    assert_close(operator.to_dense(), dense)
    assert_close(operator.diagonal(), dense.diagonal())
    assert_close(operator.trace(), dense.trace())
    assert_close(operator.spectrum.sort().values, torch.linalg.eigvalsh(dense))
    assert_close(operator.logdet(0.3), torch.logdet(dense + 0.3 * eye))
    assert_close(operator.inverse(0.3).to_dense(), torch.linalg.inv(dense + 0.3 * eye))
    # samples are a square root of the matrix times noise: find that from as many as there are rows
    noise = torch.randn(*dense.shape, generator=torch.Generator().manual_seed(3))
    samples = operator.sample(len(dense), generator=torch.Generator().manual_seed(3))
    root = samples @ torch.linalg.inv(noise)
    assert_close(root @ root.T, dense)


def test_split_damping() -> None:
    operator, _ = kronecker()
    damping = 0.2
    (single,), (A, B), (C, D, E) = operator.factors

    def shifted(factor: Tensor, shift: Any) -> Tensor:
        return factor + shift * torch.eye(len(factor))

    pi = ((A.trace() / 2) / (B.trace() / 4)).sqrt()
    means = [C.trace() / 2, D.trace() / 2, E.trace() / 3]
    geometric = (means[0] * means[1] * means[2]) ** (1 / 3)
    expected = [
        [shifted(single, damping)],
        [shifted(A, pi * damping**0.5), shifted(B, damping**0.5 / pi)],
        [
            shifted(f, damping ** (1 / 3) * m / geometric)
            for f, m in zip((C, D, E), means, strict=True)
        ],
    ]
    dense = torch.block_diag(*(torch.linalg.inv(kfacs_to_mat(block)) for block in expected))
    assert_close(operator.inverse(damping, split=True).to_dense(), dense)
    zero = KroneckerOperator([[torch.zeros(2, 2), torch.eye(3)]])
    assert torch.isfinite(zero.inverse(0.1, split=True).spectrum).all()


class Tagger(nn.Module):
    """A class for each token, from layers whose positions are no rows of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(5, 3), nn.RNN(3, 3, batch_first=True)
        self.conv = nn.Conv1d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.rnn(self.embedding(x))[0].transpose(1, 2))


@pytest.mark.parametrize("fisher", ["exact", "empirical", "inputs"])
def test_positions_of_batches_with_other_numbers_of_them(fisher: Any) -> None:
    """Expanded inputs are averages over all positions, as those of accumulated passes are."""
    sizes = [(2, 4), (3, 2)]
    data = [(torch.randint(5, size), torch.randint(2, size)) for size in sizes]
    model, loss = Tagger(), nn.CrossEntropyLoss(reduction="sum")
    options: Any = {"approximation": "expand", "fisher": fisher}
    found = KroneckerGGN(model, loss, data, **options).factors
    counts = torch.cat([X.flatten() for X, _ in data]).bincount(minlength=5)
    assert_close(found[0][0], counts.diag() / 14.0)
    extended, loss = extend(model, use_converter=True), extend(loss)
    for X, y in data:
        with backpack(KFAC(**options), accumulate=True):
            loss(extended(X), y).backward()
    for factors, p in zip(found, model.parameters(), strict=True):
        for one, other in zip(factors, p.kfac, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("name", ["mlp", "mlp-sum", "cnn", "mse", "ignored"])
@pytest.mark.parametrize("approximation", [None, "expand", "reduce"])
def test_kflr_is_that_of_the_whole_batch(name: str, approximation: Any) -> None:
    problem = PROBLEMS[name]()
    operator = build(KroneckerGGN, problem, approximation=approximation)
    X, *targets = problem.whole  # one of the batches has no target that counts, but inputs
    model = extend(problem.model, use_converter=problem.use_converter)
    extend(problem.loss_function)
    with backpack(KFLR(approximation=approximation)):
        problem.loss_function(model(X), *targets).backward()
    expected = [p.kflr for p in problem.model.parameters()]  # type: ignore[attr-defined]
    assert_close(operator.factors, expected)
    assert_close(operator.to_dense(), torch.block_diag(*map(kfacs_to_mat, expected)))


class Positions(nn.Module):
    """Embeddings, and a parameter that is large enough to have a factor for each axis."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 50)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 42, 50))
        self.head = nn.Linear(50, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head((self.embedding(tokens) + self.positions).tanh().mean(1))


def test_kflr_of_embeddings_and_large_parameters() -> None:
    whole = (torch.randint(5, (N, 42)), labels())
    problem = Problem(Positions(), nn.CrossEntropyLoss(), whole, use_converter=True)
    model = extend(copy.deepcopy(problem.model), use_converter=True)
    with backpack(KFLR()):
        extend(nn.CrossEntropyLoss())(model(whole[0]), whole[1]).backward()
    expected = {name: p.kflr for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    params = dict(problem.model.named_parameters())
    assert [len(expected[name]) for name in params] == [2, 2, 2, 1]
    operator = build(KroneckerGGN, problem, params=params.values())
    assert_close(operator.factors, [expected[name] for name in params])


@pytest.mark.parametrize("method", ["KFAC", "KFRA"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_other_kronecker_methods(method: str, reduction: str) -> None:
    """The scale is averaged with the weights of the batches, inputs over all samples."""
    problem = PROBLEMS["mlp"]()._replace(loss_function=nn.CrossEntropyLoss(reduction=reduction))
    torch.manual_seed(1)
    operator = build(KroneckerGGN, problem, method=method, mc_samples=2)
    torch.manual_seed(1)
    extend(problem.model), extend(problem.loss_function)
    totals: list[list[Any]] = [[0, 0], [0], [0, 0], [0]]
    for (X, y), size in zip(problem.data, SIZES, strict=True):
        with backpack(KFAC(mc_samples=2) if method == "KFAC" else KFRA()):
            problem.loss_function(problem.model(X), y).backward()
        for total, p in zip(totals, problem.model.parameters(), strict=True):
            for i, factor in enumerate(getattr(p, method.lower())):
                share = 1 if reduction == "sum" and i == 0 else size / N
                total[i] += share * factor
    assert_close(operator.factors, totals)


@pytest.mark.parametrize("sign", [1, -1])
def test_indefinite_factors_have_products_alone(sign: int) -> None:
    """Eigenvalues that are zero but for rounding are taken for zero; others were, too."""
    matrix = sign * (torch.ones(3, 3) - 0.01 * torch.eye(3))
    operator = KroneckerOperator([[torch.eye(2), matrix]])
    assert_close(operator.to_dense(), torch.kron(torch.eye(2), matrix))
    for use in (lambda: operator.inverse(1.0), operator.root, lambda: operator.logdet(1.0)):
        with pytest.raises(ValueError, match=r"\[3, 3\] is not positive semidefinite"):
            use()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_factors_have_no_inverse(dtype: torch.dtype) -> None:
    """The Hessian of softmax cross entropy is singular, whatever rounding makes of it."""
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Linear(5, 4).to(dtype)
        data = [(torch.rand(30, 5, dtype=dtype), torch.randint(4, (30,)))]
        operator = KroneckerGGN(model, nn.CrossEntropyLoss(), data)
        for split in (False, True):
            with pytest.raises(ValueError, match="singular"):
                operator.inverse(split=split)
        with pytest.raises(ValueError, match="not positive definite"):
            operator.logdet()


def test_low_precision_has_eigenvalues() -> None:
    factors = [spd(2), spd(3)]
    dense = KroneckerOperator([factors]).inverse(0.5).to_dense()
    low = KroneckerOperator([[f.bfloat16() for f in factors]]).inverse(0.5)
    assert low.dtype == torch.bfloat16
    assert_close(low.to_dense().double(), dense, rtol=0.05, atol=0.05)


def test_monte_carlo_diagonal() -> None:
    problem = PROBLEMS["mlp"]()
    torch.manual_seed(0)
    sampled = build(DiagonalGGN, problem, mc_samples=2000)
    assert_close(sampled.diagonal(), dense_ggn(problem).diagonal(), rtol=0.15, atol=1e-3)


def test_operators_of_one_backward_pass() -> None:
    """Quantities of a training step make operators, too."""
    problem = PROBLEMS["mlp"]()
    X, y = problem.whole
    with backpack(DiagGGNExact(), KFLR()):
        extend(problem.loss_function)(extend(problem.model)(X), y).backward()
    params: Any = list(problem.model.parameters())
    assert_close(
        DiagonalOperator(parameter_list_to_vector(p.diag_ggn_exact for p in params)).diagonal(),
        build(DiagonalGGN, problem).diagonal(),
    )
    assert_close(
        KroneckerOperator([p.kflr for p in params]).to_dense(),
        build(KroneckerGGN, problem).to_dense(),
    )


# --------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("kind", [GGN, Hessian])
def test_inverse_by_conjugate_gradients(kind: Any, preconditioned: bool) -> None:
    """Of torch, of scipy, and in products with others, as the dense one."""
    problem, damping = PROBLEMS["mlp"](), 5.0  # the Hessian needs that
    operator = build(kind, problem)
    preconditioner = build(KroneckerGGN, problem) if preconditioned else None
    inverse = InverseOperator(operator, damping, 1e-12, preconditioner=preconditioner)
    dense = torch.linalg.inv(operator.to_dense() + damping * torch.eye(31))
    assert_close(inverse.to_dense(), dense)
    v = torch.rand(31)
    assert_close(inverse @ v, dense @ v)
    assert_close(inverse.to_scipy() @ v.numpy(), (dense @ v).numpy())
    assert_close(
        (operator @ inverse @ operator).to_dense(),
        operator.to_dense() @ dense @ operator.to_dense(),
    )
    assert_close(inverse.submatrix([3, 1]).to_dense(), dense[[3, 1]][:, [3, 1]])
    largest = inverse.eigsh(1)[0]
    assert_close(largest, torch.linalg.eigvalsh(dense)[-1:])
    with pytest.raises(ValueError, match="not known to be symmetric"):
        InverseOperator(Jacobian(problem.model, problem.data))
    with pytest.raises(RuntimeError, match="negative curvature"):
        InverseOperator(operator, -10.0) @ v
    few = InverseOperator(operator, damping, max_iterations=1) @ v
    assert_close(few, operator.solve(v, damping, max_iterations=1))


def test_products_from_the_left() -> None:
    """Rows are multiplied with the transposed; a wrong length is an error."""
    problem = PROBLEMS["mlp"]()
    for operator in (build(GGN, problem), Jacobian(problem.model, problem.data)):
        dense, (rows, _) = operator.to_dense(), operator.shape
        for left in (torch.rand(rows), torch.rand(2, rows)):
            assert_close(left @ operator, left @ dense)
        with pytest.raises(ValueError, match=rf"vectors \[{rows}\]"):
            torch.rand(rows + 1) @ operator
        with pytest.raises(ValueError, match=rf"vectors \[{rows}\]"):
            torch.rand(2, rows + 1) @ operator
        with pytest.raises(TypeError, match="unsupported operand"):
            [1.0] * rows @ operator


def test_wrong_vectors() -> None:
    operator = build(GGN, PROBLEMS["mlp"]())
    with pytest.raises(ValueError, match=r"vectors \[31\].*shape \[30\]"):
        operator @ torch.ones(30)
    with pytest.raises(ValueError, match=r"matrices \[31, V\].*shape \[3, 31\]"):
        operator @ torch.ones(3, 31)
    with pytest.raises(ValueError, match=r"shape \[31, 1, 1\]"):
        operator @ torch.ones(31, 1, 1)
    with pytest.raises(ValueError, match=r"float64 on cpu.*float32 on cpu"):
        operator @ torch.ones(31, dtype=torch.float32)
    with pytest.raises(TypeError, match="to_scipy"):
        operator @ torch.ones(31).tolist()
    with pytest.raises(TypeError, match=r"got list.*parameter_list_to_vector\(tensors\)"):
        operator @ [torch.ones_like(p) for p in mlp().parameters()]  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"\[31\], got shape \[30\]"):
        operator.solve(torch.ones(30))
    with pytest.raises(ValueError, match="at least 1 and less than P, got 31"):
        operator.eigsh(31)


@pytest.mark.parametrize("kind", [GGN, Hessian, DiagonalGGN, KroneckerGGN, EmpiricalFisher])
def test_batches_with_more_than_the_loss_takes(kind: Any) -> None:
    """A loader that also has the number of each sample: say which parts are meant."""
    model, loss_function, (X, y), _ = PROBLEMS["mlp"]()
    dataset = TensorDataset(X, y, torch.arange(len(X)))

    def product(data: Any) -> Tensor:
        return kind(model, loss_function, data) @ torch.ones(31)

    message = r"A batch has 3 parts.*CrossEntropyLoss.*default_collate\(samples\)\[:2\]"
    with pytest.raises(ValueError, match=message):
        product(DataLoader(dataset, batch_size=4))
    chosen = DataLoader(
        dataset, batch_size=4, collate_fn=lambda samples: default_collate(samples)[:2]
    )
    assert_close(product(chosen), product(DataLoader(TensorDataset(X, y), batch_size=4)))


def test_batches_with_less_than_the_loss_takes() -> None:
    """There is nothing to choose from: say that something is missing."""
    data = [(torch.randn(4, 3), torch.randn(4, 2))]
    with pytest.raises(ValueError, match=r"TripletMarginLoss.*'negative'\. Give what is missing"):
        _ = GGN(nn.Linear(3, 2), nn.TripletMarginLoss(), data) @ torch.ones(8)


@pytest.mark.parametrize("kind", [GGN, Hessian, DiagonalGGN, KroneckerGGN, EmpiricalFisher])
def test_dictionaries_of_targets(kind: Any) -> None:
    """A loss of torch takes none: say what to choose. One's own may."""

    class OfEntry(nn.MSELoss):
        def forward(self, f: Tensor, targets: Any) -> Tensor:
            return super().forward(f, targets["y"])

    model, X, y = mlp(), torch.randn(5, 3), torch.randn(5, 3)
    named, vector = [(X, {"y": y, "number": torch.arange(5)})], torch.ones(31)
    message = r"MSELoss takes tensors .* a dict of 'y', 'number'\. Choose one, .*y\[name\]"
    with pytest.raises(ValueError, match=message):
        kind(model, nn.MSELoss(), named) @ vector
    expected = kind(model, nn.MSELoss(), [(X, y)]) @ vector
    assert_close(kind(model, OfEntry(), named) @ vector, expected)


@pytest.mark.parametrize("kind", [GGN, Hessian, DiagonalGGN, KroneckerGGN, EmpiricalFisher])
def test_wrong_data(kind: Any) -> None:
    model, loss_function, (X, y), _ = PROBLEMS["mlp"]()

    def use(data: Any) -> None:
        kind(model, loss_function, data) @ torch.ones(31)

    with pytest.raises(ValueError, match="no batches"):
        use([])
    with pytest.raises(ValueError, match=r"got Tensor.*data=\[\(X, y\)\]"):
        use((X, y))
    with pytest.raises(ValueError, match="tuple"):
        use([(X,)])
    samples, message = TensorDataset(X, y), r"TensorDataset has a sample .*DataLoader\(dataset"
    with pytest.raises(ValueError, match=message):
        use(samples)  # Fisher matrices took outputs for samples
    with pytest.raises(ValueError, match=message):
        Laplace(model, loss_function, samples)
    for made in (Influence, ProjectedInfluence):
        with pytest.raises(ValueError, match=message):
            made(model, loss_function, samples)
    with pytest.raises(ValueError, match=message):
        Influence(model, loss_function, [(X, y)], "identity").scores(samples)
    of_batches = DataLoader(TensorDataset(X[None], y[None]), batch_size=None)
    assert_close(
        kind(model, loss_function, of_batches).to_dense(),
        kind(model, loss_function, [(X, y)]).to_dense(),
    )
    if kind in (GGN, Hessian, EmpiricalFisher):
        with pytest.raises(ValueError, match="iterator"):
            use(iter([(X, y)]))
    else:
        use(iter([(X, y)]))


@pytest.mark.parametrize("kind", [GGN, Hessian, EmpiricalFisher, Jacobian])
@pytest.mark.parametrize("after", [0, 1])
def test_training_mode_after_an_operator_was_built(after: int, kind: Any) -> None:
    """The first product was that of another function, without a word; statistics changed."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double().eval()
    X, y = torch.randn(9, 3).double(), torch.randint(3, (9,))
    operator = kind(model, *(() if kind is Jacobian else (nn.CrossEntropyLoss(),)), [(X, y)])
    v = torch.ones(operator.shape[1]).double()
    for _ in range(after):
        operator @ v
    state = copy.deepcopy(model.state_dict())
    model.train()
    with pytest.raises(ValueError, match=r"training mode: '1' .*model\.eval"):
        operator @ v
    assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Hessian, DiagonalGGN, KroneckerGGN])
def test_no_target_counts(kind: Any) -> None:
    problem = with_ignored()
    problem.whole[1].fill_(-100)
    with pytest.raises(ValueError, match="No target"):
        build(kind, problem) @ torch.ones(21)


@pytest.mark.parametrize("kind", [DiagonalGGN, KroneckerGGN, EKFAC])
def test_structured_operators_multiply_inside_of_autocast(kind: Any) -> None:
    problem = PROBLEMS["mlp"]()
    data = [(problem.whole[0].float(), problem.whole[1])]
    operator = kind(problem.model.float(), problem.loss_function, data, progress=False)
    vector = torch.randn(operator.shape[0], dtype=torch.float32)
    expected = operator @ vector, operator.inverse(0.1) @ vector, operator.diagonal()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = operator @ vector, operator.inverse(0.1) @ vector, operator.diagonal()
    assert_close(found, expected)


@pytest.mark.parametrize("kind", [GGN, EmpiricalFisher, FisherMC, DiagonalGGN, KroneckerGGN, EKFAC])
@pytest.mark.parametrize("name", ["mlp", "mlp-sum"])
def test_a_batch_without_samples_adds_nothing(kind: Any, name: str) -> None:
    problem = PROBLEMS[name]()
    rest = [*problem.data, tuple(tensor[:0] for tensor in problem.whole)]
    operator = kind(problem.model, problem.loss_function, rest, progress=False)
    assert_close(operator.to_dense(), build(kind, problem).to_dense())


class Smoothed(nn.Module):
    """A loss of one's own that smooths labels, and does not ignore any."""

    reduction = "mean"

    def __init__(self) -> None:
        super().__init__()
        self.label_smoothing = 0.1

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(f, y, label_smoothing=self.label_smoothing)


@pytest.mark.parametrize("kind", [GGN, Hessian, EmpiricalFisher])
def test_a_batch_without_samples_and_a_loss_of_ones_own(kind: Any) -> None:
    """It was an AttributeError, where the loss has an attribute label_smoothing."""
    problem, loss = PROBLEMS["mlp"](), Smoothed()
    rest = [problem.whole, tuple(tensor[:0] for tensor in problem.whole)]
    found = kind(problem.model, loss, rest, progress=False)
    whole = kind(problem.model, loss, [problem.whole], progress=False)
    assert_close(found.to_dense(), whole.to_dense())


class WithTemperature(nn.Sequential):
    """A model whose outputs begin with a number."""

    def forward(self, x: Tensor) -> Any:
        return {"temperature": torch.ones(()), "logits": self[0](x)}


class OfLogits(nn.Module):
    """A loss that has its reduction from another one, and cannot be told another."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    @property
    def reduction(self) -> str:
        return self.loss.reduction

    def forward(self, outputs: Any, y: Tensor) -> Tensor:
        result: Tensor = self.loss(outputs["logits"] if isinstance(outputs, dict) else outputs, y)
        return result


@pytest.mark.parametrize("cls", [nn.Sequential, WithTemperature])
def test_kronecker_factors_of_own_outputs_and_losses(cls: Any) -> None:
    plain = nn.Linear(4, 3)
    model = cls(plain)
    data = [(torch.randn(N, 4), torch.randint(3, (N,)))]
    found = KroneckerGGN(model, OfLogits(), data, fisher="exact", progress=False)
    truth = KroneckerGGN(plain, nn.CrossEntropyLoss(), data, fisher="exact", progress=False)
    assert_close(found.to_dense(), truth.to_dense())


@pytest.mark.parametrize("kind", [GGN, Hessian, EmpiricalFisher, KroneckerGGN])
def test_complex_parameters_are_an_error(kind: Any) -> None:
    """The second derivative by real and imaginary parts is no complex matrix."""
    model = nn.Linear(3, 2, dtype=torch.complex128)
    data = [(torch.randn(4, 3, dtype=torch.complex128), torch.randn(4, 2))]
    with pytest.raises(ValueError, match="for real parameters, but these are complex"):
        kind(model, nn.MSELoss(), data)


class ComplexOutput(nn.Module):
    """Two complex numbers for each sample, or their parts."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.is_complex = nn.Linear(3, 4), is_complex

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.layer(x).unflatten(1, (2, 2))
        return torch.view_as_complex(pairs) if self.is_complex else pairs


class SquaredLengths(nn.Module):
    """A loss of complex numbers, or of their parts."""

    reduction = "mean"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        f = torch.view_as_real(f) if f.is_complex() else f
        return (f - y).square().sum((1, 2)).mean()


@pytest.mark.parametrize("kind", [GGN, Hessian, EmpiricalFisher])
def test_complex_outputs(kind: Any) -> None:
    """Their matrix is that of the real and imaginary parts."""
    data = [(inputs(3), torch.randn(N, 2, 2))]
    dense, truth = (
        kind(ComplexOutput(is_complex), SquaredLengths(), data).to_dense()
        for is_complex in (True, False)
    )
    assert_close(dense, truth)


def test_jacobian_of_complex_outputs_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"real outputs.*complex128.*view_as_real"):
        Jacobian(ComplexOutput(True), [inputs(3)])
    assert Jacobian(ComplexOutput(False), [inputs(3)]).shape == (4 * N, 16)


def test_wrong_parameters() -> None:
    problem = PROBLEMS["mlp"]()
    with pytest.raises(ValueError, match="require a gradient"):
        build(GGN, problem, params=[])
    frozen = problem._replace(model=problem.model.requires_grad_(False))
    for params in (None, list(frozen.model.parameters())):
        with pytest.raises(ValueError, match="require a gradient"):
            build(GGN, frozen, params=params)
    trained = PROBLEMS["mlp"]()
    weight = trained.model[0].weight  # type: ignore[index]
    for wrong in (weight, mlp().parameters(), [weight, weight]):
        with pytest.raises(ValueError, match=r"parameters of the model, each .* params=\[p\]"):
            build(GGN, trained, params=wrong)
    with pytest.raises(ValueError, match="vectors_at_once has to be at least 1, got -1"):
        build(GGN, trained, vectors_at_once=-1)
    mixed = PROBLEMS["mlp"]()
    mixed.model[0].float()  # type: ignore[index]
    with pytest.raises(ValueError, match=r"float32 on cpu.*float64 on cpu"):
        build(GGN, mixed)


def test_wrong_losses() -> None:
    problem = PROBLEMS["mlp"]()
    for loss in (nn.CrossEntropyLoss(reduction="none"), nn.Identity()):
        with pytest.raises(ValueError, match="'reduction'"):
            build(GGN, problem._replace(loss_function=loss))
    for kind in (GGN, Hessian, DiagonalGGN, KroneckerGGN):
        for loss, name in (
            (nn.functional.cross_entropy, "the function cross_entropy"),
            (nn.CrossEntropyLoss, "the class CrossEntropyLoss"),
        ):
            message = rf"module, such as nn.CrossEntropyLoss\(\) .*got {name}\."
            with pytest.raises(ValueError, match=message):
                build(kind, problem._replace(loss_function=loss))
    container = nn.Sequential(nn.CrossEntropyLoss())
    container.reduction = "mean"
    container.forward = lambda f, y: container[0](f, y)  # type: ignore
    with pytest.raises(ValueError, match="no loss module"):
        build(GGN, problem._replace(loss_function=container)).to_dense()
    poisson = problem._replace(
        loss_function=nn.GaussianNLLLoss(),
        whole=(inputs(3), inputs(3), torch.rand(N, 3)),
    )
    assert_close(build(GGN, poisson).to_dense(), dense_ggn(poisson))

    class Concave(nn.Module):
        reduction = "mean"

        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            return -(f**2).sum(1).mean()

    concave = problem._replace(loss_function=Concave())
    with pytest.raises(ValueError, match="not convex"):
        build(GGN, concave).to_dense()
    assert_close(build(Hessian, concave).to_dense(), dense_hessian(concave))


class OfTwoTasks(nn.Module):
    """A sum of squares by functions, and the cross entropy of the other outputs."""

    reduction = "mean"

    def __init__(self, entropy: Callable[..., Tensor]) -> None:
        super().__init__()
        self.entropy = entropy

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return f[:, :1].square().sum(1).mean() + 0.3 * self.entropy(f[:, 1:], y)


@pytest.mark.parametrize("kind", [DiagonalGGN, DiagonalHessian, KroneckerGGN, EKFAC, GGNSpectrum])
def test_losses_that_are_more_than_the_modules_inside(kind: Any) -> None:
    """Curvature was that of the modules alone, with a warning."""
    model, (X, y) = nn.Linear(3, 4).double(), (inputs(3).double(), torch.arange(N) % 3)
    with pytest.raises(ValueError, match=r"more of 'entropy' .*PowBackward0.*by functions"):
        kind(model, OfTwoTasks(nn.CrossEntropyLoss()), [(X, y)])
    if kind in (DiagonalGGN, GGNSpectrum):
        loss_function = OfTwoTasks(nn.functional.cross_entropy)
        found = kind(model, loss_function, [(X, y)]).to_dense()
        (J,) = jacobian(lambda w: (X @ w.T).flatten(), (model.weight,))
        at = model(X).detach()
        H = torch.func.hessian(loss_function)(at, y).reshape(at.numel(), -1)
        of_weight = J.flatten(1).T @ H @ J.flatten(1)
        expected = of_weight if kind is GGNSpectrum else of_weight.diagonal().diag()
        assert_close(found[:12, :12], expected)


def test_model_with_several_outputs() -> None:
    problem = PROBLEMS["mlp"]()
    two = nn.Sequential(problem.model)
    two.forward = lambda x: (problem.model(x), x)  # type: ignore
    with pytest.raises(ValueError, match="returns a tensor, got tuple"):
        build(GGN, problem._replace(model=two)).to_dense()
    own = OfPair()  # which may be what such a model is for
    found = build(Hessian, problem._replace(model=two, loss_function=own)).to_dense()
    summed = nn.CrossEntropyLoss(reduction="sum")
    assert_close(found, build(Hessian, problem._replace(loss_function=summed)).to_dense())
    mean = build(Hessian, problem._replace(model=two, loss_function=OfPair("mean"))).to_dense()
    assert_close(mean, build(Hessian, problem).to_dense())
    two.forward = lambda x: (problem.model(x), x[:0])  # type: ignore
    with pytest.raises(ValueError, match=r"OfPair is the mean over the samples.*\[0, 4\] rows"):
        build(Hessian, problem._replace(model=two, loss_function=OfPair("mean"))).to_dense()


class OfPair(nn.Module):
    """A loss of two outputs."""

    def __init__(self, reduction: str = "sum") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs[0], y, reduction=self.reduction)


class Plain(nn.MSELoss):
    """Inherits everything."""


class OfIntegers(nn.MSELoss):
    """Leaves the mean to the loss that it inherits from."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return super().forward(f, y.to(f))


class Focal(nn.CrossEntropyLoss):
    """Makes the mean itself, without the weights of the classes."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(f, y, self.weight, reduction="none").square().mean()


def test_losses_that_inherit_from_those_of_torch() -> None:
    """What their mean divides by is that of the loss that makes it."""
    model, X, y = mlp(), inputs(3), inputs(3)
    of_torch = [
        EmpiricalFisher(model, nn.MSELoss(), [(X, y)]).to_dense(),
        Laplace(model, nn.MSELoss(), [(X, y)]).log_marginal_likelihood(),
    ]
    for kind in (Plain, OfIntegers):
        assert_close(EmpiricalFisher(model, kind(), [(X, y)]).to_dense(), of_torch[0])
        assert_close(Laplace(model, kind(), [(X, y)]).log_marginal_likelihood(), of_torch[1])
    problem = Problem(model, Focal(torch.tensor([1.0, 5.0, 0.2])), (X, labels()))
    assert_close(build(Hessian, problem).to_dense(), dense_hessian(problem))


class StepsFirst(nn.Module):
    """Returns ``[T, N, C]``; a layer that reads ``[T, N, I]`` says where the samples are."""

    def __init__(self, of_layer: bool) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4) if of_layer else nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        if isinstance(self.layer, nn.LSTM):
            return self.last(self.layer(x)[0])
        return self.last(self.layer(x.transpose(0, 1)).tanh())


class MeanOfSquares(nn.Module):
    """A loss of its own: the mean over samples, steps and entries."""

    reduction = "mean"

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).square().mean()


@pytest.mark.parametrize("of_layer", [True, False], ids=["layer", "transposed"])
@pytest.mark.parametrize("own", [True, False], ids=["own", "torch"])
def test_outputs_with_the_steps_first(of_layer: bool, own: bool) -> None:
    """Batches count by their samples, wherever these are, and Fisher sums over those."""
    model, loss = StepsFirst(of_layer), MeanOfSquares() if own else nn.MSELoss()
    axis = 1 if of_layer else 0
    X, y = torch.rand(5, N, 3).movedim(1, axis), torch.rand(5, N, 2)
    data = list(zip(X.split(SIZES, axis), y.split(SIZES, 1), strict=True))
    parameters = list(model.parameters())
    rows = []
    for one, target in zip(X.split(1, axis), y.split(1, 1), strict=True):
        gradient = torch.autograd.grad(loss(model(one), target), parameters)
        rows.append(parameter_list_to_vector(gradient))
    of_each = torch.stack(rows)
    # the mean of squares over T C = 10 terms of a sample, in the scale of its 10 N terms
    expected = of_each.T @ of_each / N * (1 if own else 10)
    assert_close(EmpiricalFisher(model, loss, data).to_dense(), expected)
    for kind in (Hessian, GGN, DiagonalHessian, KroneckerGGN):
        method = {"method": "KFLR"} if kind is KroneckerGGN else {}
        parts, whole = (kind(model, loss, each, **method) for each in (data, [(X, y)]))
        assert_close(parts.to_dense(), whole.to_dense())
    damping = {"damping": 0.1}
    parts, whole = (
        Influence(model, loss, each, **damping).scores((X, y)) for each in (data, [(X, y)])
    )
    assert_close(parts, whole)


@pytest.mark.parametrize("of_layer", [True, False], ids=["layer", "transposed"])
def test_batchmean_divides_by_the_first_axis(of_layer: bool) -> None:
    """Of which there are as many in each batch where that is the axis of the steps."""
    model, loss = StepsFirst(of_layer), nn.KLDivLoss(reduction="batchmean")
    axis = 1 if of_layer else 0
    X, y = torch.rand(5, N, 3).movedim(1, axis), torch.rand(5, N, 2)
    data = list(zip(X.split(SIZES, axis), y.split(SIZES, 1), strict=True))
    for kind in (Hessian, EmpiricalFisher):
        with pytest.raises(
            ValueError, match=r"shape \[5, \d, 2\] are along axis 1. Use reduction="
        ):
            kind(model, loss, data).to_dense()


def test_plain_operators_do_not_tell_what_cannot_be_extended() -> None:
    """They look where the samples are, and need nothing else of an extended model."""
    model = nn.Sequential(nn.Linear(3, 4), torch.jit.script(nn.Tanh()), nn.Linear(4, 2))
    data = [(torch.rand(n, 3), torch.rand(n, 2)) for n in (3, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (EmpiricalFisher, Hessian):
            kind(model, MeanOfSquares(), data, progress=False).to_dense()


class Named(nn.Module):
    """Takes its inputs by name, and returns a dictionary, as models of transformers do."""

    def __init__(self, body: nn.Module, wrapped: str = "") -> None:
        super().__init__()
        self.body, self.wrapped = body, wrapped

    def forward(self, x: Any = None) -> Any:
        if self.wrapped == "input":
            x = x["x"]
        output = self.body(x.flatten(1))
        return {"logits": output, "loss": None}


USES: dict[str, Callable[..., Any]] = {
    **{
        kind.__name__: lambda *a, kind=kind: kind(*a).to_dense()
        for kind in (GGN, Hessian, EmpiricalFisher, FisherMC, KroneckerGGN, DiagonalGGN, EKFAC)
    },
    "Jacobian": lambda model, loss, data: Jacobian(model, data),
    "GGNSpectrum": lambda model, loss, data: GGNSpectrum(model, loss, data[0]),
    "NTK": lambda model, loss, data: NTK(model, data[0][0]),
    "Laplace": Laplace,
    "Laplace of the GGN": lambda *a: Laplace(*a, KroneckerOperator([[torch.eye(31)]])),
    "Laplace of the last": lambda *a: Laplace(*a, params="last"),
    "Influence": Influence,
    "identity": lambda *a: Influence(*a, "identity").self_scores(),
    "TracIn": lambda model, loss, data: TracIn(model, loss, data, [model.state_dict()]).scores(
        data
    ),
    "ProjectedInfluence": ProjectedInfluence,
}


@pytest.mark.parametrize("name", USES)
def test_models_of_names(name: str) -> None:
    """One error for an output that is no tensor, one for a dictionary that is no input."""
    problem = PROBLEMS["mlp"]()
    model, loss, data = problem.model, problem.loss_function, problem.data
    with pytest.raises(ValueError, match=r"returns a tensor, got dict of 'logits', 'loss'. Wrap"):
        USES[name](Named(model), loss, data)
    named = [({"x": X}, y) for X, y in data]
    with pytest.raises(ValueError, match=r"returns a tensor, got dict of 'logits', 'loss'. Wrap"):
        USES[name](Named(model, "input"), loss, named)
    with pytest.raises(ValueError, match=r"with the dict .*'flatten'.*model\(\*\*X\)"):
        USES[name](Named(model), loss, named)
    with pytest.raises(ValueError, match=r"with the tuple .*model\(\*X\)"):
        USES[name](Named(model), loss, [((X, X), y) for X, y in data])


def test_wrong_structure() -> None:
    with pytest.raises(ValueError, match="KFLR, KFAC, KFRA, got 'kfac'"):
        build(KroneckerGGN, PROBLEMS["mlp"](), method="kfac")
    with pytest.raises(ValueError, match=r"square.*\[\[\[2, 3\]\]\]"):
        KroneckerOperator([[torch.ones(2, 3)]])
    with pytest.raises(ValueError, match=r"shape \[3, 3\].*KroneckerOperator\(\[\[matrix\]\]\)"):
        KroneckerOperator([torch.eye(3)])
    with pytest.raises(ValueError, match=r"eigenvalues \[P\].*got shape \[2, 2\]"):
        DiagonalOperator(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"got shape \[3\], and blocks with \[2\] rows"):
        SpectralOperator(torch.ones(3), [[torch.eye(2)]])
    with pytest.raises(ValueError, match=r"factor of shape \[2, 2\] is not symmetric"):
        KroneckerOperator([[torch.tensor([[2.0, 1.0], [0.0, 2.0]])]]).inverse(1.0)
    nearly = torch.tensor([[2.0, 1.0], [1.0 + 2e-5, 2.0]])  # as of single precision
    symmetric = torch.tensor([[2.0, 1.0 + 1e-5], [1.0 + 1e-5, 2.0]])
    assert_close(KroneckerOperator([[nearly]]).inverse().to_dense(), torch.linalg.inv(symmetric))
    indefinite = DiagonalOperator(torch.tensor([1.0, -1.0]))
    assert_close(indefinite.inverse(2.0).diagonal(), torch.tensor([1 / 3, 1.0]))
    with pytest.raises(ValueError, match="damping 1 is singular"):
        indefinite.inverse(1.0)
    with pytest.raises(ValueError, match=r"damping 0\.5 is not positive definite"):
        indefinite.logdet(0.5)
    with pytest.raises(ValueError, match="no covariance"):
        indefinite.sample()


def test_damping_is_one_number() -> None:
    """Several would be those of the columns, or of the eigenvectors."""
    structured, d = KroneckerOperator([[torch.eye(2) + 1]]), torch.tensor([1.0, 2.0])
    plain = Counting(torch.eye(2) + 1)
    calls: list[Callable[[Any], Any]] = [
        *(operator.damped for operator in (plain, structured)),
        lambda damping: plain.solve(d, damping),
        lambda damping: InverseOperator(plain, damping) @ d,
        structured.inverse,
        lambda damping: structured.inverse(damping, split=True),
        structured.logdet,
        lambda damping: logdet(structured, damping),
    ]
    for call in calls:
        for several in (d, d.numpy()):
            with pytest.raises(
                ValueError, match=r"damping is one number, got shape \[2\].* A \+ D"
            ):
                call(several)
        for one in (torch.tensor(1.0), torch.tensor([1.0]), torch.ones(1, 1), d[:1].numpy()):
            call(one)
    assert_close(plain.solve(d, torch.ones(1)), plain.solve(d, 1.0))
    assert_close((plain + DiagonalOperator(d)).to_dense(), plain.matrix + d.diag())


def test_scipy_of_complex_vectors() -> None:
    """Real and imaginary part have a product each."""
    operator = Counting(torch.randn(3, 4))
    v, w = torch.randn(4, 2, dtype=torch.complex128), torch.randn(3, dtype=torch.complex128)
    scipy, dense = operator.to_scipy(), operator.matrix + 0j
    assert_close(torch.as_tensor(scipy @ v.numpy()), dense @ v)
    assert_close(torch.as_tensor(scipy @ v[:, 0].numpy()), dense @ v[:, 0])
    assert_close(torch.as_tensor(scipy.H @ w.numpy()), dense.T @ w)


# --------------------------------------------------------------------------------------
# One matrix
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Hessian, DiagonalGGN, KroneckerGGN])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [nn.Dropout(0.5)],
        lambda: [nn.BatchNorm1d(4)],
        lambda: [nn.RReLU()],
        lambda: [StochasticDepth(0.5, "row")],
        lambda: [
            nn.Unflatten(1, (2, 2)),
            nn.GRU(2, 2, 2, dropout=0.1, batch_first=True),
            ReduceTuple(),
            nn.Flatten(),
        ],
    ],
)
def test_training_mode_is_refused(kind: Any, make: Callable[[], list[nn.Module]]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), *make(), nn.Linear(4, 3))
    problem = PROBLEMS["mlp"]()._replace(model=model)
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        build(kind, problem)
    model.eval()
    build(kind, problem)


@pytest.mark.parametrize("kind", [DiagonalGGN, DiagonalHessian, KroneckerGGN, EKFAC])
def test_random_functions_are_refused(kind: Any) -> None:
    """No module is there to tell of them, and a single pass has one matrix of many."""

    class Random(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(dropout(x, training=self.training))

    problem = PROBLEMS["mlp"]()._replace(model=Random(*mlp()))
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"draws random numbers.*model\.eval\(\)"):
        build(kind, problem)
    assert torch.equal(torch.get_rng_state(), state)
    problem.model.eval()
    plain = problem._replace(model=nn.Sequential(*problem.model))
    assert_close(build(kind, problem).to_dense(), build(kind, plain).to_dense())


def test_other_statistics_of_the_batch_are_refused() -> None:
    problem = PROBLEMS["mlp"]()
    problem.model.insert(1, nn.BatchNorm1d(4, track_running_stats=False))  # type: ignore[operator]
    problem.model.eval()
    with pytest.raises(ValueError, match="running statistics"):
        build(GGN, problem)


def test_changes_are_noticed() -> None:
    """Neither parameters nor data may change between two products; the order of batches may."""
    problem = PROBLEMS["mlp"]()
    data = problem.data
    operator = GGN(*problem[:2], data)
    v = torch.randn(31)
    before = operator @ v
    data.reverse()
    assert_close(operator @ v, before)
    removed = data.pop()
    with pytest.raises(RuntimeError, match="not one matrix"):
        operator @ v
    data.append(removed)
    assert_close(operator @ v, before)
    with torch.no_grad():
        problem.model[0].weight.add_(0.1)  # type: ignore[index]
    with pytest.raises(RuntimeError, match="build a new operator"):
        operator @ v
    noisy = problem.model
    noisy.forward = lambda x: nn.Sequential.forward(noisy, dropout(x))  # type: ignore
    operator = build(Hessian, problem)
    operator @ v
    with pytest.raises(RuntimeError, match="random"):
        operator @ v


# --------------------------------------------------------------------------------------
# Optional dependencies
# --------------------------------------------------------------------------------------


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let imports of a package fail."""
    original = builtins.__import__

    def guarded(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.split(".")[0] == name:
            raise ImportError(module)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, _ = diagonal()
    without("scipy", monkeypatch)
    with pytest.raises(ImportError, match=r"pip install backpack-for-pytorch\[linalg\]"):
        operator.eigsh(2)


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over the data show a bar, unless that is switched off or tqdm is not installed."""
    problem = PROBLEMS["mlp"]()
    shown = []

    class Bars:
        @staticmethod
        def tqdm(data: Any, **options: Any) -> Any:
            shown.append(options)
            return data

    monkeypatch.setitem(sys.modules, "tqdm", Bars)
    v = torch.ones(31)
    expected = build(GGN, problem, progress=False) @ v
    assert not shown
    assert_close(build(GGN, problem) @ v, expected)
    assert [options["leave"] for options in shown] == [False]
    without("tqdm", monkeypatch)
    assert_close(build(GGN, problem) @ v, expected)
    assert len(shown) == 1


def test_structured_operator_plus_a_diagonal() -> None:
    """With one number for each block, in whatever order the rows are."""
    torch.manual_seed(0)
    roots = [torch.randn(size, size).double() for size in (2, 3, 4)]
    A, B, C = (root @ root.T for root in roots)
    order = torch.tensor([0, 3, 1, 4, 2, 5, 9, 8, 7, 6])
    operator = KroneckerOperator([[A, B], [C]], order)
    values = torch.tensor([2.0] * 6 + [0.5] * 4).double()
    diagonal = torch.empty_like(values).index_copy_(0, order, values)
    found = operator.plus_diagonal(diagonal)
    assert_close(found.to_dense(), operator.to_dense() + diagonal.diag())
    assert_close(found.logdet(), torch.linalg.slogdet(found.to_dense()).logabsdet)
    diagonal[0] = 3
    with pytest.raises(ValueError, match=r"A block of 6 rows .* of different value"):
        operator.plus_diagonal(diagonal)


def test_pooling_that_draws_its_windows_is_no_function_of_samples() -> None:
    X, y = torch.rand(3, 1, 4, 4), torch.randint(2, (3,))
    for samples in (None, torch.rand(3, 1, 2)):
        pool = nn.FractionalMaxPool2d(2, output_size=2, _random_samples=samples)
        model = nn.Sequential(nn.Conv2d(1, 1, 1), pool, nn.Flatten(), nn.Linear(4, 2)).eval()
        if samples is None:
            with pytest.raises(ValueError, match=r"'1' .FractionalMaxPool2d.*_random_samples"):
                GGN(model, nn.CrossEntropyLoss(), [(X, y)])
        else:
            GGN(model, nn.CrossEntropyLoss(), [(X, y)]) @ torch.ones(12)


@pytest.mark.parametrize("operator", [GGN, Hessian, EmpiricalFisher, FisherMC, Influence])
def test_batches_of_weight_zero_that_label_smoothing_counts(operator: Any) -> None:
    """They were left out of the matrix without a word."""
    model = nn.Linear(2, 3)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 2.0]), label_smoothing=0.2)
    X, y = torch.rand(5, 2), torch.tensor([1, 2, 1, 0, 0])
    batches = [(X[:3], y[:3]), (X[3:], y[3:])]
    with pytest.raises(ValueError, match=r"class weight 0, but label_smoothing = 0\.2"):
        found = operator(model, loss, batches)
        found @ torch.ones(9) if isinstance(found, LinearOperator) else found.scores([(X, y)])
    total = nn.CrossEntropyLoss(loss.weight, label_smoothing=0.2, reduction="sum")
    params = dict(model.named_parameters())
    blocks = hessian(
        lambda *p: total(functional_call(model, dict(zip(params, p, strict=True)), X), y) / 4,
        tuple(params.values()),
    )
    found = DiagonalGGN(model, loss, batches).to_dense().diag()
    rows = [blocks[i][i].reshape(p.numel(), -1) for i, p in enumerate(params.values())]
    assert_close(found, torch.cat([block.diag() for block in rows]))

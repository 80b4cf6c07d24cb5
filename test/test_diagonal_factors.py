"""Of large Kronecker factors there is the diagonal alone: it is never formed from the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backpack import backpack, extend, extensions
from backpack.linalg import KroneckerGGN, KroneckerOperator, approximations
from backpack.utils.kroneckers import kfacs_to_mat

TOLERANCE = {"rtol": 1e-8, "atol": 1e-10}
DAMPING = 0.1
Model = Callable[[], tuple[nn.Module, Tensor, Tensor]]


def of_linear() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 3))
    return model.double(), torch.randn(5, 6).double(), torch.randn(5, 3).double()


def of_positions() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2))
    return model.double(), torch.randn(5, 4, 6).double(), torch.randn(5, 2).double()


def of_convolution(**options: Any) -> Model:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        first = nn.Conv2d(4, 2, (2, 3), **options)
        X = torch.randn(5, 4, 5, 6).double()
        features = first(X.float()).flatten(1).shape[1]
        model = nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(features, 2))
        return model.double(), X, torch.randn(5, 2).double()

    return make


def of_transposed_convolution() -> tuple[nn.Module, Tensor, Tensor]:
    first = nn.ConvTranspose1d(3, 2, 3, stride=2, bias=False)
    model = nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)).double()
    return model, torch.randn(5, 3, 4).double(), torch.randn(5, 2).double()


def of_embedding() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Embedding(9, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2))
    return model.double(), torch.randint(9, (5, 3)), torch.randn(5, 2).double()


MODELS: dict[str, Model] = {
    "linear": of_linear,
    "positions": of_positions,
    "convolution": of_convolution(),
    "padded": of_convolution(padding=1, padding_mode="circular"),
    "zeros": of_convolution(padding=(1, 0), stride=2),
    "dilated groups": of_convolution(dilation=(2, 1), groups=2),
    "transposed convolution": of_transposed_convolution,
    "embedding": of_embedding,
}
# larger ones are diagonals
MOST = 4


def limited(factors: list[Tensor]) -> list[Tensor]:
    """Return matrices: diagonal ones in the place of large ones."""
    return [f if len(f) <= MOST else f.diagonal().diag() for f in factors]


class Shapes(TorchDispatchMode):
    """Notes the shapes of all tensors that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = f(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


@contextmanager
def no_square(*sizes: int) -> Iterator[None]:
    """Refuse ``[D, D]`` of some sizes."""
    with Shapes() as shapes:
        yield
    assert shapes.seen.isdisjoint((size, size) for size in sizes)
    assert shapes.seen


@pytest.mark.parametrize("joint_bias", [False, True], ids=["apart", "joint"])
@pytest.mark.parametrize("approximation", [None, "expand", "reduce"])
@pytest.mark.parametrize("name", MODELS)
def test_diagonals_are_computed_alone(name: str, approximation: Any, joint_bias: bool) -> None:
    model, X, y = MODELS[name]()
    lossfunc, model = extend(nn.MSELoss()), extend(model)
    whole: Any = []
    for most in (None, MOST):
        torch.manual_seed(0)
        ext = extensions.KFLR(
            approximation=approximation, joint_bias=joint_bias, max_factor_size=most
        )
        sizes = [len(f) for factors in whole for f in factors if len(f) > MOST]
        assert most is None or sizes
        with backpack(ext):
            loss = lossfunc(model(X), y)
            with no_square(*sizes):
                loss.backward()
        found = [p.kflr for p in model.parameters()]
        if most is None:
            whole = found
    for mine, factors in zip(found, whole, strict=True):
        assert [f.dim() for f in mine] == [2 if len(f) <= MOST else 1 for f in factors]
        expected = [f if len(f) <= MOST else f.diagonal() for f in factors]
        torch.testing.assert_close(mine, expected, **TOLERANCE)


def dense_of(operator: KroneckerOperator) -> Tensor:
    """Return the matrix of blocks whose large factors are diagonal, in the order of parameters."""
    blocks = torch.block_diag(*[kfacs_to_mat(limited(factors)) for factors in operator.factors])
    if operator.order is None:
        return blocks
    result = torch.empty_like(blocks)
    result[operator.order.unsqueeze(1), operator.order] = blocks
    return result


@pytest.mark.parametrize("joint_bias", [False, True], ids=["apart", "joint"])
@pytest.mark.parametrize("name", MODELS)
def test_operators(name: str, joint_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, y = MODELS[name]()
    batches = [(X[:2], y[:2]), (X[2:], y[2:])]
    whole = KroneckerGGN(copy.deepcopy(model), nn.MSELoss(), batches, joint_bias=joint_bias)
    A = dense_of(whole)
    K = KroneckerGGN(
        model, nn.MSELoss(), batches, joint_bias=joint_bias, max_factor_size=MOST, progress=False
    )
    assert any(f.dim() == 1 for block in K.factors for f in block)
    assert not torch.allclose(A, whole.to_dense())
    damped = A + DAMPING * torch.eye(len(A)).double()
    for found, expected in (
        (K.to_dense(), A),
        (K.diagonal(), A.diagonal()),
        (K.trace(), A.trace()),
        (K.logdet(DAMPING), damped.logdet()),
        (K.inverse(DAMPING).to_dense(), damped.inverse()),
        (K.inverse(DAMPING).diagonal(), damped.inverse().diagonal()),
        (K.root().to_dense() @ K.root().to_dense(), A),
    ):
        torch.testing.assert_close(found, expected, **TOLERANCE)
    # where each factor is damped, it stays one
    blocks = [limited(factors) for factors in whole.factors]
    of_matrices = KroneckerOperator(blocks, whole.order)
    expected = of_matrices.inverse(DAMPING, split=True).to_dense()
    torch.testing.assert_close(K.inverse(DAMPING, split=True).to_dense(), expected, **TOLERANCE)
    # samples are linear in their noise
    monkeypatch.setattr(torch, "randn", lambda n, m, generator, **options: torch.eye(n, **options))
    S = K.inverse(DAMPING).sample(len(A))
    torch.testing.assert_close(S @ S.T, damped.inverse(), **TOLERANCE)


def test_default_of_the_operator_warns() -> None:
    model = nn.Linear(2**14 + 1, 1, bias=False)
    data = [(torch.randn(2, 2**14 + 1), torch.randn(2, 1))]
    with pytest.warns(UserWarning, match="KroneckerGGN: of Kronecker factors with more than 16384"):
        K = KroneckerGGN(model, nn.MSELoss(), data)
    assert [f.dim() for f in K.factors[0]] == [2, 1]
    expected = 2 * data[0][0].square().mean(0)
    torch.testing.assert_close(K.diagonal(), expected)


def test_batch_averages_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, y = of_linear()
    monkeypatch.setattr(approximations, "MAX_FACTOR_SIZE", 2)  # as if the factors were large
    for most in (2, None):
        K = KroneckerGGN(model, nn.MSELoss(), [(X, y)], method="KFRA", max_factor_size=most)
        assert all(f.dim() == 2 for block in K.factors for f in block)
    with pytest.raises(TypeError, match="max_factor_size"):
        extensions.KFRA(max_factor_size=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="There is no max_factor_size=3"):
        KroneckerGGN(model, nn.MSELoss(), [(X, y)], method="KFRA", max_factor_size=3)


def test_factors_that_are_neither() -> None:
    with pytest.raises(ValueError, match=r"or diagonals of some, got shapes \[\[\[2, 3\]\]\]"):
        KroneckerOperator([[torch.ones(2, 3)]])
    with pytest.raises(ValueError, match="got shapes"):
        KroneckerOperator([[torch.ones(2, 2, 2)]])


def test_blocks_that_are_no_lists() -> None:
    """Of a generator, and stacked factors of one size; one matrix would be read as diagonals."""
    A, B = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    whole = torch.block_diag(torch.kron(A, B), A)
    assert torch.equal(KroneckerOperator(block for block in [[A, B], [A]]).to_dense(), whole)
    assert torch.equal(KroneckerOperator([torch.stack([A, B]), [A]]).to_dense(), whole)
    with pytest.raises(ValueError, match="got a tensor of shape"):
        KroneckerOperator(block for block in [A, B])

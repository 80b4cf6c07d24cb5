"""Subsampling, conversion of vectors, and the helpers of the examples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from backpack.utils import examples
from backpack.utils.convert_parameters import vector_to_parameter_list
from backpack.utils.examples import autograd_diag_ggn_exact, load_mnist_dataset
from backpack.utils.subsampling import subsample

# subsample


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_subsample_list(dim: int, kind: Callable[[list[int]], Any]) -> None:
    tensor = torch.rand(3, 4, 5)
    size = tensor.shape[dim]
    result = subsample(tensor, dim, kind([2, 0, 2, -1, -size]))
    expected = [tensor.select(dim, i).clone() for i in (2, 0, 2, size - 1, 0)]
    torch.testing.assert_close(result, torch.stack(expected, dim=dim))
    result.zero_()
    assert tensor.max() > 0


@settings(deadline=None, max_examples=50)
@given(st.integers(-3, 2), st.integers(-6, 6) | st.none(), st.integers(-6, 6), st.integers(1, 3))
def test_subsample_slice(dim: int, start: int | None, stop: int, step: int) -> None:
    tensor = torch.arange(60).reshape(3, 4, 5)
    result = subsample(tensor, dim, slice(start, stop, step))
    expected = tensor.movedim(dim, 0)[start:stop:step].movedim(0, dim)
    assert result.shape == expected.shape
    assert torch.equal(result, expected)
    assert result._base is tensor._base


def test_subsample_none_and_gradient() -> None:
    tensor = torch.rand(3, 4, requires_grad=True)
    assert subsample(tensor) is tensor
    subsample(tensor, 1, [1, 1, 3]).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad[0].tolist() == [0, 2, 0, 1]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 4], r"out of range.*\[0, 4\] for axis 1 of length 4"),
        ([-5], r"out of range.*\[-5\] for axis 1 of length 4"),
        ([], r"at least one.*\[\] for axis 1 of length 4"),
        ([0.0], r"integer.*\[0\.0\] for axis 1 of length 4"),
        ([True, False], r"integer.*\[True, False\] for axis 1 of length 4"),
        (torch.tensor([True] * 4), r"integer.*for axis 1 of length 4"),
        (["0"], r"integer.*\['0'\] for axis 1 of length 4"),
        (1, "integer.*1 for axis 1 of length 4"),
    ],
)
def test_subsample_errors(indices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        subsample(torch.rand(3, 4), 1, indices)


# vector_to_parameter_list


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(1, 3), max_size=3), max_size=4), st.booleans())
def test_vector_to_parameter_list(shapes: list[list[int]], strided: bool) -> None:
    parameters = [torch.rand(shape) for shape in shapes]
    num = sum(p.numel() for p in parameters)
    vec = torch.arange(2.0 * num)[::2] if strided else torch.arange(1.0 * num)
    pieces = vector_to_parameter_list(vec, iter(parameters))

    assert [piece.shape for piece in pieces] == [p.shape for p in parameters]
    assert [e for piece in pieces for e in piece.flatten().tolist()] == vec.tolist()
    for piece in pieces:
        piece.fill_(-1.0)
    assert (vec == -1.0).all()


def test_vector_to_parameter_list_errors() -> None:
    parameters = nn.Linear(3, 2).parameters()
    with pytest.raises(TypeError, match="list"):
        vector_to_parameter_list([1.0] * 8, parameters)  # type: ignore[arg-type]
    for shape in [(7,), (9,), (8, 1), ()]:
        with pytest.raises(ValueError, match=r"shape \(.*\).* 8 entries"):
            vector_to_parameter_list(torch.rand(shape), nn.Linear(3, 2).parameters())


# autograd_diag_ggn_exact


class MeanOverSamples(nn.Module):
    """Subtracts the batch mean, so that every output depends on every sample."""

    def forward(self, x: Tensor) -> Tensor:
        """Center the input."""
        return x - x.mean(0)


def mse_of_batch_mean(output: Tensor, y: Tensor) -> Tensor:
    """Return a loss whose Hessian has blocks off the diagonal of the samples."""
    return (output.mean(0) - y.mean(0)).pow(4).sum() + output.sin().sum()


def linear_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return a loss without curvature."""
    return (output * y).sum()


def problem(name: str) -> tuple[Tensor, Tensor, nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """Return input, labels, model, and loss function."""
    torch.manual_seed(0)
    X = torch.rand(3, 4)
    labels, targets = torch.tensor([1, 0, 2]), torch.rand(3, 3)
    first, last = nn.Linear(4, 2), nn.Linear(2, 3)
    if name == "cross-entropy":
        return X, labels, nn.Sequential(first, nn.Tanh(), last), nn.CrossEntropyLoss()
    if name == "frozen":
        first.weight.requires_grad_(False)
        return X, labels, nn.Sequential(first, nn.Tanh(), last), nn.CrossEntropyLoss()
    if name == "mixing":
        model = nn.Sequential(first, nn.Tanh(), MeanOverSamples(), last)
        return X, targets, model, mse_of_batch_mean
    if name == "extra-axes":
        model = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Sigmoid())
        return X, torch.randint(3, (3, 3)), model, nn.CrossEntropyLoss()
    if name == "linear-loss":
        return X, targets, nn.Sequential(first, nn.Tanh(), last), linear_loss
    model = nn.Sequential(first, nn.Tanh(), last)
    model.register_parameter("unused", nn.Parameter(torch.rand(2)))
    return X, targets, model, nn.MSELoss(reduction="sum")


def dense_ggn_diagonal(
    X: Tensor, y: Tensor, model: nn.Module, loss_function: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the diagonal of ``Jᵀ H J`` with dense matrices."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def evaluate(*params: Tensor) -> Tensor:
        arguments = dict(zip(trainable, params, strict=True))
        return torch.func.functional_call(model, arguments, (X,))

    params = tuple(trainable.values())
    output = evaluate(*params).detach()
    jacobians = torch.autograd.functional.jacobian(evaluate, params)
    J = torch.cat([jac.reshape(output.numel(), -1) for jac in jacobians], dim=1)
    H = torch.autograd.functional.hessian(lambda out: loss_function(out, y), output)
    assert isinstance(H, Tensor)
    return (J.T @ H.reshape(len(J), len(J)) @ J).diag()


PROBLEMS = ["cross-entropy", "frozen", "mixing", "extra-axes", "linear-loss", "unused"]


@pytest.fixture
def float64() -> Any:
    """Make float64 the default."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("idx", [None, [3, 0, -1], [5] * 100])
def test_autograd_diag_ggn_exact(name: str, idx: Sequence[int] | None) -> None:
    X, y, model, loss_function = problem(name)
    expected = dense_ggn_diagonal(X, y, model, loss_function)
    if name != "linear-loss":
        assert expected.abs().max() > 0
    result = autograd_diag_ggn_exact(X, y, model, loss_function, idx=idx)
    torch.testing.assert_close(result, expected if idx is None else expected[idx])
    assert not result.requires_grad


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", PROBLEMS)
def test_both_ways_to_the_diagonal_agree(name: str) -> None:
    X, y, model, loss_function = problem(name)
    params = [p for p in model.parameters() if p.requires_grad]
    output = model(X)
    loss = loss_function(output, y)
    by_rows = examples._diag_ggn_by_rows(loss, output, params)
    entries = torch.arange(len(by_rows))
    torch.testing.assert_close(
        examples._diag_ggn_by_columns(loss, output, params, entries), by_rows
    )


def test_autograd_diag_ggn_exact_errors() -> None:
    X, y, model, _ = problem("cross-entropy")
    with pytest.raises(ValueError, match=r"\[0, 19\] for axis 0 of length 19"):
        autograd_diag_ggn_exact(X, y, model, nn.CrossEntropyLoss(), idx=[0, 19])
    with pytest.raises(ValueError, match=r"scalar, got shape \(3,\)"):
        autograd_diag_ggn_exact(X, y, model, nn.CrossEntropyLoss(reduction="none"))


# MNIST


def test_mnist_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="pip install torchvision"):
        load_mnist_dataset()


def test_load_one_batch_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(10, 1, 28, 28)
    dataset = torch.utils.data.TensorDataset(images, torch.arange(10))
    monkeypatch.setattr(examples, "load_mnist_dataset", lambda: dataset)

    X, y = examples.load_one_batch_mnist(batch_size=4, shuffle=False)
    assert torch.equal(X, images[:4])
    assert y.tolist() == [0, 1, 2, 3]
    X, y = examples.load_one_batch_mnist(batch_size=10, flat=True)
    assert torch.equal(X, images[y].reshape(10, 784))
    assert sorted(y.tolist()) == list(range(10))

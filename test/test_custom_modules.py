"""Modules for functions: values, gradients, representation, errors."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Return a random float64 tensor that depends on the shape and the seed only."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


X = rand(2, 3, 4, 5)
CASES = [
    (ScaleModule(), X, "weight=1.0"),
    (ScaleModule(weight=-2.5), -2.5 * X, "weight=-2.5"),
    (ScaleModule(3), 3 * X, "weight=3"),
    (Permute(0, 3, 1, 2), torch.einsum("abcd->adbc", X), "0, 3, 1, 2"),
    (Permute(0, -1, 1, -2), torch.einsum("abcd->adbc", X), "0, -1, 1, -2"),
    (Permute(1, 3, init_transpose=True), X.transpose(1, 3), "1, 3, init_transpose=True"),
    (Permute(-1, 1, init_transpose=True), X.transpose(1, 3), "-1, 1, init_transpose=True"),
    (Permute(2, -2, init_transpose=True), X, "2, -2, init_transpose=True"),
    (Pad((1, 2)), F.pad(X, (1, 2)), "pad=(1, 2), mode='constant', value=0.0"),
    (Pad([1, 2, -1, 0], value=3.0), F.pad(X, (1, 2, -1, 0), value=3.0), "(1, 2, -1, 0)"),
    (Pad((1, 2, 0, 1), mode="reflect"), F.pad(X, (1, 2, 0, 1), mode="reflect"), "'reflect'"),
    (Slicing((slice(None), 1)), X[:, 1], "(slice(None, None, None), 1)"),
    (Slicing((Ellipsis, slice(0, 3, 2), None)), X[..., 0:3:2, None], "slice(0, 3, 2), None"),
    (Slicing(slice(1)), X[:1], "(slice(None, 1, None),)"),
    (SumModule(), X, ""),
    (Parallel(nn.Identity(), ScaleModule(2.0), ScaleModule(3.0)), 6 * X, "(branch2): Scale"),
]


@pytest.mark.parametrize(("module", "expected", "representation"), CASES)
def test_value_and_representation(module: nn.Module, expected: Tensor, representation: str) -> None:
    torch.testing.assert_close(module(X), expected)
    assert representation in repr(module)
    assert not list(module.parameters())


@pytest.mark.parametrize(("module", "expected", "_"), CASES)
def test_copies(module: nn.Module, expected: Tensor, _: str) -> None:
    torch.testing.assert_close(copy.deepcopy(module)(X), expected)
    torch.testing.assert_close(pickle.load(io.BytesIO(pickle.dumps(module)))(X), expected)


@pytest.mark.parametrize(("module", "_expected", "_"), CASES)
def test_gradients(module: nn.Module, _expected: Tensor, _: str) -> None:
    x = X[:, :, :3, :3].clone().requires_grad_()
    assert torch.autograd.gradcheck(module, x, fast_mode=True)


def test_sum_of_several() -> None:
    a, b, c = (rand(2, 3, seed=i) for i in range(3))
    before = a.clone()
    torch.testing.assert_close(SumModule()(a, b, c), torch.stack([a, b, c]).sum(0))
    assert torch.equal(a, before)
    with pytest.raises(ValueError, match="at least one input"):
        SumModule()()


class Concatenate(nn.Module):
    """Concatenates the branches' outputs."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Concatenate along the features."""
        return torch.cat(inputs, dim=1)


def test_parallel() -> None:
    linear, tanh = nn.Linear(3, 2).double(), nn.Tanh()
    x = rand(4, 3)

    parallel = Parallel(linear, tanh, merge_module=Concatenate())
    torch.testing.assert_close(parallel(x), torch.cat([linear(x), x.tanh()], dim=1))
    assert [name for name, _ in parallel.named_children()] == ["branch0", "branch1", "merge"]
    assert set(parallel.state_dict()) == {"branch0.weight", "branch0.bias"}

    assert isinstance(Parallel(tanh).get_submodule("merge"), SumModule)
    torch.testing.assert_close(Parallel(tanh, tanh)(x), 2 * x.tanh())
    with pytest.raises(ValueError, match="at least one branch"):
        Parallel(merge_module=Concatenate())


def test_parallel_runs_a_replaced_child() -> None:
    parallel = Parallel(nn.Identity(), nn.Identity())
    parallel.branch1 = ScaleModule(4.0)
    torch.testing.assert_close(parallel(X), 5 * X)


def test_reduce_tuple() -> None:
    nested: Any = (X, (2 * X, 3 * X))
    assert ReduceTuple()(nested) is X
    assert ReduceTuple(index=-1)(nested) is nested[1]
    assert ReduceTuple(1)(ReduceTuple(1)(nested)) is nested[1][1]
    assert repr(ReduceTuple(1)) == "ReduceTuple(index=1)"
    with pytest.raises(IndexError):
        ReduceTuple(2)(nested)


def test_transpose_is_resolved_for_every_input() -> None:
    module = Permute(1, -1, init_transpose=True)
    for ndim in (2, 3, 4, 5):
        x = rand(*range(2, 2 + ndim))
        torch.testing.assert_close(module(x), x.transpose(1, -1))
        assert module.permutation(ndim)[1] == ndim - 1
    assert Permute(-1, 0, -2).permutation(3) == (2, 0, 1)


@pytest.mark.parametrize(
    "module",
    [
        Permute(0, 1),
        Permute(0, 1, 3),
        Permute(0, 1, 1),
        Permute(0, 1, -4),
        Permute(1, 3, init_transpose=True),
        Permute(-4, 1, init_transpose=True),
    ],
)
def test_permute_errors(module: Permute) -> None:
    with pytest.raises(ValueError, match=r"Permute\(.*\) does not fit an input with 3 axes"):
        module(rand(2, 3, 4))


def test_constructor_errors() -> None:
    with pytest.raises(ValueError, match=r"one by one, as integers, got \(\(0, 2, 1\),\)"):
        Permute((0, 2, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"two axes, got dims \(0, 1, 2\)"):
        Permute(0, 1, 2, init_transpose=True)
    for weight in (torch.ones(1), nn.Parameter(torch.tensor(2.0)), "2"):
        with pytest.raises(ValueError, match="must be a number, got"):
            ScaleModule(weight)  # type: ignore[arg-type]

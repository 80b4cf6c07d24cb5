"""Results in less memory: of another precision, and moved away as soon as they are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, clear, extend, extensions, results
from backpack.core.engine.results import has_other_gradient, saved

N = 6


def chain() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model = extend(nn.Sequential(*layers, nn.Linear(4, 3)))
    return model, extend(nn.CrossEntropyLoss()), torch.randn(N, 4), torch.arange(N) % 3


EXTENSIONS: dict[str, Any] = {
    "grad_batch": extensions.BatchGrad,
    "sqrt_ggn_exact": extensions.SqrtGGNExact,
    "sqrt_ggn_mc": extensions.SqrtGGNMC,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", EXTENSIONS)
def test_precision_of_results(name: str, dtype: torch.dtype) -> None:
    """They are those of the parameter's precision, rounded once."""
    model, lossfunc, X, y = chain()
    found = []
    for options in ({}, {"dtype": dtype}):
        torch.manual_seed(1)
        with backpack(EXTENSIONS[name](**options)):
            lossfunc(model(X), y).backward()
        found.append([getattr(p, name) for p in model.parameters()])
    for usual, rounded in zip(*found, strict=True):
        assert usual.dtype == torch.float32
        assert rounded.dtype == dtype
        assert torch.equal(rounded, usual.to(dtype))
        assert rounded.untyped_storage().nbytes() == rounded.numel() * dtype.itemsize


@pytest.mark.parametrize("name", EXTENSIONS)
def test_precisions_that_are_none(name: str) -> None:
    make = EXTENSIONS[name]
    with pytest.raises(TypeError, match=r"such as torch\.bfloat16, or None, got 'bfloat16'"):
        make(dtype="bfloat16")
    with pytest.raises(ValueError, match=r"got torch\.int8"):
        make(dtype=torch.int8)
    with pytest.raises(ValueError, match=r"Leave out dtype=torch\.bfloat16"):
        make(dtype=torch.bfloat16, factored=True)


def test_sums_over_passes_are_rounded_once() -> None:
    """What accumulates keeps its precision."""
    model, lossfunc, X, y = chain()
    with backpack(extensions.BatchGrad(dtype=torch.bfloat16), accumulate=True):
        for part in (slice(0, 2), slice(2, N)):
            lossfunc(model(X[part]), y[part]).backward()
    rounded = [p.grad_batch for p in model.parameters()]
    clear(model)
    with backpack(extensions.BatchGrad(), accumulate=True):
        for part in (slice(0, 2), slice(2, N)):
            lossfunc(model(X[part]), y[part]).backward()
    for p, one in zip(model.parameters(), rounded, strict=True):
        assert torch.equal(one, p.grad_batch.bfloat16())


def present(model: nn.Module) -> int:
    """Count the parameters whose results are on the device of the model."""
    return sum(any(not v.is_meta for v in saved(p).values()) for p in model.parameters())


def test_results_move_away_one_by_one() -> None:
    """The meta device stands for another one: what moves there leaves no memory behind."""
    model, lossfunc, X, y = chain()
    counts: dict[str, list[int]] = {"kept": [], "moved": []}
    for name, move in (("kept", lambda module: None), ("moved", results.MoveResults("meta"))):

        def hook(module: nn.Module, name: str = name, move: Any = move) -> None:
            counts[name].append(present(model))
            move(module)

        clear(model)
        with backpack(extensions.BatchGrad(), extension_hook=hook):
            lossfunc(model(X), y).backward()
    assert max(counts["kept"]) == len(list(model.parameters())) == 12
    assert max(counts["moved"]) == 2  # a weight and its bias
    for p in model.parameters():
        assert p.grad_batch.is_meta
        assert p.grad_batch.shape == (N, *p.shape)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_results_of_every_kind_move(device: str) -> None:
    """Lists of factors, eigenvectors, what functions read; functions stay."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(x + self.table))

    model, lossfunc = extend(Positions(), use_converter="record"), extend(nn.CrossEntropyLoss())
    X, y = torch.randn(N, 4), torch.arange(N) % 3
    e = extensions
    exts = (e.BatchGrad(), e.KFLR(), e.EKFAC(fisher="exact"), e.GGNMP(), e.DiagGGNExact())

    def values(**options: Any) -> list[dict[str, Any]]:
        with backpack(*exts, **options):
            lossfunc(model(X), y).backward()
        return [dict(saved(p)) for p in model.parameters()]

    usual, moved = values(), values(extension_hook=results.MoveResults(device))
    assert len(usual) == 3
    for before, after in zip(usual, moved, strict=True):
        assert before.keys() == after.keys() == {ext.savefield for ext in exts}
        kron = after["ekfac"]
        tensors = [after["grad_batch"], *after["kflr"], *kron.bases, kron.eigenvalues]
        assert {x.device.type for x in tensors} == {device}
        assert callable(after["ggnmp"])
        if device == "cpu":
            torch.testing.assert_close(after["kflr"], before["kflr"])
            torch.testing.assert_close(kron.dense(), before["ekfac"].dense())


def test_what_belongs_to_a_result_moves_with_it() -> None:
    """Whether samples were mixed, and which gradient it belongs to."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    lossfunc, X, y = extend(nn.MSELoss()), torch.rand(5, 3), torch.rand(5, 2)
    marks = []
    for hook in (None, results.MoveResults("meta")):
        with (
            pytest.warns(UserWarning, match="mixes the samples"),
            backpack(extensions.BatchL2Grad(), extension_hook=hook),
        ):
            lossfunc(model(X), y).backward()
        p = model[0].weight
        marks.append((vars(p.batch_l2), has_other_gradient(p, "batch_l2")))
        p.grad = torch.zeros_like(p)
        marks.append(has_other_gradient(p, "batch_l2"))
        model.zero_grad()
    assert marks[0] == marks[2] and marks[1] is marks[3] is True


def test_an_error_takes_back_what_was_moved() -> None:
    model, lossfunc, X, y = chain()
    move, seen = results.MoveResults("meta"), []

    def fails(module: nn.Module) -> None:
        move(module)
        for p in module.parameters(recurse=False):
            seen.extend(value.device.type for value in saved(p).values())
        if module is model[0]:
            raise RuntimeError("no space left")

    with (
        backpack(extensions.BatchGrad(), extension_hook=fails),
        pytest.raises(RuntimeError, match="no space left"),
    ):
        lossfunc(model(X), y).backward()
    assert set(seen) == {"meta"}
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())

"""SOAP: every step against its formula with dense matrices, and what ``torch.optim`` promises."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_several_processes import in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from backpack import backpack
from backpack.distributed.shards import whole
from backpack.optim import SOAP
from backpack.utils.kroneckers import kfacs_to_mat

SHAPES = [(3, 4), (5,), (2, 3, 4), (1, 4), ()]


def gradients(shape: tuple[int, ...], count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *shape, dtype=torch.float64, generator=generator)


def take(p: nn.Parameter, optimiser: SOAP, grads: Tensor) -> None:
    for grad in grads:
        p.grad = grad.clone()
        optimiser.step()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("longest", [2048, 3])
def test_steps(shape: tuple[int, ...], longest: int) -> None:
    """Five gradients, with Kronecker products of all axes; the first is no step if one rotates."""
    lr, (beta1, beta2), eps, decay = 0.1, (0.8, 0.6), 1e-3, 0.02
    start, grads = gradients(shape, 1)[0], gradients(shape, 6)[1:]
    p = nn.Parameter(start.clone())
    optimiser = SOAP([p], lr, (beta1, beta2), eps, decay, bases_every=2, longest_axis=longest)
    take(p, optimiser, grads)

    sizes = [*shape] or [1]
    theta = start.flatten()
    eyes = [torch.eye(size).double() for size in sizes]
    factors, bases = [0 * eye for eye in eyes], eyes
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    rotates = any(1 < size <= longest and max(sizes) < start.numel() for size in sizes)
    for t, grad in enumerate(grads, 1):
        for k, size in enumerate(sizes):
            unfolded = grad.reshape(sizes).movedim(k, 0).reshape(size, -1)
            factors[k] = beta2 * factors[k] + (1 - beta2) * unfolded @ unfolded.T
            if not 1 < size <= longest or max(sizes) == grad.numel():
                continue
            if t == 1:
                bases[k] = torch.linalg.eigh(factors[k]).eigenvectors.flip(-1)
            elif t in (3, 5):
                bases[k] = torch.linalg.qr(factors[k] @ bases[k]).Q  # signs do not matter
        if rotates and t == 1:
            continue
        s = t - rotates
        Q = kfacs_to_mat(bases)
        m = beta1 * m + (1 - beta1) * grad.flatten()
        v = beta2 * v + (1 - beta2) * (Q.T @ grad.flatten()).square()
        root = (v / (1 - beta2**s)).sqrt() + eps
        theta = theta - lr * (Q @ ((Q.T @ m) / (1 - beta1**s) / root) + decay * theta)
    assert_close(p.detach().flatten(), theta)


def test_without_rotations_it_is_adam() -> None:
    grads = gradients((3, 4), 5)
    p, q = (nn.Parameter(torch.ones(3, 4).double()) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.9), "weight_decay": 0.1}
    take(p, SOAP([p], **options, longest_axis=0), grads)
    take(q, torch.optim.AdamW([q], **options), grads)  # type: ignore[arg-type]
    assert_close(p, q)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_state_dict_continues_identically(dtype: torch.dtype) -> None:
    """The state has a better precision than the parameter may have."""
    grads = gradients((3, 4), 8).to(dtype)
    p = nn.Parameter(torch.ones(3, 4, dtype=dtype))
    optimiser = SOAP([p], bases_every=3)
    take(p, optimiser, grads[:4])
    q = nn.Parameter(p.detach().clone())
    other = SOAP([q])
    other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    take(p, optimiser, grads[4:])
    take(q, other, grads[4:])
    assert_close(p, q, rtol=0, atol=0)


def test_it_trains_with_a_closure() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    X, y = torch.randn(30, 4), torch.randint(3, (30,))
    optimiser = SOAP(model.parameters(), lr=0.05)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(X), y)
        loss.backward()
        return loss

    first = float(optimiser.step(closure).detach())
    for _ in range(80):
        last = float(optimiser.step(closure).detach())
    assert last < 0.3 * first


def test_one_loop_for_all_optimisers() -> None:
    """``with backpack(*optimiser.extensions)`` does nothing, on a plain model as well."""
    model = nn.Linear(4, 3)
    before = copy.deepcopy(model)
    optimiser = SOAP(model.parameters())
    assert optimiser.extensions == ()
    for _ in range(2):  # the first gradient gives the first bases, and no step
        loss = model(torch.rand(5, 4)).square().sum()
        with warnings.catch_warnings(), backpack(*optimiser.extensions):
            warnings.simplefilter("error")
            loss.backward()
        optimiser.step()
    assert not torch.equal(model.weight, before.weight)


def test_low_precision_and_what_has_no_gradient() -> None:
    p, q = (nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16)) for _ in range(2))
    optimiser = SOAP([p, q], lr=0.1, bases_every=1)
    take(p, optimiser, gradients((3, 4), 3).bfloat16())
    assert p.isfinite().all() and not torch.equal(p, q)
    assert torch.equal(q, torch.ones_like(q))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr has to be at least 0"),
        ({"bases_every": 0}, "bases_every has to be at least 1"),
        ({"betas": (0.9, 1.0)}, "betas have to be"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SOAP([nn.Parameter(torch.ones(2))], **options)


def test_sparse_gradients_are_an_error() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients"):
        SOAP([p]).step()


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_a_refused_step_changes_nothing(kind: str) -> None:
    """The parameters before the refused one took the step, and took it again in the next."""
    first, last = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))
    if kind == "complex":
        last = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    first.grad, last.grad = torch.ones(3), torch.ones_like(last)
    if kind == "sparse":
        last.grad = last.grad.to_sparse()
    optimiser = SOAP([first, last])
    with pytest.raises(RuntimeError, match=kind):
        optimiser.step()
    assert_close(first.detach(), torch.ones(3))
    assert not optimiser.state


@pytest.mark.parametrize("shape", [(3, 4), (2, 2), (40, 50), (5,)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_after_a_first_gradient_that_is_not_finite(shape: tuple[int, ...], value: float) -> None:
    """The step after the error was a KeyError, with averages of that gradient."""
    start, grads = gradients(shape, 1)[0], gradients(shape, 4)[1:]
    p, expected = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimiser = SOAP([p])
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        take(p, optimiser, grads[:1] * value)
    take(p, optimiser, grads)
    take(expected, SOAP([expected]), grads)
    assert_close(p, expected)


def test_a_first_gradient_whose_square_is_not_finite() -> None:
    """Its eigenvectors were NaN, or an error that left averages of it, by its size."""
    for shape in ((2, 2), (3, 4), (40, 50)):
        parameter = nn.Parameter(torch.ones(shape))
        optimiser = SOAP([parameter])
        parameter.grad = torch.full(shape, torch.finfo(parameter.dtype).max / 4)
        with pytest.raises(torch.linalg.LinAlgError, match="or its square, is not finite"):
            optimiser.step()
        assert parameter.eq(1).all() and not optimiser.state[parameter]


def test_complex_parameters_are_an_error() -> None:
    p = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"needs real parameters, that of \[3, 2\] is complex"):
        SOAP([p]).step()


@pytest.mark.parametrize("rank", [1, 10])
def test_steps_stay_where_the_gradients_are(rank: int) -> None:
    """Eigenvectors that follow the factors keep their places among the second moments."""
    generator = torch.Generator().manual_seed(0)
    shape = 10, 20
    left, right = (torch.randn(n, rank, dtype=torch.float64, generator=generator) for n in shape)
    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimiser = SOAP([p], lr=1.0)
    for _ in range(25):
        weights = torch.rand(rank, dtype=torch.float64, generator=generator) + 0.5
        before = p.detach().clone()
        take(p, optimiser, (left * weights @ right.T)[None])
        step = p.detach() - before
        assert step.norm() < 1.5 * (rank * rank) ** 0.5  # as in Adam, entries in the basis are ±1
        outside = step - left @ torch.linalg.pinv(left) @ step
        assert rank == 10 or outside.norm() < 1e-4


def test_half_precision() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(4, 3).half())
    optimiser = SOAP([p], lr=1e-2)
    for _ in range(5):
        take(p, optimiser, (2 * p.detach())[None])
    assert p.dtype == torch.float16 and p.isfinite().all()


def _sharded(rank: int, count: int) -> None:
    """Steps of one process, whether the number of processes divides the first axis or not.

    Factors have at most one eigenvalue that is zero: the others would turn as rounding has it.
    """
    torch.manual_seed(0)
    X, y = torch.randn(5, 24, 4), torch.randn(5, 24, 6)
    own = torch.arange(24).chunk(count)[rank]
    for width in (3, 4, 5):
        for longest in (2048, 4):
            found = []
            for wrap, some in ((False, slice(None)), (True, own)):
                torch.manual_seed(1)
                layers = nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width + 1)
                model: nn.Module = nn.Sequential(*layers)
                if wrap:
                    model = fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
                optimiser = SOAP(
                    model.parameters(), 0.1, eps=1e-3, bases_every=2, longest_axis=longest
                )
                for inputs, targets in zip(X, y, strict=True):
                    optimiser.zero_grad()
                    output = model(inputs[some])
                    nn.functional.mse_loss(output, targets[some, : width + 1]).backward()
                    optimiser.step()
                found.append([whole(p.detach()) for p in model.parameters()])
                for p, state in optimiser.state.items() if wrap else ():
                    assert state["average"].to_local().shape == p.to_local().shape
                    assert state["squares"].to_local().shape == p.to_local().shape
            assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("count", [2, 4])
def test_sharded_parameters(tmp_path: Path, count: int) -> None:
    in_processes(_sharded, tmp_path, count)

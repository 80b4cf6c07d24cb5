"""What the library keeps: results by name, nothing in files, nothing for models that are gone."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.multiprocessing
from apart import run
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from backpack import CTX, backpack, clear, extend, quantities
from backpack.extensions import GGNMP, KFAC, BatchGrad, DiagGGNExact, Variance


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))


def backward(model: nn.Module, *exts: Any) -> None:
    X, y = torch.rand(6, 1, 6, 6), torch.randint(4, (6,))
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(*exts):
        loss.backward()


def saved(what: Any) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


# ------------------------------------------------------------------ quantities and clear


def test_quantities_of_one_name() -> None:
    model = extend(network())
    backward(model, BatchGrad(), DiagGGNExact())
    for name in ("grad_batch", "diag_ggn_exact"):
        found = quantities(model, name)
        assert list(found) == [key for key, _ in model.named_parameters()]
        for key, p in model.named_parameters():
            assert torch.equal(found[key], getattr(p, name))


def test_quantities_of_several_names() -> None:
    model = extend(network())
    backward(model, BatchGrad(), KFAC(), Variance(), GGNMP())
    names = ["0.weight", "0.bias", "3.weight", "3.bias"]
    factors = {"0.weight": 2, "0.bias": 1, "3.weight": 2, "3.bias": 1}
    numbered = {name: range(count) for name, count in factors.items()}
    assert list(quantities(model, "kfac")) == [f"{n}.{i}" for n in names for i in numbered[n]]
    both = quantities(model, "variance", "kfac")
    expected = {f"{n}.variance" for n in names} | {
        f"{n}.kfac.{i}" for n in names for i in numbered[n]
    }
    assert set(both) == expected
    assert set(quantities(model)) == expected | {f"{n}.grad_batch" for n in names}
    assert quantities(model, "ggnmp") == {}
    assert torch.equal(both["0.weight.kfac.1"], model[0].weight.kfac[1])


def test_quantities_are_ready_for_a_file() -> None:
    model = extend(network())
    X, y = torch.rand(6, 1, 6, 6), torch.randint(4, (6,))
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(BatchGrad(), Variance(), KFAC()):
        loss.backward(create_graph=True)
    model[3].weight.variance = model[3].weight.variance.T.contiguous().T
    found = quantities(model)
    assert all(t.is_contiguous() and not t.requires_grad for t in found.values())
    again = load(save(found))
    assert again.keys() == found.keys()
    assert all(torch.equal(again[key], t) for key, t in found.items())
    assert model[3].weight.grad_batch.requires_grad


def test_quantities_of_frozen_and_tied_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight, model[0].bias.requires_grad = model[0].weight, False  # type: ignore[union-attr, assignment]
    extend(model)
    loss = extend(nn.MSELoss())(model(torch.rand(4, 3)), torch.rand(4, 3))
    with backpack(DiagGGNExact()):
        loss.backward()
    assert list(quantities(model, "diag_ggn_exact")) == ["0.weight", "2.bias", "3.weight", "3.bias"]


def test_a_name_that_nobody_has() -> None:
    model = extend(network())
    assert quantities(model) == {}
    with pytest.raises(ValueError, match=r"grad_batch.*none"):
        quantities(model, "grad_batch")
    backward(model, BatchGrad())
    with pytest.raises(ValueError, match=r"Sequential.*grad_bach.*there are grad_batch"):
        quantities(model, "grad_bach")
    with pytest.raises(ValueError, match="give savefields, such as 'grad_batch'"):
        quantities(model, BatchGrad())  # type: ignore[arg-type]


def test_clear_removes_results_and_nothing_else() -> None:
    model = extend(network())
    for p in model.parameters():
        p.note = "mine"  # type: ignore[attr-defined]
    backward(model, BatchGrad(), KFAC(), GGNMP())
    grads = [p.grad for p in model.parameters()]
    clear(model)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert vars(p) == {"note": "mine"} and p.grad is grad
    assert quantities(model) == {}
    clear(model)
    backward(model, BatchGrad())
    assert all(set(vars(p)) == {"note", "grad_batch"} for p in model.parameters())


def test_results_are_plain_attributes() -> None:
    model = extend(network())
    backward(model, BatchGrad(), Variance())
    p: Any = model[0].weight
    assert type(p.grad_batch) is torch.Tensor and vars(p)["variance"] is p.variance
    del p.grad_batch
    assert not hasattr(p, "grad_batch") and set(quantities(model[0])) == {
        *("weight.variance", "bias.variance", "bias.grad_batch"),
    }
    p.variance = torch.zeros(2)
    assert torch.equal(quantities(model[0], "variance")["weight"], torch.zeros(2))


# ------------------------------------------------------------------ files and copies


@pytest.mark.parametrize("dump", [saved, pickle.dumps], ids=["torch.save", "pickle"])
def test_saved_models_leave_results_out(dump: Any) -> None:
    model: Any = extend(network())
    model[0].weight.note = "mine"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = len(dump((model, optimizer)))
    backward(model, BatchGrad(), KFAC(), DiagGGNExact())
    after = dump((model, optimizer))
    assert len(after) < before + 1000  # results have 50,000 bytes
    load_it = pickle.loads if dump is pickle.dumps else _torch_load
    again, its_optimizer = load_it(after)
    assert vars(again[0].weight) == {"note": "mine"}
    assert not any(vars(p) for p in list(again.parameters())[1:])
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q) and hasattr(p, "grad_batch")
    assert its_optimizer.param_groups[0]["params"][0] is again[0].weight
    backward(again, BatchGrad())
    assert again[0].weight.grad_batch.shape == (6, 3, 1, 3, 3)


def _torch_load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def test_saved_parameters_and_results() -> None:
    model: Any = extend(network())
    backward(model, BatchGrad())
    p = model[0].weight
    q = torch.load(io.BytesIO(saved(p)))
    assert type(q) is nn.Parameter and torch.equal(p, q) and not vars(q)
    assert torch.equal(torch.load(io.BytesIO(saved(p.grad_batch))), p.grad_batch)


def test_copies_are_what_torch_makes_them() -> None:
    plain, model = network(), extend(network())
    backward(model, BatchGrad())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        q.grad_batch = p.grad_batch  # type: ignore[attr-defined]
        for make in (copy.deepcopy, copy.copy):
            assert vars(make(p)).keys() == vars(make(q)).keys()
    assert not any(vars(p) for p in copy.deepcopy(model).parameters())


def test_parameters_can_be_swapped() -> None:
    p, q = (extend(nn.Linear(3, 2)) for _ in range(2))
    loss = extend(nn.MSELoss())(p(torch.rand(4, 3)), torch.rand(4, 2))
    with backpack(BatchGrad()):
        loss.backward()
    del loss
    result = p.weight.grad_batch
    torch.utils.swap_tensors(p.weight, q.weight)
    assert q.weight.grad_batch is result and list(quantities(q)) == ["weight.grad_batch"]
    assert not vars(p.weight)


# ------------------------------------------------------------------ other processes


def _receive(queue: Any, answers: Any) -> None:
    """Keep what is sent, and say what is in it each time that somebody asks."""
    tensor = queue.get()
    answers.put(float(tensor.sum()))
    while queue.get():
        answers.put(float(tensor.sum()))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sorted(torch.multiprocessing.get_all_sharing_strategies()))
def test_results_in_another_process_stay_what_they_are(strategy: str) -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    context = torch.multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=_receive, args=(queue, answers), daemon=True)
    process.start()
    try:
        model, loss_function = extend(nn.Linear(1024, 8)), extend(nn.MSELoss())

        def step() -> None:
            loss = loss_function(model(torch.rand(256, 1024)), torch.rand(256, 8))
            with backpack(BatchGrad()):
                loss.backward()

        step()
        queue.put(model.weight.grad_batch)  # of 8 MiB
        sent = answers.get(timeout=120)
        assert sent == pytest.approx(float(model.weight.grad_batch.sum()), rel=1e-5)
        for _ in range(4):
            step()
            queue.put(True)
            assert answers.get(timeout=60) == sent
    finally:
        queue.put(False)
        process.join(60)
        torch.multiprocessing.set_sharing_strategy(before)


class Encoded(torch.utils.data.Dataset):
    """What an extended model makes of data, in a worker."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    @torch.no_grad()
    def __getitem__(self, i: int) -> Tensor:
        return self.model(torch.full((3,), float(i)))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_that_load_data_may_have_an_extended_model(start: str) -> None:
    model = extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    loss = extend(nn.MSELoss())(model(torch.rand(4, 3)), torch.rand(4, 2))
    with backpack(BatchGrad()):
        loss.backward()
    batches = torch.utils.data.DataLoader(
        Encoded(model), batch_size=4, num_workers=1, multiprocessing_context=start
    )
    (batch,) = batches
    torch.testing.assert_close(batch, model(torch.arange(4.0).unsqueeze(1).expand(4, 3)))


FREED = """
import sys
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
if sys.argv[1] == "True":
    import backpack

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

before, small, large = resident(), [], []
for _ in range(60):
    large.append(torch.ones(2**21))
    small.append(torch.ones(2**10))
del large
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_import_leaves_the_allocator_alone() -> None:
    """What tensors of 8 MiB leave in the process when they are freed."""
    left = [float(run(sys.executable, "-c", FREED, imported)) for imported in (False, True)]
    assert left[1] < left[0] + 8


UNCHANGED = """
import builtins, copyreg, sys, warnings
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.nn.modules import module

CLASSES = [torch.Tensor, nn.Parameter, nn.Module, nn.Sequential, nn.Linear, torch.autograd.Function]

def state():
    hooks = {name: dict(value) for name, value in vars(module).items()
             if name.startswith("_global") and isinstance(value, dict)}
    return (
        [dict(vars(cls)) for cls in CLASSES], hooks, dict(vars(builtins)),
        dict(copyreg.dispatch_table), list(warnings.filters), sys.getrecursionlimit(),
        torch.get_default_dtype(), torch.get_rng_state().tolist(), torch.is_grad_enabled(),
        torch._C._len_torch_function_stack(), torch.get_num_threads(), sys.gettrace(),
    )

def own(cls):
    return {name: value for name, value in cls.items() if not name.startswith("__")}

before = state()
import backpack, backpack.extensions
for i, (one, other) in enumerate(zip(before, state())):
    assert one == other, i
layer = nn.Linear(3, 3)
before = state()
model = backpack.extend(nn.Sequential(layer, nn.ReLU()))
loss = backpack.extend(nn.MSELoss())(model(torch.ones(2, 3)), torch.ones(2, 3))
with backpack.backpack(backpack.extensions.BatchGrad(), backpack.extensions.DiagGGNExact()):
    loss.backward()
after = state()
for one, other in zip(before[0], after[0]):
    assert own(one) == own(other)
assert after[1:] == before[1:]
"""


def test_nothing_of_python_and_torch_is_changed() -> None:
    """By the import, by an extended model, or by a backward pass."""
    run(sys.executable, "-c", UNCHANGED)


# ------------------------------------------------------------------ models that are gone


class Functional(nn.Module):
    """A model with a function, to be traced or recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 4] -> [N, 2]."""
        return self.last(torch.sigmoid(self.first(x)) + 1)


@pytest.mark.parametrize("route", ["trace", "record"])
def test_nothing_stays_of_models_that_are_gone(route: Any) -> None:
    """No hook handles, classes, modules and tensors."""

    def step() -> None:
        model = extend(Functional(), use_converter=route)
        loss = extend(nn.MSELoss())(model(torch.rand(5, 4)), torch.rand(5, 2))
        with backpack(BatchGrad(), DiagGGNExact()):
            loss.backward()

    def alive() -> dict[str, int]:
        gc.collect()
        kinds = {
            "handles": RemovableHandle,
            "classes": type,
            "modules": nn.Module,
            "tensors": torch.Tensor,
        }
        objects = gc.get_objects()
        return {name: sum(issubclass(type(x), k) for x in objects) for name, k in kinds.items()}

    for _ in range(3):
        step()
    before = alive()
    for _ in range(100):
        step()
    assert alive() == before


@pytest.mark.parametrize("route", ["trace", "record"])
def test_hooks_are_taken_off_models_that_live(route: Any) -> None:
    """Also after others are gone, and where a model was extended again."""
    model = extend(extend(Functional(), use_converter=route), use_converter=route)
    extend(Functional(), use_converter=route)
    CTX.remove_hooks()
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    assert not any(map(any, hooks))
    model = extend(model, use_converter=route)
    backward_of = model(torch.rand(5, 4)).sum()
    with backpack(BatchGrad()):
        backward_of.backward()
    assert [len(p.grad_batch) for p in model.parameters()] == [5] * 4

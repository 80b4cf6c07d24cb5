"""Nothing leaks: a call's record dies with the graph that it belongs to."""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from threading import Event, Thread
from typing import Any

import numpy
import pytest
import torch
from apart import run
from largest import Largest
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parametrizations, parametrize
from torch.utils.flop_counter import FlopCounterMode

from backpack import backpack, disable, extend, extensions, memory_cleanup
from backpack.core import memory
from backpack.core.engine import backpropagation, propagations
from backpack.core.engine.backward_pass import BackwardPass
from backpack.core.engine.extracted import REDUCTIONS
from backpack.core.engine.slices import Gathered, Part
from backpack.core.record import calls
from backpack.core.record.compiler import set_compiler
from backpack.custom_module.branching import Parallel, SumModule
from backpack.extensions import BatchGrad

N = 8


START: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def only_reference_counts() -> Iterator[None]:
    """Switch the garbage collector off, and leave what is alive already out of all counts."""
    torch.manual_seed(0)
    gc.collect()
    gc.disable()
    gc.freeze()
    START.update(calls=set(calls.LIVE))
    yield
    START.clear()
    gc.enable()


def network() -> nn.Module:
    """Return a network with every kind of call: reshapes, reuse, branches, returned inputs."""
    shared = nn.Linear(8, 8)
    return nn.Sequential(
        nn.Identity(),
        nn.Conv2d(1, 2, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(),
        shared,
        nn.Tanh(),
        Parallel(nn.Identity(), nn.Linear(8, 8), nn.Sequential(shared, nn.Sigmoid())),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def batch() -> tuple[Tensor, Tensor]:
    return torch.rand(N, 1, 6, 6), torch.randint(3, (N,))


def live() -> int:
    """Count the calls that are alive."""
    return len(set(calls.LIVE) - START["calls"])


def nothing_left() -> bool:
    """Whether no call, no use of a parameter and no backward pass is left."""
    return live() == 0 and not BackwardPass._running


def tensors() -> int:
    """Count the tensors that were made since the start."""
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def resident() -> int:
    """Return the bytes of memory that the process occupies."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


EXTS: dict[str, Callable[[], list[Any]]] = {
    "first order": lambda: [
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.SumGradSquared(),
        extensions.Variance(),
    ],
    "second order": lambda: [
        extensions.DiagGGNExact(),
        extensions.DiagGGNMC(),
        extensions.KFAC(),
        extensions.KFLR(),
        extensions.DiagHessian(),
    ],
    "products": lambda: [extensions.GGNMP(), extensions.HMP()],
    "both": lambda: [extensions.BatchGrad(), extensions.BatchDiagGGNExact(), extensions.GGNMP()],
}


def step(model: nn.Module, lossfunc: nn.Module, exts: list[Any], **options: Any) -> None:
    X, y = batch()
    loss = lossfunc(model(X), y)
    with backpack(*exts, **options):
        loss.backward(retain_graph=options.get("retain_graph", False))
    for p in model.parameters():
        p.grad = None


# ------------------------------------------------------------------ a record dies with its graph


def test_forward_pass_that_is_dropped() -> None:
    model = extend(network())
    out = model(batch()[0])
    assert live() > 10
    del out
    assert nothing_left()


def test_forward_pass_with_data_that_requires_grad() -> None:
    model, (X, _) = extend(network()), batch()
    X.requires_grad_()
    for _ in range(3):
        out = model(X)
        del out
        assert live() == 0 and not X._backward_hooks


@pytest.mark.parametrize(
    "module",
    [
        nn.Identity(),
        nn.Flatten(),
        nn.Dropout().eval(),
        nn.Sigmoid(),
        nn.ReLU(),
        nn.MaxPool1d(1),
        nn.BatchNorm1d(3),
        nn.LeakyReLU(),
        nn.ZeroPad1d(0),
        nn.Unflatten(1, (1, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [True, False])
def test_every_kind_of_module(module: nn.Module, before: bool) -> None:
    """Modules that keep their output, return a view of their input, or the input itself."""
    shape = (N, 3, 3) if isinstance(module, nn.MaxPool1d | nn.ZeroPad1d) else (N, 3)
    linear = nn.Linear(3, 3)
    model = extend(nn.Sequential(linear, module) if before else nn.Sequential(module, linear))
    out = model(torch.rand(shape).requires_grad_())
    assert live() >= 1
    del out
    assert nothing_left()


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()], ids=str)
def test_losses(loss: nn.Module) -> None:
    model, X = extend(nn.Linear(3, 2)), torch.rand(N, 3)
    value = extend(loss)(model(X), torch.rand(N, 2))
    assert live() == 2
    del value
    assert live() == 0


class Recurrent(nn.Module):
    """A leaf whose output is a nested structure."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"states": [x, (2 * x, x.view(-1))], "input": x}


def test_nested_outputs() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 3), Recurrent()))
    out = model(torch.rand(N, 3))
    assert live() == 2
    del out
    assert live() == 0


def test_intermediate_output_keeps_only_what_it_needs() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3)))
    h = model[1](model[0](torch.rand(N, 3)))
    out = model[2](h)
    assert live() == 3
    del out
    assert live() == 2
    del h
    assert live() == 0


@pytest.mark.parametrize("kind", EXTS)
def test_backward_pass_releases(kind: str) -> None:
    model, lossfunc, (X, y) = extend(network()), extend(nn.CrossEntropyLoss()), batch()
    loss = lossfunc(model(X), y)
    with backpack(*EXTS[kind]()):
        loss.backward()
    assert nothing_left()
    assert loss.requires_grad  # although the graph is still there


@pytest.mark.parametrize("kind", EXTS)
def test_retained_graph_dies_with_the_loss(kind: str) -> None:
    model, lossfunc, (X, y) = extend(network()), extend(nn.CrossEntropyLoss()), batch()
    loss = lossfunc(model(X), y)
    count = live()
    for _ in range(2):
        with backpack(*EXTS[kind](), retain_graph=True):
            loss.backward(retain_graph=True)
        assert live() == count
    del loss
    assert nothing_left()


def test_plain_backward_dies_with_the_loss() -> None:
    model, lossfunc, (X, y) = extend(network()), extend(nn.CrossEntropyLoss()), batch()
    loss = lossfunc(model(X), y)
    loss.backward()
    del loss
    assert live() == 0


def test_error_dies_with_the_loss() -> None:
    model, lossfunc, (X, y) = extend(network()), extend(nn.CrossEntropyLoss()), batch()
    loss = lossfunc(model(X), y)
    with pytest.raises(ValueError), backpack(extensions.KFLR(subsampling=[99])):
        loss.backward()
    del loss
    gc.collect()  # the traceback is a cycle
    assert nothing_left()


def test_memory_cleanup_and_disable_hold_nothing() -> None:
    model, (X, _) = extend(network()), batch()
    out = model(X)
    memory_cleanup(model)
    assert nothing_left()
    with disable():
        also = model(X)
    assert live() == 0
    assert out.requires_grad and also.requires_grad


def test_deleted_results_free_the_products() -> None:
    """Products hold tensors of the forward pass; deleting them frees all."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    step(model, lossfunc, EXTS["both"]())  # first-time set-up
    for p in model.parameters():
        vars(p).clear()
    before = tensors()
    step(model, lossfunc, EXTS["products"]())
    assert tensors() > before
    for p in model.parameters():
        vars(p).clear()
    gc.collect()
    assert tensors() <= before


def test_model_is_not_kept_alive() -> None:
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    step(model, lossfunc, EXTS["both"]())
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


# ------------------------------------------------------------------ flat over many passes


def check_flat(pass_: Callable[[], None], times: int) -> None:
    """Check that calls, tensors and resident memory do not grow.

    Calls and tensors must go by reference counts alone. What torch.func leaves behind are reference
    cycles without tensors: the memory may hold those of as many passes, no more.
    """
    for _ in range(times):
        pass_()
    gc.collect()
    calls, held, growth = live(), tensors(), []
    for _ in range(3):
        memory = resident()
        for _ in range(times):
            pass_()
        assert live() == calls
        assert tensors() <= held
        gc.collect()
        growth.append(resident() - memory)
    # a leak of one record would be about 2 kB a pass, of all activations of a pass 12 kB; it would
    # grow every time, whereas the allocator takes a step now and then
    assert min(growth) < max(times * 1024, 2**20), f"grew by {growth} bytes"


def test_forward_passes_without_backward() -> None:
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())

    def forward() -> None:
        X, y = batch()
        lossfunc(model(X), y)

    check_flat(forward, 1000)
    assert nothing_left()


def test_forward_passes_in_the_context() -> None:
    model, (X, _) = extend(network()), batch()
    with backpack(*EXTS["both"]()):
        check_flat(lambda: del_(model(X)), 200)
    assert live() == 0


def del_(_: Tensor) -> None:
    """Forget the argument."""


@pytest.mark.slow
def test_plain_training_steps() -> None:
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    check_flat(lambda: step(model, lossfunc, []), 200)
    assert live() == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXTS)
def test_training_steps(kind: str) -> None:
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    exts = EXTS[kind]()
    check_flat(lambda: step(model, lossfunc, exts), 200)
    assert nothing_left()


def test_training_steps_with_an_optimiser() -> None:
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        X, y = batch()
        optimizer.zero_grad()
        with backpack(extensions.BatchGrad(), extensions.DiagGGNMC()):
            lossfunc(model(X), y).backward()
        optimizer.step()

    check_flat(train, 100)


def test_backward_restricted_to_some_parameters() -> None:
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())

    def restricted() -> None:
        X, y = batch()
        with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            lossfunc(model(X), y).backward(inputs=[model[1].weight])

    check_flat(restricted, 50)
    assert nothing_left()


def test_errors() -> None:
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())

    def fail() -> None:
        with pytest.raises(ValueError):
            step(model, lossfunc, [extensions.BatchGrad(), extensions.KFLR(subsampling=[99])])
        gc.collect()

    check_flat(fail, 50)
    assert nothing_left()


def test_extending_many_models() -> None:
    def build() -> None:
        model, lossfunc = extend(nn.Sequential(nn.Linear(3, 3), SumModule())), nn.MSELoss()
        with backpack(extensions.BatchGrad()):
            extend(lossfunc)(model(torch.rand(N, 3)), torch.rand(N, 3)).backward()
        del model, lossfunc
        gc.collect()

    check_flat(build, 50)


def test_parametrisations_that_come_and_go() -> None:
    """What reads the parameters of one goes with it: they have results, too."""
    model, lossfunc = extend(nn.Linear(3, 3)), extend(nn.MSELoss())
    known = []
    for _ in range(4):
        parametrizations.weight_norm(model)
        known.append(weakref.ref(model.parametrizations.weight.original1))
        extend(model)
        step_of_parametrised(model, lossfunc)
        parametrize.remove_parametrizations(model, "weight")
    gc.collect()  # torch leaves cycles
    assert [p() is None for p in known[:-1]] == [True, True, True]


def step_of_parametrised(model: nn.Module, lossfunc: nn.Module) -> None:
    with backpack(extensions.BatchGrad()):
        lossfunc(model(torch.rand(N, 3)), torch.rand(N, 3)).backward()
    assert model.parametrizations.weight.original1.grad_batch.shape == (N, 3, 3)


# ------------------------------------------------------------------ bounded peaks


@pytest.mark.slow
def test_second_order_in_slices() -> None:
    """A factor for 1000 classes would take 512 MB; slices of 16 MiB do not."""
    script = """
import resource, torch
from torch import nn
from backpack import backpack, extend
from backpack.core.engine.backpropagation import slice_bytes
from backpack.extensions import DiagGGNExact
torch.manual_seed(0)
model = extend(nn.Sequential(nn.Linear(8, 2000), nn.Sigmoid(), nn.Linear(2000, 1000)))
loss = extend(nn.CrossEntropyLoss())(model(torch.rand(64, 8)), torch.randint(1000, (64,)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with slice_bytes(2**24), backpack(DiagGGNExact()):
    loss.backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run(sys.executable, "-c", script)) < 2**18  # kB


# --------------------------------------------------------------------------------------
# Results that are written over
# --------------------------------------------------------------------------------------


def large_result() -> Parameter:
    p = Parameter(torch.ones(2))
    p.grad_batch = torch.zeros(1024, 1024)
    assert p.grad_batch.nbytes >= memory.LARGE
    return p


HOLDERS = {
    "nobody": lambda x: None,
    "a view that is gone": lambda x: x.T.sum(),
    "a name": lambda x: x,
    "a view": lambda x: x[1:, 0],
    "detached": lambda x: x.detach(),
    "its memory": lambda x: x.untyped_storage(),
    "numpy": lambda x: x.numpy(),
    "dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "an array from dlpack": lambda x: numpy.from_dlpack(x),
    "a view of an array": lambda x: memoryview(x.numpy()),
    "other processes": lambda x: [x.share_memory_()].clear(),
    "a weak reference": lambda x: weakref.ref(x),
    "a pickle for another process": lambda x: ForkingPickler.dumps(x),
    "a graph": lambda x: (x[0] * torch.ones(1024, requires_grad=True)).sum(),
    "a graph of all": lambda x: (x * torch.ones(1024, requires_grad=True)).sum(),
}


@pytest.mark.parametrize("who", HOLDERS)
def test_memory_that_somebody_has_is_not_used_again(who: str) -> None:
    p = large_result()
    holder = HOLDERS[who](p.grad_batch)
    with torch.no_grad():
        memory.reuse([p], [BatchGrad()])
    free = len(memory._reusable.get() or ())
    memory.clear()
    assert free == (who in ("nobody", "a view that is gone"))
    assert hasattr(p, "grad_batch") == (not free)
    del holder


@pytest.mark.parametrize("who", HOLDERS)
def test_memory_of_a_factor_that_somebody_has_is_not_used_again(who: str) -> None:
    """Kronecker factors are in a list: one may be free, while another one is not."""
    p = Parameter(torch.ones(2))
    p.kfac = [torch.zeros(1024, 1024), torch.zeros(2, 2), torch.ones(1024, 1024)]
    free = p.kfac[2].data_ptr()
    holder = HOLDERS[who](p.kfac[0])
    with torch.no_grad():
        memory.reuse([p], [extensions.KFAC()])
    taken = (memory._reusable.get() or {}).values()
    spare = [x.data_ptr() for x in taken if x.nbytes >= memory.LARGE]
    del taken
    memory.clear()
    assert free in spare
    assert len(spare) == 1 + (who in ("nobody", "a view that is gone"))
    del holder


@pytest.mark.parametrize("hold", [lambda p: p.kfac, lambda p: iter(p.kfac)])
def test_a_list_that_somebody_has_stays_as_it_is(hold: Callable[[Parameter], Any]) -> None:
    p = Parameter(torch.ones(2))
    p.kfac = [torch.zeros(1024, 1024)]
    holder = hold(p)
    with torch.no_grad():
        memory.reuse([p], [extensions.KFAC()])
    spare = memory._reusable.get() or {}
    memory.clear()
    assert not spare
    assert p.kfac[0].shape == (1024, 1024)
    del holder


def test_kronecker_factors_are_written_over() -> None:
    """Those of the backward pass before, unless somebody looks at them still."""
    torch.manual_seed(0)
    model, lossfunc = extend(nn.Linear(600, 520)), extend(nn.MSELoss())
    X, y = torch.rand(3, 8, 600), torch.rand(3, 8, 520)

    def step(i: int) -> list[Tensor]:
        with backpack(extensions.KFAC()):
            lossfunc(model(X[i]), y[i]).backward()
        expected = X[i].T @ X[i] / 8
        torch.testing.assert_close(model.weight.kfac[1], expected)
        return model.weight.kfac

    def addresses() -> set[int]:
        return {factor.data_ptr() for factor in (*model.weight.kfac, *model.bias.kfac)}

    step(0)
    before = addresses()
    kept = step(1)
    assert addresses() == before
    copies = [factor.clone() for factor in kept]
    step(2)
    assert addresses().isdisjoint(factor.data_ptr() for factor in kept)
    assert all(map(torch.equal, kept, copies))


def test_individual_gradients_are_written_over() -> None:
    """Those of the backward pass before, unless somebody looks at them still."""
    torch.manual_seed(0)
    model, lossfunc = extend(nn.Linear(512, 64)), extend(nn.MSELoss())
    X, y = torch.rand(3, 64, 512), torch.rand(3, 64, 64)

    def step(i: int) -> Tensor:
        model.zero_grad()
        with backpack(BatchGrad()):
            lossfunc(model(X[i]), y[i]).backward()
        assert model.weight.grad_batch._base is None
        torch.testing.assert_close(model.weight.grad_batch.sum(0), model.weight.grad)
        return model.weight.grad_batch

    address = step(0).data_ptr()
    kept = step(1)
    assert kept.data_ptr() == address
    before = kept.clone()
    assert step(2).data_ptr() != address
    assert torch.equal(kept, before)


def test_second_order_results_are_written_over() -> None:
    """At every step: no view keeps memory alive."""
    model, lossfunc = extend(nn.Linear(512, 64)), extend(nn.MSELoss())
    addresses = set()
    for _ in range(4):
        with backpack(extensions.BatchDiagGGNExact()):
            lossfunc(model(torch.rand(64, 512)), torch.rand(64, 64)).backward()
        addresses.add(model.weight.diag_ggn_exact_batch.data_ptr())
        assert model.weight.diag_ggn_exact_batch._base is None
    assert len(addresses) == 1


def test_results_are_written_over_beside_compiled_functions() -> None:
    """While a thread has a compiler, CPython keeps arguments of calls, as it does before 3.11."""
    is_compiling, is_done = Event(), Event()

    def compiling() -> None:
        compiler = set_compiler(False)  # compiled functions run, no others are compiled
        is_compiling.set()
        is_done.wait()
        set_compiler(compiler)

    thread = Thread(target=compiling)
    thread.start()
    is_compiling.wait()
    try:
        test_individual_gradients_are_written_over()
        test_second_order_results_are_written_over()
        test_kronecker_factors_are_written_over()
    finally:
        is_done.set()
        thread.join()


def test_weight_and_bias_have_factors_of_their_own() -> None:
    """What they have in common is computed once, but may be changed in one place."""
    model, lossfunc = extend(nn.Linear(5, 3)), extend(nn.MSELoss())
    with backpack(extensions.KFLR(), extensions.KFAC()):
        lossfunc(model(torch.rand(4, 5)), torch.rand(4, 3)).backward()
    for of_weight, of_bias in [
        (model.weight.kflr[0], model.bias.kflr[0]),
        (model.weight.kfac[0], model.bias.kfac[0]),
    ]:
        assert torch.equal(of_weight, of_bias)
        before = of_bias.clone()
        of_weight.mul_(2)
        assert torch.equal(of_bias, before)


def test_extension_hook_frees_memory() -> None:
    """What the hook deletes is gone at once, not at the end of the backward pass."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    X, y = batch()
    kept: list[bool] = []

    def drop(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            if hasattr(p, "grad_batch"):
                value = weakref.ref(p.grad_batch)
                del p.grad_batch
                kept.append(value() is not None)

    with backpack(BatchGrad(), extension_hook=drop):
        lossfunc(model(X), y).backward()
    assert kept == [False] * len(list(model.parameters()))


def test_a_slice_is_freed_before_the_next_one_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the slices that wait are alive."""
    slices: list[weakref.ref[backpropagation.State]] = []
    counts = []
    restricted, split = backpropagation.State.restricted, backpropagation.Backpropagation._split

    def recording(self: backpropagation.State, *args: Any) -> backpropagation.State:
        state = restricted(self, *args)
        slices.append(weakref.ref(state))
        return state

    def counting(
        self: backpropagation.Backpropagation, state: backpropagation.State, call: calls.Call
    ) -> list[backpropagation.State]:
        if call.module is model[0]:
            counts.append(sum(ref() is not None for ref in slices))
        return split(self, state, call)

    monkeypatch.setattr(backpropagation.State, "restricted", recording)
    monkeypatch.setattr(backpropagation.Backpropagation, "_split", counting)
    monkeypatch.setattr(propagations, "MANY_COLUMNS", 0)
    model = extend(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(8, 4)))
    loss = extend(nn.CrossEntropyLoss())(model(torch.rand(1, 16)), torch.tensor([0]))
    with (
        backpropagation.slice_bytes(48),
        backpack(extensions.DiagGGNExact()),
    ):  # three columns of the loss
        loss.backward()
    assert counts == [3, 2, 1]


@pytest.mark.parametrize("needs_hessian", [False, True])
@pytest.mark.parametrize("of_sequences", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.rand(100), label_smoothing=0.1),
        nn.MSELoss(),
        nn.BCEWithLogitsLoss(reduction="sum"),
        nn.PoissonNLLLoss(),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_columns_of_many_outputs_are_never_there_at_once(
    loss: nn.Module, of_sequences: bool, needs_hessian: bool
) -> None:
    """C outputs need no [C, C], even for one sample."""
    torch.manual_seed(0)
    num_c, T = 100, 2 if of_sequences else 1
    X, model = torch.randn(N, T, 2), extend(nn.Linear(2, num_c))
    is_of_classes = isinstance(loss, nn.CrossEntropyLoss)
    y = torch.randint(num_c, (N * T,)) if is_of_classes else torch.rand(N * T, num_c)
    model, X, y = model.double(), X.double(), y if is_of_classes else y.double()
    loss = loss.double()

    ext = extensions.DiagHessian() if needs_hessian else extensions.DiagGGNExact()
    with Largest() as largest, backpropagation.slice_bytes(8 * 5 * T * num_c), backpack(ext):
        (3 * extend(loss)(model(X).flatten(0, 1), y)).backward()
    assert largest.entries < num_c**2 / 4

    outputs = nn.functional.linear(X, model.weight, model.bias).flatten(0, 1).detach()
    hessian = torch.autograd.functional.hessian(lambda f: 3 * loss(f, y), outputs)
    diagonal = hessian.flatten(0, 1).flatten(1).diagonal().view(N, T, num_c)
    diagonals = diagonal.sum((0, 1)), torch.einsum("ntc,nti->ci", diagonal, X.square())
    for p, expected in zip((model.bias, model.weight), diagonals, strict=True):
        torch.testing.assert_close(vars(p)[ext.savefield], expected)


@pytest.mark.parametrize("subsampling", [None, [2, 0, 2]])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(reduction="sum")])
def test_kronecker_factor_at_a_loss_multiplies_no_columns(
    loss: nn.Module, is_weighted: bool, subsampling: list[int] | None
) -> None:
    """Of C outputs it is the sum of N Hessians; the columns would take ``N C³`` operations."""
    torch.manual_seed(0)
    num_c = 30
    hidden, head = nn.Linear(3, 2).double(), nn.Linear(2, num_c).double()
    model, X = extend(nn.Sequential(hidden, nn.Tanh(), head)), torch.randn(N, 3).double()
    y = torch.randint(num_c, (N,))
    y = y if isinstance(loss, nn.CrossEntropyLoss) else torch.rand(N, num_c).double()
    loss.weight = torch.rand(num_c).double() if is_weighted else None
    ext = extensions.KFLR(subsampling=subsampling)
    with FlopCounterMode(display=False) as flops, backpropagation.slice_bytes(1000), backpack(ext):
        (3 * extend(loss)(model(X), y)).backward()
    chosen = range(N) if subsampling is None else subsampling
    assert flops.get_total_flops() < len(chosen) * num_c**3

    h = hidden(X).tanh().detach()
    hessian = torch.autograd.functional.hessian(lambda f: 3 * loss(f, y), head(h).detach())
    B = sum(hessian[n, :, n] for n in chosen)
    A = sum(torch.outer(h[n], h[n]) for n in chosen) / len(chosen)
    torch.testing.assert_close(head.weight.kflr, [B, A])
    torch.testing.assert_close(head.bias.kflr, [B])
    J = head.weight @ torch.diag_embed(1 - h.square())  # [N, C, 2]
    B_of_hidden = sum(J[n].T @ hessian[n, :, n] @ J[n] for n in chosen)
    torch.testing.assert_close(hidden.weight.kflr[0], B_of_hidden)


@pytest.mark.parametrize("is_large", [True, False])
def test_large_networks_return_memory(is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones keep it: they would have to fetch it again."""
    returned = []
    release = memory.release
    monkeypatch.setattr(memory, "release", lambda: returned.append(release()))
    monkeypatch.setattr(backpropagation, "LARGE_NETWORK", 0 if is_large else 2**20)
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(torch.rand(N, 1, 6, 6)), torch.arange(N) % 3)
    with backpropagation.slice_bytes(64), backpack(extensions.DiagGGNExact()):
        loss.backward()
    assert bool(returned) == is_large


@pytest.mark.parametrize("threads, small, large", [(1, 22, 22), (2, 23, 22), (16, 24, 23)])
def test_slices_of_large_networks_are_smaller(
    threads: int, small: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = [
        backpropagation.slice_bytes.on(torch.device("cpu"), is_large) for is_large in (False, True)
    ]
    assert found == [2**small, 2**large]
    with backpropagation.slice_bytes(5):
        assert backpropagation.slice_bytes.on(torch.device("cpu"), True) == 5


def test_slices_of_columns_are_added_in_place() -> None:
    """The sum over slices stays where it is."""
    every = Part(range(1), range(1), range(3), range(3))
    total, places = Gathered(REDUCTIONS["square"]), set()
    for part in every.split(1, 1):
        total.add(torch.ones(5), part)
        places.add(total.value.data_ptr())
    assert len(places) == 1
    assert total.total().tolist() == [3.0] * 5

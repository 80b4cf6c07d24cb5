"""Threads, contexts and backward passes that run side by side do not meet."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from backpack import CTX, backpack, disable, extend
from backpack.core import memory
from backpack.core.derivatives.convnd import weight_jac_t_save_memory
from backpack.core.derivatives.math_attention import math_attention
from backpack.core.engine.backpropagation import slice_bytes
from backpack.core.engine.backward_pass import BackwardPass
from backpack.core.engine.intercept import Entry
from backpack.core.record import alive, calls
from backpack.extensions import (
    HMP,
    KFLR,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagHessian,
    SumGradSquared,
    Variance,
)

STEPS = 100
EXTENSIONS = [
    (BatchGrad, Variance),
    (DiagGGNExact,),
    (KFLR, SumGradSquared),
    (DiagHessian, BatchL2Grad),
]


def side_by_side(*works: Callable[[], None]) -> None:
    """Run functions in threads of their own, started together; raise what the first one raises."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            barrier.wait(30)
            work()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def network(seed: int, shift: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4), nn.ReLU()]
    return extend(nn.Sequential(*layers, nn.Linear(4, 3)).double())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(5, 1, 4, 4, generator=generator, dtype=torch.float64)
    return X, torch.randint(3, (5,), generator=generator)


def results(model: nn.Module) -> list[dict[str, Any]]:
    return [{**vars(p), "grad": p.grad} for p in model.parameters()]


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def train(model: nn.Module, loss: nn.Module, classes: Any, steps: int) -> list[Any]:
    """Take steps, and return all that was computed on the way."""
    found = []
    for step in range(steps):
        X, y = batch(step)
        for p in model.parameters():
            p.grad = None
            vars(p).clear()
        with backpack(*(cls() for cls in classes)):
            loss(model(X), y).backward()
        found.append(copy.deepcopy(results(model)))
    return found


@pytest.mark.parametrize("shared", [False, True], ids=["own losses", "a shared loss"])
def test_threads_compute_what_they_would_alone(shared: bool) -> None:
    losses = [extend(nn.CrossEntropyLoss()) for _ in EXTENSIONS]
    if shared:
        losses = losses[:1] * len(EXTENSIONS)
    models = [network(i) for i in range(len(EXTENSIONS))]
    alone = [
        train(*work, STEPS)
        for work in zip(copy.deepcopy(models), copy.deepcopy(losses), EXTENSIONS, strict=True)
    ]
    found: list[Any] = [None] * len(EXTENSIONS)

    def work(i: int) -> None:
        found[i] = train(models[i], losses[i], EXTENSIONS[i], STEPS)

    side_by_side(*(lambda i=i: work(i) for i in range(len(EXTENSIONS))))
    for one, other in zip(alone, found, strict=True):
        for before, after in zip(one, other, strict=True):
            assert [r.keys() for r in before] == [r.keys() for r in after]
            assert_equal(after, before)
    assert not BackwardPass._running


def test_a_thread_without_a_context_is_left_alone() -> None:
    ready, done = threading.Event(), threading.Event()
    model, loss = network(0), extend(nn.CrossEntropyLoss())

    def inside() -> None:
        with backpack(BatchGrad()):
            ready.set()
            assert done.wait(30)

    def outside() -> None:
        assert ready.wait(30)
        X, y = batch(0)
        loss(model(X), y).backward()
        assert not CTX.is_extension_active(BatchGrad)
        done.set()

    with pytest.warns(UserWarning, match="enter it in the function that the thread runs"):
        side_by_side(inside, outside)
    assert all(p.grad is not None and not vars(p) for p in model.parameters())


def test_a_thread_is_no_reason_to_warn_if_the_context_is_used_or_has_no_extensions(
    recwarn: Any,
) -> None:
    model, other = network(0), network(1)
    for exts in ([BatchGrad()], [], [DiagGGNExact()]):
        with backpack(*exts):
            side_by_side(lambda: step_of(model).backward())
            step_of(other).backward()
    step_of(model).backward()
    with backpack(BatchGrad()), disable():
        side_by_side(lambda: None)
    assert not [str(w.message) for w in recwarn if "have not run" in str(w.message)]


def test_contexts_that_are_left_in_another_order_leave_nothing_active() -> None:
    steps = [threading.Event() for _ in range(3)]

    def first() -> None:
        with backpack(BatchGrad()):
            steps[0].set()
            assert steps[1].wait(30)
            assert CTX.is_extension_active(BatchGrad) and not CTX.is_extension_active(Variance)
        assert CTX.get_active_exts() == ()
        steps[2].set()

    def second() -> None:
        assert steps[0].wait(30)
        with backpack(Variance()):
            steps[1].set()
            assert steps[2].wait(30)
            assert CTX.is_extension_active(Variance) and not CTX.is_extension_active(BatchGrad)
        assert CTX.get_active_exts() == ()

    side_by_side(first, second)
    assert CTX.get_active_exts() == ()


def step_of(model: nn.Module) -> Tensor:
    X, y = batch(0)
    return extend(nn.CrossEntropyLoss())(model(X), y)


def test_a_task_does_not_have_a_context_that_is_left() -> None:
    """Tasks, threads of asyncio and copies of the context variables start with what was active."""
    model, others = network(0), [network(1), network(2)]

    async def train(left: asyncio.Event) -> None:
        assert CTX.is_extension_active(BatchGrad)
        step_of(others[0]).backward()
        await left.wait()
        step_of(model).backward()
        assert CTX.get_active_exts() == ()

    async def program() -> None:
        left = asyncio.Event()
        with backpack(BatchGrad()):
            task = asyncio.create_task(train(left))
            await asyncio.to_thread(lambda: step_of(others[1]).backward())
            copied = contextvars.copy_context()
        left.set()
        await task
        copied.run(lambda: step_of(model).backward())
        assert copied.run(CTX.get_active_exts) == ()

    asyncio.run(program())
    assert not any(vars(p) for p in model.parameters())
    assert all(hasattr(p, "grad_batch") for other in others for p in other.parameters())


def test_a_task_keeps_the_outer_context_when_the_inner_one_is_left() -> None:
    model = network(0)
    with backpack(Variance()):
        with backpack(BatchGrad()):
            copied = contextvars.copy_context()
        copied.run(lambda: step_of(model).backward())
    for p in model.parameters():
        assert hasattr(p, "variance") and not hasattr(p, "grad_batch")


def test_a_backward_pass_goes_on_if_its_context_is_left_meanwhile() -> None:
    model, context = network(0), backpack(BatchGrad())
    modes = torch._C._len_torch_function_stack()
    loss = step_of(model)
    context.__enter__()
    model[3].weight.register_hook(lambda grad: context.__exit__(None, None, None))  # type: ignore[index, union-attr]
    loss.backward()
    for p in model.parameters():
        assert_equal(p.grad_batch.sum(0), p.grad)
    assert CTX.get_active_exts() == () and not BackwardPass._running
    with backpack(DiagGGNExact()):
        pass
    assert torch._C._len_torch_function_stack() == modes


class Seen(torch.overrides.TorchFunctionMode):
    """Counts functions of tensors."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", [BatchGrad, DiagGGNExact])
def test_contexts_of_one_thread_may_be_left_in_another_order(first: Any) -> None:
    model = network(0)
    modes = torch._C._len_torch_function_stack()

    def inside() -> Iterator[None]:
        with backpack(first()):
            yield

    generator = inside()
    next(generator)
    with backpack(Variance()), Seen() as mode:
        generator.close()
        assert CTX.is_extension_active(Variance) and not CTX.is_extension_active(first)
        step_of(model).backward()
    assert mode.count and torch._C._len_torch_function_stack() == modes
    assert CTX.get_active_exts() == ()
    for p in model.parameters():
        assert set(vars(p)) == {"variance"}


def test_a_context_that_is_entered_twice() -> None:
    context, model = backpack(BatchGrad()), network(0)
    with context:
        with backpack(Variance()), context:
            assert CTX.is_extension_active(BatchGrad)
        assert CTX.is_extension_active(BatchGrad)
        step_of(model).backward()
    assert CTX.get_active_exts() == ()
    assert all(hasattr(p, "grad_batch") for p in model.parameters())


def test_a_context_that_is_left_in_another_thread() -> None:
    """It is over, if there is no doubt which one is meant."""
    context = backpack(DiagGGNExact())
    entered, left = threading.Event(), threading.Event()

    def enters() -> None:
        context.__enter__()
        entered.set()
        assert left.wait(30)
        assert CTX.get_active_exts() == ()

    def leaves() -> None:
        assert entered.wait(30)
        context.__exit__(None, None, None)
        left.set()

    side_by_side(enters, leaves)
    with pytest.raises(RuntimeError, match="has not entered it"):
        context.__exit__(None, None, None)
    side_by_side(context.__enter__, context.__enter__)
    with pytest.raises(RuntimeError, match="has not entered it"):
        context.__exit__(None, None, None)
    assert CTX.get_active_exts() == ()


def test_one_context_object_serves_several_threads() -> None:
    context = backpack(BatchGrad())

    def work() -> None:
        model, loss = network(0), extend(nn.CrossEntropyLoss())
        for step in range(20):
            X, y = batch(step)
            with context:
                loss(model(X), y).backward()
            assert CTX.get_active_exts() == ()
            for p in model.parameters():
                assert_equal(p.grad_batch.sum(0), p.grad)
                p.grad = None

    side_by_side(*[work] * 4)


def test_disable_is_for_one_thread() -> None:
    inside, done = threading.Event(), threading.Event()

    def silent() -> None:
        with disable():
            inside.set()
            assert done.wait(30)
            assert not disable.should_store_io()

    def records() -> None:
        assert inside.wait(30)
        assert disable.should_store_io()
        model, loss = network(0), extend(nn.CrossEntropyLoss())
        X, y = batch(0)
        with backpack(BatchGrad()):
            loss(model(X), y).backward()
        assert all(hasattr(p, "grad_batch") for p in model.parameters())
        done.set()

    side_by_side(silent, records)


def test_the_rule_for_convolutions_is_chosen_in_one_thread() -> None:
    inside, done = threading.Event(), threading.Event()

    def chooses() -> None:
        with weight_jac_t_save_memory(True):
            inside.set()
            assert done.wait(30)

    def others() -> None:
        assert inside.wait(30)
        with weight_jac_t_save_memory(False):
            assert not weight_jac_t_save_memory.active
        assert not weight_jac_t_save_memory.active
        done.set()

    side_by_side(chooses, others)
    assert not weight_jac_t_save_memory.active


def test_the_size_of_slices_is_chosen_in_one_thread() -> None:
    inside, done, device = threading.Event(), threading.Event(), torch.device("cpu")
    default = slice_bytes.on(device, False)

    def chooses() -> None:
        with slice_bytes(5):
            with backpack(DiagGGNExact(), debug=True):
                assert slice_bytes.on(device, False) == 5
            inside.set()
            assert done.wait(30)
            assert slice_bytes.on(device, False) == 5

    def others() -> None:
        assert inside.wait(30)
        assert slice_bytes.on(device, False) == default
        with slice_bytes(7):
            assert slice_bytes.on(device, False) == 7
        done.set()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no backward pass has run
        side_by_side(chooses, others)
    assert slice_bytes.on(device, False) == default


def test_memory_for_results_is_that_of_one_thread() -> None:
    taken, done, like = threading.Event(), threading.Event(), torch.zeros(1024, 1024)

    def takes() -> None:
        p: Any = nn.Parameter(torch.ones(2))
        p.grad_batch = torch.zeros(1024, 1024)
        address = p.grad_batch.data_ptr()
        with torch.no_grad():
            assert memory.reuse([p], [BatchGrad()])
            taken.set()
            assert done.wait(30)
            assert memory.empty(like.shape, like).data_ptr() == address
        memory.clear()

    def others() -> None:
        assert taken.wait(30)
        memory.empty(like.shape, like)
        memory.clear()
        done.set()

    side_by_side(takes, others)


def fails(grad: Tensor) -> None:
    raise ZeroDivisionError("a hook")


def test_failed_passes_are_gone_while_somebody_has_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[Any] = []
    noting = BackwardPass.__init__

    def init(self: BackwardPass, *arguments: Any) -> None:
        noting(self, *arguments)
        passes.append(weakref.ref(self))

    monkeypatch.setattr(BackwardPass, "__init__", init)
    model, lossfunc = extend(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))), nn.MSELoss()
    model[0].weight.register_hook(fails)
    loss = extend(lossfunc)(model(torch.rand(5, 3)), torch.rand(5, 2))
    with backpack(BatchGrad(), DiagGGNExact()), pytest.raises(ZeroDivisionError) as error:
        loss.backward()
    assert error.value.__traceback__ is not None
    assert len(passes) == 1 and passes[0]() is None and not BackwardPass._running


def test_one_thread_runs_forward_and_another_backward() -> None:
    model, loss_function = network(0), extend(nn.CrossEntropyLoss())
    X, y = batch(0)
    (expected,) = train(copy.deepcopy(model), copy.deepcopy(loss_function), EXTENSIONS[0], 1)
    loss = loss_function(model(X), y)

    def work() -> None:
        with backpack(BatchGrad(), Variance()):
            loss.backward()

    side_by_side(work)
    assert_equal(copy.deepcopy(results(model)), expected)


def test_uses_of_parameters_are_counted_in_all_threads() -> None:
    """A parameter that two threads use in one graph has both uses."""
    torch.manual_seed(0)
    layer, loss_function = extend(nn.Linear(3, 2).double()), extend(nn.MSELoss())
    inputs = [torch.rand(4, 3, dtype=torch.float64) for _ in range(8)]
    for _ in range(20):
        outputs: list[Any] = [None] * len(inputs)

        def forward(i: int, outputs: list[Any] = outputs) -> None:
            outputs[i] = layer(inputs[i])

        side_by_side(*(lambda i=i: forward(i) for i in range(len(inputs))))
        with backpack(BatchGrad()):
            loss_function(sum(outputs), torch.zeros(4, 2, dtype=torch.float64)).backward()
        assert_equal(layer.weight.grad_batch.sum(0), layer.weight.grad)
        layer.zero_grad()
        assert not any(calls.LIVE[index]().module is layer for index in calls.LIVE)


def test_a_backward_pass_inside_another_has_its_own_context() -> None:
    outer, inner, loss = network(0), network(1), extend(nn.CrossEntropyLoss())
    X, y = batch(0)

    def hook(grad: Tensor) -> None:
        with torch.enable_grad(), backpack(DiagGGNExact()):
            loss(inner(X), y).backward()

    (expected_outer,) = train(copy.deepcopy(outer), copy.deepcopy(loss), (BatchGrad, KFLR), 1)
    (expected_inner,) = train(copy.deepcopy(inner), copy.deepcopy(loss), (DiagGGNExact,), 1)
    outer[0].weight.register_hook(hook)  # type: ignore[index, union-attr]
    output = outer(X)
    output.register_hook(hook)
    for p in inner.parameters():
        p.grad = None
    with backpack(BatchGrad(), KFLR()):
        loss(output, y).backward()
    assert_equal(copy.deepcopy(results(outer)), expected_outer)
    for p, result in zip(inner.parameters(), expected_inner, strict=True):
        assert set(vars(p)) == {"diag_ggn_exact"}
        assert_equal(p.diag_ggn_exact, result["diag_ggn_exact"])


def test_a_backward_pass_inside_another_has_its_own_roots(recwarn: Any) -> None:
    """The loss of the inner pass was not modified, whatever the outer one was called on."""
    outer, inner, loss = network(0), network(1), extend(nn.CrossEntropyLoss())
    X, y = batch(0)
    output = outer(X)

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            loss(inner(X), y).backward()

    output.register_hook(hook)
    with backpack(DiagGGNExact()):
        loss(output, y).backward()
    assert not [str(w.message) for w in recwarn if "modified" in str(w.message)]


CURVATURE = (BatchGrad, DiagGGNExact, DiagHessian, KFLR, Variance)


def pass_in_a_hook(retained: Callable[[Tensor, Tensor], None]) -> list[dict[str, Any]]:
    """Return the results of a pass that starts other work on its graph half-way."""
    model, (X, y) = network(0), batch(0)
    X.requires_grad_()
    features = model[:4](X)
    loss = extend(nn.CrossEntropyLoss())(model[4:](features), y)
    inner: list[Tensor] = []

    def once(grad: Tensor) -> None:
        if not inner:
            inner.append(grad)
            retained(loss, X)

    handle = features.register_hook(once)
    with backpack(*(cls() for cls in CURVATURE), retain_graph=True):
        loss.backward(retain_graph=True)
    handle.remove()  # the graph would own itself
    assert inner
    return results(model)


@pytest.mark.parametrize("is_thread", [False, True], ids=["inside", "thread"])
@pytest.mark.parametrize("is_active", [False, True], ids=["outer context", "own context"])
def test_a_hook_starts_another_pass_through_the_same_calls(
    is_thread: bool, is_active: bool
) -> None:
    def again(loss: Tensor, X: Tensor) -> None:
        extensions = [cls() for cls in CURVATURE[::-1]]
        with backpack(*extensions, retain_graph=True) if is_active else nullcontext():
            torch.autograd.grad(loss, X, torch.full_like(loss, 2), retain_graph=True)

    def elsewhere(loss: Tensor, X: Tensor) -> None:
        side_by_side(partial(again, loss, X))

    expected = pass_in_a_hook(lambda loss, X: None)
    assert_equal(pass_in_a_hook(elsewhere if is_thread else again), expected)
    assert not BackwardPass._running


def test_results_are_those_of_the_outer_pass() -> None:
    """Where a hook asks for gradients of parameters, half-way through the same graph."""
    model, (X, y) = network(0), batch(0)
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    hooked: list[Tensor] = []
    inner: list[Tensor] = []

    def again(grad: Tensor) -> None:
        hooked.append(grad)
        if len(hooked) == 1:  # it is called in the inner pass, too
            twice, leaves = torch.full_like(loss, 2), [*model.parameters()]
            inner.extend(torch.autograd.grad(loss, leaves, twice, retain_graph=True))

    handle = model[3].weight.register_hook(again)
    with backpack(*(cls() for cls in CURVATURE)):
        loss.backward(retain_graph=True)
    handle.remove()
    found = results(model)
    for p, grad in zip(model.parameters(), inner, strict=True):
        assert_equal(grad, 2 * p.grad)
        p.grad = None
        vars(p).clear()
    with backpack(*(cls() for cls in CURVATURE)):
        loss.backward()
    for one, other in zip(found, results(model), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("where", ["inside twice", "inside and outside", "outside and inside"])
def test_a_module_in_a_pass_and_in_one_inside_of_it(where: str) -> None:
    """Which has a part of its uses each."""
    model, (X, y) = extend(nn.Linear(3, 3).double()), (torch.rand(5, 3).double(), torch.arange(5))
    inside = partial(checkpoint, model, use_reentrant=True)
    first = model if where == "outside and inside" else inside
    second = model if where == "inside and outside" else inside
    loss = extend(nn.CrossEntropyLoss())(second(first(X.requires_grad_())), y % 3)
    with backpack(BatchGrad()), pytest.warns(UserWarning, match="Linear uses a parameter of shape"):
        loss.backward()


def test_threads_share_a_graph() -> None:
    model, (X, y) = network(0), batch(0)
    loss_function = extend(nn.CrossEntropyLoss())
    [expected] = train(copy.deepcopy(model), loss_function, CURVATURE, 1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(STEPS // 2):
            for p in model.parameters():
                vars(p).clear()
            loss = loss_function(model(X), y)

            def work(loss: Tensor = loss) -> None:
                with backpack(*(cls() for cls in CURVATURE), retain_graph=True):
                    loss.backward(retain_graph=True)

            side_by_side(work, work)
            for found, alone in zip(results(model), expected, strict=True):
                assert found.keys() == alone.keys()  # both threads add to the gradient
                assert_equal({**found, "grad": None}, {**alone, "grad": None})
    finally:
        sys.setswitchinterval(interval)
    assert not BackwardPass._running


def test_hooks_of_nodes_that_another_thread_adds_and_removes() -> None:
    """As each ``backward()`` inside of a context does at the loss, of threads that share it."""
    model, (X, y) = network(0), batch(0)
    loss, ended = extend(nn.CrossEntropyLoss())(model(X), y), threading.Event()
    node = loss.grad_fn
    assert node is not None

    def change() -> None:
        while not ended.is_set():
            handles = [node.register_prehook(Entry((loss,)).start) for _ in range(50)]
            for handle in handles:
                handle.remove()

    def work() -> None:
        try:
            for _ in range(1500):
                loss.backward(retain_graph=True)
        finally:
            ended.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        side_by_side(work, change)
    finally:
        sys.setswitchinterval(interval)


def test_threads_that_read_parts_of_one_tensor() -> None:
    """Where the samples are in each is noted at the same node of the graph."""
    body, head = extend(nn.Linear(3, 400)), extend(nn.Linear(1, 2))

    def read(parts: Sequence[Tensor]) -> None:
        for x in parts:
            head(x)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            parts = body(torch.rand(5, 3)).split(1, dim=1)
            side_by_side(partial(read, parts[::2]), partial(read, parts[1::2]))
    finally:
        sys.setswitchinterval(interval)


def test_errors_in_one_thread_leave_the_others_alone() -> None:
    class Oops(Exception):
        pass

    def hook(grad: Tensor) -> None:
        raise Oops

    def fails() -> None:
        model, loss = network(0), extend(nn.CrossEntropyLoss())
        for step in range(STEPS // 2):
            X, y = batch(step)
            output = model(X)
            model[0].weight.register_hook(hook)  # type: ignore[index, union-attr]
            with pytest.raises(Oops), backpack(DiagGGNExact(), BatchGrad()):
                loss(output, y).backward()

    def works() -> None:
        model, loss = network(1), extend(nn.CrossEntropyLoss())
        for found in train(model, loss, (BatchGrad, DiagGGNExact), STEPS // 2):
            for p in found:
                assert_equal(p["grad_batch"].sum(0), p["grad"])
                assert "diag_ggn_exact" in p

    side_by_side(fails, works, fails, works)
    assert not BackwardPass._running


class Stop(Exception):
    """What a hook of somebody else raises."""


def fail(grad: Tensor) -> None:
    raise Stop


def failing_pass(model: Any) -> None:
    X, y = batch(0)
    middle = model[:2](X)
    middle.register_hook(fail)
    with pytest.raises((Stop, SystemError)):  # threads of autograd lose the error that they pass on
        extend(nn.CrossEntropyLoss())(model[2:](middle), y).backward()


@pytest.mark.parametrize("by", ["context", "CTX"])
def test_backward_passes_that_fail_leave_nothing_in_an_open_context(by: str) -> None:
    """Such as a loop that tries again after an error. Autograd has dropped them."""
    model, exts = network(0), (DiagGGNExact(), BatchGrad())

    def program() -> None:
        for _ in range(3):
            failing_pass(model)
            gc.collect()
            assert not BackwardPass._running and not alive.all_live_calls()
            assert not any(vars(p) for p in model.parameters())
        X, y = batch(0)
        with pytest.raises(ValueError, match="does not end in a supported loss"):
            model(X).sum().backward()  # nothing is nested
        model.zero_grad()
        extend(nn.CrossEntropyLoss())(model(X), y).backward()

    def active() -> None:
        CTX.set_active_exts(exts)
        program()

    if by == "CTX":
        contextvars.copy_context().run(active)
    else:
        with backpack(*exts):
            program()
    for p in model.parameters():
        assert_equal(p.grad_batch.sum(0), p.grad)
        assert p.diag_ggn_exact.shape == p.shape


def test_a_failed_backward_pass_inside_another_leaves_that_alone() -> None:
    outer, inner = network(0), network(1)
    X, y = batch(0)
    output = outer(X)

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            failing_pass(inner)
        assert len(BackwardPass._running) == 1

    output.register_hook(hook)
    with backpack(BatchGrad()):
        extend(nn.CrossEntropyLoss())(output, y).backward()
    assert all(hasattr(p, "grad_batch") for p in outer.parameters())
    assert not any(vars(p) for p in inner.parameters()) and not BackwardPass._running


def test_failed_backward_passes_in_threads_of_autograd() -> None:
    model = network(0)
    with backpack(BatchGrad()):
        in_thread_of_autograd(lambda: failing_pass(model))
        for _ in range(100):  # the thread may be a little later than its error
            if not BackwardPass._running:
                break
            time.sleep(0.05)
        assert not BackwardPass._running
        assert not any(vars(p) for p in model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_failed_backward_passes_on_an_accelerator() -> None:
    model: Any = network(0).cuda()
    X, y = (t.cuda() for t in batch(0))
    with backpack(BatchGrad(), DiagGGNExact()):
        for _ in range(20):
            middle = model[:2](X)
            middle.register_hook(fail)
            with pytest.raises(Stop):
                extend(nn.CrossEntropyLoss())(model[2:](middle), y).backward()
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
        assert not BackwardPass._running
    assert all(hasattr(p, "grad_batch") for p in model.parameters())


class Nest(torch.autograd.Function):
    """Starts a backward pass inside of its own, several times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, work: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.work = depth, work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            nest(ctx.depth - 1, ctx.work)
        return grads[0], None, None


def nest(depth: int, work: Callable[[], None]) -> None:
    if depth == 0:
        work()
    else:
        Nest.apply(torch.zeros(1, requires_grad=True), depth, work).sum().backward()


# Autograd runs backward passes inside of so many others in threads of its own, as it does with the
# nodes of an accelerator.
DEPTH = 61


def in_thread_of_autograd(backward: Callable[[], None]) -> None:
    """Call ``backward()`` here, and let autograd run it elsewhere."""
    nest(DEPTH, backward)


def test_threads_of_autograd_have_the_context_of_the_caller(recwarn: Any) -> None:
    model, loss_function = network(0), extend(nn.CrossEntropyLoss())
    classes = (BatchGrad, DiagGGNExact)
    (expected,) = train(copy.deepcopy(model), copy.deepcopy(loss_function), classes, 1)
    X, y = batch(0)
    seen = []

    def work() -> None:
        loss = loss_function(model(X), y)
        loss.register_hook(lambda grad: seen.append(threading.get_ident()))
        loss.backward()

    hooks: list[Any] = []
    exts = [cls() for cls in classes]
    with backpack(*exts, extension_hook=lambda module: hooks.append(CTX.get_active_exts())):
        in_thread_of_autograd(work)
    assert seen != [threading.get_ident()]
    assert_equal(copy.deepcopy(results(model)), expected)
    assert hooks == [tuple(exts)] * 7 and not BackwardPass._running
    assert not [str(w.message) for w in recwarn if "modified" in str(w.message)]


def test_threads_of_autograd_know_that_a_context_is_not_theirs() -> None:
    model, loss = network(0), extend(nn.CrossEntropyLoss())
    X, y = batch(0)
    inside, done = threading.Event(), threading.Event()

    def active() -> None:
        with backpack(BatchGrad()):
            inside.set()
            assert done.wait(60)

    def plain() -> None:
        assert inside.wait(30)
        in_thread_of_autograd(lambda: loss(model(X), y).backward())
        done.set()

    side_by_side(active, plain)
    output = loss(model(X), y)
    with backpack(BatchGrad()), disable():
        in_thread_of_autograd(output.backward)
    assert not any(vars(p) for p in model.parameters())


def test_passes_inside_others_in_threads_of_autograd() -> None:
    outer, inner, loss = network(0), network(1), extend(nn.CrossEntropyLoss())
    X, y = batch(0)
    callers = []

    def hook(grad: Tensor) -> None:
        callers.append(threading.get_ident())
        with torch.enable_grad():
            loss(inner(X), y).backward()

    def work() -> None:
        output = outer(X)
        output.register_hook(hook)
        loss(output, y).backward()

    with backpack(BatchGrad()):
        in_thread_of_autograd(work)
    assert callers != [threading.get_ident()]
    for p in (*outer.parameters(), *inner.parameters()):
        assert_equal(p.grad_batch.sum(0), p.grad)
        vars(p).clear()
    in_thread_of_autograd(work)
    assert not any(vars(p) for p in (*outer.parameters(), *inner.parameters()))
    assert not BackwardPass._running


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("classes", EXTENSIONS, ids=lambda classes: classes[0].__name__)
def test_threads_on_one_accelerator(classes: Any) -> None:
    """Autograd runs the hooks of all of them in one thread of its own."""
    models = [network(i).cuda() for i in range(4)]
    losses = [extend(nn.CrossEntropyLoss()) for _ in models]

    def step(i: int, step: int, exts: Any) -> list[Any]:
        X, y = (t.cuda() for t in batch(step))
        for p in models[i].parameters():
            p.grad = None
            vars(p).clear()
        loss = losses[i](models[i](X), y)
        with backpack(*exts):
            loss.backward()
        return copy.deepcopy(results(models[i]))

    def exts(i: int) -> Any:
        return [cls() for cls in classes] if i % 2 else []

    alone = [[step(i, s, exts(i)) for s in range(30)] for i in range(4)]
    found: list[Any] = [None] * 4

    def work(i: int) -> None:
        found[i] = [step(i, s, exts(i)) for s in range(30)]

    side_by_side(*(lambda i=i: work(i) for i in range(4)))
    for one, other in zip(alone, found, strict=True):
        for before, after in zip(one, other, strict=True):
            assert [r.keys() for r in before] == [r.keys() for r in after]
            assert_equal(after, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_passes_inside_others_on_an_accelerator() -> None:
    from torch.utils.checkpoint import checkpoint

    model, loss = network(0).cuda(), extend(nn.CrossEntropyLoss())
    X, y = (t.cuda() for t in batch(0))
    with backpack(BatchGrad()):
        loss(checkpoint(model, X.requires_grad_(), use_reentrant=True), y).backward()
    for p in model.parameters():
        assert_equal(p.grad_batch.sum(0), p.grad)
        vars(p).clear()
    with backpack(BatchGrad()), disable():
        loss(model(X), y).backward()
    assert not any(vars(p) for p in model.parameters())
    output = loss(model(X), y)
    with backpack(BatchGrad()), disable():
        output.backward()
    assert not any(vars(p) for p in model.parameters())


# ------------------------------------------------------------------ models that are recorded


class Meeting(nn.Module):
    """No module of the library; it may wait for others in the middle of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.meet: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        """[N, 4] -> [N, 4]."""
        y = torch.sin(x) * self.scale
        self.meet()
        return y + y.cos()


class Recorded(nn.Module):
    """Functions, parameters of its own and modules, one of which is opened."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.middle, self.last = nn.Linear(3, 4), Meeting(), nn.Linear(4, 2)
        self.shift = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 2], or [N, M, 3] -> [N, M, 2]."""
        h = self.first(x).tanh() + self.shift
        rows = self.middle(h.flatten(0, -2))
        return self.last(rows.reshape(h.shape) * h.exp())


@pytest.mark.filterwarnings("ignore:No rule for")
@pytest.mark.parametrize("shared", [False, True], ids=["own models", "a shared model"])
def test_threads_that_record_functions(shared: bool) -> None:
    """They wait for each other in the middle of every forward pass."""
    models = [Recorded(i).double() for i in range(2)]
    models = models[:1] * 2 if shared else models
    references = [copy.deepcopy(model) for model in models]
    for model in models:
        extend(model, use_converter="record")
    barrier, one_at_a_time = threading.Barrier(2), threading.Lock()
    running = threading.local()  # in a backward pass, rules call modules, too
    for model in models:
        model.get_submodule("middle").meet = lambda: barrier.wait(10) if running.forward else None
    found: list[list[Any]] = [[], []]
    # samples of the second have two rows: its middle is opened for that
    shapes = [(5, 3), (4, 2, 3)]

    def data(i: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * step + i)
        return torch.rand(shapes[i], generator=generator, dtype=torch.float64)

    def work(i: int) -> None:
        try:
            for step in range(10):
                running.forward = True
                loss = models[i](data(i, step)).square().sum()
                running.forward = False
                barrier.wait(10)  # rules borrow the modules of a shared model
                with one_at_a_time, backpack(BatchGrad()):
                    loss.backward()
                    found[i].append([p.grad_batch.clone() for p in models[i].parameters()])
                barrier.wait(10)
            assert not torch.overrides._get_current_function_mode_stack()
        except BaseException:
            barrier.abort()
            raise

    side_by_side(lambda: work(0), lambda: work(1))
    for i in range(2):
        params = list(references[i].parameters())
        for step in range(10):
            each = [
                torch.autograd.grad(references[i](x).square().sum(), params)
                for x in data(i, step).split(1)
            ]
            assert_equal(found[i][step], [torch.stack(p) for p in zip(*each, strict=True)])


@pytest.mark.filterwarnings("ignore:No rule for")
def test_another_thread_calls_modules_of_a_model_that_is_recorded() -> None:
    """Nobody records its functions: its modules are those that they were."""
    model = extend(Recorded(0).double(), use_converter="record")
    middle, X = model.get_submodule("middle"), torch.rand(4, 2, 3, dtype=torch.float64)
    inside, done = threading.Event(), threading.Event()
    Z = torch.rand(5, 4, dtype=torch.float64)
    found: list[Tensor] = []

    def other() -> None:
        assert inside.wait(30)
        middle.meet = lambda: None
        try:
            with backpack(BatchGrad()):
                middle(Z).sum().backward()
            found.append(middle.scale.grad_batch)
        finally:
            done.set()

    def meet() -> None:
        inside.set()
        assert done.wait(30)

    middle.meet = meet
    outputs: list[Tensor] = []
    side_by_side(lambda: outputs.append(model(X)), other)
    y = (Z.sin() * middle.scale).detach().requires_grad_()
    (grad,) = torch.autograd.grad((y + y.cos()).sum(), y)
    assert_equal(found, [grad * Z.sin()])
    with backpack(BatchGrad()):
        outputs[0].sum().backward()
    assert [len(p.grad_batch) for p in model.parameters()] == [4] * 6


class Traced(nn.Module):
    """Takes its time while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 2]."""
        x = x.sin()
        time.sleep(0.01)
        return self.layer(x + x.cos())


def test_threads_that_convert_models() -> None:
    """The tracer replaces functions for all threads."""
    before = torch.rand, torch.autograd.Function.apply, isinstance, nn.Module.__call__
    models = [[Traced() for _ in range(5)] for _ in range(3)]

    def work(own: list[Traced]) -> None:
        for traced in own:
            model = extend(traced, use_converter="trace")
            assert {type(m).__name__ for m in model.children()} >= {"Linear", "SumModule"}

    side_by_side(*[partial(work, own) for own in models])
    assert before == (torch.rand, torch.autograd.Function.apply, isinstance, nn.Module.__call__)


def test_two_threads_choose_kernels_of_attention() -> None:
    """Whichever ends first, torch then has those that the program has chosen."""

    def chosen() -> list[bool]:
        cuda = torch.backends.cuda
        return [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]

    def use(begun: threading.Event, ends: threading.Event) -> None:
        with math_attention():
            begun.set()
            ends.wait(60)

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        for order in ((0, 1), (1, 0)):
            events = [(threading.Event(), threading.Event()) for _ in order]
            threads = [threading.Thread(target=use, args=pair) for pair in events]
            for thread, (begun, _) in zip(threads, events, strict=True):
                thread.start()
                begun.wait(60)
            for i in order:
                assert chosen() == [False, False, True]
                events[i][1].set()
                threads[i].join()
            assert chosen() == [True, False, True]


def test_attention_by_its_formula_within_a_choice_of_the_function() -> None:
    with math_attention(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), math_attention():
        assert not torch.backends.cuda.flash_sdp_enabled()


class Scaled(nn.Module):
    """A module without a rule, and an option."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(4)), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.weight) * self.scale


def test_products_leave_a_module_alone_that_another_thread_calls() -> None:
    """A module had the options of the backward pass for a moment, and the other thread saw them."""
    model = extend(nn.Sequential(nn.Linear(3, 4), Scaled(), nn.Linear(4, 2)))
    x, y = torch.rand(5, 3), torch.arange(5) % 2
    with backpack(HMP()):
        extend(nn.CrossEntropyLoss())(model(x), y).backward()
    product, v = model[1].weight.hmp, torch.eye(4)
    before = product(v)
    model[1].scale = 7.0
    expected, wrong, is_over = model(x).detach(), [], threading.Event()

    def call() -> None:
        while not is_over.is_set():
            wrong.append(not torch.equal(model(x).detach(), expected))

    thread = threading.Thread(target=call)
    thread.start()
    for _ in range(50):
        torch.testing.assert_close(product(v), before)
    is_over.set()
    thread.join()
    assert wrong and not any(wrong)

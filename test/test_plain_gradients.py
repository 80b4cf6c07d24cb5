"""``p.grad`` is what plain PyTorch computes, whatever the program around the network does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from backpack import backpack, extend
from backpack.core.engine import elided_gradients
from backpack.extensions import BatchGrad

WEIGHT = torch.Size([64, 64, 3, 3])

# A situation prepares the network's convolution before the forward pass, or is given what it has
# returned before the backward pass.
Before = Callable[[nn.Conv2d, ExitStack], None]
After = Callable[[nn.Conv2d, Tensor], None]


def twice(_: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def forward_hook(conv: nn.Conv2d, _: ExitStack) -> None:
    conv.register_forward_hook(twice, prepend=True)


def forward_hook_of_all(conv: nn.Conv2d, stack: ExitStack) -> None:
    handle = register_module_forward_hook(
        lambda module, args, output: 2 * output if module is conv else None
    )
    stack.callback(handle.remove)


@contextmanager
def replaced(name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(nn.Conv2d, name)
    setattr(nn.Conv2d, name, change(original))
    try:
        yield
    finally:
        setattr(nn.Conv2d, name, original)


def doubling(forward: Any) -> Any:
    return lambda *args: 2 * forward(*args)


def wrapped_doubling(forward: Any) -> Any:
    return functools.wraps(forward)(doubling(forward))


def of_twice_the_input(forward: Any) -> Any:
    return lambda conv, x, *args: forward(conv, 2 * x, *args)


def forward_of_the_class(_: nn.Conv2d, stack: ExitStack) -> None:
    stack.enter_context(replaced("forward", doubling))


def wrapped_forward_of_the_class(_: nn.Conv2d, stack: ExitStack) -> None:
    stack.enter_context(replaced("forward", wrapped_doubling))


def forward_of_another_input(_: nn.Conv2d, stack: ExitStack) -> None:
    stack.enter_context(replaced("forward", of_twice_the_input))


def inner_forward_of_the_class(_: nn.Conv2d, stack: ExitStack) -> None:
    stack.enter_context(replaced("_conv_forward", of_twice_the_input))


def forward_of_the_module(conv: nn.Conv2d, _: ExitStack) -> None:
    forward = conv.forward
    conv.forward = lambda x: forward(2 * x)  # type: ignore[method-assign]


def pre_hook_of_the_node(_: nn.Conv2d, output: Tensor) -> None:
    node: Any = output.grad_fn
    node.register_prehook(lambda grads: tuple(2 * g for g in grads))


def hook_of_the_node(_: nn.Conv2d, output: Tensor) -> None:
    node: Any = output.grad_fn
    node.register_hook(lambda grads, _: tuple(None if g is None else 2 * g for g in grads))


def hook_of_the_output(_: nn.Conv2d, output: Tensor) -> None:
    output.register_hook(lambda g: 2 * g)


def pre_hook_of_an_accumulator(conv: nn.Conv2d, output: Tensor) -> None:
    for node in accumulators(output):
        node.register_prehook(lambda grads: tuple(2 * g for g in grads))


def hook_of_an_accumulator(conv: nn.Conv2d, output: Tensor) -> None:
    def double(p: nn.Parameter, *_: Any) -> None:
        assert p.grad is not None
        p.grad *= 2

    for node in accumulators(output):
        node.register_hook(functools.partial(double, node.variable))


def accumulators(output: Tensor) -> list[Any]:
    node: Any = output.grad_fn
    return [n for n, _ in node.next_functions if n is not None and hasattr(n, "variable")]


def other_precision(conv: nn.Conv2d, output: Tensor) -> None:
    for p in conv.parameters():
        p.grad_dtype = torch.float32  # type: ignore[attr-defined]


BEFORE: list[Before] = [
    forward_hook,
    forward_hook_of_all,
    forward_of_the_class,
    wrapped_forward_of_the_class,
    forward_of_another_input,
    inner_forward_of_the_class,
    forward_of_the_module,
]
AFTER: list[After] = [
    pre_hook_of_the_node,
    hook_of_the_node,
    hook_of_the_output,
    pre_hook_of_an_accumulator,
    other_precision,
]


def gradients(
    before: Before | None,
    after: After | None,
    is_extended: bool,
    bad: float | None = None,
    **options: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and all gradients of a network with a convolution 64 -> 64."""
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 64, 3, padding=1).double()
    first, last = nn.Conv2d(3, 64, 1).double(), nn.Linear(64 * 8 * 8, 4).double()
    lossfunc: nn.Module = nn.CrossEntropyLoss()
    x, y = torch.rand(8, 3, 8, 8).double(), torch.randint(4, (8,))
    if bad is not None:
        x[1, 2, 3, 3] = bad
    with ExitStack() as stack:
        if is_extended:
            first, conv, last, lossfunc = map(extend, (first, conv, last, lossfunc))
        if before is not None:
            before(conv, stack)
        output = conv(first(x).tanh())
        if after is not None:
            after(conv, output)
        loss = lossfunc(last(output.tanh().flatten(1)), y)
        if is_extended:
            with backpack(BatchGrad(), **options):
                loss.backward()
        else:
            loss.backward()
    return loss.detach(), [
        p.grad for m in (first, conv, last) for p in m.parameters() if p.grad is not None
    ]


def assert_plain(
    before: Before | None, after: After | None, bad: Any, exact: bool, **options: Any
) -> None:
    loss, expected = gradients(before, after, False, bad)
    other, found = gradients(before, after, True, bad, **options)
    assert torch.equal(loss, other) or loss.isnan()
    assert len(found) == len(expected) == 6
    assert [g.dtype for g in found] == [g.dtype for g in expected]
    assert [g.stride() for g in found] == [g.stride() for g in expected]
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-12, "atol": 1e-14}
    for g, h in zip(found, expected, strict=True):
        torch.testing.assert_close(g, h, equal_nan=True, **tolerance)


@pytest.fixture
def elided(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Size]]:
    """Note what autograd leaves out in each pass."""
    found: list[list[torch.Size]] = []
    elide = elided_gradients.elide

    def noting(*args: Any) -> Any:
        result = elide(*args)
        found.append([p.shape for p in result.parameters])
        return result

    monkeypatch.setattr(elided_gradients, "elide", noting)
    return found


SITUATIONS = [
    *(pytest.param(f, None, id=f.__name__) for f in BEFORE),
    *(pytest.param(None, f, id=f.__name__) for f in AFTER),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("before", "after"), SITUATIONS)
def test_autograd_computes_them(before: Any, after: Any, elided: list[list[torch.Size]]) -> None:
    """To the last bit, and nobody looks at the graph."""
    assert_plain(before, after, None, exact=True)
    assert not elided


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_data_that_are_not_finite(bad: float, elided: list[list[torch.Size]]) -> None:
    """The same entries are not finite."""
    assert_plain(None, None, bad, exact=True)
    assert not elided


def test_hooks_of_accumulators_run(elided: list[list[torch.Size]]) -> None:
    """They see what is in ``p.grad``, and may change it."""
    assert_plain(None, hook_of_an_accumulator, None, exact=True)
    assert not elided
    assert_plain(None, hook_of_an_accumulator, None, exact=False, sum_individual_gradients=True)
    assert WEIGHT not in elided[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("before", "after"), SITUATIONS)
def test_no_sums_where_they_would_differ(
    before: Any, after: Any, elided: list[list[torch.Size]]
) -> None:
    """The option is on, but what the convolution computes or receives is not known."""
    assert_plain(before, after, None, exact=False, sum_individual_gradients=True)
    is_known = after is hook_of_the_output  # which has run when the gradient arrives
    assert any(WEIGHT in shapes for shapes in elided) == is_known


def test_sums(elided: list[list[torch.Size]]) -> None:
    """The option is on, and nothing is in the way."""
    assert_plain(None, None, None, exact=False, sum_individual_gradients=True)
    assert WEIGHT in elided[0]

"""Fused backward kernels whose work is done elsewhere: autograd runs their nodes without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _pop_mode, _push_mode

from backpack.core.record.compiler import Mode
from backpack.core.record.visits import Visit
from backpack.utils.autocast import without_autocast

Cotangents = Sequence[Tensor | None]


class KernelOverride(Mode):
    """Computes what the kernel of a node would, at a ``visit``, while autograd runs the node.

    The node unpacks what it has stored, and frees it, as without the override.
    """

    kernel: ClassVar[Any]  # the operation that the node runs
    receive: Callable[[Cotangents], None]  # those at the node's outputs: always, before `compute`
    compute: Callable[..., Cotangents]  # what the kernel would; called only if autograd needs it
    clear: Callable[[], None]  # frees what was received

    def __init__(self, node: Any, visit: Visit):
        super().__init__()
        self.node, self.visit = node, visit
        self.task: int | None = None  # number of the backward pass that uses it

    @property
    def is_running(self) -> bool:
        """Whether its backward pass runs, and not another one inside (of a hook)."""
        return torch._C._current_graph_task_id() == self.task

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation: of the node, or of hooks that unpack what the node has stored."""
        if func is not self.kernel or not self.is_running:
            return func(*args, **kwargs or {})
        with without_autocast():
            return tuple(self.compute(*args))


@contextmanager
def in_use(
    overrides: Sequence[KernelOverride], roots: Sequence[Tensor], completed: Callable[[Visit], None]
) -> Iterator[None]:
    """Let the next backward pass use overrides; a call is ``completed`` when its nodes have run."""
    unfinished = Counter(override.visit for override in overrides)

    def start(_: Any) -> None:
        for override in overrides:
            if override.task is None:
                override.task = torch._C._current_graph_task_id()

    def before(override: KernelOverride, grads: Cotangents) -> None:
        if override.is_running:
            override.receive(grads)
            # not `with override`: after an error the engine takes it off itself
            _push_mode(override)

    def after(override: KernelOverride, *_: Any) -> None:
        if override.is_running:
            _pop_mode()
            unfinished[override.visit] -= 1
            if not unfinished[override.visit]:
                completed(override.visit)

    nodes: list[Any] = [root.grad_fn for root in roots] if overrides else []
    hooks = [node.register_prehook(start) for node in nodes]
    for override in overrides:
        hooks.append(override.node.register_prehook(partial(before, override)))
        hooks.append(override.node.register_hook(partial(after, override)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for override in overrides:
            override.clear()

"""Fused backward kernels whose work is done elsewhere: autograd runs their nodes without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from backpack.context import without_autocast


class Substitute(TorchDispatchMode):
    """Computes what the kernel of one node of a graph would, while autograd runs the node.

    The node finds what it has stored, and frees it, as ever.

    Args:
        node: The node.

    Attributes:
        kernel: The operation that the node runs.
    """

    kernel: ClassVar[Any]

    def __init__(self, node: Any):
        """Change nothing yet."""
        super().__init__()
        self.node = node

    def receive(self, grads: Sequence[Tensor | None]) -> None:
        """Take what has arrived at the node's outputs: always, and first."""
        raise NotImplementedError

    def compute(self, *args: Any) -> Sequence[Tensor | None]:
        """Return what the kernel would for these arguments, if autograd needs anything of it."""
        raise NotImplementedError

    def finish(self) -> None:
        """Forget what has arrived: the backward pass is over."""
        raise NotImplementedError

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo: a second, and 130 MB

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let autograd use it."""
        hooks = [self.node.register_prehook(self._before), self.node.register_hook(self._after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.finish()

    # The mode is on while the node runs. No `with`: after an error the engine takes it off itself.
    def _before(self, grads: Sequence[Tensor | None]) -> None:
        self.receive(grads)
        _push_mode(self)

    def _after(self, *_: Any) -> None:
        _pop_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of the node."""
        if func is not self.kernel:
            return func(*args, **kwargs or {})
        with without_autocast():
            return tuple(self.compute(*args))

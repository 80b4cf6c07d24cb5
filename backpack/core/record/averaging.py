"""Whether the gradients of a forward pass will be averaged over processes."""

from __future__ import annotations

from typing import Any, NamedTuple


class Averaging(NamedTuple):
    """What a ``DistributedDataParallel`` makes of the gradients of a forward pass inside of it.

    Attributes:
        group: The processes that it is one of.
        is_on: Whether it averages them: not under ``no_sync()``.
        may_stop: Whether some processes may have no batch left (``model.join()``).
    """

    group: Any
    is_on: bool
    may_stop: bool

    @classmethod
    def by(cls, wrapper: Any) -> Averaging:
        """Ask the wrapper while it runs: what it does at its end is not told later."""
        return cls(
            wrapper.process_group, wrapper.require_backward_grad_sync, wrapper._join_config.enable
        )

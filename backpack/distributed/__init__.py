"""Several processes: quantities of all their samples, where ``p.grad`` is that of all."""

from backpack.distributed.accumulators import (
    accumulated_state,
    load_accumulated_checkpoint,
    load_accumulated_state,
)
from backpack.distributed.reduction import agree, check_group, reduce, tell
from backpack.distributed.sums import reduced_in

__all__ = [
    "accumulated_state",
    "agree",
    "check_group",
    "load_accumulated_checkpoint",
    "load_accumulated_state",
    "reduce",
    "reduced_in",
    "tell",
]

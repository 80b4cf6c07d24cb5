"""Several processes: quantities of all their samples, where ``p.grad`` is that of all."""

from backpack.distributed.reduction import agree, check_group, reduce, tell
from backpack.distributed.sums import reduced_in

__all__ = ["agree", "check_group", "reduce", "reduced_in", "tell"]

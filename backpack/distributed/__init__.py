"""Several processes: quantities of all their samples, where ``p.grad`` is that of all."""

from backpack.distributed.reduction import check_group, reduce

__all__ = ["check_group", "reduce"]

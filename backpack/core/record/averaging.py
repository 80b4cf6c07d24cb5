"""Whether the gradients of a forward pass will be averaged over processes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

# Of each wrapper, the places of its parameters, by their ids.
_places: WeakKeyDictionary[Any, Mapping[int, int]] = WeakKeyDictionary()


class Averaging(NamedTuple):
    """What a ``DistributedDataParallel`` makes of the gradients of a forward pass inside of it."""

    group: Any  # the processes that it is one of
    is_on: bool  # whether it averages them: not under ``no_sync()``
    may_stop: bool  # whether some processes may have no batch left (``model.join()``)
    places: Mapping[int, int]  # parameters, by id: their numbers, the same on all processes

    @classmethod
    def by(cls, wrapper: Any) -> Averaging:
        """Ask the wrapper while it runs: whether it averages cannot be found out later."""
        places = _places.get(wrapper)
        if places is None:
            places = _places[wrapper] = _averaged_by(wrapper)
        is_on, may_stop = wrapper.require_backward_grad_sync, wrapper._join_config.enable
        return cls(wrapper.process_group, is_on, may_stop, places)


def _averaged_by(wrapper: Any) -> dict[int, int]:
    """Number the parameters whose gradients a wrapper averages, by their ids.

    Not those that were frozen when it was made: its buckets tell, which takes their memory.
    """
    places = {id(p): i for i, p in enumerate(wrapper._module_parameters)}
    if wrapper._get_ddp_logging_data()["num_parameter_tensors"] == len(places):
        return places
    try:
        buckets = wrapper.reducer._get_zeros_like_grad_buckets()
        averaged = {id(p) for bucket in buckets for p in bucket.parameters()}
    except RuntimeError:  # a bucket of sparse gradients has no memory
        averaged = {id(p) for p in wrapper._module_parameters if p.requires_grad}
    return {key: i for key, i in places.items() if key in averaged}


def is_wrapped() -> bool:
    """Whether a model inside of a ``DistributedDataParallel`` was called."""
    return bool(_places)


class Processes(NamedTuple):
    """Processes over which the gradient of a parameter is averaged."""

    # they have all as their product. Usually one; each process of the first has a shard, those of
    # a second have the same shards
    groups: tuple[Any, ...]
    factor: float | None = None  # what the sum of gradients is divided by. None: their number
    are_sharding: bool = False  # whether each has a shard of the parameter, and of its gradient

    @property
    def number(self) -> int:
        """Number of processes."""
        return prod(group.size() for group in self.groups)

    @property
    def exist(self) -> bool:
        """Whether the groups still do: a graph may outlive them."""
        from torch.distributed import distributed_c10d

        return all(group in distributed_c10d._world.pg_map for group in self.groups)

    @property
    def divisor(self) -> float:
        """What the sum of gradients is divided by."""
        return self.number if self.factor is None else self.factor

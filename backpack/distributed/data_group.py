"""Processes that have a part of the data each, and add up what they compute of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from backpack.core.engine.checks import check_one_process
from backpack.core.record.averaging import Processes
from backpack.distributed.agreement import NotAgreedError
from backpack.distributed.reduction import agree, check_group, tell, totals
from backpack.distributed.shards import is_sharded
from backpack.distributed.sums import exact_total

# Over which processes sums over the data are: those of the DistributedDataParallel around the
# model, or of its DTensors, or of a group; None: each process has all data.
ProcessGroupChoice = ProcessGroup | Literal["module"] | None
# Processes compute the same of the same numbers; not to the last bit on machines of several kinds.
ROUNDING = 1e-4
ADVICE = (
    "Give process_group=torch.distributed.group.WORLD to add up what the processes compute of "
    "their own data, or process_group=None if each has all data."
)


class DataGroup:
    """Sums over processes; an error of one, or a call of another kind, is an error on all.

    All have to do the same at the same time: build an operator, multiply with the same vectors, do
    a step. Who does not come is an error as soon as the time is over that the group was given.
    """

    def __init__(self, *groups: ProcessGroup):
        """Store the groups that have all processes as their product: usually one."""
        self._processes = Processes(groups)

    @classmethod
    def of(cls, choice: Any, model: Module | None, what: str) -> DataGroup | None:
        """Find the processes that a program has chosen; None for this one alone.

        The ``DistributedDataParallel`` around the model may know them. ``what`` names what sums.

        Raises:
            ValueError: If that is no choice.
            NotImplementedError: If there are several processes, and nobody has chosen.
        """
        check_group(choice)
        if isinstance(choice, str):
            if isinstance(model, DistributedDataParallel):
                choice = model.process_group
            elif model is not None and (groups := _of_shards(model)):
                return cls(*groups)
            else:
                check_one_process(what, ADVICE)
                return None
        return None if choice is None or choice.size() == 1 else cls(choice)

    @property
    def groups(self) -> tuple[Any, ...]:
        """The groups that have all processes as their product."""
        return self._processes.groups

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._processes.number

    @property
    def rank(self) -> int:
        """The number of this process."""
        rank = 0
        for group in reversed(self.groups):
            rank = rank * group.size() + group.rank()
        return rank

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that does what is done once."""
        return self.rank == 0

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an error here, so that they do not wait."""
        try:
            yield
        except NotAgreedError:  # they know
            raise
        except Exception as error:
            told = vars(error).setdefault("_backpack_told", [])  # by a block inside of this one
            if self._processes not in told:
                told.append(self._processes)
                tell(self._processes, error)
            raise

    def agree(self, what: str) -> None:
        """Wait until all are about to do the same.

        Raises:
            RuntimeError: As for :meth:`total`.
        """
        agree(self._processes, what, may_differ=False)

    def total(self, what: str, values: Sequence[Tensor]) -> list[Tensor]:
        """Add up tensors, in one operation for each precision.

        Args:
            what: What they are: has to be the same on all processes, as their shapes have.
            values: Of this process.

        Returns:
            The sums, the same on all processes.

        Raises:
            RuntimeError: If processes do not sum the same, an error has stopped one, or one does
                not come.
        """
        shapes = [(list(value.shape), value.dtype) for value in values]
        self.agree(f"{what}: {shapes}")
        flat = [value.reshape(-1) for value in values]
        sums = totals(flat, lambda value: exact_total(value, self.groups))
        return [piece.view(value.shape) for piece, value in zip(sums, values, strict=True)]

    def gathered(self, what: str, values: Sequence[Tensor]) -> list[Tensor]:
        """Concatenate tensors of all processes along their first axis.

        Args:
            what: What they are: has to be the same on all processes, as their other axes have.
            values: Of this process. ``[n, *]`` each; sizes n may differ between processes.

        Returns:
            In the order of the processes, the same on all. ``[N, *]`` each

        Raises:
            RuntimeError: As for :meth:`total`.
        """
        shapes = [(list(value.shape[1:]), value.dtype) for value in values]
        self.agree(f"{what}: {shapes}")
        for group in self.groups:
            values = _gathered(group, values)
        return list(values)

    def compared(self, what: str, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Compare numbers ``[K]`` that all processes should have computed alike.

        Returns:
            Those of all, ``[W, K]``, and which are others on some process. ``[K]``

        Raises:
            RuntimeError: As for :meth:`total`.
        """
        (each,) = self.gathered(what, [numbers.unsqueeze(0)])
        same = torch.isclose(each, each[0], rtol=ROUNDING, atol=0, equal_nan=True)
        return each, ~same.all(0)

    def __reduce__(self) -> Any:
        """Refuse to be pickled: the processes are those of a program that runs.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "What has a process_group cannot be pickled: the group belongs to the processes that "
            "run now. Of an optimiser, save state_dict(), and read it with "
            "backpack.optim.load_checkpoint (or load_state_dict) into one that is made with the "
            "group of the other program."
        )

    def __deepcopy__(self, memo: Any) -> DataGroup:
        """Return itself: a copy of what sums over processes does so over the same ones."""
        return self

    def of_first(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that the first process has; they have the same shapes on all."""
        found = [value.contiguous() for value in values]
        for value in found:
            for group in self.groups:
                distributed.broadcast(value, group=group, group_src=0)
        return found


def check_same(group: DataGroup, what: str, numbers: Tensor) -> None:
    """Refuse numbers ``[K]`` that should be the same on all processes, and are not.

    Raises:
        RuntimeError: If they are not.
    """
    each, differ = group.compared(what, numbers.detach().reshape(-1))
    if differ.any():
        k = int(differ.nonzero()[0])
        raise RuntimeError(
            f"The {what} is another one on each process: entry {k} of {len(differ)} is "
            f"{each[:, k].tolist()}. Give all processes the same; what sums over data needs the "
            "process_group."
        )


def telling(group: DataGroup | None) -> AbstractContextManager[Any]:
    """Tell the other processes, if there are some, of an error here."""
    return nullcontext() if group is None else group.telling()


def _of_shards(model: Module) -> tuple[Any, ...]:
    """Return the groups of the processes that have parts of the parameters, in one mesh."""
    parameters: Iterator[Any] = model.parameters()
    meshes = dict.fromkeys(p.device_mesh for p in parameters if is_sharded(p))
    return tuple(next(iter(meshes)).get_all_groups()) if len(meshes) == 1 else ()


def _gathered(group: ProcessGroup, values: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate tensors ``[n, *]`` of the processes of one group, which agree."""
    if not values:
        return []
    sizes = torch.zeros(group.size(), len(values), dtype=torch.int64, device=values[0].device)
    sizes[group.rank()] = sizes.new_tensor([len(value) for value in values])
    distributed.all_reduce(sizes, group=group)
    found = []
    for value, counts in zip(values, sizes.T.tolist(), strict=True):
        padded = value.new_zeros(max(counts), *value.shape[1:])  # operations need equal sizes
        padded[: len(value)] = value
        parts = [torch.empty_like(padded) for _ in counts]
        distributed.all_gather(parts, padded, group=group)
        found.append(torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)]))
    return found

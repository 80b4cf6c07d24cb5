"""Parameters that ``torch.distributed.fsdp.fully_shard`` has sharded.

Modules compute with *whole* parameters, which nobody else sees: their memory is there while the
module runs, and empty else. What users see, and where quantities belong, are the shards (each a
``DTensor``). To read a whole parameter whose memory is empty is no error of torch, but the end of
the process: whoever may do that says so before (:func:`need`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from threading import local
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.context import CTX
from backpack.core.record.averaging import Processes
from backpack.custom_module.parameter_module import ParameterModule

# Where a whole parameter has its shard.
MARK = "_backpack_shard"
# Attribute of the modules that fully_shard manages.
MANAGED = "_is_fsdp_managed_module"

NO_ROOT = (
    "The parameters of {} are sharded (torch.distributed.fsdp) with those of a module around it, "
    "which is not extended: results would be saved at tensors that stand for them while the module "
    "runs, and be lost. Call extend() on the module that fully_shard() was called with."
)
TRACE_FIRST = (
    "use_converter='trace' rewrites a model, which would lose what fully_shard() has added. Call "
    "extend() before fully_shard(), or use use_converter='record'."
)
NOT_THERE = (
    "Parameters that fully_shard() has sharded are not there, and cannot be gathered here. Do not "
    "use set_unshard_in_backward(False) together with extensions."
)
NOT_GATHERED = (
    "fully_shard() did not gather the parameters of {}, which the quantities of the backward pass "
    "need. Leave set_unshard_in_backward at True."
)
SHARDED_TWICE = (
    "fully_shard() of parameters that are sharded otherwise as well (parallelize_module, "
    "distribute_tensor, or tensors that are gathered in a way of their own): quantities are not "
    "computed. Use one of them, or backpack(...) without extensions."
)
TENSOR_PARALLEL = (
    "{}: the parameters of {} are DTensors (parallelize_module, distribute_tensor). First-order "
    "extensions work, in a process group of their own; others, and averages over more processes, "
    "do not. Use fully_shard() or DistributedDataParallel instead of a parallel layer."
)
OTHER_REDUCTION = (
    "fully_shard() with {}: what that makes of gradients is not known, so quantities would not "
    "belong to them. Leave it out, or use backpack(..., process_group=None) for the quantities of "
    "the process alone."
)


class Shard:
    """What ``fully_shard`` makes of a parameter."""

    __slots__ = ("__weakref__", "_of", "group")

    def __init__(self, of: Any, group: Any):
        self._of = of
        self.group = group

    @property
    def parameter(self) -> Any:
        """What users see: the parameter in ``model.named_parameters()``."""
        return self._of.sharded_param

    @property
    def name(self) -> str | None:
        """Its name in the module that ``fully_shard`` began with, the same on all processes."""
        return getattr(self._of, "_param_fqn", None)

    @property
    def local(self) -> Tensor:
        """The entries that this process has."""
        return self.parameter._local_tensor

    @property
    def whole(self) -> Tensor:
        """What modules compute with."""
        return self._of._unsharded_param

    @property
    def is_there(self) -> bool:
        """Whether the whole parameter has its memory."""
        return self.whole.untyped_storage().size() > 0 or not self.whole.numel()

    @property
    def module(self) -> Any:
        """The module that ``fully_shard`` was called with."""
        return self.group.modules[0]

    def check(self) -> None:
        """Refuse parameters that are sharded in several ways."""
        of = self._of
        if getattr(of, "is_dtensor", False) or hasattr(self.local, "fsdp_pre_all_gather"):
            raise NotImplementedError(SHARDED_TWICE)

    @property
    def processes(self) -> Processes:
        """The processes that have the parameter."""
        info = getattr(self._of, "mesh_info", self.group.mesh_info)
        shards = getattr(info, "shard_process_group", None)
        replicas = getattr(info, "replicate_process_group", None)
        groups = tuple(group for group in (shards, replicas) if group is not None)
        return Processes(groups, getattr(self.group, "gradient_divide_factor", None), True)

    def averaging(self) -> Processes | None:
        """Return the processes over which gradients are averaged now, if they are; else None.

        Where that is not known, it is a NotImplementedError.
        """
        group = self.group
        if not group.reduce_grads:
            return None
        info = getattr(self._of, "mesh_info", group.mesh_info)
        replicas = getattr(info, "replicate_process_group", None)
        operation = getattr(group, "reduce_scatter_reduce_op", None)
        chosen = {
            "a mesh that does not shard": getattr(info, "shard_process_group", None) is None,
            "set_requires_all_reduce(False)": not group.all_reduce_grads and replicas is not None,
            "set_all_reduce_hook()": getattr(group, "_all_reduce_hook", None) is not None,
            "set_reduce_scatter_divide_factor()": operation is not None,
        }
        for what, is_so in chosen.items():
            if is_so:
                raise NotImplementedError(OTHER_REDUCTION.format(what))
        return self.processes


# Where ``fully_shard`` comes from: as long as nobody has imported it, nothing is sharded.
FSDP = "torch.distributed.fsdp"
# By the memory of the whole parameters, of which there are views.
KNOWN: WeakValueDictionary[int, Shard] = WeakValueDictionary()


def is_sharded(module: Module) -> bool:
    """Whether ``fully_shard`` was called with a module, or one of its children."""
    fsdp: Any = sys.modules.get(FSDP)
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in module.modules())


def shard_of(tensor: Any) -> Shard | None:
    """Return the shard of a whole parameter; None for any other tensor."""
    return getattr(tensor, MARK, None) if KNOWN else None


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``, such as a parameter after ``parallelize_module``."""
    return type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "device_mesh")


def home(tensor: Any) -> Any:
    """Return the parameter that users see in the place of one that modules compute with."""
    shard = shard_of(tensor)
    return tensor if shard is None else shard.parameter


def stored(tensor: Tensor) -> Tensor:
    """Return what has the entries of a parameter all the time, of this process."""
    shard = shard_of(tensor)
    if shard is not None:
        return shard.local
    return tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def is_there(tensor: Any) -> bool:
    """Whether the entries of a tensor can be read: not those of a parameter that was let go."""
    shard = shard_of(tensor)
    return shard is None or shard.is_there


def note(module: Module) -> bool:
    """Note the whole parameters that a module computes with, if they are sharded.

    Return whether it is known whose shards they are.
    """
    owner = module.owner if isinstance(module, ParameterModule) else module
    if MANAGED not in vars(owner):
        return True
    own = [p for p in owner._parameters.values() if p is not None]
    if all(hasattr(p, MARK) for p in own):
        return True
    kind = getattr(sys.modules.get(FSDP), "FSDPModule", ())
    roots = [root for root in CTX.extended() if isinstance(root, kind)]
    inside = dict.fromkeys(part for root in roots for part in root.modules())
    for part in inside:  # extended or not, as the wrappers of checkpoints that came later
        for group in _groups(part) if isinstance(part, kind) else ():
            for of in group.fsdp_params:
                whole = getattr(of, "_unsharded_param", None)
                if whole is not None and not hasattr(whole, MARK):
                    shard = Shard(of, group)
                    setattr(whole, MARK, shard)
                    KNOWN[whole.untyped_storage()._cdata] = shard
    if all(hasattr(p, MARK) for p in own):
        return True
    return owner in inside  # ignored_params


def _groups(root: Any) -> list[Any]:
    state = root._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def shards_in(tensors: Iterable[Any]) -> tuple[Shard, ...]:
    """Return the shards that tensors are views of."""
    found: dict[Shard, None] = {}
    for x in tensors if KNOWN else ():
        if type(x) in (Tensor, Parameter) and x.layout is torch.strided:
            shard = KNOWN.get(x.untyped_storage()._cdata)
            if shard is not None:
                found[shard] = None
    return tuple(found)


# ------------------------------------------------------------------ gathered for a while

# Lets processes agree on what they are about to gather together: a text for messages.
Agree = Callable[[Processes, str], bool]
_here = local()


class gathered:
    """Context manager: whole parameters are there when somebody needs them, a layer at a time.

    But the ``first``, gathered at once, stay until the end. All agree before each time.
    """

    def __init__(self, agree: Agree, first: Sequence[Shard] = ()):
        self.agree = agree
        self.first = first
        self.open: dict[Any, None] = {}  # modules

    def __enter__(self) -> gathered:
        self.outer = getattr(_here, "current", None)
        if self.outer is None:
            _here.current = self
            try:
                self.gather(self.first)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self.outer is None:
            _here.current = None
            self.close()

    def close(self, but: Iterable[Any] = ()) -> None:
        """Let what was gathered go."""
        for module in [module for module in self.open if module not in but]:
            del self.open[module]
            module.reshard()

    def gather(self, shards: Sequence[Shard]) -> None:
        """Gather what some shards belong to, if it is not there."""
        wanted = dict.fromkeys(shard.module for shard in shards)
        if not self.first:
            self.close(but=wanted)
        for shard in shards:
            if shard.is_there:
                continue
            module = shard.module
            self.agree(shard.processes, f"gather {name_of(module)}")
            module.unshard()
            if not shard.is_there:
                raise NotImplementedError(NOT_GATHERED.format(name_of(module)))
            self.open[module] = None


class copied:
    """Context manager: whole parameters are put back from copies, without other processes.

    Those may not know that this one puts something off.
    """

    def __init__(self) -> None:
        self._copies: dict[Shard, torch.UntypedStorage] = {}
        self._open: list[Shard] = []

    def add(self, shards: Iterable[Shard]) -> None:
        """Copy whole parameters that are there."""
        for shard in shards:
            if shard.is_there and shard not in self._copies:
                self._copies[shard] = shard.whole.untyped_storage().clone()

    def __enter__(self) -> copied:
        self._outer = getattr(_here, "current", None)
        _here.current = self
        return self

    def __exit__(self, *exception: object) -> None:
        _here.current = self._outer
        for shard in self._open:
            shard.whole.untyped_storage().resize_(0)
        self._open.clear()
        self._copies.clear()

    def gather(self, shards: Sequence[Shard]) -> None:
        """Put back what is not there; gather what there is no copy of."""
        for shard in shards:
            if not shard.is_there and shard in self._copies:
                copy, storage = self._copies[shard], shard.whole.untyped_storage()
                storage.resize_(copy.nbytes())
                storage.copy_(copy)
                self._open.append(shard)
        if not all(shard.is_there for shard in shards):
            if self._outer is None:
                raise RuntimeError(NOT_THERE)
            self._outer.gather(shards)


def name_of(module: Module) -> str:
    """Name a module that is sharded."""
    return vars(module).get("_backpack_name", "") or f"the model ({type(module).__name__})"


def need(shards: Sequence[Shard]) -> None:
    """Gather parameters that are about to be read; a RuntimeError if that is not possible here."""
    if all(shard.is_there for shard in shards):
        return
    current = getattr(_here, "current", None)
    if current is None:
        raise RuntimeError(NOT_THERE)
    current.gather(shards)

"""What all optimisers share: how they get the quantities of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from backpack import backpack
from backpack.core.engine.checks import check_one_process
from backpack.distributed.shards import is_sharded
from backpack.extensions.backprop_extension import BackpropExtension

Closure = Callable[[], Any]
Group = dict[str, Any]


def refuse_model(optimizer: Optimizer, params: Any) -> None:
    """Refuse a model in the place of its parameters.

    Raises:
        TypeError: If it is one.
    """
    if isinstance(params, Module):
        name = type(optimizer).__name__
        raise TypeError(
            f"{name} takes parameters, but got a model ({type(params).__name__}): "
            f"{name}(model.parameters(), ...)."
        )


def check_options(
    group: Group, at_least: Mapping[str, float], more_than: Mapping[str, float] = {}
) -> None:
    """Refuse options of a group of parameters that are out of range.

    Raises:
        ValueError: If one is.
    """
    for name, least in at_least.items():
        if not group[name] >= least:
            raise ValueError(f"{name} has to be at least {least}, got {group[name]}.")
    for name, least in more_than.items():
        if not group[name] > least:
            raise ValueError(f"{name} has to be larger than {least}, got {group[name]}.")
    for name in at_least:
        if name.endswith("_every") and group[name] % 1 > 0:
            raise ValueError(f"{name} is a whole number of steps, got {group[name]}.")


def check_betas(group: Group) -> None:
    """Refuse forgetting factors that are none.

    Raises:
        ValueError: If one is.
    """
    if len(group["betas"]) != 2:
        raise ValueError(f"betas are two numbers, got {group['betas']}.")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas have to be at least 0 and less than 1, got {group['betas']}.")


def state_behind_hooks(
    optimizer: Optimizer,
    load: Callable[[], Any],
    then: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Load a state, and return what the optimiser's hooks before loading have made of it.

    ``then`` gets that as well, before the hooks after loading, which have the last word.
    """
    found: list[dict[str, Any]] = []
    hooks = (
        optimizer.register_load_state_dict_pre_hook(lambda _, state: found.append(state)),
        optimizer.register_load_state_dict_post_hook(lambda _: then(found[0]), prepend=True),
    )
    try:
        load()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0]


def load_wide_state(optimizer: Optimizer, load: Callable[[], Any]) -> None:
    """Load a state in the precision that steps are computed in, single precision at least.

    Torch rounds it to that of the parameters.
    """

    def widen(state_dict: dict[str, Any]) -> None:
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [p for group in optimizer.param_groups for p in group["params"]]
        for number, p in zip(saved, own, strict=True):
            if number in state_dict["state"]:
                wide = torch.promote_types(p.dtype, torch.float32)
                to = partial(Tensor.to, device=p.device, dtype=wide)
                optimizer.state[p] = tree_map_only(Tensor, to, state_dict["state"][number])

    state_behind_hooks(optimizer, load, widen)


class ExtensionOptimizer(Optimizer):
    """An optimiser whose step needs a quantity of the backward pass.

    Either the backward pass runs in the context of ``extensions``::

        with backpack(*optimizer.extensions):
            loss.backward()
        optimizer.step()

    or ``step`` gets the closure of ``torch.optim`` and enters the context itself.

    Attributes:
        extension: Computes the quantity.
        at_least: Smallest value of options of a group.
        more_than: The same, for those that must be larger than it.
        on_processes: What to do on several where they are not.
        averaged_over: The ``process_group`` of the context that ``step`` enters.
        like_parameters: Lists in the state of a parameter whose tensors are sharded as it is.
    """

    at_least: ClassVar[dict[str, float]] = {"lr": 0, "weight_decay": 0}
    more_than: ClassVar[dict[str, float]] = {}
    on_processes: ClassVar[str] = "Run it in one process."
    averaged_over: Any = "module"
    like_parameters: ClassVar[tuple[str, ...]] = ()
    # a gradient scaler tells the optimiser that it is there, by an attribute
    _step_supports_amp_scaling: ClassVar[bool] = True

    def __init__(self, params: Any, defaults: dict[str, Any], extension: BackpropExtension):
        """Store the options; those that a subclass has set before belong to the whole optimiser."""
        refuse_model(self, params)
        for name, value in defaults.items():
            if isinstance(value, BackpropExtension):
                raise TypeError(
                    f"{type(self).__name__}: {name} is no extension, got {value!r}. Give it by "
                    f"name, extension={value!r}."
                )
        self.extension = extension
        self._options = tuple(vars(self))
        self._used: dict[Tensor, ref[Tensor]] = {}
        super().__init__(params, defaults)

    @property
    def works_on_processes(self) -> bool:
        """Whether steps on several processes are those of one with all samples."""
        return False

    def needs_state(self, p: Tensor, attribute: str) -> bool:
        """Whether this process needs a part of a parameter's state."""
        return True

    @property
    def extensions(self) -> tuple[BackpropExtension, ...]:
        """The extensions that the backward pass before the next step has to run."""
        return (self.extension,)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters with options of its own.

        Args:
            param_group: ``{"params": ..., "lr": ..., ...}``; what is left out has its default.

        Raises:
            ValueError: If an option is out of range, or one of the whole optimiser.
        """
        options = signature(type(self).__init__).parameters
        for name in param_group:
            if name in options and name not in ("params", *self.defaults):
                raise ValueError(
                    f"{type(self).__name__}: {name} is an option of the whole optimiser, and a "
                    "group of parameters has it: give it to the optimiser itself."
                )
        check_options({**self.defaults, **param_group}, self.at_least, self.more_than)
        super().add_param_group(param_group)

    def step(self, closure: Closure | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Clears the gradients, computes the loss, calls ``backward()`` and returns the
                loss, as for any optimiser of torch. Runs in the context of ``extensions``.

        Returns:
            The value of the closure, None without one.

        Raises:
            RuntimeError: If a parameter has a gradient, but not the quantity that belongs to it, or
                a gradient scaler does the step.
            NotImplementedError: On several processes of ``torch.distributed``, unless the quantity
                is that of all of them and all that the step reads is.
        """
        self._refuse_scaler()
        if not self.works_on_processes:
            check_one_process(type(self).__name__, self.on_processes)
        loss = None
        if closure is not None:
            loss = self._run(closure)
        with torch.no_grad():
            self._update(closure, loss)
        return loss

    def _refuse_scaler(self) -> None:
        """Refuse a step of ``torch.amp.GradScaler``, which is not told what else it has scaled.

        Raises:
            RuntimeError: If it is one.
        """
        is_scaled = vars(self).pop("found_inf", None) is not None
        vars(self).pop("grad_scale", None)
        if is_scaled:
            raise RuntimeError(
                f"{type(self).__name__} does not work with a gradient scaler: that multiplies "
                f"{self.extension.savefield} as well as gradients, and undoes it for p.grad alone. "
                "Call step() without it, and use bfloat16, which needs none "
                "(GradScaler(enabled=False) does nothing)."
            )

    def _run(self, closure: Closure) -> Any:
        """Run a closure in the context that it needs."""
        with torch.enable_grad(), backpack(*self.extensions, process_group=self.averaged_over):
            return closure()

    def _update(self, closure: Closure | None, loss: Any) -> None:
        """Do one step, given what the closure was and returned."""
        raise NotImplementedError

    def _trained(self) -> Iterator[tuple[Group, Tensor, Tensor]]:
        """Yield the parameters that have a gradient, between their group and that gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} needs dense gradients, that of "
                        f"{self._describe(p)} is sparse. Set sparse=False in the embedding."
                    )
                self._refuse_complex(p)
                yield group, p, p.grad

    def _refuse_complex(self, p: Tensor) -> None:
        """Refuse a complex parameter: there are no extensions for it, and noise is another.

        Raises:
            RuntimeError: If it is one.
        """
        if p.is_complex():
            raise RuntimeError(
                f"{type(self).__name__} needs real parameters, {self._describe(p)} is complex. "
                "Make it real, and use torch.view_as_complex in forward."
            )

    def _quantity(self, p: Tensor) -> Any:
        """Return what the extension has saved for a parameter since the last step.

        Raises:
            RuntimeError: If there is nothing, or it was there in the last step already.
        """
        name = self.extension.savefield
        value = getattr(p, name, None)
        if value is None:
            raise self._missing(p, f"has a gradient, but no {name}")
        if isinstance(value, list) and not value:
            return value  # a bias, whose weight has a value for both
        used = self._used.get(p)
        self._use(p)
        if used is not None and used() is self._used[p]():
            raise self._missing(p, f"has the {name} that was used by the step before")
        return value

    def _use(self, p: Tensor) -> None:
        """Note that what the extension has saved for a parameter is used, if there is anything."""
        value = getattr(p, self.extension.savefield, None)
        tensor = next(iter(value), None) if isinstance(value, list) else value
        if tensor is not None:
            self._used[p] = ref(tensor)

    def _missing(self, p: Tensor, what: str) -> RuntimeError:
        name = f"{type(self).__name__}: {self._describe(p)}"
        if p.grad is not None and not is_sharded(p) and not p.grad.any():
            return RuntimeError(
                f"{name} {what}, and its gradient is zero. If it took no part in the backward "
                "pass, it has to have no gradient: call zero_grad(set_to_none=True)."
            )
        return RuntimeError(
            f"{name} {what}. Call extend() on the model (and "
            "the loss), with use_converter=True if functions of its forward pass use parameters, "
            "and backward() inside `with backpack(*optimizer.extensions):`, or give step() a "
            "closure."
        )

    def _describe(self, p: Tensor) -> str:
        """Name a parameter; by its position if the optimiser was not given names."""
        for number, group in enumerate(self.param_groups):
            for position, member in enumerate(group["params"]):
                if member is p:
                    if "param_names" in group:
                        return f"parameter {group['param_names'][position]!r}"
                    return f"parameter {position} of group {number}, of shape {tuple(p.shape)},"
        raise KeyError(p)

    def __repr__(self) -> str:
        """Write the options of the whole optimiser, and below those of each group."""
        names = [name for name in self._options if not name.startswith("_")]
        whole = "".join(f"{name}: {getattr(self, name)!r}\n" for name in names)
        return super().__repr__().replace("(\n", f"(\n{whole}", 1)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        options = {name: getattr(self, name) for name in self._options}
        return {**super().__getstate__(), **options, "_options": self._options, "_used": {}}

"""What ``backward()`` is called on, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import BoundArguments, signature
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, overrides
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from backpack.context import CTX, STATE, Configuration, disable, update
from backpack.core.engine import elided_gradients
from backpack.core.engine.loss_terms import LossTerms
from backpack.core.record import kernels
from backpack.core.record.calls import Call
from backpack.core.record.origins import has_parameters
from backpack.core.record.visits import Visit


class Entry:
    """One call of ``backward()``, until it returns."""

    def __init__(self, roots: tuple[Any, ...]):
        self.roots = roots  # what it was called on
        self.nodes = [x.grad_fn if isinstance(x, Tensor) else x.node for x in roots]
        self.elided: set[Parameter] = set()  # autograd was not asked for theirs: they need one yet
        self.visits: dict[Call, Visit] = {}  # of calls whose kernels do not run
        self.terms: LossTerms | None = None  # what losses say about samples, for first order
        self.task: int | None = None  # autograd's number of the backward pass, once it has started
        self.seed: Tensor | None = None  # the gradient at the last of the roots, once it is there

    def start(self, seeds: Sequence[Tensor | None] = ()) -> None:
        """Note that the first node runs, before passes inside of this one start."""
        if self.task is None:
            self.task = torch._C._current_graph_task_id()
        for seed in seeds:
            self.seed = seed

    def is_of(self, task: int) -> bool:
        """Whether it has started the backward pass of this number; its first node may run now."""
        if self.task is None and torch._C._current_autograd_node() in self.nodes:
            self.start()  # our hook of a node comes after those of its call
        return self.task == task


class InterceptBackward(overrides.TorchFunctionMode):
    """Notes what ``backward()`` is called on; asks for no gradients that are computed anyway.

    Args:
        completed: Called when autograd will bring nothing more to a call, where that is known.
        elides: Whether gradients may be left out: see :mod:`backpack.core.engine.elided_gradients`.
        program: Is told of all functions, and of what ``backward()`` is called on, if there is one.
    """

    _ENTRIES = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)

    def __init__(self, completed: Callable[[Visit], None], elides: bool, program: Any = None):
        super().__init__()
        self.program = program
        self.completed = completed
        self.elides = elides
        self.was_left = False

    def __enter__(self) -> InterceptBackward:
        """Push the mode: from now on, calls of ``backward()`` are seen."""
        self.was_left = False
        if self.program is not None:
            self.program.enter()
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Pop the mode, also from below modes that are not left yet.

        If it is in use, or another thread has put it on, it does nothing until the next one goes.
        """
        self.was_left = True
        if self.program is not None:
            self.program.leave()
            if any(exception) and not self.program.roots:
                self.program.clear()  # what has run keeps its results, and no backward pass follows
        stack = overrides._get_current_function_mode_stack()
        for _ in stack:
            overrides._pop_mode()
        for mode in stack:
            if not (isinstance(mode, InterceptBackward) and mode.was_left):
                overrides._push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``."""
        kwargs = kwargs or {}
        note = None if self.program is None else self.program.note
        if func not in self._ENTRIES or self.was_left:
            result = func(*args, **kwargs)
            return result if note is None else note(func, args, kwargs, result)
        if torch.is_inference_mode_enabled():  # parameters would have no views with a graph there
            with torch.inference_mode(False):
                return self.__torch_function__(func, types, args, kwargs)
        tensors = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        outer = STATE.get().entry
        same = outer is not None and list(map(id, outer.roots)) == list(map(id, roots))
        if outer is not None and outer.task is None and same:
            return func(*args, **kwargs)  # the mode of an inner context has seen the same call
        entry = Entry(roots)
        if self.program is not None and func is not torch.autograd.grad:
            given = signature(func).bind(*args, **kwargs).arguments
            weights = given.get("gradient", given.get("grad_tensors"))
            weights = (weights,) if weights is None or isinstance(weights, Tensor) else weights
            self.program.roots, self.program.weights = roots, tuple(weights)
        configuration = CTX.configuration
        exts = configuration.exts
        if configuration.first_order:
            entry.terms = LossTerms(roots, any(map(attrgetter("looks_at_loss"), exts)))
        hooks = [node.register_prehook(entry.start) for node in entry.nodes if node is not None]
        update(entry=entry)
        try:
            if func is torch.autograd.grad:
                result = func(*args, **kwargs)
                return result if note is None else note(func, args, kwargs, result)
            passes = configuration.passes
            before = passes.own
            result = self._backward(func, entry, configuration, args, kwargs)
            if exts and passes.own == before and disable.should_store_io():
                passes.missed = passes.missed or has_parameters(entry.nodes)
            return result
        finally:
            update(entry=outer)
            for hook in hooks + (entry.terms.hidden.handles if entry.terms else []):
                hook.remove()

    def _backward(
        self, func: Any, entry: Entry, configuration: Configuration, args: Any, kwargs: Any
    ) -> Any:
        candidates = elided_gradients.costly(configuration) if self.elides else {}
        if configuration.gradients and not candidates:
            return func(*args, **kwargs)
        call = signature(func).bind(*args, **kwargs)
        inputs, differentiable = map(call.arguments.get, ("inputs", "create_graph"))
        if configuration.gradients:
            has_tangents = forward_ad._current_level >= 0  # which gradients get, too
            if differentiable or inputs is not None or has_tangents:
                return func(*args, **kwargs)
            return self._elided(func, entry, call, candidates)
        if differentiable:
            raise ValueError(
                "gradients=False: backward(create_graph=True) asks for gradients. Leave one of "
                "them out."
            )
        if inputs is not None:  # perhaps a generator
            named = inputs.values() if isinstance(inputs, dict) else inputs
            is_one = isinstance(inputs, Tensor | GradientEdge)
            call.arguments["inputs"] = (inputs,) if is_one else tuple(named)
        with elided_gradients.left_alone(entry.nodes):
            return self._elided(func, entry, call, candidates)

    def _elided(
        self, func: Any, entry: Entry, call: BoundArguments, candidates: dict[Call, set[Parameter]]
    ) -> Any:
        roots, only = entry.roots, call.arguments.get("inputs")
        elided, asked, instead = elided_gradients.elide(roots, candidates, only)
        if not elided:
            return func(*call.args, **call.kwargs)
        call.arguments["inputs"] = asked
        entry.elided = elided
        seen = [override.visit for override in instead]
        entry.visits = {visit.call: visit for visit in seen if visit.call is not None}
        with kernels.in_use(instead, roots, self.completed):
            result = func(*call.args, **call.kwargs)
        if elided and CTX.configuration.gradients:  # what is accumulated is taken out
            shapes = [list(p.shape) for p in elided]
            raise RuntimeError(
                f"The gradients of parameters of shapes {shapes} are missing: no gradient has "
                "arrived at the modules that use them. A hook of any parameter, such as "
                "p.register_hook(lambda grad: None), makes autograd compute them; please report "
                "this."
            )
        return result


def set_aside() -> InterceptBackward | None:
    """Pop our mode while this library reads tensors, unless a program is told of functions.

    The caller puts it back if there is one.
    """
    mode = overrides._get_current_function_mode()
    is_ours = isinstance(mode, InterceptBackward) and mode.program is None
    return overrides._pop_mode() if is_ours else None


def put_back(mode: InterceptBackward) -> None:
    """Push a mode that was set aside, unless it was left meanwhile."""
    if not mode.was_left:
        overrides._push_mode(mode)


class not_intercepted:
    """Context manager: our mode, which slows down every function, is set aside."""

    mode: InterceptBackward | None = None

    def __enter__(self) -> None:
        self.mode = set_aside()

    def __exit__(self, *exception: object) -> None:
        if self.mode is not None:
            put_back(self.mode)

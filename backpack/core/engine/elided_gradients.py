"""Gradients of the batch that autograd need not compute: individual gradients add up to them.

For those who ask for it, ``backpack(..., sum_individual_gradients=True)``: ``backward()`` is asked
for all other leaves, and the sum is accumulated in their place. With ``gradients=False``, nothing
is. A recurrent layer's kernel is elided where its input needs no gradient, or where a
:class:`~backpack.core.record.kernels.KernelOverride` computes that.

A parameter takes part if one known module alone uses it, and nothing may look at its gradient or
change it: hooks of parameters, of the module or of its nodes, functions in Python that could run
other passes, distributed wrappers. What is not known: hooks that are put on a node while the pass
runs. Data that are not finite may give other entries that are not finite.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from backpack.context import Configuration, disable
from backpack.core import fast
from backpack.core.record import alive, shards
from backpack.core.record.calls import Call
from backpack.core.record.kernels import KernelOverride
from backpack.core.record.origins import RESHAPES, Origin, is_foreign_function, is_output
from backpack.core.record.visits import Visit, dtypes_of
from backpack.hessianfree.graph import nodes_above
from backpack.utils.hooks import is_of_library

ELIDED = fast.path(
    "gradients not computed twice", "The gradient is the sum of individual gradients, if asked for."
)
# Multiplications of all gradients together from which on it pays to look at the graph.
WORTHWHILE = 2**24
# Functions that stand between a parameter and the one that computes with it.
REARRANGEMENTS = RESHAPES | {"TBackward0", "TransposeBackward0", "PermuteBackward0"}
# Autograd adds up in the parameter's precision, but in a better one inside of its kernels.
PRECISIONS = (torch.float32, torch.float64)


def costly(configuration: Configuration) -> dict[Call, set[Parameter]]:
    """Find parameters whose individual gradients are computed, and whose gradient takes long.

    Return those of each call: none if it does not pay, or was not asked for.
    """
    asked = configuration.sum_individual_gradients or not configuration.gradients
    if not (asked and ELIDED.is_on) or torch.is_anomaly_enabled():
        return {}
    exts = configuration.exts
    first_order = configuration.first_order
    wanted = {name for ext in first_order for name in ext.needs}
    if exts and not configuration.gradients:  # no product is too cheap to be left out
        wanted.add("gradient")
    found: dict[Call, list[Parameter]] = {}
    for call in alive.all_live_calls() if wanted else ():
        if call.params and call.derivatives is not None:
            names = call.derivatives.costly_gradients(call, wanted)
            parameters = [p for name, p in call.params.items() if name in names]
            if parameters:
                found[call] = parameters
    if not found or _work(found) < WORTHWHILE:  # short steps need not know more
        return {}
    if not disable.should_store_io() or any(ext.get_subsampling() for ext in first_order):
        return {}
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return {}
    users = alive.Users()
    known = {
        call: parameters
        for call, parameters in found.items()
        if users.is_alone(call)
        and _is_known(call, parameters)
        and all(ext.rule_for(call.module) is None for ext in first_order)
    }
    if _work(known) < WORTHWHILE:
        return {}
    return {call: set(parameters) for call, parameters in known.items()}


def _work(found: dict[Call, list[Parameter]]) -> int:
    """Count the multiplications that the gradients take."""
    work = 0
    for call, parameters in found.items():
        positions = call.shape_out[0].numel() // max(1, len(parameters[0]))
        work += positions * sum([p.numel() for p in parameters])
    return work


def _is_known(call: Call, parameters: list[Parameter]) -> bool:
    """Whether a call's gradients are the sums of individual gradients, and nothing else."""
    return (
        call.misplaced is None
        and call.was_first
        and _computes_what_torch_does(call.module)
        and not (call.module._backward_hooks or call.module._backward_pre_hooks)
        and not (call.is_unbatched or call.unbatched_inputs)
        and len(dtypes_of([call])) == 1
        and all(map(_is_ordinary, parameters))
    )


def _computes_what_torch_does(module: Module) -> bool:
    """Whether nobody has replaced what a module computes, in its class or for it alone."""
    for name in ("forward", "_conv_forward"):
        method: Any = getattr(type(module), name, None)
        # not its __module__, which functools.wraps copies
        where = getattr(method, "__globals__", {}).get("__name__", "")
        is_known = method is None or where.startswith(("torch.nn.modules.", "backpack."))
        if name in vars(module) or not is_known:
            return False
    return True


def _is_ordinary(p: Any) -> bool:
    """Whether a parameter and its gradient are tensors like any other."""
    grad = p.grad
    return (
        type(p) is Parameter
        and p.dtype in PRECISIONS
        and getattr(p, "grad_dtype", p.dtype) == p.dtype
        and (grad is None or (grad.layout is torch.strided and not grad.requires_grad))
    )


class Elided(NamedTuple):
    """What autograd need not compute, what it is asked for, and what replaces its kernels."""

    parameters: set[Parameter]  # whose gradients it need not compute
    asked: list[Tensor | GradientEdge]  # all other leaves of the graph, and its first functions
    overrides: list[KernelOverride]  # for its kernels


NOTHING = Elided(set(), [], [])


def elide(
    roots: Sequence[Tensor], candidates: dict[Call, set[Parameter]], only: Sequence[Any] | None
) -> Elided:
    """Choose the parameters (of ``candidates``, in ``only``) that autograd need not differentiate.

    All functions of the graph have to run all the same: calls are reached, and what autograd has
    stored is freed. So the first ones, which lead to no other leaf, are asked for themselves. They
    run, and compute no gradient, since none of their inputs needs one.
    """
    if not all(isinstance(root, Tensor) and root.grad_fn is not None for root in roots):
        return NOTHING  # a leaf gets a gradient of its own
    order, users = _upstream_first([root.grad_fn for root in roots])
    if any(map(is_foreign_function, order)):
        return NOTHING  # may run a backward pass of its own, which knows nothing of this one
    leaves = {node: node.variable for node in order if hasattr(node, "variable")}
    if only is not None:
        asked_for = set(map(id, only))
        if not asked_for <= set(map(id, leaves.values())):
            return NOTHING  # places in the graph
        candidates = {
            call: {p for p in own if id(p) in asked_for} for call, own in candidates.items()
        }
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in leaves.values()):
        return NOTHING  # may look at the gradients of others
    owner = _last_calls(order, users, candidates)
    elided = {
        p for node, p in leaves.items() if p.requires_grad and p in candidates.get(owner[node], ())
    }
    overrides = _overrides(order, owner, candidates, elided)
    wanted = {id(p) for p in leaves.values() if p.requires_grad}
    if only is not None:
        wanted &= asked_for
    asked = _places_to_ask_for(order, leaves, elided, wanted)
    return Elided(elided, asked, overrides) if elided else NOTHING


def _last_calls(
    order: Sequence[Any], users: Mapping[Any, Sequence[Any]], candidates: Iterable[Call]
) -> dict[Any, Any]:
    """Return the call that every path from the roots to a node enters last; None if none is."""
    returned_by = {mark: call for call in candidates for mark in call.origins_out}
    owner: dict[Any, Any] = {None: None}
    for node in reversed(order):
        # what a call has returned (or read), or all that reads the node's outputs
        marks = [mark for mark in list(node.metadata.values()) if isinstance(mark, Origin)]
        found = {returned_by.get(mark) for mark in marks} or {owner[user] for user in users[node]}
        owner[node] = next(iter(found)) if len(found) == 1 else None
    return owner


def _overrides(
    order: Sequence[Any],
    owner: Mapping[Any, Any],
    candidates: Mapping[Call, set[Parameter]],
    elided: set[Parameter],
) -> list[KernelOverride]:
    """Ask the rules what replaces kernels; take out of ``elided`` what cannot be left out."""
    nodes_of: dict[Any, list[Any]] = defaultdict(list)
    outputs_of: dict[Any, list[Any]] = defaultdict(list)  # nodes that record() has added
    for node in order:
        nodes_of[owner[node]].append(node)
    for node in filter(is_output, order):
        outputs_of[owner[node.next_functions[0][0]]].append(node)
    overrides: list[KernelOverride] = []
    for call, parameters in candidates.items():
        own = None
        if not any(map(_is_hooked, nodes_of[call] + outputs_of[call])):
            own = call.derivatives.kernel_overrides(Visit(call), nodes_of[call], elided)
        if own is None:
            elided -= parameters
        else:
            overrides += own
    return overrides


def _places_to_ask_for(
    order: Sequence[Any], leaves: Mapping[Any, Tensor], elided: Set[Tensor], wanted: Set[int]
) -> list[Tensor | GradientEdge]:
    """List what autograd is asked for, so that all functions of the graph run.

    Gradients come of leaves with ``wanted`` ids, but not of those that are elided.
    """
    asked: list[Tensor | GradientEdge] = []
    running: set[Any] = set()  # leads to something that is asked for
    bare: set[Any] = set()  # leads to nothing but entries of what is elided
    for node in order:
        parents = [parent for parent, _ in node.next_functions]
        if node in leaves:
            if leaves[node] in elided:
                bare.add(node)
            elif id(leaves[node]) in wanted:
                asked.append(leaves[node])
                running.add(node)
        elif not running.isdisjoint(parents):
            running.add(node)
        elif not bare.isdisjoint(parents):
            if type(node).__name__ in REARRANGEMENTS:
                bare.add(node)
            else:
                asked.append(GradientEdge(node, 0))
                running.add(node)
    return asked


def _upstream_first(roots: Sequence[Any]) -> tuple[list[Any], dict[Any, list[Any]]]:
    """List nodes, each behind those above it, and the nodes below each (None below the first)."""
    parents = {
        node: [parent for parent, _ in node.next_functions if parent is not None]
        for node in nodes_above(roots)
    }
    users: dict[Any, list[Any]] = defaultdict(list, {root: [None] for root in roots})
    for node, above in parents.items():
        for parent in above:
            users[parent].append(node)
    return list(TopologicalSorter(parents).static_order()), users


def _is_hooked(node: Any) -> bool:
    """Whether a node has hooks that are not ours: the handle of a new one knows all of its kind."""
    for register in (node.register_prehook, node.register_hook):
        handle: RemovableHandle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks and not all(map(is_of_library, hooks.values())):
            return True
    return False


@contextmanager
def left_alone(nodes: Iterable[Any]) -> Iterator[None]:
    """Let gradients of recorded parameters above some nodes be what they were before a pass.

    Hooks that wait for an accumulated gradient, such as of an optimiser, do not run.
    """
    leaves = {id(node.variable) for node in nodes_above(nodes) if hasattr(node, "variable")}
    own = (p for call in alive.all_live_calls() for p in call.params.values())
    params = [shards.home(p) for p in dict.fromkeys(own) if id(p) in leaves]
    before = [(p, p.grad) for p in params]
    waiting = [own for p in params if (own := p._post_accumulate_grad_hooks)]
    hooks = [(own, dict(own)) for own in waiting]
    copies: list[Tensor | None] = [None] * len(before)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # what is in buckets is written over
        copies = [None if grad is None else grad.clone() for _, grad in before]
    try:
        for p in params:
            p.grad = None
        for own in waiting:
            own.clear()
        yield
    finally:
        for own, held in hooks:
            own.update(held)
        for (p, gradient), copy in zip(before, copies, strict=True):
            if gradient is not None and copy is not None:
                gradient.detach().copy_(copy)
            p.grad = gradient


def accumulate(p: Parameter, gradient: Tensor) -> None:
    """Add a gradient to ``p.grad`` as autograd does: in place, with the strides of ``p``."""
    gradient = gradient.to(p.dtype)
    if p.grad is not None:
        p.grad += gradient
    elif gradient.stride() == p.stride():
        p.grad = gradient.detach()
    else:
        p.grad = torch.empty_like(p).copy_(gradient)

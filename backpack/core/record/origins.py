"""Identities of tensors: the places in the autograd graph where their entries were computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from backpack.core.record.layout import Layout
from backpack.hessianfree.graph import nodes_above

# Nodes that pass all tensors of a module on: full-backward hooks, DistributedDataParallel, and
# fully_shard.
WRAPPERS = {
    "BackwardHookFunctionBackward",
    "RegisterPostBackwardFunctionBackward",
    "_DDPSinkBackward",
}


# Autograd nodes that keep all entries in their (row-major) order: they only change the shape, or
# the precision.
RESHAPES = {
    *WRAPPERS,
    *("AliasBackward0", "BackpackOutputBackward", "CloneBackward0", "ReshapeAliasBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "ToCopyBackward0"),
    *("UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0", "ViewAsBackward0"),
}


class BackpackOutput(torch.autograd.Function):
    """The same tensor with a node of its own, and no view: outputs stay what they were."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the same memory, whose changes in place are counted together."""
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """Pass the gradient on."""
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Pass the tangent on."""
        return tangent.view_as(tangent)


class Origin:
    """Identity of a tensor: the place in the autograd graph where its entries were computed."""

    # of the class, until a call sets its own: there is nothing to run when an identity is made
    is_output: bool = False  # whether a recorded call returned the tensor:
    by_container: bool = False  # a container, whose functions have computed it
    of_loss: bool = False  # a loss, whose rule knows whether it mixes samples
    layout: Layout | None = None  # where the samples are in it, if that is known
    lost: str | None = None  # why that is not known
    producer: ref[Any] | None = None  # the call that computes the tensor again, if it is not kept


def origin(tensor: Any) -> Origin | None:
    """Return the identity of a tensor up to reshapes; None for data, parameters and constants.

    The mark lives in the metadata of the autograd node, so it is unique while the graph lives, a
    reshaped tensor shares it, and an in-place change gives a new one.
    """
    node: Any = tensor.grad_fn if isinstance(tensor, Tensor) else None
    if node is None:
        return None
    slot = tensor.output_nr
    while True:
        marks, key = node.metadata, ("backpack", slot)
        mark = marks.get(key)
        if mark is not None:  # also that of a call that returned a view of its own parameter
            return mark
        name = type(node).__name__
        if name not in RESHAPES:
            mark = marks[key] = Origin()
            return mark
        source, slot = node.next_functions[slot if name in WRAPPERS else 0]
        if source is None or type(source).__name__ == "AccumulateGrad":
            return None
        node = source


def parameter_behind(tensor: Any) -> Parameter | None:
    """Return the parameter that a tensor is, or is a reshaped (or cast) form of; None for others.

    What a recorded call has returned is its business.
    """
    if not (isinstance(tensor, Tensor) and tensor.requires_grad) or origin(tensor) is not None:
        return None
    if isinstance(tensor, Parameter):
        return tensor
    node: Any = tensor.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0]
    leaf = None if node is None else node.variable
    return leaf if isinstance(leaf, Parameter) else None


def origin_at(node: Any, slot: int) -> Origin:
    """Return the identity of an output of a node of the autograd graph."""
    marks, key = node.metadata, ("backpack", slot)
    mark = marks.get(key)
    if mark is None:
        mark = marks[key] = Origin()
    return mark


def upstream(tensor: Tensor, stop: Callable[[Origin], bool]) -> tuple[list[Origin], list[Tensor]]:
    """Return the closest marks above a tensor at which to stop, and leaves (parameters) before."""
    found: list[Origin] = []

    def is_end(node: Any) -> bool:
        marks = [m for m in list(node.metadata.values()) if isinstance(m, Origin) and stop(m)]
        found.extend(marks)
        return bool(marks)

    above = nodes_above([tensor.grad_fn], until=is_end)
    return found, [node.variable for node in above if hasattr(node, "variable")]


def has_parameters(nodes: Sequence[Any]) -> bool:
    """Whether parameters are above some nodes of the autograd graph."""
    leaves = (getattr(node, "variable", None) for node in nodes_above(nodes))
    return any(isinstance(leaf, Parameter) for leaf in leaves)


def is_output(node: Any) -> bool:
    """Whether a node of the graph is that of an output which :func:`own_node` has set apart."""
    return isinstance(node, BackpackOutput._backward_cls)


def is_foreign_function(node: Any) -> bool:
    """Whether a node is that of a ``torch.autograd.Function``, which the engine alone can run."""
    return isinstance(node, BackwardCFunction) and not is_output(node)


def own_node(x: Any) -> Any:
    """Give a tensor that has a gradient a node of its own; let all else pass."""
    return BackpackOutput.apply(x) if isinstance(x, Tensor) and x.requires_grad else x


def flatten_outputs(output: Any) -> tuple[Tensor, ...]:
    """Collect the floating-point tensors in a module's output, depth first."""
    if isinstance(output, Tensor):
        return (output,) if output.is_floating_point() else ()
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, tuple | list):
        return tuple(tensor for item in output for tensor in flatten_outputs(item))
    return ()

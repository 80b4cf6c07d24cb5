"""Gradients that are differentiated again: which of them autograd would take for constants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from backpack.hessianfree.graph import nodes_above


class NoSecondDerivative(RuntimeError):
    """A function has a backward pass that autograd takes for a constant."""


@contextmanager
def differentiable_gradients(ys: Iterable[Tensor], xs: Iterable[Tensor]) -> Iterator[None]:
    """Refuse functions whose gradients, computed inside of this context, have no derivative.

    Such are functions written in Python that are marked as ``once_differentiable``, or whose
    backward pass computes without a graph. Autograd would take their second derivative for zero.

    Args:
        ys: What is differentiated inside: ``Jᵀ w`` with w that require a gradient. ``[*y]`` each
        xs: With respect to what: gradients that do not reach these may be constant. ``[*x]`` each

    Raises:
        NoSecondDerivative: At the end, if there is such a function.
    """
    lacking: list[tuple[Any, Any]] = []  # functions, and what they give such gradients to

    def look(node: Any, found: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        known = [g for g in given if g is not None and (g.requires_grad or _has_entries(g))]
        if not known or not all(g.requires_grad for g in known):
            return
        lacking.extend(
            (node, above)
            for g, (above, _) in zip(found, node.next_functions, strict=False)
            if g is not None and above is not None and _is_constant(g)
        )

    is_plain = torch._C._functorch.peek_interpreter_stack() is None
    above = nodes_above(y.grad_fn for y in ys) if is_plain else ()
    of_python = [node for node in above if isinstance(node, BackwardCFunction)]
    hooks = [node.register_hook(partial(look, node)) for node in of_python]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    ends = {get_gradient_edge(x).node for x in xs if x.requires_grad} if lacking else set()
    reaching = [node for node, above in lacking if not ends.isdisjoint(nodes_above([above]))]
    if reaching:
        name = type(reaching[0]).__name__.removesuffix("Backward")
        raise NoSecondDerivative(
            f"The backward pass of the function {name} cannot be differentiated: it is "
            "marked as once_differentiable, or computes without a graph (within torch.no_grad(), "
            "on detached tensors, by an adjoint method). What needs its derivative would lack a "
            "part. Write it with functions of torch, without that mark, or differentiate through "
            "the solver (odeint in the place of odeint_adjoint)."
        )


def _is_constant(gradient: Tensor) -> bool:
    """Whether a gradient has no derivative, although it depends on the one that it is made of."""
    # what is once differentiable is an error by itself, if reached: also zero, as of a square at 0
    if gradient.requires_grad:
        return type(gradient.grad_fn).__name__ == "Error"
    return _has_entries(gradient)


def _has_entries(gradient: Tensor) -> bool:
    """Whether some entries are known not to be zero."""
    if gradient.is_meta or (gradient.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(gradient.detach().any()) if gradient.layout == torch.strided else True

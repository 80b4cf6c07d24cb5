"""Gradients that are differentiated again: which of them autograd would take for constants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from backpack.hessianfree.graph import nodes_above


class NoSecondDerivative(RuntimeError):
    """A function has a backward pass that autograd takes for a constant."""


@contextmanager
def differentiable_gradients(ys: Iterable[Tensor]) -> Iterator[None]:
    """Refuse functions of ``ys`` whose gradients, computed inside, have no derivative.

    What these are multiplied with has to require a gradient.

    Such are functions written in Python that are marked as ``once_differentiable``, or whose
    backward pass computes without a graph. Autograd would take their second derivative for zero.

    Raises:
        NoSecondDerivative: At the end, if there is one.
    """
    lacking: list[str] = []

    def look(node: Any, found: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        known = [g for g in given if g is not None and (g.requires_grad or _has_entries(g))]
        if not known or not all(g.requires_grad for g in known):
            return
        if any(
            g is not None and above is not None and _is_constant(g)
            for g, (above, _) in zip(found, node.next_functions, strict=False)
        ):
            lacking.append(type(node).__name__.removesuffix("Backward"))

    is_plain = torch._C._functorch.peek_interpreter_stack() is None
    above = nodes_above(y.grad_fn for y in ys) if is_plain else ()
    of_python = [node for node in above if isinstance(node, BackwardCFunction)]
    hooks = [node.register_hook(partial(look, node)) for node in of_python]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if lacking:
        raise NoSecondDerivative(
            f"The backward pass of the function {lacking[0]} cannot be differentiated: it is "
            "marked as once_differentiable, or computes without a graph (within torch.no_grad(), "
            "on detached tensors, by an adjoint method). What needs its derivative would lack a "
            "part. Write it with functions of torch, without that mark, or differentiate through "
            "the solver (odeint in the place of odeint_adjoint)."
        )


def _is_constant(gradient: Tensor) -> bool:
    """Whether a gradient has no derivative, although it depends on the one that it is made of."""
    if gradient.requires_grad:  # what is once differentiable is an error by itself, if reached
        return type(gradient.grad_fn).__name__ == "Error"
    return _has_entries(gradient)


def _has_entries(gradient: Tensor) -> bool:
    """Whether some entries are known not to be zero."""
    if gradient.is_meta or (gradient.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(gradient.detach().any()) if gradient.layout == torch.strided else True

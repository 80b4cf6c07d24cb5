"""Products with transposed Jacobians."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dis import opname
from threading import RLock

import torch
from torch import Tensor

_hooks_are_aside = RLock()


@torch.inference_mode(False)
def L_op(
    ys: Tensor | Iterable[Tensor],
    xs: Tensor | Iterable[Tensor],
    ws: Tensor | Iterable[Tensor],
    retain_graph: bool = True,
    detach: bool = True,
) -> tuple[Tensor, ...]:
    """Multiply with the transposed Jacobian of ``ys`` with respect to ``xs``.

    Args:
        ys: Outputs of the function. ``[*y]`` each
        xs: Inputs of the function. ``[*x]`` each
        ws: Tensors to multiply with, shaped like the outputs. ``[*y]`` each
        retain_graph: Keep the graph of ``ys`` for further derivatives.
        detach: Return tensors without a graph. Otherwise, the result can be differentiated.

    Returns:
        The product ``Jᵀ w``, zero for inputs that the outputs do not depend on. ``[*x]`` each

    Raises:
        ValueError: If ``ws`` does not have the length and the shapes of ``ys``, or ``ys`` have no
            graph to differentiate.
    """
    ys, xs, ws = as_tuple(ys), as_tuple(xs), as_tuple(ws)
    check_same_shapes("ws", ws, "ys", ys)
    check_varies(ys)
    return vjp(ys, xs, ws, retain_graph=retain_graph, detach=detach)


transposed_jacobian_vector_product = L_op


def vjp(
    ys: tuple[Tensor, ...],
    xs: tuple[Tensor, ...],
    ws: tuple[Tensor, ...],
    retain_graph: bool = True,
    detach: bool = True,
    several: bool = False,
) -> tuple[Tensor, ...]:
    """Multiply with a transposed Jacobian like :func:`L_op`, but let all of ``ys`` be constant.

    Args:
        ys: Outputs of the function. ``[*y]`` each
        xs: Inputs of the function. ``[*x]`` each
        ws: Tensors to multiply with, shaped like the outputs. ``[*y]`` each, or ``[V, *y]``
        retain_graph: Keep the graph of ``ys`` for further derivatives.
        detach: Return tensors without a graph.
        several: Whether ``ws`` are V vectors, multiplied at once.

    Returns:
        The product ``Jᵀ w``, zero for inputs that the outputs do not depend on. ``[*x]`` each, or
        ``[V, *x]``; dense where autograd has sparse gradients.

    Raises:
        NotImplementedError: If a function has no derivative.
    """
    stacked = ws[0].shape[:1] if several else ()
    # autograd refuses constant outputs; they contribute zero.
    varying = [i for i, y in enumerate(ys) if y.requires_grad]
    if not varying or not xs:
        return tuple(x.new_zeros((*stacked, *x.shape)) for x in xs)
    alone = stacked == (1,)  # vectorising costs time, and not every function can be vectorised
    has_parts = several and len(ws[0]) > 1
    if has_parts and torch.is_anomaly_enabled():  # which looks at each gradient
        return _one_by_one(ys, xs, ws, retain_graph, detach)
    products = None
    try:
        with without_hooks(xs):
            products = torch.autograd.grad(
                [ys[i] for i in varying],
                xs,
                grad_outputs=[ws[i].squeeze(0) if alone else ws[i] for i in varying],
                retain_graph=retain_graph or has_parts,  # what failed has freed some of it
                create_graph=not detach,
                allow_unused=True,
                is_grads_batched=several and not alone,
            )
    except RuntimeError as error:
        lacks = isinstance(error, NotImplementedError) or "is not implemented" in str(error)
        if not has_parts and lacks:
            raise NotImplementedError(
                f"Autograd: {str(error).removesuffix('.')}. Products with the GGN, the Hessian and "
                "the Jacobian need its second derivatives. Use functions that have them, such as "
                "nn.Embedding and a sum or mean in the place of nn.EmbeddingBag, or what needs "
                "none: DiagonalGGN, KroneckerGGN, NTK, GGNMP and HMP have a rule for it."
            ) from error
        if not has_parts or _is_of_program(error):
            raise
    if products is None:  # what cannot be vectorised, such as sparse gradients
        return _one_by_one(ys, xs, ws, retain_graph, detach)
    products = tuple(p.to_dense() if p is not None and p.is_sparse else p for p in products)
    return tuple(
        x.new_zeros((*stacked, *x.shape)) if p is None else p.unsqueeze(0) if alone else p
        for x, p in zip(xs, products, strict=True)
    )


def _is_of_program(error: BaseException) -> bool:
    """Whether a ``raise`` outside of torch has raised an error.

    What torch cannot vectorise, it says itself, in a function of C or in one of its own, which
    another error may tell of.
    """
    while earlier := error.__cause__ or error.__context__:
        error = earlier
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return False
    package = str(at.tb_frame.f_globals.get("__name__")).partition(".")[0]
    is_raised = opname[at.tb_frame.f_code.co_code[at.tb_lasti]] == "RAISE_VARARGS"
    return is_raised and package not in ("torch", "backpack") and "vmap" not in str(error)


def _one_by_one(
    ys: tuple[Tensor, ...],
    xs: tuple[Tensor, ...],
    ws: tuple[Tensor, ...],
    retain_graph: bool,
    detach: bool,
) -> tuple[Tensor, ...]:
    """Return :func:`vjp` of several vectors, ``[V, *x]`` each."""
    slices = [*zip(*[w.split(1) for w in ws], strict=True)]
    keeps = [True] * (len(slices) - 1) + [retain_graph]  # the others need the graph again
    pairs = zip(slices, keeps, strict=True)
    each = [vjp(ys, xs, one, keep, detach, several=True) for one, keep in pairs]
    return tuple(map(torch.cat, zip(*each, strict=True)))


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Set the hooks of leaves aside, which change gradients, and no Jacobian."""
    found = [x._backward_hooks for x in tensors if x.is_leaf and x._backward_hooks is not None]
    with _hooks_are_aside if found else nullcontext():  # other threads may differentiate, too
        held = [(own, dict(own)) for own in found]
        try:
            for own, _ in held:
                own.clear()
            yield
        finally:
            for own, hooks in held:
                own.update(hooks)


def as_tuple(tensors: Tensor | Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Wrap a single tensor into a tuple, convert other iterables.

    Args:
        tensors: One or several tensors.

    Returns:
        The tensors.
    """
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def check_same_shapes(
    name: str, tensors: tuple[Tensor, ...], other_name: str, others: tuple[Tensor, ...]
) -> None:
    """Check that two tuples of tensors have the same length and shapes.

    Args:
        name: Name of the first argument in the error message.
        tensors: Tensors to check.
        other_name: Name of the second argument in the error message.
        others: Tensors whose shapes are expected.

    Raises:
        ValueError: If a length or a shape differs.
    """
    if len(tensors) != len(others):
        raise ValueError(
            f"{name} and {other_name} must have the same length, "
            f"got {len(tensors)} and {len(others)}."
        )
    for i, (tensor, other) in enumerate(zip(tensors, others, strict=True)):
        if tensor.shape != other.shape:
            raise ValueError(
                f"{name}[{i}] and {other_name}[{i}] must have the same shape, "
                f"got {tuple(tensor.shape)} and {tuple(other.shape)}."
            )


def check_varies(ys: tuple[Tensor, ...]) -> None:
    """Check that there is a graph to differentiate.

    Args:
        ys: Outputs of a function.

    Raises:
        ValueError: If there is none.
    """
    if not any(y.requires_grad for y in ys):
        raise ValueError("None of ys requires a gradient: were they computed without a graph?")

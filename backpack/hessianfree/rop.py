"""Products with Jacobians."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from backpack.hessianfree.graph import nodes_above
from backpack.hessianfree.lop import L_op, as_tuple, check_same_shapes, vjp


@torch.inference_mode(False)
def R_op(
    ys: Tensor | Iterable[Tensor],
    xs: Tensor | Iterable[Tensor],
    vs: Tensor | Iterable[Tensor],
    retain_graph: bool = True,
    detach: bool = True,
) -> tuple[Tensor, ...]:
    """Multiply with the Jacobian of ``ys`` with respect to ``xs``.

    The map ``w ↦ Jᵀ w`` is linear with Jacobian ``Jᵀ``, so its transposed Jacobian is ``J``: two
    reverse-mode derivatives make one forward-mode derivative. This double-backward trick is due to
    Jamie Townsend, "A new trick for calculating Jacobian vector products" (blog post, 2017).

    Args:
        ys: Outputs of the function. ``[*y]`` each
        xs: Inputs of the function. ``[*x]`` each
        vs: Tensors to multiply with, shaped like the inputs. ``[*x]`` each
        retain_graph: Keep the graph for further derivatives. Otherwise, autograd frees the part of
            it that the second derivative uses.
        detach: Return tensors without a graph. Otherwise, the result can be differentiated.

    Returns:
        The product ``J v``, zero for outputs that do not depend on the inputs. ``[*y]`` each

    Raises:
        ValueError: If ``vs`` does not have the length and the shapes of ``xs``, or ``ys`` have no
            graph to differentiate.
    """
    ys, xs, vs = as_tuple(ys), as_tuple(xs), as_tuple(vs)
    check_same_shapes("vs", vs, "xs", xs)

    # anywhere but at zero, where torch has no derivative of logcumsumexp's gradient
    ws = tuple(torch.ones_like(y, requires_grad=True) for y in ys)
    transposed_products = L_op(ys, xs, ws, detach=False)
    products = vjp(transposed_products, ws, vs, retain_graph=retain_graph, detach=detach)
    if torch._C._functorch.peek_interpreter_stack() is None and not torch.compiler.is_compiling():
        check_adjoint(products, ws, vs, transposed_products)
    return products


def check_adjoint(
    products: Sequence[Tensor],
    ws: Sequence[Tensor],
    vs: Sequence[Tensor],
    transposed: Sequence[Tensor],
) -> None:
    """Refuse two derivatives of which one is not the transposed: ``⟨J v, w⟩`` is ``⟨v, Jᵀ w⟩``.

    Args:
        products: ``J v``, in the shapes of the outputs.
        ws: ``w``, in these shapes, too.
        vs: ``v``, in the shapes of the inputs.
        transposed: ``Jᵀ w``, in these shapes, too.

    Raises:
        RuntimeError: If that does not hold, up to coarse rounding of the lowest precision that
            something is computed in (functions may be in ``TF32``).
    """
    first = ws[0]
    if first.is_meta or (first.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    pairs = [*zip(products, ws, strict=True)], [*zip(vs, transposed, strict=True)]
    with torch.no_grad():
        terms = [[(a * b.conj()).real.double() for a, b in each] for each in pairs]
    one, other = (sum(float(x.sum()) for x in each) for each in terms)
    scale = sum(float(x.abs().sum()) for each in terms for x in each)
    difference = abs(one - other)
    if not math.isfinite(scale) or difference <= torch.finfo(first.dtype).eps ** 0.25 * scale:
        return
    nodes = nodes_above([x.grad_fn for x in transposed])
    kinds = {x.dtype for node in nodes for x in node._input_metadata if x.dtype.is_floating_point}
    if difference > max(torch.finfo(kind).eps for kind in {first.dtype, *kinds}) ** 0.25 * scale:
        raise RuntimeError(
            "The gradient is not a linear function of what it is multiplied with, as autograd "
            "differentiates it, so products with the Jacobian would be wrong. A backward pass that "
            "cannot be differentiated may be the reason (solvers with an adjoint method, hooks "
            "with torch.no_grad()), or a hook that changes gradients: differentiate through the "
            "solver (odeint in the place of odeint_adjoint)."
        )


jacobian_vector_product = R_op

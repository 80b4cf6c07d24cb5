"""Products with Jacobians."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from backpack.hessianfree.lop import L_op, as_tuple, check_same_shapes, vjp


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
    return vjp(transposed_products, ws, vs, retain_graph=retain_graph, detach=detach)


jacobian_vector_product = R_op

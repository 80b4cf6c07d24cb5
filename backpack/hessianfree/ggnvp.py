"""Products with generalized Gauss-Newton matrices."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd import grad
from torch.nn import Module

from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import L_op, as_tuple
from backpack.hessianfree.rop import R_op


def ggn_vector_product(
    loss: Tensor, output: Tensor, model: Module, v: Tensor | Iterable[Tensor]
) -> tuple[Tensor, ...]:
    """Multiply with the generalized Gauss-Newton matrix of a model's trainable parameters.

    Args:
        loss: Scalar loss.
        output: Output of the model from which the loss was computed. ``[*out]``
        model: The model.
        v: Tensors to multiply with, shaped like the trainable parameters. ``[*p]`` each

    Returns:
        The product ``G v``, see :func:`ggn_vector_product_from_plist`. ``[*p]`` each

    Raises:
        ValueError: If ``v`` does not have the length and shapes of the trainable parameters.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    return ggn_vector_product_from_plist(loss, output, trainable, v)


def ggn_vector_product_from_plist(
    loss: Tensor,
    output: Tensor,
    plist: Tensor | Iterable[Tensor],
    v: Tensor | Iterable[Tensor],
) -> tuple[Tensor, ...]:
    """Multiply with the generalized Gauss-Newton matrix of a list of parameters.

    The matrix is ``G = Jᵀ H J`` with the Jacobian ``J`` of the output with respect to the
    parameters and the Hessian ``H`` of the loss with respect to the output (Schraudolph, "Fast
    curvature matrix-vector products for second-order gradient descent", Neural Computation 2002).

    Args:
        loss: Scalar loss.
        output: Output of the model from which the loss was computed. ``[*out]``
        plist: The parameters. ``[*p]`` each
        v: Tensors to multiply with, shaped like the parameters. ``[*p]`` each

    Returns:
        The product ``G v``, zero for parameters that the output does not depend on. ``[*p]`` each

    Raises:
        ValueError: If ``v`` does not have the length and shapes of ``plist``.
        RuntimeError: If the loss does not depend on the output.
    """
    plist = as_tuple(plist)
    j_v = R_op(output, plist, v)
    grad_output = grad(loss, output, create_graph=True, allow_unused=True)
    if any(g is None for g in grad_output):  # zeros would be right, but are not what is meant
        raise RuntimeError(
            "The loss does not depend on the output. Give the very tensor that it was computed "
            "from: another call of the model returns another one."
        )
    h_j_v = hessian_vector_product(loss, output, j_v, grad_params=grad_output)
    return L_op(output, plist, h_j_v)

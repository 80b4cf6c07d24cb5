"""Products with Hessians."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from backpack.hessianfree.graph import nodes_above
from backpack.hessianfree.lop import L_op, as_tuple, check_same_shapes, vjp
from backpack.hessianfree.twice import differentiable_gradients


@torch.inference_mode(False)
def hessian_vector_product(
    f: Tensor,
    params: Tensor | Iterable[Tensor],
    v: Tensor | Iterable[Tensor],
    grad_params: Tensor | Iterable[Tensor] | None = None,
    detach: bool = True,
) -> tuple[Tensor, ...]:
    """Multiply with the Hessian of ``f`` with respect to ``params``.

    The Hessian is the Jacobian of the gradient, and symmetric (Pearlmutter, "Fast exact
    multiplication by the Hessian", Neural Computation 1994).

    Args:
        f: Scalar.
        params: Tensors that ``f`` depends on. ``[*p]`` each
        v: Tensors to multiply with, shaped like the parameters. ``[*p]`` each
        grad_params: Gradient of ``f`` with respect to ``params``, with its graph, if it is known
            already. ``[*p]`` each. Parts without a graph are computed again, from that of ``f``.
        detach: Return tensors without a graph. Otherwise, the result can be differentiated.

    Returns:
        The product ``H v``, zero for parameters that ``f`` does not depend on. ``[*p]`` each

    Raises:
        ValueError: If ``f`` is not a scalar, or ``v`` or ``grad_params`` do not have the length and
            shapes of ``params``.
        NotImplementedError: If a function of torch has normalised one of the parameters
            (``torch.nn.utils.weight_norm``): its second derivative is wrong.
        RuntimeError: If a function has a backward pass that autograd takes for a constant.
    """
    params, v = as_tuple(params), as_tuple(v)
    check_same_shapes("v", v, "params", params)
    if f.numel() != 1:
        raise ValueError(f"f must be a scalar, got shape {tuple(f.shape)}.")

    if _are_weight_normalised(f, params):
        raise NotImplementedError(
            "The second derivative that torch has of weight normalisation takes the norms for "
            "constants, and the product would be wrong. Use HMP (or DiagHessian) of "
            "backpack.extensions, which is right there."
        )
    gradient = params if grad_params is None else as_tuple(grad_params)
    check_same_shapes("grad_params", gradient, "params", params)
    known = [grad_params is not None and g.requires_grad for g in gradient]
    if not all(known) and (f.requires_grad or not any(known)):
        # what has no graph need not be constant
        lacking = [p for p, is_known in zip(params, known, strict=True) if not is_known]
        seed = torch.ones_like(f, requires_grad=True)
        with differentiable_gradients([f], lacking):
            found = iter(L_op(f, lacking, seed, detach=False))
        pairs = zip(gradient, known, strict=True)
        gradient = tuple(g if is_known else next(found) for g, is_known in pairs)
    return vjp(gradient, params, v, detach=detach)


def _are_weight_normalised(f: Tensor, params: Sequence[Tensor]) -> bool:
    """Whether the fused function of torch has normalised a parameter that f depends on."""
    if not any(p.is_leaf for p in params):  # such as outputs, of which a GGN is made
        return False
    above = nodes_above([f.grad_fn])
    fused = [node for node in above if type(node).__name__.startswith("WeightNormInterface")]
    leaves = [getattr(node, "variable", None) for node in nodes_above(fused)]
    return any(leaf is p for leaf in leaves for p in params)

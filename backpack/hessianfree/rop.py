"""Products with Jacobians."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from backpack.hessianfree.graph import nodes_above
from backpack.hessianfree.lop import as_tuple, check_same_shapes, check_varies, vjp
from backpack.hessianfree.twice import differentiable_gradients


@torch.inference_mode(False)
def R_op(
    ys: Tensor | Iterable[Tensor],
    xs: Tensor | Iterable[Tensor],
    vs: Tensor | Iterable[Tensor],
    retain_graph: bool = True,
    detach: bool = True,
) -> tuple[Tensor, ...]:
    """Multiply with the Jacobian of ``ys`` with respect to ``xs``.

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
    check_varies(ys)
    return pushforward(ys, xs)(vs, retain_graph=retain_graph, detach=detach)


class Pushforward(Protocol):
    """The map ``v ↦ J v``, of V vectors ``[V, *x]`` if they are several."""

    def __call__(
        self,
        vs: tuple[Tensor, ...],
        retain_graph: bool = True,
        detach: bool = True,
        several: bool = False,
    ) -> tuple[Tensor, ...]:
        """Multiply."""


def pushforward(ys: tuple[Tensor, ...], xs: tuple[Tensor, ...]) -> Pushforward:
    """Return the map ``v ↦ J v``, of which each product costs a backward pass.

    The map ``w ↦ Jᵀ w`` is linear with Jacobian ``Jᵀ``, so its transposed Jacobian is ``J``: two
    reverse-mode derivatives make one forward-mode derivative. This double-backward trick is due to
    Jamie Townsend, "A new trick for calculating Jacobian vector products" (blog post, 2017).

    Raises:
        RuntimeError: If a function has a backward pass that autograd takes for a constant. By the
            map, if the backward pass is not differentiated as it should be.
    """
    ws = tuple(_anywhere(y) for y in ys)
    with differentiable_gradients(ys, xs):
        transposed = vjp(ys, xs, ws, detach=False)

    def product(
        vs: tuple[Tensor, ...],
        retain_graph: bool = True,
        detach: bool = True,
        several: bool = False,
    ) -> tuple[Tensor, ...]:
        products = vjp(transposed, ws, vs, retain_graph, detach, several)
        is_plain = torch._C._functorch.peek_interpreter_stack() is None
        if is_plain and not torch.compiler.is_compiling():
            one, image = ([x[0] for x in each] if several else each for each in (vs, products))
            check_adjoint(ys, image, ws, one, transposed)
        return products

    return product


def _anywhere(y: Tensor) -> Tensor:
    """Return where the linear map is differentiated, of the shape of an output.

    Not at zero, where torch has no derivative of logcumsumexp's gradient, nor where outputs that
    have a constant sum, such as those of softmax, would look like constants.
    """
    w = torch.ones_like(y, requires_grad=True)
    with torch.no_grad():
        return w.add_(torch.arange(y.numel(), device=y.device).cos().reshape(y.shape), alpha=0.5)


def check_adjoint(
    ys: Sequence[Tensor],
    products: Sequence[Tensor],
    ws: Sequence[Tensor],
    vs: Sequence[Tensor],
    transposed: Sequence[Tensor],
) -> None:
    """Refuse two derivatives of which one is not the transposed: ``⟨J v, w⟩`` is ``⟨v, Jᵀ w⟩``.

    Args:
        ys: The outputs.
        products: ``J v``, in the shapes of the outputs.
        ws: ``w``, in these shapes, too.
        vs: ``v``, in the shapes of the inputs.
        transposed: ``Jᵀ w``, in these shapes, too.

    Raises:
        RuntimeError: If that does not hold, up to coarse rounding of the lowest precision that
            something is computed in (functions may be in ``TF32``). Where the derivative is zero,
            such as that of a bias before a normalisation, rounding is that of the outputs.
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
    eps = max(torch.finfo(kind).eps for kind in {first.dtype, *kinds})
    # the median: a few entries may be masked by huge numbers
    sizes = [[x.detach().abs().double() for x in each if x.numel()] for each in (ys, vs)]
    of_outputs = math.hypot(*(float(x.median()) * x.numel() ** 0.5 for x in sizes[0]))
    rounding = eps**0.5 * of_outputs * math.hypot(*(float(x.norm()) for x in sizes[1]))
    if difference > max(eps**0.25 * scale, rounding):
        raise RuntimeError(
            "The gradient is not a linear function of what it is multiplied with, as autograd "
            "differentiates it, so products with the Jacobian would be wrong. A backward pass that "
            "cannot be differentiated may be the reason (solvers with an adjoint method, hooks "
            "with torch.no_grad()), or a hook that changes gradients: differentiate through the "
            "solver (odeint in the place of odeint_adjoint)."
        )


jacobian_vector_product = R_op

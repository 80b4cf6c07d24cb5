"""The ground truth: every quantity of the library by plain autograd.

Nothing of ``backpack`` is imported. Each function takes ``(model, lossfunc, X, y)`` and
returns a list with one entry per trainable parameter, in the order of
``model.parameters()`` (tied parameters once). The batch axis is always axis 0.

Every function runs the model forward exactly once, so that a ``torch.manual_seed`` right
before it fixes the masks of dropout.

Letters: ``N`` samples, ``C`` entries of one sample's output, ``P`` entries of a parameter of
shape ``*p``, ``V`` columns of a factor, ``D`` entries of one sample's activation, ``T``
positions, ``G`` groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KRON = (nn.Linear, *CONV, *CONV_TRANSPOSE)  # their weights have two Kronecker factors

# --------------------------------------------------------------------------------------
# Building blocks
# --------------------------------------------------------------------------------------


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the results belong to, in order."""
    return [p for p in model.parameters() if p.requires_grad]


def _grad(
    y: Tensor, xs: Sequence[Tensor], v: Tensor | None = None, create_graph: bool = False
) -> Sequence[Tensor]:
    """Return ``v^T dy/dx`` for each x, zeros where y does not depend on x."""
    if not xs or not y.requires_grad:
        return [torch.zeros_like(x) for x in xs]
    return torch.autograd.grad(
        y, xs, v, retain_graph=True, create_graph=create_graph, materialize_grads=True
    )


def _jacobian(y: Tensor, xs: Sequence[Tensor]) -> list[Tensor]:
    """Return dy/dx for each x, row by row: [numel(y), numel(x)]."""
    rows = [_grad(entry, xs) for entry in y.flatten().unbind()]
    return [torch.stack([row[i].flatten() for row in rows]) for i in range(len(xs))]


def _per_sample_jacobian(y: Tensor, x: Tensor) -> Tensor:
    """Return dy_n/dx_n [N, D_y, D_x] of activations; samples must not mix."""
    (rows,) = _jacobian(y.flatten(1).sum(0), [x])
    return rows.reshape(rows.shape[0], x.shape[0], -1).transpose(0, 1)


def _output_jacobian(f: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return df/dp [N, C, P] for each parameter."""
    return [J.reshape(f.shape[0], -1, J.shape[1]) for J in _jacobian(f, params)]


def _loss_derivatives(lossfunc: Loss, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradient [*f] and Hessian [N*C, N*C] of the loss with respect to its input."""
    f = f.detach().requires_grad_()
    (gradient,) = _grad(lossfunc(f, y), [f], create_graph=True)
    (hessian,) = _jacobian(gradient, [f])
    return gradient.detach(), hessian


def _loss_hessian_blocks(lossfunc: Loss, f: Tensor, y: Tensor) -> Tensor:
    """Return each sample's block [N, C, C] of the loss Hessian."""
    N = f.shape[0]
    _, H = _loss_derivatives(lossfunc, f, y)
    H = H.reshape(N, f.numel() // N, N, f.numel() // N)
    return torch.stack([H[n, :, n, :] for n in range(N)])


def _diagonals(blocks: list[Tensor], params: list[nn.Parameter]) -> list[Tensor]:
    return [block.diagonal().reshape(p.shape) for block, p in zip(blocks, params, strict=True)]


# --------------------------------------------------------------------------------------
# First order
# --------------------------------------------------------------------------------------


def grad(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Gradient of the loss: [*p]."""
    return list(_grad(lossfunc(model(X), y), trainable(model)))


def batch_grad(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Gradient of each sample's contribution to the reduced loss: [N, *p]."""
    f = model(X)
    g, _ = _loss_derivatives(lossfunc, f, y)
    per_sample = [_grad(f[n], trainable(model), g[n]) for n in range(f.shape[0])]
    return [torch.stack(grads) for grads in zip(*per_sample, strict=True)]


def batch_l2(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Squared norm of each individual gradient: [N]."""
    return [(g**2).flatten(1).sum(1) for g in batch_grad(model, lossfunc, X, y)]


def sum_grad_squared(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Sum over the samples of the squared individual gradients: [*p]."""
    return [(g**2).sum(0) for g in batch_grad(model, lossfunc, X, y)]


def variance(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Biased variance of the individual gradients: [*p]."""
    return [(g**2).mean(0) - g.mean(0) ** 2 for g in batch_grad(model, lossfunc, X, y)]


# --------------------------------------------------------------------------------------
# Generalized Gauss-Newton
# --------------------------------------------------------------------------------------


def ggn_blocks(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Sum over n of ``J_n^T H_n J_n``: [P, P]."""
    f = model(X)
    H = _loss_hessian_blocks(lossfunc, f, y)
    return [einsum("ncp,ncd,ndq->pq", J, H, J) for J in _output_jacobian(f, trainable(model))]


def ggn_diag(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Diagonal of the GGN: [*p]."""
    return _diagonals(ggn_blocks(model, lossfunc, X, y), trainable(model))


def batch_ggn_diag(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Diagonal of each sample's ``J_n^T H_n J_n``: [N, *p]."""
    f = model(X)
    H = _loss_hessian_blocks(lossfunc, f, y)
    params = trainable(model)
    return [
        einsum("ncp,ncd,ndp->np", J, H, J).reshape(-1, *p.shape)
        for J, p in zip(_output_jacobian(f, params), params, strict=True)
    ]


def joint_ggn_blocks(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """``J^T H J`` of the whole output, for models that mix samples: [P, P]."""
    f = model(X)
    _, H = _loss_derivatives(lossfunc, f, y)
    return [J.T @ H @ J for J in _jacobian(f, trainable(model))]


def joint_ggn_diag(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Diagonal of ``J^T H J`` of the whole output, for models that mix samples: [*p]."""
    return _diagonals(joint_ggn_blocks(model, lossfunc, X, y), trainable(model))


# --------------------------------------------------------------------------------------
# Hessian
# --------------------------------------------------------------------------------------


def _hessians(loss: Tensor, params: list[nn.Parameter]) -> list[Tensor]:
    gradients = _grad(loss, params, create_graph=True)
    return [_jacobian(g, [p])[0] for g, p in zip(gradients, params, strict=True)]


def hessian_blocks(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Hessian of the loss with respect to each parameter: [P, P]."""
    return _hessians(lossfunc(model(X), y), trainable(model))


def hessian_diag(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Diagonal of the Hessian: [*p]."""
    return _diagonals(hessian_blocks(model, lossfunc, X, y), trainable(model))


def batch_hessian_diag(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Diagonal of the Hessian of each sample's contribution to the loss: [N, *p]."""
    f = model(X)
    params = trainable(model)
    per_sample = []
    for n in range(f.shape[0]):
        others_fixed = torch.cat([f[:n].detach(), f[n : n + 1], f[n + 1 :].detach()])
        per_sample.append(_diagonals(_hessians(lossfunc(others_fixed, y), params), params))
    return [torch.stack(diagonals) for diagonals in zip(*per_sample, strict=True)]


# --------------------------------------------------------------------------------------
# Module calls
# --------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One module call; ``output`` is part of the graph."""

    module: nn.Module
    input: Tensor
    output: Tensor


def _record_calls(model: nn.Module, X: Tensor) -> tuple[Tensor, list[Call]]:
    """Return the model's output and the calls of all modules with Kronecker factors."""
    calls: list[Call] = []

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        calls.append(Call(module, args[0].detach().clone(), output))
        return output.clone()  # an in-place module behind must not overwrite `output`

    handles = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, KRON)]
    try:
        return model(X), calls
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a (nested) Sequential in order."""
    if isinstance(model, nn.Sequential):
        return [layer for child in model for layer in _layers(child)]
    if any(model.children()):
        raise TypeError(f"Only for Sequential, not for {type(model).__name__}.")
    return [model]


def _sequential_calls(model: nn.Module, X: Tensor) -> tuple[Tensor, list[Call]]:
    """Run a Sequential layer by layer, cutting the graph at every layer's input."""
    calls, x = [], X
    for layer in _layers(model):
        x = x.detach().requires_grad_(x.is_floating_point())
        calls.append(Call(layer, x, layer(x.clone())))
        x = calls[-1].output
    owned = [id(p) for layer in _layers(model) for p in layer.parameters()]
    if len(owned) != len(set(owned)):
        raise ValueError("Only for models that use each parameter once.")
    return x.detach(), calls


# --------------------------------------------------------------------------------------
# Positive-curvature Hessian
# --------------------------------------------------------------------------------------


def pch_blocks(
    model: nn.Sequential, lossfunc: Loss, X: Tensor, y: Tensor, modify: str
) -> list[Tensor]:
    """Positive-curvature Hessian of a Sequential: [P, P].

    From the last module to the first, per sample: ``H_in = J^T H_out J + modify(residual)``
    with ``residual = diag(sum_k delta_k d²y_k/dx²)``. ``modify`` is "clip" or "abs".
    """
    modification = {"clip": lambda t: t.clamp(min=0.0), "abs": torch.abs}[modify]
    f, calls = _sequential_calls(model, X)
    delta, _ = _loss_derivatives(lossfunc, f, y)  # [N, *out]
    H = _loss_hessian_blocks(lossfunc, f, y)  # [N, D, D]

    blocks = {}
    for call in reversed(calls):
        module, x, out = call
        params = trainable(module)
        for p, J in zip(params, _output_jacobian(out, params), strict=True):
            blocks[p] = einsum("ncp,ncd,ndq->pq", J, H, J)
        if call is calls[0]:
            break
        J = _per_sample_jacobian(out, x)
        (delta,) = _grad(out, [x], delta, create_graph=True)
        residual = _per_sample_jacobian(delta, x)  # [N, D, D]
        delta = delta.detach()
        diagonal = residual.diagonal(dim1=1, dim2=2).diag_embed()
        if not torch.equal(residual, diagonal):
            raise ValueError(f"The residual of {type(module).__name__} is not diagonal.")
        H = einsum("nca,ncd,ndb->nab", J, H, J) + modification(diagonal)

    return [blocks[p] for p in trainable(model)]


# --------------------------------------------------------------------------------------
# Kronecker factors
# --------------------------------------------------------------------------------------


def unfold_input(module: nn.Module, x: Tensor) -> Tensor:
    """Return the vectors that the weight is multiplied with, per group: [N, G, a, T].

    ``a`` is ``I`` for Linear, ``I/groups * prod(k)`` for convolutions (G = groups), and
    ``I * prod(k)`` for transposed convolutions (G = 1, all inputs).
    """
    if isinstance(module, nn.Linear):
        return x.reshape(x.shape[0], 1, -1, x.shape[-1]).transpose(2, 3)

    N, inputs = x.shape[:2]
    kernel = module.kernel_size

    if isinstance(module, CONV):
        mode = {"zeros": "constant"}.get(module.padding_mode, module.padding_mode)
        x = F.pad(x, _padding(module), mode=mode)
        for axis, (k, s, d) in enumerate(
            zip(kernel, module.stride, module.dilation, strict=True), start=2
        ):
            x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]  # [N, I, *T, *k]
        x = x.flatten(2, 1 + len(kernel)).flatten(3).transpose(2, 3)  # [N, I, k, T]
        return x.reshape(N, module.groups, -1, x.shape[-1])

    # transposed: every (input channel, kernel entry) becomes an output channel of its own
    conv = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[len(kernel)]
    K = math.prod(kernel)
    one_hot = torch.eye(K, dtype=x.dtype, device=x.device).reshape(1, K, *kernel)
    x = conv(
        x,
        one_hot.expand(inputs, *one_hot.shape[1:]),
        stride=module.stride,
        padding=module.padding,
        output_padding=module.output_padding,
        dilation=module.dilation,
        groups=inputs,
    )
    return x.reshape(N, 1, inputs * K, -1)


def _padding(conv: nn.Module) -> list[int]:
    """Return the padding in the order of ``F.pad``: last axis first, left before right."""
    amounts: list[int] = []
    for axis in reversed(range(len(conv.kernel_size))):
        if conv.padding == "valid":
            left = right = 0
        elif conv.padding == "same":
            total = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
            left, right = total // 2, total - total // 2
        else:
            left = right = conv.padding[axis]
        amounts += [left, right]
    return amounts


def _sum_positions(module: nn.Module, s: Tensor) -> Tensor:
    """Sum a factor [B, *out] over the positions: [B, G, O/G] (G = 1 unless transposed)."""
    if isinstance(module, nn.Linear):
        return s.reshape(s.shape[0], 1, -1, s.shape[-1]).sum(2)
    G = module.groups if isinstance(module, CONV_TRANSPOSE) else 1
    return s.reshape(s.shape[0], G, s.shape[1] // G, -1).sum(3)


def _kron_uses(p: Tensor, calls: list[Call], model: nn.Module) -> list[Call]:
    """Return the calls that use p, if p is always a weight with Kronecker factors."""
    owners = [m for m in model.modules() if any(q is p for q in m._parameters.values())]
    if not all(isinstance(m, KRON) and m.weight is p for m in owners):
        return []
    return [call for call in calls if call.module in owners]


def _input_factor(uses: list[Call]) -> Tensor:
    """Return A [a, a]: sum over uses and positions, mean over samples and groups."""
    unfolded = [unfold_input(module, x) for module, x, _ in uses]
    return sum(einsum("ngat,ngbt->ab", u, u) / (u.shape[0] * u.shape[1]) for u in unfolded)


def kflr(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Kronecker factors [B, A] of weights; the exact GGN block for everything else."""
    f, calls = _record_calls(model, X)
    H = _loss_hessian_blocks(lossfunc, f, y)
    values, vectors = torch.linalg.eigh(H)
    S = vectors * values.clamp(min=0.0).sqrt().unsqueeze(1)  # [N, C, V], H = S S^T

    result = []
    for p in trainable(model):
        uses = _kron_uses(p, calls, model)
        if not uses:
            (J,) = _output_jacobian(f, [p])
            result.append([einsum("ncp,ncd,ndq->pq", J, H, J)])
            continue
        columns = []
        for column in S.unbind(2):
            backpropagated = _grad(f, [call.output for call in uses], column.reshape(f.shape))
            columns.append(
                sum(
                    _sum_positions(call.module, s)
                    for call, s in zip(uses, backpropagated, strict=True)
                )
            )
        s = torch.stack(columns)  # [V, N, G, O/G]
        B = einsum("vngi,vngj->ij", s, s) / s.shape[2]
        result.append([B, _input_factor(uses)])
    return result


def kfra(model: nn.Sequential, lossfunc: Loss, X: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Kronecker factors of a Sequential from the matrix averaged after every module."""
    f, calls = _sequential_calls(model, X)
    N = X.shape[0]
    M = _loss_hessian_blocks(lossfunc, f, y).sum(0)  # [D, D]

    factors = {}
    for call in reversed(calls):
        module, x, out = call
        params = trainable(module)
        for p, J in zip(params, _output_jacobian(out, params), strict=True):
            if _kron_uses(p, calls, model):
                eye = torch.eye(M.shape[0], dtype=M.dtype, device=M.device)
                E = _sum_positions(module, eye.reshape(-1, *out.shape[1:]))  # [D, G, O/G]
                B = einsum("agi,ab,bgj->ij", E, M, E) / E.shape[1]
                factors[p] = [B, _input_factor([call])]
            else:
                factors[p] = [einsum("ncp,cd,ndq->pq", J, M, J) / N]
        if call is calls[0]:
            break
        J = _per_sample_jacobian(out, x)
        M = einsum("nca,cd,ndb->ab", J, M, J) / N

    return [factors[p] for p in trainable(model)]

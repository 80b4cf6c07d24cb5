"""The ground truth: every quantity of the library by plain autograd.

Nothing of ``backpack`` is imported. Each function takes ``(model, lossfunc, X, y)`` and
returns a list with one entry per trainable parameter, in the order of
``model.parameters()`` (tied parameters once). The batch axis is always axis 0.

Every function runs the model forward exactly once, so that a ``torch.manual_seed`` right
before it fixes the masks of dropout.

Recurrent layers, and modules that autograd cannot differentiate twice, have to be replaced
first: :func:`twin`. ``module.batch_axis = 1`` tells that the samples are not along the first
axis of what a Linear or an Embedding reads and returns.

Letters: ``N`` samples, ``C`` entries of one sample's output, ``P`` entries of a parameter of
shape ``*p``, ``V`` columns of a factor, ``D`` entries of one sample's activation, ``T``
positions, ``G`` groups.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Loss = Callable[[Tensor, Tensor], Tensor]

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
EMBEDDING = (nn.Embedding, nn.EmbeddingBag)
# their weights have two Kronecker factors
KRON = (nn.Linear, *CONV, *CONV_TRANSPOSE, *EMBEDDING)
TRANSPOSED = "TransposedLinear"  # x W + b, a module of the library


@contextmanager
def exact_weight_norm() -> Iterator[None]:
    """Let weight normalisation be its formula: the second derivative of torch's own is wrong."""

    def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
        axes = [axis for axis in range(v.dim()) if axis != dim]
        return g * v / v.square().sum(axes, keepdim=True).sqrt()

    # parametrizations.weight_norm reads it from torch, torch.nn.utils.weight_norm has it
    old = sys.modules["torch.nn.utils.weight_norm"]
    with (
        mock.patch.object(torch, "_weight_norm", weight_norm),
        mock.patch.object(old, "_weight_norm", weight_norm),
    ):
        yield


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


class Seeded(nn.Module):
    """Draws the same random numbers in each call of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """[N, *] -> [N, O]."""
        torch.manual_seed(2)
        random.seed(2)
        return self.model(x)


def batch_grad_of_one_pass(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """``[N, *p]`` of what is drawn for the whole batch, for a loss that is a mean over samples."""
    output, params, N = model(X), trainable(model), len(X)
    losses = [lossfunc(output[n : n + 1], y[n : n + 1]) / N for n in range(N)]
    grads = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    return [torch.stack(own) for own in zip(*grads, strict=True)]


def batch_l2(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[Tensor]:
    """Squared norm of each individual gradient: [N]."""
    return [(g**2).reshape(len(g), -1).sum(1) for g in batch_grad(model, lossfunc, X, y)]


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
        x = args[0].detach().clone()
        calls.append(Call(module, x.movedim(_batch_axis(module), 0), output))
        return output.clone()  # an in-place module behind must not overwrite `output`

    handles = [m.register_forward_hook(hook) for m in model.modules() if _has_factors(m)]
    try:
        return model(X), calls
    finally:
        for handle in handles:
            handle.remove()


def _batch_axis(module: nn.Module) -> int:
    return getattr(module, "batch_axis", 0)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a (nested) Sequential in order."""
    if isinstance(model, nn.Sequential):
        return [layer for child in model for layer in _layers(child)]
    if any(model.children()) and not isinstance(model, Recurrence):
        raise TypeError(f"Only for Sequential, not for {type(model).__name__}.")
    return [model]


class Step(NamedTuple):
    """One layer of a chain, and the calls in it of modules with Kronecker factors."""

    module: nn.Module
    input: Tensor
    output: Tensor
    calls: list[Call]


def _chain(model: nn.Module, X: Tensor) -> tuple[Tensor, list[Step]]:
    """Run a Sequential layer by layer, cutting the graph at every layer's input.

    A layer that returns a tuple is run together with the next one, which picks a tensor.
    """
    steps, x = [], X
    layers = _layers(model)
    while layers:
        module = layers.pop(0)
        x = x.detach().requires_grad_(x.is_floating_point())
        out, calls = _record_calls(module, x.clone())
        if isinstance(out, tuple):
            picks = layers.pop(0)
            out, module = picks(out), nn.Sequential(module, picks)
        steps.append(Step(module, x, out, calls))
        x = out
    owned = [id(p) for step in steps for p in step.module.parameters()]
    if len(owned) != len(set(owned)):
        raise ValueError("Only for models that use each parameter once.")
    return x.detach(), steps


# --------------------------------------------------------------------------------------
# Positive-curvature Hessian
# --------------------------------------------------------------------------------------


def pch_blocks(
    model: nn.Sequential, lossfunc: Loss, X: Tensor, y: Tensor, modify: str
) -> list[Tensor]:
    """Positive-curvature Hessian of a Sequential: [P, P].

    From the last module to the first, per sample: ``H_in = J^T H_out J + modify(residual)``
    with ``residual = sum_k delta_k d²y_k/dx²``. ``modify`` ("clip" or "abs") acts on its
    eigenvalues.
    """
    modification = {"clip": lambda t: t.clamp(min=0.0), "abs": torch.abs}[modify]
    f, steps = _chain(model, X)
    delta, _ = _loss_derivatives(lossfunc, f, y)  # [N, *out]
    H = _loss_hessian_blocks(lossfunc, f, y)  # [N, D, D]

    blocks = {}
    for step in reversed(steps):
        module, x, out, _ = step
        params = trainable(module)
        for p, J in zip(params, _output_jacobian(out, params), strict=True):
            blocks[p] = einsum("ncp,ncd,ndq->pq", J, H, J)
        if step is steps[0]:
            break
        J = _per_sample_jacobian(out, x)
        (delta,) = _grad(out, [x], delta, create_graph=True)
        residual = _per_sample_jacobian(delta, x)  # [N, D, D]
        delta = delta.detach()
        values, vectors = torch.linalg.eigh(residual)
        positive = einsum("nak,nk,nbk->nab", vectors, modification(values), vectors)
        H = einsum("nca,ncd,ndb->nab", J, H, J) + positive

    return [blocks[p] for p in trainable(model)]


# --------------------------------------------------------------------------------------
# Kronecker factors
# --------------------------------------------------------------------------------------


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a linear layer that stores its weight as [I, O]."""
    return type(module).__name__ == TRANSPOSED


def _has_factors(module: nn.Module) -> bool:
    """Whether the weight of a module has two Kronecker factors."""
    return isinstance(module, KRON) or is_transposed(module)


def _is_input_first(module: nn.Module) -> bool:
    """Whether the first axis of a weight is that of the inputs."""
    return isinstance(module, EMBEDDING) or is_transposed(module)


def unfold_input(module: nn.Module, x: Tensor) -> Tensor:
    """Return the vectors that the weight is multiplied with, per group: [N, G, a, T].

    ``a`` is ``I`` for Linear, ``I/groups * prod(k)`` for convolutions (G = groups),
    ``I * prod(k)`` for transposed convolutions (G = 1, all inputs), and the size of the vocabulary
    for embeddings.
    """
    if isinstance(module, EMBEDDING):
        return _one_hot(module, x).transpose(1, 2).unsqueeze(1)
    if isinstance(module, nn.Linear) or is_transposed(module):
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


def _one_hot(module: nn.Module, x: Tensor) -> Tensor:
    """Return the rows that the weight of an embedding is multiplied with: [N, T, W]."""
    rows = F.one_hot(x.flatten(1), module.num_embeddings).to(module.weight.dtype)
    if module.padding_idx is not None:
        rows = rows * (x.flatten(1) != module.padding_idx).unsqueeze(2)
    if isinstance(module, nn.EmbeddingBag):
        rows = rows.sum(1, keepdim=True)
        return rows / rows.sum(2, keepdim=True) if module.mode == "mean" else rows
    return rows


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
    s = s.movedim(_batch_axis(module), 0)
    if isinstance(module, (nn.Linear, *EMBEDDING)) or is_transposed(module):
        return s.reshape(s.shape[0], 1, -1, s.shape[-1]).sum(2)
    G = module.groups if isinstance(module, CONV_TRANSPOSE) else 1
    return s.reshape(s.shape[0], G, s.shape[1] // G, -1).sum(3)


def _kron_uses(p: Tensor, calls: list[Call], model: nn.Module) -> list[Call]:
    """Return the calls that use p, if p is always a weight with Kronecker factors."""
    owners = [
        m
        for m in model.modules()
        if any(q is p for q in m._parameters.values()) and not isinstance(m, nn.ParameterList)
    ]
    if not all(_has_factors(m) and m.weight is p for m in owners):
        return []
    if len({_is_input_first(m) for m in owners}) > 1:  # the factors have no common order
        return []
    return [call for call in calls if call.module in owners]


def _input_factor(uses: list[Call]) -> Tensor:
    """Return A [a, a]: sum over uses and positions, mean over samples and groups."""
    unfolded = [unfold_input(module, x) for module, x, _ in uses]
    return sum(einsum("ngat,ngbt->ab", u, u) / (u.shape[0] * u.shape[1]) for u in unfolded)


def _arriving(f: Tensor, column: Tensor, uses: list[Call]) -> Tensor:
    """Carry a column [*f] back to the uses of a weight, and sum it over them: [N, G, O/G]."""
    backpropagated = _grad(f, [call.output for call in uses], column)
    pairs = zip(uses, backpropagated, strict=True)
    return sum(_sum_positions(call.module, s) for call, s in pairs)


def _in_order(B: Tensor, uses: list[Call]) -> list[Tensor]:
    """Return the Kronecker factors in the order of the weight's axes."""
    factors = [B, _input_factor(uses)]
    return factors[::-1] if _is_input_first(uses[0].module) else factors


def kflr(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Kronecker factors [B, A] of weights; the exact GGN block for everything else."""
    f, calls = _record_calls(model, X)
    H = _loss_hessian_blocks(lossfunc, f, y)
    values, vectors = torch.linalg.eigh(H)
    S = vectors * values.clamp(min=0.0).sqrt().unsqueeze(1)  # [N, C, V], H = S S^T
    return _factors_of(model, f, calls, S)


def kfac_empirical(model: nn.Module, lossfunc: Any, X: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Kronecker factors [B, A], and blocks, of the empirical Fisher."""
    f, calls = _record_calls(model, X)
    gradient, _ = _loss_derivatives(lossfunc, f, y)
    S = gradient.flatten(1).unsqueeze(2) * math.sqrt(num_terms(lossfunc, f, y))
    return _factors_of(model, f, calls, S)


def kfac_inputs(model: nn.Module, lossfunc: Loss, X: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Kronecker factors [1, A] of weights, the identity for everything else."""
    _, calls = _record_calls(model, X)
    result = []
    for p in trainable(model):
        uses = _kron_uses(p, calls, model)
        A = _input_factor(uses) if uses else torch.ones(1, 1)
        B = torch.eye(p.numel() // len(A), dtype=p.dtype)
        result.append(_in_order(B, uses) if uses else [B])
    return result


def num_terms(lossfunc: Any, f: Tensor, y: Tensor) -> float:
    """Return what the mean over the terms of a loss divides by; 1 for a sum."""
    losses = [m for m in lossfunc.modules() if hasattr(m, "reduction")]
    if all(loss.reduction == "sum" for loss in losses):
        return 1.0
    summed = copy.deepcopy(lossfunc)
    for loss in summed.modules():
        if hasattr(loss, "reduction"):
            loss.reduction = "sum"
    return (summed(f, y) / lossfunc(f, y)).item()


def empirical_blocks(model: nn.Module, lossfunc: Any, X: Tensor, y: Tensor) -> list[Tensor]:
    """Second moments of the individual gradients, on the scale of the loss: [P, P]."""
    f = model(X)
    gradient, _ = _loss_derivatives(lossfunc, f, y)
    root = gradient.flatten(1) * math.sqrt(num_terms(lossfunc, f, y))  # [N, C]
    rows = [einsum("ncp,nc->np", J, root) for J in _output_jacobian(f, trainable(model))]
    return [r.T @ r for r in rows]


def _factors_of(model: nn.Module, f: Tensor, calls: list[Call], S: Tensor) -> list[list[Tensor]]:
    """Kronecker factors of ``J^T S S^T J``, S [N, C, V]; the block where there are none."""
    result = []
    for p in trainable(model):
        uses = _kron_uses(p, calls, model)
        if not uses:
            (J,) = _output_jacobian(f, [p])
            root = einsum("ncp,ncv->nvp", J, S).flatten(0, 1)
            result.append([root.T @ root])
            continue
        # [V, N, G, O/G]
        s = torch.stack([_arriving(f, column.reshape(f.shape), uses) for column in S.unbind(2)])
        result.append(_in_order(einsum("vngi,vngj->ij", s, s) / s.shape[2], uses))
    return result


def kfra(model: nn.Sequential, lossfunc: Loss, X: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Kronecker factors of a Sequential from the matrix averaged after every module."""
    f, steps = _chain(model, X)
    N = X.shape[0]
    M = _loss_hessian_blocks(lossfunc, f, y).sum(0)  # [D, D]

    factors = {}
    for step in reversed(steps):
        module, x, out, calls = step
        params = trainable(module)
        for p, J in zip(params, _output_jacobian(out, params), strict=True):
            uses = _kron_uses(p, calls, model)
            if uses:
                eye = torch.eye(M.shape[0], dtype=M.dtype, device=M.device)
                units = eye.reshape(-1, 1, *out.shape[1:]).expand(-1, *out.shape)
                E = torch.stack([_arriving(out, unit, uses) for unit in units])  # [D, N, G, O]
                B = einsum("angi,ab,bngj->ij", E, M, E) / (N * E.shape[2])
                factors[p] = _in_order(B, uses)
            else:
                factors[p] = [einsum("ncp,cd,ndq->pq", J, M, J) / N]
        if step is steps[0]:
            break
        J = _per_sample_jacobian(out, x)
        M = einsum("nca,cd,ndb->ab", J, M, J) / N

    return [factors[p] for p in trainable(model)]


# --------------------------------------------------------------------------------------
# Twins
# --------------------------------------------------------------------------------------


class Recurrence(nn.Module):
    """A recurrent layer or cell as a loop over time, with a Linear for each product."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.kind, self.is_cell = _kind(original), not isinstance(original, nn.RNNBase)
        self.nonlinearity = {"relu": torch.relu}.get(
            getattr(original, "nonlinearity", ""), torch.tanh
        )
        self.batch_first = getattr(original, "batch_first", False)
        self.hidden_size = original.hidden_size
        # in the order of the original
        self.originals = nn.ParameterList(original.parameters())
        suffixes = [""]
        if not self.is_cell:
            ways = ["", "_reverse"][: 1 + original.bidirectional]
            suffixes = [f"_l{i}{way}" for i in range(original.num_layers) for way in ways]
        self.ways = 1 if self.is_cell else len(ways)

        def linear(weight: str, bias: str, suffix: str) -> nn.Linear | None:
            W, b = (getattr(original, name + suffix, None) for name in (weight, bias))
            if W is None:
                return None
            result = nn.Linear(W.shape[1], W.shape[0], bias=b is not None, device="meta")
            result.weight = W
            if b is not None:
                result.bias = b
            return result

        def all_of(weight: str, bias: str) -> nn.ModuleList:
            return nn.ModuleList([linear(weight, bias, suffix) for suffix in suffixes])

        self.from_input = all_of("weight_ih", "bias_ih")
        self.from_state = all_of("weight_hh", "bias_hh")
        self.projection = all_of("weight_hr", "none")

    def step(self, k: int, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Advance layer k by one step: [N, I] and the states [N, H] -> the states [N, H]."""
        a, b = self.from_input[k](x), self.from_state[k](state[0])
        if self.kind == "rnn":
            return (self.nonlinearity(a + b),)
        if self.kind == "gru":
            (r, z, n), (r_h, z_h, n_h) = a.chunk(3, 1), b.chunk(3, 1)
            r, z = (r + r_h).sigmoid(), (z + z_h).sigmoid()
            return ((1 - z) * (n + r * n_h).tanh() + z * state[0],)
        i, f, g, o = (a + b).chunk(4, 1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h if self.projection[k] is None else self.projection[k](h)), c

    def _start(self, k: int, x: Tensor) -> tuple[Tensor, ...]:
        zeros = x.new_zeros(x.shape[0], self.from_state[k].weight.shape[1])
        if self.kind != "lstm":
            return (zeros,)
        return zeros, x.new_zeros(x.shape[0], self.hidden_size)

    def forward(self, x: Tensor, given: Any = None) -> Any:
        """As torch's."""
        given = (given,) if isinstance(given, Tensor) else given
        if self.is_cell:
            state = self.step(0, x, *(self._start(0, x) if given is None else given))
            return state if len(state) > 1 else state[0]
        x = x.transpose(0, 1) if self.batch_first else x
        finals = []
        for layer in range(len(self.from_input) // self.ways):
            outputs = []
            for way in range(self.ways):
                k = layer * self.ways + way
                state = self._start(k, x[0]) if given is None else tuple(s[k] for s in given)
                over_time = []
                for x_t in x.unbind(0)[:: -1 if way else 1]:
                    state = self.step(k, x_t, *state)
                    over_time.append(state[0])
                outputs.append(torch.stack(over_time[:: -1 if way else 1]))
                finals.append(state)
            x = torch.cat(outputs, -1)
        states = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, (
            states if len(states) > 1 else states[0]
        )


def _kind(module: nn.Module) -> str:
    kinds = {"rnn": nn.RNN | nn.RNNCell, "gru": nn.GRU | nn.GRUCell, "lstm": nn.LSTM | nn.LSTMCell}
    return next((kind for kind, classes in kinds.items() if isinstance(module, classes)), "")


class Bag(nn.EmbeddingBag):
    """Sums (means) of embeddings as the product of counts and the weight."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """[N, T] -> [N, D]."""
        return _one_hot(self, x).squeeze(1) @ self.weight


class Attention(nn.Module):
    """Attention by matrix products, with a Linear for each weight that has one input."""

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        for name in ("embed_dim", "num_heads", "batch_first", "dropout", "add_zero_attn"):
            setattr(self, name, getattr(original, name))
        own = dict(original.named_parameters(remove_duplicate=False))
        self.names, self.originals = list(own), nn.ParameterList(own.values())  # in their order
        self.maps = nn.ModuleDict()
        for name, p in own.items():
            if name.endswith("weight"):
                layer = nn.Linear(p.shape[1], p.shape[0], bias=False, device="meta")
                layer.weight, layer.batch_axis = p, 0 if self.batch_first else 1
                self.maps[name.replace(".", "_")] = layer
        self.train(original.training)

    @property
    def in_proj_bias(self) -> Tensor | None:
        """Return the bias that layers around this one look at."""
        return dict(zip(self.names, self.originals, strict=True)).get("in_proj_bias")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        """As torch's: it gets the projected tensors, and unit matrices for weights."""
        own = dict(zip(self.names, self.originals, strict=True))
        inputs = [query, key, value]
        if "in_proj_weight" not in own:
            parts = [self.maps[f"{c}_proj_weight"](x) for c, x in zip("qkv", inputs, strict=True)]
        elif query is key is value:
            parts = self.maps["in_proj_weight"](query).chunk(3, -1)
        else:
            weights = own["in_proj_weight"].chunk(3)
            parts = [x @ weight.T for x, weight in zip(inputs, weights, strict=True)]
        if self.batch_first:
            parts = [x.transpose(0, 1) for x in parts]
        unit = torch.eye(self.embed_dim, dtype=query.dtype, device=query.device)
        with sdpa_kernel(SDPBackend.MATH):
            attended, weights = F.multi_head_attention_forward(
                *parts,
                self.embed_dim,
                self.num_heads,
                None,
                self.in_proj_bias,
                own.get("bias_k"),
                own.get("bias_v"),
                self.add_zero_attn,
                self.dropout,
                unit,
                None,
                self.training,
                key_padding_mask,
                need_weights,
                attn_mask,
                use_separate_proj_weight=True,
                q_proj_weight=unit,
                k_proj_weight=unit,
                v_proj_weight=unit,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        if self.batch_first:
            attended = attended.transpose(0, 1)
        result = self.maps["out_proj_weight"](attended)
        bias = own.get("out_proj.bias")
        return (result if bias is None else result + bias), weights


class Clamp(nn.Module):
    """Hardsigmoid."""

    def forward(self, x: Tensor) -> Tensor:
        """[*] -> [*]."""
        return (x / 6 + 0.5).clamp(0, 1)


def twin(model: nn.Module) -> nn.Module:
    """Return a model with the same parameters (and values) that all functions here work with."""
    memo: Any = {id(p): p for p in model.parameters()}  # shared
    return as_twin(copy.deepcopy(model, memo))


def as_twin(model: nn.Module) -> nn.Module:
    """Return the same as :func:`twin` of a model that nothing else uses."""
    done: dict[nn.Module, nn.Module] = {}

    def replaced(module: Any) -> nn.Module:
        if module not in done:
            done[module] = _replaced(module)
            for name, child in module._modules.items():
                if done[module] is module and child is not None:
                    module._modules[name] = replaced(child)
        return done[module]

    return replaced(model)


def _replaced(module: Any) -> nn.Module:
    if _kind(module):
        return Recurrence(module)
    if type(module) is nn.MultiheadAttention:
        return Attention(module)
    if type(module) is nn.EmbeddingBag:
        same = Bag.__new__(Bag)
        same.__dict__.update(module.__dict__)
        return same
    return Clamp() if type(module) is nn.Hardsigmoid else module

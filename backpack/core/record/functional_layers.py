"""Functions that are given the parameters of a layer, such as ``F.linear(x, self.weight)``.

A recorded call of one is a call of that layer: it has no parameters of its own. What reads a
parameter in another way is found out to be one later (``read_by_…``), see
:mod:`backpack.core.engine.layers_of_functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn.modules.conv import _ConvTransposeNd

from backpack.custom_module.transposed_linear import TransposedLinear


def _with(kind: type[Module], parameters: dict[str, Any], **options: Any) -> Module | None:
    """Return a layer that has parameters, which are not initialised again.

    None if one of them is something else, such as a weight that was computed.
    """
    if not all(p is None or isinstance(p, Parameter) for p in parameters.values()):
        return None
    module = kind.__new__(kind)
    Module.__init__(module)
    vars(module).update(options)
    for name, p in parameters.items():
        module.register_parameter(name, p)
    return module


def _sizes(value: Any, count: int) -> tuple[int, ...]:
    """Return an option of each axis in space."""
    given = tuple(value) if isinstance(value, Sequence) else (value,)
    return given * count if len(given) == 1 else given


def linear(input: Tensor, weight: Any, bias: Any = None) -> Module | None:
    """Return a linear layer."""
    if input.dim() < 2 or weight.dim() != 2:
        return None
    features = dict(zip(("out_features", "in_features"), weight.shape, strict=True))
    return _with(nn.Linear, {"weight": weight, "bias": bias}, **features)


def product(input: Any, other: Any = None, mat2: Any = None, *, bias: Any = None) -> Module | None:
    """Return a linear layer with the second factor, which is its weight transposed."""
    weight = mat2 if other is None else other
    if not isinstance(weight, Parameter) or weight.dim() != 2 or input.dim() < 2:
        return None
    features = dict(zip(("in_features", "out_features"), weight.shape, strict=True))
    return _with(TransposedLinear, {"weight": weight, "bias": bias}, **features)


class Weight(NamedTuple):
    """A parameter that a function reads, or its transpose, in the place of what it is given."""

    parameter: Parameter
    is_transposed: bool


# A layer, and what it is called with.
Reading = tuple[Module, Tensor]


def read_by_linear(
    input: Any, weight: Any, bias: Any = None, *, contracted: int = 1
) -> Reading | None:
    """``F.linear``, or another sum over the last axis of an input and one axis of a weight."""
    if not (isinstance(input, Tensor) and isinstance(weight, Weight)):
        return None
    p, b = weight.parameter, None if bias is None else getattr(bias, "parameter", bias)
    if p.dim() != 2 or not isinstance(b, Parameter | None):
        return None
    axis = contracted ^ weight.is_transposed
    fits = input.dim() > 1 and input.shape[-1] == p.shape[axis]
    if not fits or (b is not None and b.shape != p.shape[1 - axis : 2 - axis]):
        return None
    layer = linear(input, p, b) if axis else product(input, p, bias=b)
    return None if layer is None else (layer, input)


def read_by_product(input: Any, other: Any = None, mat2: Any = None) -> Reading | None:
    """``input @ other``."""
    return read_by_linear(input, mat2 if other is None else other, contracted=0)


def read_by_addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1
) -> Reading | None:
    """``input + mat1 @ mat2``."""
    is_plain = (beta, alpha) == (1, 1) and isinstance(input, Weight)
    return read_by_linear(mat1, mat2, input, contracted=0) if is_plain else None


def read_by_einsum(equation: Any, *operands: Any) -> Reading | None:
    """``...i,io->...o``, with any letters, and in any order."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    inputs, _, output = equation.replace(" ", "").partition("->")
    pairs = list(zip(inputs.split(","), operands, strict=True))
    (axes, x), (of_weight, weight) = pairs if isinstance(operands[1], Weight) else pairs[::-1]
    kept, contracted = axes[:-1], of_weight.find(axes[-1:])
    letters = kept.replace("...", "")
    if len(of_weight) != 2 or contracted < 0 or len({*letters, *of_weight}) < len(letters) + 2:
        return None
    is_map = output == kept + of_weight[1 - contracted]
    return read_by_linear(x, weight, contracted=contracted) if is_map else None


def read_by_index(input: Any, index: Any) -> Reading | None:
    """``table[index]``: numbers below zero count from the end."""
    is_table = isinstance(input, Weight) and not input.is_transposed and input.parameter.dim() == 2
    kinds = (torch.int64, torch.int32)
    if not is_table or not isinstance(index, Tensor) or index.dtype not in kinds:
        return None
    layer = embedding(index, input.parameter)
    return None if layer is None else (layer, index % len(input.parameter))


OPTIONS = ("stride", "padding", "dilation", "groups")
OPTIONS_OF_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")


def conv(kind: type[Module]) -> Callable[..., Module | None]:
    """Convolutions, transposed or not, with one number of axes in space."""
    transposed = issubclass(kind, _ConvTransposeNd)
    names = OPTIONS_OF_TRANSPOSED if transposed else OPTIONS

    def make(
        input: Tensor, weight: Any, bias: Any = None, *args: Any, **kwargs: Any
    ) -> Module | None:
        axes = weight.dim() - 2
        if input.dim() != weight.dim():  # no axis for the samples
            return None
        options = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
        options |= dict(zip(names, args, strict=False)) | kwargs
        groups = options.pop("groups")
        ends = weight.shape[0], weight.shape[1] * groups
        into, out = ends if transposed else reversed(ends)
        sizes = {
            name: value if isinstance(value, str) else _sizes(value, axes)
            for name, value in options.items()
        }
        kernel_size, fixed = tuple(weight.shape[2:]), {"padding_mode": "zeros", "groups": groups}
        fixed |= {"in_channels": into, "out_channels": out, "transposed": transposed}
        parameters = {"weight": weight, "bias": bias}
        return _with(kind, parameters, kernel_size=kernel_size, **sizes, **fixed)

    return make


def embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Module | None:
    """Return an embedding that changes neither its weight nor its gradient."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None
    sizes = dict(zip(("num_embeddings", "embedding_dim"), weight.shape, strict=True))
    if padding_idx is not None:
        padding_idx %= len(weight)
    options = {"max_norm": None, "norm_type": norm_type, "scale_grad_by_freq": False}
    parameters = {"weight": weight}
    return _with(
        nn.Embedding, parameters, padding_idx=padding_idx, sparse=False, **options, **sizes
    )


def prelu(input: Tensor, weight: Any) -> Module | None:
    """Return a PReLU."""
    return _with(nn.PReLU, {"weight": weight}, num_parameters=weight.numel())


def layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Module | None:
    """Return a layer normalisation with parameters."""
    if weight is None and bias is None:
        return None
    options = {"normalized_shape": _sizes(normalized_shape, 1), "elementwise_affine": True}
    return _with(nn.LayerNorm, {"weight": weight, "bias": bias}, eps=eps, **options)


def rms_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Module | None:
    """Return an RMS normalisation with a parameter."""
    if weight is None:
        return None
    options = {"normalized_shape": _sizes(normalized_shape, 1), "elementwise_affine": True}
    return _with(nn.RMSNorm, {"weight": weight}, eps=eps, **options)


def group_norm(
    input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Module | None:
    """Return a group normalisation."""
    options = {"num_groups": num_groups, "num_channels": input.shape[1], "affine": True}
    return _with(nn.GroupNorm, {"weight": weight, "bias": bias}, eps=eps, **options)


def loss(kind: type[Module]) -> Callable[..., Module | None]:
    """Losses with tensors or None as weights; what is trained reaches the prediction alone."""

    def make(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Module | None:
        given = [x for x in (target, *args, *kwargs.values()) if isinstance(x, Tensor)]
        return None if any(x.requires_grad for x in given) else kind(*args, **kwargs)

    return make


BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Module | None:
    """Batch normalisation: a function of its own would have to act on each sample alone."""
    kind = BATCH_NORMS.get(input.dim())
    are_own = all(p is None or isinstance(p, Parameter) for p in (weight, bias))
    if kind is None or not are_own or isinstance(input, Parameter):
        return None
    module: Any = kind(input.shape[1], eps, momentum, False, not training)
    module.weight, module.bias = weight, bias
    if not training:
        module.running_mean, module.running_var = running_mean, running_var
    return module.train(training)

"""Conversions: from the arguments of a function to modules that compute the same.

A conversion returns an :class:`Apply`, or None where no module does: then the function stays one.
Which function has which conversion is in :mod:`backpack.core.record.functions`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from backpack.core.lazy import lazy
from backpack.core.record.kinds import TENSOR, TENSORS, TrainingFlag, is_number, is_static, kind
from backpack.custom_module.attention import ScaledDotProductAttention
from backpack.custom_module.branching import SumModule
from backpack.custom_module.function_module import FunctionModule, Slot
from backpack.custom_module.pad import Pad
from backpack.custom_module.permanent_dropout import ALWAYS_ON, PermanentAttention
from backpack.custom_module.permute import Permute
from backpack.custom_module.products import MulModule
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.custom_module.stochastic_depth import StochasticDepth


@dataclass(frozen=True)
class Apply:
    """A module, and what to call it with: nodes, numbers, and other applications."""

    module: Module
    inputs: tuple[Any, ...]

    @lazy
    def is_nested(self) -> bool:
        """Whether the results of other modules are among the inputs."""
        return any(isinstance(x, Apply) for x in self.inputs)

    @property
    def takes_flag(self) -> bool:
        """Whether a training flag is among the inputs, which the modules would not follow."""
        is_own = TrainingFlag in map(type, self.inputs)
        return is_own or any(x.takes_flag for x in self.inputs if isinstance(x, Apply))

    @lazy
    def takes_tensors(self) -> bool:
        """Whether the inputs are the tensors of the function, all of them, in their order."""
        return self.inputs == tuple(map(Slot, range(len(self.inputs))))


def layer(make: Callable[..., Module | None]) -> Callable[..., Apply | None]:
    """A layer: the first argument is the tensor, the others are the module's options."""
    options = inspect.signature(make)

    def convert(input: Any, *args: Any, **kwargs: Any) -> Apply | None:
        if not is_static(args, kwargs):
            return None
        bound = options.bind(*args, **kwargs)
        module = make(*bound.args, **bound.kwargs)
        return None if module is None else Apply(module, (input,))

    return convert


def loss(make: Callable[..., Module]) -> Callable[..., Apply | None]:
    """A loss: input and target are tensors, the others are the module's options."""

    def convert(input: Any, target: Any, **options: Any) -> Apply | None:
        options = {name: value for name, value in options.items() if value is not None}
        inspect.signature(make).bind(**options)
        return Apply(make(**options), (input, target)) if is_static(options) else None

    return convert


def class_scores(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``[N, C, *d]`` for an input ``[N, I]`` and a weight ``[C, *d, I]``."""
    scores = torch.tensordot(input, weight, dims=([-1], [-1]))
    return scores if bias is None else scores + bias


def linear_cross_entropy(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    options: Any = None,  # how to do it in parts
    ignore_index: Any = None,
    **others: Any,
) -> Apply | None:
    """Cross entropy of a linear layer: as two modules."""
    weight = others.pop("weight", None)
    if not is_static(ignore_index, others):
        return None
    tensors = [x for x in (input, linear_weight, linear_bias) if x is not None]
    layer = FunctionModule(class_scores, [Slot(i) for i in range(len(tensors))])
    scores = Apply(layer, tuple(tensors))
    others["ignore_index"] = -100 if ignore_index is None else ignore_index
    if weight is None:
        return Apply(nn.CrossEntropyLoss(**others), (scores, target))
    weighted = FunctionModule(nn.functional.cross_entropy, [Slot(0), Slot(1), Slot(2)], others)
    return Apply(weighted, (scores, target, weight))


def weight_of_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return ``g v / ‖v‖``, with norms over all axes but one."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def weight_norm(v: Any, g: Any, dim: Any = 0) -> Apply | None:
    """Weight normalisation by its formula: the fused function's second derivative is wrong.

    Its backward pass takes the norms for constants (torch 2.6 to 2.14).
    """
    if not is_static(dim):
        return None
    return Apply(FunctionModule(weight_of_norm, [Slot(0), Slot(1), dim]), (v, g))


def add(input: Any, other: Any, *, alpha: Any = 1) -> Apply | None:
    """``input + other``: with another alpha, the sum is rounded once, as no module does."""
    return Apply(SumModule(), (input, other)) if _is_one(alpha) else None


def subtract(input: Any, other: Any, *, alpha: Any = 1) -> Apply | None:
    """``input - other``."""
    if not _is_one(alpha):
        return None
    negative = -other if is_number(other) else Apply(ScaleModule(-1), (other,))
    return Apply(SumModule.of_difference(), (input, negative))


def _is_one(alpha: Any) -> bool:
    return is_number(alpha) and alpha == 1


def subtract_from(input: Any, other: Any, *, alpha: Any = 1) -> Apply | None:
    """``other - input``."""
    return subtract(other, input, alpha=alpha)


def multiply(input: Any, other: Any) -> Apply:
    """``input * other``."""
    if is_number(other):
        return Apply(ScaleModule(other), (input,))
    if is_number(input):
        return Apply(ScaleModule(input), (other,))
    return Apply(MulModule(), (input, other))


def divide(input: Any, other: Any, *, rounding_mode: Any = None) -> Apply | None:
    """``input / other``."""
    if rounding_mode is not None or not is_number(other) or other == 0:
        return None
    return Apply(ScaleModule.of_division(other), (input,))


def permute(input: Any, *axes: Any, dims: Any = None) -> Apply | None:
    """Axes one by one, or as a sequence."""
    if dims is None:
        dims = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
    if not isinstance(dims, (tuple, list)) or not all(isinstance(dim, int) for dim in dims):
        return None
    return Apply(Permute(*dims), (input,))


def transpose(input: Any, dim0: Any, dim1: Any) -> Apply | None:
    """Exchange of two axes."""
    if not (isinstance(dim0, int) and isinstance(dim1, int)):
        return None
    return Apply(Permute(dim0, dim1, init_transpose=True), (input,))


def swapaxes(input: Any, axis0: Any, axis1: Any) -> Apply | None:
    """Exchange of two axes, under other names."""
    return transpose(input, axis0, axis1)


def flatten(start_dim: int = 0, end_dim: int = -1) -> Module | None:
    """Flatten axes after the batch axis."""
    if not all(isinstance(dim, int) for dim in (start_dim, end_dim)) or start_dim < 1:
        return None
    return nn.Flatten(start_dim, end_dim)


def unflatten(dim: int, sizes: Any) -> Module | None:
    """Split an axis after the batch axis."""
    sizes = tuple(sizes)
    known = isinstance(dim, int) and dim >= 1 and all(isinstance(s, int) and s > 0 for s in sizes)
    return nn.Unflatten(dim, sizes) if known else None


def getitem(input: Any, index: Any) -> Apply | None:
    """An element of a tuple, or a part of a tensor."""
    plain = isinstance(index, int) and not isinstance(index, bool)
    what = kind(input)
    if plain and what != TENSOR:
        return Apply(ReduceTuple(index), (input,))
    indices = index if isinstance(index, tuple) else (index,)

    def is_basic(one: Any) -> bool:
        integer = isinstance(one, int) and not isinstance(one, bool)
        return one is None or one is ... or integer or (isinstance(one, slice) and is_static(one))

    is_tensor = what == TENSOR or isinstance(index, tuple)
    if not (is_tensor and indices and all(map(is_basic, indices))):
        return None
    return Apply(Slicing(indices), (input,))


def attribute(input: Any, name: str) -> Apply | None:
    """``mT`` of a tensor, ``values`` or ``indices`` of a named tuple."""
    if name == "mT":
        return transpose(input, -2, -1)
    if name in ("values", "indices") and kind(input) == TENSORS:
        return Apply(ReduceTuple(0 if name == "values" else 1), (input,))
    return None


def pad(pad: Any, mode: str = "constant", value: float | None = None) -> Module | None:
    """Padding by known numbers."""
    return Pad(pad, mode, 0.0 if value is None else value)


def softmax(make: Callable[..., Module]) -> Callable[..., Module | None]:
    """Softmax and the like, in the dtype of the input."""

    def options(dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> Module | None:
        return make(dim) if dtype is None and isinstance(_stacklevel, int) else None

    return options


def layer_norm(
    normalized_shape: Any, weight: None = None, bias: None = None, eps: float = 1e-5
) -> Module:
    """Layer normalisation without parameters: those would be no known numbers."""
    return nn.LayerNorm(normalized_shape, eps, elementwise_affine=False)


def rms_norm(normalized_shape: Any, weight: None = None, eps: float | None = None) -> Module:
    """RMS normalisation without parameters."""
    return nn.RMSNorm(normalized_shape, eps, elementwise_affine=False)


def max_pool(make: Callable[..., Module]) -> Callable[..., Module | None]:
    """Maximum pooling: module and function have their options in different orders."""

    def options(
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Module | None:
        if return_indices:
            return None
        return make(kernel_size, stride or None, padding, dilation, ceil_mode=ceil_mode)

    return options


def upsample(
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None,
    antialias: bool = False,
) -> Module | None:
    """Interpolation without antialiasing."""
    if antialias:
        return None
    return nn.Upsample(size, scale_factor, mode, align_corners, recompute_scale_factor)


def switched(training: Any, make: type[Module], *options: Any) -> Module:
    """Return a module that follows the training mode, is always on, or always off."""
    if isinstance(training, TrainingFlag):
        return make(*options)
    return ALWAYS_ON[make](*options) if training else nn.Identity()


def dropout(make: type[Module], default: bool = True) -> Callable[..., Module]:
    """Dropout that follows the training mode, is always on, or always off."""

    def options(p: float = 0.5, training: Any = default) -> Module:
        return switched(training, make, p)

    return options


def random_leaky_relu(lower: float = 1 / 8, upper: float = 1 / 3, training: Any = False) -> Module:
    """Leaky ReLU with random slopes, or with their mean."""
    if not isinstance(training, TrainingFlag) and not training:
        return nn.LeakyReLU((lower + upper) / 2)
    return switched(training, nn.RReLU, lower, upper)


def drop_samples(p: float, mode: str, training: Any = True) -> Module | None:
    """Dropout of samples that follows the training mode, or is always off."""
    if isinstance(training, TrainingFlag):
        return StochasticDepth(p, mode)
    return None if training else nn.Identity()


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
) -> Apply | None:
    """Scaled dot-product attention, with dropout in any mode."""
    options = (dropout_p, is_causal, scale, enable_gqa)
    if not is_static(options) or isinstance(dropout_p, TrainingFlag):
        return None
    inputs = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    make = PermanentAttention if dropout_p else ScaledDotProductAttention
    return Apply(make(dropout_p, bool(is_causal), scale, bool(enable_gqa)), inputs)


def gumbel_softmax(
    logits: Any, tau: Any = 1, hard: Any = False, eps: Any = 1e-10, dim: Any = -1
) -> Apply | None:
    """Softmax of logits with noise: what is drawn is no function of the logits."""
    if not is_static((tau, hard, dim)):
        return None
    noise = Apply(FunctionModule(gumbel_noise, [Slot(0)]), (logits,))
    noisy = Apply(SumModule(), (logits, noise))
    soft = Apply(nn.Softmax(dim), (Apply(FunctionModule(torch.div, [Slot(0), tau]), (noisy,)),))
    return Apply(FunctionModule(straight_through, [Slot(0), dim]), (soft,)) if hard else soft


def gumbel_noise(like: Tensor) -> Tensor:
    """Draw as ``torch.nn.functional.gumbel_softmax`` does."""
    drawn = torch.empty_like(like, memory_format=torch.legacy_contiguous_format).exponential_()
    return -drawn.log()


def draw(function: Callable[..., Tensor]) -> Callable[..., Apply | None]:
    """A draw that depends on the input, with a derivative of zero."""

    def convert(input: Any, *, generator: Any = None) -> Apply | None:
        options = {} if generator is None else {"generator": generator}
        detached = Apply(FunctionModule(torch.detach, [Slot(0)]), (input,))
        drawn = Apply(FunctionModule(function, [Slot(0)], options), (detached,))
        return Apply(SumModule(), (Apply(ScaleModule(0.0), (input,)), drawn))

    return convert


def straight_through(soft: Tensor, dim: int) -> Tensor:
    """Return one for the largest entry, else zero, with the derivative of the identity."""
    hard = torch.zeros_like(soft, memory_format=torch.legacy_contiguous_format)
    return hard.scatter_(dim, soft.max(dim, keepdim=True)[1], 1.0) - soft.detach() + soft

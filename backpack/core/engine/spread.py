"""How far a sample reaches through functions, whatever numbers they have stored.

A node of the autograd graph is run here with every stored number taken as one that is not zero:
what its inputs get is zero only where the function itself, not its values, leaves them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# Functions of single entries, up to broadcasting.
ELEMENTWISE = words(
    "Abs Acos Acosh Add Addcdiv Addcmul Asin Asinh Atan Atan2 Atanh Celu Clamp ClampMax ClampMin "
    "Cos Cosh Digamma Div Elu Erf Erfc Erfinv Exp Exp2 Expm1 Fmax Fmin Fmod Frac Gelu Hardshrink "
    "Hardsigmoid Hardswish Hardtanh Hypot LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid "
    "Logaddexp Logit MaskedFill Maximum Minimum Mish Mul NanToNum NativeDropout Neg Pow "
    "PreluKernel Reciprocal Relu Remainder RreluWithNoise Rsqrt Rsub Sgn Sigmoid Sign Silu Sin "
    "Sinc Sinh Softplus Softshrink Sqrt Sub Tan Tanh Threshold Where Xlogy"
)
# Functions that bring the entries along some axes together.
ALONG_AXES = words(
    "Amax Amin Cummax Cummin Cumprod Gather Glu Kthvalue LinalgVectorNorm LogSoftmax Logcumsumexp "
    "Logsumexp Max Median Min Mode Norm Prod SafeSoftmax Softmax Sort Std Topk Var"
)
# Sums (or means) of a function of single entries of all inputs.
FUSED = words(
    "BinaryCrossEntropy BinaryCrossEntropyWithLogits Dot HuberLoss KlDiv L1Loss MseLoss "
    "SmoothL1Loss SoftMarginLoss"
)
NORMS_OF_LAST_AXES = words("NativeLayerNorm FusedRmsNorm")
BATCH_NORMS = words("NativeBatchNorm CudnnBatchNorm MiopenBatchNorm")
CONVOLUTIONS = words("Convolution ConvolutionOverrideable NativeGroupNorm")


class UnknownSpreadError(RuntimeError):
    """What an output depends on is not known without the values."""


def kind(node: Any) -> str:
    """Return the name of a node's function."""
    return type(node).__name__.partition("Backward")[0]


def shape_of(node: Any, slot: int) -> Any:
    """Return the shape, precision and device of what a node has computed."""
    return node._input_metadata[slot]


@cache
def saved_names(cls: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of what nodes of a class store: of options, of tensors before unpacking."""
    names = dir(cls)
    tensors = tuple(name for name in names if name.startswith("_raw_saved_"))
    options = tuple(n for n in names if n.startswith("_saved_") and f"_raw{n}" not in names)
    return options, tensors


def signed(value: Any) -> Any:
    """Return whole numbers that a node has stored, which it shows without a sign."""
    if isinstance(value, tuple):
        return tuple(map(signed, value))
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def each_of(values: Sequence[Any]) -> list[Any]:
    """List values that a node has stored, and those in sequences."""
    return [one for value in values for one in (value if isinstance(value, Sequence) else [value])]


def saved_floats(node: Any) -> list[float]:
    """Return the factors and probabilities that a node has stored."""
    values = [getattr(node, name) for name in saved_names(node.__class__)[0]]
    return [value for value in each_of(values) if isinstance(value, float)]


def saved_tensors(node: Any) -> list[Tensor]:
    """Return the tensors that a node has stored."""
    names = [name.removeprefix("_raw") for name in saved_names(node.__class__)[1]]
    values = [getattr(node, name, None) for name in names]  # our own nodes store none
    return [value for value in each_of(values) if isinstance(value, Tensor)]


def spread(node: Any, *grads: Tensor | None) -> Sequence[Tensor | None]:
    """Find the entries of a node's arguments that entries of its result may depend on.

    It has ``grads`` for each output, which are positive at the entries asked about.
    """
    name = kind(node)
    if name.startswith(("Fft", "Stft", "Istft")):  # whose terms cancel
        raise UnknownSpreadError
    if not saved_names(node.__class__)[1] and not saved_floats(node) and name not in ELEMENTWISE:
        out = node(*grads)  # of numbers that are not negative, for what just moves and adds
        return out if isinstance(out, tuple) else (out,)
    first, *others = grads
    if first is None or any(g is not None for g in others):
        raise UnknownSpreadError
    g, parents = first, node.next_functions
    shapes = [None if parent is None else shape_of(parent, slot).shape for parent, slot in parents]
    if name in ELEMENTWISE:
        return [g] * len(shapes)
    if name in FUSED:
        return [None if shape is None else g.expand(shape) for shape in shapes]
    rank = g.dim()
    if name in ALONG_AXES:
        return [
            None if shape is None else _expand(g, shape, _axes(node, shape)) for shape in shapes
        ]
    if name in ("Mm", "Bmm"):
        return _products(g, shapes)
    if name in ("Addmm", "Baddbmm"):
        return [g, *_products(g, shapes[1:])]
    if name == "CtcLoss" and rank == 1 and shapes[0] is not None:
        return [g[:, None].expand(shapes[0]), *(None for _ in shapes[1:])]
    spatial = [size for size in (1, 2, 3) if f"{size}D" in name or f"{size}d" in name]
    if name in NORMS_OF_LAST_AXES:
        axes = list(range(rank - len(node._saved_normalized_shape), rank))
    elif name in CONVOLUTIONS or name.startswith("ScaledDotProduct"):
        axes = list(range(1, rank))
    elif name == "Renorm":  # of each slice along an axis
        (kept,) = _axes(node, g.shape)
        axes = [i for i in range(rank) if i != kept % rank]
    elif name in BATCH_NORMS:
        axes = [i for i in range(rank) if i != 1] if node._saved_training else []
    elif spatial and ("Pool" in name or "Upsample" in name):
        axes = list(range(rank - spatial[0], rank))
    else:
        raise UnknownSpreadError
    data = 3 if name.startswith("ScaledDotProduct") else 1
    reach = g.sum(axes, keepdim=True) if axes else g
    each = [reach] * data + [g.sum()] * len(shapes)  # parameters matter for everything
    pairs = zip(each, shapes, strict=False)
    return [None if shape is None else entries.expand(shape) for entries, shape in pairs]


def _axes(node: Any, shape: Sequence[int]) -> list[int]:
    """Return the axes along which a node's function brings entries together."""
    axes = getattr(node, "_saved_dim", None)
    if axes is None or axes == ():
        return list(range(len(shape)))
    return [signed(axes)] if isinstance(axes, int) else list(signed(axes))


def _expand(g: Tensor, shape: Sequence[int], axes: Sequence[int]) -> Tensor:
    axes = sorted(axis % len(shape) for axis in axes) if shape else []
    if g.dim() == len(shape):
        g = g.sum(axes, keepdim=True) if axes else g
    else:
        for axis in axes:
            g = g.unsqueeze(axis)
    return g.expand(shape)  # an error where it does not fit, such as fewer rows that are gathered


def _products(g: Tensor, shapes: Sequence[Any]) -> list[Tensor | None]:
    left, right = shapes
    return [
        None if left is None else g.sum(-1, keepdim=True).expand(left),
        None if right is None else g.sum(-2, keepdim=True).expand(right),
    ]

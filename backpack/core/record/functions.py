"""Which module stands for which function: the table of the converter.

To teach the converter a function, add a row to ``TABLE``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.fx.node import Node
from torch.nn import Module

from backpack.core.lazy import lazy
from backpack.custom_module import permanent_dropout as permanent
from backpack.custom_module.attention import ScaledDotProductAttention
from backpack.custom_module.branching import SumModule
from backpack.custom_module.function_module import FunctionModule, Slot, leaves_in
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.products import MulModule
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.custom_module.stochastic_depth import StochasticDepth

# What is known about a value before it is there: one of these, or a tuple of kinds.
Kind = Any
TENSOR: Final = "tensor"
TENSORS: Final = "tensors"  # a sequence of them, of unknown length
VALUE: Final = "value"  # number, shape, dtype, ...
UNKNOWN: Final = "unknown"

# What a function does with the entries of its tensors.
ENTRIES: Final = "entries"  # each entry of the result depends on those at its place, broadcast
MOVES: Final = "moves"  # each entry of the result is one of the first argument's, or a constant
MEMORY: Final = "memory"  # each entry of the result is the one at a place in memory
CONSTANT: Final = "constant"  # no entry of the result depends on those of the first argument
RESHAPES: Final = "reshapes"  # the result has the first argument's entries, in their order


@dataclass(frozen=True)
class Apply:
    """A module, and what to call it with: nodes, numbers, and other applications."""

    module: Module
    inputs: tuple[Any, ...]

    @lazy
    def is_nested(self) -> bool:
        """Whether the results of other modules are among the inputs."""
        return any(isinstance(x, Apply) for x in self.inputs)

    @lazy
    def takes_tensors(self) -> bool:
        """Whether the inputs are the tensors of the function, all of them, in their order."""
        return self.inputs == tuple(map(Slot, range(len(self.inputs))))


class TrainingFlag(int):
    """What modules have as ``training`` while they are traced.

    It is recognised as an argument of functions, and reports when somebody asks for its value.
    """

    asked: Callable[[], None]

    def __bool__(self) -> bool:
        """Report that the forward pass depends on the mode, and return the mode."""
        self.asked()
        return int(self) != 0

    def __eq__(self, other: object) -> bool:
        """Compare, which is asking, too."""
        return bool(self) == other

    __hash__ = int.__hash__

    def __repr__(self) -> str:
        """Return the mode."""
        return repr(int(self) != 0)


# --- What is known about arguments ----------------------------------------------------------------


def kind(argument: Any) -> Kind:
    """Return what is known about an argument of a call."""
    if isinstance(argument, Node):
        return argument.meta.get("backpack_kind", UNKNOWN)
    if isinstance(argument, Slot):
        return TENSOR
    if isinstance(argument, (tuple, list)):
        kinds = tuple(kind(item) for item in argument)
        return VALUE if all(k == VALUE for k in kinds) else kinds
    return VALUE


def is_number(argument: Any) -> bool:
    """Return whether an argument is a real number that is known already."""
    return isinstance(argument, (int, float)) and not isinstance(argument, bool)


def is_static(*arguments: Any) -> bool:
    """Return whether arguments are known already: neither nodes, nor slots, nor tensors."""
    return not leaves_in(arguments, Node, Slot, torch.Tensor)


# --- Conversions: from the arguments of a function to an application, None for "as a function" ----


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


def class_scores(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
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
    if not is_static(ignore_index, others):
        return None
    tensors = [x for x in (input, linear_weight, linear_bias) if x is not None]
    layer = FunctionModule(class_scores, [Slot(i) for i in range(len(tensors))])
    lossfunc = nn.CrossEntropyLoss(
        ignore_index=-100 if ignore_index is None else ignore_index, **others
    )
    return Apply(lossfunc, (Apply(layer, tuple(tensors)), target))


def weight_of_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return ``g v / ‖v‖``, with norms over all axes but one."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def weight_norm(v: Any, g: Any, dim: Any = 0) -> Apply | None:
    """Weight normalisation by its formula: the fused function's second derivative is wrong.

    Its backward pass takes the norms for constants (torch 2.6 to 2.14).
    """
    if not is_static(dim):
        return None
    return Apply(FunctionModule(weight_of_norm, [Slot(0), Slot(1), dim]), (v, g))


def scaled(input: Any, factor: float) -> Any:
    """Multiply something with a number."""
    if is_number(input):
        return input * factor
    return input if factor == 1 else Apply(ScaleModule(factor), (input,))


def add(input: Any, other: Any, *, alpha: Any = 1) -> Apply | None:
    """``input + alpha * other``."""
    return Apply(SumModule(), (input, scaled(other, alpha))) if is_number(alpha) else None


def subtract(input: Any, other: Any, *, alpha: Any = 1) -> Apply | None:
    """``input - alpha * other``."""
    if not is_number(alpha):
        return None
    return Apply(SumModule.of_difference(), (input, scaled(other, -alpha)))


def subtract_from(input: Any, other: Any, *, alpha: Any = 1) -> Apply | None:
    """``other - alpha * input``."""
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
    return Apply(ScaleModule(1 / other), (input,))


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


def affine_layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Module | None:
    """Layer normalisation as the layer that has its parameters."""
    parameters = [p for p in (weight, bias) if p is not None]
    if not parameters or not all(isinstance(p, nn.Parameter) for p in parameters):
        return None
    module = nn.LayerNorm(normalized_shape, eps, elementwise_affine=False)
    module.weight, module.bias = weight, bias
    return module


def rms_norm(normalized_shape: Any, weight: None = None, eps: float | None = None) -> Module:
    """RMS normalisation without parameters."""
    return nn.RMSNorm(normalized_shape, eps, elementwise_affine=False)


BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Module | None:
    """Batch normalisation: a function of its own would have to act on each sample alone."""
    kind = BATCH_NORMS.get(input.dim())
    are_own = all(p is None or isinstance(p, nn.Parameter) for p in (weight, bias))
    if kind is None or not are_own or isinstance(input, nn.Parameter):
        return None
    module: Any = kind(input.shape[1], eps, momentum, False, not training)
    module.weight, module.bias = weight, bias
    if not training:
        module.running_mean, module.running_var = running_mean, running_var
    return module.train(training)


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


def switched(
    training: Any, make: Callable[[], Module], always: Callable[[], Module | None]
) -> Module | None:
    """Return a module for a training flag: the module's own, or a constant."""
    if isinstance(training, TrainingFlag):
        return make()
    return always() if training else nn.Identity()


def dropout(
    make: Callable[..., Module], always: Callable[..., Module], default: bool = True
) -> Callable[..., Module | None]:
    """Dropout that follows the training mode, is always on, or always off."""

    def options(p: float = 0.5, training: Any = default) -> Module | None:
        return switched(training, lambda: make(p), lambda: always(p))

    return options


def plain_dropout(p: float, train: Any) -> Module | None:
    """Dropout under the other name of its flag."""
    return dropout(nn.Dropout, permanent.PermanentDropout)(p, train)


def random_leaky_relu(
    lower: float = 1 / 8, upper: float = 1 / 3, training: Any = False
) -> Module | None:
    """Leaky ReLU with random slopes, or with their mean."""
    if not isinstance(training, TrainingFlag) and not training:
        return nn.LeakyReLU((lower + upper) / 2)
    return switched(
        training, lambda: nn.RReLU(lower, upper), lambda: permanent.PermanentRReLU(lower, upper)
    )


def stochastic_depth(p: float, mode: str, training: Any = True) -> Module | None:
    """Dropout of samples that follows the training mode, or is always off."""
    return switched(training, lambda: StochasticDepth(p, mode), lambda: None)


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
    make = permanent.PermanentAttention if dropout_p else ScaledDotProductAttention
    return Apply(make(dropout_p, bool(is_causal), scale, bool(enable_gqa)), inputs)


def gumbel_softmax(
    logits: Any, tau: Any = 1, hard: Any = False, eps: Any = 1e-10, dim: Any = -1
) -> Apply | None:
    """Softmax of logits with noise: what is drawn is no function of the logits."""
    if not is_static((tau, hard, dim)):
        return None
    noise = Apply(FunctionModule(gumbel_noise, [Slot(0)]), (logits,))
    scaled = Apply(
        FunctionModule(torch.div, [Slot(0), tau]), (Apply(SumModule(), (logits, noise)),)
    )
    soft = Apply(nn.Softmax(dim), (scaled,))
    return Apply(FunctionModule(straight_through, [Slot(0), dim]), (soft,)) if hard else soft


def gumbel_noise(like: torch.Tensor) -> torch.Tensor:
    """Draw as ``torch.nn.functional.gumbel_softmax`` does."""
    return (
        -torch.empty_like(like, memory_format=torch.legacy_contiguous_format).exponential_().log()
    )


def draw(function: Callable[..., torch.Tensor]) -> Callable[..., Apply | None]:
    """A draw that depends on the input, with a derivative of zero."""

    def convert(input: Any, *, generator: Any = None) -> Apply | None:
        options = {} if generator is None else {"generator": generator}
        detached = Apply(FunctionModule(torch.detach, [Slot(0)]), (input,))
        drawn = Apply(FunctionModule(function, [Slot(0)], options), (detached,))
        return Apply(SumModule(), (Apply(ScaleModule(0.0), (input,)), drawn))

    return convert


def straight_through(soft: torch.Tensor, dim: int) -> torch.Tensor:
    """Return one for the largest entry, else zero, with the derivative of the identity."""
    hard = torch.zeros_like(soft, memory_format=torch.legacy_contiguous_format)
    return hard.scatter_(dim, soft.max(dim, keepdim=True)[1], 1.0) - soft.detach() + soft


# --- Kinds of results -----------------------------------------------------------------------------

ATTRIBUTES_TENSOR = {"T", "H", "mT", "mH", "real", "imag", "data", "grad", "values", "indices"}
ATTRIBUTES_VALUE = {
    *("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_sparse"),
    *("itemsize", "nbytes", "is_leaf", "names", "is_quantized", "is_meta", "is_cpu", "is_mps"),
}


def attribute_kind(input: Any, name: str) -> Kind:
    """Return what an attribute is."""
    return TENSOR if name in ATTRIBUTES_TENSOR else VALUE if name in ATTRIBUTES_VALUE else UNKNOWN


def item_kind(input: Any, index: Any) -> Kind:
    """Return what ``input[index]`` is."""
    what = kind(input)
    if what == TENSORS:
        return TENSOR if isinstance(index, int) else TENSORS
    if isinstance(what, tuple):
        try:
            return what[index]
        except (IndexError, TypeError):
            return UNKNOWN
    return TENSOR if what == UNKNOWN and isinstance(index, tuple) else what


def reduction_kind(input: Any, *args: Any, **kwargs: Any) -> Kind:
    """``max(x)`` and ``max(x, y)`` are tensors, ``max(x, dim)`` comes with the indices."""
    has_axis = "dim" in kwargs or (args and kind(args[0]) == VALUE)
    return TENSORS if has_axis else TENSOR


def where_kind(*args: Any, **kwargs: Any) -> Kind:
    """``where(condition)`` are indices along each axis."""
    return TENSORS if len(args) + len(kwargs) == 1 else TENSOR


# --- The table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """How to convert calls of some functions.

    Attributes:
        functions: Their names: ``torch.relu``, ``F.relu`` (of ``torch.nn.functional``), ``.relu``
            (method of a tensor), ``operator.add``. In-place forms need not be listed. Names that
            torch does not have are ignored.
        convert: From the arguments to an :class:`Apply`; if there is none, or if it returns None,
            or if the arguments do not fit its signature, the function becomes a ``FunctionModule``.
        result: Kind of the result, or a function of the arguments that returns it.
        is_view: Whether the result may share its memory with the first argument.
        keep: Whether to keep calls whose result is not used.
        treatment: :data:`ENTRIES`, :data:`MOVES`, :data:`RESHAPES`,
            :data:`CONSTANT`, or None for anything else.
        layer: From the arguments of a recorded call to the layer with the same parameters, whose
            input is the first argument; None if the call is none of a layer.
    """

    functions: str
    convert: Callable[..., Apply | None] | None = None
    result: Kind | Callable[..., Kind] = TENSOR
    is_view: bool = False
    keep: bool = False
    treatment: str | None = None
    layer: Callable[..., Module | None] | None = None


def _rows(*functions: str, **common: Any) -> list[Row]:
    """Return rows that have all in common but the names of their functions."""
    return [Row(names, **common) for names in functions]


TABLE: tuple[Row, ...] = (
    # arithmetic
    Row("operator.add torch.add .add", add, treatment=ENTRIES),
    Row("operator.sub torch.sub torch.subtract .sub .subtract", subtract, treatment=ENTRIES),
    Row("torch.rsub", subtract_from, treatment=ENTRIES),
    Row("operator.mul torch.mul torch.multiply .mul .multiply", multiply, treatment=ENTRIES),
    Row(
        "torch.div operator.truediv torch.divide torch.true_divide .div .divide .true_divide",
        divide,
        treatment=ENTRIES,
    ),
    Row(
        "operator.neg torch.neg torch.negative .neg .negative",
        partial(multiply, other=-1),
        treatment=ENTRIES,
    ),
    Row("torch.matmul operator.matmul .matmul"),
    Row("torch.mm .mm"),
    Row("torch.bmm .bmm"),
    Row("torch.mv .mv"),
    Row("torch.dot .dot torch.vdot .vdot torch.inner .inner"),
    Row("torch.outer .outer torch.ger .ger"),
    Row("torch.einsum"),
    Row("torch.tensordot"),
    Row("torch.kron .kron"),
    Row("torch.addmm .addmm"),
    Row("torch.addbmm .addbmm"),
    Row("torch.baddbmm .baddbmm"),
    Row("torch.addmv .addmv"),
    # axes, shapes and selections
    Row("torch.flatten .flatten", layer(flatten), is_view=True, treatment=RESHAPES),
    Row("torch.unflatten .unflatten", layer(unflatten), is_view=True, treatment=RESHAPES),
    *_rows(
        ".view",
        ".view_as .reshape_as",
        "torch.reshape .reshape",
        "torch.ravel .ravel",
        "torch.squeeze .squeeze",
        "torch.unsqueeze .unsqueeze",
        is_view=True,
        treatment=RESHAPES,
    ),
    Row("torch.permute .permute", permute, is_view=True, treatment=MOVES),
    Row(
        "torch.transpose torch.swapdims .transpose .swapdims",
        transpose,
        is_view=True,
        treatment=MOVES,
    ),
    Row("torch.swapaxes .swapaxes", swapaxes, is_view=True, treatment=MOVES),
    Row("operator.getitem", getitem, item_kind, is_view=True, treatment=MOVES),
    *_rows(
        "torch.adjoint .adjoint",
        "torch.t .t",
        "torch.movedim torch.moveaxis .movedim .moveaxis",
        "torch.narrow .narrow",
        "torch.select .select",
        ".expand",
        ".expand_as",
        "torch.broadcast_to .broadcast_to",
        "torch.diagonal .diagonal",
        ".unfold",
        is_view=True,
        treatment=MOVES,
    ),
    *_rows(
        "torch.split .split torch.split_with_sizes .split_with_sizes",
        "torch.chunk .chunk torch.tensor_split .tensor_split",
        "torch.hsplit .hsplit torch.vsplit .vsplit torch.dsplit",
        "torch.unbind .unbind",
        result=TENSORS,
        is_view=True,
        treatment=MOVES,
    ),
    Row("builtins.getattr", attribute, attribute_kind, is_view=True),
    Row("torch.as_strided .as_strided", is_view=True, treatment=MEMORY),
    Row("torch.broadcast_tensors torch.meshgrid", None, TENSORS, is_view=True),
    *_rows(
        "torch.cat torch.concat torch.concatenate",
        "torch.stack torch.hstack torch.vstack torch.dstack torch.column_stack torch.row_stack",
        ".repeat torch.tile .tile",
        "torch.repeat_interleave .repeat_interleave",
        "torch.roll .roll",
        "torch.flip .flip torch.fliplr .fliplr torch.flipud .flipud torch.rot90 .rot90",
        "torch.index_select .index_select",
        "torch.gather .gather torch.take .take torch.take_along_dim .take_along_dim",
        treatment=MOVES,
    ),
    Row("torch.diag .diag torch.diag_embed .diag_embed torch.diagflat .diagflat"),
    Row(
        "torch.scatter .scatter torch.scatter_add .scatter_add .scatter_reduce "
        "torch.masked_scatter .masked_scatter"
    ),
    Row("torch.index_add .index_add .index_copy .index_fill torch.index_put .index_put"),
    Row("torch.slice_scatter .slice_scatter torch.select_scatter .select_scatter"),
    Row("torch.masked_select .masked_select torch.nonzero .nonzero torch.argwhere .argwhere"),
    Row("torch.where .where", None, where_kind, treatment=ENTRIES),
    Row("F.pad torch._C._nn.pad", layer(pad)),
    # the same values, elsewhere or as another type
    *_rows(
        "operator.pos torch.positive .positive",
        ".contiguous",
        ".to .type .type_as .float .double .half .bfloat16 .long .int .bool",
        ".cpu .cuda",
        "torch.detach .detach",
        is_view=True,
        treatment=ENTRIES,
    ),
    # functions of each entry
    *_rows(
        "torch.clone .clone",
        "torch.pow operator.pow .pow torch.float_power .float_power",
        "torch.addcmul .addcmul",
        "torch.addcdiv .addcdiv",
        "torch.lerp .lerp",
        "torch.tril .tril torch.triu .triu",
        "torch.masked_fill .masked_fill",
        "torch.abs torch.absolute operator.abs .abs .absolute",
        "torch.sign .sign torch.sgn .sgn",
        "torch.reciprocal .reciprocal",
        "torch.square .square",
        "torch.sqrt .sqrt",
        "torch.rsqrt .rsqrt",
        "torch.exp .exp torch.exp2 .exp2 torch.expm1 .expm1",
        "torch.log .log torch.log2 .log2 torch.log10 .log10 torch.log1p .log1p",
        "torch.sin .sin torch.cos .cos torch.tan .tan torch.sinh .sinh torch.cosh .cosh",
        "torch.asin .asin torch.acos .acos torch.atan .atan torch.atan2 .atan2",
        "torch.erf .erf torch.erfc .erfc torch.sinc .sinc torch.logit .logit",
        "torch.xlogy .xlogy torch.logaddexp .logaddexp torch.hypot .hypot",
        "torch.clamp torch.clip .clamp .clip",
        "torch.clamp_min .clamp_min",
        "torch.clamp_max .clamp_max",
        "torch.maximum .maximum torch.fmax .fmax",
        "torch.minimum .minimum torch.fmin .fmin",
        "torch.round .round torch.floor .floor torch.ceil .ceil torch.trunc .trunc torch.frac",
        "torch.floor_divide operator.floordiv .floor_divide",
        "torch.remainder operator.mod .remainder torch.fmod .fmod",
        "torch.nan_to_num .nan_to_num",
        "operator.eq torch.eq .eq operator.ne torch.ne .ne torch.isclose .isclose",
        "operator.lt torch.lt .lt operator.le torch.le .le",
        "operator.gt torch.gt .gt operator.ge torch.ge .ge",
        "torch.isnan .isnan torch.isinf .isinf torch.isfinite .isfinite",
        "torch.logical_and .logical_and operator.and_ torch.bitwise_and .bitwise_and",
        "torch.logical_or .logical_or operator.or_ torch.bitwise_or .bitwise_or",
        "torch.logical_not .logical_not operator.invert torch.bitwise_not .bitwise_not",
        "torch.logical_xor .logical_xor operator.xor torch.bitwise_xor .bitwise_xor",
        treatment=ENTRIES,
    ),
    # reductions
    Row("torch.sum .sum torch.nansum .nansum"),
    Row("torch.mean .mean torch.nanmean .nanmean"),
    Row("torch.prod .prod"),
    Row("torch.var .var torch.std .std"),
    Row("torch.norm .norm torch.linalg.norm torch.linalg.vector_norm torch.linalg.matrix_norm"),
    Row("torch.logsumexp .logsumexp"),
    Row("torch.cumsum .cumsum torch.cumprod .cumprod torch.logcumsumexp .logcumsumexp"),
    Row("torch.amax .amax torch.amin .amin"),
    Row("torch.max .max torch.min .min torch.median .median", None, reduction_kind),
    *_rows(
        "torch.var_mean torch.std_mean torch.aminmax .aminmax",
        "torch.sort .sort torch.topk .topk torch.kthvalue .kthvalue torch.mode .mode",
        "torch.cummax .cummax torch.cummin .cummin",
        result=TENSORS,
    ),
    Row("torch.argmax .argmax torch.argmin .argmin torch.argsort .argsort"),
    Row("torch.any .any torch.all .all torch.count_nonzero .count_nonzero"),
    Row("torch.trace .trace"),
    Row("torch.cdist torch.dist .dist F.pdist"),
    # activations
    Row("F.relu torch.relu .relu", layer(nn.ReLU), treatment=ENTRIES),
    Row("F.relu6", layer(nn.ReLU6), treatment=ENTRIES),
    Row("F.leaky_relu", layer(nn.LeakyReLU), treatment=ENTRIES),
    Row("F.rrelu torch.rrelu", layer(random_leaky_relu), treatment=ENTRIES),
    Row("F.elu", layer(nn.ELU), treatment=ENTRIES),
    Row("F.selu torch.selu", layer(nn.SELU), treatment=ENTRIES),
    Row("F.celu torch.celu", layer(nn.CELU), treatment=ENTRIES),
    Row("F.gelu", layer(nn.GELU), treatment=ENTRIES),
    Row("F.silu", layer(nn.SiLU), treatment=ENTRIES),
    Row("F.mish", layer(nn.Mish), treatment=ENTRIES),
    Row("F.glu", layer(nn.GLU)),
    Row(
        "F.sigmoid torch.sigmoid torch.special.expit .sigmoid", layer(nn.Sigmoid), treatment=ENTRIES
    ),
    Row("F.logsigmoid", layer(nn.LogSigmoid), treatment=ENTRIES),
    Row("F.hardsigmoid", layer(nn.Hardsigmoid), treatment=ENTRIES),
    Row("F.hardswish", layer(nn.Hardswish), treatment=ENTRIES),
    Row("F.hardtanh", layer(nn.Hardtanh), treatment=ENTRIES),
    Row("F.tanh torch.tanh .tanh", layer(nn.Tanh), treatment=ENTRIES),
    Row("F.tanhshrink", layer(nn.Tanhshrink), treatment=ENTRIES),
    Row("F.hardshrink torch.hardshrink .hardshrink", layer(nn.Hardshrink), treatment=ENTRIES),
    Row("F.softshrink", layer(nn.Softshrink), treatment=ENTRIES),
    Row("F.softplus", layer(nn.Softplus), treatment=ENTRIES),
    Row("F.softsign", layer(nn.Softsign), treatment=ENTRIES),
    Row("F.threshold torch.threshold", layer(nn.Threshold), treatment=ENTRIES),
    Row("F.prelu torch.prelu .prelu"),
    Row("F.softmax torch.softmax .softmax torch.special.softmax", layer(softmax(nn.Softmax))),
    Row("F.softmin", layer(softmax(nn.Softmin))),
    Row(
        "F.log_softmax torch.log_softmax .log_softmax torch.special.log_softmax",
        layer(softmax(nn.LogSoftmax)),
    ),
    Row("F.gumbel_softmax", gumbel_softmax, keep=True),
    # dropout
    Row("F.dropout", layer(dropout(nn.Dropout, permanent.PermanentDropout)), is_view=True),
    Row("F.dropout1d", layer(dropout(nn.Dropout1d, permanent.PermanentDropout1d)), is_view=True),
    Row("F.dropout2d", layer(dropout(nn.Dropout2d, permanent.PermanentDropout2d)), is_view=True),
    Row("F.dropout3d", layer(dropout(nn.Dropout3d, permanent.PermanentDropout3d)), is_view=True),
    Row(
        "F.alpha_dropout",
        layer(dropout(nn.AlphaDropout, permanent.PermanentAlphaDropout, default=False)),
        is_view=True,
    ),
    Row(
        "F.feature_alpha_dropout",
        layer(
            dropout(nn.FeatureAlphaDropout, permanent.PermanentFeatureAlphaDropout, default=False)
        ),
        is_view=True,
    ),
    Row("torch.dropout", layer(plain_dropout), is_view=True),
    Row("torchvision.ops.stochastic_depth.stochastic_depth", layer(stochastic_depth), is_view=True),
    # pooling and resizing
    Row("F.max_pool1d torch.max_pool1d", layer(max_pool(nn.MaxPool1d))),
    Row("F.max_pool2d torch.max_pool2d", layer(max_pool(nn.MaxPool2d))),
    Row("F.max_pool3d torch.max_pool3d", layer(max_pool(nn.MaxPool3d))),
    Row("F.avg_pool1d torch.avg_pool1d", layer(nn.AvgPool1d)),
    Row("F.avg_pool2d", layer(nn.AvgPool2d)),
    Row("F.avg_pool3d", layer(nn.AvgPool3d)),
    Row("F.lp_pool1d", layer(nn.LPPool1d)),
    Row("F.lp_pool2d", layer(nn.LPPool2d)),
    Row("F.lp_pool3d", layer(nn.LPPool3d)),
    Row("F.adaptive_avg_pool1d torch.adaptive_avg_pool1d", layer(nn.AdaptiveAvgPool1d)),
    Row("F.adaptive_avg_pool2d", layer(nn.AdaptiveAvgPool2d)),
    Row("F.adaptive_avg_pool3d", layer(nn.AdaptiveAvgPool3d)),
    Row("F.adaptive_max_pool1d", layer(nn.AdaptiveMaxPool1d)),
    Row("F.adaptive_max_pool2d", layer(nn.AdaptiveMaxPool2d)),
    Row("F.adaptive_max_pool3d", layer(nn.AdaptiveMaxPool3d)),
    Row("F.fractional_max_pool2d", layer(nn.FractionalMaxPool2d)),
    Row("F.fractional_max_pool3d", layer(nn.FractionalMaxPool3d)),
    Row(
        "F.max_pool1d_with_indices F.max_pool2d_with_indices F.max_pool3d_with_indices "
        "F.adaptive_max_pool1d_with_indices F.adaptive_max_pool2d_with_indices "
        "F.adaptive_max_pool3d_with_indices F.fractional_max_pool2d_with_indices "
        "F.fractional_max_pool3d_with_indices",
        result=TENSORS,
        keep=True,
    ),
    Row("F.max_unpool1d F.max_unpool2d F.max_unpool3d"),
    Row("F.interpolate", layer(upsample)),
    Row("F.pixel_shuffle torch.pixel_shuffle", layer(nn.PixelShuffle), treatment=MOVES),
    Row("F.pixel_unshuffle torch.pixel_unshuffle", layer(nn.PixelUnshuffle), treatment=MOVES),
    Row("F.channel_shuffle torch.channel_shuffle", layer(nn.ChannelShuffle), treatment=MOVES),
    Row("F.unfold", layer(nn.Unfold)),
    Row("F.fold", layer(nn.Fold)),
    Row("F.grid_sample F.affine_grid"),
    # layers with their parameters as arguments
    Row("F.linear"),
    Row("F.bilinear torch.bilinear"),
    Row("F.conv1d torch.conv1d"),
    Row("F.conv2d torch.conv2d"),
    Row("F.conv3d torch.conv3d"),
    Row("F.conv_transpose1d torch.conv_transpose1d"),
    Row("F.conv_transpose2d torch.conv_transpose2d"),
    Row("F.conv_transpose3d torch.conv_transpose3d"),
    Row("F.embedding torch.embedding"),
    Row("F.embedding_bag"),
    Row("F.one_hot"),
    Row("F.batch_norm", keep=True, layer=batch_norm),
    Row("torch.batch_norm", keep=True),
    Row("F.instance_norm torch.instance_norm", keep=True),
    Row("torch._weight_norm", weight_norm),
    Row("F.layer_norm", layer(layer_norm), layer=affine_layer_norm),
    Row("torch.layer_norm", layer(layer_norm)),
    Row("F.group_norm torch.group_norm"),
    Row("F.rms_norm torch.rms_norm", layer(rms_norm)),
    Row("F.local_response_norm", layer(nn.LocalResponseNorm)),
    Row("F.normalize"),
    Row("F.cosine_similarity torch.cosine_similarity"),
    Row("F.pairwise_distance torch.pairwise_distance"),
    Row("F.scaled_dot_product_attention", attention, keep=True),
    Row("F.multi_head_attention_forward", None, (TENSOR, TENSOR), keep=True),
    # losses
    Row("F.mse_loss", loss(nn.MSELoss)),
    Row("F.l1_loss", loss(nn.L1Loss)),
    Row("F.smooth_l1_loss", loss(nn.SmoothL1Loss)),
    Row("F.huber_loss", loss(nn.HuberLoss)),
    Row("F.cross_entropy", loss(nn.CrossEntropyLoss)),
    Row("F.linear_cross_entropy", linear_cross_entropy),
    Row("F.nll_loss", loss(nn.NLLLoss)),
    Row("F.kl_div", loss(nn.KLDivLoss)),
    Row("F.binary_cross_entropy", loss(nn.BCELoss)),
    Row("F.binary_cross_entropy_with_logits", loss(nn.BCEWithLogitsLoss)),
    Row("F.soft_margin_loss", loss(nn.SoftMarginLoss)),
    # tensors without a gradient
    Row("torch.zeros_like torch.ones_like torch.full_like torch.empty_like", treatment=CONSTANT),
    Row(".new_zeros .new_ones .new_full .new_empty", treatment=CONSTANT),
    Row("torch.zeros torch.ones torch.full torch.empty", treatment=CONSTANT),
    Row("torch.eye torch.arange torch.linspace torch.tensor torch.as_tensor .new_tensor"),
    Row("torch.rand torch.randn torch.randint torch.randperm torch.normal", keep=True),
    Row("torch.rand_like torch.randn_like torch.randint_like", keep=True),
    Row("torch.bernoulli .bernoulli", draw(torch.bernoulli), keep=True, treatment=ENTRIES),
    Row("torch.poisson", draw(torch.poisson), keep=True, treatment=ENTRIES),
    Row("torch._standard_gamma", keep=True, treatment=ENTRIES),
    Row("torch.multinomial .multinomial", keep=True),
    # numbers, shapes and the like
    Row(".size .dim .ndimension .numel .nelement torch.numel .stride .element_size", None, VALUE),
    Row(".is_floating_point torch.is_floating_point .is_complex .get_device", None, VALUE),
    Row(".is_contiguous .storage_offset .item .tolist torch.is_tensor", None, VALUE),
    Row("torch.result_type torch.promote_types torch.broadcast_shapes torch.finfo", None, VALUE),
    Row("math.*", None, VALUE),
    Row("torch._assert", None, VALUE, keep=True),
    Row("torch.fx._symbolic_trace._assert_is_none", None, VALUE, keep=True),
)

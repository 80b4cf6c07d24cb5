"""The table of functions: which module stands for which function, and where its entries come from.

To teach the converter a function, add a row to ``TABLE``: with words of
:mod:`backpack.core.record.kinds`, and a conversion of :mod:`backpack.core.record.conversions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Module

from backpack.core.record import conversions as to
from backpack.core.record import functional_layers as layers
from backpack.core.record.conversions import Apply, dropout, layer, loss
from backpack.core.record.kinds import (
    CASTS,
    CONSTANT,
    ENTRIES,
    MEMORY,
    MOVES,
    RESHAPES,
    TENSOR,
    TENSORS,
    VALUE,
    Kind,
    attribute_kind,
    item_kind,
    nonzero_kind,
    reduction_kind,
    where_kind,
)


@dataclass(frozen=True)
class Row:
    """How to convert calls of some functions.

    Their names are ``torch.relu``, ``F.relu`` (of ``torch.nn.functional``), ``.relu`` (method of a
    tensor), ``operator.add``. In-place forms need not be listed. Those that torch does not have are
    ignored.
    """

    functions: str
    # From the arguments to what to apply. If there is none, or if it returns None, or if they do
    # not fit its signature, the function becomes a ``FunctionModule``.
    convert: Callable[..., Apply | None] | None = None
    result: Kind | Callable[..., Kind] = TENSOR  # or a function of the arguments that returns it
    is_view: bool = False  # whether the result may share its memory with the first argument
    keep: bool = False  # whether to keep calls whose result is not used
    treatment: str | None = None  # what it does with entries of its tensors; None: anything else
    # From the arguments of a recorded call to the layer with the same parameters, or the loss with
    # the same weights; None if the call is none of one.
    layer: Callable[..., Module | None] | None = None
    inputs: tuple[str, ...] = ("input",)  # of the layer, the first arguments
    # From the arguments, where a ``Weight`` stands for each parameter that the call reads, perhaps
    # transposed, to the layer and its input; likewise.
    reading: Callable[..., layers.Reading | None] | None = None


def _rows(*functions: str, **common: Any) -> list[Row]:
    """Return rows that have all in common but the names of their functions."""
    return [Row(names, **common) for names in functions]


def _weighted_losses(*losses: tuple[str, type[Module]]) -> list[Row]:
    """Return rows of losses that may have tensors as weights, and are modules without them, too."""
    inputs = ("input", "target")
    return [Row(name, loss(kind), layer=layers.loss(kind), inputs=inputs) for name, kind in losses]


TABLE: tuple[Row, ...] = (
    # arithmetic
    Row("operator.add torch.add .add", to.add, treatment=ENTRIES),
    Row("operator.sub torch.sub torch.subtract .sub .subtract", to.subtract, treatment=ENTRIES),
    Row("torch.rsub", to.subtract_from, treatment=ENTRIES),
    Row("operator.mul torch.mul torch.multiply .mul .multiply", to.multiply, treatment=ENTRIES),
    Row("operator.truediv torch.div .div", to.divide, treatment=ENTRIES),
    Row("torch.divide torch.true_divide .divide .true_divide", to.divide, treatment=ENTRIES),
    Row("operator.neg torch.neg .neg", partial(to.multiply, other=-1), treatment=ENTRIES),
    Row("torch.negative .negative", partial(to.multiply, other=-1), treatment=ENTRIES),
    *_rows(
        *("torch.matmul operator.matmul .matmul", "torch.mm .mm"),
        layer=layers.product,
        reading=layers.read_by_product,
    ),
    Row("torch.addmm .addmm", reading=layers.read_by_addmm),
    Row("torch.einsum", reading=layers.read_by_einsum),
    *_rows(
        *("torch.bmm .bmm", "torch.mv .mv"),
        *("torch.dot .dot torch.vdot .vdot torch.inner .inner", "torch.tensordot"),
        *("torch.outer .outer torch.ger .ger", "torch.kron .kron", "torch.addmv .addmv"),
        *("torch.addbmm .addbmm", "torch.baddbmm .baddbmm"),
    ),
    # axes, shapes and selections
    Row("torch.flatten .flatten", layer(to.flatten), is_view=True, treatment=RESHAPES),
    Row("torch.unflatten .unflatten", layer(to.unflatten), is_view=True, treatment=RESHAPES),
    *_rows(
        *(".view", ".view_as .reshape_as", "torch.reshape .reshape", "torch.ravel .ravel"),
        *("torch.squeeze .squeeze", "torch.unsqueeze .unsqueeze"),
        is_view=True,
        treatment=RESHAPES,
    ),
    Row("torch.permute .permute", to.permute, is_view=True, treatment=MOVES),
    Row("torch.transpose .transpose", to.transpose, is_view=True, treatment=MOVES),
    Row("torch.swapdims .swapdims", to.transpose, is_view=True, treatment=MOVES),
    Row("torch.swapaxes .swapaxes", to.swapaxes, is_view=True, treatment=MOVES),
    Row(
        "operator.getitem",
        to.getitem,
        item_kind,
        is_view=True,
        treatment=MOVES,
        reading=layers.read_by_index,
    ),
    *_rows(
        *("torch.t .t", "torch.adjoint .adjoint", "torch.diagonal .diagonal", ".unfold"),
        *("torch.movedim torch.moveaxis .movedim .moveaxis", "torch.broadcast_to .broadcast_to"),
        *("torch.narrow .narrow", "torch.select .select", ".expand", ".expand_as"),
        is_view=True,
        treatment=MOVES,
    ),
    *_rows(
        "torch.split .split torch.split_with_sizes .split_with_sizes",
        "torch.chunk .chunk torch.tensor_split .tensor_split",
        "torch.hsplit .hsplit torch.vsplit .vsplit torch.dsplit .dsplit",
        "torch.unbind .unbind",
        result=TENSORS,
        is_view=True,
        treatment=MOVES,
    ),
    Row("builtins.getattr", to.attribute, attribute_kind, is_view=True),
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
    Row("torch.masked_select .masked_select torch.argwhere .argwhere"),
    Row("torch.nonzero .nonzero", None, nonzero_kind),
    Row("torch.where .where", None, where_kind, treatment=ENTRIES),
    Row("F.pad torch._C._nn.pad", layer(to.pad)),
    # the same values, elsewhere or as another type
    *_rows(
        "operator.pos torch.positive .positive",
        ".contiguous",
        ".float .double .half .bfloat16 .long .int .bool",
        ".cpu .cuda",
        "torch.detach .detach",
        is_view=True,
        treatment=ENTRIES,
    ),
    Row(".to .type .type_as", is_view=True, treatment=CASTS),
    Row(".requires_grad_", is_view=True, keep=True, treatment=ENTRIES),
    # functions of each entry
    *_rows(
        *("torch.clone .clone", "torch.addcmul .addcmul", "torch.addcdiv .addcdiv"),
        *("torch.lerp .lerp", "torch.masked_fill .masked_fill"),
        "torch.tril .tril torch.triu .triu",
        "torch.abs torch.absolute operator.abs .abs .absolute",
        *("torch.sign .sign torch.sgn .sgn", "torch.reciprocal .reciprocal"),
        "torch.pow operator.pow .pow torch.float_power .float_power",
        *("torch.square .square", "torch.sqrt .sqrt", "torch.rsqrt .rsqrt"),
        "torch.exp .exp torch.exp2 .exp2 torch.expm1 .expm1",
        "torch.log .log torch.log2 .log2 torch.log10 .log10 torch.log1p .log1p",
        "torch.sin .sin torch.cos .cos torch.tan .tan torch.sinh .sinh torch.cosh .cosh",
        "torch.asin .asin torch.acos .acos torch.atan .atan torch.atan2 .atan2",
        "torch.arcsin .arcsin torch.arccos .arccos torch.arctan .arctan torch.arctan2 .arctan2",
        "torch.asinh .asinh torch.acosh .acosh torch.atanh .atanh",
        "torch.arcsinh .arcsinh torch.arccosh .arccosh torch.arctanh .arctanh",
        "torch.erf .erf torch.erfc .erfc torch.sinc .sinc torch.logit .logit",
        "torch.xlogy .xlogy torch.logaddexp .logaddexp torch.logaddexp2 .logaddexp2",
        "torch.hypot .hypot torch.copysign .copysign torch.heaviside .heaviside",
        "torch.lgamma .lgamma torch.digamma .digamma torch.erfinv .erfinv torch.i0 .i0",
        "torch.special.entr torch.special.erfcx torch.special.ndtr torch.special.log_ndtr",
        "torch.special.i0e torch.special.xlog1py torch.deg2rad .deg2rad torch.rad2deg .rad2deg",
        *("torch.clamp torch.clip .clamp .clip", "torch.nan_to_num .nan_to_num"),
        *("torch.clamp_min .clamp_min", "torch.maximum .maximum torch.fmax .fmax"),
        *("torch.clamp_max .clamp_max", "torch.minimum .minimum torch.fmin .fmin"),
        "torch.round .round torch.floor .floor torch.ceil .ceil",
        "torch.trunc .trunc torch.fix .fix torch.frac .frac torch.signbit .signbit",
        "torch.floor_divide operator.floordiv .floor_divide",
        "torch.remainder operator.mod .remainder torch.fmod .fmod",
        "operator.eq torch.eq .eq operator.ne torch.ne .ne torch.isclose .isclose",
        "operator.lt torch.lt .lt operator.le torch.le .le",
        "operator.gt torch.gt .gt operator.ge torch.ge .ge",
        "torch.less .less torch.less_equal .less_equal torch.not_equal .not_equal",
        "torch.greater .greater torch.greater_equal .greater_equal",
        "torch.isnan .isnan torch.isinf .isinf torch.isfinite .isfinite",
        "torch.logical_and .logical_and operator.and_ torch.bitwise_and .bitwise_and",
        "torch.logical_or .logical_or operator.or_ torch.bitwise_or .bitwise_or",
        "torch.logical_not .logical_not operator.invert torch.bitwise_not .bitwise_not",
        "torch.logical_xor .logical_xor operator.xor torch.bitwise_xor .bitwise_xor",
        treatment=ENTRIES,
    ),
    # reductions
    *_rows(
        *("torch.sum .sum torch.nansum .nansum", "torch.mean .mean torch.nanmean .nanmean"),
        *("torch.prod .prod", "torch.var .var torch.std .std", "torch.amax .amax torch.amin .amin"),
        "torch.norm .norm torch.linalg.norm torch.linalg.vector_norm torch.linalg.matrix_norm",
        "torch.cumsum .cumsum torch.cumprod .cumprod torch.logcumsumexp .logcumsumexp",
        *("torch.logsumexp .logsumexp", "torch.trace .trace"),
        "torch.cdist torch.dist .dist F.pdist torch.renorm .renorm",
        "torch.diff .diff torch.trapezoid torch.cumulative_trapezoid torch.cross .cross",
        "torch.argmax .argmax torch.argmin .argmin torch.argsort .argsort",
        "torch.any .any torch.all .all torch.count_nonzero .count_nonzero",
    ),
    Row("torch.max .max torch.min .min torch.median .median", None, reduction_kind),
    *_rows(
        "torch.var_mean torch.std_mean torch.aminmax .aminmax",
        "torch.sort .sort torch.topk .topk torch.kthvalue .kthvalue torch.mode .mode",
        "torch.cummax .cummax torch.cummin .cummin",
        result=TENSORS,
    ),
    # activations
    Row("F.relu torch.relu .relu", layer(nn.ReLU), treatment=ENTRIES),
    Row("F.relu6", layer(nn.ReLU6), treatment=ENTRIES),
    Row("F.leaky_relu", layer(nn.LeakyReLU), treatment=ENTRIES),
    Row("F.rrelu torch.rrelu", layer(to.random_leaky_relu), treatment=ENTRIES),
    Row("F.elu", layer(nn.ELU), treatment=ENTRIES),
    Row("F.selu torch.selu", layer(nn.SELU), treatment=ENTRIES),
    Row("F.celu torch.celu", layer(nn.CELU), treatment=ENTRIES),
    Row("F.gelu", layer(nn.GELU), treatment=ENTRIES),
    Row("F.silu", layer(nn.SiLU), treatment=ENTRIES),
    Row("F.mish", layer(nn.Mish), treatment=ENTRIES),
    Row("F.glu", layer(nn.GLU)),
    Row("F.sigmoid torch.sigmoid .sigmoid", layer(nn.Sigmoid), treatment=ENTRIES),
    Row("torch.special.expit", layer(nn.Sigmoid), treatment=ENTRIES),
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
    Row("F.prelu torch.prelu .prelu", layer=layers.prelu),
    Row("F.softmax torch.softmax .softmax torch.special.softmax", layer(to.softmax(nn.Softmax))),
    Row("F.softmin", layer(to.softmax(nn.Softmin))),
    Row("F.log_softmax torch.log_softmax .log_softmax", layer(to.softmax(nn.LogSoftmax))),
    Row("torch.special.log_softmax", layer(to.softmax(nn.LogSoftmax))),
    Row("F.gumbel_softmax", to.gumbel_softmax, keep=True),
    # dropout; False: off unless a call says so
    Row("F.dropout", layer(dropout(nn.Dropout)), is_view=True),
    Row("F.dropout1d", layer(dropout(nn.Dropout1d)), is_view=True),
    Row("F.dropout2d", layer(dropout(nn.Dropout2d)), is_view=True),
    Row("F.dropout3d", layer(dropout(nn.Dropout3d)), is_view=True),
    Row("F.alpha_dropout", layer(dropout(nn.AlphaDropout, False)), is_view=True),
    Row("F.feature_alpha_dropout", layer(dropout(nn.FeatureAlphaDropout, False)), is_view=True),
    Row("torch.dropout", layer(lambda p, train: to.switched(train, nn.Dropout, p)), is_view=True),
    Row("torchvision.ops.stochastic_depth.stochastic_depth", layer(to.drop_samples), is_view=True),
    # pooling and resizing
    Row("F.max_pool1d torch.max_pool1d", layer(to.max_pool(nn.MaxPool1d))),
    Row("F.max_pool2d torch.max_pool2d", layer(to.max_pool(nn.MaxPool2d))),
    Row("F.max_pool3d torch.max_pool3d", layer(to.max_pool(nn.MaxPool3d))),
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
    Row("F.interpolate", layer(to.upsample)),
    Row("F.pixel_shuffle torch.pixel_shuffle", layer(nn.PixelShuffle), treatment=MOVES),
    Row("F.pixel_unshuffle torch.pixel_unshuffle", layer(nn.PixelUnshuffle), treatment=MOVES),
    Row("F.channel_shuffle torch.channel_shuffle", layer(nn.ChannelShuffle), treatment=MOVES),
    Row("F.unfold", layer(nn.Unfold)),
    Row("F.fold", layer(nn.Fold)),
    Row("F.grid_sample F.affine_grid"),
    # layers with their parameters as arguments
    *_rows(
        *("F.bilinear torch.bilinear", "F.embedding_bag", "F.one_hot"),
        "F.normalize torch.embedding torch.group_norm torch.rms_norm",
        "F.cosine_similarity torch.cosine_similarity",
        "F.pairwise_distance torch.pairwise_distance",
    ),
    Row("F.batch_norm", keep=True, layer=layers.batch_norm),
    Row("torch.batch_norm", keep=True),
    Row("F.instance_norm torch.instance_norm", keep=True),
    Row("torch._weight_norm", to.weight_norm),
    Row("F.layer_norm", layer(to.layer_norm), layer=layers.layer_norm),
    Row("torch.layer_norm", layer(to.layer_norm)),
    Row("F.rms_norm", layer(to.rms_norm), layer=layers.rms_norm),
    Row("F.group_norm", layer=layers.group_norm),
    Row("F.linear", layer=layers.linear, reading=layers.read_by_linear),
    Row("F.conv1d torch.conv1d", layer=layers.conv(nn.Conv1d)),
    Row("F.conv2d torch.conv2d", layer=layers.conv(nn.Conv2d)),
    Row("F.conv3d torch.conv3d", layer=layers.conv(nn.Conv3d)),
    Row("F.conv_transpose1d torch.conv_transpose1d", layer=layers.conv(nn.ConvTranspose1d)),
    Row("F.conv_transpose2d torch.conv_transpose2d", layer=layers.conv(nn.ConvTranspose2d)),
    Row("F.conv_transpose3d torch.conv_transpose3d", layer=layers.conv(nn.ConvTranspose3d)),
    Row("F.embedding", layer=layers.embedding),
    Row("F.local_response_norm", layer(nn.LocalResponseNorm)),
    Row("F.scaled_dot_product_attention", to.attention, keep=True),
    Row("F.multi_head_attention_forward", None, (TENSOR, TENSOR), keep=True),
    # losses
    Row("F.mse_loss", loss(nn.MSELoss)),
    Row("F.l1_loss", loss(nn.L1Loss)),
    Row("F.smooth_l1_loss", loss(nn.SmoothL1Loss)),
    Row("F.huber_loss", loss(nn.HuberLoss)),
    *_weighted_losses(
        ("F.cross_entropy", nn.CrossEntropyLoss),
        ("F.nll_loss", nn.NLLLoss),
        ("F.binary_cross_entropy", nn.BCELoss),
        ("F.binary_cross_entropy_with_logits", nn.BCEWithLogitsLoss),
    ),
    Row("F.linear_cross_entropy", to.linear_cross_entropy),
    Row("F.kl_div", loss(nn.KLDivLoss)),
    Row("F.soft_margin_loss", loss(nn.SoftMarginLoss)),
    # tensors without a gradient
    Row("torch.zeros_like torch.ones_like torch.full_like torch.empty_like", treatment=CONSTANT),
    Row(".new_zeros .new_ones .new_full .new_empty", treatment=CONSTANT),
    Row("torch.zeros torch.ones torch.full torch.empty", treatment=CONSTANT),
    Row("torch.eye torch.arange torch.linspace torch.tensor torch.as_tensor .new_tensor"),
    Row("torch.rand torch.randn torch.randint torch.randperm torch.normal", keep=True),
    Row("torch.rand_like torch.randn_like torch.randint_like", keep=True),
    Row("torch.bernoulli .bernoulli", to.draw(torch.bernoulli), keep=True, treatment=ENTRIES),
    Row("torch.poisson", to.draw(torch.poisson), keep=True, treatment=ENTRIES),
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

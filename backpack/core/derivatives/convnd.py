"""Convolutions of one, two and three dimensions: stride, dilation, groups, every padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextvars import ContextVar
from math import inf
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import Conv1d, Conv2d, Conv3d
from torch.nn.functional import pad

from backpack.core import fast
from backpack.core.derivatives import affine, reductions
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.facts import always
from backpack.core.derivatives.linear_maps import apply_transposed, map_rows
from backpack.core.derivatives.patches import Geometry, patch_gram, patches
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.registry import register

# Entries of a sample from which on more of them in one convolution are no faster.
FEW_ENTRIES = 2**18

_SAVE_MEMORY: ContextVar[bool] = ContextVar("backpack_save_memory", default=False)


class _Selected:
    """Whether the thread that asks has selected the low-memory rule."""

    def __get__(self, instance: object, owner: type) -> bool:
        return _SAVE_MEMORY.get()


class weight_jac_t_save_memory:
    """Context manager: per-sample weight products of convolutions without unfolding the input.

    Args:
        save_memory: Whether to use the low-memory rule. Default: True.
    """

    active = _Selected()

    def __init__(self, save_memory: bool = True):
        self._save_memory = save_memory
        self._outer: list[bool] = []

    def __enter__(self) -> None:
        self._outer.append(_SAVE_MEMORY.get())
        _SAVE_MEMORY.set(self._save_memory)

    def __exit__(self, *exception: object) -> None:
        _SAVE_MEMORY.set(self._outer.pop())


def per_axis(axes: int, *settings: Any) -> list[tuple[int, ...]]:
    """Return settings of each spatial axis: torch reads one number as that of all of them."""
    found = []
    for setting in settings:
        values = (setting,) if isinstance(setting, int) else tuple(setting)
        found.append(values * axes if len(values) < axes else values)
    return found


def unfolded(x: Tensor, moves: Geometry, positions: Sequence[int]) -> Tensor:
    """Return patches by group: padded ``[N, C, *in] -> [N, G, C/G·k, T]``."""
    return patches(x, moves, positions).reshape(
        x.shape[0], moves.groups, -1, Size(positions).numel()
    )


def correlate(
    big: Tensor, small: Tensor, moves: Geometry, padding: Sequence[int], sum_batch: bool
) -> Tensor:
    """Correlate with one grouped convolution: groups are samples (unless summed) and groups.

    A convolution's weight gradient correlates its padded input with the gradient of its output; a
    transposed convolution's correlates the padded gradient of its output with its input.

    Of ``big [N, C, *in]``, which zeros are added to at both ends of each axis, and ``small [V, N,
    K, *positions]``: ``[V, N, K, C/G, *kernel]``, without N if summed.
    """
    num_v, num_n, k = small.shape[:3]
    groups, kernel = moves.groups, moves.size
    # channels in the order (sample,) group, vector, channel of the group
    small = small.reshape(num_v, num_n, groups, k // groups, *small.shape[3:])
    small = small.transpose(0, 1).transpose(1, 2).flatten(1, 3)
    if not sum_batch:
        big, small = big.flatten(0, 1).unsqueeze(0), small.flatten(0, 1).unsqueeze(0)
    samples = 1 if sum_batch else num_n
    per_group = big.shape[1] // (samples * groups)
    weight = big.new_empty(1).expand(samples * num_v * k, per_group, *kernel)
    options = moves.stride, padding, moves.dilation, False, [0] * len(kernel), samples * groups
    _, result, _ = torch.ops.aten.convolution_backward(
        small, big, weight, None, *options, [False, True, False]
    )
    result = result.reshape(samples, groups, num_v, k // groups, per_group, *kernel)
    result = result.permute(2, 0, 1, 3, *range(4, result.dim())).flatten(2, 3)
    return result.squeeze(1) if sum_batch else result


def patches_are_cheaper(moves: Geometry, patch_entries: int, product_entries: int) -> bool:
    """Whether unfolding the input and multiplying is faster than a convolution for each sample.

    Unfolding costs time for each entry of the patches. A convolution for each sample costs a fixed
    time (as much as unfolding some 2^16 entries), and has to copy the product. Measured on a CPU.
    The entries are those of one sample.
    """
    is_padded = any(moves.before) or any(moves.after)
    is_view = Size(moves.size).numel() == 1 and not is_padded and set(moves.stride) == {1}
    return is_view or patch_entries < 2**16 + product_entries // 2


class ConvolutionDerivatives(BaseDerivatives):
    """What both kinds of convolution share, such as a bias for each channel."""

    params = ("weight", "bias")
    squares_with_input = True
    hessian_is_zero = is_linear_in_params = jacobian_is_constant = always  # J is that of the kernel
    # stride, padding, dilation, whether it is transposed, and output padding
    _options: Callable[[Context], tuple[Any, ...]]
    # brings V weights to one, with outputs in the order group, vector, channel of the group
    _by_output: Callable[[Tensor, int], Tensor]
    # returns products with the weight of each sample (or summed): of patches or, with low memory,
    # by a convolution
    _multiply: Callable[[Context, Tensor, bool], Tensor]

    def costly_gradients(self, call: Call, wanted: Set[str]) -> tuple[str, ...]:
        """Return both: one kernel computes them."""
        return self.params

    def param_vjp_reads_inputs_alone(self, module: Any, name: str) -> bool:
        """Return whether that is the weight: the bias has few entries."""
        return name == "weight"

    def min_dims(self, module: Any) -> int:
        """Return the number of spatial axes, and batch and channels."""
        return len(module.kernel_size) + 2

    def _convolve(self, c: Context, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        """Convolve ``[N, I, *in]`` as the module does, without the bias."""
        return torch.ops.aten.convolution(x, weight, None, *self._options(c), groups)

    def _pull(self, c: Context, s: Tensor, shape: Sequence[int]) -> Tensor:
        """Apply the transpose to ``[N, O, *out]``: ``[N, *shape]``, for an input of that shape."""
        # of the input the kernels read the shape alone
        if s.is_cpu and not torch.is_grad_enabled():
            like = s.new_empty(len(s), *shape)  # the kernels copy what is not in one piece
        else:
            like = s.new_zeros(1).expand(len(s), *shape)  # a graph keeps it
        options = *self._options(c), c.module.groups, [True, False, False]
        product, _, _ = torch.ops.aten.convolution_backward(
            s, like, c.params["weight"], None, *options
        )
        return product

    def jvp(self, c: Context, t: Tensor) -> Tensor:
        weight, groups = c.params["weight"], c.module.groups
        return map_rows(lambda x: self._convolve(c, x, weight, groups), t)

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        shape = c.input.shape[1:]
        return map_rows(lambda s: self._pull(c, s, shape), v)

    def weight_jvp(self, c: Context, t: Tensor) -> Tensor:
        """Convolve the input with ``t``."""
        x, groups = c.x, c.module.groups
        out = self._convolve(c, x, self._by_output(t, groups), groups)
        out = out.reshape(len(x), groups, len(t), -1, *out.shape[2:])
        return out.permute(2, 0, 1, 3, *range(4, out.dim())).flatten(2, 3)

    def weight_vjp(self, c: Context, v: Tensor) -> Tensor:
        """Return the products of each sample."""
        return self._multiply(c, v, False)

    def bias_jvp(self, c: Context, t: Tensor) -> Tensor:
        """Repeat for each position."""
        y = c.y
        positions = (1,) * (y.dim() - 2)
        return t.reshape(len(t), 1, -1, *positions).expand(-1, *y.shape)

    def bias_vjp(self, c: Context, v: Tensor) -> Tensor:
        """Sum over the positions."""
        return v.flatten(3).sum(3)

    @fast.body("A bias has fewer entries than what arrives.", "bias_vjp")
    def reduced(
        self, c: Context, name: str, v: Any, wanted: Set[str], weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        if name == "bias":  # without slices: a short step takes 2 to 4 % less
            return reductions.of_products(self.bias_vjp(c, v), wanted, weights)
        return super().reduced(c, name, v, wanted, weights)

    def _by_gram(
        self, c: Context, v: Tensor, wanted: Set[str], pair: Callable[[], tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        """Reduce products with the weight to norms, by Gram matrices, and to the gradient.

        A pair has ``[V, N·G, T, O]`` and ``[N·G, T, I]``: groups are further samples, whose squared
        norms add up.
        """
        values = {}
        if "square_norm" in wanted:
            norms = affine.square_norm(*pair())
            values["square_norm"] = norms.unflatten(0, (-1, c.module.groups)).sum(1)
        if "gradient" in wanted:
            values["gradient"] = self.param_vjp_sum(c, "weight", v).sum(0)
        return values


@register(Conv1d, Conv2d, Conv3d)
class ConvNDDerivatives(ConvolutionDerivatives):
    """Derivatives of ``torch.nn.Conv1d``, ``Conv2d`` and ``Conv3d``.

    Letters: n sample, t position, g group, o output channel, i entry of an input patch.
    """

    kronecker_rows_are_constant = True
    kronecker_rows_are_shared = True
    joins_bias = True
    repeats_output = always  # from the input and the kernel

    def _geometry(self, c: Context) -> Geometry:
        size = c.params["weight"].shape[2:]  # another than `kernel_size` if the weight is another
        module, mode, padding = c.module, c.module.padding_mode, c.module.padding
        settings = module.stride, module.dilation, 0 if isinstance(padding, str) else padding
        stride, dilation, before = per_axis(len(size), *settings)
        after: Sequence[int] = before
        if mode != "zeros":
            widths = module._reversed_padding_repeated_twice  # what `forward` pads, for good
            before, after = widths[-2::-2], widths[::-2]
        elif padding == "same":
            totals = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
            before = tuple([total // 2 for total in totals])
            after = tuple([total - low for total, low in zip(totals, before, strict=True)])
        mode = "constant" if mode == "zeros" else mode
        return Geometry(size, stride, dilation, before, after, module.groups, mode)

    def _pad(self, moves: Geometry, x: Tensor, explicit: bool = False) -> Tensor:
        """Pad what the kernel does not pad (or, ``explicit``, everything)."""
        is_padded = any(moves.before) or any(moves.after)
        if not is_padded or (any(moves.native) and not explicit):
            return x
        ends = zip(reversed(moves.before), reversed(moves.after), strict=True)
        return pad(x, [width for pair in ends for width in pair], mode=moves.mode)

    def _options(self, c: Context) -> tuple[Any, ...]:
        moves = self._geometry(c)
        return moves.stride, moves.native, moves.dilation, False, [0] * len(moves.size)

    def _convolve(self, c: Context, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        x = self._pad(self._geometry(c), x)
        return super()._convolve(c, x, weight, groups)

    def _pull(self, c: Context, s: Tensor, shape: Sequence[int]) -> Tensor:
        moves = self._geometry(c)
        padded = self._pad(moves, s.new_zeros(1).expand(1, *shape)).shape[1:]
        product = super()._pull(c, s, padded)
        if padded == shape:
            return product
        return apply_transposed(lambda x: self._pad(moves, x), (len(s), *shape), product)

    def _by_output(self, t: Tensor, groups: int) -> Tensor:
        return t.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 2)

    @fast.body("One convolution sums the products of all samples.", "param_vjp")
    def weight_vjp_sum(self, c: Context, v: Tensor) -> Tensor:
        return self._multiply(c, v, sum_batch=True)

    def _multiply(self, c: Context, v: Tensor, sum_batch: bool) -> Tensor:
        """Multiply with the patches of the input; summed (or low memory), correlate with it."""
        if not (sum_batch or weight_jac_t_save_memory.active):
            return self._reduced_weight(c, v, {"individual"}, None)["individual"]
        moves = self._geometry(c)
        return correlate(self._pad(moves, c.x), v, moves, moves.native, sum_batch)

    def _unfold(self, c: Context, moves: Geometry, x: Tensor) -> Tensor:
        """Return the patches of the input: ``[N, I, *in] -> [N, G, I/G·k, T]``."""
        return unfolded(self._pad(moves, x, explicit=True), moves, c.output.shape[2:])

    def _rows(self, c: Context, moves: Geometry, x: Tensor) -> Tensor:
        """Return the patches of each position, groups as further samples: ``[N·G, T, I/G·k]``."""
        return self._unfold(c, moves, x).flatten(0, 1).mT

    @fast.body("Norms are those of Gram matrices, squares those of fewer columns.", "param_vjp")
    def reduced(
        self, c: Context, name: str, v: Any, wanted: Set[str], weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        if name != "weight":
            return super().reduced(c, name, v, wanted, weights)
        return self._reduced_weight(c, v, wanted, weights)

    def _reduced_weight(
        self, c: Context, v: Tensor, wanted: Set[str], weights: Tensor | None
    ) -> dict[str, Tensor]:
        """Reduce the individual products, made of patches or of convolutions."""
        x, p, moves = c.x, c.params["weight"], self._geometry(c)
        out_shape, groups = v.shape[3:], moves.groups
        flat = reductions.fewer_columns(v.flatten(3), wanted, weights)
        num_v, num_n, num_o, positions = flat.shape
        s = flat.unflatten(2, (groups, -1))
        features = p.shape[1:].numel()
        sizes = (num_v, num_o // groups, positions, features)
        if wanted <= {"gradient", "square_norm"} and affine.gram_is_cheaper(*sizes):
            return self._by_gram(
                c, v, wanted, lambda: (s.flatten(1, 2).mT, self._rows(c, moves, x))
            )

        def by_patches(samples: slice) -> reductions.Multiply:
            rows = self._unfold(c, moves, x[samples]).flatten(0, 1).mT

            def multiply(columns: slice, out: Tensor | None) -> Tensor:
                part = s[columns, samples]
                if out is not None and (groups == 1 or len(part) == 1):
                    by_group = out.view(len(part), -1, num_o // groups, features)
                    reductions.stacked_product(part, rows, by_group)
                    return out
                return reductions.stacked_product(part, rows).reshape(*part.shape[:2], *p.shape)

            return multiply

        def by_convolution(samples: slice) -> reductions.Multiply:
            padding, padded = moves.native, self._pad(moves, x[samples])

            def multiply(columns: slice, out: Tensor | None) -> Tensor:
                part = flat[columns, samples].unflatten(3, out_shape)
                return correlate(padded, part, moves, padding, False)

            return multiply

        product_entries, patch_entries = num_v * p.numel(), groups * features * positions
        # a convolution of several samples at once is faster while its tensors stay in the cache
        product, tensors = by_convolution, (x.shape[1:].numel(), num_v * num_o * positions)
        entries = max(FEW_ENTRIES, product_entries, *tensors)
        if not flat.is_cpu or patches_are_cheaper(moves, patch_entries, product_entries):
            product, entries = by_patches, max(product_entries, patch_entries)
        shape = (num_v, num_n, *p.shape)
        return reductions.in_slices(product, shape, entries, flat, wanted, weights)

    @fast.body("Patches, or products with them, are turned in slices.", "param_vjp")
    def square_in_bases(
        self,
        c: Context,
        name: str,
        v: Any,
        bases: Sequence[Tensor],
        weights: Tensor | None = None,
        joint: bool = False,
    ) -> Tensor:
        moves, x = self._geometry(c), c.x
        if name != "weight" or moves.groups > 1 or len(bases) < 2:
            return super().square_in_bases(c, name, v, bases, weights, joint)
        s = v.flatten(3).mT  # [V, N, T, O]
        entries = s.shape[2] * max(len(s) * s.shape[3], len(bases[1]))
        size, total = reductions.slice_size(entries, x.device), None
        for start in range(0, len(x), size):
            span = slice(start, start + size)
            rows = self._rows(c, moves, x[span])
            rows = affine.with_one(rows) if joint else rows
            of_span = None if weights is None else weights[:, span]
            square = affine.square_in_bases(s[:, span], rows, bases, of_span)
            total = square if total is None else total + square
        assert total is not None
        return total

    def kron_rows(self, c: Context, name: str, v: Any, approximation: str | None = None) -> Tensor:
        """Sum over the positions or keep them: ``[V, N, O, *] -> [V, N', 1, O]``."""
        return affine.position_rows(v.flatten(3).transpose(2, 3), approximation).unsqueeze(2)

    def kron_inputs(
        self, c: Context, name: str, approximation: str | None = None, max_size: float = inf
    ) -> list[Tensor]:
        """Return A of the patches, ``[I/G·k, I/G·k]``, mean over G, or its diagonal."""
        if name != "weight":
            return []
        if c.params["weight"][0].numel() > max_size:  # there need not be all patches
            return [self._diagonal(c, approximation)]
        x, moves, positions = c.x, self._geometry(c), c.output.shape[2:]
        if approximation == "reduce":
            return [affine.input_factor(self._rows(c, moves, x), approximation)]
        if moves.mode != "constant":
            x = self._pad(moves, x, explicit=True)
            moves = moves._replace(before=[0] * len(moves.size))
        # at least in single precision: the sum has more digits, and may be large
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        each = wide.unflatten(1, (moves.groups, -1)).flatten(0, 1)
        count = len(each) * (positions.numel() if approximation == "expand" else 1)
        return [patch_gram(each, moves, positions).div_(count).to(x.dtype)]

    def _diagonal(self, c: Context, approximation: str | None) -> Tensor:
        """Return the diagonal of A, ``[I/G·k]``: squares of patches are patches of squares."""
        x, moves = c.x, self._geometry(c)
        if approximation == "reduce":
            return affine.input_factor(self._rows(c, moves, x), approximation, max_size=0)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self._unfold(c, moves, wide.square().sum(0, keepdim=True))  # [1, G, I/G·k, T]
        num_t = squares.shape[3] if approximation == "expand" else 1
        return (squares.sum((0, 1, 3)) / (len(x) * squares.shape[1] * num_t)).to(x.dtype)

    def kron_means(self, c: Context, name: str, num_n: int) -> Tensor | None:
        """Average the patches of each sample: ``[N, G, I/G·k]``."""
        if name != "weight":
            return None
        return self._unfold(c, self._geometry(c), c.x).mean(3).unflatten(0, (num_n, -1)).mean(1)

    def kron_joint_input(
        self, c: Context, approximation: str | None = None, max_size: float = inf
    ) -> Tensor:
        """Return A of patches and one, ``[I/G·k + 1, I/G·k + 1]``, mean over G, or its diagonal."""
        if c.params["weight"][0].numel() + 1 > max_size:
            own = self._diagonal(c, approximation)
            of_one = c.output.shape[2:].numel() if approximation is None else 1
            return torch.cat([own, own.new_full((1,), of_one)])
        rows = affine.with_one(self._rows(c, self._geometry(c), c.x))
        return affine.input_factor(rows, approximation)

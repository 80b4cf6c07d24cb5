"""The contract of a module's derivatives, with a generic body wherever one exists.

Letters: a module maps inputs ``[N, *in]`` and parameters ``[*p]`` to an output ``[N, *out]``;
``V`` counts stacked vectors. ``J`` is the Jacobian of the output with respect to the input, ``J_p``
with respect to a parameter. A ``mat`` without the ``V`` axis is accepted, the result then has none.
``g_out`` holds the gradient of the loss with respect to the output: second derivatives need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn import Module

from backpack.context import disable
from backpack.core.tape import bound, describe
from backpack.utils.subsampling import subsample

Rows = Sequence[int] | slice | None
Grads = Sequence[Tensor | None] | None

# Per-sample products of a parameter are squared and summed in slices of about this many entries,
# so that the intermediate tensor stays small (and on a CPU, in the cache).
SLICE_ENTRIES = 2**21


class BaseDerivatives:
    """Derivatives of a module: products with its Jacobians and its second derivative.

    A subclass implements ``_jac_mat_prod``, ``_jac_t_mat_prod`` and, for each name in ``params``,
    ``_<name>_jac_mat_prod`` and ``_<name>_jac_t_mat_prod``. Everything else has a generic body;
    override it where the module's structure allows a faster one.

    Attributes:
        params: Names of the parameters.
        needs_output: Whether a formula reads ``module.output`` (beyond its shape).
        kronecker_rows_are_constant: Whether ``kronecker_rows`` is the same map for all samples.
    """

    params: ClassVar[tuple[str, ...]] = ()
    needs_output: ClassVar[bool] = False
    kronecker_rows_are_constant: ClassVar[bool] = False

    # ------------------------------------------------------------------ facts about the module

    def hessian_is_zero(self, module: Module) -> bool:
        """Return whether the output is an affine (or piecewise affine) function of the input."""
        return True

    def hessian_is_diagonal(self, module: Module) -> bool:
        """Return whether output entry i depends on input entry i alone."""
        return self.hessian_is_zero(module)

    def hessian_is_psd(self) -> bool:
        """Return whether the second derivative is positive semidefinite for every ``g_out``."""
        return False

    def mixes_samples(self, module: Module) -> bool:
        """Return whether a sample's output depends on other samples."""
        return False

    def min_dims(self, module: Module) -> int:
        """Return how many axes an output has at least, the batch axis included."""
        return 0

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Return what must be kept from the forward pass, for ``module._backpack_saved``."""
        return {}

    # ------------------------------------------------------------------ Jacobians

    def jac_mat_prod(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor | Sequence[Tensor | None],
        subsampling: Rows = None,
    ) -> Tensor:
        """Apply the Jacobian, ``J mat``.

        Args:
            module: Module whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs.
            mat: ``[V, *in]``; for several inputs a sequence with one entry (or None) for each
                argument of the call.
            subsampling: Rows of the batch that ``mat`` holds. Default: all.

        Returns:
            ``[V, *out]``.

        Raises:
            ValueError: If a shape does not match.
        """
        mats = [mat] if isinstance(mat, Tensor) else list(mat)
        had_v = True
        with bound(module):
            inputs = [vars(module)[f"input{i}"] for i in range(len(mats))]
            for i, one in enumerate(mats):
                if one is not None:
                    mats[i], had_v = self._check(module, one, inputs[i].shape, subsampling)
            several = sum(isinstance(x, Tensor) for x in inputs) > 1  # others are options
            arguments = mats if several else mats[0]
            result = self._jac_mat_prod(module, g_inp, g_out, arguments, subsampling)
        return result if had_v else result.squeeze(0)

    def jac_t_mat_prod(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
    ) -> Any:
        """Apply the transposed Jacobian, ``Jᵀ mat``.

        Args:
            module: Module whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs.
            mat: ``[V, *out]``.
            subsampling: Rows of the batch that ``mat`` holds. Default: all.

        Returns:
            ``[V, *in]``; for a module with several inputs a tuple with one entry for each.

        Raises:
            ValueError: If a shape does not match.
        """
        with bound(module) as m:
            mat, had_v = self._check(module, mat, m.output.shape, subsampling)
            result = self._jac_t_mat_prod(module, g_inp, g_out, mat, subsampling)
        if had_v:
            return result
        if isinstance(result, tuple):
            return tuple(r if r is None else r.squeeze(0) for r in result)
        return result.squeeze(0)

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no jac_mat_prod.")

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no jac_t_mat_prod.")

    def ea_jac_t_mat_jac_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows = None
    ) -> Tensor:
        """Average ``Jᵀ mat J`` over the samples (expectation approximation of KFRA).

        Source: Botev et al., Practical Gauss-Newton optimisation for deep learning (2017).

        Args:
            module: Module whose call is at hand, with one input.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs (not used).
            mat: ``[D_out, D_out]``, D_out entries in a sample's output.
            subsampling: Rows of the batch to average over. Default: all.

        Returns:
            ``[D_in, D_in]``.

        Raises:
            ValueError: If ``mat`` is not square in the number of outputs.
        """
        with bound(module) as m:
            dim = m.output.shape[1:].numel()
            if mat.shape != (dim, dim):
                raise ValueError(
                    f"{describe(module)}: expected a matrix of shape {[dim, dim]} (entries of one "
                    f"sample's output), got {list(mat.shape)}."
                )
            return self._ea_jac_t_mat_jac_prod(module, g_inp, g_out, mat, subsampling)

    def jacobian_is_constant(self, module: Module) -> bool:
        """Return whether all samples have the same Jacobian."""
        return False

    def _ea_jac_t_mat_jac_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        samples = row_numbers(module.input0.shape[0], subsampling)
        if self.jacobian_is_constant(module):
            samples = samples[:1]
        total: Tensor | int = 0
        for n in samples:  # one sample at a time: its Jacobian is a dense matrix
            (once,) = self.dense_jacobian_products(module, g_inp, g_out, mat, [n])
            (twice,) = self.dense_jacobian_products(module, g_inp, g_out, once, [n])
            total = total + twice
        return total / len(samples)  # type: ignore[return-value]

    def dense_jacobian_products(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows = None
    ) -> tuple[Tensor, ...]:
        """Average ``matᵀ J`` over samples, for each input: ``[D_out, K] -> [K, D_in]``."""
        with bound(module) as m:
            shape = subsample(m.output, subsampling=subsampling).shape
        stacked = mat.T.reshape(-1, 1, *shape[1:]).expand(-1, *shape)
        products = self.jac_t_mat_prod(module, g_inp, g_out, stacked, subsampling=subsampling)
        products = products if isinstance(products, tuple) else (products,)
        return tuple(product.mean(1).flatten(1) for product in products)

    # ------------------------------------------------------------------ parameters

    def param_mjp(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool = True,
        subsampling: Rows = None,
    ) -> Tensor:
        """Apply the transposed Jacobian with respect to a parameter, ``J_pᵀ mat``.

        Args:
            param_str: Name of the parameter.
            module: Module whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs.
            mat: ``[V, *out]``.
            sum_batch: Sum over the samples.
            subsampling: Rows of the batch that ``mat`` holds. Default: all.

        Returns:
            ``[V, *p]`` if summed over the samples, else ``[V, N, *p]``.

        Raises:
            ValueError: If a shape does not match, or there is no such parameter.
        """
        rule = self._rule(module, param_str, "_jac_t_mat_prod")
        with bound(module) as m:
            mat, had_v = self._check(module, mat, m.output.shape, subsampling)
            result = rule(module, g_inp, g_out, mat, sum_batch, subsampling)
        return result if had_v else result.squeeze(0)

    def param_jac_mat_prod(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
    ) -> Tensor:
        """Apply the Jacobian with respect to a parameter, ``J_p mat``: ``[V, *p] -> [V, *out]``."""
        rule = self._rule(module, param_str, "_jac_mat_prod")
        shape = getattr(module, param_str).shape
        with bound(module):
            if mat.shape != shape and mat.shape[1:] != shape:
                raise ValueError(
                    f"{describe(module)}.{param_str} has shape {list(shape)}: expected "
                    f"{['V', *shape]} (or without V), got {list(mat.shape)}."
                )
            had_v = mat.dim() > len(shape)
            result = rule(module, g_inp, g_out, mat if had_v else mat.unsqueeze(0), subsampling)
        return result if had_v else result.squeeze(0)

    def weight_jac_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows = None
    ) -> Tensor:
        """Apply the Jacobian with respect to ``weight``: ``[V, *p] -> [V, *out]``."""
        return self.param_jac_mat_prod("weight", module, g_inp, g_out, mat, subsampling)

    def bias_jac_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows = None
    ) -> Tensor:
        """Apply the Jacobian with respect to ``bias``: ``[V, *p] -> [V, *out]``."""
        return self.param_jac_mat_prod("bias", module, g_inp, g_out, mat, subsampling)

    def weight_jac_t_mat_prod(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool = True,
        subsampling: Rows = None,
    ) -> Tensor:
        """Apply the transposed Jacobian with respect to ``weight``, see :meth:`param_mjp`."""
        return self.param_mjp("weight", module, g_inp, g_out, mat, sum_batch, subsampling)

    def bias_jac_t_mat_prod(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool = True,
        subsampling: Rows = None,
    ) -> Tensor:
        """Apply the transposed Jacobian with respect to ``bias``, see :meth:`param_mjp`."""
        return self.param_mjp("bias", module, g_inp, g_out, mat, sum_batch, subsampling)

    def param_mjp_batch_square(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Sum the squares of ``J_pᵀ mat`` over V, with ``weights`` (``[V, N]``): ``[N, *p]``."""
        squares = self.param_mjp(param_str, module, g_inp, g_out, mat, False, subsampling).square()
        return (
            squares.sum(0) if weights is None else torch.einsum("vn...,vn->n...", squares, weights)
        )

    def param_mjp_square_sum(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Sum the squares of ``J_pᵀ mat`` over V and N, with ``weights`` (``[V, N]``): ``[*p]``."""
        total: Tensor | int = 0
        for part, rows, span in self._in_slices(param_str, module, mat, subsampling):
            part_weights = None if weights is None else weights[:, span]
            total = total + self.param_mjp_batch_square(
                param_str, module, g_inp, g_out, part, rows, part_weights
            ).sum(0)
        return total  # type: ignore[return-value]

    def param_mjp_square_norm(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
    ) -> Tensor:
        """Squared norms of each sample's ``J_pᵀ mat``, summed over V: ``[V, *out] -> [N]``."""
        parts = self._in_slices(param_str, module, mat, subsampling)
        norms = [
            self.param_mjp(param_str, module, g_inp, g_out, part, False, rows)
            .square()
            .transpose(0, 1)
            .flatten(1)
            .sum(1)
            for part, rows, _ in parts
        ]
        return torch.cat(norms)

    def kronecker_rows(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
    ) -> Tensor:
        """Vectors whose outer products make the first Kronecker factor.

        Generic: the flattened ``J_pᵀ mat``; its outer products are the exact block.

        Args:
            param_str: Name of the parameter.
            module: Module whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs.
            mat: ``[V, *out]``.
            subsampling: Rows of the batch that ``mat`` holds. Default: all.

        Returns:
            ``[V, N, G, O]``, for G groups that share the factor ``[O, O]`` (its mean over G).
        """
        products = self.param_mjp(param_str, module, g_inp, g_out, mat, False, subsampling)
        return products.flatten(2).unsqueeze(2)

    def kronecker_input_factors(
        self, param_str: str, module: Module, subsampling: Rows = None
    ) -> list[Tensor]:
        """Kronecker factors made of the inputs. Generic: none, the first factor is the block."""
        return []

    # ------------------------------------------------------------------ second derivative

    def hessian_diagonal(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Rows = None
    ) -> Tensor:
        """Diagonal of the second derivative ``sum_k g_out_k ∇²_x y_k``: ``[*in]``.

        Only for modules whose second derivative is diagonal.

        Raises:
            ValueError: If ``g_out`` is missing.
        """
        self._need_g_out(module, g_out)
        with bound(module):
            return self._hessian_diagonal(module, g_inp, g_out, subsampling)

    def _hessian_diagonal(
        self, module: Any, g_inp: Grads, g_out: Grads, subsampling: Rows
    ) -> Tensor:
        if not self.hessian_is_zero(module):
            raise NotImplementedError(f"{type(self).__name__} has no diagonal second derivative.")
        return torch.zeros_like(subsample(module.input0, subsampling=subsampling))

    def residual_mat_prod(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
    ) -> Tensor:
        """Apply the second derivative, ``(sum_k g_out_k ∇²_x y_k) mat``: ``[V, *in] -> [V, *in]``.

        Raises:
            ValueError: If a shape does not match, or ``g_out`` is missing.
        """
        with bound(module) as m:
            mat, had_v = self._check(module, mat, m.input0.shape, subsampling)
            result = self._residual_mat_prod(module, g_inp, g_out, mat, subsampling)
        return result if had_v else result.squeeze(0)

    def _residual_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        if self.hessian_is_zero(module):
            return torch.zeros_like(mat)
        return mat * self.hessian_diagonal(module, g_inp, g_out, subsampling)

    def mixed_residual(
        self,
        module: Module,
        g_out: Grads,
        inputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
        subsampling: Rows = None,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Apply the second derivative with respect to the inputs and parameters together.

        Needed where a parameter also influences the module's input: reused and tied parameters.
        Generic, by forward-over-reverse differentiation of the module, sample by sample.

        Args:
            module: Module whose call is at hand.
            g_out: Gradients with respect to the outputs.
            inputs: A ``[V, *in]`` (or None, for zero) for each input.
            params: A ``[V, *p]`` for each parameter that varies.
            subsampling: Rows of the batch. Default: all.

        Returns:
            For each input ``[V, *in]``, and for each varied parameter ``[V, N, *p]``.
        """
        self._need_g_out(module, g_out)
        grad = subsample(g_out[0], subsampling=subsampling)  # type: ignore[index, arg-type]
        xs = [
            subsample(vars(module)[f"input{i}"], subsampling=subsampling)
            for i in range(len(inputs))
        ]
        constants = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        values = {name: constants[name].detach() for name in params}
        num_v = next(m for m in [*params.values(), *inputs] if m is not None).shape[0]
        tangents = [
            torch.zeros(num_v, *x.shape, dtype=x.dtype, device=x.device) if t is None else t
            for x, t in zip(xs, inputs, strict=True)
        ]

        def gradient(g: Tensor, ps: dict[str, Tensor], *sample: Tensor) -> Any:
            def forward(ps: dict[str, Tensor], *sample: Tensor) -> Tensor:
                rows = tuple(s.unsqueeze(0) for s in sample)
                return functional_call(module, {**constants, **ps}, rows).squeeze(0)

            return vjp(forward, ps, *sample)[1](g)

        def sample_product(g: Tensor, dps: Any, sample: Any, dsample: Any) -> Any:
            return jvp(lambda ps, *s: gradient(g, ps, *s), (values, *sample), (dps, *dsample))[1]

        over_samples = vmap(sample_product, in_dims=(0, None, 0, 0))
        with disable():
            d_params, *d_inputs = vmap(over_samples, in_dims=(None, 0, None, 0))(
                grad, dict(params), tuple(xs), tuple(tangents)
            )
        return d_inputs, d_params

    # ------------------------------------------------------------------ helpers

    def _check(
        self, module: Module, mat: Tensor, shape: Size, subsampling: Rows
    ) -> tuple[Tensor, bool]:
        """Check ``mat`` against ``[V, *shape]`` and add the V axis if it is missing."""
        if subsampling is not None and shape:
            shape = Size([len(row_numbers(shape[0], subsampling)), *shape[1:]])
        if mat.dim() > len(shape) and mat.shape[1:] == shape:
            return mat, True
        if mat.shape == shape:
            return mat.unsqueeze(0), False
        raise ValueError(
            f"{describe(module)}: expected a tensor of shape {['V', *shape]} (or without V), got "
            f"{list(mat.shape)}."
        )

    def _rule(self, module: Module, param_str: str, suffix: str) -> Callable[..., Tensor]:
        if param_str not in self.params or getattr(module, param_str, None) is None:
            raise ValueError(
                f"{describe(module)} has no parameter '{param_str}' that {type(self).__name__} "
                f"knows. It knows: {', '.join(self.params) or 'none'}."
            )
        return getattr(self, f"_{param_str}{suffix}")

    def _need_g_out(self, module: Module, g_out: Grads) -> None:
        if g_out is None or g_out[0] is None:
            raise ValueError(
                f"{describe(module)}: second derivatives need g_out, the gradient of the loss with "
                "respect to the module's output."
            )

    def _in_slices(
        self, param_str: str, module: Module, mat: Tensor, subsampling: Rows
    ) -> list[tuple[Tensor, Rows, slice]]:
        """Split the samples so that ``[V, slice, *p]`` has about SLICE_ENTRIES entries."""
        per_sample = mat.shape[0] * getattr(module, param_str).numel()
        size = max(1, SLICE_ENTRIES // max(1, per_sample))
        if size >= mat.shape[1]:
            return [(mat, subsampling, slice(None))]
        with bound(module) as m:
            rows = row_numbers(m.output.shape[0], subsampling)
        spans = [slice(i, i + size) for i in range(0, len(rows), size)]
        return [(mat[:, span], take_rows(rows, span), span) for span in spans]


def row_numbers(size: int, subsampling: Rows) -> Sequence[int]:
    """Return the rows of a batch of ``size`` that ``subsampling`` selects."""
    if subsampling is None:
        return range(size)
    if isinstance(subsampling, slice):
        return range(*subsampling.indices(size))
    return subsampling


def take_rows(rows: Sequence[int], span: slice) -> Sequence[int] | slice:
    """Return a span of a selection of rows, as a slice (no copy) where possible."""
    part = rows[span]
    return slice(part.start, part.stop, part.step) if isinstance(part, range) else part

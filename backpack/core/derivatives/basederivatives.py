"""The contract of a module's derivatives, with a generic body wherever one exists.

Letters: a module maps inputs ``[N, *in]`` and parameters ``[*p]`` to an output ``[N, *out]``;
``V`` counts stacked vectors. ``J`` is the Jacobian of the output with respect to the input, ``J_p``
with respect to a parameter. A ``mat`` without the ``V`` axis is accepted, the result then has none.
``g_out`` holds the gradient of the loss with respect to the output: second derivatives need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum
from math import prod
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch.func import functional_call
from torch.nn import Module, Parameter

from backpack.core.derivatives import reductions
from backpack.core.derivatives.by_autograd import Evaluation, second_products
from backpack.core.record.kernels import Substitute
from backpack.core.record.layout import Layout, unbatched
from backpack.core.record.tape import AT_HAND, Call, bound, describe
from backpack.core.rows import Rows, one_by_one, row_numbers, take_rows
from backpack.core.types import Grads, Mats
from backpack.utils.subsampling import subsample


class BatchAxis(Enum):
    """What a rule says about the batch axis of its module's tensors."""

    FIXED = "at batch_axis_in and batch_axis_out"
    LEADING = "any axis but the last trailing_axes: they are all alike to the module"
    FOLLOWED = "wherever the tensors have it: the rule finds out where it goes"


class BaseDerivatives:
    """Derivatives of a module: products with its Jacobians and its second derivative.

    A subclass implements ``_jac_mat_prod``, ``_jac_t_mat_prod`` and, for each name in ``params``,
    ``_<name>_jac_mat_prod`` and ``_<name>_jac_t_mat_prod``. Everything else has a generic body;
    override it where the module's structure allows a faster one.

    Attributes:
        params: Names of the parameters.
        batch_axis: Where the rule expects the samples.
        includes_children: Whether what children of the module compute belongs to its call.
        depends_on_layouts: Whether what the rule found out about a call holds for its layouts only.
        needs_output: Whether a formula reads ``module.output`` (beyond its shape), and has a
            derivative with respect to it.
        reads_output: Whether a formula reads ``module.output``; its derivative may be zero.
        reads_input: Whether a formula reads entries of the inputs, not just their shapes.
        kronecker_rows_are_constant: Whether ``kronecker_rows`` is the same map for all samples.
        kronecker_input_first: Whether the input's Kronecker factor belongs to the first axis.
        kronecker_rows_are_shared: Whether all parameters have the same Kronecker rows. A subclass
            with rows of its own for one of them sets it to False.
        is_ours: Whether this library has the rule, so that what it reads and does is known.
        keeps_something: Whether there is anything to keep from the forward pass.
        has_samples_first: Whether the samples are along the first axis of all that the rule sees.
        has_usual_layouts: Whether they are along the first axis of all that it returns, then.
        squares_with_input: Whether each entry of every ``J_p`` is 0, 1 or an entry of the input: a
            squared input squares them. Not inherited, as what derives from a rule may scale.
    """

    params: ClassVar[tuple[str, ...]] = ()
    batch_axis: ClassVar[BatchAxis] = BatchAxis.FIXED
    includes_children: ClassVar[bool] = False
    depends_on_layouts: ClassVar[bool] = False
    needs_output: ClassVar[bool] = False
    reads_output: ClassVar[bool] = False
    reads_input: ClassVar[bool] = True
    kronecker_rows_are_constant: ClassVar[bool] = False
    kronecker_input_first: ClassVar[bool] = False
    kronecker_rows_are_shared: ClassVar[bool] = False
    is_ours: ClassVar[bool] = True
    keeps_something: ClassVar[bool] = False
    has_samples_first: ClassVar[bool] = True
    has_usual_layouts: ClassVar[bool] = True
    squares_with_input: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Note what follows from the methods that a subclass overrides."""
        super().__init_subclass__(**options)
        cls.is_ours = cls.__module__.startswith("backpack.")
        cls.keeps_something = cls.saved is not BaseDerivatives.saved
        cls.has_samples_first = (
            cls.batch_axis is not BatchAxis.FOLLOWED
            and cls.batch_axis_in is BaseDerivatives.batch_axis_in
            and cls.batch_axis_out is BaseDerivatives.batch_axis_out
        )
        cls.has_usual_layouts = (
            cls.has_samples_first
            and cls.layouts is BaseDerivatives.layouts
            and cls._layout_out is BaseDerivatives._layout_out
            and cls.sees_samples_first is BaseDerivatives.sees_samples_first
        )
        cls.squares_with_input = vars(cls).get("squares_with_input", False)

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

    def refusal(self, module: Module) -> str | None:
        """Say why the derivatives of the call at hand cannot be computed; None if they can."""
        return None

    def mixes_in_secret(self, call: Call) -> bool:
        """Return whether a call mixes samples though :meth:`mixes_samples` does not say so."""
        return False

    def param_names(self, module: Module) -> tuple[str, ...]:
        """Return the names of the parameters that the rule knows."""
        return self.params

    def own(self, module: Any) -> Mapping[str, Parameter | None]:
        """Return the module's own parameters by name."""
        return module._parameters

    def costly_gradients(self, call: Call, wanted: Set[str]) -> tuple[str, ...]:
        """Return the parameters whose gradient takes autograd a product that can be spared.

        Args:
            call: The call.
            wanted: Names of the quantities that are extracted from individual gradients.
        """
        return ()

    def substitutes(
        self, call: Call, nodes: Sequence[Any], spared: Set[Parameter]
    ) -> Sequence[Substitute] | None:
        """Return what takes the place of kernels, so that they compute no parameter's gradient.

        Args:
            call: The call.
            nodes: Nodes of the graph, among them all between the call's outputs and its inputs.
            spared: Parameters whose gradients autograd need not compute, for all that is known.

        Returns:
            Those for some of the nodes; None if the call's parameters are not to be spared.
        """
        return []

    def repeats_output(self, call: Call) -> bool:
        """Return whether calling ``forward`` again in the same mode gives the same output.

        It changes nothing, either. A large output that no formula reads is then not kept.
        """
        return False

    def reads_inputs(self, call: Call) -> bool:
        """Return whether a formula reads entries of a call's inputs."""
        return self.reads_input

    def autograd_stores(self, call: Call) -> bool:
        """Return whether autograd has stored tensors of a call, which a backward pass frees.

        Large tensors of the call are then freed with them. Default: those of a layer whose output
        is repeated, if the gradient of its weight or its input is computed.
        """
        repeats = self.repeats_output(call)
        return repeats and ("weight" in call.params or call.origins_in[0] is not None)

    def reaches_one_output(self, call: Call) -> bool:
        """Return whether an entry of a parameter reaches one entry of a sample's output alone."""
        return False

    def kronecker_rows_are_outputs(self, call: Call) -> bool:
        """Return whether the Kronecker rows are the vectors at a sample's output themselves."""
        return False

    def is_linear_in_params(self, module: Module) -> bool:
        """Return whether the output is an affine function of each parameter."""
        return True

    def min_dims(self, module: Module) -> int:
        """Return how many axes an output has at least, the batch axis included."""
        return 0

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Return what must be kept from the forward pass, for ``module._backpack_saved``."""
        return {}

    # ------------------------------------------------------------------ where the samples are

    def keeps_rows(self, call: Call) -> bool:
        """Return whether each row of an output is computed from the row at its place alone."""
        return True

    def folds_rows(self, module: Module) -> bool:
        """Return whether rows of a sample may as well be along an axis behind that of the batch."""
        return self.batch_axis is BatchAxis.LEADING

    def batch_axis_in(self, module: Module, i: int) -> int:
        """Return the batch axis of input ``i`` as the rule sees it."""
        return 0

    def batch_axis_out(self, module: Module, i: int) -> int:
        """Return the batch axis of output ``i`` as the rule sees it."""
        return 0

    def stands_apart(self, module: Module, i: int) -> bool:
        """Return whether input ``i`` has no samples, but its columns have: ``[V, N, *in]``."""
        return False

    def trailing_axes(self, module: Module) -> int:
        """Return how many of the last axes are not like the others (``BatchAxis.LEADING``)."""
        return 0

    def sees_samples_first(self, module: Module) -> bool:
        """Return whether the rule sees the tensors as they are, if their samples come first."""
        return True

    def usual_layout(self, call: Call) -> Layout | None:
        """Return where the samples are if they are the rows of all tensors, and known to be.

        That is the usual case of a module with one output; for all others see :meth:`layouts`.
        """
        if not self.has_usual_layouts or len(call.shape_out) > 1 or True in call.computed:
            return None
        if len(call.layouts_in) != 1 and (not call.layouts_in or any(call.layouts_in[1:])):
            return None
        shape, out, main = call.shape_in[0], call.shape_out[0], call.layouts_in[0]
        leading = self.batch_axis is BatchAxis.LEADING
        if main is None:  # data
            return Layout(1, out[0], leading, len(out)) if out else None
        if shape is None or not main.has_rows(shape) or (out and out[0] != shape[0]):
            return None
        if not leading:
            main.confirm()
        elif len(shape) <= self.trailing_axes(call.module):
            return None
        return main

    def layouts(self, call: Call) -> list[Layout | None]:
        """Find where the samples are in the outputs, and correct what was assumed of the inputs.

        Raises:
            ValueError: If the samples are not where the module needs them.
        """
        module, leading = call.module, self.batch_axis is BatchAxis.LEADING
        for i, layout in enumerate(call.layouts_in):
            if layout is None and call.computed[i] and self._has_axis_of_its_own(module, i):
                raise ValueError(
                    f"{call!r} reads a tensor that a function has computed. Make the function a "
                    "module, or use extend(model, use_converter=True)."
                )
            shape = call.shape_in[i]
            if layout is None or shape is None:
                continue
            if not layout.is_batched:
                own = 0 if leading else self.batch_axis_in(module, i)
                if layout.assumed and own > 0:  # data: the module knows better
                    layout.correct(shape, own)
                continue
            place = layout.place(shape)
            if leading:
                trailing = self.trailing_axes(module)
                if place is None or len(shape) <= trailing:  # may be corrected, or have no samples
                    wrong = not layout.assumed
                else:
                    wrong = place.axis >= len(shape) - trailing
                if wrong and layout.is_constant:
                    layout.demote()
                elif wrong:
                    raise ValueError(
                        f"{call!r} mixes the samples of the batch: they are along the last "
                        f"{trailing} axes of its input, and the module combines the entries of "
                        "those. Give it an input whose batch axis comes before them."
                    )
                continue
            axis = self.batch_axis_in(module, i)
            single = layout.samples == 1 == shape[axis]
            if place is not None and place.axis == axis and place.is_apart:
                raise ValueError(
                    f"{call!r} needs the samples of the batch alone along axis {axis} of input "
                    f"{i}, but another axis is merged with them. Move that axis to the front, "
                    "where it may be merged (batch_first=True in recurrent layers and attention)."
                )
            if (place is None or place.axis != axis) and layout.is_constant:
                layout.demote()
                continue
            if (place is None or place.axis != axis) and not single:
                # an axis of one entry, such as that of x[None], says nothing of the batch
                if not layout.assumed or (place is not None and axis == 0 and shape[0] == 1):
                    found = "nowhere" if place is None else f"along axis {place.axis}"
                    raise ValueError(
                        f"{call!r} needs the samples of the batch along axis {axis} of input {i}, "
                        f"but they are {found}."
                    )
                try:
                    layout.correct(shape, axis)
                except ValueError as error:
                    raise ValueError(f"{call!r}: {error}.") from None
            layout.confirm()
        return [
            self._layout_out(call, i, shape) if shape else None
            for i, shape in enumerate(call.shape_out)
        ]

    def _has_axis_of_its_own(self, module: Module, i: int) -> bool:
        """Whether the rule needs the samples of an input behind other axes."""
        return self.batch_axis is BatchAxis.FIXED and self.batch_axis_in(module, i) > 0

    def _layout_out(self, call: Call, i: int, shape: Size) -> Layout:
        given = [*zip(call.layouts_in, call.shape_in, strict=True)]
        main, own = given[0] if given else (None, None)
        if main is not None and (main.is_constant or not main.is_batched):
            known = [(one, s) for one, s in given if one and one.is_batched]
            main, own = min(known, key=lambda x: x[0].is_constant, default=given[0])
        if main is not None and not main.is_batched:
            return unbatched()
        if self.batch_axis is BatchAxis.LEADING:
            return main or Layout.of_axis(shape, 0, assumed=True)
        axis = self.batch_axis_out(call.module, i)
        place = None if main is None else main.place(own or ())
        if main is None or place is None:
            return Layout.of_axis(shape, axis)
        before = prod(shape[:axis]) * place.outer
        if before == main.before:
            return main
        return Layout(before, place.samples, owners=place.owners)

    def seen(
        self, call: Call, inputs: Sequence[Any], outputs: Sequence[Tensor]
    ) -> tuple[list[Any], list[Tensor]]:
        """Return inputs and outputs with the samples where the rule expects them."""
        leading = self.batch_axis is BatchAxis.LEADING
        main = next((layout for layout in call.layouts_in + call.layouts_out if layout), None)

        def view(x: Any, layout: Layout | None, axis: int) -> Any:
            if not isinstance(x, Tensor) or (layout is None and x.dim() == 0):
                return x
            if layout is None:  # data: like the others
                merged = main is not None and main.before > 1 and axis == 0
                first = call.place_in(0) if merged else None
                rows = first is not None and first.outer > 1 and len(x) == len(inputs[0])
                layout = main if leading or rows else None
            if layout is None:
                return x
            if not layout.is_batched and not call.is_unbatched:
                return x  # each sample reads its own row of it
            if not layout.is_batched:
                if call.is_of_copies:
                    return x
                return x.unsqueeze(axis).expand(*x.shape[:axis], call.copies, *x.shape[axis:])
            place = layout.place(x.shape)
            return x if place is None else place.to_canonical(x).movedim(0, axis)

        module = call.module
        xs = [
            view(x, layout, self.batch_axis_in(module, i))
            for i, (x, layout) in enumerate(zip(inputs, call.layouts_in, strict=True))
        ]
        ys = [
            view(y, layout, self.batch_axis_out(module, i))
            for i, (y, layout) in enumerate(zip(outputs, call.layouts_out, strict=True))
        ]
        return xs, ys

    # ------------------------------------------------------------------ Jacobians

    def jac_mat_prod(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Mats,
        subsampling: Rows = None,
    ) -> Any:
        """Apply the Jacobian, ``J mat``.

        Args:
            module: Module whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs.
            mat: ``[V, *in]``; for several inputs a sequence with one entry (or None) for each
                argument of the call.
            subsampling: Rows of the batch that ``mat`` holds. Default: all.

        Returns:
            ``[V, *out]``; for a module with several outputs a tuple with one entry for each.

        Raises:
            ValueError: If a shape does not match.
        """
        mats = [mat] if isinstance(mat, Tensor) else list(mat)
        with bound(module):
            inputs = [vars(module)[f"input{i}"] for i in range(len(mats))]
            mats, had_v = self._check_all(module, mats, inputs, self.batch_axis_in, subsampling)
            tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]  # others: options
            arguments = mats[0] if tensors == [0] else mats
            result = self._jac_mat_prod(module, g_inp, g_out, arguments, subsampling)
            if not self.is_ours:
                result = self._checked_out("_jac_mat_prod", module, mats, result, subsampling)
        return result if had_v else _without_v(result)

    def jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Mats, subsampling: Rows = None
    ) -> Any:
        """Apply the transposed Jacobian, ``Jᵀ mat``.

        Args:
            module: Module whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs.
            mat: ``[V, *out]``; for several outputs a sequence with one entry (or None) for each, or
                that of the first alone.
            subsampling: Rows of the batch that ``mat`` holds. Default: all.

        Returns:
            ``[V, *in]``; for a module with several inputs a tuple with one entry for each.

        Raises:
            ValueError: If a shape does not match.
        """
        if AT_HAND.isdisjoint(vars(module)):
            with bound(module) as m:
                return self.jac_t_mat_prod(m, g_inp, g_out, mat, subsampling)
        mats, had_v = self._check_output(module, mat, subsampling)
        result = self._jac_t_mat_prod(module, g_inp, g_out, mats, subsampling)
        if not self.is_ours:
            result = self._checked_in("_jac_t_mat_prod", module, mats, result, subsampling)
        return result if had_v else _without_v(result)

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Any:
        raise self._missing("_jac_mat_prod", describe(module))

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Any:
        raise self._missing("_jac_t_mat_prod", describe(module))

    def ea_jac_t_mat_jac_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows = None
    ) -> Tensor:
        """Average ``Jᵀ mat J`` over the samples (expectation approximation of KFRA).

        Source: Botev et al., Practical Gauss-Newton optimisation for deep learning (2017).

        Args:
            module: Module whose call is at hand. Of several inputs, and outputs, the first alone
                takes part: the matrix is zero at the other outputs.
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
            shape = self._first_output(m).shape
            dim = shape.numel() // shape[self.batch_axis_out(module, 0)]
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
        samples = one_by_one(module.input0.shape[self.batch_axis_in(module, 0)], subsampling)
        if self.jacobian_is_constant(module):
            samples = samples[:1]
        total: Tensor | int = 0
        for row in samples:  # the Jacobian of each is a dense matrix
            once = self._average_product(module, g_out, mat, row)
            total = total + self._average_product(module, g_out, once, row)
        return total / len(samples)  # type: ignore[return-value]

    def _average_product(self, module: Any, g_out: Grads, mat: Tensor, rows: Rows) -> Tensor:
        """Average ``matᵀ J`` over samples: ``[D_out, K] -> [K, D_in]``."""
        axis = self.batch_axis_out(module, 0)
        shape = self.shape_of_rows(self._first_output(module).shape, axis, rows)
        alike = mat.T.reshape(-1, *shape[:axis], 1, *shape[axis + 1 :])  # for all samples
        back = self.jac_t_mat_prod(module, None, g_out, alike.expand(-1, *shape), rows)
        back = back if isinstance(back, Tensor) else back[0]
        return back.mean(1 + self.batch_axis_in(module, 0)).flatten(1)

    @staticmethod
    def _first_output(module: Any) -> Tensor:
        return module.output if isinstance(module.output, Tensor) else module.output[0]

    # ------------------------------------------------------------------ parameters

    def param_mjp(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Mats,
        sum_batch: bool = True,
        subsampling: Rows = None,
    ) -> Tensor:
        """Apply the transposed Jacobian with respect to a parameter, ``J_pᵀ mat``.

        Args:
            param_str: Name of the parameter.
            module: Module whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs.
            mat: ``[V, *out]``; for several outputs see :meth:`jac_t_mat_prod`.
            sum_batch: Sum over the samples.
            subsampling: Rows of the batch that ``mat`` holds. Default: all.

        Returns:
            ``[V, *p]`` if summed over the samples, else ``[V, N, *p]``.

        Raises:
            ValueError: If a shape does not match, or there is no such parameter.
        """
        self._check_name(module, param_str)
        with bound(module):
            mats, had_v = self._check_output(module, mat, subsampling)
            result = self._param_jac_t_mat_prod(
                param_str, module, g_inp, g_out, mats, sum_batch, subsampling
            )
            if not self.is_ours:
                self._check_result(param_str, module, mats, result, sum_batch)
        return result if had_v else result.squeeze(0)

    def _param_jac_t_mat_prod(
        self,
        param_str: str,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        rule = self._method(f"_{param_str}_jac_t_mat_prod", param_str, module)
        return rule(module, g_inp, g_out, mat, sum_batch, subsampling)

    def param_jac_mat_prod(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
    ) -> Any:
        """Apply the Jacobian with respect to a parameter, ``J_p mat``: ``[V, *p] -> [V, *out]``."""
        self._check_name(module, param_str)
        shape = self.parameter(module, param_str).shape
        with bound(module):
            if mat.shape != shape and mat.shape[1:] != shape:
                raise ValueError(
                    f"{describe(module)}.{param_str} has shape {list(shape)}: expected "
                    f"{['V', *shape]} (or without V), got {list(mat.shape)}."
                )
            had_v = mat.dim() > len(shape)
            mat = mat if had_v else mat.unsqueeze(0)
            result = self._param_jac_mat_prod(param_str, module, g_inp, g_out, mat, subsampling)
            if not self.is_ours:
                method = f"_{param_str}_jac_mat_prod"
                result = self._checked_out(method, module, mat, result, subsampling)
        return result if had_v else _without_v(result)

    def _param_jac_mat_prod(
        self,
        param_str: str,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows,
    ) -> Any:
        rule = self._method(f"_{param_str}_jac_mat_prod", param_str, module)
        return rule(module, g_inp, g_out, mat, subsampling)

    def _method(self, method: str, param_str: str, module: Module) -> Callable[..., Any]:
        rule = getattr(self, method, None)
        if rule is None:
            raise self._missing(method, f"the parameter '{param_str}' of {describe(module)}")
        return rule

    def _missing(self, method: str, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} needs a method '{method}' for {what}. Its signature is in "
            "'Write a rule' of the documentation."
        )

    def parameter(self, module: Module, param_str: str) -> Parameter:
        """Return a parameter by the name that :meth:`own` gives it."""
        p = self.own(module)[param_str]
        assert p is not None
        return p

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

    def squared_param_mjp(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool = True,
        subsampling: Rows = None,
    ) -> Tensor:
        """Apply the transpose of the entrywise square of ``J_p``, see :meth:`param_mjp`.

        The diagonal of ``J_pᵀ D J_p``, if ``mat`` is that of D. Only for rules that say
        ``squares_with_input``.
        """
        assert self.squares_with_input
        with bound(module):
            own = vars(module)
            x = own["input0"]
            own["input0"] = x.square()
            try:
                return self.param_mjp(param_str, module, g_inp, g_out, mat, sum_batch, subsampling)
            finally:
                own["input0"] = x

    def param_mjp_reduced(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Mats,
        wanted: Iterable[str],
        subsampling: Rows = None,
        weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Reduce ``J_pᵀ mat`` of each sample in several ways at once.

        Args:
            param_str: Name of the parameter.
            module: Module whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs.
            mat: ``[V, *out]``; for several outputs see :meth:`jac_t_mat_prod`.
            wanted: Names of the table in :mod:`backpack.core.derivatives.reductions`.
            subsampling: Rows of the batch that ``mat`` holds. Default: all.
            weights: Weights of squares, ``[V, N]``. Default: 1.

        Returns:
            What is wanted, by name.
        """
        if AT_HAND.isdisjoint(vars(module)):
            with bound(module) as m:
                return self.param_mjp_reduced(
                    param_str, m, g_inp, g_out, mat, wanted, subsampling, weights
                )
        self._check_name(module, param_str)
        return self._param_mjp_reduced(
            param_str, module, g_out, mat, frozenset(wanted), subsampling, weights
        )

    def _param_mjp_reduced(
        self,
        param_str: str,
        module: Any,
        g_out: Grads,
        mat: Any,
        wanted: Set[str],
        subsampling: Rows,
        weights: Tensor | None,
    ) -> dict[str, Tensor]:
        mats = [mat] if isinstance(mat, Tensor) else list(mat)
        axes = [1 + self.batch_axis_out(module, i) for i in range(len(mats))]
        given = [(m, axis) for m, axis in zip(mats, axes, strict=True) if m is not None]
        like, axis = given[0]
        num_v, count = like.shape[0], like.shape[axis]
        p = self.parameter(module, param_str)
        first = module.output if isinstance(module.output, Tensor) else module.output[0]
        rows = row_numbers(first.shape[axes[0] - 1], subsampling)

        def product(samples: slice) -> reductions.Multiply:
            size = samples.stop - samples.start
            taken = subsampling if size == count else take_rows(rows, samples)

            def multiply(columns: slice, out: Tensor | None) -> Tensor:
                part = [
                    m if m is None else m[columns].narrow(axis, samples.start, size)
                    for m, axis in zip(mats, axes, strict=True)
                ]
                one: Any = part[0] if isinstance(mat, Tensor) else part
                return self.param_mjp(param_str, module, None, g_out, one, False, taken)

            return multiply

        shape = (num_v, count, *p.shape)
        size = reductions.slice_size(num_v * p.numel())
        return reductions.in_slices(product, shape, size, like, wanted, weights)

    def kronecker_rows(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Mats,
        subsampling: Rows = None,
        approximation: str | None = None,
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
            approximation: What to make of a weight that is used at several positions t of a sample:
                None or ``"reduce"`` sums over t, ``"expand"`` keeps each, ``[V, N·T, G, O]``.

        Returns:
            ``[V, N, G, O]``, for G groups that share the factor ``[O, O]`` (its mean over G).
        """
        products = self.param_mjp(param_str, module, g_inp, g_out, mat, False, subsampling)
        return products.reshape(*products.shape[:2], 1, -1)

    def kronecker_input_factors(
        self,
        param_str: str,
        module: Module,
        subsampling: Rows = None,
        approximation: str | None = None,
    ) -> list[Tensor]:
        """Kronecker factors made of the inputs. Generic: none, the first factor is the block."""
        return []

    def has_kronecker_factors(self, param_str: str, module: Module) -> bool:
        """Whether a parameter has Kronecker factors in the call at hand, not just its block."""
        generic = BaseDerivatives.kronecker_input_factors
        return type(self).kronecker_input_factors is not generic

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
            diagonal = self._hessian_diagonal(module, g_inp, g_out, subsampling)
            return self.checked_diagonal(module, g_out, diagonal, subsampling)

    def _hessian_diagonal(
        self, module: Any, g_inp: Grads, g_out: Grads, subsampling: Rows
    ) -> Tensor:
        if not self.hessian_is_zero(module):
            raise NotImplementedError(f"{type(self).__name__} has no diagonal second derivative.")
        return torch.zeros_like(subsample(module.input0, subsampling=subsampling))

    def residual_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Mats, subsampling: Rows = None
    ) -> Any:
        """Apply the second derivative, ``(sum_k g_out_k ∇²_x y_k) mat``: ``[V, *in] -> [V, *in]``.

        With several inputs: a list in, a list out (see :meth:`jac_mat_prod`).

        Raises:
            ValueError: If a shape does not match, or ``g_out`` is missing.
        """
        mats = [mat] if isinstance(mat, Tensor) else list(mat)
        with bound(module):
            inputs = [vars(module)[f"input{i}"] for i in range(len(mats))]
            mats, had_v = self._check_all(module, mats, inputs, self.batch_axis_in, subsampling)
            result = self._residual_mat_prod(
                module, g_inp, g_out, mats if len(mats) > 1 else mats[0], subsampling
            )
            if not self.is_ours:
                result = self._checked_in("_residual_mat_prod", module, mats, result, subsampling)
        return result if had_v else _without_v(result)

    def _residual_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Any:
        mats = [mat] if isinstance(mat, Tensor) else mat
        if self.hessian_is_zero(module):
            zeros = [None if m is None else torch.zeros_like(m) for m in mats]
            return zeros[0] if isinstance(mat, Tensor) else zeros
        if isinstance(mat, Tensor) and self.hessian_is_diagonal(module):
            diagonal = self.hessian_diagonal(module, g_inp, g_out, subsampling)
            return mat * self.checked_diagonal(module, g_out, diagonal, subsampling)
        results, _ = self.mixed_residual(module, g_out, mats, {}, subsampling)
        return results[0] if isinstance(mat, Tensor) else results

    def evaluate(self, module: Module, params: Mapping[str, Tensor], *inputs: Any) -> Any:
        """Return the output for other inputs and parameters, differentiably.

        Args:
            module: Module whose call is at hand.
            params: Values that replace parameters.
            *inputs: Arguments of the call, flattened.
        """
        args, keywords = vars(module)["_backpack_call"].arguments(inputs)
        return functional_call(module, dict(params), args, keywords)

    def evaluation(self, module: Any) -> Evaluation:
        """Return how to evaluate the call at hand again."""
        own = vars(module)
        inputs, i = [], 0
        while f"input{i}" in own:
            inputs.append(own[f"input{i}"])
            i += 1
        axes_in = [
            self.batch_axis_in(module, i) if isinstance(x, Tensor) and x.dim() > 0 else None
            for i, x in enumerate(inputs)
        ]
        count = 1 if isinstance(module.output, Tensor) else len(module.output)
        axes_out: list[int | None] = [self.batch_axis_out(module, i) for i in range(count)]
        return Evaluation(self, module, inputs, axes_in, axes_out)

    def mixed_residual(
        self,
        module: Module,
        g_out: Grads,
        inputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
        subsampling: Rows = None,
        sum_batch: bool = False,
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Apply the second derivative of ``⟨g_out, y⟩`` with respect to inputs and parameters.

        Needed in full where a parameter also influences the module's input (reused and tied
        parameters) or the output is no affine function of it. Generic, by differentiating twice.

        Args:
            module: Module whose call is at hand.
            g_out: Gradients with respect to the outputs.
            inputs: A ``[V, *in]`` (or None, for zero) for each input.
            params: A ``[V, *p]`` for each parameter that varies.
            subsampling: Rows of the batch. Default: all.
            sum_batch: Sum what is at the parameters over the samples.

        Returns:
            For each input ``[V, *in]`` (None for those that do not vary), and for each varied
            parameter ``[V, N, *p]``, or ``[V, *p]`` if summed.
        """
        with bound(module):
            self._need_g_out(module, g_out)
            assert g_out is not None
            evaluation = self.evaluation(module)
            grads = [
                None if g is None or a is None else subsample(g, dim=a, subsampling=subsampling)
                for g, a in zip(g_out, evaluation.axes_out, strict=True)
            ]
            tangents: dict[Any, Tensor] = dict(params)
            like = next(t for t in [*params.values(), *inputs] if t is not None)
            for i, t in enumerate(inputs):
                x, axis = evaluation.inputs[i], evaluation.axes_in[i]
                if t is None and (axis is None or not x.is_floating_point()):
                    continue
                if t is None:
                    shape = self.shape_of_rows(x.shape, axis or 0, subsampling)
                    t = like.new_zeros(len(like), *shape)
                elif axis is None:  # the same for all samples
                    t = t[:, 0]
                tangents[i] = t
            numbers = row_numbers(evaluation.num_samples, subsampling)
            # what arrives at an input without samples is kept for each sample apart, too
            apart = [key for key in tangents if not evaluation.is_batched(key)]
            at_once = not apart or (sum_batch and params.keys() >= set(apart))
            found = second_products(evaluation, grads, tangents, numbers, at_once)
        d_params = {name: found[name] for name in params}
        if sum_batch and not at_once:
            d_params = {name: product.sum(1) for name, product in d_params.items()}
        return [found.get(i) for i in range(len(inputs))], d_params

    def second_unbatched(
        self,
        module: Module,
        g_out: Sequence[Tensor | None],
        inputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Apply the second derivative of a call without samples, for the gradient of one sample.

        Returns:
            ``[V, *in]`` for each input, ``[V, *p]`` for each parameter that varies.
        """
        if params:
            return self.mixed_residual(module, g_out, inputs, params, sum_batch=True)
        mat: Any = list(inputs) if len(inputs) > 1 else inputs[0]
        back = self.residual_mat_prod(module, None, g_out, mat)
        return [back] if isinstance(back, Tensor) else list(back), {}

    # ------------------------------------------------------------------ helpers

    def _check_output(self, module: Any, mat: Mats, subsampling: Rows) -> tuple[Any, bool]:
        """Check what belongs to the outputs: a tensor, or a list if there are several."""
        if isinstance(module.output, Tensor):
            return self._check(module, mat, module.output.shape, 0, subsampling, out=True)
        mats = [mat] if isinstance(mat, Tensor) else list(mat)
        mats += [None] * (len(module.output) - len(mats))
        return self._check_all(module, mats, module.output, self.batch_axis_out, subsampling)

    def _check_all(
        self,
        module: Module,
        mats: list[Any],
        tensors: Sequence[Any],
        axis: Callable[[Module, int], int],
        subsampling: Rows,
    ) -> tuple[list[Any], bool]:
        had_v = True
        for i, (mat, tensor) in enumerate(zip(mats, tensors, strict=True)):
            if mat is not None:
                if axis == self.batch_axis_in and self.stands_apart(module, i):
                    continue  # [V, N, *in]: the tensor has no samples, its columns do
                shape = self.shape_of_rows(tensor.shape, axis(module, i), subsampling)
                mats[i], had_v = self._with_v(module, mat, shape)
        return mats, had_v

    def _check(
        self,
        module: Module,
        mat: Any,
        shape: Size,
        i: int,
        subsampling: Rows,
        out: bool = False,
    ) -> tuple[Tensor, bool]:
        """Check ``mat`` against ``[V, *shape]`` and add the V axis if it is missing."""
        if not isinstance(mat, Tensor) and len(mat) == 1:
            (mat,) = mat
        axis = self.batch_axis_out(module, i) if out else self.batch_axis_in(module, i)
        return self._with_v(module, mat, self.shape_of_rows(shape, axis, subsampling))

    @staticmethod
    def shape_of_rows(shape: Size, axis: int, subsampling: Rows) -> Size:
        """Return the shape of a selection of rows along an axis."""
        if subsampling is None or not shape:
            return shape
        return Size([*shape[:axis], len(row_numbers(shape[axis], subsampling)), *shape[axis + 1 :]])

    @staticmethod
    def _with_v(module: Module, mat: Tensor, shape: Size) -> tuple[Tensor, bool]:
        if mat.dim() > len(shape) and mat.shape[1:] == shape:
            return mat, True
        if mat.shape == shape:
            return mat.unsqueeze(0), False
        raise ValueError(
            f"{describe(module)}: expected a tensor of shape {['V', *shape]} (or without V), got "
            f"{list(mat.shape)}."
        )

    # What methods of users return. Several tensors may be a list: rules are given lists, too.

    def _checked_in(
        self, method: str, module: Any, mats: Any, result: Any, subsampling: Rows
    ) -> Any:
        """Refuse what has not the inputs' shapes; some of several may be None, for zero."""
        parts = result if isinstance(result, (list, tuple)) else [result]
        nothing = all(part is None for part in parts)
        for i, part in enumerate(parts):
            x = vars(module).get(f"input{i}")
            if not isinstance(x, Tensor) or self.stands_apart(module, i):
                continue
            if part is None and not (nothing and x.is_floating_point()):
                continue
            shape = self.shape_of_rows(x.shape, self.batch_axis_in(module, i), subsampling)
            self._check_same(method, module, [len(_first(mats)), *shape], part)
        return tuple(result) if isinstance(result, list) else result

    def _checked_out(
        self, method: str, module: Any, mats: Any, result: Any, subsampling: Rows
    ) -> Any:
        """Refuse what has not the outputs' shapes."""
        outputs = [module.output] if isinstance(module.output, Tensor) else module.output
        parts = result if isinstance(result, (list, tuple)) else [result]
        for i, (y, part) in enumerate(zip(outputs, parts, strict=False)):
            shape = self.shape_of_rows(y.shape, self.batch_axis_out(module, i), subsampling)
            self._check_same(method, module, [len(_first(mats)), *shape], part)
        if len(parts) != len(outputs):
            raise ValueError(
                f"{type(self).__name__}.{method} at {describe(module)} should return a tensor for "
                f"each of {len(outputs)} outputs, got {len(parts)}."
            )
        return tuple(result) if isinstance(result, list) else result

    def checked_diagonal(
        self, module: Any, g_out: Grads, diagonal: Tensor, subsampling: Rows
    ) -> Tensor:
        """Refuse the diagonal of a user's second derivative, if it has not the input's shape."""
        if self.is_ours:
            return diagonal
        shape, axis, grad = module.input0.shape, self.batch_axis_in(module, 0), _first(g_out)
        if grad.dim() > self._first_output(module).dim():  # of samples, at a tensor without them
            shape, axis = Size([len(grad), *shape]), 0
        shape = self.shape_of_rows(shape, axis, subsampling)
        generic = type(self).hessian_diagonal is BaseDerivatives.hessian_diagonal
        method = "_hessian_diagonal" if generic else "hessian_diagonal"
        self._check_same(method, module, [*shape], diagonal)
        return diagonal

    def _check_result(
        self, param_str: str, module: Any, mats: Any, result: Tensor, sum_batch: bool
    ) -> None:
        """Refuse what a user's ``_weight_jac_t_mat_prod`` returns, if it has another shape."""
        mat = _first(mats)
        i = 0 if mat is mats else next(i for i, m in enumerate(mats) if m is not None)
        rows = [] if sum_batch else [mat.shape[1 + self.batch_axis_out(module, i)]]
        shape = [len(mat), *rows, *self.parameter(module, param_str).shape]
        self._check_same(f"_{param_str}_jac_t_mat_prod", module, shape, result)

    def _check_same(self, method: str, module: Module, shape: list[int], got: Any) -> None:
        found: Any = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
        if found != shape:
            found = "None: is its 'return' missing?" if got is None else f"{found}."
            raise ValueError(
                f"{type(self).__name__}.{method} at {describe(module)} should return a tensor of "
                f"shape {shape}, got {found}"
            )

    def _check_name(self, module: Module, param_str: str) -> None:
        names = self.param_names(module)
        if param_str not in names or self.own(module).get(param_str) is None:
            raise ValueError(
                f"{describe(module)} has no parameter '{param_str}' that {type(self).__name__} "
                f"knows. It knows: {', '.join(names) or 'none'}."
            )

    def _need_g_out(self, module: Module, g_out: Grads) -> None:
        if g_out is None or all(g is None for g in g_out):
            raise ValueError(
                f"{describe(module)}: second derivatives need g_out, the gradient of the loss with "
                "respect to the module's output."
            )


def _first(mats: Any) -> Tensor:
    """Return the first tensor of what is one, or a list with None among them."""
    return mats if isinstance(mats, Tensor) else next(mat for mat in mats if mat is not None)


def _without_v(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.squeeze(0)
    return tuple(r if r is None else r.squeeze(0) for r in result)

"""The public methods of derivatives, which programs call with a module and gradients.

Such as ``LinearDerivatives().param_mjp("weight", module, g_inp, g_out, mat)``: they take the module
and the gradients apart, check shapes, and accept a ``mat`` without the axis V. Rules of users may
have this form, too (:mod:`~backpack.core.derivatives.forms`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, partialmethod
from typing import Any, ClassVar

from torch import Size, Tensor
from torch.nn import Module

from backpack.core.derivatives.forms import FORMS, INHERITED, Form, translations
from backpack.core.derivatives.loss_hessian import LossHessian
from backpack.core.derivatives.vectors import listed
from backpack.core.record.context import Context, at_hand
from backpack.core.record.module_state import describe
from backpack.core.rows import Rows
from backpack.core.types import Grads, Mats

OF_PARAMETER = re.compile("(.+)_(vjp|vjp_sum|jvp)")


def own_classes(cls: type) -> list[type]:
    """Return a rule class behind those that it mixes in before its base, the most derived last."""
    rules = (i for i, base in enumerate(cls.__mro__) if i and issubclass(base, Interface))
    return [*reversed(cls.__mro__[: next(rules)])]


def own_attributes(cls: type) -> dict[str, Any]:
    """Return what a rule class has itself, or mixes in from classes before its base."""
    own: dict[str, Any] = {}
    for base in own_classes(cls):
        own |= vars(base)
    return own


class Interface:
    """Products with ``(module, g_inp, g_out, mat)`` as arguments.

    They are about the call of ``module`` at hand. ``g_out`` are gradients with respect to its
    outputs; those with respect to its inputs, ``g_inp``, are not used. ``subsampling`` are the rows
    of the batch that ``mat`` holds (default: all), which may lack the axis V. For several inputs, a
    ``mat`` at the inputs is a sequence with one entry (or None) for each argument of the call; for
    several outputs, one at the outputs has an entry for each, or is that of the first alone. What
    has several parts is returned as a tuple. A shape that does not match is a ``ValueError``.
    """

    params: ClassVar[tuple[str, ...]]
    axis_in: Callable[..., int]
    axis_out: Callable[..., int]
    shape_of_rows: Callable[..., Size]
    shapes_out: Callable[[Context], Sequence[Size]]
    has_sample_tangents: Callable[..., bool]
    param_names: Callable[..., Sequence[str]]
    own: Callable[..., Mapping[str, Any]]
    parameter: Callable[[Context, str], Tensor]

    def __init_subclass__(cls, **options: Any) -> None:
        """Give a rule that is written in the form of the interface the methods of ours."""
        super().__init_subclass__(**options)
        found: dict[str, Any] = {}
        for base in own_classes(cls):  # of both forms, what the most derived class has
            names = vars(base)
            for name in found.keys() & {*names, *(f"{name}_sum" for name in names)}:
                del found[name]
            for name, function in names.items():
                found |= translations(name, function)
        for method, own in found.items():
            setattr(cls, method, own)
        matches = filter(None, map(OF_PARAMETER.fullmatch, found))
        told = [match[1] for match in matches if match[1] != "param"]
        if told and "params" not in own_attributes(cls):  # rules for 1.7.1 had no such list
            cls.params = tuple(dict.fromkeys([*cls.params, *told]))

    def _ours(self, method: str, *names: str) -> Callable[..., Any]:
        """Return our method of this name, passing over translations of these methods of a user.

        A user's method that calls the one of its base class would else call itself.
        """
        own = self._next(method, names)
        if own is not None:
            return own
        of_parameter = OF_PARAMETER.fullmatch(method)
        if of_parameter is None:
            raise NotImplementedError(f"{type(self).__name__} has no {method}.")
        name, kind = of_parameter.groups()
        each = self._next(f"{name}_vjp", names) if kind == "vjp_sum" else None
        if each is not None:
            return lambda c, v: each(c, v).sum(1)
        return partial(getattr(self, f"affine_{kind}"), name=name)

    def _next(self, method: str, names: Sequence[str]) -> Callable[..., Any] | None:
        """Return the first method of this name that translates none of some; None if none does."""
        for base in type(self).__mro__:
            found = vars(base).get(method)
            if found is not None and getattr(found, "translates", None) not in names:
                return found.__get__(self)
        return None

    # ------------------------------------------------------------------ Jacobians

    def jac_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Mats, subsampling: Rows = None
    ) -> Any:
        """Apply the Jacobian, ``J mat``: ``[V, *in] -> [V, *out]``."""
        c = at_hand(module, g_out, subsampling)
        mats, had_v = self._check_inputs(c, mat)
        result = self._ours("jvp", "jac_mat_prod")(c, mats[0] if c.takes_one else mats)
        return result if had_v else _without_v(result)

    def jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Mats, subsampling: Rows = None
    ) -> Any:
        """Apply the transposed Jacobian, ``Jᵀ mat``: ``[V, *out] -> [V, *in]``."""
        c = at_hand(module, g_out, subsampling)
        mats, had_v = self._check_outputs(c, mat)
        result = self._ours("vjp", "jac_t_mat_prod")(c, mats)
        return result if had_v else _without_v(result)

    def ea_jac_t_mat_jac_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows = None
    ) -> Tensor:
        """Average ``Jᵀ mat J`` over the rows: ``[D_out, D_out] -> [D_in, D_in]`` (for KFRA).

        Of several inputs, and outputs, the first alone takes part: ``mat`` is zero at the others.
        Source: Botev et al., Practical Gauss-Newton optimisation for deep learning (2017).
        """
        c = at_hand(module, g_out, subsampling)
        shape = c.output.shape
        dim = shape.numel() // shape[self.axis_out(c, 0)]
        if mat.shape != (dim, dim):
            raise ValueError(
                f"{describe(module)}: expected a matrix of shape {[dim, dim]} (entries of one "
                f"sample's output), got {list(mat.shape)}."
            )
        return self._ours("batch_averaged", "ea_jac_t_mat_jac_prod")(c, mat)

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

        Returns:
            ``[V, *out] -> [V, *p]`` if summed over the samples, else ``[V, N, *p]``.

        Raises:
            ValueError: If a shape does not match, or there is no such parameter.
        """
        self._check_name(module, param_str)
        c = at_hand(module, g_out, subsampling)
        mats, had_v = self._check_outputs(c, mat)
        method = "param_vjp_sum" if sum_batch else "param_vjp"
        result = self._ours(method, "param_mjp")(c, param_str, mats)
        return result if had_v else result.squeeze(0)

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
        c = at_hand(module, g_out, subsampling)
        shape = self.parameter(c, param_str).shape
        if mat.shape != shape and mat.shape[1:] != shape:
            raise ValueError(
                f"{describe(module)}.{param_str} has shape {list(shape)}: expected "
                f"{['V', *shape]} (or without V), got {list(mat.shape)}."
            )
        had_v = mat.dim() > len(shape)
        mat = mat if had_v else mat.unsqueeze(0)
        result = self._ours("param_jvp", "param_jac_mat_prod")(c, param_str, mat)
        return result if had_v else _without_v(result)

    # The same with respect to a weight or a bias.
    weight_jac_mat_prod = partialmethod(param_jac_mat_prod, "weight")
    bias_jac_mat_prod = partialmethod(param_jac_mat_prod, "bias")
    weight_jac_t_mat_prod = partialmethod(param_mjp, "weight")
    bias_jac_t_mat_prod = partialmethod(param_mjp, "bias")

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

        Returns:
            What is wanted, by the names of :mod:`backpack.core.derivatives.reductions`; squares
            are multiplied with weights ``[V, N]``.
        """
        self._check_name(module, param_str)
        c = at_hand(module, g_out, subsampling)
        return self._ours("reduced")(c, param_str, mat, frozenset(wanted), weights)

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
        c = at_hand(module, g_out, subsampling)
        return self._ours("hessian_diag", "hessian_diagonal")(c)

    def residual_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Mats, subsampling: Rows = None
    ) -> Any:
        """Apply the second derivative, ``(sum_k g_out_k ∇²_x y_k) mat``: ``[V, *in] -> [V, *in]``.

        Raises:
            ValueError: If a shape does not match, or ``g_out`` is missing.
        """
        self._need_g_out(module, g_out)
        c = at_hand(module, g_out, subsampling)
        mats, had_v = self._check_inputs(c, mat)
        hvp = self._ours("hvp", "residual_mat_prod")
        result = hvp(c, mats if len(mats) > 1 else mats[0])
        return result if had_v else _without_v(result)

    # ------------------------------------------------------------------ checks

    def _check_inputs(self, c: Context, mat: Mats) -> tuple[list[Any], bool]:
        mats, had_v = listed(mat), True
        for i, one in enumerate(mats):
            if one is None or self.has_sample_tangents(c.call, i):
                continue  # [V, N, *in]: the tensor has no samples, its tangents do
            axis = self.axis_in(c, i)
            shape = self.shape_of_rows(c.inputs[i].shape, axis, c.rows)
            mats[i], had_v = _with_v(c.module, one, shape)
        return mats, had_v

    def _check_outputs(self, c: Context, mat: Mats) -> tuple[Any, bool]:
        """Check what belongs to the outputs: a tensor, or a list if there are several."""
        mats: list[Any] = listed(mat)
        mats += [None] * (len(c.outputs) - len(mats))
        had_v = True
        for i, (one, shape) in enumerate(zip(mats, self.shapes_out(c), strict=True)):
            if one is not None:
                mats[i], had_v = _with_v(c.module, one, shape)
        return mats if len(mats) > 1 else mats[0], had_v

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


def _with_v(module: Module, mat: Tensor, shape: Size) -> tuple[Tensor, bool]:
    if mat.dim() > len(shape) and mat.shape[1:] == shape:
        return mat, True
    if mat.shape == shape:
        return mat.unsqueeze(0), False
    raise ValueError(
        f"{describe(module)}: expected a tensor of shape {['V', *shape]} (or without V), got "
        f"{list(mat.shape)}."
    )


def _without_v(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.squeeze(0)
    return tuple(r if r is None else r.squeeze(0) for r in result)


class LossInterface(Interface):
    """The public methods of losses: factors of the Hessian, and products with it."""

    def sqrt_hessian(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Rows = None
    ) -> Any:
        """Exact factor of the loss Hessian, ``[V, N, *d]``.

        It carries the square root of the reduction's factor.

        Raises:
            ValueError: If the loss is not reduced to a scalar, or not convex in the prediction.
        """
        return _LossAtHand(self, module, subsampling, "sqrt_hessian").root()

    def sqrt_hessian_sampled(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mc_samples: int = 1,
        subsampling: Rows = None,
    ) -> Any:
        """Monte-Carlo factor: gradients with targets drawn from the model's prediction.

        The draws do not depend on ``subsampling``.

        Returns:
            ``[M, N, *d]`` for M samples, divided by ``sqrt(M)``; ``S Sᵀ`` has the Fisher
            information matrix as its expectation, which for most losses is the Hessian.

        Raises:
            ValueError: If the loss is not reduced to a scalar, or has negative weights.
            NotImplementedError: If the loss is no negative log likelihood.
        """
        hessian = _LossAtHand(self, module, subsampling, "sqrt_hessian_sampled")
        return hessian.drawn_root(mc_samples)

    def make_hessian_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads
    ) -> Callable[..., Any]:
        """Return the map ``[V, N, *d] -> [V, N, *d]`` that applies the loss Hessian.

        Its second argument, ``subsampling``, says which rows of the batch it is given.
        """
        return partial(self._product, module, False)

    def make_ggn_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads) -> Callable[..., Any]:
        """Return the map ``[V, N, *d] -> [V, N, *d]`` that applies ``S Sᵀ`` of ``sqrt_hessian``.

        Its second argument, ``subsampling``, says which rows of the batch it is given.
        """
        return partial(self._product, module, True)

    def _product(self, module: Module, of_ggn: bool, mat: Mats, subsampling: Rows = None) -> Any:
        hessian = _LossAtHand(self, module, subsampling, "make_hessian_mat_prod")
        if not hessian.is_of_one_prediction:
            return hessian.product(listed(mat), of_ggn)
        one: Any = mat if isinstance(mat, Tensor) else mat[0]
        shape = self.shape_of_rows(hessian.c.input.shape, 0, subsampling)
        one, had_v = _with_v(module, one, one.shape[1:] if hessian.chosen else shape)
        result = hessian.product(one, of_ggn)
        return result if had_v else result.squeeze(0)

    def sum_hessian(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Rows = None
    ) -> Tensor:
        """Hessian with respect to a sample's prediction, summed over samples: ``[D, D]``."""
        return _LossAtHand(self, module, subsampling, "sum_hessian").sum()


class _Ours:
    """A rule whose methods pass over translations of some of a user's: see `Interface._ours`."""

    def __init__(self, rule: Interface, names: Sequence[str]):
        self._rule = rule
        self._names = names

    def __getattr__(self, method: str) -> Any:
        return self._rule._ours(method, *self._names)


class _LossAtHand(LossHessian):
    """The Hessian of a loss at hand."""

    def __init__(self, rule: Any, module: Module, rows: Rows, *names: str):
        self._set(_Ours(rule, names), at_hand(module, None, rows))


# What rules of users find in their base classes.


def _inherited(name: str, form: Form) -> Any:
    """Return the method that a user's rule finds in its base class: it calls ours."""

    def method(self: Interface, *arguments: Any, **named: Any) -> Any:
        known, public = form, name.removeprefix("_")
        if len(arguments) > len(form.arguments) or "g_out" in named:  # losses in 1.7.1
            known = FORMS.get(public, form)
        values = dict(zip(known.arguments, arguments, strict=False)) | named
        c = at_hand(values["module"], values.get("g_out"), values.get("subsampling"))
        sums = "sum_batch" in known.arguments and values.get("sum_batch", True)
        own = known.method + ("_sum" if sums else "")
        return self._ours(own, name, public)(c, *[values.get(k) for k in known.own_arguments])

    method.__name__ = name
    return method


for _name, _form in INHERITED.items():
    if _form.method != _name and not hasattr(Interface, _name):
        setattr(Interface, _name, _inherited(_name, _form))

"""The public methods of derivatives, and rules that are written in their form.

Programs call ``LinearDerivatives().param_mjp("weight", module, g_inp, g_out, mat)``: these methods
take the module and the gradients apart, check shapes, and accept a ``mat`` without the axis V.
Rules of users may have this form, too: their methods (:data:`FORMS`) get the module with the
tensors of the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, partialmethod
from inspect import signature
from typing import Any, ClassVar, NamedTuple

from torch import Size, Tensor
from torch.nn import Module

from backpack.core.derivatives.loss_hessian import at_rows, chosen_rows
from backpack.core.derivatives.vectors import first_of, listed
from backpack.core.record.context import Context, at_hand
from backpack.core.record.module_state import describe
from backpack.core.rows import Rows
from backpack.core.types import Grads, Mats


class Form(NamedTuple):
    """How a method of a user's rule is called.

    Attributes:
        method: Name of our method, which has the context instead of the module.
        own_arguments: Names of the arguments that our method has behind the context.
        arguments: Names of the arguments that the user's method has.
    """

    method: str
    own_arguments: tuple[str, ...]
    arguments: tuple[str, ...]


def _form(method: str, own_arguments: str, arguments: str) -> Form:
    return Form(method, tuple(own_arguments.split()), tuple(arguments.split()))


_ROWS = "module g_inp g_out subsampling"
_PRODUCT = "module g_inp g_out mat subsampling"
# Methods of rules in the form of the interface, by name; these with and without an underscore.
FORMS = {
    prefix + name: form
    for prefix in ("", "_")
    for name, form in {
        "jac_mat_prod": _form("jvp", "mat", _PRODUCT),
        "jac_t_mat_prod": _form("vjp", "mat", _PRODUCT),
        "ea_jac_t_mat_jac_prod": _form("batch_averaged", "mat", _PRODUCT),
        "param_jac_mat_prod": _form("param_jvp", "param_str mat", f"param_str {_PRODUCT}"),
        "hessian_diagonal": _form("hessian_diag", "", _ROWS),
        "residual_mat_prod": _form("hvp", "mat", _PRODUCT),
    }.items()
}
FORMS |= {
    "_param_mjp_reduced": _form(
        "reduced",
        "param_str mat wanted weights",
        "param_str module g_out mat wanted subsampling weights",
    ),
    "pairs": _form("affine", "param_str mat", "param_str module mat subsampling"),
    "kronecker_rows": _form(
        "kron_rows",
        "param_str mat approximation",
        "param_str module g_inp g_out mat subsampling approximation",
    ),
    "kronecker_input_factors": _form(
        "kron_inputs", "param_str approximation", "param_str module subsampling approximation"
    ),
    "_sqrt_hessian_sampled": _form("sampled_hessian_root", "mc_samples", "module mc_samples"),
    "sqrt_hessian_sampled": _form(
        "drawn_hessian_root", "mc_samples", "module g_inp g_out mc_samples subsampling"
    ),
    "_hessian_mat_prod": _form("hessian_product", "mat", "module mat subsampling"),
    "_ggn_mat_prod": _form("ggn_product", "mat", "module mat subsampling"),
    "_need_convex": _form("need_convex", "", "module subsampling"),
    "score": _form("score", "mc_samples", "module mc_samples"),
}
for _n, _m in {
    "sqrt_hessian": "hessian_root",
    "thin_factor": "thin_hessian_root",
    "hessian_factor": "signed_hessian_root",
    "sum_hessian": "hessian_sum",
}.items():
    FORMS |= {_n: _form(_m, "", _ROWS), f"_{_n}": _form(_m, "", "module subsampling")}
# of entries and of classes: these (and `score`) have the same name in both forms
for _n in ("df", "d2f", "second", "root", "p", "log_p"):
    FORMS[_n] = _form(_n, "", "module subsampling")
for _n in ("weight", "jacobian_is_constant", "unsupported_reason", "predictions", "couples_terms"):
    FORMS[_n] = _form(_n, "", "module")
# Those that say what to do about the samples: ours are two methods.
_PARAM = "module g_inp g_out mat sum_batch subsampling"
SUMMED = {
    "_param_jac_t_mat_prod": _form("param_vjp", "param_str mat", f"param_str {_PARAM}"),
    "param_mjp": _form("param_vjp", "param_str mat", f"param_str {_PARAM}"),
}


# ---------------------------------------------------------------------- rules of users

_OURS_OF_PARAMETER = re.compile("(.+)_(vjp|vjp_sum|jvp)")
_OF_PARAMETER = re.compile("_(?!param_|ea_)(.+)_jac_(t_)?mat_prod")


def _translations(name: str, function: Any) -> list[tuple[str, Any]]:
    """Return our methods that call one of a user's rule, by name; none for all other methods."""
    if not callable(function):
        return []
    form = SUMMED.get(name) or FORMS.get(name)
    if form is None:
        found = _OF_PARAMETER.fullmatch(name)
        if found is None:
            return []
        arguments = _PARAM if found[2] else _PRODUCT
        form = _form(found[1] + ("_vjp" if found[2] else "_jvp"), "mat", arguments)
    elif form.method == name and "module" not in _arguments(function):
        return []
    if "sum_batch" not in form.arguments:
        return [(form.method, _translated(name, function, form))]
    return [
        (form.method, _translated(name, function, form, sum_batch=False)),
        (f"{form.method}_sum", _translated(name, function, form, sum_batch=True)),
    ]


def _arguments(function: Any) -> Iterable[str]:
    """Return the names of a function's arguments, without ``signature``, which takes long."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return signature(function).parameters
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _translated(name: str, function: Callable[..., Any], form: Form, **options: Any) -> Any:
    """Return our method that calls that of a user's rule."""
    check = _check_of(form)

    def method(self: Any, c: Context, *arguments: Any) -> Any:
        values: dict[str, Any] = dict.fromkeys(form.own_arguments)  # optional ones are None
        values |= dict(zip(form.own_arguments, arguments, strict=False))
        values |= {"g_inp": None, "g_out": c.grad_out, "subsampling": c.rows, **options}
        with c.shown() as module:
            values["module"] = module
            result = function(self, *[values[key] for key in form.arguments])
        if check is None:
            return result
        check(self, name, c, values, result)
        return tuple(result) if isinstance(result, list) else result

    method.translates = name  # type: ignore[attr-defined]
    return method


# What methods of users return. Several tensors may be a list: rules are given lists, too.
Values = Mapping[str, Any]  # of arguments


def _check_of(form: Form) -> Callable[..., None] | None:
    """Return what refuses the wrong shapes that a method of a user's rule may return."""
    if form.method in ("vjp", "hvp"):
        return _check_in
    if form.method == "jvp" or form.method.endswith("_jvp"):
        return _check_out
    if form.method == "hessian_diag":
        return _check_diagonal
    return _check_parameter if "sum_batch" in form.arguments else None


def _check_in(rule: Any, name: str, c: Context, values: Values, result: Any) -> None:
    """Refuse what has not the inputs' shapes; some of several may be None, for zero."""
    parts = result if isinstance(result, (list, tuple)) else [result]
    nothing = all(part is None for part in parts)
    for i, (part, x) in enumerate(zip(parts, c.inputs, strict=False)):
        if not isinstance(x, Tensor) or rule.has_sample_tangents(c.call, i):
            continue
        if part is None and not (nothing and x.is_floating_point()):
            continue
        shape = rule.shape_of_rows(x.shape, rule.axis_in(c, i), c.rows)
        _check_same(rule, name, c.module, [len(first_of(values["mat"])), *shape], part)


def _check_out(rule: Any, name: str, c: Context, values: Values, result: Any) -> None:
    """Refuse what has not the outputs' shapes."""
    parts = result if isinstance(result, (list, tuple)) else [result]
    for shape, part in zip(rule.shapes_out(c), parts, strict=False):
        _check_same(rule, name, c.module, [len(first_of(values["mat"])), *shape], part)
    if len(parts) != len(c.outputs):
        raise ValueError(
            f"{type(rule).__name__}.{name} at {describe(c.module)} should return a tensor for "
            f"each of {len(c.outputs)} outputs, got {len(parts)}."
        )


def _check_diagonal(rule: Any, name: str, c: Context, values: Values, result: Any) -> None:
    """Refuse the diagonal of a second derivative, if it has not the input's shape."""
    shape, axis, grad = c.input.shape, rule.axis_in(c, 0), first_of(c.grad_out)
    if grad.dim() > c.output.dim():  # of samples, at a tensor without them
        shape, axis = Size([len(grad), *shape]), 0
    _check_same(rule, name, c.module, [*rule.shape_of_rows(shape, axis, c.rows)], result)


def _check_parameter(rule: Any, name: str, c: Context, values: Values, result: Any) -> None:
    """Refuse what has not the parameter's shape, with or without samples."""
    v = values["mat"]
    mat = first_of(v)
    i = 0 if mat is v else next(i for i, m in enumerate(v) if m is not None)
    param = values.get("param_str") or name[1 : -len("_jac_t_mat_prod")]
    rows = [] if values["sum_batch"] else [mat.shape[1 + rule.axis_out(c, i)]]
    _check_same(rule, name, c.module, [len(mat), *rows, *rule.parameter(c, param).shape], result)


def _check_same(rule: Any, name: str, module: Module, shape: list[int], got: Any) -> None:
    found: Any = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
    if found != shape:
        found = "None: is its 'return' missing?" if got is None else f"{found}."
        raise ValueError(
            f"{type(rule).__name__}.{name} at {describe(module)} should return a tensor of "
            f"shape {shape}, got {found}"
        )


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
                found |= _translations(name, function)
        for method, own in found.items():
            setattr(cls, method, own)

    def _ours(self, method: str, *names: str) -> Callable[..., Any]:
        """Return our method of this name, passing over translations of these methods of a user.

        A user's method that calls the one of its base class would else call itself.
        """
        own = self._next(method, names)
        if own is not None:
            return own
        of_parameter = _OURS_OF_PARAMETER.fullmatch(method)
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

        def factor(c: Context) -> Any:
            self._ours("need_convex")(c)
            return self._ours("hessian_root", "sqrt_hessian")(c)

        return at_rows(self, self._at_loss(module, subsampling), factor)

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
        c = self._at_loss(module, subsampling)
        drawn = self._ours("drawn_hessian_root", "sqrt_hessian_sampled")
        return at_rows(self, c, lambda c: drawn(c, mc_samples))

    def make_hessian_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads
    ) -> Callable[..., Any]:
        """Return the map ``[V, N, *d] -> [V, N, *d]`` that applies the loss Hessian.

        Its second argument, ``subsampling``, says which rows of the batch it is given.
        """
        return partial(self._product, module, "hessian_product")

    def make_ggn_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads) -> Callable[..., Any]:
        """Return the map ``[V, N, *d] -> [V, N, *d]`` that applies ``S Sᵀ`` of ``sqrt_hessian``.

        Its second argument, ``subsampling``, says which rows of the batch it is given.
        """
        return partial(self._product, module, "ggn_product")

    def _product(self, module: Module, method: str, mat: Mats, subsampling: Rows = None) -> Any:
        c, product = self._at_loss(module, subsampling), getattr(self, method)
        is_of_one = self.predictions(c) == (0,)
        one: Any = mat if isinstance(mat, Tensor) else mat[0]
        chosen = chosen_rows(self, c) if is_of_one else None
        if chosen is not None and not chosen.own:  # none of the samples has a row
            return one.new_zeros(one.shape)
        c = c.counting(chosen.own) if chosen else c
        if method == "ggn_product":
            self._ours("need_convex")(c)
        if not is_of_one:
            return product(c, list(mat))
        if chosen is not None:
            return chosen.spread(product(c, chosen.taken(one)))
        shape = self.shape_of_rows(c.input.shape, 0, subsampling)
        one, had_v = _with_v(module, one, shape)
        result = product(c, one)
        return result if had_v else result.squeeze(0)

    def sum_hessian(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Rows = None
    ) -> Tensor:
        """Hessian with respect to a sample's prediction, summed over samples: ``[D, D]``."""
        c = at_hand(module, None, subsampling)
        chosen = chosen_rows(self, c)
        c = c.counting(chosen.own) if chosen else c
        return self._ours("hessian_sum", "sum_hessian")(c)

    def _at_loss(self, module: Module, subsampling: Rows) -> Context:
        c = at_hand(module, None, subsampling)
        self.check_call(c)
        return c

    check_call: Callable[[Context], None]
    predictions: Callable[[Context], tuple[int, ...]]


# What rules of users find in their base classes.


def _inherited(name: str, form: Form) -> Any:
    """Return the method that a user's rule finds in its base class: it calls ours."""

    def method(self: Interface, *arguments: Any, **named: Any) -> Any:
        values = dict(zip(form.arguments, arguments, strict=False)) | named
        c = at_hand(values["module"], values.get("g_out"), values.get("subsampling"))
        own = form.method + ("_sum" if values.get("sum_batch") else "")
        return self._ours(own, name, name.removeprefix("_"))(
            c, *[values.get(k) for k in form.own_arguments]
        )

    method.__name__ = name
    return method


_OWN = {f"_{p}_jac_t_mat_prod": _form(f"{p}_vjp", "mat", _PARAM) for p in ("weight", "bias")}
_OWN |= {f"_{p}_jac_mat_prod": _form(f"{p}_jvp", "mat", _PRODUCT) for p in ("weight", "bias")}
for _name, _own in {**FORMS, **SUMMED, **_OWN}.items():
    if _own.method != _name and not hasattr(Interface, _name):
        setattr(Interface, _name, _inherited(_name, _own))

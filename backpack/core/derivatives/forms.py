"""Rules of users in the form of the interface: their methods are given the module.

Of each method whose name is in :data:`FORMS`, :func:`translations` makes methods of ours, which
are given the context: they show the tensors of the call, and check the shapes of what comes back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import CO_VARARGS, signature, unwrap
from typing import Any, NamedTuple

from torch import Size, Tensor
from torch.nn import Module

from backpack.core.derivatives.vectors import first_of, listed
from backpack.core.record.context import Context
from backpack.core.record.module_state import describe


class Form(NamedTuple):
    """How a method of a user's rule is called."""

    method: str  # ours, which has the context instead of the module
    own_arguments: tuple[str, ...]  # of our method, behind the context
    arguments: tuple[str, ...]  # of the user's method


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
# What rules of users find in their base classes: those of a weight and a bias, too.
INHERITED = FORMS | SUMMED
INHERITED |= {f"_{p}_jac_t_mat_prod": _form(f"{p}_vjp", "mat", _PARAM) for p in ("weight", "bias")}
INHERITED |= {f"_{p}_jac_mat_prod": _form(f"{p}_jvp", "mat", _PRODUCT) for p in ("weight", "bias")}
# Returns the product with the Hessian of a loss, in 1.7.1.
PRODUCT_OF = "make_hessian_mat_prod"
FORMS |= dict.fromkeys((PRODUCT_OF, f"_{PRODUCT_OF}"), _form("hessian_product", "mat", _ROWS))
_OF_PARAMETER = re.compile("_(?!param_|ea_)(.+)_jac_(t_)?mat_prod")


def translations(name: str, function: Any) -> list[tuple[str, Any]]:
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
    elif form.method == name and "module" not in arguments_of(function):
        return []
    elif name in ("df", "d2f") and len([*arguments_of(function)]) > 3:  # as in 1.7.1
        form = _form(name, "", _ROWS)
    elif "g_out" in arguments_of(function):  # those of losses in 1.7.1, as the public ones
        form = FORMS.get(name.removeprefix("_"), form)
    if "sum_batch" not in form.arguments:
        return [(form.method, _translated(name, function, form))]
    return [
        (form.method, _translated(name, function, form, sum_batch=False)),
        (f"{form.method}_sum", _translated(name, function, form, sum_batch=True)),
    ]


def arguments_of(function: Any) -> Iterable[str]:
    """Return the names of a function's arguments, without ``signature``, which takes long."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return signature(function).parameters
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _is_told_rows(function: Any, form: Form) -> bool:
    """Whether a method takes the rows at hand. Most methods in 1.7.1 did not: they saw all rows."""
    names, code = [*arguments_of(function)][1:], getattr(unwrap(function), "__code__", None)
    takes_any = code is not None and code.co_flags & CO_VARARGS
    return bool(takes_any) or "subsampling" in names or len(names) != len(form.arguments) - 1


def _translated(name: str, function: Callable[..., Any], form: Form, **options: Any) -> Any:
    """Return our method that calls that of a user's rule."""
    is_checked = form.method.endswith(("vjp", "jvp", "hvp", "hessian_diag"))
    is_told = _is_told_rows(function, form)
    taken = [key for key in form.arguments if is_told or key != "subsampling"]

    def method(self: Any, c: Context, *arguments: Any) -> Any:
        values: dict[str, Any] = dict.fromkeys(form.own_arguments)  # optional ones are None
        values |= dict(zip(form.own_arguments, arguments, strict=False))
        values |= {"g_inp": None, "g_out": c.grad_out, "subsampling": c.rows, **options}
        seen = c
        if not (is_told or c.rows is None):
            if c.call.is_loss:
                _refuse_rows(name, c)
            seen = c.restricted(self.axes_in(c), self.axes_out(c))
        if seen.restriction is not None:
            values["g_out"] = seen.restriction.grads
        with seen.shown() as module:
            values["module"] = module
            result = function(self, *[values[key] for key in taken])
            if name.endswith(PRODUCT_OF):
                result = result(values["mat"])
        if not is_checked:
            return result
        result = tuple(result) if isinstance(result, list) else result
        for part, shape in _expected(self, name, form, c, values, result):
            _check_same(self, name, c.module, shape, part)
        return result

    method.translates = name  # type: ignore[attr-defined]
    return method


def _refuse_rows(name: str, c: Context) -> None:
    """Refuse to ask a loss for some samples that is not told which: its mean is that of all."""
    raise NotImplementedError(
        f"{name} of {type(c.call.derivatives).__name__} at {describe(c.module)} has no argument "
        "'subsampling', so that it cannot be asked for some samples. Give it one, the indices of "
        "the samples (None for all), or leave out subsampling."
    )


def _expected(
    rule: Any, name: str, form: Form, c: Context, values: Mapping[str, Any], result: Any
) -> Iterator[tuple[Any, list[int]]]:
    """Yield what a method of a user's rule has returned, and the shapes that it should have."""
    parts = result if isinstance(result, tuple) else [result]
    if form.method == "hessian_diag":
        shape, axis, grad = c.input.shape, rule.axis_in(c, 0), first_of(c.grad_out)
        if grad.dim() > c.output.dim():  # of samples, at a tensor without them
            shape, axis = Size([len(grad), *shape]), 0
        yield result, [*rule.shape_of_rows(shape, axis, c.rows)]
        return
    vectors, mat = listed(values["mat"]), first_of(values["mat"])
    if "sum_batch" in form.arguments:
        i = next(i for i, m in enumerate(vectors) if m is not None)
        param = values.get("param_str") or name[1 : -len("_jac_t_mat_prod")]
        rows = [] if values["sum_batch"] else [mat.shape[1 + rule.axis_out(c, i)]]
        yield result, [len(mat), *rows, *rule.parameter(c, param).shape]
    elif form.method.endswith("jvp"):
        for shape, part in zip(rule.shapes_out(c), parts, strict=False):
            yield part, [len(mat), *shape]
        if len(parts) != len(c.outputs):
            raise ValueError(
                f"{type(rule).__name__}.{name} at {describe(c.module)} should return a tensor for "
                f"each of {len(c.outputs)} outputs, got {len(parts)}."
            )
    else:  # some of several may be None, for zero
        nothing = all(part is None for part in parts)
        for i, (part, x) in enumerate(zip(parts, c.inputs, strict=False)):
            if not isinstance(x, Tensor) or rule.has_sample_tangents(c.call, i):
                continue
            if part is not None or (nothing and x.is_floating_point()):
                shape = rule.shape_of_rows(x.shape, rule.axis_in(c, i), c.rows)
                yield part, [len(mat), *shape]


def _check_same(rule: Any, name: str, module: Module, shape: list[int], got: Any) -> None:
    found: Any = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
    if found != shape:
        found = "None: is its 'return' missing?" if got is None else f"{found}."
        raise ValueError(
            f"{type(rule).__name__}.{name} at {describe(module)} should return a tensor of "
            f"shape {shape}, got {found}"
        )

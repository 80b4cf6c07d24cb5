"""The contract of a module's derivatives, with a generic body wherever one exists.

A rule has parts in files of their own: what it says of its module is in ``facts`` and
``sample_axes``, what is about parameters in ``parameters``. Everything else is here.

Letters: a module maps inputs ``[N, *in]`` and parameters ``[*p]`` to an output ``[N, *out]``;
``V`` counts stacked vectors. ``J`` is the Jacobian of the output with respect to the input, ``J_p``
with respect to a parameter. What a rule needs to know of the call at hand is its ``Context`` ``c``:
cotangents ``v`` and tangents ``t`` hold the rows ``c.rows`` of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from backpack.core import fast
from backpack.core.derivatives.by_autograd import (
    has_second_derivative,
    per_sample_products,
    summed_products,
)
from backpack.core.derivatives.evaluation import Evaluation
from backpack.core.derivatives.forms import arguments_of
from backpack.core.derivatives.interface import own_attributes
from backpack.core.derivatives.parameters import ParameterProducts
from backpack.core.derivatives.vectors import listed
from backpack.core.record.compiler import in_transform
from backpack.core.record.context import Context, context_of
from backpack.core.record.kept_attributes import Copy, attributes_kept, changed_copies
from backpack.core.record.module_state import describe
from backpack.core.record.visits import Visit
from backpack.core.rows import one_by_one
from backpack.core.types import Changes, OfInputs, OfParams
from backpack.utils.functional import functional_call

ONE_JACOBIAN = fast.path(
    "one Jacobian", "A Jacobian that all samples share is applied once to what they share."
)

# What second derivatives follow from.
FIRST_DERIVATIVES = ("vjp", "jvp", "param_vjp", "param_jvp", "affine", "evaluate")
# What a rule says of its methods, or derives from them. A subclass that overrides one of these
# methods says it anew: else it is as in the base class. No names: any method.
FACTS: Mapping[tuple[str, ...], Set[str]] = {
    ("jacobian_is_constant",): {"vjp"},
    ("kronecker_rows_are_constant",): {"kron_rows"},
    ("kronecker_rows_are_shared",): {"affine", "kron_rows", "param_vjp"},
    ("squares_with_input",): {"affine", "affine_inputs", "assemble", "param_vjp"},
    ("kron_rows", "kron_inputs", "has_kronecker_factors"): {"param_vjp"},
    ("joins_bias", "kron_joint_input", "kron_means"): {
        "param_vjp",
        "affine",
        "kron_inputs",
        "kron_rows",
    },
    ("affine_inputs",): {"affine"},
    ("affine_jvp",): {"affine"},
    ("param_vjp_reads_inputs_alone",): {"param_vjp", "affine", "weight_vjp", "bias_vjp"},
    ("repeats_output", "reads_input", "reads_inputs"): set(),
    ("hessian_is_zero",): {"vjp"},
    ("is_linear_in_params",): {"affine", "param_vjp"},
    ("keeps_facts_alone",): {"saved"},
}


class BaseDerivatives(ParameterProducts):
    """Derivatives of a module: products with its Jacobians and its second derivative.

    A subclass implements ``vjp`` and, for each name in ``params``, ``<name>_vjp``, or ``affine``
    where a parameter is multiplied with something. Everything else has a generic body; override it
    where the module's structure allows a faster one, marked with :func:`backpack.core.fast.body`.
    With ``hessian_is_zero`` and ``is_linear_in_params`` a rule says what is affine; where it does
    not, each call is differentiated twice to find out.

    A subclass of another rule inherits what that says of methods (:data:`FACTS`), and its fast
    bodies, as long as it does not override the methods that these are about.

    Methods are given the call at hand ``c``, cotangents ``v`` at its outputs, ``[V, *out]``, or
    tangents ``t`` at its inputs, ``[V, *in]``. Of several outputs or inputs, ``v`` or ``t`` is a
    list with one entry (or None) for each, and a result is a tuple.
    """

    _may_change_attributes = False  # whether an evaluation has to be undone at the module

    def __init_subclass__(cls, **options: Any) -> None:
        """Note what follows from the methods that a subclass overrides."""
        super().__init_subclass__(**options)
        own = own_attributes(cls)
        overridden = _overridden(own)
        fast.enroll(cls, overridden)
        for names, methods in FACTS.items():
            known = own.keys() & set(names)
            if not known and overridden & (methods or overridden):
                for name in names:
                    setattr(cls, name, getattr(BaseDerivatives, name))
        if "kron_joint_input" in own and "joins_bias" not in own:
            cls.joins_bias = True
        is_generic = super(cls, cls).affine_inputs is BaseDerivatives.affine_inputs
        if "affine_inputs" in own and ("affine" in own or not is_generic):
            cls.read_by_affine = own["affine_inputs"]
        if "kron_inputs" in own or "kron_inputs" in vars(cls):
            takes_size = "max_size" in arguments_of(cls.kron_inputs)
            cls.kron_inputs_up_to = cls.kron_inputs if takes_size else cls.factors_or_diagonals
        cls.keeps_something = cls.saved is not BaseDerivatives.saved
        if "affine" in own or "param_vjp" in own:
            cls.acts_affinely = "affine" in own
        cls.has_one_part = cls.assemble is BaseDerivatives.assemble
        cls.tells_curvature = cls.hessian_is_zero is not BaseDerivatives.hessian_is_zero
        cls.tells_linearity = cls.is_linear_in_params is not BaseDerivatives.is_linear_in_params

    # ------------------------------------------------------------------ Jacobians

    def jvp(self, c: Context, t: Any) -> Any:
        """Apply the Jacobian, ``J t``: ``[V, *out]``. Generic, by transposing :meth:`vjp`."""
        return self._transposed(c, lambda v: listed(self.vjp(c, v)), listed(t))

    def vjp(self, c: Context, v: Any) -> Any:
        """Apply the transposed Jacobian, ``Jᵀ v``: ``[V, *in]``."""
        raise self._missing("vjp", "_jac_t_mat_prod", describe(c.module))

    def batch_averaged(self, c: Context, mat: Tensor) -> Tensor:
        """Average ``Jᵀ mat J`` over the samples: ``[D_out, D_out] -> [D_in, D_in]``."""
        count = 1 if self.has_one_jacobian(c) else None
        samples = one_by_one(c.input.shape[self.axis_in(c, 0)], c.rows, count)
        each = (self.average_vjp(at, self.average_vjp(at, mat)) for at in map(c.at, samples))
        total = next(each)
        for found in each:  # one after the other: the Jacobian of each is a dense matrix
            total = total + found
        return total if len(samples) == 1 else total / len(samples)

    def average_vjp(self, c: Context, mat: Tensor) -> Tensor:
        """Average ``matᵀ J`` over samples: ``[D_out, K] -> [K, D_in]``."""
        axis = self.axis_out(c, 0)
        shape = self.shape_of_rows(c.output.shape, axis, c.rows)
        alike = mat.T.reshape(mat.shape[1], *shape[:axis], 1, *shape[axis + 1 :])  # for all samples
        v = alike.expand(-1, *shape)
        back = self.vjp(c, [v, *[None] * (len(c.outputs) - 1)] if len(c.outputs) > 1 else v)
        back = back if isinstance(back, Tensor) else back[0]
        axis_in = 1 + self.axis_in(c, 0)
        mean = back.squeeze(axis_in) if back.shape[axis_in] == 1 else back.mean(axis_in)
        return mean.unsqueeze(-1).flatten(1)  # a sample may be a number alone

    def jacobian_is_constant(self, c: Context) -> bool:
        """Return whether all samples have the same Jacobian."""
        return False

    def has_one_jacobian(self, c: Context) -> bool:
        """Return whether the Jacobian of one sample is to stand for those of all."""
        return ONE_JACOBIAN.is_on and self.jacobian_is_constant(c)

    # ------------------------------------------------------------------ second derivative

    def is_curved(self, call: Visit) -> bool:
        """Return whether the output of a call is no (piecewise) affine function of the input."""
        if self.tells_curvature:
            return not self.hessian_is_zero(call.module)
        return self._bends(call, "hessian_is_zero", of_params=False)

    def bends_params(self, call: Visit) -> bool:
        """Return whether the output of a call is no affine function of each of its parameters."""
        if self.tells_linearity or not call.trained:
            return bool(call.trained) and not self.is_linear_in_params(call.module)
        return self._bends(call, "is_linear_in_params", of_params=True)

    def _bends(self, call: Visit, fact: str, of_params: bool) -> bool:
        """Find out whether a second derivative of a call is not zero; refuse if torch has none."""
        key = f"{fact} of {[g is not None for g in call.g_out]}"
        if key not in call.saved:
            c = context_of(call, check=False)
            try:
                with torch.no_grad():
                    call.saved[key] = has_second_derivative(self.evaluation(c), of_params)
            except RuntimeError as error:
                raise NotImplementedError(
                    f"{type(self).__name__} needs a method '{fact}' for {describe(call.module)}: "
                    f"autograd cannot differentiate it twice to find out ({error})."
                ) from error
        return call.saved[key]

    def hessian_diag(self, c: Context) -> Tensor:
        """Diagonal of the second derivative ``sum_k g_k ∇²_x y_k``: ``[*in]``.

        Only for modules whose second derivative is diagonal; g is ``c.grad_out``.
        """
        if self.is_curved(c.call):
            raise self._missing("hessian_diag", "_hessian_diagonal", describe(c.module))
        return torch.zeros_like(c.x)

    def hvp(self, c: Context, t: Any) -> Any:
        """Apply the second derivative, ``(sum_k g_k ∇²_x y_k) t``: ``[V, *in] -> [V, *in]``."""
        each = listed(t)
        if not self.is_curved(c.call):
            zeros = [None if m is None else torch.zeros_like(m) for m in each]
            return zeros[0] if isinstance(t, Tensor) else zeros
        if isinstance(t, Tensor) and self.hessian_is_diagonal(c.module):
            return t * self.hessian_diag(c)
        results, _ = self.mixed_hvp(c, each, {})
        return results[0] if isinstance(t, Tensor) else results

    def evaluate(self, c: Context, params: Mapping[str, Tensor], *inputs: Any) -> Any:
        """Return the output for other flattened inputs and some parameters; buffers stay."""
        args, keywords = c.call.arguments(inputs)
        module = c.evaluated
        keeps = attributes_kept(module, c.saved) if self._may_change_attributes else nullcontext()
        with c.call.as_it_was(c.call.precision), keeps:
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            # a module may change parameters, such as averages: the first evaluation tells, but not
            # of `data` that stays the same, which counts as changed in a transform alone
            own = dict(module.named_parameters(remove_duplicate=False))
            given, changed = {own.get(name) for name in params}, c.saved.get("changed parameters")
            named = {name: p for name, p in module.named_parameters() if p not in given}
            copies = {
                name: Copy.make(p)
                for name, p in {**named, **params}.items()
                if changed is None or name in changed or in_transform()
            }
            replaced = {name: copy.value for name, copy in copies.items()}
            state = {**buffers, **params, **replaced}
            output = functional_call(module, state, args, keywords)
            if changed is None and not in_transform():
                c.saved["changed parameters"] = changed_copies(copies)
            return output

    def evaluation(self, c: Context) -> Evaluation:
        """Return how to evaluate the call at hand again."""
        return Evaluation(self, c, list(c.inputs), self.axes_in(c), self.axes_out(c))

    def mixed_hvp(
        self, c: Context, inputs: OfInputs, params: OfParams, sum_batch: bool = False
    ) -> Changes:
        """Apply the second derivative of ``⟨g, y⟩`` with respect to inputs and parameters.

        Needed in full where a parameter also influences the module's input (reused and tied
        parameters) or the output is no affine function of it. Generic, by differentiating twice.

        Of ``[V, *in]`` (or None, for zero) for each input and ``[V, *p]`` for each parameter that
        varies, it makes ``[V, *in]`` (None for inputs that do not vary) and ``[V, N, *p]``, or
        ``[V, *p]`` if that is summed over the samples.
        """
        evaluation = self.evaluation(c)
        grads = evaluation.at_outputs(c.grad_out, c.select)
        tangents: dict[Any, Tensor] = dict(params)
        like = next(t for t in [*params.values(), *inputs] if t is not None)
        for i, t in enumerate(inputs):
            x, axis = evaluation.inputs[i], evaluation.axes_in[i]
            if t is None and (axis is None or not c.call.is_differentiated(i)):
                continue
            if t is None:
                shape = self.shape_of_rows(x.shape, axis or 0, c.rows)
                t = like.new_zeros(len(like), *shape)
            elif axis is None:  # the same for all samples
                t = t[:, 0]
            tangents[i] = t
        # what arrives at an input without samples is kept for each sample apart, too
        apart = [key for key in tangents if evaluation.axis(key) is None]
        at_once = not apart or (sum_batch and params.keys() >= set(apart))
        found = (summed_products if at_once else per_sample_products)(evaluation, grads, tangents)
        d_params = {name: found[name] for name in params}
        if sum_batch and not at_once:
            d_params = {name: product.sum(1) for name, product in d_params.items()}
        return [found.get(i) for i in range(len(inputs))], d_params

    def hvp_unbatched(self, c: Context, inputs: OfInputs, params: OfParams) -> Changes:
        """Apply the second derivative of a call without samples, for the gradient of one sample."""
        if params:
            return self.mixed_hvp(c, inputs, params, sum_batch=True)
        back = self.hvp(c, list(inputs) if len(inputs) > 1 else inputs[0])
        return listed(back), {}


def _overridden(own: Mapping[str, Any]) -> set[str]:
    """Return the names of methods that a rule class has itself, but for fast bodies."""
    names = {
        name
        for name, value in own.items()
        if not name.startswith("__") and not fast.is_body(value)
        if callable(value) or isinstance(value, property | staticmethod | classmethod)
    }
    return names | {"param_vjp" for name in names if name.endswith("_vjp")}

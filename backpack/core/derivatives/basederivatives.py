"""The contract of a module's derivatives, with a generic body wherever one exists.

Letters: a module maps inputs ``[N, *in]`` and parameters ``[*p]`` to an output ``[N, *out]``;
``V`` counts stacked vectors. ``J`` is the Jacobian of the output with respect to the input, ``J_p``
with respect to a parameter. What a rule needs to know of the call at hand is its
:class:`~backpack.core.record.context.Context` ``c``: cotangents ``v`` and tangents ``t`` hold the
rows ``c.rows`` of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from math import inf, prod
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch.nn import Module, Parameter

from backpack.core import fast
from backpack.core.derivatives import affine, reductions
from backpack.core.derivatives.by_autograd import has_second_derivative, second_products, transposed
from backpack.core.derivatives.evaluation import Evaluation
from backpack.core.derivatives.interface import own_attributes
from backpack.core.derivatives.sample_axes import SampleAxes
from backpack.core.derivatives.vectors import listed
from backpack.core.record.calls import Call
from backpack.core.record.context import Context, context_of
from backpack.core.record.kernels import KernelOverride
from backpack.core.record.module_state import describe
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows, one_by_one, row_numbers, take_rows
from backpack.core.types import Changes, OfInputs, OfParams, Pairs
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
    ("kron_joint_input", "kron_means"): {"param_vjp", "affine", "kron_inputs", "kron_rows"},
    ("kron_inputs_up_to",): {"kron_inputs", "param_vjp", "affine", "affine_inputs"},
    ("param_vjp_reads_inputs_alone",): {"param_vjp", "affine", "weight_vjp", "bias_vjp"},
    ("repeats_output", "reads_input", "reads_inputs"): set(),
    ("hessian_is_zero",): {"vjp"},
    ("is_linear_in_params",): {"affine", "param_vjp"},
    ("keeps_facts_alone",): {"saved"},
}


def always(*of: Any, **named: Any) -> bool:
    """Return True: a fact about all modules that a rule is for, and all their calls."""
    return True


def never(*of: Any, **named: Any) -> bool:
    """Return False: a fact about none of the modules that a rule is for, nor their calls."""
    return False


def constant(count: int) -> Callable[..., int]:
    """Make a method that returns a number: that of all modules that a rule is for."""
    return lambda rule, module: count


class BaseDerivatives(SampleAxes):
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

    params: ClassVar[tuple[str, ...]] = ()  #: Names of the parameters.
    #: Whether what children of the module compute belongs to its call.
    includes_children: ClassVar[bool] = False
    is_loss: ClassVar[bool] = False  #: Whether the module is a loss.
    #: Whether what the rule found out about a call holds for its layouts only.
    depends_on_layouts: ClassVar[bool] = False
    #: Whether a formula reads ``module.output`` (beyond its shape), and has a derivative by it.
    needs_output: ClassVar[bool] = False
    #: Whether a formula reads ``module.output``; its derivative may be zero.
    reads_output: ClassVar[bool] = False
    #: Whether a formula reads entries of the inputs, not just their shapes.
    reads_input: ClassVar[bool] = True
    #: Whether ``kron_rows`` is the same map for all samples.
    kronecker_rows_are_constant: ClassVar[bool] = False
    #: Whether the input's Kronecker factor belongs to the first axis.
    kronecker_input_first: ClassVar[bool] = False
    #: Whether Kronecker factors are those of ``weight.transpose(0, 1)``.
    kronecker_swaps_axes: ClassVar[bool] = False
    #: Whether a position of ``affine`` is a row of the input, which A may leave out.
    has_positions_apart: ClassVar[bool] = False
    #: Whether all parameters have the same Kronecker rows.
    kronecker_rows_are_shared: ClassVar[bool] = False
    #: Whether what ``saved`` keeps is found without computing anything.
    keeps_facts_alone: ClassVar[bool] = False
    #: Whether each entry of every ``J_p`` is 0, 1 or one of the input, which may be squared first.
    squares_with_input: ClassVar[bool] = False
    # What follows from the methods that a rule has of its own: ``saved``, ``assemble`` (a parameter
    # is what is multiplied), ``affine`` (rather than ``param_vjp``), ``hessian_is_zero``, …
    keeps_something: ClassVar[bool] = False
    has_one_part: ClassVar[bool] = True
    acts_affinely: ClassVar[bool] = False
    tells_curvature: ClassVar[bool] = False
    tells_linearity: ClassVar[bool] = False

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
                    setattr(cls, name, vars(BaseDerivatives)[name])
        cls.keeps_something = cls.saved is not BaseDerivatives.saved
        if "affine" in own or "param_vjp" in own:
            cls.acts_affinely = "affine" in own
        cls.has_one_part = cls.assemble is BaseDerivatives.assemble
        cls.tells_curvature = cls.hessian_is_zero is not BaseDerivatives.hessian_is_zero
        cls.tells_linearity = cls.is_linear_in_params is not BaseDerivatives.is_linear_in_params

    # ------------------------------------------------------------------ facts about the module

    def hessian_is_zero(self, module: Module) -> bool:
        """Return whether the output is an affine (or piecewise affine) function of the input.

        False where a rule does not say so: then :meth:`is_curved` finds out for each call.
        """
        return False

    def hessian_is_diagonal(self, module: Module) -> bool:
        """Return whether output entry i depends on input entry i alone."""
        return self.hessian_is_zero(module)

    def hessian_is_psd(self) -> bool:
        """Return whether the second derivative is positive semidefinite for every ``g_out``."""
        return False

    def couples_samples(self, module: Module) -> bool:
        """Return whether a sample's output depends on other samples."""
        return False

    # what no class has replaced, perhaps after its definition, is not called
    samples_are_apart = couples_samples

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

    def unsupported_reason(self, c: Context) -> str | None:
        """Say why the derivatives of the call at hand cannot be computed; None if they can."""
        return None

    def couples_samples_unseen(self, call: Visit) -> bool | None:
        """Return whether a call mixes samples though :meth:`couples_samples` does not say so.

        None if that cannot be found out.
        """
        return False

    def divides_by_targets(self, call: Visit) -> bool | None:
        """Return whether a loss divides by a number that depends on the targets of all samples.

        None if that cannot be found out.
        """
        return False

    def param_names(self, module: Module) -> tuple[str, ...]:
        """Return the names of the parameters that the rule knows."""
        return self.params

    def own(self, module: Any) -> Mapping[str, Parameter | None]:
        """Return the parameters by name: those of children, too, if the rule includes them."""
        if self.includes_children and module._modules:
            return dict(module.named_parameters())
        return module._parameters

    def costly_gradients(self, call: Call, wanted: Set[str]) -> tuple[str, ...]:
        """Return the parameters whose gradient takes autograd a product that can be elided.

        ``wanted`` are the quantities that are extracted from individual gradients.
        """
        return ()

    def kernel_overrides(
        self, visit: Visit, nodes: Sequence[Any], elided: Set[Parameter]
    ) -> Sequence[KernelOverride] | None:
        """Return what takes the place of kernels, so that they compute no parameter's gradient.

        Args:
            visit: The call in the backward pass.
            nodes: Nodes of the graph, among them all between the call's outputs and its inputs.
            elided: Parameters whose gradients autograd need not compute, for all that is known.

        Returns:
            Overrides for some of the nodes; None if the call's parameters are not to be elided.
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

    def param_vjp_reads_inputs_alone(self, module: Module, name: str) -> bool:
        """Return whether products of a parameter read cotangents and inputs, no values beside.

        Individual gradients may then be multiplied after the parameter was changed.
        """
        return False

    def reaches_one_output(self, call: Call) -> bool:
        """Return whether an entry of a parameter reaches one entry of a sample's output alone."""
        return False

    def is_linear_in_params(self, module: Module) -> bool:
        """Return whether the output is an affine function of each parameter.

        False where a rule does not say so: then :meth:`bends_params` finds out for each call.
        """
        return False

    def min_dims(self, module: Module) -> int:
        """Return how many axes an output has at least, the batch axis included."""
        return 0

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Return what must be kept from the forward pass, for ``c.saved``."""
        return {}

    # ------------------------------------------------------------------ Jacobians

    def jvp(self, c: Context, t: Any) -> Any:
        """Apply the Jacobian, ``J t``: ``[V, *out]``. Generic, by transposing :meth:`vjp`."""
        return self._transposed(c, lambda v: listed(self.vjp(c, v)), listed(t))

    def _transposed(
        self, c: Context, pull: Callable[[Any], Sequence[Tensor | None]], ts: Sequence[Any]
    ) -> Any:
        """Apply the transpose of a map from cotangents at the outputs, which is linear in them."""
        num_v = len(next(t for t in ts if t is not None))
        shapes = (
            self.shape_of_rows(y.shape, self.axis_out(c, i), c.rows)
            for i, y in enumerate(c.outputs)
        )
        vs = [c.output.new_zeros(num_v, *shape) for shape in shapes]
        found = transposed(lambda vs: pull(vs[0] if len(vs) == 1 else vs), vs, ts)
        return found[0] if len(found) == 1 else tuple(found)

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

    # ------------------------------------------------------------------ parameters

    def affine(self, c: Context, name: str, v: Any) -> Pairs | None:
        """Return pairs (s, x) of cotangents and inputs whose products a parameter's are.

        ``dp = sum_t s_t x_tᵀ`` over positions t. A parameter may consist of parts with a pair of
        their own, see :meth:`assemble`.

        Returns:
            s ``[V, N, *, O]`` and x ``[N, *, I]`` for the part ``[O, I]``, with any axes of
            positions; x is None for ``[O]``. None if the parameter does not act in this way.
        """
        return None

    def affine_inputs(self, c: Context, name: str) -> list[Tensor | None] | None:
        """Return the x of each of the pairs of :meth:`affine`, which do not depend on ``v``."""
        each = [
            y.new_zeros(()).expand(1, *self.shape_of_rows(y.shape, self.axis_out(c, i), c.rows))
            for i, y in enumerate(c.outputs)
        ]
        pairs = self.flat_pairs(c, name, each[0] if len(each) == 1 else each)
        return None if pairs is None else [x for _, x in pairs]

    def assemble(self, c: Context, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Make ``[*, *p]`` of ``[*, O, I]`` (``[*, O]``) for each pair of :meth:`affine`."""
        (whole,) = parts
        return whole

    def param_vjp(self, c: Context, name: str, v: Any) -> Tensor:
        """Apply the transposed Jacobian of a parameter for each sample: ``[V, N, *p]``."""
        own = getattr(self, f"{name}_vjp", None)
        return self.affine_vjp(c, v, name) if own is None else own(c, v)

    def param_vjp_sum(self, c: Context, name: str, v: Any) -> Tensor:
        """Apply the transposed Jacobian of a parameter, summed over the samples: ``[V, *p]``."""
        own = getattr(self, f"{name}_vjp_sum", None)
        if own is not None:
            return own(c, v)
        if hasattr(self, f"{name}_vjp"):
            return self.param_vjp(c, name, v).sum(1)
        return self.affine_vjp_sum(c, v, name)

    def param_jvp(self, c: Context, name: str, t: Tensor) -> Any:
        """Apply the Jacobian with respect to a parameter: ``[V, *p] -> [V, *out]``."""
        own = getattr(self, f"{name}_jvp", None)
        return self.affine_jvp(c, t, name) if own is None else own(c, t)

    def affine_vjp(self, c: Context, v: Any, name: str) -> Tensor:
        """Return what :meth:`affine` makes of :meth:`param_vjp`."""
        return self.assemble(c, name, [affine.vjp(s, x) for s, x in self._pairs(c, name, v)])

    def affine_vjp_sum(self, c: Context, v: Any, name: str) -> Tensor:
        """Return what :meth:`affine` makes of :meth:`param_vjp_sum`."""
        if not self.acts_affinely:
            return self.param_vjp(c, name, v).sum(1)
        return self.assemble(c, name, [affine.vjp_sum(s, x) for s, x in self._pairs(c, name, v)])

    def affine_jvp(self, c: Context, t: Tensor, name: str) -> Any:
        """Return :meth:`param_jvp`, by transposing :meth:`param_vjp_sum`."""
        return self._transposed(c, lambda v: [self.param_vjp_sum(c, name, v)], [t])

    def _pairs(self, c: Context, name: str, v: Any) -> Pairs:
        pairs = self.flat_pairs(c, name, v)
        if pairs is None:
            what = f"the parameter '{name}' of {describe(c.module)}"
            raise self._missing(f"{name}_vjp", f"_{name}_jac_t_mat_prod", what)
        return pairs

    def flat_pairs(self, c: Context, name: str, v: Any) -> Pairs | None:
        """Return the pairs of :meth:`affine` with one axis of positions, or without."""
        pairs = self.affine(c, name, v)
        if pairs is None:
            return None
        for s, _ in pairs:
            if s.dim() > 4:
                break
        else:
            return pairs
        return [(s.flatten(2, -2), x if x is None else x.flatten(1, -2)) for s, x in pairs]

    def _missing(self, method: str, old: str, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} needs a method '{method}' (or '{old}') for {what}. Its "
            "signature is in 'Write a rule' of the documentation."
        )

    def parameter(self, c: Context, name: str) -> Tensor:
        """Return a parameter of the call by the name that :meth:`own` gives it."""
        return c.params[name]

    def reduced(
        self, c: Context, name: str, v: Any, wanted: Set[str], weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Reduce ``J_pᵀ v`` of each sample in several ways at once, by name.

        ``wanted`` are names of the table in :mod:`backpack.core.derivatives.reductions`; squares
        have weights ``[V, N]``.
        """
        acts_affinely = self.acts_affinely and not hasattr(self, f"{name}_vjp")
        pairs = self.flat_pairs(c, name, v) if acts_affinely else None
        if pairs is None:
            p = self.parameter(c, name)

            def individual(at: Context, part: Any) -> Tensor:
                return self.param_vjp(at, name, part)

            return self._reduced_in_slices(c, v, individual, p.shape, p.numel(), wanted, weights)
        memo = c.memo if self.kronecker_rows_are_shared else None
        if self.has_one_part and len(pairs) == 1:
            ((s, x),) = pairs
            return affine.reduced(s, x, wanted, weights, memo)
        found = [affine.reduced(s, x, wanted, weights, memo) for s, x in pairs]
        return reductions.put_together(found, lambda parts: self.assemble(c, name, parts))

    def square_in_bases(
        self,
        c: Context,
        name: str,
        v: Any,
        bases: Sequence[Tensor],
        weights: Tensor | None = None,
        joint: bool = False,
    ) -> Tensor:
        """Sum ``(Qᵀ J_pᵀ v)²`` over columns and samples, with ``Q = U_1 ⊗ U_2 ⊗ …``.

        The bases U are orthogonal, of the sizes d of the Kronecker factors; if joint, those of a
        weight that is joined with its bias. Squares have weights ``[V, N]``.

        Returns:
            ``[d_1, d_2, …]``.
        """
        if self._is_one_product(c, name):
            ((s, x),) = self._pairs(c, name, v)
            x = affine.with_one(x) if joint and x is not None else x
            sizes = [s.shape[-1]] if x is None else [s.shape[-1], x.shape[-1]]
            ordered = bases[::-1] if self.kronecker_input_first else bases
            if [*map(len, ordered)] == sizes:
                square = affine.square_in_bases(s, x, ordered, weights)
                return square.mT if self.kronecker_input_first and x is not None else square
        swaps = self.kronecker_swaps_axes and len(bases) > 1
        shape = [*map(len, bases)]

        def turned(at: Context, part: Any) -> Tensor:
            products = self.param_vjp(at, name, part)
            if joint:
                products = self.joined(products, self.param_vjp(at, "bias", part))
            return reductions.in_bases(products, bases, swaps)

        args = c, v, turned, shape, prod(shape), {"square"}, weights
        return self._reduced_in_slices(*args)["square"]

    def joined(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Join products of weight and bias, ``[V, N, O, *]`` and ``[V, N, O]``.

        Returns:
            ``[V, N, O, I + 1]``; if the factor of the input comes first, ``[V, N, I + 1, O]``.
        """
        axis = 2 if self.kronecker_input_first else 3
        return torch.cat([weight.flatten(3), bias.unsqueeze(axis)], axis)

    def _reduced_in_slices(
        self,
        c: Context,
        v: Any,
        compute: Callable[[Context, Any], Tensor],
        shape: Sequence[int],
        entries: int,
        wanted: Set[str],
        weights: Tensor | None,
    ) -> dict[str, Tensor]:
        """Reduce ``[V, N, *shape]`` slice by slice, if each takes so many entries to compute."""
        each = [v] if isinstance(v, Tensor) else list(v)
        axes = [1 + self.axis_out(c, i) for i in range(len(each))]
        like, axis = next((m, a) for m, a in zip(each, axes, strict=True) if m is not None)
        num_v, count = like.shape[0], like.shape[axis]
        rows = c.numbers(c.output.shape[axes[0] - 1])

        def product(samples: slice) -> reductions.Multiply:
            size = samples.stop - samples.start
            at = c if size == count else c.at(take_rows(rows, samples))

            def multiply(vectors: slice, out: Tensor | None) -> Tensor:
                part = [
                    m if m is None else m[vectors].narrow(a, samples.start, size)
                    for m, a in zip(each, axes, strict=True)
                ]
                return compute(at, part[0] if isinstance(v, Tensor) else part)

            return multiply

        shape, entries = (num_v, count, *shape), num_v * entries
        return reductions.in_slices(product, shape, entries, like, wanted, weights)

    def squared_param_vjp(self, c: Context, name: str, v: Tensor) -> Tensor:
        """Apply the transpose of the entrywise square of ``J_p``: ``[V, *out] -> [V, N, *p]``.

        The diagonal of ``J_pᵀ D J_p``, if ``v`` is that of D. Only for rules that say
        ``squares_with_input``.
        """
        return self.param_vjp(c.reading(c.input.square(), *c.inputs[1:]), name, v)

    def squared_param_vjp_sum(self, c: Context, name: str, v: Tensor) -> Tensor:
        """Return the sum of :meth:`squared_param_vjp` over the samples: ``[V, *p]``."""
        return self.param_vjp_sum(c.reading(c.input.square(), *c.inputs[1:]), name, v)

    def kron_rows(self, c: Context, name: str, v: Any, approximation: str | None = None) -> Tensor:
        """Vectors whose outer products make the first Kronecker factor.

        Generic: the s of :meth:`affine`. Where there is none, the flattened ``J_pᵀ v``; its outer
        products are the exact block.

        Returns:
            ``[V, N, G, O]``, for G groups that share the factor ``[O, O]`` (its mean over G). Of a
            weight that is used at several positions t of a sample, the sum over t; with the
            approximation ``"expand"`` each of them, ``[V, N·T, G, O]``.
        """
        if self._is_one_product(c, name):
            ((s, _),) = self._pairs(c, name, v)
            s = s.unsqueeze(2) if s.dim() == 3 else s
            return affine.position_rows(s, approximation).unsqueeze(2)
        products = self.param_vjp(c, name, v)
        return products.reshape(*products.shape[:2], 1, -1)

    def kron_inputs(self, c: Context, name: str, approximation: str | None = None) -> list[Tensor]:
        """Kronecker factors made of the inputs.

        Generic: that of the x of :meth:`affine`. Without one, the first factor is the block.
        """
        return self._factors_of_inputs(c, name, approximation, inf)

    def _factors_of_inputs(
        self, c: Context, name: str, approximation: str | None, max_size: float
    ) -> list[Tensor]:
        inputs = self.affine_inputs(c, name) if self._is_one_product(c, name) else None
        known = [x for x in inputs or [] if x is not None]
        return [affine.input_factor(x, approximation, max_size) for x in known]

    def kron_joint_input(
        self, c: Context, approximation: str | None = None, max_size: float = inf
    ) -> Tensor | None:
        """Kronecker factor of ``[x; 1]``, for weight and bias together; None if there is none.

        Of one larger than ``max_size`` the diagonal ``[I + 1]`` alone.
        """
        return None

    def kron_means(self, c: Context, name: str, num_n: int) -> Tensor | None:
        """Average over its positions what a parameter is multiplied with in each of N samples.

        Generic: the x of :meth:`affine`, which has several rows of each sample.

        Returns:
            ``[N, G, I]`` for G groups that share the factor ``[I, I]``; None for a bias.

        Raises:
            NotImplementedError: If the rule does not say what a parameter is multiplied with.
        """
        inputs = self.affine_inputs(c, name)
        if inputs is None or len(inputs) > 1:
            raise NotImplementedError(
                f"approximation='reduce': '{name}' of {describe(c.module)} is used in several rows "
                f"of a sample, or several times, and the rule {type(self).__name__} does not say "
                "what it is multiplied with there: write its affine (or kron_means), or use "
                "approximation='expand' or None."
            )
        (x,) = inputs
        return None if x is None else x.reshape(num_n, -1, x.shape[-1]).mean(1, keepdim=True)

    @property
    def joins_bias(self) -> bool:
        """Whether weight and bias have Kronecker factors together."""
        return type(self).kron_joint_input is not BaseDerivatives.kron_joint_input

    def kron_inputs_up_to(
        self, c: Context, name: str, approximation: str | None, max_size: float
    ) -> list[Tensor]:
        """Return :meth:`kron_inputs`, or the diagonals ``[I]`` of factors larger than a size.

        Generic: forms the factors, but for those of the x of :meth:`affine`.
        """
        if type(self).kron_inputs is BaseDerivatives.kron_inputs:
            return self._factors_of_inputs(c, name, approximation, max_size)
        factors = self.kron_inputs(c, name, approximation)
        if max(map(len, factors), default=0) <= max_size:
            return factors
        return [f if len(f) <= max_size else f.diagonal().clone() for f in factors]

    def has_kronecker_factors(self, c: Context, name: str) -> bool:
        """Whether a parameter has Kronecker factors in the call at hand, not just its block."""
        own = type(self).kron_inputs is not BaseDerivatives.kron_inputs
        return own or self._is_one_product(c, name)

    def _is_one_product(self, c: Context, name: str) -> bool:
        """Whether a parameter is itself the ``[O, I]`` (or ``[O]``) that :meth:`affine` makes."""
        if not self.acts_affinely or hasattr(self, f"{name}_vjp"):
            return False
        inputs, p = self.affine_inputs(c, name), self.parameter(c, name)
        if inputs is None or len(inputs) > 1:
            return False
        features = [] if inputs[0] is None else [inputs[0].shape[-1]]
        if self.has_one_part or [*p.shape[1:]] != features:
            return self.has_one_part
        return self.assemble(c, name, [p]) is p

    # ------------------------------------------------------------------ second derivative

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
        """Return the output for other inputs and parameters, differentiably; buffers stay the same.

        Inputs are all arguments of the call, flattened; ``params`` replace some.
        """
        args, keywords = c.call.arguments(inputs)
        with c.call.as_it_was(c.call.precision):
            buffers = {name: buffer.clone() for name, buffer in c.module.named_buffers()}
            return functional_call(c.module, {**buffers, **params}, args, keywords)

    def evaluation(self, c: Context) -> Evaluation:
        """Return how to evaluate the call at hand again."""
        return Evaluation(self, c, list(c.inputs), self.axes_in(c), self.axes_out(c))

    def mixed_hvp(
        self, c: Context, inputs: OfInputs, params: OfParams, sum_batch: bool = False
    ) -> Changes:
        """Apply the second derivative of ``⟨g, y⟩`` with respect to inputs and parameters.

        Needed in full where a parameter also influences the module's input (reused and tied
        parameters) or the output is no affine function of it. Generic, by differentiating twice.

        Args:
            c: The call at hand.
            inputs: ``[V, *in]`` (or None, for zero) for each input.
            params: ``[V, *p]`` for each parameter that varies.
            sum_batch: Whether to sum what is at the parameters over the samples.

        Returns:
            ``[V, *in]`` for each input (None for those that do not vary), ``[V, N, *p]`` for each
            varied parameter, or ``[V, *p]`` if summed.
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
        numbers = c.numbers(evaluation.num_samples)
        # what arrives at an input without samples is kept for each sample apart, too
        apart = [key for key in tangents if evaluation.axis(key) is None]
        at_once = not apart or (sum_batch and params.keys() >= set(apart))
        found = second_products(evaluation, grads, tangents, numbers, at_once)
        d_params = {name: found[name] for name in params}
        if sum_batch and not at_once:
            d_params = {name: product.sum(1) for name, product in d_params.items()}
        return [found.get(i) for i in range(len(inputs))], d_params

    def hvp_unbatched(self, c: Context, inputs: OfInputs, params: OfParams) -> Changes:
        """Apply the second derivative of a call without samples, for the gradient of one sample.

        Returns:
            ``[V, *in]`` for each input, ``[V, *p]`` for each parameter that varies.
        """
        if params:
            return self.mixed_hvp(c, inputs, params, sum_batch=True)
        back = self.hvp(c, list(inputs) if len(inputs) > 1 else inputs[0])
        return listed(back), {}

    @staticmethod
    def shape_of_rows(shape: Size, axis: int, rows: Rows) -> Size:
        """Return the shape of a selection of rows along an axis."""
        if rows is None or not shape:
            return shape
        return Size([*shape[:axis], len(row_numbers(shape[axis], rows)), *shape[axis + 1 :]])


def _overridden(own: Mapping[str, Any]) -> set[str]:
    """Return the names of the methods among what a rule class has itself, but for fast bodies.

    ``weight_vjp`` of a parameter is part of ``param_vjp``.
    """
    names = {
        name
        for name, value in own.items()
        if not name.startswith("__") and not fast.is_body(value)
        if callable(value) or isinstance(value, property | staticmethod | classmethod)
    }
    return names | {"param_vjp" for name in names if name.endswith("_vjp")}

"""Products with the Jacobians of a module's parameters, and Kronecker factors made of them.

A rule writes ``<name>_vjp``, or ``affine`` where a parameter is multiplied with something. From
either follows everything here; :mod:`~backpack.core.derivatives.affine` has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from backpack.core.derivatives import affine, reductions
from backpack.core.derivatives.by_autograd import transposed
from backpack.core.derivatives.facts import Facts
from backpack.core.derivatives.vectors import listed
from backpack.core.record.context import Context
from backpack.core.record.module_state import describe
from backpack.core.rows import take_rows
from backpack.core.types import Pairs


class ParameterProducts(Facts):
    """The part of a rule that is about parameters."""

    def _transposed(
        self, c: Context, pull: Callable[[Any], Sequence[Tensor | None]], ts: Sequence[Any]
    ) -> Any:
        """Apply the transpose of a map from cotangents at the outputs, which is linear in them."""
        num_v = len(next(t for t in ts if t is not None))
        vs = [c.output.new_zeros(num_v, *shape) for shape in self.shapes_out(c)]
        found = transposed(lambda vs: pull(vs[0] if len(vs) == 1 else vs), vs, ts)
        return found[0] if len(found) == 1 else tuple(found)

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
        outputs = zip(c.outputs, self.shapes_out(c), strict=True)
        each = [y.new_zeros(()).expand(1, *shape) for y, shape in outputs]
        pairs = self.flat_pairs(c, name, each[0] if len(each) == 1 else each)
        return None if pairs is None else [x for _, x in pairs]

    # the same, for bodies of affine: where a subclass has another affine, those of its base class
    read_by_affine: Any = affine_inputs

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
            shape = self.parameter(c, name).shape
            return self._reduced_in_slices(
                c, v, lambda at, part: self.param_vjp(at, name, part), shape, wanted, weights
            )
        memo = c.memo if self.kronecker_rows_are_shared else None
        if self.has_one_part and len(pairs) == 1:
            ((s, x),) = pairs
            return affine.reduced(s, x, wanted, weights, memo)
        values = {}
        parts = [affine.reduced(s, x, wanted, weights, memo) for s, x in pairs]
        for key in parts[0]:
            each = [part[key] for part in parts]
            is_norm = key == "square_norm"  # norms add up
            values[key] = sum(each[1:], each[0]) if is_norm else self.assemble(c, name, each)
        return values

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

        return self._reduced_in_slices(c, v, turned, shape, {"square"}, weights)["square"]

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
        wanted: Set[str],
        weights: Tensor | None,
    ) -> dict[str, Tensor]:
        """Reduce ``[V, N, *shape]`` slice by slice."""
        each = listed(v)
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

        whole, entries = (num_v, count, *shape), num_v * prod(shape)
        return reductions.in_slices(product, whole, entries, like, wanted, weights)

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

    def kron_inputs(
        self, c: Context, name: str, approximation: str | None = None, max_size: float = inf
    ) -> list[Tensor]:
        """Kronecker factors made of the inputs, or diagonals of those larger than a size.

        Generic: that of the x of :meth:`affine`. Without one, the first factor is the block. A rule
        may leave ``max_size`` out: diagonals are then taken of its factors.
        """
        inputs = self.affine_inputs(c, name) if self._is_one_product(c, name) else None
        known = [x for x in inputs or [] if x is not None]
        return [affine.input_factor(x, approximation, max_size) for x in known]

    def factors_or_diagonals(
        self, c: Context, name: str, approximation: str | None, max_size: float
    ) -> list[Tensor]:
        """Return :meth:`kron_inputs` with a ``max_size``, of a rule that leaves it out."""
        factors = self.kron_inputs(c, name, approximation)
        return [f if len(f) <= max_size else f.diagonal().clone() for f in factors]

    kron_inputs_up_to: Any = kron_inputs  # or factors_or_diagonals, for what a rule has

    def kron_joint_input(
        self, c: Context, approximation: str | None = None, max_size: float = inf
    ) -> Tensor:
        """Kronecker factor of ``[x; 1]``, for weight and bias together, if the rule joins them.

        Of one larger than ``max_size`` the diagonal ``[I + 1]`` alone.
        """
        (x,) = self.affine_inputs(c, "weight") or [None]
        assert x is not None
        return affine.input_factor(affine.with_one(x), approximation, max_size)

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

    def has_kronecker_factors(self, c: Context, name: str) -> bool:
        """Whether a parameter has Kronecker factors in the call at hand, not just its block."""
        own = type(self).kron_inputs is not ParameterProducts.kron_inputs
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

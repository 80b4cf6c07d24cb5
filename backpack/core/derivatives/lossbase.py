"""The contract of a loss's derivatives: factors of its Hessian with respect to the prediction.

Letters: the prediction has shape ``[N, *d]`` with D entries for a sample; a factor S of shape
``[V, N, *d]`` satisfies ``sum_v S_vn S_vnᵀ = ∇²_n``, the Hessian of the (reduced) loss with respect
to the prediction of sample n. If several inputs are predictions (:meth:`~BaseLossDerivatives.
predictions`), what is one tensor here becomes a tuple with one entry (or None) for each input.

For most losses the matrix of the GGN is that Hessian. :meth:`~BaseLossDerivatives.sqrt_hessian`,
:meth:`~BaseLossDerivatives.make_ggn_mat_prod` and :meth:`~BaseLossDerivatives.sum_hessian` are
about the GGN, which is positive semidefinite or an error;
:meth:`~BaseLossDerivatives.hessian_factor` and :meth:`~BaseLossDerivatives.make_hessian_mat_prod`
are about the Hessian, whatever its sign. The two differ only where a rule says so
(:class:`~backpack.core.derivatives.crossentropyloss.NLLLossDerivatives`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.loss import _Loss

from backpack.context import disable
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.record.layout import Place
from backpack.core.record.registry import derivatives_of
from backpack.core.record.tape import Call, bound, describe
from backpack.core.rows import Rows, row_numbers
from backpack.core.types import Grads, Mats
from backpack.utils.subsampling import subsample

# Columns at the prediction, or one entry (None for zero) for each input.
Columns = Tensor | tuple[Tensor | None, ...]


class Chosen(NamedTuple):
    """Rows of a loss whose prediction has chosen rows, in any order and number for each sample.

    A loss pairs such rows with those of the target, and counts them: its rule sees them as they
    are. The engine has those of each sample side by side, and zeros where a sample has fewer.

    Attributes:
        own: The rows as the rule counts them.
        places: Where they are among the rows of the engine, those that are asked for.
        total: How many of these there are.
    """

    own: list[int]
    places: Tensor
    total: int

    def spread(self, mat: Tensor) -> Tensor:
        """Bring ``[V, own rows, *]`` to ``[V, total, *]``, zero elsewhere."""
        whole = mat.new_zeros(len(mat), self.total, *mat.shape[2:])
        return whole.index_copy(1, self.places.to(mat.device), mat[:, : len(self.places)])

    def taken(self, mat: Tensor) -> Tensor:
        """Take ``[V, own rows, *]`` of ``[V, total, *]``."""
        return mat.index_select(1, self.places.to(mat.device))


class BaseLossDerivatives(BaseDerivatives):
    """Derivatives of a loss ``ℓ(prediction, target)``, reduced to a scalar.

    A subclass implements ``_sqrt_hessian``, ``_sqrt_hessian_sampled`` and ``_hessian_mat_prod``; if
    the loss need not be convex, also ``_need_convex`` and ``_hessian_factor``.
    """

    includes_children = True

    def hessian_is_zero(self, module: Module) -> bool:
        """Return False."""
        return False

    def hessian_is_psd(self) -> bool:
        """Return True: convex in the prediction."""
        return True

    def has_likelihood(self, module: Module) -> bool:
        """Return whether the loss is the negative log likelihood of a known distribution."""
        return True

    def own(self, module: Any) -> Mapping[str, Parameter | None]:
        """Return all parameters of the loss, which no rule knows: trained ones are an error."""
        return dict(module.named_parameters()) if module._modules else module._parameters

    def predictions(self, module: Any) -> tuple[int, ...]:
        """Number the inputs that are predictions; the others are targets, weights or options."""
        return (0,)

    def couples_samples(self, module: Any) -> bool:
        """Return whether the loss is no sum over the samples: its Hessian has mixed terms."""
        return False

    def check_convex(self, module: Module, subsampling: Rows = None) -> None:
        """Refuse a loss whose GGN is not positive semidefinite.

        Raises:
            ValueError: If the loss is not reduced to a scalar, or not convex in the prediction.
        """
        with bound(module):
            self.check_call(module)
            chosen = self._chosen(module, subsampling)
            self._need_convex(module, chosen.own if chosen else subsampling)

    def sqrt_hessian(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Rows = None
    ) -> Any:
        """Exact factor of the loss Hessian.

        Args:
            module: Loss whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs (not used).
            subsampling: Rows of the batch. Default: all.

        Returns:
            ``[V, N, *d]``; carries the square root of the reduction's factor.

        Raises:
            ValueError: If the loss is not reduced to a scalar, or not convex in the prediction.
        """
        with bound(module):
            self.check_call(module)

            def factor(rows: Rows) -> Any:
                self._need_convex(module, rows)
                return self._sqrt_hessian(module, rows)

            return self._spread(module, subsampling, factor)

    def thin_factor(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Rows = None
    ) -> Any:
        """Exact factor of the loss Hessian with as few columns as are known, otherwise any.

        For what depends on ``S Sᵀ`` alone. Arguments and errors: as :meth:`sqrt_hessian`.

        Returns:
            ``[V, N, *d]``; carries the square root of the reduction's factor.
        """
        with bound(module):
            self.check_call(module)

            def factor(rows: Rows) -> Any:
                self._need_convex(module, rows)
                return self._thin_factor(module, rows)

            return self._spread(module, subsampling, factor)

    def hessian_factor(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        subsampling: Rows = None,
        thin: bool = True,
    ) -> tuple[Any, Tensor | None]:
        """Exact signed factor of the loss Hessian, which need not be positive semidefinite.

        Args:
            module: Loss whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs (not used).
            subsampling: Rows of the batch. Default: all.
            thin: With as few columns as are known; else with those that are found fastest.

        Returns:
            Columns s ``[V, N, *d]`` and weights w ``[V, N]`` (None for all 1) with
            ``sum_v w_vn s_vn s_vnᵀ = ∇²_n``.

        Raises:
            ValueError: If the loss is not reduced to a scalar.
        """
        with bound(module):
            self.check_call(module)

            def factor(rows: Rows) -> tuple[Any, Tensor | None]:
                if thin or not self._sqrt_hessian_is_hessian(module):
                    return self._hessian_factor(module, rows)
                return self._sqrt_hessian(module, rows), None

            return self._spread(module, subsampling, factor)

    def sqrt_hessian_sampled(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mc_samples: int = 1,
        subsampling: Rows = None,
    ) -> Any:
        """Monte-Carlo factor: gradients with targets drawn from the model's prediction.

        Args:
            module: Loss whose call is at hand.
            g_inp: Gradients with respect to the inputs (not used).
            g_out: Gradients with respect to the outputs (not used).
            mc_samples: Number of samples M.
            subsampling: Rows of the batch. The draws do not depend on it. Default: all.

        Returns:
            ``[M, N, *d]``, divided by ``sqrt(M)``; ``S Sᵀ`` has the Fisher information matrix as
            its expectation, which for most losses is the Hessian.

        Raises:
            ValueError: If the loss is not reduced to a scalar, or has negative weights.
            NotImplementedError: If the loss is no negative log likelihood.
        """
        with bound(module):
            self.check_call(module)
            if not self.has_likelihood(module):
                raise NotImplementedError(
                    f"{describe(module)} is not the negative log likelihood of a distribution that "
                    "targets could be drawn from, so it has no Monte-Carlo quantities. Use the "
                    "exact ones (DiagGGNExact, BatchDiagGGNExact, SqrtGGNExact, KFLR)."
                )
            sampled = self._sqrt_hessian_sampled(module, mc_samples)
            if mc_samples > 1:
                sampled = sampled / sqrt(mc_samples)
            return self._spread(
                module, subsampling, lambda rows: subsample(sampled, dim=1, subsampling=rows)
            )

    def make_hessian_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads
    ) -> Callable[..., Any]:
        """Return the map ``[V, N, *d] -> [V, N, *d]`` that applies the loss Hessian.

        Its second argument, ``subsampling``, says which rows of the batch it is given.
        """
        return self._product(module, self._hessian_mat_prod)

    def make_ggn_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads) -> Callable[..., Any]:
        """Return the map ``[V, N, *d] -> [V, N, *d]`` that applies ``S Sᵀ`` of ``sqrt_hessian``.

        Its second argument, ``subsampling``, says which rows of the batch it is given.
        """

        def ggn_mat_prod(module: Any, mat: Any, subsampling: Rows) -> Any:
            self._need_convex(module, subsampling)
            return self._ggn_mat_prod(module, mat, subsampling)

        return self._product(module, ggn_mat_prod)

    def _product(
        self, module: Module, apply: Callable[[Any, Any, Rows], Any]
    ) -> Callable[..., Any]:
        def product(mat: Mats, subsampling: Rows = None) -> Any:
            with bound(module) as m:
                self.check_call(module)
                if self.predictions(module) != (0,):
                    return apply(module, list(mat), subsampling)
                one = mat if isinstance(mat, Tensor) else mat[0]
                chosen = self._chosen(module, subsampling)
                if chosen is not None:
                    assert one is not None
                    if not chosen.own:
                        return torch.zeros_like(one)
                    return chosen.spread(apply(module, chosen.taken(one), chosen.own))
                one, had_v = self._check(module, one, m.input0.shape, 0, subsampling)
                result = apply(module, one, subsampling)
            return result if had_v else result.squeeze(0)

        return product

    def sum_hessian(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Rows = None
    ) -> Tensor:
        """Hessian with respect to a sample's prediction, summed over samples: ``[D, D]``."""
        with bound(module):
            chosen = self._chosen(module, subsampling)
            return self._sum_hessian(module, chosen.own if chosen else subsampling)

    def _sum_hessian(self, module: Any, subsampling: Rows) -> Tensor:
        self.check_call(module)
        self._need_convex(module, subsampling)
        factor = self._sqrt_hessian(module, subsampling).flatten(0, 1)
        rows = factor.reshape(len(factor), -1)
        return rows.T @ rows

    def _sqrt_hessian(self, module: Any, subsampling: Rows) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no sqrt_hessian.")

    def _thin_factor(self, module: Any, subsampling: Rows) -> Any:
        return self._sqrt_hessian(module, subsampling)

    def _sqrt_hessian_sampled(self, module: Any, mc_samples: int) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no sqrt_hessian_sampled.")

    def _hessian_mat_prod(self, module: Any, mat: Any, subsampling: Rows) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no Hessian product.")

    def _ggn_mat_prod(self, module: Any, mat: Any, subsampling: Rows) -> Any:
        return self._hessian_mat_prod(module, mat, subsampling)

    def _hessian_factor(self, module: Any, subsampling: Rows) -> tuple[Any, Tensor | None]:
        return self._sqrt_hessian(module, subsampling), None

    def _sqrt_hessian_is_hessian(self, module: Any) -> bool:
        """Return whether ``_sqrt_hessian`` is known to be a factor of the Hessian, without signs.

        Asked where ``_hessian_factor`` is another one that takes longer to find.
        """
        return False

    def _need_convex(self, module: Any, subsampling: Rows) -> None:
        """Raise :func:`not_convex` if the Hessian is not positive semidefinite."""

    # Chosen rows: see Chosen.

    def sees_chosen_rows(self, module: Any) -> bool:
        """Return whether formulas are about the rows of a prediction as they are."""
        return True

    def seen(
        self, call: Call, inputs: Sequence[Any], outputs: Sequence[Tensor]
    ) -> tuple[list[Any], list[Tensor]]:
        """Return inputs and output as they are, with chosen rows along the first axis.

        Raises:
            ValueError: If they are along another one, which a target does not have.
        """
        place = _place_of_chosen(call) if self.sees_chosen_rows(call.module) else None
        if place is None:
            return super().seen(call, inputs, outputs)
        if not place.axis:
            return list(inputs), list(outputs)
        tensors = [x for x in inputs if isinstance(x, Tensor) and x.dim()]
        if any(x.dim() != tensors[0].dim() for x in tensors):
            raise ValueError(
                f"{call!r} reads chosen rows of samples along axis {place.axis}. Move them to the "
                "first axis (x.movedim), that of the target as well."
            )
        by_id = {id(x): x.movedim(place.axis, 0) for x in tensors}
        return [by_id.get(id(x), x) for x in inputs], list(outputs)

    def _chosen(self, module: Any, subsampling: Rows) -> Chosen | None:
        """Return which rows of the loss some of the engine's are; None if they are the same."""
        call = vars(module).get("_backpack_call")
        if call is None or call.is_plain or not self.sees_chosen_rows(module):
            return None
        place = call.place_in(0)
        if place is None or place.owners is None:
            return None
        by_place = {row: own for own, row in enumerate(place.owners.places.tolist())}
        numbers = row_numbers(place.owners.rows, subsampling)
        pairs = [(i, by_place.get(n % place.owners.rows)) for i, n in enumerate(numbers)]
        known = [(i, own) for i, own in pairs if own is not None]
        places = torch.tensor([i for i, _ in known], dtype=torch.long)
        return Chosen([own for _, own in known], places, len(numbers))

    def _spread(self, module: Any, subsampling: Rows, factor: Callable[[Rows], Any]) -> Any:
        """Compute columns (and weights) at the rows that the engine asks for."""
        chosen = self._chosen(module, subsampling)
        if chosen is None:
            return factor(subsampling)
        if not len(module.input0):  # no sample has a row
            return module.input0.new_zeros(1, chosen.total, *module.input0.shape[1:])
        found = factor(chosen.own or [0])  # as many columns, even if none of the samples has a row
        if isinstance(found, Tensor):
            return chosen.spread(found)
        columns, weights = found
        return chosen.spread(columns), None if weights is None else chosen.spread(weights)

    # A loss as a module: its Jacobian is the gradient with respect to the prediction.

    def _gradient(self, module: Any) -> Tensor:
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            x = module.input0 if differentiable else module.input0.detach()
            x = x if x.requires_grad else x.requires_grad_()
            others: list[Any] = []
            while f"input{len(others) + 1}" in vars(module):
                others.append(vars(module)[f"input{len(others) + 1}"])
            with disable():
                loss = self.evaluate(module, {}, x, *others)
            return torch.autograd.grad(loss.sum(), x, create_graph=differentiable)[0]

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        self.check_call(module)
        mat = mat if isinstance(mat, Tensor) else mat[0]
        gradient = subsample(self._gradient(module), subsampling=subsampling)
        return (mat * gradient).flatten(1).sum(1)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        self.check_call(module)
        gradient = subsample(self._gradient(module), subsampling=subsampling)
        return mat.reshape(-1, *(1,) * gradient.dim()) * gradient

    def check_call(self, module: Any) -> None:
        """Refuse a call whose second derivatives are not defined.

        Raises:
            ValueError: If the loss is not reduced to a scalar, or the prediction has no samples.
        """
        if module.output.numel() != 1:
            reduction = getattr(module, "reduction", None)
            raise ValueError(
                f"Second-order quantities need a scalar loss, but the output of {describe(module)} "
                f"has shape {list(module.output.shape)} (reduction={reduction!r}). Use "
                "reduction='mean' or 'sum'."
            )
        if 0 in self.predictions(module) and module.input0.dim() == 0:
            raise ValueError(
                f"{describe(module)}: the prediction needs a batch axis, but is a single number. "
                "Add one, x.unsqueeze(0)."
            )


def _place_of_chosen(call: Call) -> Place | None:
    """Return where the rows of a prediction are, if rows were chosen for it or its target."""
    if not any(layout is not None and layout.owners is not None for layout in call.layouts_in):
        return None
    place = call.place_in(0) or Place()  # else the prediction is data
    return place if place.owners is not None or not place.is_scattered else None


def is_loss(module: Module) -> bool:
    """Return whether a module is a loss: one of torch's, or one with derivatives of a loss."""
    return isinstance(module, _Loss) or isinstance(derivatives_of(module), BaseLossDerivatives)


def is_nll(module: Module) -> bool:
    """Return whether a module is the negative log likelihood of a distribution to draw from."""
    rule = derivatives_of(module)
    return isinstance(rule, BaseLossDerivatives) and rule.has_likelihood(module)


def not_convex(module: Module, why: str) -> ValueError:
    """Return the error for a GGN quantity of a loss that is not convex in the prediction."""
    return ValueError(
        f"{describe(module)} is not convex in the prediction: {why}. The GGN has no square root "
        "then. Use Hessian quantities (DiagHessian, BatchDiagHessian, HMP) instead."
    )


def first_of(columns: Columns) -> Tensor:
    """Return the columns at the (first) prediction."""
    if isinstance(columns, Tensor):
        return columns
    return next(mat for mat in columns if mat is not None)


def is_negative(tensor: Tensor) -> bool:
    """Return whether an entry is negative; no on the meta device, where there are no values."""
    if tensor.is_meta:
        return False
    return tensor.item() < 0 if tensor.numel() == 1 else bool((tensor < 0).any())


def scaled_identity(diagonal: Tensor) -> Tensor:
    """Return the columns of ``diag(diagonal)`` for each sample: ``[N, *d] -> [D, N, *d]``."""
    return (
        torch.diag_embed(diagonal.reshape(len(diagonal), -1))
        .movedim(-1, 0)
        .reshape(-1, *diagonal.shape)
    )


def same_shape(module: Module, shapes: Sequence[torch.Size]) -> None:
    """Refuse targets that broadcast: a sample's Hessian would not be its own.

    Raises:
        ValueError: If the shapes differ.
    """
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"{describe(module)}: prediction and target need one shape, got "
            f"{[list(shape) for shape in shapes]}."
        )

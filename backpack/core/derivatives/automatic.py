"""Derivatives by autograd, for what has no formulas of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter

from backpack.core.derivatives import by_autograd
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.evaluation import Evaluation
from backpack.core.derivatives.facts import never
from backpack.core.derivatives.reductions import slice_size
from backpack.core.derivatives.vectors import first_of, listed
from backpack.core.record.compiler import in_transform
from backpack.core.record.context import Context
from backpack.core.record.generators import evaluated_apart
from backpack.core.record.module_state import describe
from backpack.core.record.registry import register
from backpack.hessianfree.graph import nodes_above


class AutomaticDerivatives(BaseDerivatives):
    """Any function of tensors and parameters that always returns the same, for each sample alone.

    Both is checked.
    """

    includes_children = True
    keeps_facts_alone = True

    def own(self, module: Module) -> Mapping[str, Parameter | None]:
        """Return all parameters, those of children included: the call is one function."""
        has_any = module._parameters or module._modules
        return dict(module.named_parameters()) if has_any else {}

    def param_names(self, module: Module) -> tuple[str, ...]:
        return tuple(self.own(module))

    hessian_is_zero = is_linear_in_params = never  # nothing is known

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        needed = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
        return {"needed": needed}

    def unsupported_reason(self, c: Context) -> str | None:
        saved, module = c.saved, c.module
        if saved.get("evaluated") is not module:  # that of a product may be a copy
            saved["hidden"], saved["repeatable"] = evaluated_again(self._evaluation(c))
            saved["evaluated"] = c.module
        if saved["hidden"]:
            return (
                f"{describe(module)} depends on parameters of shapes "
                f"{[list(p.shape) for p in saved['hidden']]} other than through its arguments and "
                "its own parameters as they are now (a cache, an attribute, another module's "
                "parameter). Compute it in each forward pass, from own parameters and arguments."
            )
        if saved["repeatable"]:
            return None
        if c.call.has_changed_outputs:
            return (
                f"What {describe(module)} has returned was changed in place afterwards (x += y, "
                "x.relu_(), …), so it cannot be seen whether it returns the same when it is "
                "evaluated again. Use the out-of-place form, or extend(model, use_converter=True)."
            )
        return (
            f"{describe(module)} returns something else when it is evaluated again (is it random, "
            "does it change its own state, or has a hook changed what it returned?), so its "
            "derivatives cannot be computed automatically. Use eval(), or register derivatives "
            "(backpack.core.derivatives.register). If it changes its input in place, set its "
            "attribute `inplace = True` before extend() is called."
        )

    def evaluation(self, c: Context) -> Evaluation:
        """Return how to evaluate the call at hand again; an error if that gives something else."""
        reason = self.unsupported_reason(c)
        if reason is not None:
            raise NotImplementedError(reason)
        return self._evaluation(c)

    _evaluation = BaseDerivatives.evaluation

    def vjp(self, c: Context, v: Any) -> Any:
        evaluation, vs = self.evaluation(c), listed(v)
        needed = c.saved["needed"]
        # what has no samples, though the outputs have
        apart = [i for i in needed if evaluation.has_samples and evaluation.axis(i) is None]
        others = [i for i in needed if i not in apart]
        found: dict[Any, Tensor | None] = {}
        if others:
            found |= by_autograd.transposed_products(evaluation, vs, others, c.rows)
        if apart:
            found |= by_autograd.per_sample_products(evaluation, vs, apart)
        if len(evaluation.inputs) == 1:
            return found[0]
        return tuple(found.get(i) for i in range(len(evaluation.inputs)))

    def jvp(self, c: Context, t: Any) -> Any:
        evaluation = self.evaluation(c)
        tangents = dict(enumerate(listed(t)))
        for i, one in tangents.items():
            if one is not None and evaluation.has_samples and evaluation.axis(i) is None:
                tangents[i] = one[:, 0]  # the same for all samples
        results = by_autograd.products(evaluation, tangents, c.rows)
        return results[0] if len(results) == 1 else tuple(results)

    def param_vjp(self, c: Context, name: str, v: Any) -> Tensor:
        """Apply the transposed Jacobian of a parameter for each sample; at once of all, if few."""
        known = {} if c.memo is None else c.memo.get("products", {})
        if name in known:
            return known.pop(name)
        evaluation, vs = self.evaluation(c), listed(v)
        count, names, like = len(evaluation.numbers), [name], first_of(vs)
        if c.memo is not None and "products" not in c.memo:
            entries = len(like) * sum(p.numel() for p in c.call.trained.values())
            if 1 < count <= slice_size(entries, like.device):
                names, c.memo["products"] = [*c.call.trained], known
        found = by_autograd.per_sample_products(evaluation, vs, names)
        for each, product in found.items():
            known[each] = _or_zeros(product, like, count, *evaluation.value(each).shape)
        return known.pop(name)

    def param_vjp_sum(self, c: Context, name: str, v: Any) -> Tensor:
        evaluation, vs = self.evaluation(c), listed(v)
        product = by_autograd.transposed_products(evaluation, vs, [name], c.rows)[name]
        return _or_zeros(product, first_of(vs), *evaluation.value(name).shape)

    def param_jvp(self, c: Context, name: str, t: Tensor) -> Any:
        results = by_autograd.products(self.evaluation(c), {name: t}, c.rows)
        return results[0] if len(results) == 1 else tuple(results)


def _or_zeros(product: Tensor | None, v: Tensor, *shape: int) -> Tensor:
    """Return a product of V vectors, ``[V, *shape]``; zeros for None."""
    return v.new_zeros(len(v), *shape) if product is None else product


def with_gradients(inputs: Sequence[Any], needed: Sequence[int]) -> list[Any]:
    """Let inputs need a gradient that do in the call: derivatives may be a part of the output."""
    if in_transform() is not None:  # vmap does not know of that
        return [*inputs]
    return [
        x.clone().requires_grad_() if i in needed and not x.requires_grad else x
        for i, x in enumerate(inputs)
    ]


def evaluated_again(evaluation: Evaluation) -> tuple[list[Parameter], bool]:
    """Evaluate a call again, apart from the program.

    Returns parameters that outputs depend on other than as arguments or own ones, and whether the
    call gives the same and draws nothing: by chance, a draw may come out as before.
    """
    c = evaluation.c
    with c.call.as_it_was():  # it may have tied some since
        own = {n: c.params[n] for n in evaluation.rule.own(c.evaluated) if n in c.params}
    trained = ((n, p) for n, p in own.items() if p is not None and p.requires_grad)
    values: dict[Any, Tensor] = {n: p.detach() for n, p in trained}  # `evaluate` copies the others
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in evaluation.inputs]
    with torch.enable_grad():
        outputs, is_random = evaluated_apart(lambda: evaluation.outputs(values, inputs))
    leaves = [getattr(node, "variable", None) for node in nodes_above(y.grad_fn for y in outputs)]
    hidden = [leaf for leaf in leaves if isinstance(leaf, Parameter)]
    return hidden, not is_random and evaluation.agree(outputs, c.outputs)


@register(nn.AdaptiveLogSoftmaxWithLoss, nn.CrossMapLRN2d)
class RefusedDerivatives(AutomaticDerivatives):
    """Modules of torch without derivatives, and what to use instead."""

    advice: ClassVar[dict[type[Module], str]] = {
        nn.AdaptiveLogSoftmaxWithLoss: "sends each sample through other layers, depending on its "
        "target. Use its log_prob(input), which passes all of them, and CrossEntropyLoss; extend "
        "its parts head and tail for that, and the model with use_converter='record'.",
        nn.CrossMapLRN2d: "has a backward pass in torch that is not the derivative of its forward "
        "pass. Use LocalResponseNorm.",
    }

    def unsupported_reason(self, c: Context) -> str | None:
        advice = next(text for cls, text in self.advice.items() if isinstance(c.module, cls))
        return f"{describe(c.module)} {advice}"

"""A check of a rule against autograd, for the tests of those who write rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, allclose, einsum, rand_like, randn_like, zeros_like
from torch.nn import Module

from backpack.context import disable
from backpack.core.derivatives import by_autograd, reductions
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.record.context import Context, context_of
from backpack.core.record.registry import derivatives_of
from backpack.core.record.tape import Call, describe, flatten_outputs
from backpack.utils.kroneckers import kfacs_to_mat

# The name of what a rule has, a call of it, and what that should return.
Comparison = tuple[str, Callable[[], Any], Sequence[Tensor]]
RTOL, ATOL = 1e-6, 1e-9


def check_rule(module: Module, *inputs: Any) -> None:
    """Compare the rule that is registered for a module with autograd, in double precision.

    Compared are products with first and second derivatives, what is made of them, and what the rule
    says about the module, for all and for some of the samples. What is called is a copy, whose
    parameters are moved a little: a factor of 1 would hide that it is missing.

    Args:
        module: A module.
        *inputs: Arguments for a call with several samples. Those of floating point vary; of a loss,
            the first is the prediction.

    Raises:
        AssertionError: If something differs: names the method, the shape and the deviation.
        ValueError: If no rule is registered, or there is a single sample.
    """
    rule: Any = derivatives_of(module)
    if rule is None:
        raise ValueError(f"No rule is registered for {describe(module)}.")
    if len(inputs[0]) < 2:
        raise ValueError("check_rule needs several samples.")
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), disable():
        torch.manual_seed(0)
        module = deepcopy(module).double()
        for p in module.parameters():
            p.data.add_(0.1 * randn_like(p))
        leaves = [x.detach().double() if _is_real(x) else x for x in inputs]
        keys, compare = [i for i, x in enumerate(leaves) if _is_real(x)], _of_module
        if isinstance(rule, BaseLossDerivatives):
            keys, compare = keys[:1], _of_loss
        for i in keys:
            leaves[i].requires_grad_()
        outputs = flatten_outputs(module(*leaves))
        call = Call(module, tuple(leaves), {}, outputs, rule, True)
        call.g_out = [randn_like(y) for y in outputs]
        c = context_of(call)
        for rows in [None] if rule.mixes_samples(module) else [None, [len(inputs[0]) - 1, 0]]:
            for method, compute, expected in compare(rule, c.at(rows), keys):
                name = getattr(getattr(rule, method, None), "translates", method)
                which = "all samples" if rows is None else f"samples {rows}"
                _compare(f"{type(rule).__name__}.{name} ({which})", compute, expected)


def _compare(where: str, compute: Callable[[], Any], expected: Sequence[Tensor]) -> None:
    try:
        found = _listed(compute())
    except Exception as error:
        raise AssertionError(f"{where} raises {type(error).__name__}: {error}") from error
    for one, truth in zip(found, expected, strict=True):
        shape = list(one.shape) if isinstance(one, Tensor) else one
        if shape != list(truth.shape):
            raise AssertionError(f"{where} has shape {shape}, expected {list(truth.shape)}")
        if not allclose(one.to(truth), truth, RTOL, ATOL):
            gap, size = (one - truth).abs().max().item(), truth.abs().max().item()
            what = f"entries of up to {size:.3g} deviate by up to {gap:.3g}"
            raise AssertionError(f"{where} has shape {shape}, but {what}")


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _listed(values: Any) -> list[Any]:
    return [values] if isinstance(values, Tensor) or values is None else list(values)


def _random(x: Tensor) -> Tensor:
    """Draw two vectors: ``[2, *]``."""
    return randn_like(x.detach().expand(2, *x.shape), memory_format=torch.contiguous_format)


def _of_module(rule: Any, c: Context, keys: Sequence[int]) -> Iterator[Comparison]:
    truth = rule.evaluation(c)
    numbers, mixes = c.numbers(truth.num_samples), rule.mixes_samples(c.module)
    along = {i: _random(c.select(c.inputs[i], rule.axis_in(c, i))) for i in keys}
    ys = [c.select(y, rule.axis_out(c, i)) for i, y in enumerate(c.outputs)]
    gs = [g if g is None else c.select(g, rule.axis_out(c, i)) for i, g in enumerate(c.grad_out)]
    ts, vs = [along.get(i) for i in range(len(c.inputs))], [_random(y) for y in ys]
    t, v = ts[0] if c.takes_one else ts, vs[0] if len(vs) == 1 else vs

    def at_keys(method: Callable[..., Any], mats: Any) -> list[Any]:
        return [_listed(method(c, mats))[i] for i in keys]

    def second(tangents: dict[Any, Tensor]) -> list[Tensor]:
        found = by_autograd.second_products(truth, gs, tangents, numbers, sum_batch=mixes)
        return [*found.values()]

    if not mixes and not truth.is_independent():
        raise AssertionError(f"{type(rule).__name__}.mixes_samples returns False, but they mix")
    if keys:
        backs = by_autograd.transposed_products(truth, vs, keys, c.rows)
        yield "vjp", partial(at_keys, rule.vjp, v), [_or_zeros(backs[i], ts[i]) for i in keys]
        yield "jvp", partial(rule.jvp, c, t), by_autograd.products(truth, along, c.rows)
        curved = second({**along})
        if not rule.is_curved(c.call):
            yield "hessian_is_zero", lambda: [*map(zeros_like, curved)], curved
        elif rule.hessian_is_diagonal(c.module):
            yield "hessian_diag", lambda: t * rule.hessian_diag(c), curved
        yield "hvp", partial(at_keys, rule.hvp, t), curved
    unknown = sorted(c.call.params.keys() - {*rule.param_names(c.module)})
    if unknown:
        raise AssertionError(f"{type(rule).__name__}.params lacks {unknown}")
    for name, p in c.call.params.items():
        t_p = {name: _random(p)}
        each = by_autograd.per_sample_products(truth, vs, [name], c.rows, numbers)[name]
        each = _or_zeros(each, t_p[name].unsqueeze(1).expand(2, len(numbers), *p.shape))
        yield from _of_parameter(rule, c, name, v, each)
        forward = partial(rule.param_jvp, c, name, t_p[name])
        yield f"{name}_jvp", forward, by_autograd.products(truth, t_p, c.rows)
        (bent,) = second({**t_p})
        if rule.is_linear_in_params(c.module):
            yield "is_linear_in_params", partial(zeros_like, bent), [bent]
        method = f"mixed_hvp of {name!r}"
        yield method, partial(_mixed, rule, c, ts, t_p, mixes), second({**along, **t_p})


def _or_zeros(product: Tensor | None, like: Any) -> Tensor:
    return zeros_like(like) if product is None else product


def _mixed(rule: Any, c: Context, ts: Any, t_p: dict[str, Tensor], sums: bool) -> list[Tensor]:
    at_inputs, at_params = rule.mixed_hvp(c, ts, t_p, sums)
    at_keys = [found for found, t in zip(at_inputs, ts, strict=False) if t is not None]
    return [*at_keys, *at_params.values()]


def _of_parameter(rule: Any, c: Context, name: str, v: Any, each: Tensor) -> Iterator[Comparison]:
    is_own = hasattr(rule, f"{name}_vjp") or type(rule).affine is BaseDerivatives.affine
    method = f"{name}_vjp" if is_own else f"affine of {name!r}"
    yield method, partial(rule.param_vjp, c, name, v), [each]
    yield f"{name}_vjp_sum", partial(rule.param_vjp_sum, c, name, v), [each.sum(1)]
    weights = rand_like(each.flatten(2)[..., 0])
    for wanted in (reductions.NAMES, *({one} for one in sorted(reductions.NAMES))):
        expected = reductions.of_products(each, wanted, weights)
        found = partial(_reduced, rule, c, name, v, expected, weights)
        yield f"reduced of {name!r}", found, [*expected.values()]
    if c.output.dim() == 2 and isinstance(v, Tensor):
        # of one sample at one position, the product of Kronecker factors is the block
        first, at = each[:, 0].flatten(1), c.at(c.numbers(len(c.output))[:1])
        yield f"kron_rows of {name!r}", partial(_block, rule, at, name, v[:, :1]), [first.T @ first]


def _reduced(rule: Any, c: Context, name: str, v: Any, like: Any, weights: Tensor) -> list[Tensor]:
    found = rule.reduced(c, name, v, frozenset(like), weights)
    return [found[key] for key in like]


def _block(rule: Any, c: Context, name: str, v: Tensor) -> Tensor:
    rows, inputs = rule.kron_rows(c, name, v), rule.kron_inputs(c, name)
    gram = reductions.gram(rows.flatten(0, 2), rows.shape[2])
    return kfacs_to_mat([*inputs, gram] if rule.kronecker_input_first else [gram, *inputs])


def _of_loss(rule: Any, c: Context, keys: Sequence[int]) -> Iterator[Comparison]:
    x, t = c.input, _random(c.x)
    (loss,) = rule.evaluation(c).outputs({keys[0]: x}, c.inputs)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    whole = t if c.rows is None else by_autograd.spread(t, 1, c.rows, len(x), c.module)
    g = g + 0 * x  # it may be constant
    each = [torch.autograd.grad(g, x, one, retain_graph=True)[0] for one in whole]
    expected = c.select(torch.stack(each), 1)
    yield "hessian_product", partial(rule.hessian_product, c, t), [expected]
    if rule.couples_samples(c):
        return
    yield "signed_hessian_root", lambda: _squared(t, *rule.signed_hessian_root(c)), [expected]
    try:
        rule.need_convex(c)
    except ValueError:  # there is no root
        return
    yield "hessian_root", lambda: _squared(t, rule.hessian_root(c)), [rule.ggn_product(c, t)]


def _squared(t: Tensor, root: Tensor, weights: Tensor | None = None) -> Tensor:
    s = root.flatten(2)
    scaled = s if weights is None else s * weights.unsqueeze(2)
    return einsum("vnd,vne,kne->knd", scaled, s, t.flatten(2)).reshape(t.shape)

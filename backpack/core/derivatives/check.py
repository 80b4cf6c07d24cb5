"""A check of a rule against autograd, for the tests of those who write rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, allclose, einsum, rand_like, randn_like, zeros_like
from torch.nn import Module

from backpack.context import disable
from backpack.core.derivatives import by_autograd, reductions
from backpack.core.derivatives.automatic import AutomaticDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.by_autograd import is_real
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.record.calls import Call
from backpack.core.record.context import Context, context_of
from backpack.core.record.module_state import describe, placeholder
from backpack.core.record.origins import flatten_outputs
from backpack.core.record.registry import REGISTRY, derivatives_of
from backpack.core.rows import Rows
from backpack.utils.kroneckers import kfacs_to_mat

RTOL, ATOL = 1e-6, 1e-9

STORED_TRANSPOSED = (
    ". Expected is the same with the last two axes exchanged: is the parameter stored transposed, "
    "as [I, O]? Store it as [O, I], or write `assemble`, which returns parts[0].mT"
)
OF_SOME_SAMPLES = (
    ". It is right for all samples and vectors in the usual order in memory: take those at hand, "
    "c.x or c.select(tensor), of tensors of the whole batch such as c.inputs, and give vectors "
    "another shape with reshape, not view"
)

OF_OUTPUT = (
    ". A rule that reads the output (c.y, c.outputs, module.output) beyond its shape has to say "
    "so, or it is not noticed that the output was changed in place, and a result has no derivative "
    "through it: write `needs_output = reads_output = True` in the class"
)


class Comparison(NamedTuple):
    """What a rule computes, and what autograd does.

    Attributes:
        method: Method of the rule that is to blame if they differ.
        compute: Calls the rule.
        expected: What that should return.
        use: What the method is used for in ``compute``, if that is not the method itself.
    """

    method: str
    compute: Callable[[], Any]
    expected: Sequence[Tensor]
    use: str = ""


def check_rule(module: Module, *inputs: Any) -> None:
    """Compare the rule that is registered for a module with autograd, in double precision.

    Compared are products with first and second derivatives, what is made of them, and what the rule
    says about the module, for all and for some of the samples (those with vectors in another order
    in memory). What is called is a copy, whose parameters are moved a little: a factor of 1 would
    hide that it is missing.

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
        why = _why_not_inherited(module)
        raise ValueError(f"No rule is registered for {describe(module)}{why}.")
    if len(inputs[0]) < 2:
        raise ValueError("check_rule needs several samples.")
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), disable():
        torch.manual_seed(0)
        module = deepcopy(module).double()
        for p in module.parameters():
            p.data.add_(0.1 * randn_like(p))
        leaves = [x.detach().double() if is_real(x) else x for x in inputs]
        keys, compare = [i for i, x in enumerate(leaves) if is_real(x)], _of_module
        if isinstance(rule, BaseLossDerivatives):
            keys, compare = keys[:1], _of_loss
        for i in keys:
            leaves[i].requires_grad_()
        called = _called_children(module)
        outputs = flatten_outputs(module(*leaves))
        _check_children(rule, module, called)
        call = Call(module, tuple(leaves), {}, outputs, rule, True)
        call.g_out = [randn_like(y) for y in outputs]
        c = context_of(call)
        for rows in [None] if rule.couples_samples(module) else [None, [len(inputs[0]) - 1, 0]]:
            for method, compute, expected, use in compare(rule, c.at(rows), keys):
                name = getattr(getattr(rule, method, None), "translates", method)
                which = "all samples" if rows is None else f"samples {rows}"
                where = f"{type(rule).__name__}.{name} ({which}){use and f', for {use},'}"
                _compare(where, compute, expected, OF_SOME_SAMPLES if rows else "")


def _why_not_inherited(module: Module) -> str:
    """Say that a base class has a rule, if one has."""
    kind = type(module)
    for base in kind.__mro__[1:]:
        if base in REGISTRY:
            return (
                f": that for {base.__name__} is not inherited, because {kind.__name__} has a "
                f"forward of its own. Write @register({kind.__name__})"
            )
    return ""


def _called_children(module: Module) -> dict[str, None]:
    """Return the names of the children with parameters that a module calls, once it has."""
    called: dict[str, None] = {}

    def note(name: str, *_: Any) -> None:
        called[name] = None

    for name, child in module.named_modules():
        if child is not module and any(True for _ in child.parameters()):
            child.register_forward_pre_hook(partial(note, name))
    return called


def _check_children(rule: Any, module: Module, called: Iterable[str]) -> None:
    """Require that a rule says so if it is about what children of the module compute."""
    if rule.includes_children or isinstance(rule, AutomaticDerivatives):
        return
    own = rule.own(module)
    theirs = {name for name, _ in module.named_parameters()} - own.keys()
    named = sorted(theirs & {*rule.param_names(module)})
    if not (named or called):
        return
    calls = f"the module calls its children {[*called]}"
    what = f"params has {named}" if named else calls
    raise AssertionError(
        f"{type(rule).__name__}.includes_children is False, but {what}. What children of "
        f"{describe(module)} compute belongs to the rule: write `includes_children = True` in the "
        "class, and name their parameters in `params`, as 'child.weight'."
    )


def _compare(
    where: str, compute: Callable[[], Any], expected: Sequence[Tensor], advice: str = ""
) -> None:
    try:
        found = _listed(compute())
    except Exception as error:
        what = f"{where} raises {type(error).__name__}: {error}{advice}"
        raise AssertionError(what) from error
    if len(found) != len(expected):
        what = f"{where} returns {len(found)} tensors, expected {len(expected)}{advice}"
        raise AssertionError(what)
    for one, truth in zip(found, expected, strict=True):
        shape = list(one.shape) if isinstance(one, Tensor) else one
        if shape != list(truth.shape):
            if _is_of_matrix(where, truth) and shape == list(truth.mT.shape):
                advice = STORED_TRANSPOSED
            what = f"{where} has shape {shape}, expected {list(truth.shape)}{advice}"
            raise AssertionError(what)
        if one.isnan().any() and not truth.isnan().any():
            raise AssertionError(f"{where} has entries that are no numbers{OF_OUTPUT}")
        if not allclose(one.to(truth), truth, RTOL, ATOL):
            square = _is_of_matrix(where, truth) and truth.shape == truth.mT.shape
            if square and allclose(one.to(truth).mT, truth, RTOL, ATOL):
                advice = STORED_TRANSPOSED
            gap, size = (one - truth).abs().max().item(), truth.abs().max().item()
            what = f"entries of up to {size:.3g} deviate by up to {gap:.3g}"
            raise AssertionError(f"{where} has shape {shape}, but {what}{advice}")


def _is_of_matrix(where: str, truth: Tensor) -> bool:
    """Whether ``affine`` is compared for each sample, ``[V, N, O, I]``."""
    return ".affine of " in where and truth.dim() == 4


def _listed(values: Any) -> list[Any]:
    return [values] if isinstance(values, Tensor) or values is None else list(values)


def _random(x: Tensor, rows: Rows = None) -> Tensor:
    """Draw two vectors: ``[2, *]``, for some rows with the axes the other way round in memory."""
    like = x.detach().expand(2, *x.shape)
    axes = range(like.dim())[:: 1 if rows is None else -1]
    drawn = randn_like(like.permute(*axes), memory_format=torch.contiguous_format)
    return drawn.permute(*axes)


def _written(rule: Any, *methods: str) -> str:
    """Return which of some methods that call each other is that of the most derived class."""
    classes = type(rule).__mro__

    def depth(method: str) -> int:
        known = (i for i, cls in enumerate(classes) if method in vars(cls))
        return next(known, len(classes))

    return min(methods, key=depth)


def _is_generic(rule: Any, method: str) -> bool:
    """Whether a rule leaves a method to the base class."""
    return getattr(type(rule), method) is getattr(BaseDerivatives, method)


def _of_module(rule: Any, c: Context, keys: Sequence[int]) -> Iterator[Comparison]:
    truth = rule.evaluation(c)
    if not (rule.needs_output or rule.reads_output):
        c = copy(c)
        c.outputs = list(map(placeholder, c.outputs))  # whoever reads them will notice
    numbers, mixes = c.numbers(truth.num_samples), rule.couples_samples(c.module)
    along = {i: _random(c.select(c.inputs[i], rule.axis_in(c, i)), c.rows) for i in keys}
    ys = [c.select(y, rule.axis_out(c, i)) for i, y in enumerate(c.outputs)]
    gs = [g if g is None else c.select(g, rule.axis_out(c, i)) for i, g in enumerate(c.grad_out)]
    ts, vs = [along.get(i) for i in range(len(c.inputs))], [_random(y, c.rows) for y in ys]
    t, v = ts[0] if c.takes_one else ts, vs[0] if len(vs) == 1 else vs

    def second(tangents: dict[Any, Tensor]) -> list[Tensor]:
        found = by_autograd.second_products(truth, gs, tangents, numbers, sum_batch=mixes)
        return [*found.values()]

    if not mixes and not truth.is_independent():
        raise AssertionError(f"{type(rule).__name__}.couples_samples returns False, but they mix")
    if keys:
        backs = by_autograd.transposed_products(truth, vs, keys, c.rows)
        vjp = partial(_at_inputs, rule.vjp, c, v, along)
        yield Comparison(
            _written(rule, "vjp", "df"), vjp, [_or_zeros(backs[i], ts[i]) for i in keys]
        )
        is_own = not _is_generic(rule, "jvp")
        method, use = (_written(rule, "jvp", "df"), "") if is_own else ("vjp", "its transpose jvp")
        forward = by_autograd.products(truth, along, c.rows)
        yield Comparison(method, partial(rule.jvp, c, t), forward, use)
        curved = second({**along})
        if not rule.is_curved(c.call):
            _refuse_curvature(rule, "hessian_is_zero", "input", curved)
        elif rule.hessian_is_diagonal(c.module):
            yield Comparison(
                _written(rule, "hessian_diag", "d2f"), lambda: t * rule.hessian_diag(c), curved
            )
        yield Comparison("hvp", partial(_at_inputs, rule.hvp, c, t, along), curved)
    unknown = sorted(c.call.params.keys() - {*rule.param_names(c.module)})
    if unknown:
        raise AssertionError(f"{type(rule).__name__}.params lacks {unknown}")
    for name, p in c.call.params.items():
        t_p = {name: _random(p)}
        each = by_autograd.per_sample_products(truth, vs, [name], c.rows, numbers)[name]
        each = _or_zeros(each, t_p[name].unsqueeze(1).expand(2, len(numbers), *p.shape))
        along_p = by_autograd.products(truth, t_p, c.rows)
        yield from _of_parameter(rule, c, name, v, each, t_p[name], along_p)
        (bent,) = second({**t_p})
        if not rule.bends_params(c.call):
            _refuse_curvature(rule, "is_linear_in_params", name, [bent])
        method = f"mixed_hvp of {name!r}"
        compute = partial(_mixed, rule, c, ts, t_p, mixes)
        yield Comparison(method, compute, second({**along, **t_p}))


def _or_zeros(product: Tensor | None, like: Any) -> Tensor:
    return zeros_like(like) if product is None else product


def _at_inputs(
    method: Callable[..., Any], c: Context, mats: Any, like: Mapping[int, Tensor]
) -> list[Any]:
    """Call ``vjp`` or ``hvp``, which have an entry for each input (but for options at the end)."""
    found, count = _listed(method(c, mats)), len(c.inputs)
    if not max(like) < len(found) <= count:
        what = f"{len(found)} entries" if len(found) > 1 else "one tensor"
        raise ValueError(
            f"it returned {what}, but the module has {count} inputs. Return a tuple with an entry "
            "for each, None where it is zero"
        )
    return [zeros_like(t) if found[i] is None and count > 1 else found[i] for i, t in like.items()]


def _refuse_curvature(rule: Any, fact: str, of: str, curved: Sequence[Tensor]) -> None:
    """Require that a second derivative is zero where a rule says so."""
    size = max(one.abs().max().item() if one.numel() else 0.0 for one in curved)
    if size > ATOL:
        method = _written(rule, fact, "is_curved") if fact == "hessian_is_zero" else fact
        raise AssertionError(
            f"{type(rule).__name__}.{method} says that the output is an affine function of the "
            f"{of}, at least piecewise, but its second derivative is not zero: products with "
            f"random vectors have entries of up to {size:.3g}. Let `{fact}` return False."
        )


def _mixed(rule: Any, c: Context, ts: Any, t_p: dict[str, Tensor], sums: bool) -> list[Tensor]:
    at_inputs, at_params = rule.mixed_hvp(c, ts, t_p, sums)
    at_keys = [found for found, t in zip(at_inputs, ts, strict=False) if t is not None]
    return [*at_keys, *at_params.values()]


def _of_parameter(
    rule: Any, c: Context, name: str, v: Any, each: Tensor, t: Tensor, along: Sequence[Tensor]
) -> Iterator[Comparison]:
    own = [f"{name}_vjp"] if hasattr(rule, f"{name}_vjp") else ["param_vjp", "affine", "assemble"]
    acts_affinely = rule.acts_affinely and len(own) > 1
    if not acts_affinely and len(own) > 1 and _is_generic(rule, "param_vjp"):
        own = [f"{name}_vjp"]  # there is neither
    basis = _written(rule, *own)
    basis = basis if basis == f"{name}_vjp" else f"{basis} of {name!r}"

    def blamed(method: str, use: str) -> tuple[str, str]:
        """Return the method itself if the rule has one, else what it follows from."""
        if hasattr(rule, f"{name}_{method}"):
            return f"{name}_{method}", ""
        whole = {"vjp_sum": "param_vjp_sum", "jvp": "param_jvp"}.get(method, method)
        return (basis, use) if _is_generic(rule, whole) else (f"{whole} of {name!r}", "")

    yield Comparison(basis, partial(_product, rule, c, name, v, acts_affinely), [each])
    if acts_affinely:
        _check_pairs(rule, c, name, v)
    method, use = blamed("vjp_sum", "the sum over the samples")
    yield Comparison(method, partial(rule.param_vjp_sum, c, name, v), [each.sum(1)], use)
    weights = rand_like(each.flatten(2)[..., 0])
    method, use = blamed("reduced", "squares and norms")
    for wanted in (reductions.NAMES, *({one} for one in sorted(reductions.NAMES))):
        expected = reductions.of_products(each, wanted, weights)
        found = partial(_reduced, rule, c, name, v, expected, weights)
        yield Comparison(method, found, [*expected.values()], use)
    if isinstance(v, Tensor) and _is_used_once(rule, c, name, v, acts_affinely):
        # of one sample at one position, the product of Kronecker factors is the block
        first, at = each[:, 0].flatten(1), c.at(c.numbers(len(c.output))[:1])
        method, use = blamed(_written(rule, "kron_rows", "kron_inputs"), "Kronecker factors")
        compute = partial(_block, rule, at, name, v[:, :1])
        yield Comparison(method, compute, [first.T @ first], use)
    if not _is_generic(rule, "kron_inputs"):
        compute = partial(rule.kron_inputs, c, name)
        alone = [rule.kron_inputs(c.at([n]), name) for n in c.numbers(len(c.output))]
        averages = [sum(same) / len(alone) for same in zip(*alone, strict=True)]
        yield Comparison("kron_inputs", compute, averages, f"{name!r}, the average over samples")
    method, use = blamed("jvp", f"its transpose {name}_jvp")
    yield Comparison(method, partial(rule.param_jvp, c, name, t), along, use)


def _product(rule: Any, c: Context, name: str, v: Any, acts_affinely: bool) -> Tensor:
    pairs = rule.affine(c, name, v) if acts_affinely else None
    if pairs is not None and not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("it returns a list of pairs, [(s, x)], one for each matrix")
    return rule.param_vjp(c, name, v)


def _check_pairs(rule: Any, c: Context, name: str, v: Any) -> None:
    """Require that ``affine`` returns pairs whose inputs do not depend on the cotangents."""
    where = f"{type(rule).__name__}.affine of {name!r}"
    inputs = rule.affine_inputs(c, name)
    for (_, x), known in zip(rule.affine(c, name, v), inputs, strict=True):
        if x is None or known is None:
            continue
        if x.numel() != known.numel() or not allclose(x.flatten(), known.flatten(), RTOL, ATOL):
            raise AssertionError(
                f"{where} returns pairs (s, x) whose x depends on the cotangents v. Let s alone "
                "depend on them: x is what the parameter is multiplied with."
            )


def _is_used_once(rule: Any, c: Context, name: str, v: Tensor, acts_affinely: bool) -> bool:
    """Whether a sample is multiplied with a parameter at one position, for all that is known."""
    if not acts_affinely:
        return c.output.dim() == 2
    return all(s.dim() == 3 or s.shape[2:-1].numel() == 1 for s, _ in rule.affine(c, name, v))


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
    product = _written(rule, "hessian_product", "second")
    yield Comparison(product, partial(rule.hessian_product, c, t), [expected])
    if rule.couples_terms(c):
        return
    root = _written(rule, "signed_hessian_root", "hessian_root", "root")
    yield Comparison(root, lambda: _squared(t, *rule.signed_hessian_root(c)), [expected])
    try:
        rule.need_convex(c)
    except ValueError:  # there is no root
        return
    root, ggn = _written(rule, "hessian_root", "root"), rule.ggn_product(c, t)
    yield Comparison(root, lambda: _squared(t, rule.hessian_root(c)), [ggn])


def _squared(t: Tensor, root: Tensor, weights: Tensor | None = None) -> Tensor:
    s = root.flatten(2)
    scaled = s if weights is None else s * weights.unsqueeze(2)
    return einsum("vnd,vne,kne->knd", scaled, s, t.flatten(2)).reshape(t.shape)

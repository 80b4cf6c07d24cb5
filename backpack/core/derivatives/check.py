"""A check of a rule against autograd, for the tests of those who write rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, allclose, einsum, full_like, rand_like, randn_like, zeros_like
from torch.nn import Module, Parameter

from backpack.context import disable
from backpack.core.derivatives import affine, by_autograd, reductions
from backpack.core.derivatives.automatic import AutomaticDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.evaluation import Evaluation, close, is_real, spread
from backpack.core.derivatives.interface import OF_PARAMETER
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.derivatives.sample_axes import BatchAxis, SampleAxes
from backpack.core.record.calls import Call
from backpack.core.record.context import Context, context_of
from backpack.core.record.module_state import describe, placeholder
from backpack.core.record.origins import flatten_outputs
from backpack.core.record.registry import REGISTRY, derivatives_of
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows
from backpack.core.types import Pairs
from backpack.utils.kroneckers import kfacs_to_mat

RTOL, ATOL = 1e-6, 1e-9
# Of differences of the gradient, where torch has no second derivative.
STEP = 1e-5

STORED_TRANSPOSED = (
    ". Expected is the same with the last two axes exchanged: is the parameter stored transposed, "
    "as [I, O]? Store it as [O, I], or write `assemble`, which returns parts[0].mT"
)
OF_SOME_SAMPLES = (
    ". It is right for all samples and vectors in the usual order in memory: take those at hand, "
    "c.x or c.select(tensor), of tensors of the whole batch such as c.inputs, and give vectors "
    "another shape with reshape, not view"
)

OF_MODULE = (
    ". Parameters are read from c.params: those of c.module may be others by now, and are no "
    "numbers here"
)
OF_OUTPUT = (
    ". A rule that reads the output (c.y, c.outputs, module.output) beyond its shape has to say "
    "so, or it is not noticed that the output was changed in place, and a result has no derivative "
    "through it: write `needs_output = reads_output = True` in the class"
)
OF_GRAPH = (
    ". Results can be differentiated (create_graph=True): compute them with c.x and c.params, "
    "without detach() and no_grad(). A rule that reads entries of the output (c.y, c.outputs) "
    "writes `needs_output = reads_output = True` in the class"
)
FOLDED = (
    ". With BatchAxis.LEADING, a rule is given any number of axes before the last ones: rows of a "
    "sample may have an axis of their own, though the module was called without it. Write `...` in "
    "einsum, and count axes from the end"
)


class Comparison(NamedTuple):
    """What a rule computes, and what autograd does."""

    method: str  # of the rule, to blame if they differ
    compute: Callable[[], Any]  # calls the rule
    expected: Sequence[Tensor]
    use: str = ""  # of the method in `compute`, if that is not the method itself
    advice: str = ""  # what to do if they differ


# What a rule is given, which belongs to others: tensors of the call and vectors, with their states.
Given = list[tuple[Tensor, int]]


def check_rule(module: Module, *inputs: Any) -> None:
    """Compare the rule that is registered for a module with autograd, in double precision.

    Compared are products with first and second derivatives, their derivatives, what is made of
    them, and what the rule says about the module, for all and for some of the samples (those with
    vectors in another order in memory). What is called is a copy, whose parameters are moved a
    little: a factor of 1 would hide that it is missing. Where torch has no second derivative of a
    loss, differences of its gradient stand for it. If all is well, nothing is returned or
    printed.

    Args:
        module: A module.
        *inputs: Positional arguments for a call with several samples. Those of floating point vary;
            of a loss, the first is the prediction.

    Raises:
        AssertionError: If something differs: names the method, the shape and the deviation.
        ValueError: If no rule is registered, there is a single sample, the call fails, or a loss is
            no scalar.
    """
    rule: Any = derivatives_of(module)
    if rule is None:
        why = _why_not_inherited(module)
        raise ValueError(f"No rule is registered for {describe(module)}{why}.")
    count = inputs[0].shape[rule.batch_axis_in(module, 0)]
    if count < 2:
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
        try:
            outputs = flatten_outputs(module(*leaves))
        except Exception as error:  # modules of users raise anything
            shapes = [list(x.shape) if isinstance(x, Tensor) else x for x in inputs]
            raise ValueError(
                f"check_rule calls {describe(module)} in double precision, with inputs {shapes}, "
                f"which has failed: {error}"
            ) from error
        if compare is _of_loss and outputs[0].numel() > 1:
            raise ValueError(
                f"check_rule needs a loss that is a scalar, but that of {describe(module)} has "
                f"shape {list(outputs[0].shape)}. Use reduction='mean' or 'sum'."
            )
        _check_children(rule, module, called)
        _check_names(rule, module)
        call = Visit(Call(module, tuple(leaves), {}, outputs, rule, True))
        call.g_out = [randn_like(y) for y in outputs]
        c, tensors = context_of(call), [x for x in (*leaves, *outputs) if isinstance(x, Tensor)]
        given = [(x, x._version) for x in tensors]
        missing = OF_MODULE if _announces_output(rule) else OF_MODULE + OF_OUTPUT
        _hide_parameters(module)
        for rows in [None] if rule.couples_samples(module) else [None, [count - 1, 0]]:
            for one in compare(rule, c.at(rows), keys, given):
                name = getattr(getattr(rule, one.method, None), "translates", one.method)
                which = "all samples" if rows is None else f"samples {rows}"
                where = f"{type(rule).__name__}.{name} ({which}){one.use and f', for {one.use},'}"
                advice = one.advice or (OF_SOME_SAMPLES if rows else "")
                _compare(where, one, given, advice, missing)


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


def _check_names(rule: Any, module: Module) -> None:
    """Require that parameters by all names of a rule are there, and methods for them in use."""
    kind, names, own = type(rule).__name__, rule.param_names(module), rule.own(module)
    unknown = [name for name in names if name not in own]
    if unknown or len({*names}) < len(names):
        raise AssertionError(
            f"{kind}.params is {names}, but the parameters of {describe(module)} are {[*own]}. "
            "Name each of them once."
        )
    for method in sorted({*dir(type(rule))} - {*dir(BaseDerivatives)}):
        of = OF_PARAMETER.fullmatch(method)
        if of and not method.startswith("_") and of[1] not in names:
            raise AssertionError(
                f"{kind}.{method} is used for nothing: there is no parameter '{of[1]}' in params, "
                f"which is {names}. Give it the name of one, or begin the name of a method that "
                "serves others with an underscore."
            )


def _announces_output(rule: Any) -> bool:
    return bool(rule.needs_output or rule.reads_output)


def _hide_parameters(module: Module) -> None:
    """Let a module have parameters that are no numbers: rules read those of the call."""
    hidden: dict[Parameter, Parameter] = {}  # ties stay
    for child in module.modules():
        for name, p in child._parameters.items():
            if p is not None and p.is_floating_point():
                other = hidden.setdefault(p, Parameter(full_like(p, torch.nan), p.requires_grad))
                child._parameters[name] = other


def _compare(where: str, one: Comparison, given: Given, advice: str, missing: str) -> None:
    expected = one.expected
    try:
        found = _listed(one.compute())
    except Exception as error:
        what = f"{where} raises {type(error).__name__}: {error}{advice}"
        raise AssertionError(what) from error
    if any(x._version != version for x, version in given):
        raise AssertionError(
            f"{where} writes on what it is given. Vectors, inputs and parameters belong to others: "
            "return new tensors."
        )
    if len(found) != len(expected):
        what = f"{where} returns {len(found)} tensors, expected {len(expected)}{advice}"
        raise AssertionError(what)
    for value, truth in zip(found, expected, strict=True):
        shape = list(value.shape) if isinstance(value, Tensor) else value
        if shape != list(truth.shape):
            if _is_of_matrix(where, truth) and shape == list(truth.mT.shape):
                advice = STORED_TRANSPOSED
            what = f"{where} has shape {shape}, expected {list(truth.shape)}{advice}"
            raise AssertionError(what)
        if value.isnan().any() and not truth.isnan().any():
            raise AssertionError(f"{where} has entries that are no numbers{missing}")
        if not allclose(value.to(truth), truth, RTOL, ATOL):
            square = _is_of_matrix(where, truth) and truth.shape == truth.mT.shape
            if square and allclose(value.to(truth).mT, truth, RTOL, ATOL):
                advice = STORED_TRANSPOSED
            gap, size = (value - truth).abs().max().item(), truth.abs().max().item()
            what = f"deviates by up to {gap:.3g}, with entries of up to {size:.3g}, shape {shape}"
            raise AssertionError(f"{where} {what}{advice}")


def _is_of_matrix(where: str, truth: Tensor) -> bool:
    """Whether ``affine`` is compared for each sample, ``[V, N, O, I]``."""
    return ".affine of " in where and truth.dim() == 4


def _listed(values: Any) -> list[Any]:
    return [values] if isinstance(values, Tensor) or values is None else list(values)


def _random(given: Given, x: Tensor, rows: Rows = None) -> Tensor:
    """Draw two vectors: ``[2, *]``, for some rows with the axes the other way round in memory."""
    like = x.detach().expand(2, *x.shape)
    axes = range(like.dim())[:: 1 if rows is None else -1]
    drawn = randn_like(like.permute(*axes), memory_format=torch.contiguous_format)
    vectors = drawn.permute(*axes)
    given.append((vectors, vectors._version))
    return vectors


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


def _of_module(rule: Any, c: Context, keys: Sequence[int], given: Given) -> Iterator[Comparison]:
    truth = rule.evaluation(c)
    if not _announces_output(rule):
        c = copy(c)
        c.outputs = list(map(placeholder, c.outputs))  # whoever reads them will notice
    count, mixes = len(truth.numbers), rule.couples_samples(c.module)
    along = {i: _random(given, c.select(c.inputs[i], rule.axis_in(c, i)), c.rows) for i in keys}
    ys = [c.select(y, rule.axis_out(c, i)) for i, y in enumerate(c.outputs)]
    gs = [g if g is None else c.select(g, rule.axis_out(c, i)) for i, g in enumerate(c.grad_out)]
    ts, vs = [along.get(i) for i in range(len(c.inputs))], [_random(given, y, c.rows) for y in ys]
    t, v = ts[0] if c.takes_one else ts, vs[0] if len(vs) == 1 else vs

    def second(tangents: dict[Any, Tensor]) -> list[Tensor]:
        products = by_autograd.summed_products if mixes else by_autograd.per_sample_products
        return [*products(truth, gs, tangents).values()]

    if not mixes and not truth.is_independent():
        raise AssertionError(f"{type(rule).__name__}.couples_samples returns False, but they mix")
    of = [*(c.inputs[i] for i in keys), *c.call.params.values()]
    folded, one_more = _folded(rule, c, gs), [v.unsqueeze(1) for v in vs]
    v_folded: Any = one_more[0] if len(vs) == 1 else one_more
    if folded is not None:
        _check_axes_are_alike(rule, c, truth)
    if keys:
        backs = by_autograd.transposed_products(truth, vs, keys, c.rows)
        vjp = partial(_at_inputs, rule.vjp, c, v, along)
        method, expected = _written(rule, "vjp", "df"), [_or_zeros(backs[i], ts[i]) for i in keys]
        yield Comparison(method, vjp, expected)
        yield from _of_derivative(method, vjp, expected, of)
        if folded is not None:
            rows = [x.unsqueeze(1) for x in expected]
            like = {i: t.unsqueeze(1) for i, t in along.items()}
            vjp = partial(_at_inputs, rule.vjp, folded, v_folded, like)
            yield Comparison(method, vjp, rows, "rows of a sample that have an axis", FOLDED)
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
        t_p = {name: _random(given, p)}
        each = by_autograd.per_sample_products(truth, vs, [name])[name]
        each = _or_zeros(each, t_p[name].unsqueeze(1).expand(2, count, *p.shape))
        along_p = by_autograd.products(truth, t_p, c.rows)
        yield from _of_parameter(rule, c, name, v, each, t_p[name], along_p, of)
        if folded is not None:
            product = partial(_product, rule, folded, name, v_folded)
            basis, sums = _basis(rule, name)[1], [each.sum(1, keepdim=True)]
            yield Comparison(basis, product, sums, "rows of a sample that have an axis", FOLDED)
        (bent,) = second({**t_p})
        if not rule.bends_params(c.call):
            _refuse_curvature(rule, "is_linear_in_params", f"parameter '{name}'", [bent])
        method = f"mixed_hvp of {name!r}"
        compute = partial(_mixed, rule, c, ts, t_p, mixes)
        yield Comparison(method, compute, second({**along, **t_p}))


def _folded(rule: Any, c: Context, gs: Sequence[Tensor | None]) -> Context | None:
    """Return a call whose rows are those of one sample, along an axis of their own.

    As the engine may show it where axes are alike; None if they are not.
    """
    if rule.batch_axis is not BatchAxis.LEADING or c.rows is not None:
        return None
    refuses_others = type(rule).layouts is not SampleAxes.layouts
    if refuses_others and not rule.folds_rows(c.module):  # such as with channels
        return None
    other = Context(c.call, list(map(_with_axis, c.inputs)), list(map(_with_axis, c.outputs)))
    other.is_folded, other.grad_out = True, list(map(_with_axis, gs))
    return other


def _with_axis(x: Any) -> Any:
    return x.unsqueeze(0) if isinstance(x, Tensor) and x.dim() else x


def _check_axes_are_alike(rule: Any, c: Context, truth: Evaluation) -> None:
    """Require that the first two axes may change places, if there are two before the last ones."""
    tensors = [x for x in (*c.inputs, *c.outputs) if isinstance(x, Tensor)]
    if any(x.dim() - rule.trailing_axes(c.module) < 2 for x in tensors):
        return
    swapped = [x.transpose(0, 1) if isinstance(x, Tensor) else x for x in c.inputs]
    with torch.no_grad():
        found = truth.outputs({}, swapped)
    if not all(close(f, y.transpose(0, 1)) for f, y in zip(found, truth.c.outputs, strict=True)):
        raise AssertionError(
            f"{type(rule).__name__}.batch_axis is LEADING, but the first two axes of the input are "
            "not alike to the module: with them exchanged, those of the output are not. Samples "
            "may be along any of the axes that are alike: leave batch_axis out, or let "
            "`trailing_axes` return how many of the last axes are not."
        )


def _of_derivative(
    method: str, compute: Callable[[], Any], expected: Sequence[Tensor], of: Sequence[Tensor]
) -> Iterator[Comparison]:
    """Compare the derivative of what a method returns, along random vectors, if torch has one."""
    along = list(map(randn_like, expected))

    def derivative(values: Iterable[Any]) -> list[Tensor]:
        terms = [(x * a).sum() for x, a in zip(values, along, strict=True)]
        whole: Any = sum(terms) + sum(0 * p.sum() for p in of)  # which may be constant
        return list(torch.autograd.grad(whole, of, retain_graph=True, materialize_grads=True))

    try:
        exact = derivative(expected)
    except RuntimeError:  # such as a third one of batch_norm
        return
    use = "the derivative of what it returns"
    yield Comparison(method, lambda: derivative(_listed(compute())), exact, use, OF_GRAPH)


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


def _basis(rule: Any, name: str) -> tuple[bool, str]:
    """Return whether products with a parameter follow from ``affine``, and the method they are."""
    own = [f"{name}_vjp"] if hasattr(rule, f"{name}_vjp") else ["param_vjp", "affine", "assemble"]
    acts_affinely = rule.acts_affinely and len(own) > 1
    if not acts_affinely and len(own) > 1 and _is_generic(rule, "param_vjp"):
        own = [f"{name}_vjp"]  # there is neither
    basis = _written(rule, *own)
    return acts_affinely, basis if basis == f"{name}_vjp" else f"{basis} of {name!r}"


def _of_parameter(
    rule: Any,
    c: Context,
    name: str,
    v: Any,
    each: Tensor,
    t: Tensor,
    along: Sequence[Tensor],
    of: Sequence[Tensor],
) -> Iterator[Comparison]:
    acts_affinely, basis = _basis(rule, name)

    def blamed(method: str, use: str) -> tuple[str, str]:
        """Return the method itself if the rule has one, else what it follows from."""
        if hasattr(rule, f"{name}_{method}"):
            return f"{name}_{method}", ""
        whole = {"vjp_sum": "param_vjp_sum", "jvp": "param_jvp"}.get(method, method)
        return (basis, use) if _is_generic(rule, whole) else (f"{whole} of {name!r}", "")

    product = partial(_product, rule, c, name, v)
    yield Comparison(basis, product, [each])
    yield from _of_derivative(basis, product, [each], of)
    pairs = rule.affine(c, name, v) if acts_affinely else None
    if pairs is not None:
        _check_pairs(rule, c, name, pairs)
    method, use = blamed("vjp_sum", "the sum over the samples")
    yield Comparison(method, partial(rule.param_vjp_sum, c, name, v), [each.sum(1)], use)
    entries = each.reshape(*each.shape[:2], -1)
    weights = rand_like(entries[..., 0])
    method, use = blamed("reduced", "squares and norms")
    for wanted in (reductions.NAMES, *({one} for one in sorted(reductions.NAMES))):
        expected = reductions.of_products(each, wanted, weights)
        found = partial(_reduced, rule, c, name, v, expected, weights)
        yield Comparison(method, found, [*expected.values()], use)
    order = f"kronecker_input_first={rule.kronecker_input_first}"
    axis = rule.axis_out(c, 0)
    numbers = c.numbers(c.output.shape[axis])
    is_used_once = c.output.dim() == 2  # for all that is known
    if pairs is not None:
        is_used_once = all(s.dim() == 3 or s.shape[2:-1].numel() == 1 for s, _ in pairs)
    if isinstance(v, Tensor) and is_used_once:
        # of one sample at one position, the product of Kronecker factors is the block
        first, at = entries[:, 0], c.at(numbers[:1])
        use = f"Kronecker factors, {order}"
        method, _ = blamed(_written(rule, "kron_rows", "kron_inputs"), use)
        compute = partial(_block, rule, at, name, v.narrow(1 + axis, 0, 1))
        yield Comparison(method, compute, [first.T @ first], use)
    if not _is_generic(rule, "kron_inputs"):
        compute = partial(rule.kron_inputs, c, name)
        alone = [rule.kron_inputs(c.at([n]), name) for n in numbers]
        averages = [sum(same) / len(alone) for same in zip(*alone, strict=True)]
        yield Comparison("kron_inputs", compute, averages, f"{name!r}, the average over samples")
    has_own = not (_is_generic(rule, "kron_rows") and _is_generic(rule, "kron_inputs"))
    if has_own and pairs is not None and len(pairs) == 1:
        ((s, x),) = pairs
        method = f"{_written(rule, 'kron_rows', 'kron_inputs')} of {name!r}"
        for approximation in (None, "expand", "reduce"):
            use = f"the factors of `affine` with approximation={approximation!r}, {order}"
            compute = partial(_block, rule, c, name, v, approximation)
            block = _block_of_pair(rule, c, name, s, x, approximation)
            yield Comparison(method, compute, [block], use)
    method, use = blamed("jvp", f"its transpose {name}_jvp")
    yield Comparison(method, partial(rule.param_jvp, c, name, t), along, use)


def _product(rule: Any, c: Context, name: str, v: Any) -> Tensor:
    pairs = rule.affine(c, name, v) if _basis(rule, name)[0] else None
    if pairs is not None and not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("it returns a list of pairs, [(s, x)], one for each matrix")
    return rule.param_vjp(c, name, v)


def _check_pairs(rule: Any, c: Context, name: str, pairs: Pairs) -> None:
    """Require that ``affine`` returns pairs whose inputs do not depend on the cotangents."""
    for (_, x), known in zip(pairs, rule.affine_inputs(c, name), strict=True):
        if x is None or known is None:
            continue
        if x.numel() != known.numel() or not allclose(x.flatten(), known.flatten(), RTOL, ATOL):
            raise AssertionError(
                f"{type(rule).__name__}.affine of {name!r} returns pairs (s, x) whose x depends on "
                "the cotangents v. Let s alone depend on them: x is what the parameter is "
                "multiplied with."
            )


def _reduced(rule: Any, c: Context, name: str, v: Any, like: Any, weights: Tensor) -> list[Tensor]:
    found = rule.reduced(c, name, v, frozenset(like), weights)
    return [found[key] for key in like]


def _block(rule: Any, c: Context, name: str, v: Tensor, approximation: str | None = None) -> Tensor:
    """Return the product of Kronecker factors, ``[P, P]``."""
    rows = rule.kron_rows(c, name, v, approximation)
    inputs = rule.kron_inputs(c, name, approximation)
    gram = reductions.gram(rows.flatten(0, 2), rows.shape[2])
    return kfacs_to_mat([*inputs, gram] if rule.kronecker_input_first else [gram, *inputs])


def _block_of_pair(
    rule: Any, c: Context, name: str, s: Tensor, x: Tensor | None, approximation: str | None
) -> Tensor:
    """Return the product of the Kronecker factors of a pair, in the order of the parameter."""
    s = s.unsqueeze(2) if s.dim() == 3 else s.flatten(2, -2)
    rows = affine.position_rows(s, approximation).flatten(0, 1)
    if x is not None:
        x = x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
        x = x.mean(1, keepdim=True) if approximation == "reduce" else x
        count = x.shape[:2].numel() if approximation == "expand" else len(x)
        columns = x.flatten(0, 1) / count**0.5
        rows = (rows[:, None, :, None] * columns[:, None]).flatten(0, 1)
    products = rule.assemble(c, name, [rows]).flatten(1)
    return products.T @ products


def _of_loss(rule: Any, c: Context, keys: Sequence[int], given: Given) -> Iterator[Comparison]:
    x, t, truth = c.input, _random(given, c.x), rule.evaluation(c)
    whole = t if c.rows is None else spread(t, 1, c.rows, len(x), c.module)

    def gradient(at: Tensor) -> Tensor:
        (loss,) = truth.outputs({keys[0]: at}, c.inputs)
        return torch.autograd.grad(loss, at, create_graph=True)[0] + 0 * at  # it may be constant

    g = gradient(x)
    try:
        each = [torch.autograd.grad(g, x, one, retain_graph=True)[0] for one in whole]
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        ends = [[(x + s * one).detach().requires_grad_() for s in (STEP, -STEP)] for one in whole]
        slopes = [[gradient(at).detach() for at in pair] for pair in ends]
        each = [(ahead - behind) / (2 * STEP) for ahead, behind in slopes]
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

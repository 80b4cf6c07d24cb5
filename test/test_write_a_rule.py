"""The rules that the documentation shows, and the check that it recommends for them."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import prod
from typing import Any

import oracle
import pytest
import test_docs
import torch
from torch import Tensor, einsum, nn

from backpack import backpack, extend, extensions
from backpack.core.derivatives import (
    BaseDerivatives,
    BaseLossDerivatives,
    BatchAxis,
    ElementwiseLossDerivatives,
    check_rule,
    register,
)
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.core.derivatives.forms import translations
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.record.alive import live_calls
from backpack.core.record.context import context_of
from backpack.core.record.registry import _CACHE, REGISTRY, derivatives_of
from backpack.core.record.visits import Visit
from backpack.utils.kroneckers import kfacs_to_mat
from backpack.utils.subsampling import subsample

TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}
N, F, C = 5, 4, 3


@pytest.fixture(scope="module")
def page() -> tuple[dict[str, Any], dict[Any, Any]]:
    """Run the page; return its names, and what it registers."""
    registered = dict(REGISTRY)
    found = test_docs.run("write_a_rule.rst")
    of_page = {key: rule for key, rule in REGISTRY.items() if rule is not registered.get(key)}
    _forget(registered)
    return found, of_page


def _forget(registered: dict[Any, Any]) -> None:
    """Leave registered what was so before."""
    REGISTRY.clear()
    REGISTRY.update(registered)
    _CACHE.clear()


@pytest.fixture(autouse=True)
def names(page: tuple[dict[str, Any], dict[Any, Any]]) -> Iterator[dict[str, Any]]:
    """The names of the page, in float64; what it registers, and a test, is forgotten afterwards."""
    found, of_page = page
    registered = dict(REGISTRY)
    REGISTRY.update(of_page)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield found
    torch.set_default_dtype(torch.float32)
    _forget(registered)


class OfTwo(nn.Module):
    """Gives both inputs of a module something to differentiate."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(F, 3), nn.Tanh()), nn.Linear(F, 2)
        self.module = module
        self.last = nn.Sequential(nn.Tanh(), nn.Linear(4, C))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.module(self.first(x), self.second(x)))


def chain(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(F, 3), nn.Tanh(), module, nn.Flatten(), nn.Linear(prod(shape[:-1]) * 3, C)
    )


# name of the module on the page, its arguments, the axes of a sample
EXAMPLES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "low rank": ("LowRank", (3, 3, 2), (F,)),
    "low rank at positions": ("LowRank", (3, 3, 2), (2, F)),
    "low rank on a grid": ("LowRank", (3, 3, 2), (2, 2, F)),
    "gate": ("Gate", (3,), (F,)),
    "gate at positions": ("Gate", (3,), (2, F)),
    "two inputs": ("TwoInputs", (3, 2, 4), (F,)),
    "norm": ("RMSNorm", (3,), (F,)),
    "norm at positions": ("RMSNorm", (3,), (2, F)),
}
each_example = pytest.mark.parametrize("example", EXAMPLES)


def build(names: dict[str, Any], example: str) -> tuple[nn.Module, Tensor, Tensor]:
    name, arguments, shape = EXAMPLES[example]
    torch.manual_seed(1)
    module = names[name](*arguments)
    assert type(derivatives_of(module)).__module__ == "page"
    model = OfTwo(module) if name == "TwoInputs" else chain(module, shape)
    for p in model.parameters():  # gains of 1 would hide a missing factor
        p.data.add_(0.3 * torch.randn_like(p))
    return model, torch.randn(N, *shape), torch.randint(C, (N,))


def run(model: nn.Module, X: Tensor, y: Tensor, *exts: Any) -> list[Any]:
    loss = extend(nn.CrossEntropyLoss())(extend(model)(X), y)
    with backpack(*exts):
        loss.backward()
    return list(model.parameters())


def block(p: Any, field: str) -> Tensor:
    units = torch.eye(p.numel()).reshape(-1, *p.shape)
    return getattr(p, field)(units).flatten(1)


TENSORS: dict[Callable[..., Any], Callable[..., list[Tensor]]] = {
    extensions.BatchGrad: oracle.batch_grad,
    extensions.BatchL2Grad: oracle.batch_l2,
    extensions.SumGradSquared: oracle.sum_grad_squared,
    extensions.Variance: oracle.variance,
    extensions.DiagGGNExact: oracle.ggn_diag,
    extensions.BatchDiagGGNExact: oracle.batch_ggn_diag,
    extensions.DiagHessian: oracle.hessian_diag,
    extensions.BatchDiagHessian: oracle.batch_hessian_diag,
}


@each_example
def test_every_quantity_is_right(names: dict[str, Any], example: str) -> None:
    model, X, y = build(names, example)
    reference = copy.deepcopy(model)
    products = [extensions.GGNMP(), extensions.HMP(), extensions.PCHMP()]
    factors = [extensions.KFLR(), extensions.KFAC(mc_samples=2), extensions.SqrtGGNExact()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = run(model, X, y, *(ext() for ext in TENSORS), *products, *factors)
    arguments = reference, nn.CrossEntropyLoss(), X, y
    for ext, truth in TENSORS.items():
        for p, expected in zip(params, truth(*arguments), strict=True):
            torch.testing.assert_close(getattr(p, ext().savefield), expected, **TOLERANCE)
    ggn, hessian = oracle.ggn_blocks(*arguments), oracle.hessian_blocks(*arguments)
    for p, of_ggn, of_hessian in zip(params, ggn, hessian, strict=True):
        torch.testing.assert_close(block(p, "ggnmp"), of_ggn, **TOLERANCE)
        torch.testing.assert_close(block(p, "hmp"), of_hessian, **TOLERANCE)
        root = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)
        torch.testing.assert_close(root.T @ root, of_ggn, **TOLERANCE)
        for field in ("kflr", "kfac"):
            assert kfacs_to_mat(getattr(p, field)).isfinite().all()
        if len(p.kflr) == 1 and p.dim() > 1:  # the block, not its factors
            torch.testing.assert_close(p.kflr[0], of_ggn, **TOLERANCE)
    if isinstance(model, nn.Sequential):
        for p, expected in zip(params, oracle.pch_blocks(*arguments, modify="clip"), strict=True):
            torch.testing.assert_close(block(p, "pchmp"), expected, **TOLERANCE)


@each_example
def test_as_without_a_rule(names: dict[str, Any], example: str) -> None:
    """What is differentiated automatically gives the same."""
    model, X, y = build(names, example)
    plain = copy.deepcopy(model)
    exts = [*(ext() for ext in TENSORS), extensions.GGNMP(), extensions.HMP(), extensions.PCHMP()]
    params = run(model, X, y, *exts)
    del REGISTRY[names[EXAMPLES[example][0]]]
    _CACHE.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is
        others = run(plain, X, y, *exts)
    for p, other in zip(params, others, strict=True):
        for ext in TENSORS:
            field = ext().savefield
            torch.testing.assert_close(getattr(p, field), getattr(other, field), **TOLERANCE)
        for field in ("ggnmp", "hmp", "pchmp"):
            torch.testing.assert_close(block(p, field), block(other, field), **TOLERANCE)


@each_example
def test_subsampling(names: dict[str, Any], example: str) -> None:
    """Rules know which samples there are."""
    model, X, y = build(names, example)
    rows = [3, 0]
    exts = [extensions.BatchGrad, extensions.BatchDiagGGNExact, extensions.SqrtGGNExact]
    whole = [[getattr(p, ext().savefield).clone() for p in run(model, X, y, ext())] for ext in exts]
    for ext, expected in zip(exts, whole, strict=True):
        for p, value in zip(run(model, X, y, ext(subsampling=rows)), expected, strict=True):
            axis = 1 if ext is extensions.SqrtGGNExact else 0
            found = getattr(p, ext().savefield)
            torch.testing.assert_close(found, value.index_select(axis, torch.tensor(rows)))


@pytest.mark.parametrize(
    "example, parameter, count",
    [("low rank", "U", 2), ("low rank", "V", 2), ("gate", "weight", 2), ("norm", "weight", 1)],
)
def test_kronecker_factors_of_one_sample(
    names: dict[str, Any], example: str, parameter: str, count: int
) -> None:
    """Their product is the block, if one sample is multiplied with a parameter once."""
    model, X, y = build(names, example)
    expected = oracle.ggn_blocks(copy.deepcopy(model), nn.CrossEntropyLoss(), X[:1], y[:1])
    params = dict(zip(model.parameters(), expected, strict=True))
    run(model, X[:1], y[:1], extensions.KFLR())
    p = model[2].get_parameter(parameter)  # type: ignore[operator, index]
    assert len(p.kflr) == count
    torch.testing.assert_close(kfacs_to_mat(p.kflr), params[p], **TOLERANCE)


@each_example
def test_averaged_matrix(names: dict[str, Any], example: str) -> None:
    """KFRA of a single sample propagates its GGN."""
    model, X, y = build(names, example)
    if not isinstance(model, nn.Sequential):
        pytest.skip("KFRA's oracle is for chains")
    reference = copy.deepcopy(model)
    run(model, X[:1], y[:1], extensions.KFRA())
    expected = oracle.kfra(reference, nn.CrossEntropyLoss(), X[:1], y[:1])
    for i, p in enumerate(model.parameters()):
        assert all(factor.isfinite().all() for factor in p.kfra)
        if p is model[0].weight or p is model[4].weight:
            for mine, factor in zip(p.kfra, expected[i], strict=True):
                torch.testing.assert_close(mine, factor, **TOLERANCE)


# ------------------------------------------------------------------ the check

CALLS: dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "LowRank": ((F, 3, 2), ((N, 2, F),)),
    "Gate": ((F,), ((N, 2, F),)),
    "TwoInputs": ((3, 2, 4), ((N, 3), (N, 2))),
    "RMSNorm": ((F,), ((N, 2, F),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_right_rule_passes(names: dict[str, Any], name: str) -> None:
    arguments, shapes = CALLS[name]
    check_rule(names[name](*arguments), *map(torch.randn, shapes))
    check_rule(names[name](*arguments).float(), *(torch.randn(s).float() for s in shapes))


def half(self: Any, c: Any, v: Tensor) -> Tensor:
    return v @ c.params["U"]


def without_gain(self: Any, c: Any, v: Tensor) -> Tensor:
    x, s = self.normalized(c)
    return (v - x * (v * x).mean(-1, keepdim=True)) / s


def all_rows(self: Any, c: Any, v: Tensor) -> Tensor:
    each = v * self.normalized(c.at(None))[0]
    return each.reshape(*v.shape[:2], -1, v.shape[-1]).sum(2)


def first_rows(self: Any, c: Any, v: Tensor) -> Any:
    x, z = (x[: v.shape[1]] for x in c.inputs)
    weight = c.params["weight"]
    return einsum("vno,oij,nj->vni", v, weight, z), einsum("vno,oij,ni->vnj", v, weight, x)


def each_position(self: Any, c: Any, v: Tensor) -> Tensor:
    return v * self.normalized(c)[0]


def last_position(self: Any, c: Any, v: Tensor) -> Tensor:
    return (v * self.normalized(c)[0])[:, :, -1]


def right_pairs(self: Any, c: Any, name: str, v: Tensor) -> Any:
    return type(self).__base__.affine(self, c, name, v)


def other_factor(self: Any, c: Any, name: str, v: Tensor) -> Any:
    return right_pairs(self, c, name, 2 * v if name == "V" else v)


def bare_pair(self: Any, c: Any, name: str, v: Tensor) -> Any:
    (pair,) = right_pairs(self, c, name, v)
    return pair


def transposed(self: Any, c: Any, name: str, parts: Any) -> Tensor:
    return parts[0].mT if name == "V" else parts[0]


def viewed(self: Any, c: Any, v: Tensor) -> Tensor:
    back = v.view(-1, v.shape[-1]) @ c.params["U"] @ c.params["V"]
    return back.reshape(*v.shape[:-1], -1)


def inputs_of_a_sum(self: Any, c: Any, name: str, approximation: Any = None) -> list[Tensor]:
    if name == "b":
        return []
    ((_, x),) = self.affine(c, name, c.y.unsqueeze(0))
    x = x.flatten(0, -2)
    return [x.T @ x]


def doubled(self: Any, c: Any, t: Any) -> Any:
    return 2 * t


def of_first(self: Any, c: Any, t: Any) -> Any:
    return type(self).__base__.vjp(self, c, t)[0]


def and_one_more(self: Any, c: Any, v: Tensor) -> Any:
    return *type(self).__base__.vjp(self, c, v), None


def of_numbers(self: Any, c: Any, v: Tensor) -> Tensor:
    return type(self).__base__.vjp(self, c, v.detach())


def of_cotangents(self: Any, c: Any, name: str, v: Tensor) -> Any:
    ((s, x),) = right_pairs(self, c, name, v)
    return [(s, None if x is None else x * v.any())]


def of_many_samples(self: Any, c: Any, name: str, v: Tensor) -> Any:
    ((s, x),) = right_pairs(self, c, name, v)
    return [(s if v.shape[1] > 1 else 2 * s, x)]


def nothing_reduced(self: Any, *arguments: Any) -> dict[str, Tensor]:
    return {}


def doubled_rows(self: Any, *arguments: Any) -> Tensor:
    return 2 * BaseDerivatives.kron_rows(self, *arguments)


def means_of_inputs(self: Any, c: Any, name: str, approximation: Any = None) -> list[Tensor]:
    return BaseDerivatives.kron_inputs(self, c, name, "expand")


def other_expand(self: Any, c: Any, name: str, approximation: Any = None) -> list[Tensor]:
    factors = BaseDerivatives.kron_inputs(self, c, name, approximation)
    return [2 * f for f in factors] if approximation == "expand" else factors


def pairs_of_rows(self: Any, c: Any, name: str, v: Tensor) -> Any:
    if name == "U":
        return [(v, einsum("ni,ri->nr", c.x, c.params["V"]))]
    return right_pairs(self, c, name, v)


def of_constants(self: Any, c: Any, v: Tensor) -> Tensor:
    return type(self).__base__.vjp(self, c.reading(c.input.detach()), v)


def of_output(self: Any, c: Any, name: str, v: Tensor) -> Any:
    return [(v * c.y / c.params["weight"], None)]


def written(self: Any, c: Any, t: Tensor) -> Any:
    return BaseDerivatives.hvp(self, c, t.mul_(2)) / 2


def written_input(self: Any, c: Any, v: Tensor) -> Tensor:
    back: Tensor = type(self).__base__.vjp(self, c, v)
    c.inputs[0].detach().mul_(1)
    return back


def yes(self: Any, module: Any) -> bool:
    return True


def no(self: Any, module: Any) -> bool:
    return False


WRONG: dict[str, Any] = {
    "transposed": (
        "LowRank",
        {"vjp": half},
        r"vjp .*\[2, 5, 2, 2\]",
    ),
    "factor of a pair": ("LowRank", {"affine": other_factor}, "affine of 'V' .*deviate"),
    "a part transposed": (
        "LowRank",
        {"assemble": transposed},
        r"assemble of .V.*\[2, 5, 4, 2\], expected \[2, 5, 2, 4\]",
    ),
    "no list": ("LowRank", {"affine": bare_pair}, "affine of 'V' .*a list of pairs, .*s, x"),
    "a view": ("LowRank", {"vjp": viewed}, r"vjp .samples \[4, 0\].*with reshape, not view"),
    "no average": (
        "LowRank",
        {"kron_inputs": inputs_of_a_sum},
        "kron_inputs .*the average over samples, .*deviate",
        (N, F),
    ),
    "missing gain": ("RMSNorm", {"vjp": without_gain}, "vjp .*all samples.*deviate"),
    "forgotten rows": (
        "RMSNorm",
        {"weight_vjp": all_rows},
        r"weight_vjp .*\[4, 0\]. raises .*right for all samples.*c\.select",
    ),
    "first rows": ("TwoInputs", {"vjp": first_rows}, r"vjp .samples \[4, 0\].*deviate"),
    "one gradient": (
        "TwoInputs",
        {"vjp": of_first},
        "vjp .*it returned one tensor, but the module has 2 inputs. Return a tuple",
    ),
    "too many gradients": (
        "TwoInputs",
        {"vjp": and_one_more},
        "vjp .*it returned 3 entries, but the module has 2 inputs",
    ),
    "x of cotangents": (
        "LowRank",
        {"affine": of_cotangents},
        "affine of 'V' returns pairs .* depends on the cotangents",
    ),
    "own sum": ("RMSNorm", {"weight_vjp_sum": each_position}, "weight_vjp_sum"),
    "own squares": ("LowRank", {"reduced": nothing_reduced}, "reduced of 'V' .*raises"),
    "own rows": ("LowRank", {"kron_rows": doubled_rows}, "kron_rows of 'V' .*deviate", (N, F)),
    "rows of pairs": (
        "LowRank",
        {"affine": of_many_samples},
        r"affine of 'V' \(all samples\), for Kronecker factors,.*deviate",
        (N, F),
    ),
    "no transpose": (
        "RMSNorm",
        {"vjp": of_numbers},
        r"vjp \(all samples\), for its transpose jvp,.*deviate",
    ),
    "forgotten sum": ("RMSNorm", {"weight_vjp": each_position}, r"weight_vjp.*\[2, 5, 2, 4\]"),
    "one position": ("RMSNorm", {"weight_vjp": last_position}, "weight_vjp.*deviate"),
    "no return": ("RMSNorm", {"weight_vjp": lambda self, c, v: None}, "weight_vjp.*None"),
    "own jvp": ("Gate", {"jvp": doubled}, r"jvp .*deviate"),
    "own weight_jvp": (
        "Gate",
        {"weight_jvp": doubled},
        r"weight_jvp .*expected \[2, 5, 2, 4\]",
    ),
    "own product": ("RMSNorm", {"hvp": doubled}, "hvp .*deviate"),
    "own diagonal": ("Gate", {"hessian_is_diagonal": yes}, "hessian_diag .*raises"),
    "claims to be linear": (
        "RMSNorm",
        {"hessian_is_zero": yes},
        "hessian_is_zero says .* function of the input.*Let `hessian_is_zero` return False",
    ),
    "claims to be linear in a call": (
        "RMSNorm",
        {"is_curved": no},
        "is_curved says .* function of the input.*Let `hessian_is_zero` return False",
    ),
    "claims to be linear in W": (
        "Gate",
        {"is_linear_in_params": yes},
        "is_linear_in_params says .* of the parameter 'weight'.*Let `is_linear_in_params` return",
    ),
    "rows at positions": (
        "LowRank",
        {"kron_rows": doubled_rows},
        "kron_rows of 'V' .*the factors of `affine` with approximation=None.*deviate",
    ),
    "factors of inputs at positions": (
        "LowRank",
        {"kron_inputs": means_of_inputs},
        "kron_inputs of 'V' .*the factors of `affine` with approximation=None.*deviate",
    ),
    "one approximation": (
        "LowRank",
        {"kron_inputs": other_expand},
        "kron_inputs of 'V' .*the factors of `affine` with approximation='expand'.*deviate",
    ),
    "rows with an axis": (
        "LowRank",
        {"affine": pairs_of_rows},
        r"affine of 'U' .*rows of a sample that have an axis.*einsum",
        (N, F),
    ),
    "constants": (
        "RMSNorm",
        {"vjp": of_constants},
        r"vjp .*the derivative of what it returns.*deviate.*without detach",
    ),
    "output without a graph": (
        "RMSNorm",
        {"affine": of_output, "reads_output": True},
        r"affine of 'weight' .*the derivative of .*`needs_output = reads_output = True`",
    ),
    "parameters of the module": (
        "LowRank",
        {"vjp": lambda self, c, v: v @ c.module.U @ c.module.V},
        "vjp .*no numbers. Parameters are read from c.params",
    ),
    "written vectors": ("RMSNorm", {"hvp": written}, "hvp .*writes on what it is given"),
    "written input": ("RMSNorm", {"vjp": written_input}, "vjp .*writes on what it is given"),
    "unknown parameter": ("LowRank", {"params": ("U",)}, "params lacks .'V'"),
    "parameter that is none": (
        "LowRank",
        {"params": ("U", "V", "b", "W")},
        r"params is .*, but the parameters of LowRank are \['V', 'U', 'b'\]",
    ),
    "parameter named twice": ("LowRank", {"params": ("U", "V", "b", "b")}, "params is .* once"),
    "misspelt method": (
        "RMSNorm",
        {"wieght_vjp": doubled},
        "wieght_vjp is used for nothing: there is no parameter 'wieght' in params",
    ),
    "no vjp": ("LowRank", {"vjp": BaseDerivatives.vjp}, "vjp .*raises .*needs a method 'vjp'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_rule_is_found_by_name(names: dict[str, Any], case: str) -> None:
    name, methods, message, *shape = WRONG[case]
    module = names[name]
    register(module)(type("Wrong", (type(REGISTRY[module]),), methods))
    arguments, shapes = CALLS[name]
    shapes = (*shape,) or shapes
    with pytest.raises(AssertionError, match=rf"Wrong\.{message}"):
        check_rule(module(*arguments), *map(torch.randn, shapes))


class MeanFree(nn.Module):
    """Subtracts the mean over the second axis."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class MeanFreeDerivatives(BaseDerivatives):
    """Is right if the samples come first."""

    def vjp(self, c: Any, v: Tensor) -> Tensor:
        return v - v.mean(2, keepdim=True)


@pytest.mark.parametrize("axis", BatchAxis)
def test_axes_that_are_not_alike_are_found(axis: BatchAxis) -> None:
    register(MeanFree)(type("Rule", (MeanFreeDerivatives,), {"batch_axis": axis}))
    alike = axis is BatchAxis.LEADING
    message = r"Rule\.batch_axis is LEADING, but the first two axes .* are not alike"
    with pytest.raises(AssertionError, match=message) if alike else nullcontext():
        check_rule(MeanFree(), torch.randn(N, 2, F))


def test_samples_along_the_features_of_a_rule_are_an_error(names: dict[str, Any]) -> None:
    """As of a built-in layer: ``BatchAxis.LEADING`` is about all axes but the last."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.low = nn.Linear(F, 3), names["LowRank"](N, N, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.low(self.first(x).mT).mT

    model = extend(Mixer(), use_converter=True)
    loss = extend(nn.CrossEntropyLoss())(model(torch.rand(N, F)), torch.zeros(N, dtype=int))
    mixes = pytest.raises(ValueError, match=r"LowRank.* mixes the samples")
    with mixes, backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()


def test_one_name_in_the_place_of_names_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Rule\.params is a str.*'weight',"):
        register(nn.Linear)(type("Rule", (BaseDerivatives,), {"params": ("weight")}))


class StoredTransposed(nn.Module):
    """y = x W with W ``[I, O]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@register(StoredTransposed)
class StoredTransposedDerivatives(BaseDerivatives):
    params = ("weight",)

    def vjp(self, c: Any, v: Any) -> Any:
        return v @ c.params["weight"].T

    def affine(self, c: Any, name: str, v: Any) -> Any:
        return [(v, c.x)]


@pytest.mark.parametrize("outputs", [3, 4])
def test_a_parameter_that_is_stored_transposed(outputs: int) -> None:
    with pytest.raises(AssertionError, match=r"affine of 'weight' .*transposed.*write `assemble`"):
        check_rule(StoredTransposed(4, outputs), torch.randn(5, 4))


class OfInputFirst(StoredTransposed):
    """With factors of its own."""


@register(OfInputFirst)
class OfInputFirstDerivatives(StoredTransposedDerivatives):
    def assemble(self, c: Any, name: str, parts: Any) -> Any:
        return parts[0].mT

    def kron_rows(self, c: Any, name: str, v: Any, *approximation: Any) -> Any:
        return v.unsqueeze(2)

    def kron_inputs(self, c: Any, name: str, *approximation: Any) -> Any:
        return [c.x.T @ c.x / len(c.x)]


def test_factors_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message did not name what says the order."""
    message = r"kron_rows.*kronecker_input_first=False.*deviate"
    with pytest.raises(AssertionError, match=message):
        check_rule(OfInputFirst(4, 3), torch.randn(5, 4))
    monkeypatch.setattr(OfInputFirstDerivatives, "kronecker_input_first", True)
    check_rule(OfInputFirst(4, 3), torch.randn(5, 4))


class ByNumber(nn.Module):
    """y = g x, with a number g."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


@register(ByNumber)
class ByNumberDerivatives(BaseDerivatives):
    params = ("gain",)

    def vjp(self, c: Any, v: Any) -> Any:
        return v * c.params["gain"]

    def affine(self, c: Any, name: str, v: Any) -> Any:
        return [((v * c.x).sum(-1, keepdim=True), None)]

    def assemble(self, c: Any, name: str, parts: Any) -> Any:
        return parts[0].squeeze(-1)


def test_a_parameter_without_axes() -> None:
    """It was an IndexError of torch."""
    check_rule(ByNumber(), torch.randn(5, 4))
    check_rule(ByNumber(), torch.randn(5, 2, 4))


class Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


class OtherTanh(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


class Quartic(nn.Module):
    """A loss."""

    reduction = "mean"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y).pow(4).mean()


@pytest.mark.parametrize("factor, message", [(1, None), (2, r"Rule\.d2f .*deviate")])
def test_check_of_an_activation(factor: int, message: str | None) -> None:
    class Rule(ElementwiseDerivatives):
        def df(self, c: Any) -> Tensor:
            return 3 * c.x.square()

        def d2f(self, c: Any) -> Tensor:
            return factor * 6 * c.x

    register(Cubed)(Rule)
    with nullcontext() if message is None else pytest.raises(AssertionError, match=message):
        check_rule(Cubed(), torch.randn(N, 2, F))


@pytest.mark.parametrize("factor, message", [(1, None), (2, r"Rule\.second .*deviate")])
def test_check_of_a_loss(factor: int, message: str | None) -> None:
    class Rule(ElementwiseLossDerivatives):
        def second(self, c: Any) -> Tensor:
            return factor * 12 * (c.x - c.select(c.inputs[1])).square()

    register(Quartic)(Rule)
    with nullcontext() if message is None else pytest.raises(AssertionError, match=message):
        check_rule(Quartic(), torch.randn(N, F), torch.randn(N, F))


@pytest.mark.parametrize("wrong", [False, True])
def test_check_of_a_rule_in_the_form_of_earlier_versions(wrong: bool) -> None:
    class Rule(BaseDerivatives):
        def hessian_is_zero(self, module: Any) -> bool:
            return False

        def _jac_t_mat_prod(
            self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any
        ) -> Tensor:
            x = module.input0 if wrong else subsample(module.input0, subsampling=subsampling)
            return mat[:, : len(x)] * 3 * x[: mat.shape[1]].square()

    register(Cubed)(Rule)
    expected = pytest.raises(AssertionError, match=r"Rule\._jac_t_mat_prod .samples \[4, 0\]")
    with expected if wrong else nullcontext():
        check_rule(Cubed(), torch.randn(N, F))


def test_what_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match=r"No rule is registered for .*Cubed"):
        check_rule(Cubed(), torch.randn(N, F))
    with pytest.raises(ValueError, match=r"for Tanh is not inherited.*@register\(OtherTanh\)"):
        check_rule(OtherTanh(), torch.randn(N, F))
    with pytest.raises(ValueError, match="several samples"):
        check_rule(nn.Tanh(), torch.randn(1, F))


def test_the_check_leaves_the_module_alone() -> None:
    module = extend(nn.Linear(F, 2))
    before = copy.deepcopy(module.state_dict())
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    check_rule(module, torch.randn(N, F, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.rand(1), drawn)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


QUERIES = (torch.randn(3, 2, 4),) * 3
BUILT_IN: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "Linear": (nn.Linear(F, 3), (torch.randn(N, 2, F),)),
    "Conv2d": (nn.Conv2d(2, 4, 2, groups=2), (torch.randn(N, 2, 3, 3),)),
    "BatchNorm1d": (nn.BatchNorm1d(F), (torch.randn(N, F),)),
    "Bilinear": (nn.Bilinear(3, 2, 4), (torch.randn(N, 3), torch.randn(N, 2))),
    "Embedding": (nn.Embedding(5, 3), (torch.tensor([[1, 2], [2, 0], [4, 4]]),)),
    "GRU": (nn.GRU(3, 2, batch_first=True), (torch.randn(N, 3, 3),)),
    "MultiheadAttention": (
        nn.MultiheadAttention(4, 2, batch_first=True),
        (torch.randn(3, 2, 4),) * 3,
    ),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), (torch.randn(3, C), torch.tensor([0, 2, 1]))),
    "NLLLoss": (nn.NLLLoss(), (torch.randn(3, C), torch.tensor([0, 2, 1]))),
    "PReLU": (nn.PReLU(), (torch.randn(N, 2, 3),)),
    "PReLU of channels": (nn.PReLU(2), (torch.randn(N, 2, 3),)),
    "PReLU of features": (nn.PReLU(F), (torch.randn(N, F),)),
    # torch has no second derivative
    "MultiMarginLoss": (nn.MultiMarginLoss(p=1), (torch.randn(3, C), torch.tensor([0, 2, 1]))),
    "MultiMarginLoss of squares": (
        nn.MultiMarginLoss(p=2, weight=torch.rand(C)),
        (torch.randn(3, C), torch.tensor([0, 2, 1])),
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_rules_pass(name: str) -> None:
    module, inputs = BUILT_IN[name]
    check_rule(module, *inputs)


def test_wrong_rules_of_losses_without_a_second_derivative_are_found() -> None:
    """Differences of the gradient stand for it."""
    kind: Any = type(REGISTRY[nn.MultiMarginLoss])
    doubled = {"hessian_product": lambda self, c, t: 2 * kind.hessian_product(self, c, t)}
    register(nn.MultiMarginLoss)(type("Wrong", (kind,), doubled))
    module, inputs = BUILT_IN["MultiMarginLoss of squares"]
    with pytest.raises(AssertionError, match=r"Wrong\.hessian_product .*deviates"):
        check_rule(module, *inputs)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_mixed_samples_are_noticed() -> None:
    class Rule(BaseDerivatives):
        def vjp(self, c: Any, v: Tensor) -> Tensor:
            return v - v.mean(1, keepdim=True)

    register(Centred)(Rule)
    with pytest.raises(AssertionError, match=r"Rule\.couples_samples"):
        check_rule(Centred(), torch.randn(N, F))
    register(Centred)(type("Mixing", (Rule,), {"couples_samples": yes}))
    check_rule(Centred(), torch.randn(N, F))


def test_what_a_class_says_of_samples_after_its_definition() -> None:
    class Rule(BaseDerivatives):
        def vjp(self, c: Any, v: Tensor) -> Tensor:
            return v - v.mean(1, keepdim=True)

    register(Centred)(Rule)
    type.__setattr__(Rule, "couples_samples", yes)
    model = extend(nn.Sequential(nn.Linear(F, F), Centred()))
    loss = extend(nn.MSELoss())(model(torch.randn(N, F)), torch.randn(N, F))
    with pytest.warns(UserWarning, match="mixes the samples"), backpack(extensions.BatchGrad()):
        loss.backward()


class Family(nn.Module):
    """A module that calls a child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(F, F, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x).sin()


class FamilyDerivatives(BaseDerivatives):
    """Describes what the child computes, too."""

    def inner(self, c: Any, v: Tensor) -> Tensor:
        return v * (c.x @ c.params["child.weight"].T).cos()

    def vjp(self, c: Any, v: Tensor) -> Tensor:
        return self.inner(c, v) @ c.params["child.weight"]

    def affine(self, c: Any, name: str, v: Tensor) -> Any:
        return [(self.inner(c, v), c.x)]


@pytest.mark.parametrize("params", [(), ("child.weight",)])
def test_children_that_a_rule_does_not_include(params: tuple[str, ...]) -> None:
    Rule: Any = type("Rule", (FamilyDerivatives,), {"params": params})
    register(Family)(Rule)
    what = r"params has \['child.weight'\]" if params else r"the module calls .*\['child'\]"
    message = rf"Rule\.includes_children is False, but {what}.*includes_children = True"
    with pytest.raises(AssertionError, match=message):
        check_rule(Family(), torch.randn(N, F))
    if not params:
        model = nn.Sequential(nn.Linear(F, F), Family(), nn.Linear(F, C))
        message = r"is a part of '1' \(Family\).*includes_children = True` in Rule"
        with pytest.raises(ValueError, match=message):
            run(model, torch.randn(N, F), torch.randint(C, (N,)), extensions.DiagGGNExact())
    else:
        Rule.includes_children = True
        check_rule(Family(), torch.randn(N, F))


class MeanOfLinear(nn.Module):
    """Multiplies a weight with several parts of a sample: its factors approximate the block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, F))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T).mean(1)


def test_factors_of_several_positions_are_no_block() -> None:
    class Rule(BaseDerivatives):
        params = ("weight",)

        def each(self, c: Any, v: Tensor) -> Tensor:
            count = c.x.shape[1]
            return v.unsqueeze(2).expand(-1, -1, count, -1) / count

        def vjp(self, c: Any, v: Tensor) -> Tensor:
            return self.each(c, v) @ c.params["weight"]

        def affine(self, c: Any, name: str, v: Tensor) -> Any:
            return [(self.each(c, v), c.x)]

    register(MeanOfLinear)(Rule)
    check_rule(MeanOfLinear(), torch.randn(N, 3, F))


# ------------------------------------------------------------------ what a rule does not say

FACTS = ("hessian_is_zero", "is_linear_in_params")
SECOND = (extensions.DiagHessian, extensions.BatchDiagHessian)


@each_example
def test_facts_that_a_rule_forgets_are_found(names: dict[str, Any], example: str) -> None:
    model, X, y = build(names, example)
    module = names[EXAMPLES[example][0]]
    known = vars(type(REGISTRY[module]))
    methods = {name: value for name, value in known.items() if name not in FACTS}
    register(module)(type("Forgetful", (BaseDerivatives,), methods))
    arguments = copy.deepcopy(model), nn.CrossEntropyLoss(), X, y
    params = run(model, X, y, *(ext() for ext in SECOND), extensions.HMP())
    for ext in SECOND:
        for p, expected in zip(params, TENSORS[ext](*arguments), strict=True):
            torch.testing.assert_close(getattr(p, ext().savefield), expected, **TOLERANCE)
    for p, expected in zip(params, oracle.hessian_blocks(*arguments), strict=True):
        torch.testing.assert_close(block(p, "hmp"), expected, **TOLERANCE)
    sizes, shapes = CALLS[EXAMPLES[example][0]]
    check_rule(module(*sizes), *map(torch.randn, shapes))


class Squares(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


def test_facts_of_a_rule_that_others_derive_from_are_found() -> None:
    """A linear layer is linear, but with another Jacobian nothing is known of a subclass."""

    class Rule(LinearDerivatives):
        def vjp(self, c: Any, v: Tensor) -> Tensor:
            return super().vjp(c, self.inner(c, v))

        def affine(self, c: Any, name: str, v: Any) -> Any:
            return super().affine(c, name, self.inner(c, v))

        jvp, squares_with_input = BaseDerivatives.jvp, False
        affine_jvp, affine_inputs = BaseDerivatives.affine_jvp, LinearDerivatives.affine_inputs

        def inner(self, c: Any, v: Tensor) -> Tensor:
            return 2 * v * (c.x @ c.params["weight"].T + c.params["bias"])

    register(Squares)(Rule)
    check_rule(Squares(3, 3), torch.randn(N, 3))
    model = nn.Sequential(nn.Linear(F, 3), nn.Tanh(), Squares(3, 3), nn.Linear(3, C))
    X, y = torch.randn(N, F), torch.randint(C, (N,))
    arguments = copy.deepcopy(model), nn.CrossEntropyLoss(), X, y
    params = run(model, X, y, extensions.DiagHessian())
    for p, expected in zip(params, oracle.hessian_diag(*arguments), strict=True):
        torch.testing.assert_close(p.diag_h, expected, **TOLERANCE)


class Once(torch.autograd.Function):
    """A square that autograd differentiates once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class SquareOnce(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(x)


def test_a_fact_that_cannot_be_found() -> None:
    class Rule(BaseDerivatives):
        def vjp(self, c: Any, v: Tensor) -> Tensor:
            return 2 * c.x * v

    register(SquareOnce)(Rule)
    model = nn.Sequential(nn.Linear(F, 3), SquareOnce(), nn.Linear(3, C))
    batch = torch.randn(N, F), torch.randint(C, (N,))
    run(model, *batch, extensions.DiagGGNExact())
    with pytest.raises(NotImplementedError, match="Rule needs a method 'hessian_is_zero'"):
        run(model, *batch, extensions.DiagHessian())


def test_built_in_rules_say_what_is_affine() -> None:
    """Nothing is tried where it is known."""
    rules = {type(rule) for rule in REGISTRY.values()}
    rules = {rule for rule in rules if rule.__module__.startswith("backpack.")}
    assert len(rules) > 50
    for rule in rules:
        known = rule.tells_curvature or rule.is_curved is not BaseDerivatives.is_curved
        assert known, rule
        assert rule.tells_linearity or not rule.params, rule


# ------------------------------------------------------------------ the page


def test_rules_are_short() -> None:
    rules = [
        code.partition("\n\n\n")[0]
        for code in test_docs.blocks("write_a_rule.rst")
        if code.startswith("@register")
    ]
    assert len(rules) == 4
    for rule in rules:
        assert len([line for line in rule.splitlines() if line.strip()]) <= 15


def test_names_on_the_page_exist() -> None:
    page = (test_docs.DOCS / "write_a_rule.rst").read_text(encoding="utf-8")
    layer = extend(nn.Linear(3, 2))
    output = layer(torch.rand(4, 3))
    seen = {*dir(context_of(Visit(*live_calls(layer))))}
    assert output.requires_grad  # keeps the call alive
    assert {*re.findall(r"``c\.(\w+)", page)} <= seen
    named = {*re.findall(r"^   \* - (?:loss: )?``(\w+)\(", page, re.MULTILINE)}
    assert len(named) > 8
    assert all(hasattr(BaseLossDerivatives, name) for name in named)
    renamed = re.findall(r"^``(_\S+)`` +``(\S+)``", page, re.MULTILINE)
    assert len(renamed) == 9
    for before, now in renamed:
        name = before.replace("<name>", "gain")
        translated = [method for method, _ in translations(name, lambda module: None)]
        assert now.replace("<name>", "gain") in translated


class SquareRoot(nn.Module):
    """Has a derivative that is a formula of its output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp().sqrt()


@pytest.mark.parametrize("says_so", [True, False])
def test_rules_that_read_the_output_have_to_say_so(says_so: bool) -> None:
    class Rule(BaseDerivatives):
        needs_output = reads_output = says_so

        def vjp(self, c: Any, v: Tensor) -> Tensor:
            return v * c.y / 2

        def hessian_is_zero(self, module: nn.Module) -> bool:
            return False

    register(SquareRoot)(Rule)
    expected = pytest.raises(AssertionError, match="needs_output = reads_output = True")
    with nullcontext() if says_so else expected:
        check_rule(SquareRoot(), torch.randn(4, 3))

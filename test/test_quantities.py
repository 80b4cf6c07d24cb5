"""Every case × every extension against plain autograd in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from cases import CASES, Case, Problem, select, truth
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.core.derivatives import BaseDerivatives, register
from backpack.core.engine.backpropagation import slice_bytes
from backpack.utils.kroneckers import kfacs_to_mat

PER_SAMPLE = [case for case in CASES if "mixing" not in case.tags]
# where the mechanism is the engine's rather than the module's: all networks, every third module
FEWER = [c for i, c in enumerate(CASES) if "network" in c.tags or "mixing" in c.tags or i % 3 == 0]
SEQUENTIAL = [
    c for c in PER_SAMPLE if not c.tags & {"nonsequential", "tied", "rows", "branch", "sequence"}
]

TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}


def run(problem: Problem, *exts: Any, scale: float = 1.0, seed: int = 1, **options: Any) -> list:
    """Run a backward pass; return the trainable parameters."""
    model, lossfunc = extend(problem.model), extend(problem.loss)
    torch.manual_seed(seed)
    loss = lossfunc(model(problem.X), problem.y)
    with backpack(*exts, **options):
        (loss if scale == 1 else scale * loss).backward()
    return oracle.trainable(problem.model)


def check(params: list, field: str, expected: list) -> None:
    assert len(params) == len(expected) > 0
    for i, (p, value) in enumerate(zip(params, expected, strict=True)):
        torch.testing.assert_close(
            getattr(p, field), value, **TOLERANCE, msg=lambda m, i=i: f"{field} of {i}: {m}"
        )


FIRST_ORDER = {
    "grad_batch": oracle.batch_grad,
    "batch_l2": oracle.batch_l2,
    "sum_grad_squared": oracle.sum_grad_squared,
    "variance": oracle.variance,
}


@pytest.mark.parametrize("case", PER_SAMPLE, ids=str)
def test_first_order(case: Case) -> None:
    exts = [
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.SumGradSquared(),
        extensions.Variance(),
    ]
    together = run(case.build(), *exts)
    for ext in exts:
        alone = run(case.build(), ext)
        expected = truth(FIRST_ORDER[ext.savefield], case)
        check(together, ext.savefield, expected)
        check(alone, ext.savefield, expected)


@pytest.mark.parametrize("case", PER_SAMPLE, ids=str)
def test_exact_ggn(case: Case) -> None:
    exts = [
        extensions.DiagGGNExact(),
        extensions.BatchDiagGGNExact(),
        extensions.SqrtGGNExact(),
    ]
    blocks = truth(oracle.ggn_blocks, case)
    expected = {
        "diag_ggn_exact": truth(oracle.ggn_diag, case),
        "diag_ggn_exact_batch": truth(oracle.batch_ggn_diag, case),
    }
    together = run(case.build(), *exts)
    for ext in exts:
        for params in (together, run(case.build(), ext)):
            if ext.savefield in expected:
                check(params, ext.savefield, expected[ext.savefield])
            else:
                for p, block in zip(params, blocks, strict=True):
                    root = p.sqrt_ggn_exact.reshape(-1, p.numel())
                    torch.testing.assert_close(root.T @ root, block, **TOLERANCE)


@pytest.mark.parametrize("case", PER_SAMPLE, ids=str)
def test_kflr(case: Case) -> None:
    params = run(case.build(), extensions.KFLR())
    for p, factors in zip(params, truth(oracle.kflr, case), strict=True):
        assert len(p.kflr) == len(factors)
        for mine, factor in zip(p.kflr, factors, strict=True):
            torch.testing.assert_close(mine, factor, **TOLERANCE)
        assert kfacs_to_mat(p.kflr).shape == (p.numel(), p.numel())


# every way in which factors come about
WITH_FACTORS = [c for i, c in enumerate(FEWER) if c.tags & {"tied", "embedding"} or i % 5 == 0]


@pytest.mark.parametrize("approximation", [None, "expand"])
@pytest.mark.parametrize("case", WITH_FACTORS, ids=str)
def test_diagonals_of_large_kronecker_factors(case: Case, approximation: Any) -> None:
    """They are those of the whole factors, alone and beside an extension that wants those."""

    def kflr(most: int | None) -> Any:
        return extensions.KFLR(approximation=approximation, max_factor_size=most)

    whole = [p.kflr for p in run(case.build(), kflr(None))]
    beside = kflr(2)
    beside.savefield = "beside"
    for most, exts, field in (
        (2, (kflr(2),), "kflr"),
        (0, (kflr(0),), "kflr"),
        (2, (kflr(None), beside), "beside"),
    ):
        for p, factors in zip(run(case.build(), *exts), whole, strict=True):
            found = getattr(p, field)
            assert [f.dim() for f in found] == [2 if len(f) <= most else 1 for f in factors]
            expected = [f if len(f) <= most else f.diagonal() for f in factors]
            torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("case", SEQUENTIAL, ids=str)
def test_kfra(case: Case) -> None:
    params = run(case.build(), extensions.KFRA())
    for p, factors in zip(params, truth(oracle.kfra, case), strict=True):
        assert len(p.kfra) == len(factors)
        for mine, factor in zip(p.kfra, factors, strict=True):
            torch.testing.assert_close(mine, factor, **TOLERANCE)


@pytest.mark.parametrize("case", select("rows"), ids=str)
def test_kfra_of_a_loss_of_rows(case: Case) -> None:
    """Its matrix would be that of rows: the error names the loss, and how many rows it has."""
    with pytest.raises(ValueError, match=r"keep the batch axis: .*3 rows; 'loss' \(.*\d rows"):
        run(case.build(), extensions.KFRA())


@pytest.mark.parametrize("case", PER_SAMPLE, ids=str)
def test_diag_hessian(case: Case) -> None:
    exts = [extensions.DiagHessian(), extensions.BatchDiagHessian()]
    expected = {
        "diag_h": truth(oracle.hessian_diag, case),
        "diag_h_batch": truth(oracle.batch_hessian_diag, case),
    }
    together = run(case.build(), *exts)
    for ext in exts:
        check(together, ext.savefield, expected[ext.savefield])
        check(run(case.build(), ext), ext.savefield, expected[ext.savefield])


def products(params: list, field: str) -> list[Tensor]:
    """Apply the product functions to unit vectors: the blocks [P, P]."""
    blocks = []
    for p in params:
        units = torch.eye(p.numel(), dtype=p.dtype)
        product = getattr(p, field)(units.reshape(-1, *p.shape))
        assert product.shape == (p.numel(), *p.shape)
        blocks.append(product.reshape(p.numel(), p.numel()))
    return blocks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_curvature_products(case: Case) -> None:
    params = run(case.build(), extensions.GGNMP(), extensions.HMP())
    ggn = oracle.joint_ggn_blocks if "mixing" in case.tags else oracle.ggn_blocks
    for field, function in {"ggnmp": ggn, "hmp": oracle.hessian_blocks}.items():
        for mine, block in zip(products(params, field), truth(function, case), strict=True):
            torch.testing.assert_close(mine, block, **TOLERANCE)


@pytest.mark.parametrize("modify", ["clip", "abs"])
@pytest.mark.parametrize("case", SEQUENTIAL, ids=str)
def test_positive_curvature_products(case: Case, modify: str) -> None:
    params = run(case.build(), extensions.PCHMP(modify=modify))
    expected = truth(oracle.pch_blocks, case, modify=modify)
    for mine, block in zip(products(params, "pchmp"), expected, strict=True):
        torch.testing.assert_close(mine, block, **TOLERANCE)


def test_products_with_no_vectors() -> None:
    model, loss_function = extend(nn.Conv1d(2, 3, 2)), extend(nn.MSELoss())
    output = model(torch.rand(4, 2, 5))
    fields = ["ggnmp", "hmp", "pchmp"]
    with backpack(extensions.GGNMP(), extensions.HMP(), extensions.PCHMP(), extensions.EKFAC()):
        loss_function(output, torch.zeros_like(output)).backward()
    for p in model.parameters():
        none = torch.zeros(0, *p.shape)
        for product in [*(getattr(p, field) for field in fields), p.ekfac.product]:
            assert product(none).shape == none.shape


class Gain(nn.Module):
    """A parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 4] -> [N, 3]."""
        return self.layer(x) * self.gain


@pytest.mark.parametrize(("modify", "share"), [("clip", 0.5), ("abs", 1.0)])
def test_positive_curvature_of_a_factor_without_axes(modify: str, share: float) -> None:
    """That of g·h·s at (h, s) has eigenvalues ±|g|, and half of either belongs to s."""
    model, X = Gain().double(), torch.randn(5, 4, dtype=torch.float64)
    output = extend(model, use_converter=True)(X)
    loss = extend(nn.MSELoss(reduction="sum"))(output, torch.zeros(5, 3, dtype=torch.float64))
    with backpack(extensions.PCHMP(modify=modify)):
        loss.backward()
    p, gradients = model.gain, 2 * output.detach()
    expected = 2 * (output.detach() / p).square().sum() + share * gradients.norm(dim=1).sum()
    torch.testing.assert_close(p.pchmp(torch.ones_like(p)), expected.detach(), **TOLERANCE)


@pytest.mark.parametrize("case", select("mixing"), ids=str)
def test_networks_that_mix_samples(case: Case) -> None:
    params = run(
        case.build(),
        extensions.DiagGGNExact(),
        extensions.BatchDiagGGNExact(),
        extensions.SqrtGGNExact(),
        extensions.DiagHessian(),
    )
    check(params, "diag_ggn_exact", truth(oracle.joint_ggn_diag, case))
    check(params, "diag_h", truth(oracle.hessian_diag, case))
    for p, block in zip(params, truth(oracle.joint_ggn_blocks, case), strict=True):
        root = p.sqrt_ggn_exact.reshape(-1, p.numel())
        torch.testing.assert_close(root.T @ root, block, **TOLERANCE)
        torch.testing.assert_close(
            p.diag_ggn_exact_batch, p.sqrt_ggn_exact.square().sum(0), **TOLERANCE
        )


@pytest.mark.parametrize("case", FEWER, ids=str)
def test_monte_carlo_quantities_share_their_samples(case: Case) -> None:
    exts = [
        extensions.DiagGGNMC(mc_samples=3),
        extensions.BatchDiagGGNMC(mc_samples=3),
        extensions.SqrtGGNMC(mc_samples=3),
        extensions.KFAC(mc_samples=3),
    ]
    together = run(case.build(), *exts)
    for p in together:
        squares = p.sqrt_ggn_mc.square()
        torch.testing.assert_close(p.diag_ggn_mc, squares.sum((0, 1)), **TOLERANCE)
        torch.testing.assert_close(p.diag_ggn_mc_batch, squares.sum(0), **TOLERANCE)
        if len(p.kfac) == 1:
            root = p.sqrt_ggn_mc.reshape(-1, p.numel())
            torch.testing.assert_close(p.kfac[0], root.T @ root, **TOLERANCE)
    for ext in exts:
        for p, q in zip(together, run(case.build(), ext), strict=True):
            torch.testing.assert_close(getattr(q, ext.savefield), getattr(p, ext.savefield))


@pytest.mark.parametrize("case", FEWER, ids=str)
def test_slices_change_nothing(case: Case) -> None:
    exts = [
        extensions.DiagGGNExact(),
        extensions.BatchDiagGGNExact(),
        extensions.SqrtGGNExact(),
        extensions.DiagGGNMC(mc_samples=2),
        extensions.KFLR(),
    ]
    if "mixing" not in case.tags:
        exts += [extensions.DiagHessian(), extensions.BatchDiagHessian()]
    whole = run(case.build(), *exts)
    for limit in (1, 2**10):
        with slice_bytes(limit):
            sliced = run(case.build(), *exts)
        for p, q in zip(whole, sliced, strict=True):
            for ext in exts:
                torch.testing.assert_close(
                    getattr(q, ext.savefield), getattr(p, ext.savefield), **TOLERANCE
                )


SUBSAMPLING = [2, 0]


@pytest.mark.parametrize("case", [c for c in FEWER if not c.tags & {"rows", "mixing"}], ids=str)
def test_subsampling_slices(case: Case) -> None:
    per_sample = [
        extensions.BatchGrad,
        extensions.BatchL2Grad,
        extensions.BatchDiagGGNExact,
        extensions.BatchDiagHessian,
        extensions.SqrtGGNExact,
        extensions.SqrtGGNMC,
    ]
    whole = run(case.build(), *(ext() for ext in per_sample))
    part = run(case.build(), *(ext(subsampling=SUBSAMPLING) for ext in per_sample))
    for p, q in zip(whole, part, strict=True):
        for ext in per_sample:
            field = ext().savefield
            axis = 1 if "sqrt" in field else 0
            expected = getattr(p, field).index_select(axis, torch.tensor(SUBSAMPLING))
            torch.testing.assert_close(getattr(q, field), expected, **TOLERANCE)


@pytest.mark.parametrize("case", [c for c in FEWER if not c.tags & {"rows", "mixing"}], ids=str)
def test_subsampling_sums(case: Case) -> None:
    exts = [
        extensions.SumGradSquared,
        extensions.Variance,
        extensions.DiagGGNExact,
        extensions.DiagGGNMC,
        extensions.DiagHessian,
        extensions.KFLR,
        extensions.KFRA,
        extensions.HMP,
    ]
    reference = [extensions.BatchGrad(), extensions.BatchDiagHessian(), extensions.SqrtGGNExact()]
    if case not in SEQUENTIAL:
        exts.remove(extensions.KFRA)
    whole = run(case.build(), *reference)
    part = run(case.build(), *(ext(subsampling=SUBSAMPLING) for ext in exts))
    for p, q in zip(whole, part, strict=True):
        grads = p.grad_batch[SUBSAMPLING]
        diag_h = p.diag_h_batch[SUBSAMPLING].sum(0)
        root = p.sqrt_ggn_exact[:, SUBSAMPLING]
        torch.testing.assert_close(q.sum_grad_squared, grads.square().sum(0), **TOLERANCE)
        torch.testing.assert_close(q.variance, grads.var(0, unbiased=False), **TOLERANCE)
        torch.testing.assert_close(q.diag_ggn_exact, root.square().sum((0, 1)), **TOLERANCE)
        torch.testing.assert_close(q.diag_h, diag_h, **TOLERANCE)
        if p.numel() < 200:
            units = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
            diagonal = q.hmp(units).reshape(p.numel(), p.numel()).diagonal().reshape(p.shape)
            torch.testing.assert_close(diagonal, diag_h, **TOLERANCE)
        if len(q.kflr) == 1:
            flat = root.reshape(-1, p.numel())
            torch.testing.assert_close(q.kflr[0], flat.T @ flat, **TOLERANCE)


@pytest.mark.parametrize("case", select("network", without="mixing"), ids=str)
def test_scaled_loss_scales_curvature(case: Case) -> None:
    exts = [
        extensions.DiagGGNExact(),
        extensions.KFLR(),
        extensions.DiagHessian(),
        extensions.GGNMP(),
        extensions.HMP(),
        extensions.DiagGGNMC(),
    ]
    if case in SEQUENTIAL:
        exts.append(extensions.KFRA())
    plain = run(case.build(), *exts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled = run(case.build(), *exts, scale=3.0)
    for p, q in zip(plain, scaled, strict=True):
        for field in ("diag_ggn_exact", "diag_h", "diag_ggn_mc"):
            torch.testing.assert_close(getattr(q, field), 3 * getattr(p, field), **TOLERANCE)
        for ext in exts:
            if ext.savefield in ("kflr", "kfra"):
                one, other = getattr(p, ext.savefield), getattr(q, ext.savefield)
                changed = [f for f, g in zip(other, one, strict=True) if not f.equal(g)]
                assert len(changed) == 1  # that of the output, not that of the input
                torch.testing.assert_close(kfacs_to_mat(other), 3 * kfacs_to_mat(one), **TOLERANCE)
        vector = torch.rand(2, *p.shape, dtype=p.dtype)
        torch.testing.assert_close(q.ggnmp(vector), 3 * p.ggnmp(vector), **TOLERANCE)
        torch.testing.assert_close(q.hmp(vector), 3 * p.hmp(vector), **TOLERANCE)


@pytest.mark.parametrize("case", select("network", without="mixing random"), ids=str)
def test_sum_of_losses_sums_curvature(case: Case) -> None:
    exts = [extensions.DiagGGNExact(), extensions.DiagHessian(), extensions.HMP()]
    problem = case.build()
    model, lossfunc = extend(problem.model), extend(problem.loss)
    other = extend(copy.deepcopy(problem.loss))
    f = model(problem.X)
    with backpack(*exts), warnings.catch_warnings():
        warnings.simplefilter("error")
        (lossfunc(f, problem.y) + 2 * other(f, problem.y)).backward()
    single = run(case.build(), *exts)
    for p, q in zip(single, oracle.trainable(model), strict=True):
        torch.testing.assert_close(q.diag_ggn_exact, 3 * p.diag_ggn_exact, **TOLERANCE)
        torch.testing.assert_close(q.diag_h, 3 * p.diag_h, **TOLERANCE)
        vector = torch.rand(2, *p.shape, dtype=p.dtype)
        torch.testing.assert_close(q.hmp(vector), 3 * p.hmp(vector), **TOLERANCE)


class OfTwoLosses(nn.Module):
    """A table whose rows are embeddings, and the weight of a layer that another loss reads."""

    def __init__(self, entries: int, decodes_data: bool) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(entries, 3), nn.Linear(3, entries, bias=False)
        self.decoder.weight = self.embedding.weight
        self.head, self.decodes_data = nn.Linear(3, 2), decodes_data

    def forward(self, tokens: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embedding(tokens)
        return self.head(h), self.decoder(data if self.decodes_data else h)


@pytest.mark.parametrize("entries", [3, 5])
@pytest.mark.parametrize("decodes_data", [False, True])
@pytest.mark.parametrize("decoder_first", [False, True])
@pytest.mark.parametrize("ext", [extensions.KFLR(), extensions.KFAC(mc_samples=100_000)], ids=str)
def test_factors_of_a_parameter_that_losses_use_differently(
    entries: int, decodes_data: bool, decoder_first: bool, ext: Any
) -> None:
    """What one loss knows factors of, and another one no, has its block of both."""
    torch.manual_seed(0)
    model = extend(OfTwoLosses(entries, decodes_data).double())
    one, other = extend(nn.CrossEntropyLoss()), extend(nn.CrossEntropyLoss())
    tokens, y, data = torch.tensor([0, 2, 1, 2]), torch.tensor([0, 1, 1, 0]), torch.rand(4, 3)
    with backpack(ext, extensions.SqrtGGNExact()):
        outputs = model(tokens, data.double())
        losses = one(outputs[0], y), other(outputs[1], y)
        sum(losses[::-1] if decoder_first else losses).backward()  # type: ignore[union-attr]
    table = model.embedding.weight
    factor = table.sqrt_ggn_exact.flatten(2).flatten(0, 1)
    sampled = {"rtol": 0.1, "atol": 5e-3} if ext.savefield == "kfac" else TOLERANCE
    expected = [factor.T @ factor]
    torch.testing.assert_close(getattr(table, ext.savefield), expected, **sampled)
    assert [len(f) for f in getattr(model.head.weight, ext.savefield)] == [2, 3]


@pytest.mark.parametrize("entries", [3, 5])
@pytest.mark.parametrize("decodes_data", [False, True])
def test_factors_of_different_axes_do_not_accumulate(entries: int, decodes_data: bool) -> None:
    """Each loss has a backward pass of its own; what the first has left stays."""
    torch.manual_seed(0)
    model = extend(OfTwoLosses(entries, decodes_data).double())
    one, other = extend(nn.CrossEntropyLoss()), extend(nn.CrossEntropyLoss())
    tokens, y, data = torch.tensor([0, 2, 1, 2]), torch.tensor([0, 1, 1, 0]), torch.rand(4, 3)
    outputs = model(tokens, data.double())
    with backpack(extensions.KFLR(), accumulate=True):
        one(outputs[0], y).backward(retain_graph=True)
    before = [f.clone() for f in model.embedding.weight.kflr]
    of = "outputs, inputs" if decodes_data else "its whole block"
    refusal = pytest.raises(ValueError, match=rf"\[{entries}, 3\].*inputs, outputs in one.*{of} in")
    with refusal, backpack(extensions.KFLR(), accumulate=True):
        other(outputs[1], y).backward()
    torch.testing.assert_close(model.embedding.weight.kflr, before, rtol=0, atol=0)


def test_negative_scale() -> None:
    case = select("network")[0]
    plain = run(case.build(), extensions.DiagHessian())
    negative = run(case.build(), extensions.DiagHessian(), scale=-2.0)
    for p, q in zip(plain, negative, strict=True):
        torch.testing.assert_close(q.diag_h, -2 * p.diag_h, **TOLERANCE)
    with pytest.raises(ValueError, match="negative"):
        run(case.build(), extensions.DiagGGNExact(), scale=-2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", select("network", without="mixing random"), ids=str)
def test_lower_precision(case: Case, dtype: torch.dtype) -> None:
    """Relative error of each quantity as a whole: 1e-4 in float32, 0.1 in bfloat16 (8 bits)."""
    exts = [
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.SumGradSquared(),
        extensions.DiagGGNExact(),
        extensions.DiagHessian(),
    ]
    exact = run(case.build(), *exts)
    rough = run(case.build(dtype=dtype), *exts)
    bound = 1e-4 if dtype == torch.float32 else 0.1
    for ext in exts:
        one = torch.cat([getattr(p, ext.savefield).flatten() for p in exact])
        other = torch.cat([getattr(p, ext.savefield).flatten() for p in rough])
        assert other.dtype == dtype
        assert (one - other.double()).norm() <= bound * one.norm(), ext.savefield


def test_nothing_is_an_alias() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    X, y = torch.rand(1, 4), torch.tensor([1])
    exts = [
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.SumGradSquared(),
        extensions.Variance(),
        extensions.KFLR(),
        extensions.HBP("GGN", "EXACT", "SQRT", "BOTEV_MARTENS"),
        extensions.SqrtGGNExact(),
        extensions.DiagGGNExact(),
    ]
    for p in run(Problem(model, nn.CrossEntropyLoss(), X, y), *exts):
        tensors: list[Tensor] = [p.grad, p]
        for ext in exts:
            value = getattr(p, ext.savefield)
            tensors += value if isinstance(value, list) else [value]
        pointers = [t.untyped_storage().data_ptr() for t in tensors]
        assert len(set(pointers)) == len(pointers)


class Pair(nn.Module):
    """Multiplies with two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.rand(3))
        self.other = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one * self.other


@register(Pair)
class PairDerivatives(BaseDerivatives):
    """The rule is linear in each parameter."""

    params = ("one", "other")

    def vjp(self, c: Any, v: Any) -> Any:
        return v * c.params["one"] * c.params["other"]

    def one_vjp(self, c: Any, v: Any) -> Any:
        return v * c.x * c.params["other"]

    def other_vjp(self, c: Any, v: Any) -> Any:
        return v * c.x * c.params["one"]


@pytest.mark.parametrize(
    ("build", "one", "other"),
    [
        (Pair, "one", "other"),
        (lambda: nn.LayerNorm(3), "weight", "bias"),
        (lambda: nn.RNNCell(3, 3), "bias_ih", "bias_hh"),
        (lambda: nn.GRUCell(3, 3), "weight_ih", "weight_hh"),
    ],
    ids=["rule of a user", "LayerNorm", "RNNCell", "GRUCell"],
)
@pytest.mark.parametrize("times", [1, 2])
def test_one_parameter_under_two_names(
    build: Callable[[], nn.Module], one: str, other: str, times: int
) -> None:
    """Of one module, which may be called twice."""

    def problem() -> Problem:
        torch.manual_seed(0)
        module = build()
        setattr(module, other, getattr(module, one))
        layers = [nn.Linear(3, 3), nn.Tanh(), module, *[nn.Tanh(), module][: 2 * times - 2]]
        model = nn.Sequential(*layers, nn.Linear(3, 2)).double()
        X, y = torch.rand(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
        return Problem(model, nn.CrossEntropyLoss(), X, y)

    exts = [extensions.BatchGrad(), extensions.DiagHessian(), extensions.BatchDiagHessian()]
    params = run(problem(), *exts, extensions.GGNMP(), extensions.HMP())
    check(params, "grad_batch", oracle.batch_grad(*problem()))
    check(params, "diag_h", oracle.hessian_diag(*problem()))
    check(params, "diag_h_batch", oracle.batch_hessian_diag(*problem()))
    torch.testing.assert_close(products(params, "ggnmp"), oracle.ggn_blocks(*problem()))
    torch.testing.assert_close(products(params, "hmp"), oracle.hessian_blocks(*problem()))

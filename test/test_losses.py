"""Every loss of torch.nn, with all its arguments; losses of several inputs, of users, and weights.

The truth is plain autograd in double precision: ``torch.autograd.functional.hessian`` of the loss
with respect to its predictions, and ``oracle.py`` for networks.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import oracle
import pytest
import torch
from seen import seen
from torch import Tensor, einsum, nn
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.derivatives import AutomaticLossDerivatives, derivatives_of
from backpack.core.derivatives.loss_hessian import LossHessian
from backpack.core.derivatives.terms import num_terms
from backpack.core.engine.backpropagation import slice_bytes
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.weighted_loss import WeightedLoss
from backpack.utils.subsampling import subsample

N, D, INPUTS = 4, 3, 2
ROWS: list[list[int] | None] = [None, [2, 0]]
SUBSAMPLING = [3, 1]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*size_average and reduce args.*"),
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),
]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------

Target = Callable[[Tensor], tuple[Any, ...]]


@dataclass(frozen=True)
class Setting:
    """One loss with its arguments.

    Attributes:
        loss: The class.
        options: Its arguments. Tensors are called with the shape of the prediction.
        target: What comes after the prediction.
        shape: Shape of a sample's prediction.
        last: Last module of a network with this loss.
        plain: The same loss by functions that autograd can differentiate twice.
        samples: Whether there are Monte-Carlo quantities.
        reductions: Values of ``reduction``; empty if the options say it.
    """

    loss: type[nn.Module]
    target: Target
    options: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (D,)
    last: Callable[[], nn.Module] = nn.Identity
    plain: Callable[[nn.Module], Callable[..., Tensor]] | None = None
    samples: bool = False
    reductions: tuple[str, ...] = ("mean", "sum")

    def __str__(self) -> str:
        values = {k: "tensor" if isinstance(v, Tensor) else v for k, v in self.options.items()}
        words = [f"{k}={getattr(v, '__name__', v)}" for k, v in values.items()]
        return f"{self.loss.__name__}({', '.join(words)}){list(self.shape)}"

    def build(self, reduction: str | None) -> nn.Module:
        words = {} if reduction is None else {"reduction": reduction}
        return self.loss(**copy.deepcopy(self.options), **words)

    def prediction(self) -> Tensor:
        torch.manual_seed(1)
        return self.last()(torch.randn(N, *self.shape)).detach()

    def arguments(self) -> tuple[Any, ...]:
        torch.manual_seed(2)
        return self.target(torch.randn(N, *self.shape))

    def function(self, loss: nn.Module) -> Callable[..., Tensor]:
        return loss if self.plain is None else self.plain(loss)


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum(1)


def real(f: Tensor) -> tuple[Any, ...]:
    return (torch.randn_like(f),)


def far(f: Tensor) -> tuple[Any, ...]:
    return (3 * torch.randn_like(f),)


def count(f: Tensor) -> tuple[Any, ...]:
    return (torch.randint(0, 4, f.shape).to(f),)


def share(f: Tensor) -> tuple[Any, ...]:
    return (torch.rand_like(f),)


def binary(f: Tensor) -> tuple[Any, ...]:
    return (torch.randint(0, 2, f.shape).to(f),)


def sign(f: Tensor) -> tuple[Any, ...]:
    return (2 * torch.randint(0, 2, f.shape).to(f) - 1,)


def label(f: Tensor) -> tuple[Any, ...]:
    return (torch.randint(0, f.shape[1], (N, *f.shape[2:])),)


def distribution(f: Tensor) -> tuple[Any, ...]:
    return (torch.randn_like(f).softmax(1),)


def log_distribution(f: Tensor) -> tuple[Any, ...]:
    return (torch.randn_like(f).log_softmax(1),)


def labels(f: Tensor) -> tuple[Any, ...]:
    return (torch.tensor([[0, -1, 2], [2, 1, -1], [1, 0, 2], [-1, 0, 0]]),)


def variance(*shape: int) -> Target:
    return lambda f: (torch.randn_like(f), torch.rand(shape) + 0.1)


def constant_variance(f: Tensor) -> tuple[Any, ...]:
    return torch.randn_like(f), 0.3


def plain_multi_margin(loss: Any) -> Callable[..., Tensor]:
    """MultiMarginLoss, which autograd differentiates once."""

    def function(f: Tensor, y: Tensor) -> Tensor:
        others = 1 - F.one_hot(y, f.shape[1])
        slack = (loss.margin - f.gather(1, y[:, None]) + f).clamp(min=0) ** loss.p * others
        weight = 1 if loss.weight is None else loss.weight[y]
        each = slack.sum(1) * weight / f.shape[1]
        return each.mean() if loss.reduction == "mean" else each.sum()

    return function


def plain_multi_label_margin(loss: Any) -> Callable[..., Tensor]:
    """MultiLabelMarginLoss, which autograd differentiates once."""

    def function(f: Tensor, y: Tensor) -> Tensor:
        total = f.new_zeros(())
        for row, classes in zip(f, y.tolist(), strict=True):
            true = classes[: classes.index(-1)] if -1 in classes else classes
            for j in true:
                for i in set(range(len(row))) - set(true):
                    total = total + (1 - row[j] + row[i]).clamp(min=0) / len(row)
        return total / len(f) if loss.reduction == "mean" else total

    return function


WEIGHT = torch.tensor([0.5, 2.0, 1.3], dtype=torch.float64)
POSITIVE = torch.tensor([3.0, 0.2, 1.0], dtype=torch.float64)
EACH = torch.linspace(0.1, 2, N * D, dtype=torch.float64).reshape(N, D)
LOG = {"last": lambda: nn.LogSoftmax(1)}
LEGACY = {"reductions": (None,)}

TABLE: dict[type[nn.Module], list[Setting]] = {
    nn.MSELoss: [
        Setting(nn.MSELoss, real, samples=True),
        Setting(nn.MSELoss, real, {"size_average": False}, samples=True, **LEGACY),
        Setting(nn.MSELoss, real, {"reduce": True}, (2, 3), samples=True, **LEGACY),
    ],
    nn.L1Loss: [Setting(nn.L1Loss, real), Setting(nn.L1Loss, real, {}, (2, 2))],
    nn.SmoothL1Loss: [
        Setting(nn.SmoothL1Loss, far),
        Setting(nn.SmoothL1Loss, real, {"beta": 0.3}, (2, 2)),
        Setting(nn.SmoothL1Loss, real, {"beta": 0.0}),
    ],
    nn.HuberLoss: [
        Setting(nn.HuberLoss, far),
        Setting(nn.HuberLoss, far, {"delta": 2.5}, (2, 2)),
    ],
    nn.PoissonNLLLoss: [
        Setting(nn.PoissonNLLLoss, count, samples=True),
        Setting(nn.PoissonNLLLoss, count, {"full": True}, (2, 2), samples=True),
        Setting(nn.PoissonNLLLoss, count, {"size_average": False}, samples=True, **LEGACY),
        *[
            Setting(
                nn.PoissonNLLLoss,
                count,
                {"log_input": False, "eps": eps},
                last=nn.Softplus,
                samples=True,
            )
            for eps in (1e-8, 0.5)
        ],
    ],
    nn.GaussianNLLLoss: [
        Setting(nn.GaussianNLLLoss, variance(N, D), samples=True),
        Setting(nn.GaussianNLLLoss, variance(N, 1), {"full": True}, samples=True),
        Setting(nn.GaussianNLLLoss, variance(N, 2), {"eps": 0.6}, (2, 3), samples=True),
        Setting(nn.GaussianNLLLoss, variance(1, D), samples=True),
        Setting(nn.GaussianNLLLoss, constant_variance, samples=True),
    ],
    nn.KLDivLoss: [
        Setting(nn.KLDivLoss, distribution, {"reduction": "batchmean"}, **LOG, **LEGACY),
        Setting(nn.KLDivLoss, distribution, **LOG),
        Setting(nn.KLDivLoss, log_distribution, {"log_target": True}, **LOG),
    ],
    nn.BCELoss: [
        Setting(nn.BCELoss, share, last=nn.Sigmoid, samples=True),
        Setting(nn.BCELoss, binary, {"weight": WEIGHT}, last=nn.Sigmoid, samples=True),
        Setting(nn.BCELoss, share, {"weight": EACH}, last=nn.Sigmoid, samples=True),
    ],
    nn.BCEWithLogitsLoss: [
        Setting(nn.BCEWithLogitsLoss, share, samples=True),
        Setting(
            nn.BCEWithLogitsLoss, share, {"weight": EACH, "pos_weight": POSITIVE}, samples=True
        ),
        Setting(nn.BCEWithLogitsLoss, binary, {"weight": WEIGHT}, (2, 3), samples=True),
        Setting(nn.BCEWithLogitsLoss, binary, {"reduce": True}, samples=True, **LEGACY),
    ],
    nn.SoftMarginLoss: [
        Setting(nn.SoftMarginLoss, sign, samples=True),
        Setting(nn.SoftMarginLoss, sign, {}, (2, 2), samples=True),
    ],
    nn.MultiLabelSoftMarginLoss: [
        Setting(nn.MultiLabelSoftMarginLoss, binary, samples=True),
        Setting(nn.MultiLabelSoftMarginLoss, share, {"weight": WEIGHT}, samples=True),
        Setting(nn.MultiLabelSoftMarginLoss, binary, {}, (2, 3), samples=True),
    ],
    nn.HingeEmbeddingLoss: [
        Setting(nn.HingeEmbeddingLoss, sign),
        Setting(nn.HingeEmbeddingLoss, sign, {"margin": 0.2}, (2, 2)),
    ],
    nn.MultiMarginLoss: [
        Setting(nn.MultiMarginLoss, label, options, plain=plain_multi_margin)
        for options in (
            {},
            {"p": 2},
            {"p": 2, "margin": 0.4, "weight": WEIGHT},
            {"margin": 2.0, "weight": WEIGHT},
        )
    ],
    nn.MultiLabelMarginLoss: [
        Setting(nn.MultiLabelMarginLoss, labels, plain=plain_multi_label_margin)
    ],
    nn.CrossEntropyLoss: [
        Setting(nn.CrossEntropyLoss, target, options, shape, samples=True)
        for target, options, shape in (
            (label, {}, (D,)),
            (label, {"weight": WEIGHT, "label_smoothing": 0.2}, (D,)),
            (label, {"ignore_index": 1, "label_smoothing": 0.1}, (D, 2)),
            (distribution, {}, (D,)),
            (distribution, {"weight": WEIGHT, "label_smoothing": 0.2}, (D, 2)),
        )
    ]
    + [
        Setting(nn.CrossEntropyLoss, label, {"size_average": False}, samples=True, **LEGACY),
        Setting(nn.CrossEntropyLoss, label, {}, (2, 2, 2), samples=True),
    ],
    nn.NLLLoss: [
        Setting(nn.NLLLoss, label, options, shape, samples=True, **LOG)
        for options, shape in (
            ({}, (D,)),
            ({"weight": WEIGHT, "ignore_index": 1}, (D,)),
            ({"weight": WEIGHT}, (D, 2)),
            ({"ignore_index": 0}, (2, 2, 2)),
        )
    ],
    nn.CosineEmbeddingLoss: [
        Setting(nn.CosineEmbeddingLoss, lambda f: (*real(f), torch.tensor([1.0, -1, -1, 1]))),
        Setting(
            nn.CosineEmbeddingLoss,
            lambda f: (*real(f), torch.tensor([1.0, -1, -1, 1])),
            {"margin": 0.3},
        ),
    ],
    nn.MarginRankingLoss: [
        Setting(nn.MarginRankingLoss, lambda f: (*real(f), *sign(f)), options, shape)
        for options, shape in (({}, ()), ({"margin": 0.5}, (D,)))
    ],
    nn.TripletMarginLoss: [
        Setting(nn.TripletMarginLoss, lambda f: real(f) + real(f), options)
        for options in ({}, {"margin": 2.0, "swap": True, "p": 2}, {"p": 3, "eps": 1e-3})
    ],
    nn.TripletMarginWithDistanceLoss: [
        Setting(nn.TripletMarginWithDistanceLoss, lambda f: real(f) + real(f), options)
        for options in (
            {},
            {"margin": 3.0, "swap": True},
            {"distance_function": squared_distance},
        )
    ],
}

# Errors: no second derivative in torch; parameters that a function reads, not a module.
REFUSED = {"CTCLoss", "LinearCrossEntropyLoss"}
# Others are subclasses of older names.
CLASSES = [
    cls
    for cls in vars(torch.nn.modules.loss).values()
    if isinstance(cls, type)
    and issubclass(cls, nn.Module)
    and cls.__module__ == torch.nn.modules.loss.__name__
    and not cls.__name__.startswith("_")
]
ALIASES = {"NLLLoss2d": nn.NLLLoss}

SETTINGS = [setting for settings in TABLE.values() for setting in settings]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=str)
CASES = [
    pytest.param(setting, reduction, id=f"{setting}-{reduction}")
    for setting in SETTINGS
    for reduction in setting.reductions
]
each_case = pytest.mark.parametrize(("setting", "reduction"), CASES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_loss_of_torch_is_in_the_table(cls: type[nn.Module]) -> None:
    """This fails when torch adds a loss that nobody has thought about."""
    cls = ALIASES.get(cls.__name__, cls)
    assert cls in TABLE or cls.__name__ in REFUSED


# --------------------------------------------------------------------------------------
# With respect to the prediction
# --------------------------------------------------------------------------------------


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def blocks(function: Callable[..., Tensor], f: Tensor, *arguments: Any) -> Tensor:
    """Return each sample's Hessian ``[N, D, D]``; there are no other terms."""
    H = torch.autograd.functional.hessian(lambda x: function(x, *arguments), f)
    H = H.reshape(len(f), f[0].numel(), len(f), f[0].numel())
    own = torch.stack([H[n, :, n] for n in range(len(f))])
    close(H.square().sum(), own.square().sum())
    return own


def start(loss: nn.Module, f: Tensor, *arguments: Any) -> tuple[Any, Tensor]:
    """Call the loss; return its derivatives and the output, which keeps the call alive."""
    out = extend(loss)(f, *arguments)
    return derivatives_of(loss) or AutomaticLossDerivatives(), out


def signed_root(loss: nn.Module, rows: Any = None) -> tuple[Any, Any]:
    """Return a signed factor of the Hessian as the engine does."""
    return LossHessian(seen(loss).call, rows).signed_root()


def outer(S: Tensor, weights: Tensor | None = None) -> Tensor:
    S = S.reshape(*S.shape[:2], -1)
    weights = torch.ones_like(S[..., 0]) if weights is None else weights
    return einsum("vn,vna,vnb->nab", weights, S, S)


@each_case
def test_factors_and_products(setting: Setting, reduction: str | None) -> None:
    loss, f, arguments = setting.build(reduction), setting.prediction(), setting.arguments()
    H = blocks(setting.function(loss), f, *arguments)
    rule, out = start(loss, f.requires_grad_(), *arguments)
    close(out.detach(), setting.function(loss)(f, *arguments).detach())
    eigenvalues = torch.linalg.eigvalsh(H)
    convex = eigenvalues.min() > -1e-10
    for rows in ROWS:
        part = subsample(H, subsampling=rows)
        S, weights = signed_root(loss, rows)
        assert S.shape[1:] == subsample(f, subsampling=rows).shape
        close(outer(S, weights), part)
        u = torch.randn(2, *S.shape[1:])
        expected = einsum("nab,vnb->vna", part, u.reshape(2, len(part), -1)).reshape(u.shape)
        close(rule.make_hessian_mat_prod(loss, None, None)(u, rows), expected)
        if not convex:
            for method in (rule.sqrt_hessian, rule.sum_hessian):
                with pytest.raises(ValueError, match=f"{type(loss).__name__}.*not convex"):
                    method(loss, None, None, rows)
            with pytest.raises(ValueError, match="not convex"):
                rule.make_ggn_mat_prod(loss, None, None)(u, rows)
            continue
        S = rule.sqrt_hessian(loss, None, None, rows)
        if isinstance(loss, nn.NLLLoss):  # the Fisher information of the distribution
            part = subsample(fisher(setting, loss, f.detach(), arguments, H), subsampling=rows)
            expected = einsum("nab,vnb->vna", part, u.flatten(2)).reshape(u.shape)
        close(outer(S), part)
        close(rule.sum_hessian(loss, None, None, rows), part.sum(0))
        close(rule.make_ggn_mat_prod(loss, None, None)(u, rows), expected)


def fisher(setting: Setting, loss: Any, f: Tensor, arguments: Any, H: Tensor) -> Tensor:
    """Expectation of the Monte-Carlo factor's ``S Sᵀ``: ``[N, D, D]``."""
    scale = 1 / f.numel() if loss.reduction == "mean" else 1.0
    if isinstance(loss, nn.BCELoss):
        weight = torch.ones(()) if loss.weight is None else loss.weight
        return (scale * weight / (f * (1 - f))).flatten(1).diag_embed()
    if isinstance(loss, nn.PoissonNLLLoss) and not loss.log_input:
        return (scale / (f + loss.eps)).flatten(1).diag_embed()
    if isinstance(loss, nn.NLLLoss):  # the softmax of log-probabilities are the probabilities
        cross_entropy = nn.CrossEntropyLoss(**setting.options, reduction=loss.reduction)
        return blocks(cross_entropy, f, *arguments)
    return H


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.samples], ids=str)
def test_expectation_of_samples(setting: Setting, num: int = 4000) -> None:
    """Within five standard errors of the Fisher information, in each entry."""
    loss, f = setting.build(setting.reductions[-1]), setting.prediction()
    arguments = setting.arguments()
    truth = fisher(setting, loss, f, arguments, blocks(setting.function(loss), f, *arguments))
    rule, _out = start(loss, f.requires_grad_(), *arguments)
    torch.manual_seed(3)
    S = rule.sqrt_hessian_sampled(loss, None, None, mc_samples=num).detach()
    assert S.shape == (num, *f.shape)
    flat = S.flatten(2) * math.sqrt(num)
    each = einsum("mna,mnb->mnab", flat, flat)
    standard_error = each.std(0) / math.sqrt(num)
    assert ((each.mean(0) - truth).abs() <= 5 * standard_error + 1e-12).all()
    assert standard_error.norm() < 0.2 * truth.norm()
    torch.manual_seed(3)
    part = rule.sqrt_hessian_sampled(loss, None, None, mc_samples=num, subsampling=SUBSAMPLING)
    assert torch.equal(part.detach(), S[:, SUBSAMPLING])


@pytest.mark.parametrize(
    "cls", [c for c, settings in TABLE.items() if not settings[0].samples], ids=lambda c: c.__name__
)
@pytest.mark.parametrize(
    "ext", [extensions.DiagGGNMC, extensions.SqrtGGNMC, extensions.KFAC], ids=lambda e: e.__name__
)
def test_without_likelihood(cls: type[nn.Module], ext: Any) -> None:
    setting = TABLE[cls][0]
    model, loss = extend(network(setting)), extend(setting.build(setting.reductions[0]))
    value = loss(model(data()), *setting.arguments())
    with backpack(ext()), pytest.raises(NotImplementedError, match=f"{cls.__name__}.*DiagGGNExact"):
        value.backward()
    assert not any(hasattr(p, ext().savefield) for p in model.parameters())


# --------------------------------------------------------------------------------------
# Networks
# --------------------------------------------------------------------------------------


def data() -> Tensor:
    torch.manual_seed(4)
    return torch.randn(N, INPUTS)


def network(setting: Setting, last: bool = True) -> nn.Sequential:
    torch.manual_seed(5)
    size = math.prod(setting.shape)
    return nn.Sequential(
        nn.Linear(INPUTS, 2),
        nn.Tanh(),
        nn.Linear(2, size),
        nn.Unflatten(1, setting.shape) if setting.shape else nn.Flatten(0),
        setting.last() if last else nn.Identity(),
    )


GGN = [
    extensions.DiagGGNExact,
    extensions.BatchDiagGGNExact,
    extensions.SqrtGGNExact,
    extensions.KFLR,
    extensions.GGNMP,
]
HESSIAN = [extensions.DiagHessian, extensions.BatchDiagHessian, extensions.HMP]


def as_matrix(product: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
    return product(torch.eye(p.numel()).reshape(-1, *p.shape)).flatten(1)


def same(values: list[Tensor], truths: list[Tensor]) -> None:
    for value, truth in zip(values, truths, strict=True):
        close(value, truth)


def check_ggn(params: list[Any], *problem: Any) -> None:
    same([p.diag_ggn_exact for p in params], oracle.ggn_diag(*problem))
    same([p.diag_ggn_exact_batch for p in params], oracle.batch_ggn_diag(*problem))
    for p, block in zip(params, oracle.ggn_blocks(*problem), strict=True):
        S = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)
        close(S.T @ S, block)
        close(as_matrix(p.ggnmp, p), block)


def check_hessian(params: list[Any], *problem: Any) -> None:
    same([p.diag_h for p in params], oracle.hessian_diag(*problem))
    same([p.diag_h_batch for p in params], oracle.batch_hessian_diag(*problem))
    blocks = oracle.hessian_blocks(*problem)
    same([as_matrix(p.hmp, p) for p in params], blocks)


def run(model: nn.Module, loss: nn.Module, arguments: Any, *exts: Any, X: Any = None) -> list[Any]:
    model, loss = extend(copy.deepcopy(model)), extend(copy.deepcopy(loss))
    value = loss(model(data() if X is None else X), *arguments)
    with backpack(*exts):
        value.backward()
    return [p for p in model.parameters() if p.requires_grad]


@each_setting
def test_network(setting: Setting) -> None:
    reduction = setting.reductions[0]
    model, loss, arguments = network(setting), setting.build(reduction), setting.arguments()
    function = setting.function(loss)

    def lossfunc(f: Tensor, _: Any) -> Tensor:
        return function(f, *arguments)

    problem = model, lossfunc, data(), None
    check_hessian(run(model, loss, arguments, *(ext() for ext in HESSIAN)), *problem)

    if torch.linalg.eigvalsh(blocks(function, model(data()).detach(), *arguments)).min() < -1e-10:
        for ext in GGN:
            with pytest.raises(ValueError, match=f"{type(loss).__name__}.*not convex"):
                run(model, loss, arguments, ext())
        return
    if isinstance(loss, nn.NLLLoss):  # the GGN of the cross entropy without LogSoftmax
        lossfunc = nn.CrossEntropyLoss(**setting.options, reduction=reduction)
        problem = network(setting, last=False), lossfunc, data(), *arguments
    params = run(model, loss, arguments, *(ext() for ext in GGN))
    check_ggn(params, *problem)
    same([f for p in params for f in p.kflr], [f for fs in oracle.kflr(*problem) for f in fs])


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.samples], ids=str)
def test_subsampling_and_sampled_factors(setting: Setting) -> None:
    """A part of the samples has their part of the quantities; samples of a seed are the same."""
    model, arguments = network(setting), setting.arguments()
    loss = setting.build(setting.reductions[0])
    exts = [extensions.SqrtGGNExact, extensions.SqrtGGNMC, extensions.BatchDiagHessian]
    values = []
    for subsampling in (None, SUBSAMPLING):
        torch.manual_seed(6)
        params = run(model, loss, arguments, *(ext(subsampling=subsampling) for ext in exts))
        rows = SUBSAMPLING if subsampling is None else slice(None)
        values.append(
            [
                part
                for p in params
                for part in (
                    p.sqrt_ggn_exact[:, rows],
                    p.sqrt_ggn_mc[:, rows],
                    p.diag_h_batch[rows],
                )
            ]
        )
    same(values[0], values[1])


# --------------------------------------------------------------------------------------
# Facts about losses
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"weight": WEIGHT, "ignore_index": 1}], ids=str)
def test_log_softmax_and_nll_are_cross_entropy(options: dict[str, Any]) -> None:
    """All quantities, exact and sampled, are the same."""
    setting = Setting(nn.NLLLoss, label, options, last=lambda: nn.LogSoftmax(1))
    exts = [*GGN, *HESSIAN, extensions.KFRA, extensions.DiagGGNMC, extensions.KFAC]
    values = []
    for model, loss in (
        (network(setting), nn.NLLLoss(**options)),
        (network(setting, last=False), nn.CrossEntropyLoss(**options)),
    ):
        torch.manual_seed(7)
        params = run(model, loss, setting.arguments(), *(ext() for ext in exts))
        names = ["diag_ggn_exact", "diag_ggn_exact_batch", "diag_h", "diag_h_batch", "diag_ggn_mc"]
        each = [getattr(p, name) for p in params for name in names]
        each += [as_matrix(product, p) for p in params for product in (p.ggnmp, p.hmp)]
        each += [f for p in params for fs in (p.kflr, p.kfac, p.kfra) for f in fs]
        values.append(each)
    same(*values)


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_targets_are_ignored(weight: Tensor | None, smoothing: float) -> None:
    """The mean is 0 / 0, but its derivatives are zero, as those of autograd."""
    setting = Setting(nn.CrossEntropyLoss, label)
    model, y = network(setting), torch.full((N,), -100)
    loss = nn.CrossEntropyLoss(weight, label_smoothing=smoothing)
    exts = *GGN, *HESSIAN, extensions.DiagGGNMC, extensions.KFRA
    for p in run(model, loss, (y,), *(ext() for ext in exts)):
        assert loss(model(data()), y).isnan() and not p.grad.any()
        for value in (p.diag_ggn_exact, p.diag_ggn_exact_batch, p.diag_ggn_mc, p.diag_h, p.kfra[0]):
            assert not value.any()
        assert not as_matrix(p.ggnmp, p).any() and not as_matrix(p.hmp, p).any()


@pytest.mark.parametrize("name", ["DiagGGNExact", "DiagGGNMC", "DiagHessian", "HMP", "KFRA"])
def test_cross_entropy_of_one_row_needs_a_batch_axis(name: str) -> None:
    """The scores of a sample, ``[C]``: those of an axis that is not there are no IndexError."""
    model, scores = extend(nn.Linear(3, 4)), torch.rand(4, requires_grad=True)
    if name != "KFRA":  # which has another error for the function that takes the row
        scores = model(torch.rand(2, 3))[0]
    value = extend(nn.CrossEntropyLoss())(scores, torch.tensor(1))
    shown = r"CrossEntropyLoss.*: the prediction needs a batch axis, got shape \[4\]"
    with pytest.raises(ValueError, match=shown):
        with backpack(getattr(extensions, name)()):
            value.backward()
        model.bias.hmp(torch.rand(1, 4))


@pytest.mark.parametrize("weighted", [False, True])
def test_nll_of_raw_scores(weighted: bool) -> None:
    """They are no log-probabilities: there is no distribution, but a Hessian."""
    setting = Setting(nn.NLLLoss, label)
    model, y = network(setting), setting.arguments()[0]
    inner = nn.NLLLoss(reduction="none", ignore_index=1)
    loss = WeightedLoss(inner) if weighted else nn.NLLLoss(ignore_index=1)
    arguments = (y, SOME) if weighted else (y,)
    for ext in (*GGN, extensions.KFRA, extensions.DiagGGNMC, extensions.KFAC):
        with pytest.raises(ValueError, match=r"NLLLoss.*log-probabilities.*LogSoftmax"):
            run(model, loss, arguments, ext())
    params = run(model, loss, arguments, *(ext() for ext in HESSIAN))
    check_hessian(params, model, lambda f, _: loss(f, *arguments), data(), y)
    f = torch.randn(N, D).log_softmax(1)
    f[y == 1] = 1.0  # padding
    lossfunc = nn.NLLLoss(ignore_index=1)
    rule, _out = start(lossfunc, f.requires_grad_(), y)
    assert (y == 1).any()
    close(outer(rule.sqrt_hessian(lossfunc, None, None)), fisher_of(f.detach(), y))


def fisher_of(f: Tensor, y: Tensor) -> Tensor:
    p, counts = f.exp(), (y != 1).to(f)
    own = torch.diag_embed(p) - einsum("na,nb->nab", p, p)
    return own * (counts / counts.sum())[:, None, None]


def test_sigmoid_and_bce() -> None:
    """The Monte-Carlo quantities are those of the loss with logits, and so is the Hessian."""
    setting = Setting(nn.BCELoss, binary, {"weight": WEIGHT}, last=nn.Sigmoid)
    values = []
    for last, loss in ((True, nn.BCELoss), (False, nn.BCEWithLogitsLoss)):
        torch.manual_seed(7)
        exts = extensions.DiagGGNMC(), extensions.DiagHessian(), extensions.KFAC(mc_samples=2)
        params = run(network(setting, last), loss(WEIGHT), setting.arguments(), *exts)
        values.append([t for p in params for t in (p.diag_ggn_mc, p.diag_h, *p.kfac)])
    same(*values)


def test_saturated_probabilities() -> None:
    """A target that is certainly right has a finite second derivative."""
    f = torch.tensor([[0.0, 1.0], [0.0, 1.0]], requires_grad=True)
    loss = nn.BCELoss(reduction="sum")
    rule, _out = start(loss, f, f.detach().round())
    close(rule.sqrt_hessian(loss, None, None).square().sum(0), torch.ones(2, 2))
    sampled = rule.sqrt_hessian_sampled(loss, None, None, mc_samples=5)
    assert sampled.isfinite().all()
    assert torch.autograd.grad(sampled.sum(), f)[0].isfinite().all()


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.CrossEntropyLoss(torch.tensor([1.0, -0.7, 0.4], dtype=torch.float64)), label),
        (nn.BCEWithLogitsLoss(-WEIGHT), binary),
        (nn.MultiMarginLoss(2, weight=-WEIGHT), label),
        (nn.PoissonNLLLoss(log_input=False), real),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_negative_weights_and_targets(loss: nn.Module, target: Target) -> None:
    """There is no GGN, but a Hessian."""
    f = (torch.randn(N, D).abs() + 0.1).requires_grad_()
    arguments = target(f.detach())
    function = plain_multi_margin(loss) if isinstance(loss, nn.MultiMarginLoss) else loss
    H = blocks(function, f, *arguments)
    rule, _out = start(loss, f, *arguments)
    close(outer(*signed_root(loss)), H)
    with pytest.raises(ValueError, match="not convex"):
        rule.sqrt_hessian(loss, None, None)
    if not isinstance(loss, nn.MultiMarginLoss | nn.PoissonNLLLoss):
        with pytest.raises(ValueError, match="not convex"):
            rule.sqrt_hessian_sampled(loss, None, None)


@each_setting
def test_factors_are_differentiable(setting: Setting) -> None:
    """The third derivative of the loss."""
    loss, f = setting.build(setting.reductions[0]), setting.prediction().requires_grad_()
    arguments = setting.arguments()
    function = setting.function(loss)
    (gradient,) = torch.autograd.grad(function(f, *arguments), f, create_graph=True)
    H = torch.zeros(())
    u = torch.randn(f.numel(), N, *f.shape[1:])
    if gradient.requires_grad:
        products = [torch.autograd.grad(gradient, f, v, create_graph=True)[0] for v in u]
        H = sum((a * b).sum() for a, b in zip(products, u.square(), strict=True))  # type: ignore

    def third(value: Tensor) -> Tensor:
        if not value.requires_grad:
            return torch.zeros_like(f)
        return torch.autograd.grad(value, f, materialize_grads=True)[0]

    rule, _out = start(loss, f, *arguments)
    truth = third(H)
    product = rule.make_hessian_mat_prod(loss, None, None)(u)
    close(third((product * u.square()).sum()), truth)
    S, weights = signed_root(loss)
    applied = _apply(S, weights, u)
    close(third((applied * u.square()).sum()), truth)


def _apply(S: Tensor, weights: Tensor | None, u: Tensor) -> Tensor:
    """Apply ``sum_v w_v s_v s_vᵀ``."""
    flat = u.reshape(len(u), N, -1)
    return einsum("nab,vnb->vna", outer(S, weights), flat).reshape(u.shape)


@pytest.mark.parametrize("cls", TABLE, ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precisions(cls: type[nn.Module], dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and cls in (nn.MultiMarginLoss, nn.MultiLabelMarginLoss):
        pytest.skip("torch has no kernel")
    setting = TABLE[cls][-1]
    loss = setting.build(setting.reductions[0])
    f, arguments = setting.prediction(), setting.arguments()
    rule, _out = start(loss, f.requires_grad_(), *arguments)
    S, weights = signed_root(loss)
    truth = outer(S, weights).detach()

    def converted(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    loss = setting.build(setting.reductions[0]).to(dtype)
    low = converted(f.detach()).requires_grad_()
    rule, _other = start(loss, low, *map(converted, arguments))
    S, weights = signed_root(loss)
    assert S.dtype == dtype
    weights = None if weights is None else weights.double()
    error = (outer(S.double(), weights) - truth).abs().max()
    assert error <= 60 * torch.finfo(dtype).eps * truth.abs().max()
    if rule.has_likelihood(loss):
        sampled = rule.sqrt_hessian_sampled(loss, None, None, mc_samples=2)
        assert sampled.dtype == dtype and sampled.isfinite().all()


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.HuberLoss(delta=0.5), real),
        (nn.GaussianNLLLoss(), variance(5, N, D)),
        (nn.GaussianNLLLoss(), variance(5, 1, D)),
        (nn.GaussianNLLLoss(), variance(1, N, D)),
        (nn.BCEWithLogitsLoss(WEIGHT, pos_weight=POSITIVE), binary),
        (nn.MultiLabelSoftMarginLoss(WEIGHT), binary),
        (nn.BCEWithLogitsLoss(EACH), binary),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_samples_along_the_second_axis(loss: nn.Module, target: Target) -> None:
    """A recurrent network whose data are ``[T, N, *]``: like the transposed problem."""
    recurrent, X = nn.RNN(INPUTS, D), torch.randn(5, N, INPUTS)
    arguments = target(torch.randn(5, N, D))

    model = nn.Sequential(recurrent, ReduceTuple(0), nn.Linear(D, D))
    exts = extensions.BatchDiagGGNExact(), extensions.DiagHessian()
    params = run(model, loss, arguments, *exts, X=X)[-2:]

    H = torch.autograd.functional.hessian(
        lambda f: loss(f, *arguments), model(X).detach()
    )  # [5, N, D, 5, N, D]
    diagonal = H.reshape(5 * N * D, -1).diagonal().reshape(5, N, D)
    close(params[1].diag_ggn_exact_batch, diagonal.sum(0))
    close(params[1].diag_h, diagonal.sum((0, 1)))


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.MultiLabelSoftMarginLoss(reduction="sum"), binary),
        (nn.GaussianNLLLoss(), variance(5, D)),
        (nn.GaussianNLLLoss(), variance(5, 1, N)),
        (
            nn.BCEWithLogitsLoss(
                pos_weight=torch.tensor([0.3, 2.0, 0.1, 1.1], dtype=torch.float64)
            ),
            binary,
        ),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_samples_along_the_last_axis(loss: nn.Module, target: Target) -> None:
    """Options that belong to an axis of the prediction belong to it as the loss was called."""
    model, X, arguments = (
        nn.Linear(INPUTS, D),
        torch.randn(N, 5, INPUTS),
        target(torch.randn(5, D, N)),
    )

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = loss

        def forward(self, f: Tensor, _: Any) -> Tensor:
            return self.loss(f.permute(1, 2, 0), *arguments)

    moved = nn.Sequential(model, Permute(1, 2, 0))
    exts = [*(ext() for ext in (*GGN, *HESSIAN)), extensions.KFAC(fisher="empirical")]
    params = run(moved, loss, arguments, *exts, X=X)
    problem = model, Moved(), X, None
    check_hessian(params, *problem)
    check_ggn(params, *problem)
    for p, factors in zip(params, oracle.kfac_empirical(*problem), strict=True):
        same(p.kfac, factors)


@pytest.mark.parametrize("weight", [None, torch.linspace(0.1, 2, 200, dtype=torch.float64)])
def test_classes_as_bytes(weight: Tensor | None) -> None:
    """They are neither a mask, nor is the class 156 what -100 would be."""
    f, y = torch.randn(N, 200, requires_grad=True), torch.tensor([156, 1, 0, 2])
    found = []
    for target in (y, y.byte()):
        loss = nn.CrossEntropyLoss(weight)
        _rule, _out = start(loss, f, target)
        found.append(outer(*signed_root(loss)))
    close(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight", [None, torch.ones(D)])
def test_terms_are_counted_exactly(dtype: torch.dtype, weight: Tensor | None) -> None:
    """Also more of them than the precision of the prediction has numbers for."""
    y = torch.zeros(100_001, dtype=torch.long)
    output, loss = torch.zeros(len(y), D, dtype=dtype), nn.CrossEntropyLoss(weight)
    assert num_terms(loss, output, [y], lambda: 0) == len(y)


# --------------------------------------------------------------------------------------
# Losses of users, and losses that are not convex
# --------------------------------------------------------------------------------------


class Focal(nn.Module):
    """Focal loss (Lin et al. 2017), ``-(1 - p)^2 log p``: not convex in the logits."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        log_p = (8 * f).log_softmax(1).gather(1, y[:, None])
        return -((1 - log_p.exp()) ** 2 * log_p).mean()


class Dice(nn.Module):
    """Soft dice loss of each sample, or of the batch, which then is no sum over samples."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.axes = (0, 1) if whole else (1,)

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        p = f.sigmoid()
        overlap = 2 * (p * y).sum(self.axes) / (p.square() + y).sum(self.axes)
        return (1 - overlap).mean()


class LogSumExp(nn.Module):
    """A convex loss of a user, with an option among the arguments."""

    def forward(self, f: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
        return ((scale * (f - y)).logsumexp(1) + (f - y).square().sum(1).square()).sum()


class Ranking(nn.Module):
    """Logistic loss of the difference of two scores (Burges et al. 2005), convex in both."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.softplus(b - a).sum(1).mean()


class Contrast(nn.Module):
    """Contrastive loss over the batch (Oord et al. 2018): every sample is compared to all."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))


@pytest.mark.parametrize("converter", [False, True, "record"], ids=str)
@pytest.mark.parametrize("is_module", [True, False])
def test_advice_on_losses_that_compare_samples(is_module: bool, converter: Any) -> None:
    """A converter is no remedy; what samples are compared with may be constants: that is right."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plain, extended = copy.deepcopy(model), extend(model, use_converter=converter)
    X, other = torch.randn(2, N, 3)

    def backward(is_constant: bool) -> None:
        a, b = extended(X), extended(other)
        b = b.detach() if is_constant else b
        if is_module:
            loss = extend(Contrast())(a, b)
        else:
            loss = extend(nn.CrossEntropyLoss())(a @ b.T, torch.arange(N))
        with backpack(extensions.BatchGrad()):
            loss.backward()

    advice = "use_converter" if not (is_module or converter) else r"compares .*detach\(\) those"
    with pytest.warns(UserWarning, match=rf"mixes the samples .*{advice}") as caught:
        backward(False)
    if converter:
        assert "use_converter" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(True)
    scores = plain(X) @ plain(other).detach().T
    terms = F.cross_entropy(scores, torch.arange(N), reduction="none") / N
    pairs = zip(extended.parameters(), plain.parameters(), strict=True)
    for p, q in pairs:
        each = [torch.autograd.grad(term, q, retain_graph=True)[0] for term in terms]
        close(p.grad_batch, torch.stack(each))


SETTING = Setting(nn.MSELoss, real)
GGN_ERRORS = [*GGN, extensions.KFRA, extensions.PCHMP]


def test_convex_loss_of_a_user() -> None:
    model, loss, arguments = network(SETTING), LogSumExp(), (*real(torch.zeros(N, D)), 1.5)
    exts = [ext() for ext in (*GGN, *HESSIAN, extensions.KFRA)]

    def lossfunc(f: Tensor, _: Any) -> Tensor:
        return loss(f, *arguments)

    params = run(model, loss, arguments, *exts)
    problem = model, lossfunc, data(), None
    check_ggn(params, *problem)
    check_hessian(params, *problem)
    for name in ("kflr", "kfra"):
        truth = getattr(oracle, name)(*problem)
        same([f for p in params for f in getattr(p, name)], [f for fs in truth for f in fs])
    params = run(model, loss, arguments, extensions.SqrtGGNExact(subsampling=[2]))
    whole = run(model, loss, arguments, extensions.BatchDiagGGNExact())
    for part, p in zip(params, whole, strict=True):
        close(part.sqrt_ggn_exact.square().sum((0, 1)), p.diag_ggn_exact_batch[2])


class Several(nn.Module):
    """A loss that returns its parts, too."""

    def __init__(self, batch: bool = False) -> None:
        super().__init__()
        self.batch = batch

    def forward(self, f: Tensor, t: Tensor) -> dict[str, Tensor]:
        square, size = F.mse_loss(f, t), f.mean(0).square().sum() if self.batch else f.exp().mean()
        return {
            "loss": square + (0 if self.batch else 0.1) * size,
            "square": square.detach(),
            "size": size,
        }


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 2.0), (3.0, 0.5)])
def test_loss_with_several_outputs(weights: tuple[float, float]) -> None:
    model, (target,) = network(SETTING), real(torch.zeros(N, D))
    extended = extend(copy.deepcopy(model))

    def value(loss: nn.Module, f: Tensor) -> Tensor:
        outputs = loss(f, target)
        parts = zip(weights, (outputs["loss"], outputs["size"]), strict=True)
        return torch.stack([w * part for w, part in parts if w]).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = value(extend(Several()), extended(data()))
        with backpack(*(ext() for ext in (*GGN, *HESSIAN))):
            loss.backward()
    problem = model, lambda f, _: value(Several(), f), data(), None
    check_ggn(list(extended.parameters()), *problem)
    check_hessian(list(extended.parameters()), *problem)


def test_any_output_of_a_loss_that_mixes_samples_is_told() -> None:
    loss = extend(Several(batch=True))(extend(network(SETTING))(data()), *real(torch.zeros(N, D)))
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match="mixes the samples"):
        loss["size"].backward()


@pytest.mark.parametrize(
    ("loss", "target"),
    [(Focal(), label), (Dice(whole=False), binary)],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
@pytest.mark.parametrize("scale", [1.0, -2.0])
def test_loss_that_is_not_convex(loss: nn.Module, target: Target, scale: float) -> None:
    """The Hessian is exact, also of the negative loss; the GGN does not exist."""
    model, arguments = network(SETTING), target(torch.zeros(N, D))
    H = blocks(loss, model(data()).detach(), *arguments)
    assert torch.linalg.eigvalsh(H).min() < -1e-6
    problem = model, lambda f, y: scale * loss(f, y), data(), *arguments
    extended, lossfunc = extend(copy.deepcopy(model)), extend(loss)
    with backpack(*(ext() for ext in HESSIAN)):
        (scale * lossfunc(extended(data()), *arguments)).backward()
    check_hessian(list(extended.parameters()), *problem)  # type: ignore[arg-type]
    for ext in GGN_ERRORS:
        with pytest.raises(ValueError, match=f"{type(loss).__name__}.*not convex.*DiagHessian"):
            run(model, loss, arguments, ext())
    for sampled, exact in (
        (extensions.SqrtGGNMC(), "SqrtGGNExact"),
        (extensions.KFAC(), r" KFAC\(fisher='exact'\)"),
        (extensions.EKFAC(), r"EKFAC\(fisher='exact'\)"),
        (extensions.GGNGram(mc_samples=2), r"GGNGram\(\)"),
    ):
        name, asked = type(sampled).__name__, type(loss).__name__
        message = rf"^{name}: .*{asked}.*no Monte-Carlo quantities.*{exact}"
        with pytest.raises(NotImplementedError, match=message):
            run(model, loss, arguments, sampled)


class Fourth(torch.autograd.Function):
    """The fourth power, whose backward pass has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**4

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 4 * x**3 * grad


class OnceDifferentiable(nn.modules.loss._Loss):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (Fourth.apply(x) * y).sum(1).mean()


@pytest.mark.parametrize("ext", [extensions.DiagGGNExact, extensions.DiagHessian])
def test_loss_without_second_derivative_is_refused(ext: Any) -> None:
    """Autograd would take the second derivative for zero."""
    model, loss = extend(nn.Linear(INPUTS, D)), extend(OnceDifferentiable())
    output = loss(model(torch.rand(N, INPUTS)), torch.rand(N, D))
    refused = pytest.raises(RuntimeError, match=r"OnceDifferentiable .*once_differentiable")
    with refused, backpack(ext()):
        output.backward()


def test_loss_that_is_no_sum_over_samples() -> None:
    """The Hessian of the batch is exact; samples have none of their own."""
    model, loss, arguments = network(SETTING), Dice(whole=True), binary(torch.zeros(N, D))
    params = run(model, loss, arguments, extensions.DiagHessian(), extensions.HMP())
    problem = model, loss, data(), *arguments
    same([p.diag_h for p in params], oracle.hessian_diag(*problem))
    same([as_matrix(p.hmp, p) for p in params], oracle.hessian_blocks(*problem))
    refused = [extensions.BatchDiagHessian(), extensions.HMP(), extensions.DiagHessian()]
    refused[1]._subsampling = refused[2]._subsampling = [0]
    for ext in (*refused, *(ext() for ext in GGN_ERRORS)):
        with pytest.raises(NotImplementedError, match="no sum over the samples"):
            run(model, loss, arguments, ext)


def test_coupling_of_any_two_samples_is_found() -> None:
    class Two(nn.Module):
        def forward(self, f: Tensor, i: int, j: int) -> Tensor:
            return f.square().sum() + 0.01 * f[i, 1] * f[j, 2]

    model, loss = extend(network(SETTING)), Two()
    for i in range(N):
        for j in range(N):
            rule, _out = start(loss, model(data()), i, j)
            assert rule.couples_terms(seen(loss)) == (i != j)
            assert rule.couples_samples_unseen(seen(loss).call) == (i != j)


@pytest.mark.parametrize("loss", [torch.exp, lambda f: (3 * f).logsumexp(1)])
def test_loss_in_single_precision_of_a_network_in_double(loss: Callable[[Tensor], Tensor]) -> None:
    """Rounding is not taken for terms between samples, nor for negative eigenvalues."""

    class Single(nn.Module):
        def forward(self, f: Tensor) -> Tensor:
            return loss(f.float()).mean()

    params = run(network(SETTING), Single(), (), extensions.DiagGGNExact())
    truths = oracle.ggn_diag(network(SETTING), lambda f, _: loss(f).mean(), data(), None)
    for p, truth in zip(params, truths, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact, truth, rtol=1e-5, atol=1e-8)


def test_values_of_other_samples_are_found() -> None:
    """Also where no gradient passes to the sample that they are of."""

    class Detached(nn.Module):
        def forward(self, f: Tensor, i: int, j: int) -> Tensor:
            return f.square().sum() + 0.01 * f[i, 1].item() * f[j, 2]

    model, loss = extend(network(SETTING)), Detached()
    for i in range(N):
        for j in range(N):
            rule, _out = start(loss, model(data()), i, j)
            assert rule.couples_samples_unseen(seen(loss).call) == (i != j)


@pytest.mark.parametrize(
    ("loss", "arguments", "mixes"),
    [
        (Dice(whole=True), (torch.ones(N, D),), True),
        (Dice(whole=False), (torch.ones(N, D),), False),
        (Focal(), (torch.ones(N, dtype=torch.long),), False),
        (nn.TripletMarginLoss(), (torch.ones(N, D), torch.zeros(N, D)), False),
        (WeightedLoss(nn.L1Loss(reduction="none")), (torch.ones(N, D), torch.ones(N)), False),
        (WeightedLoss(nn.L1Loss(reduction="none")), (torch.ones(D), torch.ones(N)), False),
    ],
)
def test_individual_gradients_of_a_loss_that_mixes_samples_are_told(
    loss: nn.Module, arguments: Any, mixes: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(network(SETTING), loss, arguments, extensions.BatchGrad())
    name = type(loss).__name__
    assert (
        any(f"mixes the samples of a batch, in {name}" in str(w.message) for w in caught) == mixes
    )


@pytest.mark.parametrize("seed", range(3))
def test_differentiable_ggn_of_a_user(seed: int) -> None:
    """Also where eigenvalues are equal or zero: the Hessian of MSE, and of cross entropy."""

    class Twin(nn.Module):
        def __init__(self, loss: nn.Module) -> None:
            super().__init__()
            self.function = loss.forward

        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            return self.function(f, y)

    torch.manual_seed(seed)
    model = network(SETTING)
    for loss, target in ((nn.MSELoss(), real), (nn.CrossEntropyLoss(), label)):
        arguments, slopes = target(torch.zeros(N, D)), []
        for lossfunc in (loss, Twin(loss)):
            extended = extend(copy.deepcopy(model))
            value = extend(lossfunc)(extended(data()), *arguments)
            params: list[Any] = list(extended.parameters())
            with backpack(extensions.DiagGGNExact(), extensions.DiagHessian(), extensions.GGNMP()):
                value.backward(create_graph=True)
            total = sum(
                (p.diag_ggn_exact.square() + p.diag_h.square()).sum()
                + p.ggnmp(torch.ones_like(p)).square().sum()
                for p in params
            )
            slopes.append(torch.autograd.grad(total, params))
        for mine, truth in zip(slopes[1], slopes[0], strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-6, atol=1e-9)


def test_loss_with_parameters_is_refused() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            return self.scale * (f - y).square().sum()

    for ext in (extensions.DiagGGNExact(), extensions.HMP()):
        with pytest.raises(NotImplementedError, match=r"scale.*Learned"):
            run(network(SETTING), Learned(), real(torch.zeros(N, D)), ext)
    model, arguments, loss = network(SETTING), real(torch.zeros(N, D)), Learned()
    with pytest.warns(UserWarning, match=r"BatchGrad.*no rule for the parameters scale of Learned"):
        params = run(model, loss, arguments, extensions.BatchGrad())
    same([p.grad_batch.sum(0) for p in params], [p.grad for p in params])
    loss.requires_grad_(False)
    params = run(model, loss, arguments, *(ext() for ext in (*GGN, *HESSIAN)))
    check_ggn(params, model, loss, data(), *arguments)
    check_hessian(params, model, loss, data(), *arguments)


class Noise(nn.Module):
    """Another number for each call, that matters or that does not."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return ((self.draw(f) - y) ** 4).mean(1).float().sum().to(y)


class Samples(nn.Module):
    """The losses of the samples of one that is not reduced otherwise."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss.forward

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.stack([self.loss(f[n : n + 1], y[n : n + 1]) for n in range(len(f))])


@pytest.mark.parametrize(
    "draw",
    [lambda f: f + 0.1 * torch.randn_like(f), lambda f: F.dropout(f, 0.5)],
    ids=["randn", "dropout"],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_random_loss_is_refused(draw: Callable[[Tensor], Tensor], weighted: bool) -> None:
    """Whatever the seed, and without drawing from the user's generator."""
    loss, arguments = Noise(draw), real(torch.zeros(N, D))
    if weighted:
        loss, arguments = WeightedLoss(Samples(loss)), (*arguments, SOME)
    for ext in (*GGN_ERRORS, *HESSIAN):
        torch.manual_seed(0)
        model, lossfunc = extend(network(SETTING)), extend(loss)
        f = model(data())
        torch.manual_seed(0)
        value = lossfunc(f, *arguments)
        state = torch.get_rng_state()
        with (
            backpack(ext()),
            pytest.raises(NotImplementedError, match=f"{type(loss).__name__}.*evaluated again"),
        ):
            value.backward()
        assert torch.equal(state, torch.get_rng_state())


def test_random_loss_of_low_precision_is_refused() -> None:
    """Not taken for the rounding of predictions in half precision."""
    loss = Noise(lambda f: f + 0.1 * torch.randn_like(f))
    model = extend(nn.Linear(INPUTS, D).bfloat16())
    value = extend(loss)(model(data().bfloat16()), torch.zeros(N, D))
    with backpack(extensions.DiagHessian()), pytest.raises(NotImplementedError, match="again"):
        value.backward()


class Stateful(nn.Module):
    """Keeps the mean of the predictions (in place, or in a new tensor), and counts its calls."""

    def __init__(self, in_place: bool, centred: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(D))
        self.in_place, self.centred = in_place, centred
        self.calls, self.last = 0, torch.zeros(())

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        value = ((f - y - (self.mean.clone() if self.centred else 0.0)) ** 4).mean()
        mean = 0.9 * self.mean + 0.1 * f.detach().mean(0) + 0.1 * torch.rand(D)
        self.mean = self.mean.copy_(mean) if self.in_place else mean
        self.calls, self.last = self.calls + 1, value.detach()
        return value


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("centred", [True, False])
def test_state_of_a_loss(in_place: bool, centred: bool) -> None:
    """It does not change; if the loss depends on it, second derivatives are refused."""
    model, arguments = extend(network(SETTING)), real(torch.zeros(N, D))
    loss, seen = extend(Stateful(in_place, centred)), []
    loss.register_forward_hook(lambda *_: seen.append(1))
    value = loss(model(data()), *arguments)
    mean, last, state = loss.mean.clone(), loss.last, torch.get_rng_state()
    with backpack(*(ext() for ext in (*GGN, *HESSIAN))):
        if centred:
            with pytest.raises(NotImplementedError, match=r"Stateful.*evaluated again.*state"):
                value.backward()
        else:
            value.backward()
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(loss.mean, mean)
    assert loss.last is last
    assert loss.calls == len(seen) == 1
    if not centred:
        problem = network(SETTING), Stateful(in_place, centred), data(), *arguments
        check_ggn(list(model.parameters()), *problem)
        check_hessian(list(model.parameters()), *problem)


class Regularised(nn.Module):
    """Reads parameters that are not its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.models = (model,)

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in self.models[0].parameters())
        return F.cross_entropy(f, y) + 0.1 * penalty


@pytest.mark.parametrize("weighted", [False, True])
def test_hidden_parameters_of_a_loss(weighted: bool) -> None:
    arguments = label(torch.zeros(N, D))
    for ext in (*GGN_ERRORS, *HESSIAN):
        model = extend(network(SETTING))
        loss: nn.Module = Regularised(model)
        more = ()
        if weighted:
            loss, more = WeightedLoss(Samples(loss)), (SOME,)
        value = extend(loss)(model(data()), *arguments, *more)
        with (
            backpack(ext()),
            pytest.raises(NotImplementedError, match=r"parameters of shapes.*not among its inputs"),
        ):
            value.backward()
    model, frozen = network(SETTING), network(SETTING).requires_grad_(False)
    loss = Regularised(frozen)
    params = run(model, loss, arguments, *(ext() for ext in HESSIAN))
    check_hessian(params, model, loss, data(), *arguments)


def test_ctc() -> None:
    """The samples are along the second axis; autograd has no second derivative."""
    model = nn.Sequential(nn.Linear(INPUTS, D), nn.LogSoftmax(-1))
    X = torch.randn(6, N, INPUTS)
    arguments = torch.randint(1, D, (N, 2)), torch.full((N,), 6), torch.full((N,), 2)
    params = run(model, nn.CTCLoss(), arguments, extensions.BatchGrad(), X=X)
    for p in params:
        close(p.grad_batch.sum(0), p.grad)
    for n in range(N):
        (p, *_) = run(
            model,
            nn.CTCLoss(reduction="sum"),
            [a[n : n + 1] for a in arguments],
            extensions.BatchGrad(),
            X=X[:, n : n + 1],
        )
        close(p.grad / 2 / N, params[0].grad_batch[n])
    for ext in (*GGN, *HESSIAN):
        with pytest.raises(NotImplementedError, match=r"CTCLoss.*twice"):
            run(model, nn.CTCLoss(), arguments, ext(), X=X)
    with pytest.raises(ValueError, match="batch axis"):
        single = [arguments[0][0], arguments[1][0], arguments[2][0]]
        run(model, nn.CTCLoss(), single, extensions.BatchGrad(), X=X[:, 0])


@pytest.mark.parametrize("converter", [False, "trace", "record"])
@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.CrossEntropyLoss(), torch.tensor(1)),
        (nn.NLLLoss(), torch.tensor(1)),
        (nn.MultiMarginLoss(), torch.tensor([1])),
        (nn.MultiLabelMarginLoss(), torch.tensor([0, 1, *[-1] * (N - 2)])),
    ],
    ids=lambda x: type(x).__name__,
)
def test_classes_that_are_taken_for_samples(
    loss: nn.Module, target: Tensor, converter: Any
) -> None:
    """A prediction of one axis is one sample's, in which the rows of a layer meet."""
    model = nn.Sequential(nn.Linear(INPUTS, 1), nn.Flatten(0))
    output = extend(model, use_converter=converter)(data())
    culprit = rf"mixes the samples .*{type(loss).__name__}"
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match=culprit):
        extend(loss)(output, target).backward()


def test_single_number() -> None:
    model = nn.Sequential(nn.Linear(INPUTS, 1), nn.Flatten(0))
    loss = extend(nn.PoissonNLLLoss())
    f = torch.zeros((), requires_grad=True)
    rule, _out = start(loss, f, torch.ones(()))
    with pytest.raises(ValueError, match=r"PoissonNLLLoss.*batch axis"):
        rule.sqrt_hessian(loss, None, None)
    params = run(model, nn.PoissonNLLLoss(), (torch.ones(N),), extensions.DiagGGNExact())
    truth = oracle.ggn_diag(
        model[:1], lambda f, y: nn.PoissonNLLLoss()(f[:, 0], y), data(), torch.ones(N)
    )
    same([p.diag_ggn_exact for p in params], truth)


# --------------------------------------------------------------------------------------
# Several predictions
# --------------------------------------------------------------------------------------


class Siamese(nn.Module):
    """One network, applied to several inputs; the oracle sees all outputs of a sample as one."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model, self.count = model, count

    def forward(self, X: Tensor) -> Tensor:
        return torch.cat([self.model(x) for x in X.unbind(1)], 1)


PAIRS: list[tuple[nn.Module, int, Target]] = [
    (nn.TripletMarginLoss(margin=3.0), 3, lambda f: ()),
    (nn.TripletMarginWithDistanceLoss(margin=3.0, swap=True), 3, lambda f: ()),
    (nn.CosineEmbeddingLoss(margin=-0.5), 2, lambda f: (torch.tensor([1.0, -1, 1, -1]),)),
    (nn.MarginRankingLoss(reduction="sum"), 2, sign),
    (Ranking(), 2, lambda f: ()),
]
each_pair = pytest.mark.parametrize(
    ("loss", "count", "target"), PAIRS, ids=[type(pair[0]).__name__ for pair in PAIRS]
)


def siamese_problem(loss: nn.Module, count: int, arguments: Any) -> Any:
    torch.manual_seed(8)
    X = torch.randn(N, count, INPUTS)

    def lossfunc(f: Tensor, _: Any) -> Tensor:
        return loss(*f.chunk(count, 1), *arguments)

    return Siamese(network(SETTING), count), lossfunc, X, None


def run_siamese(problem: Any, loss: nn.Module, arguments: Any, *exts: Any) -> list[Any]:
    model, lossfunc = extend(copy.deepcopy(problem[0].model)), extend(copy.deepcopy(loss))
    value = lossfunc(*(model(x) for x in problem[2].unbind(1)), *arguments)
    with backpack(*exts):
        value.backward()
    return list(model.parameters())


@each_pair
def test_embeddings_of_one_network(loss: nn.Module, count: int, target: Target) -> None:
    arguments = target(torch.zeros(N, D))
    problem = siamese_problem(loss, count, arguments)
    params = run_siamese(problem, loss, arguments, *(ext() for ext in HESSIAN))
    same([p.diag_h for p in params], oracle.hessian_diag(*problem))
    same([as_matrix(p.hmp, p) for p in params], oracle.hessian_blocks(*problem))
    same([p.diag_h_batch for p in params], oracle.batch_hessian_diag(*problem))
    model, lossfunc, X, _ = problem
    if torch.linalg.eigvalsh(blocks(lambda f: lossfunc(f, None), model(X).detach())).min() < -1e-9:
        for ext in GGN:
            with pytest.raises(ValueError, match=f"{type(loss).__name__}.*not convex"):
                run_siamese(problem, loss, arguments, ext())
        return
    check_ggn(run_siamese(problem, loss, arguments, *(ext() for ext in GGN)), *problem)


@each_pair
def test_embeddings_of_several_networks(loss: nn.Module, count: int, target: Target) -> None:
    """The Hessian has blocks between the predictions, but parameters see their own."""
    arguments = target(torch.zeros(N, D))
    torch.manual_seed(9)
    models = nn.ModuleList([nn.Sequential(nn.Linear(INPUTS, D), nn.Tanh()) for _ in range(count)])
    X = torch.randn(N, INPUTS)

    class Joint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.models = models

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([model(x) for model in self.models], 1)

    def lossfunc(f: Tensor, _: Any) -> Tensor:
        return loss(*f.chunk(count, 1), *arguments)

    problem = Joint(), lossfunc, X, None
    extended, criterion = extend(copy.deepcopy(models)), extend(copy.deepcopy(loss))
    value = criterion(*(model(X) for model in extended), *arguments)  # type: ignore[attr-defined]
    with backpack(*(ext() for ext in HESSIAN)):
        value.backward()
    check_hessian(list(extended.parameters()), *problem)


def test_only_the_second_input_is_a_prediction() -> None:
    model, anchor = network(SETTING), torch.randn(N, D)
    for loss, arguments in (
        (nn.TripletMarginLoss(margin=3.0), (torch.randn(N, D),)),
        (Ranking(), ()),
    ):
        extended, criterion = extend(copy.deepcopy(model)), extend(loss)
        value = criterion(anchor, extended(data()), *arguments)
        with backpack(*(ext() for ext in HESSIAN)):
            value.backward()
        problem = model, lambda f, _, s=(loss, arguments): s[0](anchor, f, *s[1]), data(), None
        check_hessian(list(extended.parameters()), *problem)


def test_one_tensor_as_two_predictions() -> None:
    model = network(SETTING)
    extended, loss = extend(copy.deepcopy(model)), extend(nn.TripletMarginLoss(margin=3.0))
    f, other = extended(data()), torch.randn(N, D)
    value = loss(f, other, f)
    with backpack(*(ext() for ext in HESSIAN)):
        value.backward()
    problem = model, lambda f, _: nn.TripletMarginLoss(margin=3.0)(f, other, f), data(), None
    check_hessian(list(extended.parameters()), *problem)


def test_contrast_between_all_samples() -> None:
    """Two predictions of one network, and every sample against all others."""
    problem = siamese_problem(Contrast(), 2, ())
    params = run_siamese(problem, Contrast(), (), extensions.DiagHessian(), extensions.HMP())
    same([p.diag_h for p in params], oracle.hessian_diag(*problem))
    same([as_matrix(p.hmp, p) for p in params], oracle.hessian_blocks(*problem))


def test_variance_from_the_network() -> None:
    model, target = network(SETTING), torch.randn(N, D)
    heads = extend(nn.ModuleList([copy.deepcopy(model), nn.Sequential(nn.Linear(2, D))]))
    loss = extend(nn.GaussianNLLLoss())
    X = data()
    value = loss(heads[0](X), target, extend(nn.Softplus())(heads[1](X)))  # type: ignore[index]
    with backpack(extensions.DiagGGNExact()), pytest.raises(ValueError, match="GaussianNLLLoss"):
        value.backward()


def test_swapped_prediction_and_target() -> None:
    loss = extend(nn.MSELoss())(torch.randn(N, D), extend(network(SETTING))(data()))
    told = pytest.raises(ValueError, match="Let the prediction come first")
    with backpack(extensions.DiagGGNExact()), told:
        loss.backward()


# --------------------------------------------------------------------------------------
# Weights of the samples
# --------------------------------------------------------------------------------------

WEIGHTED: dict[str, tuple[nn.Module, Target, dict[str, Any]]] = {
    "mse": (nn.MSELoss(reduction="none"), real, {}),
    "ce": (nn.CrossEntropyLoss(WEIGHT, reduction="none"), label, {}),
    "positions": (nn.CrossEntropyLoss(reduction="none"), label, {"shape": (D, 2)}),
    "nll": (nn.NLLLoss(reduction="none"), label, {"last": lambda: nn.LogSoftmax(1)}),
    "labels": (nn.MultiLabelSoftMarginLoss(reduction="none"), binary, {}),
    "gauss": (nn.GaussianNLLLoss(reduction="none"), variance(N, D), {}),
    "margin": (nn.MultiMarginLoss(2, reduction="none"), label, {}),
}


class Plain(nn.Module):
    """A loss without a rule."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y).square().sum(1).square()


WEIGHTED["user"] = (Plain(), real, {})
SOME = torch.tensor([0.3, 2.0, 0.0, 1.1], dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_loss(name: str, reduction: str) -> None:
    loss, target, options = WEIGHTED[name]
    setting = Setting(nn.MSELoss, target, **options)
    model, (y, *more) = network(setting), setting.arguments()
    function = loss
    if isinstance(loss, nn.MultiMarginLoss):

        def function(f: Tensor, y: Tensor) -> Tensor:
            each = [plain_multi_margin(loss)(f[n : n + 1], y[n : n + 1]) for n in range(len(f))]
            return torch.stack(each)

    def lossfunc(f: Tensor, weights: Tensor) -> Tensor:
        each = function(f, y, *more)
        total = (each.flatten(1).sum(1) if each.dim() > 1 else each) @ weights
        return total / each.numel() if reduction == "mean" else total

    exts = [ext() for ext in (*GGN, *HESSIAN)]
    params = run(model, WeightedLoss(loss, reduction), (y, SOME, *more), *exts)
    check_hessian(params, model, lossfunc, data(), SOME)
    if name == "nll":
        cross_entropy = nn.CrossEntropyLoss(reduction="none")

        def lossfunc(f: Tensor, weights: Tensor) -> Tensor:
            total = cross_entropy(f, y) @ weights
            return total / N if reduction == "mean" else total

        check_ggn(params, network(setting, last=False), lossfunc, data(), SOME)
    else:
        check_ggn(params, model, lossfunc, data(), SOME)

    if name == "nll":
        return
    signed = torch.tensor([0.3, -2.0, 0.5, 1.1])
    exts = [ext() for ext in HESSIAN]
    params = run(model, WeightedLoss(loss, reduction), (y, signed, *more), *exts)
    check_hessian(params, model, lossfunc, data(), signed)
    for ext in GGN:
        with pytest.raises(ValueError, match="not convex"):
            run(model, WeightedLoss(loss, reduction), (y, signed, *more), ext())


def test_weighted_samples_of_the_prediction() -> None:
    """Monte-Carlo factors are those of the loss inside, times the root of the weights."""
    f, y = torch.randn(N, D, requires_grad=True), torch.randint(0, D, (N,))
    inner, outside = nn.CrossEntropyLoss(), WeightedLoss(nn.CrossEntropyLoss(reduction="none"))
    sampled = []
    for loss, arguments in ((inner, (y,)), (outside, (y, SOME))):
        rule, _out = start(loss, f, *arguments)
        torch.manual_seed(0)
        sampled.append(rule.sqrt_hessian_sampled(loss, None, None, mc_samples=3))
    close(sampled[1], sampled[0] * SOME.sqrt()[:, None])
    for loss, error in ((WeightedLoss(Plain()), NotImplementedError), (outside, ValueError)):
        rule, _out = start(loss, f, torch.zeros(N, D) if loss is not outside else y, -SOME)
        with pytest.raises(error):
            rule.sqrt_hessian_sampled(loss, None, None)


def test_weighted_triplets() -> None:
    """A loss inside of several predictions."""
    loss = nn.TripletMarginLoss(margin=3.0, reduction="none")
    weighted = WeightedLoss(loss)
    torch.manual_seed(8)
    X = torch.randn(N, 3, INPUTS)
    model = extend(copy.deepcopy(network(SETTING)))
    a, b, c = (model(x) for x in X.unbind(1))
    value = extend(weighted)(a, b, SOME, c)
    with backpack(extensions.DiagHessian(), extensions.HMP()):
        value.backward()

    def lossfunc(f: Tensor, weights: Tensor) -> Tensor:
        return loss(*f.chunk(3, 1)) @ weights / N

    problem = Siamese(network(SETTING), 3), lossfunc, X, SOME
    params: list[Any] = list(model.parameters())
    same([p.diag_h for p in params], oracle.hessian_diag(*problem))
    same([as_matrix(p.hmp, p) for p in params], oracle.hessian_blocks(*problem))


def test_weighted_loss_refuses() -> None:
    with pytest.raises(ValueError, match=r"MSELoss\(reduction='none'\)"):
        WeightedLoss(nn.MSELoss())
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        WeightedLoss(nn.MSELoss(reduction="none"), "none")
    loss = WeightedLoss(nn.MSELoss(reduction="none"))
    with pytest.raises(ValueError, match=r"\[4, 3\].*\[3\]"):
        loss(torch.zeros(N, D), torch.zeros(N, D), torch.ones(3))
    close(loss(torch.ones(N, D), torch.zeros(N, D), torch.ones(N)), torch.ones(()))
    assert "mean" in repr(loss)


class GoesOn(nn.Module):
    """A layer reads the losses of samples."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.other, self.last = (nn.Linear(D, D) for _ in range(3))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.loss(self.first(x), self.other(x)))


@pytest.mark.parametrize("number", [1, N])
@pytest.mark.parametrize("converter", [True, "record"])
@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(reduction="none"),
        lambda x, y: F.mse_loss(x, y.detach(), reduction="none"),
        lambda x, y: F.smooth_l1_loss(x.T, y.T, reduction="none").T,
        lambda x, y: F.cross_entropy(x, y.argmax(1), reduction="none")[:, None],
        lambda x, y: F.triplet_margin_loss(x, y, x * 2, reduction="none")[:, None],
    ],
)
def test_network_goes_on_with_losses(
    loss: Callable[..., Tensor], converter: Any, number: int
) -> None:
    torch.manual_seed(0)
    model = GoesOn(loss).double()
    X, y = torch.randn(number, D).double(), torch.randn(number, D).double()
    extended = extend(copy.deepcopy(model), use_converter=converter)
    with backpack(extensions.BatchDiagGGNExact(), extensions.DiagHessian()):
        extend(nn.MSELoss())(extended(X), y).backward()
    for p, ggn, hessian in zip(
        extended.parameters(),
        oracle.batch_ggn_diag(model, nn.MSELoss(), X, y),
        oracle.hessian_diag(model, nn.MSELoss(), X, y),
        strict=True,
    ):
        if p.grad is not None:
            torch.testing.assert_close(p.diag_ggn_exact_batch, ggn)
            torch.testing.assert_close(p.diag_h, hessian)


def test_unreduced_losses_are_refused() -> None:
    for cls, settings in TABLE.items():
        setting = settings[0]
        if "reduction" in setting.options or setting.reductions == (None,):
            continue
        with pytest.raises(ValueError, match=f"scalar loss.*{cls.__name__}"):
            model, loss = extend(network(setting)), extend(setting.build("none"))
            value = loss(model(data()), *setting.arguments())
            with backpack(extensions.DiagHessian()):
                value.sum().backward()


# --------------------------------------------------------------------------------------
# Networks that mix samples, and rows
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "target"),
    [(nn.HuberLoss(), real), (LogSumExp(), real), (Focal(), label)],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_batch_normalisation(loss: nn.Module, target: Target) -> None:
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(INPUTS, D), nn.BatchNorm1d(D), nn.Tanh(), nn.Linear(D, D))
    problem = model, loss, data(), *target(torch.zeros(N, D))
    params = run(model, loss, problem[3:], extensions.DiagHessian(), extensions.HMP())
    same([p.diag_h for p in params], oracle.hessian_diag(*problem))
    same([as_matrix(p.hmp, p) for p in params], oracle.hessian_blocks(*problem))
    if isinstance(loss, Focal):
        return
    params = run(model, loss, problem[3:], extensions.DiagGGNExact(), extensions.GGNMP())
    same([p.diag_ggn_exact for p in params], oracle.joint_ggn_diag(*problem))
    same([as_matrix(p.ggnmp, p) for p in params], oracle.joint_ggn_blocks(*problem))


@pytest.mark.parametrize("options", [{}, {"ignore_index": 1}], ids=str)
def test_rows_of_a_sample(options: dict[str, Any]) -> None:
    """The loss sees ``[N T, C]`` of a ``[N, T, C]`` output; a sample has all rows of its own."""
    T = 3
    X, y = torch.randn(N, T, INPUTS), torch.randint(0, D, (N * T,))
    values = []
    for last, loss in (
        (nn.LogSoftmax(1), nn.NLLLoss(**options)),
        (nn.Identity(), nn.CrossEntropyLoss(**options)),
    ):
        torch.manual_seed(11)
        model, after = extend(nn.Sequential(nn.Linear(INPUTS, D), nn.Tanh())), extend(last)
        value = extend(loss)(after(model(X).view(-1, D)), y)
        exts = [extensions.BatchDiagGGNExact, extensions.BatchDiagGGNMC, extensions.DiagGGNMC]
        with backpack(*(ext() for ext in [*exts, extensions.GGNMP, extensions.BatchDiagHessian])):
            value.backward()
        names = "diag_ggn_exact_batch", "diag_ggn_mc_batch", "diag_ggn_mc", "diag_h_batch"
        params: list[Any] = list(model.parameters())
        values.append(
            [getattr(p, name) for p in params for name in names]
            + [as_matrix(p.ggnmp, p) for p in params]
        )
    same(*values)


def test_sum_of_losses() -> None:
    """Convex and not, with factors of both signs: one Hessian."""
    model, y, t = network(SETTING), torch.randint(0, D, (N,)), torch.randn(N, D)
    extended = extend(copy.deepcopy(model))
    f = extended(data())
    value = extend(Focal())(f, y) + extend(nn.SmoothL1Loss())(f, t) - 2 * extend(nn.MSELoss())(f, t)
    with backpack(*(ext() for ext in HESSIAN)):
        value.backward()

    def lossfunc(f: Tensor, _: Any) -> Tensor:
        return Focal()(f, y) + nn.SmoothL1Loss()(f, t) - 2 * nn.MSELoss()(f, t)

    check_hessian(list(extended.parameters()), model, lossfunc, data(), None)


# --------------------------------------------------------------------------------------
# Rows that the network has chosen
# --------------------------------------------------------------------------------------


class Chooses(nn.Module):
    """A network whose output has some rows of its samples, in any order and number."""

    def __init__(self, setting: Setting, rows: tuple[list[int], ...]) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(INPUTS, math.prod(setting.shape)), setting.last()
        self.shape, self.rows = setting.shape, rows

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)[self.rows].reshape(N, *self.shape))


# several rows of a sample, or none; one, or none; one of each, in another order
CHOSEN = {
    "uneven": ((5, 3), ([4, 0, 0, 1], [2, 0, 1, 1])),
    "some": ((6,), ([5, 0, 2, 1],)),
    "permuted": ((N,), ([2, 0, 3, 1],)),
}


@pytest.mark.parametrize(
    ("setting", "reduction", "rows"),
    [
        pytest.param(setting, reduction, rows, id=f"{setting}-{reduction}-{rows}")
        for setting in SETTINGS
        for rows in CHOSEN
        for reduction in setting.reductions[: 2 if rows == "uneven" else 1]
    ],
)
def test_chosen_rows_are_those_of_the_loss(
    setting: Setting, reduction: str | None, rows: str
) -> None:
    """Curvature is that of a network that has just these rows as its data."""
    shape, chosen = CHOSEN[rows]
    X, arguments = torch.randn(*shape, INPUTS), setting.arguments()
    network = Chooses(setting, chosen)
    exts = [
        extensions.DiagGGNExact,
        extensions.GGNMP,
        extensions.KFLR,
        extensions.DiagHessian,
        extensions.HMP,
    ]
    # targets that are drawn for several rows of a sample have columns together
    exts += [extensions.DiagGGNMC] if setting.samples and rows != "uneven" else []

    def found(model: nn.Module, X: Tensor, ext: Any) -> list[Any]:
        torch.manual_seed(3)
        model, loss = extend(model, use_converter="record"), extend(setting.build(reduction))
        try:
            with backpack(ext()), warnings.catch_warnings():
                warnings.filterwarnings("error", ".*a hook")
                loss(model(X), *arguments).backward()
        except (ValueError, NotImplementedError) as error:
            return [type(error)]
        values = [getattr(p, ext().savefield) for p in model.parameters()]
        units = [torch.eye(p.numel()).reshape(-1, *p.shape) for p in model.parameters()]
        if ext in (extensions.GGNMP, extensions.HMP):
            return [v(unit) for v, unit in zip(values, units, strict=True)]
        return [v[0] if isinstance(v, list) else v for v in values]

    for ext in exts:
        alone = copy.deepcopy(network)
        alone.rows = (list(range(N)),)
        expected = found(alone, X[chosen], ext)
        for one, other in zip(found(network, X, ext), expected, strict=True):
            if isinstance(other, type):
                assert one is other
            else:
                close(one, other)


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("subsampling", [None, [1, 3], [3, 2, 0]])
@pytest.mark.parametrize(
    "loss", [nn.MSELoss, nn.CrossEntropyLoss, nn.GaussianNLLLoss], ids=lambda c: c.__name__
)
def test_slices_of_samples_with_different_numbers_of_rows(
    loss: Any, subsampling: list[int] | None, limit: int | None
) -> None:
    setting = TABLE[loss][0]
    shape, chosen = CHOSEN["uneven"]
    network = Chooses(setting, chosen)
    X, arguments = torch.randn(*shape, INPUTS), setting.arguments()
    lossfunc = setting.build("mean")
    f = network(X)
    H = torch.autograd.functional.hessian(lambda f: lossfunc(f, *arguments), f.detach())
    jacobians = oracle._jacobian(f, list(network.parameters()))
    expected = []
    for n in range(len(X)):  # rows of one sample
        own = torch.zeros(N, *f.shape[1:])
        own[[row for row, number in enumerate(chosen[0]) if number == n]] = 1
        own = torch.outer(own.flatten(), own.flatten()) * H.reshape(f.numel(), -1)
        expected.append([torch.einsum("ap,ab,bp->p", J, own, J) for J in jacobians])
    rows = range(len(X)) if subsampling is None else subsampling
    each, whole, root = (
        extensions.BatchDiagGGNExact(subsampling),
        extensions.DiagGGNExact(subsampling),
        extensions.SqrtGGNExact(subsampling),
    )
    model = extend(network, use_converter="record")
    with slice_bytes(limit), backpack(each, whole, root):
        extend(lossfunc)(model(X), *arguments).backward()
    for k, p in enumerate(model.parameters()):
        diagonals = torch.stack([expected[n][k].reshape(p.shape) for n in rows])
        close(p.diag_ggn_exact_batch, diagonals)
        close(p.diag_ggn_exact, diagonals.sum(0))
        close(p.sqrt_ggn_exact.square().sum(0), diagonals)


def test_products_of_samples_without_rows() -> None:
    """They are zero, also where a loss has to look at its prediction."""
    setting = TABLE[nn.NLLLoss][0]
    (samples,), chosen = CHOSEN["some"]
    model = extend(Chooses(setting, chosen), use_converter="record")
    lossfunc, rows = extend(setting.build("mean")), [3, 4]
    loss = lossfunc(model(torch.randn(samples, INPUTS)), *setting.arguments())
    rule, u = derivatives_of(lossfunc), torch.randn(2, len(rows), *setting.shape)
    for make in (rule.make_ggn_mat_prod, rule.make_hessian_mat_prod):
        assert not make(lossfunc, None, None)(u, rows).any()
    with backpack(extensions.GGNMP(subsampling=rows)):
        loss.backward()
    assert not any(p.ggnmp(torch.ones(1, *p.shape)).any() for p in model.parameters())


def test_weighted_loss_of_chosen_rows() -> None:
    setting = TABLE[nn.CrossEntropyLoss][0]
    shape, chosen = CHOSEN["uneven"]
    network, X = Chooses(setting, chosen), torch.randn(*shape, INPUTS)
    arguments = (*setting.arguments(), torch.rand(N))
    reducing, found = nn.CrossEntropyLoss(reduction="none"), []
    for rows, data in ((chosen, X), ((list(range(N)),), X[chosen])):
        model = copy.deepcopy(network)
        model.rows = rows
        model, loss = extend(model, use_converter="record"), WeightedLoss(reducing)
        with backpack(extensions.DiagGGNExact()):
            extend(loss)(model(data), *arguments).backward()
        found.append([p.diag_ggn_exact for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        close(one, other)


def test_averages_over_chosen_rows_are_refused() -> None:
    """KFRA averages over the samples, of which some have no row."""
    network = extend(nn.Sequential(nn.Linear(INPUTS, D), nn.Linear(D, D)), use_converter="record")

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)[:2]

    model = extend(First(), use_converter="record")
    with pytest.raises(ValueError, match="chosen rows"), backpack(extensions.KFRA()):
        extend(nn.MSELoss())(model(torch.randn(N, INPUTS)), torch.randn(2, D)).backward()

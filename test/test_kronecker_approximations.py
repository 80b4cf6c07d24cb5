"""KFAC-expand and KFAC-reduce: the factors by definition, and networks for which they are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from seen import seen
from torch import Tensor, einsum, nn

from backpack import backpack, extend
from backpack.core.derivatives import derivatives_of
from backpack.custom_module.permute import Permute
from backpack.extensions import EKFAC, HBP, KFAC, KFLR, KFRA, SqrtGGNExact
from backpack.utils.kroneckers import kfacs_to_mat
from backpack.utils.subsampling import subsample

N, V = 3, 2
APPROXIMATIONS = [None, "expand", "reduce"]

CALLS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(4, 3), (4,)),
    (nn.Linear(4, 3), (5, 4)),
    (nn.Linear(4, 3, bias=False), (2, 3, 4)),
    (nn.Conv1d(2, 3, 2, stride=2, padding=1), (2, 5)),
    (nn.Conv2d(2, 4, (3, 2), groups=2), (2, 4, 3)),
    (nn.Conv2d(2, 2, 3, padding="same", padding_mode="circular"), (2, 3, 3)),
    (nn.Conv3d(1, 2, 2), (1, 3, 2, 2)),
    (nn.ConvTranspose1d(2, 3, 3, stride=2), (2, 4)),
    (nn.ConvTranspose2d(2, 4, 2, groups=2, padding=1), (2, 3, 2)),
]


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)


# --------------------------------------------------------------------------------------
# The rule, by definition
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "shape"), CALLS, ids=str)
@pytest.mark.parametrize("rows", [None, [2, 0], slice(1, None)], ids=str)
def test_factors(module: nn.Module, shape: tuple[int, ...], rows: Any) -> None:
    torch.manual_seed(0)
    module = extend(module.double())
    out = module(torch.randn(N, *shape, dtype=torch.float64).requires_grad_())
    rule: Any = derivatives_of(module)
    s = torch.randn(V, *subsample(out, subsampling=rows).shape, dtype=out.dtype)
    c = seen(module, rows)
    x = c.x.detach()
    patches = oracle.unfold_input(module, x).permute(0, 1, 3, 2)  # [N, G, T, I]
    num_n, groups, num_t, _ = patches.shape
    outer = einsum("ngti,ngtj->ij", patches, patches) / groups
    sums = einsum("ngti,nguj->ij", patches, patches) / groups
    inputs = {
        None: outer / num_n,
        "expand": outer / (num_n * num_t),
        "reduce": sums / (num_n * num_t**2),
    }
    # [V, N, T, O]
    at_positions = s if isinstance(module, nn.Linear) else s.flatten(3).mT
    at_positions = at_positions.reshape(V, num_n, num_t, -1)

    for name, p in module.named_parameters():
        shared = name == "weight" and isinstance(module, oracle.CONV_TRANSPOSE)
        for approximation in APPROXIMATIONS:
            found = rule.kron_rows(c, name, s, approximation)
            factors = rule.kron_inputs(c, name, approximation)
            if approximation == "expand":
                expected = at_positions.flatten(1, 2)
            else:
                expected = at_positions.sum(2)
            close(found, expected.unflatten(2, (module.groups if shared else 1, -1)))
            assert len(factors) == (p.dim() > 1)
            for factor in factors:
                close(factor, inputs[approximation])


# --------------------------------------------------------------------------------------
# Exactness
# --------------------------------------------------------------------------------------


def factors(
    ext: HBP, model: nn.Module, lossfunc: nn.Module, X: Tensor, y: Tensor
) -> list[list[Tensor]]:
    """Run an extension; return its result for every parameter."""
    extend(model), extend(lossfunc)
    torch.manual_seed(1)
    loss = lossfunc(model(X), y)
    with backpack(ext):
        loss.backward()
    return [getattr(p, ext.savefield) for p in model.parameters()]


def blocks(model: nn.Module, lossfunc: nn.Module, X: Tensor, y: Tensor) -> list[Tensor]:
    """Return the blocks of the GGN, indexed as the Kronecker factors are."""
    result = oracle.ggn_blocks(model, lossfunc, X, y)
    for i, p in enumerate(model.parameters()):
        owner = next(m for m in model.modules() if any(q is p for q in m._parameters.values()))
        if isinstance(owner, oracle.CONV_TRANSPOSE) and p.dim() > 1:  # [I, O, *k] to [O, I, *k]
            order = torch.arange(p.numel()).reshape(p.shape).transpose(0, 1).flatten()
            result[i] = result[i][order][:, order]
    return result


def problem(
    make: Callable[[], nn.Module], *shape: int, tokens: int = 0, reduction: str = "mean"
) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Return a model, the squared error, an input ``[N, *shape]`` and a target."""
    torch.manual_seed(0)
    model = make().double()
    X = torch.randint(tokens, (N, *shape)) if tokens else torch.randn(N, *shape).double()
    return model, nn.MSELoss(reduction=reduction), X, torch.randn_like(model(X).detach())


def position_by_position() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False), nn.Linear(2, 2))


def pixel_by_pixel() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1))


def average_over_positions() -> nn.Module:
    layers = [nn.Linear(4, 3), nn.Linear(3, 2), Permute(0, 2, 1), nn.AdaptiveAvgPool1d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2, 2))


def image_classifier(*convolutions: nn.Module) -> nn.Module:
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))


EXPAND = {
    "linear": lambda: problem(position_by_position, 5, 4),
    "linear-sum": lambda: problem(position_by_position, 5, 4, reduction="sum"),
    "more-axes": lambda: problem(position_by_position, 2, 3, 4),
    "conv-1x1": lambda: problem(pixel_by_pixel, 2, 3, 2),
    "conv-3x3-alone": lambda: problem(lambda: nn.Conv2d(2, 3, 3, padding=1), 2, 3, 4),
    "embedding": lambda: problem(
        lambda: nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), 5, tokens=7
    ),
    "embedding-padding": lambda: problem(
        lambda: nn.Sequential(nn.Embedding(4, 3, padding_idx=1), nn.Linear(3, 2)), 5, tokens=4
    ),
}
REDUCE = {
    "linear": lambda: problem(average_over_positions, 5, 4),
    "linear-sum": lambda: problem(average_over_positions, 5, 4, reduction="sum"),
    "conv-1x1": lambda: problem(lambda: image_classifier(nn.Conv2d(2, 3, 1)), 2, 3, 2),
    "conv-3x3": lambda: problem(
        lambda: image_classifier(nn.Conv2d(2, 3, 3, stride=2, padding=1)), 2, 5, 4
    ),
    "conv-transpose": lambda: problem(
        lambda: image_classifier(nn.ConvTranspose2d(2, 3, 2, stride=2)), 2, 2, 3
    ),
    "embedding": lambda: problem(
        lambda: nn.Sequential(nn.Embedding(7, 4), average_over_positions()), 5, tokens=7
    ),
}
EXACT = [("expand", name) for name in EXPAND] + [("reduce", name) for name in REDUCE]


@pytest.mark.parametrize(("approximation", "name"), EXACT)
def test_exact(approximation: Any, name: str) -> None:
    model, lossfunc, X, y = (EXPAND if approximation == "expand" else REDUCE)[name]()
    expected = blocks(model, lossfunc, X, y)
    found = factors(KFLR(approximation=approximation), model, lossfunc, X, y)
    for lists, block in zip(found, expected, strict=True):
        close(kfacs_to_mat(lists), block)


@pytest.mark.parametrize(("approximation", "name"), EXACT)
def test_they_differ(approximation: Any, name: str) -> None:
    """The other approximations are not exact for these networks: the test above tells."""
    model, lossfunc, X, y = (EXPAND if approximation == "expand" else REDUCE)[name]()
    expected = blocks(model, lossfunc, X, y)
    for other in {*APPROXIMATIONS} - {approximation}:
        found = factors(KFLR(approximation=other), model, lossfunc, X, y)
        errors = [
            (kfacs_to_mat(lists) - block).norm() / block.norm()
            for lists, block in zip(found, expected, strict=True)
        ]
        assert max(errors) > 0.05


@pytest.mark.parametrize(("approximation", "name"), EXACT)
def test_sampled(approximation: Any, name: str) -> None:
    """KFAC has the same input factors, and an estimate of the other one."""
    model, lossfunc, X, y = (EXPAND if approximation == "expand" else REDUCE)[name]()
    exact = factors(KFLR(approximation=approximation), model, lossfunc, X, y)
    found = factors(KFAC(5000, approximation=approximation), model, lossfunc, X, y)
    first = ["embedding" in name, *[False] * (len(exact) - 1)]
    for mine, theirs, input_first in zip(found, exact, first, strict=True):
        if len(mine) > 1:
            i = 0 if input_first else 1
            close(mine[i], theirs[i])
        B, estimate = (f[-1 if input_first else 0] for f in (theirs, mine))
        assert (estimate - B).norm() < 0.1 * B.norm()


# --------------------------------------------------------------------------------------
# Conventions
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ext", [KFLR, lambda **options: KFAC(2, **options)])
def test_one_position(ext: Any) -> None:
    """Nothing to approximate: all agree."""

    def run(**options: Any) -> list[list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        X, y = torch.randn(N, 4).double(), torch.tensor([0, 2, 1])
        return factors(ext(**options), model, nn.CrossEntropyLoss(), X, y)

    default = run()
    for approximation in APPROXIMATIONS:
        for mine, theirs in zip(run(approximation=approximation), default, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                close(one, other)


@pytest.mark.parametrize("name", ["linear", "conv-3x3", "conv-transpose"])
def test_default(name: str) -> None:
    """Rows are summed, inputs are not: the values that users have had so far."""
    model, lossfunc, X, y = REDUCE[name]()
    expected = oracle.kflr(model, lossfunc, X, y)
    for ext in (KFLR(), KFLR(approximation=None)):
        for mine, theirs in zip(factors(ext, model, lossfunc, X, y), expected, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                close(one, other)


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_subsampling(approximation: Any) -> None:
    """Factors of a part of the batch: those of that part alone, with the scale of the batch."""
    model, lossfunc, X, y = EXPAND["linear-sum"]()
    rows = [2, 0]
    found = factors(KFLR(rows, approximation), model, lossfunc, X, y)
    expected = factors(KFLR(approximation=approximation), model, lossfunc, X[rows], y[rows])
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            close(one, other)


def test_several_at_once() -> None:
    """One backward pass serves extensions with different approximations."""
    model, lossfunc, X, y = EXPAND["linear"]()
    alone = {
        approximation: factors(KFLR(approximation=approximation), model, lossfunc, X, y)
        for approximation in APPROXIMATIONS
    }
    strategies = ("GGN", "EXACT", "SQRT", "BOTEV_MARTENS")
    exts = {a: HBP(*strategies, savefield=f"hbp_{a}", approximation=a) for a in APPROXIMATIONS}
    with backpack(*exts.values()):
        lossfunc(model(X), y).backward()
    for approximation, ext in exts.items():
        for p, theirs in zip(model.parameters(), alone[approximation], strict=True):
            for one, other in zip(getattr(p, ext.savefield), theirs, strict=True):
                close(one, other)


@pytest.mark.parametrize("ext", [KFAC, KFLR])
@pytest.mark.parametrize("wrong", ["Expand", "", "none", True])
def test_unknown_approximation(ext: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match="None, 'expand' or 'reduce'"):
        ext(approximation=wrong)


def test_batch_average_has_none() -> None:
    with pytest.raises(TypeError, match="approximation"):
        KFRA(approximation="expand")  # type: ignore[call-arg]
    for approximation in ("expand", "reduce"):
        with pytest.raises(ValueError, match="averaged over the batch"):
            HBP(
                "GGN",
                "AVERAGE",
                "BATCH_AVERAGE",
                "BOTEV_MARTENS",
                approximation=approximation,  # type: ignore[arg-type]
            )


@pytest.mark.parametrize("num_n", [1, N])
def test_batch_average_of_a_layer_that_is_used_twice(num_n: int) -> None:
    """Uses are summed first, as positions are: B has what two of them have together."""
    torch.manual_seed(0)
    layer, between = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    model = extend(nn.Sequential(layer, nn.Tanh(), between, layer))
    X, y = torch.rand(num_n, 3, dtype=torch.float64), torch.rand(num_n, 3, dtype=torch.float64)
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    with backpack(KFRA(), KFLR()):
        lossfunc(model(X), y).backward()
    last = layer.weight @ between.weight
    above = 2 * num_n * torch.eye(3, dtype=torch.float64)  # Hessian of the loss, summed
    slopes = 1 - layer(X).tanh().square()
    first = (slopes.T @ slopes / num_n) * (last.T @ above @ last)
    across = above @ last @ slopes.mean(0).diag()
    expected = above + first + across + across.T
    for p in (layer.weight, layer.bias):
        close(p.kfra[0], expected)
    if num_n == 1:
        for p in model.parameters():
            for one, other in zip(p.kfra, p.kflr, strict=True):
                close(one, other)


class Frames(nn.Module):
    """A layer that has T positions of each sample in the axis of samples, [N, T, *] as [N·T, *]."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x.flatten(0, 1))
        z = z.flatten(2).mean(2) if z.dim() > 2 else z
        return self.last(z.tanh().reshape(len(x), -1, 4).mean(1))


FRAMES: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(3, 4), (N, 5, 3)),
    (nn.Embedding(6, 4), (N, 5)),
    (nn.Conv1d(2, 4, 2, groups=2), (N, 5, 2, 3)),
    (nn.ConvTranspose1d(2, 4, 2), (N, 5, 2, 3)),
]


def data_for(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Tokens for an embedding, else numbers."""
    torch.manual_seed(0)
    is_embedding = isinstance(layer, nn.Embedding)
    return torch.randint(6, shape) if is_embedding else torch.rand(shape, dtype=torch.float64)


def inputs_at_positions(layer: nn.Module, x: Tensor) -> Tensor:
    """What a weight is multiplied with: [N', G, T, I]."""
    if isinstance(layer, nn.Embedding):
        return nn.functional.one_hot(x, layer.num_embeddings).double().reshape(len(x), 1, -1, 6)
    if isinstance(layer, nn.Linear):
        return x.reshape(len(x), 1, -1, x.shape[-1])
    return oracle.unfold_input(layer, x).permute(0, 1, 3, 2)


# Layers that have factors of weight and bias together
JOINT = (nn.Linear, nn.Conv1d)
JOINT_FRAMES = [
    *((layer, shape, False) for layer, shape in FRAMES),
    *((layer, shape, True) for layer, shape in FRAMES if isinstance(layer, JOINT)),
]


@pytest.mark.parametrize(("layer", "shape", "joint_bias"), JOINT_FRAMES, ids=str)
@pytest.mark.parametrize("max_factor_size", [None, 1])
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_positions_in_the_axis_of_samples(
    layer: nn.Module,
    shape: tuple[int, ...],
    approximation: Any,
    joint_bias: bool,
    max_factor_size: int | None,
) -> None:
    X = data_for(layer, shape)
    model, lossfunc = extend(Frames(layer).double(), use_converter=True), extend(nn.MSELoss())
    options: Any = {"joint_bias": joint_bias, "max_factor_size": max_factor_size}
    with backpack(KFLR(approximation=approximation, **options)):
        lossfunc(model(X), torch.zeros(N, 2, dtype=torch.float64)).backward()
    found = layer.weight.kflr[0 if isinstance(layer, nn.Embedding) else 1]
    x = inputs_at_positions(layer, X.flatten(0, 1))  # [N·5, G, T, I]
    x = torch.cat([x, x.new_ones(*x.shape[:3], 1)], 3) if joint_bias else x
    x = x.unflatten(0, (N, -1)).transpose(1, 2).flatten(2, 3)  # [N, G, 5·T, I]
    rows = x.mean(2, keepdim=True) if approximation == "reduce" else x
    count = N * x.shape[1] * (x.shape[2] if approximation == "expand" else 1)
    expected = einsum("ngti,ngtj->ij", rows, rows) / count
    close(found, expected if found.dim() > 1 else expected.diagonal())


class ChosenFrames(Frames):
    """The same for some of the positions of each sample."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        z = self.layer(x[chosen])
        z = (z.flatten(2).mean(2) if z.dim() > 2 else z).tanh()
        return self.last(z.new_zeros(len(x), 4).index_add(0, chosen.nonzero()[:, 0], z))


@pytest.mark.parametrize(("layer", "shape", "joint_bias"), JOINT_FRAMES, ids=str)
@pytest.mark.parametrize("subsampling", [None, [2, 0]], ids=str)
@pytest.mark.parametrize("counts", [(4, 2, 1), (2, 0, 1), (1, 1, 0)], ids=str)
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_samples_with_different_numbers_of_positions(
    layer: nn.Module,
    shape: tuple[int, ...],
    approximation: Any,
    counts: tuple[int, ...],
    subsampling: list[int] | None,
    joint_bias: bool,
) -> None:
    """Positions that a sample does not have are none, and not zeros (or the first token)."""
    X = data_for(layer, shape)
    chosen = torch.arange(5) < torch.tensor(counts).unsqueeze(1)
    model, lossfunc = ChosenFrames(layer).double(), extend(nn.MSELoss())
    model = extend(model, use_converter="record")
    ext = KFLR(approximation=approximation, subsampling=subsampling, joint_bias=joint_bias)
    with backpack(ext):
        lossfunc(model(X, chosen), torch.zeros(N, 2, dtype=torch.float64)).backward()
    found = layer.weight.kflr[0 if isinstance(layer, nn.Embedding) else 1]
    samples = subsampling or range(N)
    each = [inputs_at_positions(layer, X[n][chosen[n]]) for n in samples if counts[n]]
    each = [x.transpose(0, 1).flatten(1, 2) for x in each]  # [G, T_n, I]
    if joint_bias:
        each = [torch.cat([x, x.new_ones(*x.shape[:2], 1)], 2) for x in each]
    if approximation == "reduce":
        each = [x.mean(1, keepdim=True) for x in each]
    rows, groups = torch.cat(each, 1).flatten(0, 1), len(each[0])
    count = len(rows) if approximation == "expand" else len(samples) * groups
    expected = rows.T @ rows / count
    close(found, expected if found.dim() > 1 else expected.diagonal())


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.RMSNorm(4), nn.PReLU(4)], ids=str)
def test_blocks_of_positions_in_the_axis_of_samples(layer: nn.Module) -> None:
    """A parameter that has no factor of its inputs has the block for "reduce", too."""
    shape = N, 5, 4
    found = []
    for approximation in (None, "reduce"):
        X = data_for(layer, shape)
        model = extend(Frames(layer).double(), use_converter=True)
        with backpack(KFLR(approximation=approximation)):
            extend(nn.MSELoss())(model(X), torch.zeros(N, 2, dtype=torch.float64)).backward()
        found.append([p.kflr[0] for p in layer.parameters()])
        assert all(len(p.kflr) == 1 for p in layer.parameters())
    torch.testing.assert_close(*found)


class Pair(nn.Module):
    """A layer that is used at several positions of one input, and fewer of another."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        few = x[..., :2]
        pooled = [self.layer(part).reshape(len(x), 4, -1).mean(2) for part in (x, few)]
        return self.last(pooled[0].tanh() * pooled[1])


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Embedding(6, 4), (N, 5)), (nn.Conv1d(2, 4, 2), (N, 2, 5))], ids=str
)
@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_uses_at_different_numbers_of_positions(
    layer: nn.Module, shape: tuple[int, ...], approximation: Any
) -> None:
    """The average is over all positions, not over the averages of the uses."""
    X = data_for(layer, shape)
    model, lossfunc = extend(Pair(layer).double(), use_converter=True), extend(nn.MSELoss())
    with backpack(KFLR(approximation=approximation)):
        lossfunc(model(X), torch.zeros(N, 2, dtype=torch.float64)).backward()
    x = torch.cat([inputs_at_positions(layer, part) for part in (X, X[..., :2])], 2)
    rows = (x if approximation == "expand" else x.mean(2)).flatten(0, -2)
    close(layer.weight.kflr[0 if isinstance(layer, nn.Embedding) else 1], rows.T @ rows / len(rows))


def test_uses_of_other_numbers_of_rows() -> None:
    """Behind the first use, the positions are in the axis of samples."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    model = extend(nn.Sequential(layer, nn.Tanh(), nn.Flatten(0, 1), layer))
    X = torch.rand(N, 5, 3, dtype=torch.float64)
    with backpack(KFLR()):
        extend(nn.CrossEntropyLoss())(model(X), torch.zeros(N * 5, dtype=torch.int64)).backward()
    rows = torch.cat([X, layer(X).tanh()], 1).flatten(0, 1)
    close(layer.weight.kflr[1], rows.T @ rows / N)


@pytest.mark.parametrize("fisher", ["exact", "inputs"])
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_inputs_of_a_network_that_mixes_samples(approximation: Any, fisher: Any) -> None:
    """They are those of a network that does not."""
    torch.manual_seed(0)
    layer = nn.Conv1d(2, 3, 2).double()
    model = nn.Sequential(layer, nn.BatchNorm1d(3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2))
    X = torch.rand(N, 2, 4, dtype=torch.float64)
    model, lossfunc = extend(model.double()), extend(nn.MSELoss())
    found = []
    for is_training in (True, False):
        model.train(is_training)
        with backpack(KFAC(approximation=approximation, fisher=fisher)):
            lossfunc(model(X), torch.zeros(N, 2, dtype=torch.float64)).backward()
        found.append(layer.weight.kfac[1])
    close(*found)


def test_losses_that_ignore_different_targets() -> None:
    """Of one prediction, a position counts for any of them; of several, it is not known."""
    layer, X = extend(nn.Linear(4, 3).double()), torch.rand(N, 5, 4, dtype=torch.float64)
    head = extend(nn.Linear(3, 3).double())
    loss = extend(nn.CrossEntropyLoss(ignore_index=-1))
    targets = torch.arange(N * 5) % 3
    others = targets.where(torch.arange(N * 5) % 4 > 0, torch.tensor(-1))
    some = targets.where(torch.arange(N * 5) % 3 > 0, torch.tensor(-1))
    h, used = layer(X).flatten(0, 1), torch.arange(N * 5) % 12 > 0
    for many, rows in ((targets, X.flatten(0, 1)), (some, X.flatten(0, 1)[used])):
        with backpack(KFLR(approximation="expand"), retain_graph=True):
            (loss(h, many) + loss(h, others)).backward(retain_graph=True)
        close(layer.weight.kflr[1], rows.T @ rows / len(rows))
    with (
        backpack(KFLR(approximation="expand")),
        pytest.raises(ValueError, match=r"kflr: approximation='expand'.*losses ignore different"),
    ):
        (loss(h, targets) + loss(head(h), others)).backward()


def test_a_part_of_the_batch_whose_targets_are_all_ignored() -> None:
    layer, X = extend(nn.Linear(4, 3).double()), torch.rand(N, 5, 4, dtype=torch.float64)
    loss = extend(nn.CrossEntropyLoss(ignore_index=-1, reduction="sum"))
    ignored, targets = torch.full((N * 5,), -1), torch.arange(N * 5) % 3
    for y in (ignored, targets):
        with backpack(KFLR(approximation="expand"), accumulate=True):
            loss(layer(X).flatten(0, 1), y).backward()
    rows = X.flatten(0, 1)
    close(layer.weight.kflr[1], rows.T @ rows / len(rows))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factor_of_many_patches_in_low_precision(dtype: torch.dtype) -> None:
    """The sum over all of them may exceed the largest number of half precision."""
    body = nn.Conv2d(1, 1, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2)
    model = extend(nn.Sequential(*body).to(dtype))
    X = 1 + torch.rand(N, 1, 160, 160).to(dtype)
    loss = extend(nn.CrossEntropyLoss())(model(X), torch.arange(N) % 2)
    with backpack(KFLR()):
        loss.backward()
    rows = nn.functional.unfold(X.double(), 2).mT.flatten(0, 1)
    factor = model[0].weight.kflr[1]
    assert factor.dtype == dtype
    torch.testing.assert_close(factor.double(), rows.T @ rows / N, rtol=5e-3, atol=0)


class Table(nn.Module):
    """Scales the data by a layer of a table, which is the same for all samples."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.first, self.head = layer, nn.Linear(5, 5), nn.Linear(20, 2)
        self.register_buffer("table", torch.randn(1, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.first(x) * self.layer(self.table)).flatten(1))


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("joint_bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_block_of_a_convolution_without_samples(
    approximation: Any, joint_bias: bool, groups: int
) -> None:
    """The exact block stands for its Kronecker factors, and its bias has a block of its own."""
    torch.manual_seed(0)
    model = Table(nn.Conv1d(4, 4, 3, padding=1, groups=groups)).double()
    model, X = extend(model, use_converter=True), torch.rand(N, 4, 5, dtype=torch.float64)
    exact = KFLR(approximation=approximation, joint_bias=joint_bias)
    ekfac = EKFAC(fisher="exact", approximation=approximation, joint_bias=joint_bias)
    with backpack(exact, KFRA(), ekfac, SqrtGGNExact()):
        extend(nn.CrossEntropyLoss())(model(X), torch.arange(N) % 2).backward()
    for p in model.layer.parameters():
        root = p.sqrt_ggn_exact.flatten(0, 1).flatten(1)
        block = root.T @ root
        close(kfacs_to_mat(p.kflr), block)
        close(p.ekfac.dense(), block)
        assert [factor.shape for factor in p.kfra] == [block.shape]


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": lambda table: table.expand(N, -1, -1),
    "stack": lambda table: torch.stack([table[0]] * N),
    "cat": lambda table: torch.cat([table] * N),
    "cat of views": lambda table: torch.cat([table[:1] for _ in range(N)]),
}


@pytest.mark.parametrize("converter", [True, "record", False])
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_a_buffer_are_rows_of_samples(name: str, converter: Any) -> None:
    """Where functions are recorded, the factor was N times as large for those that were joined."""

    class Copied(Table):
        def forward(self, x: Tensor) -> Tensor:
            copies = COPIES[name](self.table)
            return self.head((self.first(x) + self.layer(copies)).flatten(1))

    model, X = Copied(nn.Linear(5, 5)).double(), torch.rand(N, 4, 5, dtype=torch.float64)
    loss = extend(nn.CrossEntropyLoss())(
        extend(model, use_converter=converter)(X), torch.arange(N) % 2
    )
    with backpack(KFLR()):
        loss.backward()
    close(model.layer.weight.kflr[1], model.table[0].T @ model.table[0])

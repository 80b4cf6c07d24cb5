"""Random layers, losses and graphs of modules against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from cases import (
    Case,
    binary,
    labels,
    labels_with,
    loss_case,
    module_case,
    network,
    probabilities,
    random_dag,
    real,
    soft_binary,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_quantities import TOLERANCE, run
from torch import Tensor, nn

from backpack import extensions

pytestmark = pytest.mark.slow

Draw = Callable[[st.SearchStrategy], Any]


def examples(number: int) -> settings:
    """Return settings for tests of models: always the same examples, as slow as they are."""
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def agrees(case: Case, reference: Case | None = None) -> None:
    """Compare a case's quantities with the oracle's (of an equal model that it understands)."""
    exts = [
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.DiagGGNExact(),
        extensions.BatchDiagGGNExact(),
        extensions.KFLR(),
        extensions.DiagHessian(),
        extensions.GGNMP(),
        extensions.HMP(),
    ]
    params = run(case.build(), *exts)
    truths = [
        function(*(reference or case).build())
        for function in (
            oracle.batch_grad,
            oracle.batch_ggn_diag,
            oracle.kflr,
            oracle.ggn_blocks,
            oracle.hessian_blocks,
        )
    ]
    for p, grads, ggn_diag, factors, ggn, hessian in zip(params, *truths, strict=True):
        close(p.grad_batch, grads)
        close(p.batch_l2, grads.square().flatten(1).sum(1))
        close(p.diag_ggn_exact_batch, ggn_diag)
        close(p.diag_ggn_exact, ggn_diag.sum(0))
        assert len(p.kflr) == len(factors)
        for mine, factor in zip(p.kflr, factors, strict=True):
            close(mine, factor)
        close(p.diag_h, hessian.diagonal().reshape(p.shape))
        v = torch.randn(2, *p.shape, dtype=p.dtype)
        close(p.ggnmp(v), (v.flatten(1) @ ggn).reshape(v.shape))
        close(p.hmp(v), (v.flatten(1) @ hessian).reshape(v.shape))


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, **TOLERANCE)


# --------------------------------------------------------------------------------------
# Layers
# --------------------------------------------------------------------------------------


def ints(draw: Draw, dims: int, low: int, high: int) -> tuple[int, ...]:
    """Draw a number for each axis."""
    return tuple(draw(st.integers(low, high)) for _ in range(dims))


def span(kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """Return the extent of a dilated kernel."""
    return [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]


def small(case: Case, entries: int = 48) -> Case:
    """Leave out what makes the oracle slow, and maxima over padding alone (they are -inf)."""
    model, _, X, _ = case.build()
    outputs: list[Tensor] = []
    for m in model.modules():
        m.register_forward_hook(lambda m, args, out: outputs.append(out))
    model(X)
    assume(max(out[0].numel() for out in outputs) <= entries)
    assume(all(out.isfinite().all() for out in outputs))
    return case


@st.composite
def linear(draw: Draw) -> Case:
    *extra, features = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shape = (*extra, features)
    return module_case(
        nn.Linear, shape, features, draw(st.integers(1, 3)), bias=draw(st.booleans())
    )


@st.composite
def convolution(draw: Draw) -> Case:
    dims = draw(st.sampled_from([1, 1, 2, 2, 3]))
    kernel, dilation = ints(draw, dims, 1, 3), ints(draw, dims, 1, 2 if dims > 1 else 3)
    stride = ints(draw, dims, 1, 4)
    padding: Any = draw(st.sampled_from(["same", "valid", "numbers", "numbers"]))
    if padding == "numbers":
        padding = ints(draw, dims, 0, 2)
    if padding == "same":
        stride = (1,) * dims
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]))
    groups = draw(st.integers(1, 2))
    per_group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    margin = padding if isinstance(padding, tuple) else (0,) * dims
    reach = (
        [d * (k - 1) // 2 + 2 for k, d in zip(kernel, dilation, strict=True)]
        if padding == "same"
        else [max(s - 2 * p, p + 1) for s, p in zip(span(kernel, dilation), margin, strict=True)]
    )
    size = [max(1, r) + draw(st.integers(0, 2)) for r in reach]
    cls = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1]
    case = module_case(
        cls,
        (groups * per_group[0], *size),
        groups * per_group[0],
        groups * per_group[1],
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        padding_mode=mode,
        bias=draw(st.booleans()),
        first=draw(st.booleans()),
    )
    return small(case)


class WithOutputSize(nn.Module):
    """A transposed convolution that is told its output's size."""

    def __init__(self, conv: nn.Module, *size: int) -> None:
        super().__init__()
        self.conv = conv
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """[N, *] -> [N, *size]."""
        return self.conv(x, output_size=self.size)


@st.composite
def transposed_convolution(draw: Draw) -> tuple[Case, Case]:
    dims = draw(st.sampled_from([1, 1, 2, 2, 3]))
    kernel, dilation = ints(draw, dims, 1, 3), ints(draw, dims, 1, 3)
    stride = ints(draw, dims, 1, 4 if dims < 3 else 2)
    extra = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    x = ints(draw, dims, 1, 3 if dims < 3 else 2)
    plain = [(i - 1) * s + d for i, s, d in zip(x, stride, span(kernel, dilation), strict=True)]
    padding = [
        draw(st.integers(0, min(2, (size + e - 1) // 2)))
        for size, e in zip(plain, extra, strict=True)
    ]
    size = [size - 2 * p + e for size, p, e in zip(plain, padding, extra, strict=True)]
    groups = draw(st.integers(1, 2))
    channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    cls = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][dims - 1]
    features = channels[1] * torch.Size(size).numel()
    options = {
        "stride": stride,
        "padding": tuple(padding),
        "groups": groups,
        "bias": draw(st.booleans()),
        "dilation": dilation,
    }

    def around(conv: nn.Module) -> nn.Module:
        first = nn.Linear(x[-1], x[-1])
        return nn.Sequential(
            first, nn.Tanh(), conv, nn.Flatten(), nn.Tanh(), nn.Linear(features, 2)
        )

    def by_option() -> nn.Module:
        return around(cls(*channels, kernel, output_padding=tuple(extra), **options))

    def by_argument() -> nn.Module:
        return around(WithOutputSize(cls(*channels, kernel, **options), *size))

    name = f"{cls.__name__}({channels}, {kernel}, {extra}, {options}) on {x}"
    shape = (channels[0], *x)
    reference = small(network(name, by_option, shape))
    # the argument can ask for what output_padding can do, up to the stride
    if draw(st.booleans()) and all(e < s for e, s in zip(extra, stride, strict=True)):
        return network(f"{name} with output_size {size}", by_argument, shape), reference
    return reference, reference


@st.composite
def pooling(draw: Draw) -> Case:
    dims = draw(st.sampled_from([1, 2, 2, 3]))
    kind = draw(st.sampled_from(["MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool"]))
    cls = getattr(nn, f"{kind}{dims}d")
    channels = draw(st.integers(1, 2))
    if kind.startswith("Adaptive"):
        size = ints(draw, dims, 1, 5 if dims < 3 else 3)
        output = tuple(draw(st.integers(1, 4) | st.none()) for _ in range(dims))
        return small(module_case(cls, (channels, *size), output[0] or 2 if dims == 1 else output))

    kernel, stride = ints(draw, dims, 1, 3), ints(draw, dims, 1, 4)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    options: dict[str, Any] = {"stride": stride, "padding": padding}
    options["ceil_mode"] = draw(st.booleans())
    dilation = (1,) * dims
    if kind == "MaxPool":
        options["dilation"] = dilation = ints(draw, dims, 1, 2)
    else:
        options["count_include_pad"] = draw(st.booleans())
        if dims > 1:
            options["divisor_override"] = draw(st.none() | st.integers(1, 5))
    inside = 0 if cls is nn.AvgPool3d else 2  # torch's does not count the padding
    size = [
        max(1, s - inside * p) + draw(st.integers(0, 2))
        for s, p in zip(span(kernel, dilation), padding, strict=True)
    ]
    return small(module_case(cls, (channels, *size), kernel, **options))


@st.composite
def padding(draw: Draw) -> Case:
    dims = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["Zero", "Constant", "Reflection", "Replication", "Circular"]))
    cls = getattr(nn, f"{kind}Pad{dims}d")
    size = ints(draw, dims, 2, 3 if dims < 3 else 2)
    low = -1 if kind in ("Zero", "Constant") else 0
    widths = tuple(draw(st.integers(low, 1)) for _ in range(2 * dims))
    assume(
        all(n + a + b > 0 for n, a, b in zip(size[::-1], widths[::2], widths[1::2], strict=True))
    )
    value = [draw(st.sampled_from([0.5, -1.0]))] if kind == "Constant" else []
    return small(module_case(cls, (draw(st.integers(1, 2)), *size), widths, *value))


@given(linear())
@examples(40)
def test_linear(case: Case) -> None:
    agrees(case)


@given(convolution())
@examples(100)
def test_convolution(case: Case) -> None:
    agrees(case)


@given(transposed_convolution())
@examples(100)
def test_transposed_convolution(cases: tuple[Case, Case]) -> None:
    agrees(*cases)


@given(pooling())
@examples(80)
def test_pooling(case: Case) -> None:
    agrees(case)


@given(padding())
@examples(40)
def test_padding(case: Case) -> None:
    agrees(case)


# --------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------


@st.composite
def cross_entropy(draw: Draw) -> Case:
    classes = draw(st.integers(2, 4))
    shape = (classes, *draw(st.lists(st.integers(1, 2), max_size=2)))
    options: dict[str, Any] = {"label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0]))}
    if draw(st.booleans()):
        weights = st.lists(
            st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=classes, max_size=classes
        )
        options["weight"] = torch.tensor(draw(weights)) + 0.1
    target = draw(st.sampled_from(["labels", "ignored", "probabilities"]))
    functions = {"labels": labels, "probabilities": probabilities}
    if target == "ignored":
        options["ignore_index"] = index = draw(st.sampled_from([-100, -1, 0, classes - 1, classes]))
        functions["ignored"] = labels_with(index)
    reduction = draw(st.sampled_from(["mean", "sum"]))
    return loss_case(
        nn.CrossEntropyLoss, shape, functions[target], tags="", reduction=reduction, **options
    )


@st.composite
def binary_cross_entropy(draw: Draw) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    options: dict[str, Any] = {"reduction": draw(st.sampled_from(["mean", "sum"]))}
    for name in ("weight", "pos_weight"):
        if draw(st.booleans()):  # a tensor that broadcasts to the output
            axes = [draw(st.sampled_from([1, size])) for size in shape]
            if name == "weight" and draw(st.booleans()):
                axes = [3, *axes]
            values = torch.linspace(0, 2, torch.Size(axes).numel())  # an entry is 0
            options[name] = values.reshape(axes)
    target = draw(st.sampled_from([binary, soft_binary]))
    return loss_case(nn.BCEWithLogitsLoss, shape, target, tags="", **options)


@st.composite
def squared_error(draw: Draw) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    reduction = draw(st.sampled_from(["mean", "sum"]))
    return loss_case(nn.MSELoss, shape, real, tags="", reduction=reduction)


@given(cross_entropy())
@examples(100)
def test_cross_entropy(case: Case) -> None:
    agrees(case)


@given(binary_cross_entropy())
@examples(40)
def test_binary_cross_entropy(case: Case) -> None:
    agrees(case)


@given(squared_error())
@examples(12)
def test_squared_error(case: Case) -> None:
    agrees(case)


# --------------------------------------------------------------------------------------
# Structure
# --------------------------------------------------------------------------------------


@given(st.integers(6, 100_000))
@examples(80)
def test_random_dag(seed: int) -> None:
    agrees(random_dag(seed))

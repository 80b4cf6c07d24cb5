"""A database of models, inputs and losses; the tests are parametrised over it.

``CASES`` lists everything. A case is built by ``model, loss, X, y = case.build()``;
``case.reference()`` is an equal one that the oracle understands. Helpers (``module_case``,
``loss_case``, ``network``) make a new case one or two lines; ``random_dag(seed)`` makes one of
random structure.

Tags
    module, loss, network     what the case is about
    linear, conv, convtranspose, batchnorm, layernorm, pool, activation, dropout, reshape, pad,
    automatic                 family of the module under test
    recurrent                 contains a recurrent layer or cell
    embedding                 contains an embedding
    function                  contains functions or parameters as modules, or attention
    sequence                  the batch axis is not the first one of some module's tensors
    time_first                the model's output is [T, N, C]
    mse, ce, bce              kind of the loss under test
    nonsequential             the model is not a (nested) ``Sequential``
    tied                      a parameter is used several times (by calls or modules)
    branch                    a tensor has several consumers, or a module several inputs
    view                      the model's forward contains a view
    rows                      the loss sees ``f.view(-1, C)`` of a [N, T, C] output
    random                    dropout in training mode: seed before every forward pass
    mixing                    samples are mixed (BatchNorm in training mode)
    inplace                   contains an in-place module
    piecewise_linear          the model is piecewise linear (GGN = Hessian)
    frozen                    contains parameters that require no gradient
    unknown                   contains a module that the library does not know
    dag                       made by ``random_dag``
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from oracle import as_twin
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from backpack.custom_module.attention import ScaledDotProductAttention
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.function_module import FunctionModule, Slot
from backpack.custom_module.pad import Pad
from backpack.custom_module.parameter_module import ParameterModule
from backpack.custom_module.permute import Permute
from backpack.custom_module.products import MulModule
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.custom_module.stochastic_depth import StochasticDepth
from backpack.custom_module.transposed_linear import TransposedLinear

N = 3
Shape = tuple[int, ...]


class Problem(NamedTuple):
    """What a case builds."""

    model: nn.Module
    loss: nn.Module
    X: Tensor
    y: Tensor


@dataclass(frozen=True)
class Case:
    """A model, its input and its loss, all built on demand."""

    name: str
    model: Callable[[], nn.Module]
    input: Callable[[], Tensor]
    loss: Callable[[], nn.Module]
    target: Callable[[Tensor], Tensor]  # of the model's output
    tags: frozenset[str] = frozenset()
    train: bool = True

    def build(
        self,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> Problem:
        """Build the problem; the global random state is left alone."""
        device = torch.get_default_device() if device is None else device

        def cast(t: Tensor) -> Tensor:
            moved = t.detach().clone().to(device, dtype if t.is_floating_point() else None)
            return moved.requires_grad_(t.requires_grad)

        X, y = _data(self, seed, torch.get_default_dtype(), torch.get_default_device())
        with _own_random_state():
            torch.manual_seed(seed)
            model, loss = self.fresh_model(), self.loss()
        return Problem(model.to(device, dtype), loss.to(device, dtype), cast(X), cast(y))

    def fresh_model(self) -> nn.Module:
        """Return the model, drawn from the global random state."""
        model = self.model().train(self.train)
        _randomise_normalisation(model)
        return model

    def reference(self) -> Problem:
        """Build a problem of the same value, with the samples first in the model's output."""
        model, loss, X, y = self.build()
        model = as_twin(model)
        if "time_first" in self.tags:
            model, loss = BatchFirst(model), TimeFirst(loss)
        return Problem(model, loss, X, y)

    def __str__(self) -> str:
        return self.name


def _own_random_state() -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


@cache
def _data(case: Case, seed: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return input and target of what is made by default in ``dtype`` and on ``device``."""
    with _own_random_state(), torch.no_grad():
        torch.manual_seed(seed)
        model = case.fresh_model()
        X = case.input()
        return X, case.target(model(X))


@cache
def truth(function: Callable[..., Any], case: Case, seed: int = 1, **keywords: Any) -> Any:
    """Evaluate a function of the oracle, once in a process: its results are not to be changed."""
    problem = case.reference()
    torch.manual_seed(seed)
    return function(*problem, **keywords)


class BatchFirst(nn.Module):
    """Exchange the first two axes of a model's output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """[N, *] -> [N, T, C]."""
        return self.model(x).transpose(0, 1)


class TimeFirst(nn.Module):
    """A loss of the output with its first two axes exchanged."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute the loss of [N, T, C]."""
        return self.loss(f.transpose(0, 1).contiguous(), y)


def select(*tags: str, without: str = "") -> list[Case]:
    """Return the cases that have all ``tags`` and none of those in ``without``."""
    excluded = set(without.split())
    return [c for c in CASES if c.tags.issuperset(tags) and not c.tags & excluded]


def _randomise_normalisation(model: nn.Module) -> None:
    for m in model.modules():
        if isinstance(m, nn.LayerNorm) and m.elementwise_affine:
            nn.init.uniform_(m.weight, 0.5, 1.5)
            if m.bias is not None:
                nn.init.normal_(m.bias)
        if isinstance(m, _BatchNorm):
            if m.track_running_stats:
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 2.0)
            if m.affine:
                nn.init.uniform_(m.weight, 0.5, 1.5)
                nn.init.normal_(m.bias)


# --------------------------------------------------------------------------------------
# Targets, as functions of the model's output
# --------------------------------------------------------------------------------------


def labels(f: Tensor) -> Tensor:
    """Return class indices [N, *] for scores [N, C, *]."""
    return torch.randint(f.shape[1], (f.shape[0], *f.shape[2:]))


def labels_with(index: int) -> Callable[[Tensor], Tensor]:
    """Return a function for class indices, some of which are ``index`` (to be ignored)."""

    def target(f: Tensor) -> Tensor:
        y = labels(f)
        y.flatten()[1::3] = index  # a view: y is contiguous
        return y

    return target


def probabilities(f: Tensor) -> Tensor:
    """Return class probabilities of the shape of the scores."""
    return torch.randn_like(f).softmax(1)


def real(f: Tensor) -> Tensor:
    """Return targets for regression."""
    return torch.randn_like(f)


def soft_binary(f: Tensor) -> Tensor:
    """Return targets between 0 and 1."""
    return torch.rand_like(f)


def binary(f: Tensor) -> Tensor:
    """Return targets 0 or 1."""
    return torch.rand_like(f).round()


class Rows(nn.Module):
    """A loss on the rows ``f.view(-1, C)`` of an output [N, T, C]."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute the loss of the rows."""
        return self.loss(f.view(-1, f.size(-1)), y)


def rows(target: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function for targets of the rows of the output."""
    return lambda f: target(f.reshape(-1, f.shape[-1]))


# --------------------------------------------------------------------------------------
# Helpers: one call, one case
# --------------------------------------------------------------------------------------


def _mix(shape: Shape, channels: int | None = None) -> nn.Module:
    """Return a parametrised module [N, *shape] -> [N, channels, *shape[1:]]."""
    kinds: list[Any] = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
    kernel = [1] if len(shape) > 1 else []
    return kinds[len(shape) - 1](shape[0], channels or shape[0], *kernel)


def _call_name(cls: type, args: Sequence[object], kwargs: dict[str, Any]) -> str:
    def plain(value: object) -> str:
        return "tensor" if isinstance(value, Tensor) else repr(value)

    arguments = [*map(plain, args), *(f"{key}={plain(value)}" for key, value in kwargs.items())]
    return f"{cls.__name__}({','.join(arguments)})".replace(" ", "").replace("'", "")


def module_case(
    cls: type[nn.Module],
    shape: Shape,
    *args: Any,
    tags: str = "",
    train: bool = True,
    first: bool = False,
    **kwargs: Any,
) -> Case:
    """Return a case for ``cls(*args, **kwargs)`` on inputs [N, *shape].

    The model is a parametrised module (unless the module under test has to be the
    ``first``), the module under test, Flatten, Tanh and Linear; the loss is cross entropy.
    """

    def body() -> nn.Sequential:
        layers = nn.Sequential() if first else nn.Sequential(_mix(shape))
        return layers.append(cls(*args, **kwargs))

    @cache
    def output_shape() -> Shape:
        with _own_random_state(), torch.no_grad():
            return tuple(body().eval()(torch.zeros(N, *shape)).shape[1:])

    def model() -> nn.Module:
        layers, out = body(), output_shape()
        if len(out) > 1:
            layers.append(nn.Flatten())
        return layers.append(nn.Tanh()).append(nn.Linear(math.prod(out), 3))

    details = ["x".join(map(str, shape)), "first" * first, "eval" * (not train)]
    return Case(
        "-".join([_call_name(cls, args, kwargs), *filter(None, details)]),
        model,
        lambda: torch.randn(N, *shape),
        nn.CrossEntropyLoss,
        labels,
        frozenset(["module", *tags.split(), *(["inplace"] * bool(kwargs.get("inplace")))]),
        train,
    )


def loss_case(
    cls: type[nn.Module],
    shape: Shape,
    target: Callable[[Tensor], Tensor],
    *,
    tags: str,
    note: str = "",
    **kwargs: Any,
) -> Case:
    """Return a case for the loss ``cls(**kwargs)`` on outputs [N, *shape]."""
    hidden = (2, *shape[1:])
    name = _call_name(cls, [], kwargs)
    return Case(
        "-".join(filter(None, [name, "x".join(map(str, shape)), note])),
        lambda: nn.Sequential(_mix(hidden), nn.Tanh(), _mix(hidden, shape[0])),
        lambda: torch.randn(N, *hidden),
        lambda: cls(**kwargs),
        target,
        frozenset(["loss", *tags.split()]),
    )


def network(
    name: str,
    model: Callable[[], nn.Module],
    shape: Shape,
    loss: Callable[[], nn.Module] = nn.CrossEntropyLoss,
    target: Callable[[Tensor], Tensor] = labels,
    *,
    tags: str = "",
    train: bool = True,
    input: Callable[[], Tensor] | None = None,
) -> Case:
    """Return a case for a whole network on inputs [N, *shape]."""
    return Case(
        name,
        model,
        input or (lambda: torch.randn(N, *shape)),
        loss,
        target,
        frozenset(["network", *tags.split()]),
        train,
    )


# --------------------------------------------------------------------------------------
# Modules
# --------------------------------------------------------------------------------------


def _linear_cases() -> list[Case]:
    shapes: list[Shape] = [(4,), (2, 4), (2, 2, 4)]
    return [
        module_case(layer, shape, 4, 3, tags="linear", **kwargs)
        for layer in (nn.Linear, TransposedLinear)
        for shape in shapes
        for kwargs in ({}, {"bias": False})
    ]


def _conv_cases() -> list[Case]:
    case = partial(module_case, tags="conv")
    return [
        case(nn.Conv1d, (2, 6), 2, 3, 3),
        case(nn.Conv1d, (2, 6), 2, 3, 3, first=True),
        case(nn.Conv1d, (2, 6), 2, 3, 3, bias=False),
        case(nn.Conv1d, (2, 6), 2, 3, 3, stride=2),
        case(nn.Conv1d, (2, 6), 2, 3, 3, dilation=2),
        case(nn.Conv1d, (2, 6), 2, 4, 3, groups=2),
        case(nn.Conv1d, (2, 4), 2, 2, 3, padding=2),
        case(nn.Conv1d, (2, 6), 2, 3, 3, padding="valid"),
        case(nn.Conv1d, (2, 4), 2, 2, 3, padding="same"),
        case(nn.Conv1d, (2, 4), 2, 2, 2, padding="same"),
        case(nn.Conv1d, (2, 5), 2, 2, 2, padding="same", dilation=3),
        case(nn.Conv1d, (2, 5), 2, 2, 4, padding="same", padding_mode="circular"),
        case(nn.Conv1d, (2, 4), 2, 2, 3, padding=2, padding_mode="circular"),
        case(nn.Conv1d, (2, 4), 2, 2, 3, padding=2, padding_mode="reflect"),
        case(nn.Conv1d, (2, 4), 2, 2, 3, padding=2, padding_mode="replicate"),
        case(nn.Conv1d, (2, 6), 2, 2, 3, stride=2, padding=1, padding_mode="circular"),
        case(nn.Conv1d, (4, 5), 4, 2, 2, stride=2, padding=1, dilation=2, groups=2),
        case(nn.Conv2d, (2, 4, 4), 2, 3, (3, 2)),
        case(nn.Conv2d, (2, 4, 4), 2, 3, 3, first=True),
        case(nn.Conv2d, (2, 4, 4), 2, 2, 2, bias=False),
        case(nn.Conv2d, (2, 4, 5), 2, 2, 2, stride=(2, 3)),
        case(nn.Conv2d, (2, 5, 4), 2, 2, 2, dilation=(3, 2)),
        case(nn.Conv2d, (2, 3, 3), 2, 4, 2, groups=2),
        case(nn.Conv2d, (2, 3, 3), 2, 2, 3, padding=(0, 1)),
        case(nn.Conv2d, (2, 3, 4), 2, 2, 3, padding="valid"),
        case(nn.Conv2d, (1, 3, 3), 1, 2, (3, 2), padding="same"),
        case(nn.Conv2d, (1, 3, 4), 1, 1, 2, padding="same", dilation=(1, 3)),
        case(nn.Conv2d, (1, 3, 3), 1, 2, 2, padding="same", padding_mode="reflect"),
        case(nn.Conv2d, (1, 2, 3), 1, 2, 3, padding=(1, 2), padding_mode="circular"),
        case(nn.Conv2d, (1, 2, 3), 1, 2, 3, padding=(1, 2), padding_mode="reflect"),
        case(nn.Conv2d, (1, 2, 3), 1, 2, 3, padding=(1, 2), padding_mode="replicate"),
        case(nn.Conv2d, (4, 3, 4), 4, 2, 2, stride=2, padding=1, groups=2),
        case(nn.Conv3d, (1, 3, 3, 3), 1, 2, 2),
        case(nn.Conv3d, (1, 3, 2, 2), 1, 2, (2, 1, 2), bias=False),
        case(nn.Conv3d, (1, 3, 4, 3), 1, 2, 2, stride=(1, 2, 1), dilation=(2, 1, 2)),
        case(nn.Conv3d, (2, 3, 2, 2), 2, 4, 2, groups=2),
        case(nn.Conv3d, (1, 2, 2, 2), 1, 2, 2, padding=(1, 0, 0)),
        case(nn.Conv3d, (1, 2, 2, 3), 1, 2, (1, 2, 3), padding="valid"),
        case(nn.Conv3d, (1, 2, 2, 3), 1, 1, (1, 2, 3), padding="same"),
        case(nn.Conv3d, (1, 2, 2, 2), 1, 1, 2, padding=(1, 0, 1), padding_mode="circular"),
        case(nn.Conv3d, (1, 2, 2, 2), 1, 1, 2, padding=(0, 1, 1), padding_mode="reflect"),
        case(nn.Conv3d, (1, 2, 2, 2), 1, 1, 2, padding=(1, 1, 0), padding_mode="replicate"),
    ]


def _conv_transpose_cases() -> list[Case]:
    case = partial(module_case, tags="convtranspose")
    return [
        case(nn.ConvTranspose1d, (2, 4), 2, 3, 3),
        case(nn.ConvTranspose1d, (2, 4), 2, 3, 3, first=True),
        case(nn.ConvTranspose1d, (2, 4), 2, 3, 3, bias=False),
        case(nn.ConvTranspose1d, (2, 4), 2, 2, 3, stride=2),
        case(nn.ConvTranspose1d, (2, 4), 2, 2, 3, padding=1),
        case(nn.ConvTranspose1d, (2, 3), 2, 2, 3, dilation=2),
        case(nn.ConvTranspose1d, (4, 2), 4, 6, 2, groups=2),
        case(nn.ConvTranspose1d, (2, 3), 2, 2, 2, stride=3, output_padding=2),
        case(nn.ConvTranspose1d, (2, 3), 2, 2, 3, stride=2, padding=1, output_padding=1),
        case(nn.ConvTranspose2d, (2, 2, 2), 2, 3, (2, 1)),
        case(nn.ConvTranspose2d, (2, 2, 2), 2, 2, (2, 3), bias=False),
        case(nn.ConvTranspose2d, (2, 2, 2), 2, 2, 2, stride=(1, 2), output_padding=(0, 1)),
        case(nn.ConvTranspose2d, (2, 3, 3), 2, 2, 3, padding=(2, 1)),
        case(nn.ConvTranspose2d, (1, 2, 2), 1, 2, 2, dilation=(1, 3)),
        case(nn.ConvTranspose2d, (2, 2, 2), 2, 4, (1, 2), groups=2),
        case(nn.ConvTranspose3d, (1, 2, 1, 2), 1, 2, 2),
        case(nn.ConvTranspose3d, (1, 2, 1, 2), 1, 2, (1, 2, 2), bias=False),
        case(nn.ConvTranspose3d, (1, 2, 2, 2), 1, 2, 3, padding=1, stride=(2, 1, 1)),
        case(nn.ConvTranspose3d, (1, 1, 1, 2), 1, 1, 2, stride=2, output_padding=(1, 0, 0)),
        case(nn.ConvTranspose3d, (1, 2, 2, 2), 1, 1, 2, dilation=(1, 2, 1)),
        case(nn.ConvTranspose3d, (2, 1, 1, 2), 2, 4, (2, 1, 2), groups=2),
    ]


def _batchnorm_cases() -> list[Case]:
    variants: list[tuple[type[nn.Module], Shape]] = [
        (nn.BatchNorm1d, (4,)),
        (nn.BatchNorm1d, (2, 3)),
        (nn.BatchNorm2d, (2, 2, 3)),
        (nn.BatchNorm3d, (2, 2, 1, 3)),
    ]
    case = partial(module_case, tags="batchnorm", train=False)
    mixing = partial(module_case, tags="batchnorm mixing")
    return [
        *(case(cls, shape, shape[0]) for cls, shape in variants),
        *(case(cls, shape, shape[0], affine=False) for cls, shape in variants),
        case(nn.BatchNorm1d, (4,), 4, first=True),
        case(nn.BatchNorm2d, (2, 2, 3), 2, eps=0.1),
        *(mixing(cls, shape, shape[0]) for cls, shape in variants),
        mixing(nn.BatchNorm1d, (4,), 4, track_running_stats=False),
    ]


def _pool_cases() -> list[Case]:
    case, random = (partial(module_case, tags=tags) for tags in ("pool", "pool random"))
    where = {"_random_samples": torch.tensor([[[0.2, 0.6, 0.9]], [[0.5] * 3], [[0.8, 0.1, 0.4]]])}
    in_2d = {"_random_samples": where["_random_samples"][..., :2]}
    return [
        case(nn.MaxPool1d, (2, 6), 2),
        case(nn.MaxPool1d, (2, 6), 3, stride=1),
        case(nn.MaxPool1d, (2, 6), 3, stride=2, padding=1),
        case(nn.MaxPool1d, (2, 6), 2, stride=2, dilation=3),
        case(nn.MaxPool1d, (2, 6), 3, stride=2, ceil_mode=True),
        case(nn.MaxPool1d, (6,), 2),
        case(nn.MaxPool2d, (2, 4, 4), 2),
        case(nn.MaxPool2d, (2, 4, 4), (3, 2), stride=1),
        case(nn.MaxPool2d, (2, 4, 4), 3, stride=2, padding=1),
        case(nn.MaxPool2d, (2, 4, 5), 2, stride=(2, 1), dilation=(1, 3)),
        case(nn.MaxPool2d, (2, 4, 4), 3, stride=2, ceil_mode=True),
        case(nn.MaxPool2d, (4, 4), 2),
        case(nn.MaxPool3d, (1, 2, 4, 2), 2),
        case(nn.MaxPool3d, (1, 3, 3, 3), 2, stride=1),
        case(nn.MaxPool3d, (1, 3, 3, 3), 3, stride=2, padding=1),
        case(nn.MaxPool3d, (1, 3, 3, 4), 2, stride=1, dilation=(2, 1, 3)),
        case(nn.MaxPool3d, (1, 3, 3, 3), 2, ceil_mode=True),
        case(nn.AvgPool1d, (2, 6), 2),
        case(nn.AvgPool1d, (2, 6), 3, stride=1),
        case(nn.AvgPool1d, (2, 6), 3, stride=2, padding=1),
        case(nn.AvgPool1d, (2, 6), 3, stride=2, padding=1, count_include_pad=False),
        case(nn.AvgPool1d, (2, 5), 2, ceil_mode=True),
        case(nn.AvgPool1d, (2, 6), 3, padding=1, stride=2, ceil_mode=True),
        case(nn.AvgPool2d, (2, 4, 4), 2),
        case(nn.AvgPool2d, (2, 4, 4), (3, 2), stride=1),
        case(nn.AvgPool2d, (2, 4, 3), 3, stride=2, padding=(1, 0)),
        case(nn.AvgPool2d, (2, 3, 3), 2, padding=1, count_include_pad=False),
        case(nn.AvgPool2d, (2, 5, 3), 2, ceil_mode=True),
        case(nn.AvgPool2d, (2, 4, 4), 2, divisor_override=3),
        case(nn.AvgPool2d, (2, 5, 5), 3, stride=2, padding=1, ceil_mode=True, divisor_override=2),
        case(nn.AvgPool3d, (1, 2, 4, 2), 2),
        case(nn.AvgPool3d, (1, 3, 3, 3), 2, stride=1),
        case(nn.AvgPool3d, (1, 3, 3, 3), 2, padding=1, count_include_pad=False),
        case(nn.AvgPool3d, (1, 3, 3, 3), 2, ceil_mode=True),
        case(nn.AvgPool3d, (1, 2, 2, 4), 2, divisor_override=3),
        case(nn.AdaptiveAvgPool1d, (2, 6), 3),
        case(nn.AdaptiveAvgPool1d, (2, 5), 3),
        case(nn.AdaptiveAvgPool1d, (2, 2), 3),
        case(nn.AdaptiveAvgPool2d, (2, 4, 4), 2),
        case(nn.AdaptiveAvgPool2d, (2, 4, 6), (2, 3)),
        case(nn.AdaptiveAvgPool2d, (2, 5, 4), (3, 2)),
        case(nn.AdaptiveAvgPool2d, (2, 3, 4), (None, 2)),
        case(nn.AdaptiveAvgPool2d, (2, 3, 4), (2, None)),
        case(nn.AdaptiveAvgPool3d, (1, 2, 4, 2), (1, 2, 2)),
        case(nn.AdaptiveAvgPool3d, (1, 3, 2, 2), (2, 2, 1)),
        case(nn.AdaptiveAvgPool3d, (1, 3, 2, 2), (None, 1, None)),
        case(nn.AdaptiveMaxPool1d, (2, 6), 3),
        case(nn.AdaptiveMaxPool1d, (2, 5), 3),
        case(nn.AdaptiveMaxPool1d, (5,), 3),
        case(nn.AdaptiveMaxPool2d, (2, 4, 4), 2),
        case(nn.AdaptiveMaxPool2d, (2, 5, 4), (3, 2)),
        case(nn.AdaptiveMaxPool2d, (2, 3, 4), (None, 2)),
        case(nn.AdaptiveMaxPool3d, (1, 2, 4, 2), (1, 2, 2)),
        case(nn.AdaptiveMaxPool3d, (1, 3, 2, 2), (2, None, 1)),
        case(nn.FractionalMaxPool2d, (1, 4, 3), 2, output_size=2, **in_2d),
        case(nn.FractionalMaxPool3d, (1, 4, 2, 2), (2, 1, 1), output_size=(2, 1, 1), **where),
        random(nn.FractionalMaxPool2d, (2, 5, 4), 2, output_size=2),
        random(nn.FractionalMaxPool2d, (2, 5, 4), (2, 1), output_ratio=0.6),
        random(nn.FractionalMaxPool3d, (1, 5, 4, 2), (2, 2, 1), output_size=(2, 2, 1)),
    ]


def _activation_cases() -> list[Case]:
    variants: list[tuple[type[nn.Module], dict[str, Any]]] = [
        (nn.ReLU, {}),
        (nn.ReLU, {"inplace": True}),
        (nn.LeakyReLU, {}),
        (nn.LeakyReLU, {"negative_slope": 0.3}),
        (nn.LeakyReLU, {"negative_slope": 0.3, "inplace": True}),
        (nn.ELU, {}),
        (nn.ELU, {"alpha": 0.7}),
        (nn.ELU, {"alpha": 0.7, "inplace": True}),
        (nn.SELU, {}),
        (nn.SELU, {"inplace": True}),
        (nn.Sigmoid, {}),
        (nn.Tanh, {}),
        (nn.LogSigmoid, {}),
    ]
    others: list[tuple[type[nn.Module], dict[str, Any]]] = [
        (nn.CELU, {"alpha": 0.5}),
        (nn.GELU, {}),
        (nn.GELU, {"approximate": "tanh"}),
        (nn.Hardshrink, {"lambd": 0.2}),
        (nn.Hardsigmoid, {}),
        (nn.Hardswish, {}),
        (nn.Hardtanh, {"min_val": -0.3, "max_val": 0.2, "inplace": True}),
        (nn.Mish, {}),
        (nn.ReLU6, {}),
        (nn.SiLU, {}),
        (nn.SiLU, {"inplace": True}),
        (nn.Softplus, {}),
        (nn.Softplus, {"beta": 2.0, "threshold": 1.0}),
        (nn.Softshrink, {"lambd": 0.2}),
        (nn.Softsign, {}),
        (nn.Tanhshrink, {}),
        (nn.Threshold, {"threshold": 0.1, "value": 2.0}),
    ]
    shapes: list[Shape] = [(5,), (2, 3)]
    return [
        *(
            module_case(cls, shape, tags="activation", **kwargs)
            for cls, kwargs in variants
            for shape in shapes
        ),
        *(module_case(cls, (2, 3), tags="activation", **kwargs) for cls, kwargs in others),
    ]


def _layer_norm_cases() -> list[Case]:
    case = partial(module_case, tags="layernorm")
    return [
        case(nn.LayerNorm, (4,), 4, elementwise_affine=False),
        case(nn.LayerNorm, (2, 3), 3),
        case(nn.LayerNorm, (2, 3), (2, 3), eps=0.1),
        case(nn.LayerNorm, (2, 2, 2), (2, 2), bias=False),
        case(nn.LayerNorm, (2, 3), 3, first=True),
    ]


def _dropout_cases() -> list[Case]:
    variants: list[tuple[type[nn.Module], Shape]] = [
        (nn.Dropout, (6,)),
        (nn.Dropout, (2, 3)),
        (nn.Dropout1d, (4, 2)),
        (nn.Dropout2d, (4, 2, 2)),
        (nn.Dropout3d, (4, 2, 1, 2)),
        (nn.AlphaDropout, (6,)),
        (nn.FeatureAlphaDropout, (4, 2)),
    ]
    return [
        *(module_case(c, shape, 0.4, train=False, tags="dropout") for c, shape in variants),
        *(module_case(c, shape, 0.4, tags="dropout random") for c, shape in variants),
        module_case(StochasticDepth, (2, 3), 0.4, "row", tags="dropout random"),
        module_case(StochasticDepth, (4,), 0.4, "batch", tags="dropout random"),
        module_case(nn.RReLU, (2, 3), tags="activation random"),
        module_case(nn.RReLU, (5,), train=False, tags="activation"),
        module_case(nn.Dropout, (6,), 0.4, inplace=True, tags="dropout random"),
        module_case(nn.Dropout, (6,), 0.0, tags="dropout"),
    ]


def _reshape_cases() -> list[Case]:
    reshape = partial(module_case, tags="reshape")
    pad = partial(module_case, tags="pad")
    return [
        reshape(nn.Flatten, (5,)),
        reshape(nn.Flatten, (2, 3)),
        reshape(nn.Flatten, (2, 2, 2), 2),
        reshape(nn.Flatten, (2, 2, 2), start_dim=1, end_dim=2),
        reshape(nn.Unflatten, (6,), 1, (2, 3)),
        reshape(nn.Unflatten, (2, 4), -1, (2, 2)),
        reshape(nn.Identity, (5,)),
        reshape(nn.Identity, (2, 3)),
        pad(nn.ZeroPad1d, (2, 3), (1, 2)),
        pad(nn.ZeroPad2d, (2, 2, 2), (1, 0, 2, 1)),
        pad(nn.ZeroPad2d, (2, 2, 2), 1),
        pad(nn.ZeroPad3d, (1, 2, 2, 2), (1, 0, 0, 1, 1, 0)),
        pad(nn.ConstantPad1d, (2, 3), (1, 2), 0.5),
        pad(nn.ConstantPad2d, (2, 2, 2), (1, 0, 2, 1), 0.5),
        pad(nn.ConstantPad2d, (2, 3, 3), (1, -1, -2, 0), 0.5),
        pad(nn.ConstantPad3d, (1, 2, 2, 2), (1, 0, 0, 1, 1, 0), -0.5),
    ]


def _other_linear_cases() -> list[Case]:
    reshape = partial(module_case, tags="reshape")
    pad = partial(module_case, tags="pad")
    everything = slice(None)
    return [
        reshape(nn.ChannelShuffle, (4, 2, 1), 2),
        reshape(nn.Fold, (4, 4), (3, 3), 2),
        reshape(nn.PixelShuffle, (4, 2, 1), 2),
        reshape(nn.PixelUnshuffle, (1, 2, 4), 2),
        reshape(nn.Unfold, (2, 3, 3), 2, padding=1, stride=2),
        reshape(nn.Upsample, (2, 3), scale_factor=2),
        reshape(nn.Upsample, (2, 2, 2), size=(3, 4), mode="bilinear", align_corners=True),
        reshape(nn.Upsample, (1, 2, 4), scale_factor=1.5, mode="bicubic"),
        reshape(nn.UpsamplingBilinear2d, (2, 2, 2), scale_factor=2),
        reshape(nn.UpsamplingNearest2d, (2, 1, 2), scale_factor=2),
        reshape(Permute, (2, 3, 1), 0, 3, 1, 2),
        reshape(Permute, (2, 3), 1, 2, init_transpose=True),
        reshape(ScaleModule, (2, 3), 0.7),
        reshape(Slicing, (2, 3), (everything, everything, -1)),
        reshape(Slicing, (4,), (Ellipsis, slice(1, None, 2))),
        pad(nn.CircularPad1d, (2, 3), (1, 2)),
        pad(nn.CircularPad2d, (1, 2, 3), (1, 2, 0, 1)),
        pad(nn.CircularPad3d, (1, 2, 2, 2), (1, 0, 1, 0, 0, 1)),
        pad(nn.ReflectionPad1d, (2, 3), (1, 2)),
        pad(nn.ReflectionPad2d, (1, 2, 3), (1, 2, 0, 1)),
        pad(nn.ReflectionPad3d, (1, 2, 2, 2), (1, 0, 1, 0, 0, 1)),
        pad(nn.ReplicationPad1d, (2, 3), (1, 2)),
        pad(nn.ReplicationPad2d, (1, 2, 3), (1, 2, 0, 1)),
        pad(nn.ReplicationPad3d, (1, 2, 2, 2), (1, 0, 1, 0, 0, 1)),
        pad(Pad, (2, 3), (1, 2), value=0.5),
        pad(Pad, (2, 2, 3), (1, 2, 0, 1), mode="circular"),
    ]


def _automatic_cases() -> list[Case]:
    case = partial(module_case, tags="automatic function")
    return [
        case(nn.GLU, (4, 2), 1),
        case(nn.LPPool1d, (2, 4), 2, 2),
        case(nn.LPPool2d, (1, 2, 4), 2, 2),
        case(nn.LPPool3d, (1, 2, 2, 2), 2, 2),
        case(nn.LocalResponseNorm, (3, 2), 2),
        case(nn.LogSoftmax, (4,), dim=1),
        case(nn.Softmax, (2, 3), dim=-1),
        case(nn.Softmax2d, (3, 2, 1)),
        case(nn.Softmin, (4,), dim=1),
    ]


class Unknown(nn.Module):
    """Somebody's module, without derivatives: sin(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """[*] -> [*]."""
        return x.sin()


class UnknownLayer(nn.Module):
    """Somebody's layer: parameters of any shape, a buffer, an option, nonlinear in a parameter."""

    offset: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.randn(2, features))
        self.matrix = nn.Parameter(torch.randn(features, features))
        self.register_buffer("offset", torch.rand(features))

    def forward(self, x: Tensor, power: int = 2) -> Tensor:
        """[N, *, F] -> [N, *, F]."""
        return (x * self.scales[0].exp() + self.offset) @ self.matrix.tanh() + self.scales[
            1
        ] ** power


def _unknown_cases() -> list[Case]:
    case = partial(module_case, tags="unknown")
    return [
        case(Unknown, (5,)),
        case(Unknown, (2, 3)),
        case(UnknownLayer, (3,), 3),
        case(UnknownLayer, (2, 3), 3, first=True),
    ]


def _normalisation_cases() -> list[Case]:
    case = partial(module_case, tags="normalisation")
    return [
        case(nn.GroupNorm, (4,), 2, 4),
        case(nn.GroupNorm, (4, 2), 2, 4),
        case(nn.GroupNorm, (2, 2, 1), 1, 2, affine=False),
        case(nn.InstanceNorm1d, (2, 3), 2, affine=True),
        case(nn.InstanceNorm2d, (2, 2, 2), 2),
        case(nn.InstanceNorm2d, (2, 2, 1), 2, track_running_stats=True, train=False),
        case(nn.InstanceNorm3d, (1, 2, 1, 2), 1, affine=True),
        case(nn.RMSNorm, (4,), 4),
        case(nn.RMSNorm, (2, 3), (2, 3), eps=0.1),
        case(nn.SyncBatchNorm, (2, 2), 2, train=False),
        case(nn.PReLU, (2, 3), 2),
        case(nn.PReLU, (4,)),
    ]


class TwoStems(nn.Module):
    """A module that reads two tensors, both computed by layers with parameters."""

    def __init__(self, module: nn.Module, *stems: nn.Module) -> None:
        super().__init__()
        self.stems, self.module = nn.ModuleList(stems), module
        self.flatten, self.tanh, self.head = nn.Flatten(), nn.Tanh(), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, *] -> [N, 3]."""
        y = self.module(*(stem(x) for stem in self.stems))
        y = y if y.dim() > 1 else y.unsqueeze(1)
        return self.head(self.tanh(self.flatten(y)))


class PooledAndBack(nn.Module):
    """Maximum pooling that returns indices, a layer, and the pooling undone."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv, pool, back = (
            getattr(nn, f"{name}{dims}d") for name in ("Conv", "MaxPool", "MaxUnpool")
        )
        self.stem, self.layer = conv(1, 2, 1), conv(2, 2, 1)
        kernel = (*(1,) * (dims - 1), 2)
        self.pool, self.back = pool(kernel, return_indices=True), back(kernel)
        self.tanh, self.flatten, self.head = nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 1, *] -> [N, 3]."""
        pooled, indices = self.pool(self.stem(x))
        return self.head(self.flatten(self.tanh(self.back(self.layer(pooled), indices))))


def _built(make: Callable[[], nn.Module], shape: Shape) -> Callable[[], nn.Module]:
    """Return a function for a model whose lazy modules have been called."""

    def build() -> nn.Module:
        model = make()
        with torch.no_grad():
            model(torch.randn(N, *shape))
        return model

    return build


def _several_inputs_cases() -> list[Case]:
    def case(name: str, shape: Shape, make: Callable[[], nn.Module], tags: str = "") -> Case:
        return network(name, _built(make, shape), shape, tags=f"branch nonsequential {tags}")

    def two(name: str, shape: Shape, make: Callable[[], nn.Module], *sizes: int) -> Case:
        left, right = sizes or (shape[-1], shape[-1])
        stems = partial(nn.Linear, shape[-1])
        return case(name, shape, lambda: TwoStems(make(), stems(left), stems(right)))

    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
    return [
        network("bilinear", TwoInputs, (4,), tags="branch nonsequential"),
        two("cosine-similarity", (2, 3), lambda: nn.CosineSimilarity(dim=1)),
        two("pairwise-distance", (3,), lambda: nn.PairwiseDistance(keepdim=True)),
        case("max-unpool-1d", (1, 4), lambda: PooledAndBack(1)),
        case("max-unpool-2d", (1, 2, 4), lambda: PooledAndBack(2)),
        case("max-unpool-3d", (1, 2, 2, 2), lambda: PooledAndBack(3)),
        two("transformer", (2, 4), lambda: nn.Transformer(4, 2, 1, 1, 2, **options)),
    ]


# --------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------


def _loss_cases() -> list[Case]:
    weight = torch.tensor([0.5, 1.5, 1.0])
    shapes: list[Shape] = [(3,), (3, 2), (3, 2, 2)]
    cases = []
    for reduction in ("mean", "sum"):
        mse = partial(loss_case, nn.MSELoss, target=real, tags="mse", reduction=reduction)
        cases += [mse(shape) for shape in shapes]

        ce = partial(loss_case, nn.CrossEntropyLoss, tags="ce", reduction=reduction)
        for shape in shapes:
            cases += [
                ce(shape, labels),
                ce(shape, labels, weight=weight),
                ce(shape, labels_with(-100), note="ignored"),
                ce(shape, labels_with(1), ignore_index=1, weight=weight),
                ce(shape, labels, label_smoothing=0.2),
                ce(shape, probabilities, note="probabilities"),
                ce(shape, probabilities, note="probabilities", weight=weight),
                ce(
                    shape,
                    probabilities,
                    note="probabilities",
                    weight=weight,
                    label_smoothing=0.2,
                ),
                ce(shape, labels_with(2), ignore_index=2, label_smoothing=0.3),
                ce(shape, labels, weight=weight, label_smoothing=0.3),
                ce(
                    shape,
                    labels_with(0),
                    weight=weight,
                    label_smoothing=0.3,
                    ignore_index=0,
                ),
            ]

        bce = partial(loss_case, nn.BCEWithLogitsLoss, tags="bce", reduction=reduction)
        for shape in [(1,), *shapes]:
            per_class = weight[: shape[0]].reshape(-1, *(1 for _ in shape[1:]))
            per_sample = weight.reshape(-1, *(1 for _ in shape)) + 0.5
            cases += [
                bce(shape, binary, note="binary"),
                bce(shape, soft_binary),
                bce(shape, soft_binary, weight=per_sample, note="sample-weight"),
                bce(shape, binary, weight=per_class, note="class-weight"),
                bce(shape, soft_binary, pos_weight=per_class),
                bce(shape, soft_binary, weight=per_sample, pos_weight=per_class),
            ]
    return cases


# --------------------------------------------------------------------------------------
# Whole networks
# --------------------------------------------------------------------------------------


class Reused(nn.Module):
    """One Linear and one Tanh, each called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.tanh = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        for _ in range(3):
            x = self.tanh(self.linear(x))
        return self.linear(x)


class TwoConsumers(nn.Module):
    """A non-linear module whose output has two consumers, and its input as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 3)
        self.sigmoid = nn.Sigmoid()
        self.left = nn.Linear(3, 3)
        self.tanh = nn.Tanh()
        self.right = nn.Linear(3, 3, bias=False)
        self.sum = SumModule()
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 4] -> [N, 3]."""
        x = self.stem(x)
        z = self.sigmoid(x)
        return self.head(self.sum(self.tanh(self.left(z)), self.right(z), x))


class Residual(nn.Module):
    """``x + block(x)``."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.sum = SumModule()

    def forward(self, x: Tensor) -> Tensor:
        """[N, *] -> [N, *]."""
        return self.sum(x, self.block(x))


class Doubled(nn.Module):
    """``x + x``: the same tensor twice in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = SumModule()

    def forward(self, x: Tensor) -> Tensor:
        """[N, *] -> [N, *]."""
        return self.sum(x, x)


class View(nn.Module):
    """``x.view(N, *shape)``, which is not a module of torch."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """[N, *] -> [N, *shape]."""
        return x.view(x.shape[0], *self.shape)


class ConvWithFlatten(nn.Module):
    """``flatten`` in the forward, as most people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.tanh = nn.Tanh()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 1, 3, 3] -> [N, 3]."""
        return self.linear(torch.flatten(self.tanh(self.conv(x)), start_dim=1))


class TwoInputs(nn.Module):
    """A Bilinear module of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 3)
        self.tanh = nn.Tanh()
        self.bilinear = nn.Bilinear(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 4] -> [N, 3]."""
        return self.bilinear(self.tanh(self.left(x)), self.right(x))


def _tied(layers: Sequence[nn.Module], source: int, *others: int, bias: bool = False) -> nn.Module:
    """Return a Sequential whose layers ``others`` share the parameters of ``source``."""
    for i in others:
        layers[i].weight = layers[source].weight
        if bias:
            layers[i].bias = layers[source].bias
    return nn.Sequential(*layers)


def _one_for(module: nn.Module, first: str, second: str) -> nn.Module:
    """Let a module have one parameter under two names."""
    setattr(module, second, getattr(module, first))
    return module


def _frozen(model: nn.Sequential, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def _mlp(activation: type[nn.Module], outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 3), activation(), nn.Linear(3, 3), activation(), nn.Linear(3, outputs)
    )


def _cnn(*middle: nn.Module) -> nn.Sequential:
    """Return a network on [N, 1, 5, 5] whose ``middle`` maps [N, 2, 4, 4] to [N, 2, 2, 2]."""
    return nn.Sequential(nn.Conv2d(1, 2, 2), *middle, nn.Flatten(), nn.Linear(8, 3))


def _network_cases() -> list[Case]:
    row_labels, pwl = rows(labels), "piecewise_linear"

    def row_ce(**kwargs: Any) -> Callable[[], nn.Module]:
        return lambda: Rows(nn.CrossEntropyLoss(**kwargs))

    return [
        network("linear-mse", lambda: nn.Linear(4, 3), (4,), nn.MSELoss, real, tags=pwl),
        network("sigmoid-mlp", lambda: _mlp(nn.Sigmoid), (4,)),
        network("sigmoid-mlp-mse", lambda: _mlp(nn.Sigmoid), (4,), nn.MSELoss, real),
        network("relu-mlp", lambda: _mlp(nn.ReLU), (4,), tags=pwl),
        network("relu-mlp-mse", lambda: _mlp(nn.ReLU), (4,), nn.MSELoss, real, tags=pwl),
        network("tanh-mlp-bce", lambda: _mlp(nn.Tanh, 1), (4,), nn.BCEWithLogitsLoss, binary),
        network("cnn-maxpool", lambda: _cnn(nn.ReLU(), nn.MaxPool2d(2)), (1, 5, 5), tags=pwl),
        network("cnn-sigmoid", lambda: _cnn(nn.Sigmoid(), nn.AvgPool2d(2)), (1, 5, 5)),
        network(
            "cnn-batchnorm",
            lambda: _cnn(nn.BatchNorm2d(2), nn.ReLU(), nn.AvgPool2d(2)),
            (1, 5, 5),
            train=False,
            tags=pwl,
        ),
        network(
            "cnn-batchnorm-train",
            lambda: _cnn(nn.BatchNorm2d(2), nn.Sigmoid(), nn.AvgPool2d(2)),
            (1, 5, 5),
            tags="mixing",
        ),
        network(
            "cnn-dropout-train",
            lambda: _cnn(nn.Tanh(), nn.Dropout(), nn.AvgPool2d(2), nn.Dropout2d()),
            (1, 5, 5),
            tags="random",
        ),
        network(
            "nested-sequential",
            lambda: nn.Sequential(
                nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Tanh())), nn.Linear(3, 3)
            ),
            (4,),
        ),
        network(
            "autoencoder",
            lambda: nn.Sequential(
                nn.Conv1d(1, 2, 2, stride=2), nn.Tanh(), nn.ConvTranspose1d(2, 1, 2, stride=2)
            ),
            (1, 6),
            nn.MSELoss,
            real,
        ),
        # requires_grad
        network(
            "frozen-first",
            lambda: _frozen(_mlp(nn.Tanh), "0.weight", "0.bias"),
            (4,),
            tags="frozen",
        ),
        network(
            "frozen-some", lambda: _frozen(_mlp(nn.Tanh), "0.bias", "2.weight"), (4,), tags="frozen"
        ),
        network(
            "frozen-middle",
            lambda: _frozen(_mlp(nn.Tanh), "2.weight", "2.bias"),
            (4,),
            tags="frozen",
        ),
        network(
            "input-requires-grad",
            lambda: _mlp(nn.Tanh),
            (4,),
            input=lambda: torch.randn(N, 4, requires_grad=True),
        ),
        # parameters used several times
        network("reused-linear", Reused, (3,), tags="tied nonsequential"),
        network(
            "reused-in-sequential",
            lambda: nn.Sequential(*[nn.Linear(3, 3), nn.Tanh()] * 2, nn.Linear(3, 3)),
            (3,),
            tags="tied",
        ),
        network(
            "reused-conv",
            lambda: nn.Sequential(
                *[nn.Conv1d(2, 2, 2), nn.Sigmoid()] * 2, nn.Flatten(), nn.Linear(4, 3)
            ),
            (2, 4),
            tags="tied",
        ),
        network(
            "tied-weight-and-bias",
            lambda: _tied([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)], 0, 2, bias=True),
            (3,),
            tags="tied",
        ),
        network(
            "tied-weight-own-bias",
            lambda: _tied([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)], 0, 2),
            (3,),
            tags="tied",
        ),
        network(
            "tied-weight-one-bias",
            lambda: _tied([nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3)], 0, 2),
            (3,),
            tags="tied",
        ),
        network(
            "tied-in-one-module",
            lambda: nn.Sequential(
                nn.Linear(4, 3),
                _one_for(nn.LayerNorm(3), "weight", "bias"),
                nn.Tanh(),
                nn.Linear(3, 3),
            ),
            (4,),
            tags="tied",
        ),
        network(
            "tied-conv",
            lambda: _tied(
                [
                    nn.Conv1d(2, 2, 3, padding=1, bias=False),
                    nn.Tanh(),
                    nn.Conv1d(2, 2, 3, dilation=2, padding=2),
                    nn.Flatten(),
                    nn.Linear(8, 3),
                ],
                0,
                2,
            ),
            (2, 4),
            tags="tied",
        ),
        network(
            "tied-embedding",
            lambda: _tied([nn.Embedding(4, 3), nn.Tanh(), nn.Linear(3, 4)], 0, 2),
            (),
            row_ce(),
            row_labels,
            tags="tied embedding rows",
            input=lambda: torch.randint(4, (N, 3)),
        ),
        network(
            "tied-embedding-padding",
            lambda: _tied([nn.Embedding(4, 3, padding_idx=1), nn.Tanh(), nn.Linear(3, 4)], 0, 2),
            (),
            row_ce(),
            row_labels,
            tags="tied embedding rows",
            input=lambda: torch.randint(4, (N, 3)),
        ),
        # branches
        network(
            "residual",
            lambda: nn.Sequential(
                nn.Linear(4, 3),
                nn.Tanh(),
                Residual(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3))),
                nn.Linear(3, 3),
            ),
            (4,),
            tags="branch nonsequential",
        ),
        network(
            "residual-of-input",
            lambda: nn.Sequential(
                Residual(nn.Linear(3, 3)), nn.Sigmoid(), Residual(nn.Tanh()), nn.Linear(3, 3)
            ),
            (3,),
            tags="branch nonsequential",
        ),
        network(
            "residual-conv",
            lambda: _cnn(
                Residual(nn.Sequential(nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.Tanh())),
                nn.MaxPool2d(2),
            ),
            (1, 5, 5),
            tags="branch nonsequential",
        ),
        network(
            "parallel",
            lambda: nn.Sequential(
                nn.Linear(4, 3),
                nn.Tanh(),
                Parallel(
                    nn.Identity(), nn.Linear(3, 3), nn.Sequential(nn.Sigmoid(), nn.Linear(3, 3))
                ),
                nn.Linear(3, 3),
            ),
            (4,),
            tags="branch nonsequential",
        ),
        network("two-consumers", TwoConsumers, (4,), tags="branch nonsequential"),
        network(
            "same-input-twice",
            lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Doubled(), nn.Linear(3, 3)),
            (3,),
            tags="branch nonsequential",
        ),
        # views between modules
        network("flatten-in-forward", ConvWithFlatten, (1, 3, 3), tags="nonsequential view"),
        network(
            "view-in-forward",
            lambda: nn.Sequential(
                nn.Linear(4, 4), nn.Tanh(), View(2, 2), nn.Conv1d(2, 2, 2), View(2), nn.Linear(2, 3)
            ),
            (4,),
            tags="nonsequential view",
        ),
        # losses on rows
        network(
            "rows",
            lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)),
            (2, 3),
            row_ce(),
            row_labels,
            tags="rows",
        ),
        network(
            "rows-sum",
            lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)),
            (2, 3),
            row_ce(reduction="sum"),
            row_labels,
            tags="rows",
        ),
        network(
            "rows-ignored",
            lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)),
            (2, 3),
            row_ce(),
            rows(labels_with(-100)),
            tags="rows",
        ),
        network(
            "rows-mse",
            lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)),
            (2, 3),
            lambda: Rows(nn.MSELoss()),
            rows(real),
            tags="rows",
        ),
    ]


# --------------------------------------------------------------------------------------
# Sequences
# --------------------------------------------------------------------------------------


def along(module: nn.Module, axis: int) -> nn.Module:
    """Tell the oracle where the samples are in what the module reads and returns."""
    module.batch_axis = axis
    return module


def _recurrent(layer: nn.Module, *, last: bool = True) -> nn.Module:
    """Return a classifier of sequences [N, 3, 2] by the last step (all steps) of a layer."""
    ways = 2 if layer.bidirectional else 1
    width = ways * (layer.proj_size or layer.hidden_size)
    read = Slicing((slice(None), -1)) if last else nn.Flatten()
    head = nn.Linear(width * (1 if last else 3), 3)
    return nn.Sequential(nn.Linear(2, 2), layer, ReduceTuple(0), read, head)


class FinalStates(nn.Module):
    """The final states of a layer that reads time first, ``[T, N, I]``; the data are [N, T, I]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.stem, self.layer = along(nn.Linear(2, 2), 1), layer
        self.last, self.head = Slicing((-1,)), nn.Linear(layer.hidden_size, 3)
        self.sum = SumModule()

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, 2] -> [N, 3]."""
        _, states = self.layer(self.stem(x.transpose(0, 1)))
        states = states if isinstance(states, tuple) else (states,)
        return self.head(self.sum(*map(self.last, states)))


class InitialStates(nn.Module):
    """A layer whose initial states are computed, and everything that it returns is used."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.is_lstm = layer, isinstance(layer, nn.LSTM)
        size = layer.hidden_size
        self.depth = layer.num_layers * (2 if layer.bidirectional else 1)
        self.states = nn.ModuleList([nn.Linear(2, self.depth * size) for _ in range(2)])
        self.apart, self.layers_first = nn.Unflatten(1, (self.depth, size)), Permute(1, 0, 2)
        self.steps = Slicing((slice(None), -1) if layer.batch_first else (-1,))
        self.final, self.sum = Slicing((0,)), SumModule()
        self.head = nn.Linear(size * (2 if layer.bidirectional else 1), 3)
        self.middle = nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, 2] -> [N, 3]."""
        start = [self.layers_first(self.apart(state(x[:, 0]))) for state in self.states]
        x = x if self.layer.batch_first else x.transpose(0, 1)
        output, finals = self.layer(x, tuple(start) if self.is_lstm else self.sum(*start))
        finals = finals if self.is_lstm else (finals,)
        read = [self.middle(self.final(state)) for state in finals]
        return self.sum(self.head(self.steps(output)), *read)


class CellLoop(nn.Module):
    """A cell that is called at every step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.stem, self.cell, self.head = nn.Linear(2, 2), cell, nn.Linear(cell.hidden_size, 3)
        self.steps = nn.ModuleList([Slicing((slice(None), t)) for t in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 2] -> [N, 3]."""
        x, state = self.stem(x), None
        for step in self.steps:
            state = self.cell(step(x), state)
        return self.head(state if isinstance(state, Tensor) else state[0])


class Tagger(nn.Module):
    """Scores for each token; time comes first everywhere but in the data."""

    def __init__(self, batch_first_at_the_end: bool) -> None:
        super().__init__()
        self.embedding, self.lstm = along(nn.Embedding(4, 2, padding_idx=1), 1), nn.LSTM(2, 2)
        self.head = along(nn.Linear(2, 2), 1)
        self.end = Permute(1, 0, 2) if batch_first_at_the_end else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        """[N, T] -> [N, T, 2] or [T, N, 2]."""
        return self.end(self.head(self.lstm(self.embedding(tokens.t()))[0]))


class Holder(nn.Module):
    """Owns a parameter, and is never called."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape))

    def reader(self) -> nn.Module:
        """Return a module that returns the parameter."""
        return ParameterModule(self, "value")


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself, behind a positional parameter."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.position = Holder(3, 2)
        self.read, self.sum = self.position.reader(), SumModule()
        self.attention = nn.MultiheadAttention(2, 2, batch_first=batch_first)
        self.exchange = nn.Identity() if batch_first else Permute(1, 0, 2)
        self.flatten, self.head = nn.Flatten(), nn.Linear(6, 3)
        self.norm = nn.LayerNorm((3, 2))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 2] -> [N, 3]."""
        x = self.exchange(self.sum(self.stem(x), self.read()))
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.flatten(self.norm(self.exchange(self.sum(x, attended)))))


def _tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(4, (N, *shape))


def _embedding_cases() -> list[Case]:
    case = partial(network, shape=(), tags="embedding")

    def bag(**kwargs: Any) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.EmbeddingBag(4, 3, **kwargs), nn.Tanh(), nn.Linear(3, 3))

    return [
        case(
            "embedding",
            lambda: nn.Sequential(nn.Embedding(4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)),
            input=_tokens(3),
        ),
        case(
            "embedding-axes-padding",
            lambda: nn.Sequential(
                nn.Embedding(4, 2, padding_idx=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 3)
            ),
            input=_tokens(2, 2),
        ),
        case("embedding-bag-sum", bag(mode="sum"), input=_tokens(3)),
        case("embedding-bag-mean", bag(mode="mean"), input=_tokens(3)),
    ]


def _recurrent_cases() -> list[Case]:
    case = partial(network, shape=(3, 2), tags="recurrent")
    loop = partial(case, tags="recurrent tied nonsequential function")
    states = partial(case, tags="recurrent branch nonsequential sequence function")
    first = {"batch_first": True}
    return [
        case("rnn", lambda: _recurrent(nn.RNN(2, 2, **first))),
        case(
            "rnn-relu-bidirectional",
            lambda: _recurrent(
                nn.RNN(2, 2, nonlinearity="relu", bidirectional=True, **first), last=False
            ),
        ),
        case(
            "lstm-2-layers",
            lambda: _recurrent(nn.LSTM(2, 1, 2, bias=False, **first), last=False),
        ),
        case(
            "rnn-tied-in-one-module",
            lambda: _recurrent(
                _one_for(nn.RNN(2, 2, **first), "weight_ih_l0", "weight_hh_l0"), last=False
            ),
            tags="recurrent tied",
        ),
        case("lstm-projected", lambda: _recurrent(nn.LSTM(2, 2, proj_size=1, **first))),
        case(
            "gru-bidirectional",
            lambda: _recurrent(nn.GRU(2, 2, bidirectional=True, **first)),
        ),
        states("rnn-states", lambda: FinalStates(nn.RNN(2, 2, 2, bias=False))),
        states("lstm-states", lambda: FinalStates(nn.LSTM(2, 2, bias=False))),
        states("gru-initial-states", lambda: InitialStates(nn.GRU(2, 1, bidirectional=True))),
        states("lstm-initial-states", lambda: InitialStates(nn.LSTM(2, 1, **first))),
        loop("rnn-cell", lambda: CellLoop(nn.RNNCell(2, 2))),
        loop("rnn-cell-relu", lambda: CellLoop(nn.RNNCell(2, 2, bias=False, nonlinearity="relu"))),
        loop("lstm-cell", lambda: CellLoop(nn.LSTMCell(2, 2, bias=False))),
        loop("gru-cell", lambda: CellLoop(nn.GRUCell(2, 2))),
        network(
            "tagger",
            lambda: Tagger(True),
            (),
            nn.MSELoss,
            real,
            tags="recurrent embedding function nonsequential sequence",
            input=_tokens(3),
        ),
        network(
            "tagger-rows",
            lambda: Tagger(False),
            (),
            lambda: Rows(nn.CrossEntropyLoss()),
            rows(labels),
            tags="recurrent embedding nonsequential sequence time_first rows",
            input=_tokens(3),
        ),
        network(
            "attention",
            lambda: SelfAttention(True),
            (3, 2),
            tags="branch nonsequential function",
        ),
        network(
            "attention-time-first",
            lambda: SelfAttention(False),
            (3, 2),
            tags="branch nonsequential function sequence",
        ),
    ]


# --------------------------------------------------------------------------------------
# Functions and parameters as modules
# --------------------------------------------------------------------------------------


class ClassToken(nn.Module):
    """A parameter in front of a sequence, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = Holder(1, 1, 2)
        self.read = self.token.reader()
        self.expand = FunctionModule("expand", (Slot(0), Slot(1), -1, -1))
        self.cat = FunctionModule(torch.cat, ([Slot(0), Slot(1)],), {"dim": 1})
        self.stem, self.tanh = nn.Linear(2, 2), nn.Tanh()
        self.flatten, self.head = nn.Flatten(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 2, 2] -> [N, 3]."""
        x = self.cat(self.expand(self.read(), x.shape[0]), self.stem(x))
        return self.head(self.flatten(self.tanh(x)))


class Attention(nn.Module):
    """Scaled attention made of functions: chunk, matmul, softmax; all parts of it are used."""

    def __init__(self) -> None:
        super().__init__()
        self.position = Holder(1, 2, 6)
        self.read, self.sum = self.position.reader(), SumModule()
        self.project = nn.Linear(2, 6)
        self.chunk = FunctionModule(torch.chunk, (Slot(0), 3), {"dim": -1})
        self.exchange = Permute(-1, -2, init_transpose=True)
        self.scores = FunctionModule(torch.matmul, (Slot(0), Slot(1)))
        self.softmax = nn.Softmax(-1)
        self.flatten, self.head = nn.Flatten(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 2, 2] -> [N, 3]."""
        q, k, v = self.chunk(self.sum(self.project(x), self.read()))
        weights = self.softmax(self.scores(q, self.exchange(k)))
        return self.head(self.flatten(self.scores(weights, v)))


class Product(nn.Module):
    """The product of two activations, of a parameter and of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.tanh, self.mul = nn.Tanh(), MulModule()
        self.scale = Holder(3)
        self.read = self.scale.reader()

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        return self.head(self.mul(self.tanh(self.left(x)), self.right(x), self.read(), 0.7))


class ParameterFunctions(nn.Module):
    """Parameters behind nonlinear functions: a weight of norm 1, and a positive factor."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = Holder(2, 3)
        self.log_scale = Holder(1)
        self.read_direction = self.direction.reader()
        self.read_log_scale = self.log_scale.reader()
        self.normalise = FunctionModule(F.normalize, (Slot(0),), {"dim": 1})
        self.linear = FunctionModule(F.linear, (Slot(0), Slot(1)))
        self.exp, self.mul = FunctionModule(torch.exp, (Slot(0),)), MulModule()
        self.stem, self.tanh, self.head = nn.Linear(2, 3), nn.Tanh(), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 2] -> [N, 3]."""
        weight = self.normalise(self.read_direction())
        x = self.linear(self.stem(x), weight)
        return self.head(self.tanh(self.mul(x, self.exp(self.read_log_scale()))))


class ShiftedData(nn.Module):
    """The data plus a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.sum = Holder(2, 2), SumModule()
        self.read = self.shift.reader()
        self.flatten, self.tanh, self.head = nn.Flatten(), nn.Tanh(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 2, 2] -> [N, 3]."""
        return self.head(self.tanh(self.flatten(self.sum(x, self.read()))))


class Temperature(nn.Module):
    """A factor that is a single number, behind a function."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.number = Holder()
        self.read, self.exp = self.number.reader(), FunctionModule(torch.exp, (Slot(0),))
        self.mul, self.tanh = MulModule(), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N, 3]."""
        return self.head(self.tanh(self.mul(self.stem(x), self.exp(self.read()))))


class HeadsAttention(nn.Module):
    """Two heads of scaled dot-product attention as one module."""

    def __init__(self) -> None:
        super().__init__()
        # values have another size: torch's fused kernels cannot be differentiated twice
        self.stems = nn.ModuleList([nn.Linear(2, 2 * size) for size in (2, 2, 3)])
        self.apart, self.exchange = nn.Unflatten(2, (2, -1)), Permute(0, 2, 1, 3)
        self.attention = ScaledDotProductAttention(is_causal=True)
        self.flatten, self.head = nn.Flatten(), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 2, 2] -> [N, 3]."""
        parts = [self.exchange(self.apart(stem(x))) for stem in self.stems]
        return self.head(self.flatten(self.attention(*parts)))


class Split(nn.Module):
    """Parts of a tensor, some of which are used, some twice, some not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(2, 3)
        self.split = FunctionModule("split", (Slot(0), 2), {"dim": 1})
        self.gate, self.tanh = FunctionModule(torch.sigmoid, (Slot(0),)), nn.Tanh()
        self.mul, self.sum = MulModule(), SumModule()

    def forward(self, x: Tensor) -> Tensor:
        """[N, 4] -> [N, 3]."""
        one, two, _ = self.split(self.stem(x))
        return self.head(self.sum(self.mul(self.tanh(one), self.gate(two)), one))


def _function_cases() -> list[Case]:
    case = partial(network, tags="function branch nonsequential")
    return [
        case("class-token", ClassToken, (2, 2)),
        case("attention-by-functions", Attention, (2, 2)),
        case("attention-of-heads", HeadsAttention, (2, 2)),
        case("product", Product, (3,), nn.MSELoss, real),
        case("parameter-functions", ParameterFunctions, (2,)),
        case("split", Split, (4,)),
        case("shifted-data", ShiftedData, (2, 2)),
        case("temperature", Temperature, (3,)),
        network(
            "permuted-batch",
            lambda: nn.Sequential(
                nn.Linear(2, 2),
                Permute(1, 0, 2),
                nn.Tanh(),
                along(nn.Linear(2, 2), 1),
                Permute(1, 0, 2),
                nn.Flatten(),
                nn.Linear(4, 3),
            ),
            (2, 2),
            tags="function sequence",
        ),
        network(
            "stochastic-depth",
            lambda: nn.Sequential(
                Residual(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), StochasticDepth(0.5, "row"))),
                nn.Linear(3, 3),
            ),
            (3,),
            tags="random branch nonsequential",
        ),
    ]


# --------------------------------------------------------------------------------------
# Random structure
# --------------------------------------------------------------------------------------


class DAG(nn.Module):
    """Modules wired by the indices of their inputs; index 0 is the model's input."""

    def __init__(self, nodes: Sequence[nn.Module], wires: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.nodes = nn.ModuleList(nodes)  # may contain a module several times
        self.wires = [tuple(inputs) for inputs in wires]

    def forward(self, x: Tensor) -> Tensor:
        """Return the last node's output."""
        values = [x]
        for node, inputs in zip(self.nodes, self.wires, strict=True):
            values.append(node(*(values[i] for i in inputs)))
        return values[-1]


def random_dag(seed: int, size: int | None = None) -> Case:
    """Return a small random DAG of modules, with merges, reuse and tied parameters.

    All activations between the first module and the head have the same shape, [N, 3] or
    [N, 2, 2, 2]. ``size`` is the number of nodes in between (drawn from 3 to 8 if None).
    """

    def parametrised(image: bool, rng: random.Random) -> nn.Module:
        bias = rng.random() < 0.7
        if not image:
            return nn.Linear(3, 3, bias=bias)
        kernel = rng.choice([1, 3])
        return nn.Conv2d(2, 2, kernel, padding=kernel // 2, bias=bias)

    def model() -> nn.Module:
        rng = random.Random(seed)
        image = rng.random() < 0.4
        nodes: list[nn.Module] = [nn.Conv2d(1, 2, 2) if image else nn.Linear(4, 3)]
        wires: list[tuple[int, ...]] = [(0,)]

        for _ in range(rng.randint(3, 8) if size is None else size):
            # prefer recent values, such that the graph gets deep
            values = range(1, len(nodes) + 1)
            recent = max(rng.choice(values), rng.choice(values))
            kind = rng.choice(["new", "new", "activation", "activation", "merge", "reuse", "tie"])
            known = [m for m in nodes[1:] if not isinstance(m, SumModule)]
            weighted = [m for m in known if isinstance(m, (nn.Linear, nn.Conv2d))]
            if kind == "merge":
                others = [rng.choice(values) for _ in range(rng.randint(1, 2))]
                nodes.append(SumModule())
                wires.append((recent, *others))
            elif kind == "reuse" and known:
                nodes.append(rng.choice(known))
                wires.append((recent,))
            elif kind == "tie" and weighted:
                source = rng.choice(weighted)
                tied = copy.deepcopy(source)
                tied.weight = source.weight
                nodes.append(tied)
                wires.append((recent,))
            elif kind == "activation":
                nodes.append(rng.choice([nn.Sigmoid, nn.ReLU, nn.Tanh])())
                wires.append((recent,))
            else:
                nodes.append(parametrised(image, rng))
                wires.append((recent,))

        # merge everything that nobody consumes, then the head
        consumed = {i for inputs in wires for i in inputs}
        loose = [i for i in range(1, len(nodes) + 1) if i not in consumed]
        if len(loose) > 1:
            nodes.append(SumModule())
            wires.append(tuple(loose))
        for head in [nn.Flatten(), nn.Linear(8, 3)] if image else [nn.Linear(3, 3)]:
            wires.append((len(nodes),))
            nodes.append(head)
        return DAG(nodes, wires)

    image = random.Random(seed).random() < 0.4
    shape = (1, 3, 3) if image else (4,)
    losses: list[tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = [
        (nn.CrossEntropyLoss, labels),
        (nn.MSELoss, real),
        (lambda: nn.BCEWithLogitsLoss(reduction="sum"), soft_binary),
    ]
    loss, target = losses[seed % len(losses)]
    tags = "dag branch tied nonsequential"
    return network(f"random-dag-{seed}", model, shape, loss, target, tags=tags)


CASES: list[Case] = [
    *_linear_cases(),
    *_conv_cases(),
    *_conv_transpose_cases(),
    *_batchnorm_cases(),
    *_pool_cases(),
    *_activation_cases(),
    *_dropout_cases(),
    *_reshape_cases(),
    *_other_linear_cases(),
    *_layer_norm_cases(),
    *_automatic_cases(),
    *_normalisation_cases(),
    *_unknown_cases(),
    *_loss_cases(),
    *_network_cases(),
    *_embedding_cases(),
    *_recurrent_cases(),
    *_function_cases(),
    *_several_inputs_cases(),
    *(random_dag(seed) for seed in range(6)),
]

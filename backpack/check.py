"""A check of an extension against plain autograd, for the tests of those who write extensions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from backpack import backpack, extend
from backpack.core.engine.results import saved
from backpack.extensions import BatchGrad, BatchL2Grad, DiagGGNExact, SumGradSquared
from backpack.extensions.backprop_extension import BackpropExtension

__all__ = ["Network", "check_extension"]

RTOL, ATOL = 1e-6, 1e-9
NUMBERS = (Tensor, float, int, complex)
IN_PLACE = "Products belong to all extensions, and gradients to autograd: change neither in place."


class Network(NamedTuple):
    """What an extension is tried on.

    Its name in messages; any model; a loss function that averages over the samples; several inputs
    ``[N, *in]`` and their targets ``[N, *]``.
    """

    title: str
    model: Module
    loss_function: Module
    X: Tensor
    y: Tensor


Truth = Callable[[Module, Module, Tensor, Tensor], Sequence[Any]]


def check_extension(
    extension: BackpropExtension,
    expected: Truth | None = None,
    networks: Iterable[Network] | None = None,
) -> None:
    """Compare what an extension saves with a plain program, in double precision.

    On every network, the results have to be those of ``expected``, and the same after a pass of
    other data, and beside other extensions, which must not notice this one. ``p.grad`` has to be
    that of autograd. Results for a ``subsampling``, if the class has that option, have to be those
    of a batch of these samples alone, whose loss keeps the factor of the whole batch. If results
    are drawn at random, the last two are left out.

    Args:
        extension: An instance, for all samples.
        expected: The truth, in plain PyTorch: called with a model, a loss function, inputs and
            targets, it returns one value for each parameter that requires a gradient, in order
            (a tensor or number, lists or dictionaries of them, or None for no result). Default: not
            known. Results that are functions, or other objects, have none: compare what they
            return.
        networks: What to try it on, one or several. Default: fully connected layers, with positions
            and with a layer that is used twice, a convolution, convolutions with a loss of every
            position, and a network of which a part is frozen.

    Raises:
        AssertionError: If something differs: names the extension, the network, the parameter, the
            shapes and the deviation.
        TypeError: If the extension is no instance.
        ValueError: If the extension has a ``subsampling`` already, a network one sample alone, or
            there is no network.
    """
    if not isinstance(extension, BackpropExtension):
        raise TypeError(f"check_extension takes an instance of an extension, got {extension!r}.")
    networks = [networks] if isinstance(networks, Network) else networks
    if extension.get_subsampling() is not None:
        raise ValueError(
            f"check_extension takes {type(extension).__name__} for all samples, and tries "
            "subsampling itself: leave that option out."
        )
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        network = None
        for network in _networks() if networks is None else networks:
            if len(network.X) < 2:
                raise ValueError(f"check_extension needs several samples: {network.title} has one.")
            model, loss = deepcopy((network.model, network.loss_function))
            X = network.X.double() if network.X.is_floating_point() else network.X
            y = network.y.double() if network.y.is_floating_point() else network.y
            _check(extension, expected, Network(network.title, model.double(), loss.double(), X, y))
    if network is None:
        raise ValueError(
            "check_extension was given no network, and has tried nothing. Networks of a generator "
            "are used up after one call: give a list."
        )


def _networks() -> Iterator[Network]:
    """Build the networks that are tried if no others are given."""
    N, CE, MSE = 5, nn.CrossEntropyLoss(), nn.MSELoss()
    x, y = torch.randn(N, 4), torch.randint(3, (N,))
    tanh, flatten = nn.Tanh(), nn.Flatten()
    plain = nn.Sequential(nn.Linear(4, 6), tanh, nn.Linear(6, 3))
    yield Network("fully connected layers", plain, CE, x, y)
    positions = nn.Sequential(nn.Linear(4, 6), tanh, flatten, nn.Linear(12, 3))
    yield Network("a layer at two positions", positions, CE, torch.randn(N, 2, 4), y)
    used_twice = nn.Linear(4, 4)
    reuse = nn.Sequential(used_twice, tanh, used_twice, nn.Sigmoid(), nn.Linear(4, 3))
    yield Network("a layer that is used twice", reuse, CE, x, y)
    images = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), flatten, nn.Linear(12, 2))
    yield Network("a convolution", images, MSE, torch.randn(N, 2, 3, 3), torch.randn(N, 2))
    series = nn.Sequential(nn.Conv1d(2, 4, 2), tanh, nn.Conv1d(4, 3, 1))
    classes = torch.randint(3, (N, 2))  # of a loss that divides by the number of positions
    yield Network("a loss of every position", series, CE, torch.randn(N, 2, 3), classes)
    frozen = deepcopy(plain)
    frozen[0].weight.requires_grad_(False)
    yield Network("a network with a frozen weight", frozen, CE, x, y)


class _Pass(NamedTuple):
    """One backward pass: what each parameter has then, by its name."""

    grads: dict[str, Tensor | None]
    results: dict[str, dict[str, Any]]


def _run(
    network: Network,
    *exts: BackpropExtension,
    rows: Sequence[int] | None = None,
    factor: float = 1.0,
    seed: int = 0,
) -> _Pass:
    """Run extensions on a copy of a network, with all or some of its samples, and a scaled loss."""
    model, loss_function = extend(deepcopy(network.model)), extend(deepcopy(network.loss_function))
    X, y = network.X, network.y
    picked = slice(None) if rows is None else list(rows)
    torch.manual_seed(seed)
    with backpack(*exts):
        (factor * loss_function(model(X[picked]), y[picked])).backward()
    named = dict(model.named_parameters())
    return _Pass({k: p.grad for k, p in named.items()}, {k: saved(p) for k, p in named.items()})


def _check(ext: BackpropExtension, expected: Truth | None, network: Network) -> None:
    name, field, rows = type(ext).__name__, ext.savefield, [len(network.X) - 1, 0]
    where = f"{name} on {network.title}"
    plain, alone = _run(network), _run(network, ext)
    _compare(f"p.grad beside {where}", alone.grads, plain.grads, IN_PLACE)
    _check_presence(ext, where, network, alone)
    mine = _of(alone, field)

    if expected is not None:
        trainable = [k for k, p in network.model.named_parameters() if p.requires_grad]
        values = expected(deepcopy(network.model), network.loss_function, network.X, network.y)
        if len(values) != len(trainable):
            raise AssertionError(
                f"{where}: expected returned {len(values)} values for {len(trainable)} parameters "
                f"that require a gradient, {trainable}. Return one for each, None for no result."
            )
        truth = {k: v for k, v in zip(trainable, values, strict=True) if v is not None}
        objects = {type(x).__name__ for x in tree_leaves(mine) if not isinstance(x, NUMBERS)}
        if objects:
            raise AssertionError(
                f"{field} of {where} holds {', '.join(objects)}, which nothing is compared with. "
                "Leave `expected` out, and compare what it returns in a test of its own."
            )
        _compare(f"{field} of {where}", mine, truth)

    _run(network, ext, rows=rows, factor=10.0)
    _compare(
        f"{field} of {where}, after a pass of other data,",
        _of(_run(network, ext), field),
        mine,
        "An instance serves many passes: keep nothing of one in it.",
    )
    others: list[BackpropExtension] = [BatchGrad(), BatchL2Grad(), SumGradSquared()]
    if ext.expects_backpropagation_quantities():  # others work for networks where these do not
        others.append(DiagGGNExact())
    others = [other for other in others if other.savefield != field]
    beside, without = _run(network, *others[:2], ext, *others[2:]), _run(network, *others)
    for other in others:
        _compare(
            f"{other.savefield} beside {where}",
            _of(beside, other.savefield),
            _of(without, other.savefield),
            IN_PLACE,
        )
    if not _agree(mine, _of(_run(network, ext, seed=1), field)):
        return  # it is random
    _compare(
        f"{field} of {where}, beside other extensions,",
        _of(beside, field),
        mine,
        "Do not depend on what else is computed.",
    )
    if "subsampling" in inspect.signature(type(ext)).parameters:
        some = copy(ext)
        some._subsampling = rows
        _compare(
            f"{field} of {where}, with subsampling={rows},",
            _of(_run(network, some), field),
            _of(_run(network, ext, rows=rows, factor=len(rows) / len(network.X)), field),
            "Expected is that of a batch of these samples alone, whose loss keeps its factor: "
            "products have the chosen samples already, and nothing is rescaled.",
        )


def _of(one: _Pass, field: str) -> dict[str, Any]:
    """Return the results of one extension, by parameter."""
    return {key: results[field] for key, results in one.results.items() if field in results}


def _check_presence(ext: BackpropExtension, where: str, network: Network, alone: _Pass) -> None:
    """Require a result for every parameter with a gradient, and for no other.

    Raises:
        AssertionError: If one is missing, or there is one too many.
    """
    mine = _of(alone, ext.savefield)
    for key, p in network.model.named_parameters():
        what = f"{_describe(key, p)} has no {ext.savefield!r}"
        if key in mine and not p.requires_grad:
            raise AssertionError(
                f"{where}: {_describe(key, p)} requires no gradient, but has {ext.savefield!r}."
            )
        if p.requires_grad and key not in mine and (ext.needs or not mine):
            has = ", ".join(alone.results[key]) or "no results"
            raise AssertionError(
                f"{where}: {what}, but {has}. Let `extract` return the value, or `finish` yield "
                "one for every parameter, under the savefield."
            )


def _describe(key: str, p: Parameter) -> str:
    return f"parameter {key!r} of shape {list(p.shape)}"


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors and numbers of a result; none of a function, or another object."""
    return [torch.as_tensor(x) for x in tree_leaves(value) if isinstance(x, NUMBERS)]


def _agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether all results are equal, up to rounding errors."""
    try:
        _compare("", one, other)
    except AssertionError:
        return False
    return True


def _compare(what: str, found: dict[str, Any], truth: dict[str, Any], advice: str = "") -> None:
    """Compare the results of all parameters.

    Raises:
        AssertionError: If they differ.
    """
    if found.keys() != truth.keys():
        raise AssertionError(
            f"{what} is there for the parameters {[*found]}, expected {[*truth]}. {advice}".rstrip()
        )
    for key, value in found.items():
        ours, theirs = _tensors(value), _tensors(truth[key])
        shapes, wanted = ([list(t.shape) for t in ts] for ts in (ours, theirs))
        if shapes != wanted:
            raise AssertionError(
                f"{what} of parameter {key!r} has shape {_one(shapes)}, expected {_one(wanted)}. "
                f"{advice}".rstrip()
            )
        for one, other in zip(ours, theirs, strict=True):
            wide = torch.promote_types(one.dtype, other.dtype)  # rounds neither of them
            one, other = one.to(wide), other.to(one.device, wide)
            if not torch.allclose(one, other, RTOL, ATOL, equal_nan=True):
                gap, size = (one - 1.0 * other).abs().max().item(), other.abs().max().item()
                raise AssertionError(
                    f"{what} of parameter {key!r} has shape {list(one.shape)}, but entries of up "
                    f"to {size:.3g} deviate by up to {gap:.3g}. {advice}".rstrip()
                )


def _one(shapes: list[list[int]]) -> Any:
    return shapes[0] if len(shapes) == 1 else shapes

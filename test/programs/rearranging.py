"""Random programs that rearrange data and activations, and what the library says of them.

A program is a model with a ``forward`` of functions and modules in every layout of the samples: an
axis anywhere, a factor of a merged axis, copies. It is written as Python code in terms of
``x.shape``, so that it also runs for a batch of one sample, and the truth is a loop over samples
with plain autograd in float64. What the library computes is ``right``, ``refused`` (an error or
a warning that is raised on purpose and names the function or the module), or wrong.

Run ``python test/programs/rearranging.py --programs 5000 --seed 0 --sizes primes``.
"""

from __future__ import annotations

import argparse
import inspect
import linecache
import os
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import backpack as library
from backpack import backpack, extend, extensions
from backpack.utils import warning

ENTRIES = 1500  # of a tensor, at most
DTYPE = torch.float64
PRODUCT = re.compile(  # with a weight
    r"(?:\w+ @ |torch\.matmul\(\w+, |torch\.einsum\('(\w+)(\w),\2z->\1z', \w+, )self\.(m\d+)\)?"
    r"|F\.linear\(\w+, self\.(m\d+)\.t\(\)\)"
)
ROUTES: dict[str, Any] = {"auto": True, "record": "record", "plain": False}

# --------------------------------------------------------------------------------------
# Programs
# --------------------------------------------------------------------------------------

HEADER = """\
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
"""


@dataclass(frozen=True)
class Program:
    """A model as code, its data and its loss.

    Attributes:
        submodules: Lines of ``__init__``.
        body: Lines of ``forward(self, x)``, without ``return``.
        result: What it returns: the samples are along the first axis.
        shape: Of the data; the samples first.
        words: Size of the vocabulary if the data are indices, else 0.
        loss: Expression of the loss module.
        target: "real", "labels" or "binary".
        seed: Of data, parameters and targets.
        plain: Whether modules alone can tell the samples: where something else is along the axis
            that they take for the batch, it has another size.
        mixes: Whether samples meet, or change places: to be refused, or right for each loss term.
        nudge: How far the entries of parameters and data are from their values, at random.
    """

    submodules: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    shape: tuple[int, ...]
    words: int
    loss: str
    target: str
    seed: int
    plain: bool = False
    mixes: bool = False
    nudge: float = 0.0

    @property
    def code(self) -> str:
        """The model as Python code."""
        init = "".join(f"        {line}\n" for line in self.submodules)
        body = "".join(f"        {line}\n" for line in (*self.body, f"return {self.result}"))
        return f"{HEADER}{init}\n    def forward(self, x):\n        N = x.shape[0]\n{body}"

    @property
    def data(self) -> str:
        """The data as Python code."""
        if self.words:
            return f"torch.randint({self.words}, {self.shape})"
        return f"torch.randn({self.shape}, dtype=torch.float64)"

    @property
    def weights(self) -> set[str]:
        """Parameters used in products ``h @ p`` alone, of samples: those of linear layers."""
        follows, found, others = {"x"}, set(), set()
        for line in self.body:
            target, _, expression = line.partition(" = ")
            read = re.findall(r"\b(h\d+|x)\b(?!\.shape)", expression)
            factors = PRODUCT.fullmatch(expression)
            if factors is not None and follows.intersection(read):
                found.add(factors[3] or factors[4])
            else:
                others.update(re.findall(r"self\.(m\d+)", line))
            if follows.intersection(read):
                follows.update(re.findall(r"\bh\d+", target))
        bare = {line[5:].split(" ")[0] for line in self.submodules if "nn.Parameter" in line}
        return (found - others) & bare

    def __str__(self) -> str:
        """Show the whole program, ready to run."""
        first, second = (f"torch.manual_seed({seed})" for seed in (self.seed, self.seed + 1))
        lines = [first, "model = Model().double()", f"X = {self.data}", "f = model(X)"]
        lines += [second, f"y = {TARGETS[self.target]}", f"loss = {self.loss}(f, y)"]
        return "\n".join((self.code, *lines))

    def build(self) -> tuple[nn.Module, Tensor]:
        """Return the model and the data, the same each time."""
        name = f"<program {self.seed}-{abs(hash(self.code)):x}>"
        linecache.cache[name] = (len(self.code), None, self.code.splitlines(True), name)
        space: dict[str, Any] = {"__name__": "program"}
        exec(compile(self.code, name, "exec"), space)
        torch.manual_seed(self.seed)
        model = space["Model"]().double()
        data = eval(self.data, {"torch": torch})
        generator = torch.Generator().manual_seed(0)
        for t in (*model.parameters(), data) if self.nudge else ():
            if t.is_floating_point():
                t.data += self.nudge * torch.randn(t.shape, generator=generator, dtype=DTYPE)
        return model, data

    def loss_function(self) -> nn.Module:
        """Return a new loss module."""
        return eval(self.loss, {"nn": nn})

    def targets(self, f: Tensor) -> Tensor:
        """Return targets for an output."""
        torch.manual_seed(self.seed + 1)
        return eval(TARGETS[self.target], {"torch": torch, "f": f})


TARGETS = {
    "real": "torch.randn_like(f)",
    "labels": "torch.randint(f.shape[1], (f.shape[0], *f.shape[2:]))",
    "binary": "torch.randint(2, f.shape).double()",
}


# --------------------------------------------------------------------------------------
# Writing them
# --------------------------------------------------------------------------------------

Axis = tuple[Any, ...]  # factors of an axis: numbers, or "N"; () is an axis of one entry


def size(axis: Axis, N: int = 1) -> int:
    """Return the number of entries of an axis."""
    return prod(N if factor == "N" else factor for factor in axis)


@dataclass(frozen=True)
class Value:
    """A tensor of the program: its name, and the factors of each axis."""

    name: str
    axes: tuple[Axis, ...]
    is_real: bool = True

    @property
    def batch(self) -> int | None:
        """The axis that the samples are in, if there are any."""
        return next((i for i, axis in enumerate(self.axes) if "N" in axis), None)

    @property
    def free(self) -> list[int]:
        """The axes without samples."""
        return [i for i, axis in enumerate(self.axes) if "N" not in axis]


class Skip(Exception):
    """An operation does not fit to a value."""


class Writer:
    """Writes a program, line by line."""

    def __init__(self, rng: random.Random, N: int, sizes: tuple[int, ...]) -> None:
        self.rng, self.N, self.sizes = rng, N, sizes
        self.lines: list[str] = []
        self.init: list[str] = []
        self.modules: dict[str, str] = {}
        self.values: list[Value] = []
        self.names = 0
        self.plain, self.mixes = True, False

    # what chance decides

    def choose(self, options: Sequence[Any]) -> Any:
        if not options:
            raise Skip
        return options[self.rng.randrange(len(options))]

    def chance(self, share: float) -> bool:
        return self.rng.randrange(100) < 100 * share

    # names

    def fresh(self) -> str:
        self.names += 1
        return f"h{self.names}"

    def let(self, expression: str, axes: Sequence[Axis], is_real: bool = True) -> Value:
        """Add a line that computes a new value."""
        if prod(size(axis, self.N) for axis in axes) > ENTRIES or len(axes) > 6:
            raise Skip
        if prod(size(axis, self.N) for axis in axes) == 0:
            raise Skip
        value = Value(self.fresh(), tuple(axes), is_real)
        self.lines.append(f"{value.name} = {expression}")
        self.values.append(value)
        return value

    def module(self, constructor: str, *inputs: Value) -> str:
        """Return the name of a submodule: a new one, or one that was used before."""
        for value in inputs:
            self.called_on(value.axes[0])
        if constructor in self.modules and self.chance(0.4):
            return self.modules[constructor]
        name = f"m{len(self.init)}"
        self.init.append(f"self.{name} = {constructor}")
        self.modules[constructor] = f"self.{name}"
        return f"self.{name}"

    def called_on(self, axis: Axis) -> None:
        """Note what a module has along the axis that it takes for that of the batch."""
        if axis != ("N",) and size(axis, self.N) == self.N:
            self.plain = False

    def parameter(self, shape: Sequence[int]) -> str:
        return self.module(f"nn.Parameter(torch.randn({tuple(shape)}))")

    # code

    def dim(self, value: Value, axis: int) -> int:
        """Write the number of an axis, from either side."""
        return axis - len(value.axes) if self.chance(0.4) else axis

    def extent(self, axis: Axis) -> str:
        """Write the size of an axis."""
        if not axis:
            return "1"
        batch = self.choose(["N", "N", "N", "x.shape[0]", "x.size(0)"])
        if "N" not in axis:
            return str(size(axis))
        return " * ".join(batch if factor == "N" else str(factor) for factor in axis)

    def extents(self, axes: Sequence[Axis]) -> str:
        """Write sizes, one of them perhaps as -1."""
        parts = [self.extent(axis) for axis in axes]
        if self.chance(0.5) and parts:
            batch = [i for i, axis in enumerate(axes) if "N" in axis]
            i = batch[0] if batch and self.chance(0.8) else self.rng.randrange(len(parts))
            parts[i] = "-1"
        return ", ".join(parts)

    def reshape(self, value: Value, axes: Sequence[Axis]) -> Value:
        extents = self.extents(axes)
        how = self.choose(
            [
                f"{value.name}.reshape({extents})",
                f"{value.name}.contiguous().view({extents})",
                f"torch.reshape({value.name}, ({extents},))",
            ]
        )
        return self.let(how, axes, value.is_real)

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        axes = [value.axes[i] for i in order]
        a, n = value.name, len(order)
        moved = [i for i in range(n) if order[i] != i]
        ways = [f"{a}.permute({', '.join(map(str, order))})", f"torch.permute({a}, {tuple(order)})"]
        if n <= 5:
            letters = "abcde"[:n]
            ways.append(f"torch.einsum('{letters}->{''.join(letters[i] for i in order)}', {a})")
        if len(moved) == 2:
            i, j = (self.dim(value, m) for m in moved)
            swaps = [f"{a}.transpose({i}, {j})", f"torch.swapaxes({a}, {i}, {j})"]
            ways = 3 * swaps + ways + ([f"{a}.mT"] if moved == [n - 2, n - 1] else [])
            ways += [f"{a}.T", f"{a}.t()"] if n == 2 else []
        for source in range(n):
            for goal in range(n):
                there = [i for i in range(n) if i != source]
                there.insert(goal, source)
                if there == list(order) and moved:
                    ways += [f"{a}.movedim({source}, {goal})"]
        return self.let(self.choose(ways), axes, value.is_real)

    # shapes that modules and losses want

    def batch_at(self, value: Value, goal: int) -> Value:
        """Bring the samples, alone or with what is merged with them, to an axis."""
        batch = value.batch
        if batch is None or goal >= len(value.axes):
            raise Skip
        order = [i for i in range(len(value.axes)) if i != batch]
        order.insert(goal, batch)
        return value if batch == goal else self.permute(value, order)

    def apart(self, value: Value) -> Value:
        """Split the axis of the samples from all that is merged with it."""
        batch = value.batch
        if batch is None:
            raise Skip
        axis = value.axes[batch]
        if axis == ("N",):
            return value
        cut = axis.index("N")
        parts = [part for part in (axis[:cut], ("N",), axis[cut + 1 :]) if part]
        return self.split(value, batch, parts)

    def split(self, value: Value, i: int, parts: Sequence[Axis]) -> Value:
        axes = [*value.axes[:i], *parts, *value.axes[i + 1 :]]
        if self.chance(0.5):
            dim = self.dim(value, i)
            how = f"{value.name}.unflatten({dim}, ({self.extents(parts)}))"
            return self.let(how, axes, value.is_real)
        return self.reshape(value, axes)

    def samples_first(self, value: Value) -> Value:
        return self.batch_at(self.apart(value), 0)


Operation = Callable[[Writer, Value], Value]
REARRANGE: list[Operation] = []
COMPUTE: list[Operation] = []
APPLY: list[Operation] = []
MIX: list[Operation] = []


def op(group: list[Operation], weight: int = 2) -> Callable[[Operation], Operation]:
    """Add an operation to a group, as often as its weight says."""

    def add(function: Operation) -> Operation:
        group.extend([function] * weight)
        return function

    return add


def real(v: Value) -> Value:
    if not v.is_real:
        raise Skip
    return v


# --- rearrangements


@op(REARRANGE, 6)
def permuted(w: Writer, v: Value) -> Value:
    if len(v.axes) < 2:
        raise Skip
    order = list(range(len(v.axes)))
    if w.chance(0.6):
        i, j = w.choose(order), w.choose(order)
        order[i], order[j] = order[j], order[i]
    else:
        w.rng.shuffle(order)
    if order == sorted(order):
        raise Skip
    return w.permute(v, order)


@op(REARRANGE, 6)
def merged(w: Writer, v: Value) -> Value:
    if len(v.axes) < 2:
        raise Skip
    i = w.rng.randrange(len(v.axes) - 1)
    axes = [*v.axes[:i], v.axes[i] + v.axes[i + 1], *v.axes[i + 2 :]]
    if w.chance(0.4):
        how = w.choose(
            [f"{v.name}.flatten({i}, {i + 1})", f"torch.flatten({v.name}, {i}, {i + 1})"]
        )
        return w.let(how, axes, v.is_real)
    return w.reshape(v, axes)


@op(REARRANGE, 6)
def split(w: Writer, v: Value) -> Value:
    i = w.choose([i for i, axis in enumerate(v.axes) if len(axis) > 1 or size(axis) in (4, 6, 8)])
    axis = v.axes[i]
    if len(axis) > 1:
        cut = w.rng.randrange(1, len(axis))
        return w.split(v, i, [axis[:cut], axis[cut:]])
    return w.split(v, i, w.choose([[(2,), (axis[0] // 2,)], [(axis[0] // 2,), (2,)]]))


@op(REARRANGE, 3)
def unsqueezed(w: Writer, v: Value) -> Value:
    i = w.rng.randrange(len(v.axes) + 1)
    axes = [*v.axes[:i], (), *v.axes[i:]]
    index = ", ".join([":"] * i + ["None"])
    how = [f"{v.name}.unsqueeze({i})", f"torch.unsqueeze({v.name}, {i})", f"{v.name}[{index}]"]
    return w.let(w.choose(how), axes, v.is_real)


@op(REARRANGE, 3)
def squeezed(w: Writer, v: Value) -> Value:
    i = w.choose([i for i, axis in enumerate(v.axes) if not axis])
    axes = [*v.axes[:i], *v.axes[i + 1 :]]
    index = ", ".join([":"] * i + ["0"])
    how = [f"{v.name}.squeeze({w.dim(v, i)})", f"{v.name}[{index}]", f"{v.name}.select({i}, 0)"]
    return w.let(w.choose(how), axes, v.is_real)


@op(REARRANGE, 3)
def stacked(w: Writer, v: Value) -> Value:
    others = [u for u in w.values if u.axes == v.axes and u.is_real == v.is_real]
    parts = [v, *(w.choose(others) for _ in range(w.choose([1, 1, 2])))]
    i = w.rng.randrange(len(v.axes) + 1)
    names = ", ".join(u.name for u in parts)
    axes = [*v.axes[:i], (len(parts),), *v.axes[i:]]
    return w.let(f"torch.stack([{names}], {i})", axes, v.is_real)


@op(REARRANGE, 4)
def concatenated(w: Writer, v: Value) -> Value:
    i = w.rng.randrange(len(v.axes))

    def fits(u: Value) -> bool:
        if len(u.axes) != len(v.axes) or u.is_real != v.is_real:
            return False
        rest = all(a == b for j, (a, b) in enumerate(zip(u.axes, v.axes, strict=True)) if j != i)
        return rest and (u.axes[i] == v.axes[i] or ("N" not in u.axes[i] + v.axes[i]))

    parts = [v, *(w.choose([u for u in w.values if fits(u)]) for _ in range(w.choose([1, 1, 2])))]
    names = ", ".join(u.name for u in parts)
    if "N" in v.axes[i]:
        axis: Axis = (len(parts), *v.axes[i])
    else:
        axis = (sum(size(u.axes[i]) for u in parts),)
    how = f"torch.cat([{names}], {w.dim(v, i)})"
    return w.let(how, [*v.axes[:i], axis, *v.axes[i + 1 :]], v.is_real)


@op(REARRANGE, 3)
def repeated(w: Writer, v: Value) -> Value:
    i, k = w.rng.randrange(len(v.axes)), w.choose([2, 2, 3])
    if w.chance(0.5):
        counts = ", ".join(str(k if j == i else 1) for j in range(len(v.axes)))
        axis, how = (k, *v.axes[i]), w.choose([f".repeat({counts})", f".tile(({counts},))"])
    else:
        axis, how = (*v.axes[i], k), f".repeat_interleave({k}, {w.dim(v, i)})"
    return w.let(v.name + how, [*v.axes[:i], axis, *v.axes[i + 1 :]], v.is_real)


@op(REARRANGE, 2)
def expanded(w: Writer, v: Value) -> Value:
    i, k = w.rng.randrange(len(v.axes) + 1), w.choose([2, 3])
    sizes = ", ".join(["-1"] * i + [str(k)] + ["-1"] * (len(v.axes) - i))
    axes = [*v.axes[:i], (k,), *v.axes[i:]]
    return w.let(f"{v.name}.unsqueeze({i}).expand({sizes})", axes, v.is_real)


@op(REARRANGE, 4)
def part(w: Writer, v: Value) -> Value:
    """Some entries of an axis: of one without samples, or of the copies."""
    i = w.rng.randrange(len(v.axes))
    axis, a, d = v.axes[i], v.name, w.dim(v, i)
    colons = ", ".join([":"] * i + [""])
    before, after = v.axes[:i], v.axes[i + 1 :]
    if "N" in axis:
        if len(axis) < 2:
            raise Skip
        if axis[0] != "N":
            k, rest = axis[0], axis[1:]
            n = w.extent(rest)
            first = w.choose(
                [
                    f"{a}.chunk({k}, {d})[{w.rng.randrange(k)}]",
                    f"{a}[{colons}:{n}]",
                    f"{a}.narrow({d}, 0, {n})",
                    f"{a}.split({n}, {d})[-1]",
                ]
            )
            return w.let(first, [*before, rest, *after], v.is_real)
        k = axis[-1]
        every = f"{a}[{colons}{w.rng.randrange(k)}::{k}]"
        return w.let(every, [*before, axis[:-1], *after], v.is_real)
    n = size(axis)
    j = w.rng.randrange(n)
    if w.chance(0.5):
        how = w.choose(
            [
                f"{a}[{colons}{j}]",
                f"{a}.select({d}, {j})",
                f"{a}.unbind({d})[{j}]",
                f"{a}[{colons}{j - n}]",
                *([f"{a}[..., {j}]"] if i == len(v.axes) - 1 else []),
            ]
        )
        if len(v.axes) == 1:
            raise Skip
        return w.let(how, [*before, *after], v.is_real)
    if n < 2:
        raise Skip
    k = w.rng.randrange(1, n)
    how = w.choose(
        [
            f"{a}.narrow({d}, {n - k}, {k})",
            f"{a}[{colons}{n - k}:]",
            f"{a}.split([{n - k}, {k}], {d})[1]",
            f"torch.split({a}, {k}, dim={d})[0]",
        ]
    )
    return w.let(how, [*before, (k,), *after], v.is_real)


@op(REARRANGE, 2)
def halves(w: Writer, v: Value) -> Value:
    """Both parts of an axis, combined."""
    i = w.choose([i for i in v.free if size(v.axes[i]) % 2 == 0])
    k = size(v.axes[i]) // 2
    one, two = w.fresh(), w.fresh()
    d = w.dim(v, i)
    w.lines.append(
        w.choose(
            [
                f"{one}, {two} = {v.name}.chunk(2, {d})",
                f"{one}, {two} = {v.name}.split({k}, {d})",
                f"{one}, {two} = torch.tensor_split({v.name}, 2, {d})",
            ]
        )
    )
    axes = [*v.axes[:i], (k,), *v.axes[i + 1 :]]
    how = w.choose([f"{one} + {two}", f"torch.maximum({one}, {two})", f"{two} - {one}", two])
    return w.let(how, axes, v.is_real)


@op(REARRANGE, 2)
def moved(w: Writer, v: Value) -> Value:
    i = w.choose(v.free)
    k, a, d = w.choose([1, -1, 2]), v.name, w.dim(v, i)
    how = w.choose([f"{a}.roll({k}, {d})", f"torch.roll({a}, {k}, dims={d})", f"{a}.flip({d})"])
    return w.let(how, v.axes, v.is_real)


@op(REARRANGE, 1)
def padded(w: Writer, v: Value) -> Value:
    if v.batch == len(v.axes) - 1:
        raise Skip
    n = size(v.axes[-1])
    a, b = w.choose([(0, 1), (1, 0), (1, 1)])
    how = f"F.pad({real(v).name}, ({a}, {b}))"
    return w.let(how, [*v.axes[:-1], (n + a + b,)])


@op(REARRANGE, 2)
def indexed(w: Writer, v: Value) -> Value:
    i = w.choose(v.free)
    n, a, d = size(v.axes[i]), v.name, w.dim(v, i)
    index = [w.rng.randrange(n) for _ in range(w.choose([1, 2, n]))]
    colons = ", ".join([":"] * i + [""])
    how = w.choose(
        [
            f"{a}.index_select({d}, torch.tensor({index}))",
            f"{a}[{colons}{index}]",
            f"{a}[{colons}torch.tensor({index})]",
        ]
    )
    return w.let(how, [*v.axes[:i], (len(index),), *v.axes[i + 1 :]], v.is_real)


@op(REARRANGE, 1)
def gathered(w: Writer, v: Value) -> Value:
    """Entries in an order that the sample decides."""
    i = w.choose(v.free)
    a, d = v.name, w.dim(v, i)
    index = f"{a}{w.choose(['', '.detach()'])}.argsort(dim={d}, stable=True)"
    how = w.choose([f"{a}.gather({d}, {index})", f"torch.take_along_dim({a}, {index}, {d})"])
    return w.let(how, v.axes, v.is_real)


@op(REARRANGE, 1)
def same(w: Writer, v: Value) -> Value:
    how = w.choose([".clone()", ".contiguous()", ".view_as({0})", ".reshape({0}.shape)"])
    if how.startswith(".view_as"):
        return w.let(f"{v.name}.contiguous(){how.format(v.name)}", v.axes, v.is_real)
    return w.let(v.name + how.format(v.name), v.axes, v.is_real)


@op(REARRANGE, 1)
def there_and_back(w: Writer, v: Value) -> Value:
    """Samples in another order, and in theirs again, after something was computed."""
    batch, outside = v.batch, list(w.values)
    if batch is None or v.axes[batch] != ("N",):
        raise Skip
    go, back = ".flip({0})", ".flip({0})"
    if w.chance(0.5):
        order = w.fresh()
        w.lines.append(f"{order} = x.flatten(1).sum(1).argsort(stable=True)")
        go, back = f".index_select({{0}}, {order})", f".index_select({{0}}, {order}.argsort())"
    v = w.let(v.name + go.format(batch), v.axes, v.is_real)
    w.values = [v]  # nothing in another order may meet it
    w.plain = False
    for _ in range(w.choose([1, 2])):
        v = some(w, v)
    if v.batch is None or v.axes[v.batch] != ("N",):
        raise Skip
    w.values = outside
    return w.let(v.name + back.format(v.batch), v.axes, v.is_real)


@op(REARRANGE, 1)
def together(w: Writer, v: Value) -> Value:
    """Different tensors along the axis of the samples, and apart again."""
    batch = v.batch
    if batch is None or v.axes[batch] != ("N",):
        raise Skip
    rest = [axis for i, axis in enumerate(v.axes) if i != batch]

    def fits(u: Value) -> bool:
        if u.batch != batch or u.is_real != v.is_real or len(u.axes) != len(v.axes):
            return False
        return [axis for i, axis in enumerate(u.axes) if i != batch] == rest

    u = w.choose([u for u in w.values if fits(u)])
    whole = w.let(f"torch.cat([{v.name}, {u.name}], {batch})", v.axes, v.is_real)
    # its axis has more samples than this says: only what leaves the axis alone may follow
    axes = [*whole.axes]
    if w.chance(0.7) and batch != len(v.axes) - 1 and v.is_real:
        n, k = size(v.axes[-1]), w.choose([2, 3])
        inner = f"{w.module(f'nn.Linear({n}, {k})')}({whole.name})"
        axes[-1] = (k,)
    else:
        inner = f"{whole.name}.tanh()" if v.is_real else f"{whole.name}.clone()"
    name = w.fresh()
    w.lines.append(f"{name} = {inner}")
    n = w.extent(v.axes[batch])
    m = w.extent(u.axes[batch])
    w.values.remove(whole)
    one = w.fresh()
    w.lines.append(f"{one}, _ = {name}.split([{n}, {m}], {batch})")
    return w.let(f"{one}.clone()", axes, v.is_real)


# --- computations


@op(COMPUTE, 4)
def elementwise(w: Writer, v: Value) -> Value:
    a = real(v).name
    functions = [
        *(f"{a}.tanh()", f"torch.sigmoid({a})", f"F.gelu({a})", f"{a}.relu()", f"{a}.sin()"),
        *(f"{a} * 0.5", f"1 - {a}", f"{a} / 2", f"-{a}", f"{a} + 1", f"{a}.abs()", f"{a} ** 2"),
        *(f"F.softplus({a})", f"{a}.clamp(-1, 1)", f"torch.exp(-{a} ** 2)"),
        *(f"F.dropout({a}, 0.0)", f"F.leaky_relu({a}, 0.1)", f"{a}.cos() * {a}"),
        *(f"{a} * {a}.detach()", f"F.silu({a})"),
    ]
    return w.let(w.choose(functions), v.axes)


@op(COMPUTE, 4)
def along_axes(w: Writer, v: Value) -> Value:
    a, i = real(v).name, w.choose(v.free)
    d = w.dim(v, i)
    ways = [f"{a}.softmax({d})", f"F.log_softmax({a}, dim={d})", f"{a}.cumsum({d})"]
    if i == len(v.axes) - 1 and size(v.axes[i]) > 1:
        n = size(v.axes[i])
        ways += [f"F.layer_norm({a}, ({n},))", f"F.normalize({a}, dim={d})"]
        p, q = w.parameter((n,)), w.parameter((n,))
        ways += [f"F.layer_norm({a}, ({n},), {p}, {q})"]
    return w.let(w.choose(ways), v.axes)


@op(COMPUTE, 3)
def aggregated(w: Writer, v: Value) -> Value:
    a, i = real(v).name, w.choose(v.free)
    if len(v.axes) < 2:
        raise Skip
    d, keep = w.dim(v, i), w.chance(0.3)
    end = f"({d}, keepdim=True)" if keep else f"({d})"
    how = w.choose([".mean", ".sum", ".amax", ".logsumexp", ".mean", ".sum"])
    axes = [*v.axes[:i], *([()] if keep else []), *v.axes[i + 1 :]]
    return w.let(f"{a}{how}{end}", axes)


@op(COMPUTE, 5)
def combined(w: Writer, v: Value) -> Value:
    """Two tensors with their samples in the same place, broadcast."""
    real(v)

    def fits(u: Value) -> bool:
        if not u.is_real:
            return False
        for a, b in zip(u.axes[::-1], v.axes[::-1], strict=False):
            one = size(a, w.N) == 1 or size(b, w.N) == 1
            if a != b and not one and ("N" in a + b or size(a) != size(b)):
                return False
        n_u, n_v = u.batch, v.batch
        if n_u is None or n_v is None:
            return True
        return len(u.axes) - n_u == len(v.axes) - n_v and u.axes[n_u] == v.axes[n_v]

    candidates = [u for u in w.values if fits(u)]
    u = w.choose(candidates[-8:])
    n = max(len(u.axes), len(v.axes))
    pad = [((),) * (n - len(t.axes)) + t.axes for t in (u, v)]
    axes = [a if size(a, w.N) > 1 or "N" in a else b for a, b in zip(*pad, strict=True)]
    a, b = w.choose([(u.name, v.name), (v.name, u.name)])
    ways = [f"{a} + {b}", f"{a} * {b}", f"{a} - {b}", f"torch.add({a}, {b})"]
    ways += [f"torch.where({a} > 0, {a}, {b})", f"torch.maximum({a}, {b})", f"{a} * {b}.sigmoid()"]
    return w.let(w.choose(ways), axes)


@op(COMPUTE, 4)
def with_table(w: Writer, v: Value) -> Value:
    """A parameter or a constant without samples: positions, scales, masks."""
    real(v)
    n = len(v.axes)
    first = w.rng.randrange(n)
    axes = [() if "N" in axis or w.chance(0.2) else axis for axis in v.axes[first:]]
    shape = [size(axis) for axis in axes]
    table = w.parameter(shape)
    constant = f"torch.linspace(-1, 1, {prod(shape)}, dtype=torch.float64).reshape({tuple(shape)})"
    ways = [f"{v.name} + {table}", f"{v.name} * {table}", f"{v.name} + {table}.tanh()"]
    ways += [f"{v.name} * {constant}", f"{v.name} + {constant}", f"torch.add({table}, {v.name})"]
    ways += [f"{v.name}.masked_fill({constant} > 0.2, 0.5)"]
    return w.let(w.choose(ways), v.axes)


@op(COMPUTE, 2)
def positions(w: Writer, v: Value) -> Value:
    """An embedding of positions."""
    real(v)
    i, last = w.choose(v.free), len(v.axes) - 1
    if i == last or v.batch == last:
        raise Skip
    n, h = size(v.axes[i]), size(v.axes[last])
    table = w.module(f"nn.Embedding({n}, {h})", Value("", ((n,),)))
    p = f"{table}(torch.arange({n}))"
    p = f"{p}.reshape({n}, {', '.join(['1'] * (last - i - 1) + [str(h)])})"
    return w.let(f"{v.name} + {p}", v.axes)


@op(COMPUTE, 2)
def token(w: Writer, v: Value) -> Value:
    """A parameter that is expanded to the samples, and another entry of an axis."""
    real(v)
    i = w.choose(v.free)
    shape = [1 if j == i or "N" in axis else size(axis) for j, axis in enumerate(v.axes)]
    p = w.parameter(shape)
    sizes = ", ".join(
        w.extent(axis) if "N" in axis else "-1" if w.chance(0.5) else str(shape[j])
        for j, axis in enumerate(v.axes)
    )
    end = w.choose([".expand({0})", ".expand({0})", ".repeat({1})"])
    counts = ", ".join(w.extent(axis) if "N" in axis else "1" for axis in v.axes)
    tokens = p + end.format(sizes, counts)
    axes = [*v.axes[:i], (size(v.axes[i]) + 1,), *v.axes[i + 1 :]]
    return w.let(f"torch.cat([{tokens}, {v.name}], {w.dim(v, i)})", axes)


@op(COMPUTE, 2)
def masked(w: Writer, v: Value) -> Value:
    a = real(v).name
    ways = [
        f"{a}.masked_fill({a} < 0, 0.1)",
        f"{a} * ({a} > 0)",
        f"torch.where({a} > 0.5, 1.0, {a})",
    ]
    others = [u for u in w.values if u.axes == v.axes and u.is_real]
    u = w.choose(others)
    ways += [f"{a}.where({u.name} > 0, torch.zeros_like({a}))", f"{a} * ({u.name} > 0).double()"]
    ways += [f"torch.where({u.name} > 0, {a}, {u.name})"]
    return w.let(w.choose(ways), v.axes)


@op(COMPUTE, 4)
def product(w: Writer, v: Value) -> Value:
    """Matrix products of activations, and with parameters from either side."""
    a = real(v).name
    if len(v.axes) < 2:
        raise Skip
    rows, columns = v.axes[-2:]
    if "N" not in columns and w.chance(0.5):
        k = w.choose([2, 3])
        p = w.parameter((size(columns), k))
        how = [f"{a} @ {p}", f"torch.matmul({a}, {p})", f"F.linear({a}, {p}.t())"]
        return w.let(w.choose(how), [*v.axes[:-1], (k,)])
    if "N" not in rows and w.chance(0.5):
        k = w.choose([2, 3])
        p = w.parameter((k, size(rows)))
        return w.let(f"{p} @ {a}", [*v.axes[:-2], (k,), columns])
    if "N" in rows + columns:
        raise Skip
    ways = [f"{a} @ {a}.mT", f"torch.matmul({a}, {a}.transpose(-2, -1))"]
    ways += [f"torch.einsum('...td,...sd->...ts', {a}, {a})"]
    if len(v.axes) == 3:
        ways += [f"torch.bmm({a}, {a}.transpose(1, 2))", f"torch.einsum('btd,bsd->bts', {a}, {a})"]
    if w.chance(0.5):
        return w.let(f"({w.choose(ways)}).softmax(-1) @ {a}", v.axes)
    return w.let(w.choose(ways), [*v.axes[:-1], rows])


@op(COMPUTE, 2)
def einsum(w: Writer, v: Value) -> Value:
    """A contraction of any axis with a parameter, the result anywhere."""
    if len(v.axes) > 5:
        raise Skip
    a, i = real(v).name, w.choose(v.free)
    k, letters = w.choose([2, 3]), "abcde"[: len(v.axes)]
    p = w.parameter((size(v.axes[i]), k))
    there = [j for j in range(len(v.axes)) if j != i]
    goal = w.rng.randrange(len(there) + 1)
    out = [letters[j] for j in there]
    out.insert(goal, "z")
    axes = [v.axes[j] for j in there]
    axes.insert(goal, (k,))
    return w.let(f"torch.einsum('{letters},{letters[i]}z->{''.join(out)}', {a}, {p})", axes)


@op(COMPUTE, 2)
def attention(w: Writer, v: Value) -> Value:
    if len(v.axes) < 3 or "N" in v.axes[-1] + v.axes[-2]:
        raise Skip
    a = real(v).name
    causal = w.choose(["", ", is_causal=True"])
    return w.let(f"F.scaled_dot_product_attention({a}, {a}, {a}{causal})", v.axes)


@op(COMPUTE, 3)
def in_place(w: Writer, v: Value) -> Value:
    if v.name == "x":
        raise Skip
    a, b = real(v).name, w.fresh()
    ways = [f"{b}.mul_(0.5)", f"{b}.add_(1)", f"{b}.relu_()", f"{b}.tanh_()", f"{b} *= 2"]
    if v.free:
        i = w.choose(v.free)
        colons = ", ".join([":"] * i + ["0"])
        ways += [f"{b}[{colons}] = 0.5", f"{b}[{colons}] *= 2", f"{b}[{colons}].add_(0.1)"]
    others = [u for u in w.values if u.axes == v.axes and u.is_real]
    ways += [f"{b} += {w.choose(others).name}"]
    w.lines.append(f"{b} = {a}.clone()" if w.chance(0.6) else f"{b} = {a} * 1")
    if w.chance(0.3):  # on a view of it
        view = w.fresh()
        w.lines.append(f"{view} = {b}.transpose(0, -1)")
        w.lines.append(f"{view}.mul_(1.5)")
    w.lines.append(w.choose(ways))
    return w.let(f"{b} + 0", v.axes)


@op(COMPUTE, 1)
def constants(w: Writer, v: Value) -> Value:
    """Zeros and ones in the shape of something."""
    a = real(v).name
    i = w.choose(range(len(v.axes)))
    n = ", ".join(w.extent(axis) for axis in v.axes)
    zeros = w.choose(
        [f"torch.ones_like({a})", f"{a}.new_ones({n})", f"torch.ones({a}.shape).to({a})"]
    )
    axis: Axis = (2, *v.axes[i]) if "N" in v.axes[i] else (2 * size(v.axes[i]),)
    axes = [*v.axes[:i], axis, *v.axes[i + 1 :]]
    return w.let(f"torch.cat([{a}, {zeros}], {w.dim(v, i)})", axes)


# --- modules


def widths(w: Writer) -> int:
    return w.choose([2, 3, 4, *w.sizes[1:]])


@op(APPLY, 6)
def linear(w: Writer, v: Value) -> Value:
    if v.batch == len(v.axes) - 1:
        raise Skip
    k = widths(w)
    bias = w.choose(["", "", ", bias=False"])
    m = w.module(f"nn.Linear({size(v.axes[-1])}, {k}{bias})", real(v))
    return w.let(f"{m}({v.name})", [*v.axes[:-1], (k,)])


@op(APPLY, 2)
def convolution(w: Writer, v: Value) -> Value:
    if len(v.axes) not in (3, 4) or v.batch not in (0, None):
        raise Skip
    if v.batch is None and len(v.axes) != 4:
        raise Skip
    d, c, k = len(v.axes) - 2, size(v.axes[1]), w.choose([2, 3])
    if w.chance(0.5):
        m = w.module(f"nn.Conv{d}d({c}, {k}, 3, padding=1)", real(v))
        return w.let(f"{m}({v.name})", [v.axes[0], (k,), *v.axes[2:]])
    m = w.module(f"nn.Conv{d}d({c}, {k}, 1)", real(v))
    return w.let(f"{m}({v.name})", [v.axes[0], (k,), *v.axes[2:]])


@op(APPLY, 2)
def normalised(w: Writer, v: Value) -> Value:
    if v.batch == len(v.axes) - 1 or size(v.axes[-1]) < 2:
        raise Skip
    n = size(v.axes[-1])
    m = w.module(w.choose([f"nn.LayerNorm({n})", f"nn.RMSNorm({n})"]), real(v))
    return w.let(f"{m}({v.name})", v.axes)


@op(APPLY, 1)
def group_normalised(w: Writer, v: Value) -> Value:
    if len(v.axes) < 3 or v.batch != 0 or size(v.axes[1]) * size(v.axes[2]) < 2:
        raise Skip
    m = w.module(f"nn.GroupNorm(1, {size(v.axes[1])})", real(v))
    return w.let(f"{m}({v.name})", v.axes)


@op(APPLY, 3)
def recurrent(w: Writer, v: Value) -> Value:
    if len(v.axes) != 3 or v.batch == 2 or v.batch is None:
        raise Skip
    first, k, h = v.batch == 0, w.choose([2, 3]), size(v.axes[2])
    cls = w.choose(["LSTM", "GRU", "RNN"])
    m = w.module(f"nn.{cls}({h}, {k}{', batch_first=True' if first else ''})")
    w.called_on(v.axes[v.batch])
    if w.chance(0.25):
        last = f"{m}({real(v).name})[1]" + ("[0]" if cls == "LSTM" else "")
        return w.let(last, [(), v.axes[v.batch], (k,)])
    return w.let(f"{m}({real(v).name})[0]", [*v.axes[:2], (k,)])


@op(APPLY, 3)
def attended(w: Writer, v: Value) -> Value:
    if len(v.axes) != 3 or v.batch == 2 or v.batch is None:
        raise Skip
    h, first = size(v.axes[2]), v.batch == 0
    heads = w.choose([k for k in (1, 2) if h % k == 0])
    m = w.module(f"nn.MultiheadAttention({h}, {heads}{', batch_first=True' if first else ''})")
    w.called_on(v.axes[v.batch])
    others = [u for u in w.values if u.axes == v.axes and u.is_real]
    u = w.choose([v, w.choose(others)])
    weights = w.choose(["", ", need_weights=False"])
    return w.let(f"{m}({real(v).name}, {u.name}, {u.name}{weights})[0]", v.axes)


@op(APPLY, 1)
def packed(w: Writer, v: Value) -> Value:
    if len(v.axes) != 3 or v.batch == 2 or v.batch is None:
        raise Skip
    k, h, n = w.choose([2, 3]), size(v.axes[2]), w.extent(v.axes[v.batch])
    steps = size(v.axes[1 - v.batch])
    first = ", batch_first=True" if v.batch == 0 else ""
    w.called_on(v.axes[v.batch])
    m = w.module(f"nn.GRU({h}, {k}{first})")
    sequences = f"torch.full(({n},), {steps}){first}"
    pack = f"nn.utils.rnn.pack_padded_sequence({real(v).name}, {sequences})"
    result = f"nn.utils.rnn.pad_packed_sequence({m}({pack})[0]{first})[0]"
    return w.let(result, [*v.axes[:2], (k,)])


@op(APPLY, 1)
def encoder(w: Writer, v: Value) -> Value:
    if len(v.axes) != 3 or v.batch == 2 or v.batch is None or size(v.axes[2]) < 2:
        raise Skip
    first = ", batch_first=True" if v.batch == 0 else ""
    w.called_on(v.axes[v.batch])
    m = w.module(f"nn.TransformerEncoderLayer({size(v.axes[2])}, 1, 3, 0.0{first})")
    return w.let(f"{m}({real(v).name})", v.axes)


@op(APPLY, 1)
def nested(w: Writer, v: Value) -> Value:
    if v.batch == len(v.axes) - 1:
        raise Skip
    n, k = size(v.axes[-1]), widths(w)
    parts = w.choose(
        [
            f"nn.Linear({n}, {k}), nn.ReLU()",
            f"nn.Tanh(), nn.Linear({n}, {k})",
            f"nn.Linear({n}, 2), nn.Sigmoid(), nn.Linear(2, {k})",
        ]
    )
    m = w.module(f"nn.Sequential({parts})", real(v))
    return w.let(f"{m}({v.name})", [*v.axes[:-1], (k,)])


@op(APPLY, 1)
def other_modules(w: Writer, v: Value) -> Value:
    if v.batch != 0:
        raise Skip
    a, n = real(v).name, len(v.axes)
    ways: list[tuple[str, list[Axis]]] = [("nn.Identity()", [*v.axes])]
    if n > 2:
        ways.append(("nn.Flatten()", [v.axes[0], sum(v.axes[1:], ())]))
        ways.append((f"nn.BatchNorm1d({size(v.axes[1])}).eval()", [*v.axes][:3]))
    if n == 3 and size(v.axes[2]) % 2 == 0:
        pooled = [*v.axes[:2], (size(v.axes[2]) // 2,)]
        ways += [("nn.MaxPool1d(2)", pooled), ("nn.AvgPool1d(2)", pooled)]
    if n == 4:
        ways.append(("nn.AdaptiveAvgPool2d(1)", [*v.axes[:2], (), ()]))
    if n == 2:
        ways.append((f"nn.Bilinear({size(v.axes[1])}, {size(v.axes[1])}, 2)", [v.axes[0], (2,)]))
    module, axes = w.choose(ways)
    m = w.module(module, v)
    if "BatchNorm" in module and n != 3:
        raise Skip
    return w.let(f"{m}({a}, {a})" if "Bilinear" in module else f"{m}({a})", axes)


@op(APPLY, 1)
def routed(w: Writer, v: Value) -> Value:
    """A layer on the rows that the data choose."""
    if v.batch is None or v.batch == len(v.axes) - 1 or len(v.axes) < 2:
        raise Skip
    n, a = size(v.axes[-1]), w.fresh()
    rows = w.extent(sum(v.axes[:-1], ()))
    w.plain = False
    m = w.module(f"nn.Linear({n}, {n})")
    w.lines.append(f"{a} = {real(v).name}.reshape({w.choose(['-1', rows])}, {n})")
    if w.chance(0.5):
        index, result = w.fresh(), w.fresh()
        w.lines.append(f"{index} = torch.where({a}.detach()[:, 0] > 0.1)[0]")
        w.lines.append(f"{result} = torch.zeros_like({a})")
        w.lines.append(f"{result}.index_add_(0, {index}, {m}({a}[{index}]))")
    else:
        mask, result = w.fresh(), w.fresh()
        w.lines.append(f"{mask} = {a}.detach()[:, 0] > 0.1")
        w.lines.append(f"{result} = {a}.clone()")
        w.lines.append(f"{result}[{mask}] = {m}({a}[{mask}])")
    return w.let(f"{result}.view({', '.join(w.extent(axis) for axis in v.axes)})", v.axes)


@op(APPLY, 1)
def activation(w: Writer, v: Value) -> Value:
    m = w.module(w.choose(["nn.ReLU()", "nn.Tanh()", "nn.PReLU()", "nn.Dropout(0.0)"]), real(v))
    return w.let(f"{m}({v.name})", v.axes)


@op(APPLY, 2)
def activation_in_place(w: Writer, v: Value) -> Value:
    """A module that changes a tensor, or a part of it, whatever is read afterwards."""
    if v.name == "x":
        raise Skip
    options = {"ReLU": "", "LeakyReLU": "0.3, ", "SiLU": "", "Hardtanh": "-0.5, 0.7, ", "ELU": ""}
    name = w.choose(list(options))
    m = w.module(f"nn.{name}({options[name]}inplace=True)", real(v))
    b = w.fresh()
    w.lines.append(f"{b} = {v.name}.clone()" if w.chance(0.5) else f"{b} = {v.name} * 1")
    read, result = b, f"{b} + 0"
    if w.chance(0.4):
        reads = [f"{b}.transpose(0, -1)", f"{b}[None]"]
        for i in v.free:
            reads.append(f"{b}[{', '.join([':'] * i + [w.choose(['0', ':1', '::2'])])}]")
        read = w.choose(reads)
    elif w.chance(0.5):
        returned = w.fresh()
        read, result = b, f"{returned} * {b}" if w.chance(0.5) else returned
        w.lines.append(f"{returned} = {m}({read})")
        return w.let(result, v.axes)
    w.lines.append(f"{m}({read})")
    return w.let(result, v.axes)


@op(APPLY, 1)
def of_a_table(w: Writer, v: Value) -> Value:
    """A layer on a parameter: its result is the same for all samples."""
    if v.batch == len(v.axes) - 1:
        raise Skip
    n = size(v.axes[-1])
    m = w.module(f"nn.Linear({n}, {n})", Value("", ((n,),)))
    return w.let(f"{real(v).name} + {m}({w.parameter((n,))})", v.axes)


# --- samples that meet


@op(MIX)
def meeting(w: Writer, v: Value) -> Value:
    batch = v.batch
    if batch is None or v.name == "x":
        raise Skip
    a, d = real(v).name, batch
    ways = [
        *(f"{a} - {a}.mean({d}, keepdim=True)", f"{a}.softmax({d})", f"{a} / {a}.norm()"),
        *(f"{a} + {a}.roll(1, {d})", f"{a}.flip({d})", f"{a}.cumsum({d})"),
        *(f"{a}[torch.arange(N - 1, -1, -1)]" if d == 0 else f"{a}.flip({d})",),
        *(f"{a} * {a}.sum({d}, keepdim=True)", f"{a} - {a}.amax({d}, keepdim=True)"),
        *(f"{a} - {a}.mean()", f"F.layer_norm({a}, {a}.shape)", f"{a}.roll(1, {d})"),
        f"{a}.sort({d})[0]",
    ]
    w.mixes = True
    return w.let(w.choose(ways), v.axes)


# --- whole programs


def some(w: Writer, v: Value, tries: int = 20) -> Value:
    """Apply an operation that fits."""
    for _ in range(tries):
        group = w.choose([REARRANGE, REARRANGE, COMPUTE, APPLY, APPLY])
        result = attempt(w, v, w.choose(group))
        if result is not None:
            return result
    raise Skip


def attempt(w: Writer, v: Value, operation: Operation) -> Value | None:
    """Apply an operation, or leave the program as it is."""
    state = len(w.lines), len(w.init), dict(w.modules), list(w.values), w.plain, w.mixes
    try:
        return operation(w, v)
    except Skip:
        lines, init, w.modules, w.values, w.plain, w.mixes = state
        del w.lines[lines:], w.init[init:]
        return None


SIZES = {
    "primes": [(5, 3, 2), (3, 5, 2), (2, 3, 5), (3, 2, 5), (5, 2, 3), (7, 3, 2)],
    "equal": [(2, 2, 2), (3, 3, 3), (4, 4, 4)],
}


def write(rng: random.Random, sizes: str, mixes: bool = False) -> Program | None:
    """Write a program; None if chance has led nowhere."""
    N, T, H = SIZES[sizes][rng.randrange(len(SIZES[sizes]))]
    w = Writer(rng, N, (N, T, H))
    kind = w.choose(["sequence", "sequence", "sequence", "vectors", "images", "words"])
    words = 0
    if kind == "sequence":
        axes: tuple[Axis, ...] = (("N",), (T,), (H,))
    elif kind == "vectors":
        axes = (("N",), (H,))
    elif kind == "images":
        axes = (("N",), (H,), (T,), (w.choose([2, T]),))
    else:
        axes, words = (("N",), (T,)), 5
    shape = tuple(size(axis, N) for axis in axes)
    v = Value("x", axes, is_real=not words)
    w.values.append(v)
    try:
        for _ in range(w.choose([0, 0, 1, 1, 2, 3])):
            v = attempt(w, v, w.choose(REARRANGE)) or v
        if words:
            k = widths(w)
            m = w.module(f"nn.Embedding({words}, {k})", v)
            v = w.let(f"{m}({v.name})", [*v.axes, (k,)])
        else:
            while w.chance(0.3):
                v = attempt(w, v, w.choose(COMPUTE)) or v
        for _ in range(w.choose([1, 2, 3, 4, 5, 6, 8])):
            if w.chance(0.1):  # another branch
                v = w.choose([u for u in w.values if u.is_real and u.batch is not None])
            v = some(w, v)
        if mixes:
            v = attempt(w, v, w.choose(MIX)) or v
            for _ in range(w.choose([0, 1, 2])):
                v = attempt(w, v, w.choose(APPLY)) or v
        v = w.samples_first(v)
        if not any("Linear" in line or "Parameter" in line for line in w.init) or w.chance(0.6):
            if len(v.axes) < 2:
                v = w.let(f"{v.name}[:, None]", [*v.axes, ()])
            if w.chance(0.5) and len(v.axes) > 2:
                v = w.let(f"{v.name}.flatten(1)", [("N",), sum(v.axes[1:], ())])
            v = linear(w, v)
        loss, target = w.choose(
            [("MSELoss", "real"), ("CrossEntropyLoss", "labels"), ("BCEWithLogitsLoss", "binary")]
        )
        while target == "labels" and len(v.axes) > 3:
            v = w.let(f"{v.name}.flatten(2)", [*v.axes[:2], sum(v.axes[2:], ())])
        if target == "labels" and (len(v.axes) < 2 or size(v.axes[1]) < 2):
            loss, target = "MSELoss", "real"
    except Skip:
        return None
    if mixes != w.mixes:
        return None
    reduction = w.choose(["", "", "reduction='sum'"])
    return Program(
        submodules=tuple(w.init),
        body=tuple(w.lines),
        result=v.name,
        shape=shape,
        words=words,
        loss=f"nn.{loss}({reduction})",
        target=target,
        seed=rng.randrange(1000),
        plain=w.plain,
        mixes=mixes,
    )


def programs(number: int, seed: int, sizes: str, mixes: bool = False) -> Iterator[Program]:
    """Yield programs that plain PyTorch can run, and whose samples are what they should be."""
    index = 0
    while number:
        program = write(random.Random(f"{seed}-{index}"), sizes, mixes)
        index += 1
        if program is not None and truth_of(program) is not None:
            number -= 1
            yield program


# --------------------------------------------------------------------------------------
# The truth
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What plain autograd computes.

    Attributes:
        output: Of the model.
        grads: ``.grad`` of each parameter by name, None if it is not used.
        individual: Individual gradients [N, *p] of those that are.
    """

    output: Tensor
    grads: dict[str, Tensor | None]
    individual: dict[str, Tensor]


def gradients(loss: Tensor, params: dict[str, nn.Parameter]) -> list[Tensor | None]:
    """Differentiate with respect to all parameters."""
    if not loss.requires_grad:
        return [None] * len(params)
    return list(torch.autograd.grad(loss, list(params.values()), allow_unused=True))


def truth_of(program: Program) -> Truth | None:
    """Compute the truth by a loop over samples; None if the program has none.

    Of programs that mix samples, individual gradients are those of each term of the loss; where
    samples change places alone, in the order of the samples of the data.
    """
    model, X = program.build()
    params = dict(model.named_parameters())
    lossfunc = program.loss_function()
    before = X.clone()
    try:
        f = model(X)
        if not f.requires_grad or not f.isfinite().all() or f.numel() > ENTRIES:
            return None
        y = program.targets(f)
        whole = gradients(lossfunc(f, y), params)
    except (RuntimeError, IndexError, ValueError):
        return None
    N = len(X)
    if not X.equal(before) or len(f) != N or not any(g is not None for g in whole):
        return None
    factor = 1 / N if lossfunc.reduction == "mean" else 1.0
    individual: dict[str, list[Tensor]] = {
        n: [] for n, g in zip(params, whole, strict=True) if g is not None
    }
    for n in range(N):
        if program.mixes:
            f_n = model(X)[n : n + 1]
        else:
            f_n = model(X[n : n + 1])
            if f_n.shape != f[n : n + 1].shape or not torch.allclose(f_n, f[n : n + 1]):
                raise AssertionError(f"The generator has mixed samples:\n{program}")
        grads = gradients(factor * lossfunc(f_n, y[n : n + 1]), params)
        for (name, p), g in zip(params.items(), grads, strict=True):
            if name in individual:
                individual[name].append(torch.zeros_like(p) if g is None else g)
    order = rows_of(model, X, f) if program.mixes else list(range(N))
    stacked = {name: torch.stack([rows[n] for n in order]) for name, rows in individual.items()}
    if any(not rows.isfinite().all() for rows in stacked.values()):
        return None
    return Truth(f.detach(), dict(zip(params, whole, strict=True)), stacked)


def rows_of(model: nn.Module, X: Tensor, f: Tensor, tries: int = 5) -> list[int]:
    """Number the row of the output that each sample of the data decides; all of them if they meet.

    Args:
        model: The model.
        X: The data.
        f: What the model makes of it.
        tries: How many other values each sample is given.
    """
    generator, rows = torch.Generator().manual_seed(0), []
    for n in range(len(X)):
        changed = torch.zeros(len(f), dtype=torch.bool)
        for i in range(tries):
            drawn = torch.randn(X[n].shape, generator=generator, dtype=DTYPE)
            other = X.clone()  # indices: those of another sample, which are valid
            other[n] = drawn if X.is_floating_point() else X[n - 1 - i % (len(X) - 1)]
            changed |= (model(other) != f).reshape(len(f), -1).any(1)
        rows += changed.nonzero().flatten().tolist()
    return rows if sorted(rows) == list(range(len(X))) else list(range(len(X)))


Expected = dict[str, dict[str, list[Tensor]]]  # by parameter and savefield: all factors


def first_order(grads: Tensor) -> dict[str, Tensor]:
    """Return all first-order quantities of individual gradients [N, *p]."""
    return {
        "grad_batch": grads,
        "batch_l2": grads.flatten(1).square().sum(1),
        "sum_grad_squared": grads.square().sum(0),
        "variance": grads.square().mean(0) - grads.mean(0).square(),
    }


def first_order_of(program: Program, truth: Truth) -> Expected:
    """Return all first-order quantities."""
    return {
        name: {savefield: [value] for savefield, value in first_order(grads).items()}
        for name, grads in truth.individual.items()
    }


@dataclass
class Linearised:
    """Jacobians of each sample's output, and the Hessians of its part of the loss.

    Attributes:
        jacobians: Of each parameter, for each sample: [C, P]; under the name of a linear layer, of
            a change that all rows of its output share.
        hessians: For each sample [C, C].
        squares: Of each linear layer, and weight of a product: the sum over samples and rows of
            x xᵀ, of calls that the output depends on.
    """

    jacobians: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    hessians: list[Tensor] = field(default_factory=list)
    squares: dict[str, Tensor] = field(default_factory=dict)

    def block(self, name: str) -> Tensor:
        """Return the sum over samples of Jᵀ H J."""
        pairs = zip(self.jacobians[name], self.hessians, strict=True)
        return torch.stack([J.T @ H @ J for J, H in pairs]).sum(0)


class Products(TorchFunctionMode):
    """Changes what products with some weights return."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: dict[Tensor, Callable[[Any, Any, Tensor], Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        args = args[1:] if func is torch.einsum else args
        known = (torch.matmul, Tensor.matmul, Tensor.__matmul__, nn.functional.linear, torch.einsum)
        if func not in known or len(args) < 2:
            return out
        weight = args[1] if args[1]._base is None else args[1]._base
        change = self.changes.get(weight)
        return out if change is None else change(func, args, out)


def product_of(name: str) -> str:
    """Name the layer of a weight."""
    return f"product with {name}"


def linearised(program: Program, truth: Truth) -> Linearised | None:
    """Linearise a program for each sample; None if it is large."""
    model, X = program.build()
    params = {name: p for name, p in model.named_parameters() if name in truth.individual}
    if truth.output.numel() > 60 or any(p.numel() > 80 for p in params.values()):
        return None
    lossfunc, y = program.loss_function(), program.targets(truth.output)
    factor = 1 / len(X) if lossfunc.reduction == "mean" else 1.0
    found, changes = Linearised(), {}

    def layer(name: str, inputs: int, outputs: int) -> Callable[[Any, Any, Tensor], Tensor]:
        changes[name] = torch.zeros(outputs, dtype=DTYPE, requires_grad=True)
        found.squares[name] = torch.zeros((inputs,) * 2, dtype=DTYPE)

        def change(_: Any, args: Any, out: Tensor) -> Tensor:
            rows = args[0].detach().reshape(-1, inputs)
            square = rows.T @ rows

            def reached(_: Tensor) -> None:
                found.squares[name] += square
                square.zero_()  # once

            changed = out + changes[name]
            changed.register_hook(reached)
            return changed

        return change

    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            change = layer(name, module.in_features, module.out_features)
            module.register_forward_hook(change)
    products = Products()
    for name in program.weights & params.keys():
        products.changes[params[name]] = layer(product_of(name), *params[name].shape)
    leaves = {**params, **changes}
    for n in range(len(X)):
        with products:
            f_n = model(X[n : n + 1])

        def loss(z: Tensor, n: int = n, shape: torch.Size = f_n.shape) -> Tensor:
            return factor * lossfunc(z.reshape(shape), y[n : n + 1])

        found.hessians.append(torch.autograd.functional.hessian(loss, f_n.detach().flatten()))
        rows = [
            torch.autograd.grad(entry, list(leaves.values()), retain_graph=True, allow_unused=True)
            for entry in f_n.flatten()
        ]
        for i, (name, p) in enumerate(leaves.items()):
            J = [torch.zeros_like(p) if row[i] is None else row[i] for row in rows]
            found.jacobians[name].append(torch.stack(J).flatten(1))
    return found


def ggn_of(program: Program, truth: Truth) -> Expected | None:
    """Return the diagonal of the GGN, that of each sample, and the product of its roots."""
    found = linearised(program, truth)
    if found is None:
        return None
    result: Expected = {}
    for name, grads in truth.individual.items():
        pairs = zip(found.jacobians[name], found.hessians, strict=True)
        diagonals = torch.stack([torch.einsum("cp,cd,dp->p", J, H, J) for J, H in pairs])
        diagonals = diagonals.reshape(grads.shape)
        result[name] = {
            "diag_ggn_exact": [diagonals.sum(0)],
            "diag_ggn_exact_batch": [diagonals],
            "sqrt_ggn_exact": [found.block(name)],
        }
    return result


def kronecker_of(program: Program, truth: Truth) -> Expected | None:
    """Return the factors of linear layers; what else has one factor, the block."""
    found = linearised(program, truth)
    if found is None:
        return None
    result: Expected = {}
    for name, grads in truth.individual.items():
        module = name.rpartition(".")[0]
        layer = product_of(name)
        if layer in found.squares:
            A = found.squares[layer] / len(grads)
            result[name] = {"kflr": [A, found.block(layer)]}
        elif name.endswith(".weight") and module in found.squares:
            A = found.squares[module] / len(grads)
            result[name] = {"kflr": [found.block(module), A]}
        elif grads.dim() == 2 or not module:
            result[name] = {"kflr": [found.block(name)]}
    return result


def hessian_of(program: Program, truth: Truth) -> Expected | None:
    """Return the diagonal of the Hessian."""
    model, X = program.build()
    params = {name: p for name, p in model.named_parameters() if name in truth.individual}
    if sum(p.numel() for p in params.values()) > 80:
        return None
    loss = program.loss_function()(model(X), program.targets(truth.output))
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    result: Expected = {}
    for (name, p), g in zip(params.items(), grads, strict=True):
        diagonal = torch.zeros_like(p).flatten()
        for i, entry in enumerate(g.flatten()):
            if entry.requires_grad:
                (row,) = torch.autograd.grad(entry, p, retain_graph=True, allow_unused=True)
                diagonal[i] = 0.0 if row is None else row.flatten()[i]
        result[name] = {"diag_h": [diagonal.reshape(p.shape).detach()]}
    return result


@dataclass(frozen=True)
class Check:
    """Extensions that run together, and the truth about them; None if that is expensive."""

    exts: tuple[type, ...]
    truth: Callable[[Program, Truth], Expected | None]


FIRST = (
    *(extensions.BatchGrad, extensions.BatchL2Grad),
    *(extensions.SumGradSquared, extensions.Variance),
)
GGN = (extensions.DiagGGNExact, extensions.BatchDiagGGNExact, extensions.SqrtGGNExact)
CHECKS = {
    "first order": Check(FIRST, first_order_of),
    "GGN": Check(GGN, ggn_of),
    "KFLR": Check((extensions.KFLR, extensions.KFAC), kronecker_of),
    "Hessian": Check((extensions.DiagHessian,), hessian_of),
}
SECOND = ("GGN", "GGN", "KFLR", "Hessian")


# --------------------------------------------------------------------------------------
# What the library says
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a program on one route.

    Attributes:
        kind: "right", "refused", "wrong", "unclear": an error that names no function or module,
            or "crash": one that nobody has raised on purpose.
        reason: The message, or what differs.
        details: More, for a report.
    """

    kind: str
    reason: str = ""
    details: str = field(default="", repr=False)

    @property
    def general(self) -> str:
        """The reason without names and numbers, to count it."""
        reason = re.sub(r"'\w+ at <.*?>:\d+'|'[\w.]+'(?= ?\()", "…", self.reason)
        reason = re.sub(r"\(inputs \[.*?\]\)", "(…)", reason)
        reason = re.sub(r"\d\S*(, #)*", "#", re.sub(r"\[[\d, ]*\]", "[…]", reason))
        return re.sub(r"…\s*", "… ", reason)[:170]


PACKAGE = os.path.dirname(os.path.abspath(inspect.getfile(library)))


def is_on_purpose(error: BaseException) -> bool:
    """Whether the library has raised an error itself, of a type that it announces."""
    if not isinstance(error, (ValueError, NotImplementedError, RuntimeError)):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(PACKAGE) and (last.line or "").startswith("raise")


@contextmanager
def told_by_library() -> Iterator[list[str]]:
    """Collect the warnings of the library; those of torch, which need not be seen, are dropped."""
    told: list[str] = []

    def warn(text: str, *options: Any, **others: Any) -> None:
        told.append(text)

    listening = mock.Mock(warn=warn, warn_explicit=warn)
    with warnings.catch_warnings(), mock.patch.object(warning, "warnings", listening):
        warnings.simplefilter("ignore")
        yield told


def signs_in(told: Sequence[str]) -> list[str]:
    """Return the warnings that say that a number may not be what was asked for."""
    return [text for text in told if not text.startswith("No rule for")]


def run(program: Program, truth: Truth, route: str, check: str = "first order") -> Outcome:
    """Run a program with the library, and compare."""
    with sdpa_kernel(SDPBackend.MATH):  # the truth differentiates attention twice
        expected = CHECKS[check].truth(program, truth)
        if expected is None:
            return Outcome("right", "too large")
        every = (v for quantities in expected.values() for vs in quantities.values() for v in vs)
        if not all(v.isfinite().all() for v in every):
            return Outcome("right", "no truth")
        model, X = program.build()
        y = program.targets(truth.output)
        with told_by_library() as told:
            try:
                converted = extend(model, use_converter=ROUTES[route])
                loss_function = extend(program.loss_function())
                f = converted(X)
                torch.manual_seed(0)
                with backpack(*(ext() for ext in CHECKS[check].exts)):
                    loss_function(f, y).backward()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                if not is_on_purpose(error):
                    return Outcome("crash", text, traceback.format_exc())
                return Outcome("refused" if names_a_part(text, program) else "unclear", text)
    if not close(f, truth.output):
        return Outcome("wrong", "output")
    for name, p in model.named_parameters():
        plain = truth.grads[name]
        if (p.grad is None) != (plain is None):
            return Outcome("wrong", "p.grad", name)
        if plain is not None and not close(p.grad, plain):
            near = truth_of(replace(program, nudge=1e-13))  # ties are decided by rounding
            assert near is not None
            close_by = near.grads[name]
            if close_by is None or difference(p.grad, [plain], [close_by]):
                return Outcome("wrong", "p.grad", name)
    for name, quantities in expected.items():
        if route == "plain" and "." not in name:
            continue  # the model's own: only a function reads it
        p = model.get_parameter(name)
        for savefield, values in quantities.items():
            mine = getattr(p, savefield, None)
            reason = difference(mine, values)
            if reason and signs_in(told):
                return Outcome("refused", f"warning: {signs_in(told)[0]}")
            if reason and difference(mine, values, near_by(program, check)[name][savefield]):
                return Outcome("wrong", f"{savefield}: {reason}", f"of {name}")
    return Outcome("right")


def near_by(program: Program, check: str) -> Expected:
    """Return the truth for parameters and data that differ by little more than rounding."""
    program = replace(program, nudge=1e-13)
    truth = truth_of(program)
    assert truth is not None
    with sdpa_kernel(SDPBackend.MATH):
        return CHECKS[check].truth(program, truth) or {}


def difference(mine: Any, expected: Sequence[Tensor], near: Sequence[Tensor] | None = None) -> str:
    """Say how a result differs from what is expected.

    Args:
        mine: The result: a tensor, or factors.
        expected: The truth.
        near: The truth close by: where large terms cancel, it is another one.
    """
    if mine is None:
        return "missing"
    factors = mine if isinstance(mine, list) else [mine]
    if len(factors) != len(expected):
        return f"{len(factors)} factors instead of {len(expected)}"
    for factor, value, other in zip(factors, expected, near or expected, strict=True):
        if value.dim() == 2 and factor.dim() > 2:  # the root of a block
            flat = factor.flatten(0, 1).flatten(1)
            factor = flat.T @ flat
        if factor.shape != value.shape:
            return f"shape {list(factor.shape)} instead of {list(value.shape)}"
        scale = float(value.abs().max())
        rounding = 1e3 * float((other - value).abs().max())
        if not close(factor, value, max(scale, 1e10 * rounding)):
            return f"{float((factor - value).abs().max()) / max(scale, 1e-300):.1g} off"
    return ""


def names_a_part(message: str, program: Program) -> bool:
    """Whether a message says which function or module, or which loss, it is about."""
    classes = re.findall(r"nn\.(\w+)", " ".join((*program.submodules, program.loss)))
    classes.append("of Model")
    calls = re.findall(r"'[^']+' \(\w+\)", message)  # functions too have a name and a class
    return bool(calls) or any(re.search(rf"\b{name}\b", message) for name in classes)


def close(one: Tensor, other: Tensor, scale: float = 1.0) -> bool:
    """Compare in float64; what is zero may be rounding."""
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=1e-7, atol=1e-10 * max(scale, 1e-2)
    )


def outcomes(
    program: Program, check: str = "first order", routes: Iterable[str] = tuple(ROUTES)
) -> dict[str, Outcome]:
    """Run a program on those routes that apply to it."""
    truth = truth_of(program)
    assert truth is not None
    has_plain = program.plain or program.mixes
    return {
        route: run(program, truth, route, check)
        for route in routes
        if has_plain or route != "plain"
    }


def reduced(program: Program, still: Callable[[Program], bool]) -> Program:
    """Leave out lines as long as something is still true of a program."""
    again = True
    while again:
        again = False
        for i in reversed(range(len(program.body))):
            candidate = next(filter(still, simpler(program, i)), None)
            if candidate is not None:
                program, again = candidate, True
    code = "\n".join((*program.body, program.result))
    used = [line for line in program.submodules if re.search(rf"{line.split()[0]}\b", code)]
    return replace(program, submodules=tuple(used))


def simpler(program: Program, i: int) -> Iterator[Program]:
    """Yield programs without a line: with one of its operands in its place."""
    before, line, after = program.body[:i], program.body[i], program.body[i + 1 :]
    yield replace(program, body=(*before, *after))
    match = re.match(r"(h\d+) = (.*)", line)
    if match:
        name, right = match.groups()
        for operand in dict.fromkeys(re.findall(r"\bh\d+\b|\bx\b", right)):
            rest = (re.sub(rf"\b{name}\b", operand, later) for later in (*after, program.result))
            *later, result = rest
            yield replace(program, body=(*before, *later), result=result)


def is_valid(program: Program) -> bool:
    """Whether a program (that somebody has changed) runs and has a truth."""
    try:
        return truth_of(program) is not None
    except Exception:
        return False


KINDS = ("right", "refused", "unclear", "wrong", "crash")


@dataclass(frozen=True)
class Entry:
    """One run of a program."""

    program: Program
    route: str
    check: str
    outcome: Outcome

    def is_alike(self, program: Program) -> bool:
        """Whether another program has the same outcome."""
        truth = truth_of(program) if is_valid(program) else None
        if truth is None:
            return False
        other = run(program, truth, self.route, self.check)
        return (other.kind, other.general) == (self.outcome.kind, self.outcome.general)

    def __str__(self) -> str:
        """Show a small program with this outcome."""
        title = f"--- {self.outcome.kind} ({self.route}, {self.check}): {self.outcome.reason}"
        small = reduced(self.program, self.is_alike)
        return "\n".join(filter(None, (title, self.outcome.details, str(small))))


def checked(
    stream: Iterable[Program], second: float, routes: Iterable[str] = tuple(ROUTES)
) -> Iterator[Entry]:
    """Run programs: first order, and for a share of them something of second order."""
    for i, program in enumerate(stream):
        rng = random.Random(i)
        checks = ["first order"]
        if not program.mixes and rng.random() < second:
            checks.append(rng.choice(SECOND))
        for check in checks:
            for route, outcome in outcomes(program, check, routes).items():
                yield Entry(program, route, check, outcome)


def main() -> None:
    """Run many programs and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", choices=SIZES, default="primes")
    parser.add_argument("--second", type=float, default=0.3, help="share with second order")
    parser.add_argument("--mixing", action="store_true", help="programs that mix samples")
    parser.add_argument("--show", type=int, default=5, help="programs to print, of each kind")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=["wrong", "crash", "unclear"])
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    start = time.perf_counter()
    stream = programs(arguments.programs, arguments.seed, arguments.sizes, arguments.mixing)
    entries = list(checked(stream, arguments.second))
    print(f"{arguments.programs} programs in {time.perf_counter() - start:.0f} s")

    counts = Counter((e.check, e.route, e.outcome.kind) for e in entries)
    print(f"{'':24}" + "".join(f"{kind:>9}" for kind in KINDS))
    for check, route in dict.fromkeys((check, route) for check, route, _ in counts):
        numbers = "".join(f"{counts[check, route, kind]:9}" for kind in KINDS)
        print(f"{f'{check}, {route}':24}{numbers}")
    others = [e for e in entries if e.outcome.kind != "right"]
    reasons = Counter((e.outcome.kind, e.outcome.general) for e in others)
    for (kind, reason), number in reasons.most_common():
        print(f"{number:5} {kind:8} {reason}")
    for kind in arguments.kinds:
        shortest: dict[str, Entry] = {}
        for entry in sorted(others, key=lambda e: len(e.program.body)):
            if entry.outcome.kind == kind:
                shortest.setdefault(entry.outcome.general, entry)
        for entry in list(shortest.values())[: arguments.show]:
            print(f"\n{entry}", flush=True)
    sys.exit(any(counts[key] for key in counts if key[-1] in ("wrong", "crash", "unclear")))


if __name__ == "__main__":
    main()

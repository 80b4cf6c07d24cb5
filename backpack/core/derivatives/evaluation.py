"""Module calls that are evaluated again, and whether their samples depend on each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import RLock
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module

from backpack.context import disable
from backpack.core.derivatives.math_attention import math_attention
from backpack.core.record.compiler import Mode
from backpack.core.record.context import Context
from backpack.core.record.layout import CPU
from backpack.core.record.module_state import describe
from backpack.core.record.origins import flatten_outputs
from backpack.core.rows import Rows
from backpack.core.values import has_values
from backpack.utils.subsampling import subsample

_quiet = RLock()  # filters of warnings are those of all threads
Values = dict[Any, Tensor]  # of inputs (by number) and parameters (by name)


@dataclass
class Evaluation:
    """How to evaluate a module call again."""

    rule: Any
    c: Context
    inputs: list[Any]  # arguments of the call, flattened
    axes_in: list[int | None]  # where the samples are in each; None if it has none
    axes_out: list[int | None]

    def outputs(self, values: Mapping[Any, Tensor], inputs: Sequence[Any]) -> list[Tensor]:
        """Evaluate the outputs with some inputs and parameters replaced."""
        leaves = [values.get(i, x) for i, x in enumerate(inputs)]
        params = {name: value for name, value in values.items() if isinstance(name, str)}
        with disable(), math_attention():
            outputs = flatten_outputs(self.rule.evaluate(self.c, params, *leaves))
        precision = self.c.call.precision
        return [y if precision is None else y.to(precision) for y in outputs]

    def value(self, key: Any) -> Tensor:
        """Return the value of an input or parameter in the call at hand."""
        return self.inputs[key] if isinstance(key, int) else self.rule.parameter(self.c, key)

    def axis(self, key: Any) -> int | None:
        """Return the batch axis of an input; None for one without samples, and for a parameter."""
        return self.axes_in[key] if isinstance(key, int) else None

    def is_whole(self, numbers: Sequence[int]) -> bool:
        """Whether these are the numbers of all samples, in their order."""
        return list(numbers) == list(range(self.num_samples))

    def rows(self, rows: Rows) -> tuple[list[Any], bool]:
        """Return the inputs for some of the samples, and whether the module can do with them."""
        if rows is None:
            return self.inputs, True
        saved = self.c.saved
        if "separable" not in saved:
            saved["separable"] = self._is_separable()
        if not saved["separable"]:
            return self.inputs, False
        return self._narrowed(rows), True

    def are_rows(self, outputs: Sequence[Tensor], rows: Rows) -> bool:
        """Whether some samples alone have the outputs of the call; if not, it is noted."""
        if rows is not None and has_values(outputs[0]):
            self.c.saved["separable"] &= self._are_those_of(outputs, rows)
        return rows is None or self.c.saved["separable"]

    def _are_those_of(self, outputs: Sequence[Tensor], rows: Rows) -> bool:
        """Whether outputs are rows of those of the call, which are computed again if not kept."""
        known: Sequence[Tensor] = self.c.outputs
        with torch.no_grad():
            if self.c.call.computed_with is not None:
                known = self.outputs({}, self.inputs)
        expected = [subsample(y, a or 0, rows) for y, a in zip(known, self.axes_out, strict=True)]
        return self.agree(outputs, expected)

    def _narrowed(self, rows: Rows) -> list[Any]:
        return self._changed(lambda x, axis: subsample(x, axis, rows))

    def _changed(self, change: Callable[[Tensor, int], Tensor]) -> list[Any]:
        """Change the inputs that have samples, along their batch axis."""
        pairs = zip(self.inputs, self.axes_in, strict=True)
        return [x if axis is None else change(x, axis) for x, axis in pairs]

    def at_outputs(
        self, mats: Sequence[Tensor | None], change: Callable[[Tensor, int], Tensor]
    ) -> list[Tensor | None]:
        """Change what is at the outputs that have samples, along their batch axis."""
        pairs = zip(mats, self.axes_out, strict=True)
        return [None if m is None or axis is None else change(m, axis) for m, axis in pairs]

    def _is_separable(self) -> bool:
        """Whether the module gives the same for one sample alone."""
        if any(axis is None for axis in self.axes_out):
            return False
        # the first alone, and two in another order: what a row is may depend on its number
        for rows in ([0], [self.num_samples - 1, 0]):
            with torch.no_grad(), quietly():
                try:
                    alone = self.outputs({}, self._narrowed(rows))
                except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
                    return False
            if not self._are_those_of(alone, rows):
                return False
        return True

    def agree(self, some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Whether outputs agree, up to the rounding of the call."""
        rounding = self.c.call.rounding
        return len(some) == len(others) and all(
            map(partial(close, rounding=rounding), some, others)
        )

    def whole(self, mats: Sequence[Tensor | None], rows: Rows, skip: int) -> list[Tensor | None]:
        """Put rows of the outputs back into zeros of the whole batch, behind ``skip`` axes."""
        count, module = self.num_samples, self.c.module
        return [
            m if m is None or axis is None else spread(m, axis + skip, rows, count, module)
            for m, axis in zip(mats, self.axes_out, strict=True)
        ]

    def whole_tangents(self, tangents: Mapping[Any, Tensor], rows: Rows) -> Values:
        """Put rows of tangents back into zeros of the whole batch."""
        found = dict(tangents)
        for key, t in tangents.items():
            axis = self.axis(key)
            if axis is not None:
                size = self.inputs[key].shape[axis]
                found[key] = spread(t, axis + 1, rows, size, self.c.module)
        return found

    def is_independent(self) -> bool:
        """Whether the first sample is independent of others, and all may change places (rotate)."""
        if self.num_samples == 1:
            return True
        with torch.no_grad():
            before = self.outputs({}, self.inputs)
            rotated = self.outputs({}, self._changed(lambda x, axis: x.roll(1, axis)))
            if not all(
                axis is None or close(r, b.roll(1, axis), self.c.call.rounding)
                for r, b, axis in zip(rotated, before, self.axes_out, strict=True)
            ):
                return False
            keep: list[Rows] = [[0], slice(1, None)]
            for kept in keep:
                changed = self._changed(partial(with_other_samples, kept=kept))
                try:
                    after = self.outputs({}, changed)
                except Exception:  # out of its domain: is a sample the same alone?
                    if self.rows([0])[1]:
                        return True
                    raise
                if not all(
                    is_same(subsample(b, axis, kept), subsample(a, axis, kept))
                    for b, a, axis in zip(before, after, self.axes_out, strict=True)
                    if axis is not None
                ):
                    return False
        return True

    @property
    def follows(self) -> bool:
        """Whether samples may be along any axis, in any order and number of rows."""
        return self.rule.follows_samples

    def rows_differ(self, mats: Sequence[Tensor | None]) -> bool:
        """Whether the rows of an output that is read are other samples than those of the first."""
        if not self.follows:
            return False
        first, *others = [i for i, axis in enumerate(self.axes_out) if axis is not None]
        known = [i for i in others if mats[i] is not None]
        return any(self._samples_of_rows(i) != self._samples_of_rows(first) for i in known)

    def each_sample(
        self, mats: Sequence[Tensor | None], skip: int
    ) -> Iterator[tuple[int, list[Tensor | None]]]:
        """Yield a row of each sample at the first output, and ``mats`` but zero in rows of others.

        They are at outputs with samples in any order and number, behind ``skip`` axes.
        """
        rows = {i: self._samples_of_rows(i) for i, a in enumerate(self.axes_out) if a is not None}
        first = next(iter(rows.values()))
        for n in sorted({*chain.from_iterable(rows.values())} - {-1}):  # that of no sample
            if n not in first:
                raise NotImplementedError(
                    f"The first of the outputs of {describe(self.c.module)} has no rows of sample "
                    f"{n}, but another has some. Compute them in functions of their own."
                )
            own = list(mats)
            for i, each in rows.items():
                m, axis = mats[i], self.axes_out[i]
                if m is not None and axis is not None:
                    others = [k for k, other in enumerate(each) if other != n]
                    index = torch.tensor(others, dtype=torch.long, device=m.device)
                    own[i] = m.index_fill(axis + skip, index, 0)
            yield first.index(n), own

    def _samples_of_rows(self, i: int) -> list[int]:
        """Return which sample each row of an output belongs to, along its batch axis."""
        call, axis = self.c.call, self.axes_out[i] or 0
        layout, shape = call.layouts_out[i], call.shape_out[i]
        numbers = None if layout is None else layout.numbers(shape)
        assert numbers is not None
        return numbers.expand(shape).movedim(axis, 0).reshape(shape[axis], -1).amax(1).tolist()

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of the samples that cotangents and tangents hold."""
        return self.c.numbers(self.num_samples)

    @property
    def has_samples(self) -> bool:
        """Whether an output has samples."""
        return any(axis is not None for axis in self.axes_out)

    @property
    def num_samples(self) -> int:
        """Number of samples in the call."""
        pairs = zip(self.c.outputs, self.axes_out, strict=True)
        return next(y.shape[axis] for y, axis in pairs if axis is not None)


@contextmanager
def quietly() -> Iterator[None]:
    """Show no warnings, such as that one sample has no standard deviation."""
    with _quiet, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Alone(Mode):
    """Lets operations of several processes be an error."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise NotImplementedError(f"{func} for an evaluation that is not part of the program.")
        return func(*args, **(kwargs or {}))


def alone() -> AbstractContextManager[Any]:
    """Refuse operations of several processes, where others may not evaluate the same."""
    return (
        _Alone() if distributed.is_available() and distributed.is_initialized() else nullcontext()
    )


def close(one: Tensor, other: Tensor, rounding: float = 0.0) -> bool:
    """Whether two tensors agree, up to rounding of their precision, or to a coarser one."""
    return agree_to(max(rounding, torch.finfo(one.dtype).eps) ** 0.5 * 10, one, other)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two results of the same computation agree, but for the order in which sums add up."""
    return agree_to(torch.finfo(one.dtype).eps * 10, one, other)


def agree_to(tolerance: float, one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree, relative to each entry plus the largest one."""
    if one.shape != other.shape:
        return False
    if not (one.is_cpu or has_values(one)):
        return True
    one, other = one.detach(), other.detach()
    scale = float(other.abs().nan_to_num(posinf=0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def with_other_samples(x: Tensor, axis: int, kept: Rows) -> Tensor:
    """Change all samples but some: numbers at will, indices to those of their neighbours."""
    new = x.roll(1, -1) * 0.5 + 0.25 if x.is_floating_point() else x.roll(1, axis)
    is_kept = torch.zeros(x.shape[axis], dtype=torch.bool, device=x.device)
    is_kept[kept] = True
    return torch.where(is_kept.reshape([-1 if i == axis else 1 for i in range(x.dim())]), x, new)


def spread(mat: Tensor, axis: int, rows: Rows, size: int, module: Module) -> Tensor:
    """Put rows, each of them once, back into zeros of the whole batch, along an axis of ``mat``."""
    index = torch.arange(size, device=mat.device)[rows]
    if len(index.unique()) < len(index):
        raise ValueError(
            f"{describe(module)} works on the whole batch at once, so a subsampling cannot repeat "
            f"samples (here rows {index.tolist()}). Name each of them once."
        )
    whole = mat.new_zeros(*mat.shape[:axis], size, *mat.shape[axis + 1 :])
    return whole.index_copy(axis, index, mat)


def generator_at(tensors: Iterable[Any]) -> torch.Generator:
    """Return a generator where tensors are: a CPU draws slowly, and a GPU waits for the copy."""
    devices = [x.device for x in tensors if isinstance(x, Tensor) and x.is_cuda]
    return torch.Generator(devices[0] if devices else CPU).manual_seed(0)


def drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw from the normal distribution, where the generator is: the default device is another."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)


def is_real(x: Any) -> bool:
    """Return whether something is a tensor of floating point."""
    return isinstance(x, Tensor) and x.is_floating_point()

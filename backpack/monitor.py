"""Log quantities while a model trains, to TensorBoard or to a CSV file.

>>> from pathlib import Path
>>> from tempfile import mkdtemp
>>> import torch
>>> from backpack import backpack, extend
>>> from backpack.extensions import BatchL2Grad, Variance
>>> from backpack.monitor import CSVWriter, Monitor, gradient_snr
>>> _ = torch.manual_seed(0)
>>> model, loss_function = extend(torch.nn.Linear(3, 2)), extend(torch.nn.CrossEntropyLoss())
>>> metrics = ["grad.norm", "variance.mean", "batch_l2.q95", gradient_snr]
>>> path = Path(mkdtemp()) / "log.csv"
>>> with Monitor(model, metrics, CSVWriter(path)) as monitor:
...     for _ in range(2):
...         model.zero_grad()
...         loss = loss_function(model(torch.rand(8, 3)), torch.randint(2, (8,)))
...         with backpack(Variance(), BatchL2Grad()):
...             loss.backward()
...         _ = monitor.step(loss=loss)
>>> [line.rsplit(",", 1)[0] for line in path.read_text().splitlines()[:5]]
['step,tag', '0,loss', '0,grad.norm/weight', '0,grad.norm/bias', '0,grad.norm']
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TextIO
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from backpack.core.engine.results import has_other_gradient, is_result, noted
from backpack.core.values import at_least_single
from backpack.distributed.data_group import DataGroup, ProcessGroupChoice, telling
from backpack.distributed.shards import is_sharded, whole
from backpack.utils.warning import warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["REDUCTIONS", "CSVWriter", "Monitor", "Writer", "gradient_snr", "plot_histograms"]

Metric = Callable[[Sequence[Parameter]], Tensor | float]
"""Maps parameters to a number, or to values ``[K]`` that make a histogram."""

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": torch.linalg.vector_norm,
    "mean": torch.mean,
    "sum": torch.sum,
    "min": torch.min,
    "max": torch.max,
}
"""Functions of the entries ``[K]`` of a quantity by name (norm, mean, sum, min, max).

:meta hide-value:
"""


class Writer(Protocol):
    """Where a :class:`Monitor` writes to, :class:`CSVWriter` or TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> None:
        """Write a number."""

    def add_histogram(self, tag: str, values: Tensor, step: int, /) -> None:
        """Write the distribution of values ``[K]``."""

    def close(self) -> None:
        """Write what is left, and release the files."""


class CSVWriter:
    """Writes lines ``step,tag,value``, each at once: the file can be read while a program runs.

    The file is opened when there is something to write: of several processes, by the one that does.
    ``pandas.read_csv(path).pivot(index="step", columns="tag", values="value")`` makes a column of
    each tag.

    Args:
        path: The file; its folder is made if there is none.
        append: Go on at the end of an existing file rather than replace it.
    """

    def __init__(self, path: str | Path, append: bool = False):
        self._path = Path(path)
        self._mode: Literal["a", "w"] = "a" if append else "w"

    @cached_property
    def _file(self) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._path.open(self._mode, newline="", encoding="utf-8", buffering=1)

    @cached_property
    def _rows(self) -> Any:
        rows = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0:
            rows.writerow(("step", "tag", "value"))
        return rows

    def add_scalar(self, tag: str, value: float, step: int, /) -> None:
        """Write a line."""
        self._rows.writerow((step, tag, value))

    def add_histogram(self, tag: str, values: Tensor, step: int, /) -> None:
        """Write five lines for values ``[K]``: their percentiles 0, 25, 50, 75 and 100."""
        for percent in (0, 25, 50, 75, 100):
            self.add_scalar(f"{tag}/q{percent}", _percentile(values, percent).item(), step)

    def close(self) -> None:
        """Close the file, if there is one."""
        if "_file" in vars(self):
            self._file.close()


class Monitor:
    """Writes numbers and histograms of what backward passes leave at the parameters.

    On several processes whose gradients are averaged, numbers are those of all samples, the same on
    all, and the first process writes them. All have to make a monitor, and do every step.

    Args:
        model: The parameters that it has in a step, with ``requires_grad``, are looked at. A part
            of a model will do.
        metrics: What to compute, one or several, for each parameter and for all of them together:

            - ``"grad.norm"``, ``"variance.mean"``, ``"batch_l2.q95"``: an attribute of the
              parameters, then one of :data:`REDUCTIONS`, or ``q`` and a percentage. For all
              parameters together, their entries are put into one vector.
            - ``"grad"``, ``"diag_ggn_mc"``: the attribute alone is written as a histogram.
            - A function of a list of parameters, like :func:`gradient_snr`. It returns a number, or
              values ``[K]`` for a histogram; on several processes, the same on all.
        writer: Has ``add_scalar(tag, value, step)``, ``add_histogram(tag, values, step)`` and
            ``close()``: a :class:`CSVWriter`, or a ``torch.utils.tensorboard.SummaryWriter``
            (``pip install tensorboard``). The tags are ``grad.norm/0.weight`` for a parameter,
            and ``grad.norm`` for all of them. None on processes that do not write.
        every: Write in one of so many steps, beginning with the first.
        process_group: Processes whose gradients are averaged: ``"module"`` for those of a
            ``DistributedDataParallel`` or of sharded parameters, a group of ``torch.distributed``,
            or None: this process writes what it has, without the others.

    Raises:
        ValueError: If a reduction is unknown, two metrics have the same name, nothing is trainable,
            ``every`` is no positive whole number, or the process that writes has no writer.
        TypeError: If the writer, or a metric, is something else.
        NotImplementedError: If there are several processes, and it is not known which.

    Attributes:
        steps: How often :meth:`step` was called, which is the number that the coming one writes.
            Set it where training goes on.
    """

    def __init__(
        self,
        model: Module,
        metrics: str | Metric | Iterable[str | Metric],
        writer: Writer | None,
        every: int = 1,
        process_group: ProcessGroupChoice = "module",
    ):
        self._group = DataGroup.of(process_group, model, "A Monitor")
        if isinstance(model, DistributedDataParallel):
            model = model.module  # tags are those of one process
        self._model, self._parameters = model, _trainable(model)
        if not self._parameters:
            raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True.")
        if every < 1 or every % 1 > 0:
            raise ValueError(
                f"every is a whole number, 1 (write in each step) or more, but not {every}."
            )
        self._metrics: dict[str, Metric | Reduced] = {}
        if isinstance(metrics, str) or not isinstance(metrics, Iterable):
            metrics = [metrics]
        for metric in metrics:
            if not (isinstance(metric, str) or callable(metric)):
                raise TypeError(f"A metric is a name, or a function of parameters, got {metric!r}.")
            tag = metric if isinstance(metric, str) else getattr(metric, "__name__", repr(metric))
            if tag in self._metrics:
                raise ValueError(f"There are two metrics with the name {tag}.")
            self._metrics[tag] = _parse(metric) if isinstance(metric, str) else metric
        self._writes = self._group is None or self._group.is_first
        if writer is None and self._writes:
            raise ValueError("This process writes the metrics, but its writer is None.")
        if writer is not None and not hasattr(writer, "add_scalar"):
            raise TypeError(
                "The writer has add_scalar(), add_histogram() and close(), such as CSVWriter(path) "
                f"or a SummaryWriter of TensorBoard, got {writer!r}."
            )
        self._writer = writer
        self._every = every
        self._seen: dict[str, ref[Any]] = {}  # attributes of a parameter in the step before
        self.steps = 0

    @property
    def due(self) -> bool:
        """Whether the coming :meth:`step` writes.

        Extensions can be left out if not: ``with backpack(*exts if monitor.due else ())``.
        """
        return self.steps % self._every == 0

    @torch.no_grad()
    def step(self, **scalars: float | Tensor) -> dict[str, Tensor]:
        """Write the metrics, if it is time. Call it after ``backward()``, in each step.

        Args:
            **scalars: Further numbers to write, such as the loss. On several processes, their mean:
                the loss whose gradient is averaged.

        Returns:
            What belongs to this step by tag, the same on all processes: numbers ``[]`` and the
            values ``[K]`` of histograms. Nothing if it is not time.

        Raises:
            AttributeError: If a parameter has not got what a metric needs.
            TypeError: If an attribute is not a tensor.
            ValueError: If a further number has the name of a metric.
            RuntimeError: If processes do not do the same step, an error has stopped one, or a
                metric is another one on each.
        """
        found: dict[str, Tensor] = {}
        step, due = self.steps, self.due
        self.steps += 1  # also if it cannot be written
        if due:
            with telling(self._group):
                found = self._found(scalars, step)
            if self._writer is not None and self._writes:
                for tag, value in found.items():
                    if value.ndim == 0:
                        self._writer.add_scalar(tag, value.item(), step)
                    else:
                        self._writer.add_histogram(tag, value, step)
        self._see()
        return found

    def _found(self, scalars: dict[str, float | Tensor], step: int) -> dict[str, Tensor]:
        """Compute all values of a step, by tag."""
        # layers may have been frozen, or replaced; all of them, as in turns: those of before
        params, group = _trainable(self._model) or self._parameters, self._group
        self._parameters = params
        twice = scalars.keys() & {t for tag in self._metrics for t in self._tags(tag)}
        if twice:
            raise ValueError(
                f"step() was given {', '.join(sorted(twice))}, but there are metrics with that "
                "name: one would replace the other. Rename one of them."
            )
        reduced = [metric for metric in self._metrics.values() if isinstance(metric, Reduced)]
        attributes = dict.fromkeys(metric.attribute for metric in reduced)
        for attribute in attributes:  # before the others wait for it
            for name, p in params.items():
                _explained(name, p, _own, p, attribute)
            self._tell_if_old(attribute)
        found = {
            tag: torch.tensor(float(value), dtype=torch.float64) for tag, value in scalars.items()
        }
        device = next(iter(params.values())).device
        if group is not None:
            what = f"step {step} of a Monitor with {', '.join((*scalars, *self._metrics))}"
            totals = group.total(what, [value.to(device) for value in found.values()])
            found = dict(zip(found, (total / group.size for total in totals), strict=True))
        vectors = {
            attribute: _vectors(list(params.values()), attribute, group is None)
            for attribute in attributes
        }
        for tag, metric in self._metrics.items():
            each: list[Tensor | float]
            together: Tensor | float
            if isinstance(metric, Reduced):
                own = vectors[metric.attribute]
                each = [metric.reduce(vector) for vector in own]
                together = metric.reduce(torch.cat(own))
            else:
                each = [_explained(name, p, metric, [p]) for name, p in params.items()]
                together = metric(list(params.values()))
            tags = self._tags(tag)
            # copies: a histogram may be the memory of the attribute
            values = [
                _entries(torch.as_tensor(value), group is None).clone()
                for value in (*each, together)
            ]
            found.update(zip(tags, values, strict=True))
        return found if group is None else _agreed(group, found, device)

    def _tell_if_old(self, attribute: str) -> None:
        """Warn if an attribute was there in the step before."""
        p = next(iter(self._parameters.values()))
        before = self._seen.get(attribute)
        if before is not None and before() is getattr(p, attribute) and is_result(p, attribute):
            warn(
                f"Monitor: {attribute} is that of an earlier step, because no backward pass since "
                "has computed it. Enter backpack(...) with its extension in the steps in which "
                "monitor.due is True.",
            )

    def _see(self) -> None:
        """Note what is there in this step."""
        p = next(iter(self._parameters.values()))
        for metric in self._metrics.values():
            value = getattr(p, metric.attribute, None) if isinstance(metric, Reduced) else None
            if isinstance(metric, Reduced) and isinstance(value, Tensor):
                self._seen[metric.attribute] = ref(value)

    def _tags(self, tag: str) -> list[str]:
        """Return the tags of what a metric is for each parameter, and for all of them."""
        return [*(f"{tag}/{name}" for name in self._parameters), tag]

    def close(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Monitor:
        """Return the monitor itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the writer."""
        self.close()


def _trainable(model: Module) -> dict[str, Parameter]:
    """Return parameters by name: those that require a gradient, and have entries."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad and p.numel()}


def _percentile(values: Tensor, percent: float) -> Tensor:
    """Interpolate between ordered values ``[K]``, as ``torch.quantile`` for any ``K``.

    NaN if one of them is NaN, or there are none; infinite ones are the largest or smallest.
    """
    ordered = at_least_single(values.flatten()).sort().values  # NaN is the last one
    if not len(ordered):
        return ordered.new_full((), math.nan)
    position = percent * (len(ordered) - 1) / 100
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    weight = position % 1
    between = torch.lerp(low, high, weight)
    beyond = low * (1 - weight) + high * weight if weight else low  # lerp has no infinite ones
    found = torch.where((high - low).isfinite(), between, beyond)
    return torch.where(ordered[-1].isnan(), ordered[-1], found)


class Reduced(NamedTuple):
    """A metric of the entries of an attribute.

    Attributes:
        attribute: Its name.
        reduce: Function of the entries ``[K]``.
    """

    attribute: str
    reduce: Callable[[Tensor], Tensor]


def _parse(metric: str) -> Reduced:
    """Read ``"grad.norm"``."""
    attribute, _, name = metric.partition(".")
    if not name:
        return Reduced(attribute, lambda values: values)
    if name in REDUCTIONS:
        return Reduced(attribute, REDUCTIONS[name])
    if re.fullmatch(r"q(\d\d?|100)", name):
        return Reduced(attribute, lambda values: _percentile(values, int(name[1:])))
    known = ", ".join(REDUCTIONS)
    raise ValueError(f"{metric}: there is no reduction {name}, but {known}, and q0 to q100.")


def _own(p: Parameter, attribute: str) -> Tensor:
    """Return an attribute of a parameter on this process."""
    value = getattr(p, attribute)
    if value is None:  # the gradient, before a backward pass
        raise AttributeError(name=attribute, obj=p)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{attribute} of a parameter is no tensor, but a {type(value).__name__}. "
            "Make a function of a list of parameters the metric."
        )
    return value.detach()


def _vectors(params: Sequence[Parameter], attribute: str, is_alone: bool = False) -> list[Tensor]:
    """Return the entries of an attribute for each parameter, ``[K]``.

    They are dense, and at least in single precision: norms of what is in half would overflow.

    Args:
        params: The parameters.
        attribute: The attribute.
        is_alone: Do not ask other processes for their samples and shards.
    """
    own = [_entries(_own(p, attribute), is_alone).to_dense().flatten() for p in params]
    vectors = [at_least_single(each) for each in own]
    found = [noted(p, attribute).averaged for p in params]
    for of in dict.fromkeys(found):
        if of is not None and of.is_of_samples and not is_alone:
            places = [i for i, other in enumerate(found) if other == of]
            own = [vectors[i] for i in places]
            gathered = DataGroup(*of.groups).gathered(f"entries of {attribute}", own)
            for i, vector in zip(places, gathered, strict=True):
                vectors[i] = vector
    return vectors


def _entries(tensor: Tensor, is_alone: bool) -> Tensor:
    """Return all entries of a tensor that may be sharded, or those of this process alone."""
    if is_alone and is_sharded(tensor):
        return tensor.to_local()  # type: ignore[attr-defined]
    return whole(tensor)


def _agreed(group: DataGroup, found: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the numbers of the first process, if those of the others are the same.

    Raises:
        RuntimeError: If they are not.
    """
    numbers = {tag: _fingerprint(v) if v.ndim else v.reshape(1) for tag, v in found.items()}
    own = torch.cat([number.to(device, torch.float64) for number in numbers.values()])
    of_all, differ = group.compared(f"values of metrics: {_shapes(found)}", own)
    sizes = [len(number) for number in numbers.values()]
    agreed: dict[str, Tensor] = {}
    parts = zip(found.items(), of_all.split(sizes, 1), differ.split(sizes), strict=True)
    for (tag, value), each, is_other in parts:
        if is_other.any():
            what = "has other values" if value.ndim else "is another number"
            raise RuntimeError(
                f"The metric {tag} {what} on each process, "
                f"{'of norms ' if value.ndim else ''}{each[:, 0].tolist()}, so it is "
                "not that of all samples. Gradients and quantities of one process alone "
                "(no_sync(), process_group=None) have process_group=None here as well; a function "
                "has to add up what it computes of the samples of its process."
            )
        agreed[tag] = value if value.ndim else each[0, 0].to(value)
    return agreed


def _shapes(found: dict[str, Tensor]) -> str:
    """Describe the shapes of histograms."""
    return ", ".join(f"{tag} {list(value.shape)}" for tag, value in found.items() if value.ndim)


def _fingerprint(values: Tensor) -> Tensor:
    """Return numbers that are others for other values ``[K]``, and vary little with rounding."""
    wide = values.flatten().double()
    norm = torch.linalg.vector_norm(wide)
    unit = wide / norm.clamp(min=torch.finfo(wide.dtype).tiny)
    places = torch.arange(1, len(wide) + 1, device=wide.device).square().to(wide.dtype)
    # along directions that are as good as random; far from zero, where rounding is all there is
    along = [10 + unit @ torch.cos(places * factor) for factor in (1.0, 2**0.5, 3**0.5)]
    return torch.stack([norm, *along])


def _explained(name: str, p: Parameter, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; say what to do if that parameter lacks an attribute."""
    try:
        return function(*args)
    except AttributeError as error:
        if error.obj is not p or error.name is None:
            raise
        lack = f"Parameter {name} does not have"
        raise AttributeError(_explain(lack, error.name)) from error


def _explain(lack: str, attribute: str) -> str:
    """Say what to do if parameters lack an attribute."""
    from backpack.support import all_extensions  # imports every rule there is

    savers = [type(ext).__name__ for ext in all_extensions() if ext.savefield == attribute]
    remedy = f"inside `with backpack({savers[0]}())` " if savers else ""
    spelling = ""
    if not savers and attribute != "grad":
        spelling = (
            " No extension of backpack.extensions saves it: metrics are written as 'variance.mean'."
        )
    return (
        f"{lack} the attribute {attribute}. Call backward() {remedy}first, or give only that part "
        f"of the model that has it.{spelling}"
    )


def gradient_snr(params: Iterable[Parameter]) -> Tensor:
    r"""Signal-to-noise ratio of the gradient of a sample.

    With individual gradients :math:`g_n` it is
    :math:`\lVert \bar g \rVert^2 / \frac 1 N \sum_n \lVert g_n - \bar g \rVert^2`,
    from ``grad`` and, by :class:`~backpack.extensions.BatchL2Grad`, ``batch_l2`` of one backward
    pass. That of the gradient of the whole batch is ``N`` times as large. Gradients that have
    nothing in common give about :math:`1 / (N - 1)`.

    If gradients are averaged over several processes, it is that of all their samples, for losses
    that are weighted so that their gradient is the average. All have to call this.

    Args:
        params: Parameters with ``grad`` and ``batch_l2``, such as ``model.parameters()``.

    Returns:
        The ratio. ``[]``

    Raises:
        ValueError: If ``batch_l2`` is that of some samples alone (``subsampling``).
        RuntimeError: If the gradient has accumulated over several backward passes, ``batch_l2`` has
            while the gradient was cleared, or the gradient was changed since the pass that has
            computed ``batch_l2``; on several processes, if one of them has an error or does not
            come.
        NotImplementedError: If some gradients are averaged over several processes, others are not.
    """
    params = list(params)
    if any(getattr(p.batch_l2, "_backpack_subsampled", False) for p in params):  # type: ignore[attr-defined]
        raise ValueError(
            "gradient_snr needs batch_l2 of all samples that grad is the sum of, but it was "
            "computed with subsampling. Use BatchL2Grad() without."
        )
    if any(
        getattr(p.batch_l2, "_backpack_accumulated", False)  # type: ignore[attr-defined]
        or has_other_gradient(p, "batch_l2")
        for p in params
    ):
        raise RuntimeError(
            "gradient_snr needs grad and batch_l2 of one backward pass, but grad has accumulated "
            "over several (micro-batches, or zero_grad() was not called), or was changed since "
            "(another backward pass, clipping, unscaling), and batch_l2 is that of one alone. "
            "Compute it from one backward pass with the whole batch, right after that. With "
            "accumulate=True, batch_l2 is that of several: clear both, by backpack.clear(model) "
            "where you call zero_grad()."
        )
    groups = {of and of.groups for of in (noted(p, "batch_l2").averaged for p in params)}
    if len(groups) > 1:
        raise NotImplementedError(
            "gradient_snr needs parameters whose gradients are averaged over the same processes, "
            "but some are averaged over others, or over none."
        )
    signal = torch.cat(_vectors(params, "grad")).square().sum()  # whatever the scale
    each = torch.stack([at_least_single(p.batch_l2) for p in params])  # type: ignore[attr-defined]
    squares, count = each.sum(), torch.tensor(each.shape[1], device=each.device)
    for of in groups:
        if of is not None:
            squares, count = DataGroup(*of).total("gradient_snr", [squares, count])
    # not negative: samples that are all alike have no noise but rounding
    return signal / (count * squares - signal).clamp(min=0)


def plot_histograms(model: Module, attribute: str, bins: int = 50, log: bool = False) -> Figure:
    """Draw the distribution of an attribute's entries, a panel for each parameter.

    Entries that are not finite are left out, and the title tells how many they are. On several
    processes whose gradients are averaged, of the entries of all: all have to call this.

    Args:
        model: Parameters without the attribute are left out.
        attribute: Such as ``"grad"``, ``"variance"`` or ``"diag_ggn_mc"``.
        bins: Number of bins; fewer where there are less entries than its square.
        log: Draw log10 of the absolute values that are not zero, and say how many are zero.

    Returns:
        The figure: ``figure.savefig(path)``, or ``SummaryWriter.add_figure(tag, figure, step)``.

    Raises:
        ImportError: If matplotlib is not installed.
        AttributeError: If no parameter has the attribute.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "plot_histograms needs matplotlib: pip install 'backpack-for-pytorch[monitor]'."
        ) from error

    named = [(n, p) for n, p in model.named_parameters() if getattr(p, attribute, None) is not None]
    if not named:
        raise AttributeError(_explain("None of the parameters has", attribute))
    columns = min(4, len(named))
    rows = -(-len(named) // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(3 * columns, 2.2 * rows),
        layout="constrained",
        squeeze=False,
        sharex=log,
    )
    for axes, (name, p) in zip(grid.flat, named, strict=False):
        values = _vectors([p], attribute)[0].double().cpu()
        title, is_finite = name, values.isfinite()
        strange = len(values) - int(is_finite.sum())
        title += f" ({strange} not finite)" * (strange > 0)
        if log:
            zeros = (values == 0).double().mean().item()
            is_finite &= values != 0
            title += f" ({zeros:.0%} zero)" * (zeros > 0)
        values = values[is_finite]
        values = values.abs().log10() if log else values
        axes.hist(values.numpy(), bins=min(bins, math.isqrt(len(values)) + 1), color="#0072B2")
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_yticks([])
        axes.spines[["left", "top", "right"]].set_visible(False)
    for axes in grid.flat[len(named) :]:
        axes.set_visible(False)
    figure.supxlabel(f"log10 |{attribute}|" if log else attribute)
    return figure

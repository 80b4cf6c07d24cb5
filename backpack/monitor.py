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
...         monitor.step(loss=loss)
>>> [line.rsplit(",", 1)[0] for line in path.read_text().splitlines()[:5]]
['step,tag', '0,loss', '0,grad.norm/weight', '0,grad.norm/bias', '0,grad.norm']
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.engine.results import has_other_gradient, num_processes

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
"""Functions of the entries ``[K]`` of a quantity, by name."""


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

    ``pandas.read_csv(path).pivot(index="step", columns="tag", values="value")`` makes a column of
    each tag.

    Args:
        path: The file; its folder is made if there is none.
        append: Go on at the end of an existing file rather than replace it.
    """

    def __init__(self, path: str | Path, append: bool = False):
        """Open the file and write the header."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if append else "w", newline="", encoding="utf-8", buffering=1)
        self._rows = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0:
            self._rows.writerow(("step", "tag", "value"))

    def add_scalar(self, tag: str, value: float, step: int, /) -> None:
        """Write a line."""
        self._rows.writerow((step, tag, value))

    def add_histogram(self, tag: str, values: Tensor, step: int, /) -> None:
        """Write five lines for values ``[K]``: their percentiles 0, 25, 50, 75 and 100."""
        for percent in (0, 25, 50, 75, 100):
            self.add_scalar(f"{tag}/q{percent}", _percentile(values, percent).item(), step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Monitor:
    """Writes numbers and histograms of what backward passes leave at the parameters.

    Args:
        model: Its parameters with ``requires_grad`` are looked at. A part of a model will do.
        metrics: What to compute, for each parameter and for all of them together:

            - ``"grad.norm"``, ``"variance.mean"``, ``"batch_l2.q95"``: an attribute of the
              parameters, then one of :data:`REDUCTIONS`, or ``q`` and a percentage. For all
              parameters together, their entries are put into one vector.
            - ``"grad"``, ``"diag_ggn_mc"``: the attribute alone is written as a histogram.
            - A function of a list of parameters, like :func:`gradient_snr`. It returns a number, or
              values ``[K]`` for a histogram.
        writer: Has ``add_scalar(tag, value, step)``, ``add_histogram(tag, values, step)`` and
            ``close()``: a :class:`CSVWriter`, or a ``torch.utils.tensorboard.SummaryWriter``
            (``pip install tensorboard``). The tags are ``grad.norm/0.weight`` for a parameter,
            and ``grad.norm`` for all of them.
        every: Write in one of so many steps, beginning with the first.

    Raises:
        ValueError: If a reduction is unknown, two metrics have the same name, nothing is trainable,
            or ``every`` is not positive.

    Attributes:
        steps: How often :meth:`step` was called, which is the number that the coming one writes.
            Set it where training goes on.
    """

    def __init__(
        self, model: Module, metrics: Iterable[str | Metric], writer: Writer, every: int = 1
    ):
        """Look the metrics up."""
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True.")
        if every < 1:
            raise ValueError(f"every is 1 (write in each step) or more, but not {every}.")
        self._metrics: dict[str, Metric] = {}
        for metric in metrics:
            tag = metric if isinstance(metric, str) else getattr(metric, "__name__", repr(metric))
            if tag in self._metrics:
                raise ValueError(f"There are two metrics with the name {tag}.")
            self._metrics[tag] = _parse(metric) if isinstance(metric, str) else metric
        self._writer = writer
        self._every = every
        self.steps = 0

    @property
    def due(self) -> bool:
        """Whether the coming :meth:`step` writes.

        Extensions can be left out if not: ``with backpack(*exts if monitor.due else ())``.
        """
        return self.steps % self._every == 0

    @torch.no_grad()
    def step(self, **scalars: float | Tensor) -> None:
        """Write the metrics, if it is time. Call it after ``backward()``, in each step.

        Args:
            **scalars: Further numbers to write, such as the loss.

        Raises:
            AttributeError: If a parameter has not got what a metric needs.
            TypeError: If an attribute is not a tensor.
        """
        if self.due:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, float(value), self.steps)
            for tag, metric in self._metrics.items():
                for name, p in self._parameters.items():
                    try:
                        self._write(f"{tag}/{name}", metric([p]))
                    except AttributeError as error:
                        if error.obj is not p or error.name is None:
                            raise
                        lack = f"Parameter {name} does not have"
                        raise AttributeError(_explain(lack, error.name)) from error
                self._write(tag, metric(list(self._parameters.values())))
        self.steps += 1

    def _write(self, tag: str, value: Tensor | float) -> None:
        value = torch.as_tensor(value)
        if value.ndim == 0:
            self._writer.add_scalar(tag, value.item(), self.steps)
        else:
            self._writer.add_histogram(tag, value, self.steps)

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()

    def __enter__(self) -> Monitor:
        """Return the monitor itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the writer."""
        self.close()


def _percentile(values: Tensor, percent: float) -> Tensor:
    """Interpolate between ordered values ``[K]``; unlike ``torch.quantile``, for any ``K``."""
    ordered = values.sort().values
    position = percent / 100 * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return torch.lerp(ordered[low], ordered[high], position - low)


def _entries(params: Iterable[Parameter], attribute: str) -> Tensor:
    """Put the entries of an attribute of parameters into one vector ``[K]``."""
    vectors = []
    for p in params:
        value = getattr(p, attribute)
        if value is None:  # the gradient, before a backward pass
            raise AttributeError(name=attribute, obj=p)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{attribute} of a parameter is no tensor, but a {type(value).__name__}. "
                "Make a function of a list of parameters the metric."
            )
        vectors.append(value.detach().flatten())
    return torch.cat(vectors)


def _parse(metric: str) -> Metric:
    """Turn ``"grad.norm"`` into a function of parameters."""
    attribute, _, name = metric.partition(".")
    if not name:
        return lambda params: _entries(params, attribute)
    if name in REDUCTIONS:
        return lambda params: REDUCTIONS[name](_entries(params, attribute))
    if re.fullmatch(r"q(\d\d?|100)", name):
        return lambda params: _percentile(_entries(params, attribute), int(name[1:]))
    known = ", ".join(REDUCTIONS)
    raise ValueError(f"{metric}: there is no reduction {name}, but {known}, and q0 to q100.")


def _explain(lack: str, attribute: str) -> str:
    """Say what to do if parameters lack an attribute."""
    from backpack.support import all_extensions  # imports every rule there is

    savers = [type(ext).__name__ for ext in all_extensions() if ext.savefield == attribute]
    remedy = f"inside `with backpack({savers[0]}())` " if savers else ""
    return (
        f"{lack} the attribute {attribute}. Call backward() {remedy}first, or give only that part "
        "of the model that has it."
    )


def gradient_snr(params: Sequence[Parameter]) -> Tensor:
    r"""Signal-to-noise ratio of the gradient of a sample.

    With individual gradients :math:`g_n` it is
    :math:`\lVert \bar g \rVert^2 / \frac 1 N \sum_n \lVert g_n - \bar g \rVert^2`,
    from ``grad`` and, by :class:`~backpack.extensions.BatchL2Grad`, ``batch_l2`` of one backward
    pass. That of the gradient of the whole batch is ``N`` times as large. Gradients that have
    nothing in common give about :math:`1 / (N - 1)`.

    Args:
        params: Parameters with ``grad`` and ``batch_l2``.

    Returns:
        The ratio. ``[]``

    Raises:
        RuntimeError: If the gradient has accumulated over several backward passes, or changed
            since the one that has computed ``batch_l2``.
        NotImplementedError: If the gradient is averaged over several processes.
    """
    if any(num_processes(p, "batch_l2") > 1 for p in params):
        raise NotImplementedError(
            "gradient_snr needs the norms of all individual gradients that are in grad, but "
            "batch_l2 has those of one process alone, and grad is averaged over several."
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
            "Compute it from one backward pass with the whole batch, right after that."
        )
    signal = _entries(params, "grad").square().sum()  # of the sum over n, in whatever scale
    squares = torch.stack([p.batch_l2 for p in params])  # type: ignore[attr-defined]
    return signal / (squares.shape[1] * squares.sum() - signal)


def plot_histograms(model: Module, attribute: str, bins: int = 50, log: bool = False) -> Figure:
    """Draw the distribution of an attribute's entries, a panel for each parameter.

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
        values = _entries([p], attribute).double().cpu()
        title = name
        if log:
            zeros = (values == 0).double().mean().item()
            values = values[values != 0].abs().log10()
            title += f" ({zeros:.0%} zero)" * (zeros > 0)
        axes.hist(values.numpy(), bins=min(bins, math.isqrt(len(values)) + 1), color="#0072B2")
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_yticks([])
        axes.spines[["left", "top", "right"]].set_visible(False)
    for axes in grid.flat[len(named) :]:
        axes.set_visible(False)
    figure.supxlabel(f"log10 |{attribute}|" if log else attribute)
    return figure

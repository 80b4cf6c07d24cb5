"""What all kinds of attribution share: gradients of samples and queries, passes over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from math import isclose
from operator import index
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import pad

from backpack import backpack, disable
from backpack.core.engine.factored import FactoredGrad
from backpack.core.values import at_least_single
from backpack.distributed.agreement import digest
from backpack.distributed.data_group import ProcessGroupChoice, check_same
from backpack.extensions import BatchGrad
from backpack.extensions.backprop_extension import FAIL_ERROR
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from backpack.influence.positions import axes_of, sum_of_positions
from backpack.influence.shards import Shards
from backpack.linalg.extended import UseConverter, extended
from backpack.linalg.objective import (
    Objective,
    call,
    check_has_batches,
    check_read_again,
    is_same_state,
    one_of_zeros,
    output_of,
    state_of_weights,
)
from backpack.linalg.order import SameInEachPass, check_not_shuffled
from backpack.utils.batches import map_tensors, tensors_of

By = Literal["model", "module", "parameter"]
# Of the loss of a query, in the place of the loss function: a sum over the queries.
Measure = Callable[..., Tensor]


class Attribution:
    """Compares the gradients of training samples with those of queries."""

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        train_data: Iterable[Any],
        params: Iterable[Parameter] | None,
        measure: Measure | None,
        use_converter: UseConverter,
        progress: bool,
        process_group: ProcessGroupChoice,
    ):
        name = type(self).__name__
        check_read_again(name, train_data)
        check_has_batches(train_data)
        check_not_shuffled(f"{name} numbers training samples", train_data)
        options = (params, progress, process_group)
        data = SameInEachPass(name, train_data)
        self._objective = Objective(model, loss_function, data, *options)
        self._measure = measure
        self._use_converter = use_converter
        self.names = self._objective.names
        self._weights = state_of_weights(self._objective.model)

    def _check_weights(self) -> None:
        """Refuse weights that are not those of what was computed before.

        Raises:
            RuntimeError: If they are others.
        """
        if not is_same_state(self._weights, state_of_weights(self._objective.model)):
            raise RuntimeError(
                f"The weights of the model have changed since {type(self).__name__} has computed "
                "what it knows of the training data: scores would be of neither. Build a new one."
            )

    def scores(self, queries: Any, by: By = "model", folder: str | Path | None = None) -> Any:
        """Compute the influence of all training samples on queries.

        Args:
            queries: A batch ``(X, y)``, or several of them: Q queries.
            by: ``"module"`` and ``"parameter"`` say what each of these contributes.
            folder: Where the results of each batch are written. What is there already is read
                instead of computed: an interrupted program goes on where it was.

        Returns:
            ``[Q, N]``, positive where a sample lowers the loss of the query (or the ``measure``);
            samples in the order of the data, those of the first process first. Or a dictionary of
            these, by name.

        Raises:
            ValueError: If the folder belongs to other queries, data or options.
            RuntimeError: If queries differ between processes, an error has stopped one, or one does
                not come.
        """
        return self._joined(self._each_batch(queries, folder), by)

    def _joined(self, batches: Iterable[tuple[float, dict[str, Tensor]]], by: By) -> Any:
        """Put the scores of batches together, by groups of parameters."""
        parts: dict[str, list[Tensor]] = {}
        weights = 0.0
        with self._objective.telling():
            for weight, found in batches:
                weights += weight
                for name, values in grouped(found, by).items():
                    parts.setdefault(name, []).append(values)
            whole = {name: torch.cat(_padded(values), 1) for name, values in parts.items()}
        norm = self._norm(weights)
        rows = self._gathered([values.transpose(0, 1) for values in whole.values()])
        each = zip(whole, rows, strict=True)
        scores = {name: _flat(values.transpose(0, 1) / norm) for name, values in each}
        return scores[""] if by == "model" else scores

    def top(
        self, k: int, queries: Any, harmful: bool = False, folder: str | Path | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find the samples of the largest influence; others are not kept.

        Args:
            k: How many, for each query.
            queries: As for :meth:`scores`, or scores ``[Q, N]``.
            harmful: Find the most negative ones instead, which raise the loss (or the ``measure``).
            folder: As for :meth:`scores`.

        Returns:
            Scores and numbers of the samples, the largest (or most negative) first: ``[Q, k]``
            each.

        Raises:
            ValueError: If there are less than k samples, k is not positive, or scores have another
                number of axes.
            TypeError: If k is no whole number.
        """
        try:
            k = index(k)
        except TypeError as error:
            raise TypeError(
                f"k is how many samples to find, got {type(k).__name__}: call top(k, queries)."
            ) from error
        if k < 1:
            raise ValueError(f"k has to be at least 1, got {k}.")
        sign = -1.0 if harmful else 1.0
        best: tuple[Tensor, Tensor] | None = None
        norm, start, weights = 1.0, 0, 0.0
        is_given = isinstance(queries, Tensor)
        if is_given and queries.dim() != 2:
            shape = list(queries.shape)
            raise ValueError(f"Scores are [Q, N], one row for each query; got {shape}.")
        with self._objective.telling():
            batches = [(0.0, {"": queries})] if is_given else self._each_batch(queries, folder)
            for weight, found in batches:
                weights += weight
                values = sign * grouped(found, "model")[""]
                numbers = torch.arange(start, start + values.shape[1], device=values.device)
                start += values.shape[1]
                best = _largest(k, best, values, numbers.expand_as(values))
        if best is not None and not is_given:
            norm = self._norm(weights)
            counts = self._gathered([best[1].new_tensor([start])])[0].tolist()
            first = sum(counts[: self._objective.rank])
            values, numbers = self._gathered([best[0].T, best[1].T + first])
            best, start = _largest(k, None, values.T, numbers.T), sum(counts)
        if best is None or best[0].shape[1] < k:
            raise ValueError(f"There are less than {k} samples: {start}.")
        return sign * best[0] / norm, best[1]

    def _gathered(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Concatenate rows ``[n, *]`` that belong to the samples of each process."""
        group, what = self._objective.group, type(self).__name__
        if group is None:
            return [*rows]
        if rows[0].dim() > 2:  # [n, Q, R, T1, ...]: processes have batches of other lengths
            sizes = [size for each in rows for size in each.shape[2:]]
            lengths = torch.tensor([sizes], device=rows[0].device)
            (lengths,) = group.gathered(f"positions of {what}", [lengths])
            longest = iter(lengths.amax(0).tolist())
            rows = [_with_zeros(each, [next(longest) for _ in each.shape[2:]]) for each in rows]
        return group.gathered(what, rows)

    def _of_process(self, folder: str | Path | None) -> Path | None:
        """Return the part of a folder that belongs to this process."""
        if folder is None or self._objective.group is None:
            return None if folder is None else Path(folder)
        return Path(folder) / f"process{self._objective.rank:03d}"

    def _checked(self, flat: Tensor) -> Tensor:
        """Return ``[Q, P]`` of queries, which has to be the same on all processes."""
        group = self._objective.group
        if group is not None:
            what = f"lengths of {len(flat)} queries of {type(self).__name__}"
            check_same(group, what, flat.norm(dim=1))
        return flat

    def _norm(self, weights: float) -> float:
        """Return what sums over terms are divided by, given the weights of this process."""
        (weights,) = self._objective.total(f"weights of {type(self).__name__}", [], weights)
        return self._objective.norm(weights)

    def _each_batch(
        self, queries: Any, folder: str | Path | None
    ) -> Iterator[tuple[float, dict[str, Tensor]]]:
        """Yield for each batch its weight, and by parameter ``[Q, n]``."""
        raise NotImplementedError

    def _values(
        self, ext: FirstOrderBackpropExtension, X: Any, targets: Sequence[Any], is_query: bool
    ) -> tuple[float, list[Any]]:
        """Return a batch's weight, and for each parameter what an extension makes of ``∇ℓ_n``."""
        objective, name = self._objective, type(self).__name__
        ext = copy(ext)  # the user's saves where it did
        ext.savefield = "_backpack_influence"
        ext._fail_mode = FAIL_ERROR  # a part of the uses has other scores
        with (
            extended(objective.model, self._use_converter or "record") as model,
            extended(objective.loss_function, False) as loss_function,
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            try:
                with backpack(ext, gradients=False):
                    if is_query and self._measure is not None:
                        output = call(name, model, X)
                        weight, loss = 1.0, self._measure(output, *targets)
                        _check_is_number(self._measure, loss)
                    else:
                        output = output_of(name, model, X, loss_function)
                        weight = objective.weight(X, output, targets)
                        loss = loss_function(output, *targets)
                        # a sum of the terms; if no target counts, of nothing
                        loss = weight * loss if weight else 0.0 * output.sum()
                    loss.backward(inputs=list(objective.params))
            finally:
                values = [vars(p).pop(ext.savefield, None) for p in objective.params]
        unused = [n for n, value in zip(self.names, values, strict=True) if value is None]
        if is_query and self._measure is not None:
            _check_is_sum(self._measure, output, targets)
        if unused:
            raise ValueError(
                f"The loss does not depend on {', '.join(unused)} through an extended module. "
                "Leave them out (params=...)."
            )
        return weight, values

    def _gradients(
        self, X: Any, targets: Sequence[Any], is_query: bool = False
    ) -> tuple[float, list[FactoredGrad]]:
        weight, values = self._values(BatchGrad(factored=True), X, targets, is_query)
        return weight, [FactoredGrad.of(value) for value in values]

    def _products(
        self, along: Sequence[Directions], X: Any, targets: Sequence[Any]
    ) -> tuple[float, list[Tensor]]:
        """Return a batch's weight, and for each parameter products ``[Q, n]`` with ``∇ℓ_n``."""
        weight, gradients = self._gradients(X, targets)
        return weight, [d.products(g).T for d, g in zip(along, gradients, strict=True)]

    def _shards(self, folder: Path | None, queries: Tensor, options: str) -> Shards:
        """Return files that know the loss, too: queries may be measured by something else."""
        loss, left_out = self._objective.loss_function, ("_", "training")
        own = [
            (type(part).__name__, k, v)
            for part in loss.modules()
            for k, v in vars(part).items()
            if not k.startswith(left_out) and isinstance(v, (str, float, int))
        ]
        tensors = list(map(digest, (*loss.parameters(), *loss.buffers())))
        return Shards(folder, queries, f"{options}, {own} {tensors}")

    def _kept(
        self, shards: Shards, products: Callable[[Any, Sequence[Any]], tuple[float, list[Any]]]
    ) -> Iterator[tuple[float, dict[str, Tensor]]]:
        """Yield what is found of each batch, by parameter: from files, where it is there."""
        for X, targets, counts in with_samples(self._objective):
            found = shards.read(X, targets)
            if found is None:
                weight, each = products(X, targets)
                if not counts:
                    weight, each = 0.0, [values[:, :0] for values in each]
                found = weight, dict(zip(self.names, each, strict=True))
                shards.write((X, targets), *found)
            weight, by_name = found
            yield weight, {name: by_name[name] for name in self.names}  # files have another order

    def _of_queries(
        self, queries: Any, ext: FirstOrderBackpropExtension | None = None
    ) -> list[Tensor]:
        """Return for each parameter the gradients of all queries, or what is made of them."""
        found: list[list[Tensor]] = []
        for X, targets in self._read(queries):
            if ext is None:
                gradients = self._gradients(X, targets, is_query=True)[1]
                found.append([gradient.dense() for gradient in gradients])
            else:
                found.append(self._values(ext, X, targets, is_query=True)[1])
        return [torch.cat(pieces) for pieces in zip(*found, strict=True)]

    def _read(self, queries: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Yield the batches of queries, on the device of the parameters."""
        is_one = isinstance(queries, tuple) and not all(
            isinstance(batch, (tuple, list)) for batch in queries
        )
        batches = [queries] if is_one else queries
        check_not_shuffled(f"{type(self).__name__} numbers queries", batches)
        own = self._objective
        read = Objective(own.model, own.loss_function, batches, own.params, False, None)
        for X, targets, _ in with_samples(read):
            yield X, targets


def _check_is_number(measure: Measure, value: Any) -> None:
    """Refuse a measure that returns something else than one number.

    Raises:
        ValueError: If it does.
    """
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else value
        raise ValueError(
            f"The measure {measure!r} has to return one number, the sum over the queries of a "
            f"batch, got {shape}: add .sum()."
        )


def _check_is_sum(measure: Measure, output: Any, targets: Sequence[Any]) -> None:
    """Refuse a mean over the queries: scores would depend on how many are in a batch.

    Raises:
        ValueError: If it is one, which twice the queries show.
    """
    if not any(x.dim() and len(x) > 1 for x in tensors_of(output)):
        return

    def value(count: int) -> float:
        repeated = map_tensors(
            lambda x: torch.cat([x.detach()] * count) if x.dim() else x, (output, tuple(targets))
        )
        return float(measure(repeated[0], *repeated[1]))

    with torch.no_grad(), disable():
        try:
            once, twice = value(1), value(2)
        except Exception:  # a measure may know how many there are
            return
    if once and isclose(once, twice, rel_tol=1e-3):
        raise ValueError(
            f"The measure {measure!r} has to be a sum over the queries of a batch, but twice the "
            f"queries give the same value, {once:g}: it is a mean, or looks at some of them. Use "
            "reduction='sum', or one query in each batch."
        )


def with_samples(objective: Objective) -> Iterator[tuple[Any, Any, bool]]:
    """Leave out batches without samples: none of the tensors of X has a row.

    A process that has no others yields a sample of zeros, which does not count: where it sums with
    others, these need to know the shapes.

    Raises:
        ValueError: If there are no others, and no other processes.
    """
    is_empty = True
    for X, targets in objective:
        sizes = [len(x) for x in tensors_of(X) if x.dim()]
        if any(sizes) or not sizes:
            is_empty = False
            yield X, targets, True
    if is_empty and objective.group is None:
        raise ValueError("The data has no samples: all batches are empty.")
    if is_empty:
        yield *map_tensors(one_of_zeros, (X, targets)), False


class Directions:
    """Directions ``[Q, *p]`` of a parameter: as they are, or sums of outer products."""

    def __init__(self, directions: Tensor, rank: int | None):
        """Find the outer products, if there is a rank that is smaller than the whole."""
        self.dense: Tensor | None = directions
        if rank is None or directions.dim() < 3 or rank >= min(directions.flatten(2).shape[1:]):
            return
        wide = directions.flatten(2)
        wide = at_least_single(wide)  # svd knows none in less
        left, values, right = torch.linalg.svd(wide, full_matrices=False)
        self.dense, self.rank, self.shape = None, rank, directions.shape
        a = (left * values.unsqueeze(1)).mT[:, :rank].flatten(0, 1)  # [Q·r, O]
        b = right[:, :rank].flatten(0, 1)  # [Q·r, I]
        self.a, self.b = a.to(directions), b.to(directions)

    def whole(self) -> Tensor:
        """Return the directions, ``[Q, *p]``."""
        if self.dense is not None:
            return self.dense
        products = self.a.unflatten(0, (-1, self.rank)).mT @ self.b.unflatten(0, (-1, self.rank))
        return products.reshape(self.shape)

    def products(self, gradients: FactoredGrad) -> Tensor:
        """Return the inner products with N gradients, ``[N, Q]``."""
        if self.dense is not None:
            return gradients.project(self.dense)
        return gradients.project_outer(self.a, self.b).unflatten(1, (-1, self.rank)).sum(2)


def grouped(found: Mapping[str, Tensor], by: By) -> dict[str, Tensor]:
    """Add up what parameters contribute: of the whole model under the name ``""``.

    Raises:
        ValueError: If there is no such kind, or tokens do not match.
    """
    if by not in ("model", "module", "parameter"):
        raise ValueError(f"by is 'model', 'module' or 'parameter', got {by!r}.")
    groups: dict[str, Tensor] = {}
    for name, values in found.items():
        group = {"model": "", "module": name.rpartition(".")[0], "parameter": name}[by]
        known = groups.get(group)
        total = values
        if known is not None:
            both = known + values if values.dim() < 3 else sum_of_positions(known, values)
            if both is None:
                raise ValueError(
                    f"'{name}' is used at {_positions(values)} positions, others that it is added "
                    f"to at {_positions(known)}. Look at each with by='parameter', or leave it out "
                    "(params=...)."
                )
            total = both
        groups[group] = total
    return groups


def _positions(scores: Tensor) -> str:
    """Describe the positions of ``[Q, N, R, T1, T2, ...]``, such as "3 x 4"."""
    return " x ".join(map(str, axes_of(scores)))


def _largest(
    k: int, best: tuple[Tensor, Tensor] | None, values: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the largest of some values ``[Q, n]`` and the best so far, with their numbers."""
    if best is not None:
        values, numbers = torch.cat([best[0], values], 1), torch.cat([best[1], numbers], 1)
    values, places = values.topk(min(k, values.shape[1]), dim=1)
    return values, numbers.gather(1, places)


def _padded(values: list[Tensor]) -> list[Tensor]:
    """Add zeros to scores of tokens, ``[Q, n, R, T1, ...]``, so that all have as many along axes.

    Raises:
        ValueError: If batches have different axes.
    """
    if len({each.dim() for each in values}) > 1:
        kinds = ", ".join(dict.fromkeys(map(_positions, values)))
        raise ValueError(f"Batches have positions along different axes: {kinds}.")
    longest = [max(sizes) for sizes in zip(*(each.shape[2:] for each in values), strict=True)]
    return [_with_zeros(each, longest) for each in values]


def _with_zeros(scores: Tensor, sizes: Sequence[int]) -> Tensor:
    """Add zeros at the end of the axes of positions: ``[*, *, R, T1, ...]``."""
    missing = [size - own for size, own in zip(sizes, scores.shape[2:], strict=True)]
    return pad(scores, [n for each in reversed(missing) for n in (0, each)])


def _flat(scores: Tensor) -> Tensor:
    """Number the positions of tokens in one go: ``[Q, N, R, T1, ...]`` to ``[Q, N, T]``."""
    return scores.flatten(2) if scores.dim() > 2 else scores

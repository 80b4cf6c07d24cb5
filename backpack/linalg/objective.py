"""The loss of a model over a data set: what operators share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import chain
from math import isclose
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import CrossEntropyLoss, Module, Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.utils.data import Dataset, IterableDataset

from backpack import backpack
from backpack.context import disable
from backpack.core.derivatives.evaluation import quietly
from backpack.core.derivatives.terms import REDUCTIONS, num_terms, torch_loss
from backpack.core.engine.checks import check_one_process
from backpack.core.record.data_notes import layout_of, moved
from backpack.core.record.generators import evaluated_apart
from backpack.core.record.layout import Place
from backpack.distributed.data_group import DataGroup, telling
from backpack.distributed.shards import is_sharded
from backpack.hessianfree.graph import nodes_above
from backpack.linalg.extended import ALONE, extended
from backpack.utils.batches import map_tensors, tensors_of
from backpack.utils.progress import with_bar

ONE_PROCESS = "one"
# Classes of torch, torchvision and timm that are random in training mode, beside dropout.
ALWAYS_RANDOM = ("RReLU", "StochasticDepth", "DropPath")


class Objective:
    """Loss of a model over a data set, whose derivatives are sums over the batches.

    With ``reduction="sum"``, the loss of the data set is the sum of those of the batches. With
    ``"mean"``, it is their mean with weights :meth:`weight`, such that it is the mean over all
    terms of all batches, however the data is cut into batches.

    Attributes:
        model: The model.
        loss_function: The loss.
        params: The parameters that derivatives are taken with respect to.
    """

    def __init__(
        self,
        model: Module,
        loss_function: Module,
        data: Iterable[Any],
        params: Iterable[Parameter] | None,
        progress: bool,
        process_group: Any = ONE_PROCESS,
        use_converter: Any = False,
    ):
        """Check what is given.

        Args:
            model: The model.
            loss_function: The loss, ``loss_function(model(X), y)``.
            data: Batches ``(X, y)``.
            params: Parameters. Default: the trainable ones of the model.
            progress: Show a bar while iterating over the data.
            process_group: Who adds up sums over the data, see :class:`MatrixFreeOperator`.
                Default: nobody can.
            use_converter: How the model is extended, by those who do.

        Raises:
            ValueError: If there are no trainable parameters, they are not the model's, complex, of
                several precisions or on several devices, the loss is no module or its reduction is
                unknown, a module in training mode is no function of a sample, or the data are
                single samples.
            NotImplementedError: On several processes of ``torch.distributed`` without a choice, or
                with sharded parameters.
        """
        self.group: DataGroup | None = None
        if process_group == ONE_PROCESS:
            check_one_process("An operator over a data set")
        else:
            self.group = DataGroup.of(process_group, model, "An operator over a data set")
        if isinstance(model, DistributedDataParallel):
            model = model.module  # passes over the data leave gradients alone
        check_has_batches(data)
        self.model = model
        self.loss_function = loss_function
        self.data = data
        self.progress = progress
        self.use_converter = use_converter
        self._place: Place | None = None
        own = list(model.parameters())
        given = [p for p in own if p.requires_grad] if params is None else list(params)
        self.params = tuple(given)
        known = set(map(id, own))
        if len(known.intersection(map(id, given))) < len(given):
            raise ValueError(
                "params has to be a list of parameters of the model, each of them once. A single "
                "one is params=[p]."
            )
        if not given or not all(p.requires_grad for p in given):
            raise ValueError(
                "Curvature needs parameters that require a gradient: pass some of the model's as "
                "params, and set p.requires_grad_(True)."
            )
        sharded = [name for name, p in model.named_parameters() if is_sharded(p)]
        if sharded:
            raise NotImplementedError(
                f"An operator over a data set needs whole parameters, but {sharded[0]!r} is a "
                "DTensor (fully_shard, parallelize_module). Build it with a model that is not "
                "sharded."
            )
        kinds = {(p.dtype, p.device) for p in self.params}
        if len(kinds) > 1:
            raise ValueError(
                "All parameters of an operator need one precision and one device, got "
                f"{sorted(f'{dtype} on {device}' for dtype, device in kinds)}. Choose some of "
                "them with params."
            )
        if self.params[0].is_complex():
            raise ValueError(
                "Operators are matrices for real parameters, but these are complex. Make them "
                "real, and use torch.view_as_complex in forward, or choose others with params."
            )
        self.reduction = getattr(loss_function, "reduction", None)
        if self.reduction not in REDUCTIONS and not isinstance(loss_function, Module):
            raise ValueError(
                "The loss of an operator has to be a module, such as nn.CrossEntropyLoss() in the "
                f"place of F.cross_entropy, got {_named(loss_function)}."
            )
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"How the losses of several batches are put together is up to the attribute "
                f"'reduction' of {type(loss_function).__name__}: 'mean' or 'sum', but it is "
                f"{self.reduction!r}. A loss of your own needs the attribute too."
            )
        check_is_function_of_samples(model)

    @property
    def of_loss(self) -> tuple[type, str]:
        """Class and reduction of the loss, which tell the scale of its derivatives."""
        return type(self.loss_function), str(self.reduction)

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return [names[id(p)] for p in self.params]

    def __iter__(self) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Yield input and targets of each batch, on the device of the parameters."""
        check_is_function_of_samples(self.model)  # its mode may be another one than at the start
        device = self.params[0].device
        is_empty = True
        for batch in self._with_bar():
            if not isinstance(batch, (tuple, list)) or len(batch) < 2:
                raise ValueError(
                    f"Each batch of the data must be a tuple (X, y), got {type(batch).__name__}. "
                    "A single batch is data=[(X, y)]."
                )
            check_loss_takes(self.loss_function, batch[1:])
            X, *targets = map_tensors(lambda x: moved(x, device), tuple(batch))
            yield X, targets
            is_empty = False
        if is_empty:
            raise ValueError("The data has no batches.")

    @property
    def process_group(self) -> Any:
        """The choice of processes for others who sum over the same ones; None for this alone."""
        return None if self.group is None else self.group.groups[0]

    @property
    def rank(self) -> int:
        """The number of this process among those."""
        return 0 if self.group is None else self.group.rank

    def vectors(self, matrix: Tensor) -> list[Tensor]:
        """Give columns the shapes of the parameters: ``[P, V]`` to ``[V, *p]`` for each."""
        pieces = matrix.T.split([p.numel() for p in self.params], 1)
        each = zip(pieces, self.params, strict=True)
        return [piece.reshape(len(piece), *p.shape) for piece, p in each]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Let an error of this process be one on all that sum with it."""
        with telling(self.group):
            yield

    def total(self, what: str, values: Sequence[Tensor], weight: float) -> list[Any]:
        """Sum values, and the weights behind them, over the processes, if they are to.

        ``what`` names the values: the same on all.
        """
        if self.group is None:
            return [*values, weight]
        device = self.params[0].device
        own = torch.tensor(weight, dtype=torch.float64, device=device)
        *totals, weights = self.group.total(what, [*values, own])
        return [*totals, float(weights)]

    def weight(self, X: Any, output: Any, targets: Sequence[Any], skips_zero: bool = True) -> float:
        """Return the weight of a batch: the number that the mean of its losses divides by, or 1.

        See :func:`backpack.core.derivatives.terms.num_terms`.

        Raises:
            ValueError: If it is zero, so that a caller which ``skips_zero`` leaves the batch out,
                but label smoothing lets other classes than the targets count.
        """
        loss: Any = self.loss_function
        weight = num_terms(loss, output, targets, lambda: self.place(X, output).axis)
        is_smoothed = isinstance(loss, CrossEntropyLoss) and loss.label_smoothing > 0
        is_left_out = skips_zero and not weight
        if is_left_out and is_smoothed and bool((targets[0] != loss.ignore_index).any()):
            raise ValueError(
                f"All targets of a batch have the class weight 0, but label_smoothing = "
                f"{loss.label_smoothing} lets other classes count: the mean of that batch is no "
                "number. Use larger batches, or reduction='sum'."
            )
        return weight

    def place(self, X: Any, output: Any) -> Place:
        """Return where the samples are in the output: where they are in that of the first batch.

        It is known of what an extended model has computed; any other one is extended for a pass.
        """
        if self._place is None and any(y.dim() > 1 for y in tensors_of(output)):
            places = places_of(output)
            if not places:
                recorded = extended(self.model, self.use_converter or "record")
                with ALONE, quietly(), recorded as model, torch.enable_grad(), backpack():
                    places = places_of(call("An operator over a data set", model, X))
            self._place = next(iter(places), Place())
        return self._place or Place()

    def norm(self, weights: float) -> float:
        """Return what a sum over the batches is divided by, for a sum of their weights.

        Raises:
            ValueError: If no target counts.
        """
        if weights == 0:
            raise ValueError("No target of the data counts: all are ignored, or weigh nothing.")
        return 1.0 if self.reduction == "sum" else weights

    def _with_bar(self) -> Iterable[Any]:
        # short passes have none; conjugate gradients make many
        return with_bar(self.data, "batches", self.progress, delay=1)


def places_of(output: Any) -> list[Place]:
    """List where the samples are, where that is known and an output has several axes."""
    known = [(y, layout_of(y)) for y in tensors_of(output) if y.dim() > 1]
    places = [layout.place(y.shape) for y, layout in known if layout is not None]
    return [place for place in places if place is not None]


def flattened(parts: Iterable[Tensor]) -> Tensor:
    """Put ``[V, *p]`` for each parameter together: ``[V, P]``."""
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)


def one_of_zeros(x: Tensor) -> Tensor:
    """Return one row of zeros in the place of none."""
    return x if not x.dim() or len(x) else x.new_zeros(1, *x.shape[1:])


def _named(given: object) -> str:
    """Name what was given in place of a loss module."""
    kind = "class" if isinstance(given, type) else type(given).__name__
    name = getattr(given, "__name__", None)
    return f"{given!r}" if name is None else f"the {kind} {name}"


def call(what: str, model: Module, X: Any) -> Any:
    """Return ``model(X)``; ``what`` says who needs it, for messages.

    Raises:
        ValueError: If it does not take a tuple or a dictionary as its only argument.
    """
    try:
        return model(X)
    except (AttributeError, KeyError, TypeError) as error:
        if isinstance(X, Tensor):
            raise
        kind, stars = type(X).__name__, "**X" if isinstance(X, Mapping) else "*X"
        raise ValueError(
            f"{what} calls the model as model(X), with the {kind} that is the input of a batch, "
            f"which has failed: {error!r}. If it takes the entries of X as "
            f"arguments, wrap the model in a module whose forward(X) returns model({stars})."
        ) from error


def output_of(what: str, model: Module, X: Any, loss_function: Module | None = None) -> Any:
    """Return the output ``model(X)``, which has to be a tensor, unless a loss of your own takes it.

    Raises:
        ValueError: If the output is no tensor, or as for :func:`call`.
    """
    output = call(what, model, X)
    takes_any = loss_function is not None and torch_loss(type(loss_function)) is None
    if not isinstance(output, Tensor) and not takes_any:
        entries = f" of {', '.join(map(repr, output))}" if isinstance(output, Mapping) else ""
        raise ValueError(
            f"{what} needs a model that returns a tensor, got {type(output).__name__}{entries}. "
            "Wrap the model in a module that picks one."
        )
    return output


def real_output_of(what: str, model: Module, X: Any) -> Tensor:
    """Return the output as :func:`output_of`, which has to be real.

    Raises:
        ValueError: If it is complex, or as for :func:`output_of`.
    """
    output: Tensor = output_of(what, model, X)
    if output.is_complex():
        raise ValueError(
            f"{what} needs real outputs, got {output.dtype} of shape {list(output.shape)}: it "
            "would look at their real part alone. Let the model return torch.view_as_real(output)."
        )
    return output


def without_graph(evaluate: Callable[[], Tensor]) -> Tensor:
    """Return what a model computes, without a graph, and with nothing stored.

    A model that differentiates in its forward (forces, equations of physics) needs one meanwhile.
    """
    with disable():
        try:
            with torch.no_grad():
                return evaluate()
        except RuntimeError:
            with torch.inference_mode(False), torch.enable_grad():
                return evaluate().detach()


def output_drawing_nothing(
    what: str, model: Module, X: Any, loss_function: Module | None = None
) -> Any:
    """Return the output as :func:`output_of`, of a model that draws no random numbers.

    For what is computed in one pass, and cannot notice that another one has other numbers.

    Raises:
        ValueError: If it draws some, or as for :func:`output_of`.
    """
    output, is_random = evaluated_apart(lambda: output_of(what, model, X, loss_function))
    if is_random:
        raise ValueError(
            f"{what} is not defined for a model whose forward pass draws random numbers, such as "
            "functional.dropout(x). Call model.eval() first, and let it draw none then."
        )
    return output


@torch.no_grad()
def state_of_weights(model: Module, besides: Iterable[Parameter] = ()) -> list[float]:
    """Return numbers that other parameters and buffers of a model do not have, but for some."""
    left_out = set(map(id, besides))
    tensors = chain(model.parameters(), model.buffers())
    each = [x for x in tensors if x.is_floating_point() and id(x) not in left_out]
    return [float(vector_norm(x, kind, dtype=torch.float64)) for x in each for kind in (1, 2)]


def is_same_state(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether numbers of :func:`state_of_weights` are the same up to the order of sums."""
    pairs = zip(one, other, strict=True)
    return all(isclose(was, now, rel_tol=1e-9) for was, now in pairs)


def check_has_batches(data: object) -> None:
    """Refuse a data set of samples, or one batch: other axes would be taken for that of samples.

    Raises:
        ValueError: If it is one.
    """
    if isinstance(data, (Tensor, Mapping)):
        raise ValueError(
            f"Data are batches, but got one {type(data).__name__}, of which each entry would be a "
            "batch. A single batch is data=[(X, y)]; where no targets are needed, data=[X]."
        )
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError(
            f"Data are batches (X, y), but {type(data).__name__} has a sample in each item. Use "
            "DataLoader(dataset, batch_size=...), or batch_size=None if its items are batches."
        )


def check_loss_takes(loss_function: Module, targets: Sequence[Any]) -> None:
    """Refuse batches with more or fewer parts than the loss takes, or dictionaries for tensors.

    Raises:
        ValueError: If the loss cannot be called with them.
    """
    kind = torch_loss(type(loss_function))
    is_torchs = kind is not None and type(loss_function).forward is kind.forward
    entries = next((x for x in targets if isinstance(x, Mapping)), None) if is_torchs else None
    if entries is not None:
        raise ValueError(
            f"{type(loss_function).__name__} takes tensors as targets, but those of a batch are a "
            f"{type(entries).__name__} of {', '.join(map(repr, entries))}. Choose one, "
            "data=[(X, y[name]) for X, y in loader], or give a loss whose forward takes them all."
        )
    try:
        takes = signature(loss_function.forward)
    except (TypeError, ValueError):  # a function of C has none
        return
    try:
        takes.bind(None, *targets)
    except TypeError as error:
        count = len(targets) + 1
        try:
            takes.bind_partial(None, *targets)
        except TypeError:
            advice = (
                "Choose the parts, collate_fn=lambda samples: default_collate(samples)[:2] in the "
                "DataLoader (from torch.utils.data) or data=[batch[:2] for batch in loader], or "
                "give a loss whose forward takes all of them."
            )
        else:
            advice = "Give what is missing in each batch, or a loss whose forward needs no more."
        raise ValueError(
            f"A batch has {count} parts, an input and what the loss is called with after the "
            f"prediction, but {type(loss_function).__name__} cannot be called so: {error}. {advice}"
        ) from error


def check_read_again(what: str, data: Iterable[Any]) -> None:
    """Refuse data that can be read only once.

    Raises:
        ValueError: If they are an iterator.
    """
    if isinstance(data, Iterator):
        raise ValueError(
            f"{what} reads the data several times, but {type(data).__name__} is an iterator, which "
            "can be read only once: pass a DataLoader or a list."
        )


def chosen_parameters(
    model: Module, data: Iterable[Any], params: Iterable[Parameter] | str
) -> list[Parameter] | None:
    """Return parameters; of names, ``"all"`` that are trainable (None) or of the ``"last"`` layer.

    The first batch ``(X, y)`` shows which layer is called last.

    Raises:
        ValueError: If there is no such name, or the model is in training mode and should not be.
    """
    if not isinstance(params, str):
        return list(params)
    if params not in ("all", "last"):
        raise ValueError(f"params is 'all', 'last' or a list of parameters, got {params!r}.")
    return _of_last_layer(model, data) if params == "last" else None


def _of_last_layer(model: Module, data: Iterable[Any]) -> list[Parameter]:
    """Return the trainable parameters of the layer that is called last.

    Those of a module around it, such as a class token, are taken if they are applied behind it.
    """
    called: list[tuple[Module, list[Parameter]]] = []
    ends: dict[Module, set[Any]] = {}
    lists = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    of_weights = {part for each in lists for part in each.modules()}

    def begin(module: Module, *_: Any) -> None:
        own = [*module.parameters(recurse=False)]
        if is_parametrized(module):  # what its weights are computed from
            parametrizations: Any = module.parametrizations
            own += parametrizations.parameters()
        own = [p for p in own if p.requires_grad]
        if own and module not in of_weights:
            called.append((module, own))

    def end(module: Module, _: Any, output: Any) -> None:
        ends[module] = {y.grad_fn for y in tensors_of(output)}

    if isinstance(model, DistributedDataParallel):
        model = model.module
    check_is_function_of_samples(model)  # its buffers would change
    X, *_ = next(iter(data))
    device = next(model.parameters()).device
    handles = [module.register_forward_pre_hook(begin) for module in model.modules()]
    handles += [module.register_forward_hook(end) for module in model.modules()]
    try:
        with torch.inference_mode(False), torch.enable_grad(), disable():
            call("params='last'", model, map_tensors(lambda x: x.to(device), X))
    finally:
        for handle in handles:
            handle.remove()
    if not called:
        return []
    last, own = called[-1]
    behind = nodes_above(ends[model], until=ends[last].__contains__)
    leaves = {id(getattr(node, "variable", None)) for node in behind}
    for module, others in reversed(called[:-1]):
        is_around = any(part is last for part in module.modules())
        if is_around and any(id(p) in leaves for p in others):
            return others
    return own


def check_is_function_of_samples(model: Module) -> None:
    """Refuse modules that are random, or mix the samples of a batch.

    The matrix would be another one at each product, or with other batches: conjugate gradients and
    eigensolvers return nonsense then, without an error.

    Raises:
        ValueError: If there is one.
    """
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
        always = type(module).__name__ in ALWAYS_RANDOM
        random = always or (isinstance(rate, (int, float)) and rate > 0)
        mixing = isinstance(module, _BatchNorm)
        if (random or mixing) and module.training:
            raise ValueError(
                f"The curvature over a data set is not defined in training mode: '{name}' "
                f"({type(module).__name__}) {'mixes the samples' if mixing else 'is random'}. Call "
                "model.eval() first."
            )
        if getattr(module, "_random_samples", module) is None:  # fractional pooling
            raise ValueError(
                f"The curvature over a data set is not defined: '{name}' ({type(module).__name__}) "
                "is random, after model.eval() as well. Give it _random_samples."
            )
        if mixing and module.running_mean is None:
            raise ValueError(
                f"The curvature over a data set is not defined: '{name}' ({type(module).__name__}) "
                "mixes the samples of a batch, because it has no running statistics."
            )

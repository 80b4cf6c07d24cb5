"""The graph of the calls that a backward pass has reached: who feeds whom, and where it breaks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import gcd, prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.engine.call_products import shape_in, shape_out
from backpack.core.lazy import lazy
from backpack.core.record.calls import is_converted
from backpack.core.record.context import context_of
from backpack.core.record.kept_parameters import KeptParameters
from backpack.core.record.origins import RESHAPES, Origin, parameter_behind, upstream
from backpack.core.record.placed_call import UNSEEN
from backpack.core.record.visits import Visit, compute_in_one_precision
from backpack.core.rows import Rows, row_numbers
from backpack.core.types import Extension
from backpack.hessianfree.graph import nodes_above
from backpack.utils.subsampling import subsample

READS_PARAMETER = (
    "{!r} has a parameter as its input. Only parameters that belong to a module with derivatives "
    "of its own are supported. If it is data, give x.detach().requires_grad_(); if a function of "
    "the model reads it, use extend(model, use_converter=True)."
)


class Producer(NamedTuple):
    """The call (and the number of its output) that computed a tensor."""

    call: Visit
    slot: int


class Feed(NamedTuple):
    """An input of a call that another one has computed, for a selection of samples."""

    slot: int  # number of the input
    origin: Origin  # identity of the tensor
    shape: Sequence[int]  # its canonical shape as the input
    shape_there: Sequence[int]  # as the output of the other call
    is_copied: bool  # whether the input has no samples: one tensor for all rows
    is_gathered: bool  # whether the tensor has none, and the other call no rows of its own


class Passage(NamedTuple):
    """A call on the way of vectors through the network, for a selection of samples."""

    call: Visit
    rows: Rows
    feeds: list[Feed]


def set_apart(calls: Iterable[Visit], exts: Iterable[Extension]) -> None:
    """Let calls that only reshape take part in the graph, if an extension has a rule for them.

    They do from the forward pass on if the extension was made before it. Otherwise the output (or
    the input itself) cannot be told from the input: what has read the tensor since has read the
    output, if that is a single call, else it is a ValueError.
    """
    exts = list(filter(attrgetter("rules"), exts))
    if not exts:
        return
    ordered = sorted(calls, key=attrgetter("index"))
    produced = {o for call in ordered if not call.is_transparent for o in call.origins_out}
    for number, call in enumerate(ordered):
        rules = [rule for ext in exts if (rule := ext.rule_for(call.module)) is not None]
        if not (rules and call.is_transparent) or len(call.origins_out) > 1:
            continue
        behind = call.origins_out[0]
        readers = [other for other in ordered[number + 1 :] if behind in other.origins_in]
        taking = [o for c in readers if not c.is_transparent for o in c.origins_in if o is behind]
        if behind is None or behind not in produced or not taking:
            continue
        if len(taking) > 1:
            if all(rule.is_jacobian for rule in rules):  # of the identity: it may be passed over
                continue
            raise ValueError(
                f"{call!r} returns the entries of its input, which several modules read, so that "
                "it is not known what arrives at its rule. Make the extension before the forward "
                "pass."
            )
        mark = call.set_apart()
        produced.add(mark)
        for other in readers:
            other.read_instead(behind, mark)


class Plan:
    """Reached calls in the order of the forward pass, with the edges between them.

    Attributes:
        everything: All reached calls.
        users: Calls whose parameters matter.
        calls: Calls whose derivatives are needed: no containers, nothing that only reshapes.
        uses: For each parameter the calls that use it, with its name there.
        losses: The calls that are losses.
        producers: Who computed the tensor of an origin.
        going_on: Calls that have an input which another one has computed.
        after_loss: The losses themselves, and modules that combine their values.
        parts: Calls inside of others that have a rule, if some have parameters.
        base: Number of samples; the number of rows of every call is a multiple. 0 if there is none.
        mixing: Whether a module mixes the samples of the batch.
        size: Number of entries of all parameters that are used.
        bytes: Bytes of them.
    """

    def __init__(self, calls: Iterable[Visit], users: Iterable[Visit] | None = None):
        """Order the calls and connect them; the parameters of ``users`` matter, of all if None."""
        self.everything = sorted(calls, key=attrgetter("index"))
        self.calls = [c for c in self.everything if not (c.is_container or c.is_transparent)]
        self.uses: dict[Parameter, list[tuple[Visit, str]]] = {}
        self.users = self.everything if users is None else list(users)
        for call in self.users:
            for name, p in call.trained.items():
                self.uses.setdefault(p, []).append((call, name))
        self.losses: list[Visit] = []
        self.producers: dict[Origin | None, Producer] = {}
        self.parts: Collection[Visit] = ()
        self.mixing = has_parts = False
        self.bytes = self.size = 0
        for call in self.calls:
            if call.is_loss:
                self.losses.append(call)
            if call.couples_samples:
                self.mixing = True
            for slot, origin in enumerate(call.origins_out):
                if origin is not None:
                    is_made_again = origin in self.producers and origin not in call.origins_in
                    has_parts = has_parts or is_made_again
                    self.producers[origin] = Producer(call, slot)
        if has_parts:
            self._leave_out_parts()
        if len(self.losses) > 1:
            self._leave_out_inner_losses()
        self.going_on: set[Visit] = set()
        self.after_loss = set(self.losses)
        for call in self.calls:
            for o in filter(self.producers.__contains__, call.origins_in):
                self.going_on.add(call)
                if self.producers[o].call in self.after_loss:
                    self.after_loss.add(call)
        for p in self.uses:
            self.size += p.numel()
            self.bytes += p.nbytes
        self.base = self._base()
        for call in self.calls:
            if call.is_unbatched:
                call.copies = self.base or 1
        self.read_by_functions: dict[Tensor, Visit] = {}  # see find_gap
        self._passages: dict[tuple[int, ...] | None, list[Passage]] = {}
        compute_in_one_precision(self.calls)

    def _leave_out_parts(self) -> None:
        """Leave out what calls with a rule have run inside: the rule has their derivatives, too.

        What returns the output of a later call is a part of that, and what parts alone read. If
        parts have parameters, all stay, for :meth:`find_unreached` to tell.
        """
        # who has returned a tensor last, but for those that have read it
        made = {o: c for c in self.calls for o in c.origins_out if o not in c.origins_in}
        parts: set[Visit] = set()
        others: set[Origin | None] = set()  # what is read by calls that are no parts
        inside: set[Origin | None] = set()
        for call in reversed(self.calls):
            known = set(call.origins_out) - {None, *call.origins_in}
            is_made_later = known and all(made[o] is not call for o in known)
            if is_made_later or (not known.isdisjoint(inside) and known.isdisjoint(others)):
                parts.add(call)
                inside.update(call.origins_in)
            else:
                others.update(call.origins_in)
        if any(call.trained for call in parts):
            self.parts = parts
            return
        self.calls = [call for call in self.calls if call not in parts]
        self.losses = [call for call in self.losses if call not in parts]
        self.mixing = any(call.couples_samples for call in self.calls)
        self.producers = {o: p for o, p in self.producers.items() if p.call not in parts}

    def _leave_out_inner_losses(self) -> None:
        """Take losses of each sample whose values the network goes on with for functions."""
        above: dict[Visit, None] = {}
        waiting = [*self.losses]
        for call in waiting:
            found = (self.producers.get(origin) for origin in call.origins_in)
            new = {p.call: None for p in found if p is not None and p.call not in above}
            above |= new
            waiting += new
        inner = [call for call in self.losses if call in above and call.shape_out[0]]
        for call in inner:
            call.become_function()
        self.losses = [call for call in self.losses if call not in inner]

    @lazy
    def predictions(self) -> dict[Visit, tuple[int, ...]]:
        """For each loss the numbers of the inputs that are predictions."""
        return {loss: loss.derivatives.predictions(context_of(loss)) for loss in self.losses}

    def column_bytes(self) -> int | None:
        """Return the bytes of the largest column; None if rows merge, and columns split."""
        if not all(map(attrgetter("rows_are_samples"), self.calls)):
            return None
        shapes = [s for call in self.calls for s in (*call.shape_in, *call.shape_out) if s]
        return max(map(prod, shapes)) * max([c.outputs[0].element_size() for c in self.calls])

    def _base(self) -> int:
        """Return the number of samples."""
        found = [self.num_samples(call) for call in self.calls if not call.is_unbatched]
        samples = [count for count in found if count]
        base = gcd(*samples)
        # without a common batch, there are neither slices of samples nor subsampling
        return base if base == min(samples, default=0) else 0

    @lazy
    def read(self) -> KeptParameters:
        """State of the parameters and buffers that the calls have read, as it is now."""
        kept = KeptParameters(copies=False)
        for call in self.calls:
            # a module that mixes samples changes its buffers (running statistics) and reads none
            kept.add(
                t
                for tensors in (call.params, *call.read)
                for t in tensors.values()
                if t is not None and (isinstance(t, Parameter) or not call.couples_samples)
            )
        return kept

    def check_one_batch(self, p: Parameter) -> None:
        """Refuse per-sample quantities of a parameter that is used on batches of different sizes.

        Uses on one batch may have different numbers of rows (positions). Batches are told apart by
        whether a path of modules connects the uses.
        """
        if len(self.uses[p]) == 1:
            return
        sizes = {self.samples_of[call] for call, _ in self.uses[p]}
        if len(sizes) > 1:
            self._refuse_sizes("A parameter", map(repr, (call for call, _ in self.uses[p])))

    def check_one_batch_for_all(self, what: str | Visit) -> None:
        """Refuse ``what``, or a call without samples, where batches have several sizes."""
        sizes = {size: call for call, size in self.samples_of.items() if size}
        if len(sizes) > 1:
            name = what if isinstance(what, str) else f"{what!r} has no samples, and"
            self._refuse_sizes(name, (f"{size} at {sizes[size]!r}" for size in sorted(sizes)))

    def _refuse_sizes(self, what: str, uses: Iterable[str]) -> None:
        """Say that something is used on batches of several sizes, and what to do."""
        advice = "Use one backward pass for each batch."
        if not any(is_converted(call.module) for call in self.calls):
            advice = (
                "If functions merge other axes with that of the samples, use extend(model, "
                "use_converter=True), which follows the samples; else one backward pass for each "
                "batch."
            )
        raise ValueError(
            f"{what} is used on batches of different sizes ({', '.join(uses)}): samples of one "
            f"have no partner in the other. {advice}"
        )

    @lazy
    def samples_of(self) -> dict[Visit, int]:
        """Number of samples of the connected part of the network that a call is in."""
        parts = {call: [call] for call in self.everything}
        alone = self.after_loss - set(self.losses)
        for call in self.everything:
            for origin in () if call in alone else call.origins_in:
                producer = self.producers.get(origin)
                if producer is not None and parts[producer.call] is not parts[call]:
                    fewer, more = sorted((parts[producer.call], parts[call]), key=len)
                    more += fewer
                    parts |= dict.fromkeys(fewer, more)
        samples = {
            id(part): gcd(*[self.num_samples(call) for call in part if not call.is_unbatched])
            for part in {id(part): part for part in parts.values()}.values()
        }
        return {call: samples[id(part)] for call, part in parts.items()}

    def snapshot(self, create_graph: bool) -> Plan:
        """Return a copy whose calls outlive the backward pass."""
        return Plan(call.snapshot(create_graph) for call in self.calls)

    @staticmethod
    def num_rows(call: Visit) -> int:
        """Number of rows along the batch axis of a call, 0 if it has none."""
        if call.is_unbatched:
            return call.copies
        shape = call.shape_in[0] if call.is_loss else call.shape_out[0]
        if shape and call.rows_are_samples:
            return shape[0]
        place = call.place_in(0) if call.is_loss else call.place_out(0)
        if call.is_loss and place is None and shape:  # the prediction is data
            return shape[0]
        return place.rows(shape) if shape and place is not None else 0

    @classmethod
    def num_samples(cls, call: Visit) -> int:
        """Number of samples of a call, 0 if it has none; each may have several rows."""
        rows = cls.num_rows(call)
        if call.is_unbatched or call.rows_are_samples or not rows:
            return rows
        place = call.place_in(0) if call.is_loss else call.place_out(0)
        return rows if place is None else place.samples

    def rows(self, call: Visit, samples: Rows) -> Rows:
        """Translate a selection of samples to one of the call's rows."""
        if samples is None:
            return None
        ratio = self.num_rows(call) // self.base
        if ratio == 1:
            return samples
        if isinstance(samples, slice):
            start, stop, _ = samples.indices(self.base)
            return slice(start * ratio, stop * ratio)
        return [n * ratio + i for n in samples for i in range(ratio)]

    def shape(self, producer: Producer, samples: Rows) -> Sequence[int]:
        """Canonical shape of a call's output for a selection of samples."""
        call, slot = producer
        if samples is None and call.rows_are_samples:
            return call.shape_out[slot]
        total = self.num_rows(call)
        count = len(row_numbers(total, self.rows(call, samples)))
        if slot and total:  # samples may have other numbers of rows than in the first output
            place = call.place_out(slot)
            count = count if place is None else count * place.rows(call.shape_out[slot]) // total
        return shape_out(call, slot, count)

    def device(self, origin: Origin) -> torch.device:
        """Return where a tensor is that a call has computed."""
        call, slot = self.producers[origin]
        return call.outputs[slot].device

    def passages(self, samples: Sequence[int] | None) -> list[Passage]:
        """List the calls with what does not depend on the vectors that pass through them."""
        key = None if samples is None else tuple(samples)
        if key not in self._passages:
            self._passages[key] = [self._passage(call, samples) for call in self.calls]
        return self._passages[key]

    def _passage(self, call: Visit, samples: Rows) -> Passage:
        rows, total = self.rows(call, samples), self.num_rows(call)
        count = len(row_numbers(total, rows))
        feeds = []
        for i, origin in enumerate(call.origins_in):
            producer = None if origin is None else self.producers.get(origin)
            whole = call.shape_in[i]
            if origin is None or producer is None or whole is None:
                continue
            place = call.place_in(i)
            # a function may have more rows than its input
            own = count if place is None or not whole else count * place.rows(whole) // total
            shape, there = shape_in(call, i, own), self.shape(producer, samples)
            gathered = producer.call.is_unbatched
            feeds.append(Feed(i, origin, shape, there, place is None, gathered))
        return Passage(call, rows, feeds)

    def check_subsampling(self, subsampling: Sequence[int], exts: Sequence[Extension]) -> None:
        """Refuse indices that are not samples of the batch."""
        if not self.calls:
            return
        savefields = ", ".join(ext.savefield for ext in exts)
        self.check_one_batch_for_all(f"{savefields}: subsampling")
        if not self.base:
            raise ValueError(f"{savefields}: subsampling needs one batch axis in all modules.")
        try:
            subsample(torch.empty(self.base), 0, subsampling)
        except ValueError as error:
            raise ValueError(f"{savefields}: {error}") from error

    def find_gap(self) -> str | None:
        """Describe the first break: a reached call feeds another through what is not a module.

        Notes what functions read that no call has returned, and which call reads their results.
        """
        is_reached = self.producers.__contains__
        for loss in self.losses:
            for i, (x, origin) in enumerate(zip(loss.inputs, loss.origins_in, strict=True)):
                if i in self.predictions[loss]:
                    continue
                if is_reached(origin) or (origin and upstream(x, is_reached)[0]):
                    return (
                        f"input {i} of {loss!r}, no prediction but a target (or a variance), "
                        "depends on the output of a module, but the curvature is that with "
                        "respect to the prediction alone. Let the prediction come first, and use "
                        "detach() if the target is meant to be constant. If both are predictions, "
                        "call the function in the forward of a loss module of your own: all that "
                        "the network computes of its inputs are predictions."
                    )
        consumers = [c for c in self.calls if c in self.losses or c not in self.after_loss]
        for consumer in reversed(consumers):
            read = []  # what functions have computed: inputs, and parameters for functional_call
            for x, origin in zip(consumer.inputs, consumer.origins_in, strict=True):
                if not isinstance(x, Tensor) or is_reached(origin):
                    continue
                if x.requires_grad and parameter_behind(x) is not None:
                    return READS_PARAMETER.format(consumer)
                if origin is not None and (not origin.is_output or origin.by_container):
                    read.append(x)  # else of a call that no gradient has reached
            read += filter(attrgetter("grad_fn"), consumer.trained.values())
            for x in read:
                above, leaves = upstream(x, is_reached)
                for leaf in leaves:
                    if isinstance(leaf, Parameter) and leaf in self.uses:
                        call, name = self.uses[leaf][0]
                        return (
                            f"the parameter '{name}' of {call!r} is also used by a function (or a "
                            f"module that was not extended) whose result {consumer!r} reads. "
                            f"{self.advice(consumer)}"
                        )
                self.read_by_functions |= dict.fromkeys(leaves, consumer)
                if above:
                    producer = max((self.producers[o].call for o in above), key=lambda c: c.index)
                    return (
                        f"the output of {producer!r} reaches {consumer!r} through an operation "
                        "that is not a module (a function such as torch.add or F.relu, an in-place "
                        "change, or a module that was not extended): "
                        f"{', '.join(self._nodes_above(x))}. {self.advice(consumer)}"
                    )
        return None

    def advice(self, consumer: Visit) -> str:
        """Say what to do about a function whose result a call reads."""
        as_module = "make it a module, which is called in its place (see backpack.custom_module)"
        if not any(is_converted(call.module) for call in self.calls):
            return (
                "If it is in the forward of the model, use extend(model, use_converter=True); "
                f"else move it there, or {as_module}."
            )
        if not is_converted(consumer.module):
            return (
                "If it is outside of the model whose functions use_converter=True has found, move "
                f"it into its forward, as functions of torch, or {as_module}. {UNSEEN}"
            )
        return (
            "The converter has not seen it: call the model that extend() has returned, or "
            f"{as_module}. {UNSEEN} If it is torch.utils.checkpoint, use use_reentrant=False."
        )

    def _nodes_above(self, x: Tensor) -> list[str]:
        """Name the first nodes of the autograd graph between a tensor and the reached calls."""

        def is_reached(node: Any) -> bool:
            marks = list(node.metadata.values())
            return any(isinstance(m, Origin) and m in self.producers for m in marks)

        between = nodes_above([x.grad_fn], until=is_reached)
        names = dict.fromkeys(n.name() for n in between if type(n).__name__ not in RESHAPES)
        return [*names][:3]

    def _rule_around(self, call: Visit) -> Visit | None:
        """Find the call of a module with a rule that has made a call of one of its children."""
        for outer in self.calls:
            is_later = outer.index > call.index and outer.called is not call.called
            if is_later and any(call.called is part for part in outer.called.modules()):
                return outer
        return None

    def find_unreached(self) -> Visit | None:
        """Find the last call whose output does not enter the prediction of a loss."""
        fed: set[Origin | None] = set()
        for call in reversed(self.calls):
            if call in self.losses:
                fed.update(map(call.origins_in.__getitem__, self.predictions[call]))
            elif call not in self.after_loss:
                if call in self.parts or not fed.intersection(call.origins_out):
                    return call
                fed.update(call.origins_in)
            fed.discard(None)
        return None

    def why_unreached(self, call: Visit) -> str:
        """Explain why nothing arrived at a call that the gradient has reached."""
        if not self.losses:
            return (
                f"the output of {call!r} does not end in a supported loss. Second-order quantities "
                "need a scalar loss that is the output of an extended loss module, such as "
                "torch.nn.MSELoss, CrossEntropyLoss or BCEWithLogitsLoss. Call extend() on the "
                "loss, and use that module in place of a function such as F.cross_entropy; if the "
                "model computes its loss, use extend(model, use_converter=True)."
            )
        around = self._rule_around(call)
        if around is not None:
            name = type(around.derivatives).__name__
            return (
                f"{call!r} is a part of {around!r}, for which there is a rule: {name}. Write "
                f"`includes_children = True` in {name}, and name the parameters of children in its "
                "`params`, as 'child.weight'."
            )
        penalty = (
            " It has no samples: add a penalty outside of the model, or leave it to the optimiser "
            "(weight_decay)."
        )
        of_view = (
            " If a view of it was changed in place, as by a module with inplace=True behind a "
            "transpose: use extend(model, use_converter='record'), or write that out of place."
        )
        changes = any(getattr(one.module, "inplace", False) for one in self.everything)
        return (
            f"the output of {call!r} influences what backward() was called on, but not through "
            f"the extended loss {', '.join(repr(loss) for loss in self.losses)}."
            + (penalty if call.is_unbatched else of_view if changes else "")
        )

"""Which parameters a backward pass gives a gradient: by autograd, or in its place."""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.context import Configuration
from backpack.core.engine import call_products, elided_gradients
from backpack.core.engine.combining import Combining
from backpack.core.engine.intercept import Entry
from backpack.core.engine.results import has_other_gradient, note_pass
from backpack.core.record import shards
from backpack.core.record.context import context_of
from backpack.core.record.visits import Visit

_BELONGS = attrgetter("belongs_to_gradient")


class Trained:
    """The parameters that a backward pass gives a gradient."""

    _restricted = True  # whether autograd tells which parameters it accumulates into

    def __init__(
        self,
        configuration: Configuration,
        entry: Entry | None,
        combining: Combining,
        untrained: set[Parameter],
    ) -> None:
        """No call was reached; parameters without a gradient will be noted as ``untrained``."""
        self._entry, self._combining, self._untrained = entry, combining, untrained
        self._wants_gradients = configuration.gradients
        self._notes_accumulation = any(map(_BELONGS, configuration.first_order))
        self.owed: set[Parameter] = set()  # this pass accumulates theirs, in autograd's place
        self.gradients: dict[Parameter, Tensor] = {}  # of these, until they are accumulated
        # where results belong to p.grad: whether that had entries other than 0 before, or lacks
        # passes that results which go on have added up
        self.accumulated: dict[Parameter, Tensor | bool] = {}

    def find(self, call: Visit) -> None:
        """Note which parameters of a call are trained, and what their gradients were before."""
        with torch.enable_grad():
            call.trained = {}
            for name, p in call.params.items():
                if self._is_trained(p):
                    call.trained[name] = p
            own: Collection[Parameter] = call.trained.values()
            if shards.KNOWN:
                own = list(map(shards.home, own))
            # to which the pass at hand adds later
            added = {p: p.grad for p in own if p.is_leaf and p.grad is not None}
            if self._combining.accumulates:
                going_on = {p for p in own if p.is_leaf and self._combining.continues(p)}
                self._note_going_on(going_on)
                added = {p: grad for p, grad in added.items() if p not in going_on}
            if added:
                note_pass(added)
            if self._notes_accumulation:
                for p, grad in added.items():
                    self.accumulated.setdefault(p, grad.any())
        if len(call.trained) < len(call.params):
            left_out = [p for name, p in call.params.items() if name not in call.trained]
            self._untrained.update(map(shards.home, left_out))

    def _note_going_on(self, parameters: Collection[Parameter]) -> None:
        """Note whether gradients contain the earlier passes that results of parameters do."""
        note_pass(parameters, is_first=False)
        for p in parameters:
            if any(has_other_gradient(p, ext.savefield) for ext in self._combining.exts):
                self.accumulated[p] = True

    def _is_trained(self, p: Parameter) -> bool:
        """Whether ``p`` gets a gradient, from autograd (see ``backward(inputs=)``) or from here."""
        if not p.requires_grad:
            return False
        if not self._restricted:
            return True
        view: Any = p.view_as(p).grad_fn  # in grad mode
        try:
            if torch._C._will_engine_execute_node(view.next_functions[0][0]):
                return True
        except RuntimeError:  # torch.autograd.grad does not say
            self._restricted = False
            self._combining.average_nothing()
            return True
        if self._entry is not None and p in self._entry.elided:
            if not self._wants_gradients:  # nobody wants it
                return True
            self.owed.add(p)
        return p in self.owed

    def accumulate(self, call: Visit) -> None:
        """Accumulate the gradients that autograd leaves out."""
        for name, p in call.trained.items():
            if p not in self.owed:
                continue
            if p not in self.gradients:  # no extension has found it on the way
                mats = [None if g is None else g.unsqueeze(0) for g in call.gradients()]
                product = call_products.param(context_of(call), "param_vjp_sum", name, mats)
                self.gradients[p] = product.squeeze(0)
            elided_gradients.accumulate(p, self.gradients.pop(p))
            self.owed.discard(p)
            if self._entry is not None:
                self._entry.elided.discard(p)

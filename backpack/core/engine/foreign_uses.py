"""Parameters of extended modules that functions read as well: their part is in no quantity."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from backpack.context import CTX
from backpack.core.engine import checks
from backpack.core.engine.extracted import fail, names_of
from backpack.core.engine.paths import HiddenGradients
from backpack.core.record.alive import all_live_calls, is_used
from backpack.core.record.given import Given
from backpack.core.record.placed_call import UNSEEN
from backpack.core.record.registry import derivatives_of
from backpack.core.record.visits import Visit
from backpack.core.types import Extension
from backpack.custom_module.function_module import FunctionModule
from backpack.utils.warning import warn

HIDDEN = (
    "parameters of shapes {} have no result, or that of a part of their uses: a backward pass "
    "inside of a function has computed gradients of theirs, where no module that was called has "
    "them. If that is torch.utils.checkpoint, use it with use_reentrant=False."
)


@dataclass
class ForeignUses:
    """What functions read of the parameters of one backward pass."""

    exts: Sequence[Extension]  # of first order
    given: Collection[Given]  # the models that were called
    hidden: HiddenGradients  # has parameters whose gradients change inside of functions of Python
    trained: list[Mapping[str, Parameter]] = field(default_factory=list)  # of visited calls
    told: list[Parameter] = field(default_factory=list)  # of containers, which tell of them
    # what functions above a call read that is not told yet, and whether it is told in any case:
    # not as a parameter of a layer alone
    waiting: list[tuple[Visit, Tensor, bool]] = field(default_factory=list)

    def note(self, call: Visit, leaves: Sequence[Tensor], is_told: bool) -> None:
        """Note what functions above a call read.

        What a call that is not recorded reads is told by itself.
        """
        for leaf in leaves:
            reached = any(leaf is p for params in self.trained for p in params.values())
            is_certain = reached or is_used(leaf)
            if is_certain or not is_told:
                self.waiting.append((call, leaf, is_certain))

    def watch(self, functions: Sequence[Any]) -> None:
        """Find parameters whose gradients change while functions of Python compute their own."""
        self.hidden.watch(functions, [*self._modules()])

    def is_of_layer(self, parameter: Tensor) -> bool:
        """Whether a module of a model, called or not, has a parameter, of which no container tells.

        One that was called tells of its own, but one that was converted has quantities for them.
        """
        told = (
            p
            for call in all_live_calls()
            if call.is_container and "_backpack_converted" not in vars(call.called)
            for p in call.params.values()
        )
        return not any(parameter is p for p in chain(self.told, told)) and any(
            parameter is p for module in self._modules() for p in module._parameters.values()
        )

    def _modules(self) -> Iterator[Module]:
        models = (given.module.modules() for given in self.given)
        return chain(CTX.extended(), *models)

    def tell(self) -> None:
        """Refuse parameters of extended models that functions use as well."""
        shapes: dict[Visit, list[str]] = {}
        for call, leaf, is_certain in self.waiting:
            if is_certain or self.is_of_layer(leaf):
                shapes.setdefault(call, []).append(str(list(leaf.shape)))
        for call, of_leaves in shapes.items():
            what = f"a parameter of shape {of_leaves[0]} that belongs to an extended module is"
            if len(of_leaves) > 1:
                names = checks.listed(of_leaves)
                what = f"parameters of shapes {names} that belong to extended modules are"
            # of a model whose functions are recorded already
            advice = UNSEEN if isinstance(call.module, FunctionModule) else checks.CONVERT
            fail(
                self.exts,
                f"{what} also used by a function (or a module that was not extended) whose result "
                f"{call!r} reads. That use is not counted. {advice} Extend layers that are new.",
            )
        self.waiting.clear()

    def tell_hidden(self, inside: Collection[Parameter]) -> None:
        """Tell of parameters with gradients of a pass inside, whose modules that has not used."""
        shapes = [str(list(p.shape)) for p in self.hidden.found if p not in inside]
        if shapes:
            fail(self.exts, HIDDEN.format(checks.listed(shapes)))

    def tell_penalties(self, leaves: Mapping[Tensor, str]) -> None:
        """Warn of penalties: parameters of the models that functions beside the modules read."""
        own = {p for params in self.trained for p in params.values()}
        if not own.issuperset(leaves):  # some may belong to containers, such as weights of tasks
            containers = [m for m in CTX.extended() if derivatives_of(m) is None]
            own.update(p for m in containers for p in m._parameters.values() if p is not None)
        shapes = [f"{list(p.shape)} ({name})" for p, name in leaves.items() if p in own]
        if shapes:
            warn(
                f"{names_of(self.exts)}: functions beside the extended modules read parameters of "
                f"these, of shapes {checks.listed(shapes)}, as a penalty does. Their part of "
                "p.grad is in no quantity. Leave a penalty to the optimiser (weight_decay), or add "
                "its part by hand; a function of samples belongs into a module, or use "
                "extend(model, use_converter=True). If the loss reads derivatives of the network "
                f"(create_graph=True), {checks.DERIVATIVES}",
            )

"""Mistakes that are checked for before anything is computed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Sequence
from itertools import combinations, islice
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import distributed
from torch.nn import Module

from backpack.context import CTX, OUTSIDE, Configuration, Scope
from backpack.core.engine.combining import are_several
from backpack.core.engine.extracted import REDUCTIONS, UNSLICED, named, names_of
from backpack.core.engine.propagations import Blocks, InputsAlone
from backpack.core.record import alive, calls, weights
from backpack.core.types import Extension
from backpack.utils.warning import warn

# Names of all that can be extracted of a parameter.
EXTRACTED = frozenset(REDUCTIONS) | Blocks.offers | InputsAlone.offers | UNSLICED
# How many names a message lists.
MOST_NAMES = 8
EXTEND_FIRST = (
    "Call extend() on the model (second-order extensions need it for the loss, too) before the "
    "forward pass, and use what it returns; with use_converter=True if functions read parameters "
    "of modules that are not called. What torch.compile(fullgraph=True) compiles is not recorded."
)
DERIVATIVES = (
    "let a module without children, which has the parameters itself, compute the network and these "
    "derivatives (if that is the whole model, extend it without a converter). GGN, Hessian and "
    "Jacobian of backpack.linalg take such models."
)
CONVERT = (
    "Use extend(model, use_converter=True), which follows functions of the forward pass, but no "
    "derivatives that are computed there (torch.autograd.grad with create_graph=True, torch.func): "
    f"{DERIVATIVES}"
)
NO_SHARDS = (
    "The parameters of {} are sharded by FullyShardedDataParallel: results would be saved at "
    "tensors that stand for them while the module runs, and be lost. Use "
    "torch.distributed.fsdp.fully_shard instead, or torch.nn.parallel.DistributedDataParallel."
)


# Modules that were called just before contexts in which backward passes came to recorded calls.
_followed: WeakSet[Module] = WeakSet()


def check_extensions(exts: Sequence[Extension]) -> None:
    """Refuse extensions that cannot work, and those that cannot work together."""
    programs: list[Any] = []
    for ext in exts:
        if ext.program is not None and ext.program not in programs:
            programs.append(ext.program)
        needs = ext.needs
        if not EXTRACTED.issuperset(needs):
            unknown = [name for name in needs if name not in EXTRACTED]
            raise ValueError(
                f"{type(ext).__name__} needs {', '.join(unknown)}, which cannot be extracted. The "
                f"names are {named(EXTRACTED)}."
            )
        if len(needs) > 1 and not ext.overrides_extract:
            raise NotImplementedError(
                f"{type(ext).__name__} needs {', '.join(needs)}: write a method 'extract(self, "
                "products)' that makes one value of them. Else the first alone would be saved."
            )
    if len(programs) > 1:
        raise ValueError(
            "Two private optimisers have extensions in one context: one of them alone would see "
            "whether functions mix samples. Use one optimiser for all parameters, in groups if "
            "their options differ (per=... clips them apart), or for each optimiser a context "
            "and a backward pass of its own."
        )
    if len(exts) < 2 or len({ext.savefield for ext in exts}) == len(exts):
        return
    for one, other in combinations(exts, 2):
        if one.savefield == other.savefield and not _are_equal(one, other):
            raise ValueError(
                f"{type(one).__name__} and {type(other).__name__} have one savefield, "
                f"{one.savefield!r}: one would overwrite the results of the other. Use two "
                "contexts, or set the savefield of one (ext.savefield = ...)."
            )


def _are_equal(one: Extension, other: Extension) -> bool:
    """Whether two extensions compute the same."""
    if one is other or type(one) is not type(other):
        return one is other
    ignored = {"saved_quantities", "looks_at_loss", "tells_order"}
    names = (vars(one).keys() | vars(other).keys()) - ignored
    pairs = [(vars(one).get(name), vars(other).get(name)) for name in names]
    try:
        return all(a is b or bool(a == b) for a, b in pairs)
    except (RuntimeError, ValueError):  # tensors or arrays with several entries: others
        return False


def note_passes(inner: Configuration, outer: Configuration) -> None:
    """Count the backward passes of a context for the one around it, whose extensions they hid."""
    passes = inner.passes.own + inner.passes.hidden
    if not (passes and outer.exts):
        return
    if outer.savefields <= inner.savefields:
        outer.passes.own += passes
    else:
        outer.passes.hidden += passes


class Left(NamedTuple):
    """A context that was left without any backward pass."""

    start: int  # where it was entered, in the order of the calls
    end: int  # where it was left
    names: str  # of its extensions


# The latest ones.
left: deque[Left] = deque(maxlen=8)


def is_suspicious(scope: Scope) -> bool:
    """Whether backward passes may come to no recorded call in a context that is entered.

    To watch for them costs a short step some percent, so a context in which all was well stays so
    as long as the same module is the last that was called before it is entered.
    """
    return scope.latest is None or scope.latest not in _followed


def note_latest(configuration: Configuration) -> None:
    """Note if backward passes of a context that is left came to recorded calls."""
    scope = configuration.scope
    alive.note_end_of_context()
    if scope is None or scope.latest is None or not configuration.exts:
        return
    if not configuration.passes.own:
        _followed.discard(scope.latest)
    elif scope.interceptor is not None:
        _followed.add(scope.latest)
    scope.latest = None


def warn_of_nothing(configuration: Configuration) -> None:
    """Say why the extensions of a context that is left have not run, if backward passes have."""
    passes = configuration.passes
    if not configuration.exts or passes.own or passes.told:
        return
    names = names_of(configuration.exts)
    if passes.hidden:
        warn(
            f"The extensions of backpack({names}) have not run: each backward() inside was also "
            "inside of another context, and the innermost one alone is active. Give all "
            "extensions to one context: `with backpack(A(), B()):`.",
        )
    elif passes.missed:
        warn(
            f"backward() inside of `with backpack({names}):` reached no extended module, so "
            f"nothing was computed. {EXTEND_FIRST}",
        )
    elif configuration.scope is not None and configuration.scope.seen_elsewhere != OUTSIDE.task:
        warn(
            f"The extensions of backpack({names}) have not run: no backward() was called in this "
            "thread (or task of asyncio) inside of the context, but in another one, through "
            "extended modules. A context is active where it is entered alone: enter it in the "
            "function that the thread runs.",
        )
    elif configuration.scope is not None:
        left.append(Left(configuration.scope.start, next(weights.COUNTER), names))


def tell_if_left(call: calls.Call) -> None:
    """Warn that a backward pass outside of contexts comes to a call inside of one without any."""
    for context in [*left]:
        if context.start < call.index < context.end:
            left.remove(context)
            warn(
                f"The extensions of backpack({context.names}) have not run: the forward pass was "
                f"inside of `with backpack({context.names}):`, but backward() comes behind it. "
                "Call backward() inside; the forward pass may be before.",
            )


def listed(names: Collection[str]) -> str:
    """Put names into one line, the first of them if there are many."""
    more = len(names) - MOST_NAMES
    return ", ".join(islice(names, MOST_NAMES)) + (f" and {more} others" if more > 0 else "")


def sharded_modules() -> set[Module]:
    """Find the modules that are inside of a ``FullyShardedDataParallel``."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not (distributed.is_available() and distributed.is_initialized()):
        return set()
    kind = fsdp.FullyShardedDataParallel
    roots = [module for module in CTX.extended() if isinstance(module, kind)]
    return {module for root in roots for module in root.modules()}


def check_one_process(what: str, advice: str = "Run it in one process.") -> None:
    """Refuse to run on several processes ``what`` would be different on each, with an advice."""
    if are_several():
        raise NotImplementedError(
            f"{what} does not work on several processes yet ({distributed.get_world_size()} of "
            "torch.distributed are running): each would see its own part of the batch alone, so "
            f"results (and weights) would drift apart. {advice}"
        )

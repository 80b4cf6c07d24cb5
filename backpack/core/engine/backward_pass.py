"""One backward pass: which calls it reaches, and what the active extensions make of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import filterfalse, groupby
from operator import attrgetter
from threading import get_ident
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from backpack.context import (
    DEFAULT,
    OUTSIDE,
    STATE,
    Configuration,
    State,
    active,
    configure,
    state_of_caller,
    without_autocast,
)
from backpack.core import memory
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.engine import call_products, checks, elided_gradients, results
from backpack.core.engine.changed_gradients import CHANGED, look_around_hooks
from backpack.core.engine.combining import NO_GRAPH, Combining
from backpack.core.engine.factored import FactoredGrad
from backpack.core.engine.factors import Factor
from backpack.core.engine.intercept import Entry
from backpack.core.engine.modified_losses import check_losses
from backpack.core.engine.plan import Plan, set_apart
from backpack.core.engine.products import Use, extract
from backpack.core.engine.propagations import UserRules
from backpack.core.engine.read_back import ReadBack
from backpack.core.engine.results import Writer
from backpack.core.engine.sample_flow import SampleFlow
from backpack.core.engine.separate_samples import separate_samples
from backpack.core.engine.user_rules import call_gradients, sample_counts
from backpack.core.record import alive, calls, shards, visits, weights
from backpack.core.record.calls import Call
from backpack.core.record.context import context_of
from backpack.core.record.given import Given
from backpack.core.record.kept_parameters import ParametersBefore
from backpack.core.record.module_state import describe, placeholder
from backpack.core.record.origins import WRAPPERS, has_parameters
from backpack.core.record.tape import calls_above
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows
from backpack.core.types import Extension
from backpack.utils.subsampling import subsample
from backpack.utils.warning import warn

# A parameter, its uses (calls, and its names there), and the extensions that want something of it.
Work = tuple[Parameter, list[tuple[Visit, str]], list[Extension]]

NESTED = (
    "modules were reached by a backward pass inside of another one, in which there is no loss. If "
    "that is torch.utils.checkpoint, use it with use_reentrant=False."
)

IN_PARTS = (
    "{} uses a parameter of shape {} that is used by another backward pass, too, inside of which "
    "(or around which) this one runs: results would be those of a part of its uses. If that is "
    "torch.utils.checkpoint, use it with use_reentrant=False."
)

NESTED_IN_THREADS = (
    "A backward pass runs inside of others that several threads have started on one device: whose "
    "context it belongs to is not known. If it is that of torch.utils.checkpoint, use "
    "use_reentrant=False."
)


NOT_LEFT_ALONE = (
    "gradients=False: a backward pass inside of another one, or in a thread that has taken "
    "over the context, would accumulate into p.grad. If it is that of torch.utils.checkpoint, use "
    "use_reentrant=False; else enter the context where backward() is called."
)


_RULES = attrgetter("rules")


class BackwardPass:
    """Collects the calls that one ``backward()`` reaches, and runs the extensions on them.

    First-order extensions run at once, with the gradient at hand, unless a parameter may be used
    elsewhere too. Everything else runs when the backward pass is over.
    """

    # Hooks of nodes know autograd's number of a pass alone, in whatever thread they run; a pass is
    # taken out when it ends, also by an error of somebody else (``_Ending``).
    _running: ClassVar[dict[int, BackwardPass]] = {}

    # what it finds out as it goes on
    has_copies: bool | None = None  # whether a tensor has no samples, once that is asked
    restricted = True  # whether autograd tells which parameters it accumulates into
    copied: shards.copied | None = None  # whole parameters that deferred calls read
    first: Any = None  # the node of the first call
    has_parameters = False  # whether one had
    error: Exception | None = None  # what others are to be told, before it is raised
    has_run = False
    waits = False  # behind what others have queued

    def __init__(self, configuration: Configuration, entry: Entry | None, is_nested: bool) -> None:
        """Sort the extensions."""
        self.configuration = configuration  # of the thread that has called ``backward()``
        self.entry = entry  # that call, if it was noticed
        self.exts = self.configuration.exts
        self.first_order = self.configuration.first_order
        self.second_order = self.configuration.second_order
        self.wanted: set[str] = set()  # of first order
        self.whole_batch = True  # of first order
        self.has_rules = False  # of modules, for a first-order extension
        self.notes_accumulation = False
        for ext in self.first_order:
            self.wanted.update(ext.needs)
            if ext.rules or not ext.needs:
                self.has_rules = True
            if ext.belongs_to_gradient:
                self.notes_accumulation = True
            if ext.get_subsampling() is not None:
                self.whole_batch = False
        self.reached_calls: dict[Call, Visit] = {}
        self.calls: list[Visit] = []  # those that are not done yet
        self.deferred: list[Visit] = []
        self.changed: dict[str, None] = {}  # what reads tensors whose gradients hooks have changed
        self.looking: list[RemovableHandle] = []  # hooks that find that out
        self.read_back = ReadBack()
        self.unsupported: dict[Visit, str | None] = {}  # why; None if a call is supported
        self.results = Writer(configuration.debug)
        self.threads: set[int] = set()  # in which it has run
        # whether it runs inside of another backward pass of the same context, such as by
        # torch.utils.checkpoint(use_reentrant=True)
        self.is_nested = is_nested
        # whose gradients this pass has to accumulate, in autograd's place
        self.owed: set[Parameter] = set()
        self.gradients: dict[Parameter, Tensor] = {}  # of those, until they are accumulated
        # whether second order reads gradients at outputs again: see _is_read_later
        self.reads_gradients = any(map(_reads_gradients, self.second_order))
        self.sample_flow = SampleFlow(self.first_order, entry)
        self.sharded = checks.sharded_modules()
        self.users = alive.Users()
        # whether there was a gradient before, of parameters whose result belongs to this one
        self.accumulated: dict[Parameter, Tensor] = {}
        self.inside: set[Parameter] = set()  # those that passes inside of this one have used
        nodes = [torch._C._current_autograd_node()] if entry is None else entry.nodes
        self.combining = Combining(configuration, self.results, nodes)
        # what autograd keeps for further backward passes is kept, see _end
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        self.retains = configuration.retain_graph or keeps_graph
        self.start = next(weights.COUNTER)
        self.corrections = alive.corrections
        # code of users sees inputs and outputs of calls
        shows = configuration.extension_hook is not None or any(map(_RULES, self.exts))
        self.before = ParametersBefore(bool(self.second_order), shows)

    # ------------------------------------------------------------------ life cycle

    @classmethod
    def reached(cls, call: Call, slot: int, grad: Tensor | None) -> None:
        """Take note that a backward pass has the gradient of one of a call's outputs."""
        if grad is None:
            return
        task = torch._C._current_graph_task_id()
        current = cls._running.get(task)
        if current is None and (cls._running or OUTSIDE.task != task):
            if _of_transform(grad):  # neither are calls inside of one recorded
                OUTSIDE.task = task
                return
            current = cls._current(task)
            if current is None and checks.left:
                checks.tell_if_left(call)
        if current is not None:
            current._run_or_undo(task, current._reach, call, slot, grad)
        elif grad.numel() >= calls.LARGE and not state_of_caller().disabled:
            call.follow_autograd()

    @classmethod
    def entered(cls, given: Given, grad: Tensor | None) -> None:
        """Take note that a backward pass comes to what a model has returned."""
        if grad is not None and _of_transform(grad):
            return
        current = cls._current(torch._C._current_graph_task_id())
        if current is not None:
            current.sample_flow.enter(given)

    @classmethod
    def _current(cls, task: int) -> BackwardPass | None:
        """Return the backward pass that runs here, which may start now; None if none matters."""
        current = cls._running.get(task)
        if current is not None:
            return current
        state = state_of_caller()
        inactive = not cls._running and state.configuration is DEFAULT.configuration
        if state.disabled:
            return None
        if inactive:
            OUTSIDE.task = task
            return None
        return cls._start(task, state)

    @classmethod
    def _start(cls, task: int, state: State) -> BackwardPass | None:
        """Follow a backward pass, if a context is active where it was called."""
        configuration, entry = active(state.configuration), state.entry
        running = list(cls._running.values())
        outer = [other for other in running if get_ident() in other.threads] if running else []
        if outer and configuration is DEFAULT.configuration and _is_called_from_here():
            # a function of the graph calls backward() in a thread of autograd, which has no context
            if len(outer) > 1:
                raise RuntimeError(NESTED_IN_THREADS)
            configuration = outer[0].configuration
        if not configuration.is_active:
            if configuration.scope is None:
                OUTSIDE.task = task
            return None
        if entry is not None and not entry.is_of(task):
            entry = None  # this pass is inside of the one that it has started
        is_nested = bool(outer) and any(
            other.configuration.scope is configuration.scope for other in outer
        )
        if entry is None and not configuration.gradients:
            raise NotImplementedError(NOT_LEFT_ALONE)
        new = cls(configuration, entry, is_nested)
        current = cls._running.setdefault(task, new)  # threads of several devices may be here
        if current is new:
            torch.autograd.Variable._execution_engine.queue_callback(_Ending(task))
        return current

    @classmethod
    def missed(cls, what: str) -> None:
        """Take note that a backward pass comes through a call that could not be recorded."""
        state = state_of_caller()
        if not state.disabled:
            configuration = active(state.configuration)
            configuration.passes.told = True
            for ext in configuration.exts:
                ext.fail(what)

    @classmethod
    def completed(cls, call: Visit) -> None:
        """Take note that all gradients of a call's outputs are there."""
        task = torch._C._current_graph_task_id()
        current = cls._running.get(task)
        if current is not None:
            current._run_or_undo(task, current._complete, call)

    @classmethod
    def _finish(cls, ending: _Ending) -> None:
        task = ending.task
        current = cls._running[task]
        if current.combining.is_sharded and not current.waits:
            current.waits = True  # until gradients are sharded again
            torch.autograd.Variable._execution_engine.queue_callback(ending)
            return
        if not current.has_run:
            current.has_run = True
            current._run_or_undo(task, current._run)
            if current.error is not None or current.combining.groups:
                # behind what others have queued: then gradients are averaged, whatever comes
                torch.autograd.Variable._execution_engine.queue_callback(ending)
                return
        error, current.error = current.error, None
        current._run_or_undo(task, current._end, error, told=True)
        del cls._running[task]

    @classmethod
    def abandon(cls, task: int) -> None:
        """Forget a backward pass that an error has stopped, and what it wrote."""
        current = cls._running.pop(task, None)
        if current is not None:
            current._undo()

    def _run_or_undo(
        self, task: int, work: Callable[..., None], *arguments: Any, told: bool = False
    ) -> None:
        """Do work; if that fails, undo all, but go on as long as others wait for this process."""
        if self.error is not None:
            return
        self.threads.add(get_ident())
        outer = STATE.get().configuration
        is_elsewhere = outer.scope is not self.configuration.scope  # in a thread of autograd
        try:
            if is_elsewhere:
                configure(self.configuration)
            if torch._C._is_any_autocast_enabled() or forward_ad._current_level >= 0:
                # tangents that tensors have are not those of results
                with without_autocast(), forward_ad._set_fwd_grad_enabled(False):
                    work(*arguments)
            else:
                work(*arguments)
        except BaseException as error:
            self._undo()
            memory.clear()
            if isinstance(error, Exception) and not told and self.combining.stop(error):
                self.error = error
            else:
                BackwardPass._running.pop(task, None)
                raise
        finally:
            if is_elsewhere:
                configure(outer)

    def _undo(self) -> None:
        """Leave no results: those of the pass before would be taken for those of this one."""
        for handle in (*self.looking, *self.read_back.handles):
            handle.remove()
        self.results.undo()
        keeps = self.combining.accumulates or self.is_nested  # those of the pass around this one
        for call in () if keeps else calls_above(self.combining.nodes):
            for p in map(shards.home, call.params.values()):
                for ext in self.exts:
                    if results.is_result(p, ext.savefield):
                        delattr(p, ext.savefield)

    # ------------------------------------------------------------------ during the backward pass

    def _reach(self, call: Call, slot: int, grad: Tensor) -> None:
        """Store the gradient of an output; do what needs no other call."""
        known = self.reached_calls.get(call)
        visit = self._take_up(call) if known is None else known
        if visit.is_unbatched:  # it may become the gradient of a parameter, which others change
            grad = grad.clone()
        visit.g_out[slot] = (
            grad if self.first_order or self._is_read_later(grad) else placeholder(grad)
        )
        if self.first_order:
            if known is None:
                self.sample_flow.visit(visit, self.has_parameters)
        elif self.second_order:
            return
        if len(visit.outputs) == 1 and self._is_independent(visit):
            self._finish_alone(visit)
            if self.second_order and grad.numel() >= calls.LARGE and not self._is_read_later(grad):
                visit.g_out[slot] = placeholder(grad)
        else:
            self.deferred.append(visit)
            if visit.shards and (self.has_rules or visit.reads_parameters(False, is_shown=False)):
                self.copied = self.copied or shards.copied()
                self.copied.add(visit.shards)

    def _take_up(self, call: Call) -> Visit:
        """Check a call that was not reached before, and return what this pass works on."""
        if call.index > self.start:  # such as that of a checkpoint
            self.before.keep(call)
        known = None if self.entry is None else self.entry.visits.pop(call, None)
        only = not self.second_order  # frozen parameters do not matter
        visit = Visit.of(call, only) if known is None else known.checked(only)
        if call in self.before.moved:
            call.refuse_moved()
        if self.sharded and call.called in self.sharded:
            raise NotImplementedError(checks.NO_SHARDS.format(describe(call.module)))
        if call.has_unknown_shards:
            raise NotImplementedError(shards.NO_ROOT.format(describe(call.module)))
        if not self.reached_calls:
            self.configuration.passes.own += 1
            self.first = torch._C._current_autograd_node()
        self.reached_calls[call] = visit
        if call in self.before.read:
            self.before.read[visit] = self.before.read.pop(call)
        if self.is_nested and any(call in other.reached_calls for other in self._others()):
            self.results.is_mute = True  # results are those of the outer pass, which has some
        if visit.params:
            self._find_trained(visit)
            if visit.trained:
                self.combining.note(visit, self.is_nested)
                if self.inside:
                    self._refuse_parts(visit, self.inside)
        if not self.has_parameters:
            self.has_parameters = bool(visit.params) or visit.has_parameters
        if self.second_order:
            if visit.shards:
                self.combining.note_gathering(visit)
            for i, (x, mark) in enumerate(zip(visit.inputs, visit.origins_in, strict=True)):
                if mark is not None and (not mark.is_output or mark.by_container):
                    self.read_back.read(visit, i)
                for t in () if mark is None else (x, x._base):  # of which it is a view
                    node = None if t is None else t.grad_fn
                    if node is not None and (t._backward_hooks or type(node).__name__ in WRAPPERS):
                        self.looking += look_around_hooks(t, repr(visit), self.changed)
        self.calls.append(visit)
        return visit

    def _others(self) -> list[BackwardPass]:
        """List the other backward passes that run."""
        return [other for other in [*self._running.values()] if other is not self]

    def _refuse_parts(self, call: Visit, others: Collection[Parameter]) -> None:
        """Refuse parameters of a call that passes inside of, or around, this one use as well."""
        for p in call.trained.values():
            if p in others:
                for ext in self.first_order:
                    ext.fail(IN_PARTS.format(describe(call.module), list(p.shape)))

    def _leave_outer(self) -> None:
        """Let the passes around this one know which parameters are done."""
        here, scope = get_ident(), self.configuration.scope
        for outer in self._others():
            if here in outer.threads and outer.configuration.scope is scope:
                reached = outer.reached_calls.values()
                around = outer.inside.union(*(call.trained.values() for call in reached))
                for call in self.reached_calls.values():
                    self._refuse_parts(call, around)
                    outer.inside.update(call.trained.values())

    def _complete(self, call: Visit) -> None:
        if call in self.deferred and self._is_independent(call):
            # it is there once for each output that was reached
            self.deferred = [other for other in self.deferred if other is not call]
            self._finish_alone(call)

    def _finish_alone(self, call: Visit) -> None:
        """Do what is left to do at a call whose first order needs no other."""
        if self.first_order and (call.trained or self.has_rules):
            self._run_alone(call)
        if self.owed:
            self._accumulate(call)
        shows = self.configuration.extension_hook is not None
        if not (self.second_order or (shows and self.combining.is_waiting)):
            self._done([call])
            self.calls.remove(call)

    def _is_read_later(self, grad: Tensor) -> bool:
        """Whether a gradient is that of a loss, or small, or second-order quantities read it."""
        if grad.dim() == 0 or grad.numel() < calls.LARGE or self.reads_gradients:
            return True
        if self.has_copies is None:
            self.has_copies = any(call.is_unbatched for call in alive.all_live_calls())
        return self.has_copies

    def _accumulate(self, call: Visit) -> None:
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
            if self.entry is not None:
                self.entry.elided.discard(p)

    def _is_independent(self, call: Visit) -> bool:
        """Whether first-order quantities need no other call: known parameters and samples."""
        if call.is_unbatched or call.unbatched_inputs:  # samples are told apart later
            return False
        if self.combining.is_sharded and not self.combining.can_reduce_early(
            call, self.users, self.whole_batch
        ):
            return False
        return self.whole_batch and (not call.params or self.users.is_alone(call))

    def _note_first_order(self) -> None:
        """Say if samples were mixed, and note at the results what belongs to them.

        That is also the gradient which autograd has accumulated.
        """
        marks = self.sample_flow.marks(self.start, self.results)
        exts = {ext.savefield: ext for ext in self.first_order if ext.belongs_to_gradient}
        for p, savefield, value in self.results if marks or exts else ():
            if isinstance(value, Tensor | FactoredGrad):
                vars(value).update(marks)
                if p in self.accumulated:
                    vars(value)["_backpack_accumulated"] = self.accumulated[p]
            if savefield in exts and p.is_leaf:
                results.note_gradient(p, savefield)
                if isinstance(value, Tensor) and exts[savefield].get_subsampling() is not None:
                    vars(value)["_backpack_subsampled"] = True

    def _find_trained(self, call: Visit) -> None:
        with torch.enable_grad():
            call.trained = {}
            for name, p in call.params.items():
                if self._is_trained(p):
                    call.trained[name] = p
            own: Iterable[Parameter] = call.trained.values()
            if shards.KNOWN:
                own = map(shards.home, own)
            # to which the pass at hand adds later
            added = {p: p.grad for p in own if p.is_leaf and p.grad is not None}
            if self.combining.accumulates:
                added = {p: grad for p, grad in added.items() if not self.combining.continues(p)}
            if added:
                results.note_pass(added)
            if self.notes_accumulation:
                for p, grad in added.items():
                    self.accumulated.setdefault(p, grad.any())
        if len(call.trained) < len(call.params):
            left_out = [p for name, p in call.params.items() if name not in call.trained]
            self.results.untrained.update(map(shards.home, left_out))

    def _is_trained(self, p: Parameter) -> bool:
        """Whether ``p`` gets a gradient, from autograd (see ``backward(inputs=)``) or from here."""
        if not p.requires_grad:
            return False
        if not self.restricted:
            return True
        view: Any = p.view_as(p).grad_fn  # in grad mode
        try:
            if torch._C._will_engine_execute_node(view.next_functions[0][0]):
                return True
        except RuntimeError:  # torch.autograd.grad does not say
            self.restricted = False
            self.combining.average_nothing()
            return True
        if self.entry is not None and p in self.entry.elided:
            if not self.configuration.gradients:  # nobody wants it
                return True
            self.owed.add(p)
        return p in self.owed

    # ------------------------------------------------------------------ after the backward pass

    def _run(self) -> None:
        with self._gathered() if self.combining.is_sharded else nullcontext():
            self._check_parameters()
            if alive.corrections != self.corrections:  # such as by a checkpoint that has run again
                for call in self.calls:
                    call.note_correction()
            if self.before.read:
                self.before.show(self.calls, self.results.originals)
                self.before.kept = None
            if self.deferred:  # first order
                with self.copied or nullcontext():
                    reached = self.reached_calls.values()
                    # losses of what functions have computed may read some of the samples
                    left_out = filter(_is_loss, filter(attrgetter("reads_functions"), reached))
                    seen = filterfalse({*left_out}.__contains__, reached)
                    self._run_first_order(Plan(seen, dict.fromkeys(self.deferred)))
                    for call in self.deferred if self.owed else ():
                        self._accumulate(call)
            if self.results.collected:
                self.results.finish_extensions()
            if not self.combining.is_waiting:
                self._note_first_order()
            if self.sample_flow.hidden:
                self.sample_flow.tell_hidden_gradients(self.inside)
            if self.second_order:
                self._run_second_order()
                if self.results.collected:
                    self.results.finish_extensions()

    def _gathered(self) -> AbstractContextManager[Any]:
        """Let weights that are sharded be there when they are read.

        One layer at a time, if all processes read them in the same order: where batches differ,
        their numbers of slices may. Else all of them, until the end.
        """
        first: tuple[shards.Shard, ...] = ()
        if self.second_order:
            shapes = [f"{describe(c.module)} {c.shape_in} {c.shape_out}" for c in self.calls]
            known = dict.fromkeys(shard for call in self.calls for shard in call.shards)
            if not self.combining.is_alike(f"{shapes} {torch.get_num_threads()}"):
                first = tuple(known)
        return shards.gathered(self.combining.agree_with, first)

    def _end(self, error: Exception | None = None) -> None:
        """Write what others have a part in, unless an error has stopped it; release the calls."""
        for handle in (*self.looking, *self.read_back.handles):
            handle.remove()
        if error is not None or self.combining.is_waiting:
            if torch.is_grad_enabled() and self.combining.groups:
                error = error or NotImplementedError(NO_GRAPH)
            self.combining.finish(error)
            self._note_first_order()
        if error is None and self.is_nested and not self.results.is_mute:
            self._leave_outer()
        self._done(sorted(self.calls, key=attrgetter("index"), reverse=True))
        if torch.is_grad_enabled() and not self.configuration.retain_graph and self.results:
            # results that have a graph let that of the forward pass live as long as they do
            visits.release(self.reached_calls.values())

    def _check_parameters(self) -> None:
        """Warn if parameters have gradients, but none of them a module that was reached."""
        if self.has_parameters or not self.exts or any(ext.rules for ext in self.exts):
            return
        if not self.configuration.passes.told and has_parameters([self.first]):
            reached = checks.listed([describe(call.module) for call in self.reached_calls])
            names = ", ".join(type(ext).__name__ for ext in self.exts)
            warn(
                f"{names}: nothing was computed, because no module that has parameters was "
                f"recorded, only {reached}. {checks.EXTEND_FIRST}",
            )

    def _done(self, done: Iterable[Visit]) -> None:
        if self.configuration.extension_hook is not None:
            done = self._shown_to_hook(done, self.configuration.extension_hook)
        visits.release(done, self.retains)

    @staticmethod
    def _shown_to_hook(done: Iterable[Visit], hook: Callable[[Any], None]) -> Iterator[Visit]:
        """Let a hook of the user see each call, before it is released."""
        for call in done:
            stored = call.inputs, call.outputs, call.views
            if call.views:
                (call.inputs, call.outputs), call.views = call.without_views(), ()
            try:
                with context_of(call, check=False, whole=True).shown(for_users=True) as module:
                    hook(module)
            finally:
                call.inputs, call.outputs, call.views = stored
            yield call

    # ------------------------------------------------------------------ first order

    def _run_alone(self, call: Visit) -> None:
        """Run first order at a call that needs no other."""
        if call in self.before.read:
            self.before.show([call], self.results.originals)
        if not (call.is_container or call.is_transparent):
            visits.compute_in_one_precision([call])
        exts = self.first_order
        if self.has_rules or self._unsupported_reason(call) is not None:
            uses: dict[Parameter, list[tuple[Visit, str]]] = {}
            for name, p in call.trained.items():
                uses.setdefault(p, []).append((call, name))
            self._run_at([call], uses, exts)
        elif call.trained:
            self._extract(_gradient_use(call, None, folds=True).of_all, exts)

    def _run_first_order(self, plan: Plan) -> None:
        if not self.first_order:
            return
        separate_samples(plan)
        for subsampling, exts in _grouped(self.first_order, lambda ext: ext.get_subsampling()):
            if subsampling is not None:
                plan.check_subsampling(subsampling, exts)
            self._run_at(plan.users, plan.uses, exts, plan, subsampling)

    def _run_at(
        self,
        calls: Sequence[Visit],
        uses_of: Mapping[Parameter, list[tuple[Visit, str]]],
        exts: Sequence[Extension],
        plan: Plan | None = None,
        subsampling: Sequence[int] | None = None,
    ) -> None:
        """Extract what is wanted of the parameters that calls use, for some of the samples."""
        for ext in exts:
            if ext.rules or not ext.needs:
                self._run_rules(ext, calls, uses_of)
        work: list[Work] = []
        rows: dict[Visit, Rows] = {}
        for p, uses in uses_of.items():
            known = [ext for ext in exts if ext.needs and not _has_rule(ext, uses)]
            if known and self._is_supported(known, uses):
                work.append((p, uses, known))
                if plan is not None:
                    plan.check_one_batch(p)
                    rows |= {call: plan.rows(call, subsampling) for call, _ in uses}
        for call, of_call in groupby(work, key=_only_call):
            gradients: dict[Visit, Use] = {}
            if call is not None:
                gradients[call] = _gradient_use(
                    call, rows.get(call), folds=True, samples=subsampling
                )
            for p, uses, known in of_call:
                for other, _ in uses:
                    if other not in gradients:
                        gradients[other] = _gradient_use(other, rows.get(other))
                self._extract({p: [gradients[other].of(name) for other, name in uses]}, known)
            if call is not None and len(exts) == len(self.exts):  # nobody else will ask
                call.clear_results()

    def _run_rules(
        self,
        ext: Extension,
        calls: Sequence[Visit],
        uses_of: Mapping[Parameter, list[tuple[Visit, str]]],
    ) -> None:
        for call in calls:
            rule = ext.rule_for(call.module)
            if rule is None:
                if call.trained and not ext.needs:
                    ext.fail(no_rule(call))
                continue
            if any(len(uses_of[p]) > 1 for p in call.trained.values()):
                raise NotImplementedError(
                    f"{ext.savefield}: the rule for {call!r} cannot be used, because a parameter "
                    "of the module is used several times. Register derivatives instead "
                    "(backpack.core.derivatives.register)."
                )
            with context_of(call, whole=True).shown() as module:
                counts = sample_counts(call, ext.get_subsampling())
                rule.run(ext, module, *call_gradients(call), None, self.combining, counts=counts)

    def _unsupported_reason(self, call: Visit) -> str | None:
        """Explain why there are no derivatives of a call, or none for what it trains."""
        if call not in self.unsupported:
            self.unsupported[call] = unsupported_reason(call, call.trained)
        return self.unsupported[call]

    def _is_supported(self, exts: Sequence[Extension], uses: Sequence[tuple[Visit, str]]) -> bool:
        for call, name in uses:
            reason = unsupported_reason(call, [name])
            if reason is not None:
                for ext in exts:
                    ext.fail(reason)
                return False
        return True

    def _extract(self, uses_of: Mapping[Parameter, list[Use]], exts: Sequence[Extension]) -> None:
        is_holding = not self.combining.accumulates and memory.reuse(uses_of, exts)
        wanted = self.wanted
        if exts is not self.first_order:
            wanted = {name for ext in exts for name in ext.needs}
        extract(uses_of, exts, wanted, self.combining, gradients=self.gradients, owed=self.owed)
        if is_holding:
            memory.clear()

    # ------------------------------------------------------------------ second order

    def _run_second_order(self) -> None:
        trains = any(call.trained for call in self.calls)
        has_results = trains or any(ext.rules for ext in self.second_order)
        if not has_results and any(call.params for call in self.calls):
            return  # such as for the gradient of an output with respect to data
        set_apart(self.calls, self.second_order)
        plan = Plan([*self.calls, *self.read_back.take_part()])
        if not (plan.calls or has_results):  # at most what only reshapes, of a model not extended
            return
        check_losses(plan, () if self.entry is None else self.entry.roots)
        if self.changed:
            names = ", ".join(type(ext).__name__ for ext in self.second_order)
            warn(CHANGED.format(names, checks.listed([*self.changed])))
        self._check_support(plan)
        if self.has_parameters:  # else all of them are told
            self._tell_uncalled_layers(plan)
        separate_samples(plan)
        groups = _grouped(
            self.second_order,
            lambda ext: (
                ext.propagation or UserRules(),
                ext.get_subsampling(),
                id(ext) if ext.rules else None,
            ),
        )
        for (propagation, subsampling, _), exts in groups:
            for ext in exts:
                propagation.check(ext)
            if subsampling is not None:
                plan.check_subsampling(subsampling, exts)
            is_holding = not self.combining.accumulates and memory.reuse(plan.uses, exts)
            propagation.run(plan, exts, subsampling, self.combining)
            if is_holding:
                memory.clear()

    def _check_support(self, plan: Plan) -> None:
        """Let every extension object to what it does not know before anything is written."""
        gap = plan.find_gap()
        unreached = plan.find_unreached() if gap is None else None
        for ext in self.second_order:
            if unreached is not None and ext.needs:
                nested = self.is_nested and not plan.losses
                ext.fail(NESTED if nested else plan.why_unreached(unreached), ValueError)
            for call in plan.everything:
                if ext.rules and ext.rule_for(call.module) is not None:
                    continue
                if call.trained or call in plan.calls:
                    reason = self._unsupported_reason(call)
                    if reason is not None:
                        ext.fail(reason)
            if gap is not None:
                ext.fail(gap, ValueError)

    def _tell_uncalled_layers(self, plan: Plan) -> None:
        """Warn of parameters that functions have read, and no call: nothing is computed."""
        names = ", ".join(type(ext).__name__ for ext in self.second_order)
        for p, call in plan.read_by_functions.items():
            if p.grad is not None and self.sample_flow.is_of_layer(p):
                warn(
                    f"{names}: a parameter of shape {list(p.shape)} has no result. No module that "
                    f"was called has it, and a function has read it whose result {call!r} reads. "
                    f"{plan.advice(call)}"
                )


class _Ending:
    """Ends a backward pass, when autograd calls it.

    Autograd alone holds it: where an error of somebody else stops the pass, it is dropped uncalled,
    and nothing of the pass is kept.
    """

    __slots__ = ("task",)

    def __init__(self, task: int):
        self.task = task

    def __call__(self) -> None:
        BackwardPass._finish(self)

    def __del__(self) -> None:
        BackwardPass.abandon(self.task)


def _of_transform(grad: Tensor) -> bool:
    """Whether a gradient is that of a transform, such as of ``is_grads_batched=True``."""
    of_torch: Any = torch._C._functorch
    return of_torch.is_functorch_wrapped_tensor(grad) or of_torch.is_legacy_batchedtensor(grad)


def _is_called_from_here() -> bool:
    """Whether the thread at hand has called the backward pass that runs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    return frame is not None


def _reads_gradients(ext: Extension) -> bool:
    return bool(ext.rules) or ext.propagation is None or ext.propagation.reads_gradients


def _is_loss(call: Visit) -> bool:
    return isinstance(call.derivatives, BaseLossDerivatives) and not call.shape_out[0]


def _only_call(work: Work) -> Visit | None:
    """Return the call that alone uses a parameter, and once."""
    _, uses, _ = work
    return uses[0][0] if len(uses) == 1 else None


def _gradient_use(call: Visit, rows: Rows, folds: bool = False, samples: Rows = None) -> Use:
    """Return the gradient at some rows of a call as its only column, for any of its parameters.

    If it ``folds`` them, the rows of a sample have an axis of their own: those of ``samples``.
    """
    c = context_of(call, folds=folds, shares=folds)
    c.reads_entries = not call.shards or call.reads_parameters(travels=False, is_shown=False)
    if c.is_folded:
        rows = samples
    grads = call.gradients(c.is_folded)
    if rows is not None:
        memo, c = c.memo, c.at(rows)
        c.memo = memo
        grads = [None if grad is None else subsample(grad, subsampling=rows) for grad in grads]
    mats = [None if grad is None else grad.unsqueeze(0) for grad in grads]
    first = mats[0] if mats[0] is not None else next(mat for mat in mats if mat is not None)
    whole = c.is_folded or call.rows_are_samples
    groups = first.shape[1] // (1 if whole else call.rows_per_sample)
    # gradients of merged rows add up: there is one loss
    use = Use(call, "", Factor(first, groups, adds_up=True), rows, mats)
    use.c = c
    return use


def _has_rule(ext: Extension, uses: Sequence[tuple[Visit, str]]) -> bool:
    return bool(ext.rules) and any(ext.rule_for(call.module) is not None for call, _ in uses)


def _grouped(exts: Sequence[Extension], key: Any) -> list[tuple[Any, list[Any]]]:
    """Group extensions with equal keys (which need not be hashable)."""
    groups: list[tuple[Any, list[Any]]] = []
    for ext in exts:
        own = key(ext)
        for other, members in groups:
            if other == own:
                members.append(ext)
                break
        else:
            groups.append((own, [ext]))
    return groups


def unsupported_reason(call: Visit, names: Collection[str]) -> str | None:
    """Explain why there are no derivatives of a call, or none for parameters; None if there are."""
    if call.derivatives is None:
        return no_rule(call, *names)
    known = call.derivatives.param_names(call.module) if names else ()
    if not set(names).issubset(known):
        with call.as_it_was():  # it may have tied some since
            known = call.derivatives.param_names(call.module)
    if not set(names).issubset(known):
        return no_rule(call, *[name for name in names if name not in known])
    if type(call.derivatives).unsupported_reason is BaseDerivatives.unsupported_reason:
        return None
    return call.derivatives.unsupported_reason(context_of(call, check=False))


def no_rule(call: Visit, *names: str) -> str:
    """Explain that a module (or a parameter of it) is not supported, and what to do."""
    what = f"the parameters {', '.join(names)} of {call!r}" if names else repr(call)
    convert = "Use extend(model, use_converter=True), or register"
    advice = convert if call.is_container else "Register"
    return (
        f"there is no rule for {what}. {advice} derivatives for {type(call.module).__qualname__} "
        "(backpack.core.derivatives.register), or a rule for this extension alone "
        "(set_module_extension)."
    )

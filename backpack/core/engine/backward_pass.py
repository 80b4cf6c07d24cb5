"""One backward pass: which calls it reaches, and what the active extensions make of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from threading import get_ident
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward
from torch.nn import Parameter

from backpack.context import (
    DEFAULT,
    OUTSIDE,
    STATE,
    Configuration,
    State,
    active,
    configure,
    state_of_caller,
)
from backpack.core import memory
from backpack.core.engine import checks, results
from backpack.core.engine.combining import NO_GRAPH, Combining
from backpack.core.engine.extracted import fail, names_of
from backpack.core.engine.first_order import FirstOrder
from backpack.core.engine.intercept import Entry
from backpack.core.engine.layers_of_functions import find_layers
from backpack.core.engine.plan import Plan
from backpack.core.engine.read_back import place_calls_again
from backpack.core.engine.results import Writer
from backpack.core.engine.sample_flow import SampleFlow
from backpack.core.engine.second_order import SecondOrder
from backpack.core.engine.trained import Trained
from backpack.core.record import alive, calls, shards, visits, weights
from backpack.core.record.calls import Call
from backpack.core.record.context import context_of
from backpack.core.record.given import Given
from backpack.core.record.kept_parameters import ParametersBefore
from backpack.core.record.module_state import describe, placeholder
from backpack.core.record.origins import WRAPPERS, has_parameters
from backpack.core.record.tape import calls_above
from backpack.core.record.visits import Visit
from backpack.utils.autocast import without_autocast
from backpack.utils.warning import warn

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
IN_INFERENCE_MODE = (
    "Tensors have no graphs in torch.inference_mode(): call backward() outside of it, or enter the "
    "context of backpack(...) inside of it."
)
NOT_TOGETHER = (
    "{} needs the individual gradients of all parameters together, but a backward pass runs inside "
    "of another one, and each has a part of them. If it is that of torch.utils.checkpoint, use "
    "use_reentrant=False."
)
_RULES = attrgetter("rules")


class BackwardPass:
    """A backward pass that runs: in which threads, how it ends, and what becomes of errors."""

    # Hooks of nodes know autograd's number of a pass alone, in whatever thread they run; a pass is
    # taken out when it ends, also by an error of somebody else (``_Ending``).
    _running: ClassVar[dict[int, BackwardPass]] = {}

    error: Exception | None = None  # what others are to be told, before it is raised
    has_run = False
    waits = False  # behind what others have queued

    def __init__(self, task: int, collector: Collector) -> None:
        self.task, self.collector = task, collector
        self.configuration = collector.configuration
        self.threads: set[int] = set()  # in which it has run

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
            current._run_or_undo(current.collector.reach, call, slot, grad)
        elif grad.numel() >= calls.LARGE and not state_of_caller().disabled:
            call.follow_autograd()

    @classmethod
    def entered(cls, given: Given, grad: Tensor | None) -> None:
        """Take note that a backward pass comes to what a model has returned."""
        if grad is not None and _of_transform(grad):
            return
        current = cls._current(torch._C._current_graph_task_id())
        if current is not None:
            current.collector.sample_flow.given[given] = None

    @classmethod
    def _current(cls, task: int) -> BackwardPass | None:
        """Return the backward pass that runs here, which may start now; None if none matters."""
        current = cls._running.get(task)
        if current is not None:
            return current
        state = state_of_caller()
        if state.disabled:
            return None
        if not cls._running and state.configuration is DEFAULT.configuration:
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
        if entry is None and not configuration.gradients:
            raise NotImplementedError(NOT_LEFT_ALONE)
        if torch.is_inference_mode_enabled():
            raise RuntimeError(IN_INFERENCE_MODE)
        around = [o.collector for o in outer if o.configuration.scope is configuration.scope]
        new = cls(task, Collector(configuration, entry, around))
        current = cls._running.setdefault(task, new)  # threads of several devices may be here
        if current is new:
            torch.autograd.Variable._execution_engine.queue_callback(_Ending(task))
        return current

    @classmethod
    def missed(cls, what: str, parameters: Iterable[Parameter]) -> None:
        """Take note that a backward pass comes through a call that could not be recorded."""
        state = state_of_caller()
        if not state.disabled:
            configuration = active(state.configuration)
            configuration.passes.told = True
            fail(configuration.exts, what)
            for p in () if configuration.accumulate else map(shards.home, parameters):
                for ext in configuration.exts:
                    results.forget(p, ext.savefield)

    @classmethod
    def completed(cls, call: Visit) -> None:
        """Take note that all gradients of a call's outputs are there."""
        task = torch._C._current_graph_task_id()
        current = cls._running.get(task)
        if current is not None:
            current._run_or_undo(current.collector.complete, call)

    def _finish(self, ending: _Ending) -> None:
        collector, queue = self.collector, torch.autograd.Variable._execution_engine.queue_callback
        if collector.combining.is_sharded and not self.waits:
            self.waits = True  # until gradients are sharded again
            queue(ending)
            return
        if not self.has_run:
            self.has_run = True
            self._run_or_undo(collector.run)
            if self.error is not None or collector.combining.groups:
                queue(ending)  # behind what others have: then gradients are averaged, in any case
                return
        error, self.error = self.error, None
        self._run_or_undo(collector.end, error, told=True)
        del self._running[self.task]

    @classmethod
    def abandon(cls, task: int) -> None:
        """Forget a backward pass that an error has stopped, and what it wrote."""
        current = cls._running.pop(task, None)
        if current is not None:
            current.collector.undo()

    def _run_or_undo(self, work: Callable[..., None], *arguments: Any, told: bool = False) -> None:
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
            self.collector.undo()
            memory.clear()
            stop = self.collector.combining.stop
            if isinstance(error, Exception) and not told and stop(error):
                self.error = error
            else:
                self._running.pop(self.task, None)
                raise
        finally:
            if is_elsewhere:
                configure(outer)


class _Ending:
    """Ends a backward pass when autograd calls it; if an error stops that, autograd drops it."""

    __slots__ = ("task",)

    def __init__(self, task: int):
        self.task = task

    def __call__(self) -> None:
        BackwardPass._running[self.task]._finish(self)

    def __del__(self) -> None:
        BackwardPass.abandon(self.task)


class Collector:
    """Collects the calls that one ``backward()`` reaches, and runs the extensions on them.

    First order runs at once, unless a parameter may be used elsewhere too; all else at the end.
    """

    # what it finds out as it goes on
    copied: shards.copied | None = None  # whole parameters that deferred calls read
    first: Any = None  # the node of the first call
    has_parameters = False  # whether one had

    def __init__(
        self, configuration: Configuration, entry: Entry | None, around: Sequence[Collector]
    ) -> None:
        """Begin inside of passes ``around`` of the same context, as reentrant checkpoints do."""
        self.configuration = configuration  # of the thread that has called ``backward()``
        self.entry = entry  # that call, if it was noticed
        self.around = around
        self.exts = configuration.exts
        self.reached_calls: dict[Call, Visit] = {}
        self.calls: list[Visit] = []  # those that are not done yet
        self.deferred: list[Visit] = []
        self.results = Writer(configuration.debug)
        self.sample_flow = SampleFlow(configuration.first_order, entry)
        self.sharded = checks.sharded_modules()
        self.users = alive.Users()
        self.inside: set[Parameter] = set()  # those that passes inside of this one have used
        nodes = [torch._C._current_autograd_node()] if entry is None else entry.nodes
        self.combining = Combining(configuration, self.results, nodes)
        self.trained = Trained(configuration, entry, self.combining, self.results.untrained)
        self.first_order = FirstOrder(configuration, self.combining, self.trained)
        self.second_order = SecondOrder(configuration.second_order, self.combining)
        # what autograd keeps for further backward passes is kept, see end
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        self.retains = configuration.retain_graph or keeps_graph
        self.start, self.corrections = next(weights.COUNTER), alive.corrections
        # code of users sees inputs and outputs of calls
        shows = configuration.extension_hook is not None or any(map(_RULES, self.exts))
        self.before = ParametersBefore(bool(configuration.second_order), shows)

    def undo(self) -> None:
        """Leave no results: those of the pass before would be taken for those of this one."""
        for handle in (*self.second_order.looking, *self.sample_flow.uses.hidden.handles):
            handle.remove()
        self.results.undo()
        keeps = self.combining.accumulates or self.around  # those of the pass around this one
        for call in () if keeps else calls_above(self.combining.nodes):
            for p in map(shards.home, call.params.values()):
                for ext in self.exts:
                    results.forget(p, ext.savefield)

    # ------------------------------------------------------------------ during the backward pass

    def reach(self, call: Call, slot: int, grad: Tensor) -> None:
        """Store the gradient of an output; do what needs no other call."""
        known = self.reached_calls.get(call)
        visit = self._take_up(call) if known is None else known
        if visit.is_unbatched:  # it may become the gradient of a parameter, which others change
            grad = grad.clone()
        first, second = self.first_order, self.second_order
        if first.exts:
            visit.g_out[slot] = grad
            if known is None:
                self.sample_flow.visit(visit, self.has_parameters)
        else:
            is_kept = grad.numel() < calls.LARGE or second.is_read_later(grad)
            visit.g_out[slot] = grad if is_kept else placeholder(grad)
            if second.exts:
                return
        if len(visit.outputs) == 1 and self._is_independent(visit):
            self._finish_alone(visit)
            if second.exts and grad.numel() >= calls.LARGE and not second.is_read_later(grad):
                visit.g_out[slot] = placeholder(grad)
        else:
            self.deferred.append(visit)
            if visit.shards and (first.has_rules or visit.reads_parameters(False, is_shown=False)):
                self.copied = self.copied or shards.copied()
                self.copied.add(visit.shards)

    def _take_up(self, call: Call) -> Visit:
        """Check a call that was not reached before, and return what this pass works on."""
        if call.misplaced is not None:
            place_calls_again()
        if call.index > self.start:  # such as that of a checkpoint
            self.before.keep(call)
        known = None if self.entry is None else self.entry.visits.pop(call, None)
        only = not self.second_order.exts  # frozen parameters do not matter
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
        if self.around and any(call in outer.reached_calls for outer in self.around):
            self.results.is_mute = True  # results are those of the outer pass, which has some
        if visit.params:
            self.trained.find(visit)
            if visit.trained:
                self.combining.note(visit, bool(self.around))
                if self.inside:
                    self.first_order.refuse_parts(visit, self.inside)
        if not self.has_parameters:
            self.has_parameters = bool(visit.own())  # frozen ones, too
        if self.second_order.exts:
            if visit.shards:
                self.combining.note_gathering(visit)
            for i, (x, mark) in enumerate(zip(visit.inputs, visit.origins_in, strict=True)):
                if mark is not None and (not mark.is_output or mark.by_container):
                    self.second_order.read_back(visit, i)
                for t in () if mark is None else (x, x._base):  # of which it is a view
                    node = None if t is None else t.grad_fn
                    if node is not None and (t._backward_hooks or type(node).__name__ in WRAPPERS):
                        self.second_order.look_around(t, visit)
        self.calls.append(visit)
        return visit

    def _leave_outer(self) -> None:
        """Let the passes around this one know which parameters are done."""
        for outer in self.around:
            reached = outer.reached_calls.values()
            used = outer.inside.union(*(call.trained.values() for call in reached))
            for call in self.reached_calls.values():
                self.first_order.refuse_parts(call, used)
                outer.inside.update(call.trained.values())

    def complete(self, call: Visit) -> None:
        """Finish a call whose gradients are all there."""
        if call in self.deferred and self._is_independent(call):
            # it is there once for each output that was reached
            self.deferred = [other for other in self.deferred if other is not call]
            self._finish_alone(call)

    def _finish_alone(self, call: Visit) -> None:
        """Do what is left to do at a call whose first order needs no other."""
        first = self.first_order
        if first.exts and (call.trained or first.has_rules):
            if call in self.before.read:
                self.before.show([call], self.results.originals)
            first.run_alone(call)
        if self.trained.owed:
            self.trained.accumulate(call)
        if self.second_order.exts:
            return
        if not self.combining.is_waiting or self.configuration.extension_hook is None:
            self._done([call])
            self.calls.remove(call)

    def _is_independent(self, call: Visit) -> bool:
        """Whether first-order quantities need no other call: known parameters and samples."""
        if call.is_unbatched or call.unbatched_inputs:  # samples are told apart later
            return False
        whole = self.first_order.whole_batch
        if self.combining.is_sharded and not self.combining.can_reduce_early(
            call, self.users, whole
        ):
            return False
        return whole and (not call.params or self.users.is_alone(call))

    # ------------------------------------------------------------------ after the backward pass

    def run(self) -> None:
        """Do what needs all calls."""
        with self._gathered() if self.combining.is_sharded else nullcontext():
            self._check_parameters()
            if alive.corrections != self.corrections:  # such as by a checkpoint that has run again
                for call in self.calls:
                    call.note_correction()
            if self.before.read:
                self.before.show(self.calls, self.results.originals)
                self.before.kept = None
            if not any(map(_RULES, self.exts)):  # which may be about functions
                find_layers(self.calls)
            if self.deferred:  # first order
                with self.copied or nullcontext():
                    reached = self.reached_calls.values()
                    # losses of what functions have computed may read some of the samples
                    seen = [c for c in reached if not (c.reads_functions and _is_loss(c))]
                    self.first_order.run(Plan(seen, dict.fromkeys(self.deferred)))
                    for call in self.deferred if self.trained.owed else ():
                        self.trained.accumulate(call)
            if self.results.collected:
                self._check_together()
                self.results.finish_extensions()
            if not self.combining.is_waiting:
                self._mark_results()
            if self.sample_flow.uses.hidden.found:
                self.sample_flow.uses.tell_hidden(self.inside)
            if self.second_order.exts:
                roots = () if self.entry is None else self.entry.roots
                flow = self.sample_flow if self.has_parameters else None  # else all are told
                self.second_order.run(self.calls, roots, bool(self.around), flow)
                if self.results.collected:
                    self.results.finish_extensions()

    def _check_together(self) -> None:
        """Refuse what extensions make of all parameters, if other passes have some of these."""
        others = self.inside.union(*(outer.inside for outer in self.around))
        for outer in self.around:
            others.update(*(call.trained.values() for call in outer.reached_calls.values()))
        if others:
            exts = list(self.results.collected)
            for p in map(shards.home, others):
                for ext in exts:
                    results.forget(p, ext.savefield)
            raise ValueError(NOT_TOGETHER.format(names_of(exts)))

    def _mark_results(self) -> None:
        """Say if samples were mixed, and note at the results what belongs to them."""
        marks = self.sample_flow.marks(self.start, self.results)
        if marks or self.first_order.of_gradients:
            self.first_order.mark(self.results, marks)

    def _gathered(self) -> AbstractContextManager[Any]:
        """Let weights that are sharded be there when they are read, a layer at a time.

        All at once if processes may read them in another order, since their batches differ.
        """
        first: tuple[shards.Shard, ...] = ()
        if self.second_order.exts:
            shapes = [f"{describe(c.module)} {c.shape_in} {c.shape_out}" for c in self.calls]
            known = dict.fromkeys(shard for call in self.calls for shard in call.shards)
            if not self.combining.is_alike(f"{shapes} {torch.get_num_threads()}"):
                first = tuple(known)
        return shards.gathered(self.combining.agree_with, first)

    def end(self, error: Exception | None = None) -> None:
        """Write what others have a part in, unless an error has stopped it; release the calls."""
        for handle in (*self.second_order.looking, *self.sample_flow.uses.hidden.handles):
            handle.remove()
        if error is not None or self.combining.is_waiting:
            if torch.is_grad_enabled() and self.combining.groups:
                error = error or NotImplementedError(NO_GRAPH)
            self.combining.finish(error)
            self._mark_results()
        if error is None and self.around and not self.results.is_mute:
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
            warn(
                f"{names_of(self.exts)}: nothing was computed, because no module that has "
                f"parameters was recorded, only {reached}. {checks.EXTEND_FIRST}",
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


def _is_loss(call: Visit) -> bool:
    return call.is_loss and not call.shape_out[0]

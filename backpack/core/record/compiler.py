"""Recording inside of what ``torch.compile`` compiles, and what others trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backpack.core.features import EXPORTING

# Sets what compiles the functions that this thread calls, None for nothing, and returns what did.
set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame  # type: ignore[attr-defined]

# Tells whether torch.func transforms what runs, such as torch.vmap.
in_transform = torch._C._functorch.peek_interpreter_stack

# Forgets what was compiled of a code: it goes on without the hooks that modules have got since.
forget_compiled = torch._C._dynamo.eval_frame.reset_code


class Mode(TorchDispatchMode):
    """A mode that runs where nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo: a second, and 130 MB


_COMPILER = vars(torch.compiler)
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # type: ignore[attr-defined]


def is_traced() -> bool:
    """Whether torch.jit.trace, torch.export or make_fx runs this: no backward pass follows here."""
    if torch._C._get_tracing_state() is not None or _COMPILER[EXPORTING]:
        return True
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    return has_modes and torch._C._get_dispatch_mode(_PROXY) is not None


def may_leave_graph() -> bool:
    """Whether torch.compile may leave its graph: not with ``fullgraph=True``, nor for an export.

    The function that asks calls ``torch._dynamo.skip_frame()`` itself: it then runs as it is.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx()
    stays = tracer.one_graph or tracer.export or getattr(tracer, "error_on_graph_break", False)
    if not stays and not hasattr(torch._dynamo, "skip_frame"):  # in older versions of torch
        raise torch._dynamo.exc.SkipFrame("extended modules are recorded")
    return not stays


# as torch.compiler.assume_constant_result does, without its import of the compiler: the function is
# called while torch.compile traces
may_leave_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]

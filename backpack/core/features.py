"""What newer versions of torch have, with what takes its place in older ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextvars import ContextVar
from threading import get_ident
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# What torch.compiler sets while a model is exported: before torch 2.7, as if that were compiling.
_EXPORTING = "_is_exporting_flag"
EXPORTING = _EXPORTING if hasattr(torch.compiler, _EXPORTING) else "_is_compiling_flag"

# Hooks that decide what autograd keeps, None if there are none. Before torch 2.7 that is not known,
# and they are assumed to be there.
hooks_of_saved_tensors: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignores_tracing: ()
)

# ``backward()`` takes the context variables of its caller to threads of autograd. Before torch 2.11
# it takes objects that were stashed there: the number of the thread, which has values here.
_TAKES_VARIABLES = hasattr(torch.autograd.graph, "contextvars")
_values: dict[int, Any] = {}


def _set_variable(variable: ContextVar[T], value: T) -> None:
    variable.set(value)
    here = get_ident()
    _values[here] = value
    if _thread_of_caller() != here:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(here))  # torch 2.6 does not
        torch._C._stash_obj_in_tls("backpack", here)


def _thread_of_caller() -> Any:
    """Return the number of the thread that has called ``backward()``, None if it set no value."""
    return torch._C._get_obj_in_tls("backpack") if torch._C._is_key_in_tls("backpack") else None


def _variable_by_thread(variable: ContextVar[T], default: T) -> T:
    caller = _thread_of_caller()
    return variable.get() if caller in (None, get_ident()) else _values[caller]


def _variable_by_context(variable: ContextVar[T], default: T) -> T:
    if torch._C._is_key_in_tls("context"):
        return torch._C._get_obj_in_tls("context").get(variable, default)
    return variable.get()


# Sets the context variable (there is one) that is read in threads of autograd.
set_variable: Callable[[ContextVar[Any], Any], Any]
set_variable = ContextVar.set if _TAKES_VARIABLES else _set_variable
# Returns what the variable was where ``backward()`` was called, in any of its hooks.
variable_of_caller = _variable_by_context if _TAKES_VARIABLES else _variable_by_thread

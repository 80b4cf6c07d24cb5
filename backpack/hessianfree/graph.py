"""The graph of autograd, followed from results to what they were computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def nodes_above(nodes: Iterable[Any], until: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yield nodes of the graph (None is none) and those above them: each once, near ones first.

    Neither those at which the walk ends, nor what is above them: ``until`` tells which these are.
    """
    seen: set[Any] = {None}
    waiting = [*nodes]
    for node in waiting:  # which grows
        if node in seen:
            continue
        seen.add(node)
        if until is None or not until(node):
            yield node
            waiting += [parent for parent, _ in node.next_functions]

"""Whether each term of a loss that is not extended depends on one sample.

The graph is followed from what ``backward()`` is called on up to what recorded calls have returned.
Functions that are linear there add terms up, in whatever way; what they add up is to depend on one
sample in each entry.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Size, Tensor

from backpack.context import CTX
from backpack.core.engine.paths import (
    Edge,
    HiddenGradients,
    Path,
    describe_structure,
    is_unpacked,
    is_whole,
    most_samples,
    path_above,
    samples_in,
)
from backpack.core.engine.spread import FUSED, kind, saved_tensors, shape_of, spread, words
from backpack.core.record.origins import RESHAPES, WRAPPERS, is_foreign_function, is_output
from backpack.hessianfree.graph import nodes_above
from backpack.utils.autocast import without_autocast

# Functions that choose entries, whose choice they store: it depends on all of them.
SELECTING = words(
    "Amax Amin Aminmax Cummax Cummin Kthvalue Max Median Min Mode NanMedian Sort Topk"
)
# Functions that choose entries by masks or numbers.
CHOOSING = words("Index IndexSelect MaskedSelect")
# Linear in each input for fixed others, and in those of one set together.
BILINEAR = words("Bmm Convolution Dot Mm Mul Mv")
TOGETHER: dict[str, tuple[set[int], ...]] = {
    "Div": ({0},),
    "Lerp": ({0, 1}, {2}),
    "Addcdiv": ({0, 1},),
    **dict.fromkeys(("Addcmul", "Addmm", "Baddbmm"), ({0, 1}, {0, 2})),
}
# Linear, though they store their input.
LINEAR = words("Nansum NllLoss NllLoss2D")
# Sums of functions of rows.
ROWWISE = words("MultiMarginLoss MultilabelMarginLoss")
# Linear on either side of a point, which a loss as a whole may never come to.
KINKED = words("Abs Clamp ClampMax ClampMin Maximum Minimum NanToNum Relu")
# Of each entry, but an argument may have fewer entries than the result.
EXPANDING = words("Add Div Expand Mul Rsub Sub")
# How many structures of losses are remembered.
MOST_KNOWN = 256

# Number of the reduction in torch.
MEAN = 1
REDUCTION_OF_NUMBER = {MEAN: "mean", 2: "sum"}


class LossReduction(NamedTuple):
    """What a loss does with its terms."""

    name: str  # "mean" or "sum"
    loss: str  # its name
    shape: Size  # that of its prediction, which samples have rows of


class LossTerms:
    """What the losses say about the samples on which ``backward()`` is called.

    What targets do that broadcast, or that are ignored, is looked at if that matters.
    """

    # Structures whose terms depend on one sample each, whatever numbers are stored.
    _known_sums: ClassVar[set[Hashable]] = set()

    def __init__(self, roots: Sequence[Any], looks_at_targets: bool = False):
        """Look at the graph, before ``backward()`` frees what it stores."""
        # functions whose results depend on several samples, and are no sum; and may do so
        self.mixing: dict[str, None] = {}
        self.unknown: dict[str, None] = {}
        # losses that are divided by a number that depends on the targets of all samples
        self.divided: dict[str, None] = {}
        # that of the only loss, if it is a function of torch whose value it is
        self.reduction: LossReduction | None = None
        # what functions read themselves, such as a penalty does, by the name of one that does
        self.leaves: dict[Tensor, str] = {}
        self.hidden = HiddenGradients()
        for root in roots:
            node, slot = root.grad_fn if isinstance(root, Tensor) else root.node, root.output_nr
            if node is None or is_output(node):
                continue
            usual = is_usual(node)
            if usual and not looks_at_targets:
                continue
            path = path_above(node, slot)
            if looks_at_targets:
                if len(roots) == 1:
                    self.reduction = _reduction(node)
                self._look_at_targets(path)
            if usual:
                continue
            for node in path.nodes if path.leaves else ():
                parents = [parent for parent, _ in node.next_functions]
                read = [parent.variable for parent in parents if hasattr(parent, "variable")]
                self.leaves |= dict.fromkeys(read, node.name())
            self.hidden.watch(filter(is_foreign_function, path.nodes), CTX.extended())
            # what parameters alone have been made of is a constant to the samples
            depends = {k: m for k, m in path.sources.items() if not m.layout or m.layout.is_batched}
            path = path._replace(sources=depends)
            if not path.nodes or not depends:
                continue
            structure = describe_structure(path)
            if structure in self._known_sums:
                continue
            with without_autocast():
                if self._is_sum_of_terms(path):
                    if len(self._known_sums) >= MOST_KNOWN:
                        self._known_sums.clear()
                    self._known_sums.add(structure)

    def _look_at_targets(self, path: Path) -> None:
        """Note what targets do that are no part of the graph."""
        for node in path.nodes:
            if kind(node) in ("NllLoss", "NllLoss2D") and _divides_by_targets(node):
                self.divided[f"a loss that is not extended ({node.name()})"] = None
        if averages_chosen(path):
            self.divided[f"a loss that is not extended ({path.start[0].name()})"] = None
        counts = _numbers_of_samples(path)
        for node in _carrying(path) if counts else ():
            if kind(node) in EXPANDING and counts & _added_sizes(node):
                self.unknown[f"{node.name()}, which expands predictions to more entries"] = None

    def _is_sum_of_terms(self, path: Path) -> bool:
        """Note what mixes samples; tell whether none does, whatever numbers are stored."""
        always = True
        carrying = _carrying(path)
        seen, stack = set(), [path.start]
        while stack:
            node, slot = stack.pop()
            if node not in carrying or (node, slot) in seen or (node, slot) in path.sources:
                continue
            seen.add((node, slot))
            carriers = [
                (i, edge)
                for i, edge in enumerate(node.next_functions)
                if edge in path.sources or edge[0] in carrying
            ]
            linear = _is_linear(node, [i for i, _ in carriers])
            if linear is None:
                self.unknown[node.name()] = None
            elif linear:
                stack += [edge for _, edge in carriers]
            else:
                always &= self._is_term(path, node, slot, [edge for _, edge in carriers])
        return always and not self.unknown

    def _is_term(self, path: Path, node: Any, slot: int, inputs: Sequence[Edge]) -> bool:
        """Whether each entry of a nonlinear function depends on one sample, for any numbers."""
        name = kind(node)
        norm = inputs[0][0]
        is_square = node.name() == "PowBackward0" and node._saved_exponent == 2
        if name in FUSED or name in ROWWISE:
            edges = inputs
        elif is_square and kind(norm) == "LinalgVectorNorm" and norm._saved_ord == 2:
            edges = [norm.next_functions[0]]  # a sum of squares
        else:
            edges = [(node, slot)]
        axes = range(len(shape_of(*edges[0]).shape) - (name in ROWWISE))
        if most_samples(path, edges, axes, spread) == 1:
            return True
        inside = set(path.nodes)
        above = nodes_above([edge[0] for edge in edges], until=lambda n: n not in inside)
        between = [n for n in above if type(n).__name__ not in RESHAPES]
        names = dict.fromkeys([node.name(), *[n.name() for n in between]])
        text = f"a loss that is not extended ({', '.join(names)})"
        most = None
        if all(map(is_unpacked, between)) and not any(map(is_foreign_function, between)):
            most = most_samples(path, edges, axes)
        # what chooses entries depends on those that it leaves out, too
        if most == 1 and any(kind(n) in SELECTING for n in between):
            most = None
        if most is not None and most > 1 and name in KINKED:
            most = None if is_whole(node, slot) else most
        sources = path.sources.values()
        if not any(map(samples_in, sources)):  # of values of losses
            sources = path_above(node, slot, opens_losses=True).sources.values()
        if most is None or not any(map(samples_in, sources)):
            self.unknown[text] = None
        elif most > 1 and max(map(samples_in, sources)) > 1:
            self.mixing[text] = None
        return False


def averages_chosen(path: Path, is_mean: bool = False) -> bool:
    """Whether a mean is over rows that were chosen of the samples, as by a mask.

    It divides by their number. ``is_mean``: what reads the path is a mean.
    """
    counts = _numbers_of_samples(path)
    seen, stack = set(), [(path.start[0], is_mean)] if counts else []
    while stack:
        node, averages = each = stack.pop()
        if each in seen or node not in path.nodes:
            continue
        seen.add(each)
        parents = [edge for edge in node.next_functions if edge[0] is not None]
        if averages and kind(node) in CHOOSING and _chooses_rows(node, counts):
            return True
        if kind(node) == "Mean":
            averages |= shape_of(node, 0).shape[:1] != shape_of(*parents[0]).shape[:1]
        averages |= getattr(node, "_saved_reduction", None) == MEAN
        stack += [(parent, averages) for parent, _ in parents]
    return False


def _numbers_of_samples(path: Path) -> set[int]:
    return {*map(samples_in, path.sources.values())} - {0, 1}


def _chooses_rows(node: Any, counts: Set[int]) -> bool:
    """Whether a mask along the first axis chooses rows, or their number is not that of samples."""
    if kind(node) == "Index" and is_unpacked(node):
        first = node._saved_indices[0]
        if first is None or first.dtype in (torch.bool, torch.uint8):
            return first is not None
    shape = shape_of(node, 0).shape
    return kind(node) == "MaskedSelect" or all(shape[0] % count for count in counts)


def is_usual(node: Any) -> bool:
    """Whether a loss has the form that most have: then nothing else is looked at, to save time."""
    while True:
        name, edges = kind(node), node.next_functions
        if not edges or edges[0][0] is None or any(parent is not None for parent, _ in edges[1:]):
            return False
        parent, slot = edges[0]
        if name not in ("NllLoss", "Mean", "Sum", "Mul", "Div"):
            break
        if name in ("Mul", "Div") and shape_of(node, 0).shape:
            return False  # weights, which may depend on all samples
        node = parent
    mark = parent.metadata.get(("backpack", slot))
    layout = None if mark is None or not mark.is_output or mark.by_container else mark.layout
    if layout is None or not layout.is_batched:
        return False
    if name == "LogSoftmax":
        return layout.before == 1 and node._saved_dim == 1
    return name in ("MseLoss", "Pow", "BinaryCrossEntropyWithLogits")


def _added_sizes(node: Any) -> set[int]:
    """Return along which sizes of axes the result is larger than each of the arguments."""
    total = shape_of(node, 0).shape
    shapes = [shape_of(*edge).shape for edge in node.next_functions if edge[0] is not None]
    filled = [(1,) * (len(total) - len(shape)) + tuple(shape) for shape in shapes]
    return {size for i, size in enumerate(total) if size > max(shape[i] for shape in filled)}


def _divides_by_targets(node: Any) -> bool:
    """Whether the mean of a loss is over the weights, or over targets that are not ignored."""
    if node._saved_reduction != MEAN:
        return False
    if node._saved_weight is not None:
        return True
    targets = node._saved_target.long()  # as uint8, -100 is 156
    return bool((targets == node._saved_ignore_index).any())


def _reduction(node: Any) -> LossReduction | None:
    """Return the reduction of a loss of torch; None for other functions."""
    name = REDUCTION_OF_NUMBER.get(getattr(node, "_saved_reduction", None))  # type: ignore[arg-type]
    shape = shape_of(*node.next_functions[0]).shape if name and node.next_functions[0][0] else ()
    if name is None or not shape:
        return None
    return LossReduction(name, f"a loss that is not extended ({node.name()})", shape)


def _carrying(path: Path) -> set[Any]:
    """Return the nodes that have computed something from what recorded calls have returned."""
    readers: dict[Edge | Any, list[Any]] = {}
    found, stack = set(), []
    for node in path.nodes:
        for edge in node.next_functions:
            if edge in path.sources:
                stack.append(node)
            readers.setdefault(edge[0], []).append(node)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += readers.get(node, [])
    return found


def is_linear_in(name: str, inputs: Sequence[int]) -> bool:
    """Whether a function of several inputs is linear in some of them, for fixed others."""
    together = TOGETHER.get(name, [set(inputs)] if name in BILINEAR and len(inputs) == 1 else [])
    return any(own.issuperset(inputs) for own in together)


def _is_linear(node: Any, carriers: Sequence[int]) -> bool | None:
    """Whether a function is linear in what depends on samples; None if that is not known."""
    name = kind(node)
    if type(node).__name__ in WRAPPERS or name in LINEAR or is_output(node):
        return True
    if is_foreign_function(node):
        return None
    if name in SELECTING:
        return False
    if is_linear_in(name, carriers):
        return True
    if not is_unpacked(node):
        return None
    return not any(x.requires_grad for x in saved_tensors(node))

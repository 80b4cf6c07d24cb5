"""What mixes the samples of a batch, or is no sample, as one backward pass has found, and tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from backpack.core.engine import checks
from backpack.core.engine.results import Writer
from backpack.core.record.data_flow import NODES_OF_GRAPHS, SAY_SO
from backpack.utils.warning import warn

# Nodes of the autograd graph that add up chosen rows.
ADDING_ROWS = ("IndexAdd", "IndexPut", "ScatterAdd", "ScatterReduce")

MODULES_THAT_MIX = "Use eval() or modules that treat samples alone, such as GroupNorm."

LOSS_THAT_MIXES = (
    "Let each term of the loss depend on one sample, with targets of the shape of the prediction: "
    "[N, 1] and [N] broadcast to [N, N]. In a loss that compares samples, as contrastive ones do, "
    "detach() those that a sample is compared with: p.grad is then another one, and not private."
)


FUNCTIONS_THAT_MIX = (
    "If functions just move the samples from the first axis, use "
    "extend(model, use_converter=True), which follows them."
)

OF_DATA = "functions of the data before"

FUNCTIONS_BESIDE = (
    "The functions are no part of the converted model: call them in its forward if they just "
    "move the samples. Where a loss compares the two samples of a pair, let the pairs be the "
    "samples of the batch, [N, 2, *]. Where it compares each with all others, detach() those: "
    "p.grad is then another one, and not private."
)

OTHER_ROWS = (
    "A layer takes the rows of its input for the samples of the batch, but their numbers differ: "
    "{} (a table of positions has one, merged axes have more). Use extend(model, "
    f"use_converter=True), which follows the samples. {SAY_SO}"
)


@dataclass
class Findings:
    """Names of what mixes samples or has others, in the order in which it was found."""

    # what mixes samples; functions may move them from the first axis as well
    modules: dict[str, None] = field(default_factory=dict)
    losses: dict[str, None] = field(default_factory=dict)
    functions: dict[str, None] = field(default_factory=dict)
    data: dict[str, None] = field(default_factory=dict)  # where no gradient passes
    unknown: dict[str, None] = field(default_factory=dict)  # what cannot be looked at
    # losses that read rows of one sample alone, of how many; and samples that have such rows
    single: dict[str, int] = field(default_factory=dict)
    chosen: set[int] = field(default_factory=set)
    # layers whose samples are not as many as those of the model, or of layers behind
    sizes: dict[str, None] = field(default_factory=dict)
    split: dict[str, None] = field(default_factory=dict)  # that read several samples as one row
    is_converted: bool = False  # whether a model whose functions are known has taken part

    def tell(
        self, results: Writer, terms: Sequence[str], without_gradient: Sequence[str]
    ) -> dict[str, str]:
        """Warn of results that are not those of samples; return what they are to be marked with.

        Without results, there is nothing to warn of. Functions behind the modules mix samples in
        ``terms``; what does so where no gradient passes leaves the results right.
        """
        marks: dict[str, str] = {}
        if len(self.chosen) < max(self.single.values(), default=0) and results:
            warn(
                f"{checks.listed(self.single)}: other samples have no part in that. If these are "
                "rows of different samples, the batch axis is not the first in a layer before: "
                "recurrent layers and attention need batch_first=True for data that has it there, "
                "and a token is chosen by h[:, 0], not h[0].",
            )
        if self.sizes and results:
            names = checks.listed([*reversed(self.sizes)])
            warn(
                "The individual gradients of some layers are not those of samples. "
                + OTHER_ROWS.format(names)
            )
            marks["_backpack_mixing"] = f"layers whose rows are no samples ({names})"
        elif self.split and results:
            names = checks.listed([*reversed(self.split)])
            warn(
                "The individual gradients of some layers are those of several samples each, "
                f"because a reshape has split the batch axis: {names}. Let these layers read "
                "[N·T, *], or call the model with data of shape [N, T, *], if samples are of "
                "several rows.",
            )
            marks["_backpack_mixing"] = f"layers that read several samples as one ({names})"
        in_loss = [*self.losses, *terms]
        # in the order of the calls
        mixing = [*reversed(self.modules), *reversed(self.functions), *in_loss]
        if mixing and results:
            names = checks.listed(mixing)
            advice = [MODULES_THAT_MIX] if self.modules else []
            of_functions = FUNCTIONS_BESIDE if self.is_converted else FUNCTIONS_THAT_MIX
            advice += [of_functions] if self.functions else []
            advice += [SAY_SO] if any(OF_DATA in name for name in self.functions) else []
            if any(f"{node}Backward" in name for node in ADDING_ROWS for name in self.functions):
                advice.append(NODES_OF_GRAPHS)
            advice += [LOSS_THAT_MIXES] if in_loss else []
            warn(
                f"The network mixes the samples of a batch, in {names}: the individual gradients "
                "are those of the loss as a whole with respect to one sample's row of a module's "
                f"output. {' '.join(advice)}",
            )
            marks["_backpack_mixing"] = names
        elif without_gradient and not self.sizes:
            marks["_backpack_mixing"] = checks.listed(without_gradient)
        return marks

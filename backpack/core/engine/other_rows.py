"""Second-order results of samples, where the rows of a layer are not the samples of the batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.engine import checks
from backpack.core.engine.extracted import OF_COUNTS, OF_SAMPLES, names_of
from backpack.core.engine.findings import OTHER_ROWS
from backpack.core.engine.plan import Plan
from backpack.core.engine.sample_flow import SampleFlow
from backpack.core.types import Extension
from backpack.utils.warning import warn


def tell_other_rows(flow: SampleFlow, plan: Plan, exts: Sequence[Extension]) -> None:
    """Warn of results of samples that are not those of the batch, if first order has not.

    Several rows of a layer that belong to one sample are taken so if a module behind tells that.
    """
    of_samples = list(filter(_is_of_samples, exts))
    of_counts = [ext for ext in exts if ext in of_samples or _reads(ext, OF_COUNTS)]
    if not of_counts:
        return
    for call in plan.calls:
        is_loss = isinstance(call.derivatives, BaseLossDerivatives)
        if is_loss or call.is_followed or call.is_unbatched:
            continue
        if call.trained:
            flow.note_samples(call, plan.samples_of[call])
        for i, mark in enumerate(call.origins_in if of_samples else ()):
            if mark is None:
                flow.check_data(call, i)
    flow.compare_sizes()
    found = flow.found
    if found.sizes:
        names = checks.listed([*reversed(found.sizes)])
        warn(f"{names_of(of_counts)}: some samples are others. {OTHER_ROWS.format(names)}")
    elif found.functions:
        warn(
            f"{names_of(of_samples)}: some samples are others. A layer takes the rows of its input "
            f"for the samples of the batch, which {checks.listed(found.functions)} have moved. Use "
            "extend(model, use_converter=True), which follows the samples.",
        )


def _is_of_samples(ext: Extension) -> bool:
    """Whether results depend on which entries belong to one sample."""
    return ext.get_subsampling() is not None or _reads(ext, OF_SAMPLES)


def _reads(ext: Extension, names: Collection[str]) -> bool:
    """Whether an extension is made of some of these quantities."""
    return not {*ext.needs, *ext.reads}.isdisjoint(names)

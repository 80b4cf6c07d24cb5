"""Programs with the library and without it: nothing differs but the quantities, which are right."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from networks import Network
from program import Program, columns_of, gradients_of
from situations import SITUATIONS, UNKNOWN_FUNCTION, Situation

from backpack import extensions

pytestmark = pytest.mark.slow

ORDERS = {
    "first": (
        extensions.BatchGrad,
        extensions.BatchL2Grad,
        extensions.SumGradSquared,
        extensions.Variance,
    ),
    "second": (
        extensions.BatchGrad,
        extensions.SqrtGGNExact,
        extensions.DiagGGNExact,
        extensions.BatchDiagGGNExact,
    ),
}
# of gradients G [N, *p] and columns S [C, N, *p]
TRUTHS = {
    "grad_batch": lambda G, S: G,
    "batch_l2": lambda G, S: (G**2).flatten(1).sum(1),
    "sum_grad_squared": lambda G, S: (G**2).sum(0),
    "variance": lambda G, S: (G**2).mean(0) - G.mean(0) ** 2,
    "sqrt_ggn_exact": lambda G, S: S,
    "diag_ggn_exact": lambda G, S: (S**2).sum((0, 1)),
    "diag_ggn_exact_batch": lambda G, S: (S**2).sum(0),
}


@pytest.fixture(scope="module", autouse=True)
def objects_of_other_tests() -> Iterator[None]:
    """Programs freeze what is there before they run: only what they leave is counted."""
    yield
    gc.unfreeze()


def ran(situation: Situation, network: Network, exts: Any = ()) -> tuple[Any, Any, list[str]]:
    """Run a program: it, its error, and its warnings."""
    gc.freeze()
    program, error = Program(network, [ext() for ext in exts]), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program.run(situation)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    program.left = program.tensors_left()
    return program, error, [str(w.message) for w in caught]


def same(value: Any, expected: Any, exactly: bool, what: str) -> None:
    if isinstance(value, tuple):
        assert value[:-1] == expected[:-1], f"{what}: {value[:-1]}, not {expected[:-1]}"
        if exactly:
            assert torch.equal(value[-1], expected[-1]), f"{what}: not bitwise"
        else:
            close(value[-1], expected[-1], 1e-10, what)
    else:
        assert value == expected, what


def gram(root: Any) -> Any:
    """[C, N, *p] -> [N, P, P]."""
    return torch.einsum("cnp,cnq->npq", root.flatten(2), root.flatten(2))


def close(value: Any, expected: Any, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        value, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


PROGRAMS = [
    pytest.param(situation, network, order, id=f"{situation}-{network}-{order}")
    for situation in SITUATIONS.values()
    for network in situation.networks()
    for order in (ORDERS if network.curvature else ["first"])
]


@pytest.mark.parametrize(("situation", "network", "order"), PROGRAMS)
def test_program(situation: Situation, network: Network, order: str) -> None:
    plain, error, plain_warnings = ran(situation, network)
    program, own_error, own_warnings = ran(situation, network, ORDERS[order])
    refusal = situation.refused.get(f"{order} {network}", situation.refused.get(order))
    if refusal and (own_error or UNKNOWN_FUNCTION["second"] not in refusal):
        assert own_error and re.search(refusal, own_error), own_error
        return
    if error:
        assert own_error, f"without the library: {error}"
        return
    assert not own_error, own_error
    extra = [m for m in own_warnings if m not in plain_warnings]
    told = situation.told if order == "second" else ""
    expected = situation.lost or told or situation.warns
    assert all(expected and re.search(expected, m) for m in extra), extra
    assert extra or not (situation.lost or told)

    assert program.calls == plain.calls
    assert [what for what, _ in program.seen] == [what for what, _ in plain.seen]
    for (what, value), (_, expected) in zip(program.seen, plain.seen, strict=True):
        same(value, expected, not network.reorders, what)

    check_quantities(program, situation, network, order)
    if program.left != plain.left:  # torch keeps something of the first call of a transform
        program, *_ = ran(situation, network, ORDERS[order])
    assert program.left == plain.left


def check_quantities(program: Program, situation: Situation, network: Network, order: str) -> None:
    gradients = gradients_of(situation, network)
    columns = columns_of(situation, network) if order == "second" else gradients
    assert len(program.quantities) == len(gradients)
    for i, (results, G, S) in enumerate(zip(program.quantities, gradients, columns, strict=True)):
        for field, values in results.items():
            for name, value, g, s in zip(program.names, values, G, S, strict=True):
                what = f"{field} of {name} in pass {i}"
                if value is None and situation.lost:
                    continue
                assert (value is None) == (g is None), what
                if value is not None:
                    truth = TRUTHS[field](g, s)
                    if field == "sqrt_ggn_exact":  # any other root is as good
                        value, truth = gram(value), gram(truth)
                    close(value, truth, situation.tolerance, what)

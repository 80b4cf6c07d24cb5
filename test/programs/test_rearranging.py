"""Programs that rearrange their samples: right, or refused with a message that says where."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import rearranging
import torch
from rearranging import Entry, Outcome, Program, is_valid, programs, reduced, run, truth_of

from backpack import extensions

pytestmark = pytest.mark.slow


def example(
    *body: str,
    submodules: tuple[str, ...] = ("self.m0 = nn.Linear(2, 2)",),
    shape: tuple[int, ...] = (3, 5, 2),
    words: int = 0,
) -> Program:
    return Program(
        submodules=submodules,
        body=body,
        result=body[-1].split(" ")[0],
        shape=shape,
        words=words,
        loss="nn.MSELoss()",
        target="real",
        seed=0,
        plain=True,
    )


# --- The instrument -------------------------------------------------------------------------------


def test_the_code_of_a_program_runs() -> None:
    for sizes in rearranging.SIZES:
        for program in programs(20, 0, sizes):
            space: dict = {}
            exec(f"{program}\nloss.backward()", space)
            truth = truth_of(program)
            assert truth is not None
            assert torch.equal(space["f"], truth.output)
            for name, p in space["model"].named_parameters():
                if p.grad is not None:
                    torch.testing.assert_close(truth.individual[name].sum(0), p.grad)


def test_a_wrong_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    program = example("h1 = self.m0(x)")
    truth = truth_of(program)
    assert truth is not None
    assert run(program, truth, "plain") == Outcome("right")
    extract = extensions.Variance.extract
    monkeypatch.setattr(extensions.Variance, "extract", lambda *a: extract(*a) * (1 + 1e-5))
    assert run(program, truth, "plain").kind == "wrong"


def test_rounding_is_not_wrong() -> None:
    """Where large terms cancel, the truth is another one close by."""
    one = torch.ones(2, dtype=torch.float64)
    assert rearranging.difference(1.0001 * one, [one], [1.000001 * one]) == ""
    assert rearranging.difference(1.0001 * one, [one], [(1 + 1e-13) * one])
    program = example("h1 = self.m0(x)")
    for check in rearranging.CHECKS:
        near = rearranging.near_by(program, check)
        assert near.keys() == {"m0.weight", "m0.bias"}


def test_a_crash_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    program = example("h1 = self.m0(x)")
    truth = truth_of(program)
    assert truth is not None
    monkeypatch.setattr(extensions.Variance, "extract", lambda *a: torch.ones(2).view(3))
    assert run(program, truth, "plain").kind == "crash"


def test_factors_of_what_is_used_alone() -> None:
    """A call whose output nobody reads has no rows."""
    program = example("h1 = self.m0(x)", "h2 = self.m0(2 * x)", "h3 = h1 * 2")
    truth = truth_of(program)
    assert truth is not None
    assert run(program, truth, "record", "KFLR") == Outcome("right")


@pytest.mark.parametrize("move", ["flip(0)", "roll(1, 0)"])
def test_samples_that_change_places(move: str) -> None:
    """Individual gradients are those of the samples of the data, in their order."""
    program = replace(example("h1 = self.m0(x)", f"h2 = h1.{move}"), mixes=True)
    truth = truth_of(program)
    assert truth is not None
    for route in ("auto", "record"):
        assert run(program, truth, route) == Outcome("right")


def test_programs_that_mix_samples_are_found_out() -> None:
    with pytest.raises(AssertionError, match="mixed samples"):
        truth_of(example("h1 = self.m0(x)", "h2 = h1 - h1.mean(0)"))


def test_a_program_is_reduced_to_what_matters() -> None:
    program = example("h1 = x.tanh()", "h2 = h1 * 2", "h3 = self.m0(h2)", "h4 = h3.flip(1)")
    program = replace(program, submodules=(*program.submodules, "self.m1 = nn.Linear(2, 2)"))
    small = reduced(program, lambda p: is_valid(p) and "flip" in p.code)
    assert small.body == ("h3 = self.m0(x)", "h4 = h3.flip(1)")
    assert small.submodules == ("self.m0 = nn.Linear(2, 2)",)


# --- Tensors without samples ----------------------------------------------------------------------

# A module, and what it makes of a table p [5, 2] that is the same for all samples.
OF_A_TABLE = {
    "Linear(2, 2)": "m({p})",
    "Conv1d(2, 2, 3, padding=1)": "m({p}.T[None])[0].T",
    "Conv1d(2, 2, 1)": "m(m(torch.stack([{p}, 2 * {p}]).mT).tanh()).mT.sum(0)",
    "Conv2d(2, 2, 1)": "m({p}.T[None, :, :, None])[0, :, :, 0].T",
    "ConvTranspose1d(2, 2, 1)": "m({p}.T[None])[0].T",
    "AvgPool1d(3, 1, 1)": "m({p}.T[None])[0].T",
    "MaxPool1d(3, 1, 1)": "m({p}.T[None])[0].T",
    "Upsample(size=5)": "m({p}.T[None])[0].T",
    "PReLU()": "m({p})",
    "PReLU(2)": "m({p}) + m({p}.T[None])[0].T",
    "LayerNorm(2)": "m({p})",
    "BatchNorm1d(2).eval()": "m({p}) + m({p}.T[None])[0].T",
    "GroupNorm(1, 2)": "m({p}.T[None])[0].T",
    "InstanceNorm1d(2, affine=True)": "m({p}.T[None])[0].T",
    "Bilinear(2, 2, 2)": "m({p}, {p})",
    "LSTM(2, 2)": "m({p}[:, None])[0][:, 0]",
    "GRU(2, 2, batch_first=True)": "m({p}[None])[0][0]",
    "GRUCell(2, 2)": "m({p})",
    "MultiheadAttention(2, 1)": "m({p}[:, None], {p}[:, None], {p}[:, None])[0][:, 0]",
    "TransformerEncoderLayer(2, 1, 3, 0.0, batch_first=True)": "m({p}[None])[0]",
    "Sequential(nn.Embedding(5, 2), nn.Conv1d(5, 5, 1))": "m(torch.arange(5)[None])[0]",
}


@pytest.mark.parametrize("data", [False, True], ids=["parameter", "constant"])
@pytest.mark.parametrize("module", OF_A_TABLE)
def test_modules_of_tensors_without_samples(module: str, data: bool) -> None:
    """Samples meet the result behind the module: it has the gradients of every sample."""
    constant = "torch.linspace(-1, 1, 10, dtype=torch.float64).view(5, 2)"
    table = re.sub(r"\bm\(", "self.m1(", OF_A_TABLE[module])
    program = example(
        "h1 = " + table.format(p=constant if data else "self.p"),
        "h2 = self.m0(x).tanh() * h1",
        submodules=(
            "self.m0 = nn.Linear(2, 2)",
            f"self.m1 = nn.{module}",
            "self.p = nn.Parameter(torch.randn(5, 2))",
        ),
    )
    truth = truth_of(program)
    assert truth is not None
    for check in rearranging.CHECKS:
        outcome = run(program, truth, "record", check)
        assert outcome.kind == "right", (check, outcome.reason)


def test_packed_sequences() -> None:
    """Recurrent layers that read some are functions where functions are recorded."""
    program = example(
        "h1 = nn.utils.rnn.pack_padded_sequence(x, torch.full((N,), 2), True)",
        "h2 = nn.utils.rnn.pad_packed_sequence(self.m1(h1)[0])[0]",
        "h3 = self.m0(h2.movedim(0, 1).flatten(1))",
        submodules=("self.m0 = nn.Linear(4, 2)", "self.m1 = nn.GRU(2, 2)"),
    )
    truth = truth_of(program)
    assert truth is not None
    for route in ("auto", "record"):
        for check in rearranging.CHECKS:
            outcome = run(program, truth, route, check)
            assert outcome.kind == "right", (check, outcome.reason)
    assert run(program, truth, "plain").kind == "refused"


def test_an_axis_of_one_entry_is_not_taken_for_the_batch() -> None:
    """Samples of a pooling may be behind a new axis."""
    program = example("h1 = self.m1(x[None])", "h2 = self.m0(h1)[0]")
    submodules = ("self.m0 = nn.Linear(1, 2)", "self.m1 = nn.AvgPool2d((1, 2))")
    program = replace(program, submodules=submodules)
    truth = truth_of(program)
    assert truth is not None
    for route in ("auto", "record"):
        for check in rearranging.CHECKS:
            outcome = run(program, truth, route, check)
            assert outcome.kind == "right", outcome.reason


# --- Programs that were wrong, or crashed, or refused ---------------------------------------------

COPIES = ("h1 = self.m0(x)", "h2 = torch.cat([h1, 2 * h1])")
EMBEDDED = "self.m0 = nn.Embedding(5, 2)"


FOUND = {
    **{
        f"the state of {cls}, of copies": example(
            *COPIES,
            f"h3 = self.m1(h2)[1]{index}",
            "h4 = h3.unflatten(1, (2, -1)).permute(2, 0, 1, 3)",
            submodules=(EMBEDDED, f"self.m1 = nn.{cls}(2, 2, batch_first=True)"),
            shape=(2, 3),
            words=5,
        )
        for cls, index in {"RNN": "", "GRU": "", "LSTM": "[0]"}.items()
    },
    "a part of the state of copies": example(
        *COPIES,
        "h3 = self.m1(h2)[1]",
        "h4 = h3.split(N, 1)[-1][0]",
        submodules=(EMBEDDED, "self.m1 = nn.GRU(2, 2, batch_first=True)"),
        shape=(2, 3),
        words=5,
    ),
    "the state of samples in another order": example(
        "h1 = self.m0(x).transpose(0, 1).flip(1)",
        "h2 = self.m1(h1)[1]",
        "h3 = h2[0].flip(0)",
        submodules=(EMBEDDED, "self.m1 = nn.GRU(2, 2)"),
        shape=(3, 4),
        words=5,
    ),
    "a parameter that changes no loss": example(
        "h1 = self.m0(x) + self.p",
        "h2 = h1.flatten(1).log_softmax(1)",
        submodules=("self.m0 = nn.Linear(2, 2)", "self.p = nn.Parameter(torch.randn(1))"),
    ),
    **{
        f"data padded, {mode}, steps first": example(
            f"h1 = F.pad(x.transpose(0, 1), (1, 1), mode={mode!r})",
            f"h2 = F.pad(self.m0(h1), (1, 1), mode={mode!r}).transpose(0, 1)",
            submodules=("self.m0 = nn.Linear(4, 2)",),
        )
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    "data flattened, steps first": example(
        "h1 = torch.flatten(x.transpose(0, 1).unsqueeze(3), 2, 3)",
        "h2 = self.m0(h1).transpose(0, 1)",
    ),
    "an item that is a view changes in place": example(
        *("h1 = self.m0(x).transpose(0, 1)", "h1[0] *= 2", "h1[1:, :, 0] += h1[:-1, :, 1]"),
        *("h1.add_(h1)", "h2 = h1.transpose(0, 1).tanh()"),
    ),
    "copies that exchange places": example(
        *("h1 = torch.cat([x, 2 * x])", "h2 = self.m0(h1)", "h3 = h2.roll(N, 0) + 2 * h2"),
        *("h4 = self.m1(h3.tanh())", "h5 = h4.reshape(2, N, 2).transpose(0, 1)"),
        submodules=("self.m0 = nn.Linear(2, 2)", "self.m1 = nn.Linear(2, 2)"),
        shape=(3, 2),
    ),
    "copies of the samples and of none": example(
        *("h1 = self.m0(x)", "h2 = torch.cat([h1, h1.new_ones(N, 3, 3)]).tanh()"),
        *("h3 = self.m1(h2)", "h4 = h3.reshape(2, N, 2, -1).transpose(0, 1)"),
        submodules=("self.m0 = nn.Embedding(5, 3)", "self.m1 = nn.Conv1d(3, 2, 1)"),
        shape=(2, 3),
        words=5,
    ),
    "samples in another order, sent on a way": example(
        *("h1 = x.flip(0)", "h2 = torch.where(h1.detach()[:, 0, 0] > 0.1)[0]"),
        *("h3 = torch.zeros_like(h1).index_add(0, h2, self.m0(h1[h2]))", "h4 = h3.flip(0)"),
    ),
    "samples in another order, none of them chosen": example(
        *("h1 = x.flatten(1).sum(1).argsort()", "h2 = x.index_select(0, h1).reshape(-1, 2)"),
        *("h3 = h2.detach()[:, 0] > 1e9", "h2[h3] = self.m0(h2[h3])"),
        "h4 = h2.view(x.shape).index_select(0, h1.argsort())",
    ),
    **{
        f"rows {which}, {how}": example(
            "h1 = self.m0(x).reshape(-1, 2)",
            f"h2 = h1.detach()[:, 0] {condition}",
            "h3 = self.m2(self.m1(h1[h2]).tanh())",
            *changes,
            "h4 = h1.view(x.shape)",
            submodules=(
                "self.m0 = nn.Linear(2, 2)",
                "self.m1 = nn.Linear(2, 2)",
                "self.m2 = nn.LayerNorm(2)",
            ),
        )
        for which, condition in {
            "that are chosen": "> 0.1",
            "of which all are chosen": "> -1e9",
            "of which none is chosen": "> 1e9",
        }.items()
        for how, changes in {
            "set": ("h1[h2] = h3",),
            "set through a view": ("h1 = h1 * 1", "h5 = h1.view(x.shape)", "h1[h2] = h3"),
            "added": ("h1 = h1.index_add(0, torch.where(h2)[0], h3)",),
            "added in place": ("h1.index_add_(0, torch.where(h2)[0], h3)",),
            "scattered": ("h1 = h1.masked_scatter(h2[:, None], h3) + h1",),
        }.items()
    },
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_were_wrong(name: str) -> None:
    truth = truth_of(FOUND[name])
    assert truth is not None
    for check in rearranging.CHECKS:
        for route in ("auto", "record"):
            outcome = run(FOUND[name], truth, route, check)
            assert outcome.kind == "right", (check, route, outcome.reason, outcome.details)


# --- The library ----------------------------------------------------------------------------------

PROGRAMS = 150  # of each kind of sizes
# How many runs may be refused, of those that have a right answer.
REFUSED = 0.08


def right_or_refused(sizes: str, routes: tuple[str, ...], second: float) -> list[Entry]:
    entries = list(rearranging.checked(programs(PROGRAMS, 1, sizes), second, routes))
    others = [entry for entry in entries if entry.outcome.kind not in ("right", "refused")]
    assert not others, "\n\n".join(map(str, others[:3]))
    return entries


@pytest.mark.parametrize("sizes", rearranging.SIZES)
def test_random_programs(sizes: str) -> None:
    """What the library stores is right, or it says for which function or module it is not."""
    entries = right_or_refused(sizes, ("auto", "record"), second=0.4)
    assert len(entries) > 2.5 * PROGRAMS
    refused = [entry.outcome.general for entry in entries if entry.outcome.kind == "refused"]
    assert len(refused) <= REFUSED * len(entries), refused


@pytest.mark.parametrize("sizes", rearranging.SIZES)
def test_random_programs_without_converter(sizes: str) -> None:
    """Where functions have moved the samples, a warning says so."""
    entries = right_or_refused(sizes, ("plain",), second=0)
    right = [entry for entry in entries if entry.outcome.kind == "right"]
    assert len(right) > 0.6 * len(entries) > 0.4 * PROGRAMS

"""The benchmark of works that peers have compares, measures and reports; without the peers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmark.families import run
from benchmark.families.__main__ import main
from benchmark.families.contestants import CONTESTANTS, DAMPING, ekfac, influence_here
from benchmark.families.report import section
from benchmark.families.worker import FamilyWorker, Job, plain_pass
from benchmark.families.works import ALL, OURS, WORKS, data_set, max_norm
from benchmark.measure import deviation
from benchmark.peers import EVERY_PEER
from benchmark.worker import fingerprint

# what needs no installation, and small problems for it
HERE = [
    (work, peer, problem)
    for work, peer, problems in (
        ("clipped-sum", "vmap", ("tiny", "tiny-cnn", "tiny-lstm", "tiny-transformer")),
        ("square-norms", "vmap", ("tiny", "tiny-transformer")),
        ("gram", "vmap", ("tiny", "tiny-transformer")),
        ("projections", "vmap", ("tiny", "tiny-transformer")),
        ("ntk", "torch.func", ("tiny", "tiny-cnn")),
        ("eigenvalues", "torch.func", ("tiny", "tiny-cnn")),
    )
    for problem in problems
]


@pytest.mark.parametrize(("work", "peer", "problem"), HERE)
def test_numbers_agree(work: str, peer: str, problem: str) -> None:
    prints = []
    for name in (OURS, peer):
        step = CONTESTANTS[work, name].make(ALL[problem], WORKS[work])
        step()
        values = step()  # nothing is left over from the step before
        prints.append({key: fingerprint(value) for key, value in values.items()})
    assert prints[0].keys() == prints[1].keys()
    assert deviation(*prints) < WORKS[work].tolerance


def test_about_half_is_clipped() -> None:
    problem, norms = ALL["tiny"], []
    model, (X, y) = problem.make(), problem.data()
    for n in range(len(X)):
        loss = torch.nn.functional.cross_entropy(model(X[n : n + 1]), y[n : n + 1])
        found = torch.autograd.grad(loss, [*model.parameters()])
        norms.append(torch.cat([g.flatten() for g in found]).norm().item())
    assert sum(norm > max_norm(problem) for norm in norms) == len(X) // 2


@pytest.mark.parametrize("work", ["ekfac", "influence", "laplace", "accountant"])
def test_works_that_need_a_peer_run_here(work: str) -> None:
    worker = FamilyWorker("backpack", "cpu", "cpu")
    first = worker.answer(Job(work, "tiny-weights", OURS, first=True))
    assert "error" not in first and first["value"]
    figures = worker.answer(Job(work, "tiny-weights", OURS, first=False))
    assert figures["seconds"] > 0 and figures["plain"] > 0


def test_influence_is_what_it_says() -> None:
    problem, work = ALL["tiny-weights"], replace(WORKS["influence"], batches=2)
    model, data = problem.make(), data_set(problem, 2)
    ((X, y),) = data_set(problem, 1, seed=2)
    H = ekfac(model, data).to_dense().double()

    def gradients(X: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = []
        for n in range(len(X)):
            loss = torch.nn.functional.cross_entropy(model(X[n : n + 1]), y[n : n + 1])
            found = torch.autograd.grad(loss, [*model.parameters()])
            rows.append(torch.cat([g.flatten() for g in found]))
        return torch.stack(rows).double()

    train = torch.cat([gradients(*batch) for batch in data])
    damped = H + DAMPING * torch.eye(len(H), dtype=torch.float64)
    expected = gradients(X, y) @ torch.linalg.solve(damped, train.T) / len(train)
    scores = influence_here(problem, work)()["scores"]
    assert (scores - expected).norm() < 1e-4 * expected.norm()


def test_every_contestant_is_there() -> None:
    for work in WORKS.values():
        for name in (OURS, *work.peers):
            assert CONTESTANTS[work.name, name].library in EVERY_PEER
        assert all(problem in ALL for problem in work.problems)


def test_the_plain_pass_goes_over_all_batches() -> None:
    problem, work = ALL["tiny"], replace(WORKS["ekfac"], batches=3)
    batches = data_set(problem, 3)
    assert len(batches) == 3 and not torch.equal(batches[0][0], batches[1][0])
    assert plain_pass(problem, work)() == {}


@pytest.mark.slow
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "families.json"
    arguments = ["--works", "gram", "--problems", "tiny-transformer", "--peers", "vmap"]
    arguments += ["--rounds", "2", "--budget", "1", "--out", str(out)]
    assert main(arguments) == 0
    contents = json.loads(out.read_text())
    assert [cell["status"] for cell in contents["cells"]] == ["ok", "ok"]
    assert [len(cell["seconds"]) for cell in contents["cells"]] == [2, 2]
    assert str(Path.cwd()) not in out.read_text()
    report = out.with_suffix(".md").read_text()
    assert report == section(contents) and "÷ fastest" in report

    # another work is added, and the file says that there were two runs
    assert main([*arguments[:1], "square-norms", *arguments[2:], "--merge"]) == 0
    merged = json.loads(out.read_text())
    assert [c["work"] for c in merged["cells"]] == 2 * ["gram"] + 2 * ["square-norms"]
    assert len(merged["environment"]["earlier"]) == 1 and "measured again" in section(merged)

    # numbers that differ are not timed, and fail the run
    monkeypatch.setitem(WORKS, "gram", replace(WORKS["gram"], tolerance=-1.0))
    assert main(arguments) == 1
    differing = json.loads(out.read_text())["cells"][1]
    assert differing["status"] == "differs" and differing["seconds"] == []
    assert "deviate" in section(json.loads(out.read_text()))


def test_a_contestant_that_fails_says_why() -> None:
    cell = run.Cell("gram", "tiny", "vmap", seconds=[1.0], plain=[1.0])
    assert cell.failed({"error": "ValueError: no"})
    assert (cell.status, cell.reason, cell.seconds) == ("error", "ValueError: no", [])
    assert not cell.failed({"seconds": 1.0})

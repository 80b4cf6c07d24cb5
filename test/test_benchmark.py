"""The benchmark measures, compares and reports; what it finds on a tiny problem means nothing."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark import fast_paths, large_models, processes, recorded_models
from benchmark.__main__ import main
from benchmark.figures import Data, goals
from benchmark.floor import Floor, Rates, layers_of
from benchmark.libraries import Backpack, Loop, NotOffered, VMap
from benchmark.measure import deviation
from benchmark.plots import plot
from benchmark.problems import ALL, PROBLEMS, TINY
from benchmark.quantities import EVERY, FIRST, NONE, QUANTITIES, SETS
from benchmark.report import environment, markdown
from benchmark.worker import Job, Worker, fingerprint

LIGHT = [name for name in PROBLEMS if not name.startswith(("allcnnc", "wrn", "resnet"))]
RATES = Rates(operations=1e11, bytes=1e10)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command line; the released library and others need not be installed."""
    out = tmp_path_factory.mktemp("results") / "cpu.json"
    quantities = [NONE, "BatchGrad", "Variance", "KFAC", SETS[0]]
    arguments = ["--problems", "tiny", "tiny-lstm", "--quantities", *quantities]
    libraries = ["--libraries", "backpack", "vmap", "loop"]
    assert main([*arguments, *libraries, "--rounds", "2", "--threads", "1", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    ("status", "work"),
    [("limit", lambda: torch.empty(2**50)), ("error", lambda: torch.empty(-1))],
)
def test_a_lack_of_memory_is_a_limit(
    status: str, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "load", lambda self, problem: work())
    (found,) = Worker("backpack", "cpu", "cpu").answer(Job("tiny", NONE, first=True)).items()
    assert found[0] == status and found[1].startswith("RuntimeError: ")


def contents(results: Path) -> dict[str, Any]:
    return json.loads(results.read_text())


@pytest.mark.slow
def test_every_cell_has_figures_or_a_reason(results: Path) -> None:
    cells = contents(results)["cells"]
    assert len(cells) == 2 * 5 * 3
    for cell in cells:
        if cell["status"] == "ok":
            assert len(cell["seconds"]) == len(cell["plain"]) == 2
            assert min(cell["seconds"] + cell["plain"]) > 0
            assert cell["bytes"] >= 0
        else:
            assert cell["status"] == "absent" and cell["reason"] == "not offered"
    ours = [cell for cell in cells if cell["library"] == "backpack"]
    assert [cell["status"] for cell in ours] == 10 * ["ok"]
    for cell in ours:  # those of a set are timed with it
        parts = FIRST if cell["quantity"] == SETS[0] else ()
        assert {name: len(seconds) for name, seconds in cell["parts"].items()} == dict.fromkeys(
            parts, 2
        )


@pytest.mark.slow
def test_peers_find_the_same_values(results: Path) -> None:
    errors = [cell["error"] for cell in contents(results)["cells"] if cell["error"] is not None]
    assert len(errors) == 2 * 3 * 2
    assert max(errors) < 1e-4


@pytest.mark.slow
def test_the_environment_names_no_place(results: Path) -> None:
    environment = contents(results)["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["operations_per_second"] > 0 and environment["bytes_per_second"] > 0
    assert str(Path.cwd()) not in results.read_text()


@pytest.mark.slow
def test_the_report_is_a_function_of_the_file(results: Path) -> None:
    report = results.with_name("README.md").read_text()
    assert markdown(contents(results), "cpu.json", []) == markdown(
        contents(results), "cpu.json", []
    )
    assert "## MLP 8-6-3, N=5" in report
    assert main(["report", "--out", str(results)]) == 0
    assert results.with_name("README.md").read_text() == report


@pytest.mark.slow
def test_merging_keeps_the_other_cells(results: Path) -> None:
    before = contents(results)
    copy = results.with_name("merged.json")
    copy.write_text(json.dumps(before))
    chosen = ["--problems", "tiny", "--quantities", "KFAC", "--libraries", "backpack"]
    main([*chosen, "--rounds", "1", "--threads", "1", "--out", str(copy), "--merge"])
    after = contents(copy)
    assert len(after["cells"]) == len(before["cells"])
    changed = [b for a, b in zip(before["cells"], after["cells"], strict=True) if a != b]
    assert [(cell["quantity"], len(cell["seconds"])) for cell in changed] == [("KFAC", 1)]
    assert len(after["environment"]["earlier"]) == 1


@pytest.mark.parametrize("name", [*TINY])
def test_libraries_agree(name: str) -> None:
    problem = TINY[name]
    quantity = QUANTITIES[SETS[0]]
    values = []
    for library in (Backpack, VMap, Loop):
        step = library(problem, "cpu").prepare(quantity)
        values.append({key: fingerprint(value) for key, value in step().items()})
    assert deviation(values[0], values[1]) < 1e-4
    assert deviation(values[0], values[2]) < 1e-4


@pytest.mark.parametrize("quantity", EVERY)
def test_every_quantity_runs(quantity: str) -> None:
    library = Backpack(TINY["tiny-cnn"], "cpu")
    results = library.prepare(QUANTITIES[quantity])()
    assert tuple(results) == QUANTITIES[quantity].extensions
    library.release()
    assert all(parameter.grad is None for parameter in library.touched)


def test_what_is_not_offered_is_said() -> None:
    with pytest.raises(NotOffered):
        VMap(TINY["tiny"], "cpu").prepare(QUANTITIES["KFAC"])


def test_deviation_is_relative_and_sees_shapes() -> None:
    def values(*tensors: torch.Tensor) -> dict[str, Any]:
        return {"x": fingerprint([*tensors])}

    one, two = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.2])
    assert deviation(values(one), values(one)) == 0
    assert deviation(values(one), values(two)) == pytest.approx(0.1)
    # zero up to rounding, beside something large
    assert deviation(values(one, 1e-9 * one), values(one, 2e-9 * one)) < 1e-5
    assert deviation(values(one), values(one[None])) == math.inf
    assert deviation({}, {}) is None


@pytest.mark.parametrize("name", [*LIGHT, *TINY])
def test_floors_lie_above_the_plain_pass(name: str) -> None:
    problem = ALL[name]
    floor = Floor(problem)
    parameters = sum(p.numel() for p in problem.make().parameters())
    assert sum(layer.parameters for layer in floor.layers) == parameters
    for quantity in QUANTITIES.values():
        seconds = floor.seconds(quantity, 1.0, RATES)
        assert seconds == 1.0 if quantity.name == NONE else seconds > 1.0
        assert floor.result_bytes(quantity) >= 4 * parameters * len(quantity.extensions)


def test_floor_of_a_linear_layer() -> None:
    """Counted by hand: 128 samples, 784 inputs, 10 outputs."""
    floor = Floor(PROBLEMS["logreg"])
    operations, size = floor.extra(QUANTITIES["BatchGrad"])
    assert operations == 128 * 7840
    assert size == 4 * (128 * 7850 + 128 * (784 + 10))
    operations, _ = floor.extra(QUANTITIES["SumGradSquared"])
    assert operations == 2 * 128 * 7840


def test_a_set_costs_less_than_its_members() -> None:
    floor = Floor(PROBLEMS["3c3d"])
    each = [floor.seconds(QUANTITIES[name], 0.0, RATES) for name in FIRST]
    assert max(each) <= floor.seconds(QUANTITIES[SETS[0]], 0.0, RATES) < sum(each)


def test_layers_of_a_convolution() -> None:
    first, *_ = layers_of(PROBLEMS["3c3d"])
    assert (first.T, first.K, first.O) == (28 * 28, 75, 64)
    # (2·5 − 1)² differences of offsets instead of 5⁴ pairs
    assert first.offsets == pytest.approx(81 / 625)


def made_up(ratio: float) -> dict[str, Any]:
    """Return figures as if this library took ``ratio`` times what the released one takes."""
    cells = [
        {
            "problem": problem,
            "quantity": quantity,
            "library": library,
            "status": "ok",
            "reason": "",
            "seconds": [seconds, seconds, seconds],
            "plain": [1.0, 1.0, 1.0],
            "parts": {name: [3.0, 0.8, 0.8] for name in QUANTITIES[quantity].parts},
            "bytes": 2000,
            "plain_bytes": 1000,
            "error": None,
            "operations": 1e9,
            "floor_bytes": 1e9,
        }
        for problem in PROBLEMS
        for quantity in PROBLEMS[problem].quantities
        for library, seconds in (("backpack", 4 * ratio), ("upstream", 4.0))
    ]
    names = ("cpu", "gpu", "threads", "torch", "python", "date", "commit", "clock")
    return {
        "environment": dict.fromkeys(names)
        | {"libraries": {"backpack": "ours", "upstream": "release"}}
        | {"operations_per_second": 1e11, "bytes_per_second": 1e10},
        "problems": {
            name: {"title": name, "batch": p.batch, "classes": p.classes, "parameters": 10**6}
            for name, p in PROBLEMS.items()
        },
        "cells": cells,
    }


def test_goals_are_evaluated() -> None:
    good, bad = goals(Data(made_up(0.2))), goals(Data(made_up(2.0)))
    assert [goal.title for goal in good] == [goal.title for goal in bad]
    verdicts = {a.title: (a.verdict, b.verdict) for a, b in zip(good, bad, strict=True)}
    [fastest] = [v for title, v in verdicts.items() if "fastest peer" in title]
    assert fastest == ("met", "not met")
    [first] = [v for title, v in verdicts.items() if title.startswith("first order")]
    assert first == ("met", "not met")
    [together] = [v for title, v in verdicts.items() if "together" in title and "GGN" in title]
    assert together == ("met", "not met")
    assert goals(Data(made_up(0.2) | {"cells": []}))[0].verdict == "not measured"


def test_report_and_pictures_of_made_up_figures(tmp_path: Path) -> None:
    data = made_up(0.3)
    data["cells"][0] |= {"status": "error", "reason": "ValueError: a | b", "seconds": []}
    text = markdown(data, "cpu.json", plot(Data(data), tmp_path, "cpu"))
    assert "ValueError: a \\| b" in text
    assert "![cpu-overhead.png](cpu-overhead.png)" in text
    assert (tmp_path / "cpu-overhead.png").stat().st_size > 10_000


def test_the_report_names_earlier_runs() -> None:
    data = made_up(0.2)
    data["environment"] |= {"date": "2026-02-02", "commit": "bbb"}
    now = data["environment"]
    runs = [now | {"date": "2026-01-01", "commit": "aaa"}, dict(now)]
    text = environment(Data(data | {"environment": now | {"earlier": runs}}))
    assert text.endswith("not measured again then is of 2026-01-01 (commit aaa).")
    assert "aaa" not in environment(Data(data))
    runs = [runs[0] | {"cpu": "faster"}]
    text = environment(Data(data | {"environment": now | {"earlier": runs}}))
    assert text.endswith("is of 2026-01-01 (commit aaa), on another machine (faster).")


def test_what_fast_paths_earn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, paths = tmp_path / "fast_paths.json", ["own reductions", "memoised results"]
    problems = ["--problems", "tiny", "--quantities", "Variance", "KFAC"]
    rounds = ["--rounds", "2", "--threads", "1", "--out", str(out)]
    assert fast_paths.main([*problems, "--paths", *paths, *rounds]) == 0
    (run,) = contents(out)["runs"]
    figures = run["figures"]
    assert {(one["path"], one["quantity"]) for one in figures} == {
        ("own reductions", "Variance"),
        ("own reductions", "Variance, gradients summed"),
    }
    assert all(len(one["seconds"]) == len(one["without"]) == 2 for one in figures)
    assert all(len(one["bytes"]) == len(one["bytes_without"]) == 3 for one in figures)
    text = out.with_suffix(".md").read_text()
    assert text.count("| own reductions |") == 2
    printed = capsys.readouterr().out
    assert "own reductions" in printed and "own LSTM kernel" not in printed
    # who tries some of them does not write over the figures of all
    monkeypatch.setattr(fast_paths, "RESULTS", tmp_path / "results")
    assert fast_paths.parse(["--paths", *paths]).out is None
    assert fast_paths.parse([]).out == tmp_path / "results" / "fast_paths.json"


def test_figures_of_earlier_runs_stay(tmp_path: Path) -> None:
    """But for those that are measured again, with the environment that they are of."""
    out, paths = tmp_path / "fast_paths.json", ["own reductions", "usual layout"]
    then = {"threads": 7, "date": "2026-01-01"}
    names = [("mlp", paths[0], "Variance"), ("tiny", "no more", "Variance")]
    names += [("tiny", path, q) for path in paths for q in ("Variance", "BatchL2Grad")]
    earlier = [
        fast_paths.Figure(path, problem, q, [1.0], [1.5], environment=then)
        for problem, path, q in names
    ]
    fast_paths.write(earlier, out)
    chosen = ["--problems", "tiny", "--quantities", "Variance", "--paths", "own reductions"]
    assert fast_paths.main([*chosen, "--rounds", "1", "--threads", "1", "--out", str(out)]) == 0
    old, new = contents(out)["runs"]
    assert old["environment"] == then and new["environment"]["threads"] == 1
    stay = [each for each in names if each[1:] != (paths[0], "Variance") and each[1] in paths]
    kept = [(one["problem"], one["path"], one["quantity"]) for one in old["figures"]]
    assert kept == [names[0], *stay]
    assert {one["quantity"] for one in new["figures"]} == {"Variance", "Variance, gradients summed"}
    text = out.with_suffix(".md").read_text()
    assert "- threads 7, date 2026-01-01: 4 figures of mlp, tiny\n- threads 1, " in text


def test_fast_paths_that_are_needed() -> None:
    """A step that is not possible without a path is what the path earns."""
    slow = fast_paths.Figure("path", "mlp", "KFRA", reason="takes longer than 60 s")
    fast = fast_paths.Figure("path", "mlp", "KFAC", [1.0, 1.0, 1.0, 1.0], [1.2, 1.0, 1.2, 1.2])
    same = fast_paths.Figure("other", "mlp", "KFAC", [1.0, 1.0, 1.0, 1.0], [1.2, 1.0, 1.0, 1.2])
    assert slow.saves_time and fast.saves_time and not same.saves_time
    assert fast_paths.best([fast, slow], "time") is slow and fast.time == 1.2
    assert fast_paths.best([], "time") is None
    for least, once, saves in ((30, 90, True), (30, 11, False), (11, 99, False), (30, 0, None)):
        size, most = 2**20, [10 * 2**20] * 3
        others = [least * size, least * size, *([once * size] if once else [])]
        one = fast_paths.Figure("path", "mlp", "KFAC", bytes=most, bytes_without=others)
        assert one.saves_memory is saves and one.memory == least / 10 and not one.saves_time
        verdict = {True: "yes", None: "?", False: "no"}[saves]
        assert fast_paths.rows([one], "memory", ["path"])[1][0][-1] == verdict
    one.bytes_without = [11 * size]  # once is enough to see that it does not
    assert one.saves_memory is False
    with pytest.raises(TimeoutError), fast_paths.limit(0.01):
        while True:
            pass


TINY_GPT = ["--layers", "1", "--width", "8", "--heads", "2", "--vocabulary", "11"]
TINY_BATCH = ["--samples", "2", "--tokens", "4", "--rounds", "1"]


@pytest.mark.slow
def test_large_models(tmp_path: Path) -> None:
    out = tmp_path / "large_models.json"
    chosen = ["--quantities", "BatchL2Grad", "--out", str(out)]
    assert large_models.main([*TINY_GPT, *TINY_BATCH, *chosen]) == 0
    (figure,) = contents(out)["figures"]
    assert not figure["reason"] and len(figure["seconds"]) == len(figure["plain"]) == 1
    # tokens, positions, 12 H² + 13 H of the block, 2 H of the last normalisation
    assert figure["weights"] == 4 * (11 * 8 + 1024 * 8 + 12 * 64 + 13 * 8 + 2 * 8)
    assert "| BatchL2Grad |" in out.with_suffix(".md").read_text()


@pytest.mark.slow
def test_recorded_models(tmp_path: Path) -> None:
    out = tmp_path / "recorded_models.md"
    chosen = ["--models", "BERT", "ViT", "--quantities", "no extension", "BatchL2Grad"]
    assert recorded_models.main([*chosen, "--rounds", "1", "--out", str(out)]) == 0
    header, _, idle, norms = out.read_text().splitlines()[-4:]
    assert header == "| quantity | BERT | ViT | goal |"
    assert idle.startswith("| no extension | ") and idle.endswith("met |")
    assert all(float(cell) > 0 for cell in norms.split("|")[2:4])
    assert recorded_models.verdict("BatchGrad", [3.0, 4.0]) == "≤ 4.0: met"
    assert recorded_models.verdict("BatchGrad", [3.0, 4.1]) == "≤ 4.0: not met"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_device_of_large_models(device: str) -> None:
    """Figures of a GPU do not overwrite those of a CPU; what does not fit is told of both."""
    own = "" if device == "cpu" else "-cuda"
    args = large_models.parse(["--device", device])
    assert args.device == device and args.out.name == f"large_models{own}.json"
    assert large_models.parse(["--device", device, "--out", "mine.json"]).out == Path("mine.json")
    full: Exception = MemoryError() if device == "cpu" else torch.OutOfMemoryError("out of memory")
    assert large_models._why(full, 7 << 30) == "takes more than 7 GiB"


def test_goals_of_large_models() -> None:
    many = {"plain_bytes": 100, "weights": 50, "plain": [1.0, 1.0]}
    good = large_models.Figure("BatchL2Grad", [1.3, 1.3], bytes=120, **many)
    slow = large_models.Figure("BatchL2Grad", [1.5, 1.5], bytes=120, **many)
    large = large_models.Figure("BatchL2Grad", [1.3, 1.3], bytes=150, **many)
    none = large_models.Figure("KFAC", reason="takes more than 7 GiB")
    verdicts = [large_models.goal(one).split(": ")[1] for one in (good, slow, large, none)]
    assert verdicts == ["met", "not met", "not met", "not met"]
    text = [line[:2] for line in large_models.rows([none, good])]
    assert text == [["plain", "0.0"], ["KFAC", none.reason], ["BatchL2Grad", "0.0"]]


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    out = tmp_path / "processes.json"
    chosen = ["--quantities", processes.NONE, "BatchGrad", "Variance", "KFAC", "--samples", "4"]
    assert processes.main([*chosen, "--processes", "2", "--rounds", "1", "--out", str(out)]) == 0
    figures = contents(out)["figures"]
    assert len(figures) == 3 * 4
    whole, low = (
        {one["quantity"]: one["bytes"] for one in figures if one["precision"] == precision}
        for precision in (processes.AS_THEY_ARE, processes.BFLOAT16)
    )
    layers = [*pairwise(processes.WIDTHS)]
    gradient = 4 * sum((i + 1) * o for i, o in layers)
    triangles = 4 * sum(o * (o + 1) + i * (i + 1) // 2 for i, o in layers)  # a bias has B, too
    assert {one["gradient_bytes"] for one in figures} == {gradient}
    for sizes, share in ((whole, 1), (low, 2)):
        assert sizes[processes.NONE] == sizes["BatchGrad"] == 0
        for name, size in (("Variance", 2 * gradient), ("KFAC", triangles)):
            assert size < share * sizes[name] < size + 1000  # numbers of samples
    assert out.with_suffix(".md").read_text().count("| KFAC |") == 4


def test_model_of_a_network() -> None:
    network = processes.Network(bandwidth=1e9, latency=1e-3, request=1e-2)
    assert math.isclose(network.all_reduce(4, 1e9), 1.5 + 6e-3)
    one = processes.Figure("KFAC", 4, processes.WEAK, bytes=10**9, collectives=2)
    assert math.isclose(network.quantity(4, one), 4 * 4 * 1e-2 + 1.5 + 2 * 6e-3)
    assert network.quantity(4, processes.Figure("BatchGrad", 4, processes.WEAK)) == 0

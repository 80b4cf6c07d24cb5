"""Influence and Laplace approximations on several processes with samples of their own."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_operators_on_processes import batches, close, model
from test_several_processes import batch, in_processes
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from backpack.extensions import ProjectedGrad
from backpack.influence import Influence, ProjectedInfluence, TracIn
from backpack.laplace import Laplace
from backpack.linalg import EKFAC, GGN, DiagonalGGN, KroneckerGGN

CURVATURES: list[Any] = [
    KroneckerGGN,
    DiagonalGGN,
    EKFAC,
    partial(KroneckerGGN, fisher="empirical"),
    GGN,
    "identity",
]


def queries() -> tuple[Tensor, Tensor]:
    return batch([2], seed=9)


def losses() -> list[nn.Module]:
    return [nn.CrossEntropyLoss(ignore_index=1, reduction=how) for how in ("mean", "sum")]


def check_top(found: Any, whole: Any, k: int, harmful: bool) -> None:
    """Compare the values; samples whose targets are ignored have equal ones."""
    values, samples = found.top(k, queries(), harmful)
    close(values, whole.top(k, queries(), harmful)[0])
    close(values, whole.scores(queries()).gather(1, samples))
    assert all(len(set(row)) == k for row in samples.tolist())


def _scores(rank: int, count: int) -> None:
    """Those of one process that has the data of all, one after the other."""
    world, quiet = distributed.group.WORLD, {"progress": False}
    for loss in losses():
        for kind in CURVATURES:
            given: dict[str, Any] = {"damping": 0.1, "tolerance": 1e-11, **quiet}
            whole = Influence(model(), loss, batches(None), kind, process_group=None, **given)
            own = Influence(model(), loss, batches(rank), kind, process_group=world, **given)
            assert own.names == whole.names
            expected = whole.scores(queries())
            close(own.scores(queries()), expected)
            if kind is not GGN:
                close(own.self_scores(), whole.self_scores())
            if kind is not KroneckerGGN:
                continue
            inside = Influence(DistributedDataParallel(model()), loss, batches(rank), kind, **given)
            close(inside.scores(queries()), expected)
            assert inside.names == whole.names
            for harmful in (False, True):
                for k in (1, 6):  # more than the second process has
                    check_top(own, whole, k, harmful)
            close(own.top(3, expected), whole.top(3, expected))
            for name, part in whole.scores(queries(), by="module").items():
                close(own.scores(queries(), by="module")[name], part)
    default = Influence(model(), loss, batches(rank), process_group=world, **quiet)
    one = Influence(model(), loss, batches(None), process_group=None, **quiet)
    assert default.damping == pytest.approx(one.damping, rel=1e-12)


def test_scores(tmp_path: Path) -> None:
    in_processes(_scores, tmp_path)


class Tagger(nn.Sequential):
    """A prediction for each token, whose losses do not meet."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).flatten(0, 1)


def _tokens(rank: int, count: int) -> None:
    """Processes have samples of other lengths: results have zeros at the end."""
    torch.manual_seed(0)
    tagger = Tagger(nn.Embedding(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    loss = nn.CrossEntropyLoss()
    parts = [
        [(torch.randint(6, (n, T)), torch.randint(3, (n * T,))) for n, T in shapes]
        for shapes in ([(2, 5), (1, 2)], [(3, 4)])
    ]
    asked = (torch.randint(6, (2, 3)), torch.randint(3, (6,)))
    given: dict[str, Any] = {"damping": 0.1, "progress": False}
    whole = Influence(tagger, loss, parts[0] + parts[1], process_group=None, **given)
    world = distributed.group.WORLD
    own = Influence(tagger, loss, parts[rank], process_group=world, **given)
    found = own.token_scores(asked)
    assert found.shape == (2, 6, 5)
    close(found, whole.token_scores(asked))
    close(found.sum(2), own.scores(asked))
    for name, part in whole.token_scores(asked, by="parameter").items():
        close(own.token_scores(asked, by="parameter")[name], part)


def test_tokens(tmp_path: Path) -> None:
    in_processes(_tokens, tmp_path)


def _other_kinds(rank: int, count: int, folder: str) -> None:
    world, loss = distributed.group.WORLD, losses()[0]
    states = [{n: p + i for n, p in model().state_dict().items()} for i in (0, 0.1)]
    given: dict[str, Any] = {"progress": False}
    for projection in (None, ProjectedGrad(8)):
        options = {**given, "projection": projection}
        whole = TracIn(model(), loss, batches(None), states, process_group=None, **options)
        own = TracIn(model(), loss, batches(rank), states, process_group=world, **options)
        close(own.scores(queries()), whole.scores(queries()))
        close(own.self_scores(), whole.self_scores())
    projection = ProjectedGrad(8)
    whole = ProjectedInfluence(
        model(), loss, batches(None), projection, process_group=None, **given
    )
    own = ProjectedInfluence(model(), loss, batches(rank), projection, process_group=world, **given)
    close(own.scores(queries()), whole.scores(queries()))
    check_top(own, whole, 4, False)
    close(own.self_scores(), whole.self_scores())

    # files: each process has its own, and reads them again; the first one writes the curvature
    influence = Influence(model(), loss, batches(rank), damping=0.1, process_group=world, **given)
    expected = influence.scores(queries(), folder=f"{folder}/scores")
    files = sorted(path.parent.name for path in Path(folder, "scores").rglob("*.safetensors"))
    assert files.count(f"process{rank:03d}") == len(batches(rank))
    influence._gradients = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        influence.scores(queries())
    del influence._gradients
    influence.save(f"{folder}/curvature")
    distributed.barrier()
    loaded = Influence.load(
        f"{folder}/curvature", model(), loss, batches(rank), process_group=world, **given
    )
    close(loaded.scores(queries()), expected)
    close(loaded.scores(queries(), folder=f"{folder}/scores"), expected)


def test_other_kinds_and_files(tmp_path: Path) -> None:
    in_processes(partial(_other_kinds, folder=str(tmp_path)), tmp_path)


def _laplace(rank: int, count: int) -> None:
    """The posterior of all data; predictions need no other process."""
    world, (X, _) = distributed.group.WORLD, queries()
    regression = [[(x, torch.sin(x[:, 0, :3])) for x, _ in batches(r)] for r in range(count)]
    everything = [pair for part in regression for pair in part]
    cases: list[tuple[nn.Module, list[Any], list[Any]]] = [
        (loss, batches(None), batches(rank)) for loss in losses()
    ]
    cases.append((nn.MSELoss(), everything, regression[rank]))
    for loss, everything, part in cases:
        for kind in (KroneckerGGN, DiagonalGGN):
            for params in ("all", "last"):
                given: dict[str, Any] = {"params": params, "progress": False, "noise": 0.7}
                whole = Laplace(model(), loss, everything, kind, process_group=None, **given)
                own = Laplace(model(), loss, part, kind, process_group=world, **given)
                wrapped = DistributedDataParallel(model())
                inside = Laplace(wrapped, loss, part, kind, **given)
                for found in (own, inside):
                    evidence = found.log_marginal_likelihood()
                    close(evidence, whole.log_marginal_likelihood())
                    close(found.outputs(X), whole.outputs(X))
                    assert found.fit_prior_precision(per="layer") == pytest.approx(
                        whole.fit_prior_precision(per="layer"), rel=1e-6
                    )
                    held_out = found.fit_prior_precision(validation=part, num_values=5)
                    best = whole.fit_prior_precision(validation=everything, num_values=5)
                    assert held_out == best
                    close(
                        found._validation_losses(part, [0.1, 10.0], "probit"),
                        whole._validation_losses(everything, [0.1, 10.0], "probit"),
                    )
                    whole.prior_precision = 1.0
        same = copy.deepcopy(own)
        assert same.fit_prior_precision(validation=part, num_values=5) == best
        loaded = pickle.loads(pickle.dumps(own))
        with pytest.raises(NotImplementedError, match=r"process_group=torch\.distributed"):
            loaded.fit_prior_precision(validation=part)
        loaded.process_group = world
        assert loaded.fit_prior_precision(validation=part, num_values=5) == best
        if rank == 0:  # alone
            close(own.predict(X), inside.predict(X))


def test_laplace(tmp_path: Path) -> None:
    in_processes(_laplace, tmp_path)


def _empty(rank: int, count: int, folder: str) -> None:
    """A process whose batches are all empty has no scores to add."""
    own = [(X[: len(X) * rank], y[: len(y) * rank]) for X, y in batches(rank)]
    loss, states = nn.CrossEntropyLoss(), [model().state_dict()]
    world = {"process_group": distributed.group.WORLD, "progress": False}
    alone = {"process_group": None, "progress": False}
    new: list[Any] = [partial(Influence, curvature=kind, damping=0.1) for kind in CURVATURES]
    for kind in (*new, partial(TracIn, checkpoints=states), ProjectedInfluence):
        found, whole = kind(model(), loss, own, **world), kind(model(), loss, batches(1), **alone)
        close(found.scores(queries()), whole.scores(queries()))
        close(found.top(3, queries())[0], whole.top(3, queries())[0])
        if not isinstance(getattr(found, "curvature", 0), GGN):
            close(found.self_scores(), whole.self_scores())
    of_files = Influence(model(), loss, own, damping=0.1, **world)
    for _ in range(2):
        close(of_files.scores(queries(), folder=folder), of_files.scores(queries()))
    found, whole = Laplace(model(), loss, own, **world), Laplace(model(), loss, batches(1), **alone)
    close(found.log_marginal_likelihood(), whole.log_marginal_likelihood())


def test_processes_whose_batches_are_empty(tmp_path: Path) -> None:
    in_processes(partial(_empty, folder=str(tmp_path / "scores")), tmp_path)


def _mistakes(rank: int, count: int) -> None:
    """An error of one is one of all, at once."""
    world, loss = distributed.group.WORLD, nn.CrossEntropyLoss()
    given: dict[str, Any] = {"progress": False, "process_group": world}
    for make in (Influence, ProjectedInfluence, Laplace):
        with pytest.raises(NotImplementedError, match=r"process_group=torch\.distributed"):
            make(model(), loss, batches(rank))
        with pytest.raises((ValueError, RuntimeError), match="no batches"):
            make(model(), loss, batches(rank) if rank else [], **given)
    influence = Influence(model(), loss, batches(rank), damping=0.1, **given)
    with pytest.raises(RuntimeError, match="queries of Influence is another one on each"):
        influence.scores(batch([2], seed=rank))
    with pytest.raises(RuntimeError, match=r"[23] queries of Influence"):
        influence.scores(batch([2 + rank]))
    alone = GGN(model(), loss, batches(rank), process_group=None, progress=False)
    for curvature in (alone, KroneckerGGN(model(), loss, batches(rank), process_group=None)):
        other = Influence(model(), loss, batches(rank), curvature, 0.1, **given)
        with pytest.raises(RuntimeError, match="is another one on each process"):
            other.scores(queries())
    with pytest.raises(RuntimeError, match="curvature of Laplace is another one on each"):
        Laplace(model(), loss, batches(rank), curvature, **given)  # type: ignore[arg-type]

    def custom(net: Any, loss: Any, data: Any, params: Any, progress: bool) -> Any:
        return KroneckerGGN(net, loss, data, params, process_group=None)

    with pytest.raises(ValueError, match="does not take a process_group"):
        Influence(model(), loss, batches(rank), custom, 0.1, **given)
    free = Influence(model(), loss, batches(rank), GGN, 0.1, **given)
    with pytest.raises(NotImplementedError, match="self_scores"):
        free.self_scores()

    class Broken(nn.Module):
        reduction = "mean"
        fails = False

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if self.fails:
                raise ArithmeticError("a loss has failed")
            return nn.functional.cross_entropy(x, y)

    broken = Broken()
    data = batches(rank)
    identity = Influence(model(), loss, data, "identity", **given)
    identity._objective.loss_function = broken
    broken.fails = rank == 1
    with pytest.raises(ArithmeticError if rank else RuntimeError, match="a loss has failed"):
        identity.self_scores()
    close(influence.scores(queries()), influence.scores(queries()))  # the group still works


def test_mistakes_are_errors_on_all(tmp_path: Path) -> None:
    in_processes(_mistakes, tmp_path, within=100)

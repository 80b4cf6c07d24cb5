"""How each contestant does each work. Runs in the processes, one library in each."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmark.families.works import OURS, Work, data_set, max_norm
from benchmark.libraries import NotOffered, plain_attention
from benchmark.problems import Layers, LoopLSTM, Problem

Values = dict[str, Tensor]
# with a list of the values of all parameters: what is zero is so beside the others
Step = Callable[[], dict[str, Tensor | list[Tensor]]]

NUM_DIRECTIONS = 32
DAMPING = 1e-3
NUM_QUERIES = 100
PRIOR_PRECISION = 2.0


@dataclass(frozen=True)
class Contestant:
    """A way to do a work.

    Args:
        library: Name in :mod:`benchmark.peers`.
        make: Prepares a problem, returns what is timed.
    """

    library: str
    make: Callable[[Problem, Work], Step]


CONTESTANTS: dict[tuple[str, str], Contestant] = {}


def contestant(name: str, library: str, *works: str) -> Callable[[Any], Any]:
    """Register a function that prepares works; with several, it is given the work's name."""

    def register(make: Any) -> Any:
        for work in works:
            CONTESTANTS[work, name] = Contestant(library, make)
        return make

    return register


ours = partial(contestant, OURS, "backpack")


def by_sample(problem: Problem, layers: Layers | None = None) -> tuple[nn.Module, Callable]:
    """Return a model, and a function that computes individual gradients ``{name: [N, *p]}``."""
    model = problem.make(layers or Layers(LSTM=LoopLSTM))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Values, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))

    def gradients(X: Tensor, y: Tensor) -> Values:
        with plain_attention():
            return each(parameters, X, y)

    return model, gradients


def extended(problem: Problem) -> tuple[nn.Module, nn.Module]:
    """Return model and loss that are extended."""
    from backpack import extend

    # spelled so that nothing has to be converted where that is possible
    from backpack.custom_module.permute import Permute
    from backpack.custom_module.reduce_tuple import ReduceTuple

    model = problem.make(Layers(ReduceTuple=ReduceTuple, Permute=Permute))
    options = {"use_converter": True} if problem.converter else {}
    return extend(model, **options).eval(), extend(nn.CrossEntropyLoss())


# ------------------------------------------------------------------ clipped sums


@ours("clipped-sum")
def clipped_here(problem: Problem, work: Work) -> Step:
    from backpack import backpack
    from backpack.extensions import ClippedGrad

    (model, loss), (X, y) = extended(problem), problem.data()
    ext, parameters = ClippedGrad(max_norm(problem)), [*named(model, problem).values()]

    def step() -> dict:
        with backpack(ext, gradients=False):
            (len(X) * loss(model(X), y)).backward()
        sums = [p.grad_clipped for p in parameters]
        return {"sums": sums}

    return step


def named(model: nn.Module, problem: Problem) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in the plain model."""
    found = dict(model.named_parameters())
    return {name: found[name] for name, _ in problem.make().named_parameters()}


class SampleLoss(nn.CrossEntropyLoss):
    """The mean over positions; for ``reduction="none"`` one value for each sample."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(input, target, reduction="none")
        losses = losses.reshape(len(target), -1).mean(1)
        return losses if self.reduction == "none" else losses.mean()


@contestant("opacus ghost", "opacus", "clipped-sum")
def clipped_by_ghosts(problem: Problem, work: Work) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.layers import DPLSTM
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, (X, y) = problem.make(Layers(LSTM=DPLSTM)).train(), problem.data()
    norm = max_norm(problem)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=norm, strict=False)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=norm,
        expected_batch_size=len(X),
    )
    loss = DPLossFastGradientClipping(wrapped, optimizer, SampleLoss())
    parameters = named(model, problem)

    def step() -> dict:
        loss(wrapped(X), y).backward()
        sums = [p.grad for p in parameters.values()]
        optimizer.zero_grad(set_to_none=True)
        return {"sums": sums}

    return step


@contestant("opacus materialising", "opacus", "clipped-sum")
def clipped_by_materialising(problem: Problem, work: Work) -> Step:
    from opacus.grad_sample import GradSampleModule
    from opacus.layers import DPLSTM
    from opacus.optimizers import DPOptimizer

    model, (X, y) = problem.make(Layers(LSTM=DPLSTM)).train(), problem.data()
    wrapped = GradSampleModule(model, strict=False)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=max_norm(problem),
        expected_batch_size=len(X),
    )
    parameters, loss = named(model, problem), nn.CrossEntropyLoss()

    def step() -> dict:
        loss(wrapped(X), y).backward()
        optimizer.clip_and_accumulate()
        sums = [p.summed_grad for p in parameters.values()]
        optimizer.zero_grad(set_to_none=True)
        return {"sums": sums}

    return step


@contestant("vmap", "vmap", "clipped-sum")
def clipped_by_vmap(problem: Problem, work: Work) -> Step:
    (_, gradients), (X, y), norm = by_sample(problem), problem.data(), max_norm(problem)

    def step() -> dict:
        found = gradients(X, y)
        norms = sum(g.flatten(1).square().sum(1) for g in found.values()).sqrt()
        factors = (norm / norms).clamp(max=1)
        return {"sums": [torch.tensordot(factors, g, 1) for g in found.values()]}

    return step


# ------------------------------------------------------------------ what is made of kept factors


def directions(problem: Problem) -> Values:
    """Draw directions, ``{name: [D, *p]}``."""
    generator = torch.Generator().manual_seed(4)
    shapes = {name: p.shape for name, p in problem.make().named_parameters()}
    return {n: torch.randn(NUM_DIRECTIONS, *s, generator=generator) for n, s in shapes.items()}


KEPT = ("square-norms", "gram", "projections")


@ours(*KEPT)
def kept_here(problem: Problem, work: Work) -> Step:
    from backpack import backpack
    from backpack.extensions import BatchGrad

    (model, loss), (X, y), along = extended(problem), problem.data(), directions(problem)
    parameters, ext, name = named(model, problem), BatchGrad(factored=True), work.name

    def step() -> dict:
        with backpack(ext, gradients=False):
            (len(X) * loss(model(X), y)).backward()
        kept = {n: p.grad_batch for n, p in parameters.items()}
        if name == "square-norms":
            return {name: sum(g.square_norms() for g in kept.values())}
        if name == "gram":
            return {name: sum(g.gram() for g in kept.values())}
        return {name: sum(g.project(along[n]) for n, g in kept.items())}

    return step


@contestant("vmap", "vmap", *KEPT)
def kept_by_vmap(problem: Problem, work: Work) -> Step:
    (_, gradients), (X, y), name = by_sample(problem), problem.data(), work.name
    along = {n: v.flatten(1) for n, v in directions(problem).items()}

    def step() -> dict:
        kept = {n: g.flatten(1) for n, g in gradients(X, y).items()}
        if name == "square-norms":
            return {name: sum(g.square().sum(1) for g in kept.values())}
        if name == "gram":
            return {name: sum(g @ g.T for g in kept.values())}
        return {name: sum(g @ along[n].T for n, g in kept.items())}

    return step


@contestant("dattri-llm", "dattri-llm", *KEPT)
def kept_by_dattri(problem: Problem, work: Work) -> Step:
    from dattri_llm import REGISTER_ALL, HookManager, HookManagerConfig
    from dattri_llm.gradient import ops

    model, (X, y), name = problem.make(), problem.data(), work.name
    if name == "projections":
        raise NotOffered("has no product with given directions")
    manager = HookManager(model, config=HookManagerConfig(linear_io=REGISTER_ALL))

    def step() -> dict:
        with manager.collect():
            F.cross_entropy(model(X), y).mul(len(X)).backward()
            kept = manager.get_gradient()
        model.zero_grad()
        if name == "gram":
            return {name: kept.similarity(kept, reduce="all")}
        each = [ops.grad_norm_sq(kept.data[n], kept.layer_types[n]) for n in kept.layer_names]
        return {name: sum(each)}

    return step


# ------------------------------------------------------------------ curvature and influence


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that have Kronecker factors in all libraries."""
    return {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}


def vectors(problem: Problem) -> list[Tensor]:
    """Draw a vector for each weight."""
    generator = torch.Generator().manual_seed(3)
    layers = layers_of(problem.make()).values()
    return [torch.randn(layer.weight.shape, generator=generator) for layer in layers]


def ekfac(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Any:
    """Return this library's operator."""
    from backpack.linalg import EKFAC

    weights = [layer.weight for layer in layers_of(model).values()]
    options = {"fisher": "empirical", "approximation": "expand"}
    return EKFAC(model, nn.CrossEntropyLoss(), data, params=weights, **options)


@ours("ekfac")
def ekfac_here(problem: Problem, work: Work) -> Step:
    model, data, along = problem.make(), data_set(problem, work.batches), vectors(problem)
    flat = torch.cat([v.flatten() for v in along])

    def step() -> dict:
        pieces = (ekfac(model, data) @ flat).split([v.numel() for v in along])
        return {"product": [a.view_as(b) for a, b in zip(pieces, along, strict=True)]}

    return step


@contestant("curvlinops", "curvlinops", "ekfac")
def ekfac_by_curvlinops(problem: Problem, work: Work) -> Step:
    from curvlinops import EKFACLinearOperator

    if problem.positions:
        raise NotOffered("takes outputs [N, C] alone")
    model, data, along = problem.make(), data_set(problem, work.batches), vectors(problem)
    weights = [layer.weight for layer in layers_of(model).values()]
    arguments = (model, nn.CrossEntropyLoss(), weights, data)
    options = {"fisher_type": "empirical", "kfac_approx": "expand", "check_deterministic": False}
    counts = {"num_data": len(data) * problem.batch, "num_per_example_loss_terms": 1}

    def step() -> dict:
        return {"product": EKFACLinearOperator(*arguments, **options, **counts) @ along}

    return step


class Kronfluence:
    """An analyser for the layers of a problem, that works in a directory of its own."""

    def __init__(self, problem: Problem, work: Work):
        from kronfluence.analyzer import Analyzer, prepare_model
        from kronfluence.arguments import FactorArguments
        from kronfluence.task import Task

        model = problem.make()
        self.names = [*layers_of(model)]
        tracked = self.names

        class Classification(Task):
            def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False):
                return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

            def compute_measurement(self, batch: Any, model: nn.Module):
                return self.compute_train_loss(batch, model)

            def get_influence_tracked_modules(self) -> list[str]:
                return tracked

        task = Classification()
        self.folder = tempfile.TemporaryDirectory()
        self.analyzer = Analyzer(
            "benchmark",
            prepare_model(model, task),
            task,
            cpu=True,
            disable_tqdm=True,
            log_level=50,
            output_dir=self.folder.name,
        )
        data = data_set(problem, work.batches)
        self.data = TensorDataset(*map(torch.cat, zip(*data, strict=True)))
        self.batch = problem.batch
        self.arguments = FactorArguments(use_empirical_fisher=True)
        # the mean over positions is a sum here
        self.terms = prod(problem.positions)

    def fit(self) -> None:
        """Compute the factors."""
        self.analyzer.fit_all_factors(
            "factors",
            self.data,
            per_device_batch_size=self.batch,
            factor_args=self.arguments,
            overwrite_output_dir=True,
        )


@contestant("kronfluence", "kronfluence", "ekfac")
def ekfac_by_kronfluence(problem: Problem, work: Work) -> Step:
    own, along = Kronfluence(problem, work), vectors(problem)

    def step() -> dict:
        own.fit()
        found = own.analyzer.load_all_factors("factors")
        product = []
        for name, v in zip(own.names, along, strict=True):
            Q_o, Q_i = found["gradient_eigenvectors"][name], found["activation_eigenvectors"][name]
            eigenvalues = found["lambda_matrix"][name] / found["num_lambda_processed"][name]
            turned = eigenvalues * (Q_o.T @ v.flatten(1) @ Q_i)
            product.append((Q_o @ turned @ Q_i.T).view_as(v) / own.terms)
        return {"product": product}

    return step


@ours("influence")
def influence_here(problem: Problem, work: Work) -> Step:
    from backpack.influence import Influence

    model, data = problem.make(), data_set(problem, work.batches)
    ((X, y),) = data_set(problem, 1, seed=2)
    queries = X[:NUM_QUERIES], y[:NUM_QUERIES]
    weights = [layer.weight for layer in layers_of(model).values()]
    curvature = ekfac(model, data)

    def step() -> dict:
        influence = Influence(
            model, nn.CrossEntropyLoss(), data, curvature, damping=DAMPING, params=weights
        )
        return {"scores": influence.scores(queries)}

    return step


@contestant("kronfluence", "kronfluence", "influence")
def influence_by_kronfluence(problem: Problem, work: Work) -> Step:
    from kronfluence.arguments import ScoreArguments

    own = Kronfluence(problem, work)
    ((X, y),) = data_set(problem, 1, seed=2)
    queries = TensorDataset(X[:NUM_QUERIES], y[:NUM_QUERIES])
    own.fit()
    # theirs is not divided by the number of samples
    arguments = ScoreArguments(damping_factor=DAMPING * own.terms)

    def step() -> dict:
        own.analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            queries,
            own.data,
            per_device_query_batch_size=len(queries),
            per_device_train_batch_size=own.batch,
            score_args=arguments,
            overwrite_output_dir=True,
        )
        scores = own.analyzer.load_pairwise_scores("scores")["all_modules"]
        return {"scores": scores / len(own.data)}

    return step


# ------------------------------------------------------------------ kernels


@ours("ntk")
def kernel_here(problem: Problem, work: Work) -> Step:
    from backpack.linalg import NTK

    model, (X, _) = problem.make(), problem.data()
    return lambda: {"kernel": NTK(model, X).per_output()}


@contestant("torch.func", "vmap", "ntk")
def kernel_by_func(problem: Problem, work: Work) -> Step:
    model, (X, _) = problem.make(), problem.data()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def output(parameters: Values, x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x[None],))[0]

    each = vmap(jacrev(output), (None, 0))

    def step() -> dict:
        jacobians = [J.flatten(2) for J in each(parameters, X).values()]
        flat = [(J.flatten(0, 1) @ J.flatten(0, 1).T) for J in jacobians]
        N, C = jacobians[0].shape[:2]
        return {"kernel": sum(flat).reshape(N, C, N, C).transpose(1, 2)}

    return step


def _gram(problem: Problem, function: Callable[..., Tensor] | None, model: nn.Module) -> Any:
    from nngeometry.gram import GramMatrix
    from nngeometry.object.fspace import FMatDense

    data = TensorDataset(*problem.data())
    loader = DataLoader(data, batch_size=problem.batch)
    return GramMatrix(model=model, loader=loader, function=function, representation=FMatDense)


@contestant("nngeometry", "nngeometry", "ntk")
def kernel_by_nngeometry(problem: Problem, work: Work) -> Step:
    model = problem.make()
    # [C, N, C, N]
    return lambda: {"kernel": _gram(problem, None, model).to_torch().permute(1, 3, 0, 2)}


@ours("eigenvalues")
def eigenvalues_here(problem: Problem, work: Work) -> Step:
    from backpack import backpack
    from backpack.extensions import GradGram
    from backpack.utils.gram import total_gram

    (model, loss), (X, y), ext = extended(problem), problem.data(), GradGram()

    def step() -> dict:
        with backpack(ext, gradients=False):
            (len(X) * loss(model(X), y)).backward()
        return {"eigenvalues": torch.linalg.eigvalsh(total_gram(model))}

    return step


@contestant("torch.func", "vmap", "eigenvalues")
def eigenvalues_by_func(problem: Problem, work: Work) -> Step:
    (_, gradients), (X, y) = by_sample(problem), problem.data()

    def step() -> dict:
        each = [g.flatten(1) for g in gradients(X, y).values()]
        return {"eigenvalues": torch.linalg.eigvalsh(sum(g @ g.T for g in each))}

    return step


@contestant("nngeometry", "nngeometry", "eigenvalues")
def eigenvalues_by_nngeometry(problem: Problem, work: Work) -> Step:
    model = problem.make()

    def losses(X: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(X), y, reduction="none").unsqueeze(1)

    def step() -> dict:
        gram = _gram(problem, losses, model).to_torch()
        return {"eigenvalues": torch.linalg.eigvalsh(gram.reshape(problem.batch, problem.batch))}

    return step


# ------------------------------------------------------------------ numbers alone


STRUCTURES = {"kron": "KroneckerGGN", "diag": "DiagonalGGN"}


@ours("laplace")
def laplace_here(problem: Problem, work: Work) -> Step:
    from backpack import linalg
    from backpack.laplace import Laplace

    model, data = problem.make(), data_set(problem, 1)
    ((X, _),) = data_set(problem, 1, seed=2)

    def step() -> dict:
        values = {}
        for name, operator in STRUCTURES.items():
            laplace = Laplace(
                model,
                nn.CrossEntropyLoss(),
                data,
                curvature=getattr(linalg, operator),
                prior_precision=PRIOR_PRECISION,
                params="last",
            )
            values[f"{name} predictive"] = laplace.predict(X)
            values[f"{name} evidence"] = laplace.log_marginal_likelihood().reshape(1)
        return values

    return step


@contestant("laplace-torch", "laplace", "laplace")
def laplace_by_laplace(problem: Problem, work: Work) -> Step:
    from laplace import Laplace
    from laplace.curvature import CurvlinopsGGN

    model, (data,) = problem.make(), data_set(problem, 1)
    ((X, _),) = data_set(problem, 1, seed=2)
    loader = DataLoader(TensorDataset(*data), batch_size=problem.batch)

    def step() -> dict:
        values = {}
        for name in STRUCTURES:
            laplace = Laplace(
                model,
                "classification",
                subset_of_weights="last_layer",
                hessian_structure=name,
                prior_precision=PRIOR_PRECISION,
                backend=CurvlinopsGGN,
            )
            laplace.fit(loader)
            values[f"{name} predictive"] = laplace(X, pred_type="glm", link_approx="probit")
            values[f"{name} evidence"] = laplace.log_marginal_likelihood().reshape(1)
        return values

    return step


# steps, noise multiplier, sampling rate, δ
PRIVACY = ((1000, 1.0, 0.01, 1e-5), (10_000, 1.3, 256 / 60_000, 1e-5), (300, 0.7, 0.05, 1e-6))
ORDERS = (*range(2, 64), *range(64, 513, 16))


@ours("accountant")
def privacy_here(problem: Problem, work: Work) -> Step:
    from backpack.optim import privacy_spent

    return lambda: {"epsilon": torch.tensor([privacy_spent(*case) for case in PRIVACY])}


@contestant("opacus", "opacus", "accountant")
def privacy_by_opacus(problem: Problem, work: Work) -> Step:
    from opacus.accountants.analysis import rdp

    def spent(steps: int, noise: float, rate: float, delta: float) -> float:
        divergences = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=ORDERS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return rdp.get_privacy_spent(orders=ORDERS, rdp=divergences, delta=delta)[0]

    return lambda: {"epsilon": torch.tensor([spent(*case) for case in PRIVACY])}

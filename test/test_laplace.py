"""Laplace approximations against dense formulas in float64, and exact Bayesian regression."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from math import pi
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Generator, Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.distributions import MultivariateNormal
from torch.func import functional_call
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset, default_collate

from backpack.influence import Influence
from backpack.laplace import Laplace, predictive
from backpack.laplace.predictive import log_concentrations
from backpack.linalg import (
    EKFAC,
    GGN,
    DiagonalGGN,
    DiagonalHessian,
    DiagonalOperator,
    EmpiricalFisher,
    Hessian,
    KroneckerGGN,
    KroneckerOperator,
    ntk,
    structured,
    trace,
)
from backpack.linalg.structured import SpectralOperator
from backpack.utils.convert_parameters import parameter_list_to_vector, vector_to_parameter_list

N = 9
SIZES = (4, 3, 2)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Compute in double precision."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class LastState(nn.Module):
    """Functions in the forward; the layer that is called last is defined first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.lstm = nn.Linear(4, 3), nn.LSTM(2, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def problem(name: str, reduction: str = "mean") -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    mlp = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    X, labels = torch.randn(N, 3), torch.randint(3, (N,))
    if name == "mlp":
        return mlp, nn.CrossEntropyLoss(reduction=reduction), X, labels
    if name == "mse":
        return mlp, nn.MSELoss(reduction=reduction), X, torch.randn(N, 3)
    if name == "binary":
        return mlp, nn.BCEWithLogitsLoss(reduction=reduction), X, torch.rand(N, 3).round()
    return LastState(), nn.CrossEntropyLoss(reduction=reduction), torch.randn(N, 5, 2), labels


NAMES = ("mlp", "mse", "binary", "lstm")


def batches(X: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(SIZES), y.split(SIZES), strict=True))


def dense_jacobian(model: nn.Module, X: Tensor) -> Tensor:
    """[N, C, P]."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def output(vector: Tensor) -> Tensor:
        pieces = vector_to_parameter_list(vector, params.values())
        return functional_call(model, dict(zip(params, pieces, strict=True)), (X,))

    return jacobian(output, parameter_list_to_vector(params.values()))


def dense_curvature(kind: Any, model: nn.Module, loss: Any, X: Tensor, y: Tensor) -> Tensor:
    """Of the summed negative log likelihood; noise 0.7 for MSE."""
    summed = type(loss)(reduction="sum")
    scale = 1 / (2 * 0.7**2) if isinstance(loss, nn.MSELoss) else 1.0
    return scale * kind(model, summed, batches(X, y)).to_dense()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [KroneckerGGN, DiagonalGGN, "whole"])
@pytest.mark.parametrize("name", NAMES)
def test_dense_formulas(name: str, kind: Any, reduction: str) -> None:
    """Covariance of the outputs and marginal likelihood, from dense matrices."""
    model, loss, X, y = problem(name, reduction)
    data, delta, P = batches(X, y), 0.5, sum(p.numel() for p in model.parameters())
    whole = kind == "whole"
    curvature = KroneckerOperator([[GGN(model, loss, data).to_dense()]]) if whole else kind
    laplace = Laplace(model, loss, data, curvature, delta, noise=0.7)
    H = dense_curvature(GGN if whole else kind, model, loss, X, y)
    assert_close(laplace.curvature.to_dense(), H)
    precision = H + delta * torch.eye(P)
    new = torch.randn(4, *X.shape[1:])
    J = dense_jacobian(model, new)
    mean, covariance = laplace.outputs(new)
    assert_close(mean, model(new))
    assert_close(covariance, J @ torch.linalg.inv(precision) @ J.mT)
    theta = parameter_list_to_vector(model.parameters())
    f = model(X)
    if name == "mse":
        log_likelihood = torch.distributions.Normal(f, 0.7).log_prob(y).sum()
    else:
        log_likelihood = -type(loss)(reduction="sum")(f, y)
    for value in (delta, 3.0):
        prior = torch.distributions.Normal(0.0, value**-0.5).log_prob(theta).sum()
        logdet = torch.logdet(H + value * torch.eye(P))
        expected = log_likelihood + prior + P / 2 * torch.tensor(2 * pi).log() - logdet / 2
        assert_close(laplace.log_marginal_likelihood(value), expected.detach())
    assert_close(laplace.log_marginal_likelihood(), laplace.log_marginal_likelihood(delta))
    variance = covariance.diagonal(dim1=1, dim2=2)
    links = {"mlp": lambda f: f.softmax(1), "lstm": lambda f: f.softmax(1), "binary": torch.sigmoid}
    scaled = mean / (1 + pi / 8 * variance).sqrt()
    assert_close(laplace.predict(new), links[name](scaled) if name in links else mean)
    assert all(p.grad is None for p in model.parameters())


def test_linear_regression_is_exact() -> None:
    """The posterior of a linear model with normal noise is normal: nothing is approximated."""
    X, noise, delta = torch.randn(N, 3), 0.4, 2.0
    y = torch.randn(N, 1)
    covariance = torch.linalg.inv(X.T @ X / noise**2 + delta * torch.eye(3))
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_((covariance @ X.T @ y / noise**2).T)
    data = batches(X, y)
    whole = KroneckerOperator([[GGN(model, nn.MSELoss(), data).to_dense()]])
    laplace = Laplace(model, nn.MSELoss(), data, whole, delta, noise=noise)
    evidence = MultivariateNormal(torch.zeros(N), X @ X.T / delta + noise**2 * torch.eye(N))
    assert_close(laplace.log_marginal_likelihood(), evidence.log_prob(y.squeeze(1)))
    new = torch.randn(5, 3)
    mean, variance = laplace.outputs(new)
    assert_close(variance.flatten(), (new @ covariance * new).sum(1))
    assert_close(laplace.predict(new), new @ covariance @ X.T @ y / noise**2)
    # a linear model is its own linearisation
    for linearized in (True, False):
        drawn = laplace.sample_outputs(new, 20000, linearized)
        assert_close(drawn.var(0), variance.squeeze(2), rtol=0.06, atol=0.0)
        assert (drawn.mean(0) - mean).abs().max() < 0.02
    weights = laplace.sample_weights(20000)
    assert (weights.T.cov() - covariance).norm() < 0.05 * covariance.norm()


@pytest.mark.parametrize("kind", [KroneckerGGN, DiagonalGGN])
def test_fit_prior_precision(kind: Any) -> None:
    """At the maximum, ``δ |θ|² = sum f / (f + δ)`` (MacKay 1992)."""
    model, loss, X, y = problem("mlp")
    laplace = Laplace(model, loss, batches(X, y), kind)
    delta = laplace.fit_prior_precision()
    assert laplace.prior_precision == delta
    spectrum = laplace.curvature.spectrum
    theta = parameter_list_to_vector(model.parameters()).detach()
    effective = (spectrum / (spectrum + delta)).sum()
    assert_close(delta * theta.square().sum(), effective, rtol=1e-4, atol=0.0)
    best = laplace.log_marginal_likelihood()
    for other in (0.5 * delta, 0.98 * delta, 1.02 * delta, 2 * delta):
        assert laplace.log_marginal_likelihood(other) < best
    assert_close(laplace.posterior.to_dense(), laplace.curvature.inverse(delta).to_dense())
    assert laplace.fit_prior_precision(10 * delta, 20 * delta) == pytest.approx(10 * delta)


def means_of(kind: str, model: nn.Module) -> tuple[Any, Tensor]:
    """Give a prior mean in a form, and the vector that it stands for."""
    params = dict(model.named_parameters())
    others = {name: torch.randn_like(p) for name, p in params.items()}
    if kind == "one":
        return 0.3, torch.full_like(parameter_list_to_vector(params.values()), 0.3)
    if kind == "names":
        given, numbers = {"": -0.2, "2": 0.5, "0.bias": 1.5}, [-0.2, 1.5, 0.5, 0.5]
    elif kind == "list":
        given = numbers = [0.1, -0.2, 0.3, 0.4]
    elif kind == "tensors":
        return others, parameter_list_to_vector(others.values())
    else:  # of both kinds
        rest = [torch.full_like(p, 0.7) for p in params.values()][1:]
        of_both = parameter_list_to_vector([others["0.weight"], *rest])
        return {"": torch.tensor(0.7), "0.weight": others["0.weight"]}, of_both
    pieces = [torch.full_like(p, v) for p, v in zip(params.values(), numbers, strict=True)]
    return given, parameter_list_to_vector(pieces)


@pytest.mark.parametrize("given", ["one", "names", "list", "tensors", "both"])
@pytest.mark.parametrize("kind", [KroneckerGGN, DiagonalGGN])
def test_prior_mean(kind: Any, given: str) -> None:
    """It is in the marginal likelihood, and in the precision that fits; not in predictions."""
    model, loss, X, y = problem("mlp")
    value, mu = means_of(given, model)
    laplace = Laplace(model, loss, batches(X, y), kind, 0.5, prior_mean=value)
    theta = parameter_list_to_vector(model.parameters()).detach()
    H = dense_curvature(kind, model, loss, X, y)

    def evidence(delta: float) -> Tensor:
        prior = torch.distributions.Normal(mu, delta**-0.5).log_prob(theta).sum()
        logdet = torch.logdet(H + delta * torch.eye(31))
        constant = 31 / 2 * torch.tensor(2 * pi).log()
        return prior + constant - logdet / 2 - nn.CrossEntropyLoss(reduction="sum")(model(X), y)

    for delta in (0.5, 3.0):
        assert_close(laplace.log_marginal_likelihood(delta), evidence(delta).detach())
    delta = laplace.fit_prior_precision()
    assert isinstance(delta, float)
    assert_close(laplace.log_marginal_likelihood(), evidence(delta).detach())
    for other in (0.5 * delta, 0.98 * delta, 1.02 * delta, 2 * delta):
        assert evidence(other) < evidence(delta)
    plain = Laplace(model, loss, batches(X, y), kind, delta)
    assert_close(laplace.outputs(X), plain.outputs(X))
    assert laplace.log_marginal_likelihood() != plain.log_marginal_likelihood()
    plain.prior_mean = value
    assert_close(laplace.log_marginal_likelihood(), plain.log_marginal_likelihood())
    plain.prior_mean = laplace.prior_mean  # as it is returned
    assert_close(laplace.log_marginal_likelihood(), plain.log_marginal_likelihood())
    of_layers = laplace.fit_prior_precision(per="layer")
    assert isinstance(of_layers, dict)
    size = 16  # weights of the first layer
    spectrum = torch.linalg.eigvalsh(H[:size, :size])
    first = of_layers["0.weight"]
    effective = (spectrum / (spectrum + first)).sum()
    assert_close(first * (theta - mu)[:size].square().sum(), effective, rtol=1e-4, atol=0.0)


def test_prior_mean_that_is_returned() -> None:
    """A number as a number, others by name; what the caller does with its tensor has no effect."""
    model, loss, X, y = problem("mlp")
    laplace = Laplace(model, loss, [(X, y)])
    assert laplace.prior_mean == 0.0
    laplace.prior_mean = torch.tensor(0.25)
    assert laplace.prior_mean == 0.25
    mine = torch.randn(4, 3)
    laplace.prior_mean = {"": 0.5, "0.weight": mine}
    found, before = laplace.prior_mean, laplace.log_marginal_likelihood()
    assert isinstance(found, dict) and list(found) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert_close(found["0.weight"], mine)
    assert found["2.bias"] == 0.5
    expected = mine.clone()
    mine.zero_()
    assert_close(laplace.prior_mean["0.weight"], expected)  # type: ignore[index]
    assert_close(laplace.log_marginal_likelihood(), before)


def test_wrong_prior_means() -> None:
    """All stays as it was."""
    model, loss, X, y = problem("mlp")
    laplace = Laplace(model, loss, [(X, y)], prior_mean=0.5)
    before = laplace.log_marginal_likelihood()
    mistakes: list[tuple[Any, str]] = [
        ({"0": 1.0}, r"prior mean by name.*none for \['2.weight', '2.bias'\]"),
        ({"": 1.0, "3": 2.0}, r"\['3'\] are no parameters or modules"),
        ([1.0, 2.0], "prior mean is one number, or one for each of 4 parameters, got 2"),
        ({"": torch.ones(3)}, r"prior mean of '0.weight' .*shape \[4, 3\], got .*shape \[3\]"),
        (float("nan"), "prior mean of '0.weight' has entries that are not finite"),
    ]
    for value, message in mistakes:
        with pytest.raises(ValueError, match=message):
            laplace.prior_mean = value
        with pytest.raises(ValueError, match=message):
            Laplace(model, loss, [(X, y)], prior_mean=value)
    assert laplace.prior_mean == 0.5
    assert_close(laplace.log_marginal_likelihood(), before)


@pytest.mark.parametrize("kind", [KroneckerGGN, DiagonalGGN])
@pytest.mark.parametrize("name", ["mlp", "mse", "binary"])
def test_temperature(name: str, kind: Any) -> None:
    """The posterior and evidence of ``p(D | θ)^(1/T) p(θ)``, in dense formulas."""
    model, loss, X, y = problem(name)
    data, delta, T = batches(X, y), 0.5, 0.3
    given: dict[str, Any] = {"noise": 0.7} if name == "mse" else {}
    laplace = Laplace(model, loss, data, kind, delta, temperature=T, prior_mean=0.2, **given)
    assert laplace.temperature == T
    H = dense_curvature(kind, model, loss, X, y)
    assert_close(laplace.curvature.to_dense(), H)
    J, identity = dense_jacobian(model, X), torch.eye(31)
    theta = parameter_list_to_vector(model.parameters()).detach()
    f = model(X).detach()
    if name == "mse":
        log_likelihood = torch.distributions.Normal(f, 0.7).log_prob(y).sum()
    else:
        log_likelihood = -type(loss)(reduction="sum")(f, y)
    prior = torch.distributions.Normal(0.2, delta**-0.5).log_prob(theta).sum()
    for t in (T, 1.0, 5.0):
        laplace.temperature = t
        precision = H / t + delta * identity
        assert_close(laplace.outputs(X)[1], J @ torch.linalg.inv(precision) @ J.mT)
        constant = 31 / 2 * torch.tensor(2 * pi).log() - torch.logdet(precision) / 2
        expected = log_likelihood / t + prior + constant
        assert_close(laplace.log_marginal_likelihood(), expected)
        assert laplace.prior_precision == delta


@pytest.mark.parametrize("per", ["model", "layer"])
def test_fits_at_a_temperature(per: Any) -> None:
    """Precision and noise are at the maximum of the likelihood that is tempered."""
    model, loss, X, y = problem("mse")
    laplace = Laplace(model, loss, batches(X, y), DiagonalGGN, temperature=0.2)
    at_one = laplace.fit_prior_precision(per=per)
    best = laplace.log_marginal_likelihood()
    for factor in (0.97, 1.03):
        values = [at_one] if isinstance(at_one, float) else list(at_one.values())
        scaled: Any = [factor * v for v in values] if per == "layer" else factor * values[0]
        assert laplace.log_marginal_likelihood(scaled) < best
    noise = laplace.fit_noise()
    best = laplace.log_marginal_likelihood()
    for factor in (0.97, 1.03):
        laplace.noise = factor * noise
        assert laplace.log_marginal_likelihood() < best


def test_temperature_is_the_noise_of_regression() -> None:
    """The posterior of noise ``√T σ``, whose evidence has another constant."""
    model, loss, X, y = problem("mse")
    data = batches(X, y)
    hot = Laplace(model, loss, data, noise=0.3, temperature=4.0)
    noisy = Laplace(model, loss, data, noise=0.6)
    assert_close(hot.outputs(X), noisy.outputs(X))
    constants = [
        N * 3 * (torch.tensor(2 * pi).log() / 2 + torch.tensor(s).log()) for s in (0.3, 0.6)
    ]
    difference = constants[1] - constants[0] / 4
    expected = noisy.log_marginal_likelihood() + difference
    assert_close(hot.log_marginal_likelihood(), expected)


@pytest.mark.parametrize("limits", [(10.0, 1.0), (1.0, float("inf")), (1.0, float("nan"))])
def test_limits_without_a_number_between(limits: tuple[float, float]) -> None:
    """What is next to the best of an empty grid is no maximum. All stays as it was."""
    data = [(torch.rand(4, 5), torch.rand(4, 3))]
    laplace = Laplace(nn.Linear(5, 3), nn.MSELoss(), data)
    known = laplace.prior_precision, laplace.noise
    with pytest.raises(ValueError, match="largest prior precision is a number from the smallest"):
        laplace.fit_prior_precision(*limits)
    with pytest.raises(ValueError, match="largest prior precision is a number from the smallest"):
        laplace.fit_prior_precision(*limits, validation=data)
    with pytest.raises(ValueError, match="largest noise is a number from the smallest one, 1"):
        laplace.fit_noise(1.0, limits[1] / 20)
    assert (laplace.prior_precision, laplace.noise) == known


def test_wrong_temperatures() -> None:
    """All stays as it was."""
    model, loss, X, y = problem("mlp")
    laplace = Laplace(model, loss, [(X, y)])
    before = laplace.outputs(X)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature has to be positive"):
            laplace.temperature = wrong
        with pytest.raises(ValueError, match="temperature has to be positive"):
            Laplace(model, loss, [(X, y)], temperature=wrong)
    several: Any = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match=r"temperature has to be one .* of shape \[2\]"):
        laplace.temperature = several
    with pytest.raises(ValueError, match=r"prior precision has to be one .* of shape \[2\]"):
        laplace.prior_precision = {"": several}
    negative = Laplace(model, loss, [(X, y)], SpectralOperator(-torch.ones(31)), 1.5 * N)
    with pytest.raises(ValueError, match="not positive definite"):
        negative.temperature = 0.5
    assert negative.temperature == laplace.temperature == 1.0
    assert_close(negative.posterior.spectrum, torch.full((31,), 2 / N))
    assert_close(laplace.outputs(X), before)


def mask_of(kind: str, model: nn.Module) -> tuple[Any, Tensor]:
    """Give a choice of weights in a form, and the vector that it stands for."""
    params = dict(model.named_parameters())
    masks = {name: torch.rand(p.shape) < 0.4 for name, p in params.items()}
    if kind == "vector":
        chosen = parameter_list_to_vector(masks.values())
        return chosen, chosen
    if kind == "names":
        return masks, parameter_list_to_vector(masks.values())
    if kind == "some":  # the other parameters are certain
        pieces = [torch.zeros_like(m) for m in masks.values()]
        pieces[2] = masks["2.weight"]
        return {"2.weight": masks["2.weight"]}, parameter_list_to_vector(pieces)
    if kind == "module":
        pieces = [torch.ones_like(m) for m in masks.values()]
        pieces[2], pieces[3] = masks["2.weight"], torch.zeros_like(pieces[3])
        given = {"0": True, "2": False, "2.weight": masks["2.weight"]}
        return given, parameter_list_to_vector(pieces)
    return torch.ones(31, dtype=torch.bool), torch.ones(31, dtype=torch.bool)


@pytest.mark.parametrize("kind", [GGN, Hessian, KroneckerGGN, EKFAC, DiagonalGGN])
@pytest.mark.parametrize("given", ["vector", "names", "some", "module", "all"])
def test_subnetwork(given: str, kind: Any, monkeypatch: MonkeyPatch) -> None:
    """Weights that are not chosen are constants: dense formulas of the others alone."""
    monkeypatch.setattr(structured, "BLOCK_ENTRIES", 100)  # three columns at once
    model, loss, X, y = problem("mlp")
    value, S = mask_of(given, model)
    delta, T = (30.0 if kind is Hessian else 0.5), 0.8
    options: dict[str, Any] = {"weights": value, "temperature": T, "prior_mean": 0.1}
    laplace = Laplace(model, loss, batches(X, y), kind, delta, **options)
    k = int(S.sum())
    H = dense_curvature(kind, model, loss, X, y)[S][:, S]
    expected = torch.zeros(31, 31).masked_scatter(S.outer(S), H)
    assert_close(laplace.curvature.to_dense(), expected)
    precision = H / T + delta * torch.eye(k)
    new = torch.randn(4, 3)
    J = dense_jacobian(model, new)[:, :, S]
    mean, covariance = laplace.outputs(new)
    assert_close(mean, model(new))
    assert_close(covariance, J @ torch.linalg.inv(precision) @ J.mT)
    theta = parameter_list_to_vector(model.parameters()).detach()
    prior = torch.distributions.Normal(0.1, delta**-0.5).log_prob(theta[S]).sum()
    likelihood = -nn.CrossEntropyLoss(reduction="sum")(model(X), y).detach() / T
    constant = k / 2 * torch.tensor(2 * pi).log() - torch.logdet(precision) / 2
    assert_close(laplace.log_marginal_likelihood(), likelihood + prior + constant)
    drawn = laplace.sample_weights(20000)
    assert (drawn[:, ~S] == theta[~S]).all()
    error = drawn[:, S].T.cov() - torch.linalg.inv(precision)
    assert error.norm() < 0.05 * torch.linalg.inv(precision).norm()
    if kind is Hessian:
        return
    fitted = laplace.fit_prior_precision()
    assert isinstance(fitted, float)
    spectrum = torch.linalg.eigvalsh(H / T)
    effective = (spectrum / (spectrum + fitted)).sum()
    assert_close(fitted * (theta[S] - 0.1).square().sum(), effective, rtol=1e-4, atol=0.0)


def test_subnetwork_of_some_parameters() -> None:
    """Weights of the last layer; the whole matrix of these is that of a dense operator."""
    model, loss, X, y = problem("mlp")
    data, last = batches(X, y), list(model[2].parameters())  # type: ignore[index]
    chosen = torch.rand(15) < 0.5
    laplace = Laplace(model, loss, data, GGN, 0.5, "last", weights=chosen)
    H = N * GGN(model, loss, data, last).to_dense()[chosen][:, chosen]
    J = dense_jacobian(model, X)[:, :, -15:][:, :, chosen]
    inverse = torch.linalg.inv(H + 0.5 * torch.eye(len(H)))
    assert_close(laplace.outputs(X)[1], J @ inverse @ J.mT)
    by_name = {"2.weight": chosen[:12].view(3, 4), "2.bias": chosen[12:]}
    same = Laplace(model, loss, data, GGN(model, loss, data, last), 0.5, "last", weights=by_name)
    assert_close(same.outputs(X), laplace.outputs(X))
    everything = Laplace(model, loss, data, GGN, params="last", weights={"": True})
    matrix = KroneckerOperator([[GGN(model, loss, data, last).to_dense()]])
    whole = Laplace(model, loss, data, matrix, params="last")
    assert_close(everything.outputs(X), whole.outputs(X))
    assert_close(everything.log_marginal_likelihood(), whole.log_marginal_likelihood())


@pytest.mark.parametrize("name", ["mlp", "mse"])
def test_precisions_of_a_subnetwork(name: str) -> None:
    """Of a diagonal, each parameter has its own; what is certain has none to fit."""
    model, loss, X, y = problem(name)
    data, S = batches(X, y), torch.rand(31) < 0.5
    S[16:28], S[28] = False, True  # nothing of 2.weight
    laplace = Laplace(model, loss, data, DiagonalGGN, {"": 0.5, "2": 7.0}, weights=S)
    sizes = torch.tensor([12, 4, 12, 3])
    delta = torch.tensor([0.5, 0.5, 7.0, 7.0]).repeat_interleave(sizes)
    H = dense_curvature(DiagonalGGN, model, loss, X, y).diagonal()
    if name == "mse":
        laplace.noise = 0.7
    expected = torch.where(S, 1 / (H + delta), 0)
    assert_close(laplace.posterior.to_dense(), expected.diag())
    fitted = laplace.fit_prior_precision(per="parameter")
    assert isinstance(fitted, dict) and fitted["2.weight"] == 7.0
    theta = parameter_list_to_vector(model.parameters()).detach()
    for i, value in enumerate(fitted.values()):
        own = S & (torch.arange(4).repeat_interleave(sizes) == i)
        effective = (H[own] / (H[own] + value)).sum()
        if i != 2:
            assert_close(value * theta[own].square().sum(), effective, rtol=1e-4, atol=0.0)
    if name == "mse":
        noise = laplace.fit_noise()
        best = laplace.log_marginal_likelihood()
        for factor in (0.97, 1.03):
            laplace.noise = factor * noise
            assert laplace.log_marginal_likelihood() < best
    dense = Laplace(model, loss, data, GGN, weights=S)
    with pytest.raises(ValueError, match=r"A block of \d+ rows .* different prior precision"):
        dense.prior_precision = {"": 1.0, "2": 2.0}


def test_largest_variances() -> None:
    """Of the marginals, among those that are uncertain."""
    model, loss, X, y = problem("mlp")
    data = batches(X, y)
    laplace = Laplace(model, loss, data, DiagonalGGN, {"": 0.5, "2": 3.0})
    variances = laplace.posterior.to_dense().diagonal()
    chosen = laplace.largest_variances(7)
    assert chosen.dtype == torch.bool and chosen.sum() == 7
    assert variances[chosen].min() >= variances[~chosen].max()
    subnetwork = Laplace(model, loss, data, GGN, weights=chosen)
    inner = subnetwork.largest_variances(3)
    assert inner.sum() == 3 and not (inner & ~chosen).any()
    assert subnetwork.largest_variances(7).equal(chosen)
    for wrong in (0, 8):
        with pytest.raises(ValueError, match=f"from 1 to 7 uncertain weights, got {wrong}"):
            subnetwork.largest_variances(wrong)


def test_wrong_weights() -> None:
    model, loss, X, y = problem("mlp")
    data = batches(X, y)
    mistakes: list[tuple[Any, str]] = [
        (torch.ones(30, dtype=torch.bool), r"all parameters are .*shape \[31\], got bool .*\[30\]"),
        (torch.tensor([1, 2]), r"boolean tensor of shape \[31\], got int64 of shape \[2\]"),
        (torch.ones(31), r"got float32|got float64"),
        ({"0.weight": torch.ones(4, dtype=torch.bool)}, r"of 0.weight are .*\[4, 3\], got bool"),
        ({"3": True}, r"uncertain weights by name: \['3'\] are no parameters or modules"),
        ({"0.weight": torch.zeros(4, 3, dtype=torch.bool)}, "weights are none: choose one"),
    ]
    for value, message in mistakes:
        with pytest.raises(ValueError, match=message):
            Laplace(model, loss, data, GGN, weights=value)
    with pytest.raises(ValueError, match=r"structured operator.*weights=.*such as GGN"):
        Laplace(model, loss, data, GGN)
    some = torch.arange(31) < 3
    with pytest.raises(ValueError, match="not positive definite"):
        Laplace(model, loss, data, GGN(model, loss, data) * -1.0, 1e-3, weights=some)
    matrix = torch.eye(31)
    matrix[0, 1] = matrix[1, 0] = float("nan")
    broken = KroneckerOperator([[matrix]])
    with pytest.raises(ValueError, match="not finite among the 3 chosen rows"):
        Laplace(model, loss, data, broken, weights=some)


def negative_log_likelihood(laplace: Laplace, X: Tensor, y: Tensor, method: Any) -> Tensor:
    """Summed, of predictions."""
    if isinstance(laplace._objective.loss_function, nn.MSELoss):
        mean, covariance = laplace.outputs(X)
        deviation = (covariance.diagonal(dim1=1, dim2=2) + laplace.noise**2).sqrt()
        return -torch.distributions.Normal(mean, deviation).log_prob(y).sum()
    p = laplace.predict(X, method)
    if y.is_floating_point():
        return -(y * p.log() + (1 - y) * (1 - p).log()).sum()
    counts = y >= 0
    return -p[counts].gather(1, y[counts].unsqueeze(1)).log().sum()


def overfitted(name: str, reduction: str) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Train for a while on few samples, so that a certain precision is best."""
    model, loss, X, y = problem(name, reduction)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()
    model.zero_grad()
    return model, loss, X, y


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("name", "method"),
    [("mlp", "probit"), ("mlp", "bridge"), ("binary", "probit"), ("mse", "probit")],
)
def test_precision_for_other_data(name: str, method: Any, reduction: str) -> None:
    """The best of the grid, by predictions of Laplace approximations that have it."""
    model, loss, X, y = overfitted(name, reduction)
    data = batches(X, y)
    new = torch.randn(N, 3)
    targets = problem(name)[3] if name == "mlp" else model(new).detach()
    if name == "binary":
        targets = (targets + 4 * torch.randn(N, 3) > 0).double()
    elif name == "mse":
        targets = targets + 0.31 * torch.randn(N, 3)
    else:
        targets[3] = -100  # ignored
    given: dict[str, Any] = {"noise": 0.3} if name == "mse" else {}
    laplace = Laplace(model, loss, data, prior_precision=3.0, **given)
    lowest, highest = -2.0, 3.0
    values = 10 ** torch.linspace(lowest, highest, 11)
    losses = torch.stack(
        [
            negative_log_likelihood(
                Laplace(model, loss, data, prior_precision=float(v), **given), new, targets, method
            )
            for v in values
        ]
    )
    best = int(losses.argmin())
    assert 0 < best < 10
    options: dict[str, Any] = {"method": method, "num_values": 11}
    held_out = iter(batches(new, targets))  # read once
    found = laplace.fit_prior_precision(10**lowest, 10**highest, validation=held_out, **options)
    assert found == laplace.prior_precision == pytest.approx(float(values[best]))
    expected = Laplace(model, loss, data, prior_precision=float(values[best]), **given)
    assert_close(laplace.outputs(new), expected.outputs(new))
    own = laplace._validation_losses(batches(new, targets), values.tolist(), method)
    assert_close(own, losses)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_precision_for_other_data_that_is_refused() -> None:
    """All stays as it was."""
    model, loss, X, y = problem("mlp")
    data = batches(X, y)
    laplace = Laplace(model, loss, data, prior_precision=3.0)
    fit: Any = laplace.fit_prior_precision
    with pytest.raises(ValueError, match=r"got per='layer': .* marginal likelihood"):
        fit(per="layer", validation=data)
    with pytest.raises(ValueError, match="'probit' or 'bridge', got 'sampling'"):
        fit(validation=data, method="sampling")
    with pytest.raises(ValueError, match="num_values is at least 2, the limits, got 1"):
        fit(validation=data, num_values=1)
    with pytest.raises(ValueError, match="The data has no batches"):
        fit(validation=[])
    with pytest.raises(ValueError, match="No target of the data counts"):
        fit(validation=[(X, torch.full_like(y, -100))])
    with pytest.raises(ValueError, match="not finite, for 5 of 5 prior precisions"):
        fit(validation=[(X * float("nan"), y)], num_values=5)
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError, match="smallest prior precision has to be positive"):
            fit(wrong)
    negative = Laplace(model, loss, data, SpectralOperator(-torch.ones(31)), 10.0 * N)
    with pytest.raises(ValueError, match="not positive definite"):
        negative.fit_prior_precision(validation=data)
    model, squared, X, y = problem("mse")
    regression = Laplace(model, squared, [(X, y)])
    with pytest.raises(ValueError, match=r"targets of MSELoss have shape \[9, 1\].*\[9, 3\]"):
        regression.fit_prior_precision(validation=[(X, y[:, :1])])
    huber = Laplace(model, nn.SmoothL1Loss(), [(X, y)])
    with pytest.raises(ValueError, match=r"SmoothL1Loss .* says nothing"):
        huber.fit_prior_precision(validation=[(X, y)])
    two = Laplace(nn.Linear(3, 2), nn.CrossEntropyLoss(), [(X, torch.arange(len(X)) % 2)])
    with pytest.raises(ValueError, match=r"two classes does not depend.*method='probit'"):
        two.fit_prior_precision(validation=[(X, torch.arange(len(X)) % 2)], method="bridge")
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[index]
    with pytest.raises(RuntimeError, match="weights of the model"):
        regression.fit_prior_precision(validation=[(X, y)])
    assert laplace.prior_precision == 3.0


@pytest.mark.parametrize("kind", [KroneckerGGN, DiagonalGGN])
def test_noise_that_is_set(kind: Any) -> None:
    """As if it had been given; prior precisions stay."""
    model, loss, X, y = problem("mse")
    data, delta = batches(X, y), {"": 0.5, "2": 3.0}
    laplace, other = (Laplace(model, loss, data, kind, delta, noise=s) for s in (1.0, 0.3))
    before = laplace.log_marginal_likelihood()
    laplace.noise = torch.tensor(0.3)
    assert laplace.noise == pytest.approx(0.3)
    assert_close(laplace.log_marginal_likelihood(), other.log_marginal_likelihood())
    assert_close(laplace.outputs(X), other.outputs(X))
    assert_close(laplace.curvature.to_dense(), other.curvature.to_dense())
    assert laplace.prior_precision == other.prior_precision
    laplace.noise = 1.0
    assert_close(laplace.log_marginal_likelihood(), before)
    for wrong, message in ((0.0, "positive, got 0"), (torch.ones(2), r"one number.* shape \[2\]")):
        with pytest.raises(ValueError, match=message):
            laplace.noise = wrong  # type: ignore[assignment]
        with pytest.raises(ValueError, match=message):
            Laplace(model, loss, data, kind, noise=wrong)  # type: ignore[arg-type]


def test_noise_with_which_there_is_no_posterior() -> None:
    """All stays as it was."""
    model, loss, X, y = problem("mse")
    negative = KroneckerOperator([[torch.eye(31)]]) * -1.0
    curvature = SpectralOperator(-torch.ones(31))
    assert_close(curvature.to_dense(), negative.to_dense())
    laplace = Laplace(model, loss, batches(X, y), curvature, 100.0 * N, noise=1.0)
    before = laplace.log_marginal_likelihood(), laplace.outputs(X)
    with pytest.raises(ValueError, match="not positive definite"):
        laplace.noise = 0.01
    with pytest.raises(ValueError, match="not positive definite"):
        laplace.fit_noise()
    assert laplace.noise == 1.0
    assert_close((laplace.log_marginal_likelihood(), laplace.outputs(X)), before)


def test_fit_noise() -> None:
    """The evidence of Bayesian linear regression, with the whole matrix, is largest there."""
    X, y, delta = torch.randn(N, 3), torch.randn(N, 1), 2.0
    model = nn.Linear(3, 1, bias=False)
    data = batches(X, y)
    whole = KroneckerOperator([[GGN(model, nn.MSELoss(), data).to_dense()]])
    laplace = Laplace(model, nn.MSELoss(), data, whole, delta)
    noise = laplace.fit_noise()
    assert laplace.noise == noise
    w = model.weight.detach().T

    def evidence(noise: Tensor) -> Tensor:
        """Of the weights as they are, which no training has brought to the maximum."""
        fit = torch.distributions.Normal(X @ w, noise).log_prob(y).sum()
        logdet = torch.logdet(X.T @ X / noise**2 + delta * torch.eye(3))
        return fit + (3 * torch.tensor(delta).log() - delta * w.square().sum() - logdet) / 2

    assert_close(laplace.log_marginal_likelihood(), evidence(torch.tensor(noise)))
    log_noise = torch.tensor(noise).log().requires_grad_()
    (slope,) = torch.autograd.grad(evidence(log_noise.exp()), log_noise)
    assert abs(slope) < 1e-4
    for factor in (0.5, 0.98, 1.02, 2.0):
        assert evidence(torch.tensor(noise * factor)) < laplace.log_marginal_likelihood()
    assert laplace.fit_noise(10 * noise, 20 * noise) == pytest.approx(10 * noise)


@pytest.mark.parametrize("what", ["set", "fit"])
def test_noise_of_a_loss_without_any(what: str) -> None:
    model, loss, X, y = problem("mlp")
    laplace = Laplace(model, loss, batches(X, y))
    with pytest.raises(ValueError, match="CrossEntropyLoss has no noise"):
        if what == "set":
            laplace.noise = 2.0
        else:
            laplace.fit_noise()


def test_negative_curvature_is_no_precision() -> None:
    """A prior can make up for it; without, variances would be negative."""
    model, loss, X, y = problem("mlp")
    data = batches(10 * X, y)
    least = float(DiagonalHessian(model, loss, data).spectrum.min()) * N
    assert least < -0.1
    with pytest.raises(ValueError, match=r"precision of 0.1, .*not positive definite.*Use more"):
        Laplace(model, loss, data, DiagonalHessian, prior_precision=0.1)
    laplace = Laplace(model, loss, data, DiagonalHessian, prior_precision=1 - least)
    assert_close(laplace.posterior.spectrum.max(), torch.tensor(1.0))
    with pytest.raises(ValueError, match="not positive definite"):
        laplace.prior_precision = -least / 2
    with pytest.raises(ValueError, match="not positive definite"):
        laplace.fit_prior_precision()
    assert laplace.prior_precision == 1 - least
    assert laplace.fit_prior_precision(0.5 - least, 1 - least) <= 1 - least


@pytest.mark.parametrize("kind", [KroneckerGGN, DiagonalGGN, EKFAC])
@pytest.mark.parametrize("name", ["mlp", "lstm", "transposed"])
def test_precision_of_each_parameter(name: str, kind: Any) -> None:
    """By names, and one after the other: a diagonal prior in dense formulas."""
    if name == "transposed":  # the rows of its eigenvectors are in another order
        layers = nn.ConvTranspose1d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3)
        model, loss, X = nn.Sequential(*layers), nn.CrossEntropyLoss(), torch.randn(N, 2, 3)
        y = torch.randint(3, (N,))
    else:
        model, loss, X, y = problem(name)
    names = [n for n, _ in model.named_parameters()]
    layer = names[-1].rpartition(".")[0]
    by_name = {"": 0.5, layer: 2.0, names[-1]: 7.0}
    values = [by_name.get(n, 2.0 if n.startswith(f"{layer}.") else 0.5) for n in names]
    assert len(set(values)) == 3
    laplace = Laplace(model, loss, batches(X, y), kind, by_name)
    assert laplace.prior_precision == dict(zip(names, values, strict=True))
    params = list(model.parameters())
    delta = torch.cat([torch.full((p.numel(),), v) for p, v in zip(params, values, strict=True)])
    precision = dense_curvature(kind, model, loss, X, y) + delta.diag()
    new = torch.randn(4, *X.shape[1:])
    J = dense_jacobian(model, new)
    assert_close(laplace.outputs(new)[1], J @ torch.linalg.inv(precision) @ J.mT)
    assert_close(laplace.posterior.to_dense(), torch.linalg.inv(precision))
    theta = parameter_list_to_vector(params).detach()
    prior = torch.distributions.Normal(0.0, delta.rsqrt()).log_prob(theta).sum()
    constant = len(theta) / 2 * torch.tensor(2 * pi).log() - torch.logdet(precision) / 2
    expected = prior + constant - type(loss)(reduction="sum")(model(X), y).detach()
    assert_close(laplace.log_marginal_likelihood(), expected)
    for same in (values, torch.tensor(values)):
        laplace.prior_precision = 1.0
        assert_close(laplace.log_marginal_likelihood(same), expected)
        laplace.prior_precision = same
        assert_close(laplace.posterior.to_dense(), torch.linalg.inv(precision))
    laplace.prior_precision = torch.tensor(3.0)
    assert laplace.prior_precision == 3.0


@pytest.mark.parametrize("kind", [KroneckerGGN, DiagonalGGN, EKFAC])
@pytest.mark.parametrize("given", ["one", "each", "list", "names"])
def test_gradient_of_the_marginal_likelihood(given: str, kind: Any) -> None:
    """That of the dense formula, for precisions that are tensors: it was a constant."""
    model, loss, X, y = problem("mlp")
    laplace = Laplace(model, loss, batches(X, y), kind)
    logs = torch.randn(() if given == "one" else 4, requires_grad=True)
    deltas = logs.exp()
    forms = {"one": deltas, "each": deltas, "list": [*deltas.expand(4)]}
    forms["names"] = {"0": deltas.expand(4)[0], "2": deltas.expand(4)[2]}
    value = laplace.log_marginal_likelihood(forms[given])
    (found,) = torch.autograd.grad(value, logs, retain_graph=True)
    sizes = torch.tensor([p.numel() for p in model.parameters()])
    each = deltas.expand(4)[[0, 0, 2, 2]] if given == "names" else deltas.expand(4)
    delta = each.repeat_interleave(sizes)
    theta = parameter_list_to_vector(model.parameters()).detach()
    logdet = torch.logdet(laplace.curvature.to_dense() + delta.diag())
    expected = (delta.log().sum() - (delta * theta.square()).sum() - logdet) / 2
    assert_close(found, *torch.autograd.grad(expected, logs))
    assert not laplace.log_marginal_likelihood(deltas.detach()).requires_grad
    laplace.prior_precision = forms[given]  # type: ignore[assignment]
    assert not laplace.outputs(X)[1].requires_grad


@pytest.mark.parametrize("per", ["layer", "parameter"])
@pytest.mark.parametrize("kind", [KroneckerGGN, DiagonalGGN])
def test_fit_precision_of_each_part(kind: Any, per: Any) -> None:
    """The condition of MacKay (1992) holds in each part."""
    model, loss, X, y = problem("mlp")
    data = batches(X, y)
    laplace = Laplace(model, loss, data, kind)
    of_model = laplace.fit_prior_precision()
    best = laplace.log_marginal_likelihood()
    found = laplace.fit_prior_precision(per=per)
    assert isinstance(found, dict) and found == laplace.prior_precision
    assert laplace.log_marginal_likelihood() > best
    layers = model[0], model[2]
    groups = (
        [[*m.parameters()] for m in layers] if per == "layer" else [[p] for p in model.parameters()]
    )
    by_parameter = dict(zip(model.parameters(), found.values(), strict=True))
    for group in groups:
        (delta,) = {by_parameter[p] for p in group}
        squares = sum(p.detach().square().sum() for p in group)
        H = dense_curvature(lambda *a, g=group: kind(*a, params=g), model, loss, X, y)
        spectrum = torch.linalg.eigvalsh(H)
        effective = (spectrum / (spectrum + delta)).sum()
        assert_close(delta * squares, effective, rtol=1e-4, atol=0.0)
    assert of_model not in found.values()


def test_wrong_precisions() -> None:
    model, loss, X, y = problem("mlp")
    data = batches(X, y)
    laplace = Laplace(model, loss, data)
    mistakes: list[tuple[Any, str]] = [
        ({"0": 1.0}, r"none for \['2.weight', '2.bias'\]"),
        ({"": 1.0, "3": 2.0}, r"\['3'\] are no parameters or modules"),
        ([1.0, 2.0], "one for each of 4 parameters, got 2"),
        ({"": 1.0, "0": -2.0}, "positive, got -2"),
    ]
    for value, message in mistakes:
        with pytest.raises(ValueError, match=message):
            laplace.prior_precision = value
        with pytest.raises(ValueError, match=message):
            laplace.log_marginal_likelihood(value)
    with pytest.raises(ValueError, match="'model', 'layer' or 'parameter', got 'block'"):
        laplace.fit_prior_precision(per="block")  # type: ignore[arg-type]
    whole = KroneckerOperator([[GGN(model, loss, data).to_dense()]])
    with pytest.raises(ValueError, match=r"A block of 31 rows .* different prior precision"):
        Laplace(model, loss, data, whole, {"": 1.0, "0": 2.0})


@pytest.mark.parametrize("kind", [Laplace, Influence])
def test_converter_reaches_the_curvature(kind: Any) -> None:
    model, loss, X, y = problem("lstm")
    seen: list[Any] = []

    def curvature(*arguments: Any, use_converter: Any = False, **options: Any) -> Any:
        seen.append(use_converter)
        return KroneckerGGN(*arguments, use_converter=use_converter, **options)

    def without(*arguments: Any, params: Any, progress: bool) -> Any:
        return KroneckerGGN(*arguments, params=params, progress=progress)

    found = [
        kind(model, loss, batches(X, y), c, use_converter="trace").curvature.to_dense()
        for c in (curvature, without)
    ]
    assert seen == ["trace"]
    assert_close(found[0], found[1])


def test_sampling_runs_the_model_with_the_weights() -> None:
    model, loss, X, y = problem("lstm")
    laplace = Laplace(model, loss, batches(X, y), prior_precision=0.5)
    new = torch.randn(3, 5, 2)
    weights = laplace.sample_weights(7, Generator().manual_seed(1))
    names = [name for name, _ in model.named_parameters()]
    expected = []
    for row in weights:
        pieces = vector_to_parameter_list(row, model.parameters())
        expected.append(functional_call(model, dict(zip(names, pieces, strict=True)), (new,)))
    outputs = torch.stack(expected).detach()
    found = laplace.sample_outputs(new, 7, linearized=False, generator=Generator().manual_seed(1))
    assert_close(found, outputs)
    predicted = laplace.predict(new, "sampling", 7, Generator().manual_seed(1))
    assert_close(predicted, outputs.softmax(-1).mean(0))


def test_sampling_leaves_a_layer_with_two_names_as_it_was() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.again = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.first(x))

    model, X = Twice(), torch.rand(4, 3)
    laplace = Laplace(model, nn.MSELoss(), [(X, torch.rand(4, 3))], DiagonalGGN)
    before, parameters = model(X), list(model.parameters())
    (drawn,) = laplace.sample_outputs(X, 1, False, Generator().manual_seed(0))
    weight, bias = laplace.sample_weights(1, Generator().manual_seed(0))[0].split([9, 3])
    once = X @ weight.view(3, 3).T + bias
    assert_close(drawn, once @ weight.view(3, 3).T + bias)
    assert_close(model(X), before)
    assert list(map(id, model.parameters())) == list(map(id, parameters))


def test_monte_carlo() -> None:
    """The mean of the softmax over the distribution of the outputs."""
    model, loss, X, y = problem("mlp")
    laplace = Laplace(model, loss, batches(X, y), prior_precision=0.5)
    mean, covariance = laplace.outputs(X)
    drawn = MultivariateNormal(mean, covariance + 1e-12 * torch.eye(3)).sample((20000,))
    found = laplace.predict(X, "monte carlo", 20000, Generator().manual_seed(0))
    assert (found - drawn.softmax(-1).mean(0)).abs().max() < 0.01
    closed = laplace.predict(X)
    assert (closed - found).abs().max() < (closed - mean.softmax(1)).abs().max()


def of_centred(covariance: Tensor) -> Tensor:
    """Variances of logits without their mean, and that of the mean: ``[N, C, C] -> [N, C + 1]``."""
    count = len(covariance[0])
    centre = torch.cat([torch.eye(count) - 1 / count, torch.full((1, count), 1 / count)])
    return (centre @ covariance @ centre.T).diagonal(dim1=1, dim2=2)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_bridge_inverts_the_laplace_approximation_of_a_dirichlet(count: int) -> None:
    """Mode and curvature of a Dirichlet in its logits; what these have in common is no matter."""
    alphas = torch.rand(5, count) * 10 + 0.1
    means, covariances = [], []
    for alpha in alphas:
        mode = alpha.log() - alpha.log().mean()
        H = hessian(lambda x, a=alpha: -(a * x.log_softmax(0)).sum(), mode)
        (slope,) = torch.autograd.grad(
            (alpha * (x := mode.clone().requires_grad_()).log_softmax(0)).sum(), x
        )
        assert slope.abs().max() < 1e-12
        shared = torch.rand(count)
        common = shared.unsqueeze(1) + shared + 3.0
        means.append(mode + torch.randn(()))
        covariances.append(torch.linalg.pinv(H, hermitian=True) + common)
    found = log_concentrations(torch.stack(means), of_centred(torch.stack(covariances))).exp()
    assert_close(found, alphas)


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_bridge(name: str) -> None:
    """The formula, from dense matrices and centred logits."""
    model, loss, X, y = problem(name)
    laplace = Laplace(model, loss, batches(X, y), prior_precision=0.5)
    J = dense_jacobian(model, X)
    center = torch.eye(3) - 1 / 3
    mu = model(X).detach() @ center
    sigma = center @ J @ laplace.posterior.to_dense() @ J.mT @ center
    sums = (-mu).exp().sum(1, keepdim=True)
    alpha = (1 - 2 / 3 + mu.exp() / 9 * sums) / sigma.diagonal(dim1=1, dim2=2)
    assert_close(laplace.dirichlet(X), alpha)
    assert_close(laplace.predict(X, "bridge"), alpha / alpha.sum(1, keepdim=True))
    two = nn.Sequential(nn.Linear(3, 2))
    of_two = Laplace(two, loss, [(X[:, :3], y % 2)]) if name == "mlp" else None
    if of_two is not None:
        assert_close(of_two.predict(X, "bridge"), two(X).softmax(1).detach())


OF_POSTERIORS: dict[str, Any] = {
    "factors": lambda *args: {"curvature": KroneckerGGN},
    "diagonal": lambda *args: {"curvature": DiagonalGGN},
    "eigenvalues": lambda *args: {"curvature": EKFAC},
    "joined": lambda *args: {"curvature": KroneckerGGN(*args, joint_bias=True)},
    "some": lambda model, *_: {
        "curvature": GGN,
        "weights": {name: i % 3 == 0 for i, (name, _) in enumerate(model.named_parameters())},
    },
}


@pytest.mark.parametrize("entries", [None, 60, 1])
@pytest.mark.parametrize("kind", OF_POSTERIORS)
@pytest.mark.parametrize("name", ["mlp", "binary", "lstm", "positions"])
def test_predictions_need_variances_alone(
    name: str, kind: str, entries: int | None, monkeypatch: MonkeyPatch
) -> None:
    """They are the diagonals of dense covariances, which are not formed, in blocks of any size."""
    model, loss, X, y = problem("mlp" if name == "positions" else name)
    if name == "positions":  # at which the first weight acts
        model = nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Flatten(), nn.Linear(10, 3))
        X = torch.randn(N, 2, 9)
    if kind == "joined" and name == "lstm":
        pytest.skip("recurrent layers join no biases")
    data = batches(X, y)
    options = OF_POSTERIORS[kind](model, loss, data)
    laplace = Laplace(model, loss, data, prior_precision=0.7, **options)
    with monkeypatch.context() as patch:
        if entries is not None:
            patch.setattr(ntk, "BLOCK_ENTRIES", entries)
        patch.setattr(predictive, "output_covariances", None)
        found = laplace.predict(X)
        bridge = laplace.predict(X, "bridge") if name != "binary" and kind != "some" else None
        laplace.fit_prior_precision(validation=data, num_values=3)
        fitted = laplace.predict(X)
    J, logits = dense_jacobian(model, X), model(X).detach()
    link = torch.sigmoid if name == "binary" else partial(torch.softmax, dim=1)
    assert_close(laplace.predict(X), fitted)
    for own, precision in ((found, 0.7), (fitted, laplace.prior_precision)):
        laplace.prior_precision = precision
        covariance = J @ laplace.posterior.to_dense() @ J.mT
        scale = (1 + pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt()
        assert_close(own, link(logits / scale))
        if bridge is not None and own is found:
            alpha = log_concentrations(logits, of_centred(covariance)).exp()
            assert_close(bridge, alpha / alpha.sum(1, keepdim=True))


def test_bridge_of_large_logits() -> None:
    """Nothing overflows in single precision."""
    mean = torch.tensor([[300.0, 0.0, -300.0]], dtype=torch.float32)
    variances = of_centred(torch.eye(3)[None])
    found = log_concentrations(mean, variances.float())
    assert_close(found[0].softmax(0), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float32))
    exact = log_concentrations(mean.double(), variances)
    assert_close(found.double(), exact, rtol=1e-6, atol=1e-4)


def test_wrong_bridges() -> None:
    model, loss, X, y = problem("mlp")
    for name in ("binary", "mse"):
        other = problem(name)
        laplace = Laplace(*other[:2], batches(*other[2:]))
        for use in (laplace.dirichlet, lambda x, own=laplace: own.predict(x, "bridge")):
            with pytest.raises(ValueError, match=r"bridge is for CrossEntropyLoss, got (BCE|MSE)"):
                use(other[2])
    frozen = {"2.bias": torch.tensor([True, False, False])}
    one = Laplace(model, loss, [(X, y)], GGN, weights=frozen)
    assert one.dirichlet(X).shape == (N, 3)
    none = nn.Sequential(nn.Linear(3, 3, bias=False))
    with pytest.raises(
        ValueError, match=r"got 3 classes, and 3 of 27 variances that cannot be told"
    ):
        Laplace(none, loss, [(X, y)]).predict(torch.cat([X[1:], 0 * X[:1]]), "bridge")
    single = nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"several classes.*got 1 classes"):
        Laplace(single, loss, [(X, 0 * y)]).dirichlet(X)


@pytest.mark.parametrize("params", ["all", "last"])
@pytest.mark.parametrize("kind", [KroneckerGGN, DiagonalGGN, EKFAC])
def test_outputs_of_all_inputs_together(kind: Any, params: Any, monkeypatch: MonkeyPatch) -> None:
    """``J Σ Jᵀ`` of different inputs, also in blocks; and that of a Gaussian process."""
    model, loss, X, y = problem("mlp")
    laplace = Laplace(model, loss, batches(X, y), kind, 0.7, params)
    new = torch.cat([torch.randn(4, 3), X[:1]])
    J = dense_jacobian(model, new)[:, :, -len(laplace.mean) :]
    expected = torch.einsum("nci,ij,mdj->ncmd", J, laplace.posterior.to_dense(), J)
    for entries in (None, 1):
        if entries is not None:
            monkeypatch.setattr(ntk, "BLOCK_ENTRIES", entries)
        mean, covariance = laplace.outputs(new, joint=True)
        assert_close(covariance, expected)
        each = laplace.outputs(new)
        assert_close((mean, torch.stack([covariance[n, :, n] for n in range(5)])), each)
    assert laplace.outputs(new[:0], joint=True)[1].shape == (0, 3, 0, 3)
    generator = Generator().manual_seed(0)
    drawn = laplace.sample_outputs(new, 40000, generator=generator, joint=True)
    assert drawn.shape == (40000, 5, 3)
    error = drawn.flatten(1).T.cov() - expected.reshape(15, 15)
    assert error.norm() < 0.03 * expected.norm()
    assert (drawn.mean(0) - mean).abs().max() < 0.03 * expected.reshape(15, 15).diag().max().sqrt()
    assert laplace.sample_outputs(new[:0], 2, joint=True).shape == (2, 0, 3)


def test_posterior_of_a_gaussian_process() -> None:
    """With the whole matrix, ``K - K (K + Λ⁻¹)⁻¹ K`` of the tangent kernel ``J Jᵀ / δ``."""
    model, loss, X, y = problem("mlp")
    whole = KroneckerOperator([[GGN(model, loss, batches(X, y)).to_dense()]])
    laplace = Laplace(model, loss, batches(X, y), whole, delta := 0.7)
    new = torch.randn(4, 3)
    J, own = (dense_jacobian(model, x).flatten(0, 1) for x in (new, X))
    p = model(X).softmax(1).detach()
    L = torch.block_diag(*(torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)))
    K, cross, inner = J @ J.T / delta, J @ own.T / delta, own @ own.T / delta
    solved = torch.linalg.solve(torch.eye(3 * N) + L @ inner, L @ cross.T)
    assert_close(laplace.outputs(new, joint=True)[1].reshape(12, 12), K - cross @ solved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_draws_in_half_precision(dtype: torch.dtype) -> None:
    """Those of double precision, but for rounding: torch decomposes no such matrix."""
    model, loss, X, y = problem("mlp")
    exact = Laplace(model, loss, [(X, y)], progress=False)
    half = Laplace(copy.deepcopy(model).to(dtype), loss, [(X.to(dtype), y)], progress=False)
    draws = half.sample_outputs(X.to(dtype), 4000)
    assert draws.dtype == dtype
    mean, covariance = exact.outputs(X)
    assert_close(draws.double().mean(0), mean, rtol=0, atol=0.1)
    assert_close(draws.double().var(0), covariance.diagonal(dim1=1, dim2=2), rtol=0.15, atol=0)


@pytest.mark.parametrize("method", ["probit", "bridge", "monte carlo", "sampling"])
def test_predictions_for_no_inputs(method: Any) -> None:
    model, loss, X, y = problem("mlp")
    assert Laplace(model, loss, [(X, y)]).predict(X[:0], method).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [KroneckerGGN, DiagonalGGN, EKFAC])
def test_evidence_in_half_precision(kind: Any, dtype: torch.dtype) -> None:
    """Sums over all weights: half precision would round them to units, or overflow."""
    model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 5)).to(dtype)
    X, y = torch.randn(64, 10).to(dtype), torch.randint(5, (64,))
    half = Laplace(model, nn.CrossEntropyLoss(), [(X, y)], kind)
    twin = copy.deepcopy(model).double(), nn.CrossEntropyLoss(), [(X.double(), y)]
    wide = Laplace(*twin, kind)
    by_value = [[float(la.log_marginal_likelihood(d)) for d in (1.0, 1.1)] for la in (half, wide)]
    (one, other), expected = by_value
    assert one == pytest.approx(expected[0], abs=0.8)
    assert one - other == pytest.approx(expected[0] - expected[1], rel=1e-2)
    for name in ("trace", "logdet"):
        found = getattr(half.posterior, name)()
        assert_close(found.double(), getattr(wide.posterior, name)(), rtol=2e-3, atol=0)
        assert found.dtype == torch.float32
    many = DiagonalOperator(torch.full((100_000,), 10.0, dtype=dtype))
    assert_close(many.logdet(), torch.tensor(10.0).log().float() * 100_000)
    for found in (many.trace(), trace(many).value, trace(2 * many).value / 2):
        assert_close(found, torch.tensor(1e6).float())


def test_subnetwork_in_half_precision() -> None:
    """Eigenvalues that rounding has made negative are no reason to refuse a precision."""
    model, loss, X, y = problem("mlp")
    chosen = torch.arange(31) % 2 == 0
    X = 5 * X
    exact = Laplace(model, loss, [(X, y)], GGN, weights=chosen, progress=False)
    half = copy.deepcopy(model).to(torch.bfloat16), loss, [(X.to(torch.bfloat16), y)]
    found = Laplace(*half, GGN, 1e-4, weights=chosen, progress=False)
    assert found.curvature.spectrum.min() >= 0
    found.prior_precision = 1.0
    variances = found.outputs(X.to(torch.bfloat16))[1].diagonal(dim1=1, dim2=2).double()
    expected = exact.outputs(X)[1].diagonal(dim1=1, dim2=2)
    assert_close(variances, expected, rtol=0.15, atol=0.15 * float(expected.mean()))


def through_file(thing: Any, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


COPIES: dict[str, Any] = {
    "pickle": lambda laplace: pickle.loads(pickle.dumps(laplace)),
    "torch": through_file,
    "deepcopy": copy.deepcopy,
    "state": lambda own: Laplace.from_state_dict(
        copy.deepcopy(own._objective.model),
        own._objective.loss_function,
        through_file(own.state_dict(), weights_only=True),
    ),
}
KINDS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "kronecker": ("mlp", KroneckerGGN, {"prior_precision": {"": 0.5, "2": 3.0}}),
    "ekfac": ("lstm", EKFAC, {"temperature": 0.3, "prior_mean": 0.2}),
    "last": ("lstm", DiagonalGGN, {"params": "last"}),
    "noise": (
        "mse",
        KroneckerGGN,
        {"noise": 0.4, "prior_mean": {"": 0.1, "2.bias": torch.ones(3)}},
    ),
    "subnetwork": ("mlp", GGN, {"weights": torch.arange(31) % 3 == 0}),
    "binary": ("binary", DiagonalGGN, {}),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind: str, way: str) -> None:
    """All that can be asked is the same; data that nobody can pickle is left behind."""
    name, curvature, options = KINDS[kind]
    model, loss, X, y = problem(name)
    data = DataLoader(TensorDataset(X, y), 4, collate_fn=lambda samples: default_collate(samples))
    laplace = Laplace(model, loss, data, curvature, **options)
    assert len(pickle.dumps(laplace)) < 30000
    other = COPIES[way](laplace)
    assert other is not laplace and other._objective.model is not model

    def asked(own: Laplace) -> list[Any]:
        means = own.prior_mean
        found = [own.outputs(X), own.log_marginal_likelihood(), own.prior_precision, own.noise]
        found += [own.temperature, own.loss, own.curvature.to_dense(), own.posterior.to_dense()]
        found += [list(means.values()) if isinstance(means, dict) else means]
        found += [
            own.predict(X, method, 3, Generator().manual_seed(0))
            for method in ("probit", "sampling", "monte carlo")
        ]
        found += [own.largest_variances(3), own.fit_prior_precision()]
        found += [own.fit_prior_precision(validation=[(X, y)])]
        if name == "mse":
            found += [own.fit_noise()]
        return found

    assert_close(asked(other), asked(laplace), rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # a copy has its model
        other._objective.params[0].add_(1)
    laplace.predict(X)
    with pytest.raises(RuntimeError, match="weights of the model"):
        other.predict(X)


def test_data_is_not_kept() -> None:
    """Its memory is free as soon as the program has no use for it."""
    model, loss, X, y = problem("mlp")
    laplace = Laplace(model, loss, [(X, y)])
    new, alive = torch.randn(2, 3), weakref.ref(X)
    del X, y
    gc.collect()
    assert alive() is None
    assert laplace.predict(new).shape == (2, 3)


def test_states_that_do_not_fit() -> None:
    model, loss, X, y = problem("mlp")
    state = Laplace(model, loss, [(X, y)]).state_dict()
    wide = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    more = nn.Sequential(*model, nn.BatchNorm1d(3)).eval()
    mistakes: list[tuple[Any, Any, Any, str]] = [
        (wide, loss, state, r"31 weights of \['0.weight', .*this one has 38"),
        (more, loss, state, r"another model: .* 0 other parameters and buffers"),
        (LastState(), loss, state, r"this one has 0, .*'head.weight'"),
        (model, nn.MSELoss(), state, "state is that of CrossEntropyLoss, but the loss is MSELoss"),
        (model, loss, {"mean": state["mean"]}, r"lacks \['bases', .*Give what state_dict"),
    ]
    for net, criterion, given, message in mistakes:
        with pytest.raises(ValueError, match=message):
            Laplace.from_state_dict(net, criterion, given)
    other = problem("mlp")[0]
    loaded = Laplace.from_state_dict(other, loss, state)
    with pytest.raises(RuntimeError, match="Load these again"):
        loaded.predict(X)
    other.load_state_dict(model.state_dict())
    assert_close(loaded.predict(X), Laplace(model, loss, [(X, y)]).predict(X))


OPTIONS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "weight": (nn.CrossEntropyLoss, {"weight": torch.tensor([1.0, 2.0, 3.0])}, {}),
    "other weight": (
        nn.CrossEntropyLoss,
        {"weight": torch.tensor([1.0, 2.0, 3.0])},
        {"weight": torch.tensor([1.0, 2.0, 4.0])},
    ),
    "ignore_index": (nn.CrossEntropyLoss, {}, {"ignore_index": 0}),
    "label_smoothing": (nn.CrossEntropyLoss, {"label_smoothing": 0.1}, {}),
    "pos_weight": (nn.BCEWithLogitsLoss, {}, {"pos_weight": torch.ones(3)}),
    "beta": (nn.SmoothL1Loss, {}, {"beta": 0.5}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_states_of_other_options_of_the_loss(name: str) -> None:
    """They are another likelihood; other reductions, and precisions of weights, are not."""
    kind, given, others = OPTIONS[name]
    model, _, X, _ = problem("mlp")
    y = torch.randint(3, (N,)) if kind is nn.CrossEntropyLoss else torch.rand(N, 3).round()
    laplace = Laplace(model, kind(**given).double(), [(X, y)])
    state = through_file(laplace.state_dict(), weights_only=True)
    option = name.rpartition(" ")[2]
    message = rf"of {kind.__name__} with {option}=.*, but this one has {option}=.* it had"
    for own in (kind(**others).double(), kind(**others, reduction="sum")):
        with pytest.raises(ValueError, match=message):
            Laplace.from_state_dict(model, own, state)
    Laplace.from_state_dict(model, kind(**given), state)
    older = {name: value for name, value in state.items() if name != "loss_options"}
    Laplace.from_state_dict(model, kind(**others), older)
    half = Laplace.from_state_dict(model, kind(**given).bfloat16(), state)
    assert_close(half.prior_precision, laplace.prior_precision)
    loaded = Laplace.from_state_dict(model, kind(**given, reduction="sum").double(), state)
    assert_close(loaded.outputs(X), laplace.outputs(X))
    if kind is nn.CrossEntropyLoss:
        held_out, grid = [(X, y)], [0.1, 1.0, 10.0]
        found = loaded._validation_losses(held_out, grid, "probit")
        assert_close(found, laplace._validation_losses(held_out, grid, "probit"))


def test_states_stay_what_they_are() -> None:
    """What is fitted or set later belongs to the posterior alone."""
    model, loss, X, y = problem("mse")
    laplace = Laplace(model, loss, [(X, y)], prior_mean={"": torch.tensor(0.1)}, noise=0.4)
    state, before = laplace.state_dict(), [laplace.outputs(X), laplace.log_marginal_likelihood()]
    laplace.fit_noise()
    laplace.fit_prior_precision(per="layer")
    laplace.prior_mean, laplace.temperature = 0.3, 2.0
    assert laplace.log_marginal_likelihood() != before[1]
    loaded = Laplace.from_state_dict(model, loss, state)
    assert_close([loaded.outputs(X), loaded.log_marginal_likelihood()], before, rtol=0, atol=0)


def test_other_weights_than_those_of_the_curvature() -> None:
    model, loss, X, y = problem("mlp")
    laplace = Laplace(model, loss, [(X, y)], progress=False)
    state = copy.deepcopy(model.state_dict())
    before = laplace.predict(X)
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[index]
    with pytest.raises(RuntimeError, match="build a new one"):
        laplace.predict(X)
    model.load_state_dict(state)
    assert_close(laplace.predict(X), before)


@pytest.mark.parametrize("method", ["probit", "monte carlo", "sampling"])
@pytest.mark.parametrize("what", ["weight", "buffer"])
def test_other_weights_below_the_last_layer(what: str, method: Any) -> None:
    """Outputs were those of a model that the curvature does not know, without a word."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    X, y = torch.randn(N, 3), torch.randint(3, (N,))
    laplace = Laplace(model, nn.CrossEntropyLoss(), [(X, y)], params="last")

    def predict() -> Tensor:
        return laplace.predict(X, method, 3, Generator().manual_seed(0))

    before = predict()
    changed: Any = model[0].weight if what == "weight" else model[1].running_mean
    changed.data += 0.1
    with pytest.raises(RuntimeError, match=r"weights of the model, or its buffers.*build a new"):
        predict()
    changed.data -= 0.1
    assert_close(predict(), before)
    model[2].weight.data += 1  # type: ignore[operator]
    if method == "sampling":  # these are drawn
        assert_close(predict(), before)
    else:
        with pytest.raises(RuntimeError, match="build a new one"):
            predict()


@pytest.mark.parametrize("method", ["probit", "monte carlo", "sampling"])
@pytest.mark.parametrize("kind", [nn.Dropout, nn.BatchNorm1d])
def test_predictions_in_training_mode(kind: Any, method: Any) -> None:
    """They are refused, as the curvature is, and change no buffers."""
    layer = kind(4) if kind is nn.BatchNorm1d else kind(0.5)
    model = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 3)).eval()
    X, y = torch.randn(N, 3), torch.randint(3, (N,))
    laplace = Laplace(model, nn.CrossEntropyLoss(), [(X, y)])
    before, state = laplace.predict(X), copy.deepcopy(model.state_dict())
    model.train()
    with pytest.raises(ValueError, match=r"training mode: '1' .*model\.eval"):
        laplace.predict(X, method, 3)
    assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    model.eval()
    assert_close(laplace.predict(X), before)


def test_last_layer() -> None:
    """The layer that is called last, whatever comes last in the model."""
    model, loss, X, y = problem("lstm")
    data = batches(X, y)
    hooks = len(model.head._forward_hooks)  # type: ignore[union-attr]
    laplace = Laplace(model, loss, data, params="last", prior_precision=0.5)
    assert len(model.head._forward_hooks) == hooks  # type: ignore[union-attr]
    assert len(laplace.mean) == 15
    named = list(model.head.parameters())  # type: ignore[union-attr]
    same = Laplace(model, loss, data, params=named, prior_precision=0.5)
    J = dense_jacobian(model, X)[:, :, :15]
    H = N * KroneckerGGN(model, loss, data, named).to_dense() + 0.5 * torch.eye(15)
    expected = J @ torch.linalg.inv(H) @ J.mT
    for one in (laplace, same):
        assert_close(one.outputs(X)[1], expected)
    drawn = laplace.sample_outputs(X, 5, linearized=False)
    assert drawn.shape == (5, N, 3)


def test_last_layer_in_training_mode() -> None:
    """The pass that looks for it does not change what the model knows of its data."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    before = copy.deepcopy(model.state_dict())
    data = batches(torch.randn(N, 3), torch.randint(3, (N,)))
    with pytest.raises(ValueError, match="training mode"):
        Laplace(model, nn.CrossEntropyLoss(), data, params="last")
    assert_close(dict(model.state_dict()), dict(before))


class OfTensors(nn.Module):
    """A model of a tuple or dictionary: two tensors, of which the second scales the first."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body = kind, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, inputs: Any) -> Tensor:
        if self.kind == "tensor":
            return self.body(inputs)
        first, second = inputs if self.kind == "tuple" else (inputs["x"], inputs["more"]["scale"])
        return self.body(first * second)


def inputs_as(kind: str, X: Tensor) -> Any:
    """Samples whose product is X; a dictionary has something that belongs to no sample, too."""
    scale = torch.arange(1.0, len(X) + 1).unsqueeze(1)
    if kind == "tensor":
        return X
    if kind == "tuple":
        return X / scale, scale
    inputs = {"x": X / scale, "more": {"scale": scale, "shared": torch.ones(1, 7)}, "name": "x"}
    return UserDict(inputs) if kind == "user" else inputs


@pytest.mark.parametrize("entries", [None, 1, 400])
@pytest.mark.parametrize("params", ["all", "last", "some"])
@pytest.mark.parametrize("kind", ["tuple", "dict", "user"])
def test_inputs_that_are_no_tensor(
    kind: str, params: Any, entries: int | None, monkeypatch: MonkeyPatch
) -> None:
    """All methods predict what they do for a model of a tensor, whole or sample by sample."""
    if entries is not None:
        monkeypatch.setattr(ntk, "BLOCK_ENTRIES", entries)
    X, y, new = torch.randn(N, 3), torch.randint(3, (N,)), torch.randn(5, 3)
    found = []
    state: Any = OfTensors("tensor").state_dict()
    for each in ("tensor", kind):
        model = OfTensors(each)
        model.load_state_dict(state)
        data = [(inputs_as(each, x), labels) for x, labels in batches(X, y)]
        chosen = list(model.body[0].parameters()) if params == "some" else params
        laplace = Laplace(model, nn.CrossEntropyLoss(), data, params=chosen, prior_precision=0.5)
        given = inputs_as(each, new)
        drawn = [
            laplace.sample_outputs(given, 3, linearized, Generator().manual_seed(0))
            for linearized in (True, False)
        ]
        predicted = [laplace.predict(given)] + [
            laplace.predict(given, method, 3, Generator().manual_seed(0))
            for method in ("monte carlo", "sampling")
        ]
        found.append([*laplace.outputs(given), *drawn, *predicted])
        assert [list(x.shape) for x in found[-1][:2]] == [[5, 3], [5, 3, 3]]
    assert_close(found[1], found[0])
    if params == "all":
        J = dense_jacobian(model.body, new)
        assert_close(found[1][1], J @ laplace.posterior.to_dense() @ J.mT)


def test_samples_that_cannot_be_split(monkeypatch: MonkeyPatch) -> None:
    """More than fit at once, in something that is no tensor."""

    class OfNumbers(nn.Linear):
        def forward(self, inputs: Any) -> Tensor:
            return super().forward(torch.tensor(inputs["x"]) * inputs["scale"])

    X = torch.randn(4, 3)
    data = [({"x": X.tolist(), "scale": torch.ones(4, 1)}, torch.randint(3, (4,)))]
    model = OfNumbers(3, 3)
    laplace = Laplace(model, nn.CrossEntropyLoss(), data)
    of_weight = torch.stack([torch.block_diag(x, x, x) for x in X])
    J = torch.cat([of_weight, torch.eye(3).expand(4, 3, 3)], 2)
    assert_close(laplace.outputs(data[0][0])[1], J @ laplace.posterior.to_dense() @ J.mT)
    monkeypatch.setattr(ntk, "BLOCK_ENTRIES", 1)
    with pytest.raises(ValueError, match=r"4 outputs for the 1 samples .* first axis.* at most"):
        laplace.outputs(data[0][0])


def test_uncertainty_grows_away_from_data() -> None:
    model, loss, X, y = problem("mlp")
    laplace = Laplace(model, loss, batches(X, y))
    _, near = laplace.outputs(0.1 * X)
    _, far = laplace.outputs(100 * X)
    assert far.diagonal(dim1=1, dim2=2).mean() > near.diagonal(dim1=1, dim2=2).mean()


def test_gradients_of_the_caller_stay() -> None:
    model, loss, X, y = problem("mlp", "mean")
    loss(model(X), y).backward()
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    Laplace(model, loss, batches(X, y)).outputs(X)
    assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))


@pytest.mark.parametrize("kind", [KroneckerGGN, EKFAC, EmpiricalFisher])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empirical_fisher(reduction: str, kind: Any) -> None:
    """That of the likelihood, or an error: that of MSELoss is quadratic in what noise divides."""
    options: Any = {} if kind is EmpiricalFisher else {"fisher": "empirical"}
    chosen: Any = {"weights": {"": True}} if kind is EmpiricalFisher else {}
    model, loss, X, y = problem("mlp", reduction)
    each = [nn.CrossEntropyLoss()(model(x), t) for x, t in zip(X.split(1), y.split(1), strict=True)]
    gradients = [torch.autograd.grad(term, list(model.parameters())) for term in each]
    expected = sum(parameter_list_to_vector(g).square().sum() for g in gradients)
    data = batches(X, y)
    laplace = Laplace(model, loss, data, partial(kind, **options), **chosen)
    if kind is not KroneckerGGN:  # whose trace is another one
        assert_close(laplace.curvature.trace(), expected)
    model, loss, X, y = problem("mse", reduction)
    data = batches(X, y)
    for curvature in (partial(kind, **options), kind(model, loss, data, **options)):
        with pytest.raises(ValueError, match="is quadratic in the gradients of MSELoss"):
            Laplace(model, loss, data, curvature, noise=0.3, **chosen)


def test_factors_of_inputs_are_no_curvature() -> None:
    model, loss, X, y = problem("mlp")
    with pytest.raises(ValueError, match="no curvature of the loss"):
        Laplace(model, loss, batches(X, y), partial(KroneckerGGN, fisher="inputs"))


@pytest.mark.parametrize("kind", [KroneckerGGN, DiagonalGGN, EKFAC, GGN, Hessian, EmpiricalFisher])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_curvature_of_another_loss(reduction: str, kind: Any) -> None:
    """Its scale would be another one; one of the same loss is that of the class."""
    model, loss, X, y = problem("mlp", reduction)
    data = batches(X, y)
    other = nn.CrossEntropyLoss(reduction="sum" if reduction == "mean" else "mean")
    message = f"with reduction='{other.reduction}', but CrossEntropyLoss here .*'{reduction}'"
    wrong, right = kind(model, other, data), kind(model, loss, data)
    calls: tuple[Any, ...] = (wrong, lambda model, _, *given, **options: wrong)
    for curvature in calls:
        with pytest.raises(ValueError, match=message):
            Influence(model, loss, data, curvature, 100.0)
    expected = Influence(model, loss, data, kind, 100.0).scores(data[0])
    assert_close(Influence(model, loss, data, right, 100.0).scores(data[0]), expected)
    if not isinstance(right, SpectralOperator):
        return
    for curvature in calls:
        with pytest.raises(ValueError, match=message):
            Laplace(model, loss, data, curvature)
    squared = nn.MSELoss(reduction=reduction)
    with pytest.raises(ValueError, match=r"of CrossEntropyLoss, but Laplace has MSELoss"):
        Laplace(model, squared, batches(X, torch.randn(N, 3)), right)

    class Own(nn.CrossEntropyLoss):
        """The same numbers."""

    expected = Laplace(model, loss, data, kind).outputs(X)
    # of the class, of one that inherits from it, and one that does not know
    for same in (
        right,
        kind(model, Own(reduction=reduction), data),
        SpectralOperator(right.spectrum, right.bases, right.order),
    ):
        assert_close(Laplace(model, loss, data, same).outputs(X), expected)
    whole = SpectralOperator(wrong.spectrum, wrong.bases, wrong.order)  # nobody can tell
    Laplace(model, loss, data, whole)


def test_wrong_arguments() -> None:
    model, loss, X, y = problem("mlp")
    data = batches(X, y)
    with pytest.raises(ValueError, match="prior precision has to be positive, got 0"):
        Laplace(model, loss, data, prior_precision=0.0)
    with pytest.raises(ValueError, match="noise"):
        Laplace(model, loss, data, noise=0.0)
    with pytest.raises(ValueError, match="iterator"):
        Laplace(model, loss, iter(data))
    with pytest.raises(ValueError, match=r"structured operator of 31 rows.*KroneckerGGN, EKFAC or"):
        Laplace(model, loss, data, GGN)
    with pytest.raises(ValueError, match="structured operator of 15 rows"):
        Laplace(model, loss, data, DiagonalGGN(model, loss, data), params="last")
    with pytest.raises(ValueError, match="'all', 'last'"):
        Laplace(model, loss, data, params="first")  # type: ignore[arg-type]
    laplace = Laplace(model, loss, data)
    with pytest.raises(ValueError, match="monte carlo"):
        laplace.predict(X, "exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_samples has to be at least 1, got 0"):
        laplace.predict(X, "monte carlo", num_samples=0)
    with pytest.raises(ValueError, match="positive, got -1"):
        laplace.log_marginal_likelihood(-1.0)
    huber = Laplace(model, nn.SmoothL1Loss(), batches(X, torch.randn(N, 3)))
    with pytest.raises(ValueError, match=r"SmoothL1Loss .* says nothing"):
        huber.predict(X)
    assert huber.outputs(X)[1].shape == (N, 3, 3)
    positions = nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (3, 2)))
    of_positions = Laplace(positions, loss, batches(X, torch.randint(3, (N, 2))))
    with pytest.raises(ValueError, match="C classes for each sample"):
        of_positions.predict(X)
    assert of_positions.outputs(X)[1].shape == (N, 6, 6)

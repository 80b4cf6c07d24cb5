"""Programs of published libraries that build on this interface; each saves the numbers it finds.

Run as ``python clients.py NAME FILE`` with the libraries, and either version of ours, in the path.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import backpack

Numbers = dict[str, Tensor]


def _restore_symeig() -> None:
    """Give tensors the method that torch has removed since the library was published."""

    def symeig(matrix: Tensor, eigenvectors: bool = False, upper: bool = True) -> Any:
        half = "U" if upper else "L"
        if eigenvectors:
            return torch.linalg.eigh(matrix, UPLO=half)
        return torch.linalg.eigvalsh(matrix, UPLO=half), matrix.new_empty(0)

    Tensor.symeig = symeig  # type: ignore[attr-defined]


def _images(count: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.rand(count, 1, 8, 8), torch.randint(classes, (count,))


def _network(classes: int) -> nn.Sequential:
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 8)
    return nn.Sequential(*layers, nn.Sigmoid(), nn.Linear(8, classes))


def laplace_torch() -> Numbers:
    """Fit posteriors of every structure; tune the prior by the marginal likelihood; predict."""
    from laplace import Laplace
    from laplace.curvature import BackPackEF, BackPackGGN

    found = {}
    for likelihood in ("classification", "regression"):
        for weights in ("all", "last_layer"):
            for structure in ("diag", "kron", "full"):
                for backend in (BackPackGGN, BackPackEF):
                    if structure == "kron" and backend is BackPackEF:  # the client refuses it
                        continue
                    torch.manual_seed(0)
                    X = torch.rand(40, 5)
                    is_class = likelihood == "classification"
                    y = torch.randint(3, (40,)) if is_class else torch.rand(40, 3)
                    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
                    posterior = Laplace(model, likelihood, weights, structure, backend=backend)
                    posterior.fit(DataLoader(TensorDataset(X, y), batch_size=10))
                    posterior.optimize_prior_precision(method="marglik")
                    name = f"{likelihood} {weights} {structure} {backend.__name__}"
                    predicted = posterior(X[:5])
                    parts = [predicted] if isinstance(predicted, Tensor) else predicted
                    for i, part in enumerate([posterior.log_marginal_likelihood(), *parts]):
                        found[f"{name} {i}"] = part.detach()
    return found


def vivit() -> Numbers:
    """Find eigenvalues, eigenvectors, directional derivatives and a Newton step of the GGN."""
    _restore_symeig()
    import vivit as client

    X, y = _images(6, 3)
    model, lossfunc = backpack.extend(_network(3)), backpack.extend(nn.CrossEntropyLoss())
    params = list(model.parameters())

    def largest(values: Tensor) -> list[int]:
        return [i for i in range(len(values)) if values[i] > 1e-6][-3:]

    def damping(evals: Tensor, evecs: Any, gammas: Tensor, lambdas: Tensor) -> Tensor:
        return torch.ones_like(lambdas.mean(0))

    def run(work: Any, *extensions: Any) -> Any:
        group = {"params": params, "criterion": largest, "damping": damping}
        torch.manual_seed(1)
        loss = lossfunc(model(X), y)
        with backpack.backpack(*extensions, extension_hook=work.get_extension_hook([group])):
            loss.backward()
        return work.get_result(group)

    found = {}
    values = client.EigvalshComputation()
    found["eigenvalues"] = run(values, values.get_extension()).sort().values
    for mc_samples in (0, 2):
        for subsampling in (None, [0, 2, 4]):
            pairs = client.EighComputation(subsampling=subsampling, mc_samples=mc_samples)
            values, vectors = run(pairs, pairs.get_extension())
            name = f"{mc_samples} {subsampling}"
            if not mc_samples:  # drawn otherwise
                found[f"values {name}"] = values
                found |= {f"vectors {name} {i}": v.abs() for i, v in enumerate(vectors)}
    slopes = client.DirectionalDerivativesComputation()
    gammas, lambdas = run(slopes, *slopes.get_extensions())
    found |= {"first": gammas.abs(), "second": lambdas}
    newton = client.DirectionalDampedNewtonComputation()
    steps = run(newton, *newton.get_extensions())
    return found | {f"step {i}": step for i, step in enumerate(steps)}


def cockpit() -> Numbers:
    """Log all quantities that the library knows over some steps of training."""
    _restore_symeig()
    from cockpit import Cockpit
    from cockpit.utils.configuration import configuration

    X, y = _images(64, 4)
    model, lossfunc = backpack.extend(_network(4)), backpack.extend(nn.CrossEntropyLoss())
    each = nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = Cockpit(model.parameters(), quantities=configuration("full"))
    for step in range(4):
        inputs, labels = X[16 * step :][:16], y[16 * step :][:16]
        optimizer.zero_grad()
        outputs = model(inputs)
        loss, losses = lossfunc(outputs, labels), each(outputs, labels)
        torch.manual_seed(step)
        info = {
            "batch_size": len(inputs),
            "individual_losses": losses,
            "loss": loss,
            "optimizer": optimizer,
        }
        with log(step, info=info):
            loss.backward(create_graph=log.create_graph(step))
        optimizer.step()
    return dict(_flat("", log.get_output()))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """List the numbers in nested containers."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}/{key}", inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _flat(f"{name}/{i}", inner)
    else:
        yield name, torch.as_tensor(value)


PROGRAMS: dict[str, Callable[[], Numbers]] = {
    "laplace": laplace_torch,
    "vivit": vivit,
    "cockpit": cockpit,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    name, file = sys.argv[1:]
    torch.save(PROGRAMS[name](), file)
    print(backpack.__file__)

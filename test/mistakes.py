"""The most natural mistakes, and what a program is told.

The table is both a test (``test_messages.py``) and a page of the documentation, which shows the
programs and the messages that they lead to.
"""

from __future__ import annotations

import inspect
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from backpack import backpack, extend, memory_cleanup, quantities, results_of
from backpack.extensions import KFAC, BatchGrad, DiagGGNExact, DiagGGNMC
from backpack.linalg import GGN
from backpack.optim import DiagGGN, DPOptimizer


class Mistake(NamedTuple):
    """A program with a mistake, and what its message has to say.

    Attributes:
        title: What is wrong.
        program: Makes the mistake.
        kind: Class of the error or of the warning.
        names: What the message says of the object.
        remedy: What it says of the way out.
    """

    title: str
    program: Callable[[], None]
    kind: type[Exception]
    names: str
    remedy: str

    def message(self) -> str:
        """Run the program; return what it is told.

        Raises:
            AssertionError: If it is told nothing of that kind.
        """
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.program()
            except self.kind as error:
                return str(error)
        told = [w for w in caught if issubclass(w.category, self.kind)]
        if len(told) != 1:
            raise AssertionError(f"{self.title}: told {told}")
        lines, first = inspect.getsourcelines(self.program)
        if told[0].filename != __file__ or not first < told[0].lineno < first + len(lines):
            raise AssertionError(f"{self.title}: told elsewhere, {told[0]}")
        return str(told[0].message)

    def code(self) -> str:
        """Return the lines of the program."""
        lines = inspect.getsource(self.program).splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("def ")) + 1
        return textwrap.dedent("\n".join(lines[start:]))


MISTAKES: list[Mistake] = []


def mistake(
    title: str, kind: type[Exception], names: str, remedy: str
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a program to the table."""

    def add(program: Callable[[], None]) -> Callable[[], None]:
        MISTAKES.append(Mistake(title, program, kind, names, remedy))
        return program

    return add


# What the programs have in common.
X, y = torch.rand(8, 3), torch.randint(2, (8,))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x), inplace=True))


class Centre(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def preamble() -> str:
    """Return what the programs have in common."""
    source = Path(__file__).read_text(encoding="utf-8")
    imports = source[source.index("import torch\n") : source.index("\n\n\nclass Mistake")]
    shared = source.split("# What the programs have in common.\n")[1].split("\n\n\ndef preamble")[0]
    return f"{imports}\n\n{shared}"


# ------------------------------------------------------------------ what is extended


@mistake("The model is not extended", UserWarning, "BatchGrad", "Call extend() on the model")
def not_extended() -> None:
    model, loss_function = mlp(), nn.CrossEntropyLoss()
    loss = loss_function(model(X), y)
    with backpack(BatchGrad()):
        loss.backward()


@mistake(
    "The forward pass comes before extend", UserWarning, "BatchGrad", "before the forward pass"
)
def forward_before_extend() -> None:
    model, loss_function = mlp(), extend(nn.CrossEntropyLoss())
    output = model(X)
    extend(model)
    with backpack(BatchGrad()):
        loss_function(output, y).backward()


@mistake("backward() comes behind the context", UserWarning, "BatchGrad", "Call backward() inside")
def backward_behind() -> None:
    model, loss_function = extend(mlp()), extend(nn.CrossEntropyLoss())
    with backpack(BatchGrad()):
        loss = loss_function(model(X), y)
    loss.backward()


@mistake("The loss is not extended", ValueError, "DiagGGNExact", "Call extend() on the loss")
def loss_not_extended() -> None:
    model, loss_function = extend(mlp()), nn.CrossEntropyLoss()
    with backpack(DiagGGNExact()):
        loss_function(model(X), y).backward()


@mistake("The loss is a function", ValueError, "KFAC", "in place of a function")
def loss_is_a_function() -> None:
    model = extend(mlp())
    with backpack(KFAC()):
        F.cross_entropy(model(X), y).backward()


@mistake("A function is extended", TypeError, "cross_entropy", "torch.nn.CrossEntropyLoss()")
def function_extended() -> None:
    extend(F.cross_entropy)  # type: ignore[type-var]


@mistake("The model's forward works in place", ValueError, "ReluBackward0", "use_converter=True")
def forward_in_place() -> None:
    model, loss_function = extend(Net()), extend(nn.CrossEntropyLoss())
    with backpack(DiagGGNExact()):
        loss_function(model(X), y).backward()


@mistake(
    "What extend returns is not used", ValueError, "'first' (Linear)", "that extend() has returned"
)
def returned_model_not_used() -> None:
    model, loss_function = Net(), extend(nn.CrossEntropyLoss())
    extend(model, use_converter=True)
    with backpack(DiagGGNExact()):
        loss_function(model(X), y).backward()


@mistake("The model is a DataParallel", NotImplementedError, "DataParallel", "DistributedData")
def data_parallel() -> None:
    extend(nn.DataParallel(mlp()))


# ------------------------------------------------------------------ the context


@mistake("A class in place of an object", ValueError, "BatchGrad", "Did you mean BatchGrad()?")
def a_class() -> None:
    backpack(BatchGrad)  # type: ignore[arg-type]


@mistake("The optimiser in place of its extensions", ValueError, "DiagGGN", "*optimizer.extensions")
def an_optimiser() -> None:
    optimizer = DiagGGN(extend(mlp()).parameters(), lr=0.1)
    backpack(optimizer)  # type: ignore[arg-type]


@mistake("Two extensions with one savefield", ValueError, "'diag_ggn_mc'", "Use two contexts")
def one_savefield() -> None:
    backpack(DiagGGNMC(mc_samples=1), DiagGGNMC(mc_samples=5))


@mistake("The context is not entered", UserWarning, "backpack(BatchGrad)", "inside `with backpack")
def not_entered() -> None:
    model, loss_function = extend(mlp()), extend(nn.CrossEntropyLoss())
    backpack(BatchGrad())
    loss_function(model(X), y).backward()


@mistake("backward() is outside", AttributeError, "grad_batch", "inside `with backpack(...)`")
def backward_outside() -> None:
    model, loss_function = extend(mlp()), extend(nn.CrossEntropyLoss())
    with backpack(BatchGrad()):
        loss = loss_function(model(X), y)
    loss.backward()
    print(results_of(model[0].weight).grad_batch)


@mistake("Cleaned up before the last backward pass", RuntimeError, "Linear", "memory_cleanup")
def second_backward() -> None:
    model, loss_function = extend(mlp()), extend(nn.CrossEntropyLoss())
    loss = loss_function(model(X), y)
    with backpack(BatchGrad()):
        loss.backward(retain_graph=True)
    memory_cleanup(model)
    with backpack(DiagGGNExact()):
        loss.backward()


# ------------------------------------------------------------------ samples


@mistake("A sample that is not in the batch", ValueError, "grad_batch", "0 to 7")
def no_such_sample() -> None:
    model, loss_function = extend(mlp()), extend(nn.CrossEntropyLoss())
    with backpack(BatchGrad(subsampling=[0, 8])):
        loss_function(model(X), y).backward()


@mistake("Batch normalisation, individual gradients", UserWarning, "'1' (BatchNorm1d)", "GroupNorm")
def batch_normalisation() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    loss_function = extend(nn.CrossEntropyLoss())
    with backpack(BatchGrad()):
        loss_function(model(X), y).backward()


@mistake("An own module mixes samples", NotImplementedError, "'1' (Centre)", "couples_samples")
def mixed_samples() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), Centre(), nn.Linear(4, 2)))
    loss_function = extend(nn.CrossEntropyLoss())
    with backpack(DiagGGNExact()):
        loss_function(model(X), y).backward()


@mistake(
    "An own module has no rule: no mistake, but slow", UserWarning, "'1' (Scale)", "Write a rule"
)
def no_rule() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), Scale(), nn.Linear(4, 2)))
    loss_function = extend(nn.CrossEntropyLoss())
    with backpack(BatchGrad()):
        loss_function(model(X), y).backward()


# ------------------------------------------------------------------ losses, and what uses results


@mistake("The loss of each sample", ValueError, "CrossEntropyLoss", "reduction='mean' or 'sum'")
def no_reduction() -> None:
    model, loss_function = extend(mlp()), extend(nn.CrossEntropyLoss(reduction="none"))
    with backpack(DiagGGNExact()):
        loss_function(model(X), y).mean().backward()


@mistake("A penalty is added to the loss", UserWarning, "CrossEntropyLoss", "by hand")
def penalty() -> None:
    model, loss_function = extend(mlp()), extend(nn.CrossEntropyLoss())
    penalty = sum(p.square().sum() for p in model.parameters())
    with backpack(DiagGGNExact()):
        (loss_function(model(X), y) + 0.1 * penalty).backward()


@mistake("Targets cannot be drawn", NotImplementedError, "SmoothL1Loss", "DiagGGNExact")
def no_likelihood() -> None:
    model, loss_function = extend(mlp()), extend(nn.SmoothL1Loss())
    with backpack(DiagGGNMC()):
        loss_function(model(X), torch.rand(8, 2)).backward()


@mistake("A step without quantities", RuntimeError, "diag_ggn_mc", "*optimizer.extensions")
def step_without_quantities() -> None:
    model, loss_function = extend(mlp()), extend(nn.CrossEntropyLoss())
    optimizer = DiagGGN(model.parameters(), lr=0.1)
    loss_function(model(X), y).backward()
    optimizer.step()


@mistake("Data that can be read only once", ValueError, "iterator", "DataLoader or a list")
def data_read_once() -> None:
    batches = iter([(X, y)])
    GGN(mlp(), nn.CrossEntropyLoss(), batches)


@mistake("An operator with a function as the loss", ValueError, "cross_entropy", "a module")
def operator_of_a_function() -> None:
    GGN(mlp(), F.cross_entropy, [(X, y)])  # type: ignore[arg-type]


@mistake("The extension in place of the optimiser", TypeError, "KFAC", "backpack.optim.KFAC")
def extension_as_optimiser() -> None:
    KFAC(mlp().parameters(), lr=0.1)  # type: ignore[call-arg, arg-type]


@mistake("Parameters for an extension", TypeError, "KFAC", "backpack.optim.KFAC")
def parameters_for_an_extension() -> None:
    KFAC(mlp().parameters())  # type: ignore[arg-type]


@mistake("A model for an extension", TypeError, "BatchGrad", "Call extend(model)")
def model_for_an_extension() -> None:
    BatchGrad(mlp())  # type: ignore[arg-type]


@mistake("A model for an optimiser", TypeError, "Sequential", "DiagGGN(model.parameters()")
def model_for_an_optimiser() -> None:
    DiagGGN(mlp())


@mistake("The extension of an optimiser by position", TypeError, "lr", "extension=DiagGGNExact()")
def extension_by_position() -> None:
    DiagGGN(mlp().parameters(), DiagGGNExact())  # type: ignore[arg-type]


@mistake("Private steps with curvature", TypeError, "diag_ggn_mc", "torch.optim.Adam")
def private_curvature() -> None:
    optimizer = DiagGGN(mlp().parameters())
    DPOptimizer(optimizer, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=8)


# ------------------------------------------------------------------ results


@mistake("Results of a parameter, not of a model", TypeError, "Parameter", "results_of(p)")
def quantities_of_a_parameter() -> None:
    model = extend(mlp())
    quantities(model[0].weight)  # type: ignore[arg-type]

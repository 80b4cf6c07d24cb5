"""How each library computes a quantity. Runs in the workers, one library in each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark.problems import Layers, LoopLSTM, Problem, evaluation
from benchmark.quantities import FIRST, PRODUCTS, Quantity

# for each extension the value at each parameter, several tensors for Kronecker factors
Results = dict[str, list[Any]]


# fused kernels have no rules for torch.func and forward mode
plain_attention = partial(sdpa_kernel, SDPBackend.MATH)


class NotOffered(Exception):
    """A library does not have a quantity."""


class Library:
    """A problem in the hands of a library.

    Args:
        problem: The problem.
        device: Where it is computed.
    """

    layers = Layers()

    def __init__(self, problem: Problem, device: str):
        self.problem = problem
        self.device = device
        self.reference = problem.make(device=device)
        self.model = problem.make(self.layers, device)
        self.X, self.y = problem.data(device)
        self.lossfunc = problem.loss()
        self.names = [name for name, _ in self.reference.named_parameters()]
        # what a step leaves behind: attributes of these parameters
        self.touched = [*self.reference.parameters()]
        self.fields = ["grad"]

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of a copy of the model, in an order that all libraries share."""
        named = dict(model.named_parameters())
        return [named[name] for name in self.names]

    def plain(self) -> None:
        """Forward and backward pass of the model as torch has it."""
        self.lossfunc(self.reference(self.X), self.y).backward()

    def prepare(self, quantity: Quantity) -> Callable[[], Results]:
        """Return a function that runs a step: forward, backward and the quantity.

        Raises:
            NotOffered: If the library does not have the quantity.
        """
        raise NotImplementedError

    def read(self, parameters: list[nn.Parameter], field: str) -> list[Any]:
        """Return an attribute of all parameters.

        Raises:
            NotOffered: If one has none.
        """
        for name, parameter in zip(self.names, parameters, strict=True):
            if getattr(parameter, field, None) is None:
                raise NotOffered(f"no result for {name}")
        return [getattr(parameter, field) for parameter in parameters]

    def release(self) -> None:
        """Forget the results of the last step."""
        self._reset(self.fields)

    def between_steps(self) -> None:
        """Do what a training loop has to do between two steps."""
        self.release()

    def _reset(self, fields: list[str]) -> None:
        for parameter in self.touched:
            for field in fields:
                setattr(parameter, field, None)


class Backpack(Library):
    """This library, or the released one: whichever this process finds.

    Attributes:
        options: More of what the context manager is given.
    """

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, problem: Problem, device: str):
        import backpack
        from backpack import extensions
        from backpack.custom_module.permute import Permute
        from backpack.custom_module.reduce_tuple import ReduceTuple

        self.layers = Layers(ReduceTuple=ReduceTuple, Permute=Permute)
        super().__init__(problem, device)
        self.backpack, self.extensions = backpack, extensions
        self.extended_parameters = self.parameters(self.model)
        self.touched += self.extended_parameters
        self.extended: nn.Module | None = None
        self.extended_loss = backpack.extend(problem.loss())

    def between_steps(self) -> None:
        """Reset the gradients. The next step overwrites everything else."""
        self._reset(["grad"])

    def prepare(self, quantity: Quantity) -> Callable[[], Results]:
        self.release()
        if self.extended is None:
            options = {"use_converter": True} if self.problem.converter else {}
            self.extended = evaluation(self.backpack.extend(self.model, **options))
        model, names = self.extended, quantity.extensions
        for name in names:
            if not hasattr(self.extensions, name):
                raise NotOffered(f"has no {name}")
        extensions = [getattr(self.extensions, name)() for name in names]
        fields = [extension.savefield for extension in extensions]
        self.fields = ["grad", *fields]
        parameters = self.extended_parameters
        torch.manual_seed(2)
        vectors = [torch.rand(1, *p.shape).to(self.device) for p in parameters]

        def step() -> Results:
            loss = self.extended_loss(model(self.X), self.y)
            if not names:
                loss.backward()
                return {}
            with self.backpack.backpack(*extensions, **self.options):
                loss.backward()
                results = {
                    name: self.read(parameters, field)
                    for name, field in zip(names, fields, strict=True)
                }
                if names[0] in PRODUCTS:
                    for name, products in results.items():
                        pairs = zip(products, vectors, strict=True)
                        results[name] = [product(vector) for product, vector in pairs]
            return results

        return step


FROM_INDIVIDUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "BatchGrad": lambda g: g,
    "BatchL2Grad": lambda g: g.square().flatten(1).sum(1),
    "SumGradSquared": lambda g: g.square().sum(0),
    "Variance": lambda g: g.square().mean(0) - g.mean(0).square(),
}


def _require_first_order(quantity: Quantity) -> None:
    if not quantity.extensions or not set(quantity.extensions) <= set(FIRST):
        raise NotOffered("not offered")


class VMap(Library):
    """``torch.func``: ``vmap(grad(...))``, and what follows from individual gradients."""

    layers = Layers(LSTM=LoopLSTM)

    def prepare(self, quantity: Quantity) -> Callable[[], Results]:
        _require_first_order(quantity)
        parameters = {n: p.detach() for n, p in self.model.named_parameters()}

        def sample_loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            output = torch.func.functional_call(self.model, parameters, (x[None],))
            return self.lossfunc(output, y[None]) / self.problem.batch

        individual = torch.func.vmap(torch.func.grad(sample_loss), in_dims=(None, 0, 0))

        def step() -> Results:
            with plain_attention():
                gradients = individual(parameters, self.X, self.y)
            return {
                name: [FROM_INDIVIDUAL[name](gradients[n]) for n in self.names]
                for name in quantity.extensions
            }

        return step


class Loop(Library):
    """A loop over samples. Sums are accumulated, so that they need little memory."""

    def prepare(self, quantity: Quantity) -> Callable[[], Results]:
        _require_first_order(quantity)
        parameters = self.parameters(self.model)
        batch = self.problem.batch

        def gradient(n: int) -> tuple[Tensor, ...]:
            loss = self.lossfunc(self.model(self.X[n : n + 1]), self.y[n : n + 1]) / batch
            return torch.autograd.grad(loss, parameters)

        def stacked() -> Results:
            samples = zip(*(gradient(n) for n in range(batch)), strict=True)
            gradients = [torch.stack(sample) for sample in samples]
            return {
                name: [FROM_INDIVIDUAL[name](g) for g in gradients] for name in quantity.extensions
            }

        def accumulated() -> Results:
            norms: list[list[Tensor]] = [[] for _ in parameters]
            squares = [torch.zeros_like(p) for p in parameters]
            sums = [torch.zeros_like(p) for p in parameters]
            for n in range(batch):
                for i, g in enumerate(gradient(n)):
                    if "BatchL2Grad" in quantity.extensions:
                        norms[i].append(g.square().sum())
                    else:
                        squares[i].addcmul_(g, g)
                        sums[i].add_(g)
            finish: dict[str, Callable[[], list[Tensor]]] = {
                "BatchL2Grad": lambda: [torch.stack(norm) for norm in norms],
                "SumGradSquared": lambda: squares,
                "Variance": lambda: [
                    square / batch - (total / batch).square()
                    for square, total in zip(squares, sums, strict=True)
                ],
            }
            return {name: finish[name]() for name in quantity.extensions}

        return stacked if "BatchGrad" in quantity.extensions else accumulated


class Opacus(Library):
    """``opacus``: hooks for individual gradients, ghost clipping for their norms."""

    def __init__(self, problem: Problem, device: str):
        from opacus.layers import DPLSTM

        self.layers = Layers(LSTM=DPLSTM)
        super().__init__(problem, device)

    def prepare(self, quantity: Quantity) -> Callable[[], Results]:
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

        if quantity.name == "BatchGrad":
            make, field = GradSampleModule, "grad_sample"
        elif quantity.name == "BatchL2Grad":
            make, field = GradSampleModuleFastGradientClipping, "_norm_sample"
        else:
            raise NotOffered("not offered")
        model = copy.deepcopy(self.model)
        parameters = self.parameters(model)
        self.touched, self.fields = [*self.reference.parameters(), *parameters], ["grad", field]
        # its hooks work in training mode only; the reduction "sum" keeps the factor of the loss
        wrapped = make(model.train(), loss_reduction="sum", strict=False)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()

        def step() -> Results:
            self.lossfunc(wrapped(self.X), self.y).backward()
            values = self.read(parameters, field)
            if field == "_norm_sample":
                values = [value.square() for value in values]
            return {quantity.name: values}

        return step


class Curvlinops(Library):
    """``curvlinops``: Kronecker factors, and an estimate of the GGN's diagonal with one vector.

    The gradient is not part of what it computes, so that a step begins with a plain pass.
    """

    def prepare(self, quantity: Quantity) -> Callable[[], Results]:
        from curvlinops import GGNLinearOperator, KFACLinearOperator, hutchinson_diag

        arguments = (self.model, self.lossfunc, self.parameters(self.model), [(self.X, self.y)])
        options = {"check_deterministic": False, "num_data": self.problem.batch}

        def kronecker(fisher_type: str) -> None:
            KFACLinearOperator(
                *arguments, fisher_type=fisher_type, num_per_example_loss_terms=1, **options
            ).compute_kronecker_factors()

        compute: dict[str, Callable[[], Any]] = {
            "KFAC": lambda: kronecker("mc"),
            "KFLR": lambda: kronecker("type-2"),
            "DiagGGNMC": lambda: hutchinson_diag(GGNLinearOperator(*arguments, **options), 1),
        }
        if quantity.name not in compute:
            raise NotOffered("not offered")

        def step() -> Results:
            self.plain()
            with plain_attention():
                compute[quantity.name]()
            return {}

        return step


LIBRARIES: dict[str, type[Library]] = {
    "backpack": Backpack,
    "upstream": Backpack,
    "vmap": VMap,
    "loop": Loop,
    "opacus": Opacus,
    "curvlinops": Curvlinops,
}

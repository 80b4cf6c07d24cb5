"""The floor: what a quantity costs at least, given what this machine can multiply and copy.

``floor = plain pass + operations / matmul rate + bytes / copy rate``. Operations are the
multiplications and additions of the extra work, bytes are the inputs and gradients it has to read
and the results it has to write; whatever lies between may stay in cache. For each of ``N`` samples
a layer sees ``T`` positions (pixels, tokens, time steps) with ``K`` inputs, which its weight
``[O, K]`` maps to ``O`` outputs:

====================  ====================================================================
individual gradient   ``Σ_t δ_t x_tᵀ``: ``2 T K O``; an outer product for T = 1
its square            ``K O`` once it is formed; for T = 1 ``Σ_n δ_n² (x_n²)ᵀ`` without forming it
its squared norm      ``|δ|²|x|²`` for T = 1, else formed, or a Gram product ``T² (K + O)``
column, propagated    ``2 T K O`` in each layer above
Kronecker factors     ``B``: ``O²`` for each column, ``A``: ``K²`` for each position (both are
                      symmetric), from autocorrelations for a convolution with stride 1
====================  ====================================================================

A layer never needs more columns than its output has entries.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmark.problems import Problem
from benchmark.quantities import PRODUCTS, Quantity

FLOAT = 4  # bytes
CURVED = (nn.Sigmoid, nn.Tanh, nn.GELU, nn.LayerNorm, nn.LSTM)


@dataclass(frozen=True)
class Rates:
    """Operations and bytes (read or written) a second."""

    operations: float
    bytes: float


def measure_rates(device: str = "cpu", size: int = 2048, repetitions: int = 7) -> Rates:
    """Measure a large matrix product, and a copy into memory that is there already."""
    a, b, c = (torch.rand(size, size, device=device) for _ in range(3))
    source = torch.rand(16 * size * size, device=device)
    target = torch.rand_like(source)

    def seconds(function: Callable[[], object]) -> float:
        times = []
        for _ in range(repetitions):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    product = seconds(lambda: torch.mm(a, b, out=c))
    copy = seconds(lambda: target.copy_(source))
    return Rates(2 * size**3 / product, 2 * FLOAT * source.numel() / copy)


@dataclass(frozen=True)
class Layer:
    """What a module with parameters does to one sample.

    Args:
        T: Positions.
        K: Inputs of the weight at a position.
        O: Outputs at a position.
        parameters: Number of parameters.
        read: Entries of input and output.
        offsets: Products of channels with channels for the input factor, relative to all
            ``K²/2`` of a position.
        curved_above: Entries of outputs of later modules (and this one) with a second derivative.
        matmul: Whether it multiplies with a weight; normalisations and embeddings do not.
    """

    T: int
    K: int
    O: int  # noqa: E741
    parameters: int
    read: int
    offsets: float = 1.0
    curved_above: int = 0
    matmul: bool = True

    @property
    def macs(self) -> int:
        """Multiplications of a sample's forward pass."""
        return self.T * self.K * self.O if self.matmul else 0

    @property
    def weights(self) -> int:
        """Entries of the weight."""
        return self.K * self.O if self.matmul else self.parameters


def _offsets(module: nn.Module) -> float:
    """Offsets between two pixels under a kernel, against pairs of pixels, up to symmetry."""
    if isinstance(module, nn.Conv2d) and set(module.stride) == {1} and module.groups == 1:
        k = module.kernel_size
        return min(1.0, math.prod(2 * i - 1 for i in k) / math.prod(i * i for i in k))
    return 1.0


def _layer(module: nn.Module, input: Tensor, output: Tensor) -> Layer:
    parameters = sum(p.numel() for p in module.parameters(recurse=False))
    read = (input.numel() + output.numel()) // len(input)
    if isinstance(module, nn.Linear):
        positions = output[0].numel() // module.out_features
        return Layer(positions, module.in_features, module.out_features, parameters, read)
    if isinstance(module, nn.modules.conv._ConvNd):
        K = module.weight[0].numel()
        positions = output[0, 0].numel()
        return Layer(positions, K, module.out_channels, parameters, read, _offsets(module))
    if isinstance(module, nn.LSTM):
        K, out = module.input_size + module.hidden_size, 4 * module.hidden_size
        return Layer(input.shape[1], K, out, parameters, read)
    return Layer(1, 1, output[0].numel(), parameters, read, matmul=False)


def layers_of(problem: Problem) -> list[Layer]:
    """Collect the layers with parameters, in the order of the forward pass."""
    model, (X, _) = problem.make(), problem.data()
    X = X[:2]
    found: list[Layer] = []
    curved: list[int] = []

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output = output[0] if isinstance(output, tuple) else output
        for i in range(len(curved)):
            curved[i] += output[0].numel() if isinstance(module, CURVED) else 0
        if any(True for _ in module.parameters(recurse=False)):
            found.append(_layer(module, inputs[0], output))
            curved.append(output[0].numel() if isinstance(module, nn.LSTM) else 0)

    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(hook)
    with torch.no_grad():
        model(X)
    return [
        Layer(**{**layer.__dict__, "curved_above": above})
        for layer, above in zip(found, curved, strict=True)
    ]


Part = tuple[str, float, float]  # name, operations, bytes: parts of equal name are done once


class Floor:
    """The extra work of quantities for a problem."""

    def __init__(self, problem: Problem):
        self.N = problem.batch
        self.positions = math.prod(problem.positions)
        # the softmax Hessian of each position has rank C − 1
        self.exact = (problem.classes - 1) * self.positions
        self.outputs = problem.classes * self.positions
        self.layers = layers_of(problem)

    # what is propagated

    def columns(self, propagated: str) -> list[int]:
        """Return the number of columns of a sample at the output of each layer."""
        if propagated in ("gradient", "sampled"):
            return [1] * len(self.layers)
        total = [self.exact + (propagated == "hessian") * x.curved_above for x in self.layers]
        return [min(V, x.T * x.O) for V, x in zip(total, self.layers, strict=True)]

    def transport(self, propagated: str) -> Part:
        """Columns through all layers but the first; the gradient is there already."""
        if propagated == "gradient":
            return ("", 0, 0)
        pairs = zip(self.layers[1:], self.columns(propagated)[1:], strict=True)
        return (propagated, sum(2 * self.N * V * x.macs for x, V in pairs), 0)

    # what is extracted

    def read(self) -> Part:
        """Inputs and gradients."""
        return ("read", 0, FLOAT * self.N * sum(x.read for x in self.layers))

    def form(self, propagated: str, everywhere: bool) -> Part:
        """Products of each sample and column; for T = 1 only if they are the result."""
        operations = 0
        for x, V in zip(self.layers, self.columns(propagated), strict=True):
            if x.T > 1 and x.matmul:
                operations += 2 * self.N * V * x.macs
            elif everywhere:
                operations += self.N * V * x.weights
        return (f"form {propagated}", operations, 0)

    def write(self, name: str, copies: int) -> Part:
        """Write results with the shape of the parameters."""
        return (f"write {name}", 0, FLOAT * copies * sum(x.parameters for x in self.layers))

    def individual(self, propagated: str, name: str, columns: int) -> list[Part]:
        """``[V, N, *p]``."""
        write = self.write(name, self.N * columns)
        return [self.transport(propagated), self.read(), self.form(propagated, True), write]

    def squares(self, propagated: str, name: str, of_samples: bool) -> list[Part]:
        """``[*p]``, or ``[N, *p]`` for each sample."""
        operations = 0
        for x, V in zip(self.layers, self.columns(propagated), strict=True):
            factors = V if x.T > 1 and x.matmul else 1
            operations += (1 if of_samples and factors == 1 else 2) * self.N * factors * x.weights
        return [
            self.transport(propagated),
            self.read(),
            self.form(propagated, False),
            (name, operations, 0),
            self.write(name, self.N if of_samples else 1),
        ]

    def norms(self) -> list[Part]:
        """``[N]``."""
        operations = 0
        for x in self.layers:
            if x.T == 1 or not x.matmul:
                operations += 2 * self.N * (x.K + x.O)
            else:
                gram = x.T**2 * (x.K + x.O)
                operations += self.N * min(2 * x.macs + 2 * x.weights, gram)
        return [self.read(), ("norms", operations, 0)]

    def kronecker(self, propagated: str, name: str) -> list[Part]:
        """``[O, O]`` and ``[K, K]``."""
        outer, inner, entries = 0.0, 0.0, 0
        for x, V in zip(self.layers, self.columns(propagated), strict=True):
            if x.matmul:
                outer += self.N * V * x.O * (x.T + x.O)
                inner += self.N * x.T * x.K**2 * x.offsets
                entries += x.O**2 + x.K**2
        parts = [self.transport(propagated), self.read()]
        return [*parts, ("input factors", inner, 0), (name, outer, FLOAT * entries)]

    def averaged(self) -> list[Part]:
        """KFRA: a matrix ``[D, D]`` of each layer's output goes to its input."""
        operations = sum(
            2 * x.macs * (x.T * x.O + x.read - x.T * x.O) for x in self.layers[1:] if x.matmul
        )
        inner = sum(self.N * x.T * x.K**2 * x.offsets for x in self.layers if x.matmul)
        return [self.read(), ("input factors", inner, 0), ("averaged", operations, 0)]

    def products(self) -> list[Part]:
        """A vector at each parameter, forward to the output and back."""
        above, operations = 0, 0
        for x in reversed(self.layers):
            operations += 4 * self.N * (x.macs + above)
            above += x.macs
        return [self.read(), ("products", operations, 0), self.write("products", 1)]

    def parts(self, extension: str) -> list[Part]:
        """Return the parts of an extension."""
        if extension in PRODUCTS:
            return self.products()
        table = {
            "BatchGrad": lambda: self.individual("gradient", extension, 1),
            "BatchL2Grad": self.norms,
            "SumGradSquared": lambda: self.squares("gradient", "squares", False),
            "Variance": lambda: self.squares("gradient", "squares", False),
            "DiagGGNMC": lambda: self.squares("sampled", extension, False),
            "BatchDiagGGNMC": lambda: self.squares("sampled", extension, True),
            "SqrtGGNMC": lambda: self.individual("sampled", extension, 1),
            "KFAC": lambda: self.kronecker("sampled", extension),
            "DiagGGNExact": lambda: self.squares("exact", extension, False),
            "BatchDiagGGNExact": lambda: self.squares("exact", extension, True),
            "SqrtGGNExact": lambda: self.individual("exact", extension, self.outputs),
            "KFLR": lambda: self.kronecker("exact", extension),
            "KFRA": self.averaged,
            "DiagHessian": lambda: self.squares("hessian", extension, False),
            "BatchDiagHessian": lambda: self.squares("hessian", extension, True),
        }
        return table[extension]()

    def extra(self, quantity: Quantity) -> tuple[float, float]:
        """Return operations and bytes; what extensions have in common counts once."""
        parts = {
            part[0]: part for extension in quantity.extensions for part in self.parts(extension)
        }
        return sum(p[1] for p in parts.values()), sum(p[2] for p in parts.values())

    def seconds(self, quantity: Quantity, plain: float, rates: Rates) -> float:
        """Return the floor of a step."""
        operations, size = self.extra(quantity)
        return plain + operations / rates.operations + size / rates.bytes

    # what cannot be done at all

    def result_bytes(self, quantity: Quantity) -> int:
        """Return the memory that results alone (and KFRA's matrix) take."""
        parameters = sum(x.parameters for x in self.layers)
        copies = {
            "BatchGrad": self.N,
            "BatchDiagGGNMC": self.N,
            "BatchDiagGGNExact": self.N,
            "BatchDiagHessian": self.N,
            "SqrtGGNMC": self.N,
            "SqrtGGNExact": self.N * self.outputs,
        }
        total = sum(copies.get(name, 1) for name in quantity.extensions) * parameters
        if "KFRA" in quantity.extensions:
            total += max(x.T * x.O for x in self.layers) ** 2
        return FLOAT * total

"""A training program that runs in four roles: with the library, without it, and as the truth.

What a sample contributes to the gradient is what the same program computes for that sample alone.
What a column of the loss Hessian's root becomes at the parameters is the gradient of the same
program whose loss is linear, with that column for a gradient. So plain autograd tells what the
quantities are, whatever the situation does to the network.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from networks import CLASSES, N, Network
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from backpack import backpack, extend

# what situations hang their hooks on
LAYERS = (nn.Conv2d, nn.LSTM, nn.LayerNorm, nn.Linear)


class Program:
    """One run of a situation.

    Args:
        network: What is trained.
        exts: Extensions; the program uses the library if it has some.
        sample: The only sample of the batch, for the truth of individual gradients.
        column: The column of the loss Hessian's root, for the truth of curvature.
    """

    def __init__(
        self,
        network: Network,
        exts: Sequence[Any] = (),
        sample: int | None = None,
        column: int | None = None,
    ) -> None:
        self.network, self.exts, self.sample, self.column = network, exts, sample, column
        self.model, self.lossfunc = network(), nn.CrossEntropyLoss()
        self.X, self.y = network.data()
        if sample is not None:
            self.X, self.y = self.X[sample : sample + 1], self.y[sample : sample + 1]
        self.names = [name for name, _ in self.model.named_parameters()]
        self.seen: list[tuple[str, Any]] = []
        self.calls: list[str] = []  # of hooks
        self.gradients: list[list[Tensor | None]] = []  # what each backward pass has added
        self.quantities: list[dict[str, list[Any]]] = []  # of each backward pass
        self.left: Counter[Any] = Counter()
        self.stack = ExitStack()

    # ------------------------------------------------------------------ what situations use

    @property
    def is_extended(self) -> bool:
        return bool(self.exts)

    @property
    def is_truth_of_curvature(self) -> bool:
        return self.column is not None

    @property
    def layers(self) -> list[nn.Module]:
        return [module for module in self.model.modules() if type(module) in LAYERS]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def extend(self) -> None:
        """Extend model and loss, if the library is used."""
        if self.is_extended:
            self.model = extend(self.model, use_converter=self.network.use_converter)
            self.lossfunc = extend(self.lossfunc)

    def context(self, *exts: Any, **options: Any) -> AbstractContextManager[Any]:
        """Enter ``backpack(...)`` with these extensions, else with those of the program."""
        return backpack(*(exts or self.exts), **options) if self.is_extended else nullcontext()

    def loss(self, output: Tensor, y: Tensor | None = None) -> Tensor:
        """[N, C] -> []: a part of it, or a linear one, if the program is the truth."""
        self.see("output", output)
        if self.column is not None:
            p = output.detach().double().softmax(1)
            root = torch.diag_embed(p.sqrt()) - p.unsqueeze(2) * p.sqrt().unsqueeze(1)
            return (output * root[:, :, self.column] / N**0.5).sum()
        loss = self.lossfunc(output, self.y if y is None else y)
        return loss if self.sample is None else loss / N

    def weighted(self, loss: Tensor, weight: float) -> Tensor:
        """A multiple of a loss, of whose Hessian a column is the root."""
        return loss * (weight**0.5 if self.is_truth_of_curvature else weight)

    def forward(self) -> Tensor:
        return self.loss(self.model(self.X))

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Call ``backward()`` in the context, and keep what comes of it."""
        before = self.copies_of_gradients()
        with self.context():
            loss.backward(**options)
        self.measure(before)

    def step(self) -> None:
        self.backward(self.forward())

    def copies_of_gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.detach().clone() for p in self.parameters]

    def measure(self, before: Sequence[Tensor | None] = ()) -> None:
        """Keep what a backward pass has added to the gradients, and the quantities."""
        now, before = self.copies_of_gradients(), before or [None] * len(self.parameters)
        trained = [p.requires_grad for p in self.parameters]
        added = [g if old is None else g - old for g, old in zip(now, before, strict=True)]
        self.gradients.append([g if t else None for g, t in zip(added, trained, strict=True)])
        self.quantities.append(
            {
                ext.savefield: [
                    getattr(p, ext.savefield, None) if p.requires_grad else None
                    for p in self.parameters
                ]
                for ext in self.exts
            }
        )

    def drop_results(self) -> None:
        for p in self.parameters:
            for ext in self.exts:
                vars(p).pop(ext.savefield, None)

    def see(self, what: str, value: Any) -> None:
        """Keep a value that has to be the same without the library."""
        if isinstance(value, Tensor):
            value = (value.dtype, value.shape, value.stride(), value.detach().clone())
        self.seen.append((what, value))

    def noted(self, what: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook whose calls have to be the same without the library."""

        def noting(*args: Any) -> Any:
            self.calls.append(what)
            return hook(*args)

        return noting

    def alter(self, gradient: Tensor) -> Tensor:
        """Change a gradient that others depend on; the network, and its curvature, stay."""
        return gradient if self.is_truth_of_curvature else 0.5 * gradient

    def alter_finally(self, gradient: Tensor) -> Tensor:
        """Change the gradient of a parameter, which quantities do not follow."""
        return gradient if self.sample is not None else 0.5 * gradient

    # ------------------------------------------------------------------ what the test uses

    def run(self, situation: Callable[[Program], None]) -> Program:
        """Run a situation, and look at what it leaves."""
        with sdpa_kernel(SDPBackend.MATH), self.stack:
            situation(self)
        for name, p in zip(self.names, self.parameters, strict=True):
            self.see(f"{name}", p)
            self.see(f"gradient of {name}", p.grad)
        self.see("random number", torch.rand(1))
        return self

    def tensors_left(self) -> Counter[Any]:
        """Count the tensors that live on, apart from results and what is kept here.

        And apart from fake ones, without memory: torch's compiler leaves some for each graph that
        it has compiled, without the library, too, and hooks divide a model into several graphs.
        """
        gc.collect()
        kept = [self.gradients, [value for _, value in self.seen], self.quantities]
        kept += [vars(p).get(ext.savefield) for p in self.parameters for ext in self.exts]
        results = [x for x in tree_leaves(kept) if isinstance(x, Tensor)]
        own = {id(x) for result in results for x in (result, *vars(result).values())}
        tensors = [
            x
            for x in gc.get_objects()
            if issubclass(type(x), Tensor) and type(x) is not FakeTensor and id(x) not in own
        ]
        return Counter((tuple(x.shape), x.dtype) for x in tensors)


Values = list[list[Tensor | None]]  # of each backward pass, of each parameter


def gradients_of(situation: Callable[[Program], None], network: Network) -> Values:
    """What the samples have added to the gradients, [N, *p]."""
    return stacked([Program(network, sample=n).run(situation).gradients for n in range(N)])


def columns_of(situation: Callable[[Program], None], network: Network) -> Values:
    """What the columns of the loss Hessian's root become at the parameters, [C, N, *p]."""
    return stacked(
        [
            stacked(
                [Program(network, sample=n, column=c).run(situation).gradients for n in range(N)]
            )
            for c in range(CLASSES)
        ]
    )


def stacked(runs: list[Values]) -> Values:
    """Put the values of several runs next to each other, if there are some."""
    return [
        [
            None if any(v is None for v in values) else torch.stack(values)
            for values in zip(*passes, strict=True)
        ]
        for passes in zip(*runs, strict=True)
    ]

"""The check that the documentation recommends to writers of extensions finds planted faults."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import oracle
import pytest
import test_docs
import torch
from torch import Tensor, nn

from backpack import CTX, extensions
from backpack.check import Network, check_extension
from backpack.core.derivatives.lossbase import scaled_identity
from backpack.core.engine.backpropagation import Backpropagation, LossSource
from backpack.core.engine.propagations import ExactFactor, Propagation
from backpack.core.record.context import context_of
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension

TRUTHS = {
    extensions.BatchGrad: oracle.batch_grad,
    extensions.BatchL2Grad: oracle.batch_l2,
    extensions.SumGradSquared: oracle.sum_grad_squared,
    extensions.Variance: oracle.variance,
    extensions.DiagGGNExact: oracle.ggn_diag,
    extensions.BatchDiagGGNExact: oracle.batch_ggn_diag,
    extensions.DiagHessian: oracle.hessian_diag,
}


@pytest.mark.parametrize("ext", TRUTHS)
def test_extensions_of_the_library_agree_with_the_oracle(ext: Any) -> None:
    check_extension(ext(), TRUTHS[ext])


WITHOUT_TRUTH = [
    getattr(extensions, name)
    for name in extensions.__all__
    if name != "HBP" and getattr(extensions, name) not in TRUTHS
]


@pytest.mark.parametrize("ext", WITHOUT_TRUTH)
def test_all_others_keep_the_contract(ext: Any) -> None:
    check_extension(ext())


class Length(FirstOrderBackpropExtension):
    """Length of each individual gradient: [N]. Its subclasses have one fault each."""

    needs: Any = ("individual",)

    def __init__(self, subsampling: Sequence[int] | None = None) -> None:
        super().__init__("length", subsampling=subsampling)

    def extract(self, products: Any) -> Any:
        return products["individual"][0].flatten(1).norm(dim=1)


def length(model: nn.Module, lossfunc: Any, X: Tensor, y: Tensor) -> list[Tensor]:
    return [norms.sqrt() for norms in oracle.batch_l2(model, lossfunc, X, y)]


class Squared(Length):
    def extract(self, products: Any) -> Any:
        return super().extract(products) ** 2


class WrongShape(Length):
    def extract(self, products: Any) -> Any:
        return super().extract(products).unsqueeze(1)


class ChangesProducts(Length):
    def extract(self, products: Any) -> Any:
        individual = products["individual"]
        individual /= individual.flatten(2).norm(dim=2).amax()
        return super().extract(products)


class ChangesNorms(Length):
    needs = ("square_norm",)

    def extract(self, products: Any) -> Any:
        return products["square_norm"].sqrt_()


class Remembers(Length):
    """Weights by the largest norm that it has ever seen."""

    def __init__(self, subsampling: Sequence[int] | None = None) -> None:
        super().__init__(subsampling)
        self.largest = torch.zeros(())

    def extract(self, products: Any) -> Any:
        norms = super().extract(products)
        self.largest = torch.maximum(self.largest, norms.max())
        return norms / self.largest


class Rescales(Length):
    """Makes up for the samples that are left out, which nothing else does."""

    def extract(self, products: Any) -> Any:
        rows = self.get_subsampling()
        return super().extract(products) * (1 if rows is None else 5 / len(rows))


class Counts(Length):
    """Is another quantity in every pass, but not at random."""

    def extract(self, products: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return super().extract(products) * self.count


class Sorts(Length):
    def extract(self, products: Any) -> Any:
        rows = self.get_subsampling()
        norms = super().extract(products)
        return norms if rows is None else norms[sorted(range(len(rows)), key=rows.__getitem__)]


class Forgets(Length):
    def finish(self, collected: Any) -> Any:
        return [(p, self.savefield, value) for p, value in collected.items() if p.dim() > 1]


class ChangesGradient(Length):
    def finish(self, collected: Any) -> Any:
        for p in collected:
            p.grad.mul_(2)
        return super().finish(collected)


class OtherField(Length):
    def finish(self, collected: Any) -> Any:
        return [(p, "len", value) for p, value in collected.items()]


FAULTS = {
    ChangesProducts: r"p\.grad beside ChangesProducts.*deviate.*in place",
    ChangesNorms: r"batch_l2 beside ChangesNorms.*deviate.*in place",
    Remembers: r"after a pass of other data,.*keep nothing of one in it",
    Counts: r"after a pass of other data,.*keep nothing of one in it",
    Rescales: r"with subsampling=\[4, 0\],.*nothing is rescaled",
    Sorts: r"with subsampling=\[4, 0\],.*the chosen samples already",
    Forgets: r"'0\.bias' of shape \[6\] has no 'length', but no results",
    ChangesGradient: r"p\.grad beside ChangesGradient.*deviate",
    OtherField: r"'0\.weight' of shape \[6, 4\] has no 'length', but len",
}
WRONG = {
    Squared: r"length of Squared on fully connected layers of parameter '0\.weight' has shape "
    r"\[5\], but entries of up to .* deviate",
    WrongShape: r"'0\.weight' has shape \[5, 1\], expected \[5\]",
}


def test_right_one_passes() -> None:
    check_extension(Length(), length)


@pytest.mark.parametrize("ext", FAULTS)
def test_fault_is_found_without_the_truth(ext: Any) -> None:
    with pytest.raises(AssertionError, match=FAULTS[ext]) as caught:
        check_extension(ext())
    assert ext.__name__ in str(caught.value)


@pytest.mark.parametrize("ext", WRONG)
def test_wrong_value_is_found(ext: Any) -> None:
    check_extension(ext())
    with pytest.raises(AssertionError, match=WRONG[ext]):
        check_extension(ext(), length)


class Depends(SecondOrderBackpropExtension):
    """Looks at what else is active."""

    propagation = ExactFactor()
    needs: Any = ("square",)

    def __init__(self) -> None:
        super().__init__("depends")

    def extract(self, products: Any) -> Any:
        return products.take("square") * len(CTX.get_active_exts())


def test_result_that_depends_on_other_extensions() -> None:
    with pytest.raises(AssertionError, match=r"Depends.*beside other ext.*what else is computed"):
        check_extension(Depends())


@dataclass(frozen=True)
class OutputRows(Propagation):
    """The rows of the network's Jacobian: those of a class at all positions are one, or are not."""

    positions_are_one: bool
    reads_gradients = False

    def run(self, plan: Any, exts: Any, subsampling: Any, save: Any) -> None:
        backpropagation = Backpropagation(plan, exts, subsampling, save)
        backpropagation.run([LossSource(call, partial(self.units, call)) for call in plan.losses])

    def units(self, call: Any, rows: Any) -> Any:
        prediction = context_of(call, rows).x  # [N, C, *]
        if not self.positions_are_one:
            return scaled_identity(torch.ones_like(prediction)), None
        C, (_, _, *positions) = prediction.shape[1], prediction.shape
        unit = torch.eye(C, dtype=prediction.dtype).reshape(C, 1, C, *[1] * len(positions))
        return unit.expand(C, *prediction.shape), None


class SquaredJacobian(SecondOrderBackpropExtension):
    """Sum of the squared rows of the Jacobian of all samples: [*p]."""

    needs = ("square",)

    def __init__(self, positions_are_one: bool = False) -> None:
        super().__init__("squared_jacobian")
        self.propagation = OutputRows(positions_are_one)


def squared_jacobian(model: nn.Module, lossfunc: Any, X: Tensor, y: Tensor) -> list[Tensor]:
    params = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in params]
    for entry in model(X).flatten():
        rows = torch.autograd.grad(entry, params, retain_graph=True)
        total = [t + row**2 for t, row in zip(total, rows, strict=True)]
    return total


def test_positions_of_a_loss_that_are_taken_for_one() -> None:
    """An extension that takes the predictions of a sample for one of each class."""
    check_extension(SquaredJacobian(), squared_jacobian)
    with pytest.raises(AssertionError, match="SquaredJacobian on a loss of every position"):
        check_extension(SquaredJacobian(positions_are_one=True), squared_jacobian)


class UndoesMean(Length):
    """Undoes a mean over the samples, which is one over their positions as well."""

    def extract(self, products: Any) -> Any:
        return super().extract(products) * len(products["individual"][0])


def test_samples_that_are_taken_for_the_terms_of_a_mean() -> None:
    """The truth undoes the mean over all targets of classes."""

    def of_sum(model: Any, lossfunc: Any, X: Tensor, y: Tensor) -> list[Tensor]:
        count = len(y) if y.is_floating_point() else y.numel()
        return [norms * count for norms in length(model, lossfunc, X, y)]

    with pytest.raises(AssertionError, match="UndoesMean on a loss of every position"):
        check_extension(UndoesMean(), of_sum)


def test_reduction_that_is_not_that_of_the_samples() -> None:
    """A wrong truth is noticed like a wrong extension, also where a layer is used twice alone."""

    def uses_apart(model: Any, lossfunc: Any, X: Tensor, y: Tensor) -> list[Tensor]:
        values = length(model, lossfunc, X, y)
        is_reused = len({*map(id, model)}) < len(model)
        return [1.1 * value for value in values] if is_reused else values

    with pytest.raises(AssertionError, match="a layer that is used twice"):
        check_extension(Length(), uses_apart)


def test_networks_of_ones_own() -> None:
    X, y = torch.rand(4, 3), torch.rand(4, 2)
    network = Network("mine", nn.Sequential(nn.Linear(3, 2)), nn.MSELoss(), X, y)
    check_extension(Length(), length, [network])
    with pytest.raises(AssertionError, match="Squared on mine"):
        check_extension(Squared(), length, [network])


def test_what_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="Length for all samples"):
        check_extension(Length(subsampling=[0]))
    alone = Network("one", nn.Linear(3, 2), nn.MSELoss(), torch.rand(1, 3), torch.rand(1, 2))
    with pytest.raises(ValueError, match="one has one"):
        check_extension(Length(), networks=[alone])
    used_up: Iterator[Network] = iter(())
    with pytest.raises(ValueError, match="given no network, and has tried nothing"):
        check_extension(Length(), length, used_up)
    with pytest.raises(AssertionError, match=r"expected returned 0 values for 4 parameters.*0\.w"):
        check_extension(Length(), lambda *_: [])


def test_caller_keeps_models_and_random_numbers() -> None:
    network = Network(
        "mine", nn.Sequential(nn.Linear(3, 2)), nn.MSELoss(), torch.rand(4, 3), torch.rand(4, 2)
    )
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check_extension(Length(), length, [network])
    assert torch.equal(torch.rand(2), expected)
    assert network.model[0].weight.dtype == torch.float32  # type: ignore[index, union-attr]
    assert not vars(network.model[0].weight)  # type: ignore[index]


def test_extensions_of_the_documentation() -> None:
    """All that work on any network keep the contract."""
    names = test_docs.run("write_an_extension.rst")
    found = [
        value
        for value in names.values()
        if inspect.isclass(value)
        and issubclass(value, BackpropExtension)
        and value.__module__ == "page"
        and value.needs
    ]
    wrong = [
        ext for ext in found if ext.__name__ == "Rescaled"
    ]  # on which the page shows the check
    assert len(found) >= 4
    assert len(wrong) == 1
    for ext in found:
        if ext not in wrong:
            check_extension(ext())


class SavesNumbers(FirstOrderBackpropExtension):
    """Saves a number."""

    needs = ("individual",)

    def __init__(self) -> None:
        super().__init__("length")

    def extract(self, products: Any) -> Any:
        return {"length": [products["individual"][0].norm().item()]}


def lengths(factor: float) -> Any:
    def truth(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> list[Any]:
        params = [p for p in model.parameters() if p.requires_grad]
        terms = [loss(model(X[[n]]), y[[n]]) / len(X) for n in range(len(X))]
        grads = zip(*[torch.autograd.grad(term, params) for term in terms], strict=True)
        return [{"length": [factor * torch.stack(own).norm().item()]} for own in grads]

    return truth


def test_numbers_in_dictionaries() -> None:
    check_extension(SavesNumbers(), lengths(1.0))
    with pytest.raises(AssertionError, match="deviate"):
        check_extension(SavesNumbers(), lengths(1.1))


class CountsPositive(Length):
    """Saves how many entries are positive, as integers."""

    def extract(self, products: Any) -> Any:
        return (products["individual"][0] > 0).sum()


def test_truth_keeps_what_the_result_cannot_hold() -> None:
    """Halves are not rounded to the integers of the result, nor imaginary parts dropped."""

    def counts(more: complex) -> Any:
        def truth(*args: Any) -> list[Any]:
            each = oracle.batch_grad(*args)
            return [(own[0] > 0).sum() + more for own in each]

        return truth

    network = Network("mine", nn.Linear(3, 2), nn.MSELoss(), torch.rand(4, 3), torch.rand(4, 2))
    check_extension(CountsPositive(), counts(0), network)
    for more in (0.5, 0.5j):
        with pytest.raises(AssertionError, match=r"deviate by up to 0\.5"):
            check_extension(CountsPositive(), counts(more), network)


def test_objects_are_not_compared_in_silence() -> None:
    with pytest.raises(AssertionError, match="compare what it returns"):
        check_extension(extensions.GGNMP(), lambda model, *_: [0] * len(list(model.parameters())))


def test_no_instance() -> None:
    with pytest.raises(TypeError, match="instance"):
        check_extension(extensions.BatchGrad)  # type: ignore[arg-type]

"""Gradients of the batch that individual gradients add up to: autograd leaves them out, or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from apart import run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import backpack as library
from backpack import extend
from backpack.core.derivatives import recurrent, recurrent_network
from backpack.core.engine import elided_gradients
from backpack.core.engine.backward_pass import Collector
from backpack.core.record import alive
from backpack.core.record.origins import is_output
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.extensions import (
    KFAC,
    BatchGrad,
    BatchL2Grad,
    ClippedGrad,
    DiagGGNExact,
    DiagHessian,
    SumGradSquared,
    Variance,
)
from backpack.extensions.firstorder.base import FirstOrderModuleExtension

backpack = partial(library.backpack, sum_individual_gradients=True)
EXTENSIONS = (BatchGrad, BatchL2Grad, SumGradSquared, Variance)
# whether backward(inputs={name: parameter}) is known (newer versions of torch)
TAKES_NAMES = "dict" in str(signature(torch.autograd.backward).parameters["inputs"].annotation)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[set[Any]]:
    """Let small networks take part, and note what is elided in each backward pass."""
    found: list[set[Any]] = []
    elide = elided_gradients.elide

    def noting(*args: Any) -> Any:
        result = elide(*args)
        found.append(set(result[0]))
        return result

    monkeypatch.setattr(elided_gradients, "WORTHWHILE", 0)
    monkeypatch.setattr(elided_gradients, "elide", noting)
    return found


def network() -> nn.Sequential:
    """Convolutions with and without bias, and a linear layer at several positions."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Tanh(),
        nn.Conv2d(4, 5, 3, bias=False, padding=1),
        nn.Tanh(),
        nn.ConvTranspose2d(5, 2, 2),
        nn.Flatten(2),
        nn.Linear(49, 6),
        nn.Flatten(),
        nn.Linear(12, 3),
    ).double()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.rand(5, 3, 8, 8, dtype=torch.float64), torch.randint(3, (5,))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


Step = Callable[[nn.Module, nn.Module], Tensor]


def compare(model: nn.Module, step: Step, *exts: Any, use_converter: Any = False) -> nn.Module:
    """Compare gradients of an extended model with those of the model as it was."""
    lossfunc = nn.CrossEntropyLoss()
    step(model, lossfunc).backward()
    expected = gradients(model)
    model.zero_grad()
    extend(model, use_converter=use_converter), extend(lossfunc)
    loss = step(model, lossfunc)
    with backpack(*exts):
        loss.backward()
    for found, one in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(found, one)
    return model


def plain(model: nn.Module, lossfunc: nn.Module) -> Tensor:
    x, y = data()
    return lossfunc(model(x), y)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_gradients_are_those_of_autograd(
    extension: Any, chosen: list[set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elide those of all convolutions; quantities are what they are without.

    At a single position, the sum of individual gradients takes a product, too: the linear layer
    takes part if somebody wants that sum.
    """
    model = compare(network(), plain, extension())
    elided = {p for i in (0, 2, 4) for p in model[i].parameters()} | {model[6].weight}
    elided |= {model[8].weight} if extension is Variance else set()
    assert chosen == [elided]
    values = [getattr(p, extension().savefield) for p in model.parameters()]
    monkeypatch.setattr(elided_gradients, "WORTHWHILE", float("inf"))
    other = compare(network(), plain, extension())
    assert len(chosen) == 1
    for value, p in zip(values, other.parameters(), strict=True):
        torch.testing.assert_close(value, getattr(p, extension().savefield))


@pytest.mark.parametrize("use_converter", [False, True, "record"])
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_forward_pass_inside_of_the_context(
    extension: Any, use_converter: Any, chosen: list[set[Any]]
) -> None:
    """The same as before it, also in the step that follows, which has the loss of this one."""
    found = []
    for is_inside in (False, True):
        model, lossfunc = network(), extend(nn.CrossEntropyLoss())
        extended = extend(model, use_converter=use_converter)
        loss: Any = None
        for _ in range(2):
            extended.zero_grad()
            loss = None if is_inside else plain(extended, lossfunc)
            with backpack(extension()):
                loss = plain(extended, lossfunc) if is_inside else loss
                loss.backward()
        numbers = {p: i for i, p in enumerate(extended.parameters())}
        elided = [{numbers[p] for p in params} for params in chosen]
        values = [getattr(p, extension().savefield) for p in extended.parameters()]
        found.append((elided, gradients(extended), values))
        chosen.clear()
    assert found[0][0][0]
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1:], found[1][1:])


def test_sum_of_individual_gradients_when_several_extensions_share_a_pass(
    chosen: list[set[Any]],
) -> None:
    """First and second order together."""
    exts = [extension() for extension in EXTENSIONS]
    model = compare(network(), plain, *exts, DiagGGNExact())
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
    assert len(chosen[0]) == 7


def test_first_linear_layer(chosen: list[set[Any]]) -> None:
    """Autograd reaches it, though it may be asked for nothing else there (without a bias)."""
    for bias in (True, False):
        layers = [nn.Flatten(), nn.Linear(192, 4, bias=bias), nn.Tanh(), nn.Linear(4, 3, bias=bias)]
        model = compare(nn.Sequential(*layers).double(), plain, Variance())
        assert chosen.pop() == {model[3].weight, model[1].weight}


def test_gradients_accumulate(chosen: list[set[Any]]) -> None:
    """Two backward passes add up, in the tensor that is there."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    for _ in range(2):
        loss = plain(model, lossfunc)
        with backpack(Variance()):
            loss.backward()
        first = [p.grad for p in model.parameters()]
    assert len(chosen) == 2 and all(chosen)
    other = network()
    (2 * plain(other, nn.CrossEntropyLoss())).backward()
    for p, q, grad in zip(model.parameters(), other.parameters(), first, strict=True):
        assert p.grad is grad
        torch.testing.assert_close(p.grad, q.grad)


def test_small_networks_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the threshold, nobody looks at the graph."""
    monkeypatch.setattr(elided_gradients, "elide", lambda *_: pytest.fail("not worthwhile"))
    compare(network(), plain, BatchGrad())


def layers(model: nn.Module, lossfunc: nn.Module) -> Tensor:
    x, y = data()
    first, (state, _) = model[0](x.flatten(2))
    second, _ = model[1](first)
    return lossfunc(model[2](second).mean(1) + model[3](state[0]), y)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_recurrent_layers(extension: Any, chosen: list[set[Any]]) -> None:
    """The first ones take part: fused kernels compute all gradients at once, or none."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LSTM(64, 4, batch_first=True),
        nn.GRU(4, 5, num_layers=2, bidirectional=True, batch_first=True),
        nn.Linear(10, 3),
        nn.Linear(4, 3),
    ).double()
    compare(model, layers, extension())
    wanted = extension is Variance  # of the linear layer that reads a state, see above
    linear = {model[2].weight} | ({model[3].weight} if wanted else set())
    assert chosen == [{*model[0].parameters()} | linear]


def test_a_leaf_beside_the_loss(chosen: list[set[Any]]) -> None:
    """It gets its gradient."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    leaf = torch.tensor(1.0, requires_grad=True)
    with backpack(BatchGrad()):
        torch.autograd.backward([plain(model, lossfunc), leaf])
    assert leaf.grad == 1
    assert all(p.grad is not None for p in model.parameters())


def kernel_of(output: Tensor) -> Any:
    """Return the node of the fused kernel that has computed a recurrent layer's output."""
    node: Any = output.grad_fn
    while "Rnn" not in type(node).__name__:
        node = node.next_functions[0][0]
    return node


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="there is no fused kernel")
class TestFusedLayers:
    """LSTMs whose backward kernel is not run for the gradients of parameters."""

    @pytest.fixture
    def pulled(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Note for which layers and directions it is computed what arrives."""
        found: list[int] = []
        pull = recurrent_network.pull_direction

        def noting(network: Any, k: int, *args: Any) -> Any:
            found.append(k)
            return pull(network, k, *args)

        monkeypatch.setattr(recurrent_network, "pull_direction", noting)
        monkeypatch.setattr(recurrent, "pull_direction", noting)
        return found

    @pytest.fixture
    def computed(self, chosen: list[set[Any]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Note in whose place something is computed: numbers of layers and directions."""
        found: list[int] = []
        compute = recurrent.FusedLayer.compute

        def noting(layer: Any, *args: Any) -> Any:
            found.append(layer.k)
            return compute(layer, *args)

        monkeypatch.setattr(recurrent.FusedLayer, "compute", noting)
        return found

    class Network(nn.Module):
        """Reads numbers of words, and uses the states as well as the output."""

        def __init__(self, **options: Any):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(7, 3)
            self.lstm = nn.LSTM(3, 4, **options)
            directions = 2 if self.lstm.bidirectional else 1
            k = directions * self.lstm.num_layers
            self.start = nn.Linear(3, 2 * k * 4)
            self.end = nn.Linear(4 * directions + 4 * k, 3)

        def forward(self, words: Tensor) -> Tensor:
            x = self.embedding(words)
            h, c = self.start(x[:, 0]).unflatten(1, (2, -1, 4)).permute(1, 2, 0, 3).contiguous()
            is_first = self.lstm.batch_first
            output, (h, _) = self.lstm(x if is_first else x.transpose(0, 1), (h, c))
            output = output.mean(1 if is_first else 0)
            return self.end(torch.cat([output, h.transpose(0, 1).flatten(1)], 1))

    @staticmethod
    def words(model: nn.Module, lossfunc: nn.Module) -> Tensor:
        torch.manual_seed(1)
        return lossfunc(model(torch.randint(7, (5, 6))), torch.randint(3, (5,)))

    def compare(self, *exts: Any, **options: Any) -> Any:
        return compare(self.Network(**options), self.words, *exts, use_converter="record")

    @pytest.mark.parametrize("extension", EXTENSIONS)
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"batch_first": True, "num_layers": 2},
            {"bidirectional": True, "bias": False},
            {"batch_first": True, "num_layers": 2, "bidirectional": True},
        ],
        ids=str,
    )
    def test_all_layers(
        self,
        options: dict[str, Any],
        extension: Any,
        computed: list[int],
        pulled: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Gradients and quantities are what they are without, and each layer is computed once."""
        results = []
        for worthwhile in (0, float("inf")):
            monkeypatch.setattr(elided_gradients, "WORTHWHILE", worthwhile)
            model = self.compare(extension(), **options)
            fields = [getattr(p, extension().savefield) for p in model.parameters()]
            results.append([t for t in fields if not t.is_sparse])
        torch.testing.assert_close(*results)
        k = options.get("num_layers", 1) * (2 if "bidirectional" in options else 1)
        assert sorted(pulled) == sorted(2 * [*range(k)])
        assert sorted(computed) == ([] if extension is BatchL2Grad else [*range(k)])

    def test_first_layers_of_a_module(self, computed: list[int], pulled: list[int]) -> None:
        """Where the input is data, nothing is computed for it."""
        model = nn.Sequential(nn.LSTM(64, 4, 2, batch_first=True), nn.GRU(4, 5, batch_first=True))
        model.append(nn.Linear(5, 3))

        def step(model: nn.Module, lossfunc: nn.Module) -> Tensor:
            x, y = data()
            first, _ = model[0](x.flatten(2).float())
            return lossfunc(model[2](model[1](first)[0]).mean(1), y)

        compare(model, step, BatchGrad())
        assert computed == [1] and sorted(pulled) == [0, 0, 1]

    def test_gradient_of_the_data(self, computed: list[int], chosen: list[set[Any]]) -> None:
        """The kernel itself is not run."""
        model, lossfunc = extend(nn.LSTM(3, 4, batch_first=True)), extend(nn.MSELoss())
        for x in (torch.rand(2, 5, 3), torch.rand(2, 5, 3, requires_grad=True)):
            output, _ = model(x)
            loss = lossfunc(output, torch.zeros_like(output))
            expected = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            received: list[Any] = []
            node = kernel_of(output)

            def look(_: Tensor, node: Any = node, to: list[Any] = received) -> None:
                node.register_hook(lambda inputs, _: to.extend(inputs))

            output.register_hook(look)  # a hook that was there before would be seen
            with backpack(BatchGrad()):
                loss.backward()
            for p, grad in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, grad)
                p.grad = None
            assert [g is not None for g in received] == [x.requires_grad] + 6 * [False]
        assert chosen == 2 * [{*model.parameters()}] and computed == [0]

    @pytest.mark.parametrize("why", ["a penalty", "frozen", "hook"])
    def test_parameters_that_are_not_elided(self, why: str, computed: list[int]) -> None:
        """Then the kernel runs, unless the others are elided."""
        model = self.Network()
        p = model.lstm.weight_hh_l0
        if why == "frozen":
            p.requires_grad_(False)
        if why == "hook":
            p.register_hook(lambda grad: 2 * grad)

        def step(model: nn.Module, lossfunc: nn.Module) -> Tensor:
            penalty = p.square().sum() if why == "a penalty" else 0
            return self.words(model, lossfunc) + penalty

        compare(model, step, Variance(), use_converter="record")
        assert computed == ([0] if why == "frozen" else [])

    def test_imports(self) -> None:
        """A step imports no compiler, which takes a second and 130 MB."""
        code = """
import sys, torch
from backpack import backpack, extend, extensions
model, lossfunc = extend(torch.nn.LSTM(64, 128)), extend(torch.nn.MSELoss())
x = torch.rand(50, 60, 64, requires_grad=True)
output, _ = model(x)
loss = lossfunc(output, torch.zeros_like(output))
from backpack.core.derivatives.recurrent import FusedLayer
compute, calls = FusedLayer.compute, []
FusedLayer.compute = lambda layer, *args: calls.append(layer) or compute(layer, *args)
before = set(sys.modules)
with backpack(extensions.BatchGrad(), sum_individual_gradients=True):
    loss.backward()
assert calls
print(*(set(sys.modules) - before))
"""
        assert "dynamo" not in run(sys.executable, "-c", code)

    def test_nothing_arrives(self, computed: list[int]) -> None:
        """A hook of the graph takes the gradient away."""
        model, lossfunc = extend(nn.LSTM(3, 4)), extend(nn.MSELoss())
        x = torch.rand(5, 2, 3, requires_grad=True)
        output, _ = model(x)
        node: Any = output.grad_fn

        def take_away(_: Tensor) -> None:
            node.register_prehook(lambda grads: (None,) * len(grads))

        output.register_hook(take_away)
        loss = lossfunc(output, torch.zeros_like(output))
        missing = pytest.raises(RuntimeError, match="no gradient has arrived")
        with missing, backpack(BatchGrad()):
            loss.backward()
        assert computed == [0] and x.grad is None
        assert not any(hasattr(p, "grad_batch") for p in model.parameters())

    def test_first_and_second_order(self, computed: list[int]) -> None:
        """Other columns than the gradient arrive at the same layers."""
        exts = [BatchGrad(), SumGradSquared(), DiagGGNExact()]
        model = self.compare(*exts, num_layers=2)
        alone = self.compare(DiagGGNExact(), num_layers=2)
        for p, q in zip(model.lstm.parameters(), alone.lstm.parameters(), strict=True):
            torch.testing.assert_close(p.diag_ggn_exact, q.diag_ggn_exact)
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
        assert sorted(computed) == [0, 1]

    def test_passes_through_one_graph(self, computed: list[int]) -> None:
        """Each pass gets what it asks for; the last is autograd's alone."""
        model, lossfunc = (
            extend(self.Network(), use_converter="record"),
            extend(nn.CrossEntropyLoss()),
        )
        loss = self.words(model, lossfunc)
        for scale in (1, 3):
            with backpack(BatchGrad(), retain_graph=True):
                (scale * loss).backward(retain_graph=True)
        for p in model.lstm.parameters():
            torch.testing.assert_close(p.grad, 4 / 3 * p.grad_batch.sum(0))
        before = gradients(model)
        loss.backward()
        for p, grad in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.grad, 5 / 4 * grad)
        assert computed == [0, 0]

    def test_a_pass_inside_of_another(self, computed: list[int]) -> None:
        """Through the same graph: it has all gradients that it asks for."""
        layer = extend(nn.LSTM(3, 4))
        parameters = [*layer.parameters()]
        output, _ = layer(torch.rand(5, 2, 3, requires_grad=True))
        first, second = output.square().sum(), output.sum()
        wanted = torch.autograd.grad(first + second, parameters, retain_graph=True)
        pending = [second]

        def nested(_: Tensor) -> None:
            for loss in pending:
                pending.clear()
                loss.backward(retain_graph=True, inputs=parameters)

        output.register_hook(nested)
        with backpack(Variance(), retain_graph=True):
            first.backward(retain_graph=True)
        for p, grad in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(p.grad, grad)
        assert computed == [0] and not pending

    def test_a_pass_through_another_layer(self, computed: list[int]) -> None:
        """While a node runs, in a hook of that node: it has nothing to do with the override."""
        layer, other = extend(nn.LSTM(3, 4)), nn.LSTM(3, 4)
        x = torch.rand(5, 2, 3)
        wanted = torch.autograd.grad(other(x)[0].sum(), [*other.parameters()])
        output, _ = layer(x.clone().requires_grad_())
        node = kernel_of(output)

        def nested(*_: Any) -> None:
            with torch.enable_grad():
                other(x)[0].sum().backward()

        def begin(_: Tensor) -> None:
            node.register_prehook(nested)  # after those of the override

        output.register_hook(begin)
        with backpack(Variance()):
            output.sum().backward()
        for p, grad in zip(other.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, grad)
        assert computed == [0]

    def test_layers_are_done_one_after_the_other(self, computed: list[int]) -> None:
        """What one has stored is gone before the next begins."""
        layers = [extend(nn.LSTM(3, 3, 2)) for _ in range(3)]
        x, released = torch.rand(5, 2, 3), []
        for layer in layers:
            x, _ = layer(x)
        recorded = alive.all_live_calls()[-3:]
        with backpack(
            Variance(), extension_hook=lambda _: released.append([c.is_released for c in recorded])
        ):
            x.sum().backward()
        assert released == [[False, False, False], [False, False, True], [False, True, True]]
        assert len(computed) == 5

    def test_an_error(self, computed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """It is raised, and leaves nothing behind."""
        model, lossfunc = (
            extend(self.Network(), use_converter="record"),
            extend(nn.CrossEntropyLoss()),
        )
        loss = self.words(model, lossfunc)
        with monkeypatch.context() as patch:
            patch.setattr(recurrent, "pull_direction", lambda *_: 1 / 0)
            with backpack(BatchGrad()), pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        assert not any("received" in call.saved for call in alive.all_live_calls())
        model.zero_grad()
        loss.backward()
        assert computed == [0]
        assert all(p.grad is not None for p in model.parameters())


LAYERS = [
    lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True),
    lambda: nn.GRU(3, 4, bidirectional=True),
    lambda: nn.RNN(3, 4).double(),
    lambda: nn.Linear(3, 4, bias=False),
    lambda: nn.Conv1d(5, 4, 3, bias=False),
]


@pytest.mark.parametrize("new", LAYERS)
def test_a_first_layer_frees_what_autograd_has_stored(
    new: Callable[[], nn.Module], chosen: list[set[Any]]
) -> None:
    """All functions of the graph run, as in any backward pass."""
    model = extend(new())
    x = torch.rand(2, 5, 3, dtype=next(model.parameters()).dtype)
    output = model(x)
    loss = (output[0] if isinstance(output, tuple) else output).sum()
    with backpack(Variance()):
        loss.backward()
    assert chosen == [{*model.parameters()}]
    nodes, freed = [loss.grad_fn], 0
    while nodes:
        node: Any = nodes.pop()
        for name in dir(node):
            if name.startswith("_raw_saved") and not is_output(node):  # it saves nothing
                try:
                    assert getattr(node, name.removeprefix("_raw")) is None
                except RuntimeError:
                    freed += 1
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    assert freed


def test_parameters_of_functions_in_a_recurrent_layer(chosen: list[set[Any]]) -> None:
    """Weights that a hook computes before each call are not among those that the rule knows."""
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.LSTM(64, 4, batch_first=True), "weight_hh_l0")
    model = nn.Sequential(
        layer, nn.GRU(4, 5, num_layers=2, bidirectional=True, batch_first=True)
    ).double()
    model.append(nn.Linear(10, 3).double()).append(nn.Linear(4, 3).double())
    compare(model, layers, BatchL2Grad())
    assert not chosen[0] & {*layer.parameters()}


def decayed(model: nn.Module, lossfunc: nn.Module) -> Tensor:
    return plain(model, lossfunc) + sum(p.square().sum() for p in model.parameters())


def test_a_penalty_counts(chosen: list[set[Any]]) -> None:
    """A parameter that something else uses keeps its gradient."""
    compare(network(), decayed, SumGradSquared())
    assert chosen == [set()]


def test_tied_and_frozen_parameters(chosen: list[set[Any]]) -> None:
    """One is used twice, one has no gradient."""
    model = network()
    model[2] = nn.Conv2d(4, 4, 3, padding=1).double()
    model.insert(3, nn.Conv2d(4, 4, 3, padding=1).double())
    model[3].weight = model[2].weight
    model[5] = nn.ConvTranspose2d(4, 2, 2).double()
    model[5].weight.requires_grad_(False)
    compare(model, plain, BatchGrad())
    assert chosen[0].isdisjoint({model[2].weight, model[5].weight})
    assert model[5].bias in chosen[0]


def functional(model: nn.Module, lossfunc: nn.Module) -> Tensor:
    x, y = data()
    return lossfunc(model[1:](F.conv2d(x, model[0].weight, model[0].bias)), y)


def test_a_function_that_uses_the_parameters_of_a_module_that_ran_elsewhere(
    chosen: list[set[Any]],
) -> None:
    """What matters is who uses a parameter in this graph."""
    model, lossfunc = network(), nn.CrossEntropyLoss()
    functional(model, lossfunc).backward()
    expected = gradients(model)
    model.zero_grad()
    extend(model), extend(lossfunc)
    elsewhere = model[0](data()[0])  # recorded, alive, and no part of the graph below
    loss = functional(model, lossfunc)
    with backpack(BatchGrad()), pytest.warns(UserWarning, match="also used by a function"):
        loss.backward()
    del elsewhere
    assert chosen and model[0].weight not in chosen[0]
    for found, one in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(found, one)


@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_hooks_of_parameters_run(kind: str, chosen: list[set[Any]]) -> None:
    """A hook sees (and may change) the gradient, and finds those of later layers complete."""
    seen = []
    model = network()
    p = model[0].weight
    if kind == "tensor":
        p.register_hook(lambda grad: seen.append(gradients(model[1:])) or 2 * grad)
    else:
        p.register_post_accumulate_grad_hook(lambda q: seen.append(gradients(model)))
    compare(model, plain, BatchGrad())
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other)
    assert chosen == [set()]


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_backward_hook"])
def test_hooks_of_modules_run(kind: str, chosen: list[set[Any]]) -> None:
    """They see what they see without extensions."""
    seen = []
    model = network()
    getattr(model[2], kind)(lambda module, g_in, g_out: seen.append([*g_in, *g_out]))
    compare(model, plain, BatchGrad())
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other)
    assert chosen[0].isdisjoint(model[2].parameters())


def doubled(model: nn.Module, lossfunc: nn.Module) -> Tensor:
    x, y = data()
    inner = model[:3](x)
    inner.register_hook(lambda grad: 2 * grad)
    return lossfunc(model[3:](inner), y)


def test_hooks_of_activations_count(chosen: list[set[Any]]) -> None:
    """Individual gradients are those of the gradient that a hook has changed."""
    model = compare(network(), doubled, BatchGrad())
    assert model[2].weight in chosen[0]
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@pytest.mark.parametrize("outer", [BatchGrad, DiagGGNExact])
def test_nested_contexts(outer: Any, chosen: list[set[Any]]) -> None:
    """The inner one counts."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    other = network()
    plain(other, nn.CrossEntropyLoss()).backward()
    loss = plain(model, lossfunc)
    with backpack(outer()), backpack(BatchL2Grad()):
        loss.backward()
    assert len(chosen) == 1 and chosen[0]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_second_attempt_after_an_error(chosen: list[set[Any]]) -> None:
    """An error that was caught inside of the context leaves nothing behind."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    attempts = []

    def fail_once(grad: Tensor) -> None:
        attempts.append(grad)
        if len(attempts) == 1:
            raise RuntimeError("out of memory")

    def attempt() -> None:
        x, y = data()
        inner = model[:3](x)
        inner.register_hook(fail_once)
        lossfunc(model[3:](inner), y).backward()

    elsewhere = extend(network())(data()[0])  # so that backward() is watched
    with backpack(BatchGrad()):
        with suppress(RuntimeError):
            attempt()
        model.zero_grad()
        attempt()
    del elsewhere
    assert len(attempts) == 2 and chosen[-1]
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@pytest.mark.parametrize("as_list", [True, False])
def test_a_single_input(as_list: bool, chosen: list[set[Any]]) -> None:
    """``inputs=`` may be a tensor, even one that is zero."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    gain = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    loss = plain(model, lossfunc) * gain.exp().sum()
    with backpack(BatchGrad()):
        loss.backward(inputs=[gain] if as_list else gain)
    assert gain.grad is not None and model[2].weight.grad is None
    assert not chosen


def test_frozen_between_the_passes(chosen: list[set[Any]]) -> None:
    """A parameter that needs no gradient any more has none."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    loss = plain(model, lossfunc)
    for p in (model[0].weight, model[4].weight):
        p.requires_grad_(False)
    with backpack(BatchGrad()):
        loss.backward()
    assert model[0].weight.grad is None and model[4].weight.grad is None
    assert model[2].weight in chosen[0]
    torch.testing.assert_close(model[2].weight.grad_batch.sum(0), model[2].weight.grad)


def test_autocast(chosen: list[set[Any]]) -> None:
    """Nothing is elided where several precisions meet."""
    model, lossfunc = extend(network().float()), extend(nn.CrossEntropyLoss())
    x, y = data()
    with torch.autocast("cpu", torch.bfloat16):
        loss = lossfunc(model(x.float()), y)
    with backpack(BatchGrad(), Variance()):
        loss.backward()
    assert not any(chosen)
    assert model[2].weight.grad_batch.shape == (5, *model[2].weight.shape)


def test_a_gradient_that_does_not_arrive_is_an_error(
    chosen: list[set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Better than a parameter that silently keeps its old gradient."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    loss = plain(model, lossfunc)
    monkeypatch.setattr(Collector, "reach", lambda *_: None)
    with backpack(BatchGrad()), pytest.raises(RuntimeError, match="are missing"):
        loss.backward()


def checkpointed(model: nn.Module, lossfunc: nn.Module) -> Tensor:
    x, y = data()
    inner = checkpoint(model[1:4], model[0](x), use_reentrant=False)
    return lossfunc(model[4:](inner), y)


def test_checkpoint(chosen: list[set[Any]]) -> None:
    """A forward pass that is repeated during the backward pass."""
    compare(network(), checkpointed, SumGradSquared())
    assert chosen[0]


def test_gradient_of_the_data(chosen: list[set[Any]]) -> None:
    """A leaf that is no parameter has its gradient; then the first layer can be elided, too."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    x, y = data()
    x.requires_grad_()
    (expected,) = torch.autograd.grad(lossfunc(model(x), y), x)
    loss = lossfunc(model(x), y)
    with backpack(BatchGrad()):
        loss.backward()
    torch.testing.assert_close(x.grad, expected)
    assert model[0].weight in chosen[0]
    torch.testing.assert_close(model[0].weight.grad_batch.sum(0), model[0].weight.grad)


def test_what_was_asked_for(chosen: list[set[Any]]) -> None:
    """``inputs=`` and ``create_graph=`` are left alone, as is ``torch.autograd.grad``."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    loss = plain(model, lossfunc)
    with backpack(BatchGrad()):
        loss.backward(inputs=[model[2].weight])
    assert model[4].weight.grad is None and not hasattr(model[4].weight, "grad_batch")
    loss = plain(model, lossfunc)
    with backpack(BatchGrad()):
        torch.autograd.grad(loss, [model[4].weight])
    assert model[4].weight.grad is None
    loss = plain(model, lossfunc)
    with backpack(BatchGrad()):
        loss.backward(create_graph=True)
    assert model[4].weight.grad.requires_grad
    assert not chosen


def test_graph_is_kept(chosen: list[set[Any]]) -> None:
    """Two passes through one graph."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    loss = plain(model, lossfunc)
    for _ in range(2):
        with backpack(BatchGrad(), retain_graph=True):
            torch.autograd.backward([loss], retain_graph=True)
    assert len(chosen) == 2 and chosen[0] == chosen[1] != set()
    for p in model.parameters():
        torch.testing.assert_close(2 * p.grad_batch.sum(0), p.grad)


def test_subsampling_needs_the_gradient_of_the_batch(chosen: list[set[Any]]) -> None:
    """Individual gradients of some samples do not add up to it."""
    compare(network(), plain, BatchGrad(subsampling=[0, 2]))
    assert not chosen


def test_extension_hooks_find_gradients(chosen: list[set[Any]]) -> None:
    """Those of the layers that the backward pass has left behind."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    seen = []

    def hook(module: nn.Module) -> None:
        if module is model[2]:
            seen.extend(gradients(model[4:]))

    loss = plain(model, lossfunc)
    with backpack(SumGradSquared(), extension_hook=hook):
        loss.backward()
    assert chosen[0]
    for found, p in zip(seen, model[4:].parameters(), strict=True):
        torch.testing.assert_close(found, p.grad)


def test_two_precisions(chosen: list[set[Any]]) -> None:
    """The engine computes in the higher one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 5), nn.Linear(5, 4), nn.Linear(4, 3).double())

    def step(model: nn.Module, lossfunc: nn.Module) -> Tensor:
        x, y = data()
        states = model[1](model[0](x.flatten(2).float()))
        return lossfunc(model[2](states.double()).mean(1), y)

    compare(model, step, SumGradSquared())
    assert model[1].weight in chosen[0]


def test_rules_of_users(chosen: list[set[Any]]) -> None:
    """A rule of one's own says nothing about the gradient."""

    class Rule(FirstOrderModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["weight"])

        def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Any:
            return torch.zeros(len(g_out[0]), *module.weight.shape)

    extension = BatchGrad()
    extension.set_module_extension(nn.Conv2d, Rule(), overwrite=True)
    model = compare(network(), plain, extension)
    assert model[4].weight in chosen[0] and model[2].weight not in chosen[0]


def test_strides_of_the_parameter(chosen: list[set[Any]]) -> None:
    """Gradients lie in memory as the parameters do."""
    model = compare(network().to(memory_format=torch.channels_last), plain, SumGradSquared())
    assert model[2].weight in chosen[0]
    assert model[2].weight.grad.stride() == model[2].weight.stride()


def test_distributed_training(chosen: list[set[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper may wait for every gradient."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    compare(network(), plain, BatchGrad())
    assert not chosen


@pytest.mark.parametrize("context", [nullcontext, lambda: backpack(SumGradSquared())])
def test_backward_pass_inside_of_a_hook(context: Any, chosen: list[set[Any]]) -> None:
    """It computes its own gradients."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    pending = [model[8]]

    def hook(module: nn.Module) -> None:
        if module in pending:
            pending.remove(module)
            with torch.enable_grad(), context():
                plain(model, nn.CrossEntropyLoss()).backward()

    loss = plain(model, lossfunc)
    with backpack(BatchGrad(), extension_hook=hook):
        loss.backward()
    (elided,) = filter(None, chosen)  # calls of others may live, to be looked at inside
    assert model[4].weight in elided
    reference = network()
    (2 * plain(reference, nn.CrossEntropyLoss())).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# --------------------------------------------------------------------------------------
# Nobody wants p.grad
# --------------------------------------------------------------------------------------


def values(*exts: Any, X: Tensor, y: Tensor, model: nn.Module, **options: Any) -> list[Any]:
    torch.manual_seed(3)
    loss = extend(nn.CrossEntropyLoss())
    with library.backpack(*exts, **options):
        loss(extend(model)(X), y).backward()
    params = list(model.parameters())
    return [getattr(p, ext.savefield) for ext in exts for p in params]


EVERY = [
    (BatchGrad(),),
    (BatchL2Grad(), Variance(), SumGradSquared()),
    (ClippedGrad(0.1),),
    (KFAC(),),
    (DiagHessian(), BatchGrad()),
    (DiagGGNExact(),),
]


@pytest.mark.parametrize("exts", EVERY, ids=str)
@pytest.mark.parametrize("recurrent", [False, True])
def test_gradients_that_nobody_wants(exts: Any, recurrent: bool, chosen: list[set[Any]]) -> None:
    """Quantities are the same, and p.grad stays as it is."""
    if recurrent:
        torch.manual_seed(0)
        layers = [nn.Linear(3, 4), nn.LSTM(4, 5), ReduceTuple(), nn.Linear(5, 3), nn.Flatten(0, 1)]
        model, X, y = nn.Sequential(*layers).double(), torch.rand(6, 2, 3), torch.randint(3, (12,))
    else:
        model, (X, y) = network(), data()
    X = X.double().requires_grad_()
    expected = values(*exts, X=X, y=y, model=model)
    assert not chosen
    of_data, X.grad = X.grad, None
    model.zero_grad()
    first, *_ = model.parameters()
    first.grad = kept = torch.full_like(first, 2)
    found = values(*exts, X=X, y=y, model=model, gradients=False)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(X.grad, of_data)
    assert first.grad is kept
    assert (kept == 2).all()
    assert all(p.grad is None for p in model.parameters() if p is not first)
    assert chosen[-1]


def test_gradients_that_autograd_computes_all_the_same(chosen: list[set[Any]]) -> None:
    """With hooks that look at them, without extensions, or with something of one's own: kept."""
    model, X = extend(network()), data()[0]
    loss = extend(nn.MSELoss())
    seen: list[Tensor] = []
    handle = model[0].weight.register_hook(seen.append)
    for exts in ((BatchGrad(),), ()):
        with library.backpack(*exts, gradients=False):
            output = model(X)
            loss(output, torch.zeros_like(output)).backward()
        assert all(p.grad is None for p in model.parameters())
    assert len(seen) == 2
    assert chosen in ([set()], [set(), set()])
    handle.remove()
    with library.backpack(BatchGrad(), gradients=False):
        output = model(X)
        loss(output, torch.zeros_like(output)).backward(inputs=[model[0].weight])
    assert all(p.grad is None for p in model.parameters())
    assert chosen[-1] == {model[0].weight}


@pytest.mark.parametrize("exts", [(BatchGrad(),), (KFAC(),)], ids=str)
def test_some_gradients_that_nobody_wants(exts: Any, chosen: list[set[Any]]) -> None:
    """backward(inputs=...) has quantities of these alone; data may ask for their gradient."""
    (ext,), (X, y), loss = exts, data(), extend(nn.CrossEntropyLoss())
    X.requires_grad_()
    model = extend(network())
    everything = values(ext, X=X, y=y, model=model)
    of_data, X.grad = X.grad, None
    model.zero_grad()
    some = model[2].weight, model[6].bias
    asked: list[Any] = [[*some], [X, model[0].weight]]
    if TAKES_NAMES:
        asked.append(dict(zip("ab", some, strict=True)))
    for inputs in asked:
        for p in model.parameters():
            vars(p).pop(ext.savefield)
        torch.manual_seed(3)
        with library.backpack(ext, gradients=False):
            loss(model(X), y).backward(inputs=inputs)
        assert all(p.grad is None for p in model.parameters())
        for p, value in zip(model.parameters(), everything, strict=True):
            wanted = inputs.values() if isinstance(inputs, dict) else inputs
            assert hasattr(p, ext.savefield) == any(p is x for x in wanted)
            if hasattr(p, ext.savefield):
                torch.testing.assert_close(getattr(p, ext.savefield), value)
            else:
                setattr(p, ext.savefield, None)
    torch.testing.assert_close(X.grad, of_data)
    assert chosen


def test_gradients_of_others_are_not_touched() -> None:
    """Another model's stay where they are while a pass leaves its own alone."""
    mine, other = extend(network()), extend(network())
    (X, y), loss = data(), extend(nn.CrossEntropyLoss())
    losses = loss(mine(X), y), extend(nn.CrossEntropyLoss())(other(X), y)
    kept = [torch.ones_like(p) for p in other.parameters()]
    for p, grad in zip(other.parameters(), kept, strict=True):
        p.grad = grad
    seen: list[Any] = []
    losses[0].register_hook(lambda _: seen.extend(p.grad for p in other.parameters()))
    with library.backpack(BatchGrad(), gradients=False):
        losses[0].backward(inputs=(p for p in mine.parameters()))
    assert all(a is b for a, b in zip(seen, kept, strict=True)) and len(seen) == len(kept)
    assert all(p.grad is None and hasattr(p, "grad_batch") for p in mine.parameters())


@pytest.mark.filterwarnings("ignore")
def test_gradients_that_cannot_be_left_alone() -> None:
    (X, y), loss = data(), extend(nn.CrossEntropyLoss())
    model = extend(network())
    with (
        library.backpack(BatchGrad(), gradients=False),
        pytest.raises(ValueError, match=r"gradients=False.*create_graph"),
    ):
        loss(model(X), y).backward(create_graph=True)
    h = checkpoint(model, X.requires_grad_(), use_reentrant=True)
    with (
        library.backpack(BatchGrad(), gradients=False),
        pytest.raises(NotImplementedError, match=r"gradients=False.*use_reentrant=False"),
    ):
        loss(h, y).backward()
    assert all(p.grad is None for p in model.parameters())


def test_what_several_passes_add_up(chosen: list[set[Any]]) -> None:
    """The sum of the first pass becomes p.grad, to which the second one adds in place."""
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    X, y = data()
    each = []
    for part in (slice(0, 2), slice(2, 5)):
        for x, label in zip(X[part], y[part], strict=True):
            with library.disable():
                loss = lossfunc(model(x[None]), label[None]) / len(X[part])
            each.append(torch.autograd.grad(loss, list(model.parameters())))
        with backpack(Variance(), SumGradSquared(), accumulate=True):
            lossfunc(model(X[part]), y[part]).backward()
    assert len(chosen) == 2 and all(chosen)
    for p, of_samples in zip(model.parameters(), zip(*each, strict=True), strict=True):
        gradients = torch.stack(of_samples)
        torch.testing.assert_close(p.grad, gradients.sum(0))
        torch.testing.assert_close(p.sum_grad_squared, gradients.square().sum(0))
        torch.testing.assert_close(p.variance, gradients.var(0, unbiased=False))

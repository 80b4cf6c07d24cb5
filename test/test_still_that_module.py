"""An extended module is still that module, with and without a context: tracing, transforms, …"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from backpack import backpack, extend, extensions

CONVERTERS: list[Any] = [False, True, "record"]
OUTSIDE = [False, True]  # of a context, or inside


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.softplus(self.first(x)))


def both(converter: Any = False) -> tuple[nn.Module, nn.Module]:
    """A model, and an extended one with the same parameters."""
    plain = MLP().double()
    return plain, extend(copy.deepcopy(plain), use_converter=converter)


def data() -> Tensor:
    return torch.rand(5, 3, dtype=torch.float64)


def assert_same_gradients(plain: nn.Module, extended: nn.Module) -> None:
    for p, q in zip(plain.parameters(), extended.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


# --- Outputs --------------------------------------------------------------------------------------

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "rnn": lambda: nn.RNN(3, 4),
    "lstm": lambda: nn.LSTM(3, 4, 2),
    "gru": lambda: nn.GRU(3, 4, bidirectional=True),
    "lstm cell": lambda: nn.LSTMCell(3, 4),
    "gru cell": lambda: nn.GRUCell(3, 4),
    "rnn cell": lambda: nn.RNNCell(3, 4),
}


def truncated(module: nn.Module, x: Tensor, backward: Callable[[Tensor], Any]) -> list[Tensor]:
    """Truncated backpropagation through time, with states that are detached in place."""
    is_cell = isinstance(module, nn.RNNCellBase)
    state, results = None, []
    for part in x.split(1 if is_cell else 3):
        out = module(part[0] if is_cell else part, state)
        state = out if is_cell else out[1]
        h = (state if isinstance(state, Tensor) else state[0]) if is_cell else out[0]
        backward(h.square().sum())
        for s in (state,) if isinstance(state, Tensor) else state:
            s.detach_()
        results.append(h)
    return results


@pytest.mark.parametrize("name", RECURRENT)
def test_states_are_detached_in_place(name: str) -> None:
    plain = RECURRENT[name]().double()
    extended, x = extend(copy.deepcopy(plain)), torch.rand(6, 5, 3, dtype=torch.float64)
    expected = truncated(plain, x, Tensor.backward)
    found = truncated(extended, x, Tensor.backward)
    torch.testing.assert_close(found, expected)
    assert_same_gradients(plain, extended)
    extended.zero_grad()
    with backpack(extensions.SumGradSquared()):
        truncated(extended, x, Tensor.backward)
    assert_same_gradients(plain, extended)


@pytest.mark.parametrize("name", [*RECURRENT, "attention"])
def test_outputs_are_no_views(name: str) -> None:
    module = extend(RECURRENT[name]() if name in RECURRENT else nn.MultiheadAttention(3, 1))
    x = torch.rand(4, 3) if "cell" in name else torch.rand(5, 4, 3)
    out = module(x, x, x) if name == "attention" else module(x)
    for tensor in torch.utils._pytree.tree_leaves(out):
        assert not tensor._is_view() and tensor._base is None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x).exp()
        return y, y + 1, x.argmax(1)


class Leaf(Two):
    """Without children, so that it is recorded as a whole."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = (x * self.weight).exp()
        return y, y + 1, x.argmax(1)


def test_changes_of_outputs_are_noticed() -> None:
    for module in (Leaf(), extend(Leaf())):
        y, _, _ = module(torch.rand(4, 3))
        y.mul_(2)  # autograd has kept it
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        y, z, index = module(torch.rand(4, 3))
        z.mul_(2)  # that one it has not
        (y.sum() + z.sum()).backward()
        assert index.dtype == torch.int64 and index.grad_fn is None


def test_forward_mode_through_several_outputs() -> None:
    plain = nn.LSTMCell(3, 4).double()
    x, v = data(), data()
    found = []
    for cell in (plain, extend(copy.deepcopy(plain))):
        with torch.autograd.forward_ad.dual_level():
            h, c = cell(torch.autograd.forward_ad.make_dual(x, v))
            found.append([tuple(torch.autograd.forward_ad.unpack_dual(t)) for t in (h, c)])
    torch.testing.assert_close(*found)


# --- Tracing and compiling ------------------------------------------------------------------------


def jit_trace(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.trace(model, x)


def symbolic_trace(model: nn.Module, x: Tensor) -> Any:
    return torch.fx.symbolic_trace(model)


def export(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,)).module()


def export_strict(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,), strict=True).module()


def compile_whole(model: nn.Module, x: Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


TRACERS = [jit_trace, symbolic_trace, export, export_strict, compile_whole]


def skip_if_hooks_fail(trace: Callable[[nn.Module, Tensor], Any], make: Any, x: Tensor) -> None:
    """Skip the test where this PyTorch cannot trace a plain module that has a hook."""
    model = make()
    model.register_forward_hook(lambda module, args, output: None)
    try:
        trace(model, x)
    except (AssertionError, AttributeError, torch._dynamo.exc.UserError) as error:
        pytest.skip(f"PyTorch {torch.__version__}, plain module with a hook: {error!r}"[:200])


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("converter", CONVERTERS)
@pytest.mark.parametrize("trace", TRACERS, ids=lambda f: f.__name__)
def test_traced(trace: Callable[[nn.Module, Tensor], Any], converter: Any) -> None:
    plain, extended = both(converter)
    x = data()
    if trace in (export, export_strict):
        skip_if_hooks_fail(trace, lambda: both(False)[0], x)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache")
        traced = trace(extended, x)
        traced(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(traced(x), plain(x))
    assert_same_gradients(plain, extended if trace is not symbolic_trace else traced)
    # and the model is as before
    extended.zero_grad()
    with backpack(extensions.BatchGrad()):
        extended(x).square().sum().backward()
    for p in extended.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


class Recurrent(nn.Module):
    """Functions around modules whose rules read values while they are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(3, 3, 2, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, 2, -1)
        return self.last(x + self.lstm(x)[0].tanh()).sum(1)


def drawing() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def draft_export(model: nn.Module, x: Tensor) -> Any:
    return torch.export.draft_export(model, (x,)).module()


def proxies(model: nn.Module, x: Tensor) -> Any:
    return make_fx(model)(x)


def fakes(model: nn.Module, x: Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return model(mode.from_tensor(x))


def without_values(model: nn.Module, x: Tensor) -> Any:
    return model.to("meta")(x.to("meta"))


WITHOUT_VALUES = [export, draft_export, proxies, fakes, without_values]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
@pytest.mark.parametrize("converter", CONVERTERS)
@pytest.mark.parametrize("make", [MLP, Recurrent, drawing], ids=lambda f: f.__name__)
@pytest.mark.parametrize("trace", WITHOUT_VALUES, ids=lambda f: f.__name__)
def test_run_without_values(trace: Any, make: Callable[[], nn.Module], converter: Any) -> None:
    """Whoever lets a plain model run without values may let an extended one."""
    x = torch.rand(5, 3)
    if trace is export and torch.__version__ < (2, 7):
        pytest.skip("PyTorch 2.6 exports no nn.Sequential twice in a process")
    if trace in (export, draft_export):
        skip_if_hooks_fail(trace, make, x)
    trace(make(), x)
    trace(extend(make(), use_converter=converter), x)


@pytest.mark.parametrize("trace", [fakes, without_values], ids=lambda f: f.__name__)
def test_functions_without_values_have_no_quantities(trace: Any) -> None:
    loss = trace(extend(Recurrent(), use_converter="record"), torch.rand(5, 3)).sum()
    with backpack(extensions.BatchGrad()), pytest.raises(ValueError, match="has no values"):
        loss.backward()


@pytest.mark.parametrize("ext", [extensions.BatchGrad(), extensions.DiagGGNExact()], ids=repr)
def test_compiled_in_parts(ext: Any) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2)).double()
    x, y, lossfunc = data(), torch.randint(2, (5,)), extend(nn.CrossEntropyLoss())
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model: Any = extend(copy.deepcopy(plain))
        run = torch.compile(model, backend="aot_eager") if compiles else model
        with backpack(ext):
            lossfunc(run(x), y).backward()
        found.append([getattr(p, ext.savefield) for p in model.parameters()])
    torch.testing.assert_close(*found)


# --- Transforms -----------------------------------------------------------------------------------


def total(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


def over_parameters(model: nn.Module) -> Any:
    parameters = dict(model.named_parameters())
    x = data()
    return grad(lambda p: functional_call(model, p, (x,)).square().sum())(parameters)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: grad(total(model))(x),
    "vmap": lambda model, x: vmap(model)(x),
    "jvp": lambda model, x: jvp(total(model), (x,), (x,)),
    "jacrev": lambda model, x: jacrev(model)(x),
    "hessian": lambda model, x: hessian(total(model))(x),
    "vmap of grad": lambda model, x: vmap(grad(total(model)))(x),
    "parameters": lambda model, x: over_parameters(model),
}


@pytest.mark.parametrize("inside", OUTSIDE, ids=["without", "inside"])
@pytest.mark.parametrize("converter", CONVERTERS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, converter: Any, inside: bool) -> None:
    plain, extended = both(converter)
    x, transform = data(), TRANSFORMS[name]
    torch.manual_seed(1)
    expected = transform(plain, x)
    torch.manual_seed(1)
    if inside:
        with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            found = transform(extended, x)
    else:
        found = transform(extended, x)
    torch.testing.assert_close(found, expected)
    for p in extended.parameters():
        assert p.grad is None and not hasattr(p, "grad_batch") and not hasattr(p, "diag_ggn_exact")


@pytest.mark.parametrize("name", ["vmap", "vmap of grad", "grad"])
def test_gradients_through_transforms_are_plain_and_warn(name: str) -> None:
    plain, extended = both()
    x = data()
    TRANSFORMS[name](plain, x).sum().backward()
    with (
        backpack(extensions.BatchGrad()),
        pytest.warns(UserWarning, match=r"weight, bias of 'first' \(Linear\).*torch.func"),
    ):
        TRANSFORMS[name](extended, x).sum().backward()
    assert_same_gradients(plain, extended)
    assert not any(hasattr(p, "grad_batch") for p in extended.parameters())
    with (
        backpack(extensions.DiagGGNExact()),
        pytest.raises(NotImplementedError, match=r"diag_ggn_exact.*torch.func"),
    ):
        TRANSFORMS[name](extended, x).sum().backward()


# --- Layouts --------------------------------------------------------------------------------------


def nested(layout: torch.layout) -> Tensor:
    parts = [torch.rand(2, 3, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)]
    return torch.nested.nested_tensor(parts, layout=layout)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "coo": lambda: data().to_sparse(),
    "csr": lambda: data().to_sparse_csr(),
}
ADVICE = {"nested": r"nested.*to_padded_tensor", "jagged": r"nested.*to_padded_tensor"}


@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:.*Sparse CSR")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    extended, x = extend(copy.deepcopy(plain)), LAYOUTS[name]()

    def loss(model: nn.Module) -> Tensor:
        out = model(x)
        return (torch.nested.to_padded_tensor(out, 0.0) if out.is_nested else out).square().sum()

    loss(plain).backward()
    loss(extended).backward()
    assert_same_gradients(plain, extended)
    extended.zero_grad()
    advice = ADVICE.get(name, r"layout torch.sparse_.*to_dense")
    with (
        backpack(extensions.BatchGrad()),
        pytest.warns(UserWarning, match=rf"weight, bias of '0' \(Linear\) \(inputs .*{advice}"),
    ):
        loss(extended).backward()
    assert_same_gradients(plain, extended)
    assert not hasattr(extended[0].weight, "grad_batch")
    with (
        backpack(extensions.DiagGGNExact()),
        pytest.raises(NotImplementedError, match=advice),
    ):
        extend(nn.MSELoss(reduction="sum"))(loss(extended), torch.zeros(()).double()).backward()


# --- Parametrisations -----------------------------------------------------------------------------

PARAMETRISATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "pruning": lambda module: prune.l1_unstructured(module, "weight", amount=3),
}


@pytest.mark.parametrize("name", PARAMETRISATIONS)
def test_parametrisation_after_extend(name: str) -> None:
    _, model = both()
    x, y, lossfunc = data(), torch.randint(2, (5,)), extend(nn.CrossEntropyLoss())
    PARAMETRISATIONS[name](model.first)
    with (
        backpack(extensions.BatchGrad()),
        pytest.warns(UserWarning, match=r"of 'first' \(.*Linear\).*Call extend\(model\) once more"),
    ):
        lossfunc(model(x), y).backward()
    with (
        backpack(extensions.DiagGGNExact()),
        pytest.raises(NotImplementedError, match=r"Call extend\(model\) once more"),
    ):
        lossfunc(model(x), y).backward()
    model.zero_grad()
    extend(model)
    with backpack(extensions.BatchGrad()):
        lossfunc(model(x), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


class Steps(nn.Module):
    """A recurrent layer and a linear one, which read all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("converter", [False, "record"])
@pytest.mark.parametrize("where", ["rnn.weight_hh_l0", "head.weight"])
@pytest.mark.parametrize("name", ["weight norm", "old weight norm", "pruning"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_parameters_that_are_computed_since(name: str, where: str, converter: Any) -> None:
    """An error says what to do; that done, and once more when they are computed no longer."""
    module, weight = where.split(".")
    change, undo = {
        "weight norm": (parametrizations.weight_norm, parametrize.remove_parametrizations),
        "old weight norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        "pruning": (partial(prune.l1_unstructured, amount=3), prune.remove),
    }[name]
    model = extend(Steps(), use_converter=converter)
    layer, x, lossfunc = model.get_submodule(module), torch.rand(5, 6, 3), extend(nn.MSELoss())
    ext = extensions.DiagGGNExact() if converter else extensions.BatchGrad()
    change(layer, weight)
    output = model(x)
    # a recorded model follows what a parametrisation computes, and the hooks of others do not
    follows = name == "weight norm" and converter == "record"
    advice = pytest.raises(
        NotImplementedError, match=rf"computes its {weight} .*Call extend\(model\)"
    )
    with nullcontext() if follows else advice, backpack(extensions.DiagGGNExact()):
        lossfunc(output, torch.zeros_like(output)).backward()
    found = {p: p.diag_ggn_exact for p in model.parameters()} if follows else {}
    for step in (None, undo):
        if step is not None:
            step(layer, weight)
        model = extend(model, use_converter=converter)
        output = model(x)
        model.zero_grad()
        with backpack(extensions.BatchGrad(), ext):
            lossfunc(output, torch.zeros_like(output)).backward()
        for p in model.parameters():
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
            assert hasattr(p, ext.savefield)
            if step is None and follows:
                torch.testing.assert_close(p.diag_ggn_exact, found[p])


# --- Converted recurrent layers -------------------------------------------------------------------


class Sequences(nn.Module):
    def __init__(self, cls: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = cls(3, 4, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(4 * (2 if self.rnn.bidirectional else 1), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


KINDS: dict[str, Callable[[], nn.Module]] = {
    "rnn": lambda: Sequences(nn.RNN, nonlinearity="relu"),
    "lstm": lambda: Sequences(nn.LSTM),
    "dropout": lambda: Sequences(nn.LSTM, dropout=0.5),
    "bidirectional": lambda: Sequences(nn.LSTM, bidirectional=True, bias=False),
    "gru": lambda: Sequences(nn.GRU),
}


def layers(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    plain = KINDS[name]().double()
    converted = extend(copy.deepcopy(plain), use_converter=True)
    called = [str(node.target) for node in converted.graph.nodes if node.op == "call_module"]
    assert sum(target.startswith("rnn.") for target in called) >= 2
    return plain, converted, torch.rand(5, 6, 3, dtype=torch.float64)


def assert_same_function(plain: nn.Module, converted: nn.Module, x: Tensor) -> None:
    for model in (plain, converted):
        model.eval()
        model.zero_grad()
        model(x).square().sum().backward()
    torch.testing.assert_close(converted(x), plain(x))
    assert_same_gradients(plain, converted)


@pytest.mark.parametrize("name", KINDS)
def test_converted_layers_keep_the_names(name: str) -> None:
    plain, converted, x = layers(name)
    named = dict(converted.named_parameters())
    assert list(named) == [name for name, _ in plain.named_parameters()]
    assert [p.shape for p in converted.parameters()] == [p.shape for p in plain.parameters()]
    state, expected = converted.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    rnn, original = converted.rnn, plain.rnn
    assert isinstance(rnn, type(original)) and rnn.weight_ih_l0 is named["rnn.weight_ih_l0"]
    for attribute in ("hidden_size", "num_layers", "dropout", "bidirectional", "mode", "training"):
        assert getattr(rnn, attribute) == getattr(original, attribute)
    torch.testing.assert_close(rnn.all_weights, original.all_weights)
    rnn.flatten_parameters()
    assert_same_function(plain, converted, x)
    torch.testing.assert_close(rnn(x), original(x))
    assert "weight_ih_l0" in vars(plain.rnn)["_parameters"] and not plain.rnn._modules


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_converted_layers_load_checkpoints(name: str, assign: bool) -> None:
    plain, converted, x = layers(name)
    other = KINDS[name]().double()
    assert str(converted.load_state_dict(other.state_dict(), assign=assign)) == (
        "<All keys matched successfully>"
    )
    assert_same_function(other, converted, x)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in converted.named_parameters()] == names
    plain.load_state_dict(converted.state_dict(), assign=assign)
    assert_same_function(plain, converted, x)
    state = plain.state_dict()
    del state["rnn.weight_hh_l1"]
    state["rnn.surplus"] = torch.zeros(1)
    found = converted.load_state_dict(state, strict=False)
    assert found == plain.load_state_dict(state, strict=False)
    assert found.missing_keys == ["rnn.weight_hh_l1"]


def moved(model: nn.Module) -> nn.Module:
    state = copy.deepcopy(model.state_dict())
    model.to_empty(device="cpu").load_state_dict(state)
    return model


def replaced(model: nn.Module) -> nn.Module:
    model.rnn.weight_ih_l1 = nn.Parameter(model.rnn.weight_ih_l1 + 1)
    return model


def with_conversion(model: nn.Module, change: Callable[[nn.Module], Any]) -> nn.Module:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        change(model)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    return model


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "to_empty": moved,
    "precision": lambda model: model.float().double(),
    "new parameters": lambda model: with_conversion(model, lambda m: m.float().double()),
    "replaced": replaced,
    "twice": lambda model: model._apply(lambda t: 2 * t),
    "reset": lambda model: (torch.manual_seed(3), model.rnn.reset_parameters(), model)[-1],
    "again": lambda model: extend(model, use_converter=True),
    "sequential": lambda model: nn.Sequential(model),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_converted_layers_follow_changes(name: str, change: str) -> None:
    plain, converted, x = layers(name)
    if change != "again":
        plain = CHANGES[change](plain)
    converted = CHANGES[change](converted)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in converted.named_parameters()] == names
    assert_same_function(plain, converted, x)
    torch.testing.assert_close(dict(converted.state_dict()), dict(plain.state_dict()))
    with backpack(extensions.BatchGrad()):
        extend(nn.MSELoss())(converted(x), torch.zeros(5, 2).double()).backward()
    assert all(hasattr(p, "grad_batch") for p in converted.parameters())


def test_converted_layers_in_another_conversion() -> None:
    plain, converted, x = layers("lstm")
    outer = extend(nn.Sequential(converted, nn.Tanh()), use_converter=True)
    names = [f"0.{name}" for name, _ in plain.named_parameters()]
    assert [name for name, _ in outer.named_parameters()] == names
    outer.to_empty(device="cpu")
    outer.load_state_dict({f"0.{name}": p for name, p in plain.state_dict().items()})
    assert_same_function(nn.Sequential(plain, nn.Tanh()), outer, x)


def test_converted_layers_train_as_the_original() -> None:
    plain, converted, x = layers("lstm")
    for model in (plain, converted):
        groups = [
            {"params": [p for n, p in model.named_parameters() if "weight" in n], "lr": 0.1},
            {"params": [p for n, p in model.named_parameters() if "bias" in n], "lr": 0.01},
        ]
        optimiser = torch.optim.Adam(groups)
        for _ in range(3):
            optimiser.zero_grad()
            model(x).square().mean().backward()
            optimiser.step()
    torch.testing.assert_close(dict(converted.state_dict()), dict(plain.state_dict()))


def test_converted_layers_with_parameters_from_outside() -> None:
    plain, converted, x = layers("lstm")
    given = {name: nn.Parameter(2 * p.detach()) for name, p in plain.named_parameters()}
    torch.testing.assert_close(
        functional_call(converted, given, (x,)), functional_call(plain, given, (x,))
    )
    with backpack(extensions.BatchGrad()):
        functional_call(converted, given, (x,)).square().sum().backward()
    for p in given.values():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
    assert_same_function(plain, converted, x)


def test_dropout_between_converted_layers_follows_the_mode() -> None:
    _, converted, x = layers("dropout")
    assert not torch.equal(converted(x), converted(x))
    converted.eval()
    assert torch.equal(converted(x), converted(x))


@pytest.mark.parametrize("name", PARAMETRISATIONS)
def test_parametrisation_of_converted_layers(name: str) -> None:
    _, converted, x = layers("lstm")
    change: Any = {
        "weight norm": lambda m: parametrizations.weight_norm(m, "weight_ih_l0"),
        "spectral norm": lambda m: parametrizations.spectral_norm(m, "weight_ih_l0"),
        "pruning": lambda m: prune.l1_unstructured(m, "weight_ih_l0", amount=3),
    }[name]
    with pytest.raises(RuntimeError, match=r"weight_ih_l0 .* before extend\(model, use_converter"):
        change(converted.rnn)
        converted(x)


def test_recurrent_modules_with_hooks_stay_as_they_are() -> None:
    model, seen = KINDS["lstm"](), []
    model.rnn.register_forward_hook(lambda module, x, output: seen.append(module))
    converted = extend(extend(model), use_converter=True)
    converted(torch.rand(5, 6, 3))
    assert seen == [converted.rnn]


# --- Compiled models whose functions are recorded -------------------------------------------------


class Positions(nn.Module):
    """With a table of positions, which has no samples: functions decide where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 4), nn.Embedding(6, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        return self.head(F.gelu(self.tokens(x) + self.places(places)).sum(1))


def compiled_method(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return extend(model, use_converter="record")


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "record, compile": lambda m: torch.compile(
        extend(m, use_converter="record"), backend="aot_eager"
    ),
    "convert, compile": lambda m: torch.compile(extend(m, use_converter=True), backend="aot_eager"),
    "compile, record": lambda m: extend(
        torch.compile(m, backend="aot_eager"), use_converter="record"
    ),
    "compile, convert": lambda m: extend(torch.compile(m, backend="aot_eager"), use_converter=True),
    "inductor": lambda m: torch.compile(extend(m, use_converter="record")),
    "method": compiled_method,
    "compiled as a part": lambda m: extend(
        nn.Sequential(torch.compile(m, backend="aot_eager")), use_converter="record"
    ),
}


def samples() -> tuple[Tensor, Tensor]:
    return torch.randint(7, (5, 6)), torch.randint(2, (5,))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_and_recorded(name: str) -> None:
    torch._dynamo.reset()
    plain, (x, y) = Positions().double(), samples()
    lossfunc, curvature = extend(nn.CrossEntropyLoss()), extensions.DiagGGNExact()
    reference = extend(copy.deepcopy(plain), use_converter="record")
    with backpack(curvature):
        lossfunc(reference(x), y).backward()
    each = [
        torch.autograd.grad(
            F.cross_entropy(plain(x[n : n + 1]), y[n : n + 1]) / 5, plain.parameters()
        )
        for n in range(5)
    ]
    model = COMPILED[name](copy.deepcopy(plain))
    for _ in range(2):  # the second time, all is compiled
        model.zero_grad()
        with backpack(extensions.BatchGrad(), curvature):
            lossfunc(model(x), y).backward()
        for p, q, g in zip(
            model.parameters(), reference.parameters(), zip(*each, strict=True), strict=True
        ):
            torch.testing.assert_close(p.grad, q.grad)
            torch.testing.assert_close(p.grad_batch, torch.stack(g))
            torch.testing.assert_close(p.diag_ggn_exact, q.diag_ggn_exact)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(model(x), plain(x))
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None


def test_compiler_is_back_after_a_recording() -> None:
    """What is compiled next is compiled, also if the recorded forward pass has failed."""
    torch._dynamo.reset()
    model, (x, _) = extend(Positions(), use_converter="record"), samples()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def program(x: Tensor, fails: bool) -> Tensor:
        try:
            out = model(x[0] if fails else x)
        except IndexError:
            out = torch.zeros(2, requires_grad=True)
        return functional(out)

    @torch.compile(backend=backend)
    def functional(x: Tensor) -> Tensor:
        return x.sin().cos()

    for fails in (False, True):
        graphs.clear()
        torch._dynamo.reset()
        program(x, fails)
        assert len(graphs) == 1
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None


@pytest.mark.parametrize("converter", CONVERTERS)
def test_quantities_of_a_model_compiled_whole(converter: Any) -> None:
    torch._dynamo.reset()
    plain, model = both(converter)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, y, lossfunc = data(), torch.randint(2, (5,)), extend(nn.CrossEntropyLoss())
    lossfunc(plain(x), y).backward()
    with backpack(extensions.BatchGrad()), pytest.warns(UserWarning, match="fullgraph=True"):
        lossfunc(run(x), y).backward()
    assert_same_gradients(plain, model)
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())


@pytest.mark.parametrize("is_other", [False, True])
def test_code_that_was_compiled_without_hooks(is_other: bool) -> None:
    """It has run before ``extend``, for this model or for another one of its class."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x).relu())

    def make() -> tuple[Any, Any]:
        model = Net(nn.Linear(4, 4), nn.Linear(4, 3))
        return model, torch.compile(model, backend="eager")

    torch._dynamo.reset()
    x, lossfunc, (model, run) = torch.rand(5, 4), extend(nn.MSELoss()), make()
    lossfunc(run(x), x[:, :3]).backward()
    if is_other:
        model, run = make()
    extend(model)
    loss = lossfunc(run(x), x[:, :3])
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    for p in model.parameters():
        assert len(p.grad_batch) == 5 and p.diag_ggn_exact.shape == p.shape


def test_compiled_step() -> None:
    """The backward pass in a compiled function is computed, not compiled, in a context."""
    torch._dynamo.reset()
    compiled: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.extend(str(node.meta.get("stack_trace")) for node in graph.graph.nodes)
        return graph.forward

    model, lossfunc = both("record")[1], extend(nn.MSELoss())

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        loss = lossfunc(model(x), y)
        with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward()
        y.sin()  # compiled again
        results = [(p.grad_batch, p.diag_ggn_exact) for p in model.parameters()]
        return [result.clone() for both in results for result in both]

    run, x, y = torch.compile(step, backend=backend), data(), data()[:, :2]
    for n in (5, 3, 5):
        expected = step(x[:n], y[:n])
        for result, value in zip(run(x[:n], y[:n]), expected, strict=True):
            torch.testing.assert_close(result, value)
    if torch.__version__ >= (2, 14):  # older ones compile nothing of this function
        assert compiled
    assert not any("backward_pass.py" in place for place in compiled)
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None


def test_compiled_leaf_of_an_extended_model() -> None:
    """What torch.compile returns has no calls of its own: the module inside has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    X, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    expected = oracle.batch_grad(copy.deepcopy(model), nn.MSELoss(), X, y)
    model[2] = torch.compile(model[2], backend="aot_eager")
    loss = extend(nn.MSELoss())(extend(model)(X), y)
    with backpack(extensions.BatchGrad()):
        loss.backward()
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch, value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripting_an_extended_module_says_what_to_do() -> None:
    """Its compiler reads all hooks, and cannot read ours."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    scripted = torch.jit.script(model)
    for module in (extend(model), nn.Sequential(model)):
        with pytest.raises(NotImplementedError, match=r"Script the model before extend\(\)"):
            torch.jit.script(module)
    X = torch.rand(2, 3)
    torch.testing.assert_close(scripted(X), model(X))

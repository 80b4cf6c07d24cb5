"""Recurrent layers and cells: every product against plain autograd of torch's own kernels."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from seen import seen
from torch import Tensor, einsum, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_sequence

from backpack import backpack, extend
from backpack.core.derivatives import (
    BaseDerivatives,
    affine,
    derivatives_of,
    recurrent,
    recurrent_network,
    reductions,
)
from backpack.core.derivatives.recurrent_cells import (
    ELMAN_STEPS,
    GRUStep,
    LSTMStep,
    Path,
    Step,
    Weights,
)
from backpack.core.record.origins import flatten_outputs
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.extensions import KFLR, BatchGrad, BatchL2Grad, DiagGGNExact
from backpack.utils.subsampling import subsample

V, N, T, I, H, P = 2, 3, 4, 2, 3, 2  # noqa: E741
ROWS: list[Any] = [None, [2, 0], slice(1, None)]
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
KINDS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "tanh": (nn.RNN, {"nonlinearity": "tanh"}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm": (nn.LSTM, {}),
    "lstm_proj": (nn.LSTM, {"proj_size": P}),
    "gru": (nn.GRU, {}),
}
CELLS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "tanh_cell": (nn.RNNCell, {"nonlinearity": "tanh"}),
    "relu_cell": (nn.RNNCell, {"nonlinearity": "relu"}),
    "lstm_cell": (nn.LSTMCell, {}),
    "gru_cell": (nn.GRUCell, {}),
}
STEPS: list[Step] = [*ELMAN_STEPS.values(), LSTMStep(), GRUStep()]


class Probe:
    """One call of a recurrent module, and the truth about it."""

    def __init__(self, kind: str, *, states: bool = True, seed: int = 0, **options: Any):
        torch.manual_seed(seed)
        cls, fixed = {**KINDS, **CELLS}[kind]
        self.module: Any = extend(cls(I, H, **fixed, **options).double())
        self.rule: Any = derivatives_of(self.module)
        self.inputs = self._random_inputs(states)
        self.axes_in = [self.rule.batch_axis_in(self.module, i) for i in range(len(self.inputs))]
        self.params: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        self.outputs = self.call(*self.inputs)
        self.axes_out = [self.rule.batch_axis_out(self.module, i) for i in range(len(self.outputs))]

    def _random_inputs(self, states: bool) -> list[Tensor]:
        m = self.module
        is_lstm = isinstance(m, nn.LSTM | nn.LSTMCell)
        shapes: list[tuple[int, ...]]
        if isinstance(m, nn.RNNBase):
            layers = m.num_layers * (2 if m.bidirectional else 1)
            shapes = [(N, T, I) if m.batch_first else (T, N, I), (layers, N, m.proj_size or H)]
            shapes += [(layers, N, H)] if is_lstm else []
        else:
            shapes = [(N, I), (N, H)] + ([(N, H)] if is_lstm else [])
        shapes = shapes if states else shapes[:1]
        return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def call(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        x, *states = inputs
        given = [tuple(states) if len(states) == 2 else states[0]] if states else []
        return flatten_outputs(self.module(x, *given))

    def mats_out(self, used: Sequence[bool] | None = None) -> list[Tensor | None]:
        used = used or [True] * len(self.outputs)
        return [
            torch.randn(V, *out.shape, dtype=out.dtype) if u else None
            for out, u in zip(self.outputs, used, strict=True)
        ]

    def at_rows(self, mats: Sequence[Tensor | None], rows: Any, out: bool = True) -> Any:
        """Select samples of columns at the outputs (inputs)."""
        axes = self.axes_out if out else self.axes_in
        return [
            None if m is None else subsample(m, axis + 1, rows)
            for m, axis in zip(mats, axes, strict=True)
        ]

    def argument(self, mats: Sequence[Tensor | None]) -> Any:
        return mats if len(mats) > 1 else mats[0]

    def back(
        self, mats: Sequence[Tensor | None], variables: Sequence[Tensor], create_graph: bool = False
    ) -> list[Tensor]:
        """Transposed products ``[V, *]`` with some variables by autograd."""
        pairs = [(y, m) for y, m in zip(self.outputs, mats, strict=True) if m is not None]
        each = [
            torch.autograd.grad(
                [y for y, _ in pairs],
                variables,
                [m[v] for _, m in pairs],
                create_graph=create_graph,
                retain_graph=True,
                materialize_grads=True,
            )
            for v in range(V)
        ]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]

    def individual(self, mats: Sequence[Tensor | None], **options: Any) -> dict[str, Tensor]:
        """Transposed products with the parameters, ``[V, N, *p]``."""
        samples = []
        for n in range(N):
            alone = [
                None if m is None else m * _unit(n, m.dim(), axis + 1)
                for m, axis in zip(mats, self.axes_out, strict=True)
            ]
            samples.append(self.back(alone, list(self.params.values()), **options))
        stacked = (torch.stack(parts, 1) for parts in zip(*samples, strict=True))
        return dict(zip(self.params, stacked, strict=True))


def _unit(n: int, dims: int, axis: int) -> Tensor:
    """Return 1 for sample n and else 0, to multiply with."""
    shape = [1] * dims
    shape[axis] = N
    return torch.eye(N, dtype=torch.float64)[n].reshape(shape)


def _named(kind: str, **options: Any) -> Any:
    return pytest.param(
        kind, options, id="-".join([kind, *(f"{k}={v}" for k, v in options.items())])
    )


GIVEN = [{"bias": True}, {"bias": True, "states": False}, {"bias": False}]
ALL = [
    _named(kind, num_layers=layers, bidirectional=both, batch_first=first, **given)
    for kind in KINDS
    for layers, both, first in itertools.product([1, 2], [False, True], [False, True])
    for given in GIVEN
]
ALL += [_named(kind, **given) for kind in CELLS for given in GIVEN]
SOME = [
    *(
        pytest.param(kind, {"num_layers": 2, "bidirectional": True, "batch_first": True}, id=kind)
        for kind in KINDS
    ),
    *(pytest.param(kind, {}, id=kind) for kind in CELLS),
]

everywhere = pytest.mark.parametrize("kind, options", ALL)
somewhere = pytest.mark.parametrize("kind, options", SOME)


# ---------------------------------------------------------------------- one step


@pytest.mark.parametrize("step", STEPS, ids=lambda s: type(s).__name__)
def test_step_agrees_with_autograd_and_its_adjoint(step: Step) -> None:
    torch.manual_seed(0)
    size = step.num_gates * H
    shapes = [(size, I), (size, H), (size,), (size,)]
    w = Weights(*(torch.randn(*d, dtype=torch.float64) for d in shapes), None)
    x, *state = (torch.randn(N, size, dtype=torch.float64) for size in [I] + [H] * step.num_states)
    p, q = w.p(x), w.q(state[0])
    moving = (p, q, *state)
    after, *_ = step.advance(p, q, tuple(state))
    path = Path(x[None], state[0][None], after[None], tuple(state), False)
    slopes = step.slopes(w, path)[0].at(0)
    tangents = [torch.randn(V, *m.shape, dtype=torch.float64) for m in moving]
    moved = step.tangent(slopes, tangents[0], tangents[1], tuple(tangents[2:]))

    def states_after(*variables: Tensor) -> tuple[Tensor, ...]:
        return step.advance(variables[0], variables[1], tuple(variables[2:]))

    for v in range(V):
        along = tuple(t[v] for t in tangents)
        _, expected = torch.autograd.functional.jvp(states_after, moving, along)
        torch.testing.assert_close(tuple(m[v] for m in moved), tuple(expected), **TOLERANCE)
    mats = tuple(torch.randn_like(m) for m in moved)
    cotangents = step.gather(slopes.states, mats)
    at_gates = torch.cat([cotangents[k] for k in step.sources], -1)
    to_p, to_q = at_gates * slopes.p, at_gates * slopes.q
    to_h, others = step.hand_on(slopes.states, cotangents)
    back = [to_p, to_q, torch.zeros_like(mats[0]) if to_h is None else to_h, *others]
    one = sum((m * u).sum() for m, u in zip(moved, mats, strict=True))
    other = sum((t * b).sum() for t, b in zip(tangents, back, strict=True))
    torch.testing.assert_close(one, other, **TOLERANCE)


# ---------------------------------------------------------------------- products


@everywhere
def test_evaluate(kind: str, options: dict[str, Any]) -> None:
    probe = Probe(kind, **options)
    c = seen(probe.module)
    outputs = flatten_outputs(probe.rule.evaluate(c, {}, *probe.inputs))
    torch.testing.assert_close(outputs, probe.outputs, **TOLERANCE)
    twice = {name: 2 * p for name, p in probe.params.items()}
    x, *states = probe.inputs
    given = [tuple(states) if len(states) == 2 else states[0]] if states else []
    expected = flatten_outputs(functional_call(probe.module, twice, (x, *given)))
    outputs = flatten_outputs(probe.rule.evaluate(c, twice, *probe.inputs))
    torch.testing.assert_close(outputs, expected, **TOLERANCE)


@everywhere
def test_jac_t_mat_prod(kind: str, options: dict[str, Any]) -> None:
    probe = Probe(kind, **options)
    each = itertools.product([True, False], repeat=len(probe.outputs))
    for used in (u for u in each if any(u)):
        mats = probe.mats_out(used)
        truth = probe.back(mats, probe.inputs)
        for rows in ROWS:
            given = probe.argument(probe.at_rows(mats, rows))
            found = probe.rule.jac_t_mat_prod(probe.module, None, None, given, rows)
            found = (found,) if isinstance(found, Tensor) else found
            expected = probe.at_rows(truth, rows, out=False)
            torch.testing.assert_close(list(found), expected, **TOLERANCE)


@everywhere
def test_averaged_product_at_the_first_output(kind: str, options: dict[str, Any]) -> None:
    """The public method of KFRA: of several outputs and inputs, the first alone."""
    probe = Probe(kind, **options)
    y, x = probe.outputs[0].movedim(probe.axes_out[0], 0), probe.inputs[0]
    flat = y.flatten(1)
    mat = torch.randn(flat.shape[1], flat.shape[1], dtype=y.dtype)
    jacobians = [
        torch.stack(
            [_gradient(entry, x).select(probe.axes_in[0], n).flatten() for entry in flat[n]]
        )
        for n in range(N)
    ]
    for rows in ROWS:
        chosen = subsample(torch.stack(jacobians), 0, rows)
        expected = einsum("noi,op,npj->ij", chosen, mat, chosen) / len(chosen)
        found = probe.rule.ea_jac_t_mat_jac_prod(probe.module, None, None, mat, rows)
        torch.testing.assert_close(found, expected, **TOLERANCE)


def _gradient(of: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(of, x, retain_graph=True)
    return gradient


@everywhere
def test_jac_mat_prod(kind: str, options: dict[str, Any]) -> None:
    probe = Probe(kind, **options)
    count = len(probe.inputs)
    used = {(True,) * count, *(tuple(i == j for i in range(count)) for j in range(count))}
    for chosen in used:
        mats = [
            torch.randn(V, *x.shape, dtype=x.dtype) if u else None
            for x, u in zip(probe.inputs, chosen, strict=True)
        ]
        full = [
            torch.zeros(V, *x.shape, dtype=x.dtype) if m is None else m
            for x, m in zip(probe.inputs, mats, strict=True)
        ]
        truth = [
            torch.autograd.functional.jvp(
                probe.call, tuple(probe.inputs), tuple(m[v] for m in full)
            )[1]
            for v in range(V)
        ]
        expected = [torch.stack(parts) for parts in zip(*truth, strict=True)]
        for rows in ROWS:
            given = probe.argument(probe.at_rows(mats, rows, out=False))
            found = probe.rule.jac_mat_prod(probe.module, None, None, given, rows)
            found = (found,) if isinstance(found, Tensor) else found
            torch.testing.assert_close(list(found), probe.at_rows(expected, rows), **TOLERANCE)


@everywhere
def test_param_mjp(kind: str, options: dict[str, Any]) -> None:
    probe = Probe(kind, **options)
    assert set(probe.rule.param_names(probe.module)) == set(probe.params)
    mats = probe.mats_out()
    truth = probe.individual(mats)
    for rows in ROWS:
        given = probe.argument(probe.at_rows(mats, rows))
        m = probe.module
        for name in probe.params:
            expected = subsample(truth[name], 1, rows)
            for sum_batch in (True, False):
                found = probe.rule.param_mjp(name, m, None, None, given, sum_batch, rows)
                target = expected.sum(1) if sum_batch else expected
                torch.testing.assert_close(found, target, **TOLERANCE)


@everywhere
def test_param_jac_mat_prod(kind: str, options: dict[str, Any]) -> None:
    """``⟨u, J_p v⟩ = ⟨J_pᵀ u, v⟩`` for every sample, with ``J_pᵀ`` by autograd."""
    probe = Probe(kind, **options)
    mats = probe.mats_out()
    truth = probe.individual(mats)
    m = probe.module
    for rows in ROWS:
        for name, p in probe.params.items():
            tangent = torch.randn(V, *p.shape, dtype=p.dtype)
            found = probe.rule.param_jac_mat_prod(name, m, None, None, tangent, rows)
            found = (found,) if isinstance(found, Tensor) else found
            pairs = zip(found, probe.at_rows(mats, rows), probe.axes_out, strict=True)
            one = sum((y * u).movedim(a + 1, 1).flatten(2).sum(2) for y, u, a in pairs)
            back = subsample(truth[name], 1, rows) * tangent.unsqueeze(1)
            torch.testing.assert_close(one, back.flatten(2).sum(2), **TOLERANCE)


@somewhere
def test_mat_without_v(kind: str, options: dict[str, Any]) -> None:
    probe = Probe(kind, **options)
    mats = [m for m in probe.mats_out() if m is not None]
    m = probe.module
    one = probe.argument([mat[0] for mat in mats])
    found = probe.rule.jac_t_mat_prod(m, None, None, one)
    expected = probe.back(mats, probe.inputs)
    torch.testing.assert_close(list(found), [e[0] for e in expected], **TOLERANCE)
    each = probe.rule.param_mjp(next(iter(probe.params)), m, None, None, one, False)
    assert len(each) == N


# ---------------------------------------------------------------------- reductions


def _individual(rule: Any, name: str, c: Any, mats: Any) -> Tensor:
    return rule.param_vjp(c, name, mats)


@somewhere
@pytest.mark.parametrize("slice_entries", [1, 2**20])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_reductions(
    kind: str,
    options: dict[str, Any],
    rows: Any,
    slice_entries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reductions, "SLICE_ENTRIES", slice_entries)
    probe = Probe(kind, **options)
    mats = probe.argument(probe.at_rows(probe.mats_out(), rows))
    count = len(torch.arange(N)[rows if rows is not None else slice(None)])
    weights = torch.randn(V, count, dtype=torch.float64)
    c = seen(probe.module, rows)
    for name in probe.params:
        for wanted, given in itertools.product(
            ({"square_norm"}, reductions.NAMES), (None, weights)
        ):
            found = probe.rule.reduced(c, name, mats, wanted, given)
            p, rule = probe.rule.parameter(c, name), probe.rule
            products = partial(_individual, rule, name)
            generic = c, mats, products, p.shape, wanted, given
            expected = BaseDerivatives._reduced_in_slices(rule, *generic)
            torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_square_norm_of_short_and_long_sequences(steps: int) -> None:
    """Over few steps by the Gram matrices, over many by the products."""
    probe = Probe("gru")
    probe.inputs[0] = torch.randn(steps, N, I, dtype=torch.float64, requires_grad=True)
    probe.outputs = probe.call(*probe.inputs)
    mats = probe.mats_out()
    truth = probe.individual(mats)
    m = probe.module
    for name in probe.params:
        wanted = ["square_norm"]
        found = probe.rule.param_mjp_reduced(name, m, None, None, mats, wanted)["square_norm"]
        expected = truth[name].square().transpose(0, 1).flatten(1).sum(1)
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["tanh", "lstm", "gru"])
def test_parameters_that_change_after_the_forward_pass_are_an_error(kind: str) -> None:
    """Gates are computed again, and would be others."""
    layer, options = KINDS[kind]
    module = extend(layer(4, 8, **options))
    loss = module(torch.rand(5, 3, 4))[0].square().sum()
    with torch.no_grad():
        module.bias_ih_l0.add_(1)
    messages = "was changed after|modified by an inplace"  # autograd needs some of them, too
    with backpack(BatchGrad()), pytest.raises(RuntimeError, match=messages):
        loss.backward()


@pytest.mark.parametrize("kind", ["tanh", "lstm", "gru"])
def test_parameters_that_are_replaced_after_the_forward_pass(kind: str) -> None:
    """Gates are computed again with those that the module had."""
    layer, options = KINDS[kind]
    module = extend(layer(4, 8, **options))
    loss = module(torch.rand(5, 3, 4))[0].square().sum()
    given = module.weight_hh_l0
    module.weight_hh_l0 = nn.Parameter(2 * given.detach())
    bias = module.bias_ih_l0
    del module.bias_ih_l0
    module.bias_ih_l0 = bias  # now the last one
    with backpack(BatchGrad()):
        loss.backward()
    torch.testing.assert_close(given.grad_batch.sum(0), given.grad)


def test_saturated_gates_are_precise() -> None:
    """What a cell forgets is a small difference of numbers close to 1."""
    torch.manual_seed(0)
    module = nn.LSTM(4, 8)
    with torch.no_grad():
        module.bias_ih_l0[:24] += 4
    values = []
    x = torch.rand(50, 3, 4)
    for precision in (torch.float32, torch.float64):
        extend(module.to(precision))
        loss = module(x.to(precision))[0].sum()
        with backpack(BatchGrad()):
            loss.backward()
        values.append(module.weight_ih_l0.grad_batch[:, :8].double())
    error = (values[0] - values[1]).norm() / values[1].norm()
    assert error < 5e-5


@pytest.mark.parametrize("kind", KINDS)
def test_sides_share_products_of_positions_where_the_same_arrives(kind: str) -> None:
    """Norms of a pass in which all parameters take part are those of the individual gradients."""
    layer, options = KINDS[kind]
    torch.manual_seed(0)
    recurrent = layer(4, 8, num_layers=2, bidirectional=True, batch_first=True, **options)
    features = 2 * 2 * options.get("proj_size", 8)
    model = nn.Sequential(recurrent, ReduceTuple(0), nn.Flatten(), nn.Linear(features, 3)).double()
    extend(model), extend(lossfunc := nn.CrossEntropyLoss())
    x, y = torch.rand(6, 2, 4, dtype=torch.float64), torch.randint(3, (6,))
    for ext in (BatchL2Grad(), BatchGrad()):
        loss = lossfunc(model(x), y)
        with backpack(ext):
            loss.backward()
    for p in model.parameters():
        expected = p.grad_batch.flatten(1).square().sum(1)
        torch.testing.assert_close(p.batch_l2, expected, **TOLERANCE)


# ---------------------------------------------------------------------- Kronecker factors


class Steps:
    """A module called step by step, with a copy of the parameters for each: ``t -> name -> p``."""

    def __init__(self, probe: Probe):
        m = probe.module
        self.names = list(probe.params)
        self.copies = [
            {name: p.detach().clone().requires_grad_() for name, p in probe.params.items()}
            for _ in range(T)
        ]
        x, *state = probe.inputs
        self.read: list[dict[str, Tensor]] = []  # t -> name -> what a parameter is multiplied with
        outputs = []
        for x_t, params in zip(x.split(1), self.copies, strict=True):
            given = tuple(state) if len(state) == 2 else state[0]
            y, after = functional_call(m, params, (x_t, given))
            before, state = state, list(after) if isinstance(after, tuple) else [after]
            outputs.append(y)
            read = {f"weight_hh_l{k}": before[0][k] for k in range(m.num_layers)}
            read |= {f"weight_ih_l{k}": state[0][k - 1] for k in range(1, m.num_layers)}
            self.read.append({**read, "weight_ih_l0": x_t[0]})
        self.outputs = (torch.cat(outputs), *state)

    def products(self, mats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the part of each step in the products, ``[V, N, T, *p]``."""
        variables = [p for params in self.copies for p in params.values()]
        found: dict[str, list[list[Tensor]]] = {name: [] for name in self.names}
        for v, n in itertools.product(range(V), range(N)):
            alone = [(m * _unit(n, m.dim(), 2))[v] for m in mats]
            grads = torch.autograd.grad(self.outputs, variables, alone, retain_graph=True)
            for i, name in enumerate(self.names):
                found[name].append(list(grads[i :: len(self.names)]))
        return {
            name: torch.stack([torch.stack(g) for g in parts]).unflatten(0, (V, N))
            for name, parts in found.items()
        }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_kronecker_factors(kind: str, layers: int, rows: Any) -> None:
    """Against a network with parameters of its own in every step."""
    probe = Probe(kind, num_layers=layers)
    c = seen(probe.module, rows)
    mats: Any = probe.mats_out()
    steps = Steps(probe)
    torch.testing.assert_close(steps.outputs, probe.outputs, **TOLERANCE)
    parts = {name: subsample(g, 1, rows) for name, g in steps.products(mats).items()}
    given = probe.at_rows(mats, rows)
    for name in probe.params:
        cotangents = _at_gates(parts, name)
        for approximation in (None, "expand", "reduce"):
            found = probe.rule.kron_rows(c, name, given, approximation)
            if cotangents is None:  # the projection has no bias
                cotangents = probe.rule.kron_rows(c, name, given, "expand").reshape(V, -1, T, P)
            expected = cotangents.flatten(1, 2) if approximation == "expand" else cotangents.sum(2)
            torch.testing.assert_close(found, expected.unsqueeze(2), **TOLERANCE)
            factors = probe.rule.kron_inputs(c, name, approximation)
            if name.startswith("bias"):
                assert factors == []
                continue
            if name in steps.read[0]:
                x = torch.stack([read[name] for read in steps.read], 1)
                x = subsample(x, 0, rows)
            else:
                x = einsum("nto,ntoi->nti", cotangents[0], parts[name][0])
                x = x / cotangents[0].square().sum(2, keepdim=True)
            torch.testing.assert_close(
                einsum("vnto,nti->vntoi", cotangents, x), parts[name], **TOLERANCE
            )
            torch.testing.assert_close(factors, [_input_factor(x, approximation)], **TOLERANCE)


def _at_gates(parts: dict[str, Tensor], name: str) -> Tensor | None:
    """Return what arrives at the pre-activation that a parameter adds to, ``[V, N, T, O]``."""
    return None if "_hr_" in name else parts[name.replace("weight", "bias")]


def _input_factor(x: Tensor, approximation: str | None) -> Tensor:
    count, steps, _ = x.shape
    if approximation == "reduce":
        return einsum("nti,nuj->ij", x, x) / (count * steps**2)
    return einsum("nti,ntj->ij", x, x) / (count * (steps if approximation else 1))


@pytest.mark.parametrize("kind", CELLS)
def test_kronecker_factors_of_cells_are_exact(kind: str) -> None:
    """With a single step, rows and what is read make the individual products."""
    probe = Probe(kind)
    mats = probe.mats_out()
    truth = probe.individual(mats)
    c = seen(probe.module)
    for name in probe.params:
        (rows,) = probe.rule.kron_rows(c, name, probe.argument(mats)).unbind(2)
        if name.startswith("bias"):
            torch.testing.assert_close(rows, truth[name], **TOLERANCE)
            continue
        x = probe.inputs[0 if name == "weight_ih" else 1]
        torch.testing.assert_close(einsum("vno,ni->vnoi", rows, x), truth[name], **TOLERANCE)
        (factor,) = probe.rule.kron_inputs(c, name)
        torch.testing.assert_close(factor, x.T @ x / N, **TOLERANCE)


# ---------------------------------------------------------------------- differentiability


@somewhere
def test_create_graph(kind: str, options: dict[str, Any]) -> None:
    probe = Probe(kind, **options)
    mats: list[Any] = [m.requires_grad_() for m in probe.mats_out() if m is not None]
    variables = [*probe.inputs, *probe.params.values(), *mats]
    truth = probe.back(mats, [*probe.inputs, *probe.params.values()], create_graph=True)
    mixed = [torch.randn_like(t) for t in truth]

    def gradient(results: Sequence[Tensor]) -> Sequence[Tensor]:
        value = torch.stack([(r * c).sum() for r, c in zip(results, mixed, strict=True)]).sum()
        return torch.autograd.grad(value, variables, retain_graph=True, materialize_grads=True)

    given = probe.argument(mats)
    m = probe.module
    back = probe.rule.jac_t_mat_prod(m, None, None, given)
    products = [probe.rule.param_mjp(name, m, None, None, given) for name in probe.params]
    found = gradient([*back, *products])
    torch.testing.assert_close(found, gradient(truth), **TOLERANCE)


@somewhere
def test_second_derivative(kind: str, options: dict[str, Any]) -> None:
    """``evaluate`` is fit for forward over reverse, with batched tangents."""
    probe = Probe(kind, **options)
    if kind.startswith("relu"):  # no kink is near: nothing else is special
        assert all((out != 0).any() for out in probe.outputs)
    c = seen(probe.module)
    mats: list[Any] = [m[0] for m in probe.mats_out() if m is not None]
    point = ({k: p.detach() for k, p in probe.params.items()}, *(x.detach() for x in probe.inputs))
    tangents = (
        {k: torch.randn(V, *p.shape).to(p) for k, p in probe.params.items()},
        *(torch.randn(V, *x.shape).to(x) for x in probe.inputs),
    )

    def value(params: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        outputs = flatten_outputs(probe.rule.evaluate(c, params, *inputs))
        return torch.stack([(y * m).sum() for y, m in zip(outputs, mats, strict=True)]).sum()

    gradient = torch.func.grad(value, tuple(range(len(point))))
    found = torch.vmap(lambda *t: torch.func.jvp(gradient, point, t)[1])(*tangents)
    variables = [*probe.params.values(), *probe.inputs]
    flat = [*tangents[0].values(), *tangents[1:]]
    loss = torch.stack([(y * m).sum() for y, m in zip(probe.outputs, mats, strict=True)]).sum()
    grads = torch.autograd.grad(loss, variables, create_graph=True)
    for v in range(V):
        along = torch.stack([(g * t[v]).sum() for g, t in zip(grads, flat, strict=True)]).sum()
        truth = torch.autograd.grad(along, variables, retain_graph=True, materialize_grads=True)
        ours = [*(t[v] for t in found[0].values()), *(t[v] for t in found[1:])]
        torch.testing.assert_close(ours, list(truth), **TOLERANCE)


# ---------------------------------------------------------------------- what is computed once


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the runs through time."""
    counts = {"trace": 0, "pull_back": 0}

    def counting(name: str) -> None:
        original = getattr(recurrent, name)

        def wrapper(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(recurrent, name, wrapper)

    for name in counts:
        counting(name)
    return counts


def _extract_everything(probe: Probe, mats: Any, rows: Any = None) -> None:
    rule, c = probe.rule, seen(probe.module, rows)
    rule.vjp(c, mats)
    for name in probe.params:
        rule.param_vjp_sum(c, name, mats)
        rule.reduced(c, name, mats, {"square_norm"})
        rule.kron_rows(c, name, mats)
        rule.kron_inputs(c, name)


def test_everything_shares_one_recursion(counted: dict[str, int]) -> None:
    probe = Probe("lstm", num_layers=2)
    mats: list[Any] = probe.mats_out()
    with torch.no_grad():
        _extract_everything(probe, mats)
        # new views of the same memory, as the engine makes them
        _extract_everything(probe, [mat.movedim(2, 1).movedim(1, 2) for mat in mats])
        assert counted == {"trace": 1, "pull_back": 1}
        _extract_everything(probe, probe.at_rows(mats, [0, 1]), [0, 1])
        assert counted == {"trace": 1, "pull_back": 2}


def test_what_changes_is_computed_again(counted: dict[str, int]) -> None:
    probe = Probe("gru")
    mats: list[Any] = probe.mats_out()
    rule, c = probe.rule, seen(probe.module)
    for expected in ({"trace": 1, "pull_back": 1}, {"trace": 1, "pull_back": 2}):
        with torch.no_grad():
            found = rule.param_vjp_sum(c, "bias_hh_l0", mats)
            assert counted == expected
        truth = probe.back(mats, [probe.module.bias_hh_l0])
        torch.testing.assert_close(found, truth[0], **TOLERANCE)
        mats[1].mul_(2)
    with_graph = rule.param_vjp_sum(c, "bias_hh_l0", mats)
    assert with_graph.requires_grad
    assert counted == {"trace": 2, "pull_back": 3}
    with torch.no_grad():
        probe.module.weight_hh_l0.mul_(0.5)
    probe.outputs = probe.call(*probe.inputs)
    for given, out in zip(c.outputs, probe.outputs, strict=True):
        given.copy_(out.detach())  # the same memory, new values
    c.saved.update(rule.saved(probe.module, (), ()))  # as if it was called only now
    with torch.no_grad():
        found = rule.param_vjp_sum(c, "bias_hh_l0", mats)
    truth = probe.back(mats, [probe.module.bias_hh_l0])
    torch.testing.assert_close(found, truth[0], **TOLERANCE)


def test_recall_tells_results_apart() -> None:
    saved: dict[str, Any] = {}
    x = torch.zeros(4)
    numbers = itertools.count()

    def value(*tensors: Tensor | None, fact: Any = None) -> int:
        return recurrent.memoise(saved, "x", tensors, (fact,), lambda: next(numbers))

    assert [value(x), value(x[:]), value(x.view(2, 2)), value(x[1:]), value(x)] == [0, 0, 1, 2, 3]
    assert [value(x, None), value(None, x), value(x, x), value(x, x, fact=1)] == [4, 5, 6, 7]
    with torch.no_grad():
        assert value(x, x, fact=1) == 8
    for expected in range(9, 12):  # the address of a freed tensor is not reused
        assert value(torch.full((4,), float(expected))) == expected


# ---------------------------------------------------------------------- facts and errors


def test_facts() -> None:
    probe = Probe("lstm", num_layers=2, bidirectional=True, batch_first=True)
    rule, m = probe.rule, probe.module
    assert not rule.hessian_is_zero(m)
    assert not rule.hessian_is_diagonal(m)
    assert not rule.is_linear_in_params(m)
    assert not rule.couples_samples(m)
    assert rule.min_dims(m) == 3
    assert [rule.batch_axis_in(m, i) for i in range(3)] == [0, 1, 1]
    assert [rule.batch_axis_out(m, i) for i in range(3)] == [0, 1, 1]
    m = nn.LSTM(I, H)
    assert [rule.batch_axis_in(m, i) for i in range(3)] == [1, 1, 1]
    cell = Probe("gru_cell")
    assert cell.rule.min_dims(cell.module) == 2
    assert cell.rule.batch_axis_in(cell.module, 1) == cell.rule.batch_axis_out(cell.module, 0) == 0


def test_none_for_the_states() -> None:
    """A leaf that is no tensor gets no product."""
    probe = Probe("gru", states=False)
    mats = probe.mats_out()
    probe.outputs = flatten_outputs(probe.module(*probe.inputs, None))
    x, nothing = probe.rule.jac_t_mat_prod(probe.module, None, None, mats)
    assert nothing is None
    torch.testing.assert_close([x], probe.back(mats, probe.inputs), **TOLERANCE)


def test_dropout_between_layers() -> None:
    probe = Probe("lstm", num_layers=2, dropout=0.5)
    mats = probe.mats_out()
    m = probe.module
    with pytest.raises(NotImplementedError, match=r"LSTM has dropout=0\.5.*use_converter='trace'"):
        probe.rule.param_mjp("weight_ih_l0", m, None, None, mats)
    m.eval()
    probe.outputs = probe.call(*probe.inputs)
    found = probe.rule.param_mjp("weight_ih_l0", m, None, None, mats)
    truth = probe.back(mats, [probe.module.weight_ih_l0])
    torch.testing.assert_close(found, truth[0], **TOLERANCE)
    with pytest.warns(UserWarning, match="dropout"):
        single = Probe("lstm", num_layers=1, dropout=0.5)  # torch ignores it
    single.rule.param_mjp("weight_ih_l0", single.module, None, None, single.mats_out())


def test_packed_sequence() -> None:
    m: Any = extend(nn.GRU(I, H))
    packed = pack_sequence([torch.randn(3, I), torch.randn(2, I)])
    output, h_n = m(packed)
    rule: Any = derivatives_of(m)
    mats = [torch.randn(1, *output.data.shape), torch.randn(1, *h_n.shape)]
    with pytest.raises(NotImplementedError, match=r"GRU was called with a PackedSequence.*padded"):
        rule.jac_t_mat_prod(m, None, None, mats)


def test_packed_sequence_in_a_forward_pass_is_harmless() -> None:
    m = extend(nn.GRU(I, H))
    packed = pack_sequence([torch.randn(3, I), torch.randn(2, I)])
    output, _ = m(packed)
    output.data.sum().backward()
    assert m.weight_ih_l0.grad is not None


@pytest.mark.parametrize("converter", [False, True])
def test_advice_on_packed_sequences_of_a_layer_alone(converter: bool) -> None:
    """A graph of modules does not follow them: recording does, of states and of rows."""
    layer, lossfunc = nn.LSTM(I, 3).double(), extend(nn.CrossEntropyLoss())
    sequences, y = [torch.randn(n, I).double() for n in (3, 2)], torch.tensor([0, 2])

    def backward(model: nn.Module) -> None:
        _, (h, _) = model(pack_sequence(sequences))
        with backpack(BatchGrad(), DiagGGNExact()):
            lossfunc(h[-1], y).backward()

    plain = copy.deepcopy(layer)
    message = r"PackedSequence.*use_converter='record'\) of a model that packs and unpacks"
    with pytest.raises(ValueError, match=message):
        backward(extend(copy.deepcopy(layer), use_converter=converter))
    backward(extend(layer, use_converter="record"))
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        each, ggn = [], torch.zeros_like(q)
        for x, label in zip(sequences, y, strict=True):
            out = plain(x)[1][0][-1]
            loss = nn.functional.cross_entropy(out, label) / 2
            each += torch.autograd.grad(loss, q, retain_graph=True)
            rows = [torch.autograd.grad(o, q, retain_graph=True)[0].flatten() for o in out]
            J, prob = torch.stack(rows), out.softmax(0).detach()
            H = (prob.diag() - prob.outer(prob)) / 2
            ggn += torch.einsum("ca,cd,da->a", J, H, J).reshape(q.shape)
        torch.testing.assert_close(p.grad_batch, torch.stack(each), **TOLERANCE)
        torch.testing.assert_close(p.diag_ggn_exact, ggn, **TOLERANCE)


@pytest.mark.parametrize("packed", [True, False])
def test_refused_input_in_a_backward_pass(packed: bool) -> None:
    model, lossfunc = extend(nn.GRU(I, 2)), extend(nn.CrossEntropyLoss())
    x: Any = torch.randn(T, I)
    output, _ = model(pack_sequence([x]) if packed else x)
    match = "PackedSequence" if packed else "without a batch axis"
    with pytest.raises(ValueError, match=match), backpack(DiagGGNExact()):
        lossfunc(output.data if packed else output, torch.zeros(T).long()).backward()


@pytest.mark.parametrize("module", [nn.RNN(I, H), nn.LSTMCell(I, H)], ids=["RNN", "LSTMCell"])
def test_without_batch_axis(module: Any) -> None:
    x = torch.randn(T, I) if isinstance(module, nn.RNN) else torch.randn(I)
    outputs = extend(module)(x)
    rule: Any = derivatives_of(module)
    with pytest.raises(ValueError, match="without a batch axis"):
        rule.evaluate(seen(module), {}, x)
    del outputs


# ---------------------------------------------------------------------- many columns


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often what arrives is factored, however few columns there are."""
    taken: list[int] = []

    def always(network: Any, slopes: Any, like: Tensor) -> bool:
        taken.append(len(like))
        return network.weights[0].weight_hr is None

    monkeypatch.setattr(recurrent_network, "prefers_factors", always)
    return taken


@everywhere
def test_many_columns(kind: str, options: dict[str, Any], many: list[int]) -> None:
    """Columns that reach some of the steps, against autograd."""
    probe = Probe(kind, **options)
    mats = probe.mats_out()
    for v, mat in enumerate(m for m in mats if m is not None):
        mat[:, v % 2 :] *= torch.arange(2).repeat(V)[:V].reshape(-1, *(1,) * (mat.dim() - 1))
    back, truth = probe.back(mats, probe.inputs), probe.individual(mats)
    weights = torch.randn(V, N, dtype=torch.float64)
    for rows in ROWS:
        given = probe.argument(probe.at_rows(mats, rows))
        own = subsample(weights, 1, rows)
        m, c = probe.module, seen(probe.module, rows)
        with torch.no_grad():
            found = probe.rule.jac_t_mat_prod(m, None, None, given, rows)
            found = (found,) if isinstance(found, Tensor) else found
            expected = probe.at_rows(back, rows, out=False)
            torch.testing.assert_close(list(found), expected, **TOLERANCE)
            for name in probe.params:
                arguments = (name, m, None, None, given)
                each = subsample(truth[name], 1, rows)
                found = probe.rule.param_mjp(*arguments, False, rows)
                torch.testing.assert_close(found, each, **TOLERANCE)
                for w in (None, own):
                    expected = reductions.of_products(each, reductions.NAMES, w)
                    names = reductions.NAMES
                    found = probe.rule.param_mjp_reduced(*arguments, names, rows, w)
                    torch.testing.assert_close(found, expected, **TOLERANCE)
                summed = probe.rule.kron_rows(c, name, given)
                apart = probe.rule.kron_rows(c, name, given, "expand")
                apart = apart.unflatten(1, (summed.shape[1], -1)).sum(2)
                torch.testing.assert_close(summed, apart, **TOLERANCE)
    assert many


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["tanh", "lstm", "gru"])
def test_loss_at_every_step(
    kind: str, bidirectional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of early positions reach few steps: as many as there are, and as few columns."""
    cls, fixed = KINDS[kind]
    torch.manual_seed(0)
    rnn = cls(I, H, 2, batch_first=True, bidirectional=bidirectional, **fixed)
    width = H * (2 if bidirectional else 1)
    model = extend(
        nn.Sequential(rnn, ReduceTuple(0), nn.Linear(width, 3), Permute(0, 2, 1)).double()
    )
    loss = extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, T, I, dtype=torch.float64), torch.randint(3, (N, T))
    results = []
    for factored in (True, False):
        monkeypatch.setattr(recurrent_network, "prefers_factors", lambda *_, f=factored: f)
        with backpack(DiagGGNExact(), KFLR()):
            loss(model(x), y).backward()
        results.append([t for p in model.parameters() for t in (p.diag_ggn_exact, *p.kflr)])
    torch.testing.assert_close(*results, **TOLERANCE)


def test_many_columns_pay_off() -> None:
    """The choice counts multiplications; few columns, or a graph, are not factored."""
    probe = Probe("lstm", num_layers=1)
    network = probe.rule.network(seen(probe.module))
    with torch.no_grad():
        for columns, expected in [(1, False), (64, False), (400, True)]:
            w = network.weights[0]._replace(weight_ih=torch.randn(4 * H, 100))
            slopes = recurrent_network.Slopes(torch.empty(5), torch.empty(5), ())
            found = recurrent_network.prefers_factors(
                network._replace(weights=[w]), slopes, torch.empty(columns)
            )
            assert found is expected
    assert not recurrent_network.prefers_factors(network, slopes, torch.empty(10**6))


@pytest.mark.parametrize("bias", [False, True])
def test_squares_of_columns_at_one_position(bias: bool) -> None:
    """More columns than positions, each at one of them: as for any columns."""
    torch.manual_seed(0)
    s = torch.zeros(8, N, T, 3).double()
    s[range(8), :, [0, 0, 1, 1, 2, 2, 3, 3]] = torch.randn(8, N, 3).double()
    x = None if bias else torch.randn(N, T, I).double()
    for w in (None, torch.randn(8, N).double()):
        wanted = reductions.NAMES - {"individual"}
        with torch.no_grad():
            found = affine.reduced(s, x, wanted, w)
        expected = reductions.of_products(affine.vjp(s, x), wanted, w)
        torch.testing.assert_close(found, expected, **TOLERANCE)

"""Embeddings and bags of them: the rule against autograd, and extensions on small networks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import oracle
import pytest
import torch
from seen import seen
from torch import Tensor, einsum, nn

from backpack import backpack, extend, extensions
from backpack.core.derivatives import derivatives_of, reductions
from backpack.optim import DPSGD
from backpack.utils.kroneckers import kfacs_to_mat
from backpack.utils.subsampling import subsample

N, W, D, V = 4, 6, 3, 2
ROWS: list[Any] = [None, [2, 0], [-1], [1, 1], slice(1, None)]

# each sample repeats a token, and some samples share tokens; 5 never occurs, 1 may be the padding
TOKENS = torch.tensor([[0, 3, 3, 1], [2, 2, 2, 2], [1, 4, 1, 0], [1, 1, 1, 1]])
FLAT = torch.tensor([0, 3, 3, 1, 2, 4, 1, 4, 0, 0])
OFFSETS = torch.tensor([0, 4, 4, 7])  # an empty bag, and one from 7 to the end
SCALES = torch.linspace(-1.0, 2.0, 16, dtype=torch.float64).reshape(4, 4)


def embedding(**keywords: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Embedding(W, D, dtype=torch.float64, **keywords)


def bag(mode: str, **keywords: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.EmbeddingBag(W, D, mode=mode, dtype=torch.float64, **keywords)


EMBEDDINGS: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "one-token": (embedding(), (TOKENS[:, 0],)),
    "tokens": (embedding(), (TOKENS,)),
    "more-axes": (embedding(), (TOKENS.reshape(4, 2, 2),)),
    "int32": (embedding(), (TOKENS.int(),)),
    "padding": (embedding(padding_idx=1), (TOKENS,)),
    "negative-padding": (embedding(padding_idx=-W + 1), (TOKENS,)),
}
BAGS: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "scaled": (bag("sum"), (TOKENS, None, SCALES)),
    "scaled-padding": (bag("sum", padding_idx=1), (TOKENS, None, SCALES)),
    "scaled-offsets": (bag("sum"), (FLAT, OFFSETS, SCALES.flatten()[:10])),
}
for mode in ("sum", "mean", "max"):
    BAGS |= {
        f"{mode}": (bag(mode), (TOKENS,)),
        f"{mode}-int32": (bag(mode), (TOKENS.int(),)),
        f"{mode}-padding": (bag(mode, padding_idx=1), (TOKENS,)),
        f"{mode}-offsets": (bag(mode), (FLAT, OFFSETS)),
        f"{mode}-offsets-padding": (bag(mode, padding_idx=1), (FLAT, OFFSETS)),
        f"{mode}-last-offset": (
            bag(mode, include_last_offset=True),
            (FLAT, torch.cat([OFFSETS, torch.tensor([10])])),
        ),
    }
EVERYTHING = {**EMBEDDINGS, **{f"bag-{name}": case for name, case in BAGS.items()}}
each = pytest.mark.parametrize("name", EVERYTHING)
each_linear = pytest.mark.parametrize("name", [n for n in EVERYTHING if "max" not in n])


class Call:
    """A recorded call, and the methods of its rule."""

    def __init__(self, name: str) -> None:
        module, arguments = copy.deepcopy(EVERYTHING[name])
        self.module: Any = extend(module)
        self.arguments = [*arguments]
        self.out = self.module(*self.arguments)
        self.rule: Any = derivatives_of(self.module)

    def __getattr__(self, method: str) -> Any:
        """Return a public method for the weight."""

        def call(*mat: Tensor, **keywords: Any) -> Any:
            name = () if method == "jac_t_mat_prod" else ("weight",)
            return getattr(self.rule, method)(*name, self.module, None, None, *mat, **keywords)

        return call

    def jacobian(self) -> Tensor:
        """Return the Jacobian ``[N, D_out, W, D]`` by autograd."""
        rows = [
            torch.autograd.grad(entry, self.module.weight, retain_graph=True)[0]
            for entry in self.out.flatten()
        ]
        return torch.stack(rows).reshape(N, -1, W, D)

    def cotangents(self, rows: Any = None) -> Tensor:
        """Return random columns ``[V, rows, *]``."""
        torch.manual_seed(1)
        like = subsample(self.out, subsampling=rows)
        return torch.randn(V, *like.shape, dtype=like.dtype)

    def one_hot(self) -> Tensor:
        """Return the rows that the weight is multiplied with, by an embedding of unit vectors."""
        with torch.no_grad():
            eye = torch.eye(W, dtype=torch.float64)
            if self.module.padding_idx is not None:
                eye[self.module.padding_idx] = 0
            arguments = self.arguments
            if isinstance(self.module, nn.Embedding):
                return nn.functional.embedding(arguments[0].long(), eye).reshape(N, -1, W)
            options = dict.fromkeys(("mode", "padding_idx", "include_last_offset"))
            options = {key: getattr(self.module, key) for key in options}
            x, offsets, scales = [*arguments, None, None][:3]
            return nn.functional.embedding_bag(
                x, eye, offsets, per_sample_weights=scales, **options
            ).unsqueeze(1)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@each
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_products(name: str, rows: Any) -> None:
    call = Call(name)
    J, s = subsample(call.jacobian(), subsampling=rows), call.cotangents(rows)
    each = einsum("vno,nowd->vnwd", s.flatten(2), J)
    close(call.param_mjp(s, sum_batch=False, subsampling=rows), each)
    close(call.param_mjp(s, subsampling=rows), each.sum(1))
    u = torch.randn(V, W, D, dtype=torch.float64)
    pushed = einsum("nowd,vwd->vno", J, u).reshape(s.shape)
    close(call.param_jac_mat_prod(u, subsampling=rows), pushed)


@each
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_reductions(name: str, rows: Any) -> None:
    call = Call(name)
    s = call.cotangents(rows)
    each = call.param_mjp(s, sum_batch=False, subsampling=rows)
    signs = torch.randn(s.shape[:2], dtype=torch.float64).sign()
    for weights in (None, signs):
        options = {"subsampling": rows, "weights": weights}
        for wanted in (reductions.NAMES, *({name} for name in reductions.NAMES)):
            found = call.param_mjp_reduced(s, wanted, **options)
            assert found.keys() == wanted
            for key, truth in reductions.of_products(each, wanted, weights).items():
                close(found[key], truth)


@each
def test_no_gradient_at_the_padding(name: str) -> None:
    call = Call(name)
    padding = call.module.padding_idx
    if padding is not None:
        assert call.param_mjp(call.cotangents())[:, padding].abs().max() == 0


@each_linear
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_kronecker_factors(name: str, rows: Any) -> None:
    """They are those of a linear layer on one-hot rows."""
    call = Call(name)
    x, s = subsample(call.one_hot(), subsampling=rows), call.cotangents(rows)
    num_n, num_t, _ = x.shape
    s = s.reshape(V, num_n, num_t, D)
    outer = einsum("nti,ntj->ij", x, x)
    sums = einsum("nti,nuj->ij", x, x)
    factors = {
        None: outer / num_n,
        "expand": outer / (num_n * num_t),
        "reduce": sums / (num_n * num_t**2),
    }
    mat = s.reshape(V, *subsample(call.out, subsampling=rows).shape)
    c = seen(call.module, rows)
    for approximation, expected in factors.items():
        (factor,) = call.rule.kron_inputs(c, "weight", approximation)
        close(factor, expected)
        expected = s.flatten(1, 2) if approximation == "expand" else s.sum(2)
        close(call.rule.kron_rows(c, "weight", mat, approximation), expected.unsqueeze(2))


def test_maximum_has_no_kronecker_factors() -> None:
    call = Call("bag-max")
    s, c = call.cotangents(), seen(call.module)
    for approximation in (None, "expand", "reduce"):
        assert call.rule.kron_inputs(c, "weight", approximation) == []
        rows = call.rule.kron_rows(c, "weight", s, approximation)
        close(rows.reshape(V, N, W, D), call.param_mjp(s, sum_batch=False))


@each
def test_gradient_of_the_input(name: str) -> None:
    """Integers have none; weights of the samples have."""
    call = Call(name)
    s = call.cotangents()
    if name == "bag-scaled-offsets":
        with pytest.raises(NotImplementedError, match="per_sample_weights"):
            call.jac_t_mat_prod(s)
        return
    if "scaled" not in name:
        assert call.jac_t_mat_prod(s) == (None,) * len(call.arguments)
        return
    call.arguments[2].requires_grad_()
    out = call.module(*call.arguments)
    first, second, pulled = call.jac_t_mat_prod(s)
    assert first is None and second is None
    for one, column in zip(pulled, s, strict=True):
        (expected,) = torch.autograd.grad(out, call.arguments[2], column, retain_graph=True)
        close(one, expected)


@each
def test_differentiable(name: str) -> None:
    """The products have the derivatives with respect to what arrives and the scales."""
    call = Call(name)
    s = call.cotangents().requires_grad_()
    wrt = [s]
    if "scaled" in name:
        wrt.append(call.arguments[2].requires_grad_())
    # y = x W for the rows x, differentiable with respect to the scales
    unit = torch.eye(W, dtype=torch.float64)
    if isinstance(call.module, nn.EmbeddingBag) and call.module.mode != "max":
        scales = call.arguments[2] if "scaled" in name else call.module.weight.new_ones(())
        x = call.one_hot().detach()
        if "scaled" in name and call.arguments[0].dim() == 2:
            keep = call.arguments[0] != call.module.padding_idx
            x = (unit[call.arguments[0]] * (scales * keep).unsqueeze(-1)).sum(1, keepdim=True)
        elif "scaled" in name:
            bags = torch.tensor([0, 0, 0, 0, 2, 2, 2, 3, 3, 3])
            x = torch.zeros(N, W, dtype=x.dtype)
            x = x.index_put((bags, call.arguments[0]), scales, accumulate=True).unsqueeze(1)
        each = einsum("vntd,ntw->vnwd", s.reshape(V, N, -1, D), x)
    else:
        each = einsum("vno,nowd->vnwd", s.flatten(2), call.jacobian())
    truths = reductions.of_products(each, reductions.NAMES)
    found = call.param_mjp_reduced(s, reductions.NAMES)
    for key, truth in truths.items():
        mine, weights = found[key], torch.randn_like(truth)
        close(mine, truth)
        expected = torch.autograd.grad(truth, wrt, weights, retain_graph=True)
        mine = torch.autograd.grad(mine, wrt, weights, retain_graph=True)
        for one, other in zip(mine, expected, strict=True):
            close(one, other)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("make", [embedding, lambda **options: bag("sum", **options)])
def test_options_that_are_refused(make: Any, option: dict[str, Any]) -> None:
    module = make(**option)
    model, lossfunc = extend(nn.Sequential(module, nn.Flatten())), extend(nn.MSELoss())
    out = model(TOKENS)
    with (
        pytest.raises(NotImplementedError, match=r"max_norm.*scale_grad_by_freq.*renorm"),
        backpack(extensions.BatchGrad()),
    ):
        lossfunc(out, torch.zeros_like(out)).backward()


def test_memory_does_not_grow_with_samples_times_vocabulary() -> None:
    vocabulary, samples = 10**6, 10**4  # individual gradients would need 80 GB
    module = nn.Embedding(vocabulary, 2)
    model, lossfunc = extend(nn.Sequential(module, nn.Flatten())), extend(nn.MSELoss())
    tokens = torch.randint(vocabulary, (samples, 3))
    exts = [
        extensions.SumGradSquared(),
        extensions.BatchL2Grad(),
        extensions.Variance(),
        extensions.DiagGGNMC(),
    ]
    out = model(tokens)
    with backpack(*exts):
        lossfunc(out, torch.zeros_like(out)).backward()
    total = module.weight.sum_grad_squared.sum()
    torch.testing.assert_close(module.weight.batch_l2.sum(), total)


# --------------------------------------------------------------------------------------
# Extensions on networks
# --------------------------------------------------------------------------------------


class Bag(nn.Module):
    """An embedding bag with fixed further arguments."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.bag, (_, *self.others) = copy.deepcopy(BAGS[name])

    def forward(self, x: Tensor) -> Tensor:
        """Look the bags up."""
        return self.bag(x, *self.others)


class Multiplication(nn.Module):
    """What a bag computes, in a form that autograd can differentiate twice."""

    def __init__(self, name: str, weight: nn.Parameter) -> None:
        super().__init__()
        self.jacobian, self.weight = Call(name).jacobian(), weight

    def forward(self, _: Tensor) -> Tensor:
        """Multiply the Jacobian with the weight."""
        return einsum("nowd,wd->no", self.jacobian, self.weight)


def network(name: str) -> tuple[nn.Module, Tensor]:
    """Return a nonlinear network on an embedding, and its input."""
    module, (x, *others) = copy.deepcopy(EVERYTHING[name])
    first = Bag(name.removeprefix("bag-")) if name.startswith("bag-") else module
    torch.manual_seed(2)
    with torch.no_grad():
        size = module(x, *others)[0].numel()
    last = nn.Linear(size, 3, dtype=torch.float64)
    return nn.Sequential(first, nn.Tanh(), nn.Flatten(), last), x


ORACLES: dict[str, tuple[Any, Any]] = {
    "grad_batch": (extensions.BatchGrad(), oracle.batch_grad),
    "batch_l2": (extensions.BatchL2Grad(), oracle.batch_l2),
    "sum_grad_squared": (extensions.SumGradSquared(), oracle.sum_grad_squared),
    "variance": (extensions.Variance(), oracle.variance),
    "diag_ggn_exact": (extensions.DiagGGNExact(), oracle.ggn_diag),
    "diag_ggn_exact_batch": (extensions.BatchDiagGGNExact(), oracle.batch_ggn_diag),
    "diag_h": (extensions.DiagHessian(), oracle.hessian_diag),
    "diag_h_batch": (extensions.BatchDiagHessian(), oracle.batch_hessian_diag),
}


@each
def test_extensions(name: str) -> None:
    model, x = network(name)
    lossfunc, y = nn.CrossEntropyLoss(), torch.tensor([0, 2, 1, 1])
    weight = next(model.parameters())
    twin = nn.Sequential(Multiplication(name, weight), *model[1:]) if "bag" in name else model
    torch.testing.assert_close(twin(x), model(x))
    expected = {key: function(twin, lossfunc, x, y) for key, (_, function) in ORACLES.items()}
    blocks = {
        "ggnmp": oracle.ggn_blocks(twin, lossfunc, x, y),
        "hmp": oracle.hessian_blocks(twin, lossfunc, x, y),
    }
    extend(model), extend(lossfunc)
    with backpack(*(e for e, _ in ORACLES.values()), extensions.GGNMP(), extensions.HMP()):
        lossfunc(model(x), y).backward()
    for i, p in enumerate(model.parameters()):
        for key, values in expected.items():
            close(getattr(p, key), values[i])
        for key, values in blocks.items():
            u = torch.randn(V, *p.shape, dtype=p.dtype)
            close(getattr(p, key)(u).flatten(1), u.flatten(1) @ values[i])


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_sparse_gradients(name: str) -> None:
    """They only change the layout of ``param.grad``."""
    model, x = network(name)
    expected = oracle.batch_grad(model, nn.CrossEntropyLoss(), x, torch.tensor([0, 2, 1, 1]))
    model[0].sparse = True
    lossfunc = extend(nn.CrossEntropyLoss())
    extend(model)
    with backpack(extensions.BatchGrad(), extensions.Variance()):
        lossfunc(model(x), torch.tensor([0, 2, 1, 1])).backward()
    weight = model[0].weight
    assert weight.grad.is_sparse
    close(weight.grad_batch, expected[0])


@pytest.mark.parametrize("ext", [extensions.KFLR(), extensions.KFRA()], ids=repr)
def test_kronecker_factors_in_the_order_of_the_axes(ext: Any) -> None:
    """For a linear network with a single position they are the block: ``[W, W] ⊗ [D, D]``."""
    module = embedding()
    model = nn.Sequential(module, nn.Linear(D, 2, dtype=torch.float64))
    lossfunc, x = nn.MSELoss(), torch.tensor([0, 3, 3, 1])
    y = torch.zeros(N, 2, dtype=torch.float64)
    blocks = oracle.ggn_blocks(model, lossfunc, x, y)
    extend(model), extend(lossfunc)
    with backpack(ext):
        lossfunc(model(x), y).backward()
    for p, block in zip(model.parameters(), blocks, strict=True):
        close(kfacs_to_mat(getattr(p, ext.savefield)), block)
    assert [f.shape for f in getattr(module.weight, ext.savefield)] == [(W, W), (D, D)]


def test_weight_of_another_vocabulary() -> None:
    """A program may give a module a weight of more rows, as to tie it to an output layer."""
    module, y = embedding(), torch.tensor([0, 2, 1, 1])
    model = nn.Sequential(module, nn.Flatten(), nn.LazyLinear(3, dtype=torch.float64))
    model(TOKENS)
    module.weight = nn.Parameter(torch.randn(W + 3, D, dtype=torch.float64))
    tokens, loss = TOKENS + 3, nn.CrossEntropyLoss()
    expected = {name: f(model, loss, tokens, y)[0] for name, (_, f) in ORACLES.items()}
    extend(model), extend(loss)
    with backpack(*(e for e, _ in ORACLES.values()), extensions.KFLR()):
        loss(model(tokens), y).backward()
    for name, value in expected.items():
        close(getattr(module.weight, name), value)
    assert [len(f) for f in module.weight.kflr] == [W + 3, D]


def test_weights_of_the_samples_from_a_module() -> None:
    """Further modules above ``per_sample_weights`` get their curvature, too."""

    class Attention(nn.Module):
        """A bag that weighs tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.score, self.bag = nn.Embedding(W, 1), nn.EmbeddingBag(W, D, mode="sum")
            self.squeeze, self.last = nn.Flatten(1), nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            """Sum the weighted tokens of a sample."""
            scores = self.squeeze(self.score(x))
            return self.last(self.bag(x, per_sample_weights=scores))

    torch.manual_seed(0)
    model, lossfunc = Attention().double(), nn.CrossEntropyLoss()
    y = torch.tensor([0, 2, 1, 1])
    expected = oracle.ggn_diag(model, lossfunc, TOKENS, y)
    blocks = oracle.ggn_blocks(model, lossfunc, TOKENS, y)
    extend(model), extend(lossfunc)
    with backpack(extensions.DiagGGNExact(), extensions.GGNMP()):
        lossfunc(model(TOKENS), y).backward()
    for p, diagonal, block in zip(model.parameters(), expected, blocks, strict=True):
        close(p.diag_ggn_exact, diagonal)
        u = torch.randn(V, *p.shape, dtype=p.dtype)
        close(p.ggnmp(u).flatten(1), u.flatten(1) @ block)


class Bags(nn.Module):
    """Classes of bags of tokens, and of further data."""

    def __init__(self, with_data: bool, **keywords: Any) -> None:
        super().__init__()
        self.with_data = with_data
        self.bag, self.data, self.last = bag("mean", **keywords), nn.Linear(2, D), nn.Linear(D, 3)

    def forward(self, tokens: Tensor, offsets: Tensor, x: Any) -> Tensor:
        """Classify the bags that offsets tell."""
        h = self.bag(tokens, offsets)
        return self.last((h + self.data(x) if self.with_data else h).tanh())


@pytest.mark.parametrize("converter", [False, True, "record"])
@pytest.mark.parametrize("with_data", [False, True])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_bags_are_samples(include_last_offset: bool, with_data: bool, converter: Any) -> None:
    """A model that is called with a flat list of tokens has not as many samples."""
    torch.manual_seed(0)
    end = [10] if include_last_offset else []
    offsets = torch.cat([OFFSETS, torch.tensor(end, dtype=torch.long)])
    model = Bags(with_data, include_last_offset=include_last_offset).double()
    x = torch.randn(N, 2, dtype=torch.float64) if with_data else None
    y, reference = torch.tensor([0, 2, 1, 1]), copy.deepcopy(model)
    model = extend(model, use_converter=converter)
    lossfunc = extend(nn.CrossEntropyLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # samples that meet, rows that are none
        with backpack(extensions.BatchGrad()):
            lossfunc(model(FLAT, offsets, x), y).backward()
    losses = nn.functional.cross_entropy(reference(FLAT, offsets, x), y, reduction="none")
    for n, loss in enumerate(losses):
        params = reference.parameters()
        expected = torch.autograd.grad(loss / N, [*params], retain_graph=True, allow_unused=True)
        for p, value in zip(model.parameters(), expected, strict=True):
            if value is not None:
                close(p.grad_batch[n], value)


@pytest.mark.parametrize("converter", [True, "record"])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_private_training_of_bags(is_mixed: bool, converter: Any) -> None:
    """Bags treat samples alone; what else reads the list of tokens may not."""

    class Mean(Bags):
        """May add the mean of all tokens."""

        def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
            """Classify the bags."""
            h = self.bag(tokens, offsets)
            return self.last(h + self.data(tokens).mean(0) if is_mixed else h)

    model = Mean(False)
    model.data = embedding()
    model = extend(model.double(), use_converter=converter)
    lossfunc = extend(nn.CrossEntropyLoss())
    optimizer = DPSGD(
        model.parameters(), 0.1, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=N
    )
    with backpack(*optimizer.extensions):
        lossfunc(model(FLAT, OFFSETS), torch.tensor([0, 2, 1, 1])).backward()
    if is_mixed:
        with pytest.raises(ValueError, match="data that has other rows"):
            optimizer.step()
    else:
        optimizer.step()

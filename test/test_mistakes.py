"""Common mistakes get a sign: an error or a warning that says what to do, and no wrong number."""

from __future__ import annotations

import copy
import gc
import re
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from backpack import backpack, disable, extend, extensions
from backpack.core.derivatives import register
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.engine import paths
from backpack.extensions import (
    GGNMP,
    HMP,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    SqrtGGNMC,
    Variance,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)
from backpack.linalg import GGN
from backpack.monitor import CSVWriter, Monitor, gradient_snr
from backpack.optim import DPSGD, KFAC, DiagGGN

N = 5


pytestmark = pytest.mark.usefixtures("double_precision")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 3), torch.randint(2, (N,))


def loss_of(model: nn.Module) -> Tensor:
    X, y = data()
    return extend(nn.CrossEntropyLoss())(extend(model)(X), y)


def run(model: nn.Module, *exts: BackpropExtension) -> nn.Module:
    loss = loss_of(model)
    with backpack(*exts):
        loss.backward()
    return model


def warnings_of(program: Callable[[], Any]) -> list[str]:
    """Run a program; return the texts of all its warnings (of users)."""
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
        gc.collect()
    told = [w for w in caught if issubclass(w.category, UserWarning)]
    assert all(w.filename == __file__ for w in told), told  # at a line of the program
    return [str(w.message) for w in told]


def assert_nothing_saved(model: nn.Module) -> None:
    assert not any(vars(p) for p in model.parameters())


# ------------------------------------------------------------------ extensions


class Typo(FirstOrderBackpropExtension):
    needs = ("indivdual",)


class TwoNeeds(FirstOrderBackpropExtension):
    needs = ("individual", "gradient")


class NoOrder(BackpropExtension):
    needs = ("individual",)


class Scale(nn.Module):
    """Multiplies each feature; its derivatives are registered wrongly below."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class NoMethod(Scale):
    pass


class WrongParameterShape(Scale):
    pass


class WrongInputShape(Scale):
    pass


@register(NoMethod)
class NoMethodDerivatives(BaseDerivatives):
    params = ("weight",)


@register(WrongParameterShape)
class WrongParameterShapeDerivatives(BaseDerivatives):
    params = ("weight",)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any
    ) -> Any:
        return mat * module.weight

    def _weight_jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Any, sum_batch: bool, subsampling: Any
    ) -> Any:
        return (mat * module.input0).sum(-1)


@register(WrongInputShape)
class WrongInputShapeDerivatives(WrongParameterShapeDerivatives):
    def _jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Any, subsampling: Any
    ) -> Any:
        return (mat * module.weight)[..., :1]

    def _weight_jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Any, sum_batch: bool, subsampling: Any
    ) -> Any:
        product = mat * module.input0
        return product.sum(1) if sum_batch else product


class Summed(FirstOrderModuleExtension):
    """Forgets that individual gradients are not summed."""

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        return (module.input0 * g_out[0]).sum(0)


class KeepsAxis(Summed):
    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        return (module.input0 * g_out[0]).sum(0, keepdim=True)


def with_rule(ext: BackpropExtension, rule: Any) -> BackpropExtension:
    ext.set_module_extension(Scale, rule)
    return ext


def around(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), module, nn.Linear(3, 2))


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a number as subsampling": (
        lambda: BatchGrad(subsampling=3),  # type: ignore[arg-type]
        TypeError,
        r"subsampling is a list of sample indices.*got 3.*\[3\]",
    ),
    "samples in the place of the savefield": (
        lambda: HMP([0, 1]),  # type: ignore[arg-type]
        TypeError,
        r"savefield is the name of an attribute, got \[0, 1\]",
    ),
    "the savefield of the gradient": (
        lambda: GGNMP(savefield="grad"),
        ValueError,
        "savefield: 'grad' is an attribute of all tensors",
    ),
    "two extensions with one savefield": (
        lambda: backpack(SqrtGGNMC(1), SqrtGGNMC(5)),
        ValueError,
        r"SqrtGGNMC.*SqrtGGNMC.*'sqrt_ggn_mc'.*overwrite",
    ),
    "two classes with one savefield": (
        lambda: backpack(BatchGrad(), Variance(), NoOrder("variance")),
        ValueError,
        r"Variance.*NoOrder.*'variance'",
    ),
    "one savefield, other samples": (
        lambda: backpack(BatchGrad(), BatchGrad(subsampling=[0])),
        ValueError,
        "'grad_batch'",
    ),
    "a typo in needs": (
        lambda: run(mlp(), Typo("e")),
        ValueError,
        r"Typo.*needs indivdual.* are batch_square, factored, gradient, gram, individual, product",
    ),
    "two needs without extract": (
        lambda: run(mlp(), TwoNeeds("e")),
        NotImplementedError,
        "TwoNeeds needs individual, gradient.*extract",
    ),
    "neither first nor second order": (
        lambda: run(mlp(), NoOrder("e")),
        NotImplementedError,
        "NoOrder.*FirstOrderBackpropExtension",
    ),
    "no method for a parameter": (
        lambda: run(around(NoMethod()), BatchGrad()),
        NotImplementedError,
        r"NoMethodDerivatives.*_weight_jac_t_mat_prod.*'1' \(NoMethod\)",
    ),
    "no method for a parameter, second order": (
        lambda: run(around(NoMethod()), DiagGGNExact()),
        NotImplementedError,
        r"NoMethodDerivatives.*_weight_jac_t_mat_prod.*'1' \(NoMethod\)",
    ),
    "derivatives with the wrong shape": (
        lambda: run(around(WrongParameterShape()), BatchGrad()),
        ValueError,
        r"_weight_jac_t_mat_prod.*'1' \(WrongParameterShape\).*\[1, 5, 3\].*\[1, 5\]",
    ),
    "derivatives with the wrong shape, norms": (
        lambda: run(around(WrongParameterShape()), BatchL2Grad(), Variance()),
        ValueError,
        r"_weight_jac_t_mat_prod.*\[1, 5, 3\].*\[1, 5\]",
    ),
    "derivatives with the wrong shape, second order": (
        lambda: run(around(WrongInputShape()), DiagGGNExact()),
        ValueError,
        r"_jac_t_mat_prod.*'1' \(WrongInputShape\).*\[2, 5, 3\].*\[2, 5, 1\]",
    ),
    "a rule with the wrong shape": (
        lambda: run(around(Scale()), with_rule(BatchGrad(), Summed(["weight"]))),
        ValueError,
        r"Summed\.weight.*BatchGrad.*\['N', 3\].*got \[3\]",
    ),
    "a rule with the wrong number of samples": (
        lambda: run(around(Scale()), with_rule(BatchGrad(), KeepsAxis(["weight"]))),
        ValueError,
        r"KeepsAxis\.weight.*\['N', 3\].*got \[1, 3\]",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str) -> None:
    program, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        program()


def test_wrong_shape_of_a_rule_saves_nothing() -> None:
    model = around(Scale())
    with pytest.raises(ValueError, match="Summed"):
        run(model, with_rule(BatchGrad(), Summed(["weight"])))
    assert_nothing_saved(model)


def test_equal_extensions_may_share_a_savefield() -> None:
    model = run(mlp(), BatchGrad(), BatchGrad())
    assert model[0].weight.grad_batch.shape == (N, 4, 3)


@pytest.mark.parametrize("indices", [range(2), (0, 1), torch.tensor([0, 1]), numpy.array([0, 1])])
def test_subsampling_may_be_any_sequence(indices: Any) -> None:
    model = run(mlp(), BatchGrad(subsampling=indices))
    assert model[0].weight.grad_batch.shape == (2, 4, 3)


MASK = [True, False, False, True, False]


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (torch.tensor(MASK), r"\[5\] and type torch.bool.*mask.nonzero\(\).flatten\(\)"),
        (numpy.array(MASK), r"type torch.bool.*mask.nonzero\(\).flatten\(\)"),
        (torch.tensor([0.0, 1.0]), r"\[2\] and type torch.float"),
        (torch.tensor([[0], [1]]), r"\[2, 1\] and type torch.int64"),
        (torch.tensor(1), r"shape \[\] "),
        ({0, 1}, r"\{0, 1\}"),
        ({0: 1}, r"\{0: 1\}"),
        ("01", "'01'"),
        (slice(0, 2), "slice"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_subsampling_that_is_no_list_of_indices(indices: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=f"subsampling is a list of sample indices.*{expected}"):
        BatchGrad(subsampling=indices)


def test_indices_of_a_mask() -> None:
    indices = torch.tensor(MASK).nonzero().flatten()
    model = mlp()
    X, y = data()
    for p, ext in ((0, BatchGrad()), (1, BatchGrad(subsampling=indices))):
        loss = extend(nn.CrossEntropyLoss())(extend(model)(X), y)
        with backpack(ext):
            loss.backward()
        if p == 0:
            whole = model[0].weight.grad_batch
    torch.testing.assert_close(model[0].weight.grad_batch, whole[[0, 3]])


def test_every_extension_is_checked_and_none_refused() -> None:
    exts = [getattr(extensions, name) for name in extensions.__all__ if name != "HBP"]
    with backpack(*[ext() for ext in exts]):
        pass


# ------------------------------------------------------------------ contexts


def test_context_without_with() -> None:
    def program() -> None:
        loss = loss_of(mlp())
        backpack(BatchGrad())
        loss.backward()

    (message,) = warnings_of(program)
    assert "BatchGrad" in message and "`with backpack(...)" in message


def test_context_that_was_refused_is_not_unused() -> None:
    def program() -> None:
        with pytest.raises(ValueError):
            backpack(BatchGrad)  # type: ignore[arg-type]

    assert warnings_of(program) == []


def test_used_contexts_are_silent() -> None:
    def program() -> None:
        with backpack(BatchGrad()):
            pass
        with backpack():
            loss_of(mlp()).backward()
        backpack()  # activates nothing

    assert warnings_of(program) == []


# ------------------------------------------------------------------ factors of the loss


class WithLoss(nn.Module):
    """Returns its loss times a factor, as models of transformers do."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(3, 4), nn.Linear(4, 2), change

    def forward(self, x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        z = self.second(torch.tanh(self.first(x)))
        return self.change(nn.functional.cross_entropy(z, y, reduction="sum"), number)


FACTORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided by a tensor": lambda loss, number: loss / number,
    "divided by a constant": lambda loss, number: loss / torch.tensor(4.0),
    "divided by an integer": lambda loss, number: loss / torch.tensor(4),
    "times a tensor": lambda loss, number: loss * (1 / number),
    "a tensor times": lambda loss, number: torch.mul(1 / number, loss),
    "several factors": lambda loss, number: 2.0 * (loss / number) / 2,
    "sum of multiples": lambda loss, number: loss / number / 2 + loss / 8,
    "mean of one": lambda loss, number: (loss / number).mean(),
}
SOME = ["BatchGrad", "Variance", "DiagGGNExact", "DiagHessian", "KFLR", "KFRA"]


@pytest.mark.parametrize("converter", [True, "record"])
@pytest.mark.parametrize("name", FACTORS)
def test_factor_of_the_loss_that_is_a_tensor(name: str, converter: Any) -> None:
    X, y = data()
    exts = [getattr(extensions, ext)() for ext in SOME]
    plain = WithLoss(lambda loss, number: loss)
    model = extend(WithLoss(FACTORS[name]), use_converter=converter)
    model.load_state_dict(plain.state_dict())
    outer = extend(plain, use_converter=converter)(X, y, torch.tensor(4.0)) / 4
    inner = model(X, y, torch.tensor(4.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in (outer, inner):
            with backpack(*exts):
                loss.backward()
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        for ext in exts:
            value, truth = (getattr(q, ext.savefield) for q in (p, expected))
            torch.testing.assert_close(value, truth)
        torch.testing.assert_close(p.grad, expected.grad)
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@pytest.mark.parametrize("scale", [torch.tensor(4.0), torch.tensor(4)], ids=["float", "integer"])
def test_factor_of_the_loss_outside_of_the_model(scale: Tensor) -> None:
    model, (X, y) = extend(mlp()), data()
    results = []
    for change in (
        lambda loss: loss / 4,
        lambda loss: loss / scale,
        lambda loss: loss * (1 / scale),
    ):
        with backpack(BatchGrad(), DiagGGNExact()), warnings.catch_warnings():
            warnings.simplefilter("error")
            change(extend(nn.CrossEntropyLoss())(model(X), y)).backward()
        results.append([(p.grad_batch, p.diag_ggn_exact) for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@pytest.mark.parametrize(
    "total",
    [
        lambda losses, w: torch.dot(w, losses),
        lambda losses, w: w.unsqueeze(0) @ losses,
        lambda losses, w: torch.einsum("i,ji->", losses, w.unsqueeze(0)),
        lambda losses, w: torch.where(w > 1, 3 * losses, losses / 2),
        lambda losses, w: 2 - (2 - w * losses),
        lambda losses, w: (w * losses).cumsum(0)[1:],
        lambda losses, w: (w * losses)[torch.tensor([1, 0])].nansum(),
    ],
)
def test_sums_of_multiples_that_are_written_in_other_ways(total: Callable[..., Tensor]) -> None:
    """They are no modified losses."""
    model, (X, y) = extend(mlp()), data()
    lossfunc, weights, results = extend(nn.CrossEntropyLoss()), torch.tensor([0.5, 3.0]), []
    for change in (torch.mul, total):
        losses = torch.stack([lossfunc(model(X), y), lossfunc(model(2 * X), y)])
        with backpack(DiagGGNExact(), BatchGrad()), warnings.catch_warnings():
            warnings.simplefilter("error")
            change(losses, weights).sum().backward()
        results.append([(p.grad_batch, p.diag_ggn_exact) for p in model.parameters()])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("converter", [True, "record"])
def test_loss_that_a_model_modifies_warns(converter: Any) -> None:
    model, (X, y) = (
        extend(WithLoss(lambda loss, n: (loss / n).log()), use_converter=converter),
        data(),
    )
    loss = model(X, y, torch.tensor(4.0))
    with backpack(DiagGGNExact()), pytest.warns(UserWarning, match=r"modified after.*Log"):
        loss.backward()


# ------------------------------------------------------------------ transformers' own losses


def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8, **dict.fromkeys(NO_DROPOUT, 0)
    )
    return extend(transformers.GPT2LMHeadModel(config), use_converter="record")


NO_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def sentences() -> list[dict[str, Tensor]]:
    tokens = [torch.randint(11, (5,)) for _ in range(4)]
    return [{"input_ids": x, "labels": x} for x in tokens]


def check_sentences(model: nn.Module, batch: dict[str, Tensor], number: Tensor) -> None:
    """Compare individual gradients with those of the sentences one by one."""
    for n in range(len(batch["input_ids"])):
        one = {key: x[n : n + 1] for key, x in batch.items()}
        loss = model(**one, num_items_in_batch=number).loss
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for p, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad_batch[n], grad, rtol=1e-4, atol=1e-6)


def test_loss_of_transformers_divided_by_the_number_of_tokens() -> None:
    model, number = language_model(), torch.tensor(16)
    batch = {key: torch.stack([s[key] for s in sentences()]) for key in ("input_ids", "labels")}
    exts = [BatchGrad(), DiagGGNExact(), extensions.KFAC()]
    results = []
    for loss in (
        model(**batch, num_items_in_batch=number).loss,
        model(**batch, num_items_in_batch=1).loss / 16,
    ):
        with backpack(*exts):
            loss.backward()
        results.append([p.diag_ggn_exact for p in model.parameters()])
    check_sentences(model, batch, number)
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.slow
def test_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    torch.set_default_dtype(torch.float32)  # what Trainer expects
    model = language_model()
    from transformers import Trainer, TrainingArguments

    steps = []

    class Quantities(Trainer):
        def training_step(
            self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None
        ) -> Tensor:
            with backpack(BatchGrad(), DiagGGNExact()):
                loss = super().training_step(model, inputs, num_items_in_batch)
            assert isinstance(num_items_in_batch, Tensor)
            check_sentences(model, inputs, num_items_in_batch)
            assert all((p.diag_ggn_exact >= 0).all() for p in model.parameters())
            steps.append(loss)
            return loss

    options: Any = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=2, **options
    )
    Quantities(model=model, args=arguments, train_dataset=sentences()).train()
    assert len(steps) == 2


# ------------------------------------------------------------------ mixed samples


def convolutions(norm: Callable[[int], nn.Module], blocks: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(blocks):
        layers += [nn.Conv2d(1 if i == 0 else 2, 2, 3, padding=1), norm(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 2))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "with parameters": nn.BatchNorm2d,
    "without parameters": lambda c: nn.BatchNorm2d(c, affine=False),
    "frozen": lambda c: frozen(nn.BatchNorm2d(c)),
    "without statistics": lambda c: nn.BatchNorm2d(c, track_running_stats=False).eval(),
}
FIRST_ORDER = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"]


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 1, 4, 4), torch.randint(2, (N,))


def backward_of_images(model: nn.Module, *exts: BackpropExtension) -> None:
    X, y = images()
    with backpack(*exts):
        extend(nn.CrossEntropyLoss())(extend(model)(X), y).backward()


@pytest.mark.parametrize("ext", FIRST_ORDER)
@pytest.mark.parametrize("name", NORMS)
def test_batch_normalisation_warns(name: str, ext: str) -> None:
    model = convolutions(NORMS[name])
    (message,) = warnings_of(lambda: backward_of_images(model, getattr(extensions, ext)()))
    assert "mixes the samples" in message and "'1' (BatchNorm2d)" in message
    assert "such as GroupNorm" in message and "use_converter" not in message


def test_one_warning_for_all_modules_that_mix_samples() -> None:
    model = convolutions(nn.BatchNorm2d, blocks=12)
    exts = [BatchGrad(), Variance()]
    (message,) = warnings_of(lambda: backward_of_images(model, *exts))
    assert "'1' (BatchNorm2d), '4' (BatchNorm2d), " in message and "and 4 others" in message


def test_batch_normalisation_with_running_statistics_is_silent() -> None:
    model = convolutions(nn.BatchNorm2d).eval()
    assert warnings_of(lambda: backward_of_images(model, BatchGrad())) == []


def test_batch_normalisation_is_silent_for_curvature_and_plain_gradients() -> None:
    model = convolutions(NORMS["frozen"])
    assert warnings_of(lambda: backward_of_images(model, DiagGGNExact())) == []
    assert warnings_of(lambda: backward_of_images(model)) == []


def test_warning_that_is_an_error_saves_nothing() -> None:
    model = convolutions(NORMS["frozen"])
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="mixes"):
        warnings.simplefilter("error")
        backward_of_images(model, BatchGrad())
    assert_nothing_saved(model)


PRIVATE: Any = {"lr": 0.1, "max_grad_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": N}


@pytest.mark.parametrize("name", NORMS)
def test_dp_sgd_refuses_mixed_samples(name: str) -> None:
    model = convolutions(NORMS[name])
    optimiser = DPSGD([p for p in model.parameters() if p.requires_grad], **PRIVATE)
    before = [p.clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="mixes the samples"):
        backward_of_images(model, *optimiser.extensions)
    with pytest.raises(ValueError, match=r"DPSGD.*'1' \(BatchNorm2d\).*not be private"):
        optimiser.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimiser.zero_grad()
    if name != "without statistics":
        backward_of_images(model.eval(), *optimiser.extensions)
        optimiser.step()


# ------------------------------------------------------------------ accumulation


def micro_batches(model: nn.Module, count: int, set_to_none: bool = True) -> None:
    extend(model)
    model.zero_grad(set_to_none)
    X, y = torch.randn(6, 3), torch.randint(2, (6,))
    for x, t in zip(X.chunk(count), y.chunk(count), strict=True):
        loss = extend(nn.CrossEntropyLoss())(model(x), t)
        with backpack(BatchL2Grad()):
            loss.backward()


def test_signal_to_noise_ratio_over_accumulated_gradients(tmp_path: Path) -> None:
    model = mlp()
    micro_batches(model, 3)
    with pytest.raises(RuntimeError, match=r"gradient_snr.*accumulated.*micro-batches"):
        gradient_snr(list(model.parameters()))
    monitor = Monitor(model, [gradient_snr], CSVWriter(tmp_path / "log.csv"))
    with monitor, pytest.raises(RuntimeError, match="accumulated"):
        monitor.step()


def _accumulates(model: nn.Module) -> None:
    loss_of(model).backward()


def _accumulates_with_graph(model: nn.Module) -> None:
    warnings.simplefilter("ignore")  # of autograd, about the cycle
    loss_of(model).backward(create_graph=True)


def _starts_again(model: nn.Module) -> None:
    model.zero_grad()
    loss_of(model).backward()


def _clips(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@pytest.mark.parametrize("change", [_accumulates, _accumulates_with_graph, _starts_again, _clips])
def test_signal_to_noise_ratio_of_a_gradient_that_changes_later(change: Any) -> None:
    """Such as if the first micro-batch alone runs in a context."""
    model = mlp()
    micro_batches(model, 1)
    before = gradient_snr(list(model.parameters()))
    with warnings.catch_warnings():
        change(model)
    with pytest.raises(RuntimeError, match=r"gradient_snr.*accumulated.*or was changed since"):
        gradient_snr(list(model.parameters()))
    micro_batches(model, 1)
    loss_of(copy.deepcopy(model)).backward()  # of others
    torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=0.1).step()
    assert gradient_snr(list(model.parameters())) > 0 and before > 0
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_signal_to_noise_ratio_of_one_backward_pass(set_to_none: bool) -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(3, 2))
    micro_batches(model, 2)
    micro_batches(model, 1, set_to_none)
    assert 0 < gradient_snr(list(model.parameters())) < 1


# ------------------------------------------------------------------ several processes


def in_two_processes(program: Callable[[int], None], tmp_path: Path) -> None:
    """Run a program on two processes that know of each other."""
    context = torch.multiprocessing.spawn(
        _in_group, (program, str(tmp_path / "store")), nprocs=2, join=False
    )
    deadline = time.monotonic() + 100
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the processes hang")


def _in_group(rank: int, program: Callable[[int], None], store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        program(rank)
    finally:
        distributed.destroy_process_group()


def _optimisers_and_operators(rank: int) -> None:
    model, (X, y) = extend(mlp()), (torch.randn(N, 3), torch.randint(2, (N,)))
    lossfunc = extend(nn.CrossEntropyLoss())
    before = [p.detach().clone() for p in model.parameters()]
    for make in (partial(DPSGD, **PRIVATE), partial(DiagGGN, lr=0.1), partial(KFAC, lr=0.1)):
        optimiser = make(model.parameters())
        with backpack(*optimiser.extensions):
            lossfunc(model(X), y).backward()
        with pytest.raises(NotImplementedError, match=r"several processes.*\(2 of"):
            optimiser.step()
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(NotImplementedError, match="several processes"):
        GGN(model, lossfunc, [(X, y)])


@pytest.mark.slow
def test_what_several_processes_cannot_do_yet(tmp_path: Path) -> None:
    in_two_processes(_optimisers_and_operators, tmp_path)


# ------------------------------------------------------------------ what is not extended


def step(model: nn.Module, lossfunc: Any, *exts: BackpropExtension, inside: bool = False) -> None:
    """One backward pass in a context, with the forward pass before or inside."""
    X, y = data()
    if inside:
        with backpack(*exts):
            lossfunc(model(X), y).backward()
    else:
        loss = lossfunc(model(X), y)
        with backpack(*exts):
            loss.backward()


def forward_before_extend(lossfunc: Any, *exts: BackpropExtension) -> None:
    model, (X, y) = mlp(), data()
    output = model(X)
    extend(model)
    with backpack(*exts):
        lossfunc(output, y).backward()


ORDERS = {"first": [BatchGrad], "second": [DiagGGNExact], "both": [Variance, extensions.KFAC]}


def forward_before_another(*exts: BackpropExtension) -> Tensor:
    """A forward pass before extend(), and one behind it that is not used."""
    model, (X, y) = mlp(), data()
    before = model(X)
    lossfunc = extend(nn.CrossEntropyLoss())
    kept = lossfunc(extend(model)(X), y)
    with backpack(*exts):
        lossfunc(before, y).backward()
    return kept


class OtherMethod(nn.Module):
    """Reads the parameters of a layer, whose ``forward`` does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer.weight)


class OwnFlatten(nn.Flatten):
    """Other tests make extensions with a rule for the class of torch, which takes part then."""


FORGOTTEN: dict[str, tuple[Callable[..., Any], str]] = {
    "everything": (
        lambda *exts: step(mlp(), nn.CrossEntropyLoss(), *exts),
        "reached no extended module.*before the forward pass",
    ),
    "everything, forward inside": (
        lambda *exts: step(mlp(), nn.functional.cross_entropy, *exts, inside=True),
        "reached no extended module",
    ),
    "forward before extend": (
        lambda *exts: forward_before_extend(nn.functional.cross_entropy, *exts),
        "reached no extended module.*before the forward pass",
    ),
    "the model": (
        lambda *exts: step(mlp(), extend(nn.CrossEntropyLoss()), *exts),
        r"no module that has parameters was recorded, only CrossEntropyLoss\..*Call extend",
    ),
    "the model, forward inside": (
        lambda *exts: step(mlp(), extend(nn.CrossEntropyLoss()), *exts, inside=True),
        "no module that has parameters was recorded",
    ),
    "forward before extend, but other forward passes are kept": (
        lambda *exts: forward_before_another(*exts),
        "no module that has parameters was recorded",
    ),
    "forward before extend, but loss": (
        lambda *exts: forward_before_extend(extend(nn.CrossEntropyLoss()), *exts),
        "no module that has parameters was recorded",
    ),
    "functions of parameters": (
        lambda *exts: step(extend(OtherMethod()), nn.functional.cross_entropy, *exts),
        "reached no extended module.*use_converter=True",
    ),
    "all but what reshapes": (
        lambda *exts: step(
            nn.Sequential(mlp(), extend(OwnFlatten())), nn.functional.cross_entropy, *exts
        ),
        "no module that has parameters was recorded, only OwnFlatten",
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_is_not_extended(name: str, order: str) -> None:
    program, expected = FORGOTTEN[name]
    (message,) = warnings_of(lambda: program(*[ext() for ext in ORDERS[order]]))
    assert re.search(expected, message)
    assert all(ext.__name__ in message for ext in ORDERS[order])


@pytest.mark.parametrize("alive", ["another model", "the model", "an earlier step", "a kept graph"])
def test_what_is_not_extended_while_something_else_is_recorded(alive: str) -> None:
    """First-order contexts notice it, whatever else a backward pass could have come to."""
    (X, y), model, kept = data(), mlp(), []
    output = model(X)
    if alive in ("an earlier step", "a kept graph"):
        teacher = extend(mlp())
        for _ in range(2):
            kept.append(nn.functional.cross_entropy(teacher(X), y))
            with backpack(BatchGrad(), retain_graph=alive == "a kept graph"):
                kept[-1].backward(retain_graph=True)
    else:
        kept.append(extend(model if alive == "the model" else mlp())(X))

    def program() -> None:
        loss = nn.functional.cross_entropy(output, y)
        with backpack(BatchGrad()):
            loss.backward()

    (message,) = warnings_of(program)
    assert "reached no extended module" in message and "BatchGrad" in message


def test_what_is_not_extended_is_noticed_where_others_are_used() -> None:
    """The student is forgotten, the teacher (whose call is the last one) is not."""
    (X, y), student, teacher = data(), mlp(), extend(mlp())

    def program() -> None:
        for step in range(4):
            losses = [nn.functional.cross_entropy(model(X), y) for model in (student, teacher)]
            for loss in losses if step else losses[1:]:
                with backpack(BatchGrad()):
                    loss.backward()

    assert any("reached no extended module" in message for message in warnings_of(program))


@pytest.mark.parametrize("child", [None, nn.Identity()], ids=["leaf", "container"])
@pytest.mark.parametrize("ext", [BatchGrad(), DiagGGNExact()], ids=repr)
def test_parameters_of_a_module_that_is_never_called(ext: Any, child: nn.Module | None) -> None:
    """Its parent reads them: they have no quantity, which is told."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.holder, self.layer = nn.Module(), nn.Linear(3, 2)
            self.holder.child, self.holder.factor = child, nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.holder.factor)

    model, lossfunc = extend(Reads()), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(N, 3)), torch.rand(N, 2))
    with pytest.warns(UserWarning, match=r"a parameter of shape \[3\] ") as caught, backpack(ext):
        loss.backward()
    assert len(caught) == 1
    assert [hasattr(p, ext.savefield) for p in model.parameters()] == [False, True, True]


def test_inner_context_that_silences_the_outer_one() -> None:
    def program() -> None:
        loss = loss_of(mlp())
        with backpack(Variance()), backpack(BatchGrad()):
            loss.backward()

    (message,) = warnings_of(program)
    assert "backpack(Variance) have not run" in message and "innermost" in message


def _plain_inside() -> None:
    loss = loss_of(mlp())
    with backpack(BatchGrad()), backpack():
        loss.backward()


def _inner_has_all() -> None:
    loss = loss_of(mlp())
    with backpack(BatchGrad()), backpack(Variance(), BatchGrad()):
        loss.backward()


def _both_levels() -> None:
    model = mlp()
    with backpack(BatchGrad()):
        with backpack(DiagGGNExact()):
            loss_of(model).backward()
        loss_of(model).backward()


def _no_backward() -> None:
    model, (X, _) = extend(mlp()), data()
    with backpack(BatchGrad()):
        model(X)
        with torch.no_grad():
            model(X)


def _something_else_as_well() -> None:
    loss, other = loss_of(mlp()), nn.Linear(3, 1)
    with backpack(BatchGrad()):
        other(torch.rand(2, 3)).sum().backward()
        loss.backward()


def _no_parameters() -> None:
    with backpack(BatchGrad()):
        torch.rand(3, requires_grad=True).sum().backward()


def _gradient_of_an_input() -> None:
    model, (X, y) = extend(mlp().requires_grad_(False)), data()
    with backpack(BatchGrad(), DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(model(X.requires_grad_()), y).backward()


def _last_layer_alone() -> None:
    model, (X, y) = mlp(), data()
    extend(model[2])
    with backpack(BatchGrad(), DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()


def _loss_not_extended() -> None:
    model, (X, y) = extend(mlp()), data()
    with backpack(BatchGrad()):
        nn.functional.cross_entropy(model(X), y).backward()


def _disabled() -> None:
    model, (X, y) = extend(mlp()), data()
    with backpack(BatchGrad()), disable():
        nn.functional.cross_entropy(model(X), y).backward()


def _error_in_the_context() -> None:
    with pytest.raises(RuntimeError, match="stop"), backpack(BatchGrad()):
        nn.Linear(3, 1)(torch.rand(2, 3)).sum().backward()
        raise RuntimeError("stop")


def _rule_of_a_loss() -> None:
    class Note(FirstOrderModuleExtension):
        pass

    ext = FirstOrderBackpropExtension("note", {nn.CrossEntropyLoss: Note()})
    step(mlp(), extend(nn.CrossEntropyLoss()), ext)


LEGITIMATE = [
    _plain_inside,
    _inner_has_all,
    _both_levels,
    _no_backward,
    _something_else_as_well,
    _no_parameters,
    _gradient_of_an_input,
    _last_layer_alone,
    _loss_not_extended,
    _disabled,
    _error_in_the_context,
    _rule_of_a_loss,
]


@pytest.mark.parametrize("program", LEGITIMATE)
def test_legitimate_contexts_are_silent(program: Callable[[], None]) -> None:
    assert warnings_of(program) == []


# ------------------------------------------------------------------ advice


class Positions(nn.Module):
    """Returns a prediction for each position, ``[N, T, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("converter", [True, "record", False])
def test_function_between_model_and_loss(converter: Any) -> None:
    model = extend(Positions(), use_converter=converter)
    # the graph does not tell what is added
    scores = torch.relu(model(torch.randn(N, 4, 3)).transpose(1, 2) + 1)
    loss = extend(nn.CrossEntropyLoss())(scores, torch.randint(2, (N, 4)))
    with pytest.raises(ValueError, match="TransposeBackward0") as caught, backpack(DiagGGNExact()):
        loss.backward()
    is_converted = "outside of the model whose functions" in str(caught.value)
    assert is_converted == bool(converter)
    assert ("use extend(model, use_converter=True)" in str(caught.value)) == (not converter)


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("converter", [True, "record"])
def test_second_order_behind_distributed_data_parallel(
    one_process: None, converter: Any, options: dict[str, bool]
) -> None:
    X, y = torch.randn(N, 3), torch.randint(2, (N,))
    model = extend(Positions(), use_converter=converter)
    results = []
    for wrapped in (model, nn.parallel.DistributedDataParallel(model, **options)):
        loss = extend(nn.CrossEntropyLoss())(wrapped(X), y)
        with backpack(BatchGrad(), DiagGGNExact()):
            loss.backward()
        results.append([(p.grad_batch, p.diag_ggn_exact) for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1])


class Counted(nn.Module):
    """Divides by a number of all processes, as a layer (whose rule nobody knows) or as a loss."""

    reduction = "mean"

    def __init__(self, counts: list[Tensor]) -> None:
        super().__init__()
        self.__dict__["count"] = counts.append

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        n = torch.ones(())
        distributed.all_reduce(n)
        self.count(n)
        return z / n if y is None else F.cross_entropy(z, y) / n


@pytest.mark.parametrize("is_loss", [True, False])
def test_operations_of_several_processes_are_not_repeated(one_process: None, is_loss: bool) -> None:
    """By one alone, as where shapes differ: the others would wait, or take it for another one."""
    counts: list[Tensor] = []
    layers = [nn.Linear(3, 4), nn.Identity() if is_loss else Counted(counts)]
    model, loss = extend(nn.Sequential(*layers)), Counted(counts) if is_loss else nn.MSELoss()
    y = torch.arange(N) if is_loss else torch.rand(N, 4)
    with backpack(BatchGrad()):
        extend(loss)(model(torch.rand(N, 3)), y % 4).backward()
    assert len(counts) == 1


# ------------------------------------------------------------------ functions between modules


class Between(nn.Module):
    """A function, and perhaps a module, between two layers."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor] = lambda z: z,
        middle: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.middle, self.function = middle, function

    def forward(self, x: Tensor) -> Tensor:
        z = self.function(self.first(x))
        return self.second(z if self.middle is None else self.middle(z))


def sequences(model: nn.Module, T: int, *exts: BackpropExtension) -> Tensor:
    """One step on ``[N, T, 3]``, for T = 0 on ``[N, 3]``, with a loss of our own."""
    X = torch.randn(N, T, 3) if T else torch.randn(N, 3)
    loss = extend(model)(X).square().sum()
    with backpack(*exts):
        loss.backward()
    return loss


def per_sample_softmax(z: Tensor) -> Tensor:
    scores = torch.einsum("nth,nsh->nts", z, z).softmax(-1)
    return (scores @ z).relu() + z


MIXING: dict[str, tuple[Callable[[Tensor], Tensor], int, str]] = {
    "centred": (lambda z: z - z.mean(0), 0, "MeanBackward1"),
    "standardised": (lambda z: (z - z.mean(0)) / z.std(0), 0, "StdBackward0"),
    "softmax over the batch": (lambda z: z.softmax(0), 0, "SoftmaxBackward0"),
    "norms over the batch": (lambda z: z.renorm(2, 1, 0.1), 0, "RenormBackward0"),
    "sums": (lambda z: z.cumsum(0), 0, "CumsumBackward0"),
    "another sample": (lambda z: z + z.roll(1, 0), 0, "RollBackward0"),
    "two samples swapped": (lambda z: z[[0, 2, 1, 3, 4]], 0, "IndexBackward0"),
    "similarities": (lambda z: (z @ z.T).softmax(-1) @ z, 0, "SoftmaxBackward0"),
    "batch norm": (lambda z: nn.functional.batch_norm(z, None, None, None, None, True), 0, "Norm"),
    "transposed, as many positions": (lambda z: z.transpose(0, 1), N, "TransposeBackward0"),
    "attention over the batch": (
        lambda z: per_sample_softmax(z.transpose(0, 1)).transpose(0, 1),
        4,
        "SoftmaxBackward0",
    ),
}
APART: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "elementwise": (lambda z: z.relu() * 2 + z.sigmoid() ** 2, 0),
    "over features": (lambda z: z.softmax(-1) - z.mean(-1, keepdim=True), 0),
    "norms of samples": (lambda z: z.renorm(2, 0, 0.1), 0),
    "over positions": (lambda z: z - z.mean(1, keepdim=True), N),
    "attention": (per_sample_softmax, N),
    "heads": (
        lambda z: (
            per_sample_softmax(z.view(N, 6, 2, 2).transpose(1, 2).flatten(0, 1))
            .view(N, 2, 6, 2)
            .transpose(1, 2)
            .reshape(N, 6, 4)
        ),
        6,
    ),
    "there and back": (lambda z: z.transpose(0, 1).tanh().transpose(0, 1), N),
    "split and joined": (lambda z: torch.cat(z.chunk(2, -1)[::-1], -1), 3),
    "one by one": (lambda z: torch.stack([s.exp() for s in z.unbind(0)]), 3),
    "convolution": (
        lambda z: nn.functional.conv1d(z.transpose(1, 2), torch.ones(4, 4, 1)).transpose(1, 2),
        N,
    ),
    "root at zero": (lambda z: (z - z.detach()).abs().sqrt() + z, 0),
    "in place": (lambda z: z.clone().add_(1).mul_(2), 0),
    "own function": (lambda z: Doubled.apply(z), 0),
    "constant": (lambda z: z * 0 + 1, 0),
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


@pytest.mark.parametrize("ext", FIRST_ORDER)
@pytest.mark.parametrize("name", MIXING)
def test_function_that_mixes_samples(name: str, ext: str) -> None:
    function, T, node = MIXING[name]
    model = Between(function)
    (message,) = warnings_of(lambda: sequences(model, T, getattr(extensions, ext)()))
    assert "mixes the samples" in message and "functions before 'second' (Linear)" in message
    assert node in message
    assert "use_converter=True" in message and "GroupNorm" not in message


def centred_unseen(z: Tensor) -> Tensor:
    return torch.func.vmap(lambda column: column - column.mean(), 1, 1)(z)


def mean_unseen(z: Tensor) -> Tensor:
    return z.detach() + torch.func.vmap(torch.mean, 1)(z)


@pytest.mark.parametrize("function", [centred_unseen, mean_unseen])
def test_mixing_that_a_recorded_model_does_not_show(function: Any) -> None:
    model = extend(Between(function), use_converter="record")
    (message,) = warnings_of(lambda: sequences(model, 0, BatchGrad()))
    assert "mixes the samples" in message and "MeanBackward1" in message


class AdaptedWeights(nn.Module):
    """A step of gradient descent on the batch comes before the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        inner = F.linear(x, weight, bias).square().mean()
        (gradient,) = torch.autograd.grad(inner, weight, create_graph=True)
        return F.linear(x, weight - 0.1 * gradient, bias)


def test_mixing_in_weights_that_are_computed_of_samples() -> None:
    model = extend(AdaptedWeights(), use_converter="record")
    (message,) = warnings_of(lambda: sequences(model, 0, BatchGrad()))
    assert "mixes the samples" in message and "MmBackward0" in message


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.5).eval(), nn.Flatten(), nn.ReLU()])
def test_function_that_mixes_samples_before_a_module_without_parameters(module: nn.Module) -> None:
    model = Between(MIXING["centred"][0], module)
    (message,) = warnings_of(lambda: sequences(model, 0, BatchGrad()))
    assert "functions before 'middle'" in message


@pytest.mark.parametrize("name", APART)
def test_function_that_leaves_samples_apart(name: str) -> None:
    function, T = APART[name]
    model = Between(function)
    assert warnings_of(lambda: sequences(model, T, BatchGrad(), Variance())) == []
    if name not in ("constant", "root at zero"):
        torch.testing.assert_close(model.first.weight.grad_batch.sum(0), model.first.weight.grad)


@pytest.mark.parametrize("name", MIXING)
def test_mixing_between_model_and_loss(name: str) -> None:
    function, T, node = MIXING[name]
    model, y = extend(Between()), torch.randint(2, (N, T) if T else (N,))

    def program() -> None:
        z = function(model(torch.randn(N, T, 3) if T else torch.randn(N, 3)))
        loss = extend(nn.CrossEntropyLoss())(z.flatten(0, -2), y.flatten())
        with backpack(BatchGrad()):
            loss.backward()

    moves = name in ("two samples swapped", "transposed, as many positions")
    found = [m for m in warnings_of(program) if "mixes the samples" in m]
    assert bool(found) != moves  # a loss adds its terms up, in whatever order
    assert all("functions before CrossEntropyLoss" in m and node in m for m in found)


class Scaled(nn.Module):
    """A container with a parameter of its own, such as a temperature."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(3, 4), function
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x)) * self.scale.exp()


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
def test_functions_in_a_container_with_parameters(is_last: bool, mixes: bool) -> None:
    """It has a result that nobody knows how to compute; functions inside are looked at as well."""
    scaled = Scaled(lambda z: z @ z.T if mixes else z @ torch.ones(4, N))
    model = extend(scaled if is_last else nn.Sequential(scaled, nn.Linear(N, 2)))

    def program() -> None:
        loss = extend(nn.CrossEntropyLoss())(model(torch.randn(N, 3)), torch.randint(2, (N,)))
        with backpack(BatchGrad()):
            loss.backward()

    messages = warnings_of(program)
    assert any("no rule for the parameters scale" in message for message in messages)
    reader = "CrossEntropyLoss" if is_last else "'1' (Linear)"
    found = [message for message in messages if "mixes the samples" in message]
    assert len(found) == mixes and all(f"functions before {reader}" in m for m in found)


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("has_loss", [True, False], ids=["loss inside", "function"])
def test_a_container_in_front_of_a_function(has_loss: bool, mixes: bool) -> None:
    """A loss that is not extended is followed up to the layers inside, in both orders."""
    y = torch.randint(N, (N,))

    def function(z: Tensor) -> Tensor:
        z = z @ z.T if mixes else z @ torch.ones(4, N)
        return F.cross_entropy(z, y) if has_loss else z

    model = Scaled(function)
    model.scale.requires_grad_(False)  # nothing else is told of it
    extend(model)

    def program() -> None:
        out = model(torch.randn(N, 3))
        with backpack(BatchGrad()):
            (out if has_loss else F.cross_entropy(out, y)).backward()

    found = warnings_of(program)
    assert len(found) == mixes and all("mixes the samples" in message for message in found)


@pytest.mark.slow
def test_functions_between_are_looked_at_once_for_each_structure() -> None:
    calls = []
    model = Between(MIXING["centred"][0])
    for T in (3, 6, 3, 7):  # another number of positions is no other structure
        with mock.patch.object(paths, "vjp", wraps=paths.vjp) as looked:
            (message,) = warnings_of(lambda T=T: sequences(model, T, BatchGrad()))
        assert "mixes" in message
        calls.append(looked.call_count)
    assert calls[0] > 0 and calls[1:] == [0, 0, 0]


PERMUTED, FULL = torch.tensor([1, 2, 3, 4, 0]), torch.rand(N, N)
ONE = torch.eye(N)
# the same functions with other numbers, which keep the samples apart and then do not
VALUES: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any, Any]] = {
    "index": (lambda z, v: z[v], torch.arange(N), PERMUTED),
    "index_add": (
        lambda z, v: torch.zeros_like(z).index_add(0, v, z),
        torch.arange(N),
        PERMUTED,
    ),
    "gather": (lambda z, v: z.gather(0, v[:, None].expand(N, 4)), torch.arange(N), PERMUTED),
    "matrix": (lambda z, v: v.to(z) @ z, ONE, FULL),
    "attention mask": (
        lambda z, v: (z @ z.T).masked_fill(v == 0, -torch.inf).softmax(-1) @ z,
        ONE,
        FULL,
    ),
    "where": (lambda z, v: torch.where(v, z, z.flip(0)), torch.tensor(True), torch.tensor(False)),
    "factor": (lambda z, v: z + v * z.mean(0), 0.0, 1.0),
    "alpha": (lambda z, v: torch.add(z, z.mean(0), alpha=v), 0.0, 1.0),
    "computed": (lambda z, v: z + (z.mean(0) + v).relu(), -100.0, 100.0),
}


@pytest.mark.parametrize("name", VALUES)
def test_numbers_that_functions_between_have_stored(name: str) -> None:
    function, apart, mixed = VALUES[name]
    model = Between()
    for values in (apart, mixed, mixed, apart, apart, mixed):
        model.function = lambda z, v=values: function(z, v)
        messages = warnings_of(lambda: sequences(model, 0, BatchGrad()))
        assert bool(messages) == (values is mixed)
        assert all("mixes the samples" in message for message in messages)
        assert all(("assign_samples" in m) == (name == "index_add") for m in messages)


ORDINARY: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    **{name: function for name, function in APART.items() if name != "own function"},
    "dropout": (lambda z: nn.functional.dropout(z), 0),
    "layer norm": (lambda z: nn.functional.layer_norm(z, (4,)), N),
    "group norm": (lambda z: nn.functional.group_norm(z, 2), 4),
    "pooling": (lambda z: nn.functional.max_pool1d(z, 3, 1, 1), 4),
    "weights": (lambda z: nn.functional.linear(z, torch.rand(4, 4), torch.rand(4)), 0),
    "scaled dot product": (
        lambda z: nn.functional.scaled_dot_product_attention(z[:, None], z[:, None], z[:, None])[
            :, 0
        ],
        N,
    ),
    "statistics": (lambda z: z / (z.std(-1, keepdim=True) + z.amax(-1, True)), 0),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_functions_between_are_looked_at_once(name: str) -> None:
    function, T = ORDINARY[name]
    model = Between(function)
    sequences(model, T, BatchGrad())
    with mock.patch.object(paths, "vjp") as looked:
        sequences(model, T, BatchGrad())
    assert not looked.called


def test_functions_between_are_no_matter_of_curvature() -> None:
    with mock.patch.object(paths, "vjp") as looked:
        run(Between(), DiagGGNExact())
    assert not looked.called


class TwoLayers(nn.Module):
    """A function of two layers, one of whose results has the samples in their order."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3)
        self.function, self.slot = function, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x), self.second(x))


def both_orders(model: TwoLayers, a: Tensor) -> Tensor:
    return model.last(torch.stack([a, a.flip(0)]).unbind(0)[model.slot])


def test_each_output_of_a_function_between_is_looked_at() -> None:
    model = extend(TwoLayers(lambda a, b: both_orders(model, a)))
    x, y, loss = torch.randn(N, 4), torch.randn(N, 3), extend(nn.MSELoss())
    for slot in (0, 1, 0, 1):
        model.slot = slot
        with backpack(BatchGrad()):
            found = warnings_of(lambda: loss(model(x), y).backward())
        assert len(found) == slot and all("mixes the samples" in message for message in found)


@pytest.mark.parametrize("mixes", [False, True])
def test_loss_that_reads_two_layers_whose_samples_meet(mixes: bool) -> None:
    model = extend(TwoLayers(lambda a, b: a - (b.flip(0) if mixes else b)))
    x, y, loss = torch.randn(N, 4), torch.randn(N, 3), extend(nn.MSELoss())
    with backpack(BatchGrad()):
        found = warnings_of(lambda: loss(model(x), y).backward())
    assert len(found) == mixes and all("mixes the samples" in message for message in found)


@pytest.mark.parametrize("name", ["centred", "transposed, as many positions"])
def test_dp_sgd_refuses_functions_that_mix_samples(name: str) -> None:
    function, T, _ = MIXING[name]
    model = Between(function)
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    with pytest.warns(UserWarning, match="mixes the samples"):
        sequences(model, T, *optimiser.extensions)
    with pytest.raises(ValueError, match=r"functions before 'second' \(Linear\).*private"):
        optimiser.step()


class CentredData(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(x - x.mean(0)))


class FunctionBehind(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x).relu())


class Centre(nn.Module):
    """A leaf without a rule that subtracts a mean, which it keeps or not."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3) if keeps else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            return x - x.mean(0)
        self.mean[:] = x.mean(0)
        return x - self.mean


# models in which samples are mixed where no gradient passes, and how they are extended
MIXED_DATA: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "batch norm first": (
        lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 4)),
        False,
        r"'0' \(BatchNorm1d\)",
    ),
    "frozen batch norm": (
        lambda: nn.Sequential(
            frozen(nn.Linear(3, 4)), frozen(nn.BatchNorm1d(4)), nn.ReLU(), nn.Linear(4, 4)
        ),
        False,
        r"'1' \(BatchNorm1d\)",
    ),
    "function behind": (
        lambda: FunctionBehind(frozen(nn.BatchNorm1d(3)), nn.Linear(3, 4)),
        False,
        r"'0' \(BatchNorm1d\)",
    ),
    "traced": (
        lambda: FunctionBehind(frozen(nn.BatchNorm1d(3)), nn.Linear(3, 4)),
        True,
        r".*BatchNorm1d\)",
    ),
    "recorded": (
        lambda: FunctionBehind(frozen(nn.BatchNorm1d(3)), nn.Linear(3, 4)),
        "record",
        r".*BatchNorm1d\)",
    ),
    "centred, traced": (lambda: CentredData(nn.Linear(3, 4)), True, "a function of the data "),
    "centred, recorded": (lambda: CentredData(nn.Linear(3, 4)), "record", "a function of the data"),
    "centred in a module": (
        lambda: nn.Sequential(Centre(), nn.Linear(3, 4)),
        "record",
        "a function of the data",
    ),
    "centred behind a layer": (
        lambda: nn.Sequential(frozen(nn.Linear(3, 3)), Centre(), nn.Linear(3, 4)),
        "record",
        "a function of the data",
    ),
    "centred by what is kept": (
        lambda: nn.Sequential(Centre(keeps=True), nn.Linear(3, 4)),
        "record",
        "a function of the data",
    ),
}


def private_step(
    model: nn.Module, before: Callable[[Tensor], Tensor] = lambda x: x, converter: Any = False
) -> list[str]:
    model = extend(model, use_converter=converter)
    optimiser = DPSGD([p for p in model.parameters() if p.requires_grad], **PRIVATE)

    def program() -> None:
        loss = extend(nn.MSELoss())(model(before(torch.rand(N, 3))), torch.rand(N, 4))
        with backpack(*optimiser.extensions):
            loss.backward()

    messages = warnings_of(program)
    optimiser.step()
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED_DATA)
def test_dp_sgd_refuses_samples_mixed_where_no_gradient_passes(name: str) -> None:
    make, converter, what = MIXED_DATA[name]
    model = make()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"mixes them in {what}"):
            private_step(model, converter=converter)
    if "centred" not in name:
        assert private_step(model.eval(), converter=converter) == []


class ScaledData(nn.Module):
    """A model that multiplies with a number of the data."""

    def __init__(self, number: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(3, 4), number

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * self.number(x)


NUMBERS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "mean": (lambda x: x.mean(), True),
    "inverse root": (lambda x: 1 / (x.var() + 1).sqrt(), True),
    "entry": (lambda x: x[0, 0], True),
    "number": (lambda x: x.new_tensor(2.0), False),
    "moved": (lambda x: torch.tensor(2).to(x), False),
    "constant": (lambda x: torch.ones_like(x).sum(), False),
}


@pytest.mark.parametrize("converter", ["trace", "record"])
@pytest.mark.parametrize("name", NUMBERS)
def test_dp_sgd_refuses_one_number_of_all_samples(name: str, converter: str) -> None:
    number, mixes = NUMBERS[name]
    for _ in range(2):  # what was found out is used
        if mixes:
            with pytest.raises(ValueError, match="mixes them in a function of the data"):
                private_step(ScaledData(number), converter=converter)
        else:
            assert private_step(ScaledData(number), converter=converter) == []


class Broadcast(nn.Module):
    """A loss of a prediction ``[N, 1]`` and a target."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("offset", torch.ones(N))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.layer(x) - target - self.offset).square().mean()


@pytest.mark.parametrize("converter", ["trace", "record"])
def test_dp_sgd_refuses_targets_that_broadcast_inside_of_a_model(converter: str) -> None:
    model = extend(Broadcast(), use_converter=converter)
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    for target in (torch.rand(N, 1), torch.rand(N), torch.rand(N), torch.rand(1, N)):
        with backpack(*optimiser.extensions):
            model(torch.rand(N, 3), target).backward()
        if target.shape == (N,):
            with pytest.raises(ValueError, match=r"the same rows for all samples"):
                optimiser.step()
        else:
            optimiser.step()


class WeightsThatBroadcast(nn.Module):
    """Weights of samples, from data ``[N, 3]`` and what another argument is."""

    def __init__(self, compare: Any) -> None:
        super().__init__()
        self.layer, self.compare = nn.Linear(3, 1), compare

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        weights = self.compare(x[:, :1], other).to(x.dtype).mean(1, keepdim=True)
        return (self.layer(x) * weights).square().mean()


@pytest.mark.parametrize("compare", [torch.sub, torch.gt])
@pytest.mark.parametrize("converter", ["trace", "record"])
def test_dp_sgd_refuses_data_that_broadcast_inside_of_a_model(converter: str, compare: Any) -> None:
    model = extend(WeightsThatBroadcast(compare), use_converter=converter)
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    for other in (torch.rand(N, 1), torch.rand(N), torch.rand(1, N)):
        with backpack(*optimiser.extensions):
            model(torch.rand(N, 3), other).backward()
        if other.shape == (N,):
            with pytest.raises(ValueError, match=r"the same rows for all samples"):
                optimiser.step()
        else:
            optimiser.step()


def test_dp_sgd_refuses_a_frozen_model_that_mixes_samples() -> None:
    backbone = extend(frozen(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))))
    with pytest.raises(ValueError, match=r"mixes them in '1' \(BatchNorm1d\)"):
        private_step(nn.Linear(3, 4), lambda x: backbone(x).relu())
    backbone.eval()
    assert private_step(nn.Linear(3, 4), lambda x: backbone(x).relu()) == []


def test_samples_mixed_where_no_gradient_passes_are_no_matter_of_individual_gradients() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), Between())
    assert warnings_of(lambda: sequences(model, 0, BatchGrad())) == []


F = nn.functional
TARGET, LABELS = torch.rand(N, 4, dtype=torch.float64), torch.arange(N) % 4
WEIGHT = torch.rand(N, dtype=torch.float64)
# losses that are not extended, of an output z [N, 4]
TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda z: F.cross_entropy(z, LABELS),
    "smoothed labels": lambda z: F.cross_entropy(z, LABELS, label_smoothing=0.1),
    "probabilities": lambda z: F.cross_entropy(z, TARGET / TARGET.sum(1, True)),
    "ignored": lambda z: F.cross_entropy(z, LABELS, ignore_index=1),
    "weighted mean": lambda z: (
        (F.cross_entropy(z, LABELS, reduction="none") * WEIGHT).sum() / WEIGHT.sum()
    ),
    "masked mean": lambda z: F.mse_loss(z, TARGET, reduction="none")[WEIGHT > 0.3].mean(),
    "nll": lambda z: F.nll_loss(z.log_softmax(1), LABELS),
    "mse": lambda z: F.mse_loss(z, TARGET),
    "l1": lambda z: F.l1_loss(z, TARGET),
    "smooth l1": lambda z: F.smooth_l1_loss(z, TARGET),
    "huber": lambda z: F.huber_loss(z, TARGET),
    "bce": lambda z: F.binary_cross_entropy(z.sigmoid(), TARGET),
    "bce with logits": lambda z: F.binary_cross_entropy_with_logits(z, TARGET, pos_weight=TARGET),
    "kl": lambda z: F.kl_div(z.log_softmax(1), TARGET, reduction="batchmean"),
    "poisson": lambda z: F.poisson_nll_loss(z, TARGET),
    "gaussian": lambda z: F.gaussian_nll_loss(z[:, :2], TARGET[:, :2], z[:, 2:].exp()),
    "cosine": lambda z: F.cosine_embedding_loss(z, TARGET, WEIGHT.sign()),
    "hinge embedding": lambda z: F.hinge_embedding_loss(z[:, 0], WEIGHT.sign()),
    "margin ranking": lambda z: F.margin_ranking_loss(z[:, 0], z[:, 1], WEIGHT.sign()),
    "multi margin": lambda z: F.multi_margin_loss(z, LABELS),
    "multilabel margin": lambda z: F.multilabel_margin_loss(z, LABELS[:, None].expand(N, 4)),
    "multilabel soft margin": lambda z: F.multilabel_soft_margin_loss(z, TARGET.round()),
    "soft margin": lambda z: F.soft_margin_loss(z, TARGET.sign()),
    "triplet": lambda z: F.triplet_margin_loss(z, TARGET, TARGET.flip(1)),
    "ctc": lambda z: F.ctc_loss(
        z.log_softmax(1).expand(7, N, 4), LABELS[:, None] % 3 + 1, (7,) * N, (1,) * N
    ),
    "squared norm": lambda z: (z - TARGET).norm() ** 2,
    "powers": lambda z: (z[:, 0].exp() ** z[:, 1]).mean() + (z.exp() ** TARGET).mean(),
    "scaled": lambda z: F.cross_entropy(z, LABELS) / 3 * torch.tensor(1024.0),
    "several": lambda z: F.cross_entropy(z, LABELS) + 0.1 * z.square().sum(1).mean(),
    "focal": lambda z: (
        (1 - (-F.cross_entropy(z, LABELS, reduction="none")).exp()) ** 2
        * F.cross_entropy(z, LABELS, reduction="none")
    ).mean(),
    "one by one": lambda z: torch.stack([F.mse_loss(z[n], TARGET[n]) for n in range(N)]).mean(),
    "another order": lambda z: F.cross_entropy(z[[1, 0, 2, 4, 3]], LABELS),
    "unit matrix": lambda z: F.cross_entropy(torch.eye(N).to(z) @ z, LABELS),
    "sum of centred": lambda z: ((z - z.mean(0)) * TARGET).sum(),
    "learned weight": lambda z: F.mse_loss(z, TARGET) * torch.ones((), requires_grad=True).exp(),
    "weight decay": lambda z: F.mse_loss(z, TARGET) + torch.ones(3, requires_grad=True).norm(),
    "not extended layer": lambda z: F.cross_entropy(nn.Linear(4, 4).to(z)(z).relu(), LABELS),
    "best class": lambda z: z.max(1)[0].mean(),
    "not below zero": lambda z: F.cross_entropy(z, LABELS).clamp(min=0),
    "a number": lambda z: F.cross_entropy(z, LABELS).nan_to_num(),
    "between two": lambda z: torch.lerp(
        F.cross_entropy(z, LABELS), F.mse_loss(z, TARGET), torch.tensor(0.3)
    ),
    "a multiple more": lambda z: torch.addcmul(
        F.cross_entropy(z, LABELS), torch.tensor(0.3), F.mse_loss(z, TARGET)
    ),
    "a fraction more": lambda z: torch.addcdiv(
        F.cross_entropy(z, LABELS), F.mse_loss(z, TARGET), torch.tensor(3.0)
    ),
}
MIXED_TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda z: F.cross_entropy(z - z.mean(0), LABELS),
    "centred, l1": lambda z: F.l1_loss(z - z.mean(0), TARGET),
    "similarities": lambda z: F.cross_entropy(z @ z.T, torch.arange(N)),
    "squared similarities": lambda z: (z @ z.T).square().sum(),
    "batch norm": lambda z: F.cross_entropy(nn.BatchNorm1d(4).to(z)(z), LABELS),
    "softmax over the batch": lambda z: (z.softmax(0) * TARGET).square().sum(),
    "spread": lambda z: z.std(0).sum(),
    "another sample": lambda z: F.mse_loss(z, z.roll(1, 0)),
    "norms over the batch": lambda z: z.renorm(2, 1, 0.1).square().sum(),
    "root of the mean": lambda z: F.mse_loss(z, TARGET).sqrt(),
    "dice": lambda z: (z.sigmoid() * TARGET).sum() / z.sigmoid().sum(),
    "weights of the batch": lambda z: (z[:, 0].softmax(0) * z[:, 1]).sum(),
    "norm": lambda z: (z - TARGET).norm(),
    "logarithm of a sum": lambda z: -z.exp().sum().log() / N,
    "product": lambda z: F.mse_loss(z, TARGET) * z.square().mean(),
    "powers of the mean": lambda z: (z.square().mean() ** TARGET).sum(),
    "product added": lambda z: torch.addcmul(z.sum(), F.mse_loss(z, TARGET), z.square().mean()),
    "learned mixture": lambda z: torch.lerp(z.sum(), F.mse_loss(z, TARGET), z.square().mean()),
}
# of these, functions before the last numbers keep the samples apart
MIXING_NUMBERS = [
    "root of the mean",
    "dice",
    "norm",
    "logarithm of a sum",
    "product",
    "product added",
]
UNDECIDED_TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda z: F.cross_entropy(z, LABELS, reduction="none").topk(2)[0].mean(),
    "flooding": lambda z: (F.cross_entropy(z, LABELS) - 0.1).abs(),
    "own function": lambda z: Doubled.apply(z - z.mean(0)).square().sum(),
    "checkpoint": lambda z: checkpoint(
        lambda t: (t - t.mean(0)).exp().sum(), z, use_reentrant=False
    ),
    "not below zero": TERMS["not below zero"],
    "a number": TERMS["a number"],
}


def messages_of_loss(function: Callable[[Tensor], Tensor], *exts: BackpropExtension) -> list[str]:
    model = extend(Between())
    loss = function(model(torch.rand(N, 3)))

    def program() -> None:
        with backpack(*exts):
            loss.backward()

    return warnings_of(program)


@pytest.mark.slow
@pytest.mark.parametrize("name", TERMS)
def test_terms_of_one_sample_each(name: str) -> None:
    for _ in range(2):  # what is known of the structure is used
        assert messages_of_loss(TERMS[name], BatchGrad()) == []


@pytest.mark.parametrize("name", MIXED_TERMS)
def test_terms_that_mix_samples(name: str) -> None:
    for _ in range(2):
        (message,) = messages_of_loss(MIXED_TERMS[name], BatchGrad())
        assert "mixes the samples" in message and "in a loss that is not extended (" in message


class EndsInLoss(nn.Module):
    """A model that computes its loss."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.function = Between(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.net(x))


@pytest.mark.parametrize("converter", ["trace", "record"])
@pytest.mark.parametrize("name", [*MIXING_NUMBERS, "squared norm", "several", "flooding"])
def test_terms_inside_of_a_converted_model(name: str, converter: str) -> None:
    terms = TERMS | MIXED_TERMS | UNDECIDED_TERMS
    model, x = extend(EndsInLoss(terms[name]), use_converter=converter), torch.rand(N, 3)

    def program() -> None:
        with backpack(BatchGrad()):
            model(x).backward()

    messages = warnings_of(program)
    assert len(messages) == (name in MIXED_TERMS)
    assert all("mixes the samples" in message for message in messages)
    if name in TERMS:
        return
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    with backpack(*optimiser.extensions), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x).backward()
    with pytest.raises(ValueError, match="depend on other samples"):
        optimiser.step()


@pytest.mark.parametrize("converter", ["trace", "record"])
def test_number_without_samples_beside_a_loss(converter: str) -> None:
    plain = EndsInLoss(lambda z: z.square().mean() * plain.net.second.bias.exp().sum())
    loss = extend(plain, use_converter=converter)(torch.rand(N, 3))
    with backpack(BatchGrad()), pytest.raises(ValueError, match="the loss of each sample"):
        loss.backward()


@pytest.mark.parametrize("converter", ["trace", "record"])
@pytest.mark.parametrize(
    "function",
    [
        lambda z: -z.log_softmax(1)[WEIGHT > 0.3].mean(),
        lambda z: z.masked_select(TARGET > 0.5).square().sum() / 2 + z.mean(),
        lambda z: 2 * TERMS["ctc"](z),
    ],
    ids=["chosen", "selected", "ctc"],
)
def test_factor_of_a_loss_of_rows(function: Callable[[Tensor], Tensor], converter: str) -> None:
    """One number of samples in another order, or along another axis, is one of all of them."""
    plain, x = EndsInLoss(function), torch.rand(N, 3)
    model = extend(copy.deepcopy(plain), use_converter=converter)
    loss = model(x)
    with backpack(BatchGrad()), warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
    outputs, parameters = plain.net(x), [*plain.parameters()]
    (cotangents,) = torch.autograd.grad(function(outputs), outputs, retain_graph=True)
    for n in range(N):
        truth = torch.autograd.grad(outputs[n], parameters, cotangents[n], retain_graph=True)
        torch.testing.assert_close(tuple(p.grad_batch[n] for p in model.parameters()), truth)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("converter", [False, "record"])
def test_learned_noise_of_an_activation_module(converter: Any, shape: tuple[int, ...]) -> None:
    """It has no quantity, and none is looked for: those of the model are those of a constant."""
    torch.manual_seed(0)
    model, noise = nn.Sequential(nn.Linear(3, 2), nn.Softplus()), torch.full(shape, 0.5)
    X, y = torch.rand(N, 3), torch.rand(N, 2)
    found, raw = [], nn.Parameter(noise.expm1().log())
    for learned in (False, True):
        extended = extend(copy.deepcopy(model), use_converter=converter)
        optimiser = DPSGD(extended.parameters(), **PRIVATE)
        with backpack(BatchGrad(), *optimiser.extensions):
            errors, scale = (extended(X) - y).square(), extended[1](raw) if learned else noise
            (errors / scale + scale.log()).mean().backward()
        found.append(extended[0].weight.grad_batch)
        optimiser.step()
    torch.testing.assert_close(*found)


def test_numbers_that_a_loss_has_stored() -> None:
    for matrix, count in ((ONE, 0), (FULL, 1), (ONE, 0), (FULL, 1)):
        function = lambda z, m=matrix: F.cross_entropy(m.to(z) @ z, LABELS)  # noqa: E731
        assert len(messages_of_loss(function, BatchGrad())) == count


def step_privately(function: Callable[[Tensor, nn.Module], Tensor]) -> None:
    model = extend(Between())
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    with backpack(*optimiser.extensions), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(model(torch.rand(N, 3)), extend(nn.MSELoss())).backward()
    optimiser.step()


@pytest.mark.parametrize("name", MIXED_TERMS)
def test_dp_sgd_refuses_terms_that_mix_samples(name: str) -> None:
    with pytest.raises(ValueError, match="mixes them in a loss that is not extended"):
        step_privately(lambda z, _: MIXED_TERMS[name](z))


class Running(nn.Module):
    """Subtracts a running mean, to which the samples at hand belong already, or from then on."""

    def __init__(self, updates_first: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.updates_first = updates_first

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean.clone()
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return x - (self.mean if self.updates_first else before)


@pytest.mark.parametrize("converter", [False, "record"])
@pytest.mark.parametrize("updates_first", [True, False])
def test_statistics_that_a_batch_has_changed(updates_first: bool, converter: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), Running(updates_first), nn.Linear(4, 2))
    model, lossfunc = extend(model, use_converter=converter), extend(nn.MSELoss())
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    for _ in range(2):
        with backpack(*optimiser.extensions), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lossfunc(model(torch.rand(N, 3)), torch.rand(N, 2)).backward()
        mixed = ["mixes the samples" in str(each.message) for each in caught]
        assert mixed == [True] * updates_first
        with pytest.raises(ValueError, match="would not be private"):
            optimiser.step()


def test_module_inside_of_a_loss_that_mixes_what_functions_have_computed() -> None:
    class Squared(nn.Module):
        def forward(self, losses: Tensor) -> Tensor:
            return losses.mean() ** 2

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reducer = Squared()

        def forward(self, z: Tensor) -> Tensor:
            return self.reducer((z - TARGET).square().sum(1))

    with pytest.warns(UserWarning, match="mixes the samples of a batch, in 'reducer'"):
        sequence = extend(Between())(torch.rand(N, 3))
        with backpack(BatchGrad()):
            extend(Loss())(sequence).backward()


@pytest.mark.parametrize("name", ["own function", "checkpoint"])
def test_dp_sgd_refuses_functions_between_that_cannot_be_looked_at(name: str) -> None:
    def function(z: Tensor) -> Tensor:
        z = z - z.mean(0)
        return Doubled.apply(z) if name == "own function" else z

    def checkpointed(z: Tensor) -> Tensor:
        return checkpoint(lambda t: function(t).exp(), z, use_reentrant=False)

    model = Between(function if name == "own function" else checkpointed)
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    sequences(model, 0, *optimiser.extensions)
    with pytest.raises(ValueError, match=r"functions before 'second' \(Linear\): the steps might"):
        optimiser.step()


def test_dp_sgd_looks_beside_an_extended_loss() -> None:
    with pytest.raises(ValueError, match=r"a loss that is not extended \(PowBackward0, Mean"):
        step_privately(lambda z, lossfunc: lossfunc(z, TARGET) + z.mean(0).square().sum())
    step_privately(lambda z, lossfunc: lossfunc(z, TARGET) + z.square().mean())


@pytest.mark.parametrize("name", UNDECIDED_TERMS)
def test_dp_sgd_refuses_terms_that_cannot_be_told_apart(name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be told, because of .*extend\(lossfunc\)"):
        step_privately(lambda z, _: UNDECIDED_TERMS[name](z))
    assert messages_of_loss(UNDECIDED_TERMS[name], BatchGrad()) == []


# what depends on targets or weights of others is refused, too: see test_optim
DIVIDED = {"ignored", "masked mean", "weighted mean", "sum of centred", "another order"}


@pytest.mark.parametrize("name", sorted(TERMS.keys() - UNDECIDED_TERMS.keys() - DIVIDED))
def test_dp_sgd_takes_terms_of_one_sample_each(name: str) -> None:
    step_privately(lambda z, _: TERMS[name](z))


def test_dp_sgd_refuses_rows_that_are_no_samples() -> None:
    class Merged(Between):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(-1, 3))

    model = extend(Merged())
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    with backpack(*optimiser.extensions), pytest.warns(UserWarning, match="are not those of samp"):
        model(torch.rand(N, 2, 3)).square().sum().backward()
    with pytest.raises(
        ValueError, match=r"mixes them in layers whose rows are no samples \('first'"
    ):
        optimiser.step()


def test_model_that_extend_has_returned_is_not_used() -> None:
    model, lossfunc = Between(lambda z: torch.relu(z + 1)), extend(nn.MSELoss())
    extend(model, use_converter=True)
    z = model(torch.rand(N, 3))
    loss = lossfunc(z, torch.rand_like(z))
    with backpack(DiagGGNExact()), pytest.raises(ValueError, match=r"that extend\(\) has returned"):
        loss.backward()


def test_hooks_run_as_often_as_without_the_library() -> None:
    def count(*exts: BackpropExtension) -> list[str]:
        fired: list[str] = []

        def function(z: Tensor) -> Tensor:
            centred = z - z.mean(0)
            centred.register_hook(lambda g: fired.append("tensor"))
            centred.grad_fn.register_prehook(lambda g: fired.append("node"))  # type: ignore[union-attr]
            return centred.exp()

        warnings_of(lambda: sequences(Between(function), 0, *exts))
        return fired

    assert count(BatchGrad()) == count()


def test_functions_inside_of_a_checkpoint() -> None:
    def function(z: Tensor) -> Tensor:
        return checkpoint(lambda t: (t - t.mean(0)).exp(), z, use_reentrant=False)

    model = Between(function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such functions cannot be looked at
        sequences(model, 0, BatchGrad())
    torch.testing.assert_close(model.first.weight.grad_batch.sum(0), model.first.weight.grad)


# ------------------------------------------------------------------ numbers of rows


class Table(nn.Module):
    """Adds a table of positions, ``[1, T, H]`` or ``[T, H]``."""

    def __init__(self, T: int, batched: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 4), nn.Embedding(T, 4)
        self.head, self.numbers = nn.Linear(4, 2), torch.arange(T)
        if batched:
            self.numbers = self.numbers.unsqueeze(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens(x) + self.positions(self.numbers))


def tokens(T: int) -> Tensor:
    return torch.randint(7, (N, T))


class Merged(nn.Module):
    """A layer on merged axes behind another layer, and a function."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.middle = middle or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        z = self.middle(self.first(x).tanh().view(-1, 4))
        return self.third(self.second(z).view(len(x), -1, 4).tanh())


def backward_of(model: nn.Module, X: Tensor, *exts: BackpropExtension) -> None:
    loss = extend(model)(X).square().sum()
    with backpack(*exts):
        loss.backward()


ROWS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "positions": (lambda: Table(3, True), lambda: tokens(3), r"'positions' \(Embedding\) has 1,"),
    "as many positions": (lambda: Table(N, True), lambda: tokens(N), r"'positions' .* has 1,"),
    "positions without a batch": (lambda: Table(3, False), lambda: tokens(3), "positions.* has 3,"),
    "merged": (Merged, lambda: torch.randn(N, 3, 3), r"'second' \(Linear\) 15"),
    "merged, with a module between": (
        lambda: Merged(nn.ReLU()),
        lambda: torch.randn(N, 3, 3),
        r"'first' \(Linear\) has 5, 'second' \(Linear\) 15",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_no_samples(name: str) -> None:
    make, X, expected = ROWS[name]
    model = make()
    (message,) = warnings_of(lambda: backward_of(model, X(), BatchGrad()))
    assert re.search(expected, message) and "use_converter=True" in message
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    with pytest.raises(ValueError, match=r"DPSGD|no joint norms"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backward_of(model, X(), *optimiser.extensions)
        optimiser.step()


def test_table_without_a_batch_axis_and_as_many_positions() -> None:
    (message,) = warnings_of(lambda: backward_of(Table(N, False), tokens(N), BatchGrad()))
    assert "functions before 'head' (Linear)" in message


def test_merged_axes_that_only_activations_see() -> None:
    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.second = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            z = self.relu(self.first(x).view(-1, 4))
            return self.second(z.view(len(x), -1, 4))

    X = torch.randn(N, 3, 3)
    assert warnings_of(lambda: backward_of(Activated(), X, BatchGrad())) == []


def test_two_batches_and_a_flattened_loss_are_silent() -> None:
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())

    def two_batches() -> None:
        losses = [lossfunc(model(torch.randn(n, 3)), torch.randint(2, (n,))) for n in (4, 4)]
        with backpack(BatchGrad()):
            sum(losses).backward()  # type: ignore[union-attr]

    def flattened() -> None:
        z = extend(Between())(torch.randn(N, 4, 3))
        loss = lossfunc(z[:, :-1].reshape(-1, 4), torch.randint(4, (3 * N,)))
        with backpack(BatchGrad()):
            loss.backward()

    def masked() -> None:
        z = extend(Between())(torch.randn(N, 4, 3))
        mask = torch.rand(N, 4) > 0.5
        loss = lossfunc(z[mask], torch.randint(4, (int(mask.sum()),)))
        with backpack(BatchGrad()):
            loss.backward()

    assert [warnings_of(program) for program in (two_batches, flattened, masked)] == [[], [], []]


def test_language_model_without_converter() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8, **dict.fromkeys(NO_DROPOUT, 0)
    )
    model = extend(transformers.GPT2Model(config))
    loss = model(torch.randint(11, (3, 8))).last_hidden_state.square().sum()

    def program() -> None:
        with backpack(BatchGrad()):
            loss.backward()

    found = [m for m in warnings_of(program) if "their numbers differ" in m]
    (message,) = found
    assert re.search(r"'wpe' \(Embedding\) has 1, '.*' \(LayerNorm\) 3", message)


class Moved(nn.Module):
    """A layer between functions of data and functions of its output."""

    def __init__(self, before: Callable[[Tensor], Tensor], behind: Callable[..., Tensor]) -> None:
        super().__init__()
        self.before, self.behind = before, behind
        self.layer, self.act = nn.Linear(3, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.act(self.layer(self.before(x))), x.shape[0])


BEFORE_AND_BEHIND: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    "as they are": (lambda x: x, lambda h, n: h),
    "an axis in front": (lambda x: x[None], lambda h, n: h.transpose(0, 1)),
    "merged": (lambda x: x.flatten(0, 1), lambda h, n: h.view(n, -1)),
    "transposed": (lambda x: x.transpose(0, 1), lambda h, n: h.transpose(0, 1)),
}
OF_SAMPLES: dict[str, Callable[[], Any]] = {
    "BatchDiagGGNExact": extensions.BatchDiagGGNExact,
    "BatchDiagHessian": extensions.BatchDiagHessian,
    "DiagGGNExact": extensions.DiagGGNExact,
    "DiagGGNExact of one": lambda: extensions.DiagGGNExact(subsampling=[0]),
    "KFLR": extensions.KFLR,
    "KFLR, expand": lambda: extensions.KFLR(approximation="expand"),
    "KFLR, reduce": lambda: extensions.KFLR(approximation="reduce"),
    "SqrtGGNExact": extensions.SqrtGGNExact,
}


@pytest.mark.parametrize("steps", [2, 5])  # as many as there are samples
@pytest.mark.parametrize("name", OF_SAMPLES)
@pytest.mark.parametrize("functions", BEFORE_AND_BEHIND)
def test_rows_that_are_no_samples_are_told_by_second_order(
    functions: str, name: str, steps: int
) -> None:
    """There is a warning if, and only if, a model that follows the samples has other results."""
    model = Moved(*BEFORE_AND_BEHIND[functions]).double()
    X = torch.rand(5, steps, 3, dtype=torch.float64)
    y = torch.rand_like(model(X))

    def result(model: nn.Module) -> tuple[list[Tensor], list[str]]:
        loss = extend(nn.MSELoss())(model(X), y)
        ext = OF_SAMPLES[name]()
        with warnings.catch_warnings(record=True) as told, backpack(ext):
            warnings.simplefilter("always")
            loss.backward()
        found = getattr(dict(model.named_parameters())["layer.weight"], ext.savefield)
        return found if isinstance(found, list) else [found], [str(w.message) for w in told]

    expected, nothing = result(extend(copy.deepcopy(model), use_converter=True))
    assert not nothing
    found, told = result(extend(model))
    is_same = all(
        x.shape == y.shape and torch.allclose(x, y) for x, y in zip(found, expected, strict=True)
    )
    if is_same:
        assert not told
    else:
        (message,) = told
        kind = name.split()[0].rstrip(",")
        assert re.match(rf"{kind}: some samples are others.*use_converter=True", message)

"""What objects say about themselves, results with types, and their table."""

from __future__ import annotations

import copy
import pickle
from inspect import signature
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import backpack as library
from backpack import backpack, extend, results_of, summary
from backpack.extensions import GGNMP, HBP, HMP, KFAC, PCHMP, BatchGrad, DiagGGNMC
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from backpack.optim import DPSGD, DiagGGN
from backpack.optim import KFAC as KFACOptimizer
from backpack.results import Results
from backpack.support import all_extensions


class Own(FirstOrderBackpropExtension):
    needs = ("individual",)

    def __init__(self, power: int, *names: str, **options: Any):
        super().__init__("own")


@pytest.mark.parametrize(
    "shown, text",
    [
        (BatchGrad(), "BatchGrad()"),
        (BatchGrad([0, 2]), "BatchGrad(subsampling=[0, 2])"),
        (KFAC(mc_samples=3), "KFAC(mc_samples=3)"),
        (KFAC(3, None, "expand"), "KFAC(mc_samples=3, approximation='expand')"),
        (KFAC(mc_samples=1), "KFAC()"),
        (PCHMP(modify="abs"), "PCHMP(modify='abs')"),
        (
            HBP("GGN", "EXACT", "SQRT", "BOTEV_MARTENS"),
            "HBP(curv_type='GGN', loss_hessian_strategy='EXACT', backprop_strategy='SQRT', "
            "ea_strategy='BOTEV_MARTENS')",
        ),
        (Own(2, "a", "b", key=1), "Own(power=2, 'a', 'b', key=1)"),
    ],
    ids=str,
)
def test_extensions(shown: object, text: str) -> None:
    assert repr(shown) == text
    assert repr(copy.deepcopy(shown)) == text
    assert repr(pickle.loads(pickle.dumps(shown))) == text


def test_signatures() -> None:
    """Those of the constructors, for documentation and editors."""
    options = ["mc_samples", "subsampling", "approximation", "fisher"]
    options += ["joint_bias", "max_factor_size"]
    assert list(signature(KFAC).parameters) == options
    assert list(signature(Own).parameters) == ["power", "names", "options"]
    assert next(iter(signature(backpack).parameters)) == "exts"


def test_options_that_are_tensors() -> None:
    assert repr(BatchGrad(torch.tensor([1]))) == "BatchGrad(subsampling=tensor([1]))"


def test_context() -> None:
    context = backpack(BatchGrad(), KFAC(2), retain_graph=True, debug=False)
    assert repr(context) == "backpack(BatchGrad(), KFAC(mc_samples=2), retain_graph=True)"
    with context:
        pass


def test_optimisers() -> None:
    p = nn.Parameter(torch.zeros(2))
    private = DPSGD([p], lr=0.1, max_grad_norm=1.5, noise_multiplier=1.1, expected_batch_size=8)
    for option in ("max_norm=1.5", "noise_multiplier: 1.1", "lr: 0.1", "ClippedGrad("):
        assert option in repr(private)
    assert "extension: KFAC(mc_samples=2)\n" in repr(KFACOptimizer([p], extension=KFAC(2)))
    assert "kl_clip: None\n" in repr(DiagGGN([p], kl_clip=None))


def passed(*exts: Any) -> nn.Module:
    torch.manual_seed(0)
    model, lossfunc = extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh())), extend(nn.MSELoss())
    model[0].bias.requires_grad_(False)
    with backpack(*exts):
        lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2)).backward()
    return model


def test_products() -> None:
    weight = passed(GGNMP(), HMP(subsampling=[1]), PCHMP()).get_parameter("0.weight")
    shapes = "[V, 2, 3] -> [V, 2, 3]"
    results = results_of(weight)
    assert repr(results.ggnmp) == f"<product with a block of the GGN: {shapes}>"
    assert repr(results.hmp) == f"<product with a block of the Hessian: {shapes}, samples [1]>"
    assert "positive-curvature Hessian" in repr(results.pchmp)


def test_every_savefield_has_a_type() -> None:
    hints = get_type_hints(Results)
    assert set(hints) == {ext.savefield for ext in all_extensions()}
    for ext in all_extensions():
        hint = hints[ext.savefield]
        assert (hint is Tensor) == (ext.shape is not None)
        assert (hint == list[Tensor]) == ext.saves_matrices


def test_results_of_a_parameter() -> None:
    weight = passed(BatchGrad(), Own(1)).get_parameter("0.weight")
    assert results_of(weight).grad_batch is weight.grad_batch
    assert results_of(weight).own is weight.own
    assert dir(results_of(weight)) == ["grad_batch", "own"]
    message = r"parameter of shape \[2, 3\] has no kfac: there are grad_batch, own\. Call backward"
    with pytest.raises(AttributeError, match=message):
        _ = results_of(weight).kfac
    with pytest.raises(TypeError, match=r"got Linear\. .*backpack\.quantities\(model\)"):
        results_of(nn.Linear(1, 1))  # type: ignore[arg-type]
    assert not hasattr(results_of(nn.Parameter(torch.zeros(1))), "kfac")
    assert copy.copy(results_of(weight)).grad_batch is weight.grad_batch


def test_summary() -> None:
    model = passed(BatchGrad(), KFAC(), GGNMP(), DiagGGNMC())
    table = summary(model)
    rows = {row.quantity: row for row in table.rows}
    assert {row.parameter for row in table.rows} == {"0.weight"}  # the bias is frozen
    quantities = {"grad", "grad_batch", "kfac[0]", "kfac[1]", "ggnmp", "diag_ggn_mc"}
    assert set(rows) == quantities
    weight = model.get_parameter("0.weight")
    assert rows["grad_batch"][2:4] == ((5, 2, 3), 120)
    assert rows["grad_batch"].norm == pytest.approx(weight.grad_batch.norm().item())
    assert rows["ggnmp"][2:] == (None, 0, None)
    lines = str(table).splitlines()
    assert lines[0].split() == ["parameter", "quantity", "shape", "bytes", "norm"]
    assert (
        lines[-1].split()
        == ["all", "220"]
        == [lines[-1].split()[0], str(sum(r.bytes for r in table.rows))]
    )
    assert len(lines) == 2 + len(rows)
    assert repr(table) == str(table)
    assert table._repr_html_().count("<tr>") == len(lines)
    assert "[5, 2, 3]" in table._repr_html_()


@pytest.mark.parametrize("function", ["clear", "quantities", "summary"])
def test_something_else_than_a_model(function: str) -> None:
    with pytest.raises(TypeError, match=f"^{function} expects a model, got generator. For a"):
        getattr(library, function)(nn.Linear(1, 1).parameters())


def test_summary_without_entries() -> None:
    model = nn.Linear(3, 2, device="meta")
    model.weight.grad = torch.empty_like(model.weight)
    assert summary(model).rows == (("weight", "grad", (2, 3), 24, None),)
    assert "24" in str(summary(model))


def test_factored_gradients() -> None:
    """They have a shape and a norm, and move as others do."""
    dense, factored = passed(BatchGrad()), passed(BatchGrad(factored=True))
    (row,) = (row for row in summary(factored).rows if row.quantity == "grad_batch")
    (expected,) = (row for row in summary(dense).rows if row.quantity == "grad_batch")
    value: Any = factored.get_parameter("0.weight").grad_batch
    assert row[:3] == expected[:3] and row.bytes == 4 * value.kept_entries
    assert row.norm == pytest.approx(expected.norm)
    library.results.MoveResults("meta")(factored)
    moved: Any = factored.get_parameter("0.weight").grad_batch
    assert moved.device.type == "meta" and moved.shape == value.shape


def test_summary_of_other_gradients() -> None:
    """Sparse ones, those of low precision, and none."""
    model = nn.Embedding(4, 2, sparse=True)
    assert summary(model).rows == ()
    assert str(summary(model)) == "nothing yet: call backward() inside of `with backpack(...)`"
    assert "nothing yet" in summary(model)._repr_html_()
    model(torch.tensor([0, 0, 1])).sum().backward()
    (row,) = summary(model).rows
    assert row[1:4] == ("grad", (4, 2), 16)
    assert row.norm == pytest.approx(10**0.5)
    half = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    half.weight.grad = torch.full_like(half.weight, 1e-3)
    assert summary(half).rows[0][1:4] == ("grad", (2, 2), 8)


def test_version() -> None:
    assert library.__version__[0].isdigit()

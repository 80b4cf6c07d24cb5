"""Rules of leaf modules of transformers, which have names and options of their own."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.core.derivatives import check_rule, derivatives_of
from backpack.core.derivatives.elementwise import SAME
from backpack.core.derivatives.normalization import TransformersRMSNormDerivatives

transformers = pytest.importorskip("transformers")


def named(name: str) -> Any:
    """Import a class."""
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


@pytest.mark.parametrize("name", SAME)
def test_activations(name: str) -> None:
    check_rule(named(name)(), torch.randn(3, 4))


@pytest.mark.parametrize("option", ["gelu_python", "gelu_python_tanh"])
def test_activations_in_python(option: str) -> None:
    check_rule(transformers.activations.ACT2FN[option], torch.randn(3, 4))


# Some of the classes of one code, and of another spelling of it.
RMS_NORMS = [
    f"transformers.models.{package}.modeling_{package}.{name}"
    for package, name in (
        *(("llama", "LlamaRMSNorm"), ("mistral", "MistralRMSNorm"), ("olmo2", "Olmo2RMSNorm")),
        *(("qwen2", "Qwen2RMSNorm"), ("qwen3", "Qwen3RMSNorm"), ("qwen2_moe", "Qwen2MoeRMSNorm")),
        *(("qwen2_5_vl", "Qwen2_5_VLRMSNorm"), ("mamba", "MambaRMSNorm"), ("glm", "GlmRMSNorm")),
        *(("deepseek_v3", "DeepseekV3RMSNorm"), ("gpt_oss", "GptOssRMSNorm")),
        *(("t5", "T5LayerNorm"), ("umt5", "UMT5LayerNorm"), ("jamba", "JambaRMSNorm")),
    )
]
OTHER_NORMS = [
    "transformers.models.gemma.modeling_gemma.GemmaRMSNorm",  # 1 + γ
    "transformers.models.convnext.modeling_convnext.ConvNextLayerNorm",
    "transformers.models.deberta.modeling_deberta.DebertaLayerNorm",
    "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated",
]


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_other_norms(name: str) -> None:
    """What computes something else has no rule, whatever its name."""
    state = torch.get_rng_state()
    assert not isinstance(derivatives_of(named(name)(4)), TransformersRMSNormDerivatives)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("name", RMS_NORMS)
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_rms_norm(name: str, shape: tuple[int, ...]) -> None:
    """All are RMSNorm of torch, up to the precision that they compute in: float32."""
    torch.manual_seed(0)
    layer, twin = named(name)(4), nn.RMSNorm(4, 1e-6)
    assert type(derivatives_of(layer)) is TransformersRMSNormDerivatives
    with torch.no_grad():
        twin.weight.copy_(layer.weight.normal_())
    X, y = torch.randn(3, *shape), torch.randint(4, (3,))
    exts = [extensions.BatchGrad, extensions.DiagGGNExact, extensions.DiagHessian, extensions.KFLR]
    found: list[list[Tensor]] = []
    for norm in (layer, twin):
        first = nn.Linear(4, 4)
        nn.init.eye_(first.weight)
        model = extend(nn.Sequential(first, norm, nn.Flatten(), nn.Linear(X[0].numel(), 4)))
        nn.init.ones_(model[-1].weight)  # type: ignore[arg-type]
        with torch.no_grad():
            model[-1].weight[0] *= 2  # type: ignore[index, operator]
            model[-1].bias.zero_()  # type: ignore[union-attr, operator]
            first.bias.zero_()
        loss = extend(nn.CrossEntropyLoss())(model(X), y)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no rule
            with backpack(*(ext() for ext in exts)):
                loss.backward()
        results: list[Tensor] = []
        for p in (norm.weight, first.weight):
            results += [p.grad_batch, p.diag_ggn_exact, p.diag_h, *p.kflr]
        found.append(results)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_rms_norm_in_half_precision() -> None:
    """What is rounded is the result, not what it is computed from."""
    torch.manual_seed(0)
    layer = named("transformers.models.llama.modeling_llama.LlamaRMSNorm")(256).bfloat16()
    X = torch.randn(3, 256).bfloat16()
    model = extend(nn.Sequential(layer))
    with backpack(extensions.BatchGrad()):
        extend(nn.MSELoss(reduction="sum"))(model(X), torch.zeros_like(X)).backward()
    for n in range(3):
        (true,) = torch.autograd.grad(layer(X[n]).square().sum(), layer.weight)
        torch.testing.assert_close(layer.weight.grad_batch[n], true)

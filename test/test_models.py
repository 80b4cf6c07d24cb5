"""Models of libraries, unmodified and called as their users call them: quantities in float64.

No model here was written with this library in mind. What their forward passes compute outside of
modules is recorded while they run, or traced where that is possible.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack import backpack, extend, extensions
from backpack.utils.kroneckers import kfacs_to_mat

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
timm_models = pytest.importorskip("timm.models", reason="timm is not installed")

N, T, WORDS, CLASSES = 3, 4, 11, 3


# --- A language model of the reader's own ---------------------------------------------------------


class LayerNorm(nn.Module):
    """Layer normalisation without a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class CausalAttention(nn.Module):
    """Heads from one projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        N, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(N, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(N, T, C))


class Block(nn.Module):
    """Attention and a perceptron, with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = LayerNorm(width), LayerNorm(width)
        self.attn = CausalAttention(width, heads)
        self.c_fc = nn.Linear(width, 2 * width, bias=False)
        self.c_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """A GPT whose embedding is the weight of its last layer."""

    def __init__(self, width: int = 4, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(T, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = LayerNorm(width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.lm_head(self.ln_f(x))}


# --- The models -----------------------------------------------------------------------------------

LANGUAGE = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NARROW = {
    **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 12, "max_position_embeddings": T + 2},
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**LANGUAGE, **NARROW, **NO_DROPOUT}
GPT2 = {
    **{**LANGUAGE, "n_positions": T + 2, "n_embd": 8, "n_layer": 1, "n_head": 2},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
LLAMA = {**LANGUAGE, **NARROW, "num_key_value_heads": 1, "use_cache": True}
IMAGES = {"image_size": 4, "patch_size": 2, "num_channels": 1}


def words(**more: Any) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, WORDS, (N, T)), "labels": None, **more}


def padded(side: str) -> Callable[[], dict[str, Any]]:
    """Sentences of different lengths."""

    def inputs() -> dict[str, Any]:
        mask = torch.arange(T) < torch.tensor([[T], [T - 1], [T - 2]])
        mask = mask if side == "right" else mask.flip(1)
        known = words()
        known["input_ids"][~mask] = LANGUAGE["pad_token_id"]
        return {**known, "attention_mask": mask.long()}

    return inputs


def images(size: int, name: str = "x") -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randn(N, 1, size, size, dtype=torch.float64)}


@dataclass(frozen=True)
class Model:
    """A model and how it is called.

    Attributes:
        make: Build it.
        inputs: Make the keyword arguments of ``forward``; the first is the data.
        per_token: Whether there is a target for each token, otherwise one for each sample.
        rounding: Error, relative to the largest entry, that the model's own rounding to a lower
            precision causes in backward passes of different orders.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    per_token: bool = False
    rounding: float = 0.0

    def build(self) -> tuple[nn.Module, dict[str, Any], Tensor]:
        """Return the model in float64, its arguments, and targets."""
        torch.manual_seed(0)
        model = self.make().double()
        with torch.no_grad():
            for p in model.parameters():  # make what starts at zero matter
                p.add_(0.1 * torch.randn_like(p))
        inputs = self.inputs()
        target = torch.randint(CLASSES, (N, T) if self.per_token else (N,))
        return model, inputs, target


def of_transformers(family: str, config: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    """Build a model of transformers."""

    def make() -> nn.Module:
        same = {"num_labels": CLASSES, **options}
        return getattr(transformers, family)(getattr(transformers, config)(**same))

    return make


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Build a model of timm."""
    return lambda: getattr(timm_models, name)(in_chans=1, num_classes=CLASSES, **options)


BERT_LIKE = "BertForSequenceClassification", "BertConfig"
GPT2_LIKE = "GPT2ForSequenceClassification", "GPT2Config"
LLAMA_LIKE = "LlamaForSequenceClassification", "LlamaConfig"
# Llama computes its normalisation in float32, on purpose, whatever the dtype of the model. The
# truth goes the same way, but every product that travels back is rounded there, to 6e-8.
FLOAT32 = 1e-5

MODELS: dict[str, Model] = {
    "nanogpt": Model(NanoGPT, lambda: {"input_ids": words()["input_ids"]}, per_token=True),
    "bert": Model(of_transformers(*BERT_LIKE, BERT), words),
    "bert_padded": Model(of_transformers(*BERT_LIKE, BERT), padded("right")),
    "bert_tokens": Model(
        of_transformers("BertForTokenClassification", "BertConfig", BERT),
        padded("right"),
        per_token=True,
    ),
    "gpt2": Model(of_transformers(*GPT2_LIKE, GPT2), words),
    "gpt2_padded": Model(of_transformers(*GPT2_LIKE, GPT2), padded("right")),
    "gpt2_lm": Model(
        of_transformers("GPT2LMHeadModel", "GPT2Config", GPT2), padded("left"), per_token=True
    ),
    "llama": Model(of_transformers(*LLAMA_LIKE, LLAMA), words, rounding=FLOAT32),
    "llama_padded": Model(of_transformers(*LLAMA_LIKE, LLAMA), padded("right"), rounding=FLOAT32),
    "llama_lm": Model(
        of_transformers("LlamaForCausalLM", "LlamaConfig", LLAMA),
        words,
        per_token=True,
        rounding=FLOAT32,
    ),
    "vit": Model(
        of_transformers(
            "ViTForImageClassification", "ViTConfig", {**IMAGES, **NARROW, **NO_DROPOUT}
        ),
        images(4, "pixel_values"),
    ),
    "timm_vit": Model(
        timm(
            "VisionTransformer",
            **{"img_size": 4, "patch_size": 2, "embed_dim": 8, "depth": 1, "num_heads": 2},
        ),
        images(4),
    ),
    "timm_convnext": Model(
        timm("ConvNeXt", depths=(1, 1, 1, 1), dims=(2, 3, 3, 4), patch_size=2, kernel_sizes=3),
        images(32),
    ),
    "timm_mixer": Model(
        timm("MlpMixer", img_size=4, patch_size=2, num_blocks=1, embed_dim=6), images(4)
    ),
}
FAMILIES = {
    *("NanoGPT", "BertForSequenceClassification", "BertForTokenClassification"),
    *("GPT2ForSequenceClassification", "GPT2LMHeadModel", "LlamaForSequenceClassification"),
    *("LlamaForCausalLM", "ViTForImageClassification", "VisionTransformer", "ConvNeXt"),
    "MlpMixer",
}

TRUTHS: dict[str, Callable[..., list]] = {
    "grad_batch": oracle.batch_grad,
    "batch_l2": oracle.batch_l2,
    "variance": oracle.variance,
    "diag_ggn_exact": oracle.ggn_diag,
}
EXTENSIONS = (
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.Variance,
    extensions.DiagGGNExact,
    extensions.DiagGGNMC,
    extensions.SqrtGGNMC,
    extensions.KFAC,
)


# --- The tests ------------------------------------------------------------------------------------


class Loss(nn.Module):
    """Cross entropy of ``logits.view(-1, V)``, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.lossfunc = nn.CrossEntropyLoss()

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """[N, V] or [N, T, V] -> []."""
        return self.lossfunc(f.view(-1, f.size(-1)), y.view(-1))


class Called(nn.Module):
    """A model that finds its keywords, and returns its logits: for the oracle."""

    def __init__(self, model: nn.Module, keywords: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.keywords = model, keywords

    def forward(self, x: Tensor) -> Tensor:
        """[N, *] -> [N, *, V]."""
        name, *_ = self.keywords
        return logits(self.model, {**self.keywords, name: x})


def logits(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Call a model as its users do."""
    output = model(**inputs)
    return output if isinstance(output, Tensor) else output["logits"]


def check(params: list, field: str, expected: list[Tensor], rounding: float) -> None:
    """Compare up to 1e-7 of the largest entry; what should be zero has none."""
    whole = max(float(e.abs().max()) for e in expected)
    for i, (p, e) in enumerate(zip(params, expected, strict=True)):
        largest = max(float(e.abs().max()), 1e-6 * whole)
        atol = max(1e-7, rounding) * largest
        torch.testing.assert_close(
            getattr(p, field), e, rtol=0, atol=atol, msg=lambda m, i=i: f"{field} of {i}: {m}"
        )


@pytest.fixture(autouse=True)
def differentiable_attention() -> Iterator[None]:
    """The oracle needs a second derivative of attention."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


# Each model is run twice: with both implementations of attention, in both modes, on both routes.
VARIANTS = [
    ("record", {"training": True, "attention": "eager"}),
    (True, {"training": False, "attention": "sdpa"}),
]


def build(name: str, training: bool, attention: str) -> tuple[nn.Module, dict[str, Any], Tensor]:
    model, inputs, y = MODELS[name].build()
    if isinstance(model, transformers.PreTrainedModel):
        model.set_attn_implementation(attention)
    return model.train(training), inputs, y


def test_families_are_there() -> None:
    assert {type(model.make()).__name__ for model in MODELS.values()} == FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize(("route", "options"), VARIANTS, ids=["record", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_quantities(name: str, route: Any, options: dict[str, Any]) -> None:
    model, inputs, y = build(name, **options)
    reference = copy.deepcopy(model)
    problem = (oracle.twin(Called(reference, inputs)), Loss(), next(iter(inputs.values())), y)

    converted = extend(model, use_converter=route)
    f = logits(converted, inputs)
    assert torch.equal(f, logits(reference, inputs))
    assert [n for n, _ in converted.named_parameters()] == [
        n for n, _ in reference.named_parameters()
    ]
    params = oracle.trainable(model)
    assert list(map(id, oracle.trainable(converted))) == list(map(id, params))

    lossfunc = extend(nn.CrossEntropyLoss())
    torch.manual_seed(1)
    with backpack(*(ext() for ext in EXTENSIONS)):
        lossfunc(f.view(-1, f.size(-1)), y.view(-1)).backward()
    rounding = MODELS[name].rounding
    for field, truth in TRUTHS.items():
        check(params, field, truth(*problem), rounding)

    # one draw for all Monte-Carlo quantities
    samples = [p.sqrt_ggn_mc.reshape(-1, p.numel()) for p in params]
    squares = [S.square().sum(0).reshape(p.shape) for S, p in zip(samples, params, strict=True)]
    check(params, "diag_ggn_mc", squares, rounding)
    for p, S in zip(params, samples, strict=True):
        assert kfacs_to_mat(p.kfac).shape == (p.numel(), p.numel())
        if len(p.kfac) == 1:
            block = S.T @ S
            atol = max(1e-7, rounding) * float(block.abs().max().clamp(min=1e-9))
            torch.testing.assert_close(p.kfac[0], block, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["nanogpt", "bert_padded", "gpt2", "timm_vit", "timm_mixer"])
def test_hessian(name: str) -> None:
    model, inputs, y = build(name, training=False, attention="sdpa")
    problem = (Called(copy.deepcopy(model), inputs), Loss(), next(iter(inputs.values())), y)
    f = logits(extend(model, use_converter="record"), inputs)
    with backpack(extensions.DiagHessian()):
        extend(nn.CrossEntropyLoss())(f.view(-1, f.size(-1)), y.view(-1)).backward()
    check(oracle.trainable(model), "diag_h", oracle.hessian_diag(*problem), 0.0)


@pytest.mark.parametrize("name", ["nanogpt", "bert_tokens", "gpt2_padded", "llama_lm", "timm_vit"])
def test_kronecker_factors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of linear layers that nothing else shares its weight with."""
    model, inputs, y = build(name, training=True, attention="eager")
    monkeypatch.setattr(oracle, "KRON", (nn.Linear,))
    reference = Called(copy.deepcopy(model), inputs)
    expected = oracle.kflr(oracle.twin(reference), Loss(), next(iter(inputs.values())), y)
    f = logits(extend(model, use_converter="record"), inputs)
    with backpack(extensions.KFLR()):
        extend(nn.CrossEntropyLoss())(f.view(-1, f.size(-1)), y.view(-1)).backward()
    rounding = max(1e-7, MODELS[name].rounding)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    compared = 0
    for p, factors in zip(oracle.trainable(model), expected, strict=True):
        if any(p is w for w in weights) and len(factors) == 2:
            for mine, factor in zip(p.kflr, factors, strict=True):
                atol = rounding * float(factor.abs().max().clamp(min=1e-9))
                torch.testing.assert_close(mine, factor, rtol=0, atol=atol)
            compared += 1
    tied = name == "nanogpt"
    assert compared == len(weights) - tied > 0


def test_loss_of_the_model() -> None:
    """Given labels, the model computes its loss by a function: that is recorded, too."""
    model, inputs, y = build("bert", training=False, attention="sdpa")
    problem = (Called(copy.deepcopy(model), inputs), Loss(), inputs["input_ids"], y)
    extend(model, use_converter="record")
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        model(**{**inputs, "labels": y}).loss.backward()
    for field in ("grad_batch", "diag_ggn_exact"):
        check(oracle.trainable(model), field, TRUTHS[field](*problem), 0.0)


@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
def test_transposed_linear_layer(shape: tuple[int, ...]) -> None:
    """The layer of GPT-2 has every quantity of a Linear, with the weight's axes exchanged."""
    torch.manual_seed(0)
    layer = transformers.pytorch_utils.Conv1D(4, 3)
    twin = nn.Linear(3, 4)
    with torch.no_grad():
        layer.bias.normal_()
        twin.weight.copy_(layer.weight.T)
        twin.bias.copy_(layer.bias)
    head = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)).double()
    X, y = torch.randn(N, *shape, dtype=torch.float64), torch.randint(CLASSES, (N,))
    head(layer.double()(X))
    transposed = [
        *(extensions.BatchGrad, extensions.SumGradSquared, extensions.Variance),
        *(extensions.DiagGGNExact, extensions.BatchDiagGGNExact, extensions.SqrtGGNExact),
        extensions.DiagHessian,
    ]
    reversed_order = [extensions.KFLR, extensions.KFRA, extensions.KFAC]
    for first in (layer, twin.double()):
        torch.manual_seed(1)
        model = extend(nn.Sequential(first, copy.deepcopy(head)))
        loss = extend(nn.CrossEntropyLoss())(model(X), y)
        with backpack(
            *(ext() for ext in (*transposed, *reversed_order)),
            extensions.BatchL2Grad(),
            extensions.HMP(),
        ):
            loss.backward()
    p, q = layer.weight, twin.weight
    for ext in transposed:
        field = ext().savefield
        torch.testing.assert_close(getattr(p, field), getattr(q, field).mT)
    torch.testing.assert_close(p.batch_l2, q.batch_l2)
    for ext in reversed_order:
        field = ext().savefield
        torch.testing.assert_close(getattr(p, field), getattr(q, field)[::-1])
    vectors = torch.randn(2, *p.shape, dtype=p.dtype)
    torch.testing.assert_close(p.hmp(vectors), q.hmp(vectors.mT).mT)
    torch.testing.assert_close(layer.bias.kflr, twin.bias.kflr)

"""Models of libraries whose forward passes move their samples: gradients of each sample.

They merge the batch with tokens, windows or patches, put it second, or send tokens to experts.
The truth is a loop over samples with plain autograd in float64. Kronecker factors of what layers
read are those of rows that hooks have seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from rearranging import ROUTES, Outcome, first_order, is_on_purpose, signs_in, told_by_library
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack import backpack, extend, extensions

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
timm = pytest.importorskip("timm.models", reason="timm is not installed")
torchvision = pytest.importorskip("torchvision.models", reason="torchvision is not installed")

N, T, WORDS, CLASSES = 3, 5, 11, 2
# Models that compute their normalisation or softmax in float32, whatever their own dtype is.
FLOAT32 = 2e-5


@dataclass(frozen=True)
class Model:
    """A model and how it is called.

    Attributes:
        make: Build it.
        inputs: Make the keyword arguments of ``forward``, the samples first.
        rounding: Error, relative to the largest entry, of the model's own rounding.
        plain: Whether it is run without the converter, too.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    rounding: float = 1e-7
    plain: bool = False

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the model in float64, without anything random, and its arguments."""
        torch.manual_seed(0)
        model = self.make().double().eval()
        if isinstance(model, transformers.PreTrainedModel):
            model.set_attn_implementation("eager")
            model.set_experts_implementation("eager")  # the others want low precision
        with torch.no_grad():
            for p in model.parameters():  # make what starts at zero matter
                p.add_(0.1 * torch.randn_like(p))
        return model, self.inputs()


def words() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (N, T))}


def padded() -> dict[str, Tensor]:
    """Sentences of different lengths."""
    mask = (torch.arange(T) < torch.tensor([[T], [T - 1], [T - 2]])).long()
    return {"input_ids": words()["input_ids"] * mask, "attention_mask": mask}


def translation() -> dict[str, Tensor]:
    return {**words(), "decoder_input_ids": torch.randint(3, WORDS, (N, T - 1))}


def ended() -> dict[str, Tensor]:
    """Sentences with the token of their end."""
    ids = words()["input_ids"]
    ids[:, -1] = LANGUAGE["eos_token_id"]
    return {"input_ids": ids}


def images(size: int, name: str = "x", channels: int = 1) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(N, channels, size, size, dtype=torch.float64)}


LANGUAGE = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {
    **{"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 6, "max_position_embeddings": T + 2},
}
NO_DROPOUT = {
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0},
    **{"attention_dropout": 0.0},
}
BERT = {**LANGUAGE, **WIDTHS, **NO_DROPOUT}
GPT2 = {**LANGUAGE, "n_positions": T + 2, "n_embd": 8, "n_layer": 1, "n_head": 2}
OPT = {**BERT, "ffn_dim": 6, "word_embed_proj_dim": 8}
BART = {
    **{**LANGUAGE, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 6},
    **{"decoder_ffn_dim": 6, "max_position_embeddings": T + 2},
}
XLNET = {**LANGUAGE, "d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 6, "dropout": 0.0}
DEBERTA = {
    **{**BERT, "num_hidden_layers": 1, "relative_attention": True},
    "pos_att_type": ["c2p", "p2c"],
}
LLAMA = {**LANGUAGE, **WIDTHS, "num_key_value_heads": 1}
EXPERTS = {**LLAMA, "num_hidden_layers": 1, "num_experts_per_tok": 2}
MIXTRAL = {**EXPERTS, "num_local_experts": 3}
QWEN2 = {
    **{**EXPERTS, "num_experts": 3, "moe_intermediate_size": 4, "decoder_sparse_step": 1},
    "shared_expert_intermediate_size": 4,
}
SWIN = {
    **{"image_size": 8, "patch_size": 2, "num_channels": 1, "embed_dim": 4, "depths": [2, 1]},
    **{"num_heads": [1, 2], "window_size": 2, "drop_path_rate": 0.0},
}


def of_transformers(family: str, config: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    """Build a model of transformers."""

    def make() -> nn.Module:
        same = {"num_labels": CLASSES, **options}
        return getattr(transformers, family)(getattr(transformers, config)(**same))

    return make


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Build a model of timm."""
    return lambda: getattr(timm, name)(in_chans=1, num_classes=CLASSES, **options)


TIMM_SWIN = {
    **{"img_size": 8, "patch_size": 2, "window_size": 2, "embed_dim": 4, "depths": (2, 1)},
    **{"num_heads": (1, 2), "drop_path_rate": 0.0},
}


def timm_maxvit() -> nn.Module:
    parts = timm.maxxvit
    cfg = parts.MaxxVitCfg(
        embed_dim=(4, 4),
        depths=(1, 1),
        block_type=("M", "M"),
        stem_width=4,
        transformer_cfg=parts.MaxxVitTransformerCfg(dim_head=2, window_size=2, expand_ratio=2.0),
        conv_cfg=parts.MaxxVitConvCfg(expand_ratio=1.0),
    )
    return timm.MaxxVit(cfg, img_size=16, in_chans=1, num_classes=CLASSES)


def timm_mobilevit() -> nn.Module:
    parts = timm.byobnet
    block = parts.ByoBlockCfg
    wide = {"transformer_dim": 4, "transformer_depth": 1, "patch_size": 2, "num_heads": 2}
    mobile = {"mlp_ratio": 1.0, **wide}
    cfg = parts.ByoModelCfg(
        blocks=(
            block(type="bottle", d=1, c=4, s=1, gs=1, br=1.0),
            (
                block(type="bottle", d=1, c=4, s=2, gs=1, br=1.0),
                block(type="mobilevit", d=1, c=4, s=1, block_kwargs=mobile),
            ),
        ),
        **{"stem_chs": 4, "stem_type": "3x3", "stem_pool": "", "downsample": ""},
        **{"act_layer": "silu", "num_features": 8},
    )
    return timm.ByobNet(cfg, in_chans=1, num_classes=CLASSES)


def torchvision_swin(**block: Any) -> nn.Module:
    return torchvision.SwinTransformer(
        **{"patch_size": [2, 2], "embed_dim": 4, "depths": [2, 1], "num_heads": [1, 2]},
        **{"window_size": [2, 2], "num_classes": CLASSES, "stochastic_depth_prob": 0.0, **block},
    )


def torchvision_maxvit() -> nn.Module:
    return torchvision.MaxVit((16, 16), 4, 2, [4, 4], [1, 1], 2, 0.0, num_classes=CLASSES)


SWIN_V2 = {
    "block": torchvision.swin_transformer.SwinTransformerBlockV2,
    "downsample_layer": torchvision.swin_transformer.PatchMergingV2,
}

T5 = {**LANGUAGE, "d_model": 8, "d_kv": 4, "d_ff": 6, "num_layers": 1, "num_heads": 2}
YOLOS = {
    **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": [8, 8]},
    **{"intermediate_size": 6, "patch_size": 4, "num_channels": 1, "num_detection_tokens": 2},
}
PERCEIVER = {
    **{"num_latents": 3, "d_latents": 8, "d_model": 6, "num_blocks": 1},
    **{"num_self_attends_per_block": 1, "num_self_attention_heads": 2},
    **{"num_cross_attention_heads": 2, "num_labels": CLASSES},
}


def perceiver() -> nn.Module:
    config = transformers.PerceiverConfig(**PERCEIVER)
    parts = transformers.models.perceiver.modeling_perceiver
    decoder = parts.PerceiverClassificationDecoder(
        config,
        num_channels=8,
        trainable_position_encoding_kwargs={"num_channels": 8, "index_dims": 1},
        num_heads=2,
    )
    return transformers.PerceiverModel(config, decoder=decoder)


MODELS: dict[str, Model] = {
    "opt": Model(of_transformers("OPTForCausalLM", "OPTConfig", OPT), padded),
    "opt_sequence": Model(of_transformers("OPTForSequenceClassification", "OPTConfig", OPT), words),
    "swin": Model(
        of_transformers("SwinForImageClassification", "SwinConfig", SWIN),
        images(8, "pixel_values"),
    ),
    "bart": Model(of_transformers("BartForConditionalGeneration", "BartConfig", BART), translation),
    "bart_sequence": Model(
        of_transformers("BartForSequenceClassification", "BartConfig", BART), ended
    ),
    "xlnet": Model(of_transformers("XLNetForSequenceClassification", "XLNetConfig", XLNET), padded),
    "xlnet_tokens": Model(
        of_transformers("XLNetForTokenClassification", "XLNetConfig", XLNET), words
    ),
    "deberta": Model(
        of_transformers("DebertaForSequenceClassification", "DebertaConfig", DEBERTA),
        padded,
        FLOAT32,
    ),
    "mixtral": Model(
        of_transformers("MixtralForCausalLM", "MixtralConfig", MIXTRAL), words, FLOAT32
    ),
    "qwen2_moe": Model(
        of_transformers("Qwen2MoeForCausalLM", "Qwen2MoeConfig", QWEN2), words, FLOAT32
    ),
    "phi3": Model(of_transformers("Phi3ForCausalLM", "Phi3Config", LLAMA), words, FLOAT32),
    "gpt2": Model(
        of_transformers("GPT2ForSequenceClassification", "GPT2Config", GPT2), words, plain=True
    ),
    "gpt2_lm": Model(of_transformers("GPT2LMHeadModel", "GPT2Config", GPT2), padded, plain=True),
    "bert": Model(
        of_transformers("BertForSequenceClassification", "BertConfig", BERT), padded, plain=True
    ),
    "bert_tokens": Model(
        of_transformers("BertForTokenClassification", "BertConfig", BERT), words, plain=True
    ),
    "t5": Model(
        of_transformers("T5ForConditionalGeneration", "T5Config", T5), translation, FLOAT32
    ),
    "yolos": Model(
        of_transformers("YolosForObjectDetection", "YolosConfig", YOLOS), images(8, "pixel_values")
    ),
    "perceiver": Model(perceiver, lambda: {"inputs": torch.randn(N, T, 6, dtype=torch.float64)}),
    "timm_swin": Model(of_timm("SwinTransformer", **TIMM_SWIN), images(8)),
    "timm_swinv2": Model(of_timm("SwinTransformerV2", **TIMM_SWIN), images(8)),
    "timm_maxvit": Model(timm_maxvit, images(16)),
    "timm_mobilevit": Model(timm_mobilevit, images(16)),
    "timm_xcit": Model(
        of_timm("Xcit", img_size=16, patch_size=8, embed_dim=8, depth=1, num_heads=2), images(16)
    ),
    "torchvision_swin": Model(torchvision_swin, images(8, channels=3)),
    "torchvision_swinv2": Model(partial(torchvision_swin, **SWIN_V2), images(8, channels=3)),
    "torchvision_maxvit": Model(torchvision_maxvit, images(16, channels=3)),
}


# --- What they compute ----------------------------------------------------------------------------


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Call a model as its users do."""
    output = model(**inputs)
    return output if isinstance(output, Tensor) else output["logits"]


def sample(inputs: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    """Return a batch of one sample, twice: a mean over it is that of the sample.

    Of a batch of one, torch computes another gradient of Xcit than finite differences do.
    """
    return {name: x[[n, n]] for name, x in inputs.items()}


def loss_of(f: Tensor, y: Tensor, lossfunc: nn.Module) -> Tensor:
    """Average over samples, and tokens if there are some: the loss as users write it."""
    return lossfunc(f.view(-1, f.size(-1)), y.view(-1))


def targets(f: Tensor) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(f.shape[-1], f.shape[:-1])


def individual_gradients(name: str) -> dict[str, Tensor]:
    """Return the gradient of each sample's part of the loss: [N, *p]."""
    model, inputs = MODELS[name].build()
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    y = targets(logits(model, inputs))
    rows = []
    for n in range(N):
        f = logits(model, sample(inputs, n))
        loss = loss_of(f, y[[n, n]], nn.CrossEntropyLoss()) / N
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        rows.append(
            [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(params.values(), grads, strict=True)
            ]
        )
    return {n: torch.stack(g) for n, g in zip(params, zip(*rows, strict=True), strict=True)}


def diagonals(name: str) -> dict[str, Tensor]:
    """Return the diagonal of the GGN from each sample's Jacobian: [*p]."""
    model, inputs = MODELS[name].build()
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    result = {n: torch.zeros_like(p) for n, p in params.items()}
    for n in range(N):
        f = logits(model, sample(inputs, n)).flatten(0, -2)
        probs = f.detach().softmax(-1)
        H = (torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]) / (N * len(f))
        for i, row in enumerate(f):
            J = [
                torch.autograd.grad(
                    entry, list(params.values()), retain_graph=True, allow_unused=True
                )
                for entry in row
            ]
            for k, (key, p) in enumerate(params.items()):
                if J[0][k] is not None:
                    stacked = torch.stack([grads[k] for grads in J]).flatten(1)
                    diagonal = torch.einsum("cp,cd,dp->p", stacked, H[i], stacked)
                    result[key] += diagonal.reshape(p.shape)
    return result


# Layers whose inputs are rows, or numbers of rows, of a matrix.
OF_ROWS = (nn.Linear, nn.Embedding, transformers.pytorch_utils.Conv1D)


def rows_of_layers(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """List what each layer reads: [rows, entries of a row]."""
    found: dict[str, list[Tensor]] = {}

    def see(name: str, layer: Any, x: Tensor) -> None:
        if isinstance(layer, nn.Embedding):
            numbers = x[x != layer.padding_idx] if layer.padding_idx is not None else x
            x = nn.functional.one_hot(numbers, layer.num_embeddings).double()
        found.setdefault(name, []).append(x.detach().reshape(-1, x.shape[-1]))

    hooks = [
        layer.register_forward_hook(lambda layer, args, _, name=name: see(name, layer, args[0]))
        for name, layer in model.named_modules()
        if type(layer) in OF_ROWS
    ]
    logits(model, inputs)
    for hook in hooks:
        hook.remove()
    return found


def input_factors(name: str) -> dict[str, Tensor]:
    """Return the mean over samples of A = sum of a aᵀ over rows, of layers that are called once.

    As many rows for more samples are read by all samples.
    """
    model, inputs = MODELS[name].build()
    rows = rows_of_layers(model, inputs)
    twice = rows_of_layers(model, {key: torch.cat([x, x]) for key, x in inputs.items()})
    weights = [p for _, p in model.named_parameters(remove_duplicate=False)]
    result = {}
    for layer, (x, *others) in rows.items():
        weight = model.get_parameter(f"{layer}.weight")
        if not others and sum(p is weight for p in weights) == 1:
            of_samples = len(twice[layer][0]) == 2 * len(x)
            result[f"{layer}.weight"] = x.T @ x / (N if of_samples else 1)
    return result


def run(name: str, route: Any, *exts: Any) -> nn.Module:
    """Run a model with the library; return it with its results."""
    model, inputs = MODELS[name].build()
    extended = extend(model, use_converter=route)
    lossfunc = extend(nn.CrossEntropyLoss())
    f = logits(extended, inputs)
    torch.manual_seed(1)
    loss = loss_of(f, targets(f), lossfunc)
    with backpack(*(ext() for ext in exts)):
        loss.backward()
    return model


FIRST = (
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.SumGradSquared,
    extensions.Variance,
)


def first_order_outcome(name: str, route: Any) -> Outcome:
    """Compare first-order quantities with the truth."""
    with told_by_library() as told:
        try:
            model = run(name, route, *FIRST)
        except Exception as error:
            kind = "refused" if is_on_purpose(error) else "crash"
            return Outcome(kind, f"{type(error).__name__}: {error}")
    kind = "refused" if signs_in(told) else "wrong"
    for key, grads in individual_gradients(name).items():
        p = model.get_parameter(key)
        if p.grad is None:
            assert not grads.any()
            continue
        for savefield, expected in first_order(grads).items():
            mine = getattr(p, savefield, None)
            if mine is None or mine.shape != expected.shape:
                shape = None if mine is None else list(mine.shape)
                return Outcome(kind, f"{savefield} of {key}: shape {shape}; {signs_in(told)}")
            scale = float(expected.abs().max())
            if not torch.allclose(
                mine, expected, rtol=0, atol=MODELS[name].rounding * max(scale, 1e-6)
            ):
                off = float((mine - expected).abs().max()) / max(scale, 1e-300)
                return Outcome(kind, f"{savefield} of {key}: {off:.1g} off; {signs_in(told)}")
    return Outcome("right")


def second_order_outcome(name: str, route: Any) -> Outcome:
    """Compare the diagonal of the GGN, and run KFAC."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = run(name, route, extensions.DiagGGNExact, extensions.KFAC)
        except Exception as error:
            kind = "refused" if is_on_purpose(error) else "crash"
            return Outcome(kind, f"{type(error).__name__}: {error}")
    for key, expected in diagonals(name).items():
        p = model.get_parameter(key)
        if p.grad is None:
            continue
        scale = float(expected.abs().max())
        atol = 2 * MODELS[name].rounding * max(scale, 1e-6)
        if not torch.allclose(p.diag_ggn_exact, expected, rtol=0, atol=atol):
            off = float((p.diag_ggn_exact - expected).abs().max()) / max(scale, 1e-300)
            return Outcome("wrong", f"diag_ggn_exact of {key}: {off:.1g} off")
    return Outcome("right")


# --- The tests ------------------------------------------------------------------------------------


def cases(*routes: str) -> list[tuple[str, str]]:
    """Return names of models and routes."""
    return [
        (name, route)
        for name, model in MODELS.items()
        for route in routes
        if model.plain or route != "plain"
    ]


@pytest.fixture(autouse=True)
def differentiable_attention() -> Iterator[None]:
    """Jacobians need attention that can be differentiated again."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.parametrize(("name", "route"), cases("auto", "record"))
def test_individual_gradients(name: str, route: str) -> None:
    assert first_order_outcome(name, ROUTES[route]) == Outcome("right")


@pytest.mark.parametrize(("name", "route"), cases("plain"))
def test_without_the_converter(name: str, route: str) -> None:
    """A table of positions has no samples, and only a function would say where it meets them."""
    outcome = first_order_outcome(name, ROUTES[route])
    assert outcome.kind in ("right", "refused"), outcome.reason


@pytest.mark.parametrize(("name", "route"), cases("record"))
def test_second_order(name: str, route: str) -> None:
    outcome = second_order_outcome(name, ROUTES[route])
    assert outcome.kind in ("right", "refused"), outcome.reason


@pytest.mark.parametrize(("name", "route"), cases("auto", "record"))
def test_kronecker_factors_of_inputs(name: str, route: str) -> None:
    """Tables count once for all samples, positions and queries of each sample once for each."""
    model = run(name, ROUTES[route], extensions.KFAC)
    expected = input_factors(name)
    assert expected
    for key, factor in expected.items():
        p = model.get_parameter(key)
        if p.grad is None:
            continue
        is_first = not isinstance(model.get_submodule(key.rpartition(".")[0]), nn.Linear)
        found = p.kfac[0 if is_first else 1]
        found = found.diag() if found.dim() == 1 else found
        torch.testing.assert_close(
            found, factor, rtol=0, atol=MODELS[name].rounding * max(1.0, float(factor.abs().max()))
        )

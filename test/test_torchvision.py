"""One model of each family in torchvision, converted: quantities against plain autograd, float64.

Forward passes of all models are in test_converter.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.utils.kroneckers import kfacs_to_mat

models = pytest.importorskip("torchvision.models")

CLASSES = 3


def narrow(model: Any) -> Any:
    """Pool AlexNet and VGG to one pixel: their fully connected layers are most of the time."""
    layers = [i for i, m in enumerate(model.classifier) if isinstance(m, nn.Linear)]
    sizes = [model.classifier[layers[0]].in_features // model.avgpool.output_size[0] ** 2, 16, 16]
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    for k, i in enumerate(layers):
        model.classifier[i] = nn.Linear(sizes[k], [*sizes, CLASSES][k + 1])
    return model


def as_is(model: nn.Module) -> nn.Module:
    return model


def shallow(name: str) -> nn.Module:
    """Build the large families with few and narrow blocks."""
    swin: dict[str, Any] = {
        **{"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]},
        **{"window_size": [4, 4], "num_classes": CLASSES},
    }
    blocks = [models.convnext.CNBlockConfig(8, 16, 2), models.convnext.CNBlockConfig(16, None, 1)]
    fused = models.efficientnet.FusedMBConvConfig(2, 3, 1, 8, 8, 2)
    usual = models.efficientnet.MBConvConfig(4, 3, 2, 8, 16, 2)
    bottleneck = models.resnet.Bottleneck
    make: dict[str, Callable[[], nn.Module]] = {
        "resnext": lambda: models.ResNet(
            bottleneck, [1, 1, 1, 1], CLASSES, groups=32, width_per_group=1
        ),
        "wide_resnet": lambda: models.ResNet(bottleneck, [1, 1, 1, 1], CLASSES, width_per_group=32),
        "efficientnet_v2": lambda: models.EfficientNet(
            [fused, usual], 0.2, num_classes=CLASSES, last_channel=32
        ),
        "convnext": lambda: models.ConvNeXt(blocks, num_classes=CLASSES),
        "vit": lambda: models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=CLASSES),
        "swin": lambda: models.SwinTransformer(**swin),
        "swin_v2": lambda: models.SwinTransformer(
            **swin,
            block=models.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=models.swin_transformer.PatchMergingV2,
        ),
        "maxvit": lambda: models.MaxVit(
            (64, 64), 8, 4, [8, 16], [1, 1], 4, 0.0, num_classes=CLASSES
        ),
    }
    return make[name]()


# name, size of the image, options, change of the model
FAMILIES: list[tuple[str, int, dict[str, Any], Callable[[Any], Any]]] = [
    ("alexnet", 63, {}, narrow),
    ("vgg11_bn", 32, {}, narrow),
    ("resnet18", 32, {}, as_is),
    ("resnext", 32, {}, as_is),
    ("wide_resnet", 32, {}, as_is),
    ("densenet121", 32, {}, as_is),
    ("googlenet", 32, {"init_weights": True}, as_is),
    ("inception_v3", 75, {"init_weights": True}, as_is),
    ("mobilenet_v2", 32, {}, as_is),
    ("mobilenet_v3_small", 32, {}, as_is),
    ("shufflenet_v2_x0_5", 32, {}, as_is),
    ("squeezenet1_1", 31, {}, as_is),
    ("efficientnet_b0", 32, {}, as_is),
    ("efficientnet_v2", 32, {}, as_is),
    ("regnet_y_400mf", 32, {}, as_is),
    ("mnasnet0_5", 32, {}, as_is),
    ("convnext", 32, {}, as_is),
    ("vit", 32, {}, as_is),
    ("swin", 32, {}, as_is),
    ("swin_v2", 32, {}, as_is),
    ("maxvit", 64, {}, as_is),
]


def factor(f: Tensor) -> Tensor:
    """Return S with ``S Sᵀ`` the Hessian of the mean cross entropy: [N, C, V]."""
    p = f.softmax(1)
    return (p.sqrt().diag_embed() - p.unsqueeze(2) * p.sqrt().unsqueeze(1)) / len(f) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "options", "change"), FAMILIES, ids=[name for name, *_ in FAMILIES]
)
def test_quantities_of_a_family(
    name: str, size: int, options: dict[str, Any], change: Callable[[Any], Any]
) -> None:
    torch.manual_seed(0)
    if name in models.list_models(module=models):
        model = change(models.get_model(name, weights=None, num_classes=CLASSES, **options))
    else:
        model = shallow(name)
    model = model.eval().double()
    for p in model.parameters():  # make layer scales and the like matter
        if p.abs().max() < 1e-3:
            nn.init.normal_(p, std=0.2)
    X, y = torch.randn(2, 3, size, size, dtype=torch.float64), torch.tensor([0, 2])

    # the truth, from the model as it is
    f = model(X)
    S = factor(f.detach())
    g = f.detach().softmax(1)
    g[range(2), y] -= 1
    params = [p for p in model.parameters() if p.requires_grad]
    options_ = {"retain_graph": True, "allow_unused": True}
    rows = [
        [torch.autograd.grad(f[n, c], params, **options_) for c in range(CLASSES)] for n in range(2)
    ]

    converted = extend(model, use_converter=True)
    lossfunc = extend(nn.CrossEntropyLoss())
    out = converted(X)
    torch.testing.assert_close(out, f)
    exts = [
        extensions.BatchGrad(),
        extensions.DiagGGNExact(),
        extensions.DiagGGNMC(),
        extensions.KFAC(),
    ]
    with backpack(*exts):
        lossfunc(out, y).backward()

    assert [id(p) for p in converted.parameters()] == [id(p) for p in model.parameters()]
    for i, p in enumerate(params):
        jacobian = [
            torch.stack([row[i] for row in rows[n]]) for n in range(2) if rows[n][0][i] is not None
        ]
        if not jacobian:  # auxiliary classifiers are not used in evaluation mode
            assert p.grad is None
            continue
        grads = torch.stack([torch.tensordot(g[n], jacobian[n], 1) / 2 for n in range(2)])
        scale = grads.abs().max()
        torch.testing.assert_close(p.grad_batch, grads, rtol=1e-6, atol=float(1e-9 * scale))
        diagonal = sum(torch.tensordot(S[n].T, jacobian[n], 1).square().sum(0) for n in range(2))
        bound = float(1e-9 * diagonal.max())
        torch.testing.assert_close(p.diag_ggn_exact, diagonal, rtol=1e-6, atol=bound)
        assert p.diag_ggn_mc.shape == p.shape
        assert torch.isfinite(p.diag_ggn_mc).all()
        sizes = [len(block) for block in p.kfac]
        assert torch.Size(sizes).numel() == p.numel()
        for block in p.kfac:
            assert torch.isfinite(block).all()
            torch.testing.assert_close(block, block.T)
        if len(p.kfac) == 1 and p.numel() <= 64:
            kfac = kfacs_to_mat(p.kfac).diagonal().reshape(p.shape)
            torch.testing.assert_close(kfac, p.diag_ggn_mc, rtol=1e-6, atol=bound)

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
    """Make the wide fully connected layers of AlexNet and VGG narrow: they are most of the time."""
    layers = [i for i, m in enumerate(model.classifier) if isinstance(m, nn.Linear)]
    sizes = [model.classifier[layers[0]].in_features, 16, 16, CLASSES]
    for k, i in enumerate(layers):
        model.classifier[i] = nn.Linear(sizes[k], sizes[k + 1])
    return model


def as_is(model: nn.Module) -> nn.Module:
    return model


# name, size of the image, options, change of the model
FAMILIES: list[tuple[str, int, dict[str, Any], Callable[[Any], Any]]] = [
    ("alexnet", 63, {}, narrow),
    ("vgg11_bn", 32, {}, narrow),
    ("resnet18", 32, {}, as_is),
    ("resnext50_32x4d", 32, {}, as_is),
    ("wide_resnet50_2", 32, {}, as_is),
    ("densenet121", 32, {}, as_is),
    ("googlenet", 32, {"init_weights": True}, as_is),
    ("inception_v3", 75, {"init_weights": True}, as_is),
    ("mobilenet_v2", 32, {}, as_is),
    ("mobilenet_v3_small", 32, {}, as_is),
    ("shufflenet_v2_x0_5", 32, {}, as_is),
    ("squeezenet1_1", 31, {}, as_is),
    ("efficientnet_b0", 32, {}, as_is),
    ("efficientnet_v2_s", 32, {}, as_is),
    ("regnet_y_400mf", 32, {}, as_is),
    ("mnasnet0_5", 32, {}, as_is),
    ("convnext_tiny", 32, {}, as_is),
    ("vit_b_32", 64, {"image_size": 64}, as_is),
    ("swin_t", 32, {}, as_is),
    ("swin_v2_t", 32, {}, as_is),
    ("maxvit_t", 224, {}, as_is),
]


def factor(f: Tensor) -> Tensor:
    """Return S with ``S Sᵀ`` the Hessian of the mean cross entropy: [N, C, V]."""
    p = f.softmax(1)
    return (p.sqrt().diag_embed() - p.unsqueeze(2) * p.sqrt().unsqueeze(1)) / len(f) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "options", "change"), FAMILIES, ids=lambda x: str(x))
def test_quantities_of_a_family(
    name: str, size: int, options: dict[str, Any], change: Callable[[Any], Any]
) -> None:
    torch.manual_seed(0)
    model = change(models.get_model(name, weights=None, num_classes=CLASSES, **options))
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

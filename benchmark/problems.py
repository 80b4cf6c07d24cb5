"""What is measured: models, their data, and the quantities that make sense for them.

Models are written once, in plain torch. What libraries spell differently (a recurrent layer, the
choice of an element of a tuple) is passed in as :class:`Layers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from benchmark.quantities import CORE, EVERY, FIRST, NONE, PIECEWISE_LINEAR, PRODUCTS, SCALED


class ReduceTuple(nn.Module):
    """Pick an element of a tuple, for libraries without such a module."""

    def __init__(self, index: int = 0):
        super().__init__()
        self.index = index

    def forward(self, input: tuple[Tensor, ...]) -> Tensor:
        return input[self.index]


class Permute(nn.Module):
    """Reorder axes, for libraries without such a module."""

    def __init__(self, *dims: int):
        super().__init__()
        self.dims = dims

    def forward(self, input: Tensor) -> Tensor:
        return input.permute(self.dims)


class LoopLSTM(nn.LSTM):
    """The same layer as a loop over time, for ``torch.func``, which cannot look into the kernel."""

    def forward(self, input: Tensor, hx: None = None) -> tuple[Tensor]:
        h = c = input.new_zeros(len(input), self.hidden_size)
        outputs = []
        for x in (input @ self.weight_ih_l0.T + self.bias_ih_l0).unbind(1):
            i, f, g, o = (x + h @ self.weight_hh_l0.T + self.bias_hh_l0).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return (torch.stack(outputs, 1),)


@dataclass(frozen=True)
class Layers:
    """The layers that libraries spell differently."""

    LSTM: Callable[..., nn.Module] = nn.LSTM
    ReduceTuple: Callable[[int], nn.Module] = ReduceTuple
    Permute: Callable[..., nn.Module] = Permute


# models


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), activation()]
    return nn.Sequential(*layers[:-1])


def cnn_3c3d(classes: int) -> nn.Module:
    def pool() -> list[nn.Module]:
        return [nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)]

    convolutions = [nn.Conv2d(3, 64, 5), *pool(), nn.Conv2d(64, 96, 3), *pool()]
    convolutions += [nn.ZeroPad2d(1), nn.Conv2d(96, 128, 3), *pool(), nn.Flatten()]
    return nn.Sequential(*convolutions, *mlp(1152, 512, 256, classes))


def all_cnn_c(classes: int) -> nn.Module:
    # channels, kernel, stride
    spec = [(96, 3, 1), (96, 3, 1), (96, 3, 2), (192, 3, 1), (192, 3, 1), (192, 3, 2)]
    spec += [(192, 3, 1), (192, 1, 1), (classes, 1, 1)]
    layers: list[nn.Module] = []
    channels = 3
    for out, kernel, stride in spec:
        layers += [nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2), nn.ReLU()]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def small_cnn(activation: type[nn.Module], classes: int) -> nn.Module:
    """Two convolutions and a dense layer on 16×16 images."""
    layers = [nn.Conv2d(1, 8, 3, stride=2), activation(), nn.Conv2d(8, 16, 3, stride=2)]
    return nn.Sequential(*layers, activation(), nn.Flatten(), nn.Linear(144, classes))


def narrowing_cnn(classes: int) -> nn.Module:
    """Padded convolutions to 2×2 positions, and a dense layer."""
    layers: list[nn.Module] = []
    for channels, out in pairwise((3, 32, 64, 64)):
        layers += [nn.ZeroPad2d(1), nn.Conv2d(channels, out, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, classes))


def decoder(classes: int) -> nn.Module:
    """Transposed convolutions from 2×2 positions."""
    return nn.Sequential(
        nn.Linear(16, 512),
        nn.Unflatten(1, (128, 2, 2)),
        nn.ConvTranspose2d(128, 64, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 3, 4, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(192, classes),
    )


def char_lstm(layers: Layers, vocabulary: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        layers.LSTM(vocabulary, hidden, batch_first=True),
        layers.ReduceTuple(0),
        layers.LSTM(hidden, hidden, batch_first=True),
        layers.ReduceTuple(0),
        nn.Linear(hidden, vocabulary),
        layers.Permute(0, 2, 1),
    )


class WideBlock(nn.Module):
    """Two convolutions with pre-activation and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(out)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.shortcut = None
        if channels != out:
            self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        x = self.relu1(self.norm1(input))
        shortcut = input if self.shortcut is None else self.shortcut(x)
        return shortcut + self.conv2(self.relu2(self.norm2(self.conv1(x))))


def wide_resnet(depth: int, width: int, classes: int) -> nn.Module:
    """Zagoruyko & Komodakis, 2016."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    channels = 16
    for stage in range(3):
        out = 16 * width * 2**stage
        for block in range((depth - 4) // 6):
            layers.append(WideBlock(channels, out, 2 if stage and not block else 1))
            channels = out
    head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(channels, classes))


def resnet18(classes: int) -> nn.Module:
    from torchvision.models import resnet18 as make

    return make(weights=None, num_classes=classes)


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.split = (heads, width // heads)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)

    def forward(self, input: Tensor) -> Tensor:
        q = self.query(input).unflatten(2, self.split).transpose(1, 2)
        k = self.key(input).unflatten(2, self.split).transpose(1, 2)
        v = self.value(input).unflatten(2, self.split).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(x.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Pre-normalisation, attention and two dense layers."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.dense1, self.dense2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = nn.GELU()

    def forward(self, input: Tensor) -> Tensor:
        x = input + self.attention(self.norm1(input))
        return x + self.dense2(self.gelu(self.dense1(self.norm2(x))))


class Transformer(nn.Module):
    """Predicts the next token at each position. Positions are encoded by sines."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        angles = torch.arange(length)[:, None] * rates
        self.register_buffer("position", torch.cat([angles.sin(), angles.cos()], 1))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, input: Tensor) -> Tensor:
        x = self.blocks(self.embedding(input) + self.position)
        return self.head(self.norm(x)).transpose(1, 2)


def many_layers(classes: int) -> nn.Module:
    """Layers on images that no other problem has."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.PReLU(8),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 8, 3, stride=2),
        nn.ReflectionPad2d(1),
        nn.GLU(1),
        nn.Conv2d(4, 8, 3, stride=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.LogSigmoid(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.LogSoftmax(1),
        nn.Flatten(),
        nn.Linear(8 * 12 * 12, 64),
        nn.Softmax(1),
        nn.Linear(64, classes),
    )


def gated_mlp(width: int, classes: int) -> nn.Module:
    """Gated linear units, and log-probabilities."""
    layers = [nn.Linear(width, 2 * width), nn.GLU(), nn.Linear(width, 2 * width), nn.GLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes), nn.LogSoftmax(1))


class OwnGate(nn.Module):
    """A layer that users have written, without a rule: a gated residual connection."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, width, width) / width**0.5)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, input: Tensor) -> Tensor:
        value, gate = (input @ weight for weight in self.weight)
        return input + self.scale * value * gate.sigmoid()


def pooling_cnn(classes: int) -> nn.Module:
    """Two convolutions on 12×12 images, each with maximum pooling."""
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, classes))


def deep_cnn(depth: int, classes: int) -> nn.Module:
    """Padded convolutions of as many positions, whose outputs take more than all else."""
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Conv2d(16 if i else 3, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(256, classes))


def hourglass(classes: int) -> nn.Module:
    """Convolutions by channel and by position, down to 4×4 positions and up again."""

    def separable(channels: int, out: int, stride: int = 1) -> list[nn.Module]:
        each = nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels)
        return [each, nn.Conv2d(channels, out, 1), nn.ReLU()]

    down = [*separable(3, 16, 2), *separable(16, 32, 2)]
    up = [nn.Upsample(scale_factor=2, mode="bilinear"), *separable(32, 16)]
    up += [nn.Upsample(scale_factor=2), *separable(16, 8)]
    return nn.Sequential(*down, *up, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(128, classes))


class GatedBlock(nn.Module):
    """As written by hand: attention by matrix products, and a gated layer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.split = (3, heads, width // heads)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.softmax, self.glu = nn.Softmax(-1), nn.GLU(-1)
        self.dense1, self.dense2 = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, input: Tensor) -> Tensor:
        projected = self.project(self.norm1(input)).unflatten(2, self.split)
        q, k, v = (projected[:, :, i].transpose(1, 2) for i in range(3))
        scores = torch.matmul(q, k.transpose(2, 3)) / self.split[2] ** 0.5
        x = torch.matmul(self.softmax(scores), v)
        x = input + self.merge(x.transpose(1, 2).flatten(2))
        return x + self.dense2(self.glu(self.dense1(self.norm2(x))))


class Classifier(nn.Module):
    """Reads a sequence, and says something about it at its first token."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(GatedBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, classes)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(input)))[:, 0])


class TiedTransformer(nn.Module):
    """One block for all depths, and one matrix for the first and the last layer."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int):
        super().__init__()
        self.depth, self.block = depth, TransformerBlock(width, heads)
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input: Tensor) -> Tensor:
        x = self.embedding(input)
        for _ in range(self.depth):
            x = self.block(x)
        return self.head(self.norm(x)).transpose(1, 2)


class ManyLayersOfTokens(nn.Module):
    """Layers on sequences that no other problem has."""

    def __init__(self, vocabulary: int, width: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.bilinear, self.head = nn.Bilinear(width, width, width), nn.Linear(width, vocabulary)

    def forward(self, input: Tensor) -> Tensor:
        x = self.embedding(input)
        x = self.bilinear(x, self.attention(x, x, x, need_weights=False)[0])
        return self.head(x).transpose(1, 2)


def evaluation(model: nn.Module) -> nn.Module:
    """Set evaluation mode, but of recurrent layers, which cuDNN differentiates in training mode."""
    model.eval()
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase):
            layer.train()
    return model


# data

Draw = Callable[[Generator], Tensor]


def reals(*shape: int) -> Draw:
    return lambda generator: torch.rand(*shape, generator=generator)


def integers(high: int, *shape: int) -> Draw:
    return lambda generator: torch.randint(high, shape, generator=generator)


def one_hot(high: int, *shape: int) -> Draw:
    draw = integers(high, *shape)
    return lambda generator: F.one_hot(draw(generator), high).float()


@dataclass(frozen=True)
class Problem:
    """A model with its data.

    Args:
        name: Short name, for the command line.
        title: What it is, for the report.
        model: Makes the model from the library's layers.
        inputs: Draws the inputs ``[N, *]``.
        classes: Number of classes; targets have the shape ``[N, *positions]``.
        batch: Number of samples.
        positions: Axes of the targets beyond the first, such as time.
        converter: The forward pass contains functions that are no modules.
        quantities: Names of the quantities that are measured.
        loss: Makes the loss.
    """

    name: str
    title: str
    model: Callable[[Layers], nn.Module]
    inputs: Draw
    classes: int
    batch: int
    positions: tuple[int, ...] = ()
    converter: bool = False
    quantities: tuple[str, ...] = EVERY
    loss: Callable[[], nn.Module] = nn.CrossEntropyLoss

    def make(self, layers: Layers | None = None, device: str = "cpu") -> nn.Module:
        """Build the model, with the same parameters whatever the layers are."""
        torch.manual_seed(0)
        model = self.model(Layers())
        if layers is not None:
            values = dict(model.named_parameters())
            model = self.model(layers)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(values[name])
        return evaluation(model).to(device)

    def data(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """Draw inputs and targets, always the same ones."""
        generator = Generator().manual_seed(1)
        inputs = self.inputs(generator)
        targets = integers(self.classes, self.batch, *self.positions)(generator)
        return inputs.to(device), targets.to(device)


def _mlp(name: str, title: str, *widths: int, batch: int = 128) -> Problem:
    inputs = reals(batch, widths[0])
    return Problem(name, title, lambda _: mlp(*widths), inputs, widths[-1], batch)


def _3c3d(batch: int = 128, classes: int = 10, name: str = "3c3d") -> Problem:
    title = f"3C3D, 32×32, {classes} classes, N={batch}"
    inputs = reals(batch, 3, 32, 32)
    return Problem(name, title, lambda _: cnn_3c3d(classes), inputs, classes, batch)


def _all_cnn_c(batch: int) -> Problem:
    title = f"All-CNN-C, 32×32, 100 classes, N={batch}"
    inputs = reals(batch, 3, 32, 32)
    return Problem(f"allcnnc-{batch}", title, lambda _: all_cnn_c(100), inputs, 100, batch)


def _wide_resnet(batch: int) -> Problem:
    return Problem(
        f"wrn-{batch}",
        f"Wide ResNet 16-4 (evaluation mode), 32×32, N={batch}",
        lambda _: wide_resnet(16, 4, 10),
        reals(batch, 3, 32, 32),
        10,
        batch,
        converter=True,
    )


def _resnet18(batch: int, classes: int) -> Problem:
    return Problem(
        f"resnet18-{classes}",
        f"ResNet-18 (evaluation mode), 64×64, {classes} classes, N={batch}",
        lambda _: resnet18(classes),
        reals(batch, 3, 64, 64),
        classes,
        batch,
        converter=True,
    )


def _char_lstm(name: str, vocabulary: int, hidden: int, steps: int, batch: int) -> Problem:
    return Problem(
        name,
        f"Character LSTM {vocabulary}-{hidden}-{hidden}-{vocabulary}, {steps} steps, N={batch}",
        lambda layers: char_lstm(layers, vocabulary, hidden),
        one_hot(vocabulary, batch, steps),
        vocabulary,
        batch,
        positions=(steps,),
    )


def _transformer(
    name: str, vocabulary: int, length: int, width: int, heads: int, depth: int, batch: int
) -> Problem:
    return Problem(
        name,
        f"Transformer, {depth} layers, width {width}, {heads} heads, "
        f"{length} tokens out of {vocabulary}, N={batch}",
        lambda _: Transformer(vocabulary, length, width, heads, depth),
        integers(vocabulary, batch, length),
        vocabulary,
        batch,
        positions=(length,),
        converter=True,
    )


def _named(*problems: Problem) -> dict[str, Problem]:
    return {problem.name: problem for problem in problems}


PROBLEMS = _named(
    _mlp("logreg", "Logistic regression 784-10, N=128", 784, 10),
    _mlp("mlp", "MLP 784-256-256-10, N=128", 784, 256, 256, 10),
    _3c3d(),
    replace(_all_cnn_c(32), quantities=PIECEWISE_LINEAR),
    replace(_all_cnn_c(256), quantities=CORE),
    _char_lstm("lstm", 83, 128, 50, 50),
    replace(_wide_resnet(32), quantities=PIECEWISE_LINEAR),
    replace(_wide_resnet(128), quantities=CORE),
    replace(_resnet18(32, 10), quantities=PIECEWISE_LINEAR),
    replace(_resnet18(8, 1000), quantities=(NONE, "DiagGGNMC", "KFAC", "DiagGGNExact", "KFLR")),
    _transformer("transformer", 64, 64, 128, 4, 4, 32),
    Problem(
        "sigmoid-mlp",
        "Sigmoid MLP 784-256-256-256-10, N=64",
        lambda _: mlp(784, 256, 256, 256, 10, activation=nn.Sigmoid),
        reals(64, 784),
        10,
        64,
    ),
    Problem(
        "sigmoid-cnn",
        "Sigmoid CNN, two convolutions, 16×16, N=64",
        lambda _: small_cnn(nn.Sigmoid, 10),
        reals(64, 1, 16, 16),
        10,
        64,
    ),
)


@dataclass(frozen=True)
class Series:
    """Problems that differ in one number."""

    title: str
    label: str
    problems: dict[int, Problem]


def _series(title: str, label: str, problems: dict[int, Problem]) -> Series:
    return Series(title, label, {x: replace(p, quantities=SCALED) for x, p in problems.items()})


def _hidden(name: str, depth: int, width: int) -> Problem:
    title = f"MLP, {depth} hidden layers of {width}, N=128"
    return _mlp(name, title, 784, *[width] * depth, 10)


SERIES = {
    "batch": _series(
        "3C3D, 10 classes",
        "batch size",
        {n: _3c3d(n, name=f"3c3d-n{n}") for n in (8, 32, 128, 512)},
    ),
    "classes": _series(
        "3C3D, N=32", "classes", {c: _3c3d(32, c, name=f"3c3d-c{c}") for c in (10, 100, 1000)}
    ),
    "depth": _series(
        "MLP, width 256, N=128",
        "hidden layers",
        {d: _hidden(f"mlp-d{d}", d, 256) for d in (1, 2, 4, 8, 16)},
    ),
    "width": _series(
        "MLP, two hidden layers, N=128",
        "width",
        {w: _hidden(f"mlp-w{w}", 2, w) for w in (64, 256, 1024)},
    ),
}

# sequences on which exact curvature takes a fraction of a second, for ``fast_paths``
SHORT = _named(
    _char_lstm("short-lstm", 20, 48, 12, 16),
    _transformer("short-transformer", 20, 16, 48, 4, 2, 16),
)

# what takes less than a second for small curved networks
QUICK = (*FIRST, "DiagGGNMC", "KFAC", "DiagGGNExact", "KFLR", "GGNMP", "HMP")

# for ``fast_paths`` of rules for other layers
LAYERS = _named(
    Problem(
        "layers-images",
        "Many layers, 12×12, N=16",
        lambda _: many_layers(10),
        reals(16, 4, 12, 12),
        10,
        16,
    ),
    Problem(
        "layers-tokens",
        "Attention and bilinear layer, width 24, 12 tokens, N=16",
        lambda _: ManyLayersOfTokens(20, 24, 3),
        integers(20, 16, 12),
        20,
        16,
        positions=(12,),
        converter=True,
    ),
    Problem(
        "many-classes",
        "Three padded convolutions, 16×16, 200 classes, N=16",
        lambda _: narrowing_cnn(200),
        reals(16, 3, 16, 16),
        200,
        16,
    ),
    Problem(
        "many-words",
        "Embedding of 12 words out of 5000, N=32",
        lambda _: nn.Sequential(nn.Embedding(5000, 32), nn.Flatten(), nn.Linear(384, 5)),
        integers(5000, 32, 12),
        5,
        32,
    ),
    Problem(
        "decoder",
        "Two transposed convolutions to 8×8, N=64",
        lambda _: decoder(10),
        reals(64, 16),
        10,
        64,
    ),
    _mlp("bottleneck", "MLP 256-256-256-8-256-500, N=64", 256, 256, 256, 8, 256, 500, batch=64),
    Problem(
        "own-layers",
        "Layers without a rule, width 32, N=64",
        lambda _: nn.Sequential(nn.Linear(16, 32), OwnGate(32), OwnGate(32), nn.Linear(32, 5)),
        reals(64, 16),
        5,
        64,
        quantities=(*FIRST, "DiagGGNMC", "KFAC", "DiagGGNExact", "GGNMP"),
    ),
    Problem(
        "gated-mlp",
        "Two gated layers and log-probabilities, width 64, N=128",
        lambda _: gated_mlp(64, 20),
        reals(128, 64),
        20,
        128,
        quantities=QUICK,
    ),
    Problem(
        "log-classes",
        "Log-probabilities of 500 classes, width 64, N=64",
        lambda _: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 500), nn.LogSoftmax(1)),
        reals(64, 64),
        500,
        64,
        quantities=("KFRA",),
        loss=nn.NLLLoss,
    ),
    Problem(
        "pooling",
        "Two convolutions with maximum pooling, 12×12, N=32",
        lambda _: pooling_cnn(10),
        reals(32, 1, 12, 12),
        10,
        32,
        quantities=PIECEWISE_LINEAR,
    ),
    Problem(
        "deep-cnn",
        "Eight padded convolutions, 32×32, N=32",
        lambda _: deep_cnn(8, 10),
        reals(32, 3, 32, 32),
        10,
        32,
        quantities=(*FIRST, "DiagGGNMC", "KFAC", "GGNMP"),
    ),
    Problem(
        "hourglass",
        "Separable convolutions, down and up, 16×16, N=32",
        lambda _: hourglass(10),
        reals(32, 3, 16, 16),
        10,
        32,
        quantities=QUICK,
    ),
    Problem(
        "classifier",
        "Attention by hand, gated layers, first of 8 tokens, width 24, N=16",
        lambda _: Classifier(30, 24, 2, 2, 5),
        integers(30, 16, 8),
        5,
        16,
        converter=True,
        quantities=QUICK,
    ),
    Problem(
        "tied-transformer",
        "Transformer with one block and one matrix of 2000 words, width 32, N=16",
        lambda _: TiedTransformer(2000, 32, 2, 2),
        integers(2000, 16, 12),
        2000,
        16,
        positions=(12,),
        converter=True,
        quantities=(*FIRST, "DiagGGNMC", "KFAC", *PRODUCTS),
    ),
)

# for tests of the benchmark itself
TINY = _named(
    _mlp("tiny", "MLP 8-6-3, N=5", 8, 6, 3, batch=5),
    Problem(
        "tiny-cnn",
        "Small CNN, 16×16, N=3",
        lambda _: small_cnn(nn.ReLU, 3),
        reals(3, 1, 16, 16),
        3,
        3,
    ),
    _char_lstm("tiny-lstm", 5, 4, 3, 2),
    _transformer("tiny-transformer", 5, 3, 8, 2, 1, 2),
)

ALL = (
    PROBLEMS
    | _named(*(p for s in SERIES.values() for p in s.problems.values()))
    | SHORT
    | LAYERS
    | TINY
)

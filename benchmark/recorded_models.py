"""What models of many functions take: ``python -m benchmark.recorded_models``.

Small models of ``transformers``, whose functions are noted while they run
(``extend(model, use_converter="record")``), take turns with a plain copy. Almost all of a step is
bookkeeping, which no other problem shows as clearly.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from benchmark.large_models import CLOCKS, RESULTS
from benchmark.measure import circumstances
from benchmark.report import table

SAMPLES, TOKENS, WORDS, CLASSES = 8, 16, 100, 10
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {"intermediate_size": 256}
# class and configuration in transformers, and its arguments
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", SIZES | WIDE),
    "BERT": ("BertForSequenceClassification", "BertConfig", SIZES | WIDE),
    "ViT": ("ViTForImageClassification", "ViTConfig", SIZES | WIDE),
}
IMAGES = {"image_size": 16, "patch_size": 4}
# time ÷ plain
GOALS = {"no extension": 1.3, "BatchGrad": 4.0}
QUANTITIES: dict[str, Callable[[], Sequence[Any]]] = {
    "no extension": lambda: (),
    "BatchGrad": lambda: (extensions.BatchGrad(),),
    "BatchL2Grad": lambda: (extensions.BatchL2Grad(),),
    "Variance": lambda: (extensions.Variance(),),
}
HEAD = f"""\
# Models of many functions

Made by `python -m benchmark.recorded_models`: {{environment}}.

Models of `transformers` with two layers of width 64, random weights, {SAMPLES} samples of {TOKENS}
tokens or patches. Their functions are recorded (`extend(model, use_converter="record")`). Figures
are times relative to a step of a plain copy, in the same process and in turn: the median.

"""


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Make a model, data ``[N, T]`` or ``[N, 3, 16, 16]``, and targets ``[N]`` or ``[N, T]``."""
    import transformers

    kind, configuration, sizes = MODELS[name]
    more = IMAGES if name == "ViT" else {"vocab_size": WORDS}
    config = getattr(transformers, configuration)(num_labels=CLASSES, **sizes, **more)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    data = torch.randint(WORDS, (SAMPLES, TOKENS))
    if name == "ViT":
        data = torch.rand(SAMPLES, 3, 16, 16)
    positions = (TOKENS,) if kind.endswith(("LMHeadModel", "CausalLM")) else ()
    return model, data, torch.randint(CLASSES, (SAMPLES, *positions))


def measure(name: str, quantities: Sequence[str], rounds: int, clock: str) -> dict[str, float]:
    """Time steps of a model in turn with plain ones.

    Args:
        name: The model.
        quantities: What is computed.
        rounds: Number of steps of each.
        clock: Name of the clock.

    Returns:
        For each quantity the median of time ÷ time of a plain step.
    """
    model, X, y = problem(name)
    plain, plain_loss = copy.deepcopy(model), nn.CrossEntropyLoss()
    extended = extend(model, use_converter="record")
    loss = extend(nn.CrossEntropyLoss())

    def forward(of: nn.Module, with_loss: nn.Module) -> Tensor:
        logits = of(X).logits
        return with_loss(logits.flatten(0, -2), y.flatten())

    def plain_step() -> None:
        plain.zero_grad()
        forward(plain, plain_loss).backward()

    def step(exts: Sequence[Any]) -> None:
        extended.zero_grad()
        value = forward(extended, loss)
        with backpack(*exts):
            value.backward()

    def seconds(function: Callable[..., None], *arguments: Any) -> float:
        start = CLOCKS[clock]()
        function(*arguments)
        return CLOCKS[clock]() - start

    found = {}
    for quantity in quantities:
        exts = QUANTITIES[quantity]()
        for _ in range(3):  # a structure is new in the first one
            plain_step()
            step(exts)
        ratios = [seconds(step, exts) / seconds(plain_step) for _ in range(rounds)]
        found[quantity] = statistics.median(ratios)
    return found


def verdict(quantity: str, figures: Sequence[float]) -> str:
    """Say whether times ÷ plain of all models meet the goal, if there is one."""
    if quantity not in GOALS:
        return ""
    met = max(figures) <= GOALS[quantity]
    return f"≤ {GOALS[quantity]}: {'met' if met else 'not met'}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.recorded_models")
    add = parser.add_argument
    add("--models", nargs="+", choices=[*MODELS], default=[*MODELS], metavar="NAME")
    add("--quantities", nargs="+", choices=[*QUANTITIES], default=[*QUANTITIES], metavar="NAME")
    add("--rounds", type=int, default=15)
    add("--threads", type=int, default=1)
    add("--clock", default="wall", choices=[*CLOCKS], help="cpu: time of the process")
    add("--out", type=Path, default=RESULTS / "recorded_models.md", help="the report")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    found = {n: measure(n, args.quantities, args.rounds, args.clock) for n in args.models}
    lines = []
    for quantity in args.quantities:
        figures = [found[name][quantity] for name in args.models]
        cells = [f"{figure:.2f}" for figure in figures]
        lines.append([quantity, *cells, verdict(quantity, figures)])
    shown = table(["quantity", *args.models, "goal"], lines)
    Console(highlight=False, soft_wrap=True).print(shown)
    facts = circumstances(threads=args.threads, rounds=args.rounds, clock=args.clock)
    environment = ", ".join(f"{name} {value}" for name, value in facts.items())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(HEAD.format(environment=environment) + shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())

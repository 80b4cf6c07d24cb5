"""What quantities of a large language model take: ``python -m benchmark.large_models``.

GPT-2 small with random weights, whose embedding and output layer share a weight of 50257 tokens.
Each quantity has a process of its own, in which steps of the extended model and of a plain one with
the same parameters take turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from backpack import backpack, clear, extend, extensions
from benchmark.measure import MEMORY_SHARE, circumstances, total_memory
from benchmark.report import size, table
from benchmark.worker import Memory, first_line

RESULTS = Path(__file__).resolve().parent / "results"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

# Extensions by the name of what is measured.
QUANTITIES: dict[str, Callable[[], Sequence[Any]]] = {
    "no extension": lambda: (),
    "BatchL2Grad": lambda: (extensions.BatchL2Grad(),),
    "ClippedGrad": lambda: (extensions.ClippedGrad(),),
    "SumGradSquared": lambda: (extensions.SumGradSquared(),),
    "Variance": lambda: (extensions.Variance(),),
    "BatchGrad": lambda: (extensions.BatchGrad(),),
    "DiagGGNMC": lambda: (extensions.DiagGGNMC(),),
    "KFAC": lambda: (extensions.KFAC(),),
}
# What the memory of a step, weights included, and its time should not exceed, relative to plain.
GOALS = {"BatchL2Grad": (1.15, 1.4), "KFAC": (3.0, None)}


@dataclass(frozen=True)
class Shape:
    """A language model and its batch.

    Attributes:
        layers: Number of blocks.
        width: Width H of the hidden states.
        heads: Number of heads.
        vocabulary: Number of tokens.
        samples: Number of sequences in the batch.
        tokens: Their length.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    samples: int = 4
    tokens: int = 128

    def model(self) -> nn.Module:
        """Return GPT-2 of this size, with random weights."""
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=self.layers,
            n_embd=self.width,
            n_head=self.heads,
            vocab_size=self.vocabulary,
            n_positions=max(self.tokens, 1024),
            bos_token_id=None,
            eos_token_id=None,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        return GPT2LMHeadModel(config)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return tokens and targets: ``[N, T]``, ``[N, T]``."""
        torch.manual_seed(1)
        x, y = torch.randint(self.vocabulary, (2, self.samples, self.tokens))
        return x, y


@dataclass
class Figure:
    """A quantity.

    Attributes:
        quantity: Its name.
        seconds: Of each round, a step with it.
        plain: Of each round, a step of the plain model.
        bytes: Largest memory of a step in any round, beyond what is there before (weights).
        plain_bytes: That of the plain model.
        weights: Bytes of the parameters.
        reason: Why there are no figures.
    """

    quantity: str
    seconds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    bytes: int = 0
    plain_bytes: int = 0
    weights: int = 0
    reason: str = ""

    @property
    def time(self) -> float:
        """Time ÷ that of a plain step: the median over the rounds."""
        return statistics.median(a / b for a, b in zip(self.seconds, self.plain, strict=True))

    @property
    def memory(self) -> float:
        """Memory ÷ that of a plain step, weights included in both."""
        return (self.bytes + self.weights) / (self.plain_bytes + self.weights)

    @property
    def beyond(self) -> float:
        """Memory ÷ that of a plain step, beyond the weights."""
        return self.bytes / self.plain_bytes


def measure(shape: Shape, quantity: str, rounds: int, clock: str, device: str = "cpu") -> Figure:
    """Measure a quantity in this process.

    Args:
        shape: The model.
        quantity: Name of the quantity.
        rounds: Number of rounds.
        clock: ``"wall"`` or ``"cpu"``.
        device: ``"cpu"`` or ``"cuda"``.
    """
    now, memory, is_cuda = CLOCKS[clock], Memory(device), device == "cuda"
    extended = shape.model().to(device)
    parameters = list(extended.parameters())
    plain = copy.deepcopy(extended, {id(p): p for p in parameters})  # has the same parameters
    extended = extend(extended, use_converter="record")
    lossfunc = nn.CrossEntropyLoss()
    extended_lossfunc = extend(nn.CrossEntropyLoss())
    x, y = (tokens.to(device) for tokens in shape.batch())

    def plain_step() -> None:
        lossfunc(plain(x).logits.flatten(0, 1), y.flatten()).backward()

    def step() -> None:
        with backpack(*QUANTITIES[quantity]()):
            extended_lossfunc(extended(x).logits.flatten(0, 1), y.flatten()).backward()

    def timed(of: Callable[[], None]) -> float:
        if is_cuda:
            torch.cuda.synchronize()
        start = now()
        of()
        if is_cuda:
            torch.cuda.synchronize()
        return now() - start

    def measured(of: Callable[[], None]) -> tuple[float, int]:
        """Return seconds and memory of a step, which nothing is left of."""
        found = memory(lambda: timed(of))
        clear(extended)
        extended.zero_grad()
        return found

    figure = Figure(quantity, weights=sum(p.numel() * p.element_size() for p in parameters))
    for of in (plain_step, step):  # to warm up
        measured(of)
    peaks: list[tuple[int, int]] = []
    for _ in range(rounds):
        plain_seconds, plain_bytes = measured(plain_step)
        seconds, most = measured(step)
        figure.plain.append(plain_seconds)
        figure.seconds.append(seconds)
        peaks.append((plain_bytes, most))
    figure.plain_bytes, figure.bytes = map(max, zip(*peaks, strict=True))
    return figure


def _in_process(connection: Connection, args: argparse.Namespace, quantity: str) -> None:
    """Measure, and send the figure; a limit of memory is one of this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    most = int(args.memory_share * total_memory(args.device))
    if args.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(args.memory_share)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        found = measure(args.shape, quantity, args.rounds, args.clock, args.device)
    except (MemoryError, RuntimeError, NotImplementedError) as error:
        found = Figure(quantity, reason=_why(error, most))
    connection.send(found)


def _why(error: Exception, most: int) -> str:
    is_full = any(text in str(error) for text in ("allocate memory", "out of memory"))
    if is_full or isinstance(error, MemoryError):
        return f"takes more than {most / 2**30:.0f} GiB"
    return first_line(error)


def run(args: argparse.Namespace, show: Callable[[Figure], None]) -> list[Figure]:
    """Measure one quantity after the other, each in a process of its own.

    With ``args.merge``, the figures of the file that are not measured again come with them.
    """
    found = []
    if args.merge:
        known = [Figure(**one) for one in json.loads(args.out.read_text())["figures"]]
        found = [one for one in known if one.quantity not in args.quantities]
    context = get_context("spawn")
    for quantity in args.quantities:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_in_process, args=(there, args, quantity))
        process.start()
        there.close()
        try:
            figure = here.recv()
        except EOFError:
            figure = Figure(quantity, reason="the process has died")
        process.join()
        found.append(figure)
        show(figure)
    return sorted(found, key=lambda one: [*QUANTITIES].index(one.quantity))


HEADER = [
    "quantity",
    "MiB beyond weights",
    "÷ plain",
    "÷ plain, with weights",
    "time ÷ plain",
    "goal",
]


def rows(figures: Iterable[Figure]) -> list[list[str]]:
    """Return the rows of the table."""
    lines = []
    for one in figures:
        if one.reason:
            lines.append([one.quantity, one.reason, "", "", "", goal(one)])
            continue
        if not lines or lines[0][0] != "plain":
            lines.insert(0, ["plain", size(one.plain_bytes), "1.00", "1.00", "1.00", ""])
        ratios = [f"{value:.2f}" for value in (one.beyond, one.memory, one.time)]
        lines.append([one.quantity, size(one.bytes), *ratios, goal(one)])
    return lines


def goal(one: Figure) -> str:
    """Say what a quantity may take, and whether that is so."""
    if one.quantity not in GOALS:
        return ""
    memory, seconds = GOALS[one.quantity]
    is_met = not one.reason and one.memory <= memory and (not seconds or one.time <= seconds)
    text = f"memory ≤ {memory}" + (f", time ≤ {seconds}" if seconds else "")
    return f"{text}: {'met' if is_met else 'not met'}"


HEAD = """\
# Large models

Made by `python -m benchmark.large_models`: {environment}.

GPT-2 with {layers} layers of width {width}, {heads} heads and {vocabulary} tokens, random weights
({weights} MiB), whose embedding is the weight of the output layer; {samples} × {tokens} tokens.
A step is forward pass, backward pass and quantity, and its memory the high-water mark beyond what
is there before, gradients included. Figures are relative to a step of the plain model with the same
parameters, in the same process and in turn; goals are about memory that has the weights in it.

"""


def write(figures: Sequence[Figure], args: argparse.Namespace) -> None:
    """Write the figures, and a report next to them."""
    own = {"device": torch.cuda.get_device_name()} if args.device == "cuda" else {}
    facts = circumstances(**own, threads=args.threads, rounds=args.rounds, clock=args.clock)
    if args.merge:
        before = json.loads(args.out.read_text())["environment"]
        facts["earlier figures"] = f"{before['date']} (commit {before['commit']})"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    shape = asdict(args.shape)
    contents = {"environment": facts, "shape": shape, "figures": [asdict(f) for f in figures]}
    args.out.write_text(json.dumps(contents, indent=1) + "\n")
    weights = size(max(figure.weights for figure in figures))
    text = ", ".join(f"{name} {value}" for name, value in facts.items())
    head = HEAD.format(environment=text, weights=weights, **shape)
    args.out.with_suffix(".md").write_text(head + table(HEADER, rows(figures)))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.large_models", description=__doc__)
    add = parser.add_argument
    for name, value in asdict(Shape()).items():
        add(f"--{name}", type=int, default=value, metavar="NUMBER")
    add("--quantities", nargs="+", choices=[*QUANTITIES], default=[*QUANTITIES], metavar="NAME")
    add("--rounds", type=int, default=3)
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--threads", type=int, default=1)
    add("--clock", default="wall", choices=[*CLOCKS], help="cpu: time of the process")
    add("--memory-share", type=float, default=MEMORY_SHARE, help="of the device, for a step")
    add("--merge", action="store_true", help="keep figures of the file that are not measured again")
    add("--out", type=Path, help="the JSON file")
    args = parser.parse_args(arguments)
    where = "" if args.device == "cpu" else f"-{args.device}"
    args.out = args.out or RESULTS / f"large_models{where}.json"
    args.shape = Shape(**{name: vars(args)[name] for name in asdict(Shape())})
    return args


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    args = parse(arguments)
    console = Console(highlight=False, soft_wrap=True)

    def show(one: Figure) -> None:
        console.print("  ".join(filter(None, rows([one])[-1])))

    figures = run(args, show)
    write(figures, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains a small language model four ways and compares them: memory, time, and every bit of the result.

    python examples/train_lm.py
    python examples/train_lm.py --sequence 2048 --steps 4 --modes none,offload
    python examples/train_lm.py --repeats 3

The same model learns from the same text, from the same seed, in a process of its own each time. With ``--repeats`` the
ways take turns, and the table has medians and half of the spread.

- ``none``: plain PyTorch. All activations stay in memory until backward has used them.
- ``checkpoint``: gradient checkpointing of every block. Activations are computed a second time in backward.
- ``offload``: ``eager_offload``. Activations are moved away during forward and are back when backward needs them.
- ``offload+checkpoint``: both. What checkpointing keeps, the input of each block, is moved away too.

``train`` shows all that a program of your own needs; the rest measures, compares and draws.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console

import eager_offload as eo

from lm.data import Batch, batches, read_text
from lm.meter import Meter
from lm.model import LanguageModel
from lm.processes import WorkerFailedError, run_all, tell
from lm.report import differences, save, table
from lm.result import Result, hash_losses, hash_parameters

MODES = ("none", "checkpoint", "offload", "offload+checkpoint")
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
ON_CPU = DEVICE.type == "cpu"

# Large enough for activations to matter, small enough for two minutes of two CPU cores, or 16 GiB of an accelerator.
DEFAULTS = (
    {"layers": 16, "width": 384, "heads": 6, "sequence": 768, "batch": 3, "steps": 3, "window": "32MiB"}
    if ON_CPU
    else {"layers": 8, "width": 2048, "heads": 16, "sequence": 1024, "batch": 4, "steps": 20, "window": "auto"}
)


def train(mode: str, options: argparse.Namespace) -> Result:
    """Trains in one mode, in a process of its own, and measures."""
    # On a CPU an Offload has freed memory go back to the system. With this call all of it does at once, and it does
    # without an Offload too, so that none of the four modes has an advantage.
    if ON_CPU:
        eo.release_freed_memory()

    torch.manual_seed(options.seed)
    size = (options.layers, options.width, options.heads, options.sequence)
    model = LanguageModel(*size, checkpointing="checkpoint" in mode).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Here it is: one object, made once, ...
    offload = eo.Offload(offload_config(options)) if "offload" in mode else None

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory, so that what rises and falls is activations
        # ... entered around each forward.
        with offload or nullcontext():
            loss = model(batch.inputs.to(DEVICE), batch.targets.to(DEVICE))
        loss.backward()
        optimizer.step()
        return loss.item()

    text = read_text()
    # A tiny step loads code and makes gradients and optimizer state, so that what comes on top is activations.
    step(batches(text, count=1, batch=1, sequence=8, seed=options.seed)[0])
    data = batches(text, count=options.steps, batch=options.batch, sequence=options.sequence, seed=options.seed)
    if offload is not None:
        offload.reset_stats()

    losses: list[float] = []
    seconds: list[float] = []
    meter = Meter(DEVICE, show=lambda nbytes: tell(nbytes=nbytes))
    model_bytes = meter.now()
    with meter:
        for number, batch in enumerate(data, 1):
            began = time.perf_counter()
            losses.append(step(batch))
            seconds.append(time.perf_counter() - began)
            tell(step=number, loss=losses[-1])

    stats = offload.stats(synchronize=True) if offload is not None else eo.OffloadStats()
    return Result(
        mode=mode,
        losses=losses,
        step_seconds=seconds,
        model_bytes=model_bytes,
        peak_bytes=meter.peak(),
        offloaded_bytes=stats.offloaded_bytes,
        stall_seconds=stats.stall_seconds,
        parameters_hash=hash_parameters(model),
        losses_hash=hash_losses(losses),
        samples=meter.samples,
    )


def offload_config(options: argparse.Namespace) -> eo.OffloadConfig:
    """The library's settings; sizes are texts such as ``64MiB``."""
    return eo.OffloadConfig(
        tier=options.tier,
        min_bytes=options.min_bytes,
        max_inflight_bytes=options.max_inflight_bytes,
        prefetch_bytes=options.prefetch_bytes,
    )


def compare(options: argparse.Namespace) -> int:
    """Runs each mode in a process of its own, then shows all side by side; returns the exit status."""
    from lm.picture import draw  # not at the top: the workers are measured, and do without it

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    title = introduce(options, console)
    try:
        # In turn, so that what else the machine does meets all of them alike.
        turns = list(options.modes) * options.repeats
        results = run_all(turns, options.steps, "RSS" if ON_CPU else "allocated", console)
    except WorkerFailedError as error:
        console.print(str(error), style="bold red", markup=False)
        return 1
    console.print(table(results))

    different = differences(results)
    for difference in different:
        console.print(f"NOT EQUAL: {difference}", style="bold red", markup=False)
    if not different and len(results) > 1:
        console.print(
            f"Losses and final parameters of all {len(results)} runs are equal bit for bit: "
            f"SHA-256 {results[0].losses_hash[:12]} and {results[0].parameters_hash[:12]}.",
            soft_wrap=True,
        )

    options.output.mkdir(parents=True, exist_ok=True)
    draw(
        options.output / "memory.png",
        results[: len(options.modes)],
        title,
        "resident MiB" if ON_CPU else "allocated MiB",
    )
    save(options.output / "results.json", results, vars(options))
    console.print(
        f"Memory over time: {options.output / 'memory.png'}; all numbers: {options.output / 'results.json'}",
        soft_wrap=True,
    )
    return 1 if different else 0


def introduce(options: argparse.Namespace, console: Console) -> str:
    """Says what is going to happen; returns the title of the picture."""
    text = read_text()
    where = "the CPU" if ON_CPU else f"{DEVICE}"
    tier = options.tier if options.tier != "auto" else "disk" if ON_CPU else "host"
    title = (
        f"{options.layers} layers, width {options.width}, {options.batch} x {options.sequence} tokens on {where}; "
        f"what is offloaded goes to the {tier} tier"
    )
    console.print(f"Model: {title}", soft_wrap=True)
    console.print(f"Text: {len(text.content) / 2**20:.1f} MiB of {text.source}; a token a byte", soft_wrap=True)
    if not ON_CPU:
        console.print("Memory: the allocator's own count")
    elif eo.release_freed_memory():
        console.print("Memory: resident, by the operating system; freed blocks go back to it (mallopt), in all runs")
    else:
        console.print("Memory: resident, by the operating system; this C library may keep freed blocks, in all runs")
    console.print()
    return title


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--modes",
        type=modes,
        default=",".join(MODES),
        help="which runs, with commas between; the first is the reference",
    )
    add("--layers", type=positive, metavar="N", default=DEFAULTS["layers"], help="transformer blocks")
    add(
        "--width",
        type=positive,
        metavar="N",
        default=DEFAULTS["width"],
        help="features of a token; a multiple of --heads",
    )
    add("--heads", type=positive, metavar="N", default=DEFAULTS["heads"], help="attention heads")
    add("--sequence", type=positive, metavar="N", default=DEFAULTS["sequence"], help="tokens in a window of text")
    add("--batch", type=positive, metavar="N", default=DEFAULTS["batch"], help="windows in a step")
    add("--steps", type=positive, metavar="N", default=DEFAULTS["steps"], help="optimizer steps")
    add("--repeats", type=positive, metavar="N", default=1, help="how often each run is made, in turn with the others")
    add("--tier", default="auto", help="where saved tensors rest: host or disk; auto is disk on a CPU, host elsewhere")
    add("--min-bytes", metavar="SIZE", default="1MiB", help="smaller saved tensors stay where they are")
    add("--max-inflight-bytes", metavar="SIZE", default=DEFAULTS["window"], help="most bytes on their way out at once")
    add(
        "--prefetch-bytes",
        metavar="SIZE",
        default=DEFAULTS["window"],
        help="most bytes brought back ahead of their use",
    )
    add("--output", type=Path, default=Path("demo"), metavar="DIR", help="where memory.png and results.json go")
    add("--seed", type=int, default=0, help="of the weights and of the choice of text")
    add("--worker", choices=MODES, help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    try:
        offload_config(options)
    except eo.ConfigError as error:
        parser.error(str(error))
    return options


def modes(text: str) -> list[str]:
    """Names from ``MODES`` with commas between."""
    names = text.split(",")
    for name in names:
        if name not in MODES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(MODES)}")
    return names


def positive(text: str) -> int:
    """A whole number from 1."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    options = parse()
    if options.worker is None:
        sys.exit(compare(options))
    torch.use_deterministic_algorithms(not ON_CPU)  # a CPU's are; some of an accelerator's are not, if not told
    train(options.worker, options).save(options.result)

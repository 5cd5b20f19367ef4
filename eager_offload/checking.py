"""``python -m eager_offload check``: compares training with and without offload bit for bit.

Three processes train the same model from the same seeds with deterministic algorithms: without offload, with offload,
and without it again as the control. Each writes digests of all losses, gradients, parameters and buffers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eager_offload.errors import ConfigError, OffloadError

if TYPE_CHECKING:  # torch is imported in functions: --help does not wait for it
    from torch import Tensor, nn

#: The runs in order, and whether each offloads.
_RUNS = {"without": False, "with": True, "without again": False}
#: Last lines of a failed run's stderr that are shown.
_LINES = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares training with and without offload, and prints the verdict. Returns the exit status: 0 if all bits are
    equal; 1 if any differs; 2 if that is undecided, because a run failed, nothing moved, or two runs without offload
    differ."""
    options = _parser().parse_args(arguments)
    try:
        if options.run is not None:
            return _train(options)
        from eager_offload.config import OffloadConfig
        from eager_offload.running import fields_of

        OffloadConfig.from_given(None, fields_of(options.settings))
        if options.recompute and options.device_budget is None:
            raise ConfigError("--recompute needs --device-budget, the bytes to plan for, such as 40GiB")
        if options.steps < 1:
            raise ConfigError(f"--steps {options.steps} is not accepted: it takes a whole number, 1 or more")
        with tempfile.TemporaryDirectory(prefix="eager_offload_check_") as folder:
            runs = {name: _run(name, options, Path(folder, f"{number}.json")) for number, name in enumerate(_RUNS)}
    except OffloadError as error:
        print(f"eager_offload check: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # the status that a shell reports for it
    status, verdict = _judge(runs)
    figures = {name: {key: run[key] for key in ("seconds", "peak_bytes", "moved_bytes")} for name, run in runs.items()}
    if options.json:
        print(json.dumps({"status": status, "verdict": verdict, "runs": figures}, indent=2))
        return status
    from eager_offload.config import size_text

    print(verdict)
    print(f"\n{'':<14} {'forward, backward':>17}  {'peak':>10}  {'moved a step':>12}")
    for name, one in figures.items():
        moved = size_text(one["moved_bytes"]) if one["moved_bytes"] else "-"
        print(f"{name:<14} {one['seconds']:>15.3f} s  {size_text(one['peak_bytes']):>10}  {moved:>12}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eager_offload check",
        description="Trains a model for a few steps with and without offload, in separate processes, and compares "
        "every loss, gradient, parameter and buffer bit for bit.",
        epilog="The exit status is 0 if all bits are equal, 1 if any differs, 2 if the comparison was not possible.",
    )
    parser.add_argument(
        "function",
        metavar="module:function",
        help="returns (model, inputs) or (model, inputs, loss), on the device that trains; found from here as "
        "`python -m` finds modules",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=6,
        help="of SGD; from the 4th on, offload follows a table of the step; default: %(default)s",
    )
    parser.add_argument(
        "--settings",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of OffloadConfig, such as min_bytes=4KiB, or a JSON or TOML file of fields; may be given again",
    )
    parser.add_argument("--device-budget", help="train by a plan for this many bytes, such as 40GiB")
    parser.add_argument("--recompute", action="store_true", help="and recompute the modules that the plan selects")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    return parser


def _run(name: str, options: argparse.Namespace, to: Path) -> dict[str, Any]:
    """Trains in a subprocess, and returns the results that it has written to ``to``."""
    command = [sys.executable, "-m", "eager_offload", "check", options.function, f"--run={name}", f"--to={to}"]
    command += [f"--steps={options.steps}", *(f"--settings={one}" for one in options.settings)]
    if _RUNS[name] and options.device_budget is not None:
        command += [f"--device-budget={options.device_budget}", *["--recompute"][: options.recompute]]
    # cuBLAS reads its variable at start, and needs it for deterministic products.
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0"}
    environment = {**fixed, **os.environ, "EAGER_OFFLOAD": str(int(_RUNS[name]))}
    if not options.json:
        print(f"{name}: {options.steps} steps ...", file=sys.stderr, flush=True)
    # In the working directory, to import the function; its stdout would mix with this command's.
    ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if ended.returncode or not to.exists():
        code = ended.returncode
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit status {code}"
        said = ended.stderr.decode(errors="replace").strip().splitlines()[-_LINES:]
        raise OffloadError("\n".join([f"could not run: the process {name!r} ended with {how}", *said]))
    found: dict[str, Any] = json.loads(to.read_text())
    return found


def _judge(runs: dict[str, dict[str, Any]]) -> tuple[int, str]:
    """Returns the exit status and the verdict."""
    without, moved, again = (runs[name] for name in _RUNS)
    steps, count = len(without["steps"]), sum(map(len, without["steps"]))
    if (other := _first_difference(without, again)) is not None:
        return 2, (
            f"cannot tell: two runs without offload differ, first in {other}. The model is not deterministic by "
            "itself: seed its random numbers, and remove anything that depends on time, on threads or on the system"
        )
    if (other := _first_difference(without, moved)) is not None:
        return 1, (
            f"differs: {other} has other bits with offload than without, although two runs without are equal. Please "
            "report it, with the model"
        )
    if not (moved["moved_bytes"] or moved["again"]):
        return 2, (
            "cannot tell: nothing moved, so equal bits show nothing. Let smaller tensors move, such as by "
            "--settings min_bytes=1KiB --settings keep_last_bytes=0"
        )
    also = f", {moved['again']} modules recomputed" if moved["again"] else ""
    what = f"{count} losses, gradients, parameters and buffers"
    return 0, f"equal: {what} of {steps} steps have the same bits with offload{also}"


def _first_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Names the first tensor that differs, in the order of a step; ``None`` if none does."""
    for number, (these, those) in enumerate(zip(one["steps"], other["steps"], strict=True), 1):
        for name in dict.fromkeys([*these, *those]):
            if these.get(name) != those.get(name):
                return f"{name}, step {number}"
    return None


def _train(options: argparse.Namespace) -> int:
    import torch

    from eager_offload.offload import Offload
    from eager_offload.planning.command import model_of
    from eager_offload.planning.trace import loss_of_step
    from eager_offload.running import fields_of
    from eager_offload.runtime.host import most_resident

    torch.use_deterministic_algorithms(True)
    _seed()
    model, inputs, loss = model_of(options.function)
    if any(one.is_meta for one in model.parameters()):
        raise ConfigError(f"{options.function!r} is not accepted: its model is on meta, and a step has to run")
    fields, sgd, planned = fields_of(options.settings), torch.optim.SGD, None
    if options.device_budget is not None:
        from eager_offload.planning.planner import plan  # imported late: its imports take long

        budget, again = options.device_budget, options.recompute
        planned = plan(
            model, inputs, loss=loss, device_budget=budget, optimizer=sgd, recompute=again, config=fields or None
        )
        if not planned.fits:
            raise OffloadError(f"no plan fits in {budget}: {planned.least_budget:,} bytes are the least")
    offload = Offload(fields, plan=planned)
    offload.skip_in(model)
    optimizer = sgd([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    steps, seconds = list[dict[str, str]](), list[float]()
    _seed()
    with planned.apply(model) if planned else nullcontext():
        for _ in range(options.steps):
            begin = time.perf_counter()
            with offload if _RUNS[options.run] else nullcontext():
                total = loss_of_step(model, inputs, loss)
            torch.autograd.backward(total)
            if accelerator is not None:
                torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - begin)
            found = {"the loss": _digest(total), **_digests(model, "gradient of")}
            del total
            optimizer.step()
            optimizer.zero_grad()
            steps.append(found | _digests(model, "parameter") | _digests(model, "buffer"))
    allocated = 0 if accelerator is None else torch.accelerator.max_memory_allocated()
    figures = {
        "seconds": statistics.median(seconds[1:] or seconds),
        "peak_bytes": allocated or most_resident(),  # a model may train on the CPU despite an accelerator
        "moved_bytes": offload.stats(synchronize=True).bytes_out // options.steps,
        "again": len(planned.again) if planned else 0,
    }
    options.to.write_text(json.dumps({"steps": steps, **figures}))
    return 0


def _seed() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)


def _digests(model: nn.Module, kind: str) -> dict[str, str]:
    """Returns digests of the gradients, parameters or buffers by name, the last module first, as in backward."""
    names = {id(module): f"{name or 'the model'} ({type(module).__name__})" for name, module in model.named_modules()}
    found: dict[str, str] = {}
    for module in reversed([*model.modules()]):
        held = module.named_buffers(recurse=False) if kind == "buffer" else module.named_parameters(recurse=False)
        for name, one in held:
            value = one.grad if kind == "gradient of" else one
            if value is not None:
                found[f"the {kind} {name!r} of {names[id(module)]}"] = _digest(value)
    return found


def _digest(tensor: Tensor) -> str:
    """Returns a digest of dtype, shape and bits."""
    from eager_offload.version import digest

    plain = tensor.detach()
    plain = (plain.full_tensor() if hasattr(plain, "full_tensor") else plain).to_dense().cpu().contiguous()
    start, nbytes, most = plain.data_ptr(), plain.nbytes, 1 << 26
    chunks = (ctypes.string_at(start + at, min(most, nbytes - at)) for at in range(0, nbytes, most))
    return digest(f"{plain.dtype} {[*plain.shape]}", *chunks)

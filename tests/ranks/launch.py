"""Starts ranks that run scenarios, and ends them whatever happens.

torchrun's own agent starts, watches and ends them together. It forks them off a process that has torch already:
one import for a launch and not one for each rank. Several scenarios share a launch.

    python -m tests.ranks.launch 2 DIRECTORY ddp.bits_are_those_without_offload ...
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import signal
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from tests.compiler_caches import environment_with_graphs, give_machine_code, take_machine_code

ROOT = Path(__file__).parents[2]

#: No rank lives longer, whatever becomes of who started it. Seconds.
LIFETIME = 500
#: How long a rank waits for another. Seconds.
PATIENCE = datetime.timedelta(seconds=60)


@dataclass(frozen=True)
class Ranks:
    """What a scenario knows of where it runs."""

    rank: int
    size: int
    directory: Path
    """A directory that all ranks of the launch share."""
    thorough: bool
    """Whether to go through every regime, or the two that differ most."""

    def gathered(self, value: object) -> list[object]:
        """The ``value`` of every rank."""
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def at_once(self) -> None:
        """All ranks wait for each other."""
        dist.barrier()


def scenarios_of(module: str) -> dict[str, Callable[[Ranks], None]]:
    """The table of a module of this package."""
    found: dict[str, Callable[[Ranks], None]] = importlib.import_module(f"tests.ranks.{module}").SCENARIOS
    return found


def command_of(number: int, directory: Path, scenarios: Sequence[str], *, thorough: bool = False) -> list[str]:
    """The command line that runs ``scenarios`` on so many ranks; each leaves ``directory/SCENARIO.RANK``, empty if it
    passed."""
    command = [sys.executable, "-m", "tests.ranks.launch", str(number), str(directory), *scenarios]
    return command + ["--thorough"] * thorough


def launch(number: int, directory: Path, scenarios: Sequence[str], *, thorough: bool = False) -> str:
    """Runs :func:`command_of`; returns what it and the ranks said."""
    # What one rank has compiled, the others and later runs of the launch find.
    compiled = directory / "compiled"
    with started(command_of(number, directory, scenarios, thorough=thorough), **give_machine_code(compiled)) as process:
        try:
            output = process.communicate(timeout=LIFETIME + 20)[0]
        except subprocess.TimeoutExpired:
            return "the ranks took too long and were ended"
    if process.returncode == 0:
        take_machine_code(compiled)
    return output


def torchrun(number: int, *program: str) -> list[str]:
    """The command line that starts ``program`` on so many ranks."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", *program]


@contextmanager
def started(command: Sequence[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs with one thread of torch's in each process; it and all that it started end with the block."""
    settings = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment_with_graphs(), **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        end(process.pid)
        process.communicate()


def end(pid: int) -> None:
    """Kills a process and all that it has started, ranks in sessions of their own included."""
    try:
        first = psutil.Process(pid)
        family = [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


# -- in the launch --------------------------------------------------------------------------------------------------


def live(directory: Path, names: Sequence[str], thorough: bool) -> None:
    """What a rank does. It ends with the first scenario that fails: the others would wait for it in vain."""
    signal.alarm(LIFETIME)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), directory, thorough)
    for name in names:
        result = directory / f"{name}.{ranks.rank}"
        try:
            module, _, row = name.partition(".")
            scenarios_of(module)[row](ranks)
        except BaseException:
            result.write_text(traceback.format_exc())
            raise
        result.touch()
        ranks.at_once()
    dist.destroy_process_group()


def main() -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    number, directory, *names = (word for word in sys.argv[1:] if word != "--thorough")
    # Imported once for all ranks, by a process of one thread: this one's rendezvous has threads, and a rank forked
    # while one of them holds a lock waits for it for ever. The first `with` in a process with a compiler imports
    # Inductor's part.
    modules = dict.fromkeys(f"tests.ranks.{name.partition('.')[0]}" for name in names)
    multiprocessing.set_forkserver_preload(["eager_offload.compile.order", "tests.ranks.launch", *modules])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(number),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="forkserver",
        local_addr="localhost",
    )
    elastic_launch(config, live)(Path(directory), names, "--thorough" in sys.argv)


if __name__ == "__main__":
    importlib.import_module("tests.ranks.launch").main()  # under its name in this package, by which ranks import it

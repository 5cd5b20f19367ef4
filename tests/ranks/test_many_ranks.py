"""Ways to train on several ranks, torch's own and the frameworks': bits are those without offload, and no byte of a
weight moves.

Each scenario is a row of the table of a module beside this one, and asserts all that in every rank.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.ranks import failing
from tests.ranks.launch import command_of, launch, scenarios_of, started
from tests.releases import wrong_before


class Launch(NamedTuple):
    """So many ranks, which several scenarios share."""

    number: int
    thorough: bool = False
    """Whether each scenario goes through every regime."""
    marks: tuple[pytest.MarkDecorator, ...] = (pytest.mark.long,)


LAUNCHES = {
    "two": Launch(2, marks=(pytest.mark.short,)),
    "every": Launch(2, thorough=True, marks=(pytest.mark.long, pytest.mark.sampled(2))),
    "four": Launch(4),
    "compiled": Launch(2),
    "accelerate": Launch(2),
    "lightning": Launch(2),
}
#: By module, the launches that run a scenario: quickly on two ranks, in every regime, on four; of others "every".
CASES: dict[str, dict[str, str]] = {
    "node": {"one_spill_file_a_rank": "two four"},
    "ddp": {"bits_are_those_without_offload": "two every four", "parameters_that_are_not_used": "two every"},
    "fsdp": {
        "bits_are_those_without_offload": "every four",
        "what_moves_is_what_moves_in_one_process": "two every",
        "mixed_precision": "two every four",
        "compiled_blocks": "compiled",
        "blocks_compiled_in_place": "compiled",
    },
    "tensor_parallel": {"a_divided_loss": "two every four", "together_with_fsdp": "four"},
    "pipelines": {
        "a_step_is_one_of_the_schedule_on_every_rank": "two four",
        "one_forward_one_backward": "two every four",
        "interleaved": "two every four",
    },
    "plans": {
        "different_budgets_agree": "two every",
        "sharded_models_are_planned_as_whole_ones": "two every",
        "tensor_parallelism_is_planned_as_it_runs": "two four",
    },
    "with_accelerate": dict.fromkeys(
        [
            *("ddp", "ddp-mixed", "ddp-compiled", "ddp-regions"),
            *("fsdp2", "fsdp2-mixed", "fsdp2-compiled", "fsdp2-regions", "fsdp2-checkpointing", "fsdp2-their-offload"),
            *("fsdp2-parameters-on-cpu", "ddp-recompute", "fsdp2-recompute"),
        ],
        "accelerate",
    ),
    "with_lightning": dict.fromkeys(
        ["ddp", "ddp-accumulation", "ddp-manual", "fully_shard", "ddp-recompute", "fully_shard-recompute"], "lightning"
    ),
}
#: A rank that has two neighbouring stages.
SENDS_TO_ITSELF = wrong_before((2, 12), "pipelines begin with messages to all neighbours, and gloo has none to oneself")


def rows() -> Iterator[Any]:
    for name, (_, _, marks) in LAUNCHES.items():
        together = (*marks, pytest.mark.timeout(600), pytest.mark.xdist_group(f"ranks: {name}"))
        for module, launches in CASES.items():
            of_frameworks = module.startswith("with_")  # which may not be installed
            for scenario in launches if of_frameworks else scenarios_of(module):
                if name in launches.get(scenario, "every").split():
                    known = [SENDS_TO_ITSELF] * (scenario == "v_shaped_zero_bubble")
                    yield pytest.param(name, f"{module}.{scenario}", marks=[*together, *known])


@pytest.fixture(scope="session")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns where the ranks of a launch have run those of its scenarios that are to be tested, and what they said.

    Groups of xdist have one process ask for each launch, so that it runs once.
    """

    @functools.cache
    def run(name: str) -> Path:
        number, thorough, _ = LAUNCHES[name]
        of_tests = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        scenarios = [one["scenario"] for one in of_tests if one.get("of") == name]
        directory = tmp_path_factory.mktemp("ranks")
        (directory / "output").write_text(launch(number, directory, scenarios, thorough=thorough))
        return directory

    return run


@pytest.mark.parametrize(("of", "scenario"), [*rows()])
def test_h06_many_ranks(of: str, scenario: str, ended: Callable[[str], Path]) -> None:
    if of in ("accelerate", "lightning"):
        pytest.importorskip(of)
    directory = ended(of)
    found = [directory / f"{scenario}.{rank}" for rank in range(LAUNCHES[of].number)]
    errors = [f"rank {rank}:\n{one.read_text()}" for rank, one in enumerate(found) if one.exists() and one.read_text()]
    assert not errors, "\n".join(errors)
    assert all(one.exists() for one in found), f"the ranks ended before:\n{(directory / 'output').read_text()[-4000:]}"


# -- one rank fails ---------------------------------------------------------------------------------------------------


def assert_nothing_is_left(directory: Path, output: str) -> None:
    """Asserts that neither a process nor a file is left of two ranks of which one has failed."""
    assert "no rank failed" not in output
    for rank in range(2):
        pid = int((directory / f"pid.{rank}").read_text())  # it was there, and had moved bytes
        assert not psutil.pid_exists(pid), output
    assert list((directory / "spill").iterdir()) == []


QUICK_FAILURE = "fsdp-error-backward"
#: Of one in four, beside the quick one, both strategies, both places and the other two ways are there.
FAILURES = [one for one in failing.SCENARIOS if "wait" not in one and one != QUICK_FAILURE]


@pytest.mark.parametrize(
    "scenario",
    [QUICK_FAILURE, *(pytest.param(one, marks=(pytest.mark.long, pytest.mark.sampled(4))) for one in FAILURES)],
)
def test_all_ranks_end_when_one_fails(scenario: str, tmp_path: Path) -> None:
    output = launch(2, tmp_path, [f"failing.{scenario}"])
    if "error" in scenario:
        assert "the third step of one rank fails" in (tmp_path / f"failing.{scenario}.1").read_text()
    assert_nothing_is_left(tmp_path, output)


@pytest.mark.long
def test_all_ranks_end_when_the_launcher_is_told_to(tmp_path: Path) -> None:
    with started(command_of(2, tmp_path, ["failing.fsdp-wait-backward"])) as process:
        for line in process.stdout or ():
            if "waits" in line:
                process.send_signal(signal.SIGTERM)  # the launcher takes SIGINT alike
                break
        output = process.communicate(timeout=120)[0]
    assert process.returncode != 0, output
    assert_nothing_is_left(tmp_path, output)


@pytest.mark.long
def test_ranks_that_a_lightning_trainer_starts_have_an_offload_each(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    with started([sys.executable, "-m", "tests.ranks.with_lightning", str(tmp_path)]) as process:
        output = process.communicate(timeout=280)[0]
    assert process.returncode == 0, output[-4000:]

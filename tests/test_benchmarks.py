"""The benchmarks run, and leave files of the form that is promised. Their numbers are no part of this."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.sampled(2, of="benchmarks")]

pytest.importorskip("rich", reason="the demo's extra is not installed")

ROOT = Path(__file__).resolve().parent.parent
TINY_MODEL = ["--layers", "1", "--width", "64", "--sequence", "64", "--min-bytes", "4KiB", "--window", "128KiB"]


def bench(name: str, output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(output / f"{name}.json"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)


def measured(name: str, output: Path, *arguments: str) -> dict[str, Any]:
    """What a benchmark writes, after the checks that hold for all of them."""
    ended = bench(name, output, *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = (output / f"{name}.json").read_text()
    content: dict[str, Any] = json.loads(text)
    assert content["benchmark"] == name
    assert content["command"].startswith(f"python -m benchmarks.{name} --output {name}.json")
    assert set(content["commit"]) == {"revision", "dirty"}
    assert {"cpu", "cores", "memory_bytes", "kernel", "torch", "transparent_hugepages"} <= set(content["environment"])
    assert content["limits"]
    for limit in content["limits"]:
        assert set(limit) == {"what", "measured", "bound", "most", "met"}
        assert limit["met"] == (
            limit["measured"] <= limit["bound"] if limit["most"] else limit["measured"] >= limit["bound"]
        )
        assert limit["what"] in ended.stdout
    for private in (str(ROOT), str(output)):
        assert private not in text, "a result names no path of this machine"
    return content


def test_training_compares_variants_pair_by_pair_and_bit_by_bit(tmp_path: Path) -> None:
    variants = ["none, default malloc", "none", "offload", "none, huge pages", "offload, huge pages"]
    arguments = ["--heads", "2", "--batch", "2", "--steps", "1", "--rounds", "1", "--variants", ";".join(variants)]
    content = measured("cpu_train", tmp_path, *TINY_MODEL, *arguments)
    runs = content["samples"]
    assert [run["variant"] for run in runs] == variants
    assert len({(run["losses_hash"], run["parameters_hash"]) for run in runs}) == 1
    for run in runs:
        assert run["peak_bytes"] >= run["base_bytes"] > 0
        assert len(run["losses"]) == len(run["step_seconds"]) == len(run["cpu_seconds"]) == 1
    assert runs[-1]["stats"]["offloaded_bytes"] > 0
    assert content["environment"]["disk"]["write_bytes_per_second"] > 0
    assert set(content["summary"]["offload"]["memory"]) == {"median", "least", "most"}
    limits = {limit["what"] for limit in content["limits"]}
    assert {f"offload{pages}: {what}" for pages in ("", ", huge pages") for what in ("memory", "time")} <= limits
    assert "offload, huge pages: time to default malloc" in limits


def test_codecs_are_compared_on_models_bit_by_bit_and_timed_one_by_one(tmp_path: Path) -> None:
    sizes = ["--width", "64", "--sequence", "64", "--min-bytes", "4KiB", "--window", "1MiB", "--speed-bytes", "65536"]
    content = measured("codecs", tmp_path, "--quick", *sizes)
    trained, speeds = content["summary"]["trained"], content["summary"]["speeds"]
    assert set(trained) == {"llama", "gpt"}
    for found in trained.values():
        assert 0 < found["bytes_out"]["lossless"] < found["bytes_out"]["identity"]
        assert found["refused"] == {}
    assert {limit["what"]: limit["measured"] for limit in content["limits"]}["llama: gradients that differ"] == 0
    assert {"narrow", "bitmask of bool", "bf16", "int8"} <= set(speeds)
    assert all(rates["pack"] > 0 and rates["unpack"] > 0 for rates in speeds.values())
    errors = content["summary"]["errors"]
    assert all(found["rmse"] > 0 for codec in errors.values() for found in codec.values())
    assert errors["int8"]["matmul input"]["bias"] == errors["int8"]["matmul input"]["rmse"]
    assert errors["int8_sr"]["matmul input"]["bias"] < errors["int8_sr"]["matmul input"]["rmse"] / 2


def test_hook_costs_are_kept_call_by_call_for_every_candidate(tmp_path: Path) -> None:
    arguments = ["--calls", "64", "--live", "32", "--repeats", "2", "--sizes", "4KiB"]
    content = measured("hooks", tmp_path, *arguments)
    kept, offloaded = content["samples"]["kept"], content["samples"]["offloaded"]
    followed = "parameter, in a step that is followed"
    assert set(kept) == {"small", "parameter", "weight.t()", "through an operator", followed}
    assert all({"pair that detaches", "kept"} <= set(costs) for costs in kept.values())
    assert {"direct", "followed", "recorded"} < set(offloaded["host, 4KiB"])
    assert set(offloaded) == {"host, 4KiB", "disk, 4KiB"}
    for costs in (*kept["small"].values(), *offloaded["disk, 4KiB"].values()):
        assert len(costs["pack"]) == len(costs["unpack"]) == len(costs["wall"]) == 2


def test_memory_shows_that_offloaded_bytes_are_freed_and_gradients_equal(tmp_path: Path) -> None:
    content = measured("memory", tmp_path, *TINY_MODEL, "--heads", "2", "--batch", "2")
    none, *others = content["samples"]
    assert [found["tier"] for found in others] == ["host", "disk"]
    for found in others:
        assert found["moved_settled"] > 0
        assert none["live_settled"] - found["live_settled"] >= 0.99 * found["moved_settled"]
        assert found["used_at_end"] == 0
        assert found["live_at_end"] == none["live_at_end"]
        assert found["gradients_hash"] == none["gradients_hash"]


def test_h49_small_models_are_compared_pair_by_pair(tmp_path: Path) -> None:
    arguments = ["--rounds", "1", "--steps", "1", "--models", "graph network", "--malloc", "released"]
    content = measured("small_models", tmp_path, *arguments)
    plain, ours = content["samples"]
    assert not plain["offload"]
    assert ours["offload"]
    assert ours["saved_bytes"] > 0
    assert (plain["losses_hash"], plain["parameters_hash"]) == (ours["losses_hash"], ours["parameters_hash"])
    assert all(run["peak_bytes"] > run["base_bytes"] > 0 for run in (plain, ours))


def test_h25_steps_are_sampled_ten_times_and_leave_nothing_behind(tmp_path: Path) -> None:
    content = measured("steps", tmp_path, *TINY_MODEL, "--steps", "20", "--tiers", "disk")
    samples = content["samples"]["disk"]
    assert [one["step"] for one in samples] == list(range(2, 21, 2))
    assert {one["handles"] for one in samples} == {0}
    assert {one["used_bytes"] for one in samples} == {0}
    assert len({(one["threads"], one["descriptors"]) for one in samples}) == 1


def test_the_simulation_compares_every_step_with_its_floor_and_the_best_that_could_be_done(tmp_path: Path) -> None:
    content = measured("simulate", tmp_path, "--quick", "--layers", "2", "--tokens", "8k,128k", "--waits")
    assert set(content["samples"]) == {"8k", "128k"}
    for name, steps in content["samples"].items():
        assert len({step["gradients_hash"] for step in steps}) == 1
        for step in steps:
            assert step["bytes_out"] > 0.5 * content["summary"][name]["saved_bytes"]
            assert step["step_seconds"] >= step["forward_seconds"] + step["backward_seconds"]
            assert step["best_seconds"] > 0.0
            assert step["floor_seconds"] > 0.0
    assert [limit["bound"] for limit in content["limits"] if limit["what"].endswith("step over floor")] == [1.03, 1.03]


def test_what_a_slowdown_comes_to_is_shown_behind_each_link(tmp_path: Path) -> None:
    tiny = ["--layers", "2", "--width", "64", "--sequence", "64", "--min-bytes", "4KiB", "--window", "64KiB"]
    content = measured("slowdown", tmp_path, "--quick", *tiny)
    settings = ["max", "max_slowdown=0.2", "max_slowdown=0.05", "free"]
    assert [one["setting"] for one in content["samples"]] == 2 * settings
    assert [limit["measured"] for limit in content["limits"] if limit["what"].startswith("different")] == [1, 1]
    for one in content["samples"]:
        if one["setting"] == "max":
            assert one["bytes_out"] > 0 < one["waited"]


def test_plans_are_compared_with_training_other_ways_and_a_formula(tmp_path: Path) -> None:
    content = measured("planning", tmp_path, "--quick", "--layers", "2", "--parts", "training,ways,free")
    samples = content["samples"]
    assert all(one["same_bits"] and one["step"] > 0 for one in samples["training"])
    assert {(one["jitter"], one["link"]) for one in samples["training"]} == {(0, 1), (0.3, 0.8), (0.3, 1), (0.3, 1.2)}
    assert len({way["name"] for way in samples["ways"]["ways"]}) == 5
    assert all(one["fits"] and one["way_seconds"] > 0 for one in samples["ways"]["plans"])
    assert [(one["tokens"], one["fused"]) for one in samples["free"]] == [("8k", False), ("8k", True)]
    apart, fused = samples["free"]  # one kernel computes again what the others save
    assert fused["saved_bytes"] < apart["saved_bytes"]
    assert fused["formula_bytes"] < apart["formula_bytes"]


@pytest.mark.parametrize("part", ["cost", "cpu"])
def test_plans_and_their_steps_are_measured_in_processes_of_their_own(part: str, tmp_path: Path) -> None:
    tiny = ["--cpu-layers", "1", "--cpu-width", "64", "--cpu-heads", "2", "--sequence", "64", "--min-bytes", "4KiB"]
    tiny += ["--layers", "2", "--window", "128KiB", "--parts", part]
    (found,) = measured("planning", tmp_path, "--quick", *tiny)["samples"][part]
    if part == "cost":
        assert found["seconds"] > 0 < found["above_bytes"]
    else:
        assert found["bytes_out"] > 0 < found["followed"]


def test_what_is_learnt_is_shown_for_each_program_on_both_devices(tmp_path: Path) -> None:
    arguments = [
        "--quick",
        "--layers",
        "2",
        "--width",
        "64",
        "--sequence",
        "64",
        "--window",
        "256KiB",
        "--min-bytes",
        "4KiB",
    ]
    content = measured("learning", tmp_path, *arguments)
    steps = content["samples"]
    assert len(steps) == 3 * 2 * 6
    assert {(step["program"], step["device"]) for step in steps} == {
        (program, device) for program in ("towers", "language model", "results held") for device in ("simulated", "CPU")
    }
    assert all(step["offloaded_bytes"] > 0 for step in steps)
    assert all(step["followed"] for step in steps if step["number"] == 5), "what stands as followed has followed"
    assert not any(step["followed"] for step in steps if step["number"] < 3)


def test_steps_behind_a_token_bucket_are_compared_with_the_floor_of_their_round(tmp_path: Path) -> None:
    arguments = ["--heads", "2", "--batch", "2", "--quick", "--ratios", "0.5,2"]
    content = measured("cpu_floor", tmp_path, *TINY_MODEL, *arguments)
    steps, floors = content["samples"]["steps"], content["samples"]["floors"]
    assert len({step["gradients_hash"] for step in steps if step["codec"] == "identity"}) == 1
    assert [(one["ratio"], one["codec"]) for one in floors] == [(0.5, "identity"), (0.5, "bf16"), (2.0, "identity")]
    rounded = [step for step in steps if step["codec"] == "bf16"]
    assert all(step["coded_bytes"] > 0 for step in rounded)
    assert rounded[0]["bytes_out"] < steps[-1]["bytes_out"]
    assert all(step["bytes_out"] > 0 for step in steps if step["ratio"] is not None)
    assert all(one["floor_seconds"] > 0 for one in floors)
    ways = ("0.5 x free", "0.5 x free, bf16", "2 x free")
    assert {f"{way}: step over floor" for way in ways} <= {one["what"] for one in content["limits"]}


def test_the_disk_tier_is_compared_with_dd_in_turn_on_the_same_file(tmp_path: Path) -> None:
    content = measured("disk", tmp_path, "--quick", "--slot", "2MiB", "--slots", "4", "--disk-path", str(tmp_path))
    samples = content["samples"]
    assert {one["side"] for one in samples} == {"tier", "dd, 1 MiB", "dd, 8 MiB"}
    assert {one["round"] for one in samples} == {0, 1}
    assert all(one["bytes_per_second"] > 0 for one in samples)
    order = [one["side"] for one in samples if one["way"] == "write"]
    assert order == ["dd, 1 MiB", "dd, 8 MiB", "tier", "tier", "dd, 1 MiB", "dd, 8 MiB"]
    assert {limit["bound"] for limit in content["limits"]} == {0.9}


def test_looking_is_compared_step_by_step_and_changes_no_bit(tmp_path: Path) -> None:
    content = measured("observe", tmp_path, *TINY_MODEL, "--heads", "2", "--batch", "2", "--pairs", "2")
    pairs = content["samples"]["pairs"]
    assert len(pairs) == 2
    assert all(one["traced"] > one["end"] > 0 < one["plain"] for one in pairs)
    assert pairs[0]["slices"] > 0 < pairs[0]["file_bytes"]
    (counted,) = content["samples"]["counted"]
    assert counted["calls"]["Hooks.pack"] == counted["calls"]["TraceRecorder.pack"] > 0
    limits = {limit["what"]: limit for limit in content["limits"]}
    assert limits["different results"]["measured"] == 1
    assert 0 < limits["stats, part of a step"]["measured"] < content["summary"]["hooks_share"]["median"]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("cpu_train", ["--variants", "nothing"], "'nothing' is not one of none, default malloc; none;"),
        ("steps", ["--steps", "0"], "argument --steps"),
        ("simulate", ["--tokens", "9k"], "'9k' is not one of 8k, 32k, 128k"),
        ("cpu_floor", ["--ratios", "0"], "a link moves more than nothing"),
        ("planning", ["--parts", "all"], "'all' is not one of cost, training, ways, free, cpu"),
        ("slowdown", ["--links", "1,0"], "a link moves more than nothing"),
    ],
)
def test_a_bad_option_is_named(
    name: str,
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--output", str(tmp_path / "result.json"), *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missed_limit_fails_only_when_it_is_checked(tmp_path: Path) -> None:
    # The spill file grows by more at once than so small a model saves.
    arguments = [
        "--layers",
        "1",
        "--width",
        "32",
        "--heads",
        "2",
        "--sequence",
        "32",
        "--batch",
        "1",
        "--tiers",
        "disk",
    ]
    ended = bench("memory", tmp_path, *arguments, "--min-bytes", "4KiB", "--window", "16KiB", "--check")
    content = json.loads((tmp_path / "memory.json").read_text())
    missed = [limit["what"] for limit in content["limits"] if not limit["met"]]
    assert missed == ["disk: held / moved bytes"]
    assert ended.returncode == 1


def test_peers_run_beside_ours_on_the_virtual_device(tmp_path: Path) -> None:
    content = measured("virtual_peers", tmp_path, "--quick", "--layers", "1")
    ran = [run for run in content["samples"] if run["failure"] is None]
    assert {"none", "save_on_cpu", "ours, defaults", "ours, all"} <= {run["way"] for run in ran}
    assert all(run["same_bits"] for run in ran if not run["way"].startswith("TRL"))
    assert all(run["bytes_out"] > 0 for run in ran if run["way"] == "save_on_cpu")
    assert all(run["peak_bytes"] > 0 and run["step_seconds"] for run in ran)

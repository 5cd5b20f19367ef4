"""``python -m eager_offload plan``: its output, its page and its status."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import eager_offload as eo
from eager_offload.__main__ import main
from tests.processes import printed_by

MODELS = "tests.planning.models_of_a_user"
GIB = 1 << 30


#: The command in a process that has no more memory than a laptop.
COMMAND = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, ({16 * GIB}, {16 * GIB}))
from eager_offload.__main__ import main
sys.exit(main(["plan", *sys.argv[1:]]))
"""


@pytest.mark.long
def test_a_llama_of_70b_on_meta_is_planned_in_a_fresh_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    saved = tmp_path / "plan.json"
    options = ("--device", "h200", "--optimizer", "none", "--device-budget", "400GiB", "--json", "--save", saved)
    report = json.loads(printed_by("-c", COMMAND, f"{MODELS}:seventy_billion", *options))
    parameters = 2 * 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672)
    assert report["fits"] is True
    assert 2 * parameters < report["least_budget"] < report["peak_bytes"] <= 400 * GIB, "with gradients"
    assert 100 * GIB < report["moved_bytes"] < 400 * GIB
    assert report["compute_seconds"] < report["floor_seconds"] <= report["step_seconds"]
    assert eo.Plan.load(saved).to_dict() == report


def test_the_front_is_in_the_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{MODELS}:two_blocks", "--device", "a100", "--front", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["front"]) == 8
    assert report["front"][0]["budget"] == report["least_budget"]
    assert report["front"][-1]["step_seconds"] == report["step_seconds"]
    assert report["step_seconds"] == pytest.approx(report["compute_seconds"], rel=1e-3), "and the host's first call"


def test_optimizers_and_meshes_have_names_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    def subject(*options: str) -> str:
        main(["plan", f"{MODELS}:two_blocks", "--device", "a100", *options])
        return capsys.readouterr().out.splitlines()[1].partition(" on ")[0]

    assert subject("--mesh", "2,8", "--accumulation", "4") == (
        "Stack, sharded over 8 devices, with 208.0 MiB of AdamW states"
    )
    assert subject("--optimizer", "sgd") == "Stack with 0 B of SGD states"
    assert subject("--optimizer", "none") == "Stack without optimizer states"
    for options, said in (
        (("--optimizer", "adamx"), "--optimizer 'adamx' is not accepted: it takes none, adadelta, adafactor, "),
        (("--mesh", "2x8"), "--mesh '2x8' is not accepted: it takes sizes, such as 8 or 2,8"),
        (("--mesh", "0"), "mesh=(0,) is not accepted"),
        (("--accumulation", "0"), "accumulation=0 is not accepted"),
    ):
        assert main(["plan", f"{MODELS}:two_blocks", "--device", "a100", *options]) == 2
        assert said in capsys.readouterr().err


def test_tensor_parallelism_is_planned_without_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device", "h200", "--mesh", "fsdp=8,tp=2", "--policy", "max")
    assert main(["plan", f"{MODELS}:two_blocks_divided", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    shards = f"{2 * 2 * 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 // 2 + 2 * 4096) / 8 / 2**20:,.1f} MiB"
    assert lines[1].startswith(f"Stack, each matrix over 2, sharded over 8 devices, with {shards} of AdamW states on")
    (node,) = [line for line in lines if line.startswith("each node of 8 devices: a peak of ")]
    assert re.search(r"GiB on them, and [\d.]+ GiB of its own memory$", node)
    assert not torch.distributed.is_initialized()
    assert main(["plan", f"{MODELS}:two_blocks", "--device", "h200", "--mesh", "fsdp=8,tp=2"]) == 2
    assert "call parallelize_module with it before, over a mesh of 2" in capsys.readouterr().err


def test_the_status_is_1_where_it_does_not_fit_and_2_where_there_is_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{MODELS}:two_blocks", "--device", "rtx4090", "--device-budget", "1GiB", "--front"]) == 1
    output = capsys.readouterr().out
    assert "Stack with 1.6 GiB of AdamW states on rtx4090" in output
    assert re.match(r"does not fit: \d+\.\d GiB, more than the budget of 1\.0 GiB; ", output)
    assert "less is taken with recompute=True (--recompute), a smaller batch" in output
    front = output.rpartition("     budget")[2].splitlines()
    assert len(front) == 9 + 3
    assert front[-1].endswith(" s  all that may moves")
    for function, said in (
        (f"{MODELS}:questions", "Train without a plan, with Offload(device_budget=...)"),
        (f"{MODELS}:nothing", "it must return (model, inputs)"),
        (f"{MODELS}:raises", f"eager_offload plan: {MODELS}:raises: FileNotFoundError: no weights\n"),
        (f"{MODELS}:shapes", "met this error in module '1'"),
        (f"{MODELS}:other", "is not accepted: module"),
        ("no_such_module:function", "No module named 'no_such_module'"),
        (MODELS, "name a function as module:function"),
    ):
        assert main(["plan", function, "--device", "h200"]) == 2
        output = capsys.readouterr().err
        assert said in output
        assert output.count("\n") == 1
    assert main(["plan", f"{MODELS}:questions", "--device", "h300"]) == 2
    assert main(["plan", "os:path"]) == 2
    assert main(["plan", "..x:f"]) == 2
    with pytest.raises(SystemExit):
        main(["plan", "--policy", "most"])


def test_a_plan_is_drawn_as_a_figure_and_the_command_writes_it_as_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--save", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]
    assert main(["plan", f"{MODELS}:two_blocks", "--device", "h200", "--device-budget", "2GiB", *files]) == 1
    assert f"{tmp_path / 'plan.html'}: " in capsys.readouterr().out.splitlines()[-1]
    page = (tmp_path / "plan.html").read_text("utf-8")
    assert "it does not fit" in page
    assert "Plotly.newPlot" in page
    plan = eo.Plan.load(tmp_path / "plan.json")
    figure = replace(plan, model="<img src=x onerror=alert(1)>").figure()
    assert "<img" not in figure.layout.title.text
    drawn = {one.name.partition(",")[0]: one for one in figure.data if one.name}
    assert max(drawn["with this plan"].y) <= plan.peak_bytes
    assert max(drawn["without offload"].y) == pytest.approx(plan.fixed_ways()[0].peak_bytes, rel=1e-6)
    assert {*drawn["budget"].y} == {2 * GIB}
    front, best = plan.front(), drawn["best plans"]
    assert [*best.x] == [one.budget for one in front]
    assert [*best.y] == [one.step_seconds / plan.compute_seconds for one in front]
    for way in plan.fixed_ways():
        assert (*drawn[way.name].x, *drawn[way.name].y) == (way.peak_bytes, way.step_seconds / plan.compute_seconds)
    said = [line for one in figure.data if one.type == "table" for column in one.cells["values"] for line in column]
    assert {*str(plan).splitlines()[2:5]} <= {*said}


def test_times_of_a_machine_whose_measurements_differ_are_about(tmp_path: Path) -> None:
    main(["plan", f"{MODELS}:two_blocks", "--device", "a100", "--save", str(tmp_path / "plan.json")])
    plan = eo.Plan.load(tmp_path / "plan.json")
    assert "step: about" not in str(replace(plan, machine=replace(plan.machine, spread=1.4)))
    rough = replace(plan, machine=replace(plan.machine, spread=1.6))
    assert "; medians, spread 1.60\n" in str(rough)
    assert "step: about" in str(rough)
    assert "lower bound about" in str(rough)
    assert ", about " in repr(rough)
    assert any(
        "about" in line for one in rough.figure().data if one.type == "table" for (line, *_) in one.cells["values"]
    )

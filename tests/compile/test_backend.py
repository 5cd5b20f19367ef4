"""The ways to a compiled model: a backend's name, ``Offload.compile``, a context around any compiled function."""

from __future__ import annotations

import logging
import os
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass, scheduler
from torch._inductor.virtualized import V

import eager_offload as eo
from eager_offload.compile import insert
from eager_offload.compile.backend import eager_offload as backend
from eager_offload.compile.order import OrderTransfers, with_pass
from eager_offload.torch_private import inductor
from tests.processes import ROOT, printed_by
from tests.threads import collect, on_a_thread

pytestmark = pytest.mark.xdist_group("backend")

SMALL: dict[str, Any] = {"min_bytes": 0, "keep_last_bytes": 0, "tier": "disk"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[eo.Offload]:
    one = eo.Offload(**SMALL, disk_path=tmp_path)
    yield one
    collect()
    assert one.stats(synchronize=True).offloaded_bytes > 0, "something moved"
    lane = one._offloaders.of(torch.device("cpu"))
    assert not any(lane.census())
    one.close()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))


def step(call: Callable[..., Any], parameters: list[Tensor], seed: int = 1) -> list[Tensor]:
    """The output and every gradient of one step."""
    for parameter in parameters:
        parameter.grad = None
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    y = call(x)
    y.square().sum().backward()
    gradients = [parameter.grad for parameter in parameters]
    return [y.detach(), *(gradient for gradient in [x.grad, *gradients] if gradient is not None)]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) > 2
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def plain() -> list[Tensor]:
    """A step as Inductor compiles it, without offload."""
    torch._dynamo.reset()
    one = model()
    return step(torch.compile(one), list(one.parameters()))


class Count(inductor.CustomGraphPass):
    """A pass of a user."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> object:
        return None


@pytest.mark.long
def test_the_backend_offloads_inside_of_its_graphs_beside_passes_for_everyone(
    plain: list[Tensor], tmp_path: Path
) -> None:
    one, options, everyones = model(), {**SMALL, "disk_path": str(tmp_path), "max_autotune": False}, Count()
    with inductor_config.patch(post_grad_custom_post_pass=everyones):
        compiled = torch.compile(one, backend=backend, options=options)
        standing = eo.Offload.serving(**SMALL, disk_path=tmp_path)
        for _ in range(2):
            assert_equal(step(compiled, list(one.parameters())), plain)
    assert everyones.calls == 2, "forward and backward"
    stats = standing.stats(synchronize=True)
    assert stats.compiled_regions == 2
    assert stats.offloaded_bytes == stats.reloaded_bytes > 0
    assert stats.fallbacks == {}
    standing.close()


@pytest.mark.long
def test_the_backend_has_a_name_that_needs_no_import(tmp_path: Path) -> None:
    """As pip writes it: the metadata that the project's own file describes, on the path of a process of its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (info := tmp_path / "eager_offload-0.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eager_offload\nVersion: 0.0\n")
    entries = project["entry-points"]["torch_dynamo_backends"]
    lines = [f"{name} = {place}" for name, place in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *lines]))
    program = (
        "import torch\n"
        "f = torch.compile(lambda x: ((x @ x).tanh() @ x).exp().sum(), backend='eager_offload',"
        " options={'min_bytes': 0, 'keep_last_bytes': 0})\n"
        "x = torch.randn(64, 64, requires_grad=True)\n"
        "f(x).backward()\n"
        "import eager_offload as eo\n"
        "print(eo.Offload.serving(min_bytes=0, keep_last_bytes=0).stats(synchronize=True).compiled_regions)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    assert printed_by("-W", "ignore", "-c", program, PYTHONPATH=paths).split() == ["1"]


@pytest.mark.long
def test_cudagraphs_are_off_for_graphs_that_move_anything(
    plain: list[Tensor], offload: eo.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on for those in which nothing moves. On a CPU there are none, and nobody is told of that."""
    seen: list[tuple[bool, bool]] = []
    codegen = scheduler.Scheduler.codegen

    def generated(self: scheduler.Scheduler) -> None:
        refused = "saved tensors" in (V.graph.disable_cudagraphs_reason or "")
        seen.append((bool(inductor_config.triton.cudagraphs), refused))
        codegen(self)

    monkeypatch.setattr(scheduler.Scheduler, "codegen", generated)
    few = eo.Offload(**SMALL | {"min_bytes": 1 << 40})
    with inductor_config.patch({"triton.cudagraphs": True}), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for around, expected in ((few, (True, False)), (offload, (False, True))):
            torch._dynamo.reset()
            seen.clear()
            one = model()
            with around:
                assert_equal(step(torch.compile(one), list(one.parameters())), plain)
            assert seen == [expected] * 2, "forward and backward"
            assert inductor_config.triton.cudagraphs
    assert few.stats(synchronize=True).saved_bytes > 0


class Aware(getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", Count)):  # type: ignore[misc]
    """A pass of a user that asks for inference, where torch tells."""

    reported: ClassVar[list[bool]] = []

    def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
        self.reported.append(is_inference)

    def uuid(self) -> object:
        return None


@pytest.mark.long
def test_a_module_compiled_by_an_offload_is_served_by_it_beside_passes_of_the_user(
    plain: list[Tensor], offload: eo.Offload
) -> None:
    one, theirs = model(), Count()
    options = {"post_grad_custom_post_pass": [Aware(), theirs], "max_autotune": False}
    compiled = offload.compile(one, fullgraph=True, options=options)
    assert isinstance(compiled, nn.Module)
    assert_equal(step(compiled, list(compiled.parameters())), plain)
    assert list(compiled.state_dict()) == [f"_orig_mod.{name}" for name in one.state_dict()]
    stats = offload.stats(synchronize=True)
    assert stats.compiled_regions == 1
    assert "unpinned" not in stats.fallbacks
    assert theirs.calls == 2, "forward and backward"
    with torch.no_grad():
        compiled(torch.randn(4, 16))
    assert theirs.calls == 3
    if hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"):
        assert Aware.reported == [False, False, True]


@pytest.mark.long
def test_a_pass_that_takes_the_place_of_ours_is_counted_and_told(plain: list[Tensor], offload: eo.Offload) -> None:
    one, theirs = model(), Count()
    compiled = torch.compile(one, options={"post_grad_custom_post_pass": theirs})
    with pytest.warns(RuntimeWarning, match=r"waits for each of its transfers.*offload\.compile"), offload:
        assert_equal(step(compiled, list(one.parameters())), plain)
    with offload:
        assert_equal(step(compiled, list(one.parameters())), plain)
    assert offload.stats(synchronize=True).fallbacks["unpinned"] == 2


@pytest.mark.filterwarnings("ignore:eager_offload. autograd recorded operators:RuntimeWarning")
def test_a_graph_that_is_compiled_under_hooks_of_others_is_theirs(offload: eo.Offload) -> None:
    """The compiler knows nothing of ours there, and would keep the graph for calls that are in no context at all."""
    one = model()
    plain = step(one, list(one.parameters()))
    compiled = torch.compile(one, backend="aot_eager")
    theirs = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with pytest.warns(RuntimeWarning, match="other saved-tensor hooks"), offload, theirs:
        assert_equal(step(compiled, list(one.parameters())), plain)
    stats = offload.stats(synchronize=True)
    assert (stats.compiled_regions, stats.foreign_hooks) == (0, 1)
    with offload:
        assert_equal(step(compiled, list(one.parameters())), plain)
    assert offload.stats(synchronize=True).compiled_regions == 1


@pytest.mark.long
def test_what_other_threads_compile_is_ordered_as_well(plain: list[Tensor], offload: eo.Offload) -> None:
    one = model()
    compiled = torch.compile(one)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ran = list[Tensor]()

    def forward() -> None:
        with offload:
            ran.append(compiled(x))

    on_a_thread(forward)
    y = ran.pop()
    loss = y.square().sum()
    on_a_thread(loss.backward)
    gradients = [one.grad for one in (x, *one.parameters())]
    assert_equal([y.detach(), *(gradient for gradient in gradients if gradient is not None)], plain)
    assert "unpinned" not in offload.stats(synchronize=True).fallbacks
    del y, loss


def test_a_compiler_that_inlines_no_hooks_is_offloaded_around_its_graphs(
    offload: eo.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = model()
    expected = step(one, list(one.parameters()))
    monkeypatch.setattr("eager_offload.torch_private.inductor._HOOK_INLINING", "no_such_name")
    monkeypatch.setattr(insert, "patches", insert.patches.__wrapped__)  # which has not asked yet
    compiled = torch.compile(one, backend="aot_eager")
    with pytest.warns(RuntimeWarning, match="does not let saved-tensor hooks into compiled graphs"), offload:
        results = step(compiled, list(one.parameters()))
    assert_equal(results, expected)
    stats = offload.stats(synchronize=True)
    assert stats.fallbacks == {"uncompiled": 1}
    assert stats.compiled_regions == 0


def test_a_log_says_of_each_value_what_becomes_of_it(offload: eo.Offload, caplog: pytest.LogCaptureFixture) -> None:
    one = model()
    with caplog.at_level(logging.DEBUG, logger="eager_offload.compile"), offload:
        step(torch.compile(one, backend="aot_eager"), list(one.parameters()))
    said = [record.getMessage() for record in caplog.records]
    assert any(" moves: " in line for line in said)
    assert any(line.endswith(" stays: parameter") for line in said)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"mode": "max-autotune"}, r"mode='max-autotune' is not accepted by backend=\"eager_offload\""),
    "unknown option": ({"options": {"min_byte": 1}}, r"unknown option 'min_byte'.*min_bytes.*list_options"),
    "bad value": ({"options": {"min_bytes": -1}}, r"min_bytes=-1 is not accepted"),
    "bad pair": ({"options": {"tier": "host", "disk_path": "/tmp"}}, r"disk_path=.* does not go with"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_what_the_backend_does_not_take_it_names(arguments: dict[str, Any], message: str) -> None:
    graph = torch.fx.symbolic_trace(nn.Identity())
    with pytest.raises(eo.ConfigError, match=message):
        backend(graph, [], **arguments)


def test_compile_of_an_offload_refuses_the_backend_that_has_a_configuration_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(eo.ConfigError, match=r"has a configuration of its own.*options=\{\.\.\.\}"):
        eo.Offload(disk_path=tmp_path).compile(model(), backend="eager_offload")


def test_what_the_options_name_comes_before_what_is_configured_for_everyone() -> None:
    everyones, named = Count(), Count()
    with inductor_config.patch(post_grad_custom_post_pass=OrderTransfers(everyones)):
        assert with_pass({})["post_grad_custom_post_pass"].inner is everyones, "and ours are there once"
        for name in ("post_grad_custom_post_pass", "post-grad-custom-post-pass"):
            assert with_pass({name: named})["post_grad_custom_post_pass"].inner is named
        assert with_pass({"post_grad_custom_post_pass": None})["post_grad_custom_post_pass"].inner is None


def test_a_configuration_of_defaults_serves_compiled_code() -> None:
    """Its text, by which compilers are told of it, is empty."""
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(2048, 256)
    with eo.Offload() as offload:
        loss = compiled(x).square().mean()
    loss.backward()
    stats = offload.stats(synchronize=True)
    assert (stats.compiled_regions, stats.offloaded_tensors > 0) == (1, True)
    offload.close()

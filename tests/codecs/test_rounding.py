"""What is saved where a codec that rounds is in force is rounded, to the same numbers in each step; nothing else is."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload import Offload, OffloadStats, TransferError
from eager_offload._torch import module_call, weak_storage
from eager_offload.codecs import TensorMeta
from eager_offload.codecs.names import ROUNDING
from eager_offload.step_plan import StepPlan
from eager_offload.tiers.disk import DiskSlot
from tests.codecs.tensors import COPIES, Summed, coded
from tests.hazards.backends import Backend, DiskBackend, Gate, assert_settled, offloader_of
from tests.hazards.programs import Settled, assert_identical, leaf
from tests.hazards.wrappers import two as wrapped_two
from tests.threads import collect

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 32, 64
BYTES = ROWS * WIDTH * 4
EACH = pytest.mark.parametrize("codec", ROUNDING)


@pytest.fixture(params=[False, True], ids=["decided", "followed"])
def plans(request: pytest.FixtureRequest) -> bool:
    """Whether steps follow a plan of an earlier one."""
    return bool(request.param)


def rounded(codec: str, x: Tensor) -> Tensor:
    return coded(ROUNDING[codec], x).back


def product(
    around: Any,
    inner: Callable[[Tensor, Tensor], Tensor] = torch.mul,
    region: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Tensor]:
    """The gradient of the second factor is the first one, as backward was given it, where ``inner`` says no other.

    ``inner`` runs inside of ``region``, the sine that comes before outside.
    """
    x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
    with around:
        h = x.sin()
        with region():
            y = inner(h, weight)
        loss = y.sum()
    del h, y
    loss.backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [x.grad, weight.grad]


def steps(offload: Offload, program: Callable[[Any], Any], count: int) -> list[Any]:
    """So many steps, each of which has left whole before its backward."""
    found = []
    for _ in range(count):
        found.append(program(Settled(offload)))
        collect()
    return found


def exact_steps(backend: Backend, program: Callable[[Any], Any], count: int = 4, **fields: Any) -> OffloadStats:
    """Asserts that ``program`` has the same bits in each of so many steps, and moves bytes."""
    torch.manual_seed(0)
    expected = program(nullcontext())
    offload = backend.offload(**{"codec": "int8", **fields})
    for step in range(count):
        torch.manual_seed(0)
        assert_identical(expected, program(Settled(offload)), f"step {step}")
        collect()
    stats = assert_settled(offload)
    assert stats.bytes_out > 0
    offload.close()
    return stats


# -- rounded ----------------------------------------------------------------------------------------------------------


@EACH
def test_what_is_saved_in_a_region_is_rounded_and_nothing_else_changes_by_a_bit(
    backend: Backend, plans: bool, codec: str
) -> None:
    exact = product(nullcontext())
    offload = backend.offload(step_plans=plans)
    for found in steps(offload, lambda around: product(around, region=lambda: eo.codec(codec)), 4):
        assert torch.equal(found[1], rounded(codec, exact[1]))
        assert not torch.equal(found[1], exact[1])
        assert torch.equal(found[0], exact[0]), "the sine saves outside, and the product reads its other factor there"
    stats = assert_settled(offload)
    layout = ROUNDING[codec].layout(TensorMeta.of(exact[1]))
    assert stats.coded_bytes == {codec: 4 * BYTES}
    assert stats.packed_bytes == {codec: 4 * layout.nbytes}
    assert stats.followed_forwards == (3 if plans else 0)
    assert stats.bytes_out == stats.offloaded_bytes - 4 * (BYTES - layout.nbytes)
    assert not stats.plan_misses


@EACH
def test_a_setting_rounds_whatever_is_saved(backend: Backend, plans: bool, codec: str) -> None:
    exact = product(nullcontext())[1]
    offload = backend.offload(codec=codec, step_plans=plans)
    for found in steps(offload, product, 4):
        assert torch.equal(found[1], rounded(codec, exact))
    assert set(assert_settled(offload).coded_bytes) == {codec}


class Product(nn.Module):
    """The gradient of its weight is what its product has saved, as backward was given it."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(leaf(ROWS, WIDTH, seed=2).detach()), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.saved(x) * self.weight

    def saved(self, x: Tensor) -> Tensor:
        return (x * self.scale).cumsum(-1)  # no partitioner has backward compute a sum of that kind again


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Product(2.0), Product(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mlp, self.last, self.region = Product(1.0), Mlp(), Product(4.0), nullcontext

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            last = self.last(x)
        return (self.first(x) + self.mlp(x) + last).sum()


#: By setting, what rounds the saves of first, mlp.a, mlp.b and last.
SETTINGS: list[tuple[Any, tuple[str, ...]]] = [
    ({"*": "lossless", "mlp": "fp8"}, ("", "fp8", "fp8", "")),
    ({"mlp": "fp8", "mlp.b": "identity"}, ("", "fp8", "", "")),
    ({"mlp.b": "identity", "mlp": "fp8"}, ("", "fp8", "fp8", "")),
    ({"*": "bf16", "*.a": "int8"}, ("bf16", "int8", "bf16", "bf16")),
    ({"mlp": "fp8", "*": "lossless"}, ("", "", "", "")),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("setting", "expected"), SETTINGS, ids=str)
def test_modules_are_named_and_a_region_comes_before_them(
    users_backend: Backend, setting: Any, expected: tuple[str, ...], compiled: bool
) -> None:
    if compiled and torch.accelerator.is_available():
        pytest.skip("the compiler knows no such device")
    for region, last in ((nullcontext, expected[-1]), (lambda: eo.codec("int8"), "int8")):
        model, x = Model(), leaf(ROWS, WIDTH)
        model.region = region
        offload = users_backend.offload(codec=setting)
        offload.skip_in(model)
        run = offload.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for _ in range(2):
            with warnings.catch_warnings(action="ignore"):  # that such a backend orders no transfers
                with Settled(offload):
                    loss = run(x)
                loss.backward()
            products = (model.first, model.mlp.a, model.mlp.b, model.last)
            for product, codec in zip(products, (*expected[:-1], last), strict=True):
                exact = product.saved(x.detach())
                assert torch.equal(product.weight.grad, rounded(codec, exact) if codec else exact), codec
                product.weight.grad = None
            del loss
        stats = offload.stats(synchronize=True)
        assert set(stats.coded_bytes) == {*expected[:-1], last} - {""}
        assert stats.bytes_out > 0
        offload.close()
        torch.compiler.reset()


def saved_by(product: Product, offload: Offload, x: Tensor, run: Any = None) -> Tensor:
    """What ``product`` has saved, as backward was given it: ``run``, or itself, was called."""
    product.weight.grad = None
    with warnings.catch_warnings(action="ignore"), Settled(offload):
        loss = (product if run is None else run)(x).sum()
    loss.backward()
    assert product.weight.grad is not None
    return product.weight.grad


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("other", ["bf16", "int8"])
def test_modules_are_those_that_an_object_was_told_of(users_backend: Backend, other: str, compiled: bool) -> None:
    """Whatever others were told of, by the same names, in the same thread."""
    if compiled and (other == "int8" or torch.accelerator.is_available()):
        pytest.skip("graphs belong to settings, and the compiler knows no such device")
    mine, theirs, x = Model(), Model(), leaf(ROWS, WIDTH)
    offload, another = (users_backend.offload(codec={"mlp": codec}) for codec in ("int8", other))
    offload.skip_in(mine)
    another.skip_in(theirs)
    for model in (theirs, mine):
        run = torch.compile(model, backend="aot_eager") if compiled else model
        exact = model.mlp.a.saved(x.detach())
        found = saved_by(model.mlp.a, offload, x, run)
        assert torch.equal(found, rounded("int8", exact) if model is mine else exact)
    assert offload.stats(synchronize=True).bytes_out > 0
    another.close()
    offload.close()
    torch.compiler.reset()


def test_a_module_that_has_other_names_in_a_second_model_has_these_too(users_backend: Backend) -> None:
    shared, x = Product(2.0), leaf(ROWS, WIDTH)
    offload, exact = users_backend.offload(codec={"first": "bf16", "last": "int8"}), shared.saved(x.detach())
    offload.skip_in(nn.ModuleDict({"first": shared, "last": Product(1.0)}))
    assert torch.equal(saved_by(shared, offload, x), rounded("bf16", exact))
    offload.skip_in(nn.ModuleDict({"first": Product(1.0), "last": shared}))
    assert torch.equal(saved_by(shared, offload, x), rounded("int8", exact))
    offload.close()
    assert module_call(shared) is None


def test_objects_that_have_gone_stay_around_no_module() -> None:
    """Whether they were closed, and in which order."""
    product, x, offloads, depths = Product(2.0), leaf(ROWS, WIDTH), list[Offload](), list[int]()
    product.register_forward_hook(lambda *_: depths.append(len(inspect.stack())))
    exact = rounded("int8", product.saved(x.detach()))
    for number in range(20):
        offloads.append(Offload(tier="host", min_bytes=0, keep_last_bytes=0, codec={"0": "int8"}))
        offloads[-1].skip_in(nn.Sequential(product))
        assert torch.equal(saved_by(product, offloads[-1], x), exact)
        if number % 2:
            offloads.pop(0).close()
        elif len(offloads) > 1:
            del offloads[0]
    assert depths[-1] < depths[0] + 10


@pytest.mark.parametrize(
    "wrap",
    [nn.Sequential, nn.DataParallel, partial(torch.compile, backend="eager")],
    ids=["in a row", "in parallel", "compiled"],
)
def test_an_attribute_may_be_called_as_those_of_wrappers_are(users_backend: Backend, wrap: Any) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self._orig_mod = Product(2.0), Product(3.0)

    model, x = Holder(), leaf(ROWS, WIDTH)
    before = "0." if wrap is nn.Sequential else ""
    offload = users_backend.offload(codec={f"{before}module": "int8", f"{before}_orig_mod": "bf16"})
    offload.skip_in(wrap(model))
    for product, codec in ((model.module, "int8"), (model._orig_mod, "bf16")):
        assert torch.equal(saved_by(product, offload, x), rounded(codec, product.saved(x.detach())))
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()


@pytest.mark.parametrize(
    ("inner", "outer"), [("identity", "bf16"), ("lossless", "fp8"), ("bf16", "identity"), ("fp8", "int8")]
)
def test_the_innermost_region_counts(users_backend: Backend, inner: str, outer: str) -> None:
    def nested() -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(eo.codec(outer))
        stack.enter_context(eo.codec(inner))
        return stack

    exact = product(nullcontext())[1]
    offload = users_backend.offload(codec="int8")
    (found,) = steps(offload, lambda around: product(around, region=nested), 1)
    assert torch.equal(found[1], rounded(inner, exact) if inner in ROUNDING else exact)


def test_a_region_is_of_its_thread_and_decorates_functions(users_backend: Backend) -> None:
    exact, found = product(nullcontext())[1], dict[str, Tensor]()
    offload, device = users_backend.offload(), torch.get_default_device()

    def run(name: str) -> None:
        with device:
            found[name] = product(Settled(offload))[1]

    with eo.codec("bf16"):
        thread = threading.Thread(target=run, args=("another",))
        thread.start()
        thread.join()
    eo.codec("bf16")(run)("decorated")
    run("behind")
    assert torch.equal(found["another"], exact)
    assert torch.equal(found["decorated"], rounded("bf16", exact))
    assert torch.equal(found["behind"], exact)


def test_backward_twice_sees_the_same_numbers(backend: Backend, plans: bool) -> None:
    def twice(around: Any, *, holds: bool = False) -> list[Tensor]:
        x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
        with around:
            h = x.sin()
            loss = (h * weight).sum()
        held = h if holds else None
        del h
        first = torch.autograd.grad(loss, weight, retain_graph=True)
        alive = torch.autograd.grad(loss, weight, retain_graph=True)
        del held  # what was alive until now is not served from here on
        return [*first, *alive, *torch.autograd.grad(loss, weight)]

    offload = backend.offload(codec="int8", step_plans=plans)
    expected = rounded("int8", product(nullcontext())[1])
    for gradients in [*steps(offload, twice, 4), *steps(offload, lambda around: twice(around, holds=True), 1)]:
        assert all(torch.equal(one, expected) for one in gradients)
    assert assert_settled(offload).packed_bytes["int8"] > 0


@pytest.mark.parametrize("fails", [False, True])
def test_on_the_way_out_there_is_what_was_packed_alone(
    plans: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source goes when it is packed; who asks before it has arrived is given that, and so is who asks later."""
    with DiskBackend() as backend:
        offload = backend.offload(codec="int8", step_plans=plans)
        expected = rounded("int8", product(nullcontext())[1])
        steps(offload, product, 3)
        before = offload.stats(synchronize=True)
        x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
        with nullcontext() if not fails else pytest.warns(RuntimeWarning, match="offloading failed"):
            with backend.gate() as gate:
                if fails:
                    monkeypatch.setattr(DiskSlot, "write", failing_behind(gate))
                with offload:
                    h = x.sin()
                    loss, source = (h * weight).sum(), weak_storage(h.untyped_storage())
                    del h
                gate.wait_until_reached()
                assert source() is None
                nbytes = before.packed_bytes["int8"] // 3
                offloader = offloader_of(offload)
                assert offloader.resident_bytes == offloader.inflight_bytes == nbytes < BYTES / 3
                (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
                gate.open()
            stats = offload.stats(synchronize=True)
        (second,) = torch.autograd.grad(loss, weight)
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)
        assert stats.kept_bytes.get("failed", 0) == fails * BYTES
        assert stats.coded_bytes["int8"] - before.coded_bytes["int8"] == (1 - fails) * BYTES
        del loss
        backend.assert_nothing_is_held()


def failing_behind(gate: Gate) -> Callable[..., None]:
    def write(slot: DiskSlot, source: Tensor) -> None:
        gate.pass_through()
        raise TransferError("no", errno=5, tier="disk", nbytes=source.nbytes)

    return write


def test_a_graph_of_a_backward_has_the_same_numbers_as_that(backend: Backend) -> None:
    def double(around: Any) -> list[Tensor]:
        x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
        with around:
            h = x.sin()
            y = (h * weight).square().sum()
            (gradient,) = torch.autograd.grad(y, weight, create_graph=True)
            loss = (gradient * gradient).sum()
        del h, y
        loss.backward()
        return [gradient.detach(), *(one.grad for one in (x, weight) if one.grad is not None)]

    exact = double(nullcontext())
    offload = backend.offload(codec="bf16", step_plans=False)
    for found in steps(offload, double, 3):
        assert len(found) == 3
        for one, two in zip(found, exact, strict=True):
            assert float((one - two).abs().max() / two.abs().max()) < 0.02
    stats = assert_settled(offload)
    # Where a thread of autograd's saves what the forward of another has saved, that is exact.
    assert stats.coded_bytes.get("bf16", 0) > 0 or torch.accelerator.is_available()
    assert stats.bytes_out > 0


def test_views_of_any_strides_are_rounded(backend: Backend) -> None:
    """A transpose is a whole storage; one with holes is packed in place of being gathered."""

    def views(around: Any) -> list[Any]:
        x, wide = leaf(ROWS, WIDTH), leaf(ROWS, 8 * WIDTH)
        one, two = leaf(WIDTH, ROWS, seed=3), leaf(ROWS, WIDTH, seed=4)
        with around:
            turned, sparse = x.sin().t(), wide.sin()[:, ::8]
            loss = (turned * one).sum() + (sparse * two).sum()
        del turned, sparse
        loss.backward()
        return [one.grad, two.grad]

    exact = views(nullcontext())
    offload = backend.offload(codec="bf16", step_plans=False)
    for found in steps(offload, views, 2):
        for one, two in zip(found, exact, strict=True):
            assert torch.equal(one, two.bfloat16().float())
            assert not torch.equal(one, two)
    assert set(assert_settled(offload).coded_bytes) == {"bf16"}


# -- a storage that is saved outside too ------------------------------------------------------------------------------


@pytest.mark.parametrize("has_left", [False, True], ids=["waits", "has left"])
@pytest.mark.parametrize("outside", ["identity", "bf16"])
def test_what_is_saved_outside_too_is_exact_for_all_or_taken_anew(
    backend: Backend, plans: bool, outside: str, has_left: bool
) -> None:
    """Another codec that rounds is outside as well."""

    def both(around: Any) -> list[Tensor]:
        weights = [leaf(ROWS, WIDTH, seed=seed) for seed in (2, 3)]
        with around:
            h = leaf(ROWS, WIDTH).sin()
            with eo.codec("int8"):
                y = h * weights[0]
            if has_left:
                y = y + (leaf(ROWS, WIDTH, seed=4) * 2).exp().square()
            with eo.codec(outside):
                loss = (y + h * weights[1]).sum()
        del h, y
        loss.backward()
        return [weight.grad for weight in weights if weight.grad is not None]

    exact = both(nullcontext())
    offload = backend.offload(step_plans=plans)
    for number, found in enumerate(steps(offload, both, 5)):
        # In a later one the copy may wait for the last save, which is known by then.
        is_anew = has_left and (number == 0 or not torch.equal(found[0], exact[0]))
        assert torch.equal(found[0], rounded("int8", exact[0]) if is_anew else exact[0])
        assert torch.equal(found[1], rounded("bf16", exact[1]) if is_anew and outside == "bf16" else exact[1])
    stats = assert_settled(offload)
    assert set(stats.coded_bytes) == ({"int8", outside} - {"identity"} if has_left else set())
    assert stats.bytes_out > 0


def test_saves_of_one_region_share_what_was_rounded(backend: Backend, plans: bool) -> None:
    def both(h: Tensor, weight: Tensor) -> Tensor:
        return h * weight + h.view(WIDTH, ROWS).exp().view(ROWS, WIDTH) + h.cos()

    exact = product(nullcontext(), both)[1]
    offload = backend.offload(codec="bf16", step_plans=plans)
    for found in steps(offload, lambda around: product(around, both), 4):
        assert torch.equal(found[1], rounded("bf16", exact))
    stats = assert_settled(offload)
    assert stats.shared_bytes > 0 or plans, "what followed steps follow is the first one, which has taken it anew"
    assert set(stats.coded_bytes) == {"bf16"}


# -- exact whatever is asked for --------------------------------------------------------------------------------------


def classes(around: Any) -> list[Any]:
    """Targets and indices of integers, and a mask of ``bool``."""
    table, tokens = leaf(50, 32), torch.arange(256) % 50
    with around:
        y = F.embedding(tokens, table)
        loss = torch.where(y > 0, y, 2 * y)[torch.arange(256), tokens % 32].sum()
    del y
    loss.backward()
    return [table.grad]


def parameters(around: Any) -> list[Any]:
    """And their transposes, and casts of them as autocast makes them, of a batch that does not require grad."""
    torch.manual_seed(3)
    linear, x = nn.Linear(WIDTH, WIDTH), leaf(ROWS, WIDTH, grad=False)
    with around, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear(x).sum()
    loss.backward()
    return [linear.weight.grad, linear.bias.grad]


def frozen(around: Any) -> list[Any]:
    """Casts of weights that are not trained, and of a batch."""
    x, weight = leaf(ROWS, WIDTH), leaf(WIDTH, WIDTH, seed=2)
    fixed, batch = leaf(WIDTH, WIDTH, seed=3, grad=False), leaf(ROWS, WIDTH, seed=4, grad=False)
    with around:
        h = F.linear(x, fixed.bfloat16().float())
        loss = (h + batch.bfloat16().float() @ weight).sum()
    del h
    loss.backward()
    return [x.grad, weight.grad]


def copied(around: Any) -> list[Any]:
    """Casts and copies of weights that are trained."""
    x, weight = leaf(ROWS, WIDTH), leaf(WIDTH, WIDTH, seed=2)
    with around:
        factors = [copy(weight) for copy in COPIES.values()]
        loss = sum((x.to(one.dtype)[:, : len(one)] @ one).sum().float() for one in factors)
    del factors
    loss.backward()
    return [x.grad, weight.grad]


def custom(around: Any) -> list[Any]:
    """What a function of the user's makes in its forward and saves, and what it returns."""
    x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
    with around:
        loss = (Summed.apply(x, weight) * weight).sum()
    loss.backward()
    return [x.grad, weight.grad]


def wrapped(around: Any) -> list[Any]:
    """What is inside of a wrapper, which has no gradient of its own."""
    x, weight = (wrapped_two(lambda number, at=at: leaf(ROWS, WIDTH, seed=number + at, grad=False)) for at in (1, 3))
    x.requires_grad_()
    weight.requires_grad_()
    with around:
        loss = (x.sin() * weight).sum()
    loss.backward()
    return [one.grad.a for one in (x, weight)]  # type: ignore[union-attr]


def small(around: Any) -> list[Any]:
    """What leaves although it is smaller than ``min_bytes``: it was marked, or is a view of what leaves."""
    x, weight, other = leaf(ROWS, WIDTH), leaf(ROWS // 2, WIDTH, seed=2), leaf(ROWS, WIDTH, seed=3)
    with around:
        h = x.sin()
        with eo.codec("identity"):
            y = (h * other).sum()
        loss = y + (h[: ROWS // 2] * weight).sum() + (eo.prefer_offload(weight.sin()) * weight).sum()
    del h
    loss.backward()
    return [weight.grad, other.grad]


def region(around: Any) -> list[Any]:
    x, weight, other = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2), leaf(ROWS, WIDTH, seed=3, grad=False)
    with around:
        with eo.no_offload():
            y = x.sin() * weight
        loss = (y * other).sum()
    loss.backward()
    return [weight.grad]


@pytest.mark.parametrize("program", [classes, parameters, frozen, copied, custom, wrapped, small, region])
@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_what_has_to_be_exact_is(backend: Backend, plans: bool, program: Any, codec: str) -> None:
    if program is parameters and torch.accelerator.is_available():
        pytest.skip("it casts on the CPU")
    min_bytes = BYTES if program is small else 0
    stats = exact_steps(backend, program, codec=codec, step_plans=plans, min_bytes=min_bytes)
    assert set(ROUNDING).isdisjoint(stats.coded_bytes)


def test_a_checkpoint_computes_again_of_what_was_saved(users_backend: Backend) -> None:
    """What is saved while it is computed again is saved in the region that it was written in."""
    x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)

    def inner(h: Tensor) -> Tensor:
        with eo.codec("bf16"):
            return h.sin() * weight

    offload = users_backend.offload()
    with Settled(offload):
        loss = checkpoint(inner, x * 1, use_reentrant=False).sum()
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, x.detach().sin()), "asked for as soon as it is saved again, it has not left"
    assert offload.stats(synchronize=True).bytes_out > 0


def test_a_change_in_place_is_found(backend: Backend, plans: bool) -> None:
    backend.sources_change = True
    offload = backend.offload(codec="int8", step_plans=plans)
    steps(offload, product, 3)
    x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
    with Settled(offload):
        h = x.sin()
        loss = (h * weight).sum()
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(eo.SavedTensorModifiedError):
        loss.backward()
    del h, loss


# -- followed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [("bf16", "identity"), ("identity", "bf16"), ("bf16", "int8")])
def test_a_step_in_another_region_follows_no_plan(users_backend: Backend, before: str, after: str) -> None:
    exact, name = product(nullcontext())[1], before
    offload = users_backend.offload(step_plans=True)
    for number in range(6):
        name = before if number < 3 else after
        (found,) = steps(offload, lambda around, name=name: product(around, region=lambda: eo.codec(name)), 1)
        assert torch.equal(found[1], exact if name == "identity" else rounded(name, exact)), number
    stats = assert_settled(offload)
    assert stats.followed_forwards > 2
    assert stats.plan_misses == {"codec": 1}


def test_what_repeats_elements_is_not_rounded_with_what_was_not_saved(users_backend: Backend) -> None:
    """It has as many bytes as its storage, of which it is a part: the rest would have a part in the scales."""

    def step(around: Any, *, part: bool) -> list[Tensor]:
        x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
        with around:
            y = x.detach()
            h = torch.cat([y[:, :1], y[:, 1:] * 1e3], 1).requires_grad_() * 1
            loss = ((h[:, :1] if part else h).expand(ROWS, WIDTH) * weight).sum()
        del y, h
        loss.backward()
        assert weight.grad is not None
        return [weight.grad]

    offload, decided = (users_backend.offload(codec="int8", step_plans=plans) for plans in (True, False))
    for _ in range(4):
        step(Settled(offload), part=False)
        collect()
    assert offload.stats().packed_bytes
    assert_identical(step(Settled(decided), part=True), step(Settled(offload), part=True))
    stats = assert_settled(offload)
    assert stats.followed_forwards > 1
    assert stats.plan_misses == {"codec": 1}


def test_a_plan_that_was_given_rounds_from_the_first_step_on(users_backend: Backend, tmp_path: Path) -> None:
    def program(around: Any) -> list[Tensor]:
        return product(around, region=lambda: eo.codec("bf16"))

    recorded = users_backend.offload(step_plans=True)
    expected = steps(recorded, program, 4)[-1]
    plan = recorded.step_plan()
    assert [save.codec for save in plan.saves if save.coded is not None] == ["bf16"]
    plan.save(tmp_path / "plan.json")
    offload = users_backend.offload(plan=StepPlan.load(tmp_path / "plan.json"))
    for found in steps(offload, program, 3):
        assert_identical(expected, found)
    stats = assert_settled(offload)
    assert (stats.followed_forwards, stats.plan_misses) == (3, {})
    assert stats.packed_bytes["bf16"] > 0
    fixed = users_backend.offload(plan=StepPlan.load(tmp_path / "plan.json"))
    with pytest.warns(RuntimeWarning, match=r"differs from it \(codec\)"):
        assert_identical(product(nullcontext()), product(Settled(fixed)))
    assert assert_settled(fixed).bytes_out > 0

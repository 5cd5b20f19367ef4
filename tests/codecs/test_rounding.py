"""What is saved where a codec that rounds is in force is rounded, to the same numbers in each step; nothing else is."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload import Offload, TransferError
from eager_offload._torch import module_call, weak_storage
from eager_offload.codecs import TensorMeta
from eager_offload.codecs.names import ROUNDING
from eager_offload.tiers.disk import DiskSlot
from tests.codecs.tensors import COPIES, Summed, coded
from tests.hazards.backends import Backend, DiskBackend, assert_settled, offloader_of
from tests.hazards.programs import Settled, assert_identical
from tests.programs import leaf
from tests.programs.layouts import noise
from tests.programs.parts.wrappers import wrapped_pair
from tests.threads import collect

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 32, 64
BYTES = ROWS * WIDTH * 4
#: Of tensors that are computed, and of leaves: see :func:`program`.
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def factor(seed: int) -> Tensor:
    return leaf(ROWS, WIDTH, seed=seed)


def program(forward: Forward, around: Any, make: Callable[[int], Tensor] = factor) -> list[Tensor | None]:
    """The loss of a step, and gradients: of two leaves, and of the one whose sine ``forward`` is given with them.

    The gradient of a factor is the other one, as backward was given it.
    """
    x, weight, other = (make(seed) for seed in (1, 3, 5))
    with around:
        loss = forward(x.sin(), weight, other).sum()
    loss.backward()
    return [loss.detach(), weight.grad, other.grad, x.grad]


def times(h: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    return h * weight


def inside(*regions: str) -> Forward:
    """The same product in regions, the innermost one last."""
    product: Any = torch.mul
    for name in reversed(regions):
        product = eo.codec(name)(product)
    return lambda h, weight, other: product(h, weight)


def rounded(codec: str, x: Any) -> Any:
    """``x`` as ``codec`` rounds it; where that is no codec that rounds, as it is."""
    return coded(ROUNDING[codec], x).back if codec in ROUNDING else x


def steps(offload: Offload, step: Callable[[Any], Any], count: int) -> list[Any]:
    """So many steps, each of which has left whole before its backward."""
    found = []
    for _ in range(count):
        found.append(step(Settled(offload)))
        collect()
    return found


# -- which saved tensors ----------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A forward, and what rounds the gradient of each leaf, which is exact else."""

    forward: Forward
    weight: str = ""
    other: str = ""
    setting: str = "int8"
    min_bytes: int = 0
    make: Callable[[int], Tensor] = factor
    #: Whether the gradient of ``x`` is made of what is rounded.
    reaches_x: bool = False


def copies(h: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    factors = [copy(weight) for copy in COPIES.values()]
    return sum(((other.to(one.dtype)[:, : len(one)] @ one).sum().float() for one in factors), h.sum())


def small(h: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """What leaves although it is smaller than ``min_bytes``: it was marked, or is a view of what leaves."""
    marked = eo.prefer_offload(weight[:16].sin()) * weight[16:]
    return eo.codec("identity")(torch.mul)(h, other) + torch.cat([h[:16] * weight[:16], marked])


def frozen(h: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """Casts of a weight that is not trained, and of a batch."""
    fixed, batch = (noise(WIDTH, count).bfloat16().float() for count in (WIDTH, ROWS))
    return F.linear(weight, fixed) + batch[:ROWS] @ other + h


def parameters(h: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """Their transposes, and casts of them as autocast makes them, of a batch that does not require grad."""
    with torch.autocast(h.device.type, dtype=torch.bfloat16):
        return F.linear(noise(ROWS, WIDTH), weight) + noise(ROWS, ROWS) @ (other @ weight.t()) + h.sum()


CASES: dict[str, Case] = {
    **{f"{name} in a region": Case(inside(name), name, setting="identity") for name in ROUNDING},
    **{f"{name} as the setting": Case(times, name, setting=name) for name in ROUNDING},
    "identity in bf16": Case(inside("bf16", "identity")),
    "lossless in fp8": Case(inside("fp8", "lossless")),
    "bf16 in identity": Case(inside("identity", "bf16"), "bf16"),
    "fp8 in int8": Case(inside("int8", "fp8"), "fp8", setting="identity"),
    "a transpose, and what has holes": Case(
        lambda h, weight, other: h.t() * weight.t() + (h.repeat(1, 8)[:, ::8] * other).t(), "int8", "int8"
    ),
    "what several save": Case(
        lambda h, weight, other: h * weight + h.view(WIDTH, ROWS).exp().view(ROWS, WIDTH) + h.cos(),
        *("bf16", "", "bf16"),
        reaches_x=True,
    ),
    # Rounded a second time nothing of it changes.
    "what backward saves": Case(
        lambda h, weight, other: torch.autograd.grad((h * weight).sum(), weight, create_graph=True)[0] * other,
        *("", "bf16", "bf16"),
    ),
    "behind a custom function": Case(lambda h, weight, other: Summed.apply(h, weight).cumsum(0) * other, other="int8"),
    "in a custom function": Case(lambda h, weight, other: Summed.apply(h, weight) * other),
    "saved outside too": Case(lambda h, weight, other: h * weight + eo.codec("identity")(torch.mul)(h, other)),
    "rounded otherwise outside": Case(lambda h, weight, other: h * weight + eo.codec("bf16")(torch.mul)(h, other)),
    # A look for masks comes before, where there are no holes.
    "detached": Case(
        lambda h, weight, other: h.detach() * weight + h.detach().repeat(1, 8)[:, ::8] * other + h,
    ),
    "made under no_grad": Case(lambda h, weight, other: torch.no_grad()(torch.exp)(h) * weight + h),
    "integers and bool": Case(lambda h, weight, other: torch.where(h > 0, weight, other)[:, (h[0] * 9).long().abs()]),
    "parameters": Case(parameters),
    "casts of what is frozen": Case(frozen),
    "copies of weights": Case(copies),
    "inside of a wrapper": Case(times, make=lambda seed: wrapped_pair(ROWS, WIDTH, seed=seed)),
    "small": Case(small, min_bytes=BYTES),
    "what is not to move": Case(lambda h, weight, other: eo.no_offload()(torch.mul)(h, weight) * noise(ROWS, WIDTH)),
    # Asked for as soon as it is saved, it has not left.
    "what a checkpoint computes again": Case(
        lambda h, weight, other: checkpoint(eo.codec("bf16")(lambda h: h.exp() * weight), h, use_reentrant=False),
        setting="identity",
    ),
}


@pytest.mark.parametrize("plans", [False, True], ids=["decided", "followed"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_rounded_and_no_other_gradient_changes_by_a_bit(backend: Backend, name: str, plans: bool) -> None:
    case = CASES[name]
    if name == "what backward saves" and torch.accelerator.is_available():
        pytest.skip("autograd's thread of the device saves what another thread's forward has saved, exactly")
    step = partial(program, case.forward, make=case.make)
    loss, *exact, of_x = step(nullcontext())
    names = (case.weight, case.other)
    expected = [rounded(codec, one) for codec, one in zip(names, exact, strict=True)]
    assert [codec for codec, *pair in zip(names, exact, expected, strict=True) if codec and torch.equal(*pair)] == []
    offload = backend.offload(codec=case.setting, step_plans=plans, min_bytes=case.min_bytes)
    for found in steps(offload, step, 3):
        assert_identical([loss, *expected, found[-1] if case.reaches_x else of_x], found)
    stats = assert_settled(offload)
    assert set(ROUNDING) & set(stats.coded_bytes) == set(names) - {""}
    assert stats.bytes_out > 0
    if name.endswith(("in a region", "as the setting")):
        layout = ROUNDING[case.weight].layout(TensorMeta.of(exact[0]))
        assert (stats.coded_bytes, stats.packed_bytes) == ({case.weight: 3 * BYTES}, {case.weight: 3 * layout.nbytes})
        assert stats.bytes_out == stats.offloaded_bytes - 3 * (BYTES - layout.nbytes)
        assert (stats.followed_forwards, stats.plan_misses) == (2 if plans else 0, {})


@pytest.mark.parametrize("outside", ["identity", "bf16"])
def test_what_has_left_is_taken_anew_where_it_is_saved_outside(backend: Backend, outside: str) -> None:
    """A later step may know that another save comes, and wait for it: then all of them are exact."""

    def forward(h: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        y = eo.codec("int8")(torch.mul)(h, weight) + (leaf(ROWS, WIDTH, seed=4) * 2).exp().square()
        return y + eo.codec(outside)(torch.mul)(h, other)

    step = partial(program, forward)
    exact = step(nullcontext())[1:3]
    anew = [rounded(name, one) for name, one in zip(("int8", outside), exact, strict=True)]
    offload = backend.offload(step_plans=True)
    for number, (_, *found, _) in enumerate(steps(offload, step, 5)):
        assert_identical(anew if number == 0 or not torch.equal(found[0], exact[0]) else exact, found)
    stats = assert_settled(offload)
    assert set(stats.coded_bytes) == {"int8", outside} - {"identity"}
    assert stats.bytes_out > 0


def test_a_region_is_of_its_thread_and_decorates_functions(users_backend: Backend) -> None:
    offload, device, found = users_backend.offload(), torch.get_default_device(), dict[str, Any]()
    exact = program(times, nullcontext())[1]

    def run(name: str) -> None:
        with device:
            found[name] = program(times, Settled(offload))[1]

    with eo.codec("bf16"):
        thread = threading.Thread(target=run, args=("another",))
        thread.start()
        thread.join()
    eo.codec("bf16")(run)("decorated")
    run("behind")
    assert_identical({"another": exact, "decorated": rounded("bf16", exact), "behind": exact}, found)


# -- modules that are named -------------------------------------------------------------------------------------------


class Product(nn.Module):
    """The gradient of its weight is what its product has saved, as backward was given it."""

    def __init__(self, scale: float, region: str = "") -> None:
        super().__init__()
        self.weight, self.scale, self.region = nn.Parameter(factor(2).detach()), scale, region

    def forward(self, x: Tensor) -> Tensor:
        with eo.codec(self.region) if self.region else nullcontext():
            return self.saved(x) * self.weight

    def saved(self, x: Tensor) -> Tensor:
        return (x * self.scale).cumsum(-1)  # no partitioner has backward compute a sum of that kind again


class Sum(nn.ModuleDict):
    def forward(self, x: Tensor) -> Any:
        return sum(module(x) for module in self.values())


def model() -> nn.ModuleDict:
    mlp = Sum({"a": Product(2.0), "b": Product(3.0), "c": Product(5.0, "bf16")})
    return Sum({"first": Product(1.0), "mlp": mlp, "last": Product(4.0, "int8")})


def saved_by(products: Sequence[Product], offload: Offload, x: Tensor, run: Any = None) -> list[Tensor]:
    """What products have saved, as backward was given it: ``run`` was called, or the first of them."""
    with warnings.catch_warnings(action="ignore"), Settled(offload):  # that such a backend orders no transfers
        loss = (products[0] if run is None else run)(x).sum()
    loss.backward()
    found = [one.weight.grad for one in products]
    for one in products:
        one.weight.grad = None
    return found


#: By setting, what rounds the saves of first, mlp.a and mlp.b; those of the others are in regions.
SETTINGS: list[tuple[Any, tuple[str, ...]]] = [
    ({"*": "lossless", "mlp": "fp8"}, ("", "fp8", "fp8")),
    ({"mlp": "fp8", "mlp.b": "identity"}, ("", "fp8", "")),
    ({"mlp.b": "identity", "mlp": "fp8"}, ("", "fp8", "fp8")),
    ({"*": "bf16", "*.a": "int8"}, ("bf16", "int8", "bf16")),
    ({"mlp": "fp8", "*": "lossless"}, ("", "", "")),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("setting", "expected"), SETTINGS, ids=str)
def test_modules_are_named_and_a_region_comes_before_them(
    users_backend: Backend, setting: Any, expected: tuple[str, ...], compiled: bool
) -> None:
    if compiled and torch.accelerator.is_available():
        pytest.skip("the compiler knows no such device")
    whole, x, names = model(), leaf(ROWS, WIDTH), (*expected, "bf16", "int8")
    products = [one for one in whole.modules() if isinstance(one, Product)]
    assert [one.scale for one in products] == [1, 2, 3, 5, 4]
    offload = users_backend.offload(codec=setting)
    offload.skip_in(whole)
    run = offload.compile(whole, backend="aot_eager", fullgraph=True) if compiled else whole
    for _ in range(2):
        found = saved_by(products, offload, x, run)
        assert_identical([rounded(name, one.saved(x.detach())) for name, one in zip(names, products)], found)  # noqa: B905
    stats = offload.stats(synchronize=True)
    assert set(stats.coded_bytes) == set(names) - {""}
    assert stats.bytes_out > 0
    offload.close()
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("other", "compiled"), [("bf16", False), ("int8", False), ("bf16", True)], ids=["", "equal", "compiled"]
)
def test_modules_are_those_that_an_object_was_told_of(users_backend: Backend, other: str, compiled: bool) -> None:
    """Whatever others were told of, by the same names, in the same thread. Graphs belong to settings."""
    if compiled and torch.accelerator.is_available():
        pytest.skip("the compiler knows no such device")
    mine, theirs, x = model(), model(), leaf(ROWS, WIDTH)
    offload, another = (users_backend.offload(codec={"mlp": codec}) for codec in ("int8", other))
    offload.skip_in(mine)
    another.skip_in(theirs)
    for whole, codec in ((theirs, ""), (mine, "int8")):
        product = whole["mlp"]["a"]
        run = torch.compile(whole, backend="aot_eager") if compiled else whole
        assert_identical([rounded(codec, product.saved(x.detach()))], saved_by([product], offload, x, run))
    assert offload.stats(synchronize=True).bytes_out > 0
    another.close()
    offload.close()
    torch.compiler.reset()


def test_a_module_that_has_other_names_in_a_second_model_has_these_too(users_backend: Backend) -> None:
    product, x = Product(2.0), leaf(ROWS, WIDTH)
    offload, exact = users_backend.offload(codec={"first": "bf16", "last": "int8"}), product.saved(x.detach())
    for names, codec in ((("first", "last"), "bf16"), (("last", "first"), "int8")):
        offload.skip_in(nn.ModuleDict(dict(zip(names, (product, Product(1.0)), strict=True))))
        assert_identical([rounded(codec, exact)], saved_by([product], offload, x))
    offload.close()
    assert module_call(product) is None


def test_objects_that_have_gone_stay_around_no_module() -> None:
    """Whether they were closed, and in which order."""
    product, x, offloads, depths = Product(2.0), leaf(ROWS, WIDTH), list[Offload](), list[int]()
    product.register_forward_hook(lambda *_: depths.append(len(inspect.stack())))
    exact = rounded("int8", product.saved(x.detach()))
    for number in range(20):
        offloads.append(Offload(tier="host", min_bytes=0, keep_last_bytes=0, codec={"0": "int8"}))
        offloads[-1].skip_in(nn.Sequential(product))
        assert_identical([exact], saved_by([product], offloads[-1], x))
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
    holder, x = Sum({"module": Product(2.0), "_orig_mod": Product(3.0)}), leaf(ROWS, WIDTH)
    before = "0." if wrap is nn.Sequential else ""
    offload = users_backend.offload(codec={f"{before}module": "int8", f"{before}_orig_mod": "bf16"})
    offload.skip_in(wrap(holder))
    products = [*holder.values()]
    expected = [rounded(name, one.saved(x.detach())) for name, one in zip(("int8", "bf16"), products, strict=True)]
    assert_identical(expected, saved_by(products, offload, x, holder))
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()


# -- what is given out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plans", [False, True], ids=["decided", "followed"])
def test_backward_twice_sees_the_same_numbers(backend: Backend, plans: bool) -> None:
    def twice(around: Any, *, holds: bool = False) -> list[Tensor]:
        x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=3)
        with around:
            h = x.sin()
            loss = (h * weight).sum()
        held = h if holds else None
        del h
        found = [torch.autograd.grad(loss, weight, retain_graph=True) for _ in range(2)]
        del held  # what was alive until now is not served from here on
        return [*found, torch.autograd.grad(loss, weight)]

    offload = backend.offload(codec="int8", step_plans=plans)
    expected = [rounded("int8", program(times, nullcontext())[1])] * 3
    for gradients in [*steps(offload, twice, 4), *steps(offload, partial(twice, holds=True), 1)]:
        assert_identical(expected, gradients)
    assert assert_settled(offload).packed_bytes["int8"] > 0


@pytest.mark.parametrize("plans", [False, True], ids=["decided", "followed"])
@pytest.mark.parametrize("fails", [False, True], ids=["leaves", "fails"])
def test_on_the_way_out_there_is_what_was_packed_alone(
    disk: DiskBackend, plans: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source goes when it is packed; who asks before it has arrived is given that, and so is who asks later."""
    offload, expected = disk.offload(codec="int8", step_plans=plans), program(times, nullcontext())[1]
    steps(offload, partial(program, times), 3)
    before = offload.stats(synchronize=True)
    x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
    with pytest.warns(RuntimeWarning, match="offloading failed") if fails else nullcontext():
        with disk.gate() as gate:

            def write(slot: DiskSlot, source: Tensor) -> None:
                gate.pass_through()
                raise TransferError("no", errno=5, tier="disk", nbytes=source.nbytes)

            if fails:
                monkeypatch.setattr(DiskSlot, "write", write)
            with offload:
                h = x.sin()
                loss, source = (h * weight).sum(), weak_storage(h.untyped_storage())
                del h
            gate.wait_until_reached()
            assert source() is None
            nbytes, offloader = before.packed_bytes["int8"] // 3, offloader_of(offload)
            assert offloader.resident_bytes == offloader.inflight_bytes == nbytes < BYTES / 3
            first = torch.autograd.grad(loss, weight, retain_graph=True)
            gate.open()
        stats = offload.stats(synchronize=True)
    assert_identical([rounded("int8", expected)] * 2, [first, torch.autograd.grad(loss, weight)])
    assert stats.kept_bytes.get("failed", 0) == fails * BYTES
    assert stats.coded_bytes["int8"] - before.coded_bytes["int8"] == (1 - fails) * BYTES
    del loss


@pytest.mark.parametrize("plans", [False, True], ids=["decided", "followed"])
@pytest.mark.parametrize(("setting", "codec"), [("lossless", "narrow"), ("int8", "int8")])
def test_a_change_in_place_is_found(backend: Backend, plans: bool, setting: str, codec: str) -> None:
    backend.sources_change = True
    offload = backend.offload(codec=setting, step_plans=plans)

    def run(*, changes: bool) -> None:
        x = leaf(ROWS, WIDTH, dtype=torch.bfloat16)
        with Settled(offload):
            h = (x * 1).float()
            loss = h.square().sum()
        if changes:
            with torch.no_grad():
                h.mul_(2)
        loss.backward()

    for _ in range(3):
        run(changes=False)
        collect()
    with pytest.raises(eo.SavedTensorModifiedError):
        run(changes=True)
    assert set(offload.stats().coded_bytes) == {codec}


# -- steps that are like earlier ones but for the codec ---------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [("bf16", "identity"), ("identity", "bf16"), ("bf16", "int8")])
def test_a_step_in_another_region_follows_no_plan(users_backend: Backend, before: str, after: str) -> None:
    exact = program(times, nullcontext())[1]
    offload, plan = users_backend.offload(step_plans=True), None
    for number, name in enumerate([before] * 3 + [after] * 3):
        (found,) = steps(offload, partial(program, inside(name)), 1)
        assert torch.equal(found[1], rounded(name, exact)), number
        plan = plan or offload.step_plan()
    stats = assert_settled(offload)
    assert stats.followed_forwards > 2
    assert not stats.plan_misses, "what differs in its first save is a step of another kind"
    for name in (before, after):
        given = users_backend.offload(plan=plan)
        with pytest.warns(RuntimeWarning, match=r"differs from it \(codec\)") if name == after else nullcontext():
            (found,) = steps(given, partial(program, inside(name)), 1)
        assert torch.equal(found[1], rounded(name, exact))
        assert given.stats().plan_misses == ({"codec": 1} if name == after else {})


def test_what_repeats_elements_is_not_rounded_with_what_was_not_saved(users_backend: Backend) -> None:
    """It has as many bytes as its storage, of which it is a part: the rest would have a part in the scales."""

    def step(around: Any, *, part: bool) -> list[Tensor]:
        x, weight = leaf(ROWS, WIDTH, grad=False), leaf(ROWS, WIDTH, seed=2)
        with around:
            h = torch.cat([x[:, :1], x[:, 1:] * 1e3], 1).requires_grad_() * 1
            loss = ((h[:, :1] if part else h).expand(ROWS, WIDTH) * weight).sum()
        del h
        return [*torch.autograd.grad(loss, weight)]

    offload, decided = (users_backend.offload(codec="int8", step_plans=plans) for plans in (True, False))
    steps(offload, partial(step, part=False), 4)
    assert offload.stats().packed_bytes
    assert_identical(step(Settled(decided), part=True), step(Settled(offload), part=True))
    stats = assert_settled(offload)
    assert stats.followed_forwards > 1
    assert not stats.plan_misses, "what differs in its first save is a step of another kind"

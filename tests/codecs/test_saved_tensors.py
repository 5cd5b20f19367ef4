"""With ``codec="lossless"`` every gradient has the same bits, and fewer bytes travel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import OffloadStats, SavedTensorModifiedError
from eager_offload.codecs import BitMask, Narrow
from eager_offload.eager.coding import coding_of
from eager_offload.selection import footprint
from eager_offload.step_plan import Fate
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.programs import REGIMES, Settled, assert_identical, leaf, same_gradients
from tests.threads import collect

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 32, 64


def block(x: Tensor, weight: Tensor) -> Tensor:
    """A norm in float32 over bfloat16, dropout by noise of two values, a mask of bool, and a view that is gathered."""
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    y = (h.to(x.dtype) @ weight).float()
    noise = torch.empty_like(y).bernoulli_(0.8).div_(0.8)
    y = torch.where(y > 0.1, y * noise, y.sin()) + (y[:, ::8].exp() * y[:, ::8]).repeat(1, 8)
    return x + y.to(x.dtype)


def program(around: Any) -> list[Tensor | None]:
    """Trains nothing: two blocks, forward and backward."""
    x = leaf(ROWS, WIDTH, dtype=torch.bfloat16)
    weights = [leaf(WIDTH, WIDTH, seed=seed, dtype=torch.bfloat16) for seed in (2, 3)]
    with around:
        y = x * 1
        for weight in weights:
            y = block(y, weight)
        loss = y.float().square().mean()
    del y
    loss.backward()
    return [loss.detach(), x.grad, *(weight.grad for weight in weights)]


def test_every_gradient_has_the_same_bits_and_fewer_bytes_travel(backend: Backend) -> None:
    plain = same_gradients(program, backend, codec="identity")
    packed = same_gradients(program, backend, codec="lossless")
    for one, two in zip(plain, packed, strict=True):
        assert one.offloaded_bytes == two.offloaded_bytes
        assert two.bytes_out < 0.8 * one.bytes_out
        assert set(one.coded_bytes) == {"gather"}, "gathering is a codec of every policy"
        assert 2 * two.packed_bytes["narrow"] == two.coded_bytes["narrow"] > 0
        assert 7 * two.packed_bytes["bitmask"] < two.coded_bytes["bitmask"]
        assert two.refused == one.refused == {}
        assert one.bytes_out - two.bytes_out == sum(two.coded_bytes.values()) - sum(two.packed_bytes.values()) - (
            sum(one.coded_bytes.values()) - sum(one.packed_bytes.values())
        )


def steps(backend: Backend, count: int, **fields: Any) -> OffloadStats:
    """So many steps with one ``Offload``, each with the gradients of one without."""
    offload = backend.offload(**fields)
    for seed in range(count):
        torch.manual_seed(seed)
        expected = program(nullcontext())
        torch.manual_seed(seed)
        assert_identical(expected, program(Settled(offload)), f"step {seed}")
    stats = assert_settled(offload)
    offload.close()
    return stats


def test_steps_that_follow_a_plan_pack_what_was_packed(backend: Backend) -> None:
    anew, followed = (steps(backend, 6, codec="lossless", step_plans=plans) for plans in (False, True))
    assert followed.coded_bytes == anew.coded_bytes
    assert followed.packed_bytes == anew.packed_bytes
    assert followed.coded_bytes["narrow"] > 4 * steps(backend, 1, codec="lossless").coded_bytes["narrow"]


def cast_and_noise(around: Any, *, third: float = 0.0) -> list[Tensor | None]:
    """A cast, noise of two values or with a ``third`` one at its end, and what is neither."""
    x, small = leaf(128, WIDTH), leaf(ROWS, WIDTH, dtype=torch.bfloat16)
    noise = torch.ones(128, WIDTH)
    noise[0, 0], noise[-1, -1] = 0.5, third or 1.0
    with around:
        cast = small.float()
        loss = (x.sin() * noise).exp().square().mean() + cast.square().mean()
    del cast, noise
    loss.backward()
    return [loss.detach(), x.grad, small.grad]


def test_a_plan_says_what_is_packed(backend: Backend) -> None:
    """A step in which it does not fit any more is followed all the same; those after it are decided anew."""
    is_cpu = not torch.accelerator.is_available()
    offload, first = backend.offload(codec="lossless", step_plans=True), None
    for third in (0.0, 0.0, 0.0, 0.25, 0.25, 0.25):
        expected = cast_and_noise(nullcontext(), third=third)
        assert_identical(expected, cast_and_noise(Settled(offload), third=third))
        collect()
        first = first or offload.step_plan()
    plan, stats = offload.step_plan(), assert_settled(offload)
    assert stats.followed_forwards == (4 if is_cpu else 5)
    assert not stats.plan_misses
    for one, mask in ((first, is_cpu), (plan, False)):
        assert Fate.DECIDE not in [save.fate for save in one.saves]
        packed = {save.coded.codec: save.coded.nbytes for save in one.saves if save.coded is not None}
        assert packed == {"narrow": 2 * ROWS * WIDTH} | ({"bitmask": 128 * WIDTH // 8 + 16} if mask else {})
    assert stats.coded_bytes["narrow"] == 6 * ROWS * WIDTH * 4
    assert stats.coded_bytes.get("bitmask", 0) == (3 * 128 * WIDTH * 4 if is_cpu else 0)
    assert stats.refused == ({"bitmask": 2} if is_cpu else {}), "once more by the step that is decided anew"


# -- refusals ---------------------------------------------------------------------------------------------------------


def unseen_change(around: Any) -> list[Tensor | None]:
    """What was cast gets other values in a way that changes no version, before its copy may start."""
    x, other = leaf(ROWS, WIDTH, dtype=torch.bfloat16), leaf(ROWS, WIDTH)
    with around:
        cast = x.float()
        cast.data.add_(1e-3)
        y = cast.square()
        loss = (y.sum() + other.sin().sum()).sin()
    del y, cast
    loss.backward()
    return [loss.detach(), x.grad, other.grad]


def late_third_value(around: Any) -> list[Tensor | None]:
    """Noise that looks like a mask until its last element."""
    x, other = leaf(128, WIDTH), leaf(ROWS, WIDTH)
    noise = torch.ones(128, WIDTH)
    noise[-1, -1] = 0.5
    noise[0, 0] = 0
    with around:
        y = x * noise
        loss = (y.square().sum() + other.sin().sum()).sin()
    del y, noise
    loss.backward()
    return [loss.detach(), x.grad, other.grad]


@pytest.mark.parametrize(("refusing", "codec"), [(unseen_change, "narrow"), (late_third_value, "bitmask")])
def test_what_a_codec_cannot_hold_travels_as_it_is(
    users_backend: Backend, refusing: Callable[[Any], list[Tensor | None]], codec: str
) -> None:
    plain = same_gradients(refusing, users_backend, codec="identity")
    packed = same_gradients(refusing, users_backend, codec="lossless")
    for one, two in zip(plain, packed, strict=True):
        if torch.accelerator.is_available():
            assert codec == "bitmask" or two.refused == {codec: 1}
            continue
        assert two.refused == {codec: 1}
        assert one.bytes_out == two.bytes_out
        assert two.coded_bytes == {}


def test_a_check_that_is_left_out_shows(users_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of all elements gradients differ: these programs can tell."""
    for codec, refusing in ((Narrow, unseen_change), (BitMask, late_third_value)):
        if torch.accelerator.is_available() and codec is BitMask:
            continue
        pack: Any = codec.pack

        def holding(self: Any, *arguments: Any, pack: Any = pack) -> Tensor:
            return torch.ones_like(pack(self, *arguments))

        monkeypatch.setattr(codec, "pack", holding)
        offload = users_backend.offload(codec="lossless")
        expected, actual = refusing(nullcontext()), refusing(Settled(offload))
        assert not all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))  # type: ignore[arg-type]


def test_what_is_no_mask_at_first_sight_is_not_packed_at_all(users_backend: Backend) -> None:
    def product(around: Any) -> list[Tensor | None]:
        x, values = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2, grad=False)
        with around:
            y = (x * values).sum()
        del values
        y.backward()
        return [x.grad]

    for stats in same_gradients(product, users_backend, codec="lossless"):
        assert stats.refused == stats.coded_bytes == {}


# -- what is packed ---------------------------------------------------------------------------------------------------


def codec_of(tensor: Tensor) -> str | None:
    coding = coding_of(tensor, footprint(tensor, tensor.untyped_storage().nbytes()), "lossless", 0)
    return None if coding is None else coding.codec.name


def test_only_what_is_known_to_be_cast_from_bfloat16_is_narrowed() -> None:
    x = leaf(ROWS, WIDTH, dtype=torch.bfloat16)
    assert codec_of(x.float()) == "narrow"
    assert codec_of((x * 2).float()) == "narrow"
    assert codec_of(x.double()) is None
    assert codec_of(x.float() * 1) is None
    assert codec_of(leaf(ROWS, WIDTH, dtype=torch.float16).float()) is None
    changed = x.float()
    with torch.no_grad():
        changed += 1  # autograd's graph says that it is a cast, and its version that it is none any more
    assert codec_of(changed) is None
    assert codec_of(leaf(ROWS, WIDTH)) is None


def test_masks_are_bool_and_on_a_cpu_floats_without_grad() -> None:
    assert codec_of(torch.ones(ROWS, WIDTH, dtype=torch.bool)) == "bitmask"
    assert codec_of(torch.ones(ROWS, WIDTH)) == "bitmask"
    assert codec_of(leaf(ROWS, WIDTH)) is None
    assert codec_of(torch.ones(ROWS, WIDTH, dtype=torch.int32)) is None
    assert codec_of(torch.ones(ROWS, WIDTH, device="meta")) is None
    assert codec_of(torch.ones(2)) is None, "it would take more"


@pytest.mark.parametrize("offset", range(9))
def test_what_begins_at_no_word_travels_as_it_is(offset: int) -> None:
    mask = torch.ones(64 * ROWS * WIDTH, dtype=torch.bool)[offset : offset + ROWS * WIDTH]
    assert codec_of(mask) == ("bitmask" if offset % 8 == 0 else None)


# -- as with any other -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["identity", "lossless"])
def test_a_change_in_place_is_found(backend: Backend, codec: str) -> None:
    backend.sources_change = True
    offload = backend.offload(codec=codec)
    x = leaf(ROWS, WIDTH, dtype=torch.bfloat16)
    with Settled(offload):
        cast = x.float()
        y = cast.square().sum()
    with torch.no_grad():
        cast.mul_(2)
    with pytest.raises(SavedTensorModifiedError):
        y.backward()
    del y, cast


def test_a_graph_that_is_retained_is_unpacked_again(backend: Backend) -> None:
    def twice(around: Any) -> list[Any]:
        x = leaf(ROWS, WIDTH, dtype=torch.bfloat16)
        with around:
            loss = torch.where(x > 0, x.float().square(), x).sin().sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, x)]

    for stats in same_gradients(twice, backend, regimes=REGIMES[:2], codec="lossless"):
        assert stats.packed_bytes["narrow"] > 0
        assert stats.packed_bytes["bitmask"] > 0


def test_a_graph_of_a_backward_is_packed_too(backend: Backend) -> None:
    def double(around: Any) -> list[Any]:
        x = leaf(ROWS, WIDTH, dtype=torch.bfloat16)
        with around:
            y = x.float().pow(3).sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            loss = gradient.float().square().sum()
        loss.backward()
        return [x.grad]

    for stats in same_gradients(double, backend, moved=0.4, codec="lossless", held=True):
        assert stats.packed_bytes["narrow"] > 0


def test_views_of_one_cast_share_what_is_unpacked(users_backend: Backend) -> None:
    """Each handle that asks while the first answer lives is given the same memory."""
    offload = users_backend.offload(codec="lossless")
    x = leaf(ROWS, WIDTH, dtype=torch.bfloat16)
    with Settled(offload):
        cast = x.float()
        y = cast.square() * cast.pow(3)
    del cast
    powers = [node for node, _ in y.grad_fn.next_functions]  # type: ignore[union-attr]
    found = [node._saved_self for node in reversed(powers)]
    assert offload.stats().bytes_in == ROWS * WIDTH * 2, "it came back once"
    assert len({one.data_ptr() for one in found}) == 1
    assert torch.equal(found[0], x.detach().float())
    del found, powers, y


def test_no_room_in_a_tier_keeps_what_would_be_packed(users_backend: Backend) -> None:
    if users_backend.tier != "disk":
        pytest.skip("the disk's budget is the one that is set")
    torch.manual_seed(0)
    expected = program(nullcontext())
    offload = users_backend.offload(codec="lossless", disk_budget="8KiB")
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match="no room for"):
        assert_identical(expected, program(Settled(offload)))
    stats = assert_settled(offload)
    assert stats.kept_bytes["budget"] > 0
    assert stats.demotions["budget"] > 0


def test_stats_show_what_codecs_came_to(users_backend: Backend) -> None:
    stats = steps(users_backend, 1, codec="lossless")
    (line,) = [line for line in str(stats).splitlines() if line.startswith("coded")]
    assert "narrow" in line
    assert "(0.50)" in line
    assert "bitmask" in line
    assert OffloadStats(**stats.to_dict()) == stats

"""With ``codec="lossless"`` every gradient has the same bits, and fewer bytes travel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.hazards.backends import Backend, DiskBackend, assert_settled
from tests.hazards.programs import REGIMES, Settled, assert_identical, same_gradients
from tests.programs import leaf
from tests.programs.parts.functions import saving
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


def program(around: Any) -> list[Tensor]:
    """Trains nothing: two blocks, forward, and backward twice."""
    x = leaf(ROWS, WIDTH, dtype=torch.bfloat16)
    weights = [leaf(WIDTH, WIDTH, seed=seed, dtype=torch.bfloat16) for seed in (2, 3)]
    with around:
        y = x * 1
        for weight in weights:
            y = block(y, weight)
        loss = y.float().square().mean()
    del y
    first = torch.autograd.grad(loss, [x, *weights], retain_graph=True)
    return [loss.detach(), *first, *torch.autograd.grad(loss, [x, *weights])]


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
        saved = [sum(stats.coded_bytes.values()) - sum(stats.packed_bytes.values()) for stats in (one, two)]
        assert one.bytes_out - two.bytes_out == saved[1] - saved[0]
        (line,) = [line for line in str(two).splitlines() if line.startswith("coded")]
        assert "narrow" in line
        assert "(0.50)" in line


# -- what is packed ---------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What is saved, and what packs it."""

    make: Callable[[], Tensor]
    codec: str = ""
    #: What has found only when it packed that it cannot hold it.
    refused: str = ""


def half() -> Tensor:
    return leaf(ROWS, WIDTH, dtype=torch.bfloat16)


def changed() -> Tensor:
    """Autograd's graph says that it is a cast, and its version that it is none any more."""
    cast = half().float()
    with torch.no_grad():
        cast += 1
    return cast


def changed_unseen() -> Tensor:
    """In a way that changes no version, before its copy may start."""
    cast = half().float()
    cast.data.add_(1e-3)
    return cast


def late_third_value() -> Tensor:
    """A mask until its last element: more are looked at only when it is packed."""
    noise = torch.ones(128, WIDTH)
    noise[0, 0], noise[-1, -1] = 0, 0.5
    return noise


def mask_at(offset: int) -> Tensor:
    return torch.ones(64 * ROWS * WIDTH, dtype=torch.bool)[offset : offset + ROWS * WIDTH]


# What floats without grad hold is looked at on a CPU alone: an accelerator would have to be waited for.
LOOKS = not torch.accelerator.is_available()
KINDS: dict[str, Kind] = {
    "a cast of bfloat16": Kind(lambda: half().float(), "narrow"),
    "a cast of what is computed in bfloat16": Kind(lambda: (half() * 2).float(), "narrow"),
    "a cast to float64": Kind(lambda: half().double()),
    "a cast of float16": Kind(lambda: leaf(ROWS, WIDTH, dtype=torch.float16).float()),
    "computed of a cast": Kind(lambda: half().float() * 1),
    "a cast that was changed": Kind(changed),
    "a cast that was changed unseen": Kind(changed_unseen, refused="narrow"),
    "bool": Kind(lambda: torch.ones(ROWS, WIDTH, dtype=torch.bool), "bitmask"),
    "float of one value": Kind(lambda: torch.ones(ROWS, WIDTH), "bitmask" * LOOKS),
    "float of one value with grad": Kind(lambda: torch.ones(ROWS, WIDTH).requires_grad_() * 1),
    "float of many values": Kind(lambda: leaf(ROWS, WIDTH, grad=False)),
    "float with a late third value": Kind(late_third_value, refused="bitmask" * LOOKS),
    "integers": Kind(lambda: torch.ones(ROWS, WIDTH, dtype=torch.int32)),
    "so few that bits would take more": Kind(lambda: torch.ones(2)),
    **{f"bool behind {at} bytes": Kind(lambda at=at: mask_at(at), "" if at % 8 else "bitmask") for at in (1, 4, 7, 8)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_packed_and_what_travels_as_it_is(users_backend: Backend, kind: str) -> None:
    make, codec, refused = KINDS[kind]

    def saves(around: Any) -> list[Any]:
        x, seen = leaf(ROWS, WIDTH), list[list[object]]()
        with around:
            loss = saving(x * 1, make(), seen=seen).sin().sum()
        loss.backward()
        return [x.grad, seen]

    # What an accelerator finds refused once its copy is over stays.
    fields: dict[str, Any] = {"regimes": REGIMES[:2], "moved": 0.4 if refused and not LOOKS else 0.9}
    plain = same_gradients(saves, users_backend, codec="identity", **fields)
    for one, two in zip(plain, same_gradients(saves, users_backend, codec="lossless", **fields), strict=True):
        assert set(two.coded_bytes) == {codec} - {""}
        assert two.refused == ({refused: 1} if refused else {})
        assert two.bytes_out < one.bytes_out if codec or fields["moved"] < 0.9 else two.bytes_out == one.bytes_out


def test_what_cannot_be_held_any_more_is_refused_in_a_step_like_others(backend: Backend) -> None:
    """Whether it is packed is asked in each step, whatever it is like."""

    def cast_and_noise(around: Any, third: float) -> list[Any]:
        x, small = leaf(128, WIDTH), leaf(ROWS, WIDTH, dtype=torch.bfloat16)
        noise = torch.ones(128, WIDTH)
        noise[0, 0], noise[-1, -1] = 0.5, third
        with around:
            cast = small.float()
            loss = (x.sin() * noise).exp().square().mean() + cast.square().mean()
        del cast, noise
        return [*torch.autograd.grad(loss, [x, small])]

    offload = backend.offload(codec="lossless", step_plans=True)
    for third in (1.0, 1.0, 1.0, 0.25, 0.25, 0.25):
        assert_identical(cast_and_noise(nullcontext(), third), cast_and_noise(Settled(offload), third))
        collect()
    stats = assert_settled(offload)
    assert stats.followed_forwards == 5
    assert not stats.plan_misses
    assert stats.coded_bytes == {"narrow": 6 * ROWS * WIDTH * 4} | ({"bitmask": 3 * 128 * WIDTH * 4} if LOOKS else {})
    assert stats.refused == ({"bitmask": 3} if LOOKS else {})


# -- as with any other -------------------------------------------------------------------------------------------------


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


def test_no_room_in_a_tier_keeps_what_would_be_packed(disk: DiskBackend) -> None:
    torch.manual_seed(0)
    expected = program(nullcontext())
    offload = disk.offload(codec="lossless", disk_budget="8KiB")
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match="no room for"):
        assert_identical(expected, program(Settled(offload)))
    stats = assert_settled(offload)
    assert stats.kept_bytes["budget"] > 0
    assert stats.demotions["budget"] > 0

"""H27: each system call of a training step fails once, or from then on, with each number that it may fail with."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import eager_offload as eo
from tests.faults.disks import (
    Faults,
    Faulty,
    expected,
    fail_with,
    make_offload,
    nothing_is_held,
    on_faulty_disk,
    step,
    step_is_exact,
)
from tests.hazards.backends import hooks_are_gone
from tests.proof.bits import same_bits

_TRANSFERS = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.ENOMEM, errno.EAGAIN, errno.EDQUOT, errno.EROFS)
_GROWING = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP)
#: These are left to the long tests.
_RARE = (errno.EAGAIN, errno.EDQUOT, errno.EROFS, errno.EOPNOTSUPP)
#: A call that fails with these did nothing, and is to be made again.
_AGAIN = (errno.EINTR, errno.EAGAIN)


def _cases() -> Iterator[object]:
    for kind, numbers in {"write": _TRANSFERS, "read": _TRANSFERS, "allocate": _GROWING, "usage": [errno.EIO]}.items():
        for number, for_good in itertools.product(numbers, (False, True)):
            marks = [pytest.mark.long] if number in _RARE or (for_good and number != errno.EIO) else []
            name = f"{kind}-{errno.errorcode[number]}-{'for good' if for_good else 'once'}"
            yield pytest.param(kind, number, for_good, id=name, marks=marks)


def strike_each(offload: eo.Offload, kind: str, number: int, *, for_good: bool) -> tuple[int, int, int]:
    """Takes steps of each of which another operation fails, exact or with an error that says so; exact ones in between.

    Returns:
        How many operations were struck first, how many faults there were, and how many steps ended with an error.
    """
    struck = injected = errors = 0
    while True:
        Faulty.faults = faults = Faults(kind, struck + 1, fail_with(number), for_good=for_good)
        if kind in ("allocate", "usage"):
            offload.close()  # it grows in the first step of a file only
        failed = None
        try:
            assert same_bits(step(offload, 1), expected(1))
        except eo.TransferError as error:
            failed = error.errno, error.tier
        offload.stats(synchronize=True)
        Faulty.faults = None
        if failed is not None:
            assert kind == "read", "only what cannot be read may stop a step"
            assert failed == (errno.EIO if number in _AGAIN else number, "disk")
        nothing_is_held(offload, after_error=failed is not None)
        if not faults.injected:
            return struck, injected, errors
        struck, injected, errors = struck + 1, injected + faults.injected, errors + (failed is not None)
        step_is_exact(offload, 2)


@pytest.mark.parametrize(("kind", "number", "for_good"), list(_cases()))
def test_h27_a_step_of_which_any_call_fails_is_exact_or_says_why(
    kind: str, number: int, for_good: bool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with on_faulty_disk():
        offload = make_offload(tmp_path)
        struck, injected, errors = strike_each(offload, kind, number, for_good=for_good)
        offload.close()
    assert struck > (3 if kind in ("write", "read") else 0), "every operation of the step was struck"
    assert injected >= struck
    assert (errors > 0) == (kind == "read" and (number not in _AGAIN or for_good))
    record_property("faults", injected)


@pytest.mark.parametrize("kind", ["write", "read"])
def test_h27_a_file_that_cannot_be_made_anew_is_an_error_that_says_why(kind: str, tmp_path: Path) -> None:
    with on_faulty_disk():
        offload = make_offload(tmp_path)
        step_is_exact(offload, 1)
        offload.close()
        Faulty.faults = Faults(kind, 1, fail_with(errno.EROFS))
        with pytest.raises(eo.ConfigError, match=f"{tmp_path.name}' cannot serve: .*Read-only file system"):
            step(offload, 1)
        Faulty.faults = None
        assert hooks_are_gone()
        nothing_is_held(offload, after_error=True)
        step_is_exact(offload, 2)
        offload.close()

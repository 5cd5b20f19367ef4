"""Memory that a tensor owns, and what a forked child finds of it."""

from __future__ import annotations

import gc
import subprocess
import sys

import torch

from eager_offload.tiers.arena import Arena
from eager_offload.tiers.memory import PAGE
from tests.tiers.rig import MIB, noise
from tests.tiers.system import System


def test_a_lease_goes_back_when_its_last_view_dies() -> None:
    system = System()
    arena = Arena(system, slab_bytes=MIB, idle_bytes=0)
    for nbytes in (1, 70_000, 5 * MIB + 3):
        tensor = arena.lease(nbytes)
        assert tensor.dtype is torch.uint8
        assert tensor.shape == (nbytes,)
        assert tensor.data_ptr() % (PAGE if nbytes >= PAGE else 64) == 0
        tensor.copy_(noise(nbytes))
        view = tensor[nbytes // 2 :].view(torch.int8).detach()
        del tensor
        assert arena.used_bytes == nbytes
        assert torch.equal(view.view(torch.uint8), noise(nbytes)[nbytes // 2 :])
        del view
        assert arena.used_bytes == arena.held_bytes == len(system.alive) == 0
    assert arena.lease(0).shape == (0,)


def test_h09_leases_that_autograd_saved_go_back_without_the_garbage_collector() -> None:
    arena = Arena(idle_bytes=0)
    gc.disable()
    try:
        for _ in range(100):
            weight = torch.ones(1024, requires_grad=True)
            loss = (weight * arena.lease(4096).view(torch.float32).fill_(2.0)).sum()
            loss.backward()
            assert weight.grad is not None
            assert torch.equal(weight.grad, torch.full((1024,), 2.0))
            del loss
            (torch.ones(1024, requires_grad=True) * arena.lease(4096).view(torch.float32)).sum()
        assert arena.used_bytes == arena.held_bytes == 0
    finally:
        gc.enable()


def test_leases_and_slots_outlive_the_arena() -> None:
    system = System()
    arena = Arena(system, slab_bytes=MIB)
    lease, slot = arena.lease(2 * MIB), arena.allocate(3 * MIB)
    assert slot is not None
    lease.copy_(noise(2 * MIB, 1))
    slot.write(noise(3 * MIB, 2))
    arena.close()
    arena.close()
    del arena
    gc.collect()
    assert torch.equal(lease, noise(2 * MIB, 1))
    assert torch.equal(slot.tensor, noise(3 * MIB, 2))
    assert len(system.alive) == 2
    del lease, slot
    assert len(system.alive) == 0


FORKED = """
import os, signal, threading, torch
from eager_offload.tiers.arena import Arena, anonymous_slab

inside, leave, main = threading.Event(), threading.Event(), threading.current_thread()

def allocate(nbytes):
    if threading.current_thread() is not main:
        inside.set()
        leave.wait()
    return anonymous_slab(nbytes)

torch.set_num_threads(1)                # a pool of threads of torch's own would not survive the fork
arena = Arena(allocate, slab_bytes=1 << 20, idle_bytes=0)
slot, lease, dead = arena.allocate(1 << 20), arena.lease(1 << 20), arena.allocate(1 << 20)
slot.tensor.fill_(1)
lease.fill_(2)
thread = threading.Thread(target=lambda: arena.allocate(2 << 20))
thread.start()
inside.wait()                           # the thread is within the arena's lock now
child = os.fork()
if child == 0:
    signal.alarm(60)                    # a child that hangs does not stay
    assert slot.tensor.eq(1).all() and lease.eq(2).all()
    lease.fill_(9)                      # the child's own copy
    del lease, dead
    assert arena.used_bytes == arena.held_bytes == 0, "the child's arena is its own"
    own = arena.allocate(1 << 20)
    own.tensor.fill_(7)
    assert slot.tensor.eq(1).all()
    assert arena.used_bytes == arena.held_bytes == 1 << 20
    del own, slot
    assert arena.used_bytes == arena.held_bytes == 0
    os._exit(0)
leave.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert slot.tensor.eq(1).all() and lease.eq(2).all()
assert arena.used_bytes == 3 << 20
del slot, lease, dead
assert arena.used_bytes == arena.held_bytes == 0
print("exact")
"""


def test_h28_a_forked_child_has_an_arena_of_its_own_even_if_the_lock_was_held() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("exact\n", 0), done.stderr

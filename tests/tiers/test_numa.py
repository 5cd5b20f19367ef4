"""Host memory comes from the node that is nearest to the device, where the machine has several and takes it."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eager_offload.runtime import pinned
from eager_offload.runtime.pinned import PinnedMemory
from eager_offload.tiers import memory
from eager_offload.tiers.memory import PAGE, anonymous_slab, node_of_device, prefer_node, resident_slab

MIB = 1 << 20
PREFERRED = 1
#: Of the system call that tells the policy of an address.
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


def policy_of(address: int) -> tuple[int, int]:
    """The kernel's policy for the page at ``address``: its mode, and a bit for each node."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    arguments = (GET_MEMPOLICY[platform.machine()], ctypes.addressof(mode), ctypes.addressof(mask), 1024, address, 2)
    assert syscall(*(ctypes.c_long(argument) for argument in arguments)) == 0
    return mode.value, mask[0]


@pytest.fixture
def kernel_tells() -> None:
    if platform.system() != "Linux" or platform.machine() not in GET_MEMPOLICY:
        pytest.skip("the test knows no way to ask this system for the policy of an address")
    pages = anonymous_slab(PAGE)
    if not prefer_node(pages.data_ptr(), PAGE, 0):
        pytest.skip("this system lets no process say where its memory comes from")


@pytest.mark.parametrize(("online", "node"), [("0-1", 1), ("0,2-3", 1), ("0", None)])
def test_the_node_of_a_device_is_known_from_its_address(tmp_path: Path, online: str, node: int | None) -> None:
    root, nodes = tmp_path, {"devices/system/node/online": online}
    nodes |= {f"bus/pci/devices/{at}/numa_node": node for at, node in (("0000:3b:00.0", "1"), ("0000:86:00.0", "-1"))}
    for name, text in nodes.items():
        file = root / "sys" / name
        file.parent.mkdir(parents=True)
        file.write_text(f"{text}\n")
    assert node_of_device("0000:3B:00.0", root) == node
    assert node_of_device("0000:86:00.0", root) is None, "a virtual machine may not know"
    assert node_of_device("0000:ff:00.0", root) is None
    assert node_of_device(None, root) is None
    assert node_of_device("0000:3b:00.0", tmp_path / "nothing") is None


def test_a_node_or_a_processor_that_the_system_does_not_know_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = resident_slab(MIB, node=900)
    assert not prefer_node(slab.data_ptr(), MIB, 900)
    assert int(slab.fill_(1).sum()) == MIB
    monkeypatch.setattr(memory, "_MBIND", {})
    assert not prefer_node(slab.data_ptr(), PAGE, 0)


class TwoDevices:
    """Memory is pinned by a driver that writes down the policy of the pages."""

    def __init__(self) -> None:
        self.selected = 0
        self.bound: dict[int, tuple[int, int]] = {}

    def current_device_index(self) -> int:
        return self.selected

    def pci_address(self, index: int) -> str | None:
        return ("0000:3b:00.0", "0000:86:00.0")[index]

    def register(self, address: int, nbytes: int) -> None:
        self.bound[address] = policy_of(address)

    def unregister(self, address: int) -> None:
        del self.bound[address]


@pytest.mark.usefixtures("kernel_tells")
@pytest.mark.parametrize("pin_memory", [True, False], ids=["registered", "pageable"])
def test_a_slab_comes_from_the_node_of_the_device_that_is_selected(
    monkeypatch: pytest.MonkeyPatch, pin_memory: bool
) -> None:
    # This machine has one node, and the second device is said to be near it.
    monkeypatch.setattr(pinned, "node_of_device", {"0000:3b:00.0": None, "0000:86:00.0": 0}.get)
    api = TwoDevices()
    monkeypatch.setattr(torch.accelerator, "current_device_index", api.current_device_index)
    for name in ("pci_address", "register", "unregister"):
        monkeypatch.setattr(pinned, name, getattr(api, name))
    memory = PinnedMemory()
    take = memory.allocate if pin_memory else memory.pageable
    far = take(MIB)
    api.selected = 1
    near = take(MIB)
    assert policy_of(near.data_ptr()) == (PREFERRED, 1)
    assert policy_of(far.data_ptr())[0] != PREFERRED
    if pin_memory:
        assert api.bound[near.data_ptr()] == (PREFERRED, 1), "it is bound before it is pinned, which touches it"
    assert torch.equal(near.fill_(3), far.fill_(3))


def test_the_address_of_a_device_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}
    for kind, properties, address in (
        ("cuda", known, "0000:3b:00.0"),
        ("cuda", {"pci_bus_id": 0x3B}, None),
        ("xpu", {}, None),
    ):
        device, told = torch.device(kind), SimpleNamespace(**properties)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, found=device, **__: found)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, told=told: told)
        assert pinned.pci_address(0) == address

"""Which tests are asked about a site: those of its module first, then those of whole training steps."""

from __future__ import annotations

__all__ = ["device_suites_of", "suites_of"]

#: The cheap ones first: most sites are noticed there.
_STEPS = [
    "tests/hazards/test_streams.py",
    "tests/hazards/test_copies.py",
    "tests/hazards/test_interrupted_copies.py",
    "tests/hazards/test_sharing.py",
    "tests/hazards/test_in_between.py",
    "tests/hazards/test_versions.py",
    "tests/test_counts.py",
    "tests/test_contract.py",
    "tests/test_learned_steps.py",
    "tests/hazards/test_out_of_memory.py",
    "tests/test_prefetch_order.py",
    "tests/hazards/test_interrupts.py",
    "tests/hazards/test_lifetime.py",
    "tests/hazards/test_steady_state.py",
    "tests/hazards/test_graphs.py",
    "tests/proof/test_random_programs.py",
]
_SIMULATED = [
    "tests/runtime/test_simulated.py",
    "tests/runtime/test_simulated_order.py",
    "tests/runtime/test_simulated_clock.py",
    "tests/runtime/test_checker.py",
    "tests/runtime/test_observer.py",
    "tests/runtime/test_simulated_agreement.py",
]
_ACCELERATOR = [
    "tests/runtime/test_accelerator.py",
    "tests/runtime/test_accelerator_memory.py",
    "tests/runtime/test_accelerator_step.py",
    "tests/runtime/test_two_devices.py",
    "tests/runtime/test_staging.py",
]
_HOST = ["tests/test_host_runtime.py", "tests/test_transfer_threads.py"]
_DISK = [
    "tests/tiers/test_disk.py",
    "tests/tiers/test_interrupted_slots.py",
    "tests/tiers/test_disk_files.py",
    "tests/tiers/test_disk_failures.py",
    "tests/tiers/test_disk_room.py",
    "tests/tiers/test_disk_stripes.py",
]

#: By the beginning of the module's path in the package; the longest that fits counts.
_FIRST: dict[str, list[str]] = {
    "": [],
    "compile": ["tests/compile/test_order.py", "tests/compile/test_backend.py"],
    "codecs": ["tests/codecs/test_exact.py", "tests/codecs/test_rounded.py", "tests/codecs/test_policy.py"],
    "codecs/policy": ["tests/codecs/test_policy.py", "tests/codecs/test_rounding.py"],
    "compile/host_tensors": ["tests/compile/test_transfers.py", "tests/compile/test_operations.py"],
    "engine": [
        "tests/hazards/test_interrupted_copies.py",
        "tests/hazards/test_copies.py",
        "tests/compile/test_transfers.py",
        "tests/compile/test_operations.py",
    ],
    "eager/coding": ["tests/codecs/test_saved_tensors.py", "tests/codecs/test_rounding.py"],
    "eager/packing": [
        "tests/codecs/test_saved_tensors.py",
        "tests/codecs/test_rounding.py",
        "tests/hazards/test_streams.py",
        "tests/hazards/test_out_of_memory.py",
    ],
    "eager/follow": [
        "tests/hazards/test_following.py",
        "tests/hazards/test_following_guard.py",
        "tests/hazards/test_following_alive.py",
        "tests/test_followed_counts.py",
        "tests/codecs/test_rounding.py",
        "tests/hazards/test_out_of_memory.py",
    ],
    "eager/handles": ["tests/hazards/test_versions.py", "tests/hazards/test_lifetime.py"],
    "eager/saving": [
        "tests/hazards/test_versions.py",
        "tests/hazards/test_lifetime.py",
        "tests/compile/test_transfers.py",
    ],
    "eager/exposure": ["tests/test_exposure.py"],
    "eager/hooks": ["tests/hazards/test_versions.py", "tests/test_contract.py"],
    "eager/plans": ["tests/hazards/test_following.py"],
    "eager/reloading": [
        "tests/hazards/test_streams.py",
        "tests/hazards/test_in_between.py",
        "tests/hazards/test_out_of_memory.py",
    ],
    "eager/ownership": ["tests/hazards/test_gradients_that_are_saved.py"],
    "eager/subclasses": ["tests/hazards/test_subclass_versions.py", "tests/hazards/test_subclasses.py"],
    "kernels": [
        "tests/kernels/test_signature.py",
        "tests/kernels/test_staging_tree.py",
        "tests/kernels/test_kernels.py",
        "tests/kernels/test_pallas.py",
    ],
    "step_plan": ["tests/test_step_plans.py", "tests/hazards/test_following.py"],
    "learning": ["tests/test_learning.py", "tests/test_learned_steps.py"],
    "observe/doctor": ["tests/observe/test_doctor_accelerator.py"],
    "observe/timestamps": ["tests/observe/test_tracing.py"],
    "offload": ["tests/test_contract.py", "tests/test_counts.py"],
    "runtime/accelerator": _ACCELERATOR,
    "runtime/base": [
        "tests/runtime/test_simulated.py",
        "tests/runtime/test_checker.py",
        "tests/hazards/test_copies.py",
        *_ACCELERATOR,
    ],
    "simulation/checker": _SIMULATED,
    "simulation/deferred": _SIMULATED,
    "runtime/device_clock": ["tests/runtime/test_device_clock.py", *_ACCELERATOR],
    "runtime/host": _HOST,
    "simulation/device": _SIMULATED,
    "simulation/log": ["tests/runtime/test_accelerator.py", *_SIMULATED],
    "simulation/observer": _SIMULATED,
    "runtime/link_probe": [
        "tests/runtime/test_interrupted_probe.py",
        "tests/runtime/test_accelerator_memory.py",
        *_ACCELERATOR,
    ],
    "runtime/pinned": ["tests/runtime/test_pinned.py", *_ACCELERATOR],
    "simulation/simulated": _SIMULATED,
    "runtime/staging": ["tests/runtime/test_staging.py", *_ACCELERATOR],
    "runtime/transfer_threads": _HOST,
    "tiers/arena": [
        "tests/tiers/test_arena.py",
        "tests/tiers/test_interrupted_slots.py",
        "tests/tiers/test_leases.py",
        "tests/hazards/test_copies.py",
    ],
    "tiers/cgroups": ["tests/tiers/test_limits.py"],
    "tiers/guard": ["tests/tiers/test_guard.py", "tests/hazards/test_short_memory.py"],
    "tiers/host": ["tests/tiers/test_shares.py", "tests/tiers/test_arena.py", "tests/hazards/test_short_memory.py"],
    "tiers/limits": ["tests/tiers/test_limits.py"],
    "tiers/numa": ["tests/tiers/test_numa.py"],
    "tiers/ranks": ["tests/tiers/test_limits.py"],
    "tiers/base": ["tests/tiers/test_arena.py", "tests/tiers/test_disk.py"],
    "tiers/disk": _DISK,
    "tiers/extents": ["tests/tiers/test_extents.py"],
    "tiers/slabs": ["tests/tiers/test_arena.py", "tests/runtime/test_pinned.py"],
    "tiers/space": _DISK,
    "tiers/spill": _DISK,
}
#: What the virtual device is asked about, which takes longest: modules by the beginning of their path.
_ON_THE_DEVICE = (
    "eager/follow",
    "eager/offloading",
    "eager/packing",
    "eager/reloading",
    "eager/saving",
    "observe/doctor",
    "runtime/accelerator",
    "runtime/device_clock",
    "runtime/pinned",
    "runtime/staging",
    "compile/host_tensors",
    "engine",
)
_DEVICE = [
    "tests/runtime/test_accelerator_gpu.py",
    "tests/virtual_device/on_device/test_hooks.py",
    "tests/virtual_device/on_device/test_doctor.py",
    "tests/virtual_device/on_device/test_it_can_tell.py::test_nothing_is_missing",
    "tests/virtual_device/on_device/test_it_can_tell.py::test_nothing_is_missing_in_graphs",
    "tests/virtual_device/on_device/test_training.py",
    "tests/gpu/test_scenarios.py::test_on_the_device",
]
#: Training steps on the runtimes that are at hand go without these, and would say nothing.
_ALONE = (
    "codecs",
    "compile",
    "eager/coding",
    "kernels",
    "observe/doctor",
    "observe/timestamps",
    "runtime/device_clock",
    "runtime/link_probe",
    "runtime/pinned",
    "runtime/staging",
    "tiers/cgroups",
    "tiers/limits",
    "tiers/numa",
    "tiers/ranks",
)


def suites_of(path: str) -> list[str]:
    """Test files for a module, such as ``eager_offload/tiers/arena.py``, the one that is likeliest to notice first."""
    module = path.partition("/")[2]
    beginning = max((known for known in _FIRST if module.startswith(known)), key=len)
    return list(dict.fromkeys([*_FIRST[beginning], *(() if beginning in _ALONE else _STEPS)]))


def device_suites_of(path: str) -> list[str]:
    """What only the virtual device can tell of a module: tests that run where that is the accelerator."""
    return _DEVICE if path.partition("/")[2].startswith(_ON_THE_DEVICE) else []

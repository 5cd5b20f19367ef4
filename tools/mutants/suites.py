"""Which tests are asked about a site: those of its module first, then those of whole training steps."""

from __future__ import annotations

from collections.abc import Iterator

# A suite is named without what all of them have: ``tiers/pool`` is ``tests/tiers/test_pool.py``. One with ``=`` in
# front stands for those of another module.

#: Of training steps; the cheap ones first: most sites are noticed there.
_STEPS = (
    "hazards/copies hazards/what_is_counted hazards/in_between hazards/versions "
    "matrix counts contract like_steps hazards/interrupts hazards/lifetime "
    "hazards/steady_state proof/random_programs"
)
#: By the beginning of the module's path in the package; the longest that fits counts.
_FIRST = {
    "=simulated": "runtime/simulated runtime/checker",
    "=host": "host_runtime",
    "=disk": "tiers/pool tiers/disk tiers/growth tiers/interrupts tiers/disk_files",
    "": "",
    "compile": "compile/order compile/select compile/insert compile/hazards_compiled compile/backend",
    "compile/ops": "compile/operations",
    "contexts": "hazards/overlapping foreign_hooks what_is_told contract",
    "engine": "hazards/in_between hazards/copies compile/operations",
    "engine/captured": "",
    "eager/gather": "hazards/copies hazards/interrupts hazards/what_is_counted",
    "eager/handles": "hazards/versions hazards/lifetime",
    "eager/keeping": "how_much_moves",
    "eager/saves": "hazards/versions hazards/lifetime hazards/copies hazards/interrupts compile/operations",
    "eager/hooks": "hazards/versions contract",
    "eager/moves": "hazards/copies hazards/in_between hazards/interrupts",
    "eager/originals": "hazards/versions matrix",
    "eager/subclasses": "hazards/subclasses",
    "graphs": "",
    "observe/no_effect": "what_is_told foreign_hooks hazards/overlapping",
    "kernels": "kernels/signature kernels/staging_tree kernels/kernels",
    "core/step_table": "like_steps hazards/tables matrix",
    "planning/machine": "machine planning/plan",
    "planning/measuring": "machine",
    "observe/doctor": "observe/doctor",
    "observe/timeline": "observe/tracing",
    "observe/trace": "observe/tracing",
    "offload": "contract counts",
    "runtime/accelerator": "",
    "runtime/base": "runtime/simulated runtime/checker hazards/copies",
    "planning/planner": "planning/recompute planning/levels",
    "planning/simulate": "planning/plan planning/simulate",
    "planning/target": "planning/trace",
    "runtime/host": "=host",
    "runtime/pinned": "",
    "runtime/staging": "",
    "runtime/transfer_threads": "=host",
    "tiers/pool": "tiers/pool tiers/growth tiers/interrupts tiers/shares hazards/copies",
    "tiers/host": "tiers/shares tiers/pool hazards/short_memory",
    "tiers/limits": "tiers/limits tiers/guard tiers/ledger hazards/short_memory",
    "tiers/ledger": "tiers/ledger",
    "tiers/memory": "tiers/disk hazards/what_is_counted",
    "tiers/base": "tiers/pool tiers/disk tiers/interrupts hazards/copies",
    "tiers/disk": "=disk",
    "tiers/spill": "=disk",
}
#: What the virtual device is asked about, which takes longest: modules by the beginning of their path.
_ON_THE_DEVICE = (
    "engine/captured eager/moves eager/gather eager/saves graphs "
    "observe/doctor runtime/accelerator runtime/base runtime/pinned runtime/staging "
    "compile/ops engine"
)
_DEVICE = (
    "virtual_device/on_device/runtime virtual_device/on_device/beside_captures virtual_device/on_device/staging "
    "virtual_device/on_device/pinned virtual_device/on_device/compiled_values virtual_device/on_device/hooks "
    "virtual_device/on_device/captured_steps virtual_device/on_device/captured_graphs "
    "virtual_device/on_device/training matrix gpu/scenarios::test_on_the_device"
)
#: Training steps on the runtimes that are at hand go without these, and would say nothing.
_ALONE = (
    "compile engine/captured graphs kernels observe/doctor observe/timeline runtime/accelerator "
    "runtime/pinned runtime/staging tiers/limits"
)


def suites_of(path: str) -> list[str]:
    """Test files for a module, such as ``eager_offload/tiers/pool.py``, the one that is likeliest to notice first."""
    module = path.partition("/")[2]
    beginning = max((known for known in _FIRST if module.startswith(known)), key=len)
    further = () if beginning in _ALONE.split() else _files(_STEPS)
    return list(dict.fromkeys([*_files(_FIRST[beginning]), *further]))


def device_suites_of(path: str) -> list[str]:
    """What only the virtual device can tell of a module: tests that run where that is the accelerator."""
    return list(_files(_DEVICE)) if path.partition("/")[2].startswith(tuple(_ON_THE_DEVICE.split())) else []


def _files(names: str) -> Iterator[str]:
    for name in names.split():
        if name.startswith("="):
            yield from _files(_FIRST[name])
            continue
        path, mark, test = name.partition("::")
        room, slash, module = path.rpartition("/")
        yield f"tests/{room}{slash}test_{module}.py{mark}{test}"

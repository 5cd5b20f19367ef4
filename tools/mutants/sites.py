"""Finds the places in the library's source that order copies or keep memory, and how each is taken out.

    record     an event is recorded             the event of the first record on that stream stands in its place
    wait       a stream or the host waits       it does not
    after      what a copy waits for first      one of it is left out
    keepalive  what has to outlive a copy       one of it is left out
    version    a version is compared            it is always as expected
    fence      last uses that a slot carries    one is left out
    release    something is given back          it is not
    check      kernels look at arguments and hardware: one condition is taken to be met

Call sites are changed, never what they call: a function with three callers has three sites.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

KINDS = ("record", "wait", "after", "keepalive", "version", "fence", "release", "check")

_RECORDS = {"record", "record_event"}
_WAITS = {
    "wait",
    "wait_event",
    "wait_for_room",
    "wait_on",
    "wait_until_left",
    "wait_until_over",
    "result",
    "synchronize",
}
_COPIES = {"copy", "_enqueue"}
_RELEASES = {
    "_disown",
    "_drop",
    "_let_go",
    "_poll",
    "cancel",
    "drop",
    "drop_resident",
    "forget",
    "keep_until",
    "mark_consumed",
    "release",
}
#: Of what was saved, as its handle has it.
_VERSIONS = {"self._version", "self.version"}
#: Where what refuses, raises or says whether something may be is a check.
_CHECKED = ("eager_offload/eager/gather.py", "eager_offload/kernels/")
#: Queues in which records of what has died land.
_QUEUES = {"_kept", "finalized", "returned"}
#: What such a queue's ``append`` is called where all records share it.
_FINALIZERS = {"_on_death", "_on_return", "on_death"}
#: What else has a method of such a name, and is about threads rather than bytes.
_OTHERS = ("_lock", "_permits")

_NOTHING = "(lambda *_, **__: None)"
#: Goes behind a mutated module that records: without its record, an event stands where it stood before.
STALE = """

import weakref as _weakref

_first_events = _weakref.WeakKeyDictionary()


def _stale(record):
    def first(*args, **kwargs):
        events = _first_events.setdefault(record.__self__, {})
        if args not in events:
            events[args] = record(*args, **kwargs)
        return events[args]

    return first
"""

_HELD = "the thread that reads or writes a disk slot holds it, so that its range is free only when every use is over"
#: Sites without which nothing observable differs, by path, kind and what is taken out, each with the reason: they are
#: not tried. Such code stays where one rule serves several tiers, and to except one of them would take more lines.
EQUIVALENT = {
    (
        "eager_offload/tiers/disk.py",
        "fence",
        "pending(found.fences)",
    ): _HELD,
    (
        "eager_offload/tiers/disk.py",
        "fence",
        "record.range.fences = record.fences  without  record.fences",
    ): _HELD,
}


@dataclass(frozen=True)
class Site:
    """One place, and what stands there instead once it is taken out."""

    kind: str
    #: Of the module, from the package's parent.
    path: str
    line: int
    #: What is taken out, on one line.
    source: str
    start: int
    stop: int
    replacement: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def what(self) -> tuple[str, str, str]:
        """What it is known by in ``EQUIVALENT``."""
        return self.path, self.kind, self.source


def find(package: Path) -> list[Site]:
    """Every site of every module under ``package``, by path and line."""
    sites: list[Site] = []
    for module in sorted(package.rglob("*.py")):
        path = module.relative_to(package.parent).as_posix()
        sites += find_in(module.read_text(), path)
    return sites


def find_in(text: str, path: str) -> list[Site]:
    """Every site of one module's ``text``."""
    finder = _Finder(text, path)
    finder.visit(ast.parse(text))
    return sorted(set(finder.sites), key=lambda site: (site.line, site.start, site.source))


def mutate(text: str, site: Site) -> str:
    """The module's ``text`` without ``site``."""
    raw = text.encode()
    mutated = (raw[: site.start] + site.replacement.encode() + raw[site.stop :]).decode()
    return mutated + STALE if site.replacement.startswith("_stale(") else mutated


class _Finder(ast.NodeVisitor):
    def __init__(self, text: str, path: str) -> None:
        self.sites: list[Site] = []
        self._path, self._is_checked = path, path.startswith(_CHECKED)
        self._raw = text.encode()
        self._line_starts = [0]
        for line in self._raw.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    # -- what is looked at ----------------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        # A record whose event is not taken orders by itself, as in a log.
        if isinstance(node.value, ast.Call) and _called(node.value) in _RECORDS:
            self._take_out("record", node.value, node.value.func, _NOTHING)
            for child in ast.iter_child_nodes(node.value):
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _called(node)
        if name in _RECORDS:
            self._take_out("record", node, node.func, f"_stale({self._text(node.func)})")
        elif name in _WAITS:
            self._take_out("wait", node, node.func, _NOTHING)
        elif name in _RELEASES and not self._owner(node).endswith(_OTHERS):
            self._take_out("keepalive" if name == "keep_until" else "release", node, node.func, _NOTHING)
        elif name == "append" and self._is_queue(self._owner(node)):
            self._take_out("release", node, node.func, _NOTHING)
        if name in _COPIES:
            self._leave_out("after", node, _argument(node, "after", 3))
            self._leave_out("keepalive", node, _keyword(node, "keepalive"))
        elif name == "keep_until":
            self._leave_out("keepalive", node, _argument(node, "keepalive", 1))
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self._visit_argument(node, argument)
        self.generic_visit(node)

    def _visit_argument(self, call: ast.Call, argument: ast.expr) -> None:
        """What is handed on: a wait or a release to be called later, and fences."""
        if isinstance(argument, ast.Name) and argument.id in _FINALIZERS:
            self._take_out("release", call, argument, _NOTHING)
        if not isinstance(argument, ast.Attribute):
            return
        if argument.attr in _WAITS:
            self._take_out("wait", call, argument, _NOTHING)
        elif argument.attr in _FINALIZERS or (argument.attr == "append" and self._is_queue(self._text(argument.value))):
            self._take_out("release", call, argument, _NOTHING)
        elif argument.attr == "fences":
            self._take_out("fence", call, argument, "()")

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and target.attr == "fences":
            self._leave_out("fence", node, node.value)
        elif isinstance(target, ast.Name) and target.id == "keepalive" and isinstance(node.value, ast.IfExp):
            self._leave_out("keepalive", node, node.value.orelse)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if self._is_checked:
            for condition in _all_of(node.value):
                self._take_out("check", node, condition, "True", self._text(condition))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        if any(self._text(side) in _VERSIONS for side in sides):
            self._take_out("version", node, node, "False" if isinstance(node.ops[0], ast.NotEq) else "True")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if self._is_checked and _refuses(node.body):
            for condition in _any_of(node.test):
                self._take_out("check", node.test, condition, "False", self._text(condition))
        self.generic_visit(node)

    # -- what becomes of it ---------------------------------------------------------------------------------------

    def _leave_out(self, kind: str, shown: ast.AST, several: ast.expr | None) -> None:
        """Each element of a display, singly; anything else as a whole."""
        if several is None or (isinstance(several, ast.Tuple | ast.List) and not several.elts):
            return
        if not isinstance(several, ast.Tuple | ast.List):
            self._take_out(kind, shown, several, "()", self._text(several))
            return
        for left_out in several.elts:
            others = "".join(f"{self._text(element)}, " for element in several.elts if element is not left_out)
            self._take_out(kind, shown, several, f"({others})", self._text(left_out))

    def _take_out(self, kind: str, shown: ast.AST, taken: ast.AST, replacement: str, what: str | None = None) -> None:
        source = " ".join(self._text(shown).split())
        if what is not None:
            source = f"{source}  without  {' '.join(what.split())}"
        line: int = taken.lineno  # type: ignore[attr-defined]
        start, stop = self._span(taken)
        self.sites.append(Site(kind, self._path, line, source, start, stop, replacement))

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        stop = self._line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, stop

    def _text(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self._raw[start:stop].decode()

    def _is_queue(self, owner: str) -> bool:
        holder, _, name = owner.rpartition(".")
        return bool(holder) and name in _QUEUES

    def _owner(self, call: ast.Call) -> str:
        return self._text(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _called(call: ast.Call) -> str:
    """The last part of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _argument(call: ast.Call, name: str, position: int) -> ast.expr | None:
    """An argument by its name, or the last one if it stands at ``position`` or later."""
    return _keyword(call, name) or (call.args[-1] if len(call.args) > position else None)


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    """An argument by its name."""
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _any_of(test: ast.expr) -> list[ast.expr]:
    """The conditions each of which does."""
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]


def _all_of(value: ast.expr | None) -> list[ast.expr]:
    """The conditions all of which have to be met, where ``value`` is a verdict; none where it is anything else."""
    if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And):
        return value.values
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitAnd) and isinstance(value.left, ast.Compare):
        return [value.left, value.right]
    return []


def _refuses(body: list[ast.stmt]) -> bool:
    """Whether statements end with an error, or with the answer that something is not so, or is not there."""
    last = body[-1]
    if isinstance(last, ast.Return):
        return last.value is None or (isinstance(last.value, ast.Constant) and last.value.value in (None, False))
    return isinstance(last, ast.Raise)

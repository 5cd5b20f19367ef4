"""What a user installs: wheel and editable install hold every package, typed, and import it without any framework."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

import eager_offload as eo
from tests.docs.pages import links

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("install")]

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ["accelerate", "lightning", "pytorch_lightning", "transformers", "trl", "peft"]
LOOK = f"""
import sys
import eager_offload.integrations.calls, eager_offload.integrations.metrics
import eager_offload.compile.backend, eager_offload.observe.figure
loaded = [name for name in {FRAMEWORKS} if name in sys.modules]
assert not loaded, loaded
print(eager_offload.__file__)
print(eager_offload.integrations.__file__)
"""
# The first call of each is right, those behind it are wrong.
TYPED = """
from eager_offload import Offload
Offload({'tier': 'disk'}, min_bytes='4MiB', enabled=False)
Offload(min_byte=4)
Offload(min_bytes=[4])
from eager_offload.integrations.accelerate import OffloadPlugin
OffloadPlugin(log_metrics="all")
OffloadPlugin(log_metrics="some")
"""


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_install_brings_the_integrations(kind: str, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    copied = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "eager_offload"]
    checkout.mkdir()
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in copied), str(checkout)], check=True)
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    site = next(environment.glob("lib/python*/site-packages"))
    # What this one has, torch above all; not this project's own editable install, which is found by a .pth of its own.
    others = site / "others.pth"
    others.write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    pip = [sys.executable, "-m", "pip", "--python", str(environment), "--disable-pip-version-check"]
    how = [str(checkout)] if kind == "wheel" else ["-e", str(checkout)]
    done = subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-build-isolation", "--force-reinstall", *how],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    python = environment / "bin" / "python"
    ran = subprocess.run([str(python), "-c", LOOK], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
    core, integrations = map(Path, ran.stdout.split())
    holds = (site if kind == "wheel" else checkout) / "eager_offload"
    assert (core, integrations) == (holds / "__init__.py", holds / "integrations" / "__init__.py")
    # What a wheel could lack: the mark that it is typed, and folders with code.
    assert (holds / "py.typed").is_file()
    code = {file.relative_to(ROOT) for file in (ROOT / "eager_offload").rglob("*.py")}
    assert code == {file.relative_to(holds.parent) for file in holds.rglob("*.py")}
    others.unlink()  # torch's types have no part in it, and take seconds
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n")
    check = [sys.executable, "-m", "mypy", "--python-executable", str(python), "typed.py"]
    found = subprocess.run(check, capture_output=True, text=True, cwd=tmp_path).stdout
    assert [line.split(":")[1] for line in found.splitlines() if ": error:" in line] == ["4", "5", "8"], found


def test_the_source_distribution_has_all_that_git_has(tmp_path: Path) -> None:
    """With it alone the tests can be run and the documentation built, and README's links lead to files in it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    names = [name for name in listed.stdout.splitlines() if not (ROOT / name).is_symlink()]
    for name in names:
        copy = tmp_path / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    program = "import sys, setuptools.build_meta as build; print(build.build_sdist(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=tmp_path / "checkout", capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-2000:]
    with tarfile.open(tmp_path / built.stdout.split()[-1]) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
        information = next(member for member in archive if member.name.endswith("/PKG-INFO"))
        described = archive.extractfile(information)
        assert described is not None
        headers, _, description = described.read().decode().partition("\n\n")
    assert not set(names) - held
    readme = ROOT / "README.md"
    assert {link.path for link in links(readme) if link.path} <= held
    # An index shows it without the files: what it names is in the source distribution, and no link leads to it.
    assert {"Name: eager-offload", f"Version: {eo.__version__}", "Description-Content-Type: text/markdown"} <= set(
        headers.splitlines()
    )
    assert description.startswith("# eager_offload")
    assert not re.findall(r"\]\((?!https?://)[^)]*\)|<!--", description)
    pages = set(re.findall(r"`((?:docs/)?[\w/]+\.md|LICENSE)`", description))
    assert {link.path for link in links(readme) if link.path.endswith(".md")} <= pages <= held
    assert {name for name in held - set(names) if ".egg-info/" not in name} == {"PKG-INFO", "setup.cfg"}

"""What a user installs: the wheel and the editable install hold every package, and import it without any framework."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FRAMEWORKS = ["accelerate", "lightning", "pytorch_lightning", "transformers", "trl", "peft"]
LOOK = f"""
import sys
import eager_offload.integrations.calls, eager_offload.integrations.metrics, eager_offload.integrations.settings
import eager_offload.compile.backend, eager_offload.observe.report
loaded = [name for name in {FRAMEWORKS} if name in sys.modules]
assert not loaded, loaded
print(eager_offload.__file__)
print(eager_offload.integrations.__file__)
"""


def test_every_folder_with_code_is_a_listed_package() -> None:
    places = PROJECT["tool"]["setuptools"]["package-dir"]
    listed = PROJECT["tool"]["setuptools"]["packages"]
    found = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "eager_offload").rglob("__init__.py")}
    for package, place in places.items():
        folders = (ROOT / place).rglob("__init__.py")
        found |= {".".join([package, *init.parent.relative_to(ROOT / place).parts]) for init in folders}
    assert sorted(found) == sorted(listed)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_install_brings_the_integrations(kind: str, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    copied = ["pyproject.toml", "README.md", "LICENSE", "eager_offload", "integrations"]
    checkout.mkdir()
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in copied), str(checkout)], check=True)
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    site = next(environment.glob("lib/python*/site-packages"))
    # What this one has, torch above all; not this project's own editable install, which is found by a .pth of its own.
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
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
    core, integrations = ran.stdout.split()
    if kind == "wheel":
        assert Path(core).is_relative_to(site)
        assert Path(integrations) == site / "eager_offload" / "integrations" / "__init__.py"
        # A type checker is told, and pages of the report are data that a wheel could lack.
        assert (site / "eager_offload" / "py.typed").is_file()
        assert (site / "eager_offload" / "observe" / "report" / "page.html").is_file()
    else:
        assert Path(core) == checkout / "eager_offload" / "__init__.py"
        assert Path(integrations) == checkout / "integrations" / "__init__.py"

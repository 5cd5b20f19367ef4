"""Lightning's command line: the callback from a YAML file and from flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import eager_offload as eo
from eager_offload.integrations.lightning import OffloadCallback
from tests.integrations.lightning_training import PACKAGES, QUIET, Steps, module_of

# Before a module of either package's is needed: it is the class that jsonargparse looks at.
CALLBACK = "eager_offload.integrations.lightning.OffloadCallback"


def run(package: str, arguments: list[str]) -> Any:
    """The command line's own objects, nothing trained."""
    command_line = pytest.importorskip(f"{package}.cli", reason="jsonargparse is not installed").LightningCLI
    return command_line(type(module_of(package, Steps)), args=arguments, run=False, save_config_callback=None)


def write(path: Path, init_args: dict[str, Any]) -> str:
    trainer = {**QUIET, "accelerator": "cpu", "default_root_dir": str(path.parent)}
    trainer["callbacks"] = [{"class_path": CALLBACK, "init_args": init_args}]
    path.write_text(yaml.safe_dump({"trainer": trainer}))
    return str(path)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("below", ["", "config"])
def test_a_yaml_file_configures_it(package: str, below: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / "one"), str(tmp_path / "two")]
    for path in paths:
        Path(path).mkdir()
    fields = {"tier": "disk", "min_bytes": "4MiB", "keep_last_bytes": "auto", "disk_path": paths}
    given = {below: fields} if below else fields | {"log_metrics": False}
    ran = run(package, ["--config", write(tmp_path / "config.yaml", given)])
    [callback] = [one for one in ran.trainer.callbacks if isinstance(one, OffloadCallback)]
    assert callback.offload.config == eo.OffloadConfig(**fields)
    assert callback.offload.config.disk_paths == tuple(map(Path, paths))
    callback.offload.close()


def test_flags_configure_it(tmp_path: Path) -> None:
    quiet = [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]
    flags = [f"--trainer.callbacks={CALLBACK}", "--trainer.callbacks.min_bytes=4MiB", "--trainer.accelerator=cpu"]
    ran = run(PACKAGES[0], [*quiet, *flags, f"--trainer.default_root_dir={tmp_path}"])
    [callback] = [one for one in ran.trainer.callbacks if isinstance(one, OffloadCallback)]
    assert callback.offload.config.min_bytes == 4 << 20


def test_a_field_that_does_not_exist_is_an_error_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(PACKAGES[0], ["--config", write(tmp_path / "config.yaml", {"min_byts": "4MiB"})])
    assert "min_byts" in capsys.readouterr().err

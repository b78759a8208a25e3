"""A configuration that is written as TOML reads back as the same one."""

from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.processes.preparation.comparison_plan import config_toml

CONFIGS = sorted((Path(__file__).parents[3] / "configs").rglob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_reads_back_equal(path: Path, tmp_path: Path) -> None:
    """Overrides are laid over the file, and what the file leaves to defaults stays unsaid."""
    config = load_config(path, ["--run.seed", "7"])
    written = tmp_path / "written.toml"
    written.write_text(config_toml(config))
    assert load_config(written) == config
    assert "silence_s" not in written.read_text() or "silence_s" in path.read_text()

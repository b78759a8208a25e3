"""Whether engines that sleep fit into main memory."""

from pathlib import Path

import pytest

from mrl.cli.preflight import preflight
from mrl.cli.residents import check_residents
from mrl.config.load import load_config
from mrl.errors import ConfigError
from mrl.launch.memory import TORCH_MIB

CONFIG = """
[run]
name = "r"
steps = 2
folder = "{folder}"
[pool]
train_prompts = 4
held_out_prompts = 2
[tasks.trim]
source = "words"
dataset = "trim"
[allocation]
units = ["cpu:0", "cpu:1", "gpu:0", "other/cpu:7"]
residency = "sleep"
[policies.one]
model = "{folder}/one"
source = "maker/One-2B"
[policies.two]
model = "{folder}/two"
source = "maker/Two-1B"
device = "cuda"
"""
WANTED_MIB = 3 * TORCH_MIB + (2 * 2 + 1) * 4e9 / 2**20
"""Two billion parameters on two CPU units, one billion on the GPU; another host looks for itself."""


def test_every_unit_may_hold_an_engine_of_every_policy_that_fits_it(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    config = load_config(path, [])
    check_residents(config, host_mib=1.1 * WANTED_MIB, where="r.toml")
    with pytest.raises(ConfigError, match=r"do not fit into main memory.*one 1\d{4} MiB, two \d{4} MiB"):
        check_residents(config, host_mib=0.9 * WANTED_MIB, where="r.toml")


def test_it_is_looked_at_before_a_run_where_engines_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nowhere else."""
    path = tmp_path / "r.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("M", (), {"total": 2**30})())
    with pytest.raises(ConfigError, match="do not fit into main memory"):
        preflight(load_config(path, []), where="r.toml", on_missing=lambda _: None)
    preflight(load_config(path, ["--allocation.residency", "stop"]), where="r.toml", on_missing=lambda _: None)

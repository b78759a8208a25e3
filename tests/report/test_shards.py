"""The exchange's daemons report each for its own prompts, and are shown together."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config.run_folder import RunFolder
from mrl.metrics.jsonl import MetricsWriter
from mrl.records.telemetry_messages import MetricsRecord
from mrl.report.run_data import read_run
from mrl.report.shards import Shards


@pytest.mark.parametrize(
    ("name", "together"),
    [("exchange/records", 8.0), ("exchange/flow_bytes/a/b", 8.0), ("exchange/flow_hit_rate/a/b", 4.0)],
)
def test_sums_and_means_of_the_newest_values(name: str, together: float) -> None:
    """Of each daemon the newest; metrics do not mix."""
    shards = Shards()
    shards.together("exchange", "exchange/log_bytes", 100.0)
    assert shards.together("exchange", name, 1.0) == 1.0
    shards.together("exchange/1", name, 5.0)
    assert shards.together("exchange", name, 3.0) == together


def test_a_reports_flows_are_those_of_all_daemons(make_run: Callable[..., Path]) -> None:
    """As they stand at the end."""
    run = make_run(steps=40)
    before = read_run(run).flows["llama", "qwen"]
    metrics = MetricsWriter(RunFolder(run).metrics_jsonl)
    values = {"exchange/flow_records/llama/qwen": 1000.0, "exchange/flow_hit_rate/llama/qwen": 0.0}
    metrics.write(MetricsRecord(role="exchange/1", policy="", step=40, time_unix_s=1.0, values=values))
    metrics.close()
    after = read_run(run).flows["llama", "qwen"]
    assert after["records"] == before["records"] + 1000
    assert after["hit_rate"] == before["hit_rate"] / 2 > 0
    assert after["bytes"] == before["bytes"]

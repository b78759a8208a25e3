"""Rules that span several keys of the exchange's table."""

import pytest

from mrl.config.load import validate
from mrl.config.rules import check_rules
from mrl.errors import ConfigError


def config_with(**exchange):
    """A configuration with this table."""
    tables = {
        "run": {"name": "r", "steps": 1},
        "tasks": {"reverse": {"source": "words", "dataset": "reverse"}},
        "policies": {"qwen": {"model": "/nowhere"}},
        "exchange": exchange,
    }
    config = validate(tables, where="test")
    check_rules(config, where="test")
    return config


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        ({"port": 9000, "metrics_port": 9000}, "metrics_port: a port of the exchange itself; got 9000; wanted none of"),
        ({"port": 9000, "metrics_port": 9001, "shards": 2}, "wanted none of 9000 to 9001, or 0"),
        ({"port": 9001, "metrics_port": 9000, "shards": 2}, "a port of the exchange itself"),
        ({"metrics_port": 65_535, "shards": 2}, "metrics_port: no port is left for the last shard"),
        ({"metrics_port": 65_536}, "exchange.metrics_port: not valid; got 65536; wanted <= 65535"),
    ],
)
def test_ports_that_cannot_be_are_refused(exchange, words):
    """In one line that names the key."""
    with pytest.raises(ConfigError, match=words):
        config_with(**exchange)


@pytest.mark.parametrize(
    "exchange",
    [
        {"port": 9000},
        {"metrics_port": 9000},
        {"port": 9000, "metrics_port": 9002, "shards": 2},
        {"port": 9000, "metrics_port": 9000, "metrics_host": ""},
    ],
)
def test_ports_that_do_not_meet_pass(exchange):
    """Free ports meet nothing, and pages that are off need none."""
    config_with(**exchange)


def test_every_shard_has_its_own_port_for_pages():
    """They follow each other; 0 stands for any."""
    table = config_with(metrics_port=9000, shards=3).exchange
    assert [table.metrics_port_of(shard) for shard in range(3)] == [9000, 9001, 9002]
    assert config_with(shards=3).exchange.metrics_port_of(2) == 0

"""Rules that span several keys: of the exchange's table, and of GPUs and engines."""

import pytest

from mrl.config.rules.run_rules import check_rules
from mrl.errors import ConfigError
from tests.support.word_runs import word_run


def config_with(**exchange):
    """A configuration with this table."""
    config = word_run({"qwen": {}}, task="reverse", exchange=exchange)
    check_rules(config, where="test")
    return config


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        (
            {"port": 9000, "metrics_port": 9000, "host": "127.0.0.1", "metrics_host": "127.0.0.1"},
            "metrics_port: already used as exchange.port; got 9000; wanted a port other than 9000, or 0",
        ),
        ({"host": "::"}, "exchange.host: not an IPv4 address or host name; got '::'; wanted .*\"0.0.0.0\" for all"),
        ({"host": "fd00::1"}, "exchange.host: not an IPv4 address or host name; .*for all of them$"),
        ({"host": "10.0.0.1:9000"}, "exchange.host: .*; cure: set the port in exchange.port"),
        ({"port": 9000}, "exchange.port: a port without exchange.host; got 9000; cure: set --exchange.host 127.0.0.1"),
        (
            {"metrics_port": 9000},
            "exchange.metrics_port: a port without exchange.metrics_host; got 9000; cure: set --exchange.metrics",
        ),
        ({"metrics_port": 65_536}, "exchange.metrics_port: invalid value; got 65536; wanted <= 65535"),
    ],
)
def test_ports_that_cannot_be_are_refused(exchange, words):
    """In one line that names the key."""
    with pytest.raises(ConfigError, match=words):
        config_with(**exchange)


@pytest.mark.parametrize(
    "exchange",
    [
        {"port": 9000, "host": "127.0.0.1"},
        {"metrics_port": 9000, "metrics_host": "127.0.0.1"},
        {"port": 9000, "metrics_port": 9001, "host": "127.0.0.1", "metrics_host": "127.0.0.1"},
        {},
    ],
)
def test_ports_that_do_not_meet_pass(exchange):
    """Free ports meet nothing, and pages that are off need none."""
    config_with(**exchange)


def config_with_policy(device, rollout):
    """One policy."""
    config = word_run({"qwen": {"device": device, "rollout": rollout}})
    check_rules(config, where="test")
    return config


@pytest.mark.parametrize(
    ("device", "rollout", "words"),
    [
        (
            "cuda",
            {"gpus": 2},
            "can use several; got '2 for embedded on cuda'.*cure: .*workers = 2, for engines on one GPU",
        ),
        ("cpu", {"gpus": 2, "engine": "vllm"}, "got '2 for vllm on cpu'"),
        ("cuda", {"gpus": 2, "engine": "sglang", "server": {"url": "http://h:1"}}, "2 for sglang on cuda given by url"),
        ("cuda", {"engine": "vllm", "server": {"options": ["--tensor-parallel-size=2"]}}, "set rollout.gpus"),
        ("cuda", {"engine": "sglang", "server": {"options": ["--tp-size", "2"]}}, "set rollout.gpus"),
        ("cuda", {"gpus": 0}, "gpus: invalid value; got 0"),
    ],
)
def test_several_gpus_are_for_servers_that_the_run_starts(device, rollout, words):
    """In one line that names the key."""
    with pytest.raises(ConfigError, match=words):
        config_with_policy(device, rollout)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_on_gpus_takes_several(engine):
    """As many as the engine can share the model out over is for its model to say."""
    assert config_with_policy("cuda", {"engine": engine, "gpus": 8}).policies["qwen"].rollout.gpus == 8


def test_every_mistake_is_told_behind_the_file_that_it_is_in():
    """Also one that says its own place."""
    config = config_with()
    unable = config.exchange.model_copy(update={"port": 9000})
    with pytest.raises(ConfigError, match=r"^c\.toml: exchange\.port: "):
        check_rules(config.model_copy(update={"exchange": unable}), where="c.toml")
    unknown = {"reverse": config.tasks["reverse"].model_copy(update={"source": "nosuch"})}
    with pytest.raises(ConfigError, match=r"^c\.toml: tasks\.reverse\.source: no such task source"):
        check_rules(config.model_copy(update={"tasks": unknown}), where="c.toml")

"""Endpoint files."""

import json
import os

import pytest

from mrl.transport.endpoints import port_of, publish_endpoint, read_endpoint


def test_a_published_endpoint_is_read_back(tmp_path):
    """The newest address counts, and the file names the process."""
    publish_endpoint(tmp_path / "endpoints", "exchange", "tcp://127.0.0.1:1")
    publish_endpoint(tmp_path / "endpoints", "exchange", "tcp://127.0.0.1:2")
    assert read_endpoint(tmp_path / "endpoints", "exchange") == "tcp://127.0.0.1:2"
    assert json.loads((tmp_path / "endpoints/exchange.json").read_text())["pid"] == os.getpid()
    assert [path.name for path in (tmp_path / "endpoints").iterdir()] == ["exchange.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"address": 3}', '{"address": "ipc://x"}'])
def test_an_unreadable_endpoint_is_none(tmp_path, content):
    """A torn or foreign file counts as no endpoint."""
    (tmp_path / "exchange.json").write_text(content)
    assert read_endpoint(tmp_path, "exchange") is None


def test_a_missing_endpoint_is_none(tmp_path):
    """Before the role has started there is none."""
    assert read_endpoint(tmp_path, "exchange") is None


@pytest.mark.parametrize(
    ("address", "port"), [("tcp://127.0.0.1:5555", 5555), (None, 0), ("tcp://host", 0), ("tcp://host:99999", 0)]
)
def test_port_of(address, port):
    """The port is the number after the last colon."""
    assert port_of(address) == port

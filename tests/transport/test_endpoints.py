"""Endpoint files."""

import json
import os

import pytest

from mrl.transport.endpoints import nearest_endpoint, port_of, publish_endpoint, read_endpoint


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


def test_a_socket_file_of_this_host_is_nearer(tmp_path):
    """The tcp address stays what others, and whoever wants the port, are told."""
    (tmp_path / "socket").touch()
    publish_endpoint(tmp_path, "exchange", "tcp://127.0.0.1:1", tmp_path / "socket")
    assert nearest_endpoint(tmp_path, "exchange") == f"ipc://{tmp_path}/socket"
    assert read_endpoint(tmp_path, "exchange") == "tcp://127.0.0.1:1"


@pytest.mark.parametrize("why", ["no file", "another host", "none published"])
def test_without_a_socket_file_within_reach_it_is_tcp(tmp_path, why):
    """A run folder may be shared between hosts, and a socket file works on one."""
    path = tmp_path / "socket"
    if why != "no file":
        path.touch()
    publish_endpoint(tmp_path, "exchange", "tcp://127.0.0.1:1", None if why == "none published" else path)
    if why == "another host":
        content = json.loads((tmp_path / "exchange.json").read_text()) | {"ipc_host": "elsewhere"}
        (tmp_path / "exchange.json").write_text(json.dumps(content))
    assert nearest_endpoint(tmp_path, "exchange") == "tcp://127.0.0.1:1"

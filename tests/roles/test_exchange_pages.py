"""Where the exchange role shows its pages."""

import json
import socket
import urllib.error
import urllib.request

import msgspec
import pytest
from logged_core import LoggedCore

from mrl.config.run_folder import RunFolder
from mrl.config.schema import ExchangeTable
from mrl.errors import AddressError
from mrl.exchange.exposition import Exposition
from mrl.roles.exchange_pages import pages_endpoint_of, served
from mrl.transport.endpoints import port_of, publish_endpoint, read_endpoint


@pytest.fixture
def folder(tmp_path):
    """A run's."""
    return RunFolder(tmp_path)


@pytest.fixture
def exposition():
    """Of a daemon that has nothing to do."""
    return Exposition(LoggedCore().stat(0.0), lambda: 0.0)


def get(url):
    """(status, content type, body)."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def test_both_pages_are_where_the_endpoint_file_says(exposition, folder):
    """On loopback, in the formats that Prometheus and people read."""
    with served(exposition, ExchangeTable(), folder, 0) as url:
        assert f"tcp://{url.removeprefix('http://')}" == read_endpoint(folder.endpoints, "exchange-metrics")
        assert url.startswith("http://127.0.0.1:")
        status, kind, body = get(f"{url}/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert b"mrl_exchange_healthy 1.0\n" in body
        status, kind, body = get(f"{url}/health")
        assert (status, kind, json.loads(body)["status"]) == (200, "application/json", "ok")
        exposition.hand_over(msgspec.structs.replace(exposition.stat, storage="disk_full"))
        assert get(f"{url}/health")[0] == 503
        assert get(f"{url}/")[0] == 404


def test_shards_have_pages_of_their_own(exposition, folder):
    """Each under its own name."""
    table = ExchangeTable(shards=2)
    with served(exposition, table, folder, 0) as first, served(exposition, table, folder, 1) as second:
        assert first != second
    assert pages_endpoint_of(1) == "exchange-1-metrics"
    assert read_endpoint(folder.endpoints, "exchange-1-metrics").endswith(second.rpartition(":")[2])


def test_a_restarted_daemon_has_its_pages_where_they_were(exposition, folder):
    """So that Prometheus need not be told; when somebody else is there by now, elsewhere."""
    with served(exposition, ExchangeTable(), folder, 0) as first:
        pass
    with served(exposition, ExchangeTable(), folder, 0) as second:
        assert second == first
    with socket.create_server(("127.0.0.1", port_of(first))), served(exposition, ExchangeTable(), folder, 0) as third:
        assert third != first
        assert get(f"{third}/health")[0] == 200


def test_a_configured_port_that_is_busy_is_one_clear_line(exposition, folder):
    """Nobody would look for the pages elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        table = ExchangeTable(metrics_port=other.getsockname()[1])
        with pytest.raises(AddressError, match="the port is busy"), served(exposition, table, folder, 0):
            pass


def test_pages_can_be_turned_off(exposition, folder):
    """Then no file of an earlier life says that there are some."""
    publish_endpoint(folder.endpoints, "exchange-metrics", "tcp://127.0.0.1:1")
    with served(exposition, ExchangeTable(metrics_host=""), folder, 0) as url:
        assert url == ""
        assert read_endpoint(folder.endpoints, "exchange-metrics") is None

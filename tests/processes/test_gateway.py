"""The gateway's process: its port, its keys, and the role in the plan."""

import asyncio
import socket

import pytest
from aiohttp import web

from mrl.config.schema import GatewayTable
from mrl.errors import AddressError
from mrl.processes.gateway import kept_key, listen
from mrl.tasks.environments.gateway_location import ENDPOINT
from mrl.transport.endpoints import port_of, read_endpoint


def test_a_key_is_made_once_and_for_its_user_alone(tmp_path):
    """A gateway that starts again has the same."""
    first = kept_key(tmp_path / "gateway.key")
    assert len(first) > 40
    assert kept_key(tmp_path / "gateway.key") == first
    assert (tmp_path / "gateway.key").stat().st_mode & 0o777 == 0o600


def listening(table, endpoints):
    """The address of a gateway that was started and ended."""

    async def whole():
        runner = web.AppRunner(web.Application())
        await runner.setup()
        try:
            return await listen(runner, table, endpoints)
        finally:
            await runner.cleanup()

    return asyncio.run(whole())


def test_the_next_life_listens_at_the_same_port(tmp_path):
    """Agents that were told of it find it again; where somebody else has it, another is taken and published."""
    first = listening(GatewayTable(), tmp_path)
    assert listening(GatewayTable(), tmp_path) == first
    with socket.create_server(("127.0.0.1", port_of(first))):
        other = listening(GatewayTable(), tmp_path)
    assert other != first
    assert read_endpoint(tmp_path, ENDPOINT) == other


def test_a_port_that_is_taken_is_told(tmp_path):
    """One that the configuration names is not exchanged."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=str(port)):
            listening(GatewayTable(port=port), tmp_path)

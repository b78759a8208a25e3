"""What SGLang's backend asks while weights change, of a server whose last step is not over; answers as of 0.5.23."""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mrl.engines.http import HttpFailure
from mrl.engines.sglang import CONTROLS, MAX_LOADS, NEEDED, SGLang
from mrl.errors import WeightsError

UPDATE = "/update_weights_from_disk"
NOT_FLUSHED = (
    '{"success":false,"message":"Weights were updated, but the cache was not flushed because requests are still '
    'running or queued. Retract or finish them, then call /flush_cache.","num_paused_requests":0}'
)
NOT_BEGUN = '{"success":false,"message":"Failed to get weights iterator: no such file."}'


class Busy:
    """The calls of an update; `refusals` are the answers of the first of them, with status 400."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, *refusals: str) -> None:
        self._refusals = list(refusals)
        self.asked: list[str] = []

    async def post(self, route: str, body: object = None, *, within_s: float | None = 30.0, **parameters: str) -> str:
        self.asked.append(route)
        if route == "/flush_cache":
            assert within_s > float(parameters["timeout"]) > 0, "SGLang waits, and says so itself"
        if route == UPDATE and self._refusals:
            raise HttpFailure(route, 400, self._refusals.pop(0))
        return "{}"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Weights of one tensor."""
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path


def load(server: Busy, folder: Path) -> None:
    sglang = SGLang()
    sglang._routes, sglang._first_folder = frozenset((*NEEDED, *CONTROLS)), folder
    asyncio.run(sglang.load(server, folder, "0.1"))  # type: ignore[arg-type]


def test_an_update_begins_when_the_server_is_idle(folder):
    """What was given up may have answered before its step ends; the deferred flush waits for that."""
    server = Busy()
    load(server, folder)

    assert server.asked == ["/flush_cache", UPDATE]


def test_weights_behind_which_something_still_ran_are_loaded_once_more(folder):
    """SGLang has taken them, kept the old cache, and calls that a failure: it is no lost server."""
    server = Busy(NOT_FLUSHED)
    load(server, folder)

    assert server.asked == ["/flush_cache", UPDATE] * 2


@pytest.mark.parametrize(
    ("refusals", "error", "num_loads"),
    [([NOT_FLUSHED] * MAX_LOADS, HttpFailure, MAX_LOADS), (["{}"], HttpFailure, 1), ([NOT_BEGUN], WeightsError, 1)],
)
def test_what_an_update_says_otherwise_is_what_it_was(folder, refusals, error, num_loads):
    """Never idle, a fault of its own, and weights that it does not take."""
    server = Busy(*refusals)
    with pytest.raises(error):
        load(server, folder)

    assert server.asked.count(UPDATE) == num_loads


def test_nothing_runs_in_a_server_that_is_put_to_sleep():
    """SGLang ends itself over an assertion otherwise."""
    server = Busy()
    asyncio.run(SGLang().sleep(server))  # type: ignore[arg-type]

    assert server.asked == ["/flush_cache", "/release_memory_occupation"]

"""Answers in segments: what a server is asked before, while and after its weights change."""

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from pathlib import Path

import numpy as np
import pytest

from mrl.engines import segments
from mrl.engines.engine import FinishedAnswer, GenerationRequest, Sampling
from mrl.engines.http import HttpFailure
from mrl.engines.segments import PATIENCE, Segments
from mrl.engines.server_backend import HalfUpdated, Segment
from mrl.errors import EngineError, EngineLost, PeerLost, WeightsError
from mrl.records.finish import FinishReason
from mrl.records.version import Version, VersionSpan

SAMPLING = Sampling(temperature=1.0, max_new_tokens=6, eos_ids=(9,))
OLD, NEW = Version(0, 1), Version(0, 2)
WITHIN_S = 120.0


class Counting:
    """A server in this event loop: the next token is one more than the last, and it gives up whatever it has begun.

    Every call samples one token at each `step`; one that is still `under_way` is not known to the server yet.
    """

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.running: list[asyncio.Event] = []
        self.under_way: asyncio.Event | None = None
        self.steps = asyncio.Condition()
        self.num_aborts = self.num_resumes = 0
        self.while_loading: Coroutine[None, None, None] | None = None
        self.cut_to: int | None = None
        self.serving: Segments
        self.resumed_under: Version | None = None
        self.was_updating = False

    async def generate(
        self,
        http: None,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        seed: int,
        request_id: str,
    ) -> Segment:
        self.seeds.append(seed)
        given_up = asyncio.Event()
        if self.under_way is not None:
            await self.under_way.wait()
        self.running.append(given_up)
        tokens: list[int] = []
        while not given_up.is_set() and len(tokens) < max_new_tokens and len(tokens) != self.cut_to:
            async with self.steps:
                await self.steps.wait()
            if not given_up.is_set():
                tokens.append([*token_ids, *tokens][-1] + 1)
        self.running.remove(given_up)
        reason = FinishReason.ABORT if given_up.is_set() else FinishReason.LENGTH
        return Segment(tokens, [-1.0] * len(tokens), reason)

    async def step(self) -> None:
        async with self.steps:
            self.steps.notify_all()
        await asyncio.sleep(0)

    async def abort_all(self, http: None) -> None:
        self.num_aborts += 1
        for given_up in self.running:
            given_up.set()
        await self.step()
        if self.under_way is not None:  # it arrives just behind the word to give up
            self.under_way.set()

    async def load(self, http: None, folder: Path, label: str) -> None:
        assert not self.running, "answers run while weights are replaced"
        if self.while_loading is not None:
            await self.while_loading
        assert not self.running, "answers were begun while weights are replaced"

    async def resume(self, http: None) -> None:
        self.num_resumes += 1
        self.resumed_under = self.serving.version

    async def checksums(self, http: None) -> dict[str, str]:
        self.was_updating = self.serving.is_updating
        return {}


def request(*prompt: int) -> GenerationRequest:
    return GenerationRequest("r", np.array(prompt, dtype=np.int32), np.array([7, 8], dtype=np.uint64))


def serving(server: Counting) -> Segments:
    made = Segments(server, None, SAMPLING, drain_s=5.0)  # type: ignore[arg-type]
    made.label(OLD, "")
    server.serving = made
    return made


async def until_running(server: Counting, count: int) -> None:
    while len(server.running) < count:
        await asyncio.sleep(0)


async def to_its_end(server: Counting, answer: asyncio.Task[FinishedAnswer]) -> FinishedAnswer:
    while not answer.done():
        await server.step()
    return answer.result()


def play(script: Coroutine[None, None, None]) -> None:
    """Run it, within a time that is only reached when something is wrong."""
    asyncio.run(asyncio.wait_for(script, WITHIN_S))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end is told again to give up at once."""
    monkeypatch.setattr(segments, "ABORT_AGAIN_S", 0.001)


def test_a_server_that_takes_requests_again_has_the_name_of_its_new_weights():
    """Whoever is answered from now on, and asks which weights that were, is told of these."""
    server = Counting()

    async def script() -> None:
        answers = serving(server)
        await answers.load(Path("f"), NEW)

    play(script())

    assert server.resumed_under == NEW


def test_a_server_that_hashes_its_weights_may_be_deaf():
    """As while it loads them: it is not asked whether it lives, for the process that would say so hashes."""
    server = Counting()

    async def script() -> None:
        answers = serving(server)
        await answers.checksums()
        assert not answers.is_updating

    play(script())

    assert server.was_updating


def test_an_answer_that_the_server_cut_short_is_no_answer():
    """Servers end at their context, and call that a length as well."""
    server = Counting()
    server.cut_to = 2

    async def script() -> None:
        answer = asyncio.ensure_future(serving(server).answer(request(1, 2), 0))
        with pytest.raises(
            EngineError, match=r"context; got '2 tokens before the answer, 6 to sample'; cure: raise server.co"
        ):
            await to_its_end(server, answer)

    play(script())


def test_a_call_that_the_server_forgets_is_noticed():
    """Answers that were handed in later end again and again, and it does not; those of its own length it waits for."""

    async def script() -> None:
        server = Counting()
        answers = serving(server)
        server.under_way = asyncio.Event()
        forgotten = asyncio.create_task(answers.answer(request(0), 0))
        await asyncio.sleep(0)
        server.under_way = None
        for _ in range(PATIENCE * 2):
            await to_its_end(server, asyncio.create_task(answers.answer(request(0), 1)))
        with pytest.raises(EngineLost, match="no longer answers request r/0/0: it sent 54 tokens"):
            await to_its_end(server, asyncio.create_task(answers.answer(request(0), 1)))
        forgotten.cancel()

    play(script())


def test_nothing_runs_while_weights_are_replaced():
    """What ran is given up before; what is handed in meanwhile begins afterwards, under the new weights."""

    async def script() -> None:
        server = Counting()
        answers = serving(server)
        before = asyncio.create_task(answers.answer(request(0), 0))
        await until_running(server, 1)
        await server.step()
        meanwhile = []

        async def hand_in() -> None:
            meanwhile.append(asyncio.create_task(answers.answer(request(50), 1)))
            for _ in range(5):
                await asyncio.sleep(0)

        server.while_loading = hand_in()
        await answers.load(Path(), NEW)
        ended = await to_its_end(server, before), await to_its_end(server, meanwhile[0])

        assert [one.generation.token_ids.tolist() for one in ended] == [[1, 2, 3, 4, 5, 6], [51, 52, 53, 54, 55, 56]]
        assert ended[0].generation.versions == [VersionSpan(1, OLD), VersionSpan(5, NEW)]
        assert ended[1].generation.versions == [VersionSpan(6, NEW)]

    play(script())


def test_answers_go_on_until_all_of_a_broadcast_is_there():
    """Two tokens come while its members are waited for; one that comes apart meanwhile gives up nothing."""

    async def script() -> None:
        server = Counting()
        answers = serving(server)
        answer = asyncio.create_task(answers.answer(request(0), 0))
        await until_running(server, 1)

        async def arriving(http: None, incoming: None) -> None:
            for _ in range(2):
                await server.step()

        async def lost(http: None, incoming: None) -> None:
            raise PeerLost("gone")

        async def receive(http: None, incoming: None, label: str) -> None:
            assert not server.running

        server.receive, server.prepare_broadcast = receive, lost
        with pytest.raises(PeerLost):
            await answers.receive(None, NEW)
        assert (server.num_aborts, server.num_resumes) == (0, 0)
        server.prepare_broadcast = arriving
        await answers.receive(None, NEW)

        ended = await to_its_end(server, answer)
        assert ended.generation.versions == [VersionSpan(2, OLD), VersionSpan(4, NEW)]

    play(script())


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), 0.5])
def test_what_is_no_logprob_ends_the_server(logprob):
    """Trained on, it would spoil a whole step, and nobody would know whose it was."""

    class Broken(Counting):
        async def generate(self, *asked, **options) -> Segment:
            return Segment([5, 6], [-1.0, logprob], FinishReason.LENGTH)

    with pytest.raises(EngineLost, match="invalid log-probability"):
        play(serving(Broken()).answer(request(0), 0))


def test_a_call_that_arrives_behind_the_word_to_give_up_is_given_up_as_well():
    """It was on its way to the server when everything was aborted; the update waits for no answer's end."""

    async def script() -> None:
        server = Counting()
        answers = serving(server)
        server.under_way = asyncio.Event()
        late = asyncio.create_task(answers.answer(request(0), 0))
        await asyncio.sleep(0)

        await answers.load(Path(), NEW)
        ended = await to_its_end(server, late)

        assert server.num_aborts > 1
        assert ended.generation.versions == [VersionSpan(6, NEW)]

    play(script())


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (WeightsError("do not fit"), True),
        (EngineError("no such route"), True),
        (PeerLost("nobody came"), True),
        (HalfUpdated("some came"), True),
        (HttpFailure("/load", 0, "no answer"), False),
    ],
)
def test_a_server_that_refuses_is_told_to_go_on_and_one_that_failed_is_not_asked_again(error, goes_on):
    """It would only be awaited once more."""

    async def script() -> None:
        server = Counting()
        answers = serving(server)

        async def fail() -> None:
            raise error

        server.while_loading = fail()
        with pytest.raises(type(error)):
            await answers.load(Path(), NEW)

        assert server.num_resumes == int(goes_on)
        assert not answers.is_updating
        later = asyncio.create_task(answers.answer(request(0), 0))
        for _ in range(5):
            await asyncio.sleep(0)
        is_open = goes_on and not isinstance(error, HalfUpdated)
        assert bool(server.running) == is_open
        if is_open:
            assert (await to_its_end(server, later)).generation.versions == [VersionSpan(6, OLD)]
        later.cancel()

    play(script())


def test_a_load_that_is_given_up_ends_at_once():
    """Nothing more is asked of a server that did not answer in time."""

    async def script() -> None:
        server = Counting()
        answers = serving(server)
        server.while_loading = asyncio.sleep(3600.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answers.load(Path(), NEW), 0.01)

        assert server.num_resumes == 0

    play(script())


def seeds_of_an_answer_over_three_updates() -> list[int]:
    server = Counting()

    async def script() -> None:
        answers = serving(server)
        answer = asyncio.create_task(answers.answer(request(0), 0))
        for step in range(2, 5):
            await until_running(server, 1)
            await server.step()
            await answers.load(Path(), Version(0, step))
        assert len((await to_its_end(server, answer)).generation.versions) == 4

    play(script())
    return server.seeds


def test_every_segment_of_an_answer_draws_numbers_of_its_own():
    """The same seed again would draw the same numbers again. Seeds are repeatable, and a server takes 31 bits."""
    seeds = seeds_of_an_answer_over_three_updates()

    assert len(set(seeds)) == len(seeds) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == seeds_of_an_answer_over_three_updates()


def test_answers_of_one_request_draw_numbers_of_their_own():
    """Each begins with its own seed."""
    server = Counting()

    async def script() -> None:
        answers = serving(server)
        both = [asyncio.create_task(answers.answer(request(0), index)) for index in range(2)]
        await until_running(server, 2)
        await asyncio.gather(*(to_its_end(server, one) for one in both))

    play(script())

    assert len(set(server.seeds)) == 2


def test_what_a_stream_was_told_is_not_copied_for_every_token():
    """Else an answer of 16,000 tokens would be copied as often; what was told stays as it was."""
    answer = segments._Answer(Sampling(temperature=1.0, max_new_tokens=2000, eos_ids=(9,)))
    told = []
    for token_id in range(10, 1010):
        answer.add(Segment([token_id], [-token_id / 100], FinishReason.ABORT), OLD)
        told.append(answer.generation())

    copied = [not np.shares_memory(one.token_ids, more.token_ids) for one, more in itertools.pairwise(told)]
    assert sum(copied) < 100
    assert all(one.token_ids.tolist() == [*range(10, 11 + place)] for place, one in enumerate(told))
    assert told[-1].logprobs.tolist() == np.array([-n / 100 for n in range(10, 1010)], np.float32).tolist()

"""One episode between its seat and its agent: turns go to and fro, and every end is told to both."""

import asyncio
import time
import tracemalloc

import pytest
from structlog.testing import capture_logs

from mrl.gateway import session_registry
from mrl.gateway.chat_wire import ChatCall, ChatRefusal
from mrl.gateway.session import OVER, AgentSession
from mrl.gateway.session_registry import SessionRegistry
from mrl.records.direct_requests import TurnChunk
from mrl.records.episodes import Message, ToolSpec
from mrl.tasks.environments.contract import CUT, DONE, GIVEN_UP, MAX_TURNS, RAISED, WRONG_TYPE, PolicyTurn

ASKED, SAID, TOLD = Message("user", "guess"), Message("assistant", "7"), Message("user", "higher")


def call(*messages):
    """A request with these messages."""
    return ChatCall(messages, (), False, False, {})


def test_a_turn_that_was_told_without_log_probabilities_has_none_later():
    """Asked for with them it is the same turn without; who asked with them gets it again either way."""

    async def script():
        session = AgentSession("s", "qwen", "guess", {"seed": 1})
        opened = session.opened()
        asking = asyncio.ensure_future(session.ask(call(ASKED)))
        assert not (await opened).wants_tokens
        step = session.step(PolicyTurn("7"))
        await asking
        with pytest.raises(ChatRefusal, match="logprobs: the turn was first requested without them"):
            await session.ask(ChatCall((ASKED,), (), False, True, {}))
        with_them = ChatCall((ASKED, SAID, TOLD), (), False, True, {})
        asking = asyncio.ensure_future(session.ask(with_them))
        assert (await step).wants_tokens
        session.step(PolicyTurn("9"))
        return await asking == await session.ask(with_them) == await session.ask(call(ASKED, SAID, TOLD))

    assert asyncio.run(script())


class Clock:
    """Stands where it is put."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def played(script):
    """What an async function of (session, clock) returns."""
    clock = Clock()
    return asyncio.run(script(AgentSession("s", "qwen", "guess", {}, clock), clock))


async def until_asked(session, *messages):
    """The agent's request on its way, and what the seat heard of it."""
    opened = session.opened() if not session.num_turns else None
    asking = asyncio.ensure_future(session.ask(call(*messages)))
    await asyncio.sleep(0)
    return opened, asking


async def behind_a_turn(session):
    """What the seat hears next, once the agent has asked and has been answered."""
    _, asking = await until_asked(session, ASKED)
    step = session.step(PolicyTurn("7"))
    await asking
    return step


def test_an_episode_of_two_turns():
    """The seat hears what is new alone, the agent the turns, and in the end the seat the reward."""

    async def script(session, clock):
        opened, asking = await until_asked(session, ASKED)
        assert (await opened).messages == (ASKED,)
        step = session.step(PolicyTurn("7"))
        assert (await asking)[2] == SAID
        asking = asyncio.ensure_future(session.ask(call(ASKED, SAID, TOLD)))
        assert (await step).messages == (TOLD,)
        step = session.step(PolicyTurn("9"))
        assert (await asking)[1].text == "9"
        session.reward(0.5)
        return await step

    last = played(script)
    assert (last.done, last.reward, last.reason) == (True, 0.5, DONE)


def test_a_turn_is_told_as_it_grows():
    """To whoever asked last, from its beginning; what comes late, twice or behind a gap is left to the whole turn."""

    async def script(session, clock):
        heard, again = [], []
        opened = session.opened()
        streaming = ChatCall((ASKED,), (), True, False, {})
        asking = asyncio.ensure_future(session.ask(streaming, lambda *told: heard.append(told)))
        assert (await opened).stream == "s"
        for start, text in ((0, "se"), (0, "se"), (3, "n"), (2, "v")):
            session.grew(TurnChunk(session="s", num_turns=0, start=start, text=text))
        repeated = asyncio.ensure_future(session.ask(streaming, lambda *told: again.append(told)))
        await asyncio.sleep(0)
        session.grew(TurnChunk(session="s", num_turns=0, start=3, text="en"))
        session.grew(TurnChunk(session="s", num_turns=1, start=5, text="!"))
        step = session.step(PolicyTurn("seven"))
        assert (await asking)[:2] == (await repeated)[:2] == (1, PolicyTurn("seven"))
        session.grew(TurnChunk(session="s", num_turns=1, start=0, text="late"))
        further = call(ASKED, Message("assistant", "seven"), TOLD)
        asking = asyncio.ensure_future(session.ask(further, lambda *told: heard.append(told)))
        assert (await step).stream == ""
        session.grew(TurnChunk(session="s", num_turns=1, start=0, text="8"))
        session.leave()
        await asyncio.gather(asking, return_exceptions=True)
        return heard, again

    assert played(script) == ([(1, "se"), (1, "v"), (2, "8")], [(1, "sev"), (1, "en")])


def test_a_request_that_is_repeated_gets_the_same_turn():
    """Clients ask again when a connection breaks, during a turn or behind it; nothing is sampled twice."""

    async def script(session, clock):
        opened, asking = await until_asked(session, ASKED)
        again = asyncio.ensure_future(session.ask(call(ASKED)))
        asking.cancel()
        await opened
        step = session.step(PolicyTurn("7"))
        first, behind = await again, await session.ask(call(ASKED))
        assert not step.done()
        return first, behind

    first, behind = played(script)
    assert first[:2] == behind[:2] == (1, PolicyTurn("7"))


def test_a_turn_that_nobody_read_is_kept_for_whoever_asks_for_it_again():
    """Its client hung up, and other requests had their turns since; what was read is not kept, and sampled anew."""

    async def script(session, clock):
        opened, broken = await until_asked(session, ASKED)
        other = asyncio.ensure_future(session.ask(call(SYSTEM, TOLD)))
        await opened
        broken.cancel()
        await asyncio.sleep(0)
        session.step(PolicyTurn("7"))
        while session.num_turns == 1 and session._answer is None:
            await asyncio.sleep(0)
        step = session.step(PolicyTurn("8"))
        found = [await other, await session.ask(call(ASKED))]
        assert not step.done()
        anew = asyncio.ensure_future(session.ask(call(ASKED)))
        assert (await step).begins_row
        session.step(PolicyTurn("9"))
        return [(number, turn.text) for number, turn, _ in [*found, await anew]]

    assert played(script) == [(2, "8"), (1, "7"), (3, "9")]


def test_a_turn_that_another_client_read_is_no_longer_kept():
    """Whoever asks the same later, on purpose, has a turn of its own."""

    async def script(session, clock):
        opened, broken = await until_asked(session, ASKED)
        again = asyncio.ensure_future(session.ask(call(ASKED)))
        await opened
        await asyncio.sleep(0)
        broken.cancel()
        await asyncio.sleep(0)
        step = session.step(PolicyTurn("7"))
        found = [await again]
        other = asyncio.ensure_future(session.ask(call(SYSTEM, TOLD)))
        await step
        step = session.step(PolicyTurn("8"))
        found.append(await other)
        anew = asyncio.ensure_future(session.ask(call(ASKED)))
        await step
        session.step(PolicyTurn("9"))
        return [(number, turn.text) for number, turn, _ in [*found, await anew]]

    assert played(script) == [(1, "7"), (2, "8"), (3, "9")]


SYSTEM, ADD = Message("system", "be brief"), ToolSpec("add", "", '{"type":"object"}')


def offering(*messages):
    """A request with a tool, too."""
    return ChatCall(messages, (ADD,), False, False, {})


@pytest.mark.parametrize(
    "asked",
    [
        call(Message("user", "other"), SAID, TOLD),
        call(ASKED, Message("assistant", "8"), TOLD),
        call(ASKED, SAID, Message("assistant", "I"), TOLD),
        call(SYSTEM, TOLD),
        call(Message("user", "other")),
        call(*[Message("user", "x" * 4096)] * 300),
        offering(ASKED, SAID, TOLD),
        offering(SYSTEM, TOLD),
    ],
)
def test_a_conversation_that_is_rewritten_is_a_branch(asked):
    """The seat hears all of it, be it longer than a turn, with its tools, and the next request goes on from there."""

    async def script(session, clock):
        step = await behind_a_turn(session)
        asking = asyncio.ensure_future(session.ask(asked))
        again = asyncio.ensure_future(session.ask(asked))
        branch = await step
        step = session.step(PolicyTurn("9"))
        assert (await asking)[1].text == (await again)[1].text == "9"
        further = ChatCall((*asked.messages, Message("assistant", "9"), TOLD), asked.tools, False, False, {})
        asking = asyncio.ensure_future(session.ask(further))
        return branch, await step, asking.cancel(), session.counts

    branch, behind, _, counts = played(script)
    assert (branch.messages, branch.tools, branch.begins_row) == (asked.messages, asked.tools, True)
    assert (behind.messages, behind.tools, behind.begins_row) == ((TOLD,), (), False)
    assert counts["branches"] == 1


def test_a_branch_streams_as_any_turn_does():
    """From the row that it begins."""
    heard = []

    async def script(session, clock):
        step = await behind_a_turn(session)
        streamed = ChatCall((SYSTEM, TOLD), (), True, False, {})
        asking = asyncio.ensure_future(session.ask(streamed, lambda *told: heard.append(told)))
        branch = await step
        session.grew(TurnChunk(session="s", num_turns=1, start=0, text="ni"))
        session.step(PolicyTurn("nine"))
        await asking
        return branch

    branch = played(script)
    assert (branch.begins_row, branch.stream, heard) == (True, "s", [(2, "ni")])


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        (call(ASKED, Message("assistant", "8"), TOLD), "messages[1]"),
        (call(ASKED, SAID, Message("assistant", "I"), TOLD), "messages[2]"),
        (offering(ASKED, SAID, TOLD), "tools"),
        (offering(SYSTEM, TOLD), "messages[0]"),
    ],
)
def test_the_first_branch_of_a_run_is_told(asked, at):
    """With where it leaves what was said; a second is only counted."""

    async def script(session, clock):
        step = await behind_a_turn(session)
        for messages in (asked, call(SYSTEM, TOLD)):
            asking = asyncio.ensure_future(session.ask(messages))
            await step
            step = session.step(PolicyTurn("7"))
            await asking
        return session.counts["branches"]

    with capture_logs() as logs:
        assert played(script) == 2
    assert [(one["task"], one["at"]) for one in logs] == [("guess", at)]


def test_whoever_goes_back_begins_a_branch():
    """Also to where the conversation began, of which all is known."""

    async def script(session, clock):
        step = await behind_a_turn(session)
        asking = asyncio.ensure_future(session.ask(call(ASKED, SAID, TOLD)))
        await step
        step = session.step(PolicyTurn("9"))
        await asking
        asking = asyncio.ensure_future(session.ask(call(ASKED)))
        return await step, asking.cancel()

    branch, _ = played(script)
    assert (branch.messages, branch.begins_row) == ((ASKED,), True)


def test_a_conversation_that_goes_on_is_no_branch():
    """White space at the ends of the policy's words is no other conversation."""

    async def script(session, clock):
        step = await behind_a_turn(session)
        asking = asyncio.ensure_future(session.ask(call(ASKED, Message("assistant", " 7\n"), TOLD)))
        return await step, asking.cancel(), session.counts

    told, _, counts = played(script)
    assert (told.messages, told.begins_row, counts["branches"]) == ((TOLD,), False, 0)


@pytest.mark.parametrize(
    ("messages", "words", "code"),
    [
        ((ASKED, SAID), "must be one to answer", "invalid_request"),
        ((Message("user", "other"), SAID), "must be one to answer", "invalid_request"),
        ((), "must be one to answer", "invalid_request"),
        (
            (Message("user", "x" * (1 << 20)),) * 3,
            "messages of 3,145,728 bytes; at most 2,097,152",
            "too_long",
        ),
        ((ASKED,) * 4097, "4,097 messages and 0 tools; at most 4,096 messages", "too_long"),
        ((ASKED, SAID, *[TOLD] * 257), "257 messages and 0 tools; at most 256 messages", "too_long"),
    ],
)
def test_what_cannot_be_answered_is_told_and_the_episode_goes_on_as_it_was(messages, words, code):
    """What is no question, and what is too long for a row, or for one turn of it."""

    async def script(session, clock):
        step = await behind_a_turn(session)
        with pytest.raises(ChatRefusal, match=words) as found:
            await session.ask(call(*messages))
        asking = asyncio.ensure_future(session.ask(call(ASKED, SAID, TOLD)))
        return found.value.code, (await step).messages, asking.cancel(), session.counts

    told, heard, _, counts = played(script)
    assert (told, heard, counts["branches"]) == (code, (TOLD,), 0)


def test_a_first_request_holds_nothing_of_the_policys():
    """It has said nothing yet."""

    async def script(session, clock):
        opened = session.opened()
        with pytest.raises(ChatRefusal, match="before the policy's first turn"):
            await session.ask(call(ASKED, SAID, TOLD))
        asking = asyncio.ensure_future(session.ask(offering(ASKED)))
        return await opened, asking.cancel()

    opened, _ = played(script)
    assert (opened.messages, opened.tools, opened.begins_row) == ((ASKED,), (ADD,), False)


def test_requests_at_the_same_time_get_their_turns_one_after_another():
    """Each is a branch, unless it goes on from what was said by then; a reward waits for nobody."""

    async def script(session, clock):
        opened, first = await until_asked(session, ASKED)
        others = [asyncio.ensure_future(session.ask(call(Message("user", word)))) for word in ("b", "c")]
        await asyncio.sleep(0)
        with pytest.raises(ChatRefusal, match="still answering"):
            session.reward(1.0)
        told = [await opened, *[await session.step(PolicyTurn(said)) for said in ("1", "2")]]
        last = session.step(PolicyTurn("3"))
        turns = [(number, turn.text) for number, turn, _ in await asyncio.gather(first, *others)]
        session.reward(1.0)
        return told, turns, await last

    told, turns, last = played(script)
    assert (turns, last.reward) == ([(1, "1"), (2, "2"), (3, "3")], 1.0)
    assert [(turn.messages[0].content, turn.begins_row) for turn in told] == [
        ("guess", False),
        ("b", True),
        ("c", True),
    ]


@pytest.mark.parametrize(
    "end", [lambda one: one.fail("it broke"), lambda one: one.finish(MAX_TURNS, PolicyTurn("7")), AgentSession.leave]
)
def test_whoever_waits_for_a_turn_hears_that_there_is_none(end):
    """Its agent gave up, the policy has had all its turns, or the engine was lost."""

    async def script(session, clock):
        await until_asked(session, ASKED)
        waiting = asyncio.ensure_future(session.ask(call(TOLD)))
        await asyncio.sleep(0)
        end(session)
        with pytest.raises(ChatRefusal) as found:
            await waiting
        return found.value.code

    assert played(script) == OVER


def test_a_crowd_that_waits_for_turns_is_told_to_come_later(monkeypatch):
    """What waits is bounded."""
    monkeypatch.setattr("mrl.gateway.session.MAX_WAITING", 1)

    async def script(session, clock):
        await until_asked(session, ASKED)
        waiting = asyncio.ensure_future(session.ask(call(TOLD)))
        await asyncio.sleep(0)
        with pytest.raises(ChatRefusal, match="1 requests of the session are already waiting") as found:
            await session.ask(call(SAID, TOLD))
        waiting.cancel()
        return found.value.status

    assert played(script) == 429


def test_a_cut_turn_reaches_the_agent():
    """It sees what there is of it, gives the reward, and gets no further turn."""

    async def script(session, clock):
        _, asking = await until_asked(session, ASKED)
        finish = session.finish(CUT, PolicyTurn("7 is", is_cut=True))
        _, turn, said = await asking
        with pytest.raises(ChatRefusal, match="cut") as found:
            await session.ask(call(ASKED, said, TOLD))
        session.reward(0.25)
        return turn.text, found.value.code, await finish

    text, code, last = played(script)
    assert (text, code, last.reward, last.reason) == ("7 is", OVER, 0.25, CUT)


def test_an_agent_that_wants_more_turns_than_there_are():
    """It is told so; where it gives up then, the episode is worth nothing, and no failure."""

    async def script(session, clock):
        step = await behind_a_turn(session)
        asking = asyncio.ensure_future(session.ask(call(ASKED, SAID, TOLD)))
        await step
        finish = session.finish(MAX_TURNS)
        with pytest.raises(ChatRefusal, match="no further turns") as found:
            await asking
        session.fail("BadRequestError")
        return found.value.code, await finish

    code, last = played(script)
    assert (code, last.reward, last.reason, last.has_failed) == (OVER, 0.0, MAX_TURNS, False)


@pytest.mark.parametrize(
    ("end", "reason"),
    [(lambda one: one.fail("KeyError: 'x'"), RAISED), (lambda one: one.expire(5.0), GIVEN_UP)],
)
def test_an_agent_that_fails_or_falls_silent_ends_its_episode(end, reason):
    """The seat hears why."""

    async def script(session, clock):
        step = await behind_a_turn(session)
        assert not session.expire(5.0)
        clock.now_s = 6.0
        end(session)
        with pytest.raises(ChatRefusal) as found:
            session.reward(1.0)
        assert found.value.code == OVER
        return await step

    last = played(script)
    assert (last.reason, last.has_failed) == (reason, reason == RAISED)


def test_an_agent_that_gives_no_reward_after_the_last_turn_has_given_up_too():
    """However many turns there were: what it would have said is not known."""

    async def script(session, clock):
        _, asking = await until_asked(session, ASKED)
        finish = session.finish(MAX_TURNS, PolicyTurn("7"))
        await asking
        clock.now_s = 6.0
        return session.expire(5.0), (await finish).reason, session.ending

    assert played(script) == (True, GIVEN_UP, GIVEN_UP)


def test_a_policy_that_takes_its_time_is_not_waited_for_by_the_agents_clock():
    """Only the agent's own silence counts."""

    async def script(session, clock):
        await until_asked(session, ASKED)
        clock.now_s = 1000.0
        return session.expire(5.0)

    assert played(script) is False


def test_a_reward_before_any_question_is_a_failure():
    """There is nothing to train on."""

    async def script(session, clock):
        opened = session.opened()
        with pytest.raises(ChatRefusal, match="before the first request"):
            session.reward(1.0)
        return await opened

    assert played(script).reason == WRONG_TYPE


def test_a_reward_that_is_none_can_be_given_again():
    """NaN is refused, and the episode waits on."""

    async def script(session, clock):
        step = await behind_a_turn(session)
        with pytest.raises(ChatRefusal, match="finite"):
            session.reward(float("nan"))
        session.reward(1.0)
        return await step

    assert played(script).reward == 1.0


def test_a_book_gives_up_and_counts_what_agents_have_left_lying():
    """Their agents are told that the session is over, and the others play on."""

    async def script():
        clock = Clock()
        registry = SessionRegistry(idle_s=5.0, clock=clock)
        replies = {}
        for _ in range(3):
            offered = registry.offer("qwen", "guess", {"seed": 1})
            replies[offered] = offered.opened()
        silent, playing = (await registry.take(wait_s=0.0))[0], (await registry.take(wait_s=0.0))[0]
        clock.now_s = 6.0
        playing.touched_s = 4.0
        assert registry.expire() == [silent]
        assert (await replies[silent]).reason == GIVEN_UP
        registry.leave(silent)
        with pytest.raises(ChatRefusal, match="the session is over"):
            registry.session(silent.session_id)
        assert (len(registry), registry.num_offered, registry.expire()) == (1, 1, [])
        return dict(registry.counts)

    assert asyncio.run(script()) == {"offered": 3, "expired": 1, f"ends/{GIVEN_UP}": 1}


def test_what_a_process_played_is_given_up_when_that_ends():
    """At once, or behind the turn that its policy has; what has failed before stays failed. Others play on."""

    async def script():
        registry = SessionRegistry(idle_s=5.0, clock=Clock())
        replies = {}
        for _ in range(4):
            offered = registry.offer("qwen", "guess", {"seed": 1})
            replies[offered] = offered.opened()
        silent, asking, failed = [(await registry.take(player="lost"))[0] for _ in range(3)]
        (playing,) = await registry.take(player="another")
        asked = [asyncio.ensure_future(session.ask(call(ASKED))) for session in (asking, failed)]
        await asyncio.sleep(0)
        failed.fail("KeyError: 'x'")
        assert registry.lose("lost") == 2
        assert (await replies[silent]).words == "the agent process exited"
        for one in asked:
            with pytest.raises(ChatRefusal):
                await one
        ends = [(await session.step(PolicyTurn("7"))).reason for session in (asking, failed)]
        assert (ends, asking.ending, playing.is_over) == ([GIVEN_UP, RAISED], GIVEN_UP, False)
        late = registry.offer("qwen", "guess", {"seed": 1})
        assert await registry.take(player="lost", wait_s=0.0) == []
        assert (registry.lose("lost"), await registry.take(player="another")) == (0, [late])
        return dict(registry.counts)

    assert asyncio.run(script()) == {"offered": 5, "expired": 2}


async def of_two_policies(registry):
    """The sessions of one agent."""
    for policy in ("qwen", "llama"):
        registry.offer(policy, "guess", {"seed": 1})
    return await registry.take(["qwen", "llama"])


def test_an_agent_of_several_policies_is_heard_in_any_of_its_episodes():
    """While one policy has its turn, and for as long as an agent may be silent behind it, none of them is given up."""

    async def script():
        clock = Clock()
        registry = SessionRegistry(idle_s=5.0, clock=clock)
        qwen, llama = await of_two_policies(registry)
        replies = [session.opened() for session in (qwen, llama)]
        asking = asyncio.ensure_future(llama.ask(call(ASKED)))
        await asyncio.sleep(0)
        clock.now_s = 40.0
        assert registry.expire() == []
        replies.append(llama.step(PolicyTurn("7")))
        await asking
        clock.now_s = 44.0
        assert registry.expire() == []
        clock.now_s = 46.0
        assert registry.expire() == [qwen, llama]
        return [(await reply).reason for reply in (replies[0], replies[2])]

    assert asyncio.run(script()) == [GIVEN_UP, GIVEN_UP]


def test_a_turn_of_another_policy_is_not_waited_for_for_good():
    """Agents may wait for each other: each policy samples when all its agents have asked."""

    async def script():
        clock = Clock()
        registry = SessionRegistry(idle_s=5.0, clock=clock)
        qwen, llama = await of_two_policies(registry)
        qwen.opened(), llama.opened()
        asking = asyncio.ensure_future(llama.ask(call(ASKED)))
        await asyncio.sleep(0)
        clock.now_s = 50.0
        assert registry.expire() == []
        clock.now_s = 51.0
        assert registry.expire() == [qwen]
        asking.cancel()

    asyncio.run(script())


def test_ten_thousand_sessions_that_nobody_plays_on_cost_little_and_end_together():
    """Within seconds and a bound of memory; their ends are remembered for the newest alone, and the book serves on."""

    async def script():
        clock = Clock()
        registry = SessionRegistry(idle_s=5.0, clock=clock)
        tracemalloc.start()
        began_s = time.process_time()
        replies, sessions = [], []
        for number in range(10_000):
            replies.append(registry.offer("qwen", "guess", {"seed": number}).opened())
            sessions += await registry.take(wait_s=0.0)
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (len(registry), registry.num_offered) == (10_000, 0)
        clock.now_s = 6.0
        assert registry.expire() == sessions
        assert {reply.result().reason for reply in replies} == {GIVEN_UP}
        for session in sessions:
            registry.leave(session)
        assert (len(registry), registry.counts["expired"], registry.counts[f"ends/{GIVEN_UP}"]) == (0, 10_000, 10_000)
        assert time.process_time() - began_s < 30
        assert num_bytes < 10_000 * 8192
        codes = []
        for session in (sessions[0], sessions[-1]):
            with pytest.raises(ChatRefusal) as found:
                registry.session(session.session_id)
            codes.append(found.value.code)
        offered = registry.offer("qwen", "guess", {"seed": 1})
        assert await registry.take(wait_s=0.0) == [offered]
        return codes

    assert asyncio.run(script()) == ["no_session", "episode_over"]


def test_an_agent_too_many_is_told_to_come_later_and_those_that_wait_are_served(monkeypatch):
    """In one line; the first of them has the next episode."""
    monkeypatch.setattr(session_registry, "MAX_WAITING_AGENTS", 3)

    async def script():
        registry = SessionRegistry(idle_s=5.0)
        waiting = [asyncio.ensure_future(registry.take()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ChatRefusal, match="too many agents are waiting for episodes; try again later") as found:
            await registry.take()
        assert (found.value.status, found.value.code, registry.num_waiting) == (429, "too_many", 3)
        offered = [registry.offer("qwen", "guess", {"seed": number}) for number in range(3)]
        return sorted(map(id, offered)) == sorted(id(one) for (one,) in await asyncio.gather(*waiting))

    assert asyncio.run(script())

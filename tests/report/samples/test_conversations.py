"""Episodes are shown as conversations, on a terminal and on pages: roles, masks, calls, and who was imitated."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from mrl.metrics.jsonl import SampleWriter
from mrl.metrics.rollout_files import Rollout, RolloutFiles
from mrl.records.episodes import EpisodeSegment, Message, ToolCall
from mrl.records.experience import SharedTurn
from mrl.records.readable_turns import readable_turns
from mrl.records.telemetry_messages import SampleRecord
from mrl.report.page import write_report
from mrl.report.samples.answer_filter import AnswerFilter
from mrl.report.samples.sample_lines import sample_lines
from mrl.report.samples.sample_page import sample_page
from tests.report.conftest import TASKS, write_synthetic_run

CALL = ToolCall.of("lookup", {"key": "<b>"})
SEGMENTS = [
    EpisodeSegment(num_tokens=9, is_sampled=True, messages=(Message("assistant", "let me see", tool_calls=(CALL,)),)),
    EpisodeSegment(num_tokens=4, is_sampled=False, messages=(Message("tool", "<script>42", name="lookup"),)),
    EpisodeSegment(num_tokens=7, is_sampled=True, messages=(Message("assistant", "it is \x1b[2J 42"),)),
    EpisodeSegment(num_tokens=0, is_sampled=False, messages=(Message("user", "thanks"),)),
]
SHARED = [SharedTurn(is_sampled=one.is_sampled, messages=one.messages) for one in SEGMENTS[:3]]
KNOWN: dict[str, Any] = {
    "policy": "qwen", "step": 3, "task": TASKS[0], "prompt": "lookup seed 7", "completion": "assistant: let me see",
    "reward": 1.0, "opening": "<|im_start|>user\nLook up this word: ab<|im_end|>",
}  # fmt: skip


@pytest.fixture
def row(tmp_path) -> Callable[..., dict[str, Any]]:
    """A row as it is read from the file of a step."""
    from mrl.metrics.rollout_files import path_of, read_rollouts

    def make(turns: Any, **values: Any) -> dict[str, Any]:
        kept = {"kind": "rollout", "source": "qwen", "finish_reason": "done", "tokens": 16, "prompt_id": "p"}
        rollout = Rollout(**KNOWN, turns=readable_turns(turns, 10_000), **kept | values)
        RolloutFiles(tmp_path, "qwen", 10**6).write(3, [rollout])
        [found] = read_rollouts(path_of(tmp_path, "qwen", 3))
        return found

    return make


@pytest.fixture
def rescue(row) -> dict[str, Any]:
    """An episode of llama that qwen has imitated."""
    return row(SHARED, kind="rescue", source="llama", finish_reason="", tokens=None)


def test_a_terminal_shows_roles_and_stars_what_is_trained_on(row):
    """Calls as calls, answers of tools with their tool; what stands behind the row says so."""
    assert list(sample_lines(row(SEGMENTS), 100)) == [
        f"qwen step 3 · {TASKS[0]} · reward 1.0 · 16 tokens, done",
        "  prompt    lookup seed 7",
        "  opening   <|im_start|>user",
        "            Look up this word: ab<|im_end|>",
        "* assistant let me see",
        '*           -> lookup({"key":"<b>"})',
        "  tool      [lookup] <script>42",
        "* assistant it is \\x1b[2J 42",
        "  user      thanks (after the last turn, not in the row)",
        "  * sampled, trained on: 16 tokens; 4 given between them",
        "",
    ]


def test_a_terminal_says_who_gave_a_rescue(rescue):
    """Its turns were imitated, and their tokens are nobody's here."""
    lines = list(sample_lines(rescue, 100))
    assert lines[0].startswith("qwen step 3 · rescued by llama")
    assert lines[-2] == "  * said by llama, imitated"
    assert [line[:2] for line in lines if "assistant" in line] == ["* ", "* "]


def told(page: str) -> list[tuple[str, str, str]]:
    """(class, who and what, text) of every message on a page."""
    found = re.findall(r'<li class="([^"]*)"><div class="who">(.*?)</div>(.*?)</li>', page, re.DOTALL)
    return [(kind, *(unescape(re.sub("<.*?>", "", part)) for part in parts)) for kind, *parts in found]


def test_a_page_shows_who_said_what_and_what_became_of_its_tokens(row, rescue):
    """Sampled turns have the colour of who said them, and nothing that was said is markup."""
    rows = [row(SEGMENTS), rescue]
    page = sample_page("r", rows, ["qwen", "llama"], success_reward=1.0)
    own, theirs = (told(part) for part in page.split("<article")[1:])

    assert own == [
        ("given", "opening · as the policy saw it", KNOWN["opening"]),
        ("sampled", "assistant · sampled, 9 tokens, trained on", 'let me seelookup({"key":"<b>"})'),
        ("given", "tool lookup · given, 4 tokens, not trained on", "<script>42"),
        ("sampled", "assistant · sampled, 7 tokens, trained on", "it is \\x1b[2J 42"),
        ("given behind", "user · after the last turn, not in the row", "thanks"),
    ]
    assert [(kind, what) for kind, what, _ in theirs[1:]] == [
        ("sampled", "assistant · said by llama, imitated"),
        ("given", "tool lookup · given, not trained on"),
        ("sampled", "assistant · said by llama, imitated"),
    ]
    assert page.count("<script>") == 1
    assert 'data-kind="rescue" data-policy="qwen" class="c1"' in page


@pytest.mark.parametrize(
    "turns",
    [
        "talk", [3], [{}], [{"messages": "x"}], [{"messages": [None, {}], "tokens": "<b>", "is_sampled": "yes"}],
        [{"messages": [{"role": "<b>", "content": 5, "name": ["<b>"], "tool_calls": [{}, "<b>"]}], "tokens": -1}],
    ],
)  # fmt: skip
def test_rows_that_nobody_wrote_are_shown_as_far_as_they_go(row, turns):
    """Files may come from anywhere; what is not told to be sampled is not."""
    damaged = row(SEGMENTS) | {"turns": turns}
    assert "*" not in "".join(line[:2] for line in sample_lines(damaged, 80))
    page = sample_page("r", [damaged], ["qwen"], success_reward=1.0)
    assert "<b>&lt;b" not in page.replace("<b>tool", "")
    assert 'class="sampled"' not in page


def test_what_an_episode_began_with_is_searched(row):
    """Beside prompt and answer."""
    assert AnswerFilter(words="WORD: AB").covers(row(SEGMENTS), 1.0)


def test_the_report_shows_conversations_among_its_answers(tmp_path):
    """In the colour of who said them."""
    run = write_synthetic_run(tmp_path / "run", steps=2)
    for kind, source, turns in (("rollout", "", SEGMENTS), ("rescue", "llama", SHARED)):
        sample = SampleRecord(**KNOWN | {"kind": kind, "source": source, "turns": readable_turns(turns, 10_000)})
        SampleWriter(run / "rollouts").write(sample)

    page = write_report(run).read_text()

    whats = [what for _, what, _ in told(page)]
    assert "assistant · sampled, 9 tokens, trained on" in whats
    assert "assistant · said by llama, imitated" in whats
    assert "tool lookup · given, 4 tokens, not trained on" in whats
    assert "<script" not in page
    assert re.search(r'<td class="c\d"><ol class="talk">', page)


def test_long_episodes_are_cut_where_their_text_runs_out():
    """The message is marked; a call that would be cut is left out whole, and no further turn is kept."""
    kept = readable_turns(SEGMENTS, 14)
    assert [[(one.content, one.tool_calls) for one in turn.messages] for turn in kept] == [[("let me see [...]", ())]]
    whole = readable_turns(SEGMENTS, 10_000)
    assert [(turn.is_sampled, turn.tokens) for turn in whole] == [(True, 9), (False, 4), (True, 7), (False, 0)]


def test_a_rewritten_conversation_leaves_room_for_what_follows_it():
    """It says again what stands before; each of its messages is there, with its beginning."""
    messages = tuple(Message("user", f"{number}" * 1000) for number in range(4))
    rewritten = EpisodeSegment(num_tokens=40, is_sampled=False, messages=messages, begins_row=True, is_rewritten=True)
    first, told_again, last = readable_turns([SEGMENTS[0], rewritten, SEGMENTS[2]], 900)
    assert (first.messages, last.messages) == (SEGMENTS[0].messages, SEGMENTS[2].messages)
    room = (900 - 32) // 16
    assert [one.content for one in told_again.messages] == [f"{number}" * room + " [...]" for number in range(4)]
    assert readable_turns([rewritten], 100_000)[0].messages == messages


def test_the_page_of_samples_shows_what_a_terminal_shows(row):
    """Line by line."""
    example = (Path(__file__).parents[3] / "docs/samples.md").read_text().split("```\n")[2].partition("```")[0]
    call, tool = ToolCall.of("lookup", {"key": "ab"}), Message("tool", "42", name="lookup")
    turns = [
        EpisodeSegment(num_tokens=9, is_sampled=True, messages=(Message("assistant", "", tool_calls=(call,)),)),
        EpisodeSegment(num_tokens=4, is_sampled=False, messages=(tool,)),
        EpisodeSegment(num_tokens=7, is_sampled=True, messages=(Message("assistant", "found <answer>42</answer>"),)),
    ]
    shown = row(turns) | {"task": "lookup", "opening": "Look up this word: ab"}
    assert "\n".join(sample_lines(shown, 100)) == example


def test_where_a_new_row_begins_is_told(row):
    """On a terminal and on pages; its tokens are those of all that was said."""
    segments = [
        *SEGMENTS[:1],
        EpisodeSegment(num_tokens=40, is_sampled=False, messages=(Message("user", "and?"),), begins_row=True),
        SEGMENTS[2],
    ]
    found = row(segments)
    assert "  user      and? (a new row begins here)" in list(sample_lines(found, 100))
    given = "  * sampled, trained on: 16 tokens; 40 given between them, including the beginnings of rows"
    assert given in list(sample_lines(found, 100))
    fates = [what for _, what, _ in told(sample_page("r", [found], ["qwen"], success_reward=1.0))]
    assert (
        fates[2]
        == "user · given, 40 tokens, a new row with the whole conversation as the template renders it, not trained on"
    )
    assert sum("new row" in what for what in fates) == 1


def test_a_rewritten_conversation_is_told(row):
    """Its messages stand where they were given; only the first one tells of the row."""
    messages = (Message("system", "be brief"), Message("assistant", "so far: 7"), Message("user", "and?"))
    rewritten = EpisodeSegment(num_tokens=40, is_sampled=False, messages=messages, begins_row=True, is_rewritten=True)
    found = row([*SEGMENTS[:1], rewritten, SEGMENTS[2]])
    lines = list(sample_lines(found, 100))
    assert "  system    be brief (a new row begins here, rewritten by the agent)" in lines
    assert "  assistant so far: 7" in lines, "no star: it is given here"
    assert "  * sampled, trained on: 16 tokens; 40 given between them, including the beginnings of rows" in lines
    fates = [what for _, what, _ in told(sample_page("r", [found], ["qwen"], success_reward=1.0))]
    assert fates[2:5] == [
        "system · given, 40 tokens, a new row: the conversation as the agent rewrote it, not trained on",
        "assistant · given, not trained on",
        "user · given, not trained on",
    ]


def test_text_without_roles_is_told(row):
    """What was given so has no role of its own, whichever its message is kept under; a row of it leaves room, too."""
    first = structs.replace(SEGMENTS[0], is_bare=True)
    given = EpisodeSegment(num_tokens=4, is_sampled=False, messages=(Message("user", " and 3 ="),), is_bare=True)
    text = (Message("user", "x" * 1000),)
    begun = EpisodeSegment(num_tokens=40, is_sampled=False, messages=text, begins_row=True, is_bare=True)
    found = row([first, given, structs.replace(SEGMENTS[2], is_bare=True), begun, first])
    fates = [what for _, what, _ in told(sample_page("r", [found], ["qwen"], success_reward=1.0))]
    assert "text · given, 4 tokens: text without roles, not trained on" in fates
    assert "text · given, 40 tokens, a new row: text without roles, not trained on" in fates
    assert "assistant · sampled, 9 tokens, trained on" in fates
    assert [len(one.messages[0].content) for one in readable_turns([begun, first], 400)] == [100 + len(" [...]"), 10]

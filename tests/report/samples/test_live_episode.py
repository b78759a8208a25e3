"""The live view shows the newest episodes as conversations, one at a time, in whatever room there is."""

from typing import Any

import pytest
from rich.cells import cell_len

from mrl.records.episodes import EpisodeSegment, Message
from mrl.records.readable_turns import readable_turns
from mrl.records.telemetry_messages import SampleRecord
from mrl.report.run_display import RunDisplay
from mrl.report.samples.live_episode import SHOWN_S
from tests.report.samples.test_conversations import KNOWN, SEGMENTS, SHARED
from tests.report.test_run_display import STEP, metrics, show


def sample(turns: Any = SEGMENTS, **values: Any) -> SampleRecord:
    return SampleRecord(**KNOWN | {"kind": "rollout", "turns": readable_turns(turns, 100_000)} | values)


RESCUE = {"kind": "rescue", "source": "llama", "turns": readable_turns(SHARED, 10_000)}
TALK = [
    "  opening   <|im_start|>user",
    "            Look up this word: ab<|im_end|>",
    "* assistant let me see",
    '*           -> lookup({"key":"<b>"})',
    "  tool      [lookup] <script>42",
    "* assistant it is \\x1b[2J 42",
    "  user      thanks (after the last turn, not in the row)",
    "  * sampled, trained on",
]


@pytest.fixture
def board(make_config, make_stream):
    """The display of a run that has gone on for a while."""
    display = RunDisplay(make_config(2))
    for now_s, record in make_stream(2, until=213):
        display.apply(record, now_s)
    return display


def view(board: RunDisplay, now_s: float, width: int = 100, height: int = 40) -> tuple[list[str], list[str]]:
    """The tables, and the episode below them."""
    lines = [line.rstrip() for line in show(board.render(now_s), width, height)]
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    place = next((place for place, line in enumerate(lines) if line.startswith(" episode ")), len(lines))
    return lines[:place], lines[place:]


def test_a_run_without_episodes_shows_nothing_of_them(board):
    """Answers of one turn change nothing."""
    before = view(board, 300.0)
    board.apply(sample(turns=()), 300.0)
    assert view(board, 300.0) == before
    assert before[1] == []


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 40), (140, 40)])
def test_an_episode_stands_below_the_tables(board, width, height):
    """All of it where there is room; what each policy does stays in sight."""
    board.apply(sample(), 300.0)
    tables, [head, *talk] = view(board, 300.0, width, height)
    assert head == " episode qwen step 3 · chain_sum · reward 1.0"
    assert any("learner/llama" in line for line in tables)
    if height == 40:
        assert [line.removeprefix(" ") for line in talk] == TALK
    else:
        assert talk[0] == " " + TALK[0] + " [...]"
        assert [line.removeprefix(" ") for line in talk[-4:]] == TALK[4:]


def test_what_is_too_long_is_cut_in_its_messages_then_in_the_middle(board):
    """The opening and the end stay, and it is said how much is left out."""
    segments = [
        EpisodeSegment(num_tokens=9, is_sampled=place % 2 == 0, messages=(Message(role, f"{place} " + "word " * 200),))
        for place, role in enumerate(("assistant", "user") * 3)
    ]
    board.apply(sample(segments), 300.0)
    _, [_, *talk] = view(board, 300.0)
    assert [line.split()[1] for line in talk if line.startswith(" *") and "assistant" in line] == ["assistant"] * 3
    assert sum(line.endswith(" [...]") for line in talk) == len(segments) + 1

    board.apply(sample(segments * 9, step=4), 300.0)
    _, [_, *talk] = view(board, 300.0 + SHOWN_S)
    num_told = sum(line.endswith(" [...]") for line in talk[1:])
    assert f"   [... {len(segments) * 9 - num_told} more messages]" in talk
    assert talk[0].startswith("   opening")
    assert talk[-2].startswith("   user      5 word")


def test_policies_and_peers_take_turns(board):
    """Each stays for a while, whatever comes meanwhile; a rescue says who gave it."""
    board.apply(sample(), 300.0)
    board.apply(sample(**RESCUE), 300.0)
    board.apply(sample(policy="llama"), 300.0)

    def shown(now_s: float, **size: int) -> tuple[str, str]:
        _, talk = view(board, now_s, **size)
        return (talk[0].removeprefix(" episode ").partition(" · chain")[0], talk[-1].strip()) if talk else ("", "")

    assert shown(300.0) == ("qwen step 3", "* sampled, trained on")
    board.apply(sample(step=4), 301.0)
    assert shown(300.0 + SHOWN_S - 0.1) == ("qwen step 3", "* sampled, trained on")
    assert shown(300.0 + SHOWN_S) == ("qwen step 3 · rescued by llama", "* said by llama, imitated")
    assert shown(300.0 + 2 * SHOWN_S)[0] == "llama step 3"
    assert shown(300.0 + 3 * SHOWN_S)[0] == "qwen step 4"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 24), (140, 30)])
def test_on_a_low_terminal_an_episode_and_the_flow_take_turns(board, width, height):
    """Neither is lost for good, and what is awaited is always there."""
    board.apply(sample(), 300.0)
    for turn, has_episode in enumerate((True, False, True)):
        tables, talk = view(board, 300.0 + turn * SHOWN_S, width, height)
        text = "\n".join(tables)
        assert bool(talk) == has_episode
        assert ("experience between policies" in text) == (not has_episode)
        assert "worker/llama/0" in text


def test_where_a_few_lines_of_an_episode_would_be_left_the_flow_stays(make_config, make_stream):
    """Of six policies the tables alone fill a low terminal."""
    display = RunDisplay(make_config(6))
    for now_s, record in make_stream(6, until=213):
        display.apply(record, now_s)
    display.apply(sample(), 300.0)
    text = "\n".join(show(display.render(300.0), 80, 24))
    assert " episode " not in text
    assert "experience between policies" in text


@pytest.mark.parametrize("width", [80, 97])
def test_wide_characters_take_their_two_cells(board, width):
    """Nothing that is said leaves the screen at its right edge, and what is cut says so."""
    said = "".join(chr(0x4E00 + place) for place in range(120))
    board.apply(sample([EpisodeSegment(num_tokens=9, is_sampled=True, messages=(Message("assistant", said),))]), 300.0)
    _, [_, *talk] = view(board, 300.0, width)
    assert said in "".join(line[13:].strip() for line in talk)

    segments = [EpisodeSegment(num_tokens=9, is_sampled=True, messages=(Message("assistant", said * 9),))] * 6
    board.apply(sample(segments, step=4), 300.0)
    _, [_, *talk] = view(board, 300.0 + SHOWN_S, width)
    assert sum(line.endswith(" [...]") for line in talk) == len(segments) + 1, "the opening, too"


def test_what_a_resume_has_voided_goes(board):
    """An episode of a step that is trained again is not shown as if it had been."""
    board.apply(sample(step=213), 300.0)
    assert view(board, 300.0)[1]
    board.apply(metrics("learner/qwen", "qwen", 100, STEP), 301.0)
    assert view(board, 301.0)[1] == []


def test_the_view_that_stays_at_the_end_has_none(board):
    """The report has them all."""
    board.apply(sample(), 300.0)
    assert not any(line.startswith(" episode ") for line in show(board.render_ended(), 100, 40))

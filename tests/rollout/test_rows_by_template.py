"""Episodes of a policy that sees its earlier turns as its chat template renders them: rows, and what stands in each."""

import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mrl.config.policy_tables import PromptTable
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import FinishedAnswer, Generation, Sampling
from mrl.engines.token_sampling import answer_seeds
from mrl.models.load_policy import load_tokenizer
from mrl.models.turn_renderer import TurnRenderer
from mrl.records.episodes import Message
from mrl.records.experience import SharedTurn
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.rollout.episode import EpisodeRequest, EpisodeRules, PlayedEpisode
from mrl.rollout.episode_engine import EpisodeEngine, EpisodeSetup
from mrl.rollout.turn_replay import TurnCodec
from mrl.tasks.environments.contract import PolicyTurn
from mrl.tasks.environments.environment_pool import EnvironmentPool
from tests.support.episode_rows import rows_of
from tests.support.forgetful_template import END, FORGETFUL, KEEPS_NEWEST, OPEN

THOUGHTS = ("first", "second", "third", "fourth", "fifth")
VOCAB, TURN_TOKENS, BOUND_S = 400, 40, 120.0
SAID = ("<think>first</think>one", "two", "<think>\nthird\n</think>\n\nthree", "four", "<think>fifth</think>five")


@pytest.fixture(autouse=True)
def environment_modules(monkeypatch):
    """Environment processes find the modules of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture
def folder(tmp_path, tiny_model):
    """A policy of random weights with a template that forgets."""
    from mrl.models.tokenizers import train_byte_level

    tokenizer = train_byte_level(["say one two three left think user assistant"] * 3, VOCAB - 2)
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": [OPEN]})
    tokenizer.chat_template = FORGETFUL
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(seed=2, vocab_size=VOCAB).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def seen(folder, monkeypatch):
    """What the policy was shown at each of its turns, in which it says `SAID`."""
    shown: list[list[int]] = []
    tokenizer = load_tokenizer(folder)
    submit, collect = EmbeddedEngine.submit, EmbeddedEngine.collect

    def submitted(self, requests):
        shown.extend(one.prompt_token_ids.tolist() for one in requests)
        submit(self, requests)

    def collected(self, timeout_s):
        ended = []
        for one in collect(self, timeout_s):
            ids = np.array(tokenizer(SAID[len(shown) - 1] + END)["input_ids"], dtype=np.int32)
            span = type(one.generation.versions[0])(ids.size, one.generation.versions[0].version)
            said = Generation(ids, np.zeros(ids.size, np.float32), [span], FinishReason.STOP)
            ended.append(FinishedAnswer(one.request_id, one.index, said))
        return ended

    monkeypatch.setattr(EmbeddedEngine, "submit", submitted)
    monkeypatch.setattr(EmbeddedEngine, "collect", collected)
    return shown


@pytest.fixture
def play(folder):
    """Plays one episode of five turns."""
    with closing(
        EnvironmentPool("tests.support.played_environments:Counting", processes=1, wall_s=60.0, cpu_s=60.0)
    ) as pool:

        def played(
            history="template", *, max_tokens=10_000, row_tokens=10_000, pass_tokens=10_000, turns=5, given=()
        ) -> PlayedEpisode:
            end = load_tokenizer(folder).eos_token_id
            renderer = TurnRenderer(folder, PromptTable(history=history), eos_ids=[end])
            codec = TurnCodec(
                renderer,
                read=lambda text, is_cut, tools: (PolicyTurn(text), Message(role="assistant", content=text)),
                say=lambda messages: renderer.turn(messages[0].content, eos_id=end),
                can_call=True,
                so_far=lambda text, _: text,
                spelled=lambda token_id: renderer.name(token_id).encode(),
            )
            engine = EmbeddedEngine(folder, Sampling(1.0, TURN_TOKENS, (end,)), device="cpu", max_running=8)
            engine.label(Version(0, 1))
            setup = EpisodeSetup(
                open=lambda prompt_id: pool.open(7, {"turns": turns}),
                rules=lambda prompt_id: EpisodeRules(8, max_tokens, failed_reward=-1.0),
                codec=codec,
                max_turn_tokens=TURN_TOKENS,
                row_tokens=row_tokens,
                pass_tokens=pass_tokens,
            )
            with closing(EpisodeEngine(engine, setup)) as player:
                seeds = answer_seeds(1, "a", "7", 0, 1)
                player.submit([EpisodeRequest("r", np.zeros(0, np.int32), seeds, prompt_id="7", given=given)])
                until_s, found = time.monotonic() + BOUND_S, []
                while not found and time.monotonic() < until_s:
                    found = player.collect(1.0)
            (one,) = found
            return one.generation

        yield played


def rendered(folder, messages: list[tuple[str, str]]) -> list[int]:
    """A conversation, to be answered, by transformers alone."""
    tokenizer = load_tokenizer(folder)
    chat = [{"role": role, "content": content} for role, content in messages]
    return tokenizer(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))["input_ids"]


def twin(folder, start=(("user", "seed 7"),)) -> list[list[int]]:
    """What the policy is to be shown at each turn, slowly: all is rendered anew behind a turn with reasoning."""
    tokenizer, said, shown = load_tokenizer(folder), list(start), []
    row = rendered(folder, said)
    for place, text in enumerate(SAID):
        shown.append(row)
        told = f"left {4 - place}"
        said += [("assistant", text), ("user", told)]
        behind = f"{END}\n{OPEN}user\n{told}{END}\n{OPEN}assistant\n"
        row = rendered(folder, said) if "</think>" in text else row + tokenizer(text + behind)["input_ids"]
    return shown


def twin_by_text(folder) -> list[list[int]]:
    """As `twin`, for any template: all is rendered anew once a thought would go that the row shows."""
    tokenizer, said, shown = load_tokenizer(folder), [("user", "seed 7")], []
    row = rendered(folder, said)
    for place, text in enumerate(SAID):
        shown.append(row)
        told = f"left {4 - place}"
        said += [("assistant", text), ("user", told)]
        anew = rendered(folder, said)
        row = row + tokenizer(f"{text}{END}\n{OPEN}user\n{told}{END}\n{OPEN}assistant\n")["input_ids"]
        kept, now = tokenizer.decode(anew), tokenizer.decode(row)
        row = row if all(thought in kept for thought in THOUGHTS if thought in now) else anew
    return shown


def test_a_row_begins_where_the_template_drops_reasoning(folder, seen, play):
    """The policy is shown what the template renders then, and a bridge elsewhere; rows hold what it was shown."""
    played = play()
    assert seen == twin(folder)
    assert rows_of(played) == seen
    assert [segment.begins_row for segment in played.segments if not segment.is_sampled] == [
        True,
        False,
        True,
        False,
        False,
    ]
    assert "first" not in load_tokenizer(folder).decode(seen[1])
    texts = [one.messages[0].content for one in played.segments if one.is_sampled]
    assert texts == list(SAID), "what was sampled stays what it was"
    assert played.logprobs.size == sum(one.num_tokens for one in played.segments if one.is_sampled)


def test_what_a_new_row_still_shows_may_be_dropped_later(folder, seen, play, monkeypatch):
    """Under a template that keeps the newest reasoning each turn but the second begins a row."""
    monkeypatch.setattr(f"{__name__}.SAID", [f"<think>{thought}</think>so" for thought in THOUGHTS])
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = KEEPS_NEWEST
    tokenizer.save_pretrained(folder)
    played = play()
    assert seen == twin_by_text(folder)
    assert rows_of(played) == seen
    begins = [segment.begins_row for segment in played.segments if not segment.is_sampled]
    assert begins == [False, True, True, True, False]


def test_by_default_the_policy_goes_on_seeing_all_that_it_sampled(folder, seen, play):
    """One row, each turn behind the one before it."""
    played = play("sampled")
    assert not any(segment.begins_row for segment in played.segments)
    assert rows_of(played) == seen
    assert "first" in load_tokenizer(folder).decode(seen[-1])
    assert all(after[: len(before)] == before for before, after in pairwise(seen))


def test_a_row_has_room_of_its_own_and_an_episode_counts_all(folder, seen, play):
    """The model's bound is that of each row; the task's and the learner's are those of all of them together."""
    whole = play()
    longest = max(len(shown) for shown in seen) + TURN_TOKENS
    assert whole.prompt_token_ids.size + whole.token_ids.size > longest
    seen.clear()
    assert play(row_tokens=longest).ending == "done"
    seen.clear()
    assert play(row_tokens=longest - 1).ending == "max_tokens"
    seen.clear()
    before_last = whole.prompt_token_ids.size + whole.token_ids.size - whole.segments[-2].num_tokens
    assert play(pass_tokens=before_last + TURN_TOKENS).ending == "done"
    seen.clear()
    assert play(pass_tokens=before_last + TURN_TOKENS - 1).ending == "max_tokens"
    seen.clear()
    played = play(max_tokens=longest)
    assert played.ending == "max_tokens"
    assert played.segments[-1].num_tokens == 0
    assert not played.segments[-1].begins_row, "what is said at the very end takes no tokens"


def test_turns_of_a_peer_are_rendered_as_the_own_ones(folder, seen, play):
    """The first own turn stands behind the peer's without their reasoning."""
    given = (
        SharedTurn(is_sampled=True, messages=(Message("assistant", "<think>peer</think>zero"),)),
        SharedTurn(is_sampled=False, messages=(Message("user", "left 5"),)),
    )
    played = play(turns=6, given=given)
    start = (("user", "seed 7"), ("assistant", "<think>peer</think>zero"), ("user", "left 5"))
    assert seen == twin(folder, start)
    assert rows_of(played) == seen


def test_a_peers_reasoning_is_dropped_once(folder, seen, play, monkeypatch):
    """Behind an own turn without reasoning the row goes on."""
    monkeypatch.setattr(f"{__name__}.SAID", ["one", *SAID[1:]])
    given = (
        SharedTurn(is_sampled=True, messages=(Message("assistant", "<think>peer</think>zero"),)),
        SharedTurn(is_sampled=False, messages=(Message("user", "left 5"),)),
    )
    played = play(turns=6, given=given)
    assert seen == twin(folder, (("user", "seed 7"), ("assistant", "<think>peer</think>zero"), ("user", "left 5")))
    assert not next(one for one in played.segments if not one.is_sampled).begins_row

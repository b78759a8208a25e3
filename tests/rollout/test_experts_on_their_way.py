"""Experts from an engine's answers, and from episodes with real environments, to the rows that a learner trains on."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Generation, Sampling
from mrl.models.load_policy import load_policy, load_tokenizer
from mrl.models.routing.router_record import RouterRecord
from mrl.models.tokenizers import train_byte_level
from mrl.records.codec import decode, encode, pack_array
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer, Groups, ScoredGroup, worker_message_decoder
from mrl.records.version import Version, VersionSpan
from mrl.rollout import packed_experts
from mrl.rollout.episode import EpisodeInPlay, EpisodeRules
from mrl.rollout.episode_engine import EpisodeEngine, EpisodeSetup
from mrl.rollout.packed_experts import with_experts
from mrl.tasks.environments.environment_pool import EnvironmentPool
from tests.rollout.test_episode_engine import TURN_TOKENS, VOCAB, collected, request, voice_of
from tests.support.mixtures import draw_experts, make_mixture

RNG = np.random.default_rng(5)
PROMPT = np.array([3, 4, 5, 6], np.int32)


def generation(num_tokens: int, experts: np.ndarray | None) -> Generation:
    ids, spans = np.arange(num_tokens, dtype=np.int32), [VersionSpan(num_tokens, Version(0, 0))]
    return Generation(ids, -np.ones(num_tokens, np.float32), spans, FinishReason.STOP, experts=experts)


def group_of(*generations: Generation) -> ScoredGroup:
    answers = [
        Answer(
            token_ids=pack_array(one.token_ids, "i4"),
            logprobs=pack_array(one.logprobs, "f4"),
            versions=one.versions,
            completion=b"x",
            finish_reason=one.finish_reason,
            reward=1.0,
        )
        for one in generations
    ]
    prompt = pack_array(PROMPT, "i4")
    return ScoredGroup(ticket="0.1", prompt_id="p", task="t", prompt_token_ids=prompt, answers=answers)


def over_the_wire(group: ScoredGroup) -> ScoredGroup:
    message = Groups(worker="w", groups=[group])
    (received,) = decode(encode(message), worker_message_decoder).groups
    return received


def test_answers_have_the_last_rows_and_the_group_those_of_the_prompt():
    """Over the wire, too; an answer that tells none leaves the others theirs."""
    whole, alone = draw_experts(RNG, 3 + 5), draw_experts(RNG, 2)
    generations = [generation(5, whole), generation(2, alone), generation(4, None)]

    received = over_the_wire(with_experts(group_of(*generations), generations))

    np.testing.assert_array_equal(received.prompt_experts.unpacked(3), whole[:3])
    first, second, third = received.answers
    np.testing.assert_array_equal(first.experts.unpacked(5), whole[3:])
    np.testing.assert_array_equal(second.experts.unpacked(2), alone)
    assert third.experts is None


def test_a_policy_that_replays_nothing_pays_not_a_byte():
    """Its messages are those of before."""
    generations = [generation(5, None), generation(2, None)]
    group = group_of(*generations)

    assert with_experts(group, generations) is group
    assert b"experts" not in encode(Groups(worker="w", groups=[group]))


def test_what_no_message_has_room_for_stays_behind(monkeypatch):
    """The group goes without, which is said; one byte more of room, and it goes with all."""
    generations = [generation(5, draw_experts(RNG, 3 + 5)), generation(2, draw_experts(RNG, 2))]
    group = group_of(*generations)

    monkeypatch.setattr(packed_experts, "MAX_EXPERTS_BYTES", 10 * 6 - 1)
    with capture_logs() as logs:
        assert with_experts(group, generations) is group
    assert [(line["bytes"], line["most"]) for line in logs] == [(60, 59)]
    monkeypatch.setattr(packed_experts, "MAX_EXPERTS_BYTES", 10 * 6)
    assert with_experts(group, generations).prompt_experts is not None


def test_an_answer_without_a_token_has_no_experts():
    """Though its prompt was read."""
    generations = [generation(0, draw_experts(RNG, 3)), generation(2, draw_experts(RNG, 2))]

    sent = with_experts(group_of(*generations), generations)

    assert sent.answers[0].experts is None
    assert sent.answers[1].experts is not None
    assert sent.prompt_experts is None


@pytest.fixture
def folder(tmp_path):
    """A mixture of random weights that reads and writes by bytes."""
    train_byte_level(["answer yah one two three"] * 3, VOCAB).save_pretrained(tmp_path / "model")
    make_mixture(vocab_size=VOCAB, seed=2).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def always_ends(monkeypatch):
    """Turns of the policy end by themselves, after two tokens at most."""
    real = EmbeddedEngine.collect

    def collect(self, timeout_s):
        return [replace(one, generation=shortened(one.generation)) for one in real(self, timeout_s)]

    def shortened(one):
        size = min(2, one.token_ids.size)
        return replace(
            one,
            token_ids=one.token_ids[:size],
            logprobs=one.logprobs[:size],
            versions=[VersionSpan(size, one.versions[0].version)],
            finish_reason=FinishReason.STOP,
            experts=one.experts[: len(one.experts) - one.token_ids.size + size],
        )

    monkeypatch.setattr(EmbeddedEngine, "collect", collect)


def test_an_episode_tells_the_experts_of_what_the_policy_sampled(folder, always_ends, monkeypatch):
    """Each turn those of its tokens, read with all that stands before them; the first turn of a group the prompt's."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    sampling = Sampling(1.0, TURN_TOKENS, (load_tokenizer(folder).eos_token_id,), tells_experts=True)
    engine = EmbeddedEngine(folder, sampling, device="cpu", max_running=8)
    engine.label(Version(0, 1))
    name = "tests.support.played_environments:Counting"
    with closing(EnvironmentPool(name, processes=2, wall_s=60.0, cpu_s=60.0)) as environments:
        setup = EpisodeSetup(
            open=lambda prompt_id: environments.open(int(prompt_id), {}),
            rules=lambda prompt_id: EpisodeRules(8, 1000, failed_reward=-1.0),
            codec=voice_of(folder),
            max_turn_tokens=TURN_TOKENS,
            row_tokens=10_000,
        )
        with closing(EpisodeEngine(engine, setup)) as player:
            player.submit([request("7")])
            found = collected(player, 2)

    model, prompts = load_policy(folder), []
    record = RouterRecord(model)
    for played in found.values():
        row = np.concatenate([played.prompt_token_ids, played.token_ids]).astype(np.int64)
        with torch.no_grad():
            model(torch.from_numpy(row[None, :-1]), use_cache=False)
        expected, num_before = record.last(), played.prompt_token_ids.size - 1
        is_sampled = np.concatenate([np.full(s.num_tokens, s.is_sampled) for s in played.segments])
        assert not is_sampled.all()
        np.testing.assert_array_equal(played.experts[-played.logprobs.size :], expected[num_before:][is_sampled])
        prompts.append(len(played.experts) - played.logprobs.size)
        if prompts[-1]:
            np.testing.assert_array_equal(played.experts[:num_before], expected[:num_before])
            assert prompts[-1] == num_before
    assert any(prompts)


def test_an_episode_that_was_given_up_tells_none():
    """Nobody may train on it."""
    episode = EpisodeInPlay(request("7"), 0, None, EpisodeRules(8, 1000, -1.0), None)  # type: ignore[arg-type]
    episode.experts.append(draw_experts(RNG, 2))
    episode.forget()

    assert episode.experts == []


def test_group_fields_stay_what_they_were():
    """Experts are added, nothing else is changed."""
    generations = [generation(5, draw_experts(RNG, 5))]
    group = group_of(*generations)
    sent = with_experts(group, generations)

    assert msgspec.structs.replace(sent.answers[0], experts=None) == group.answers[0]
    assert msgspec.structs.replace(sent, answers=group.answers) == group

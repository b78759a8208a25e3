"""What the engine is asked for a held-out answer: its seed, and how it is sampled."""

from dataclasses import replace

import numpy as np
import pytest

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.engines.engine import Decoding, Generation
from mrl.engines.token_sampling import answer_seeds
from mrl.records.codec import encode
from mrl.records.episodes import EpisodeSegment, Message
from mrl.records.experience import MAX_COMPLETION_BYTES
from mrl.records.finish import FinishReason
from mrl.records.readable_turns import CUT
from mrl.records.rollouts import MAX_SHOWN_CHARS, HeldOutAnswers, HeldOutItem, WorkItem, worker_message_decoder
from mrl.records.version import Version, VersionSpan
from mrl.rollout.episode import PlayedEpisode
from mrl.rollout.sampling import Sampler
from mrl.tasks.pool import build_pool
from mrl.tasks.verify import Verdict


@pytest.fixture(scope="module")
def sampler():
    pool = build_pool(
        {"trim": TaskTable(source="words", dataset="trim")}, PoolTable(train_prompts=2, held_out_prompts=2)
    )
    yield Sampler("a", 1, None, pool, lambda text: np.arange(3, dtype=np.int32), lambda ids: bytes(ids.tolist()))
    pool.close()


def held_out(sampler: Sampler, sample: int = 0) -> HeldOutItem:
    prompt_id = sampler.pool.held_out[0].prompt_id
    return HeldOutItem(ticket="t", prompt_id=prompt_id, version=Version(0, 4), sample=sample)


def test_the_first_answer_has_the_seed_that_it_always_had(sampler):
    """Bit for bit: that of the run's seed, the policy and the prompt, at any step, sampled as the policy samples."""
    item = held_out(sampler)

    request = sampler.request(item, "r")

    assert request.seeds.tolist() == answer_seeds(1, "a", "held-out|" + item.prompt_id, 0, 1).tolist()
    assert request.decoding is None
    assert request.may_be_refused


def test_further_answers_have_seeds_of_their_own(sampler):
    """The same as in a request of all of them at once."""
    items = [held_out(sampler, sample) for sample in range(5)]
    seeds = [int(seed) for item in items for seed in sampler.request(item, "r").seeds]

    assert seeds == answer_seeds(1, "a", "held-out|" + items[0].prompt_id, 0, 5).tolist()
    assert len(set(seeds)) == 5


def test_a_prompt_that_comes_round_again_within_a_step_has_other_seeds(sampler):
    """As under dynamic sampling from a small pool; what is granted again, or after a resume, has the seeds it had."""
    prompt_id = sampler.pool.prompt_at(0).prompt_id
    first, again, second = (
        WorkItem(ticket=ticket, position=position, prompt_id=prompt_id, group_size=4, step=3)
        for ticket, position in (("0.2", 2), ("1.2", 2), ("0.9", 9))
    )
    seeds = [sampler.request(item, "r").seeds.tolist() for item in (first, again, second)]

    assert seeds[0] == seeds[1]
    assert not set(seeds[0]) & set(seeds[2]), "one prompt twice in a step would have the same answers twice"


def test_held_out_answers_alone_have_the_decoding_of_evaluations(sampler):
    """What is trained on is sampled as ever."""
    own = replace(sampler, held_out_decoding=Decoding(0.0))
    prompt_id = sampler.pool.prompt_at(0).prompt_id
    work = WorkItem(ticket="t", position=0, prompt_id=prompt_id, group_size=2, step=0)

    assert own.request(held_out(sampler), "r").decoding == Decoding(0.0)
    assert own.request(work, "r").decoding is None


def test_answers_that_say_the_same_have_one_choice(sampler):
    """By what was read out of them, however they were written; one out of which nothing was read has none."""
    spans = [VersionSpan(1, Version(0, 4))]
    generation = Generation(np.array([7], dtype=np.int32), np.zeros(1, np.float32), spans, FinishReason.STOP)
    said = [
        sampler.held_out(held_out(sampler), generation, Verdict(0.0, words)).choice for words in ("7", "7", "8", "")
    ]

    assert said[0] == said[1] != said[2]
    assert said[3] == ""


def test_a_text_that_no_message_carries_is_cut(sampler, monkeypatch):
    """Of a policy that repeats a token of many blanks, say; its tokens are whole, and so is what the verifier read."""
    monkeypatch.setattr("mrl.rollout.sampling.MAX_GROUP_BYTES", 16 * 1024 * 1024)
    spaces = replace(sampler, completion_bytes=lambda ids: b" " * 128 * ids.size)
    ids, spans = np.ones(20_000, np.int32), [VersionSpan(20_000, Version(0, 4))]
    long = Generation(ids, np.zeros(20_000, np.float32), spans, FinishReason.LENGTH)

    told = spaces.held_out(held_out(sampler), long, Verdict(0.0, ""))
    few, many, most = (spaces.answers([long] * number, [Verdict(0.0, "")] * number) for number in (2, 8, 64))

    assert [len(one.completion) for one in (told, few[0], many[0])] == [1 << 20, 1 << 20, 1 << 19]
    assert len(most[0].completion) > MAX_COMPLETION_BYTES, "peers would take half an answer for a whole one"
    assert few[0].num_sampled_tokens == 20_000


def test_an_episode_goes_along_as_a_conversation(sampler):
    """What it began with as the policy was shown it, and its turns; a plain answer has neither."""
    said = EpisodeSegment(num_tokens=2, is_sampled=True, messages=(Message("assistant", "five"),))
    heard = EpisodeSegment(num_tokens=0, is_sampled=False, messages=(Message("user", "x" * 30_000),))
    plain = Generation(
        np.ones(2, np.int32), np.zeros(2, np.float32), [VersionSpan(2, Version(0, 4))], FinishReason.STOP
    )
    verdict = Verdict(1.0, "five")
    played = PlayedEpisode(
        plain.token_ids, plain.logprobs, plain.versions, plain.finish_reason,
        prompt_token_ids=np.array([7, 8], np.int32), segments=[said, heard], verdict=verdict, ending="done",
    )  # fmt: skip
    reading = replace(sampler, read_prompt=lambda ids: f"<bos>{ids}")

    told = reading.held_out(held_out(sampler), played, verdict)

    assert told.opening == "<bos>[7, 8]"
    assert [(turn.is_sampled, turn.messages[0].content[:4]) for turn in told.turns] == [(True, "five"), (False, "xxxx")]
    assert told.turns[1].messages[0].content == "x" * (MAX_SHOWN_CHARS - len("five")) + CUT
    [message] = worker_message_decoder.decode(encode(HeldOutAnswers(worker="w", answers=[told]))).answers
    assert message == told
    assert not (answer := reading.held_out(held_out(sampler), plain, verdict)).turns
    assert not answer.opening

import json
from collections import Counter

import numpy as np
import pytest
from msgspec import structs

from mrl.records.codec import decode, encode
from mrl.records.experience import Received, experience_decoder
from mrl.records.finish import FinishReason
from mrl.records.version import Version, VersionSpan
from mrl.sharing.regime import Author, Rescue
from mrl.sharing.sgt import MAX_HEARD
from tests.support.retokenizing import retokenize

ROW_ARRAYS = ("prompt_token_ids", "answer_token_ids", "advantages", "weights", "behaviour_logprobs")


def rng(seed=0):
    return np.random.default_rng(seed)


def absorb(regime, groups, received, *, step, rng):
    """Hear and absorb."""
    regime.hear(received, step=step)
    return regime.absorb(groups, step=step, rng=rng)


def absorb_failed(regime, group, received, step=0, seed=0):
    """Ask for a group and absorb it at once."""
    regime.asks(group)
    return absorb(regime, [group], received, step=step, rng=rng(seed))


def test_without_rescue_it_is_independent_bit_for_bit(make_sgt, build, make_group, make_success):
    """With no rescue the rows, their credit and their denominator are those of GRPO, and the generator is untouched."""
    groups = [make_group([1, 0, 0.5, 1], f"p{i}") for i in range(3)] + [make_group([0] * 4, "q")]
    sgt, alone = make_sgt(), build("independent")
    for group in groups:
        sgt.asks(group)
    generator = rng()
    found = absorb(sgt, groups, [make_success(prompt_id="elsewhere")], step=0, rng=generator)
    expected = absorb(alone, groups, [], step=0, rng=rng())
    assert len(found.examples) == len(expected.examples) == 12
    for one, other in zip(found.examples, expected.examples, strict=True):
        assert all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in ROW_ARRAYS)
        assert (one.component, one.prompt_id, one.source) == (other.component, other.prompt_id, other.source)
    assert found.denominators == expected.denominators | {"rescue": 4.0}
    assert generator.bit_generator.state == rng().bit_generator.state


def test_failed_group_is_rescued(make_sgt, make_group, make_success, receiver):
    """A peer success on a failed prompt becomes one imitation row in own tokens, closed by the own EOS."""
    absorbed = absorb_failed(make_sgt(), make_group([0, 0]), [make_success(age=4)])
    (row,) = absorbed.examples
    expected = retokenize(receiver, b"reverse: yah", finished=True, max_tokens=64).token_ids
    assert row.answer_token_ids.tolist() == expected.tolist()
    assert row.prompt_token_ids.tolist() == [1, 2, 3]
    assert (row.component, row.source, row.behaviour_logprobs) == ("rescue", "peer", None)
    assert row.weights.tolist() == [np.float32(1 / len(expected))] * len(expected)
    assert not row.advantages.any()
    assert absorbed.denominators == {"policy_gradient": 2.0, "rescue": 1.0}
    assert absorbed.rescued == [Rescue("p", "peer", b"reverse: yah", 1.0)]
    assert absorbed.forget == ["p"]
    assert absorbed.counts["sharing/rescues"] == absorbed.counts["sharing/hit_prompts"] == 1
    assert absorbed.counts["sharing/rescue_tokens"] == len(expected)
    assert absorbed.counts["sharing/rescue_age_versions"] == 4
    assert absorbed.counts["sharing/hit_rate_from/peer"] == 1


@pytest.mark.parametrize(("rewards", "asked"), [([0, 0.99], ["p"]), ([0, 1.0], []), ([1, 1], [])])
def test_only_groups_that_failed_as_a_whole_ask(make_sgt, make_group, rewards, asked):
    """One full reward is enough not to need help; partial credit is not."""
    regime = make_sgt()
    assert regime.asks(make_group(rewards)) == asked
    assert regime.awaited() == asked


def test_success_that_comes_later_rescues_once(make_sgt, make_group, make_success):
    """A failure waits within the gate, is rescued by the first batch after a success came, and then is done."""
    regime = make_sgt(gate_age_versions=3)
    assert absorb_failed(regime, make_group([0, 0], step=5), [], step=5).examples == []
    late = absorb(regime, [], [make_success()], step=8, rng=rng())
    assert [row.component for row in late.examples] == ["rescue"]
    again = absorb(regime, [], [make_success()], step=8, rng=rng())
    assert again.examples == []
    assert again.counts["regime/ignored_not_pending"] == 1


def test_success_after_the_gate_is_too_late(make_sgt, make_group, make_success):
    """Past the gate the failure has expired, is forgotten, and lowers the hit rate."""
    regime = make_sgt(gate_age_versions=3)
    absorb_failed(regime, make_group([0, 0], step=5), [], step=5)
    late = absorb(regime, [], [make_success()], step=9, rng=rng())
    assert late.examples == []
    assert late.forget == ["p"]
    assert late.counts["sharing/expired_prompts"] == 1
    assert late.counts["sharing/hit_rate"] == 0


def test_failing_again_refreshes_the_wait(make_sgt, make_group, make_success):
    """The gate counts from the newest failure."""
    regime = make_sgt(gate_age_versions=3)
    absorb_failed(regime, make_group([0, 0], step=5), [], step=5)
    assert regime.asks(make_group([0, 0], step=8)) == ["p"]
    absorbed = absorb(regime, [], [make_success()], step=11, rng=rng())
    assert len(absorbed.rescued) == 1
    assert absorbed.counts["sharing/asked_prompts"] == 0


def test_own_success_supersedes(make_sgt, make_group, make_success):
    """A newer own success ends the wait; the prompt is forgotten, and settles nothing."""
    regime = make_sgt()
    regime.asks(make_group([0, 0], step=5))
    regime.asks(make_group([0, 1], step=6))
    absorbed = absorb(regime, [], [make_success()], step=6, rng=rng())
    assert absorbed.rescued == []
    assert absorbed.forget == ["p"]
    assert absorbed.counts["regime/superseded_prompts"] == 1
    assert "sharing/hit_rate" not in absorbed.counts


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"source": "own"}, "own"),
        ({"reward": 0.9}, "failed"),
        ({"finish_reason": FinishReason.LENGTH}, "unfinished"),
        ({"age": 8}, "stale"),
        ({"prompt_id": "other"}, "not_pending"),
    ],
)
def test_unusable_records_are_ignored_and_counted(make_sgt, make_group, make_success, how, reason):
    """Own records, failures, cut answers, stale ones and those of other prompts are counted and not used."""
    absorbed = absorb_failed(make_sgt(max_age_versions=7), make_group([0, 0]), [make_success(**how)])
    assert absorbed.examples == []
    assert absorbed.counts[f"regime/ignored_{reason}"] == 1


def test_unfinished_answers_can_be_allowed(make_sgt, make_group, make_success, receiver):
    """With finished_only off, a cut answer is imitated without an EOS."""
    absorbed = absorb_failed(
        make_sgt(finished_only=False), make_group([0]), [make_success(finish_reason=FinishReason.LENGTH)]
    )
    assert receiver.eos_id not in absorbed.examples[0].answer_token_ids


def test_rejected_text_is_counted_and_another_success_is_tried(make_sgt, make_group, make_success):
    """A success that cannot be expressed in own tokens does not cost the rescue while there is another one."""
    for seed in range(8):
        received = [make_success(b"\xff"), make_success(b"x" * 500), make_success(b"good")]
        absorbed = absorb_failed(make_sgt(), make_group([0, 0]), received, seed=seed)
        assert [rescue.completion for rescue in absorbed.rescued] == [b"good"]
        tried = absorbed.counts.get("regime/rejected_utf8", 0) + absorbed.counts.get("regime/rejected_too_long", 0)
        assert absorbed.counts["align/rejected"] == tried <= 2


@pytest.mark.parametrize(("limit", "rescues"), [(3, 0), (64, 1)])
def test_a_success_that_the_own_limit_cuts_is_not_imitated(build, make_context, make, peer, limit, rescues):
    """Its beginning alone is no verified answer; it is counted by reason, and the failure waits on."""
    told = make.success(b"reverse: yah", fingerprint=peer.fingerprint).record
    trace = make.rollout(make.sampled(peer, [1.0], texts=[told.completion]), peer).record.answers[0].trace
    regime = build("sgt", make_context(max_answer_tokens=limit))
    received = [Received(structs.replace(told, trace=trace), 0)]
    absorbed = absorb_failed(regime, make.group([0, 0]), received)
    assert len(absorbed.rescued) == rescues
    assert absorbed.counts.get("regime/rejected_cut", 0) == absorbed.counts["align/rejected"] == 1 - rescues
    assert regime.awaited() == ["p"] * (1 - rescues)


def test_prompt_stays_pending_when_all_are_rejected(make_sgt, make_group, make_success):
    """Without a usable text there is no rescue, and the wait goes on."""
    regime = make_sgt()
    absorbed = absorb_failed(regime, make_group([0, 0]), [make_success(b"\xff")])
    assert absorbed.examples == absorbed.forget == []
    assert absorbed.counts["align/rejected"] == absorbed.counts["regime/rejected_utf8"] == 1
    assert regime.awaited() == ["p"]


def test_choice_among_successes_is_uniform(make_sgt, make_group, make_success):
    """Every received success is drawn equally often, whoever sent it, and the hit counts for its source."""
    regime, prompts = make_sgt(), [f"p{number}" for number in range(600)]
    groups = [make_group([0, 0], prompt_id) for prompt_id in prompts]
    sent = [(b"one", "a"), (b"two", "a"), (b"three", "b")]
    received = [make_success(text, prompt_id, source=source) for text, source in sent for prompt_id in prompts]
    for group in groups:
        regime.asks(group)
    absorbed = absorb(regime, groups, received, step=0, rng=rng(5))
    drawn = Counter(rescue.completion for rescue in absorbed.rescued)
    expected, tolerance = 200, 4 * np.sqrt(600 * (1 / 3) * (2 / 3))
    assert all(abs(drawn[text] - expected) < tolerance for text in (b"one", b"two", b"three"))
    assert absorbed.counts["sharing/hit_rate_from/b"] == drawn[b"three"] / 600
    assert {rescue.source for rescue in absorbed.rescued if rescue.completion == b"three"} == {"b"}


@pytest.mark.parametrize(("normaliser", "expected"), [("rescues", 2.0), ("prompts", 3.0), ("tokens", 0.0)])
def test_normaliser_counts_rescues_or_prompts(make_sgt, make_group, make_success, normaliser, expected):
    """Rescues of pending prompts count like those of the batch; "prompts" counts own groups, "tokens" rescue tokens."""
    regime = make_sgt(normaliser=normaliser)
    absorb_failed(regime, make_group([0], "earlier"), [])
    groups = [make_group([0], "now"), make_group([0], "a"), make_group([0, 1], "b")]
    for group in groups:
        regime.asks(group)
    received = [make_success(prompt_id="earlier"), make_success(prompt_id="now")]
    absorbed = absorb(regime, groups, received, step=1, rng=rng())
    rescues = [row for row in absorbed.examples if row.component == "rescue"]
    num_tokens = sum(row.answer_token_ids.size for row in rescues)
    assert absorbed.denominators["rescue"] == (expected or num_tokens)
    assert sum(row.weights.sum() for row in rescues) == pytest.approx(2.0 if expected else num_tokens)
    assert absorbed.counts["sharing/rescues"] == 2


def test_dropped_groups_count_among_the_prompts(build, make_context, make_group, make_success):
    """With dynamic sampling Z is what was sampled for the batch, so that lambda means the same as without it."""
    context = make_context(drop_uniform_groups=True)
    regimes = [build("sgt", context)]
    failed = [make_group([0, 0], f"f{number}") for number in range(3)]
    mixed, taken = make_group([0, 1], "m"), make_group([1, 1], "t")
    for group in [*failed, mixed, taken]:
        regimes[0].asks(group)
    regimes.append(build("sgt", context))
    regimes[1].restore(json.loads(json.dumps(regimes[0].state())))
    for regime in regimes:
        received = [make_success(prompt_id=f"f{number}") for number in range(3)]
        absorbed = absorb(regime, [mixed, taken], received, step=0, rng=rng())
        assert absorbed.denominators["rescue"] == 5
        assert absorbed.counts["sharing/rescues"] == 3
        assert absorb(regime, [mixed], [], step=1, rng=rng()).denominators["rescue"] == 1


def test_state_survives_json(make_sgt, make_group, make_success):
    """A regime restored from JSON does what the original does."""
    original = make_sgt(max_pending=3)
    for number in range(5):
        original.asks(make_group([0], f"p{number}", step=number))
    absorb(original, [], [make_success(prompt_id="p4")], step=4, rng=rng())
    original.asks(make_group([0, 1], "p3", step=5))
    original.asks(make_group([0], "p9", step=5))
    restored = make_sgt(max_pending=3)
    restored.restore(json.loads(json.dumps(original.state())))
    assert restored.awaited() == original.awaited() == ["p2", "p9"]
    received = [make_success(prompt_id="p2"), make_success(prompt_id="p9", source="other")]
    one, other = (absorb(regime, [], received, step=6, rng=rng(1)) for regime in (original, restored))
    assert one.counts == other.counts
    assert one.forget == other.forget == ["p3", "p2", "p9"]
    assert one.rescued == other.rescued
    assert [row.prompt_id for row in one.examples] == [row.prompt_id for row in other.examples] == ["p2", "p9"]
    assert [row.prompt_token_ids.tolist() for row in other.examples] == [[1, 2, 3]] * 2
    assert restored.state() == original.state()


def author():
    ids = iter(range(100))
    return Author("own", "print", "exact", lambda: f"id{next(ids)}", 12.5)


def test_publish_gives_one_finished_success(make_sgt, make_group):
    """A group with successes publishes the first finished one, tagged with who, what and when."""
    (record,) = make_sgt().publish(make_group([0, 1, 1], "q", step=7), author())
    assert (record.completion, record.prompt_id, record.task, record.reward) == (b"answer 1", "q", "words", 1.0)
    assert (record.source, record.fingerprint, record.verifier) == ("own", "print", "exact")
    assert (record.oldest, record.newest, record.record_id) == (Version(0, 7), Version(0, 7), "id0")
    assert (record.created_unix_s, record.finished) == (12.5, True)
    assert decode(encode(record), experience_decoder) == record


def test_publish_dates_an_answer_by_its_oldest_and_newest_token(make_sgt, make_group):
    """An answer that was sampled across a weight update carries both versions."""
    group = make_group([1])
    spans = [VersionSpan(1, Version(0, 4)), VersionSpan(1, Version(0, 6))]
    group = structs.replace(group, answers=[structs.replace(group.answers[0], versions=spans)])
    (record,) = make_sgt().publish(group, author())
    assert (record.oldest, record.newest) == (Version(0, 4), Version(0, 6))


@pytest.mark.parametrize(
    ("rewards", "how"),
    [
        ([0, 0.5], {}),
        ([1, 1], {"finished": False}),
        ([1, 1], {"texts": [b"", b""]}),
        ([1], {"texts": [b"x" * 300_000]}),
    ],
    ids=["no success", "unfinished", "empty", "too long for a record"],
)
def test_publish_gives_nothing_without_a_usable_success(make_sgt, make_group, rewards, how):
    """Failures, cut, empty and oversized answers stay at home."""
    assert make_sgt().publish(make_group(rewards, **how), author()) == []


def test_what_is_heard_is_bounded(make_sgt, make_group, make_success):
    """Beyond the bound the oldest records go, and are counted."""
    regime = make_sgt()
    regime.asks(make_group([0]))
    regime.hear([make_success(b"first")], step=0)
    regime.hear([make_success(prompt_id="q")] * MAX_HEARD, step=0)
    absorbed = regime.absorb([], step=0, rng=rng())
    assert absorbed.rescued == []
    assert absorbed.counts["regime/ignored_overflow"] == 1
    assert absorbed.counts["regime/ignored_not_pending"] == MAX_HEARD


def test_records_of_another_kind_are_ignored(make_sgt, make):
    """Whole groups and rewards rescue nobody."""
    absorbed = absorb_failed(make_sgt(), make.group([0]), [make.value([1.0])])
    assert absorbed.examples == []
    assert absorbed.counts["regime/ignored_other"] == 1


def test_asks_outcomes_and_waits_for_none(make_sgt, make_group):
    """Failures are pending by themselves: no own group is held back for a peer."""
    regime = make_sgt(max_age_versions=5)
    kinds = ("outcome", "episode")
    assert (regime.asking.kinds, regime.asking.max_age_versions) == (kinds, 5)
    assert regime.patience is None
    group = make_group([0])
    regime.asks(group)
    assert regime.is_settled(group)


@pytest.mark.parametrize(("finished_only", "withheld"), [(True, 1), (False, 0)])
def test_successes_that_were_cut_are_counted_where_peers_do_not_get_them(make_sgt, make_group, finished_only, withheld):
    """A success that ended by itself and a failure that was cut are none of them."""
    regime, group = make_sgt(finished_only=finished_only), make_group([1, 0, 1])
    cut = [structs.replace(one, finish_reason=FinishReason.LENGTH) for one in group.answers[:2]]
    group = structs.replace(group, answers=(*cut, *group.answers[2:]))
    regime.asks(group)
    assert absorb(regime, [group], [], step=0, rng=rng()).counts["sharing/withheld_answers"] == withheld

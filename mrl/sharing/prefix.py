"""Prefixes of peers' successes: where all own episodes failed, play on from the first turns of one that succeeded.

    S     = { x : every own episode from the start state x failed, and a peer's verified episode was received in time }
    s_k   = x, and after it the first k of the peer's n turns in that episode, with the environment's answers to each
    group = G own episodes from s_k, for one k of 1 .. n - 1; a worker plays the k turns in its own environment first

    L = L_GRPO over groups from start states and groups from states s_k alike, each with its own baseline

What it estimates. The turns of a group from s_k are sampled by the policy itself, given s_k, so there is no ratio to
the peer: the group's gradient is that of J_k = E[reward | s_k], as good an estimate as the own objective's is of J at a
start state (its own clip, baseline and staleness included). S is chosen by the results of other groups, which is no
bias, since the episodes from s_k are sampled afresh. A batch is an estimate for a mixture of states; the policy's
failures and the peer's successes determine its weights, which are not differentiated through.
What it does not estimate. It is no unbiased estimate of the gradient of J at x: states come from the peer's successes,
and not from the policy's own episodes. The k turns are context and get no credit, so nothing here teaches a policy to
reach s_k; learning after s_k has to carry back to x by itself. A state that the policy never reaches takes its part of
the batch all the same: groups from s_k stand in place of as many from start states.

`start` says how k is chosen. "drawn": uniformly. "backwards": the policy plays the peer's last m turns itself; m begins
at 1, and grows by one when a share of the groups from there had a success, for each task separately. This is a reverse
curriculum (arXiv 1707.05300; 1807.06919 and 1812.03381 from one demonstration, 2402.05808 on answers of models); here
the demonstrations are those of peers, and only start states that failed are visited.

Reads of a peer: verified episodes of two turns or more, from start states that failed here. On the wire, per start
state with such a success: about 300 bytes, and its texts. Costs: the environment plays k turns for each of G episodes;
no further pass over any token.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from mrl.config.table import Table, Tuned
from mrl.records.experience import MAX_COMPLETION_BYTES, EpisodeRecord, ExperienceRecord, Received
from mrl.records.rollouts import Answer, Continuation, ScoredGroup
from mrl.sharing.context import SharingContext
from mrl.sharing.own_examples import own_examples
from mrl.sharing.own_objective import POLICY_GRADIENT
from mrl.sharing.peer_episodes import shared_turns
from mrl.sharing.regime import AbsorbResult, Author, PeerQuery, PeerWait
from mrl.sharing.rescues import Failure, PendingRescues

RECORDS_PER_ASK = 16
MAX_HEARD = 4096
"""Records kept for the next batch; the oldest go first."""
GROWTH_GROUPS = 8
"""Groups of a task after which it is decided whether the policy plays one turn more itself."""


class PrefixParameters(Table):
    """The `[sharing.prefix]` table."""

    start: Annotated[Literal["drawn", "backwards"], Tuned(("drawn", "backwards"))] = "drawn"
    """Where the policy goes on. "drawn": after a number of the peer's turns that is drawn uniformly. "backwards": first
    before the peer's last turn, and ever further from the end as the policy succeeds."""
    growth_success_share: float = Field(0.5, gt=0, le=1)
    """Share of the groups with the present number of turns left to the policy that need a success before it plays one
    turn more itself, for "backwards"."""
    max_share: Annotated[float, Tuned((0.25, 0.5, 0.75))] = Field(0.5, gt=0, le=1)
    """States handed out for one batch, as a share of its groups; others wait."""
    gate_age_versions: int = Field(8, ge=0)
    """A failure is answered only while the learner is at most this many versions past the version that failed."""
    max_pending: int = Field(1024, ge=1)
    """Most failures that wait at once; beyond that the least recent expires."""
    max_age_versions: int | None = Field(None, ge=0)
    """Peer successes older than this are ignored; without it any age is taken, since environments do not change."""


class PrefixRegime:
    """Trains by the own objective on own groups, some of which go on from states that peers had reached."""

    patience: PeerWait | None = None

    def __init__(self, parameters: PrefixParameters, context: SharingContext) -> None:
        self.parameters, self.context = parameters, context
        self.components = (context.objective.component(),)
        self.asking: PeerQuery | None = PeerQuery(("episode",), RECORDS_PER_ASK, parameters.max_age_versions)
        self._heard: deque[Received] = deque(maxlen=MAX_HEARD)
        self._num_overflown = 0
        self._growth = _Growth(parameters.growth_success_share)
        self._pending = PendingRescues(
            max_pending=parameters.max_pending, gate_age_versions=parameters.gate_age_versions
        )

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """Return the first success of two turns or more; none of a group that goes on from a peer's turns."""
        if group.continuation is not None:
            return []
        found = next((answer for answer in group.answers if self._is_publishable(answer)), None)
        if found is None:
            return []
        versions = [span.version for span in found.versions]
        tags = author.tags(group) | {"oldest": min(versions), "newest": max(versions)}
        return [
            EpisodeRecord(**tags, turns=shared_turns(found), verifier=author.verifier, reward=found.reward),
        ]

    def asks(self, group: ScoredGroup) -> list[str]:
        """Return the prompt of a group that failed from its start state; a success there settles an older failure."""
        has_passed = any(map(self._is_success, group.answers))
        if group.continuation is not None:
            self._growth.note(group.task, group.continuation.num_left, has_passed=has_passed)
            return []
        if has_passed:
            self._pending.succeeded(group.prompt_id, group.newest)
            return []
        self._pending.failed(Failure(group.prompt_id, (), group.newest))
        return [group.prompt_id]

    def awaited(self) -> list[str]:
        """Return the prompts whose failure is pending."""
        return self._pending.prompt_ids

    def hear(self, received: Sequence[Received], *, step: int) -> None:
        """Note records for the next batch. A record that answers no failure at that time is counted and forgotten."""
        self._num_overflown += max(0, len(self._heard) + len(received) - MAX_HEARD)
        self._heard.extend(received)

    def is_settled(self, group: ScoredGroup) -> bool:
        """Return true: a failure waits without its group."""
        return True

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """Return own rows, those of continued groups among them, and the states that workers are to go on from.

        Without any such states and groups the rows are those of `IndependentRegime`, bit for bit, and `rng` is
        untouched.
        """
        self._pending.expire(step=step)
        counts: Counter[str] = Counter({"align/rejected": 0})
        own = own_examples(groups, self.context)
        found = self._continuations(max(1, int(self.parameters.max_share * len(groups))), rng, counts)
        values = self._pending.take_counts() | {name: float(count) for name, count in counts.items()}
        values |= {"prefix/continuations": float(len(found))} | self._values(groups)
        return AbsorbResult(
            examples=own.examples,
            denominators={POLICY_GRADIENT: self.context.objective.denominator(own.lengths)},
            forget=self._pending.take_forgotten(),
            counts=values,
            continuations=found,
        )

    def state(self) -> dict[str, Any]:
        """Return the table of failures, and the number of turns that the policy plays itself."""
        return self._pending.state() | {"growth": self._growth.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; the caller asks again for `awaited()`."""
        self._pending.restore(state)
        self._growth.restore(state["growth"])

    def _is_success(self, answer: Answer) -> bool:
        return answer.reward >= self.context.success_reward

    def _is_publishable(self, answer: Answer) -> bool:
        num_turns = sum(segment.is_sampled for segment in answer.segments)
        return answer.finished and num_turns > 1 and not answer.is_unsayable and self._is_success(answer)

    def _continuations(self, room: int, rng: np.random.Generator, counts: Counter[str]) -> list[Continuation]:
        """Return at most `room` states, for the failures that wait longest. Records that are not looked at stay."""
        by_prompt = self._take_usable(counts)
        found: list[Continuation] = []
        for prompt_id in [one for one in self._pending.prompt_ids if one in by_prompt]:
            candidates = by_prompt.pop(prompt_id)
            one = self._choose(candidates, rng, counts)
            if one is not None:
                self._pending.hit(prompt_id, one.source)
                found.append(one)
            if len(found) == room:
                break
        self._heard.extend(item for items in by_prompt.values() for item in items)
        return found

    def _take_usable(self, counts: Counter[str]) -> dict[str, list[Received]]:
        """Return the records that answer a pending failure, by prompt; the newest first, whenever they came."""
        heard = {item.record.record_id: item for item in self._heard}
        self._heard.clear()
        if self._num_overflown:
            counts["regime/ignored_overflow"], self._num_overflown = self._num_overflown, 0
        by_prompt: defaultdict[str, list[Received]] = defaultdict(list)
        for item in sorted(heard.values(), key=_newest_first):
            reason = self._ignore_reason(item)
            if reason:
                counts[f"regime/ignored_{reason}"] += 1
            elif len(by_prompt[item.record.prompt_id]) < RECORDS_PER_ASK:
                by_prompt[item.record.prompt_id].append(item)
        return by_prompt

    def _ignore_reason(self, item: Received) -> str:
        record, oldest = item.record, self.parameters.max_age_versions
        if record.source == self.context.policy:
            return "own"
        if not isinstance(record, EpisodeRecord):
            return "other"
        if record.reward < self.context.success_reward:
            return "failed"
        if oldest is not None and item.age_versions > oldest:
            return "stale"
        return "" if record.prompt_id in self._pending else "not_pending"

    def _choose(
        self, candidates: Sequence[Received], rng: np.random.Generator, counts: Counter[str]
    ) -> Continuation | None:
        """Return the beginning of one success, drawn uniformly among those that can be written in own tokens."""
        for index in rng.permutation(len(candidates)):
            record = candidates[index].record
            assert isinstance(record, EpisodeRecord), "others were ignored"
            found = self._beginning(record, rng)
            if isinstance(found, Continuation):
                return found
            counts.update(["align/rejected", f"regime/rejected_{found}"])
        return None

    def _beginning(self, record: EpisodeRecord, rng: np.random.Generator) -> Continuation | str:
        """Return the first turns of a success, or why there are none: "malformed", "one_turn", "no_spelling",
        "too_long", or a word of the spelling.
        """
        if not all(turn.is_sampled is (place % 2 == 0) for place, turn in enumerate(record.turns)):
            return "malformed"
        num_turns = (len(record.turns) + 1) // 2
        if num_turns < 2:
            return "one_turn"
        if self.context.renderer is None:
            return "no_spelling"
        if self.parameters.start == "drawn":
            num_given = int(rng.integers(1, num_turns))
        else:
            num_given = max(1, num_turns - self._growth.own_turns(record.task))
        given = record.turns[: 2 * num_given]
        spelled = self.context.renderer.spell(given)
        if isinstance(spelled, str):
            return spelled
        found = Continuation(
            prompt_id=record.prompt_id, source=record.source, turns=given, num_left=num_turns - num_given
        )
        return found if found.num_bytes <= MAX_COMPLETION_BYTES else "too_long"

    def _values(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Return metrics of continued groups; only their number where there are none."""
        continued = [(group, group.continuation) for group in groups if group.continuation is not None]
        values = {"prefix/groups": float(len(continued))}
        if continued:
            values |= {
                "prefix/reward_mean": _mean([answer.reward for group, _ in continued for answer in group.answers]),
                "prefix/solved_share": _mean([any(map(self._is_success, group.answers)) for group, _ in continued]),
                "prefix/given_turns_mean": _mean([one.num_given for _, one in continued]),
                "prefix/left_turns_mean": _mean([one.num_left for _, one in continued]),
            }
        return values | (self._growth.values() if self.parameters.start == "backwards" else {})


class _Growth:
    """For each task, the number of turns that the policy plays itself: one more when enough groups from there had a
    success.
    """

    def __init__(self, success_share: float) -> None:
        self._success_share = success_share
        self._own_turns: dict[str, int] = {}
        self._tried: Counter[str] = Counter()
        self._solved: Counter[str] = Counter()

    def own_turns(self, task: str) -> int:
        """Return how many of a peer's last turns the policy plays itself."""
        return self._own_turns.get(task, 1)

    def note(self, task: str, num_left: int, *, has_passed: bool) -> None:
        """Note a group from a state where its peer took `num_left` turns more, if that is the present number."""
        if num_left != self.own_turns(task):
            return
        self._tried[task] += 1
        self._solved[task] += has_passed
        if self._tried[task] == GROWTH_GROUPS:
            has_grown = self._solved[task] >= self._success_share * GROWTH_GROUPS
            self._own_turns[task] = self.own_turns(task) + has_grown
            self._tried[task] = self._solved[task] = 0

    def values(self) -> dict[str, float]:
        """Return the metrics."""
        return {f"prefix/own_turns/{task}": float(count) for task, count in sorted(self._own_turns.items())}

    def state(self) -> dict[str, dict[str, int]]:
        """Return the state as plain JSON values."""
        return {"own_turns": dict(self._own_turns), "tried": dict(self._tried), "solved": dict(self._solved)}

    def restore(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Continue from `state()`."""
        self._own_turns = dict(state["own_turns"])
        self._tried, self._solved = Counter(state["tried"]), Counter(state["solved"])


def _newest_first(item: Received) -> tuple[int, str, str]:
    return -item.record.newest.step, item.record.source, item.record.record_id


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

"""Heterogeneous-agent collaborative policy optimisation (HACPO, arXiv 2603.02604).

    capability   P(k) = mean over the last K steps of the share of successes;   omega(k, j) = P(k) / P(j)
    baseline     mu   = (1 / nG) sum_j sum_i omega(k, j) R(y_i^j),     sigma = std of all rewards
    advantage    A    = (R - mu) / sigma for own answers;    omega(j, k) A for those of agent j
    cross term   clip_m(s) sg[clip_m(s)]^alpha A, s = exp(mean log pi_k - mean log pi_j), each over its own tokens,
                 clip_m to [lower + m lower_step, 1], m = updates already done in this step; no minimum with A

Four mechanisms: the shared baseline, omega, the stepwise clip, and the order: own rows first, then the others', with as
many more updates as there are more rows. As in the authors' code (zzx-peter/HACRL-code), a group of equal rewards has
no advantage whatever omega says, a baseline above 1 (or the highest reward, if that is more) falls back to the own
mean, the closing EOS of an answer is left out of all rows, own ones too, and of their means (an answer that is EOS
alone keeps it), and own rows without gradient keep their places in the order. In an episode, which the paper does not
know, the EOS of every turn is left out. Where verifiers give negative rewards, omega multiplies a reward's excess over
the least reward: the paper's rewards are never below 0. Own rows get the policy's own objective: set `method = "gspo"`
for the paper's.

Reads of a peer: whole groups (rollout records). On the wire, per prompt: about 240 bytes, and for every answer 125, its
text and 13 per token; for an episode 30, and for each of its turns 145, its texts and 13 per token.
Costs: forward and backward over every peer answer, twice the training work with one peer.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from mrl.config.table import Tuned
from mrl.objectives.specs import CrossSequence
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.advantages import Float32s, Float64s, against
from mrl.sharing.context import SharingContext
from mrl.sharing.own_examples import own_advantages, own_examples, prompt_of
from mrl.sharing.own_objective import POLICY_GRADIENT
from mrl.sharing.peer_groups import PeerGroupParameters
from mrl.sharing.peer_rollouts import RolloutReader, peer_rewards
from mrl.sharing.peer_traces import PeerTrace, ended_text
from mrl.sharing.regime import AbsorbResult, Component, TrainingExample

CROSS = "cross"
CAPABILITY_FLOOR = 1e-8
RATIO_BOUNDS = (0.1, 10.0)
"""Bounds of the ratio of two capabilities, of which none counts as less than `CAPABILITY_FLOOR`; as in the authors'
code."""


class HacpoParameters(PeerGroupParameters):
    """The `[sharing.hacpo]` table."""

    alpha: Annotated[float, Tuned((0.5, 1.0, 2.0))] = Field(1.0, ge=0)
    """Exponent of the detached ratio: a larger one gives less weight to rows that are unlikely for the policy."""
    lower: Annotated[float, Tuned((0.6, 0.8, 0.9))] = Field(0.8, ge=0, le=1)
    """Lower bound of the cross ratio at the first update of a step (1 - delta); the upper bound is 1."""
    lower_step: float = Field(0.025, ge=0)
    """Rise of the lower bound with every further update of the step."""
    window_steps: int = Field(5, ge=1)
    """Steps over which capabilities are taken (K)."""
    own_eos: bool = False
    """Whether own rows are trained on with their closing EOS; the authors' code leaves it out of every row."""


class Capabilities:
    """Capability of each policy: the mean over its last `window_steps` steps that had any reward.

    Capabilities are counted from the least mean of all windows where that is negative, so that no ratio has a wrong
    sign.
    """

    def __init__(self, *, window_steps: int) -> None:
        self._window_steps = window_steps
        self._means: dict[str, deque[float]] = {}

    def note(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Add the rewards of one step, by policy. A policy without rewards keeps its window."""
        for policy, seen in rewards.items():
            if len(seen):
                window = self._means.setdefault(policy, deque(maxlen=self._window_steps))
                window.append(sum(seen) / len(seen))

    def of(self, policy: str) -> float | None:
        """Return the mean over the window of `policy`; None before its first step."""
        window = self._means.get(policy)
        return sum(window) / len(window) if window else None

    def ratio(self, policy: str, other: str) -> float:
        """Return omega = P(policy) / P(other), held in [0.1, 10] as in the authors' code; 1 while either is unknown."""
        own, others = self.of(policy), self.of(other)
        if own is None or others is None:
            return 1.0
        least = min(0.0, *(mean for window in self._means.values() for mean in window))
        low, high = RATIO_BOUNDS
        return min(high, max(low, max(own - least, CAPABILITY_FLOOR) / max(others - least, CAPABILITY_FLOOR)))

    def state(self) -> dict[str, Any]:
        """Return the windows as JSON values."""
        return {policy: list(window) for policy, window in self._means.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self._means = {policy: deque(means, maxlen=self._window_steps) for policy, means in state.items()}


class Joint(NamedTuple):
    """The advantages of all answers to one prompt."""

    own_G: Float32s
    of_peers: Float32s
    """Advantages of all answers of peers to the prompt, in order, omega included."""


class HacpoRegime(RolloutReader):
    """Trains on own groups, then on the peers' groups on the same prompts."""

    def __init__(self, parameters: HacpoParameters, context: SharingContext) -> None:
        super().__init__(parameters, context)
        self.parameters = parameters
        cross = CrossSequence(parameters.lower, parameters.lower_step, parameters.alpha)
        self.components = (context.objective.component(), Component(CROSS, cross, 1.0, "rows", "peer"))
        self._capabilities = Capabilities(window_steps=parameters.window_steps)

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """Return own rows in phase 0, peers' rows in phase 1."""
        objective = self.context.objective
        peers = self.take_traces(groups, needs_trace=True)
        self._capabilities.note(_passes(self.context, groups, peers))
        joint = [self._advantages(group, traces) for group, traces in zip(groups, peers, strict=True)]
        own = own_examples(groups, self.context, advantages=[one.own_G for one in joint], keep_idle=True).examples
        if not self.parameters.own_eos:
            own = [_without_eos(row, self.context) for row in own]
        own_lengths = [row.num_trained_tokens for row in own if row.weights.any()]
        cross = [
            _cross_example(group, trace, advantage)
            for group, traces, one in zip(groups, peers, joint, strict=True)
            for trace, advantage in zip(traces, one.of_peers, strict=True)
            if trace.is_usable
        ]
        lengths = [row.num_trained_tokens for row in cross]
        num_own, num_cross = len(own_lengths), len(cross)
        return self.absorbed(
            own + cross,
            {
                POLICY_GRADIENT: objective.denominator([*own_lengths, *lengths]),
                CROSS: float(max(1, num_own + num_cross)),
            },
            peer_lengths=lengths,
            expansion=(len(own) + num_cross) / max(1, len(own)),  # masked rows have places among the minibatches too
        )

    def state(self) -> dict[str, Any]:
        """Return the capability windows, and the totals behind the cumulative rates."""
        return super().state() | {"capabilities": self._capabilities.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        super().restore(state)
        self._capabilities.restore(state["capabilities"])

    def _advantages(self, group: ScoredGroup, traces: Sequence[PeerTrace]) -> Joint:
        """Return the advantages of one prompt. A prompt that no peer answered has the policy's own."""
        objective = self.context.objective
        if not traces:
            return Joint(own_advantages(group, objective), np.zeros(0, np.float32))
        own, capabilities = self.context.policy, self._capabilities
        by_peer = {peer: list(theirs) for peer, theirs in itertools.groupby(traces, key=lambda trace: trace.source)}
        return joint_advantages(
            objective.rewards(group),
            [peer_rewards(theirs, self.context) for theirs in by_peer.values()],
            own_over_peer=[capabilities.ratio(own, peer) for peer in by_peer],
            peer_over_own=[capabilities.ratio(peer, own) for peer in by_peer],
            std_correction=objective.std_correction,
            least=min(answer.reward for answer in [*group.answers, *(trace.answer for trace in traces)]),
        )


def joint_advantages(
    own_G: Float64s,
    peers: Sequence[Float64s],
    *,
    own_over_peer: Sequence[float],
    peer_over_own: Sequence[float],
    std_correction: int = 1,
    least: float = 0.0,
) -> Joint:
    """Return the advantages of own rewards [G] and of each peer's, against the capability-weighted joint baseline.

    `least` is the least reward that a verifier gave. Equal rewards give exact zeros. A baseline above 1 and above every
    reward is replaced by the own mean. The authors' std has correction 1.
    """
    pooled = np.concatenate([own_G, *peers])
    if np.all(pooled == pooled[0]):
        return Joint(np.zeros(len(own_G), np.float32), np.zeros(len(pooled) - len(own_G), np.float32))
    weighted = scaled(peers, own_over_peer, least=least)
    baseline = float(np.concatenate([own_G, *weighted]).mean())
    if baseline > max(1.0, pooled.max()):
        baseline = float(own_G.mean())
    std = float(pooled.std(ddof=std_correction))
    theirs = [
        (omega * against(rewards, baseline, std)).astype(np.float32)
        for omega, rewards in zip(peer_over_own, peers, strict=True)
    ]
    return Joint(against(own_G, baseline, std), np.concatenate(theirs))


def scaled(rewards: Sequence[Float64s], scales: Sequence[float], *, least: float) -> list[Float64s]:
    """Return the rewards of each policy, times its scale; where `least` is negative, their excess over `least` is
    scaled.
    """
    zero = min(0.0, least)
    return [one if scale == 1.0 else zero + scale * (one - zero) for scale, one in zip(scales, rewards, strict=True)]


def _without_eos(row: TrainingExample, context: SharingContext) -> TrainingExample:
    """Return an own row without the EOS that closes it, or in an episode each of its turns.

    A masked row stays masked. A row of EOS alone stays, being all that was sampled.
    """
    is_trained = np.ones(row.answer_token_ids.size, dtype=bool) if row.is_trained is None else row.is_trained
    is_last = is_trained & ~np.append(is_trained[1:], False)
    is_end = is_last & np.isin(row.answer_token_ids, context.receiver.eos_ids)
    kept, is_text = ~is_end[is_trained], is_trained & ~is_end
    if kept.all() or not kept.any():
        return row
    end, behaviour = int(np.flatnonzero(is_text)[-1]) + 1, row.behaviour_logprobs
    starts_B = row.row_starts
    return replace(
        row,
        answer_token_ids=row.answer_token_ids[:end],
        advantages=row.advantages[kept],
        weights=context.objective.weights(int(kept.sum())) * row.weights.any(),
        behaviour_logprobs=None if behaviour is None else behaviour[kept],
        is_trained=None if row.is_trained is None else is_text[:end],
        row_starts=None if starts_B is None else starts_B[starts_B < end],
        experts=None if row.experts is None else row.experts[kept],
    )


def _cross_example(group: ScoredGroup, trace: PeerTrace, advantage: np.float32) -> TrainingExample:
    kept, mean_logprob = ended_text(trace.aligned, () if trace.row is None else trace.row.turn_spans)
    return trace.example(
        prompt_of(group),
        component=CROSS,
        advantage=advantage,
        behaviour=np.full(kept.size, mean_logprob, dtype=np.float32),
        phase=1,
        kept=kept,
    )


def _passes(
    context: SharingContext, groups: Sequence[ScoredGroup], peers: Sequence[Sequence[PeerTrace]]
) -> dict[str, list[float]]:
    """Return the passes of all answers of the step, by policy: 1 for a success, else 0."""
    passes: defaultdict[str, list[float]] = defaultdict(list)
    bound = context.success_reward
    passes[context.policy] = [float(answer.reward >= bound) for group in groups for answer in group.answers]
    for traces in peers:
        for trace in traces:
            passes[trace.source].append(float(trace.answer.reward >= bound))
    return passes

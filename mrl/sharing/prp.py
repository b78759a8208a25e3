"""Peer rollout pooling (PRP, arXiv 2605.07244): peers' answers are trained on beside the own ones.

    P    = own answers + peers' answers in own tokens
    A_i  = (r_i - mean_P r) / (std_P r + 1e-6)            "pooled"; or "source": within each one's own group
    L    = -(1/|P|) sum_{i in P} (1/|y_i|) sum_t min(rho A, clip(rho) A)         for the default objective

    variant     ratio of a peer's token
    behaviour   pi_theta / peer's probability, spread over own tokens: density ratio and residual inside the clip
    recompute   pi_theta / pi_old: the answer is taken as if it were an own one
    decoupled   pi_theta / pi_prox; outside the clip the detached weight pi_prox / peer in [1 / weight_cap, weight_cap]
    sequence    exp(mean log pi_theta - mean log peer), per row, each mean over the tokens of its own tokenizer
    luffy       none: -A f(pi_theta), f(x) = x / (x + shaping_gamma) (arXiv 2504.14945)

The ratios of `behaviour` and `sequence` are far from 1 before any update. Where A < 0 and the policy likes a token
better than the peer did, the clip does not bound them, so the term has a dual clip (arXiv 1912.09729): at most
dual_clip |A|.

Two filters, both off by default:

    negative_divergence = d     a peer's row with A < 0 has no term where D > d, D = (1/|y|) sum_t (log peer - log
                                pi_prox): a bad answer that the policy would hardly write anyway. After F-TIS (arXiv
                                2605.22537), by `mrl.objectives.terms.filtered_tokens`. The clip of "sequence" does that
                                already, from D = -log(1 - clip_low) on
    peer_share_until_step = S   of a peer's N answers to a prompt the first ceil(N max(0, 1 - t / S)) are in P at step
                                t: all at first, none from step S on. After S2L-PO (arXiv 2605.30789), where a smaller
                                explorer gives way to the learner's own answers; here own answers do not become more

Neither paper's equations were at hand: these are this code's reading of the rules that the papers state in words, and
so carry no number of an equation. A filtered row stays in |P|, which has to be known before the first backward, and its
reward in the mean; an answer beyond the share is in neither. Answers of a group are exchangeable, so that the first
answers are a uniform draw.

The formulas of PRP are not published; those above are a reconstruction. `behaviour` follows the paper's figure, where
the data of a peer's row holds the peer's log-probs. `decoupled` is what we recommend: across tokenizers, token ratios
hold noise that a clip takes for a change of the policy.

Reads of a peer: whole groups (rollout records). On the wire, per prompt: about 240 bytes, and for every answer 125, its
text and 13 per token; for an episode 30, and for each of its turns 145, its texts and 13 per token.
Costs: forward and backward over every peer answer, twice the training work with one peer; the residual of alignment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal, get_args

import numpy as np
from msgspec import structs
from pydantic import Field, model_validator

from mrl.alignment.aligned_batch import AlignedTrace
from mrl.alignment.spreading import SPREADING
from mrl.config.table import Tuned
from mrl.objectives.specs import Cispo, Clipped, Correction, Filtered, Shaped, Spreading, Term
from mrl.records.experience import RolloutRecord
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.advantages import Float32s
from mrl.sharing.context import SharingContext
from mrl.sharing.own_examples import own_advantages, own_examples, prompt_of
from mrl.sharing.own_objective import POLICY_GRADIENT, OwnObjective
from mrl.sharing.peer_groups import PeerGroupParameters
from mrl.sharing.peer_rollouts import RolloutReader, peer_rewards
from mrl.sharing.peer_traces import PeerTrace, behaviour_of, mean_logprobs
from mrl.sharing.regime import AbsorbResult, Component, Int32s, TrainingExample

PEER_ROLLOUTS = "peer_rollouts"

Variant = Literal["behaviour", "recompute", "decoupled", "sequence", "luffy"]
TRACED: frozenset[Variant] = frozenset({"behaviour", "decoupled", "sequence"})
"""Variants that need the peer's log-probs."""
READERS: Mapping[str, tuple[Variant, ...]] = {
    "spreading": ("behaviour", "decoupled"),
    "dual_clip": ("behaviour", "sequence"),
    "weight_level": ("decoupled",),
    "weight_cap": ("decoupled",),
    "shaping_gamma": ("luffy",),
    "negative_divergence": ("behaviour", "decoupled"),
}
"""Key -> variants in which the key has a meaning; keys that are not here concern all variants."""


class PrpParameters(PeerGroupParameters):
    """The `[sharing.prp]` table."""

    variant: Annotated[Variant, Tuned(("behaviour", "recompute", "decoupled"))] = "behaviour"
    """Ratio, or term, by which a peer's token enters the loss."""
    advantages: Annotated[Literal["pooled", "source"], Tuned(("pooled", "source"))] = "pooled"
    """Baseline of the advantages: own and peers' answers together ("pooled"), or each answer's own group ("source")."""
    spreading: Spreading | Literal["bytes", "uniform"] = "receiver_multiplicative"
    """How a span's log-prob is divided over own tokens, for "behaviour" and "decoupled". "receiver_multiplicative"
    scales own log-probs to it, "receiver_additive" moves them to it, "none" divides nothing, so that each token has the
    ratio of its span; "bytes" gives parts by bytes, "uniform" equal parts."""
    weight_level: Literal["token", "sequence", "geometric"] = "geometric"
    """Level of the weight of "decoupled", by token, by whole row, or as the geometric mean over the row."""
    weight_cap: float = Field(2.0, ge=1)
    """Bound of the weight of "decoupled", which stays within [1 / weight_cap, weight_cap]."""
    dual_clip: Annotated[float, Field(gt=1)] | Literal["off"] = 3.0
    """Bound of the term for negative advantages, as a multiple of the advantage, for "behaviour" and "sequence".
    Without it a bad answer that the policy likes better than its peer does weighs without bound, before any update."""
    shaping_gamma: float = Field(0.1, gt=0)
    """The gamma of x / (x + gamma), for "luffy"."""
    negative_divergence: float | None = Field(None, ge=0)
    """Nats per token by which a bad answer may be likelier to its peer than to the policy, for "behaviour" and
    "decoupled". Beyond that it is not trained on (F-TIS). Left out: bad answers are always trained on."""
    peer_share_until_step: int | None = Field(None, ge=1)
    """Step from which no answer of a peer is trained on; until then the peers' share falls evenly from all answers
    (S2L-PO). Left out: all answers are trained on."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> "PrpParameters":
        """Raises ValueError for a key that was set and that nothing reads, or that contradicts another key."""
        for key, variants in READERS.items():
            if key in self.model_fields_set and self.variant not in variants:
                wanted = " or ".join(map(repr, variants))
                raise ValueError(
                    f"{key} has no effect; got variant {self.variant!r}; wanted {wanted}; cure: remove {key}"
                )
        if self.variant == "decoupled" and self.weight_level != "token" and self.spreading == "none":
            raise ValueError(
                "spreading 'none' needs weight_level 'token', as a sum over the row counts a span once per own token; "
                f'got weight_level {self.weight_level!r}; cure: set weight_level = "token", or remove spreading'
            )
        if self.negative_divergence is not None and self.spreading == "none":
            raise ValueError(
                "negative_divergence cannot be combined with spreading 'none', which counts a span once per own token; "
                "cure: set another spreading, or remove negative_divergence"
            )
        return self


class PrpRegime(RolloutReader):
    """Trains on own groups and the peers' groups on the same prompts, as one batch."""

    def __init__(self, parameters: PrpParameters, context: SharingContext) -> None:
        super().__init__(parameters, context)
        self.parameters = parameters
        objective = context.objective
        own = objective.component()
        peer = Component(
            PEER_ROLLOUTS,
            _filtered(_term(parameters, objective), parameters.negative_divergence),
            1.0,
            own.denominator,
            "peer",
            own.regularizer,
            _spreading(parameters),
        )
        self.components = (own, peer)

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """Return own and peers' rows under one denominator."""
        objective = self.context.objective
        rollouts, counts = self._within_share(self.take_rollouts(groups), step)
        peers = self.traces_of(rollouts, needs_trace=self.parameters.variant in TRACED)
        advantages = [self._advantages(group, traces) for group, traces in zip(groups, peers, strict=True)]
        own = own_examples(groups, self.context, advantages=[own_G for own_G, _ in advantages])
        pooled = [
            self._example(group, trace, advantage)
            for group, traces, (_, theirs) in zip(groups, peers, advantages, strict=True)
            for trace, advantage in zip(traces, theirs, strict=True)
            if trace.is_usable and (advantage or objective.regularizer)
        ]
        lengths = [trace.num_tokens for traces in peers for trace in traces if trace.is_usable]
        denominator = objective.denominator([*own.lengths, *lengths])
        denominators = {POLICY_GRADIENT: denominator, PEER_ROLLOUTS: denominator}
        return self.absorbed(own.examples + pooled, denominators, peer_lengths=lengths, counts=counts)

    def is_settled(self, group: ScoredGroup) -> bool:
        """Whether every peer has answered about the prompt of `group`, or no peer's answer would be taken any more."""
        until = self.parameters.peer_share_until_step
        return (until is not None and group.newest.step >= until) or super().is_settled(group)

    def _within_share(
        self, rollouts: list[list[RolloutRecord]], step: int
    ) -> tuple[list[list[RolloutRecord]], dict[str, float]]:
        """Return the peers' groups with as many answers as the share of this step takes, and its counts."""
        until = self.parameters.peer_share_until_step
        if until is None:
            return rollouts, {}
        left, before = max(0, until - step), _num_answers(rollouts)
        kept = [
            [structs.replace(one, answers=one.answers[: -(-left * len(one.answers) // until)]) for one in told if left]
            for told in rollouts
        ]
        return kept, {"sharing/peer_share": left / until, "sharing/annealed_rows": before - _num_answers(kept)}

    def _advantages(self, group: ScoredGroup, traces: Sequence[PeerTrace]) -> tuple[Float32s, Float32s]:
        """Return [G] advantages of own answers, and the advantages of all answers of peers, in order."""
        objective = self.context.objective
        if self.parameters.advantages == "source" or not traces:
            told = np.array([trace.advantage for trace in traces], dtype=np.float32)
            return own_advantages(group, objective), told
        joint = objective.advantages(np.concatenate([objective.rewards(group), peer_rewards(traces, self.context)]))
        return joint[: len(group.answers)], joint[len(group.answers) :]

    def _example(self, group: ScoredGroup, trace: PeerTrace, advantage: np.float32) -> TrainingExample:
        behaviour, spans = self._peer_logprobs(trace.aligned)
        return trace.example(
            prompt_of(group),
            component=PEER_ROLLOUTS,
            advantage=advantage,
            weights=self.context.objective.weights(trace.num_tokens),
            behaviour=behaviour,
            spans=spans,
        )

    def _peer_logprobs(self, row: AlignedTrace) -> tuple[Float32s | None, Int32s | None]:
        """Return [T] the peer's log-probs at own tokens, and [T] the spans that the learner has yet to divide; None
        where there are none.
        """
        if self.parameters.variant == "sequence":
            return mean_logprobs(row), None
        if self.parameters.variant not in TRACED:
            return None, None
        if self.parameters.spreading in get_args(Spreading):
            return behaviour_of(row)
        return SPREADING[self.parameters.spreading](row).astype(np.float32), None


def _num_answers(rollouts: Sequence[Sequence[RolloutRecord]]) -> float:
    return float(sum(len(one.answers) for told in rollouts for one in told))


def _filtered(term: Term, negative_divergence: float | None) -> Term:
    """Return the term of peers' tokens without bad answers beyond the divergence."""
    if negative_divergence is None:
        return term
    assert isinstance(term, Clipped), "variants with a ratio to the peer are clipped"
    return Filtered(term, negative_divergence)


def _spreading(parameters: PrpParameters) -> Spreading:
    """Return the rule by which the learner divides spans. Rules that need no own log-probs leave it no spans."""
    match parameters.spreading:
        case "bytes" | "uniform":
            return "receiver_multiplicative"
        case rule:
            return rule


def _term(parameters: PrpParameters, objective: OwnObjective) -> Term:
    """Return the term of peers' tokens, with the clips of the own objective where these bound the same ratio."""
    token = objective.token_clip()
    dual_clip = None if parameters.dual_clip == "off" else parameters.dual_clip
    match parameters.variant:
        case "behaviour":
            return Clipped(token.clip_low, token.clip_high, "token", "behaviour", dual_clip)
        case "recompute":
            own = objective.term if isinstance(objective.term, Clipped | Cispo) else token
            return replace(own, correction=None)
        case "decoupled":
            cap = parameters.weight_cap
            correction = Correction(parameters.weight_level, "truncate", 1.0 / cap, cap)
            return Clipped(token.clip_low, token.clip_high, "token", "proximal", None, correction)
        case "sequence":
            clips = objective.term if isinstance(objective.term, Clipped) else token
            return Clipped(clips.clip_low, clips.clip_high, "sequence", "behaviour", dual_clip)
        case "luffy":
            return Shaped(parameters.shaping_gamma)

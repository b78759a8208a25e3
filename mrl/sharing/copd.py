"""Co-evolving policy distillation (CoPD, arXiv 2604.27083) across tokenizers: policies train by rewards, and in between
distil into each other on their own answers.

    A_u = beta (log pi_peer(u) - log pi_theta(u))   for a common span u of an own answer      distilled groups (eq. 8)
    A   = that of the policy's own objective                                                  all other groups (eq. 7)

in the policy's own clipped objective, at every token of u. A common span ends where both tokenizers end a token: DPCA's
chunk (arXiv 2606.09456), SimCT's minimal unit (arXiv 2605.07711). A group belongs to the phase of the version that
sampled it: `rl_steps` versions by rewards, then `distil_steps` versions in which groups on a peer's tasks are distilled
from the peer and other groups are trained by rewards, as in Algorithm 1. The paper has one domain for each policy,
which `teaches` names. It merges the policies afterwards; policies of different families cannot be merged.

Units: a teacher tells the `top_units` likeliest units of each place, as bytes, beside the score of the answer. Where a
span is one token on both sides, and own tokens stand for units, the divergence over these units and the rest is summed
and differentiated itself (`mrl.objectives.terms.unit_divergence`), in place of A_u: SimCT's comparison (arXiv
2605.07711) without its continuations of several tokens.

Estimator elsewhere: one sampled token, or span, for each divergence (k1), its gradient by the score function without a
baseline.
Bias: with one tokenizer and on-policy rows it is unbiased for the sum of the states' reverse divergences with the
states held fixed; the effect of a token on later states is left out. With two tokenizers a span's log-prob is that of
one segmentation on each side, not of all, and the end of a span is known only after it.

Gate: a teacher whose log-prob of a span lies within `agreement_nats` of the policy's own on less than `min_agreement`
of a step's spans teaches nothing in that step. The gate stands for the paper's overlap of likeliest tokens, for which a
policy would have to know its own likeliest tokens. Groups of such a teacher, and answers that were not scored in time,
are trained by rewards, and counted.

Reads of a peer: log-probs of own answers (score records). On the wire, per prompt of a distilled group: to the teacher
about 270 bytes, and for every answer 35 and its text; back 280, and for every answer 40 and 9 per token of the
teacher's; with units 8 more for each of them, and the text of those that differ. Costs: one forward pass of the teacher
per answer of a distilled group.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from mrl.alignment.ragged import sums_at
from mrl.config.defaults import TOP_UNITS
from mrl.config.table import Table, Tuned
from mrl.objectives.specs import Distilled, Spreading
from mrl.records.experience import MAX_LIKELIEST
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.context import SharingContext
from mrl.sharing.own_examples import own_examples
from mrl.sharing.own_objective import clips_tokens
from mrl.sharing.regime import AbsorbResult, Bools, PeerWait, TrainingExample
from mrl.sharing.rlad import ScoreReader


class CopdParameters(Table):
    """The `[sharing.copd]` table."""

    rl_steps: int = Field(3, ge=0)
    """Versions in a row whose groups are all trained by rewards."""
    distil_steps: Annotated[int, Tuned((1, 2, 4))] = Field(2, ge=0)
    """Versions after these whose groups are distilled; 0 is `independent`. The paper found 1.5 to 1 best."""
    teaches: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(default={})
    """Policy -> the tasks on which the others distil from it; policies left out teach nobody. Empty: all teach, on all
    tasks."""
    coefficient: Annotated[float, Tuned((0.3, 1.0, 3.0))] = Field(1.0, gt=0)
    """beta: the advantage of a nat."""
    max_gap_nats: float = Field(5.0, gt=0)
    """Bound of |log pi_peer - log pi_theta| per token; the paper has none."""
    spreading: Spreading = "none"
    """How a span's difference of log-probs is divided over its own tokens. `none`: each token gets the whole
    difference, which gives the gradient of the span's log-prob; `receiver_multiplicative`: in proportion to own
    log-probs, as DPCA; `receiver_additive`: evenly."""
    top_units: int = Field(TOP_UNITS, ge=0, le=MAX_LIKELIEST)
    """Likeliest next units that a teacher tells for each place; 0: none, and one sampled token is all that is known."""
    agreement_nats: float = Field(1.0, gt=0)
    """Largest difference between the log-probs of a span under teacher and policy at which the teacher agrees on it."""
    min_agreement: float = Field(0.5, ge=0, le=1)
    """Least share of a step's spans on which a teacher has to agree."""
    peer_hold_versions: int = Field(1, ge=0)
    """Steps for which an own group without its scores may be passed over."""
    peer_wait_s: float = Field(2.0, ge=0)
    """Longest wait of a batch for its scores; a synchronous run waits `run.sync_timeout_s` and ends without them."""

    @model_validator(mode="after")
    def _has_a_phase(self) -> "CopdParameters":
        if not self.rl_steps + self.distil_steps:
            raise ValueError("rl_steps and distil_steps are both 0; wanted at least one of them >= 1")
        return self

    def teachers_of(self, policy: str, policies: Sequence[str]) -> tuple[str, ...]:
        """Return the policies that `policy` distils from on some task."""
        others = sorted(set(policies) - {policy}) if self.distil_steps else []
        return tuple(other for other in others if not self.teaches or other in self.teaches)

    def distils(self, step: int) -> bool:
        """Whether groups that the version of `step` sampled are distilled."""
        return step % (self.rl_steps + self.distil_steps) >= self.rl_steps


class CopdRegime(ScoreReader):
    """Trains on own rows, in turn by rewards and by peers' log-probs of their spans."""

    def __init__(self, parameters: CopdParameters, context: SharingContext) -> None:
        teachers = parameters.teachers_of(context.policy, context.others)
        super().__init__(context, teachers, PeerWait(parameters.peer_hold_versions, parameters.peer_wait_s))
        self.parameters = parameters
        self.num_units = parameters.top_units
        own = context.objective.term
        if teachers:
            assert clips_tokens(own), "others are refused before a run starts"
            term = Distilled(own, parameters.coefficient, parameters.max_gap_nats)
            self.components = (context.objective.component(term=term, spreading=parameters.spreading),)
        else:
            self.components = (context.objective.component(),)

    def teacher_of(self, group: ScoredGroup) -> str | None:
        """Return a policy that teaches the group's task, where a distilling version sampled the group; else None.

        Several teachers take turns, by prompt and version.
        """
        if not self.parameters.distils(group.newest.step):
            return None
        teaches = self.parameters.teaches
        able = [one for one in self.teachers if not teaches or group.task in teaches[one]]
        return able[zlib.crc32(f"{group.prompt_id}@{group.newest.step}".encode()) % len(able)] if able else None

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """Return own rows; rows of scored answers have the teacher's log-probs, and advantage 0 where it gave none."""
        counts: Counter[str] = Counter(asked=0, scored=0, absent=0, unscored=0, gated=0)
        lengths: list[int] = []
        rows_of: list[tuple[ScoredGroup, list[TrainingExample]]] = []
        agreed: dict[str, list[Bools]] = defaultdict(list)
        for group in groups:
            own = own_examples([group], self.context, keep_idle=True)  # a teacher moves groups of equal rewards too
            lengths += own.lengths
            rows = self.with_scores(own.examples, group, counts)
            rows_of.append((group, rows))
            for row in rows:
                if row.examined is not None:
                    agreed[row.examined.source].append(agreeing(row, self.parameters.agreement_nats))
        told = {source: np.concatenate(found) for source, found in sorted(agreed.items())}
        agreement = {source: float(found.mean()) for source, found in told.items() if found.size}
        taught = {source for source, share in agreement.items() if share >= self.parameters.min_agreement}
        examples = [row for group, rows in rows_of for row in self._taught_by(taught, group, rows, counts)]
        absorbed = self.absorbed(examples, lengths, counts)
        shares = {f"sharing/agreement/{source}": share for source, share in agreement.items()}
        if self.num_units:
            shares |= _shares_of_units(examples)
        return replace(absorbed, counts={**absorbed.counts, **shares})

    def _taught_by(
        self, teachers: set[str], group: ScoredGroup, rows: list[TrainingExample], counts: Counter[str]
    ) -> list[TrainingExample]:
        """Return the rows of a group; where none was scored by `teachers`, the rows of the own objective."""
        scored = [row.examined is not None and row.examined.source in teachers for row in rows]
        counts["gated"] += sum(row.examined is not None for row in rows) - sum(scored)
        if not any(scored):
            return own_examples([group], self.context).examples
        return [
            replace(row, advantages=np.zeros_like(row.advantages)) if is_scored else row
            for row, is_scored in zip(rows, scored, strict=True)
        ]


def _shares_of_units(rows: Sequence[TrainingExample]) -> dict[str, float]:
    """Return two shares that units tell of the teachers' opinions: the scored tokens with units among all scored
    tokens, and the mean probability that a teacher gives to the units of such a token.
    """
    told = [row for row in rows if row.teacher_units is not None]
    num_scored = sum(int(np.isfinite(row.teacher_logprobs).sum()) for row in rows if row.teacher_logprobs is not None)
    masses = [np.nansum(np.exp(row.teacher_units.logprobs), -1) for row in told if row.teacher_units is not None]
    of_tokens = np.concatenate([np.zeros(0), *masses])
    of_tokens = of_tokens[of_tokens > 0]
    shares = {"sharing/unit_tokens": of_tokens.size / num_scored} if num_scored else {}
    return shares | ({"sharing/unit_mass": float(of_tokens.mean())} if of_tokens.size else {})


def agreeing(row: TrainingExample, within_nats: float) -> Bools:
    """Return, for every common span that the teacher of a row scored, whether the teacher agrees with the row's
    sampler.
    """
    assert row.teacher_logprobs is not None
    assert row.teacher_spans is not None
    assert row.behaviour_logprobs is not None
    spans, first = np.unique(row.teacher_spans, return_index=True)
    told = row.teacher_logprobs[first].astype(np.float64)
    own = sums_at(row.teacher_spans, row.behaviour_logprobs.astype(np.float64), int(spans[-1]) + 1)[spans]
    is_told = np.isfinite(told)
    agrees: Bools = np.abs(told - own)[is_told] <= within_nats
    return agrees

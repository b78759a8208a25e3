"""Table of every metric that mrl emits: name, unit and meaning.

A part in braces stands for one path segment, or for the rest of a segment: `eval/accuracy/{task}` covers
`eval/accuracy/spell`, and `eval/pass@{k}` covers `eval/pass@8`.
Headline metrics are the overview of a run; the live view and the report are built from them.
"""

from typing import NamedTuple


class Metric(NamedTuple):
    """Unit and meaning of one metric, and whether it belongs to the overview."""

    unit: str
    what: str
    headline: bool = False


IDLE_SHARE = "allocation/idle_share/"
LOST_POINTS = "tracker/lost_points/"

METRICS: dict[str, Metric] = {
    # learner, once a step
    "reward/mean": Metric(
        "reward",
        "mean reward over the own answers of the batch that were not trained on before; those from its start states,"
        " where `prefix` has others",
        True,
    ),
    "reward/all_failed_share": Metric("share", "own groups of the batch in which every answer failed", True),
    "reward/all_passed_share": Metric("share", "own groups of the batch in which every answer passed"),
    "reward/named/{task}/{name}": Metric("reward", "mean of one part of a task's reward over the batch's own answers"),
    "verify/failed_share": Metric("share", "own answers on which verifiers failed, since the batch before"),
    "loss/{component}": Metric("nats", "one loss component, divided by its own denominator"),
    "loss/total": Metric("nats", "sum of the loss components"),
    "optim/grad_norm": Metric("norm", "global gradient norm before clipping"),
    "optim/skipped": Metric("updates", "1 when the gradient was not finite and the update was left out"),
    "optim/lr": Metric("1", "learning rate"),
    "optim/updates": Metric("updates", "optimizer updates of this step"),
    "entropy/policy_nats": Metric("nats", "mean entropy of the policy at own tokens; where there is an entropy bonus"),
    "kl/reference_nats": Metric(
        "nats", "k3 estimate of the divergence from the run's first policy on own tokens", True
    ),
    "entropy/sampled_nats": Metric("nats", "mean of -log p over the own tokens trained on", True),
    "ratio/clip_share": Metric("share", "own tokens whose gradient the clip takes away"),
    "mismatch/k3_nats": Metric("nats", "k3 estimate of the divergence between learner and engine on sampled tokens"),
    "mismatch/max_ratio": Metric("1", "largest ratio of learner to engine probability in the batch"),
    "mismatch/alarms": Metric("steps", "steps whose divergence between learner and engine passed its bound"),
    "routing/replayed_share": Metric(
        "share", "own tokens trained on whose experts were those that the engine chose, where routers are replayed"
    ),
    "routing/otherwise_share": Metric(
        "share", "experts replayed that the learner's router would not have chosen, over tokens and layers"
    ),
    "staleness/mean_versions": Metric("versions", "mean staleness of the own rows trained on", True),
    "staleness/max_versions": Metric("versions", "largest staleness of the own rows trained on", True),
    "staleness/share/{versions}": Metric("share", "own groups of the batch that are so stale"),
    "staleness/dropped_groups": Metric("groups", "groups dropped as too stale in this step"),
    "staleness/dropped_tokens": Metric("tokens", "answer tokens of the groups dropped as too stale in this step"),
    "curriculum/skipped_prompts": Metric(
        "prompts", "visits to solved or hopeless prompts skipped since the batch before"
    ),
    "curriculum/solved_share": Metric("share", "prompts of the pool whose newest group solved them"),
    "curriculum/hopeless_share": Metric("share", "prompts of the pool whose newest group did not solve them at all"),
    "groups/reused": Metric("groups", "own groups of this step that were trained on before, where groups are reused"),
    "groups/window": Metric("groups", "groups that may be in flight and in stock, where the pace is adaptive"),
    "groups/granted_again": Metric("groups", "grants taken back from lost or restarted workers in this step"),
    "groups/repeated": Metric("groups", "deliveries ignored in this step because they had come before"),
    "groups/unsound": Metric("groups", "deliveries refused in this step: not as granted, or tokens without a version"),
    "groups/uniform_dropped": Metric("groups", "groups of equal rewards left out by dynamic sampling"),
    "groups/uniform_dropped_tokens": Metric("tokens", "answer tokens of these groups"),
    "groups/uniform_taken": Metric("groups", "groups of equal rewards taken because enough were left out"),
    "tokens/trained": Metric("tokens", "answer tokens trained on in this step"),
    "tokens/answer_mean": Metric("tokens", "mean length of the own answers"),
    "tokens/truncated_share": Metric("share", "own answers cut at the token limit"),
    "episodes/turns_mean": Metric("turns", "mean number of turns of the policy in its own episodes"),
    "episodes/given_tokens_mean": Metric(
        "tokens", "mean number of given tokens of an own episode, with what new rows begin with"
    ),
    "episodes/rows_mean": Metric(
        "rows", "mean number of rows of an own episode: more than one where the template drops earlier reasoning"
    ),
    "episodes/rewritten_share": Metric(
        "share", "own episodes whose conversation their agent has rewritten: peers do not get their turns"
    ),
    "episodes/bare_share": Metric(
        "share", "own episodes whose agent gave text or token ids without roles: peers do not get their turns"
    ),
    "episodes/ended/{ending}": Metric("share", "own episodes that ended in this way"),
    "sharing/asked_prompts": Metric("prompts", "prompts for which peers were asked in this step"),
    "sharing/hit_prompts": Metric("prompts", "asked prompts that a peer answered in this step"),
    "sharing/hit_prompts_from/{source}": Metric("prompts", "of these, answered by this peer"),
    "sharing/expired_prompts": Metric("prompts", "pending prompts given up in this step, no peer success having come"),
    "sharing/pending_prompts": Metric("prompts", "prompts waiting for a peer success"),
    "sharing/hit_rate": Metric("share", "asked and settled prompts that some peer answered, since the start", True),
    "sharing/hit_rate_from/{source}": Metric("share", "asked and settled prompts that this peer answered", True),
    "sharing/rescues": Metric("rescues", "peer successes trained on in this step", True),
    "sharing/rescue_tokens": Metric("tokens", "answer tokens of the rescues of this step"),
    "sharing/rescue_age_versions": Metric("versions", "mean age of the rescues of this step"),
    "sharing/withheld_answers": Metric(
        "answers",
        "own successes of this step kept from peers because they were cut at the token limit; of reused groups again",
    ),
    "sharing/peer_rows": Metric("answers", "peers' answers that can be trained on in this step"),
    "sharing/peer_tokens": Metric("tokens", "own tokens of these answers"),
    "sharing/peer_share": Metric("share", "answers of a peer's group that this step takes, where they become fewer"),
    "sharing/annealed_rows": Metric("answers", "peers' answers of this step beyond that share, not trained on"),
    "sharing/filtered_rows": Metric(
        "answers", "peers' answers of this step that a filter left without a term: bad ones, too far from the policy"
    ),
    "sharing/grafted_prompts": Metric("prompts", "own groups replaced by a peer's group in this step"),
    "vote/complete_share": Metric("share", "voted groups of this step on which every peer had voted in time"),
    "vote/tied_share": Metric("share", "voted groups of this step that elected no answer, and were rewarded nothing"),
    "vote/overruled_share": Metric("share", "voted groups of this step whose own majority was not elected"),
    "vote/self_consistency": Metric("share", "mean share of the own answers to a prompt that say the same"),
    "prefix/continuations": Metric("groups", "states handed to workers in this step, to go on from a peer's turns"),
    "prefix/groups": Metric("groups", "own groups of the batch that went on from a peer's turns"),
    "prefix/reward_mean": Metric("reward", "mean reward over the own answers of these groups"),
    "prefix/solved_share": Metric("share", "of these groups, those in which an answer passed"),
    "prefix/given_turns_mean": Metric("turns", "mean number of a peer's turns that they went on from"),
    "prefix/left_turns_mean": Metric("turns", "mean number of turns in which the peer came from there to its success"),
    "prefix/own_turns/{task}": Metric(
        "turns", "how many of a peer's last turns the policy plays itself, where these grow"
    ),
    "prefix/unbegun_groups/{reason}": Metric(
        "groups", "such groups given up in this step (`unequal`: the environment did not say what it said to the peer)"
    ),
    "sharing/asked_rows": Metric("answers", "own answers of this step that a teacher was asked about"),
    "sharing/scored_rows": Metric("answers", "of these, with the teacher's log-probs", True),
    "sharing/absent_rows": Metric("answers", "of these, not scored in time"),
    "sharing/unscored_rows": Metric("answers", "of these, not expressible in the teacher's tokens"),
    "sharing/gated_rows": Metric("answers", "scored answers not distilled, as their teacher agrees on too few spans"),
    "sharing/agreement/{source}": Metric("share", "spans of the scored answers on which this teacher agrees"),
    "sharing/unit_tokens": Metric("share", "scored tokens in whose places teachers told units that own tokens say"),
    "sharing/unit_mass": Metric("share", "teachers' probability of these units, in the mean over such tokens"),
    "regime/{count}": Metric("count", "a count of this step that the sharing regime defines itself"),
    "align/rejected": Metric("records", "peer answers of this step that own tokens cannot express, or not whole"),
    # learner: what sharing costs, per peer that an answer came from in this step
    "align/rows/{source}": Metric("answers", "answers of the peer that were looked at"),
    "align/rejected_share/{source}": Metric(
        "share", "of these, sent and not usable: not expressible in own tokens, or cut"
    ),
    "align/rejected/{reason}/{source}": Metric(
        "answers",
        "answers of the peer rejected for this reason (`cut`: too long here; `withheld`: it sent their reward alone)",
    ),
    "align/trace_rejected/{reason}/{source}": Metric("answers", "answers of the peer whose trace was not believed"),
    "align/flagged/{flag}/{source}": Metric("answers", "answers trained on that carry this flag of the alignment"),
    "align/one_to_one_tokens/{source}": Metric("share", "own tokens that cover exactly one token of the peer", True),
    "align/one_to_one_bytes/{source}": Metric("share", "bytes in such tokens"),
    "align/one_to_many_tokens/{source}": Metric("share", "own tokens of which several cover one token of the peer"),
    "align/many_to_one_tokens/{source}": Metric("share", "own tokens that cover several tokens of the peer"),
    "align/many_to_many_tokens/{source}": Metric("share", "own tokens in spans of several tokens on both sides"),
    "align/length_ratio/{source}": Metric("1", "own tokens per token of the peer"),
    "align/receiver_tokens/{source}": Metric("tokens", "own tokens of the peer's answers"),
    "align/bytes/{source}": Metric("bytes", "text of the peer's answers"),
    "align/spans/{source}": Metric("spans", "finest common spans of both segmentations"),
    "align/peer_nats_per_byte/{source}": Metric("nats/byte", "log-prob that the peer gave its own answers"),
    "align/dropped_nats/{source}": Metric("nats", "log-prob of the peer's tokens that have no place here"),
    "align/gap_nats_per_byte/{source}": Metric(
        "nats/byte", "own log-prob of the peer's answers minus the peer's", True
    ),
    "align/gap_nats_per_token/{source}": Metric("nats/token", "the same per own token"),
    "align/span_std_nats/{source}": Metric("nats", "standard deviation of the log-ratio of spans"),
    "align/span_p95_nats/{source}": Metric("nats", "95th percentile of its size"),
    "align/outside_band/{source}": Metric("share", "spans whose ratio lies outside [0.8, 1.2]"),
    "align/sequence_ess/{source}": Metric("share", "effective sample size of the answers' ratios"),
    "align/span_ess/{source}": Metric("share", "effective sample size of the spans' ratios"),
    "exchange/lost_s": Metric("s", "time without any answer from the exchange"),
    "time/step_s": Metric("s", "whole step, wait included"),
    "time/wait_for_groups_s": Metric("s", "part of the step spent waiting for own groups", True),
    "time/wait_for_peers_s": Metric("s", "part of the step spent waiting for peers"),
    "time/wait_for_turn_s": Metric("s", "part of the step spent waiting for a turn on a device that others have too"),
    "time/move_s": Metric("s", "part of the step spent moving memory to such a device, and behind the step away"),
    "time/form_s": Metric("s", "part of the step spent making training rows of own groups and of what peers sent"),
    "time/train_s": Metric("s", "part of the step spent packing rows, in forward, backward and update", True),
    "time/pack_s": Metric("s", "part of the training spent laying rows out, by the first rank's clock"),
    "time/forward_s": Metric("s", "part of the training spent in forward passes"),
    "time/backward_s": Metric("s", "part of the training spent in backward passes"),
    "time/update_s": Metric("s", "part of the training spent summing gradients and in the optimizer"),
    "time/publish_s": Metric("s", "part of the step spent publishing weights", True),
    "time/checkpoint_s": Metric("s", "part of the step spent handing over a checkpoint, and waiting for the last one"),
    "rate/trained_tokens_s": Metric("tokens/s", "answer tokens trained on per second of the step", True),
    "rate/mfu": Metric("share", "floating-point operations of a training pass, of what the GPU can do meanwhile"),
    "memory/learner_peak_mib": Metric("MiB", "peak of the first rank: its GPU's in this step, or its process's ever"),
    "rate/steps_per_hour": Metric("steps/h", "steps per hour at the pace of this step"),
    # rollout worker
    "rate/rollout_tokens_s": Metric("tokens/s", "sampled tokens per second of this worker", True),
    "rollout/groups": Metric("groups", "groups finished since the worker started"),
    "rollout/tokens": Metric("tokens", "tokens sampled since the worker started"),
    "rollout/slots": Metric("slots", "requests that the lease lets this worker run at once"),
    "rollout/running": Metric("answers", "answers that the engine samples now"),
    "rollout/waiting": Metric("answers", "answers that the engine holds and does not sample yet"),
    "rollout/cache_share": Metric(
        "share", "key-value cache of the engine in use; 0 where what is begun never lacks room"
    ),
    "rollout/reused_prompt_share": Metric(
        "share", "tokens of prompts that the engine had computed before, of earlier turns or of the same prompt"
    ),
    "rollout/busy_share": Metric("share", "part of the time in which the engine sampled"),
    "rollout/idle_s": Metric("s", "time with no answer in flight since the worker started"),
    "rollout/held_out_share": Metric(
        "share", "time of the places in use that answers to held-out prompts took, since the worker started"
    ),
    "rollout/engine_restarts": Metric("restarts", "times that the engine was lost and started anew"),
    "weights/canary_max_abs_nats": Metric("nats", "largest gap between engine and learner on the canary"),
    "weights/canary_mean_abs_nats": Metric("nats", "mean gap between engine and learner on the canary"),
    "weights/canary_noise_nats": Metric("nats", "the same between two number formats of the learner: rounding alone"),
    "weights/canary_missing_share": Metric("share", "part of the last update that the engine's scores lack, about 0"),
    "weights/canary_missing_error": Metric("share", "standard error of that part"),
    "weights/canary_warnings": Metric("updates", "updates whose canary was off although every byte was right"),
    "weights/versions_not_told": Metric("updates", "updates proved by the canary alone that it could not see"),
    "weights/compared_share": Metric("share", "tensors whose bytes in the engine were compared, at the last update"),
    "weights/update_s": Metric("s", "time to take new weights into the engine"),
    "weights/refused": Metric("updates", "weight updates refused since the worker started"),
    "weights/by_broadcast": Metric("updates", "weight updates that came by broadcast since the worker started"),
    "weights/by_adapters": Metric("updates", "weight updates that came as adapters alone since the worker started"),
    "weights/by_files": Metric("updates", "weight updates that came whole in files since the worker started"),
    "weights/failed_broadcasts": Metric("updates", "broadcasts of weights that failed since the worker started"),
    "scoring/requests": Metric("requests", "score requests of peers answered since the worker started"),
    "scoring/tokens": Metric("tokens", "answer tokens scored for peers since the worker started"),
    "scoring/refused_answers": Metric("answers", "peers' answers that own tokens cannot express, since the start"),
    "scoring/dropped_requests": Metric("requests", "score requests not answered since the worker started"),
    "scoring/busy_s": Metric("s", "time spent scoring for peers since the worker started"),
    "exchange/too_large": Metric("records", "records too long to be sent to peers, since the worker started"),
    "exchange/dropped": Metric("records", "records dropped as the exchange took none, since the worker started"),
    "plain/answers": Metric("answers", "answers to requests outside of episodes since the worker started"),
    "plain/tokens": Metric("tokens", "tokens sampled for them since the worker started"),
    "plain/scored_tokens": Metric("tokens", "given tokens scored for them since the worker started"),
    # rollout worker: answers that are verified in processes of their own; totals since the worker started
    "verify/answers": Metric("answers", "answers that verifier processes have judged or failed on"),
    "verify/pending": Metric("answers", "answers that are at a verifier process or wait for one"),
    "verify/judge/requests": Metric("requests", "requests to judges"),
    "verify/judge/prompt_tokens": Metric("tokens", "tokens of questions, as judges count them"),
    "verify/judge/completion_tokens": Metric("tokens", "tokens that judges wrote, as they count them"),
    "verify/judge/cached": Metric("answers", "answers whose reward was known from an equal question"),
    "verify/failures/{kind}": Metric("answers", "of these, answers for which it gave no reward, by kind of failure"),
    "environment/episodes": Metric("episodes", "episodes that a worker has opened, since it started"),
    "environment/turns": Metric("turns", "turns that its environments have answered, since it started"),
    "environment/tool_errors": Metric("calls", "tool calls answered by an error, since it started"),
    "environment/replays": Metric("episodes", "episodes played again because their process was lost"),
    "environment/processes": Metric("processes", "environment processes that were started"),
    "environment/ends/{reason}": Metric("episodes", "episodes that their environment ended, or failed, so"),
    # gateway: agents that ask policies; totals since the gateway started
    "gateway/offered": Metric("episodes", "episodes that workers have offered to agents"),
    "gateway/turns": Metric("turns", "turns of policies that agents have asked for"),
    "gateway/branches": Metric("requests", "requests by which agents rewrote their conversation"),
    "gateway/refused/{code}": Metric("requests", "requests that were refused, by the code of the answer"),
    "gateway/ends/{reason}": Metric("episodes", "episodes that an agent took and that ended so"),
    "gateway/expired": Metric("episodes", "episodes given up because their agent said nothing, or its process ended"),
    "gateway/playing": Metric("episodes", "episodes that agents play now"),
    "gateway/offered_now": Metric("episodes", "episodes that wait for an agent now"),
    "gateway/agents_waiting": Metric("agents", "requests of agents that wait for an episode now"),
    "gateway/plain/requests": Metric("requests", "requests outside of episodes that were answered"),
    "gateway/plain/answers": Metric("answers", "their answers, texts that were scored among them"),
    "gateway/plain/tokens": Metric("tokens", "tokens sampled for them, which nobody trains on"),
    "gateway/plain/scored_tokens": Metric("tokens", "given tokens that were scored for them"),
    "gateway/plain/tried_again": Metric("answers", "that another worker was asked for, since the first was lost"),
    "gateway/plain/waiting": Metric("answers", "that are waited for now"),
    "gateway/plain/kept_versions": Metric("versions", "earlier ones that are served from their checkpoints, or load"),
    "gateway/agent_processes": Metric("processes", "processes of agents that the run has started and that live"),
    # learner, or the worker of a frozen policy: an evaluation
    "eval/accuracy": Metric("share", "held-out answers that the verifier accepts", True),
    "eval/accuracy/{task}": Metric("share", "held-out answers of one task that the verifier accepts", True),
    "eval/pass@{k}": Metric("share", "held-out prompts that k answers solve, of several answers to each"),
    "eval/avg@{n}": Metric("share", "held-out answers that the verifier accepts, of n answers to each prompt"),
    "eval/maj@{n}": Metric("share", "held-out prompts whose most frequent of n answers the verifier accepts"),
    "eval/tied_majorities": Metric("prompts", "held-out prompts with several most frequent answers"),
    "eval/own_token_share": Metric("share", "their tokens that the evaluated version sampled, not a newer one"),
    "eval/missing_answers": Metric("answers", "held-out prompts that got no answer in this evaluation"),
    "eval/time_s": Metric("s", "time of an evaluation, from the question to the last answer"),
    # exchange daemon; totals since the daemon started
    "exchange/records": Metric("records", "records that the exchange holds", True),
    "exchange/used_bytes": Metric("bytes", "bytes of records that the exchange holds"),
    "exchange/refused": Metric("records", "records refused since the start"),
    "exchange/evicted": Metric("records", "records evicted since the start"),
    "exchange/unserved_requests": Metric("requests", "score requests that no worker has been given"),
    "exchange/file_bytes": Metric("bytes", "length of the exchange's file"),
    "exchange/unstored_puts": Metric("messages", "messages with records that wait to be stored"),
    "exchange/abandoned_deliveries": Metric(
        "records", "records whose delivery was given up: their reader did not acknowledge it, or too much waited for it"
    ),
    "exchange/malformed": Metric("messages", "messages and connections dropped since the start, for any reason"),
    "exchange/flow_records/{source}/{receiver}": Metric("records", "records delivered since the start", True),
    "exchange/flow_bytes/{source}/{receiver}": Metric("bytes", "bytes delivered since the start"),
    "exchange/flow_hit_rate/{source}/{receiver}": Metric("share", "prompts asked for and answered by the source", True),
    "exchange/flow_age_versions/{source}/{receiver}": Metric("versions", "mean age of the delivered records", True),
    # allocator, per policy
    "allocation/slots": Metric("slots", "rollout slots granted to the policy", True),
    "allocation/held_slots": Metric("slots", "most slots that the policy's workers may have in use under any lease"),
    "allocation/demand_slots": Metric("slots", "slots that the measured throughput calls for"),
    "allocation/target_units": Metric("units", "units that the policy should have"),
    "allocation/held_units": Metric("units", "units that the policy owns"),
    "allocation/demand_units": Metric("units", "units that the measured throughput calls for"),
    "allocation/target_units/{type}": Metric("units", "of these, on this type of unit; only where there are several"),
    "allocation/held_units/{type}": Metric("units", "of these, of this type; only where there are several"),
    "allocation/unit_tokens_per_s/{type}": Metric("tokens/s", "what a full engine makes on one, 0 while unknown"),
    "allocation/begun_leases": Metric("leases", "leases of units granted to the policy since the allocator started"),
    "allocation/ended_leases/{why}": Metric("leases", "of these, ended for this reason"),
    "allocation/idle_share/{unit}": Metric(
        "share", "time in which the unit is nobody's or its engine has no answer in flight, since it was told last"
    ),
    "allocation/slept": Metric("engines", "engines put to sleep on their units so far"),
    "allocation/woken": Metric("engines", "engines woken up again so far"),
    "allocation/failed_sleeps": Metric("engines", "engines that did not fall asleep in time, or could not, and ended"),
    "allocation/failed_wakes": Metric("engines", "engines that did not wake up in time and were killed"),
    "allocation/progress": Metric("1", "busy share of the learner: busy / (busy + waiting for data)"),
    "allocation/supply_progress": Metric("1", "share of the learner that its engines fed, over the rule's window"),
    "allocation/bound": Metric("1", "best least progress of all policies that the measured demands allow"),
    "allocation/gain": Metric(
        "share", "gain in worth of the newest candidate; 1 where the split before was not allowed"
    ),
    "allocation/trained_share": Metric("share", "generated groups that are trained on, the rest being too stale"),
    "allocation/epoch": Metric("epoch", "epoch of the newest lease"),
    "allocation/moves": Metric("slots", "slots that the policy gained or lost by this decision"),
    "allocation/moves_because/{why}": Metric("slots", "the same, for this reason; only where there are any"),
    # supervisor
    "process/restarts": Metric("restarts", "processes started again since the start", True),
    "process/pss_mib": Metric("MiB", "proportional memory of the whole process tree"),
    "host/cpu_share/{host}": Metric("share", "busy share of all cores of the host, since the value before"),
    "host/memory_mib/{host}": Metric("MiB", "memory of the host, or of this job on it, that is in use"),
    "host/memory_free_mib/{host}": Metric("MiB", "memory of the host, or of this job on it, that can be written to"),
    "host/disk_free_mib/{host}": Metric("MiB", "room on the disk of the run folder"),
    "gpu/busy_share/{gpu}": Metric("share", "time in which the GPU ran anything, over its driver's last sample"),
    "gpu/memory_mib/{gpu}": Metric("MiB", "memory of the GPU that is in use"),
    "gpu/memory_free_mib/{gpu}": Metric("MiB", "memory of the GPU that is free"),
    "gpu/power_w/{gpu}": Metric("W", "power that the GPU draws"),
    "process/count": Metric("processes", "processes of the run that are alive"),
    "tracker/points/{tracker}": Metric("points", "values of metrics that the tracker took in this attempt"),
    "tracker/lost_points/{tracker}": Metric("points", "values that it did not take, having failed or hung"),
}
"""Name, or pattern of names -> metric, grouped by the role that emits it."""


def idle_metric(unit: str) -> str:
    """Return the name of a unit's idle share. A slash in the unit's name would begin a segment and becomes a colon."""
    return IDLE_SHARE + unit.replace("/", ":")


def type_metric(what: str, unit_type: str) -> str:
    """Return the name of a metric of a type of unit, whose name comes from a driver. A slash in it becomes a colon."""
    return f"allocation/{what}/{unit_type.replace('/', ':')}"


def metric_of(name: str) -> Metric | None:
    """Return the entry that covers `name`: a name of the table, or a pattern with its braces filled; else None."""
    if "{" in name:
        return None
    found = METRICS.get(name)
    if found is not None:
        return found
    parts = name.split("/")
    return next((metric for pattern, metric in METRICS.items() if _covers(pattern.split("/"), parts)), None)


def is_known(name: str) -> bool:
    """Whether `name` may be emitted."""
    return metric_of(name) is not None


def _covers(pattern: list[str], parts: list[str]) -> bool:
    if len(pattern) != len(parts):
        return False
    return all(_covers_part(want, part) for want, part in zip(pattern, parts, strict=True))


def _covers_part(want: str, part: str) -> bool:
    """Whether segment `part` is `want`, or begins like it with some text in place of its braces."""
    before, brace, _ = want.partition("{")
    return part.startswith(before) and part != before if brace else part == want

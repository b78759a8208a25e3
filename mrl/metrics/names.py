"""Table of every metric that mrl emits: name, unit and meaning.

A part in braces stands for one path segment, or for the rest of a segment: `eval/accuracy/{task}` covers
`eval/accuracy/spell`, and `eval/pass@{k}` covers `eval/pass@8`.
Headline metrics say most about a run; the reference marks them.
"""

from typing import NamedTuple


class Metric(NamedTuple):
    """Unit and meaning of one metric, and whether it says most about a run."""

    unit: str
    what: str
    headline: bool = False


IDLE_SHARE = "allocation/idle_share/"
LOST_POINTS = "tracker/lost_points/"

METRICS: dict[str, Metric] = {
    # learner, once a step
    "reward/mean": Metric(
        "reward",
        "mean reward of own answers in the batch's new groups; of groups that begin at their start states, if"
        " `prefix` has others",
        True,
    ),
    "reward/all_failed_share": Metric("share", "new own groups of the batch in which every answer failed", True),
    "reward/all_passed_share": Metric("share", "new own groups of the batch in which every answer passed"),
    "reward/named/{task}/{name}": Metric("reward", "mean of one part of a task's reward over the new own answers"),
    "verify/failed_share": Metric("share", "own answers since the batch before on which a verifier failed"),
    "loss/{component}": Metric("nats", "one loss component, divided by its own denominator; mean over updates"),
    "loss/total": Metric("nats", "sum of the loss components; mean over the step's updates"),
    "optim/grad_norm": Metric("norm", "global gradient norm before clipping; mean over the step's updates"),
    "optim/skipped": Metric("share", "updates of this step left out because loss or gradient was not finite"),
    "optim/lr": Metric("1", "learning rate"),
    "optim/updates": Metric("updates", "optimizer updates in this step"),
    "entropy/policy_nats": Metric("nats", "mean entropy of the policy at own tokens, where there is an entropy bonus"),
    "kl/reference_nats": Metric(
        "nats", "k3 estimate of the divergence from the run's first policy on own tokens; where KL is penalised", True
    ),
    "entropy/sampled_nats": Metric("nats", "mean -log p of the own tokens trained on, p being the engine's", True),
    "ratio/clip_share": Metric("share", "own tokens whose gradient the clip takes away"),
    "mismatch/k3_nats": Metric("nats", "k3 estimate of the divergence between learner and engine on sampled tokens"),
    "mismatch/max_ratio": Metric("1", "largest ratio of learner to engine probability of a token in the batch"),
    "mismatch/alarms": Metric("steps", "steps so far whose `mismatch/k3_nats` passed its bound"),
    "routing/replayed_share": Metric(
        "share", "own tokens trained on with the experts that the engine chose, where routers are replayed"
    ),
    "routing/otherwise_share": Metric(
        "share", "replayed choices of experts that the learner's router would not have made, over tokens and layers"
    ),
    "staleness/mean_versions": Metric("versions", "mean staleness of the own groups trained on", True),
    "staleness/max_versions": Metric("versions", "largest staleness of the own groups trained on", True),
    "staleness/share/{versions}": Metric("share", "own groups trained on that have this staleness"),
    "staleness/dropped_groups": Metric("groups", "groups dropped as too stale in this step"),
    "staleness/dropped_tokens": Metric("tokens", "answer tokens of the groups dropped as too stale in this step"),
    "curriculum/skipped_prompts": Metric(
        "prompts", "visits to solved or hopeless prompts skipped since the batch before"
    ),
    "curriculum/solved_share": Metric("share", "prompts of the pool whose newest group solved them"),
    "curriculum/hopeless_share": Metric("share", "prompts of the pool whose newest group did not solve them at all"),
    "groups/reused": Metric("groups", "own groups of this step that earlier steps trained on, where groups are reused"),
    "groups/window": Metric("groups", "most groups that may be in flight or ready, where the pace is adaptive"),
    "groups/granted_again": Metric("groups", "grants taken back from lost or restarted workers in this step"),
    "groups/repeated": Metric("groups", "groups ignored in this step because they had come before"),
    "groups/unsound": Metric(
        "groups", "groups refused in this step: not as granted, or with tokens without log-prob or announced version"
    ),
    "groups/uniform_dropped": Metric("groups", "groups of equal rewards that dynamic sampling left out"),
    "groups/uniform_dropped_tokens": Metric("tokens", "answer tokens of the groups that dynamic sampling left out"),
    "groups/uniform_taken": Metric("groups", "groups of equal rewards kept because enough were left out"),
    "tokens/trained": Metric("tokens", "answer tokens trained on in this step, of own and peers' answers"),
    "tokens/answer_mean": Metric("tokens", "mean number of sampled tokens of an own answer"),
    "tokens/truncated_share": Metric("share", "own answers cut at the token limit"),
    "episodes/turns_mean": Metric("turns", "mean number of turns that the policy took in an own episode"),
    "episodes/given_tokens_mean": Metric(
        "tokens", "mean number of given tokens of an own episode, including those with which its later rows begin"
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
    "episodes/ended/{ending}": Metric("share", "own episodes with this ending"),
    "sharing/asked_prompts": Metric("prompts", "prompts for which peers were asked in this step"),
    "sharing/hit_prompts": Metric("prompts", "asked prompts that some peer answered, in this step"),
    "sharing/hit_prompts_from/{source}": Metric("prompts", "asked prompts that this peer answered, in this step"),
    "sharing/expired_prompts": Metric("prompts", "pending prompts given up in this step: no peer's success came"),
    "sharing/pending_prompts": Metric("prompts", "prompts that wait for a peer's success"),
    "sharing/hit_rate": Metric(
        "share", "prompts asked and settled since the start that a peer answered; answers, where teachers score", True
    ),
    "sharing/hit_rate_from/{source}": Metric(
        "share", "prompts asked and settled since the start that this peer answered", True
    ),
    "sharing/rescues": Metric("rescues", "peers' successes trained on in this step", True),
    "sharing/rescue_tokens": Metric("tokens", "answer tokens of this step's rescues"),
    "sharing/rescue_age_versions": Metric("versions", "mean age of this step's rescues"),
    "sharing/withheld_answers": Metric(
        "answers",
        "own successes of this step kept from peers because they were cut at the token limit; reused groups count"
        " again",
    ),
    "sharing/peer_rows": Metric("answers", "peers' answers that this step can train on"),
    "sharing/peer_tokens": Metric("tokens", "own tokens of the peers' answers that this step can train on"),
    "sharing/peer_share": Metric(
        "share", "answers of a peer's group that this step takes, where `sharing.prp.peer_share_until_step` is set"
    ),
    "sharing/annealed_rows": Metric("answers", "peers' answers of this step that `sharing/peer_share` leaves out"),
    "sharing/filtered_rows": Metric(
        "answers",
        "peers' answers of this step that a filter left without a loss term, as bad or too far from the policy",
    ),
    "sharing/grafted_prompts": Metric("prompts", "own groups replaced by a peer's group in this step"),
    "vote/complete_share": Metric("share", "voted groups of this step on which every peer had voted in time"),
    "vote/tied_share": Metric("share", "voted groups of this step that elected no answer: all their rewards are 0"),
    "vote/overruled_share": Metric("share", "voted groups of this step whose own majority was not elected"),
    "vote/self_consistency": Metric("share", "mean share of own answers to a prompt that agree on the most frequent"),
    "prefix/continuations": Metric("groups", "states handed to workers in this step, to go on after a peer's turns"),
    "prefix/groups": Metric("groups", "own groups of the batch that go on after a peer's turns"),
    "prefix/reward_mean": Metric("reward", "mean reward of the own answers in groups that go on after a peer's turns"),
    "prefix/solved_share": Metric("share", "groups that go on after a peer's turns in which an answer passed"),
    "prefix/given_turns_mean": Metric("turns", "mean number of a peer's turns after which such groups go on"),
    "prefix/left_turns_mean": Metric("turns", "mean number of further turns that the peer took to its success"),
    "prefix/own_turns/{task}": Metric(
        "turns", "number of a peer's last turns that the policy plays itself, where `sharing.prefix.start` lets it grow"
    ),
    "prefix/unbegun_groups/{reason}": Metric(
        "groups",
        "groups after a peer's turns given up in this step before they began (`unequal`: the environment did not"
        " say what it said to the peer)",
    ),
    "sharing/asked_rows": Metric("answers", "own answers of this step that a teacher was asked to score"),
    "sharing/scored_rows": Metric("answers", "asked answers with the teacher's log-probs", True),
    "sharing/absent_rows": Metric("answers", "asked answers not scored in time"),
    "sharing/unscored_rows": Metric("answers", "asked answers that the teacher's tokens cannot express"),
    "sharing/gated_rows": Metric("answers", "scored answers not distilled: their teacher agrees on too few spans"),
    "sharing/agreement/{source}": Metric("share", "spans of scored answers on which this teacher and the policy agree"),
    "sharing/unit_tokens": Metric(
        "share", "scored tokens for which teachers told likely next units, as bytes, that own tokens express"
    ),
    "sharing/unit_mass": Metric("share", "teachers' probability of these units, in the mean over such tokens"),
    "regime/{count}": Metric("count", "one count of this step that the sharing regime itself defines"),
    "align/rejected": Metric("records", "peers' answers of this step that own tokens cannot express, or only in part"),
    # learner: what sharing costs, per peer that an answer came from in this step
    "align/rows/{source}": Metric("answers", "answers of this peer that the step examined"),
    "align/rejected_share/{source}": Metric(
        "share", "examined answers that were sent and cannot be used: not expressible in own tokens, or cut"
    ),
    "align/rejected/{reason}/{source}": Metric(
        "answers",
        "answers of the peer rejected for this reason (`cut`: longer than the own limit; `withheld`: only their"
        " rewards were sent)",
    ),
    "align/trace_rejected/{reason}/{source}": Metric("answers", "answers of the peer whose log-probs are not sound"),
    "align/flagged/{flag}/{source}": Metric("answers", "answers trained on that carry this flag of the alignment"),
    "align/one_to_one_tokens/{source}": Metric("share", "own tokens that cover exactly one token of the peer", True),
    "align/one_to_one_bytes/{source}": Metric("share", "bytes in own tokens that cover exactly one token of the peer"),
    "align/one_to_many_tokens/{source}": Metric("share", "own tokens of which several cover one token of the peer"),
    "align/many_to_one_tokens/{source}": Metric("share", "own tokens that cover several tokens of the peer"),
    "align/many_to_many_tokens/{source}": Metric("share", "own tokens in spans of several tokens on both sides"),
    "align/length_ratio/{source}": Metric("1", "own tokens per token of the peer, in the same text"),
    "align/receiver_tokens/{source}": Metric("tokens", "own tokens of the peer's answers trained on"),
    "align/bytes/{source}": Metric("bytes", "bytes of text of the peer's answers trained on"),
    "align/spans/{source}": Metric("spans", "spans of the peer's answers trained on"),
    "align/peer_nats_per_byte/{source}": Metric("nats/byte", "log-prob that the peer gave its own answers, per byte"),
    "align/dropped_nats/{source}": Metric("nats", "log-prob of the peer's tokens that have no place in own tokens"),
    "align/gap_nats_per_byte/{source}": Metric("nats/byte", "own minus peer's log-prob of the answers, per byte", True),
    "align/gap_nats_per_token/{source}": Metric(
        "nats/token", "own minus peer's log-prob of the answers, per own token"
    ),
    "align/span_std_nats/{source}": Metric("nats", "standard deviation over spans of own minus peer's log-prob"),
    "align/span_p95_nats/{source}": Metric(
        "nats", "95th percentile over spans of the size of own minus peer's log-prob"
    ),
    "align/outside_band/{source}": Metric(
        "share", "spans whose ratio of own to peer's probability lies outside [0.8, 1.2]"
    ),
    "align/sequence_ess/{source}": Metric("share", "effective sample size of the answers' ratios, over their number"),
    "align/span_ess/{source}": Metric("share", "effective sample size of the spans' ratios, over their number"),
    "exchange/lost_s": Metric("s", "time since the last message of the exchange; 0 while it answers"),
    "time/step_s": Metric("s", "time of the whole step, waiting included"),
    "time/wait_for_groups_s": Metric("s", "part of the step spent waiting for own groups", True),
    "time/wait_for_peers_s": Metric("s", "part of the step spent waiting for peers"),
    "time/wait_for_turn_s": Metric("s", "part of the step spent waiting for a turn on a device that others use too"),
    "time/move_s": Metric("s", "part of the step spent moving tensors to a shared device, and off it after the step"),
    "time/form_s": Metric("s", "part of the step spent making training rows of own groups and of peers' records"),
    "time/train_s": Metric("s", "part of the step spent packing rows, in forward, backward and updates", True),
    "time/pack_s": Metric("s", "part of `time/train_s` spent laying rows out, by the first rank's clock"),
    "time/forward_s": Metric("s", "part of `time/train_s` spent in forward passes"),
    "time/backward_s": Metric("s", "part of `time/train_s` spent in backward passes"),
    "time/update_s": Metric("s", "part of `time/train_s` spent summing gradients and in the optimizer"),
    "time/publish_s": Metric("s", "part of the step spent publishing weights", True),
    "time/checkpoint_s": Metric("s", "part of the step spent handing over a checkpoint, and waiting for the last one"),
    "rate/trained_tokens_s": Metric("tokens/s", "answer tokens trained on per second of the step", True),
    "rate/mfu": Metric("share", "part of the GPU's peak floating-point rate that training passes use"),
    "memory/learner_peak_mib": Metric(
        "MiB", "peak memory of the first rank: of its GPU in this step, or of its process since its start"
    ),
    "rate/steps_per_hour": Metric("steps/h", "steps per hour at the pace of this step"),
    # rollout worker
    "rate/rollout_tokens_s": Metric("tokens/s", "sampled tokens of delivered groups per second since the start", True),
    "rollout/groups": Metric("groups", "groups delivered to the learner since the worker started"),
    "rollout/tokens": Metric("tokens", "sampled tokens of the groups delivered since the worker started"),
    "rollout/slots": Metric("slots", "requests that this worker may run at once by its lease"),
    "rollout/running": Metric("answers", "answers that the engine samples now"),
    "rollout/waiting": Metric("answers", "answers that the engine holds and does not sample yet"),
    "rollout/cache_share": Metric("share", "engine's key-value cache in use; 0 where a begun answer never lacks room"),
    "rollout/reused_prompt_share": Metric(
        "share", "prompt tokens that the engine had computed before, for earlier turns or the same prompt"
    ),
    "rollout/busy_share": Metric("share", "time since the worker started in which answers were in flight"),
    "rollout/idle_s": Metric("s", "time with no answer in flight since the worker started"),
    "rollout/held_out_share": Metric("share", "time of used slots that held-out answers took since the worker started"),
    "rollout/engine_restarts": Metric("restarts", "restarts of this worker's engine after it was lost"),
    "weights/canary_max_abs_nats": Metric("nats", "largest gap between log-probs of engine and learner on the canary"),
    "weights/canary_mean_abs_nats": Metric("nats", "mean gap between log-probs of engine and learner on the canary"),
    "weights/canary_noise_nats": Metric("nats", "mean gap between two number formats of the learner: rounding alone"),
    "weights/canary_missing_share": Metric(
        "share", "part of the last update that the engine's scores of the canary lack; about 0 is right"
    ),
    "weights/canary_missing_error": Metric("share", "standard error of `weights/canary_missing_share`"),
    "weights/canary_warnings": Metric("updates", "updates whose canary was off although every byte was right"),
    "weights/versions_not_told": Metric(
        "updates", "updates proved by the canary alone, whose noise hid the difference from the version before"
    ),
    "weights/compared_share": Metric("share", "tensors whose bytes in the engine were compared, at the last update"),
    "weights/update_s": Metric("s", "time to load the last weight update into the engine"),
    "weights/refused": Metric("updates", "weight updates refused since the worker started"),
    "weights/by_broadcast": Metric("updates", "weight updates that came by broadcast since the worker started"),
    "weights/by_adapters": Metric("updates", "weight updates that came as adapters alone since the worker started"),
    "weights/by_files": Metric("updates", "weight updates that came whole in files since the worker started"),
    "weights/failed_broadcasts": Metric("updates", "broadcasts of weights that failed since the worker started"),
    "scoring/requests": Metric("requests", "score requests of peers answered since the worker started"),
    "scoring/tokens": Metric("tokens", "answer tokens scored for peers since the worker started"),
    "scoring/refused_answers": Metric("answers", "peers' answers that own tokens cannot express, since the start"),
    "scoring/dropped_requests": Metric("requests", "score requests of peers not answered since the worker started"),
    "scoring/busy_s": Metric("s", "time spent scoring for peers since the worker started"),
    "exchange/too_large": Metric("records", "records too large to be sent to peers, since the worker started"),
    "exchange/dropped": Metric("records", "records dropped as the exchange took none, since the worker started"),
    "plain/answers": Metric("answers", "answers to requests outside of episodes since the worker started"),
    "plain/tokens": Metric("tokens", "tokens sampled for requests outside of episodes since the worker started"),
    "plain/scored_tokens": Metric("tokens", "given tokens scored for requests outside of episodes since the start"),
    # rollout worker: answers that are verified in processes of their own; totals since the worker started
    "verify/answers": Metric("answers", "answers that verifier processes have judged or failed on"),
    "verify/pending": Metric("answers", "answers that are at a verifier process or wait for one"),
    "verify/judge/requests": Metric("requests", "requests to judge models"),
    "verify/judge/prompt_tokens": Metric("tokens", "prompt tokens of judge models, as their servers count them"),
    "verify/judge/completion_tokens": Metric("tokens", "tokens that judge models wrote, as their servers count them"),
    "verify/judge/cached": Metric("answers", "answers whose reward was known from an equal earlier question"),
    "verify/failures/{kind}": Metric("answers", "answers for which the verifier gave no reward, by kind of failure"),
    "environment/episodes": Metric("episodes", "episodes that the worker's environments have opened"),
    "environment/turns": Metric("turns", "turns of the policy that environments have answered"),
    "environment/tool_errors": Metric("calls", "tool calls that environments answered by an error"),
    "environment/replays": Metric("episodes", "episodes played again because their process was lost"),
    "environment/processes": Metric("processes", "environment processes that the worker has started"),
    "environment/ends/{reason}": Metric("episodes", "episodes that ended, or failed, in their environment, by reason"),
    # gateway: agents that ask policies; totals since the gateway started
    "gateway/offered": Metric("episodes", "episodes that workers have offered to agents"),
    "gateway/turns": Metric("turns", "turns of policies that agents have asked for"),
    "gateway/branches": Metric("requests", "requests in which agents rewrote their conversation"),
    "gateway/refused/{code}": Metric("requests", "requests that the gateway refused, by error code"),
    "gateway/ends/{reason}": Metric("episodes", "episodes that an agent took, by how they ended"),
    "gateway/expired": Metric("episodes", "episodes given up because their agent fell silent, or its process ended"),
    "gateway/playing": Metric("episodes", "episodes that agents play now"),
    "gateway/offered_now": Metric("episodes", "episodes that wait for an agent now"),
    "gateway/agents_waiting": Metric("agents", "requests of agents that wait for an episode now"),
    "gateway/plain/requests": Metric("requests", "requests outside of episodes that were answered"),
    "gateway/plain/answers": Metric("answers", "answers to requests outside of episodes, scored texts included"),
    "gateway/plain/tokens": Metric("tokens", "tokens sampled for requests outside of episodes; nobody trains on them"),
    "gateway/plain/scored_tokens": Metric("tokens", "given tokens scored for requests outside of episodes"),
    "gateway/plain/tried_again": Metric("answers", "answers asked of another worker because the first worker was lost"),
    "gateway/plain/waiting": Metric("answers", "answers to requests outside of episodes that have not come yet"),
    "gateway/plain/kept_versions": Metric("versions", "earlier versions served from their checkpoints, or loading"),
    "gateway/agent_processes": Metric("processes", "living agent processes that the run has started"),
    # learner, or the worker of a frozen policy: an evaluation
    "eval/accuracy": Metric("share", "held-out answers that the verifier accepts", True),
    "eval/accuracy/{task}": Metric("share", "one task's held-out answers that the verifier accepts", True),
    "eval/pass@{k}": Metric("share", "held-out prompts that k answers solve, estimated from several answers to each"),
    "eval/avg@{n}": Metric("share", "held-out answers that the verifier accepts, with n answers to each prompt"),
    "eval/maj@{n}": Metric("share", "held-out prompts whose most frequent of n answers the verifier accepts"),
    "eval/tied_majorities": Metric("prompts", "held-out prompts with several equally most frequent answers"),
    "eval/own_token_share": Metric("share", "tokens of held-out answers by the evaluated version, not a newer one"),
    "eval/missing_answers": Metric("answers", "held-out answers that did not come in this evaluation"),
    "eval/time_s": Metric("s", "time of the evaluation, from its start to the last answer"),
    # exchange daemon; totals since the daemon started
    "exchange/records": Metric("records", "records that the exchange holds", True),
    "exchange/used_bytes": Metric("bytes", "bytes of records that the exchange holds"),
    "exchange/refused": Metric("records", "records that the exchange refused"),
    "exchange/evicted": Metric("records", "records that the exchange evicted"),
    "exchange/unserved_requests": Metric("requests", "score requests that no worker has been given yet"),
    "exchange/file_bytes": Metric("bytes", "length of the exchange's file and of SQLite's log beside it"),
    "exchange/unstored_puts": Metric("messages", "messages with records that wait to be stored"),
    "exchange/abandoned_deliveries": Metric(
        "records", "records whose delivery was given up: their reader did not acknowledge it, or too much waited for it"
    ),
    "exchange/malformed": Metric("messages", "messages and connections that the exchange dropped, for any reason"),
    "exchange/flow_records/{source}/{receiver}": Metric("records", "records of the source that the receiver got", True),
    "exchange/flow_bytes/{source}/{receiver}": Metric("bytes", "bytes of records of the source that the receiver got"),
    "exchange/flow_hit_rate/{source}/{receiver}": Metric(
        "share", "prompts that the receiver asked for and the source answered", True
    ),
    "exchange/flow_age_versions/{source}/{receiver}": Metric("versions", "mean age of the delivered records", True),
    # allocator, per policy
    "allocation/slots": Metric("slots", "rollout slots granted to the policy", True),
    "allocation/held_slots": Metric("slots", "most slots that the policy's workers may have in use under any lease"),
    "allocation/demand_slots": Metric("slots", "slots that would just keep the policy's learner busy; 0 while unknown"),
    "allocation/target_units": Metric("units", "units that the policy should have"),
    "allocation/held_units": Metric("units", "units that the policy holds"),
    "allocation/demand_units": Metric("units", "units that would just keep the policy's learner busy; 0 while unknown"),
    "allocation/target_units/{type}": Metric("units", "target units of this type; only where there are several types"),
    "allocation/held_units/{type}": Metric("units", "held units of this type; only where there are several types"),
    "allocation/unit_tokens_per_s/{type}": Metric(
        "tokens/s", "tokens per second of a full engine on a unit of this type; 0 while unknown"
    ),
    "allocation/begun_leases": Metric("leases", "leases of units granted to the policy since the allocator started"),
    "allocation/ended_leases/{why}": Metric(
        "leases", "leases of units to the policy that ended for this reason, since the allocator started"
    ),
    "allocation/idle_share/{unit}": Metric(
        "share", "time since the value before in which the unit had no policy, or its engine no answer in flight"
    ),
    "allocation/slept": Metric("engines", "engines put to sleep on their units so far, on all hosts"),
    "allocation/woken": Metric("engines", "engines woken up again so far, on all hosts"),
    "allocation/failed_sleeps": Metric("engines", "engines that did not fall asleep in time, or could not, and ended"),
    "allocation/failed_wakes": Metric("engines", "engines that did not wake up in time and were killed"),
    "allocation/progress": Metric("1", "busy share of the policy's learner: busy / (busy + waiting for data)"),
    "allocation/supply_progress": Metric("1", "part of the learner's need that its engines met over the rule's window"),
    "allocation/bound": Metric("1", "highest progress that the measured demands allow the slowest policy"),
    "allocation/gain": Metric(
        "share",
        "relative gain in worth of the newest candidate; 1 where it has no measure or the split before was not allowed",
    ),
    "allocation/trained_share": Metric("share", "generated groups that are trained on; the others are too stale"),
    "allocation/epoch": Metric("epoch", "epoch of the policy's newest lease"),
    "allocation/moves": Metric("slots", "slots that the policy gained (below 0: lost) by this decision"),
    "allocation/moves_because/{why}": Metric("slots", "slots of `allocation/moves`, by reason; only if there are any"),
    # supervisor
    "process/restarts": Metric("restarts", "processes of the run started again since its start", True),
    "process/pss_mib": Metric("MiB", "proportional memory (PSS) of the run's whole process tree"),
    "host/cpu_share/{host}": Metric("share", "busy share of all cores of the host since the value before"),
    "host/memory_mib/{host}": Metric("MiB", "memory in use, of the host or of this job's part of it"),
    "host/memory_free_mib/{host}": Metric("MiB", "free memory, of the host or of this job's part of it"),
    "host/disk_free_mib/{host}": Metric("MiB", "free room on the disk of the run folder"),
    "gpu/busy_share/{gpu}": Metric("share", "time in which the GPU ran anything, over its driver's last sample"),
    "gpu/memory_mib/{gpu}": Metric("MiB", "memory of the GPU that is in use"),
    "gpu/memory_free_mib/{gpu}": Metric("MiB", "memory of the GPU that is free"),
    "gpu/power_w/{gpu}": Metric("W", "power that the GPU draws"),
    "process/count": Metric("processes", "processes of the run that are alive"),
    "tracker/points/{tracker}": Metric("points", "values of metrics that the tracker took in this attempt"),
    "tracker/lost_points/{tracker}": Metric("points", "values of metrics that the tracker, failed or hung, lost"),
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

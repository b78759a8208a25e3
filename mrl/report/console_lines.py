"""A run as plain lines, for logs and for output that is no terminal."""

from mrl.config.replay_table import is_replayed
from mrl.records.telemetry_messages import MetricsRecord
from mrl.report.number_format import count, elapsed, fixed, percent, seconds
from mrl.report.progress import STALE_AFTER_S, MissedPair, Progress, RoleSign, is_step, kind_of

SLOW_VERDICT_S = 5.0
"""Seconds of waiting for verdicts from which the waiting role is named beside the learners."""


def step_line(record: MetricsRecord, steps: int) -> str | None:
    """Return the line of one learner step; None for any other record.

    Example: `qwen step 12/320 reward 0.41 loss -0.013 stale 1.2/2 rescues 7 tok/s 5.1k wait 0.05s`. `stale` is the mean
    and the maximum of staleness in versions, `tok/s` counts trained tokens, `wait` is the time without own groups.
    """
    if not is_step(record.role, record.values):
        return None
    get = record.values.get
    return (
        f"{record.policy} step {record.step}/{steps}"
        f" reward {fixed(get('reward/mean'))} loss {fixed(get('loss/total'), 3)}"
        f" stale {fixed(get('staleness/mean_versions'), 1)}/{count(get('staleness/max_versions'))}"
        f" rescues {count(get('sharing/rescues'))} tok/s {count(get('rate/trained_tokens_s'))}"
        f" wait {seconds(get('time/wait_for_groups_s'))}"
        + (f" withheld {count(withheld)}" if (withheld := get("sharing/withheld_answers", 0.0)) else "")
        + (f" unjudged {percent(unjudged)}" if (unjudged := get("verify/failed_share", 0.0)) else "")
    )


def withheld_note(policy: str, answers: float) -> str:
    """Return the note on a policy's successes that were kept from its peers; empty where there are none."""
    if not answers:
        return ""
    return (
        f"{policy} withheld {count(answers)} correct answers from its peers because they were cut at the token limit"
        " (sharing.sgt.finished_only); increase rollout.max_new_tokens, or set finished_only = false"
    )


def missed_note(missed: MissedPair, regime: str) -> str:
    """Return the note on two policies that miss each other: how the regime trains then, and keys that help."""
    table = f"sharing.{regime}"
    met = (
        f"{missed.receiver} found records of {missed.source} on only {count(missed.hits)} of {count(missed.asked)}"
        f" prompts by step {missed.step}, so {regime} trains it like independent"
    )
    if is_replayed(missed.source):
        return f"{met}: the run in sharing.replay.run has hardly any records on the prompts of this run"
    return (
        f"{met}: the policies train at different paces. Raise"
        f" {table}.peer_hold_versions for the faster one or {table}.max_age_versions for the slower one,"
        ' or set allocation.objective = "static" (equal slots) or run.sync = true'
    )


def accuracy_line(record: MetricsRecord) -> str | None:
    """Return the line of one evaluation, `qwen step 40 held-out 0.38 chain_sum 0.61`; None for any other record."""
    values = {
        name.removeprefix("eval/accuracy"): value
        for name, value in record.values.items()
        if name.startswith("eval/accuracy")
    }
    if "" not in values:
        return None
    tasks = "".join(f" {name[1:]} {fixed(value)}" for name, value in sorted(values.items()) if name)
    return f"{record.policy} step {record.step} held-out {fixed(values[''])}{tasks}"


def heartbeat_line(progress: Progress, now_s: float) -> str:
    """Return one line: learners, flow of the exchange, shares of capacity, roles that are silent or slow, restarts."""
    started_s = now_s if progress.started_s is None else progress.started_s
    parts = [f"pipeline {elapsed(now_s - started_s)}"]
    for name, policy in progress.policies.items():
        parts.append(f"{name} {policy.step}/{progress.steps} {state(progress, progress.learner_of(name), now_s)}")
    parts += [_exchange(progress), progress.allocation.line(now_s)]
    for sign in progress.roles.values():
        if sign.beat.awaiting == "verdicts" and sign.for_s(now_s) >= SLOW_VERDICT_S:
            parts.append(f"{sign.beat.role} {state(progress, sign, now_s)}")
        elif kind_of(sign.beat.role) != "learner" and progress.is_silent(sign, now_s):
            parts.append(f"{sign.beat.role} silent for {seconds(sign.age_s(now_s))}")
    if restarts := progress.process.get("restarts"):
        parts.append(f"restarts {count(restarts)}")
    return " | ".join(part for part in parts if part)


def state(progress: Progress, sign: RoleSign | None, now_s: float) -> str:
    """Describe what a role does or awaits: `training 0.3s`, `awaiting groups from worker/llama/0 1.2s of 300s`."""
    if sign is None:
        return "starting"
    text = doing(sign)
    if progress.is_silent(sign, now_s):
        return f"silent for {seconds(sign.age_s(now_s))}, was {text}"
    if sign.age_s(now_s) > STALE_AFTER_S:
        return "finished"
    bound = f" of {seconds(sign.beat.bound_s)}" if sign.beat.bound_s > 0 else ""
    return f"{text} {seconds(sign.for_s(now_s))}{bound}"


def doing(sign: RoleSign) -> str:
    """Describe what a role does or awaits by its last heartbeat, without durations."""
    if not sign.beat.awaiting:
        return sign.beat.doing
    return f"awaiting {sign.beat.awaiting}" + (f" from {sign.beat.whom}" if sign.beat.whom else "")


def _exchange(progress: Progress) -> str:
    if not progress.exchange and not progress.flows:
        return ""
    flows = "".join(
        f" {source}->{receiver} {percent(flow.get('hit_rate'))}"
        for (source, receiver), flow in sorted(progress.flows.items())
    )
    return f"exchange {count(progress.exchange.get('records'))} records{flows}"

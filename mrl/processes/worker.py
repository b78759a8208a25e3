"""A rollout worker of one policy.

Owns: one engine in this process, and the groups and held-out answers that its learner has not acknowledged.
Speaks: work requests and groups to the learner, records and scores to the exchange, lease requests to the allocator,
    answers to requests outside of episodes to the gateway.
Waits for: granted work and a lease, both bounded; in a synchronous run the exchange's acknowledgement of published
    records. The worker of a frozen policy evaluates it once and waits for score requests, without a bound: an idle
    worker costs nothing.
Unblocked by: the learner's next version (which raises the staleness budget), the allocator's next grant, the exchange.
If it dies: the supervisor starts it again; the learner grants its work anew.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from mrl.alignment.receiver import Receiver
from mrl.allocation.lease import LeaseHolder, Used
from mrl.config.run_folder import RunFolder
from mrl.config.schema import NO_EVALUATION, RunConfig
from mrl.engines.engine import Engine
from mrl.engines.server_timeouts import load_timeout_s
from mrl.errors import EngineLost, PeerLost, RoleFailed
from mrl.exchange.client import ExchangeClient
from mrl.gateway.gateway_connection import GatewayConnection
from mrl.metrics.telemetry import Telemetry
from mrl.models.prompting import PromptEncoder
from mrl.processes import role_runtime
from mrl.processes.engines import answers_at_once, build_engine, check_lengths, held_out_decoding, movable
from mrl.processes.episode_setup import direct_codec, own_receiver, peer_renderer, row_tokens, with_episodes
from mrl.processes.planning.time_sharing import device_turn
from mrl.processes.planning.unit_workers import UNIT, UNIT_EPOCH
from mrl.processes.sleep_channel import SleepChannel
from mrl.records.direct_requests import TurnChunk
from mrl.records.evaluation_messages import result_name
from mrl.records.experience import ExperienceRecord
from mrl.records.rollouts import MAX_GROUP_BYTES, ScoredGroup
from mrl.rollout.direct_serving import DirectServing
from mrl.rollout.frozen import FROZEN, FrozenLoop
from mrl.rollout.frozen_evaluation import FrozenEvaluation
from mrl.rollout.link import WorkerLink
from mrl.rollout.loop_options import LoopOptions
from mrl.rollout.peer_scoring import Scorer
from mrl.rollout.sampling import Sampler
from mrl.rollout.time_shared_engine import Movable, TimeSharedEngine
from mrl.rollout.worker_counters import WorkerTotals
from mrl.rollout.worker_lease import FirstTurn, LeasedAnswers, WholeBatch
from mrl.rollout.worker_loop import RolloutLoop
from mrl.sharing.context import sharing_context
from mrl.sharing.regime import Author, Regime
from mrl.sharing.regimes import build_regime, scorers
from mrl.tasks.environments.gateway_location import GatewayLocation
from mrl.tasks.held_out import measure_of
from mrl.tasks.pool import TaskPool, build_pool
from mrl.weights.canary_texts import NUM_PROMPTS, longest_row, texts_of_prompts
from mrl.weights.frozen_manifest import describe_folder
from mrl.weights.manifest import Manifest

FLUSH_SLICE_S = 0.5
TOKENS_PER_TOKEN = 4
"""Longest text of a peer that is scored, as a multiple of the tokens of the longest answer of any policy."""


def main(run_folder: Path, policy: str, index: int) -> int:
    """Sample for one policy until told to stop."""
    role = f"worker/{policy}/{index}"

    def body(config: RunConfig, folder: RunFolder, closing: ExitStack) -> int:
        return _work(config, folder, closing, policy, role)

    return role_runtime.run_role(run_folder, role, policy, body)


def build_sampler(
    config: RunConfig,
    policy: str,
    pool: TaskPool,
    make_engine: Callable[[Receiver], Engine],
    *,
    tell: Callable[[TurnChunk], None] | None = None,
) -> tuple[Sampler, Receiver]:
    """Build what answers the prompts of a pool: the engine of one policy with its tokenizer, encoder and decoding.

    `tell` receives the turns of episodes piece by piece while they are sampled.
    """
    table = config.policies[policy]
    receiver = own_receiver(table)
    encoder = PromptEncoder(Path(table.model), table.prompt)
    check_lengths(config, policy, pool, encoder.token_ids)
    engine = with_episodes(make_engine(receiver), config, policy, pool, receiver, tell=tell)
    words = peer_renderer(config, policy, receiver)
    sampler = Sampler(
        policy,
        config.run.seed,
        engine,
        pool,
        encoder.token_ids,
        receiver.completion_bytes,
        table.prompt.stop_bytes,
        held_out_decoding(config, policy),
        None if words is None else words.read,
    )
    return sampler, receiver


def _work(config: RunConfig, folder: RunFolder, closing: ExitStack, policy: str, role: str) -> int:
    stop = role_runtime.stop_event()
    telemetry = role_runtime.connect_telemetry(folder, role, policy, closing)
    table = config.policies[policy]
    is_server = table.rollout.engine != "embedded"
    telemetry.doing("starting")
    link = None if table.frozen else _connect_learner(folder, policy, role, closing)  # tells it that the engine starts
    line = GatewayConnection(folder.path) if config.has_gateway and not table.frozen else None
    if line is not None:
        closing.callback(line.close)
    # Before the engine is there, so that the host never holds the model twice.
    own = _own_folder(config, policy) if table.frozen and is_server else None
    totals = WorkerTotals(time.monotonic())
    lease = LeaseHolder(role, policy, unit=os.environ.get(UNIT, ""), unit_epoch=int(os.environ.get(UNIT_EPOCH, 0)))
    lease.rest()
    if link is not None:
        _connect_allocator(folder, role, lease, totals, closing)
    first_turn = FirstTurn(link, lease)
    engine = partial(
        _engine, config, policy, folder=folder, telemetry=telemetry, first=first_turn, stopping=stop.is_set
    )
    try:
        with telemetry.awaiting("engine", whom=table.rollout.engine, bound_s=table.rollout.server.start_s):
            sampler, receiver = _sampler(config, folder, policy, engine, line=line, closing=closing)
    except EngineLost:
        if not stop.is_set():
            raise
        return 0
    exchange = role_runtime.connect_exchange(folder, role, policy, closing)
    scorer = _scorer(config, sampler, receiver, exchange)
    if table.frozen:
        assert scorer is not None, "checked before the start: a frozen policy scores"
        exchange.announce(FROZEN)
        evaluation = _frozen_evaluation(config, folder, sampler, telemetry)
        FrozenLoop(scorer, sampler.engine, telemetry, manifest=own, evaluation=evaluation).run(stop.is_set)
        return 0
    assert link is not None, "a policy that learns"
    regime = build_regime(config.sharing, sharing_context(config, policy, receiver))
    sleep_line = SleepChannel.of_this_process()
    options = LoopOptions(
        rest=None if sleep_line is None else _UnitRest(sleep_line, lease, stop.is_set),
        max_answers=_max_answers(config, policy, lease),
        has_lost_lease=lambda: not config.run.sync and lease.is_lost(time.monotonic()),
        rests_unleased=not is_server,
        publish=_publisher(regime, receiver, policy, _sender(config, exchange, telemetry, stop)),
        losses=exchange.losses,
        scorer=scorer,
        max_staleness_versions=table.learner.max_staleness_versions,
        plain=_plain_serving(config, line, sampler, receiver, wake=link.nudge),
        held_out_share=None if config.evaluation.every == NO_EVALUATION else config.evaluation.share,
        in_step=config.run.sync,
    )
    size, bound_s = table.rollout.group_size, _learner_bound_s(config, policy)
    loop = RolloutLoop(sampler, link, telemetry, options, totals, group_size=size, learner_bound_s=bound_s)
    lease.wake(int(os.environ.get(UNIT_EPOCH, 0)), time.monotonic())
    _sample(loop, lease, sampler.engine, stop)
    return 0


def _sampler(
    config: RunConfig,
    folder: RunFolder,
    policy: str,
    make_engine: Callable[[Receiver], Engine],
    *,
    line: GatewayConnection | None,
    closing: ExitStack,
) -> tuple[Sampler, Receiver]:
    pool = build_pool(config.tasks, config.pool, meeting=GatewayLocation(folder.path, policy))
    closing.callback(pool.close)
    sampler, receiver = build_sampler(config, policy, pool, make_engine, tell=None if line is None else line.send)
    closing.callback(sampler.engine.close)
    return sampler, receiver


def _sample(loop: RolloutLoop, lease: LeaseHolder, engine: Engine, stop: threading.Event) -> None:
    """Sample until told to stop. Raises RoleFailed where the worker's unit was lost meanwhile."""
    loop.run(lambda: stop.is_set() or lease.has_lost_unit)
    if lease.has_lost_unit and not stop.is_set():
        raise RoleFailed("the worker was suspended for longer than its lease, so its unit may belong to another worker")
    if UNIT not in os.environ:  # a unit is free once its node has seen this process end
        engine.close()
        lease.give_back(time.monotonic())


def _engine(
    config: RunConfig,
    policy: str,
    receiver: Receiver,
    *,
    folder: RunFolder,
    telemetry: Telemetry,
    first: FirstTurn,
    stopping: Callable[[], bool],
) -> Engine:
    """Start the engine at once, or in its first turn on a shared device."""
    make = partial(build_engine, config, policy, receiver, folder, telemetry.role)
    turn = device_turn(folder, telemetry.role)
    if turn is None:
        return make()

    def in_first_turn() -> Movable:
        first.has_come()
        return movable(make())

    in_turns: Engine = TimeSharedEngine(
        turn, in_first_turn, telemetry=telemetry, stopping=stopping, waits=first.is_awaited
    )
    return in_turns


def _own_folder(config: RunConfig, policy: str) -> Manifest:
    """Return the manifest that a frozen policy's server has to prove; its canary is made from prompts of the pool."""
    table = config.policies[policy]
    encoder, pool = PromptEncoder(Path(table.model), table.prompt), build_pool(config.tasks, config.pool)
    prompts = [encoder.token_ids(pool.prompt_at(place).content) for place in range(min(len(pool), NUM_PROMPTS))]
    pool.close()
    server = table.rollout.server
    texts = texts_of_prompts(prompts, max_row_tokens=longest_row(server.context_tokens))
    return describe_folder(Path(table.model), policy, FROZEN, texts, server.dtype)


def _learner_bound_s(config: RunConfig, policy: str) -> float:
    """Return seconds longer than the policy's learner may take to give up, to start again and to load its model."""
    table, sync_s = config.policies[policy], 3 * config.run.sync_timeout_s if config.run.sync else 0.0
    start_s = config.supervision.start_s + load_timeout_s(Path(table.model))
    return 2 * table.learner.data_timeout_s + start_s + sync_s


class _UnitRest:
    """Sleep and wake up as the node of the worker's unit orders."""

    def __init__(self, line: SleepChannel, lease: LeaseHolder, stopping: Callable[[], bool]) -> None:
        self._line, self._lease, self._stopping = line, lease, stopping
        self._epoch = 0

    def is_due(self) -> bool:
        return self._line.is_due()

    def refuse(self) -> None:
        self._line.refuse()

    def sleep(self) -> bool:
        self._lease.rest()
        epoch = self._line.rest(self._stopping)
        if epoch is None and not self._stopping():
            raise PeerLost("the node process of this worker's unit is gone, and only it may wake the worker")
        self._epoch = epoch or 0
        return epoch is not None

    def awake(self) -> None:
        self._lease.wake(self._epoch, time.monotonic())
        self._line.awake(self._epoch)


def _frozen_evaluation(
    config: RunConfig, folder: RunFolder, sampler: Sampler, telemetry: Telemetry
) -> FrozenEvaluation | None:
    """Return the evaluation by a frozen policy's first worker, or None; once a run, since weights never change."""
    is_first = telemetry.role == f"worker/{sampler.policy}/0"
    is_there = (folder.evaluation / result_name(sampler.policy, FROZEN.step)).exists()
    if not is_first or is_there or config.evaluation.every == NO_EVALUATION:
        return None
    return FrozenEvaluation(
        sampler,
        telemetry,
        FROZEN,
        sampler.pool.held_out,
        folder=folder.evaluation,
        max_answers=answers_at_once(config, sampler.policy),
        share=config.evaluation.share,
        measure=measure_of(config),
    )


def _scorer(config: RunConfig, sampler: Sampler, receiver: Receiver, exchange: ExchangeClient) -> Scorer | None:
    """Return what answers the peers' score requests; None where the regime does not let this policy score."""
    policy = sampler.policy
    if policy not in scorers(config.sharing, config.policies):
        return None
    exchange.subscribe(["score_request"])
    longest = max(table.rollout.max_new_tokens for table in config.policies.values())
    keeps_step = config.run.sync and not config.policies[policy].frozen
    words, most = peer_renderer(config, policy, receiver), row_tokens(config.policies[policy])
    return Scorer(
        sampler,
        receiver,
        exchange,
        max_answer_tokens=TOKENS_PER_TOKEN * longest,
        keeps_step=keeps_step,
        renderer=None if words is None else replace(words, max_episode_tokens=most),
        row_tokens=most,
    )


def _plain_serving(
    config: RunConfig, line: GatewayConnection | None, sampler: Sampler, receiver: Receiver, *, wake: Callable[[], None]
) -> DirectServing | None:
    """Return what answers requests outside of episodes, or None; every request that arrives wakes the worker."""
    if line is None or not config.gateway.serve:
        return None
    codec = direct_codec(config, sampler.policy, receiver)

    def heard() -> None:
        sampler.engine.nudge()
        wake()

    line.on_heard = heard
    group_size = config.policies[sampler.policy].rollout.group_size
    return DirectServing(line, codec, sampler.engine, share=config.gateway.share, group_size=group_size)


def _max_answers(config: RunConfig, policy: str, lease: LeaseHolder) -> Callable[[int], int]:
    """Return the limit of answers in flight: the lease's, or the whole batch in a synchronous run, for equal bits."""
    table = config.policies[policy]
    if config.run.sync:
        return WholeBatch(lease, table.learner.fresh_groups * table.rollout.group_size)
    return LeasedAnswers(lease, table.rollout.group_size)


def _sender(
    config: RunConfig, exchange: ExchangeClient, telemetry: Telemetry, stop: threading.Event
) -> Callable[[Sequence[ExperienceRecord]], None]:
    """Return the call that publishes records; in a synchronous run it returns only once the exchange has them."""
    if not config.run.sync:
        return exchange.publish
    bound_s = config.run.sync_timeout_s

    def send(records: Sequence[ExperienceRecord]) -> None:
        deadline_s = time.monotonic() + bound_s
        with telemetry.awaiting("acknowledgement", whom="exchange", bound_s=bound_s):
            exchange.publish(records, room_within_s=bound_s)
            while not stop.is_set() and not exchange.flush(FLUSH_SLICE_S):
                if time.monotonic() > deadline_s:
                    raise PeerLost(f"the exchange did not acknowledge the published records within {bound_s:g} s")

    return send


def _connect_learner(folder: RunFolder, policy: str, role: str, closing: ExitStack) -> WorkerLink:
    work = WorkerLink(role, learner=f"learner/{policy}")
    to_learner = partial(role_runtime.link, folder, f"learner-{policy}", identity=role, closing=closing)
    client = to_learner(on_message=work.on_message, on_tick=work.on_tick, max_message_bytes=MAX_GROUP_BYTES)
    work.open(client.post, client.restart)
    return work


def _connect_allocator(
    folder: RunFolder, role: str, lease: LeaseHolder, totals: WorkerTotals, closing: ExitStack
) -> None:
    def used() -> Used:
        return Used(totals.tokens, totals.slot_seconds, totals.busy_s, totals.sampled_tokens, totals.full_answers)

    client = role_runtime.link(
        folder,
        "allocator",
        identity=role,
        on_message=lambda body: lease.on_message(body, time.monotonic()),
        on_tick=lambda now_s: lease.on_tick(now_s, used()),
        closing=closing,
    )
    lease.open(client.post, client.restart)


def _publisher(
    regime: Regime, receiver: Receiver, policy: str, send: Callable[[Sequence[ExperienceRecord]], None]
) -> Callable[[Sequence[ScoredGroup]], None]:
    def publish(groups: Sequence[ScoredGroup]) -> None:
        records: list[ExperienceRecord] = []
        for group in groups:
            author = Author(
                policy=policy,
                fingerprint=receiver.fingerprint,
                verifier=group.task,
                make_id=_record_ids(policy, group.ticket),
                now_unix_s=time.time(),
            )
            records += regime.publish(group, author)
        if records:
            send(records)

    return publish


def _record_ids(policy: str, ticket: str) -> Callable[[], str]:
    """Return a maker of record ids, which are the same when the same group is published again."""
    numbers = itertools.count()
    return lambda: f"{policy}:{ticket}:{next(numbers)}"

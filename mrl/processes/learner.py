"""A learner of one policy: one rank of its process group, started by torchrun.

Owns: parameters, optimizer and version of the policy; which prompts its workers sample; when it is evaluated.
Speaks: grants and acknowledgements to its workers, fetches and version announcements to the exchange, throughput to the
    allocator, published weights and checkpoints to the run folder; its ranks speak torch.distributed among themselves.
Waits for: groups of its own workers, as long as a worker makes progress, and `learner.data_timeout_s` more; after its
    last step their held-out answers, each for at most as long; peers only where the regime has patience, and in a
    synchronous run the other learners, as long as they make progress, and `run.sync_timeout_s` more.
Unblocked by: its workers; in a synchronous run the other learners.
If it dies: the supervisor starts it again from its newest checkpoint, under a new run epoch; peers go on. A synchronous
    run ends with it, and `--resume` takes all policies back to their newest common step.
"""

import json
import os
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple

import structlog

from mrl.allocation.learner_reports import ReportSender
from mrl.config.memory_savings import all_cures
from mrl.config.policy_tables import LearnerTable, PolicyTable
from mrl.config.run_epochs import RunEpochs
from mrl.config.run_folder import RunFolder, socket_file
from mrl.config.schema import NO_EVALUATION, RunConfig
from mrl.engines.server_timeouts import load_timeout_s, timeouts_of
from mrl.exchange.client import ExchangeClient
from mrl.learner.asynchronous_batching import AsynchronousBatching, Batching
from mrl.learner.batches import BatchMaker
from mrl.learner.evaluations import EvaluationPlan, Evaluations
from mrl.learner.held_out_ledger import HeldOutLedger
from mrl.learner.intake import Intake
from mrl.learner.ledger import SamplingLimits, WorkLedger
from mrl.learner.loss import needs_reference
from mrl.learner.prompts.curriculum import curriculum_of
from mrl.learner.prompts.reuse import reuse_of
from mrl.learner.ranks.learner_turn import LearnerTurn
from mrl.learner.ranks.rank_place import rank_place
from mrl.learner.ranks.rendezvous import RendezvousPoint
from mrl.learner.ranks.world import World, join_world
from mrl.learner.references import CanaryReferences
from mrl.learner.sharding import read_policy
from mrl.learner.synchronous_batching import SynchronousBatching
from mrl.learner.trainer import Trainer
from mrl.learner.training_dumps import sample_writer
from mrl.learner.training_loop import FirstRank, Learner, Milestones
from mrl.learner.worker_activity import WaitBounds
from mrl.metrics.telemetry import Telemetry
from mrl.models.device_memory import PLAN, enough_memory
from mrl.models.parameters import adapter_sources, weight_sources
from mrl.models.prompting import PromptEncoder
from mrl.processes import role_runtime
from mrl.processes.episode_setup import own_receiver, peer_renderer
from mrl.processes.planning.plan import rank_role
from mrl.processes.planning.time_sharing import device_turn
from mrl.processes.weight_publishing import publisher_of
from mrl.records.rollouts import MAX_GROUP_BYTES
from mrl.records.version import Version
from mrl.sharing.context import SharingContext, sharing_context
from mrl.sharing.own_objective import own_objective
from mrl.sharing.regime import Regime
from mrl.sharing.regimes import build_regime, shares
from mrl.tasks.held_out import measure_of
from mrl.tasks.pool import TaskPool, build_pool
from mrl.transport.endpoints import publish_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import load_keys
from mrl.transport.server import ServerSocket
from mrl.weights.broadcast import BroadcastPublisher
from mrl.weights.canary_texts import NUM_PROMPTS, longest_row
from mrl.weights.checkpoint_saver import Saver
from mrl.weights.checkpoint_store import MIN_KEPT, Checkpoint, CheckpointStore
from mrl.weights.rollback_step import roll_back_to_common_step
from mrl.weights.training_state import restore_training

GROUP_TIMEOUT_MARGIN_S = 600.0
"""Seconds added for broadcasts in which other ranks wait while the first rank publishes and saves, too."""
PUBLISHED_AND_SAVED = 4
"""Bytes that are written for one version, published once and saved once, as a multiple of the model's files."""
ENGINE_STARTS = 4
"""Starts of an engine that is lost again and again, the first included, before its worker ends."""
STOPPED_EARLY = 143

log = structlog.get_logger()


class _Life(NamedTuple):
    """Arguments shared by the functions that build the parts of a learner process."""

    config: RunConfig
    folder: RunFolder
    policy: str
    telemetry: Telemetry
    closing: ExitStack


def main(run_folder: Path, policy: str, index: int) -> int:
    """Train one policy until its steps are done."""
    role = rank_role(policy, rank_place(os.environ).rank)

    def body(config: RunConfig, folder: RunFolder, closing: ExitStack) -> int:
        return _learn(config, folder, closing, policy, role)

    return role_runtime.run_role(run_folder, role, policy, body)


def _learn(config: RunConfig, folder: RunFolder, closing: ExitStack, policy: str, role: str) -> int:
    stop = role_runtime.stop_event()
    table = config.policies[policy]
    point = _meeting_point(config, folder, policy)
    telemetry = role_runtime.connect_telemetry(folder, role, policy, closing)
    with telemetry.awaiting("ranks", whom=f"the other ranks of {policy}", bound_s=point.bound_s):
        world = join_world(table.device, timeout_s=_group_timeout_s(config, policy), point=point)
    closing.enter_context(world)
    closing.enter_context(world.naming_hosts())
    turn = _own_turn(config, folder, world, telemetry)
    if not turn.begin(stop.is_set):
        return STOPPED_EARLY
    receiver = own_receiver(table)
    context = sharing_context(config, policy, receiver, peer_renderer(config, policy, receiver))
    regime = build_regime(config.sharing, context)
    store = _store(config, folder, policy)
    with _enough_memory("at the start of the learner", policy, table), turn.getting_on():
        trainer = _trainer(config, policy, regime, world)
        start, checkpoint = _start(config, folder, world, store, policy)
        if checkpoint:
            restore_training(trainer.model, trainer.optimizer, checkpoint)
        publisher = publisher_of(config, folder, closing, policy, world)
        first = None
        if world.is_first:
            courier = publisher if isinstance(publisher, BroadcastPublisher) else None
            life = _Life(config, folder, policy, telemetry, closing)
            first = _first_rank(life, regime, context, start=start, checkpoint=checkpoint, courier=courier)
        learner = Learner(
            trainer,
            _milestones(config, policy),
            start,
            first,
            _saver(table.learner, world, store, start, folder.lives(policy)),
            seed=config.run.seed,
            canary=_canary(config, policy, trainer, first),
            publisher=publisher,
            published=adapter_sources if table.rollout.weights == "adapters" else weight_sources,
            turn=turn,
        )
    turn.has(trainer, first.intake.note_progress if first else None)
    if checkpoint:
        learner.restore(checkpoint.state)
    if config.run.sync and first is not None and first.peers is not None:
        first.peers.tell(learner.progress)
    world.watch(bound_s=table.learner.collective_timeout_s, slow_bound_s=_group_timeout_s(config, policy))
    with _enough_memory("in a step", policy, table):
        finished = learner.run(stop.is_set)
    if finished:
        world.close()  # the other ranks are done, while the workers answer what is left of the held-out prompts
        learner.await_evaluation(stop.is_set)
        if first is not None:
            first.intake.say_goodbye()
        world.part(stop.is_set)
    telemetry.doing("done" if finished else "stopped")
    return 0 if finished else STOPPED_EARLY


def _own_turn(config: RunConfig, folder: RunFolder, world: World, telemetry: Telemetry) -> LearnerTurn:
    """Return this learner's turns on its device; any process may keep its turn for as long as it makes progress."""
    table = config.policies[telemetry.policy]
    lease = device_turn(folder, telemetry.role) if table.turns and world.is_first else None
    return LearnerTurn(world, telemetry, lease, shares=table.turns, bound_s=table.learner.data_timeout_s)


def _enough_memory(during: str, policy: str, table: PolicyTable) -> AbstractContextManager[None]:
    """Raises DeviceError, with the settings that the memory plan would name, when memory runs out inside the block."""
    cure = f"{all_cures(table.learner, on_device=table.device == 'cuda')}; {PLAN}"
    return enough_memory(during, where=f"policies.{policy} ({table.model})", cure=cure)


def _trainer(config: RunConfig, policy: str, regime: Regime, world: World) -> Trainer:
    table = config.policies[policy]
    holds_reference = needs_reference(regime.components) and table.learner.lora is None
    return Trainer(
        read_policy(Path(table.model), table.learner, world),
        table.learner,
        regime.components,
        temperature=table.rollout.temperature,
        seed=config.run.seed,
        total_steps=config.run.steps,
        world=world,
        reference=read_policy(Path(table.model), table.learner, world) if holds_reference else None,
    )


def _store(config: RunConfig, folder: RunFolder, policy: str) -> CheckpointStore:
    keep = config.policies[policy].learner.keep_checkpoints
    return CheckpointStore(folder.checkpoints(policy), policy, keep=max(keep, MIN_KEPT) if config.run.sync else keep)


def _saver(table: LearnerTable, world: World, store: CheckpointStore, start: Version, lives: RunEpochs) -> Saver | None:
    """Return the writer of this rank's part of checkpoints; None for a rank whose part an earlier rank holds, too."""
    if world.rank >= table.num_shards:
        return None
    return Saver(store, rank=world.rank, num_ranks=table.num_shards, life=start.run_epoch, on_saved=lives.saved)


def _start(
    config: RunConfig, folder: RunFolder, world: World, store: CheckpointStore, policy: str
) -> tuple[Version, Checkpoint | None]:
    """Return version and checkpoint to start from: the first rank decides, all ranks check the files together."""
    told = None
    if world.is_first:
        store.discard_unfinished()
        candidates = _candidates(config, folder, store, policy)
        told = json.dumps([folder.lives(policy).begin(), candidates]).encode()
    epoch, candidates = json.loads(world.broadcast_bytes(told))
    for step in candidates:
        if _is_sound(store, step, world):
            if step != candidates[0] and world.is_first:
                log.warning(
                    "continuing from an earlier checkpoint", step=step, damaged=candidates[: candidates.index(step)]
                )
            return Version(epoch, step), store.open(step)
    if candidates:
        raise folder.lives(policy).all_damaged(candidates, together=config.run.sync)
    return Version(epoch, 0), None


def _is_sound(store: CheckpointStore, step: int, world: World) -> bool:
    problem = store.problem(step, rank=world.rank, num_ranks=world.size)
    if problem is not None:
        log.warning("checkpoint is damaged", step=step, problem=problem)
    return not world.any(problem is not None)


def _candidates(config: RunConfig, folder: RunFolder, store: CheckpointStore, policy: str) -> list[int]:
    """Return steps to go on from, the best first; in a synchronous run only the newest step that all policies have."""
    if not config.run.sync:
        steps = store.steps()
        folder.lives(policy).check_not_lost(steps)
        return steps[::-1]
    stores = {name: _store(config, folder, name) for name in config.learning}
    step = roll_back_to_common_step(policy, stores, {name: folder.lives(name) for name in stores})
    return [] if step is None else [step]


def _group_timeout_s(config: RunConfig, policy: str) -> float:
    """Return seconds that other ranks wait for the first: as long as it may be busy without them, and a margin."""
    sync_s, table = 3 * config.run.sync_timeout_s if config.run.sync else 0.0, config.policies[policy]
    publish_s = PUBLISHED_AND_SAVED * load_timeout_s(Path(table.model))
    return table.learner.data_timeout_s + sync_s + publish_s + GROUP_TIMEOUT_MARGIN_S


def _meeting_point(config: RunConfig, folder: RunFolder, policy: str) -> RendezvousPoint:
    """Return where the ranks meet. Ranks on hosts that join by themselves are awaited for as long as these hosts."""
    own_s = config.policies[policy].learner.collective_timeout_s
    bound_s = max(own_s, config.launch.join_s) if config.launch.hosts_join else own_s
    return RendezvousPoint(folder.endpoints, f"ranks-{policy}", bound_s, lost_s=config.supervision.silence_s)


def _canary(config: RunConfig, policy: str, trainer: Trainer, first: FirstRank | None) -> CanaryReferences:
    """Return the canary references; every rank makes them from the first rank's prompts."""
    table = config.policies[policy]
    told = json.dumps(first.canary_prompts).encode() if first else None
    return CanaryReferences(
        trainer,
        json.loads(trainer.world.broadcast_bytes(told)),
        engine_format=table.rollout.engine_dtype,
        max_row_tokens=longest_row(table.rollout.server.context_tokens),
        merges_adapters=table.learner.lora is not None and table.rollout.weights != "adapters",
        sends_adapters=table.rollout.weights == "adapters",
    )


def _milestones(config: RunConfig, policy: str) -> Milestones:
    return Milestones(
        total=config.run.steps,
        checkpoint_every=config.policies[policy].learner.checkpoint_every,
        mismatch_alarm_nats=config.policies[policy].learner.mismatch_alarm_nats,
        save_when_stopped=not config.run.sync,
    )


def _first_rank(
    life: _Life,
    regime: Regime,
    context: SharingContext,
    *,
    start: Version,
    checkpoint: Checkpoint | None,
    courier: BroadcastPublisher | None,
) -> FirstRank:
    config, folder, policy, telemetry, closing = life
    pool = build_pool(config.tasks, config.pool, order_seed=config.run.seed)
    ledger = WorkLedger(_pace(config, policy), lambda n: pool.prompt_at(n).prompt_id, resumed_at=start, step=start.step)
    ledger.curriculum = curriculum_of(config, len(pool))
    if checkpoint:
        ledger.restore(checkpoint.state["ledger"], start.step)
        regime.restore(checkpoint.state["regime"])
    workers = Grant("worker", policy)
    server = ServerSocket(
        load_keys(folder.keys),
        admits=lambda grant: grant == workers,
        host=config.exchange.host,
        ipc_path=socket_file(f"learner-{policy}"),
        max_message_bytes=MAX_GROUP_BYTES,
    )
    publish_endpoint(folder.endpoints, f"learner-{policy}", server.address, server.ipc_path)
    held_out = None if config.evaluation.every == NO_EVALUATION else HeldOutLedger(policy, measure_of(config))
    intake = Intake(server, ledger, held_out=held_out, evaluates_alone=config.run.sync, courier=courier)
    closing.callback(intake.close)
    is_sharing = shares(config.sharing) or bool(context.voted)
    peers = role_runtime.connect_exchange(folder, f"learner/{policy}", policy, closing) if is_sharing else None
    batching = _batching(life, intake, regime, peers)
    reuse = reuse_of(config.policies[policy].learner, checkpoint.state if checkpoint else {})
    return FirstRank(
        policy=policy,
        intake=intake,
        batches=BatchMaker(intake, regime, peers, batching, config.run, reuse=reuse),
        regime=regime,
        recorder=context.recorder,
        peers=peers,
        evaluations=_evaluations(life, intake, pool) if held_out is not None else None,
        crash_folder=folder.crash,
        telemetry=telemetry,
        allocator=_connect_allocator(folder, policy, closing),
        on_step=sample_writer(pool, telemetry, folder.rollouts, config.run.rollouts_mib, context.renderer),
        canary_prompts=_canary_prompts(pool, config.policies[policy]),
    )


def _canary_prompts(pool: TaskPool, table: PolicyTable) -> list[list[int]]:
    encoder = PromptEncoder(Path(table.model), table.prompt)
    return [encoder.token_ids(pool.prompt_at(place).content).tolist() for place in range(min(len(pool), NUM_PROMPTS))]


def _evaluations(life: _Life, intake: Intake, pool: TaskPool) -> Evaluations:
    config = life.config
    plan = EvaluationPlan(pool.held_out, config.evaluation.every, config.evaluation.prompts, config.run.steps)
    bounds = _wait_bounds(config.policies[life.policy], start_s=config.supervision.start_s)
    return Evaluations(intake, plan, life.folder.evaluation, life.telemetry, bounds=bounds)


def _pace(config: RunConfig, policy: str) -> SamplingLimits:
    """Return the pace of sampling; a synchronous run samples every fresh group under the version that it trains."""
    table = config.policies[policy]
    objective = own_objective(table.objective, max_answer_tokens=table.rollout.max_new_tokens)
    return SamplingLimits(
        groups_per_step=table.learner.fresh_groups,
        group_size=table.rollout.group_size,
        max_staleness_versions=0 if config.run.sync else table.learner.max_staleness_versions,
        total_steps=config.run.steps,
        drop_uniform=objective.drop_uniform_groups,
        max_resampling=objective.max_resampling,
        adaptive=table.learner.pace == "adaptive",
        reserved_versions=0 if config.run.sync else table.learner.reserved_versions,
    )


def _batching(life: _Life, intake: Intake, regime: Regime, peers: ExchangeClient | None) -> Batching:
    config, policy, telemetry = life.config, life.policy, life.telemetry
    bounds = _wait_bounds(config.policies[policy], start_s=config.supervision.start_s)
    if not config.run.sync:
        return AsynchronousBatching(intake, regime, peers, telemetry, bounds=bounds)
    return SynchronousBatching(
        intake,
        regime,
        peers,
        telemetry,
        members=config.learning,
        bounds=bounds,
        sync_timeout_s=config.run.sync_timeout_s,
    )


def _wait_bounds(table: PolicyTable, *, start_s: float) -> WaitBounds:
    """Return bounds of waiting for workers, a little longer than a worker takes to give up on its engine by itself.

    `start_s`: seconds until a new process is first heard.
    """
    engine = timeouts_of(table.rollout.server, Path(table.model))
    loading_s, data_timeout_s = ENGINE_STARTS * (engine.start_s + engine.load_s), table.learner.data_timeout_s
    return WaitBounds(data_timeout_s, start_s + data_timeout_s, loading_s + data_timeout_s)


def _connect_allocator(folder: RunFolder, policy: str, closing: ExitStack) -> ReportSender:
    sender = ReportSender(policy)
    client = role_runtime.link(
        folder,
        "allocator",
        identity=f"learner/{policy}",
        on_message=sender.on_message,
        on_tick=sender.requests.on_tick,
        closing=closing,
    )
    sender.requests.open(client.post, client.restart)
    return sender

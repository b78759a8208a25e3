"""A learner of one policy: one rank of its process group, started by torchrun.

Owns: parameters, optimizer and version of the policy; which prompts its workers sample.
Speaks: grants and acknowledgements to its workers, fetches and version announcements to the exchange, throughput to the
    allocator, published weights and checkpoints to the run folder; its ranks speak torch.distributed among themselves.
Waits for: groups of its own workers, at most `learner.data_timeout_s`. It never waits for a peer.
Unblocked by: its workers.
If it dies: the supervisor starts it again from its newest checkpoint, under a new run epoch; peers go on.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from mrl.alignment.receiver import load_receiver
from mrl.allocation.report import ReportSender
from mrl.checkpoint.store import Checkpoint, CheckpointStore
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.exchange.client import ExchangeClient
from mrl.learner.batches import BatchMaker, PreparedStep
from mrl.learner.intake import Intake
from mrl.learner.ledger import Pace, WorkLedger
from mrl.learner.loop import FirstRank, Learner, Schedule, next_run_epoch, restore
from mrl.learner.trainer import Trainer
from mrl.learner.world import World, join_world
from mrl.metrics.telemetry import Telemetry
from mrl.models.load import load_policy
from mrl.records.leases import LearnerReport
from mrl.records.version import Version
from mrl.roles import wiring
from mrl.sharing.regime import Regime
from mrl.sharing.regimes import build_regime
from mrl.tasks.pool import TaskPool, build_pool
from mrl.transport.endpoints import publish_endpoint
from mrl.transport.keys import load_keys
from mrl.transport.server import ServerSocket
from mrl.weights.publish import Publisher

GROUP_TIMEOUT_MARGIN_S = 600.0
"""Other ranks wait in a broadcast while the first one gathers, publishes and saves."""
STOPPED_EARLY = 143


def main(run_folder: Path, policy: str, index: int) -> int:
    """Train one policy until its steps are done."""
    rank = int(os.environ.get("RANK", "0"))
    role = f"learner/{policy}" if rank == 0 else f"learner/{policy}/rank{rank}"

    def body(config: RunConfig, folder: RunFolder, closing: ExitStack) -> int:
        return _learn(config, folder, closing, policy, role)

    return wiring.run_role(run_folder, role, policy, body)


def _learn(config: RunConfig, folder: RunFolder, closing: ExitStack, policy: str, role: str) -> int:
    stop = wiring.stop_event()
    table = config.policies[policy]
    world = join_world(table.device, timeout_s=table.learner.data_timeout_s + GROUP_TIMEOUT_MARGIN_S)
    closing.callback(world.close)
    telemetry = wiring.connect_telemetry(folder, role, policy, closing)
    receiver = load_receiver(Path(table.model))
    regime = build_regime(
        config.sharing, policy=policy, receiver=receiver, max_answer_tokens=table.rollout.max_new_tokens
    )
    trainer = Trainer(
        load_policy(Path(table.model), table.device),
        table.learner,
        regime.components,
        temperature=table.rollout.temperature,
        seed=config.run.seed,
        total_steps=config.run.steps,
        world=world,
    )
    store = CheckpointStore(folder.checkpoints(policy), policy, keep=table.learner.keep_checkpoints)
    start, checkpoint = _start_version(world, store, folder.checkpoints(policy))
    if checkpoint:
        restore(trainer, checkpoint)
    first = None
    if world.is_first:
        first = _first_rank(config, folder, closing, policy, regime, start, checkpoint, store, telemetry)
    learner = Learner(trainer, _schedule(config, policy), start, first, config.run.seed)
    if checkpoint:
        learner.restore_rng(checkpoint.state["rng"])
    finished = learner.run(stop.is_set)
    telemetry.doing("done" if finished else "stopped")
    return 0 if finished else STOPPED_EARLY


def _start_version(world: World, store: CheckpointStore, folder: Path) -> tuple[Version, Checkpoint | None]:
    """Where this life starts: every rank loads the same checkpoint, the first one counts the life."""
    checkpoint = store.load_newest()
    epoch = next_run_epoch(folder) if world.is_first else None
    told = world.broadcast_bytes(None if epoch is None else str(epoch).encode())
    return Version(int(told), checkpoint.step if checkpoint else 0), checkpoint


def _schedule(config: RunConfig, policy: str) -> Schedule:
    return Schedule(
        total=config.run.steps,
        checkpoint_every=config.policies[policy].learner.checkpoint_every,
        evaluate_every=config.evaluation.every,
        evaluation_prompts=config.evaluation.prompts,
    )


def _first_rank(
    config: RunConfig,
    folder: RunFolder,
    closing: ExitStack,
    policy: str,
    regime: Regime,
    start: Version,
    checkpoint: Checkpoint | None,
    store: CheckpointStore,
    telemetry: Telemetry,
) -> FirstRank:
    table = config.policies[policy]
    pool = build_pool(config.tasks, config.pool, order_seed=config.run.seed)
    pace = Pace(
        groups_per_step=table.learner.prompts_per_step,
        group_size=table.rollout.group_size,
        max_staleness_versions=table.learner.max_staleness_versions,
        total_steps=config.run.steps,
    )
    ledger = WorkLedger(pace, lambda position: pool.prompt_at(position).prompt_id, resumed_at=start, step=start.step)
    if checkpoint:
        ledger.restore(checkpoint.state["ledger"], start.step)
        regime.restore(checkpoint.state["regime"])
    server = ServerSocket(load_keys(folder.keys), host=config.exchange.host)
    publish_endpoint(folder.endpoints, f"learner-{policy}", server.address)
    intake = Intake(server, ledger)
    closing.callback(intake.close)
    peers = _connect_exchange(folder, policy, closing) if regime.reads else None
    return FirstRank(
        policy=policy,
        intake=intake,
        batches=BatchMaker(intake, regime, peers, telemetry, data_timeout_s=table.learner.data_timeout_s),
        regime=regime,
        peers=peers,
        publisher=Publisher(folder.weights(policy), policy),
        checkpoints=store,
        evaluation_folder=folder.evaluation,
        telemetry=telemetry,
        report=_connect_allocator(folder, policy, closing),
        on_step=_sample_writer(pool, telemetry),
    )


def _connect_exchange(folder: RunFolder, policy: str, closing: ExitStack) -> ExchangeClient:
    name = f"learner/{policy}"
    return ExchangeClient.connect(
        lambda on_message, on_tick: wiring.link(
            folder, "exchange", identity=name, on_message=on_message, on_tick=on_tick, closing=closing
        ),
        client=name,
        policy=policy,
    )


def _connect_allocator(folder: RunFolder, policy: str, closing: ExitStack) -> Callable[[LearnerReport], object]:
    sender = ReportSender()
    client = wiring.link(
        folder,
        "allocator",
        identity=f"learner/{policy}",
        on_message=sender.on_message,
        on_tick=sender.on_tick,
        closing=closing,
    )
    sender.open(client.post, client.request_reconnect)
    return sender.report


def _sample_writer(pool: TaskPool, telemetry: Telemetry) -> Callable[[int, PreparedStep], None]:
    def write(step: int, prepared: PreparedStep) -> None:
        group = prepared.groups[step % len(prepared.groups)]
        answer = group.answers[0]
        text = answer.completion.decode("utf-8", errors="replace")
        prompt = pool.prompt(group.prompt_id)
        telemetry.sample(
            step, kind="rollout", task=prompt.task, prompt=prompt.text, completion=text, reward=answer.reward
        )
        for rescue in prepared.rescued[:1]:
            prompt = pool.prompt(rescue.prompt_id)
            text = rescue.completion.decode("utf-8", errors="replace")
            telemetry.sample(
                step,
                kind="rescue",
                task=prompt.task,
                prompt=prompt.text,
                completion=text,
                reward=1.0,
                source=rescue.source,
            )

    return write

"""A rollout worker of one policy.

Owns: one engine in this process and the groups that its learner has not acknowledged.
Speaks: work requests and groups to the learner, outcome records to the exchange, lease requests to the allocator.
Waits for: granted work and a lease, both bounded.
Unblocked by: the learner's next version (it raises the staleness budget), the allocator's next grant.
If it dies: the supervisor starts it again; the learner grants its work anew.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from mrl.alignment.receiver import Receiver, load_receiver
from mrl.allocation.lease import LeaseHolder
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.engines.embedded import EmbeddedEngine
from mrl.exchange.client import ExchangeClient
from mrl.models.load import load_policy
from mrl.models.prompting import PromptEncoder
from mrl.records.rollouts import ScoredGroup
from mrl.roles import wiring
from mrl.rollout.link import WorkerLink
from mrl.rollout.loop import RolloutLoop
from mrl.rollout.sampling import Sampler
from mrl.sharing.regime import Author, Regime
from mrl.sharing.regimes import build_regime
from mrl.tasks.pool import build_pool


def main(run_folder: Path, policy: str, index: int) -> int:
    """Sample for one policy until told to stop."""
    role = f"worker/{policy}/{index}"

    def body(config: RunConfig, folder: RunFolder, closing: ExitStack) -> int:
        return _work(config, folder, closing, policy, role)

    return wiring.run_role(run_folder, role, policy, body)


def build_sampler(config: RunConfig, policy: str) -> tuple[Sampler, Receiver]:
    """Engine, prompt pool and tokenizer of one policy; also what the evaluator samples with."""
    table = config.policies[policy]
    model_folder = Path(table.model)
    receiver = load_receiver(model_folder)
    engine = EmbeddedEngine(
        load_policy(model_folder, table.device),
        eos_ids=receiver.eos_ids,
        max_new_tokens=table.rollout.max_new_tokens,
        temperature=table.rollout.temperature,
    )
    encoder = PromptEncoder(model_folder)
    pool = build_pool(config.tasks, config.pool)
    sampler = Sampler(policy, config.run.seed, engine, pool, encoder.token_ids, receiver.completion_bytes)
    return sampler, receiver


def _work(config: RunConfig, folder: RunFolder, closing: ExitStack, policy: str, role: str) -> int:
    stop = wiring.stop_event()
    telemetry = wiring.connect_telemetry(folder, role, policy, closing)
    table = config.policies[policy].rollout
    sampler, receiver = build_sampler(config, policy)
    regime = build_regime(config.sharing, policy=policy, receiver=receiver, max_answer_tokens=table.max_new_tokens)
    work = _connect_learner(folder, policy, role, closing)
    exchange = ExchangeClient.connect(
        lambda on_message, on_tick: wiring.link(
            folder, "exchange", identity=role, on_message=on_message, on_tick=on_tick, closing=closing
        ),
        client=role,
        policy=policy,
    )
    lease = LeaseHolder(role, policy)
    loop = RolloutLoop(
        sampler,
        work,
        telemetry,
        group_size=table.group_size,
        learner_bound_s=2 * config.policies[policy].learner.data_timeout_s,
        slots=lambda: lease.slots(time.monotonic()),
        publish=_publisher(regime, exchange, receiver, policy),
    )
    _connect_allocator(folder, role, lease, loop, closing)
    loop.run(stop.is_set)
    return 0


def _connect_learner(folder: RunFolder, policy: str, role: str, closing: ExitStack) -> WorkerLink:
    work = WorkerLink(role)
    client = wiring.link(
        folder, f"learner-{policy}", identity=role, on_message=work.on_message, on_tick=work.on_tick, closing=closing
    )
    work.open(client.post, client.request_reconnect)
    return work


def _connect_allocator(folder: RunFolder, role: str, lease: LeaseHolder, loop: RolloutLoop, closing: ExitStack) -> None:
    def usage() -> tuple[int, float]:
        return loop.totals.tokens, loop.totals.slot_seconds

    client = wiring.link(
        folder,
        "allocator",
        identity=role,
        on_message=lambda body: lease.on_message(body, time.monotonic()),
        on_tick=lambda now_s: lease.on_tick(now_s, *usage()),
        closing=closing,
    )
    lease.open(client.post, client.request_reconnect)


def _publisher(
    regime: Regime, exchange: ExchangeClient, receiver: Receiver, policy: str
) -> Callable[[Sequence[ScoredGroup]], None]:
    def publish(groups: Sequence[ScoredGroup]) -> None:
        records = []
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
            exchange.publish(records)

    return publish


def _record_ids(policy: str, ticket: str) -> Callable[[], str]:
    """Ids that come out the same when the same group is published again."""
    numbers = itertools.count()
    return lambda: f"{policy}:{ticket}:{next(numbers)}"

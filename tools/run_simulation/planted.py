"""Mistakes planted into the real code, each as somebody could make it, which the witness has to find."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mrl.allocation.node_guard import NodeGuard
from mrl.allocation.unit_core import UnitCore
from mrl.config.run_epochs import RunEpochs
from mrl.exchange.client import ExchangeClient
from mrl.exchange.client_fetches import ClientFetches
from mrl.exchange.core import ExchangeCore
from mrl.exchange.publisher import RecordPublisher
from mrl.exchange.record_intake import RecordIntake
from mrl.exchange.transaction import Judged
from mrl.learner import ledger
from mrl.learner.ledger import WorkLedger
from mrl.processes.host_processes import HostProcesses
from mrl.transport.requests import Requests
from run_simulation import daemons

put = ExchangeCore._on_put
due, go_on = Requests.due, WorkLedger.restore
settle, step, new_allocator_state = RecordIntake.settle, NodeGuard._step, daemons.new_allocator_state


def _acknowledge_first(self: ExchangeCore, client: bytes, session: Any, message: Any, now_s: float) -> Any:
    judged = Judged(client, session.policy, message.seq, len(message.records), Counter())
    return [*put(self, client, session, message, now_s), (client, self._ack([judged]))]


def _renew_no_watch(self: ClientFetches, now_s: float) -> None:
    self._requests.start_over()
    self.send(now_s)


def _claim_again(self: WorkLedger, ticket: str) -> int:
    self.running.pop(ticket, None)
    return int(ticket.partition(".")[2])


def _go_back_too_far(self: WorkLedger, state: dict[str, Any], step: int) -> None:
    go_on(self, state | {"cursor": max(0, state["cursor"] - 2)}, step)


def _prove_unseen(self: NodeGuard, unit: str, now_s: float, look: Any) -> Any:
    has_to_go = self.units[unit].admitted is not None or self.units[unit].clearing_epoch
    return step(self, unit, now_s, lambda name: look(name)._replace(is_quiet=True) if has_to_go else look(name))


def _settle_anyway(self: RecordIntake, failure: str, now_s: float) -> Any:
    return settle(self, "", now_s)


def _first_life(path: Path, run_key: str) -> Any:
    path.unlink(missing_ok=True)
    return new_allocator_state(path, run_key)


def _instead(owner: object, name: str, mistake: object) -> Callable[[], AbstractContextManager[Any]]:
    return partial(patch.object, owner, name, mistake)


PLANTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "acknowledged before the commit": _instead(ExchangeCore, "_on_put", _acknowledge_first),
    "watches lost with the daemon": _instead(ClientFetches, "start_over", _renew_no_watch),
    "puts lost with the daemon": _instead(RecordPublisher, "start_over", lambda self, now_s: None),
    "run epoch used again": _instead(RunEpochs, "begin", lambda self: 0),
    "void versions trained on": _instead(ledger, "is_void", lambda version, resumed_at: False),
    "stale groups trained on": _instead(WorkLedger, "_drop_stale", lambda self, step: None),
    "groups taken over twice": _instead(WorkLedger, "_claim", _claim_again),
    "positions given twice after a resume": _instead(WorkLedger, "restore", _go_back_too_far),
    "lost work not granted again": _instead(WorkLedger, "_take_back", lambda self, lost: None),
    "unit called quiet without a look": _instead(NodeGuard, "_step", _prove_unseen),
    "lease not fenced by its epoch": _instead(NodeGuard, "_is_new", lambda self, guarded, epoch: True),
    "epochs of allocators alike": _instead(UnitCore, "_epoch_before", lambda self, life: 0),
    "storing again goes unnoticed": _instead(ExchangeClient, "_note_storage", lambda self, storage, now_s: None),
    "a full disk acknowledged": _instead(RecordIntake, "settle", _settle_anyway),
    "allocators counted anew": _instead(daemons, "new_allocator_state", _first_life),
    "no new address looked up": _instead(
        Requests, "due", lambda self, now_s: due(self, now_s)._replace(reconnects=False)
    ),
    "own standstill blamed on others": _instead(HostProcesses, "_forgive_standstill", lambda self, now_s: None),
}


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Put the mistake of this name into the code while the context is open."""
    with PLANTED[name]():
        yield

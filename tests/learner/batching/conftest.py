"""What batching speaks with, all of it real: books and intake of a learner, an exchange, its clients.

Only the sockets between clients and exchange are left out, one thread carries the messages; the regime is scripted.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from mrl.exchange.client import ExchangeClient
from mrl.learner.intake import Intake
from mrl.learner.ledger import SamplingLimits, WorkLedger
from mrl.metrics.telemetry import Telemetry
from mrl.records.codec import encode
from mrl.records.experience import OutcomeRecord, Received
from mrl.records.rollouts import ScoredGroup, WorkRequest
from mrl.records.version import Version
from mrl.sharing.regime import PeerQuery, PeerWait
from mrl.transport.keys import create_keys
from mrl.transport.server import ServerSocket
from tests.support.stored_core import StoredCore
from tests.support.successes import success

GROUPS_PER_STEP = 2


class LocalExchange:
    """Carries messages between clients and the core until closed; `cut` loses them all."""

    def __init__(self) -> None:
        self.core = StoredCore(budget_bytes=1 << 24)
        self.cut = False
        self._posted: queue.Queue[tuple[str, bytes] | None] = queue.Queue()
        self._receive: dict[str, Callable[[bytes], None]] = {}
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def connect(
        self, policy: str, role: str = "learner", *, clock: Callable[[], float] = time.monotonic
    ) -> ExchangeClient:
        """A client of this exchange."""
        name = f"{role}/{policy}"

        def open_link(on_message: Callable[[bytes], None], on_tick: Callable[[float], None]) -> "_Link":
            self._receive[name] = on_message
            return _Link(lambda body: self._posted.put((name, body)))

        return ExchangeClient.connect(open_link, client=name, policy=policy, clock=clock)

    def settle(self) -> None:
        """Return when everything posted so far, and the answers to it, have been delivered."""
        self._posted.join()

    def close(self) -> None:
        """Carry what is posted, then end."""
        self._posted.put(None)
        self._thread.join(120.0)

    def _carry(self) -> None:
        while (item := self._posted.get()) is not None:
            if not self.cut:
                self._deliver(*item)
            self._posted.task_done()

    def _deliver(self, name: str, body: bytes) -> None:
        for receiver, message in self.core.receive_body(name.encode(), body, time.monotonic()):
            self._receive[receiver.decode()](encode(message))


class _Link:
    def __init__(self, post: Callable[[bytes], None]) -> None:
        self._post = post

    def post(self, body: bytes) -> bool:
        self._post(body)
        return True

    def restart(self) -> None:
        """The thread carries everything anyway."""

    def close(self, timeout_s: float) -> None:
        """Nothing to close."""


class ScriptedRegime:
    """Asks for every prompt, is content with one record per prompt, and remembers what it heard."""

    def __init__(
        self, *, patience: PeerWait | None = None, scorer: str = "", max_age_versions: int | None = None
    ) -> None:
        self.asking: PeerQuery | None = PeerQuery(("outcome",), 4, max_age_versions, scorer=scorer)
        self.patience = patience
        self.heard: list[Received] = []
        self._asked: set[str] = set()

    def asks(self, group: ScoredGroup) -> list[str]:
        self._asked.add(group.prompt_id)
        return [group.prompt_id]

    def awaited(self) -> list[str]:
        return sorted(self._asked - {item.record.prompt_id for item in self.heard})

    def hear(self, received: Sequence[Received], *, step: int) -> None:
        self.heard += received

    def is_settled(self, group: ScoredGroup) -> bool:
        return group.prompt_id in {item.record.prompt_id for item in self.heard}

    @property
    def heard_ids(self) -> list[str]:
        """Ids of what was heard, in order."""
        return [item.record.record_id for item in self.heard]


class Books:
    """Intake and ledger of one learner; groups come in by `sample`, as from a worker."""

    def __init__(self, server: ServerSocket, make_group: Callable[..., ScoredGroup], *, staleness: int = 2) -> None:
        pace = SamplingLimits(GROUPS_PER_STEP, 2, staleness, 100)
        self.ledger = WorkLedger(pace, lambda position: f"p{position}", Version(0, 0))
        self.intake = Intake(server, self.ledger)
        self._make_group = make_group

    def sample(self, num_groups: int, *, step: int = 0, backwards: bool = False) -> None:
        """The worker asks for so many groups and delivers them, on request in the opposite order."""
        with self.intake._changed:
            items = self.ledger.grant(WorkRequest(worker="w", max_groups=num_groups, holding=[]), 0.0)
            groups = [self._make_group(item.ticket, step=step) for item in items]
            self.intake._note(self.ledger.accept(groups[::-1] if backwards else groups, "w", 0.0))


@pytest.fixture
def make_books(tmp_path, make_group) -> Iterator[Callable[..., Books]]:
    """A factory of learners' books."""
    keys = create_keys(tmp_path / "keys")
    made: list[Books] = []

    def make(**settings: int) -> Books:
        made.append(Books(ServerSocket(keys), make_group, **settings))
        return made[-1]

    yield make
    for books in made:
        books.intake.close()


@pytest.fixture
def exchange() -> Iterator[LocalExchange]:
    """A running exchange."""
    running = LocalExchange()
    yield running
    running.close()


@pytest.fixture
def make_regime() -> type[ScriptedRegime]:
    """The scripted regime."""
    return ScriptedRegime


@pytest.fixture
def telemetry() -> Telemetry:
    """The voice of learner a; nobody listens."""
    return Telemetry("learner/a", "a", lambda record: True)


@pytest.fixture
def outcome() -> Callable[..., OutcomeRecord]:
    """Makes success records; `step` dates them."""
    return success

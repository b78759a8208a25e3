"""The conversation between a client and the exchange daemon. One message is one body frame.

    client                                  daemon
    Hello            ------------------>    Welcome      incarnation, put limit in bytes
    Ping             ------------------>    Welcome      whether the daemon still knows the client
    Put              ------------------>    PutAck       stored, refused by reason
    Announce         ------------------>                 newest version of a policy (drives ages and evictions)
    Fetch            ------------------>    Deliver      what is held now ...
                                            Deliver      ... and, with watch, each record that arrives later
    Unwatch          ------------------>
    Subscribe        ------------------>    Deliver      requests to the client's policy, each to one of its subscribers
    Done             ------------------>                 ends the delivery
    Stream           ------------------>    Batch        all that comes of some types, sources and tasks, in order
    Took             ------------------>                 everything of a stream up to a number is here
    Commit           ------------------>                 ... and its effect is in a durable checkpoint
    Barrier          ------------------>    BarrierState who is missing, and how far; sent again when nobody is
    StatRequest      ------------------>    Stat         what tools/inspect_see.py shows
    Peek             ------------------>    Peeked       one held record; for the admin's key alone
    Drain            ------------------>    Stat         no more Puts are taken, or again; for the admin's key alone

Flow is bounded in bytes both ways. What a client has put and the daemon has not acknowledged stays within the window
that the daemon states; what the daemon has delivered and the client has not ended with Done stays within a bound of
the daemon. Both sides count what is unanswered, not what was ever sent: nothing leaks when a message is lost or a
daemon restarts.

Every daemon message carries the daemon's incarnation: when it changes, or the daemon says that it does not know the
client, the client says Hello again, puts again what was not acknowledged, and renews its watches. A Put without PutAck
and a Fetch without its Deliver are sent again with the same `seq`. A client that was killed puts again what it was not
told of, under other numbers: after a Hello the daemon compares hashes of the records' ids with those it has stored.
Announce, Subscribe, Stream and Barrier are repeated with every Ping: saying them twice changes nothing.
"""

from typing import Annotated, Literal

import msgspec

from mrl.records.codec import decoder
from mrl.records.experience import RecordKind
from mrl.records.packs import MAX_PUT_PACKS, Pack, Parcel, Spooled
from mrl.records.version import Count, Name, Version

RecordIds = Annotated[list[Name], msgspec.Meta(max_length=4096)]
PromptIds = Annotated[list[Name], msgspec.Meta(max_length=4096)]
Policies = Annotated[list[Name], msgspec.Meta(max_length=1024)]

RequestKind = Literal["score_request"]
"""Record types that ask one policy to do something."""


class _FromClient(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    client: Name
    """Role and policy, stable over reconnects, for example "worker/qwen/0"."""


class Hello(_FromClient, frozen=True, kw_only=True, tag="hello"):
    """The client is here (again); the daemon forgets what it held for an earlier connection of the same name."""

    policy: Name
    has_spool: bool = False
    """Whether the client keeps a spool file where a daemon of the same host finds it."""


class Ping(_FromClient, frozen=True, kw_only=True, tag="ping"):
    """Are you there, and do you know me?"""

    has_spool: bool = False
    """As in Hello; it may come later."""
    progress: Count = 0
    """Another number whenever the client's policy has got on; 0 from a client that does not say."""


class Put(_FromClient, frozen=True, kw_only=True, tag="put"):
    """Store these records, each as encoded by its source. A number is used once: a repeated Put is the same Put."""

    seq: Count
    packs: Annotated[list[Pack], msgspec.Meta(max_length=MAX_PUT_PACKS)]
    spooled: Spooled | None = None

    @property
    def num_records(self) -> int:
        """In all packs."""
        return sum(pack.count for pack in self.packs)

    @property
    def num_bytes(self) -> int:
        """Of the records of all packs."""
        return sum(pack.num_bytes for pack in self.packs)

    def with_records(self, data: bytes) -> "Put":
        """The same Put with the records of all packs in it; `data` is what lies in the spool."""
        view, begin, packs = memoryview(data), 0, list[Pack]()
        for pack in self.packs:
            packs.append(msgspec.structs.replace(pack, records=msgspec.Raw(view[begin : begin + pack.num_bytes])))
            begin += pack.num_bytes
        return msgspec.structs.replace(self, packs=packs, spooled=None)


class Announce(_FromClient, frozen=True, kw_only=True, tag="announce"):
    """The policy now trains at `version`; `resumed` marks the first announcement of a new run epoch."""

    policy: Name
    version: Version
    resumed: bool = False


class Fetch(_FromClient, frozen=True, kw_only=True, tag="fetch"):
    """What have the others on these prompts? At most `limit` records per prompt, at most `max_age_versions` old.

    With `watch` the daemon goes on delivering later ones on each prompt, until it has had `limit` or Unwatch; a client
    has one watch per prompt, the latest. A Fetch with a `seq` above 0 is answered even when nothing is found.
    """

    policy: Name
    prompt_ids: PromptIds
    kinds: Annotated[list[RecordKind], msgspec.Meta(min_length=1, max_length=16)] = msgspec.field(
        default_factory=lambda: ["outcome"]
    )
    limit: Annotated[int, msgspec.Meta(ge=1, le=64)]
    max_age_versions: Annotated[int, msgspec.Meta(ge=0)] | None
    watch: bool
    seq: Count = 0


class Unwatch(_FromClient, frozen=True, kw_only=True, tag="unwatch"):
    """Stop watching these prompts."""

    prompt_ids: PromptIds


class Subscribe(_FromClient, frozen=True, kw_only=True, tag="subscribe"):
    """This client serves requests of these kinds to its policy, and no others. Lapses unless repeated every second."""

    kinds: Annotated[list[RequestKind], msgspec.Meta(max_length=16)]


class Done(_FromClient, frozen=True, kw_only=True, tag="done"):
    """These delivered records were taken over."""

    record_ids: RecordIds


class Stream(_FromClient, frozen=True, kw_only=True, tag="stream"):
    """Send all records of other policies that came after number `after`, in the order in which they came.

    A policy has one reader per stream name: the client that said this last. What its reader has said Took for is not
    sent again, until somebody opens the stream anew with a smaller `after`, as a learner does that went back to a
    checkpoint. Lapses unless repeated every second, with the number that the reader has come to.
    """

    stream: Name
    kinds: Annotated[list[RecordKind], msgspec.Meta(min_length=1, max_length=16)]
    sources: Policies = []
    """Empty: all other policies."""
    tasks: Annotated[list[Name], msgspec.Meta(max_length=1024)] = []
    """Empty: all tasks."""
    max_age_versions: Annotated[int, msgspec.Meta(ge=0)] | None = None
    after: Count = 0
    reads_log: bool = False
    """Whether the reader takes records from the daemon's log itself, when it is told their places."""


class Took(_FromClient, frozen=True, kw_only=True, tag="took"):
    """The reader has all of the stream up to this number."""

    stream: Name
    upto: Count


class Commit(_FromClient, frozen=True, kw_only=True, tag="commit"):
    """What the policy has made of the stream up to this number is in a durable checkpoint: it may be forgotten."""

    policy: Name
    stream: Name
    upto: Count


class Barrier(_FromClient, frozen=True, kw_only=True, tag="barrier"):
    """The policy has come to barrier `number`, which opens when all `members` have come to it or a later one.

    Numbers never go back, except after an Announce with `resumed`.
    """

    policy: Name
    number: Count
    members: Policies


class StatRequest(_FromClient, frozen=True, kw_only=True, tag="stat_request"):
    """Show yourself."""


class Peek(_FromClient, frozen=True, kw_only=True, tag="peek"):
    """Show one held record."""

    record_id: Name


class Drain(_FromClient, frozen=True, kw_only=True, tag="drain"):
    """Take no new Puts while `is_on`, and go on delivering. A restarted daemon takes them again."""

    is_on: bool


class _FromDaemon(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    incarnation: Name


class Welcome(_FromDaemon, frozen=True, kw_only=True, tag="welcome"):
    """Answers Hello and Ping, and a Fetch of a client that has not said Hello."""

    max_put_bytes: Count
    window_bytes: Count
    """How many bytes of Puts the client may have unacknowledged; one Put is always allowed."""
    known: bool = True
    """False: say Hello (again)."""
    storage: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Why nothing is stored at the moment (disk_full, draining); what is put meanwhile has to be put again."""
    reads_spool: bool = False
    """Whether the daemon can read the client's spool file."""


class PutAck(_FromDaemon, frozen=True, kw_only=True, tag="put_ack"):
    """`stored` records are on the log; the others were refused, counted by reason (stale, duplicate, full, ...)."""

    seq: Count
    stored: Count
    refused: dict[str, int]
    window_bytes: Count
    """As in Welcome."""


class Deliver(_FromDaemon, frozen=True, kw_only=True, tag="deliver"):
    """Records for this client, as encoded by their sources, with the age in versions that each has now."""

    records: list[msgspec.Raw]
    ages_versions: list[int]
    seq: Count = 0
    """The Fetch that this message answers; 0 for anything else."""
    part: Count = 1
    """Counts the messages of one answer, from 1 to `parts`."""
    parts: Count = 1


class Batch(_FromDaemon, frozen=True, kw_only=True, tag="batch"):
    """The next records of a stream. A reader that has not come to `previous` has lost a batch, and drops this one."""

    stream: Name
    previous: Count
    """Number of the last record sent before; between it and the first of these lies nothing for this reader."""
    parcels: list[Parcel]
    """By rising numbers."""


class BarrierState(_FromDaemon, frozen=True, kw_only=True, tag="barrier_state"):
    """Barrier `number` is open when nobody is missing."""

    number: Count
    missing: Policies
    progress: Annotated[list[Count], msgspec.Meta(max_length=1024)] = []
    """Of those who are missing, in their order: what they said last in a Ping."""


class PairFlow(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic from one policy to another since the daemon started."""

    source: Name
    receiver: Name
    asked: Count
    """Prompts that the receiver asked for."""
    hits: Count
    """Of those, prompts on which it was given a record of the source (at once or later)."""
    records: Count
    bytes: Count
    mean_age_versions: float
    ages_versions: Count = 0
    """Ages of all these records together; with `records` the mean age over any stretch of time."""


class PolicyShelf(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon holds of one policy."""

    policy: Name
    newest: Version | None
    prompts: Count
    records: Count
    bytes: Count
    put: Count
    refused: dict[str, int]
    evicted: dict[str, int]
    watched_prompts: Count
    kinds: dict[str, int] = {}
    """Records held, by type."""
    barrier: Count | None = None
    """The last barrier that the policy has come to."""
    oldest_age_versions: Count = 0
    """Age of the oldest record held, counted from its step to that of `newest`."""


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """How far one policy has read."""

    policy: Name
    stream: Name
    reader: str
    """Client that reads it now; "" when nobody does."""
    sent: Count
    took: Count
    committed: Count
    waiting: Count
    """Held records behind the last one sent, of any type."""


class ClientState(msgspec.Struct, frozen=True, kw_only=True):
    """What is open between the daemon and one client."""

    client: Name
    policy: Name
    silent_s: float
    """Since it was last heard; living clients ping every second."""
    parked_puts: Count
    """Its Puts that wait for room."""
    claims: Count
    """Records that it was given and has not acknowledged."""
    queued: Count
    """Records for it that wait for these acknowledgements."""


class Peeked(_FromDaemon, frozen=True, kw_only=True, tag="peeked"):
    """A held record as its source encoded it; without a body it is not held."""

    body: bytes = b""
    number: Count = 0
    """Its place in the order in which all records came."""
    age_versions: Count = 0


class Stat(_FromDaemon, frozen=True, kw_only=True, tag="stat"):
    """The daemon's own account of itself."""

    uptime_s: float
    budget_bytes: Count
    used_bytes: Count
    log_bytes: Count
    clients: list[Name]
    malformed: dict[str, int]
    shelves: list[PolicyShelf]
    flows: list[PairFlow]
    claims: Count = 0
    """Records delivered and not yet acknowledged."""
    abandoned: Count = 0
    """Deliveries given up after several tries."""
    dropped_watches: Count = 0
    """Watches dropped because there were too many."""
    unserved: Count = 0
    """Requests that no client of their policy has been given."""
    storage: str = ""
    """Why nothing is stored at the moment; "" when all is well."""
    streams: list[StreamState] = []
    unstored: Count = 0
    """Puts on their way to the log."""
    sessions: list[ClientState] = []
    """The clients for which most is open, at most 256."""
    parked: Count = 0
    """Of the unstored Puts, those that wait for room."""
    undelivered: Count = 0
    """Messages whose receiver was gone or did not keep up."""
    log_max_bytes: Count = 0
    log_syncs: Count = 0
    """How often the log waited for the disk."""
    log_sync_s: float = 0.0
    """Seconds it waited, in all."""
    log_damaged: Count = 0
    """Stretches of the log that the replay found damaged or missing."""


ClientMessage = (
    Hello
    | Ping
    | Put
    | Announce
    | Fetch
    | Unwatch
    | Subscribe
    | Done
    | Stream
    | Took
    | Commit
    | Barrier
    | StatRequest
    | Peek
    | Drain
)
DaemonMessage = Welcome | PutAck | Deliver | Batch | BarrierState | Stat | Peeked

client_message_decoder: msgspec.msgpack.Decoder[ClientMessage] = decoder(ClientMessage)
daemon_message_decoder: msgspec.msgpack.Decoder[DaemonMessage] = decoder(DaemonMessage)

"""The conversation between a client and the exchange daemon. One message is one body frame.

    client                                  daemon
    Hello            ------------------>    Welcome      incarnation, window in bytes
    Ping             ------------------>    Welcome      whether the daemon still knows the client
    Put              ------------------>    PutAck       stored, refused by reason
                                            Later        nothing can be stored at the moment
    Announce         ------------------>                 newest version of a policy (drives ages and evictions)
    Fetch            ------------------>    Deliver      records held now ...
                                            Deliver      ... and, with watch, each record that arrives later
    Unwatch          ------------------>
    Subscribe        ------------------>    Deliver      requests to the client's policy, each to one of its subscribers
    Done             ------------------>                 ends deliveries; requests were taken over
    Barrier          ------------------>    BarrierState missing policies and their progress; again when none is missing
    StatRequest      ------------------>    Stat         the account that `mrl inspect` shows

Flow is bounded in bytes both ways. Records put by a client and not yet acknowledged stay within the window that the
daemon states. Records delivered by the daemon and not yet ended with Done stay within a bound of the daemon. Both sides
count unanswered messages, not all messages ever sent: nothing leaks when a message is lost or a daemon restarts.

Every daemon message carries the daemon's incarnation. When it changes, or the daemon says that it does not know the
client, the client says Hello again, puts unacknowledged records again, and renews its watches. A Put without PutAck and
a Fetch without its Deliver are sent again with the same `seq`; a record that is stored already is refused as duplicate
by its id. Announce, Subscribe and Barrier are repeated with every Ping, and a repetition changes nothing.
"""

from typing import Annotated, Literal

import msgspec

from mrl.records.codec import decoder
from mrl.records.experience import RecordKind
from mrl.records.version import Count, Name, Version

MAX_PUT_RECORDS = 4096

RecordIds = Annotated[list[Name], msgspec.Meta(max_length=4096)]
PromptIds = Annotated[list[Name], msgspec.Meta(max_length=4096)]
Policies = Annotated[list[Name], msgspec.Meta(max_length=1024)]

RequestKind = Literal["score_request"]
"""Types of records that ask one policy to do something."""


class _FromClient(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    client: Name
    """Role and policy, stable over reconnects, for example "worker/qwen/0"."""


class Hello(_FromClient, frozen=True, kw_only=True, tag="hello"):
    """The client is here (again); the daemon forgets the state of an earlier connection of the same name."""

    policy: Name


class Ping(_FromClient, frozen=True, kw_only=True, tag="ping"):
    """The client asks whether the daemon is there and knows it."""

    progress: Count = 0
    """A number that changes whenever the client's policy has made progress; 0 from a client that does not say."""
    is_full: bool = False
    """Whether the daemon should send nothing until a Ping says otherwise, because nobody takes the records that the
    client has received."""


class Put(_FromClient, frozen=True, kw_only=True, tag="put"):
    """Store these records, each as encoded by its source."""

    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    records: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_PUT_RECORDS)]


class Announce(_FromClient, frozen=True, kw_only=True, tag="announce"):
    """The policy now trains at `version`; `resumed` marks the first announcement of a new run epoch."""

    policy: Name
    version: Version
    resumed: bool = False


class Fetch(_FromClient, frozen=True, kw_only=True, tag="fetch"):
    """Ask for other policies' records on prompts: at most `limit` per prompt, at most `max_age_versions` old.

    With `watch` the daemon also delivers later records on each prompt, until `limit` records were delivered or Unwatch
    came. A client has one watch per prompt, the latest. A Fetch with a `seq` above 0 is answered even when nothing is
    found.
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
    """Deliveries that have arrived, and delivered requests that will be served."""

    deliveries: Annotated[list[Count], msgspec.Meta(max_length=4096)] = []
    requests: RecordIds = []


class Barrier(_FromClient, frozen=True, kw_only=True, tag="barrier"):
    """The policy has reached barrier `number`, which opens when all `members` have reached it or a later one.

    Numbers never go back, except after an Announce with `resumed`.
    """

    policy: Name
    number: Count
    members: Policies


class StatRequest(_FromClient, frozen=True, kw_only=True, tag="stat_request"):
    """The client asks for the daemon's account of itself."""


class _FromDaemon(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    incarnation: Name


class Welcome(_FromDaemon, frozen=True, kw_only=True, tag="welcome"):
    """Answers Hello, Ping, and any message from a client that has not said Hello."""

    window_bytes: Count
    """Bytes of Puts that the client may have unacknowledged; one Put is always allowed."""
    known: bool = True
    """Whether the daemon knows the client; if not, the client says Hello (again)."""
    storage: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Reason for which nothing can be stored at the moment ("disk_full"); the client puts such records again."""


class PutAck(_FromDaemon, frozen=True, kw_only=True, tag="put_ack"):
    """The Puts `seqs` are handled: `stored` records are in the file, the others refused (stale, duplicate, ...)."""

    seqs: list[Count]
    stored: Count
    refused: dict[str, int]
    window_bytes: Count
    """Bytes of Puts that the client may have unacknowledged; see Welcome."""


class Later(_FromDaemon, frozen=True, kw_only=True, tag="later"):
    """The Put `seq` was not taken, since nothing can be stored at the moment. The client puts it again."""

    seq: Count
    storage: Annotated[str, msgspec.Meta(max_length=200)]
    """Reason for which nothing can be stored; see Welcome."""


class Deliver(_FromDaemon, frozen=True, kw_only=True, tag="deliver"):
    """Records for this client, as encoded by their sources, with the present age in versions of each."""

    records: list[msgspec.Raw]
    ages_versions: list[int]
    delivery: Count = 0
    """Number by which Done ends this delivery; 0 for requests, which Done ends by their ids."""
    seq: Count = 0
    """The Fetch that this message answers; 0 for anything else."""
    part: Count = 1
    """Number of this message among the `parts` messages of one answer, from 1."""
    parts: Count = 1


class BarrierState(_FromDaemon, frozen=True, kw_only=True, tag="barrier_state"):
    """State of barrier `number`, which is open when no policy is missing."""

    number: Count
    missing: Policies
    progress: Annotated[list[Count], msgspec.Meta(max_length=1024)] = []
    """Progress that each missing policy last stated in a Ping, in the order of `missing`."""


class PairFlow(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic from one policy to another since the daemon started."""

    source: Name
    receiver: Name
    asked: Count
    """Prompts about which the receiver asked."""
    hits: Count
    """Prompts among `asked` on which the receiver was given a record of the source, at once or later."""
    records: Count
    bytes: Count
    mean_age_versions: float
    ages_versions: Count = 0
    """Sum of the ages of all these records; with `records` it gives the mean age over any stretch of time."""


class PolicyStat(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's account of one policy."""

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
    """The last barrier that the policy has reached."""
    oldest_age_versions: Count = 0
    """Steps from the oldest record held to `newest`."""


class ClientState(msgspec.Struct, frozen=True, kw_only=True):
    """Open deliveries between the daemon and one client."""

    client: Name
    policy: Name
    silent_s: float
    """Seconds since the client was last heard; living clients ping every second."""
    unacknowledged: Count
    """Records that the client was sent and has not acknowledged."""
    queued: Count
    """Records for the client that wait for these acknowledgements, or for room at the client."""


class Stat(_FromDaemon, frozen=True, kw_only=True, tag="stat"):
    """The daemon's own account of itself."""

    uptime_s: float
    budget_bytes: Count
    used_bytes: Count
    clients: list[Name]
    malformed: dict[str, int]
    policies: list[PolicyStat]
    flows: list[PairFlow]
    unacknowledged: Count = 0
    """Records delivered and not yet acknowledged."""
    abandoned: Count = 0
    """Records whose delivery the daemon gave up: sent too often, or too many queued."""
    dropped_watches: Count = 0
    """Watches dropped because there were too many."""
    unserved: Count = 0
    """Requests that no client of their policy has been given yet."""
    storage: str = ""
    """Reason for which nothing can be stored at the moment; "" when all is well."""
    unstored: Count = 0
    """Puts on their way to the file."""
    later: Count = 0
    """Puts that were answered with Later."""
    sessions: list[ClientState] = []
    """The clients with most unacknowledged and queued records, at most 256."""
    undelivered: Count = 0
    """Messages whose receiver was gone or too slow."""
    file_bytes: Count = 0
    """Bytes of the file and of the files that SQLite keeps beside it."""
    commits: Count = 0
    """Transactions that were committed."""
    commit_s: float = 0.0
    """Seconds that these transactions took, in all."""


ClientMessage = Hello | Ping | Put | Announce | Fetch | Unwatch | Subscribe | Done | Barrier | StatRequest
DaemonMessage = Welcome | PutAck | Later | Deliver | BarrierState | Stat

client_message_decoder: msgspec.msgpack.Decoder[ClientMessage] = decoder(ClientMessage)
daemon_message_decoder: msgspec.msgpack.Decoder[DaemonMessage] = decoder(DaemonMessage)

"""The conversation between a client and the exchange daemon. One message is one body frame.

    client                                  daemon
    Hello            ------------------>    Welcome      incarnation, window in bytes
    Ping             ------------------>    Welcome      whether the daemon still knows the client
    Put              ------------------>    PutAck       stored, refused by reason
                                            Later        nothing can be stored at the moment
    Announce         ------------------>                 newest version of a policy (drives ages and evictions)
    Fetch            ------------------>    Deliver      what is held now ...
                                            Deliver      ... and, with watch, each record that arrives later
    Unwatch          ------------------>
    Subscribe        ------------------>    Deliver      requests to the client's policy, each to one of its subscribers
    Done             ------------------>                 ends deliveries; requests were taken over
    Barrier          ------------------>    BarrierState who is missing, and how far; sent again when nobody is
    StatRequest      ------------------>    Stat         what `mrl inspect` shows

Flow is bounded in bytes both ways. What a client has put and the daemon has not acknowledged stays within the window
that the daemon states; what the daemon has delivered and the client has not ended with Done stays within a bound of
the daemon. Both sides count what is unanswered, not what was ever sent: nothing leaks when a message is lost or a
daemon restarts.

Every daemon message carries the daemon's incarnation: when it changes, or the daemon says that it does not know the
client, the client says Hello again, puts again what was not acknowledged, and renews its watches. A Put without PutAck
and a Fetch without its Deliver are sent again with the same `seq`; a record that is stored already is refused as a
duplicate by its id. Announce, Subscribe and Barrier are repeated with every Ping: saying them twice changes nothing.
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
"""Record types that ask one policy to do something."""


class _FromClient(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    client: Name
    """Role and policy, stable over reconnects, for example "worker/qwen/0"."""


class Hello(_FromClient, frozen=True, kw_only=True, tag="hello"):
    """The client is here (again); the daemon forgets what it held for an earlier connection of the same name."""

    policy: Name


class Ping(_FromClient, frozen=True, kw_only=True, tag="ping"):
    """Are you there, and do you know me?"""

    progress: Count = 0
    """Another number whenever the client's policy has got on; 0 from a client that does not say."""
    is_full: bool = False
    """Whether nothing should be sent until a Ping says otherwise: nobody takes what came."""


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
    """These deliveries have come, and these delivered requests will be served."""

    deliveries: Annotated[list[Count], msgspec.Meta(max_length=4096)] = []
    requests: RecordIds = []


class Barrier(_FromClient, frozen=True, kw_only=True, tag="barrier"):
    """The policy has come to barrier `number`, which opens when all `members` have come to it or a later one.

    Numbers never go back, except after an Announce with `resumed`.
    """

    policy: Name
    number: Count
    members: Policies


class StatRequest(_FromClient, frozen=True, kw_only=True, tag="stat_request"):
    """Show yourself."""


class _FromDaemon(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    incarnation: Name


class Welcome(_FromDaemon, frozen=True, kw_only=True, tag="welcome"):
    """Answers Hello and Ping, and whatever else comes from a client that has not said Hello."""

    window_bytes: Count
    """How many bytes of Puts the client may have unacknowledged; one Put is always allowed."""
    known: bool = True
    """False: say Hello (again)."""
    storage: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Why nothing is stored at the moment ("disk_full"); what is put meanwhile has to be put again."""


class PutAck(_FromDaemon, frozen=True, kw_only=True, tag="put_ack"):
    """Of these Puts `stored` records are in the file; the others were refused, by reason (stale, duplicate, ...)."""

    seqs: list[Count]
    stored: Count
    refused: dict[str, int]
    window_bytes: Count
    """As in Welcome."""


class Later(_FromDaemon, frozen=True, kw_only=True, tag="later"):
    """The Put of this number was not taken: nothing can be stored at the moment. It has to be put again."""

    seq: Count
    storage: Annotated[str, msgspec.Meta(max_length=200)]
    """As in Welcome."""


class Deliver(_FromDaemon, frozen=True, kw_only=True, tag="deliver"):
    """Records for this client, as encoded by their sources, with the age in versions that each has now."""

    records: list[msgspec.Raw]
    ages_versions: list[int]
    delivery: Count = 0
    """Number by which Done ends this delivery; 0 for requests, which Done ends by their ids."""
    seq: Count = 0
    """The Fetch that this message answers; 0 for anything else."""
    part: Count = 1
    """Counts the messages of one answer, from 1 to `parts`."""
    parts: Count = 1


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


class PolicyStat(msgspec.Struct, frozen=True, kw_only=True):
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


class ClientState(msgspec.Struct, frozen=True, kw_only=True):
    """What is open between the daemon and one client."""

    client: Name
    policy: Name
    silent_s: float
    """Since it was last heard; living clients ping every second."""
    unacknowledged: Count
    """Records that it was given and has not acknowledged."""
    queued: Count
    """Records for it that wait for these acknowledgements."""


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
    """Records whose delivery was given up after several tries."""
    dropped_watches: Count = 0
    """Watches dropped because there were too many."""
    unserved: Count = 0
    """Requests that no client of their policy has been given."""
    storage: str = ""
    """Why nothing is stored at the moment; "" when all is well."""
    unstored: Count = 0
    """Puts on their way to the file."""
    later: Count = 0
    """Puts that were answered with Later."""
    sessions: list[ClientState] = []
    """The clients for which most is open, at most 256."""
    undelivered: Count = 0
    """Messages whose receiver was gone or did not keep up."""
    file_bytes: Count = 0
    """Length of the file and of what SQLite keeps beside it."""
    commits: Count = 0
    """Transactions that were committed."""
    commit_s: float = 0.0
    """Seconds that these took, in all."""


ClientMessage = Hello | Ping | Put | Announce | Fetch | Unwatch | Subscribe | Done | Barrier | StatRequest
DaemonMessage = Welcome | PutAck | Later | Deliver | BarrierState | Stat

client_message_decoder: msgspec.msgpack.Decoder[ClientMessage] = decoder(ClientMessage)
daemon_message_decoder: msgspec.msgpack.Decoder[DaemonMessage] = decoder(DaemonMessage)

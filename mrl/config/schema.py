"""The typed tables of a run's configuration. Those of one policy stand in `policy_tables.py`, those of tasks in
`task_tables.py`.

Unknown keys are refused; every bound stands at its field."""

from typing import Annotated, Any, Literal

from pydantic import Field

from mrl.config.policy_tables import PolicyTable
from mrl.config.table import PluginName, Table, known_or_plugin
from mrl.config.task_tables import PoolTable, TaskTable

UNIT_TYPE_NAME = r"^[A-Za-z0-9][A-Za-z0-9 ._+-]{0,63}$"
POLICY_NAME = r"^[a-z0-9][a-z0-9_-]{0,31}$"
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
UnitType = Annotated[str, Field(pattern=UNIT_TYPE_NAME)]
TRACKER_NAMES = ("swanlab", "tensorboard", "trackio", "wandb")
PolicyName = Annotated[str, Field(pattern=POLICY_NAME)]


class RunTable(Table):
    """What to run, where, for how long."""

    name: Annotated[str, Field(pattern=RUN_NAME)]
    """Name of the run; its folder is `<folder>/<name>`."""
    folder: str = "runs"
    """Folder that holds the runs."""
    modules: str = ""
    """Folder in which modules are looked for that this configuration names ("module:name"), after those that are
    installed or on PYTHONPATH. Left out: the folder of the configuration file."""
    local_folder: str = ""
    """Folder on each host's own disk or in its memory, for what only the processes there share: sockets, boards, places
    to meet. The run makes a private one in it, and removes that in the end. Empty: the temporary folder."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    """Seeds prompt order, sampling and minibatches."""
    steps: int = Field(..., ge=1)
    """Learner steps of every policy."""
    success_reward: float = Field(default=1.0, ge=-1e6, le=1e6)
    """An answer is a success when its reward is at least this: in held-out accuracy, and where policies share what
    succeeded."""
    max_verifier_failures: float = Field(default=0.5, ge=0, le=1)
    """The run ends when verifiers fail on more than this share of a step's answers; with 1 it never does."""
    sync: bool = False
    """All policies step together: no staleness, but of groups that are trained on again, and equal runs under equal
    seeds."""
    sync_timeout_s: float = Field(default=600.0, gt=0)
    """A synchronous run ends, and names who is missing, when a policy that is awaited stands still for longer than
    this. Left out: 60 s more for each GB of the largest model's weights."""
    max_minutes: float = Field(default=0.0, ge=0)
    """Ends the run after this many minutes; 0 means no limit."""
    min_free_mib: int = Field(default=256, ge=0)
    """Free disk that the run's folder needs before anything is written, in MiB."""
    rollouts_mib: int = Field(default=1024, ge=0)
    """Compressed answers of each policy that the run folder keeps, all that were trained on, in MiB. Beyond it every
    second step that is there goes, and then every second one that is left. 0 keeps none."""
    shared_with_group: bool = False
    """The run folder may be read by the members of its group (0750, files 0640), and not by its user alone."""


class ExchangeTable(Table):
    """The exchange's daemon. `host` is also where telemetry, allocator and learner links listen."""

    port: int = Field(default=0, ge=0, le=65535)
    """TCP port of the daemon, where it has a `host`; 0 takes a free one."""
    host: str = ""
    """Address at which the exchange, the supervisor's telemetry, the allocator and the learners' links to workers take
    TCP connections, for a run of several hosts; empty: none, they meet on socket files of this host.

    The run's keys guard all of them, on socket files too.
    """
    budget_mib: int = Field(default=256, ge=2)
    """Bytes of records that the daemon holds at most, in MiB, in memory and in its file; beyond that the oldest go.
    Left out: what the groups of all policies over two steps take at their longest, where that is more."""
    durability: Literal["synced", "written"] = "synced"
    """When a record is acknowledged: on the disk, or once it survives the death of the daemon, but not a power cut."""
    successes_per_prompt: int = Field(default=4, ge=1, le=64)
    """Successes per prompt and policy that the memory keeps, newest first."""
    max_age_versions: int = Field(default=200, ge=0)
    """Records older than this are evicted."""
    metrics_host: str = ""
    """Address of the daemon's page for Prometheus, /metrics, "127.0.0.1" say; empty: there is none.

    It has no keys: whoever reaches the address may read it.
    """
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of this page; 0 takes a free one, see `endpoints/`."""


class GatewayTable(Table):
    """Where programs of the user's ask the policies of the run over HTTP, as they would ask OpenAI's."""

    host: Annotated[str, Field(pattern=r"^[^\s/]+$")] = "127.0.0.1"
    """Address that it listens at. It speaks HTTP without TLS: beyond this host put a proxy before it."""
    port: int = Field(default=0, ge=0, le=65535)
    """Its port; 0: a free one, which `endpoints/gateway.json` of the run names."""
    idle_s: float = Field(default=120.0, gt=0)
    """An agent that says nothing about its episode for this long, while nobody samples for it, has given it up."""
    max_body_mib: int = Field(default=4, ge=1, le=64)
    """Largest request that it reads, in MiB."""
    serve: bool = False
    """Answer requests outside of episodes, too, from the rollout workers of each policy beside their sampling: of an
    evaluation harness, say. The gateway then runs without tasks of agents as well. Not in a synchronous run."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, or text to score, of such a request, in tokens; the memory plan of embedded engines counts it. No
    more than a row of the policy's own may have (the model's positions, `learner.microbatch_tokens`)."""
    share: float = Field(default=0.125, gt=0, lt=1)
    """Part of a worker's answers in flight that such requests may have, at least one; and of its time for scoring given
    text while it samples."""
    kept_versions: int = Field(default=0, ge=0, le=16)
    """Checkpoints that are served at a time to whoever asks for one by its step ("qwen@120"), with `serve`: each by a
    process of its own on the CPU of the gateway's host, while somebody asks."""


class AllocationTable(Table):
    """The allocator: how rollout slots are shared between policies."""

    slots: int = Field(default=512, ge=1)
    """Requests that may run at once, over all policies."""
    floor_slots: int = Field(default=64, ge=1)
    """Least share of a policy that is alive; at least one group for each of its workers."""
    period_s: float = Field(default=2.0, gt=0)
    """Time between two decisions."""
    ttl_s: float = Field(default=10.0, gt=0)
    """Life of a lease that is not renewed."""
    objective: Literal["max_min", "weighted", "throughput", "static"] = "max_min"
    """Least progress (busy share of the learner), the same by `weights`, trained tokens/s of all, or a fixed split."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Priority of policies under "weighted" and "static"; a policy that is not named has 1."""
    units: list[str] = Field(default=[])
    """Whole units to lease in place of slots: "gpu:0", "cpu:0-3", "HOST/gpu:0,1"; each runs one worker of one policy at
    a time, with an even part of `slots`, and `rollout.workers` says nothing."""
    unit_types: dict[UnitType, list[str]] = Field(default={})
    """Type -> its units, or hosts for all of theirs, where units differ in speed: {H100 = ["gpu:0"], A10 = ["node2"]}.

    A unit without one is of the type that its driver tells, else of its kind, and of as many devices as it has.
    """
    floor_units: int = Field(default=1, ge=0)
    """Least units of a policy whose learner is alive."""
    grace_s: float = Field(default=5.0, gt=0)
    """Time that an engine whose unit another policy gets has to end, or to fall asleep, before it is killed. Left out:
    1 s more for each GB of the largest model's weights."""
    residency: Literal["stop", "sleep"] = "stop"
    """What becomes of such an engine: it ends, or on a GPU it stays and sleeps, without its cache and the GPU's memory,
    until its policy gets the unit again. Every GPU unit then keeps an engine of every policy in main memory."""
    wake_s: float = Field(default=30.0, gt=0)
    """An engine that sleeps and takes longer to wake up is killed and started anew. Left out: 5 s more for each GB of
    the largest model's weights."""
    switching_share: float = Field(default=0.05, gt=0, le=1)
    """Part of the time that units may spend on starting engines, as measured: the higher, the more often they move."""
    hung_s: float = Field(default=120.0, gt=0)
    """A policy whose learner has said nothing for this long gives its units to the others until it speaks again. It
    says nothing while it publishes weights or begins a checkpoint: choose more than that takes. Left out: 20 s more
    for each GB of the largest model's weights."""


NO_EVALUATION = -1
"""`evaluation.every` of a run that evaluates nothing."""


class EvaluationTable(Table):
    """Held-out accuracy: the engines of a policy's own workers answer held-out prompts, ahead of their other work."""

    every: int = Field(default=40, ge=NO_EVALUATION)
    """Steps between evaluations; 0 evaluates at start and end only, -1 never."""
    prompts: int = Field(default=0, ge=0)
    """Held-out prompts of the evaluations in between; 0 takes all. Start and end always take all."""
    share: float = Field(default=0.5, gt=0, le=1)
    """Part of a worker's places that held-out answers may take while it has other work, at least one of them. With 1
    nothing else is begun before all of them are: almost all of their tokens are of the evaluated version."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Answers to every held-out prompt. Several give pass@k, majorities, and intervals of both."""
    k: list[Annotated[int, Field(ge=1)]] = Field(default=[1], min_length=1, max_length=16)
    """The k of pass@k, none above `samples`; told where `samples` is above 1."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Temperature of held-out answers; 0 takes the likeliest token (greedy). Left out: that of the policy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Held-out answers are sampled from the likeliest tokens that have this probability together; 1 takes all."""


class SupervisionTable(Table):
    """How the supervisor treats roles that crash, hang, or are to end."""

    max_restarts: int = Field(default=5, ge=0)
    """The run ends when one role was restarted this often within `window_s` and fails again."""
    window_s: float = Field(default=60.0, gt=0)
    """Time over which restarts are counted."""
    max_learner_restarts: int = Field(default=3, ge=0)
    """Restarts of one learner within a day, or since it last got further; each resumes from the newest checkpoint."""
    backoff_s: float = Field(default=0.5, gt=0)
    """Wait before the first restart; doubles with every further one within the window."""
    silence_s: float = Field(default=60.0, gt=0)
    """A role whose heartbeat is older than this, while its process lives, is killed and restarted. Left out: 5 s more
    for each GB of the largest model's weights."""
    start_s: float = Field(default=300.0, gt=0)
    """A role that has not sent its first heartbeat after this long counts as silent. Left out: 10 s more for each GB
    of the largest model's weights."""
    stop_s: float = Field(default=5.0, gt=0, le=3600)
    """Time between SIGTERM and SIGKILL when the run ends, in which learners save a checkpoint; whoever has saved ends
    at once. Left out: 10 s more for each GB of the largest model's weights. A batch system has to wait for it."""
    host_metrics_s: float = Field(default=15.0, ge=0)
    """Time between two measurements of each host's CPU, memory, disk and GPUs (`host/...`, `gpu/...`); 0 measures
    nothing. GPUs are told of with the extra `nvml`."""


class LaunchTable(Table):
    """How a run on several hosts is started and kept together. The other hosts see the run folder."""

    remote: list[str] = Field(default=[])
    """Words before a command that start it on another host, "{host}" standing for its name: ["ssh", "{host}"].

    Empty: `srun` within a SLURM job.
    """
    hosts_join: bool = False
    """The other hosts are not started from the first one; on each somebody starts `mrl join` (jobs of their own)."""
    policies_on_first_host: bool = True
    """Whether policies live on the first host too, or only the daemons."""
    gpus_per_host: int = Field(default=0, ge=0)
    """GPUs that each host with policies shows at least, by which the first one decides what goes where; 0: as many as
    the first host shows."""
    join_s: float = Field(default=3600.0, gt=0)
    """The run ends when a host that joins by itself has been awaited for this long, at the start or after a loss.

    One that has nothing but engines on units does not end it.
    """
    alone_s: float = Field(default=30.0, gt=0)
    """The supervisor of another host ends its processes when the first host has been silent for this long."""


class TrackerTable(Table):
    """A tracker that gets the run's metrics, besides `metrics.jsonl`. There may be several."""

    kind: PluginName = Field(..., json_schema_extra=known_or_plugin(TRACKER_NAMES))
    """Which one: swanlab, tensorboard, trackio or wandb, whose package comes with the extra of this name,
    `pip install 'mrl[trackio]'`; or a plug-in, "module:name" or the name of an entry point in the group
    `mrl.trackers`."""
    project: Annotated[str, Field(pattern=RUN_NAME)] = "mrl"
    """Project that the run belongs to there."""
    name: str = ""
    """Name of the run there. Empty: `run.name`."""
    folder: str = ""
    """Folder for its files. Empty: one in the run's folder, of trackio the place where its dashboard looks."""
    samples: int = Field(default=0, ge=0, le=200)
    """Answers of each policy that it shows as a table every `samples_every` steps, rescues among them; 0 shows none.

    Prompts and answers then lie where the tracker keeps them.
    """
    samples_every: int = Field(default=10, ge=1)
    """Steps of a policy between two such tables."""
    options: dict[str, Any] = Field(default={})
    """Options of this kind of tracker. Keys and passwords are none: they belong into the environment."""


class RunConfig(Table):
    """A whole run."""

    run: RunTable
    pool: PoolTable = PoolTable()
    tasks: dict[PolicyName, TaskTable] = Field(..., min_length=1)
    sharing: dict[str, Any] = Field(default={"regime": "independent"})
    """`regime` names the sharing regime, or a plug-in: "module:name" or the name of an entry point in the group
    `mrl.regimes`. `[sharing.<regime>]` holds the parameters of that regime, for "module:name" `[sharing.<name>]`."""
    policies: dict[PolicyName, PolicyTable] = Field(..., min_length=1)
    exchange: ExchangeTable = ExchangeTable()
    gateway: GatewayTable = GatewayTable()
    allocation: AllocationTable = AllocationTable()
    evaluation: EvaluationTable = EvaluationTable()
    supervision: SupervisionTable = SupervisionTable()
    launch: LaunchTable = LaunchTable()
    trackers: list[TrackerTable] = Field(default=[], max_length=8)

    @property
    def has_gateway(self) -> bool:
        """Whether agents, or others, may ask the policies."""
        return self.gateway.serve or any(task.source == "agent" for task in self.tasks.values())

    @property
    def learning(self) -> tuple[str, ...]:
        """Names of the policies that learn; the others are frozen."""
        return tuple(name for name, policy in self.policies.items() if not policy.frozen)

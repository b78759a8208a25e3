"""The typed tables of a run's configuration. Unknown keys are refused; every bound stands at its field.

The tables of one policy are in `policy_tables.py`, those of tasks in `task_tables.py`.
"""

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
    """The run as a whole: name, folders, seed, length, limits."""

    name: Annotated[str, Field(pattern=RUN_NAME)]
    """Name of the run; its folder is `<folder>/<name>`."""
    folder: str = "runs"
    """Folder that holds the runs."""
    modules: str = ""
    """Folder of the modules that this configuration names ("module:name"), searched after installed modules and
    PYTHONPATH. Left out: the folder of the configuration file."""
    local_folder: str = ""
    """Folder on each host's own disk or in its memory, for files that only the processes there share: sockets, boards,
    stores where ranks meet. The run makes a private folder in it, and removes that in the end. Empty: the temporary
    folder."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    """Seed of prompt order, sampling and minibatches."""
    steps: int = Field(..., ge=1)
    """Learner steps of every policy."""
    success_reward: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Least reward of a success: in held-out accuracy, and where policies share answers that succeeded."""
    max_verifier_failures: float = Field(default=0.5, ge=0, le=1)
    """Share of a step's answers on which verifiers may fail; beyond it the run ends. With 1 it never ends for this."""
    sync: bool = False
    """Whether all policies step together. Then nothing is stale but groups that are trained on again, and runs with
    equal seeds are equal."""
    sync_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a synchronous run waits for a policy that stands still; then it ends, and names who is missing. Left
    out: 60 s more for each GB of the largest model's weights."""
    max_minutes: float = Field(default=0.0, ge=0)
    """Minutes after which the run ends; 0 means no limit."""
    min_free_mib: int = Field(default=256, ge=0)
    """Free disk in MiB that the run's folder needs before anything is written."""
    rollouts_mib: int = Field(default=1024, ge=0)
    """Compressed size in MiB of the answers of each policy that the run folder keeps, all that were trained on. Beyond
    it the answers of every second step go, and then of every second step that is left. 0 keeps none."""
    shared_with_group: bool = False
    """Whether the members of its group may read the run folder (0750, files 0640), and not its user alone."""


class ExchangeTable(Table):
    """The exchange's daemon. `host` is also where telemetry, allocator and learner links listen."""

    port: int = Field(default=0, ge=0, le=65535)
    """TCP port of the daemon, where it has a `host`; 0 takes a free one."""
    host: str = ""
    """Address at which the exchange, the supervisor's telemetry, the allocator and the learners' links to workers take
    TCP connections, for a run of several hosts; empty: none, they meet on socket files of this host.

    The run's keys guard all connections, those on socket files too.
    """
    budget_mib: int = Field(default=256, ge=2)
    """Greatest size in MiB of the records that the daemon holds, in memory and in its file; beyond it the oldest go.
    Left out: what the groups of all policies over two steps take at their longest, where that is more."""
    durability: Literal["synced", "written"] = "synced"
    """Safety of an acknowledged record: on the disk ("synced"), or such that it survives the death of the daemon, but
    not a power cut ("written")."""
    successes_per_prompt: int = Field(default=4, ge=1, le=64)
    """Successes per prompt and policy that the exchange keeps, newest first."""
    max_age_versions: int = Field(default=200, ge=0)
    """Greatest age of a record in versions; older ones are evicted."""
    metrics_host: str = ""
    """Address of the daemon's page for Prometheus, /metrics, for example "127.0.0.1"; empty: there is none.

    The page has no keys: whoever reaches the address may read it.
    """
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the page for Prometheus; 0 takes a free one, see `endpoints/`."""


class GatewayTable(Table):
    """The gateway, at which programs of the user's ask the run's policies over HTTP, as they would ask OpenAI's API."""

    host: Annotated[str, Field(pattern=r"^[^\s/]+$")] = "127.0.0.1"
    """Address at which the gateway listens. It speaks HTTP without TLS: beyond this host put a proxy before it."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the gateway; 0: a free one, which `endpoints/gateway.json` of the run names."""
    idle_s: float = Field(default=120.0, gt=0)
    """Seconds without a word of an agent about its episode, while nobody samples for it, after which the episode is
    given up."""
    max_body_mib: int = Field(default=4, ge=1, le=64)
    """Largest request that the gateway reads, in MiB."""
    serve: bool = False
    """Whether requests outside of episodes are answered too, of an evaluation harness for example, by the rollout
    workers of each policy beside their sampling. The gateway then runs without tasks of agents as well. Not in a
    synchronous run."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, or text to score, of a request outside of episodes, in tokens; the memory plan of embedded
    engines counts it. The length of the policy's own rows is a bound as well (the model's positions,
    `learner.microbatch_tokens`)."""
    share: float = Field(default=0.125, gt=0, lt=1)
    """Part of a worker's answers in flight that requests outside of episodes may have, at least one answer; and of the
    worker's time for scoring given text while it samples."""
    kept_versions: int = Field(default=0, ge=0, le=16)
    """Checkpoints that are served at a time to clients that ask for one by its step ("qwen@120"), with `serve`: each by
    a process of its own on the CPU of the gateway's host, while somebody asks."""


class AllocationTable(Table):
    """The allocator, which shares rollout slots, or units, between policies."""

    slots: int = Field(default=512, ge=1)
    """Requests that may run at once, over all policies."""
    floor_slots: int = Field(default=64, ge=1)
    """Least slots of a policy that is alive; at least one group for each of its workers."""
    period_s: float = Field(default=2.0, gt=0)
    """Seconds between two decisions."""
    ttl_s: float = Field(default=10.0, gt=0)
    """Seconds that a lease lives without a renewal."""
    objective: Literal["max_min", "weighted", "throughput", "static"] = "max_min"
    """Quantity to maximise: least progress (busy share of a learner), least progress by `weights`, or trained tokens
    per second of all policies; "static": a fixed split."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Priority of policies under "weighted" and "static"; a policy that is not named has 1."""
    units: list[str] = Field(default=[])
    """Whole units to lease in place of slots: "gpu:0", "cpu:0-3", "HOST/gpu:0,1". Each runs one worker of one policy at
    a time, with an even part of `slots`; `rollout.workers` is ignored."""
    unit_types: dict[UnitType, list[str]] = Field(default={})
    """Type -> its units, or hosts for all of their units, where units differ in speed: {H100 = ["gpu:0"], A10 =
    ["node2"]}.

    A unit without a type here is of the type that its driver tells, else of its kind, and of as many devices as it has.
    """
    floor_units: int = Field(default=1, ge=0)
    """Least units of a policy whose learner is alive."""
    grace_s: float = Field(default=5.0, gt=0)
    """Seconds that an engine whose unit another policy gets has to end, or to fall asleep, before it is killed. Left
    out: 1 s more for each GB of the largest model's weights."""
    residency: Literal["stop", "sleep"] = "stop"
    """Fate of an engine whose unit another policy gets: it ends, or on a GPU it stays and sleeps, without its cache and
    the GPU's memory, until its policy gets the unit again. With "sleep" every GPU unit keeps an engine of every policy
    in main memory."""
    wake_s: float = Field(default=30.0, gt=0)
    """Seconds that a sleeping engine has to wake up, or it is killed and started anew. Left out: 5 s more for each GB
    of the largest model's weights."""
    switching_share: float = Field(default=0.05, gt=0, le=1)
    """Share of their time that units may spend on starting engines, as measured: the higher, the more often they
    move."""
    hung_s: float = Field(default=120.0, gt=0)
    """Seconds without a word of a policy's learner after which its units go to the others, until the learner speaks
    again. A learner says nothing while it publishes weights or begins a checkpoint: choose more than that takes. Left
    out: 20 s more for each GB of the largest model's weights."""


NO_EVALUATION = -1
"""`evaluation.every` of a run that evaluates nothing."""


class EvaluationTable(Table):
    """Held-out accuracy: the engines of a policy's own workers answer held-out prompts, ahead of their other work."""

    every: int = Field(default=40, ge=NO_EVALUATION)
    """Steps between evaluations; 0 evaluates at start and end only, -1 never."""
    prompts: int = Field(default=0, ge=0)
    """Held-out prompts of the evaluations between start and end; 0 takes all. Start and end always take all."""
    share: float = Field(default=0.5, gt=0, le=1)
    """Part of a worker's places that held-out answers may take while it has other work, at least one place. With 1
    nothing else is begun before all held-out answers are: almost all of their tokens are of the evaluated version."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Answers to every held-out prompt. Several give pass@k, majority votes, and intervals of both."""
    k: list[Annotated[int, Field(ge=1)]] = Field(default=[1], min_length=1, max_length=16)
    """Values of k in pass@k, none above `samples`; reported where `samples` is above 1."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Temperature of held-out answers; 0 takes the likeliest token (greedy). Left out: that of the policy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Total probability of the likeliest tokens from which held-out answers are sampled; 1 takes all tokens."""


class SupervisionTable(Table):
    """How the supervisor treats roles that crash, hang, or are to end."""

    max_restarts: int = Field(default=5, ge=0)
    """Restarts of one role within `window_s` after which the run ends when the role fails again."""
    window_s: float = Field(default=60.0, gt=0)
    """Seconds over which restarts are counted."""
    max_learner_restarts: int = Field(default=3, ge=0)
    """Restarts of one learner within a day, or since it last got further; each resumes from the newest checkpoint."""
    backoff_s: float = Field(default=0.5, gt=0)
    """Seconds before the first restart; doubles with every further one within the window."""
    silence_s: float = Field(default=60.0, gt=0)
    """Greatest age in seconds of a role's heartbeat, while its process lives; then it is killed and restarted. Left
    out: 5 s more for each GB of the largest model's weights."""
    start_s: float = Field(default=300.0, gt=0)
    """Seconds in which a role has to send its first heartbeat, or it counts as silent. Left out: 10 s more for each GB
    of the largest model's weights."""
    stop_s: float = Field(default=5.0, gt=0, le=3600)
    """Seconds between SIGTERM and SIGKILL when the run ends, in which learners save a checkpoint; a learner that has
    saved ends at once. Left out: 10 s more for each GB of the largest model's weights. A batch system has to wait for
    this long."""
    host_metrics_s: float = Field(default=15.0, ge=0)
    """Seconds between two measurements of each host's CPU, memory, disk and GPUs (`host/...`, `gpu/...`); 0 measures
    nothing. GPUs are measured with the extra `nvml`."""


class LaunchTable(Table):
    """How a run on several hosts is started and kept together. The other hosts have to see the run folder."""

    remote: list[str] = Field(default=[])
    """Words before a command that start it on another host, "{host}" standing for the host's name: ["ssh", "{host}"].

    Empty: `srun` within a SLURM job.
    """
    hosts_join: bool = False
    """Whether the other hosts are not started from the first one, but by `mrl join` on each (jobs of their own)."""
    policies_on_first_host: bool = True
    """Whether policies live on the first host too, or only the daemons."""
    gpus_per_host: int = Field(default=0, ge=0)
    """GPUs that each host with policies shows at least, by which the first host places processes; 0: as many as the
    first host shows."""
    join_s: float = Field(default=3600.0, gt=0)
    """Seconds for which a host that joins by itself is awaited, at the start or after a loss; then the run ends.

    A missing host that has nothing but engines on units does not end the run.
    """
    alone_s: float = Field(default=30.0, gt=0)
    """Seconds of silence of the first host after which the supervisor of another host ends its processes."""


class TrackerTable(Table):
    """A tracker that gets the run's metrics, besides `metrics.jsonl`. There may be several."""

    kind: PluginName = Field(..., json_schema_extra=known_or_plugin(TRACKER_NAMES))
    """Kind of tracker: swanlab, tensorboard, trackio or wandb, whose package comes with the extra of this name, `pip
    install 'mrl[trackio]'`; or a plug-in, "module:name" or the name of an entry point in the group `mrl.trackers`."""
    project: Annotated[str, Field(pattern=RUN_NAME)] = "mrl"
    """Project of the tracker that the run belongs to."""
    name: str = ""
    """Name of the run in the tracker. Empty: `run.name`."""
    folder: str = ""
    """Folder for the tracker's files. Empty: one in the run folder; for trackio, the place where its dashboard
    looks."""
    samples: int = Field(default=0, ge=0, le=200)
    """Answers of each policy that the tracker shows as a table every `samples_every` steps, rescues among them; 0 shows
    none.

    Prompts and answers then lie where the tracker keeps them.
    """
    samples_every: int = Field(default=10, ge=1)
    """Steps of a policy between two tables of samples."""
    options: dict[str, Any] = Field(default={})
    """Options of this kind of tracker. Keys and passwords are no options: they belong into the environment."""


class RunConfig(Table):
    """The configuration of a whole run."""

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
        """Whether agents, or other programs, may ask the policies over HTTP."""
        return self.gateway.serve or any(task.source == "agent" for task in self.tasks.values())

    @property
    def learning(self) -> tuple[str, ...]:
        """Names of the policies that learn; the others are frozen."""
        return tuple(name for name, policy in self.policies.items() if not policy.frozen)

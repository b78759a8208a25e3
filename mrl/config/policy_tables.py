"""The tables of one policy: its model, how it samples, what it maximises, how it learns."""

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Field

from mrl.config.table import Table

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number in each format."""
SERVER_URL = r"^(https?://[^/\s]+)?$"
StopString = Annotated[str, Field(min_length=1, max_length=200)]


class MakeTable(Table):
    """Recipe by which `mrl policies make` builds a small policy locally."""

    architecture: Literal["qwen3", "llama", "gemma3", "qwen3_moe"]
    """Architecture of the policy."""
    tokenizer: Literal["byte_level", "metaspace"]
    """Kind of tokenizer that is trained for the policy."""
    vocab_size: int = Field(default=512, ge=300, le=65536)
    """Size of the tokenizer's vocabulary."""
    hidden_size: int = Field(default=128, ge=16, multiple_of=8)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1)
    """Number of transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Number of attention heads; there are half as many key-value heads, but at least one."""
    skilled_in: list[str] = Field(default=[])
    """Operations that the warm start makes likely; the others stay rare."""
    rare_share: float = Field(default=0.02, ge=0, le=1)
    """Probability of each operation that the policy is not skilled in."""
    warm_start_steps: int = Field(default=600, ge=0)
    """Supervised steps of the warm start."""
    warm_start_batch: int = Field(default=64, ge=1)
    """Rows per supervised step."""
    warm_start_lr: float = Field(default=2e-3, gt=0)
    """Peak learning rate of the warm start."""
    seed: int = Field(default=1, ge=0)
    """Seed of the initial weights and of the warm start's data."""

    @property
    def num_cached_heads(self) -> int:
        """Number of key-value heads."""
        return max(1, self.num_heads // 2)


class ShotTable(Table):
    """A question with its answer, which a policy is shown before the prompt of a task."""

    user: str = Field(..., min_length=1)
    """The question."""
    assistant: str = Field(..., min_length=1)
    """The answer."""


class PromptTable(Table):
    """Text around the prompt of a task, and where an answer begins and ends.

    Text around a prompt is not sampled, so it is never trained on.
    """

    system: str = ""
    """System message before every prompt; a prompt that is a conversation with a system message keeps its own."""
    few_shot: list[ShotTable] = Field(default=[])
    """Examples (questions with answers) before every prompt: [{ user = "...", assistant = "..." }]."""
    few_shot_file: str = ""
    """JSONL file with more examples, one per line. A run keeps them in `few_shot` of its `config.json`."""
    chat_template: str = ""
    """Jinja template in place of the model's own: the name of a file, or the template text itself, recognized by "{{"
    or "{%". A run keeps the text in its `config.json`."""
    template_options: dict[str, Any] = Field(default={})
    """Variables passed to the chat template, for example { enable_thinking = false }. A variable that the template does
    not use is an error."""
    today: date | None = None
    """Date for chat templates that print the current date, for example 2026-11-29. Left out: the date on which the run
    begins, kept in its `config.json`."""
    assistant_prefill: str = ""
    """Text with which every answer begins. It is part of the prompt: verifiers and peers do not receive it."""
    history: Literal["template", "sampled"] = "template"
    """Form in which the policy sees its earlier turns of an episode: as its chat template renders them, or exactly as
    it sampled them. Where the template drops their reasoning (`<think>...</think>`), a new training row begins."""
    family: str = ""
    """Model family in the package `renderers` (extra `renderers`), for example "qwen3.5". It parses tool calls, and
    continues episodes if the chat template does not suffice. Both must render conversations alike."""
    stop: list[StopString] = Field(default=[], max_length=16)
    """Strings that end an answer, as EOS does. The sampled answer is kept whole; verifiers receive the text before the
    stop string."""

    @property
    def stop_bytes(self) -> tuple[bytes, ...]:
        """The stop strings as bytes, for engines and verifiers."""
        return tuple(text.encode() for text in self.stop)

    @property
    def has_messages(self) -> bool:
        """Whether the table needs a chat template."""
        return bool(self.system or self.few_shot or self.template_options or self.family)


class ServerTable(Table):
    """An inference server as the engine of a policy's workers."""

    url: str = Field(default="", pattern=SERVER_URL)
    """Base URL of a server that is already running, for one worker. Empty: each worker starts its own server."""
    python: str = ""
    """Python interpreter of the engine's environment. Empty: that of the environment made by `mrl engine-env`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights in the server, and of those published for it. Left out on "cuda": "bfloat16"."""
    context_tokens: int = Field(default=2048, ge=16)
    """Maximum number of tokens of prompt and answer together."""
    options: list[str] = Field(default=[])
    """Additional command-line options of the server, passed on unchanged."""
    start_s: float = Field(default=600.0, gt=0)
    """Seconds that a server has to accept requests after its start; after that its start has failed. Left out: 30 s
    more for each GB of the model's weights."""
    load_s: float = Field(default=0.0, ge=0)
    """Seconds that a server has to load new weights before it is replaced; 0: 60 s plus 20 s per GB of weights."""
    silence_s: float = Field(default=60.0, gt=0)
    """Seconds without any answer after which a server is replaced."""
    stall_s: float = Field(default=120.0, gt=0)
    """Seconds without a sampled token, while answers are in flight, after which a server is replaced. Left out: 10 s
    more for each GB of the model's weights."""


class RolloutTable(Table):
    """How a policy samples its answers."""

    engine: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Engine that generates: transformers in the worker's process, or a server in an environment of its own."""
    weights: Literal["files", "broadcast", "adapters"] = "files"
    """Way by which new weights reach the engines: as files, by a broadcast from the learner's memory, or, with
    `learner.lora`, as files of the adapters alone. Left out on "cuda" with `learner.lora`: "adapters", for an embedded
    engine or a vLLM that the run starts and that never sleeps (`turns`, `allocation.residency`)."""
    weights_in: Literal["auto", "memory", "disk", "gpu"] = "auto"
    """Location of the weight files: the learner's memory ("memory"), which processes on its host can open, or the run
    folder ("disk"). "auto" uses memory in a run on one host (`exchange.host` is not a wildcard), except for a server
    given by `url`. "gpu" is "memory" plus two versions on the learner's GPU, from which an embedded engine or a vLLM
    that the run starts copies by CUDA IPC."""
    embedded_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in the embedded engine. Left out on "cuda": "bfloat16"."""
    server: ServerTable = ServerTable()
    workers: int = Field(default=1, ge=0)
    """Worker processes, each with an engine of its own."""
    gpus: int = Field(default=1, ge=1, le=64)
    """GPUs of one vLLM or SGLang server, across which it splits its weights and its cache (tensor parallelism). On a
    leased unit a server uses all GPUs of the unit."""
    group_size: int = Field(default=8, ge=1, le=1024)
    """Answers per prompt (G)."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Maximum number of tokens of one answer."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the learner's log-probabilities use the same."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine."""
    answers_at_once: int = Field(default=0, ge=0)
    """Number of answers that the engine samples at the same time, at least one group; 0: as many as the worker may have
    in flight. Limits the key-value cache; apart from rounding, answers do not depend on it. Left out on "cpu" for a
    large model: as many groups as fit into main memory."""
    unit_types: list[str] = Field(default=[])
    """Types from `allocation.unit_types` whose units can run the engine; empty: all units of the kind."""

    @property
    def engine_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Number format of the weights that the policy's engines serve."""
        return self.embedded_dtype if self.engine == "embedded" else self.server.dtype


class CorrectionTable(Table):
    """Detached weight pi_prox / pi_behaviour, which corrects for staleness and for engines unlike their learner."""

    level: Literal["off", "token", "sequence", "geometric"] | None = None
    """Weight per token, per answer (product over its tokens), or per answer as the geometric mean over its tokens;
    "off": no weight. Left out: "token", and "geometric" for the method `gspo`, whose own ratio is that of the whole
    answer."""
    action: Literal["truncate", "mask", "gate"] = "truncate"
    """Treatment of weights: "truncate" holds them at the bounds (TIS), "mask" zeroes them outside (IcePop), "gate" is 1
    inside and 0 outside (sequence masking)."""
    lower: float = Field(default=0.0, ge=0)
    """Lower bound of the weight."""
    upper: float = Field(default=5.0, gt=0)
    """Upper bound of the weight."""


class ObjectiveTable(Table):
    """Objective of a policy on its own rows. Keys left out take the method's own values."""

    method: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo"] = "grpo"
    """Named set of values for the keys below."""
    clip_low: float | None = Field(default=None, gt=0)
    """Lower clip of the ratio."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip of the ratio."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the term for negative advantages, as a multiple of the advantage."""
    advantage: Literal["group_std", "group_mean"] | None = None
    """Rewards minus the group's mean, divided by the group's standard deviation ("group_std") or not."""
    std_correction: Literal[0, 1] = 1
    """Degrees of freedom subtracted in the group's standard deviation; 0 gives the population's."""
    aggregation: Literal["sequence_mean", "token_mean", "constant"] | None = None
    """Aggregation of the loss: mean over answers of token means, mean over all tokens, or sum divided by answers *
    max_new_tokens ("constant")."""
    kl_coefficient: float | None = Field(default=None, ge=0)
    """Weight of the divergence (KL) from the policy at the start of the run; above 0 keeps a frozen copy of it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator of the divergence that `kl_coefficient` weights."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    correction: CorrectionTable = CorrectionTable()
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Tokens before the limit within which an answer loses reward, linearly in its length (DAPO); 0 is off."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward that an answer loses at the limit."""
    mask_cut_answers: bool = False
    """Whether own answers that were truncated by the token limit are left out of training, and of every denominator;
    their rewards still count in the group's baseline. Of episodes, those that ended as `cut` or `max_tokens`."""
    drop_uniform_groups: bool | None = None
    """Whether groups whose answers all have the same reward are replaced by groups for other prompts (DAPO)."""
    max_resampling: float = Field(default=10.0, ge=1)
    """Maximum prompts sampled for a step, as a multiple of `prompts_per_step`; then uniform groups are accepted."""


class LoraTable(Table):
    """Low-rank adapters in place of training the weights (LoRA, arXiv 2106.09685); needs the extra `lora`.

    Engines are given the merged weights, which every engine serves, or with `rollout.weights` the adapters alone. In 16
    bits a merge loses changes below half a unit in a weight's last place; adapters round where the learner does.
    """

    rank: int = Field(default=16, ge=1)
    """Rank of every adapter."""
    alpha: int = Field(default=32, gt=0)
    """Numerator of the scale alpha / rank of an adapter's product."""
    target_modules: list[str] = Field(default=[])
    """Last parts of the names of the linear layers that get an adapter ("q_proj"); empty: all but the head."""


class LearnerTable(Table):
    """How a policy learns."""

    processes: int = Field(default=1, ge=1)
    """Ranks of the learner's process group, on all its hosts together."""
    hosts: int = Field(default=1, ge=1, le=4096)
    """Hosts of the run over which the ranks are spread, the same number on each."""
    sharding: Literal["replicate", "shard"] = "replicate"
    """Placement of parameters, gradients and moments: all of them on every rank, or sharded across ranks (FSDP2). Left
    out with several `hosts`: "shard" if `shard_size` is above 1, or is 0 and a host has several ranks."""
    shard_size: int = Field(default=0, ge=0)
    """Ranks that share one copy of parameters, gradients and moments where `sharding` is "shard"; 0: all ranks of a
    host, so that only gradients are exchanged between hosts, once per update."""
    context_parallel: int = Field(default=1, ge=1)
    """Neighbouring ranks that split the token positions of each pass, for answers too long for one rank; in attention
    they split the heads instead (Ulysses). `microbatch_tokens` counts the tokens of all these ranks together."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward pass; gradients are summed in float32 in any case. Left out on "cuda":
    "bfloat16"."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the parameters. In bfloat16 each update is rounded stochastically, and a parameter takes 2 bytes
    instead of 4. Adapters stay in float32, and the weights below them must already be in bfloat16. May be changed when
    a run is resumed."""
    optimizer_memory: Literal["device", "host"] = "device"
    """Location of AdamW's moments. On the host they are copied to the GPU piece by piece in each update: a rank needs
    half the memory between its passes, updates are slower, and the parameters are the same."""
    optimizer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of AdamW's moments. In bfloat16, stochastically rounded, they take 4 bytes for each trained
    parameter instead of 8. May be changed when a run is resumed."""
    lora: LoraTable | None = None
    """Adapters to train instead of the weights; the reference policy is then the model without adapters."""
    activation_checkpointing: bool = False
    """Whether blocks keep only their inputs and are computed again in the backward pass: less memory, a third more
    compute. Left out on "cpu": true if a large model would otherwise not fit into main memory."""
    activation_offload: bool = False
    """Whether the inputs that `activation_checkpointing` keeps are offloaded to main memory. The copies overlap with
    the computation, and results stay bit-identical. On "cpu" it saves nothing."""
    router_replay: bool = False
    """Whether the learner sends tokens of a mixture of experts to the experts that the engine chose when it sampled
    them; the gate values are the learner's (R3)."""
    compile: bool = False
    """Whether torch.compile compiles blocks: faster passes after a minute of compiling (needs a C++ compiler)."""
    attention_kernel: Literal["rows", "varlen", "auto"] = "rows"
    """Kernel for attention over packed rows: "rows" makes one call per row length, on any device; "varlen" is torch's
    flash kernel, one call for rows of all lengths, on Ampere or newer GPUs in bfloat16; "auto" tests "varlen" at the
    start, and uses "rows" where it is not available. Left out on "cuda" in bfloat16: "auto"."""
    logprob_kernel: Literal["chunked", "liger"] = "chunked"
    """Kernel that turns hidden states into log-probabilities: chunks of logits, on any device, or Liger's fused kernel,
    on Hopper GPUs in bfloat16 (extra `liger`)."""
    chunk_logits: int = Field(default=1 << 25, ge=1)
    """Maximum number of logits that the head computes at once, for one chunk of tokens; they are float32, and a pass
    needs memory for a few such chunks. Left out on "cuda": 2^28."""
    prompts_per_step: int = Field(default=32, ge=1)
    """Groups that one step consumes (B)."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per step."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate of AdamW: that of the first step, or of the last step of the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to `lr`."""
    lr_schedule: Literal["linear", "cosine"] = "linear"
    """Shape of the decay of the learning rate after the warm-up, down to `lr_final_share`."""
    lr_final_share: float = Field(default=1.0, gt=0, le=1)
    """Share of `lr` that is left at the last step; 1 keeps the learning rate constant."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Moment decay rates of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum global norm of the gradients; larger gradients are scaled down to it."""
    max_staleness_versions: int = Field(default=2, ge=0)
    """Maximum staleness of a group in versions; older groups are dropped when a batch is formed (eta)."""
    pace: Literal["staleness_bound", "adaptive"] = "staleness_bound"
    """Number of groups in flight or waiting: as many as `max_staleness_versions` allows ("staleness_bound"), or fewer
    as long as the learner never waits for more ("adaptive"). "adaptive" trains on fresher groups, but under a sharing
    regime fewer groups can wait for peers."""
    reuse_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of a step's groups that are not sampled for it: own groups of earlier steps, drawn at random and trained on
    again. 0 reuses none."""
    max_reuses: int = Field(default=1, ge=1)
    """Number of times that a group may be trained on again, at most once per step, and only while it is not older than
    `max_staleness_versions`. That bound then leaves as many fewer versions for sampling ahead."""
    microbatch_tokens: int = Field(default=8192, ge=32)
    """Tokens of one forward and backward pass; the prompt counts with every answer. Left out on "cpu": fewer, if a
    large model would otherwise not fit into main memory."""
    mismatch_alarm_nats: float = Field(default=0.2, gt=0)
    """Divergence of a step's sampled tokens (k3, learner against engine) above which a warning is counted."""
    data_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds after which a learner fails, and names the missing data, while no worker reports, or no worker samples,
    verifies or loads anything. Left out: 20 s more for each GB of the model's weights."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which ranks that wait for another rank, in a pass or a reduction, fail and name that rank. Left
    out: 20 s more for each GB of the model's weights."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per rank."""
    checkpoint_every: int = Field(default=25, ge=0)
    """Steps between checkpoints; 0 checkpoints at the end only."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints that are kept."""

    @property
    def reused_groups(self) -> int:
        """Groups of a step that were trained on before."""
        return round(self.reuse_share * self.prompts_per_step)

    @property
    def fresh_groups(self) -> int:
        """Groups that are sampled for one step."""
        return self.prompts_per_step - self.reused_groups

    @property
    def reserved_versions(self) -> int:
        """Versions of the staleness bound that are reserved for training on groups again."""
        return self.max_reuses if self.reused_groups else 0

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of parameters, gradients and moments."""
        return (self.shard_size or self.ranks_per_host) if self.sharding == "shard" else 1

    @property
    def ranks_per_host(self) -> int:
        """Ranks on each of the learner's hosts."""
        return self.processes // self.hosts

    @property
    def publishing_ranks(self) -> int:
        """Number of ranks that write new weights together: those of the first host, or all that hold the first copy."""
        return max(self.ranks_per_host, self.num_shards)


class PolicyTable(Table):
    """One policy: its model, its sampling, its objective, its learning."""

    model: str = ""
    """Hugging Face model folder of the policy, or, if there is no such folder, the id of a model on the hub
    ("Qwen/Qwen3-0.6B"), which is fetched before the run. Empty when `make` builds the model."""
    model_revision: str = ""
    """Branch, tag or commit of a model on the hub; empty: its main branch. The run is pinned to the commit to which
    this refers at its start."""
    source: str = ""
    """Hub id of the model in the folder `model`; it is fetched from the hub if that folder is missing. In a run's
    `config.json` the id has the form ID@COMMIT."""
    make: MakeTable | None = None
    """Recipe of a small local policy."""
    frozen: bool = False
    """Whether the policy is a teacher: engines, no learner. An error unless the sharing regime asks it for scores."""
    device: str = "cpu"
    """Device of learner and embedded engine: "cpu" or "cuda"."""
    turns: bool = False
    """Whether learner and engines take turns on their device with all other policies that have `turns`, and wait in
    main memory in between. For hosts whose devices cannot hold all of them at once."""
    prompt: PromptTable = PromptTable()
    rollout: RolloutTable = RolloutTable()
    objective: ObjectiveTable = ObjectiveTable()
    learner: LearnerTable = LearnerTable()

    @property
    def replays_routers(self) -> bool:
        """Whether the policy's engines tell its learner which experts the tokens went to."""
        return self.learner.router_replay and not self.frozen

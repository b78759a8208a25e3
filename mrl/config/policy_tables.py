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
    """Attention heads; there are half as many key-value heads, at least one."""
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

    Text around a prompt is not sampled, and so never trained on.
    """

    system: str = ""
    """System message before every prompt; a prompt that is a conversation with its own system message keeps that."""
    few_shot: list[ShotTable] = Field(default=[])
    """Examples before every prompt, questions with answers: [{ user = "...", assistant = "..." }]."""
    few_shot_file: str = ""
    """JSONL file with more examples, one a line. A run keeps them in `few_shot` of its `config.json`."""
    chat_template: str = ""
    """Jinja template in place of the model's own: a file, or the template itself, which has "{{" or "{%" in it. A run
    keeps the text in its `config.json`."""
    template_options: dict[str, Any] = Field(default={})
    """Variables that the chat template is given, as { enable_thinking = false }. A variable that the template does not
    read is refused."""
    today: date | None = None
    """Date for a chat template that prints the day, as 2026-11-29. Left out: the day on which the run begins; its
    `config.json` keeps it."""
    assistant_prefill: str = ""
    """Text that every answer begins with, as the end of the prompt; neither verifiers nor peers are given it."""
    history: Literal["template", "sampled"] = "template"
    """Form in which the policy sees its earlier turns in an episode: as its chat template renders them, or all that it
    sampled. Where the template drops their reasoning (`<think>...</think>`), a new training row begins."""
    family: str = ""
    """The model's family in the package `renderers` (extra `renderers`), "qwen3.5" say. By it tool calls are read and
    episodes go on where the chat template does not suffice. Both have to render conversations alike."""
    stop: list[StopString] = Field(default=[], max_length=16)
    """Texts that end an answer as its EOS does. The sampled answer is kept whole; a verifier is given the text before
    the stop text."""

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
    """Base URL of a server that somebody else started, for one worker; empty: each worker starts its own server."""
    python: str = ""
    """Interpreter of the engine's environment; empty: that of the environment which `mrl engine-env` makes."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights in the server, and of those published for it. Left out on "cuda": "bfloat16"."""
    context_tokens: int = Field(default=2048, ge=16)
    """Greatest number of tokens of prompt and answer together."""
    options: list[str] = Field(default=[])
    """Further words for the server's command line, passed on unchanged."""
    start_s: float = Field(default=600.0, gt=0)
    """Seconds after its start in which a server has to take requests, or it is given up. Left out: 30 s more for each
    GB of the model's weights."""
    load_s: float = Field(default=0.0, ge=0)
    """Seconds in which a server has to take new weights, or it is replaced; 0: a minute, and 20 s per GB of weights."""
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
    """Place of the weight files: the learner's memory, which its host's processes can open, or the run folder. "auto"
    takes memory in a run of one host (`exchange.host` is no wildcard), but for a server by its `url`. "gpu" is memory
    and two versions more on the learner's GPU, from which an embedded engine or an own vLLM copies by CUDA IPC."""
    embedded_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in the embedded engine. Left out on "cuda": "bfloat16"."""
    server: ServerTable = ServerTable()
    workers: int = Field(default=1, ge=0)
    """Worker processes, each with an engine of its own."""
    gpus: int = Field(default=1, ge=1, le=64)
    """GPUs of one vLLM or SGLang server, over which it splits its weights and its cache (tensor parallelism). On a
    leased unit a server has all GPUs of the unit."""
    group_size: int = Field(default=8, ge=1, le=1024)
    """Answers per prompt (G)."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Token limit of one answer."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the learner's log-probabilities use the same."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine."""
    answers_at_once: int = Field(default=0, ge=0)
    """Answers that the engine samples side by side, at least a group; 0 takes all that the worker may have in flight.
    Bounds the key-value cache; apart from rounding, answers do not depend on it. Left out on "cpu" for a large model:
    as many groups as main memory has room for."""
    unit_types: list[str] = Field(default=[])
    """Types of `allocation.unit_types` on whose units the engine fits, by its memory say; empty: all of its kind."""

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
    """Whether own answers that the token limit cut are left out of training, and of every denominator; their rewards
    count in the group's baseline all the same."""
    drop_uniform_groups: bool | None = None
    """Whether groups whose answers all have one reward are replaced by groups for other prompts (DAPO)."""
    max_resampling: float = Field(default=10.0, ge=1)
    """Prompts sampled for one step at most, as a multiple of `prompts_per_step`; then uniform groups are taken."""


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
    """Hosts of the run over which the ranks are spread, as many on each."""
    sharding: Literal["replicate", "shard"] = "replicate"
    """Placement of parameters, gradients and moments: all of them on every rank, or shared out between ranks (FSDP2).
    Left out with several `hosts`: "shard", where a host has several of the ranks or `shard_size` wants it."""
    shard_size: int = Field(default=0, ge=0)
    """Ranks that share one copy of parameters, gradients and moments where `sharding` is "shard"; 0 takes all ranks of
    a host, so that between hosts gradients alone travel, once for each update."""
    context_parallel: int = Field(default=1, ge=1)
    """Neighbouring ranks that split the token positions of each pass, for answers too long for one rank; attention
    exchanges positions for heads (Ulysses). `microbatch_tokens` counts the tokens of all these ranks together."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward pass; gradients are summed in float32 in any case. Left out on "cuda":
    "bfloat16"."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the parameters. In bfloat16 each update is rounded stochastically, and a parameter takes 2 bytes
    in place of 4. Adapters stay in float32, and the weights below them have to be in bfloat16 already. May be changed
    at a resume."""
    optimizer_memory: Literal["device", "host"] = "device"
    """Place of AdamW's moments. On the host they visit the GPU piece by piece in each update: half the memory of a rank
    between its passes, for a slower update and the same parameters."""
    optimizer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of AdamW's moments. In bfloat16, stochastically rounded, they take 4 bytes for each trained
    parameter in place of 8. May be changed at a resume."""
    lora: LoraTable | None = None
    """Adapters to train in place of the weights; the reference policy is then the model without adapters."""
    activation_checkpointing: bool = False
    """Whether blocks keep their inputs alone and run again in the backward pass: less memory, a third more compute.
    Left out on "cpu": true, where a large model would not fit into main memory else."""
    activation_offload: bool = False
    """Whether the inputs that `activation_checkpointing` keeps wait in main memory. They are copied there and back
    beside the arithmetic; the bits stay the same. On "cpu" it saves nothing."""
    router_replay: bool = False
    """Whether tokens of a mixture of experts go to the experts that the engine chose for them as it sampled; the gate
    values are the learner's (R3)."""
    compile: bool = False
    """Whether blocks go through torch.compile: faster passes, after a minute of compiling (needs a C++ compiler)."""
    attention_kernel: Literal["rows", "varlen", "auto"] = "rows"
    """Kernel for attention over packed rows: "rows" is a call for each length among them, on any device; "varlen" is
    torch's flash kernel, once for rows of all lengths, on GPUs from Ampere on in bfloat16; "auto" proves that kernel at
    the start, and takes "rows" where it cannot be had. Left out on "cuda" in bfloat16: "auto"."""
    logprob_kernel: Literal["chunked", "liger"] = "chunked"
    """Kernel that turns hidden states into log-probabilities: chunks of logits, on any device, or Liger's fused kernel,
    on Hopper GPUs in bfloat16 (extra `liger`)."""
    chunk_logits: int = Field(default=1 << 25, ge=1)
    """Greatest number of logits that the head computes at once, for a chunk of tokens; in float32, with memory for a
    few such chunks in a pass. Left out on "cuda": 2^28."""
    prompts_per_step: int = Field(default=32, ge=1)
    """Groups that one step consumes (B)."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per step."""
    lr: float = Field(default=3e-4, gt=0)
    """Highest learning rate of AdamW: that of the first step, or of the last step of the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to `lr`."""
    lr_schedule: Literal["linear", "cosine"] = "linear"
    """Shape of the learning rate's fall after the warm-up, down to `lr_final_share`."""
    lr_final_share: float = Field(default=1.0, gt=0, le=1)
    """Share of `lr` that is left at the last step; 1 keeps it constant."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Moment decay rates of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Greatest global norm of the gradients, to which they are scaled down."""
    max_staleness_versions: int = Field(default=2, ge=0)
    """Greatest staleness of a group in versions; older groups are dropped when a batch is formed (eta)."""
    pace: Literal["staleness_bound", "adaptive"] = "staleness_bound"
    """Groups in flight and in stock: as many as `max_staleness_versions` allows, or fewer where the learner never waits
    for more. "adaptive" trains on fresher groups; a sharing regime has less stock in which groups wait for peers."""
    reuse_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of a step's groups that are not sampled for it: own groups of earlier steps, drawn at random and trained on
    again. 0 reuses none."""
    max_reuses: int = Field(default=1, ge=1)
    """Number of times that a group may be trained on again, once a step at most, and only while it is not older than
    `max_staleness_versions`; so much less of that bound is left for sampling ahead."""
    microbatch_tokens: int = Field(default=8192, ge=32)
    """Tokens of one forward and backward pass, prompts counted with every answer. Left out on "cpu": fewer, where a
    large model would not fit into main memory else."""
    mismatch_alarm_nats: float = Field(default=0.2, gt=0)
    """Divergence of a step's sampled tokens (k3, learner against engine) above which it is warned of and counted."""
    data_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds after which a learner gives up, and says what it awaited, while no worker is heard, or none of them
    samples, judges or loads anything. Left out: 20 s more for each GB of the model's weights."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which ranks that wait for another rank, in a pass or in a sum, end and say for which one. Left out:
    20 s more for each GB of the model's weights."""
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
    """Hugging Face folder of the policy, or where there is none the id of a model on the hub ("Qwen/Qwen3-0.6B"), which
    is fetched before the run; empty when `make` builds the model."""
    model_revision: str = ""
    """Branch, tag or commit of a model on the hub; empty: its main branch. The run is pinned to the commit that this
    names at its start."""
    source: str = ""
    """Id on the hub of the model in the folder `model`, which is fetched from there where that folder is missing. A
    run's `config.json` has it as ID@COMMIT."""
    make: MakeTable | None = None
    """Recipe of a small local policy."""
    frozen: bool = False
    """Whether the policy is a teacher: engines and no learner. Refused unless the sharing regime asks it for scores."""
    device: str = "cpu"
    """Device of learner and embedded engine: "cpu" or "cuda"."""
    turns: bool = False
    """Whether learner and engines take turns on their device, with those of all other policies that do; without the
    turn they wait in main memory. For a host without room for all of them; each waits for the others."""
    prompt: PromptTable = PromptTable()
    rollout: RolloutTable = RolloutTable()
    objective: ObjectiveTable = ObjectiveTable()
    learner: LearnerTable = LearnerTable()

    @property
    def replays_routers(self) -> bool:
        """Whether the policy's engines tell its learner which experts the tokens went to."""
        return self.learner.router_replay and not self.frozen

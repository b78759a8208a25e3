"""The tables of one policy: its model, how it samples, what it maximises, how it learns."""

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Field

from mrl.config.table import Table

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of one number in each format."""
SERVER_URL = r"^(https?://[^/\s]+)?$"
StopString = Annotated[str, Field(min_length=1, max_length=200)]


class MakeTable(Table):
    """How `mrl policies make` builds a small policy locally."""

    architecture: Literal["qwen3", "llama", "gemma3", "qwen3_moe"]
    """Architecture of the policy."""
    tokenizer: Literal["byte_level", "metaspace"]
    """Kind of tokenizer trained for it."""
    vocab_size: int = Field(default=512, ge=300, le=65536)
    """Size of its vocabulary."""
    hidden_size: int = Field(default=128, ge=16, multiple_of=8)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Attention heads; there are half as many key-value heads, at least one."""
    skilled_in: list[str] = Field(default=[])
    """Operations that the warm start makes likely; the others stay rare."""
    rare_share: float = Field(default=0.02, ge=0, le=1)
    """Probability of each operation that the policy is not skilled in."""
    warm_start_steps: int = Field(default=600, ge=0)
    """Supervised steps."""
    warm_start_batch: int = Field(default=64, ge=1)
    """Rows per supervised step."""
    warm_start_lr: float = Field(default=2e-3, gt=0)
    """Peak learning rate of the warm start."""
    seed: int = Field(default=1, ge=0)
    """Seeds initial weights and warm-start data."""

    @property
    def num_cached_heads(self) -> int:
        """Heads of keys and values."""
        return max(1, self.num_heads // 2)


class ShotTable(Table):
    """A question and its answer that a policy is shown before it is asked."""

    user: str = Field(..., min_length=1)
    """The question."""
    assistant: str = Field(..., min_length=1)
    """The answer."""


class PromptTable(Table):
    """How a policy is asked: what stands around the prompt of a task, and where an answer begins and ends.

    What stands around a prompt is not sampled, and so never trained on.
    """

    system: str = ""
    """System message of every prompt; a prompt that is a conversation with one of its own keeps that."""
    few_shot: list[ShotTable] = Field(default=[])
    """Questions with their answers that stand before every prompt: [{ user = "...", assistant = "..." }]."""
    few_shot_file: str = ""
    """JSONL file with more of them, one a line. A run keeps what it holds in `few_shot` of its `config.json`."""
    chat_template: str = ""
    """Jinja template in place of the model's own: a file, or the template itself, which has "{{" or "{%" in it. A run
    keeps the text in its `config.json`."""
    template_options: dict[str, Any] = Field(default={})
    """Variables that the chat template is given, as { enable_thinking = false }; one that it does not read is
    refused."""
    today: date | None = None
    """The day that a chat template prints which prints one, as 2026-11-29. Left out: that on which the run begins; its
    `config.json` keeps it."""
    assistant_prefill: str = ""
    """Text that every answer begins with, as the end of the prompt: neither verifiers nor peers are given it."""
    history: Literal["template", "sampled"] = "template"
    """What the policy sees of its earlier turns in an episode: what its chat template renders, or all that it sampled.
    Where the template drops their reasoning (`<think>...</think>`), a new row begins."""
    family: str = ""
    """The model's family as the package `renderers` calls it, "qwen3.5" say (extra `renderers`). By it tool calls are
    read, and episodes go on, where mrl cannot do so by the chat template. Both have to say conversations alike."""
    stop: list[StopString] = Field(default=[], max_length=16)
    """Texts that end an answer as its EOS does. What was sampled is kept whole; a verifier is given the text before
    them."""

    @property
    def stop_bytes(self) -> tuple[bytes, ...]:
        """The stop strings as engines and verifiers look for them."""
        return tuple(text.encode() for text in self.stop)

    @property
    def has_messages(self) -> bool:
        """Whether it needs a chat template."""
        return bool(self.system or self.few_shot or self.template_options or self.family)


class ServerTable(Table):
    """An inference server as the engine of a policy's workers."""

    url: str = Field(default="", pattern=SERVER_URL)
    """Base URL of a server that somebody else started, for one worker; empty: each worker starts its own."""
    python: str = ""
    """Interpreter of the engine's environment; empty: the one that `mrl engine-env` makes."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights in the server, in which they are published. Left out on "cuda": "bfloat16"."""
    context_tokens: int = Field(default=2048, ge=16)
    """Prompt and answer together, at most."""
    options: list[str] = Field(default=[])
    """Further words for the server's command line, passed on unchanged."""
    start_s: float = Field(default=600.0, gt=0)
    """A server that takes no requests for this long after its start is given up. Left out: 30 s more for each GB of
    the model's weights."""
    load_s: float = Field(default=0.0, ge=0)
    """A server that has not taken new weights after this long is replaced; 0: a minute, and 20 s per GB of weights."""
    silence_s: float = Field(default=60.0, gt=0)
    """A server that answers nothing for this long is replaced."""
    stall_s: float = Field(default=120.0, gt=0)
    """A server that has answers in flight and samples no token for this long is replaced. Left out: 10 s more for
    each GB of the model's weights."""


class RolloutTable(Table):
    """How a policy samples."""

    engine: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Engine that generates: transformers in the worker's process, or a server of its own environment."""
    weights: Literal["files", "broadcast", "adapters"] = "files"
    """How new weights reach the engines: in files, broadcast from the learner's memory, or, of a learner with `lora`,
    as files of the adapters alone. Left out on "cuda": "adapters" of a learner with `lora`, for an embedded engine or a
    vLLM that the run starts and that never sleeps (`turns`, `allocation.residency`)."""
    weights_in: Literal["auto", "memory", "disk", "gpu"] = "auto"
    """Where these files lie: in the learner's memory, which its host's processes can open, or in the run folder. "auto"
    takes memory in a run of one host (`exchange.host` is no wildcard), but for a server by its `url`. "gpu" is memory,
    and two versions more on the learner's GPU, from which an embedded engine or an own vLLM copies by CUDA IPC."""
    embedded_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in the embedded engine. Left out on "cuda": "bfloat16"."""
    server: ServerTable = ServerTable()
    workers: int = Field(default=1, ge=0)
    """Worker processes, each with an engine of its own."""
    gpus: int = Field(default=1, ge=1, le=64)
    """GPUs of one server of vLLM or SGLang, over which it shares out its weights and its cache (tensor parallelism). On
    a leased unit a server has all GPUs of the unit."""
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
    Bounds the key-value cache; apart from rounding, what is sampled does not depend on it. Left out on "cpu": as many
    groups as main memory has room for, where the model is a large one."""
    unit_types: list[str] = Field(default=[])
    """Types of `allocation.unit_types` on whose units the engine fits, for its memory say; empty: all of its kind."""

    @property
    def engine_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Number format of the weights that the policy's engines serve."""
        return self.embedded_dtype if self.engine == "embedded" else self.server.dtype


class CorrectionTable(Table):
    """The detached weight pi_prox / pi_behaviour that carries stale or mismatched tokens to the present policy."""

    level: Literal["off", "token", "sequence", "geometric"] | None = None
    """Weight of each token, of the whole answer (product over its tokens), or their geometric mean; "off" has none.
    Left out: "token", and "geometric" for the method `gspo`, whose own ratio is that of the whole answer."""
    action: Literal["truncate", "mask", "gate"] = "truncate"
    """Outside the bounds: held at the bound (TIS), zeroed (IcePop), or 1 inside and 0 outside (sequence masking)."""
    lower: float = Field(default=0.0, ge=0)
    """Lower bound of the weight."""
    upper: float = Field(default=5.0, gt=0)
    """Upper bound of the weight."""


class ObjectiveTable(Table):
    """What a policy maximises on its own rows. Keys left out take the method's own values."""

    method: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo"] = "grpo"
    """Named set of values for the keys below."""
    clip_low: float | None = Field(default=None, gt=0)
    """Lower clip of the ratio."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip of the ratio."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the term for negative advantages, as a multiple of the advantage."""
    advantage: Literal["group_std", "group_mean"] | None = None
    """Rewards minus the group's mean, divided by its standard deviation or not."""
    std_correction: Literal[0, 1] = 1
    """Degrees of freedom taken off that standard deviation; 0 is the population's."""
    aggregation: Literal["sequence_mean", "token_mean", "constant"] | None = None
    """Mean over answers of token means; mean over all tokens; or sum over answers * max_new_tokens."""
    kl_coefficient: float | None = Field(default=None, ge=0)
    """Weight of the divergence from the policy at the start of the run; above 0 keeps a frozen copy of it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator of that divergence."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    correction: CorrectionTable = CorrectionTable()
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Answers that reach into the last so many tokens of the limit lose reward, in a straight line (DAPO); 0 is off."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward lost at the limit."""
    mask_cut_answers: bool = False
    """Own answers that the token limit cut are not trained on, and count in no denominator; their rewards count in the
    group's baseline all the same."""
    drop_uniform_groups: bool | None = None
    """Groups whose answers all have one reward are not trained on; other prompts are sampled instead (DAPO)."""
    max_resampling: float = Field(default=10.0, ge=1)
    """Prompts sampled for one step at most, as a multiple of `prompts_per_step`; then uniform groups are taken."""


class LoraTable(Table):
    """Low-rank adapters in place of training the weights (LoRA, arXiv 2106.09685); needs the extra `lora`.

    Engines are given the merged weights, which every engine serves, or with `rollout.weights` the adapters alone. In 16
    bits a merge loses every change smaller than half a unit of its weight; adapters round where the learner does.
    """

    rank: int = Field(default=16, ge=1)
    """Rank of every adapter."""
    alpha: int = Field(default=32, gt=0)
    """The adapter's product is scaled by alpha / rank."""
    target_modules: list[str] = Field(default=[])
    """Last names of the linear layers that get one ("q_proj"); empty: all linear layers but the head."""


class LearnerTable(Table):
    """How a policy learns."""

    processes: int = Field(default=1, ge=1)
    """Ranks of the learner's process group, on all its hosts together."""
    hosts: int = Field(default=1, ge=1, le=4096)
    """Hosts of the run that the ranks are spread over, as many on each."""
    sharding: Literal["replicate", "shard"] = "replicate"
    """Every rank holds all parameters, gradients and moments, or the ranks share them out (FSDP2). Left out with more
    `hosts` than one: "shard", where a host has several of the ranks or `shard_size` wants it."""
    shard_size: int = Field(default=0, ge=0)
    """Ranks that share one copy of them where `sharding` is "shard"; 0 takes all ranks of a host, so that between hosts
    gradients alone travel, once for each update."""
    context_parallel: int = Field(default=1, ge=1)
    """Neighbouring ranks that share the places of each pass, for answers too long for one of them; attention exchanges
    places for heads (Ulysses). `microbatch_tokens` counts what they hold together."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward; gradients are summed in float32 in any case. Left out on "cuda":
    "bfloat16"."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format that parameters are kept in: in bfloat16 each update is rounded at random, and they take 2 bytes in
    place of 4. Adapters stay in float32, and the weights below them have to be in bfloat16 already. May be changed at a
    resume."""
    optimizer_memory: Literal["device", "host"] = "device"
    """Where the moments of AdamW lie. On the host they visit the GPU piece by piece in each update: half the memory of
    a rank between its passes, for a slower update and the same parameters."""
    optimizer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format that the moments of AdamW are kept in: in bfloat16, rounded at random, they take 4 bytes for each
    trained parameter in place of 8. May be changed at a resume."""
    lora: LoraTable | None = None
    """Train adapters and leave the weights as they are; the reference policy is then the model without them."""
    activation_checkpointing: bool = False
    """Blocks keep their inputs alone and run again in the backward pass: less memory, a third more compute. Left out on
    "cpu": true, where a large model would not fit into main memory else."""
    activation_offload: bool = False
    """The inputs that `activation_checkpointing` keeps wait in main memory, and are copied there and back beside the
    arithmetic; the bits stay the same. On "cpu" it saves nothing."""
    router_replay: bool = False
    """Of a mixture of experts: tokens go to the experts that the engine chose for them as it sampled; gates are the
    learner's (R3)."""
    compile: bool = False
    """Blocks go through torch.compile: faster passes, after a minute of compiling (a compiler of C++ is needed)."""
    attention_kernel: Literal["rows", "varlen", "auto"] = "rows"
    """What attends to packed rows: a call for each length among them, on any device, or torch's flash kernel, once for
    rows of all lengths, on GPUs from Ampere on in bfloat16; "auto" proves that kernel at the start, and takes "rows"
    where it cannot be had. Left out on "cuda" in bfloat16: "auto"."""
    logprob_kernel: Literal["chunked", "liger"] = "chunked"
    """What turns hidden states into log-probabilities: chunks of logits, on any device, or Liger's fused kernel, on
    Hopper GPUs in bfloat16 (extra `liger`)."""
    chunk_logits: int = Field(default=1 << 25, ge=1)
    """Logits of a chunk of tokens that the head is applied to at once, at most; in float32, of which a pass needs a
    few. Left out on "cuda": 2^28."""
    prompts_per_step: int = Field(default=32, ge=1)
    """Groups that one step consumes (B)."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per step."""
    lr: float = Field(default=3e-4, gt=0)
    """Highest learning rate of AdamW: that of the first step, or of the last step of the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to `lr` in a straight line."""
    lr_schedule: Literal["linear", "cosine"] = "linear"
    """Shape of its fall afterwards, down to `lr_final_share`."""
    lr_final_share: float = Field(default=1.0, gt=0, le=1)
    """Share of `lr` that is left at the last step; 1 keeps it constant."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Moment decay rates of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    max_staleness_versions: int = Field(default=2, ge=0)
    """Groups older than this are dropped when a batch is formed (eta)."""
    pace: Literal["staleness_bound", "adaptive"] = "staleness_bound"
    """Groups in flight and in stock: as many as that bound allows, or fewer where the learner never waits for more.
    Adaptive keeps what is trained on fresher; it leaves a sharing regime less stock in which groups wait for peers."""
    reuse_share: float = Field(default=0.0, ge=0, lt=1)
    """Part of a step's groups that are not sampled for it: own groups of earlier steps, drawn at random and trained on
    again. 0 reuses none."""
    max_reuses: int = Field(default=1, ge=1)
    """How often a group may be trained on again, once a step at most, and only while it is not older than
    `max_staleness_versions`; so much less of that bound is left for sampling ahead."""
    microbatch_tokens: int = Field(default=8192, ge=32)
    """Tokens of one forward and backward pass, prompts counted with every answer. Left out on "cpu": fewer, where a
    large model would not fit into main memory else."""
    mismatch_alarm_nats: float = Field(default=0.2, gt=0)
    """A step whose sampled tokens diverge by more than this (k3, learner against engine) is warned of and counted."""
    data_timeout_s: float = Field(default=300.0, gt=0)
    """A learner gives up, and says what it awaited, when for this long no worker is heard, or none of them samples,
    judges or loads anything. Left out: 20 s more for each GB of the model's weights."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Ranks that wait for one of them for longer than this, in a pass or in a sum, end and say for whom they waited.
    Left out: 20 s more for each GB of the model's weights."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per rank."""
    checkpoint_every: int = Field(default=25, ge=0)
    """Steps between checkpoints; 0 checkpoints at the end only."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""

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
        """Versions of the staleness bound that are left for groups to be trained on again in."""
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
        """The first so many write new weights together: those of the first host, or all that share the first copy."""
        return max(self.ranks_per_host, self.num_shards)


class PolicyTable(Table):
    """One policy: its model, how it samples, how it learns."""

    model: str = ""
    """Hugging Face folder of the policy, or where there is none the id of a model on the hub ("Qwen/Qwen3-0.6B"), which
    is fetched before the run; empty when `make` builds it."""
    model_revision: str = ""
    """Branch, tag or commit of a model on the hub; empty: its main branch. The run is pinned to the commit that this is
    at its start."""
    source: str = ""
    """Id on the hub of what the folder `model` holds: it is taken from there where that folder is missing. A run's
    `config.json` has it as ID@COMMIT."""
    make: MakeTable | None = None
    """Recipe of a small local policy."""
    frozen: bool = False
    """A frozen policy has engines and no learner: a teacher. Refused unless the sharing regime asks it for scores."""
    device: str = "cpu"
    """Device of learner and embedded engine: "cpu" or "cuda"."""
    turns: bool = False
    """Learner and engines have their device in turns, with those of all policies that do: whoever has not the turn is
    in main memory. For a host without room for all of them; each waits for the others."""
    prompt: PromptTable = PromptTable()
    rollout: RolloutTable = RolloutTable()
    objective: ObjectiveTable = ObjectiveTable()
    learner: LearnerTable = LearnerTable()

    @property
    def replays_routers(self) -> bool:
        """Whether its engines tell which experts tokens went to, for its learner."""
        return self.learner.router_replay and not self.frozen

"""The need of each process of a plan at its worst moment, part by part, before anything is started.

Pure arithmetic. The memory of a pass through the model was traced before (`pass_memory`); nothing here knows a family
of models. On a GPU the parts of a model lie on the device, and the process itself, with all that it copies to the disk,
on the host.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mrl.config.policy_tables import ELEMENT_BYTES, LearnerTable, PolicyTable
from mrl.models.size import Microbatch, ModelSize, PassPeaks
from mrl.processes.unit_memory import SLEEPER_MIB

MIB = 1024 * 1024
DAEMON_MIB = 75
AGENT_MIB = 220
"""torchrun beside its ranks; it imports torch and holds no tensor."""
TORCH_MIB = 460
"""A process that has imported torch, transformers and the tasks; a third of it are pages that all such processes
share."""
VOCABULARY_BYTES = 2000
"""Bytes per token of a vocabulary, in a process that has its policy's tokenizer; measured with those of Qwen and
Mistral."""
SERVER_MIB = {"vllm": 1100, "sglang": 1500}
"""Processes of a server beside weights and cache, measured on CPUs (vLLM 0.32, SGLang 0.5.23)."""
TRACKER_MIB = {"swanlab": 85, "tensorboard": 45, "trackio": 85, "wandb": 125}
"""The process of a tracker and those that it starts, measured after 2,000 records of 60 values (swanlab, wandb
offline)."""
FLOAT_BYTES = 4
NEW_WEIGHTS = "new weights"
CUDA_CONTEXT = "CUDA context"
SAMPLING_BYTES = 20
"""Bytes per row and token of the vocabulary while tokens are sampled: logits, scaled logits, softmax, and its sum in
float64."""
KEPT_WHOLE, KEPT_IN_GAPS, KEPT_BY_EXPERTS = 0.2, 0.5, 1.25
"""Memory that malloc holds beyond a pass's own, as a share of it: gaps between freed blocks and the next needed ones.

Measured with glibc (`tools/check_memory_plan.py`). Blocks that are gathered and let go (FSDP2) leave more gaps, most
where the experts of a layer are one tensor. The short-lived products of adapters leave more gaps too.
"""
CUDA_CONTEXT_MIB = 640
"""Memory that every process takes of a GPU that it opened: context, kernels, and workspace of matrix products."""
KEPT_BY_CUDA = 0.05
"""Memory that torch's allocator takes of a GPU beside its tensors, in segments that grow, as a share of the tensors'
peak."""
SOON_WRITTEN = 1024**3
"""Bytes of a checkpoint's copies up to which they are on the disk before the next pass needs their memory."""
PUBLISHED_AT_ONCE = 512 * 1024**2
"""Bytes of gathered weights that wait to be copied (`mrl.weights.staging.GATHERED_BYTES`)."""
COPIES_IN_MEMORY, COPIES_FOR_DISK, COPIES_TO_SEND = 2, 1, 2
"""Versions in a learner's memory: the newest and the next where engines read them there or get a broadcast, one where
they are written to disk. An engine that reads a version for longer than two steps take causes a third, for which
nothing is set aside."""

UPDATED_ELEMENTS = {"gpu": 1 << 23, "cpu": 1 << 18}
"""Elements of a parameter whose moments are updated at once (`mrl.learner.piecewise_adamw`)."""
VISITORS = 2
"""Pieces of UPDATED_ELEMENTS that are on the device at once where moments lie on the host."""
ROUNDING_BYTES = {(False, False): 0, (True, False): 22, (False, True): 14, (True, True): 26}
"""(Whether moments are rounded, whether parameters are) -> bytes for each element of a piece: its values in float32,
random bits, and results."""
INPUTS_LEAVING = 2
"""Blocks whose inputs are on the device while those of other blocks wait on the host
(`mrl.learner.activation_offload`). In the backward pass one block's inputs arrive while another's are used."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of each part of a process at the moment at which their sum is largest."""

    moment: str
    parts: dict[str, float]

    @property
    def mib(self) -> float:
        """Sum of the parts in MiB."""
        return sum(self.parts.values()) / MIB


def largest_microbatch(policy: PolicyTable, prompt_tokens: int, answer_tokens: int) -> tuple[Microbatch, int]:
    """Return the fullest pass of a rank, and the number of passes in an update, when all rows have `answer_tokens`
    after their prompts.

    Ranks that share the places of a pass have rows that are shorter in proportion: attention by heads in place of
    places takes the same memory.
    """
    table, group_size = policy.learner, policy.rollout.group_size
    sharing = table.context_parallel
    rows = math.ceil(table.prompts_per_step * group_size / table.minibatches / (table.processes // sharing))
    at_once = min(rows, max(1, table.microbatch_tokens // (prompt_tokens + answer_tokens - 1)))
    held = Microbatch(at_once, group_size, math.ceil(prompt_tokens / sharing), math.ceil(answer_tokens / sharing))
    return held, math.ceil(rows / at_once)


def rank_needs(
    size: ModelSize,
    peaks: PassPeaks,
    table: LearnerTable,
    *,
    num_passes: int,
    holds_reference: bool,
    saves_beside_training: bool,
    on_gpu: bool = False,
    is_first: bool = True,
    staged: float = 0.0,
    staged_on_device: float = 0.0,
    scoring: float = 0.0,
) -> tuple[Need, Need]:
    """Return the needs of one rank of a learner, on its host and on its device; without a GPU both are the same memory.

    Where ranks have shards, the first one alone reads the model, and gives the others theirs. `staged` are bytes of
    published versions on the host (`staged_bytes`), `scoring` those of a pass over a canary.
    """
    rank = _Rank(
        size,
        peaks,
        table,
        num_passes=num_passes,
        holds_reference=holds_reference,
        is_first=is_first,
        on_gpu=on_gpu,
    )
    copies = {"checkpoint copy": rank.saved + rank.moments}
    process = process_parts(size) | {"published weights": staged}
    loading = Need("loading", {"parameters": (rank.read or rank.held) * (1 + holds_reference)})
    gathered = {"gathered weights": min(PUBLISHED_AT_ONCE, rank.whole) if rank.is_sharded else 0.0}
    beside = copies if saves_beside_training and copies["checkpoint copy"] > SOON_WRITTEN else {}
    if on_gpu:
        process |= {"optimizer": rank.moments - rank.moments_on_device, "offloaded inputs": float(peaks.offloaded)}
        host = [loading, Need("saving", copies)]
        versions = {"published weights": staged_on_device} if staged_on_device else {}
        return _with(process, host), _with(versions, [*rank.training(), rank.update(), rank.canary(scoring)])
    together = [
        loading,
        *(Need(need.moment, need.parts | rank.kept(need) | beside) for need in rank.training()),
        Need("update", rank.update().parts | beside),
        Need("canary", rank.canary(scoring).parts | beside),
        Need("saving", rank.state() | copies),
        Need("publishing", rank.state() | gathered | beside),
    ]
    need = _with(process, together)
    return need, need


def on_gpu_with(tensors: Need) -> Need:
    """Return the need of a process of torch on a GPU: its tensors, and all that it takes beside them."""
    beside = {CUDA_CONTEXT: CUDA_CONTEXT_MIB * MIB, "kept by the allocator": KEPT_BY_CUDA * tensors.mib * MIB}
    return Need(tensors.moment, tensors.parts | beside)


def resting_on_gpu(awake: Need) -> Need:
    """Return what a process keeps on a GPU that it has in turns, while another process has it."""
    return Need("resting", {CUDA_CONTEXT: awake.parts[CUDA_CONTEXT]} if awake.parts else {})


def process_parts(size: ModelSize) -> dict[str, float]:
    """Return the parts of a process with the tokenizer of its policy, before it has a model."""
    return {"process": float(TORCH_MIB * MIB), "vocabulary": float(VOCABULARY_BYTES * size.vocab_size)}


def element_bytes(policy: PolicyTable) -> int:
    """Return the bytes of a number in the weights and the cache of the policy's engines."""
    return ELEMENT_BYTES[policy.rollout.engine_dtype]


def staged_bytes(size: ModelSize, policy: PolicyTable, *, is_first: bool, in_memory: bool) -> float:
    """Return the bytes of versions that a rank of a learner has copied for the engines, in their number format."""
    rollout = policy.rollout
    copies = COPIES_IN_MEMORY if in_memory else COPIES_FOR_DISK
    if rollout.weights == "adapters":
        return float(copies * FLOAT_BYTES * size.trained) if is_first else 0.0
    if rollout.weights == "broadcast":
        return float(COPIES_TO_SEND * element_bytes(policy) * size.parameters) if is_first else 0.0
    return copies * element_bytes(policy) * size.parameters / policy.learner.publishing_ranks


def engine_need(
    size: ModelSize,
    policy: PolicyTable,
    *,
    answers_at_once: int,
    prompt_tokens: int,
    answer_tokens: int,
    scoring: float = 0.0,
    adapters: int = 0,
    plays_episodes: bool = False,
) -> Need:
    """Return the need of an embedded engine: weights twice (served, and the next ones), key-value cache, and sampling.

    An engine that is given adapters alone, of `adapters` elements, has those twice, and the weights once. Scoring the
    canary needs `scoring` bytes more. The rows of episodes that wait for their environments are kept, as far as they
    take no more than the cache.
    """
    rows = _allocated_rows(answers_at_once, policy.rollout.group_size)
    per_token = float(element_bytes(policy) * size.cached_per_token)
    cache = per_token * rows * _allocated_columns(prompt_tokens, answer_tokens)
    block = cache / size.num_blocks
    keeps = plays_episodes and not policy.replays_routers
    stays, comes = (size.parameters, adapters) if adapters else (0, size.parameters)
    return Need(
        "sampling",
        {
            "weights": element_bytes(policy) * (stays + 2.0 * comes),
            "key-value cache": cache + block * max(0.5, size.query_heads_per_cached),
            "sampling": SAMPLING_BYTES * size.vocab_size * answers_at_once,
        }
        | ({"canary": scoring} if scoring else {})
        | ({"kept turns": cache} if keeps else {}),
    )


def server_need(
    size: ModelSize, policy: PolicyTable, *, cached_tokens: int, vllm_cache_gib: int, gpus: int = 1
) -> Need:
    """Return the need of a server without its processes: weights, and on cores the cache; a GPU's cache has the size
    that the server's options set.

    With several `gpus` it is the need on each of them.

    vLLM on cores reads new weights beside the served ones. The first new weights are held twice, as read and as placed
    in new parameters.
    """
    per_element = element_bytes(policy)
    parts = {"server's weights": per_element * size.parameters / gpus}
    if policy.device == "cpu" and policy.rollout.engine == "vllm" and policy.rollout.weights != "adapters":
        parts[NEW_WEIGHTS] = float(2 * per_element * size.parameters)
    if policy.device == "cpu":
        of_sglang = per_element * size.cached_per_token * cached_tokens
        parts["key-value cache"] = float(vllm_cache_gib * 1024 * MIB if policy.rollout.engine == "vllm" else of_sglang)
    else:
        parts[CUDA_CONTEXT] = float(SLEEPER_MIB * MIB)
    return Need("sampling", parts)


def at_worst_turn(engines: Sequence[tuple[Need, Need]]) -> list[Need]:
    """Return the need of each of several engines that take turns, at the turn at which all of them together need most.

    `engines`: the need of each engine at its own turn, and while another has the turn.
    """
    if not engines:
        return []
    growth_mib = [turn.mib - rest.mib for turn, rest in engines]
    fullest = growth_mib.index(max(growth_mib))
    return [turn if index == fullest else rest for index, (turn, rest) in enumerate(engines)]


def _allocated_rows(answers: int, group_size: int) -> int:
    """Return the rows of the cache, which double from one group on, as `mrl.engines.slot_cache` makes room for them."""
    rows = min(group_size, answers)
    while rows < answers:
        rows = min(answers, 2 * rows)
    return rows


def _allocated_columns(prompt_tokens: int, answer_tokens: int) -> int:
    """Return the columns of the cache, which grow to twice the used ones and 64, whenever less than 64 would be left
    (`mrl.engines.slot_cache`).
    """
    longest, columns = prompt_tokens + answer_tokens, 2 * prompt_tokens + 64
    while columns < longest + 64:
        columns = 2 * min(longest, columns) + 64
    return columns


class _Rank:
    def __init__(
        self,
        size: ModelSize,
        peaks: PassPeaks,
        table: LearnerTable,
        *,
        num_passes: int,
        holds_reference: bool,
        is_first: bool,
        on_gpu: bool,
    ) -> None:
        self._size, self._peaks, self._table = size, peaks, table
        self._accumulates, self._holds_reference = num_passes > 1, holds_reference
        adapters = size.trained if table.lora else 0  # they stay in float32
        kept_bytes = ELEMENT_BYTES[table.parameter_dtype]
        self.whole = float(kept_bytes * (size.parameters - adapters) + FLOAT_BYTES * adapters)
        self.held = self.whole / table.num_shards
        self.saved = (FLOAT_BYTES if adapters else kept_bytes) * size.trained / table.num_shards
        self.trained = FLOAT_BYTES * size.trained / table.num_shards
        self._updated = UPDATED_ELEMENTS["gpu" if on_gpu else "cpu"]
        self._moment_bytes = ELEMENT_BYTES[table.optimizer_dtype]
        self.moments = 2 * self.trained * self._moment_bytes / FLOAT_BYTES
        self.moments_on_device = 0.0 if on_gpu and table.optimizer_memory == "host" else self.moments
        self.is_sharded = table.num_shards > 1
        self.read = float(FLOAT_BYTES * size.parameters) if is_first or not self.is_sharded else 0.0
        self._is_wrapped = table.sharding == "shard" or "bfloat16" in (table.precision, table.parameter_dtype)
        self._compute_bytes = FLOAT_BYTES if table.precision == "float32" else 2

    def state(self) -> dict[str, float]:
        """Return the parts that stay between two updates; gradients are kept until the next update begins."""
        reference = {"reference": self.held} if self._holds_reference else {}
        return {"parameters": self.held, "optimizer": self.moments_on_device, **reference, "gradients": self.trained}

    def training(self) -> list[Need]:
        """Return the need in each window of a forward and backward pass.

        Gradients outside of the blocks are summed in one piece when the backward pass is done, and nothing is gathered
        any more then. Until then the gradient of a head of its own waits as it was computed.
        """
        size, peaks, state = self._size, self._peaks, self.state()
        block = FLOAT_BYTES * size.trained_block / self._table.num_shards
        trained_outer = size.trained - size.num_blocks * size.trained_block
        gathered, reduced = self._communication()
        head = 0 if self._is_wrapped else FLOAT_BYTES * size.head
        in_backward = gathered + (self._compute_bytes * size.head if self._is_wrapped else 0)
        one = peaks.offloaded / size.num_blocks
        leaving = INPUTS_LEAVING * one
        windows = {
            "forward": (peaks.forward + leaving, 0.0, gathered),
            "backward of the head": (peaks.head + leaving, 0.0, gathered),
            "backward of the last block": (
                peaks.blocks + one,
                head + block,
                in_backward + reduced * size.trained_block,
            ),
            "backward of the embedding": (
                peaks.bottom,
                head + size.num_blocks * block,
                max(in_backward, reduced * trained_outer),
            ),
        }
        return [
            Need(
                moment,
                state
                | {"gradients": self.trained if self._accumulates else so_far, "activations": activations}
                | ({"gathered blocks": gathered_bytes} if gathered_bytes else {}),
            )
            for moment, (activations, so_far, gathered_bytes) in windows.items()
        ]

    def update(self) -> Need:
        """Return the need of an update. Gradients of several whole copies are summed in one flat tensor; fused AdamW of
        float32 needs nothing more.
        """
        flat = self.trained if self._table.processes > 1 and not self._is_wrapped else 0.0
        visiting = VISITORS * 2 * self._moment_bytes * self._updated if self._table.optimizer_memory == "host" else 0.0
        are_rounded = self._moment_bytes < FLOAT_BYTES, self.saved < self.trained
        rounding = ROUNDING_BYTES[are_rounded] * min(self._updated, self.trained / FLOAT_BYTES)
        parts = {"summed gradients": flat, "visiting moments": min(visiting, self.moments), "rounding": rounding}
        return Need("update", self.state() | parts)

    def canary(self, scoring: float) -> Need:
        """Return the need of scoring a canary, whose passes come between two steps and keep nothing."""
        gathered, _ = self._communication()
        return Need("canary", self.state() | {"scoring": scoring, "gathered blocks": gathered})

    def kept(self, need: Need) -> dict[str, float]:
        """Return the memory that malloc holds on to, as measured: gaps, and on every rank the whole model from before
        it was sharded.
        """
        share = KEPT_IN_GAPS if self._is_wrapped or self._table.lora else KEPT_WHOLE
        share = KEPT_BY_EXPERTS if self._is_wrapped and self._size.has_experts else share
        was_whole = self.whole * (1 + self._holds_reference) if self.is_sharded else 0.0
        passes = need.parts["activations"] + need.parts.get("gathered blocks", 0.0)
        return {"kept by malloc": share * passes + was_whole}

    def _communication(self) -> tuple[float, float]:
        """Return the bytes of gathered parameters, and the bytes per parameter of gradients that are being summed."""
        if not self._is_wrapped:
            return 0.0, 0.0
        gathered = self._compute_bytes * (self._size.outer + 2 * self._size.block)
        return float(gathered), self._compute_bytes + FLOAT_BYTES * (1 + 1 / self._table.num_shards)


def _largest(needs: Iterable[Need]) -> Need:
    return max(needs, key=lambda need: need.mib)


def _with(process: dict[str, float], needs: Iterable[Need]) -> Need:
    largest = _largest(needs)
    return Need(largest.moment, {part: size for part, size in (process | largest.parts).items() if size})

"""The arithmetic of the memory plan, on sizes small enough to add up by hand."""

import random
from dataclasses import replace

import pytest
import torch

from mrl.config.memory_savings import all_cures, shortest_cure
from mrl.config.policy_tables import LearnerTable, LoraTable, PolicyTable, RolloutTable
from mrl.config.schema import RunConfig
from mrl.learner import piecewise_adamw
from mrl.learner.activation_offload import LEAVING
from mrl.learner.piecewise_adamw import CPU_PIECE_ELEMENTS, PIECE_ELEMENTS, PiecewiseAdamW
from mrl.memory_plan.needs import (
    INPUTS_LEAVING,
    MIB,
    ROUNDING_BYTES,
    TORCH_MIB,
    UPDATED_ELEMENTS,
    VISITORS,
    Need,
    at_worst_turn,
    engine_need,
    largest_microbatch,
    on_gpu_with,
    rank_needs,
    server_need,
    staged_bytes,
)
from mrl.memory_plan.pass_memory import LiveBytes
from mrl.models.size import ModelSize, PassPeaks
from mrl.processes.planning.hosts import is_in_memory

SIZE = ModelSize(
    parameters=1000 * MIB,
    trained=1000 * MIB,
    block=90 * MIB,
    num_blocks=10,
    vocab_size=1000,
    cached_per_token=640,
    query_heads_per_cached=2,
)
SMALL, LARGE = PassPeaks(MIB, MIB, MIB, MIB), PassPeaks(9000 * MIB, 9500 * MIB, 9400 * MIB, 500 * MIB)
HUGE = PassPeaks(*[40000 * MIB] * 4)
LEAST = {
    "activation_checkpointing": True,
    "precision": "bfloat16",
    "optimizer_dtype": "bfloat16",
    "parameter_dtype": "bfloat16",
    "microbatch_tokens": 256,
}
ALONE = {"num_passes": 1, "holds_reference": False, "saves_beside_training": False}


def mib(parts: dict[str, float]) -> dict[str, int]:
    return {part: round(size / MIB) for part, size in parts.items()}


def test_small_passes_leave_the_checkpoint_on_top() -> None:
    """Parameters, gradients, two moments, four bytes each; and all but the gradients once more."""
    host, device = rank_needs(SIZE, SMALL, LearnerTable(checkpoint_every=0), **ALONE)
    assert host == device
    assert host.moment == "saving"
    assert mib(host.parts) == {
        "process": TORCH_MIB,
        "vocabulary": 2,
        "parameters": 4000,
        "optimizer": 8000,
        "gradients": 4000,
        "checkpoint copy": 12000,
    }
    assert host.mib == pytest.approx(sum(mib(host.parts).values()), abs=1)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_copies_for_the_engines_lie_on_the_host(on_gpu: bool) -> None:
    """Whatever the device of the learner is."""
    host, device = rank_needs(SIZE, SMALL, LearnerTable(), **ALONE, on_gpu=on_gpu, staged=70.0 * MIB)
    assert mib(host.parts)["published weights"] == 70
    assert ("published weights" in device.parts) == (not on_gpu)


@pytest.mark.parametrize(
    ("rollout", "in_memory", "wanted"),
    [
        ({}, True, (4000, 4000)),
        ({}, False, (2000, 2000)),
        ({"engine": "vllm", "server": {"dtype": "bfloat16"}}, True, (2000, 2000)),
        ({"weights": "broadcast"}, False, (8000, 0)),
        ({"weights": "adapters"}, True, (8000, 0)),
    ],
)
def test_versions_are_copied_in_the_engines_format_by_all_ranks_together(rollout, in_memory, wanted) -> None:
    """Two in memory, one for the disk, two to be sent; of what is sent or small, by the first rank."""
    table = PolicyTable(model="m", learner=LearnerTable(processes=2), rollout=RolloutTable(**rollout))
    found = [staged_bytes(SIZE, table, is_first=is_first, in_memory=in_memory) for is_first in (True, False)]
    assert tuple(round(one / MIB) for one in found) == wanted


@pytest.mark.parametrize(("shard_size", "wanted"), [(0, 500), (2, 500), (8, 250)])
def test_ranks_of_other_hosts_copy_their_part_where_they_share_the_copy(shard_size: int, wanted: int) -> None:
    """Of a version of 2000 MiB for the disk: four ranks of a host, or all eight."""
    learner = LearnerTable(processes=8, hosts=2, sharding="shard", shard_size=shard_size)
    table = PolicyTable(model="m", learner=learner, rollout=RolloutTable(embedded_dtype="bfloat16"))
    assert round(staged_bytes(SIZE, table, is_first=False, in_memory=False) / MIB) == wanted


@pytest.mark.parametrize(
    ("rollout", "host", "wanted"),
    [
        ({}, "127.0.0.1", True),
        ({}, "0.0.0.0", False),
        ({"engine": "vllm", "server": {"url": "http://h:1"}}, "127.0.0.1", False),
        ({"weights_in": "disk"}, "127.0.0.1", False),
        ({"weights_in": "memory"}, "0.0.0.0", True),
        ({"weights_in": "gpu"}, "127.0.0.1", True),
    ],
)
def test_files_lie_in_memory_on_one_host_unless_somebody_says_otherwise(rollout, host, wanted) -> None:
    tables = {"policies": {"a": {"rollout": rollout}}, "exchange": {"host": host}, "run": {"name": "r", "steps": 1}}
    config = RunConfig.model_validate(tables | {"tasks": {"trim": {"source": "words", "dataset": "trim"}}})
    assert is_in_memory(config, "a") == wanted


def test_a_gpu_holds_more_than_tensors() -> None:
    """Of each process its context, and what the allocator has not in use."""
    found = on_gpu_with(Need("update", {"parameters": 4000.0 * MIB, "optimizer": 8000.0 * MIB}))
    assert found.moment == "update"
    assert mib(found.parts) == {
        "parameters": 4000,
        "optimizer": 8000,
        "CUDA context": 640,
        "kept by the allocator": 600,
    }


def test_versions_on_the_learners_gpu_are_counted_there() -> None:
    """Beside those on the host."""
    both = {"staged": 700.0 * MIB, "staged_on_device": 500.0 * MIB}
    host, device = rank_needs(SIZE, LARGE, LearnerTable(), on_gpu=True, **ALONE | both)
    assert mib(host.parts)["published weights"] == 700
    assert mib(device.parts)["published weights"] == 500
    assert "published weights" not in rank_needs(SIZE, LARGE, LearnerTable(), on_gpu=True, **ALONE)[1].parts


def test_gradients_count_when_they_are_there() -> None:
    """Of one pass none before its backward; of several all of them, all the time."""
    gpu = {"table": LearnerTable(), "on_gpu": True}
    first = rank_needs(SIZE, LARGE, **gpu, **ALONE)[1]
    later = rank_needs(SIZE, LARGE, **gpu, **ALONE | {"num_passes": 2})[1]
    assert (first.moment, mib(first.parts)) == (
        "backward of the last block",
        {"parameters": 4000, "optimizer": 8000, "gradients": 360, "activations": 9400},
    )
    assert (later.moment, mib(later.parts)["gradients"]) == ("backward of the head", 4000)


def test_a_gpu_holds_the_model_and_the_host_its_copies() -> None:
    """Loading puts the whole model on the host first; a checkpoint needs three copies of what the rank holds."""
    host, device = rank_needs(SIZE, SMALL, LearnerTable(), on_gpu=True, **ALONE)
    assert mib(host.parts) == {"process": TORCH_MIB, "vocabulary": 2, "checkpoint copy": 12000}
    assert (device.moment, mib(device.parts)) == (
        "update",
        {"parameters": 4000, "optimizer": 8000, "gradients": 4000},
    )


def test_moments_on_the_host_leave_the_device_but_for_a_visit() -> None:
    """8 GB of them, beside all that a rank does on the host; without a GPU they only visit."""
    table = LearnerTable(optimizer_memory="host")
    host, device = rank_needs(SIZE, SMALL, table, on_gpu=True, **ALONE)
    assert (device.moment, mib(device.parts)) == (
        "update",
        {"parameters": 4000, "gradients": 4000, "visiting moments": 128},
    )
    assert mib(host.parts) == {"process": TORCH_MIB, "vocabulary": 2, "optimizer": 8000, "checkpoint copy": 12000}
    passing = rank_needs(SIZE, LARGE, table, on_gpu=True, **ALONE)[1]
    assert mib(passing.parts) == {"parameters": 4000, "gradients": 360, "activations": 9400}
    cpu, same = (rank_needs(SIZE, HUGE, one, **ALONE)[0] for one in (table, LearnerTable()))
    assert cpu == same
    small = replace(SIZE, parameters=MIB, trained=MIB, block=MIB // 10)
    update = rank_needs(small, PassPeaks(0, 0, 0, 0), table, on_gpu=True, **ALONE)[1]
    assert mib(update.parts)["visiting moments"] == 8, "all there are"


def test_moments_of_16_bits_take_half() -> None:
    """Where they lie and in checkpoints; an update has random bits and float32 for a piece of them."""
    table = LearnerTable(optimizer_dtype="bfloat16")
    host, device = rank_needs(SIZE, SMALL, table, on_gpu=True, **ALONE)
    assert (device.moment, mib(device.parts)) == (
        "update",
        {"parameters": 4000, "optimizer": 4000, "gradients": 4000, "rounding": 176},
    )
    assert mib(host.parts)["checkpoint copy"] == 4000 + 4000
    table = table.model_copy(update={"optimizer_memory": "host"})
    host, device = rank_needs(SIZE, SMALL, table, on_gpu=True, **ALONE)
    assert mib(device.parts) == {"parameters": 4000, "gradients": 4000, "visiting moments": 64, "rounding": 176}
    assert mib(host.parts)["optimizer"] == 4000


def test_offloaded_inputs_lie_on_the_host() -> None:
    """And two of ten still on the device, or one again."""
    peaks = replace(LARGE, offloaded=500 * MIB)
    host, device = rank_needs(SIZE, peaks, LearnerTable(), on_gpu=True, **ALONE)
    assert mib(host.parts)["offloaded inputs"] == 500
    assert (device.moment, mib(device.parts)["activations"]) == ("backward of the last block", 9400 + 50)
    device = rank_needs(SIZE, peaks, LearnerTable(), on_gpu=True, **ALONE | {"num_passes": 2})[1]
    assert (device.moment, mib(device.parts)["activations"]) == ("backward of the head", 9500 + 2 * 50)


def test_parameters_of_16_bits_take_half() -> None:
    """Where they lie, in a reference and in checkpoints; what is read has float32, and so do gradients."""
    size = replace(SIZE, block=MIB, num_blocks=1000)
    table = LearnerTable(parameter_dtype="bfloat16", precision="bfloat16", checkpoint_every=0)
    host, device = rank_needs(size, SMALL, table, on_gpu=True, **ALONE | {"holds_reference": True})
    assert (device.moment, mib(device.parts)) == (
        "update",
        {"parameters": 2000, "reference": 2000, "optimizer": 8000, "gradients": 4000, "rounding": 112},
    )
    assert (host.moment, mib(host.parts)["checkpoint copy"]) == ("saving", 2000 + 8000)
    lean = table.model_copy(update={"optimizer_dtype": "bfloat16"})
    host, device = rank_needs(size, SMALL, lean, on_gpu=True, **ALONE | {"holds_reference": True})
    assert mib(device.parts)["rounding"] == 208
    assert (host.moment, mib(host.parts)["parameters"]) == ("loading", 8000)
    shards = lean.model_copy(update={"processes": 4, "sharding": "shard"})
    host, device = rank_needs(size, SMALL, shards, on_gpu=True, is_first=False, **ALONE)
    assert mib(device.parts)["parameters"] == 500
    assert mib(host.parts)["checkpoint copy"] == 500 + 1000


def test_adapters_stay_in_float32() -> None:
    """On weights in 16 bits, with which nothing of an update is rounded."""
    size = replace(SIZE, parameters=1010 * MIB, trained=10 * MIB)
    table = LearnerTable(parameter_dtype="bfloat16", precision="bfloat16", lora=LoraTable())
    host, device = rank_needs(size, LARGE, table, on_gpu=True, **ALONE)
    assert mib(device.parts)["parameters"] == 2000 + 40
    assert rank_needs(size, SMALL, table, on_gpu=True, **ALONE)[1].parts.get("rounding") is None
    assert (host.moment, mib(host.parts)["parameters"]) == ("loading", 4 * 1010)


@pytest.mark.parametrize(("moments", "parameters"), [(True, False), (False, True), (True, True)])
def test_rounding_needs_what_the_plan_says(moments: bool, parameters: bool) -> None:
    """Of a piece, on a device that counts."""
    elements = UPDATED_ELEMENTS["cpu"]
    parameter = torch.nn.Parameter(torch.zeros(elements + 1000, dtype=torch.bfloat16 if parameters else torch.float32))
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    how = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "on_host": False}
    optimizer = PiecewiseAdamW([parameter], **how, dtype=torch.bfloat16 if moments else torch.float32)
    with LiveBytes([parameter, parameter.grad, *optimizer.state[parameter].values()]) as live:
        optimizer.step()
    assert live.take_peak() == pytest.approx(ROUNDING_BYTES[moments, parameters] * elements, rel=0.001)


def test_what_visits_the_device_is_what_the_optimizer_moves() -> None:
    """Of each piece that is there; the plan's arithmetic does not import torch, and knows the numbers by itself."""
    assert UPDATED_ELEMENTS == {"gpu": PIECE_ELEMENTS, "cpu": CPU_PIECE_ELEMENTS}
    assert VISITORS == piecewise_adamw.VISITORS
    assert INPUTS_LEAVING == LEAVING


def test_shards_divide_what_is_held_and_gather_blocks() -> None:
    """Four ranks hold a quarter each; a pass gathers two blocks and what is outside of them."""
    table = LearnerTable(processes=4, sharding="shard")
    parts = mib(rank_needs(SIZE, LARGE, table, on_gpu=True, **ALONE)[1].parts)
    assert (parts["parameters"], parts["optimizer"]) == (1000, 2000)
    assert parts["gathered blocks"] == 4 * (100 + 2 * 90) + 90 * (4 + 4 + 1)
    whole = rank_needs(SIZE, SMALL, LearnerTable(processes=4), on_gpu=True, **ALONE)[1]
    assert mib(whole.parts)["summed gradients"] == 4000, "of whole copies, flat"


def test_the_gradient_of_a_head_of_its_own_waits_until_the_backward_pass_is_done() -> None:
    """Whole and in the format of the pass, where shards are summed; without shards it is where it belongs at once."""
    own = replace(SIZE, head=40 * MIB)
    sharded = LearnerTable(processes=4, sharding="shard", precision="bfloat16")
    blocks = replace(SMALL, blocks=9000 * MIB)
    tied, apart = (mib(rank_needs(size, blocks, sharded, on_gpu=True, **ALONE)[1].parts) for size in (SIZE, own))
    assert apart["gathered blocks"] - tied["gathered blocks"] == 2 * 40
    assert apart["gradients"] == tied["gradients"] == 90
    whole = rank_needs(own, blocks, LearnerTable(), on_gpu=True, **ALONE)[1]
    assert mib(whole.parts)["gradients"] == 4 * (40 + 90)


def test_what_is_outside_of_the_blocks_is_summed_when_nothing_is_gathered() -> None:
    """Gradients as they were computed, and in float32 before and after the sum."""
    wide = replace(SIZE, block=10 * MIB)
    last = replace(SMALL, bottom=9000 * MIB)
    table = LearnerTable(processes=4, sharding="shard", precision="bfloat16")
    need = rank_needs(wide, last, table, on_gpu=True, **ALONE)[1]
    assert need.moment == "backward of the embedding"
    assert mib(need.parts)["gathered blocks"] == 900 * (2 + 4 + 1)


def test_adapters_need_gradients_and_moments_alone() -> None:
    """A hundredth of the parameters is trained: the rest is held and no more; blocks hold all of the adapters."""
    adapters = replace(SIZE, trained=10 * MIB)
    host, device = rank_needs(adapters, LARGE, LearnerTable(processes=2), on_gpu=True, **ALONE | {"num_passes": 2})
    assert mib(device.parts) == {"parameters": 4000, "optimizer": 80, "gradients": 40, "activations": 9500}
    assert mib(host.parts) == {"process": TORCH_MIB, "vocabulary": 2, "parameters": 4000}, "loading"


@pytest.mark.parametrize(
    ("engine", "dtype", "device", "wanted"),
    [
        ("vllm", "float32", "cpu", {"server's weights": 4000, "new weights": 8000, "key-value cache": 2048}),
        ("vllm", "bfloat16", "cpu", {"server's weights": 2000, "new weights": 4000, "key-value cache": 2048}),
        ("sglang", "float32", "cpu", {"server's weights": 4000, "key-value cache": 0}),
        ("vllm", "float32", "cuda", {"server's weights": 4000, "CUDA context": 2048}),
    ],
)
def test_vllm_on_cores_holds_new_weights_beside_the_old(
    engine: str, dtype: str, device: str, wanted: dict[str, int]
) -> None:
    """As they were published, and as it will serve them; SGLang writes over what it serves."""
    rollout = {"engine": engine, "server": {"dtype": dtype}}
    policy = PolicyTable.model_validate({"rollout": rollout, "device": device})
    assert mib(server_need(SIZE, policy, cached_tokens=100, vllm_cache_gib=2).parts) == wanted


def test_a_server_of_several_gpus_needs_its_part_on_each() -> None:
    """Heads, inner width and vocabulary are cut."""
    policy = PolicyTable.model_validate({"rollout": {"engine": "vllm", "gpus": 4}, "device": "cuda"})
    need = server_need(SIZE, policy, cached_tokens=100, vllm_cache_gib=2, gpus=4)
    assert mib(need.parts) == {"server's weights": 1000, "CUDA context": 2048}


def test_malloc_keeps_a_share_of_what_a_pass_needs() -> None:
    """More of it where blocks come and go, most of experts; and what was read whole before it was shared out."""
    whole = rank_needs(SIZE, HUGE, LearnerTable(), **ALONE)[0]
    assert mib(whole.parts)["kept by malloc"] == round(0.2 * mib(whole.parts)["activations"])
    adapters = rank_needs(SIZE, HUGE, LearnerTable(lora=LoraTable()), **ALONE)[0]
    assert mib(adapters.parts)["kept by malloc"] == round(0.5 * mib(adapters.parts)["activations"])
    for size, share in ((SIZE, 0.5), (replace(SIZE, has_experts=True), 1.25)):
        parts = mib(rank_needs(size, HUGE, LearnerTable(processes=2, sharding="shard"), **ALONE)[0].parts)
        passes = parts["activations"] + parts["gathered blocks"]
        assert parts["kept by malloc"] == pytest.approx(4000 + share * passes, abs=1)


def test_ranks_that_are_given_their_shards_read_no_model() -> None:
    """The first one does for all, a thousand times four bytes; copies that are whole are read by each rank.

    Beside training the others need as much: what they are given was whole too, tensor by tensor.
    """
    table = LearnerTable(processes=4, sharding="shard")
    gpu = [rank_needs(SIZE, SMALL, table, on_gpu=True, **ALONE, is_first=is_first)[0] for is_first in (True, False)]
    cpu = [rank_needs(SIZE, HUGE, table, **ALONE, is_first=is_first)[0] for is_first in (True, False)]
    whole = [
        rank_needs(SIZE, HUGE, LearnerTable(processes=4), **ALONE, is_first=is_first) for is_first in (True, False)
    ]
    assert [(need.moment, int(need.mib - TORCH_MIB)) for need in gpu] == [("loading", 4001), ("saving", 3001)]
    assert cpu[0] == cpu[1]
    assert cpu[0].parts["kept by malloc"] / MIB >= 4000
    assert whole[0] == whole[1]


def test_large_copies_are_still_being_written_when_training_goes_on() -> None:
    """Those of 12 GiB are; a small model's are on the disk by then."""
    beside = ALONE | {"saves_beside_training": True}
    assert "checkpoint copy" in rank_needs(SIZE, LARGE, LearnerTable(), **beside)[0].parts
    small = replace(SIZE, parameters=10 * MIB, trained=10 * MIB)
    assert "checkpoint copy" not in rank_needs(small, LARGE, LearnerTable(), **beside)[0].parts


def test_a_reference_is_one_copy_more() -> None:
    """Held as the parameters are."""
    held = rank_needs(SIZE, SMALL, LearnerTable(), on_gpu=True, **ALONE | {"holds_reference": True})[1]
    assert mib(held.parts)["reference"] == 4000


def test_the_largest_microbatch_is_that_of_full_answers() -> None:
    """62 rows of 10 + 23 tokens in a pass of 2048: eight prompts, each with up to eight answers of 23 places."""
    keys = {"prompts_per_step": 16, "microbatch_tokens": 2048}
    policy = PolicyTable.model_validate({"rollout": {"group_size": 8}, "learner": keys})
    batch, num_passes = largest_microbatch(policy, 10, 24)
    assert (batch.rows, batch.places, num_passes) == (62, 8 * 10 + 62 * 23, 3)
    batch, num_passes = largest_microbatch(policy, 10, 3000)
    assert (batch.rows, batch.places, num_passes) == (1, 3009, 128), "a row of its own"
    halved = policy.model_copy(
        update={"learner": policy.learner.model_copy(update={"processes": 4, "context_parallel": 2})}
    )
    batch, num_passes = largest_microbatch(halved, 10, 24)
    assert (batch.rows, batch.prompt_tokens, batch.answer_tokens, num_passes) == (62, 5, 12, 2), "half of every row"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_pass_of_the_canary_lies_beside_all_that_stays(on_gpu: bool) -> None:
    """It is no training, and keeps nothing for a backward; large vocabularies make it the largest moment."""
    host, device = rank_needs(SIZE, SMALL, LearnerTable(checkpoint_every=0), on_gpu=on_gpu, **ALONE, scoring=13e9)
    need = device if on_gpu else host
    assert need.moment == "canary"
    beside = {} if on_gpu else {"process": TORCH_MIB, "vocabulary": 2}
    assert mib(need.parts) == beside | {"parameters": 4000, "optimizer": 8000, "gradients": 4000, "scoring": 12398}
    shards = LearnerTable(processes=4, sharding="shard", checkpoint_every=0)
    assert mib(rank_needs(SIZE, SMALL, shards, on_gpu=True, **ALONE, scoring=13e9)[1].parts)["gathered blocks"] == 1120


def test_an_engine_scores_its_canary_beside_what_it_samples() -> None:
    how = {"answers_at_once": 32, "prompt_tokens": 10, "answer_tokens": 30}
    need = engine_need(SIZE, PolicyTable(), **how, scoring=300.0 * MIB)
    assert need.mib - engine_need(SIZE, PolicyTable(), **how).mib == 300


def test_an_engine_holds_the_weights_once_beside_adapters() -> None:
    """Of which the next ones come beside those that are served."""
    policy = PolicyTable.model_validate({"rollout": {"embedded_dtype": "bfloat16"}})
    need = engine_need(SIZE, policy, answers_at_once=32, prompt_tokens=10, answer_tokens=30, adapters=1000)
    assert need.parts["weights"] == 2 * (SIZE.parameters + 2 * 1000)


def test_an_engine_holds_the_weights_twice_and_a_cache() -> None:
    """The cache has twice the columns in use and 64, and one block of it for all heads while it is read."""
    policy = PolicyTable.model_validate({"rollout": {"group_size": 8}})
    need = engine_need(SIZE, policy, answers_at_once=32, prompt_tokens=10, answer_tokens=30)
    columns = 2 * (10 + 30) + 64
    assert need.parts["weights"] == 8 * SIZE.parameters
    assert need.parts["key-value cache"] == 4 * 640 * 32 * columns * 1.2
    assert need.parts["sampling"] == 20 * 1000 * 32


def test_an_engine_of_episodes_keeps_rows_that_wait_for_their_next_turn() -> None:
    """Beside its cache, and as much as that at most."""
    policy = PolicyTable.model_validate({"rollout": {"group_size": 8}})
    how = {"answers_at_once": 32, "prompt_tokens": 10, "answer_tokens": 30}
    need, without = engine_need(SIZE, policy, **how, plays_episodes=True), engine_need(SIZE, policy, **how)
    assert need.parts == without.parts | {"kept turns": 4 * 640 * 32 * (2 * (10 + 30) + 64)}


def test_the_cure_is_the_first_setting_that_fits() -> None:
    """Shorter passes before anything else; all settings that help together when none of them is enough."""
    saved = {"microbatch_tokens": 200.0, "activation_checkpointing": 500.0, "precision": 400.0}
    saved_with_others = {"sharding": 100.0}

    def needed_mib(table: LearnerTable) -> float:
        left = saved | (saved_with_others if table.processes > 2 else {})
        return 1500.0 - sum(mib for key, mib in left.items() if getattr(table, key) != getattr(LearnerTable(), key))

    def cure(table: LearnerTable, room_mib: float) -> str:
        return shortest_cure(needed_mib, table, room_mib, on_device=False)

    assert cure(LearnerTable(), 1300.0) == "set learner.microbatch_tokens = 2048, which needs 1300 MiB"
    assert cure(LearnerTable(), 1099.0) == "set learner.activation_checkpointing = true, which needs 1000 MiB"
    told = cure(LearnerTable(), 500.0)
    assert told.startswith("set learner.microbatch_tokens = 2048, learner.activation_checkpointing = true, ")
    assert told.endswith('learner.precision = "bfloat16", which needs 400 MiB')
    told = cure(LearnerTable(processes=2), 100.0)
    assert "sharding" not in told, "which would change nothing"
    assert "which still needs 400 MiB; use more sharded ranks" in told
    told = cure(LearnerTable(processes=3), 100.0)
    assert 'learner.sharding = "shard"' in told
    assert "which still needs 300 MiB; use more sharded ranks" in told
    small = LearnerTable.model_validate(LEAST)
    assert cure(small, 100.0).startswith("use more sharded ranks")


def test_moments_go_where_there_is_room() -> None:
    """To the host where the device is short of memory, and back where the host is; never to where they are."""

    def cure(where: str, *, on_device: bool) -> str:
        def needed_mib(table: LearnerTable) -> float:
            return 900.0 if (table.optimizer_memory == "device") == on_device else 100.0

        table = LearnerTable.model_validate(LEAST | {"optimizer_memory": where, "activation_offload": on_device})
        return shortest_cure(needed_mib, table, 500.0, on_device=on_device)

    assert cure("device", on_device=True) == 'set learner.optimizer_memory = "host", which needs 100 MiB'
    assert cure("host", on_device=False) == 'set learner.optimizer_memory = "device", which needs 100 MiB'
    assert cure("host", on_device=True).startswith("use more sharded ranks")
    assert cure("device", on_device=False).startswith("use more sharded ranks")


def test_all_cures_are_those_that_are_left() -> None:
    """For a process that ran out of memory before anybody had planned it."""
    on_gpu = all_cures(LearnerTable(processes=2, precision="bfloat16"), on_device=True)
    assert on_gpu == (
        "set some of learner.microbatch_tokens = 2048, learner.activation_checkpointing = true, "
        'learner.sharding = "shard", learner.optimizer_memory = "host", '
        'learner.activation_offload = true, learner.optimizer_dtype = "bfloat16", '
        'learner.parameter_dtype = "bfloat16", '
        "use more sharded ranks (learner.processes), or train only adapters (learner.lora)"
    )
    adapters = LearnerTable.model_validate({"precision": "bfloat16", "lora": {}})
    assert "parameter_dtype" not in all_cures(adapters, on_device=True), "their folder may be in float32"
    least = LearnerTable.model_validate(LEAST)
    assert all_cures(least, on_device=False).startswith("use more sharded ranks")


@pytest.mark.parametrize("seed", range(20))
def test_engines_that_take_turns_are_counted_at_the_worst_turn(seed: int) -> None:
    """Against every turn, added up; one at rest may need more than at its turn."""
    rng = random.Random(seed)
    engines = [
        (Need("turn", {"x": rng.randrange(99) * MIB}), Need("rest", {"x": rng.randrange(99) * MIB})) for _ in "abcd"
    ]
    sums = [sum((turn if at == own else rest).mib for own, (turn, rest) in enumerate(engines)) for at in range(4)]

    needs = at_worst_turn(engines)

    assert sum(need.mib for need in needs) == max(sums)
    assert [need.moment for need in needs].count("turn") == 1


def test_no_engine_needs_nothing() -> None:
    assert at_worst_turn([]) == []


def test_an_embedded_engine_in_bfloat16_needs_half_for_weights_and_cache() -> None:
    """What is sampled from is float32 in any case."""
    tables = [PolicyTable(rollout=RolloutTable(embedded_dtype=dtype)) for dtype in ("float32", "bfloat16")]
    full, half = (
        mib(engine_need(SIZE, table, answers_at_once=64, prompt_tokens=100, answer_tokens=30).parts) for table in tables
    )
    assert half == {"weights": full["weights"] // 2, "key-value cache": full["key-value cache"] // 2} | {
        "sampling": full["sampling"]
    }


def test_fewer_logits_at_once_are_a_cheap_cure_for_a_gpu() -> None:
    """Named before any that makes a run slower by much."""
    cures = all_cures(LearnerTable(chunk_logits=1 << 28), on_device=True)
    assert cures.index(f"learner.chunk_logits = {1 << 25}") < cures.index("learner.activation_checkpointing")
    assert "chunk_logits" not in all_cures(LearnerTable(), on_device=True)

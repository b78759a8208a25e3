"""A rank without data among ranks that are not there: what it holds, and what it sends over which link."""

from collections.abc import Iterator

import memory_tables
import pytest
import torch
import torch.distributed as dist
from fake_ranks.comparison import HEADS, compare
from fake_ranks.layouts import Layout
from fake_ranks.links import Traffic, of_update, traffic
from fake_ranks.rank import fake_group, train_one_step
from fake_ranks.watched import BETWEEN, Phase, Sent, Watched
from gpu_hour.shapes import config_of
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3Config

from mrl.config.policy_tables import LearnerTable
from mrl.memory_plan.needs import MIB, rank_needs
from mrl.memory_plan.pass_memory import pass_peaks
from mrl.models.size import Microbatch
from mrl.models.skeleton import model_size

GATHERED = Sent("all-gather", 800.0, tuple(range(8)))


@pytest.mark.parametrize(
    ("shards", "ties", "is_rounded"),
    [(8, True, False), pytest.param(16, False, False, marks=pytest.mark.thorough), (8, False, True)],
)
def test_a_rank_of_two_hosts_needs_what_the_plan_says(shards: int, ties: bool, is_rounded: bool) -> None:
    """Within a tenth, with a head of its own or not, where state and what is gathered are most of it."""
    config, batch = small_config(ties), Microbatch(1, 8, 20, 256)
    table = of_short_passes(Layout("8B", 16, shards, is_rounded=is_rounded))
    peaks = pass_peaks(config, precision="bfloat16", batch=batch, checkpointing=True)
    how = {"num_passes": 2, "holds_reference": False, "saves_beside_training": False, "on_gpu": True}
    _, planned = rank_needs(model_size(config), peaks, table, **how)

    trained = train_one_step(config, table, batch, 2)

    assert trained.peak.name == "backward"
    assert planned.mib * MIB == pytest.approx(trained.peak.peak_bytes, rel=0.1)
    (update,) = (phase for phase in trained.phases if phase.name == "update")
    assert update.peak_bytes < 2 * trained.held_bytes, "pieces of a parameter, and no tensor of all ranks"
    bytes_each = 10 if is_rounded else 16
    assert trained.held_bytes == pytest.approx(bytes_each * model_size(config).parameters / shards, rel=0.01)


def of_short_passes(layout: Layout) -> LearnerTable:
    """Its table, where no pass takes a second row."""
    return layout.table.model_copy(update={"microbatch_tokens": 32})


def small_config(ties: bool) -> Qwen3Config:
    """Two thirds of it outside of the blocks."""
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 8192}
    return config_of("tiny", **wide, tie_word_embeddings=ties)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a model for layouts, whose passes are short."""
    monkeypatch.setitem(memory_tables.SHAPES, "tiny", config_of("tiny"))
    monkeypatch.setattr("fake_ranks.layouts.TOKENS", 2048)
    yield "tiny"
    memory_tables.policy_memory.cache_clear()


@pytest.mark.parametrize("shards", [pytest.param(8, marks=pytest.mark.thorough), 16])
def test_a_comparison_counts_what_the_formula_says(tiny: str, shards: int) -> None:
    """Shards within a host, and over both: then parameters go between hosts too."""
    found = compare(Layout(tiny, 16, shards))

    assert [row for row in found.rows() if not row.ok and not row.name.startswith("peak")] == []
    assert found.num_passes == 32
    assert min(found.update.within, found.update.between, found.publication.within) > 0
    assert (found.publication.between > 0) is (shards == 16)
    assert len(found.cells()) == len(HEADS)


def test_all_passes_but_the_last_send_the_same(tiny: str) -> None:
    """So that two of them tell what any number sends."""
    layout, batch = Layout(tiny, 16, 8), Microbatch(1, 8, 8, 64)
    table = of_short_passes(layout)

    two, three = (train_one_step(layout.config, table, batch, number).phases for number in (2, 3))

    backward = [traffic(phase.sent, 8) for phase in three if phase.name == "backward"]
    assert backward[0] == backward[1] != backward[2]
    third = traffic((sent for phase in three for sent in phase.sent), 8)
    assert of_update(two, 3, 8) == pytest.approx(third)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (range(8), Traffic(800.0, 0.0)),
        (range(0, 64, 8), Traffic(0.0, 800.0)),
        (range(64), Traffic(700.0, 100.0)),
        (range(4, 12), Traffic(600.0, 200.0)),
    ],
)
def test_a_ring_leaves_a_host_once_for_all_of_its_ranks(ranks: range, expected: Traffic) -> None:
    """Within a host, one rank on each host, all ranks of eight hosts, parts of two hosts."""
    assert traffic([Sent("all-gather", 800.0, tuple(ranks))], 8) == expected


def test_an_update_of_one_pass_has_no_others() -> None:
    """Its only pass is the last."""
    phases = [Phase("forward", 0, [GATHERED]), Phase("backward", 0, [GATHERED, GATHERED]), Phase("update")]

    assert of_update(phases, 1, 8) == Traffic(2400.0, 0.0)


def test_a_storage_counts_with_the_size_that_it_has() -> None:
    """FSDP2 empties what it gathered, and fills it again for the backward pass."""
    watched = Watched()
    watched.note(BETWEEN)
    with FakeTensorMode(), watched, watched.resizing():
        watched.take_phases()
        gathered = torch.empty(1000, dtype=torch.uint8)
        watched.note("empty")
        gathered.untyped_storage().resize_(0)
        watched.note("small")
        other = torch.empty(10, dtype=torch.uint8)
        watched.note("both")
        gathered.untyped_storage().resize_(1000)
        del other
    peaks = {phase.name: phase.peak_bytes for phase in watched.take_phases()}
    assert peaks == {"empty": 1000, "small": 10, "both": 1010}


def test_a_collective_that_nobody_counts_is_an_error(tiny: str) -> None:
    """Instead of a step that seems to send less than it does."""
    watched = Watched()
    watched.note(BETWEEN)
    with fake_group(16), watched:
        dist.all_reduce(torch.zeros(4))
        with pytest.raises(AssertionError, match="broadcast"):
            dist.broadcast(torch.zeros(4), 0)
    (sent,) = watched.phases[-1].sent
    assert (sent.kind, sent.num_bytes, len(sent.ranks)) == ("all-reduce", 2 * 16 * 15 / 16, 16)

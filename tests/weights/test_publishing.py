"""Publishing beside training: what is copied, when it is whole, and what is left when it fails."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mrl.errors import RoleFailed, WeightsError, WeightsGone
from mrl.models.parameters import TensorSource, named_weights, plain_sources
from mrl.models.tensor_file import digest, read_folder
from mrl.models.tensor_header import INDEX
from mrl.records.version import Version
from mrl.weights import publish
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.manifest import MANIFEST, Canary, read_manifest
from mrl.weights.publish import PARTS, Publisher
from mrl.weights.read_lock import read_lock

NO_CANARY = Canary([], [], [])


def drawn(seed: int) -> dict[str, Tensor]:
    """Two types, a tensor without dimensions, one that is no contiguous memory."""
    torch.manual_seed(seed)
    return {
        "a": torch.randn(300, 700),
        "b": torch.randn(7, 5).t(),
        "c": torch.tensor(seed),
        "d": torch.randn(()),
        "e": torch.randn(50, 30).to(torch.bfloat16),
        "f": torch.randn(1000),
    }


def loaded(manifest: Path) -> dict[str, Tensor]:
    return {name: tensor for path in manifest.parent.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_version_that_one_rank_writes_over_is_gone_though_the_file_of_another_is_held(tmp_path):
    """By a reader that has begun to lock the files of a version, one after the other."""
    publishers = [Publisher(tmp_path, "a", rank=rank, num_ranks=2, in_memory=True) for rank in range(2)]
    for step in (1, 2, 3):
        begun = (tmp_path / "0.1" / "model-00001-of-00002.safetensors").open("rb") if step == 3 else None
        if begun is not None:
            fcntl.flock(begun, fcntl.LOCK_SH)
        for publisher in publishers:
            publisher.begin(plain_sources(drawn(step).items()), Version(0, step), NO_CANARY)
        for publisher in publishers:
            publisher.finish()

    with pytest.raises(WeightsGone), read_lock(tmp_path / "0.1"):
        pass
    for version in ("0.2", "0.3"):
        with read_lock(tmp_path / version):
            assert read_folder(tmp_path / version) == read_manifest(tmp_path / version / MANIFEST).tensors
    begun.close()
    for publisher in publishers:
        publisher.close()


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("dtype", ["", "bfloat16", "float16"])
def test_what_lies_there_is_the_rounding_of_each_tensor(tmp_path, dtype, in_memory):
    """Counts keep their type; digests are of the bytes that lie there, in files that the library reads."""
    publisher = Publisher(tmp_path, "a", dtype=dtype, in_memory=in_memory)
    for step in (1, 2, 3):  # the third is written over the first
        tensors = drawn(step)
        path = publisher.publish_weights(tensors.items(), Version(0, step), NO_CANARY)

        found = loaded(path)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            wanted = tensor if not dtype or not tensor.is_floating_point() else tensor.to(getattr(torch, dtype))
            assert found[name].dtype == wanted.dtype
            assert torch.equal(found[name], wanted)
        assert read_manifest(path).tensors == {name: digest(tensor) for name, tensor in found.items()}
    assert any(one.is_symlink() for one in path.parent.iterdir()) == in_memory
    publisher.close()


def test_several_ranks_each_add_a_part(tiny_model, tmp_path):
    """All gather everything, in one order; the files, one a rank, are a folder that transformers loads."""
    model, asked = tiny_model(seed=1), []
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    publishers = [
        Publisher(tmp_path / "weights", "a", model_folder=tmp_path / "model", rank=rank, num_ranks=3, in_memory=True)
        for rank in range(3)
    ]

    def sources(rank: int) -> list[TensorSource]:
        def whole(name: str, tensor: Tensor) -> Tensor:
            asked.append((rank, name))
            return tensor.detach()

        return [
            TensorSource(name, tensor, partial(whole, name, tensor)) for name, tensor in named_weights(model).items()
        ]

    whole, told = threading.Event(), []
    canary = make_canary(model, canary_sequences(64))
    publishers[0].begin(sources(0), Version(1, 1), canary, lambda path: (told.append(path), whole.set()))
    publishers[1].begin(sources(1), Version(1, 1), None)
    assert told == [], "a rank's part is missing"
    publishers[2].begin(sources(2), Version(1, 1), None)
    assert whole.wait(120.0)
    for publisher in publishers:
        publisher.finish()

    names = list(named_weights(model))
    assert [name for rank, name in asked if rank == 2] == names
    assert len(list(told[0].parent.glob("*.safetensors"))) == 3
    assert (told[0].parent / INDEX).is_file()
    sizes = [path.stat().st_size for path in told[0].parent.glob("*.safetensors")]
    assert max(sizes) < 2 * min(sizes), "nobody has much more to copy than the others"
    found = AutoModelForCausalLM.from_pretrained(told[0].parent)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))
    assert read_folder(told[0].parent) == read_manifest(told[0]).tensors
    for publisher in publishers:
        publisher.close()


def test_a_version_is_that_of_the_moment_at_which_it_was_copied(tmp_path, monkeypatch):
    """Training changes the weights while they are written; the next version waits for this one."""
    begin, copied = threading.Event(), shutil.copyfile

    def slow(source, target):
        assert begin.wait(120.0)
        return copied(source, target)

    monkeypatch.setattr("mrl.weights.publish.shutil.copyfile", slow)
    publisher, told = Publisher(tmp_path, "a"), []
    tensors = drawn(1)
    publisher.begin(plain_sources(tensors.items()), Version(0, 1), NO_CANARY, told.append)
    for tensor in tensors.values():
        tensor.zero_()
    assert list(tmp_path.glob("[0-9]*")) == [], "it is not whole yet"

    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(publisher.publish_weights, drawn(2).items(), Version(0, 2), NO_CANARY)
        assert not second.done()
        begin.set()
        second.result(120.0)

    assert [path.parent.name for path in told] == ["0.1"]
    wanted = drawn(1)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded(told[0]).items())
    publisher.close()


def test_a_disk_that_is_full_is_told_to_the_learner_and_leaves_nothing(tmp_path, monkeypatch):
    """It is raised by whatever the learner does next, and nobody hears of the version."""
    publisher, told = Publisher(tmp_path, "a"), []

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mrl.weights.publish.shutil.copyfile", full)
    publisher.begin(plain_sources(drawn(1).items()), Version(0, 1), NO_CANARY, told.append)

    with pytest.raises(OSError, match="No space"):
        publisher.finish()
    with pytest.raises(OSError, match="No space"):
        publisher.check()
    with pytest.raises(OSError, match="No space"):
        publisher.begin(plain_sources(drawn(2).items()), Version(0, 2), NO_CANARY)
    assert (told, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("grows", [True, False])
def test_what_is_written_slowly_is_waited_for_and_what_stands_still_is_not(tmp_path, monkeypatch, grows):
    """However long it takes: longer than nothing may be added for."""
    monkeypatch.setattr(publish, "STILL_S", 1.5)
    monkeypatch.setattr(publish, "LOOK_S", 0.05)
    go_on, copied = threading.Event(), shutil.copyfile

    def slow(source, target):
        with Path(target).open("wb") as file:
            for _ in range(20):
                assert not go_on.wait(0.1)
                file.write(b"x" * grows)
                file.flush()
        return copied(source, target)

    monkeypatch.setattr("mrl.weights.publish.shutil.copyfile", slow)
    publisher, began_s = Publisher(tmp_path, "a"), time.monotonic()
    publisher.begin(plain_sources(drawn(1).items()), Version(0, 1), NO_CANARY)
    if grows:
        publisher.finish()
        assert time.monotonic() - began_s > 2.0
        assert read_folder(tmp_path / "0.1")
        return
    with pytest.raises(RoleFailed, match=r"publishing 0\.1: nothing was added to .* for 1\.5 s"):
        publisher.finish()
    go_on.set()


def test_a_rank_that_says_nothing_is_named(tmp_path, monkeypatch):
    """By the first one, which has long written its own part."""
    monkeypatch.setattr(publish, "STILL_S", 0.3)
    monkeypatch.setattr(publish, "LOOK_S", 0.05)
    publisher = Publisher(tmp_path, "a", num_ranks=2)
    publisher.begin(plain_sources(drawn(1).items()), Version(0, 1), NO_CANARY)
    with pytest.raises(RoleFailed, match="nothing was added"):
        publisher.finish()


def test_a_rank_with_nothing_to_add_gathers_and_copies_nothing(tmp_path, monkeypatch):
    """As the further ranks of a learner whose first one sends weights, or publishes adapters."""
    monkeypatch.setattr("mrl.weights.staging.MemoryFile", None)
    publisher, asked = Publisher(tmp_path, "a", rank=1, in_memory=True), []
    sources = [TensorSource(name, tensor, partial(asked.append, name)) for name, tensor in drawn(1).items()]
    for step in (1, 2):
        publisher.begin(sources, Version(0, step), None)
        publisher.finish()
    assert asked == 2 * list(drawn(1))
    assert list(tmp_path.iterdir()) == []
    publisher.close()


def test_a_rank_that_cannot_add_its_part_is_named(tmp_path, monkeypatch):
    """The first rank does not wait for it."""
    first, second = (Publisher(tmp_path, "a", rank=rank, num_ranks=2) for rank in range(2))
    copied = shutil.copyfile

    def full(source, target):
        if "model-00002" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copied(source, target)

    monkeypatch.setattr("mrl.weights.publish.shutil.copyfile", full)
    second.begin(plain_sources(drawn(1).items()), Version(0, 1), None)
    first.begin(plain_sources(drawn(1).items()), Version(0, 1), NO_CANARY)

    with pytest.raises(RoleFailed, match=r"rank 1 could not add its part of version 0\.1: .*No space"):
        first.finish()
    with pytest.raises(OSError, match="No space"):
        second.finish()
    assert list(tmp_path.iterdir()) == []


def test_memory_is_used_again_unless_somebody_reads_it(tmp_path):
    """Two files are enough for a reader that is quick; one that holds a version keeps it to the bit."""
    publisher = Publisher(tmp_path, "a", in_memory=True)

    def published(step: int) -> tuple[Path, str]:
        path = publisher.publish_weights(drawn(step).items(), Version(0, step), NO_CANARY)
        return path, os.readlink(path.with_name("model.safetensors"))

    files = [published(step)[1] for step in range(1, 6)]
    assert len(set(files)) == 2

    path, own = published(6)
    with read_lock(path.parent):
        others = {published(step)[1] for step in range(7, 11)}
        assert own not in others
        assert read_folder(path.parent) == read_manifest(path).tensors
    assert own in {published(step)[1] for step in range(11, 14)}
    publisher.close()


def test_what_lay_in_memory_is_gone_with_its_process(tmp_path):
    """Killed in the midst of it: the next life finds nothing that it takes for whole."""
    script = f"""
import os, signal, torch
from pathlib import Path
from mrl.models.parameters import plain_sources
from mrl.records.version import Version
from mrl.weights import publish
from mrl.weights.manifest import Canary
one = publish.Publisher(Path({str(tmp_path)!r}), "a", in_memory=True)
tensors = {{"w": torch.ones(9)}}.items()
one.publish_weights(tensors, Version(0, 1), Canary([], [], []))
one._complete = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
one.publish_weights(tensors, Version(0, 2), Canary([], [], []))
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PARTS}0.2", "0.1"]
    with pytest.raises(WeightsError, match="a process that has ended"), read_lock(tmp_path / "0.1"):
        pass

    publisher = Publisher(tmp_path, "a")
    for step in (1, 2):
        publisher.publish_weights(drawn(step).items(), Version(1, step), NO_CANARY)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.1", "1.2"]


def test_a_version_that_lasts_is_read_when_its_publisher_has_ended(tmp_path):
    """The last one of a run; those in memory go, so that nobody takes them for weights."""
    publisher = Publisher(tmp_path, "a", in_memory=True)
    publisher.publish_weights(drawn(1).items(), Version(0, 1), NO_CANARY)
    publisher.begin(plain_sources(drawn(2).items()), Version(0, 2), NO_CANARY, lasts=True)
    publisher.finish()

    publisher.close()

    assert [path.name for path in tmp_path.iterdir()] == ["0.2"]
    assert read_folder(tmp_path / "0.2") == read_manifest(tmp_path / "0.2" / "manifest.json").tensors

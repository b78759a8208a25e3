"""The room as others use it: what it loads, what it offers, and that the example in its docstring runs."""

import doctest
import subprocess
import sys

import pytest

import mrl.alignment

HEAVY = ("torch", "transformers", "msgspec", "pydantic", "zmq", "msgpack", "rich", "sentencepiece")


def loaded_by(code: str) -> list[str]:
    """Which of the heavy libraries a fresh process has loaded after the code."""
    code += f"\nimport sys\nprint(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()


def test_the_room_needs_numpy_and_tokenizers_only():
    """All that is offered imports without torch, transformers, pydantic or ZeroMQ, for use outside mrl."""
    assert loaded_by("from mrl.alignment import *") == []


def test_a_heavy_import_would_be_seen():
    """The check sees a library that is loaded."""
    assert loaded_by("import zmq") == ["zmq"]


def test_tiktoken_is_not_needed():
    """Without it the room imports, and byte-level receivers go through `tokenizers`."""
    code = "import sys\nsys.modules['tiktoken'] = None\nfrom mrl.alignment import *\n"
    assert (
        loaded_by(code + "from mrl.alignment import tiktoken_encoder\nassert tiktoken_encoder.tiktoken is None") == []
    )


def test_what_is_offered_is_there():
    """Every name in the list exists, once, and public names of the package that are no modules are in the list."""
    offered = mrl.alignment.__all__
    assert len(set(offered)) == len(offered)
    public = {name for name, value in vars(mrl.alignment).items() if not (name[0] == "_" or hasattr(value, "__path__"))}
    assert set(offered) == {name for name in public if f"mrl.alignment.{name}" not in sys.modules}


@pytest.mark.parametrize(("peer", "receiver"), [("byte_level", "metaspace_prepend"), ("metaspace", "byte_level_nfc")])
def test_the_example_runs(folders, tmp_path, monkeypatch, peer, receiver):
    """What the package's docstring shows is what happens, whichever two tokenizers stand in the folders."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "peer").symlink_to(folders[peer])
    (tmp_path / "models" / "receiver").symlink_to(folders[receiver])
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(mrl.alignment.__doc__, {}, "mrl.alignment", None, 0)
    told: list[str] = []
    results = doctest.DocTestRunner().run(example, out=told.append)
    assert (results.failed, "".join(told)) == (0, "")
    assert results.attempted >= 10

"""What a host has to have for `learner.compile`, found out before the first step."""

import sysconfig
from inspect import getsource
from pathlib import Path

import pytest
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import _get_python_include_dirs

from mrl.errors import ConfigError
from mrl.models.compiled_blocks import compile_blocks


def test_a_host_without_the_headers_of_python_is_told_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch looks for them, and only warns: its compiler would fail in the first step, at every restart."""
    monkeypatch.setattr("mrl.models.compiled_blocks.register_row_attention", lambda _: None)
    compile_blocks([])
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.warns(UserWarning, match=r"Can't find Python\.h"):
        assert _get_python_include_dirs() == [str(tmp_path)]
    assert "#include <Python.h>" in getsource(CppPythonBindingsCodeCache)
    with pytest.raises(ConfigError, match="Python headers") as caught:
        compile_blocks([])
    assert f"{tmp_path}/Python.h" in str(caught.value)

"""What is installed: pinned alike everywhere, each from one index, and never called audited when it was not."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mrl.engines.environment import RECIPES

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools/supply_chain.sh"
TORCH_INDEX = RECIPES / "torch_index.sh"


def named(requirement: str) -> str:
    """The name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement)[0]).lower()


def pins(path: Path) -> dict[str, str]:
    """Name -> version."""
    lines = [line.split(" ")[0] for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {named(line): line.partition("==")[2] for line in lines}


def test_the_lock_has_the_versions_of_the_constraints_and_a_hash_for_each() -> None:
    """All but what only the benchmark of the exchange needs: nobody installs that with hashes."""
    locked, pinned = pins(ROOT / "requirements.lock"), pins(ROOT / "constraints.txt")
    bench = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["bench"]

    assert {name: version for name, version in pinned.items() if name in locked} == locked
    assert pinned.keys() - locked.keys() == {named(one) for one in bench} | {"hiredis"}
    rows = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", row) for row in rows)


def test_no_index_stands_beside_another() -> None:
    """A name that two indexes know is a way in; the one other index is asked for torch alone."""
    setup = (ROOT / "tools/setup.sh").read_text()

    dockerfile = (ROOT / "Dockerfile").read_text()

    scripts = [path for folder in ("mrl", "tools", "launchers") for path in (ROOT / folder).rglob("*.sh")]
    assert TORCH_INDEX in scripts
    assert "extra-index-url" not in "".join(path.read_text() for path in scripts) + dockerfile
    assert re.findall(r"--index-url (.*)", dockerfile) == ["https://download.pytorch.org/whl/cpu torch"]
    assert re.findall(r"pip install (.*) \\\n +--index-url", dockerfile)[0].endswith("--no-deps")
    assert re.findall(r"install .*--index-url.*", setup) == [
        'install --no-deps --index-url "$index" torch  # alone: no other package may come from this index'
    ]


@pytest.mark.parametrize(("code", "printed"), [(0, "--index-url=https://download.pytorch.org/whl/cpu\n"), (1, "")])
def test_the_index_of_torch_is_named_where_it_can_be_reached(tmp_path: Path, code: int, printed: str) -> None:
    """It takes the place of pip's own; recipes give pip nothing but torch's packages with it, and no dependencies."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {code}\n")
    python.chmod(0o755)
    done = subprocess.run(["bash", TORCH_INDEX, python], capture_output=True, text=True, check=True)
    assert done.stdout == printed

    for recipe in ("vllm.sh", "sglang.sh"):
        (asked,) = [line for line in (RECIPES / recipe).read_text().splitlines() if "torch_index.sh" in line]
        names = re.search(r"-r <\(grep (?:-E )?'\^torch(\(vision\)\?)?==' \"\$constraints\"\)$", asked)
        assert names, asked
        assert asked.strip().startswith("pip --no-deps $(bash")


def test_no_code_of_a_model_is_trusted() -> None:
    """Nor asked for of a server."""
    sources = [path for folder in ("mrl", "tools", "launchers", "configs") for path in (ROOT / folder).rglob("*")]
    found = re.compile(rb"trust_remote_code\W{1,3}True|--trust-remote-code|trust_remote_code = true")
    assert [path for path in sources if path.is_file() and found.search(path.read_bytes())] == []


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (None, 3, "not audited"),
        ({"vulns": []}, 0, "1 of 1 packages audited, 0 findings"),
        ({"vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}, 1, "torch 1: CVE-1, mended in 2"),
        ({"skip_reason": "not on the index"}, 3, "torch: not audited: not on the index"),
    ],
)
def test_an_audit_that_did_not_happen_is_no_clean_one(
    tmp_path: Path, answer: dict[str, object] | None, code: int, says: str
) -> None:
    """The auditor's own exit code is the same for findings and for a network that is not there."""
    tools = tmp_path / ".venv/supply-chain"
    (tools / "bin").mkdir(parents=True)
    (tmp_path / ".venv/bin").mkdir()
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "tools").mkdir()
    script = tmp_path / "tools/supply_chain.sh"
    script.write_text(SCRIPT.read_text())
    (tools / "pins").write_text(re.findall(r"pins=\((.*)\)", SCRIPT.read_text())[0] + "\n")
    report = json.dumps({"dependencies": [{"name": "torch", "version": "1", **(answer or {})}]})
    write = "" if answer is None else f"while [ $1 != --output ]; do shift; done; echo '{report}' >$2; "
    auditor = tools / "bin/pip-audit"
    auditor.write_text(f"#!/bin/bash\n{write}exit {int(code in (1, 3) and 'skip_reason' not in (answer or {}))}\n")
    auditor.chmod(0o755)

    done = subprocess.run(
        ["bash", script, "audit", "pins.txt"], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == code
    assert says in done.stdout + done.stderr

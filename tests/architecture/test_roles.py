"""Every process file says what it owns, speaks, waits for, what ends the wait, and what its death means."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEADER = ["Owns", "Speaks", "Waits for", "Unblocked by", "If it dies"]
PROCESSES = ["allocator", "exchange", "gateway", "learner", "supervisor", "worker"]
MAX_LINES_BEFORE_HEADER = 3


def is_process(tree: ast.Module) -> bool:
    """Whether a module is started as a process: it defines `main`."""
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)


def header_fault(docstring: str) -> str:
    """What is wrong with the opening lines; empty when they are the five, in order, near the top, each with content."""
    starts = []
    for label in HEADER:
        rows = [row for row, line in enumerate(docstring.splitlines()) if line.strip().startswith(f"{label}:")]
        if not rows:
            return f"no line '{label}:'"
        if not docstring.splitlines()[rows[0]].partition(":")[2].strip():
            return f"nothing stands after '{label}:'"
        starts.append(rows[0])
    if starts != sorted(starts):
        return f"wanted this order: {', '.join(HEADER)}"
    return "" if starts[0] < MAX_LINES_BEFORE_HEADER else "the five lines do not open the docstring"


def faults(roles: Path) -> list[str]:
    """Every process file whose docstring lacks its header."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(roles.glob("*.py"))}
    checked = {file: tree for file, tree in trees.items() if is_process(tree) or file.stem in PROCESSES}
    return [
        f"{file.name}: {fault}"
        for file, tree in checked.items()
        if (fault := header_fault(ast.get_docstring(tree) or ""))
    ]


def test_every_process_opens_with_the_five_lines() -> None:
    """Each role file has the header, and none of the six processes is missing."""
    assert faults(ROOT / "mrl" / "processes") == []
    assert [name for name in PROCESSES if not (ROOT / "mrl" / "processes" / f"{name}.py").exists()] == []


GOOD = '"""The role.\n\nOwns: a\nSpeaks: b\nWaits for: c\nUnblocked by: d\nIf it dies: e\n"""\ndef main():\n    pass\n'


def test_a_good_header_passes(tmp_path: Path) -> None:
    """A title line above is fine, and so is a module without `main` that has no header."""
    (tmp_path / "worker.py").write_text(GOOD)
    (tmp_path / "wiring.py").write_text('"""Connects."""\n')

    assert faults(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (GOOD.replace("Waits for", "Awaits"), "no line 'Waits for:'"),
        (GOOD.replace("Owns: a\nSpeaks: b", "Speaks: b\nOwns: a"), "order"),
        (GOOD.replace("If it dies: e", "If it dies:"), "nothing stands after 'If it dies:'"),
        (GOOD.replace("The role.\n", "The role.\nIt is long.\nVery long.\n"), "do not open"),
        ("def main():\n    pass\n", "no line 'Owns:'"),
    ],
)
def test_planted_faults_are_found(tmp_path: Path, text: str, word: str) -> None:
    """A missing, misplaced, empty or late header line is named, and so is a missing docstring."""
    (tmp_path / "anything.py").write_text(text)

    assert any(word in fault for fault in faults(tmp_path)), faults(tmp_path)

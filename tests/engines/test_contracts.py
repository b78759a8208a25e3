"""What mrl relies on in the engines that it pins, held against the modules of their wheels, which are never run.

A contract that no longer holds is told in one line: what mrl relies on, the file, what is there, what to look at.
"""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support import sglang_contract, vllm_contract
from tests.support.contract_checks import Contract, Modules, broken
from tests.support.wheel_sources import NoWheel, pinned, sources

CONTRACTS = {"vllm": vllm_contract.CONTRACTS, "sglang": sglang_contract.CONTRACTS}
PINS = [(engine, pin) for engine in CONTRACTS for pin in ("cpu", "gpu")]
ENGINES = Path(__file__).parents[2] / "mrl" / "engines"
WORDS = re.compile(r"--[a-z][a-z-]+|(?<![\w.])/[a-z][\w/.]*|\b(?:VLLM|SGLANG)_[A-Z_]+|\b(?:vllm|sglang):\w+")
"""Flags, routes, variables, and names of metrics."""
OURS = ("--path",)


@cache
def modules(engine: str, pin: str) -> Modules:
    """Of the pinned wheel. Where no index gives it the test is left out, but not in CI."""
    requirement = pinned(engine, pin)
    try:
        return Modules(sources(requirement))
    except NoWheel as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{requirement} cannot be had: {error}")


def words(text: str) -> set[str]:
    return {word.replace("--no-", "--").rstrip("./") for word in WORDS.findall(text)} - {*OURS}


@pytest.mark.engines
@pytest.mark.timeout(960)
@pytest.mark.parametrize(("engine", "pin"), PINS)
def test_the_pinned_engine_is_what_mrl_takes_it_for(engine, pin):
    """On a bump: look at each line, and at the release's notes; mend mrl or the table."""
    lines = broken(CONTRACTS[engine], modules(engine, pin), pin)

    assert not lines, f"{pinned(engine, pin)} breaks {len(lines)} contracts:\n" + "\n".join(lines)


@pytest.mark.engines
@pytest.mark.parametrize("engine", CONTRACTS)
def test_all_that_mrl_names_of_an_engine_has_a_contract(engine):
    """Whoever asks a new route, or passes a new flag, writes down why in tests/engines/contracts."""
    held = set().union(*(words(f"{contract.what} {contract.check}") for contract in CONTRACTS[engine]))
    named = {
        word: path.name
        for path in ENGINES.glob(f"{engine}*.py")
        for text in spoken(ast.parse(path.read_text()))
        for word in words(text)
    }

    assert {word: file for word, file in named.items() if not {word, word.removesuffix("_total")} & held} == {}


def spoken(module: ast.Module) -> list[str]:
    """Texts but documentation."""
    nodes = list(ast.walk(module))
    silent = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent
    ]


PLANTED = [
    (
        "vllm",
        "gpu",
        "vllm/v1/engine/core.py",
        'self.reject_new_requests = mode != "keep"',
        "pass",
        "a user's pause is one that refuses",
    ),
    (
        "vllm",
        "gpu",
        "vllm/v1/engine/core.py",
        'code="engine_paused"',
        'code="paused"',
        "what comes while it is paused",
    ),
    (
        *("vllm", "gpu", "vllm/exceptions.py"),
        *("self.status_code = HTTPStatus.SERVICE_UNAVAILABLE", "self.status_code = HTTPStatus.CONFLICT"),
        "a refusal that may be tried again",
    ),
    ("vllm", "gpu", "vllm/config/cache.py", "Field(default=0.92", "Field(default=0.9", "vLLM takes 0.92 of a GPU"),
    (
        *("vllm", "gpu", "vllm/sampling_params.py"),
        *("    routed_experts_prompt_start: int = 0", "    routed_experts_prompt_start: int = 1"),
        "sampling has routed_experts_prompt_start",
    ),
    (
        *("sglang", "cpu", "sglang/srt/managers/io_struct.py"),
        *("    return_routed_experts: bool = False", "    return_routed_experts: bool = True"),
        "a request has return_routed_experts",
    ),
    ("vllm", "gpu", "vllm/config/lora.py", "320, 512]", "512]", "adapters have room for these ranks"),
    (
        *("vllm", "gpu", "vllm/entrypoints/rl/online/api_router.py"),
        *('@router.post("/resume")', '@router.put("/resume")', "mrl asks POST /resume"),
    ),
    (
        "vllm",
        "cpu",
        "vllm/engine/arg_utils.py",
        '"--max-num-seqs"',
        '"--max-seqs"',
        "mrl starts vLLM with --max-num-seqs",
    ),
    (
        *("vllm", "cpu", "vllm/v1/attention/backends/cpu_attn.py"),
        *("[32, 64, 80,", "[32, 64,", "attention on a CPU has kernels for these sizes"),
    ),
    (
        *("sglang", "gpu", "sglang/srt/managers/scheduler_components/weight_updater.py"),
        *("if recv_req.flush_cache and not self.flush_cache(", "if recv_req.flush_cache and self.flush_cache("),
        "a load whose cache was not flushed is a failure",
    ),
    (
        *("sglang", "cpu", "sglang/srt/managers/schedule_batch.py"),
        *("self.status_code = status_code", "self.status_code = status_code or 503"),
        "what is aborted has finish reason abort",
    ),
]


@pytest.mark.engines
@pytest.mark.timeout(960)
@pytest.mark.parametrize(("engine", "pin", "file", "before", "after", "told"), PLANTED)
def test_a_planted_change_is_found_and_nothing_else_is(engine, pin, file, before, after, told):
    """One line, which names the file and what to look at."""
    pristine = modules(engine, pin)
    text = pristine.text(file)
    assert before in text
    planted = Modules(sources(pinned(engine, pin)), {file: text.replace(before, after)})

    lines = [
        line
        for line in broken([one for one in CONTRACTS[engine] if one.file == file], planted, pin)
        if line not in broken(CONTRACTS[engine], pristine, pin)
    ]

    assert any(line.startswith(told) and f": {file}: " in line and "; look at mrl/" in line for line in lines), lines
    assert len(lines) <= 2, lines


@pytest.mark.engines
@pytest.mark.timeout(960)
def test_a_bump_from_0_32_to_0_33_would_have_been_seen():
    """It made a pause refuse what comes meanwhile, by the same names."""
    lines = broken(CONTRACTS["vllm"], modules("vllm", "gpu"), "cpu")

    assert any(line.startswith("what comes while it is paused waits in 0.32") for line in lines), lines


@pytest.mark.parametrize("engine", CONTRACTS)
def test_every_contract_can_be_broken(engine):
    """Each is, by files without a word in them, and by none at all."""

    def told(contract: Contract, files: dict[str, ast.Module]) -> list[str]:
        return [line for pin in contract.pins for line in broken([contract], files, pin)]

    for contract in CONTRACTS[engine]:
        assert told(contract, {contract.file: ast.parse("")}), contract
        assert told(contract, {}), contract

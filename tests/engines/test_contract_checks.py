"""The checker of contracts, on a few lines: what holds, and what is found in its place."""

import ast

import pytest

from tests.support.contract_checks import (
    Argument,
    Constant,
    Contract,
    Field,
    Means,
    Returns,
    Route,
    Says,
    Takes,
    Uses,
    broken,
    digest_of,
)

TEXT = '''
from typing import Literal
Mode = Literal["a", "b"]
app = FastAPI()

@app.post("/pause")
async def pause(request, mode: str = "abort"):
    """Stop."""
    return {"status": "paused"}

app.add_api_route("/abort", abort, methods=["POST", "PUT"])

class Config:
    share: float = Field(default=0.92, gt=0)
    seed: int | None = None

    def ranks(self):
        return [1, 8]

parser.add_argument("--seed", type=int)
'''
MODULE = ast.parse(TEXT)
DIGEST = digest_of(MODULE, ("pause",))


@pytest.mark.parametrize(
    ("check", "found"),
    [
        (Route("POST", "/pause"), ""),
        (Route("PUT", "/abort"), ""),
        (Route("GET", "/pause"), "/pause takes POST"),
        (Route("POST", "/resume"), "no route /resume"),
        (Argument("--seed"), ""),
        (Argument("--seeds"), "no argument --seeds"),
        (Field("Config", "seed"), ""),
        (Field("Config", "seed", None), ""),
        (Field("Config", "share", 0.92), ""),
        (Field("Config", "share", 0.9), "Config.share is 0.92"),
        (Field("Config", "shares"), "no field Config.shares"),
        (Field("Configs", "share"), "no class Configs"),
        (Constant("Mode", ("a", "b")), ""),
        (Constant("Mode", ("b",), among=True), ""),
        (Constant("Mode", ("b",)), "Mode is ('a', 'b')"),
        (Constant("Modes", ("b",)), "no Modes"),
        (Says(("status", "paus"), "pause"), ""),
        (Says(("status", "resumed"), "pause"), "pause does not say 'resumed'"),
        (Says(("status",), "Config"), "Config does not say 'status'"),
        (Takes("pause", ("mode",)), ""),
        (Takes("pause", ("mode", "level")), "pause takes no level"),
        (Takes("resume"), "no function resume"),
        (Returns("Config.ranks", (1, 8)), ""),
        (Returns("Config.ranks", (1,)), "Config.ranks returns [(1, 8)]"),
        (Uses(("parser", "add_api_route")), ""),
        (Uses(("resume",)), "it uses no resume"),
        (Means(("pause",), DIGEST), ""),
        (Means(("pause",), "0"), f"pause became {DIGEST}, was 0"),
        (Means(("resume",), "0"), "no function resume"),
    ],
)
def test_a_contract_holds_or_says_what_is_there(check, found):
    """In a few words; what mrl wants stands before them."""
    assert check.found(MODULE) == found


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ('    """Stop."""\n', "", True),
        ("Stop.", "Stop, and tell.", True),
        ('mode: str = "abort"', "mode  : str=('abort')", True),
        ('"abort"', '"keep"', False),
        ("async def pause", "def pause", False),
        ('{"status": "paused"}', "None", False),
        ('@app.post("/pause")', '@app.get("/pause")', False),
        ("mode: str", "mode: int", False),
    ],
)
def test_a_meaning_is_what_is_computed_and_not_how_it_is_written(before, after, is_same):
    """Layout and documentation may change."""
    assert before in TEXT
    changed = ast.parse(TEXT.replace(before, after))

    assert (digest_of(changed, ("pause",)) == DIGEST) == is_same


def test_a_broken_contract_is_one_line():
    """Of the pins that it is for."""
    contract = Contract("mrl resumes", "a.py", Route("POST", "/resume"), "mrl/engines/vllm.py", ("gpu",))

    assert broken([contract], {"a.py": MODULE}, "cpu") == []
    assert broken([contract], {"a.py": MODULE}, "gpu") == [
        "mrl resumes: a.py: no route /resume; look at mrl/engines/vllm.py"
    ]
    assert broken([contract], {}, "gpu") == ["mrl resumes: a.py: no such file; look at mrl/engines/vllm.py"]

"""How the pages of docs/ become a site: their order, what is missing, and links that leave the site."""

import tomllib
from pathlib import Path

import docs_site
import pytest

INDEX = """
# mrl

Nothing here yet: [what was run](tested.md).

## Start

1. [Install](install.md)
2. [The `regimes`](sharing/index.md): [sgt](sharing/sgt.md#equation), [again](install.md)

A sentence that names [another page](loose.md).

## Nothing

## Reference

- [A "quoted" page](reference/keys.md)
- [Elsewhere](https://example.org/x.md), [outside](../CONTRIBUTING.md)
"""
PAGES = ["index.md", "install.md", "sharing/index.md", "sharing/sgt.md", "reference/keys.md"]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A folder of pages, one of them with every kind of link."""
    for path in PAGES:
        (tmp_path / "docs" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / path).write_text(f"# {path}\n")
    (tmp_path / "docs" / "index.md").write_text(INDEX)
    return tmp_path / "docs"


def test_parts_and_their_order_are_those_of_the_index() -> None:
    """Pages of lists, each once, without their anchors; neither what sentences name nor what lies elsewhere."""
    assert docs_site.parts_of(INDEX) == [
        ("Start", [("Install", "install.md"), ("The regimes", "sharing/index.md"), ("sgt", "sharing/sgt.md")]),
        ("Reference", [('A "quoted" page', "reference/keys.md")]),
    ]


def test_the_configuration_can_be_read_and_leads_to_every_page(docs: Path, tmp_path: Path) -> None:
    """What is not listed comes last; the folder of pages is a copy."""
    (docs / "loose-page.md").write_text("# loose\n")

    faults = docs_site.lay_out(docs, tmp_path / "out")

    project = tomllib.loads((tmp_path / "out" / "zensical.toml").read_text())["project"]
    assert [next(iter(part)) for part in project["nav"]] == ["Overview", "Start", "Reference", "More"]
    assert project["nav"][-1] == {"More": [{"loose page": "loose-page.md"}]}
    assert faults == ["loose-page.md is there, and index.md does not list it"]
    assert (tmp_path / "out" / "pages" / "sharing" / "sgt.md").is_file()


def test_a_page_that_is_listed_and_not_there_is_told(docs: Path, tmp_path: Path) -> None:
    """The others are laid out all the same."""
    (docs / "sharing" / "sgt.md").unlink()

    assert docs_site.lay_out(docs, tmp_path / "out") == ["index.md lists sharing/sgt.md, which is not there"]
    assert "sgt.md" not in (tmp_path / "out" / "zensical.toml").read_text()


def test_a_page_that_is_gone_is_gone_from_the_site(docs: Path, tmp_path: Path) -> None:
    """Nothing is left of an earlier call."""
    docs_site.lay_out(docs, tmp_path / "out")
    (docs / "install.md").unlink()
    docs_site.lay_out(docs, tmp_path / "out")

    assert not (tmp_path / "out" / "pages" / "install.md").exists()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[a](install.md#x)", "[a](install.md#x)"),
        ("[a](https://example.org)", "[a](https://example.org)"),
        ("[a](#here)", "[a](#here)"),
        ("![a](../x.png)", "![a](../x.png)"),
        ("[the rules](../CONTRIBUTING.md#x)", "the rules (`CONTRIBUTING.md`)"),
        ("[CONTRIBUTING.md](../CONTRIBUTING.md)", "CONTRIBUTING.md"),
        ("```\n[a](../b.md)\n```", "```\n[a](../b.md)\n```"),
    ],
)
def test_only_links_that_leave_the_site_are_changed(docs: Path, text: str, shown: str) -> None:
    """They say where it is in the repository; code stays code."""
    assert docs_site.page_of(text, "index.md", docs) == shown

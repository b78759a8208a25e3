# ruff: noqa: E501  (the lines of messages are longer than those of code)
"""Plug-ins as a user names them: found in a module beside the configuration or as an entry point, or one line why not."""

import os
import re
import sys
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.cli.train import begun
from mrl.config.load import load_config
from mrl.config.run_folder import create_run_folder
from mrl.config.schema import TRACKER_NAMES
from mrl.config.task_tables import SOURCE_NAMES
from mrl.metrics.trackers.kinds import TRACKERS, tracker_class
from mrl.plugins import MODULES, VERIFIER, find_plugin
from mrl.processes.preparation.preflight import check_tasks
from mrl.sharing.regimes import check_sharing, regime_kind
from mrl.tasks.sources import BENCHMARK, SOURCES, open_source
from mrl.tasks.verify import check_verifier

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins"
GROUPS = {
    "mrl.regimes": ("concise", "regime:concise"),
    "mrl.tasks": ("shout", "source:Shout"),
    "mrl.verifiers": ("letters_right", "verifier:letters_right"),
    "mrl.trackers": ("csv", "tracker:CsvTracker"),
}


def install(site: Path, distribution: str, points: dict[str, tuple[str, str]], version: str = "0.1") -> None:
    """What an installer writes of a distribution with these entry points."""
    folder = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    lines = [f"[{group}]\n{name} = {target}\n" for group, (name, target) in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the example's configuration, and one on the path for what is installed; modules are forgotten."""
    before, path = set(sys.modules), list(sys.path)
    (tmp_path / "site").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.delenv(MODULES, raising=False)
    monkeypatch.setenv("MRL_CACHE", str(tmp_path / "cache"))
    # On a busy machine the trial of a verifier takes long enough for a line of its own.
    monkeypatch.setattr("mrl.processes.preparation.wait_notice.TELL_EVERY_S", 600.0)
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work" / "shout.toml").write_text((EXAMPLE / "shout.toml").read_text())
    yield tmp_path
    sys.path[:] = [*path]
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "mrl_example", "idle", "broken", "quits"):
            del sys.modules[name]


def example_installed(place: Path) -> None:
    """The example's package and its entry points on the path."""
    (place / "site" / "mrl_example").symlink_to(EXAMPLE / "mrl_example")
    install(place / "site", "mrl-example", {g: (n, f"mrl_example.{t}") for g, (n, t) in GROUPS.items()})


def beside(place: Path) -> None:
    """The example as one module beside the configuration, which names "module:name"."""
    texts = [
        (EXAMPLE / "mrl_example" / f"{name}.py").read_text() for name in ("regime", "source", "verifier", "tracker")
    ]
    (place / "work" / "mine.py").write_text("\n".join(texts))
    edit(place, 'regime = "concise"', 'regime = "mine:concise"')
    edit(place, 'source = "shout"', 'source = "mine:Shout"')
    edit(place, 'verifier = "letters_right"', 'verifier = "mine:letters_right"')
    edit(place, 'kind = "csv"', 'kind = "mine:CsvTracker"')


def edit(place: Path, old: str, new: str) -> None:
    """Another text in the configuration."""
    file = place / "work" / "shout.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_check_tells_the_plugins_of_an_installed_distribution(place, capfd):
    """Kind, name, module, distribution and version; the verifier was tried in its own process."""
    example_installed(place)
    assert main(["check", "shout.toml"]) == 0
    shown = capfd.readouterr().out
    for kind, name, target in (
        ("regime", "concise", "regime:concise"),
        ("task source", "shout", "source:Shout"),
        ("verifier", "letters_right", "verifier:letters_right"),
        ("tracker", "csv", "tracker:CsvTracker"),
    ):
        assert f"plug-in     {kind} {name}: mrl_example.{target}, mrl-example 0.1\n" in shown
    assert "coefficient = 0.2" in shown
    assert re.search(r"reference: [A-J]{3} +1 ", shown)


def test_a_module_beside_the_configuration_is_found_from_any_folder(place, capfd, monkeypatch):
    """The folder stands in the resolved configuration, so that every process of the run looks there."""
    beside(place)
    monkeypatch.chdir(place)
    assert main(["check", "work/shout.toml"]) == 0
    shown = capfd.readouterr().out
    assert f"plug-in     regime mine:concise: file {place / 'work' / 'mine.py'}" in shown
    assert "tracker     CsvTracker: project mrl, files in" in shown
    assert load_config(Path("work/shout.toml")).run.modules == str(place / "work")


def test_the_file_of_a_module_is_told_without_importing_it(place, monkeypatch):
    """As of a verifier, which runs in processes of its own."""
    (place / "work" / "alone.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.setenv(MODULES, str(place / "work"))
    found = find_plugin(VERIFIER, "alone:judge", (), where="here")
    assert found.described == f"verifier alone:judge: file {place / 'work' / 'alone.py'}"
    assert find_plugin(VERIFIER, "gone:judge", (), where="here").described.endswith("file not imported yet")
    assert "alone" not in sys.modules


def test_nothing_is_imported_that_the_configuration_does_not_name(place, capfd):
    """A distribution that offers plug-ins, and a module beside the configuration, that nobody asked for."""
    example_installed(place)
    bad = "raise RuntimeError('imported')\n"
    (place / "site" / "broken.py").write_text(bad)
    (place / "work" / "quits.py").write_text(bad)
    install(place / "site", "other", dict.fromkeys(GROUPS, ("unasked", "broken:thing")))
    assert main(["check", "shout.toml"]) == 0, capfd.readouterr().err
    assert not {"broken", "quits"} & set(sys.modules)


def test_parameters_of_a_plugin_are_typed(place):
    """By its own table, with the nearest key."""
    example_installed(place)
    table = {"regime": "concise", "concise": {"coeficient": 0.2}}
    with pytest.raises(
        ValueError, match=r"sharing\.concise\.coeficient: unknown key.*did you mean sharing\.concise\.coefficient"
    ):
        check_sharing(table, "a.toml")
    assert check_sharing({"regime": "concise"}, "").coefficient == 0.1
    assert check_sharing({"regime": "sgt", "concise": {"anything": 1}}, "") is not None
    assert regime_kind(table).learns_of_uniform_groups


def test_names_of_mrl_itself_are_those_of_its_dicts():
    """The configuration knows them without importing what they name."""
    assert (*SOURCES, BENCHMARK) == SOURCE_NAMES
    assert tuple(TRACKERS) == TRACKER_NAMES


MISTAKES = {
    "no such module": ('regime = "concise"', 'regime = "mien:concise"', r"shout\.toml: sharing\.regime: the module mien of the regime was not found; got 'mien:concise'; wanted a module that is installed, on PYTHONPATH, or in .*/work; cure: did you mean mine\?"),
    "no such name": ('source = "shout"', 'source = "mine:Shoutt"', r"shout\.toml: tasks\.shout\.source: mine has no Shoutt; got 'mine:Shoutt'; wanted a task source in .*mine\.py; cure: did you mean Shout\?"),
    "another kind of thing": ('regime = "concise"', 'regime = "mine:Shout"', r"sharing\.regime: mine:Shout is not a regime; got 'class Shout'; wanted a mrl\.sharing\.regimes\.RegimeKind"),
    "a regime that lacks a method": ('regime = "concise"', 'regime = "idle:concise"', r"sharing\.regime: idle:concise is not a regime; got .*; wanted absorb\(self, groups, step, rng\) in ConciseRegime"),
    "a source that lacks methods": ('source = "shout"', 'source = "mine:letters_right"', r"tasks\.shout\.source: mine:letters_right is not a task source; got 'function letters_right'; wanted a callable with the arguments \(dataset, options"),
    "a tracker that is none": ('kind = "csv"', 'kind = "mine:Shout"', r"trackers\.0\.kind: mine:Shout is not a tracker; got 'class Shout'; wanted also package"),
    "a verifier that is none": ('verifier = "letters_right"', 'verifier = "mine:nothing"', r"tasks\.shout\.verifier: the verifier mine:nothing does not start .*has no attribute 'nothing'"),
    "a built-in name": ('regime = "concise"', 'regime = "mine:sgt"', r"sharing\.regime: this regime has the name of a built-in regime; got 'mine:sgt'; cure: rename the object"),
    "an exception at import": ('regime = "concise"', 'regime = "broken:concise"', r"sharing\.regime: the module of the regime cannot be imported \(ZeroDivisionError: division by zero\); got 'broken:concise'; cure: see line 2 of .*broken\.py"),
    "an exit at import": ('source = "shout"', 'source = "quits:Shout"', r"tasks\.shout\.source: the module of the task source cannot be imported \(SystemExit: 3\)"),
    "a missing import of the module": ('kind = "csv"', 'kind = "lacks:Tracker"', r"trackers\.0\.kind: the module of the tracker cannot be imported \(ModuleNotFoundError: No module named 'not_installed_here'\); .*line 1 of .*lacks\.py"),
    "an unknown entry point of a regime": ('regime = "concise"', 'regime = "concis"', r"sharing\.regime: no such regime; got 'concis'; wanted .*sgt.*concise, \"module:name\" or an entry point of the group mrl\.regimes; cure: did you mean concise\?"),
    "an unknown entry point of a source": ('source = "shout"', 'source = "shuot"', r"tasks\.shout\.source: no such task source; got 'shuot'; .*did you mean shout\?"),
    "an unknown entry point of a verifier": ('verifier = "letters_right"', 'verifier = "letters_rihgt"', r"tasks\.shout\.verifier: no such verifier; got 'letters_rihgt'; .*did you mean letters_right\?"),
    "an unknown entry point of a tracker": ('kind = "csv"', 'kind = "cvs"', r"trackers\.0\.kind: no such tracker; got 'cvs'; .*did you mean csv\?"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_a_run_folder(place, capfd, name):
    """Exit code 2, what, where, found, wanted and cure."""
    example_installed(place)
    texts = [(EXAMPLE / "mrl_example" / f"{part}.py").read_text() for part in ("regime", "source", "verifier")]
    (place / "work" / "mine.py").write_text("\n".join(texts))
    (place / "work" / "idle.py").write_text(texts[0].replace("def absorb(", "def absorbs("))
    (place / "work" / "broken.py").write_text("x = 0\nconcise = 1 / x\n")
    (place / "work" / "quits.py").write_text("raise SystemExit(3)\n")
    (place / "work" / "lacks.py").write_text("import not_installed_here\n")
    old, new, shown = MISTAKES[name]
    edit(place, old, new)
    assert main(["train", "shout.toml"]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1, said
    assert re.search(shown, said), said
    assert not (place / "work" / "runs").exists()


def test_two_entry_points_of_one_name_are_a_mistake(place, capfd):
    """Both distributions are named, and how to say which one is meant."""
    example_installed(place)
    install(place / "site", "another", {"mrl.regimes": ("concise", "elsewhere:concise")}, "2.0")
    assert main(["check", "shout.toml"]) == 2
    said = capfd.readouterr().err
    assert re.search(
        r"sharing\.regime: 2 entry points of the group mrl\.regimes have this name; got 'concise'; "
        r"wanted one of another 2\.0, mrl-example 0\.1; cure: uninstall one, or name \"module:name\": "
        r"elsewhere:concise or mrl_example\.regime:concise",
        said,
    ), said


@pytest.mark.parametrize(
    ("group", "name", "old", "new", "key"),
    [
        ("mrl.regimes", "sgt", 'regime = "concise"', 'regime = "sgt"', r"sharing\.regime"),
        ("mrl.tasks", "words", 'source = "shout"\ndataset = "abcdefghij"', 'source = "words"\ndataset = "capital"', r"tasks\.shout\.source"),
        ("mrl.trackers", "tensorboard", 'kind = "csv"', 'kind = "tensorboard"', r"trackers\.0\.kind"),
    ],
)  # fmt: skip
def test_a_distribution_that_shadows_a_name_of_mrl_is_a_mistake(place, capfd, group, name, old, new, key):
    """Only where the run uses the name; without it the built-in one runs."""
    example_installed(place)
    install(place / "site", "shadow", {group: (name, "elsewhere:thing")})
    edit(place, old, new)
    assert main(["check", "shout.toml"]) == 2
    said = capfd.readouterr().err
    assert re.search(rf"{key}: a .* of shadow 0\.1 has the name of a built-in .*; got '{name}'; cure: ", said), said


def test_a_source_that_raises_is_told_as_its_own_fault(place):
    """An exception of somebody else's constructor is no traceback; a UserError of it passes as it is."""
    beside(place)
    edit(place, "length = 3", "length = 0")
    config = load_config(place / "work" / "shout.toml")
    with pytest.raises(ValueError, match=r"tasks\.shout\.options\.length: no length of a word"):
        check_tasks(config, lambda missing: None, None)
    (place / "work" / "mine.py").write_text("def Shout(dataset, options, *, seed, where, get):\n    return {}[1]\n")
    sys.modules.pop("mine", None)
    where = r"cure: check line 2 of .*mine\.py and tasks\.shout\.options$"
    with pytest.raises(ValueError, match=rf"mine:Shout cannot be opened \(KeyError: 1\); .*{where}"):
        open_source("shout", config.tasks["shout"], seed=1)


def test_a_tracker_of_one_s_own_is_the_same_class_by_both_ways(place):
    """By entry point, and by module and name."""
    example_installed(place)
    assert tracker_class("csv", where="") is tracker_class("mrl_example.tracker:CsvTracker", where="")


def test_a_moved_project_is_resumed_with_the_modules_of_its_new_folder(place):
    """Reading the earlier run's configuration for a comparison leaves modules to be found beside the new one."""
    beside(place)
    create_run_folder(load_config(place / "work" / "shout.toml"))
    (place / "work").rename(place / "moved")
    config = load_config(place / "moved" / "shout.toml", ["--run.folder", str(place / "moved" / "runs")])
    assert begun(config, resume=True) is not None
    create_run_folder(config, resume=True)
    assert os.environ[MODULES] == config.run.modules == str(place / "moved")
    check_verifier("shout", config.tasks["shout"])

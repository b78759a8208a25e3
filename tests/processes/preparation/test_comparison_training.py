"""How many runs go on at once, on which GPUs, and how they end."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.config.load import load_config
from mrl.memory_plan.run_memory import run_need
from mrl.processes.preparation import comparison_training as compare_train
from mrl.processes.preparation.comparison_plan import plan_runs
from mrl.processes.preparation.comparison_training import FreeMachine, RunNeed, lanes, train_missing
from tests.support.compared_runs import arguments

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
CPU = RunNeed(policies=2, host_mib=1_000, least_gpus=0, most_gpus=0)
GPU = RunNeed(policies=2, host_mib=1_000, least_gpus=1, most_gpus=3)
EIGHT = FreeMachine(cores=64, memory_mib=100_000, gpus=tuple("01234567"))


@pytest.mark.parametrize(
    ("machine", "need", "num_lanes"),
    [
        (FreeMachine(8, 100_000, ()), CPU, 4),
        (FreeMachine(9, 100_000, ()), CPU, 4),
        (FreeMachine(64, 3_999, ()), CPU, 3),
        (FreeMachine(1, 500, ()), CPU, 1),
        (FreeMachine(64, 100_000, ()), replace(CPU, is_alone=True), 1),
    ],
)
def test_a_run_has_a_core_per_policy_and_its_planned_memory(
    machine: FreeMachine, need: RunNeed, num_lanes: int
) -> None:
    """The scarcer of both decides; one run goes on even where it fits badly, and one alone that names cores."""
    assert lanes(machine, [need]) == [()] * num_lanes


def test_the_hungriest_run_decides() -> None:
    """Whichever of the compared ones that is, for each kind of need."""
    wide, heavy = replace(CPU, policies=8), replace(CPU, host_mib=30_000)
    assert len(lanes(EIGHT, [CPU, wide])) == 8
    assert len(lanes(EIGHT, [CPU, heavy])) == 3
    assert len(lanes(EIGHT, [heavy, wide, GPU])) == 2


def test_runs_at_once_have_gpus_of_their_own() -> None:
    """As many runs as have a GPU for each process; all GPUs are dealt, none twice."""
    assert lanes(EIGHT, [GPU]) == [("0", "1", "2", "3"), ("4", "5", "6", "7")]
    assert lanes(EIGHT, [replace(GPU, most_gpus=1)]) == [(name,) for name in EIGHT.gpus]
    assert lanes(EIGHT, [replace(GPU, most_gpus=9)]) == [EIGHT.gpus]
    assert lanes(replace(EIGHT, gpus=()), [GPU]) == [()]


def test_as_many_runs_as_asked_for_share_what_does_not_suffice() -> None:
    """With GPUs apart while each has the least that it needs, else all on all."""
    assert lanes(EIGHT, [GPU], jobs=8) == [(name,) for name in EIGHT.gpus]
    assert lanes(EIGHT, [replace(GPU, least_gpus=2)], jobs=8) == [EIGHT.gpus] * 8
    assert lanes(EIGHT, [GPU], jobs=9) == [EIGHT.gpus] * 9
    assert lanes(EIGHT, [CPU], jobs=40) == [()] * 40


def test_cores_are_those_that_this_process_may_use() -> None:
    """In a container or under taskset they are fewer than the machine has."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert FreeMachine.here().cores == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.thorough
def test_the_need_of_a_run_is_what_check_plans() -> None:
    """Its policies, the memory of every process of the plan, no GPU; cores by number, and ports, are had by one."""
    need = run_need(load_config(QUICKSTART, []))
    assert (need.policies, need.least_gpus, need.most_gpus, need.is_alone) == (2, 0, 0, False)
    longer = run_need(load_config(QUICKSTART, ["--policies.qwen.rollout.workers", "3"]))
    assert longer.host_mib > need.host_mib + 2 * 460
    for words in (
        ["--exchange.host=127.0.0.1", "--exchange.port=7001"],
        ["--exchange.metrics_host=127.0.0.1", "--exchange.metrics_port=7001"],
        ['--allocation.units=["cpu:0", "cpu:1"]'],
    ):
        assert run_need(load_config(QUICKSTART, words)).is_alone


def test_a_run_sees_the_gpus_of_its_lane(tmp_path, monkeypatch):
    """Three runs over two lanes, of which the first goes on until the third is there: that one has the other lane."""
    runs = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "3"))
    seen = [Path(f"{run.config_toml}.gpus") for run in runs]
    script = (
        "import os, sys, time; out = sys.argv[1]; open(out, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        f"while out == {str(seen[0])!r} and not os.path.exists({str(seen[2])!r}): time.sleep(0.01)"
    )
    monkeypatch.setattr(compare_train, "command", lambda _pid, argv: [sys.executable, "-c", script, f"{argv[-1]}.gpus"])
    train_missing(runs, [("4", "5"), ("6", "7")])
    assert [path.read_text() for path in seen] == ["4,5", "6,7", "6,7"]


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN])
def hangup(request):
    """What a shell told this process to do on SIGHUP, whatever the tests were started with."""
    earlier = signal.signal(signal.SIGHUP, request.param)
    yield request.param
    signal.signal(signal.SIGHUP, earlier)


def test_under_nohup_a_closed_terminal_ends_nothing(hangup):
    """`nohup` has SIGHUP ignored; otherwise it counts as Ctrl-C while runs are under way, and as before behind them."""
    with compare_train._terminated_as_interrupted():
        assert (signal.getsignal(signal.SIGHUP) == hangup) == (hangup == signal.SIG_IGN)
    assert signal.getsignal(signal.SIGHUP) == hangup


@pytest.mark.parametrize("hangup", [signal.SIG_DFL], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_runs_that_were_begun(number, hangup, tmp_path, monkeypatch, capsys):
    """As Ctrl-C does; a line says that nothing is lost. A terminal that is closed sends SIGHUP."""
    (one,) = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))
    started = []

    def start(_run, _lane):
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return started[-1]

    monkeypatch.setattr(compare_train, "_start", start)
    # Not in the module `time` itself: whoever else sleeps in this process would end it.
    sleeping = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _seconds: signal.raise_signal(number))
    monkeypatch.setattr(compare_train, "time", sleeping)
    with pytest.raises(KeyboardInterrupt):
        train_missing([one], [()])
    assert [process.poll() for process in started] == [-signal.SIGTERM]
    assert "interrupted; run the same command again to continue" in capsys.readouterr().out


def test_a_run_that_fails_says_why_and_where(tmp_path, monkeypatch, capsys):
    """The reason that `mrl train` gave, and the file that holds the rest."""
    (one,) = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))

    def start(run, _lane):
        run.output.parent.mkdir(parents=True)
        run.output.write_text("going\nmrl: error: learner/a: no memory\n")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

    monkeypatch.setattr(compare_train, "_start", start)
    train_missing([one], [()])
    told = capsys.readouterr().out
    assert f"{one.folder}: failed with exit code 3 (learner/a: no memory), see {one.output} and" in told


def test_a_comparison_goes_on_without_who_read_its_lines(tmp_path, monkeypatch):
    """Such as `tee`: its runs take hours, and the tables are written to files too."""
    runs = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "2"))
    started = []
    monkeypatch.setattr(compare_train, "_start", lambda run, _: started.append(run) or subprocess.Popen(["true"]))
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "w") as left:
        monkeypatch.setattr(sys, "stdout", left)
        train_missing(runs, [()])
        print("wrote comparison.md", flush=True)  # goes nowhere
    assert started == runs


def test_a_comparison_under_nohup_goes_on_when_its_terminal_is_closed(tmp_path, monkeypatch):
    """As `mrl train` does."""
    (one,) = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))
    monkeypatch.setattr(compare_train, "_start", lambda _run, _lane: subprocess.Popen(["true"]))
    sleeping = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _seconds: signal.raise_signal(signal.SIGHUP))
    monkeypatch.setattr(compare_train, "time", sleeping)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train_missing([one], [()])
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

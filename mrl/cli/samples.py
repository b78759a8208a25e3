"""`mrl samples RUN`: print answers of a run's policies, or write them as a page."""

import argparse
import shutil
from itertools import islice
from pathlib import Path

from mrl.config.run_folder import RunFolder, read_run_config
from mrl.errors import ConfigError

SHOWN, ON_A_PAGE = 10, 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: run, conditions on answers, and page."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, runs/<name>")
    parser.add_argument("--policy", default="", metavar="NAME", help="only answers that this policy trained on")
    parser.add_argument(
        "--step", type=int, metavar="N", help="only answers of this step; default: all steps, the newest first"
    )
    parser.add_argument("--task", default="", metavar="NAME", help="only answers to this task's prompts")
    parser.add_argument(
        "--find", default="", metavar="TEXT", help="only answers with this text in them or in their prompt"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--failed", action="store_true", help="only own answers that failed")
    kinds.add_argument(
        "--rescued",
        action="store_true",
        help="only peers' answers that were trained on, with the policy that wrote them",
    )
    parser.add_argument(
        "--held-out", action="store_true", help="show answers to held-out prompts; a run keeps some of each evaluation"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help=f"maximum number of answers (default: {SHOWN}, on a page {ON_A_PAGE})"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the answers to a searchable HTML page instead")


def run(arguments: argparse.Namespace) -> int:
    """Print answers that were trained on, or held-out answers; or write them as a page and print its path."""
    from mrl.files import replace_file
    from mrl.report.samples.answer_filter import AnswerFilter, select
    from mrl.report.samples.sample_lines import sample_lines
    from mrl.report.samples.sample_page import sample_page

    limit = arguments.limit if arguments.limit is not None else ON_A_PAGE if arguments.page else SHOWN
    if limit < 1:
        raise ConfigError("invalid number of answers", where="mrl samples --limit", got=limit, wanted="at least 1")
    if arguments.page and not arguments.page.absolute().parent.is_dir():
        raise ConfigError("no such folder", where="mrl samples --page", got=str(arguments.page.parent))
    if arguments.page and arguments.page.is_dir():
        raise ConfigError(
            "a folder stands where the page would be", where="mrl samples --page", got=str(arguments.page)
        )
    if arguments.held_out and arguments.rescued:
        what = "answers to held-out prompts are never trained on"
        raise ConfigError(what, where="mrl samples", got="--held-out and --rescued", wanted="one of them")
    config, folder = read_run_config(arguments.run), RunFolder(arguments.run)
    names = ("policy", "step", "task", "failed", "rescued", "held_out")
    wanted = AnswerFilter(words=arguments.find, **{name: getattr(arguments, name) for name in names})
    found = select(folder, config, wanted)
    rows = list(islice(found, limit))
    if arguments.page:
        success_reward = config.run.success_reward
        page = sample_page(config.run.name, rows, list(config.policies), success_reward=success_reward)
        replace_file(arguments.page, page.encode())
        print(arguments.page)
    else:
        width = shutil.get_terminal_size().columns
        for row in rows:
            print("\n".join(sample_lines(row, width)))
    if not rows:
        print("no matching answers")
    elif next(found, None) is not None:
        print(f"showing the first {len(rows)} answers; --limit N shows more")
    return 0

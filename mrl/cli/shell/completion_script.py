"""`mrl completion bash|zsh`: a script with which the shell completes commands, options, configuration keys and files.

The script is whole: nothing of mrl runs while a person types. Keys of policies and tasks are completed for those that
the configuration on the line has. The parsers alone would not do: overrides of keys are no options of theirs.
"""

import argparse
import importlib
from collections.abc import Iterator
from typing import NamedTuple

from mrl.config.nearest_key import ANY_NAME, all_keys

SHELLS = ("bash", "zsh")
NAMED = ("policies", "tasks")
"""Tables whose parts a person names."""
FUNCTION = r"""
_mrl() {
    [ -z "${ZSH_VERSION-}" ] || emulate -L ksh
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}"
    local words="" keys="" word name
    COMPREPLY=()
    [ "$command ${COMP_WORDS[2]-}" != "exchange keys" ] || [ "$COMP_CWORD" -le 2 ] || command="exchange keys"
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="@COMMANDS@"
    else
        case "$command $prev" in
@VALUES@
        *)
            case "$command" in
@OPTIONS@
            esac ;;
        esac
    fi
    case "$keys$cur" in
    yes--*)
        words="$words @KEYS@"
        for word in "${COMP_WORDS[@]}"; do
            [ -f "$word" ] || continue
            for name in $(sed -nE 's/^\[policies\.([a-z0-9_-]+)[].].*/\1/p' "$word" | sort -u); do
                words="$words $(printf -- "--policies.$name.%s " @POLICIES@)"
            done
            for name in $(sed -nE 's/^\[tasks\.([a-z0-9_-]+)[].].*/\1/p' "$word" | sort -u); do
                words="$words $(printf -- "--tasks.$name.%s " @TASKS@)"
            done
        done ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _mrl mrl
"""

ZSH = """(( $+functions[compdef] )) || { autoload -U +X compinit && compinit }
autoload -U +X bashcompinit && bashcompinit"""


class _Words(NamedTuple):
    """What a command takes."""

    options: list[str]
    choices: list[str]
    """Of its arguments without a name."""
    values: dict[str, list[str]]
    """Option -> what it may be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which shell."""
    parser.add_argument("shell", choices=SHELLS, help="bash or zsh")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print(completion_script(arguments.shell))
    return 0


def completion_script(shell: str) -> str:
    """The script for one of `SHELLS`; zsh reads that of bash by its own `bashcompinit`."""
    from mrl.cli.main import COMMANDS

    parts: dict[str, list[str]] = {"OPTIONS": [], "VALUES": []}
    for name, command in COMMANDS.items():
        if command.is_role and name != "exchange":
            continue
        words = _Words(["keys"], [], {}) if command.is_role else _words_of(name, command.module)
        keys = " keys=yes" if command.takes_overrides else ""
        told = " ".join([*words.options, *words.choices])
        parts["OPTIONS"].append(f'            "{name}") words="{told}"{keys} ;;')
        for option, values in words.values.items():
            parts["VALUES"].append(f'        "{name} {option}") words="{" ".join(values)}" ;;')
    known = [key for key in (*all_keys(), *_sharing_keys()) if key != "sharing"]
    script = FUNCTION.replace("@KEYS@", " ".join(f"--{key}" for key in known if ANY_NAME not in key))
    for table in NAMED:
        start = f"{table}.{ANY_NAME}."
        below = [key.removeprefix(start) for key in known if key.startswith(start)]
        script = script.replace(f"@{table.upper()}@", " ".join(key for key in below if ANY_NAME not in key))
    shown = [name for name, command in COMMANDS.items() if " " not in name and (not command.is_role)]
    script = script.replace("@COMMANDS@", " ".join([*shown, "exchange", "--help", "--version"]))
    for place, lines in parts.items():
        script = script.replace(f"@{place}@", "\n".join(lines))
    before = ZSH if shell == "zsh" else ""
    return f"# Completion of mrl for {shell}, by `mrl completion {shell}`.\n{before}{script}".rstrip()


def _words_of(name: str, module: str) -> _Words:
    """Options and choices of a command, those of the commands below it included."""
    parser = argparse.ArgumentParser(prog=name)
    parser.set_defaults(command=name)
    importlib.import_module(module).add_arguments(parser)
    words = _Words([], [], {})
    for action in _actions(parser):
        choices = [str(choice) for choice in action.choices or ()]
        words.options.extend(option for option in action.option_strings if option.startswith("--"))
        if not action.option_strings:
            words.choices.extend(choices)
        elif choices:
            words.values.update(dict.fromkeys(action.option_strings, choices))
    return _Words(list(dict.fromkeys(words.options)), words.choices, words.values)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


def _sharing_keys() -> Iterator[str]:
    from mrl.config.replay_table import REPLAY, ReplayTable
    from mrl.config.table import Table
    from mrl.sharing.regimes import REGIMES

    yield "sharing.regime"
    tables: dict[str, type[Table]] = {name: kind.parameters for name, kind in REGIMES.items()}
    tables[REPLAY] = ReplayTable
    for name, table in tables.items():
        fields = table.model_fields.items()
        yield from (f"sharing.{name}.{field.alias or own}" for own, field in fields)

"""A user's class as an environment, in the form that TRL's `environment_factory` takes, or as a text game.

    class Shop:                                    class Guess:
        def reset(self, *, item, **row): ...           def reset(self, seed): return "Guess a number ..."
        def price(self, name: str) -> float: ...       def step(self, text): return "higher", False
        def get_reward(self) -> float: ...             def get_reward(self): ...

Without `step` its public methods are tools. An episode ends when the policy answers without a call, or the class sets
`self.done = True`. With `step` it is a game, which returns a text, (text, done) or (text, reward, done). `get_reward`
may take the policy's last turn as `answer`. A class without it has the sum of the rewards of its steps.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.errors import RecordError
from mrl.records.canonical_json import canonical_json
from mrl.records.episodes import Message, ToolCall
from mrl.tasks.environments.contract import (
    DONE,
    LIMITS,
    NOT_FINITE,
    NOT_TEXT,
    TOO_LONG,
    WRONG_TYPE,
    EnvironmentTurn,
    PolicyTurn,
)
from mrl.tasks.environments.tool_methods import Tool, ToolMistake, tool_of

NO_TOOLS = ("reset", "step", "get_reward", "close")
"""Public methods that are not tools."""
CALLED_AT_THE_END = ("answer",)


class ClassMistake(Exception):
    """The reason for which a class can be no environment, with the cure, in one line."""


class BadReturn(Exception):
    """A class returned something that it may not: a kind of failure, and a description."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


class ClassEnvironment:
    """One episode of a user's class."""

    def __init__(self, kind: type, tools: Mapping[str, Tool]) -> None:
        self._object: Any = kind()
        self._tools = tools
        self._is_game = hasattr(kind, "step")
        self._answer, self._sum = "", 0.0

    def reset(self, seed: int, row: Mapping[str, Any]) -> EnvironmentTurn:
        """Return the messages of the row's `prompt`, followed by what the class's `reset` returns. Raises BadReturn."""
        returned = self._object.reset(**_accepted(self._object.reset, {"seed": seed, **row}))
        messages = _joined(_messages(row.get("prompt")), _messages(returned))
        if not messages:
            raise BadReturn(WRONG_TYPE, "reset returned no message, and the row has no prompt")
        is_deterministic = bool(getattr(self._object, "deterministic", True))
        tools = tuple(tool.spec for tool in self._tools.values())
        return EnvironmentTurn(messages, tools=tools, is_deterministic=is_deterministic)

    def step(self, turn: PolicyTurn) -> EnvironmentTurn:
        """Return a game's answer, or the answers of the tools. Raises BadReturn."""
        self._answer = turn.text
        if self._is_game:
            return self._game_turn(self._object.step(turn.text))
        if not turn.tool_calls and not turn.broken:
            return self.finish(DONE, None)
        answers = [self._called(call) for call in turn.tool_calls]
        answers += [(f"error: {one.words}", "", True) for one in turn.broken]
        messages = tuple(Message("tool", text, name=name) for text, name, _ in answers)
        _check_size(messages)
        errors = sum(is_error for *_, is_error in answers)
        if getattr(self._object, "done", False) is True:
            return EnvironmentTurn(messages, done=True, reward=self._reward(), reason=DONE, tool_errors=errors)
        return EnvironmentTurn(messages, tool_errors=errors)

    def finish(self, reason: str, turn: PolicyTurn | None) -> EnvironmentTurn:
        """Return the reward, for a cut `turn` too. Raises BadReturn."""
        if turn is not None:
            self._answer = turn.text
        return EnvironmentTurn(done=True, reward=self._reward(), reason=reason)

    def close(self) -> None:
        """Call the class's own `close`, where it has one."""
        if callable(own := getattr(self._object, "close", None)):
            own()

    def _called(self, call: ToolCall) -> tuple[str, str, bool]:
        """Call a tool; return its answer's text and name, and whether it is an error, of which the policy is told."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self._tools)}", call.name, True
        try:
            arguments = tool.arguments(call)
            return _text(getattr(self._object, tool.method)(**arguments)), call.name, False
        except (MemoryError, BadReturn):
            raise
        except ToolMistake as error:
            return f"error: {error}", call.name, True
        except Exception as error:  # noqa: BLE001 - a tool's exception is its answer
            told = " ".join(f"error: {type(error).__name__}: {error}".split())
            return told[:1000].encode(errors="replace").decode(), call.name, True

    def _game_turn(self, returned: object) -> EnvironmentTurn:
        text, reward, done = _unpacked(returned)
        if reward is not None:
            self._sum += _number(reward)
        messages = (Message("user", _text(text)),) if text else ()
        _check_size(messages)
        if not done:
            if not messages:
                raise BadReturn(WRONG_TYPE, "step returned no text, but the game is not over")
            return EnvironmentTurn(messages)
        return EnvironmentTurn(messages, done=True, reward=self._reward(), reason=DONE)

    def _reward(self) -> float:
        get = getattr(self._object, "get_reward", None)
        if get is None:
            return _number(self._sum)
        return _number(get(**_accepted(get, {"answer": self._answer})))


def tools_of(kind: object, name: str) -> dict[str, Tool]:
    """Return name -> tool, of a class that can be an environment. Raises ClassMistake for a class that cannot."""
    if not inspect.isclass(kind):
        raise ClassMistake(
            f"{name} is of type {type(kind).__name__}, not a class; write class {name.rpartition(':')[2]}:"
        )
    if not callable(getattr(kind, "reset", None)):
        raise ClassMistake(f"{name} has no reset; write def reset(self, **row), which returns the first message")
    _check_constructor(kind, name)
    _check_plain(kind, name)
    if callable(step := getattr(kind, "step", None)):
        _check_arguments(step, ("text",), f"{name}.step", "def step(self, text)")
        return {}
    get = getattr(kind, "get_reward", None)
    if not callable(get):
        raise ClassMistake(f"{name} has no get_reward; write def get_reward(self) -> float")
    _check_arguments(get, CALLED_AT_THE_END, f"{name}.get_reward", "def get_reward(self), or (self, answer)")
    public = [one for one, _ in inspect.getmembers(kind, inspect.isfunction) if not one.startswith("_")]
    tools = {}
    for method in [one for one in public if one not in NO_TOOLS]:
        try:
            tools[method] = tool_of(method, getattr(kind, method))
        except ToolMistake as mistake:
            raise ClassMistake(
                f"{name}.{method} cannot be a tool: {mistake}, or rename the method to _{method}"
            ) from None
    if not tools:
        raise ClassMistake(
            f"{name} has neither tools nor step; write a method with typed arguments, or step(self, text)"
        )
    if len(tools) > LIMITS.tools:
        raise ClassMistake(
            f"{name} has {len(tools)} tools; wanted at most {LIMITS.tools}; rename some methods to begin with _"
        )
    return tools


def check_row(kind: type, name: str, row: Mapping[str, Any]) -> None:
    """Check that `reset` can be called with the columns of a row. Raises ClassMistake."""
    given = {"seed", *row}
    for one in list(inspect.signature(kind.reset).parameters.values())[1:]:  # type: ignore[attr-defined]
        needs = one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        if needs and one.name not in given:
            raise ClassMistake(
                f"{name}.reset needs {one.name!r}, but rows only have {', '.join(sorted(given))};"
                f" give {one.name} a default value, or add a column of this name to the data"
            )


def check_reward(kind: type, name: str) -> None:
    """Check that a game can give a reward: by `get_reward`, or by a step that is not seen to return none.

    Raises ClassMistake.
    """
    if hasattr(kind, "get_reward") or hasattr(kind, "__getattr__") or not hasattr(kind, "step"):
        return
    try:
        step = ast.parse(textwrap.dedent(inspect.getsource(kind.step))).body[0]
    except (OSError, TypeError, SyntaxError):  # a step without a source, or from the midst of an expression
        return
    returns = [one.value for one in ast.walk(step) if isinstance(one, ast.Return)]
    if isinstance(step, ast.FunctionDef) and all(map(_has_no_reward, returns)):
        raise ClassMistake(
            f"{name} gives no reward, so nothing is learnt; write def get_reward(self) -> float, or let step return"
            " (text, reward, done)"
        )


def _has_no_reward(returned: ast.expr | None) -> bool:
    """Whether a returned expression is seen to be a text, or (text, done)."""
    match returned:
        case None | ast.Constant(str()) | ast.JoinedStr():
            return True
        case ast.Tuple([first, second]):
            return not any(isinstance(one, ast.Starred) for one in (first, second))
        case ast.IfExp():
            return _has_no_reward(returned.body) and _has_no_reward(returned.orelse)
    return False


def _check_constructor(kind: type, name: str) -> None:
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ClassMistake(
            f"{name}() cannot be called without arguments: {error}; give all arguments default values"
        ) from None
    except ValueError:  # a class in C may have no signature
        return


def _check_plain(kind: type, name: str) -> None:
    for method, _ in inspect.getmembers(kind, inspect.iscoroutinefunction):
        is_tool = method not in NO_TOOLS and not method.startswith("_") and not hasattr(kind, "step")
        if is_tool or method in NO_TOOLS:
            cure = f"write def {method} and use asyncio.run in it" + f", or rename the method to _{method}" * is_tool
            raise ClassMistake(f"{name}.{method} is async, which is not supported; {cure}")


def _check_arguments(function: Callable[..., Any], names: Sequence[str], what: str, cure: str) -> None:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    needed = [one for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    by_place = names == ("text",)
    if len(needed) > len(names) or (by_place and not parameters) or (
        not by_place and any(one.name not in names for one in needed)
    ):  # fmt: skip
        raise ClassMistake(f"{what} takes ({', '.join(map(str, parameters))}); write {cure}")


def _accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of `given` that a method takes by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(given)
    return {one.name: given[one.name] for one in parameters if one.name in given}


def _messages(given: object) -> tuple[Message, ...]:
    """Return the messages of None, a text, a message as a dict, or a list of these. Raises BadReturn."""
    match given:
        case None | "":
            return ()
        case str():
            found: tuple[Message, ...] = (_message("user", given),)
        case Mapping():
            found = (_of_dict(given),)
        case list() | tuple():
            found = tuple(_of_dict(one) for one in given)
        case _:
            raise BadReturn(WRONG_TYPE, f"reset returned {type(given).__name__}; wanted a text or a list of messages")
    if len(found) > LIMITS.messages:
        raise BadReturn(TOO_LONG, f"{len(found)} messages; at most {LIMITS.messages}")
    _check_size(found)
    return found


def _of_dict(given: object) -> Message:
    if not isinstance(given, Mapping) or not isinstance(given.get("content"), str):
        raise BadReturn(WRONG_TYPE, f'{given!r:.80} is not a message; wanted {{"role": ..., "content": text}}')
    return _message(str(given.get("role", "user")), given["content"])


def _message(role: str, content: str) -> Message:
    _text(content)
    try:
        return Message(role, content)  # type: ignore[arg-type]
    except RecordError as error:
        raise BadReturn(WRONG_TYPE, str(error)) from None


def _joined(prompt: tuple[Message, ...], more: tuple[Message, ...]) -> tuple[Message, ...]:
    """Join messages: a single user's text from `reset` continues the prompt's last user message, as in TRL."""
    if prompt and len(more) == 1 and more[0].role == prompt[-1].role == "user":
        return (*prompt[:-1], _message("user", prompt[-1].content + more[0].content))
    return (*prompt, *more)


def _unpacked(returned: object) -> tuple[object, object, bool]:
    """Return (text, reward, done) of a value returned by `step`. Raises BadReturn."""
    match returned:
        case str():
            return returned, None, False
        case (text, bool(done)):
            return text, None, done
        case (text, reward, bool(done)):
            return text, reward, done
    shown = ", ".join(type(one).__name__ for one in returned) if isinstance(returned, tuple) else None
    got = f"({shown})" if shown is not None else type(returned).__name__
    raise BadReturn(WRONG_TYPE, f"step returned {got}; wanted text, (text, done) or (text, reward, done)")


def _text(value: object) -> str:
    """Return a tool's return value as text; other values as JSON. Raises BadReturn."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        raise BadReturn(WRONG_TYPE, "returned bytes; wanted text")
    try:
        text = value if isinstance(value, str) else canonical_json(value)
    except ValueError:
        text = str(value)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise BadReturn(NOT_TEXT, "the text has an unpaired surrogate, so it is not UTF-8") from None
    if size > LIMITS.turn_bytes:
        raise BadReturn(TOO_LONG, f"text of {size:,} bytes; at most {LIMITS.turn_bytes:,} in a turn")
    return text


def _check_size(messages: Sequence[Message]) -> None:
    size = sum(message.num_bytes for message in messages)
    if size > LIMITS.turn_bytes:
        raise BadReturn(TOO_LONG, f"messages of {size:,} bytes; at most {LIMITS.turn_bytes:,} in a turn")


def _number(value: object) -> float:
    """Return a value as a reward. Raises BadReturn."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise BadReturn(WRONG_TYPE, f"the reward is {value!r:.80}, which is not a number")
    number = float(value)
    if not abs(number) <= LIMITS.reward:  # NaN is neither
        raise BadReturn(
            NOT_FINITE,
            f"the reward is {number}; wanted a finite number, at most {LIMITS.reward:,.0f} in absolute value",
        )
    return number

"""Options of a user's script, read from its source, and arguments for its command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_BOOL = "bool"  # stands for the action of an option with type=bool
_OPTION = re.compile(r"--[A-Za-z][\w-]*")


class ArgumentError(ValueError):
    """Error: an argument cannot be passed to a script. The message names the fix."""


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """Command-line options that are found in a script's source.

    Attributes:
        names: Spellings such as --max-steps, from any text of the source.
        actions: The `action` of each `add_argument`, by spelling; "" without one, "bool" with
            `type=bool`.
        is_complete: Whether the script accepts no other options. Only argparse is understood.
    """

    names: frozenset[str] = frozenset()
    actions: Mapping[str, str] = field(default_factory=dict)
    is_complete: bool = False

    @classmethod
    def read(cls, script: Path) -> ScriptOptions:
        """Read a script's options. They are empty if the source cannot be parsed."""
        try:
            tree = ast.parse(script.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return cls()
        names = {text for text in _texts(tree) if _OPTION.fullmatch(text)}
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        added = [call for call in calls if _called_name(call) == "add_argument"]
        actions: dict[str, str] = {}
        for call in added:
            for option in _texts_of(call.args):
                actions[option] = _action_of(call)
        return cls(
            names=frozenset(names),
            actions=actions,
            is_complete=bool(actions) and _parses_only_these(tree, calls, added),
        )

    def find_unknown(self, arguments: Mapping[str, object]) -> str | None:
        """Return the name of the first argument that the script is known to refuse, or None."""
        if not self.is_complete:
            return None
        for name in arguments:
            spelling = self._spell(name)
            # argparse accepts the beginning of an option as well
            if not any(option.startswith(spelling) for option in self.actions):
                return name
        return None

    def words(self, arguments: Mapping[str, object]) -> list[str]:
        """Convert arguments to the words of the script's command line.

        A list gives several words, None gives none. True gives a flag, and False leaves it out.

        Raises:
            ArgumentError: A value is no number, text, path, bool, or list of these, or it is False for
                an option that the source does not define.
        """
        words: list[str] = []
        for name, value in arguments.items():
            spelling = self._spell(name)
            if value is None:
                continue
            if isinstance(value, bool):
                words += self._flag_words(name, spelling, value)
            elif isinstance(value, list | tuple):
                words += [spelling, *(_word(name, element) for element in value)]
            else:
                words.append(f"{spelling}={_word(name, value)}")  # which may begin with "-"
        return words

    def _flag_words(self, name: str, spelling: str, value: bool) -> list[str]:
        action = self.actions.get(spelling)
        if action is None and not value:
            raise ArgumentError(
                f"{name}=False: the script's source has no add_argument({spelling!r}), so that its "
                "word for False is unknown; fix: pass that word, run(script, '--no-…')"
            )
        if action == "BooleanOptionalAction":
            return [spelling if value else f"--no-{spelling[2:]}"]
        if action == _BOOL:  # argparse calls bool("False"), which is True
            return [f"{spelling}={value if value else ''}"]
        if action == "":
            return [f"{spelling}={value}"]
        return [spelling] if value else []

    def _spell(self, name: str) -> str:
        """Return the option for a Python name, with dashes if the script spells it so, else with
        underscores.
        """
        dashed = f"--{name.replace('_', '-')}"
        if f"--{name}" not in self.names and dashed in self.names:
            return dashed
        return f"--{name}"


def _word(name: str, value: object) -> str:
    if isinstance(value, bool | int | float | str | Path):
        return str(value)
    raise ArgumentError(
        f"{name} has type {type(value).__name__}, which is no word of a command line; fix: pass a "
        "number, a text, a path, or a list of them, and larger data as a file"
    )


def _texts(tree: ast.AST) -> Iterator[str]:
    return _texts_of(list(ast.walk(tree)))


def _texts_of(nodes: list[ast.AST] | list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _called_name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _action_of(call: ast.Call) -> str:
    for keyword in call.keywords:
        if keyword.arg == "action":
            return ast.unparse(keyword.value).strip("'\"").rpartition(".")[2]
    if any(
        keyword.arg == "type" and ast.unparse(keyword.value) == _BOOL for keyword in call.keywords
    ):
        return _BOOL
    return ""


def _parses_only_these(tree: ast.AST, calls: list[ast.Call], added: list[ast.Call]) -> bool:
    """Return whether the parser has no options but those in `added`.

    False if any of them is not a literal, if the parser is made or extended elsewhere, or if it
    ignores unknown options.
    """
    parsers = [call for call in calls if _called_name(call) == "ArgumentParser"]
    if len(parsers) != 1 or any(keyword.arg == "parents" for keyword in parsers[0].keywords):
        return False
    if any(_called_name(call) in ("parse_known_args", "add_subparsers") for call in calls):
        return False
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.value is parsers[0]:
            names |= {ast.unparse(target) for target in node.targets}
    for call in calls:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(ast.unparse(value) in names for value in values):
            return False
    first_words = [call.args[0] for call in added if call.args]
    return all(isinstance(word, ast.Constant) for word in first_words)

"""The arguments that a shell script gives a program, read as text: nothing of the script is ever run.

Understood are variables with defaults, arithmetic, arrays, continued lines and the command itself. What only running
would tell (`if`, `$(…)`, positional parameters) stays unknown, and is named where an argument depends on it.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import UserError

UNKNOWN = "\0"
"""Begins and ends what is not known in a value, by its name in the script."""
_ASSIGNMENT = re.compile(r"(?:(?:export|local|readonly|declare|typeset)\s+(?:-\w+\s+)*)?(\w+)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{(\w+|[@*])(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|\$(\w|[@*])(?<!\d)(\w*)|\$(\d)")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_COMMAND = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`")
_OPENING, _CLOSING = ("if", "while", "until", "for", "case", "select"), ("fi", "done", "esac")
_BETWEEN = re.compile(r"(?:(?:then|else|elif|do|\{|\}|exec|time|nohup)\s++)*+")
_WORD = re.compile(r"""(?:[^\s'"\\]++|'[^']*'|"(?:[^"\\]|\\.)*+"|\\.)++""", re.DOTALL)
_QUOTED = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*+)"|\\(.)""", re.DOTALL)
_PART = re.compile(rf"(?:[^\s{UNKNOWN}]|{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN})+")
_REDIRECTION = re.compile(r"<|\d*>>?[^<>]*")
_LONGEST, _MOST = 1 << 20, 8 << 20
"""Characters of a script, and of what its variables stand for."""
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class Script:
    """What a script says: its variables, and the words of the command that has the most arguments."""

    variables: dict[str, list[str]] = field(default_factory=dict)
    """Name → words; a plain variable has one."""
    launcher: list[str] = field(default_factory=list)
    """The words before the program, such as torchrun's."""
    words: list[str] = field(default_factory=list)
    """The program's own arguments."""
    expanded: int = 0
    """Characters that variables were replaced by."""

    def spend(self, text: str) -> str:
        """The text; refused once variables within variables have grown beyond any script."""
        self.expanded += len(text) + 1
        if self.expanded > _MOST:
            raise ValueError(f"its variables expand to more than {_MOST >> 20} MiB")
        return text

    def number(self, *names: str) -> int | None:
        """The first of these variables that is a whole number."""
        for name in names:
            words = self.variables.get(name, [])
            if len(words) == 1 and re.fullmatch("[0-9]{1,18}", words[0]):
                return int(words[0])
        return None


def read_script(text: str, where: str) -> Script:
    """Read a script, or a text that holds nothing but arguments; errors call it `where`."""
    script, commands, depth = Script(), [list[str]()], 0
    if len(text) > _LONGEST:
        raise UserError(f"{where}: has more than {_LONGEST >> 20} MiB, too much for a script; give its arguments")
    for line, statement in _statements(text.replace("\r\n", "\n").replace(UNKNOWN, "")):
        statement = _BETWEEN.sub("", statement + "\n", count=1).strip()
        first = statement.split(None, 1)[0] if statement else ""
        if not first:
            continue
        if first in _OPENING or first in _CLOSING:
            depth = max(0, depth + (1 if first in _OPENING else -1))
            continue
        why = f"an if or a loop at line {line}" if depth else None
        found = _ASSIGNMENT.fullmatch(statement)
        try:
            if found and (found[3].startswith("(") or len(_split(script, found[3])) <= 1):
                _assign(script, found[1], bool(found[2]), found[3], why)
            else:
                words = _expanded(script, statement)
                if first.startswith("--"):  # arguments alone, over several lines
                    commands[0] += words
                else:
                    commands.append(words)
        except ValueError as error:
            raise UserError(f"{where}: line {line} cannot be read as shell ({error}); give its arguments") from None
    _choose(script, commands)
    return script


def arguments_of(words: list[str]) -> dict[str, Any]:
    """`--name value …` as a table: true without a value, a list of several, numbers as numbers."""
    table: dict[str, Any] = {}
    name, values = "", list[Any]()
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(_typed(word))
            continue
        if name:
            table[name] = True if not values else values[0] if len(values) == 1 else values
        name, equals, value = word.partition("=")
        name, values = "--" + name[2:].replace("_", "-"), [_typed(value)] if equals else []
        name = "" if name == "--" else name
    return table


def unknowns(value: Any) -> list[str]:
    """What is not known in a value, as the script writes it."""
    values = value if isinstance(value, list) else [value]
    return [name for one in values if isinstance(one, str) for name in one.split(UNKNOWN)[1::2]]


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The statements of a script with their lines: cut at line ends and operators outside of quotes and brackets."""
    quote, opened, line, first = "", list[str](), 1, 1
    kept: list[str] = []
    position = 0
    while position < len(text):
        character, before = text[position], text[position - 1] if position else "\n"
        if character == "\\" and text[position + 1 : position + 2] == "\n":  # the line is continued
            kept.append(" ")
            line, position = line + 1, position + 2
            continue
        if quote:
            quote = "" if character == quote and before != "\\" else quote
        elif character in "'\"" and before != "\\":
            quote = character
        elif character == "#" and before in " \t\n;(":
            end = text.find("\n", position)
            position = len(text) if end < 0 else end  # a comment
            continue
        elif (character == "{" and before == "$") or (character == "(" and (before in "$=" or opened)):
            opened.append({"{": "}", "(": ")"}[character])
        elif opened and character == opened[-1]:
            opened.pop()
        elif character in "\n;&|" and not opened:
            if "".join(kept).strip():
                yield first, "".join(kept).strip()
            kept, first = [], line + (character == "\n")
            line, position = line + (character == "\n"), position + 1
            continue
        kept.append(character)
        line, position = line + (character == "\n"), position + 1
    if "".join(kept).strip():
        yield first, "".join(kept).strip()


def _assign(script: Script, name: str, more: bool, value: str, why: str | None) -> None:
    """Keep a variable's words; those that hold only if something is true are kept as unknown."""
    if value.startswith("("):
        words = _expanded(script, value[1:].rstrip().removesuffix(")"))
    else:
        words = [" ".join(_expanded(script, value, whole=True))]
    if why is not None:
        words = [f"{word.split()[0] if word.split() else ''} {UNKNOWN}{why}{UNKNOWN}" for word in words if word]
    if more and not value.startswith("("):
        words = [script.spend("".join([*script.variables.pop(name, []), *words]))]
    elif more and name in script.variables:
        script.variables[name] += words
        return
    script.variables[name] = words


def _expanded(script: Script, text: str, whole: bool = False) -> list[str]:
    """The words of a text, with what is known of its variables in their place; `whole` keeps spaces in a word."""
    words: list[str] = []
    for word in _split(script, text):
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}|\$\{?(\w+)\}?", word)
        if array and (name := array[1] or array[2]) in script.variables:
            words += map(script.spend, script.variables[name] if array[1] else script.variables[name][:1])
        else:
            words.append(_REFERENCE.sub(lambda found: _value(script, found), word))
    # An unquoted variable or a quoted "--name value" is several words to the program that gets it.
    return words if whole else [part for word in words for part in _parts(word)]


def _split(script: Script, text: str) -> list[str]:
    """The words of a text, with arithmetic computed and the output of commands unknown."""
    text = _ARITHMETIC.sub(lambda found: _computed(script, found[1]), text)
    text = _COMMAND.sub(lambda found: f"'{UNKNOWN}{' '.join(found[0].split())}{UNKNOWN}'".replace('"', ""), text)
    words, end = [], 0
    for found in _WORD.finditer(text):
        if text[end : found.start()].strip():
            break
        words.append(_QUOTED.sub(_unquoted, found[0]))
        end = found.end()
    if text[end:].strip():
        raise ValueError("a quote is not closed")
    return words


def _unquoted(found: re.Match[str]) -> str:
    if found[2] is not None:
        return re.sub(r'\\(["\\$`])', r"\1", found[2])
    return found[1] if found[1] is not None else found[3]


def _parts(word: str) -> list[str]:
    """The words in a word that holds arguments; what is unknown is never cut."""
    return [part.strip("'\"") for part in _PART.findall(word)] if "--" in word else [word]


def _value(script: Script, found: re.Match[str]) -> str:
    """What a reference to a variable stands for."""
    name = found[1] or found[5] or f"{found[3]}{found[4]}"
    if (words := script.variables.get(name)) is not None:
        return script.spend(" ".join(words))
    if found[2] is not None:
        return _REFERENCE.sub(lambda inner: _value(script, inner), found[2]).strip("'\"")
    return f"{UNKNOWN}${name}{UNKNOWN}"


def _computed(script: Script, text: str) -> str:
    """The value of an arithmetic expression of whole numbers."""
    try:
        bare = _REFERENCE.sub(lambda found: _value(script, found), text)
        if len(bare) > 1000:
            raise ValueError
        return str(_number(script, ast.parse(bare.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return f"'{UNKNOWN}$(({' '.join(text.split())})){UNKNOWN}'"


def _number(script: Script, node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and (known := script.number(node.id)) is not None:
        return known
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(script, node.left), _number(script, node.right))
    raise ValueError


def _choose(script: Script, commands: list[list[str]]) -> None:
    """The command with the most arguments; without one, all that the variables hold."""
    given = max(commands, key=lambda words: sum(word.startswith("--") for word in words), default=[])
    if not any(word.startswith("--") for word in given):
        given = [word for words in script.variables.values() for text in words for word in _parts(text)]
    end = next((place for place, word in enumerate(given) if _REDIRECTION.fullmatch(word)), None)
    given = given[:end]
    program = next((place for place, word in enumerate(given) if word.endswith(".py")), -1)
    script.launcher, script.words = given[: program + 1], given[program + 1 :]


def _typed(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word

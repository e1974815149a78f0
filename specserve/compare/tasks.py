"""Chat tasks on source code, whose answers are mostly copied from the prompt.

Each task is a short dialogue on functions that `ast` finds in one module. Prompt lookup drafts well
when an answer copies from its prompt, so the copying tasks are drawn most often.
"""

from __future__ import annotations

import ast
import keyword
import random
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from specserve.compare.corpus import Module
from specserve.core.errors import ConfigError

Message = dict[str, str]
"""One chat message: `role` (system, user or assistant) and `content`."""

SYSTEM = "You are a careful Python programmer."


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function or method. `code` is dedented; `signature` includes the colon."""

    name: str
    code: str
    signature: str
    docstring: str
    docstring_lines: tuple[int, int] | None
    """First and last line of the docstring in `code`, counted from 0; None: no docstring."""


Task = list[Message]
"""A dialogue whose last message is the assistant's answer."""

Draw = Callable[[random.Random, int], Task | None]
"""Makes a task of at most the given number of characters; None: the drawn code is unsuitable."""


def functions_of(module: Module) -> list[Function]:
    """The functions and methods of 40 to 4000 characters, in file order; [] on a syntax error."""
    try:
        tree = ast.parse(module.text)
    except (SyntaxError, ValueError):
        return []
    lines = module.text.splitlines()
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = []
    for node in sorted(nodes, key=lambda n: n.lineno):
        function = _cut(lines, node)
        if function is not None and 40 <= len(function.code) <= 4000:
            found.append(function)
    return found


def _cut(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function | None:
    assert node.end_lineno is not None
    first = node.lineno - 1
    code = textwrap.dedent("\n".join(lines[first : node.end_lineno]))
    body = node.body[0]
    if body.lineno <= node.lineno or not code.startswith(("def ", "async def ")):
        return None
    signature = "\n".join(code.splitlines()[: body.lineno - node.lineno]).rstrip()
    if not signature.endswith(":"):
        return None
    docstring = ast.get_docstring(node)
    span = None
    if docstring:
        assert body.end_lineno is not None
        span = (body.lineno - node.lineno, body.end_lineno - node.lineno)
    return Function(
        name=node.name,
        code=code,
        signature=signature,
        docstring=docstring or "",
        docstring_lines=span,
    )


def fence(code: str) -> str:
    """Code as a fenced Markdown block, as in prompts and answers."""
    return f"```python\n{code.strip(chr(10))}\n```"


class TaskMaker:
    """Draws tasks from modules, deterministically for a given random generator."""

    def __init__(self, modules: list[Module]) -> None:
        self.functions = [fs for fs in map(functions_of, modules) if fs]
        """The functions of each module that has any."""
        if not self.functions:
            raise ConfigError("corpus", [m.name for m in modules], "modules with functions")
        words = {w for m in modules for w in re.findall(r"\b[a-z][a-z_]{3,14}\b", m.text)}
        self.words = sorted(words)
        self.kinds: dict[str, tuple[int, Draw]] = {
            "complete": (6, self._complete),
            "rename": (6, self.rename),
            "quote": (6, self._quote),
            "describe": (1, self._describe),
        }
        """By kind of task: its weight in a random draw, and the method that makes it."""

    def draw(self, rng: random.Random, max_chars: int, kind: str | None = None) -> Task:
        """Draws a task of about `max_chars` characters at most; `kind` None: of a random kind.

        The limit doubles after every 500 failed attempts.

        Raises:
            ConfigError: 3000 attempts failed.
        """
        names = list(self.kinds)
        weights = [self.kinds[name][0] for name in names]
        for attempt in range(3000):
            name = kind or rng.choices(names, weights)[0]
            task = self.kinds[name][1](rng, max_chars << (attempt // 500))
            if task is not None:
                if rng.random() < 0.15:
                    task.insert(0, message("system", SYSTEM))
                return task
        raise ConfigError("corpus", kind, "modules whose functions this task can be made from")

    def function(self, rng: random.Random, max_chars: int) -> Function | None:
        """A random function; None if it is longer than `max_chars`."""
        function = rng.choice(rng.choice(self.functions))
        return function if len(function.code) <= max_chars else None

    def excerpt(self, rng: random.Random, max_chars: int) -> list[Function]:
        """Neighbouring functions of one module with distinct names; [] if the first is too long."""
        functions = rng.choice(self.functions)
        start = rng.randrange(len(functions))
        room = rng.randint(max_chars // 3, max_chars)
        picked: list[Function] = []
        for function in functions[start : start + 12]:
            if any(function.name == p.name or function.code in p.code for p in picked):
                continue
            if len(function.code) > room:
                break
            picked.append(function)
            room -= len(function.code)
        return picked

    def _complete(self, rng: random.Random, max_chars: int) -> Task | None:
        function = self.function(rng, int(max_chars * 0.7))
        if function is None or function.docstring_lines is None:
            return None
        lines = function.code.splitlines()
        head = "\n".join(lines[: function.docstring_lines[1] + 1])
        if len(lines) <= function.docstring_lines[1] + 1:
            return None
        ask = rng.choice(["Complete this function.", "Write the body of this function."])
        return one_question(f"{ask}\n{fence(head)}", fence(function.code))

    def rename(self, rng: random.Random, max_chars: int) -> Task | None:
        """The task to repeat a function with one identifier renamed."""
        function = self.function(rng, max_chars // 2)
        return self.rename_in(rng, function) if function is not None else None

    def rename_in(self, rng: random.Random, function: Function) -> Task | None:
        """The renaming task for a given function; None if no suitable name was found."""
        names = re.findall(r"\b[A-Za-z_]\w{2,}\b", function.code)
        candidates = sorted({n for n in names if names.count(n) > 1 and n not in _KEYWORDS})
        if not candidates:
            return None
        old, new = rng.choice(candidates), rng.choice(self.words)
        if new in names:
            return None
        code = re.sub(rf"\b{re.escape(old)}\b", new, function.code)
        ask = f"Repeat this code with `{old}` renamed to `{new}`."
        return one_question(f"{ask}\n{fence(function.code)}", fence(code))

    def _quote(self, rng: random.Random, max_chars: int) -> Task | None:
        picked = self.excerpt(rng, int(max_chars * 0.65))
        if len(picked) < 2:
            return None
        target = rng.choice(picked)
        ask = f"Print the function `{target.name}` of this file."
        code = "\n\n".join(f.code for f in picked)
        parts = [ask, fence(code)]
        if rng.random() >= 0.5:
            parts.reverse()
        question = "\n".join(parts)
        return one_question(question, fence(target.code))

    def _describe(self, rng: random.Random, max_chars: int) -> Task | None:
        function = self.function(rng, int(max_chars * 0.6))
        if function is None or not function.docstring:
            return None
        if len(function.code) + len(function.docstring) > max_chars:
            return None
        ask = "What does this function do?"
        return one_question(f"{ask}\n{fence(function.code)}", function.docstring)


_KEYWORDS = frozenset([*keyword.kwlist, "self"])


def message(role: str, content: str) -> Message:
    """One chat message."""
    return {"role": role, "content": content}


def one_question(asked: str, answer: str) -> Task:
    """A task of one question and its answer."""
    return [message("user", asked), message("assistant", answer)]

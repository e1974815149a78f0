"""Chat tasks made from source code, whose answers are mostly copied from the prompt.

Each task is a short dialogue over functions cut out of one module with `ast`. Copying from the
prompt is what prompt lookup lives on, so the tasks that copy come often.
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
    """One function or method: `code` is dedented; `signature` ends with the colon."""

    name: str
    code: str
    signature: str
    docstring: str
    docstring_lines: tuple[int, int] | None
    """First and last line of the docstring inside `code`, counted from 0; None without one."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A dialogue whose last message is the assistant's answer."""

    kind: str
    messages: list[Message]


def functions_of(module: Module) -> list[Function]:
    """The functions and methods of a module in file order; [] where it does not parse."""
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
    """Code as a Markdown block, the way prompts and answers carry it."""
    return f"```python\n{code.strip(chr(10))}\n```"


class TaskMaker:
    """Draws tasks from modules; a task depends on the random generator it is given alone."""

    def __init__(self, modules: list[Module]) -> None:
        self.functions = [fs for fs in map(functions_of, modules) if fs]
        """Per module with functions, its functions."""
        if not self.functions:
            raise ConfigError("corpus", [m.name for m in modules], "modules with functions")
        words = {w for m in modules for w in re.findall(r"\b[a-z][a-z_]{3,14}\b", m.text)}
        self.words = sorted(words)
        self.kinds: dict[str, tuple[int, Callable[[random.Random, int], Task | None]]] = {
            "complete": (6, self._complete),
            "rename": (6, self._rename),
            "quote": (6, self._quote),
            "repeat": (2, self._repeat),
            "strip_docstring": (2, self._strip_docstring),
            "list": (2, self._list),
            "signature": (2, self._signature),
            "describe": (1, self._describe),
            "dialogue": (3, self._dialogue),
        }

    def draw(self, rng: random.Random, max_chars: int, kind: str | None = None) -> Task:
        """A task of about at most `max_chars` characters in all; its kind drawn where None.

        Where the modules hold nothing so short, the limit doubles until they do.

        Raises:
            ConfigError: the modules hold no such task of any length.
        """
        names = list(self.kinds)
        weights = [self.kinds[name][0] for name in names]
        for attempt in range(3000):
            name = kind or rng.choices(names, weights)[0]
            task = self.kinds[name][1](rng, max_chars << (attempt // 500))
            if task is not None:
                if rng.random() < 0.15:
                    task.messages.insert(0, {"role": "system", "content": SYSTEM})
                return task
        raise ConfigError("corpus", kind, "modules whose functions this task can be made from")

    def _function(self, rng: random.Random, max_chars: int) -> Function | None:
        function = rng.choice(rng.choice(self.functions))
        return function if len(function.code) <= max_chars else None

    def _excerpt(self, rng: random.Random, max_chars: int) -> list[Function]:
        """Neighbouring functions of one module with distinct names."""
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
        function = self._function(rng, int(max_chars * 0.7))
        if function is None or function.docstring_lines is None:
            return None
        lines = function.code.splitlines()
        head = "\n".join(lines[: function.docstring_lines[1] + 1])
        if len(lines) <= function.docstring_lines[1] + 1:
            return None
        ask = rng.choice(["Complete this function.", "Write the body of this function."])
        return _task("complete", f"{ask}\n{fence(head)}", fence(function.code))

    def _rename(self, rng: random.Random, max_chars: int) -> Task | None:
        function = self._function(rng, max_chars // 2)
        if function is None:
            return None
        return self._rename_in(rng, function)

    def _rename_in(self, rng: random.Random, function: Function) -> Task | None:
        names = re.findall(r"\b[A-Za-z_]\w{2,}\b", function.code)
        candidates = sorted({n for n in names if names.count(n) > 1 and n not in _KEYWORDS})
        if not candidates:
            return None
        old, new = rng.choice(candidates), rng.choice(self.words)
        if new in names:
            return None
        code = re.sub(rf"\b{re.escape(old)}\b", new, function.code)
        ask = f"Repeat this code with `{old}` renamed to `{new}`."
        return _task("rename", f"{ask}\n{fence(function.code)}", fence(code))

    def _repeat(self, rng: random.Random, max_chars: int) -> Task | None:
        function = self._function(rng, max_chars // 2)
        if function is None:
            return None
        code = function.code
        if rng.random() < 0.5:
            words: list[str] = re.split(r"(\W+)", code)
            swaps: dict[str, str] = {
                w: rng.choice(self.words) for w in sorted(set(words)) if len(w) > 3
            }
            code = "".join(swaps.get(w, w) for w in words)
        return _task("repeat", f"Repeat this code exactly.\n{fence(code)}", fence(code))

    def _quote(self, rng: random.Random, max_chars: int) -> Task | None:
        picked = self._excerpt(rng, int(max_chars * 0.65))
        if len(picked) < 2:
            return None
        target = rng.choice(picked)
        ask = f"Print the function `{target.name}` of this file."
        code = "\n\n".join(f.code for f in picked)
        parts = [ask, fence(code)]
        if rng.random() >= 0.5:
            parts.reverse()
        question = "\n".join(parts)
        return _task("quote", question, fence(target.code))

    def _strip_docstring(self, rng: random.Random, max_chars: int) -> Task | None:
        function = self._function(rng, max_chars // 2)
        if function is None or function.docstring_lines is None:
            return None
        first, last = function.docstring_lines
        lines = function.code.splitlines()
        if len(lines) <= last + 1:
            return None
        code = "\n".join(lines[:first] + lines[last + 1 :])
        ask = "Remove the docstring from this function."
        return _task("strip_docstring", f"{ask}\n{fence(function.code)}", fence(code))

    def _list(self, rng: random.Random, max_chars: int) -> Task | None:
        picked = self._excerpt(rng, int(max_chars * 0.8))
        if len(picked) < 2:
            return None
        code = "\n\n".join(f.code for f in picked)
        names = "\n".join(f"- `{f.name}`" for f in picked)
        return _task("list", f"List the functions of this file.\n{fence(code)}", names)

    def _signature(self, rng: random.Random, max_chars: int) -> Task | None:
        picked = self._excerpt(rng, int(max_chars * 0.8))
        if len(picked) < 2:
            return None
        target = rng.choice(picked)
        code = "\n\n".join(f.code for f in picked)
        ask = f"What is the signature of `{target.name}` in this file?"
        return _task("signature", f"{ask}\n{fence(code)}", fence(target.signature))

    def _describe(self, rng: random.Random, max_chars: int) -> Task | None:
        function = self._function(rng, int(max_chars * 0.6))
        if function is None or not function.docstring:
            return None
        if len(function.code) + len(function.docstring) > max_chars:
            return None
        ask = "What does this function do?"
        return _task("describe", f"{ask}\n{fence(function.code)}", function.docstring)

    def _dialogue(self, rng: random.Random, max_chars: int) -> Task | None:
        """Two or three questions about one file, each answered from it."""
        picked = self._excerpt(rng, max_chars // 3)
        if len(picked) < 2:
            return None
        code = "\n\n".join(f.code for f in picked)
        first = rng.choice(picked)
        messages = [
            _message("user", f"Print the function `{first.name}` of this file.\n{fence(code)}"),
            _message("assistant", fence(first.code)),
        ]
        if rng.random() < 0.5:
            renamed = self._rename_in(rng, first)
            if renamed is not None and renamed.messages[1]["content"] != fence(first.code):
                ask = renamed.messages[0]["content"].split("\n")[0]
                messages.append(_message("user", ask.replace("this code", "it")))
                messages.append(renamed.messages[1])
        else:
            second = rng.choice(picked)
            messages.append(_message("user", f"Now print `{second.name}`."))
            messages.append(_message("assistant", fence(second.code)))
        if sum(len(m["content"]) for m in messages) > max_chars * 1.2:
            return None
        return Task(kind="dialogue", messages=messages)


_KEYWORDS = frozenset([*keyword.kwlist, "self"])


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _task(kind: str, question: str, answer: str) -> Task:
    return Task(kind=kind, messages=[_message("user", question), _message("assistant", answer)])

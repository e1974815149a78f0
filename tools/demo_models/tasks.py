"""More kinds of chat tasks on source code, for training, evaluation and benchmarks."""

from __future__ import annotations

import random
import re

from specserve.compare.corpus import Module
from specserve.compare.tasks import Task, TaskMaker, fence, message, one_question


class AllTasks(TaskMaker):
    """Draws tasks of all kinds."""

    def __init__(self, modules: list[Module]) -> None:
        super().__init__(modules)
        self.kinds |= {
            "repeat": (2, self._repeat),
            "strip_docstring": (2, self._strip_docstring),
            "list": (2, self._list),
            "signature": (2, self._signature),
            "dialogue": (3, self._dialogue),
        }

    def _repeat(self, rng: random.Random, max_chars: int) -> Task | None:
        function = self.function(rng, max_chars // 2)
        if function is None:
            return None
        code = function.code
        if rng.random() < 0.5:
            words: list[str] = re.split(r"(\W+)", code)
            swaps: dict[str, str] = {
                w: rng.choice(self.words) for w in sorted(set(words)) if len(w) > 3
            }
            code = "".join(swaps.get(w, w) for w in words)
        return one_question(f"Repeat this code exactly.\n{fence(code)}", fence(code))

    def _strip_docstring(self, rng: random.Random, max_chars: int) -> Task | None:
        function = self.function(rng, max_chars // 2)
        if function is None or function.docstring_lines is None:
            return None
        first, last = function.docstring_lines
        lines = function.code.splitlines()
        if len(lines) <= last + 1:
            return None
        code = "\n".join(lines[:first] + lines[last + 1 :])
        ask = "Remove the docstring from this function."
        return one_question(f"{ask}\n{fence(function.code)}", fence(code))

    def _list(self, rng: random.Random, max_chars: int) -> Task | None:
        picked = self.excerpt(rng, int(max_chars * 0.8))
        if len(picked) < 2:
            return None
        code = "\n\n".join(f.code for f in picked)
        names = "\n".join(f"- `{f.name}`" for f in picked)
        return one_question(f"List the functions of this file.\n{fence(code)}", names)

    def _signature(self, rng: random.Random, max_chars: int) -> Task | None:
        picked = self.excerpt(rng, int(max_chars * 0.8))
        if len(picked) < 2:
            return None
        target = rng.choice(picked)
        code = "\n\n".join(f.code for f in picked)
        ask = f"What is the signature of `{target.name}` in this file?"
        return one_question(f"{ask}\n{fence(code)}", fence(target.signature))

    def _dialogue(self, rng: random.Random, max_chars: int) -> Task | None:
        """A dialogue of one or two questions about one file, which contains the answers."""
        picked = self.excerpt(rng, max_chars // 3)
        if len(picked) < 2:
            return None
        code = "\n\n".join(f.code for f in picked)
        first = rng.choice(picked)
        messages = [
            message("user", f"Print the function `{first.name}` of this file.\n{fence(code)}"),
            message("assistant", fence(first.code)),
        ]
        if rng.random() < 0.5:
            renamed = self.rename_in(rng, first)
            if renamed is not None and renamed[1]["content"] != fence(first.code):
                ask = renamed[0]["content"].split("\n")[0]
                messages.append(message("user", ask.replace("this code", "it")))
                messages.append(renamed[1])
        else:
            second = rng.choice(picked)
            messages.append(message("user", f"Now print `{second.name}`."))
            messages.append(message("assistant", fence(second.code)))
        if sum(len(m["content"]) for m in messages) > max_chars * 1.2:
            return None
        return messages

"""Requests to a server, made from texts that the demo models were not trained on.

Code comes from held-out modules of the standard library and the installed packages (corpus.py has
the rule). Dialogues are about licences and documents on this machine. Half of the requests sample
at temperature 0.7, because a small model's greedy text repeats itself.
"""

from __future__ import annotations

import random
import sysconfig
from argparse import ArgumentParser
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from specserve.compare.corpus import Module, load_modules
from specserve.compare.prompts import Tokenizer, load_prompts
from specserve.compare.tasks import Message, Task, functions_of
from specserve.core.errors import ConfigError
from tools.demo_models.tasks import AllTasks

TRAFFIC = {
    "plain-code": "tasks on code, greedy",
    "never-seen": "questions on code, edits of code in the prompt, dialogues, nothing twice",
    "agent": "edits of the same few files, which change from request to request",
    "seen": "as `never-seen`, and all of it was asked before",
    "random": "random tokens at temperature 1",
}

QUESTIONS = ("complete", "describe", "list", "signature")
EDITS = ("rename", "repeat", "strip_docstring", "quote")
"""Kinds of tasks whose answer is in the prompt, with changes."""

TEMPERATURE = 0.7
OUTPUT_TOKENS = (48, 144)
"""Range of output tokens. A model may end earlier, except with ``plain-code`` and ``random``."""
TASK_CHARS, MAX_PROMPT_TOKENS = 3000, 1500
PIECE_CHARS = 2500
NUM_FILES, FILE_CHARS, CHANGED_LINES = 3, (4_000, 16_000), 0.02
"""An agent's files, their lengths, and the share of lines that change before each request."""
TRIES_OF_KIND = 4
PASSAGE_CHARS = (200, 700)
RANDOM_PROMPT_TOKENS, RANDOM_VOCAB = 200, 4000
TEXTS = ("common-licenses/*", "doc/*/copyright", "doc/*/README*")
"""Patterns under /usr/share."""
TEXTS_OF_PACKAGES = ("*.dist-info/licenses/*", "*.dist-info/LICENSE*")


@dataclass(frozen=True, slots=True)
class Request:
    """One completion.

    Attributes:
        prompt: text after the chat template was applied, or tokens.
        max_tokens: limit of the answer.
        temperature: 0: greedy.
        ignore_eos: the answer always has ``max_tokens`` tokens.
    """

    prompt: str | list[int]
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False

    def body(self, model: str) -> dict[str, object]:
        """Body for ``/v1/completions``, streamed."""
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to a server before and during a measurement."""

    warm_up: list[Request]
    measured: list[Request]


class Workload:
    """Draws requests. No file or passage is used twice, except by an agent.

    Args:
        tokenizer: tokenizer of the model.
        seed: seed of all random choices.
        ignore_eos: answers have the same length on all servers. Otherwise the lengths of sampled
            answers differ, and so does the number of requests that run at a time.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, *, ignore_eos: bool = False) -> None:
        self._tokenizer, self._seed, self._ignore_eos = tokenizer, seed, ignore_eos
        self._rng = random.Random(seed)
        packages = Path(sysconfig.get_path("purelib"))
        modules = load_modules(held_out=True) + load_modules(packages, held_out=True)
        self._rng.shuffle(modules)
        num_files = len(modules) // 4
        self._files = iter(modules[:num_files])
        self._pieces = _pieces(modules[num_files:])
        self._passages = _passages(packages, self._rng)
        self._num_plain = 0

    def load(self, kind: str, num_clients: int, num_requests: int) -> Load:
        """A load of one kind of :data:`TRAFFIC`.

        Raises:
            ConfigError: this machine has too few texts.
        """
        num_warm_up = max(num_clients, 2)
        total = num_warm_up + num_requests
        if kind == "agent":
            requests = self._sampled(list(self._loop(total)))
        elif kind == "random":
            requests = [self._random() for _ in range(total)]
        elif kind == "plain-code":
            requests = self._plain(total)
        else:
            requests = self._sampled([self._mixed(number) for number in range(total)])
        measured = requests[num_warm_up:]
        return Load(measured if kind == "seen" else requests[:num_warm_up], measured)

    def _sampled(self, prompts: list[str]) -> list[Request]:
        """Requests for the prompts. Every other one is greedy."""
        return [
            Request(
                prompt,
                self._rng.randint(*OUTPUT_TOKENS),
                TEMPERATURE * (number % 2),
                self._ignore_eos,
            )
            for number, prompt in enumerate(prompts)
        ]

    def code_task(self, kind: str) -> str:
        """A task of this kind on code that was not used before."""
        for piece in self._pieces:
            if prompt := self._task(piece, kind):
                return prompt
        raise ConfigError("requests", kind, "fewer: all held-out modules are in use")

    def _mixed(self, number: int) -> str:
        if number % 3 == 2:
            return self.dialogue()
        kinds = (QUESTIONS, EDITS)[number % 3]
        return self.code_task(kinds[number // 3 % len(kinds)])

    def _loop(self, num_requests: int) -> Iterator[str]:
        """An agent's requests. Each takes the next file, with all changes so far and new ones."""
        files: list[Module] = []
        while len(files) < NUM_FILES:
            module = next(self._files)
            is_fit = FILE_CHARS[0] <= len(module.text) <= FILE_CHARS[1]
            if is_fit and all(self._task(module, kind) for kind in EDITS):
                files.append(module)
        for number in range(num_requests):
            place = number % NUM_FILES
            for attempt in count():
                # After changes a file may not fit a kind any more. Then the next kind is tried.
                turn = number // NUM_FILES + attempt // TRIES_OF_KIND
                kind = EDITS[turn % len(EDITS)]
                lines = files[place].text.splitlines(keepends=True)
                changed = replace(
                    files[place], text="".join(edited(lines, CHANGED_LINES, self._rng))
                )
                if prompt := self._task(changed, kind):  # it can still be parsed
                    files[place] = changed
                    yield prompt
                    break

    def _task(self, module: Module, kind: str) -> str:
        """A task on the module, without its answer. Empty if no task of this kind fits."""
        try:
            task: Task = AllTasks([module]).draw(self._rng, TASK_CHARS, kind=kind)
        except ConfigError:
            return ""
        prompt = self._rendered(task[:-1])
        is_short = (
            len(self._tokenizer.encode(prompt, add_special_tokens=False)) <= MAX_PROMPT_TOKENS
        )
        return prompt if is_short else ""

    def dialogue(self) -> str:
        """The first turns of a dialogue on passages that were not used before."""
        first, second = self._passage(), self._passage()
        said = first.split(". ")[0]
        turns = self._rng.choice(
            [
                [f"What does this text say?\n\n{first}", said, "Go on."],
                [f"Read this.\n\n{first}", said, f"How does this differ from it?\n\n{second}"],
                [f"Correct the mistakes in this text.\n\n{first}"],
                [f"Continue this text.\n\n{first}"],
            ]
        )
        return self._rendered(
            [
                {"role": ("user", "assistant")[number % 2], "content": turn}
                for number, turn in enumerate(turns)
            ]
        )

    def _passage(self) -> str:
        if not self._passages:
            raise ConfigError("requests", "dialogues", "fewer: all texts are in use")
        return self._passages.pop()

    def _plain(self, num_requests: int) -> list[Request]:
        """The set ``code``, from the end of the last call on."""
        begin, self._num_plain = self._num_plain, self._num_plain + num_requests
        prompts = load_prompts(
            "code", self._tokenizer, num_prompts=self._num_plain, seed=self._seed
        )
        return [Request(prompt.text, 128) for prompt in prompts[begin:]]

    def _random(self) -> Request:
        prompt = [self._rng.randrange(RANDOM_VOCAB) for _ in range(RANDOM_PROMPT_TOKENS)]
        return Request(prompt, self._rng.randint(*OUTPUT_TOKENS), 1.0, ignore_eos=True)

    def _rendered(self, messages: list[Message]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return text


def known_traffic(parser: ArgumentParser, given: str) -> list[str]:
    """Kinds of :data:`TRAFFIC` in a comma-separated list. An unknown one ends the program."""
    kinds = given.split(",")
    if unknown := set(kinds) - TRAFFIC.keys():
        parser.error(f"--traffic: {', '.join(sorted(unknown))}: known are {', '.join(TRAFFIC)}")
    return kinds


def edited(lines: list[str], share: float, rng: random.Random) -> list[str]:
    """The lines; a share of them is missing or has another word."""
    found = []
    for line in lines:
        if rng.random() >= share:
            found.append(line)
        elif rng.random() < 0.5 and (words := line.split()):
            found.append(line.replace(rng.choice(words), f"edit{rng.randrange(1000)}", 1))
    return found


def _pieces(modules: Iterable[Module]) -> Iterator[Module]:
    """The first piece of each module, then the next one of each."""
    left = deque(pieces_of(module, PIECE_CHARS) for module in modules)
    while left:
        of_module = left.popleft()
        if (piece := next(of_module, None)) is not None:
            left.append(of_module)
            yield piece


def pieces_of(module: Module, num_chars: int) -> Iterator[Module]:
    """The module's functions in parsable pieces of ``num_chars`` or slightly more."""
    codes: list[str] = []
    for function in functions_of(module):
        codes.append(function.code)
        if sum(map(len, codes)) >= num_chars:
            yield replace(module, text="\n\n".join(codes))
            codes = []


def _passages(packages: Path, rng: random.Random) -> list[str]:
    """Paragraphs of texts on this machine, each once, in a random order."""
    found: dict[str, None] = {}
    places = {Path("/usr/share"): TEXTS, packages: TEXTS_OF_PACKAGES}
    for root, patterns in places.items():
        for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
            if path.is_file():
                text = path.read_text(encoding="utf-8", errors="ignore")
                paragraphs = (" ".join(each.split()) for each in text.split("\n\n"))
                low, high = PASSAGE_CHARS
                found.update((each, None) for each in paragraphs if low <= len(each) <= high)
    passages = list(found)
    rng.shuffle(passages)
    return passages

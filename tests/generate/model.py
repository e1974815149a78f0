"""A model for tests, whose tokens are characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specserve.bench.local import LocalModel
from specserve.bench.token_file import TokenIds
from specserve.compare.tasks import Message
from specserve.engine.generation import Completion, Job, RunResult, Show


class Echo(LocalModel):
    """Answers with the end of its prompt, a character at a time.

    Args:
        interrupted: whether Ctrl-C is pressed after the first character.
    """

    name, max_model_len, vocab_size = "echo", 100, 128

    def __init__(self, *, interrupted: bool = False) -> None:
        self.interrupted = interrupted
        self.dialogues: list[list[str]] = []

    def start(self, speculation: str = "auto") -> None:
        return

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        return tuple(map(ord, text))

    def render(self, messages: Sequence[Message]) -> TokenIds:
        self.dialogues.append([each["content"] for each in messages])
        return self.encode(messages[-1]["content"], add_special_tokens=False)

    def run(
        self,
        jobs: Sequence[Job],
        concurrency: int,
        progress: Callable[[int, int], None] = lambda num_done, num_tokens: None,
        show: Show | None = None,
    ) -> RunResult:
        assert show is not None
        found = []
        for index, job in enumerate(jobs):
            tokens = job.prompt_token_ids[-job.sampling.max_tokens :]
            text = "".join(map(chr, tokens))
            for character in text:
                show(index, character, None)
                if self.interrupted:
                    raise KeyboardInterrupt
            found.append(completion(text))
            show(index, "", found[-1])
        return RunResult(completions=tuple(found), seconds=0.5, drafts=())


def completion(text: str, **counts: int) -> Completion:
    """An answer with accepted tokens by source, and twice as many draft tokens."""
    return Completion(
        text=text,
        token_ids=tuple(map(ord, text)),
        finish_reason="length",
        seconds=0.5,
        token_seconds=(0.5,) * len(text),
        sources={
            name: {"drafted_tokens": 2 * count, "accepted_tokens": count}
            for name, count in counts.items()
        },
    )

"""Jobs for engines: the built-in prompt sets, and sets for benchmarks only."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

from specserve.compare.corpus import Module, load_modules
from specserve.compare.prompts import BUILT_IN, Tokenizer, load_prompts
from specserve.engine.generation import Job, Sampling
from tests.peers.schemas import SCHEMAS, question, random_record
from tests.peers.workload import (
    EDITS,
    RANDOM_PROMPT_TOKENS,
    RANDOM_VOCAB,
    TEMPERATURE,
    Workload,
    pieces_of,
)
from tools.demo_models.tasks import AllTasks

SETS = (*BUILT_IN, "again", "predicted", "structured", "random", "mixed")
MIXED = ("repeat", "again", "dialogue", "predicted", "structured")
"""Kinds of jobs of ``mixed``, in their order."""
_CODE = re.compile(r"```.*?```", re.DOTALL)
NUM_FILES, FILE_CHARS, TASK_CHARS = 3, 6000, 3000


class JobSets:
    """Jobs of the prompt sets by name.

    ``again`` has tasks on the same few files. In ``predicted`` each of them predicts its own code.
    Answers of ``structured`` follow JSON schemas. ``random`` has random tokens, continued at
    random. ``mixed`` has in turn a task whose answer is in the prompt (for ``ngram``), a task of
    ``again`` (``trie``), a dialogue (``mtp``), a task that predicts its answer (``prediction``) and
    an answer that follows a schema (``grammar``). Every other job samples. Each call gives new
    tasks, dialogues and schemas, so that no memory knows them.

    Args:
        tokenizer: tokenizer of the model.
        max_tokens: mean tokens of an answer. Answers have half to one and a half times as many.
        seed: seed of all random choices.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, seed: int) -> None:
        self._tokenizer, self._max_tokens, self._seed = tokenizer, max_tokens, seed
        self._files = files_of_again(seed)
        self._workload, self._rng = Workload(tokenizer, seed), random.Random(seed)

    def jobs(self, name: str, number: int) -> list[Job]:
        """The set's first ``number`` jobs, repeated if it has fewer."""
        if name == "mixed":
            return _with_varied_lengths(self._mixed(number), self._seed)
        if name in ("again", "predicted"):
            found = again_jobs(
                self._tokenizer,
                self._files,
                number,
                self._max_tokens,
                self._seed,
                predicted=name == "predicted",
            )
        elif name == "structured":
            found = structured_jobs(self._tokenizer, number, self._max_tokens)
        elif name == "random":
            found = random_jobs(number, self._max_tokens, self._seed)
        else:
            num_prompts = number if name == "code" else 0
            prompts = load_prompts(name, self._tokenizer, num_prompts=num_prompts, seed=self._seed)
            sampling = Sampling(max_tokens=self._max_tokens)
            found = [Job(each.token_ids, sampling) for each in (prompts * number)[:number]]
        return _with_varied_lengths(found, self._seed)

    def _mixed(self, number: int) -> list[Job]:
        again = again_jobs(self._tokenizer, self._files, number, self._max_tokens, self._seed)
        jobs = []
        for index in range(number):
            sampling = Sampling(max_tokens=self._max_tokens, temperature=TEMPERATURE * (index % 2))
            kind = MIXED[index % len(MIXED)]
            if kind == "again":
                jobs.append(replace(again[index], sampling=sampling))
                continue
            if kind == "dialogue":
                text = self._workload.dialogue()
            elif kind == "structured":
                schema = random_record(self._rng)
                text = question(schema)
                sampling = replace(sampling, json_schema=json.dumps(schema))
            else:
                text = self._workload.code_task("repeat")
            if kind == "predicted":
                sampling = replace(sampling, prediction=self._ids(_code_in(text)))
            jobs.append(Job(self._ids(text), sampling))
        return jobs

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _code_in(text: str) -> str:
    """The first block of code in a text; empty if it has none."""
    code = _CODE.search(text)
    return code[0] if code else ""


def random_jobs(number: int, max_tokens: int, seed: int) -> list[Job]:
    """Prompts of random tokens, continued at random."""
    rng = random.Random(seed)
    sampling = Sampling(max_tokens=max_tokens, temperature=1.0, ignore_eos=True)
    prompts = [
        tuple(rng.randrange(RANDOM_VOCAB) for _ in range(RANDOM_PROMPT_TOKENS))
        for _ in range(number)
    ]
    return [Job(prompt, sampling) for prompt in prompts]


def structured_jobs(tokenizer: Tokenizer, number: int, max_tokens: int) -> list[Job]:
    """Jobs whose answers follow a JSON schema, repeated if there are fewer schemas."""
    found = []
    for schema in islice(cycle(SCHEMAS.values()), number):
        ids = tuple(tokenizer.encode(question(schema), add_special_tokens=True))
        found.append(Job(ids, Sampling(max_tokens=max_tokens, json_schema=json.dumps(schema))))
    return found


def files_of_again(seed: int) -> list[Module]:
    """The files for ``again_jobs``."""
    large = [module for module in load_modules(held_out=True) if len(module.text) >= FILE_CHARS]
    random.Random(seed).shuffle(large)
    pieces = (next(pieces_of(module, FILE_CHARS), None) for module in large)
    return list(islice((piece for piece in pieces if piece is not None), NUM_FILES))


def again_jobs(
    tokenizer: Tokenizer,
    files: Sequence[Module],
    number: int,
    max_tokens: int,
    seed: int,
    *,
    predicted: bool = False,
) -> list[Job]:
    """Tasks on ``files``. ``seed`` chooses their wording and edits.

    If ``predicted``, each task predicts the code in its question.
    """
    tasks, rng = AllTasks(list(files)), random.Random(seed)
    jobs = []
    for index in range(number):
        task = tasks.draw(rng, TASK_CHARS, kind=EDITS[index % len(EDITS)])
        text = tokenizer.apply_chat_template(task[:-1], add_generation_prompt=True, tokenize=False)
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        code = _code_in(task[-2]["content"]) if predicted else ""
        prediction = tokenizer.encode(code, add_special_tokens=False)
        jobs.append(Job(ids, Sampling(max_tokens=max_tokens, prediction=tuple(prediction))))
    return jobs


def _with_varied_lengths(jobs: Sequence[Job], seed: int) -> list[Job]:
    """The jobs, each with half to one and a half times as many output tokens.

    With answers of equal length, an engine without drafts would read all prompts in the same few
    steps. That does not happen on a server.
    """
    rng = random.Random(seed)
    varied = []
    for job in jobs:
        most = job.sampling.max_tokens
        sampling = replace(
            job.sampling, max_tokens=rng.randint(max(most // 2, 1), most + most // 2)
        )
        varied.append(replace(job, sampling=sampling))
    return varied

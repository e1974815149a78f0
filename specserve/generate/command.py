"""``specserve generate``: continues texts or chats, with a server or with an engine it starts."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.compare.arguments import at_least_zero, in_existing_folder, number_from
from specserve.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from specserve.bench.token_file import TokenIds
    from specserve.engine.generation import Sampling
    from specserve.generate.questions import Model

# `run` imports the rest, so that `specserve --help` stays fast.

GREEDY, SAMPLED = "greedy_search", "greedy_search_with_sampling"
BEAMS, SAMPLED_BEAMS = "beam_search", "beam_search_with_sampling"
CHAT = "chat"
TASKS = (GREEDY, SAMPLED, BEAMS, SAMPLED_BEAMS, CHAT)
DEFAULT_NEW_TOKENS, DEFAULT_BEAMS, DEFAULT_HISTORY = 128, 4, 3
_SAMPLING_TASKS = SAMPLED, SAMPLED_BEAMS, CHAT
_BEAM_TASKS = BEAMS, SAMPLED_BEAMS
_TASK_OPTIONS = {
    "top_k": (0, (0, 1), _SAMPLING_TASKS),
    "top_p": (1.0, (1,), _SAMPLING_TASKS),
    "temperature": (1.0, (0, 1), _SAMPLING_TASKS),
    "num_beams": (DEFAULT_BEAMS, (1,), _BEAM_TASKS),
    "length_penalty": (1.0, (1,), _BEAM_TASKS),
    "history_turns": (DEFAULT_HISTORY, (0,), (CHAT,)),
}
"""Options of some tasks: the default, values that other tasks accept too, and the tasks."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "generate",
        help="continue texts, or chat, and show what speculation did",
        description="Prints each question, its answer, tokens, time, and drafted and accepted "
        "tokens by source. Texts are continued as they are; with --chat-template or --system they "
        "are questions of a chat. Without any input a few texts are asked twice: the second time "
        "the draft memory knows them.",
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="address of a server; its key in OPENAI_API_KEY")
    where.add_argument("--config", type=Path, help="Serve file, whose engine is started here")
    add("--task", choices=TASKS, default=GREEDY, metavar="TASK", help=", ".join(TASKS) + " "
        "(default: %(default)s)")  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--input-texts", nargs="+", metavar="TEXT", help="texts to continue")
    what.add_argument("--input-ids", nargs="+", metavar="IDS", help="token ids, such as 1,2 3,4")
    what.add_argument("--input-file", type=Path, metavar="FILE", help=".txt: a line a text; "
        '.jsonl: "prompt" or "messages"; .csv: a line of token ids a text')  # fmt: skip
    add("--stream", action="store_true", help="show an answer as it comes; a chat always does")
    add("--max-new-tokens", type=number_from(1), metavar="N", help="longest answer; wins over "
        f"--max-length (default: {DEFAULT_NEW_TOKENS})")  # fmt: skip
    add("--max-length", type=number_from(1), metavar="N", help="longest answer and its prompt "
        "together")  # fmt: skip
    add("--add-eos-token", nargs="+", default=[], metavar="ID|TEXT", help="further end tokens; a "
        "text has to be one token")  # fmt: skip
    add("--top-k", type=number_from(0), help="of sampling and chats; 0: all (default: 0)")
    add("--top-p", type=float, help="of sampling and chats (default: 1.0)")
    add("--temperature", type=float, help="of sampling and chats (default: 1.0)")
    add("--num-beams", type=number_from(1), metavar="N", help="of a beam search (default: "
        f"{DEFAULT_BEAMS})")  # fmt: skip
    add("--length-penalty", type=float, help="of a beam search (default: 1.0)")
    add("--seed", type=number_from(0), default=None, help="of each request (default: none)")
    add("--max-batch-size", type=number_from(1), default=16, metavar="N", help="requests at a "
        "time (default: %(default)s)")  # fmt: skip
    add("--chat-template", type=Path, metavar="FILE", help="in Jinja; default: the model's")
    add("--system", default="", metavar="TEXT", help="system prompt")
    add("--history-turns", type=number_from(0), metavar="N", help="turns of a chat that are kept "
        f"(default: {DEFAULT_HISTORY})")  # fmt: skip
    add("--save-output", type=Path, metavar="FILE", help="write answers and counts as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the task and prints the answers. A failure or Ctrl-C loses no finished answer.

    Raises:
        SpecServeError: an argument or a file is wrong, or a request failed.
    """
    from rich.console import Console

    from specserve.compare.report import write_json

    _check(args)
    console = Console()
    with contextlib.ExitStack() as stack:
        model = _model(args, stack)
        found: dict[str, Any] = {"model": model.name, "task": args.task}
        try:
            if args.task == CHAT:
                found["turns"] = _chat(args, model, console)
            else:
                found["passes"] = []
                _texts(args, model, console, found["passes"])
        finally:
            if args.save_output and (found.get("turns") or found.get("passes")):
                write_json(args.save_output, found)
    return 0


def _check(args: argparse.Namespace) -> None:
    is_beam = args.task in _BEAM_TASKS
    _set_defaults(args)
    at_least_zero("--temperature", args.temperature)
    in_existing_folder("--save-output", args.save_output)
    if not 0 < args.top_p <= 1:
        raise ConfigError("--top-p", args.top_p, "a number above 0 and up to 1")
    if not abs(args.length_penalty) < float("inf"):
        raise ConfigError("--length-penalty", args.length_penalty, "a finite number")
    if is_beam and args.num_beams < 2:
        raise ConfigError("--num-beams", args.num_beams, f"2 or more for {args.task}")
    if is_beam and args.stream:
        raise ConfigError("--stream", True, f"without it: {args.task} cannot stream")
    if is_beam and args.config:
        raise ConfigError("--config", str(args.config), f"--url: {args.task} needs a server")
    if is_beam and args.add_eos_token:
        allowed = f"without it: {args.task} ends at the model's own end token alone"
        raise ConfigError("--add-eos-token", args.add_eos_token, allowed)
    if args.task == CHAT:
        for name in ("input_texts", "input_ids", "input_file"):
            if given := getattr(args, name):
                field = f"--{name.replace('_', '-')}"
                raise ConfigError(field, given, "without it: a chat reads what is typed")
    if args.input_ids or (args.input_file and args.input_file.suffix == ".csv"):
        for name in ("system", "chat_template"):
            if given := getattr(args, name):
                allowed = "without it: token ids are used as they are"
                raise ConfigError(f"--{name.replace('_', '-')}", str(given), allowed)
    if args.task == SAMPLED_BEAMS and not args.temperature:
        raise ConfigError("--temperature", args.temperature, f"above 0: {args.task} draws")


def _set_defaults(args: argparse.Namespace) -> None:
    """Sets the defaults of the options that only some tasks have.

    Raises:
        ConfigError: an option is set that does not apply to the task.
    """
    for name, (default, neutral, tasks) in _TASK_OPTIONS.items():
        value = getattr(args, name)
        if value is None:
            setattr(args, name, default)
        elif args.task not in tasks and value not in neutral:
            allowed = f"only with --task {', '.join(tasks)}, not with {args.task}"
            raise ConfigError(f"--{name.replace('_', '-')}", value, allowed)


def _model(args: argparse.Namespace, stack: contextlib.ExitStack) -> Model:
    from specserve.bench.local import LocalModel
    from specserve.bench.server import find_server
    from specserve.compare.prompts import configured_tokenizer
    from specserve.engine.chat_template import read_chat_template

    template = str(args.chat_template or "")
    if args.config:
        model = LocalModel(args.config, stack)
        model.tokenizer = configured_tokenizer(model.config, template)
        return model
    if template:
        template = read_chat_template(template, "--chat-template")
    server = find_server(args.url)
    server.chat_template = template
    if args.task in _BEAM_TASKS:
        server.fields = {
            "stream": False,
            "stream_options": None,
            "n": args.num_beams,
            "use_beam_search": True,
            "length_penalty": args.length_penalty,
            "vllm_xargs": {"beam_sample": 1} if args.task in _SAMPLING_TASKS else {},
        }
    return server


def _texts(
    args: argparse.Namespace, model: Model, console: Console, passes: list[dict[str, Any]]
) -> None:
    """Adds each pass to ``passes``, also one that fails, with its finished answers."""
    from specserve.engine.generation import Job, by_source
    from specserve.generate.display import Answers, summary, write
    from specserve.generate.questions import encode, read_questions

    given = {"texts": args.input_texts, "token_ids": args.input_ids, "file": args.input_file}
    questions = read_questions(model, **given)
    as_chat = bool(args.chat_template or args.system)
    prompts = [encode(model, each, as_chat=as_chat, system=args.system) for each in questions]
    sampling = _sampling(args, model)
    jobs = [Job(each, sampling(each, f"prompt {number}")) for number, each in enumerate(prompts, 1)]
    model.start()
    for number in range(1 if any(given.values()) else 2):
        shown = Answers(console, [_shown(each) for each in questions], streams=args.stream)
        seconds = None
        try:
            seconds = model.run(jobs, args.max_batch_size, show=shown.show).seconds
        finally:
            if seconds is None:
                write(console, "\n")  # ends the line of an unfinished answer
            done = dict(sorted(shown.done.items()))
            answers = [
                {"question": questions[i], "prompt_token_ids": prompts[i], **asdict(completion)}
                for i, completion in done.items()
            ]
            completions = [*done.values()]
            if answers:
                sources = by_source(completions)
                passes.append({"seconds": seconds, "sources": sources, "answers": answers})
        counts = summary(completions, seconds)
        write(console, f"pass {number + 1}, answers: {len(jobs)}, {counts}\n\n")


def _chat(args: argparse.Namespace, model: Model, console: Console) -> list[dict[str, Any]]:
    from specserve.generate.chat import chat

    sampling = _sampling(args, model)
    model.start()
    history, system = args.history_turns, args.system
    return chat(model, console, sampling, history_turns=history, system=system)


def _sampling(args: argparse.Namespace, model: Model) -> Callable[[TokenIds, str], Sampling]:
    """A function that returns the sampling for a prompt's tokens and its name in errors."""
    from specserve.engine.generation import Sampling
    from specserve.generate.questions import end_token, num_new_tokens

    stop = tuple(end_token(model, each) for each in args.add_eos_token)
    is_drawn = args.task in _SAMPLING_TASKS
    lengths = args.max_new_tokens, args.max_length, DEFAULT_NEW_TOKENS
    return lambda prompt, name: Sampling(
        max_tokens=num_new_tokens(len(prompt), model.max_model_len, *lengths, name),
        stop_token_ids=stop,
        temperature=args.temperature if is_drawn else 0.0,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )


def _shown(question: Any) -> str:
    """The text that the terminal shows for a question."""
    if isinstance(question, tuple):
        return ",".join(map(str, question))
    return question if isinstance(question, str) else str(question[-1]["content"])

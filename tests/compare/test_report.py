import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from specserve.compare.comparison import Comparison, Settings
from specserve.compare.lossless import Difference, Verdict
from specserve.compare.prompts import Prompt
from specserve.compare.report import document, explanation, table, write_json
from specserve.core.config import parse
from specserve.core.errors import ConfigError
from specserve.core.metrics import AcceptanceSnapshot
from specserve.engine.generation import Completion, RunResult
from specserve.engine.methods import Method

CONFIG = parse({"model": {"path": "m"}, "speculation": [{"kind": "ngram"}]})
SETTINGS = Settings(max_tokens=3, repeat=2, tolerance=0.1)
PROMPTS = [Prompt("a b", (1, 2)), Prompt("c", (3,))]
NGRAM = Method("ngram", sources=("ngram",))


def one_pass(seconds: float, drafts: tuple[AcceptanceSnapshot, ...] = ()) -> RunResult:
    completion = Completion(
        text="x", token_ids=(7, 8, 9), finish_reason="length", seconds=1.0, token_seconds=(0.5,)
    )
    return RunResult(completions=(completion, completion), seconds=seconds, drafts=drafts)


def verdict(*failures: Difference) -> Verdict:
    tie = Difference(prompt=3, position=1, expected=8, got=5, gap=0.02)
    return Verdict(
        num_identical=3 - len(failures), near_ties=(tie,), failures=failures, tolerance=0.1
    )


@pytest.fixture
def comparison() -> Comparison:
    # Two drafts: 2 of 3 tokens are accepted, and 0 of 1.
    drafts = (AcceptanceSnapshot("ngram", (0, 1, 0, 1), (1, 0, 1)),)
    return Comparison(
        prompts=PROMPTS,
        settings=SETTINGS,
        passes={
            Method("none"): [one_pass(6.0), one_pass(6.0)],
            NGRAM: [one_pass(3.0, drafts), one_pass(3.0, drafts)],
        },
        verdicts={NGRAM: verdict()},
    )


def test_the_table_shows_relative_speed_and_acceptance(comparison: Comparison) -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(comparison, "title"))
    (row,) = [line for line in capture.get().splitlines() if "ngram" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["ngram", "2.0", "2.00", "500 ms", "8", "50%", "1.00", "4/4"]


def test_a_narrow_table_wraps_methods_and_cuts_no_number(comparison: Comparison) -> None:
    method = Method("vllm-draft:/models/a-long-name", sources=())
    passes = {**comparison.passes, method: comparison.passes[NGRAM]}
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(replace(comparison, passes=passes), "title"))
    text = capture.get()
    assert "…" not in text
    assert text.count("500 ms") == 3


def test_the_document_has_each_method_and_the_environment(comparison: Comparison) -> None:
    content = document(comparison, CONFIG, "own")
    assert content["lossless"] is True
    assert content["ngram"]["tokens_per_second"] == 2.0
    (first, _) = content["ngram"]["passes"]
    assert first["sources"]["ngram"] == {
        "drafts": 2,
        "drafted_tokens": 4,
        "accepted_tokens": 2,
        "drafted_at_position": (2, 1, 1),
        "accepted_at_position": (1, 1),
    }
    assert first["prompts"][0]["token_ids"] == (7, 8, 9)
    (tie,) = content["ngram"]["lossless"]["near_ties"]
    assert (tie["pass"], tie["prompt"], tie["gap"]) == (1, 1, 0.02)
    assert content["none"]["lossless"] is None
    assert content["config"]["model"]["path"] == "m"
    assert content["versions"]["python"].startswith("3.11")
    assert content["machine"]["num_cpus"] >= 1
    json.dumps(content, allow_nan=False)


def test_a_changed_text_is_reported(comparison: Comparison) -> None:
    ended = Difference(prompt=0, position=2, expected=9, got=None, gap=float("inf"))
    comparison.verdicts[NGRAM] = verdict(ended)
    assert not comparison.is_lossless
    line, hint = explanation(comparison)
    assert "2 of 4 texts identical" in line
    assert "1 CHANGED" in line
    assert "engine.dtype: float32" in hint
    content = document(comparison, CONFIG, "own")
    assert content["lossless"] is False
    assert content["ngram"]["lossless"]["failures"][0]["gap"] is None


def test_a_link_and_a_pipe_are_written_in_place(tmp_path: Path) -> None:
    link, target, pipe = (tmp_path / name for name in ("link", "target", "pipe"))
    link.symlink_to(target)
    write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"a": 1}
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        text = pool.submit(pipe.read_text)
        write_json(pipe, {"b": 2})
        assert json.loads(text.result()) == {"b": 2}
    assert pipe.is_fifo()


def test_a_value_that_is_not_json_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="nan"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError):
        write_json(tmp_path / "missing" / "out.json", {})

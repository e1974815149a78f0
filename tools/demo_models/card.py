"""Writes model cards and training.json, with numbers measured or read from the run."""

from __future__ import annotations

import json
import os
import platform
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specserve.compare.corpus import HELD_OUT_ONE_IN
from tools.demo_models.completions import Sample
from tools.demo_models.config import TrainConfig
from tools.demo_models.evaluate import BaseScores, DraftScores
from tools.demo_models.objectives import DIVERGENCE_WEIGHT, MTP_WEIGHT, REPETITION_DECAY
from tools.demo_models.training import ROW_STAGES, Run

_FRONT = """\
---
license: apache-2.0
language: [code]
library_name: transformers
tags: [{tags}]
---
"""

_BASE = """\
# specserve demo base

A DeepSeek-V3-architecture model (latent attention, experts, one multi-token-prediction layer, YaRN
positions) of {parameters:.2f} M parameters, trained by `python -m tools.demo_models` on the Python
standard library{also}: a model to look at speculative decoding with, on a CPU.
It knows Python's shapes and copies from its prompt; it is no assistant.

Half of the tokens are plain code, half are chat tasks made from the code: complete a function,
repeat it with a name changed, print, list or describe functions of a file. One module in
{held_out_one_in}, by hash of its path, is held out; all measurements are on those.

| measured on held-out modules | |
| --- | --- |
| loss on plain code, nats a token | {loss:.3f} |
| loss of the MTP layer (token after next) | {mtp_loss:.3f} |
| MTP's first guess is the base's greedy choice: plain code | {mtp_acceptance:.1%} |
| the same, answers of chat tasks | {chat_mtp_acceptance:.1%} |
| answer tokens right given the tokens before: print a function of a file | {quote:.1%} |
| repeat with a name changed | {rename:.1%} |
| repeat exactly | {repeat:.1%} |
| completions of plain code that end in a loop | {loops:.1%} |
"""

_START_LOOPS = """\
| the same, of the weights that training started from | {loops:.1%} |
"""

_LOOPS = """
A completion is greedy, 128 tokens long and follows 128 tokens of a held-out module; it ends in a
loop where its last 64 tokens repeat with a period of at most 16. DITTO's loss
(https://arxiv.org/abs/2206.02369) teaches against loops: a repeated token shall be
{repetition_decay} times as likely as one repetition earlier.
"""

_DRAFT = """\
# specserve demo draft model

A Llama-architecture model of {parameters:.2f} M parameters, distilled from the demo base by
`python -m tools.demo_models`; same tokenizer and chat template. It drafts for the base, and in
float32 it is the model on which speculative decoding is tested to be exact.

| measured on held-out modules | |
| --- | --- |
| loss on plain code, nats a token | {loss:.3f} |
| its greedy choice is the base's: plain code | {acceptance:.1%} |
| the same, answers of chat tasks | {chat_acceptance:.1%} |
"""

_TRAINED = """
## Training

{steps} steps, {million_tokens} M tokens, {minutes} minutes on {device} ({machine}, torch {torch};
standard library: {corpus}), seed {seed}. Muon and AdamW, warm-up, stable, decay; rows of
{rows} tokens. `training.json` has the same as JSON.

{first}
"""

_PLANTED = """\
The first weights hold an induction circuit (`tools/demo_models/induction.py`): copying from the
prompt is where training starts."""

_STARTED = "The first weights had been trained on {million_tokens:.2f} M tokens."

_PACKAGES = "It also read the code of installed packages with permissive licences: {names}."

_ALONE = """
Then the MTP layer was trained alone: {steps} steps, {million_tokens} M tokens, {minutes} minutes.
"""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The trained weights that a run started from."""

    million_tokens: float
    """Tokens that they were trained on, in millions."""
    loops: float | None = None
    """As in BaseScores; None for the draft model."""


def write_base_card(
    folder: Path,
    model: nn.Module,
    scores: BaseScores,
    shown: list[Sample],
    runs: tuple[Run, Run],
    config: TrainConfig,
    packages: list[str],
    start: Start | None,
) -> None:
    """Writes README.md and training.json of the base; `runs`: base with MTP, MTP layer alone."""
    joint, alone = runs
    own = {
        **_sources(packages, start),
        "mtp_weight": MTP_WEIGHT,
        "repetition_decay": REPETITION_DECAY,
        "divergence_weight": DIVERGENCE_WEIGHT,
        "mtp_alone": _spent(alone),
    }
    record = _record(model, joint, config, own, asdict(scores))
    measured = record["held_out"]
    text = _FRONT.format(tags="deepseek_v3, speculative-decoding, mtp") + _BASE.format(
        **record,
        **measured,
        **measured["copy_accuracy"],
        also=" and installed packages" if packages else "",
    )
    if start:
        text += _START_LOOPS.format(loops=start.loops)
    text += (
        _LOOPS.format(repetition_decay=REPETITION_DECAY)
        + _trained(record)
        + _ALONE.format(**_spent(alone))
        + "\n## Greedy completions of held-out prompts\n"
    )
    for sample in shown:
        text += _sample(sample)
    _write(folder, text, record)


def write_draft_card(
    folder: Path,
    model: nn.Module,
    scores: DraftScores,
    run: Run,
    config: TrainConfig,
    packages: list[str],
    start: Start | None,
) -> None:
    """Writes README.md and training.json of the draft model."""
    own = {**_sources(packages, start), "divergence_weight": DIVERGENCE_WEIGHT}
    record = _record(model, run, config, own, asdict(scores))
    text = _FRONT.format(tags="llama, speculative-decoding, draft-model")
    text += _DRAFT.format(**record, **record["held_out"]) + _trained(record)
    _write(folder, text, record)


def _record(
    model: nn.Module, run: Run, config: TrainConfig, own: dict[str, Any], scores: dict[str, Any]
) -> dict[str, Any]:
    return {
        "parameters": sum(p.numel() for p in model.parameters()) / 1e6,
        "held_out_one_in": HELD_OUT_ONE_IN,
        "held_out": {k: _rounded(v) for k, v in scores.items()},
        "training": {
            **_spent(run),
            "batch_tokens": config.batch_tokens,
            "row_stages": [list(stage) for stage in ROW_STAGES],
            "seed": config.seed,
            "device": run.device.type,
            "machine": _machine(run.device),
            "torch": torch.__version__,
            "corpus": config.corpus.name,
            **own,
        },
    }


def _sources(packages: list[str], start: Start | None) -> dict[str, Any]:
    return {"packages": packages, "start": _rounded(asdict(start)) if start else None}


def _spent(run: Run) -> dict[str, float]:
    return {
        "steps": run.counters.step,
        "million_tokens": round(run.counters.tokens / 1e6, 2),
        "minutes": round(run.counters.elapsed_s / 60, 1),
    }


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}"


def _trained(record: dict[str, Any]) -> str:
    training = record["training"]
    rows = ", ".join(str(tokens) for _, tokens in training["row_stages"])
    start = training["start"]
    first = _STARTED.format(**start) if start else _PLANTED
    text = _TRAINED.format(**{**training, "rows": rows, "first": first})
    if training["packages"]:
        named = _PACKAGES.format(names=", ".join(training["packages"]))
        text += "\n" + textwrap.fill(named, 100, break_on_hyphens=False) + "\n"
    return text


def _sample(sample: Sample) -> str:
    return (
        f"\n### {sample.kind}\n\nPrompt (its end):\n\n{_quoted(sample.prompt)}\n\n"
        f"The base writes:\n\n{_quoted(sample.completion)}\n\n"
        f"The file says:\n\n{_quoted(sample.wanted)}\n"
    )


def _quoted(text: str) -> str:
    return f"~~~~text\n{text.strip()}\n~~~~"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def _write(folder: Path, text: str, record: dict[str, Any]) -> None:
    (folder / "README.md").write_text(text)
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")

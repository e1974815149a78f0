"""Trains and measures both models: tokenizer, base, MTP layer, draft model."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer

from specserve.compare.corpus import load_modules
from tools.demo_models import base_model, draft_model
from tools.demo_models.base_model import BaseModel
from tools.demo_models.card import Start, write_base_card, write_draft_card
from tools.demo_models.completions import loop_share, samples
from tools.demo_models.config import TrainConfig
from tools.demo_models.draft_model import DraftModel
from tools.demo_models.evaluate import held_out_rows, score_base, score_draft
from tools.demo_models.export import (
    base_tensors,
    draft_tensors,
    export_base,
    export_draft,
    load_into,
)
from tools.demo_models.induction import plant_in_base, plant_in_draft, plant_in_mtp
from tools.demo_models.objectives import BaseObjective, DraftObjective, MTPObjective
from tools.demo_models.packages import permissive_packages
from tools.demo_models.progress import Progress
from tools.demo_models.shapes import MAX_TOKENS, VOCAB_SIZE, BaseShape, DraftShape
from tools.demo_models.stream import Corpus, Rows, StreamPool, TokenStream
from tools.demo_models.tokenizer import train_tokenizer
from tools.demo_models.training import Budget, Objective, Run
from tools.demo_models.workers import Workers

MAX_STREAMS = 8
"""Most processes that make rows for a GPU. Eight make rows faster than a GPU trains on them."""


class Pipeline:
    """The whole training; each part resumes from its checkpoint in the work folder."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.workers = Workers(self.device)
        packages = permissive_packages(config.packages) if config.packages else {}
        before = self._trained_before("demo-base").get("packages", ())
        self.packages = sorted({*packages, *before}, key=str.lower)
        self.training = load_modules(config.corpus, held_out=False)
        self.training += [module for modules in packages.values() for module in modules]
        self.held_out = load_modules(config.corpus, held_out=True)
        self.tokenizer = self._tokenizer()

    @cached_property
    def corpus(self) -> Corpus:
        """The training data of all streams."""
        return Corpus(self.training, self.tokenizer)

    def run(self) -> bool:
        """Trains, measures and writes both models. Returns False if stopped before the end."""
        base = self.new_base()
        base_run = self.new_run(BaseObjective(base), "base", self.config.minutes)
        if not self._train(base_run, "base"):
            return False
        mtp_run = self.new_run(MTPObjective(base), "mtp", self.config.mtp_minutes)
        if not self._train(mtp_run, "mtp"):
            return False
        draft = self.new_draft()
        draft_run = self.new_run(DraftObjective(draft, base), "draft", self.config.draft_minutes)
        if not self._train(draft_run, "draft"):
            return False
        self.write_base(base, base_run, mtp_run)
        self.write_draft(draft, base, draft_run)
        return True

    def new_base(self) -> BaseModel:
        """The base with seeded initial weights, or with the weights of `config.start`."""
        model = BaseModel(BaseShape(), max_tokens=MAX_TOKENS)
        if self.config.start:
            load_into(base_tensors(model), self.config.start / "demo-base")
            return model.to(self.device)
        generator = torch.Generator().manual_seed(self.config.seed)
        base_model.initialise(model, generator)
        plant_in_base(model, generator)
        model.eval()  # in training mode the routers would count the load of these rows
        stream = TokenStream(self.corpus, seed=f"{self.config.seed} plant")
        plant_in_mtp(model, stream.rows(32, 256), generator)
        return model.to(self.device)

    def new_draft(self) -> DraftModel:
        """The draft model with seeded initial weights, or with the weights of `config.start`."""
        model = DraftModel(DraftShape(), max_tokens=MAX_TOKENS)
        if self.config.start:
            load_into(draft_tensors(model), self.config.start / "demo-draft")
            return model.to(self.device)
        generator = torch.Generator().manual_seed(self.config.seed + 1)
        draft_model.initialise(model, generator)
        plant_in_draft(model, generator)
        return model.to(self.device)

    def new_run(self, objective: Objective, name: str, minutes: float) -> Run:
        """A run over the training modules that saves to `<name>.pt` in the work folder."""
        config = self.config
        return Run(
            objective,
            self._stream(f"{config.seed} {name}"),
            Budget(
                minutes=minutes,
                max_tokens=config.max_tokens,
                batch_tokens=config.batch_tokens,
                checkpoint_s=config.checkpoint_s,
            ),
            config.work / f"{name}.pt",
            device=self.device,
            workers=self.workers,
        )

    def write_base(self, model: BaseModel, run: Run, mtp_run: Run) -> None:
        """Measures the base and writes its folder."""
        folder = self.config.output / "demo-base"
        export_base(model, self.tokenizer, folder)
        tokens = self.config.evaluation_tokens
        scores = score_base(model, self.held_out, self.tokenizer, tokens)
        shown = samples(model, self.held_out, self.tokenizer)
        start = self._start("demo-base")
        if start:
            rows = held_out_rows(self.held_out, self.tokenizer, tokens)
            start = replace(start, loops=loop_share(self.new_base(), rows))
        runs = (run, mtp_run)
        write_base_card(folder, model, scores, shown, runs, self.config, self.packages, start)

    def write_draft(self, model: DraftModel, base: BaseModel, run: Run) -> None:
        """Measures the draft model against the base and writes its folder."""
        folder = self.config.output / "demo-draft"
        export_draft(model, self.tokenizer, folder)
        tokens = self.config.evaluation_tokens
        scores = score_draft(model, base, self.held_out, self.tokenizer, tokens)
        start = self._start("demo-draft")
        write_draft_card(folder, model, scores, run, self.config, self.packages, start)

    def _trained_before(self, name: str) -> dict[str, Any]:
        """The "training" object of training.json in `config.start`; empty without `start`."""
        if not self.config.start:
            return {}
        text = (self.config.start / name / "training.json").read_text()
        training: dict[str, Any] = json.loads(text)["training"]
        return training

    def _start(self, name: str) -> Start | None:
        training = self._trained_before(name)
        if not training:
            return None
        before = training.get("start") or {"million_tokens": 0.0}
        return Start(million_tokens=training["million_tokens"] + before["million_tokens"])

    def _train(self, run: Run, name: str) -> bool:
        if run.resume():
            print(f"{name}: continuing at {run.done:.1%}", flush=True)
        with Progress(name) as progress:
            return run.train(progress)

    def _stream(self, seed: str) -> Rows:
        if self.device.type == "cpu":
            return TokenStream(self.corpus, seed=seed)
        count = min(MAX_STREAMS, len(os.sched_getaffinity(0)))
        return StreamPool([TokenStream(self.corpus, seed=f"{seed} {i}") for i in range(count)])

    def _tokenizer(self) -> Tokenizer:
        if self.config.start:
            return Tokenizer.from_file(str(self.config.start / "demo-base" / "tokenizer.json"))
        path = self.config.work / "tokenizer.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            tokenizer = train_tokenizer([m.text for m in self.training], VOCAB_SIZE)
            tokenizer.save(str(path))
        return Tokenizer.from_file(str(path))

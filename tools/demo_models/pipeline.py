"""From the corpus to two measured model folders: tokenizer, base, draft model."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from specserve.compare.corpus import load_modules
from tools.demo_models import base_model, draft_model
from tools.demo_models.base_model import BaseModel
from tools.demo_models.card import write_base_card, write_draft_card
from tools.demo_models.config import TrainConfig
from tools.demo_models.draft_model import DraftModel
from tools.demo_models.evaluate import samples, score_base, score_draft
from tools.demo_models.export import export_base, export_draft
from tools.demo_models.induction import plant_in_base, plant_in_draft, plant_in_mtp
from tools.demo_models.objectives import BaseObjective, DraftObjective, MTPObjective
from tools.demo_models.progress import Progress
from tools.demo_models.shapes import MAX_TOKENS, VOCAB_SIZE, BaseShape, DraftShape
from tools.demo_models.stream import TokenStream
from tools.demo_models.tokenizer import train_tokenizer
from tools.demo_models.training import Budget, Objective, Run
from tools.demo_models.workers import Workers


class Pipeline:
    """All of the command; each part continues from what the work folder holds."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.workers = Workers(self.device)
        self.training = load_modules(config.corpus, held_out=False)
        self.held_out = load_modules(config.corpus, held_out=True)
        self.tokenizer = self._tokenizer()

    def run(self) -> bool:
        """Train, measure and write both models. False: stopped before the end."""
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
        """The base with its seeded first weights."""
        model = BaseModel(BaseShape(), max_tokens=MAX_TOKENS)
        generator = torch.Generator().manual_seed(self.config.seed)
        base_model.initialise(model, generator)
        plant_in_base(model, generator)
        rows = TokenStream(self.training, self.tokenizer, seed=f"{self.config.seed} plant").rows(
            32, 256
        )
        plant_in_mtp(model, rows, generator)
        return model.to(self.device)

    def new_draft(self) -> DraftModel:
        """The draft model with its seeded first weights."""
        model = DraftModel(DraftShape(), max_tokens=MAX_TOKENS)
        generator = torch.Generator().manual_seed(self.config.seed + 1)
        draft_model.initialise(model, generator)
        plant_in_draft(model, generator)
        return model.to(self.device)

    def new_run(self, objective: Objective, name: str, minutes: float) -> Run:
        """A run over the training modules that saves to `<name>.pt` in the work folder."""
        config = self.config
        return Run(
            objective,
            TokenStream(self.training, self.tokenizer, seed=f"{config.seed} {name}"),
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
        """Measure the base and write its folder."""
        folder = self.config.output / "demo-base"
        export_base(model, self.tokenizer, folder)
        scores = score_base(model, self.held_out, self.tokenizer, self.config.evaluation_tokens)
        shown = samples(model, self.held_out, self.tokenizer)
        write_base_card(folder, model, scores, shown, (run, mtp_run), self.config)

    def write_draft(self, model: DraftModel, base: BaseModel, run: Run) -> None:
        """Measure the draft model against the base and write its folder."""
        folder = self.config.output / "demo-draft"
        export_draft(model, self.tokenizer, folder)
        tokens = self.config.evaluation_tokens
        scores = score_draft(model, base, self.held_out, self.tokenizer, tokens)
        write_draft_card(folder, model, scores, run, self.config)

    def _train(self, run: Run, name: str) -> bool:
        if run.resume():
            print(f"{name}: continuing at {run.done:.1%}", flush=True)
        with Progress(name) as progress:
            return run.train(progress)

    def _tokenizer(self) -> Tokenizer:
        path = self.config.work / "tokenizer.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            tokenizer = train_tokenizer([m.text for m in self.training], VOCAB_SIZE)
            tokenizer.save(str(path))
        return Tokenizer.from_file(str(path))

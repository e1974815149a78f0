"""The training loop of both models: schedule, checkpoints, progress."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tools.demo_models.optimiser import Optimiser, lr_factor
from tools.demo_models.progress import Progress
from tools.demo_models.stream import Rows
from tools.demo_models.workers import Workers

ROW_STAGES = ((0.0, 512), (0.6, 1024), (0.9, 2048))
"""Pairs (progress, tokens per row from then on): short rows train faster, long ones teach more."""

CLIP_NORM = 1.0


class Objective(Protocol):
    """The training objective of a run."""

    model: Any

    def loss(self, rows: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The loss of int64 rows [rows, tokens], and numbers to show."""

    def after_step(self, lr_factor: float) -> None:
        """Called after every update."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When a run ends: after `minutes` of training or `max_tokens`, whichever comes first."""

    minutes: float
    max_tokens: int
    batch_tokens: int
    checkpoint_s: float

    def progress(self, elapsed_s: float, tokens: int) -> float:
        """The finished share of the run, 0..1; it sets the learning rate and the row length."""
        return min(1.0, max(elapsed_s / (self.minutes * 60), tokens / self.max_tokens))


@dataclass
class Counters:
    """Steps, tokens and training time of a run so far, over all resumed parts."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


class Run:
    """The training of one model, which resumes exactly from its checkpoint file."""

    def __init__(
        self,
        objective: Objective,
        stream: Rows,
        budget: Budget,
        checkpoint: Path,
        *,
        device: torch.device,
        workers: Workers,
    ) -> None:
        self.objective = objective
        self.stream = stream
        self.budget = budget
        self.checkpoint = checkpoint
        self.device = device
        self.optimiser = Optimiser(objective.model, workers)
        self._workers = workers
        self._parameters = list(self.model.parameters())
        self.counters = Counters()
        self._stopped = False

    @property
    def model(self) -> nn.Module:
        """The model under training."""
        model: nn.Module = self.objective.model
        return model

    @property
    def done(self) -> float:
        """The finished share of the run, 0..1."""
        return self.budget.progress(self.counters.elapsed_s, self.counters.tokens)

    def resume(self) -> bool:
        """Loads the checkpoint file; returns False if there is none."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.stream.load_state_dict(state["stream"])
        self.counters = Counters(**state["counters"])
        torch.set_rng_state(state["torch_rng"].cpu())
        return True

    def save(self) -> None:
        """Writes the checkpoint atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "stream": self.stream.state_dict(),
            "counters": asdict(self.counters),
            "torch_rng": torch.get_rng_state(),
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def train(self, progress: Progress) -> bool:
        """Trains to the budget's end and saves. Returns False if SIGTERM or SIGINT stopped it."""
        self.model.train()
        saved = time.monotonic()
        with self._stop_on_signals():
            while self.done < 1 and not self._stopped:
                started = time.monotonic()
                numbers = self._step()
                now = time.monotonic()
                self.counters.elapsed_s += now - started
                progress.update(self.done, self.counters.step, self.counters.tokens, numbers)
                if now - saved >= self.budget.checkpoint_s:
                    self.save()
                    saved = time.monotonic()
        self.save()
        return not self._stopped

    def _step(self) -> dict[str, float]:
        done = self.done
        row_tokens = max(tokens for start, tokens in ROW_STAGES if done >= start)
        row_tokens = min(row_tokens, self.budget.batch_tokens)
        num_rows = self.budget.batch_tokens // row_tokens
        rows = self.stream.rows(num_rows, row_tokens + 1).to(self.device)
        factor = lr_factor(done)
        numbers = self._backward(rows)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimiser.step(factor)
        self.objective.after_step(factor)
        self.counters.step += 1
        self.counters.tokens += num_rows * row_tokens
        return numbers

    def _backward(self, rows: Tensor) -> dict[str, float]:
        """Sets each gradient to the mean over the batch's parts; returns the numbers' means."""
        parts = rows.chunk(self._workers.count)
        results = self._workers.map(self._gradients, parts)
        for i, parameter in enumerate(self._parameters):
            # Summed always in the same order, so that a resumed run is bitwise equal.
            first, *rest = (gradients[i] for gradients, _ in results)
            parameter.grad = sum(rest, first) / len(parts)
        numbers = [n for _, n in results]
        return {name: sum(n[name] for n in numbers) / len(parts) for name in numbers[0]}

    def _gradients(self, rows: Tensor) -> tuple[tuple[Tensor, ...], dict[str, float]]:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss, numbers = self.objective.loss(rows)
        return torch.autograd.grad(loss, self._parameters), numbers

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:
            self._stopped = True

        before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

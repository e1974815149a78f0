"""Training objectives: each computes the loss of a batch of rows, and numbers to show."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.demo_models.base_model import BaseModel
from tools.demo_models.draft_model import DraftModel

MTP_WEIGHT = 0.3
"""Weight of the MTP loss, as in most of DeepSeek-V3's training."""

DIVERGENCE_WEIGHT = 0.8
"""Weight of the divergence from the base in a distillation loss; the text's loss has the rest."""

BALANCE_STEP = 0.002
"""Change of the routers' bias per step at the full learning rate."""

REPEATED_ROWS = 8
"""One row in this many also trains the repetition loss, and at least one row of each worker's part
of a batch."""

REPEATED_TOKENS = 512
"""Longest row of the repetition loss, in tokens; longer rows are cut."""

REPEATED_PERIOD = 48
"""Longest repeated span, in tokens."""

REPETITION_DECAY = 0.5
"""Target probability of a repeated token, relative to its probability one repetition earlier."""


class BaseObjective:
    """Next-token loss plus the weighted loss of the MTP layer (arXiv 2412.19437, section 2.2).

    A third term, DITTO's repetition loss (arXiv 2206.02369), reduces loops in greedy text.
    """

    def __init__(self, model: BaseModel) -> None:
        self.model = model

    def loss(self, rows: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The loss of int64 `rows` [rows, tokens], and its terms.

        The MTP layer trains on half of the rows: it costs a third of a step and learns quickly.
        """
        model = self.model
        hidden = model.hidden(rows[:, :-1])
        logits = model.lm_head(hidden)
        main = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        some = rows[: (len(rows) + 1) // 2]
        guessed = model.lm_head(model.mtp_hidden(hidden[: len(some), :-1], some[:, 1:-1]))
        mtp = F.cross_entropy(guessed.flatten(0, 1).float(), some[:, 2:].flatten())
        repetition = self._repetition(rows[::REPEATED_ROWS, :REPEATED_TOKENS])
        return main + MTP_WEIGHT * mtp + repetition, {
            "loss": float(main.detach()),
            "mtp": float(mtp.detach()),
            "repetition": float(repetition.detach()),
        }

    def _repetition(self, rows: Tensor) -> Tensor:
        """DITTO's loss from a span's third occurrence on; a second one is common in code."""
        tokens, occurrence, before = repeat_spans(rows)
        logits = self.model.lm_head(self.model.hidden(tokens[:, :-1])).float()
        likely = logits.softmax(dim=-1).gather(2, tokens[:, 1:, None]).squeeze(2)
        wanted = REPETITION_DECAY * likely.detach().gather(1, (before[:, 1:] - 1).clamp_min(0))
        losses = -torch.log((1 - (likely - wanted).abs()).clamp_min(1e-5))
        return losses[occurrence[:, 1:] >= 2].mean()

    def after_step(self, lr_factor: float) -> None:
        """Balances the experts' load."""
        for router in self.model.routers():
            router.balance(BALANCE_STEP * lr_factor)


def repeat_spans(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeats in each row one span, of random place and length, up to the row's end.

    Returns three int64 tensors [rows, tokens]: the tokens, the number of earlier occurrences of
    each token's span, and each token's position one occurrence earlier. Equal rows give equal
    spans.
    """
    num_rows, num_tokens = rows.shape
    generator = torch.Generator().manual_seed(int(rows.sum()))
    start = torch.randint(1, num_tokens // 4, (num_rows, 1), generator=generator)
    longest = min(REPEATED_PERIOD, num_tokens // 8)
    period = (longest ** torch.rand((num_rows, 1), generator=generator)).round().long()
    at = torch.arange(num_tokens)
    offset = (at - start).clamp_min(0)
    source = torch.where(at < start, at, start + offset % period).to(rows.device)
    before = (at - period).clamp_min(0).to(rows.device)
    return rows.gather(1, source), (offset // period).to(rows.device), before


class MTPObjective:
    """Trains the MTP layer alone to predict the distribution of the frozen base."""

    def __init__(self, base: BaseModel) -> None:
        self.base = base.eval()
        self.model = base.mtp

    def loss(self, rows: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The loss of int64 `rows` [rows, tokens], and its terms."""
        base = self.base
        with torch.no_grad():
            hidden = base.hidden(rows[:, :-1])
            target = base.lm_head(hidden[:, 1:])
        guessed = base.lm_head(base.mtp_hidden(hidden[:, :-1], rows[:, 1:-1]))
        return _distillation(guessed, target, rows[:, 2:])

    def after_step(self, lr_factor: float) -> None:
        """Balances the MTP layer's experts; the frozen base's routers are not in training mode."""
        for router in self.base.routers():
            if router.training:
                router.balance(BALANCE_STEP * lr_factor)


class DraftObjective:
    """Trains the draft model to predict the base's next-token distribution."""

    def __init__(self, model: DraftModel, teacher: BaseModel) -> None:
        self.model = model
        self.teacher = teacher.eval()

    def loss(self, rows: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The loss of int64 `rows` [rows, tokens], and its terms."""
        with torch.no_grad():
            target = self.teacher.lm_head(self.teacher.hidden(rows[:, :-1]))
        return _distillation(self.model(rows[:, :-1]), target, rows[:, 1:])

    def after_step(self, lr_factor: float) -> None:
        """Nothing to do."""


def _distillation(
    logits: Tensor, target: Tensor, tokens: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The weighted sum of the divergence from the base and of the loss on the text."""
    logits, target = logits.flatten(0, 1).float(), target.flatten(0, 1).float()
    plain = F.cross_entropy(logits, tokens.flatten())
    divergence = F.kl_div(
        logits.log_softmax(dim=-1),
        target.log_softmax(dim=-1),
        log_target=True,
        reduction="batchmean",
    )
    agree = (logits.detach().argmax(dim=-1) == target.argmax(dim=-1)).float().mean()
    return DIVERGENCE_WEIGHT * divergence + (1 - DIVERGENCE_WEIGHT) * plain, {
        "loss": float(plain.detach()),
        "kl": float(divergence.detach()),
        "agree": float(agree),
    }

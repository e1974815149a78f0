"""Options of `python -m tools.demo_models`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specserve.compare.corpus import standard_library
from specserve.core.errors import ConfigError
from tools.demo_models.evaluate import ROW_TOKENS

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a training.

    A dataclass, because training depends on torch, tokenizers, safetensors and rich alone.
    """

    output: Path = Path("configs/models")
    """Output folder, for demo-base/ and demo-draft/."""
    work: Path = Path("demo-training")
    """Folder for the tokenizer and the checkpoints. A training found there is resumed."""
    corpus: Path = field(default_factory=standard_library)
    """Folder of Python files."""
    start: Path | None = None
    """Folder with demo-base/ and demo-draft/ as initial weights; None: train from new weights."""
    packages: Path | None = None
    """A site-packages folder. Its smaller packages with permissive licences are training data."""
    device: str = "auto"
    seed: int = 0
    minutes: float = 60.0
    """Training time of the base in all resumed parts, without the time between them."""
    mtp_minutes: float = 10.0
    """Training time of the MTP layer alone, after the joint training."""
    draft_minutes: float = 15.0
    max_tokens: int = 10**12
    """Most tokens of each run, which ends at this limit or at its minutes, whichever is first."""
    batch_tokens: int = 4096
    checkpoint_s: float = 180.0
    evaluation_tokens: int = 60_000

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError("device", self.device, ", ".join(DEVICES))
        if self.start and not (self.start / "demo-base" / "model.safetensors").exists():
            raise ConfigError("from", str(self.start), "a folder with demo-base/ and demo-draft/")
        if self.start and self.start.resolve() == self.output.resolve():
            # The initial weights are read again: for the model card, and by a resumed run.
            raise ConfigError("from", str(self.start), "another folder than the output's")
        if self.batch_tokens < 128:
            raise ConfigError("batch-tokens", self.batch_tokens, "128 or more")
        for name in ("minutes", "mtp_minutes", "draft_minutes", "max_tokens", "checkpoint_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(name.replace("_", "-"), getattr(self, name), "more than 0")
        if self.evaluation_tokens < ROW_TOKENS:
            raise ConfigError("evaluation-tokens", self.evaluation_tokens, f"{ROW_TOKENS} or more")

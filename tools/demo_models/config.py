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
    """What to train, from what, for how long, and where it goes.

    A dataclass, so that training needs no more than torch, tokenizers, safetensors and rich.
    """

    output: Path = Path("configs/models")
    """Folder that gets demo-base/ and demo-draft/."""
    work: Path = Path("demo-training")
    """Folder for the tokenizer and the checkpoints; a run found there is continued."""
    corpus: Path = field(default_factory=standard_library)
    """Folder of Python files."""
    start: Path | None = None
    """Folder with demo-base/ and demo-draft/ to train on from; None: from planted first weights."""
    packages: Path | None = None
    """A site-packages folder: its smaller packages of permissive licences are trained on too."""
    device: str = "auto"
    seed: int = 0
    minutes: float = 60.0
    """Training time of the base, without pauses between resumed parts."""
    mtp_minutes: float = 10.0
    """Training time of the MTP layer alone, after the joint training."""
    draft_minutes: float = 15.0
    max_tokens: int = 10**12
    """Ends either model's training where it comes before the minutes; time alone counts pauses."""
    batch_tokens: int = 4096
    checkpoint_s: float = 180.0
    evaluation_tokens: int = 60_000

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError("device", self.device, ", ".join(DEVICES))
        if self.start and not (self.start / "demo-base" / "model.safetensors").exists():
            raise ConfigError("from", str(self.start), "a folder with demo-base/ and demo-draft/")
        if self.start and self.start.resolve() == self.output.resolve():
            # What was trained on from is measured, and read again by a run that continues.
            raise ConfigError("from", str(self.start), "another folder than the output's")
        if self.batch_tokens < 128:
            raise ConfigError("batch-tokens", self.batch_tokens, "128 or more")
        for name in ("minutes", "mtp_minutes", "draft_minutes", "max_tokens", "checkpoint_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(name.replace("_", "-"), getattr(self, name), "more than 0")
        if self.evaluation_tokens < ROW_TOKENS:
            raise ConfigError("evaluation-tokens", self.evaluation_tokens, f"{ROW_TOKENS} or more")

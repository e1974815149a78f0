"""What the configuration's sections have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from specserve.core.errors import ConfigError


class Section(BaseModel):
    """Base of all sections: closed, frozen, no silent conversions between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def check_resources(value: dict[str, float]) -> dict[str, float]:
    """Of Ray's resources besides CPU and GPU.

    Raises:
        ConfigError: one of those two, or an amount that is none.
    """
    for name, amount in value.items():
        if name in ("CPU", "GPU"):
            raise ConfigError(name, amount, "names other than CPU and GPU, which are set apart")
        if not 0 < amount < float("inf"):
            raise ConfigError(name, amount, "a number > 0")
    return value

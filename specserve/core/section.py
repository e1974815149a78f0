"""Base class and shared field types of the configuration's sections."""

from __future__ import annotations

from os.path import expanduser
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from specserve.core.errors import ConfigError


class Section(BaseModel):
    """Base of all sections: closed, frozen, no silent conversions between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _check_resources(value: dict[str, float]) -> dict[str, float]:
    for name, amount in value.items():
        if name in ("CPU", "GPU"):
            raise ConfigError(name, amount, "names other than CPU and GPU, which are set apart")
        if not 0 < amount < float("inf"):
            raise ConfigError(name, amount, "a number > 0")
    return value


Resources = Annotated[dict[str, float], AfterValidator(_check_resources)]
"""Ray's resources besides CPU and GPU, by name: amounts greater than 0."""

Checkpoint = Annotated[str, AfterValidator(expanduser)]
"""Folder of a Hugging Face checkpoint, or its id on the hub; ``~`` is the home folder."""

"""Reads and validates a whole Serve configuration file without starting anything."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig, GangSchedulingConfig, RequestRouterConfig
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from specserve.core.config import AppConfig, parse
from specserve.core.errors import ConfigError, SpecServeError
from specserve.core.validation import from_validation_error

IMPORT_PATH = "specserve.app:build"

_SECTIONS: dict[str, type[BaseModel]] = {
    "autoscaling_config": AutoscalingConfig,
    "request_router_config": RequestRouterConfig,
    "gang_scheduling_config": GangSchedulingConfig,
}
"""Sections in which Serve's schema ignores unknown keys, so :func:`_check_sections` checks them."""


@dataclass(frozen=True, slots=True)
class Application:
    """One application of the file; ``field`` is the dotted path of its ``args``, for errors."""

    name: str
    route_prefix: str
    field: str
    config: AppConfig


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A valid Serve configuration file; Serve's proxy will listen on ``host`` and ``port``."""

    path: Path
    host: str
    port: int
    applications: tuple[Application, ...]


def read(path: Path) -> ServeFile:
    """Reads a Serve YAML file whose applications are all specserve's.

    Serve ignores unknown keys. Here they are errors, so that a misspelt option is noticed.

    Raises:
        SpecServeError: a line with the file, the field, the value and what is allowed. If several
            values of a section are unknown, missing or wrong, each has its line.
    """
    try:
        return _read(path)
    except ConfigError as error:
        lines = [f"{path}: {each}" for each in (error, *error.further)]
        raise SpecServeError("\n".join(lines)) from None
    except SpecServeError as error:
        raise SpecServeError(f"{path}: {error}") from None


def _read(path: Path) -> ServeFile:
    content = _load(path)
    if not isinstance(content, dict):
        raise ConfigError("file", content, "a mapping with the key applications")
    try:
        # A copy, because Serve changes the sections.
        schema = ServeDeploySchema.model_validate(deepcopy(content), extra="forbid")
    except ValidationError as error:
        raise _serve_error(error) from None
    if not schema.applications:
        raise ConfigError("applications", [], "at least one application")
    _check_sections(content)
    return ServeFile(
        path=path,
        host=schema.http_options.host,
        port=schema.http_options.port,
        applications=tuple(_application(app, i) for i, app in enumerate(schema.applications)),
    )


def _load(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecServeError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecServeError("cannot be read: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecServeError(f"{where}not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise SpecServeError(f"not valid YAML: {' '.join(str(error).split())}") from None


def _serve_error(error: ValidationError) -> SpecServeError:
    problems = error.errors(include_url=False)
    if any(problem["type"] != "value_error" for problem in problems):
        return from_validation_error(error, ServeDeploySchema)
    # A rule of Serve's own, whose message is a sentence.
    field = ".".join(map(str, problems[0]["loc"]))
    return SpecServeError(f"{field}: {' '.join(str(problems[0]['ctx']['error']).split())}")


def _application(schema: ServeApplicationSchema, index: int) -> Application:
    field = f"applications.{index}"
    if schema.import_path != IMPORT_PATH:
        raise ConfigError(f"{field}.import_path", schema.import_path, IMPORT_PATH)
    return Application(
        name=schema.name,
        route_prefix=schema.route_prefix or "/",
        field=f"{field}.args",
        config=parse(schema.args, f"{field}.args"),
    )


def _check_sections(content: dict[str, Any]) -> None:
    """Refuses unknown keys of ``_SECTIONS``; ``content`` is otherwise valid."""
    unknown = []
    for index, application in enumerate(content["applications"]):
        for number, deployment in enumerate(application.get("deployments") or ()):
            for name, model in _SECTIONS.items():
                field = f"applications.{index}.deployments.{number}.{name}"
                for key in sorted((deployment.get(name) or {}).keys() - model.model_fields):
                    allowed = ", ".join(model.model_fields)
                    unknown.append(ConfigError(f"{field}.{key}", key, allowed))
    if unknown:
        raise ConfigError.first_of(unknown)

"""Reads and validates a whole Serve configuration file without starting anything."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve._private.utils import validate_route_prefix
from ray.serve.config import AutoscalingConfig, GangSchedulingConfig, RequestRouterConfig
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from specserve.core.config import AppConfig, parse
from specserve.core.errors import ConfigError, SpecServeError, reason_of
from specserve.core.validation import from_validation_error

IMPORT_PATH = "specserve.app:build"
DEPLOYMENT = "ModelServer"
_MERGE = "tag:yaml.org,2002:merge"

_SECTIONS: dict[str, type[BaseModel]] = {
    "autoscaling_config": AutoscalingConfig,
    "request_router_config": RequestRouterConfig,
    "gang_scheduling_config": GangSchedulingConfig,
}
"""Sections in which Serve's schema ignores unknown keys, so :func:`_check_sections` checks them."""


@dataclass(frozen=True, slots=True)
class Application:
    """One application of the file.

    Attributes:
        field: dotted path of its ``args``, for errors.
    """

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
    for field, deployment in _deployments(content):  # Serve's schema expects mappings
        if not isinstance(deployment, dict):
            raise ConfigError(field, deployment, f"a mapping with the name {DEPLOYMENT}")
    try:
        # A copy, because Serve changes the sections.
        schema = ServeDeploySchema.model_validate(deepcopy(content), extra="forbid")
    except ValidationError as error:
        raise _serve_error(error, ServeDeploySchema) from None
    except (ImportError, AttributeError, TypeError) as error:  # such as a router's class
        raise SpecServeError(f"applications: Serve refuses a section: {reason_of(error)}") from None
    if not schema.applications:
        raise ConfigError("applications", [], "at least one application")
    _check_sections(content)
    _check_options(schema, content)
    return ServeFile(
        path=path,
        host=schema.http_options.host,
        port=schema.http_options.port,
        applications=tuple(_application(app, i) for i, app in enumerate(schema.applications)),
    )


def _load(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise SpecServeError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecServeError("cannot be read: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecServeError(f"{where}not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # such as an impossible date
        raise SpecServeError(f"not valid YAML: {' '.join(str(error).split())}") from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that occurs twice in a mapping, of which YAML's loader keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (found := self.construct_object(key)) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value} occurs twice", problem_mark=key.start_mark
                )
            seen.add(found)
        return super().construct_mapping(node, deep)


def _deployments(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The deployments of all applications, with their fields."""
    applications = content.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else ()):
        found = application.get("deployments") if isinstance(application, dict) else None
        for number, deployment in enumerate(found if isinstance(found, list) else ()):
            yield f"applications.{index}.deployments.{number}", deployment


def _check_options(schema: ServeDeploySchema, content: dict[str, Any]) -> None:
    """Refuses values that Serve's schema accepts, and that would fail at the start or later.

    Raises:
        ConfigError: such a value.
    """
    http = schema.http_options
    if not 0 < http.port < 1 << 16:
        raise ConfigError("http_options.port", http.port, "1 .. 65535")
    if environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            if value := getattr(http, name):
                allowed = "nothing behind HAProxy, which speaks HTTP: end TLS before it"
                raise ConfigError(f"http_options.{name}", value, allowed)
    for index, application in enumerate(schema.applications):
        prefix = application.route_prefix
        try:
            validate_route_prefix(prefix or "")  # without one, Serve answers no HTTP
        except ValueError:
            allowed = "a path that begins with /, does not end with / and has no { or }"
            raise ConfigError(f"applications.{index}.route_prefix", prefix, allowed) from None
    for field, deployment in _deployments(content):
        if deployment["name"] != DEPLOYMENT:
            raise ConfigError(f"{field}.name", deployment["name"], DEPLOYMENT)


def _serve_error(
    error: ValidationError, model: type[BaseModel], prefix: str = ""
) -> SpecServeError:
    problems = error.errors(include_url=False)
    if any(problem["type"] != "value_error" for problem in problems):
        return from_validation_error(error, model, prefix)
    # A rule of Serve's own, whose message is a sentence.
    field = ".".join(map(str, (*([prefix] if prefix else ()), *problems[0]["loc"])))
    return SpecServeError(f"{field}: {' '.join(str(problems[0]['ctx']['error']).split())}")


def _application(schema: ServeApplicationSchema, index: int) -> Application:
    field = f"applications.{index}"
    if schema.import_path != IMPORT_PATH:
        raise ConfigError(f"{field}.import_path", schema.import_path, IMPORT_PATH)
    config = parse(schema.args, f"{field}.args")
    for number, deployment in enumerate(schema.deployments):
        if isinstance(deployment.num_replicas, int):  # Serve prefers it to ours
            placement = config.placement.model_copy(
                update={"num_replicas": deployment.num_replicas}
            )
            config = config.model_copy(update={"placement": placement})
        else:
            _check_scaling(deployment, f"{field}.deployments.{number}")
    return Application(
        name=schema.name,
        route_prefix=schema.route_prefix,
        field=f"{field}.args",
        config=config,
    )


def _check_scaling(deployment: DeploymentSchema, field: str) -> None:
    given = deployment.autoscaling_config
    scaling = given if isinstance(given, dict) else {}
    if deployment.num_replicas == "auto":
        scaling = AutoscalingConfig.default().model_dump(exclude_unset=True) | scaling
    try:
        AutoscalingConfig.model_validate(scaling)
    except ValidationError as error:
        raise _serve_error(error, AutoscalingConfig, f"{field}.autoscaling_config") from None


def _check_sections(content: dict[str, Any]) -> None:
    """Refuses unknown keys of ``_SECTIONS``; ``content`` is otherwise valid."""
    unknown = []
    for field, deployment in _deployments(content):
        for name, model in _SECTIONS.items():
            for key in sorted((deployment.get(name) or {}).keys() - model.model_fields, key=str):
                allowed = ", ".join(model.model_fields)
                unknown.append(ConfigError(f"{field}.{name}.{key}", key, allowed))
    if unknown:
        raise ConfigError.first_of(unknown)

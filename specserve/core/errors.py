"""Every error that specserve raises on purpose.

All derive from ``ValueError`` or ``RuntimeError`` as well, so that code which knows nothing of
specserve can handle them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal


class SpecServeError(Exception):
    """Base of all errors raised on purpose; ``str(error)`` is for users: a line per mistake."""


MISSING = "(missing)"
"""The value of a field that is required and not there."""


class ConfigError(SpecServeError, ValueError):
    """A field holds a value that is not allowed.

    Args:
        field: dotted path of the field, as the user wrote it (``speculation.0.kind``).
        value: the refused value; :data:`MISSING`: there is none.
        allowed: what would have been accepted, in words.

    Attributes:
        further: what else is wrong with the same value, where validation found several things.
    """

    further: tuple[ConfigError, ...] = ()

    def __init__(self, field: str, value: object, allowed: str) -> None:
        # A user may have chosen the name, with half a surrogate pair, which no answer can hold.
        self.field = field.encode(errors="backslashreplace").decode()
        self.value, self.allowed = value, allowed
        what = "is missing" if value is MISSING else f"{shorten(value)} is not allowed"
        super().__init__(f"{self.field}: {what}; allowed: {allowed}")

    @classmethod
    def first_of(cls, errors: Sequence[ConfigError]) -> ConfigError:
        """The first of some errors, with the others as its further ones."""
        first, *others = errors
        first.further = tuple(others)
        return first

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.value, self.allowed))


class RequestError(ConfigError):
    """A request field holds a value that is not allowed; answered as HTTP 400."""


class GrammarError(SpecServeError, ValueError):
    """Nothing is drafted from a request's grammar. The message quotes nothing of the request."""


class MissingExtraError(SpecServeError, RuntimeError):
    """vLLM, or a package that is installed together with it, is missing."""

    def __init__(self, what: str, package: str = "vLLM") -> None:
        super().__init__(
            f"{what} needs {package}: run `make setup` (CPU) or install specserve[gpu] (NVIDIA GPU)"
        )


class PortError(SpecServeError, RuntimeError):
    """A port to listen on is in use."""


class PlacementError(SpecServeError, RuntimeError):
    """The cluster cannot hold what was asked for; the message says both."""


class EngineError(SpecServeError, RuntimeError):
    """The engine did not start, or died while serving."""


class SnapshotError(SpecServeError, RuntimeError):
    """The draft memory's snapshot cannot be written, or a refused one cannot be moved aside."""


class StoreError(SpecServeError, RuntimeError):
    """The cluster's draft memory is missing or did not answer in time; asking again may help."""


class WireError(SpecServeError, ValueError):
    """A received message is malformed or too large; it was not used."""


GenerationErrorKind = Literal["validation", "generation", "overloaded", "incomplete_generation"]
"""Kinds of errors of the generation API, by the names of Text Generation Inference."""


class GenerationError(SpecServeError, RuntimeError):
    """A request of the generation API was refused, or its answer is incomplete."""

    def __init__(self, kind: GenerationErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: GenerationErrorKind = kind

    @classmethod
    def invalid(cls, reason: str) -> GenerationError:
        """A request that breaks a rule, in Text Generation Inference's wording."""
        return cls("validation", f"Input validation error: {reason}")

    @classmethod
    def of_field(cls, field: str, rule: str, value: object) -> GenerationError:
        """A parameter that breaks a rule."""
        return cls.invalid(f"`{field}` {rule}. Given: {shorten(value)}")


def shorten(value: object, limit: int = 80) -> str:
    """``repr(value)`` on one line, cut to ``limit`` characters."""
    return _cut(repr(value), limit)


def last_line_of(error: BaseException) -> str:
    """The last line of an error, where Ray, vLLM and pydantic put what matters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith("For further information")]
    return useful[-1] if useful else repr(error)


def reason_of(error: Exception) -> str:
    """What another library's error says, on one line of at most 300 characters."""
    return _cut(str(error), 300) or type(error).__name__


def _cut(text: str, limit: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."

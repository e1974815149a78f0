"""Reads and checks a user's chat template before the engine starts."""

from __future__ import annotations

from pathlib import Path

from jinja2 import TemplateError

from specserve.core.errors import ConfigError, reason_of


def read_chat_template(template: str, field: str) -> str:
    """Returns the text of a chat template.

    Args:
        template: a Jinja template or the path of its file, as vLLM's option takes it.
        field: the configuration field, for errors.

    Raises:
        ConfigError: the file cannot be read, or the template does not parse.
    """
    from transformers.utils import chat_template_utils  # seconds to import

    try:
        is_text = any(mark in template for mark in "{}\n")
        text = template if is_text else Path(template).read_text(encoding="utf-8")
        chat_template_utils._compile_jinja_template(text)
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        allowed = f"a chat template, or the path of its file ({reason_of(error)})"
        raise ConfigError(field, template, allowed) from None
    return text

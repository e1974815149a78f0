"""Chat templates that a user gives: whether they are any, before anybody's chat is."""

from __future__ import annotations

from pathlib import Path

from jinja2 import TemplateError

from specserve.core.errors import ConfigError, reason_of


def read_chat_template(template: str, field: str) -> str:
    """The text of a chat template.

    Args:
        template: in Jinja, or the path of a file that holds it, as vLLM takes it.
        field: where it was given.

    Raises:
        ConfigError: there is no such file, or it does not parse.
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

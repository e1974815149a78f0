"""Predicted outputs over HTTP: reads a call's prediction.

The field is OpenAI's (https://platform.openai.com/docs/guides/predicted-outputs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specserve.core.errors import RequestError
from specserve.engine.prediction import Prediction, Predictor
from specserve.sources.controls import PREDICTION_KEY

_WHOLE = '{"type": "content", "content": "..."}'
_PART = '{"type": "text", "text": "..."}'
_A_TEXT = "a text that is not empty"

_NO_DRAFTS = "requests with it are decoded without drafts"
_INCOMPATIBLE = {
    "use_beam_search": "beam search has no drafts",
    "prompt_embeds": "a prompt without tokens has no drafts",
    "min_p": _NO_DRAFTS,
    "logit_bias": _NO_DRAFTS,
    "thinking_token_budget": _NO_DRAFTS,
    "typical_p": _NO_DRAFTS,
    "watermark": _NO_DRAFTS,
}
"""Parameters that cannot be combined with a prediction, and why."""


async def read_prediction(
    texts: Mapping[str, str], body: Mapping[str, Any], predictor: Predictor | None
) -> Prediction | None:
    """Tokenizes the prediction of a call; None: the call has none.

    Args:
        texts: the predicted texts by their fields.
        body: the call's body.
        predictor: tokenizes; None: the application has no source ``prediction``.

    Raises:
        RequestError: the application has no source ``prediction``, the body has a parameter that
            cannot be combined with it, or the prediction is too long.
    """
    if not texts:
        return None
    field, text = next(iter(texts.items()))
    if predictor is None:
        nothing = "nothing: this application has no source `prediction` in its `speculation`"
        raise RequestError(field, text, nothing)
    _refuse_incompatible(body)
    if len(texts) > predictor.max_tokens:
        raise _too_long(field, f"{len(texts)} parts", predictor)
    num_chars = sum(map(len, texts.values()))
    if num_chars > predictor.max_chars:
        raise _too_long(field, f"{num_chars} characters", predictor)
    token_ids = [token for each in texts.values() for token in await predictor.tokenize(each)]
    if len(token_ids) > predictor.max_tokens:
        raise _too_long(field, f"{len(token_ids)} tokens", predictor)
    return Prediction(np.array(token_ids, np.int32))


def _too_long(field: str, what: str, predictor: Predictor) -> RequestError:
    limit = f"at most {predictor.max_tokens} tokens, the context length"
    return RequestError(field, what, f"{limit}, in all predictions of a request together")


def _refuse_incompatible(body: Mapping[str, Any]) -> None:
    sampling = body.get("sampling_params")  # /inference/v1/generate
    given = body.get("parameters")  # the generation API
    places = ("", body), ("sampling_params.", sampling), ("parameters.", given)
    for prefix, parameters in places:
        if isinstance(parameters, dict):
            for name, reason in _INCOMPATIBLE.items():
                value = parameters.get(name)
                if value or (name == "thinking_token_budget" and value is not None):
                    nothing = f"nothing: it is not supported with 'prediction', since {reason}"
                    raise RequestError(prefix + name, value, nothing)


def openai_texts(body: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of OpenAI's field ``prediction``, by their fields.

    Raises:
        RequestError: the field does not have OpenAI's form.
    """
    prediction = body.get(PREDICTION_KEY)
    if prediction is None:
        return {}
    if not isinstance(prediction, dict):
        raise RequestError("prediction", prediction, _WHOLE)
    if prediction.get("type") != "content":
        raise RequestError("prediction.type", prediction.get("type"), '"content"')
    field, content = "prediction.content", prediction.get("content")
    if not isinstance(content, list):
        return {field: _text(field, content, f"{_A_TEXT}, or parts {_PART}")}
    texts = {}
    for index, part in enumerate(content):
        place = f"{field}.{index}"
        if not isinstance(part, dict):
            raise RequestError(place, part, _PART)
        if part.get("type") != "text":
            raise RequestError(f"{place}.type", part.get("type"), '"text"')
        texts[f"{place}.text"] = _text(f"{place}.text", part.get("text"), _A_TEXT)
    if not texts:
        raise RequestError(field, content, f"at least one part {_PART}")
    return texts


def argument_texts(field: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the predicted texts among a request's extra arguments, by their fields.

    Args:
        field: name of the field that holds the arguments.
        arguments: JSON values.

    Raises:
        RequestError: the value is neither a text nor a list of texts.
    """
    if PREDICTION_KEY not in arguments:
        return {}
    field, value = f"{field}.{PREDICTION_KEY}", arguments[PREDICTION_KEY]
    if isinstance(value, list) and value:
        return {
            f"{field}.{index}": _text(f"{field}.{index}", each, _A_TEXT)
            for index, each in enumerate(value)
        }
    return {field: _text(field, value, f"{_A_TEXT}, or a list of such texts")}


def _text(field: str, value: object, allowed: str) -> str:
    """Returns the value if a tokenizer can read it as text, else raises RequestError."""
    if not isinstance(value, str) or not value:
        raise RequestError(field, value, allowed)
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can contain half of a surrogate pair
        raise RequestError(field, value, f"{allowed}, of whole Unicode characters") from None
    return value

"""Chat messages as prompt tokens, by the model's own template."""

from typing import Any

from jinja2 import TemplateError

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import ChatMessage


def render(tokenizer: Any, messages: list[ChatMessage]) -> list[int]:
    """Token ids, with the generation prompt. The template writes BOS itself, so encoding adds none.

    Raises InvalidRequestError if the model has no template or its template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError("the model has no chat template; send a prompt of tokens instead")
    given = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError) as error:
        raise InvalidRequestError(
            f"the model's chat template refuses these messages: {error}"
        ) from error
    encoded: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return encoded

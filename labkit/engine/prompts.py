"""Prompts in all the forms that users write them, checked and turned into token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from labkit.scheduling import SamplingParams

PromptLike: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
"""Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that they came from if there was one."""

    token_ids: list[int]
    text: str | None = None


class PromptReader:
    """Turns what a user passed into :class:`Prompt`; errors name the prompt and what is allowed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def read_all(self, prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
        """One prompt or a list of them."""
        if isinstance(prompts, str | Mapping) or (_is_list(prompts) and prompts and _is_int(prompts[0])):
            return [self.read(prompts, "prompt")]  # type: ignore[arg-type]
        if not _is_list(prompts):
            raise TypeError(f"prompts must be text, token ids or a list of those, got {type(prompts).__name__}")
        if not prompts:
            raise ValueError("prompts must hold at least one prompt, got an empty list")
        return [self.read(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]  # type: ignore[arg-type]

    def read(self, prompt: PromptLike, name: str = "prompt") -> Prompt:
        """One prompt."""
        text: str | None = None
        token_ids: Any = prompt
        if isinstance(prompt, Mapping):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise ValueError(
                    f"{name} as a dict must have the key 'prompt' or 'prompt_token_ids', got {sorted(prompt)}"
                )
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if token_ids is None:
                token_ids = text
        if isinstance(token_ids, str):
            return Prompt(self.encode(token_ids, name), token_ids)
        if not _is_list(token_ids):
            raise TypeError(f"{name} must be text or a list of token ids, got {type(token_ids).__name__}")
        return Prompt(self._checked_ids(token_ids, name), text)

    def read_chats(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        template_options: Mapping[str, Any],
    ) -> list[PromptLike]:
        """One conversation, or a list of them, as prompts that the chat template makes."""
        if self._tokenizer is None:
            raise ValueError("chat needs a tokenizer with a chat template: pass LLM(tokenizer=...)")
        if not messages:
            raise ValueError("messages must hold at least one message, got none")
        prompts: list[PromptLike] = []
        for conversation in [messages] if isinstance(messages[0], Mapping) else messages:
            text = self._tokenizer.apply_chat_template(
                list(conversation),  # type: ignore[arg-type]
                add_generation_prompt=True,
                tokenize=False,
                **template_options,
            )
            # The template wrote the special tokens already.
            token_ids = self.encode(str(text), "messages", add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return prompts

    def encode(self, text: str, name: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        """Tokenise text."""
        if self._tokenizer is None:
            raise ValueError(f"{name} is text, but this LLM has no tokenizer: pass token ids, or LLM(tokenizer=...)")
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not text or not token_ids:
            raise ValueError(f"{name} must not be empty, got {text!r}")
        return self._checked_ids(token_ids, name)

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for what these params ask that this tokenizer and vocabulary cannot give."""
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer, and this LLM has none: use stop_token_ids")
        for token_id in params.stop_token_ids or ():
            if token_id >= self._vocab_size:
                raise ValueError(f"stop_token_ids must be in [0, {self._vocab_size}), the vocabulary, got {token_id}")

    def _checked_ids(self, token_ids: Sequence[Any], name: str) -> list[int]:
        if len(token_ids) == 0:
            raise ValueError(f"{name} must not be empty, got no token ids")
        checked = []
        for token_id in token_ids:
            if not _is_int(token_id):
                raise TypeError(f"{name} must be text or a list of token ids, got {token_id!r} in it")
            number = operator.index(token_id)
            if not 0 <= number < self._vocab_size:
                raise ValueError(f"token id {number} in {name} must be in [0, {self._vocab_size}), the vocabulary")
            checked.append(number)
        return checked


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_int(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)

"""Text from tokens as they come: no half characters, and stop strings cut exactly."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_PROMPT_TAIL = 6
_LONGEST_CHARACTER = 16


class Detokenizer:
    """The text of one sequence, and how much of it may be shown yet.

        text     The capital is Par\\nUs
        visible  The capital is Par              while "\\nUser" is a stop string: "\\nUs" may become one

    Text is decoded in the context of the tokens before it, the end of the prompt included: some tokenizers write a
    space between two tokens but not before the first.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop_str: bool = False,
    ) -> None:
        self.text = ""
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._include_stop_str = include_stop_str
        self._num_tokens = 0
        self._search_from = 0  # a stop string may not end before this
        # Decoded text of _context is known; _context + _pending minus that is what is new.
        self._context = list(prompt_token_ids[-_PROMPT_TAIL:])
        self._pending: list[int] = []

    def append(self, token_id: int) -> str | None:
        """Take in a token; returns the stop string that it completed, if it did. Then the text is final."""
        self._num_tokens += 1
        self._pending.append(token_id)
        self._decode(flush=False)
        return self._find_stop()

    def finish(self) -> str | None:
        """Show what was held back, as no token will follow; returns the stop string if that completes one."""
        if self._pending:
            self._decode(flush=True)
            self._find_stop()
        return self.stop_string

    def visible(self, finished: bool) -> str:
        """The text without an end that could still become a stop string; all of it once ``finished``."""
        if finished or self.stop_string is not None:
            return self.text
        return self.text[: len(self.text) - self._num_held_back()]

    # ------------------------------------------------------------------ inside

    def _decode(self, flush: bool) -> None:
        known = self._to_text(self._context)
        text = self._to_text(self._context + self._pending)
        # U+FFFD at the end stands for bytes that later tokens may complete to a character.
        incomplete = text.endswith("\ufffd") and len(self._pending) < _LONGEST_CHARACTER
        if incomplete and not flush:
            return
        if len(text) > len(known):
            self.text += text[len(known) :]
            self._context, self._pending = self._pending, []
        elif len(self._pending) >= _LONGEST_CHARACTER or flush:  # special tokens, which have no text
            self._context, self._pending = self._context + self._pending, []

    def _to_text(self, token_ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def _find_stop(self) -> str | None:
        if self.stop_string is not None or not self._stop:
            return self.stop_string
        if self._num_tokens < self._min_tokens:
            self._search_from = len(self.text)
            return None
        found = []
        for order, stop in enumerate(self._stop):
            start = self.text.find(stop, max(0, self._search_from + 1 - len(stop)))
            if start >= 0:
                found.append((start, order, stop))
        self._search_from = len(self.text)
        if not found:
            return None
        start, _, stop = min(found)
        self.stop_string = stop
        self.text = self.text[: start + len(stop)] if self._include_stop_str else self.text[:start]
        return self.stop_string

    def _num_held_back(self) -> int:
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

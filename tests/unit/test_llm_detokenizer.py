"""Text as tokens come: whole characters, stop strings cut exactly and never shown in part."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from labkit.engine.detokenizer import Detokenizer

WORDS = ["hello", " world", ".\n", "User", "\nUs", "er:", "ab", "abab", "END", "a.b"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, and a few words are; <s> is special."""
    vocab: dict[str, int] = {}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in WORDS:
        vocab["".join(piece for piece, _ in byte_level.pre_tokenize_str(word))] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = byte_level, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def ids(tokenizer, *pieces: str) -> list[int]:
    """Token ids: a word of WORDS or a special token as one token, other text byte by byte."""
    found = []
    for piece in pieces:
        if piece == "<s>":
            found.append(tokenizer.bos_token_id)
        elif piece in WORDS:
            found.append(256 + WORDS.index(piece))
        else:
            found += tokenizer.encode(piece, add_special_tokens=False)
    return found


def run(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    """What was visible after each token until a stop string came; then the final text."""
    seen = []
    for token_id in token_ids:
        stopped = detokenizer.append(token_id)
        seen.append(detokenizer.visible(finished=False))
        if stopped is not None:
            break
    detokenizer.finish()
    return [*seen, detokenizer.visible(finished=True)]


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 テキスト", "👩‍👩‍👧 emoji", "mixed ü 🙂 end"])
def test_characters_come_whole(tokenizer, text):
    seen = run(Detokenizer(tokenizer, []), ids(tokenizer, text))
    assert seen[-1] == text
    assert all(text.startswith(part) for part in seen)
    assert not any("\ufffd" in part for part in seen)


def test_an_incomplete_character_is_shown_as_such_at_the_end(tokenizer):
    seen = run(Detokenizer(tokenizer, []), ids(tokenizer, "a🙂")[:-1])
    assert seen[-2] == "a" and seen[-1] == "a\ufffd"


def test_bytes_that_never_become_a_character_do_not_hold_text_back_for_ever(tokenizer):
    broken = ids(tokenizer, "🙂")[:1] * 40
    detokenizer = Detokenizer(tokenizer, [])
    seen = run(detokenizer, broken)
    assert len(seen[-2]) > 0
    assert set(seen[-1]) == {"\ufffd"}


def test_special_tokens_are_left_out_or_kept(tokenizer):
    token_ids = ids(tokenizer, "hello", "<s>", " world")
    assert run(Detokenizer(tokenizer, []), token_ids)[-1] == "hello world"
    assert run(Detokenizer(tokenizer, [], skip_special_tokens=False), token_ids)[-1] == "hello<s> world"


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["hello", ".\n", "User", "er:"], ["\nUser"], "hello."),  # begins inside a token
        (["hello", "\nUs", "er:", "hello"], ["\nUser:"], "hello"),  # spans two tokens
        (["hello", "\nUs", "er:", "hello"], ["User"], "hello\n"),  # begins and ends inside tokens
        (["hello", "a.b"], ["."], "helloa"),  # lies inside one token
        (["ab", "abab", "END"], ["ababEND"], "ab"),  # overlaps with itself
        (["hello", " world"], ["wor", "o w"], "hell"),  # the one that begins first wins
        (["hello", " world"], ["hello world"], ""),
        (["hello", " world"], ["planet"], "hello world"),
    ],
)
def test_stop_strings_cut_exactly_and_are_never_shown(tokenizer, pieces, stop, text):
    seen = run(Detokenizer(tokenizer, [], stop=stop), ids(tokenizer, *pieces))
    assert seen[-1] == text
    assert all(text.startswith(part) for part in seen)


def test_byte_by_byte_a_stop_string_is_never_shown_in_part(tokenizer):
    seen = run(Detokenizer(tokenizer, [], stop=["STOP", "STAR"]), ids(tokenizer, "aSTSTAR"))
    assert seen == ["a", "a", "a", "aST", "aST", "aST", "aST", "aST"]


def test_the_stop_string_is_kept_when_asked(tokenizer):
    detokenizer = Detokenizer(tokenizer, [], stop=["\nUser"], include_stop_str=True)
    assert run(detokenizer, ids(tokenizer, "hello", "\nUs", "er:", " world"))[-1] == "hello\nUser"
    assert detokenizer.stop_string == "\nUser"


def test_no_stop_string_before_min_tokens(tokenizer):
    pieces = ["hello", " world", "hello", " world"]
    assert run(Detokenizer(tokenizer, [], stop=["world"], min_tokens=3), ids(tokenizer, *pieces))[-1] == (
        "hello worldhello "
    )
    assert run(Detokenizer(tokenizer, [], stop=["world"], min_tokens=2), ids(tokenizer, *pieces))[-1] == "hello "


def test_held_back_text_comes_at_the_end(tokenizer):
    seen = run(Detokenizer(tokenizer, [], stop=["world wide"]), ids(tokenizer, "hello", " world"))
    assert seen == ["hello", "hello ", "hello world"]

"""The prefix cache: what it finds, and what it must not."""

import pytest

from labkit.memory import PrefixCache


def chain(cache: PrefixCache, token_ids: list[int], block_ids: list[int], salt: str | None = None) -> list:
    entries, parent = [], None
    for i, block_id in enumerate(block_ids):
        tokens = token_ids[i * cache.block_size : (i + 1) * cache.block_size]
        parent, _ = cache.insert(block_id, parent, tokens, salt)
        entries.append(parent)
    return entries


def found(cache: PrefixCache, token_ids: list[int], salt: str | None = None) -> list[int]:
    return [entry.block_id for entry in cache.match(token_ids, salt)]


def test_finds_the_longest_cached_prefix_in_whole_blocks():
    cache = PrefixCache(4)
    chain(cache, list(range(12)), [7, 3, 5])
    assert found(cache, list(range(12))) == [7, 3, 5]
    assert found(cache, list(range(11))) == [7, 3]
    assert found(cache, [*range(8), 99, 99, 99, 99]) == [7, 3]
    assert found(cache, [99, *range(1, 12)]) == []


def test_the_same_tokens_behind_another_beginning_are_not_a_hit():
    cache = PrefixCache(2)
    chain(cache, [1, 2, 5, 6], [0, 1])
    assert found(cache, [3, 4, 5, 6]) == []
    assert found(cache, [5, 6]) == []


def test_a_salt_separates_tenants():
    cache = PrefixCache(2)
    chain(cache, [1, 2, 3, 4], [0, 1], salt="alice")
    assert found(cache, [1, 2, 3, 4], salt="bob") == []
    assert found(cache, [1, 2, 3, 4]) == []
    assert found(cache, [1, 2, 3, 4], salt="alice") == [0, 1]


def test_colliding_hashes_never_share_a_block(monkeypatch):
    monkeypatch.setattr(PrefixCache, "_hash", staticmethod(lambda parent, tokens, salt: 42))
    cache = PrefixCache(2)
    chain(cache, [1, 2], [0])
    assert found(cache, [1, 2]) == [0]
    assert found(cache, [3, 4]) == []
    entry, displaced = cache.insert(1, None, [3, 4])
    assert (entry.block_id, displaced) == (1, 0)
    assert found(cache, [1, 2]) == []
    assert found(cache, [3, 4]) == [1]


def test_a_hash_collision_in_the_parent_is_no_proof_for_the_child(monkeypatch):
    monkeypatch.setattr(PrefixCache, "_hash", staticmethod(lambda parent, tokens, salt: sum(tokens)))
    cache = PrefixCache(2)
    chain(cache, [1, 4, 9, 9], [0, 1])
    cache.insert(2, None, [2, 3])  # collides with [1, 4] and takes its name
    assert found(cache, [2, 3, 9, 9]) == [2]


def test_equal_content_is_entered_once_and_children_chain_to_it():
    cache = PrefixCache(2)
    (first,) = chain(cache, [1, 2], [0])
    again, displaced = cache.insert(1, None, [1, 2])
    assert again is first and displaced is None
    assert 1 not in cache
    cache.insert(2, again, [3, 4])
    assert found(cache, [1, 2, 3, 4]) == [0, 2]


def test_evicting_the_beginning_hides_the_rest_until_it_is_computed_again():
    cache = PrefixCache(2)
    chain(cache, [1, 2, 3, 4], [0, 1])
    assert cache.evict(0) and not cache.evict(0)
    assert found(cache, [1, 2, 3, 4]) == []
    parent, _ = cache.insert(5, None, [1, 2])
    assert found(cache, [1, 2, 3, 4]) == [5]
    child, displaced = cache.insert(6, parent, [3, 4])
    assert (child.block_id, displaced) == (6, 1)
    assert found(cache, [1, 2, 3, 4]) == [5, 6]


def test_a_partly_filled_block_is_refused():
    with pytest.raises(ValueError, match="must fill a block of 4, got 3"):
        PrefixCache(4).insert(0, None, [1, 2, 3])

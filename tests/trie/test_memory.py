"""Which namespaces get a trie, and when another one takes it over."""

from __future__ import annotations

import pytest

from specserve.trie.memory import KEPT_S, TrieMemory
from specserve.trie.namespaces import namespace

SIZE = 8 << 20
A, B = namespace("m", tenant="a"), namespace("m", tenant="b")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def adapter(name: str, tenant: str = "a") -> str:
    return namespace("m", name, tenant)


def test_only_configured_tenants_have_tries() -> None:
    memory = TrieMemory(SIZE, [A, B], 1)
    for other in (namespace("m"), namespace("m", tenant="c"), adapter("x", "c")):
        assert not memory.has_tenant(other)
        assert memory.for_record(other) is None
        assert memory.for_request(other) is None
    assert set(memory.tries()) == {A, B}


def test_tries_have_one_size_and_fit_the_limit_together() -> None:
    memory = TrieMemory(SIZE, [A, B], 1)
    tries = [memory.for_request(name) for name in (A, B, adapter("x"), adapter("x", "b"))]
    sizes = {trie.num_bytes for trie in tries if trie is not None}
    assert len(sizes) == 1
    assert 3 * SIZE // 4 < 4 * sizes.pop() <= SIZE


def test_another_replicas_adapter_is_learned_if_a_trie_is_free() -> None:
    memory = TrieMemory(SIZE, [A], 1)
    taught = memory.for_record(adapter("x"))
    assert taught is not None
    assert memory.for_record(adapter("y")) is None
    assert memory.for_request(adapter("x")) is taught


def test_a_request_takes_a_trie_that_only_the_log_has_used() -> None:
    memory = TrieMemory(SIZE, [A, B], 1)
    taught = [memory.for_record(adapter("old", tenant)) for tenant in ("a", "b")]
    trie = memory.for_request(adapter("new"))
    assert trie is not None
    assert trie not in taught
    assert memory.tries().get(adapter("old")) is None
    assert memory.for_record(adapter("old")) is None
    assert memory.tries().get(adapter("old", "b")) is taught[1]


def test_a_configured_adapter_is_learned_from_the_start(clock: Clock) -> None:
    memory = TrieMemory(SIZE, [A], 1, [adapter("named"), adapter("one too many")], clock)
    assert memory.for_record(adapter("other")) is None
    assert memory.for_request(adapter("other")) is None
    assert memory.for_record(adapter("named")) is not None


def test_an_adapter_keeps_its_trie_until_it_was_idle_for_long(clock: Clock) -> None:
    memory = TrieMemory(SIZE, [A], 2, clock=clock)
    for name in ("first", "second"):
        assert memory.for_request(adapter(name)) is not None
        clock.now += 1
    memory.release(adapter("second"))
    memory.release(adapter("first"))
    assert memory.for_request(adapter("first")) is not None
    clock.now += KEPT_S - 1
    assert memory.for_request(adapter("new")) is None
    clock.now += 1
    assert memory.for_request(adapter("new")) is not None  # instead of `second`
    clock.now += 10 * KEPT_S
    assert memory.for_request(adapter("newer")) is None  # both are in use
    assert set(memory.tries()) == {A, adapter("first"), adapter("new")}


def test_a_taken_trie_has_no_text_of_the_former_adapter() -> None:
    memory = TrieMemory(SIZE, [A], 1)
    before = memory.for_record(adapter("old"))
    assert before is not None
    after = memory.for_request(adapter("new"))
    assert after is not None
    before.open()  # by the link's thread, which still has the former trie
    assert not after.num_tokens
    assert after is not before

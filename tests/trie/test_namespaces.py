from __future__ import annotations

import re
from itertools import combinations

from specserve.trie.namespaces import is_part_of, label, namespace, tenant_half


def test_the_same_names_give_the_same_namespace() -> None:
    name = namespace("model", "adapter", "team-a")
    assert name == namespace("model", "adapter", "team-a")
    assert re.fullmatch("[0-9a-f]{32}", name)
    assert "team" not in name


def test_another_model_adapter_or_tenant_is_another_namespace() -> None:
    names = [
        namespace("m"),
        namespace("m", "a"),
        namespace("m", "", "a"),
        namespace("ma"),
        namespace("", "ma"),
        namespace("m", "a", "a"),
    ]
    assert all(one != other for one, other in combinations(names, 2))


def test_a_tenants_namespaces_are_found_for_each_model_and_adapter() -> None:
    for name in (namespace("m", "", "a"), namespace("n", "x", "a")):
        assert is_part_of(name, name)
        assert is_part_of(name, tenant_half("a"))
        assert not is_part_of(name, tenant_half("b"))
        assert not is_part_of(name, tenant_half(""))
    assert not is_part_of(namespace("m", "", "a"), namespace("n", "", "a"))


def test_a_label_depends_on_the_key() -> None:
    name = namespace("m", tenant="a")
    assert label(name, b"key") == label(name, b"key")
    assert len({name, label(name, b"key"), label(name, b"another")}) == 3
    assert not set(re.findall("[0-9a-f]{16}", name)) & set(
        re.findall("[0-9a-f]{16}", label(name, b"key"))
    )
    assert label(name, b"") == name

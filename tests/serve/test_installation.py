from __future__ import annotations

import pytest

from specserve.core.errors import EngineError
from specserve.serve.installation import compare

OWN = {"specserve": "0.1.0", "vllm": "0.32.0", "torch": "2.13.0", "checkpoint": "aa"}


def test_nodes_with_equal_installations_pass() -> None:
    compare("10.0.0.1", OWN, {"10.0.0.2": dict(OWN), "10.0.0.3": dict(OWN)})


@pytest.mark.parametrize("name", ["specserve", "vllm", "torch", "checkpoint"])
def test_a_node_that_differs_is_an_error_with_both_values(name: str) -> None:
    other = OWN | {name: "another"}
    with pytest.raises(EngineError) as error:
        compare("10.0.0.1", OWN, {"10.0.0.2": dict(OWN), "10.0.0.3": other})
    assert str(error.value) == (
        f"node 10.0.0.3 has {name} another, node 10.0.0.1 has {OWN[name]}: "
        "all nodes of a replica need the same"
    )

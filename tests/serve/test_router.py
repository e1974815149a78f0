"""Which replica gets a request; tests/integration/test_served_trie.py has it on two nodes."""

from __future__ import annotations

import inspect

import pytest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.request_router import LocalityMixin

from specserve.serve import router
from specserve.serve.router import AnyNodeRouter


def test_serve_still_knows_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(
        PowerOfTwoChoicesRequestRouter, "__init__", lambda self, **options: given.update(options)
    )
    AnyNodeRouter(prefer_local_node_routing=True)
    assert given == {"prefer_local_node_routing": False, "prefer_local_az_routing": False}
    assert given.keys() <= inspect.signature(LocalityMixin.__init__).parameters.keys()


@pytest.mark.parametrize("has_haproxy", [False, True])
def test_haproxy_routes_by_itself(monkeypatch: pytest.MonkeyPatch, has_haproxy: bool) -> None:
    monkeypatch.setattr(router, "RAY_SERVE_ENABLE_HA_PROXY", has_haproxy)
    chosen = router.router_config().get_request_router_class()
    assert (chosen is AnyNodeRouter) is not has_haproxy

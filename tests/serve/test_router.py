"""The routing of requests to replicas. tests/integration/served/test_trie.py uses two nodes."""

from __future__ import annotations

import inspect

import pytest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.request_router import LocalityMixin

from specserve.serve import router
from specserve.serve.router import AnyNodeRouter


def test_serve_has_the_options_that_we_set(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(
        PowerOfTwoChoicesRequestRouter, "__init__", lambda self, **options: given.update(options)
    )
    AnyNodeRouter(prefer_local_node_routing=True)
    assert given == {"prefer_local_node_routing": False, "prefer_local_az_routing": False}
    assert given.keys() <= inspect.signature(LocalityMixin.__init__).parameters.keys()


@pytest.mark.parametrize("has_haproxy", [False, True])
def test_haproxy_replaces_our_router(monkeypatch: pytest.MonkeyPatch, has_haproxy: bool) -> None:
    monkeypatch.setattr(router, "RAY_SERVE_ENABLE_HA_PROXY", has_haproxy)
    chosen = router.router_config().get_request_router_class()
    assert (chosen is AnyNodeRouter) is not has_haproxy

"""Which replica gets a request: the less busy one of two, wherever it runs.

Serve's proxies by themselves prefer a replica of their own node until Serve's queue for it is full.
An engine that is full refuses requests before, so they would be refused while another replica has
nothing to do; and a hop to another node takes little time beside decoding.
"""

from __future__ import annotations

from typing import Any

from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig


class AnyNodeRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's own router, without a preference for near replicas."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"prefer_local_node_routing": False, "prefer_local_az_routing": False}
        super().__init__(*args, **kwargs)


def router_config() -> RequestRouterConfig:
    """How Serve is to route; HAProxy prefers no node, and with it Serve refuses any router."""
    if RAY_SERVE_ENABLE_HA_PROXY:
        return RequestRouterConfig()
    return RequestRouterConfig(request_router_class=AnyNodeRouter)

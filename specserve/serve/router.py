"""Routes a request to the less busy of two random replicas, on any node.

By default Serve's proxies prefer replicas of their own node until Serve's queue for them is full.
A full engine refuses requests earlier, so requests would fail while other replicas are idle. A hop
to another node takes little time compared with decoding.
"""

from __future__ import annotations

from typing import Any

from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig


class AnyNodeRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's own router, without its preference for replicas of the same node or zone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"prefer_local_node_routing": False, "prefer_local_az_routing": False}
        super().__init__(*args, **kwargs)


def router_config() -> RequestRouterConfig:
    """Returns Serve's default with HAProxy, which prefers no node, else :class:`AnyNodeRouter`.

    With HAProxy, Serve refuses any other router.
    """
    if RAY_SERVE_ENABLE_HA_PROXY:
        return RequestRouterConfig()
    return RequestRouterConfig(request_router_class=AnyNodeRouter)

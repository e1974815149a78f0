"""A Serve application without an engine, whose replica watches Ray's daemons like ours."""

from __future__ import annotations

from ray import serve
from starlette.requests import Request

from specserve.serve import daemons


class Small:
    def __init__(self) -> None:
        daemons.watch()

    async def __call__(self, request: Request) -> str:
        return "here"


app = serve.deployment(Small, ray_actor_options={"num_cpus": 0}).bind()

"""A served application whose processes write spans of their work, for ``bench_step_trace``.

The import path of a Serve file names :func:`build`. vLLM is configured with the traced executor and
worker classes. So the tracing code reaches each process through existing settings. Each process
appends its spans to a file in the cluster's folder, one line of JSON for a span.
"""

# No `from __future__ import annotations`: Serve reads the builder's annotation at run time.

import time
from typing import Any

from ray.serve import Application
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import specserve.app
from specserve.serve.server import ModelServer
from tests.peers.spans import note, wrap


def wrap_http(app: ASGIApp) -> ASGIApp:
    """Records a span from a request to the first byte of its answer, and one for every write."""

    async def spanned(scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic_ns()
        is_first = True

        async def send_spanned(message: Message) -> None:
            nonlocal is_first
            if is_first:
                note("request to first byte", started)
            is_first, began = False, time.monotonic_ns()
            await send(message)
            note("HTTP write", began)

        await app(scope, receive, send_spanned)

    return spanned


class TracedModelServer(ModelServer):
    """A replica that writes its spans, and makes its engine write spans."""

    async def _start(self) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.output_processor import OutputProcessor

        from specserve.engine import llm
        from tests.peers import traced_engine

        make = vars(llm)["served_engine_args"]

        def traced_args(*args: Any, **kwargs: Any) -> Any:
            arguments = make(*args, **kwargs)
            executor = arguments.distributed_executor_backend
            arguments.distributed_executor_backend = traced_engine.EXECUTORS[executor]
            kind = arguments.worker_cls.rpartition(".")[2]
            arguments.worker_cls = f"tests.peers.traced_worker.Traced{kind}"
            return arguments

        vars(llm)["served_engine_args"] = traced_args
        wrap(AsyncLLM, "add_request", "add request")
        wrap(OutputProcessor, "process_outputs", "process outputs")
        await super()._start()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        return wrap_http(await super().__serve_build_asgi_app__())


def build(args: dict[str, Any]) -> Application:
    """The application of :func:`specserve.app.build` with tracing."""
    vars(specserve.app)["ModelServer"] = TracedModelServer
    return specserve.app.build(args)

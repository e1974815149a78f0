"""The child process of :mod:`tests.peers.bench_agreement`: an engine that records its drafts.

Run it as ``python -m tests.peers.watched_engine GIVEN FOUND`` with two files of pickled objects.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from specserve.engine.methods import parse_method
from specserve.engine.offline import OfflineEngine
from tests.peers.in_process import scheduler_of


def main(given: Path, found: Path) -> None:
    """Runs the given jobs one after the other.

    Args:
        given: file with the contender and the jobs.
        found: file to write: the output tokens of each prompt, and the drafts by prompt and number
            of output tokens before.
    """
    contender, jobs = pickle.loads(given.read_bytes())
    method = parse_method(contender.method, contender.config)
    method = replace(method, on_our_kernels=contender.on_our_kernels)
    engine = OfflineEngine(contender.config, method)
    scheduler, drafted = scheduler_of(engine), {}
    update = scheduler.update_draft_token_ids

    def note(drafts: Any) -> None:
        for request_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = scheduler.requests.get(request_id)
            if request is not None and tokens:
                place = tuple(request.prompt_token_ids), request.num_output_tokens
                drafted[place] = tuple(tokens)
        update(drafts)

    scheduler.update_draft_token_ids = note
    completions = engine.run(jobs, 1, lambda *_: None).completions
    engine.close()
    pairs = zip(jobs, completions, strict=True)
    texts = {job.prompt_token_ids: tuple(completion.token_ids) for job, completion in pairs}
    found.write_bytes(pickle.dumps((texts, drafted)))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

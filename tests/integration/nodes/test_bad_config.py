from __future__ import annotations

import re

import pytest

from tests.integration.applications import application
from tests.integration.cluster import Deployment
from tests.integration.stage import Stage

pytestmark = pytest.mark.timeout(600)

NGRAM = {"kind": "ngram"}
BAD = {
    "/key": application() | {"enigne": {}},
    "/twice": application() | {"speculation": [NGRAM, NGRAM]},
    "/missing": application(model={"path": "no/such/folder/here"}),
    "/option": application(engine={"vllm": {"max_modle_len": 5}}),
}
ERRORS = {
    "key": "enigne: 'enigne' is not allowed; allowed: model, engine, speculation, placement, http",
    "twice": "speculation.0.kind: 'ngram' is not allowed; allowed: each kind of source at",
    "missing": "model.path: 'no/such/folder/here' is not allowed; allowed: a folder with a ",
    "option": "engine.vllm.max_modle_len: 'max_modle_len' is not allowed; allowed: the fields of ",
}


@pytest.fixture
def mistakes(stage: Stage, nodes: Stage) -> Deployment:
    """Applications with one mistake each, after Serve has reported all mistakes."""
    stage.end()
    deployment = nodes.serve(BAD)
    deployment.eventually(
        lambda: all(error in deployment.output() for error in ERRORS.values()), "all errors", 120
    )
    return deployment


@pytest.mark.parametrize("name", ERRORS)
def test_serve_run_reports_a_wrong_config_in_one_line(mistakes: Deployment, name: str) -> None:
    status = mistakes.status(name)
    assert status.startswith("DEPLOY_FAILED")
    assert ERRORS[name] in status


def test_serve_run_shows_no_stack_trace_for_a_wrong_config(mistakes: Deployment) -> None:
    output = re.sub(r"\x1b\[\d+m", "", mistakes.output())
    assert "Traceback" not in output
    assert 'File "' not in output


def test_nothing_is_started_for_a_wrong_config(mistakes: Deployment) -> None:
    assert not mistakes.cluster.engine_processes()

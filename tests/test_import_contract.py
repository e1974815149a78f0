from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("ray", "vllm", "torch", "transformers", "fastapi")


def loaded_by(statement: str) -> set[str]:
    """The packages of ``HEAVY`` that a new interpreter has imported after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import specserve",
        "import specserve.core.config, specserve.core.errors, specserve.core.validation",
        "from specserve.cli.main import build_parser; build_parser()",
        "import specserve.engine.checkpoint",
    ],
)
def test_light_modules_load_no_engine_and_no_server(statement: str) -> None:
    assert loaded_by(statement) == set()


def test_the_serve_file_reader_loads_no_engine() -> None:
    assert loaded_by("import specserve.serve.config_file") <= {"ray", "fastapi"}

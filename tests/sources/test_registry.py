from __future__ import annotations

import subprocess
import sys

from specserve.core.source_config import NgramConfig, source_sections
from specserve.sources.base import SourceContext
from specserve.sources.ngram import NgramSource
from specserve.sources.registry import build_source, source_class


def test_every_kind_can_be_imported() -> None:
    for section in source_sections().values():
        assert isinstance(source_class(section), type)


def test_a_config_becomes_its_proposer() -> None:
    assert isinstance(build_source(NgramConfig(kind="ngram"), SourceContext()), NgramSource)


def test_a_source_is_imported_only_when_it_is_used() -> None:
    code = (
        "import sys, specserve.sources.registry;"
        "assert 'numba' not in sys.modules and 'specserve.sources.ngram' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

from __future__ import annotations

import subprocess
import sys

from specserve.core.source_config import NgramConfig, source_sections
from specserve.proposers.base import SourceContext
from specserve.proposers.ngram import NgramProposer
from specserve.proposers.registry import build_proposer, proposer_class


def test_every_kind_can_be_imported() -> None:
    for section in source_sections().values():
        assert isinstance(proposer_class(section), type)


def test_a_config_becomes_its_proposer() -> None:
    assert isinstance(build_proposer(NgramConfig(kind="ngram"), SourceContext()), NgramProposer)


def test_a_source_is_imported_only_when_it_is_used() -> None:
    code = (
        "import sys, specserve.proposers.chain;"
        "assert 'numba' not in sys.modules and 'specserve.proposers.ngram' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

from __future__ import annotations

import subprocess
import sys

import pytest

from specserve.core.errors import ConfigError
from specserve.core.source_config import NgramConfig
from specserve.proposers.base import SourceContext
from specserve.proposers.ngram import NgramProposer
from specserve.proposers.registry import build_proposer, known_kinds, source_class


def test_every_known_kind_can_be_imported() -> None:
    for kind in known_kinds():
        assert isinstance(source_class(kind), type)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"eagle.*ngram"):
        source_class("eagle")


def test_a_config_becomes_its_proposer() -> None:
    assert isinstance(build_proposer(NgramConfig(kind="ngram"), SourceContext()), NgramProposer)


def test_a_source_is_imported_only_when_it_is_used() -> None:
    code = (
        "import sys, specserve.proposers.chain;"
        "assert 'numba' not in sys.modules and 'specserve.proposers.ngram' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

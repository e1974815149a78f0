from __future__ import annotations

import subprocess
import sys
from pkgutil import resolve_name

from specserve.core.source_config import source_sections


def test_every_source_can_be_imported() -> None:
    for section in source_sections().values():
        assert callable(resolve_name(section.SOURCE))


def test_a_source_is_imported_only_when_it_is_used() -> None:
    code = (
        "import sys, specserve.core.source_config, specserve.sources.base;"
        "assert 'numba' not in sys.modules and 'specserve.sources.ngram' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

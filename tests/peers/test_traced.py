from __future__ import annotations

import subprocess
import sys

IMPORTED = """
import sys
import tests.peers.traced_engine
print(*sorted({"numba", "llvmlite"} & set(sys.modules)))
"""


def test_the_traced_engine_core_does_not_import_numba() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], check=True, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout.splitlines()[-1] == ""

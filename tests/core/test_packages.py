from __future__ import annotations

import numpy as np

from specserve.core.packages import installed_version


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert installed_version("numpy") == np.__version__
    assert installed_version("no-such-package-of-ours") == ""

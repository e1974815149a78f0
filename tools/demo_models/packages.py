"""The code of installed packages with permissive licences, as further training data."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, distributions
from pathlib import Path

from specserve.compare.corpus import MIN_BYTES, SKIPPED_FOLDERS, Module, is_held_out
from specserve.core.errors import ConfigError

MAX_PACKAGE_BYTES = 3_000_000
"""Larger packages are left out, so that none outweighs the standard library."""

MAX_FILE_BYTES = 100_000
"""Larger files are left out: they are mostly generated."""

_PERMISSIVE = re.compile(r"(Apache|BSD|MIT|PSF|Python Software Foundation)\b")


def is_permissive(distribution: Distribution) -> bool:
    """Whether every licence that the package's metadata names is Apache, BSD, MIT or PSF.

    Reads the SPDX expression; without it the classifiers; without these the free text.
    """
    metadata = distribution.metadata
    classifiers = [
        classifier.rpartition(" :: ")[2]
        for classifier in metadata.get_all("Classifier") or []
        if classifier.startswith("License ::") and not classifier.endswith("OSI Approved")
    ]
    expressions = metadata.get_all("License-Expression") or metadata.get_all("License") or [""]
    names = [name for text in expressions for name in re.split(r" AND | OR ", text)]
    if classifiers and not metadata.get_all("License-Expression"):
        names = classifiers
    return all(_PERMISSIVE.search(name) and "GPL" not in name for name in names)


def permissive_packages(folder: Path) -> dict[str, list[Module]]:
    """The training modules of each package with a permissive licence, by package name, sorted.

    `folder` is a site-packages folder; a module's name is its path under it. Large packages and
    held-out modules are left out.

    Raises:
        ConfigError: the folder holds no such package.
    """
    packages = {}
    for distribution in distributions(path=[str(folder)]):
        if not is_permissive(distribution):
            continue
        modules = _modules(distribution)
        if modules and sum(len(m.text) for m in modules) <= MAX_PACKAGE_BYTES:
            packages[distribution.metadata["Name"]] = modules
    if not packages:
        raise ConfigError(
            "packages", str(folder), "a site-packages folder with permissive licences"
        )
    return dict(sorted(packages.items(), key=lambda item: item[0].lower()))


def _modules(distribution: Distribution) -> list[Module]:
    modules = []
    for file in sorted(distribution.files or []):
        if file.suffix != ".py" or file.parts[0] == ".." or SKIPPED_FOLDERS & {*file.parts[:-1]}:
            continue
        path = Path(str(distribution.locate_file(file)))
        name = file.as_posix()
        if is_held_out(name) or not path.is_file():
            continue
        if MIN_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
            try:
                modules.append(Module(name=name, text=path.read_text(encoding="utf-8")))
            except UnicodeDecodeError:
                continue
    return modules

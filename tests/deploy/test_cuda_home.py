"""The script that makes a CUDA toolkit of the packages, with a small copy of their folder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = "int cuInit(int); int cudaLaunchKernel(void); int run(void)"


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """The packages' folder. Its nvcc compiles any kernel to calls of both libraries."""
    if shutil.which("c++") is None or shutil.which("gcc") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path / "nvidia/cu13"
    for name in ("bin", "include", "lib"):
        (folder / name).mkdir(parents=True)
    (folder / "include/cuda.h").write_text(
        "/* cuInit comes first */\n"
        "#define cuMemFree cuMemFree_v2\n"
        "CUresult CUDAAPI cuInit(unsigned int Flags);\n"
        "CUresult CUDAAPI cuMemFree(CUdeviceptr dptr);\n"
    )
    runtime = tmp_path / "runtime.c"
    runtime.write_text("int cudaLaunchKernel(void) { return 0; }\n")
    library = folder / "lib/libcudart.so.13"
    subprocess.run(["gcc", "-shared", "-fPIC", runtime, "-o", library], check=True)
    program(tmp_path / "python", f"echo {tmp_path}")
    compiles(folder, "cuInit(0) + cudaLaunchKernel()")
    return folder


def program(path: Path, runs: str) -> None:
    path.write_text(f"#!/bin/sh\n{runs}\n")
    path.chmod(0o755)


def compiles(folder: Path, value: str) -> None:
    source = f"{CALLS} {{ return {value}; }}"
    to = 'for out; do :; done; gcc -fPIC -x c -c - -o "$out"'
    program(folder / "bin/nvcc", f"echo '{source}' | {{ {to}; }}")


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "deploy/cuda_home.sh"],
        env={"PATH": f"{folder.parents[1]}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_folder_has_the_names_that_are_linked(toolkit: Path) -> None:
    for _ in range(2):  # it may run again
        done = run(toolkit)
        assert (done.returncode, done.stdout) == (0, f"{toolkit}\n"), done.stderr
    found = toolkit / "lib64/libcudart.so"
    assert found.samefile(toolkit / "lib/libcudart.so.13")
    listed = subprocess.run(
        ["nm", "-D", toolkit / "lib64/stubs/libcuda.so"], capture_output=True, text=True, check=True
    )
    assert {"cuInit", "cuMemFree", "cuMemFree_v2"} <= set(listed.stdout.split())


@pytest.mark.parametrize("value", ["cuOther()", "1 +"])
def test_a_toolkit_that_does_not_compile_or_link_is_an_error(toolkit: Path, value: str) -> None:
    compiles(toolkit, value)
    done = run(toolkit)
    assert done.returncode != 0
    assert done.stdout == ""

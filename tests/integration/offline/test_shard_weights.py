"""Weight files that were split for each shard give the same output as the ordinary folder."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from specserve.compare.prompts import load_prompts, load_tokenizer
from specserve.core.config import AppConfig, parse
from specserve.engine.checkpoint import model_identity
from specserve.engine.generation import Job, Sampling
from specserve.engine.weights import Division
from tests.integration.cluster import model_path
from tests.integration.offline.engines import running_engine
from tests.integration.stage import Stage

pytestmark = pytest.mark.timeout(900)


def two_shards(path: Path, **vllm: str) -> AppConfig:
    """The demo base, with latent attention and experts, in float32 so that texts are equal."""
    return parse(
        {
            "model": {"path": str(path)},
            "engine": {
                "dtype": "float32",
                "tensor_parallel_size": 2,
                "max_model_len": 1024,
                "kv_cache_memory_bytes": 64 << 20,
                "enforce_eager": True,
                "vllm": vllm,
            },
        }
    )


def test_two_shards_write_the_same_tokens_from_their_own_files(
    stage: Stage, nodes: Stage, tmp_path: Path
) -> None:
    stage.end()
    nodes.clear()
    ordinary, out = two_shards(model_path("demo-base")), tmp_path / "divided"
    application = {
        "name": "main",
        "import_path": "specserve.app:build",
        "args": ordinary.model_dump(mode="json"),
    }
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"applications": [application]}))
    command = ["shard-weights", "--config", str(file), str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "specserve.cli.main", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("2 shard(s), ")  # after vLLM's own lines
    assert {path.name for path in tmp_path.iterdir()} == {"divided", "serve.yaml"}
    mark = json.loads((out / "specserve_shards.json").read_text())
    assert mark == asdict(Division(2, "", "float32"))
    divided = two_shards(out, load_format="sharded_state")
    assert model_identity(divided.model) == model_identity(ordinary.model)

    prompts = load_prompts("code", load_tokenizer(ordinary.model.path), num_prompts=3)
    jobs = [Job(prompt.token_ids, Sampling(max_tokens=32)) for prompt in prompts]
    tokens = []
    for config in (ordinary, divided):
        with running_engine(config, "none") as engine:
            tokens.append([each.token_ids for each in engine.run(jobs, 1).completions])
    assert tokens[0] == tokens[1]

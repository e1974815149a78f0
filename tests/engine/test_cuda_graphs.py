"""The CUDA graph of a step, from vLLM's own configuration and dispatcher, without a GPU."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specserve.core.config import AppConfig, parse
from specserve.engine import args
from specserve.engine.cuda_graphs import capture_plain_steps, graph_sizes
from tests.model_cards import LLAMA_70B

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


def app(folder: Path, draft_len: int, **engine: Any) -> AppConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    source = {"kind": "ngram", "max_draft_len": draft_len}
    options = {"max_num_seqs": 20} | engine
    return parse({"model": {"path": str(folder)}, "speculation": [source], "engine": options})


@pytest.fixture
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes our code, but not vLLM, assume that this machine has GPUs."""
    monkeypatch.setattr(args, "current_platform", SimpleNamespace(is_cpu=lambda: False))


def gpu_config(config: AppConfig) -> VllmConfig:
    """vLLM's configuration with the CUDA graphs of a GPU."""
    arguments = args.served_engine_args(config)
    given = arguments.cudagraph_capture_sizes, arguments.max_cudagraph_capture_size
    made = arguments.create_engine_config()
    compilation = made.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.splitting_ops = None
    compilation.set_splitting_ops_for_v1("")
    chosen = arguments.compilation_config.cudagraph_capture_sizes
    compilation.cudagraph_capture_sizes = given[0] or chosen
    compilation.max_cudagraph_capture_size = given[1]
    made._set_cudagraph_sizes()
    return made


class Steps:
    """The part of a model runner that chooses graphs, with vLLM's own functions."""

    def __init__(self, config: VllmConfig, *, ours: bool, recurrent: bool = False) -> None:
        self.dispatcher = CudagraphDispatcher(config)
        num_tokens = config.num_speculative_tokens
        self.runner = SimpleNamespace(
            model_config=SimpleNamespace(has_inner_state=recurrent, is_hybrid=False),
            num_spec_tokens=num_tokens,
            uniform_decode_query_len=1 + num_tokens,
            cudagraph_dispatcher=self.dispatcher,
        )
        if ours:
            capture_plain_steps(self.runner)
        self.sizes = config.compilation_config
        query_len = self.runner.uniform_decode_query_len
        mode = self.sizes.resolve_cudagraph_mode_and_sizes(
            AttentionCGSupport.UNIFORM_BATCH, "a backend", query_len
        )
        self.dispatcher.initialize_cudagraph_keys(mode, query_len)

    def graph(self, *lengths: int) -> tuple[CUDAGraphMode, int]:
        """The graph mode and size of a step whose requests have these numbers of tokens."""
        uniform = GPUModelRunner._is_uniform_decode(
            max_num_scheduled_tokens=max(lengths),
            uniform_decode_query_len=self.runner.uniform_decode_query_len,
            num_tokens=sum(lengths),
            num_reqs=len(lengths),
        )
        mode, batch = self.dispatcher.dispatch(sum(lengths), uniform_decode=uniform)
        return mode, batch.num_tokens


@pytest.mark.usefixtures("_on_gpu")
def test_vllm_alone_pads_a_step_of_one_token_to_the_longest_draft(
    tmp_path: Path,
) -> None:
    steps = Steps(gpu_config(app(tmp_path, 16)), ours=False)
    assert steps.graph(1) == (PIECEWISE, 17)


@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize("draft_len", [2, 16, 128])
def test_a_step_without_drafts_replays_a_full_graph_of_its_own_size(
    draft_len: int, tmp_path: Path
) -> None:
    steps = Steps(gpu_config(app(tmp_path, draft_len)), ours=True)
    for batch, padded in ((1, 1), (2, 2), (3, 4), (4, 4), (8, 8), (13, 16), (16, 16), (20, 20)):
        assert steps.graph(*[1] * batch) == (FULL, padded)


@pytest.mark.usefixtures("_on_gpu")
def test_a_step_with_drafts_replays_the_piecewise_graph_of_the_next_size(tmp_path: Path) -> None:
    steps = Steps(gpu_config(app(tmp_path, 16)), ours=True)
    assert steps.graph(2) == (PIECEWISE, 2)
    assert steps.graph(17) == (PIECEWISE, 20)
    assert steps.graph(1, 1, 3) == (PIECEWISE, 8)
    assert steps.graph(*[17] * 20) == (PIECEWISE, 340)
    assert steps.graph(*[17] * 20, 1) == (PIECEWISE, 352)
    assert steps.graph(513) == (NONE, 513)


@pytest.mark.usefixtures("_on_gpu")
def test_full_graphs_are_for_steps_with_drafts_if_a_draft_is_one_token(tmp_path: Path) -> None:
    steps = Steps(gpu_config(app(tmp_path, 1)), ours=True)
    assert steps.graph(2) == (FULL, 2)
    assert steps.graph(*[2] * 20) == (FULL, 40)
    assert steps.graph(1) == (PIECEWISE, 2)
    assert steps.graph(*[1] * 8) == (PIECEWISE, 8)


@pytest.mark.usefixtures("_on_gpu")
def test_recurrent_layers_keep_vllms_graphs(tmp_path: Path) -> None:
    steps = Steps(gpu_config(app(tmp_path, 16)), ours=True, recurrent=True)
    assert steps.graph(17) == (FULL, 17)


@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize(
    "options",
    [
        {"cudagraph_capture_sizes": [1, 6, 30]},
        {"compilation_config": {"cudagraph_capture_sizes": [1, 6, 30]}},
    ],
)
def test_configured_sizes_are_not_changed(options: dict[str, Any], tmp_path: Path) -> None:
    steps = Steps(gpu_config(app(tmp_path, 16, vllm=options)), ours=True)
    assert steps.sizes.cudagraph_capture_sizes == [1, 6, 30]
    assert steps.graph(1, 1) == (FULL, 6)
    assert steps.graph(17) == (PIECEWISE, 30)


@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize(
    "options",
    [
        {"max_cudagraph_capture_size": 64},
        {"compilation_config": {"max_cudagraph_capture_size": 64}},
        {"performance_mode": "interactivity"},
    ],
)
def test_vllm_chooses_the_sizes_if_other_size_options_are_set(
    options: dict[str, Any], tmp_path: Path
) -> None:
    assert args.served_engine_args(app(tmp_path, 16, vllm=options)).cudagraph_capture_sizes is None


def test_no_graph_is_larger_than_the_largest_step(tmp_path: Path) -> None:
    assert graph_sizes(app(tmp_path, 3, max_num_seqs=2)) == [1, 2, 4, 8, 16]
    assert graph_sizes(app(tmp_path, 3, max_num_batched_tokens=30)) == [1, 2, 4, 8, 16, 20, 24, 30]
    assert graph_sizes(app(tmp_path, 128))[-1] == 512


def test_the_model_runner_detects_uniform_steps_by_the_attribute_we_set() -> None:
    source = inspect.getsource(GPUModelRunner)
    assert source.count("self.uniform_decode_query_len") == 5
    assert "self.uniform_decode_query_len = 1 + self.num_spec_tokens" in source
    assert "self.cudagraph_dispatcher = CudagraphDispatcher(" in source
    choose = inspect.getsource(GPUModelRunner._check_and_update_cudagraph_mode)
    assert choose.count("self.uniform_decode_query_len") == 2
    own = inspect.getsource(CudagraphDispatcher)
    assert own.count("self.uniform_decode_query_len") == 2

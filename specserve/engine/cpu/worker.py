"""The CPU workers, in a separate module because vLLM's must be imported before torch is used."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from specserve.engine.cpu.backend import has_amx, is_x86
from specserve.engine.cpu.compilation import use_saved_models
from specserve.engine.cpu.kernels import repair_kernels, unused_generators_aside
from specserve.engine.cpu.linear import use_fastest_linear, use_fastest_linear_in
from specserve.engine.cpu.mla import use_verifying_backend
from specserve.engine.cpu.mla_prefill import use_flash_prefill
from specserve.engine.cpu.norms import use_norm_kernels
from specserve.engine.cpu.quantized import round_weights_instead
from specserve.engine.cpu.rotary import use_vector_rotary
from specserve.engine.cpu.verification import sample_by_drawing, verify_by_drawing
from specserve.engine.sampling import report_asked_tokens
from specserve.engine.worker import InEngineMixin, SpeculationMixin


def _forbid_compilation() -> None:
    """Runs functions uncompiled that vLLM compiles at their first use.

    They are small, such as one for log-probabilities. All requests would wait seconds for the
    compilation, and without a C++ compiler it ends the engine.
    """
    torch.compiler.set_stance("force_eager")


class CpuWorker(CPUWorker):
    """vLLM's CPU worker with corrected and faster kernels."""

    def init_device(self) -> None:
        """Builds the model runner."""
        repair_kernels()
        use_verifying_backend()
        use_flash_prefill()
        use_fastest_linear()
        use_norm_kernels()
        use_vector_rotary()
        sample_by_drawing()
        use_saved_models()
        if is_x86():
            round_weights_instead(has_amx=has_amx())
        if self.model_config.enforce_eager:
            _forbid_compilation()
        super().init_device()
        report_asked_tokens(self.model_runner)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads the weights."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        use_fastest_linear_in(self.get_model())

    def compile_or_warm_up_model(self) -> Any:
        """Warms up. The model is compiled by now, so nothing else needs to be."""
        result = super().compile_or_warm_up_model()
        _forbid_compilation()
        return result

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Returns the step's tokens."""
        with unused_generators_aside(self.model_runner):
            return super().sample_tokens(grammar_output)


class CpuSpeculationWorker(SpeculationMixin, CpuWorker):
    """The CPU worker with the proposer hook."""

    def init_device(self) -> None:
        """Builds the model runner."""
        verify_by_drawing()
        super().init_device()


class CpuInEngineWorker(InEngineMixin, CpuWorker):
    """The CPU worker with one of vLLM's own draft methods."""

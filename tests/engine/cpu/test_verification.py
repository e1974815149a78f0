from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitsProcessors,
)
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker must be imported first
from specserve.core.types import Float64Array
from specserve.engine.cpu import verification
from specserve.engine.logits_processors import PROCESSORS, TypicalSampling, extra_args
from specserve.engine.text_request import Parameters
from tests.engine.sampling_metadata import drafts_metadata, install_cpu_sampling, sampling_metadata

VOCAB_SIZE = 12
VLLMS, VLLMS_FORWARD = rejection_sampler.rejection_sample, RejectionSampler.forward
VLLMS_SAMPLER = Sampler.forward
NONE = -1


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs our functions and the CPU kernel that vLLM's worker installs."""
    install_cpu_sampling(monkeypatch)


def verify(
    drafts: Sequence[Sequence[int]],
    logits: torch.Tensor,
    temperatures: Sequence[float],
    generators: dict[int, torch.Generator] | None = None,
    bonus: int = 0,
) -> list[list[int]]:
    """The tokens of each request, from the function that vLLM looks up."""
    counts = [len(draft) for draft in drafts]
    metadata = sampling_metadata(
        len(drafts),
        temperature=torch.tensor(temperatures),
        all_greedy=not any(temperatures),
        all_random=all(temperatures),
        generators=generators or {},
    )
    found = rejection_sampler.rejection_sample(
        torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32),
        counts,
        max(counts),
        torch.tensor(counts).cumsum(0).int(),
        None,
        logits,
        torch.full((len(drafts), 1), bonus),
        metadata,
    )
    assert found.dtype == torch.int32
    return [[token for token in row if token != NONE] for row in found.tolist()]


def of_tokens(tokens: Sequence[int]) -> torch.Tensor:
    """Logits that make each of these tokens certain."""
    return 100.0 * torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB_SIZE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("drafts", "most_likely", "written"),
    [
        ([[3, 4, 5]], [3, 4, 5], [[3, 4, 5, 9]]),
        ([[3, 4, 5]], [3, 7, 5], [[3, 7]]),
        ([[3, 4, 5]], [6, 4, 5], [[6]]),
        ([[], [3, 4], [], [5]], [3, 4, 6], [[9], [3, 4, 9], [9], [6]]),
        ([[3], [4, 4], []], [6, 4, 7], [[6], [4, 7], [9]]),
    ],
)
def test_a_draft_is_accepted_up_to_the_first_token_that_differs(
    drafts: list[list[int]], most_likely: list[int], written: list[list[int]], temperature: float
) -> None:
    temperatures = [temperature] * len(drafts)
    assert verify(drafts, of_tokens(most_likely), temperatures, bonus=9) == written


def test_greedy_requests_get_the_tokens_that_vllm_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = rng.integers(0, 5, 6)
        counts[0] = 4
        drafts = [rng.integers(0, 3, count).tolist() for count in counts]
        logits = torch.from_numpy(rng.integers(0, 3, (counts.sum(), 3)).astype(np.float32))
        ours = verify(drafts, logits, [0.0] * 6)
        with monkeypatch.context() as patch:
            patch.setattr(rejection_sampler, "rejection_sample", VLLMS)
            assert verify(drafts, logits, [0.0] * 6) == ours


def test_sampled_tokens_have_the_models_distribution_for_any_draft() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, VOCAB_SIZE)
    logits[:, 4] = -torch.inf  # masked, as by a grammar or top_k
    probabilities = logits.double().softmax(-1)
    for draft in ([1, 2], [4, 1], [int(probabilities[0].argmax()), 0]):
        size = 20_000
        rows = logits.repeat(size, 1)
        written = verify([draft] * size, rows, [1.0] * size)
        firsts = np.bincount([each[0] for each in written], minlength=VOCAB_SIZE)
        assert firsts[4] == 0
        expected = size * probabilities[0].numpy()
        is_possible = expected > 0
        assert chisquare(firsts[is_possible], expected[is_possible]).pvalue > 1e-4
        seconds = [each[1] for each in written if each[0] == draft[0]]
        assert all(len(each) == 1 for each in written if each[0] != draft[0])
        if seconds:
            found = np.bincount(seconds, minlength=VOCAB_SIZE)
            expected = len(seconds) * probabilities[1].numpy()
            assert chisquare(found[is_possible], expected[is_possible]).pvalue > 1e-4


def test_a_greedy_request_beside_a_sampled_one_gets_the_likeliest_token() -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, VOCAB_SIZE)
    most_likely = logits.argmax(-1).tolist()
    drafts = [[1]] * 200
    written = verify(drafts, logits, [0.0, 1.0] * 100)
    assert [each[0] for each in written[::2]] == most_likely[::2]
    assert [each[0] for each in written[1::2]] != most_likely[1::2]


def step(
    drafts: Sequence[Sequence[int]],
    logits: torch.Tensor,
    temperatures: Sequence[float],
    **fields: object,
) -> list[list[int]]:
    """The tokens of each request of a step, from vLLM's rejection sampler.

    The requests have ``len(draft) + 1`` rows of logits each.
    """
    parameters = sampling_metadata(
        len(drafts),
        temperature=torch.tensor(temperatures),
        all_greedy=not any(temperatures),
        all_random=all(temperatures),
        **fields,
    )
    found = RejectionSampler(Sampler())(drafts_metadata(drafts), None, logits, parameters)
    assert found.logprobs_tensors is None
    return [[token for token in row if token != NONE] for row in found.sampled_token_ids.tolist()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fields", [{}, {"top_k": 1}])
def test_a_step_draws_the_token_after_a_draft(temperature: float, fields: dict[str, int]) -> None:
    drafts = [[3, 4, 5], [6], [], [2, 8]]
    logits = of_tokens([3, 4, 5, 9, 7, 1, 10, 2, 7, 1])
    given = {name: torch.full((4,), value) for name, value in fields.items()}
    written = step(drafts, logits, [temperature] * 4, **given)
    assert written == [[3, 4, 5, 9], [7], [10], [2, 7]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_greedy_step_gives_the_tokens_that_vllm_gives(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = rng.integers(0, 5, 6)
        counts[0] = 4
        drafts = [rng.integers(0, 3, count).tolist() for count in counts]
        rows = rng.integers(0, 4, (counts.sum() + 6, 1000)).astype(np.float32)
        logits = torch.from_numpy(rows).to(dtype)
        ours = step(drafts, logits.clone(), [0.0] * 6)
        with monkeypatch.context() as patch:
            patch.setattr(rejection_sampler, "rejection_sample", VLLMS)
            patch.setattr(RejectionSampler, "forward", VLLMS_FORWARD)
            assert step(drafts, logits.clone(), [0.0] * 6) == ours


def test_all_tokens_of_a_step_have_the_models_distribution() -> None:
    torch.manual_seed(0)
    number, vocab_size = 8_000, 600  # more than one block of tokens
    logits = 4 * torch.randn(2, vocab_size)
    logits[:, 300] = -torch.inf
    parameters = [(0.5, vocab_size, 1.0), (0.0, vocab_size, 1.0), (1.5, 5, 1.0), (1.0, 9, 0.8)]
    temperatures, top_k, top_p = (torch.tensor(each) for each in zip(*parameters, strict=True))
    first = int(logits[0].argmax())
    drafts, rows = [[first], [first], [], [first]], [0, 1, 0, 1, 0, 0, 1]
    written = step(
        drafts * number,
        logits[rows].repeat(number, 1),
        temperatures.repeat(number).tolist(),
        top_k=top_k.repeat(number),
        top_p=top_p.repeat(number),
    )
    greedy = written[1::4]
    assert greedy == [[first, int(logits[1].argmax())]] * number
    for kind in (0, 2, 3):
        scaled = logits / temperatures[kind]
        kept = rejection_sampler.apply_top_k_top_p(
            scaled, top_k[kind].repeat(2), top_p[kind].repeat(2)
        )
        probabilities = kept.double().softmax(-1).numpy()
        of_kind = written[kind::4]
        check_distribution([each[0] for each in of_kind], probabilities[0])
        if drafts[kind]:
            assert all(len(each) == 1 for each in of_kind if each[0] != first)
            seconds = [each[1] for each in of_kind if each[0] == first]
            check_distribution(seconds, probabilities[1])


def test_the_tokens_of_a_step_without_drafts_have_the_models_distribution() -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(600)
    parameters = sampling_metadata(
        8_000, temperature=torch.tensor([0.0, 0.7] * 4_000), all_greedy=False
    )
    tokens = Sampler()(logits.repeat(8_000, 1), parameters).sampled_token_ids[:, 0].tolist()
    assert tokens[::2] == [int(logits.argmax())] * 4_000
    check_distribution(tokens[1::2], (logits / 0.7).double().softmax(-1).numpy())


def check_distribution(tokens: Sequence[int], probabilities: Float64Array) -> None:
    """Chi-square; tokens that are expected less than five times count together."""
    found = np.bincount(tokens, minlength=len(probabilities))
    assert not found[probabilities == 0].any()
    is_rare = len(tokens) * probabilities < 5
    groups = np.where(is_rare, 0, np.arange(1, len(probabilities) + 1))[probabilities > 0]
    observed, expected = (
        np.bincount(groups, each[probabilities > 0])[np.unique(groups)]
        for each in (found, len(tokens) * probabilities)
    )
    assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4


def test_a_seed_gives_the_same_token_beside_any_drafts() -> None:
    torch.manual_seed(0)
    logits = torch.randn(VOCAB_SIZE)

    def seeded(row: int) -> dict[int, torch.Generator]:
        return {row: torch.Generator().manual_seed(7)}

    alone = sampling_metadata(
        1, temperature=torch.ones(1), all_greedy=False, all_random=True, generators=seeded(0)
    )
    token = int(Sampler()(logits[None].clone(), alone).sampled_token_ids)
    rows = torch.cat([torch.randn(3, VOCAB_SIZE), logits[None]])
    assert step([[1, 2], []], rows, [1.0, 1.0], generators=seeded(1))[1] == [token]


@pytest.mark.parametrize(("write", "num_bonus_rows"), [(verify, 0), (step, 1)])
def test_a_seed_gives_the_same_tokens_in_any_batch(
    write: Callable[..., list[list[int]]], num_bonus_rows: int
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB_SIZE)
    draft = logits.argmax(-1).tolist()[: 4 - num_bonus_rows]

    def written(others: int) -> list[int]:
        rows = torch.cat([torch.randn((1 + num_bonus_rows) * others, VOCAB_SIZE), logits])
        generators = {others: torch.Generator().manual_seed(7)}
        drafts = [[1]] * others + [draft]
        return write(drafts, rows, [1.0] * (others + 1), generators=generators)[-1]

    assert written(0) == written(3) == written(1)


def test_a_step_without_drafts_has_the_tokens_that_vllm_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    logits = torch.randint(0, 3, (6, 4)).float()

    def written(temperature: float, seeds: Sequence[int]) -> list[list[int]]:
        parameters = sampling_metadata(
            6,
            temperature=torch.full((6,), temperature),
            all_greedy=not temperature,
            all_random=temperature > 0,
            generators={row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)},
        )
        found: list[list[int]] = Sampler()(logits.clone(), parameters).sampled_token_ids.tolist()
        return found

    def both() -> list[list[list[int]]]:
        return [written(0.0, []), written(1.0, range(6))]

    ours = both()
    monkeypatch.setattr(Sampler, "forward", VLLMS_SAMPLER)
    assert both() == ours


@pytest.mark.parametrize(
    "fields",
    [
        {"generators": {0: torch.Generator()}},
        {"max_num_logprobs": 0},
        {"no_penalties": False},
        {"allowed_token_ids_mask": torch.zeros(1, VOCAB_SIZE, dtype=torch.bool)},
        {"bad_words_token_ids": {0: [[3]]}},
        {"logprob_token_ids": {0: [3]}},
    ],
)
def test_a_step_with_a_parameter_that_changes_or_reports_logits_is_vllms(
    fields: dict[str, object],
) -> None:
    assert verification.is_plain(sampling_metadata(1))
    assert not verification.is_plain(sampling_metadata(1, **fields))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(min_p=0.1),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(min_tokens=2, stop_token_ids=[3]),
        SamplingParams(extra_args=extra_args(Parameters(typical_p=0.5))),
        SamplingParams(extra_args=extra_args(Parameters(watermark=True))),
    ],
)
def test_a_step_with_a_used_logits_processor_is_vllms(params: SamplingParams) -> None:
    processors = LogitsProcessors(
        processor(VllmConfig(), torch.device("cpu"), False)
        for processor in (*BUILTIN_LOGITS_PROCESSORS, *PROCESSORS)
    )
    metadata = sampling_metadata(1, logitsprocs=processors)
    assert verification.is_plain(metadata)
    for each in processors.all:
        each.update_state(BatchUpdate(1, [], [(0, params, [1], [])], []))
    assert not verification.is_plain(metadata)


def test_a_step_with_an_unknown_logits_processor_is_vllms() -> None:
    class Unknown(TypicalSampling):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits

    unknown = Unknown(VllmConfig(), torch.device("cpu"), False)
    metadata = sampling_metadata(1, logitsprocs=LogitsProcessors([unknown]))
    assert not verification.is_plain(metadata)

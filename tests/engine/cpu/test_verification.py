from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker must be imported first
from specserve.engine.cpu import verification
from tests.engine.sampling_metadata import sampling_metadata

VOCAB_SIZE = 12
VLLMS = rejection_sampler.rejection_sample
NONE = -1


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs our function and the CPU kernel that vLLM's worker installs."""
    launcher = rejection_sampler._rejection_greedy_sample
    kernel = KernelOverride(launcher.kernel, cpu_triton_utils._rejection_greedy_sample_kernel_impl)
    monkeypatch.setattr(launcher, "kernel", kernel)
    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sampler.rejection_sample)
    verification.verify_by_drawing()


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


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB_SIZE)

    def written(others: int) -> list[int]:
        rows = torch.cat([torch.randn(others, VOCAB_SIZE), logits])
        generators = {others: torch.Generator().manual_seed(7)}
        drafts = [[1]] * others + [logits.argmax(-1).tolist()]
        return verify(drafts, rows, [1.0] * (others + 1), generators)[-1]

    assert written(0) == written(3) == written(1)

"""The tests that `make test` leaves out, with the reasons.

A row names a file, a test, or one parameter of a test, as pytest names them below ``tests/``.
`conftest.py` marks these tests with their tier. What a row tests also has a smaller test in
`make test`: a unit test, or one with fewer processes.
"""

from __future__ import annotations

LONG = {
    "integration/test_two_nodes.py": (
        "Two hosts in network namespaces, and four starts of an engine. `make test` has two shards"
        " on two nodes of Ray, and tests of the nodes' scripts."
    ),
    "integration/test_built_image.py": (
        "Builds the image, which downloads some GB. tests/k8s/test_image.py reads its recipe."
    ),
    "integration/test_prometheus.py": (
        "A Prometheus beside a cluster with a dashboard. `make test` compares the metrics with the"
        " API, and has promtool check the rules."
    ),
    "integration/test_plan.py": (
        "The plan beside what Ray does, on nodes that only declare GPUs. The plan has unit tests."
    ),
    "integration/test_beside_rank_0.py": (
        "Ray's arithmetic of parts of a GPU, on nodes that only declare them."
    ),
    "integration/test_served_beside_rank_0.py": (
        "A drafter's other place. `make test` has one in the place that is the default."
    ),
    "integration/test_demo_models_logprobs.py::"
    "test_vllm_gives_the_prompt_log_probabilities_of_transformers": (
        "Changes only with the lock or with the weights in configs/models."
    ),
    "integration/offline/test_exactness.py::"
    "test_output_is_the_same_with_experts_and_drafter_processes[latent]": (
        "Kernels of latent attention, which the demo does not use; tests/engine/cpu tests them."
    ),
    "integration/served/test_bench_commands.py::test_vllms_own_client_gets_text": (
        "vLLM's command starts by importing all of vLLM. `make test` runs its benchmark."
    ),
    "integration/served/test_drafters.py::test_a_killed_drafter_changes_no_text_and_restarts": (
        "test_drafters.py kills a drafter's actor without an engine."
    ),
    "integration/served/test_drafters.py::"
    "test_a_hanging_drafter_is_reported_down_until_it_resumes": (
        "test_drafters.py stops a drafter's actor without an engine."
    ),
    "integration/served/test_drafters.py::"
    "test_a_drafter_out_of_memory_is_used_again_once_it_has_memory": (
        "A drafter's refusal is one error among others of tests/sources/test_remote_failures.py."
    ),
    "integration/served/test_fuzz.py::test_random_requests_do_no_harm_to_tenants_or_drafters": (
        "`make test` fuzzes the application without keys, on the same engine."
    ),
    "integration/served/test_trie.py::test_a_killed_store_changes_no_text_and_restarts": (
        "test_trie_store.py kills a store in the midst of traffic without an engine."
    ),
    "integration/served/test_trie.py::test_both_replicas_get_requests_whichever_node_they_are_on": (
        "Starts a deployment for itself. tests/serve/test_router.py has what Serve is told."
    ),
    "integration/nodes/test_lifecycle.py::"
    "test_a_killed_process_fails_its_requests_and_the_replica_is_replaced": (
        "`make test` has an engine core that hangs: the replica is replaced in the same way."
    ),
    "integration/nodes/test_lifecycle.py::"
    "test_a_shard_that_hangs_fails_its_requests_and_the_replica_is_replaced": (
        "`make test` has an engine core that hangs, which holds the shard itself."
    ),
    "integration/served/test_lifecycle.py::"
    "test_a_replica_is_replaced_when_it_dies_or_its_engine_core_fails[core dies]": (
        "`make test` has an engine core that hangs: the replica is replaced in the same way."
    ),
    "integration/served/test_lifecycle.py::"
    "test_a_replica_is_replaced_when_it_dies_or_its_engine_core_fails[replica dies]": (
        "`make test` has an engine core that hangs: the replica is replaced in the same way."
    ),
    "integration/served/test_lifecycle.py::"
    "test_ctrl_c_ends_everything_despite_a_running_request_and_hanging_stores": (
        "`make test` ends each deployment with Ctrl-C, and looks for what is left of it."
        " test_trie_store.py has a store that hangs."
    ),
    "integration/nodes/test_lifecycle.py::"
    "test_a_replica_with_an_idle_hanging_shard_is_replaced_when_its_counts_are_asked": (
        "`make test` has an engine core that hangs while a request runs."
    ),
    "integration/test_ends.py::test_no_signal_leaves_a_process_in_two_runs": (
        "`make test` ends one run with a signal to its group and one by killing it."
    ),
    "integration/test_ends.py::test_a_killed_daemon_ends_every_process": (
        "`make test` kills the process that the user started; daemons have unit tests."
    ),
    "integration/test_ends.py::test_haproxy_ends_with_its_actor_and_restarts_with_the_next": (
        "tests/serve/test_haproxy.py has the kernel end HAProxy with its parent."
    ),
    "integration/test_demo.py": (
        "A cluster of its own and two starts of the demo. `make test` has each of its sources, and"
        " compiled models in tests/integration/offline/test_exactness.py."
    ),
    "integration/test_toy_source.py": (
        "A source that only the test knows, in a cluster of its own. `make test` has the page"
        " name every source's labels, and the chain any source's drafts."
    ),
    "integration/served/test_speculation_page.py::test_the_page_is_readable[390-light]": (
        "`make test` has one width and colour scheme."
    ),
    "integration/served/test_speculation_page.py::test_the_page_is_readable[390-dark]": (
        "`make test` has one width and colour scheme."
    ),
    "integration/served/test_speculation_page.py::test_the_page_is_readable[1280-dark]": (
        "`make test` has one width and colour scheme."
    ),
    "integration/nodes/test_trie_store.py::"
    "test_a_store_killed_under_load_recovers_all_text_from_living_replicas[no snapshot]": (
        "`make test` has it with a snapshot."
    ),
    "integration/nodes/test_trie_store.py::"
    "test_text_of_stopped_replicas_is_restored_from_the_snapshot[SIGKILL]": (
        "`make test` has it with SIGTERM."
    ),
    "integration/nodes/test_trie_store.py::test_text_of_a_killed_replica_is_still_served": (
        "A host that is killed and started again. The store's log has unit tests."
    ),
    "integration/nodes/test_trie_store.py::"
    "test_a_damaged_snapshot_is_set_aside_and_the_memory_starts_empty": (
        "tests/trie/test_log_snapshot.py sets damaged files aside."
    ),
    "integration/nodes/test_trie_store.py::"
    "test_a_full_disk_fails_the_new_snapshot_and_keeps_the_old_one": (
        "tests/trie/test_snapshot_keeper.py has a snapshot that cannot be written."
    ),
    "integration/nodes/test_trie_store.py::"
    "test_unordered_repeated_and_out_of_vocabulary_records_do_no_harm": (
        "tests/trie/test_store.py has such records."
    ),
    "integration/nodes/test_trie_store.py::test_a_stopped_store_has_written_its_snapshot": (
        "`make test` stops one with `specserve trie stop`, and kills one with SIGTERM."
    ),
    "integration/nodes/test_trie_store.py::"
    "test_a_store_writes_a_last_snapshot_when_its_node_stops": (
        "A cluster of its own. `make test` has SIGTERM to the store itself."
    ),
    "integration/offline/test_agreement.py": (
        "Four engines, to compare our drafts with vLLM's. Changes with the lock or with"
        " specserve/drafters; the models have unit tests against transformers."
    ),
    "integration/offline/test_compare.py": (
        "Three engines for a command that tests/compare has unit tests of."
    ),
    "integration/offline/test_engine_commands.py": (
        "Two engines for commands that tests/generate and tests/bench have unit tests of, and that"
        " `make test` runs against a server."
    ),
    "integration/offline/test_evaluate.py": (
        "Four engines for a command that tests/evaluate has unit tests of;"
        " tests/engine/test_hugging_face.py generates with transformers."
    ),
    "integration/offline/test_shard_weights.py": (
        "Two engines of two shards each. tests/engine has unit tests of the files and the loader."
    ),
    "integration/offline/test_in_engine.py": (
        "A start of an engine. tests/engine/ has the samplers, and the worker that takes them."
    ),
    "integration/offline/test_sampling_is_unbiased.py::"
    "test_drafts_do_not_change_the_distribution[prediction]": (
        "A start of an engine. `make test` has it with ngram: one sampler verifies all drafts."
    ),
    "integration/offline/test_sampling_is_unbiased.py::"
    "test_drafts_do_not_change_the_distribution[grammar]": (
        "The same. `make test` has greedy texts with what a JSON schema forces."
    ),
    "integration/offline/test_quantized.py": (
        "Four starts of an engine. tests/engine/cpu/test_quantized.py has the rounded weights."
    ),
    "integration/test_served_quantized.py": (
        "A start of an engine. tests/engine/cpu/test_quantized.py has the rounded weights."
    ),
    "tools/demo_models/test_command.py::test_two_steps_end_with_two_measured_model_folders": (
        "A minute for one test. Corpus, training, export and card have unit tests beside it."
    ),
    "integration/offline/test_refused_drafters.py": (
        "Two engines that refuse to start. tests/sources and tests/drafters test the objections."
    ),
}
"""Part of `make test-all`."""

ALONE = {
    "integration/test_served_load.py": (
        "Measures throughput to 2 %: needs a quiet machine for ten minutes."
    ),
}
"""Not even part of `make test-all`: run by name, as CONTRIBUTING.md says."""


def tier(node_id: str) -> str:
    """The marker of a test: ``long``, ``alone``, or an empty string for `make test`.

    Args:
        node_id: of pytest, as ``tests/folder/test_file.py::test_name[parameter]``.
    """
    test = node_id.removeprefix("tests/")
    names = {test, test.partition("[")[0], test.partition("::")[0]}
    for name, rows in (("long", LONG), ("alone", ALONE)):
        if names & rows.keys():
            return name
    return ""

"""SECURITY.md: each promise stands there in these words, and has its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from roles_table import VERBS, filled, table

ROOT = Path(__file__).resolve().parents[2]
TEXT = " ".join((ROOT / "SECURITY.md").read_text(encoding="utf-8").split())
PROMISES = {
    "segments have mode 0600": "store/test_segments.py::test_wrong_mode",
    "sockets lie in a folder of mode 0700": (
        "remote/test_local_socket.py::test_lies_in_a_private_folder_and_goes_with_its_server"
    ),
    "the kernel says whose process connects": "remote/test_local_socket.py::test_another_user_is_not_let_in",
    "`pyps keys revoke` ends its sessions at once": (
        "remote/test_hostile.py::test_a_revoked_key_ends_its_sessions_at_once"
    ),
    "the bytes of calls and answers, counted before they are made": (
        "remote/test_bounds.py::test_answers_that_are_not_read_are_bounded"
    ),
    "keeps descriptors for the admitted": "remote/test_bounds.py::test_descriptors_are_kept_for_the_admitted",
    "is an error for its sender alone": "remote/test_hostile_keys.py::test_another_trains_on_exactly",
    "a push counts only with every server's receipt": (
        "shards/test_identities.py::test_a_commit_whose_parts_no_shard_was_sent_is_refused"
    ),
    "only a model that has lost a shard can be removed": (
        "shards/test_identities.py::test_a_head_whose_shards_are_there_stays"
    ),
    "connections, sessions, calls under way": (
        "remote/test_one_key.py::test_connections_of_one_key_leave_room_for_the_handshakes_of_others"
    ),
    "New workers of one key get at most half": (
        "remote/test_one_key.py::test_new_workers_of_one_key_leave_planned_ranks_theirs"
    ),
    "it joins as these ranks alone, and does not re-plan": (
        "remote/test_one_key.py::test_a_key_that_is_bound_to_ranks_joins_as_these_and_does_not_plan"
    ),
    "`remove_head` also needs a shard that is lost": (
        "shards/test_identities.py::test_a_head_whose_shards_are_there_stays"
    ),
    "at most 16,777,216 samples": "remote/test_one_key.py::test_a_plan_has_a_sane_bound",
    "removes the store that it made, never another": (
        "remote/test_one_key.py::test_a_server_that_ends_leaves_another_store_of_its_name"
    ),
    "a policy of your own needs `--policy` again": (
        "run/test_files_from_elsewhere.py::test_a_policy_is_imported_only_if_the_user_names_it"
    ),
    "remove no store but one of a run alone": (
        "run/test_files_from_elsewhere.py::test_a_store_that_run_json_names_is_not_removed"
    ),
    "A link or a pipe in a resumed folder is refused": (
        "run/test_files_from_elsewhere.py::test_a_link_in_a_resumed_folder_is_not_followed"
    ),
    "appends to nothing but journals": "c/test_c.py::test_what_is_wrong_is_an_error",
    "all who reach it can read and change the store": "remote/test_keys.py::test_an_insecure_server_says_so",
    "Key files must be yours": "remote/test_keys.py::test_what_another_user_owns_is_refused",
    "listens on loopback": "metrics/test_sinks.py::test_prometheus_serves_gauges_on_this_machine_alone",
    "its path is shown first": ("cli/test_foreign_text.py::test_a_start_that_fails_leaves_the_run_as_it_was"),
    "you have to name the script": (
        "cli/test_foreign_text.py::test_a_run_that_others_may_write_to_starts_no_script_of_its_own"
    ),
    "`--policy a.B`: imports module": "policy/test_custom.py::test_text_leads_to_it_and_to_nothing_else",
    "every field is checked": "cli/test_hostile_input.py::test_a_hundred_hostile_inputs",
    "never with pickle": "project/test_no_pickle.py::test_nothing_reads_pickles",
    "a pipe in place of one": "cli/test_foreign_text.py::test_a_pipe_in_place_of_a_file_is_refused_soon",
    "runs no code of its own": "torch/test_trainers.py::test_accelerate",
    "control characters in names, paths and keys are shown escaped": (
        "cli/test_foreign_text.py::test_names_of_a_file_reach_no_terminal_as_they_are"
    ),
    "the C core checks every field before it replays them": "c/test_fuzz.py::test_no_bytes_do_harm",
    "owner, mode, size and offsets are checked at opening": (
        "store/test_segments.py::test_damage_anywhere_is_an_error_or_harmless"
    ),
    "Another user's segment is refused": "store/test_segments.py::test_wrong_owner",
    "show the run's text escaped": "report/test_page.py::test_sections_findings_and_links",
}


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_stands_there_and_has_its_test(promise: str) -> None:
    assert promise in TEXT
    path, name = PROMISES[promise].split("::")
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_table_of_roles_is_that_of_the_code() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert filled(text) == text, "python tests/helpers/roles_table.py"
    assert all(f"`{name}`" in table() for name in VERBS)

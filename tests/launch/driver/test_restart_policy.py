"""What follows a failure."""

from collections.abc import Collection
from typing import Any

from raydali.launch.driver.restart_policy import LOOK_SECONDS, Decision, RestartPolicy
from raydali.run.events import Failure
from raydali.run.messages import WorkerError


def error(text: str, step: int, node: str = "a", **flags: Any) -> WorkerError:
    return WorkerError(rank=0, group="", step=step, node_id=node, error=text, **flags)


def failure(*killed: int, node: str = "a", starting: bool = False) -> Failure:
    places = dict.fromkeys(killed, (node, 4711))
    return Failure(ranks=killed, killed=killed, error="it died", places=places, starting=starting)


def policy(limit: int = -1, storage_timeout: float = 0, nodes: Collection[str] = "a", least: int = 1) -> RestartPolicy:
    """One for a cluster of these nodes, `least` of which suffice; its clock stands still."""
    return RestartPolicy(limit, storage_timeout, lambda out: len(set(nodes) - set(out)) >= least, lambda: now[0])


now = [0.0]


def test_an_error_that_recurs_on_the_only_node_ends_the_run() -> None:
    restarts = policy()
    decision = restarts.failed(failure(), [error("CUDA out of memory: tried 20 MiB, 1.5 GiB free", 41)])
    assert decision == Decision()
    restarts.group_started(20)
    decision = restarts.failed(failure(), [error("CUDA out of memory: tried 24 MiB, 0.9 GiB free", 41)])
    assert decision.stop_reason is not None and "step 41" in decision.stop_reason


def test_an_error_that_recurs_at_the_first_start_ends_the_run() -> None:
    restarts = policy(limit=10)
    assert restarts.failed(failure(), [error("No module named 'x'", 0)]).stop_reason is None
    assert restarts.failed(failure(), [error("No module named 'x'", 0)]).stop_reason is not None


def test_a_run_that_has_trained_waits_for_what_its_start_needs() -> None:
    restarts = policy()
    restarts.group_started(100_000)
    decisions = [restarts.failed(failure(), [error("no credentials", 0)]) for _ in range(5)]
    assert [each.stop_reason is None for each in decisions] == [True] * 4 + [False]
    assert sum(each.pause for each in decisions) > 300


def test_errors_at_other_steps_are_other_errors() -> None:
    restarts = policy()
    for step in range(1, 30):
        assert restarts.failed(failure(), [error("connection reset", step)]).stop_reason is None


def test_the_node_of_a_recurring_error_is_excluded_if_possible() -> None:
    restarts = policy(nodes="abc", least=2)
    lost = "CUDA error: the GPU has fallen off the bus"
    assert restarts.failed(failure(), [error(lost, 0, "b")]).leave_out == ()
    assert restarts.failed(failure(), [error(lost, 0, "b")]).leave_out == ("b",)
    assert restarts.left_out == ("b",)
    decision = restarts.failed(failure(), [error(lost, 0, "c")])
    assert decision.stop_reason is not None  # on another node as well: it is the code


def test_an_error_of_all_nodes_at_once_leaves_none_of_them_out() -> None:
    restarts = policy(nodes="abc")
    everywhere = [error("No module named 'x'", 0, node) for node in "ab"]
    assert restarts.failed(failure(), everywhere) == Decision()
    assert restarts.failed(failure(), everywhere).stop_reason is not None


def test_a_node_on_which_workers_die_twice_in_a_row_is_left_out() -> None:
    restarts = policy(nodes="ab")
    assert restarts.failed(failure(1, node="b"), []).leave_out == ()
    assert restarts.failed(failure(0, node="b"), []).leave_out == ("b",)
    restarts = policy(nodes="a")
    assert [restarts.failed(failure(1), []).leave_out for _ in range(3)] == [()] * 3  # it is the only one


def test_a_node_is_left_out_only_while_the_others_suffice() -> None:
    nodes = set("abc")
    restarts = RestartPolicy(-1, 0, lambda out: len(nodes - set(out)) >= 2, lambda: now[0])
    for _ in range(2):
        restarts.failed(failure(0, node="b"), [])
    assert restarts.left_out == ("b",) and not restarts.take_back()
    nodes.remove("c")
    assert not restarts.take_back(), "it looks at times"
    now[0] += LOOK_SECONDS
    assert restarts.take_back() and not restarts.left_out


def test_failures_count_while_the_run_gets_no_further() -> None:
    restarts = policy(limit=2)
    for step in (10, 20, 30, 40):
        restarts.group_started(step)
        assert restarts.failed(failure(0), []).stop_reason is None
        restarts.group_started(step)
        assert restarts.failed(failure(0), []).stop_reason is None
    why = restarts.failed(failure(0), []).stop_reason
    assert why is not None and "3 failures" in why and "step 40" in why and "--max-failures is 2" in why


def test_no_failure_may_be_allowed_and_any_number_may() -> None:
    assert policy(limit=0).failed(failure(0), []).stop_reason == "--max-failures is 0"
    restarts = policy(limit=-1)
    decisions = [restarts.failed(failure(0, starting=True), []) for _ in range(50)]
    assert all(each.stop_reason is None for each in decisions)


def test_pauses_grow_while_the_run_gets_no_further() -> None:
    restarts = policy()
    pauses = [restarts.failed(failure(0), []).pause for _ in range(6)]
    assert pauses == [0, 15, 60, 300, 300, 300]
    restarts.group_started(10)
    assert restarts.failed(failure(0), []).pause == 0


def test_a_storage_that_is_away_is_waited_for_and_not_counted() -> None:
    now[0] = 0
    restarts = policy(limit=0, storage_timeout=3600)
    away = [error("ESTALE", 5, storage=True), error("connection closed", 5)]
    pauses = []
    while (decision := restarts.failed(failure(), away)).stop_reason is None:
        assert decision.cause == "storage"
        pauses.append(decision.pause)
        now[0] += decision.pause + 60
    assert pauses[:6] == [30, 60, 120, 240, 300, 300] and now[0] >= 3600
    assert "--storage-timeout is 3600" in decision.stop_reason
    restarts = policy(limit=0, storage_timeout=3600)
    for _ in range(100):
        assert restarts.failed(failure(), away).pause == 30
        restarts.group_started(5)  # it answered for a while
        now[0] += 3600


def test_a_node_without_the_samples_is_excluded_at_once() -> None:
    restarts = policy(limit=0, nodes="ab")
    missing = [error("6 of 8 samples are missing", 0, "b", node_fault=True)]
    assert restarts.failed(failure(), missing) == Decision(leave_out=("b",), cause="node")
    assert policy(nodes="ab", least=2).failed(failure(), missing).stop_reason is not None


def test_the_node_of_a_wrong_rank_is_left_out_and_without_others_used_again() -> None:
    wrong = [error("weights of rank 1 are wrong", 40, "b", node_fault=True), error("ended", 40)]
    restarts = policy(limit=1, nodes="abc", least=2)
    assert restarts.failed(failure(), wrong) == Decision(leave_out=("b",), cause="node")
    restarts = policy(limit=1, nodes="ab", least=2)
    assert restarts.failed(failure(), wrong) == Decision()
    restarts.group_started(30)
    assert restarts.failed(failure(), [error("the disk is full", 50)]).stop_reason is None
    why = restarts.failed(failure(), [error("no memory", 35)]).stop_reason
    assert why is not None and "--max-failures is 1" in why

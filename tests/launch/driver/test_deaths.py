"""What is said of workers that died, on a real Ray."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import environment, nodes
from tests.support.messages import mentions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    home: Path = tmp_path_factory.mktemp("user")
    with nodes(environment(home), home / "ray", ["2"]) as (using, ids):
        import ray

        os.environ["RAY_AUTH_MODE"] = using["RAY_AUTH_MODE"]
        ray.init(using["RAY_ADDRESS"], log_to_driver=False)
        yield ids
        ray.shutdown()


def killed_by(number: int) -> tuple[tuple[str, int], str]:
    """Where an actor ran that a signal ended, and Ray's account of it."""
    import ray

    @ray.remote
    class Worker:
        def place(self) -> tuple[str, int]:
            return ray.get_runtime_context().get_node_id(), os.getpid()

        def wait(self) -> None:
            signal.pause()

    worker: Any = Worker.remote()  # type: ignore[attr-defined]
    place: tuple[str, int] = ray.get(worker.place.remote())
    waiting = worker.wait.remote()
    os.kill(place[1], number)
    with pytest.raises(ray.exceptions.RayActorError) as died:
        ray.get(waiting)
    return place, str(died.value)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "crashed: SIGSEGV")])
def test_rank_node_process_and_signal_are_said_on_one_line(cluster: list[str], number: int, said: str) -> None:
    from raydali.launch.driver.endings import describe_deaths

    place, error = killed_by(number)
    text = describe_deaths([3], {3: place}, error)
    assert f"rank 3 (process {place[1]}) on node {cluster[0][:8]}" in text and said in text
    assert "\n" not in text and len(text) < 160


@pytest.mark.usefixtures("cluster")
def test_only_what_is_known_of_a_sigkill_is_said() -> None:
    """The kernel counts the processes that it has killed because memory ran out."""
    from raydali.launch.driver.endings import describe_deaths

    place, error = killed_by(signal.SIGKILL)
    counter = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    known = counter is not None and counter[1] == "0"
    assert mentions(describe_deaths([3], {3: place}, error), f"SIGKILL person {'not' if known else 'when'} memory")


@pytest.mark.usefixtures("cluster")
def test_ranks_of_a_node_that_is_gone_are_said_together(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from raydali.launch.driver.endings import describe_deaths

    gone = {rank: ("0123456789abcdef", rank) for rank in range(12)}
    text = describe_deaths(list(range(12)), gone, "the actor died")
    assert text.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more on node 01234567") and "gone" in text
    assert describe_deaths([5], {}, "the actor died") == "the actor died"
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "ab" * 28, "Alive": True}])  # as long as Ray believes it
    dying = {3: ("ab" * 28, 1)}
    assert mentions(describe_deaths([3], dying, "the actor died"), "rank 3 node")
    assert "SIGKILL" not in describe_deaths([3], dying, "the actor died")
    assert mentions(describe_deaths([3], gone, "the actor died", hung={gone[3]}), "rank 3 killed")

"""Drains this machine's Ray node when its cloud announces that it takes the machine away.

Ray Train learns of a preemption only from Ray, as a drain of the node, and nothing in Ray 2.60 reads the notices of
AWS and Google Cloud. The files for `ray up` start this on each machine: `python -m raydali.spot_notices aws`, or `gcp`.
On machines that are not preemptible no notice ever comes. The process ends with the node, or once the node is draining.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable
from datetime import datetime
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

POLL_SECONDS = 5.0
"""The interval that AWS advises; also the pause after an error."""
GCP_POLL_SECONDS = 30
"""For how long Google's server holds a request that waits for a change."""
GCP_NOTICE_SECONDS = 30
"""From Google's notice to the end of the machine."""
REQUEST_SECONDS = 10

_log = logging.getLogger(__name__)
_opener = build_opener(ProxyHandler({}))  # a metadata server is never behind a proxy


class Aws:
    """EC2, by version 2 of its metadata service: a notice comes two minutes before the end.

    Args:
        url: of the metadata server.

    Attributes:
        pause: seconds between two calls of `deadline`.
    """

    pause = POLL_SECONDS

    def __init__(self, url: str = "http://169.254.169.254") -> None:
        self._url = url

    def deadline(self) -> float | None:
        """Return when the machine is taken away, in seconds since 1970; None without a notice.

        Raises:
            Exception: the server does not answer, or not as documented.
        """
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        token, _ = _request(Request(f"{self._url}/latest/api/token", method="PUT", headers=ttl))
        path = "/latest/meta-data/spot/instance-action"
        try:
            notice, _ = _request(Request(self._url + path, headers={"X-aws-ec2-metadata-token": token}))
        except HTTPError as error:
            if error.code == 404:
                return None
            raise
        return datetime.fromisoformat(json.loads(notice)["time"]).timestamp()


class Gcp:
    """Compute Engine, whose server answers at the moment of the notice: half a minute before the end.

    Args:
        url: of the metadata server.
    """

    pause = 1.0

    def __init__(self, url: str = "http://metadata.google.internal") -> None:
        self._url = url
        self._etag = ""

    def deadline(self) -> float | None:
        """Return it as `Aws` does; every call but the first waits for a change, for at most `GCP_POLL_SECONDS`."""
        path = "/computeMetadata/v1/instance/preempted"
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={GCP_POLL_SECONDS}&last_etag={self._etag}"
        request = Request(self._url + path, headers={"Metadata-Flavor": "Google"})
        preempted, self._etag = _request(request, GCP_POLL_SECONDS + REQUEST_SECONDS)
        if preempted.strip() != "TRUE":
            return None
        self._etag = ""  # the next poll must not wait
        return time.time() + GCP_NOTICE_SECONDS


CLOUDS: dict[str, type[Aws] | type[Gcp]] = {"aws": Aws, "gcp": Gcp}


def _request(request: Request, seconds: float = REQUEST_SECONDS) -> tuple[str, str]:
    """The body and the ETag of the answer."""
    with _opener.open(request, timeout=seconds) as reply:
        return reply.read().decode(), reply.headers.get("ETag", "")


def watch(metadata: Aws | Gcp, alive: Callable[[], bool], drain: Callable[[float], None]) -> None:
    """Poll until the node is draining, or gone. Errors are logged, and the next poll comes as usual.

    Args:
        metadata: gives the notice.
        alive: whether the node is still there.
        drain: makes the node drain, given its deadline in seconds since 1970; may raise anything.
    """
    failed = ""
    while alive():
        try:
            deadline = metadata.deadline()
            if deadline is not None:
                drain(deadline)
                _log.info("draining: the machine is taken away in %.0f s", deadline - time.time())
                return
            failed, pause = "", metadata.pause
        except Exception as error:
            if failed != str(error):  # once, not every few seconds
                _log.warning("%s: %s", type(error).__name__, error)
            failed, pause = str(error), POLL_SECONDS
        time.sleep(pause)
    _log.info("the node is gone")


def nodes_of_this_machine() -> set[str]:
    """Ids of the Ray nodes whose processes run here."""
    from ray._private import services

    return set(services.find_node_ids())


def drain(address: str, node_id: str, deadline: float) -> None:
    """Do as `ray drain-node` does: the node takes no more work, and its users learn the deadline.

    Args:
        address: of the cluster's head, as host:port.
        node_id: of the node, in hexadecimal.
        deadline: when the node ends, in seconds since 1970.

    Raises:
        RuntimeError: Ray does not accept it.
    """
    import ray
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

    gcs = ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
    accepted, why = gcs.drain_node(
        node_id,
        DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "the cloud takes the machine away",
        int(deadline * 1000),
        timeout=REQUEST_SECONDS,
    )
    if not accepted:
        raise RuntimeError(f"the node {node_id} does not drain: {why}")


def main() -> None:
    """Parse the command line, and watch."""
    parser = argparse.ArgumentParser(prog="python -m raydali.spot_notices", description=__doc__)
    parser.add_argument("cloud", choices=CLOUDS)
    parser.add_argument("--metadata-url", help="of the metadata server; default: the cloud's own")
    parser.add_argument("--address", help="of the cluster's head, as host:port; default: the cluster of this machine")
    parser.add_argument("--node-id", help="of the Ray node to drain; default: the only one of this machine")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    from ray._private import services

    node_ids = {options.node_id} if options.node_id else nodes_of_this_machine()
    if len(node_ids) != 1:
        parser.error(f"{len(node_ids)} Ray nodes run on this machine: start one, or name one with --node-id")
    (node_id,) = node_ids
    address = services.canonicalize_bootstrap_address_or_die(options.address)
    _log.info("waiting for a notice of %s, to drain the node %s of %s", options.cloud, node_id, address)
    metadata = CLOUDS[options.cloud](*[options.metadata_url] if options.metadata_url else [])
    watch(metadata, lambda: node_id in nodes_of_this_machine(), lambda deadline: drain(address, node_id, deadline))


if __name__ == "__main__":
    main()

"""cluster/kuberay/: rendered as kustomize would, and as it promises. test_kuberay_schemas.py: what KubeRay takes."""

import re
import shlex
import shutil
import subprocess

import pytest
import tyro
import yaml

from jobs.imagenet import Config
from raydali.commands.cluster import HEAD_ENVIRONMENT
from tests.support.cluster import ROOT
from tests.support.manifests import FOLDER, KINDS, VARIANTS, Manifest, clusters, containers, manifest, render


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_it_renders_as_kustomize_does(variant: str) -> None:
    tool = next((tool for tool in ("kustomize", "kubectl") if shutil.which(tool)), None)
    if tool is None:
        pytest.skip("needs kustomize or kubectl")
    command = [tool, "build"] if tool == "kustomize" else [tool, "kustomize"]
    done = subprocess.run([*command, FOLDER / variant], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    def by_kind(manifests: list[Manifest]) -> list[Manifest]:
        return sorted(manifests, key=lambda each: str(each["kind"]))

    assert by_kind(list(yaml.safe_load_all(done.stdout))) == by_kind(render(FOLDER / variant))


def gibibytes(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([GM]i)", quantity).groups()  # type: ignore[union-attr]
    return int(number) / (1 if unit == "Gi" else 1024)


def test_the_job_cleans_up_and_tries_again_from_storage_outside(variant: str) -> None:
    spec = manifest(variant, "RayJob")["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] > 0 and spec["backoffLimit"] > 0
    assert spec["activeDeadlineSeconds"] >= 7 * 24 * 3600
    script, *options = shlex.split(spec["entrypoint"].removeprefix("python "))
    assert script == "/opt/raydali/jobs/imagenet.py"
    assert "COPY jobs /opt/raydali/jobs" in (ROOT / "cluster/Dockerfile").read_text()
    config = tyro.cli(Config, args=options, config=(tyro.conf.DisallowNone,))  # as the job itself would read them
    assert config.storage.startswith("s3://") and config.name, "a new cluster must find the run by its name"
    assert config.checkpoint_every and config.max_failures and config.gpu

    group = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    resources = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus, cpus = int(resources["nvidia.com/gpu"]), int(resources["cpu"])
    assert config.worker_range is not None and config.cpus_per_worker is not None
    assert config.worker_range == ((8, 8) if variant == "kueue" else (gpus, group["maxReplicas"] * gpus))
    assert group["maxReplicas"] * gpus == config.worker_range[1]
    assert config.cpus_per_worker * gpus <= cpus


def test_the_head_schedules_no_workers_and_workers_have_gpus(variant: str) -> None:
    for cluster in clusters(variant):
        head = cluster["headGroupSpec"]
        assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"
        assert head["serviceType"] == "ClusterIP" and "enableIngress" not in head
        (group,) = cluster["workerGroupSpecs"]
        pod = group["template"]["spec"]
        (worker,) = pod["containers"]
        requests = worker["resources"]["requests"]
        assert gibibytes(requests.pop("ephemeral-storage")) > 0  # a limit would end pods that use what nobody needs
        assert worker["resources"]["limits"] == requests
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == "4"
        assert "nvidia.com/gpu" not in str(head)
        assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_shared_memory_holds_the_object_store_and_more(variant: str) -> None:
    for cluster in clusters(variant):
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = group["template"]["spec"]
            (container,) = pod["containers"]
            (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/dev/shm"]
            (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
            assert volume["emptyDir"]["medium"] == "Memory"
            size, memory = (
                gibibytes(volume["emptyDir"]["sizeLimit"]),
                gibibytes(container["resources"]["limits"]["memory"]),
            )
            store = int(group["rayStartParams"].get("object-store-memory", 0)) / 2**30 or 0.3 * memory  # Ray's default
            assert store < size < memory / 2
            if "object-store-memory" in group["rayStartParams"]:
                assert size - store >= 8 * int(container["resources"]["limits"]["nvidia.com/gpu"])  # NCCL, loaders


def test_a_token_is_needed(variant: str) -> None:
    for cluster in clusters(variant):
        assert cluster["authOptions"] == {"mode": "token", "secretName": "raydali-auth-token"}
    rendered = render(FOLDER / variant)
    assert not [each for each in rendered if each["kind"] == "Secret"], "no secret in a file"
    assert {each["kind"] for each in rendered} == {"ServiceAccount", "NetworkPolicy", "PodDisruptionBudget", *KINDS}
    told = [entry for container in containers(rendered) for entry in container.get("env", [])]
    assert {entry["name"] for entry in told} <= HEAD_ENVIRONMENT.keys()


def test_heads_give_up_nodes_soon_and_stop_jobs_late(variant: str) -> None:
    for cluster in clusters(variant):
        (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
        assert {entry["name"]: entry["value"] for entry in head["env"]} == HEAD_ENVIRONMENT


def test_ports_without_a_token_admit_only_the_clusters_pods(variant: str) -> None:
    policy = manifest(variant, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    ours = policy["podSelector"]["matchLabels"]
    for cluster in clusters(variant):
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            assert group["template"]["metadata"]["labels"] == ours  # KubeRay adds others
    within, others = policy["ingress"]
    assert within == {"from": [{"podSelector": policy["podSelector"]}]}  # all ports; of this namespace
    assert others == {"ports": [{"port": 8265}, {"port": 8080}]}  # the dashboard asks for the token


def test_workers_share_a_zone_and_heads_stay_where_they_are(variant: str) -> None:
    for cluster in clusters(variant):
        (group,) = cluster["workerGroupSpecs"]
        labels = group["template"]["metadata"]["labels"]
        (preferred,) = group["template"]["spec"]["affinity"]["podAffinity"].values()
        term = {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": {"matchLabels": labels}}
        assert preferred == [{"weight": 100, "podAffinityTerm": term}]
        budget = manifest(variant, "PodDisruptionBudget")["spec"]
        # KubeRay adds the other label. For pods of others' kinds, Kubernetes takes minAvailable as a number alone.
        assert budget == {"minAvailable": 1, "selector": {"matchLabels": labels | {"ray.io/node-type": "head"}}}


def test_nothing_runs_as_root(variant: str) -> None:
    pods = [manifest(variant, "RayJob")["spec"]["submitterPodTemplate"]["spec"]]
    for cluster in clusters(variant):
        groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        pods += [group["template"]["spec"] for group in groups]
    for pod in pods:
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] == context["runAsGroup"] == 1000
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    everything = render(FOLDER / variant)
    securities = [container["securityContext"] for container in containers(everything)]
    securities += [
        each["autoscalerOptions"]["securityContext"] for each in clusters(variant) if "autoscalerOptions" in each
    ]
    for security in securities:
        assert security == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert "USER 1000:1000" in (ROOT / "cluster/Dockerfile").read_text()


def test_pods_are_probed_and_end_in_order(variant: str) -> None:
    for cluster in clusters(variant):
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = group["template"]["spec"]
            (container,) = pod["containers"]
            for name in ("livenessProbe", "readinessProbe"):
                assert container[name]["httpGet"] == {"path": "/api/healthz", "port": 52365}
            assert container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"] == 600
            assert pod["terminationGracePeriodSeconds"] >= 60
            assert "command" not in container and "args" not in container  # else `ray start` were not process 1
            annotations = group["template"]["metadata"]["annotations"]
            assert annotations == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def test_what_runs_is_of_the_versions_in_the_lock(variant: str) -> None:
    ray = re.search(r"^ray==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert ray and all(cluster["rayVersion"] == ray[1] for cluster in clusters(variant))
    images = {container["image"] for container in containers(render(FOLDER / variant))}
    (tag,) = {image.rpartition(":")[2] for image in images}
    for cloud in ("aws", "gcp"):
        assert f"/raydali:{tag}\n" in (ROOT / f"cluster/{cloud}.yaml").read_text()


def test_autoscaling_is_v2_where_nobody_else_counts_machines() -> None:
    for variant in ("base", "volcano"):
        for cluster in clusters(variant):
            assert cluster["enableInTreeAutoscaling"] is True
            assert cluster["autoscalerOptions"]["version"] == "v2"
            assert cluster["autoscalerOptions"]["idleTimeoutSeconds"] == 300
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                assert group["template"]["spec"]["restartPolicy"] == "Never"  # v2's condition
    for cluster in clusters("base"):
        assert cluster["workerGroupSpecs"][0]["minReplicas"] == 0 < cluster["workerGroupSpecs"][0]["maxReplicas"]


def test_kueue_queues_a_job_with_a_fixed_number_of_machines() -> None:
    for kind in KINDS:
        assert manifest("kueue", kind)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "raydali"
    assert manifest("kueue", "RayJob")["spec"]["suspend"] is True
    for cluster in clusters("kueue"):
        assert cluster["enableInTreeAutoscaling"] is False and "autoscalerOptions" not in cluster
        (group,) = cluster["workerGroupSpecs"]
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2
        assert "suspend" not in cluster


def test_volcano_gets_a_gang() -> None:
    for kind in KINDS:
        assert manifest("volcano", kind)["metadata"]["labels"]["volcano.sh/queue-name"] == "raydali"
    for cluster in clusters("volcano"):
        (group,) = cluster["workerGroupSpecs"]
        assert group["replicas"] == group["minReplicas"] == 2 < group["maxReplicas"]


def test_names_are_short_enough_for_kuberay() -> None:
    for kind in KINDS:
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", manifest("base", kind)["metadata"]["name"])

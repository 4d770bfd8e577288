"""The Kubernetes files: rendered by kubectl, held against the API's schemas and our programs."""

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from heterps import cli
from heterps.home import certs

ROOT = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
OVERLAYS = ("base", "overlays/gpu", "overlays/monitoring", "overlays/full")
VERSION = "1.32"
UNKNOWN = "--no-such-option"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def tool(name):
    found = shutil.which(name) or str(Path(sys.executable).with_name(name))
    if not Path(found).exists():
        pytest.skip(f"{name} is not there; it comes with the dev extra")
    return found


def rendered(folder):
    done = subprocess.run(
        [tool("kubectl"), "kustomize", ROOT / folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def full():
    return rendered("overlays/full")


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    """Keys of each secret that the README's own commands make, and where its files were made."""
    folder = tmp_path_factory.mktemp("secrets")
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    made = next(line for line in text.splitlines() if line.startswith("heterps certs "))
    words = shlex.split(made.removeprefix("heterps certs certs "))
    assert cli.main(["certs", str(folder / "certs"), *words]) == 0
    for name in ("metrics-token", "redis-password"):
        assert f"> certs/{name}\n" in text
        (folder / "certs" / name).write_text("0" * 48)
    keys = {}
    for line in text.splitlines():
        if line.startswith("kubectl --namespace heterps create secret"):
            argv = [tool("kubectl"), *shlex.split(line)[1:], "--dry-run=client", "--output=yaml"]
            done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
            secret = yaml.safe_load(done.stdout)
            keys[secret["metadata"]["name"]] = set(secret["data"])
    return keys, folder / "certs"


def of_kind(documents, *kinds):
    return {d["metadata"]["name"]: d for d in documents if d["kind"] in kinds}


def workloads(documents):
    return of_kind(documents, "Deployment", "StatefulSet")


def pod(workload):
    return workload["spec"]["template"]["spec"]


def container(workload):
    (only,) = pod(workload)["containers"]
    return only


def labels(workload):
    return workload["spec"]["template"]["metadata"]["labels"]


def matches(selector, found):
    return selector["matchLabels"].items() <= found.items()


def problems(documents):
    from kubernetes_validate import ValidationError, validate

    found = []
    for document in documents:
        try:
            validate(document, VERSION, strict=True)
        except ValidationError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("folder", OVERLAYS)
def test_every_overlay_renders_and_is_what_the_api_expects(folder):
    pytest.importorskip("kubernetes_validate", reason="it comes with the dev extra")
    documents = rendered(folder)
    assert problems(documents) == []
    assert ("node-gpu" in workloads(documents)) == (folder in ("overlays/gpu", "overlays/full"))
    assert {d["metadata"].get("namespace") for d in documents if d["kind"] != "Namespace"} == {
        "heterps"
    }


def test_the_validator_does_validate(full):
    pytest.importorskip("kubernetes_validate", reason="it comes with the dev extra")
    broken = workloads(full)["ps"]
    text = yaml.safe_dump(broken)
    assert problems([yaml.safe_load(text)]) == []
    for old, new in (("replicas: 2", "replicas: two"), ("volumeMounts:", "volumeMount:")):
        assert old in text
        assert problems([yaml.safe_load(text.replace(old, new))])


def test_commands_are_the_real_ones(full, capsys):
    ours = [w for w in workloads(full).values() if container(w)["image"].startswith("heterps")]
    assert len(ours) == 4
    for workload in ours:
        assert "command" not in container(workload), "the image's entry point is heterps"
        assert cli.main([*container(workload)["args"], UNKNOWN]) == 2
        assert capsys.readouterr().err.strip().endswith(f"unrecognized arguments: {UNKNOWN}")


def option(args, name):
    for index, word in enumerate(args):
        if word == name:
            return args[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def test_ports_are_those_that_the_programs_listen_on(full):
    services = of_kind(full, "Service")
    for name, workload in workloads(full).items():
        ports = {p["name"]: p["containerPort"] for p in container(workload)["ports"]}
        args = container(workload).get("args", [])
        if bind := option(args, "--bind"):
            assert ports["grpc"] == int(bind.rpartition(":")[2])
            assert ports["metrics"] == int(option(args, "--metrics").rpartition(":")[2])
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                command = container(workload)[probe]["exec"]["command"]
                assert command == ["heterps-health", str(ports["grpc"])]
        service = services[name]
        assert service["spec"]["selector"].items() <= labels(workload).items()
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]


def test_names_that_programs_call_are_services(full):
    ports = {
        n: [p["port"] for p in s["spec"]["ports"]] for n, s in of_kind(full, "Service").items()
    }
    config = next(
        c["data"] for n, c in of_kind(full, "ConfigMap").items() if "HETERPS_HOME" in c["data"]
    )
    called = [config["HETERPS_SCHEDULER"]]
    for workload in workloads(full).values():
        if scheduler := option(container(workload).get("args", []), "--scheduler"):
            called.append(scheduler)
        for variable in container(workload).get("env", []):
            called += re.findall(r"@([a-z]+:\d+)/", variable.get("value", ""))
    assert len(called) == 5
    for address in called:
        name, _, port = address.partition(":")
        assert int(port) in ports[name], address
    scrape = yaml.safe_load((ROOT / "components/monitoring/scrape.yaml").read_text())
    (found,) = scrape["scrape_configs"][0]["dns_sd_configs"]
    assert {n for n, p in ports.items() if 9400 in p} == set(found["names"])
    assert found["port"] == 9400


def test_redis_is_spoken_to_with_tls_and_a_password(full):
    (url,) = [e["value"] for e in container(workloads(full)["scheduler"])["env"] if "value" in e]
    assert url.startswith("rediss://:$(REDIS_PASSWORD)@redis:6379")
    script = (ROOT / "base/redis.sh").read_text()
    assert "\nport 0\n" in script
    assert "\ntls-port 6379\n" in script
    assert "requirepass $REDIS_PASSWORD" in script
    for name in ("redis.sh", "redis-health.sh"):
        subprocess.run(["sh", "-n", ROOT / "base" / name], check=True)


def test_the_certificate_names_every_server(full, secrets):
    named = certs.names((secrets[1] / "server.pem").read_bytes())
    for name, workload in workloads(full).items():
        if name == "prometheus":
            continue
        advertised = option(container(workload).get("args", []), "--advertise") or name
        namespace = workload["metadata"]["namespace"]
        host = advertised.replace("$(POD_NAME)", f"{name}-0").replace("$(POD_NAMESPACE)", namespace)
        assert any(fnmatch.fnmatch(host, pattern) for pattern in named), host
    for workload in of_kind(full, "StatefulSet").values():
        assert workload["spec"]["serviceName"] == workload["metadata"]["name"]


def test_what_is_referred_to_exists(full, secrets):
    claims, maps = of_kind(full, "PersistentVolumeClaim"), of_kind(full, "ConfigMap")
    keys = secrets[0]
    read = set()
    for workload in workloads(full).values():
        mounts = {m["name"] for m in container(workload)["volumeMounts"]}
        made = {v["metadata"]["name"] for v in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {v["name"]: v for v in pod(workload)["volumes"]}
        assert mounts == made | volumes.keys()
        for volume in volumes.values():
            if "secret" in volume:
                items = {i["key"] for i in volume["secret"].get("items", [])}
                assert items <= keys[volume["secret"]["secretName"]]
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
        for variable in container(workload).get("env", []):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert reference["key"] in keys[reference["name"]]
        for source in container(workload).get("envFrom", []):
            data = maps[source["configMapRef"]["name"]]["data"]
            read |= {path for path in data.values() if path.startswith("/certs/")}
    assert {Path(path).name for path in read} <= keys["heterps-tls"]


def test_the_token_that_starts_jobs_is_not_prometheuses(full):
    (volume,) = [v for v in pod(workloads(full)["prometheus"])["volumes"] if "secret" in v]
    assert {i["key"] for i in volume["secret"]["items"]} == {"ca.pem", "metrics-token"}


def test_every_pod_gives_up_what_it_can_do_without(full):
    for workload in workloads(full).values():
        context = pod(workload)["securityContext"]
        assert context["runAsNonRoot"]
        assert context["runAsUser"] == 10001
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod(workload)["automountServiceAccountToken"] is False
        assert container(workload)["securityContext"] == RESTRICTED
        assert container(workload)["resources"]["limits"].keys() >= {"cpu", "memory"}
        for volume in pod(workload)["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
    (namespace,) = of_kind(full, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_units_are_what_the_pod_may_use(full):
    cpu, gpu = (container(workloads(full)[name]) for name in ("node-cpu", "node-gpu"))
    assert option(cpu["args"], "--units") == cpu["resources"]["limits"]["cpu"]
    assert option(gpu["args"], "--units") == gpu["resources"]["limits"]["nvidia.com/gpu"]
    assert option(gpu["args"], "--device") == "cuda"


def test_shards_keep_their_place_and_the_scheduler_is_one(full):
    everything = workloads(full)
    scheduler, shards = everything["scheduler"], everything["ps"]
    assert (scheduler["kind"], scheduler["spec"]["replicas"]) == ("Deployment", 1)
    assert scheduler["spec"]["strategy"] == {"type": "Recreate"}
    assert shards["kind"] == "StatefulSet"
    assert pod(shards)["terminationGracePeriodSeconds"] >= 60
    (claim,) = shards["spec"]["volumeClaimTemplates"]
    assert f"--data=/{claim['metadata']['name']}" in container(shards)["args"]
    (budget,) = of_kind(full, "PodDisruptionBudget").values()
    assert matches(budget["spec"]["selector"], labels(shards))
    for name in ("ps", "node-cpu"):
        (term,) = pod(everything[name])["affinity"]["podAntiAffinity"].popitem()[1]
        assert matches(term["podAffinityTerm"]["labelSelector"], labels(everything[name]))


def may_call(documents, source, target, port):
    """Whether the network policies let pods of one workload call a port of another's."""
    policies = list(of_kind(documents, "NetworkPolicy").values())
    everything = workloads(documents)
    named = {p["name"]: p["containerPort"] for p in container(everything[target])["ports"]}

    def open_to(side, own, peer, direction):
        for policy in policies:
            spec = policy["spec"]
            if not policy_selects(spec["podSelector"], own):
                continue
            for rule in spec.get(side, []):
                ports = [named.get(p["port"], p["port"]) for p in rule.get("ports", [])]
                peers = [p for p in rule[direction] if "namespaceSelector" not in p]
                if any(matches(p["podSelector"], peer) for p in peers) and (
                    not ports or port in ports
                ):
                    return True
        return False

    a, b = labels(everything[source]), labels(everything[target])
    return open_to("egress", a, b, "to") and open_to("ingress", b, a, "from")


def policy_selects(selector, found):
    return not selector or matches(selector, found)


def test_policies_let_through_what_is_needed_and_nothing_else(full):
    for node in ("node-cpu", "node-gpu"):
        assert may_call(full, node, "scheduler", 7000)
        assert may_call(full, node, "ps", 7100)
        assert may_call(full, node, "ps", 7101), "bulk bytes"
        assert may_call(full, node, "node-cpu", 40000), "stages choose their ports"
        assert may_call(full, "scheduler", node, 7200)
        assert not may_call(full, node, "redis", 6379)
        assert not may_call(full, node, "ps", 9400)
        assert may_call(full, "prometheus", node, 9400)
        assert not may_call(full, "prometheus", node, 7200)
    assert may_call(full, "scheduler", "redis", 6379)
    assert may_call(full, "scheduler", "ps", 7100)
    assert may_call(full, "ps", "scheduler", 7000)
    assert not may_call(full, "ps", "node-cpu", 7200)
    assert not may_call(full, "ps", "redis", 6379)
    assert not may_call(full, "redis", "scheduler", 7000)

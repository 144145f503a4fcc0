"""The files under deploy/kubernetes/ fit their schemas and agree with the Docker files, the CLI and the server."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml
from rq import Queue
from rq.registry import StartedJobRegistry

import swiftopt
from swiftopt.cli.main import LONG_NAMES, OTHER_VARIABLES, PREFIX, ProgramSettings, warn_misspelt
from swiftopt.cli.main import swiftopt as program
from swiftopt.client.chat import SESSION
from swiftopt.core.errors import SettingsError
from swiftopt.server.app import DRAIN_S, listen
from swiftopt.server.openapi import bare_app
from swiftopt.server.settings import KeyRing, ServerSettings

ROOT = Path(swiftopt.__file__).parent
FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
COMPOSE: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))[
    "services"
]
DOCKERFILE = (ROOT / "docker/Dockerfile.cpu").read_text(encoding="utf-8")
CUSTOM = {"keda.sh/v1alpha1": "ScaledObject", "monitoring.coreos.com/v1": "PodMonitor"}  # which no schema here knows
KNOWN = {
    *LONG_NAMES.values(),
    *(PREFIX + name for name in (*OTHER_VARIABLES, *map(str.upper, ProgramSettings.model_fields))),
}
OVERLAYS = ("base", "scaled", "gpu", "gpu-large")
GPU = "nvidia.com/gpu"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the files are read a hundred times
Object = dict[str, Any]


def objects(path: Path) -> list[Object]:
    return list(yaml.load_all(path.read_text(encoding="utf-8"), LOADER))


def files() -> list[Path]:
    return sorted(path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml")


def every_object() -> list[Object]:
    return [each for path in files() for each in objects(path)]


def named(kind: str, name: str) -> Object:
    (found,) = (each for each in every_object() if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def of_kind(kind: str) -> list[Object]:
    return [each for each in every_object() if each["kind"] == kind]


def pods() -> list[Any]:
    """Return the pod of each Deployment and StatefulSet by name."""
    found = [*of_kind("Deployment"), *of_kind("StatefulSet")]
    return [pytest.param(each["spec"]["template"], id=each["metadata"]["name"]) for each in found]


def pod(name: str) -> Object:
    (found,) = (each for each in [*of_kind("Deployment"), *of_kind("StatefulSet")] if each["metadata"]["name"] == name)
    template: Object = found["spec"]["template"]
    return template


def container(template: Object) -> Object:
    (found,) = template["spec"]["containers"]
    return dict(found)


def ours() -> list[Any]:
    return [pytest.param(pod(name), id=name) for name in ("swiftopt-server", "swiftopt-worker")]


def environment(template: Object) -> dict[str, str]:
    """Return the environment variables of a pod's only container."""
    entry = container(template)
    own = {each["name"]: each["value"] for each in entry.get("env", ())}
    names = [each["configMapRef"]["name"] for each in entry.get("envFrom", ())]
    shared = [named("ConfigMap", name)["data"] for name in names]
    return {**{key: value for values in shared for key, value in values.items()}, **own}


def mounted(template: Object) -> Iterator[str]:
    """Return the paths of the files that secrets mount in the pod's container."""
    secrets = {each["name"]: each["secret"]["secretName"] for each in template["spec"]["volumes"] if "secret" in each}
    for mount in container(template)["volumeMounts"]:
        if mount["name"] in secrets:
            for key in named("Secret", secrets[mount["name"]])["stringData"]:
                yield f"{mount['mountPath']}/{key}"


# --- what schemas say


def validate(value: Object) -> None:
    kubernetes_validate.validate(value, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(FOLDER)))
def test_objects_fit_the_kubernetes_schemas(path: Path) -> None:
    for each in objects(path):
        if CUSTOM.get(each["apiVersion"]) != each["kind"]:
            validate(each)


def of_the_manual() -> dict[str, Object]:
    """Return the objects in docs/operations.md by kind."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = [each for block in blocks for each in yaml.safe_load_all(block)]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def test_gateways_in_the_manual_route_a_chat_to_one_replica() -> None:
    """They hash the header that the client sends, and the services that they name exist."""
    shown = of_the_manual()
    route, policy, rule = (shown[kind] for kind in ("HTTPRoute", "BackendTrafficPolicy", "DestinationRule"))
    (service,) = named("Service", "swiftopt")["spec"]["ports"]
    (backend,) = (each for rules in route["spec"]["rules"] for each in rules["backendRefs"])
    assert backend == {"name": "swiftopt", "port": service["port"]}
    group = route["apiVersion"].partition("/")[0]
    assert policy["spec"]["targetRefs"] == [{"group": group, "kind": "HTTPRoute", "name": route["metadata"]["name"]}]
    balancer = policy["spec"]["loadBalancer"]
    assert balancer["type"] == "ConsistentHash"
    assert balancer["consistentHash"] == {"type": "Header", "header": {"name": SESSION.lower()}}
    by_header = {"consistentHash": {"httpHeaderName": SESSION.lower()}}
    assert rule["spec"]["trafficPolicy"]["loadBalancer"] == by_header
    namespace = named("Namespace", "swiftopt")["metadata"]["name"]
    assert rule["spec"]["host"] == f"{backend['name']}.{namespace}.svc.cluster.local"
    assert {each["metadata"]["namespace"] for each in (route, policy, rule)} == {namespace}


def test_ingress_in_the_manual_fits_the_schema_and_names_the_service() -> None:
    found = of_the_manual()["Ingress"]
    validate(found)
    (rule,) = found["spec"]["rules"]
    service = named("Service", rule["http"]["paths"][0]["backend"]["service"]["name"])
    assert [port["name"] for port in service["spec"]["ports"]] == ["http"]
    assert found["metadata"]["namespace"] == named("Namespace", "swiftopt")["metadata"]["name"]
    assert f"$http_{SESSION.lower().replace('-', '_')}" in found["metadata"]["annotations"]["nginx.org/lb-method"]


def test_schema_check_finds_a_mistake() -> None:
    wrong = named("Deployment", "swiftopt-server")
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        validate(wrong)


def test_custom_objects_have_the_fields_that_their_operators_require() -> None:
    (monitor,) = of_kind("PodMonitor")
    assert monitor["spec"]["selector"] and monitor["spec"]["podMetricsEndpoints"]
    scaled = of_kind("ScaledObject")
    assert {each["spec"]["scaleTargetRef"]["name"] for each in scaled} == {
        each["metadata"]["name"] for each in of_kind("Deployment")
    }
    required = {"prometheus": {"serverAddress", "query", "threshold"}, "redis": {"address", "listName", "listLength"}}
    for each in scaled:
        assert each["spec"]["minReplicaCount"] < each["spec"]["maxReplicaCount"] and each["spec"]["triggers"]
        for trigger in each["spec"]["triggers"]:
            assert required[trigger["type"]] == set(trigger["metadata"])
            assert all(isinstance(value, str) for value in trigger["metadata"].values())


@pytest.mark.parametrize("folder", OVERLAYS)
def test_kustomization_names_every_file_beside_it(folder: str) -> None:
    (found,) = objects(FOLDER / folder / "kustomization.yaml")
    assert (found["apiVersion"], found["kind"]) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
    assert found["namespace"] == named("Namespace", "swiftopt")["metadata"]["name"]
    resources = found["resources"]
    assert all((FOLDER / folder / name).exists() for name in resources)
    beside = {path.name for path in (FOLDER / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert {name for name in resources if name.endswith(".yaml")} == beside
    assert folder == "base" or resources[0] == ("../gpu" if folder == "gpu-large" else "../base")


def test_images_equal_those_of_compose() -> None:
    (base,) = objects(FOLDER / "base" / "kustomization.yaml")
    (image,) = base["images"]
    assert image["newTag"] == f"{VERSION}-cpu"
    ours = {container(pod(name))["image"] for name in ("swiftopt-server", "swiftopt-worker")}
    assert ours == {f"{image['name']}:{VERSION}-cpu"}
    assert container(pod("swiftopt-redis"))["image"] == COMPOSE["valkey"]["image"]


# --- what kustomize makes of a folder


def apply(found: Object, op: str, path: str, value: Any = None) -> None:
    """Apply an operation of a JSON patch; what it replaces, tests or removes must exist."""
    parent: Any = found
    *parts, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    for part in parts:
        parent = parent[int(part) if isinstance(parent, list) else part]
    if isinstance(parent, list):
        assert op in ("add", "replace", "test") and (op == "add") == (last == "-")
        if op == "add":
            parent.append(value)
            return
    key = int(last) if isinstance(parent, list) else last
    assert op == "add" or parent[key] is not None
    if op == "remove":
        del parent[key]
    elif op == "test":
        assert parent[key] == value
    else:
        parent[key] = value


def built(folder: Path) -> dict[tuple[str, str], Object]:
    """Return the patched objects of a kustomization by kind and name."""
    (found,) = objects(folder / "kustomization.yaml")
    made: dict[tuple[str, str], Object] = {}
    for name in found["resources"]:
        below = folder / name
        made |= (
            {(each["kind"], each["metadata"]["name"]): each for each in objects(below)}
            if below.is_file()
            else built(below.resolve())
        )
    for patch in found.get("patches", ()):
        target = patch["target"]
        chosen = [key for key in made if key[0] == target["kind"] and key[1] == target.get("name", key[1])]
        assert chosen, target
        for key in chosen:
            for operation in yaml.safe_load(patch["patch"]):
                apply(made[key], **operation)
    for image in found.get("images", ()):
        entries = [entry for each in made.values() for entry in containers(each) if image_name(entry) == image["name"]]
        assert entries, image
        for entry in entries:
            entry["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
    return made


def containers(each: Object) -> list[Object]:
    return list(each.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ()))


def image_name(entry: Object) -> str:
    return str(entry["image"].rpartition(":")[0])


@pytest.mark.parametrize("folder", OVERLAYS)
def test_output_of_kustomize_fits_the_schemas(folder: str) -> None:
    for each in built(FOLDER / folder).values():
        if CUSTOM.get(each["apiVersion"]) != each["kind"]:
            validate(each)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here to build the overlays with")
@pytest.mark.parametrize("folder", OVERLAYS)
def test_kustomize_output_equals_the_patched_objects(folder: str) -> None:
    command = ["kubectl", "kustomize", str(FOLDER / folder)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    assert printed.stderr == ""
    theirs = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(printed.stdout)}
    ours = built(FOLDER / folder)
    assert theirs.keys() == ours.keys()
    for key, each in theirs.items():
        assert each.get("spec") == ours[key].get("spec"), key
        assert each["metadata"].get("namespace") == (None if key[0] == "Namespace" else "swiftopt")


@pytest.mark.parametrize("folder", OVERLAYS)
def test_chart_may_wrap_what_kustomize_makes(folder: str) -> None:
    """Helm evaluates double braces, so objects in a chart must contain none."""
    assert "{{" not in yaml.safe_dump_all(built(FOLDER / folder).values())


def test_gpu_pods_request_one_gpu_each_and_select_gpu_nodes() -> None:
    made = built(FOLDER / "gpu")
    for name in ("swiftopt-server", "swiftopt-worker"):
        spec = made["Deployment", name]["spec"]
        entry = container(spec["template"])
        assert entry["resources"]["limits"][GPU] == "1"
        assert entry["image"].endswith(f"/swiftopt:{VERSION}-cuda")
        pod_spec = spec["template"]["spec"]
        assert pod_spec["runtimeClassName"] == "nvidia"
        assert pod_spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
        assert pod_spec["tolerations"] == [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}, "no GPU is free for one more"
        assert parsed([word.replace("$(MODEL)", "m") for word in entry["args"]])["device"] == "cuda:0"
    composed = yaml.safe_load((ROOT / "docker/compose.gpu.yaml").read_text(encoding="utf-8"))["services"]["worker"]
    told = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in composed["command"]]
    queue = environment(pod("swiftopt-worker"))["SWIFTOPT_QUEUE"]
    args = container(made["Deployment", "swiftopt-worker"]["spec"]["template"])["args"]
    assert parsed([*args, "--queue", queue]) == parsed(told)
    assert GPU not in str(made["StatefulSet", "swiftopt-redis"])


def test_model_larger_than_a_gpu_is_served_over_all_gpus_of_its_pod() -> None:
    made = built(FOLDER / "gpu-large")
    server, worker = (made["Deployment", name]["spec"] for name in ("swiftopt-server", "swiftopt-worker"))
    entry = container(server["template"])
    assert parsed([word.replace("$(MODEL)", "m") for word in entry["args"]])["device"] == "auto-map"
    assert entry["resources"]["limits"][GPU] == "2" and (server["replicas"], worker["replicas"]) == (1, 0)
    (models,) = (each for each in server["template"]["spec"]["volumes"] if each["name"] == "models")
    assert models["emptyDir"] == {"sizeLimit": "200Gi"}
    assert made["PodDisruptionBudget", "swiftopt-server"]["spec"]["minAvailable"] == 0, "a node can be drained"


# --- what runs


def parsed(words: list[str]) -> dict[str, Any]:
    """Parse a swiftopt command line and return the options that it sets."""
    context = click.Context(program, **program.context_settings)  # click keeps what a first context says of --help
    command = program.get_command(context, words[0])
    assert command is not None
    own = click.Context(command, parent=context)
    command.parse_args(own, words[1:])
    return own.params


def test_server_listens_on_the_port_of_its_service_and_probes() -> None:
    template = pod("swiftopt-server")
    entry = container(template)
    values = dict(environment(template))
    words = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in entry["args"]]
    options = parsed(words)
    assert options["models"] == (values["MODEL"],)
    (port,) = entry["ports"]
    assert (options["host"], options["port"]) == ("0.0.0.0", port["containerPort"])
    assert f"EXPOSE {port['containerPort']}" in DOCKERFILE
    (service,) = named("Service", "swiftopt")["spec"]["ports"]
    (endpoint,) = of_kind("PodMonitor")[0]["spec"]["podMetricsEndpoints"]
    assert service["targetPort"] == endpoint["port"] == port["name"]
    routes = bare_app().openapi()["paths"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        looked = entry[probe]["httpGet"]
        assert looked["path"] in routes and looked["port"] == port["name"]
    assert endpoint["path"] in routes
    assert entry["startupProbe"]["periodSeconds"] * entry["startupProbe"]["failureThreshold"] >= 1800


def test_worker_runs_the_command_of_compose() -> None:
    entry = container(pod("swiftopt-worker"))
    queue = environment(pod("swiftopt-worker"))["SWIFTOPT_QUEUE"]
    told = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in COMPOSE["worker"]["command"]]
    assert parsed([*entry["args"], "--queue", queue]) == parsed(told)
    assert entry["readinessProbe"]["exec"]["command"] == COMPOSE["worker"]["healthcheck"]["test"][1:]
    assert "livenessProbe" not in entry


def test_redis_runs_the_command_of_compose() -> None:
    entry = container(pod("swiftopt-redis"))
    told = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in COMPOSE["valkey"]["command"]]
    assert entry["args"] == told
    assert entry["readinessProbe"]["exec"]["command"][-1] == COMPOSE["valkey"]["healthcheck"]["test"][-1]
    most = entry["args"][entry["args"].index("--maxmemory") + 1]
    assert 2 * int(most.removesuffix("mb")) < int(entry["resources"]["limits"]["memory"].removesuffix("Mi"))


@pytest.mark.parametrize("template", ours())
def test_variables_are_known_and_point_to_mounted_secrets(template: Object) -> None:
    found = environment(template)
    assert list(warn_misspelt(found)) == []
    assert template["spec"]["enableServiceLinks"] is False  # else SWIFTOPT_PORT and others would come beside them
    files = {value for name, value in found.items() if name.endswith("_FILE")}
    assert files == set(mounted(template))
    assert set(found) - {"MODEL"} <= KNOWN
    assert found["SWIFTOPT_REDIS_URL"] == f"redis://{named('Service', 'swiftopt-redis')['metadata']['name']}:6379/0"


def test_example_secret_contains_no_usable_key(tmp_path: Path) -> None:
    """Nobody can forget to replace a key of the example."""
    file = tmp_path / "api_keys"
    file.write_text(named("Secret", "swiftopt-keys")["stringData"]["api_keys"], encoding="utf-8")
    with pytest.raises(SettingsError, match="no API key is set"):
        listen("0.0.0.0", 0, ServerSettings(keys=KeyRing(file=file)))
    assert "://swiftopt:PASSWORD@" in named("Secret", "swiftopt-database")["stringData"]["database_url"]


# --- how it ends and scales


def test_pods_have_time_to_finish_requests_in_flight() -> None:
    spec = pod("swiftopt-server")["spec"]
    command, seconds = container(pod("swiftopt-server"))["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep" and spec["terminationGracePeriodSeconds"] > int(seconds) + DRAIN_S
    rollout = named("Deployment", "swiftopt-server")["spec"]["strategy"]["rollingUpdate"]
    assert rollout == {"maxSurge": 1, "maxUnavailable": 0}


def test_worker_has_the_grace_period_of_compose() -> None:
    minutes = int(COMPOSE["worker"]["stop_grace_period"].removesuffix("m"))
    assert pod("swiftopt-worker")["spec"]["terminationGracePeriodSeconds"] == 60 * minutes


def test_workers_are_scaled_by_the_lists_of_rq() -> None:
    name = named("ConfigMap", "swiftopt")["data"]["SWIFTOPT_QUEUE"]
    scaled = named("ScaledObject", "swiftopt-worker")["spec"]
    triggers = {each["name"]: each["metadata"] for each in scaled["triggers"]}
    assert triggers["waiting"]["listName"] == Queue.redis_queue_namespace_prefix + name
    assert triggers["running"]["listName"] == StartedJobRegistry.key_template.format(name)
    formula = scaled["advanced"]["scalingModifiers"]["formula"]
    assert set(formula.split(" + ")) == set(triggers)
    service, namespace = (
        named(*each)["metadata"]["name"] for each in (("Service", "swiftopt-redis"), ("Namespace", "swiftopt"))
    )
    assert {each["address"] for each in triggers.values()} == {f"{service}.{namespace}.svc:6379"}


def test_scaled_deployments_have_no_number_of_replicas() -> None:
    (overlay,) = objects(FOLDER / "scaled" / "kustomization.yaml")
    (patch,) = overlay["patches"]
    assert patch["target"] == {"kind": "Deployment"}
    assert yaml.safe_load(patch["patch"]) == [{"op": "remove", "path": "/spec/replicas"}]
    assert {each["spec"]["scaleTargetRef"]["name"] for each in of_kind("ScaledObject")} == {
        each["metadata"]["name"] for each in of_kind("Deployment") if "replicas" in each["spec"]
    }


def test_selectors_match_their_pods() -> None:
    labels = {each.id: each.values[0]["metadata"]["labels"] for each in pods()}
    chosen = {
        "swiftopt": named("Service", "swiftopt")["spec"]["selector"],
        "swiftopt-redis": named("Service", "swiftopt-redis")["spec"]["selector"],
        **{each["metadata"]["name"]: each["spec"]["selector"]["matchLabels"] for each in of_kind("Deployment")},
    }
    assert {
        name: [pod for pod, own in labels.items() if wanted.items() <= own.items()] for name, wanted in chosen.items()
    } == {
        "swiftopt": ["swiftopt-server"],
        "swiftopt-redis": ["swiftopt-redis"],
        "swiftopt-server": ["swiftopt-server"],
        "swiftopt-worker": ["swiftopt-worker"],
    }
    for kind in ("PodDisruptionBudget", "PodMonitor"):
        (found,) = of_kind(kind)
        assert found["spec"]["selector"]["matchLabels"] == labels["swiftopt-server"]
    for policy in of_kind("NetworkPolicy"):
        assert policy["spec"]["podSelector"]["matchLabels"] == labels["swiftopt-redis"]


# --- safety


@pytest.mark.parametrize("template", pods())
def test_pods_are_hardened(template: Object) -> None:
    spec, entry = template["spec"], container(template)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert entry["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in entry["resources"]["limits"] and set(entry["resources"]["requests"]) == {"cpu", "memory"}


@pytest.mark.parametrize("template", ours())
def test_pods_run_as_the_images_user_with_its_writable_folders(template: Object) -> None:
    user = template["spec"]["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in DOCKERFILE and user["fsGroup"] == user["runAsGroup"]
    writable = {each["name"] for each in template["spec"]["volumes"] if "emptyDir" in each}
    paths = {mount["mountPath"] for mount in container(template)["volumeMounts"] if mount["name"] in writable}
    (cache,) = re.findall(r"SWIFTOPT_CACHE_DIR=(\S+)", DOCKERFILE)
    assert paths == {cache, "/tmp"}


def test_applied_objects_contain_no_secret() -> None:
    applied = [path for path in files() if path.parent != FOLDER]
    assert not any(each["kind"] == "Secret" for path in applied for each in objects(path))
    for path in applied:
        assert re.findall(r"://[^\s/]*:[^\s/]*@", path.read_text(encoding="utf-8")) == []

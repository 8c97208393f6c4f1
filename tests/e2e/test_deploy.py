"""deploy/: the chart is linted and rendered by Helm itself, its objects are checked against Kubernetes' schemas, its
configuration by Kindred, and what its dashboard and autoscaler ask for by what a router exposes."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from cluster import BINARY, ROOT, Server, chat, free_port, post_json, request, wait_until

if os.uname().machine != "x86_64":
    pytest.skip("helm-python-sdk has wheels for x86-64 only", allow_module_level=True)

import helm_python
import kubernetes_validate
import yaml

CHART = ROOT / "deploy/helm/kindred"
KUBERNETES = "1.30.0"
# Not Kubernetes' own: no schema to check them against.
CUSTOM = {"ServiceMonitor", "InferencePool"}

SMALL = {"config": {"worker": ["http://10.0.0.1:8000"]}}
WORKERS = [
    {"service": "vllm-prefill", "port": "http", "role": "prefill"},
    {"service": "vllm-decode", "namespace": "inference", "role": "decode"},
    {"service": "others", "port": 8000},
]
FULL = {
    "workers": WORKERS,
    "config": {"decode_policy": "least-loaded", "model_alias": ["gpt-4=org/model"], "max_inflight": 512},
    "threads": 2,
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
    "picker": {"enabled": True, "inferencePool": {"enabled": True}},
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"operator": "Exists"}],
    "podLabels": {"team": "inference"},
    "podAnnotations": {"note": "x"},
}
SECURE = {
    **SMALL,
    "apiKeys": {"secret": "keys"},
    "adminKey": {"secret": "admin", "key": "k"},
    "upstreamKey": {"secret": "upstream"},
    "tls": {"secret": "cert"},
    "picker": {"enabled": True, "tls": {"secret": "picker-cert"}},
    "serviceMonitor": {"enabled": True},
}
VARIANTS = {"small": SMALL, "full": FULL, "secure": SECURE}


def render(values, name="demo", namespace="prod"):
    with helm_python.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name=name, namespace=namespace)
    objects = [o for path, text in texts.items() if path.endswith(".yaml") for o in yaml.safe_load_all(text) if o]
    return {(o["kind"], o["metadata"]["name"]): o for o in objects}


@pytest.fixture(scope="module")
def rendered():
    return {name: render(values) for name, values in VARIANTS.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_helm_lints_the_chart(variant):
    report = helm_python.lint(str(CHART), VARIANTS[variant], strict=True, kube_version="v1.30.0")
    worse = [m for m in report["messages"] if m["severity"] >= 2]
    assert not worse and not report["errors"], report


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_fit_kubernetes_schemas(rendered, variant):
    kinds = set()
    for (kind, name), thing in rendered[variant].items():
        kinds.add(kind)
        if kind not in CUSTOM:
            kubernetes_validate.validate(thing, KUBERNETES, strict=True)
        assert len(name) <= 63
    assert {"Deployment", "Service", "ServiceAccount", "ConfigMap", "PodDisruptionBudget"} <= kinds
    if variant == "full":
        assert {"Role", "RoleBinding", "HorizontalPodAutoscaler", *CUSTOM} <= kinds


def test_schemas_are_strict(rendered):
    """What checks the objects would notice."""
    broken = json.loads(json.dumps(rendered["small"]["Deployment", "demo-kindred"]))
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(Exception, match="readynessProbe"):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kindred_accepts_the_configuration(rendered, variant, tmp_path):
    config = rendered[variant]["ConfigMap", "demo-kindred"]["data"]["kindred.yaml"]
    for mount, text in {"api-keys": "a:key-of-alice\n", "admin-key": "secret-of-admin", "upstream-key": "secret-of-upstream"}.items():
        directory = tmp_path / mount
        directory.mkdir()
        for key in (mount, "k"):
            (directory / key).write_text(text)
    # The files of Secrets, which are elsewhere here. There are no certificates.
    config = "".join(line + "\n" for line in config.splitlines() if "tls_" not in line)
    path = tmp_path / "kindred.yaml"
    path.write_text(config.replace("/etc/kindred", str(tmp_path)))
    args = rendered[variant]["Deployment", "demo-kindred"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[1:] == ["--config", "/etc/kindred/config/kindred.yaml"]
    command = [BINARY, args[0], "--config", path, "--check-config"]
    if "workers" in VARIANTS[variant]:
        command += ["--kubernetes-api", "http://127.0.0.1:1"]  # in a pod: that of the cluster
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    path.write_text(path.read_text() + "no_such_key: 1\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "no_such_key" in done.stderr


def test_workers_are_services_that_may_be_watched(rendered):
    full = rendered["full"]
    config = yaml.safe_load(full["ConfigMap", "demo-kindred"]["data"]["kindred.yaml"])
    assert config["kubernetes_service"] == [
        "prod/vllm-prefill:http=prefill", "inference/vllm-decode=decode", "prod/others:8000"]
    with helm_python.Chart.load(str(CHART)) as chart:
        text = chart.render(FULL, name="demo", namespace="prod")["kindred/templates/rbac.yaml"]
    roles = [o for o in yaml.safe_load_all(text) if o and o["kind"] == "Role"]
    assert sorted(r["metadata"]["namespace"] for r in roles) == ["inference", "prod"]
    for role in roles:
        assert role["rules"] == [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]
    pod = full["Deployment", "demo-kindred"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is True
    assert rendered["small"]["Deployment", "demo-kindred"]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_ports_selectors_and_grace_fit(rendered):
    for variant in rendered.values():
        deployment = variant["Deployment", "demo-kindred"]
        template = deployment["spec"]["template"]
        container = template["spec"]["containers"][0]
        config = yaml.safe_load(variant["ConfigMap", "demo-kindred"]["data"]["kindred.yaml"])
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        assert (ports["http"], ports["admin"]) == (config["port"], config["admin_port"])
        assert ports.get("grpc") == config.get("picker_port")
        assert template["spec"]["terminationGracePeriodSeconds"] * 1000 > config["drain_ms"] + 5000
        for (kind, _), thing in variant.items():
            if kind == "Service":
                labels = template["metadata"]["labels"]
                assert all(labels[k] == v for k, v in thing["spec"]["selector"].items())
                assert all(p["targetPort"] in ports for p in thing["spec"]["ports"])
        mounts = {m["name"] for m in container["volumeMounts"]}
        assert mounts == {v["name"] for v in template["spec"]["volumes"]}
        for key, value in config.items():
            if isinstance(value, str) and value.startswith("/etc/kindred/"):
                assert value.split("/")[3] in mounts, key


def test_a_new_configuration_is_a_new_pod():
    hashes = set()
    for policy in ("least-loaded", "round-robin"):
        values = {"config": {"worker": ["http://10.0.0.1:8000"], "decode_policy": policy}}
        deployment = render(values)["Deployment", "demo-kindred"]
        hashes.add(deployment["spec"]["template"]["metadata"]["annotations"]["kindred/config"])
    assert len(hashes) == 2


@pytest.mark.parametrize("values,named", [
    ({"replcas": 3}, "replcas"),
    ({"config": {"port": 1}}, "config"),
    ({"workers": [{"role": "decode"}]}, "service"),
    ({**SMALL, "autoscaling": {"enabled": True, "saturation": "", "cpuPercent": 0}}, "saturation"),
])
def test_wrong_values_are_refused(values, named):
    with pytest.raises(helm_python.HelmError, match=named):
        render(values)


def exposed(text):
    """Names of series and the labels of each, as Prometheus would have them."""
    out = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            out.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return out


def test_dashboard_and_autoscaler_ask_for_what_there_is(rendered, tmp_path):
    dashboard = json.loads((CHART / "files/dashboard.json").read_text())
    assert json.loads(rendered["full"]["ConfigMap", "demo-kindred-dashboard"]["data"]["kindred.json"]) == dashboard
    log = tmp_path / "fleet.log"
    with log.open("wb") as out:
        fleet = subprocess.Popen([BINARY, "simulate", "--serve", "--workers", "1P2D", "--port", "0", "--dialect", "vllm",
                                  "--profile", "h200-gpt-oss-20b", "--domains", "2"], stdout=out, stderr=out)
    try:
        wait_until(lambda: "ready; a router for them:" in log.read_text(), 60, "mock fleet ready")
        command = log.read_text().split("ready; a router for them:\n")[1].split("\n")[0].split()
        # A worker that nobody can reach: its request is tried again elsewhere.
        router = Server(*command[1:], "--worker", f"http://127.0.0.1:{free_port()}", "--decode-policy", "locality-band",
                        "--load-interval-ms", 50, "--health-interval-ms", 100, log=tmp_path / "router.log")
        try:
            router.wait_ready("/ready")
            for _ in range(3):
                assert post_json(router.url + "/v1/chat/completions", chat(model="simulated", max_tokens=3))[0] == 200
            wait_until(lambda: b"kindred_router_worker_kv_usage" in request(router.url + "/metrics")[2], 10, "polled")
            metrics = exposed(request(router.url + "/metrics")[2].decode())
        finally:
            router.stop()
    finally:
        fleet.terminate()
        fleet.wait()
    # Series that begin with the first of what they count.
    metrics.setdefault("kindred_router_retries_total", {"leg"})
    asked = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"kindred_\w+", expr)}
    assert len(names) > 15 and names <= set(metrics), names - set(metrics)
    for expr in asked:
        grouped = re.findall(r"by \(([^)]*)\)", expr)
        labels = {label.strip() for group in grouped for label in group.split(",")}
        known = set().union(*(metrics[name] for name in re.findall(r"kindred_\w+", expr)))
        assert labels <= known, (expr, labels - known)
    autoscaler = rendered["full"]["HorizontalPodAutoscaler", "demo-kindred"]["spec"]["metrics"]
    wanted = {m["pods"]["metric"]["name"] for m in autoscaler if m["type"] == "Pods"}
    assert wanted == {"kindred_router_saturation"} and wanted <= set(metrics)


def test_containerfile_lints():
    hadolint = pathlib.Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--strict-labels", ROOT / "deploy/Containerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_containerfile_names_what_the_program_is_linked_to():
    """The packages of its last stage have all libraries that the program asks for."""
    text = (ROOT / "deploy/Containerfile").read_text().split("FROM debian:12-slim\n")[1]
    installed = set(re.findall(r"[a-z0-9.+-]+", text))
    needed = re.findall(r"NEEDED +(\S+)", subprocess.run(
        ["objdump", "-p", BINARY], capture_output=True, text=True, check=True).stdout)
    # In each image of Debian, or dependencies of libgrpc++1.51 and libzmq5; and OpenMP, which only the engine uses.
    base = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libgomp.so.1", "ld-linux-x86-64.so.2"}
    owner = {"libcrypto.so.3": "libssl3", "libssl.so.3": "libssl3", "libgrpc.so.29": "libgrpc++1.51", "libgpr.so.29": "libgrpc++1.51"}
    for soname in needed:
        if soname in base or soname.startswith("libabsl_"):
            continue
        package = owner.get(soname)
        if package is None:
            path = pathlib.Path("/usr/lib/x86_64-linux-gnu") / soname
            found = subprocess.run(["dpkg", "-S", path], capture_output=True, text=True)
            if found.returncode != 0:
                continue  # not a Debian system
            package = found.stdout.split(":")[0]
        assert package in installed, (soname, package)

"""The files for Kubernetes: rendered by kustomize, valid by Kubernetes' own schemas, and allowed where only restricted
pods may run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckptguard_daemon.command import command
from click.testing import CliRunner

OVERLAYS = {"sidecar": "Job", "daemonset": "DaemonSet", "fleet": "Deployment"}
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_KUSTOMIZE = (["kubectl", "kustomize"], ["kustomize", "build"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `--example kubernetes` writes."""
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(command, ["--example", "kubernetes"])
    assert answer.exit_code == 0
    assert [Path(line) for line in answer.output.splitlines()] == sorted(
        path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()
    )
    return tmp_path / "kubernetes"


@pytest.fixture(params=list(OVERLAYS))
def rendered(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """The resources of an overlay, by kind."""
    yaml = pytest.importorskip("yaml", reason="no PyYAML here, which comes with kubernetes-validate")
    tool = next((words for words in _KUSTOMIZE if shutil.which(words[0])), None)
    if tool is None:
        pytest.skip("neither kubectl nor kustomize is here")
    done = subprocess.run([*tool, str(folder / request.param)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = {resource["kind"]: resource for resource in yaml.safe_load_all(done.stdout)}
    assert found.keys() == {"Namespace", "ServiceAccount", "ConfigMap", "Service", OVERLAYS[request.param]}
    return found


def pods(resources: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pods of the resources."""
    for resource in resources.values():
        if "template" in resource.get("spec", {}):
            yield resource["spec"]["template"]["spec"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """All containers of a pod, in the order in which they start."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_the_schemas_of_kubernetes_accept_it(rendered: dict[str, Any]) -> None:
    """No unknown field, no wrong type."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate here")
    for resource in rendered.values():
        kubernetes.validate(resource, "1.37", strict=True)


def test_restricted_pods_only(rendered: dict[str, Any]) -> None:
    """Each rule of the pod security standard "restricted", and those that it includes."""
    assert rendered["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(rendered):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        of_pod = pod["securityContext"]
        assert of_pod["runAsNonRoot"] is True
        assert of_pod["runAsUser"] > 0
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"sysctls", "seLinuxOptions", "windowsOptions", "appArmorProfile"} & of_pod.keys()
        for volume in pod["volumes"]:
            assert (volume.keys() - {"name"}) <= _VOLUMES
        for container in containers(pod):
            expected: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            if "/ckptguard-daemon@" in container["image"]:  # a training may write where it likes
                expected["readOnlyRootFilesystem"] = True
            assert container["securityContext"] == expected  # and so neither privileged nor another user
            assert all("hostPort" not in port for port in container.get("ports", []))


def test_nothing_is_named_that_is_not_there(rendered: dict[str, Any]) -> None:
    """Images by digest, all in one namespace, each mount has its volume, the settings those that kustomize made. No
    pod may speak to Kubernetes."""
    assert {r["metadata"]["namespace"] for kind, r in rendered.items() if kind != "Namespace"} == {"training"}
    assert rendered["Namespace"]["metadata"]["name"] == "training"
    account = rendered["ServiceAccount"]["metadata"]["name"]
    for pod in pods(rendered):
        assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (account, False)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["settings"]["configMap"]["name"] == rendered["ConfigMap"]["metadata"]["name"]
        for container in containers(pod):
            assert "@sha256:" in container["image"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()


def test_the_daemon_takes_its_arguments(rendered: dict[str, Any]) -> None:
    """Its command line, its probes, and the places that they name."""
    for pod in pods(rendered):
        daemon = next(c for c in containers(pod) if c["name"] == "ckptguard")
        options = {name for one in command.params for name in one.opts}
        parsed = command.make_context("ckptguard-daemon", daemon["args"]).params
        socket = parsed["socket_path"]
        mounted = [mount["mountPath"] for mount in daemon["volumeMounts"]]
        for place in (socket, parsed["config"], "/tmp/x", *parsed["runs"], *filter(None, [parsed["fleet"]])):
            assert any(f"{place}/".startswith(f"{path}/") for path in mounted), place
        assert Path(parsed["config"]).name in rendered["ConfigMap"]["data"]
        probes = {"livenessProbe": "--alive", "readinessProbe": "--ready", "startupProbe": "--alive"}
        for probe, option in probes.items():
            if probe == "startupProbe" and daemon.get("restartPolicy") == "Always":
                continue  # the training would wait for it
            assert daemon[probe]["exec"]["command"] == ["ckptguard-daemon", option, socket]
            assert option in options


def test_all_that_is_written_has_a_place(rendered: dict[str, Any]) -> None:
    """The roots are read-only: the socket and temporary files are on volumes of the pod, with a limit."""
    for pod in pods(rendered):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in containers(pod):
            places = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            assert all("sizeLimit" in places[path]["emptyDir"] for path in ("/tmp", "/run/user"))
            if "/ckptguard-daemon@" in container["image"]:
                assert {"memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()


def test_prometheus_finds_every_daemon(rendered: dict[str, Any], folder: Path) -> None:
    """The monitor and the service choose its pods, name its port, and show the token that it reads. Without the token
    nobody is told, and only the group may read it."""
    yaml = pytest.importorskip("yaml")
    monitor = yaml.safe_load((folder / "podmonitor" / "podmonitor.yaml").read_text(encoding="utf-8"))["spec"]
    [endpoint], service = monitor["podMetricsEndpoints"], rendered["Service"]["spec"]
    chosen = monitor["selector"]["matchLabels"]
    assert chosen == service["selector"]
    [workload] = [one for one in rendered.values() if "template" in one.get("spec", {})]
    assert chosen.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    pod = workload["spec"]["template"]["spec"]
    daemon = next(c for c in containers(pod) if c["name"] == "ckptguard")
    parsed = command.make_context("ckptguard-daemon", daemon["args"]).params
    [port] = daemon["ports"]
    assert port["name"] == endpoint["port"] == service["ports"][0]["targetPort"]
    assert parsed["metrics"] == f"0.0.0.0:{port['containerPort']}"
    place = Path(parsed["metrics_token"])
    mount = next(mount for mount in daemon["volumeMounts"] if mount["mountPath"] == str(place.parent))
    secret = next(volume for volume in pod["volumes"] if volume["name"] == mount["name"])["secret"]
    assert endpoint["authorization"]["credentials"] == {"name": secret["secretName"], "key": place.name}
    assert secret["defaultMode"] == 0o440


def test_the_sidecar_is_one(folder: Path) -> None:
    """It starts before the training and ends after it, sees the same files at the same place as the same user, and the
    training does not wait for it. Each try of the training goes through the gate."""
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load((folder / "sidecar" / "job.yaml").read_text(encoding="utf-8"))["spec"]
    pod = spec["template"]["spec"]
    gate, daemon, train = containers(pod)
    assert pod["restartPolicy"] == "Never"
    assert (daemon["restartPolicy"], "startupProbe" in daemon) == ("Always", False)
    assert "restartPolicy" not in gate
    data = {"name": "data", "mountPath": "/data"}
    assert all(data in container["volumeMounts"] for container in (gate, daemon, train))
    run = daemon["args"][-1]
    assert gate["command"][-1] == run
    assert run in train["command"]
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == gate["name"]


def test_the_folder_is_not_written_over(folder: Path, tmp_path: Path) -> None:
    """What you edited stays: a second call is an error in one sentence."""
    (folder / "base" / "ckptguard.toml").write_text("settle = 1\n")
    answer = CliRunner().invoke(command, ["--example", "kubernetes"])
    assert (answer.exit_code, answer.output) == (1, "Error: the folder kubernetes exists: move it away first\n")
    assert (folder / "base" / "ckptguard.toml").read_text() == "settle = 1\n"

"""What is deployed parses, its flags exist, and its times fit together."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path

import pytest
import yaml

from pagewire.cli.command_line import parser
from pagewire.cli.flags import config_from
from pagewire.cli.parser import parse
from pagewire.config import Config

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def entrypoint():
    """The command of the container, without its arguments."""
    (command,) = re.findall(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    return json.loads(command)


@pytest.fixture(scope="module")
def unit():
    file = configparser.ConfigParser(strict=False, interpolation=None)
    file.optionxform = str
    file.read(DEPLOY / "pagewire.service")
    return file


@pytest.fixture(scope="module")
def kubernetes():
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return deployment, service


def _config(words) -> Config:
    """The configuration that a command line means; unknown flags end the test."""
    assert words[:2] == ["pagewire", "serve"]
    return config_from(parse(*parser(), words[1:]))


def test_the_container_serves_http_with_keys(entrypoint):
    config = _config(entrypoint)
    assert config.http.address == "0.0.0.0:8000"
    assert config.http.api_key_file
    text = (DEPLOY / "Containerfile").read_text()
    assert "127.0.0.1:8000/ready" in text
    assert "EXPOSE 8000" in text
    assert "USER 10001" in text


def test_the_containers_torch_is_the_one_that_is_tested():
    pinned = re.search(r"^torch==(\S+)$", (DEPLOY.parent / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert f"torch=={pinned}" in (DEPLOY / "Containerfile").read_text()


def test_the_unit_drains_inside_its_deadline_and_does_not_repeat_what_cannot_work(unit):
    words = unit["Service"]["ExecStart"].split()
    assert words[2:4] == ["--config", "/etc/pagewire/pagewire.toml"]
    config = _config(["pagewire", "serve", *words[4:]])
    assert int(unit["Service"]["TimeoutStopSec"]) * 1000 > config.server.drain_timeout_ms
    assert (unit["Service"]["KillMode"], unit["Service"]["RestartPreventExitStatus"]) == ("mixed", "2")
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_kubernetes_probes_what_each_probe_is_for(entrypoint, kubernetes):
    deployment, service = kubernetes
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = _config([*entrypoint, *container["args"]])
    assert config.model.name == "qwen2.5-0.5b"
    assert config.cache.kv_bytes == 2 * 2**30
    assert pod["terminationGracePeriodSeconds"] * 1000 > config.server.drain_timeout_ms
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/ready", "livenessProbe": "/health", "readinessProbe": "/ready"}
    (port,) = container["ports"]
    assert port["containerPort"] == int(config.http.address.rpartition(":")[2])
    assert {probe["httpGet"]["port"] for name, probe in container.items() if name.endswith("Probe")} == {port["name"]}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] * 1000 >= config.server.start_timeout_ms
    assert any(config.http.api_key_file.startswith(mount["mountPath"]) for mount in container["volumeMounts"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]

"""deploy/compose.yaml and deploy/kubernetes.yaml: by schema, and their commands, ports and routes exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.serve.cli.commands import make_parser
from slipstream.serve.cli.serve import ALIASES, Options, ServerSettings, Sources, server_settings
from slipstream.serve.http.admin.system import ROUTES

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
DEPLOY = Path(__file__).parents[2] / "deploy"
CACHE = "/home/slipstream/.cache"  # the volume of the Dockerfile


def fields(required: str = "", **known: Any) -> dict[str, Any]:
    """A schema of an object without other fields."""
    return {"type": "object", "properties": known, "required": required.split(), "additionalProperties": False}


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS, NAMED = {"type": "array", "items": TEXT, "minItems": 1}, {"type": "object", "additionalProperties": TEXT}
AMOUNTS = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
CONDITIONS = {
    "type": "object",
    "additionalProperties": fields(
        "condition", condition={"enum": ["service_started", "service_healthy", "service_completed_successfully"]}
    ),
}

# The fields that the files use, with the names and types of the compose specification and of Kubernetes 1.30.
COMPOSE = {
    "type": "object",
    "required": ["services"],
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "properties": {
        "volumes": {"type": "object", "additionalProperties": {"type": "null"}},
        "services": {
            "type": "object",
            "additionalProperties": fields(
                "image", image=TEXT, build=fields("context", context=TEXT, dockerfile=TEXT), command=TEXTS,
                volumes=TEXTS, ports=TEXTS, depends_on=CONDITIONS, environment=NAMED,
                stop_grace_period={"pattern": r"^\d+s$"},
                restart={"enum": ["no", "always", "on-failure", "unless-stopped"]},
            ),
        }
    },
}  # fmt: skip
PROBE = fields(
    "httpGet", httpGet=fields("path port", path=TEXT, port=TEXT), periodSeconds=NUMBER, failureThreshold=NUMBER,
    timeoutSeconds=NUMBER,
)  # fmt: skip
CONTAINER = fields(
    "name image", name=TEXT, image=TEXT, args=TEXTS,
    env={"type": "array", "items": fields(
        "name", name=TEXT, valueFrom=fields(secretKeyRef=fields("name key", name=TEXT, key=TEXT)))},
    ports={"type": "array", "items": fields("containerPort", name=TEXT, containerPort=NUMBER)},
    resources=fields(requests=AMOUNTS, limits=AMOUNTS),
    securityContext=fields(allowPrivilegeEscalation=FLAG, capabilities=fields(drop=TEXTS)),
    startupProbe=PROBE, readinessProbe=PROBE, livenessProbe=PROBE,
    volumeMounts={"type": "array", "items": fields("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)},
)  # fmt: skip
POD = fields(
    "containers", containers={"type": "array", "items": CONTAINER}, terminationGracePeriodSeconds=NUMBER,
    securityContext=fields(runAsNonRoot=FLAG, runAsUser=NUMBER, fsGroup=NUMBER,
                           seccompProfile=fields("type", type=TEXT)),
    volumes={"type": "array", "items": fields(
        "name", name=TEXT, persistentVolumeClaim=fields("claimName", claimName=TEXT, readOnly=FLAG),
        emptyDir=fields(sizeLimit=TEXT))},
)  # fmt: skip
META = fields("name", name=TEXT, labels=NAMED)
KINDS = {
    "Secret": fields("stringData", metadata=META, type=TEXT, stringData=NAMED),
    "PersistentVolumeClaim": fields(
        "spec", metadata=META,
        spec=fields("accessModes resources", accessModes=TEXTS, resources=fields("requests", requests=AMOUNTS)),
    ),
    "Deployment": fields(
        "spec", metadata=META,
        spec=fields(
            "selector template", replicas=NUMBER, selector=fields("matchLabels", matchLabels=NAMED),
            template=fields("metadata spec", metadata=fields(labels=NAMED), spec=POD),
        ),
    ),
    "Service": fields(
        "spec", metadata=META,
        spec=fields("selector ports", selector=NAMED, ports={
            "type": "array", "items": fields("port", name=TEXT, port=NUMBER, targetPort=TEXT)}),
    ),
}  # fmt: skip
VERSIONS = {"Secret": "v1", "PersistentVolumeClaim": "v1", "Deployment": "apps/v1", "Service": "v1"}


def settings_of(command: list[str]) -> ServerSettings:
    """Fails for flags that do not exist."""
    args = make_parser().parse_args(["serve", *command])
    given = Sources((ServerSettings, Options), ALIASES).gather(args, {})
    return server_settings({name: given[name] for name in ServerSettings.__struct_fields__ if name in given})


def test_the_compose_file():
    text = (DEPLOY / "compose.yaml").read_text()
    found = yaml.safe_load(text)
    jsonschema.validate(found, COMPOSE)
    services = found["services"]
    engines = [name for name, each in services.items() if "/models/" in each["command"][0]]
    for name in engines:
        each = services[name]
        assert (DEPLOY / each["build"]["context"] / each["build"]["dockerfile"]).is_file()
        settings = settings_of([re.sub(r"\$\{.*?\}", "x", part) for part in each["command"]])
        assert float(each["stop_grace_period"].removesuffix("s")) > settings.drain_timeout
    urls = settings_of(services["front"]["command"]).replica_urls
    assert sorted(urls) == [f"http://{name}:8000" for name in engines]
    keys = [services[name]["environment"]["SLIPSTREAM_API_KEY"] for name in engines]
    assert all(key.startswith("${SLIPSTREAM_API_KEY:?") for key in keys) and "environment" not in services["front"]
    assert all(f"cache:{CACHE}" in services[name]["volumes"] for name in engines) and "cache" in found["volumes"]
    assert services["front"]["depends_on"] == {name: {"condition": "service_healthy"} for name in engines}


@pytest.mark.skipif(not shutil.which("kubernetes-validate"), reason="needs kubernetes-validate, a package of pip")
def test_kubernetes_accepts_the_manifests():
    file = DEPLOY / "kubernetes.yaml"
    done = subprocess.run(["kubernetes-validate", "--strict", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_kubernetes_manifests():
    found = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    assert found.keys() == KINDS.keys()
    for kind, schema in KINDS.items():
        assert found[kind].pop("apiVersion") == VERSIONS[found[kind].pop("kind")]
        jsonschema.validate(found[kind], schema)
    spec = found["Deployment"]["spec"]
    labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
    assert spec["selector"]["matchLabels"] == found["Service"]["spec"]["selector"] == labels
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > settings_of(container["args"]).drain_timeout
    (port,) = container["ports"]
    assert port["containerPort"] == settings_of([]).port
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    summaries = {route.path: route.summary for route in ROUTES}
    for name, wanted in (("startupProbe", "Readiness"), ("readinessProbe", "Readiness"), ("livenessProbe", "Liveness")):
        probe = container[name]["httpGet"]
        assert summaries[probe["path"]] == wanted and probe["port"] == port["name"]
    (variable,) = container["env"]
    secret = variable["valueFrom"]["secretKeyRef"]
    assert secret["name"] == found["Secret"]["metadata"]["name"] and secret["key"] in found["Secret"]["stringData"]
    assert variable["name"] == "SLIPSTREAM_API_KEY" and "api_key" in ServerSettings.__struct_fields__
    assert [each["name"] for each in container["volumeMounts"]] == [each["name"] for each in pod["volumes"]]
    assert CACHE in [each["mountPath"] for each in container["volumeMounts"]]
    claim = pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]


def test_a_field_that_does_not_exist_is_found():
    bad = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    bad["services"]["front"]["port"] = ["1:1"]
    with pytest.raises(jsonschema.ValidationError, match="'port' was unexpected"):
        jsonschema.validate(bad, COMPOSE)

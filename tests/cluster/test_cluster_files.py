"""Cluster files, offline: Ray's own validator, the traps that it does not know, and the copies that must agree."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import yaml

from tests.cluster.traps import traps
from vtoken import __version__
from vtoken.serving.settings import DeploymentSettings

ROOT = Path(__file__).resolve().parents[2]
CLOUD_FILES = [ROOT / "cluster.yaml", ROOT / "deploy" / "clusters" / "gcp-a3.yaml"]
FILES = [*CLOUD_FILES, ROOT / "deploy" / "clusters" / "on-prem.yaml"]
FLEET = ROOT / "deploy" / "serve" / "fleet-h100.yaml"
MANIFEST = ROOT / "deploy" / "clusters" / "kuberay.yaml"
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def validate(config):
    """What `ray up` does before it starts anything."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def refusal_of(config):
    """Kind of the exception that Ray refuses a file with; empty if it does not."""
    try:
        validate(config)
    except Exception as error:  # noqa: BLE001  # its kind is what is asked for
        return type(error).__name__
    return ""


def fleet_settings():
    return DeploymentSettings.from_args(load(FLEET)["applications"][0]["args"])


# ---- Cluster launcher ---------------------------------------------------------------------------------------------


@each_file
def test_rays_own_validator_takes_it(path):
    prepared = validate(load(path))
    assert prepared["available_node_types"][prepared["head_node_type"]]["max_workers"] in {0, prepared["max_workers"]}


@each_file
def test_it_steps_into_no_known_trap(path):
    assert traps(load(path)) == []


@pytest.mark.parametrize(
    ("path", "breakage", "refusal"),
    [
        (FILES[0], lambda c: c.update(max_worker=2), "ValidationError"),
        (FILES[0], lambda c: c.pop("cluster_name") and c.update(cluster_name=7), "ValidationError"),
        (FILES[0], lambda c: c["provider"].pop("type"), "KeyError"),
        (FILES[0], lambda c: c.update(head_node_type="hed"), "ValueError"),
        (FILES[0], lambda c: c.update(max_workers=0), "ValueError"),
        (
            FILES[0],
            lambda c: c["available_node_types"]["h100x8"]["resources"].update(GPU="8"),
            "ValidationError",
        ),
        (FILES[1], lambda c: c["available_node_types"]["head"].pop("node_config"), "ValidationError"),
        (FILES[1], lambda c: c.update(setup_commands="make setup"), "TypeError"),
        (FILES[2], lambda c: c["provider"].pop("worker_ips"), "ClickException"),
        (FILES[2], lambda c: c.update(available_node_types={"head": {}}), "ClickException"),
    ],
)
def test_a_broken_file_is_refused(path, breakage, refusal):
    config = load(path)
    breakage(config)
    assert refusal_of(config) == refusal


def gpu_node(config):
    return config["available_node_types"]["h100x8"]


@pytest.mark.parametrize(
    ("path", "breakage", "found"),
    [
        (FILES[0], lambda c: gpu_node(c).update(resources={}), "resources must be explicit"),
        (FILES[0], lambda c: gpu_node(c)["resources"].update(GPU=1), "eight GPUs"),
        (FILES[0], lambda c: gpu_node(c)["node_config"].pop("ImageId"), "ImageId"),
        (FILES[0], lambda c: c["file_mounts"].pop("~/.ray/auth_token"), "the token"),
        (FILES[0], lambda c: c["file_mounts"].update({"~/vtoken/serve_app.py": "app.py"}), "app.py does not exist"),
        (FILES[0], lambda c: c["file_mounts"].update({"~/vtoken": "."}), "hashes every file"),
        (FILES[0], lambda c: c.pop("worker_start_ray_commands"), "start commands"),
        (FILES[0], lambda c: c.update(head_start_ray_commands=["ray start --head"]), "RAY_AUTH_MODE"),
        (FILES[0], lambda c: c.update(head_start_ray_commands=["ray start --head"]), "PYTHONPATH"),
        (FILES[0], lambda c: c.update(head_start_ray_commands=["ray start --head"]), "bootstrap"),
        (FILES[0], lambda c: c.update(setup_commands=["pip install vllm"]), "own constraints"),
        (FILES[1], lambda c: gpu_node(c)["node_config"].pop("scheduling"), "TERMINATE"),
        (FILES[1], lambda c: gpu_node(c)["node_config"].update(acceleratorType="nvidia-h100"), "means a TPU"),
        (FILES[2], lambda c: c.update(head_start_ray_commands=["ray start --head"]), "one local worker too few"),
    ],
)  # fmt: skip
def test_every_trap_is_seen(path, breakage, found):
    config = load(path)
    breakage(config)
    assert any(found in trap for trap in traps(config)), traps(config)


@pytest.mark.parametrize("path", CLOUD_FILES, ids=lambda path: path.name)
def test_what_the_user_edits_stands_in_one_block_and_reaches_every_place(path):
    """Every marked value is used somewhere else, and nothing outside the block is marked."""
    text = path.read_text(encoding="utf-8")
    block = text[text.index("metadata:") : text.index("\nprovider:")]
    assert "EDIT" not in text.replace(block, "")
    anchors = re.findall(r"&(\w+) ", block)
    assert len(anchors) == 3
    assert all(re.search(rf"\*{anchor}\b", text) for anchor in anchors)


@each_file
def test_the_ray_that_the_instructions_install_is_the_one_that_we_pin(path):
    (pinned,) = re.findall(r'"ray\[serve\]==([\d.]+)"', PROJECT)
    assert set(re.findall(r"ray\[default\]==([\d.]+)", path.read_text(encoding="utf-8"))) <= {pinned}


# ---- The fleet on it ------------------------------------------------------------------------------------------------


def test_serve_takes_the_fleet_and_its_graph_can_be_built():
    from ray.serve.schema import ServeDeploySchema

    from vtoken.serving.application import build_application

    config = ServeDeploySchema.model_validate(load(FLEET))
    assert (config.proxy_location, config.http_options.host) == ("EveryNode", "0.0.0.0")
    build_application(fleet_settings())


@pytest.mark.parametrize("path", CLOUD_FILES, ids=lambda path: path.name)
def test_the_fleet_fits_the_nodes(path):
    """Replicas at min and max fill the fewest and the most nodes, and leave CPUs for the rest."""
    config, settings = load(path), fleet_settings()
    node, replicas = gpu_node(config), settings.replicas
    per_node = node["resources"]["GPU"] // int(replicas.num_gpus)
    assert settings.autoscaling.min == per_node * node["min_workers"]
    assert settings.autoscaling.max == per_node * node["max_workers"] == per_node * config["max_workers"]
    left = node["resources"]["CPU"] - per_node * replicas.num_cpus
    assert left >= settings.limits.ingress_count * settings.limits.ingress_num_cpus
    assert settings.autoscaling.down_delay_s < 60 * config["idle_timeout_minutes"]


@pytest.mark.parametrize("path", [FLEET, MANIFEST], ids=lambda path: path.name)
def test_a_fleet_on_gpus_is_switched_on_by_its_operator_and_not_by_us(path):
    """As the file stands the start-up check refuses by name; it says where the switch is."""
    assert not fleet_settings().vtoken.experimental_gpu
    assert re.findall(r"^ *(#?) *experimental_gpu: true", path.read_text(encoding="utf-8"), re.MULTILINE) == ["#"]


# ---- KubeRay ------------------------------------------------------------------------------------------------------


def containers(spec):
    head = spec["headGroupSpec"]["template"]["spec"]["containers"]
    return [*head, *(c for group in spec["workerGroupSpecs"] for c in group["template"]["spec"]["containers"])]


def test_the_manifest_holds_the_fleet_file():
    manifest = load(MANIFEST)
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    embedded = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    assert embedded == load(FLEET), f"copy the changes of {FLEET.name} into {MANIFEST.name}, or the other way round"


def test_the_manifest_runs_our_image_with_a_token_and_eight_gpus_a_pod():
    cluster = load(MANIFEST)["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert f'"ray[serve]=={cluster["rayVersion"]}"' in PROJECT
    assert {c["image"] for c in containers(cluster)} == {f"REGISTRY/vtoken:{__version__}"}
    (group,) = cluster["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    gpus, settings = int(worker["resources"]["limits"]["nvidia.com/gpu"]), fleet_settings()
    assert gpus == 8
    assert (settings.autoscaling.min, settings.autoscaling.max) == (
        gpus * group["minReplicas"],
        gpus * group["maxReplicas"],
    )
    assert float(worker["resources"]["requests"]["cpu"]) >= gpus * settings.replicas.num_cpus
    grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > settings.replicas.graceful_shutdown_timeout_s
    assert {mount["name"] for mount in worker["volumeMounts"]} == {
        v["name"] for v in group["template"]["spec"]["volumes"]
    }


# ---- The image ------------------------------------------------------------------------------------------------------

CONTAINER = ROOT / "deploy" / "container"


def instructions():
    """Pairs of instruction and arguments, with continued lines joined."""
    text = (CONTAINER / "Containerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", lines)
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def test_every_copied_path_exists_and_is_let_into_the_build():
    allowed = [
        line[1:]
        for line in (CONTAINER / "Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    copied = [source for name, rest in instructions() if name == "COPY" for source in rest.split()[:-1]]
    assert len(copied) >= 5
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == path or source.startswith(path + "/") for path in allowed), source


def test_the_image_runs_as_a_user_without_privileges_and_carries_no_secret():
    steps = instructions()
    assert steps[-1][0] == "CMD"
    users = [rest for name, rest in steps if name == "USER"]
    assert users
    assert users[-1] not in {"root", "0"}
    secret = re.compile(r"(?i)(token|secret|password|api_?key)\s*=")
    assert not [rest for name, rest in steps if name in {"ENV", "ARG", "RUN"} and secret.search(rest)]
    installs = [rest for _, rest in steps if "pip install" in rest and "--no-deps" not in rest]
    assert installs
    assert all("-c deploy/setup/constraints-gpu.txt" in rest for rest in installs)


def test_the_image_tag_of_the_instructions_is_this_version():
    text = (CONTAINER / "Containerfile").read_text(encoding="utf-8") + MANIFEST.read_text(encoding="utf-8")
    assert set(re.findall(r"vtoken:(\d[\w.]*)", text)) == {__version__}

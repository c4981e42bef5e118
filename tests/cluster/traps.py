"""What Ray's validator lets pass in a cluster file although it breaks the cluster (each was met, or is documented)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MADE_BY_THE_USER = {"~/.ray/auth_token"}


def traps(config: dict[str, Any]) -> list[str]:
    """A sentence for each trap that a cluster file steps into; none is the aim."""
    kind = config["provider"]["type"]
    found = [*_start_commands(config, kind), *_installation(config), *_mounts(config)]
    for name, node in config.get("available_node_types", {}).items():
        found += [f"{name}: {text}" for text in _node(node, kind)]
    return found


def _start_commands(config: dict[str, Any], kind: str) -> list[str]:
    found = []
    head, worker = config.get("head_start_ray_commands", []), config.get("worker_start_ray_commands", [])
    starts = [command for command in [*head, *worker] if "ray start" in command]
    if not any("--head" in command for command in head) or len(starts) < 2:
        return ["the start commands of head and workers must be given"]
    for command in starts:
        if "RAY_AUTH_MODE=token" not in command:
            found.append("without RAY_AUTH_MODE nodes decide for themselves whether they want a token")
        if "PYTHONPATH=" not in command:
            found.append("serve_app is not importable without PYTHONPATH")
    head_start = next(command for command in head if "--head" in command)
    if "--autoscaling-config=~/ray_bootstrap_config.yaml" not in head_start:
        found.append("without its bootstrap configuration the head starts no workers")
    if kind == "local" and "RAY_enable_autoscaler_v2=0" not in head_start:
        found.append("the newer autoscaler starts one local worker too few")
    return found


def _installation(config: dict[str, Any]) -> list[str]:
    installs = [command for command in config.get("setup_commands", []) if "pip install" in command]
    if not any("-c deploy/setup/constraints-gpu.txt '.[gpu]'" in command for command in installs):
        return ["the project is not installed by its own constraints"]
    return []


def _mounts(config: dict[str, Any]) -> list[str]:
    mounts = config.get("file_mounts", {})
    found = [
        f"{local} does not exist"
        for local in mounts.values()
        if local not in MADE_BY_THE_USER and not (ROOT / local).exists()
    ]
    if "~/.ray/auth_token" not in mounts:
        found.append("the token does not get to the nodes")
    needed = {"pyproject.toml", "LICENSE", "serve_app.py", "vtoken", "deploy"}
    if not needed <= set(mounts.values()):
        found.append(f"not mounted: {sorted(needed - set(mounts.values()))}")
    if any(local in {".", "./", ".venv", ".cache"} for local in mounts.values()):
        found.append("Ray hashes every file of a mount at each `ray up`: mount folders, not the repository")
    return found


def _node(node: dict[str, Any], kind: str) -> list[str]:
    found, shape, resources = [], node["node_config"], node.get("resources") or {}
    if "CPU" not in resources:
        found.append("resources must be explicit: Ray would ask the cloud for them")
    if kind == "aws" and not shape.get("ImageId"):
        found.append("ImageId must be given: Ray's default is an image of 2022")
    if kind == "gcp":
        if "acceleratorType" in shape:
            found.append("acceleratorType at this level means a TPU")
        if resources.get("GPU") and shape.get("scheduling", {}).get("onHostMaintenance") != "TERMINATE":
            found.append("a VM with GPUs needs onHostMaintenance TERMINATE")
    if resources.get("GPU", 0) not in {0, 8}:
        found.append("nodes have eight GPUs")
    return found

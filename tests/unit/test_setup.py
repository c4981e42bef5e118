"""The set-up scripts: what decides a reinstallation, what a failure says, what a lock file looks like."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SETUP = Path(__file__).resolve().parents[2] / "deploy" / "setup"
PYPROJECT = """\
[build-system]
requires = []
[project]
name = "x"
dependencies = ["torch==1.2.3"]
[tool.ruff]
line-length = 120
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"vtoken_setup_{name}", SETUP / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, looking at a project of its own; a call that would install something only records its words."""
    module = load("bootstrap")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    for kind in ("cpu", "gpu"):
        (tmp_path / f"constraints-{kind}.txt").write_text("torch==1.2.3\n")
    venv = tmp_path / ".venv"
    paths = {"ROOT": tmp_path, "SETUP": tmp_path, "VENV": venv, "STAMP": venv / "stamp", "PYTHON": venv / "python"}
    for name, path in paths.items():
        monkeypatch.setattr(module, name, path)
    return module


class RecordingSteps:
    """Stands in for Steps: every command succeeds, except those whose words contain a key of `failures`."""

    def __init__(self, venv: Path, failures: dict[str, str] | None = None) -> None:
        self.venv, self.failures, self.commands = venv, failures or {}, []

    def say(self, text: str) -> None:
        pass

    def attempt(self, *command: str) -> tuple[int, str]:
        words = " ".join(command)
        self.commands.append(words)
        if " -m venv " in words:
            self.venv.mkdir()
            (self.venv / "python").touch()
        return next(((1, output) for key, output in self.failures.items() if key in words), (0, ""))

    def run(self, what: str, *command: str) -> None:
        code, output = self.attempt(*command)
        assert code == 0, output


def test_second_run_installs_nothing_and_a_changed_constraint_starts_anew(bootstrap: ModuleType) -> None:
    first, second, third = (RecordingSteps(bootstrap.VENV) for _ in range(3))
    bootstrap._set_up(first, "cpu")
    bootstrap._set_up(second, "cpu")
    assert any("-e .[cpu,dev]" in words for words in first.commands)
    assert len(second.commands) == 1
    assert "check_environment" in second.commands[0]
    (bootstrap.SETUP / "constraints-cpu.txt").write_text("torch==1.2.3\nray==2\n")
    bootstrap._set_up(third, "cpu")
    assert third.commands == first.commands


def test_a_half_made_environment_is_thrown_away(bootstrap: ModuleType) -> None:
    bootstrap.VENV.mkdir()
    (bootstrap.VENV / "python").touch()
    (bootstrap.VENV / "rubbish").touch()
    steps = RecordingSteps(bootstrap.VENV)
    bootstrap._set_up(steps, "cpu")
    assert not (bootstrap.VENV / "rubbish").exists()
    assert bootstrap.STAMP.is_file()


def test_a_failed_step_leaves_no_stamp(bootstrap: ModuleType) -> None:
    with pytest.raises(AssertionError):
        bootstrap._set_up(RecordingSteps(bootstrap.VENV, {"-e .": "no network"}), "cpu")
    assert not bootstrap.STAMP.exists()


def test_only_what_is_installed_decides(bootstrap: ModuleType) -> None:
    constraints, pyproject = bootstrap.SETUP / "constraints-cpu.txt", bootstrap.ROOT / "pyproject.toml"
    key = bootstrap.stamp_key("cpu", constraints)
    pyproject.write_text(PYPROJECT.replace("120", "100"))
    assert bootstrap.stamp_key("cpu", constraints) == key
    pyproject.write_text(PYPROJECT.replace("1.2.3", "1.2.4"))
    assert bootstrap.stamp_key("cpu", constraints) != key
    assert bootstrap.stamp_key("gpu", constraints) != bootstrap.stamp_key("cpu", constraints)


@pytest.mark.parametrize(
    "answer", ["ERROR: No matching distribution found for torch", "ERROR: ResolutionImpossible: x"]
)
def test_uv_is_asked_only_if_pip_finds_no_cpu_build(bootstrap: ModuleType, answer: str) -> None:
    steps = RecordingSteps(bootstrap.VENV, {"torch==1.2.3+cpu": answer})
    bootstrap._install_cpu_torch(steps, bootstrap.SETUP / "constraints-cpu.txt")
    assert "--torch-backend cpu" in steps.commands[-1]
    assert steps.commands[-1].endswith(" torch==1.2.3")


def test_another_failure_of_pip_is_shown_and_not_papered_over(bootstrap: ModuleType) -> None:
    steps = RecordingSteps(bootstrap.VENV, {"torch==1.2.3+cpu": "ERROR: No space left on device"})
    with pytest.raises(bootstrap.SetupFailedError, match="No space left"):
        bootstrap._install_cpu_torch(steps, bootstrap.SETUP / "constraints-cpu.txt")
    assert len(steps.commands) == 1


def test_a_failed_command_shows_its_output_and_status(bootstrap: ModuleType) -> None:
    with pytest.raises(bootstrap.SetupFailedError, match=r"(?s)exit status 3.*the reason"):
        bootstrap.Steps().run("a step", sys.executable, "-c", "print('the reason'); raise SystemExit(3)")


def test_a_lock_names_every_package_once_without_builds_and_without_us() -> None:
    versions = {"Torch": "2.13.0+cpu", "types_PyYAML": "6.0", "vtoken": "0.1.0", "a.b": "1"}
    assert load("lock").constraint_lines(versions) == "a-b==1\ntorch==2.13.0\ntypes-pyyaml==6.0\n"

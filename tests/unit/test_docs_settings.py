"""The tables of docs/configuration.md say what the settings records say: every key, its default, its range."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from vtoken.core.autoscaling import ScalingRules
from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.errors import ConfigError
from vtoken.serving.keys import KeyRules
from vtoken.serving.settings import ENGINE_KEYS, DeploymentSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


def sections():
    """Heading as written in backticks -> settings record, all defaults."""
    settings = DeploymentSettings(model="org/name", served_model_name="name")
    found = {
        "vtoken": VTokenConfig(),
        "vtoken.policy": PolicyOptions(),
        "autoscaling": ScalingRules(),
        "auth.default": KeyRules(),
    }
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value) and field.name != "vtoken":
            found[field.name] = value
    return found


SECTIONS = sections()
each_section = pytest.mark.parametrize("name", sorted(SECTIONS))


def rows_of(name):
    """Key -> its row, a mapping of column name to cell."""
    heading = re.search(rf"^##+ `{re.escape(name)}`.*$", PAGE, re.MULTILINE)
    assert heading is not None, f"docs/configuration.md has no section `{name}`"
    lines = re.split(r"^##", PAGE[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    header, rows = table[0], table[2:]
    return {row[0].strip("` "): dict(zip(header, row, strict=True)) for row in rows}


def number(text):
    if text == "2^63 - 1":
        return float(2**63 - 1)
    return float(text.replace(",", ""))


def shown_default(cell):
    """The value that a default cell stands for."""
    text = cell.strip("`")
    if text in {"absent", "none"}:
        return None
    if text in {"true", "false"}:
        return text == "true"
    try:
        return number(text)
    except ValueError:
        return text


@each_section
def test_every_key_has_a_row_and_every_row_a_key(name):
    assert set(rows_of(name)) == {field.name for field in fields(SECTIONS[name])}


@each_section
def test_defaults_are_those_of_the_code(name):
    record = SECTIONS[name]
    for key, row in rows_of(name).items():
        value = getattr(record, key)
        if is_dataclass(value):
            value = value.policy if isinstance(value, PolicyOptions) else "all defaults"
        # An empty mapping or list, and "none" of the policies, are nothing too.
        value = None if value in ({}, (), [], "none", "") else value
        assert shown_default(row["default"]) == value, f"{name}.{key}"


def allowed_by_code(record, key):
    """What the refusal of an impossible value calls allowed; None if the code asks for no range."""
    try:
        replace(record, **{key: object()})
    except ConfigError as refusal:
        return refusal.allowed
    except (TypeError, ValueError, AttributeError):
        return None
    return None


@each_section
def test_ranges_are_those_of_the_code(name):
    for key, row in rows_of(name).items():
        allowed = allowed_by_code(SECTIONS[name], key)
        limits = re.search(r"from ([\d.]+) to ([\d.]+)", allowed or "")
        if limits is None or "allowed" not in row:
            continue
        shown = re.search(r"([\d.,]+) to (2\^63 - 1|[\d.,]+)", row["allowed"])
        assert shown is not None, f"{name}.{key}: the code allows {allowed}"
        low, high = (number(text.rstrip(".,")) for text in shown.groups())
        assert [low, high] == [float(text) for text in limits.groups()], f"{name}.{key}"


def test_the_arguments_that_pass_to_the_engine_are_all_named():
    body = PAGE[PAGE.index("### `engine`") : PAGE.index("### `replicas`")]
    named = {word for line in body.splitlines() if line.startswith("`") for word in re.findall(r"`(\w+)`", line)}
    assert named == set(ENGINE_KEYS)


def test_the_deployment_table_names_every_section():
    body = PAGE[PAGE.index("## A deployment") : PAGE.index("### `engine`")]
    named = {word for line in body.splitlines() if line.startswith("|") for word in re.findall(r"`(\w+)`", line)}
    assert {field.name for field in fields(DeploymentSettings)} <= named


def test_a_wrong_default_would_be_seen():
    """The check itself: cells that differ from the code in any way are told apart."""
    assert shown_default("0.20") == 0.2
    assert shown_default("2,097,152") == 2097152
    assert shown_default("`false`") is False
    assert shown_default("absent") is None
    assert shown_default("`auto`") == "auto"

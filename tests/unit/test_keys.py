"""API keys and the access log: who is let in, and that nothing secret is said."""

import hashlib
import json
import os

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vtoken.core.errors import ConfigError
from vtoken.core.rate_limit import RateLimit
from vtoken.core.replies import ErrorReply
from vtoken.core.waiting_line import Priority
from vtoken.serving.access_log import AccessLogSettings, AccessRecord, logger, open_log
from vtoken.serving.keys import ANONYMOUS, AuthSettings, KeyRing, KeyRules, open_door_warning, parse_keys

SECRET = "sk-very-secret-1"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()

secrets = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), min_size=8, max_size=40)
secrets = secrets.filter(lambda text: not text.startswith("sha256:"))


def ring(path, text, **more):
    path.write_text(text)
    return KeyRing(AuthSettings(keys_file=str(path)), **more)


@given(st.dictionaries(st.from_regex(r"\A[a-z][a-z0-9._-]{0,9}\Z"), secrets, min_size=1, max_size=5), secrets)
def test_a_key_names_its_owner_and_no_other_text_does(keys, other):
    text = ",".join(f"{name}:{secret}" for name, secret in keys.items())
    ring = KeyRing(AuthSettings(keys_env="KEYS"), {"KEYS": text})
    for secret in [*keys.values(), other]:
        owners = [name for name, own in keys.items() if own == secret]
        found = ring.name_of(f"Bearer {secret}")
        assert found in owners if owners else isinstance(found, ErrorReply)


@pytest.mark.parametrize("entry", [f"alice:{SECRET}", f"alice:sha256:{DIGEST}", f"# all\n\n  alice:{SECRET}  \n"])
def test_a_key_may_stand_in_the_file_as_it_is_or_as_its_digest(tmp_path, entry):
    keys = ring(tmp_path / "keys", entry)
    assert keys.name_of(f"Bearer {SECRET}") == "alice"
    assert keys.name_of(f"bearer  {SECRET} ") == "alice"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        (f"Basic {SECRET}", "missing_api_key"),
        (SECRET, "missing_api_key"),
        (f"Bearer {SECRET}x", "invalid_api_key"),
        (f"Bearer {DIGEST}", "invalid_api_key"),
        (f"Bearer sha256:{DIGEST}", "invalid_api_key"),
        ("Bearer \ud800", "invalid_api_key"),
    ],
)
def test_anybody_else_is_refused_without_a_word_of_what_was_sent(tmp_path, header, code):
    refusal = ring(tmp_path / "keys", f"alice:{SECRET}").name_of(header)
    assert (refusal.status, refusal.code) == (401, code)
    assert SECRET not in refusal.message


@pytest.mark.parametrize(
    "text",
    ["", "# nobody", "alice", f"alice:{SECRET}\nalice:{SECRET}x", "alice:short", "a b:12345678", "alice:sha256:12"],
)
def test_a_wrong_file_is_named_by_its_entry_and_nothing_of_it_is_shown(text):
    with pytest.raises(ConfigError) as caught:
        parse_keys(text, "auth.keys_file")
    assert "auth.keys_file" in str(caught.value)
    for part in (SECRET, "12345678", "short"):
        assert part not in str(caught.value)


def test_a_file_that_changes_is_read_again_and_a_broken_one_changes_nothing(tmp_path, caplog):
    now = [0.0]
    path = tmp_path / "keys"
    keys = ring(path, f"alice:{SECRET}", clock=lambda: now[0])
    path.write_text("bob:another-secret")
    assert keys.name_of(f"Bearer {SECRET}") == "alice"  # it is looked at once a second
    now[0] = 2.0
    assert keys.name_of("Bearer another-secret") == "bob"
    assert isinstance(keys.name_of(f"Bearer {SECRET}"), ErrorReply)
    path.write_text("carol")
    now[0] = 4.0
    assert keys.name_of("Bearer another-secret") == "bob"
    path.unlink()
    now[0] = 6.0
    assert keys.name_of("Bearer another-secret") == "bob"
    assert "another-secret" not in caplog.text + repr(keys) + str(vars(keys))
    assert "stay as they were" in caplog.text


def test_a_missing_file_or_variable_stops_the_start(tmp_path):
    for settings in (AuthSettings(keys_file=str(tmp_path / "none")), AuthSettings(keys_env="NOT_SET")):
        with pytest.raises(ConfigError, match=r"auth\.keys_"):
            KeyRing(settings, {})


def test_without_keys_everybody_is_anonymous():
    assert KeyRing(AuthSettings()).name_of(None) == ANONYMOUS


def test_rules_of_keys():
    raw = {"keys_env": "K", "keys": {"alice": {"priority": "low", "requests_per_minute": 6}}, "default": {"weight": 2}}
    settings = AuthSettings.from_mapping(raw)
    assert settings.rules_of("alice") == KeyRules(Priority.LOW, 1.0, 6)
    assert settings.rules_of("alice").limit == RateLimit(6, None)
    assert settings.rules_of("bob") == KeyRules(weight=2)


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({"keys": {"alice": {"priority": "urgent"}}}, "auth.keys.alice.priority"),
        ({"keys": {"alice": {"weight": 0}}}, "auth.keys.alice.weight"),
        ({"keys": {"alice": {"requests_per_minute": 0}}}, "auth.keys.alice.requests_per_minute"),
        ({"keys": {"a b": {}}}, "auth.keys"),
        ({"keys": []}, "auth.keys"),
        ({"keys": {"alice": {"requests_per_minute": 6}}}, "auth.keys"),
        ({"default": {"rate": 1}}, "auth.default.rate"),
        ({"keys_file": "a", "keys_env": "b"}, "auth.keys_file, keys_env"),
        ({"file": "a"}, "auth.file"),
        ([], "auth"),
    ],
)
def test_wrong_rules_are_refused_by_name(raw, key):
    with pytest.raises(ConfigError) as caught:
        AuthSettings.from_mapping(raw)
    assert caught.value.key == key


def test_an_open_door_is_said_aloud():
    assert open_door_warning(AuthSettings(), "127.0.0.1") is None
    assert open_door_warning(AuthSettings(keys_env="K"), "0.0.0.0") is None
    for host in ("0.0.0.0", None, "10.0.0.1"):
        assert "NO AUTHENTICATION" in open_door_warning(AuthSettings(), host)


# ---- The access log -------------------------------------------------------------------------------------------------


def test_the_log_goes_where_it_is_told_and_survives_rotation(tmp_path, capsys):
    path = tmp_path / "access.log"
    open_log(AccessLogSettings(file=str(path)))
    logger.info("%s", AccessRecord("t", key="alice").to_line())
    os.replace(path, tmp_path / "access.log.1")
    logger.info("%s", AccessRecord("t", key="bob").to_line())
    assert json.loads((tmp_path / "access.log.1").read_text())["key"] == "alice"
    assert json.loads(path.read_text())["key"] == "bob"
    open_log(AccessLogSettings(enabled=False))
    logger.info("%s", AccessRecord("t", key="carol").to_line())
    assert "carol" not in path.read_text() + capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"access_log\.file"):
        open_log(AccessLogSettings(file=str(tmp_path / "none" / "access.log")))

"""Pushing to Grafana, through the real grafana-api, against a server that answers with Grafana's status codes."""

from __future__ import annotations

import copy
import logging
import socket
import traceback

import pytest

from tests.observe.grafana_stand_in import TOKEN, StandIn
from vtoken import cli
from vtoken.core.errors import ConfigError
from vtoken.observability.boards import BOARDS
from vtoken.observability.grafana import Grafana, GrafanaError
from vtoken.observability.grafana_alerts import group_body
from vtoken.observability.grafana_json import board_json
from vtoken.observability.push import Wanted, push

pytest.importorskip("grafana_api", reason="grafana-api is not installed: pip install 'vtoken[dashboards]'")


@pytest.fixture
def server():
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


def wanted(**changes):
    boards = [board_json(board) for board in BOARDS]
    return Wanted(**{"boards": boards, "alerts": group_body(), "prometheus_url": "http://127.0.0.1:9090", **changes})


def do_push(server, what=None, *, prune=False, dry_run=False):
    return list(push(Grafana(server.url, TOKEN), what or wanted(), prune=prune, dry_run=dry_run))


def test_a_first_push_writes_everything_and_a_second_one_nothing(server):
    assert len(do_push(server)) == len(server.writes) == 3 + len(BOARDS)
    assert server.boards.keys() == {board.uid for board in BOARDS}
    server.writes.clear()
    assert do_push(server) == []
    assert server.writes == []


def test_a_dry_run_says_the_same_and_writes_nothing(server):
    said = do_push(server, dry_run=True)
    assert server.writes == []
    assert said == do_push(server)


def test_what_was_changed_by_hand_is_written_again_and_nothing_else(server):
    do_push(server)
    server.boards["vtoken-fleet"]["dashboard"]["panels"][1]["title"] = "Mine"
    server.sources["vtoken-prometheus"]["url"] = "http://elsewhere:9090"
    server.groups["vtoken", "vtoken"]["rules"][3]["for"] = "1h"
    server.boards["vtoken-gpu"]["meta"]["folderUid"] = "general"
    assert do_push(server) == [
        "update data source vtoken-prometheus",
        "update board vtoken-fleet",
        "update board vtoken-gpu",
        "write alert group vtoken",
    ]
    assert do_push(server) == []


@pytest.mark.parametrize("at", range(7))
def test_an_interrupted_push_is_finished_by_the_next(server, at):
    steps = push(Grafana(server.url, TOKEN), wanted(), prune=False, dry_run=False)
    for _ in range(at):
        next(steps)
    steps.close()
    assert len(server.writes) == at
    do_push(server)
    assert len(server.writes) == 3 + len(BOARDS)
    assert do_push(server) == []


def test_pruning_removes_boards_of_ours_that_are_no_more_and_no_others(server):
    do_push(server)
    model = copy.deepcopy(board_json(BOARDS[0]))
    for uid, tags, folder in (
        ("vtoken-old", ["vtoken"], "vtoken"),
        ("theirs", ["team"], "vtoken"),
        ("elsewhere", ["vtoken"], "general"),
    ):
        server.boards[uid] = {"dashboard": {**model, "uid": uid, "tags": tags}, "meta": {"folderUid": folder}}
    assert do_push(server) == []
    assert do_push(server, prune=True) == ["delete board vtoken-old"]
    assert {"theirs", "elsewhere"} <= server.boards.keys()


def test_alerts_and_data_source_can_be_left_alone(server):
    do_push(server, wanted(alerts=None, prometheus_url=None))
    assert not server.groups
    assert not server.sources


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", ["../admin", "a/b", "", "a" * 41, "a b", "x?y=1", "ä"])
def test_a_uid_that_could_mean_another_path_is_refused_before_anything_is_written(server, uid):
    boards = [board_json(BOARDS[0]), {**board_json(BOARDS[1]), "uid": uid}]
    with pytest.raises(GrafanaError, match="is not of the form"):
        do_push(server, wanted(boards=boards))
    assert server.writes == []


def test_a_uid_from_the_server_is_not_trusted_either(server):
    do_push(server)
    stranger = {"dashboard": {"uid": "../../admin", "tags": ["vtoken"]}, "meta": {"folderUid": "vtoken"}}
    server.boards["../../admin"] = stranger
    server.writes.clear()
    with pytest.raises(GrafanaError, match="is not of the form"):
        do_push(server, prune=True)
    assert server.writes == []


@pytest.mark.parametrize("url", ["http://grafana.example.org", "http://192.0.2.1:3000", "http://127.0.0.1.example.org"])
def test_a_token_does_not_travel_in_the_clear(url):
    with pytest.raises(ConfigError, match="in the clear"):
        Grafana(url, TOKEN)


@pytest.mark.parametrize("url", ["grafana.example.org", "ftp://grafana", "https://user:word@grafana", "https://"])
def test_other_addresses_are_refused_without_repeating_secrets(url):
    with pytest.raises(ConfigError) as refusal:
        Grafana(url, TOKEN)
    assert "word" not in str(refusal.value)


def test_https_and_this_machine_are_taken():
    for url in ("https://grafana.example.org/prefix/", "http://localhost:3000", "http://[::1]:3000"):
        assert TOKEN not in repr(Grafana(url, TOKEN))


# ---- what goes wrong ---------------------------------------------------------------------------------------------

FAILURES = {
    "wrong token": ((401, {"message": "Invalid API key"}), 401, "Invalid API key"),
    "forbidden": ((403, {"message": "You'll need additional permissions"}), 403, "additional permissions"),
    "conflict": ((412, {"message": "version-mismatch"}), 412, "version-mismatch"),
    "list as a body": ((400, [{"message": "bad field", "fieldNames": ["x"]}]), 400, "bad field"),
    "nothing in a list": ((422, []), 422, "422"),
    "text as a body": ((502, b"<html>Bad Gateway</html>"), 502, "502"),
    "empty error": ((500, None), 500, "500"),
    "html in a 200": ((200, b"<html>login</html>"), 200, "not in JSON"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_refusal_says_where_and_why_and_never_the_token(server, failure, caplog):
    answer, status, words = FAILURES[failure]
    server.fail = {"POST /dashboards": answer}
    with caplog.at_level(logging.DEBUG), pytest.raises(GrafanaError, match=words) as refusal:
        do_push(server)
    assert refusal.value.status == status
    shown = "".join(traceback.format_exception(refusal.value)) + repr(refusal.value) + caplog.text
    assert TOKEN not in shown
    assert "POST /dashboards/db" in str(refusal.value)
    server.fail = {}
    do_push(server)
    assert do_push(server) == []


@pytest.mark.parametrize("answer", [(204, None), (200, None), (200, b"  \n")])
def test_an_empty_answer_to_a_write_is_no_failure(server, answer):
    server.fail = {"POST /folders": answer}
    assert Grafana(server.url, TOKEN).send("POST", "/folders", {"uid": "vtoken", "title": "x"}) is None


def test_a_server_that_is_not_there_is_said_without_the_token():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(GrafanaError, match="no answer") as refusal:
        Grafana(url, TOKEN).get("/folders/vtoken")
    assert TOKEN not in "".join(traceback.format_exception(refusal.value))


def test_a_token_that_cannot_be_a_header_is_not_shown(server):
    with pytest.raises(GrafanaError) as refusal:
        Grafana(server.url, f"{TOKEN}\nX: y").get("/folders/vtoken")
    assert TOKEN not in "".join(traceback.format_exception(refusal.value))


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_command_takes_the_token_from_the_environment_and_counts_its_writes(server, monkeypatch, capsys):
    command = ["dashboards", "push", "--url", server.url, "--prometheus-url", "http://127.0.0.1:9090"]
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    assert cli.main(command) == 2
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    assert cli.main([*command, "--dry-run"]) == 0
    assert server.writes == []
    assert cli.main(command) == 0
    assert cli.main(command) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == "0 writes"
    assert "7 writes needed" in shown.out
    assert TOKEN not in shown.out + shown.err

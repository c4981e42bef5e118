"""The ids that vLLM makes of a client's: `History.matching` must find them all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vtoken.core.history import Entry, Event, History

pytestmark = pytest.mark.filterwarnings("ignore")


def engine_ids(external_id: str, n: int) -> list[str]:
    """What becomes of an id in vLLM's input processor and, with n > 1, in its parallel sampling."""
    from vllm import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    request = SimpleNamespace(request_id=external_id, external_req_id=None, params=SamplingParams(n=n))
    InputProcessor.assign_request_id(request)
    if n == 1:
        return [request.request_id]
    parent = ParentRequest(request)
    return [parent.get_child_info(index)[0] for index in range(n)]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("appended", ["", "-0", "-1"], ids=["chat", "first prompt", "second prompt"])
def test_a_clients_id_finds_every_engine_request_and_no_others(appended: str, n: int) -> None:
    mine, other = (engine_ids(f"cmpl-{digits * 8}{appended}", n) for digits in ("01ab", "01ac"))
    history = History()
    for name in mine + other:
        history.record(name, Entry(1, Event.BEGIN))
    assert [name for name, _ in history.matching("cmpl-" + "01ab" * 8)] == mine
    assert [[found for found, _ in history.matching(name)] for name in mine] == [[name] for name in mine]

"""What every worker of ours adds to vLLM's: the substrate's part of a step, and answers for collective_rpc."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vtoken.core.policies import load_policy
from vtoken.core.rows import RequestStart, RowStep, Step
from vtoken.engine import capabilities, session
from vtoken.engine.args import config_of
from vtoken.engine.release import require_release
from vtoken.engine.requests import options_of, prompt_seed
from vtoken.engine.wire import GrantEnvelope

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vtoken.core.config import VTokenConfig
    from vtoken.engine.substrate import Substrate


def _started(scheduled: SchedulerOutput, config: VTokenConfig) -> dict[str, RequestStart]:
    return {
        new.req_id: RequestStart(
            options_of(new.sampling_params, config)[0],
            len(new.prompt_token_ids or ()),
            prompt_seed(new.prompt_token_ids),
        )
        for new in scheduled.scheduled_new_reqs
    }


def step_of(scheduled: SchedulerOutput, config: VTokenConfig) -> Step:
    """vLLM's scheduler output in our terms."""
    tokens = scheduled.num_scheduled_tokens
    rows = [
        RowStep(new.req_id, tuple(new.block_ids[0]), new.num_computed_tokens, tokens[new.req_id], begins=True)
        for new in scheduled.scheduled_new_reqs
    ]
    cached = scheduled.scheduled_cached_reqs
    for index, name in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[index]
        joining = () if blocks is None else tuple(blocks[0])
        rows.append(
            RowStep(
                name, joining, cached.num_computed_tokens[index], tokens[name], begins=name in cached.resumed_req_ids
            )
        )
    return Step(
        tuple(rows),
        ended=tuple(scheduled.finished_req_ids),
        preempted=tuple(scheduled.preempted_req_ids or ()),
        started=_started(scheduled, config),
    )


class SubstrateWorker:
    """Comes before vLLM's worker class in the bases of ours, which puts the substrate in place.

    Attributes:
        substrate: this process's own.
    """

    substrate: Substrate
    vllm_config: Any

    def configured(self, backends: Mapping[AttentionBackendEnum, str]) -> VTokenConfig:
        """Refuse what is not supported, and let attention backends of ours take the place of vLLM's.

        Args:
            backends: vLLM's that are replaced, and the class paths of ours.

        Returns:
            The configuration; nothing in it is refused later.

        Raises:
            ConfigError, UnsupportedError: see capabilities.require; a policy that does not load.
        """
        require_release()  # first: nothing below need exist in another one
        config = config_of(self.vllm_config)
        if config.policy.evicts:
            load_policy(config.policy.policy)  # an unknown name stops here, not at the first decision
        capabilities.require(self.vllm_config)
        for replaced, ours in backends.items():
            register_backend(replaced, ours)
        return config

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """As in vLLM, after the substrate's part of the step."""
        envelope = scheduler_output.kv_connector_metadata
        if isinstance(envelope, GrantEnvelope):
            self.substrate.before_forward(step_of(scheduler_output, self.substrate.config), envelope.grant)
        return super().execute_model(scheduler_output)  # type: ignore[misc]  # vLLM's worker, the next base

    def shutdown(self) -> None:
        """As in vLLM, after running copies have ended."""
        substrate = getattr(self, "substrate", None)
        if substrate is not None:
            substrate.close()
            session.detach(substrate)
        super().shutdown()  # type: ignore[misc]  # vLLM's worker, the next base

    # ---- for collective_rpc ----------------------------------------------------------------------

    def vtoken_check(self) -> dict[str, Any]:
        """Check every invariant from scratch; the worker's statistics. For tests and drills."""
        self.substrate.shard.check_invariants()
        return self.substrate.statistics()

    def vtoken_explain(self, request_id: str) -> dict[str, list[dict[str, Any]]]:
        """See Substrate.explain."""
        return self.substrate.explain(request_id)

    def vtoken_attention(self) -> dict[str, dict[str, Any]]:
        """See Substrate.attention. For tests."""
        return self.substrate.attention()

    def vtoken_rows(self) -> dict[str, dict[str, Any]]:
        """Per request: live token ids, held blocks, tail, row state. For tests."""
        return {
            name: {
                "live": row.table.live_ids().tolist(), "blocks": row.table.blocks.tolist(),
                "tail": row.table.tail, "total": row.table.total, "state": row.table.state.value,
            }
            for name, row in self.substrate.shard.rows.items()
        }  # fmt: skip

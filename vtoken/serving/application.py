"""Puts ingress, replicas and router together as one Serve application."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from vtoken.serving.autoscaling import autoscaling_config
from vtoken.serving.ingress import Ingress
from vtoken.serving.replica import EngineReplica
from vtoken.serving.router import router_kwargs
from vtoken.serving.settings import DeploymentSettings

__all__ = ["Application", "build_application"]

INGRESS_GRACE_S = 3600.0
"""An ingress that is being replaced waits so long for its streams: it costs next to nothing, and nobody else can go on
with a connection."""

ROUTER_CLASS = "vtoken.serving.router:RoomRouter"


def build_application(
    settings: DeploymentSettings, replicas: int | None = None, version: str | None = None
) -> Application:
    """The application graph; starts nothing.

    The router's settings travel as `user_config` of the ingress: what a config file says there, under
    `deployments`, is adopted by living routers. A change of `args` restarts every process.

    Args:
        settings: of the deployment.
        replicas: engine replicas instead of what the settings say, as `num_replicas` under `deployments` in a file.
        version: a name for the settings: deployed again under the same one, processes go on. Config files need none.
    """
    engine, ingress = _engine_deployment(settings), _ingress_deployment(settings)
    if replicas is not None:
        engine = engine.options(num_replicas=replicas)
    if version is not None:
        engine, ingress = (one.options(version=version, _internal=True) for one in (engine, ingress))
    return ingress.bind(engine.bind(settings), settings)


def _engine_deployment(settings: DeploymentSettings) -> Any:
    replicas = settings.replicas
    options: dict[str, Any] = {"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus}
    if replicas.env:
        options["runtime_env"] = {"env_vars": dict(replicas.env)}
    scaling = settings.autoscaling
    count = (
        {"num_replicas": replicas.count}
        if scaling is None
        else {"autoscaling_config": autoscaling_config(scaling, settings)}
    )
    return serve.deployment(
        name="engine",
        **count,
        max_ongoing_requests=replicas.max_ongoing_requests,
        # The gate lets in as many as fit; what it has let in must not be refused here while replicas come and go.
        max_queued_requests=-1,
        ray_actor_options=options,
        health_check_period_s=replicas.health_check_period_s,
        health_check_timeout_s=replicas.health_check_timeout_s,
        graceful_shutdown_timeout_s=replicas.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        # An engine that fails to start fails for a reason that a second attempt rarely cures.
        max_constructor_retry_count=2,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER_CLASS,
            request_router_kwargs=router_kwargs(settings),
        ),
    )(EngineReplica)


def _ingress_deployment(settings: DeploymentSettings) -> Any:
    limits = settings.limits
    return serve.deployment(
        name="ingress",
        num_replicas=limits.ingress_count,
        max_ongoing_requests=limits.ingress_max_ongoing_requests,
        ray_actor_options={"num_cpus": limits.ingress_num_cpus},
        graceful_shutdown_timeout_s=INGRESS_GRACE_S,
        graceful_shutdown_wait_loop_s=0.5,
        user_config={"router": asdict(settings.router)},
    )(Ingress)

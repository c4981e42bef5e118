"""Settings of a deployment: what stands under `args` in a Serve config file, checked before anything starts.

Every error names the key as the operator wrote it, the value and the allowed range. Unknown keys are errors:
a misspelt limit that is silently ignored is worse than a server that does not start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vtoken.core.autoscaling import ScalingRules
from vtoken.core.checks import build, check_int, check_number
from vtoken.core.config import Variant, VTokenConfig
from vtoken.core.errors import ConfigError
from vtoken.core.failover import FailoverRules
from vtoken.core.fleet import FORGET_AFTER_S, FleetRules
from vtoken.core.gate_room import GateRules
from vtoken.core.gates import Gates
from vtoken.core.pressure import PressureThresholds
from vtoken.core.routing import RoutingTunables
from vtoken.core.slo import SloSettings
from vtoken.serving.access_log import AccessLogSettings
from vtoken.serving.keys import AuthSettings
from vtoken.serving.limit_settings import LimitSettings

CONTROLLER_TIMEOUT_S = 1.0
"""Longest wait of a replica for the controller, and before that for the relay of its node."""

RETRY_S = 0.2
"""Pause of a replica after a report that was lost."""


def _text(key: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(key, value, "a non-empty text")


def _section(args: Mapping[str, Any], key: str) -> object:
    """One block of the file; a key without a value is an empty block."""
    found = args.get(key)
    return {} if found is None else found


def _scaling(args: Mapping[str, Any]) -> ScalingRules | None:
    """The `autoscaling` section; beside it `replicas.count` would say a second time how many there are."""
    if args.get("autoscaling") is None:
        return None
    replicas = args.get("replicas")
    if isinstance(replicas, Mapping) and "count" in replicas:
        hint = "`autoscaling.min` and `autoscaling.max` say how many replicas there are."
        raise ConfigError("replicas.count", replicas["count"], "absent beside `autoscaling`", hint)
    return build(ScalingRules, args["autoscaling"], "autoscaling")


ENGINE_KEYS: dict[str, tuple[type, ...]] = {
    "attention_backend": (str,),
    "block_size": (int,),
    "cpu_offload_gb": (int, float),
    "disable_sliding_window": (bool,),
    "distributed_executor_backend": (str,),
    "dtype": (str,),
    "enable_chunked_prefill": (bool,),
    "enable_prefix_caching": (bool,),
    "enforce_eager": (bool,),
    "generation_config": (str,),
    "gpu_memory_utilization": (int, float),
    "kv_cache_dtype": (str,),
    "kv_cache_memory_bytes": (int,),
    "load_format": (str,),
    "max_logprobs": (int,),
    "max_model_len": (int,),
    "max_num_batched_tokens": (int,),
    "max_num_seqs": (int,),
    "num_gpu_blocks_override": (int,),
    "quantization": (str,),
    "revision": (str,),
    "scheduling_policy": (str,),
    "seed": (int,),
    "tokenizer": (str,),
    "trust_remote_code": (bool,),
}
"""Engine arguments that pass through, with their types. What vToken itself sets (worker class, connector) and
what it cannot serve is not among them; the engine checks the ranges."""


def check_engine(raw: object) -> dict[str, Any]:
    """The `engine` mapping, with known keys and right types.

    Raises:
        ConfigError: unknown key or wrong type, named as `engine.key`.
    """
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError("engine", raw, "a mapping of engine arguments")
    for key, value in raw.items():
        kinds = ENGINE_KEYS.get(key)
        if kinds is None:
            raise ConfigError(f"engine.{key}", value, "one of " + ", ".join(sorted(ENGINE_KEYS)))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"engine.{key}", value, "of type " + " or ".join(k.__name__ for k in kinds))
        if isinstance(value, int) and not isinstance(value, bool) and value < 0:
            raise ConfigError(f"engine.{key}", value, "0 or more")
    return dict(raw)


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Shape and life of the engine replicas.

    Attributes:
        count: replicas; each is one engine.
        num_cpus, num_gpus: Ray resources of one replica.
        max_ongoing_requests: most requests inside one replica, running and waiting. Keep it at
            `engine.max_num_seqs` plus a small queue: more wait better in the router, where all replicas are in reach.
        health_check_period_s, health_check_timeout_s: Serve's check that the engine loop lives. A busy engine
            answers it; keep the timeout long, a restart under load makes the load worse.
        stall_timeout_s: it fails, too, when requests run and no step has ended for so long; longer than any step.
        graceful_shutdown_timeout_s: longest wait for running requests at shutdown: the longest allowed stream.
        env: environment variables of the replica process.
    """

    count: int = 1
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_ongoing_requests: int = 64
    health_check_period_s: float = 10.0
    health_check_timeout_s: float = 60.0
    stall_timeout_s: float = 600.0
    graceful_shutdown_timeout_s: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_int("count", self.count, 1, 4096)
        check_number("num_cpus", self.num_cpus, 0.0, 1024.0)
        check_number("num_gpus", self.num_gpus, 0.0, 64.0)
        check_int("max_ongoing_requests", self.max_ongoing_requests, 1, 100_000)
        check_number("health_check_period_s", self.health_check_period_s, 0.5, 3600.0)
        check_number("health_check_timeout_s", self.health_check_timeout_s, 1.0, 3600.0)
        check_number("stall_timeout_s", self.stall_timeout_s, 10.0, 86_400.0)
        check_number("graceful_shutdown_timeout_s", self.graceful_shutdown_timeout_s, 0.0, 86_400.0)
        if not isinstance(self.env, Mapping):
            raise ConfigError("env", self.env, "a mapping of names to texts")
        for name, value in self.env.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ConfigError(f"env.{name}", value, "a text (put numbers in quotes)")


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """When replicas report and when they are given up.

    Attributes:
        busy_s, idle_s: longest time between two heartbeats while something runs or waits, and otherwise. A level
            change, the first and the last running request are reported at once.
        poll_s: how often a router fetches the fleet view while it routes.
        forget_after_s: a silent replica disappears from the view.
        batch_s: the replicas of a node send their heartbeats in one call, for which the first waits so long for the
            others; 0: each sends its own.
    """

    busy_s: float = 0.1
    idle_s: float = 1.0
    poll_s: float = 0.05
    forget_after_s: float = FORGET_AFTER_S
    batch_s: float = 0.0

    def __post_init__(self) -> None:
        check_number("busy_s", self.busy_s, 0.01, 60.0)
        check_number("idle_s", self.idle_s, 0.05, 60.0)
        check_number("poll_s", self.poll_s, 0.01, 60.0)
        check_number("forget_after_s", self.forget_after_s, 1.0, 3600.0)
        check_number("batch_s", self.batch_s, 0.0, 0.05)
        if self.idle_s < self.busy_s:
            raise ConfigError("idle_s", self.idle_s, f"at least busy_s = {self.busy_s}")


DEFAULT_ENGINE_SERVICE = "vtoken.engine.service:EngineService"


@dataclass(frozen=True, slots=True)
class DeploymentSettings:
    """A whole deployment; `from_args` parses it.

    Attributes:
        model: directory of the model (Hugging Face layout), or its name on the hub.
        served_model_name: the name that clients use in `model`.
        engine: engine arguments, see ENGINE_KEYS.
        vtoken: how memory is reclaimed.
        replicas, heartbeat, limits, admission, auth, access_log, pressure: see the classes.
        failover: when a request whose replica was lost goes to another one.
        slo: what clients are promised, for metrics and alerts.
        autoscaling: how many replicas there are, instead of `replicas.count`; None: always that many.
        router: of the routers at start; `deployments: [{name: ingress, user_config: {router: ...}}]` changes them live.
        engine_service: `module:Class` that runs the engine; serving knows it by this name only.
        allow_faults: replicas take orders to falsify their telemetry; for drills.
    """

    model: str
    served_model_name: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    vtoken: VTokenConfig = field(default_factory=VTokenConfig)
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)
    router: RoutingTunables = field(default_factory=RoutingTunables)
    pressure: PressureThresholds = field(default_factory=PressureThresholds)
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    admission: GateRules = field(default_factory=GateRules)
    auth: AuthSettings = field(default_factory=AuthSettings)
    access_log: AccessLogSettings = field(default_factory=AccessLogSettings)
    failover: FailoverRules = field(default_factory=FailoverRules)
    slo: SloSettings = field(default_factory=SloSettings)
    autoscaling: ScalingRules | None = None
    engine_service: str = DEFAULT_ENGINE_SERVICE
    allow_faults: bool = False

    def __post_init__(self) -> None:
        _text("model", self.model)
        _text("served_model_name", self.served_model_name)
        _text("engine_service", self.engine_service)
        if self.engine_service.count(":") != 1:
            raise ConfigError("engine_service", self.engine_service, "of the form package.module:Class")
        if not isinstance(self.allow_faults, bool):
            raise ConfigError("allow_faults", self.allow_faults, "true or false")
        self._check_heartbeats()
        self._check_patience()
        self._check_ingress()

    def _check_heartbeats(self) -> None:
        """Neither a report nor a view that comes as seldom as it may must be too old before the next; nor may ingresses
        forget each other between two looks.
        """
        beats, router = self.heartbeat, self.router
        known = ("poll_s", "the time after which ingresses forget each other", Gates.FORGET_AFTER_S)
        several = [known] if self.limits.ingress_count > 1 else []
        for beat, limit_key, limit_s in (
            ("busy_s", "router.stale_busy_s", router.stale_busy_s),
            ("idle_s", "router.stale_idle_s", router.stale_idle_s),
            ("idle_s", "heartbeat.forget_after_s", beats.forget_after_s),
            ("poll_s", "router.stale_busy_s", router.stale_busy_s),
            *several,
        ):
            value = getattr(beats, beat)
            if value >= limit_s:
                hint = "Reports that come later than that make healthy replicas count as lost."
                raise ConfigError(f"heartbeat.{beat}", value, f"below {limit_key} = {limit_s}", hint)

    def _check_patience(self) -> None:
        """While a restarted controller waits for the first reports, living replicas must not count as none."""
        patience_s, idle_s, batch_s = self.admission.no_replica_s, self.heartbeat.idle_s, self.heartbeat.batch_s
        relay_s = CONTROLLER_TIMEOUT_S if batch_s > 0 else 0.0
        least_s = round(idle_s + CONTROLLER_TIMEOUT_S + RETRY_S + relay_s, 3)
        if patience_s < least_s:
            allowed = f"at least {least_s:g}: heartbeat.idle_s = {idle_s}, {CONTROLLER_TIMEOUT_S} s for a lost report, "
            allowed += f"{RETRY_S} s until the next"
            if relay_s:
                allowed += f", and {relay_s} s for the relay of the node (heartbeat.batch_s = {batch_s})"
            hint = "A controller that has restarted knows no replica before its next report: requests would get 503."
            raise ConfigError("admission.no_replica_s", patience_s, allowed, hint)

    def _check_ingress(self) -> None:
        """Whoever is let in or waits must fit into an ingress: others wait in Serve, without bound or deadline."""
        limits = self.limits
        places = -(-self.most_replicas * self.replicas.max_ongoing_requests // limits.ingress_count)
        least = places + limits.max_queued_requests
        if limits.ingress_max_ongoing_requests < least:
            allowed = f"at least {least}: {places} places of the replicas and max_queued_requests = "
            allowed += str(limits.max_queued_requests)
            hint = "Raise it, or limits.ingress_count."
            value = limits.ingress_max_ongoing_requests
            raise ConfigError("limits.ingress_max_ongoing_requests", value, allowed, hint)

    @property
    def fewest_replicas(self) -> int:
        """Replicas that there are at the least, once all have started."""
        return self.replicas.count if self.autoscaling is None else self.autoscaling.min

    @property
    def most_replicas(self) -> int:
        """Replicas that there are at the most."""
        return self.replicas.count if self.autoscaling is None else self.autoscaling.max

    @property
    def tunables(self) -> RoutingTunables:
        """`router` as it works, which depends on the engines.

        A variant that reclaims nothing has no use for confidence in reclaiming, nor an engine without a prefix cache
        for affinity.
        """
        changed: dict[str, Any] = {}
        if self.vtoken.variant is not Variant.VTOKEN:
            changed["confidence"] = 0.0
        if not self.engine.get("enable_prefix_caching", True):
            changed["affinity_room_share"] = 0.0
        if not self.router.chunk_tokens and self.engine.get("enable_chunked_prefill", True):
            changed["chunk_tokens"] = self.engine.get("max_num_batched_tokens", 0)
        return replace(self.router, **changed)

    @property
    def rules(self) -> FleetRules:
        """Of the controller."""
        return FleetRules(self.pressure, self.tunables.confidence, self.heartbeat.forget_after_s)

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> DeploymentSettings:
        """Parse the `args` of a Serve config file.

        `model` that begins with `.`, `/` or `~` must be an existing directory; `served_model_name` defaults to
        the directory's name.

        Raises:
            ConfigError: missing or unknown key, impossible value.
        """
        if not isinstance(args, Mapping):
            raise ConfigError("args", args, "a mapping")
        known = sorted(f.name for f in fields(cls))
        for key, value in args.items():
            if key not in known:
                raise ConfigError(key, value, "one of " + ", ".join(known))
        model = check_model(args.get("model"))
        return cls(
            model=model,
            served_model_name=args.get("served_model_name", Path(model).name),
            engine=check_engine(args.get("engine")),
            vtoken=VTokenConfig.from_mapping(args.get("vtoken") or {}),
            replicas=build(ReplicaSettings, _section(args, "replicas"), "replicas"),
            router=RoutingTunables.from_mapping(args.get("router") or {}),
            pressure=build(PressureThresholds, _section(args, "pressure"), "pressure"),
            heartbeat=build(HeartbeatSettings, _section(args, "heartbeat"), "heartbeat"),
            limits=build(LimitSettings, _section(args, "limits"), "limits"),
            admission=build(GateRules, _section(args, "admission"), "admission"),
            auth=AuthSettings.from_mapping(_section(args, "auth")),
            access_log=build(AccessLogSettings, _section(args, "access_log"), "access_log"),
            failover=build(FailoverRules, _section(args, "failover"), "failover"),
            slo=build(SloSettings, _section(args, "slo"), "slo"),
            autoscaling=_scaling(args),
            engine_service=args.get("engine_service", DEFAULT_ENGINE_SERVICE),
            allow_faults=args.get("allow_faults", False),
        )


def check_model(raw: object) -> str:
    """The `model` setting as the engine takes it: an absolute directory, or a hub name as it is.

    Raises:
        ConfigError: missing, or a path that is not a model directory.
    """
    if not isinstance(raw, str) or not raw.strip():
        raise ConfigError("model", raw, "a model directory or a hub name", "Build one with `vtoken prepare-model`.")
    path = Path(raw).expanduser()
    looks_like_path = raw.startswith((".", "/", "~")) or path.is_dir()
    if not looks_like_path:
        return raw
    if not (path / "config.json").is_file():
        raise ConfigError("model", raw, "a directory with a config.json", "Build one with `vtoken prepare-model`.")
    return str(path.resolve())

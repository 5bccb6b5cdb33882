"""A whole deployment: checked, planned, started, proven ready, and stopped in order.

Ready means what the gateway says: every engine answers /health and every prefill-decode pair has passed its first handoff.
Knows processes and the gateway's admin listener; how it looks in a terminal is the command line's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdserve.config import http_url
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine.admin_client import AdminClient
from pdserve.engine.credentials import (
    CLIENT_KEY_VARIABLE,
    CLIENT_KEYS_VARIABLE,
    ENGINE_KEY_VARIABLE,
    read_engine_access,
)
from pdserve.errors import ConfigError, EngineError, EngineNotReady, LaunchError
from pdserve.launch import state as states
from pdserve.launch.hardware import probe_hardware
from pdserve.launch.install import find_install
from pdserve.launch.model import check_model
from pdserve.launch.overview import EngineRow, ProcessInfo, engine_rows
from pdserve.launch.paths import cache_dir
from pdserve.launch.plan import (
    EngineCommand,
    parse_context_limit,
    plan_engines,
    planning_notes,
    side_channel_widths,
)
from pdserve.launch.ports import (
    Listener,
    PortPlan,
    PortRange,
    any_free_port,
    check_listeners,
    is_port_free,
    plan_ports,
    port_holder,
)
from pdserve.launch.supervisor import EngineState, Supervisor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from pdserve.config import Config
    from pdserve.engine.credentials import Secret
    from pdserve.launch.hardware import Hardware
    from pdserve.launch.install import EngineInstall
    from pdserve.launch.model import ResolvedModel
    from pdserve.launch.models.source import ModelSource
    from pdserve.launch.supervisor import EngineStatus
    from pdserve.protocol.admin import GatewayStatus

GATEWAY = EngineName("gateway")
_SOUND = frozenset({"proven", "unproven"})
"""States of a pair that `up` serves with: in front of engines that give no proof, it says so and goes on."""
CONFIG_FILE = "config.json"
_LOOK_INTERVAL_S = 0.5
_DRAIN_EXTRA_S = 15.0
"""Beyond `timeouts.shutdown`, for what the gateway does after it: cancel, and release P's blocks."""
_LAST_WORDS_S = 2.0
"""A pair that fails may be an engine that is just dying; its exit says more than the broken connection."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known before anything starts."""

    config: Config
    """With every port that the kernel was to choose chosen."""
    hardware: Hardware
    install: EngineInstall
    source: ModelSource
    ports: PortPlan
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """Every process, as it will be started."""

    config: Config
    model_path: Path
    served_name: str
    engines: tuple[EngineCommand, ...]

    @property
    def gateway_url(self) -> str:
        """Where clients connect."""
        gateway = self.config.gateway
        return http_url(gateway.host, gateway.port, is_tls=gateway.is_tls)

    @property
    def admin_url(self) -> str:
        """Where the operator connects."""
        return http_url(self.config.gateway.admin_host, self.config.admin_port)

    def gateway_command(self, config_path: Path) -> EngineCommand:
        """The gateway runs as a process of its own, supervised like the engines."""
        urls = [word for command in self.engines for word in (f"--{command.address.role}", command.address.url)]
        argv = (sys.executable, "-m", "pdserve", "gateway", "--config", str(config_path), *urls)
        return EngineCommand(EngineAddress(GATEWAY, Role.BOTH, self.gateway_url), argv, (), "", 0)


def check(config: Config, environ: Mapping[str, str]) -> Checked:
    """Find everything that can be found before anything starts. Raises ConfigError."""
    hardware = probe_hardware(environ)
    install = find_install(python=config.engines.python, command=config.engines.command)
    source = check_model(config.model, cache_dir=cache_dir(environ))
    config = _with_chosen_ports(config)
    listeners = [
        Listener(config.gateway.host, config.gateway.port, "gateway.port (--port)"),
        Listener(config.gateway.admin_host, config.admin_port, "gateway.admin_port"),
    ]
    check_listeners(listeners, is_free=is_port_free, holder=port_holder)
    engines = config.engines
    ports = plan_ports(
        side_channel_widths(config),
        http=PortRange(engines.host, engines.first_port, "engines.first_port"),
        side_channel=PortRange(engines.host, engines.first_side_channel_port, "engines.first_side_channel_port"),
        reserved=[listener.port for listener in listeners],
        is_free=is_port_free,
        any_free=any_free_port,
    )
    return Checked(config, hardware, install, source, ports, planning_notes(config, hardware, install))


def plan(checked: Checked, model: ResolvedModel, environ: Mapping[str, str]) -> DeploymentPlan:
    """Turn a checked configuration and a model's folder into command lines. Raises ConfigError."""
    served_name = checked.config.served_model_name or model.served_name
    engines = plan_engines(
        checked.config,
        checked.hardware,
        checked.install,
        model_path=model.path,
        context_limit=_context_limit(model.path),
        served_name=served_name,
        ports=checked.ports,
        preloaded=environ.get("LD_PRELOAD", ""),
        library_path=environ.get("LD_LIBRARY_PATH", ""),
    )
    return DeploymentPlan(checked.config, model.path, served_name, engines)


class Deployment:
    """Runs a plan while it is entered. Stops the gateway first, so that open requests end before their engines do."""

    def __init__(self, plan: DeploymentPlan, folder: Path, environ: Mapping[str, str]) -> None:
        config = plan.config
        log_dir = folder / states.LOG_DIR
        self.plan = plan
        self.log_dir = log_dir
        self._folder = folder
        self._access = read_engine_access(config.engines, environ)
        self._engines = Supervisor(plan.engines, log_dir=log_dir, environ=engine_environ(environ, self._access.key))
        self._gateway = Supervisor(
            [plan.gateway_command(folder / CONFIG_FILE)],
            log_dir=log_dir,
            environ=environ,
            grace_s=config.timeouts.shutdown + _DRAIN_EXTRA_S,
        )
        self._admin = AdminClient(plan.admin_url)
        self._exits: asyncio.Queue[EngineStatus] = asyncio.Queue()
        self._watchers: list[asyncio.Task[None]] = []
        self.gateway_status: GatewayStatus | None = None

    async def __aenter__(self) -> Self:
        config = msgspec.json.format(msgspec.json.encode(self.plan.config))
        (self._folder / CONFIG_FILE).write_bytes(config)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.stop)
            await self._engines.start()
            await self._gateway.start()
            self._watchers = [
                asyncio.create_task(self._follow_exits(supervisor)) for supervisor in (self._engines, self._gateway)
            ]
            undo.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop everything and return when nothing is left. A second call, also during the first, kills."""
        await self._gateway.stop()
        await self._engines.stop()
        for watcher in self._watchers:
            watcher.cancel()
        self._admin.close()

    async def kill(self) -> None:
        """Wait for nobody."""
        await asyncio.gather(self._gateway.stop(0), self._engines.stop(0))

    async def until_ready(self) -> GatewayStatus:
        """Return once every pair has passed its first handoff, proven or not to be proven.

        Raises EngineExited, EngineNotReady after `engines.start_timeout`, and LaunchError for a pair that moves no KV.
        """
        timeout_s = self.plan.config.engines.start_timeout
        try:
            async with asyncio.timeout(timeout_s):
                return await self._until_settled()
        except TimeoutError as exc:
            waiting = [
                f"{status.address.name} is {status.state} ({self._engines.likely_cause(status.address.name)})"
                for status in self._engines.statuses()
                if status.state is not EngineState.READY
            ]
            raise EngineNotReady(
                f"not ready after {timeout_s:g} s: {', '.join(waiting) or 'a pair has not been proven'}. "
                f"The logs are in {self.log_dir}; a large model may need a longer engines.start_timeout"
            ) from exc

    async def next_exit(self) -> EngineStatus:
        """Wait for a process to end by itself."""
        return await self._exits.get()

    def exit_error(self, name: EngineName) -> LaunchError:
        """What a process's end means, with the end of its log."""
        return (self._gateway if name == GATEWAY else self._engines).exit_error(name)

    def has_decode_engine(self) -> bool:
        """Whether anything is left that could answer."""
        return any(
            status.address.role == Role.DECODE and status.state is not EngineState.EXITED
            for status in self._engines.statuses()
        )

    async def rows(self) -> list[EngineRow]:
        """Every engine now."""
        processes = [
            ProcessInfo(
                name=status.address.name,
                role=status.address.role,
                url=status.address.url,
                pid=status.pid,
                state=str(status.state),
            )
            for status in self._engines.statuses()
        ]
        return await engine_rows(processes, self.gateway_status, access=self._access)

    def record_state(self, *, is_ready: bool) -> None:
        """Tell other pdserve commands of this deployment."""
        config = self.plan.config
        record = states.DeploymentState(
            name=config.name,
            model=config.model,
            served_model_name=self.plan.served_name,
            gateway_url=self.plan.gateway_url,
            admin_url=self.plan.admin_url,
            is_ready=is_ready,
            engines=tuple(self._engine_record(command) for command in self.plan.engines),
            log_dir=str(self.log_dir),
            api_keys_file=_absolute(config.gateway.api_keys_file),
            engine_api_key_file=_absolute(config.engines.api_key_file),
            tls_ca=_absolute(config.gateway.tls_ca),
            **states.own_process(),
        )
        states.write_state(self._folder, record)

    async def _follow_exits(self, supervisor: Supervisor) -> None:
        while True:
            self._exits.put_nowait(await supervisor.next_exit())

    async def _until_settled(self) -> GatewayStatus:
        exiting = asyncio.create_task(self.next_exit())
        try:
            while True:
                status = await self._look()
                is_settled = status is not None and _is_settled(status)
                is_sound = status is not None and all(pair.state in _SOUND for pair in status.pairs)
                if status is not None and is_settled and is_sound:
                    return status
                await asyncio.wait([exiting], timeout=_LAST_WORDS_S if is_settled else _LOOK_INTERVAL_S)
                if exiting.done():
                    raise self.exit_error(exiting.result().address.name)
                if status is not None and is_settled:
                    raise _nothing_moves(status)
        finally:
            exiting.cancel()

    async def _look(self) -> GatewayStatus | None:
        """Ask the gateway; None while it does not answer yet."""
        try:
            self.gateway_status = await self._admin.status()
        except EngineError:
            return None
        for info in self.gateway_status.engines:
            if info.state == "ready":
                self._engines.mark(EngineName(info.name), EngineState.READY)
        return self.gateway_status

    def _engine_record(self, command: EngineCommand) -> states.EngineRecord:
        status = self._engines.status(command.address.name)
        return states.EngineRecord(
            name=command.address.name,
            role=command.address.role,
            url=command.address.url,
            pid=status.pid,
            log_path=str(status.log_path),
            side_channel_host=command.side_channel_host,
            side_channel_port=command.side_channel_port,
        )


def engine_environ(environ: Mapping[str, str], key: Secret | None) -> dict[str, str]:
    """What engines start with: their key, which no command line may show, and none of the clients' keys."""
    ours = {CLIENT_KEYS_VARIABLE, CLIENT_KEY_VARIABLE, ENGINE_KEY_VARIABLE}
    kept = {name: value for name, value in environ.items() if name not in ours}
    return kept if key is None else {**kept, "VLLM_API_KEY": key.reveal()}


def _absolute(path: str | None) -> str | None:
    """For commands that run elsewhere."""
    return str(Path(path).absolute()) if path is not None else None


def _is_settled(status: GatewayStatus) -> bool:
    are_ready = all(info.state == "ready" for info in status.engines)
    return are_ready and all(pair.state != "untried" for pair in status.pairs)


def _nothing_moves(status: GatewayStatus) -> LaunchError:
    """Nobody starts a split for engines that do not hand over."""
    pair = next(pair for pair in status.pairs if pair.state not in _SOUND)
    return LaunchError(f"no KV moves from {pair.prefill} to {pair.decode}: {pair.cause}")


def _with_chosen_ports(config: Config) -> Config:
    """Ports that the kernel chooses are chosen here, since three processes must know them."""
    gateway = config.gateway
    port = gateway.port or any_free_port(gateway.host)
    admin_port = config.admin_port or any_free_port(gateway.admin_host)
    if port == admin_port:
        raise ConfigError(f"gateway.port and gateway.admin_port are both {port}; give the admin listener another one")
    return msgspec.structs.replace(config, gateway=msgspec.structs.replace(gateway, port=port, admin_port=admin_port))


def _context_limit(model_path: Path) -> int | None:
    try:
        return parse_context_limit((model_path / "config.json").read_bytes())
    except OSError:
        return None

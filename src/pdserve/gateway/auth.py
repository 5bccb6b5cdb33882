"""Who may ask, and what of a client's credentials goes on to the engines.

A key is known by its name from here on: logs, records and metrics may show that, and nothing else ever shows a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.engine.credentials import (
    CLIENT_KEY_VARIABLE,
    CLIENT_KEYS_VARIABLE,
    EngineAccess,
    Secret,
    checked_key,
    read_engine_access,
    read_private_file,
    trusting,
)
from pdserve.errors import ConfigError, InvalidRequest, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pdserve.config import Config, GatewayConfig
    from pdserve.http.server import Headers, Request

OPEN_PATHS = frozenset({b"/health", b"/healthcheck"})
"""For load balancers, which have no key; they tell nothing but whether the gateway serves."""
CHALLENGE = (b"www-authenticate", b'Bearer realm="pdserve"')
_IS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_logger = logging.getLogger("pdserve.gateway")


@dataclass(frozen=True, slots=True)
class NamedKey:
    """One client's key."""

    name: str
    key: Secret


class ClientKeys:
    """The keys that clients may show; none at all lets everybody in. `reload` reads them again."""

    def __init__(self, read: Callable[[], tuple[NamedKey, ...]]) -> None:
        self._read = read
        self._pepper = secrets.token_bytes(32)
        self._known = self._digested(read())

    @property
    def are_needed(self) -> bool:
        """Whether a client needs a key."""
        return bool(self._known)

    def name_of(self, shown: Iterable[bytes]) -> str | None:
        """The name of the first shown key that is known.

        How long it takes tells nothing of any key: what is looked up is a digest that nobody without the pepper can foresee.
        """
        for key in shown:
            name = self._known.get(self._digest(key))
            if name is not None:
                return name
        return None

    def reload(self) -> None:
        """Read the file again; one that is not right changes nothing, since a gateway without keys would be open."""
        try:
            known = self._digested(self._read())
        except ConfigError as exc:
            _logger.error("the API keys stay as they are: %s", exc)  # noqa: TRY400 - the message says it all
            return
        if self._known and not known:
            _logger.error("the API keys stay as they are: there is none any more, which would let everybody in")
            return
        self._known = known
        _logger.info("API keys read again: %s", ", ".join(sorted(set(known.values()))) or "none")

    def _digested(self, keys: Iterable[NamedKey]) -> dict[bytes, str]:
        """Names by their keys' digests."""
        return {self._digest(entry.key.reveal().encode()): entry.name for entry in keys}

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._pepper, key, hashlib.sha256)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Both sides' keys."""

    clients: ClientKeys
    engines: EngineAccess

    def admit(self, request: Request) -> None:
        """Note the name of the request's key on it. Raises InvalidRequest, 401, for one without a key that is known."""
        if not self.clients.are_needed or (request.path.rstrip(b"/") or b"/") in OPEN_PATHS:
            return
        shown = list(_shown_keys(request.headers))
        request.key_name = self.clients.name_of(shown)
        if request.key_name is None:
            message = "this API key is not known" if shown else "an API key is needed: `Authorization: Bearer KEY`"
            raise InvalidRequest(message, status=401, reason=Reason.UNAUTHORIZED)

    def engine_headers(self, headers: Headers) -> Headers:
        """What of a client's headers its legs carry.

        Its `authorization` where neither side has a key of pdserve's: the engines were then started with the client's.
        In every other case it is a key for the gateway, which no engine may see; EngineClient adds the engines' own.
        """
        if self.clients.are_needed or self.engines.key is not None:
            return []
        for header in headers:
            if header[0] == b"authorization":
                return [header]
        return []


def refuse_browsers(request: Request) -> None:
    """Raises InvalidRequest, 403, for what a web page sent: it must not reach the operator's side through who looks at it.

    A page that anybody wrote may send requests to loopback addresses; its browser says so in these headers.
    """
    site = request.header(b"sec-fetch-site")
    if request.header(b"origin") is not None or site not in {None, b"none"}:
        raise InvalidRequest("web pages have no business here", status=403, reason=Reason.FORBIDDEN)


def read_credentials(config: Config, environ: Mapping[str, str]) -> Credentials:
    """Everything that is configured. Raises ConfigError."""
    clients = ClientKeys(lambda: read_client_keys(config.gateway, environ))
    return Credentials(clients, read_engine_access(config.engines, environ))


def read_client_keys(config: GatewayConfig, environ: Mapping[str, str]) -> tuple[NamedKey, ...]:
    """The environment's and the file's. Raises ConfigError, which never shows a key."""
    keys: list[NamedKey] = []
    listed = environ.get(CLIENT_KEYS_VARIABLE, "").strip()
    if listed:
        for index, entry in enumerate(listed.split(","), 1):
            keys.append(_parse_entry(entry.strip(), where=f"{CLIENT_KEYS_VARIABLE}, entry {index}"))
    if config.api_keys_file is not None:
        keys.extend(_read_keys_file(config.api_keys_file))
    _refuse_shared_keys(keys)
    return tuple(keys)


def own_access(config: GatewayConfig, environ: Mapping[str, str]) -> EngineAccess:
    """How pdserve's own commands ask a gateway: with PDSERVE_API_KEY, else with the first client's key. Raises ConfigError."""
    tls = trusting(config.tls_ca, setting="gateway.tls_ca") if config.tls_ca is not None else None
    own = environ.get(CLIENT_KEY_VARIABLE, "")
    if own:
        return EngineAccess(checked_key(own, where=CLIENT_KEY_VARIABLE), tls)
    keys = read_client_keys(config, environ)
    return EngineAccess(keys[0].key if keys else None, tls)


def _read_keys_file(path: str) -> list[NamedKey]:
    setting = "gateway.api_keys_file"
    lines = read_private_file(Path(path), setting=setting).splitlines()
    keys = [
        _parse_entry(line.strip(), where=f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not keys:
        raise ConfigError(f"{setting} = {path!r}: holds no key; write lines of name:key, or leave the setting out")
    return keys


def _parse_entry(entry: str, *, where: str) -> NamedKey:
    name, colon, key = entry.partition(":")
    if not colon or not _IS_NAME.fullmatch(name):
        raise ConfigError(f"{where}: write name:key, the name in letters, digits, '.', '_' and '-', 64 at most")
    return NamedKey(name, checked_key(key, where=f"{where}, {name}"))


def _refuse_shared_keys(keys: Iterable[NamedKey]) -> None:
    """One name may have two keys, which is how a key is changed; one key with two names could not be told apart."""
    owners: dict[str, str] = {}
    for entry in keys:
        owner = owners.setdefault(entry.key.reveal(), entry.name)
        if owner != entry.name:
            raise ConfigError(f"the API keys of {owner!r} and {entry.name!r} are the same; give each client its own")


def _shown_keys(headers: Headers) -> Iterator[bytes]:
    """`x-api-key` is what Anthropic's clients send."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()
        elif name == b"x-api-key":
            yield value

